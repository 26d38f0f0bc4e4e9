"""Hopper backwards that add to dq in order unasked (csrc/sm90/bwd/tiles.h): when, and that they do."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from tests.harness import Target, on_targets
from tests.kernels.plans import plan


def test_the_workspace_holds_the_turns(pretended_gpu) -> None:
    asked = [
        plan("bwd", batch=32, seqlen=640, heads=16, head_dim=128, window_size_right=0, backend="sm90",
             deterministic=deterministic)["workspace_bytes"]
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
