"""What a run records: entries in rows, rows in results, and two columns compared. Plain data, no torch."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.shapes import DIRECTIONS, Case

SCHEMA = 1
DIRECTION_FILES = {"fwd": "forward", "bwd": "backward", "both": "forward-backward"}


@dataclass
class Entry:
    """One entrant on one row.

    Attributes:
        name: column name.
        ours: True for flash_ext itself.
        status: ``ok``, ``refused`` (it says beforehand that it cannot) or ``error`` (it threw).
        text: why not, for the last two.
        median_ms, q1_ms, q3_ms: quartiles over all launches of all rounds.
        round_medians_ms: median of each round, in order.
        launches: how many launches stand behind the quartiles.
        call_us: host time to enqueue one call, median over rounds; None on CPU.
        tflops, matmul_pct: arithmetic rate, and its share of the matrix product measured in the same run.
        gbps, copy_pct: least traffic over time, and its share of the copy measured in the same run.
        peak_bytes: highest allocation during one call, outputs included; None where it is not known.
        extra_bytes: ``peak_bytes`` less the outputs: workspace.
        tile: (queries, keys) of the kernel's tiles, in feature rows of ours; so are the next three.
        tiles: tiles with at least one visible pair, over all heads and batch entries.
        tile_scores: scores in those tiles.
        tile_tflops: arithmetic rate counting all of those scores.
        of_plain: in feature rows, ``tile_tflops`` over that of the plain kernel in the same row; a peer is
            credited with the tiles of ours.
    """

    name: str
    ours: bool = False
    status: str = "ok"
    text: str = ""
    median_ms: float | None = None
    q1_ms: float | None = None
    q3_ms: float | None = None
    round_medians_ms: list[float] = field(default_factory=list)
    launches: int = 0
    call_us: float | None = None
    tflops: float | None = None
    matmul_pct: float | None = None
    gbps: float | None = None
    copy_pct: float | None = None
    peak_bytes: int | None = None
    extra_bytes: int | None = None
    tile: tuple[int, int] | None = None
    tiles: int | None = None
    tile_scores: int | None = None
    tile_tflops: float | None = None
    of_plain: float | None = None

    @property
    def spread_pct(self) -> float:
        """Interquartile range as a share of the median, percent."""
        return 100.0 * (self.q3_ms - self.q1_ms) / self.median_ms


@dataclass
class Row:
    """One case in one direction, with everything that was timed side by side.

    Attributes:
        clocks: median SM clock (MHz) and power (W) while the row ran, or None.
        pairs: visible (query, key) pairs over all heads and batch entries, in feature rows.
    """

    case: Case
    direction: str
    dtype: str
    flops: float
    traffic_bytes: int
    entries: list[Entry] = field(default_factory=list)
    clocks: tuple[float, float] | None = None
    pairs: int | None = None

    def entry(self, name: str) -> Entry | None:
        """The entry of that name, whatever its status."""
        return next((entry for entry in self.entries if entry.name == name), None)


@dataclass
class Results:
    """A whole run: where and how it was made, the machine's ceilings, and the rows."""

    metadata: dict
    ceilings: dict[str, float]
    rows: list[Row] = field(default_factory=list)
    host_cost: list[dict] = field(default_factory=list)

    def to_json(self) -> str:
        """The run as JSON, schema number first."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Results:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: the text has another schema number.
        """
        data = json.loads(text)
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a benchmark result of schema {SCHEMA}")
        rows = [
            Row(
                **{
                    **row,
                    "case": _case(row["case"]),
                    "entries": [_entry(e) for e in row["entries"]],
                    "clocks": tuple(row["clocks"]) if row["clocks"] else None,
                }
            )
            for row in data.pop("rows")
        ]
        return Results(rows=rows, **data)


def stored_text(path: Path) -> str:
    """What a file of results says, compressed (``.gz``) or not."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def _entry(data: dict) -> Entry:
    tile = data.get("tile")
    return Entry(**{**data, "tile": tuple(tile) if tile else None})


def _case(data: dict) -> Case:
    return Case(**{**data, "window": tuple(data["window"]), "lengths": tuple(data["lengths"])})


PLAIN_SUFFIX = "-plain"  # of our columns that leave the feature of a row out


def feature_pair(row: Row, path: str | None = None) -> tuple[Entry | None, Entry | None]:
    """Our column that does what a feature row asks for, and the plain one of the same path.

    Without ``path`` it is the first one that ran: not every path knows every feature.
    """
    if path is not None:
        return row.entry(path), row.entry(path + PLAIN_SUFFIX)
    mine = [e for e in row.entries if e.ours and not e.name.endswith(PLAIN_SUFFIX)]
    ours = next((e for e in mine if e.status == "ok"), mine[0] if mine else None)
    return ours, row.entry(ours.name + PLAIN_SUFFIX) if ours else None


def speed_of_plain(entry: Entry, ours: Entry | None, plain: Entry | None) -> float | None:
    """Speed over that of the plain kernel, of ours or of a peer that is credited with the tiles of ours."""
    if ours is None or plain is None or {entry.status, ours.status, plain.status} != {"ok"}:
        return None
    if not ours.tile_scores or not plain.tile_scores:
        return None
    return (ours.tile_scores / entry.median_ms) / (plain.tile_scores / plain.median_ms)


def fill_ratios(row: Row) -> None:
    """Rates on visited tiles, and their ratio to the plain column's of the same path, where a row has both.

    A peer is credited with the tiles of our column in :func:`feature_pair`: the same work, done its way.
    """
    ours, plain = feature_pair(row)
    flops_per_score = row.flops / row.pairs if row.pairs else 0.0
    for entry in row.entries:
        base = row.entry(entry.name.removesuffix(PLAIN_SUFFIX) + PLAIN_SUFFIX) if entry.ours else plain
        ratio = speed_of_plain(entry, entry if entry.ours else ours, base)
        if ratio is None:
            continue
        if entry.ours:
            entry.tile_tflops = entry.tile_scores * flops_per_score / entry.median_ms * 1e-9
        entry.of_plain = ratio


@dataclass
class Bar:
    """How ours compares with one peer over the rows of one direction; a ratio above 1 means ours is faster.

    Attributes:
        ratios: case name to peer time over our time, where both ran.
        missing: cases that the peer ran and ours did not.
    """

    direction: str
    ours: str
    peer: str
    ratios: dict[str, float]
    missing: list[str]

    @property
    def geomean(self) -> float:
        """Geometric mean of the ratios; nan when there is none."""
        if not self.ratios:
            return math.nan
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    @property
    def worst(self) -> tuple[str, float]:
        """Case with the smallest ratio, and that ratio."""
        return min(self.ratios.items(), key=lambda item: item[1], default=("none", math.nan))

    def holds(self, geomean: float = 1.0, worst: float = 0.9) -> bool:
        """True when no row is missing, the mean is at least ``geomean`` and no row is below ``worst``."""
        return not self.missing and self.geomean >= geomean and self.worst[1] >= worst

    def __str__(self) -> str:
        name, ratio = self.worst
        line = f"{self.direction}: {self.ours} against {self.peer} over {len(self.ratios)} rows"
        if self.ratios:
            line += f": geometric mean {self.geomean:.3f}, worst {ratio:.3f} ({name})"
        return line + (f"; ours did not run {', '.join(self.missing)}" if self.missing else "")


def bar(results: Results, ours: str = "sm80", peer: str = "fa2") -> list[Bar]:
    """Geometric mean and worst row of ours against a peer, one summary per direction both took part in.

    Feature rows are left out: they have demands of their own, see :mod:`bench.feature_report`.
    """
    bars = []
    for direction in DIRECTIONS:
        ratios, missing = {}, []
        for row in results.rows:
            if row.direction != direction or row.case.feature:
                continue
            mine, theirs = row.entry(ours), row.entry(peer)
            if mine is None or theirs is None or theirs.status != "ok":
                continue
            if mine.status == "ok":
                ratios[row.case.name] = theirs.median_ms / mine.median_ms
            else:
                missing.append(row.case.name)
        if ratios or missing:
            bars.append(Bar(direction, ours, peer, ratios, missing))
    return bars


def bars_against_every_peer(results: Results) -> list[Bar]:
    """:func:`bar` for each of our columns against each peer column."""
    peers = column_names(results.rows, ours=False)
    return [
        summary for mine in our_columns(results) for peer in peers for summary in bar(results, mine, peer)
    ]


def our_columns(results: Results) -> list[str]:
    """Names of our columns that do what a row asks for, in order of first appearance."""
    return [name for name in column_names(results.rows, ours=True) if not name.endswith(PLAIN_SUFFIX)]


def column_names(rows: list[Row], ours: bool | None = None) -> list[str]:
    """Column names in order of first appearance."""
    return list(dict.fromkeys(e.name for row in rows for e in row.entries if ours is None or e.ours == ours))
