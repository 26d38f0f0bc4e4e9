"""bench.attention and bench.timing: which peers a run needs, in which order the columns of a row run."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from bench import timing


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8])
def test_nobody_always_follows_the_same_one(count: int) -> None:
    names, before = list("abcdefgh"[:count]), None
    followed: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for index in range(2 * count):
        order = timing.balanced_order(names, index)
        assert sorted(order) == names
        for name in order:
            if before not in (None, name):
                followed[name][before] += 1
            before = name
    for name in names:
        assert set(followed[name]) == set(names) - {name}
        assert max(followed[name].values()) <= 4 or count == 2


def test_rounds_have_these_orders() -> None:
    launched = []

    class Timer:
        def launch(self, call, launches: int) -> tuple[list[float], None]:
            launched.append(call())
            return [1.0] * launches, None

        def release(self) -> None:
            raise AssertionError("nothing throws")

    names = list("abc")
    samples, failures = timing.measure(
        {name: lambda name=name: name for name in names}, Timer(), rounds=3, budget_s=0.0
    )
    assert launched[-9:] == [name for index in range(3) for name in timing.balanced_order(names, index)]
    assert failures == {} and all(len(samples[name].rounds) == 3 for name in names)


@pytest.mark.parametrize(("needed", "status"), [([], 0), (["--need-peers"], 1)])
def test_a_run_that_needs_its_peers_does_not_go_on_without_one(
    needed: list[str], status: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("rich")
    from bench import attention

    arguments = ["--device", "cpu", "--set", "smoke", "--cases", "smoke-full-s32", "--dirs", "fwd"]
    arguments += ["--peers", "math,fa3", "--fa3-lib", "/nowhere/absent.so", "--rounds", "2"]
    arguments += ["--budget", "0.01"]
    assert attention.main([*arguments, "--out", str(tmp_path), *needed]) == status
    assert "peer fa3 is not here" in capsys.readouterr().out
    assert (tmp_path / "results.json").exists() == (status == 0)
