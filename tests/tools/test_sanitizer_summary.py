"""What the summary of a log of compute-sanitizer says, and when it calls a log incomplete."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tools import sanitizer_summary

READ = """\
========= Uninitialized __global__ memory read of size 16 bytes
=========     at void flash_ext::bwd_preprocess_kernel<__half, (int)64>(flash_ext::BwdParams)+0xb80
"""
LOG = f"""\
case one
{READ}========= Warning: Error buffer overflow has been detected. Some records have been dropped
case two
{READ}========= ERROR SUMMARY: 2 errors
"""


def run(log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    file = tmp_path / "log"
    file.write_text(log)
    monkeypatch.setattr(sys, "argv", ["sanitizer_summary", str(file)])
    return sanitizer_summary.main()


def test_findings_are_counted_and_launches_with_more_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(LOG, tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "2 findings of 1 kinds; 2 cases" in said
    assert "of 1 launches of bwd_preprocess_kernel more than the tool kept" in said


def test_a_log_that_reached_the_limit_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    log = LOG + "========= ERROR SUMMARY: 7 errors were not printed. Use --print-limit\n"
    assert run(log, tmp_path, monkeypatch) == 1
    assert "NOT COMPLETE" in capsys.readouterr().out
