"""The float64 oracle: attention by its definition, with every score held in memory.

Clarity is the only goal. Outputs are differentiable, so autograd through this file is the truth for the
gradients as well, those of biases, slopes and sinks included. Memory is O(seqlen_q * seqlen_k) per head.

It shares nothing with what it judges but the two classes that describe a call. Packed bounds, the parts of a
sequence, visibility and the dropout mask have their definitions here and in :mod:`tests.philox`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec
from tests import philox

INF = float("inf")


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    isolate_rows: bool = False,
    mods: Modifiers | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scores) v and the logarithm of the softmax's denominator, in float64.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) when packed; any real
            dtype.
        k: (batch, seqlen_k, num_heads_k, head_dim) or (total_k, num_heads_k, head_dim). Query head ``h``
            reads key head ``h // (num_heads // num_heads_k)``.
        v: as k, with head_dim_v features.
        spec: scale and window.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integer prefix sums; both given means packed input.
        isolate_rows: treat each query row by itself, with just the keys it sees. Slow, and needed only when
            something is NaN or infinite: then a value shows exactly where it is visible, forward and
            backward, and not where a matrix product multiplies it by a zero weight.
        mods: everything else a call may ask for, or None for ``scale * q k^T`` inside the window.

    Returns:
        out: float64, (batch, seqlen_q, num_heads, head_dim_v) or (total_q, num_heads, head_dim_v); 0 in rows
            that see no key or lie outside every sequence.
        lse: float64 natural logarithm, (batch, num_heads, seqlen_q) or (num_heads, total_q), of the
            denominator before dropout. Rows that see no key hold -inf, or their sink if there is one; rows
            outside every sequence hold -inf.
    """
    out, lse, _ = _attention(q, k, v, spec, cu_seqlens_q, cu_seqlens_k, isolate_rows, mods)
    return out, lse


def row_max_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    isolate_rows: bool = False,
    mods: Modifiers | None = None,
) -> Tensor:
    """Each row's largest final score over the keys it sees, sink not counted; float64 in the shape of lse.

    Arguments as for :func:`attention_reference`. -inf in rows that see no key. Not differentiable.
    """
    return _attention(q, k, v, spec, cu_seqlens_q, cu_seqlens_k, isolate_rows, mods)[2]


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


def key_bounds(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """The same of keys, which nobody owns in a forward: any rows inside [0, total], shared or unordered."""
    cu = cu_seqlens.tolist()
    starts = [min(max(c, 0), total) for c in cu[:-1]]
    return [(start, min(max(end, start), total)) for start, end in zip(starts, cu[1:], strict=True)]


def of_sequence(
    mods: Modifiers, b: int, rows_q: slice | None = None, rows_k: slice | None = None
) -> Modifiers:
    """The modifiers of sequence ``b`` by itself: those of a dense call with a batch of one, all views.

    Args:
        mods: modifiers of a dense call, or of a packed one if the rows are given.
        b: index in the batch.
        rows_q, rows_k: rows of the sequence in packed tensors.

    ``bias``, ``mask`` and ``blocks`` of packed input keep their size, which may be above or below that of
    the sequence. The index ``b`` itself still enters the dropout mask.
    """
    own: dict[str, Tensor] = {}
    for name in ("bias", "mask", "blocks", "prefix_lens", "slopes"):
        x = getattr(mods, name)
        shared = x is None or (name == "slopes" and x.dim() == 1)
        if not shared and (len(x) > 1 or name == "prefix_lens"):
            own[name] = x[b, None]
    # With rows of their own, which packed tensors hold end to end.
    for name, rows in (("document_q", rows_q), ("document_k", rows_k), ("hidden_rows", rows_k),
                       ("hidden_keys", rows_q)):  # fmt: skip
        x = getattr(mods, name)
        if x is not None and rows is not None:
            own[name] = x[None, rows] if name.startswith("document") else x[None, :, rows]
        elif x is not None and len(x) > 1:
            own[name] = x[b, None]
    return replace(mods, **own)


def visible_interval(spec: AttnSpec, row: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Half-open interval of the keys that ``row`` sees through the window; empty ones have ``lo >= hi``."""
    centre = row + seqlen_k - seqlen_q
    lo = 0 if spec.window_left < 0 else max(0, centre - spec.window_left)
    hi = seqlen_k if spec.window_right < 0 else min(seqlen_k, centre + spec.window_right + 1)
    return lo, hi


def visible_mask(
    spec: AttnSpec,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | None = None,
    mods: Modifiers | None = None,
    b: int = 0,
    h: int = 0,
) -> Tensor:
    """(seqlen_q, seqlen_k) bool, True where the query row sees the key, in batch entry b and query head h.

    ``mods`` are those of a dense call; :func:`of_sequence` makes them from packed ones.
    A bias of -inf hides a key too, but is a number and no mask: it does not show here.
    """
    visible = _visible(spec, mods or Modifiers(), seqlen_q, seqlen_k, device)
    return visible[min(b, visible.shape[0] - 1), min(h, visible.shape[1] - 1)]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    isolate_rows: bool, mods: Modifiers | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse and row_max, dense or packed."""
    q, k, v, mods = q.double(), k.double(), v.double(), mods or Modifiers()
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _attend(q, k, v, spec, mods, torch.arange(q.shape[0], device=q.device), isolate_rows)

    # Rows are gathered once and split, so that backward adds each gradient once and not once per sequence.
    bounds_q = sequence_bounds(cu_seqlens_q, q.shape[0])
    bounds_k = key_bounds(cu_seqlens_k, k.shape[0])
    rows_q, rows_k = _covered_rows(bounds_q, q.device), _covered_rows(bounds_k, q.device)
    lens_q, lens_k = ([end - start for start, end in bounds] for bounds in (bounds_q, bounds_k))
    parts = zip(
        torch.split(q[rows_q], lens_q), torch.split(k[rows_k], lens_k), torch.split(v[rows_k], lens_k),
        strict=True,
    )  # fmt: skip
    # The part without rows keeps the graph connected when there is no sequence at all.
    results = [_attend(q[None, :0], k[None, :0], v[None, :0], spec, Modifiers(), rows_q[:0], isolate_rows)]
    for b, (qb, kb, vb) in enumerate(parts):
        own = of_sequence(mods, b, slice(*bounds_q[b]), slice(*bounds_k[b]))
        index = torch.tensor([b], device=q.device)
        results.append(_attend(qb[None], kb[None], vb[None], spec, own, index, isolate_rows))
    outs, lses, maxima = zip(*results, strict=True)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    nothing = q.new_full((q.shape[1], q.shape[0]), -INF)
    out = out.index_copy(0, rows_q, torch.cat(outs, dim=1)[0])
    lse, row_max = (nothing.index_copy(1, rows_q, torch.cat(x, dim=2)[0]) for x in (lses, maxima))
    return out, lse, row_max


def _covered_rows(bounds: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Row indices of all sequences, one after the other; (sum of lengths,) int64."""
    pieces = [torch.arange(start, end, device=device) for start, end in bounds]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def _grid(x: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(b, h, rows, cols) with rows and cols cut or continued with 0 or False; a single one is broadcast."""
    rows = 1 if x.shape[2] == 1 else seqlen_q
    cols = 1 if x.shape[3] == 1 else seqlen_k
    x = x[:, :, :rows, :cols]
    return F.pad(x, (0, cols - x.shape[3], 0, rows - x.shape[2]))


def _centres(mods: Modifiers, seqlen_q: int, seqlen_k: int, device: torch.device | None) -> Tensor:
    """(seqlen_q, 1) int64: the key position each row is aligned with."""
    shift = 0 if mods.top_left else seqlen_k - seqlen_q
    return torch.arange(seqlen_q, device=device)[:, None] + shift


def _visible(
    spec: AttnSpec, mods: Modifiers, seqlen_q: int, seqlen_k: int, device: torch.device | None
) -> Tensor:
    """(batch|1, num_heads|1, seqlen_q, seqlen_k) bool: every mask of a dense call by its definition."""
    rows, cols = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    centres = _centres(mods, seqlen_q, seqlen_k, device)
    visible = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=device)

    before_right_edge = visible if spec.window_right < 0 else cols <= centres + spec.window_right
    visible = visible & before_right_edge
    if spec.window_left >= 0:
        visible = visible & (cols >= centres - spec.window_left)
    if mods.chunk:
        # Rows aligned before the first key have a negative chunk, hence no key.
        visible = visible & (cols // mods.chunk == centres // mods.chunk)
    visible = visible | ((cols < mods.sink_tokens) & before_right_edge)
    if mods.prefix_lens is not None:
        visible = visible | (cols < mods.prefix_lens[:, None, None, None])

    if mods.mask is not None:
        visible = visible & _grid(mods.mask, seqlen_q, seqlen_k)
    if mods.document_q is not None and mods.document_k is not None:
        of_row, of_key = mods.document_q[:, None, :, None], mods.document_k[:, None, None, :]
        visible = visible & (of_row == of_key) & (of_key >= 0)
    if mods.hidden_rows is not None:
        for start, end in _intervals(mods.hidden_rows):
            visible = visible & ~((rows >= start[:, :, None, :]) & (rows < end[:, :, None, :]))
    if mods.hidden_keys is not None:
        for start, end in _intervals(mods.hidden_keys):
            visible = visible & ~((cols >= start[..., None]) & (cols < end[..., None]))
    if mods.blocks is not None:
        elements = mods.blocks.repeat_interleave(mods.block_rows, dim=2)
        elements = elements.repeat_interleave(mods.block_cols, dim=3)[:, :, :seqlen_q, :seqlen_k]
        short = (0, seqlen_k - elements.shape[3], 0, seqlen_q - elements.shape[2])
        visible = visible & F.pad(elements, short)
    return visible


def _intervals(bounds: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The (start, end) pairs in the last dimension of ``hidden_rows`` or ``hidden_keys``."""
    return [(bounds[..., i], bounds[..., i + 1]) for i in range(0, bounds.shape[-1], 2)]


def _score_terms(mods: Modifiers, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor | None:
    """(batch|1, num_heads|1, seqlen_q, seqlen_k) float64: bias and ALiBi of a dense call, or None."""
    if mods.bias is None and mods.slopes is None:
        return None
    terms = torch.zeros(1, 1, seqlen_q, seqlen_k, dtype=torch.float64, device=device)
    distance = torch.arange(seqlen_k, device=device) - _centres(mods, seqlen_q, seqlen_k, device)
    if mods.bias is not None and mods.bias.ndim == 3:
        reach = mods.bias.shape[2] // 2
        terms = terms + mods.bias.double()[:, :, reach + distance.clamp(-reach, reach)]
    elif mods.bias is not None:
        terms = terms + _grid(mods.bias.double(), seqlen_q, seqlen_k)
    if mods.slopes is not None:
        terms = terms - mods.slopes.double()[..., None, None] * distance.abs()
    return terms


def _kept(
    mods: Modifiers, batch_indices: Tensor, num_heads: int, seqlen_q: int, seqlen_k: int
) -> Tensor | None:
    """(batch, num_heads, seqlen_q, seqlen_k) float64 factors of the weights, None without dropout."""
    if mods.rng is None or mods.dropout_p == 0:
        return None
    return philox.factors(mods.rng, mods.dropout_p, batch_indices, num_heads, seqlen_q, seqlen_k)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, mods: Modifiers, batch_indices: Tensor,
    isolate_rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Dense attention of float64 tensors laid out as (batch, seqlen, heads, features)."""
    group = q.shape[2] // max(k.shape[2], 1)
    q = q.transpose(1, 2)
    k, v = (t.unsqueeze(3).expand(-1, -1, -1, group, -1).flatten(2, 3).transpose(1, 2) for t in (k, v))
    batch, num_heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]

    visible = _visible(spec, mods, seqlen_q, seqlen_k, q.device)
    terms = _score_terms(mods, seqlen_q, seqlen_k, q.device)
    kept = _kept(mods, batch_indices, num_heads, seqlen_q, seqlen_k)
    sinks = q.new_full((num_heads,), -INF) if mods.sinks is None else mods.sinks.double()

    if not isolate_rows or 0 in (batch, num_heads, seqlen_q):
        sinks = sinks[:, None, None]
        out, lse, row_max = _softmax_product(q, k, v, visible, terms, kept, sinks, spec, mods)
    else:
        grid = (batch, num_heads, seqlen_q)
        visible = visible.expand(*grid, -1)
        extras = [x if x is None else x.expand(*grid, -1) for x in (terms, kept)]
        results = []
        for b, h, i in itertools.product(*map(range, grid)):
            keys = visible[b, h, i].nonzero().squeeze(1)
            own_terms, own_kept = (x if x is None else x[b, h, i, keys] for x in extras)
            results.append(_softmax_product(
                q[b, h, i : i + 1], k[b, h, keys], v[b, h, keys], None, own_terms, own_kept, sinks[h], spec,
                mods,
            ))  # fmt: skip
        out, lse, row_max = (torch.cat(x).unflatten(0, grid) for x in zip(*results, strict=True))
    return out.transpose(1, 2).contiguous(), lse, row_max


def _softmax_product(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, terms: Tensor | None, kept: Tensor | None,
    sinks: Tensor, spec: AttnSpec, mods: Modifiers,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse and row_max of (..., rows, features) tensors; ``visible`` (..., rows, keys) or None for all.

    ``terms`` are added to the scores and ``kept`` multiplies the weights; ``sinks`` (..., 1, 1) is the logit
    that only the denominator counts, -inf for none.
    """
    scores = spec.scale * (q @ k.mT)
    if mods.softcap:
        scores = mods.softcap * torch.tanh(scores / mods.softcap)
    if terms is not None:
        scores = scores + terms
    if visible is not None:
        scores = scores.masked_fill(~visible, -INF)

    # The shift by the row's maximum cancels exactly, hence detach. A row without keys and sink has the
    # maximum -inf and the denominator 0; harmless values keep NaN out of its (zero) gradient.
    nothing = scores.new_full((*scores.shape[:-1], 1), -INF)
    row_max = torch.cat([scores.detach(), nothing], dim=-1).amax(dim=-1, keepdim=True)
    shift = torch.maximum(row_max, sinks.detach())
    shift = shift.masked_fill(shift == -INF, 0.0)
    weights = torch.exp(scores - shift)
    row_sum = weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - shift)
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1.0)
    if kept is not None:
        weights = weights * kept
    out = (weights / row_sum) @ v
    lse = (row_sum.log() + shift).masked_fill(empty, -INF)
    return out, lse.squeeze(-1), row_max.squeeze(-1)
