"""csrc/mask_kinds.h: what kernels cannot do with a mask, derived from one table, against lists written out.

Needs a C++ compiler and no GPU.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sources import CSRC, replace_once

# How a call asks for each kind.
ASKED = {
    "chunk": "m.chunk = 5", "sink_tokens": "m.sink_tokens = 5", "prefix": "m.prefix_lens = &number",
    "mask": "m.mask.words = &word", "blocks": "m.blocks.words = &word",
    "hidden_keys": "m.hidden_keys.count = 1", "documents": "m.document_k.ids = &number",
    "hidden_rows": "m.hidden_rows.count = 1",
}  # fmt: skip
SUMMARISED = {"mask", "hidden_keys", "documents", "hidden_rows"}
HIDING = SUMMARISED | {"chunk", "blocks"}
# What is asked of a call in C++, and the kinds with which the answer is no.
EXCLUDED = {
    "work tiles are equal": ("!sm90::has_unequal_tiles(p, m)", HIDING | {"prefix"}),
    "every query is visited": ("sm90::visits_all_queries(p, m)", HIDING),
    "Hopper sums the gradient of a bias": (
        "sm90::is_bias_gradient_taken(p, m, g)",
        SUMMARISED - {"mask"} | {"blocks", "prefix"},
    ),
    "tiles known by rows are light": ("!asks_any<kMadeRowWords>(m)", {"blocks", "hidden_keys"}),
    "no test by rows": ("!asks_any<kKnownByRows>(m)", {"mask", "blocks", "hidden_keys"}),
    "no test by keys": ("!asks_any<kKnownByKeys>(m)", {"documents", "hidden_rows"}),
    "nothing that caches take": ("!asks_any<kOverCaches>(m)", {"mask", "documents"}),
}
# A line of 0 and 1 for each set of kinds, which is numbered by its bits.
PROGRAM = r"""
#include "plan/hopper_bwd.h"
#include <cstdio>
using namespace flash_ext;
static_assert(kMaskKinds == %d, "a kind that ASKED does not ask for");
int main() {
  static const int32_t number = 1;
  static const uint32_t word = 1;
  for (unsigned set = 0; set < 1u << %d; ++set) {
    Modifiers m;
    m.bias.staged = true, m.bias.row_stride = 64;
    Problem p;
    p.seqlen_q = p.seqlen_k = 64;
    BiasGradient g;
    g.rows = g.cols = 64;
%s
    for (const bool can : {%s}) std::putchar(can ? '1' : '0');
    std::putchar('\n');
  }
}
"""


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return [*found.split(), "-std=c++20", f"-I{CSRC}", "-xc++", "-"]


def test_what_kernels_cannot_do_is_what_the_lists_say(compiler: list[str], tmp_path: Path) -> None:
    asking = "\n".join(f"    if (set >> {i} & 1) {text};" for i, text in enumerate(ASKED.values()))
    questions = ", ".join(question for question, _ in EXCLUDED.values())
    program = tmp_path / "mask_kinds"
    source = PROGRAM % (len(ASKED), len(ASKED), asking, questions)
    subprocess.run([*compiler, "-o", str(program)], input=source, text=True, check=True)
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    sets = [
        set(itertools.compress(ASKED, (number >> i & 1 for i in range(len(ASKED)))))
        for number in range(2 ** len(ASKED))
    ]
    for kinds, line in zip(sets, lines, strict=True):
        expected = {name: not kinds & without for name, (_, without) in EXCLUDED.items()}
        assert dict(zip(EXCLUDED, (can == "1" for can in line), strict=True)) == expected, sorted(kinds)


# What a new kind takes: (text of the header, what replaces it).
MEMBER = ("kHiddenRows, kCount", "kHiddenRows, kNew, kCount")
LAST_TRAITS = "    case MaskKind::kCount: break;"
NEW_TRAITS = "    case MaskKind::kNew: return {T::kRowWord, T::kSummaries, true, true, false, false};\n"
TRAITS = (LAST_TRAITS, NEW_TRAITS + LAST_TRAITS)
LAST_ASKED = "  else static_assert("
ASKED_FOR = (LAST_ASKED, "  else if constexpr (kKind == MaskKind::kNew) return false;\n" + LAST_ASKED)


@pytest.mark.parametrize("edits, compiles", [
    ((), True),
    ((MEMBER,), False),
    ((MEMBER, TRAITS), False),
    ((MEMBER, ASKED_FOR), False),
    ((MEMBER, TRAITS, ASKED_FOR), True),
])  # fmt: skip
def test_a_kind_that_is_not_in_the_table_does_not_compile(compiler: list[str], edits, compiles: bool) -> None:
    text = (CSRC / "mask_kinds.h").read_text(encoding="utf-8").replace("#pragma once", "")
    for old, new in edits:
        text = replace_once(text, old, new, "mask_kinds.h")
    command = [*compiler, "-fsyntax-only"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == compiles, done.stderr
