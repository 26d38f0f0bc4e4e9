"""Hopper backwards that add to dq in order unasked (csrc/sm90/bwd/tiles.h): when, and that they do."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from flash_ext._ops.library import _C
from tests.harness import Target, choice_of, on_targets


def kernel(
    seqlen: int, *, batch: int = 32, heads: int = 16, heads_k: int = 16, head_dim: int = 128, **more
) -> str:
    return _C.plan(
        "bwd", batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads, num_heads_k=heads_k,
        head_dim=head_dim, head_dim_v=head_dim, path=choice_of("sm90", short_kernels=0), **more,
    )["kernel"]  # fmt: skip


@pytest.mark.parametrize(
    ("seqlen", "options", "ordered"),
    [
        (512, {"window_right": 0}, False),  # two kernels are faster still
        (640, {"window_right": 0, "batch": 25}, False),  # so are they here, 1.03
        (1024, {"window_right": 0, "batch": 16}, False),  # 0.97
        (577, {"window_right": 0, "batch": 8}, False),
        (512, {"window_right": 0, "batch": 4}, False),  # 256: 0.95
        (384, {"batch": 42}, False),
        (384, {"batch": 42, "head_dim": 96}, True),  # 1.03
        (512, {"batch": 16, "head_dim": 96}, False),  # 1.00
        (8192, {"window_left": 128, "window_right": 0, "batch": 2}, True),  # 1.15
        (16384, {"window_left": 256, "window_right": 0, "batch": 1}, True),  # 1.02
        (8192, {"window_left": 1024, "window_right": 0, "batch": 2}, False),  # 0.94 since windows are drawn
        (16384, {"window_left": 128, "window_right": 128, "batch": 1}, True),  # 1.03
        (16384, {"window_left": 4096, "window_right": 0, "batch": 1}, False),  # 0.97
        (512, {"window_right": 0, "head_dim": 96, "heads": 21, "heads_k": 21}, False),  # 0.94 to 0.99
        (256, {"window_right": 0, "head_dim": 96}, True),  # 1.01 to 1.08
        (256, {"window_right": 0, "head_dim": 64, "batch": 128}, True),  # 1.07
        (197, {"head_dim": 96, "heads_k": 4, "batch": 166}, True),  # 1.08
        (512, {"window_right": 0, "head_dim": 64}, False),  # 0.98
        (512, {"window_right": 0, "heads_k": 4}, False),  # 0.98
        (512, {"window_right": 0, "packed": True}, False),  # nobody knows how long they are
    ],
)
def test_additions_are_ordered_where_that_was_faster(
    pretended_gpu, seqlen: int, options: dict, ordered: bool
) -> None:
    assert kernel(seqlen, **options).endswith("_det") == ordered


def test_the_workspace_holds_the_turns(pretended_gpu) -> None:
    asked = [
        _C.plan("bwd", batch=32, seqlen_q=640, seqlen_k=640, num_heads=16, num_heads_k=16, head_dim=128,
                head_dim_v=128, window_right=0, path="sm90", deterministic=deterministic)["workspace_bytes"]
        for deterministic in (False, True)
    ]  # fmt: skip
    assert asked[0] == asked[1]


@on_targets("sm90")
@pytest.mark.parametrize(
    ("seqlen", "head_dim", "options"),
    [(640, 128, {"causal": True}), (384, 96, {}), (1280, 128, {"window_size": (200, 70)})],
)
def test_results_are_those_of_the_deterministic_mode(
    target: Target, seqlen: int, head_dim: int, options: dict
) -> None:
    """Bit by bit."""
    generator = torch.Generator("cuda").manual_seed(7)
    like = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q, k, v, dout = (torch.randn(16, seqlen, 12, head_dim, **like) for _ in range(4))
    with target.active():
        out, lse = flash_ext.forward(q, k, v, backend=target.choice, **options)
        runs = [
            flash_ext.backward(
                dout, q, k, v, out, lse, backend=target.choice, deterministic=deterministic, **options
            )
            for deterministic in (False, True, False)
        ]
    for other in runs[1:]:
        for name, one, two in zip(("dq", "dk", "dv"), runs[0], other, strict=True):
            assert torch.equal(one, two), name
