"""The attention functions: dense, packed, and the functional pair of forward and backward.

Shapes are written with b = batch, h = query heads, h_k = key/value heads (h is a multiple of h_k; query head
i reads key head i // (h // h_k)), d = head_dim of q and k, dv = head_dim of v. Everything runs on CUDA
(float16, bfloat16; d and dv up to 256) and on CPU (also float32 and float64), accumulates in float32 or
wider, and needs memory linear in the sequence length.

Tensors may have any strides whose last one is 1. Results are contiguous. Nothing is copied, with one
exception: an incoming gradient whose last stride is not 1, such as that of ``out.sum()``.

Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .autograd import apply_under_transforms
from .ops import _C
from .spec import default_scale

_is_compiling = torch.compiler.is_compiling
_in_functorch = torch._C._are_functorch_transforms_active


# ---- public functions ----------------------------------------------------------------------------------


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    path: str | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    path: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    path: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q @ k^T) @ v, exact, differentiable in q, k and v.

    Causal and window masks are aligned at the bottom right: row i sits at key i + seqlen_k - seqlen_q, so the
    last query sees the last key whatever the lengths. A row that sees no key has out 0, lse -inf, and
    contributes nothing to any gradient.

    Args:
        q: (b, seqlen_q, h, d) float16 or bfloat16; on CPU also float32 or float64.
        k: (b, seqlen_k, h_k, d), dtype of q.
        v: (b, seqlen_k, h_k, dv), dtype of q.
        causal: hide the keys after a row's aligned position; the same as a right window of 0.
        window: (left, right), how many keys before and after the aligned position a row sees, both inclusive;
            -1 is unlimited.
        softmax_scale: factor on the dot products, any finite number; None is 1/sqrt(d).
        return_lse: also return the logsumexp of every row.
        deterministic: make the gradient of q repeatable bit for bit, as those of k and v always are. Slower
            on a GPU. ``torch.use_deterministic_algorithms(True)`` switches it on as well.
        path: the implementation: "sm80" on a GPU, "cpu" on CPU, None for the fastest that serves the call.

    Returns:
        out (b, seqlen_q, h, dv), dtype of q; with ``return_lse`` also lse (b, h, seqlen_q), natural logarithm
        of the sum of exponentials of the scaled scores, float32 (float64 for float64 inputs). Both carry
        gradients.

    Raises:
        ValueError, TypeError: an argument has a shape, stride, device, dtype or value that does not fit; the
            message names it. Also a ``path`` that cannot serve the call, with every path's reason.
        NotImplementedError: a head_dim above 256 on a GPU, or a GPU that no path serves.

    Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> flash_ext.attention(q, k, v, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    result = _run_fwd(q, k, v, None, None, None, None, softmax_scale, causal, window, deterministic, path)
    return result if return_lse else result[0]


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    path: str | None = None,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    path: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    path: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` for sequences of different lengths, packed one after the other without padding.

    Sequence i has rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q and the corresponding rows of k and v; it
    sees its own keys only. Either side of a sequence may be empty. The values of cu_seqlens stay on the
    device: there is no host synchronisation. Values outside the tensors are clamped, and rows that belong to
    no sequence have out 0, lse -inf and gradients 0.

    Args:
        q: (total_q, h, d); dtypes as in :func:`attention`.
        k: (total_k, h_k, d).
        v: (total_k, h_k, dv).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on the device of q, contiguous: where each sequence
            starts, and where the last one ends.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths in rows. They are checked and serve FLOP counts;
            no kernel needs them, and they change no result. Leave them out when they are not at hand.
        causal, window, softmax_scale, return_lse, deterministic, path: as in :func:`attention`, with the
            alignment of each sequence by its own lengths.

    Returns:
        out (total_q, h, dv); with ``return_lse`` also lse (h, total_q). As in :func:`attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: as in :func:`attention`.
    """
    result = _run_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window,
        deterministic, path,
    )  # fmt: skip
    return result if return_lse else result[0]


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
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    deterministic: bool = False,
    path: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward pass as a plain function: out and lse of dense or packed input.

    Args:
        q, k, v: as in :func:`attention` or, with ``cu_seqlens_q`` and ``cu_seqlens_k``, as in
            :func:`attention_varlen`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in :func:`attention_varlen`; None for dense
            input.
        causal, window, softmax_scale, deterministic, path: as in :func:`attention`.

    Returns:
        out (b, seqlen_q, h, dv) and lse (b, h, seqlen_q), or packed (total_q, h, dv) and (h, total_q).

    Raises:
        ValueError, TypeError, NotImplementedError: as in :func:`attention`.
    """
    return _run_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window,
        deterministic, path,
    )  # fmt: skip


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
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    deterministic: bool = False,
    path: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from given results of the forward pass, whoever computed them.

    The weights are recomputed as exp(softmax_scale * q @ k^T - lse). When ``out`` and ``lse`` belong to a
    softmax over more keys than ``k`` holds (ring attention after merging), the results are this block's share
    of the gradients. It cannot be differentiated again: a second derivative raises.

    Args:
        dout: gradient of out, its shape and dtype, any strides.
        q, k, v: as in the forward pass.
        out: (b, seqlen_q, h, dv) or packed (total_q, h, dv), dtype of q.
        lse: (b, h, seqlen_q) or packed (h, total_q), float32 (float64 for float64 inputs). Rows with -inf
            contribute nothing.
        dlse: gradient of lse, its shape and dtype; None is zero.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, softmax_scale, path: as in the
            forward pass.
        deterministic: as in :func:`attention`.

    Returns:
        dq, dk, dv: shapes and dtypes of q, k, v, contiguous.

    Raises:
        ValueError, TypeError, NotImplementedError: as in :func:`attention`.
    """
    tensors = (dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k)
    options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, deterministic, path)
    grads: tuple[Tensor, Tensor, Tensor]
    if _is_compiling() or _in_functorch():
        grads = torch.ops.flash_ext.bwd.default(*tensors, *_operator_options(q, *options))
        return grads
    try:
        left, right = window
        return _C.bwd(
            *tensors, max_seqlen_q, max_seqlen_k, softmax_scale, causal, left, right, deterministic, path
        )
    except (TypeError, ValueError):
        _explain_tensors(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
        _explain_tensors(True, dlse=dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        _explain_options(*options)
        raise


# ---- routes --------------------------------------------------------------------------------------------


def _run_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    deterministic: bool,
    path: str | None,
) -> tuple[Tensor, Tensor]:
    """Calls the operator by the route that the situation needs; the last one is the everyday one.

    A compiler must see the operator itself, torch.func transforms need a Python autograd function, and
    everything else takes the extension's own entry, which costs less than half of torch.ops.
    """
    options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, deterministic, path)
    if _is_compiling():
        result: tuple[Tensor, Tensor] = torch.ops.flash_ext.fwd.default(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *_operator_options(q, *options)
        )
        return result
    try:
        if _in_functorch():
            return apply_under_transforms(
                q, k, v, cu_seqlens_q, cu_seqlens_k, *_operator_options(q, *options)
            )
        left, right = window
        return _C.fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, left,
            right, deterministic, path,
        )  # fmt: skip
    except (TypeError, ValueError):
        _explain_tensors(q=q, k=k, v=v)
        _explain_tensors(True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        _explain_options(*options)
        raise


def _operator_options(
    q: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    deterministic: bool,
    path: str | None,
) -> tuple[int, int, float, int, int, bool, str | None]:
    """The operator's options, with the defaults resolved and causal folded into the window.

    The entries of the extension module do the same (csrc/api_bindings.cpp).
    """
    left, right = window
    if softmax_scale is None:
        softmax_scale = default_scale(q.shape[-1])
    if causal and right >= -1:
        right = 0
    return max_seqlen_q or 0, max_seqlen_k or 0, softmax_scale, left, right, deterministic, path


# ---- words for arguments of a wrong type ---------------------------------------------------------------
# Only called after a failure, so that the everyday call pays nothing for them.


def _explain_tensors(may_be_none: bool = False, /, **tensors: Any) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not (may_be_none and value is None):
            wanted = "a torch.Tensor or None" if may_be_none else "a torch.Tensor"
            raise TypeError(f"{name} must be {wanted}, got {type(value).__qualname__}.")


def _explain_options(
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    softmax_scale: Any,
    causal: Any,
    window: Any,
    deterministic: Any,
    path: Any,
) -> None:
    # What pybind11 converts: anything with __index__ is an int, with __float__ a float, with __bool__ a bool.
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not is_pair or not all(hasattr(value, "__index__") for value in window):
        raise TypeError(f"window must be a pair of ints (left, right), got {window!r}.")
    for name, value in {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}.items():
        if value is not None and not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int or None, got {type(value).__qualname__}.")
    if softmax_scale is not None and not hasattr(softmax_scale, "__float__"):
        raise TypeError(f"softmax_scale must be a float or None, got {type(softmax_scale).__qualname__}.")
    for name, value in {"causal": causal, "deterministic": deterministic}.items():
        if not hasattr(value, "__bool__"):
            raise TypeError(f"{name} must be a bool, got {type(value).__qualname__}.")
    if path is not None and not isinstance(path, str):
        raise TypeError(f"path must be a str or None, got {type(path).__qualname__}.")
