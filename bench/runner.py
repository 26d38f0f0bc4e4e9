"""Fills rows: prepares every entrant on a case, times them together, and turns what fails into text."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from bench import check, machine, timing
from bench.entrants import Entrant
from bench.inputs import DTYPES, Inputs
from bench.record import Entry, Results, Row, fill_ratios
from bench.shapes import Case, flops, output_bytes, traffic_bytes


class DeviceLost(RuntimeError):
    """The device no longer answers, so no later row can be timed."""


@dataclass
class Setup:
    """What all rows of a run share.

    Attributes:
        entrants: the columns, ours first.
        ceilings: ``matmul_tflops`` and ``copy_gbps`` of this run, which shares are taken of.
        rounds: interleaved rounds per row.
        budget_s: seconds of launches per row, all columns together.
        seed: of the random inputs.
        time_limit_s: no row starts later than this.
        clocks: follows the clock beside the run.
    """

    entrants: list[Entrant]
    timer: timing.Timer
    device: torch.device
    dtype: torch.dtype
    ceilings: dict[str, float]
    rounds: int
    budget_s: float
    seed: int = 0
    time_limit_s: float = float("inf")
    clocks: machine.ClockLog = field(default_factory=machine.ClockLog)


def time_row(case: Case, direction: str, inputs: Inputs, setup: Setup) -> Row:
    """Times one case in one direction; whatever an entrant throws becomes the text of its entry.

    In rows of the set ``models`` a wrong result is thrown as well, before it is timed.

    Raises:
        DeviceLost: a failure left the device unusable.
    """
    timer, itemsize = setup.timer, inputs.q.element_size()
    row = _empty_row(case, direction, inputs)
    calls: dict[str, timing.Call] = {}
    work: dict[str, float] = {}
    right = check.slices(inputs) if case.model else None
    for entrant in setup.entrants:
        if direction not in entrant.directions or not entrant.takes(case):
            continue
        entry = Entry(entrant.name, ours=entrant.ours)
        row.entries.append(entry)
        reason = entrant.why_not(case, direction)
        if reason:
            entry.status, entry.text = "refused", reason
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call = entrant.prepare(inputs, direction)
                call() if right is None else check.demand(entrant, inputs, direction, call, right)
                timer.synchronize()
                entry.peak_bytes = timer.peak_bytes(call)
                _count_tiles(entry, entrant, inputs, direction, call)
            except Exception as error:  # noqa: BLE001 - a peer's failure is a result
                _record_failure(entry, error, timer, caught)
                continue
        if entry.peak_bytes is not None:
            outputs = output_bytes(case, direction, itemsize) + _learned_bytes(inputs, direction)
            entry.extra_bytes = entry.peak_bytes - outputs
        calls[entry.name], work[entry.name] = call, entrant.flops(row)
    samples, failures = timing.measure(calls, timer, setup.rounds, setup.budget_s)
    for name, error in failures.items():
        _record_failure(row.entry(name), error, timer)
    for name, taken in samples.items():
        _fill(row.entry(name), taken, work[name], row.traffic_bytes, setup.ceilings)
    fill_ratios(row)
    return row


def _empty_row(case: Case, direction: str, inputs: Inputs) -> Row:
    """The row's arithmetic and traffic; pairs of a mask are counted, and what is asked for moves as well."""
    traffic = traffic_bytes(case, direction, inputs.q.element_size())
    passes = 2 if direction == "both" else 1
    traffic += passes * inputs.asked.option_bytes + _learned_bytes(inputs, direction)
    work = flops(case, direction, inputs.pairs)
    return Row(case, direction, _dtype_name(inputs.dtype), work, traffic, pairs=inputs.pairs)


def _learned_bytes(inputs: Inputs, direction: str) -> int:
    return 0 if direction == "fwd" else inputs.asked.learned_bytes


def _count_tiles(entry: Entry, entrant: Entrant, inputs: Inputs, direction: str, call: timing.Call) -> None:
    """Notes the tiles that a call visits, where the entrant knows its own. "both" has two kinds of them."""
    tile = None if direction == "both" else entrant.tile(inputs, call)
    if tile is not None:
        work = entrant.work(inputs, tile)
        entry.tile, entry.tiles, entry.tile_scores = tile, work.tiles, work.tile_scores


def _record_failure(entry: Entry, error: Exception, timer: timing.Timer, caught: Iterable = ()) -> None:
    """Keeps the error and the warnings that explain it; makes sure that the device still works for others."""
    reasons = list(dict.fromkeys(str(warning.message).strip() for warning in caught))
    entry.status = "error"
    entry.text = "; ".join([f"{type(error).__name__}: {error}", *reasons[:4]])[:2000]
    entry.peak_bytes = entry.extra_bytes = None
    timer.release()
    try:
        timer.synchronize()
    except RuntimeError as lost:
        raise DeviceLost(f"after {entry.name}: {entry.text}") from lost


def _fill(
    entry: Entry, samples: timing.Samples, work: float, traffic: int, ceilings: dict[str, float]
) -> None:
    """Quartiles, and the rates of so many operations and bytes."""
    entry.q1_ms, entry.median_ms, entry.q3_ms = samples.quartiles()
    entry.round_medians_ms = samples.round_medians()
    entry.launches = len(samples.all)
    entry.call_us = statistics.median(samples.call_us) if samples.call_us else None
    entry.tflops = work / entry.median_ms * 1e-9
    entry.gbps = traffic / entry.median_ms * 1e-6
    entry.matmul_pct = 100.0 * entry.tflops / ceilings["matmul_tflops"]
    entry.copy_pct = 100.0 * entry.gbps / ceilings["copy_gbps"]


def planned(results: Results, cases: list[Case], directions: list[str]) -> list[tuple[Case, str]]:
    """The rows that a run of these cases has and ``results`` does not."""
    done = {(row.case.name, row.direction) for row in results.rows}
    return [
        (case, direction)
        for case in cases
        for direction in directions
        if direction in case.directions and (case.name, direction) not in done
    ]


def run(
    results: Results, cases: list[Case], directions: list[str], setup: Setup, on_row: Callable[[Row], None]
) -> None:
    """Times every case in every direction into ``results.rows``, and calls ``on_row`` after each one.

    Rows that are there are left alone. Never raises because of an entrant. What cut a run short is kept as
    ``results.metadata["stopped"]``.
    """
    deadline = time.monotonic() + setup.time_limit_s
    inputs = None
    try:
        for case, direction in planned(results, cases, directions):
            if inputs is None or inputs.case is not case:
                inputs = None  # the last ones are freed before these are made
                inputs = Inputs(case, setup.dtype, setup.device, setup.seed)
            started = time.monotonic()
            if started > deadline:
                results.metadata["stopped"] = f"time limit of {setup.time_limit_s:.0f} s"
                return
            row = time_row(case, direction, inputs, setup)
            row.clocks = setup.clocks.between(started, time.monotonic())
            results.rows.append(row)
            on_row(row)
    except KeyboardInterrupt:
        results.metadata["stopped"] = "interrupted"
    except (DeviceLost, torch.OutOfMemoryError) as error:
        results.metadata["stopped"] = str(error)


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)
