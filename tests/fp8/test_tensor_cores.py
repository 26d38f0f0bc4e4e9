"""The model of Hopper's e4m3 sums, and what it explains of the fp8 kernel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext import AuxRequest
from flash_ext._cpu import fp8
from flash_ext.fp8 import Fp8Inputs, attention_fp8, quantize_fp8
from tests import fp8_kernel
from tests.fp8.test_fp8 import DATA, error_of, make, spec_of, truth
from tests.qkv import CPU_AND_HOPPER, only_hopper
from tests.tensor_cores import add_products, products


def dot(a: list[float], b: list[float], start: float = 0.0) -> float:
    x, y = (torch.tensor(t).to(fp8.E4M3).float() for t in (a, b))
    assert x.tolist() == a and y.tolist() == b
    return float(add_products(torch.tensor([[start]]), x[None], y[:, None]))


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_cut(sign: int) -> None:
    one, small = [16.0 * sign], 2.0**-8  # 256 * 2^-13 is 2^-5
    assert dot(one + [small * sign] * 2, [16.0, 8.0, 4.0]) == 256.03125 * sign  # 2^-5 stays, 2^-6 is cut
    assert dot(one + [small * sign] * 31, [16.0] + [4.0] * 31) == 256 * sign  # each by itself
    assert dot([small * sign] * 32, [4.0] * 32) == 0.5 * sign  # nothing large is there
    assert dot([small * sign], [4.0], 256.0 * sign) == 256 * sign  # the accumulator counts
    assert dot([16.0 * sign], [16.0], 2.0**-6 * sign) == 256 * sign  # and is cut
    assert dot(one + [0.0] * 31 + [small * sign] * 32, [16.0] * 32 + [4.0] * 32) == 256 * sign  # two steps
    assert dot([0.0] * 32, [1.0] * 32, 3.0 * sign) == 3 * sign
    assert dot(one + [small * sign], [-16.0, 4.0]) == -256 * sign  # towards zero, whatever the signs


def test_what_a_sum_keeps() -> None:
    """13 bits behind the leading one of the sum, which may lie above the largest product's."""
    assert dot([16.0] * 2 + [2.0**-8], [16.0, 16.0, 8.0]) == 512
    assert dot([16.0] * 2 + [2.0**-8], [16.0, 16.0, 16.0]) == 512.0625


def test_power_of_a_product() -> None:
    """That of its factors: 1.75 * 1.75 counts as 1, so that 2^-13 beside it stays."""
    assert dot([1.75, -1.5, 2.0**-6], [1.75, 1.5, 2.0**-7]) == 3.0625 - 2.25 + 2.0**-13
    assert dot([1.75, -1.5, 2.0**-6], [1.75, 2.0, 2.0**-7]) == 3.0625 - 3


def test_small_numbers_add_exactly() -> None:
    a, b = (torch.randint(-4, 5, (5, 7, 100)).float() for _ in range(2))
    assert torch.equal(products(a, b.mT), a @ b.mT)


def test_long_sums_lose_a_mean() -> None:
    """What docs/fp8.md says of 32768 keys, and what the kernel does about it."""
    torch.manual_seed(0)
    weights = torch.rand(2, 32768).to(fp8.E4M3).float()
    plain = torch.randn(32768, 8).to(fp8.E4M3).float()
    with_mean = (plain + 1).to(fp8.E4M3).float()

    def error(values: Tensor, promoted: bool) -> float:
        keys = 1024 if promoted else 32768  # of an accumulator
        parts = weights.unflatten(1, (-1, keys)).transpose(0, 1), values.unflatten(0, (-1, keys))
        total = products(*parts).sum(0)
        return float((total - weights @ values).norm() / (weights @ with_mean).norm())

    assert error(with_mean, promoted=False) == pytest.approx(0.3, abs=0.05)
    assert error(with_mean, promoted=True) < 0.03
    assert error(plain, promoted=True) < 1e-3


def errors_of(data: str, entry: slice = slice(None), head: slice = slice(None)) -> tuple[float, float, float]:
    """The errors of out and of lse, and the largest lse, of a case of test_fp8.py, or of a part of it."""
    q, k, v = make(130, 1500, dim=128)
    DATA[data][0](q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "SMALL", fp8.LARGEST)  # as numbers were
        x = dataclasses.replace(quantize_fp8(*(t[entry, :, head] for t in (q, k, v))), small=False)
    out, lse = fp8_kernel.forward(x, spec_of(x.q))
    want, want_lse = truth(x)
    return error_of(out, want), float((lse.double() - want_lse).abs().max()), float(want_lse.abs().max())


def test_the_error_of_lse_that_a_gpu_had() -> None:
    """0.0396 on an H200, beyond a thousandth of the largest lse: one product rules each sum of a score."""
    _, error, largest = errors_of("one rules", slice(1), slice(1))  # where it was largest
    assert error == pytest.approx(0.0396, abs=1e-4)
    assert error > 1e-3 * largest


def test_the_error_of_out_that_a_gpu_had() -> None:
    """0.041 on an H200: scores of 3e9 differ by less than what is cut, and another key wins a row."""
    error, _, _ = errors_of("far")
    assert error == pytest.approx(0.041, abs=5e-4)


def test_the_model_agrees_with_the_cpu() -> None:
    """On ordinary data, masks, few rows, both widths of tiles: both round weights and values to e4m3."""
    wide = quantize_fp8(*make(70, 1300, dim=144, batch=1))
    assert error_of(fp8_kernel.forward(wide, spec_of(wide.q))[0], truth(wide)[0]) < 0.035
    masks: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"window_size": (70, 20)}, {"scale": -0.1}, {"scale": 0.0},
    )  # fmt: skip
    for dim, options in itertools.product((64, 96), masks):
        x = quantize_fp8(*make(70, 300, dim=dim, batch=1))
        out, lse = fp8_kernel.forward(x, spec_of(x.q, **options))
        want, want_lse = truth(x, **options)
        assert error_of(out, want) < 0.035, options
        seen = want_lse.isfinite()
        assert torch.equal(lse.isfinite(), seen)
        assert (lse.double() - want_lse)[seen].abs().max() < 2e-3


# A score of 256 and a small one in another step of 32 products, and what an H200 made of them: float16 has
# quarters there, eighths below, and rounds to nearest, ties to even.
SUMS_IN_FLOAT16 = {
    0.125: (256.0, 255.875),
    0.1875: (256.25, 255.75),
    0.3125: (256.25, 255.75),
    0.375: (256.5, 255.625),
}


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("small", SUMS_IN_FLOAT16)
def test_scores_in_float16_are_rounded_behind_each_step(device: str, small: float) -> None:
    for sign, want in zip((1, -1), SUMS_IN_FLOAT16[small], strict=True):
        q, k = torch.zeros(1, 16, 1, 128), torch.zeros(1, 1, 1, 128)
        q[..., 0], k[..., 0] = 16, 16
        q[..., 32], k[..., 32] = 2 * small * sign, 0.5
        ones = torch.ones(1, 1, 1)
        v, v_descale = torch.zeros(1, 1, 128, 16).to(fp8.E4M3), torch.ones(1, 1, 128)
        x = Fp8Inputs(q.to(fp8.E4M3), k.to(fp8.E4M3), v, ones, ones, v_descale, small=True)
        if device == "cpu":
            lse = fp8_kernel.forward(x, spec_of(x.q, scale=math.log(2)))[1]
        else:
            tensors = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
            moved = {name: t.cuda() for name, t in tensors.items() if isinstance(t, Tensor)}
            y = dataclasses.replace(x, **moved)
            lse = attention_fp8(y, scale=math.log(2), return_aux=AuxRequest(lse=True))[1].lse
        # A weight is off by 2^-11 of itself and more, lse by as much.
        assert (lse.cpu() / math.log(2) - want).abs().max() < 4e-3


@pytest.mark.gpu
@only_hopper
@pytest.mark.parametrize("dim", [96, 128, 192, 256])
def test_sums_in_float16_are_those_of_the_model(dim: int) -> None:
    """To the last bit, for rows that see one key: lse is the score, exactly, since scores are large."""
    q, k = ((4 + 11 * torch.rand(1, 2048, 1, dim)).to(fp8.E4M3) for _ in range(2))
    ones = torch.ones(1, 1, 16, device="cuda")
    v, v_descale = torch.zeros(1, 1, dim, 2048).to(fp8.E4M3), torch.ones(1, 1, dim, device="cuda")
    x = Fp8Inputs(q.cuda(), k.cuda(), v.cuda(), ones, ones, v_descale, small=True)
    lse = attention_fp8(x, scale=1.0, window_size=(0, 0), return_aux=AuxRequest(lse=True))[1].lse
    want = products(q[0, :, 0, None].float(), k[0, :, 0, :, None].float(), in_half=True)[:, 0, 0]
    assert torch.equal(lse[0, 0].cpu(), want)
