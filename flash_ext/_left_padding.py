"""Caches whose sequences begin with padding: the keys behind it are read as pages of one key each.

So a kernel never reads the padding, and whatever it holds reaches no result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._masks.token_tree import TokenTree
from ._ops.dispatch_cached import check_values, may_read


class Padding(NamedTuple):
    """What :meth:`of` has checked, before anything is appended.

    Attributes:
        leftpad: (batch,) integers, the keys at the start of each sequence that are padding.
        k_cache, v_cache: pages, or entries.
        keys: both caches as pages of one key each.
        step: how many keys lie from page to page: key s of page p is page p * step + s of ``keys``.
    """

    leftpad: Tensor
    k_cache: Tensor
    v_cache: Tensor
    keys: tuple[Tensor, Tensor]
    step: int

    @classmethod
    def of(
        cls, leftpad: Tensor, table: Tensor | None, k_cache: Tensor, v_cache: Tensor, mask: object
    ) -> Padding:
        """Looks at what a call with padding is given; without a ``table`` sequence b has page b.

        Raises:
            NotImplementedError: a mask beside it counts keys from the first one, or the strides of a cache
                name no pages of one key.
            TypeError, ValueError: the table or a cache does not fit; where values may be read, padding is
                negative.
        """
        if mask is not None and not isinstance(mask, TokenTree):
            raise NotImplementedError(
                f"mask={type(mask).__qualname__} is not available with cache_leftpad. Hide the padding by "
                "the mask itself, as masks.KeyMask does, and leave cache_leftpad out."
            )
        batch = leftpad.shape[0]
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if x.dim() != 4 or x.shape[:2] != k_cache.shape[:2]:
                raise ValueError(
                    f"{name} must have shape (pages or entries, keys, num_heads, head_dim), the first two as "
                    f"k_cache has them, got {tuple(x.shape)}."
                )
        if table is None and k_cache.shape[0] < batch:
            raise ValueError(
                f"k_cache must have an entry for each of {batch} sequences, got {k_cache.shape[0]}."
            )
        if table is not None and table.dtype != torch.int32:
            raise TypeError(f"page_table must be torch.int32, got {table.dtype}.")
        if table is not None and (table.dim() != 2 or table.shape[0] != batch):
            raise ValueError(
                f"page_table must have shape (batch, max_pages) with batch {batch}, got {tuple(table.shape)}."
            )
        if may_read(leftpad) and bool((leftpad < 0).any()):
            b = int((leftpad < 0).nonzero()[0])
            raise ValueError(
                f"cache_leftpad must hold numbers of at least 0, got {int(leftpad[b])} for sequence {b}."
            )
        return cls(leftpad, k_cache, v_cache, *_as_single_keys(k_cache, v_cache))

    def behind(
        self, q: Tensor, cu_seqlens_q: Tensor | None, lengths: Tensor, table: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """block_table and seqused_k of ``keys`` behind the padding, which ``lengths`` count."""
        check_values(q, self.k_cache, cu_seqlens_q, None, lengths, table)
        batch, device = lengths.shape[0], lengths.device
        pages, size = self.k_cache.shape[:2]
        room = size * (1 if table is None else table.shape[1])
        first = self.leftpad.clamp(0, room).int()
        left = (lengths.clamp(0, room) - first).clamp(min=0).int()
        if room == 0 or pages == 0:
            return torch.zeros(batch, room, dtype=torch.int32, device=device), left * 0
        key = torch.arange(room, dtype=torch.int32, device=device) + first[:, None]
        key = key.clamp(max=room - 1)
        if table is None:
            page = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        else:
            page = table if table.shape[1] == 1 else table.gather(1, (key // size).long())
        return page.clamp(0, pages - 1) * self.step + key % size, left


def _as_single_keys(k_cache: Tensor, v_cache: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
    """``keys`` and ``step`` of :class:`Padding`. No table names what strides skip between pages."""
    pages, size = k_cache.shape[:2]
    caches = (k_cache, v_cache)
    if pages == 0 or size == 0:
        return (k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None]), size
    rows, step = [x.stride(1 if size > 1 else 0) for x in caches], size
    if pages > 1 and size > 1:
        step = k_cache.stride(0) // max(rows[0], 1)
        if min(rows) < 1 or any(x.stride(0) != step * row for x, row in zip(caches, rows, strict=True)):
            raise NotImplementedError(
                "cache_leftpad needs pages or entries that are a whole number of keys apart, the same in "
                f"k_cache and v_cache, got strides {k_cache.stride()} and {v_cache.stride()}."
            )
    count = (pages - 1) * step + size
    k, v = (
        x.as_strided((count, 1, *x.shape[2:]), (row, row, *x.stride()[2:]))
        for x, row in zip(caches, rows, strict=True)
    )
    return (k, v), step
