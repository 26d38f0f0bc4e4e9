"""docs/articles.md against the files that it names: lines of code, tests, and what was measured."""

from __future__ import annotations

import re

import pytest

from examples.claims.__main__ import TABLES, as_text, in_document
from examples.claims.claims import table
from examples.claims.evidence import RESULTS, stored
from tests.sources import ROOT, count

PAGE = ROOT / "docs" / "articles.md"
TEXT = PAGE.read_text(encoding="utf-8")
TESTS = ROOT / "tests" / "examples"
SLIPS = "test_ladder_slips.py"


def section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def body(text: str) -> list[list[str]]:
    """Cells of every row of a table but its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_every_line_of_code_stands_in_its_file() -> None:
    rows = body(section("Algorithms and their lines"))
    assert len(rows) > 15
    for name, _, line, link, *_ in rows:
        code = re.fullmatch(r"`(.+)`", line)
        path = re.search(r"\]\((.+?)\)", link)
        assert code and path, name
        source = (PAGE.parent / path[1]).resolve().read_text(encoding="utf-8")
        assert count(source, code[1]), f"{name}: {code[1]}"


def test_every_slip_names_a_test_that_exists() -> None:
    rows = body(section("What they print, and what is right"))
    assert len(rows) > 35
    without = 0
    for article, printed, right, test in rows:
        assert article in ("000", "001", "002", "003", "004") and printed and right
        found = re.fullmatch(r"`(\w+)`(?: \((\w+\.py)\))?", test)
        if not test:
            without += 1
            continue
        assert found, test
        text = (TESTS / (found[2] or SLIPS)).read_text(encoding="utf-8")
        assert f"def {found[1]}(" in text, test
    assert without <= 2  # opinions, which no test can hold


def test_every_test_of_a_slip_is_named() -> None:
    tests = re.findall(r"^def (test_\w+)", (TESTS / SLIPS).read_text(encoding="utf-8"), re.M)
    assert not [name for name in tests if f"`{name}`" not in TEXT]


def test_the_claims_are_those_of_the_stored_ladder() -> None:
    """Other lines follow when their runs are replaced: python -m examples.claims --docs."""
    written = body(TEXT.partition("<!-- claims")[2].partition("<!-- -->")[0])
    evidence = stored()
    now = table(evidence)
    assert [row[:2] for row in written] == [list(line[:2]) for line in now]
    own = {evidence.file(kind).where for kind in ("ladder", "claims")}
    for row, line in zip(written, now, strict=True):
        if line[3] in own:
            assert row == list(line)


def test_what_was_measured_is_stored_under_that_commit() -> None:
    """Its folder, and not the commit that a machine without git was told, names the program."""
    dated = re.findall(r"\b(H[12]00), (\d{4}-\d\d-\d\d), ([0-9a-f]{7})\b", TEXT)
    dated += [(gpu, date, commit) for gpu, commit, date in
              re.findall(r"\b(H[12]00), ([0-9a-f]{7}), (\d{4}-\d\d-\d\d)\b", TEXT)]  # fmt: skip
    found = {f"{date}-{gpu.lower()}-{commit}" for gpu, date, commit in dated}
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert len(found) > 4 and not found - folders
    assert all(stored().file(kind).where in TEXT for kind in ("ladder", "claims", "headline", "training"))


@pytest.mark.parametrize("name", TABLES)
def test_other_tables_are_those_of_the_stored_ladder(name: str) -> None:
    written = TEXT.partition(f"<!-- {name}")[2].partition("-->\n")[2].partition("\n<!-- -->")[0]
    head, lines = TABLES[name](stored())
    assert lines and written == as_text(lines, head)
    if name != "breakdown":
        assert any(line[0] == "FlashAttention-2 (Triton)" and line[2] for line in lines)


def test_the_table_has_one_place() -> None:
    text = as_text(table(stored()))
    assert in_document(TEXT, text).count("| claimed | by whom |") == 1
    with pytest.raises(ValueError, match="no place"):
        in_document("# A page\n", text)


def test_the_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\((\S+)\)", TEXT)
    assert len(pictures) == 2
    assert all((PAGE.parent / name).resolve().stat().st_size > 10_000 for name in pictures)
