"""Several processes of one test, each with its rank."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import random
import socket
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed

# Marks their tests, which one process of a run then takes: what all are forked from is started once.
forked = pytest.mark.xdist_group("processes")
# What they need; DTensor after flash_ext, which has to notice that it comes later.
NEEDED = [
    "flash_ext", "tests.qkv", "pytest", "hypothesis", "torch._dynamo", "torch.distributed.tensor",
    "torch.distributed.tensor.experimental._attention",
]  # fmt: skip


def start(function: Callable, size: int, *arguments: object, on_gpus: bool = False) -> None:
    """Calls ``function(rank, size, port, *arguments)`` in each, and waits for all; any failure is one here.

    On a CPU they are forked from one that has imported what they need, which takes 6 s. CUDA wants new ones.
    """
    if not on_gpus:
        multiprocessing.set_forkserver_preload(NEEDED)
    method = "spawn" if on_gpus else "forkserver"
    mp.start_processes(function, (size, free_port(), *arguments), nprocs=size, start_method=method)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def process_group(rank: int, size: int, port: int, backend: str) -> Iterator[None]:
    """Inside, one of ``size`` processes; each has the same random state."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # a few ranks gain nothing, and some machines lack it
    torch.set_num_threads(1)
    random.seed(0)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=120)
    distributed.init_process_group(backend, rank=rank, world_size=size, timeout=limit)
    try:
        yield
    finally:
        distributed.destroy_process_group()
