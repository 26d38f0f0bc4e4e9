"""What fp8 attention refuses, in words: tensors and options, and by its operators what memory hangs on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext._cpu import fp8
from flash_ext.fp8 import Fp8Inputs, attention_fp8, quantize_fp8
from tests.fp8.test_edges import e4m3
from tests.fp8.test_fp8 import bounds_of, make
from tests.fp8.test_lengths_and_sinks import int32
from tests.qkv import null_kernels

Of = Callable[[Tensor, Tensor, Tensor], object]
E5M2, FNUZ = torch.float8_e5m2, torch.float8_e4m3fnuz
ROTATED = "hadamard wants"

TENSORS: list[tuple[Of, type[Exception], str]] = [
    (lambda q, k, v: quantize_fp8(q.float(), k, v), TypeError,
     "quantize_fp8 takes torch.float16 or torch.bfloat16, got q torch.float32"),
    (lambda q, k, v: quantize_fp8(q.to(fp8.E4M3), k, v), TypeError, "Use Fp8Inputs.of"),
    (lambda q, k, v: quantize_fp8(q, k.half(), v), TypeError, "q, k and v must share one dtype"),
    (lambda q, k, v: Fp8Inputs.of(q.to(E5M2), k.to(E5M2), v.to(E5M2)), TypeError,
     "q must be torch.float8_e4m3fn, got torch.float8_e5m2"),
    (lambda q, k, v: Fp8Inputs.of(q, k, v.to(FNUZ)), TypeError,
     "v must be torch.float8_e4m3fn, got torch.float8_e4m3fnuz"),
    (lambda q, k, v: Fp8Inputs.of(q, k, v), TypeError, r"Call quantize_fp8\(q, k, v\)"),
    (lambda q, k, v: quantize_fp8(q[..., :40], k[..., :40], v), ValueError, "a multiple of 16 up to 256"),
    (lambda q, k, v: quantize_fp8(q[0], k, v), ValueError, r"q must have shape \(b, seqlen, h, d\)"),
    (lambda q, k, v: quantize_fp8(q[:, :, :3], k, v), ValueError, "a positive multiple of num_heads"),
    (lambda q, k, v: quantize_fp8(q, k[:, 1:], v), ValueError, "do not fit each other"),
    (lambda q, k, v: quantize_fp8(q, k, v, cu_seqlens_q=int32(0, 0)), ValueError, "given together"),
    (lambda q, k, v: quantize_fp8(q, k, v, granularity="row"), ValueError,
     "granularity must be 'block' or 'head'"),
    (lambda q, k, v: quantize_fp8(q, k, v, mode="int8"), ValueError, "mode must be 'fp8' or 'mixed'"),
    (lambda q, k, v: quantize_fp8(q, k, v, hadamard=True, granularity="head"), ValueError, ROTATED),
    (lambda q, k, v: quantize_fp8(q[..., :48], k[..., :48], v, hadamard=True), ValueError, ROTATED),
    (lambda q, k, v: Fp8Inputs.of(*e4m3(q, k, v), q_descale=torch.ones(3)), ValueError,
     r"q_descale must have shape \(\), \(1,\) or \(2, 4\)"),
    (lambda q, k, v: attention_fp8((q, k, v)), TypeError, "takes what quantize_fp8"),
    # Lengths.
    (lambda *t: quantize_fp8(*t, seqused_k=[3, 4]), TypeError, "seqused_k must be a torch.Tensor"),
    (lambda *t: quantize_fp8(*t, seqused_k=int32(3, 4).long()), ValueError, r"seqused_k must be \(batch,\)"),
    (lambda *t: quantize_fp8(*t, seqused_k=int32(3)), ValueError, r"\(2,\) int32 .* got \(1,\)"),
    (lambda *t: quantize_fp8(*t, seqused_k=int32(3, 0, 4, 0)[::2]), ValueError, "must be contiguous"),
    (lambda *t: quantize_fp8(*t, seqused_k=int32(3, -1)), ValueError, "at least 0, got -1 for sequence 1"),
    (lambda *t: quantize_fp8(*t, seqused_k=int32(41, 4)), ValueError, "got 41 for sequence 0"),
    (lambda *t: Fp8Inputs.of(*e4m3(*t), seqused_k=int32(41, 4)), ValueError, "must not exceed the room"),
    (lambda q, k, v: quantize_fp8(q.requires_grad_(), k, v, seqused_k=int32(3, 4)), NotImplementedError,
     r"no gradient.*torch.no_grad\(\)"),
    (lambda *t: attention_fp8(quantize_fp8(*t, seqused_k=int32(3, 4)), bias=torch.zeros(1)),
     NotImplementedError, "bias has no fp8 kernel, and no kernel beside seqused_k"),
]  # fmt: skip

OPTIONS: list[tuple[dict, type[Exception], str]] = [
    ({"bias": torch.zeros(1)}, NotImplementedError,
     r"bias has no fp8 kernel. Call attention\(\*x.dequantize"),
    ({"dropout_p": 0.1}, NotImplementedError, "dropout_p has no fp8 kernel"),
    ({"is_causal": True}, TypeError, "Did you mean causal="),
    ({"scale": math.nan}, ValueError, "scale must be finite"),
    ({"window_size": (-2, 0)}, ValueError, "at least -1"),
    ({"backend": "sm90"}, ValueError, "runs on a GPU"),
    ({"backend": 3}, TypeError, "backend must be a str or None"),
    ({"sinks": [1.0] * 4}, TypeError, "sinks must be a torch.Tensor"),
    ({"sinks": int32(1, 2, 3, 4)}, TypeError, "sinks must be floating point"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks must have shape .* = \(4,\)"),
    ({"sinks": torch.zeros(4, requires_grad=True)}, ValueError, "sinks requires a gradient"),
]  # fmt: skip

OPTIONS_OF_ATTENTION: list[tuple[dict, type[Exception], str]] = [
    ({"window_size": (1.5, 0)}, TypeError, "window_size must be a pair of ints"),
    ({"window_size": 5}, TypeError, "window_size must be a pair of ints"),
    ({"scale": "a"}, TypeError, "scale must be a float or None"),
    ({"scale": torch.ones(())}, TypeError, "scale must be a number, got Tensor"),
    ({"scale": math.inf}, ValueError, "scale must be finite"),
    ({"causal": "top_left"}, TypeError, "causal must be a bool"),
    ({"return_aux": True}, TypeError, r"Write AuxRequest\(lse=True\)"),
]


@pytest.mark.parametrize(("call", "error", "words"), TENSORS, ids=[words for *_, words in TENSORS])
def test_tensors(call: Of, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(*make(40, 40))


@pytest.mark.parametrize(("options", "error", "words"), OPTIONS + OPTIONS_OF_ATTENTION)
def test_options(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attention_fp8(quantize_fp8(*make(40, 40)), **options)


@pytest.mark.parametrize(("options", "error", "words"), OPTIONS_OF_ATTENTION)
def test_attention_refuses_them_in_the_same_words(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flash_ext.attention(*make(40, 40), **options)


# ---- operators ------------------------------------------------------------------------------------------

PACKED = int32(0, 40)
BOUNDS: list[tuple[bool, Tensor | None, Tensor | None, str]] = [
    (True, PACKED, None, "given together"),
    (False, None, PACKED, "given together"),
    (True, PACKED[None], PACKED[None], "cu_seqlens_q must be"),
    (True, PACKED, int32(0, 9, 40, 9)[::2], "cu_seqlens_k must be"),
    (True, PACKED.long(), PACKED.long(), "cu_seqlens_q must be"),
    (True, None, None, "4 dimensions"),
]


def quantize(q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor | None) -> object:
    return torch.ops.flash_ext.quantize_fp8.default(q, k, v, *bounds, None, True, True, True, False, False)


@pytest.mark.parametrize(("packed", "of_q", "of_k", "words"), BOUNDS)
def test_bounds(packed: bool, of_q: Tensor | None, of_k: Tensor | None, words: str) -> None:
    with null_kernels(), pytest.raises(ValueError, match=words):
        quantize(*make(40, 40, packed=packed), of_q, of_k)


def test_what_is_too_long() -> None:
    q = torch.empty(16, dtype=torch.bfloat16).expand(1, 2**30, 1, 16)
    with null_kernels(), pytest.raises(ValueError, match=r"at most 1073740800.*Split the call"):
        quantize(q, q[:, :1], q[:, :1], None, None)


def forward(x: Fp8Inputs, used: Tensor | None = None, sinks: Tensor | None = None, host: int = -1) -> object:
    """The operator, with one of its tensors on the host."""
    tensors = [x.q, x.k, x.v, x.q_descale, x.k_descale, x.v_descale, x.v_offset, x.row_offset]
    tensors += [x.cu_seqlens_q, x.cu_seqlens_k]
    if host >= 0:
        tensors[host] = tensors[host].cpu()
    return torch.ops.flash_ext.fwd_fp8.default(*tensors, used, sinks, 0.125, -1, -1, torch.bfloat16, None)


def test_lengths_and_sinks() -> None:
    x = quantize_fp8(*make(40, 40))
    for used in (int32(1), int32(1, 2).long(), int32(1, 2)[None], int32(1, 0, 2, 0)[::2]):
        with null_kernels(), pytest.raises(ValueError, match="seqused_k must be"):
            forward(x, used)
    for sinks in (torch.zeros(3), torch.zeros(4).double(), torch.zeros(1, 4), torch.zeros(8)[::2]):
        with null_kernels(), pytest.raises(ValueError, match="sinks must be"):
            forward(x, None, sinks)


@pytest.mark.gpu
def test_tensors_on_another_device() -> None:
    """Bounds as well; a kernel would read memory of the host."""
    bounds = bounds_of([0, 40], [0, 40], device="cuda")
    packed = quantize_fp8(*make(40, 40, packed=True, device="cuda"), **bounds)
    for host in range(1, 10):
        with pytest.raises(ValueError, match="must be on the device of q"):
            forward(packed, host=host)
    x = quantize_fp8(*make(40, 40, device="cuda"))
    with pytest.raises(ValueError, match="seqused_k must be on the device of q"):
        forward(x, int32(1, 2))
    with pytest.raises(ValueError, match="sinks must be on the device of q"):
        forward(x, None, torch.zeros(4))
