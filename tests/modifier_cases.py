"""Named lists of modifiers, and the lists of cases that combine them with each other and with shapes.

What a name stands for is in ``choices.py``.
"""

from __future__ import annotations

from typing import Any

from tests.cases import Case, from_levels, levels_of

BIASES = (
    "bias_bhqk", "bias_1hqk", "bias_qk_f32", "bias_b11k", "bias_bh1k_f32", "bias_bhq1", "bias_11qk_odd",
    "bias_1hqk_t", "bias_b1qk_skip_f32", "bias_hqk_inf", "bias_1hqk_inf_f32", "bias_h11_expanded",
    "bias_b1qk_expanded_f32", "bias_bhqk_short", "bias_11qk_f32_long",
)  # fmt: skip
DISTANCES = (
    "distance0", "distance20", "distance128", "distance9_before", "distance100_before_half",
    "distance30_shared", "distance300_half", "distance60_inf",
)  # fmt: skip
MASKS = (
    "mask_b1qk", "mask_bhqk", "mask_b11k", "mask_1hq1", "mask_qk_odd", "mask_1hqk_t", "mask_b1qk_skip",
    "mask_h1k_expanded", "mask_bhqk_blocky", "mask_11qk_blocky_t", "mask_b1qk_short", "mask_1hqk_long",
)  # fmt: skip
STRUCTURE = (
    "padding", "padding_left", "padding_right", "documents", "prefix", "sinktok1", "sinktok40", "chunk7",
    "chunk100", "hrows1", "hrows2_bh", "hkeys1_h", "hkeys2_b", "blocks16x16_h", "blocks64x128_bh",
    "blocks48x16_b_t", "blocks128x64", "top",
)  # fmt: skip
SCORES = (
    "alibi", "alibi_b", "sinks", "softcap0.5", "softcap30", "softcap1000", "drop0.1", "drop0.5", "drop0.9",
)  # fmt: skip
ALL_MODIFIERS = BIASES + DISTANCES + MASKS + STRUCTURE + SCORES

LENGTHS = ((130, 150), (200, 256), (65, 300), (257, 100), (1, 129), (64, 64), (300, 300))
# For the CPU path, whose tiles have 128 rows and 256 keys.
FEW_TILES = ((30, 45), (50, 64), (20, 140), (140, 60), (1, 129), (32, 32), (60, 270))
_SHAPES: dict[str, tuple] = {
    "head_dims": ((64, None), (40, None), (96, None), (128, None), (192, 128), (256, None), (64, 72)),
    "mask": ((False, (-1, -1)), (True, (-1, -1)), (False, (40, 9)), (True, (70, -1))),
    "heads": ((2, 2), (4, 2), (3, 1), (8, 1)),
    "packing": ("dense", "varlen", "varlen_tail"),
    "dtype": ("bf16", "fp16"),
    "deterministic": (False, True),
    "layout": ("bshd", "bhsd", "gap", "odd", "offset", "packed"),
}

# Levels of the pairwise array; "" is off, and stands twice where a modifier hides much.
_PAIRED: dict[str, tuple[str, ...]] = {
    "bias": (
        "", "", "bias_bhqk", "bias_qk_f32", "bias_bh1k", "bias_1hq1_f32", "bias_1hqk_t", "bias_11qk_odd",
        "bias_hqk_inf", "distance25", "distance150_before_half",
    ), "dense mask": ("", "", "mask_b1qk", "mask_1hqk_t", "mask_bhqk_blocky", "mask_h1k_expanded"),
    "padding": ("", "padding", "padding_left"), "documents": ("", "", "documents"), "prefix": ("", "prefix"),
    "sink tokens": ("", "sinktok5", "sinktok40"), "chunk": ("", "", "chunk32", "chunk100"),
    "hidden rows": ("", "", "hrows1", "hrows2_bh"), "hidden keys": ("", "", "hkeys1_h", "hkeys2"),
    "blocks": ("", "", "blocks16x16_h", "blocks48x16_b", "blocks64x128", "blocks128x64_bh_t"),
    "slopes": ("", "alibi", "alibi_b"), "sinks": ("", "sinks"), "softcap": ("", "softcap1", "softcap30"),
    "dropout": ("", "drop0.1", "drop0.9"), "alignment": ("", "", "top"),
}  # fmt: skip


def single_cases(lengths: tuple = LENGTHS) -> list[Case]:
    """Each modifier alone, with every length, head size, mask, group, packing, type and mode once."""
    factors = {"modifier": ALL_MODIFIERS, "seqlens": lengths, **_SHAPES}
    return [_modified(level, [level["modifier"]], index) for index, level in enumerate(levels_of(factors))]


def paired_cases(lengths: tuple = LENGTHS) -> list[Case]:
    """Every two levels of all modifiers and shapes together at least once."""
    factors = {**_PAIRED, "seqlens": lengths, **_SHAPES}
    return [
        _modified(level, [level[name] for name in _PAIRED], index)
        for index, level in enumerate(levels_of(factors))
    ]


def _modified(level: dict[str, Any], mods: list[str], index: int) -> Case:
    case, mods = from_levels(level, index), [name for name in mods if name]
    needs = ("mods",) if index % 5 == 4 and any(map(_has_gradient, mods)) else ("qkv", "mods")
    if not case.is_packed:  # where nothing can end early or late
        mods = [name.removesuffix("_short").removesuffix("_long") for name in mods]
    return case.replace(mods=tuple(mods), needs=needs, causal=case.causal or "top" in mods)


def _has_gradient(name: str) -> bool:
    return name.startswith(("bias", "distance", "alibi", "sinks"))
