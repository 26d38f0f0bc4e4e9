"""Calls from threads that are new to CUDA: a server's workers, data-parallel threads.

Such a thread has no current context until something binds one. A launch does; a call of the driver, as those
that make tensor maps, fails. Tensors are made and results looked at in the main thread, so that a call of
ours is the first CUDA work of every other one.

    python -m tests.tools.thread_soak --seconds 60   8 new threads a second; exit status 1 if any call failed
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flash_ext

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Family:
    """One kind of call: batch, queries, keys, query and key heads, head_dim, and what else it asks for.

    page_size: keys are in pages of so many.
    cache: type of keys in pages, where they have 8 bits.
    latents: the values are the first columns of the keys, which are in pages.
    fp8: mode of an fp8 call, "fp8" or "mixed".
    """

    sizes: tuple[int, int, int, int, int, int]
    head_dim_v: int | None = None
    packed: bool = False
    page_size: int = 0
    cache: torch.dtype | None = None
    latents: bool = False
    fp8: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    modifiers: tuple[str, ...] = ()


DENSE = (2, 300, 300, 4, 2)
FAMILIES = {
    **{f"hd{d}": Family((*DENSE, d)) for d in (64, 96, 128, 192, 256)},
    "hd192_v128": Family((*DENSE, 192), head_dim_v=128),
    "few queries": Family((2, 1, 4096, 8, 2, 128)),
    "causal": Family((*DENSE, 128), options=(("causal", True),)),
    "packed": Family((*DENSE, 128), packed=True, options=(("causal", True),)),
    "in order": Family((*DENSE, 64), options=(("deterministic", True),)),
    "in order, causal": Family((*DENSE, 128), options=(("deterministic", True), ("causal", True))),
    "packed tiles": Family((2, 16, 4096, 8, 2, 128)),
    "short": Family((64, 49, 49, 4, 4, 32)),
    "short, bias": Family((64, 49, 49, 4, 4, 32), modifiers=("bias",)),
    "ring": Family((16, 512, 1024, 16, 16, 128)),
    "few rows": Family((16, 512, 512, 16, 16, 128)),
    "mask": Family((*DENSE, 128), modifiers=("mask",)),
    "mask, in order": Family((*DENSE, 64), modifiers=("mask",), options=(("deterministic", True),)),
    "blocks": Family((*DENSE, 128), modifiers=("blocks",)),
    "mask, hd256": Family((*DENSE, 256), modifiers=("mask",)),
    "bias": Family((*DENSE, 64), modifiers=("bias",)),
    "slopes": Family((*DENSE, 128), modifiers=("slopes",)),
    "softcap": Family((*DENSE, 128), modifiers=("softcap",)),
    "sinks": Family((*DENSE, 128), modifiers=("sinks",)),
    "dropout": Family((*DENSE, 128), modifiers=("dropout",)),
    **{f"prompts over pages of {n}": Family((2, 300, 500, 8, 2, 128), page_size=n) for n in (16, 64)},
    "prompts over pages, hd256": Family((2, 300, 500, 4, 2, 256), page_size=64),
    "packed tiles over pages": Family((2, 32, 1000, 8, 2, 128), page_size=16),
    "few queries over pages": Family((2, 1, 4096, 8, 2, 128), page_size=16),
    "softcap over pages": Family((2, 40, 500, 8, 2, 128), page_size=16, modifiers=("softcap",)),
    "packed tiles over pages of int8": Family((2, 32, 1000, 8, 2, 128), page_size=16, cache=torch.int8),
    "softcap over pages of e4m3": Family(
        (2, 40, 500, 8, 2, 128), page_size=16, cache=torch.float8_e4m3fn, modifiers=("softcap",)
    ),
    "few queries over pages of e4m3": Family(
        (2, 1, 4096, 8, 2, 128), page_size=16, cache=torch.float8_e4m3fn
    ),
    "latents over pages": Family((2, 1, 1000, 16, 1, 576), head_dim_v=512, page_size=64, latents=True),
    "fp8": Family((*DENSE, 128), fp8="fp8"),
    "fp8, mixed": Family((*DENSE, 64), fp8="mixed", options=(("causal", True),)),
}


def has_kernels(family: Family, device: str, backend: str | None = None) -> bool:
    """Whether a device runs the family: fp8 and latents have kernels on Hopper only, none for other paths."""
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu or not (family.fp8 or family.latents):
        return True
    return backend in (None, "sm90") and torch.cuda.get_device_capability(device)[0] == 9


def modifiers_of(family: Family, device: str) -> dict[str, Any]:
    batch, rows, keys, heads, _, _ = family.sizes

    def bias() -> Tensor:  # with rows that TMA can read
        return torch.randn(1, heads, rows, -(-keys // 8) * 8, device=device).bfloat16()[..., :keys]

    def blocks() -> flash_ext.masks.BlockMask:
        size = (64, 128)
        kept = torch.rand(1, heads, *(-(-n // s) for n, s in zip((rows, keys), size)), device=device) < 0.7
        return flash_ext.masks.BlockMask(kept, size)

    made: dict[str, Callable[[], dict[str, Any]]] = {
        "mask": lambda: {"mask": torch.rand(batch, 1, rows, keys, device=device) < 0.7},
        "blocks": lambda: {"mask": blocks()},
        "bias": lambda: {"bias": bias()},
        "slopes": lambda: {"bias": flash_ext.masks.ALiBi(torch.rand(heads, device=device))},
        "softcap": lambda: {"softcap": 20.0},
        "sinks": lambda: {"sinks": torch.randn(heads, device=device)},
        "dropout": lambda: {"dropout_p": 0.1, "rng": torch.tensor([1, 2], device=device)},
    }
    return {key: value for name in family.modifiers for key, value in made[name]().items()}


def calls_of(family: Family, device: str, backend: str | None = None) -> dict[str, Call]:
    """What a family calls, by name: its forward and what goes with it. All have run when this returns.

    Whatever they allocate is in torch's cache from then on.
    """
    make = (
        calls_over_latents if family.latents
        else calls_over_pages if family.page_size
        else calls_in_fp8 if family.fp8
        else calls_of_attention
    )  # fmt: skip
    calls = make(family, device, backend)
    for call in (*calls.values(), *calls.values()):
        call()
    return calls


def calls_of_attention(family: Family, device: str, backend: str | None) -> dict[str, Call]:
    batch, rows, keys, heads, heads_k, d = family.sizes
    dv = family.head_dim_v or d
    q, k, v, dout = (
        torch.randn(batch, n, h, size, device=device).bfloat16()
        for n, h, size in ((rows, heads, d), (keys, heads_k, d), (keys, heads_k, dv), (rows, heads, dv))
    )
    options: dict[str, Any] = {**dict(family.options), **modifiers_of(family, device), "backend": backend}
    if family.packed:
        q, k, v, dout = (t.flatten(0, 1) for t in (q, k, v, dout))
        for name, n in (("q", rows), ("k", keys)):
            cu = torch.arange(0, batch * n + 1, n, device=device, dtype=torch.int32)
            options[f"cu_seqlens_{name}"] = cu
    out, lse = flash_ext.forward(q, k, v, **options)
    needs = ("q", "k", "v", *(["bias"] if "bias" in family.modifiers else []))

    def forward() -> tuple[Tensor, ...]:
        return flash_ext.forward(q, k, v, **options)

    def backward() -> tuple[Tensor, ...]:
        return flash_ext.backward(dout, q, k, v, out, lse, needs=needs, **options)

    return {"forward": forward, "backward": backward}


def calls_over_pages(family: Family, device: str, backend: str | None) -> dict[str, Call]:
    """The last page of a sequence is empty until the append, whose keys the forward does not see."""
    batch, rows, keys, heads, heads_k, d = family.sizes
    table, lengths = pages_of(family, device)
    shape = (table.numel(), family.page_size, heads_k, d)
    k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    factors: dict[str, Tensor] = {}
    if family.cache is not None:
        k, v = ((40 * x).clamp(-127, 127).to(family.cache) for x in (k, v))
        factors = {f"{name}_descale": torch.full((heads_k,), 1 / 40, device=device) for name in "kv"}
    q = torch.randn(batch * rows, heads, d, device=device).bfloat16()
    bounds = torch.arange(0, batch * rows + 1, rows, device=device, dtype=torch.int32)
    new = [torch.randn(batch, heads_k, d, device=device).bfloat16() for _ in range(2)]
    slots = table[:, -1].long() * family.page_size
    options: dict[str, Any] = {**dict(family.options), **modifiers_of(family, device), "backend": backend}

    def forward() -> tuple[Tensor, ...]:
        out, (lse, _) = flash_ext.attention_varlen(
            q, k, v, bounds, None, causal=True, max_seqlen_q=rows, seqused_k=lengths, block_table=table,
            return_aux=flash_ext.AuxRequest(lse=True), **factors, **options,
        )  # fmt: skip
        return out, lse

    def append() -> tuple[Tensor, ...]:
        flash_ext.serving.append_kv(*new, k, v, slots, **factors)
        return k, v

    return {"forward": forward, "append": append}


def pages_of(family: Family, device: str) -> tuple[Tensor, Tensor]:
    """Numbers of pages in no order, one more for each sequence than its keys need, and lengths."""
    batch, _, keys, *_ = family.sizes
    pages = -(-keys // family.page_size) + 1
    table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    return table, torch.full((batch,), keys, device=device, dtype=torch.int32)


def calls_over_latents(family: Family, device: str, backend: str | None) -> dict[str, Call]:
    """A decoding step as FlashMLA is called, which takes no ``backend``."""
    batch, rows, _, heads, heads_k, d = family.sizes
    table, lengths = pages_of(family, device)
    k = torch.randn(table.numel(), family.page_size, heads_k, d, device=device).bfloat16()
    q = torch.randn(batch, rows, heads, d, device=device).bfloat16()
    columns = family.head_dim_v or d

    def forward() -> tuple[Tensor, ...]:
        return flash_ext.serving.flash_mla_with_kvcache(q, k, table, lengths, columns, causal=True)

    return {"forward": forward}


def calls_in_fp8(family: Family, device: str, backend: str | None) -> dict[str, Call]:
    batch, rows, keys, heads, heads_k, d = family.sizes
    tensors = (torch.randn(batch, n, h, d, device=device).bfloat16()
               for n, h in ((rows, heads), (keys, heads_k), (keys, heads_k)))  # fmt: skip
    q, k, v = tensors
    x = flash_ext.fp8.quantize_fp8(q, k, v, mode=family.fp8)

    def quantise() -> tuple[Tensor, ...]:
        made = flash_ext.fp8.quantize_fp8(q, k, v, mode=family.fp8)
        return made.q, made.k, made.v

    def forward() -> tuple[Tensor, ...]:
        return (flash_ext.fp8.attention_fp8(x, backend=backend, **dict(family.options)),)

    return {"quantise": quantise, "forward": forward}


def in_new_threads(calls: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """Each call in a thread of its own, one after the other: what came back and what was raised, by name."""
    results: dict[str, Any] = {}
    raised: dict[str, BaseException] = {}

    def work(name: str) -> None:
        try:
            results[name] = calls[name]()
        except Exception as error:
            raised[name] = error

    for name in calls:
        thread = threading.Thread(target=work, args=(name,))
        thread.start()
        thread.join()
    return results, raised


def soak(devices: list[str], seconds: float, per_second: int) -> tuple[int, list[str]]:
    """Starts so many threads a second, each for one call; how many there were, and what failed."""
    calls = {
        f"{device} {name} {what}": call
        for device in devices
        for name, family in FAMILIES.items()
        if has_kernels(family, device)
        for what, call in calls_of(family, device).items()
    }
    for device in devices:
        torch.cuda.synchronize(device)
    names: Iterator[str] = itertools.cycle(calls)
    failures: list[str] = []
    count, begun = 0, time.monotonic()

    def work(name: str) -> None:
        try:
            calls[name]()
        except Exception as error:
            failures.append(f"{name}: {error}")

    while time.monotonic() - begun < seconds:
        threads = [threading.Thread(target=work, args=(next(names),)) for _ in range(per_second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        count += len(threads)
        time.sleep(max(0.0, begun + count / per_second - time.monotonic()))
    for device in devices:
        torch.cuda.synchronize(device)
    return count, failures


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.thread_soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--per-second", type=int, default=8, help="new threads a second")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device, none is visible", file=sys.stderr)
        return 3
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    count, failures = soak(devices, options.seconds, options.per_second)
    print("\n".join(sorted(set(failures))))
    print(f"{count} threads on {len(devices)} devices, {len(failures)} failed")
    return 1 if failures or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
