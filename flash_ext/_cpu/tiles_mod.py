"""The CPU backend with score and mask modifiers, and a gradient for each of them, in O(seqlen) memory.

The algorithm is that of :mod:`flash_ext._cpu.tiles`, one sequence at a time. Biases, masks and the dropout
mask are read or made for one tile of scores, and the gradient of a bias is reduced over its broadcast
dimensions tile by tile into a tensor of its own size. Key blocks that no row sees are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ops.modifiers import Modifiers, of_sequence
from .._ops.spec import AttnSpec
from . import tiles as tiled
from .philox import keep_factor, keep_mask
from .tiles import accumulator_dtype, packed_sequences

INF = float("inf")

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@torch.no_grad()
def modified_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    mods: Modifiers,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    want_row_max: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention forward; shapes and meaning as :func:`flash_ext.attention`.

    Args:
        q, k, v: float16, bfloat16, float32 or float64, all of one dtype; any strides.
        spec: scale and window.
        mods: everything beyond them.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integer prefix sums; both given means packed input.
        want_row_max: whether to return the largest score of each row.
        out_dtype: what out is rounded to, None for the dtype of q.

    Returns:
        out: contiguous; 0 in rows that see no key or lie outside every sequence.
        lse: float32 (float64 for float64 inputs), contiguous; -inf in rows without key and sink.
        row_max: shape and dtype of lse; largest final score of a key that the row sees, -inf if there is
            none. Shape (0,) if it is not wanted.
    """
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=out_dtype or q.dtype)
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_full(lse_shape, -INF, dtype=accumulator_dtype(q))
    row_max = torch.full_like(lse, -INF) if want_row_max else lse.new_empty(0)
    for seq in _sequences(q, k, cu_seqlens_q, cu_seqlens_k):
        tiles = _ScoreTiles(seq, q, k, spec, mods)
        out_seq, lse[seq.lse], row_max_seq = _forward(q[seq.q], k[seq.k], v[seq.k], tiles)
        out[seq.q] = out_seq.transpose(0, 1)
        if want_row_max:
            row_max[seq.lse] = row_max_seq
    return out, lse, row_max


@torch.no_grad()
def modified_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttnSpec,
    mods: Modifiers,
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
    dbias = None
    if need_bias and mods.bias is not None:
        dbias = torch.zeros(mods.bias.shape, dtype=torch.float64 if mods.bias.ndim == 3 else dtype)
    # Few numbers that sum over all rows and keys: float64 costs nothing here, nor by distance above.
    dslopes, dsinks = (
        torch.zeros(x.shape, dtype=torch.float64) if need and x is not None else None
        for need, x in ((need_slopes, mods.slopes), (need_sinks, mods.sinks))
    )
    dq, dk, dv = (x.new_zeros(x.shape, dtype=grad_dtype or q.dtype) for x in (q, k, v))
    for seq in _sequences(q, k, cu_seqlens_q, cu_seqlens_k):
        own = _ModifierGradients(
            None if dbias is None else dbias[min(seq.index, dbias.shape[0] - 1)],
            dslopes if dslopes is None or dslopes.ndim == 1 else dslopes[seq.index],
            dsinks,
        )
        grads_seq = _backward(
            dout[seq.q], q[seq.q], k[seq.k], v[seq.k], out[seq.q], lse[seq.lse],
            None if dlse is None else dlse[seq.lse], _ScoreTiles(seq, q, k, spec, mods), own,
        )  # fmt: skip
        for grad, place, grad_seq in zip((dq, dk, dv), (seq.q, seq.k, seq.k), grads_seq, strict=True):
            grad[place] = grad_seq.transpose(0, 1)
    if dbias is not None and mods.bias is not None:
        dbias = dbias.to(mods.bias.dtype)
    dslopes, dsinks = (x if x is None else x.to(dtype) for x in (dslopes, dsinks))
    return dq, dk, dv, dbias, dslopes, dsinks


@dataclass(frozen=True)
class _Sequence:
    """Where one sequence lies: ``q`` and ``k`` index q- and k-shaped tensors, ``lse`` the shape of lse."""

    index: int
    q: int | slice
    k: int | slice
    lse: int | tuple[slice, slice]


def _sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> list[_Sequence]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return [_Sequence(b, b, b, b) for b in range(q.shape[0])]
    slices = packed_sequences(q, k, cu_seqlens_q, cu_seqlens_k)
    return [_Sequence(b, *rows, (slice(None), rows[0])) for b, rows in enumerate(slices)]


def _span(span: slice, size: int) -> slice:
    """The part of a span that a dimension of ``size`` has; a single element stands for every position."""
    return slice(0, 1) if size == 1 else slice(min(span.start, size), min(span.stop, size))


def _tile(x: Tensor, rows: slice, cols: slice) -> Tensor:
    """(heads, rows|1, cols|1) of a (heads, R|1, C|1) tensor, continued with 0 or False where that ends."""
    part = x[:, _span(rows, x.shape[1]), _span(cols, x.shape[2])]
    missing_rows, missing_cols = (
        0 if size == 1 else span.stop - span.start - part.shape[dim]
        for dim, size, span in ((1, x.shape[1], rows), (2, x.shape[2], cols))
    )
    return F.pad(part, (0, missing_cols, 0, missing_rows))


@dataclass(frozen=True)
class _ModifierGradients:
    """Where the gradients of one sequence are added: views of the results, or None if not wanted.

    dbias (num_heads|1, R|1, C|1) or, by distance, (num_heads|1, 2 n + 1); dslopes and dsinks (num_heads,).
    """

    dbias: Tensor | None
    dslopes: Tensor | None
    dsinks: Tensor | None

    def add_tile(self, dscores: Tensor, distance: Tensor, rows: slice, cols: slice) -> None:
        """Adds the gradient of a tile (num_heads, rows, cols) of final scores, at once reduced in size."""
        if self.dslopes is not None:
            self.dslopes.sub_((dscores * distance.abs()).sum(dim=(1, 2)))
        if self.dbias is not None and self.dbias.ndim == 2:
            _add_by_distance(self.dbias, dscores, int(distance[-1, 0]))
        elif self.dbias is not None:
            _, size_r, size_c = self.dbias.shape
            place = self.dbias[:, _span(rows, size_r), _span(cols, size_c)]
            if size_r != 1:
                dscores = dscores[:, : place.shape[1]]
            if size_c != 1:
                dscores = dscores[:, :, : place.shape[2]]
            place += dscores.sum_to_size(place.shape)


def _add_by_distance(entries: Tensor, dscores: Tensor, first: int) -> None:
    """Adds the diagonals of a tile to the entries (num_heads|1, 2 n + 1) of their distances.

    ``first`` is the distance of the diagonal that is the last row and the first key alone, the smallest one.
    """
    num_heads, rows, cols = dscores.shape
    # The last row on top and each row one place further right than the row above it: columns are diagonals.
    width = rows + cols - 1
    shifted = F.pad(dscores.flip(1), (0, rows)).flatten(1)[:, : rows * width]
    sums = shifted.view(num_heads, rows, width).sum(dim=1).sum_to_size(entries.shape[0], width)
    reach = entries.shape[1] // 2
    index = torch.arange(first, first + width).clamp(-reach, reach) + reach
    entries.index_add_(1, index, sums.to(entries.dtype))


class _ScoreTiles:
    """What makes scores of the products of one sequence, and which of them count, tile by tile.

    Rows and keys are counted inside the sequence; tiles are (num_heads, rows, cols).
    """

    def __init__(self, seq: _Sequence, q: Tensor, k: Tensor, spec: AttnSpec, mods: Modifiers):
        rows = (seq.q, seq.k) if isinstance(seq.q, slice) and isinstance(seq.k, slice) else ()
        self.mods = mods = of_sequence(mods, seq.index, *rows)
        self.index, self.spec, self.dtype = seq.index, spec, accumulator_dtype(q)
        self.num_heads, self.num_heads_k = q.shape[-2], k.shape[-2]
        self.seqlen_q, self.seqlen_k = q[seq.q].shape[0], k[seq.k].shape[0]
        self.centre = torch.arange(self.seqlen_q) + (0 if mods.top_left else self.seqlen_k - self.seqlen_q)
        self.lo, self.hi, self.always = self._base_rule()
        self.dropout = mods.rng is not None and mods.dropout_p > 0
        self.keep_factor = keep_factor(mods.dropout_p) if self.dropout else 1.0
        sinks = torch.full((self.num_heads,), -INF) if mods.sinks is None else mods.sinks
        self.sinks = sinks.to(self.dtype)[:, None, None]
        if mods.blocks is not None:
            missing = [
                max(0, -(-seqlen // size) - count)
                for seqlen, size, count in (
                    (self.seqlen_k, mods.block_cols, mods.blocks.shape[3]),
                    (self.seqlen_q, mods.block_rows, mods.blocks.shape[2]),
                )
            ]
            self.blocks = F.pad(mods.blocks[0], (0, missing[0], 0, missing[1]))

    def _base_rule(self) -> tuple[Tensor, Tensor, Tensor]:
        """(seqlen_q,) int64 each: by position, a row sees the keys [lo, hi) and those before ``always``."""
        centre, spec, mods, seqlen_k = self.centre, self.spec, self.mods, self.seqlen_k
        lo, hi = torch.zeros_like(centre), torch.full_like(centre, seqlen_k)
        if spec.window_left >= 0:
            lo = (centre - spec.window_left).clamp(min=0)
        if spec.window_right >= 0:
            hi = (centre + spec.window_right + 1).clamp(max=seqlen_k)
        always = hi.clamp(max=mods.sink_tokens)
        if mods.prefix_lens is not None:
            always = always.clamp(min=min(int(mods.prefix_lens[0]), seqlen_k))
        if mods.chunk:
            # Rows aligned before the first key have a chunk of negative positions, hence no key.
            first = centre.div(mods.chunk, rounding_mode="floor") * mods.chunk
            lo, hi = torch.maximum(lo, first), torch.minimum(hi, first + mods.chunk)
        return lo, hi, always

    def query_blocks(self) -> list[slice]:
        starts = range(0, self.seqlen_q, tiled.BLOCK_M)
        return [slice(start, min(start + tiled.BLOCK_M, self.seqlen_q)) for start in starts]

    def key_blocks(self, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """The key blocks that some row of some head sees, and the scores that do not count in each.

        Hidden scores are (num_heads|1, rows, cols) bool, or None if every score counts.
        """
        lo, hi = self.lo[rows], self.hi[rows]
        filled = lo < hi
        first, last = (int(lo[filled].min()), int(hi[filled].max())) if filled.any() else (0, 0)
        always = int(self.always[rows].max())
        for start in range(0, max(last, always), tiled.BLOCK_N):
            cols = slice(start, min(start + tiled.BLOCK_N, self.seqlen_k))
            if cols.stop > first or start < always:
                visible = self._visible(rows, cols)
                if visible.any():
                    yield cols, None if visible.all() else ~visible

    def _visible(self, rows: slice, cols: slice) -> Tensor:
        """(num_heads|1, rows, cols) bool; what may differ by head is read only if the rest leaves a key."""
        mods = self.mods
        row, col = torch.arange(rows.start, rows.stop)[:, None], torch.arange(cols.start, cols.stop)
        lo, hi, always = (x[rows, None] for x in (self.lo, self.hi, self.always))
        visible = (((col >= lo) & (col < hi)) | (col < always))[None]
        if mods.document_q is not None and mods.document_k is not None:
            of_row, of_key = mods.document_q[0, rows, None], mods.document_k[0, cols]
            visible = visible & (of_row == of_key) & (of_key >= 0)
        if not visible.any():
            return visible
        if mods.blocks is not None:
            visible = visible & self.blocks[:, row // mods.block_rows, col // mods.block_cols]
        if mods.mask is not None:
            visible = visible & _tile(mods.mask[0], rows, cols)
        if mods.hidden_rows is not None:
            for start, end in _intervals(mods.hidden_rows[0, :, cols]):
                visible = visible & ((row < start[:, None, :]) | (row >= end[:, None, :]))
        if mods.hidden_keys is not None:
            for start, end in _intervals(mods.hidden_keys[0, :, rows]):
                visible = visible & ((col < start[..., None]) | (col >= end[..., None]))
        return visible

    def scores(self, q_block: Tensor, k: Tensor, rows: slice, cols: slice) -> tuple[Tensor, Tensor | None]:
        """Final scores of a tile, and tanh(x / softcap) where there is one; nothing is hidden yet."""
        mods, tanh = self.mods, None
        scores = self.product(q_block, k[:, cols].mT).mul_(self.spec.softmax_scale)
        if mods.softcap:
            tanh = scores.div_(mods.softcap).tanh_()
            scores = tanh * mods.softcap
        if mods.bias is not None and mods.bias.ndim == 3:
            reach = mods.bias.shape[2] // 2
            index = self.distance(rows, cols).clamp(-reach, reach) + reach
            scores.add_(mods.bias[0][:, index].to(self.dtype))
        elif mods.bias is not None:
            scores.add_(_tile(mods.bias[0], rows, cols).to(self.dtype))
        if mods.slopes is not None:
            distance = self.distance(rows, cols).abs().to(self.dtype)
            scores.sub_(mods.slopes.to(self.dtype).view(-1, 1, 1) * distance)
        return scores, tanh

    def distance(self, rows: slice, cols: slice) -> Tensor:
        """(rows, cols) int64: key - centre."""
        return torch.arange(cols.start, cols.stop) - self.centre[rows, None]

    def kept(self, rows: slice, cols: slice) -> Tensor:
        """(num_heads, rows, cols): 1 where dropout keeps the weight, 0 where not."""
        assert self.mods.rng is not None
        row, col = torch.arange(rows.start, rows.stop), torch.arange(cols.start, cols.stop)
        mask = keep_mask(
            self.mods.rng, self.mods.dropout_p, torch.tensor([self.index]), self.num_heads, row, col
        )
        return mask[0].to(self.dtype)

    def grouped(self, x: Tensor) -> Tensor:
        """(num_heads, rows, n) to (num_heads_k, group * rows, n), a view if contiguous."""
        group = self.num_heads // self.num_heads_k if self.num_heads_k else 1
        return x.unflatten(0, (self.num_heads_k, group)).flatten(1, 2)

    def product(self, x: Tensor, of_key_heads: Tensor) -> Tensor:
        """(num_heads, rows, n) times (num_heads_k, n, features), each query head with its key head."""
        group = self.num_heads // self.num_heads_k if self.num_heads_k else 1
        product = self.grouped(x) @ of_key_heads
        return product.unflatten(1, (group, x.shape[1])).flatten(0, 1)


def _intervals(bounds: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The pairs (start, end) in the last dimension of ``hidden_rows`` or ``hidden_keys``."""
    return [(bounds[..., i], bounds[..., i + 1]) for i in range(0, bounds.shape[-1], 2)]


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(seqlen, heads, features) to (heads, seqlen, features) of ``dtype``, contiguous."""
    return x.transpose(0, 1).to(dtype).contiguous()


def _forward(q: Tensor, k: Tensor, v: Tensor, tiles: _ScoreTiles) -> tuple[Tensor, Tensor, Tensor]:
    """Forward of one sequence, q, k and v (seqlen, heads, features).

    Returns out (num_heads, seqlen_q, head_dim_v) and lse and row_max, both (num_heads, seqlen_q).
    """
    q, k, v = (_heads_first(x, tiles.dtype) for x in (q, k, v))
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse, maxima = q.new_empty(q.shape[:2]), q.new_empty(q.shape[:2])
    for rows in tiles.query_blocks():
        q_block = q[:, rows]
        acc_o = torch.zeros_like(out[:, rows])
        row_sum = q_block.new_zeros(*q_block.shape[:2], 1)
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
            acc_o = acc_o.mul_(rescale).add_(tiles.product(weights, v[:, cols]))
            row_max = new_max
        # The sink comes last, as one more key whose value is 0.
        shift = torch.maximum(row_max, tiles.sinks)
        shift = shift.masked_fill(shift == -INF, 0.0)
        rescale = (row_max - shift).exp_()
        row_sum = row_sum.mul_(rescale).add_((tiles.sinks - shift).exp_())
        empty = row_sum == 0
        lse[:, rows] = (row_sum.log() + shift).masked_fill_(empty, -INF).squeeze(2)
        maxima[:, rows] = row_max.squeeze(2)
        out[:, rows] = acc_o.mul_(rescale * tiles.keep_factor).div_(row_sum.masked_fill_(empty, 1.0))
    return out, lse, maxima


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    tiles: _ScoreTiles, grads: _ModifierGradients,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward of one sequence; lse and dlse (num_heads, seqlen_q), the rest (seqlen, heads, features).

    Returns dq, dk and dv as (heads, seqlen, features) and adds to ``grads``.
    """
    dout, q, k, v, out = (_heads_first(x, tiles.dtype) for x in (dout, q, k, v, out))
    lse = lse.to(tiles.dtype)[..., None]
    delta = (dout * out).sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta -= dlse.to(tiles.dtype)[..., None]
    # An empty row takes no part whatever its q, dout or dlse hold, NaN included; lse +inf gives weights of 0.
    empty = lse == -INF
    q, dout, delta = (x.masked_fill(empty, 0.0) for x in (q, dout, delta))
    lse = lse.masked_fill(empty, INF)

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in tiles.query_blocks():
        q_block, dout_block, lse_block, delta_block = (x[:, rows] for x in (q, dout, lse, delta))
        divisor = _lost_denominator(q_block, k, lse_block, tiles, rows)
        if grads.dsinks is not None:
            sink_weights = (tiles.sinks - lse_block).exp_().div_(divisor)
            grads.dsinks.sub_((sink_weights * delta_block).sum(dim=(1, 2)))
        for cols, hidden in tiles.key_blocks(rows):
            scores, tanh = tiles.scores(q_block, k, rows, cols)
            weights = scores.sub_(lse_block).exp_().div_(divisor)
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            dweights = tiles.product(dout_block, v[:, cols].mT)
            if tiles.dropout:
                factors = tiles.kept(rows, cols).mul_(tiles.keep_factor)
                dweights.mul_(factors)
                dv[:, cols] += tiles.grouped(weights * factors).mT @ tiles.grouped(dout_block)
            else:
                dv[:, cols] += tiles.grouped(weights).mT @ tiles.grouped(dout_block)
            dscores = dweights.sub_(delta_block).mul_(weights)
            grads.add_tile(dscores, tiles.distance(rows, cols), rows, cols)
            if tanh is not None:
                dscores.mul_(1 - tanh.square_())
            dscores.mul_(tiles.spec.softmax_scale)
            dk[:, cols] += tiles.grouped(dscores).mT @ tiles.grouped(q_block)
            dq[:, rows] += tiles.product(dscores, k[:, cols])
    return dq, dk, dv


def _lost_denominator(
    q_block: Tensor, k: Tensor, lse: Tensor, tiles: _ScoreTiles, rows: slice
) -> Tensor:
    """(num_heads, rows, 1): what exp(score - lse) has to be divided by; 1 for ordinary rows.

    A row whose keys all have the lowest finite number as bias has an lse of that size, in which the logarithm
    of the denominator is lost to rounding. Its weights no longer sum to 1, so the sum is formed again.
    """
    lost = (lse.abs() >= 1 / torch.finfo(lse.dtype).eps) & lse.isfinite()
    if not lost.any():
        return torch.ones_like(lse)
    row_sum = (tiles.sinks - lse).exp_()
    for cols, hidden in tiles.key_blocks(rows):
        weights = tiles.scores(q_block, k, rows, cols)[0].sub_(lse).exp_()
        if hidden is not None:
            weights.masked_fill_(hidden, 0.0)
        row_sum += weights.sum(dim=-1, keepdim=True)
    return row_sum.masked_fill_(~lost | (row_sum == 0), 1.0)
