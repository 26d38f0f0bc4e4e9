"""Builds a changed copy of the project by compiling few of its files.

All other objects are those of an unchanged copy that setup.py has built before. Its graph says by which
commands, so that both copies are compiled alike.
"""

from __future__ import annotations

import concurrent.futures
import importlib.machinery
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from tests.sources import CSRC

sys.path.insert(0, str(CSRC))
from build_backend import cache, environment, sources  # noqa: E402
from build_backend import compile as kernels_build  # noqa: E402

RECORD = Path("generated") / "build_record.h"
HOLDS_THE_RECORD = "build_info.cpp"
MODULE = Path("flash_ext") / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def build(unchanged: Path, own: Path, files: Iterable[str], variant: str, compilers: int) -> str:
    """Builds the copy in the folder ``own``, that many compilers at a time.

    Args:
        files: what is compiled, below csrc/. The objects of the rest are those of the folder ``unchanged``.
        variant: what the module names itself.

    Returns:
        The end of what a compiler said that failed, else "".
    """
    there = build_folder(unchanged)
    here = own / there.relative_to(unchanged)
    record = (there / RECORD).read_text(encoding="utf-8")
    compiled = [f"{file}.o" for file in (*on_its_gpu(files, defined(record, "archs")), HOLDS_THE_RECORD)]
    for path in (here / RECORD, *(here / name for name in compiled)):
        path.parent.mkdir(parents=True, exist_ok=True)
    own_record = with_names(record, variant=variant, sources=sources.content_hash(own / "csrc"))
    (here / RECORD).write_text(own_record, encoding="utf-8")
    listed = subprocess.run([environment.find_ninja(), "-t", "commands", "_C.so"], cwd=there,
                            capture_output=True, text=True, check=True)  # fmt: skip
    *compile_lines, link_line = listed.stdout.splitlines()

    def said_by(command: list[str]) -> str:
        done = subprocess.run(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False)  # fmt: skip
        return f"{shlex.join(command)}\n{done.stdout}" if done.returncode else ""

    with concurrent.futures.ThreadPoolExecutor(compilers) as pool:
        problem = "".join(pool.map(said_by, compile_commands(compile_lines, compiled, unchanged, own)))
    problem = problem or said_by(link_command(link_line, compiled, there))
    if not problem:
        cache.place(here / "_C.so", own / MODULE)
    return problem[-2000:]


def build_folder(root: Path) -> Path:
    """Where the last build of a copy has its objects."""
    found = list(root.glob(f"build/*/{kernels_build.SETTINGS}"))  # each build writes its own anew
    if not found:
        raise FileNotFoundError(f"{root} has not been built")
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent


def on_its_gpu(files: Iterable[str], archs: str) -> list[str]:
    """Small tiles in place of large ones where nothing is compiled for Hopper, which alone takes these."""
    return [file if "9.0a" in archs else file.replace("_sm80_large", "_sm80") for file in files]


def compile_commands(
    lines: Iterable[str], objects: Iterable[str], unchanged: Path, own: Path
) -> list[list[str]]:
    """What compiles some objects in another folder, from the lines that do so in the unchanged one.

    Without the store of compiled objects, which should not fill up with those of bugs.
    """
    start = rf"sh {re.escape(kernels_build.CACHED)} \S+ (\S+) -- "
    known = {match[1]: line[match.end() :] for line in lines if (match := re.match(start, line))}
    commands = [shlex.split(known[name]) for name in objects]
    return [[word.replace(f"{unchanged}/", f"{own}/") for word in command] for command in commands]


def link_command(line: str, own: Collection[str], there: Path) -> list[str]:
    """What links own objects with those of another build folder.

    Own ones come first: where both have a function of the same template, the linker takes that.
    """
    words = shlex.split(line)
    objects = [word for word in words if word.endswith(".o")]
    first = words.index(objects[0])
    others = [str(there / name) for name in objects if name not in own]
    return [*words[:first], *own, *others, *(word for word in words[first:] if word not in objects)]


def defined(record: str, name: str) -> str:
    """A value of build_record.h."""
    values: list[str] = re.findall(rf'^#define FLASH_EXT_BUILD_{name.upper()} "(.*)"$', record, re.M)
    return values[0]


def with_names(record: str, **values: str) -> str:
    """build_record.h with other values, which occur in several of its lines."""
    for name, value in values.items():
        record = record.replace(defined(record, name), value)
    return record
