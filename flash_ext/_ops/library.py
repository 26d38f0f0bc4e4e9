"""The operators ``flash_ext::fwd`` and ``flash_ext::bwd`` as PyTorch sees them.

Schemas, the GPU implementation, autograd and autocast are registered by the extension module ``flash_ext._C``
(csrc/api/), which extension.py loads. This module adds what is written in Python: the CPU implementation,
shapes for tracing, vmap rules and FLOP formulas.

In every function here ``options`` are the operator's last arguments: max_seqlen_q, max_seqlen_k,
scale, window_size_left, window_size_right, deterministic, backend; then what is not left at its default:
``wide`` (False) and, of a forward, ``want_lse`` (True).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from .._cpu import tiles
from .._cpu.tiles import accumulator_dtype
from .extension import MissingExtension, load
from .spec import AttnSpec, wants_lse

if TYPE_CHECKING:
    from .. import _C as _C
else:
    _C = load()
is_built = not isinstance(_C, MissingExtension)


# ---- CPU -----------------------------------------------------------------------------------------------


NUM_OPTIONS = 7  # without ``wide`` and ``want_lse``, which the dispatcher leaves out at their defaults


def _spec(options: tuple[Any, ...]) -> AttnSpec:
    return AttnSpec(*options[2:5])


def result_dtype(t: Tensor, flags: Sequence[Any]) -> torch.dtype:
    """That of a result which belongs to ``t``; ``flags`` begins with ``wide``, or is empty for False."""
    return accumulator_dtype(t) if flags and flags[0] else t.dtype


def cpu_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    options, flags = options[:NUM_OPTIONS], options[NUM_OPTIONS:]
    _C.check_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    out, lse, _ = tiles.forward(
        q, k, v, _spec(options), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        out_dtype=result_dtype(q, flags), want_lse=wants_lse(flags),
    )  # fmt: skip
    return out, lse


def cpu_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    options, wide = options[:NUM_OPTIONS], options[NUM_OPTIONS:]
    _C.check_bwd(dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, *options)
    dq, dk, dv, *_ = tiles.backward(
        dout, q, k, v, out, lse, _spec(options), dlse=dlse, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, grad_dtype=result_dtype(q, wide),
    )  # fmt: skip
    return dq, dk, dv


# ---- shapes for tracing --------------------------------------------------------------------------------


def fake_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    register_sharding_rules()
    num_checked = 2 + NUM_OPTIONS
    _C.check_fwd(q, k, v, *rest[:num_checked])
    flags = rest[num_checked:]
    return fake_results(q, v, result_dtype(q, flags), wants_lse(flags))


def fake_results(q: Tensor, v: Tensor, dtype: torch.dtype, want_lse: bool) -> tuple[Tensor, Tensor]:
    """out and lse of a forward, not filled."""
    *batch, rows, heads, _ = q.shape
    out = q.new_empty((*batch, rows, heads, v.shape[-1]), dtype=dtype)
    return out, q.new_empty((*batch, heads, rows) if want_lse else (0,), dtype=accumulator_dtype(q))


def fake_bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    register_sharding_rules()
    num_checked = 5 + NUM_OPTIONS
    _C.check_bwd(dout, q, k, v, *rest[:num_checked])
    dq, dk, dv = (t.new_empty(t.shape, dtype=result_dtype(q, rest[num_checked:])) for t in (q, k, v))
    return dq, dk, dv


def register_sharding_rules() -> None:
    """Tells DTensor about the operators once DTensor is in use; importing it costs 0.6 s, so not before.

    Every first propagation of an operator asks for its shapes, which makes the shape functions the place
    where a late import of DTensor is noticed.
    """
    if "torch.distributed.tensor" in sys.modules:
        from . import dtensor as sharding

        sharding.register_once()


# ---- vmap ----------------------------------------------------------------------------------------------


def _fold(t: Tensor | None, dim: int | None, size: int, into: int) -> Tensor | None:
    """Merges the mapped dimension ``dim`` of ``t`` (or a broadcast one) into its dimension ``into``."""
    if t is None:
        return None
    if dim is None:
        t = t.unsqueeze(into).expand(*t.shape[:into], size, *t.shape[into:])
    else:
        t = t.movedim(dim, into)
    t = t.flatten(into, into + 1)
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _fold_all(
    tensors: tuple[Tensor | None, ...],
    dims: tuple[int | None, ...],
    cu_seqlens_dims: tuple[int | None, ...],
    size: int,
    packed: bool,
) -> list[Tensor | None]:
    """Dense calls map over more batch entries. Packed ones map over more heads, which keeps cu_seqlens."""
    if any(dim is not None for dim in cu_seqlens_dims):
        raise NotImplementedError("vmap over cu_seqlens_q or cu_seqlens_k is not implemented; call in a loop")
    # A row statistic (one dimension less) starts with batch or heads, all other tensors have rows in front.
    full = max(t.dim() - (dim is not None) for t, dim in zip(tensors, dims, strict=True) if t is not None)
    folded = []
    for t, dim in zip(tensors, dims, strict=True):
        is_statistic = t is not None and t.dim() - (dim is not None) < full
        folded.append(_fold(t, dim, size, 1 if packed and not is_statistic else 0))
    return folded


def _unfold(t: Tensor, size: int, dim: int) -> Tensor:
    return t.reshape(*t.shape[:dim], size, t.shape[dim] // size, *t.shape[dim + 1 :])


def vmap_fwd(
    info: Any,
    in_dims: tuple[int | None, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
    size, packed = info.batch_size, cu_seqlens_q is not None
    q_, k_, v_ = _fold_all((q, k, v), in_dims[:3], in_dims[3:5], size, packed)
    out, lse = torch.ops.flash_ext.fwd.default(q_, k_, v_, cu_seqlens_q, cu_seqlens_k, *options)
    dim = 1 if packed else 0
    if lse.dim() == 1:  # not wanted, and no gradient keeps it
        return (_unfold(out, size, dim), lse), (dim, None)
    return (_unfold(out, size, dim), _unfold(lse, size, 0)), (dim, 0)


def vmap_bwd(
    info: Any,
    in_dims: tuple[int | None, ...],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    size, packed = info.batch_size, cu_seqlens_q is not None
    folded = _fold_all((dout, q, k, v, out, lse, dlse), in_dims[:7], in_dims[7:9], size, packed)
    grads = torch.ops.flash_ext.bwd.default(*folded, cu_seqlens_q, cu_seqlens_k, *options)
    dim = 1 if packed else 0
    return tuple(_unfold(grad, size, dim) for grad in grads), (dim, dim, dim)


# ---- FLOP counts ---------------------------------------------------------------------------------------


def _score_count(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_q: int, max_k: int
) -> int:
    """Entries of all score matrices of one head, masked or not.

    For packed input the lengths are read from the device (it is a counter's job, not a model's); while
    tracing they are not there, and the bounds given, else equal lengths, stand in.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    if isinstance(cu_seqlens_q, FakeTensor) or cu_seqlens_q.is_meta:
        batch = max(cu_seqlens_q.shape[0] - 1, 1)
        return batch * max_q * max_k if max_q and max_k else q.shape[0] * k.shape[0] // batch
    lengths_q, lengths_k = cu_seqlens_q.diff().long(), cu_seqlens_k.diff().long()
    return int((lengths_q * lengths_k).sum().item())


def flops_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
    **__: Any,
) -> int:
    """FLOPs as torch counts scaled_dot_product_attention: two products, and no discount for masks."""
    scores = _score_count(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return 2 * q.shape[-2] * scores * (q.shape[-1] + v.shape[-1])


def flops_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
    **__: Any,
) -> int:
    """Five products: scores again, dP and dV over head_dim_v, dQ and dK over head_dim."""
    scores = _score_count(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return 2 * q.shape[-2] * scores * (3 * q.shape[-1] + 2 * v.shape[-1])


# ---- registration --------------------------------------------------------------------------------------

if is_built:
    _library = torch.library.Library("flash_ext", "IMPL")
    _library.impl("fwd", cpu_fwd, "CPU")
    _library.impl("bwd", cpu_bwd, "CPU")
    torch.library.register_fake("flash_ext::fwd", fake_fwd, lib=_library)
    torch.library.register_fake("flash_ext::bwd", fake_bwd, lib=_library)
    torch.library.register_vmap("flash_ext::fwd", vmap_fwd, lib=_library)
    torch.library.register_vmap("flash_ext::bwd", vmap_bwd, lib=_library)
    register_flop_formula(torch.ops.flash_ext.fwd, get_raw=True)(flops_fwd)
    register_flop_formula(torch.ops.flash_ext.bwd, get_raw=True)(flops_bwd)
