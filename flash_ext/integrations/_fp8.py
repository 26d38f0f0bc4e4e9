"""Attention layers in fp8: which calls of a model :func:`flash_ext.fp8.attention_fp8` takes.

It takes prefills and training passes that see all their keys, or a causal part of them. Calls with another
mask or a window, with a bias, sinks, softcap or dropout, deterministic ones, and steps of a few queries,
which wait for memory and not for products, run in the type of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fp8 import attention_fp8, quantize_fp8
from ..serving import is_batch_invariant

MODES = (None, "fp8", "mixed")
LEAST_ROWS = 128
_OTHERS = ("mask", "bias", "sinks", "softcap", "dropout_p", "deterministic")


def check_mode(mode: str | None) -> None:
    """Says what modes there are.

    Raises:
        ValueError: this is none of them.
    """
    if mode not in MODES:
        raise ValueError(f"quantize must be None, 'fp8' or 'mixed', got {mode!r}.")


def takes(mode: str | None, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether a call runs in fp8. Tensors are (b, rows, h, d), or packed (total, h, d)."""
    if mode is None or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    # Packed sequences share means and factors. A compiler does not see the mode, and the operator refuses it.
    if q.dim() == 3 and not torch.compiler.is_compiling() and is_batch_invariant():
        return False
    others = [options.get(name) for name in _OTHERS]
    if any(x is not None and not (isinstance(x, (int, float)) and x == 0) for x in others):
        return False
    if tuple(options.get("window_size", (-1, -1))) != (-1, -1) or min(q.shape[-3], k.shape[-3]) < LEAST_ROWS:
        return False
    return q.shape[-1] % 16 == 0 and v.shape[-1] % 16 == 0 and has_kernel(mode, q, v)


def has_kernel(mode: str | None, q: Tensor, v: Tensor) -> bool:
    """Hopper GPUs have one for these head sizes, and the CPU an emulation."""
    if q.is_cpu:
        return max(q.shape[-1], v.shape[-1]) <= 256
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        return False
    return max(q.shape[-1], v.shape[-1]) <= (128 if mode == "mixed" else 256)


def attend(mode: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], *bounds: Tensor) -> Tensor:
    """A call that :func:`takes` has taken; ``bounds`` are those of packed sequences."""
    cu_q, cu_k = bounds or (None, None)
    x = quantize_fp8(q, k, v, mode=mode, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out: Tensor = attention_fp8(x, causal=options["causal"], scale=options["scale"])
    return out
