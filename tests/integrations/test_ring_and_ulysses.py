"""flash_ext.distributed: several processes with a share of the sequence each give what one gives with all.

One start of four processes runs everything over gloo, in the group of all four and in two groups of two; on
GPUs the same checks run over NCCL.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import flash_ext
from flash_ext import AuxRequest
from flash_ext import distributed as ring
from flash_ext.distributed import (
    _piece_numbers,
    _Plan,
    _visible_block,
    gather_sequence,
    ring_attention,
    shard_sequence,
    ulysses_attention,
)
from flash_ext.masks import Causal, Documents
from tests import processes
from tests.processes import process_group
from tests.qkv import sdpa_counts

# torch's context_parallel, where this version keeps it.
ENGINE = "torch.distributed.tensor.experimental._context_parallel"
HAS_ENGINE = distributed.is_available() and importlib.util.find_spec(ENGINE) is not None

available = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


# ---- one process -----------------------------------------------------------------------------------------


def test_windows_between_pieces_by_brute_force() -> None:
    """Every row of the parts sees exactly what the window of the whole sequence shows it."""
    numbers = range(-9, 10)
    for offset, rows, keys in itertools.product(numbers, (1, 2, 5), (1, 3, 5)):
        for left, right in itertools.product((-1, 0, 1, 3, 8), (-1, 0, 1, 3, 8)):
            wanted = {
                (i, j) for i in range(rows) for j in range(keys)
                if (left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right)
            }  # fmt: skip
            found = _visible_block(offset, rows, keys, left, right)
            if found is None:
                assert not wanted
                continue
            (r0, r1), (k0, k1), (own_left, own_right) = found
            assert min(own_left, own_right) >= -1
            centre = (k1 - k0) - (r1 - r0)
            assert wanted == {
                (r0 + i, k0 + j) for i in range(r1 - r0) for j in range(k1 - k0)
                if (own_left < 0 or j >= i + centre - own_left)
                and (own_right < 0 or j <= i + centre + own_right)
            }  # fmt: skip


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (-1, 3), (2, 0), (7, -1)], ids=str)
def test_every_pair_is_visited_once(window: tuple[int, int], zigzag: bool) -> None:
    """And none that a window of the whole sequence hides. Order alone makes one visit a share."""
    left, right = window
    share, world = 6, 3
    for rank, source in itertools.product(range(world), repeat=2):
        visits = _Plan(rank, world, share, zigzag, left, right, {}).visits(source)
        seen: list[tuple[int, int]] = []
        for rows, keys, (own_left, own_right) in visits:
            m, n = rows.stop - rows.start, keys.stop - keys.start
            seen += [
                (rows.start + i, keys.start + j) for i in range(m) for j in range(n)
                if (own_left < 0 or j >= i + n - m - own_left)
                and (own_right < 0 or j <= i + n - m + own_right)
            ]  # fmt: skip
        at = [
            [piece * share // len(pieces) + i for piece in pieces for i in range(share // len(pieces))]
            for pieces in (_piece_numbers(r, world, zigzag) for r in (rank, source))
        ]
        wanted = {
            (i, j) for (i, row), (j, key) in itertools.product(*map(enumerate, at))
            if (left < 0 or key >= row - left) and (right < 0 or key <= row + right)
        }  # fmt: skip
        assert len(seen) == len({*seen}) and {*seen} == wanted
        assert len(visits) <= 1 or left >= 0 or right > 0


@pytest.mark.parametrize("function", [ring_attention, ulysses_attention])
def test_without_process_groups_it_is_plain_attention(function: Callable) -> None:
    q, k, v = (torch.randn(2, 12, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    got = function(q, k, v, causal=True, window_size=(5, 0), softcap=3.0)
    expected = flash_ext.attention(q, k, v, causal=True, window_size=(5, 0), softcap=3.0)
    if function is ring_attention:  # its share is in zigzag order: two halves of one piece each
        assert torch.equal(shard_sequence(q), q)
    torch.testing.assert_close(got, expected)


def test_refusals() -> None:
    q, k = torch.randn(1, 6, 3, 8), torch.randn(1, 5, 3, 8)
    with pytest.raises(ValueError, match="same length, got 6 and 5"):
        ring_attention(q, k, k)
    with pytest.raises(ValueError, match="must be even, got 5"):
        ring_attention(k, k, k)
    with pytest.raises(ValueError, match="must divide by 2, got 5"):
        shard_sequence(k)


RINGS_AND_ULYSSES = pytest.mark.parametrize("function", [ring_attention, ulysses_attention])


@RINGS_AND_ULYSSES
@pytest.mark.parametrize("call, error, message", [
    ({"causal": "top"}, TypeError, "causal must be a bool"),
    ({"window_size": (-2, 0)}, ValueError, "window_size must be"),
    ({"window_size": (1, 2, 3)}, TypeError, "window_size must be a pair"),
    ({"scale": float("nan")}, ValueError, "scale must be finite"),
    ({"scale": torch.ones((), requires_grad=True)}, TypeError, "scale must be a number"),
    ({"v": torch.randn(1, 8, 2, 8)}, ValueError, "v must have the sequence length of k, 6, got 8"),
    ({"k": torch.randn(1, 6, 3, 8)}, ValueError, "heads"),
    ({"mask": Documents(torch.zeros(1, 12).int())}, ValueError, r"share\) = \(1, 6\), got \(1, 12\)"),
    ({"mask": Documents(torch.zeros(6).int())}, ValueError, r"\(batch, share\) = \(1, 6\), got \(6,\)"),
    ({"mask": Documents(*torch.zeros(2, 1, 6).int())}, TypeError, "without ids_k, or None, got Documents"),
    ({"mask": Causal()}, TypeError, r"mask must be flash_ext.masks.Documents\(ids\) .*got Causal"),
    ({"mask": torch.zeros(1, 6).int()}, TypeError, "mask must be flash_ext.masks.Documents"),
])  # fmt: skip
def test_what_attention_refuses_is_refused_of_shares(
    function: Callable, call: dict, error: type[Exception], message: str
) -> None:
    given = {"q": torch.randn(1, 6, 4, 8), "k": torch.randn(1, 6, 2, 8), "v": torch.randn(1, 6, 2, 8)} | call
    with pytest.raises(error, match=message):
        function(**given)


@RINGS_AND_ULYSSES
def test_autocast(function: Callable) -> None:
    """As attention does it; the backward runs outside."""
    leaves = [torch.randn(1, 8, h, 16).requires_grad_() for h in (4, 2, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = function(*leaves, causal=True), flash_ext.attention(*leaves, causal=True)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
    dout = torch.randn_like(got)
    for own, wanted in zip(*(torch.autograd.grad(out, leaves, dout) for out in (got, expected))):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, wanted, atol=5e-2, rtol=5e-2)


# ---- what each process runs ------------------------------------------------------------------------------


class World:
    """A group, a device and a type; float64 leaves no room for rounding."""

    def __init__(self, group: Any, device: str) -> None:
        self.group, self.device = group, device
        self.size, self.rank = distributed.get_world_size(group), distributed.get_rank(group)
        self.dtype = torch.float64 if device == "cpu" else torch.bfloat16
        self.generator = torch.Generator().manual_seed(5)

    def draw(self, *shape: int) -> Tensor:
        """The same in every process, rounded to what a GPU takes, in float64."""
        t = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (t if self.device == "cpu" else t.bfloat16()).to(self.device, torch.float64)

    def share(self, t: Tensor, zigzag: bool) -> Tensor:
        t = shard_sequence(t.detach(), self.group, zigzag=zigzag)
        return t.to(self.dtype).requires_grad_() if t.is_floating_point() else t

    def close(self, got: Tensor, expected: Tensor) -> None:
        if self.device == "cpu":
            torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
        else:
            error = (got.double() - expected).norm() / expected.norm()
            assert error < 0.02, f"relative error {error:.3g}"


def check_against_one_process(
    world: World, function: Callable, zigzag: bool, length: int, heads_k: int, head_dim_v: int = 8,
    documents: bool = False, **options: Any,
) -> None:  # fmt: skip
    whole = [world.draw(2, length, h, d) for h, d in ((4, 8), (heads_k, 8), (heads_k, head_dim_v))]
    mine = [world.share(t, zigzag) for t in whole]
    ids = None
    if documents:  # of many lengths, some across pieces
        ids = torch.arange(length).mul(7).div(11, rounding_mode="floor").bitwise_and(3).cumsum(0).div(5).int()
        ids = torch.stack([ids, ids.flip(0)]).to(world.device)
    dout = world.draw(2, length, 4, head_dim_v)

    leaves = [t.requires_grad_() for t in whole]
    expected, lse = _truth(leaves, ids, options)
    with_lse = function is ring_attention
    dlse = world.draw(2, 4, length) if with_lse else torch.zeros(2, 4, length, device=world.device).double()
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    wanted = torch.autograd.grad((expected, lse), leaves, (dout, dlse))

    if ids is not None:
        options["mask"] = Documents(world.share(ids, zigzag))
    calls = {"zigzag": zigzag, "return_aux": AuxRequest(lse=True)} if with_lse else {}
    result = function(*mine, world.group, **options, **calls)
    out = result[0] if with_lse else result
    cut = {"group": world.group, "zigzag": zigzag}
    outs, douts = [out], [shard_sequence(dout, **cut).to(out.dtype)]
    if with_lse:
        outs.append(result[1].lse)
        douts.append(shard_sequence(dlse, dim=2, **cut).to(result[1].lse.dtype))
        world.close(result[1].lse.exp(), shard_sequence(lse.detach(), dim=2, **cut).exp())
    grads = torch.autograd.grad(outs, mine, douts)
    world.close(out, shard_sequence(expected.detach(), **cut))
    for got, own in zip(grads, wanted):
        world.close(got, shard_sequence(own, **cut))
    assert torch.equal(gather_sequence(mine[0], **cut).double(), whole[0])


def _truth(leaves: list[Tensor], ids: Tensor | None, options: dict) -> tuple[Tensor, Tensor]:
    """One process, float64, which runs on the CPU."""
    on_cpu = [t.cpu() for t in leaves]
    mask = None if ids is None else Documents(ids.cpu())
    out, (lse, _) = flash_ext.attention(*on_cpu, mask=mask, return_aux=AuxRequest(lse=True), **options)
    return out.to(leaves[0].device), lse.to(leaves[0].device)


RINGS = [
    {"zigzag": True}, {"zigzag": True, "causal": True}, {"zigzag": False, "causal": True},
    {"zigzag": True, "causal": True, "window_size": (9, 0)},
    {"zigzag": True, "causal": True, "window_size": (40, 0)}, {"zigzag": True, "window_size": (3, 12)},
    {"zigzag": False, "window_size": (-1, 5)}, {"zigzag": True, "window_size": (0, 0)},
    {"zigzag": True, "causal": True, "documents": True},
    {"zigzag": True, "documents": True, "softcap": 2.0, "scale": 0.5},
    {"zigzag": True, "causal": True, "head_dim_v": 12},
    {"zigzag": True, "causal": True, "deterministic": True},
]  # fmt: skip
ULYSSES: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window_size": (5, 2)}, {"causal": True, "documents": True},
    {"softcap": 2.0, "scale": 0.5, "deterministic": True}, {"head_dim_v": 12},
]  # fmt: skip


def check_all(world: World) -> None:
    """Of the numbers of pieces and key heads all with all options on GPUs, in turn on CPUs."""
    every = world.device != "cpu"
    odd = ((3, 2), (5, 1))  # pieces of a share, and key heads
    for i, options in enumerate(RINGS):
        for pieces, heads_k in odd if every else (odd[i % 2],):
            length = 2 * world.size * pieces if options["zigzag"] else world.size * pieces
            check_against_one_process(world, ring_attention, length=length, heads_k=heads_k, **options)
    heads = (4, 2, 1)  # with four processes the last two repeat key heads
    for i, options in enumerate(ULYSSES):
        for heads_k in heads if every else (heads[i % 3],):
            check_against_one_process(world, ulysses_attention, False, 7 * world.size, heads_k, **options)
    with pytest.raises(ValueError, match="use ring_attention"):
        x = torch.randn(1, 2, 3, 8, device=world.device)
        ulysses_attention(x, x, x, world.group)


def check_rounding(world: World) -> None:
    """bfloat16: every result is rounded once, whatever the number of hops.

    On a CPU all but the last step is exact to float32, so nearly every element is the one nearest to the
    truth; with a rounding for each of four hops a third of them is not. On a GPU the kernels round weights as
    well, as those of one process do.
    """
    kinds = [(False, {"causal": True}), (False, {}), (True, {"causal": True, "softcap": 4.0})]
    for documents, options in kinds:
        whole = [t.bfloat16() for t in (world.draw(1, 64 * world.size, h, 16) for h in (4, 2, 2, 4))]
        ids = torch.arange(64 * world.size, device=world.device).div(48).int()[None] if documents else None
        mine = [shard_sequence(t, world.group).requires_grad_() for t in whole]
        shares = {} if ids is None else {"mask": Documents(shard_sequence(ids, world.group))}
        out = ring_attention(*mine[:3], world.group, **options, **shares)
        grads = torch.autograd.grad(out, mine[:3], mine[3].detach())
        got = [gather_sequence(t.detach(), world.group) for t in (out, *grads)]

        on_cpu = [t.double().cpu() for t in whole]
        call = {**options, "mask": None if ids is None else Documents(ids.cpu())}
        expected, lse = flash_ext.forward(*on_cpu[:3], **call)
        # The backward starts from the rounded out, in one process as in several.
        of_out = flash_ext.backward(on_cpu[3], *on_cpu[:3], got[0].double().cpu(), lse, **call)
        for name, result, truth in zip(("out", "dq", "dk", "dv"), got, (expected, *of_out)):
            assert result.dtype == torch.bfloat16
            nearest = truth.bfloat16()
            if world.device == "cpu":
                others = (result != nearest).double().mean()
                assert others < 0.01, f"{name}: {others:.2%} are not the nearest number"
        if world.device != "cpu":
            call["mask"] = None if ids is None else Documents(ids)
            single, lse = flash_ext.forward(*whole[:3], **call)
            alone = [single, *flash_ext.backward(whole[3], *whole[:3], single, lse, **call)]
            for name, result, own, truth in zip(("out", "dq", "dk", "dv"), got, alone, (expected, *of_out)):
                errors = [(t.double().cpu() - truth).norm() for t in (result, own)]
                assert errors[0] < 1.15 * errors[1], (name, errors)


def check_overlap(world: World) -> None:
    """What a process sends next is on its way before it computes, and is waited for afterwards.

    S: something is sent; C: a share is computed; W: something is waited for.
    """
    events: list[str] = []

    def noted(letter: str, function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            events.append(letter)
            return function(*args, **options)

        return call

    patches = pytest.MonkeyPatch()
    for owner, name, letter in (
        (ring, "_pass_on", "S"), (ring, "forward", "C"), (ring, "backward", "C"), (ring._Coming, "wait", "W")
    ):  # fmt: skip
        patches.setattr(owner, name, noted(letter, getattr(owner, name)))
    try:
        mine = [world.share(world.draw(1, 8 * world.size, 2, 8), True) for _ in range(3)]
        out = ring_attention(*mine, world.group)
        between = len(events)
        out.sum().backward()
    finally:
        patches.undo()
    forwards, backwards = "".join(events[:between]), "".join(events[between:])
    assert re.fullmatch(f"(SC+W){{{world.size - 1}}}C+", forwards), forwards
    # Gradients of a share come a step after its keys, while those of the next share are computed.
    assert re.fullmatch(f"SC+SW(SC+WSW){{{world.size - 2}}}C+WSW", backwards), backwards


def check_torchs_engine(world: World) -> None:
    """The ring inside torch's context_parallel, with our implementations of the operators that it calls.

    It hands on merged results to the backward. Here the operators are registered for CPU tensors; on GPUs the
    whole engine runs in run_context_parallel.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as engine

    mesh = DeviceMesh.from_group(world.group or distributed.group.WORLD, "cpu")
    whole = [world.draw(2, 4, 12 * world.size, 16).bfloat16() for _ in range(4)]
    q, k, v, dout = (shard_sequence(t, world.group, dim=2) for t in whole)
    leaves = [t.double().transpose(1, 2).requires_grad_() for t in whole[:3]]
    expected, _ = _truth(leaves, None, {"causal": True})
    wanted = torch.autograd.grad(expected, leaves, whole[3].double().transpose(1, 2))
    before = sdpa_counts()
    torch.ops.flash_ext._set_sdpa("CPU")
    try:
        out, lse, *rest = engine._scaled_dot_product_ring_flash_attention(mesh, q, k, v, is_causal=True)
        grads = engine._scaled_dot_product_ring_flash_attention_backward(
            mesh, dout, q, k, v, out, lse, *rest[:4], 0.0, True, *rest[4:6]
        )
    finally:
        torch.ops.flash_ext._set_sdpa("")
    after = sdpa_counts()
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
        assert after[name][0] - before[name][0] == world.size
    for got, own in zip((out, *grads), (expected, *wanted)):
        own = shard_sequence(own.detach(), world.group).transpose(1, 2)
        error = (got.double() - own).norm() / own.norm()
        assert error < 0.01, f"relative error {error:.3g}"


def run(rank: int, size: int, port: int, backend: str) -> None:
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    with process_group(rank, size, port, backend):
        groups = [None]
        if size == 4:
            pairs = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
            groups.append(pairs[rank // 2])
        for group in groups:
            world = World(group, device)
            check_all(world)
            check_rounding(world)
            check_overlap(world)
            if device == "cpu" and HAS_ENGINE:
                check_torchs_engine(world)


def run_context_parallel(rank: int, size: int, port: int, backend: str) -> None:
    """torch's own engine over our SDPA: it calls the flash operators share by share and merges."""
    with process_group(rank, size, port, backend):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard

        torch.manual_seed(0)
        mesh = init_device_mesh("cuda", (size,))
        whole = [torch.randn(2, 4, 64 * size, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for t in whole:
            distributed.broadcast(t, 0)
        leaves = [t.double().cpu().transpose(1, 2).requires_grad_() for t in whole]
        expected = flash_ext.attention(*leaves, causal=True)
        wanted = torch.autograd.grad(expected.sum(), leaves)
        before = sdpa_counts()
        with flash_ext.enable_sdpa():
            with context_parallel(mesh, buffers=tuple(whole), buffer_seq_dims=(2, 2, 2)):
                mine = [t.detach().requires_grad_() for t in whole]
                out = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True)
                out.sum().backward()
                results = [out.detach(), *(t.grad for t in mine)]
            gathered = context_parallel_unshard(mesh, results, [2] * 4)
        after = sdpa_counts()
        for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
            assert after[name][0] > before[name][0] and after[name][1] == before[name][1]
        for got, own in zip(gathered, (expected, *wanted)):
            error = (got.double().cpu().transpose(1, 2) - own).norm() / own.norm()
            assert error < 0.02, f"relative error {error:.3g}"


# ---- several processes -----------------------------------------------------------------------------------


@available
@processes.forked
@pytest.mark.slow
def test_four_processes_and_two_pairs() -> None:
    processes.start(run, 4, "gloo")


@available
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("function", [run, run_context_parallel])
@pytest.mark.parametrize("size", [2, 4])
def test_on_gpus(size: int, function: Callable) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    if not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    processes.start(function, size, "nccl", on_gpus=True)
