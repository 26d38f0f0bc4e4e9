"""The figures of the articles, drawn from what was measured here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.colours import COLOURS, OTHER_COLOURS
from examples.ladder.rungs import RUNGS

from .claims import PARTS
from .evidence import Evidence, Row, benchmark_times, number, shape_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Rungs have the colours of the benchmark's columns where they are the same thing.
RUNG_COLOURS = {
    "standard": COLOURS["materialised"],
    "fa1": OTHER_COLOURS[0],
    "fa2-one-cta": OTHER_COLOURS[4],
    "fa2-divided": OTHER_COLOURS[5],
    "fa2-ladder": OTHER_COLOURS[6],
    "triton": COLOURS["FlashAttention-2 (Triton)"],
    "mem": COLOURS["memory-efficient (PyTorch)"],
    "fa2": COLOURS["FlashAttention-2 (PyTorch)"],
    "sm80": COLOURS["flash_ext, sm80"],
    "flash_ext": COLOURS["flash_ext"],
}


def draw(evidence: Evidence, folder: Path) -> list[Path]:
    """Writes ladder.png, and contexts.png where contexts were measured; nothing without matplotlib or
    results.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    written = []
    ladder, claims = evidence.file("ladder"), evidence.file("claims")
    folder.mkdir(parents=True, exist_ok=True)
    if ladder.rows:
        figure = Figure(figsize=(16, 9), layout="constrained")
        axes = figure.subplots(2, 3)
        for axis, head_dim in zip(axes[0], (64, 128)):
            _draw_lengths(axis, ladder.of("lengths"), head_dim)
        _draw_large(axes[0, 2], evidence)
        _draw_heads(axes[1, 0], ladder.of("heads"))
        _draw_breakdown(axes[1, 1], ladder.of("breakdown"))
        _draw_bytes(axes[1, 2], ladder.of("profile"), ladder.of("lengths"))
        handles = {
            label: handle
            for axis in (*axes[0, :2], axes[1, 0])
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
        figure.suptitle(f"The ladder on {ladder.where}", fontsize=11)
        figure.savefig(folder / "ladder.png", dpi=80)
        written.append(folder / "ladder.png")
    if claims.of("contexts"):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        _draw_contexts(figure.subplots(), claims.of("contexts"), claims.where)
        figure.savefig(folder / "contexts.png", dpi=80)
        written.append(folder / "contexts.png")
    return written


def _draw_lengths(axis: Axes, rows: list[Row], head_dim: int) -> None:
    """The figure of the FlashAttention-2 paper: forward speed over length."""
    for name, rung in RUNGS.items():
        points = [
            (shape_of(row)[2], number(row, "tflops"))
            for row in rows
            if row["name"] == name and shape_of(row)[3] == head_dim and "tflops" in row
        ]
        if points:
            axis.plot(*zip(*points), marker="o", markersize=4, color=RUNG_COLOURS[name], label=rung.label)
    axis.set(title=f"Forward, no mask, head_dim {head_dim}", xlabel="sequence length", ylabel="TFLOP/s")
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)


def _draw_large(axis: Axes, evidence: Evidence) -> None:
    """flash_ext and PyTorch's FlashAttention-2 by the benchmark, head_dim 128 and 256, without and with
    causal.
    """
    file = evidence.file("headline")
    for name, colour in (("sm90", RUNG_COLOURS["flash_ext"]), ("fa2", RUNG_COLOURS["fa2"])):
        found = benchmark_times(file, "fwd", name) if file.rows else {}
        for head_dim, marker in ((128, "o"), (256, "s")):
            for causal, style in ((False, "-"), (True, "--")):
                points = sorted(
                    (s, rate) for (d, c, s), (_, rate) in found.items() if (d, c) == (head_dim, causal)
                )
                if points:
                    who = "flash_ext" if name == "sm90" else "FlashAttention-2"
                    label = f"{who} {head_dim}{', causal' if causal else ''}"
                    axis.plot(
                        *zip(*points), linestyle=style, marker=marker, markersize=4, color=colour, label=label
                    )
    where = f"\n({file.where})" if file.rows else ""
    axis.set(title=f"Forward, head_dim 128 and 256{where}", xlabel="sequence length", ylabel="TFLOP/s")
    if file.rows:
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7, ncols=2, loc="lower right")
    axis.grid(alpha=0.3)


def _draw_heads(axis: Axes, rows: list[Row]) -> None:
    if not rows:
        return
    longest = min(shape_of(row)[2] for row in rows)
    for name, rung in RUNGS.items():
        points = [
            (shape_of(row)[1], number(row, "ms"))
            for row in rows
            if row["name"] == name and shape_of(row)[2] == longest and "ms" in row
        ]
        if points:
            axis.plot(*zip(*points), marker="o", markersize=4, color=RUNG_COLOURS[name], label=rung.label)
    axis.set(title=f"One batch entry, length {longest}", xlabel="heads", ylabel="ms", yscale="log")
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)


def _draw_breakdown(axis: Axes, rows: list[Row]) -> None:
    """The bar chart of the FlashAttention paper: parts of standard attention, flash_ext beside them."""
    ms = {str(row["name"]): number(row, "ms") for row in rows if "ms" in row}
    if not set(PARTS) <= set(ms):
        return
    bottom = 0.0
    for part, colour in zip(PARTS, OTHER_COLOURS):
        axis.bar("standard", ms[part], 0.6, bottom=bottom, color=colour)
        axis.text(0, bottom + ms[part] / 2, part, ha="center", va="center", fontsize=8)
        bottom += ms[part]
    for name in ("flash_ext", "flash_ext, no dropout"):
        axis.bar(name, ms[name], 0.6, color=RUNG_COLOURS["flash_ext"])
        axis.text(name, ms[name], f"{ms[name]:.2f}", ha="center", va="bottom", fontsize=8)
    shape = shape_of(rows[0])
    axis.set(title="Causal, dropout 0.1, forward: B{} H{} N{} d{}".format(*shape), ylabel="ms")


def _draw_bytes(axis: Axes, profiled: list[Row], timed: list[Row]) -> None:
    """Theorem 2: bytes as counted, between multiprocessors and L2, and of memory."""
    counted = {(r["name"], shape_of(r)): number(r, "counted_bytes") for r in timed if "counted_bytes" in r}
    rows = [
        r
        for r in profiled
        if (r["name"], shape_of(r)) in counted and shape_of(r)[3] == 64 and "l2_read_bytes" in r
    ]
    if not rows:
        return
    series = {
        "counted": [counted[(r["name"], shape_of(r))] for r in rows],
        "through the L2 cache": [number(r, "l2_read_bytes") + number(r, "l2_written_bytes") for r in rows],
        "of memory": [number(r, "dram_read_bytes") + number(r, "dram_written_bytes") for r in rows],
    }
    for index, (name, values) in enumerate(series.items()):
        places = [i + 0.27 * (index - 1) for i in range(len(rows))]
        axis.bar(
            places,
            [v * 1e-9 for v in values],
            0.25,
            label=name,
            color=OTHER_COLOURS[index],
        )
    axis.set_xticks(range(len(rows)), [str(r["name"]) for r in rows], fontsize=8)
    axis.set(title="Bytes moved: B{} H{} N{} d{}".format(*shape_of(rows[0])), ylabel="GB", yscale="log")
    axis.legend(fontsize=8)


def _draw_contexts(axis: Axes, rows: list[Row], where: str) -> None:
    """Training curves, each a mean over the steps before; solid for the longer context of a pair."""
    for row in rows:
        curve, window = row["curve"], row["window"]
        assert isinstance(curve, list)
        width = max(1, len(curve) // 30)
        parts = [curve[max(0, i - width) : i + 1] for i in range(len(curve))]
        is_long = str(row["name"]) == str(window)
        axis.plot(
            [sum(part) / len(part) for part in parts],
            linestyle="-" if is_long else "--",
            color=OTHER_COLOURS[0 if window == rows[0]["window"] else 5],
            label=f"context {row['name']} of {window} bytes: held out {number(row, 'held_out'):.3f}",
        )
    axis.set(
        title=f"The same bytes with a short and a long context\n({where})",
        xlabel="step",
        ylabel="nats per byte",
    )
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
