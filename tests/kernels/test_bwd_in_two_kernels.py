"""The Hopper backward with modifiers in two kernels (csrc/sm90/bwd_split/kernel.cuh): which calls run it, and
that it is right.

Those are calls above head_dim 128, and in a fixed order also below.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import flash_ext
from flash_ext import masks
from flash_ext._ops.library import _C
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec, default_scale
from tests import compare
from tests.cases import Case, dense, packed
from tests.harness import TARGETS, Target, call, compute, naming, on_targets, run_case, run_cases, truth_of
from tests.inputs import make_inputs
from tests.judge import judge
from tests.qkv import blank_qkv, null_kernels
from tests.reference import attention_reference
from tests.values import values

on_hopper = on_targets("sm90")

# ---- which kernels -------------------------------------------------------------------------------------

HEADS, ROWS, KEYS = 4, 72, 136  # more than kernels for short sequences take
ONE, TWO, OLD = "in one kernel", "in two", "portable"
COMPILED = (64, 128, 192, 256)  # head_dims of the modified kernels
PORTABLE = (64, 96, 128, 192, 256)


def bias(dtype: torch.dtype, rows: int = ROWS, keys: int = KEYS) -> Tensor:
    return torch.zeros(2, HEADS, rows, keys, dtype=dtype)


def half(rows: int = ROWS, keys: int = KEYS) -> Tensor:
    return bias(torch.bfloat16, rows, keys)


def single(rows: int = ROWS, keys: int = KEYS) -> Tensor:
    return bias(torch.float32, rows, keys)


def slopes() -> dict:
    return {"bias": masks.ALiBi(torch.ones(HEADS))}


DROPS, CAPS = {"dropout_p": 0.5}, {"softcap": 2.0}
HIDES = {"mask": torch.ones(2, 1, ROWS, KEYS, dtype=torch.bool)}

OPTIONS: dict[str, Callable[[], dict]] = {
    "mask": lambda: HIDES,
    "mask and sinks": lambda: {**HIDES, "sinks": torch.zeros(HEADS)},
    "slopes": slopes,
    "softcap": lambda: CAPS,
    "softcap and mask": lambda: {**CAPS, **HIDES},
    "chunks": lambda: {"mask": masks.ChunkCausal(32)},
    "dropout": lambda: DROPS,
    "dropout and slopes": lambda: {**DROPS, **slopes()},
    "16 bits": lambda: {"bias": half()},
    "16 bits, dropout": lambda: {"bias": half(), **DROPS},
    "16 bits, one row": lambda: {"bias": half(rows=1)},
    "16 bits, odd rows": lambda: {"bias": half(keys=KEYS + 1)[..., :KEYS]},
    "16 bits, odd start": lambda: {"bias": half(keys=KEYS + 8)[..., 1 : KEYS + 1]},
    "16 bits, turned": lambda: {"bias": half(KEYS, ROWS).mT},
    "32 bits": lambda: {"bias": single()},
    "32 bits, slopes": lambda: values(bias=single(), slopes=torch.ones(HEADS)),
    "32 bits, dropout": lambda: {"bias": single(), **DROPS},
    "32 bits, one row": lambda: {"bias": single(rows=1)},
    "32 bits, odd rows": lambda: {"bias": single(keys=KEYS + 1)[..., :KEYS]},
    "32 bits, every second key": lambda: {"bias": single(keys=2 * KEYS)[..., ::2]},
    "32 bits, turned": lambda: {"bias": single(KEYS, ROWS).mT},
}
PORTABLE_OPTIONS: dict[str, Callable[[], dict]] = {
    "softcap and dropout": lambda: {**CAPS, **DROPS},
    "softcap and slopes": lambda: {**CAPS, **slopes()},
    "softcap and a bias": lambda: {**CAPS, "bias": single()},
    "softcap and a bias of one row": lambda: {**CAPS, "bias": half(rows=1)},
}


def launched(head_dim: int, deterministic: bool, is_packed: bool = False, head_dim_v: int | None = None,
             needs: tuple[int, ...] = (0, 1, 2), **options) -> dict:  # fmt: skip
    """The launch of a backward, left out."""
    qkv = blank_qkv(seqlen_q=ROWS, seqlen_k=KEYS, heads=HEADS, heads_k=HEADS, head_dim=head_dim,
                   head_dim_v=head_dim_v, dtype=torch.bfloat16)  # fmt: skip
    for index in needs:
        qkv[index].requires_grad_()
    with null_kernels():
        if is_packed:
            cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (ROWS, KEYS)]
            rows = [t.flatten(0, 1) for t in qkv]
            out = flash_ext.attention_varlen(*rows, *cu, deterministic=deterministic, **options)
        else:
            out = flash_ext.attention(*qkv, deterministic=deterministic, **options)
        out.sum().backward()
        launch = _C.last_launch()
    assert launch["direction"] == "bwd" and launch["deterministic"] == deterministic
    return launch


def compiled_for(size: int, sizes: tuple[int, ...] = COMPILED) -> int:
    return min(compiled for compiled in sizes if compiled >= size)


def kernel_of(kind: str, size: int, deterministic: bool) -> str:
    """Its recorded name."""
    if kind == ONE:
        return f"bwd_mod_sm90_hd{compiled_for(size)}"
    if kind == TWO:
        return f"bwd_mod_sm90_hd{compiled_for(size)}" + ("_det" if size <= 128 else "")
    return ("bwd_mod+bwd_q_mod" if deterministic else "bwd_mod") + f"_sm80_hd{compiled_for(size, PORTABLE)}"


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize("name", OPTIONS | PORTABLE_OPTIONS)
def test_which_kernels_run(name: str, deterministic: bool) -> None:
    """On both sides of what is compiled; packed sequences run those of dense ones."""
    options = (OPTIONS | PORTABLE_OPTIONS)[name]()
    for head_dim in (64, 72, 128, 136, 192, 200, 256):
        kind = OLD if name in PORTABLE_OPTIONS else TWO if deterministic or head_dim > 128 else ONE
        for is_packed in (False, True) if head_dim % 64 == 0 else (False,):
            launch = launched(head_dim, deterministic, is_packed, **options)
            wanted = kernel_of(kind, head_dim, deterministic)
            assert launch["kernel"] == wanted, f"head_dim {head_dim}, packed {is_packed}"


@pytest.mark.parametrize(
    "sizes", [(100, 100), (132, 132), (192, 196), (255, 255), (33, 33), (64, 60)], ids=str
)
def test_rows_that_tma_cannot_read_are_portable(sizes: tuple[int, int]) -> None:
    for deterministic in (False, True):
        launch = launched(sizes[0], deterministic, head_dim_v=sizes[1], **HIDES)
        assert launch["backend"] == "sm80"
        wanted = f"_mod_sm80_hd{compiled_for(max(sizes), PORTABLE)}"
        assert launch["kernel"].endswith(wanted)


@pytest.mark.parametrize("given", [half(keys=1), single(keys=1)], ids=["16 bits", "32 bits"])
def test_a_bias_of_rows_leaves_dense_calls_with_lse(given: Tensor) -> None:
    for head_dim, deterministic in itertools.product(COMPILED, (False, True)):
        assert "_mod" not in launched(head_dim, deterministic, bias=given)["kernel"]
        wanted = kernel_of(OLD, head_dim, deterministic)
        assert launched(head_dim, deterministic, True, bias=given)["kernel"] == wanted


@pytest.mark.parametrize("name", ["bias", "slopes"])
def test_gradients_of_modifiers_alone_are_portable(name: str) -> None:
    leaf = (single() if name == "bias" else torch.ones(HEADS)).requires_grad_()
    given = {"bias": masks.DenseBias(leaf) if name == "bias" else masks.ALiBi(leaf)}
    for head_dim, deterministic in itertools.product(COMPILED, (False, True)):
        assert launched(head_dim, deterministic, needs=(), **given)["backend"] == "sm80"
        assert launched(head_dim, True, **given)["backend"] == "sm90"


# ---- workspace -----------------------------------------------------------------------------------------


def allocated(head_dim: int, rows: int, deterministic: bool, options: dict) -> list[int]:
    """Bytes of what a backward of 2 sequences allocates beside dq, dk and dv."""
    q, k, v = blank_qkv(
        seqlen_q=rows, heads=HEADS, head_dim=head_dim, dtype=torch.bfloat16, requires_grad=True
    )
    with null_kernels():
        out = flash_ext.attention(q, k, v, deterministic=deterministic, **options)
        dout = torch.ones_like(out)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            grads = torch.autograd.grad(out, (q, k, v), dout)
    events = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    found = [nbytes for nbytes in events if nbytes > 0]
    for t in grads:
        found.remove(t.nbytes)
    return found


def test_the_workspace_is_two_statistics_a_row_and_no_accumulator() -> None:
    """Of whole tiles. In any order up to 128 dq is added up in memory, in front of which they are."""
    for rows, head_dim in itertools.product((147, 320), (64, 128, 160, 192, 256)):
        tile = 48 if head_dim > 192 else 64
        tile_rows = 2 * HEADS * -(-rows // tile) * tile
        assert allocated(head_dim, rows, True, CAPS) == [8 * tile_rows]
        accumulator = 4 * tile_rows * head_dim if head_dim <= 128 else 0
        assert allocated(head_dim, rows, False, CAPS) == [8 * tile_rows + accumulator]


# ---- results -------------------------------------------------------------------------------------------

# Lengths around its tiles: 48 or 64 queries and 64 keys, 128 queries and 64 keys.
LENGTHS = ((47, 64), (300, 97), (48, 65), (65, 193), (129, 300), (49, 127), (127, 48), (95, 129), (193, 63),
           (97, 95), (64, 300), (300, 300), (63, 49), (128, 128))  # fmt: skip
PACKED = (([47, 0, 129, 65], [64, 30, 193, 0]), ([63, 1, 0, 97], [300, 5, 48, 95]),
          ([128, 49, 0], [127, 193, 9]))  # fmt: skip
# The same for biases of 16 bits, whose rows TMA reads where they have a multiple of 8 keys.
EVEN_LENGTHS = ((47, 64), (193, 200), (97, 136), (65, 264), (129, 48), (300, 296))
EVEN_PACKED = (([47, 0, 129, 65], [64, 30, 200, 0]), ([63, 1, 0, 97], [296, 5, 48, 95]))
GROUPS = ((4, 2), (6, 1), (3, 3))
WINDOWS = ((False, (-1, -1)), (True, (-1, -1)), (False, (70, 30)), (True, (100, -1)), (False, (-1, 20)))
SIZES = {64: ((64, None),), 128: ((128, None), (96, None)), 192: ((192, None), (192, 128), (160, 136)),
         256: ((256, None), (200, 248))}  # fmt: skip

EVERYWHERE = (
    "sinks,mask_bhqk", "mask_b1qk", "mask_bhqk_blocky", "mask_11qk_blocky_t", "mask_1hq1", "mask_1hqk_odd",
    "padding", "padding_left,sinks", "padding_right", "bias_bhqk_f32", "bias_1hqk_f32,sinks",
    "bias_b1qk_expanded_f32", "bias_b1qk_odd_f32", "bias_1hqk_inf_f32", "bias_b11k", "bias_bh1k_f32", "alibi",
    "alibi_b,sinks", "alibi,bias_qk_f32,padding", "softcap0.5", "softcap30,mask_bhqk_blocky,sinks",
    "documents", "prefix", "sinktok5", "chunk48", "chunk100,hkeys1", "hrows1", "hrows2_bh", "hkeys2_b",
    "blocks16x16_h", "blocks64x64_bh", "blocks128x128_bh", "blocks48x16_b_t,bias_11qk_f32", "top",
    "drop0.5", "drop0.1,bias_1hqk_f32", "drop0.9,bias_b11k", "drop0.1,padding,alibi,sinks",
)  # fmt: skip
EVEN = ("bias_bhqk", "bias_1hqk", "bias_hqk_inf", "drop0.5,bias_b1qk", "bias_b1qk_expanded,alibi_b")
COPIED = ("bias_11qk_odd", "bias_1hqk_t", "bias_b1qk_skip_f32")  # into aligned rows
NOWHERE = ("softcap5,bias_1hqk_f32", "softcap5,alibi")
WITH_CAUSAL = ("top", "prefix", "chunk48")  # without effect, or nearly so, otherwise


def case_of(index: int, names: str, size: tuple[int, int | None], deterministic: bool) -> Case:
    """Every third one is packed; lengths, groups, windows and types change with the index."""
    mods = tuple(names.split(","))
    causal, window = (True, (40, -1)) if mods[0] == "sinktok5" else WINDOWS[index % len(WINDOWS)]
    num_heads, num_heads_k = GROUPS[index % len(GROUPS)]
    common = {
        "num_heads": num_heads, "num_heads_k": num_heads_k, "head_dim": size[0], "head_dim_v": size[1],
        "causal": causal or mods[0] in WITH_CAUSAL, "window": window, "dlse": index % 4 == 0, "seed": index,
        "dtype": ("bf16", "fp16")[index // 2 % 2], "deterministic": deterministic,
    }  # fmt: skip
    lengths, several = (EVEN_LENGTHS, EVEN_PACKED) if names in EVEN else (LENGTHS, PACKED)
    if index // 3 % 3 == 2:
        lens_q, lens_k = several[index // 9 % len(several)]
        case = packed(lens_q, lens_k, tail=9 * (index % 2), hints=index % 4 < 2, **common)
    else:
        case = dense(2, *lengths[index % len(lengths)], **common)
    return case.replace(mods=mods)


def cases(compiled: int) -> dict[Case, str]:
    """Those of one compiled head_dim with the kernels that are due: each modifier once."""
    found: dict[Case, str] = {}
    index = 7 * compiled // 64  # other shapes for a modifier at every head_dim

    def add(names: str, kind: str, deterministic: bool) -> None:
        nonlocal index
        sizes = SIZES[compiled]
        case = case_of(index, names, sizes[index % len(sizes)], deterministic)
        size = max(case.head_dim, case.dim_v)
        found[case] = kernel_of(kind, size, deterministic)
        index += 1

    for names in (*EVERYWHERE, *EVEN, *COPIED, *NOWHERE):
        add(names, OLD if names in NOWHERE else TWO, compiled <= 128 or index % 2 == 0)
    if compiled <= 128:
        for names in ("bias_bhqk_f32", "bias_b1qk_odd_f32", "bias_qk_f32,alibi,sinks", "bias_1hqk_inf_f32",
                      "bias_1hqk_f32,drop0.1"):  # fmt: skip
            add(names, ONE, False)
    return found


ALL_CASES = {compiled: cases(compiled) for compiled in COMPILED}


@pytest.mark.parametrize("compiled", COMPILED)
def test_the_kernels_that_are_due_are_chosen(compiled: int) -> None:
    """Launches left out: by the strides and addresses that the cases have. With 128 keys more, of which no
    dense call is short; rows keep their alignment."""
    for case, wanted in ALL_CASES[compiled].items():
        longer = case if case.is_packed else case.replace(seqlen_k=case.seqlen_k + 128)
        x = make_inputs(longer, "cpu")
        qkv = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        with null_kernels():
            out, *_ = call(x, TARGETS["sm90"], qkv, backend=None)
            torch.autograd.grad(out, qkv, x.dout)
            launch = _C.last_launch()
        assert launch["direction"] == "bwd" and launch["kernel"] == wanted, case


@pytest.mark.parametrize("compiled", COMPILED)
@on_targets("cpu", "sm90")
def test_gradients_of_every_modifier(target: Target, compiled: int) -> None:
    """Every result against float64, in the kernels that are due."""
    kernels = ALL_CASES[compiled]

    def run(case: Case, target: Target) -> None:
        run_case(case, target)
        with naming(case, target):
            ran = _C.last_launch()["kernel"] if target.device == "cuda" else kernels[case]
            assert ran == kernels[case], f"{ran} ran, {kernels[case]} was due"

    run_cases(list(kernels), target, run, cpu=2)


@on_targets("cpu", "sm90")
def test_nan_in_one_query_row(target: Target) -> None:
    """It reaches dk and dv of all keys that the row sees. The row's maximum, which Hopper's forward takes
    without NaN, is not looked at."""
    cases = [
        dense(2, 100, 130, 4, h_k, d, deterministic=d <= 128, data="nan_row", mods=mods)
        for d in (COMPILED if target.device == "cuda" else COMPILED[:1])
        for h_k in (4, 2)
        for mods in (("alibi",), ("softcap30",), ("drop0.5",))
    ]

    def run(case: Case, target: Target) -> None:
        with naming(case, target):
            x = make_inputs(case, target.device)
            first, second = (compute(x, target) for _ in range(2))
            gradients = {name: first[name] for name in ("out", "dq", "dk", "dv")}
            judge(gradients, second, truth_of(x), case.deterministic)

    run_cases(cases, target, run)


def repeated_cases() -> list[Case]:
    """More items than multiprocessors, drawn and not; above head_dim 128 also where no order is asked for."""
    found = []
    for index, (compiled, deterministic) in enumerate(itertools.product(COMPILED, (True, False))):
        wide = ("bias_b1qk_f32", "drop0.1")
        mods = ("mask_b1qk", "alibi", "sinks", "drop0.1")
        for size in SIZES[compiled]:
            case = dense(4, 700, 900, 8, 4, *size, deterministic=deterministic or compiled <= 128, seed=index)
            some = mods if deterministic or compiled > 128 else wide
            found.append(case.replace(mods=some, needs=("qkv",)))
    return found


@pytest.mark.parametrize("case", repeated_cases(), ids=str)
@on_hopper
def test_gradients_are_the_same_bits_every_time(target: Target, case: Case) -> None:
    with target.active(), naming(case, target):
        x = make_inputs(case, target.device)
        first = compute(x, target)
        size = max(case.head_dim, case.dim_v)
        assert _C.last_launch()["kernel"] == kernel_of(TWO, size, case.deterministic)
        for turn in range(20):
            again = compute(x, target)
            for name, one in first.items():
                assert torch.equal(one, again[name]), f"{name} of run {turn + 2}"


# ---- larger calls --------------------------------------------------------------------------------------

MANY = (12, 1100, 1900, 4, 2)  # 720 items of keys and 432 of queries: several for each of 132 multiprocessors
SAMPLED = (0, 5, 11)  # sequences that are compared with float64


def many_items(head_dim: int, head_dim_v: int | None, name: str) -> tuple[list[Tensor], Modifiers]:
    """dout, q, k, v and the modifiers, which all sequences share."""
    batch, rows, keys, heads, heads_k = MANY
    like = {"device": "cuda", "dtype": torch.bfloat16}
    columns = (head_dim_v or head_dim, head_dim, head_dim, head_dim_v or head_dim)
    places = ((rows, heads), (rows, heads), (keys, heads_k), (keys, heads_k))
    tensors = [torch.randn(batch, *place, width, **like) for place, width in zip(places, columns)]
    mods = {
        "mask": lambda: torch.rand(1, heads, rows, keys, device="cuda") < 0.7,
        "bias": lambda: torch.randn(1, heads, rows, keys, device="cuda"),
        "slopes": lambda: torch.linspace(0.001, 0.1, heads, device="cuda"),
    }
    return tensors, Modifiers(sinks=torch.linspace(-1, 1, heads, device="cuda"), **{name: mods[name]()})


def gradients(path: str, dout: Tensor, qkv: list[Tensor], mods: Modifiers, **options) -> tuple[Tensor, ...]:
    given = values(mask=mods.mask, bias=mods.bias, slopes=mods.slopes) | {"sinks": mods.sinks}
    out, lse = flash_ext.forward(*qkv, backend=path, **given)
    return flash_ext.backward(dout, *qkv, out, lse, backend=path, **given, **options)


def exact(dout: Tensor, qkv: list[Tensor], mods: Modifiers) -> tuple[Tensor, ...]:
    """dq, dk and dv in float64."""
    leaves = [t.double().requires_grad_() for t in qkv]
    spec = AttnSpec(default_scale(qkv[0].shape[-1]), -1, -1)
    out, _ = attention_reference(*leaves, spec, mods=mods)
    return torch.autograd.grad(out, leaves, dout.double())


@pytest.mark.parametrize("name", ["mask", "bias", "slopes"])
@pytest.mark.parametrize("size", [(64, None), (128, None), (192, None), (192, 128), (256, None)], ids=str)
@on_hopper
def test_several_items_of_each_multiprocessor(
    target: Target, size: tuple[int, int | None], name: str
) -> None:
    """Some sequences against float64, and all against the portable kernels, by the gates."""
    (dout, *qkv), mods = many_items(*size, name)
    with target.active():
        found = gradients(target.choice, dout, qkv, mods, deterministic=True)
        assert _C.last_launch()["kernel"] == kernel_of(TWO, max(size[0], size[1] or 0), True)
    portable = gradients("sm80", dout, qkv, mods, deterministic=True)
    for label, ours, theirs in zip(("dq", "dk", "dv"), found, portable, strict=True):
        gate = compare.GATES[torch.bfloat16][label]
        both = dataclasses.replace(gate, rel_l2=2 * gate.rel_l2, worst_row=2 * gate.worst_row,
                                   signed_bias=2 * gate.signed_bias)  # fmt: skip
        errors = compare.measure(ours, theirs.double(), gate.row_floor)
        assert not compare.violations(errors, both), f"{label} beside the portable kernels: {errors}"
    for at in SAMPLED:
        one = [t[at : at + 1] for t in (dout, *qkv)]
        for label, ours, truth in zip(("dq", "dk", "dv"), found, exact(one[0], one[1:], mods), strict=True):
            compare.assert_within_gates(f"{label} of sequence {at}", ours[at : at + 1], truth)
