"""What stored results of the benchmark do not hold: encoders of the articles' claims, memory of attention,
and models trained with a short and a long context on the same text."""

from __future__ import annotations

import functools
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext
from bench.timing import Timer, measure
from bench.training_entrants import Attend
from bench.training_models import Decoder, Trainer, rotary_angles
from bench.training_record import ModelShape
from examples.ladder.rungs import standard
from examples.train.measure import peak_bytes

Row = dict[str, object]

# Devlin et al. 2018; 30522 words padded to a multiple of 64. Norms stand before the layers, as in GPT-2.
BERT_LARGE = ModelShape("bert-large", "gpt2", 24, 1024, 16, 16, 64, 4096, 30528)
# As the models of the Long Range Arena (Tay et al. 2020): small encoders over bytes.
ARENA = ModelShape("arena", "gpt2", 6, 512, 8, 8, 64, 2048, 256)
BYTES = ModelShape("bytes", "llama", 6, 512, 8, 8, 64, 1536, 256)
TINY = ModelShape("tiny", "gpt2", 2, 32, 2, 2, 16, 64, 256)
TINY_BYTES = ModelShape("tiny bytes", "llama", 2, 64, 4, 4, 16, 128, 256)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        bert, arena, reader: models.
        bert_batch: sequences of 512 tokens; bert_seqlen, where they are shorter.
        arena_lengths, arena_tokens: of the small encoder.
        memory: (seqlen, num_heads, head_dim) of attention alone, forward and backward.
        contexts: short and long.
        steps, judged: of the models that read with one and the other, and files that are held against them.
        rounds, budget_s: of timed steps.
    """

    bert: ModelShape
    bert_batch: int
    bert_seqlen: int
    arena: ModelShape
    arena_lengths: tuple[int, ...]
    arena_tokens: int
    memory: tuple[tuple[int, int, int], ...]
    reader: ModelShape
    contexts: tuple[int, int]
    steps: int
    judged: int
    rounds: int
    budget_s: float


GPU = Scale(
    bert=BERT_LARGE, bert_batch=32, bert_seqlen=512, arena=ARENA, arena_lengths=(1024, 2048, 4096),
    arena_tokens=32768, memory=((1024, 16, 64), (2048, 16, 64), (4096, 16, 64), (16384, 16, 64)),
    reader=BYTES, contexts=(1024, 16384), steps=250, judged=20, rounds=3, budget_s=1.2,
)  # fmt: skip
CPU = Scale(
    bert=TINY, bert_batch=2, bert_seqlen=32, arena=TINY, arena_lengths=(32, 64), arena_tokens=64,
    memory=((256, 2, 16), (512, 2, 16)), reader=TINY_BYTES, contexts=(32, 128), steps=8, judged=2, rounds=1,
    budget_s=0.0,
)  # fmt: skip


# ---- encoders ------------------------------------------------------------------------------------------


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_ext.attention(q, k, v)


def _pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return standard(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


ENCODERS: dict[str, Attend] = {"flash_ext": _ours, "PyTorch": _pytorch, "standard": _standard}


def encoder_rows(
    section: str, shape: ModelShape, lengths: tuple[int, ...], tokens: int, device: torch.device,
    timer: Timer, scale: Scale,
) -> list[Row]:  # fmt: skip
    """Whole training steps (forward, backward, AdamW) without a mask, at each length."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows: list[Row] = []
    trainer = Trainer(shape, max(lengths), device, dtype, 1e-4)
    trainer.reset(0)
    for seqlen in lengths:
        batch = max(1, tokens // seqlen)
        generator = torch.Generator(device).manual_seed(1)
        words, targets = (
            torch.randint(shape.vocabulary, (batch, seqlen), device=device, generator=generator)
            for _ in range(2)
        )

        def step(attend: Attend, words: Tensor = words, targets: Tensor = targets) -> None:
            trainer.backward(words, targets, attend)
            trainer.finish()

        calls: dict[str, Callable[[], object]] = {
            name: functools.partial(step, attend) for name, attend in ENCODERS.items()
        }
        samples, failures = measure(calls, timer, scale.rounds, scale.budget_s)
        for name in calls:
            row: Row = {
                "section": section,
                "name": name,
                "model": shape.name,
                "seqlen": seqlen,
                "batch": batch,
            }
            if name in failures:
                row["error"] = str(failures[name])[:200]
            else:
                row["ms"] = samples[name].quartiles()[1]
            rows.append(row)
    return rows


# ---- memory --------------------------------------------------------------------------------------------


def memory_rows(device: torch.device, scale: Scale) -> list[Row]:
    """The most bytes that forward and backward of attention hold beyond q, k, v and their gradients'
    input.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows: list[Row] = []
    for seqlen, num_heads, head_dim in scale.memory:
        shape = (1, seqlen, num_heads, head_dim)
        q, k, v, dout = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
        for name, attend in ENCODERS.items():

            def work(attend: Attend = attend) -> object:
                inputs = [x.detach().requires_grad_() for x in (q, k, v)]  # noqa: B023
                return torch.autograd.grad(attend(*inputs), inputs, dout)  # noqa: B023

            work()  # workspaces that stay
            rows.append({"section": "memory", "name": name, "seqlen": seqlen, "num_heads": num_heads,
                         "head_dim": head_dim, "peak_bytes": peak_bytes(work, device)})  # fmt: skip
    return rows


# ---- contexts ------------------------------------------------------------------------------------------


def long_files(least: int) -> tuple[list[bytes], list[bytes]]:
    """Files of Python's standard library that are longer than ``least`` bytes; one in ten is held out.

    Raises:
        FileNotFoundError: an installation without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    texts = [text for text in texts if len(text) > least]
    if len(texts) < 10:
        raise FileNotFoundError(
            f"{folder} has {len(texts)} Python files of more than {least} bytes, 10 are needed"
        )
    return [x for i, x in enumerate(texts) if i % 10], texts[::10]


def windows(
    text: bytes, start: int, length: int, context: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Bytes of a window and those that follow them, cut into pieces of ``context``: (length / context,
    context).
    """
    piece = torch.frombuffer(bytearray(text[start : start + length + 1]), dtype=torch.uint8).long().to(device)
    return piece[:-1].view(-1, context), piece[1:].view(-1, context)


def reading_loss(model: Decoder, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte. Autocast rounds for matrix products and attention on a GPU."""
    attend = functools.partial(flash_ext.attention, causal=True)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        x = model.embedding(tokens)
        rotation = rotary_angles(tokens.shape[1], model.shape.head_dim, x)
        for block in model.blocks:
            x = block(x, attend, rotation)
        logits = model.norm(x) @ model.embedding.weight.mT
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def context_rows(device: torch.device, scale: Scale) -> list[Row]:
    """One model reads whole windows, its twin the same windows in short pieces: same weights at the start,
    same bytes in the same order, so that only what a byte can look back to differs.

    The loss is taken over the second half of held-out windows, whose bytes have half a window before them.
    """
    short, long = scale.contexts
    training, held_out = long_files(long + 1)
    rows: list[Row] = []
    for context in (short, long):
        torch.manual_seed(0)
        model = Decoder(scale.reader, long).to(device)
        model.reset(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
        drawn, losses = random.Random(0), []
        started = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if started is not None:
            started.record()
        for step in range(scale.steps):
            # Up in a tenth of the steps, then down to nothing.
            rate = min((step + 1) / max(1, scale.steps // 10), (scale.steps - step) / (0.9 * scale.steps))
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate
            text = drawn.choice(training)
            loss = reading_loss(
                model, *windows(text, drawn.randrange(len(text) - long), long, context, device)
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        curve = [x.item() for x in losses]
        milliseconds = None
        if started is not None:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            torch.cuda.synchronize()
            milliseconds = started.elapsed_time(ended) / scale.steps
        judged = []
        with torch.no_grad():
            for text in held_out[: scale.judged]:
                tokens, targets = windows(text, 0, long, context, device)
                half = slice(long // 2 // context, None) if context < long else slice(None)
                if context < long:
                    judged.append(reading_loss(model, tokens[half], targets[half]).item())
                else:
                    judged.append(_second_half_loss(model, tokens, targets))
        rows.append({"section": "contexts", "name": str(context), "model": scale.reader.name, "curve": curve,
                     "held_out": sum(judged) / len(judged), "held_out_each": judged, "ms": milliseconds,
                     "window": long, "steps": scale.steps})  # fmt: skip
    return rows


def _second_half_loss(model: Decoder, tokens: Tensor, targets: Tensor) -> float:
    """Of a whole window: the loss of all bytes, less that of the first half, which sees nothing of the
    second.
    """
    half = tokens.shape[1] // 2
    whole, first = (
        reading_loss(model, tokens, targets),
        reading_loss(model, tokens[:, :half], targets[:, :half]),
    )
    return (2 * whole - first).item()


def all_rows(device: torch.device, timer: Timer) -> list[Row]:
    """Every section, at the size that fits the device."""
    scale = GPU if device.type == "cuda" else CPU
    rows = memory_rows(device, scale)
    rows += context_rows(device, scale)
    timer.release()
    bert_tokens = scale.bert_batch * scale.bert_seqlen
    rows += encoder_rows("bert", scale.bert, (scale.bert_seqlen,), bert_tokens, device, timer, scale)
    timer.release()
    return rows + encoder_rows(
        "arena", scale.arena, scale.arena_lengths, scale.arena_tokens, device, timer, scale
    )
