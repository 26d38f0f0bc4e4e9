"""dynamic_heads() of csrc/sm90/bwd/tiles.h: how many heads the dynamic work tiles of a backward take side by
side."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess

import pytest

from tests.sources import CSRC

# Answers each line of standard input.
PROGRAM = r"""
#include "plan/hopper.h"
#include <cstdio>
int main() {
  long long slots, blocks, fit;
  int sms;
  while (std::scanf("%lld %lld %lld %d", &slots, &blocks, &fit, &sms) == 4) {
    std::printf("%d\n", flash_ext::sm90::dynamic_heads(slots, blocks, fit, sms));
  }
}
"""
Question = tuple[int, int, int, int]  # heads, their blocks of keys, heads that fit, multiprocessors


@pytest.fixture(scope="module")
def dynamic_heads(tmp_path_factory: pytest.TempPathFactory):
    """From questions to answers, of the header as it is now."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("dynamic_heads") / "dynamic_heads"
    command = [*compiler.split(), "-std=c++20", f"-I{CSRC}", "-xc++", "-", "-o", str(program)]
    subprocess.run(command, input=PROGRAM, text=True, check=True)

    def ask(questions: list[Question]) -> dict[Question, int]:
        lines = "".join(" ".join(map(str, question)) + "\n" for question in questions)
        found = subprocess.run([str(program)], input=lines, capture_output=True, text=True, check=True)
        return dict(zip(questions, map(int, found.stdout.split()), strict=True))

    return ask


SLOTS = (*range(1, 66), 71, 96, 97, 100, 127, 128, 132, 192, 256, 512, 1000, 1024, 4096)
BLOCKS = (1, 2, 4, 7, 8, 16, 17, 32, 64, 131, 132, 133, 1024)
FITS = (1, 2, 7, 8, 10, 16, 24, 64, 500)
SMS = (1, 16, 78, 132)
QUESTIONS = list(itertools.product(SLOTS, BLOCKS, FITS, SMS))


def test_enough_heads_and_no_more(dynamic_heads) -> None:
    """At least 8, and an item for every CTA or, where that makes groups equal, for 88 of 100.

    No more than fit, and than 16 or an item for every CTA; less than twice as many, to come out even. Groups
    are of one size wherever some number of heads that is enough divides all of them; else the last one
    misses no more heads than there are other groups.
    """
    for (slots, blocks, fit, sms), heads in dynamic_heads(QUESTIONS).items():
        asked = f"{slots} heads, {blocks} blocks, {fit} fit, {sms} multiprocessors: {heads}"
        all_ctas = -(-sms // blocks)
        least, most = max(8, all_ctas), max(8, all_ctas, min(fit, max(16, all_ctas)))
        groups = -(-slots // heads)
        assert min(8, slots) <= heads <= slots, asked
        assert heads == slots or 100 * heads >= 88 * least, asked
        assert heads == slots or slots % heads == 0 or heads * blocks >= sms, asked
        assert heads < 2 * most, asked
        assert groups * heads - slots < max(groups, 2), asked
        if slots % heads == 0:
            continue
        assert groups > 1 and slots - (groups - 1) * heads > 0, asked
        even = [n for n in range(1, slots + 1) if slots % n == 0 and 88 * least <= 100 * n <= 100 * most]
        # A divisor that is far below what fits would make twice as many groups.
        assert [n for n in even if slots // n < 2 * (slots // most)] == [], asked


def test_what_was_measured(dynamic_heads) -> None:
    """On 132 multiprocessors."""
    wanted = {
        (16, 128, 8, 132): 8,
        (64, 8, 64, 132): 16,  # 17 have an item for every CTA, 16 come out even
        (56, 8, 56, 132): 19,  # no divisor of 56 is near 17
        (64, 2, 64, 132): 64,
        (4, 128, 2, 132): 4,
        (128, 64, 2, 132): 8,  # which the cache does not hold
        (128, 64, 64, 132): 16,
    }
    assert dynamic_heads(list(wanted)) == wanted
