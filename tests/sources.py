"""Texts of sources: found and replaced whatever white space stands between their characters.

Layout belongs to clang-format. A test that plants a bug, or names a line, must not depend on it, and must
fail when the text is gone.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"


def squeezed(text: str) -> str:
    """The text without its white space."""
    return "".join(text.split())


def count(source: str, text: str) -> int:
    """How often ``source`` holds ``text``."""
    return squeezed(source).count(squeezed(text))


def replace_once(source: str, old: str, new: str, where: str) -> str:
    """``source`` with its one place of ``old`` replaced.

    Args:
        where: names the source in the error.

    Raises:
        ValueError: ``old`` is empty, is nowhere, or is in several places.
    """
    found = count(source, old) if squeezed(old) else 0
    if found != 1:
        raise ValueError(f"{where} holds {found} times, once was expected:\n{old}")
    start, end = re.search(r"\s*".join(map(re.escape, squeezed(old))), source).span()
    return source[:start] + new.strip() + source[end:]


def replace_in(path: Path, old: str, new: str) -> None:
    """Replaces a text in a file, see ``replace_once``."""
    text = path.read_text(encoding="utf-8")
    path.write_text(replace_once(text, old, new, path.name), encoding="utf-8")
