"""Block-sparse attention; and what hidden tiles must not cost or spread."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flash_ext
from flash_ext import AuxRequest, masks
from tests import compare
from tests.attention.calls import RESULTS, assert_same, differentiate, make_qkv
from tests.attention.test_bias import peak_of
from tests.cases import Case, dense, packed
from tests.harness import Target, on_all_tiles, on_gpu_paths, on_paths, run_cases
from tests.modifier_probes import count_probe, mask_probe, sparse_dout_probe

BLOCK_SIZES = ((16, 16), (16, 128), (48, 80), (64, 64), (128, 128), (64, 192), (192, 64), (256, 16))


def with_gradients(target: Target, qkv: list[Tensor], **keywords) -> list[Tensor]:
    """out, lse, dq, dk, dv; the call asks for row maxima, too, so that no forward takes the plain kernels."""
    generator = torch.Generator(target.device).manual_seed(1)
    dout = torch.randn(qkv[0].shape, device=target.device, generator=generator).to(qkv[0].dtype)
    request = AuxRequest(lse=True, max_scores=True)
    return differentiate(target, qkv, dout, return_aux=request, backend=target.choice, **keywords)


@pytest.mark.parametrize("causal", [False, True])
@on_all_tiles
def test_no_block_no_row_of_blocks_and_all_blocks(target: Target, causal: bool) -> None:
    """Nothing to see gives exactly nothing, and ends; everything the bits of a call without a map.

    Both in tiles of one height: by themselves, calls without a map take higher ones on Hopper. And both with
    a mask of one bit, because gradients of calls without any are those of the plain kernels."""
    target = target.asking(fwd_block_m=128)
    with target.active():
        qkv = make_qkv(target, 2, 300, 333, 4, 2, 64)
        blocks = torch.ones(1, 4, 5, 6, dtype=torch.bool, device=target.device)
        one_bit = masks.Dense(torch.ones_like(blocks[:, :1, :1, :1]))
        plain = with_gradients(target, qkv, causal=causal, mask=one_bit)
        full = with_gradients(target, qkv, causal=causal, mask=one_bit & masks.BlockMask(blocks, 64))
        assert_same(full, plain, "all blocks")
        none = with_gradients(target, qkv, causal=causal, mask=one_bit & masks.BlockMask(~blocks, 64))
        assert (none[1] == -math.inf).all()
        assert not any(t.any() for t in (none[0], *none[2:]))
        blocks[:, 1, 2] = False  # rows 128 to 191 of head 1
        some = with_gradients(target, qkv, causal=causal, mask=one_bit & masks.BlockMask(blocks, 64))
        assert (some[1][:, 1, 128:192] == -math.inf).all()
        assert not some[0][:, 128:192, 1].any() and not some[2][:, 128:192, 1].any()
        assert torch.equal(some[0][:, :, 2:], plain[0][:, :, 2:])


def sized_cases(target: Target) -> list[Case]:
    """Block sizes that cut tiles and that tiles cut, lengths that no block divides, maps by head and not."""
    lengths = ((200, 330, True), (257, 129, False))
    if target.device == "cpu":
        lengths = ((50, 270, True), (140, 70, False))
    cases = []
    for index, (rows, cols) in enumerate(BLOCK_SIZES):
        for flags in ("", "_bh", "_h_t"):
            name = f"blocks{rows}x{cols}{flags}"
            head_dim = (64, 128, 256, 96)[index % 4]
            common = {"head_dim": head_dim, "num_heads": 4, "num_heads_k": 2, "seed": index}
            for seqlen_q, seqlen_k, causal in lengths:
                cases.append(
                    dense(2, seqlen_q, seqlen_k, 4, 2, head_dim, causal=causal, seed=index, mods=(name,))
                )
            common["mods"] = (name,)
            cases.append(packed([70, 0, 210], [190, 5, 100], causal=index % 2 == 0, **common))
    return cases


@on_all_tiles
def test_every_block_size_shows_its_keys(target: Target) -> None:
    """Tiles and blocks that do not divide each other; a causal edge through partial blocks."""
    run_cases(sized_cases(target), target, count_probe, cpu=11)
    run_cases(sized_cases(target), target, mask_probe, cpu=11)


@on_all_tiles
def test_maps_by_head_and_batch_under_groups(target: Target) -> None:
    """Values and all gradients; every second one beside an element mask."""
    cases = sized_cases(target)
    cases[1::2] = [m.replace(mods=(*m.mods, "mask_b1qk")) for m in cases[1::2]]
    run_cases(cases, target, cpu=5)


@on_paths
def test_keys_that_nobody_visits_get_exactly_no_gradient(target: Target) -> None:
    """Also a whole column of blocks, and rows that visit nothing."""
    run_cases(sized_cases(target)[::2], target, sparse_dout_probe, cpu=4)
    qkv = make_qkv(target, 2, 300, 400, 4, 2, 128)
    blocks = torch.rand(2, 4, 5, 7, device=target.device) < 0.6
    blocks[..., 3] = False  # keys 192 to 255
    blocks[..., 1, :] = False  # rows 64 to 127
    out, lse, dq, dk, dv = with_gradients(target, qkv, mask=masks.BlockMask(blocks, 64))
    assert not dk[:, 192:256].any() and not dv[:, 192:256].any()
    assert not dq[:, 64:128].any() and not out[:, 64:128].any()


@on_paths
def test_maps_of_four_origins_agree(target: Target) -> None:
    """A map with cut blocks from a rule, from a dense mask and from PyTorch's own, and the mask itself."""
    rows, keys, device = 260, 330, target.device

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + 70 >= j) & (i - j < 150 + 20 * h)

    index = [torch.arange(n, device=device) for n in (2, 4, rows, keys)]
    mask = sees(*torch.meshgrid(*index, indexing="ij"))
    theirs = create_block_mask(sees, 2, 4, rows, keys, device=device, BLOCK_SIZE=128)
    maps = {
        "rule": masks.BlockMask.from_rule(sees, 2, 4, rows, keys, (64, 128), device=device),
        "dense": masks.BlockMask.from_dense(mask, 48),
        "torch": masks.BlockMask.from_torch(theirs),
    }
    qkv = make_qkv(target, 2, rows, keys, 4, 2, 64)
    by_mask = with_gradients(target, qkv, mask=mask)
    for origin, block_mask in maps.items():
        by_blocks = with_gradients(target, qkv, mask=block_mask)
        for name, a, b in zip(RESULTS, by_blocks, by_mask):
            if name == "lse":
                assert ((a - b).abs() < 1e-5).all(), origin
            else:
                limit = 2 * compare.UNIT_ROUNDOFF[torch.bfloat16]
                assert compare.measure(a, b).rel_l2 < limit, f"{name} by {origin}"


# --------------------------------------------------------------------------------------------------
# What is skipped is not read

ROWS, LENGTH, HIDDEN, POISONED = 200, 1280, slice(256, 1024), slice(512, 768)


def hiding_masks(device: str) -> dict[str, masks.Mask]:
    """Ways to hide the keys ``HIDDEN`` from every row."""
    position = torch.arange(LENGTH, device=device)
    hidden = (position >= HIDDEN.start) & (position < HIDDEN.stop)
    blocks = ~hidden.view(1, 1, 1, -1)[..., ::128].expand(1, 1, -(-ROWS // 128), -1)
    every_row = torch.tensor([0, ROWS], device=device, dtype=torch.int32).expand(LENGTH, 2)
    these_keys = torch.tensor([HIDDEN.start, HIDDEN.stop], device=device, dtype=torch.int32)
    zeros = torch.zeros(1, ROWS, device=device, dtype=torch.int32)
    return {
        "blocks": masks.BlockMask(blocks, 128),
        "padding": masks.KeyMask(~hidden[None]),
        "documents": masks.Documents(zeros, hidden.int()[None]),
        "mask of keys": masks.Dense(~hidden.view(1, 1, 1, -1)),
        "mask": masks.Dense((~hidden).expand(ROWS, -1).contiguous()),
        "hidden rows": masks.HiddenRows((every_row * hidden[:, None]).int().contiguous()),
        "hidden keys": masks.HiddenKeys(these_keys.expand(ROWS, 2).contiguous()),
        "chunks": masks.Chunks(1024),
        # The first row stands at key 1080.
        "sink tokens": masks.SlidingWindow(56, sink_tokens=100),
        "prefix": masks.Window(56, 0) | masks.Prefix(zeros[:, 0] + 200),
    }


@pytest.mark.parametrize("kind", hiding_masks("cpu"))
@on_all_tiles
def test_a_nan_in_tiles_that_nobody_sees_reaches_nothing(target: Target, kind: str) -> None:
    """K and V hold NaN where no tile of any kernel reaches: results and gradients are those of zeros there.

    The hidden stretch goes on for 256 keys on both sides, so that every tile that touches a NaN is hidden.
    """
    mask = hiding_masks(target.device)[kind]
    with target.active():
        for head_dim in (64, 96, 128, 192, 256) if target.device == "cuda" else (64,):
            qkv = make_qkv(target, 1, ROWS, LENGTH, 2, 1, head_dim)
            found = []
            for value in (0.0, math.nan):
                with torch.no_grad():
                    for t in qkv[1:]:
                        t[:, POISONED] = value
                found.append(with_gradients(target, qkv, mask=mask))
            assert_same(*found, f"{kind}, head_dim {head_dim}")
            assert not found[1][3][:, HIDDEN].any() and not found[1][4][:, HIDDEN].any()


@pytest.mark.caching
@on_gpu_paths
def test_structured_masks_take_linear_memory(target: Target) -> None:
    """Forward and backward at 32768: one bit per pair of positions would already be beyond the limit."""
    length, heads = 32768, 2
    qkv = make_qkv(target, 1, length, length, heads, heads, 64)
    position = torch.arange(length, device="cuda", dtype=torch.int32)
    documents = position // 3000
    intervals = torch.stack([position + 500, position + 600], -1)
    blocks = torch.eye(length // 128, dtype=torch.bool, device="cuda")
    ways = {
        "documents": {"mask": masks.Documents(documents[None])},
        "padding": {"mask": masks.KeyMask((documents % 2 == 0)[None])},
        "prefix": {"mask": masks.PrefixLM(documents[-1:])},
        "sink tokens and chunks": {"mask": masks.Causal() & (masks.Chunks(512) | masks.SinkTokens(4))},
        "hidden rows": {"mask": masks.HiddenRows(intervals), "causal": True, "window_size": (2000, 0)},
        "hidden keys": {"mask": masks.HiddenKeys(intervals), "window_size": (2000, 2000)},
        "blocks": {"mask": masks.BlockMask(blocks, 128)},
        "slopes, sinks, softcap, dropout": {
            "bias": masks.ALiBi(torch.ones(heads, device="cuda")), "sinks": torch.ones(heads, device="cuda"),
            "softcap": 20.0, "dropout_p": 0.1, "window_size": (1000, 0),
        },
    }  # fmt: skip
    limit = 10 * qkv[0].numel() * 2
    assert limit < length**2 // 8

    def run(keywords: dict) -> None:
        out = flash_ext.attention(*qkv, backend=target.path, **keywords)
        torch.autograd.grad(out, qkv, out.detach())

    for name, keywords in ways.items():
        peak = peak_of(lambda keywords=keywords: run(keywords))
        assert peak <= limit, f"{name}: {peak} bytes, the limit is {limit}"
