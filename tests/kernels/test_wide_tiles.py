"""Hopper's kernels with modifiers that have more keys a tile at head_dim 64: forwards of 192 queries and
128 keys, backwards whose warpgroups have 128 keys each. When calls have them, and that they are right."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from flash_ext import AuxRequest, masks
from flash_ext._ops.library import _C
from tests.cases import Case, dense, packed
from tests.harness import Target, call, on_targets, run_case
from tests.inputs import make_inputs
from tests.kernels.plans import plan
from tests.kernels.test_dq_pool import switched
from tests.qkv import blank_qkv

H200 = "9.0/132"
# By the ending of a forward's row: what a call asks for. Drops and words have no other tiles at head_dim 64.
FORWARDS = {
    "m192_wide.hide": ("padding", "padding_left,sinks", "documents", "prefix,sinktok3", "chunk100", "hkeys1",
                       "hrows1_b,hkeys1_h", "blocks64x64_h", "sinks"),
    "m192_wide.slopes": ("alibi", "alibi_b,padding", "alibi,documents,sinks", "distance0",
                         "distance5_inf,documents", "distance700,prefix,sinktok3"),
    "m192_wide.cap": ("softcap30", "softcap1,padding", "softcap30,documents,sinks"),
    "m192_wide.bias": ("bias_bhqk", "bias_1hqk,padding", "bias_b1qk,documents,sinks",
                       "bias_hqk_inf,prefix,sinktok3", "bias_bh1k,hkeys1_h"),
    "m192.drop": ("drop0.1", "drop0.5,padding,sinks", "drop0.1,documents"),
    "m192.words": ("mask_bhqk", "mask_b1qk,documents,sinks", "mask_11qk_blocky,prefix,sinktok3"),
}  # fmt: skip
# What a backward is asked for, in each of its kernels: nothing added, added, capped, dropped.
BACKWARDS = (
    "padding", "padding_left,sinks", "documents", "documents,prefix,sinktok3", "chunk100",
    "hrows1_b,hkeys1_h", "blocks64x64_h", "mask_bhqk", "mask_11qk_blocky,hrows2_bh",
    "bias_bhqk", "bias_1hqk,padding", "bias_b1qk,documents", "bias_hqk_inf,mask_bhqk",
    "bias_bh1k,hkeys1_h", "bias_1h1k",
    "alibi", "alibi_b,padding", "distance5_inf,documents", "distance700,chunk100",
    "softcap30", "softcap1,padding", "softcap30,mask_bhqk",
    "drop0.1", "drop0.5,padding", "drop0.1,mask_b1qk,documents",
)  # fmt: skip


def cases_of(mods: str, head_dim: int, backward: bool) -> list[Case]:
    """Cut tiles of queries and of keys, one of 64 keys alone, grouped heads, bounds that masks cross."""
    shared = {"head_dim": head_dim, "backward": backward, "mods": tuple(mods.split(","))}
    causal = "prefix" in mods  # it widens a bound
    return [
        dense(2, 385, 648, 4, 2, causal=True, **shared),
        dense(1, 700, 1096, 3, 3, window=(300, 100), dtype="fp16", **shared),
        dense(3, 190, 72, 2, 2, data="rising", causal=causal, **shared),
        dense(1, 130, 520, 2, 1, data="falling", causal=causal, **shared),
        packed([1, 430, 0, 300], [5, 330, 7, 856], num_heads=4, num_heads_k=2, tail=3,
               causal=causal, **shared),
    ]  # fmt: skip


def asking(target: Target) -> Target:
    return target.asking(fwd_block_m=192, wide_tiles=1, kv_splits=0)


@pytest.mark.parametrize("head_dim", [64, 32])
@pytest.mark.parametrize(("row", "mods"), [(row, mods) for row in FORWARDS for mods in FORWARDS[row]])
@on_targets("sm90", "sm90-few")
def test_forward(target: Target, row: str, mods: str, head_dim: int) -> None:
    """Against float64, twice; with true maxima and with guessed ones."""
    chosen = asking(target)
    with chosen.active():
        for case in cases_of(mods, head_dim, backward=False):
            run_case(case, chosen)
            x = make_inputs(case, target.device)
            with_maxima, guessed = call(x, chosen), call(x, chosen, return_aux=AuxRequest(lse=True))
            assert _C.last_launch()["row"] == f"sm90.fwd_mod.{row}", str(case)
            torch.testing.assert_close(guessed[0], with_maxima[0], atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(guessed[1], with_maxima[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 32])
@pytest.mark.parametrize("mods", BACKWARDS)
@on_targets("sm90", "sm90-few")
def test_backward(target: Target, mods: str, head_dim: int) -> None:
    """Gradients of q, k, v and of what is learned, against float64, twice."""
    chosen = asking(target)
    with chosen.active():
        for case in cases_of(mods, head_dim, backward=True):
            run_case(case, chosen)
            assert _C.last_launch()["row"] == "sm90.bwd_mod.fused_wide", str(case)


@pytest.mark.parametrize("splits", [2, 5])
@on_targets("sm90")
def test_backward_in_parts(target: Target, splits: int) -> None:
    """CTAs share out the queries of a block of keys."""
    chosen = asking(target).asking(q_splits=splits)
    with chosen.active():
        for mods in ("padding", "bias_1h1k", "drop0.1"):
            for case in cases_of(mods, 64, backward=True)[:4]:
                run_case(case, chosen)


def rows_of(
    head_dim: int, seqlen: int, batch: int = 32, heads: int = 16, **options: object
) -> tuple[str, str]:
    sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads": heads, "heads_k": heads}
    q, k, v = blank_qkv(**sizes, head_dim=head_dim, dtype=torch.bfloat16)
    found = flash_ext.explain(q, k, v, gpu=H200, **options)
    return found.forward["row"], found.backward["row"]


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "options", "wide"),
    [
        (64, 1024, {"softcap": 30.0}, True), (64, 2048, {"softcap": 30.0, "causal": True}, True),
        (64, 1024, {"softcap": 30.0, "causal": True}, False), (64, 256, {"softcap": 30.0}, True),
        (64, 192, {"softcap": 30.0}, False), (128, 2048, {"softcap": 30.0}, False),
        (64, 2048, {"softcap": 30.0, "window_size": (128, 0)}, False),
        (64, 2048, {"softcap": 30.0, "window_size": (1024, 0)}, True),
    ],
)  # fmt: skip
def test_which_calls_have_them(
    pretended_gpu, head_dim: int, seqlen: int, options: dict[str, object], wide: bool
) -> None:
    """Those whose masks cut few tiles."""
    forward, backward = rows_of(head_dim, seqlen, **options)
    assert ("m192_wide" in forward) == wide
    # Of 1024 rows under a causal mask and of 192 backwards have them, too.
    short = head_dim == 64 and seqlen < 2048 and "window_size" not in options
    assert ("fused_wide" in backward) == (wide or short)


@pytest.mark.parametrize(
    ("batch", "seqlen", "causal", "wide"),
    [
        (1, 2560, False, False), (1, 2816, False, True),  # 120 blocks of 256 keys, 132
        (2, 1536, False, False), (2, 2048, False, False), (2, 3072, False, False),  # 144, 192, 288
        (4, 2048, False, True), (5, 3072, False, True),  # 384, 720
        (2, 1536, True, False), (2, 2048, True, False), (2, 3072, True, True), (4, 2048, True, True),
        (64, 577, False, False), (64, 900, False, True),  # 3 blocks beside 5, 4 beside 8
    ],
)  # fmt: skip
def test_backwards_have_them_where_they_fill_the_gpu(
    pretended_gpu, batch: int, seqlen: int, causal: bool, wide: bool
) -> None:
    """Equal blocks run in whole rounds of 132, those under a causal mask from two a multiprocessor on."""
    backward = rows_of(64, seqlen, batch, 12, softcap=30.0, causal=causal)[1]
    assert ("fused_wide" in backward) == wide


def test_batch_invariant_calls_do_not(pretended_gpu) -> None:
    """Which tiles a call has depends on lengths and on the batch."""
    for direction in ("fwd", "bwd"):
        call = {"batch": 8, "seqlen": 2048, "heads": 16, "head_dim": 64, "modifiers": ("softcap",)}
        assert "wide" in plan(direction, **call)["row"]
        with switched(batch_invariant=1):
            assert "wide" not in plan(direction, **call)["row"]


def test_maps_of_blocks_do_not(pretended_gpu) -> None:
    keep = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    forward, backward = rows_of(64, 2048, mask=masks.BlockMask(keep, 64))
    assert "wide" not in forward and "wide" not in backward


def test_backwards_with_bool_masks_have_them_where_tma_brings_the_words(pretended_gpu) -> None:
    """Dense calls, whose masks have more than one row; beside a bound as well."""
    dense = torch.ones(1, 1, 2048, 2048, dtype=torch.bool)
    for options in ({}, {"causal": True}, {"softcap": 30.0}):
        assert "fused_wide" in rows_of(64, 2048, mask=masks.Dense(dense), **options)[1]
    for one in (dense[..., :1], dense[:, :, :1]):
        backward = rows_of(64, 2048, mask=masks.Dense(one))[1]
        assert ("fused_wide" in backward) == (one.shape[2] == 1)  # hidden keys are no mask of rows
    for options, wide in (({}, True), ({"causal": True}, False)):
        backward = rows_of(64, 512, 64, mask=masks.Dense(dense[..., :512, :512]), **options)[1]
        assert ("fused_wide" in backward) == wide
    blocks = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    assert "wide" not in rows_of(64, 2048, mask=masks.Dense(dense) & masks.BlockMask(blocks, 64))[1]
