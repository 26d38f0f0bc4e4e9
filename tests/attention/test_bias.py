"""Biases, mask tensors, ALiBi, sinks, softcap, and their gradients."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest, masks
from tests.attention.calls import attend, make_qkv
from tests.cases import Case, dense, packed
from tests.harness import TARGETS, Target, call, naming, on_all_tiles, on_gpu_paths, on_paths, run_cases
from tests.inputs import make_inputs

CAUSAL, TOP_LEFT = masks.Causal(), masks.Causal("top_left")
LARGE = 4096  # rows and keys in tests of memory: their product is far above everything linear


def bias_cases(target: Target) -> list[Case]:
    """Every choice of broadcast dimensions, dense and packed, in the three types."""
    lengths, other_lengths = ((150, 190), (300, 300)) if target.device == "cuda" else ((140, 60), (30, 270))
    cases = []
    for index, picks in enumerate(itertools.product((True, False), repeat=4)):
        dims = "".join(dim if pick else "1" for dim, pick in zip("bhqk", picks))
        common = {"dtype": ("bf16", "fp16")[index % 2], "causal": index % 3 == 0, "seed": index,
                  "deterministic": index % 2 == 1, "dlse": True}  # fmt: skip
        for flags in ("", "_f32"):
            cases.append(dense(3, *lengths, 4, 2, 64, **common, mods=(f"bias_{dims}{flags}",)))
        lens = {"num_heads": 4, "num_heads_k": 2, "head_dim": (64, 128)[index % 2]}
        cases.append(packed([70, 0, 131], [90, 8, 70], **lens, **common, mods=(f"bias_{dims}",)))
        cases.append(
            dense(2, *other_lengths, 2, 1, 128, **common, mods=(f"bias_{dims}", "drop0.5"), needs=("mods",))
        )
    for dims in ("bhqk", "qk", "hqk", "k", "1k", "q1"):
        cases.append(dense(2, 65, 129, 3, 1, 64, mods=(f"bias_{dims}",)))
    return cases


@on_all_tiles
def test_gradient_of_every_broadcast(target: Target) -> None:
    """The gradient of a bias is the sum over its broadcast dimensions, whichever they are."""
    run_cases(bias_cases(target), target, cpu=8)


@on_gpu_paths
def test_gradients_that_many_heads_share(target: Target) -> None:
    """Sums over up to 160 heads, of which CTAs have parts; 130 rows are too many for the short kernels."""
    run_cases(
        [
            dense(40, 130, 150, 4, 2, 64, dlse=True, mods=(f"bias_{dims}",))
            for dims in ("1hq1", "b1q1", "11q1", "111k", "1h11", "1111", "11qk")
        ],
        target,
    )


@on_gpu_paths
def test_gradients_of_a_shared_bias_beside_masks(target: Target) -> None:
    """Masks of keys, of rows and of both; some rows and tiles see nothing. Alone and beside intervals."""
    biases = ("bias_1hqk", "bias_b1qk_f32", "bias_11qk_odd")
    hidden = ("padding", "padding_left", "mask_b1qk", "mask_bhqk_blocky", "mask_1hq1", "mask_11qk")
    shapes = itertools.cycle(((5, 257, 257), (3, 150, 330), (7, 129, 128), (2, 300, 65)))
    cases = []
    for index, mods in enumerate(itertools.product(biases, hidden)):
        common = {"dtype": ("bf16", "fp16")[index // 2 % 2], "causal": index % 3 == 0, "seed": index,
                  "deterministic": index % 2 == 1, "mods": mods}  # fmt: skip
        for head_dim in (32, 64, 128, (192, 136, 256)[index % 3]):
            needs = ("mods",) if head_dim == 32 else ("qkv", "mods")
            cases.append(dense(*next(shapes), 4, 2, head_dim, needs=needs, **common))
    run_cases(cases, target)


@on_paths
def test_any_strides(target: Target) -> None:
    """43 keys, rows off 16 bytes, slices of wider ones; transposed, expanded, every second."""
    names = [f"{kind}_{dims}_{flag}" for kind in ("bias", "mask") for dims in ("1hqk", "b1qk", "qk")
             for flag in ("odd", "t", "skip", "expanded", "odd_skip")]  # fmt: skip
    cases = [
        dense(2, seqlen_q, seqlen_k, 4, 2, 64, causal=causal, seed=seqlen_k, mods=(name,))
        for name in names
        for seqlen_q, seqlen_k, causal in ((43, 43, True), (130, 171, False))
    ]
    run_cases(cases, target, cpu=9)


@on_gpu_paths
def test_an_entry_for_each_score_in_rows_off_16_bytes(target: Target) -> None:
    """Every place of a row behind 16 bytes, last tiles of few rows and keys, one sequence or head, slices."""
    shapes = ((81, 81, 3, 2), (130, 197, 3, 2), (577, 131, 2, 2), (128, 130, 1, 3), (200, 333, 3, 1),
              (9, 1001, 2, 2), (262, 388, 2, 3))  # fmt: skip
    cases = [
        dense(batch, rows, keys, heads, 1, head_dim, seed=index, **options, mods=("bias_bhqk", *more))
        for index, (rows, keys, batch, heads) in enumerate(shapes)
        for head_dim, options, *more in (
            (32, {"causal": True}),
            (64, {}, "drop0.5"),
            (64, {"dtype": "fp16", "deterministic": True}),
            (80, {"dlse": True}),
            (128, {}),
            (128, {"causal": True}, "padding"),
            (128, {}, "softcap5"),
            (192, {}),
            (256, {}),
        )
    ]
    cases += [dense(2, 130, 171, 3, 3, 64, mods=(f"bias_bhqk_{flag}",)) for flag in ("odd", "t", "skip")]
    run_cases(cases, target)


@on_gpu_paths
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_bias_reaches_its_own_head_only(target: Target, head_dim: int) -> None:
    """The last tile of a head's rows holds rows of the next head, which has NaN and infinity here."""
    q, k, v = (torch.randn(2, 197, 3, head_dim, device=target.device).bfloat16() for _ in range(3))
    bias = torch.randn(2, 3, 197, 197, device=target.device).bfloat16()
    spoilt = bias.clone()
    spoilt[0, 1] = torch.nan
    spoilt[1, 0] = torch.inf
    kept = [(0, 0), (0, 2), (1, 1), (1, 2)]
    results = []
    for given in (bias, spoilt):
        inputs = [t.clone().requires_grad_() for t in (q, k, v, given)]
        out = flash_ext.attention(*inputs[:3], bias=inputs[3], backend=target.path)
        _, *grads = torch.autograd.grad(out, inputs, torch.ones_like(out))  # dq is summed in any order
        heads = [t.transpose(1, 2) for t in (out, *grads[:2])] + [grads[2]]
        results.append([t[b, h] for t in heads for b, h in kept])
    for clean, beside in zip(*results):
        assert torch.equal(clean, beside)


@on_paths
def test_only_a_bias_slopes_or_sinks_ask_for_a_gradient(target: Target) -> None:
    shapes = (dense(2, 100, 140, 4, 2, 64, causal=True), packed([70, 0, 33], [80, 9, 64], num_heads_k=1),
              dense(1, 257, 65, 6, 3, 128, dlse=True, deterministic=True))  # fmt: skip
    names = ("bias_bhqk", "bias_11qk_f32", "bias_b11k", "bias_h11_expanded", "distance40", "distance9_shared",
             "alibi", "alibi_b", "sinks")  # fmt: skip
    cases = [case.replace(mods=(name,), needs=("mods",)) for case in shapes for name in names]
    cases += [case.replace(mods=("distance40", "alibi", "sinks"), needs=("mods",)) for case in shapes]
    together = ("bias_1hqk", "alibi", "sinks", "softcap5")
    cases += [case.replace(mods=together, needs=("mods",)) for case in shapes]
    run_cases(cases, target, cpu=8)


@on_paths
def test_types_that_do_not_fit_are_refused(target: Target) -> None:
    """No reinterpretation: a bias of bytes or of the other half precision raises before any launch."""
    q, k, v = (torch.randn(1, 8, 2, 64, device=target.device).to(torch.float16) for _ in range(3))
    ones = torch.ones(8, 8, device=target.device)
    for dtype in (torch.bfloat16, torch.uint8, torch.int32, torch.float64):
        with pytest.raises(TypeError, match="bias must be (torch.float32 or|floating point)"):
            flash_ext.attention(q, k, v, bias=ones.to(dtype), backend=target.path)
    single = flash_ext.attention(q, k, v, bias=ones * 0.5, backend=target.path)
    half = flash_ext.attention(q, k, v, bias=ones.half() * 0.5, backend=target.path)
    torch.testing.assert_close(single, half, rtol=2.0**-10, atol=1e-4)


@on_paths
def test_masks_by_query_head_for_every_group(target: Target) -> None:
    """What is per head counts query heads, with 1 to 8 of them to a key head."""
    cases = [
        dense(2, 66, 100, group * kv_heads, kv_heads, 64, seed=group, mods=(name, *more))
        for group in range(1, 9)
        for kv_heads in (1, 2)
        for name, *more in (
            ("mask_bhqk", "sinks"),
            ("bias_1hqk", "alibi_b"),
            ("hkeys1_h", "hrows1_bh"),
            ("blocks16x16_bh", "sinks"),
        )
    ]  # fmt: skip
    run_cases(cases, target, cpu=8)


@on_paths
def test_order_of_operations(target: Target) -> None:
    """Scale, softcap, bias, mask, and after them sink and dropout: every subset, scores beyond the cap."""
    parts = ("softcap2", "bias_1hqk_f32", "padding", "sinks", "drop0.5")
    cases = [
        dense(2, 90, 130, 4, 2, 64, data="large", seed=7,
              mods=tuple(itertools.compress(parts, on)) or ("maxima",))
        for on in itertools.product((False, True), repeat=len(parts))
    ]  # fmt: skip
    run_cases(cases, target, cpu=8)


@on_paths
def test_sinks_and_groups_that_are_no_power_of_two(target: Target) -> None:
    cases = [
        dense(2, rows, 77, 2 * group, 2, head_dim, causal=causal, mods=("sinks", "alibi"))
        for group in (3, 5, 8)
        for rows in (1, 7, 130)
        for head_dim, causal in ((64, False), (128, True))
    ]
    for lens_q, lens_k in (([5, 0, 90], [0, 4, 70]), ([5, 30], [0, 0]), ([70, 3], [2, 140])):
        case = packed(lens_q, lens_k, num_heads=6, causal=True, dlse=True, tail=4)
        cases.append(case.replace(mods=("sinks",)))
    # Rows without keys give everything to the sink: out is 0, lse the sink, and dlse its gradient.
    cases += [dense(2, 50, n, 4, 2, 64, causal=True, dlse=True, mods=("sinks",)) for n in (0, 20)]
    run_cases(cases, target, cpu=8)


@on_paths
def test_slopes_are_the_bias_they_stand_for(target: Target) -> None:
    """Also one below 0; both alignments, lengths that differ."""
    slopes = masks.ALiBi(torch.tensor([0.5, 0.25, 0.125, -0.0625], device=target.device))
    for rows, keys, mask in ((100, 160, CAUSAL), (160, 100, TOP_LEFT), (65, 65, None)):
        qkv = make_qkv(target, 2, rows, keys, 4, 2, 64, torch.float16)
        bias = slopes.to_dense(rows, keys, top_left=mask is TOP_LEFT)
        found = [attend(target, *qkv, mask=mask, bias=given) for given in (slopes, bias)]
        for tolerance, by_slope, by_bias in zip((2e-3, 1e-5), *found):
            torch.testing.assert_close(by_slope, by_bias, rtol=tolerance, atol=tolerance)


@on_paths
def test_small_masks_ten_times(target: Target) -> None:
    """A (20, 4, 4, 32) mask gives the right results each time, and so does one of a single row."""
    cases = [dense(20, rows, 32, 4, 4, 64, mods=(f"{kind}_bhqk",)) for rows in (4, 1)
              for kind in ("mask", "bias")]  # fmt: skip
    run_cases(cases * (5 if target.device == "cuda" else 1), target)  # each runs it twice


# --------------------------------------------------------------------------------------------------
# Infinities


def rows_with(value: float, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A bias (2, 4, 90, 150) of which every third row holds ``value`` only, and which rows do."""
    generator = torch.Generator(device).manual_seed(3)
    bias = torch.randn(2, 4, 90, 150, device=device, generator=generator).to(dtype)
    rows = torch.arange(90, device=device) % 3 == 1
    bias[:, :, rows] = value
    return bias, rows


@pytest.mark.parametrize("bias_dtype", ["half", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_paths
def test_minus_infinity_hides_a_row_and_the_lowest_number_does_not(
    target: Target, dtype: torch.dtype, bias_dtype: str
) -> None:
    """-inf: out and gradients 0, lse -inf, exactly. finfo.min: a softmax of what is left of the scores.

    Next to 1e38 nothing is left, so out is the mean of v; next to 65504, the largest of fp16, a resolution of
    2^-8 is, so out is that of a call without the bias.

    A limit on GPUs: weights of the backward are exp(score - lse), and next to 1e38 lse has no room for ln n.
    The gradients that such rows themselves pass on are finite, and n times too large; other rows are not
    touched, as is shown with a dout of 0 there.
    """
    device = target.device
    generator = torch.Generator(device).manual_seed(4)
    kind = dtype if bias_dtype == "half" else torch.float32
    q, k, v, dout = (
        torch.randn(2, n, h, 64, device=device, generator=generator).to(dtype).requires_grad_()
        for n, h in ((90, 4), (150, 2), (150, 2), (90, 4))
    )
    dout = dout.detach()
    u = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    found = {}
    for value in (-math.inf, torch.finfo(kind).min):
        bias, rows = rows_with(value, kind, device)
        bias.requires_grad_()
        out, (lse, _) = flash_ext.attention(
            q, k, v, bias=bias, return_aux=AuxRequest(lse=True), deterministic=True, backend=target.path
        )
        grads = torch.autograd.grad(out, [q, k, v, bias], dout, retain_graph=True)
        assert all(bool(t.isfinite().all()) for t in (out, *grads))
        quiet = dout * ~rows.view(1, -1, 1, 1)
        found[value] = (out[:, ~rows], lse[:, :, ~rows], *torch.autograd.grad(out, [q, k, v, bias], quiet))
        if value == -math.inf:
            assert (lse[:, :, rows] == -math.inf).all() and not out[:, rows].any()
            assert not grads[0][:, rows].any() and not grads[3][:, :, rows].any()
        else:
            left = flash_ext.attention(q * (kind == torch.float16), k, v, backend=target.path)[:, rows]
            torch.testing.assert_close(out[:, rows], left, rtol=2 * u, atol=max(2 * u / 8, 5e-3))
            assert (lse[:, :, rows] < -6e4).all()
    hidden, lowest = found.values()
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dbias"), hidden, lowest):
        words = f"{name} of other rows changes with rows of the lowest number: "
        torch.testing.assert_close(a, b, rtol=4 * u, atol=u, msg=lambda text, words=words: words + text)


@on_all_tiles
def test_first_tiles_hidden_by_minus_infinity(target: Target) -> None:
    """The running maximum stays -inf over whole tiles, for some rows for all of them."""
    rows = 130 if target.device == "cuda" else 15
    cases = [
        dense(2, rows, 512, 4, 2, head_dim, causal=causal, dtype=dtype, mods=(f"bias_{dims}_inf{f32}",))
        for head_dim, dtype in ((64, "fp16"), (128, "bf16"), (256, "bf16"))
        for causal in (False, True)
        for dims, f32 in (("1hqk", ""), ("b1qk", "_f32"), ("b11k", "_f32"))
    ]  # fmt: skip
    run_cases(cases, target, cpu=4)


@on_paths
def test_softcap_of_every_size(target: Target) -> None:
    """1e-3 to 1e6 with scores up to 1e5: saturated, in between and as good as off; 0 is off, bit for bit."""
    cases = [
        dense(2, 100, 140, 4, 2, 64, scale=scale, dtype=dtype, dlse=True, mods=(f"softcap{cap}",))
        for cap in ("0.001", "1", "30", "99", "101", "1e6")
        for scale in (None, 5000.0)
        for dtype in ("fp16", "bf16")
    ]  # fmt: skip
    run_cases(cases, target, cpu=8)
    x = make_inputs(dense(2, 100, 140, 4, 2, 64), target.device)
    off, explicit = call(x, target), call(x, target, softcap=float("0"))
    assert all(torch.equal(a, b) for a, b in zip(off, explicit))
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="softcap must be 0"):
            call(x, target, softcap=wrong)


@on_paths
def test_unusual_scales_beside_every_modifier(target: Target) -> None:
    """A scale of 0 meets -inf, a negative one turns the order of scores round, 1e-30 leaves what is added."""
    names = ("padding", "mask_b1qk", "bias_1hqk_inf", "bias_b11k_f32", "blocks16x16_h", "hkeys1_h", "alibi",
             "sinks", "softcap2", "drop0.5", "documents,sinks", "mask_bhqk_blocky,alibi")  # fmt: skip
    cases = [
        dense(2, 100, 140, 4, 2, head_dim, scale=scale, causal=causal, dlse=causal, dtype=dtype,
              mods=tuple(name.split(",")))
        for name in names
        for scale, causal in ((0.0, False), (-0.125, True), (-0.125, False), (1e-30, True))
        for head_dim, dtype in ((64, "bf16"), (128, "fp16"))
    ]  # fmt: skip
    run_cases(cases, target, cpu=9)


# --------------------------------------------------------------------------------------------------
# Determinism and memory

REPEATED = {
    "bias_1hqk": dense(3, 200, 300, 4, 2, 128, deterministic=True),
    "bias_b11k_f32": dense(3, 700, 200, 4, 2, 64, deterministic=True, causal=True),
    "bias_1111_f32": dense(2, 500, 200, 4, 2, 64, deterministic=True),
    "bias_h11_expanded": dense(2, 300, 200, 8, 1, 64, deterministic=True),
    "distance100": dense(3, 500, 400, 4, 2, 128, deterministic=True),
    "distance60_shared": packed([1, 300, 0, 77], [5, 290, 3, 77], num_heads_k=1, deterministic=True),
    "alibi": dense(2, 600, 300, 4, 2, 64, deterministic=True, causal=True),
    "sinks": packed([1, 300, 0, 77], [5, 290, 3, 77], num_heads=4, num_heads_k=2, deterministic=True),
    "drop0.5": dense(2, 257, 300, 4, 2, 64, deterministic=True, dtype="fp16"),
    "mask_b1qk": dense(2, 257, 300, 4, 1, 256, deterministic=True),
}


# One of every kind of modifier: what is in memory, what is computed, what has a gradient of its own.
ONE_OF_EVERY_KIND = (
    "bias_1hqk", "bias_bhqk", "bias_qk_f32", "bias_b11k", "distance128", "mask_b1qk", "padding", "documents",
    "prefix", "sinktok40", "chunk100", "hrows2_bh", "hkeys2_b", "blocks64x128_bh", "top", "alibi", "sinks",
    "softcap30", "drop0.5",
)  # fmt: skip


def in_every_size(head_dim: int) -> list[Case]:
    """Every kind at one head size, dense and packed by turns, in both types, causal or not."""
    packing = {"num_heads": 4, "num_heads_k": 2, "head_dim": head_dim, "deterministic": True}
    cases = []
    for index, name in enumerate(ONE_OF_EVERY_KIND):
        common = {"causal": index % 4 < 2, "dtype": ("bf16", "fp16")[index // 2 % 2], "seed": index}
        case = dense(2, 200, 300, 4, 2, head_dim, deterministic=True, **common)
        if (index + head_dim // 32) % 2:
            case = packed([1, 190, 0, 77], [5, 290, 3, 77], **packing, **common)
        cases.append(case.replace(mods=(name,)))
    return cases


def changes(case: Case, target: Target, repeats: int) -> dict[str, int]:
    """How many 16-bit words of each result changed in any of so many repeats, of those that did."""
    x = make_inputs(case, target.device)
    qkv = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    leaves = {keyword: t.requires_grad_() for keyword, t in x.leaves().items()}

    def results() -> list[Tensor]:
        out, lse, _ = call(x, target, qkv, **x.keywords(leaves))
        grads = torch.autograd.grad(out, [*qkv, *leaves.values()], x.dout)
        return [t.detach().contiguous().view(torch.int16).flatten() for t in (out, lse, *grads)]

    with torch.random.fork_rng():
        first = results()
        expected = torch.cat(first)
        changed = torch.zeros_like(expected, dtype=torch.bool)
        for _ in range(repeats):
            changed |= torch.cat(results()) != expected
    names = ("out", "lse", "dq", "dk", "dv", *(f"gradient of {keyword}" for keyword in leaves))
    counts = [int(part.sum()) for part in changed.split([t.numel() for t in first])]
    return {name: count for name, count in zip(names, counts, strict=True) if count}


@pytest.mark.parametrize("name", REPEATED)
@on_paths
def test_a_thousand_repeats_of_every_gradient_give_the_same_bits(target: Target, name: str) -> None:
    """All results, the gradients of bias, slopes and sinks and dq in the deterministic mode."""
    repeats = 1000 if target.device == "cuda" else 1
    assert changes(REPEATED[name].replace(mods=(name,)), target, repeats) == {}


@pytest.mark.parametrize("dims", ["bh1k", "b11k", "1h1k", "111k"])
@on_gpu_paths
def test_sums_over_rows_repeat_beside_a_dq_that_does_not(target: Target, dims: str) -> None:
    """Not deterministic: one kernel makes dk and the gradient of a bias that rows share."""
    for head_dim, causal in ((64, True), (128, False)):
        case = dense(3, 700, 900, 8, 2, head_dim, causal=causal, deterministic=False)
        modified = case.replace(mods=(f"bias_{dims}",))
        assert set(changes(modified, target, 300)) <= {"dq"}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@on_paths
def test_a_thousand_repeats_of_every_modifier_give_the_same_bits(target: Target, head_dim: int) -> None:
    """Each kind alone, at each compiled head size."""

    def run(case: Case, target: Target) -> None:
        with naming(case, target):
            changed = changes(case, target, 1000 if target.device == "cuda" else 1)
            assert changed == {}, f"16-bit words that changed: {changed}"

    run_cases(in_every_size(head_dim), target, run, cpu=2)


def test_a_repeat_that_changes_a_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, calls = call, []

    def unsteady(*arguments, **keywords):
        out, lse, row_max = steady(*arguments, **keywords)
        calls.append(out)
        return out, lse + 1e-3 * (len(calls) == 3), row_max

    monkeypatch.setattr(sys.modules[__name__], "call", unsteady)
    case = dense(1, 20, 20, 2, 1, 64, deterministic=True, mods=("alibi",))
    assert list(changes(case, TARGETS["cpu"], 3)) == ["lse"]
    assert changes(case, TARGETS["cpu"], 3) == {}


def peak_of(call) -> int:
    """Bytes beyond what was allocated before, at the worst moment of a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.caching
@pytest.mark.parametrize("dims", ["1h11", "b11k", "1hq1", "1111", "11qk", "h11"])
@on_gpu_paths
def test_memory_of_a_bias_gradient_is_that_of_its_result(target: Target, dims: str) -> None:
    """Beyond dq, dk, dv and what is linear in them: the gradient itself, and never one score per pair."""
    name = f"bias_{dims}_f32" if len(dims) == 4 else f"bias_{dims}_expanded"
    case = dense(2, LARGE, LARGE, 4, 2, 64, mods=(name,))
    x = make_inputs(case, target.device)
    qkv = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    leaves = {keyword: t.requires_grad_() for keyword, t in x.leaves().items()}
    keywords = x.keywords(leaves)

    def run() -> None:
        out, *_ = call(x, target, qkv, **keywords)
        torch.autograd.grad(out, [*qkv, *leaves.values()], x.dout)

    run()
    (leaf,) = leaves.values()
    linear = sum(t.numel() * 2 for t in qkv)
    limit = 8 * linear + 2 * leaf.numel() * leaf.element_size()
    scores = 2 * 4 * LARGE**2
    assert limit < scores or dims == "11qk"
    peak = peak_of(run)
    assert peak <= limit, f"{peak} bytes; inputs have {linear}, one byte per score would be {scores}"
