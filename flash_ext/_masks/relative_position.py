"""Relative-position bias: an entry of a small learned table, chosen by the distance from a row to a key."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .atoms import _read, if_exchanged
from .biases import Bias
from .value import Points, Sizes

BUCKETINGS = ("t5", "clip")


class RelativePosition(Bias):
    """A bias that each head reads from a table by the distance from the row to the key.

    A distance is the position of the key minus that of the row: negative for keys before the row, 0 for its
    own position. The bucketing says which entry of the table a distance reads.

    ======  ==============  ================================================================================
    name    bidirectional   entries
    ======  ==============  ================================================================================
    "t5"    True            the first half for keys up to the row's own position, the second half for later
                            ones. In each half small distances have an entry each, larger ones share entries
                            that widen logarithmically, up to max_distance; beyond, the last entry is read
    "t5"    False           the same for all entries and keys up to the row's own position; later keys read
                            the entry of distance 0
    "clip"  True            2 n + 1 entries for distances -n to n; beyond, the ends are read
    "clip"  False           n + 1 entries for distances -n to 0; beyond, the ends are read
    ======  ==============  ================================================================================

    An object holds the table and three numbers. It cannot be changed, and costs next to nothing to make: make
    one for each call. No tensor of seqlen_q x seqlen_k is formed, and the table gets its gradient.

    Sources: Raffel et al. 2020, https://arxiv.org/abs/1910.10683 ("t5"); Shaw et al. 2018,
    https://arxiv.org/abs/1803.02155 ("clip").

    Args:
        table: (num_heads, buckets), floating point; it may require a gradient. A T5 module of transformers
            keeps (buckets, num_heads): give ``module.relative_attention_bias.weight.t()``.
        bucketing: "t5" or "clip".
        bidirectional: whether keys after the row have entries of their own.
        max_distance: of "t5" only, from which distance on the last entry is read; None is 128.

    Raises:
        TypeError, ValueError: an argument has a type, shape or value that does not fit.

    Example:
        >>> table = torch.zeros(8, 32, requires_grad=True)
        >>> flash_ext.masks.RelativePosition(table)
        RelativePosition(8 heads, 32 buckets, bucketing='t5', bidirectional=True, max_distance=128)
    """

    __slots__ = ("_table", "_bucketing", "_bidirectional", "_max_distance")
    _FIELDS = ("_table", "_bucketing", "_bidirectional", "_max_distance")
    _CHILDREN = ("_table",)
    _table: Tensor
    _bucketing: str
    _bidirectional: bool
    _max_distance: int | None

    def __init__(
        self,
        table: Tensor,
        *,
        bucketing: str = "t5",
        bidirectional: bool = True,
        max_distance: int | None = None,
    ) -> None:
        _check_table(table)
        if bucketing not in BUCKETINGS:
            raise ValueError(f"bucketing must be one of {', '.join(BUCKETINGS)}, got {bucketing!r}.")
        if not isinstance(bidirectional, bool):
            raise TypeError(f"bidirectional must be a bool, got {type(bidirectional).__qualname__}.")
        if bucketing == "t5":
            max_distance = 128 if max_distance is None else max_distance
            _check_t5(table.shape[1], bidirectional, max_distance)
        else:
            _check_clip(table.shape[1], bidirectional, max_distance)
        self._fill(table, bucketing, bidirectional, max_distance)

    @property
    def table(self) -> Tensor:
        """(num_heads, buckets), as it was given."""
        return self._table

    @property
    def bucketing(self) -> str:
        """One of BUCKETINGS."""
        return self._bucketing

    @property
    def bidirectional(self) -> bool:
        """Whether keys after the row have entries of their own."""
        return self._bidirectional

    @property
    def max_distance(self) -> int | None:
        """From which distance on "t5" reads its last entry; None with "clip"."""
        return self._max_distance

    @property
    def num_heads(self) -> int:
        """Rows of the table; 1 serves every head."""
        return self._table.shape[0]

    @property
    def reach(self) -> int:
        """n: all distances below -n read the entry of -n, all above n that of n."""
        if self._max_distance is not None:
            return self._max_distance
        buckets = self._table.shape[1]
        return buckets // 2 if self._bidirectional else buckets - 1

    def by_distance(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What distances -n to n read: (1, num_heads, 2 n + 1), differentiable in the table.

        On CUDA the gradient is summed in a fixed order; inside a compiled graph that holds with
        ``torch.use_deterministic_algorithms(True)`` only.

        Args:
            dtype: of the result, a floating type; the gradient is summed in it as well.
        """
        if self._bucketing == "clip" and self._bidirectional:
            return self._table.to(dtype, copy=True).unsqueeze(0)  # a gather that need not be summed backwards
        table, entries = self._table.to(dtype), self._entries()
        if getattr(table, "device_mesh", None) is not None:
            # DTensor of torch 2.11 has the gradient of an index for the first dimension only.
            return table.t()[entries].t().unsqueeze(0)
        return table[:, entries].unsqueeze(0)

    def gradient(self, dby_distance: Tensor) -> Tensor:
        """The gradient of the table from that of :meth:`by_distance`.

        Args:
            dby_distance: (1, num_heads, 2 n + 1), of the table's device; it is summed in its own dtype.

        Returns:
            A tensor with the table's shape and dtype.
        """
        shape = (1, self.num_heads, 2 * self.reach + 1)
        if tuple(dby_distance.shape) != shape:
            raise ValueError(f"dby_distance must have the shape {shape}, got {tuple(dby_distance.shape)}.")
        given = dby_distance.squeeze(0)
        heads = torch.arange(self.num_heads, device=given.device)[:, None]
        zeros = given.new_zeros(self._table.shape)
        return zeros.index_put((heads, self._entries()[None]), given, accumulate=True).to(self._table.dtype)

    def to_dense(self, q_len: int, k_len: int, *, top_left: bool = False) -> Tensor:
        """The bias written out, (1, num_heads, q_len, k_len), differentiable: to look at it, and for tests.

        Args:
            q_len, k_len: numbers of rows and of keys.
            top_left: the first row has the position of the first key; else the last row has that of the last
                key.

        Returns:
            A float32 tensor; float64 if the table is.
        """
        device, n = self._table.device, self.reach
        position = torch.arange(q_len, device=device) + (0 if top_left else k_len - q_len)
        distance = torch.arange(k_len, device=device) - position[:, None]
        by_distance = self.by_distance(torch.promote_types(self._table.dtype, torch.float32))
        return by_distance[:, :, distance.clamp(-n, n) + n]

    def _rule(self, points: Points) -> Tensor:
        distance, n = points.key - points.centre("bottom_right"), self.reach
        return _read(self.by_distance()[0], points.h, distance.clamp(-n, n) + n)

    def _lead(self, packed: bool) -> tuple[int, int]:
        return 1, self.num_heads

    def _check(self, sizes: Sizes) -> None:
        if self.num_heads not in (1, sizes.num_heads):
            hint = if_exchanged(sizes, lambda other: self.num_heads == other.num_heads)
            if self._table.shape[1] == sizes.num_heads:
                hint = " Turn it with .t()."
            raise ValueError(
                f"RelativePosition: table must have shape ({sizes.num_heads} or 1, buckets), a row for each "
                f"head of q, got {tuple(self._table.shape)}.{hint}"
            )

    def _entries(self) -> Tensor:
        entries = _entries_for(self._table, self._bidirectional, self._max_distance, self.reach)
        mesh = getattr(self._table, "device_mesh", None)
        if mesh is None:
            return entries
        from torch.distributed.tensor import DTensor, Replicate  # in use: the table is one

        return DTensor.from_local(entries, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def __repr__(self) -> str:
        heads, buckets = self._table.shape
        bounded = "" if self._max_distance is None else f", max_distance={self._max_distance}"
        return (
            f"RelativePosition({heads} {'head' if heads == 1 else 'heads'}, {buckets} buckets, "
            f"bucketing={self._bucketing!r}, bidirectional={self._bidirectional}{bounded})"
        )


# ---- which entry a distance reads ----------------------------------------------------------------------

# By buckets, bidirectional, max_distance, reach and device: a few hundred numbers for each kind of table.
_kept: dict[tuple[Any, ...], Tensor] = {}


def _entries_for(table: Tensor, bidirectional: bool, max_distance: int | None, reach: int) -> Tensor:
    """(2 n + 1,) int64, on the table's device: the entry that each distance from -n to n reads.

    They are made once for each device. The copy from the host waits, so that every stream may read them.
    """
    arguments = (table.shape[1], bidirectional, max_distance, reach)
    if torch.compiler.is_compiling():
        return _entries(*arguments, table.device)
    key = (*arguments, table.device)
    # What a transform, a mode or a capture sees made is its own, and a capture takes no copy.
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return _entries(*arguments, table.device)
    if key not in _kept:
        if table.is_cuda and torch.cuda.is_current_stream_capturing():
            return _entries(*arguments, table.device)
        with torch.inference_mode(False):  # else a backward could not save them
            _kept[key] = _entries(*arguments, torch.device("cpu")).to(table.device)
    return _kept[key]


def _entries(
    buckets: int, bidirectional: bool, max_distance: int | None, reach: int, device: torch.device
) -> Tensor:
    distance = torch.arange(-reach, reach + 1, device=device)
    if max_distance is None:
        return (distance if bidirectional else distance.clamp(max=0)) + reach
    far = distance.abs() if bidirectional else -distance.clamp(max=0)
    of_a_side = _buckets_of_a_side(buckets, bidirectional)
    entry = torch.zeros_like(distance)
    # A compiler with dynamic shapes takes these numbers as they are.
    for first in _first_distances(operator.index(of_a_side), operator.index(max_distance)):
        entry = entry + (far >= first)
    return entry + (distance > 0) * of_a_side if bidirectional else entry


def _first_distances(buckets: int, max_distance: int) -> list[int]:
    """From which distance on the bucket is at least 1, 2, ... buckets - 1.

    The logarithm is taken in float32, and on the CPU: at a distance where the quotient is a whole number, its
    rounding decides, and models are trained with that of float32.
    """
    exact = buckets // 2
    with _disable_current_modes():  # real numbers, also for tensors without
        distance = torch.arange(max_distance + 1, device="cpu")
        share = torch.log(distance.float() / exact) / math.log(max_distance / exact)
        wide = (exact + (share * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
        bucket = torch.where(distance < exact, distance, wide)
        firsts: list[int] = torch.searchsorted(bucket, torch.arange(1, buckets, device="cpu")).tolist()
    return firsts


# What torch.compiler.assume_constant_result() sets. Calling it loads the compiler, which takes two seconds.
_first_distances._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _buckets_of_a_side(buckets: int, bidirectional: bool) -> int:
    return buckets // 2 if bidirectional else buckets


# ---- refusals ------------------------------------------------------------------------------------------


def _check_table(table: Any) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(f"table must be a torch.Tensor, got {type(table).__qualname__}.")
    if not table.is_floating_point():
        raise TypeError(f"table must have a floating dtype, got {table.dtype}.")
    if table.dim() != 2 or 0 in table.shape:
        raise ValueError(
            f"table must have the shape (num_heads, buckets), neither of them 0, got {tuple(table.shape)}. A "
            "table (buckets, num_heads), as modules of transformers have it, is turned by .t()."
        )


def _check_t5(buckets: int, bidirectional: bool, max_distance: Any) -> None:
    if not isinstance(max_distance, int) or isinstance(max_distance, bool):
        raise TypeError(f"max_distance must be an int, got {type(max_distance).__qualname__}.")
    of_a_side = _buckets_of_a_side(buckets, bidirectional)
    if of_a_side < 2:
        raise ValueError(
            f"table must have at least {4 if bidirectional else 2} buckets with bucketing='t5' and "
            f"bidirectional={bidirectional}, got {buckets}."
        )
    if max_distance <= of_a_side // 2:
        raise ValueError(
            f"max_distance must be above {of_a_side // 2}, the number of distances that have one of the "
            f"{of_a_side} buckets of a side each, got {max_distance}."
        )


def _check_clip(buckets: int, bidirectional: bool, max_distance: Any) -> None:
    if max_distance is not None:
        raise ValueError(
            f"max_distance belongs to bucketing='t5', got {max_distance}: with 'clip' the table's size says "
            "how far it reaches."
        )
    if bidirectional and buckets % 2 == 0:
        raise ValueError(
            "table must have an odd number of buckets with bucketing='clip' and bidirectional=True, one for "
            f"each distance from -n to n, got {buckets}."
        )
