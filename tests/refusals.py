"""Requests that no path may accept, and the words by which each must be refused."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.inputs import Inputs

REFUSALS = (ValueError, TypeError, NotImplementedError)


def _resized(t: Tensor, dim: int, size: int) -> Tensor:
    """A zero tensor like ``t`` with another size in one dimension."""
    shape = list(t.shape)
    shape[dim] = size
    return t.new_zeros(shape)


def broken_call(x: Inputs, device: str) -> tuple[dict[str, Any], str]:
    """The operator's arguments with ``x.case.invalid`` done to them, and a word its message must contain."""
    case = x.case
    args: dict[str, Any] = {
        "q": x.q, "k": x.k, "v": x.v, "cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k,
        "max_seqlen_q": 0, "max_seqlen_k": 0, "scale": case.effective_scale, "window_size_left": -1,
        "window_size_right": -1, "deterministic": False, "backend": None,
    }  # fmt: skip
    q, k, v = x.q, x.k, x.v
    wide = 257 if device == "cuda" else 0  # the CPU path takes any head size but none
    other = torch.float16 if q.dtype == torch.bfloat16 else torch.bfloat16
    if case.invalid == "batch":
        broken = (
            {"cu_seqlens_k": torch.cat([x.cu_seqlens_k, x.cu_seqlens_k[-1:]])}
            if case.is_packed
            else {"k": _resized(k, 0, k.shape[0] + 1), "v": _resized(v, 0, k.shape[0] + 1)}
        )
        return args | broken, "cu_seqlens" if case.is_packed else "batch"
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "heads_ratio": (
            {"k": _resized(k, -2, case.num_heads + 1), "v": _resized(v, -2, case.num_heads + 1)},
            "num_heads",
        ),
        "kv_heads": ({"v": _resized(v, -2, case.num_heads_k + 1)}, "num_heads"),
        "kv_length": ({"v": _resized(v, -3, v.shape[-3] + 1)}, "length"),
        "head_dim": ({"k": _resized(k, -1, case.head_dim + 1)}, "head_dim"),
        "head_dim_wide": ({"q": _resized(q, -1, wide), "k": _resized(k, -1, wide)}, "head_dim"),
        "dtype_mix": ({"k": k.to(other)}, "dtype" if device == "cpu" else str(other)),
        "dtype_int": ({"q": q.to(torch.int8), "k": k.to(torch.int8), "v": v.to(torch.int8)}, "int8"),
        "window_low": ({"window_size_left": -2}, "window_size"),
        "scale_nan": ({"scale": math.nan}, "scale must"),
        "scale_inf": ({"scale": -math.inf}, "scale must"),
        "last_stride": ({"q": torch.stack([q, q], -1).flatten(-2)[..., ::2]}, "stride"),
        "rank": ({"q": q[None]}, "shape"),
        "path": ({"backend": "sm75"}, "backend"),
    }
    broken, word = changes[case.invalid]
    return args | broken, word


def check_refused(x: Inputs, device: str) -> None:
    """The call raises one of ``REFUSALS`` and says what is wrong."""
    args, word = broken_call(x, device)
    try:
        torch.ops.flash_ext.fwd(*args.values())
    except REFUSALS as refusal:
        assert word in str(refusal), f"the refusal does not say {word!r}: {refusal}"
    else:
        raise AssertionError(f"accepted although {x.case.invalid}")
