"""Plots of a run: one PNG per direction, by matplotlib if it is there."""

from __future__ import annotations

from pathlib import Path

from bench.colours import COLOURS, label_of
from bench.feature_report import aim_of, feature_paths, feature_rows
from bench.record import (
    DIRECTION_FILES,
    Results,
    Row,
    column_names,
    feature_pair,
    our_columns,
    speed_of_plain,
)
from bench.shapes import DIRECTIONS


def plot(results: Results, folder: Path) -> list[Path]:
    """Draws one PNG per direction: TFLOP/s over sequence length, a panel per head_dim and mask.

    Cases that are alone in their panel have no curve to draw; they share one bar chart per direction. Feature
    rows share one picture of speeds over the plain kernel's.

    Returns:
        The files written; none without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    written = []
    for direction in DIRECTIONS:
        panels: dict[tuple, list[Row]] = {}
        for row in results.rows:
            ran = any(entry.status == "ok" for entry in row.entries)
            special = row.case.feature or row.case.model
            if row.direction == direction and ran and not special:
                panels.setdefault(row.case.panel, []).append(row)
        curves = [sorted(rows, key=lambda r: r.case.seqlen_q) for rows in panels.values() if len(rows) > 1]
        single = [rows[0] for rows in panels.values() if len(rows) == 1]
        if curves:
            written.append(_plot_curves(results, curves, folder / f"{DIRECTION_FILES[direction]}.png"))
        if single:
            written.append(_plot_bars(results, single, folder / f"{DIRECTION_FILES[direction]}-cases.png"))
    if any(entry.of_plain for row in feature_rows(results) for entry in row.entries):
        written.append(_plot_features(results, folder / "features.png"))
    return written


def _plot_curves(results: Results, panels: list[list[Row]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    masks = list(dict.fromkeys(rows[0].case.mask_label for rows in panels))
    columns = max(sum(rows[0].case.mask_label == mask for rows in panels) for mask in masks)
    figure, axes = plt.subplots(
        len(masks),
        columns,
        figsize=(4.6 * columns, 3.6 * len(masks)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for line, mask in enumerate(masks):
        for axis, rows in zip(axes[line], [p for p in panels if p[0].case.mask_label == mask], strict=False):
            axis.set_visible(True)
            _plot_panel(axis, rows, results.ceilings.get("matmul_tflops"), our_columns(results)[:1])
        axes[line][0].set_ylabel("TFLOP/s")
    axes[0][0].set_ylim(bottom=0)  # of all; once it is set, what is drawn later no longer widens it
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(8, len(handles)))
    return _save(figure, results, panels[0][0], path)


def _drawn(rows: list[Row]) -> list[str]:
    """Columns of a picture; ``-raw`` ones lie on those of autograd."""
    return [name for name in column_names(rows) if not name.endswith("-raw")]


def _plot_panel(axis, rows: list[Row], ceiling: float | None, default: list[str]) -> None:
    lengths = [row.case.seqlen_q for row in rows]
    for name in _drawn(rows):
        done = [
            (row.case.seqlen_q, row.flops, row.entry(name))
            for row in rows
            if row.entry(name) is not None and row.entry(name).status == "ok"
        ]
        if not done:
            continue
        rate = [entry.tflops for _, _, entry in done]
        slow = [entry.tflops - work / entry.q3_ms * 1e-9 for _, work, entry in done]
        fast = [work / entry.q1_ms * 1e-9 - entry.tflops for _, work, entry in done]
        ours = done[0][2].ours
        axis.errorbar(
            [s for s, _, _ in done],
            rate,
            yerr=[slow, fast],
            label=label_of(name, *default),
            color=COLOURS.get(label_of(name, *default)),
            marker="o" if ours else "s",
            markersize=4,
            linewidth=2.2 if ours else 1.2,
            capsize=2,
            linestyle=":" if name.endswith("-det") else "-",
        )
    if ceiling:
        axis.axhline(ceiling, color="#BBBBBB", linewidth=1, linestyle=":", label="matrix product")
    case = rows[0].case
    sizes = f"{case.head_dim}" if case.head_dim == case.head_dim_v else f"{case.head_dim}/{case.head_dim_v}"
    axis.set_title(f"head_dim {sizes}, {case.mask_label}")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlabel("sequence length")
    axis.grid(alpha=0.3)


def _plot_bars(results: Results, rows: list[Row], path: Path) -> Path:
    import matplotlib.pyplot as plt

    names, default = _drawn(rows), our_columns(results)[:1]
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.14 * len(rows) * (len(names) + 1)), layout="constrained")
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        done = [
            (place, row.entry(name))
            for place, row in enumerate(rows)
            if row.entry(name) is not None and row.entry(name).status == "ok"
        ]
        axis.barh(
            [place + index * height for place, _ in done],
            [entry.tflops for _, entry in done],
            height,
            label=label_of(name, *default),
            color=COLOURS.get(label_of(name, *default)),
        )
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))], [row.case.name for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("TFLOP/s")
    axis.grid(axis="x", alpha=0.3)
    axis.legend()
    return _save(figure, results, rows[0], path)


def _plot_features(results: Results, path: Path) -> Path:
    """A panel per path and direction: by feature, speed on the tiles visited over the plain kernel's."""
    import matplotlib.pyplot as plt

    directions = [d for d in ("fwd", "bwd") if feature_rows(results, d)]
    paths, peers = feature_paths(results), column_names(feature_rows(results), ours=False)
    features = list(dict.fromkeys(row.case.feature for row in feature_rows(results)))
    size = (6.5 * len(directions), 1.5 + 0.1 * len(paths) * len(features) * (len(peers) + 2))
    figure, axes = plt.subplots(
        len(paths), len(directions), figsize=size, squeeze=False, sharey=True, sharex="col",
        layout="constrained",
    )  # fmt: skip
    for name, line in zip(paths, axes, strict=True):
        for axis, direction in zip(line, directions, strict=True):
            rows = feature_rows(results, direction)
            _plot_feature_panel(axis, rows, features, name, peers, label_of(name, paths[0]))
            axis.set_title(DIRECTION_FILES[direction] + (f", {name}" if len(paths) > 1 else ""))
    axes[0][0].invert_yaxis()
    handles = {
        label: handle
        for axis in axes[:, 0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(8, len(handles)))
    return _save(figure, results, feature_rows(results)[0], path, "features")


def _plot_feature_panel(
    axis, rows: list[Row], features: list[str], path: str, peers: list[str], label: str
) -> None:
    """Bars of one path and of the peers, each peer credited with the tiles that the path visits."""
    height = 0.8 / (1 + len(peers))
    for index, name in enumerate([path, *peers]):
        places, ratios = [], []
        for row in rows:
            entry = row.entry(name)
            ratio = None if entry is None else speed_of_plain(entry, *feature_pair(row, path))
            if ratio is not None:
                places.append(features.index(row.case.feature) + index * height)
                ratios.append(ratio)
        shown = label if name == path else label_of(name)
        axis.barh(places, ratios, height, label=shown, color=COLOURS.get(shown))
    axis.axvline(1.0, color="#000000", linewidth=1)
    for row in rows:
        top = features.index(row.case.feature) - height / 2
        axis.vlines(aim_of(row), top, top + 0.8, color="#000000", linewidth=2, linestyle=":")
    axis.set_xlabel("speed on visited tiles over the plain kernel's")
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(features))], features)
    axis.margins(y=0.01)
    axis.grid(axis="x", alpha=0.3)


def _save(figure, results: Results, row: Row, path: Path, title: str = "") -> Path:
    import matplotlib.pyplot as plt

    about = results.metadata
    figure.suptitle(
        f"{title or DIRECTION_FILES[row.direction]}, {row.dtype}, {about.get('device', 'unknown device')}, "
        f"torch {about.get('torch', '?')}, {about.get('date', '')}",
        fontsize=11,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
