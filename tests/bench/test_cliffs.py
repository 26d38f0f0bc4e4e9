"""The sweep for slow shape classes: its verdicts on planted points."""

from __future__ import annotations

import pytest
import torch

from bench import cliffs
from bench.cliffs import Point


def line_of(us: list[float | None], over_floor: list[float] | None = None, heads: int = 4) -> list[Point]:
    """Points of the lengths 128, 256, ... and as many scores each; the floor is 10 us unless given."""
    return [
        Point(64, 128 << i, 8, heads, "plain", "fwd", time, 1000.0,
              time and (over_floor[i] if over_floor else time / 10), 1e6, "fwd_kernel")
        for i, time in enumerate(us)
    ]  # fmt: skip


def lengths(lines: list[str]) -> list[int]:
    return [int(line.split(" S")[1].split()[0]) for line in lines]


def test_an_even_line_has_no_fault() -> None:
    points = line_of([100.0, 60.0, 120.0, 61.0])
    assert not any(cliffs.faults(points).values())
    assert cliffs.cliffs(points, cliffs.by_score) == []


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_point_above_twice_a_neighbour_is_a_cliff(at: int) -> None:
    """At either end of a line and inside; a neighbour of the slow point is none itself."""
    times: list[float | None] = [100.0] * 4
    times[at] = 201.0
    points = line_of(times)
    assert lengths(cliffs.cliffs(points)) == [128 << at]
    points[at].ours_us, points[at].over_floor = 199.0, 19.9
    assert cliffs.cliffs(points) == []


def test_only_the_next_lengths_are_neighbours() -> None:
    for times in ([100.0, 180.0, 320.0], [320.0, 180.0, 100.0]):
        assert cliffs.cliffs(line_of(times)) == []
    for field, value in (("kind", "causal"), ("direction", "bwd"), ("head_dim", 32)):
        pair = line_of([100.0, 300.0])
        setattr(pair[0], field, value)
        assert cliffs.cliffs(pair) == [], field
    assert lengths(cliffs.cliffs(line_of([100.0, 300.0])[::-1])) == [256]


def test_the_same_shape_with_other_heads_is_a_neighbour() -> None:
    found = cliffs.cliffs(line_of([100.0, 100.0]) + line_of([210.0, 190.0], heads=1))
    assert len(found) == 1 and found[0].startswith("D64 S128 B8 H1 plain fwd: 2.10 times")


def test_a_point_that_is_refused_is_no_neighbour_of_the_next() -> None:
    assert lengths(cliffs.cliffs(line_of([100.0, None, 250.0]))) == [512]


def test_time_may_grow_with_the_floor() -> None:
    """A short sequence has more bytes a score: what differs less of time and time over the floor counts."""
    at_the_floor = line_of([300.0, 100.0], over_floor=[1.1, 1.0])
    assert cliffs.cliffs(at_the_floor) == []
    assert lengths(cliffs.cliffs(at_the_floor, cliffs.by_score)) == [128]
    assert cliffs.cliffs(line_of([150.0, 100.0], over_floor=[3.0, 1.0])) == []
    assert cliffs.steepness(*line_of([300.0, 100.0], over_floor=[2.5, 1.0])) == 2.5
    assert cliffs.steepness(*line_of([300.0, 100.0], over_floor=[4.0, 1.0])) == pytest.approx(3.0)


def test_time_is_that_of_a_visible_score() -> None:
    points = line_of([100.0, 240.0], over_floor=[1.0, 2.4])
    points[1].scores *= 2
    assert cliffs.by_score(points[1], points[0]) == pytest.approx(1.2)
    assert cliffs.cliffs(points) == []


def test_behind_is_slower_than_the_peer() -> None:
    points = line_of([900.0, 999.0, 1001.0, 2000.0, None])
    assert lengths(cliffs.behind(points)) == [1024, 512]
    for point in points:
        point.peer_us = None
    assert cliffs.behind(points) == []


def test_a_refusal_is_a_fault() -> None:
    points = line_of([100.0, None, 100.0])
    points[1].refusal = "no kernel"
    found = cliffs.faults(points)
    assert found["refused by flash_ext"] == ["D64 S256 B8 H4 plain fwd: no kernel"]
    assert sum(map(len, found.values())) == 1


# ---- what is swept ----


def test_a_kind_names_the_shape_of_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, device, **how: made(*sizes, **how))
    sizes = dict(zip("bhqk", (5, 3, 7, 9)))
    for kind in (*cliffs.KINDS, *cliffs.RARE_KINDS):
        bias = cliffs.bias_of(kind, *sizes.values())
        assert (bias is not None) == ("bias" in kind)
        if bias is not None:
            letters = kind.split("bias_")[1][:4]
            assert bias.shape == tuple(sizes.get(letter, 1) for letter in letters)
            assert bias.requires_grad == kind.endswith("_grad")
            assert bias.dtype == (torch.float32 if kind.startswith("fp32") else cliffs.dtype_of(kind))


def test_the_sweep_has_every_kind_and_one_head() -> None:
    swept = {d: list(cliffs.classes(d, None)) for d in cliffs.HEADS}
    for head_dim, found in swept.items():
        assert len(set(found)) == len(found)
        kinds = {kind for _, kind in found}
        rare = set(cliffs.RARE_KINDS) if head_dim in cliffs.RARE_HEAD_DIMS else set()
        assert kinds == set(cliffs.KINDS) | rare
        assert {kind for heads, kind in found if heads == 1} == set(cliffs.ONE_HEAD_KINDS)
    assert list(cliffs.classes(64, ["cross"])) == [(12, "cross")]  # what is named is swept at any head_dim


def test_work_is_about_constant() -> None:
    for head_dim, usual in cliffs.HEADS.items():
        for heads in (1, usual):
            for s_q, s_k in [(s, s) for s in cliffs.SEQLENS] + [
                pair for s in cliffs.SEQLENS for pair in ((s, cliffs.CROSS_KEYS), (cliffs.FEW_ROWS, s))
            ]:
                batch = cliffs.batch_of(s_q, s_k, heads, head_dim)
                scores, elements = batch * heads * s_q * s_k, batch * heads * max(s_q, s_k) * head_dim
                assert scores <= cliffs.MOST_SCORES and elements <= cliffs.MOST_ELEMENTS
                full = scores > 0.4 * cliffs.MOST_SCORES or elements > 0.4 * cliffs.MOST_ELEMENTS
                assert full or batch == cliffs.MOST_BATCH


def test_what_may_be_a_cliff_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point and its neighbour, ten times as long; their first times do not count."""
    first, asked = {16: 100.0, 49: 101.0, 77: 204.0, 128: 150.0}, []

    def measured_at(place: cliffs.Place, timer: object, speeds: object, seconds: float) -> list[Point]:
        head_dim, seqlen, heads, kind = place
        asked.append((seqlen, seconds))
        us = first[seqlen] if seconds < 1 else 100.0
        return [Point(head_dim, seqlen, 8, heads, kind, "fwd", us, 1000.0, us / 10, 1e6)]

    monkeypatch.setattr(cliffs, "measured_at", measured_at)
    wanted = [(64, seqlen, 12, "plain") for seqlen in first]
    points = cliffs.sweep(wanted, None, (1.0, 1.0), 0.1)
    assert asked[4:] == [(77, 1.0), (49, 1.0)]
    assert [p.seqlen for p in points] == list(first)
    assert cliffs.cliffs(points) == []


def test_a_sweep_goes_to_every_place() -> None:
    found = list(cliffs.places([64, 128], [16, 49], ["plain", "cross"]))
    assert len(found) == len(set(found)) == 12  # plain also with one head
    assert (128, 49, 1, "plain") in found and (64, 16, 12, "cross") in found
