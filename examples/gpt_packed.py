"""Train a small GPT on documents of different lengths, packed one after the other without padding.

    python -m examples.gpt_packed --steps 200

Each step draws documents until ``--tokens`` bytes are together. ``cu_seqlens`` says where each one starts and
ends; ``attention_varlen`` keeps every document to itself, so no mask is built and no padding is computed.
"""

from __future__ import annotations

import argparse
import inspect
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_ext import attention_varlen

LONGEST = 512  # bytes; a longer document is cut


def documents() -> list[bytes]:
    """Text that every machine has: functions and classes of Python's own argparse."""
    pieces = inspect.getsource(argparse).split("\n\n")
    return [piece.encode()[:LONGEST] for piece in pieces if len(piece) > 40]


def draw_pack(texts: list[bytes], tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, targets, positions (total,) and cu_seqlens (documents + 1,) of about ``tokens`` bytes."""
    inputs, targets, positions, ends = [], [], [], [0]
    while ends[-1] < tokens:
        text = torch.tensor(list(random.choice(texts)))
        inputs.append(text[:-1])
        targets.append(text[1:])
        positions.append(torch.arange(len(text) - 1))
        ends.append(ends[-1] + len(text) - 1)
    whole = [torch.cat(parts).to(device) for parts in (inputs, targets, positions)]
    return *whole, torch.tensor(ends, dtype=torch.int32, device=device)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:  # x: (total, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        out = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)  # (total, heads, head_dim)
        x = x + self.proj(out.flatten(1))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte of every row."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.head(self.norm(x))


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; returns the loss of every step, in nats a byte."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="packs to train on")
    parser.add_argument("--tokens", type=int, default=2048, help="bytes in a pack, at least")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    random.seed(0)
    torch.manual_seed(0)
    texts = documents()
    model = GPT().to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(options.steps):
        tokens, targets, positions, cu_seqlens = draw_pack(texts, options.tokens, options.device)
        # bfloat16 takes the fast kernels of a GPU; weights stay in float32.
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device != "cpu"):
            logits = model(tokens, positions, cu_seqlens)
        loss = F.cross_entropy(logits.float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4d}: loss {losses[-1]:.3f}, {len(cu_seqlens) - 1} documents in the pack")
    return losses


if __name__ == "__main__":
    main()
