"""The masks that expressions are made of. Each says its rule once, for any pairs of rows and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .value import ALIGNMENTS, Alignment, Mask, Points, Sizes, in_words


class Causal(Mask):
    """No key after the row's own position.

    Args:
        alignment: "bottom_right": row i stands at key i + k_len - q_len, so the last row sees the last key.
            "top_left": row i stands at key i.

    Example:
        >>> flash_ext.masks.Causal().to_dense(2, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
    """

    __slots__ = ("alignment",)
    _FIELDS = ("alignment",)
    alignment: Alignment

    def __init__(self, alignment: Alignment = "bottom_right") -> None:
        self._fill(_checked_alignment(alignment))

    def _rule(self, points: Points) -> Tensor:
        return points.key <= points.centre(self.alignment)


class Window(Mask):
    """So many keys before and after the row's own position, inclusive.

    Args:
        left, right: numbers of keys; -1 is unlimited.
        alignment: as for :class:`Causal`.

    Example:
        >>> (flash_ext.masks.Causal() & flash_ext.masks.Window(1, -1)).to_dense(3, 3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    __slots__ = ("left", "right", "alignment")
    _FIELDS = ("left", "right", "alignment")
    left: int
    right: int
    alignment: Alignment

    def __init__(self, left: int = -1, right: int = -1, alignment: Alignment = "bottom_right") -> None:
        for name, bound in (("left", left), ("right", right)):
            check_int(bound, name)
            if bound < -1:
                raise ValueError(f"{name} must be a number of keys or -1 for no limit, got {bound}.")
        self._fill(left, right, _checked_alignment(alignment))

    def _rule(self, points: Points) -> Tensor:
        centre, shown = points.centre(self.alignment), points.key >= 0
        if self.left >= 0:
            shown = shown & (points.key >= centre - self.left)
        if self.right >= 0:
            shown = shown & (points.key <= centre + self.right)
        return shown


class Chunks(Mask):
    """Keys of the row's own chunk of positions.

    Args:
        size: positions of a chunk.
        alignment: as for :class:`Causal`.
    """

    __slots__ = ("size", "alignment")
    _FIELDS = ("size", "alignment")
    size: int
    alignment: Alignment

    def __init__(self, size: int, alignment: Alignment = "bottom_right") -> None:
        check_int(size, "size")
        if size < 1:
            raise ValueError(f"size must be positive, got {size}.")
        self._fill(size, _checked_alignment(alignment))

    def _rule(self, points: Points) -> Tensor:
        return points.key // self.size == points.centre(self.alignment) // self.size


class Prefix(Mask):
    """The first keys of each sequence. It widens another mask: ``Causal() | Prefix(lens)``.

    Args:
        lens: (batch,) integers, one a sequence; packed (sequences,). Negative ones count as 0.
    """

    __slots__ = ("lens",)
    _FIELDS = _CHILDREN = ("lens",)
    lens: Tensor

    def __init__(self, lens: Tensor) -> None:
        _check_integers(lens, "lens", 1, 1, "(batch,)")
        self._fill(lens)

    def _rule(self, points: Points) -> Tensor:
        return points.key < _read(self.lens, points.b)

    def _lead(self, packed: bool) -> tuple[int, int]:
        return (1 if packed else self.lens.shape[0]), 1

    def _check(self, sizes: Sizes) -> None:
        if self.lens.shape[0] not in (1, sizes.batch):
            raise ValueError(
                f"Prefix: lens must have shape (batch,) = ({sizes.batch},) or (1,), got "
                f"{tuple(self.lens.shape)}."
            )


class SinkTokens(Mask):
    """The first keys of each sequence, as far as the bound on the right lets.

    It widens a window or chunks: ``Causal() & (Window(left, -1) | SinkTokens(count))``.

    Args:
        count: number of keys.
    """

    __slots__ = ("count",)
    _FIELDS = ("count",)
    count: int

    def __init__(self, count: int) -> None:
        check_int(count, "count")
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}.")
        self._fill(count)

    def _rule(self, points: Points) -> Tensor:
        return points.key < self.count


class Documents(Mask):
    """Keys of the row's own document. Negative ids match nothing.

    Where the tokens of each document stand together, dense calls with nothing beside it but ``Causal`` and
    ``Window`` run as packed sequences. The first one waits for the device (``docs/masks.md``).

    Args:
        ids: (batch, q_len) or (q_len,) integers below 2**31; packed (total_q,).
        ids_k: those of the keys, (batch, k_len) or (k_len,); packed (total_k,). None is ``ids``. Over a cache
            they must be given: (batch, keys) or (keys,), of any number of key positions. Others have none.

    Raises:
        TypeError, ValueError: ids have a dtype or shape that does not fit, or (looked at on the CPU only) an
            id is outside int32.

    Example:
        >>> flash_ext.masks.Causal() & flash_ext.masks.Documents(torch.tensor([0, 0, 1]))
        Causal() & Documents(ids=int64 (3,) cpu)
    """

    __slots__ = ("ids", "ids_k")
    _FIELDS = _CHILDREN = ("ids", "ids_k")
    ids: Tensor
    ids_k: Tensor | None

    def __init__(self, ids: Tensor, ids_k: Tensor | None = None) -> None:
        for name, given in (("ids", ids), ("ids_k", ids_k)):
            if given is not None:
                _check_integers(given, name, 1, 2, "(batch, seqlen) or (seqlen,)")
                _check_range(given, name)
        self._fill(ids, ids_k)

    @property
    def of_keys(self) -> Tensor:
        """Ids of the keys."""
        return self.ids if self.ids_k is None else self.ids_k

    def _rule(self, points: Points) -> Tensor:
        lead = () if points.packed else (points.b,)
        of_rows = _read(self.ids, *lead, points.row_at, trailing=1)
        of_keys = _read(self.of_keys, *lead, points.key_at, trailing=1)
        return (of_rows == of_keys) & (of_keys >= 0)

    def _lead(self, packed: bool) -> tuple[int, int]:
        given = [ids.shape[0] for ids in (self.ids, self.of_keys) if ids.dim() == 2 and not packed]
        return max(given, default=1), 1

    def _check(self, sizes: Sizes) -> None:
        if self.ids_k is None and sizes.cached:
            raise ValueError(f"Documents needs ids_k over a cache, the ids of key positions, got {self!r}.")
        if self.ids_k is None and sizes.q_len != sizes.k_len:
            raise ValueError(
                f"Documents needs ids_k, ids of the keys, where lengths differ, got {self!r} for "
                f"{sizes.q_len} rows and {sizes.k_len} keys."
            )
        for name, ids, length in (("ids", self.ids, sizes.q_len), ("ids_k", self.of_keys, sizes.k_len)):
            _check_rows(ids, f"Documents: {name}", "q_len" if name == "ids" else "k_len", length, sizes)


class KeyMask(Mask):
    """Keys that are True; the others are hidden from all rows.

    Args:
        keep: (batch, k_len) or (k_len,) bool; packed (total_k,). Over a cache (batch, keys) or (keys,) of any
            number of key positions; what lies beyond is hidden, also by ``~``. Note that torch's
            ``key_padding_mask`` is True where a key is hidden: ``KeyMask(~key_padding_mask)``.

    Example:
        >>> flash_ext.masks.KeyMask.from_lengths(torch.tensor([1, 3]), 4).keep.int().tolist()
        [[1, 0, 0, 0], [1, 1, 1, 0]]
    """

    __slots__ = ("keep",)
    _FIELDS = _CHILDREN = ("keep",)
    keep: Tensor

    def __init__(self, keep: Tensor) -> None:
        _check_bool(keep, "keep", 1, 2, "(batch, k_len) or (k_len,)")
        self._fill(keep)

    @classmethod
    def from_lengths(cls, lens: Tensor, k_len: int) -> KeyMask:
        """The first ``lens`` keys of each sequence.

        Args:
            lens: (batch,) integers.
            k_len: number of keys of a sequence.
        """
        _check_integers(lens, "lens", 1, 1, "(batch,)")
        return cls(torch.arange(k_len, device=lens.device) < lens[:, None])

    def _rule(self, points: Points) -> Tensor:
        index = (points.key_at,) if points.packed else (points.b, points.key_at)
        return _read(self.keep, *index, trailing=1)

    def _lead(self, packed: bool) -> tuple[int, int]:
        return (self.keep.shape[0] if self.keep.dim() == 2 and not packed else 1), 1

    def _check(self, sizes: Sizes) -> None:
        _check_rows(self.keep, "KeyMask: keep", "k_len", sizes.k_len, sizes)


class _Hidden(Mask):
    """One or two intervals for each key or each row."""

    __slots__ = ("intervals",)
    _SIDE = ""
    intervals: Tensor

    def __init__(self, intervals: Tensor) -> None:
        _check_integers(intervals, "intervals", 2, 4, f"(batch, num_heads, {self._SIDE}, 2 or 4)")
        if intervals.shape[-1] not in (2, 4):
            raise ValueError(
                "The last dimension of intervals must hold one or two pairs [start, end), got shape "
                f"{tuple(intervals.shape)}."
            )
        self._fill(intervals)

    def _outside(self, points: Points, at: Tensor, number: Tensor) -> Tensor:
        lead = (points.h,) if points.packed else (points.b, points.h)
        hidden = points.key < 0
        for pair in range(0, self.intervals.shape[-1], 2):
            start, end = (_read(self.intervals[..., pair + side], *lead, at, trailing=1) for side in (0, 1))
            hidden = hidden | ((number >= start) & (number < end))
        return ~hidden

    def _lead(self, packed: bool) -> tuple[int, int]:
        shape = (1, 1, *self.intervals.shape)
        return (1 if packed else shape[-4]), shape[-3]

    def _check(self, sizes: Sizes) -> None:
        length = sizes.k_len if self._SIDE == "k_len" else sizes.q_len
        lead = (sizes.num_heads,) if sizes.packed else (sizes.batch, sizes.num_heads)
        given = tuple(self.intervals.shape)
        fits = len(given) <= len(lead) + 2 and given[-2] == length
        if not fits or any(n not in (1, size) for n, size in zip(given[-3::-1], lead[::-1])):
            names = ("total_" + self._SIDE[0],) if sizes.packed else ("batch", "num_heads", self._SIDE)
            names = ("num_heads", *names) if sizes.packed else names
            raise ValueError(
                f"{type(self).__name__}: intervals must have shape ({', '.join(names)}, 2 or 4) = "
                f"({', '.join(map(str, (*lead, length)))}, 2 or 4), where what stands before {names[-1]} may "
                f"be 1 or left out, got {given}."
            )


class HiddenRows(_Hidden):
    """For each key, one or two intervals of rows that may not see it.

    Args:
        intervals: (batch, num_heads, k_len, 2 n) integers, n = 1 or 2 pairs [start, end) of row numbers from
            0, whatever the alignment of other masks; batch and num_heads may be 1 or left out. Packed:
            (num_heads, total_k, 2 n), rows inside the sequence.
    """

    __slots__ = ()
    _FIELDS = _CHILDREN = ("intervals",)
    _SIDE = "k_len"

    def _rule(self, points: Points) -> Tensor:
        return self._outside(points, points.key_at, points.row)


class HiddenKeys(_Hidden):
    """For each row, one or two intervals of keys that it may not see.

    Args:
        intervals: (batch, num_heads, q_len, 2 n) integers, n = 1 or 2 pairs [start, end) of key numbers from
            0; batch and num_heads may be 1 or left out. Packed: (num_heads, total_q, 2 n), keys inside the
            sequence.
    """

    __slots__ = ()
    _FIELDS = _CHILDREN = ("intervals",)
    _SIDE = "q_len"

    def _rule(self, points: Points) -> Tensor:
        return self._outside(points, points.row_at, points.key)


class Dense(Mask):
    """Pairs of row and key that are True.

    Args:
        tensor: bool, 1 to 4 dimensions that broadcast from the right to (batch, num_heads, q_len, k_len).
            Packed and over a cache: (batch, num_heads, rows, keys) inside each sequence, where row i is its
            i-th query of the call; what lies beyond is hidden, also by ``~``.
    """

    __slots__ = ("tensor",)
    _FIELDS = _CHILDREN = ("tensor",)
    tensor: Tensor

    def __init__(self, tensor: Tensor) -> None:
        _check_bool(tensor, "tensor", 1, 4, "that broadcasts to (batch, num_heads, q_len, k_len)")
        self._fill(tensor)

    def _shown(self, points: Points, negated: bool) -> Tensor:
        shape = self.tensor.shape
        row, key, inside = points.row, points.key, points.key >= 0
        if points.packed:
            for size, number in zip(shape[::-1], (key, row)):
                inside = inside & (number < size) if size != 1 else inside
            row, key = (
                number.clamp(0, max(size - 1, 0)) for number, size in zip((row, key), (1, *shape)[-2:])
            )
        if 0 in shape:
            return inside & (points.row < 0)
        shown = _read(self.tensor, *(points.b, points.h, row, key)[4 - self.tensor.dim() :])
        return inside & (~shown if negated else shown)

    def _lead(self, packed: bool) -> tuple[int, int]:
        shape = (1, 1, 1, 1, *self.tensor.shape)
        return (1 if packed else shape[-4]), shape[-3]

    def _check(self, sizes: Sizes) -> None:
        hint = ""
        if self.tensor.shape == (sizes.batch, sizes.k_len) and not sizes.packed and not sizes.cached:
            hint = " A mask (batch, k_len) of keys is a KeyMask."
        check_broadcast(self.tensor, "Dense", sizes, hint)


# ---- tensors ------------------------------------------------------------------------------------------


def _read(tensor: Tensor, *index: Tensor, trailing: int = 0) -> Tensor:
    """``tensor[index]``, where dimensions of size 1 repeat.

    With ``trailing``, leading dimensions may be missing; the last ``trailing`` indices stay.
    """
    index = index[len(index) - tensor.dim() :] if trailing else index
    for dim in reversed(range(tensor.dim())):
        if tensor.shape[dim] == 1:
            tensor = tensor.select(dim, 0)
            index = (*index[:dim], *index[dim + 1 :])
    return tensor[index] if index else tensor


def _checked_alignment(alignment: Alignment) -> Alignment:
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment must be one of {', '.join(ALIGNMENTS)}, got {alignment!r}.")
    return alignment


def check_int(value: Any, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__qualname__}.")


def _check_integers(tensor: Any, name: str, least: int, most: int, layout: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__qualname__}.")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be torch.int32 or torch.int64, got {tensor.dtype}.")
    _check_dims(tensor, name, least, most, layout)


def _check_range(ids: Tensor, name: str) -> None:
    """int32 is what kernels compare. Only where reading does not wait for a device."""
    if ids.dtype == torch.int32 or ids.device.type != "cpu" or type(ids) is not Tensor:
        return
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return
    limits = torch.iinfo(torch.int32)
    if bool(((ids < limits.min) | (ids > limits.max)).any()):
        raise ValueError(f"{name} must be from -2**31 to 2**31 - 1: number the documents from 0.")


def _check_bool(tensor: Any, name: str, least: int, most: int, layout: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__qualname__}.")
    if tensor.dtype != torch.bool:
        cure = "For 0 and 1 pass .bool()."
        if tensor.is_floating_point():
            cure = f"A float tensor is added to the scores: DenseBias, in bias=. {cure}"
        raise TypeError(f"{name} must be torch.bool (True = take part), got {in_words(tensor)}. {cure}")
    _check_dims(tensor, name, least, most, layout)


def _check_dims(tensor: Tensor, name: str, least: int, most: int, layout: str) -> None:
    if not least <= tensor.dim() <= most:
        raise ValueError(f"{name} must have a shape {layout}, got {tuple(tensor.shape)}.")


def _check_rows(tensor: Tensor, name: str, side: str, length: int, sizes: Sizes) -> None:
    """(length,) or (batch, length); packed (total,). Of keys in a cache the length is any."""
    given: Sequence[int] = tuple(tensor.shape)
    if sizes.cached and side == "k_len":
        if len(given) == 2 and given[0] not in (1, sizes.batch):
            raise ValueError(
                f"{name} must have shape (batch, any) over a cache, with batch {sizes.batch}, which may be 1 "
                f"or left out, got {given}."
            )
    elif sizes.packed:
        if given != (length,):
            raise ValueError(f"{name} must have shape (total_{side[0]},) = ({length},), got {given}.")
    else:
        fits = len(given) == 1 or given[0] in (1, sizes.batch)
        if fits and given[-1] == length:
            return
        hint = if_exchanged(sizes, lambda other: fits and given[-1] == other.q_len)
        raise ValueError(
            f"{name} must have shape (batch, {side}) = {(sizes.batch, length)}, where batch may be 1 or left "
            f"out, got {given}.{hint}"
        )


def if_exchanged(sizes: Sizes, fits: Callable[[Sizes], bool]) -> str:
    """What to say where what does not fit would, were heads the length, with as many keys as queries."""
    if sizes.packed or sizes.cached or sizes.num_heads == 1 or sizes.k_len == 0 or sizes.q_len % sizes.k_len:
        return ""  # k_len would be the number of key heads
    length = sizes.num_heads
    if not fits(sizes._replace(num_heads=sizes.q_len, q_len=length, k_len=length)):
        return ""
    return (
        " It would fit with heads and length exchanged: q, k and v are (batch, seqlen, num_heads, head_dim), "
        'with layout="bhsd" (batch, num_heads, seqlen, head_dim), and transpose(1, 2) makes one of the other.'
    )


def check_broadcast(tensor: Tensor, name: str, sizes: Sizes, hint: str = "") -> None:
    """Refuses a tensor that does not broadcast to the scores. Packed rows and keys may end anywhere, and so
    may those over a cache.
    """
    want = (sizes.batch, sizes.num_heads, sizes.q_len, sizes.k_len)
    given = (1, 1, 1, 1, *tensor.shape)[-4:]
    pairs = list(zip(given, want))
    ends_freely = sizes.packed or sizes.cached
    if all(n in (1, size) for n, size in (pairs[:2] if ends_freely else pairs)):
        return
    hint = hint or if_exchanged(sizes, lambda other: all(n in (1, m) for n, m in zip(given, other[1:5])))
    shape = f"(batch, num_heads, q_len, k_len) = {want}"
    if ends_freely:
        shape = f"(batch, num_heads, any, any) = ({want[0]}, {want[1]}, any, any) inside each sequence"
    raise ValueError(f"{name}: tensor must broadcast to {shape}, got {tuple(tensor.shape)}.{hint}")
