"""The exact probes of every modifier beyond who sees whom, on every path.

Each list names the modifiers that a probe is for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests import modifier_probes as probes
from tests.cases import Case, dense, packed
from tests.emulated_modifiers import BUGS, model
from tests.harness import TARGETS, CaseFailure, Target, on_paths, on_targets, run_cases
from tests.modifier_cases import BIASES, DISTANCES, MASKS, STRUCTURE

CPU = TARGETS["cpu"]
WEIGHED = (*BIASES, *DISTANCES, "alibi", "alibi_b", "sinks", "softcap30", "drop0.1", "drop0.5", "drop0.9")
TOGETHER = (
    "bias_1hqk,alibi_b,sinks,padding", "bias_qk_f32,drop0.5,softcap2", "mask_bhqk_blocky,drop0.5,sinks",
    "documents,alibi,drop0.1", "bias_hqk_inf,sinks,softcap30", "blocks64x128_bh,bias_b1qk_skip_f32",
    "hrows2_bh,bias_bh1k_f32,drop0.9", "distance25,mask_b1qk,softcap2", "distance50_before,drop0.5,sinks",
    "prefix,sinktok5,alibi,top",
)  # fmt: skip
HIDING = (*MASKS, *STRUCTURE)
# A shift is exact for values of a bias that all sequences reach.
SHIFTED = tuple(name for name in BIASES if not name.endswith(("short", "long")))
SHIFTED_TOGETHER = (
    "bias_1hqk,sinks", "bias_bhqk,drop0.5", "bias_qk_f32,softcap5", "bias_b1qk_skip_f32,alibi",
    "bias_bhq1,padding,documents", "bias_11qk_odd,blocks48x16_b,drop0.1", "bias_hqk_inf,sinks,softcap30",
)  # fmt: skip
WITH_GRADIENT = (
    *BIASES, *DISTANCES, "alibi", "alibi_b", "sinks", "bias_1111_f32", "bias_b1q1", "bias_1h1k_f32",
    "bias_b11k_f32,alibi_b,sinks", "bias_h11_expanded,alibi,drop0.5", "bias_11qk_f32,sinks,documents",
    "alibi,softcap5,hkeys1_h", "distance40,alibi_b,sinks", "distance13_shared,documents,drop0.5",
    "distance7_before,top", "sinks,padding,prefix",
)  # fmt: skip
# One per kind of stride: a copy in another order would be read in another way.
PERMUTED = ("bias_bhqk", "bias_1hqk", "mask_bhqk", "padding", "prefix", "hrows2_bh", "hkeys1_h", "hkeys2_b",
            "blocks64x128_bh", "alibi", "alibi_b", "sinks", "softcap30", "distance20",
            "bias_bhqk,alibi_b,sinks,padding", "mask_bhqk,hrows2_bh,softcap5")  # fmt: skip


BOTH = ("dense", "packed")


def cases(names: tuple[str, ...], kinds: tuple[str, ...] = BOTH, **options) -> list[Case]:
    """Each causal and not, dense and packed, in a head size, a type and a mode that go round."""
    cases = []
    for index, full_name in enumerate(names):
        for at in range(2):
            name = full_name
            common = {
                "head_dim": (64, 128, 96, 256)[(index + at) % 4], "dtype": ("bf16", "fp16")[(index + at) % 2],
                "deterministic": (index + at) % 3 == 0, "causal": at == 1 or name.endswith("top"),
                "seed": index,
            } | options  # fmt: skip
            if kinds[(index // 2 + at) % len(kinds)] == "packed":
                lens = {"num_heads": 4, "num_heads_k": 2, "tail": 3 * at}
                case = packed([7, 0, 190, 64], [90, 9, 130, 0], **lens, **common)
            else:
                case = dense(2, 150 + 50 * at, 257, 4, 2, **common)
                # Nothing can end early or late there.
                name = name.replace("_short", "").replace("_long", "")
            cases.append(case.replace(mods=tuple(name.split(","))))
    return cases


LISTS: dict[Callable, list[Case]] = {
    probes.count_probe: cases(WEIGHED + TOGETHER),
    probes.weights_probe: cases(WEIGHED + TOGETHER + HIDING),
    probes.integer_probe: cases((*HIDING, "drop0.5", "padding,drop0.5", "documents,drop0.5")),
    probes.ones_probe: cases((*WEIGHED, *HIDING, *TOGETHER), scale=0.5),
    probes.needle_probe: cases(WEIGHED),
    probes.sparse_dout_probe: cases((*WEIGHED, *TOGETHER)),
    probes.shift_probe: [*cases(SHIFTED + SHIFTED_TOGETHER, ("dense",), dlse=True),
                         *cases(("bias_bhqk", "bias_qk_f32"), ("packed",))],
    probes.scaling_probe: cases((*WEIGHED, *TOGETHER, "padding", "mask_b1qk", "hkeys1_h", "blocks16x16_h"),
                                dlse=True),
    probes.dlse_probe: cases(WITH_GRADIENT),
    probes.permute_probe: cases(PERMUTED, ("dense",), dlse=True),
}  # fmt: skip


@pytest.mark.parametrize("probe", LISTS, ids=lambda probe: probe.__name__)
@on_paths
def test_probes_of_every_modifier(target: Target, probe: Callable) -> None:
    """On the CPU by the model that rounds as kernels must: tolerances leave room for 16-bit factors."""
    with model() if target.device == "cpu" else contextlib.nullcontext():
        run_cases(LISTS[probe], target, probe, cpu=4)


@pytest.mark.parametrize("probe", (probes.weights_probe, probes.shift_probe, probes.dlse_probe),
                         ids=lambda probe: probe.__name__)  # fmt: skip
@on_targets("sm80-99k")
def test_probes_on_other_tiles(target: Target, probe: Callable) -> None:
    run_cases(LISTS[probe][::3], target, probe)


# ---- the probes themselves -------------------------------------------------------------------------------

# Which probes notice a bug of the model, on which modifiers.
NOTICED = {
    "bias_rounded": ("bias_qk_f32", {"count", "dlse"}),
    "bias_of_batch_0": ("bias_bhqk", {"count", "weights", "shift", "dlse", "permute"}),
    "bias_head": ("bias_1hqk", {"count", "weights", "shift", "dlse"}),
    "bias_clamped": ("bias_qk_f32", {"shift"}),
    "distance_from_key_0": ("distance20", {"count", "weights", "dlse"}),
    "distance_off_by_one": ("distance20", {"count", "weights", "dlse"}),
    "distance_ends_lost": ("distance20", {"count", "weights"}),
    "dtable_of_first_tile": ("distance20", {"dlse"}), "dtable_ends_lost": ("distance20", {"dlse"}),
    "slopes_head": ("alibi", {"count", "weights", "dlse"}), "sink_twice": ("sinks", {"count", "dlse"}),
    "sink_head": ("sinks", {"count", "weights", "dlse"}),
    "mask_shifted": ("mask_bhqk", {"weights", "mask", "sparse_dout", "needle"}),
    "document_0": ("documents", {"count", "weights", "mask", "sparse_dout"}),
    "bias_before_cap": ("bias_1hqk,softcap2", {"count", "weights", "shift"}),
    "slopes_from_key_0": ("alibi", {"count", "weights", "dlse"}),
    "drop_unscaled": ("drop0.5", {"weights", "integer", "needle"}),
    "drop_by_tile": ("drop0.5", {"weights", "integer", "needle", "sparse_dout"}),
    "last_key_lost": ("sinks", {"count", "weights"}), "weights_cut": ("padding", {"ones"}),
    "small_flushed": ("softcap30", {"scaling"}), "dbias_of_last_tile": ("bias_b11k_f32", {"dlse"}),
    "dslopes_of_first_tile": ("alibi", {"dlse"}),
}  # fmt: skip


def test_every_bug_of_the_model_has_its_probes() -> None:
    assert NOTICED.keys() | {"cap_without_slope"} == set(BUGS)  # which values notice: test_gates.py


@pytest.mark.parametrize("bug", NOTICED)
def test_a_planted_bug_is_noticed_by_its_probes(bug: str) -> None:
    name, wanted = NOTICED[bug]
    rows = 150 if bug == "dbias_of_last_tile" else 20  # more than a tile of the CPU path
    keys = 512 if name == "drop0.5" else 300  # two tiles, and a power of two for whole numbers
    case = dense(2, rows, keys, 4, 2, 64, deterministic=True, mods=tuple(name.split(",")))
    with CPU.active():
        for probe in (getattr(probes, f"{word}_probe") for word in sorted(wanted)):
            with model():
                probe(case, CPU)
            with model(bug), pytest.raises(CaseFailure, match=r"--repro .*\n    (?!\w*Error)"):
                probe(case, CPU)
