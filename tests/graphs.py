"""Calls captured in a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def capture(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of one call, and the results that every replay writes.

    The call runs once before, on a stream of its own: what it allocates for good must not lie in the graph's
    memory.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def replays(
    graph: torch.cuda.CUDAGraph, read: Tensor, results: Sequence[Tensor], count: int = 10
) -> Iterator[int]:
    """Replays with new numbers in what the graph reads; before each the results hold NaN."""
    for i in range(count):
        with torch.no_grad():
            read.normal_()
        for t in results:
            t.fill_(math.nan)
        graph.replay()
        yield i
