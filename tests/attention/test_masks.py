"""Empty and short inputs; causal masks and windows."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from tests import probes
from tests.attention.calls import assert_same, attend, differentiate, make_qkv
from tests.cases import Case, dense, packed
from tests.harness import Target, on_all_tiles, on_paths, run_cases
from tests.probes import probe_case

# Every block size of any tile, with its neighbours.
TILES = (64, 80, 96, 112, 128, 144, 176, 192, 256)
AROUND_TILES = tuple(t + d for t in TILES for d in (-1, 0, 1))


# ---- empty and short inputs ----


# No queries, no keys, other empty dimensions, and hints of one row.
EMPTY = [
    dense(2, 0, 128, 4, 4, 64), packed([0, 0], [5, 7], num_heads=4, num_heads_k=2),
    dense(2, 128, 0, 4, 4, 64), dense(2, 128, 0, 4, 2, 64, causal=True, deterministic=True),
    packed([5, 7], [0, 0], num_heads=4, num_heads_k=2),
    dense(0, 5, 7, 4, 2, 64), dense(2, 5, 7, 0, 0, 64), dense(2, 0, 0, 4, 2, 64), dense(0, 0, 0, 0, 0, 8),
    packed([], [], num_heads=4, num_heads_k=2), packed([], [], num_heads=4, num_heads_k=2, tail=9),
    packed([0], [0], num_heads=4, num_heads_k=2),
    packed([0, 1, 0, 1], [1, 1, 0, 0], hints=True), packed([1, 0], [0, 1], hints=True, causal=True),
]  # fmt: skip


@on_paths
def test_empty_inputs(target: Target) -> None:
    """Rows without keys have out 0 and lse -inf."""
    run_cases(EMPTY, target)


@on_paths
def test_one_query_sees_all_keys_with_and_without_causal(target: Target) -> None:
    for seqlen_k in (1, 2, 63, 64, 65, 127, 128, 129, 4097):
        qkv = make_qkv(target, 2, 1, seqlen_k, 4, 2, 64)
        assert_same(attend(target, *qkv, causal=True), attend(target, *qkv), f"{seqlen_k} keys")


@on_all_tiles
def test_causal_with_more_queries_than_keys(target: Target) -> None:
    """The rows before the first key are exactly empty, and pass nothing on."""
    shapes = ((5, 3), (34, 1), (128, 1), (257, 128), (1023, 1), (799, 3))
    cases = [dense(2, *s, 4, 2, 64, causal=True, deterministic=d) for s in shapes for d in (False, True)]
    run_cases(cases, target, cpu=4)
    for rows, keys in shapes:
        out, lse, dq, *_ = differentiate(target, make_qkv(target, 2, rows, keys, 4, 2, 64), causal=True)
        empty = rows - keys
        assert not out[:, :empty].any() and not dq[:, :empty].any()
        assert (lse.isneginf().sum(-1) == empty).all()


# ---- causal masks and windows ----


@on_all_tiles
def test_causal_around_every_tile_size(target: Target) -> None:
    """One key more or less moves the lse of a row by 1/n: no off-by-one passes."""
    cases = [dense(1, sq, sk, 2, 1, 64, causal=True) for sq in AROUND_TILES for sk in AROUND_TILES]
    run_cases(cases, target, probes.count, cpu=25)


WINDOWS = (
    (0, 0), (1, 0), (0, 1), (63, 0), (64, 0), (65, 0), (127, 1), (128, 128), (-1, 3), (3, -1), (300, 300),
)  # fmt: skip


@on_all_tiles
def test_windows(target: Target) -> None:
    cases = [
        dense(1, sq, sk, 2, 1, 64, window=w) for w in WINDOWS for sq, sk in ((129, 129), (70, 200), (200, 70))
    ]
    run_cases(cases, target, probe_case, cpu=5)
    run_cases(cases, target, cpu=5)


@on_paths
def test_windows_that_exclude_every_key_of_some_rows(target: Target) -> None:
    cases = [
        dense(2, 300, 100, 4, 2, 64, window=w, deterministic=d)
        for w in ((10, 0), (0, 0), (5, 20))
        for d in (False, True)
    ]
    run_cases(cases, target, cpu=3)


@pytest.mark.parametrize("window", [(-1, -5), (10, -3), (-2, 0), (-7, -7)])
@on_paths
def test_negative_reach_is_refused(target: Target, window: tuple[int, int]) -> None:
    q, k, v = make_qkv(target, 1, 8, 8, 1, 1, 64)
    with pytest.raises(ValueError, match="window"):
        flash_ext.attention(q, k, v, window_size=window, backend=target.path)


@on_paths
def test_reach_near_the_end_of_int32(target: Target) -> None:
    far = 2**31 - 1
    windows = ((far, far), (far - 100, 0), (far, -1), (-1, far - 200), (0, far), (2**40, 2**40))
    cases = [
        dense(1, sq, sk, 2, 1, 64, causal=c, window=w)
        for w in windows
        for c in (False, True)
        for sq, sk in ((100, 200), (200, 100))
    ]
    run_cases(cases, target, probes.count, cpu=8)
    run_cases(cases, target, cpu=5)


@on_all_tiles
def test_backward_with_many_more_queries_than_keys(target: Target) -> None:
    cases = [
        dense(2, 2048, 16, 4, 4, 64, causal=True),
        dense(1, 4096, 129, 2, 1, 64, causal=True),
        dense(1, 2048, 16, 2, 1, 128, causal=True, deterministic=True),
    ]
    run_cases(cases, target, cpu=1)


@on_all_tiles
def test_backward_with_ragged_last_key_tile(target: Target) -> None:
    cases = [
        dense(1, 128, 128 + r, 2, 1, d, causal=c)
        for r in (1, 63, 64, 65, 127)
        for d in (64, 128, 256)
        for c in (False, True)
    ]
    run_cases(cases, target, cpu=6)


@on_all_tiles
def test_window_edges_around_tile_edges(target: Target) -> None:
    cases = [
        dense(1, 300, 333, 2, 1, 64, window=(t + delta, right))
        for t in (32, 64, 128)
        for delta in (-1, 0, 1)
        for right in (0, 1, t - 1, t)
    ]
    run_cases(cases, target, probes.count, cpu=8)
    run_cases(cases, target, probes.indicator, cpu=4)


@on_paths
def test_a_wider_window_never_lowers_lse(target: Target) -> None:
    """And a key that adds nothing in float32 (its logit is far below all others) leaves out bitwise alone."""
    q, k, v = (t.detach() for t in make_qkv(target, 2, 150, 180, 4, 2, 64))
    previous = None
    for left in range(0, 140, 9):
        _, lse = attend(target, q, k, v, window_size=(left, 0))
        assert previous is None or (lse >= previous - 1e-6).all(), f"left {left}"
        previous = lse
    q, k = q.abs(), k.abs()
    row = 40
    aligned = row + 180 - 150
    k[:, aligned - 20] = -100  # first key outside (19, 0), only one more inside (20, 0)
    narrow, wide = (attend(target, q, k, v, window_size=(left, 0))[0] for left in (19, 20))
    assert torch.equal(narrow[:, row], wide[:, row])


def causal_windows() -> list[Case]:
    return [
        dense(1, sq, sk, 2, 1, 64, causal=True, window=w)
        for sq, sk in ((100, 164), (164, 100), (1, 90), (65, 193))
        for w in ((0, 0), (31, -1), (64, 5), (-1, 2), (3, 0))
    ]


@on_all_tiles
def test_causal_and_window_and_different_lengths(target: Target) -> None:
    run_cases(causal_windows(), target, probe_case, cpu=5)
    run_cases(causal_windows(), target, cpu=7)


@on_paths
def test_causal_is_the_window_without_a_right_side(target: Target) -> None:
    """Contract: causal equals a right reach of 0, bit for bit, also beside a left reach."""
    qkv = make_qkv(target, 2, 100, 140, 4, 2, 64)
    for left in (-1, 17):
        causal = attend(target, *qkv, causal=True, window_size=(left, -1))
        assert_same(attend(target, *qkv, window_size=(left, 0)), causal)
