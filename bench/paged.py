"""``python -m bench.paged``: attention over pages beside the dense cache, in microseconds and TB/s.

Every row has one set of lengths. "dense" is :func:`flash_ext.attention` over a cache of that length (rows of
one length only), "entries" the same through lengths on the device, "page n" pages of n keys in a random
order, "engine" pages of 16 with K and V side by side in a token and heads outside of its rows. "e4m3" and
"int8" are pages of 64 of 8 bits, with factors of heads and of slots. All run in interleaved rounds on random
data, with the L2 cache overwritten before each launch. TB/s counts the keys and values in use, 16 bits an
element everywhere.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flash_ext
from bench import timing
from flash_ext import serving

PAGES = (1, 16, 64, 256)


@dataclass(frozen=True)
class Row:
    """What one row times: so many new queries of sequences of these lengths."""

    name: str
    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128

    @property
    def bytes(self) -> int:
        """Of the keys and values in use, 16 bits an element."""
        return 4 * sum(self.lengths) * self.heads_k * self.head_dim


def spread(count: int, most: int) -> tuple[int, ...]:
    """Lengths from 1 to ``most`` in equal steps, in an order that mixes them."""
    return tuple(1 + (most - 1) * (37 * i % count) // max(count - 1, 1) for i in range(count))


ROWS = [
    *(Row(f"b{b}-k{k}", (k,) * b) for b, k in ((1, 1024), (1, 8192), (16, 8192), (64, 8192), (128, 2048))),
    Row("mha-b16-k8192", (8192,) * 16, heads=8),
    Row("d64-b64-k8192", (8192,) * 64, head_dim=64),
    Row("d256-b16-k8192", (8192,) * 16, head_dim=256),
    Row("4-new-group-8-b16-k8192", (8192,) * 16, queries=4, heads=64),
    Row("ragged-b16-to-32k", spread(16, 32768)),
    Row("ragged-b32-to-16k", spread(32, 16384)),
    Row("ragged-b64-to-16k", spread(64, 16384)),
    Row("prompt-b4-s2048", (2048,) * 4, queries=2048),
    Row("chunk-512-of-8192-b4", (8192,) * 4, queries=512),
]


def paged(k: list[Tensor], page: int, width: int, together: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of k and v (as pairs of a sequence each) in a random order, and their table."""
    pages = [-(-x.shape[1] // page) for x in k]
    _, _, heads, dim = k[0].shape
    if together:
        whole = torch.zeros(sum(pages), heads, page, 2 * dim, device=k[0].device, dtype=k[0].dtype)
        pool = whole.transpose(1, 2).split(dim, -1)
    else:
        pool = torch.zeros(2, sum(pages), page, heads, dim, device=k[0].device, dtype=k[0].dtype).unbind()
    order = torch.randperm(sum(pages), device=k[0].device)
    table = torch.zeros(len(k), width // page, dtype=torch.int32, device=k[0].device)
    at = 0
    for b, (x, count) in enumerate(zip(k, pages, strict=True)):
        own = order[at : at + count]
        table[b, :count], at = own.int(), at + count
        row = torch.arange(x.shape[1], device=x.device)
        for into, values in zip(pool, x, strict=True):
            into[own[row // page], row % page] = values
    return pool[0], pool[1], table


def in_bytes(x: Tensor, kind: torch.dtype, of_slots: bool) -> tuple[Tensor, Tensor]:
    """Pages of 8 bits, and the factors of their slots, or of heads."""
    most = 127.0 if kind == torch.int8 else 448.0
    largest = x.abs().amax(-1) if of_slots else x.abs().amax((0, 1, 3))
    factor = largest.float().clamp(min=1e-30) / most
    numbers = x / (factor[..., None] if of_slots else factor[:, None])
    return (numbers.round() if kind == torch.int8 else numbers).to(kind), factor


def calls(row: Row, device: str, parts: Sequence[int] = ()) -> dict[str, Callable[[], object]]:
    """What a row times, by name; pages of 64 also with the keys of each sequence in so many ``parts``."""
    like = {"device": device, "dtype": torch.bfloat16}
    batch, causal = len(row.lengths), row.queries > 1
    q = torch.randn(batch, row.queries, row.heads, row.head_dim, **like)
    kv = [torch.randn(2, n, row.heads_k, row.head_dim, **like) for n in row.lengths]
    lengths = torch.tensor(row.lengths, dtype=torch.int32, device=device)
    width = -(-max(row.lengths) // 256) * 256
    found: dict[str, Callable[[], object]] = {}
    if len(set(row.lengths)) == 1:
        k, v = torch.stack(kv, 1)
        found["dense"] = lambda: flash_ext.attention(q, k, v, causal=causal)
        found["entries"] = lambda: serving.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, causal=causal
        )

    def over(pool: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
        return lambda: serving.flash_attn_with_kvcache(
            q, pool[0], pool[1], cache_seqlens=lengths, page_table=pool[2], causal=causal
        )

    for page in PAGES:
        found[f"page {page}"] = over(paged(kv, page, width))
    found["engine"] = over(paged(kv, 16, width, together=True))
    *pool, table = paged(kv, 64, width)
    bounds = torch.arange(batch + 1, device=device, dtype=torch.int32) * row.queries
    for name, kind, of_slots in (("e4m3", torch.float8_e4m3fn, False), ("int8", torch.int8, True)):
        numbers, factors = zip(*(in_bytes(x, kind, of_slots) for x in pool))
        found[name] = functools.partial(
            flash_ext.attention_varlen, q.flatten(0, 1), *numbers, bounds, None, seqused_k=lengths,
            block_table=table, max_seqlen_q=row.queries, causal=causal, k_descale=factors[0],
            v_descale=factors[1],
        )  # fmt: skip
    for count in parts:
        found[f"{count} parts"] = functools.partial(
            flash_ext.attention_varlen, q.flatten(0, 1), *pool, bounds, None, seqused_k=lengths,
            block_table=table, max_seqlen_q=row.queries, causal=causal, backend=f"kv_splits={count}",
        )  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="", help="parts of names, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of launches a row")
    parser.add_argument("--parts", type=int, nargs="*", default=[], help="of the keys of each sequence")
    parser.add_argument("--json", help="file to write")
    given = parser.parse_args(arguments)
    wanted = [part for part in given.rows.split(",") if part]
    timer, lines = timing.make_timer(torch.device(given.device)), []
    for row in ROWS:
        if wanted and not any(part in row.name for part in wanted):
            continue
        samples, failures = timing.measure(
            calls(row, given.device, given.parts), timer, given.rounds, given.budget
        )
        for name, error in failures.items():
            print(f"{row.name:26} {name:9} {error}")
        for name, taken in samples.items():
            us = 1e3 * taken.quartiles()[1]
            host = sum(taken.call_us) / len(taken.call_us) if taken.call_us else None
            lines.append(
                {"row": row.name, "name": name, "us": us, "tb_s": row.bytes / us / 1e6, "host_us": host}
            )
            text = f"{row.name:26} {name:9} {us:9.1f} us {lines[-1]['tb_s']:6.2f} TB/s"
            print(text + (f"  host {host:.1f} us" if host else ""), flush=True)
        timer.release()
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(lines, file, indent=1)
    return lines


if __name__ == "__main__":
    main()
