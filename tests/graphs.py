"""Calls captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

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
