"""Cases of ``sanitizer_cases.py`` for tiles of other sizes than small calls have, with modifiers."""

from __future__ import annotations

from tests.cases import Case, packed

# Dense, and packed. The last two are a bias whose rows do not begin on 16 bytes, and one in fp32.
BESIDE = (
    ("bias_1hqk", "padding"), ("bias_bh1k", "sinks"), ("mask_bhqk", "hrows1"), ("mask_1hq1",),
    ("bias_bhqk_odd",), ("bias_1hqk_f32",),
)  # fmt: skip
BESIDE_PACKED = (("bias_bhqk_short", "documents"), ("mask_b1qk_short", "documents"))


def tall_cases() -> list[Case]:
    """Forwards in tiles of 192 queries whose keys come to each place beside the scores again."""
    found = []
    for head_dim in (64, 128):
        common = {"num_heads": 2, "num_heads_k": 1, "head_dim": head_dim}
        case = Case(batch=2, seqlen_q=131, seqlen_k=392, **common)
        found += [case.replace(mods=mods) for mods in BESIDE]
        case = packed([3, 0, 190], [65, 9, 440], tail=5, dtype="fp16", causal=True, **common)
        found += [case.replace(mods=mods) for mods in BESIDE_PACKED]
    return found


def wide_cases() -> list[Case]:
    """Forwards in tiles of 128 keys and backwards in blocks of 256, all whose places come again."""
    shape = Case(batch=1, seqlen_q=260, seqlen_k=600, num_heads=2, num_heads_k=1, head_dim=64)
    mods = (
        ("padding",),
        ("bias_bhqk", "documents"),
        ("softcap30", "mask_1hqk"),
        ("drop0.5",),
        ("alibi", "sinks"),
    )
    return [shape.replace(mods=of) for of in mods]
