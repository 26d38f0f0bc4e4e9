"""Numbers that the literature states."""

from __future__ import annotations

import itertools

import pytest

from examples.ladder.costs import attention_memory
from flash_ext._ops.library import _C


def memory_ratio(seqlen: int, head_dim: int = 64) -> float:
    """Bytes of one head of standard attention in fp16, scores and weights held, over those of ours."""
    tensors = 4 * seqlen * head_dim * 2
    more = attention_memory(seqlen, seqlen)
    return (tensors + 2 * more.scores) / (tensors + more.flash)


def test_ten_to_twenty_times_less_memory() -> None:
    """At lengths from 1.2 to 2.4 thousand; it grows with the length, so the number is of its time."""
    assert memory_ratio(1200) == pytest.approx(10, abs=0.3)
    assert memory_ratio(2430) == pytest.approx(20, abs=0.3)
    assert memory_ratio(32768) > 200


def test_scores_beyond_4096_tokens_fill_a_12_gb_card() -> None:
    """Scores and weights of batch 4 and 16 heads take a third of it at 4096, more than all at 8192."""
    gb = 2**30
    assert 2 * attention_memory(4096, 4096, num_heads=16, batch=4).scores == 4 * gb
    assert 2 * attention_memory(8192, 8192, num_heads=16, batch=4).scores == 16 * gb > 12 * gb
    assert attention_memory(8192, 8192, num_heads=16, batch=4).flash == gb // 512


@pytest.mark.parametrize("compute_capability, smem", [(80, 166912), (86, 101376), (90, 232448)])
def test_four_or_eight_warps(compute_capability: int, smem: int) -> None:
    """In a thread block of the mma kernels, for every head size; of wgmma, warpgroups of four."""
    switches = {"compute_capability": compute_capability, "num_sms": 108, "smem_per_block": smem}
    before = {name: _C.get_switch(name) for name in switches}
    shape = dict(seqlen_q=512, seqlen_k=512, num_heads=2, num_heads_k=2)
    warps = set()
    try:
        for name, value in switches.items():
            _C.set_switch(name, value)
        for direction, head_dim in itertools.product(("fwd", "bwd"), range(1, 257)):
            plan = _C.plan(direction, head_dim=head_dim, head_dim_v=head_dim, backend="sm80", **shape)
            warps.add(plan["threads"] / 32)
    finally:
        for name, value in before.items():
            _C.set_switch(name, value)
    assert warps == {4, 8}
