"""Time that one call spends on the host: ``python -m bench.host_cost [--json]``.

The kernels are left out, everything else is done: argument parsing, dispatch, checks, choice of the path,
allocation of results. On a machine without a GPU the GPU implementation runs on CPU tensors, which differs in
the allocator and in the stream look-up only. Numbers are minima over repeats, in microseconds, single thread;
"empty op" is ``torch.empty(0)``, the least that a call into PyTorch costs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import sys
import timeit
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import flash_ext
from flash_ext import _append, _attention, masks, serving
from flash_ext._ops import dispatch_cached
from flash_ext._ops.library import _C

BUDGET_US = 5.0  # of one attention call without gradients, above an empty op
PREPARED_BUDGET_US = 15.0  # of one with a mask or bias that was prepared
STEP_BUDGET_US = 12.0  # of one layer of a decoding step over pages

Timed = tuple[Callable[[], Any], Callable[[], Any]]  # the gradient mode to time in, the call

# What looks at lengths, pages and slots on the CPU, and is not called for tensors on a GPU.
READERS = (
    (_append, "_check_slots"),
    (_attention, "check_bounds"),
    (dispatch_cached, "check_values"),
    (serving, "_check_lengths"),
    (serving, "check_new_places"),
)


@contextlib.contextmanager
def null_kernels(device: str) -> Iterator[None]:
    """Inside, calls on ``device`` do everything but launch; results are uninitialised memory."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # PyTorch announces that the CPU implementation is overridden
        if device == "cpu":
            for module, name in READERS:
                stack.enter_context(mock.patch.object(module, name, lambda *_: None))
            _C.use_null_kernels_on_cpu(True)
        else:
            _C.set_switch("skip_launch", 1)
        try:
            yield
        finally:
            _C.use_null_kernels_on_cpu(False)  # also clears the switch


def serving_calls(device: str) -> dict[str, Timed]:
    """One layer of a decoding step: 4 sequences, 32 heads of 8, head_dim 128, pages of 16."""
    batch, pages, page_size = 4, 16, 16
    k_cache, v_cache = torch.zeros(
        2, batch * pages, page_size, 8, 128, dtype=torch.bfloat16, device=device
    ).unbind()
    q = k_cache.new_empty(batch, 32, 128)
    new = k_cache.new_zeros(batch, 8, 128)
    row = new.unsqueeze(1)
    numbers = torch.arange(batch * pages, dtype=torch.int32, device=device)
    cu_seqlens, table = numbers[: batch + 1].clone(), numbers.view(batch, pages)
    lengths, slots = torch.full_like(numbers[:batch], 100), numbers[:batch].long()
    cos, sin = torch.ones(2, pages * page_size, 64, device=device).unbind()
    key_mask = masks.KeyMask(torch.ones(batch, pages * page_size, dtype=torch.bool, device=device))
    over_pages = dict(max_seqlen_q=1, seqused_k=lengths, block_table=table, causal=True)
    entries = (q.unsqueeze(1), k_cache, v_cache)
    of_entries = dict(cache_seqlens=lengths, page_table=table, causal=True)
    # As vLLM gives them: all by name, most of them at their defaults.
    of_vllm = dict(
        over_pages, q=q, k=k_cache, v=v_cache, cu_seqlens_q=cu_seqlens, max_seqlen_k=pages * page_size,
        softmax_scale=128**-0.5, window_size=[-1, -1], softcap=0.0, alibi_slopes=None, num_splits=0,
        scheduler_metadata=None, fa_version=3, q_descale=None, k_descale=None, v_descale=None, s_aux=None,
    )  # fmt: skip

    def step(**options: Any) -> Any:
        return flash_ext.attention_varlen(q, k_cache, v_cache, cu_seqlens, None, **over_pages, **options)

    def with_kvcache(*appended: Any, **options: Any) -> Any:
        return serving.flash_attn_with_kvcache(*entries, *appended, **of_entries, **options)

    return {
        name: (torch.no_grad, call)
        for name, call in {
            "attention_varlen over pages": step,
            "the same with lse": lambda: step(return_aux=flash_ext.AuxRequest(lse=True)),
            "the same with a prepared KeyMask": lambda: step(mask=key_mask),
            "flash_attn_varlen_func": lambda: serving.flash_attn_varlen_func(**of_vllm),
            "flash_attn_varlen_func with lse": lambda: serving.flash_attn_varlen_func(
                **of_vllm, return_softmax_lse=True
            ),
            "flash_attn_with_kvcache": with_kvcache,
            "flash_attn_with_kvcache with lse": lambda: with_kvcache(return_softmax_lse=True),
            "flash_attn_with_kvcache with k and v": lambda: with_kvcache(row, row),
            "the same with rotary factors": lambda: with_kvcache(row, row, rotary_cos=cos, rotary_sin=sin),
            "append_kv": lambda: serving.append_kv(new, new, k_cache, v_cache, slots),
        }.items()
    }


def modified_calls(device: str) -> dict[str, Timed]:
    """Calls with heads first, with modifiers and with values that keep them.

    Without a mask or a bias nothing keeps the call of a modifier.
    """
    q = torch.zeros(2, 16, 4, 64, dtype=torch.bfloat16, device=device)
    leaves = [torch.zeros_like(q, requires_grad=True) for _ in range(3)]
    same, heads_first = (q, q, q), (q.transpose(1, 2).contiguous(),) * 3
    ids = torch.arange(64, dtype=torch.int32, device=device)
    mask, documents = masks.DocumentCausal(ids[:16] // 5), masks.DocumentCausal(ids // 32)
    rows = [t.detach().view(2, 64, 1, 64).requires_grad_() for t in leaves]
    flash_ext.attention(*rows, mask=documents)  # reads where documents begin, which null kernels do not leave
    table = torch.zeros(4, 32, device=device, requires_grad=True)
    learned, constant = masks.RelativePosition(table), masks.RelativePosition(table.detach())
    modifiers = {
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": torch.zeros(4, device=device)},
        "dropout": {"dropout_p": 0.1},
    }

    def run(*tensors: Any, **options: Any) -> Callable[[], Any]:
        return functools.partial(flash_ext.attention, *tensors, **options)

    turned = functools.partial(run, layout="bhsd")
    without_gradient = {
        "attention, bhsd": turned(*heads_first, causal=True),
        **{f"attention with {name}": run(*same, causal=True, **given) for name, given in modifiers.items()},
        "prepared mask, bhsd": turned(*heads_first, mask=mask),
        **{f"prepared mask with {name}": run(*same, mask=mask, **given) for name, given in modifiers.items()},
        "documents that run packed": run(*(t.detach() for t in rows), mask=documents),
        "prepared RelativePosition": run(*same, bias=constant),
        "learned RelativePosition": run(*same, bias=learned),
    }
    with_gradient = {
        "prepared mask, bhsd, records a graph": turned(*(t.transpose(1, 2) for t in leaves), mask=mask),
        "documents, packed, record a graph": run(*rows, mask=documents),
        "RelativePosition records a graph": run(*leaves, bias=learned),
    }
    return {name: (torch.no_grad, call) for name, call in without_gradient.items()} | {
        name: (torch.enable_grad, call) for name, call in with_gradient.items()
    }


def calls(device: str) -> dict[str, Timed]:
    """Everything that is timed, by name."""
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
        **modified_calls(device),
        **serving_calls(device),
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
        "step_budget_us": STEP_BUDGET_US,
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
    sys.stdout.write(f"attention_varlen over pages: budget {STEP_BUDGET_US} us\n")


if __name__ == "__main__":
    main()
