"""Results that claims are held against: files of the benchmark, of the ladder, and of this example's own
runs.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

Row = dict[str, object]

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


@dataclass
class File:
    """One stored run: its rows, where it was made, and what a matrix product and a copy reached there."""

    kind: str
    rows: list[Row] = field(default_factory=list)
    metadata: dict[str, object] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """GPU, date and commit, as a table says it."""
        device = str(self.metadata.get("device", "?")).replace("NVIDIA ", "").replace(" 80GB HBM3", "")
        commit, date = str(self.metadata.get("commit", "?"))[:7], str(self.metadata.get("date", "?"))[:10]
        return f"{device}, {date}, {commit}"

    def of(self, section: str) -> list[Row]:
        """Rows of a section that have no error."""
        return [row for row in self.rows if row.get("section") == section and "error" not in row]


@dataclass
class Evidence:
    """What is known, by kind: "ladder" and "claims" of the examples; "headline",
    "training", "fp16" and "fp8" of the benchmark.
    """

    files: dict[str, File]

    def file(self, kind: str) -> File:
        """An empty one where nothing is stored."""
        return self.files.get(kind, File(kind))


def read(path: Path) -> File:
    """A file of results, compressed or not."""
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return File(path.name.split(".")[0], found["rows"], found["metadata"], found.get("ceilings") or {})


def stored(folder: Path = RESULTS) -> Evidence:
    """The newest file of each kind below ``folder``, whose runs are named by date."""
    files: dict[str, File] = {}
    for kind in ("ladder", "claims", "headline", "training", "fp16", "fp8"):
        found = sorted(folder.glob(f"*/{kind}.json.gz"), key=lambda path: path.parent.name)
        if found:
            files[kind] = read(found[-1])
            # A machine without git may write another commit into the file than the folder is named by.
            named = re.fullmatch(r"[\d-]{10}-\w+-([0-9a-f]{7})", found[-1].parent.name)
            if named:
                files[kind].metadata["commit"] = named[1]
    return Evidence(files)


# ---- numbers from rows -----------------------------------------------------------------------------------


def number(row: Row, key: str) -> float:
    """A number of a row."""
    value = row[key]
    assert isinstance(value, (int, float)), (key, value)
    return float(value)


def pairs(rows: Iterable[Row], slow: str, fast: str, key: Callable[[Row], object]) -> dict[object, float]:
    """How many times as fast ``fast`` is as ``slow``, by what ``key`` says of a row."""
    times: dict[object, dict[str, float]] = {}
    for row in rows:
        if "ms" in row:
            times.setdefault(key(row), {})[str(row["name"])] = number(row, "ms")
    return {at: of[slow] / of[fast] for at, of in times.items() if slow in of and fast in of}


def shape_of(row: Row) -> tuple[int, ...]:
    """A row's shape, which can be a key."""
    shape = row["shape"]
    assert isinstance(shape, list)
    return tuple(shape)


def span(values: Iterable[float], form: str = ".2f", unit: str = "") -> str:
    """Smallest to largest, as 1.20 to 2.31x."""
    values = list(values)
    low, high = format(min(values), form), format(max(values), form)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def benchmark_times(file: File, direction: str, name: str) -> dict[tuple[object, ...], tuple[float, float]]:
    """(ms, TFLOP/s) of a column of the benchmark by (head_dim, causal, seqlen)."""
    found: dict[tuple[object, ...], tuple[float, float]] = {}
    for row in file.rows:
        case, entries = row["case"], row["entries"]
        assert isinstance(case, dict) and isinstance(entries, list)
        for entry in entries:
            if row["direction"] == direction and entry["name"] == name and entry["status"] == "ok":
                key = (case["head_dim"], case["causal"], case["seqlen_q"])
                found[key] = (entry["median_ms"], entry["tflops"])
    return found
