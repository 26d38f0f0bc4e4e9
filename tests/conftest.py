"""Shared test setup: markers, one printed seed, one thread, and a closing word on every skip.

The whole suite runs from one seed: ``--seed N`` or FLASH_EXT_TEST_SEED, else today's date. It is printed
first and last, so a failure of any day can be repeated.

Beside a GPU, ``-m "gpu or everywhere"`` leaves out what says nothing about it: `everywhere` marks modules
that look at the build, the driver or the documents there.

With pytest-xdist (`-n auto`, which `make test` adds where it is installed) several processes share the GPU;
tests marked `alone`, which need most of its memory, wait until no other test runs. pytest-timeout ends what
hangs.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import fcntl
import gc
import json
import os
import random
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

# Inputs are small, and with a thread per core the threads mostly wait for each other: where other work runs
# beside, a call of the CPU backend took 47 ms with two threads and 3 ms with one. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On a CPU Inductor compiles without vector instructions: to find out which there are takes it 14 s, and the
# smallest graph compiles in 12 s instead of 45 s. What is tested are our operators between its kernels.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

try:
    import torch
except ImportError as error:
    raise pytest.UsageError(f"the tests need torch ({error}); `make test` sets everything up") from error


from tests import silence

SEED = pytest.StashKey[int]()
STARTED = pytest.StashKey[float]()
ROOM = pytest.StashKey[Path]()  # a folder that the processes of a run share
WITHOUT_GPU = pytest.StashKey[int]()  # tests left out, because there is none
NO_GPU = "needs a CUDA device, none is visible"
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # torch looks whether it is set, to whatever


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of every random choice (default: the date)")
    parser.addoption("--results", type=Path, default=None, help="write what ran, and where, to a JSON file")
    parser.addoption("--commit", default=None, help="commit to record there where there is no git to ask")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its own seed option
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, and counted, without one")
    config.addinivalue_line("markers", "slow: takes more than a few seconds; leave out with -m 'not slow'")
    config.addinivalue_line("markers", "everywhere: depends on the machine; a run with a GPU leaves none out")
    config.addinivalue_line("markers", "alone: needs a GPU that no other process of this run uses meanwhile")
    config.addinivalue_line("markers", "caching: needs torch's caching allocator; skipped where it is off")
    config.addinivalue_line("markers", "xdist_group: of that name, which one process of several runs")
    config.addinivalue_line("markers", "timeout: seconds after which pytest-timeout ends it")
    if worker := getattr(config, "workerinput", None):
        silence.WATCH.note = Path(worker["room"]) / f"{worker['workerid']}.note"
    # The processes of a run inherit the option.
    config.stash[SEED] = config.option.seed = _chosen_seed(config)
    config.stash[STARTED] = time.time()
    config.stash[ROOM] = _room(config)
    # Inductor's own cache knows neither our operators' schemas nor that they have changed.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(config.stash[ROOM] / "inductor")
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = silence.REPLACED_PROCESSES
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # A run that a time limit ends still says what it did and how long that took.
    signal.signal(signal.SIGTERM, _interrupt)
    # Hypothesis draws from the same seed; a wall-clock deadline would only measure how busy the machine is.
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(config.stash[SEED])
    hypothesis.settings.register_profile("flash_ext", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("flash_ext")


def _chosen_seed(config: pytest.Config) -> int:
    given = config.getoption("--seed")
    if given is None:
        given = os.environ.get("FLASH_EXT_TEST_SEED") or datetime.date.today().strftime("%Y%m%d")
    return int(given)


def _room(config: pytest.Config) -> Path:
    if hasattr(config, "workerinput"):
        return Path(config.workerinput["room"])
    room = Path(tempfile.mkdtemp(prefix="flash_ext-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(room, ignore_errors=True))
    return room


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, as all of these
def pytest_configure_node(node) -> None:
    node.workerinput["room"] = str(node.config.stash[ROOM])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    if config.getvalue("dist") != "loadgroup":
        return None
    return silence.scheduler(config, log, config.stash[ROOM] / "groups")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport) -> None:
    """The report of a test that ended its process says which case it was in, and why if anybody knew."""
    note = silence.read(report.node.config.stash[ROOM] / f"{report.node.gateway.id}.note")
    if note.get("test") == report.nodeid:
        report.longrepr = f"{report.longrepr}\n{note['case']}"


def pytest_report_header(config: pytest.Config) -> list[str]:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return [f"torch {torch.__version__}, CUDA device: {device}", f"seed: {config.stash[SEED]} (--seed)"]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt("terminated")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is there after collection lives until the end: it is not looked through for garbage again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-xdist looks for groups; after -k and -m
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    if hasattr(config, "workerinput"):  # one of several, none of which shall begin a long test at the end
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    groups = {item.nodeid: group for item in items if (group := group_of(item))}
    silence.write(config.stash[ROOM] / "groups", groups)
    result = yield
    if not torch.cuda.is_available():
        leave_out(config, items, [item for item in items if item.get_closest_marker("gpu")])
    elif NO_CACHING in os.environ:
        skip = pytest.mark.skip(reason=f"needs torch's caching allocator, which {NO_CACHING} turns off")
        for item in items:
            if item.get_closest_marker("caching"):
                item.add_marker(skip)
    return result


def leave_out(config: pytest.Config, items: list[pytest.Item], of_gpu: list[pytest.Item]) -> None:
    """Tests of a GPU where there is none: to skip one takes 5 ms, and there are 4000.

    They are skipped where nothing else is asked for.
    """
    if len(of_gpu) == len(items):
        for item in of_gpu:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        return
    left = {id(item) for item in of_gpu}
    items[:] = [item for item in items if id(item) not in left]
    config.stash[WITHOUT_GPU] = len(of_gpu)
    if hasattr(config, "workeroutput"):
        config.workeroutput["without_gpu"] = len(of_gpu)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    told = getattr(node, "workeroutput", {}).get("without_gpu", 0)  # by one that ended itself
    node.config.stash[WITHOUT_GPU] = max(told, node.config.stash.get(WITHOUT_GPU, 0))


def group_of(item: pytest.Item) -> str:
    """The tests that one process of several runs; empty: any process runs this one.

    The tiles of GPUs with little shared memory are compiled from PTX where another GPU first meets them: a
    minute for all of them. What one process has compiled another one reads, but not while all compile.
    """
    if wants_to_be_alone(item):
        return "alone"
    if marker := item.get_closest_marker("xdist_group"):
        return marker.args[0]
    target = item.callspec.params.get("target") if hasattr(item, "callspec") else None
    return "small-tiles" if getattr(target, "switches", ()) else ""


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for tests that draw their own random cases."""
    return request.config.stash[SEED]


_alone: list[contextlib.ExitStack] = []  # one that holds the room, between two tests that want to be alone


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout, whose clock leaves out the waiting
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Beside a GPU, a test of several processes waits for its turn."""
    with its_turn(item, nextitem) if torch.cuda.is_available() else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if note := silence.WATCH.note:
        if silence.has_ended_another(item.nodeid, note):
            pytest.skip("ended another process of this run, which is its failure")
        silence.WATCH.test = item.nodeid
        silence.WATCH.alive("")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and torch.cuda.is_initialized():
        leave_capture()
    return report


def leave_capture() -> None:
    """A graph whose capture failed leaves its stream current, and generators that wait for its end: no later
    test could draw random numbers on the GPU.
    """
    with contextlib.suppress(RuntimeError):  # of a context that is lost, which its own test reports
        torch.cuda.set_stream(torch.cuda.default_stream())
        for generator in torch.cuda.default_generators:
            generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def its_turn(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Tests of several processes run side by side on one GPU, those marked `alone` by themselves.

    These are one group, which one process runs (`--dist loadgroup`), and it stays alone from the first to the
    last of them: each time the others would have to come to an end.
    """
    if not hasattr(item.config, "workerinput"):
        yield
        return
    room = item.config.stash[ROOM] / "turn"
    if not wants_to_be_alone(item):
        with turn(room, alone=False):
            yield
            give_back_memory()
        return
    if not _alone:
        _alone.append(contextlib.ExitStack())
        _alone[0].enter_context(turn(room, alone=True))
    try:
        yield
    finally:
        if nextitem is None or not wants_to_be_alone(nextitem):
            _alone.pop().close()


def give_back_memory() -> None:
    """Leaves to the other processes what torch's allocator keeps: 16 of them held up to 13 GiB each."""
    with contextlib.suppress(RuntimeError):  # of a context that is lost, which its own test reports
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
            torch.cuda.empty_cache()


def wants_to_be_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@contextlib.contextmanager
def turn(name: Path, alone: bool) -> Iterator[None]:
    """Holds a lock that others may share, or with ``alone`` nobody.

    Who waits to be alone holds the gate, behind which newcomers queue: else there would always be another.
    The kernel wakes who waits; the locks of filelock that can be shared poll a database, or files.
    """
    with name.with_suffix(".gate").open("w") as gate, name.with_suffix(".room").open("w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture
def pretended_gpu() -> Iterator[None]:
    """Every fact of an H200 by switches, so that plans need no GPU."""
    from flash_ext._ops.library import _C

    facts = {"compute_capability": 90, "num_sms": 132, "smem_per_block": 232448}
    for name, value in facts.items():
        _C.set_switch(name, value)
    yield
    for name in facts:
        _C.set_switch(name, None)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Gives every test its own repeatable random state, whichever tests ran before it."""
    name = request.node.nodeid.removesuffix(f"@{group_of(request.node)}")  # which pytest-xdist adds
    own = (request.config.stash[SEED] ^ zlib.crc32(name.encode())) & 0x7FFFFFFF
    random.seed(own)
    torch.manual_seed(own)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Says how many tests were skipped and why, so that a quiet run is not taken for a complete one."""
    reasons: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        longrepr = report.longrepr
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if without_gpu := config.stash.get(WITHOUT_GPU, 0):
        reasons[NO_GPU] += without_gpu
    spent: collections.Counter[str] = collections.Counter()
    for outcome in ("passed", "failed", "error", ""):  # the last holds what went before and after each test
        for report in terminalreporter.stats.get(outcome, []):
            spent[report.nodeid.partition("::")[0]] += getattr(report, "duration", 0.0)
    terminalreporter.section("where the time went")
    for name, seconds in spent.most_common(12):
        terminalreporter.line(f"  {seconds:6.1f} s  {name}")
    terminalreporter.section("what did not run")
    if not_begun := _not_begun(terminalreporter, config):
        terminalreporter.line(f"{not_begun} tests had not begun when the run was ended")
    terminalreporter.line(f"{sum(reasons.values())} tests skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"  {count:5d}  {reason}")
    terminalreporter.line(f"seed of this run: {config.stash[SEED]} (repeat it with --seed)")
    path = config.getoption("--results")
    if path and not hasattr(config, "workerinput"):  # once a run, not once a process
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_results(terminalreporter, config, reasons, spent), indent=1) + "\n")


def _not_begun(terminalreporter, config: pytest.Config) -> int:
    """Tests of which there is no report: something ended the run before them."""
    session = config.pluginmanager.getplugin("session")
    begun = {r.nodeid for outcome in terminalreporter.stats.values() for r in outcome if hasattr(r, "when")}
    return 0 if config.option.collectonly else session.testscollected - len(begun)


def _results(
    terminalreporter, config: pytest.Config, skips: collections.Counter[str], spent: collections.Counter[str]
) -> dict:
    """A run for the record: where, of what, how it ended."""
    from bench import machine

    stats = terminalreporter.stats
    counts = {outcome: len(stats.get(outcome, [])) for outcome in ("passed", "failed", "error")}
    counts["not_begun"] = _not_begun(terminalreporter, config)
    failures = [r.nodeid for outcome in ("failed", "error") for r in stats.get(outcome, [])]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "machine": machine.collect(device, config.getoption("--commit")),
        "arguments": list(config.invocation_params.args),
        "seed": config.stash[SEED],
        "seconds": round(time.time() - config.stash[STARTED], 1),
        **counts,
        "skipped": sum(skips.values()),
        "failures": failures,
        "skips": dict(skips.most_common()),
        "seconds_by_file": {name: round(seconds, 1) for name, seconds in spent.most_common()},
    }
