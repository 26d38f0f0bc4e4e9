"""What python -m flash_ext.info prints: as text and as JSON, with a GPU and without."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from flash_ext import info
from flash_ext._ops import library as ops

pytestmark = pytest.mark.everywhere


def test_info_as_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["info", "--json"])
    info.main()
    report = json.loads(capsys.readouterr().out)
    assert report["extension"]["loaded"] is True
    assert report["extension"] | ops._C.build_info == report["extension"]
    assert report["runtime"]["torch"] == torch.__version__
    assert len(report["devices"]) == torch.cuda.device_count()


def test_info_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["info"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    info.main()
    text = capsys.readouterr().out
    assert "no GPU is visible" in text and "backend cpu" in text and torch.__version__ in text


@pytest.mark.parametrize(
    "compute_capability, said",
    [
        (90, "fwd, head_dim 128  backend sm90: fwd_sm90_hd128"),
        (75, "fwd, not sm80: compute capability 7.5 is below 8.0"),
    ],
)
@pytest.mark.usefixtures("pretended_gpu")
def test_info_tells_what_serves_a_gpu_and_why_the_rest_does_not(monkeypatch, compute_capability, said):
    major, minor = divmod(compute_capability, 10)
    properties = types.SimpleNamespace(
        name="pretended", major=major, minor=minor, total_memory=2**35, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    ops._C.set_switch("compute_capability", compute_capability)
    text = info.as_text(info.collect())
    assert said in text and f"compute capability {major}.{minor}, 132 SMs, 32.0 GiB" in text


@pytest.mark.gpu
def test_info_names_the_path_and_kernels_of_each_gpu():
    for device in info.collect()["devices"]:
        for direction in ("fwd", "bwd"):
            served = device["backends"][direction]
            assert served["refused"]["cpu"]
            for head_dim, choice in served["kernels"].items():
                assert choice["backend"] in choice["kernel"] and f"_hd{head_dim}" in choice["kernel"]
