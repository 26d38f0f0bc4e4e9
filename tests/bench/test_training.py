"""The training benchmark: its formulas, its models against plain ones, its files, and entrants that fail."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench import timing, training_entrants, training_models, training_report, training_runner
from bench.training_models import ChunkedCrossEntropy, Trainer
from bench.training_record import (
    MODELS,
    SMOKE_MODELS,
    TrainingResults,
    TrainingRow,
    model_flops,
    multiplying_params,
)
from bench.training_runner import Setup

CPU = torch.device("cpu")


def smoke_setup(*entrants: str, **changes) -> Setup:
    setup = Setup(
        list(entrants), timing.CpuTimer(), CPU, torch.float32, "fp32", {"matmul_tflops": 1.0},
        tokens=64, rounds=2, budget_s=0.0, first_steps=3, learning_rate=1e-3,
    )  # fmt: skip
    return replace(setup, **changes)


def smoke_row(name: str, setup: Setup, seqlen: int = 32) -> TrainingRow:
    shape = SMOKE_MODELS[name]
    trainer = Trainer(shape, seqlen, CPU, setup.dtype, setup.learning_rate, setup.checkpointing)
    return training_runner.time_row(trainer, shape, seqlen, setup)


# ---- formulas --------------------------------------------------------------------------------------------


def test_params_by_hand():
    gpt2 = 24 * (4 * 1024**2 + 2 * 1024 * 4096) + 50304 * 1024
    llama = 16 * (2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192) + 128256 * 2048
    assert multiplying_params(MODELS["gpt2-medium"]) == gpt2 == 353_501_184
    assert multiplying_params(MODELS["llama-1b"]) == llama == 1_235_746_816


@pytest.mark.parametrize("name, inner, layers", [("gpt2-medium", 1024, 24), ("llama-1b", 2048, 16)])
@pytest.mark.parametrize("seqlen", [1024, 32768])
def test_flops_of_a_step_by_hand(name: str, inner: int, layers: int, seqlen: int):
    """6 N a token, and 3 times the two products of a causal square: 4 S^2 inner / 2 a layer and sequence."""
    tokens = 32768
    attention = 3 * layers * (tokens // seqlen) * 4 * seqlen**2 * inner / 2
    expected = 6 * multiplying_params(MODELS[name]) * tokens + attention
    assert model_flops(MODELS[name], tokens // seqlen, seqlen) == expected
    per_token = 6 * multiplying_params(MODELS[name]) + 6 * layers * inner * seqlen
    assert model_flops(MODELS[name], tokens // seqlen, seqlen) == per_token * tokens


@pytest.mark.parametrize("name", SMOKE_MODELS)
def test_flops_are_those_of_the_products_that_run(name: str):
    """PyTorch counts the full square of a materialised attention; published formulas count half of it."""
    shape, batch, seqlen = SMOKE_MODELS[name], 2, 32
    trainer = Trainer(shape, seqlen, CPU, torch.float32, 1e-3)
    data = training_runner.make_batch(shape, batch, seqlen, smoke_setup())

    def added_in_place(target, left, right, out_shape=None, **options) -> int:
        """What the counter does not know by itself."""
        return 2 * left[0] * left[1] * right[1]

    mapping = {torch.ops.aten.addmm_: added_in_place}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        trainer.step(*data, training_entrants.materialised)
    other_half = 6 * shape.layers * shape.heads * shape.head_dim * batch * seqlen**2
    assert counter.get_total_flops() == model_flops(shape, batch, seqlen) + other_half


@pytest.mark.parametrize("name", MODELS)
def test_shapes_have_the_published_sizes(name: str):
    published = {"gpt2-medium": 354_823_168, "llama-1b": 1_235_814_400}
    positions = 1024
    with torch.device("meta"):
        model = training_models.Decoder(MODELS[name], positions)
    padding = (50304 - 50257) * 1024 if name == "gpt2-medium" else 0
    assert sum(param.numel() for param in model.parameters()) == published[name] + padding


# ---- models ----------------------------------------------------------------------------------------------


def test_chunked_cross_entropy_is_cross_entropy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_models, "LOGIT_ROWS", 7)
    hidden, weight = torch.randn(20, 8), torch.randn(11, 8)
    targets = torch.randint(11, (20,))
    results = []
    for loss_of in (ChunkedCrossEntropy.apply, lambda h, w, t: F.cross_entropy(h @ w.T, t)):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        loss = loss_of(*leaves, targets)
        results.append((loss.detach(), *torch.autograd.grad(2.0 * loss, leaves)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", SMOKE_MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_entrant_trains_the_same_model(name: str, dtype: torch.dtype):
    pytest.importorskip("flash_ext._C", reason="the extension is not built")
    row = smoke_row(name, smoke_setup("flash_ext", "flash_ext-cpu", "sdpa", "materialised", dtype=dtype))
    assert [entry.status for entry in row.entries] == ["ok"] * 4, [entry.text for entry in row.entries]
    assert [entry.ours for entry in row.entries] == [True, True, False, False]
    results = TrainingResults({}, {"matmul_tflops": 1.0}, [row])
    assert ": within" in training_report.agreement(results), training_report.agreement(results)
    losses = row.entries[0].losses
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("name", SMOKE_MODELS)
def test_a_wrong_mask_shows_in_the_sanity_check(name: str, monkeypatch: pytest.MonkeyPatch):
    def sees_everything(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    attends = {"sdpa": sees_everything, "materialised": training_entrants.materialised}
    monkeypatch.setattr(training_runner, "make_attend", attends.__getitem__)
    row = smoke_row(name, smoke_setup("sdpa", "materialised"))
    line = training_report.agreement(TrainingResults({}, {"matmul_tflops": 1.0}, [row]))
    assert "NOT WITHIN" in line and name in line


def test_reset_goes_back_to_the_start():
    trainer = Trainer(SMOKE_MODELS["gpt2-smoke"], 16, CPU, torch.float32, 1e-2)
    data = training_runner.make_batch(SMOKE_MODELS["gpt2-smoke"], 2, 16, smoke_setup())
    runs = []
    for _ in range(2):
        trainer.reset(5)
        runs.append([trainer.step(*data, training_entrants.materialised).item() for _ in range(3)])
    assert runs[0] == runs[1]
    trainer.reset(6)
    assert trainer.step(*data, training_entrants.materialised).item() != runs[0][0]
    weights = sum(param.numel() for param in trainer.model.parameters())
    counts = 4 * len(list(trainer.model.parameters()))
    assert trainer.state_bytes() == 3 * 4 * weights + counts


# ---- entrants that fail ----------------------------------------------------------------------------------


class Failing:
    """Materialised attention up to a number of calls, then an error."""

    def __init__(self, calls: int, error: Exception) -> None:
        self.calls, self.error = calls, error

    def __call__(self, q, k, v):
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return training_entrants.materialised(q, k, v)


# Two layers: the second layer of the first step, and the second step of the timed ones.
@pytest.mark.parametrize(
    "error, status, calls",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB"), "out of memory", 1),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "out of memory", 3 * 2 + 2),
        (RuntimeError("no kernel image"), "error", 3 * 2 + 2),
    ],
)
def test_a_failing_entrant_stays_its_own_problem(
    error: Exception, status: str, calls: int, monkeypatch: pytest.MonkeyPatch
):
    def make_attend(name):
        return Failing(calls, error) if name == "sdpa" else training_entrants.materialised

    monkeypatch.setattr(training_runner, "make_attend", make_attend)
    row = smoke_row("gpt2-smoke", smoke_setup("sdpa", "materialised"))
    bad, good = row.entries
    assert bad.status == status and str(error) in bad.text and bad.median_ms is None
    assert good.timed and good.steps == 2 and good.losses[0] > good.losses[2]


# ---- whole program ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["attention", "training"])
def test_without_a_gpu_it_says_that_it_needs_one(program: str, monkeypatch: pytest.MonkeyPatch, capsys):
    """Either benchmark would take hours on a CPU; whoever wants that says so."""
    pytest.importorskip("rich")
    parse = importlib.import_module(f"bench.{program}").parse
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refusal:
        parse([])
    assert refusal.value.code not in (0, None) and "no GPU is visible to torch" in capsys.readouterr().err
    assert parse(["--device", "cpu"]).device == "cpu"


def test_whole_training_program_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("rich")
    from bench import training

    arguments = ["--smoke", "--device", "cpu", "--rounds", "2", "--commit", "abc", "--out", str(tmp_path)]
    assert training.main(arguments) == 0
    results = TrainingResults.from_json((tmp_path / "training.json").read_text())
    places = [(row.model, row.seqlen, row.batch) for row in results.rows]
    assert places == [(name, seqlen, 128 // seqlen) for name in SMOKE_MODELS for seqlen in (16, 64)]
    for row in results.rows:
        assert row.entry("materialised").timed and row.entry("sdpa").timed
        assert row.entry("cudnn").status == "error"
    assert results.metadata["commit"] == "abc" and results.metadata["seconds"] > 0
    assert results.metadata["models"]["gpt2-smoke"]["multiplying_params"] == 19456
    printed = capsys.readouterr().out
    assert "Speed, llama-smoke: compared with materialised" in printed or "flash_ext error" in printed
    assert ": within 0.1, 0.5, 2 %" in printed


@pytest.mark.gpu
@pytest.mark.caching
def test_whole_training_program_on_gpu(tmp_path: Path):
    pytest.importorskip("rich")
    from bench import training

    assert training.main(["--smoke", "--device", "cuda", "--out", str(tmp_path)]) == 0
    results = TrainingResults.from_json((tmp_path / "training.json").read_text())
    assert "stopped" not in results.metadata and len(results.rows) == 4
    for row in results.rows:
        for name in ("flash_ext", "sdpa", "materialised"):
            entry = row.entry(name)
            assert entry.timed, entry.text
            assert entry.peak_bytes > entry.step_bytes > 0
    assert ": within" in training_report.agreement(results)
