"""``python -m bench.paged``: attention over pages beside the dense cache, in us, TB/s and TFLOP/s.

Every row has one set of lengths. "dense" is :func:`flash_ext.attention` over a cache of that length (rows of
one length only), "entries" the same through lengths on the device, "page n" pages of n keys in a random
order, "engine" pages of 16 with K and V side by side in a token and heads outside of its rows. "e4m3", "int8"
and "int8 of heads" are pages of 64 of 8 bits, with factors of heads, of slots, and of heads. "tree" is a tree
of the new tokens over pages of 64, of which "page 64" is the same without. "FA3 page n" is FlashAttention-3
over the pages of "page n" with ``--vllm-fa3-lib``. "cuDNN" is that of PyTorch over the dense cache with
``--cudnn``, where sequences have one length and one new token.

Rows called "append" are a step of decoding over pages of 64: rotary factors turn the new key and query, and
key and value are written into the cache. "one call" does it all. "separate" turns q and k by torch.compile's
kernels (on a CPU by PyTorch's), then calls append_kv, then attention. "FA3 separate" has FlashAttention-3 at
its end.

Rows called "mla" have latents of 576 columns, whose first 512 are the values, in pages of 64 keys in a random
order: "latents" is :func:`flash_ext.serving.flash_mla_with_kvcache`, "page 1" the same over pages of one key,
"FlashMLA" the library of that name with ``--flashmla-lib``.

The largest difference between a peer and ours is printed, as a share of the largest number of the result if
that is above 1. A row where it is above 0.01 has no times, and the program ends with an error once all rows
are done.

All run in interleaved rounds on random data, with the L2 cache overwritten before each launch. TB/s counts
the keys and values in use, 16 bits an element everywhere, and latents once. TFLOP/s counts visible pairs.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flash_ext
from bench import timing
from bench.paged_peers import CUDNN, FA3_PAGES, NO_PEERS, Peers, Pool, columns, fa3_over_pages
from bench.peers_fp8 import fa3_of_vllm
from flash_ext import masks, serving

PAGES = (1, 16, 64, 256)
LATENT, LATENT_VALUE, LATENT_PAGE = 576, 512, 64
TREE_TOKENS = 64  # at most
OURS, PEER = "latents", "FlashMLA"
ONE_CALL, SEPARATE, FA3_SEPARATE = "one call", "separate", "FA3 separate"
# Whose results must be those of which column of ours.
SAME = {PEER: OURS, CUDNN: "dense", SEPARATE: ONE_CALL, FA3_SEPARATE: ONE_CALL}
SAME |= {f"FA3 page {page}": f"page {page}" for page in FA3_PAGES}
# Between two outputs: sums of rounded products, about 0.02 in size where one token sees thousands of keys.
LARGEST_DIFFERENCE = 1e-2
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Row:
    """What one row times: so many new queries of sequences of these lengths.

    Attributes:
        head_dim_v: columns of a latent that are its value; 0 where keys and values lie apart.
        appends: whether the last keys are turned and written in the same step.
    """

    name: str
    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128
    head_dim_v: int = 0
    appends: bool = False

    @property
    def bytes(self) -> int:
        """Of the keys and values in use, 16 bits an element. Latents are both, and count once."""
        return (2 if self.head_dim_v else 4) * sum(self.lengths) * self.heads_k * self.head_dim

    @property
    def operations(self) -> int:
        """Of both products over visible pairs. The last query sees all keys, each one before it one less."""
        pairs = self.queries * sum(self.lengths) - len(self.lengths) * self.queries * (self.queries - 1) // 2
        return 2 * self.heads * pairs * (self.head_dim + (self.head_dim_v or self.head_dim))


def spread(count: int, most: int) -> tuple[int, ...]:
    """Lengths from 1 to ``most`` in equal steps, in an order that mixes them."""
    return tuple(1 + (most - 1) * (37 * i % count) // max(count - 1, 1) for i in range(count))


def latent_row(batch: int, heads: int, queries: int = 1) -> Row:
    """Absorbed queries over latents, 8192 a sequence, or 4096 where there are many sequences."""
    name = f"mla-b{batch}-h{heads}" + (f"-{queries}-new" if queries > 1 else "")
    lengths = (8192 if batch <= 16 else 4096,) * batch
    return Row(name, lengths, queries, heads, heads_k=1, head_dim=LATENT, head_dim_v=LATENT_VALUE)


ROWS = [
    *(Row(f"b{b}-k{k}", (k,) * b) for b, k in ((1, 1024), (1, 8192), (16, 8192), (64, 8192), (128, 2048))),
    Row("mha-b16-k8192", (8192,) * 16, heads=8),
    *(Row(f"mha-32-b16-k{k}", (k,) * 16, heads_k=32) for k in (8192, 32768)),
    Row("d64-b64-k8192", (8192,) * 64, head_dim=64),
    Row("d256-b16-k8192", (8192,) * 16, head_dim=256),
    Row("4-new-group-8-b16-k8192", (8192,) * 16, queries=4, heads=64),
    *(Row(f"{n}-new-b{b}-k8192", (8192,) * b, queries=n) for b in (1, 16) for n in (8, 16, 32, 64)),
    *(Row(f"append-b{b}-k8192", (8192,) * b, appends=True) for b in (1, 4, 16)),
    Row("ragged-b16-to-32k", spread(16, 32768)),
    Row("ragged-b32-to-16k", spread(32, 16384)),
    Row("ragged-b64-to-16k", spread(64, 16384)),
    Row("prompt-b4-s2048", (2048,) * 4, queries=2048),
    Row("chunk-512-of-8192-b4", (8192,) * 4, queries=512),
    *(latent_row(b, h) for b, h in ((1, 16), (1, 128), (16, 16), (16, 128), (64, 64))),
    *(latent_row(128, h) for h in (16, 32, 64, 128)),
    latent_row(128, 128, queries=2),
]


def paged(k: list[Tensor], page: int, width: int, together: bool = False) -> Pool:
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


def modifiers(row: Row, device: str) -> dict[str, dict[str, object]]:
    """Masks and biases over a cache, a softcap and sinks, by name: what a call is given."""
    batch, most = len(row.lengths), max(row.lengths)
    shown = torch.rand(batch, 1, row.queries, most, device=device) < 0.9
    keep = torch.rand(batch, most, device=device) < 0.9
    ids = torch.ones(batch * row.queries, dtype=torch.int32, device=device)
    ids_k = (torch.arange(most, device=device) >= most // 2).int().expand(batch, -1)
    scores = torch.randn(batch, row.heads, row.queries, most, device=device, dtype=torch.bfloat16)
    found: dict[str, dict[str, object]] = {
        "sinks": {"sinks": torch.zeros(row.heads, device=device)},
        "softcap": {"softcap": 30.0},
        "ALiBi": {"bias": masks.ALiBi(torch.rand(row.heads, device=device))},
        "KeyMask": {"mask": masks.KeyMask(keep)},
        "Dense": {"mask": masks.Dense(shown)},
        "Documents": {"mask": masks.Documents(ids, ids_k)},
        "DenseBias": {"bias": masks.DenseBias(scores)},
    }
    if 1 < row.queries <= TREE_TOKENS:
        found["tree"] = {"mask": tree_of(row, device), "causal": False}
    return found


def tree_of(row: Row, device: str) -> masks.TokenTree:
    """Each new token but the first follows one of those before it, up to two the same one."""
    parents = (torch.arange(row.queries, device=device) - 1) // 2
    parents[0] = -1
    return masks.TokenTree.from_parents(parents.expand(len(row.lengths), -1))


def calls(
    row: Row, device: str, parts: Sequence[int] = (), modified: bool = False, peers: Peers = NO_PEERS
) -> Calls:
    """What a row times, by name; pages of 64 also with the keys of each sequence in so many ``parts``.

    ``modified``: pages of 64 alone, in 16 and 8 bits, as they are and with :func:`modifiers`.
    """
    like = {"device": device, "dtype": torch.bfloat16}
    batch, causal = len(row.lengths), row.queries > 1
    q = torch.randn(batch, row.queries, row.heads, row.head_dim, **like)
    kv = [torch.randn(2, n, row.heads_k, row.head_dim, **like) for n in row.lengths]
    lengths = torch.tensor(row.lengths, dtype=torch.int32, device=device)
    width = -(-max(row.lengths) // 256) * 256
    found: Calls = {}
    bounds = torch.arange(batch + 1, device=device, dtype=torch.int32) * row.queries
    if modified:
        *pool, table = paged(kv, 64, width)
        of_heads = [in_bytes(x, torch.float8_e4m3fn, False) for x in pool]
        factors = {"k_descale": of_heads[0][1], "v_descale": of_heads[1][1]}
        kinds = {"": (pool, {}), "e4m3 ": ([numbers for numbers, _ in of_heads], factors)}
        asked: dict[str, dict[str, object]] = {"plain": {}, **modifiers(row, device)}
        for kind, (cache, given) in kinds.items():
            for name, options in asked.items():
                found[kind + name] = functools.partial(
                    flash_ext.attention_varlen, q.flatten(0, 1), *cache, bounds, None, seqused_k=lengths,
                    block_table=table, max_seqlen_q=row.queries, **{"causal": causal, **given, **options},
                )  # fmt: skip
        return found
    dense = None
    if len(set(row.lengths)) == 1:
        k, v = dense = torch.stack(kv, 1)
        found["dense"] = lambda: flash_ext.attention(q, k, v, causal=causal)
        found["entries"] = lambda: serving.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, causal=causal
        )

    def over(pool: Pool, **asked: Any) -> Callable[[], object]:
        return lambda: serving.flash_attn_with_kvcache(
            q, pool[0], pool[1], cache_seqlens=lengths, page_table=pool[2], **{"causal": causal, **asked}
        )

    pools = {page: paged(kv, page, width) for page in PAGES}
    found |= {f"page {page}": over(pool) for page, pool in pools.items()}
    found["engine"] = over(paged(kv, 16, width, together=True))
    if 1 < row.queries <= TREE_TOKENS:
        found["tree"] = over(pools[64], mask=tree_of(row, device), causal=False)
    found |= columns(peers, q, dense, pools, lengths, max(row.lengths))
    *pool, table = pools[64]
    for name, kind, of_slots in (
        ("e4m3", torch.float8_e4m3fn, False),
        ("int8", torch.int8, True),
        ("int8 of heads", torch.int8, False),
    ):
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


def append_calls(row: Row, device: str, peers: Peers = NO_PEERS) -> Calls:
    """What a row of appended keys times, by name. Each call writes the same keys to the same places."""
    like = {"device": device, "dtype": torch.bfloat16}
    batch, new, most = len(row.lengths), row.queries, max(row.lengths)
    q = torch.randn(batch, new, row.heads, row.head_dim, **like)
    k, v = torch.randn(2, batch, new, row.heads_k, row.head_dim, **like)
    kv = [torch.randn(2, n, row.heads_k, row.head_dim, **like) for n in row.lengths]
    width = -(-most // 256) * 256
    pool = k_cache, v_cache, table = paged(kv, 64, width)
    lengths = torch.tensor(row.lengths, dtype=torch.int32, device=device)
    before = lengths - new
    speeds = 1e4 ** -torch.linspace(0, 1, row.head_dim // 2, device=device)
    angles = torch.arange(width, device=device)[:, None] * speeds
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    positions = before.long()[:, None] + torch.arange(new, device=device)
    slots = (table.gather(1, positions // 64) * 64 + positions % 64).flatten()
    turn = both_turned if device == "cpu" else torch.compile(both_turned, dynamic=False)
    behind = {"page_table": table, "causal": True}

    def one_call() -> Tensor:
        factors = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
        return serving.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=before, **factors, **behind
        )

    def prepared() -> Tensor:
        turned_q, turned_k = turn(q, k, cos, sin, positions)
        serving.append_kv(turned_k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots)
        return turned_q

    def separate() -> Tensor:
        return serving.flash_attn_with_kvcache(prepared(), k_cache, v_cache, cache_seqlens=lengths, **behind)

    found: Calls = {ONE_CALL: one_call, SEPARATE: separate}
    if peers.fa3 is not None:
        attend = fa3_over_pages(peers.fa3, pool, lengths, most, batch, new)
        found[FA3_SEPARATE] = lambda: attend(prepared())
    return found


def both_turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (batch, new, heads, head_dim), the halves of each head turned by the angles of its position."""
    c, s = (x[positions].float()[:, :, None] for x in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * c - b * s, a * s + b * c], -1).to(x.dtype)

    return turned(q), turned(k)


def flash_mla(library: str) -> Callable[..., tuple[Tensor, ...]]:
    """The operator of a library that registers ``torch.ops._flashmla_C``, as vLLM builds it."""
    torch.ops.load_library(library)
    return torch.ops._flashmla_C.dense_decode_fwd


def latent_calls(row: Row, device: str, peer: Callable[..., tuple[Tensor, ...]] | None = None) -> Calls:
    """What a row of latents times, by name. The peer plans in its first call, which is never timed."""
    like = {"device": device, "dtype": torch.bfloat16}
    batch, causal = len(row.lengths), row.queries > 1
    pages = -(-max(row.lengths) // LATENT_PAGE)
    q = torch.randn(batch, row.queries, row.heads, row.head_dim, **like)
    pool = torch.randn(batch * pages, LATENT_PAGE, 1, row.head_dim, **like)
    table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    lengths = torch.tensor(row.lengths, dtype=torch.int32, device=device)
    tokens = torch.randperm(pool[..., 0].numel(), device=device).view(batch, -1).int()

    def ours(cache: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        return serving.flash_mla_with_kvcache(q, cache, places, lengths, row.head_dim_v, causal=causal)

    found: Calls = {
        OURS: functools.partial(ours, pool, table),
        "page 1": functools.partial(ours, pool.view(-1, 1, 1, row.head_dim), tokens),
    }
    if peer is None:
        return found
    scale, plan = row.head_dim**-0.5, []

    def theirs() -> tuple[Tensor, ...]:
        given = plan or (None, None)
        result = peer(q, pool, row.head_dim_v, lengths, table, scale, causal, *given, None)
        if not plan:
            plan.extend(result[2:4])
        return result

    return {**found, PEER: theirs}


def difference(found: Calls, peer: str = PEER) -> float:
    """The largest between the output of ours and that of a peer, as a share of ours where that is above 1."""
    outs = [found[name]() for name in (SAME[peer], peer)]
    ours, theirs = (out[0].float() if isinstance(out, tuple) else out.float() for out in outs)
    apart = (ours - theirs.reshape(ours.shape)).abs().max()
    return (apart / ours.abs().max().clamp(min=1)).item()


def time_row(
    row: Row, given: argparse.Namespace, timer: timing.Timer, peers: Peers
) -> tuple[list[dict], list[str]]:
    """Prints and returns the lines of a row, and which peers have other outputs. Then it has no lines."""
    apart: dict[str, float] = {}
    if row.head_dim_v:
        found = latent_calls(row, given.device, peers.flash_mla)
    elif row.appends:
        found = append_calls(row, given.device, peers)
    else:
        found = calls(row, given.device, given.parts, given.modified, peers)
    samples, failures = timing.measure(found, timer, given.rounds, given.budget)
    for name, error in failures.items():
        print(f"{row.name:26} {name:9} {error}")
    for peer, ours in SAME.items():
        if peer in samples and ours in samples:
            apart[peer] = difference(found, peer)
            print(f"{row.name:26} {ours} and {peer} differ by {apart[peer]:.1e}")
    wrong = [peer for peer, size in apart.items() if not size < LARGEST_DIFFERENCE]  # NaN as well
    if wrong:
        print(f"{row.name:26} no times: {', '.join(wrong)} differ too much")
        return [], [f"{peer}: {row.name}" for peer in wrong]
    lines = []
    for name, taken in samples.items():
        us = 1e3 * taken.quartiles()[1]
        host = sum(taken.call_us) / len(taken.call_us) if taken.call_us else None
        tb_s, tflop_s = row.bytes / us / 1e6, row.operations / us / 1e6
        line = {"row": row.name, "name": name, "us": us, "tb_s": tb_s, "tflop_s": tflop_s, "host_us": host}
        lines.append({**line, "difference": max(apart.values())} if apart else line)
        text = f"{row.name:26} {name:14} {us:9.1f} us {tb_s:6.2f} TB/s {tflop_s:6.1f} TFLOP/s"
        print(text + (f"  host {host:.1f} us" if host else ""), flush=True)
    return lines, []


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="", help="parts of names, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of launches a row")
    parser.add_argument("--parts", type=int, nargs="*", default=[], help="of the keys of each sequence")
    parser.add_argument("--modified", action="store_true", help="pages of 64 with masks, biases and sinks")
    parser.add_argument("--flashmla-lib", default="", help="library of FlashMLA, for rows of latents")
    parser.add_argument("--vllm-fa3-lib", default="", help="library of FlashAttention-3 as vLLM builds it")
    parser.add_argument("--cudnn", action="store_true", help="PyTorch's cuDNN over dense caches")
    parser.add_argument("--json", help="file to write")
    return parser


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    given = make_parser().parse_args(arguments)
    wanted = [part for part in given.rows.split(",") if part]
    peers = Peers(
        flash_mla(given.flashmla_lib) if given.flashmla_lib else None,
        fa3_of_vllm(given.vllm_fa3_lib) if given.vllm_fa3_lib else None,
        given.cudnn,
    )
    timer, lines, wrong = timing.make_timer(torch.device(given.device)), [], []
    for row in ROWS:
        if wanted and not any(part in row.name for part in wanted):
            continue
        more, others = time_row(row, given, timer, peers)
        lines, wrong = lines + more, wrong + others
        timer.release()
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(lines, file, indent=1)
    if wrong:
        raise SystemExit(f"Other results than ours: {', '.join(wrong)}.")
    return lines


if __name__ == "__main__":
    main()
