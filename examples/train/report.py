"""The demo's results as text for a terminal and as one picture."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bench.colours import COLOURS, OURS

from .masked import DROPOUT, MaskedResults
from .measure import Accesses, Curve, Distance

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PYTORCH, MATERIALISED = "PyTorch", "materialised"
MIB = 2**20
LOSS_ROWS = 8


@dataclass(frozen=True)
class Results:
    """Everything that a run of the demo found out.

    Attributes:
        heading: what ran where, one line per item.
        planned_steps: of the training; the curves are shorter if its time was up first.
        total: bytes per pack.
        curves: name -> training with that attention.
        held_out: name -> loss in nats per byte of text that no training saw.
        distances: "out", "dq", "dk", "dv" -> distance from float64.
        masked: the masked model.
        step_memory: name -> peak bytes of a training step; None where the memory did not suffice.
        attention_memory: sequence length -> name -> the same for attention alone.
        accesses: one entry per sequence length.
        sram: elements of fast memory that the accesses were counted with; access_head_dim likewise.
        sample: generated text.
        on_gpu: whether flash_ext ran its kernels or its CPU path.
    """

    heading: list[str]
    planned_steps: int
    total: int
    curves: dict[str, Curve]
    held_out: dict[str, float]
    distances: dict[str, Distance]
    masked: MaskedResults
    step_memory: dict[str, int | None]
    attention_memory: dict[int, dict[str, int | None]]
    accesses: list[Accesses]
    sram: int
    access_head_dim: int
    sample: str
    on_gpu: bool


# ---- progress ------------------------------------------------------------------------------------------


class Progress:
    """A progress bar by rich on a terminal; a line for every tenth where there is no terminal, or no rich."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tenths = -1
        self._began = time.perf_counter()

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            try:
                from rich import progress
            except ImportError:
                return self
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
            )
            self._bar.start()
            self._bar.add_task("", total=1.0)
        return self

    def stage(self, text: str) -> None:
        """Says what is being done now."""
        if self._bar is not None:
            self._bar.update(0, description=text)
        else:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def show(self, progress: float, curves: dict[str, Curve]) -> None:
        """``progress`` is between 0 and 1."""
        step = len(next(iter(curves.values())).losses)
        losses = ", ".join(f"{name} {curve.losses[-1]:.3f}" for name, curve in curves.items())
        text = f"step {step}, loss: {losses}"
        if self._bar is not None:
            self._bar.update(0, completed=progress, description=text)
        elif int(10 * progress) > self._tenths:
            self._tenths = int(10 * progress)
            seconds = time.perf_counter() - self._began
            sys.stdout.write(f"  {progress:4.0%}  {seconds:5.1f} s  {text}\n")
            sys.stdout.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


# ---- text ----------------------------------------------------------------------------------------------


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in cells
    ]
    rule = "-" * len(lines[0])
    return "\n".join([title, rule, lines[0], rule, *lines[1:], rule])


def as_text(results: Results) -> str:
    """The whole report."""
    parts = [
        loss_table(results.curves),
        distance_table(
            results.distances, "Largest difference from float64, over all layers of the trained model"
        ),
        masked_part(results.masked),
        attention_memory_table(results.attention_memory),
        accesses_table(results),
        f"Generated through {OURS}, from the prompt 'def '\n{_indented(results.sample)}",
        summary_table(results),
        "\n".join(remarks(results)),
    ]
    return "\n\n".join(parts)


def loss_table(curves: dict[str, Curve]) -> str:
    """Both curves as means over stretches of steps, and how far apart they ever are."""
    names = list(curves)
    steps = len(curves[names[0]].losses)
    length = max(1, -(-steps // LOSS_ROWS))
    rows = []
    for start in range(0, steps, length):
        parts = [curves[name].losses[start : start + length] for name in names]
        means = [f"{statistics.fmean(part):.4f}" for part in parts]
        rows.append([f"{start + 1} to {start + len(parts[0])}", *means, f"{_apart(parts):.1e}"])
    title = "Loss in nats per byte, mean over steps; the same seed and the same packs for both"
    return table(title, ["steps", *names, "largest gap in one step"], rows)


def _apart(losses: Sequence[Sequence[float]]) -> float:
    """The largest gap between curves in any step."""
    return max((max(values) - min(values) for values in zip(*losses)), default=0.0)


def distance_table(distances: dict[str, Distance], title: str) -> str:
    names = list(next(iter(distances.values())).difference)
    rows = [
        [tensor, f"{d.largest_value:.3g}", *(f"{d.difference[name]:.2e}" for name in names)]
        for tensor, d in distances.items()
    ]
    return table(title, ["tensor", "largest value", *names], rows)


def masked_part(masked: MaskedResults) -> str:
    """What was asked for, how it trained, and how far it is from float64."""
    curve = masked.curve
    steps = f"{len(curve.losses)} of {masked.planned_steps}"
    title = (
        f"Masked model: documents apart in one sequence, causal, ALiBi, dropout {DROPOUT}\n"
        f"{steps} steps of {curve.median_seconds * 1e3:.1f} ms, loss {curve.losses[0]:.4f} to "
        f"{last_loss(curve):.4f}, held-out files without dropout {masked.held_out:.4f}\n"
        "Largest difference from float64, dropping the same weights"
    )
    return distance_table(masked.distances, title)


def attention_memory_table(memory: dict[int, dict[str, int | None]]) -> str:
    names = list(next(iter(memory.values())))
    rows = [[str(n), *(mib(of_length[name]) for name in names)] for n, of_length in memory.items()]
    title = "Peak memory of attention alone in MiB, forward and backward, one document of N bytes"
    return table(title, ["N", *names], rows)


def accesses_table(results: Results) -> str:
    """The counts, and what theorem 2 says they are in proportion to."""
    d, sram = results.access_head_dim, results.sram
    rows = []
    for counted in results.accesses:
        n = counted.seqlen
        rows.append([
            str(n),
            f"{counted.standard:,}",
            f"{counted.flash:,}",
            f"{counted.standard / counted.flash:.2f}",
            f"{counted.standard / (n * d + n * n):.2f}",
            f"{counted.flash / (n * n * d * d / sram):.2f}",
        ])  # fmt: skip
    title = (
        f"HBM accesses of one head, counted element by element; d = {d}, fast memory M = {sram:,} elements\n"
        "Theorem 2: standard Theta(N d + N^2), FlashAttention Theta(N^2 d^2 / M), so the last columns settle"
    )
    columns = ["N", "standard", "FlashAttention", "ratio", "standard/(Nd+N^2)", "Flash/(N^2 d^2/M)"]
    return table(title, columns, rows)


def summary_table(results: Results) -> str:
    names = list(results.step_memory)
    longest = max(results.attention_memory)

    def row(label: str, cell: Callable[[str], str]) -> list[str]:
        return [label, *(cell(name) for name in names)]

    def trained(cell: Callable[[str], str]) -> Callable[[str], str]:
        return lambda name: cell(name) if name in results.curves else "-"

    rows = [
        row("loss, mean of the last tenth", trained(lambda n: f"{last_loss(results.curves[n]):.4f}")),
        row("loss, held-out files", trained(lambda n: f"{results.held_out[n]:.4f}")),
        row("time per training step, ms", trained(lambda n: f"{results.curves[n].median_seconds * 1e3:.1f}")),
        row("peak memory of a step, MiB", lambda n: mib(results.step_memory[n])),
        row(f"of attention alone, N = {longest}, MiB", lambda n: mib(results.attention_memory[longest][n])),
    ]
    for tensor, distance in results.distances.items():
        cells = [f"{distance.difference[n]:.1e}" if n in distance.difference else "-" for n in names]
        rows.append([f"largest difference of {tensor} from float64", *cells])
    return table("Summary", ["", *names], rows)


def last_loss(curve: Curve) -> float:
    """Mean over the last tenth of the steps."""
    return statistics.fmean(curve.losses[-max(1, len(curve.losses) // 10) :])


def remarks(results: Results) -> list[str]:
    """How to read the numbers, as sentences that fit what was measured."""
    ratio = results.curves[PYTORCH].median_seconds / results.curves[OURS].median_seconds
    speed = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times as slow"
    lines = [f"A training step with {OURS} is {speed} as one with PyTorch's attention, everything included."]
    if results.on_gpu:
        lines.append(
            f"{OURS} skips what the documents do not need; PyTorch's attention gets a {results.total} x "
            f"{results.total} mask\nand works on what it hides as well."
        )
    else:
        lines.append(
            f"On a CPU {OURS} is tiles of torch matrix products, meant to be right rather than quick.\n"
            f"PyTorch's attention is compiled, but gets a {results.total} x {results.total} mask and works "
            "on what it hides as well."
        )
    done = len(results.curves[OURS].losses)
    if done < results.planned_steps:
        lines.append(f"Training ended after {done} of {results.planned_steps} steps because its time was up.")
    return lines


def mib(size: int | None) -> str:
    """Bytes in MiB; None is memory that did not suffice."""
    return "out of memory" if size is None else f"{size / MIB:.1f}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


# ---- picture -------------------------------------------------------------------------------------------


def draw(results: Results, path: Path) -> Path | None:
    """Writes the picture as PNG and returns its path; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(20, 9), layout="constrained")
    axes = figure.subplots(2, 4)
    _draw_losses(axes[0, 0], results)
    _draw_times(axes[0, 1], results)
    _draw_distances(axes[0, 2], results.distances, "Largest difference from float64")
    _draw_weights(axes[0, 3], results.masked)
    _draw_memory(axes[1, 0], results)
    _draw_accesses(axes[1, 1], results)
    _draw_distances(
        axes[1, 2],
        {tensor: in_units_of_largest(d) for tensor, d in results.masked.distances.items()},
        "Masked model: difference from float64 / largest value",
    )
    _draw_sample(axes[1, 3], results)
    figure.suptitle("\n".join(results.heading), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
    return path


def _draw_losses(axis: Axes, results: Results) -> None:
    curves = results.curves
    axis.plot(curves[PYTORCH].losses, color=COLOURS[PYTORCH], linewidth=4, alpha=0.6, label=PYTORCH)
    axis.plot(curves[OURS].losses, color=COLOURS[OURS], linewidth=1, label=OURS)
    gap = _apart([curve.losses for curve in curves.values()])
    axis.set(title=f"Loss (largest gap in one step: {gap:.1e})", xlabel="step", ylabel="nats per byte")
    axis.legend()
    axis.grid(alpha=0.3)


def _draw_times(axis: Axes, results: Results) -> None:
    """Median step, with the quartiles as whiskers."""
    for place, (name, curve) in enumerate(results.curves.items()):
        milliseconds = sorted(1e3 * s for s in curve.settled_seconds)
        quarter = len(milliseconds) // 4
        low, median, high = milliseconds[quarter], 1e3 * curve.median_seconds, milliseconds[-1 - quarter]
        spread = [[median - low], [high - median]]
        axis.bar(place, median, 0.6, color=COLOURS[name], yerr=spread, capsize=6)
        axis.text(place, median / 2, f"{median:.1f} ms", ha="center", color="white", fontweight="bold")
    axis.set_xticks(range(len(results.curves)), list(results.curves))
    axis.set(title="Time per training step (median, quartiles)", ylabel="ms")


def _draw_distances(axis: Axes, distances: dict[str, Distance], title: str) -> None:
    tensors = list(distances)
    names = list(next(iter(distances.values())).difference)
    for index, name in enumerate(names):
        places = [i + 0.4 * (index - (len(names) - 1) / 2) for i in range(len(tensors))]
        heights = [distances[tensor].difference[name] for tensor in tensors]
        axis.bar(places, heights, 0.36, color=COLOURS[name], label=name)
    axis.set_xticks(range(len(tensors)), tensors)
    axis.set(title=title)
    axis.ticklabel_format(axis="y", scilimits=(0, 0))
    axis.legend()
    axis.grid(axis="y", alpha=0.3)


def in_units_of_largest(distance: Distance) -> Distance:
    """For tensors of different sizes side by side."""
    largest = distance.largest_value
    return Distance(1.0, {name: value / largest for name, value in distance.difference.items()})


def _draw_weights(axis: Axes, masked: MaskedResults) -> None:
    """Fourth roots, since a weight of 1 beside many small ones would be all there is to see."""
    axis.imshow((masked.weights**0.25).tolist(), cmap="Blues", interpolation="nearest")
    axis.set(
        title=f"Masked model: weights of one head\n(documents, causal, ALiBi, dropout {DROPOUT})",
        xlabel="key",
        ylabel="query",
    )


def _draw_memory(axis: Axes, results: Results) -> None:
    for name in results.step_memory:
        points = [(n, of_length[name]) for n, of_length in results.attention_memory.items()]
        known = [(n, size / MIB) for n, size in points if size is not None]
        axis.plot(*zip(*known), color=COLOURS[name], marker="o", label=name)
    _log_lengths(axis, list(results.attention_memory))
    axis.set(title="Peak memory of attention, forward and backward", ylabel="MiB")
    axis.legend()


def _draw_accesses(axis: Axes, results: Results) -> None:
    seqlens = [counted.seqlen for counted in results.accesses]
    axis.plot(
        seqlens,
        [c.standard for c in results.accesses],
        color=COLOURS[MATERIALISED],
        marker="o",
        label="standard attention",
    )
    axis.plot(
        seqlens, [c.flash for c in results.accesses], color=COLOURS[OURS], marker="o", label="FlashAttention"
    )
    _log_lengths(axis, seqlens)
    axis.set(
        title=f"HBM accesses counted (d = {results.access_head_dim}, M = {results.sram:,})",
        ylabel="elements read and written",
    )
    axis.legend()


def _log_lengths(axis: Axes, seqlens: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(seqlens, [str(n) for n in seqlens])
    axis.minorticks_off()
    axis.set_xlabel("sequence length N")
    axis.grid(alpha=0.3)


def _draw_sample(axis: Axes, results: Results) -> None:
    axis.set_axis_off()
    axis.set_title("Generated text")
    lines = [
        line[start : start + 64]
        for line in results.sample.splitlines()
        for start in range(0, max(1, len(line)), 64)
    ]
    # A dollar sign would start a formula.
    text = "\n".join(lines[:22]).replace("$", r"\$")
    axis.text(0, 0.97, text, family="monospace", fontsize=8, va="top", transform=axis.transAxes)
