"""Tests of the tests: the CPU backend with a planted bug, or a truth that means something else, must fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from flash_ext._cpu import tiles as tiled
from flash_ext._ops.modifiers import Modifiers
from tests import harness
from tests.cases import Case, dense, packed
from tests.harness import TARGETS, CaseFailure, compute, run_case
from tests.inputs import Inputs
from tests.modifier_probes import count_probe, mask_probe, needle_probe, sparse_dout_probe

CPU = TARGETS["cpu"]
DENSE = dense(2, 130, 150, 4, 2, 64, dlse=True)


def with_end(bounds: Tensor) -> Tensor:
    """Hidden intervals that hold their end as well."""
    wide = bounds.clone()
    wide[..., 1::2] += 1
    return wide


# What a kernel may get wrong in what a modifier means: the name, and how its field is changed.
MISREADINGS = {
    "prefix": lambda m: {"prefix_lens": m.prefix_lens + 1}, "sinktok5": lambda m: {"sink_tokens": 6},
    "chunk32": lambda m: {"chunk": 33}, "hkeys1_h": lambda m: {"hidden_keys": with_end(m.hidden_keys)},
    "hrows2_bh": lambda m: {"hidden_rows": with_end(m.hidden_rows)},
    "documents": lambda m: {"document_k": m.document_k.abs()},
    "padding": lambda m: {"mask": m.mask.roll(1, -1)}, "mask_bhqk": lambda m: {"mask": m.mask.roll(1, -1)},
    "mask_1hqk": lambda m: {"mask": m.mask.flip(1)},
    "blocks16x16_h": lambda m: {"blocks": m.blocks.roll(1, -1)}, "top": lambda m: {"top_left": False},
    "bias_1hqk": lambda m: {"bias": m.bias.flip(1)}, "bias_b11k": lambda m: {"bias": m.bias[:1]},
    "alibi": lambda m: {"slopes": m.slopes * 1.01}, "sinks": lambda m: {"sinks": m.sinks + 0.01},
    "softcap1": lambda m: {"softcap": 1.01}, "drop0.5": lambda m: {"rng": m.rng + 1},
}  # fmt: skip
SHOWN_BY_PROBES = ("prefix", "sinktok5", "chunk32", "hkeys1_h", "hrows2_bh", "documents", "padding",
                   "mask_bhqk", "mask_1hqk", "blocks16x16_h", "top")  # fmt: skip


def misread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    meaning = Inputs.meaning

    def wrong(self: Inputs, leaves: dict[str, Tensor]) -> Modifiers:
        mods = meaning(self, leaves)
        return dataclasses.replace(mods, **MISREADINGS[name](mods))

    monkeypatch.setattr(Inputs, "meaning", wrong)


def case_of(name: str) -> Case:
    windowed = name in ("prefix", "sinktok5", "top")
    return DENSE.replace(causal=windowed, window=(20, -1) if windowed else (-1, -1)).replace(mods=(name,))


@pytest.mark.parametrize("name", MISREADINGS)
def test_a_modifier_that_means_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = case_of(name)
    with CPU.active():
        run_case(case, CPU)
        misread(monkeypatch, name)
        with pytest.raises(CaseFailure, match="--repro"):
            run_case(case, CPU)


@pytest.mark.parametrize("name", SHOWN_BY_PROBES)
def test_probes_notice_one_key_too_many(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The mask probe notices all of them, the others what moves a count or a key that they look at."""
    case, probes = case_of(name), [mask_probe]
    if name in ("prefix", "sinktok5", "chunk32", "hkeys1_h", "documents"):
        probes.append(count_probe)
    if name.startswith("mask"):
        probes += [sparse_dout_probe, needle_probe]
    with CPU.active():
        for probe in probes:
            probe(case, CPU)
        misread(monkeypatch, name)
        for probe in probes:
            with pytest.raises(CaseFailure, match="places are wrong"):
                probe(case, CPU)


# Gradients that are wrong although the forward is right: of which case, and how they are changed.
WRONG_GRADIENTS = {
    "bias_b11k_f32": ("dbias", lambda t: t * 0.98),
    "bias_1hqk": ("dbias", lambda t: t.roll(1, -1)),
    "bias_1111_f32": ("dbias", lambda t: t + 0.1 * t.abs()),
    "bias_b1qk": ("dbias", lambda t: t.index_fill(-1, torch.tensor([149]), 0)),
    "alibi": ("dslopes", lambda t: t * 1.02),
    "alibi_b": ("dslopes", lambda t: t.flip(0)),
    "sinks": ("dsinks", lambda t: t * 1.02),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_a_wrong_gradient_of_a_modifier_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    of, change = WRONG_GRADIENTS[name]

    def wrong(x: Inputs, target) -> dict[str, Tensor]:
        results = compute(x, target)
        return results | {of: change(results[of])}

    case = DENSE.replace(mods=(name,))
    monkeypatch.setattr(harness, "compute", wrong)
    with CPU.active(), pytest.raises(CaseFailure, match=rf"\n    {of}: "):
        run_case(case, CPU)


BACKWARD_BUGS = {
    "softcap1": ("scores", lambda scores, *at: (scores(*at)[0], None)),
    "drop0.5": ("kept", lambda kept, *at: kept(*at).roll(1, -1)),
}


@pytest.mark.parametrize(
    "case", [DENSE, packed([70, 0, 60], [80, 5, 90], num_heads_k=1)], ids=["dense", "packed"]
)
@pytest.mark.parametrize("name", BACKWARD_BUGS)
def test_a_bug_of_the_backward_alone_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, case) -> None:
    """The slope of a softcap dropped; a dropout mask that is not that of the forward."""
    method, change = BACKWARD_BUGS[name]
    right = getattr(tiled._ScoreTiles, method)
    backward = tiled._backward

    def buggy_backward(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiled._ScoreTiles, method,
                          lambda self, *at: change(lambda *a: right(self, *a), *at))  # fmt: skip
            return backward(*arguments)

    case = case.replace(mods=(name,))
    with CPU.active():
        run_case(case, CPU)
        monkeypatch.setattr(tiled, "_backward", buggy_backward)
        with pytest.raises(CaseFailure, match=r"\n    d[qkv]: "):
            run_case(case, CPU)
