"""The script that .ci/run makes of the README: all its lines in their order, and it ends where one fails."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import flash_ext
from tests import readme
from tests.docs.test_docs import README, code_blocks, text_of

COMMANDS = ("pip", "python", "make", "uv")
SAYS_SO = 'case "$*" in *bench*) echo "no GPU is visible to torch, and a CPU would take hours"; exit 2;; esac'


def follow(folder: Path, text: str, behaviour: str = SAYS_SO) -> tuple[int, list[str], str]:
    """The status, the commands as they were called, and the output, with stand-ins for what they start."""
    programs, log = folder / "programs", folder / "log"
    programs.mkdir(exist_ok=True)
    for name in COMMANDS:
        stand_in = programs / name
        saved = f'[ "$1" != {readme.SAVED} ] || cp {readme.SAVED} {folder}/saved.$(grep -c "" {log})\n'
        stand_in.write_text(f'#!/bin/bash\necho "{name} $*" >> {log}\n{saved}{behaviour}\n')
        stand_in.chmod(0o755)
    log.write_text("")
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash"],
        input=readme.script(text),
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=60,
    )
    return done.returncode, log.read_text().splitlines(), done.stdout


def test_every_line_of_the_readme_is_followed_in_its_order(tmp_path):
    status, called, _ = follow(tmp_path, text_of(README))
    assert status == 0
    first = [
        "pip install .",
        "pip install .",
        "uv pip install setuptools>=77.0.3,<82 ninja",
        "uv pip install .",
    ]
    assert called[:6] == [*first, "python -m flash_ext.info", f"python {readme.SAVED}"]
    assert "make bench" in called
    assert called[-4:] == ["make demo", "make docs", "make lint", "make test"]
    written = "".join(code_blocks(README, "sh")).splitlines()
    lines = [line.partition("#")[0].strip() for line in written]
    assert [line for line in dict.fromkeys(called) if line in lines] == lines
    named = set(re.findall(r"`(python -m (?:flash_ext|bench)\.[^`]+)`", text_of(README)))
    assert named <= set(called)
    # The saved file grows by one block at a time, and last holds all of them.
    blocks = code_blocks(README, "python")
    saved = sorted(tmp_path.glob("saved.*"), key=lambda path: int(path.suffix[1:]))
    assert [path.read_text() for path in saved] == ["".join(blocks[: n + 1]) for n in range(len(blocks))]


FAILING = [
    "pip install .",
    "uv pip install .",
    f"python {readme.SAVED}",
    "make demo",
    "make docs",
    "make lint",
    "make test",
]


@pytest.mark.parametrize("failing", FAILING)
def test_a_line_that_fails_ends_it(tmp_path, failing):
    behaviour = f'{SAYS_SO}\ncase "$(tail -n 1 {tmp_path}/log)" in "{failing}") exit 3;; esac'
    status, called, _ = follow(tmp_path, text_of(README), behaviour)
    assert (status, called[-1]) == (3, failing)


def test_it_names_all_that_the_package_shows():
    """A line has them, as code, and no others."""
    public = [name for name in dir(flash_ext) if not name.startswith("_")]
    assert public in [re.findall(r"`(\w+)`", line) for line in text_of(README).splitlines()]


def test_uv_is_given_what_the_build_needs():
    text = text_of(README.parent / "pyproject.toml")
    setuptools, ninja = re.findall(r'^requires = \["(setuptools[^"]+)", "(\w+)>', text, re.M)[0]
    assert f'`uv pip install "{setuptools}" {ninja}`' in text_of(README)


@pytest.mark.parametrize(
    ("said", "status"), [("there is no GPU here to compile for", 0), ("no space left on device", 1)]
)
def test_a_build_for_this_gpu_may_say_that_there_is_none(tmp_path, said, status):
    behaviour = f'{SAYS_SO}\n[ -z "$FLASH_EXT_ARCHS" ] || {{ echo "{said}"; exit 1; }}'
    ended, called, output = follow(tmp_path, text_of(README), behaviour)
    assert ended == status and said in output and ("make test" in called) == (status == 0)
