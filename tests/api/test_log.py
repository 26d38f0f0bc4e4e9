"""What says from outside what runs: FLASH_EXT_LOG, which is off and costs nothing by itself, and NVTX."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext import _log as log
from flash_ext import _sdpa_override as sdpa_override
from tests.integrations.test_sdpa_override import untouched
from tests.kept import compiled
from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import environment  # noqa: E402

__all__ = ["untouched"]  # a fixture

# What a process calls whose log is at its highest level.
PROGRAM = """
import inspect, sys, torch, flash_ext
q = torch.zeros(2, 5, 4, 8, dtype=torch.bfloat16)
flash_ext.attention(q, q[:, :, :2], v=q[:, :, :2], causal=True, window_size=(-1, -1), softcap=2.0)
with flash_ext.enable_sdpa():
    pass
layer = flash_ext.nn.MultiheadAttention(8, 2)
x = torch.zeros(3, 1, 8)
layer(x, x, x, need_weights=False)
flash_ext.compat.flash_attn.flash_attn_func(q, q, q)
assert callable(flash_ext.integrations.transformers.register) and "transformers" not in sys.modules

torch.ops.flash_ext._set_sdpa("CPU")
attend = torch.ops.aten._scaled_dot_product_flash_attention
attend(q, q, q)
try:
    attend(q.float(), q.float(), q.float())
except NotImplementedError:
    pass

names = [(flash_ext, name) for name in flash_ext.__all__]
names += [(flash_ext.compat.flash_attn, name) for name in flash_ext.compat.flash_attn.__all__]
for module in (flash_ext.distributed, flash_ext.fp8, flash_ext.serving):
    names += [(module, name) for name in module.__all__]
for name in ("get_scheduler_metadata", "get_mla_metadata"):
    names.remove((flash_ext.serving, name))  # which is no call of attention, either
names.remove((flash_ext, "count"))  # which is no call of attention
names += [(flash_ext.integrations.transformers, "register"), (flash_ext.nn.MultiheadAttention, "forward")]
for owner, name in names:
    found = getattr(owner, name)
    assert not inspect.isfunction(found) or hasattr(found, "__wrapped__"), name
print(len(names))
"""


def run(level: str, program: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "FLASH_EXT_LOG": level}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged here, where no level is set."""
    monkeypatch.setattr(log.logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="flash_ext")
    return caplog


def test_default_is_silent_and_undecorated() -> None:
    assert log.LEVEL == 0 and log.logged(run) is run
    assert not hasattr(flash_ext.attention, "__wrapped__")
    assert log.level_from(None) == log.level_from("") == log.level_from("0") == 0
    assert [log.level_from(text) for text in "123"] == [1, 2, 3]
    with pytest.raises(ValueError, match="FLASH_EXT_LOG must be 0, 1, 2 or 3, got '4'"):
        log.level_from("4")


@pytest.mark.slow
def test_the_highest_level_says_everything() -> None:
    """Every public function, every switch, and torch's own operators with what became of them."""
    done = run("3", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 22
    lines = [line.removeprefix("flash_ext: ") for line in done.stderr.splitlines() if "flash_ext:" in line]
    given = "bfloat16 (2, 5, 4, 8) on cpu, strides (160, 32, 8, 1)"
    grouped = "bfloat16 (2, 5, 2, 8) on cpu, strides (160, 32, 8, 1)"
    flash = "aten._scaled_dot_product_flash_attention"
    assert lines[:4] == [
        f"attention(q={given}, k={grouped}, v={grouped}, causal=True, window_size=(-1, -1), softcap=2.0)",
        "enable_sdpa()",
        "PyTorch's attention runs on flash_ext",
        "disable_sdpa()",
    ]
    assert [line.partition("(")[0] for line in lines[4:8]] == [
        "PyTorch's attention runs as before",
        "MultiheadAttention.forward",
        "flash_attn_func",
        "attention",
    ]
    assert lines[5].startswith("MultiheadAttention.forward(query=float32 (3, 1, 8) on cpu")
    assert "need_weights=False" in lines[5] and "is_causal" not in lines[5]
    assert lines[8:] == [
        f"{flash}({given}, {given}, {given}) runs here",
        f"{flash} runs as before: the dtype is neither float16 nor bfloat16",
    ]


def test_lower_levels_leave_out_strides_and_arguments(
    logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function keeps its results and its words."""
    out, lse = torch.ones(1, 2, 3, 4), torch.zeros(1, 3, 2)
    for level in (1, 2):
        function = log.logged(flash_ext.merge_attention_states, level)
        assert torch.equal(function(out, lse, out_b=out, lse_b=lse)[0], out)
        assert function.__doc__ == flash_ext.merge_attention_states.__doc__
        monkeypatch.setattr(log, "LEVEL", level)
        log._note_torch("sdpa", None, [lse])
    wide, narrow = "float32 (1, 2, 3, 4) on cpu", "float32 (1, 3, 2) on cpu"
    assert logs.messages == [
        "merge_attention_states",
        "aten.sdpa runs here",
        f"merge_attention_states(out_a={wide}, lse_a={narrow}, out_b={wide}, lse_b={narrow})",
        f"aten.sdpa({narrow}) runs here",
    ]


def test_compiled_calls_are_not_logged(logs: pytest.LogCaptureFixture) -> None:
    function = log.logged(flash_ext.attention, level=2)
    q = torch.zeros(2, 5, 4, 8)
    torch.compile(function, backend="eager", fullgraph=True)(q, q, q)
    assert logs.messages == []
    function(q, q, q)
    assert len(logs.messages) == 1


@pytest.mark.usefixtures("untouched")
def test_a_process_without_a_gpu_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sdpa_override._warn_without_gpu.cache_clear()
    words = r"enable_sdpa\(\) serves CUDA tensors, and torch sees no GPU"
    with pytest.warns(UserWarning, match=words) as caught:
        for _ in range(2):
            with flash_ext.enable_sdpa():
                pass
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.gpu
def test_level_three_names_the_kernel() -> None:
    program = (
        "import torch, flash_ext\n"
        "q = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16, device='cuda')\n"
        "flash_ext.attention(q, q, q)"
    )
    done = run("3", program)
    assert done.returncode == 0 and "attention launched fwd_" in done.stderr


@pytest.mark.everywhere
def test_profilers_see_ranges(tmp_path: Path) -> None:
    """fwd and bwd in the domain flash_ext, once a call, with and without modifiers; launches are left out."""
    toolkit, _ = environment.find_toolkit()
    folders = [] if toolkit is None else toolkit.include_dirs
    folders = [folder for folder in folders if (folder / "nvtx3/nvtx3.hpp").is_file()]
    if not folders or shutil.which("g++") is None:
        pytest.skip("no g++, or no NVTX headers to build the listener (and the ranges) with")
    listener = tmp_path / "listener.so"
    source = Path(__file__).with_name("nvtx_listener.cpp")
    compiler = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{folders[0]}"]
    assert compiled([*compiler, str(source)], listener).returncode == 0
    program = (
        "import torch, flash_ext\n"
        "from tests.qkv import make_qkv, null_kernels\n"
        "leaves = make_qkv(dtype=torch.bfloat16, requires_grad=True)\n"
        "with null_kernels():\n"
        "    for options in ({}, {'softcap': 2.0}, {'sinks': torch.zeros(4, requires_grad=True)}):\n"
        "        flash_ext.attention(*leaves, **options).sum().backward()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NVTX_INJECTION64_PATH": str(listener), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranges = [line for line in done.stdout.splitlines() if "flash_ext" in line]
    one = ["open flash_ext fwd", "close flash_ext", "open flash_ext bwd", "close flash_ext"]
    assert ranges == 3 * one
