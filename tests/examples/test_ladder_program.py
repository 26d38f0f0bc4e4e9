"""``python -m examples.ladder`` and ``examples.claims``: small runs, what they read, what they refuse."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from bench.timing import make_timer
from examples.claims import __main__ as claims_program
from examples.claims.claims import BACKWARD_SHARE, CLAIMS, NOT_MEASURED, table
from examples.claims.evidence import Evidence, File, pairs, read, shape_of, span, stored
from examples.claims.measure import long_files, windows
from examples.ladder import __main__ as program
from examples.ladder import measure, native, profile
from examples.ladder.report import as_text
from examples.ladder.rungs import RUNGS, rungs_for

CPU = torch.device("cpu")


# ---- the ladder


def test_a_small_run_has_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ladder.json.gz"
    rows = program.main(["--device", "cpu", "--out", str(out), "--commit", "abc"])
    sections = {row["section"] for row in rows}
    assert sections == {"errors", "softmax", "lengths", "backward", "heads", "breakdown", "forward only"}
    assert json.loads(gzip.decompress(out.read_bytes()))["metadata"]["commit"] == "abc"
    assert {row["name"] for row in rows if row["section"] == "lengths"} == {"standard", "fa2", "flash_ext"}
    assert all(float(row["ms"]) > 0 for row in rows if row["section"] == "heads")  # type: ignore[arg-type]
    assert {row["name"] for row in rows if row["section"] == "backward"} == {"fa2", "flash_ext"}
    assert "Parts of standard attention" in capsys.readouterr().out


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--only", "softmax,nothing"])
    assert "no section is called 'nothing'" in capsys.readouterr().err


def test_a_wrong_rung_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = measure.Rung("wrong", "wrong", lambda q, k, v: lambda: v * 0)
    monkeypatch.setattr(measure, "rungs_for", lambda device: [wrong])
    with pytest.raises(AssertionError, match="wrong at"):
        measure.check_results(CPU)


def test_a_rung_that_fails_has_words_and_no_time() -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel")

    found = measure.timed({"fails": fails, "works": lambda: None}, make_timer(CPU), measure.CPU)
    assert found["fails"] == {"error": "RuntimeError: no such kernel"} and "ms" in found["works"]


def test_rungs_of_a_cpu_need_no_gpu() -> None:
    assert [rung.name for rung in rungs_for(CPU)] == ["standard", "fa2", "flash_ext"]
    assert {rung.algorithm for rung in RUNGS.values()} == {"", "standard", "flash1", "flash2"}


@pytest.mark.parametrize("call", [
    lambda: native.softmax(torch.ones(2, 4), native.Passes.TWO),
    lambda: native.flash1(*(torch.ones(1, 1, 4, 64) for _ in range(3))),
    lambda: native.flash2(*(torch.ones(1, 1, 4, 64) for _ in range(3))),
    lambda: native.backward(2, *[torch.ones(1, 1, 4, 64)] * 4, torch.ones(1, 1, 4), torch.ones(1, 1, 4, 64)),
])  # fmt: skip
def test_kernels_refuse_what_is_on_a_cpu(call) -> None:
    with pytest.raises(ValueError, match="on a GPU"):
        call()


def test_profiles_are_told_apart_by_separators() -> None:
    names = ["Kernel Name", *(metric for metric, _ in profile.METRICS.values())]
    separator = ["void flash_ext::ladder::softmax_kernel<(Passes)0>(...)", *["1"] * len(profile.METRICS)]

    def kernel(name: str, ns: str, ctas: str) -> list[str]:
        values = {"ms": ns, "ctas": ctas, "dram_read_bytes": "1,000", "l2_read_bytes": "2"}
        return [name, *(values.get(key, "3") for key in profile.METRICS)]

    standard = [kernel("gemm", "1000000", "7"), kernel("softmax", "3000000", "9")]
    raw = [names, [""] * len(names), separator, *standard, separator, kernel("flash1_kernel", "2000000", "5")]
    launches = [((1, 2, 64, 64), "standard"), ((1, 2, 64, 64), "fa1")]
    first, second = profile.rows_of(raw, launches)
    assert (first["ms"], first["kernels"], first["ctas"]) == (4.0, 2, 9.0)
    assert (first["dram_read_bytes"], first["l2_read_bytes"]) == (2000.0, 128.0)
    assert (second["name"], second["ms"], second["algorithm"]) == ("fa1", 2.0, "flash1")
    with pytest.raises(ValueError, match="3 rungs were run, ncu saw 2"):
        profile.rows_of(raw, [*launches, launches[0]])
    assert "fa1" in as_text([first, second])


@pytest.mark.gpu
def test_every_rung_is_right_on_a_gpu() -> None:
    names = {row["name"] for row in measure.check_results(torch.device("cuda"))}
    assert {"fa1", "fa2-ladder", "fa2-one-cta", "fa2-divided", "mem", "flash_ext", "softmax TWO"} <= names
    assert {f"{name}, backward" for name in ("fa1", "fa2-ladder", "fa2", "flash_ext")} <= names


@pytest.mark.gpu
def test_a_forward_without_gradients_keeps_its_output_alone() -> None:
    device = torch.device("cuda")
    rows = measure.forward_only_rows(device, make_timer(device), measure.CPU)
    kept = {row["name"]: row["kept_bytes"] for row in rows if "kept_bytes" in row}
    assert kept["no_grad"] == 0 < kept["with a graph"]


# ---- claims


def test_stored_results_answer_all_claims() -> None:
    lines = table(stored())
    assert not {what for what, _, measured, where in lines if measured == NOT_MEASURED or not where}
    assert len(lines) == len(CLAIMS)


def test_the_backward_is_answered_by_shares_of_the_peak() -> None:
    rows = [{"section": "backward", "name": name, "shape": [1, 2, n, 64], "ms": 1.0, "tflops": rate}
            for name, n, rate in (("fa1", 8, 9.894), ("fa1", 9, 98.94), ("flash_ext", 8, 494.7))]  # fmt: skip
    answers = {line[0]: line[2] for line in table(Evidence({"ladder": File("ladder", rows)}))}
    assert answers[BACKWARD_SHARE] == "FlashAttention (ladder) 1 to 10 %, flash_ext 50 % of 989 TFLOP/s"


def test_a_backward_has_five_products_and_a_forward_two() -> None:
    found = {"fa1": {"ms": 2.0}}
    for section, work in (("lengths", 4.0), ("backward", 10.0)):
        (row,) = measure._with_rates(found, (2, 3, 1000, 64), section)
        assert row["tflops"] == pytest.approx(work * 2 * 3 * 1000 * 1000 * 64 / 2e-3 * 1e-12)
        assert ("counted_bytes" in row) == (section == "lengths")


def test_nothing_stored_answers_nothing() -> None:
    assert {measured for _, _, measured, _ in table(Evidence({}))} == {NOT_MEASURED}


def test_a_small_run_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured here, so that what is stored plays no part; pictures where matplotlib is installed."""
    evidence = claims_program.main(
        ["--measure", "--device", "cpu", "--results", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    )
    assert set(evidence.files) == {"ladder", "claims"}
    text = (tmp_path / "out" / "claims.md").read_text(encoding="utf-8")
    assert "| claimed | by whom | measured here | on what |" in text and "CPU" in text
    contexts = read(tmp_path / "out" / "claims.json.gz").of("contexts")
    assert [row["name"] for row in contexts] == ["32", "128"]
    assert all(len(row["curve"]) == row["steps"] for row in contexts)  # type: ignore[arg-type]
    pytest.importorskip("matplotlib")
    assert "ladder.png" in capsys.readouterr().out
    assert (tmp_path / "out" / "contexts.png").stat().st_size > 10_000


def test_the_newest_run_of_a_kind_counts(tmp_path: Path) -> None:
    for name, device in (("2026-01-02-x-b", "new"), ("2026-01-01-x-a", "old")):
        (tmp_path / name).mkdir()
        text = json.dumps({"rows": [], "metadata": {"device": device}})
        (tmp_path / name / "ladder.json.gz").write_bytes(gzip.compress(text.encode()))
    assert stored(tmp_path).file("ladder").where.startswith("new")


def test_ratios_pair_what_was_timed_together() -> None:
    rows = [
        {"name": n, "shape": [1, h, 8, 64], "ms": ms, "section": "lengths"}
        for n, h, ms in (
            ("fa1", 1, 6.0),
            ("fa2-ladder", 1, 2.0),
            ("fa1", 200, 8.0),
            ("fa2-ladder", 200, 2.0),
            ("fa1", 3, 1.0),
        )
    ]
    assert pairs(rows, "fa1", "fa2-ladder", shape_of) == {(1, 1, 8, 64): 3.0, (1, 200, 8, 64): 4.0}
    line = table(Evidence({"ladder": File("ladder", rows)}))[0][2]
    assert line == "head_dim 64 4.00x, with fewer heads than SMs 3.00x"
    assert span([1.0, 2.5]) == "1.00 to 2.50" and span([2.0, 2.0], unit="x") == "2.00x"


def test_short_and_long_contexts_read_the_same_bytes() -> None:
    text = bytes(range(200))
    short, after = windows(text, 3, 64, 16, CPU)
    long, _ = windows(text, 3, 64, 64, CPU)
    assert short.shape == (4, 16) and torch.equal(short.flatten(), long.flatten())
    assert torch.equal(after.flatten()[:-1], long.flatten()[1:])
    training, held_out = long_files(4096)
    assert len(training) > len(held_out) > 0 and not set(training) & set(held_out)


def test_types_are_answered_by_their_columns() -> None:
    case = {"head_dim": 128, "causal": False, "seqlen_q": 16384}
    rates = {"sm90": 800.0, "auto": 805.0, "fp8": 1300.0, "sm90-fp16": 790.0, "cudnn-fp8": 1100.0}
    entries = [{"name": name, "status": "ok", "median_ms": 1.0, "tflops": rate}
               for name, rate in rates.items()]  # fmt: skip
    rows = [{"case": case, "direction": "fwd", "entries": entries}]
    files = {kind: File(kind, rows, {"device": kind}) for kind in ("fp8", "fp16", "headline")}
    *_, sixteen, eight = table(Evidence(files))
    assert sixteen[2:] == ("flash_ext in fp16 790, in bf16 800 TFLOP/s", "fp16, ?, ?; headline, ?, ?")
    assert eight[2] == "flash_ext in fp8 1300 TFLOP/s, in bf16 805, cuDNN 1100"


def test_shares_of_a_copy_and_of_a_product() -> None:
    """Of bytes and operations over the time, by hand: 2 x 3 heads of 1000 x 1000 pairs, 64 features."""
    row = {"section": "profile", "name": "standard", "shape": [2, 3, 1000, 64], "ms": 2.0,
           "dram_read_bytes": 3e9, "dram_written_bytes": 1e9}  # fmt: skip
    file = File("ladder", [row], {}, {"copy_gbps": 4000.0, "matmul_tflops": 1.0})
    answers = {line[0]: line[2] for line in table(Evidence({"ladder": file}))}
    assert answers["a matrix product reaches 80 to 90 % of the peak"].endswith(": 0 % of 989 TFLOP/s")
    found = answers["standard attention is bound by memory"]
    assert found.endswith("standard, head_dim 64: 50 and 77 %")  # 4 GB in 2 ms, 1.536e9 operations
