"""What a run with a GPU leaves out, and what a run that is ended still says."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import conftest

ROOT = Path(__file__).resolve().parents[1]


class Item:
    """As much of a pytest item as the choice looks at."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid, self.markers, self.added = nodeid, markers, []

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.added.append(marker.kwargs["reason"])


def config_of(*, args: str = "tests", keyword: str = "", everything: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        args=args.split(),
        option=SimpleNamespace(keyword=keyword),
        getoption={"--all": everything}.__getitem__,
        stash={conftest.SEED: 7},
    )


def left_out(monkeypatch: pytest.MonkeyPatch, gpu: bool, **options: object) -> list[str]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.delenv("FLASH_EXT_TEST_ALL", raising=False)
    items = [Item(f"tests/test_a.py::test_{i}") for i in range(800)]
    items += [Item("tests/test_b.py::test_g", "gpu"), Item("tests/test_c.py::test_e", "everywhere")]
    conftest.pytest_collection_modifyitems(config_of(**options), items)
    assert not items[-1].added
    assert bool(items[-2].added) != gpu
    return [item.nodeid for item in items[:-2] if item.added]


def test_a_gpu_run_keeps_a_sample_of_what_says_nothing_about_it(monkeypatch: pytest.MonkeyPatch):
    skipped = left_out(monkeypatch, gpu=True)
    assert 0.8 * 800 < len(skipped) < 0.95 * 800
    assert left_out(monkeypatch, gpu=True) == skipped  # by seed, not by luck
    others = [
        i for i in range(800) if not conftest.left_out_beside_a_gpu(Item(f"tests/test_a.py::test_{i}"), 8)
    ]
    assert {f"tests/test_a.py::test_{i}" for i in others} & set(skipped)  # another seed keeps other ones


@pytest.mark.parametrize(
    "options",
    [
        {"args": "tests/test_a.py::test_1"},
        {"args": "x tests/a.py"},
        {"keyword": "varlen"},
        {"everything": True},
    ],
)
def test_what_is_asked_for_runs(monkeypatch: pytest.MonkeyPatch, options: dict):
    assert left_out(monkeypatch, gpu=True, **options) == []


def test_without_a_gpu_everything_else_runs(monkeypatch: pytest.MonkeyPatch):
    assert left_out(monkeypatch, gpu=False) == []


def test_the_environment_asks_for_all(monkeypatch: pytest.MonkeyPatch):
    config = config_of()
    monkeypatch.setenv("FLASH_EXT_TEST_ALL", "1")
    assert not conftest.thins_out(config)
    monkeypatch.setenv("FLASH_EXT_TEST_ALL", "0")
    assert conftest.thins_out(config)


def test_a_terminated_run_says_what_it_did(tmp_path: Path):
    """A time limit sends SIGTERM: the summary, with the seed and the seconds of each file, still comes."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests.conftest import _seeded\n"
    )
    (tmp_path / "test_slow.py").write_text(
        textwrap.dedent(
            """
            import os, time
            def test_quick(): pass
            def test_endless():
                print("waiting", file=os.fdopen(os.dup(2), "w"), flush=True)
                time.sleep(60)
            """
        )
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


def test_a_turn_alone_waits_for_the_others_and_comes_before_later_ones(tmp_path: Path):
    """Two share, a third wants to be alone, a fourth that comes after it waits behind it."""
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from tests.conftest import turn
        name, alone = sys.argv[1], sys.argv[2] == "alone"
        with turn(Path({str(tmp_path / "run")!r}), alone):
            print(name, flush=True)
            sys.stdin.read()
    """)

    def enter(name: str, how: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", script, name, how], cwd=ROOT, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def leave(process: subprocess.Popen) -> None:
        process.stdin.close()
        assert process.wait(60) == 0

    first, second = enter("first", "shared"), enter("second", "shared")
    assert (first.stdout.readline(), second.stdout.readline()) == ("first\n", "second\n")
    third = enter("third", "alone")
    time.sleep(3)
    fourth = enter("fourth", "shared")
    leave(first)
    time.sleep(3)
    assert not select.select([third.stdout, fourth.stdout], [], [], 0)[0]
    leave(second)
    assert third.stdout.readline() == "third\n"
    assert not select.select([fourth.stdout], [], [], 0.2)[0]
    leave(third)
    assert fourth.stdout.readline() == "fourth\n"
    leave(fourth)


def test_tests_marked_alone_run_alone_and_small_tiles_in_one_process(tmp_path: Path):
    """A toy suite in three processes that take the CPU for a GPU."""
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch; torch.cuda.is_available = lambda: True\n"
        "torch.cuda.get_device_name = lambda index: 'toy'\n"
        "from tests.conftest import *\n"
    )
    (tmp_path / "test_toy.py").write_text(textwrap.dedent(f"""
        import time, pytest
        def note(name):
            start = time.time()
            time.sleep(0.3)
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write(f"{{name}} {{start}} {{time.time()}}\\n")
        @pytest.mark.gpu
        @pytest.mark.parametrize("i", range(9))
        def test_shared(i):
            note("shared")
        class Target:
            switches = (("smem_per_block", 1),)
        @pytest.mark.gpu
        @pytest.mark.parametrize("i", range(4))
        @pytest.mark.parametrize("target", [Target()])
        def test_small_tiles(target, i):
            note("small-tiles")
        @pytest.mark.gpu
        @pytest.mark.alone
        @pytest.mark.parametrize("i", range(3))
        def test_alone(i):
            note("alone")
    """))
    command = [sys.executable, "-m", "pytest", "-v", "-n", "3", "--dist", "loadgroup"]
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    times = [(name, float(a), float(b)) for name, a, b in map(str.split, lines)]
    alone, tiles, shared = (
        [t[1:] for t in times if t[0] == name] for name in ("alone", "small-tiles", "shared")
    )
    assert (len(alone), len(tiles), len(shared)) == (3, 4, 9)

    def meet(pairs: Iterable[tuple]) -> bool:
        return any(a < d and c < b for (a, b), (c, d) in pairs)

    assert not meet(itertools.product(alone, shared + tiles))
    if "@small-tiles" in done.stdout:  # pytest-xdist 3.8 cannot name groups to pytest 9.2
        assert not meet(itertools.combinations(tiles, 2))
    assert meet(itertools.combinations(shared, 2))


# ---- torch's caching allocator --------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "1", "0", ""], ids=str)
def test_what_needs_the_caching_allocator_is_left_out_where_it_is_off(
    monkeypatch: pytest.MonkeyPatch, value: str | None
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(conftest.NO_CACHING, raising=False)
    if value is not None:
        monkeypatch.setenv(conftest.NO_CACHING, value)
    graph, other = Item("tests/test_a.py::test_1", "gpu", "caching"), Item("tests/test_a.py::test_2", "gpu")
    conftest.pytest_collection_modifyitems(config_of(), [graph, other])
    reason = f"needs torch's caching allocator, which {conftest.NO_CACHING} turns off"
    assert graph.added == ([] if value is None else [reason]) and not other.added


NEEDS_CACHING = re.compile(
    "CUDAGraph|make_graphed_callables|reduce-overhead|(memory_allocated|memory_reserved|memory_stats)[(]"
)


def test_what_captures_graphs_or_counts_memory_is_marked():
    """Also where a function of any file of tests does it: pools and counters are that allocator's."""
    tests, helpers = {}, {}
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                kind = tests if node.name.startswith("test_") else helpers
                kind[path.name, node.name] = node
    needles = NEEDS_CACHING.pattern
    for _, name in [key for key, node in helpers.items() if NEEDS_CACHING.search(ast.unparse(node))]:
        needles += rf"|\b{name}[(]"
    assert "peak_of" in needles and "peak_extra_bytes" in needles
    found = {
        key: any("mark.caching" in ast.unparse(mark) for mark in node.decorator_list)
        for key, node in tests.items()
        if re.search(needles, "\n".join(ast.unparse(line) for line in node.body))
    }
    assert len(found) > 10 and all(found.values()), [key for key, marked in found.items() if not marked]


def test_a_failure_leaves_the_stream_and_the_generators_of_a_capture(monkeypatch: pytest.MonkeyPatch):
    """As far as a machine without a GPU shows: which calls, after failures only, and none an error."""
    said: list[object] = []

    class Generator:
        clone_state = staticmethod(lambda: "fresh")
        graphsafe_set_state = staticmethod(said.append)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_stream", said.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator, Generator))

    def report(failed: bool) -> list[object]:
        said.clear()
        made = conftest.pytest_runtest_makereport(None, None)
        next(made)
        with pytest.raises(StopIteration) as end:
            made.send(SimpleNamespace(failed=failed))
        assert end.value.value.failed == failed
        return list(said)

    assert report(failed=False) == []
    assert report(failed=True) == ["default", "fresh", "fresh"]

    def lost() -> None:
        raise RuntimeError("no context")

    monkeypatch.setattr(torch.cuda, "default_stream", lost)
    assert report(failed=True) == []


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


# ---- tests that end their process -----------------------------------------------------------------------

PRETENDED_GPU = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch; torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda index: 'toy'
from tests.conftest import *
"""
ENDINGS = """
import ctypes, time, pytest
from tests import silence
pytestmark = [pytest.mark.gpu, pytest.mark.silence(3)]
@pytest.mark.parametrize("i", range(6))
def test_before(i, pytestconfig):
    assert getattr(pytestconfig.option, "maxworkerrestart", "0") in ("0", silence.REPLACED_PROCESSES)
    time.sleep(0.1)
@pytest.mark.parametrize("i", range(HANGING))
def test_hangs(i):
    silence.WATCH.alive(f"the line that repeats case {i}")
    time.sleep(60)
def test_slow_but_alive():
    for case in range(4):
        silence.WATCH.alive(str(case))
        time.sleep(1.5)
def test_crashes():
    silence.WATCH.alive("the line that repeats a crash")
    ctypes.string_at(0)
def test_loses_its_context():
    silence.lose_context("the line that repeats a loss")
@pytest.mark.parametrize("i", range(6))
def test_after(i):
    time.sleep(0.1)
"""


def run_endings(folder: Path, hanging: int, *options: str) -> subprocess.CompletedProcess:
    """Begun again where pytest-xdist waits for ever for a process that replaces another: once in ten runs."""
    (folder / "conftest.py").write_text(PRETENDED_GPU)
    (folder / "test_toy.py").write_text(ENDINGS.replace("HANGING", str(hanging)))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command += [*options, str(folder)]
    for last in (False, False, True):
        with contextlib.suppress(*([] if last else [subprocess.TimeoutExpired])):
            return subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
            )
    raise AssertionError("the last attempt returns or raises")


@pytest.mark.slow
def test_what_ends_a_process_is_named_and_the_rest_runs(tmp_path: Path):
    """A hang, a crash and a lost context in three processes: three failures, each with its line."""
    pytest.importorskip("xdist")
    done = run_endings(tmp_path, 1, "-n", "3", "--dist", "loadgroup")
    assert "INTERNALERROR" not in done.stdout and done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert re.search("3 failed, 13 passed, [0-3] skipped", done.stdout), done.stdout
    assert "not begun" not in done.stdout
    failures = done.stdout[done.stdout.index("= FAILURES =") :]
    for name, words in {
        "test_hangs[0]": "the line that repeats case 0\n    nothing came to an end in",
        "test_crashes": "the line that repeats a crash",
        "test_loses_its_context": "CUDA context lost in\nthe line that repeats a loss",
    }.items():
        assert f"FAILED test_toy.py::{name}" in failures and words in failures, failures
    assert "in test_hangs" in done.stderr  # its stack


@pytest.mark.slow
def test_many_hangs_end_the_run_in_words(tmp_path: Path):
    """More than are replaced: the run ends with a summary, not with every hang in its turn."""
    pytest.importorskip("xdist")
    done = run_endings(tmp_path, 30, "-n", "2", "--dist", "loadgroup", "--max-worker-restart", "0")
    assert "INTERNALERROR" not in done.stdout and done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert 1 <= done.stdout.count("crashed while running 'test_toy.py::test_hangs") <= 4, done.stdout
    assert "the line that repeats case 0\n" in done.stdout and "tests had not begun" in done.stdout


def test_a_hang_of_the_only_process_is_named(tmp_path: Path):
    done = run_endings(tmp_path, 1, "-p", "no:xdist")
    words = r"test_toy.py::test_hangs\[0\]\n    the line that repeats case 0\n    nothing came to an end in"
    assert re.search(words, done.stderr) and "in test_hangs" in done.stderr, done.stderr
    assert done.returncode == 3


# ---- a python3 that is used as it is may lack what only some tests need ---------------------------------

OPTIONAL = {"matplotlib", "ninja", "rich", "transformers", "xdist"}


def imported(path: Path) -> Iterator[str]:
    """Modules that importing a file imports, unless ``importorskip`` comes first."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.Expr, ast.Assign)) and "importorskip" in ast.unparse(node):
            return


def reached(path: Path, seen: set[Path]) -> Iterator[str]:
    """The same through files of the tests and the benchmark."""
    for name in imported(path):
        yield name.partition(".")[0]
        file = ROOT / f"{name.replace('.', '/')}.py"
        if name.startswith(("bench.", "tests.")) and file.is_file() and file not in seen:
            seen.add(file)
            yield from reached(file, seen)


def test_what_only_some_tests_need_ends_no_collection() -> None:
    """One module that cannot be imported would end the whole run."""
    wanted = {path.name: OPTIONAL & {*reached(path, set())} for path in (ROOT / "tests").glob("test_*.py")}
    assert not {name: modules for name, modules in wanted.items() if modules}
    assert "rich" in {*reached(ROOT / "bench" / "attention.py", set())}


def test_every_mark_is_known_without_a_plugin() -> None:
    """Markers are strict, and one that only a plugin knows ends the collection where the plugin is not."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    known = set(re.findall(r'"markers", "(\w+):', texts.pop("conftest.py")))
    used = {mark for text in texts.values() for mark in re.findall(r"pytest\.mark\.(\w+)", text)}
    of_pytest = {"filterwarnings", "parametrize", "skip", "skipif", "usefixtures", "xfail"}
    assert "silence" in used and used <= known | of_pytest
