"""Attend over one sequence that is split over two processes, on two GPUs or on the CPU.

    python -m examples.long_context                                        # starts two processes itself
    torchrun --nproc-per-node 8 -m examples.long_context --seqlen 262144   # or takes those of torchrun

Each process holds a share of the tokens. ``ring_attention`` passes keys and values round, so that every token
sees all earlier ones, and no process ever holds the whole sequence. A model works on its share alone:
embeddings, norms and MLPs need no other tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flash_ext import attention
from flash_ext.distributed import gather_sequence, ring_attention, shard_sequence


def work(options: argparse.Namespace) -> None:
    """What every process does, once it belongs to a group."""
    rank, device = dist.get_rank(), options.device
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    # The same tensors in every process, for the comparison below. A program loads its share only.
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, dout = (torch.randn(1, options.seqlen, 4, 64, dtype=dtype).to(device) for _ in range(4))

    # A share is two pieces, an early and a late one, so that all processes have the same work. Shard token
    # ids, positions and labels in the same way.
    shares = [shard_sequence(x).requires_grad_() for x in (q, k, v)]
    out = ring_attention(*shares, causal=True)
    out.backward(shard_sequence(dout))

    if options.check:
        whole = [x.requires_grad_() for x in (q, k, v)]
        expected = attention(*whole, causal=True)
        expected.backward(dout)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(gather_sequence(out), expected, atol=tolerance, rtol=tolerance)
        for share, x in zip(shares, whole):
            torch.testing.assert_close(gather_sequence(share.grad), x.grad, atol=tolerance, rtol=tolerance)
    tokens = shares[0].shape[1]
    print(f"process {rank} of {dist.get_world_size()}: {tokens} of {options.seqlen} tokens", flush=True)


def start(rank: int, options: argparse.Namespace, meeting_point: str) -> None:
    backend = "gloo" if options.device == "cpu" else "nccl"
    init = f"file://{meeting_point}"
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=options.processes)
    work(options)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqlen", type=int, default=2048, help="of the whole sequence; divides by 2n")
    parser.add_argument("--processes", type=int, default=2, help="to start, where torchrun has not")
    parser.add_argument("--no-check", dest="check", action="store_false", help="skip one process with all")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"],
        help="default: GPUs, where there is one for each process",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    of_torchrun = "RANK" in os.environ
    if of_torchrun:
        options.processes = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", options.processes))
    options.device = options.device or ("cuda" if torch.cuda.device_count() >= local else "cpu")

    if of_torchrun:
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
        work(options)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(start, (options, os.path.join(folder, "meeting")), nprocs=options.processes)


if __name__ == "__main__":
    main()
