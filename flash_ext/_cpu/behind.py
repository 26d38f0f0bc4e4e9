"""``flash_ext::append_behind`` on the CPU: new tokens go behind the keys there are, by torch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import cached
from .rotary import turned


class Ends(NamedTuple):
    """Where new tokens go, as ``flash_ext::append_behind`` takes it.

    Attributes:
        lengths: (batch,) int32 or int64, keys of each sequence; kept inside what there is room for.
        block_table: (batch, max_pages) pages of each sequence.
        entries: (batch,) entries of a dense cache. One that is not there has no keys, and of several
            sequences with one entry the first has it, where any token is new. Neither this nor a table:
            sequence b has entry b.
    """

    lengths: Tensor
    block_table: Tensor | None
    entries: Tensor | None

    def slots(self, count: int, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slots (batch, count) of new tokens, -1 for none, their positions, and new lengths (batch,) int32.

        A slot may be outside of the cache, where the table names a page that is not there.
        """
        page_size = cache.shape[1]
        room = page_size * (1 if self.block_table is None else self.block_table.shape[1])
        first = self.lengths.long().clamp(0, room)
        positions = first[:, None] + torch.arange(count, device=first.device)
        inside = positions.clamp(max=max(room - 1, 0))
        number = inside // max(page_size, 1)  # of the page in its sequence
        lengths = (first + count).clamp(max=room).to(torch.int32)
        if self.block_table is not None:
            page = self.block_table.gather(1, number).long() if room else positions
        elif self.entries is None:
            page = torch.arange(first.shape[0], device=first.device)[:, None]
        else:
            there = exists = (self.entries >= 0) & (self.entries < cache.shape[0])
            if count:
                there = exists & ~has_earlier_owner(self.entries, exists)
            page = self.entries.long().where(there, -1)[:, None]
            lengths = lengths.where(there, 0)
        outside = (positions >= room) | (page < 0)
        return (inside + (page - number) * page_size).masked_fill(outside, -1), positions, lengths


def has_earlier_owner(entries: Tensor, exists: Tensor) -> Tensor:
    """Which sequences have an entry that an earlier one has."""
    return ((entries[:, None] == entries) & exists).tril(-1).any(1) & exists


@torch.no_grad()
def append(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ends: Ends,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q: Tensor | None,
    cu_seqlens_q: Tensor | None,
    counts: bool,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Writes new rows (batch, count, heads, features); returns new lengths and the turned copy of q."""
    count = k_new.shape[1]
    slots, positions, new_lengths = ends.slots(count, k_cache)
    descales = [
        x.repeat_interleave(count, 0) if x is not None and x.dim() == 2 else x for x in (k_descale, v_descale)
    ]
    cached.append(
        k_new.flatten(0, 1), v_new.flatten(0, 1), k_cache, v_cache, slots.flatten(), cos, sin,
        positions.flatten(), interleaved, *descales,
    )  # fmt: skip
    if q is None or cos is None or sin is None:
        return new_lengths, k_new.new_empty(0)
    return new_lengths, turned_queries(q, cu_seqlens_q, ends.lengths, counts, (cos, sin), interleaved)


def turned_queries(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    lengths: Tensor,
    counts: bool,
    factors: tuple[Tensor, Tensor],
    interleaved: bool,
) -> Tensor:
    """q turned by its positions, which count from the length of its sequence where ``counts``."""
    if cu_seqlens_q is None:
        steps = torch.arange(q.shape[1], device=q.device) * counts
        positions = lengths.long()[:, None] + steps
    elif lengths.shape[0] == 0:  # rows of no sequence
        positions = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
    else:
        row = torch.arange(q.shape[0], device=q.device)
        b = torch.searchsorted(cu_seqlens_q[1:].long(), row, right=True).clamp(max=lengths.shape[0] - 1)
        positions = lengths.long()[b] + (row - cu_seqlens_q.long()[b]) * counts
    positions = positions.clamp(0, factors[0].shape[0] - 1)
    cos, sin = (t.float()[positions][..., None, :] for t in factors)
    return turned(q, cos, sin, interleaved).contiguous()
