"""The sweep for slow shape classes: its verdicts on planted points."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench import cliffs
from bench.cliffs import Point
from bench.record import stored_text
from tests.sources import ROOT


def line_of(us: list[float | None], heads: int = 4) -> list[Point]:
    """Points of the lengths 128, 256, ... and as many scores each; the floor is 10 us."""
    return [
        Point(64, 128 << i, 8, heads, "plain", "fwd", time, 1000.0, time and time / 10, 1e6, "fwd_kernel")
        for i, time in enumerate(us)
    ]


def lengths(lines: list[str]) -> list[int]:
    return [int(line.split(" S")[1].split()[0]) for line in lines]


def test_an_even_line_has_no_fault() -> None:
    assert not any(cliffs.faults(line_of([100.0, 60.0, 120.0, 61.0])).values())


def test_lengths_are_close() -> None:
    """Further apart a score may take twice as long by its bytes, or by what a tile leaves empty."""
    for length, longer in zip(cliffs.SEQLENS, cliffs.SEQLENS[1:]):
        assert length < longer <= (1.6 if length < 1024 else 2) * length
    assert (cliffs.SEQLENS[0], cliffs.SEQLENS[-1]) == (16, 4096)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_point_above_twice_a_neighbour_is_a_cliff(at: int) -> None:
    """At either end of a line and inside; a neighbour of the slow point is none itself."""
    times: list[float | None] = [100.0] * 4
    times[at] = 201.0
    points = line_of(times)
    assert lengths(cliffs.cliffs(points)) == [128 << at]
    points[at].ours_us = 199.0
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


def test_the_next_head_dim_is_a_neighbour() -> None:
    """A larger one may take longer by the ratio of the two, a smaller one as long as the larger."""

    def pair(of_64: float, of_128: float, heads: int = 4) -> list[Point]:
        small, large = line_of([of_64]) + line_of([of_128], heads=heads)
        return [small, replace(large, head_dim=128)]

    assert cliffs.cliffs(pair(100.0, 390.0)) == []
    assert cliffs.cliffs(pair(100.0, 410.0)) == [
        "D128 S128 B8 H4 plain fwd: 2.05 times D64 S128 H4, 41.0 times the floor"
    ]
    assert cliffs.cliffs(pair(190.0, 100.0)) == []
    assert cliffs.cliffs(pair(210.0, 100.0))[0].startswith("D64 S128 B8 H4 plain fwd: 2.10 times D128")
    assert len(cliffs.cliffs(pair(100.0, 410.0, heads=8))) == 1  # several heads beside several
    assert cliffs.cliffs(pair(100.0, 410.0, heads=1)) == []
    slow = replace(line_of([500.0])[0], head_dim=256)
    assert cliffs.cliffs([*pair(100.0, 200.0), slow]) == []
    for field, value in (("kind", "causal"), ("direction", "bwd"), ("seqlen", 256)):
        assert cliffs.cliffs([replace(pair(100.0, 410.0)[0], **{field: value}), pair(100.0, 410.0)[1]]) == []


def test_a_point_that_is_refused_is_no_neighbour_of_the_next() -> None:
    assert lengths(cliffs.cliffs(line_of([100.0, None, 250.0]))) == [512]


def test_time_is_that_of_a_visible_score() -> None:
    points = line_of([100.0, 240.0])
    assert lengths(cliffs.cliffs(points)) == [256]
    points[1].scores *= 2
    assert cliffs.steepness(points[1], points[0]) == pytest.approx(1.2)
    assert cliffs.cliffs(points) == []


def test_behind_is_slower_than_the_peer() -> None:
    points = line_of([900.0, 999.0, 1001.0, 2000.0, None])
    assert lengths(cliffs.behind(points)) == [1024, 512]
    for point in points:
        point.peer_us = None
    assert cliffs.behind(points) == []


def test_the_summary_counts_points_with_a_peer_and_those_without() -> None:
    points = line_of([900.0, 1001.0, 950.0])
    points[2].peer_us, points[2].peer_refusal = None, "no kernel"
    lines = cliffs.summary(points).splitlines()
    assert "1 of 2 points with a peer behind efficient" in lines
    at = lines.index("1 of 3 points without a peer")
    assert lines[at + 1] == "  1 of plain"
    assert sum(map(len, cliffs.faults(points).values())) == 1  # that of the slow point


def test_the_summary_names_cliffs() -> None:
    lines = cliffs.summary(line_of([210.0, 100.0, 150.0])).splitlines()
    at = lines.index("1 of 3 points above 2 times a neighbour")
    assert lines[at + 1 :] == ["  D64 S128 B8 H4 plain fwd: 2.10 times D64 S256 H4, 21.0 times the floor"]


def test_a_refusal_is_a_fault() -> None:
    points = line_of([100.0, None, 100.0])
    points[1].refusal = "no kernel"
    found = cliffs.faults(points)
    assert found["refused by flash_ext"] == ["D64 S256 B8 H4 plain fwd: no kernel"]
    assert sum(map(len, found.values())) == 1


# ---- what is swept ----


EVERY_KIND = (*cliffs.KINDS, *cliffs.RARE_KINDS)


def test_a_kind_names_the_shape_of_its_bias() -> None:
    sizes = dict(zip("bhqk", (5, 3, 7, 9)))
    for kind in EVERY_KIND:
        bias = cliffs.bias_of(kind, tuple(sizes.values()), "cpu")
        assert (bias is not None) == ("bias" in kind)
        if bias is not None:
            letters = kind.split("bias_")[1][:4]
            assert bias.shape == tuple(sizes.get(letter, 1) for letter in letters)
            assert bias.requires_grad == kind.endswith("_grad")
            assert bias.dtype == (torch.float32 if kind.startswith("fp32") else cliffs.dtype_of(kind))


def floor_of(kind: str, direction: str, speeds: tuple[float, float]) -> float:
    point = Point(64, 128, 2, 3, kind, direction, 1.0, None, None, 2 * 3 * 128 * 128)
    return cliffs.floor_of(point, speeds)


def test_the_floor_is_the_longer_of_bytes_and_products() -> None:
    rows, product = 2.0 * 2 * 3 * 128 * 64, 2.0 * 2 * 3 * 128 * 128 * 64
    for direction, tensors, products in (("fwd", 4, 2), ("bwd", 8, 5)):
        assert floor_of("plain", direction, (10.0, 1e12)) == pytest.approx(tensors * rows / 10)
        assert floor_of("plain", direction, (1e12, 10.0)) == pytest.approx(products * product / 10)
    planted = Point(64, 128, 2, 3, "plain", "fwd", 8 * rows, None, None, 1.0)
    (measured,) = cliffs.over_the_floor([planted], (1.0, 1e12))
    assert measured.over_floor == pytest.approx(2.0)


@pytest.mark.parametrize("kind, element", [("bias_1hqk", 2), ("fp32_bias_1hqk", 4), ("fp16_bias_1hqk", 2)])
def test_the_floor_counts_a_bias_once_and_its_gradient_where_it_is_made(kind: str, element: int) -> None:
    bias = element * 3 * 128 * 128
    expected = {("fwd", ""): 1, ("fwd", "_grad"): 1, ("bwd", ""): 1, ("bwd", "_grad"): 2}
    for (direction, ending), times in expected.items():
        more = floor_of(kind + ending, direction, (1.0, 1e12)) - floor_of("plain", direction, (1.0, 1e12))
        assert more == pytest.approx(times * bias), (direction, ending)


def differ(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """By 0.03 of the norm; of 1 an element where a bias is the same for all keys, whose gradient is 0."""
    norm = expected.numel() ** 0.5 if expected.shape[-1] == 1 else float(expected.float().norm())
    return float((found.float() - expected.float()).norm()) > 0.03 * norm


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_has_a_peer_that_computes_the_same(kind: str, device: str) -> None:
    """Outputs and all gradients; where dropout differs their shapes."""
    backend = SDPBackend.MATH if device == "cpu" else SDPBackend.EFFICIENT_ATTENTION
    sizes = (2, 3, *cliffs.lengths_of(49, kind))
    calls = cliffs.calls_of(32, sizes, kind, device, backend)
    (ours, theirs), (grads, peer_grads) = (
        [both[name]() for name in (cliffs.OURS, cliffs.PEER)] for both in (calls.forward, calls.backward)
    )
    pairs = [(ours, theirs.transpose(1, 2))]
    pairs += [(found, one.transpose(1, 2)) for found, one in zip(grads[:3], peer_grads[:3], strict=True)]
    pairs += list(zip(grads[3:], peer_grads[3:], strict=True))
    assert len(pairs) == (5 if kind.endswith("grad") else 4)
    for found, expected in pairs:
        assert found.shape == expected.shape
        assert kind == "dropout" or not differ(found, expected)


def test_a_bias_that_is_the_same_for_all_keys_is_written_out() -> None:
    for shape in ((2, 3, 5, 1), (1, 3, 5, 1), (1, 1, 5, 1), (1, 3, 5, 8), (2, 1, 1, 8)):
        bias = torch.randn(shape, requires_grad=True)
        with torch.no_grad():  # as in a forward, whose tensor a backward uses again
            mask = cliffs.written_out(bias, (2, 3, 5, 8))
        assert mask.stride(-1) == 1 and torch.equal(mask, bias.expand(2, 3, 5, 8))
        (grad,) = torch.autograd.grad(mask.sum(), bias)
        assert torch.equal(grad, torch.full(shape, mask.numel() / bias.numel()))


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


def test_a_stored_file_is_judged_by_the_present_rules(tmp_path, capsys) -> None:
    """Its times over the floor are made anew, and what it does not have is left open."""
    points = [asdict(point) for point in line_of([100.0, 250.0])]
    for point in points:
        point["over_floor"] = 1.0
        del point["peer_refusal"]
    file = tmp_path / "cliffs.json"
    file.write_text(json.dumps({"speeds": [1e9, 1e6], "points": points}))
    assert cliffs.main(["--report", str(file)]) == 1
    assert "1 of 2 points above 2 times a neighbour" in capsys.readouterr().out
    points[1]["ours_us"] = 150.0
    file.write_text(json.dumps({"speeds": [1e9, 1e6], "points": points}))
    assert cliffs.main(["--report", str(file)]) == 0


def test_documents_have_the_numbers_of_the_stored_sweep() -> None:
    """All points, those with a peer, and cliffs."""
    (file,) = (ROOT / "bench" / "results").glob("*/cliffs.json.gz")
    points, text = cliffs.report(file)
    assert len(points) == len(json.loads(stored_text(file))["points"]) and "times a neighbour" in text
    assert {point.seqlen for point in points} == set(cliffs.SEQLENS)
    counts = [len(points), len(cliffs.with_peer(points)), len(cliffs.cliffs(points))]
    for name, mark in (("docs/benchmarks.md", "| slow shapes"), ("bench/results/README.md", "| `cliffs` |")):
        (line,) = (one for one in (ROOT / name).read_text(encoding="utf-8").splitlines() if mark in one)
        numbers = re.findall(r"(?<!\w)[0-9]+(?!\w)", line)
        assert [count for count in counts if count and str(count) not in numbers] == [], name
