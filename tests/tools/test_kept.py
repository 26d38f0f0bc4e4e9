"""What is kept between runs (tests/kept.py) is what would be made now."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kept import compiled, kept


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("FLASH_EXT_CACHE", str(folder))
    return folder


class Maker:
    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> bytes:
        self.made += 1
        return f"made {self.made}\n".encode()


def test_made_once_for_the_same_parts() -> None:
    make = Maker()
    assert [kept("x", [b"a", b"b"], make) for _ in range(3)] == [b"made 1\n"] * 3
    others = [
        ("x", [b"ab"]),
        ("x", [b"a"]),
        ("x", [b"b", b"a"]),
        ("x", [b"a", b"b", b""]),
        ("y", [b"a", b"b"]),
    ]
    assert [kept(*other, make) for other in others] == [f"made {n}\n".encode() for n in range(2, 7)]


def test_damaged_entries_and_no_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    kept("x", [b"a"], make)
    (entry,) = store.glob("*/*.kept")
    for damaged in (entry.read_bytes()[:-1], b"", b"\xff\n"):
        entry.write_bytes(damaged)
        before = make.made
        assert kept("x", [b"a"], make) == kept("x", [b"a"], make)
        assert make.made == before + 1
    monkeypatch.setenv("FLASH_EXT_CACHE", "off")
    assert kept("x", [b"a"], make) != kept("x", [b"a"], make)


def test_nothing_is_kept_of_a_failure(store: Path) -> None:
    def fails() -> bytes:
        raise OSError

    with pytest.raises(OSError):
        kept("x", [b"a"], fails)
    assert not list(store.glob("*/*"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_program_is_that_of_its_sources_and_flags(tmp_path: Path) -> None:
    """Whatever folder they are in. A header, a flag or a macro makes another; an error is said each time."""

    def run(name: str, header: str, *flags: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "number.h").write_text(header)
        source = folder / "main.cpp"
        source.write_text(
            '#include "number.h"\n#ifndef MORE\n#define MORE 0\n#endif\n'
            "int main() { return kNumber + MORE; }\n"
        )
        done = compiled(["g++", *flags, f"-I{folder}", str(source)], folder / "program")
        return done if done.returncode else subprocess.run([folder / "program"], text=True, check=False)

    assert run("first", "constexpr int kNumber = 3;\n").returncode == 3
    assert run("second", "// elsewhere\nconstexpr int kNumber = 3;\n").returncode == 3
    assert run("second", "constexpr int kNumber = 4;\n").returncode == 4
    assert run("second", "constexpr int kNumber = 4;\n", "-DMORE=5").returncode == 9
    for _ in range(2):
        done = run("third", "constexpr int kNumber = ;\n")
        assert done.returncode and "error" in done.stderr
    assert "number.h" in run("third", '#include "missing_number.h"\n').stderr
