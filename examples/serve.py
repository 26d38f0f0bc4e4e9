"""Generate with a small model from a paged cache, and compare tokens a second with a dense cache.

    python -m examples.serve
    python -m examples.serve --batch 32 --tokens 256

The model is a transformer with rotary positions and random weights. Prompts of different lengths are read in
one packed call. Then each step appends one token a sequence to the pages and attends over them; on a GPU a
step is a CUDA graph, whose lengths and tables change between replays. The dense cache has room for the
longest sequence in every row. Both must give the same tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext

VOCABULARY, PAGE = 512, 16


@dataclass
class Sizes:
    layers: int
    heads: int
    heads_k: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Model:
    """Weights, and what they do to tokens; ``attend`` brings in the cache."""

    def __init__(self, sizes: Sizes, room: int, like: dict) -> None:
        self.sizes = s = sizes

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, device=like["device"]).mul_(shape[-1] ** -0.5).to(like["dtype"])

        rows = (s.heads + 2 * s.heads_k) * s.head_dim
        self.embedding = torch.randn(VOCABULARY, s.width, device=like["device"]).to(like["dtype"])
        self.layers = [
            (
                weight(rows, s.width),
                weight(s.width, s.width),
                weight(4 * s.width, s.width),
                weight(s.width, 4 * s.width),
            )
            for _ in range(s.layers)
        ]
        angles = torch.arange(room)[:, None] * 10000.0 ** -(torch.arange(0, s.head_dim, 2) / s.head_dim)
        self.cos, self.sin = (x.to(like["device"]) for x in (angles.cos(), angles.sin()))

    def next_tokens(
        self,
        tokens: Tensor,
        positions: Tensor,
        last: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The most likely next token of each sequence; tokens are packed, ``last`` is where each one ends."""
        s, x = self.sizes, self.embedding[tokens]
        for layer, (into, out, up, down) in enumerate(self.layers):
            qkv = F.linear(norm(x), into).unflatten(-1, (-1, s.head_dim))
            q, k, v = qkv.split([s.heads, s.heads_k, s.heads_k], 1)
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
            a, b = q.float().chunk(2, -1)
            q = torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
            x = x + F.linear(attend(layer, q, k, v).flatten(1), out)
            x = x + F.linear(F.gelu(F.linear(norm(x), up)), down)
        return F.linear(norm(x[last]), self.embedding).argmax(-1)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Paged:
    """A cache of pages, taken from a pool in any order."""

    name = "paged"

    def __init__(self, model: Model, batch: int, room: int, like: dict) -> None:
        s, pages = model.sizes, -(-room // PAGE)
        shape = (s.layers, 2, batch * pages, PAGE, s.heads_k, s.head_dim)
        self.model, self.cache = model, torch.zeros(shape, **like)
        self.table = torch.randperm(batch * pages).view(batch, pages).int().to(like["device"])
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=like["device"])

    def slots(self, sequence: Tensor, positions: Tensor) -> Tensor:
        return self.table[sequence, positions // PAGE] * PAGE + positions % PAGE

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        return flash_ext.attention_varlen(
            q, *self.cache[layer], bounds, None, seqused_k=self.lengths, block_table=self.table,
            max_seqlen_q=longest, causal=True,
        )  # fmt: skip

    def step(
        self, tokens: Tensor, sequence: Tensor, positions: Tensor, bounds: Tensor, longest: int
    ) -> Tensor:
        """Appends the tokens, whose number is counted in ``lengths`` already, and returns the next ones."""
        slots = self.slots(sequence, positions)
        rotary = flash_ext.serving.Rotary(self.model.cos, self.model.sin, positions, interleaved=False)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flash_ext.serving.append_kv(k, v, *self.cache[layer], slots, rotary)
            return self.attend(layer, q, k, v, bounds, longest)

        return self.model.next_tokens(tokens, positions, bounds[1:] - 1, attend)


class Dense(Paged):
    """A row of the longest length for every sequence: a page that holds all."""

    name = "dense"

    def __init__(self, model: Model, batch: int, room: int, like: dict) -> None:
        super().__init__(model, batch, room, like)
        s = model.sizes
        self.cache = torch.zeros(s.layers, 2, batch, room, s.heads_k, s.head_dim, **like)
        self.table = torch.arange(batch, device=like["device"], dtype=torch.int32)[:, None]

    def slots(self, sequence: Tensor, positions: Tensor) -> Tensor:
        return sequence * self.cache.shape[3] + positions


def generate(cache: Paged, prompts: list[Tensor], count: int) -> tuple[Tensor, float]:
    """(batch, count) tokens, and the seconds that steps took after the prompts."""
    device = cache.lengths.device
    batch, counts = len(prompts), torch.tensor([len(p) for p in prompts])
    bounds = F.pad(counts.cumsum(0), (1, 0)).int().to(device)
    sequence = torch.arange(batch).repeat_interleave(counts).to(device)
    positions = torch.cat([torch.arange(len(p)) for p in prompts]).to(device)
    cache.lengths.copy_(counts)
    tokens = cache.step(torch.cat(prompts).to(device), sequence, positions, bounds, int(counts.max()))

    rows = torch.arange(batch + 1, device=device, dtype=torch.int32)
    found = [tokens.clone()]

    def step() -> None:
        places = cache.lengths.long()
        cache.lengths.add_(1)
        tokens.copy_(cache.step(tokens, rows[:-1].long(), places, rows, 1))

    run = step
    if device.type == "cuda":
        step()  # the first one outside of a graph
        found.append(tokens.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    start = time.perf_counter()
    while len(found) < count:
        run()
        found.append(tokens.clone())
    if device.type == "cuda":
        torch.cuda.synchronize()
    return torch.stack(found, 1), time.perf_counter() - start


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> dict[str, Tensor]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="longest prompt")
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), help="of queries and of keys")
    given = parser.parse_args(arguments)
    torch.manual_seed(1)
    like = {"device": given.device, "dtype": torch.bfloat16 if given.device != "cpu" else torch.float32}
    room = given.prompt + given.tokens
    model = Model(Sizes(given.layers, *given.heads, 64), room, like)
    lengths = torch.randint(1, given.prompt + 1, (given.batch,)).tolist()
    prompts = [torch.randint(VOCABULARY, (n,)) for n in lengths]
    results = {}
    for kind in (Dense, Paged):
        cache = kind(model, given.batch, room, like)
        results[cache.name], seconds = generate(cache, prompts, given.tokens)
        print(f"{cache.name}: {given.batch * given.tokens / max(seconds, 1e-9):.0f} tokens a second")
    same = (results["paged"] == results["dense"]).float().mean().item()
    print(f"{same:.1%} of the tokens are the same")
    return results


if __name__ == "__main__":
    main()
