"""Time that one call spends on the host: ``python -m bench.host_cost [--json]``.

The kernels are left out, everything else is done: argument parsing, dispatch, checks, choice of the path,
allocation of results. On a machine without a GPU the GPU implementation runs on CPU tensors, which differs in
the allocator and in the stream look-up only. Numbers are minima over repeats, in microseconds, single thread;
"empty op" is ``torch.empty(0)``, the least that a call into PyTorch costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import timeit
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import flash_ext
from flash_ext import masks
from flash_ext._ops.library import _C

BUDGET_US = 5.0  # of one attention call without gradients, above an empty op
PREPARED_BUDGET_US = 15.0  # of one with a mask or bias that was prepared


@contextlib.contextmanager
def null_kernels(device: str) -> Iterator[None]:
    """Inside, calls on ``device`` do everything but launch; results are uninitialised memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch announces that the CPU implementation is overridden
        if device == "cpu":
            _C.use_null_kernels_on_cpu(True)
        else:
            _C.set_switch("skip_launch", 1)
        try:
            yield
        finally:
            _C.use_null_kernels_on_cpu(False)  # also clears the switch


def calls(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name: (the gradient mode to time in, the call)."""
    q = torch.empty(2, 16, 4, 64, dtype=torch.bfloat16, device=device)
    leaves = [torch.empty_like(q, requires_grad=True) for _ in range(3)]
    heads_first = q.transpose(1, 2)
    packed = q.flatten(0, 1)
    cu_seqlens = torch.tensor([0, 16, 32], dtype=torch.int32, device=device)
    options = (None, None, 0, 0, 0.125, -1, 0, False, None)
    dout, lse = torch.empty_like(q), torch.empty(2, 4, 16, device=device)
    sdpa = flash_ext.scaled_dot_product_attention
    operator = torch.ops.flash_ext.fwd.default

    ids = torch.arange(16, dtype=torch.int32, device=device) // 5
    mask, bias = masks.DocumentCausal(ids), masks.DenseBias(torch.zeros(1, 4, 16, 16, device=device))

    def train(**options: Any) -> None:
        out = flash_ext.attention(*leaves, **options)
        torch.autograd.grad(out, leaves, dout)

    return {
        "empty op": (torch.no_grad, lambda: torch.empty(0)),
        "two empty ops on the device": (
            torch.no_grad,
            lambda: (torch.empty(q.shape, device=device), torch.empty(lse.shape, device=device)),
        ),
        "attention": (torch.no_grad, lambda: flash_ext.attention(q, q, q, causal=True)),
        "attention, inference mode": (
            torch.inference_mode,
            lambda: flash_ext.attention(q, q, q, causal=True),
        ),
        "attention_varlen": (
            torch.no_grad,
            lambda: flash_ext.attention_varlen(packed, packed, packed, cu_seqlens, cu_seqlens, causal=True),
        ),
        "scaled_dot_product_attention": (
            torch.no_grad,
            lambda: sdpa(heads_first, heads_first, heads_first, is_causal=True),
        ),
        "torch.ops.flash_ext.fwd": (torch.no_grad, lambda: operator(q, q, q, *options)),
        "backward": (torch.no_grad, lambda: flash_ext.backward(dout, q, q, q, q, lse, causal=True)),
        "attention that records a graph": (
            torch.enable_grad,
            lambda: flash_ext.attention(*leaves, causal=True),
        ),
        "attention and its gradient": (torch.enable_grad, lambda: train(causal=True)),
        "prepared mask": (torch.no_grad, lambda: flash_ext.attention(q, q, q, mask=mask)),
        "prepared bias": (torch.no_grad, lambda: flash_ext.attention(q, q, q, bias=bias)),
        "prepared mask that records a graph": (
            torch.enable_grad,
            lambda: flash_ext.attention(*leaves, mask=mask),
        ),
        "prepared mask and its gradient": (torch.enable_grad, lambda: train(mask=mask)),
    }


def measure(device: str, number: int = 200, repeats: int = 200) -> dict[str, float]:
    """Microseconds per call of everything in :func:`calls`, interleaved so that all see the same machine."""
    timed = calls(device)
    best = dict.fromkeys(timed, float("inf"))
    with null_kernels(device):
        for _ in range(repeats):
            for name, (mode, call) in timed.items():
                with mode():
                    best[name] = min(best[name], timeit.timeit(call, number=number) / number * 1e6)
    return best


def collect(device: str) -> dict[str, Any]:
    """The measurement as one JSON-ready dict; ``over_empty_op_us`` is what the budget speaks of."""
    times = measure(device)
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "microseconds": {name: round(value, 2) for name, value in times.items()},
        "over_empty_op_us": round(times["attention"] - times["empty op"], 2),
        "budget_us": BUDGET_US,
        "prepared_budget_us": PREPARED_BUDGET_US,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host_cost", description="Host time of one call.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    args = parser.parse_args()
    report = collect(args.device)
    if args.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    sys.stdout.write(f"{report['device']}, torch {report['torch']}, Python {report['python']}\n")
    for name, value in report["microseconds"].items():
        sys.stdout.write(f"{name:<36} {value:7.2f} us\n")
    sys.stdout.write(f"attention over an empty op: {report['over_empty_op_us']} us, budget {BUDGET_US} us\n")
    sys.stdout.write(f"with a prepared mask or bias: budget {PREPARED_BUDGET_US} us\n")


if __name__ == "__main__":
    main()
