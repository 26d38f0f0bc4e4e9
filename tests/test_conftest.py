"""How a run shares a GPU, what ends a test, and what a run that is ended still says."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import conftest, silence

ROOT = Path(__file__).resolve().parents[1]
# The CPU taken for a GPU, in a suite of toys.
PRETENDED_GPU = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch; torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda index: 'toy'
from tests.conftest import *
"""


def run_toys(folder: Path, toys: str, *options: str) -> subprocess.CompletedProcess:
    (folder / "conftest.py").write_text(PRETENDED_GPU)
    (folder / "test_toy.py").write_text(textwrap.dedent(toys))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command += [*options, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_a_terminated_run_says_what_it_did(tmp_path: Path):
    """A time limit sends SIGTERM: the summary, with the seed and the seconds of each file, still comes."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_slow.py").write_text(
        "import os, time\n"
        "def test_quick(): pass\n"
        "def test_endless():\n"
        "    print('waiting', file=os.fdopen(os.dup(2), 'w'), flush=True)\n"
        "    time.sleep(60)\n"
        "def test_later(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert "waiting" in run.stderr.readline()
        run.send_signal(signal.SIGTERM)
        out, _ = run.communicate(timeout=60)
    assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert "1 passed" in out and "where the time went" in out and "seed of this run" in out
    assert "1 tests had not begun" in out


def test_a_turn_alone_waits_for_the_others_and_comes_before_later_ones(tmp_path: Path):
    """Two share, a third wants to be alone, a fourth that comes after it waits behind it."""
    inside: list[str] = []

    def enter(name: str, leave: threading.Event) -> threading.Thread:
        def work() -> None:
            with conftest.turn(tmp_path / "run", name == "alone"):
                inside.append(name)
                leave.wait(60)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        time.sleep(0.3)
        return thread

    leave = {name: threading.Event() for name in ("first", "second", "alone", "later")}
    threads = {name: enter(name, event) for name, event in leave.items()}
    for name, then in (("first", []), ("second", ["alone"]), ("alone", ["alone", "later"]), ("later", [])):
        expected = ["first", "second", *then] if then else inside[:]
        leave[name].set()
        threads[name].join(60)
        time.sleep(0.3)
        assert inside == expected


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
    several = ["-n", "3", "--dist", "loadgroup", "-o", "faulthandler_timeout=1"]
    done = run_toys(tmp_path, TOYS.format(log=str(log)), *several)
    assert "INTERNALERROR" not in done.stdout and done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert re.search("3 failed, 19 passed, [0-3] skipped", done.stdout), done.stdout
    failures = done.stdout[done.stdout.index("= FAILURES =") :]
    for name, words in {
        "test_hangs": "the line that repeats a hang",
        "test_crashes": "the line that repeats a crash",
        "test_loses_its_context": "CUDA context lost in\nthe line that repeats a loss",
    }.items():
        assert f"FAILED test_toy.py::{name}" in failures and words in failures, failures
    assert "in test_hangs" in done.stderr  # its stack
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
    """One of several, as a scheduler of pytest-xdist sees it."""

    shutting_down = has_ended = False

    def __init__(self, name: str) -> None:
        self.gateway, self.given = SimpleNamespace(id=name), []

    def send_runtest_some(self, indices: list[int]) -> None:
        if self.has_ended:
            raise OSError("cannot send (already closed?)")
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_work_of_two_processes_that_end_at_once_goes_to_others(tmp_path: Path):
    """The word of the second end comes when it was already given tests of the first."""
    pytest.importorskip("xdist")
    config = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=True),
        getvalue=lambda name: ["popen"] * (3 if name == "tx" else 0),
    )
    scheduler = silence.scheduler(config, None, tmp_path / "groups")
    first, second, third = processes = [Process(name) for name in ("gw0", "gw1", "gw2")]
    tests = [f"test_toy.py::test_{i}" for i in range(12)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    second.has_ended = True
    begun = [tests[process.given[0]] for process in (first, second)]
    assert [scheduler.remove_node(process) for process in (first, second)] == begun
    for place in third.given:  # grows meanwhile
        scheduler.mark_test_complete(third, place)
    assert sorted(third.given) == list(range(12)) and third.shutting_down


class Item:
    """As much of a pytest item as the choice looks at."""

    def __init__(self, *markers: str) -> None:
        self.nodeid, self.markers, self.skipped = "test_toy.py::test", markers, False

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.skipped = True


@pytest.mark.parametrize("value", [None, "0"], ids=str)
def test_what_needs_the_caching_allocator_is_left_out_where_it_is_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(conftest.NO_CACHING, raising=False)
    if value is not None:
        monkeypatch.setenv(conftest.NO_CACHING, value)
    graph, other = Item("gpu", "caching"), Item("gpu")
    conftest.pytest_collection_modifyitems(SimpleNamespace(stash={conftest.ROOM: tmp_path}), [graph, other])
    assert graph.skipped == (value is not None) and not other.skipped


@pytest.mark.parametrize("failed", [False, True])
def test_only_a_failure_leaves_a_capture(monkeypatch: pytest.MonkeyPatch, failed: bool):
    left: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(conftest, "leave_capture", lambda: left.append(True))
    made = conftest.pytest_runtest_makereport(None, None)
    next(made)
    with contextlib.suppress(StopIteration):
        made.send(SimpleNamespace(failed=failed))
    assert bool(left) == failed


FAILED_CAPTURE = """
import torch
from tests.conftest import leave_capture
x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        (x + torch.rand_like(x)).sum().item()  # no capture allows to wait for the device
except RuntimeError:
    leave_capture()
else:
    raise SystemExit("the capture did not fail")
assert torch.cuda.current_stream() == torch.cuda.default_stream()
draws = []
for _ in range(2):
    torch.manual_seed(1)
    draws.append(torch.rand_like(x))
assert torch.equal(*draws)
another = torch.cuda.CUDAGraph()
with torch.cuda.graph(another):
    drawn = torch.rand_like(x)
draws = []
for _ in range(2):
    another.replay()
    draws.append(drawn.clone())
assert not torch.equal(*draws)
"""


@pytest.mark.gpu
@pytest.mark.caching
def test_a_failed_capture_harms_no_later_test():
    """In a child, where it can harm nothing else."""
    command = [sys.executable, "-c", FAILED_CAPTURE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


def test_what_only_some_tests_need_ends_no_collection():
    """A python3 that is used as it is may lack it: plugins, whose marks are strict, and whole libraries."""
    optional = ("matplotlib", "ninja", "rich", "transformers", "xdist", "pytest_timeout")
    program = f"import sys; sys.modules.update(dict.fromkeys({optional}))\nimport pytest\n"
    program += "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider']))"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
