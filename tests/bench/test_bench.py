"""The benchmark's arithmetic, its files, and its promise that no peer can end a run."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import features, machine, timing
from bench.entrants import Entrant, make_ours
from bench.inputs import Inputs, visible_mask
from bench.peers import Flex, make_peers
from bench.record import Entry, Results, Row, bar
from bench.runner import Setup, run
from bench.shapes import SETS, Case, flops, output_bytes, traffic_bytes, visible_pairs
from flash_ext._ops.extension import build_record
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.built import module_file
from tests.reference import attention_reference, visible_interval

CPU = torch.device("cpu")


def spec_of(case: Case) -> AttnSpec:
    left, right = case.window
    return AttnSpec(default_scale(case.head_dim), left, 0 if case.causal else right)


Truth = tuple[torch.Tensor, tuple[torch.Tensor, ...]]


def truth(inputs: Inputs) -> Truth:
    """out and the gradients of q, k and v in float64."""
    leaves = [t.detach().double().requires_grad_() for t in inputs.qkv]
    out, _ = attention_reference(*leaves, spec_of(inputs.case), inputs.cu_seqlens, inputs.cu_seqlens)
    return out.detach(), torch.autograd.grad(out, leaves, inputs.dout.double())


def assert_solves(
    entrant: Entrant,
    inputs: Inputs,
    truth: Truth,
    directions: Iterable[str],
    *,
    atol: float = 1e-5,
    heads_first: bool = False,
    learned: bool = True,
) -> None:
    """A column's out and its gradients are those of the truth, forward within 1e-5.

    Args:
        atol: of gradients.
        heads_first: the column has PyTorch's layout.
        learned: the gradient behind those of q, k and v has the meaning of the truth's.
    """
    out, grads = truth
    for direction in directions:
        result = entrant.prepare(inputs, direction)()
        found, expected = ((result,), (out,)) if direction == "fwd" else (result, grads)
        assert len(found) == len(expected)
        tolerance = 1e-5 if direction == "fwd" else atol
        for at, (mine, right) in enumerate(zip(found[: None if learned else 3], expected)):
            if heads_first and at < 3:
                mine = mine.transpose(1, 2)
            torch.testing.assert_close(mine.double(), right.double(), rtol=1e-4, atol=tolerance)


# ---- shapes --------------------------------------------------------------------------------------------


def test_headline_is_the_published_36_rows():
    expected = {
        (d, causal, s, 16384 // s, 2048 // d)
        for d in (64, 128, 256)
        for causal in (False, True)
        for s in (512, 1024, 2048, 4096, 8192, 16384)
    }
    rows = [(c.head_dim, c.causal, c.seqlen_q, c.batch, c.num_heads) for c in SETS["headline"]]
    assert len(rows) == 36
    assert set(rows) == expected
    assert all(c.seqlen_k == c.seqlen_q and c.head_dim_v == c.head_dim for c in SETS["headline"])
    assert len({c.panel for c in SETS["headline"]}) == 6


@pytest.mark.parametrize("case", SETS["headline"], ids=lambda case: case.name)
def test_headline_flops_are_4bhssd_halved_when_causal(case: Case):
    work = 4 * case.batch * case.num_heads * case.seqlen_q * case.seqlen_k * case.head_dim
    assert flops(case, "fwd") == (work / 2 if case.causal else work)
    assert flops(case, "bwd") == 2.5 * flops(case, "fwd")
    assert flops(case, "both") == 3.5 * flops(case, "fwd")


def test_flops_agree_with_the_matrix_products_of_plain_attention():
    """PyTorch counts a materialised attention; our backward recomputes QK^T on top of its products."""
    case = Case("uneven", 2, 24, 40, 3, 3, 16, 8)
    q, k, v, dout = (t.requires_grad_() for t in Inputs(case, torch.float32, CPU, 0).bhsd)
    with FlopCounterMode(display=False) as forward:
        out = torch.softmax(q @ k.mT, -1) @ v
    with FlopCounterMode(display=False) as backward:
        out.backward(dout.detach())
    assert flops(case, "fwd") == forward.get_total_flops()
    recomputed = 2 * case.batch * case.num_heads * case.seqlen_q * case.seqlen_k * case.head_dim
    assert flops(case, "bwd") == backward.get_total_flops() + recomputed


@pytest.mark.parametrize(
    "case", [c for name in ("around", "shapes", "smoke") for c in SETS[name]], ids=lambda case: case.name
)
def test_visible_pairs_follow_the_mask(case: Case):
    spec = spec_of(case)
    exact = 0
    for sq, sk in [(n, n) for n in case.lengths] or [(case.seqlen_q, case.seqlen_k)]:
        exact += sum(max(0, hi - lo) for lo, hi in (visible_interval(spec, row, sq, sk) for row in range(sq)))
    exact *= 1 if case.packed else case.batch
    # A causal square is published as half of the full one: it differs by half a diagonal.
    squares = case.lengths or ((case.seqlen_q,) * case.batch if case.seqlen_q == case.seqlen_k else ())
    diagonal = sum(squares) / 2 if case.causal and case.window == (-1, -1) else 0
    assert visible_pairs(case) == exact - diagonal


@pytest.mark.parametrize("case", SETS["smoke"], ids=lambda case: case.name)
def test_bytes_are_those_of_the_tensors(case: Case):
    inputs = Inputs(case, torch.bfloat16, CPU, 0)
    q, k, v, dout = (t.numel() * 2 for t in (*inputs.qkv, inputs.dout))
    lse = 4 * inputs.q.shape[:-1].numel()
    assert output_bytes(case, "fwd", 2) == dout + lse  # out has the shape of dout
    assert output_bytes(case, "bwd", 2) == q + k + v
    assert traffic_bytes(case, "fwd", 2) == q + k + v + dout + lse
    assert traffic_bytes(case, "bwd", 2) == 2 * (q + k + v) + 2 * dout + lse
    for measure in (output_bytes, traffic_bytes):
        assert measure(case, "both", 2) == measure(case, "fwd", 2) + measure(case, "bwd", 2)


# ---- what is timed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in SETS["smoke"] if not c.packed], ids=lambda case: case.name)
def test_sdpa_peer_solves_the_same_problem(case: Case):
    """A peer that is given another mask or scale would be timed on other work than ours."""
    inputs = Inputs(case, torch.float32, CPU, 0)
    (peer,), _ = make_peers(["math"])
    assert_solves(peer, inputs, truth(inputs), ("fwd", "bwd", "both"), heads_first=True)


@pytest.mark.parametrize("case", SETS["smoke"], ids=lambda case: case.name)
def test_flex_mask_is_the_same_mask(case: Case):
    inputs = Inputs(case, torch.float32, CPU, 0)
    seen = Flex._mask_mod(inputs) or features.everything
    rows, cols = torch.arange(case.total_q if case.packed else case.seqlen_q), None
    cols = torch.arange(case.total_k if case.packed else case.seqlen_k)
    mask = seen(0, 0, rows[:, None], cols[None, :]).expand(len(rows), len(cols))
    if not case.packed:
        assert torch.equal(mask, visible_mask(case, CPU))
        return
    blocks = []
    for length in case.lengths:
        blocks.append(visible_mask(Case("", 1, length, length, 1, 1, 8, 8, causal=case.causal), CPU))
    assert torch.equal(mask, torch.block_diag(*blocks).bool())


@pytest.mark.parametrize("case", SETS["smoke"], ids=lambda case: case.name)
def test_ours_is_timed_on_every_smoke_case(case: Case):
    """Needs the built extension; the CPU path stands in for the GPU's."""
    pytest.importorskip("flash_ext._C", reason="the extension is not built")
    inputs = Inputs(case, torch.float32, CPU, 0)
    for entrant in make_ours(["cpu"]):
        if entrant.takes(case):
            assert_solves(entrant, inputs, truth(inputs), entrant.directions)


# ---- timing and failures ---------------------------------------------------------------------------------


class ScriptedTimer:
    """Answers with given times and remembers who was launched, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.lost = False

    def launch(self, call, count):
        times = [call() for _ in range(count)]
        self.order.append(call.__name__)
        return times, 5.0

    def synchronize(self):
        if self.lost:
            raise RuntimeError("the device is gone")

    def peak_bytes(self, call):
        return 10_000_000

    def release(self):
        pass


class Scripted(Entrant):
    """Takes a given time per launch, or fails where it is told to."""

    def __init__(
        self, name: str, ms: float, *, fail_at: str = "", timer: ScriptedTimer | None = None
    ) -> None:
        self.name, self.ms, self.fail_at, self.timer, self.launches = name, ms, fail_at, timer, 0

    def why_not(self, case, direction):
        return "it does not do that" if self.fail_at == "why_not" else ""

    def prepare(self, inputs, direction):
        if self.fail_at == "prepare":
            raise ImportError("no such library")

        def call() -> float:
            self.launches += 1
            if self.fail_at == "launch" or (self.fail_at == "later" and self.launches > 8):
                if self.timer is not None:
                    self.timer.lost = True
                raise RuntimeError("illegal memory access")
            return self.ms

        call.__name__ = self.name
        return call


def scripted_run(entrants: list[Entrant], timer: ScriptedTimer, *, time_limit_s: float = 1e9) -> Results:
    results = Results({}, {"matmul_tflops": 100.0, "copy_gbps": 1000.0})
    setup = Setup(entrants, timer, CPU, torch.float32, results.ceilings, 4, 0.0, time_limit_s=time_limit_s)
    run(results, SETS["smoke"][:2], ["fwd", "bwd"], setup, lambda row: None)
    return results


@pytest.mark.parametrize("fail_at", ["why_not", "prepare", "launch", "later"])
def test_a_failing_peer_stays_its_own_problem(fail_at: str):
    results = scripted_run([Scripted("good", 2.0), Scripted("bad", 1.0, fail_at=fail_at)], ScriptedTimer())
    assert len(results.rows) == 4 and "stopped" not in results.metadata
    for row in results.rows:
        assert row.entry("good").status == "ok"
        assert row.entry("good").launches == 4 * timing.MIN_LAUNCHES_PER_ROUND
        assert row.entry("bad").status == ("refused" if fail_at == "why_not" else "error")
        assert row.entry("bad").median_ms is None and row.entry("bad").peak_bytes is None
        words = {"why_not": "does not do that", "prepare": "ImportError: no such library"}
        assert words.get(fail_at, "RuntimeError: illegal memory access") in row.entry("bad").text


def test_a_lost_device_ends_the_run_with_what_is_there():
    timer = ScriptedTimer()
    results = scripted_run([Scripted("bad", 1.0, fail_at="later", timer=timer)], timer)
    assert results.rows == [] and "illegal memory access" in results.metadata["stopped"]


def test_entry_figures_follow_from_the_median():
    row = scripted_run([Scripted("good", 2.0)], ScriptedTimer()).rows[0]
    entry = row.entry("good")
    assert (entry.q1_ms, entry.median_ms, entry.q3_ms) == (2.0, 2.0, 2.0)
    assert entry.round_medians_ms == [2.0] * 4 and entry.call_us == 5.0
    assert entry.tflops == pytest.approx(row.flops / 2e-3 / 1e12)
    assert entry.gbps == pytest.approx(row.traffic_bytes / 2e-3 / 1e9)
    assert entry.matmul_pct == pytest.approx(entry.tflops) and entry.copy_pct == pytest.approx(
        entry.gbps / 10
    )
    assert entry.extra_bytes == 10_000_000 - output_bytes(row.case, "fwd", 4)


def test_a_long_call_is_launched_once_a_round_and_three_times_in_all():
    slow = 2e3 * timing.LONG_CALL_S
    row = scripted_run([Scripted("good", 2.0), Scripted("slow", slow)], ScriptedTimer()).rows[0]
    assert row.entry("slow").launches == timing.LAUNCHES_OF_LONG_CALL == 3
    assert row.entry("good").launches == 4 * timing.MIN_LAUNCHES_PER_ROUND


def test_quartiles_pool_all_rounds():
    samples = timing.Samples(rounds=[[1.0, 9.0, 2.0], [4.0, 3.0]])
    assert samples.quartiles() == (2.0, statistics.median([1, 9, 2, 4, 3]), 4.0)
    assert samples.round_medians() == [2.0, 3.5]
    assert timing.Samples(rounds=[[1.5]]).quartiles() == (1.5, 1.5, 1.5)


# ---- files -----------------------------------------------------------------------------------------------


def synthetic(ratio_of_row=lambda index: 1.1) -> Results:
    """A finished headline run: the peer takes 1 ms, ours 1 ms over the row's ratio; one peer cell failed."""
    rows = []
    for direction in ("fwd", "bwd"):
        for index, case in enumerate(SETS["headline"]):
            row = Row(case, direction, "bf16", flops(case, direction), traffic_bytes(case, direction, 2))
            for name, ms in (("sm80", 1.0 / ratio_of_row(index)), ("fa2", 1.0)):
                row.entries.append(
                    Entry(
                        name, name == "sm80", median_ms=ms, q1_ms=0.9 * ms, q3_ms=1.2 * ms,
                        round_medians_ms=[ms, ms], launches=60, call_us=20.0, tflops=row.flops / ms * 1e-9,
                        matmul_pct=40.0, gbps=1.0, copy_pct=1.0, peak_bytes=4 << 20, extra_bytes=1 << 20,
                    )
                )  # fmt: skip
            row.clocks = (1500.0, 690.0)
            rows.append(row)
    rows[3].entries.append(Entry("fa3", status="error", text="RuntimeError: line one\nline two | end"))
    metadata = {"device": "a GPU", "torch": "2.0", "date": "2026-01-01", "commit": "abc", "dirty": False}
    host_cost = [{"call": "attention", "us": 1.6}]
    return Results(metadata, {"matmul_tflops": 700.0, "copy_gbps": 4000.0}, rows, host_cost)


def test_bar_is_the_geometric_mean_and_the_worst_row():
    summary, backward = bar(synthetic(lambda index: 2.0 if index % 2 else 0.5))
    assert (summary.direction, backward.direction) == ("fwd", "bwd")
    assert len(summary.ratios) == 36
    assert summary.geomean == pytest.approx(1.0) and summary.worst == ("d64-full-s512", 0.5)
    assert not summary.holds() and summary.holds(worst=0.5)
    assert all(b.holds() for b in bar(synthetic(lambda index: 0.901 if index == 7 else 1.05)))
    assert not any(b.holds() for b in bar(synthetic(lambda index: 0.89 if index == 7 else 1.05)))
    assert not any(b.holds() for b in bar(synthetic(lambda index: 0.99)))


def test_bar_counts_a_row_that_only_ours_failed():
    results = synthetic()
    results.rows[5].entries[0] = Entry("sm80", True, status="error", text="nothing fits")
    results.rows[6].entries[1] = Entry("fa2", status="refused", text="not here")
    summary = bar(results)[0]
    assert summary.missing == [results.rows[5].case.name] and len(summary.ratios) == 34
    assert not summary.holds() and "did not run d64-full-s16384" in str(summary)


# ---- whole programs --------------------------------------------------------------------------------------

# Every set whose rows take the same columns, and of the last two what differs from row to row.
TRIED = {
    "smoke": "smoke-*-s32",
    "smoke-features": "*-plain,*-window,*-bias-grad,*-bias-batch,*-softcap,*-sinks,*-dropout,*-64-half",
    "smoke-models": "smoke-swin-shifted,*gpt-oss*",
}


def run_program(folder: Path, sets: str, *options: str) -> list[Row]:
    pytest.importorskip("rich")
    from bench import attention

    common = ["--set", sets, "--rounds", "1", "--budget", "0", "--dirs", "fwd,bwd", "--out", str(folder)]
    assert attention.main([*common, *options]) == 0
    results = Results.from_json((folder / "results.json").read_text())
    assert results.rows and "stopped" not in results.metadata
    assert results.host_cost and all(row["us"] > 0 for row in results.host_cost), results.host_cost
    return results.rows


@pytest.mark.usefixtures("few_calls")
def test_whole_program_on_cpu(tmp_path: Path):
    options = ("--device", "cpu", "--peers", "math", "--cases", ",".join(TRIED.values()))
    rows = run_program(tmp_path, ",".join(TRIED), *options)
    for row in rows:
        cannot = {row.case.feature, *row.case.asks} & {"softcap", "sinks", "softcap-50"}
        assert row.entry("cpu").status == "ok", row.entry("cpu").text
        assert row.entry("math").status == ("refused" if cannot else "ok")
    assert len(rows) > 25 and {bool(row.case.feature) for row in rows} == {True, False}


@pytest.mark.gpu
@pytest.mark.caching
@pytest.mark.parametrize("name", TRIED)
def test_whole_program_on_gpu(name: str, tmp_path: Path):
    path = "auto" if name == "smoke-models" else "sm80"
    for row in run_program(tmp_path, name, "--paths", path, "--peers", "mem"):
        entry = row.entry(path)
        assert entry.status == "ok", (row.case.name, entry.text)
        assert entry.median_ms > 0 and all("WrongResult" not in other.text for other in row.entries)
        if name == "smoke" and row.direction == "fwd":
            assert entry.extra_bytes <= 1 << 20  # out, lse and at most 1 MB
        if name == "smoke-features":
            assert entry.tiles > 0 and entry.of_plain > 0 and entry.tile_scores >= row.pairs


def test_a_run_records_the_hash_of_its_kernel_sources():
    """Its commit may be that of an older tree, where the build was made before the commit."""
    facts = machine.collect(CPU, "told from outside")
    assert facts["commit"] == "told from outside"
    assert facts["build_sources"] == build_record(module_file())["sources"]


# ---- accuracy ------------------------------------------------------------------------------------------


@pytest.fixture
def accuracy() -> ModuleType:
    return pytest.importorskip("bench.accuracy")  # without rich it is not there


def test_accuracy_errors_are_those_of_rounding(accuracy: ModuleType):
    for case in accuracy.CASES:
        small = dataclasses.replace(case, seqlen_q=64, seqlen_k=64)
        inputs = accuracy.make_inputs(small, torch.float32, CPU, seed=0)
        assert (max(t.abs().max() for t in inputs.qkv) > 8) == ("outliers" in case.name)
        errors = accuracy.measure([*make_ours(["cpu"])[:1], *make_peers(["math"])[0]], inputs)
        assert all(e < 1e-5 for column in errors.values() for e in column.values()), errors


def test_accuracy_notices_a_wrong_tensor_and_keeps_a_failure(accuracy: ModuleType):
    class Wrong(Entrant):
        name = "wrong"

        def prepare(self, inputs, direction):
            good = make_ours(["cpu"])[0].prepare(inputs, direction)
            return good if direction == "fwd" else lambda: [1.25 * t for t in good()]

    class Broken(Entrant):
        name = "broken"

        def prepare(self, inputs, direction):
            raise RuntimeError("no such kernel")

    case = dataclasses.replace(accuracy.CASES[0], seqlen_q=32, seqlen_k=32)
    inputs = accuracy.make_inputs(case, torch.float32, CPU, seed=0)
    errors = accuracy.measure([*make_ours(["cpu"])[:1], Wrong(), Broken()], inputs)
    assert errors["wrong"]["out"] < 1e-5
    assert errors["wrong"]["dk"] == pytest.approx(0.25, rel=1e-3)
    assert errors["broken"] == "RuntimeError: no such kernel"
    (said,) = accuracy.comparisons({case.name: errors}, "wrong")
    assert said.startswith("wrong against cpu") and said.endswith("4 tensors")
