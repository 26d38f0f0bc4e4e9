"""Hopper's forwards in tiles of 192 queries with a bias or a bool mask, which a warp of its own loads
(load_beside() in csrc/sm90/fwd_mod/produce.cuh)."""

from __future__ import annotations

import math

import pytest
import torch

import flash_ext
from flash_ext import AuxRequest, masks
from flash_ext._ops.library import _C
from tests.cases import Case, dense, packed
from tests.harness import EVERYTHING, TARGETS, Target, call, on_targets, run_case
from tests.inputs import make_inputs

H200 = "9.0/132"
BIAS, WORDS = "sm90.fwd_mod.m192.bias", "sm90.fwd_mod.m192.words"
FLOAT, LOOSE = "sm90.fwd_mod.m192.float_bias", "sm90.fwd_mod.m192.loose_bias"
# By row: what a call asks for.
MODIFIERS = {
    BIAS: ("bias_bhqk", "bias_1hqk,padding", "bias_b1qk,documents,sinks", "bias_hqk_inf,prefix,sinktok3",
           "bias_bh1k,hkeys1_h", "bias_1hqk,blocks64x64_bh,chunk100"),
    FLOAT: ("bias_bhqk_f32", "bias_1hqk_f32,documents,sinks", "bias_hqk_inf_f32,padding"),
    LOOSE: ("bias_bhqk_odd", "bias_bhqk_odd,documents,sinks", "bias_bhqk_odd,padding,prefix"),
    WORDS: ("mask_bhqk", "mask_b1qk,documents,sinks", "mask_1hqk,hrows2_bh", "mask_1hq1",
            "mask_11qk_blocky,prefix,sinktok3", "mask_bhqk_blocky,padding_left,chunk100"),
}  # fmt: skip
# Of packed sequences alone: what ends before them or after them.
ENDS = {
    BIAS: ("bias_bhqk_short", "bias_1hqk_odd_long"),
    FLOAT: ("bias_bhqk_short_f32", "bias_1hqk_long_f32"),
    LOOSE: (),
    WORDS: ("mask_b1qk_short,padding", "mask_1hqk_long"),
}
CALLS = [(row, mods) for row in MODIFIERS for mods in (*MODIFIERS[row], *ENDS[row])]
# Each with two head sizes, of both kernels where there are two; those of a row have all sizes among them.
SIZED = [
    (row, mods, head_dim)
    for n, (row, mods) in enumerate(CALLS)
    for head_dim in ((64, 40) if row == FLOAT else ((64, 96), (40, 128))[n % 2])
]


def cases_of(row: str, mods: str, head_dim: int) -> list[Case]:
    """Cut tiles of queries and of keys, fewer tiles of keys than places and many more, grouped heads.

    With a multiple of 8 keys rows of a bias begin on 16 bytes, unless it is odd: then calls read a copy.
    """
    shared = {"head_dim": head_dim, "backward": False}
    lens_q, lens_k = [1, 430, 0, 300], [5, 330, 7, 856]
    of_sequences = [
        packed(lens_q, lens_k, num_heads=4, num_heads_k=2, tail=3, **shared),
        packed(lens_q, lens_k, num_heads=2, num_heads_k=1, dtype="fp16", causal=True, hints=True, **shared),
    ]
    if mods in ENDS[row]:
        return of_sequences
    whole = [
        dense(2, 385, 648, 4, 2, causal=True, **shared),
        dense(1, 700, 1096, 3, 3, window=(300, 100), dtype="fp16", **shared),
        dense(3, 190, 72, 2, 2, data="rising", **shared),
        dense(2, 577, 1000, 2, 1, dtype="fp16", data="falling", **shared),
    ]
    return whole if row == LOOSE else [*of_sequences, *whole]  # packed ones read a copy


def asking(target: Target) -> Target:
    return target.asking(fwd_block_m=192, wide_tiles=0, kv_splits=0)


@pytest.mark.parametrize(("row", "mods"), [x for x in CALLS if x[0] != LOOSE and "blocks" not in x[1]])
def test_these_calls_have_these_rows(pretended_gpu, row: str, mods: str) -> None:
    """Else what follows says nothing about the kernels. Explanations know no odd rows and sizes of blocks."""
    for case in cases_of(row, mods, 64):
        x = make_inputs(case.replace(mods=tuple(mods.split(","))), "cpu")
        bounds = (x.cu_seqlens_q, x.cu_seqlens_k) if case.is_packed else ()
        qkv = (x.q, x.k, x.v)
        backend = asking(TARGETS["sm90"]).choice
        found = flash_ext.explain(*qkv, *bounds, **x.keywords({}), backend=backend, gpu=H200)
        assert found.forward["row"] == row, str(case)


@pytest.mark.parametrize(("row", "mods", "head_dim"), SIZED)
@on_targets("sm90", "sm90-few")
def test_results(target: Target, row: str, mods: str, head_dim: int) -> None:
    """Against float64, twice; with true maxima and with guessed ones. A few CTAs have many work tiles."""
    chosen = asking(target)
    with chosen.active():
        for case in cases_of(row, mods, head_dim):
            modified = case.replace(mods=tuple(mods.split(",")))
            run_case(modified, chosen)
            x = make_inputs(modified, target.device)
            with_maxima, guessed = call(x, chosen), call(x, chosen, return_aux=AuxRequest(lse=True))
            assert _C.last_launch()["row"] == row, str(case)
            torch.testing.assert_close(guessed[0], with_maxima[0], atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(guessed[1], with_maxima[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128])
@on_targets("sm90", "sm90-few")
def test_rows_and_tiles_that_see_nothing(target: Target, head_dim: int) -> None:
    """A warpgroup's rows, single ones, all of a head; tiles of keys between others."""
    rows, keys, device = 500, 700, target.device
    q, k, v = (
        torch.randn(2, n, 4, head_dim, device=device, dtype=torch.bfloat16) for n in (rows, keys, keys)
    )
    keep = torch.rand(2, 4, rows, keys, device=device) < 0.5
    keep[:, :, 64:128] = False
    keep[:, :, [0, 191, 192, 499]] = False
    keep[1, 2] = False
    keep[..., 100:330] = False
    chosen = asking(target)
    options = {"mask": masks.Dense(keep), "return_aux": EVERYTHING, "backend": chosen.choice}
    with chosen.active():
        out, aux = flash_ext.attention(q, k, v, **options)
        assert _C.last_launch()["row"] == WORDS
        # Where only keys change that nobody sees, no bit does.
        other_k, other_v = k.clone(), v.clone()
        other_k[:, 100:330], other_v[:, 100:330] = 7.0, -7.0
        assert torch.equal(flash_ext.attention(q, other_k, other_v, **options)[0], out)
    empty = ~keep.any(-1)
    assert empty.any() and (aux.lse[empty] == -math.inf).all() and (aux.max_scores[empty] == -math.inf).all()
    assert not out.transpose(1, 2)[empty].any()
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * head_dim**-0.5
    scores = scores.masked_fill(~keep, -math.inf)
    seen = ~empty
    torch.testing.assert_close(aux.lse[seen].double(), scores.logsumexp(-1)[seen], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(aux.max_scores[seen].double(), scores.amax(-1)[seen], atol=1e-3, rtol=1e-3)
    wanted = torch.einsum("bhij,bjhd->bhid", scores.softmax(-1).nan_to_num(0), v.double())
    torch.testing.assert_close(out.transpose(1, 2).double(), wanted, atol=1e-2, rtol=2e-2)
