"""Stored runs, compressed or not, and what every picture calls a column."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from bench import report
from bench.colours import COLOURS, OTHER_COLOURS, label_of
from bench.entrants import OursFp8
from bench.peers import CPU_PEERS, GPU_PEERS
from bench.peers_fp8 import FP8_PEERS
from bench.record import Results, stored_text
from bench.training_record import TrainingResults
from tests.bench.test_bench import synthetic
from tests.sources import ROOT


def test_report_command_reads_a_compressed_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    path, results = tmp_path / "run.json.gz", synthetic()
    results.rows = results.rows[::6]
    path.write_bytes(gzip.compress(results.to_json().encode()))
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert Results.from_json((tmp_path / "out" / "results.json").read_text()) == results
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run.json.gz"]


def test_stored_results_can_be_read():
    """Every run that the project keeps, with this version of the programs."""
    stored = sorted((ROOT / "bench" / "results").glob("*/*.json.gz"))
    kinds = {"headline", "headline-sm80", "features", "around", "shapes", "two-kernels", "fp16", "fp8"}
    kinds |= {"models", "models-short"}
    runs = [path for path in stored if path.name.split(".")[0] in kinds]
    assert runs and all(Results.from_json(stored_text(path)).rows for path in runs)
    training = [path for path in stored if path.name.startswith("training")]
    assert training and all(TrainingResults.from_json(stored_text(path)).rows for path in training)


def test_stored_files_are_compressed_and_listed():
    """Listed in bench/results/README.md. Tables in plain text are not compressed."""
    folder = ROOT / "bench" / "results"
    stored = [path for path in folder.glob("*/*") if path.is_file()]
    assert [path for path in stored if path.suffix not in (".gz", ".txt")] == []
    listed = []
    for line in (folder / "README.md").read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| `(\d{4}-[\w-]+)` \| ((?:`[\w-]+`(?:, )?)+) \|", line):
            listed += [f"{row[1]}/{name}" for name in re.findall(r"`([\w-]+)`", row[2])]
    assert sorted(listed) == sorted(f"{path.parent.name}/{path.name.partition('.')[0]}" for path in stored)


def test_short_runs_of_models_have_different_rows():
    """Of a row the newest run stays."""
    stored = (ROOT / "bench" / "results").glob("*/models-short.json.gz")
    rows = [row for path in stored for row in Results.from_json(stored_text(path)).rows]
    keys = [(row.case.name, row.direction, row.dtype) for row in rows]
    assert len(set(keys)) == len(keys)


def test_ours_has_one_name_and_each_column_its_own_colour():
    assert label_of("sm90", "sm90") == label_of("sm80", "sm80") == label_of("flash_ext") == "flash_ext"
    assert label_of("sm90-det", "sm90") == "flash_ext, deterministic"
    assert label_of("sm80", "sm90") == "flash_ext, sm80"
    names = ["sm90", "sm90-det", "sm80", "sm80-det", *GPU_PEERS, *CPU_PEERS, "sdpa", "materialised"]
    names += [*OursFp8.kinds, *FP8_PEERS]
    assert {label_of(name, "sm90") for name in names} == set(COLOURS)
    colours = [colour.lower() for colour in (*COLOURS.values(), *OTHER_COLOURS)]
    assert len(set(colours)) == len(colours)
