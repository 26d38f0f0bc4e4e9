"""What must hold around every call (F1 and F5): poison in free memory, nothing left behind, nothing moved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tests.layouts import POISON_BYTE


@contextlib.contextmanager
def poisoned(device: str, sizes: Iterable[int]) -> Iterator[None]:
    """Inside, fresh memory holds NaN; on leaving a GPU, the bytes beside it are still what they were.

    ``sizes`` are the byte counts that the call is expected to allocate. On a GPU blocks of these sizes are
    filled, with small canaries kept between them, and freed: the caching allocator hands them out next. On
    the CPU, PyTorch itself fills new tensors.
    """
    if device == "cpu":
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # the mode in which fill_uninitialized_memory works
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)
        return
    canaries = [_poisoned_block(512)]
    holes = []
    for size in sizes:
        holes += [_poisoned_block(size), _poisoned_block(size)]
        canaries.append(_poisoned_block(512))
    del holes
    yield
    if not bool((torch.stack(canaries) == POISON_BYTE).all()):
        raise AssertionError("memory that belongs to another tensor was written")


def _poisoned_block(size: int) -> Tensor:
    return torch.full((max(size, 1),), POISON_BYTE, dtype=torch.uint8, device="cuda")


def poison_pool(total: int = 2 << 30) -> None:
    """Fills free GPU memory with NaN in blocks of many sizes, for calls that are not run as cases."""
    sizes = [1 << power for power in range(9, 28)] * 4
    blocks, used = [], 0
    for size in sizes:
        if used + size <= total:
            blocks.append(_poisoned_block(size))
            used += size


@contextlib.contextmanager
def staying_in_place(device: str) -> Iterator[None]:
    """F5: the current device and stream stay what they are, and all work ends without an error."""
    if device == "cpu":
        yield
        return
    place = torch.cuda.current_device(), torch.cuda.current_stream()
    yield
    torch.cuda.synchronize()
    now = torch.cuda.current_device(), torch.cuda.current_stream()
    assert place == now, f"current device or stream moved from {place} to {now}"


@contextlib.contextmanager
def leaving_nothing_behind(device: str, kept: dict[str, Tensor]) -> Iterator[None]:
    """F5: on a GPU, inside, nothing stays allocated but the tensors added to ``kept``."""
    if device == "cpu":
        yield
        return
    old = set(kept)
    before = torch.cuda.memory_allocated()
    yield
    # The allocator rounds up to 512 bytes, and does not split what is left of a large block.
    sizes = [t.untyped_storage().nbytes() for name, t in kept.items() if name not in old]
    allowed = sum(-(-size // 512) * 512 + (1 << 20 if size > 1 << 20 else 0) for size in sizes)
    grown = torch.cuda.memory_allocated() - before
    assert grown <= allowed, f"{grown} bytes stay allocated after the call, its results take {allowed}"
