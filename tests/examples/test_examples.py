"""The examples run and do what they say: models learn, results agree, ``--help`` names the options."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from examples import custom_mask, gpt_packed, long_context, serve
from tests import processes
from tests.sources import ROOT

NAMES = ["gpt_packed", "finetune_transformers", "fp8_transformers", "custom_mask", "long_context", "serve"]


def test_a_gpt_learns_from_packed_documents() -> None:
    losses = gpt_packed.main(["--device", "cpu", "--steps", "20", "--tokens", "512"])
    assert losses[0] > 5 and sum(losses[-5:]) / 5 < 3.2


def test_a_model_of_transformers_learns() -> None:
    pytest.importorskip("transformers", minversion="4.57")
    from examples import finetune_transformers

    losses = finetune_transformers.main(["--device", "cpu", "--steps", "30", "--batch", "16"])
    assert losses[0] > 3.4 and sum(losses[-5:]) / 5 < losses[0] - 0.03


def test_a_model_of_transformers_in_fp8() -> None:
    """Each kind of attention rounds in its own way, and little."""
    pytest.importorskip("transformers", minversion="4.57")
    from examples import fp8_transformers

    rows = fp8_transformers.main(["--device", "cpu", "--steps", "3", "--batch", "2", "--prefill", "256"])
    plain, mixed, fp8 = (row.loss for row in rows)
    assert len({plain, mixed, fp8}) == 3 and max(abs(mixed - plain), abs(fp8 - plain)) < 0.05
    assert all(row.tokens_a_second > 0 for row in rows)


def test_a_mask_from_a_rule_is_the_rule() -> None:
    differences = custom_mask.main(["--device", "cpu", "--seqlen", "600", "--window", "70"])
    assert set(differences) == {"out", "dq", "dk", "dv"} and max(differences.values()) < 1e-4


def test_a_paged_cache_gives_the_tokens_of_a_dense_one(capsys: pytest.CaptureFixture[str]) -> None:
    results = serve.main(["--device", "cpu", "--batch", "3", "--prompt", "40", "--tokens", "8"])
    assert results["paged"].shape == (3, 8) and (results["paged"] == results["dense"]).all()
    assert capsys.readouterr().out.count("tokens a second") == 2


def printing_into(rank: int, size: int, port: int, path: Path, function: Callable, *arguments: Any) -> None:
    """What a process that the example starts does, with its output in a file."""
    with path.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        function(rank, *arguments)


@processes.forked
@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_processes_give_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(function: Callable, arguments: tuple, nprocs: int) -> None:
        processes.start(printing_into, nprocs, tmp_path / "printed", function, *arguments)

    monkeypatch.setattr(long_context.mp, "spawn", spawn)
    long_context.main(["--device", "cpu", "--seqlen", "256"])
    assert (tmp_path / "printed").read_text().count("128 of 256 tokens") == 2


@pytest.mark.parametrize("name", NAMES)
def test_help_and_the_list_of_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"examples.{name}").main(["--help"])
    assert end.value.code == 0 and "--device" in capsys.readouterr().out
    assert f"`python -m examples.{name}`" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


@pytest.mark.gpu
@pytest.mark.parametrize("name, more", [
    ("gpt_packed", ["--steps", "30"]), ("finetune_transformers", ["--steps", "30"]),
    ("fp8_transformers", ["--steps", "30"]), ("custom_mask", []),
    ("long_context", ["--processes", "1"]), ("serve", []),
])  # fmt: skip
def test_on_a_gpu(name: str, more: list[str]) -> None:
    """As a reader starts it."""
    if name.endswith("transformers"):
        pytest.importorskip("transformers", minversion="4.57")
    command = [sys.executable, "-m", f"examples.{name}", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
