"""Texts of sources are found whatever their layout, and must be there once."""

from __future__ import annotations

import pytest

from tests.sources import CSRC, count, replace_once

SOURCE = "int f(int a,\n      int b) {\n  return a  // the first\n         + b;\n}\n"


def test_layout_does_not_matter() -> None:
    for text in ("f(int a, int b) {return a", "f( int a,int\nb )\n{\n    return a\n"):
        assert count(SOURCE, text) == 1
        assert replace_once(SOURCE, text, "\tg() {", "f") == "int g() {  // the first\n         + b;\n}\n"


@pytest.mark.parametrize("text", ["no such text", "int", "", " \n"])
def test_a_text_that_is_not_there_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^f holds (0|3) times, once was expected"):
        replace_once(SOURCE, text, "", "f")


def test_a_pattern_is_not_taken_for_one() -> None:
    assert replace_once("a.b(c)+ aXb(c)", "a.b (c) +", "d +", "f") == "d + aXb(c)"
    assert CSRC.is_dir()
