"""Who appends to what: two sequences must not write the same place of a cache."""

from __future__ import annotations

from torch import Tensor

from ._ops.dispatch_cached import may_read


def with_one_owner(entries: Tensor, exists: Tensor) -> Tensor:
    """``exists`` without the sequences whose entry an earlier one appends to.

    Both would write the same rows, and the one whose keys are overwritten would attend to the other's.

    Raises:
        ValueError: there are such sequences, where values may be read.
    """
    earlier = ((entries[:, None] == entries) & exists).tril(-1).any(1) & exists
    if may_read(earlier) and bool(earlier.any()):
        twice = int(entries[earlier][0])
        raise ValueError(f"cache_batch_idx must not name entry {twice} for two sequences to append to it.")
    return exists & ~earlier


def check_slots_of_one(slots: Tensor, page_size: int) -> None:
    """Refuses ``slots`` (batch, tokens) that name a place twice, where values may be read; -1 is none.

    Raises:
        ValueError: there are two such tokens.
    """
    if not may_read(slots):
        return
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
