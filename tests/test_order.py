"""Hopper backwards that add to dq in order unasked (csrc/sm90/bwd_tiles.h): when, and that they do."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from flash_ext.ops import _C
from tests.harness import Target, on_targets


def kernel(
    seqlen: int, *, batch: int = 32, heads: int = 16, heads_k: int = 16, head_dim: int = 128, **more
) -> str:
    return _C.plan(
        "bwd", batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads, num_heads_k=heads_k,
        head_dim=head_dim, head_dim_v=head_dim, path="sm90", **more,
    )["kernel"]  # fmt: skip


@pytest.mark.parametrize(
    ("seqlen", "options", "ordered"),
    [
        (512, {"window_right": 0}, True),  # 235 for 218 TFLOP/s
        (512, {}, True),  # 372 for 368
        (8192, {"window_left": 128, "window_right": 0, "batch": 2}, True),  # 130 for 113
        (1024, {"window_right": 0, "batch": 16}, False),  # 333 for 345
        (1024, {"batch": 16}, False),
        (8192, {"window_left": 1024, "window_right": 0, "batch": 2}, False),
        (512, {"head_dim": 64}, False),  # 203 for 206
        (512, {"heads_k": 4}, False),
        (512, {"batch": 8}, False),  # 512 blocks of keys for 132 multiprocessors
        (512, {"packed": True}, False),  # whose lengths nobody knows
    ],
)
def test_additions_are_ordered_where_that_was_faster(
    pretended_gpu, seqlen: int, options: dict, ordered: bool
) -> None:
    assert kernel(seqlen, **options).endswith("_det") == ordered


def test_the_workspace_holds_the_turns(pretended_gpu) -> None:
    asked = [
        _C.plan("bwd", batch=32, seqlen_q=512, seqlen_k=512, num_heads=16, num_heads_k=16, head_dim=128,
                head_dim_v=128, path="sm90", deterministic=deterministic)["workspace_bytes"]
        for deterministic in (False, True)
    ]  # fmt: skip
    assert asked[0] == asked[1]


@on_targets("sm90")
@pytest.mark.parametrize("causal", [False, True])
def test_results_are_those_of_the_deterministic_mode(target: Target, causal: bool) -> None:
    """Bit by bit, with 768 blocks of keys."""
    generator = torch.Generator("cuda").manual_seed(7)
    shape, options = (16, 512, 12, 128), {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q, k, v, dout = (torch.randn(*shape, **options) for _ in range(4))
    with target.active():
        out, lse = flash_ext.forward(q, k, v, causal=causal, path="sm90")
        runs = [
            flash_ext.backward(
                dout, q, k, v, out, lse, causal=causal, path="sm90", deterministic=deterministic
            )
            for deterministic in (False, True, False)
        ]
    for other in runs[1:]:
        for name, one, two in zip(("dq", "dk", "dv"), runs[0], other, strict=True):
            assert torch.equal(one, two), name
