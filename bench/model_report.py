"""Tables of the set ``models``: times of ours and of every peer, and the best peer over ours. No torch."""

from __future__ import annotations

import math

from bench.record import Entry, Results, Row, column_names
from bench.shapes import DIRECTIONS


def model_rows(results: Results, direction: str) -> list[Row]:
    """The rows of the set in one direction, in the order they ran."""
    return [row for row in results.rows if row.case.model and row.direction == direction]


def ours_of(row: Row) -> Entry | None:
    """The first of our columns that ran; None where none did."""
    return next((entry for entry in row.entries if entry.ours and entry.status == "ok"), None)


def best_peer(row: Row) -> Entry | None:
    """The fastest peer; None where none ran."""
    ran = [entry for entry in row.entries if not entry.ours and entry.status == "ok"]
    return min(ran, key=lambda entry: entry.median_ms, default=None)


def over_ours(row: Row) -> float | None:
    """Time of the best peer over ours; above 1 ours is faster. None where either did not run."""
    ours, peer = ours_of(row), best_peer(row)
    return None if ours is None or peer is None else peer.median_ms / ours.median_ms


def model_tables(results: Results, headings: dict[str, str]) -> list[str]:
    """Markdown: a table for each direction and its geometric mean; nothing without such rows.

    Args:
        headings: direction to what its table is called.
    """
    lines: list[str] = []
    for direction in DIRECTIONS:
        rows = model_rows(results, direction)
        if rows:
            lines += ["", f"## Models, {headings[direction]}, us", "", *_table(rows), "", summary(rows)]
    return lines


def summary(rows: list[Row]) -> str:
    """The geometric mean of :func:`over_ours`, the smallest, and what has no part in them."""
    ratios = {row.case.name: ratio for row in rows if (ratio := over_ours(row)) is not None}
    said = f"Best peer over ours, {len(ratios)} rows"
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        slowest = min(ratios, key=ratios.__getitem__)
        slower = sum(ratio < 1 for ratio in ratios.values())
        said += f": geometric mean {mean:.3f}, smallest {ratios[slowest]:.3f} ({slowest}), {slower} below 1"
    failed = [row.case.name for row in rows if ours_of(row) is None]
    alone = [row.case.name for row in rows if ours_of(row) is not None and best_peer(row) is None]
    said += f"; ours did not run {', '.join(failed)}" if failed else ""
    return said + (f"; no peer ran {', '.join(alone)}" if alone else "") + "."


def _table(rows: list[Row]) -> list[str]:
    """A line for each row; a cell is empty where the column did not run."""
    names = column_names(rows)
    body = []
    for row in rows:
        ratio, best = over_ours(row), best_peer(row)
        cells = [row.case.name, *(_us(row.entry(name)) for name in names), best.name if best else ""]
        body.append([*cells, "" if ratio is None else f"{ratio:.2f}"])
    head = ["row", *names, "best peer", "best peer over ours"]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def _us(entry: Entry | None) -> str:
    if entry is None or entry.status != "ok":
        return ""
    us = 1e3 * entry.median_ms
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"
