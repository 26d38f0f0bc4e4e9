"""``python -m bench.training``: whole training steps of GPT-2 and Llama with flash_ext and with its peers.

Plain PyTorch models with the attention swapped, over sequence lengths at a constant number of tokens a step.
Writes JSON, a table and a plot, and answers three questions: how much faster a step is, whether memory grows
linearly with the length, and which share of the device whole steps use.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine, timing
from bench.runner import DTYPES
from bench.training_entrants import DEFAULT_NAMES, NAMES, check_names
from bench.training_record import (
    MODELS,
    SMOKE_MODELS,
    ModelShape,
    TrainingResults,
    TrainingRow,
    multiplying_params,
)
from bench.training_report import answers, describe, write_all, write_json
from bench.training_runner import Setup, run

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
FORMULA = "(6 N + 6 layers * heads * head_dim * seqlen) * tokens: causal attention as half, nothing twice"
# Dense bf16 TFLOP/s that a device is sold with, by its name in torch.
DATASHEET_TFLOPS = {
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
}


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line, with the defaults that depend on the device and on ``--smoke`` filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", default=None, help=f"comma list; default {','.join(MODELS)}")
    add("--lengths", default=None, help=f"comma list; default {','.join(map(str, LENGTHS))}")
    add(
        "--entrants",
        default=",".join(DEFAULT_NAMES),
        help=f"comma list of {', '.join(NAMES)}, or flash_ext-PATH; default %(default)s",
    )
    add("--tokens", type=int, default=None, help="tokens a step, at least one sequence; default 32768")
    add("--rounds", type=int, default=3, help="interleaved rounds per model and length")
    add("--budget", type=float, default=None, help="seconds of timed steps per row, all columns; default 6")
    add("--first-steps", type=int, default=3, help="steps whose losses are kept, before any is timed")
    add("--learning-rate", type=float, default=1e-4)
    add(
        "--checkpointing", action="store_true", help="blocks are run again in the backward, for every entrant"
    )
    add("--time-limit", type=float, default=float("inf"), help="start nothing after so many seconds")
    add("--smoke", action="store_true", help="tiny models, to try the program itself in seconds")
    machine.add_device_option(parser)
    add("--dtype", choices=DTYPES, default=None, help="default bf16 (GPU), fp32 (CPU)")
    add("--seed", type=int, default=0, help="of weights and tokens")
    add("--commit", default=None, help="commit to record where there is no git to ask")
    add("--out", type=Path, default=Path("out/training"), help="folder for the results")
    options = parser.parse_args(argv)
    options.device = machine.device_asked_for(options, parser, "--smoke")
    if options.dtype is None:
        options.dtype = "bf16" if options.device == "cuda" else "fp32"
    known, lengths, tokens = (SMOKE_MODELS, (16, 64), 128) if options.smoke else (MODELS, LENGTHS, 32768)
    if options.budget is None:
        options.budget = 0.0 if options.smoke else 6.0
    options.models = _words(options.models or ",".join(known))
    options.lengths = [int(word) for word in _words(options.lengths or ",".join(map(str, lengths)))]
    options.tokens = options.tokens or tokens
    options.entrants = _words(options.entrants)
    unknown = [name for name in options.models if name not in known]
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; known: {', '.join(known)}")
    if not options.entrants or not options.lengths or min(options.lengths) < 1:
        parser.error("there must be an entrant and a length, and lengths are positive")
    if options.rounds < 1 or options.first_steps < 3:
        parser.error("--rounds must be at least 1, --first-steps at least 3")
    try:
        check_names(options.entrants)
    except ValueError as error:
        parser.error(str(error))
    options.shapes = [known[name] for name in options.models]
    return options


def prepare(options: argparse.Namespace) -> Setup:
    """Chooses the device, and measures its ceiling."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    timer, dtype = timing.make_timer(device), DTYPES[options.dtype]
    ceilings = {"matmul_tflops": timing.matmul_tflops(timer, device, dtype)}
    timer.release()
    return Setup(
        entrants=options.entrants,
        timer=timer,
        device=device,
        dtype=dtype,
        dtype_name=options.dtype,
        ceilings=ceilings,
        tokens=options.tokens,
        rounds=options.rounds,
        budget_s=options.budget,
        first_steps=options.first_steps,
        learning_rate=options.learning_rate,
        seed=options.seed,
        checkpointing=options.checkpointing,
        time_limit_s=options.time_limit,
    )


def describe_run(options: argparse.Namespace, setup: Setup) -> dict:
    """Metadata: the machine, and everything that two runs must share to be compared."""
    facts = machine.collect(setup.device, options.commit)
    sold = DATASHEET_TFLOPS.get(facts["device"])
    return (
        facts
        | ({"datasheet_tflops": sold} if sold else {})
        | {
            "models": {shape.name: _describe_model(shape) for shape in options.shapes},
            "flops_of_a_step": FORMULA,
            "tokens": options.tokens,
            "optimiser": f"AdamW, fused, learning rate {options.learning_rate}, moments of {options.dtype}",
            "dtype": options.dtype,
            "checkpointing": options.checkpointing,
            "rounds": options.rounds,
            "budget_s": options.budget,
            "seed": options.seed,
        }
    )


def _describe_model(shape: ModelShape) -> dict:
    return asdict(shape) | {"multiplying_params": multiplying_params(shape)}


def run_with_progress(
    results: TrainingResults, options: argparse.Namespace, setup: Setup, console: Console
) -> None:
    """:func:`bench.training_runner.run` with a progress bar, a line per row, and what is done on disk."""
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    places = [f"{shape.name} at {seqlen}" for shape in options.shapes for seqlen in options.lengths]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(places))

        def on_entry(text: str) -> None:
            place = places[min(len(results.rows), len(places) - 1)]
            progress.update(task, description=f"{place}, {text}")

        def on_row(row: TrainingRow) -> None:
            write_json(results, options.out / "training.json")
            cells = "; ".join(f"{entry.name} {describe(entry)}" for entry in row.entries)
            progress.print(f"{row.model} at {row.seqlen}: {cells}", highlight=False, markup=False)
            for entry in row.entries:
                if entry.status == "error":
                    progress.print(f"     {entry.name}: {entry.text[:300]}", highlight=False, markup=False)
            progress.advance(task)

        on_gpu = setup.device.type == "cuda"
        with setup.clocks if on_gpu else contextlib.nullcontext():
            run(results, options.shapes, options.lengths, setup, on_row, on_entry)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 0 once the files are written, whatever the entrants did."""
    options = parse(argv)
    console = Console(soft_wrap=True)
    started = time.monotonic()
    setup = prepare(options)
    setup.time_limit_s -= time.monotonic() - started
    results = TrainingResults(describe_run(options, setup), setup.ceilings)
    options.out.mkdir(parents=True, exist_ok=True)
    run_with_progress(results, options, setup, console)
    metadata = results.metadata
    if "stopped" in metadata:
        console.print(f"stopped early: {metadata['stopped']}", highlight=False, markup=False)
    if setup.device.type == "cuda":
        metadata |= machine.gpu_state(machine.CHANGING_STATE, "_after")
    metadata["seconds"] = round(time.monotonic() - started, 1)
    for path in write_all(results, options.out):
        console.print(str(path), highlight=False)
    for line in answers(results):
        console.print(line, highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
