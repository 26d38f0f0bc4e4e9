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
    q, k, v = _to_dense(query, batch), _to_dense(key, batch), _to_dense(value, batch)
    if not enable_gqa:
        q, k, v = _broadcast_heads(q, k, v)

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


def _broadcast_batch(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The common shape of everything before heads, sequence and head_dim."""
    for name, t in (("query", query), ("key", key), ("value", value)):
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
