"""How a run shares a GPU, what ends a test, and what a run that is ended still says."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests import silence
from tests.sources import ROOT

# A stand-in for torch with a GPU, in a suite of toys: none computes, and torch takes seconds to import.
PRETENDED_GPU = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from unittest.mock import MagicMock
torch = sys.modules["torch"] = MagicMock(__version__="toy")
torch.cuda.is_available.return_value, torch.cuda.is_initialized.return_value = True, False
torch.cuda.get_device_name.return_value = "toy"
from tests.conftest import *
"""


# Whatever plugins are installed are imported otherwise, by every process.
FEW_PLUGINS = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def begin_toys(folder: Path, toys: str, *options: str) -> subprocess.Popen:
    (folder / "conftest.py").write_text(PRETENDED_GPU)
    (folder / "test_toy.py").write_text(textwrap.dedent(toys))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    return subprocess.Popen(
        [*command, *options, str(folder)], cwd=folder, env=FEW_PLUGINS, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


ENDLESS = """
    import os, time
    def test_quick(): pass
    def test_endless():
        print("waiting", file=os.fdopen(os.dup(2), "w"), flush=True)
        time.sleep(60)
    def test_later(): pass
    """


def test_a_terminated_run_says_what_it_did(tmp_path: Path):
    """A time limit sends SIGTERM: the summary, with the seed and the seconds of each file, still comes."""
    with begin_toys(tmp_path, ENDLESS, "-s") as run:
        assert "waiting" in run.stderr.readline()
        run.send_signal(signal.SIGTERM)
        out, _ = run.communicate(timeout=60)
    assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert "1 passed" in out and "where the time went" in out and "seed of this run" in out
    assert "1 tests had not begun" in out


TOYS = """
    import ctypes, time, pytest
    from tests import silence
    pytestmark = pytest.mark.gpu
    def note(name):
        start = time.time()
        time.sleep(0.2)
        with open({log!r}, "a") as log:
            log.write(f"{{name}} {{start}} {{time.time()}}\\n")
    class Target:
        switches = (("smem_per_block", 1),)
    @pytest.mark.parametrize("i", range(4))
    @pytest.mark.parametrize("target", [Target()])
    def test_small_tiles(target, i):
        note("small-tiles")
    @pytest.mark.alone
    @pytest.mark.parametrize("i", range(3))
    def test_alone(i):
        note("alone")
    @pytest.mark.parametrize("i", range(6))
    def test_before(i, pytestconfig):
        assert pytestconfig.option.maxworkerrestart in ("0", silence.REPLACED_PROCESSES)
        note("shared")
    @pytest.mark.timeout(2, method="thread")
    def test_hangs():
        silence.WATCH.alive("the line that repeats a hang")
        time.sleep(60)
    def test_crashes():
        silence.WATCH.alive("the line that repeats a crash")
        ctypes.string_at(0)
    def test_loses_its_context():
        silence.lose_context("the line that repeats a loss")
    @pytest.mark.parametrize("i", range(6))
    def test_after(i):
        note("shared")
    """


@pytest.mark.slow
def test_turns_of_three_processes_and_what_ends_one(tmp_path: Path):
    """Tests marked alone run alone, small tiles in one process at a time; a hang, a crash and a lost context
    are three failures, each with its line, and the rest runs.
    """
    pytest.importorskip("xdist")
    pytest.importorskip("pytest_timeout")
    log = tmp_path / "log"
    several = ["-p", "xdist", "-p", "pytest_timeout", "-n", "3", "--dist", "loadgroup"]
    run = begin_toys(tmp_path, TOYS.format(log=str(log)), *several, "-o", "faulthandler_timeout=1")
    out, errors = run.communicate(timeout=300)
    assert "INTERNALERROR" not in out and run.returncode == pytest.ExitCode.TESTS_FAILED, out
    assert re.search("3 failed, 19 passed, [0-3] skipped", out), out
    failures = out[out.index("= FAILURES =") :]
    for name, words in {
        "test_hangs": "the line that repeats a hang",
        "test_crashes": "the line that repeats a crash",
        "test_loses_its_context": "CUDA context lost in\nthe line that repeats a loss",
    }.items():
        assert f"FAILED test_toy.py::{name}" in failures and words in failures, failures
    assert "in test_hangs" in errors  # its stack
    times = [(name, float(a), float(b)) for name, a, b in map(str.split, log.read_text().splitlines())]
    alone, tiles, shared = (
        [t[1:] for t in times if t[0] == name] for name in ("alone", "small-tiles", "shared")
    )
    assert (len(alone), len(tiles), len(shared)) == (3, 4, 12)

    def meet(pairs: Iterable[tuple]) -> bool:
        return any(a < d and c < b for (a, b), (c, d) in pairs)

    assert not meet(itertools.product(alone, shared + tiles))
    assert not meet(itertools.combinations(tiles, 2))
    assert meet(itertools.combinations(shared, 2))


class Process:
    """One of a run. It begins a test when it knows the next one, or that none comes."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.shutting_down = False
        self.send_runtest_some = self.sent.extend
        self.gateway = SimpleNamespace(id="gw")

    def shutdown(self) -> None:
        self.shutting_down = True

    def may_begin(self) -> bool:
        return len(self.sent) > (not self.shutting_down)


def test_no_test_is_lost_when_processes_end(tmp_path: Path):
    """In whatever order three processes run tests, two of them end, and others take their place."""
    pytest.importorskip("xdist")
    tests = [f"test_toy.py::test_{i}" for i in range(20)]
    silence.write(tmp_path / "groups", dict.fromkeys(tests[:3], "one group"))
    for order in range(200):
        draw = random.Random(order)
        config = SimpleNamespace(
            option=SimpleNamespace(loadscopereorder=True), getvalue=lambda name: ["popen"] * 3
        )
        log = MagicMock()
        scheduler = silence.scheduler(config, log, tmp_path / "groups")
        running, done, collecting = [], [], [Process() for _ in range(3)]
        for process in collecting:
            scheduler.add_node(process)
        ends = draw.sample(range(len(tests)), 2)
        while running or collecting:
            for process in [p for p in running if p.shutting_down and not p.sent]:
                running.remove(process)
                assert scheduler.remove_node(process) is None
            able = [process for process in running if process.may_begin()]
            if collecting and (not able or draw.random() < 0.1):
                running.append(collecting.pop())
                scheduler.add_node_collection(running[-1], tests)
                if scheduler.collection_is_completed:
                    scheduler.schedule()
            elif running:
                assert able, f"order {order}: {len(done)} tests have run, and every process waits"
                process = draw.choice(able)
                if len(done) in ends:
                    ends.remove(len(done))
                    running.remove(process)
                    assert scheduler.remove_node(process) == tests[process.sent[0]]
                    collecting.append(Process())
                    scheduler.add_node(collecting[-1])
                else:
                    done.append(process.sent.pop(0))
                    scheduler.mark_test_complete(process, done[-1])
        assert sorted(done) == list(range(len(tests)))


# Collects every module, whose marks are strict, but makes no tests of what it finds there.
IMPORT_ALL = """
import sys
sys.modules.update(dict.fromkeys(("matplotlib", "ninja", "rich", "transformers", "xdist", "pytest_timeout")))
import pytest
class NoTests:
    def pytest_pycollect_makeitem(self):
        return []
sys.exit(pytest.main(["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider"], [NoTests()]))
"""


def test_what_only_some_tests_need_ends_no_collection():
    """A python3 that is used as it is may lack it: plugins and whole libraries."""
    command = [sys.executable, "-c", IMPORT_ALL]
    done = subprocess.run(command, cwd=ROOT, env=FEW_PLUGINS, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout[-3000:]
