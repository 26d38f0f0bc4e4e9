"""Hopper backwards with accumulators in a pool (csrc/sm90/bwd/dq_pool.cuh): when, and that they are right."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext._ops.library import _C
from tests.cases import Case, dense
from tests.graphs import capture, replays
from tests.harness import TARGETS, Target, call_backward, call_forward, choice_of, on_targets, run_case
from tests.inputs import Inputs, make_inputs
from tests.kernels.plans import plan, plan_of
from tests.qkv import make_qkv
from tests.sources import ROOT

PLACES = 4  # rounds that have accumulators


def planned(batch: int, seqlen: int, head_dim: int = 128, **asked: int) -> dict:
    backend = choice_of("sm90", short_kernels=0, **asked)
    return plan("bwd", batch=batch, seqlen=seqlen, heads=16, head_dim=head_dim, backend=backend)


def blocks_of(seqlen_k: int, head_dim: int) -> int:
    return math.ceil(seqlen_k / (256 if head_dim <= 64 else 128))


def round_heads(num_sms: int, blocks: int) -> int:
    """Key heads of a round, which has an item for each multiprocessor: whole groups of heads side by side."""
    group = math.ceil(4 * blocks / num_sms)
    return group * math.ceil(num_sms / (group * blocks))


# ---- which calls have one ----


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("batch", "seqlen"), [(28, 576), (16, 1024), (8, 2048), (4, 4096)])
def test_the_workspace_has_a_place_for_four_rounds(
    pretended_gpu, batch: int, seqlen: int, head_dim: int
) -> None:
    """Or three, where four do not fit the L2 cache; 134 MB without a pool. The formula of docs/design.md has
    no words in it."""
    (formula,) = re.findall(r"^pool_workspace_bytes = (.+)$", (ROOT / "docs/design.md").read_text(), re.M)
    chosen = planned(batch, seqlen, head_dim)
    heads = round_heads(132, blocks_of(seqlen, head_dim))
    rows, rounds = batch * 16 * seqlen, math.ceil(batch * 16 / heads)
    places = PLACES if 5 * PLACES * heads * seqlen * head_dim * 4 <= 4 * (50 << 20) else PLACES - 1
    known = {"rows": rows, "round_rows": heads * seqlen, "padded_head_dim": head_dim, "places": places}
    parts = chosen["workspace"]
    assert eval(formula, known) == parts.pop("row_stats") + parts.pop("dq_accum")  # noqa: S307
    assert parts == {"tile_counters": 16, "pool_words": 16 + (8 * rounds + 15) // 16 * 16}
    assert chosen["workspace_bytes"] < 44.1e6
    without = planned(batch, seqlen, head_dim, dq_pool=0)
    assert without["workspace_bytes"] == 8 * rows + 4 * head_dim * rows


def test_a_pool_changes_nothing_else_of_the_plan(pretended_gpu) -> None:
    facts = ("backend", "block_m", "block_n", "stages", "threads", "smem_bytes", "grid", "gqa_splits")
    without, with_one = (planned(32, 512, dq_pool=pool) for pool in (0, 1))
    assert [without[name] for name in facts] == [with_one[name] for name in facts]


# ---- results ----


def switched(**switches: int):
    """As a block: these facts of the device, on top of those that are set."""
    return TARGETS["cpu"].pretending(**switches).active()


def with_pool(target: Target, num_sms: int, ring: int = 1, **more: int) -> Target:
    return target.pretending(num_sms=num_sms).asking(dq_pool=ring, **more)


def in_rounds(num_sms: int, rounds: float, case: Case) -> Case:
    """With so many batch entries that its heads go in that many rounds."""
    heads = rounds * round_heads(num_sms, blocks_of(case.seqlen_k, max(case.head_dim, case.dim_v)))
    return case.replace(batch=math.ceil(heads / case.num_heads_k))


def cases(head_dim: int, num_sms: int) -> list[Case]:
    """Lengths around tiles, masks, groups of heads, layouts. Above 64 columns short calls with as many query
    heads as key heads are added in order, but causal ones with more keys than queries are not."""
    rounds = 4.3 if num_sms > 7 else 9.4  # a little more than there are places; each place three times
    found = [
        dense(1, 1, 65, 2, 1, head_dim),
        dense(1, 63, 1, 4, 2, head_dim, dtype="fp16"),
        dense(1, 65, 127, 3, 1, head_dim, causal=True, layout="bhsd", dlse=True),
        dense(1, 127, 129, 2, 2, head_dim, causal=True, dtype="fp16"),
        dense(1, 129, 63, 4, 1, head_dim, causal=True, layout="gap", dout_layout="gap"),  # rows without keys
        dense(1, 257, 130, 2, 1, head_dim, window=(100, 30), layout="packed"),
        dense(1, 70, 257, 2, 1, head_dim, window=(20, 0), dtype="fp16"),  # and keys that nobody sees
        dense(1, 192, 300, 4, 2, head_dim, head_dim - 8, dout_layout="bhsd"),
    ]
    return [in_rounds(num_sms, rounds, case.replace(seed=seed)) for seed, case in enumerate(found)]


def planned_case(case: Case, num_sms: int, **more: int) -> dict:
    with switched(num_sms=num_sms):
        return plan_of(case, choice_of("sm90", short_kernels=0, dq_pool=1, **more))


NUM_SMS, HEAD_DIMS = (1, 3, 7, 40), (40, 64, 72, 96, 128)


def test_cases_have_pools(pretended_gpu) -> None:
    """All those below; where heads are divided, they are with a pool."""
    found = [(n, case) for d, n in itertools.product(HEAD_DIMS, NUM_SMS) for case in cases(d, n)] + list(
        SOME.values()
    )
    for num_sms, case in found:
        assert planned_case(case, num_sms)["kernel"].endswith("_pool"), str(case)
    for case in (*divided(64), *divided(128)):
        chosen = planned_case(case, 3, gqa_splits=2)
        assert chosen["kernel"].endswith("_pool") and chosen["gqa_splits"] == 2, str(case)


@pytest.mark.parametrize("num_sms", NUM_SMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@on_targets("sm90")
def test_pools_are_right(target: Target, head_dim: int, num_sms: int) -> None:
    """However few CTAs there are."""
    chosen = with_pool(target, num_sms)
    found = cases(head_dim, num_sms)
    with chosen.active():
        for case in found[num_sms % 2 :: 2] if num_sms > 7 else found:
            run_case(case, chosen)
            assert _C.last_launch()["kernel"].endswith("_pool"), str(case)


def divided(head_dim: int) -> list[Case]:
    return [dense(30, 130, 200, 8, 1, head_dim), dense(1, 70, 90, 120, 30, head_dim, causal=True)]


@pytest.mark.parametrize("head_dim", [64, 128])
@on_targets("sm90")
def test_divided_heads_and_pools(target: Target, head_dim: int) -> None:
    """Parts of a key head count as key heads (csrc/gqa_splits.h)."""
    chosen = with_pool(target, 3, gqa_splits=2)
    with chosen.active():
        for case in divided(head_dim):
            run_case(case, chosen)
            launch = _C.last_launch()
            assert launch["kernel"].endswith("_pool") and launch["gqa_splits"] == 2, str(case)


def backward(x: Inputs, target: Target, num_sms: int, ring: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen = with_pool(target, num_sms, ring)
    with chosen.active():
        out, lse = call_forward(x, chosen)
        found = call_backward(x, out, lse, chosen)
        assert _C.last_launch()["kernel"].endswith("_pool") == bool(ring)
    return found


def far_apart(dq: Tensor, other: Tensor) -> Tensor:
    """Elements that differ by more than the order of additions explains. Of NaN as well."""
    return ~((dq.float() - other.float()).abs() <= 1e-3 + 2.0**-7 * other.float().abs())


def assert_alike(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], label: str) -> None:
    """dk and dv bit by bit: their order is the same."""
    assert not far_apart(found[0], expected[0]).any(), f"{label}: dq"
    for name, a, b in zip(("dk", "dv"), found[1:], expected[1:], strict=True):
        assert torch.equal(a, b), f"{label}: {name}"


SOME = {
    "apart": (7, dense(35, 130, 300, 4, 2, 64)),
    "together": (7, dense(30, 257, 150, 4, 2, 128, causal=True)),
    "together, 96": (132, dense(320, 65, 70, 4, 2, 96)),
}


@pytest.mark.parametrize("name", SOME)
@on_targets("sm90")
def test_200_repeats_are_as_without_a_pool(target: Target, name: str) -> None:
    num_sms, case = SOME[name]
    x = make_inputs(case, target.device)
    expected = backward(x, target, num_sms, 0)
    chosen = with_pool(target, num_sms)
    wrong = torch.zeros(3, dtype=torch.int64, device=target.device)
    with chosen.active():
        out, lse = call_forward(x, chosen)
        for _ in range(200):
            dq, *rest = call_backward(x, out, lse, chosen)
            exact = [(a != b).sum() for a, b in zip(rest, expected[1:], strict=True)]
            wrong += torch.stack([far_apart(dq, expected[0]).sum(), *exact])
        assert _C.last_launch()["kernel"].endswith("_pool")
    assert not wrong.any(), f"elements of dq, dk, dv that differed: {wrong.tolist()}"


@on_targets("sm90")
def test_nothing_is_left_for_the_next_call(target: Target) -> None:
    """Calls of other sizes in turn, in memory that the ones before have used."""
    kept = []
    for num_sms, case in SOME.values():
        x = make_inputs(case, target.device)
        kept.append((num_sms, case, x, backward(x, target, num_sms, 0)))
    for i in range(12):
        num_sms, case, x, expected = kept[i * i % 5 % len(kept)]
        assert_alike(backward(x, target, num_sms, 1), expected, f"call {i}, {case}")


@pytest.mark.caching
@pytest.mark.parametrize("name", SOME)
@on_targets("sm90")
def test_a_graph_is_replayed(target: Target, name: str) -> None:
    """Words and accumulators hold what the replay before has left, or anything."""
    num_sms, case = SOME[name]
    x = make_inputs(case, target.device)
    chosen = with_pool(target, num_sms)
    with chosen.active():
        out, lse = call_forward(x, chosen)
        graph, captured = capture(lambda: call_backward(x, out, lse, chosen))
        assert _C.last_launch()["kernel"].endswith("_pool")
    for i in replays(graph, x.dout, captured):
        assert_alike(captured, backward(x, target, num_sms, 0), f"replay {i}")


@on_targets("sm90")
def test_two_streams_at_once(target: Target) -> None:
    """CTAs of one call wait for each other while those of the other run between them."""
    chosen = with_pool(target, 132)
    inputs = [make_inputs(SOME["together, 96"][1].replace(seed=seed), target.device) for seed in range(2)]
    expected = [backward(x, target, 132, 0) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    with chosen.active():
        forward = [call_forward(x, chosen) for x in inputs]
        torch.cuda.synchronize()
        found = []
        for _ in range(8):
            for stream, x, (out, lse) in zip(streams, inputs, forward, strict=True):
                with torch.cuda.stream(stream):
                    found.append(call_backward(x, out, lse, chosen))
        torch.cuda.synchronize()
    for i, one in enumerate(found):
        assert_alike(one, expected[i % 2], f"call {i}")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@on_targets("sm90")
def test_gradients_in_fp32(target: Target, head_dim: int) -> None:
    """dq then leaves another way. In fp32 the order of additions is all that differs."""
    q, k, v = make_qkv(
        "cuda", batch=20, seqlen_q=135, seqlen_k=150, heads=4, heads_k=2, head_dim=head_dim,
        dtype=torch.bfloat16,
    )  # fmt: skip
    dout = torch.randn_like(q)
    for causal in (False, True):
        found = {}
        for ring, wide in ((0, torch.float32), (1, torch.float32), (1, None)):
            chosen = with_pool(target, 3, ring)
            with chosen.active():
                out, lse = flash_ext.forward(q, k, v, causal=causal, backend=chosen.choice)
                found[ring, wide] = flash_ext.backward(
                    dout, q, k, v, out, lse, causal=causal, backend=chosen.choice, grad_dtype=wide
                )
                assert _C.last_launch()["kernel"].endswith("_pool") == bool(ring)
        expected, wide, rounded = found.values()
        assert all(t.dtype == torch.float32 for t in wide)
        torch.testing.assert_close(wide[0], expected[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(wide[1], expected[1]) and torch.equal(wide[2], expected[2])
        assert_alike(rounded, tuple(t.bfloat16() for t in expected), f"causal={causal}")
