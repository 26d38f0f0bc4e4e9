"""Every algorithm, number and mistake in the catalogue of the literature has a test, or a word on why not.

An id such as S1-22b is an article and one statement of it. Tests name the ids they answer in their
docstrings; what only a benchmark answers, or nothing here does, stands in a table of docs/testing.md.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from examples.ladder import attention_memory
from flash_ext._ops.library import _C

ROOT = Path(__file__).resolve().parents[1]
ID = re.compile(r"\bS[0-4]-\d\d[a-z]?\b")

# The statements of each article that are an algorithm, a number or a mistake.
CATALOGUE = {
    "S0": "01 05 06 07 08 09 10",
    "S1": "05 08 09 10 11 13 16 17 19 20 21 22 22b 23 25 27 28 29 31 35 37 39",
    "S2": "01 02 03 08 09 14 16 17 18 19 20 23 24 25 26 27 28 30 31 32 33 34 37 39",
    "S3": "07 09 10 11 12 14 15 16 17 18 19 21 22 23 24 25 26 27 28 30",
    "S4": "03 04 07 12 13 14 15 16",
}
# How many statements of any kind each article has, by number; S1-22b is one more.
LAST = {"S0": 12, "S1": 40, "S2": 42, "S3": 33, "S4": 21}


def ids_of_tests() -> set[str]:
    """The ids named in docstrings of test functions."""
    found: set[str] = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.update(ID.findall(ast.get_docstring(node) or ""))
    return found


def ids_of_table() -> set[str]:
    """The ids in the first column of the table in docs/testing.md."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    section = text.split("\n## Numbers that no test answers\n")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {name for cell in first_cells for name in ID.findall(cell)}


def test_every_statement_is_answered_once() -> None:
    wanted = {f"{article}-{number}" for article, numbers in CATALOGUE.items() for number in numbers.split()}
    tested, listed = ids_of_tests(), ids_of_table()
    assert not wanted - tested - listed, "neither tested nor listed"
    assert not tested & listed, "listed as not tested, yet a test names them"
    known = {f"{article}-{n:02d}" for article, last in LAST.items() for n in range(1, last + 1)} | {"S1-22b"}
    assert wanted <= known
    assert not (tested | listed) - known, "no such statement"


# ---- numbers that need no GPU and belong to no algorithm --------------------------------------------------


def memory_ratio(seqlen: int, head_dim: int = 64) -> float:
    """Bytes of one head of standard attention in fp16, scores and weights held, over those of ours."""
    tensors = 4 * seqlen * head_dim * 2
    more = attention_memory(seqlen, seqlen)
    return (tensors + 2 * more.scores) / (tensors + more.flash)


def test_ten_to_twenty_times_less_memory() -> None:
    """S1-08: at lengths from 1.2 to 2.4 thousand; it grows with the length, so the number is of its time."""
    assert memory_ratio(1200) == pytest.approx(10, abs=0.3)
    assert memory_ratio(2430) == pytest.approx(20, abs=0.3)
    assert memory_ratio(32768) > 200


def test_scores_beyond_4096_tokens_fill_a_12_gb_card() -> None:
    """S4-04: scores and weights of batch 4 and 16 heads take a third of it at 4096, more than all at 8192."""
    gb = 2**30
    assert 2 * attention_memory(4096, 4096, num_heads=16, batch=4).scores == 4 * gb
    assert 2 * attention_memory(8192, 8192, num_heads=16, batch=4).scores == 16 * gb > 12 * gb
    assert attention_memory(8192, 8192, num_heads=16, batch=4).flash == gb // 512


@pytest.mark.parametrize("compute_capability, smem", [(80, 166912), (86, 101376), (90, 232448)])
def test_four_or_eight_warps(compute_capability: int, smem: int) -> None:
    """S1-35: in a thread block of the mma kernels, for every head size; of wgmma, warpgroups of four."""
    switches = {"compute_capability": compute_capability, "num_sms": 108, "smem_per_block": smem}
    before = {name: _C.get_switch(name) for name in switches}
    shape = dict(seqlen_q=512, seqlen_k=512, num_heads=2, num_heads_k=2)
    warps = set()
    try:
        for name, value in switches.items():
            _C.set_switch(name, value)
        for direction, head_dim in itertools.product(("fwd", "bwd"), range(1, 257)):
            plan = _C.plan(direction, head_dim=head_dim, head_dim_v=head_dim, path="sm80", **shape)
            warps.add(plan["threads"] / 32)
    finally:
        for name, value in before.items():
            _C.set_switch(name, value)
    assert warps == {4, 8}
