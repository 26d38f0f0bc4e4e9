"""``F.scaled_dot_product_attention`` as torch has it and taken over by ``flash_ext.enable_sdpa()``.

    python -m bench.sdpa_cost

Prints host time of a call in microseconds (kernels run behind it) and GPU time in milliseconds (batch 4, 16
heads, length 4096, head_dim 128, bf16, cold L2 cache), one JSON line for each implementation: of every case
the median over rounds, the lowest and the highest. Every round measures all implementations, beginning with
another one, so that clocks, heat and whatever else the host does fall on all of them alike. Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

from .timing import CudaTimer

HOST_CALLS, LAUNCHES = 300, 10
Call = Callable[[], object]
Measure = Callable[[Call], float]
Switch = Callable[[], contextlib.AbstractContextManager[object]]


def host_us(call: Call) -> float:
    """Mean host time of calls that are queued and not waited for."""
    for _ in range(30):  # the first ones after a switch find the dispatcher's tables empty
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / HOST_CALLS


def gpu_ms(timer: CudaTimer, call: Call) -> float:
    """Median time of a launch."""
    timer.launch(call, 2)
    return statistics.median(timer.launch(call, LAUNCHES)[0])


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

    def masked(tensors: list[torch.Tensor], heads_k: int) -> Call:
        q, k, v = tensors
        mask = masks[q.shape[2]]
        return functools.partial(
            sdpa, q, k[:, :heads_k], v[:, :heads_k], attn_mask=mask, enable_gqa=heads_k != q.shape[1]
        )

    on_host = {
        "one query": functools.partial(sdpa, *one),
        "causal": functools.partial(sdpa, *small, is_causal=True),
        "bool mask": masked(small, 16),
        "bool mask, 4 key heads": masked(small, 4),
    }
    on_gpu = {
        "causal": functools.partial(sdpa, *large, is_causal=True),
        "causal, heads before rows": functools.partial(sdpa, *heads_first, is_causal=True),
        "bool mask": masked(large, 16),
        "bool mask, 4 key heads": masked(large, 4),
    }
    return on_host, on_gpu


def interleaved(
    implementations: dict[str, Switch], cases: dict[str, tuple[Call, Measure]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """One number a round for every case of every implementation; each round begins with another one."""
    found: dict[str, dict[str, list[float]]] = {
        name: {case: [] for case in cases} for name in implementations
    }
    names = list(implementations)
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            with torch.no_grad(), implementations[name]():
                for case, (call, measure) in cases.items():
                    found[name][case].append(measure(call))
    return found


def summary(values: list[float]) -> dict[str, float]:
    digits = 4 if max(values) < 100 else 1
    numbers = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {key: round(value, digits) for key, value in numbers.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("bench.sdpa_cost needs a GPU\n")
        return 3
    on_host, on_gpu = calls()
    implementations: dict[str, Switch] = {
        "torch's choice": contextlib.nullcontext,
        "flash_ext": flash_ext.enable_sdpa,
        "torch's flash": lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
        "torch's mem-efficient": lambda: sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
    }
    on_device = functools.partial(gpu_ms, CudaTimer(torch.device("cuda")))
    host_cases = {case: (call, host_us) for case, call in on_host.items()}
    gpu_cases = {case: (call, on_device) for case, call in on_gpu.items()}
    host = interleaved(implementations, host_cases, args.rounds)
    device = interleaved(implementations, gpu_cases, args.rounds)
    for name in implementations:
        line = {
            "implementation": name,
            "rounds": args.rounds,
            "host_us": {case: summary(values) for case, values in host[name].items()},
            "gpu_ms": {case: summary(values) for case, values in device[name].items()},
            "device": torch.cuda.get_device_name(),
        }
        sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
