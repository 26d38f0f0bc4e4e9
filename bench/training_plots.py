"""Plot of a training run: tokens a second and peak memory over sequence length, by matplotlib if present."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.colours import COLOURS, label_of
from bench.training_record import TrainingEntry, TrainingResults, TrainingRow

PANELS: tuple[tuple[str, Callable[[TrainingEntry], float | None]], ...] = (
    ("thousand tokens a second", lambda entry: entry.tokens_per_s and entry.tokens_per_s * 1e-3),
    ("peak memory, GiB", lambda entry: entry.peak_bytes and entry.peak_bytes / 2**30),
)


def length_label(seqlen: int) -> str:
    """16384 as 16k."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def plot_training(results: TrainingResults, path: Path) -> list[Path]:
    """Draws a column of panels per model, into one PNG.

    Returns:
        The file written; none without matplotlib, or when nothing ran.
    """
    if not any(entry.timed for row in results.rows for entry in row.entries):
        return []
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = results.models
    timed = [entry for row in results.rows for entry in row.entries if entry.timed]
    panels = [(label, value) for label, value in PANELS if any(value(entry) for entry in timed)]
    size = (5.2 * len(models), 0.8 + 3.6 * len(panels))
    figure, axes = plt.subplots(len(panels), len(models), figsize=size, squeeze=False, layout="constrained")
    for line, (label, value) in zip(axes, panels, strict=True):
        for axis, model in zip(line, models, strict=True):
            _plot_panel(axis, results.rows_of(model), results.names(), value)
            axis.set_title(model)
        line[0].set_ylabel(label)
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)))
    about = results.metadata
    figure.suptitle(
        f"training step, {results.rows[0].dtype}, {about.get('tokens', '?')} tokens a step, "
        f"{about.get('device', 'unknown device')}, torch {about.get('torch', '?')}, {about.get('date', '')}",
        fontsize=10,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return [path]


def _plot_panel(
    axis, rows: list[TrainingRow], names: list[str], value: Callable[[TrainingEntry], float | None]
) -> None:
    for name in names:
        entries = [(row.seqlen, row.entry(name)) for row in rows if row.entry(name) is not None]
        points = [(seqlen, value(entry)) for seqlen, entry in entries if entry.timed]
        points = [(seqlen, number) for seqlen, number in points if number is not None]
        if points:
            ours = any(entry.ours for _, entry in entries)
            axis.plot(
                *zip(*points, strict=True),
                label=label_of(name),
                color=COLOURS.get(label_of(name)),
                marker="o" if ours else "s",
                markersize=4,
                linewidth=2.2 if ours else 1.2,
            )
        failed = [seqlen for seqlen, entry in entries if entry.status == "out of memory"]
        if failed:
            marks = {
                "marker": "x",
                "linestyle": "none",
                "clip_on": False,
                "color": COLOURS.get(label_of(name)),
            }
            axis.plot(failed, [0.0] * len(failed), label=f"{label_of(name)}: out of memory", **marks)
    lengths = [row.seqlen for row in rows]
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [length_label(seqlen) for seqlen in lengths])
    axis.minorticks_off()
    axis.set_xlabel("sequence length")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
