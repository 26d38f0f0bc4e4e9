"""Random expressions of masks beside their meaning, which is computed here, pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash_ext import masks
from flash_ext.masks import Mask

BATCH, HEADS = 2, 2
LENGTHS = ((12, 12), (9, 18), (18, 9), (1, 18), (20, 20))


class Said(NamedTuple):
    """A mask, and what it means: bool (BATCH, HEADS, q_len, k_len)."""

    mask: Mask
    means: Tensor


def written_out(rule: Callable[[int, int, int, int], bool], q_len: int, k_len: int) -> Tensor:
    """The definition of a mask, one pair after the other."""
    return torch.tensor(
        [[[[bool(rule(b, h, i, j)) for j in range(k_len)] for i in range(q_len)] for h in range(HEADS)]
         for b in range(BATCH)]
    ).view(BATCH, HEADS, q_len, k_len)  # fmt: skip


def _numbers(draw, shape: tuple[int, ...], low: int, high: int) -> Tensor:
    seed = draw(st.integers(0, 2**31))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=dtype)


def _truth(draw, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.7, 0.95]))


def _reader(tensor: Tensor, vectors: bool = False) -> Callable[..., Any]:
    """Gives elements, or vectors of the last dimension, by index.

    Dimensions of size 1 repeat and leading ones may be missing. Plain lists, which are read a hundred times
    faster than tensors.
    """
    values, sizes = tensor.tolist(), tensor.shape[: tensor.dim() - vectors]

    def at(*index: int) -> Any:
        found = values
        for i, size in zip(index[len(index) - len(sizes) :], sizes):
            found = found[i if size > 1 else 0]
        return found

    return at


def _hit(bounds: list[int], number: int) -> bool:
    return any(start <= number < end for start, end in zip(bounds[::2], bounds[1::2]))


BANDS = ("causal", "window", "chunks")
WIDENING = ("prefix", "sink_tokens")
HIDING = ("documents", "key_mask", "hidden_rows", "hidden_keys", "block_mask", "dense")


@st.composite
def atoms(draw, q_len: int, k_len: int, alignment: str, kinds: tuple[str, ...]) -> Said:
    kind = draw(st.sampled_from(kinds))
    shift = k_len - q_len if alignment == "bottom_right" else 0
    lead = draw(st.sampled_from([(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)]))
    if kind == "causal":
        mask: Mask = masks.Causal(alignment)
        rule = lambda b, h, i, j: j <= i + shift  # noqa: E731
    elif kind == "window":
        left, right = (draw(st.sampled_from([-1, 0, 1, 3, 7, 30])) for _ in range(2))
        mask = masks.Window(left, right, alignment)
        rule = lambda b, h, i, j: (  # noqa: E731
            (left < 0 or j >= i + shift - left) and (right < 0 or j <= i + shift + right)
        )
    elif kind == "chunks":
        size = draw(st.sampled_from([3, 6, 9]))
        mask = masks.Chunks(size, alignment)
        rule = lambda b, h, i, j: j // size == (i + shift) // size  # noqa: E731
    elif kind == "prefix":
        lens = _numbers(draw, (draw(st.sampled_from([1, BATCH])),), -2, k_len + 2)
        mask = masks.Prefix(lens)
        length = _reader(lens)
        rule = lambda b, h, i, j: j < length(b)  # noqa: E731
    elif kind == "sink_tokens":
        count = draw(st.sampled_from([1, 2, 5]))
        mask = masks.SinkTokens(count)
        rule = lambda b, h, i, j: j < count  # noqa: E731
    elif kind == "documents":
        shape = draw(st.sampled_from([(), (1,), (BATCH,)]))
        ids = _numbers(draw, (*shape, q_len), -1, 2)
        ids_k = None if q_len == k_len and draw(st.booleans()) else _numbers(draw, (*shape, k_len), -1, 2)
        mask = masks.Documents(ids, ids_k)
        of_row, of_key = _reader(ids), _reader(ids if ids_k is None else ids_k)
        rule = lambda b, h, i, j: of_row(b, i) == of_key(b, j) >= 0  # noqa: E731
    elif kind == "key_mask":
        keep = _truth(draw, (*draw(st.sampled_from([(), (1,), (BATCH,)])), k_len))
        mask = masks.KeyMask(keep)
        kept = _reader(keep)
        rule = lambda b, h, i, j: kept(b, j)  # noqa: E731
    elif kind in ("hidden_rows", "hidden_keys"):
        own, other = (k_len, q_len) if kind == "hidden_rows" else (q_len, k_len)
        shape = lead if draw(st.booleans()) else lead[2 - draw(st.integers(0, 2)) :]
        intervals = _numbers(draw, (*shape, own, 2 * draw(st.sampled_from([1, 1, 2]))), 0, other)
        mask = (masks.HiddenRows if kind == "hidden_rows" else masks.HiddenKeys)(intervals)
        bounds = _reader(intervals, vectors=True)
        if kind == "hidden_rows":
            rule = lambda b, h, i, j: not _hit(bounds(b, h, j), i)  # noqa: E731
        else:
            rule = lambda b, h, i, j: not _hit(bounds(b, h, i), j)  # noqa: E731
    elif kind == "block_mask":
        rows, cols = draw(st.sampled_from([(16, 16), (32, 16), (16, 48)]))
        blocks = _truth(draw, (*lead, -(-q_len // rows), -(-k_len // cols)))
        elements = _truth(draw, (*lead, q_len, k_len)) if draw(st.booleans()) else None
        mask = masks.BlockMask(blocks, (rows, cols), elements)
        whole, own = _reader(blocks), None if elements is None else _reader(elements)
        rule = lambda b, h, i, j: (  # noqa: E731
            whole(b, h, i // rows, j // cols) and (own is None or own(b, h, i, j))
        )
    else:
        shape = draw(st.sampled_from([(k_len,), (q_len, k_len), (*lead, q_len, k_len), (*lead, 1, k_len),
                                      (*lead, q_len, 1)]))  # fmt: skip
        keep = _truth(draw, shape)
        mask = masks.Dense(keep)
        kept = _reader(keep)
        rule = lambda b, h, i, j: kept(b, h, i, j)  # noqa: E731
    return Said(mask, written_out(rule, q_len, k_len))


def both(a: Said, b: Said) -> Said:
    return Said(a.mask & b.mask, a.means & b.means)


def either(a: Said, b: Said) -> Said:
    return Said(a.mask | b.mask, a.means | b.means)


def opposite(a: Said) -> Said:
    return Said(~a.mask, ~a.means)


@st.composite
def expressions(draw, q_len: int, k_len: int) -> Said:
    """Any expression of up to five masks; most have no kernel."""
    alignment = draw(st.sampled_from(["bottom_right", "top_left"]))
    leaves = atoms(q_len, k_len, alignment, (*BANDS, *WIDENING, *HIDING))
    grow = st.deferred(
        lambda: st.builds(both, leaves, tree) | st.builds(either, tree, leaves) | st.builds(opposite, tree)
    )
    tree = leaves | leaves | grow
    return draw(st.builds(both, tree, tree) if draw(st.booleans()) else tree)


@st.composite
def executable(draw, q_len: int, k_len: int) -> Said:
    """Expressions of the form that kernels execute, written in many ways."""
    alignment = draw(st.sampled_from(["bottom_right", "bottom_right", "top_left"]))
    band = atoms(q_len, k_len, alignment, ("causal", "window"))
    any_band = atoms(q_len, k_len, alignment, BANDS)
    sink = atoms(q_len, k_len, alignment, ("sink_tokens",))
    form = draw(st.integers(0, 5))
    if form == 0:
        said = draw(any_band)
    elif form == 1:
        said = either(draw(band), draw(band))
    elif form == 2:
        causal = draw(atoms(q_len, k_len, alignment, ("causal",)))
        said = both(causal, either(both(draw(any_band), draw(any_band)), draw(sink)))
    elif form == 3:
        causal = draw(atoms(q_len, k_len, alignment, ("causal",)))
        said = both(either(draw(sink), draw(any_band)), causal)
    elif form == 4:
        said = both(draw(any_band), draw(any_band))
    else:
        said = opposite(opposite(draw(band)))
    for _ in range(draw(st.integers(0, 2))):
        if draw(st.booleans()):
            said = either(said, draw(atoms(q_len, k_len, alignment, ("prefix",))))
    for _ in range(draw(st.integers(0, 3))):
        hide = draw(atoms(q_len, k_len, alignment, HIDING))
        if isinstance(hide.mask, (masks.Dense, masks.KeyMask, masks.BlockMask)):
            kinds = {masks.BlockMask: "block_mask"}.get(type(hide.mask), "dense")
            more = draw(atoms(q_len, k_len, alignment, (kinds,)))
            hide = draw(
                st.sampled_from([hide, opposite(hide), either(hide, more), opposite(both(hide, more))])
            )
        said = both(hide, said) if draw(st.booleans()) else both(said, hide)
    return said
