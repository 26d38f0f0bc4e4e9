"""Which calls split their keys and into how many parts: plans for devices that need not be there."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import flash_ext
from flash_ext._ops.library import _C
from flash_ext.compat import flash_attn
from tests.qkv import make_qkv, null_kernels

pytestmark = pytest.mark.everywhere

SMS = {80: 108, 86: 84, 90: 132}
SMEM = {80: 166912, 86: 101376, 90: 232448}


@pytest.fixture(autouse=True)
def pretend():
    """An H100 unless a test asks for another device; undone afterwards."""
    names = ("compute_capability", "num_sms", "smem_per_block")
    before = {name: _C.get_switch(name) for name in names}

    def be(compute_capability: int) -> None:
        values = (compute_capability, SMS[compute_capability], SMEM[compute_capability])
        for name, value in zip(names, values, strict=True):
            _C.set_switch(name, value)

    be(90)
    yield be
    for name, value in before.items():
        _C.set_switch(name, value)


def plan(
    batch: int, seqlen_q: int, seqlen_k: int, num_heads: int, num_heads_k: int, head_dim: int = 128, **options
) -> dict:
    shape = dict(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=num_heads, num_heads_k=num_heads_k
    )
    return _C.plan(
        "fwd", **shape, head_dim=head_dim, head_dim_v=options.pop("head_dim_v", head_dim), **options
    )


def is_split(chosen: dict) -> bool:
    assert any(name in chosen["kernel"] for name in ("split", "packed")) or chosen["splits"] == 1
    return "split" in chosen["kernel"]


def test_workspace_is_what_the_documentation_says() -> None:
    """Maximum, sum and head_dim_v outputs, fp32, of each row and part; nothing for one part."""
    random.seed(3)
    for _ in range(300):
        b, h_k, group, d, dv = (
            random.choice(x) for x in ((1, 3, 40), (1, 8), (1, 4, 71), (40, 128, 256), (37, 64, 256))
        )
        q, k = random.choice((1, 5, 64)), random.choice((512, 9000, 1 << 17))
        chosen = plan(b, q, k, h_k * group, h_k, d, head_dim_v=dv)
        if not is_split(chosen):
            continue
        rows, parts = b * q * h_k * group, chosen["splits"]
        states = -(-8 * parts * rows // 16) * 16
        assert chosen["workspace_bytes"] == (0 if parts == 1 else states + 4 * parts * rows * -(-dv // 4) * 4)
        assert 1 <= parts <= 256 and chosen["smem_bytes"] + 1024 <= SMEM[86]
        # Never more memory than twice what a GPU of CTAs leaves behind at once.
        assert parts == 1 or chosen["workspace_bytes"] <= 2 * 4 * 132 * 64 * 4 * 264


def test_every_head_size_runs_in_the_next_compiled_one() -> None:
    for d, dv in itertools.product((1, 40, 64, 65, 128, 129, 192, 256), repeat=2):
        size = min(x for x in (64, 128, 256) if x >= max(d, dv))
        assert plan(1, 1, 8192, 8, 2, d, head_dim_v=dv)["kernel"] == f"fwd_split_sm80_hd{size}"


def launch_of_one_query(**options) -> dict:
    q, k, v = make_qkv(dtype=torch.bfloat16, seqlen_q=1, seqlen_k=2048, head_dim=64)
    with null_kernels():
        flash_ext.forward(q, k, v, **options)
        return _C.last_launch()


def test_calls_are_recorded_as_split_but_for_dropout() -> None:
    assert launch_of_one_query()["splits"] > 1
    assert launch_of_one_query(causal=True)["splits"] > 1
    assert launch_of_one_query(softcap=3.0)["splits"] > 1
    assert launch_of_one_query(dropout_p=0.5, rng=flash_ext.dropout_rng("cpu"))["splits"] == 1


def test_expanded_query_heads_have_no_packed_tiles() -> None:
    """TMA would read what lies behind the one head there is."""
    k = torch.zeros(1, 8192, 2, 128, dtype=torch.bfloat16)
    shared = torch.zeros(1, 16, 1, 128, dtype=torch.bfloat16).expand(-1, -1, 8, -1)
    found = []
    with null_kernels():
        for q in (shared, shared.contiguous()):
            flash_ext.attention(q, k, k)
            found.append(_C.last_launch()["kernel"])
    assert found == ["fwd_split_sm80_hd128", "fwd_packed_sm90_hd128"]


def test_attention_of_pytorch_is_split_too() -> None:
    q, k, v = (
        t.transpose(1, 2) for t in make_qkv(dtype=torch.bfloat16, seqlen_q=1, seqlen_k=2048, head_dim=64)
    )
    with null_kernels():
        flash_ext.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert _C.last_launch()["splits"] > 1


def test_a_cache_is_split_without_a_copy() -> None:
    """Sequences of a packed call lie between one another's unused rows, in any order."""
    q, (k, v) = torch.randn(4, 1, 8, 64).bfloat16(), torch.zeros(2, 6, 8192, 2, 64).bfloat16()
    lengths, entries = torch.tensor([8000, 1, 5000, 8192]), torch.tensor([5, 0, 3, 1])
    with null_kernels():
        flash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths.int(), cache_batch_idx=entries.int(), causal=True
        )
        launch = _C.last_launch()
    assert "split" in launch["kernel"] and launch["splits"] > 1 and launch["grid"] >= 132
