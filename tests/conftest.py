"""Shared test setup: the `gpu` and `slow` markers, one printed seed, and a closing word on every skip.

The whole suite runs from one seed: ``--seed N`` or FLASH_EXT_TEST_SEED, else today's date. It is printed
first and last, so a failure of any day can be repeated.
"""

from __future__ import annotations

import collections
import datetime
import os
import random
import zlib

import hypothesis
import pytest

try:
    import torch
except ImportError as error:
    raise pytest.UsageError(f"the tests need torch ({error}); `make test` sets everything up") from error


SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of every random choice (default: the date)")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its own seed option
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, and counted, without one")
    config.addinivalue_line("markers", "slow: takes more than a few seconds; leave out with -m 'not slow'")
    config.stash[SEED] = _chosen_seed(config)
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


def pytest_report_header(config: pytest.Config) -> list[str]:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return [f"torch {torch.__version__}, CUDA device: {device}", f"seed: {config.stash[SEED]} (--seed)"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, none is visible")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for tests that draw their own random cases."""
    return request.config.stash[SEED]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Gives every test its own repeatable random state, whichever tests ran before it."""
    own = (request.config.stash[SEED] ^ zlib.crc32(request.node.nodeid.encode())) & 0x7FFFFFFF
    random.seed(own)
    torch.manual_seed(own)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Says how many tests were skipped and why, so that a quiet run is not taken for a complete one."""
    reasons: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        longrepr = report.longrepr
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    terminalreporter.section("what did not run")
    terminalreporter.line(f"{sum(reasons.values())} tests skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"  {count:5d}  {reason}")
    terminalreporter.line(f"seed of this run: {config.stash[SEED]} (repeat it with --seed)")
