"""The forward for few queries: lists of cases with the keys in parts, and calls that split by themselves.

`run_case` judges them as all others, repeats them bit for bit, and finds in the recorded launch that keys
were split.
"""

from __future__ import annotations

import pytest

from flash_ext._ops.library import _C
from tests.cases import (
    DATA_KINDS,
    Case,
    covering_cases,
    dense,
    edge_cases,
    few_query_cases,
    packed,
    small_cases,
)
from tests.harness import Target, on_all_tiles, on_gpu_paths, on_targets, run_case, run_cases
from tests.modifier_cases import paired_cases, single_cases
from tests.probes import probe_case


def in_parts(target: Target, parts: int) -> Target:
    """The same target, whose plain forwards have their keys in that many parts."""
    return target.asking(kv_splits=parts)


def forwards(cases: list[Case]) -> list[Case]:
    return [case.replace(backward=False) for case in cases]


@on_all_tiles
@pytest.mark.parametrize("parts", [1, 3, 40])
def test_small_shapes_and_edges_in_parts(target: Target, parts: int) -> None:
    """More parts than keys, of packed and grouped calls too; lse is judged as everywhere."""
    run_cases(forwards(small_cases() + edge_cases()), in_parts(target, parts), cpu=6)


@on_gpu_paths
def test_covering_array_in_parts(target: Target) -> None:
    for i, parts in enumerate((1, 2, 7)):
        run_cases(forwards(covering_cases(2, seed=i)), in_parts(target, parts))


@on_gpu_paths
def test_probes_in_parts(target: Target) -> None:
    """With q = 0, lse counts the keys: none is lost between two parts, none is seen twice."""
    cases = small_cases() + [
        dense(1, 3, 700, 4, 2, 64, causal=True),
        dense(2, 70, 700, 4, 1, 128, window=(130, 7)),
    ]
    for parts in (1, 5):
        run_cases(cases, in_parts(target, parts), probe_case)


@on_gpu_paths
def test_every_kind_of_data_in_parts(target: Target) -> None:
    """Infinities, NaN and moving maxima, met by one part and not by others."""
    cases = [
        dense(2, 20, 200, 4, 2, d, data=data, dtype=dtype, causal=causal, backward=False)
        for data in DATA_KINDS
        for dtype in ("bf16", "fp16")
        for d in (64, 128)
        for causal in (False, True)
    ]
    cases += [
        dense(2, rows, 130, 4, h_k, d, data="nan_row", window=window, backward=False)
        for rows in (4, 100)
        for h_k in (4, 2)
        for d in (64, 128, 256)
        for window in ((-1, -1), (-1, 0), (20, 5))
    ]
    for parts in (1, 3):
        run_cases(cases, in_parts(target, parts))


@on_gpu_paths
def test_backward_from_results_in_parts(target: Target) -> None:
    """The backward takes out and lse, whoever made them."""
    cases = [dense(2, 9, 1500, 4, 2, d, causal=True, dlse=True) for d in (64, 128, 192)]
    run_cases(
        cases + [packed([1, 0, 30], [800, 5, 1000], num_heads=4, num_heads_k=1, head_dim=96)],
        in_parts(target, 4),
    )


@on_gpu_paths
def test_decoding_splits_by_itself(target: Target) -> None:
    with target.active():
        for case in few_query_cases():
            run_case(case.replace(backward=False), target)
            kernel = _C.last_launch()["kernel"]
            assert any(name in kernel for name in ("split", "parts", "packed")), str(case)


# ---- with modifiers ----


@on_gpu_paths
@pytest.mark.parametrize("parts", [1, 3, 40])
def test_every_modifier_in_parts(target: Target, parts: int) -> None:
    """Alone and in pairs, on every shape: rows of a tile differ in their heads and queries."""
    cases = [case for case in single_cases() + paired_cases() if not case.dropout_p]
    run_cases(cases, in_parts(target, parts))


@on_gpu_paths
def test_decoding_with_modifiers_splits_by_itself(target: Target) -> None:
    """One or a few new tokens over a long cache, with what models and batches ask for."""
    asked = (
        "padding padding_left sinks softcap30 alibi distance150 bias_b11k bias_bhqk_f32 mask_b1qk documents "
        "prefix chunk100 hkeys2 hrows1 blocks64x128"
    ).split()
    with target.active():
        for i, name in enumerate(asked):
            rows, heads_k, head_dim = (1, 4)[i % 2], (8, 2, 1)[i % 3], (64, 128, 256)[i % 3]
            case = dense(2, rows, 5000, 8, heads_k, head_dim, causal=i % 2 == 1, backward=False)
            run_case(case.replace(mods=(name,)), target)
            assert "fwd_split_mod" in _C.last_launch()["kernel"], name
        # A window beside first keys leaves out what lies between.
        for names in (("sinktok5",), ("sinktok40", "sinks"), ("prefix", "softcap30")):
            case = dense(2, 3, 5000, 8, 2, 128, window=(300, 0), backward=False)
            for parts in (1, 3):
                run_case(case.replace(mods=names), in_parts(target, parts))


# ---- tiles of 128 queries on Hopper whose keys are in parts ----


def parts_of_tiles(target: Target, parts: int) -> Target:
    return target.asking(row="sm90.fwd.parts", kv_splits=parts)


@on_targets("sm90")
@pytest.mark.parametrize("parts", [2, 3, 16])
def test_parts_of_tiles(target: Target, parts: int) -> None:
    """Parts without keys, rows without keys, and heads of every size."""
    cases = [
        dense(batch, rows, keys, 6, h_k, d, dv, dtype=dtype, causal=causal, window=window, backward=False)
        for batch, rows, keys, h_k in ((1, 65, 1000, 6), (2, 300, 129, 2), (1, 1025, 700, 3), (3, 128, 1, 6))
        for d, dv, dtype in ((64, 64, "bf16"), (40, 64, "fp16"), (96, 72, "bf16"), (128, 128, "fp16"))
        for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (90, 40)))
    ]
    run_cases(cases + [dense(1, 512, 4096, 4, 2, 128, causal=True, dlse=True)], parts_of_tiles(target, parts))


@on_targets("sm90")
def test_data_of_every_kind_in_parts_of_tiles(target: Target) -> None:
    cases = [
        dense(2, 100, 600, 4, 2, d, data=data, dtype=dtype, causal=causal, backward=False)
        for data in DATA_KINDS
        for d, dtype in ((64, "fp16"), (128, "bf16"))
        for causal in (False, True)
    ]
    run_cases(cases, parts_of_tiles(target, 3))


@on_targets("sm90")
def test_probes_in_parts_of_tiles(target: Target) -> None:
    cases = [
        dense(1, 200, 900, 4, 2, 64, causal=True, backward=False),
        dense(2, 70, 700, 4, 1, 128, window=(130, 7), backward=False),
    ]
    run_cases(cases, parts_of_tiles(target, 4), probe_case)


# ---- last tiles of 128 keys that hold 80 or fewer ----


@on_targets("sm90")
@pytest.mark.parametrize("block_m", [128, 192])
def test_few_keys_in_the_last_tile(target: Target, block_m: int) -> None:
    """Behind the last key of 80 weights, and with 81 keys, which take all of the tile."""
    cases = [
        dense(2, 200, keys, 3, 3, d, dtype=dtype, data=data, causal=causal, backward=False)
        for keys in (1, 79, 80, 81, 144, 208, 209, 263)
        for d, dtype, data in ((64, "bf16", "normal"), (128, "fp16", "normal"), (64, "fp16", "nan_row"))
        for causal in (False, True)
    ]
    cases += [packed([70, 0, 300], [80, 5, 197], num_heads=2, num_heads_k=1, head_dim=64, backward=False)]
    run_cases(cases, target.asking(fwd_block_m=block_m, kv_splits=0))
