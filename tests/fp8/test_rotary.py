"""quantize_fp8(rotary=): q and k turned on the way, against the rotation by float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext.fp8 import attention_fp8, quantize_fp8
from tests.fp8.test_fp8 import error_of, make
from tests.qkv import CPU_AND_HOPPER

ROWS, KEYS = 300, 421


def factors(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.rand(*shape, device=device) * 2 * math.pi
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x: Tensor, pair: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """In float64."""
    cos, sin = (t.double().unsqueeze(-2) for t in pair)
    half, y = cos.shape[-1], x.double().clone()
    low, high = slice(half), slice(half, 2 * half)
    if interleaved:
        low, high = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., low].double(), x[..., high].double()
    y[..., low], y[..., high] = a * cos - b * sin, a * sin + b * cos
    return y


def assert_same_numbers(got: Tensor, want: Tensor) -> None:
    """Which may lie on either side of a number between two of e4m3: few do, and steps are 1/14 at most."""
    got, want = got.cpu(), want.cpu()
    largest = (want - want.mean(-3, keepdim=True)).abs().max()
    apart = (got - want).abs()
    assert apart.max() <= largest / 12
    assert (apart > largest / 100).double().mean() < 0.02


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("d", "features", "options"),
    [
        (64, 64, {}),
        (64, 16, {"granularity": "head"}),
        (96, 96, {}),
        (128, 128, {"hadamard": True}),
        (128, 64, {"smooth_k": False}),
        (256, 256, {}),
    ],
)
def test_numbers_stand_for_turned_q_and_k(
    device: str, interleaved: bool, d: int, features: int, options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    q, k, v = make(ROWS, KEYS, 2, 1, dim=d, device=device)
    k = k + 2
    of_q = factors(ROWS, features // 2, device=device)
    of_k = factors(2, KEYS, features // 2, device=device, dtype=q.dtype)
    of_q = tuple(t.to(q.dtype) for t in of_q)
    x = quantize_fp8(q, k, v, rotary=(of_q, of_k), rotary_interleaved=interleaved, **options)
    wanted = [turned(t, pair, interleaved) for t, pair in ((q, of_q), (k, of_k))]
    plain = quantize_fp8(*(t.to(q.dtype) for t in wanted), v, **options)
    for got, want in zip(x.dequantize(torch.float64)[:2], plain.dequantize(torch.float64)[:2], strict=True):
        assert_same_numbers(got, want)
    out = attention_fp8(x, causal=True)
    want = flash_ext.attention(*(t.to(q.dtype) for t in wanted), v, causal=True)
    assert error_of(out.cpu(), want.cpu()) < 0.1


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_values_may_have_more_columns(device: str) -> None:
    """The lanes of a row are then more than q and k fill."""
    q, k, v = make(ROWS, ROWS, dim=64, dim_v=256, device=device)
    pair = factors(ROWS, 32, device=device)
    x = quantize_fp8(q, k, v, rotary=pair)
    want = quantize_fp8(*(turned(t, pair, False).to(q.dtype) for t in (q, k)), v)
    for a, b in zip(x.dequantize(torch.float64), want.dequantize(torch.float64), strict=True):
        assert_same_numbers(a, b)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_packed_rows_have_their_own_factors(device: str) -> None:
    torch.manual_seed(1)
    bounds = torch.tensor([0, 70, 70, 261, 300], dtype=torch.int32, device=device)
    q, k, v = (t.squeeze(0) for t in make(ROWS, ROWS, batch=1, device=device))
    pair = factors(ROWS, 32, device=device)
    options = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    x = quantize_fp8(q, k, v, rotary=pair, **options)
    want = quantize_fp8(*(turned(t, pair, False).to(q.dtype) for t in (q, k)), v, **options)
    for a, b in zip(x.dequantize(torch.float64)[:2], want.dequantize(torch.float64)[:2], strict=True):
        assert_same_numbers(a, b)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_unused_keys_may_be_anything(device: str) -> None:
    torch.manual_seed(2)
    used = torch.tensor([200, 0], dtype=torch.int32, device=device)
    q, k, v = make(ROWS, ROWS, device=device)
    pair = factors(ROWS, 32, device=device)
    clean = quantize_fp8(q, k, v, rotary=pair, seqused_k=used)
    k[0, 200:], k[1] = math.nan, math.nan
    dirty = quantize_fp8(q, k, v, rotary=pair, seqused_k=used)
    for name in ("q", "k", "k_descale", "k_offset", "row_offset"):
        a, b = (getattr(x, name).float() for x in (clean, dirty))
        assert torch.equal(a, b), name


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("mode", ["fp8", "mixed"])
def test_gradients_go_through_the_rotation(device: str, mode: str) -> None:
    torch.manual_seed(3)
    q, k, v = (t.requires_grad_() for t in make(200, 200, batch=1, device=device))
    pair = factors(200, 16, device=device)
    out = attention_fp8(quantize_fp8(q, k, v, rotary=pair, mode=mode), causal=True)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    rows = [turned(t, pair, False) if i < 2 else t for i, t in enumerate(leaves)]
    rows = [t.transpose(1, 2) for t in rows]
    want_out = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    want = torch.autograd.grad(want_out.transpose(1, 2), leaves, dout.double())
    for a, b in zip(got, want, strict=True):
        assert error_of(a.cpu(), b.cpu()) < 0.02


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_operator_is_traced_with_factors(device: str) -> None:
    q, k, v = make(130, 130, batch=1, device=device)
    pair = factors(130, 32, device=device)
    arguments = (q, k, v, None, None, None, True, True, True, False, False, *pair, *pair, True)
    torch.library.opcheck(
        torch.ops.flash_ext.quantize_fp8.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_factors_that_do_not_fit_are_refused() -> None:
    q, k, v = make(40, 50)
    cos, sin = factors(40, 32, device="cpu")

    def refuses(error: type[Exception], words: str, rotary: object, k: Tensor = k) -> None:
        with pytest.raises(error, match=words):
            quantize_fp8(q, k, k, rotary=rotary)

    same = k[:, :40]
    refuses(TypeError, "must be \\(cos, sin\\)", cos)
    refuses(TypeError, "two tensors", ((cos, sin), (cos, None)))
    refuses(ValueError, "the same rows, got 40 and 50", (cos, sin))
    refuses(ValueError, "must have shape \\(50", ((cos, sin), (cos, sin)))
    refuses(ValueError, "must have shape \\(40", (cos[:-1], sin[:-1]), same)
    refuses(ValueError, "with 2 in front", (cos.expand(3, 40, 32), sin.expand(3, 40, 32)), same)
    refuses(ValueError, "multiple of 16", (cos[:, :5], sin[:, :5]), same)
    refuses(ValueError, "multiple of 16", factors(40, 40, device="cpu"), same)
    refuses(TypeError, "must be torch.float32", (cos.double(), sin.double()), same)
    refuses(TypeError, "cos as sin", (cos, sin.to(q.dtype)), same)
    refuses(ValueError, "requires a gradient", (cos.clone().requires_grad_(), sin), same)
    with pytest.raises(ValueError, match="rotary_interleaved says"):
        quantize_fp8(q, k, k, rotary_interleaved=True)
    for given in ((cos, None, cos, sin), (cos[:1], sin[:1], cos, sin)):
        with pytest.raises(ValueError, match="cos and sin"):
            torch.ops.flash_ext.quantize_fp8(
                q, same, same, None, None, None, True, True, True, False, False, *given, False
            )
    with pytest.raises(ValueError, match="turn them before"):
        torch.ops.flash_ext.quantize_fp8(
            q, same, same, None, None, None, True, True, True, False, True, cos, sin, cos, sin, False
        )
    halves = factors(40, 16, device="cpu")
    refuses(ValueError, "as many features", ((cos, sin), halves), same)
