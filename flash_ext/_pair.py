"""The functional pair: the forward and the backward pass as plain functions, dense or packed.

They are for code that keeps out and lse itself, such as ring attention; everything else is served by
:func:`flash_ext.attention`, which differentiates.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ._count import counting, tally
from ._masks.biases import Bias
from ._masks.value import Mask
from ._ops.arguments import Asked
from ._ops.dispatch import check_bounds, run_bwd, run_bwd_as, run_fwd_as, run_modified_bwd, run_modified_fwd
from ._ops.words import refuse_unknown

Gradient: TypeAlias = Literal["q", "k", "v", "bias", "slopes", "sinks"]

_OFF = 0.0  # see _attention.py
_QKV: tuple[Gradient, ...] = ("q", "k", "v")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = _OFF,
    dropout_p: float = _OFF,
    rng: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor]:
    """The forward pass as a plain function: out and lse of dense or packed input.

    Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.

    Args:
        q, k, v: as in :func:`attention` or, with ``cu_seqlens_q`` and ``cu_seqlens_k``, as in
            :func:`attention_varlen`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in :func:`attention_varlen`; None for dense
            input.
        causal, window_size, scale, mask, bias, sinks, softcap, dropout_p, deterministic, backend: as in these
            two.
        rng: (2,) int64, the random numbers of dropout, from :func:`flash_ext.dropout_rng`. Needed with
            ``dropout_p``; the backward pass takes the same.
        out_dtype: torch.float32 for an out that is not rounded, to be merged with others before it is; None
            or the dtype of q for the usual one. For float64 inputs float64. An out wider than q has no
            gradient: call it under ``torch.no_grad()``.

    Returns:
        out (b, seqlen_q, h, dv) and lse (b, h, seqlen_q), or packed (total_q, h, dv) and (h, total_q). The
        error of lse is that of :class:`AuxRequest`.
        Rounded to the dtype of q, an out of ``out_dtype`` float32 is the usual one bit for bit.

    Raises:
        ValueError, TypeError, NotImplementedError: as in :func:`attention` and :func:`attention_varlen`, and
            for another ``out_dtype``.
    """
    if unknown:
        refuse_unknown(forward, unknown)
    if counting:
        tally("forward")
    if isinstance(cu_seqlens_q, Tensor) and cu_seqlens_q.is_cpu:
        check_bounds(q, k, cu_seqlens_q, cu_seqlens_k)
    if (
        mask is None
        and bias is None
        and sinks is None
        and softcap is _OFF
        and dropout_p is _OFF
        and rng is None
    ):
        return run_fwd_as(
            out_dtype, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal,
            window_size, deterministic, backend,
        )  # fmt: skip
    options = (max_seqlen_q, max_seqlen_k, scale, causal, window_size, deterministic, backend)
    asked = Asked(mask, bias, sinks, softcap, dropout_p)
    out, lse, _ = run_modified_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, options, asked, rng=rng, out_dtype=out_dtype
    )
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = _OFF,
    dropout_p: float = _OFF,
    rng: Tensor | None = None,
    needs: tuple[Gradient, ...] = _QKV,
    grad_dtype: torch.dtype | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> tuple[Tensor, ...]:
    """Gradients from given results of the forward pass, whoever computed them.

    The weights are recomputed as exp(score - lse). When ``out`` and ``lse`` belong to a softmax over more
    keys than ``k`` holds (ring attention after merging), the results are this block's share of the gradients.
    It cannot be differentiated again: a second derivative raises.

    Source: section 3.1.2 of FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.

    Args:
        dout: gradient of out, its shape and dtype, any strides.
        q, k, v: as in the forward pass.
        out: (b, seqlen_q, h, dv) or packed (total_q, h, dv), dtype of q: one that was merged in float32 is
            rounded first, as an out of :func:`attention` is.
        lse: (b, h, seqlen_q) or packed (h, total_q), float32 (float64 for float64 inputs). Rows with -inf
            contribute nothing.
        dlse: gradient of lse, its shape and dtype; None is zero.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in the forward pass.
        causal, window_size, scale, mask, bias, sinks: as in the forward pass.
        softcap, dropout_p, rng, backend: as in the forward pass.
        needs: which gradients, out of "q", "k", "v", "bias" (of the tensor of a DenseBias or the table of a
            RelativePosition, one of which ``bias`` holds), "slopes" (of an ALiBi) and "sinks".
        grad_dtype: torch.float32 for dq, dk and dv that are not rounded, to be summed with others before they
            are; None or the dtype of q for the usual ones. For float64 inputs float64.
        deterministic: as in :func:`attention`.

    Returns:
        The gradients named in ``needs``, in its order; by default dq, dk, dv. Shapes are those of the
        arguments and of the table, dtypes too unless ``grad_dtype`` says otherwise; contiguous. Rounded to
        the dtype of q, those of ``grad_dtype`` float32 are the usual ones bit for bit, dq if both calls are
        deterministic.

    Raises:
        ValueError, TypeError, NotImplementedError: as in :func:`attention` and :func:`attention_varlen`, and
            for another ``grad_dtype``.
    """
    options = (max_seqlen_q, max_seqlen_k, scale, causal, window_size, deterministic, backend)
    if unknown:
        refuse_unknown(backward, unknown)
    if counting:
        tally("backward")
    if isinstance(cu_seqlens_q, Tensor) and cu_seqlens_q.is_cpu:
        check_bounds(q, k, cu_seqlens_q, cu_seqlens_k)
    if (
        mask is None
        and bias is None
        and sinks is None
        and softcap is _OFF
        and dropout_p is _OFF
        and rng is None
        and needs is _QKV
    ):
        tensors = (dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k)
        if grad_dtype is None:
            return run_bwd(*tensors, *options)
        return run_bwd_as(grad_dtype, *tensors, *options)
    asked = Asked(mask, bias, sinks, softcap, dropout_p)
    return run_modified_bwd(
        dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, options, asked, rng, needs, grad_dtype
    )
