"""The models that are trained: GPT-2 and Llama blocks in plain PyTorch, with the attention handed in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.training_entrants import Attend
from bench.training_record import ModelShape

ROTARY_BASE = 500_000.0  # Llama 3's
INIT_STD = 0.02
# Logits of so many tokens at a time: 2 GiB in fp32 with the vocabulary of Llama 3, where all would be 16.
LOGIT_ROWS = 4096

Rotation = tuple[Tensor, Tensor]


class Decoder(nn.Module):
    """Embedding, blocks, norm, and the embedding again as head.

    Args:
        longest: longest sequence, which sizes the table of learned positions.
        checkpointing: blocks keep their input only and are run again in the backward.
    """

    def __init__(self, shape: ModelShape, longest: int, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape, self.checkpointing = shape, checkpointing
        llama = shape.style == "llama"
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if llama else nn.Embedding(longest, shape.width)
        self.blocks = nn.ModuleList((LlamaBlock if llama else Gpt2Block)(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(shape.width, eps=1e-5)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """The initial weights of a seed: N(0, 0.02), smaller where a block adds to what came in."""
        generator = torch.Generator(self.embedding.weight.device).manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() == 1:
                param.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            smaller = (2 * self.shape.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
            param.normal_(0.0, INIT_STD * smaller, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor, attend: Attend) -> Tensor:
        """Mean cross entropy in nats a token; tokens and targets are (batch, seqlen)."""
        x = self.embedding(tokens)
        rotation = None
        if self.positions is None:
            rotation = rotary_angles(tokens.shape[1], self.shape.head_dim, x)
        else:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, attend, rotation, use_reentrant=False)
            else:
                x = block(x, attend, rotation)
        hidden = self.norm(x).flatten(0, 1)
        return ChunkedCrossEntropy.apply(hidden, self.embedding.weight, targets.flatten())

    def projection_grad_norms(self) -> dict[str, float]:
        """Norms over all layers of the gradients that reach q, k and v through the attention."""
        per_layer = [block.projection_grads() for block in self.blocks]
        return {
            name: torch.stack([grads[index].float().square().sum() for grads in per_layer])
            .sum()
            .sqrt()
            .item()
            for index, name in enumerate("qkv")
        }


class Gpt2Block(nn.Module):
    """LayerNorm before attention and before a GELU perceptron, biases everywhere."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner = shape.heads * shape.head_dim
        self.shape = shape
        self.attention_norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * inner)
        self.attention_out = nn.Linear(inner, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, shape.mlp_width)
        self.mlp_out = nn.Linear(shape.mlp_width, shape.width)

    def forward(self, x: Tensor, attend: Attend, rotation: Rotation | None) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.shape.heads, self.shape.head_dim))
        x = x + self.attention_out(attend(*heads.unbind(2)).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))

    def projection_grads(self) -> tuple[Tensor, ...]:
        return self.qkv.weight.grad.chunk(3)


class LlamaBlock(nn.Module):
    """RMSNorm before attention with rotary positions and grouped heads, and before SwiGLU; no biases."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner, inner_k = shape.heads * shape.head_dim, shape.heads_k * shape.head_dim
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.query = nn.Linear(shape.width, inner, bias=False)
        self.key = nn.Linear(shape.width, inner_k, bias=False)
        self.value = nn.Linear(shape.width, inner_k, bias=False)
        self.attention_out = nn.Linear(inner, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp_gate = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.mlp_in = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.mlp_out = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor, attend: Attend, rotation: Rotation | None) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.shape.head_dim)) for layer in (self.query, self.key, self.value)
        )
        out = attend(rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.attention_out(out.flatten(2))
        h = self.mlp_norm(x)
        return x + self.mlp_out(F.silu(self.mlp_gate(h)) * self.mlp_in(h))

    def projection_grads(self) -> tuple[Tensor, ...]:
        return self.query.weight.grad, self.key.weight.grad, self.value.weight.grad


def rotary_angles(seqlen: int, head_dim: int, like: Tensor) -> Rotation:
    """cos and sin, each (seqlen, 1, head_dim / 2), angles in fp32, results in the dtype of ``like``."""
    pairs = torch.arange(head_dim // 2, device=like.device, dtype=torch.float32)
    rows = torch.arange(seqlen, device=like.device, dtype=torch.float32)
    angles = rows[:, None, None] * ROTARY_BASE ** (-pairs / (head_dim // 2))
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns feature i against feature i + head_dim / 2 by the row's angles."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of ``hidden @ weight.T``, with the gradients formed beside it, a few rows at a time.

    No more than ``LOGIT_ROWS`` rows of logits exist at once, and none are formed twice.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunks = (tensor.split(LOGIT_ROWS) for tensor in (hidden, targets[:, None], grad_hidden))
        for rows, target, grad in zip(*chunks, strict=True):
            log_p = torch.log_softmax(rows @ weight.mT, dim=-1, dtype=torch.float32)
            loss -= log_p.gather(1, target).sum()
            slope = log_p.exp_().scatter_add_(1, target, torch.full_like(target, -1.0, dtype=torch.float32))
            slope = slope.to(hidden.dtype)
            grad.copy_(slope @ weight)
            grad_weight.addmm_(slope.mT, rows)
            del log_p, slope
        ctx.save_for_backward(grad_hidden.div_(len(targets)), grad_weight.div_(len(targets)))
        return loss / len(targets)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None


class Trainer:
    """A model with its optimiser, whose weights can go back to the start without new memory.

    The optimiser is AdamW, which both families are trained with, fused so that it costs one pass over memory.
    Weights, gradients and moments are all of ``dtype``, without fp32 copies.
    """

    def __init__(
        self,
        shape: ModelShape,
        longest: int,
        device: torch.device,
        dtype: torch.dtype,
        learning_rate: float,
        checkpointing: bool = False,
    ) -> None:
        with torch.device("meta"):  # no default initialisation, which takes seconds
            model = Decoder(shape, longest, checkpointing).to(dtype)
        self.model = model.to_empty(device=device)
        settings = {"lr": learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **settings)
        # A step on zeros makes the moments now, below everything that comes and goes.
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.finish()

    def reset(self, seed: int) -> None:
        """Initial weights of the seed, moments and step count of zero, no gradients."""
        self.drop_gradients()
        self.model.reset(seed)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def state_bytes(self) -> int:
        """Bytes of weights and moments."""
        tensors = [*self.model.parameters()]
        tensors += [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def backward(self, tokens: Tensor, targets: Tensor, attend: Attend) -> Tensor:
        """Fills the gradients; returns the loss."""
        loss = self.model(tokens, targets, attend)
        loss.backward()
        return loss.detach()

    def finish(self) -> None:
        """Updates the weights from the gradients and drops these."""
        self.optimizer.step()
        self.drop_gradients()

    def step(self, tokens: Tensor, targets: Tensor, attend: Attend) -> Tensor:
        """One whole training step; returns the loss before it."""
        loss = self.backward(tokens, targets, attend)
        self.finish()
        return loss

    def drop_gradients(self) -> None:
        """Gives the memory of the gradients back."""
        self.optimizer.zero_grad(set_to_none=True)
