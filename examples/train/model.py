"""The demo's model, and the attentions it is tried with.

A decoder-only transformer over bytes: pre-normalised blocks, rotary positions that restart in every document,
normalised queries and keys, and fewer key heads than query heads. What attends is handed to it with every
call, so that the very same weights run with flash_ext, with PyTorch's attention and with attention as it is
written in textbooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_ext import attention_varlen

from .text import DOCUMENT_START, NUM_BYTES, Pack, pack_tokens

ROTARY_BASE = 500.0  # documents are short: the slowest pair turns about once in a few thousand bytes

# q (total, num_heads, head_dim), k and v (total, num_heads_k, head_dim) -> (total, num_heads, head_dim)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# What depends on the pack alone, such as a mask, is made here, once for all layers.
Attention = Callable[[Pack], Attend]


# ---- attentions ----------------------------------------------------------------------------------------


def flash_ext_attention(pack: Pack) -> Attend:
    """Each document attends to itself; the boundaries are all that is needed."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(q, k, v, pack.cu_seqlens, pack.cu_seqlens, causal=True)

    return attend


def pytorch_attention(pack: Pack) -> Attend:
    """``F.scaled_dot_product_attention`` over the whole pack, with a mask that keeps documents apart.

    Key heads are repeated rather than shared, since the fused kernels that take a mask do not all share them.
    """
    mask = document_mask(pack)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _heads_first(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)

    return attend


def materialised_attention(pack: Pack) -> Attend:
    """softmax(q k^T / sqrt(d)) v by its formula, with every score in memory."""
    hidden = ~document_mask(pack)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1.0 / math.sqrt(q.shape[-1])
        q, k, v = _heads_first(q, k, v)
        scores = (q @ k.mT * scale).masked_fill(hidden, float("-inf"))
        return (scores.softmax(dim=-1).to(v.dtype) @ v)[0].transpose(0, 1)

    return attend


def document_mask(pack: Pack) -> Tensor:
    """(total, total) bool, True where a row sees a key: earlier or equal, and of its own document."""
    rows = torch.arange(pack.total, device=pack.tokens.device)
    first_visible = rows - pack.positions
    return (rows <= rows[:, None]) & (rows >= first_visible[:, None])


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1, num_heads, total, head_dim) of all three, with each key head repeated for its query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return q, k, v


# ---- model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSize:
    """Width and depth of the transformer; num_heads is a multiple of num_heads_k."""

    width: int
    num_layers: int
    num_heads: int
    num_heads_k: int
    head_dim: int


class Transformer(nn.Module):
    """Predicts the next byte of every row of a pack."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(NUM_BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, NUM_BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.2)
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, pack: Pack, attention: Attention) -> Tensor:
        """Logits (total, 256)."""
        attend = attention(pack)
        rotation = rotary_angles(pack.positions, self.size.head_dim)
        x = self.embedding(pack.tokens)
        for block in self.blocks:
            x = block(x, attend, rotation)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to what comes in."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.attention_norm = nn.RMSNorm(size.width)
        self.q_norm = nn.RMSNorm(size.head_dim)
        self.k_norm = nn.RMSNorm(size.head_dim)
        heads = size.num_heads + 2 * size.num_heads_k
        self.qkv = nn.Linear(size.width, heads * size.head_dim, bias=False)
        self.attention_out = nn.Linear(size.num_heads * size.head_dim, size.width, bias=False)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.mlp_out = nn.Linear(4 * size.width, size.width, bias=False)
        nn.init.constant_(self.q_norm.weight, 3.0)  # heads prefer some keys from the first step on
        with torch.no_grad():  # the sum over all layers starts out as large as one of them
            for layer in (self.attention_out, self.mlp_out):
                layer.weight.mul_((2 * size.num_layers) ** -0.5)

    def forward(self, x: Tensor, attend: Attend, rotation: tuple[Tensor, Tensor]) -> Tensor:
        size = self.size
        heads = self.qkv(self.attention_norm(x)).unflatten(1, (-1, size.head_dim))
        q, k, v = heads.split([size.num_heads, size.num_heads_k, size.num_heads_k], dim=1)
        # Norm and rotation are done in float32; under autocast q and k return to the dtype of v here.
        q = rotate(self.q_norm(q.float()), rotation).to(v.dtype)
        k = rotate(self.k_norm(k.float()), rotation).to(v.dtype)
        x = x + self.attention_out(attend(q, k, v).flatten(1))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def rotary_angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each (total, 1, head_dim / 2) float32 (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    pairs = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, None] * ROTARY_BASE ** (-pairs / (head_dim // 2))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns feature i against feature i + head_dim / 2 by the row's angles; x is (total, heads, head_dim)."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 for matrix products and attention on a GPU, float32 throughout on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def mean_loss(model: Transformer, pack: Pack, attention: Attention) -> Tensor:
    """Mean cross entropy in nats per byte."""
    with mixed_precision(pack.tokens.device):
        logits = model(pack, attention)
    return F.cross_entropy(logits.float(), pack.targets)


@torch.no_grad()
def generate(model: Transformer, prompt: str, length: int, temperature: float, seed: int) -> str:
    """Continues ``prompt`` through flash_ext by up to ``length`` bytes, or until a new document begins.

    The whole text is run again for every byte. Bytes that are no printable ASCII come out as escapes: a model
    that has seen little writes those that move a terminal's cursor as well.
    """
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(DOCUMENT_START + prompt.encode())
    for _ in range(length):
        pack = pack_tokens(text, text, [0, len(text)]).to(device)
        with mixed_precision(device):
            logits = model(pack, flash_ext_attention)[-1]
        weights = (logits.float() / temperature).softmax(dim=0).cpu()
        byte = int(torch.multinomial(weights, 1, generator=generator))
        if byte == DOCUMENT_START[0]:
            break
        text.append(byte)
    written = text[len(DOCUMENT_START) :]
    return "".join(chr(b) if 32 <= b < 127 or b in b"\n\t" else f"\\x{b:02x}" for b in written)
