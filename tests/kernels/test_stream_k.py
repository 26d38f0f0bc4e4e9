"""Backwards whose CTAs divide the last blocks of keys (StreamK in csrc/sm90/bwd/config.cuh): when, and that
they are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cases import Case, dense
from tests.graphs import capture, replays
from tests.harness import TARGETS, Target, call_backward, call_forward, choice_of, on_targets, run_case
from tests.inputs import Inputs, make_inputs
from tests.kernels.plans import plan_of

ROW = "sm90.bwd.dq_atomic"
MANY = 10**6  # multiprocessors: every block of keys has one, and nothing is divided


def is_divided(found: dict) -> bool:
    parts = found["workspace"]
    assert ("stream_k_sums" in parts) == ("stream_k_words" in parts)
    return "stream_k_sums" in parts


# ---- which calls divide them ----


@pytest.mark.parametrize(
    ("case", "divided"),
    [
        (dense(4, 1024, 1024, 20, 20, 64), True),  # SDXL: 320 blocks for 132 multiprocessors
        (dense(2, 4608, 4608, 24, 24, 128), True),  # Flux: 864
        (dense(1, 8192, 8192, 32, 32, 64), True),
        (dense(1, 16384, 16384, 16, 16, 128), True),
        (dense(3, 4096, 4096, 11, 11, 128), False),  # 1056, eight for each
        (dense(1, 1024, 1024, 33, 33, 64), False),  # 132
        (dense(1, 2048, 2048, 8, 8, 128), False),  # 128
        (dense(1, 32768, 32768, 32, 32, 128), False),  # the last round is one of 63
        (dense(4, 1024, 1024, 20, 20, 64, causal=True), False),  # CTAs fetch blocks of unequal length
        (dense(4, 1024, 1024, 20, 20, 64, window=(100, 100)), False),
        (dense(4, 1024, 1024, 20, 4, 64), False),  # grouped heads
    ],
    ids=str,
)  # fmt: skip
def test_when_blocks_are_divided(pretended_gpu, case: Case, divided: bool) -> None:
    assert is_divided(plan_of(case, "sm90")) == divided


def test_modes_that_fix_other_orders_divide_nothing(pretended_gpu) -> None:
    case = dense(4, 1024, 1024, 20, 20, 64)
    assert not is_divided(plan_of(case, "sm90", deterministic=True))
    with TARGETS["cpu"].pretending(batch_invariant=1).active():
        assert not is_divided(plan_of(case, "sm90"))


def test_the_workspace_has_sums_of_each_cta_and_a_word_of_each_block(pretended_gpu) -> None:
    parts = plan_of(dense(4, 1024, 1024, 20, 20, 64), "sm90")["workspace"]
    assert parts["stream_k_words"] == 4 * (320 - 132)
    assert parts["stream_k_sums"] == 132 * 2 * 256 * 64 * 4


# ---- results ----


def on_few(target: Target, num_sms: int) -> Target:
    return target.pretending(num_sms=num_sms).asking(row=ROW)


def cases(head_dim: int, num_sms: int) -> list[Case]:
    """One block more than CTAs, one less than twice as many, and three rounds more; ends inside of tiles."""
    block = 256 if head_dim <= 64 else 128
    found = []
    for seed, (blocks, rows) in enumerate(
        ((num_sms + 1, 1100), (2 * num_sms - 1, 2017), (3 * num_sms + 1, 2900), (2 * num_sms + 1, 1700))
    ):
        layout = ("bshd", "bhsd", "gap", "bshd")[seed]
        dtype = "fp16" if seed % 2 else "bf16"
        keys = block + 70 if blocks % 2 == 0 else block  # two blocks of a head, the second one not full
        heads = blocks // 2 if blocks % 2 == 0 else blocks
        found.append(
            dense(
                1, rows, keys, heads, heads, head_dim, layout=layout, dtype=dtype, seed=seed, dlse=seed == 3
            )
        )
    return found


NUM_SMS, HEAD_DIMS = (2, 3, 7), (40, 64, 96, 128)


def planned(case: Case, num_sms: int) -> dict:
    with TARGETS["cpu"].pretending(num_sms=num_sms).active():
        return plan_of(case, choice_of("sm90", row=ROW))


@pytest.mark.parametrize("num_sms", NUM_SMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cases_divide_blocks(pretended_gpu, head_dim: int, num_sms: int) -> None:
    assert sum(is_divided(planned(case, num_sms)) for case in cases(head_dim, num_sms)) >= 3


@pytest.mark.parametrize("num_sms", NUM_SMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@on_targets("sm90")
def test_divided_blocks_are_right(target: Target, head_dim: int, num_sms: int) -> None:
    chosen = on_few(target, num_sms)
    with chosen.active():
        for case in cases(head_dim, num_sms):
            run_case(case, chosen)


def backward(x: Inputs, target: Target, num_sms: int, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    chosen = on_few(target, num_sms)
    with chosen.active():
        return call_backward(x, out, lse, chosen)


SOME = {
    "apart": (7, dense(2, 1030, 770, 3, 3, 64)),  # 24 blocks for 7 CTAs
    "together": (7, dense(1, 1030, 330, 8, 8, 128)),
    "together, 96": (132, dense(2, 700, 1111, 8, 8, 96)),
}


@pytest.mark.parametrize("name", SOME)
def test_repeated_cases_divide_blocks(pretended_gpu, name: str) -> None:
    num_sms, case = SOME[name]
    assert is_divided(planned(case, num_sms))


@pytest.mark.parametrize("name", SOME)
@on_targets("sm90")
def test_200_repeats_have_the_bits_of_whole_blocks(target: Target, name: str) -> None:
    """Of dk and dv: whoever takes sums goes on from them. dq is added in any order."""
    num_sms, case = SOME[name]
    x = make_inputs(case, target.device)
    chosen = on_few(target, num_sms)
    out, lse = call_forward(x, target)
    whole = backward(x, target, MANY, out, lse)
    with chosen.active():
        for i in range(200):
            found = call_backward(x, out, lse, chosen)
            for what, a, b in zip(("dk", "dv"), found[1:], whole[1:], strict=True):
                assert torch.equal(a, b), f"{what} of run {i}"
    torch.testing.assert_close(found[0], whole[0], rtol=2.0**-7, atol=1e-3)


@pytest.mark.caching
@pytest.mark.parametrize("name", SOME)
@on_targets("sm90")
def test_a_graph_is_replayed(target: Target, name: str) -> None:
    """Words hold what the replay before has left."""
    num_sms, case = SOME[name]
    x = make_inputs(case, target.device)
    chosen = on_few(target, num_sms)
    out, lse = call_forward(x, target)
    with chosen.active():
        graph, captured = capture(lambda: call_backward(x, out, lse, chosen))
    for i in replays(graph, x.dout, captured):
        whole = backward(x, target, MANY, out, lse)
        for what, a, b in zip(("dk", "dv"), captured[1:], whole[1:], strict=True):
            assert torch.equal(a, b), f"{what} of replay {i}"


@on_targets("sm90")
def test_two_streams_at_once(target: Target) -> None:
    """CTAs of one call wait for each other while those of the other run between them."""
    case = SOME["together, 96"][1]
    inputs = [make_inputs(case.replace(seed=seed), target.device) for seed in range(2)]
    forward = [call_forward(x, target) for x in inputs]
    whole = [backward(x, target, MANY, *of_x) for x, of_x in zip(inputs, forward, strict=True)]
    chosen = on_few(target, 132)
    streams = [torch.cuda.Stream() for _ in inputs]
    with chosen.active():
        torch.cuda.synchronize()
        for _ in range(20):
            found = []
            for x, (out, lse), stream in zip(inputs, forward, streams, strict=True):
                with torch.cuda.stream(stream):
                    found.append(call_backward(x, out, lse, chosen))
            torch.cuda.synchronize()
            for mine, expected in zip(found, whole, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine[1:], expected[1:], strict=True))
