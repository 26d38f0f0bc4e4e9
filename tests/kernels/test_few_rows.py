"""Hopper backwards of few rows, in two kernels (csrc/sm90/bwd/tiles.h): when, what they want, and that they
are right and repeat bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import flash_ext
from flash_ext._ops.library import _C
from tests.cases import Case, dense
from tests.harness import Target, call_backward, call_forward, choice_of, on_targets, run_case
from tests.inputs import make_inputs
from tests.kernels.plans import plan, plan_of
from tests.kernels.test_dq_pool import switched

TWO = "bwd_sm90_hd128_dkdv"


def planned(seqlen: int, window_size_right: int = -1, **asked: int) -> dict:
    return plan("bwd", batch=32, seqlen=seqlen, heads=16, head_dim=128, window_size_right=window_size_right,
                backend=choice_of("sm90", short_kernels=0, **asked))  # fmt: skip


def test_not_in_the_batch_invariant_mode(pretended_gpu) -> None:
    """The choice depends on the number of heads."""
    with switched(batch_invariant=1):
        assert planned(512)["kernel"] != TWO


def test_the_workspace_holds_statistics_and_counters(pretended_gpu) -> None:
    """lse and delta of whole tiles, 16 bytes for each kernel that draws its items; no dq in fp32."""
    assert planned(512)["workspace_bytes"] == 8 * 32 * 16 * 512
    assert planned(500, window_size_right=0)["workspace_bytes"] == 8 * 32 * 16 * 512 + 2 * 16


def cases() -> list[Case]:
    """Lengths around tiles of both kernels, masks, layouts; gradients in both types."""
    found = [
        dense(2, 1, 1, 12, 12, 128),
        dense(3, 63, 65, 4, 4, 128, dtype="fp16", dlse=True),
        dense(2, 65, 127, 5, 5, 104, causal=True, layout="bhsd"),
        dense(2, 129, 63, 8, 8, 128, causal=True, layout="gap", dout_layout="gap"),  # rows without keys
        dense(2, 128, 128, 6, 6, 128, dtype="fp16", causal=True),
        dense(1, 300, 511, 3, 3, 120, 128, dtype="fp16", causal=True, dlse=True),
        dense(1, 512, 512, 3, 3, 128, layout="packed"),
        dense(1, 511, 512, 4, 4, 128, causal=True),
        dense(1, 200, 449, 4, 4, 128, 64, dout_layout="bhsd"),
        dense(1, 449, 200, 7, 7, 40, 128, dtype="fp16"),
    ]
    return [
        case.replace(seed=seed, deterministic=deterministic)
        for seed, case in enumerate(found)
        for deterministic in (False, True)
    ]


def with_few(target: Target, num_sms: int) -> Target:
    return target.pretending(num_sms=num_sms)


def test_cases_run_in_two(pretended_gpu) -> None:
    for num_sms, case in itertools.product((1, 3), cases()):
        with switched(num_sms=num_sms):
            assert plan_of(case, choice_of("sm90", short_kernels=0))["kernel"] == TWO, str(case)
    for case in divided():
        with switched(num_sms=3):
            chosen = plan_of(case, choice_of("sm90", short_kernels=0, gqa_splits=case.num_heads))
        assert (chosen["kernel"], chosen["gqa_splits"]) == (TWO, case.num_heads), str(case)


@pytest.mark.parametrize("num_sms", [1, 3])
@on_targets("sm90")
def test_two_kernels_are_right(target: Target, num_sms: int) -> None:
    chosen = with_few(target, num_sms)
    with chosen.active():
        for case in cases():
            run_case(case, chosen)
            assert _C.last_launch()["kernel"] == TWO, str(case)


def divided() -> list[Case]:
    """Query heads that share a key head, each a part of its own."""
    return [
        dense(2, 300, 130, 8, 1, 128),
        dense(3, 130, 200, 4, 1, 104, causal=True, dtype="fp16", deterministic=True),
    ]


@on_targets("sm90")
def test_divided_heads(target: Target) -> None:
    """Parts of dk and dv come in fp32 and are added behind."""
    for case in divided():
        chosen = with_few(target, 3).asking(gqa_splits=case.num_heads)
        with chosen.active():
            run_case(case, chosen)
            assert _C.last_launch()["kernel"] == TWO, str(case)


@on_targets("sm90")
@pytest.mark.parametrize("causal", [False, True])
def test_all_multiprocessors_and_the_same_bits(target: Target, causal: bool) -> None:
    """As callers get them, asked to be deterministic or not."""
    case = dense(16, 480, 512, 8, 8, 128, causal=causal)
    with target.active():
        run_case(case, target)
        assert _C.last_launch()["kernel"] == TWO
        x = make_inputs(case, target.device)
        out, lse = call_forward(x, target)
        asked = [dataclasses.replace(x, case=case.replace(deterministic=flag)) for flag in (False, True)]
        first = call_backward(x, out, lse, target)
        for n in range(1000):
            for one, other in zip(first, call_backward(asked[n % 2], out, lse, target), strict=True):
                assert torch.equal(one, other), n
        assert _C.last_launch()["kernel"] == TWO
        wide = flash_ext.backward(
            x.dout, x.q, x.k, x.v, out, lse, causal=causal, scale=case.effective_scale,
            grad_dtype=torch.float32, backend=target.choice,
        )  # fmt: skip
        assert _C.last_launch()["kernel"] == TWO
    for one, other in zip(first, wide, strict=True):
        assert torch.equal(one, other.to(one.dtype))
