"""Short sequences: kernels for at most 80 queries and keys, dq that is stored at once with at most 128 keys;
gradients of biases that many sequences share, and biases whose rows are not aligned."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest
from flash_ext._ops.library import _C
from flash_ext._ops.plan import plan as plan_of_words
from tests.cases import Case, dense
from tests.harness import TARGETS, Target, on_short_paths, on_targets, run_cases
from tests.modifier_cases import paired_cases, single_cases

EDGES = (1, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 77, 80)
HEAD_DIMS = (
    (16, 16), (32, 32), (40, 40), (64, 64), (72, 80), (80, 80), (96, 96), (128, 128), (256, 256), (32, 64),
    (128, 24),
)  # fmt: skip


def plan(direction: str, seqlen_q: int, seqlen_k: int, **more) -> dict:
    shape = dict(batch=64, num_heads=4, num_heads_k=4, head_dim=32, head_dim_v=32) | more
    return _C.plan(direction, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **shape)


# --------------------------------------------------------------------------------------------------
# Which calls


LENGTHS = (1, 16, 17, 32, 33, 49, 64, 65, 80, 81, 128)


@pytest.mark.parametrize("head_dim", [32, 64, 72, 128])
def test_forwards_of_few_rows_or_of_many_heads(pretended_gpu, head_dim: int) -> None:
    """Of few heads those of more than 16 rows, and above head_dim 64 of more than 32, have Hopper's kernels,
    and few queries of more keys the split-KV kernel. Of many heads up to 32 rows stay here, and at head_dim
    32 65 to 80, whose columns are half of a Hopper tile."""
    for rows, keys in itertools.product(LENGTHS, repeat=2):
        longer, sizes = max(rows, keys), dict(head_dim=head_dim, head_dim_v=head_dim)
        few = plan("fwd", rows, keys, batch=16, **sizes)["row"]
        if longer <= (16 if head_dim <= 64 else 32):
            assert few == "sm80.fwd.short"
        elif rows <= 16 and keys > (64 if head_dim <= 64 else 32):
            assert few == "sm80.fwd.split_kv"
        else:
            assert few == ("sm90.fwd.m64" if head_dim <= 64 else "sm90.fwd.m192")
        many = plan("fwd", rows, keys, batch=4096, **sizes)["row"]
        if longer <= 32 or (head_dim == 32 and longer <= 80 and min(rows, keys) > 64):
            assert many == "sm80.fwd.short"
        else:
            assert many == ("sm90.fwd.m64" if head_dim <= 64 else "sm90.fwd.m192")


def test_backwards_of_up_to_80_rows(pretended_gpu) -> None:
    """Where one warpgroup of a Hopper kernel is not faster. Those take no head_dim of 65, whose rows do not
    begin on 16 bytes."""
    for head_dim, batch in itertools.product((32, 64, 65, 72, 81, 96, 128, 256), (16, 4096)):
        few, sizes = batch == 16, dict(head_dim=head_dim, head_dim_v=head_dim, batch=batch)
        for rows, keys in itertools.product(LENGTHS, repeat=2):
            longer = max(rows, keys)
            expected = {
                32: longer <= (32 if few else 80 if rows > 64 else 64),
                64: longer <= (16 if few else 32),
                65: longer <= 80,
                72: not few and (longer <= 32 or 64 < min(rows, keys) <= longer <= 80),
                81: longer <= 64,
                96: not few and longer <= 32,
                128: not few and longer <= 32,
                256: longer <= 32,
            }
            kernel = plan("bwd", rows, keys, **sizes)["kernel"]
            assert ("short" in kernel) == expected[head_dim], (head_dim, batch, rows, keys, kernel)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_tiles_hold_the_longer_of_queries_and_keys(pretended_gpu, direction: str) -> None:
    for rows, keys in itertools.product(EDGES, repeat=2):
        chosen = plan(direction, rows, keys, batch=16, backend=f"sm90 row=sm80.{direction}.short")
        longer = max(rows, keys)
        tile = next(size for size in (16, 32, 64, 80) if longer <= size)
        assert (chosen["block_m"], chosen["block_n"], chosen["threads"]) == (tile, tile, 2 * tile)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_batch_does_not_choose(pretended_gpu, direction: str) -> None:
    """Of kernels for short sequences, but for tiles of 64 queries where there are enough for all."""
    sizes = dict(head_dim=128, head_dim_v=128)
    assert len({plan(direction, 49, 49, batch=batch, **sizes)["kernel"] for batch in (1, 2, 64, 4096)}) == 1
    with TARGETS["cpu"].pretending(batch_invariant=1).active():
        assert len({plan(direction, 49, 49, batch=batch)["kernel"] for batch in (1, 2, 64, 4096)}) == 1
    # Where tiles have a multiprocessor each, the backward of longer sequences is divided into two kernels.
    assert len({plan(direction, 100, 100, batch=batch)["kernel"] for batch in (128, 4096)}) == 1


# --------------------------------------------------------------------------------------------------
# Right at every edge


@on_short_paths
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_every_edge(target: Target, head_dim: int, head_dim_v: int) -> None:
    cases = []
    for index, (rows, keys) in enumerate(itertools.product(EDGES, repeat=2)):
        if (index + head_dim) % 3 and rows != keys:
            continue
        heads, heads_k = ((2, 2), (3, 3), (4, 2))[index % 3]
        mask: dict = ({}, {"causal": True}, {"window": (9, 4)})[index // 2 % 3]
        dtype = ("bf16", "fp16")[index % 2]
        cases.append(dense(3, rows, keys, heads, heads_k, head_dim, head_dim_v, dtype=dtype,
                           dlse=index % 4 == 0, deterministic=index % 5 == 0, **mask))  # fmt: skip
    run_cases(cases, target)


@on_short_paths
@pytest.mark.parametrize("layout", ["bhsd", "sbhd", "gap", "odd", "offset"])
def test_layouts(target: Target, layout: str) -> None:
    run_cases([dense(3, 49, 33, 2, 2, d, layout=layout, causal=True) for d in (24, 64, 128)], target)


@on_targets("sm90-short")
@pytest.mark.parametrize("head_dim", [32, 64])
def test_one_block_of_keys(target: Target, head_dim: int) -> None:
    """Rows that no key sees, grouped heads, fixed order, more items than multiprocessors."""
    cases = [
        dense(2, 300, 128, 4, 4, head_dim, causal=True),  # most tiles of queries see nothing
        dense(3, 128, 77, 4, 2, head_dim, deterministic=True),
        dense(2, 65, 128, 3, 3, head_dim, window=(20, 3), dtype="fp16"),
        dense(40, 100, 100, 4, 4, head_dim, causal=True),
        dense(1, 500, 1, 2, 1, head_dim, window=(3, 0)),
    ]
    run_cases(cases, target)


@on_short_paths
@pytest.mark.parametrize("parts", [2, 8])
def test_divided_heads(target: Target, parts: int) -> None:
    """As many parts as query heads of a key head make backwards that the short kernels take, with K and V
    that heads share; fewer go with dq that is stored at once."""
    cases = [
        dense(3, 49, 49, 8, 1, 64, causal=True),
        dense(1, 33, 64, 16, 2, 32, dtype="fp16", dlse=True),
        dense(2, 17, 50, 8, 1, 128, 40, deterministic=True),
        dense(2, 150, 100, 8, 1, 64, window=(40, 3)),
        dense(3, 5, 77, 8, 1, 40, layout="odd", dout_layout="odd"),
    ]
    run_cases(cases, target.asking(gqa_splits=parts))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_plans_of_nothing(pretended_gpu, direction: str) -> None:
    for empty in ({"batch": 0}, {"num_heads": 0, "num_heads_k": 0}):
        assert plan(direction, 49, 49, **empty)["grid"] == 0
    for nothing in ({"num_heads": 0}, {"num_heads_k": 0}, {"head_dim": 0}, {"batch": -1}, {"num_heads_k": 3}):
        with pytest.raises(ValueError, match="must be at least"):
            plan(direction, 49, 49, **nothing)


# --------------------------------------------------------------------------------------------------
# Up to 256 keys: two warpgroups have all of them, and dq is stored at once


@on_targets("sm90-short")
def test_stored_dq(target: Target) -> None:
    cases = [
        dense(3, 197, 197, 4, 4, 64),
        dense(2, 64, 256, 3, 3, 64, dtype="fp16", dlse=True),
        dense(2, 300, 129, 6, 2, 64, deterministic=True),
        dense(1, 1000, 193, 4, 1, 40, 24),
        dense(2, 256, 256, 3, 3, 64, causal=True),
        dense(2, 100, 250, 4, 2, 48, causal=True, deterministic=True),
        dense(2, 333, 160, 2, 2, 32, causal=True),
        dense(2, 222, 222, 2, 2, 64, window=(40, 3)),
        dense(5, 1, 256, 2, 2, 8),
        dense(40, 65, 130, 8, 8, 64, layout="bhsd"),
    ]
    run_cases(cases, target.asking(row="sm90.bwd.dq_stored"))


@on_targets("sm90-short")
@pytest.mark.parametrize("head_dim", [72, 80, 96])
def test_stored_dq_of_shared_keys(target: Target, head_dim: int) -> None:
    """Above head_dim 64 up to 128 keys, of which each warpgroup has 64, and its columns of dq."""
    cases = [
        dense(3, 128, 128, 4, 4, head_dim),
        dense(2, 64, 100, 3, 3, head_dim, dtype="fp16", dlse=True),
        dense(2, 300, 77, 6, 2, head_dim, deterministic=True),
        dense(1, 1000, 128, 8, 1, head_dim, 24),
        dense(2, 256, 128, 3, 3, head_dim, causal=True),
        dense(2, 100, 33, 4, 2, 24, head_dim, causal=True, deterministic=True),
        dense(2, 333, 128, 2, 2, head_dim, window=(40, 3)),
        dense(5, 1, 128, 2, 2, head_dim),
        dense(40, 65, 101, 8, 8, head_dim, layout="bhsd"),
    ]
    run_cases(cases, target.asking(row="sm90.bwd.dq_stored"))


def test_the_batch_invariant_mode_keeps_dq_in_the_plain_kernel(pretended_gpu) -> None:
    """Calls whose queries are shared out elsewhere: in the mode none are."""
    sizes = dict(head_dim=80, head_dim_v=80)
    with TARGETS["cpu"].pretending(batch_invariant=1).active():
        for lengths, batch in (((4096, 77), 34), ((16384, 77), 34), ((1024, 77), 40)):
            assert plan("bwd", *lengths, batch=batch, **sizes)["row"] == "sm90.bwd.dq_stored"


def test_a_step_holds_head_and_tile() -> None:
    """The number of a step has room for fewer heads of a group."""
    words = "bwd batch=67 seqlen=128 heads=256/2 head_dim=80 sm90 row=sm90.bwd.dq_stored gpu=9.0/132"
    with pytest.raises(ValueError, match="no row"):
        plan_of_words(words)


@on_targets("sm90-short")
def test_wide_gradients_of_few_keys(target: Target) -> None:
    """Another kernel makes those in fp32. Rounded they are the same, bit for bit."""
    q, k, v, dout = (torch.randn(40, 100, 8, 80, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = flash_ext.forward(q, k, v)
    with target.active():
        usual = flash_ext.backward(dout, q, k, v, out, lse, backend=target.choice)
        assert _C.last_launch()["row"] == "sm90.bwd.dq_stored"
        wide = flash_ext.backward(dout, q, k, v, out, lse, backend=target.choice, grad_dtype=torch.float32)
        assert _C.last_launch()["row"] == "sm90.bwd.whole_keys"
    for x, y in zip(usual, wide):
        assert y.dtype == torch.float32 and torch.equal(x, y.bfloat16())


@pytest.mark.parametrize("q_splits", [1, 3])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128])
@on_targets("sm90-short")
def test_stored_dq_of_one_warpgroup(target: Target, head_dim: int, q_splits: int) -> None:
    """Up to 128 keys, above head_dim 64 up to 64; two CTAs a multiprocessor. With as many heads of queries as
    of keys CTAs share out the queries, some of which may then have none."""
    most = 128 if head_dim <= 64 else 64
    cases = [
        dense(3, most, most, 4, 4, head_dim),
        dense(2, 64, most - 1, 3, 3, head_dim, dtype="fp16", dlse=True),
        dense(2, 300, most // 2 + 1, 6, 2, head_dim, deterministic=True),
        dense(1, 1000, 33, 4, 1, head_dim, 24),
        dense(2, 256, most, 3, 3, head_dim, causal=True),
        dense(2, 33, most, 4, 2, head_dim, causal=True, deterministic=True),
        dense(2, 100, most, 2, 2, head_dim, window=(40, 3)),
        dense(5, 1, most, 2, 2, head_dim),
        dense(80, 65, 60, 8, 8, head_dim, layout="bhsd"),
    ]
    chosen = target.asking(row="sm90.bwd.dq_stored_short", q_splits=q_splits)
    run_cases(cases, chosen)
    # A CTA fetches its work, some of which has no queries.
    few = [dense(3, 300, most, 2, 2, head_dim, causal=True),
           dense(2, 700, 40, 2, 2, head_dim, window=(64, 0))]  # fmt: skip
    run_cases(few, chosen.pretending(num_sms=1))


@pytest.mark.parametrize(
    ("lengths", "asked", "launches"),
    [
        ((300, 100), {}, 1), ((100, 128), {"window_size_right": 0}, 1),
        ((300, 100), {"window_size_right": 0}, 2),  # its first queries see no key: zeros
        ((128, 64), {"head_dim": 128, "head_dim_v": 128}, 2), ((100, 100), {"packed": True}, 3),
    ],
)  # fmt: skip
def test_one_warpgroup_makes_its_statistics(
    pretended_gpu, lengths: tuple, asked: dict, launches: int
) -> None:
    """In dense calls up to head_dim 64, where no query has a dq of zeros that others would not write."""
    found = plan("bwd", *lengths, backend="sm90 row=sm90.bwd.dq_stored_short", **asked)
    assert len(found["launches"]) == launches
    assert ("row_stats" in found["workspace"]) == (launches > 1)


@on_targets("sm90-short")
def test_statistics_of_an_out_that_tma_cannot_read(target: Target) -> None:
    """Rows of an odd length: a kernel in front reads them."""
    q, k, v = (torch.randn(3, n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (150, 90, 90))
    out, lse = flash_ext.forward(q, k, v)
    dout = torch.randn_like(out)
    odd = torch.empty(3, 150, 4, 65, device="cuda", dtype=torch.bfloat16)[..., :64].copy_(out)
    with target.active():
        row = f"{target.choice} row=sm90.bwd.dq_stored_short"
        own = flash_ext.backward(dout, q, k, v, out, lse, backend=row)
        assert len(_C.last_launch()["launches"]) == 1
        for gradient, other in zip(own, flash_ext.backward(dout, q, k, v, odd, lse, backend=row)):
            torch.testing.assert_close(gradient, other, atol=2e-2, rtol=2e-2)
        assert len(_C.last_launch()["launches"]) == 2


@on_targets("sm90-short")
def test_stored_dq_repeats(target: Target) -> None:
    """With fewer CTAs than heads too, each of which then goes on from one head to the next."""
    for sms in (None, 3):
        chosen = target.pretending(num_sms=sms) if sms else target
        with chosen.active():
            q, k, v = (torch.randn(9, n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (250, 200, 200))
            out, lse = flash_ext.forward(q, k, v)
            dout = torch.randn_like(out)
            runs = [flash_ext.backward(dout, q, k, v, out, lse, backend=target.choice) for _ in range(50)]
            assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


# --------------------------------------------------------------------------------------------------
# Few keys: CTAs share out the queries


@on_targets("sm90-short")
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_divided_queries(target: Target, splits: int) -> None:
    cases = [
        dense(2, 512, 77, 3, 3, 64),
        dense(2, 300, 128, 4, 2, 64, causal=True, deterministic=True),
        dense(1, 1000, 96, 4, 1, 40, 24, dtype="fp16", dlse=True),
        dense(3, 130, 100, 2, 2, 128, window=(40, 3)),
        dense(2, 450, 128, 6, 2, 64, layout="bhsd", dout_layout="odd"),
        dense(1, 200, 1, 2, 2, 32),
    ]
    run_cases(cases, target.asking(q_splits=splits))


@on_targets("sm90-short")
@pytest.mark.parametrize("splits", [2, 5])
def test_divided_queries_with_modifiers(target: Target, splits: int) -> None:
    """With up to 128 keys and more: dq is stored, and added."""
    cases = [m for m in single_cases() + paired_cases()[::3] if not m.is_packed]
    few = [short(m, 128, i) for i, m in enumerate(cases)]
    run_cases([m for m in few if m is not None] + cases[::2], target.asking(q_splits=splits))


# --------------------------------------------------------------------------------------------------
# Modifiers


def short(case: Case, limit: int, index: int) -> Case | None:
    """The same with lengths up to `limit`; None for packed ones."""
    if case.is_packed:
        return None
    lengths = [n for n in (17, 49, 64, 33, 77, 80, 128) if n <= limit]
    rows, keys = lengths[index % len(lengths)], lengths[index // 3 % len(lengths)]
    if any("documents" in name for name in case.mods) or case.seqlen_q == case.seqlen_k:
        rows = keys
    heads_k = case.num_heads if index % 2 else case.num_heads_k
    return case.replace(seqlen_q=rows, seqlen_k=keys, num_heads_k=heads_k, batch=3)


@on_short_paths
@pytest.mark.parametrize("limit", [64, 80, 128])
def test_every_modifier(target: Target, limit: int) -> None:
    cases = [short(m, limit, i) for i, m in enumerate(single_cases() + paired_cases())]
    run_cases([m for m in cases if m is not None], target)


# --------------------------------------------------------------------------------------------------
# Biases that are shared, and their gradients


def truth_of_bias(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, bias: Tensor) -> list[Tensor]:
    """out, dq, dk, dv and dbias in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1]) / math.sqrt(q.shape[-1]) + leaves[3]
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), leaves[2])
    return [out, *torch.autograd.grad(out, leaves, dout.double())]


def results_of_bias(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, bias: Tensor, path: str) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v, bias)]
    out = flash_ext.attention(*leaves[:3], bias=leaves[3], backend=path)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def bias_inputs(batch: int, rows: int, keys: int, heads: int, head_dim: int, shape: tuple[int, ...],
                dtype: torch.dtype) -> tuple[Tensor, ...]:  # fmt: skip
    def make(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    q, dout = make(batch, rows, heads, head_dim), make(batch, rows, heads, head_dim)
    k, v = make(batch, keys, heads, head_dim), make(batch, keys, heads, head_dim)
    return q, k, v, dout, torch.randn(shape, device="cuda", dtype=dtype)


@on_short_paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", [49, 64, 77, 200])
def test_a_bias_broadcast_over_any_dimensions(target: Target, rows: int, dtype: torch.dtype) -> None:
    """Of any strides, alone or expanded; the gradient has the shape that was given."""
    with target.active():
        for subset in itertools.product((False, True), repeat=4):
            names = ("out", "dq", "dk", "dv", "dbias")
            if subset[3]:
                names = names[:-1]  # constant along keys: rows of dS sum to 0, and what is left is rounding
            shape = tuple(1 if one else n for one, n in zip(subset, (5, 3, rows, rows)))
            q, k, v, dout, bias = bias_inputs(5, rows, rows, 3, 32, shape, dtype)
            views = [bias, bias.expand(5, 3, rows, rows)]
            if shape[2] > 1 and shape[3] > 1:
                views.append(bias.mT.contiguous().mT)
            for view in views:
                truth = truth_of_bias(q, k, v, dout, view)
                made = results_of_bias(q, k, v, dout, view, target.choice)
                for name, got, want in zip(names, made, truth):
                    assert got.shape == want.shape
                    error = (got.double() - want).norm() / want.norm()
                    assert error < 0.012, f"{name} of bias {tuple(view.shape)}, {view.stride()}: {error:.2g}"


@on_short_paths
@pytest.mark.parametrize("sms", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("rows", [49, 77, 130])
def test_sums_over_the_batch_in_parts(target: Target, rows: int, sms: int | None) -> None:
    """Batches around the number of parts, with few multiprocessors too; the same bits every time."""
    chosen = dataclasses.replace(target, switches=(("num_sms", sms),) if sms else ())
    with chosen.active():
        for batch in (1, 2, 7, 8, 33, 100):
            inputs = bias_inputs(batch, rows, rows, 2, 32, (1, 2, rows, rows), torch.float32)
            truth = truth_of_bias(*inputs)[-1]
            first, second = (results_of_bias(*inputs, target.choice) for _ in range(2))
            error = (first[-1].double() - truth).norm() / truth.norm()
            assert error < 0.01, f"batch {batch}: {error:.2g}"
            assert torch.equal(first[-1], second[-1])


@on_short_paths
def test_many_sequences_add_without_losing_bits(target: Target) -> None:
    """4096 windows of 49 rows that share a bias: sums in fp32, so the error does not grow with the batch."""
    errors = []
    with target.active():
        for batch in (64, 4096):
            inputs = bias_inputs(batch, 49, 49, 4, 32, (1, 4, 49, 49), torch.float32)
            truth = truth_of_bias(*inputs)[-1]
            made = results_of_bias(*inputs, target.choice)[-1]
            errors.append(float((made.double() - truth).norm() / truth.norm()))
    assert errors[1] < 1.5 * errors[0], errors


@on_short_paths
@pytest.mark.parametrize("rows", [49, 77])
def test_nan_stays_in_its_sequence(target: Target, rows: int) -> None:
    with target.active():
        q, k, v, dout, bias = bias_inputs(9, rows, rows, 2, 64, (1, 2, rows, rows), torch.bfloat16)
        before = results_of_bias(q, k, v, dout, bias, target.choice)
        for spoiled in (q, k, v, dout):
            kept = spoiled[4].clone()
            spoiled[4] = math.nan
            after = results_of_bias(q, k, v, dout, bias, target.choice)
            spoiled[4] = kept
            others = [n for n in range(9) if n != 4]
            for old, new in zip(before[:4], after[:4]):
                assert torch.equal(old[others], new[others])


@on_short_paths
@pytest.mark.parametrize("rows", [49, 77, 100])
def test_the_same_bits_every_time(target: Target, rows: int) -> None:
    """dq too: nothing is added to memory. And the deterministic mode changes nothing."""
    with target.active():
        x = [torch.randn(20, rows, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        dout = x.pop()
        x = [t.requires_grad_() for t in x]
        runs = []
        for n in range(20):
            out = flash_ext.attention(*x, causal=True, backend=target.choice, deterministic=n == 0)
            runs.append(torch.autograd.grad(out, x, dout))
        if target.path == "sm90" or rows <= 80:
            for run in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


@on_targets("sm90", "sm80")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["16", "fp32"])
@pytest.mark.parametrize("keys", [77, 197])
@pytest.mark.parametrize("rows", [130, 1], ids=["", "one_row"])
def test_rows_that_are_not_aligned_change_no_bit(target: Target, rows: int, keys: int,
                                                 dtype: torch.dtype) -> None:  # fmt: skip
    """A bias in rows of 77 gives what it gives in rows of 80, in the same kernels, at any offset."""
    with target.active():
        q, k, v, dout, bias = bias_inputs(3, 130, keys, 2, 64, (1, 2, rows, keys), dtype)
        room = torch.full((1, 2, rows, -(-keys // 8) * 8), math.nan, device="cuda", dtype=dtype)
        room[..., :keys] = bias
        shifted = torch.empty(bias.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(bias).copy_(bias)
        stride = room.stride(2)  # memory that ends with the last element, after which nothing may be read
        exact = torch.empty(room.numel() - stride + keys, device="cuda", dtype=dtype)
        exact = exact.as_strided(bias.shape, room.stride()).copy_(bias)
        made, kernels = [], []
        for view in (bias, room[..., :keys], shifted, exact):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out, (lse, _) = flash_ext.attention(
                *leaves,
                bias=view,
                backend=target.choice,
                return_aux=AuxRequest(lse=True, max_scores=True),
                deterministic=True,
            )
            kernels.append(_C.last_launch()["kernel"])
            made.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
            kernels.append(_C.last_launch()["kernel"])
        assert kernels[:2] == kernels[2:4] == kernels[4:6] == kernels[6:]
        for other in made[1:]:
            assert all(torch.equal(a, b) for a, b in zip(made[0], other))


@on_short_paths
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("rows", [17, 33, 49, 64, 77, 80])
def test_a_bias_of_each_head_alone(target: Target, rows: int, head_dim: int) -> None:
    """Read as it lies, ahead of its head, at any offset and with room behind its rows."""
    shape = (120, 9, rows, rows)  # more heads than there are CTAs at a time
    with target.active():
        q, k, v, _, bias = bias_inputs(120, rows, rows, 9, head_dim, shape, torch.bfloat16)
        truth = truth_of_bias(q, k, v, torch.zeros_like(q), bias)[0]
        spoiled = torch.full((bias.numel() + 32,), math.nan, device="cuda", dtype=bias.dtype)
        room = torch.full((*shape[:3], rows + 3), math.nan, device="cuda", dtype=bias.dtype)
        views = [bias, *(spoiled[n : n + bias.numel()].view_as(bias) for n in (1, 8, 11)), room[..., :rows]]
        made: dict[str, Tensor] = {}
        for view in views:
            out = flash_ext.attention(q, k, v, bias=view.copy_(bias), backend=target.choice)
            error = (out.double() - truth).norm() / truth.norm()
            assert error < 0.012, f"{view.stride()}: {error:.2g}"
            assert torch.equal(out, made.setdefault(_C.last_launch()["kernel"], out))


def test_targets_with_and_without_them() -> None:
    assert {name for name, target in TARGETS.items() if target.short} == {"sm80-short", "sm90-short"}
