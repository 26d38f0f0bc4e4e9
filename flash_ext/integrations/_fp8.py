"""Attention layers in fp8: which calls of a model :func:`flash_ext.fp8.attention_fp8` takes.

It takes prefills and training passes that see all their keys, or a causal part of them. Calls with another
mask or a window, with a bias, sinks, softcap or dropout, deterministic ones, and steps of a few queries,
which wait for memory and not for products, run in the type of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._count import counting, tally_fallback
from ..fp8 import attention_fp8, quantize_fp8
from ..serving import is_batch_invariant

ENTRY = "integrations.transformers"
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
    """Whether a call runs in fp8. One that does not although there is a mode is counted as a fall-back.

    Tensors are (b, rows, h, d), or packed (total, h, d).
    """
    if mode is None:
        return False
    reason = _reason_against(mode, q, k, v, options)
    if reason is None:
        return True
    if counting:
        tally_fallback(ENTRY, reason)
    return False


def _reason_against(mode: str, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        return "the model has neither float16 nor bfloat16"
    # Packed sequences share means and factors. A compiler does not see the mode, and the operator refuses it.
    if q.dim() == 3 and not torch.compiler.is_compiling() and is_batch_invariant():
        return "sequences are packed in the batch-invariant mode"
    for name in _OTHERS:
        x = options.get(name)
        if x is not None and not (isinstance(x, (int, float)) and x == 0):
            return f"{name} is given"
    if tuple(options.get("window_size", (-1, -1))) != (-1, -1):
        return "window_size is given"
    if min(q.shape[-3], k.shape[-3]) < LEAST_ROWS:
        return f"there are fewer than {LEAST_ROWS} queries or keys"
    if q.shape[-1] % 16 or v.shape[-1] % 16:
        return "a head size is no multiple of 16"
    # Hopper GPUs have kernels, and the CPU an emulation.
    if not q.is_cpu and (not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0)):
        return "the device has no fp8 kernel"
    most = 256 if q.is_cpu or mode == "fp8" else 128
    if max(q.shape[-1], v.shape[-1]) > most:
        return f"a head size is above {most}"
    return None


def attend(mode: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], *bounds: Tensor) -> Tensor:
    """A call that :func:`takes` has taken; ``bounds`` are those of packed sequences."""
    cu_q, cu_k = bounds or (None, None)
    x = quantize_fp8(q, k, v, mode=mode, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out: Tensor = attention_fp8(x, causal=options["causal"], scale=options["scale"])
    return out
