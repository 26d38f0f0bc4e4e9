"""What python -m flash_ext.info prints: as text and as JSON, with a GPU and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest
import torch

from flash_ext import info
from flash_ext._ops import library as ops
from tests.sources import ROOT

pytestmark = pytest.mark.everywhere


def run_info(*args: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-m", "flash_ext.info", *args], cwd=ROOT, capture_output=True,
                          text=True, check=False, timeout=120, env={**os.environ, **environment})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_info_as_json():
    report = json.loads(run_info("--json"))
    assert report["extension"]["loaded"] is True
    assert report["extension"] | ops._C.build_info == report["extension"]
    assert report["runtime"]["torch"] == torch.__version__
    assert len(report["devices"]) == torch.cuda.device_count()


def test_info_without_a_gpu():
    text = run_info(CUDA_VISIBLE_DEVICES="")
    assert "no GPU is visible" in text and "backend cpu" in text and torch.__version__ in text


def test_info_tells_what_serves_a_gpu_and_why_the_rest_does_not(monkeypatch):
    """On a pretended GPU: first one that the sm90 path serves, then one that is too old for it."""
    for compute_capability, said in (
        (90, "fwd, head_dim 128  backend sm90: fwd_sm90_hd128"),
        (75, "fwd, not sm80: compute capability 7.5 is below 8.0"),
    ):
        major, minor = divmod(compute_capability, 10)
        properties = types.SimpleNamespace(
            name="pretended", major=major, minor=minor, total_memory=2**35, multi_processor_count=132
        )
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, found=properties: found)
        facts = {"compute_capability": compute_capability, "num_sms": 132, "smem_per_block": 232448}
        before = {name: ops._C.get_switch(name) for name in facts}
        try:
            for name, value in facts.items():
                ops._C.set_switch(name, value)
            text = info.as_text(info.collect())
        finally:
            for name, value in before.items():
                ops._C.set_switch(name, value)
        assert said in text and f"compute capability {major}.{minor}, 132 SMs, 32.0 GiB" in text


@pytest.mark.gpu
def test_info_names_the_path_and_kernels_of_each_gpu():
    for device in info.collect()["devices"]:
        for direction in ("fwd", "bwd"):
            served = device["backends"][direction]
            assert served["refused"]["cpu"]
            for head_dim, choice in served["kernels"].items():
                assert choice["backend"] in choice["kernel"] and f"_hd{head_dim}" in choice["kernel"]
