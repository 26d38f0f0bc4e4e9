"""bench.sdpa_cost on any machine: the order of its measurements, and what it says of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from bench import sdpa_cost


def test_implementations_take_turns() -> None:
    """Each with its own switch on, in interleaved rounds that begin with another one."""
    order: list[tuple[str, str]] = []
    active: list[str] = []

    @contextlib.contextmanager
    def switched(name: str) -> Iterator[None]:
        active.append(name)
        yield
        active.pop()

    def measure(call: Callable[[], str]) -> float:
        order.append((active[-1], call()))
        return float(len(order))

    cases = {case: (functools.partial(str, case), measure) for case in ("x", "y")}
    found = sdpa_cost.interleaved({name: functools.partial(switched, name) for name in "abc"}, cases, 4)
    turns = ["abc", "bca", "cab", "abc"]
    assert order == [(name, case) for turn in turns for name in turn for case in "xy"]
    assert found["a"]["x"] == [1, 11, 15, 19]
    assert all(len(values) == 4 for own in found.values() for values in own.values())


def test_medians_and_spread() -> None:
    assert sdpa_cost.summary([3.0, 1.0, 2.0, 9.0]) == {"median": 2.5, "lowest": 1.0, "highest": 9.0}
    assert sdpa_cost.summary([120.04, 120.06])["highest"] == 120.1
