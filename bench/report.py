"""What a run leaves behind: JSON, CSV and markdown tables, and the summary of ours against one peer.

``python -m bench.report RESULTS.json`` rebuilds every file beside it or in ``--out`` and prints the summary.
The JSON may be compressed (``.json.gz``), and may be that of ``bench.accuracy --set fp8``. No torch here.
"""

from __future__ import annotations

import argparse
import csv
import os
from dataclasses import fields
from pathlib import Path

from bench import fp8_report
from bench.feature_report import checks, feature_tables
from bench.model_report import model_tables
from bench.plots import plot
from bench.record import (
    DIRECTION_FILES,
    Entry,
    Results,
    Row,
    bar,
    bars_against_every_peer,
    column_names,
    our_columns,
    stored_text,
)
from bench.shapes import DIRECTIONS, Case


def write_json(results: Results, path: Path) -> None:
    """Writes the run so that a reader never sees half of it, even when the run is killed."""
    partial = path.with_suffix(".partial")
    partial.write_text(results.to_json())
    os.replace(partial, path)


def write_csv(results: Results, path: Path) -> None:
    """One line per entry of every row; nested values are joined by spaces."""
    case_columns = [f.name for f in fields(Case)]
    entry_columns = [f.name for f in fields(Entry)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "direction",
                "dtype",
                *(f"case_{c}" if c == "name" else c for c in case_columns),
                "flops",
                "traffic_bytes",
                "pairs",
                "sm_mhz",
                "power_w",
                *(f"entry_{c}" if c == "name" else c for c in entry_columns),
            ]
        )
        for row in results.rows:
            clocks = row.clocks or ("", "")
            for entry in row.entries:
                cells = [
                    row.direction,
                    row.dtype,
                    *(getattr(row.case, c) for c in case_columns),
                    row.flops,
                    row.traffic_bytes,
                    "" if row.pairs is None else row.pairs,
                    *clocks,
                    *(getattr(entry, c) for c in entry_columns),
                ]
                writer.writerow([" ".join(map(str, c)) if isinstance(c, (list, tuple)) else c for c in cells])


def markdown(results: Results) -> str:
    """Metadata, the summaries, one table per direction, and every refusal and error in full."""
    lines = ["# flash_ext benchmark", ""]
    lines += [f"- {key}: {value}" for key, value in results.metadata.items()]
    lines += [f"- {key}: {value:.4g}" for key, value in results.ceilings.items()]
    lines += ["", "A ratio above 1 means that ours is faster.", ""]
    lines += [f"- {summary}" for summary in bars_against_every_peer(results)]
    for direction in DIRECTIONS:
        rows = [row for row in results.rows if row.direction == direction and _plain(row.case)]
        if rows:
            lines += [
                "",
                f"## {DIRECTION_FILES[direction]}, TFLOP/s (spread, share of the matrix product)",
                "",
            ]
            lines += _table(rows)
    lines += feature_tables(results, DIRECTION_FILES)
    lines += model_tables(results, DIRECTION_FILES)
    notes = [
        f"- {row.direction} {row.case.name}, {entry.name} ({entry.status}): {' '.join(entry.text.split())}"
        for row in results.rows
        for entry in row.entries
        if entry.status != "ok"
    ]
    if notes:
        lines += ["", "## What did not run", "", *notes]
    if results.host_cost:
        columns = list(dict.fromkeys(key for row in results.host_cost for key in row))
        lines += [
            "",
            "## Host cost of a call",
            "",
            *_grid(columns, [[_cell(row.get(c)) for c in columns] for row in results.host_cost]),
        ]
    return "\n".join(lines) + "\n"


def _plain(case: Case) -> bool:
    """Whether a row stands in the general tables: features and models have their own."""
    return not case.feature and not case.model


def _table(rows: list[Row]) -> list[str]:
    names = column_names(rows)
    ours = column_names(rows, ours=True)
    head = ["case", "dtype", *names, *(f"{name} workspace" for name in ours)]
    body = []
    for row in rows:
        cells = [row.case.name, row.dtype]
        cells += [describe(row.entry(name)) for name in names]
        for name in ours:
            entry = row.entry(name)
            known = entry is not None and entry.extra_bytes is not None
            cells.append(f"{entry.extra_bytes / 2**20:.2f} MiB" if known else "")
        body.append(cells)
    return _grid(head, body)


def describe(entry: Entry | None) -> str:
    """One table cell: rate, spread and share of the matrix product, or what kept the entry from running."""
    if entry is None:
        return ""
    if entry.status != "ok":
        return entry.status
    rate = f"{entry.tflops:.0f}" if entry.tflops >= 10 else f"{entry.tflops:.3g}"
    return f"{rate} (±{entry.spread_pct / 2:.1f}%, {entry.matmul_pct:.0f}%)"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _grid(head: list[str], body: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def write_all(results: Results, folder: Path) -> list[Path]:
    """Writes ``results.json``, ``results.csv``, ``results.md`` and the plots; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"results.{suffix}" for suffix in ("json", "csv", "md")]
    write_json(results, paths[0])
    write_csv(results, paths[1])
    paths[2].write_text(markdown(results))
    return paths + plot(results, folder)


def main(argv: list[str] | None = None) -> int:
    """Rebuilds the files of a run from its JSON, prints the summaries and says whether the bars hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=main.__doc__)
    parser.add_argument("results", type=Path, help="results.json of a run, or a .json.gz")
    parser.add_argument("--out", type=Path, default=None, help="where to write; default beside the results")
    parser.add_argument("--ours", default=None, help="our column; default the first one of the run")
    parser.add_argument("--peer", default="fa2", help="the column it is held against")
    parser.add_argument("--geomean", type=float, default=1.0, help="geometric mean asked for")
    parser.add_argument("--worst", type=float, default=0.9, help="worst row allowed")
    options = parser.parse_args(argv)
    text, folder = stored_text(options.results), options.out or options.results.parent
    errors = fp8_report.Errors.from_json(text)
    if errors is not None:
        return _report_errors(errors, folder / f"{options.results.name.split('.')[0]}.json")
    results = Results.from_json(text)
    for path in write_all(results, folder):
        print(path)
    print("\n".join(model_tables(results, DIRECTION_FILES)))
    ours = options.ours or next(iter(our_columns(results)), "")
    bars = bar(results, ours, options.peer)
    for summary in bars:
        print(f"{summary}: {'holds' if summary.holds(options.geomean, options.worst) else 'does not hold'}")
    demands = checks(results)
    for check in demands:
        print(check)
    held = [summary.holds(options.geomean, options.worst) for summary in bars]
    held += [check.holds for check in demands]
    return 0 if held and all(held) else 1


def _report_errors(errors: fp8_report.Errors, path: Path) -> int:
    """Rebuilds the files of errors in fp8; 0 where every demand holds."""
    for written in fp8_report.write(errors, path):
        print(written)
    demands = fp8_report.demands(errors)
    print("\n".join([*fp8_report.table(errors), *map(str, demands)]))
    return 0 if demands and all(demand.holds for demand in demands) else 1


if __name__ == "__main__":
    raise SystemExit(main())
