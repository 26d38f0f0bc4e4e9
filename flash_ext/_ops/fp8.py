"""The operators of fp8 attention, ``flash_ext::quantize_fp8`` and ``flash_ext::fwd_fp8``: CPU and tracing.

Schemas and the GPU implementation are registered by the extension module (csrc/api/fp8.cpp).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._cpu import fp8
from .library import _C, is_built
from .spec import AttnSpec


def cpu_quantize(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, *options: Any) -> tuple[Tensor, ...]:
    if cu_seqlens_q is not None and _C.get_switch("batch_invariant"):
        raise NotImplementedError(
            "packed sequences share means and factors in fp8, which the batch-invariant mode rules out. "
            "Quantise each sequence in a call of its own, or call attention_varlen."
        )
    return fp8.quantize(q, k, v, cu_seqlens_q, *options)


def cpu_fwd(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor,
    v_offset: Tensor | None, row_offset: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, sinks: Tensor | None, scale: float, left: int,
    right: int, dtype: torch.dtype, backend: str | None, want_lse: bool = True, want_row_max: bool = False,
    small: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    factors = (q_descale, k_descale, v_descale)
    places = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    spec = AttnSpec(scale, left, right)
    out, lse, row_max = fp8.forward(q, k, v, *factors, v_offset, row_offset, *places, sinks, spec, dtype)
    nothing = lse.new_empty(0)
    return out, lse if want_lse else nothing, row_max if want_row_max else nothing.clone()


# ---- shapes for tracing ----------------------------------------------------------------------------------


def fake_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    by_block: bool,
    smooth_k: bool,
    smooth_v: bool,
    hadamard: bool,
    mixed: bool,
    *rotary: Any,
) -> tuple[Tensor, ...]:
    packed = cu_seqlens_q is not None
    batch = [] if packed else [q.shape[0]]
    sequences = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else 0
    heads, heads_k = q.shape[-2], k.shape[-2]

    def floats(wanted: bool, *shape: Any) -> Tensor:
        return q.new_empty((*batch, *shape) if wanted else (0,), dtype=torch.float32)

    def blocks(rows: Any) -> Any:
        return fp8.num_blocks(rows, sequences, packed) if by_block else 1

    columns = fp8.transposed_columns(k.shape[-3], sequences, packed)
    shifts_k = smooth_k and not mixed
    return (
        q.new_empty((0,) if mixed else q.shape, dtype=fp8.E4M3),
        k.new_empty((0,) if mixed else k.shape, dtype=fp8.E4M3),
        v.new_empty((*batch, heads_k, v.shape[-1], columns), dtype=fp8.E4M3),
        floats(not mixed, heads, blocks(q.shape[-3])),
        floats(not mixed, heads_k, blocks(k.shape[-3])),
        floats(True, heads_k, v.shape[-1]),
        floats(smooth_v, heads_k, v.shape[-1]),
        floats(shifts_k, heads_k, k.shape[-1]),
        floats(shifts_k, heads, q.shape[-3]),
    )


def fake_fwd(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor,
    v_offset: Tensor | None, row_offset: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, sinks: Tensor | None, scale: float, left: int,
    right: int, dtype: torch.dtype, backend: str | None, want_lse: bool = True, want_row_max: bool = False,
    small: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *batch, rows, heads, _ = q.shape
    out = q.new_empty((*batch, rows, heads, v.shape[-2]), dtype=dtype)
    lse, row_max = (
        q.new_empty((*batch, heads, rows) if wanted else (0,), dtype=torch.float32)
        for wanted in (want_lse, want_row_max)
    )
    return out, lse, row_max


if is_built:
    _library = torch.library.Library("flash_ext", "IMPL")
    _library.impl("quantize_fp8", cpu_quantize, "CPU")
    _library.impl("fwd_fp8", cpu_fwd, "CPU")
    torch.library.register_fake("flash_ext::quantize_fp8", fake_quantize, lib=_library)
    torch.library.register_fake("flash_ext::fwd_fp8", fake_fwd, lib=_library)
