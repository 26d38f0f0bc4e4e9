"""Tables and bars of the set ``features``: every modifier beside the plain kernel and the peers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from bench.record import PLAIN_SUFFIX, Entry, Results, Row, column_names, feature_pair, speed_of_plain
from bench.shapes import DIRECTIONS, PACKED_SUFFIX

# What share of the plain kernel's speed on visited tiles a feature aims at, forward and backward, by
# head_dim. docs/limits.md says what misses its aim, and why.
AIMS: dict[int, dict[str, tuple[float, float]]] = {
    64: {
        "key-padding": (0.92, 0.90),
        "bool-mask": (0.72, 0.78),
        "bias": (0.70, 0.78),
        "alibi": (0.85, 0.88),
        "softcap": (0.70, 0.82),
        "sinks": (0.97, 0.98),
        "dropout": (0.60, 0.72),
    },
    128: {
        "bool-mask": (0.82, 0.85),
        "bias": (0.82, 0.92),
        "bias-fp32": (0.55, 0.60),
        "softcap": (0.82, 0.86),
        "dropout": (0.72, 0.82),
        "blocks-128-quarter": (0.85, 0.85),
    },
}
MIN_OF_PLAIN = 0.8  # of other features and head sizes, and of the deterministic backward
MIN_OF_PLAIN_WITH_GRADIENT = 0.5  # of backwards among these that sum a gradient over all scores
_WITH_GRADIENT = ("bias-grad", "bias-batch-grad", "alibi-grad", "relative-position-grad")
MAX_TIME_PER_TILE = 1.15  # of sparse block maps, over that of the full one
MIN_OF_PACKED = 0.95  # documents by ids, over the same ones as packed sequences
RIVAL = "mem"  # the peer that each feature is to beat
_FULL_BLOCKS = "blocks-128-all"


def feature_rows(results: Results, direction: str | None = None) -> list[Row]:
    """The rows of the set, all or of one direction, in the order they ran."""
    return [r for r in results.rows if r.case.feature and direction in (None, r.direction)]


def aim_of(row: Row) -> float:
    """The share of the plain speed that the feature of a row aims at."""
    is_backward, feature = row.direction == "bwd", row.case.feature
    aims = AIMS.get(row.case.head_dim, {}).get(feature)
    if aims is not None and not (is_backward and row.case.deterministic):
        return aims[is_backward]
    return MIN_OF_PLAIN_WITH_GRADIENT if is_backward and feature in _WITH_GRADIENT else MIN_OF_PLAIN


def feature_paths(results: Results) -> list[str]:
    """Our columns that do what the rows ask for, in order of first appearance: one per path."""
    names = column_names(feature_rows(results), ours=True)
    return [name for name in names if not name.endswith(PLAIN_SUFFIX)]


# ---- bars ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One demand on one feature by one path: ``value`` at least or at most ``limit``; None: not measured."""

    direction: str
    path: str
    feature: str
    what: str
    value: float | None
    limit: float
    at_least: bool

    @property
    def holds(self) -> bool:
        """False also for what was not measured."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        side = "at least" if self.at_least else "at most"
        verdict = "holds" if self.holds else "does not hold"
        where = f"{self.direction} {self.path} {self.feature}"
        return f"{where}: {self.what} {value}, {side} {self.limit:g}: {verdict}"


def checks(results: Results) -> list[Check]:
    """Every demand on every feature row of a run, path by path; empty without such rows.

    The speed on visited tiles against the plain kernel, the time per visited tile of sparse block maps
    against that of the full one, documents against packed sequences, and the time against SDPA's
    memory-efficient backend where it ran. A path that did not run a row is held to it only if no other did.
    """
    found = []
    for direction in ("fwd", "bwd"):
        for path in feature_paths(results):
            rows = feature_rows(results, direction)
            whole = next((_of_plain(r, path) for r in rows if r.case.feature == _FULL_BLOCKS), None)
            for row in rows:
                found += _checks_of(row, path, whole)
                found += _check_of_documents(results, row, path)
    return found


def _check_of_documents(results: Results, row: Row, path: str) -> list[Check]:
    """Of one row whose documents another one has as packed sequences."""
    name, ours = row.case.name + PACKED_SUFFIX, row.entry(path)
    others = [r.entry(path) for r in results.rows if (r.case.name, r.direction) == (name, row.direction)]
    if not others or ours is None:
        return []
    packed, ran = others[0], ours.status == "ok"
    ratio = (
        packed.median_ms / ours.median_ms if ran and packed is not None and packed.status == "ok" else None
    )
    what = "speed over packed sequences"
    return [Check(row.direction, path, row.case.feature, what, ratio, MIN_OF_PACKED, True)]


def _checks_of(row: Row, path: str, whole: float | None) -> list[Check]:
    """Of one row; ``whole`` is the speed over plain of the full block map."""
    ours, ratio = row.entry(path), _of_plain(row, path)
    ran = ours is not None and ours.status == "ok"
    if not ran and feature_pair(row)[0] is not ours:
        return []
    direction, feature, aim = row.direction, row.case.feature, aim_of(row)
    found = [Check(direction, path, feature, "speed on visited tiles over plain", ratio, aim, True)]
    if feature.startswith("blocks-") and feature != _FULL_BLOCKS:
        per_tile = whole / ratio if whole and ratio else None
        what = f"time per visited tile over {_FULL_BLOCKS}"
        found.append(Check(direction, path, feature, what, per_tile, MAX_TIME_PER_TILE, False))
    rival = row.entry(RIVAL)
    if rival is not None and rival.status == "ok":
        faster = rival.median_ms / ours.median_ms if ran else None
        found.append(Check(direction, path, feature, f"speed over {RIVAL}", faster, 1.0, True))
    return found


def _of_plain(row: Row, path: str) -> float | None:
    ours = row.entry(path)
    return None if ours is None else ours.of_plain


# ---- tables ----------------------------------------------------------------------------------------------


def feature_tables(results: Results, headings: dict[str, str]) -> list[str]:
    """Markdown: a table per direction and path, then what is demanded and whether it holds; or nothing.

    Args:
        headings: direction to what its tables are called.
    """
    lines: list[str] = []
    for direction in DIRECTIONS:
        rows = feature_rows(results, direction)
        for path in feature_paths(results) if rows else []:
            lines += ["", f"## Features, {headings[direction]}, {path}", "", *_table(rows, path)]
    demands = checks(results)
    if demands:
        lines += ["", "## Features, what is demanded", "", f"{held_by_path(demands)}.", ""]
        lines += [f"- {check}" for check in demands]
    return lines


def held_by_path(demands: list[Check]) -> str:
    """How many hold, path by path."""
    parts = []
    for path in dict.fromkeys(check.path for check in demands):
        mine = [check for check in demands if check.path == path]
        parts.append(f"{sum(check.holds for check in mine)} of {len(mine)} by {path}")
    return "demands that hold: " + ", ".join(parts)


def _table(rows: list[Row], path: str) -> list[str]:
    peers = column_names(rows, ours=False)
    head = ["feature", "pairs", "tile", "visited tiles", "ms", "TFLOP/s on them", "plain ms", "of plain"]
    head += [f"{name} {what}" for name in peers for what in ("ms", "of plain")]
    body = [_cells(row, path, peers) for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def _cells(row: Row, path: str, peers: list[str]) -> list[str]:
    ours, plain = feature_pair(row, path)
    case = row.case
    full = case.batch * case.num_heads * case.seqlen_q * case.seqlen_k
    cells = [case.feature, "" if row.pairs is None else f"{100 * row.pairs / full:.1f} %"]
    if ours is None or ours.tile is None:
        cells += ["", ""]
    else:
        cells += ["{} x {}".format(*ours.tile), f"{100 * ours.tile_scores / full:.1f} %"]
    cells += [_ms(ours), _number(ours and ours.tile_tflops, "{:.0f}"), _ms(plain)]
    cells.append(_number(ours and ours.of_plain, "{:.2f}"))
    for name in peers:
        peer = row.entry(name)
        cells += [_ms(peer), _number(peer and speed_of_plain(peer, ours, plain), "{:.2f}")]
    return cells


def _ms(entry: Entry | None) -> str:
    if entry is None:
        return ""
    return f"{entry.median_ms:.3f} (±{entry.spread_pct / 2:.1f}%)" if entry.status == "ok" else entry.status


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
