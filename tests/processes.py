"""Several processes of one test, each with its rank."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable

import torch.multiprocessing as mp

# What each of them needs. DTensor is not among it: whether flash_ext leaves it alone is tested.
NEEDED = ["torch", "torch.distributed", "pytest", "hypothesis", "flash_ext", "tests.qkv"]


def start(function: Callable, size: int, *arguments: object, on_gpus: bool = False) -> None:
    """Calls ``function(rank, size, port, *arguments)`` in each, and waits for all; any failure is one here.

    On a CPU they are forked from a process that has imported what they need, which takes 3 s. CUDA wants new
    ones.
    """
    if not on_gpus:
        multiprocessing.set_forkserver_preload(NEEDED)
    method = "spawn" if on_gpus else "forkserver"
    mp.start_processes(function, (size, free_port(), *arguments), nprocs=size, start_method=method)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
