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
    assert ("split" in chosen["kernel"]) or chosen["splits"] == 1
    return "split" in chosen["kernel"]


@pytest.mark.parametrize("capability", SMS)
@pytest.mark.parametrize("batch, seqlen_k", [(1, 8192), (1, 131072), (16, 8192), (128, 2048)])
def test_decoding_fills_the_gpu_and_reads_keys_once(
    pretend, capability: int, batch: int, seqlen_k: int
) -> None:
    pretend(capability)
    chosen = plan(batch, 1, seqlen_k, 32, 8)
    assert (chosen["path"], chosen["kernel"], chosen["block_m"]) == ("sm80", "fwd_split_sm80_hd128", 16)
    assert chosen["grid"] == batch * 8 * chosen["splits"]  # a CTA has all four query heads of a key head
    assert chosen["grid"] >= 0.9 * SMS[capability]
    assert chosen["splits"] <= seqlen_k // 256


@pytest.mark.parametrize("shape", [
    (4, 4096, 4096, 16, 16),  # enough tiles of queries
    (1, 1, 256, 32, 8),       # few keys
    (64, 200, 4096, 16, 4),
    (2, 1024, 16384, 16, 16),
], ids=str)  # fmt: skip
def test_other_calls_stay_where_they_were(shape: tuple[int, ...]) -> None:
    chosen = plan(*shape)
    assert not is_split(chosen) and chosen["path"] == "sm90"


def test_a_path_that_is_asked_for_splits_as_well() -> None:
    for path in ("sm80", "sm90"):
        chosen = plan(1, 1, 65536, 8, 8, path=path)
        assert is_split(chosen) and chosen["splits"] > 1


def test_few_rows_of_few_heads_fill_the_gpu() -> None:
    """128 queries of one head are one tile for 132 multiprocessors elsewhere."""
    chosen = plan(1, 128, 65536, 1, 1)
    assert is_split(chosen) and chosen["block_m"] == 64 and chosen["grid"] > 132


def test_windows_count_what_they_leave() -> None:
    assert not is_split(plan(1, 1, 131072, 32, 8, window_left=100, window_right=0))
    wide = plan(1, 1, 131072, 32, 8, window_left=8191, window_right=0)
    assert wide["splits"] == plan(1, 1, 8192, 32, 8)["splits"]


def test_packed_calls_go_by_their_averages() -> None:
    """64 sequences of one query; then twice as many of which every other one has none."""
    chosen = plan(64, 64, 64 * 8192, 32, 8, packed=True)
    assert is_split(chosen) and chosen["splits"] == plan(64, 1, 8192, 32, 8)["splits"]
    assert plan(127, 64, 64 * 8192, 32, 8, packed=True)["splits"] == chosen["splits"]


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


def test_what_is_asked_for_decides_for_every_shape() -> None:
    assert not is_split(plan(1, 1, 131072, 32, 8, path="kv_splits=0"))
    for shape in ((1, 1, 10, 2, 1), (4, 300, 300, 4, 4)):
        assert plan(*shape, path="kv_splits=5 short_kernels=0")["splits"] == 5


def launch_of_one_query(**options) -> dict:
    q, k, v = make_qkv(dtype=torch.bfloat16, seqlen_q=1, seqlen_k=2048, head_dim=64)
    with null_kernels():
        flash_ext.forward(q, k, v, **options)
        return _C.last_launch()


def test_calls_without_modifiers_are_recorded_as_split_and_others_are_not() -> None:
    assert launch_of_one_query()["splits"] > 1
    assert launch_of_one_query(causal=True)["splits"] > 1
    assert launch_of_one_query(softcap=3.0)["splits"] == 1


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
