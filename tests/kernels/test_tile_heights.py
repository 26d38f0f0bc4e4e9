"""Forwards for Hopper with tiles of 128 queries (csrc/sm90/fwd/tiles.h): when, and that they are right."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from flash_ext import AuxRequest, masks
from flash_ext._ops.library import _C
from tests.cases import dense, packed
from tests.harness import Target, call, on_targets, run_case, run_cases
from tests.inputs import make_inputs
from tests.qkv import blank_qkv, null_kernels


@pytest.mark.parametrize("block_m", [192, 128])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@on_targets("sm90")
def test_both_heights_are_right(target: Target, head_dim: int, block_m: int) -> None:
    """Lengths around the tiles, windows, grouped heads, more items than multiprocessors, packed sequences."""
    cases = [
        dense(2, 127, 129, 3, 1, head_dim, causal=True),
        dense(1, 128, 1000, 4, 2, head_dim, dtype="fp16"),
        dense(3, 385, 385, 2, 2, head_dim, causal=True),
        dense(2, 640, 333, 4, 4, head_dim, head_dim - 8, window=(100, 30)),
        dense(40, 192, 256, 4, 4, head_dim, causal=True),
        packed([1, 130, 0, 300], [5, 130, 7, 256], num_heads=4, num_heads_k=2, head_dim=head_dim,
               causal=True),
    ]  # fmt: skip
    chosen = target.asking(fwd_block_m=block_m, kv_splits=0)
    run_cases(cases, chosen)
    with chosen.active():
        for case in cases:
            run_case(case.replace(backward=False), chosen)
            assert _C.last_launch()["kernel"].endswith("_m128") == (block_m == 128), str(case)


HIDING = ["padding", "padding_right,sinks", "documents", "prefix,sinktok3", "chunk100", "hkeys1",
          "hrows1_b,hkeys1_h", "blocks64x64_h", "blocks64x128_bh,padding"]  # fmt: skip


# With what changes scores or weights, up to head_dim 128.
CHANGING = ["alibi", "alibi_b,padding", "alibi,documents,sinks", "alibi,prefix,sinktok3",
            "distance0", "distance128,padding", "distance5_inf,documents", "distance700,sinks",
            "softcap30", "softcap1,padding", "softcap30,documents,sinks", "softcap1000,blocks64x64",
            "drop0.1", "drop0.5,padding,sinks", "drop0.1,prefix,sinktok3", "drop0.5,blocks64x64"]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "options", "tall"),
                         [
                             (128, {}, True), (64, {}, True), (192, {}, False), (128, {"softcap": 2.0}, True),
                             (128, {"dropout_p": 0.5}, True),
                             (128, {"bias": masks.ALiBi(torch.ones(4))}, True), (64, {"softcap": 2.0}, True),
                             (64, {"dropout_p": 0.5}, True), (128, {"softcap": 2.0, "dropout_p": 0.5}, False),
                             (128, {"softcap": 2.0, "bias": masks.ALiBi(torch.ones(4))}, False),
                             (128, {"scale": -1.0}, False),
                         ])  # fmt: skip
@pytest.mark.parametrize(
    ("side", "fits"),
    [(None, True), ((64, 64), True), ((96, 192), True), ((128, 64), False), ((32, 64), False)],
)
def test_which_calls_with_modifiers_have_tall_tiles(
    pretended_gpu, head_dim: int, options: dict, tall: bool, side: tuple[int, int] | None, fits: bool
) -> None:
    """Of few multiprocessors, which lower tiles do not fill better. Maps of blocks as high as the rows of a
    warpgroup are measured in docs/benchmarks.md beside others."""
    q, k, v = blank_qkv(batch=2, seqlen_q=1536, seqlen_k=1536, heads=4, heads_k=4, head_dim=head_dim,
                       dtype=torch.bfloat16)  # fmt: skip
    more = {}
    if "dropout_p" in options:
        more["rng"] = flash_ext.dropout_rng(q.device)
    if side is not None:
        map_of = torch.ones(1, 1, 1536 // side[0], 1536 // side[1], dtype=torch.bool)
        more["mask"] = masks.BlockMask(map_of, side)
    with null_kernels():
        _C.set_switch("num_sms", 8)
        flash_ext.forward(q, k, v, sinks=torch.zeros(4), **more, **options)
        assert _C.last_launch()["kernel"].endswith("_m192") == (tall and fits)


# Each with two head sizes; those of one kind, which share a kernel, have all sizes among them.
PAIRS = [
    (mods, sizes[(index + more) % len(sizes)])
    for kinds, sizes in ((HIDING, (40, 96, 64, 128)), (CHANGING, (64, 96, 128)))
    for index, mods in enumerate(kinds)
    for more in (0, 1)
]


@pytest.mark.parametrize("block_m", [192, 128])
@pytest.mark.parametrize(("mods", "head_dim"), PAIRS)
@on_targets("sm90")
def test_both_heights_mean_the_same(target: Target, mods: str, head_dim: int, block_m: int) -> None:
    """Masks that leave most tiles whole have tiles of 192 queries, too, and one change with them.

    Maxima not asked for are guessed.
    """
    cases = [
        dense(2, 385, 640, 4, 2, head_dim, causal=True, backward=False),
        dense(1, 700, 1100, 3, 3, head_dim, window=(300, 100), dtype="fp16", backward=False),
        # A prefix widens a bound.
        packed([1, 430, 0, 300], [5, 330, 7, 856], num_heads=4, num_heads_k=2, head_dim=head_dim,
               causal="prefix" in mods, backward=False),
    ]  # fmt: skip
    chosen = target.asking(fwd_block_m=block_m)
    with chosen.active():
        for case in cases:
            modified = case.replace(mods=tuple(mods.split(",")))
            run_case(modified, chosen)
            x = make_inputs(modified, target.device)
            with_maxima, guessed = call(x, chosen), call(x, chosen, return_aux=AuxRequest(lse=True))
            assert _C.last_launch()["kernel"].endswith("_m192") == (block_m == 192), str(case)
            torch.testing.assert_close(guessed[0], with_maxima[0], atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(guessed[1], with_maxima[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_m", [192, 128])
@on_targets("sm90")
def test_huge_slopes_pick_one_key(target: Target, block_m: int, dtype: torch.dtype) -> None:
    """The nearest key, or the farthest, outweighs all others; the other heads are not disturbed."""
    q, k, v = (torch.randn(2, 512, 4, 128, device=target.device).to(dtype) for _ in range(3))
    slopes = torch.tensor([1e9, -1e9, 0.0, -0.3], device=target.device)
    path = target.asking(fwd_block_m=block_m).choice
    with target.active():
        out = flash_ext.attention(q, k, v, bias=masks.ALiBi(slopes), backend=path)
        assert _C.last_launch()["kernel"].endswith("_m192") == (block_m == 192)
        plain = flash_ext.attention(q, k, v, backend=path)
    farthest = torch.where(torch.arange(512) < 256, 511, 0).to(target.device)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
    torch.testing.assert_close(out[:, :, 1], v[:, farthest, 1])
    torch.testing.assert_close(out[:, :, 2], plain[:, :, 2], atol=1e-2, rtol=1e-2)
    assert torch.isfinite(out).all()
