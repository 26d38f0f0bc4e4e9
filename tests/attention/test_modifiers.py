"""Every modifier alone and in pairs, forward and backward, and exact probes of every mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cases import Case, dense, packed
from tests.harness import Target, on_all_schedules, on_all_tiles, run_cases
from tests.modifier_cases import (
    ALL_MODIFIERS,
    FEW_TILES,
    LENGTHS,
    MASKS,
    STRUCTURE,
    paired_cases,
    single_cases,
)
from tests.modifier_probes import count_probe, mask_probe, needle_probe, sparse_dout_probe


@on_all_schedules
def test_every_modifier_alone(target: Target) -> None:
    """With every head size, type, packing, group, window and mode somewhere; gradients of all inputs."""
    cases = single_cases(LENGTHS if target.device == "cuda" else FEW_TILES)
    run_cases(cases[::2] if target.switches else cases, target, cpu=30)


@on_all_tiles
def test_every_pair_of_modifiers(target: Target) -> None:
    """A covering array: every two choices of all modifiers, shapes, types and modes occur together."""
    run_cases(paired_cases(LENGTHS if target.device == "cuda" else FEW_TILES), target, cpu=15)


def test_case_lists_say_what_they_cover() -> None:
    """All names occur, every case survives its line of JSON, and causal is on where "top" asks for it."""
    for cases in (single_cases(), paired_cases()):
        for case in cases:
            assert Case.from_json(case.to_json()) == case
            assert case.causal or not case.has_top_left
    alone = {name for case in single_cases() for name in case.mods}
    assert alone >= set(ALL_MODIFIERS)


# --------------------------------------------------------------------------------------------------
# Who sees whom, exactly

HIDING = [*MASKS, *STRUCTURE, "padding,documents", "hrows1,hkeys2_b", "prefix,sinktok5,chunk32",
          "blocks64x128_bh,mask_b1qk", "top,chunk32,sinktok3", "documents,prefix,blocks16x16_h"]  # fmt: skip


def mask_cases() -> list[Case]:
    """Every mask with tiles of several sizes cut, causal, windows, both alignments, dense and packed."""
    cases = []
    for index, names in enumerate(HIDING):
        mods = tuple(names.split(","))
        for at, (causal, window) in enumerate(((False, (-1, -1)), (True, (-1, -1)), (False, (50, 3)))):
            common = {"causal": causal or "top" in mods, "window": window, "seed": index + at}
            head_dim = (64, 128, 256)[(index + at) % 3]
            cases.append(packed([7, 0, 190, 64], [90, 9, 130, 0], num_heads=4, num_heads_k=2, tail=3 * at,
                       head_dim=head_dim, **common, mods=mods))  # fmt: skip
            cut = tuple(name.removesuffix("_short").removesuffix("_long") for name in mods)
            for seqlen_q, seqlen_k in ((200, 257), (129, 65)) if at == 1 else ((193, 320),):
                cases.append(dense(2, seqlen_q, seqlen_k, 4, 2, head_dim, **common, mods=cut))
    return cases


# A probe, which of the cases it takes, and how many of these on a CPU.
PROBED = {
    count_probe: (slice(None), 25), mask_probe: (slice(1, None, 2), 9),
    sparse_dout_probe: (slice(None, None, 3), 7), needle_probe: (slice(1, None, 3), 5),
}  # fmt: skip


@pytest.mark.parametrize("probe", PROBED, ids=lambda probe: probe.__name__)
@on_all_tiles
def test_every_mask_shows_exactly_its_keys(target: Target, probe: Callable) -> None:
    """By lse, in out, by the gradients of hidden keys, which are 0 bit for bit, and by loud keys."""
    which, cpu = PROBED[probe]
    run_cases(mask_cases()[which], target, probe, cpu=cpu)


@pytest.mark.parametrize("alignment", ["top", ""])
@on_all_tiles
def test_both_alignments_around_tile_edges(target: Target, alignment: str) -> None:
    """With the alignment at the top left and with chunks and sink tokens around tiles."""
    cases = [
        dense(1, tile + dq, tile + dk, 2, 1, 64, causal=True, window=window,
              mods=tuple(filter(None, (alignment, f"sinktok{tile + dk}" if dk == 1 else "sinktok1",
                                       f"chunk{tile + dq}" if dq else ""))))
        for tile in (64, 80, 128, 192)
        for dq in (-1, 0, 1)
        for dk in (-tile // 2, -1, 0, 1)
        for window in ((-1, -1), (31, -1))
    ]  # fmt: skip
    run_cases(cases, target, count_probe, cpu=8)
