"""Errors in fp8: what ``python -m bench.accuracy --set fp8`` records, its demands, table and picture.

Plain data, no torch, so that ``python -m bench.report`` rebuilds the picture anywhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.colours import COLOURS, label_of

KIND = "fp8-accuracy"
OURS = ("fp8", "fp8-hadamard", "mixed")
PEER = "fa3-fp8"  # which ours has to be better than
LONG = 131072
SHORTEST_JUDGED = 4096

# The largest error of a column, percent, by input.
LIMITS: dict[str, dict[str, float]] = {
    "normal": {"fp8": 5.0},
    "outliers": {"fp8": 7.0, "fp8-hadamard": 5.0},
    "peaked": {"fp8": 9.0, "mixed": 3.0},
}
LIMITS_OF_LONG: dict[str, dict[str, float]] = {
    "values-mean-1": {"fp8": 0.3},
    "values-clustered": {"fp8": 0.3},
}


@dataclass
class ErrorRow:
    """Relative errors on one kind of input.

    Attributes:
        errors: by column in percent, or in words why there is none.
    """

    inputs: str
    seqlen_q: int
    seqlen_k: int
    errors: dict[str, float | str]

    @property
    def limits(self) -> dict[str, float]:
        """The limits that hold for these lengths."""
        if self.seqlen_k < SHORTEST_JUDGED:
            return {}
        long = LIMITS_OF_LONG if self.seqlen_k >= LONG else {}
        return LIMITS.get(self.inputs, {}) | long.get(self.inputs, {})


@dataclass
class Errors:
    """A whole run."""

    metadata: dict
    rows: list[ErrorRow]

    def to_json(self) -> str:
        return json.dumps({"kind": KIND, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Errors | None:
        """Reads what :meth:`to_json` wrote; None where it is something else."""
        data = json.loads(text)
        if data.pop("kind", None) != KIND:
            return None
        return Errors(data["metadata"], [ErrorRow(**row) for row in data["rows"]])


@dataclass
class Demand:
    """One number that an error has to stay below."""

    where: str
    column: str
    error: float
    limit: float
    against: str

    @property
    def holds(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        said = "holds" if self.holds else "does not hold"
        return f"{self.where}: {self.column} {self.error:.3g} %, {self.against} {self.limit:.3g} %: {said}"


def demands(errors: Errors) -> list[Demand]:
    """Limits of rows long enough to be judged, and ``fp8`` against FlashAttention-3 in every row."""
    found = []
    for row in errors.rows:
        where = f"{row.inputs}, {row.seqlen_k} keys"
        asked = [(column, limit, "limit") for column, limit in row.limits.items()]
        asked.append(("fp8", row.errors.get(PEER), PEER))
        for column, limit, against in asked:
            error = row.errors.get(column)
            if isinstance(error, float) and isinstance(limit, float):
                found.append(Demand(where, column, error, limit, against))
    return found


def table(errors: Errors) -> list[str]:
    """Errors in percent, a line per input and length, then why cells are empty."""
    names = columns(errors)
    head = ["input", "queries", "keys", *names]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head))]
    for row in errors.rows:
        cells = [row.errors.get(name) for name in names]
        shown = [f"{cell:.3g}" if isinstance(cell, float) else "" for cell in cells]
        lines.append(f"| {' | '.join([row.inputs, str(row.seqlen_q), str(row.seqlen_k), *shown])} |")
    words = {
        f"{name}: {' '.join(cell.split())}"
        for row in errors.rows
        for name, cell in row.errors.items()
        if isinstance(cell, str)
    }
    return lines + sorted(words)


def columns(errors: Errors) -> list[str]:
    """Names of columns in order of first appearance."""
    return list(dict.fromkeys(name for row in errors.rows for name in row.errors))


def write(errors: Errors, path: Path) -> list[Path]:
    """Writes the JSON, and the picture beside it where matplotlib is there; returns the paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(errors.to_json())
    return [path, *plot(errors, path.with_suffix(".png"))]


def plot(errors: Errors, path: Path) -> list[Path]:
    """Bars of errors by input, a panel per number of keys; a black mark is the limit of a column."""
    names = [
        name for name in columns(errors) if any(isinstance(r.errors.get(name), float) for r in errors.rows)
    ]
    try:
        import matplotlib
    except ImportError:
        return []
    if not names:
        return []
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[int, list[ErrorRow]] = {}
    for row in errors.rows:
        panels.setdefault(row.seqlen_k, []).append(row)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(1.5 + 4.6 * len(panels), 1.6 + 0.16 * max(map(len, panels.values())) * (len(names) + 1)),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for axis, (seqlen_k, rows) in zip(axes[0], panels.items()):
        _plot_panel(axis, rows, names)
        axis.set_title(f"{seqlen_k} keys")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names) + 1)
    about = errors.metadata
    machine = f"{about.get('device', 'unknown device')}, torch {about.get('torch', '?')}"
    head_dim = about.get("head_dim", "?")
    title = f"error of fp8 attention, head_dim {head_dim}, {machine}, {about.get('date', '')}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return [path]


def _plot_panel(axis, rows: list[ErrorRow], names: list[str]) -> None:
    height = 0.8 / len(names)
    marks: list[tuple[float, float]] = []
    for index, name in enumerate(names):
        done = [(at, row) for at, row in enumerate(rows) if isinstance(row.errors.get(name), float)]
        label = label_of(name)
        places = [at + index * height for at, _ in done]
        axis.barh(
            places, [row.errors[name] for _, row in done], height, label=label, color=COLOURS.get(label)
        )
        marks += [(row.limits[name], at) for at, (_, row) in zip(places, done) if name in row.limits]
    limits, places = zip(*marks) if marks else ((), ())
    axis.scatter(limits, places, s=160 * height + 20, marker="|", color="#000000", label="limit", zorder=3)
    axis.set_yticks([at + 0.4 - height / 2 for at in range(len(rows))], [row.inputs for row in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(left=0.1)
    axis.set_xlabel("relative error, %")
    axis.grid(axis="x", alpha=0.3)
