"""PyTorch's own attention signature and semantics."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ._attention import attention
from ._count import counting, tally
from ._masks.atoms import Causal, Dense
from ._masks.value import Mask, for_one_call
from ._ops.dispatch import check_strided
from ._ops.words import refuse_kind


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for :func:`torch.nn.functional.scaled_dot_product_attention`.

    The one difference in meaning between PyTorch's convention and :func:`flash_ext.attention` is respected:
    ``is_causal`` is aligned at the **top left** here (query i sees keys 0 to i), which matters when the
    lengths differ. Inputs and masks are read in place. Rows that see no key are 0.

    Source: PyTorch's documentation of that function; the algorithm is that of :func:`flash_ext.attention`.

    Args:
        query: (..., heads, seqlen_q, head_dim), with any number of leading dimensions, as in PyTorch; or
            (seqlen_q, head_dim).
        key: (..., heads_k, seqlen_k, head_dim); leading dimensions broadcast with those of query.
        value: (..., heads_k, seqlen_k, head_dim_v).
        attn_mask: broadcasts to (..., heads, seqlen_q, seqlen_k); bool (True = take part), or float32 or the
            dtype of query and then added to the scores, with a gradient.
        dropout_p: probability, 0..1, of dropping a weight; applied whenever it is not 0, in evaluation too,
            as in PyTorch. Which weights it drops is not what PyTorch would drop from the same seed.
        is_causal: hide keys after the query's own index. Unlike in PyTorch it may go with attn_mask: a key
            takes part if both let it.
        scale: factor on the dot products; None is 1/sqrt(head_dim).
        enable_gqa: allow heads to be a multiple of heads_k.

    Returns:
        (..., heads, seqlen_q, head_dim_v), dtype of query; a transposed view of contiguous
        (..., seqlen_q, heads, head_dim_v).

    Raises:
        ValueError, TypeError: as :func:`flash_ext.attention`; float32 on a GPU is refused.
    """
    if counting:
        tally("scaled_dot_product_attention")
    batch = _broadcast_batch(query, key, value)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    q, k, v = _to_dense(query, batch), _to_dense(key, batch), _to_dense(value, batch)
    if not enable_gqa:
        q, k, v = _broadcast_heads(q, k, v)

    if attn_mask is not None or dropout_p != 0.0:
        mask: Mask | None = Causal("top_left") if is_causal else None
        given, bias = _to_dense_mask(attn_mask, batch), None
        if given is not None:
            _check_mask(given, (q.shape[0], q.shape[2], seqlen_q, seqlen_k))
        if given is not None and given.dtype == torch.bool:
            mask = for_one_call(Dense(given) if mask is None else mask & Dense(given))
        elif given is not None:
            warn_about_zero_one_mask(given)
            bias = given
        out = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    else:
        window = (-1, -1)
        if is_causal:
            if seqlen_k > seqlen_q:
                # Keys beyond the last query are seen by nobody; without them both alignments are the same.
                k, v = k[:, :seqlen_q], v[:, :seqlen_q]
            window = (-1, max(seqlen_q - seqlen_k, 0))
        out = attention(q, k, v, window_size=window, scale=scale)
    out = out.transpose(1, 2)
    if query.dim() == 2:
        return out[0, 0]
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def _broadcast_batch(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The common shape of everything before heads, sequence and head_dim."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            refuse_kind(name, t)
        check_strided(name, t)
        if t.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(t.shape)}.")
    batch = query.shape[:-3]
    if key.shape[:-3] == batch and value.shape[:-3] == batch:
        return batch
    try:
        return torch.Size(torch.broadcast_shapes(batch, key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        raise ValueError(
            "the leading dimensions of query, key and value must broadcast, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        ) from None


def _broadcast_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Without grouping, the head dimension (2) broadcasts too; a single key head needs no expansion."""
    heads = q.shape[2], k.shape[2], v.shape[2]
    if heads[0] == heads[1] == heads[2] or heads[1] == heads[2] == 1:
        return q, k, v
    if len({*heads} - {1}) > 1:
        raise ValueError(
            f"query, key and value must have the same number of heads (dimension -3), got {heads}; "
            "for grouped-query attention pass enable_gqa=True."
        )
    most = max(heads)
    return q.expand(-1, -1, most, -1), k.expand(-1, -1, most, -1), v.expand(-1, -1, most, -1)


def _to_dense(t: Tensor, batch: torch.Size) -> Tensor:
    """(..., heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim); copies only if strides force it."""
    if t.dim() != 4 or len(batch) != 1 or t.shape[0] != batch[0]:
        if t.dim() == 2:
            t = t.unsqueeze(0)
        t = t.expand(*batch, *t.shape[-3:])
        t = t.reshape(-1, *t.shape[-3:]) if batch else t.unsqueeze(0)
    return t.transpose(1, 2)


def _to_dense_mask(mask: Tensor | None, batch: torch.Size) -> Tensor | None:
    """A mask whose dimensions before heads, if any, are one batch dimension."""
    if not isinstance(mask, Tensor) or mask.dim() < 4 or len(batch) == 1:
        return mask
    try:
        mask = mask.expand(*batch, *mask.shape[-3:])
    except RuntimeError:
        raise ValueError(
            f"attn_mask must broadcast to (..., heads, seqlen_q, seqlen_k) with {tuple(batch)} in front, got "
            f"{tuple(mask.shape)}."
        ) from None
    return mask.reshape(-1, *mask.shape[-3:]) if batch else mask


def _check_mask(mask: Any, sizes: tuple[int, ...]) -> None:
    """In words of this function; what is left to say is said by :func:`flash_ext.attention`."""
    if not isinstance(mask, Tensor):
        refuse_kind("attn_mask", mask, True)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            "attn_mask must be torch.bool (True = take part) or floating point (added to the scores), got "
            f"{mask.dtype}. For a mask of 0 and 1 pass attn_mask.bool()."
        )
    if not 1 <= mask.dim() <= 4 or any(n not in (1, size) for n, size in zip(mask.shape[::-1], sizes[::-1])):
        raise ValueError(
            f"attn_mask must broadcast to (batch, heads, seqlen_q, seqlen_k) = {sizes}, got "
            f"{tuple(mask.shape)}."
        )


# ---- the mask that is added although it was meant to be applied ----------------------------------------

FLOAT_MASKS_LOOKED_AT = 16
ELEMENTS_LOOKED_AT = (2, 2, 32, 32)  # along (batch, num_heads, seqlen_q, seqlen_k)


class _ZeroOneWatch:
    """How many float masks will still be looked at in this process."""

    left = FLOAT_MASKS_LOOKED_AT


def warn_about_zero_one_mask(t: Tensor) -> None:
    """Warns, once per process, about a float mask that holds only 0 and 1.

    Looked at are the first 16 float masks of the process, and of each at most 4096 elements spread over all
    of it; at least one must be 1, because a bias of zeros is a common start. On a GPU a look waits for the
    device. None is taken while compiling, tracing, capturing a CUDA graph, or under a dispatch mode or a
    torch.func transform.
    """
    if torch.compiler.is_compiling() or _ZeroOneWatch.left == 0:
        return
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or t.is_meta:
        return
    if type(t) not in (Tensor, torch.nn.Parameter) or not 1 <= t.dim() <= 4 or t.numel() == 0:
        return
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    _ZeroOneWatch.left -= 1
    limits = ELEMENTS_LOOKED_AT[4 - t.dim() :]
    sample = t.detach()[tuple(slice(None, None, -(-n // most)) for n, most in zip(t.shape, limits))]
    is_one = sample == 1
    if bool(is_one.any() & (is_one | (sample == 0)).all()):
        _ZeroOneWatch.left = 0
        warnings.warn(
            f"attn_mask is {t.dtype} and holds only 0 and 1: a float mask is added to the scores, not "
            "applied. For a mask of 1 = take part and 0 = hide pass attn_mask.bool().",
            UserWarning,
            stacklevel=3,  # the caller of scaled_dot_product_attention
        )
