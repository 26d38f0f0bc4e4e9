"""What the demo measures: training side by side, distance from float64, peak memory, memory accesses."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from examples.ladder.costs import measured_accesses
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.reference import attention_reference

from .model import Attend, Attention, ModelSize, Transformer, mean_loss
from .text import Pack

WARMUP_STEPS = 10  # of the learning rate, and left out of the time per step


# ---- training ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """How long to train and how fast.

    Attributes:
        steps: at most.
        seconds: for all models together; when they are spent, training ends before its last step.
        learning_rate: at its highest; it rises for a few steps and falls to 0 along a cosine.
    """

    steps: int
    seconds: float
    learning_rate: float

    def progress(self, step: int, elapsed: float) -> float:
        """0 at the start, 1 at the end."""
        return min(1.0, max(step / self.steps, elapsed / self.seconds))


@dataclass
class Curve:
    """One training: loss in nats per byte and time in seconds, for every step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def settled_seconds(self) -> list[float]:
        """Times without those of the first steps, if there are others."""
        return self.seconds[WARMUP_STEPS:] or self.seconds

    @property
    def median_seconds(self) -> float:
        """Time of a typical step."""
        return statistics.median(self.settled_seconds)


def train_side_by_side(
    models: dict[str, tuple[Transformer, Attention]],
    draw: Callable[[], Pack],
    schedule: Schedule,
    show: Callable[[float, dict[str, Curve]], None],
) -> dict[str, Curve]:
    """Trains all models step by step in turn, on the same packs.

    In turn, so that whatever else the machine does meets all of them alike; each is first in its turn.

    Args:
        models: name -> model and the attention that it trains with.
        show: called after every step with the progress from 0 to 1 and the curves so far.
    """
    curves = {name: Curve() for name in models}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        for name, (model, _) in models.items()
    }
    names = list(models)
    began = time.perf_counter()
    for step in range(schedule.steps):
        progress = schedule.progress(step, time.perf_counter() - began)
        if step > 0 and progress == 1.0:
            break
        pack = draw()
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        rate = schedule.learning_rate * warmup * 0.5 * (1.0 + math.cos(math.pi * progress))
        for name in names:
            for group in optimizers[name].param_groups:
                group["lr"] = rate
            loss, seconds = _step(*models[name], optimizers[name], pack)
            curves[name].losses.append(loss)
            curves[name].seconds.append(seconds)
        names.append(names.pop(0))
        show(schedule.progress(step + 1, time.perf_counter() - began), curves)
    return curves


def _step(
    model: Transformer, attention: Attention, optimizer: torch.optim.Optimizer, pack: Pack
) -> tuple[float, float]:
    """One optimizer step: the loss before it, and its time in seconds."""
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = mean_loss(model, pack, attention)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    value = loss.item()
    _synchronize(pack.tokens.device)
    return value, time.perf_counter() - began


def quickest_thread_count(model: Transformer, pack: Pack, attention: Attention) -> int:
    """Of all threads, a half, a quarter and so on down to one: how many do forward and backward fastest here.

    A small model gains nothing from many threads, and on cores that other programs keep busy, threads that
    wait for each other can take fifty times as long as one.
    """
    number = before = torch.get_num_threads()
    seconds: dict[int, float] = {}
    while number:
        torch.set_num_threads(number)
        for _ in range(2):  # the first one starts the threads
            began = time.perf_counter()
            mean_loss(model, pack, attention).backward()
            seconds[number] = time.perf_counter() - began
        number //= 2
    model.zero_grad()
    torch.set_num_threads(before)
    return min(seconds, key=lambda n: seconds[n])


@torch.no_grad()
def held_out_loss(model: Transformer, attention: Attention, packs: list[Pack]) -> float:
    """Mean loss in nats per byte over packs of one size."""
    return statistics.fmean(mean_loss(model, pack, attention).item() for pack in packs)


# ---- distance from float64 -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """How far one tensor is from its float64 value, over all layers of the model.

    Attributes:
        largest_value: the largest magnitude in the float64 tensor.
        difference: attention's name -> the largest difference from it.
    """

    largest_value: float
    difference: dict[str, float]


def distance_from_float64(
    model: Transformer, pack: Pack, attentions: dict[str, Attention]
) -> dict[str, Distance]:
    """Output and gradients of each attention against the float64 oracle, on what the model really computes.

    The first attention runs the model once, forward and backward, on the sum of the losses of all bytes.
    Every layer's q, k, v and gradient of the output are then given to each attention, and to the oracle.

    Returns:
        "out", "dq", "dk" and "dv" -> their distance.
    """
    recorder = Recorder(next(iter(attentions.values())))
    (mean_loss(model, pack, recorder) * pack.total).backward()
    model.zero_grad()

    largest_values = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    differences = {tensor: dict.fromkeys(attentions, 0.0) for tensor in largest_values}
    oracle = _oracle(pack)
    for q, k, v, out in recorder.calls:
        assert out.grad is not None
        truth = _results(oracle, q.double(), k.double(), v.double(), out.grad.double())
        for tensor, exact in truth.items():
            largest_values[tensor] = max(largest_values[tensor], exact.abs().max().item())
        for name, attention in attentions.items():
            for tensor, value in _results(attention(pack), q, k, v, out.grad).items():
                difference = (value.double() - truth[tensor]).abs().max().item()
                differences[tensor][name] = max(differences[tensor][name], difference)
    return {tensor: Distance(largest_values[tensor], differences[tensor]) for tensor in largest_values}


class Recorder:
    """An attention that keeps what every layer gave it and what it answered."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def __call__(self, pack: Pack) -> Attend:
        attend = self.attention(pack)

        def recorded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(q, k, v)
            out.retain_grad()
            self.calls.append((q.detach(), k.detach(), v.detach(), out))
            return out

        return recorded


def _oracle(pack: Pack) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = AttnSpec(default_scale(q.shape[-1]), window_right=0)
        return attention_reference(q, k, v, spec, pack.cu_seqlens, pack.cu_seqlens)[0]

    return attend


def _results(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one attention."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


# ---- memory --------------------------------------------------------------------------------------------


def step_memory(model: Transformer, pack: Pack, attention: Attention) -> int | None:
    """Peak bytes that forward and backward of one training step hold beyond the model; None if too many."""
    model.zero_grad()
    peak = peak_bytes(lambda: mean_loss(model, pack, attention).backward(), pack.tokens.device)
    model.zero_grad()
    return peak


def attention_memory(size: ModelSize, pack: Pack, attention: Attention, dtype: torch.dtype) -> int | None:
    """Peak bytes of attention alone, forward and backward, beyond q, k, v and dout; None if too many."""
    device = pack.tokens.device
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(pack.total, heads, size.head_dim, device=device, generator=generator).to(dtype)
        for heads in (size.num_heads, size.num_heads_k, size.num_heads_k, size.num_heads)
    )
    return peak_bytes(lambda: _results(attention(pack), q, k, v, dout), device)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """The most bytes that tensors made by ``work`` hold at a time, temporary ones inside operators included.

    On a GPU the caching allocator keeps the count; None if memory ran out. On a CPU the profiler lists every
    allocation and release.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            work()
        except torch.OutOfMemoryError:
            return None
        return torch.cuda.max_memory_allocated(device) - before

    with (
        _kineto_silenced(),
        torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    live = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _kineto_silenced() -> Iterator[None]:
    """Keeps the lines with which the profiler announces itself off the terminal.

    They come from C++, past sys.stderr, and the variable that switches them off is read too early to be set
    here.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(nowhere)
        os.close(saved)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- memory accesses -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accesses:
    """Elements that crossed the border between slow and fast memory, for one sequence length."""

    seqlen: int
    standard: int
    flash: int


def count_accesses(seqlens: list[int], head_dim: int, sram: int) -> list[Accesses]:
    """Runs standard attention and FlashAttention over growing lengths and counts what they load and store."""
    return [
        Accesses(n, *(measured_accesses(name, n, head_dim, sram) for name in ("standard", "flash1")))
        for n in seqlens
    ]
