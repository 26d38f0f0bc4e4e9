"""fp8 attention at the edges: factors near 0, rows of no sequence, strides, few keys, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest, attention_varlen
from flash_ext._cpu import fp8
from flash_ext._ops.library import _C
from flash_ext.fp8 import Fp8Inputs, attention_fp8, quantize_fp8
from tests import fp8_kernel
from tests.covering import pairs_on_cpu
from tests.fp8.test_fp8 import bounds_of, check, error_of, make, rows_of, spec_of, truth
from tests.qkv import CPU_AND_HOPPER, ON_HOPPER, null_kernels


def e4m3(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(fp8.E4M3) for t in tensors)


# ---- factors near 0 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_a_factor_of_0(device: str, name: str) -> None:
    zero = torch.zeros((), device=device)
    x = Fp8Inputs.of(*e4m3(*make(300, 300, device=device)), **{name: zero})
    check(x, causal=True)
    check(x, window_size=(40, 3))


# The kernel of 64 has scores in float32, that of 96 in float16.
SCORES = pytest.mark.parametrize("dim", [64, 96])


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@SCORES
def test_a_product_of_factors_that_underflows(device: str, dim: int) -> None:
    q, k, v = make(300, 300, dim=dim, device=device)
    check(quantize_fp8(q * 1e-20, k * 1e-23, v), causal=True)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@SCORES
def test_a_large_factor_beside_a_small_one(device: str, dim: int) -> None:
    """Their product is an ordinary number."""
    q, k, v = make(300, 300, dim=dim, device=device)
    check(quantize_fp8(q * 1e-20, k * 1e20, v), causal=True)


def beyond_float16(device: str) -> Fp8Inputs:
    """Products of factors that are. Rows but one see negative scores alone, which infinity would hide."""
    q, k, v = make(200, 200, dim=96, device=device, dtype=torch.float16)
    for t, sign in ((q, 1), (k, -1)):
        t.zero_()[..., 0] = sign * 12000 * 2.0**-13
        t[:, 127, :, 0] = sign * 12000
    return quantize_fp8(q, k, v, smooth_k=False)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_a_scale_that_float16_does_not_have(device: str) -> None:
    x = beyond_float16(device)
    factors = x.q_descale[0, 0, 0] * x.k_descale[0, 0, 0]
    assert factors * 96**-0.5 * math.log2(math.e) > torch.finfo(torch.float16).max
    check(x)


def test_the_model_with_a_scale_that_float16_does_not_have() -> None:
    x = beyond_float16("cpu")
    out, lse = fp8_kernel.forward(x, spec_of(x.q))
    want, want_lse = truth(x)
    assert error_of(out, want) < 0.035 and (lse.double() - want_lse).abs().max() < 0.01


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_negative_factors_are_refused_on_the_cpu(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be 0 or more"):
        Fp8Inputs.of(*e4m3(*make()), **{name: -torch.ones(())})


@pytest.mark.parametrize("device", CPU_AND_HOPPER[1:])
def test_negative_factors_show_on_a_gpu(device: str) -> None:
    x = Fp8Inputs.of(*e4m3(*make(device=device)), k_descale=-torch.ones((), device=device))
    assert attention_fp8(x).isnan().all()


# ---- rows of no sequence, strides ------------------------------------------------------------------------


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_rows_before_the_first_sequence(device: str) -> None:
    """They have no column of v: the first key keeps its own."""
    q, k, v = e4m3(*make(80, 90, packed=True, device=device))
    x = Fp8Inputs.of(q, k, v, **bounds_of([4, 80], [7, 90], device=device))
    bare = Fp8Inputs.of(q[4:], k[7:], v[7:], **bounds_of([0, 76], [0, 83], device=device))
    assert torch.equal(rows_of(x)[7:].view(torch.uint8), v[7:].view(torch.uint8))
    assert torch.equal(attention_fp8(x)[4:], attention_fp8(bare))
    used = fp8.column_of_rows(90, x.cu_seqlens_k, x.v.device)[7:]
    rest = torch.ones(x.v.shape[-1], dtype=torch.bool, device=device).index_fill(0, used, False)
    assert not x.v.view(torch.uint8)[..., rest].any()


def test_each_packed_row_has_a_column_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows that matter never go to one place, where a GPU would take either."""
    seen: list[Tensor] = []
    original = Tensor.index_copy_

    def spy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        seen.append(index)
        return original(self, dim, index, source)

    monkeypatch.setattr(Tensor, "index_copy_", spy)
    _, _, v = e4m3(*make(80, 90, packed=True))
    fp8.transpose_values(v, torch.tensor([7, 40, 90], dtype=torch.int32))
    (index,) = seen
    assert len(index[7:].unique()) == 83
    assert not torch.isin(index[:7], index[7:]).any()


def test_results_outside_sequences_are_written() -> None:
    """By the operator for GPUs, whose kernels are left out here: the rest is all that they do not write."""
    tensors = make(100, 100, packed=True)
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # new tensors then hold NaN
    try:
        with null_kernels():
            x = quantize_fp8(*tensors, **bounds_of([10, 50, 90], [10, 50, 90]))
    finally:
        torch.set_deterministic_debug_mode(before)
    for t in (x.q, x.k, x.v):
        assert not t.view(torch.uint8).any()
    for t in (x.v_offset, x.k_offset, x.row_offset):
        assert not t.any()


def heads_first(device: str = "cpu") -> list[Tensor]:
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in make(device=device)]


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("granularity", ["block", "head"])
def test_heads_first(granularity: str, smooth: bool) -> None:
    x = quantize_fp8(*heads_first(), granularity=granularity, smooth_k=smooth, smooth_v=smooth)
    want = quantize_fp8(*make(), granularity=granularity, smooth_k=smooth, smooth_v=smooth)
    for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale", "v_offset", "k_offset", "row_offset"):
        a, b = getattr(x, name), getattr(want, name)
        assert (a is None and b is None) or a.stride() == b.stride(), name


def test_the_operator_is_sound_for_heads_first() -> None:
    arguments = (*heads_first(), None, None, None, True, True, True, False, False)
    torch.library.opcheck(torch.ops.flash_ext.quantize_fp8.default, arguments, test_utils="test_faketensor")


# ---- gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (20, -1)}], ids=str)
def test_gradients_of_packed_sequences(device: str, options: dict) -> None:
    tensors = [t.requires_grad_() for t in make(190, 300, packed=True, device=device)]
    bounds = bounds_of([3, 80, 80, 190], [5, 105, 140, 290], device=device)
    weight = torch.randn(190, 4, 64, device=device)
    grads = []
    for out in (
        attention_fp8(quantize_fp8(*tensors, **bounds), **options),
        attention_varlen(*tensors, *bounds.values(), **options),
    ):
        grads.append(torch.autograd.grad((out.float() * weight).sum(), tensors))
    for a, b in zip(*grads, strict=True):
        assert b.any() and error_of(a, b.double().cpu()) < 1e-2


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_gradients_of_tensors_without_unit_stride(device: str) -> None:
    """And of a result whose gradient has none."""
    q, k, v = (t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in make(device=device))
    tensors = [t.requires_grad_() for t in (q, k, v)]
    assert all(t.stride(-1) != 1 for t in tensors)
    plain = [t.detach().contiguous().requires_grad_() for t in tensors]
    got = torch.autograd.grad(attention_fp8(quantize_fp8(*tensors), causal=True).sum(), tensors)
    want = torch.autograd.grad(flash_ext.attention(*plain, causal=True).sum(), plain)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).abs().max() <= 0.02 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("name", ["q", "k", "v", "q_descale", "k_descale", "v_descale"])
def test_tensors_in_fp8_that_require_a_gradient(name: str) -> None:
    tensors = dict(zip("qkv", e4m3(*make()), strict=True)) | {f"{x}_descale": torch.ones(()) for x in "qkv"}
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"{name} requires a gradient.*detach it, or call\s+quantize_fp8"):
        Fp8Inputs.of(**tensors)
    with torch.no_grad():
        attention_fp8(Fp8Inputs.of(**tensors))


# ---- means ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_rounding_leaves_the_mean_of_v(device: str, packed: bool, used: bool) -> None:
    """What the numbers stand for has the mean that v has: rounding alone would move it by 5e-4 here."""
    q, k, v = make(130, 1500, packed=packed, device=device)
    bounds = bounds_of([0, 60, 130], [0, 1000, 1500], device=device) if packed else {}
    lengths = {"seqused_k": torch.tensor([900, 333], dtype=torch.int32, device=device)} if used else {}
    x = quantize_fp8(q, k, v, **bounds, **lengths)
    rows = {True: ([900, 333] if used else [1000, 500]), False: ([900, 333] if used else [1500, 1500])}[
        packed
    ]

    def means(t: Tensor) -> Tensor:
        t = t.double().cpu()
        if packed:  # one mean for all
            return torch.cat([t[: rows[0]], t[1000 : 1000 + rows[1]]]).mean(0)
        return torch.stack([entry[:n].mean(0) for entry, n in zip(t, rows, strict=True)])

    assert (means(x.dequantize(torch.float32)[2]) - means(v)).abs().max() < 1e-5


# ---- masks, lengths, values ------------------------------------------------------------------------------


@pairs_on_cpu(
    gpu=ON_HOPPER,
    mode=["fp8", "mixed"],
    rows=[300, 1100],
    dim=[64, 128],
    options=[
        {"window_size": (70, -1)},
        {"window_size": (130, 0)},
        {"window_size": (300, -1), "causal": True},
    ],
)
def test_left_windows(device: str, mode: str, rows: int, dim: int, options: dict) -> None:
    rows = rows if device == "cuda" else min(rows, 420)
    check(quantize_fp8(*make(rows, rows, dim=dim, device=device), mode=mode), **options)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("mode", ["fp8", "mixed"])
@pytest.mark.parametrize("packed", [False, True])
@SCORES
def test_few_keys(device: str, packed: bool, mode: str, dim: int) -> None:
    """float16 rounds a weight of 26 by 0.0014 of itself at most: lse is off by as much."""
    for keys in (1, 2, 7, 8, 9, 15, 16, 17, 23, 24):
        bounds = bounds_of([0, 60, 130], [0, keys, 2 * keys], device=device) if packed else {}
        tensors = make(130, 2 * keys if packed else keys, packed=packed, dim=dim, device=device)
        lse_gate = 3e-3 if dim == 96 else 1e-3
        check(quantize_fp8(*tensors, mode=mode, **bounds), gate=0.06, lse_gate=lse_gate)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@SCORES
def test_a_key_that_is_not_finite(device: str, bad: float, dim: int) -> None:
    """Makes NaN of its head with a mean, without one of the rows that see its block."""
    q, k, v = make(300, 300, dim=dim, device=device)
    k[0, 290, 1, 5] = bad
    out = attention_fp8(quantize_fp8(q, k, v), causal=True)
    assert out[0, :, 2:].isnan().all() and out[0, :, :2].isfinite().all() and out[1].isfinite().all()
    out = attention_fp8(quantize_fp8(q, k, v, smooth_k=False), causal=True)
    assert out[0, 290:, 2:].isnan().all() and out[0, :, :2].isfinite().all() and out[1].isfinite().all()
    assert out[0, :128, 2:].isfinite().all()


# ---- refused ---------------------------------------------------------------------------------------------


def test_aux_without_lse() -> None:
    _, aux = attention_fp8(quantize_fp8(*make(40, 40)), return_aux=AuxRequest())
    assert aux.lse is None and aux.max_scores is None


def test_packed_advice_names_attention_varlen() -> None:
    x = quantize_fp8(*make(40, 40, packed=True), **bounds_of([0, 40], [0, 40]))
    with pytest.raises(NotImplementedError, match=r"attention_varlen\(\*x.dequantize\(\), x.cu_seqlens_q"):
        attention_fp8(x, softcap=3.0)
    with null_kernels():
        _C.set_switch("compute_capability", 80)
        with pytest.raises(NotImplementedError, match=r"Call attention_varlen\(\*x.dequantize\(\), x.cu_seq"):
            attention_fp8(x)


@pytest.mark.parametrize("as_on_gpu", [False, True])
@pytest.mark.parametrize("mode", ["fp8", "mixed"])
def test_packed_sequences_in_the_batch_invariant_mode(mode: str, as_on_gpu: bool) -> None:
    bounds = bounds_of([0, 40], [0, 40])

    def both() -> None:
        quantize_fp8(*make(40, 40), mode=mode)
        with pytest.raises(NotImplementedError, match="packed sequences share means and factors"):
            quantize_fp8(*make(40, 40, packed=True), mode=mode, **bounds)

    with flash_ext.serving.set_batch_invariant(True):
        if as_on_gpu:
            with null_kernels():
                both()
        else:
            both()
    quantize_fp8(*make(40, 40, packed=True), mode=mode, **bounds)
