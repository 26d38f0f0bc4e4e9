"""The usual masks, and those of linear memory for what no formula says: trees of answers, spans."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .atoms import Causal, Chunks, Documents, HiddenKeys, HiddenRows, Prefix, SinkTokens, Window, check_int
from .value import Mask, in_words

END = torch.iinfo(torch.int32).max  # beyond every row and key


def SlidingWindow(left: int, *, sink_tokens: int = 0) -> Mask:  # noqa: N802
    """Causal, with so many keys back, and the first ``sink_tokens`` always.

    Args:
        left: how many keys before its own position a row sees.
        sink_tokens: how many first keys stay visible.

    Example:
        >>> flash_ext.masks.SlidingWindow(1023, sink_tokens=4)
        Causal() & (Window(1023, -1) | SinkTokens(4))
    """
    check_int(left, "left")
    check_int(sink_tokens, "sink_tokens")
    window: Mask = Window(left, -1)
    return Causal() & (window | SinkTokens(sink_tokens) if sink_tokens else window)


def ChunkCausal(size: int) -> Mask:  # noqa: N802
    """Causal inside each chunk of positions.

    Args:
        size: positions of a chunk.

    Example:
        >>> flash_ext.masks.ChunkCausal(2).to_dense(4, 4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    return Causal() & Chunks(size)


def PrefixLM(lens: Tensor) -> Mask:  # noqa: N802
    """Both directions inside the first ``lens`` keys, causal after them.

    Args:
        lens: as in :class:`Prefix`.

    Example:
        >>> flash_ext.masks.PrefixLM(torch.tensor([2])).to_dense(3, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    return Causal() | Prefix(lens)


def DocumentCausal(ids: Tensor) -> Mask:  # noqa: N802
    """Causal inside each document.

    Args:
        ids: as in :class:`Documents`.

    Example:
        >>> flash_ext.masks.DocumentCausal(torch.tensor([0, 0, 1])).to_dense(3, 3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    return Causal() & Documents(ids)


def prefix_tree(
    parents: Tensor | Sequence[int],
    cu_seqlens: Tensor | Sequence[int] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Mask:
    """Several continuations of shared beginnings in one row: a token sees its ancestors and itself.

    The tokens are a forest in depth-first order: each segment stands after its parent, and all that descends
    from a segment before the next one that does not. A prompt with its answers is the simplest: the prompt,
    then the answers one after the other, parents ``[-1, 0, 0, 0]``. Trees beside each other do not see each
    other, so a batch may be one row.

    A key is hidden from all rows after the last one that descends from it: one interval a key, and memory
    linear in the length. The values of ``parents`` are read by the host.

    Args:
        parents: for each segment the index of the one that it continues, -1 for none.
        cu_seqlens: (segments + 1,) where each segment starts, and where the last one ends; None says that
            each token is a segment.
        device: of the mask; None is that of ``parents``, the CPU if it is a list.

    Returns:
        ``Causal() & HiddenRows(...)`` for calls in which the row holds all tokens of the tree.

    Raises:
        TypeError, ValueError: a parent is not one of the segments before, the order is another one, or
            ``cu_seqlens`` does not fit.

    Example:
        A prompt of 2 tokens and two answers of 2 and 1:

        >>> mask = flash_ext.masks.prefix_tree([-1, 0, 0], [0, 2, 4, 5])
        >>> mask.to_dense(5, 5)[0, 0].int().tolist()
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    """
    if device is None:
        device = parents.device if isinstance(parents, Tensor) else "cpu"
    above = _integers(parents, "parents")
    starts = list(range(len(above) + 1)) if cu_seqlens is None else _integers(cu_seqlens, "cu_seqlens")
    if len(starts) != len(above) + 1 or starts[0] != 0 or sorted(starts) != starts:
        raise ValueError(
            f"cu_seqlens must start with 0, not decrease and have one entry more than parents, "
            f"{len(above) + 1}, got {starts[:3]}{'...' if len(starts) > 3 else ''} of {len(starts)}."
        )
    ends = list(starts[1:])  # of all that descends from a segment
    path: list[int] = []  # the segment before and its ancestors
    for segment, parent in enumerate(above):
        if not -1 <= parent < segment:
            raise ValueError(
                f"parents[{segment}] must be -1 or the index of a segment before it, got {parent}."
            )
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise ValueError(
                f"parents must be in depth-first order: segment {segment} continues segment {parent}, but a "
                f"segment that does not descend from {parent} stands between them. Sort the segments."
            )
        path.append(segment)
    for segment in reversed(range(len(above))):
        if above[segment] >= 0:
            ends[above[segment]] = max(ends[above[segment]], ends[segment])
    lengths = torch.tensor([b - a for a, b in zip(starts, starts[1:])], dtype=torch.int64)
    last = torch.tensor(ends, dtype=torch.int32).repeat_interleave(lengths)
    return Causal() & HiddenRows(torch.stack([last, torch.full_like(last, END)], -1).to(device))


def spans(ids: Tensor) -> Mask:
    """Causal, and both directions inside spans: the tokens of a picture see each other.

    A row sees all keys up to the end of its span, which is the row itself outside of spans. That hides one
    interval of keys a row, without a causal mask, and memory is linear in the length. Nothing is read by the
    host.

    Args:
        ids: (batch, length) or (length,) integers. Neighbours of one id that is not negative are a span;
            tokens with negative ids are in none.

    Returns:
        ``HiddenKeys(...)`` for calls of as many rows as keys; narrow it with ``&``, as by ``Documents``.

    Raises:
        TypeError, ValueError: ids have another dtype or shape.

    Example:
        Text, a picture of three tokens, text:

        >>> flash_ext.masks.spans(torch.tensor([-1, 7, 7, 7, -1])).to_dense(5, 5)[0, 0].int().tolist()
        [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be a torch.Tensor, got {type(ids).__qualname__}.")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}.")
    if not 1 <= ids.dim() <= 2:
        raise ValueError(f"ids must have shape (batch, length) or (length,), got {tuple(ids.shape)}.")
    length = ids.shape[-1]
    goes_on = torch.zeros_like(ids, dtype=torch.bool)
    goes_on[..., :-1] = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)
    after = torch.arange(1, length + 1, device=ids.device)
    # The end of a span is the first position at or after the row at which it does not go on.
    end = torch.where(goes_on, length, after).flip(-1).cummin(-1).values.flip(-1).to(torch.int32)
    hidden = torch.stack([end, torch.full_like(end, END)], -1)
    return HiddenKeys(hidden if ids.dim() == 1 else hidden[:, None])


def _integers(given: Tensor | Sequence[int], name: str) -> list[int]:
    tensor = given if isinstance(given, Tensor) else torch.tensor(list(given), dtype=torch.int64)
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() != 1:
        raise TypeError(f"{name} must be integers of one dimension, got {in_words(tensor)}.")
    numbers: list[int] = tensor.tolist()
    return numbers
