"""The demo's masked model: documents kept apart by a mask, ALiBi and dropout, against float64.

The whole pack is one sequence here, unlike in the other trainings, where boundaries keep documents apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_ext import attention, dropout_rng, masks
from flash_ext._cpu.philox import keep_factor, keep_mask
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.reference import attention_reference

from .measure import Curve, Distance, Recorder, Schedule, held_out_loss, train_side_by_side
from .model import Attend, Attention, ModelSize, Transformer, document_mask, mean_loss
from .text import Pack, Text, draw_pack

DROPOUT = 0.1
PICTURED = 160  # rows and keys of the picture of the weights

# q, k, v (total, heads, head_dim) and slopes (num_heads,) -> (total, num_heads, head_dim)
Masked = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MaskedResults:
    """What the masked model showed.

    Attributes:
        curve: its training; planned_steps of it, fewer if its time was up.
        held_out: loss in nats per byte without dropout, of text that no training saw.
        distances: "out", "dq", "dk", "dv", "dslopes" -> distance from float64, with the same dropout.
        weights: (rows, keys) float32, what the last head of the first layer, that of the smallest slope,
            multiplies v by.
    """

    curve: Curve
    planned_steps: int
    held_out: float
    distances: dict[str, Distance]
    weights: Tensor


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """(num_heads,) float32: 2^-(8 i / h), Press et al. 2022, https://arxiv.org/abs/2108.12409."""
    return 2.0 ** (-8.0 / num_heads * torch.arange(1, num_heads + 1, device=device))


def document_ids(pack: Pack) -> Tensor:
    """(total,) int32, the number of the document that each row belongs to."""
    starts = (pack.positions == 0).int()
    return starts.cumsum(0, dtype=torch.int32)


def masked_attention(pack: Pack) -> Attend:
    """For training: with dropout from the device's own generator."""
    return _with_usual_slopes(ours(pack, DROPOUT))


def masked_attention_without_dropout(pack: Pack) -> Attend:
    return _with_usual_slopes(ours(pack, 0.0))


def _with_usual_slopes(masked: Masked) -> Attend:
    return lambda q, k, v: masked(q, k, v, alibi_slopes(q.shape[1], q.device))


def ours(pack: Pack, dropout_p: float, seed: int | None = None) -> Masked:
    """flash_ext: every part of the mask by its name. With a seed every call drops the same weights."""
    mask = masks.DocumentCausal(document_ids(pack))

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        generator = None if seed is None else torch.Generator(q.device).manual_seed(seed)
        return attention(
            q[None], k[None], v[None], mask=mask, bias=masks.ALiBi(slopes), dropout_p=dropout_p,
            generator=generator,
        )[0]  # fmt: skip

    return attend


def written_out(pack: Pack, dropout_p: float, seed: int) -> Masked:
    """The formula with every weight in memory, dropping the same ones."""

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        weights = weights_of(pack, q, k, slopes, dropout_p, seed)
        return torch.einsum("hij,jhd->ihd", weights.to(v.dtype), _repeated(v, q))

    return attend


def weights_of(pack: Pack, q: Tensor, k: Tensor, slopes: Tensor, dropout_p: float, seed: int) -> Tensor:
    """(num_heads, total, total), what v is multiplied by."""
    scores = torch.einsum("ihd,jhd->hij", q, _repeated(k, q)) * default_scale(q.shape[-1])
    rows = torch.arange(pack.total, device=q.device)
    scores = scores - slopes[:, None, None] * (rows[:, None] - rows).abs()
    weights = scores.masked_fill(~document_mask(pack), float("-inf")).softmax(dim=-1)
    only_sequence = rows[:1]  # number 0
    kept = keep_mask(_rng(q.device, seed), dropout_p, only_sequence, q.shape[1], rows, rows)[0]
    return weights * kept * keep_factor(dropout_p)


def float64_oracle(pack: Pack, dropout_p: float, seed: int) -> Masked:
    """:func:`tests.reference.attention_reference` with the same modifiers."""
    ids = document_ids(pack)[None]

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        mods = Modifiers(
            document_q=ids, document_k=ids, slopes=slopes, dropout_p=dropout_p, rng=_rng(q.device, seed)
        )
        spec = AttnSpec(default_scale(q.shape[-1]), window_right=0)
        return attention_reference(q[None], k[None], v[None], spec, mods=mods)[0][0]

    return attend


def _rng(device: torch.device, seed: int) -> Tensor:
    """What flash_ext draws from a generator with this seed."""
    return dropout_rng(device, torch.Generator(device).manual_seed(seed))


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Key heads repeated for their query heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


# ---- training and judging ------------------------------------------------------------------------------


def run_masked(
    size: ModelSize,
    schedule: Schedule,
    text: Text,
    total: int,
    longest: int,
    names: tuple[str, str],
    device: torch.device,
    seed: int,
) -> MaskedResults:
    """Trains a fresh model of ``size`` and compares it with float64.

    Args:
        total, longest: bytes of a pack and of a document.
        names: of flash_ext and of the formula, in the distances.
    """
    torch.manual_seed(seed)
    model = Transformer(size).to(device)
    drawn = random.Random(seed + 2)
    name = names[0]
    models: dict[str, tuple[Transformer, Attention]] = {name: (model, masked_attention)}
    curves = train_side_by_side(
        models,
        lambda: draw_pack(text.training, total, longest, drawn).to(device),
        schedule,
        lambda *_: None,
    )
    kept_back = draw_pack(text.held_out, total, longest, random.Random(seed + 1)).to(device)
    distances, weights = compare_with_float64(model, kept_back, names, seed)
    return MaskedResults(
        curve=curves[name],
        planned_steps=schedule.steps,
        held_out=held_out_loss(model, masked_attention_without_dropout, [kept_back]),
        distances=distances,
        weights=weights,
    )


def compare_with_float64(
    model: Transformer, pack: Pack, names: tuple[str, str], seed: int
) -> tuple[dict[str, Distance], Tensor]:
    """Distances over all layers of what the model computes, and a corner of the first layer's weights."""
    recorder = Recorder(masked_attention_without_dropout)
    (mean_loss(model, pack, recorder) * pack.total).backward()
    model.zero_grad()
    judged = dict(zip(names, (ours(pack, DROPOUT, seed), written_out(pack, DROPOUT, seed))))
    oracle = float64_oracle(pack, DROPOUT, seed)
    tensors = ("out", "dq", "dk", "dv", "dslopes")
    largest = dict.fromkeys(tensors, 0.0)
    differences = {tensor: dict.fromkeys(names, 0.0) for tensor in tensors}
    for q, k, v, out in recorder.calls:
        assert out.grad is not None
        slopes = alibi_slopes(q.shape[1], q.device)
        truth = _results(oracle, *(x.double() for x in (q, k, v, slopes, out.grad)))
        values = {name: _results(attend, q, k, v, slopes, out.grad) for name, attend in judged.items()}
        for tensor, exact in zip(tensors, truth):
            largest[tensor] = max(largest[tensor], exact.abs().max().item())
        for name, found in values.items():
            for tensor, value, exact in zip(tensors, found, truth):
                apart = (value.double() - exact).abs().max().item()
                differences[tensor][name] = max(differences[tensor][name], apart)
    q, k, _, _ = recorder.calls[0]
    shown = weights_of(pack, q, k, alibi_slopes(q.shape[1], q.device), DROPOUT, seed)
    corner = shown[-1, :PICTURED, :PICTURED].float().cpu()
    return {tensor: Distance(largest[tensor], differences[tensor]) for tensor in tensors}, corner


def _results(attend: Masked, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, dout: Tensor) -> list[Tensor]:
    """Output and the gradients of q, k, v and slopes."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, slopes)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
