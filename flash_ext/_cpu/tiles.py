"""The CPU backend: tiled online softmax from torch matmuls, forward and backward, in O(seqlen) memory.

It follows FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): query blocks outside, key blocks
inside, an unnormalised accumulator with running maximum and sum, one logsumexp per row kept for the backward
pass, which recomputes the weights from it. Arithmetic is float32, or float64 for float64 inputs; the query
heads that share a key head are folded into the rows of one product. Biases, masks and the dropout mask are
read or made for one tile of scores, and the gradient of a bias is reduced over its broadcast dimensions tile
by tile into a tensor of its own size. Key blocks that no row sees are skipped.

A NaN or infinity in a key that a row does not see may still reach that row if both lie in one tile, because
the products of a tile multiply it by a zero weight. Other sequences, batches and heads are never reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ops.modifiers import Modifiers
from .._ops.spec import AttnSpec
from .condensed import is_condensed_mask, mask_tile, plain_form
from .philox import keep_factor, keep_mask

INF = float("inf")

# Chosen for CPU caches; results do not depend on them beyond rounding. Rows and columns of a tile of scores,
# and how many scores a tile has over batch entries and heads, unless a single entry has more.
BLOCK_M = 128
BLOCK_N = 256
MAX_SCORES = 2**19

NO_MODIFIERS = Modifiers()
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    mods: Modifiers = NO_MODIFIERS,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    want_row_max: bool = False,
    out_dtype: torch.dtype | None = None,
    want_lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention forward; shapes and meaning as :func:`flash_ext.attention`.

    Args:
        q, k, v: float16, bfloat16, float32 or float64, all of one dtype; any strides.
        spec: scale and window.
        mods: everything beyond them.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integer prefix sums; both given means packed input.
        want_row_max: whether to return the largest score of each row.
        out_dtype: what out is rounded to, None for the dtype of q.
        want_lse: whether to return lse.

    Returns:
        out: contiguous; 0 in rows that see no key or lie outside every sequence.
        lse: float32 (float64 for float64 inputs), contiguous; -inf in rows without key and sink. Shape (0,)
            if it is not wanted.
        row_max: as lse; largest final score of a key that the row sees, -inf if there is none.
    """
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    mods = plain_form(mods, q.shape[-3], k.shape[-3], packed)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=out_dtype or q.dtype)
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse, row_max = (
        q.new_full(lse_shape if wanted else (0,), -INF, dtype=accumulator_dtype(q))
        for wanted in (want_lse, want_row_max)
    )
    for piece in _pieces(q, k, cu_seqlens_q, cu_seqlens_k):
        q_piece, k_piece, v_piece = piece.of_q(q), piece.of_k(k), piece.of_k(v)
        tiles = _ScoreTiles(piece, q_piece, k_piece, spec, mods)
        own_lse = piece.of_statistic(lse) if want_lse else None
        maxima = piece.of_statistic(row_max) if want_row_max else None
        _forward(q_piece, k_piece, v_piece, piece.of_q(out), own_lse, maxima, tiles)
    return out, lse, row_max


@torch.no_grad()
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttnSpec,
    mods: Modifiers = NO_MODIFIERS,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    need_bias: bool = False,
    need_slopes: bool = False,
    need_sinks: bool = False,
    grad_dtype: torch.dtype | None = None,
) -> Gradients:
    """Gradients from the output and lse that are given, whoever computed them.

    Args:
        dout: gradient of out, same shape.
        q, k, v, out, lse: inputs and results of the forward pass. ``out`` and ``lse`` may belong to a softmax
            over more keys than these, as in ring attention.
        spec, mods: as in the forward pass.
        dlse: gradient of lse, same shape, or None for zero.
        cu_seqlens_q, cu_seqlens_k: as in the forward pass.
        need_bias, need_slopes, need_sinks: which gradients of modifiers to compute.
        grad_dtype: what dq, dk and dv are rounded to, None for the dtype of q.

    Returns:
        dq, dk, dv: shapes of q, k and v, contiguous. Rows with lse -inf give and get exactly 0.
        dbias: shape and dtype of the bias, contiguous; None if not needed or without a bias.
        dslopes, dsinks: shapes of slopes and sinks, float32 (float64 for float64 inputs); None likewise.
    """
    dtype = accumulator_dtype(q)
    mods = plain_form(mods, q.shape[-3], k.shape[-3], cu_seqlens_q is not None)
    dbias = None
    if need_bias and mods.bias is not None:
        dbias = torch.zeros(mods.bias.shape, dtype=torch.float64 if mods.bias.ndim == 3 else dtype)
    # Few numbers that sum over all rows and keys: float64 costs nothing here, nor by distance above.
    dslopes, dsinks = (
        torch.zeros(x.shape, dtype=torch.float64) if need and x is not None else None
        for need, x in ((need_slopes, mods.slopes), (need_sinks, mods.sinks))
    )
    dq, dk, dv = (x.new_zeros(x.shape, dtype=grad_dtype or q.dtype) for x in (q, k, v))
    for piece in _pieces(q, k, cu_seqlens_q, cu_seqlens_k):
        q_piece, k_piece = piece.of_q(q), piece.of_k(k)
        found = _backward(
            piece.of_q(dout), q_piece, k_piece, piece.of_k(v), piece.of_q(out), piece.of_statistic(lse),
            None if dlse is None else piece.of_statistic(dlse),
            _ScoreTiles(piece, q_piece, k_piece, spec, mods),
            _ModifierGradients(
                None if dbias is None else piece.of_batch(dbias),
                None if dslopes is None else piece.of_slopes(dslopes),
                dsinks,
            ),
        )  # fmt: skip
        places = (piece.of_q(dq), piece.of_k(dk), piece.of_k(dv))
        for place, grad in zip(places, found, strict=True):
            place.add_(grad.transpose(1, 2))
    if dbias is not None and mods.bias is not None:
        dbias = dbias.to(mods.bias.dtype)
    dslopes, dsinks = (x if x is None else x.to(dtype) for x in (dslopes, dsinks))
    return dq, dk, dv, dbias, dslopes, dsinks


def accumulator_dtype(q: Tensor) -> torch.dtype:
    """What scores, sums and lse are held in: float64 for float64 inputs, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---- Pieces: what is computed at once --------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Some batch entries of a dense call, or one sequence of a packed one, seen as a batch of one.

    All parts are views that start with the batch: (n, seqlen, heads, features) and so on, written ``n`` here.

    Attributes:
        entries: which of the batch, or of the packed sequences.
        rows_q, rows_k: rows in packed tensors, None in a dense call.
    """

    entries: slice
    rows_q: slice | None = None
    rows_k: slice | None = None

    def of_q(self, x: Tensor) -> Tensor:
        """Of a tensor that starts as q does."""
        return x[self.entries] if self.rows_q is None else x[None, self.rows_q]

    def of_k(self, x: Tensor) -> Tensor:
        """Of a tensor that starts as k does."""
        return x[self.entries] if self.rows_k is None else x[None, self.rows_k]

    def of_statistic(self, x: Tensor) -> Tensor:
        """Of a tensor that starts as lse does."""
        return self.of_batch(x) if self.rows_q is None else x[None, :, self.rows_q]

    def of_batch(self, x: Tensor) -> Tensor:
        """Of a tensor (batch|1, ...), dense or packed."""
        return x if x.shape[0] == 1 else x[self.entries]

    def of_slopes(self, x: Tensor) -> Tensor:
        """(n|1, num_heads) of (num_heads,) or (batch, num_heads)."""
        return x[None] if x.ndim == 1 else self.of_batch(x)

    def of_modifiers(self, mods: Modifiers) -> Modifiers:
        """Those of a dense call with this batch; ``bias``, ``mask`` and ``blocks`` keep their size."""

        def hidden_rows(x: Tensor) -> Tensor:
            return self.of_batch(x) if self.rows_k is None else x[None, :, self.rows_k]

        parts = {
            "bias": self.of_batch, "mask": self.of_batch, "blocks": self.of_batch,
            "document_q": self.of_q, "document_k": self.of_k, "prefix_lens": lambda x: x[self.entries],
            "hidden_rows": hidden_rows, "hidden_keys": self.of_statistic, "slopes": self.of_slopes,
        }  # fmt: skip
        given = ((name, part, getattr(mods, name)) for name, part in parts.items())
        own = {name: part(x) for name, part, x in given if x is not None}
        return replace(mods, **own) if own else mods


def _pieces(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> list[_Piece]:
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        bounds = zip(
            sequence_bounds(cu_seqlens_q, q.shape[0]), _key_bounds(cu_seqlens_k, k.shape[0]), strict=True
        )
        return [_Piece(slice(b, b + 1), slice(*of_q), slice(*of_k)) for b, (of_q, of_k) in enumerate(bounds)]
    batch, seqlen_q, num_heads, _ = q.shape
    scores = num_heads * min(seqlen_q, BLOCK_M) * min(k.shape[1], BLOCK_N)
    count = max(1, MAX_SCORES // max(1, scores))
    return [_Piece(slice(b, min(b + count, batch))) for b in range(0, batch, count)]


def sequence_bounds(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """(start, end) rows of each packed sequence: in order, inside [0, total], whatever ``cu_seqlens`` holds.

    Each bound is forced between two that a search from the middle meets before it, at first 0 and ``total``.
    Where ``cu_seqlens`` is in order, bounds are what it holds.
    """
    bounds = cu_seqlens.tolist()
    intervals = [(-1, len(bounds) - 1, 0, total)]  # of sequences, -1 and batch those of no sequence
    while intervals:
        lo, hi, start, end = intervals.pop()
        if lo >= hi:
            continue
        mid = lo + (hi - lo + 1) // 2
        bounds[mid] = min(max(bounds[mid], start), end)
        intervals += [(lo, mid - 1, start, bounds[mid]), (mid, hi, bounds[mid], end)]
    return list(itertools.pairwise(bounds))


def _key_bounds(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """The same of keys, which nobody owns in a forward: any rows inside [0, total], shared or unordered."""
    cu = cu_seqlens.tolist()
    starts = [min(max(c, 0), total) for c in cu[:-1]]
    return [(start, min(max(end, start), total)) for start, end in zip(starts, cu[1:], strict=True)]


# ---- Tiles of scores -------------------------------------------------------------------------------------


def _span(span: slice, size: int) -> slice:
    """The part of a span that a dimension of ``size`` has; a single element stands for every position."""
    return slice(0, 1) if size == 1 else slice(min(span.start, size), min(span.stop, size))


def _tile(x: Tensor, rows: slice, cols: slice) -> Tensor:
    """(n, heads, rows|1, cols|1) of x (n, heads, R|1, C|1), which 0 or False continue where it ends."""
    part = x[:, :, _span(rows, x.shape[2]), _span(cols, x.shape[3])]
    missing_rows, missing_cols = (
        0 if size == 1 else span.stop - span.start - part.shape[dim]
        for dim, size, span in ((2, x.shape[2], rows), (3, x.shape[3], cols))
    )
    return F.pad(part, (0, missing_cols, 0, missing_rows)) if missing_rows or missing_cols else part


class _ScoreTiles:
    """What makes scores of the products of one piece, and which of them count, tile by tile.

    Rows and keys are counted inside the sequence; tiles are (n, num_heads, rows, cols).
    """

    def __init__(self, piece: _Piece, q: Tensor, k: Tensor, spec: AttnSpec, mods: Modifiers):
        self.mods = mods = piece.of_modifiers(mods)
        self.entries, self.spec, self.dtype = piece.entries, spec, accumulator_dtype(q)
        _, self.seqlen_q, self.num_heads, _ = q.shape
        _, self.seqlen_k, self.num_heads_k, _ = k.shape
        self.group = self.num_heads // self.num_heads_k if self.num_heads_k else 1
        self.centre = torch.arange(self.seqlen_q) + (0 if mods.top_left else self.seqlen_k - self.seqlen_q)
        self.lo, self.hi, self.always = self._base_rule()
        masks = (mods.mask, mods.document_q, mods.hidden_rows, mods.hidden_keys, mods.blocks)
        self.is_masked = any(x is not None for x in masks)
        self.dropout = mods.rng is not None and mods.dropout_p > 0
        self.keep_factor = keep_factor(mods.dropout_p) if self.dropout else 1.0
        sinks = torch.full((self.num_heads,), -INF) if mods.sinks is None else mods.sinks
        self.sinks = sinks.to(self.dtype)[:, None, None]
        if mods.blocks is not None:
            missing_rows, missing_cols = (
                max(0, -(-seqlen // size) - count)
                for seqlen, size, count in (
                    (self.seqlen_q, mods.block_rows, mods.blocks.shape[2]),
                    (self.seqlen_k, mods.block_cols, mods.blocks.shape[3]),
                )
            )
            self.blocks = F.pad(mods.blocks, (0, missing_cols, 0, missing_rows))

    def _base_rule(self) -> tuple[Tensor, Tensor, Tensor]:
        """By position, a row sees the keys [lo, hi) and those before ``always``.

        int64, lo and hi (seqlen_q,), which never fall from row to row, always (n|1, seqlen_q).
        """
        centre, spec, mods, seqlen_k = self.centre, self.spec, self.mods, self.seqlen_k
        lo, hi = torch.zeros_like(centre), torch.full_like(centre, seqlen_k)
        if spec.window_left >= 0:
            lo = (centre - spec.window_left).clamp(min=0)
        if spec.window_right >= 0:
            hi = (centre + spec.window_right + 1).clamp(max=seqlen_k)
        always = hi.clamp(max=mods.sink_tokens)[None]
        if mods.prefix_lens is not None:
            always = torch.maximum(always, mods.prefix_lens.clamp(max=seqlen_k)[:, None])
        if mods.chunk:
            # Rows aligned before the first key have a chunk of negative positions, hence no key.
            first = centre.div(mods.chunk, rounding_mode="floor") * mods.chunk
            lo, hi = torch.maximum(lo, first), torch.minimum(hi, first + mods.chunk)
        return lo, hi, always

    def query_blocks(self) -> list[slice]:
        starts = range(0, self.seqlen_q, BLOCK_M)
        return [slice(start, min(start + BLOCK_M, self.seqlen_q)) for start in starts]

    def key_blocks(self, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """The key blocks that some row of some head sees, and the scores that do not count in each.

        Hidden scores are (n|1, num_heads|1, rows, cols) bool, or None if every score counts.
        """
        first, all_from = (int(self.lo[row]) for row in (rows.start, rows.stop - 1))
        all_until, last = (int(self.hi[row]) for row in (rows.start, rows.stop - 1))
        always = int(self.always[:, rows].max())
        end = max(last, always)
        for start in range(0 if always > 0 else first, end, BLOCK_N):
            cols = slice(start, min(start + BLOCK_N, end))
            if cols.stop <= first and start >= always:
                continue
            if not self.is_masked and all_from <= cols.start and cols.stop <= all_until:
                yield cols, None
                continue
            visible = self._visible(rows, cols)
            if visible.any():
                yield cols, None if visible.all() else ~visible

    def _visible(self, rows: slice, cols: slice) -> Tensor:
        """(n|1, num_heads|1, rows, cols) bool; what differs by head is read only if the rest leaves a key."""
        mods = self.mods
        row, col = torch.arange(rows.start, rows.stop)[:, None], torch.arange(cols.start, cols.stop)
        lo, hi, always = self.lo[rows, None], self.hi[rows, None], self.always[:, None, rows, None]
        visible = ((col >= lo) & (col < hi)) | (col < always)
        if mods.document_q is not None and mods.document_k is not None:
            of_row, of_key = mods.document_q[:, None, rows, None], mods.document_k[:, None, None, cols]
            visible = visible & (of_row == of_key) & (of_key >= 0)
        if not visible.any():
            return visible
        if mods.blocks is not None:
            visible = visible & self.blocks[:, :, row // mods.block_rows, col // mods.block_cols]
        if mods.mask is not None:
            tile = mask_tile if is_condensed_mask(mods.mask) else _tile
            visible = visible & tile(mods.mask, rows, cols)
        if mods.hidden_rows is not None:
            for start, end in _intervals(mods.hidden_rows[:, :, cols]):
                visible = visible & ((row < start[:, :, None]) | (row >= end[:, :, None]))
        if mods.hidden_keys is not None:
            for start, end in _intervals(mods.hidden_keys[:, :, rows]):
                visible = visible & ((col < start[..., None]) | (col >= end[..., None]))
        return visible

    def scores(self, q_block: Tensor, k: Tensor, rows: slice, cols: slice) -> tuple[Tensor, Tensor | None]:
        """Final scores of a tile, and tanh(x / softcap) where there is one; nothing is hidden yet."""
        mods, tanh = self.mods, None
        scores = self.product(q_block, k[:, :, cols].mT).mul_(self.spec.scale)
        if mods.softcap:
            tanh = scores.div_(mods.softcap).tanh_()
            scores = tanh * mods.softcap
        if mods.bias is not None and mods.bias.ndim == 3:
            reach = mods.bias.shape[2] // 2
            index = self.distance(rows, cols).clamp(-reach, reach) + reach
            scores.add_(mods.bias[:, :, index].to(self.dtype))
        elif mods.bias is not None:
            scores.add_(_tile(mods.bias, rows, cols).to(self.dtype))
        if mods.slopes is not None:
            distance = self.distance(rows, cols).abs().to(self.dtype)
            scores.sub_(mods.slopes.to(self.dtype)[..., None, None] * distance)
        return scores, tanh

    def distance(self, rows: slice, cols: slice) -> Tensor:
        """(rows, cols) int64: key - centre."""
        return torch.arange(cols.start, cols.stop) - self.centre[rows, None]

    def kept(self, rows: slice, cols: slice) -> Tensor:
        """(n, num_heads, rows, cols): 1 where dropout keeps the weight, 0 where not."""
        assert self.mods.rng is not None
        batch, row, col = (torch.arange(span.start, span.stop) for span in (self.entries, rows, cols))
        return keep_mask(self.mods.rng, self.mods.dropout_p, batch, self.num_heads, row, col).to(self.dtype)

    def grouped(self, x: Tensor) -> Tensor:
        """(n, num_heads, rows, m) to (n, num_heads_k, group * rows, m), a view if contiguous."""
        return x if self.group == 1 else x.unflatten(1, (self.num_heads_k, self.group)).flatten(2, 3)

    def product(self, x: Tensor, of_key_heads: Tensor) -> Tensor:
        """(n, num_heads, rows, m) times (n, num_heads_k, m, features), each query head with its key head."""
        product = self.grouped(x) @ of_key_heads
        return product if self.group == 1 else product.unflatten(2, (self.group, x.shape[2])).flatten(1, 2)


def _intervals(bounds: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The pairs (start, end) in the last dimension of ``hidden_rows`` or ``hidden_keys``."""
    return [(bounds[..., i], bounds[..., i + 1]) for i in range(0, bounds.shape[-1], 2)]


# ---- Gradients of modifiers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModifierGradients:
    """Where the gradients of one piece are added: views of the results, or None if not wanted.

    dbias (n|1, num_heads|1, R|1, C|1) or, by distance, (n|1, num_heads|1, 2 reach + 1); dslopes
    (n|1, num_heads); dsinks (num_heads,).
    """

    dbias: Tensor | None
    dslopes: Tensor | None
    dsinks: Tensor | None

    @property
    def of_scores(self) -> bool:
        """Whether there are any that tiles add to."""
        return self.dbias is not None or self.dslopes is not None

    def add_tile(self, dscores: Tensor, distance: Tensor, rows: slice, cols: slice) -> None:
        """Adds the gradient of a tile (n, num_heads, rows, cols) of final scores, at once reduced in size."""
        if self.dslopes is not None:
            by_head = (dscores * distance.abs()).sum(dim=(2, 3))
            self.dslopes.sub_(by_head.double().sum_to_size(self.dslopes.shape))
        if self.dbias is not None and self.dbias.ndim == 3:
            _add_by_distance(self.dbias, dscores, int(distance[-1, 0]))
        elif self.dbias is not None:
            _, _, size_r, size_c = self.dbias.shape
            place = self.dbias[:, :, _span(rows, size_r), _span(cols, size_c)]
            if size_r != 1:
                dscores = dscores[:, :, : place.shape[2]]
            if size_c != 1:
                dscores = dscores[:, :, :, : place.shape[3]]
            place += dscores.sum_to_size(place.shape)


def _add_by_distance(entries: Tensor, dscores: Tensor, first: int) -> None:
    """Adds the diagonals of a tile to the entries (n|1, num_heads|1, 2 reach + 1) of their distances.

    ``first`` is the distance of the diagonal that is the last row and the first key alone, the smallest one.
    """
    n, num_heads, rows, cols = dscores.shape
    # The last row on top and each row one place further right than the row above it: columns are diagonals.
    width = rows + cols - 1
    shifted = F.pad(dscores.flip(2), (0, rows)).flatten(2)[..., : rows * width]
    sums = shifted.view(n, num_heads, rows, width).sum(dim=2).sum_to_size(*entries.shape[:2], width)
    reach = entries.shape[2] // 2
    index = torch.arange(first, first + width).clamp(-reach, reach) + reach
    entries.index_add_(2, index, sums.to(entries.dtype))


# ---- The algorithm ---------------------------------------------------------------------------------------


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, seqlen, heads, features) to (n, heads, seqlen, features) of ``dtype``, contiguous."""
    return x.transpose(1, 2).to(dtype).contiguous()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, maxima: Tensor | None,
    tiles: _ScoreTiles,
) -> None:  # fmt: skip
    """Forward of one piece, written to ``out`` and, where they are wanted, ``lse`` and ``maxima``.

    q, k, v and out are (n, seqlen, heads, features), lse and maxima (n, num_heads, seqlen_q).
    """
    q, k, v = (_heads_first(x, tiles.dtype) for x in (q, k, v))
    for rows in tiles.query_blocks():
        q_block = q[:, :, rows]
        acc_o = q_block.new_zeros(*q_block.shape[:3], v.shape[3])
        row_sum = q_block.new_zeros(*q_block.shape[:3], 1)
        row_max = torch.full_like(row_sum, -INF)
        for cols, hidden in tiles.key_blocks(rows):
            scores, _ = tiles.scores(q_block, k, rows, cols)
            if hidden is not None:
                scores.masked_fill_(hidden, -INF)
            new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
            # A row that has seen nothing yet has the maximum -inf; shifting by 0 keeps -inf - -inf away.
            shift = new_max.masked_fill(new_max == -INF, 0.0)
            weights = scores.sub_(shift).exp_()
            rescale = (row_max - shift).exp_()
            row_sum = row_sum.mul_(rescale).add_(weights.sum(dim=-1, keepdim=True))
            if tiles.dropout:
                weights.mul_(tiles.kept(rows, cols))
            acc_o = acc_o.mul_(rescale).add_(tiles.product(weights, v[:, :, cols]))
            row_max = new_max
        # The sink comes last, as one more key whose value is 0.
        shift = torch.maximum(row_max, tiles.sinks)
        shift = shift.masked_fill(shift == -INF, 0.0)
        rescale = (row_max - shift).exp_()
        row_sum = row_sum.mul_(rescale).add_((tiles.sinks - shift).exp_())
        empty = row_sum == 0
        if lse is not None:
            lse[:, :, rows] = (row_sum.log() + shift).masked_fill_(empty, -INF).squeeze(3)
        factor = (rescale * tiles.keep_factor).div_(row_sum.masked_fill_(empty, 1.0))
        out[:, rows] = acc_o.mul_(factor).transpose(1, 2)
        if maxima is not None:
            maxima[:, :, rows] = row_max.squeeze(3)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    tiles: _ScoreTiles, grads: _ModifierGradients,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward of one piece; lse and dlse (n, num_heads, seqlen_q), the rest (n, seqlen, heads, features).

    Returns dq, dk and dv as (n, heads, seqlen, features) and adds to ``grads``.
    """
    dout, q, k, v, out = (_heads_first(x, tiles.dtype) for x in (dout, q, k, v, out))
    lse = lse.to(tiles.dtype)[..., None]
    delta = (dout * out).sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta -= dlse.to(tiles.dtype)[..., None]
    # An empty row takes no part whatever its q, dout or dlse hold, NaN included; lse +inf gives weights of 0.
    empty = lse == -INF
    if empty.any():
        q, dout, delta = (x.masked_fill(empty, 0.0) for x in (q, dout, delta))
        lse = lse.masked_fill(empty, INF)

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in tiles.query_blocks():
        q_block, dout_block, lse_block, delta_block = (x[:, :, rows] for x in (q, dout, lse, delta))
        divisor = _lost_denominator(q_block, k, lse_block, tiles, rows)
        if grads.dsinks is not None:
            sink_weights = (tiles.sinks - lse_block).exp_()
            if divisor is not None:
                sink_weights.div_(divisor)
            grads.dsinks.sub_((sink_weights * delta_block).sum(dim=2).double().sum(dim=(0, 2)))
        for cols, hidden in tiles.key_blocks(rows):
            scores, tanh = tiles.scores(q_block, k, rows, cols)
            weights = scores.sub_(lse_block).exp_()
            if divisor is not None:
                weights.div_(divisor)
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            dweights = tiles.product(dout_block, v[:, :, cols].mT)
            used = weights
            if tiles.dropout:
                factors = tiles.kept(rows, cols).mul_(tiles.keep_factor)
                dweights.mul_(factors)
                used = weights * factors
            dv[:, :, cols] += tiles.grouped(used).mT @ tiles.grouped(dout_block)
            dscores = dweights.sub_(delta_block).mul_(weights)
            if grads.of_scores:
                grads.add_tile(dscores, tiles.distance(rows, cols), rows, cols)
            if tanh is not None:
                dscores.mul_(1 - tanh.square_())
            dscores.mul_(tiles.spec.scale)
            dk[:, :, cols] += tiles.grouped(dscores).mT @ tiles.grouped(q_block)
            dq[:, :, rows] += tiles.product(dscores, k[:, :, cols])
    return dq, dk, dv


def _lost_denominator(
    q_block: Tensor, k: Tensor, lse: Tensor, tiles: _ScoreTiles, rows: slice
) -> Tensor | None:
    """(n, num_heads, rows, 1): what exp(score - lse) has to be divided by; None if all rows are ordinary.

    A row whose keys all have the lowest finite number as bias has an lse of that size, in which the logarithm
    of the denominator is lost to rounding. Its weights no longer sum to 1, so the sum is formed again.
    """
    lost = (lse.abs() >= 1 / torch.finfo(lse.dtype).eps) & lse.isfinite()
    if not lost.any():
        return None
    row_sum = (tiles.sinks - lse).exp_()
    for cols, hidden in tiles.key_blocks(rows):
        weights = tiles.scores(q_block, k, rows, cols)[0].sub_(lse).exp_()
        if hidden is not None:
            weights.masked_fill_(hidden, 0.0)
        row_sum += weights.sum(dim=-1, keepdim=True)
    return row_sum.masked_fill_(~lost | (row_sum == 0), 1.0)
