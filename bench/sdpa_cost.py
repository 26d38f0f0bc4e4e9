"""``F.scaled_dot_product_attention`` as torch has it and taken over by ``flash_ext.enable_sdpa()``.

    python -m bench.sdpa_cost

Prints host time of a call in microseconds (minimum over repeats, kernels running behind it) and GPU time in
milliseconds (batch 4, 16 heads, length 4096, head_dim 128, bf16), one JSON line for each implementation. Needs
a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

CALLS, ROUNDS = 400, 7
Call = Callable[[], object]


def host_us(call: Call) -> float:
    """Smallest mean of a round of calls, which are queued and not waited for."""
    for _ in range(50):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return round(best * 1e6, 1)


def gpu_ms(call: Call, repeats: int = 20) -> float:
    """Mean time of repeated calls between two events."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) / repeats, 4)


def inputs(batch: int, seqlen: int, heads_first: bool) -> list[torch.Tensor]:
    """q, k and v as (batch, heads, seqlen, head_dim), stored in that order or with rows before heads."""
    shape = (batch, 16, seqlen, 128) if heads_first else (batch, seqlen, 16, 128)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return tensors if heads_first else [t.transpose(1, 2) for t in tensors]


def calls() -> tuple[dict[str, Call], dict[str, Call]]:
    """What is timed on the host, and on the GPU."""
    sdpa = F.scaled_dot_product_attention
    small, large, heads_first = inputs(1, 64, False), inputs(4, 4096, False), inputs(4, 4096, True)
    one = [small[0][:, :, :1], *small[1:]]
    masks = {n: torch.ones(n, n, dtype=torch.bool, device="cuda").tril() for n in (64, 4096)}
    on_host = {
        "one query": functools.partial(sdpa, *one),
        "causal": functools.partial(sdpa, *small, is_causal=True),
        "bool mask": functools.partial(sdpa, *small, attn_mask=masks[64]),
    }
    on_gpu = {
        "causal": functools.partial(sdpa, *large, is_causal=True),
        "causal, heads before rows": functools.partial(sdpa, *heads_first, is_causal=True),
        "bool mask": functools.partial(sdpa, *large, attn_mask=masks[4096]),
    }
    return on_host, on_gpu


def main() -> int:
    if not torch.cuda.is_available():
        sys.stderr.write("bench.sdpa_cost needs a GPU\n")
        return 3
    on_host, on_gpu = calls()
    variants: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "torch's choice": contextlib.nullcontext,
        "flash_ext": flash_ext.enable_sdpa,
        "torch's flash": lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
        "torch's mem-efficient": lambda: sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
    }
    for name, switch in variants.items():
        with torch.no_grad(), switch():
            line = {
                "implementation": name,
                "host_us": {key: host_us(call) for key, call in on_host.items()},
                "gpu_ms": {key: gpu_ms(call) for key, call in on_gpu.items()},
                "device": torch.cuda.get_device_name(),
            }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
