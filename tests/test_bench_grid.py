"""The grid of shapes whose times the plan's tables follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import grid
from bench.grid import Line, Shape
from flash_ext._ops import plan as plans

SHAPE = Shape("bwd", 8, 1024, 1024, 16, 16, 128, False)


def test_the_grid_is_spread_and_has_every_shape_once() -> None:
    found = grid.shapes([64, 128])
    assert len(found) == len(set(found)) > 500
    for part in (found[: len(found) // 8], found[-len(found) // 8 :]):
        assert {shape.seqlen_q for shape in part} == set(grid.SEQLENS)
        assert {(shape.direction, shape.head_dim, shape.causal) for shape in part} == {
            (direction, head_dim, causal)
            for direction in ("fwd", "bwd") for head_dim in (64, 128) for causal in (False, True)
        }  # fmt: skip


def test_rows_that_can_serve_a_shape() -> None:
    rows, chosen = grid.rows_of(SHAPE, plans.facts("9.0/132"))
    assert {"sm90.bwd.dq_atomic", "sm90.bwd.dq_pool", "sm90.bwd.split_short", "sm80.bwd"} <= set(rows)
    assert chosen in rows and "sm90.bwd.split" not in rows and "sm80.bwd.short" not in rows


def test_a_file_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    assert grid.read(path) == []
    lines = [Line(SHAPE, "a", True, 12.5), Line(SHAPE, "b", False, 10.0)]
    grid.append(path, lines)
    grid.append(path, [Line(SHAPE._replace(causal=True), "a", True, 7.25)])
    assert grid.read(path) == [*lines, Line(SHAPE._replace(causal=True), "a", True, 7.25)]


def test_the_report_names_what_a_choice_costs() -> None:
    short = SHAPE._replace(seqlen_q=64, seqlen_k=64)
    lines = [Line(SHAPE, "a", True, 12.0), Line(SHAPE, "b", False, 10.0),
             Line(short, "a", True, 5.0), Line(short, "b", False, 20.0)]  # fmt: skip
    text = grid.report(lines)
    assert "bwd D128: 1.095, 1.200" in text
    assert "a: 1.826 at 2 shapes" in text  # the root of 4 * 10 / 12
    assert "1 shapes above 1.03" in text
    assert "1.200 bwd D128 B8 S1024 H16: a 12 us, b 10 us" in text


@pytest.mark.gpu
def test_every_row_of_a_shape_is_timed() -> None:
    import torch

    from bench import timing

    timer = timing.make_timer(torch.device("cuda"))
    for shape in (SHAPE, SHAPE._replace(direction="fwd", num_heads_k=4, causal=True)):
        lines = grid.measure(shape, timer, 0.005)
        assert [line.row for line in lines] == grid.rows_of(shape)[0]
        assert sum(line.is_chosen for line in lines) == 1 and all(line.us > 1 for line in lines)
