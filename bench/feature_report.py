"""Tables and bars of the set ``features``: every modifier beside the plain kernel and the peers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from bench.record import Entry, Results, Row, column_names, feature_pair
from bench.shapes import DIRECTIONS

MIN_OF_PLAIN = 0.8  # within 25 % of the plain kernel's time per visited tile
MIN_OF_PLAIN_WITH_GRADIENT = 0.5  # a gradient of the scores themselves: within twice the plain backward
MAX_TIME_PER_TILE = 1.15  # of sparse block maps, over that of the full one
RIVAL = "mem"  # the peer that each feature is to beat
# The backward of these sums a gradient over all scores.
_WITH_GRADIENT = ("bias-grad", "alibi-grad")
_FULL_BLOCKS = "blocks-128-all"


def feature_rows(results: Results, direction: str | None = None) -> list[Row]:
    """The rows of the set, all or of one direction, in the order they ran."""
    return [r for r in results.rows if r.case.feature and direction in (None, r.direction)]


def our_entry(row: Row) -> Entry | None:
    """The column that does what the row asks for."""
    return feature_pair(row)[0]


# ---- bars ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One demand on one feature: ``value`` at least or at most ``limit``; None when nothing was measured."""

    direction: str
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
        return f"{self.direction} {self.feature}: {self.what} {value}, {side} {self.limit:g}: {verdict}"


def checks(results: Results) -> list[Check]:
    """Every demand on every feature row of a run; empty without such rows.

    The speed on visited tiles against the plain kernel, the time per visited tile of sparse block maps
    against that of the full one, and the time against SDPA's memory-efficient backend where it ran.
    """
    found = []
    for direction in DIRECTIONS:
        rows = feature_rows(results, direction)
        whole = next((_of_plain(r) for r in rows if r.case.feature == _FULL_BLOCKS), None)
        for row in rows if direction != "both" else []:
            feature, ratio = row.case.feature, _of_plain(row)
            lenient = direction == "bwd" and feature in _WITH_GRADIENT
            limit = MIN_OF_PLAIN_WITH_GRADIENT if lenient else MIN_OF_PLAIN
            found.append(Check(direction, feature, "speed on visited tiles over plain", ratio, limit, True))
            if feature.startswith("blocks-") and feature != _FULL_BLOCKS:
                per_tile = whole / ratio if whole and ratio else None
                what = f"time per visited tile over {_FULL_BLOCKS}"
                found.append(Check(direction, feature, what, per_tile, MAX_TIME_PER_TILE, False))
            rival, ours = row.entry(RIVAL), our_entry(row)
            if rival is not None and rival.status == "ok":
                ran = ours is not None and ours.status == "ok"
                faster = rival.median_ms / ours.median_ms if ran else None
                found.append(Check(direction, feature, f"speed over {RIVAL}", faster, 1.0, True))
    return found


def _of_plain(row: Row) -> float | None:
    ours = our_entry(row)
    return None if ours is None else ours.of_plain


# ---- tables ----------------------------------------------------------------------------------------------


def feature_tables(results: Results, headings: dict[str, str]) -> list[str]:
    """Markdown: a table per direction, then what is demanded and whether it holds. Empty without such rows.

    Args:
        headings: direction to what its table is called.
    """
    lines: list[str] = []
    for direction in DIRECTIONS:
        rows = feature_rows(results, direction)
        if rows:
            lines += ["", f"## Features, {headings[direction]}", "", *_table(rows)]
    demands = checks(results)
    if demands:
        held = sum(check.holds for check in demands)
        lines += ["", "## Features, what is demanded", "", f"{held} of {len(demands)} demands hold.", ""]
        lines += [f"- {check}" for check in demands]
    return lines


def _table(rows: list[Row]) -> list[str]:
    peers = column_names(rows, ours=False)
    head = ["feature", "pairs", "tile", "visited tiles", "ms", "TFLOP/s on them", "plain ms", "of plain"]
    head += [f"{name} {what}" for name in peers for what in ("ms", "of plain")]
    body = [_cells(row, peers) for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def _cells(row: Row, peers: list[str]) -> list[str]:
    ours, plain = feature_pair(row)
    case = row.case
    full = case.batch * case.num_heads * case.seqlen_q * case.seqlen_k
    cells = [case.feature, "" if row.pairs is None else f"{100 * row.pairs / full:.1f} %"]
    if ours is None or ours.tile is None:
        cells += ["", ""]
    else:
        cells += ["{} x {}".format(*ours.tile), f"{100 * ours.tile_scores / full:.1f} %"]
    cells += [_ms(ours), _number(ours and ours.tile_tflops, "{:.0f}"), _ms(plain), _ratio(ours)]
    for name in peers:
        cells += [_ms(row.entry(name)), _ratio(row.entry(name))]
    return cells


def _ms(entry: Entry | None) -> str:
    if entry is None:
        return ""
    return f"{entry.median_ms:.3f} (±{entry.spread_pct / 2:.1f}%)" if entry.status == "ok" else entry.status


def _ratio(entry: Entry | None) -> str:
    return _number(entry and entry.of_plain, "{:.2f}")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
