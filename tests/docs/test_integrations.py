"""Every Python block of docs/integrations runs, none is left out, and the pages leave everything as it was.

A page's blocks are one program, which uses a GPU where there is one. That of distributed.md runs in two
processes as well, on CPUs and, where there are two, on GPUs.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_ext
from tests import processes
from tests.docs.test_docs import INTEGRATIONS, README, code_blocks, rows, section, text_of, without_code
from tests.qkv import on_devices, sdpa_counts
from tests.sources import ROOT

pytestmark = pytest.mark.everywhere
# Modules a page needs besides torch.
NEEDS = {"transformers.md": "transformers"}
DISTRIBUTED = next(path for path in INTEGRATIONS if path.name == "distributed.md")


def run_page(path: Path) -> dict[str, Any]:
    """Runs the blocks of a page in order, in one namespace, which comes back."""
    names: dict[str, Any] = {}
    for number, block in enumerate(code_blocks(path, "python"), 1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)  # noqa: S102
    return names


def run_distributed(rank: int, size: int, port: int, alone: bool, on_gpu: bool) -> None:
    """The page in one of several processes, or as a program that is started by itself.

    Without a GPU torch's context_parallel is reached as on one: see tests/integrations/test_libraries.py.
    """
    from tests.integrations.test_libraries import choose
    from tests.integrations.test_sdpa_override import on_cpu

    torch.set_num_threads(1)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # a few ranks gain nothing, and some machines lack it
    if not alone:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if not on_gpu:
        torch.cuda.is_available = lambda: False
        choose.__name__ = "scaled_dot_product_attention"  # by which the engine finds what it replaces
        torch.nn.functional.scaled_dot_product_attention = choose
        flash_ext.enable_sdpa = on_cpu
    served = sdpa_counts()["_scaled_dot_product_flash_attention"][0]
    names = run_page(DISTRIBUTED)
    assert names["share"].shape[2] == 256 // size and names["out"].shape[2] == 256
    assert sdpa_counts()["_scaled_dot_product_flash_attention"][0] > served
    assert not torch.distributed.is_initialized()
    if not alone:  # threads that torch has left abort the end of an interpreter now and then (SIGABRT)
        os._exit(0)


def test_no_block_is_left_out() -> None:
    """Everything that these pages set as code is in a block that runs."""
    for path in INTEGRATIONS:
        fences = re.findall(r"^[ >]*(?:```|~~~)(.*)$", text_of(path), re.M)
        assert set(fences[::2]) == {"python"} and set(fences[1::2]) == {""}, f"{path.name}: {fences}"
        assert len(code_blocks(path, "python")) == len(fences) // 2
        assert not re.search(r"^(?: {4}|\t)", without_code(text_of(path)), re.M), "code by its indentation"


@pytest.mark.parametrize("path", sorted({*INTEGRATIONS} - {DISTRIBUTED}), ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    module = NEEDS.get(path.name)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    run_page(path)
    assert torch.nn.attention.current_flash_attention_impl() is None


@processes.forked
@pytest.mark.slow
@pytest.mark.parametrize("size, alone", [(1, True), (2, False)])
@on_devices
def test_examples_of_several_processes_run(device: str, size: int, alone: bool) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    processes.start(run_distributed, size, alone, device == "cuda", on_gpus=device == "cuda")


def test_the_readme_has_the_line_of_every_page() -> None:
    """Whose names exist, and which the page uses."""
    table = {re.findall(r"\((.*?)\)", link)[0]: line for _, line, link in rows(section(README, "Drop-in"))}
    assert {(ROOT / link).resolve() for link in table} == {path.resolve() for path in INTEGRATIONS}
    for link, line in table.items():
        names = re.findall(r"flash_ext(?:\.\w+)+", line)
        assert names
        for name in names:
            assert pkgutil.resolve_name(name) is not None
            used = set(re.findall(r"\w+", "".join(code_blocks(ROOT / link, "python"))))
            assert name.split(".")[-1] in used, f"{link} does not use {name}"
