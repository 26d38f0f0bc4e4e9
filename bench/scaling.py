"""Speed of attention over a split sequence, beside one process with all of it.

    torchrun --nproc-per-node 4 -m bench.scaling             # NCCL, lengths 32k to 256k, forward and backward
    torchrun --nproc-per-node 2 -m bench.scaling --lengths 1024 --repeats 2   # tries it out on a CPU

One JSON line a case: tokens a second and the efficiency, that is the speed of n processes over n times the
speed of one process, which the first one measures while the others wait. Medians of cold-started repeats;
causal, bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import flash_ext
from flash_ext.distributed import ring_attention, shard_sequence, ulysses_attention


def seconds(call: Callable[[], None], repeats: int, device: str) -> float:
    """Median of wall times; every process starts together and ends with its own last kernel."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def step(function: Callable, tensors: list[torch.Tensor], **options: object) -> Callable[[], None]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    dout: list[torch.Tensor] = []

    def call() -> None:
        out = function(*leaves, causal=True, **options)
        if not dout:
            dout.append(torch.randn_like(out))
        torch.autograd.grad(out, leaves, dout[0])

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[32768, 65536, 131072, 262144])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    for length in args.lengths:
        torch.manual_seed(0)
        shapes = [(1, length, heads, args.head_dim) for heads in (args.heads, args.heads_k, args.heads_k)]
        whole = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        alone = seconds(step(flash_ext.attention, whole) if rank == 0 else lambda: None, args.repeats, device)
        cases = {
            "ring": step(ring_attention, [shard_sequence(t) for t in whole]),
            "ulysses": step(ulysses_attention, [shard_sequence(t, zigzag=False) for t in whole]),
        }
        for name, call in cases.items():
            own = torch.tensor(seconds(call, args.repeats, device), device=device)
            dist.all_reduce(own, dist.ReduceOp.MAX)
            if rank == 0:
                together = own.item()
                line = {
                    "case": name,
                    "processes": world,
                    "length": length,
                    "seconds_alone": round(alone, 5),
                    "seconds": round(together, 5),
                    "tokens_per_second": round(length / together),
                    "efficiency": round(alone / (world * together), 3),
                    "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
