"""PyTorch's own attention signature and semantics."""

from __future__ import annotations

import torch
from torch import Tensor

from .functional import attention


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
    """Drop-in for :func:`torch.nn.functional.scaled_dot_product_attention`, for what it supports.

    The one difference in meaning between PyTorch's convention and :func:`flash_ext.attention` is respected:
    ``is_causal`` is aligned at the **top left** here (query i sees keys 0 to i), which matters when the
    lengths differ. Inputs are read in place.

    Args:
        query: (..., heads, seqlen_q, head_dim), with any number of leading dimensions, as in PyTorch; or
            (seqlen_q, head_dim).
        key: (..., heads_k, seqlen_k, head_dim); leading dimensions broadcast with those of query.
        value: (..., heads_k, seqlen_k, head_dim_v).
        attn_mask: must be None.
        dropout_p: must be 0.
        is_causal: hide keys after the query's own index.
        scale: factor on the dot products; None is 1/sqrt(head_dim).
        enable_gqa: allow heads to be a multiple of heads_k.

    Returns:
        (..., heads, seqlen_q, head_dim_v), dtype of query; a transposed view of contiguous
        (..., seqlen_q, heads, head_dim_v).

    Raises:
        NotImplementedError: attn_mask or dropout_p is given.
        ValueError, TypeError: as :func:`flash_ext.attention`; float32 on a GPU is refused.
    """
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask is not supported; use is_causal=True, flash_ext.attention(..., window=) for a band, "
            "flash_ext.attention_varlen instead of a padding mask, or PyTorch's function."
        )
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p must be 0, got {dropout_p}; apply dropout to the result, or use PyTorch's function."
        )
    batch = _broadcast_batch(query, key, value)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    q, k, v = (_to_dense(t, batch) for t in (query, key, value))
    heads = q.shape[2], k.shape[2], v.shape[2]
    if not enable_gqa and heads != (heads[0], 1, 1):
        # Without grouping the head dimension broadcasts too; a single key head needs no expansion.
        if len({*heads} - {1}) > 1:
            raise ValueError(
                f"query, key and value must have the same number of heads (dimension -3), got {heads}; "
                "for grouped-query attention pass enable_gqa=True."
            )
        q, k, v = (t.expand(-1, -1, max(heads), -1) for t in (q, k, v))

    window = (-1, -1)
    if is_causal:
        if seqlen_k > seqlen_q:
            # Keys beyond the last query are seen by nobody; without them both alignments are the same.
            k, v = k[:, :seqlen_q], v[:, :seqlen_q]
        window = (-1, max(seqlen_q - seqlen_k, 0))
    out = attention(q, k, v, window=window, softmax_scale=scale).transpose(1, 2)
    if query.dim() == 2:
        return out[0, 0]
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def _broadcast_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The common shape of everything before heads, sequence and head_dim."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(t.shape)}.")
    try:
        return tuple(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        raise ValueError(
            "the leading dimensions of query, key and value must broadcast, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        ) from None


def _to_dense(t: Tensor, batch: tuple[int, ...]) -> Tensor:
    """(..., heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim); copies only if strides force it."""
    if t.dim() == 2:
        t = t.unsqueeze(0)
    if t.shape[:-3] != batch:
        t = t.expand(*batch, *t.shape[-3:])
    if len(batch) != 1:
        t = t.reshape(-1, *t.shape[-3:]) if batch else t.unsqueeze(0)
    return t.transpose(1, 2)
