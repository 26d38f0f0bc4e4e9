"""bench/profile.sh and bench.profile_case, with a program that stands in for Nsight Compute."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import profile_case

ROOT = Path(__file__).resolve().parents[1]

RAW_PAGE = """==PROF== Connected
"ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed","other"
"","","us","%",""
"0","fwd_sm80<128>","812.5","61.2","7"
"1","combine","3.1","0","8"
"""


def test_key_metrics_are_picked_out_of_the_raw_page(tmp_path: Path):
    (tmp_path / "raw.csv").write_text(RAW_PAGE)
    assert profile_case.main(["metrics", str(tmp_path / "raw.csv"), str(tmp_path / "key.csv")]) == 0
    assert list(csv.reader((tmp_path / "key.csv").open(newline=""))) == [
        ["metric", "unit", "fwd_sm80<128>", "combine"],
        ["gpu__time_duration.sum", "us", "812.5", "3.1"],
        ["dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "61.2", "0"],
    ]


def test_a_table_has_a_line_for_each_kernel_that_matters(tmp_path: Path, capsys: pytest.CaptureFixture):
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    rows = [
        ["metric", "unit", "void a::bwd_kernel<a::T<__nv_bfloat16, (int)64>>(a::Args)", "sum", "small"],
        ["gpu__time_duration.sum", "ms", "1.5", "0.5", "0.01"],
        ["sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active", "%", "61.4", "0", "0"],
        ["sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active", "%", "0", "0", "0"],
        ["lts__throughput.avg.pct_of_peak_sustained_elapsed", "%", "21", "90.6", "n/a"],
        [stall.format("selected"), "inst", "1", "1", "1"],
        [stall.format("long_scoreboard"), "inst", "0.25", "1,024.5", "0"],
        [stall.format("gmma"), "inst", "2.5", "0", "0"],
    ]
    with (tmp_path / "d64-causal-bwd-sm90.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (tmp_path / "d64-causal-bwd-sm90.raw.csv").write_text("not read")
    assert profile_case.main(["table", str(tmp_path)]) == 0
    head, _, first, second = (tmp_path / "profiles.md").read_text().splitlines()
    assert head.startswith("| profile | kernel | us | tensor cores, % | issue, % |")
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:5] == ["d64-causal-bwd-sm90", "`bwd_kernel<T<__nv_bfloat16, 64>>`", "1500", "61", ""]
    assert cells[-3:] == ["21", "", "gmma 2.50, long scoreboard 0.25"]
    assert "| `sum` | 500 | 0 |" in second and "long scoreboard 1024.50" in second
    assert second in capsys.readouterr().out


def test_the_list_of_profiles_names_cases_and_columns_that_exist():
    from bench.entrants import make_ours
    from bench.peers import GPU_PEERS
    from bench.shapes import find_case

    text = (ROOT / "bench/profiles.sh").read_text()
    listed = re.findall(r'^  "(\S+) (\S+) (\S+)"$', text, re.M)
    assert len(listed) > 20 and len(set(listed)) == len(listed)
    columns = {entrant.name: entrant for entrant in make_ours(["sm90"])}
    for name, direction, column in listed:
        case = find_case(name)
        assert column in GPU_PEERS or columns[column].takes(case) and direction in columns[column].directions


def test_profiles_go_on_after_one_that_fails(tmp_path: Path):
    fake = tmp_path / "ncu"
    fake.write_text(
        f"""#!{sys.executable}
import pathlib, sys
if "--export" in sys.argv:
    if "fa3" not in sys.argv:
        pathlib.Path(sys.argv[sys.argv.index("--export") + 1] + ".ncu-rep").touch()
else:
    print({RAW_PAGE!r})
"""
    )
    fake.chmod(0o755)
    done = subprocess.run(
        [ROOT / "bench/profiles.sh", tmp_path / "out", "d128-causal-s4096 *"],
        env={**os.environ, "NCU": str(fake), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "no profile: d128-causal-s4096 fwd fa3" in done.stderr
    assert "| d128-causal-s4096-fwd-sm90 | `fwd_sm80<128>` | 812 |" in done.stdout


def test_an_empty_profile_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "raw.csv").write_text("==WARNING== No kernels were profiled.\n")
    assert profile_case.main(["metrics", str(tmp_path / "raw.csv"), str(tmp_path / "key.csv")]) == 1
    assert "no kernel was profiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    "entrant, direction, nvtx, lines", [("sm80", "bwd", "flash_ext@bwd/", "yes"), ("fa2", "fwd", None, "no")]
)
def test_profile_script_asks_ncu_for_the_right_range(
    tmp_path: Path, entrant: str, direction: str, nvtx: str | None, lines: str
):
    fake = tmp_path / "ncu"
    fake.write_text(
        f"""#!{sys.executable}
import pathlib, sys
log = pathlib.Path({str(tmp_path / "log")!r})
log.open("a").write(" ".join(sys.argv[1:]) + chr(10))
if "--export" in sys.argv:
    pathlib.Path(sys.argv[sys.argv.index("--export") + 1] + ".ncu-rep").touch()
else:
    print({RAW_PAGE!r})
"""
    )
    fake.chmod(0o755)
    command = [str(ROOT / "bench/profile.sh"), "d128-causal-s4096", "--dir", direction, "--entrant", entrant]
    builds = tmp_path / "python"
    builds.write_text(
        f"""#!/usr/bin/env bash
if [[ $1 == setup.py ]]; then
  echo "FLASH_EXT_LINEINFO=$FLASH_EXT_LINEINFO $*" >>{tmp_path / "builds"}
else
  exec {sys.executable} "$@"
fi
"""
    )
    builds.chmod(0o755)
    environment = {**os.environ, "NCU": str(fake), "PYTHON": str(builds)}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--lines", lines],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "builds").exists() == (lines == "yes")
    if lines == "yes":
        assert (tmp_path / "builds").read_text().startswith("FLASH_EXT_LINEINFO=1 setup.py")
    collect, export = (tmp_path / "log").read_text().splitlines()
    for word in ("--clock-control none", "--set full", "--import-source on", "--profile-from-start off"):
        assert word in collect
    assert (f"--nvtx --nvtx-include {nvtx}" in collect) if nvtx else ("--nvtx" not in collect)
    assert f"run d128-causal-s4096 --dir {direction} --entrant {entrant}" in collect
    assert "--page raw --csv" in export
    assert (
        (tmp_path / f"out/d128-causal-s4096-{direction}-{entrant}.csv").read_text().startswith("metric,unit,")
    )
