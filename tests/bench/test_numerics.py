"""Errors over many keys: the program on small sizes, and that it notices what it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import flash_ext
from bench import numerics
from flash_ext import AuxOutput
from tests.harness import Target, on_gpu_paths

CPU = torch.device("cpu")


def test_the_program_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "out" / "numerics.json"
    assert numerics.main(["--smoke", "--device", "cpu", "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["metadata"]["device"] == "CPU"
    sizes = numerics.SMOKE
    assert [(row["keys"], row["data"], row["call"]) for row in record["long"]] == [
        (keys, data, call) for keys in sizes.keys for data in numerics.DATA for call in ("plain", "mask")
    ]
    assert all(row["lse"] < 2e-6 and row["out"] < 2**-8 > row["naive"] for row in record["long"])
    assert [(row["keys"], row["worst"], row["share"]) for row in record["constant"]] == [
        (keys, 0, 0) for keys in sizes.constant_keys for _ in range(2)
    ]
    assert len(capsys.readouterr().out.splitlines()) == len(record["long"]) + len(record["constant"])


def test_alike_keys_weigh_the_same_but_two() -> None:
    q, k, _ = numerics.make_inputs(numerics.SMOKE, 100, "alike", CPU)
    scores = (q[:, 0].double() @ k[:, 0].double().T) * numerics.SMOKE.head_dim**-0.5
    assert torch.allclose(scores[:, [0, 68]], torch.ones(()).double(), atol=1e-2)
    assert scores.count_nonzero() == 2 * len(q)


def test_errors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = flash_ext.attention

    def wrong(*tensors: torch.Tensor, return_aux=None, **options):
        if return_aux is None:
            return (1 + 2**-7) * attention(*tensors, **options)
        out, (lse, _) = attention(*tensors, return_aux=return_aux, **options)
        return 1.25 * out, AuxOutput(lse + 1e-3, None)

    monkeypatch.setattr(flash_ext, "attention", wrong)
    for row in numerics.measure(numerics.SMOKE, ["cpu"], CPU):
        assert row["lse"] == pytest.approx(1e-3, rel=1e-2) and row["out"] == pytest.approx(0.25, rel=2e-2)
    for row in numerics.measure_constant(numerics.SMOKE, ["cpu"], CPU):
        assert row["worst"] >= 1 and row["share"] > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ulps_count_numbers_of_a_type(dtype: torch.dtype) -> None:
    """Below 1 they are half as far from each other as above; zero has one place."""
    steps = torch.tensor([0, 1, 3, -0.5, -1]) * torch.finfo(dtype).eps
    for sign in (1, -1):
        found = numerics.ulps(sign * (1 + steps).to(dtype), torch.full((5,), sign, dtype=dtype))
        assert found.tolist() == [0, 1, 3, 1, 2]
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    around = torch.tensor([-smallest, -0.0, smallest], dtype=torch.float64).to(dtype)
    assert numerics.ulps(around, torch.zeros(3, dtype=dtype)).tolist() == [1, 0, 1]


def test_a_cpu_is_given_small_sizes_only(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        numerics.parse(["--device", "cpu"])
    assert "--smoke" in capsys.readouterr().err


@on_gpu_paths
def test_calls_on_a_gpu(target: Target) -> None:
    device = torch.device(target.device)
    rows = list(numerics.measure(numerics.SMOKE, [target.path], device))
    assert {row["call"] for row in rows} == set(numerics.CALLS)
    assert all(row["lse"] < 1e-5 and row["out"] < 2 * 2**-8 for row in rows)
    assert all(row["worst"] <= 1 for row in numerics.measure_constant(numerics.SMOKE, [target.path], device))
