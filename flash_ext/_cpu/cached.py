"""Attention over a cache on the CPU: the keys of one sequence at a time, gathered and given to the tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._masks.token_tree import sees
from .._ops.modifiers import Modifiers
from .._ops.spec import AttnSpec
from . import tiles
from .fp8 import E4M3, LARGEST
from .rotary import turned

BYTES = (E4M3, torch.int8)
MOST = {E4M3: LARGEST, torch.int8: 127.0}  # no number of the type is larger


class Places(NamedTuple):
    """Where the keys of each sequence lie, as ``flash_ext::fwd_cached`` takes it.

    Attributes:
        cu_seqlens_k: bounds of rows one after another; None for pages, or for an entry a sequence.
        seqused_k: how many keys each sequence has; None is all that it has room for.
        block_table: pages of each sequence.
    """

    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None

    def rows(self, x: Tensor, b: int) -> Tensor:
        """(1, keys, heads, features) of sequence b; lengths and pages are kept inside what there is."""
        if self.block_table is None:
            if self.cu_seqlens_k is None:
                room = x[b]
            else:
                start, end = (min(max(int(at), 0), x.shape[0]) for at in self.cu_seqlens_k[b : b + 2])
                room = x[start : max(start, end)]
            return room[: self._length(b, room.shape[0])][None]
        pages, size = self.block_table[b], x.shape[1]
        length = self._length(b, pages.shape[0] * size if x.shape[0] else 0)
        used = pages[: -(-length // size)].long().clamp(0, max(x.shape[0] - 1, 0))
        return x[used].flatten(0, 1)[:length][None]

    def values(self, x: Tensor, descale: Tensor | None, b: int, to: torch.dtype) -> Tensor:
        """The rows of sequence b as numbers: those of 8 bits times their factors."""
        rows = self.rows(x, b)
        if x.dtype not in BYTES:
            return rows
        rows = rows.to(to)
        if descale is None:
            return rows
        if descale.dim() == 3:
            return rows * self.rows(descale.unsqueeze(-1), b).to(to)
        of_heads = descale[b] if descale.dim() == 2 else descale.reshape(-1)
        return rows * of_heads.to(to)[:, None]

    def _length(self, b: int, room: int) -> int:
        return room if self.seqused_k is None else min(max(int(self.seqused_k[b]), 0), room)


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    cu_seqlens_q: Tensor | None,
    places: Places,
    mods: Modifiers = tiles.NO_MODIFIERS,
    tree: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse; q is (batch, seqlen_q, heads, features), with its bounds (total_q, heads, features).

    mods: slopes, sinks, a softcap, a mask, documents and a bias; rows and keys count inside each sequence,
    and document_k is (batch, any). tree: int64, a word for each row of q, without a mask. k_descale,
    v_descale: factors of k and v of 8 bits, which are multiplied in float32 or wider.
    """
    wide = tiles.accumulator_dtype(q)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    if k.dtype in BYTES:
        q = q.to(wide)
    lse = q.new_full(lse_shape, -tiles.INF, dtype=wide)
    of_q = (tree, mods.document_q)
    if cu_seqlens_q is None:
        parts = [(q[b : b + 1], out[b], lse[b]) for b in range(q.shape[0])]
        of_rows = [[x if x is None else x[b] for x in of_q] for b in range(q.shape[0])]
    else:
        bounds = tiles.sequence_bounds(cu_seqlens_q, q.shape[0])
        parts = [(q[None, start:end], out[start:end], lse[:, start:end]) for start, end in bounds]
        of_rows = [[x if x is None else x[start:end] for x in of_q] for start, end in bounds]
    for b, (own_q, own_out, own_lse) in enumerate(parts):
        if own_q.shape[1] == 0:
            continue
        words, ids = of_rows[b]
        own_k, own_v = places.values(k, k_descale, b, wide), places.values(v, v_descale, b, wide)
        keys = own_k.shape[1]
        own = replace(
            mods,
            bias=_of_sequence(mods.bias, b),
            mask=_of_sequence(mods.mask, b) if words is None else _shown(words, keys),
            document_q=None if ids is None else ids[None],
            document_k=_ids_of(mods.document_k, b, keys),
            slopes=mods.slopes if mods.slopes is None or mods.slopes.dim() == 1 else mods.slopes[b : b + 1],
        )
        found, found_lse, _ = tiles.forward(own_q, own_k, own_v, spec, own)
        own_out.copy_(found[0])
        own_lse.copy_(found_lse[0])
    return out, lse


def _of_sequence(x: Tensor | None, b: int) -> Tensor | None:
    """(1, ...) of a tensor (batch or 1, ...)."""
    return x if x is None or x.shape[0] == 1 else x[b : b + 1]


def _ids_of(x: Tensor | None, b: int, keys: int) -> Tensor | None:
    """(1, keys) ids of a sequence; keys behind the last one that has an id are of no document."""
    return None if x is None else F.pad(x[b : b + 1, :keys], (0, max(keys - x.shape[1], 0)), value=-1)


def _shown(words: Tensor, keys: int) -> Tensor:
    """bool (1, 1, rows, keys) of a sequence: what its tree shows to each row."""
    bit = torch.arange(keys) - (keys - words.shape[0])
    return sees(words[:, None], bit)[None, None]


@torch.no_grad()
def append(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Writes new rows into the slots that there are; keys turned first, in float32 or wider.

    Into 8 bits they are divided by factors: those of slots are written, others given for heads or tokens.
    """
    pages, size = k_cache.shape[:2]
    inside = (slots >= 0) & (slots < pages * size)
    if not bool(inside.any()):
        return
    k_new, v_new, at = k_new[inside], v_new[inside], slots[inside].long()
    if cos is not None and sin is not None and positions is not None:
        row = positions[inside].long().clamp(0, cos.shape[0] - 1)
        wide = tiles.accumulator_dtype(k_new)
        k_new = turned(k_new, cos[row].to(wide)[:, None], sin[row].to(wide)[:, None], interleaved)
    place = (at // size, at % size)
    for x, cache, descale in ((k_new, k_cache, k_descale), (v_new, v_cache, v_descale)):
        if cache.dtype not in BYTES:
            cache[place] = x
            continue
        x = x.to(tiles.accumulator_dtype(x))
        if descale is not None and descale.dim() == 3:
            largest = x.abs().amax(-1)
            factor = torch.where(largest == 0, 1, largest.float() / MOST[cache.dtype])
            descale[place] = factor
        elif descale is None:
            factor = x.new_ones(())
        else:
            factor = descale[inside] if descale.dim() == 2 else descale
        cache[place] = _in_bytes(x / factor[..., None], cache.dtype)


def _in_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.clamp(-MOST[dtype], MOST[dtype])
    return x.round().to(dtype) if dtype == torch.int8 else x.to(dtype)
