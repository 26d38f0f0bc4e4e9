"""The sets ``fp8``: what they hold, how the peers are called, and the errors that a run finds."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bench import fp8_report, report
from bench.colours import COLOURS, label_of
from bench.entrants import Entrant, make_ours
from bench.fp8_report import ErrorRow, Errors
from bench.inputs import Inputs
from bench.peers import make_peers
from bench.peers_fp8 import E4M3, FP8_PEERS, CudnnFp8, Fa3Fp8, per_head, per_tensor
from bench.plots import plot
from bench.record import Entry, Results, Row
from bench.shapes import SETS, Case, flops, traffic_bytes
from flash_ext.fp8 import Fp8Inputs, attention_fp8
from tests.bench.test_bench import run_program

CPU = torch.device("cpu")
COLUMNS = ("auto", "fp8", "mixed", "fp8+quantise", *FP8_PEERS)
CASE = Case("grouped", 2, 96, 160, 4, 2, 32, 32)
SQUARE = Case("square", 2, 96, 96, 4, 4, 32, 32, causal=True)


@pytest.fixture
def attention() -> ModuleType:
    return pytest.importorskip("bench.attention")  # without rich it is not there


@pytest.fixture
def accuracy() -> ModuleType:
    return pytest.importorskip("bench.accuracy")


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Attention of (b, s, h, d) in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


# ---- cases and columns -----------------------------------------------------------------------------------


def test_the_set_has_these_forwards():
    rows = {(c.head_dim, c.num_heads, c.batch, c.seqlen_q, c.causal) for c in SETS["fp8"]}
    assert rows == {
        (d, 2048 // d, 16384 // s, s, causal)
        for d in (64, 128, 256) for s in (1024, 4096, 16384) for causal in (False, True)
    }  # fmt: skip
    assert len(SETS["fp8"]) == 18 and len({c.panel for c in SETS["fp8"]}) == 6
    assert all(c.directions == ("fwd",) and c.seqlen_k == c.seqlen_q for c in SETS["fp8"])
    assert not {c.panel for c in SETS["fp8"]} & {c.panel for c in SETS["headline"]}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_columns_of_the_set(attention: ModuleType, device: str):
    options = attention.parse(["--set", "fp8", "--device", device])
    assert options.paths == "auto,fp8,mixed,fp8+quantise" and options.dtype == "bf16"
    assert options.peers == (",".join(FP8_PEERS) if device == "cuda" else "")
    every = attention.parse(["--set", "fp8", "--device", device, "--peers", "all"]).peers.split(",")
    assert set(FP8_PEERS) <= set(every) or device == "cpu"
    other = attention.parse(["--set", "fp8,around", "--device", device, "--paths", "sm80"])
    assert not set(other.peers.split(",")) & set(FP8_PEERS)


def test_columns_stand_where_they_are_served():
    served = {e.name: [c.head_dim for c in SETS["fp8"] if e.takes(c)] for e in make_ours(["fp8", "mixed"])}
    assert set(served["fp8"]) == {64, 128, 256} and set(served["mixed"]) == {64, 128}
    (rotated,) = make_ours(["fp8-hadamard"])
    assert rotated.takes(CASE) and not rotated.takes(Case("", 1, 8, 8, 1, 1, 96, 96))


def test_colours_of_the_columns():
    labels = [label_of(name, "auto") for name in (*COLUMNS, "fp8-hadamard")]
    assert labels[0] == "flash_ext" and len({COLOURS[label] for label in labels}) == len(labels)


# ---- what the peers get ----------------------------------------------------------------------------------


def test_a_factor_for_each_key_head():
    q, k, _ = Inputs(CASE, torch.bfloat16, CPU, 0).qkv
    q[0, :, 2:] *= 100
    k[1, :, 1] = 0
    for t in (q, k):
        rounded, descale = per_head(t, 2)
        groups = t.float().unflatten(2, (2, -1))
        largest = groups.abs().amax((1, 3, 4))
        assert rounded.dtype == E4M3 and rounded.shape == t.shape and rounded.is_contiguous()
        assert torch.equal(descale, torch.where(largest > 0, largest / 448, 1.0))
        back = rounded.float().unflatten(2, (2, -1)) * descale[:, None, :, None, None]
        assert ((back - groups).abs() <= groups.abs() / 15 + descale[:, None, :, None, None] / 512).all()


def test_a_factor_for_each_tensor():
    q = Inputs(CASE, torch.bfloat16, CPU, 0).q
    rounded, descale = per_tensor(q)
    assert descale.shape == (1, 1, 1, 1) and rounded.float().abs().max() == 448
    assert error_of(rounded.float() * descale, q.double()) < 0.03


def test_what_is_missing_is_reported():
    found, absent = make_peers(["fa3-fp8"], fa3_fp8_lib="/nowhere/lib.so")
    assert not found and "/nowhere/lib.so" in absent["fa3-fp8"]


SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, int num_splits, int cp_world_size) -> Tensor[]"
)


def packed_attention(q, k, v, k_new, out, cu_q, cu_k, max_q, max_k, dq, dk, dv, scale, causal, *rest):
    """What the op does, in float64 and for sequences of one length."""
    assert q.dtype == k.dtype == v.dtype == E4M3 and k_new is out is None and rest == (-1, -1, 0.0, 1, 1)
    assert scale == q.shape[-1] ** -0.5
    batch = len(cu_q) - 1
    assert cu_q.tolist() == [max_q * i for i in range(batch + 1)] and cu_q.dtype == torch.int32
    assert cu_k.tolist() == [max_k * i for i in range(batch + 1)]
    heads_k = k.shape[1]
    assert dq.shape == dk.shape == dv.shape == (batch, heads_k)
    numbers = []
    for t, descale in ((q, dq), (k, dk), (v, dv)):
        groups = t.double().unflatten(0, (batch, -1)).unflatten(2, (heads_k, -1))
        numbers.append((groups * descale[:, None, :, None, None]).flatten(2, 3))
    return [exact(*numbers, causal).flatten(0, 1).bfloat16(), q.new_empty(0, dtype=torch.float32)]


@pytest.mark.parametrize("case", [CASE, SQUARE], ids=lambda case: case.name)
def test_flash_attention_3_is_called_right(case: Case, monkeypatch: pytest.MonkeyPatch):
    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("fwd", packed_attention, "CPU")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    try:
        inputs, peer = Inputs(case, torch.bfloat16, CPU, 0), Fa3Fp8("a library")
        out = peer.prepare(inputs, "fwd")()
        assert not peer.why_not(case, "fwd") and out.shape == inputs.dout.shape
        assert 0.01 < error_of(out, exact(*inputs.qkv, case.causal)) < 0.06
    finally:
        library._destroy()


class FakeTensor(SimpleNamespace):
    """A tensor of a graph: setters that return it, and a number."""

    def __getattr__(self, name: str):
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value):
            setattr(self, name[4:], value)
            return self

        return setter

    def get_uid(self) -> int:
        return id(self)


class FakeGraph:
    """cuDNN's graph as far as it is asked for, which attends in float64 on the CPU. Like Hopper's it returns
    e4m3 only."""

    def __init__(self, **types) -> None:
        self.built: list[str] = []

    def tensor(self, **about) -> FakeTensor:
        return FakeTensor(**about)

    def sdpa_fp8(self, *tensors, attn_scale, use_causal_mask, generate_stats, name):
        assert not generate_stats
        self.inputs, self.scale, self.causal = tensors, attn_scale, use_causal_mask
        self.out, *self.largest = (FakeTensor() for _ in range(3))
        return self.out, None, *self.largest

    def validate(self) -> None:
        if self.out.data_type != "e4m3":
            raise RuntimeError("bf16 is only supported on Blackwell")

    def __getattr__(self, name: str):
        if name not in ("build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            raise AttributeError(name)
        return lambda *modes: self.built.append(name)

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, buffers, workspace, handle) -> None:
        assert self.built[-1] == "build_plans" and handle == 7 and workspace.numel()
        assert buffers.keys() == {t.get_uid() for t in (*self.inputs, self.out, *self.largest)}
        given = [buffers[t.get_uid()] for t in self.inputs]
        for t, place in zip((*given[:3], buffers[self.out.get_uid()]), (*self.inputs[:3], self.out)):
            seen = t.transpose(1, 2)  # as (batch, heads, seqlen, size)
            assert seen.shape == tuple(place.dim) and seen.stride() == tuple(place.stride)
        q, k, v = (t.double() * d.double() for t, d in zip(given[:3], given[3:6]))
        descale_weights, scale_weights, scale_out = (t.item() for t in given[6:])
        assert descale_weights * scale_weights == 1
        assert self.scale == q.shape[-1] ** -0.5
        scaled = exact(q, k, v, self.causal) * scale_out
        assert scaled.abs().max() <= 448
        buffers[self.out.get_uid()].copy_(scaled.to(E4M3))


@pytest.mark.parametrize("case", [CASE, SQUARE], ids=lambda case: case.name)
def test_cudnn_is_called_right(case: Case, monkeypatch: pytest.MonkeyPatch):
    streams = []
    fake = ModuleType("cudnn")
    fake.pygraph, fake.create_handle = FakeGraph, lambda: 7
    fake.set_stream = lambda handle, stream: streams.append(stream)
    fake.data_type = SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32", BFLOAT16="bf16")
    fake.heur_mode = SimpleNamespace(A=0, FALLBACK=1)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    inputs, peer = Inputs(case, torch.bfloat16, CPU, 0), CudnnFp8()
    assert not peer.why_not(case, "fwd")
    call = peer.prepare(inputs, "fwd")
    out = call()
    assert out.dtype == E4M3 and out.shape == inputs.dout.shape and set(streams) == {5}
    assert 150 < out.float().abs().max() <= 448  # no bit of the range is given away
    assert 0.02 < error_of(out.double() * call.descale_out, exact(*inputs.qkv, case.causal)) < 0.06


def test_a_graph_that_cannot_be_built_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    fake = ModuleType("cudnn")
    fake.pygraph, fake.create_handle = FakeGraph, lambda: 7
    fake.data_type = SimpleNamespace(FP8_E4M3="neither", FLOAT="fp32", BFLOAT16="bf16")
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    with pytest.raises(RuntimeError, match="only supported on Blackwell"):
        CudnnFp8().prepare(Inputs(CASE, torch.bfloat16, CPU, 0), "fwd")
    assert "Traceback" in capsys.readouterr().err


# ---- errors ----------------------------------------------------------------------------------------------


class OneFactorAHead(Entrant):
    """Our arithmetic on what a factor for each key head leaves of the inputs: no blocks, no means."""

    name = "naive"

    def prepare(self, inputs, direction):
        names = ("q_descale", "k_descale", "v_descale")
        (q, k, v), factors = zip(*(per_head(t, inputs.case.num_heads_k) for t in inputs.qkv))
        return lambda: attention_fp8(Fp8Inputs.of(q, k, v, **dict(zip(names, factors))))


def test_errors_are_those_of_fp8(accuracy: ModuleType):
    errors = {}
    for kind in ("normal", "outliers", "outlier-channels", "peaked", "values-mean-1", "values-clustered"):
        inputs = accuracy.fp8_accuracy.make_inputs(kind, 384, 640, 2, torch.bfloat16, CPU, seed=0)
        entrants = [*make_ours(list(fp8_report.OURS)), OneFactorAHead()]
        errors[kind] = accuracy.fp8_accuracy.measure(entrants, inputs)
    assert all(isinstance(e, float) for row in errors.values() for e in row.values()), errors
    for kind in ("outliers", "values-mean-1"):
        assert errors[kind]["fp8"] < errors[kind]["naive"]
    for kind in ("outliers", "outlier-channels"):
        assert errors[kind]["mixed"] < errors[kind]["fp8-hadamard"] < errors[kind]["fp8"]
    assert 4 < errors["normal"]["fp8"] < 6 and 2 < errors["normal"]["mixed"] < 4.5
    assert 6 < errors["peaked"]["fp8"] < 10 and errors["peaked"]["mixed"] < 3
    assert errors["values-mean-1"]["fp8"] < 1 and errors["values-clustered"]["fp8"] < 1


def test_the_truth_is_that_of_the_sampled_rows(accuracy: ModuleType):
    runner = accuracy.fp8_accuracy
    inputs = runner.make_inputs("values-mean-1", 600, 700, 2, torch.bfloat16, CPU, seed=0)
    rows = runner.sampled_rows(inputs)
    assert len(rows) == 256 == len(rows.unique()) and rows.max() < 600
    assert error_of(runner.truth(inputs, rows), exact(*inputs.qkv)[:, rows]) < 1e-12
    assert inputs.v.float().mean() == pytest.approx(1, abs=0.02)


def test_a_failing_peer_leaves_words(accuracy: ModuleType):
    class Broken(Entrant):
        name = "broken"

        def prepare(self, inputs, direction):
            raise RuntimeError("no such kernel")

    inputs = accuracy.fp8_accuracy.make_inputs("normal", 32, 32, 1, torch.bfloat16, CPU, seed=0)
    assert accuracy.fp8_accuracy.measure([Broken()], inputs) == {"broken": "RuntimeError: no such kernel"}


def synthetic_errors(fp8: float = 4.9) -> Errors:
    row = {"fp8": fp8, "fp8-hadamard": 4.8, "mixed": 2.9, "cudnn-fp8": "RuntimeError: no", "fa3-fp8": 6.0}
    kinds = ("normal", "outliers", "peaked", "values-mean-1")
    rows = [ErrorRow(kind, 4096, 4096, dict(row)) for kind in kinds]
    rows.append(ErrorRow("values-mean-1", 512, 131072, row | {"fp8": 0.25}))
    return Errors({"device": "a GPU", "torch": "2.0", "date": "2026-01-01", "head_dim": 128}, rows)


def test_demands_are_those_of_the_lengths():
    demands = fp8_report.demands(synthetic_errors())
    assert len(demands) == 11 and all(demand.holds for demand in demands)
    assert [str(d) for d in fp8_report.demands(synthetic_errors(5.1)) if not d.holds] == [
        "normal, 4096 keys: fp8 5.1 %, limit 5 %: does not hold"
    ]
    assert all(not d.holds for d in fp8_report.demands(synthetic_errors(float("nan"))) if d.column == "fp8"
               and "131072" not in d.where)  # fmt: skip
    short = ErrorRow("normal", 256, 256, {"fp8": 50.0})
    assert not fp8_report.demands(Errors({}, [short]))


def test_the_report_rebuilds_table_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib")
    path, errors = tmp_path / "accuracy-fp8.json.gz", synthetic_errors()
    path.write_bytes(gzip.compress(errors.to_json().encode()))
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert Errors.from_json((tmp_path / "out" / "accuracy-fp8.json").read_text()) == errors
    assert (tmp_path / "out" / "accuracy-fp8.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert (
        "| normal | 4096 | 4096 | 4.9 | 4.8 | 2.9 |  | 6 |" in said and "cudnn-fp8: RuntimeError: no" in said
    )
    monkeypatch.setattr(fp8_report, "plot", lambda errors, path: [])  # one picture is enough
    path.write_bytes(gzip.compress(synthetic_errors(5.1).to_json().encode()))
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 1


def test_pictures(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = []
    for case in SETS["fp8"]:
        row = Row(case, "fwd", "bf16", flops(case, "fwd"), traffic_bytes(case, "fwd", 2))
        numbers = {"q1_ms": 0.9, "median_ms": 1.0, "q3_ms": 1.1, "tflops": row.flops * 1e-9}
        row.entries = [Entry(name, name not in FP8_PEERS, **numbers) for name in COLUMNS]
        rows.append(row)
    assert plot(Results({}, {"matmul_tflops": 700.0}, rows), tmp_path) == [tmp_path / "forward.png"]


# ---- whole programs --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_calls")
def test_whole_program_on_cpu(tmp_path: Path):
    for row in run_program(tmp_path, "smoke-fp8", "--device", "cpu"):
        assert [entry.name for entry in row.entries] == ["auto", "fp8", "mixed", "fp8+quantise"]
        assert row.direction == "fwd" and row.dtype == "bf16"
        assert all(entry.status == "ok" for entry in row.entries), row


def test_accuracy_program_on_cpu(accuracy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, runner = tmp_path / "errors.json", accuracy.fp8_accuracy
    rows = runner.rows_of(True)
    assert len(rows) == 16
    monkeypatch.setattr(runner, "rows_of", lambda smoke: rows[::2])  # each kind once, and a long row
    common = ["--set", "fp8", "--device", "cpu"]
    assert accuracy.main([*common, "--smoke", "--peers", "none", "--out", str(path)]) == 0
    errors = Errors.from_json(path.read_text())
    assert [(row.inputs, row.seqlen_q, row.seqlen_k) for row in errors.rows] == rows[::2]
    assert {row.inputs for row in errors.rows} == set(runner.KINDS)
    assert all(0.1 < e < 15 for row in errors.rows for e in row.errors.values())
    assert json.loads(path.read_text())["metadata"]["device"] == "CPU"
    for wrong in ([], ["--smoke", "--seqlen", "64"], ["--smoke", "--dtype", "fp32"]):
        with pytest.raises(SystemExit):
            accuracy.parse([*common, *wrong])
    with pytest.raises(SystemExit):
        accuracy.parse(["--smoke"])
