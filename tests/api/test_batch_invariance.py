"""The batch-invariant mode (flash_ext/_batch_invariance.py): what the host chooses, and results on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._ops.library import _C
from flash_ext.compat.flash_attn import flash_attn_with_kvcache
from tests.harness import Target, on_gpu_paths, on_targets
from tests.qkv import make_qkv, null_kernels
from tests.values import values

BATCHES = (1, 2, 7, 64)
SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    """Whatever a test leaves behind."""
    yield
    _C.set_switch("batch_invariant", None)


# ---- the mode itself -----------------------------------------------------------------------------------


def test_the_mode_is_off_unless_turned_on_and_acts_at_once() -> None:
    assert flash_ext.serving.is_batch_invariant() is False
    for mode in (True, True, False):
        flash_ext.serving.set_batch_invariant(mode)
        assert flash_ext.serving.is_batch_invariant() is mode


def test_as_a_context_manager_it_restores_the_former_mode() -> None:
    with flash_ext.serving.set_batch_invariant(True):
        assert flash_ext.serving.is_batch_invariant()
        with flash_ext.serving.set_batch_invariant(False):
            assert not flash_ext.serving.is_batch_invariant()
            with flash_ext.serving.set_batch_invariant(True):
                assert flash_ext.serving.is_batch_invariant()
            assert not flash_ext.serving.is_batch_invariant()
        assert flash_ext.serving.is_batch_invariant()
        with flash_ext.serving.set_batch_invariant(True):
            pass
        assert flash_ext.serving.is_batch_invariant()
    assert not flash_ext.serving.is_batch_invariant()
    with pytest.raises(ZeroDivisionError), flash_ext.serving.set_batch_invariant(True):
        raise ZeroDivisionError
    assert not flash_ext.serving.is_batch_invariant()


@pytest.mark.parametrize("mode", [1, 0, None, "True", torch.tensor(True)], ids=repr)
def test_only_a_bool_is_taken(mode: object) -> None:
    with flash_ext.serving.set_batch_invariant(True):
        with pytest.raises(TypeError, match="mode must be a bool, got"):
            flash_ext.serving.set_batch_invariant(mode)
        assert flash_ext.serving.is_batch_invariant()


# ---- what is chosen ------------------------------------------------------------------------------------

LENGTHS = ((1, 700), (1, 1024), (1, 9000), (1, 1 << 17), (4, 8192), (16, 1024), (64, 5000), (128, 128),
           (200, 1000), (256, 256), (300, 65536), (512, 512), (1024, 1024), (1024, 16384),
           (2048, 2048))  # fmt: skip
HEADS = ((4, 4), (16, 16), (32, 8), (16, 1), (71, 1))
WINDOWS = ((-1, -1), (-1, 0), (500, 0), (3000, 100))


def choice(direction: str, batch: int, lengths: tuple[int, int], heads: tuple[int, int],
           size: tuple[int, int], window: tuple[int, int], packed: bool, path: str,
           times: int | None = None) -> tuple:  # fmt: skip
    """What can change bits, of a batch of equal sequences; packed ones have these lengths `times` in all."""
    factor = (times or batch) if packed else 1
    plan = _C.plan(
        direction, batch=batch, seqlen_q=factor * lengths[0], seqlen_k=factor * lengths[1], packed=packed,
        num_heads=heads[0], num_heads_k=heads[1], head_dim=size[0], head_dim_v=size[1],
        window_size_left=window[0], window_size_right=window[1], backend=path,
    )  # fmt: skip
    names = ("backend", "kernel", "block_m", "block_n", "splits", "gqa_splits")
    return tuple(plan.get(name) for name in names)


def choices_that_differ(direction: str, packed: bool, path: str) -> list[tuple]:
    shapes = itertools.product(LENGTHS, HEADS, SIZES, WINDOWS)
    return [shape for shape in shapes
            if len({choice(direction, batch, *shape, packed, path) for batch in BATCHES}) > 1]  # fmt: skip


@pytest.mark.parametrize("path", ["sm80", "sm90"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_plans_do_not_depend_on_the_batch(pretended_gpu, direction: str, packed: bool, path: str) -> None:
    with flash_ext.serving.set_batch_invariant(True):
        assert choices_that_differ(direction, packed, path) == []
    # Without the mode some do.
    assert choices_that_differ(direction, packed, path)


@pytest.mark.parametrize("path", ["sm80", "sm90"])
def test_plans_do_not_depend_on_lengths_of_packed_neighbours(pretended_gpu, path: str) -> None:
    totals = [(1, 1, 1), (2, 9, 70000), (3, 400, 400), (64, 64, 64 * 8192), (50, 100_000, 90_000)]

    def kernels(direction: str, size: tuple[int, int]) -> int:
        return len({choice(direction, batch, (q, k), (16, 1), size, (-1, -1), True, path, 1)
                    for batch, q, k in totals})  # fmt: skip

    for direction, size in itertools.product(("fwd", "bwd"), SIZES):
        assert kernels(direction, size) > 1
        with flash_ext.serving.set_batch_invariant(True):
            assert kernels(direction, size) == 1


@pytest.mark.parametrize("path", ["sm80", "sm90"])
def test_parts_of_keys_depend_on_one_key_head_of_one_sequence(pretended_gpu, path: str) -> None:
    def parts(q: int, k: int, heads: int, heads_k: int, window: tuple[int, int] = (-1, -1), **more) -> int:
        plan = _C.plan(
            "fwd", seqlen_q=q, seqlen_k=k, num_heads=heads, num_heads_k=heads_k, head_dim=128, head_dim_v=128,
            window_size_left=window[0], window_size_right=window[1], backend=path, **more,
        )  # fmt: skip
        assert ("split" in plan["kernel"]) or plan["splits"] == 1
        return plan["splits"] if "split" in plan["kernel"] else 0

    before = _C.get_switch("num_sms")
    try:
        with flash_ext.serving.set_batch_invariant(True):
            for sms, (heads, heads_k) in itertools.product((16, 78, 132), ((4, 1), (32, 8), (128, 32))):
                _C.set_switch("num_sms", sms)
                assert [parts(1, k, heads, heads_k) for k in (1023, 1024, 1025, 8192, 1 << 17, 1 << 20)] == [
                    0, 2, 3, 16, 256, 256,
                ]  # fmt: skip
                assert parts(16, 8192, heads, heads_k) == 16 and parts(17, 8192, heads, heads_k) == 0
                assert parts(1, 1 << 17, heads, heads_k, (8191, 0)) == 16  # what the window leaves
                assert parts(64, 64 * 8192, heads, heads_k, packed=True, batch=64) == 0
    finally:
        _C.set_switch("num_sms", before)


def test_masks_of_transformers_are_kept_whatever_others_hide() -> None:
    """A sequence without padding, or of one document, alone has no mask, but beside others that have."""
    from flash_ext.integrations.transformers import _documents, _padding

    tokens, q = torch.ones(1, 8, dtype=torch.int64), torch.zeros(1, 8, 2, 64)
    positions = torch.arange(8)[None]  # layers read the same tensor, which keeps what was found
    assert _padding(tokens, 0, 8) is None and _documents(positions, q, q) is None
    with flash_ext.serving.set_batch_invariant(True):
        padding, documents = _padding(tokens, 0, 8), _documents(positions, q, q)
    assert _documents(positions, q, q) is None
    assert padding is not None and padding.all() and padding.shape == (1, 8)
    assert documents is not None and not documents.any() and documents.shape == (1, 8)


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"bias": masks.ALiBi(torch.ones(4))}, {"sinks": torch.zeros(4)}]
)
def test_modified_forwards_have_the_same_tiles_for_every_batch(pretended_gpu, options: dict) -> None:
    one = make_qkv(
        batch=1, seqlen_q=512, seqlen_k=512, heads=4, heads_k=4, head_dim=128, dtype=torch.bfloat16
    )

    def kernels() -> set[str]:
        found = set()
        for batch in (1, 64):
            flash_ext.forward(*(t.expand(batch, -1, -1, -1) for t in one), **options)
            found.add(_C.last_launch()["kernel"])
        return found

    with null_kernels():
        assert len(kernels()) == (1 if "softcap" in options else 2)
        with flash_ext.serving.set_batch_invariant(True):
            assert kernels() == {"fwd_mod_sm90_hd128_m192"}


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_backwards_are_deterministic_by_the_mode_that_is_on_when_they_run(options: dict) -> None:
    leaves = make_qkv(dtype=torch.bfloat16, head_dim=64, requires_grad=True)

    def is_deterministic(out: Tensor) -> bool:
        out.backward(torch.ones_like(out))
        launch = _C.last_launch()
        assert launch["direction"] == "bwd"
        return launch["deterministic"]

    with null_kernels():
        assert not is_deterministic(flash_ext.attention(*leaves, **options))
        with flash_ext.serving.set_batch_invariant(True):
            assert is_deterministic(flash_ext.attention(*leaves, **options))
            made_inside = flash_ext.attention(*leaves, **options)
        assert not is_deterministic(made_inside)
        made_outside = flash_ext.attention(*leaves, **options)
        with flash_ext.serving.set_batch_invariant(True):
            assert is_deterministic(made_outside)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", ["mask", "blocks", "documents"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_masked_backwards_have_one_kernel_for_every_batch(head_dim: int, name: str, packed: bool) -> None:
    """That of the deterministic mode."""

    def kernel(batch: int) -> str:
        shape = (batch, 160, 4, head_dim)  # nothing reads the values
        qkv = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
        ids = torch.zeros(batch, 160, dtype=torch.int32)
        options = {
            "mask": {"mask": torch.ones(batch, 1, 160, 160, dtype=torch.bool)},
            "blocks": {"mask": masks.BlockMask(torch.rand(batch, 1, 3, 3) < 0.5, 64)},
            "documents": {"mask": masks.Documents(ids.flatten() if packed else ids)},
        }[name]
        if packed:
            cu = torch.arange(0, 160 * batch + 1, 160, dtype=torch.int32)
            out = flash_ext.attention_varlen(*(t.flatten(0, 1) for t in qkv), cu, cu, **options)
        else:
            out = flash_ext.attention(*qkv, **options)
        torch.autograd.grad(out, qkv, torch.empty_like(out))
        return _C.last_launch()["kernel"]

    wanted = f"bwd_mod_sm90_hd{head_dim}"
    with null_kernels():
        assert {kernel(batch) for batch in (1, 32)} == {wanted}
        with flash_ext.serving.set_batch_invariant(True):
            assert {kernel(batch) for batch in (1, 32)} == {wanted + ("_det" if head_dim <= 128 else "")}


def test_query_heads_are_not_divided(pretended_gpu) -> None:
    def parts() -> int:
        return choice("bwd", 1, (64, 2048), (32, 1), (128, 128), (-1, -1), False, "sm90")[-1]

    assert parts() > 1
    with flash_ext.serving.set_batch_invariant(True):
        assert parts() == 1


def test_what_a_call_asks_for_goes_first(pretended_gpu) -> None:
    def asked(direction: str, constraint: str) -> tuple:
        return choice(
            direction, 1, (256, 256), (16, 4), (128, 128), (-1, -1), False, f"sm90 {constraint}"
        )  # fmt: skip

    with flash_ext.serving.set_batch_invariant(True):
        assert asked("fwd", "fwd_block_m=128")[1].endswith("_m128")
        assert asked("fwd", "kv_splits=3")[4] == 3
        assert asked("bwd", "gqa_splits=2")[5] == 2


# ---- results on a GPU ----------------------------------------------------------------------------------

LABELS = ("out", "lse", "dq", "dk", "dv")
# Masks and biases in parts, as tests/values.py names them.
OPTIONS = {
    "full": {}, "causal": {"causal": True}, "window": {"window_size": (100, 30)},
    "softcap": {"softcap": 20.0, "causal": True}, "alibi": {"slopes": True},
    "by distance": {"position": True}, "padding": {"keys": True}, "mask": {"mask": True},
    "sinks": {"sinks": True, "sink_tokens": 3, "chunk": 100}, "blocks": {"blocks": True},
    "blocks cut": {"blocks": True, "elements": True, "causal": True}, "documents": {"documents": True},
}  # fmt: skip
DENSE_ONLY = {"bias": {"bias": True}, "bias of 32 bits": {"bias": True, "wide": True},
              "dropout": {"dropout_p": 0.1}}  # fmt: skip
PARTS = ("keys", "mask", "bias", "blocks", "documents", "slopes", "position", "chunk", "sink_tokens")
PER_SEQUENCE = ("keys", "mask", "bias", "blocks", "documents")


def draw(count: int, rows: int, heads: int, head_dim: int) -> Tensor:
    """(count, rows, heads, head_dim); the first sequence is N(0, 1), others are larger or hold NaN."""
    x = torch.randn(count, rows, heads, head_dim, device="cuda")
    x[2::3] *= 30
    if rows > 0:
        x[1::3, rows // 2] = torch.nan
    return x.bfloat16()


def run_both(target: Target, dout: Tensor, qkv: list[Tensor], **options) -> tuple[Tensor, ...]:
    parts = {name: options.pop(name) for name in PARTS if name in options}
    options |= {"backend": target.path, **values(**parts)}
    out, lse = flash_ext.forward(*qkv, **options)
    return out, lse, *flash_ext.backward(dout, *qkv, out, lse, **options)


def assert_same(got: list[Tensor], alone: list[Tensor], where: str) -> None:
    for label, a, b in zip(LABELS, got, alone):
        # Rows that see no key have lse -inf.
        assert not torch.isnan(b).any(), f"{label} alone, {where}"
        assert torch.equal(a, b), f"{label}, {where}: {int((a != b).sum())} of {a.numel()} elements differ"


def by_distance(heads: int, device: torch.device) -> masks.RelativePosition:
    return masks.RelativePosition(torch.linspace(-1, 1, 32 * heads, device=device).view(heads, 32))


def dense_options(name: str, count: int, q: int, k: int, heads: int) -> dict:
    options = dict((OPTIONS | DENSE_ONLY)[name])
    device = torch.device("cuda")
    if "bias" in options:
        options["bias"] = torch.randn(count, heads, q, k, device=device)
        if not options.pop("wide", False):
            options["bias"] = options["bias"].bfloat16()
    cut = options.pop("elements", False)
    for key, drawn in {
        "slopes": lambda: torch.linspace(0.01, 0.5, heads, device=device),
        "position": lambda: by_distance(heads, device),
        "sinks": lambda: torch.linspace(-1, 1, heads, device=device),
        "keys": lambda: torch.rand(count, k, device=device) < 0.8,
        "mask": lambda: torch.rand(count, 1, q, k, device=device) < 0.8,
        "blocks": lambda: masks.BlockMask(
            torch.rand(count, heads, -(-q // 64), -(-k // 64), device=device) < 0.7, 64,
            torch.rand(count, 1, q, k, device=device) < 0.8 if cut else None),
        "documents": lambda: tuple(
            torch.randint(0, 3, (count, n), device=device, dtype=torch.int32).sort(1)[0] for n in (q, k)),
    }.items():  # fmt: skip
        if options.get(key) is True:
            options[key] = drawn()
    if "dropout_p" in options:
        options["rng"] = flash_ext.dropout_rng(device)
    return options


def of_sequences(options: dict, which: slice | Tensor) -> dict:
    """The options of some sequences."""

    def pick(x: Tensor | tuple[Tensor, ...] | masks.BlockMask) -> object:
        if isinstance(x, tuple):
            return tuple(part[which] for part in x)
        if not isinstance(x, masks.BlockMask):
            return x[which]
        return masks.BlockMask(x.blocks[which], x.block_size,
                                   None if x.elements is None else x.elements[which])  # fmt: skip

    return {key: pick(x) if key in PER_SEQUENCE else x for key, x in options.items()}


def check_dense(target: Target, name: str, lengths: tuple[int, int], heads: tuple[int, int],
                size: tuple[int, int], batches: tuple[int, ...] = BATCHES) -> None:  # fmt: skip
    most, (q, k) = max(batches), lengths
    dout, *qkv = (draw(most, *shape) for shape in (
        (q, heads[0], size[1]), (q, heads[0], size[0]), (k, heads[1], size[0]), (k, heads[1], size[1]),
    ))  # fmt: skip
    options = dense_options(name, most, q, k, heads[0])
    with flash_ext.serving.set_batch_invariant(True):
        alone = None
        for batch in batches:
            own = of_sequences(options, slice(batch))
            got = run_both(target, dout[:batch], [t[:batch] for t in qkv], **own)
            first = [t[:1] for t in got]
            alone = alone or first
            assert_same(first, alone, f"batch {batch}")
            if batch == 1 or name == "dropout":
                continue
            # The same sequence as the last one.
            order = torch.arange(batch - 1, -1, -1, device="cuda")
            turned = of_sequences(options, order)
            got = run_both(target, dout[order], [t[order] for t in qkv], **turned)
            assert_same([t[-1:] for t in got], alone, f"last of {batch}")


@pytest.mark.parametrize("name", ["full", "causal", "window"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@on_gpu_paths
def test_dense_sequences_do_not_see_their_neighbours(
    target: Target, size: tuple[int, int], name: str
) -> None:
    check_dense(target, name, (130, 333), (4, 2), size)
    # Without the mode 4 heads of one sequence have lower tiles, and those of 64 have not.
    check_dense(target, name, (512, 512), (4, 4), size, (1, 3, 64))


@pytest.mark.parametrize(
    "name", [*DENSE_ONLY, *(name for name in OPTIONS if name not in ("full", "causal", "window"))]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@on_gpu_paths
def test_dense_sequences_with_modifiers(target: Target, head_dim: int, name: str) -> None:
    check_dense(target, name, (200, 328), (4, 2), (head_dim, head_dim))
    check_dense(target, name, (512, 512), (4, 4), (head_dim, head_dim), (1, 32))


@pytest.mark.parametrize("lengths", [(1, 700), (1, 5000), (7, 3001)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@on_gpu_paths
def test_few_queries_of_many_keys(target: Target, head_dim: int, lengths: tuple[int, int]) -> None:
    for name, heads in (("full", (8, 2)), ("causal", (4, 4)), ("window", (8, 1))):
        check_dense(target, name, lengths, heads, (head_dim, head_dim))


# Lengths of queries and keys of others: empty, one row, around the tiles, long.
AROUND = [[], [(1, 1)], [(0, 0), (0, 5), (3, 0)],
          [(n, n + d) for n in (63, 64, 65, 127, 129) for d in (-1, 1)],
          [(191, 193), (193, 191), (1500, 1700)], [(60, 70)] * 63]  # fmt: skip


def packed_options(name: str, bounds: list[tuple[int, int]], at: int, seed: int) -> dict:
    """As dense_options(); of sequence ``at``, the first or the last one, all is drawn by its own seed."""
    options = dict(OPTIONS[name])
    longest, totals = [max(side) for side in zip(*bounds)], [sum(side) for side in zip(*bounds)]
    rows, keys = bounds[at]
    own = torch.Generator("cuda").manual_seed(seed)

    def joined(mine: Tensor, others: Tensor) -> Tensor:
        return torch.cat([mine, others] if at == 0 else [others, mine])

    def chances(p: float, *shape: int) -> Tensor:
        return torch.rand(*shape, device="cuda", generator=own) < p

    def by_sequence(mine: Tensor, *shape: int) -> Tensor:
        """(sequence, 1, ...) of what is drawn for the others, too."""
        everything = torch.rand(len(bounds), 1, *shape, device="cuda") < 0.5
        everything[at, 0, : mine.shape[0], : mine.shape[1]] = mine
        return everything

    if options.get("keys"):
        others = torch.rand(totals[1] - keys, device="cuda") < 0.8
        options["keys"] = joined(chances(0.8, keys), others)
    if options.get("mask"):
        options["mask"] = by_sequence(chances(0.8, rows, keys), *longest)
    if options.get("blocks"):
        blocks = by_sequence(chances(0.7, -(-rows // 64), -(-keys // 64)), *(-(-n // 64) for n in longest))
        cut = options.pop("elements", False)
        elements = by_sequence(chances(0.8, rows, keys), *longest) if cut else None
        options["blocks"] = masks.BlockMask(blocks, 64, elements)
    if options.get("documents"):
        options["documents"] = tuple(
            joined(chances(0.3, n).cumsum(0).div(20, rounding_mode="floor").int(),
                   torch.randint(-1, 9, (total - n,), device="cuda", dtype=torch.int32))
            for n, total in zip((rows, keys), totals))  # fmt: skip
    for key in ("slopes", "sinks"):
        if key in options:
            options[key] = torch.linspace(0.01, 0.5, 4, device="cuda")
    if "position" in options:
        options["position"] = by_distance(4, torch.device("cuda"))
    return options


def check_packed(target: Target, name: str, lengths: tuple[int, int], size: tuple[int, int]) -> None:
    rows, heads = (lengths[0], lengths[0], lengths[1], lengths[1]), (4, 4, 2, 2)
    columns = (size[1], size[0], size[0], size[1])
    mine = [torch.randn(n, h, d, device="cuda").bfloat16() for n, h, d in zip(rows, heads, columns)]
    alone = None
    with flash_ext.serving.set_batch_invariant(True):
        for i, around in enumerate(AROUND):
            bounds = [lengths, *around]
            others = [sum(side) for side in zip(*around)] or [0, 0]
            parts = [torch.randn(n, h, d, device="cuda") for n, h, d in
                     zip((others[0], others[0], others[1], others[1]), heads, columns)]  # fmt: skip
            for x in parts:
                x *= 30.0 if i % 2 else 1.0
                x[::50] = torch.nan
            # Before its neighbours, and behind them, at another place in memory and among the tiles.
            for at in (0, -1) if around else (0,):
                bounds = [lengths, *around] if at == 0 else [*around, lengths]
                pairs = [(a, b.bfloat16()) if at == 0 else (b.bfloat16(), a) for a, b in zip(mine, parts)]
                dout, *qkv = (torch.cat(pair) for pair in pairs)
                cu = [torch.tensor([0, *side]).cumsum(0).int().cuda() for side in zip(*bounds)]
                options = packed_options(name, bounds, at, seed=7)
                got = run_both(target, dout, qkv, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options)
                own = []
                for label, x, count in zip(LABELS, got, (lengths[0], *rows)):
                    dim = -1 if label == "lse" else 0
                    own.append(x.narrow(dim, 0 if at == 0 else x.shape[dim] - count, count))
                alone = alone or own
                assert_same(own, alone, f"{'before' if at == 0 else 'behind'} {around}")


@pytest.mark.parametrize("name", ["full", "causal", "window"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@on_gpu_paths
def test_packed_sequences_do_not_see_their_neighbours(
    target: Target, size: tuple[int, int], name: str
) -> None:
    for lengths in ((1, 2000), (100, 333), (450, 450)):
        check_packed(target, name, lengths, size)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("full", "causal", "window")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@on_gpu_paths
def test_packed_sequences_with_modifiers(target: Target, head_dim: int, name: str) -> None:
    check_packed(target, name, (100, 333), (head_dim, head_dim))


@pytest.mark.parametrize("name", ["mask", "blocks cut", "bias of 32 bits"])
@pytest.mark.parametrize("size", [(96, 96), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
@on_targets("sm90")
def test_backwards_in_two_kernels(target: Target, size: tuple[int, int], name: str) -> None:
    """More items than multiprocessors; some sequences see most keys, others hardly any."""
    with target.active():
        check_dense(target, name, (300, 520), (8, 4), size, (1, 5, 24))
        compiled = 128 if size[0] <= 128 else size[0]
        wanted = f"bwd_mod_sm90_hd{compiled}" + ("_det" if compiled == 128 else "")
        assert _C.last_launch()["kernel"] == wanted


DECODING = {
    "full": {}, "causal": {"causal": True}, "window": {"causal": True, "window_size": (200, 0)},
    "padded": {"causal": True, "cache_leftpad": True}, "softcap": {"causal": True, "softcap": 20.0},
    "alibi": {"causal": True, "alibi_slopes": True}, "appended": {"causal": True, "appends": True},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decoding_from_a_cache(head_dim: int, name: str) -> None:
    """Beside entries that are empty, full, longer and shorter, by index and not; new keys written before."""
    most, size, heads = 7, 1500, (8, 2)
    lengths = torch.tensor([1100, 0, 1500, 1, 1490, 700, 64], dtype=torch.int32, device="cuda")
    options = dict(DECODING[name])
    if options.pop("alibi_slopes", False):
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, heads[0], device="cuda")
    pads = torch.tensor([33, 0, 5, 0, 1000, 1, 7], dtype=torch.int32, device="cuda")
    pads = pads if options.pop("cache_leftpad", False) else None
    appends = options.pop("appends", False)
    for rows in (1, 5):
        q = draw(most, rows, heads[0], head_dim)
        caches = [draw(most, size, heads[1], head_dim) for _ in range(2)]
        new = [draw(most, rows, heads[1], head_dim) for _ in range(2)] if appends else []

        def decode(which: Tensor, entries: Tensor | None, q=q, caches=caches, new=new) -> list[Tensor]:
            given = {} if entries is None else {"cache_batch_idx": entries}
            given |= {} if pads is None else {"cache_leftpad": pads[which]}
            count = len(which) if entries is None else most
            return flash_attn_with_kvcache(
                q[which], *(t[:count].clone() for t in caches), *(t[which] for t in new),
                cache_seqlens=lengths[which], return_softmax_lse=True, **given, **options)  # fmt: skip

        with flash_ext.serving.set_batch_invariant(True):
            alone = None
            for batch in (1, 2, most):
                order = torch.arange(batch, device="cuda")
                first = [t[:1] for t in decode(order, None)]
                alone = alone or first
                assert_same(first, alone, f"batch {batch}")
                order = order.flip(0)
                last = [t[-1:] for t in decode(order, order.int())]
                assert_same(last, alone, f"last of {batch}")
