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
from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import environment  # noqa: E402

PROGRAM = """
import sys, torch, flash_ext
q = torch.zeros(2, 5, 4, 8, dtype=torch.bfloat16)
flash_ext.attention(q, q[:, :, :2], v=q[:, :, :2], causal=True, window_size=(-1, -1), softcap=2.0)
with flash_ext.enable_sdpa():
    pass
layer = flash_ext.nn.MultiheadAttention(8, 2)
x = torch.zeros(3, 1, 8)
layer(x, x, x, need_weights=False)
flash_ext.compat.flash_attn.flash_attn_func(q, q, q)
assert callable(flash_ext.integrations.transformers.register) and "transformers" not in sys.modules
"""
COMPILED = (
    PROGRAM
    + """
torch.compile(flash_ext.attention, backend="eager", fullgraph=True)(q, q, q)
"""
)


def run(level: str, program: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "FLASH_EXT_LOG": level}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )


def lines(level: str, program: str) -> list[str]:
    done = run(level, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return [line.removeprefix("flash_ext: ") for line in done.stderr.splitlines() if "flash_ext:" in line]


def test_default_is_silent_and_undecorated() -> None:
    assert log.LEVEL == 0 and log.logged(run) is run
    assert not hasattr(flash_ext.attention, "__wrapped__")
    assert log.level_from(None) == log.level_from("") == log.level_from("0") == 0


@pytest.mark.slow
def test_levels() -> None:
    names = lines("1", PROGRAM)
    switches = [
        "enable_sdpa",
        "PyTorch's attention runs on flash_ext",
        "disable_sdpa",
        "PyTorch's attention runs as before",
    ]
    assert names == ["attention", *switches, "MultiheadAttention.forward", "flash_attn_func", "attention"]
    full = lines("3", COMPILED)
    assert full[0] == (
        "attention(q=bfloat16 (2, 5, 4, 8) on cpu, strides (160, 32, 8, 1), "
        "k=bfloat16 (2, 5, 2, 8) on cpu, strides (160, 32, 8, 1), "
        "v=bfloat16 (2, 5, 2, 8) on cpu, strides (160, 32, 8, 1), causal=True, window_size=(-1, -1), "
        "softcap=2.0)"
    )
    assert full[1] == "enable_sdpa()" and len(full) == len(names)  # compiled calls are not logged
    assert full[5].startswith("MultiheadAttention.forward(query=float32 (3, 1, 8) on cpu")
    assert "need_weights=False" in full[5] and "is_causal" not in full[5]


PUBLIC = """
import inspect, flash_ext
from flash_ext import distributed as d
names = [(flash_ext, name) for name in flash_ext.__all__]
names += [(flash_ext.compat.flash_attn, name) for name in flash_ext.compat.flash_attn.__all__]
names += [(module, name) for module in (d, flash_ext.fp8, flash_ext.serving) for name in module.__all__]
for name in ("get_scheduler_metadata", "get_mla_metadata"):
    names.remove((flash_ext.serving, name))  # which is no call of attention, either
names.remove((flash_ext, "count"))  # which is no call of attention
names += [(flash_ext.integrations.transformers, "register"), (flash_ext.nn.MultiheadAttention, "forward")]
for owner, name in names:
    found = getattr(owner, name)
    assert not inspect.isfunction(found) or hasattr(found, "__wrapped__"), name
print(len(names))
"""


@pytest.mark.slow
def test_every_public_function_is_logged() -> None:
    done = run("1", PUBLIC)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 22


def test_a_logged_function_keeps_its_signature_and_results(caplog: pytest.LogCaptureFixture) -> None:
    function = log.logged(flash_ext.merge_attention_states, level=2)  # no strides
    out, lse = torch.ones(1, 2, 3, 4), torch.zeros(1, 3, 2)
    log.logger.propagate = True
    with caplog.at_level(logging.INFO, logger="flash_ext"):
        merged = function(out, lse, out, lse)
    assert torch.equal(merged[0], out) and function.__doc__ == flash_ext.merge_attention_states.__doc__
    tensors = "out_a=float32 (1, 2, 3, 4) on cpu, lse_a=float32 (1, 3, 2) on cpu, out_b="
    assert f"merge_attention_states({tensors}" in caplog.text


TORCH = """
import torch, flash_ext
q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
torch.ops.flash_ext._set_sdpa("CPU")
attend = torch.ops.aten._scaled_dot_product_flash_attention
attend(q, q, q)
try:
    attend(q.float(), q.float(), q.float())
except NotImplementedError:
    pass
"""


@pytest.mark.slow
def test_torchs_own_operators_are_logged_with_what_became_of_them() -> None:
    for level, shapes in (("1", ""), ("2", ", ".join(["bfloat16 (1, 2, 8, 16) on cpu"] * 3).join("()"))):
        done = run(level, TORCH)
        assert done.returncode == 0, done.stderr
        name = "flash_ext: aten._scaled_dot_product_flash_attention"
        assert done.stderr.splitlines() == [
            f"{name}{shapes} runs here",
            f"{name} runs as before: the dtype is neither float16 nor bfloat16",
        ]


@pytest.mark.slow
def test_a_process_without_a_gpu_is_told_once() -> None:
    program = """
import torch, flash_ext
torch.cuda.is_available = lambda: False
for _ in range(2):
    with flash_ext.enable_sdpa():
        pass
"""
    done = run("0", program)
    assert done.returncode == 0
    assert done.stderr.count("enable_sdpa() serves CUDA tensors, and torch sees no GPU") == 1
    assert "<string>:5: UserWarning" in done.stderr


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
    subprocess.run([*compiler, str(source), "-o", str(listener)], check=True)
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
