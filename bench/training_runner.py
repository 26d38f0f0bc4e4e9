"""Fills training rows: first steps of every entrant from the same weights, then timed steps side by side."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench import machine, timing
from bench.runner import DeviceLost
from bench.training_entrants import chosen_backend, is_ours, make_attend
from bench.training_models import Trainer
from bench.training_record import ModelShape, TrainingEntry, TrainingResults, TrainingRow, model_flops

MAX_STEPS_PER_ROUND = 10
OUT_OF_MEMORY_WORDS = ("out of memory", "ALLOC_FAILED")  # of libraries that do not raise torch's own error


@dataclass
class Setup:
    """What all rows of a run share.

    Attributes:
        entrants: names of the columns, ours first.
        ceilings: ``matmul_tflops`` of this run, which shares are taken of.
        tokens: of a step, as long as a sequence is no longer.
        rounds: interleaved rounds per row.
        budget_s: seconds of timed steps per row, all columns together.
        first_steps: steps whose losses are kept, at least 3.
        seed: of weights and tokens.
        time_limit_s: no row starts later than this, and a row that runs then takes no further round.
        clocks: follows the clock beside the run.
    """

    entrants: list[str]
    timer: timing.Timer
    device: torch.device
    dtype: torch.dtype
    dtype_name: str
    ceilings: dict[str, float]
    tokens: int
    rounds: int
    budget_s: float
    first_steps: int
    learning_rate: float
    seed: int = 0
    checkpointing: bool = False
    time_limit_s: float = float("inf")
    clocks: machine.ClockLog = field(default_factory=machine.ClockLog)


def run(
    results: TrainingResults,
    shapes: list[ModelShape],
    lengths: list[int],
    setup: Setup,
    on_row: Callable[[TrainingRow], None],
    on_entry: Callable[[str], None] = lambda text: None,
) -> None:
    """Runs every model at every length into ``results.rows``, and calls ``on_row`` after each one.

    Never raises because of an entrant. What cut a run short is kept as ``results.metadata["stopped"]``. Under
    a time limit each model may use an equal share of what is left when it starts.
    """
    end = time.monotonic() + setup.time_limit_s
    try:
        for index, shape in enumerate(shapes):
            now = time.monotonic()
            deadline = now + (end - now) / (len(shapes) - index)
            trainer = None  # the one before goes first
            trainer = Trainer(
                shape, max(lengths), setup.device, setup.dtype, setup.learning_rate, setup.checkpointing
            )
            for seqlen in lengths:
                started = time.monotonic()
                if started > deadline:
                    results.metadata["stopped"] = "time limit"
                    break
                row = time_row(trainer, shape, seqlen, setup, deadline, on_entry)
                row.clocks = setup.clocks.between(started, time.monotonic())
                results.rows.append(row)
                on_row(row)
    except KeyboardInterrupt:
        results.metadata["stopped"] = "interrupted"
    except (DeviceLost, torch.OutOfMemoryError) as error:
        results.metadata["stopped"] = str(error)


def time_row(
    trainer: Trainer,
    shape: ModelShape,
    seqlen: int,
    setup: Setup,
    deadline: float = float("inf"),
    on_entry: Callable[[str], None] = lambda text: None,
) -> TrainingRow:
    """One model at one length; whatever an entrant throws becomes the text of its entry.

    Raises:
        DeviceLost: a failure left the device unusable.
    """
    batch = max(1, setup.tokens // seqlen)
    row = TrainingRow(shape.name, seqlen, batch, setup.dtype_name, model_flops(shape, batch, seqlen))
    data = make_batch(shape, batch, seqlen, setup)
    steps: dict[str, timing.Call] = {}
    seconds = 0.0
    for name in setup.entrants:
        entry = TrainingEntry(name, ours=is_ours(name))
        row.entries.append(entry)
        on_entry(name)
        setup.timer.release()  # what the entrant before has cached does not fit this one
        step = _attempt(
            entry, lambda e=entry: _first_steps(e, trainer, shape, data, setup), trainer, setup.timer
        )
        if step is not None:
            steps[name], took = step
            seconds += took
    on_entry("side by side")
    fitting = int(setup.budget_s / (setup.rounds * seconds)) if seconds else 0
    count = min(max(fitting, 1), MAX_STEPS_PER_ROUND)
    samples = _timed_rounds(row, steps, count, trainer, setup, deadline)
    for entry in row.entries:
        if entry.status == "ok" and samples[entry.name].rounds:
            _fill(entry, samples[entry.name], row, setup.ceilings)
    return row


def make_batch(shape: ModelShape, batch: int, seqlen: int, setup: Setup) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them: one random stream, the same for a seed at every length."""
    generator = torch.Generator().manual_seed(setup.seed)
    stream = torch.randint(shape.vocabulary, (batch * seqlen + 1,), generator=generator).to(setup.device)
    return stream[:-1].view(batch, seqlen), stream[1:].view(batch, seqlen)


def _first_steps(
    entry: TrainingEntry, trainer: Trainer, shape: ModelShape, data: tuple[Tensor, Tensor], setup: Setup
) -> tuple[timing.Call, float]:
    """Steps from the initial weights: losses, gradients and peak memory into the entry.

    Returns:
        One further step as a call, and the seconds that the last one took.
    """
    attend, timer, losses = make_attend(entry.name), setup.timer, []
    (batch, seqlen), options = data[0].shape, {"device": setup.device, "dtype": setup.dtype}
    q = torch.empty(batch, seqlen, shape.heads, shape.head_dim, requires_grad=True, **options)
    k = torch.empty(batch, seqlen, shape.heads_k, shape.head_dim, requires_grad=True, **options)
    entry.backend = chosen_backend(entry.name, q, k, k)
    del q, k
    trainer.reset(setup.seed)

    def step() -> None:
        losses.append(trainer.step(*data, attend))

    losses.append(trainer.backward(*data, attend))
    entry.grad_norms = trainer.model.projection_grad_norms()
    trainer.finish()
    entry.step_bytes = timer.peak_bytes(step)
    if entry.step_bytes is not None:
        entry.peak_bytes = trainer.state_bytes() + entry.step_bytes
    while len(losses) < setup.first_steps:
        timer.synchronize()
        started = time.perf_counter()
        step()
        timer.synchronize()
    took = time.perf_counter() - started
    entry.losses = [loss.item() for loss in losses]
    return lambda: trainer.step(*data, attend), took


def _timed_rounds(
    row: TrainingRow,
    steps: dict[str, timing.Call],
    count: int,
    trainer: Trainer,
    setup: Setup,
    deadline: float,
) -> dict[str, timing.Samples]:
    """Rounds of ``count`` steps of every entrant; each round starts one entrant later than the one before."""
    samples = {name: timing.Samples() for name in steps}
    names = list(steps)
    for index in range(setup.rounds):
        if index and time.monotonic() > deadline:
            break
        start = index % len(names) if names else 0
        for name in names[start:] + names[:start]:
            entry = row.entry(name)
            if entry.status != "ok":
                continue
            times = _attempt(
                entry, lambda e=entry: _launch(e, steps[e.name], count, setup.timer), trainer, setup.timer
            )
            if times is not None:
                samples[name].rounds.append(times)
    return samples


def _launch(entry: TrainingEntry, step: timing.Call, count: int, timer: timing.Timer) -> list[float]:
    """Times of ``count`` steps in ms, taken once more if the allocator had to start over on the way."""
    before = _alloc_retries()
    times, _ = timer.launch(step, count)
    retries = _alloc_retries() - before
    if retries:
        entry.alloc_retries += retries
        times, _ = timer.launch(step, count)
    return times


def _alloc_retries() -> int:
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_initialized() else 0


def _attempt(entry: TrainingEntry, action: Callable, trainer: Trainer, timer: timing.Timer) -> object | None:
    """What the action returns; None once it failed, with the reason in the entry and memory given back."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = action()
            timer.synchronize()
            return result
        except Exception as error:  # noqa: BLE001 - an entrant's failure is a result
            text = f"{type(error).__name__}: {error}"
            memory = isinstance(error, torch.OutOfMemoryError) or any(w in text for w in OUT_OF_MEMORY_WORDS)
    # Out here the error is gone, and with it the frames that kept the tensors of the failed step alive.
    reasons = [] if memory else list(dict.fromkeys(str(warning.message).strip() for warning in caught))
    entry.status = "out of memory" if memory else "error"
    entry.text = "; ".join([text, *reasons[:4]])[:2000]
    entry.peak_bytes = entry.step_bytes = None
    gc.collect()
    try:
        trainer.drop_gradients()
        timer.release()
        timer.synchronize()
    except RuntimeError as lost:
        raise DeviceLost(f"after {entry.name}: {entry.text}") from lost
    return None


def _fill(
    entry: TrainingEntry, samples: timing.Samples, row: TrainingRow, ceilings: dict[str, float]
) -> None:
    """Quartiles, and the rates of a step's tokens and operations."""
    entry.q1_ms, entry.median_ms, entry.q3_ms = samples.quartiles()
    entry.round_medians_ms = samples.round_medians()
    entry.steps = len(samples.all)
    entry.tokens_per_s = row.tokens / entry.median_ms * 1e3
    entry.tflops = row.flops / entry.median_ms * 1e-9
    entry.matmul_pct = 100.0 * entry.tflops / ceilings["matmul_tflops"]
