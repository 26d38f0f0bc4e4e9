"""Who appends to what: two sequences must not write the same place of a cache."""

from __future__ import annotations

from torch import Tensor

from ._append import check_slots
from ._cpu.behind import Ends, has_earlier_owner
from ._ops.dispatch_cached import may_read


def with_one_owner(entries: Tensor, exists: Tensor) -> Tensor:
    """``exists`` without the sequences whose entry an earlier one appends to.

    Both would write the same rows, and the one whose keys are overwritten would attend to the other's.

    Raises:
        ValueError: there are such sequences, where values may be read.
    """
    earlier = has_earlier_owner(entries, exists)
    if may_read(earlier) and bool(earlier.any()):
        twice = int(entries[earlier][0])
        raise ValueError(f"cache_batch_idx must not name entry {twice} for two sequences to append to it.")
    return exists & ~earlier


def check_new_places(ends: Ends, k_new: Tensor, cache: Tensor) -> None:
    """Refuses an entry for two sequences, a slot for two new keys and one that is not there.

    Nothing is looked at where values may not be read: the kernel then gives an entry to its first sequence,
    and leaves out what has no place.

    Raises:
        ValueError: there are such places.
    """
    if not may_read(ends.lengths):
        return
    count = k_new.shape[1]
    if ends.entries is not None and count > 0:
        with_one_owner(ends.entries, (ends.entries >= 0) & (ends.entries < cache.shape[0]))
    slots = ends.slots(count, cache)[0]
    check_slots_of_one(slots, cache.shape[1])
    check_slots(slots.flatten(), cache)


def check_slots_of_one(slots: Tensor, page_size: int) -> None:
    """Refuses ``slots`` (batch, tokens) that name a place twice; -1 is none.

    Raises:
        ValueError: there are two such tokens.
    """
    order = slots.flatten().sort(stable=True)
    again = (order.values.diff() == 0) & (order.values[1:] >= 0)
    if bool(again.any()):
        at = int(again.nonzero()[0])
        first, second = (int(token) // slots.shape[1] for token in order.indices[at : at + 2])
        page, row = divmod(int(order.values[at]), page_size)
        raise ValueError(
            f"page_table must not lead two new keys to one slot, got row {row} of page {page} for sequences "
            f"{first} and {second}."
        )
