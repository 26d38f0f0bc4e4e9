"""The gates of ``compare.py`` for calls with modifiers: large tensors of normal data, both ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tests import compare
from tests.cases import dense
from tests.harness import Target
from tests.modifier_cases import ModifierCase, ModifierInputs, make_modifier_inputs
from tests.modifier_harness import call_and_differentiate, naming
from tests.modifier_truth import GRADIENTS
from tests.reference import attention_reference

GATED = (
    "bias_1hqk", "bias_qk_f32", "bias_b11k", "bias_1hqk_t", "distance128",
    "distance40_before_half", "mask_bhqk", "mask_b1qk_blocky", "padding",
    "documents", "prefix", "sinktok40", "chunk100", "hrows2_bh", "hkeys1_h", "blocks64x128_bh", "alibi",
    "alibi_b", "sinks", "softcap5", "softcap30", "drop0.1", "drop0.5", "drop0.9",
    "bias_1hqk,softcap30,drop0.1,sinks", "documents,alibi,drop0.1", "blocks48x16_b,sinks,bias_b11k_f32",
)  # fmt: skip
# Rows at which a document or a chunk begins would see a single key of a causal call: their dq is exactly 0,
# and what delta is off by shows undamped. The plain cases have such rows, and gates wide enough for them.
NEVER_CAUSAL = ("documents", "chunk100")
ALWAYS_CAUSAL = ("prefix", "sinktok40")  # without effect otherwise


def gated_cases(rows: int = 1024) -> list[ModifierCase]:
    """Each in both types, causal in one of them, every row with a fifth of the keys before it."""
    mcases = []
    for index, name in enumerate(GATED):
        mods = tuple(name.split(","))
        for at, dtype in enumerate(("bf16", "fp16")):
            causal = mods[0] in ALWAYS_CAUSAL or (index + at) % 2 == 0 and mods[0] not in NEVER_CAUSAL
            window = (rows // 4, -1) if mods[0] == "sinktok40" else (-1, -1)
            case = dense(1, rows, rows + rows // 4, 4, 2, (64, 128)[index // 2 % 2], dtype=dtype,
                         causal=causal, window=window, seed=index)  # fmt: skip
            mcases.append(ModifierCase(case, mods))
    return mcases


def gate_of(name: str, dtype: torch.dtype) -> compare.Gate:
    """Those of plain calls; the gradient of a bias, a sum of dS that nothing rounds before, has that of dq.

    The worst row of dk in fp16 is that of bf16, since keys that few queries see occur in both types here.
    """
    gate = compare.GATES[dtype]["dq" if name == "dbias" else name]
    if name != "dk":
        return gate
    of_bf16 = compare.GATES[torch.bfloat16]["dk"].worst_row / compare.UNIT_ROUNDOFF[torch.bfloat16]
    return dataclasses.replace(gate, worst_row=of_bf16 * compare.UNIT_ROUNDOFF[dtype])


def measured(mcase: ModifierCase, target: Target) -> Iterator[tuple[str, compare.Errors, compare.Gate]]:
    """Of out, dq, dk, dv and the gradient of a bias: its errors and its gate; lse is judged."""
    x = make_modifier_inputs(mcase, target.device)
    got, truth = call_and_differentiate(x, target), exact(x)
    case = mcase.case
    logit = compare.max_abs_logit(x.plain.q, x.plain.k, case.scale)
    compare.assert_lse(got["lse"], truth["lse"], logit + _added(x))
    for name in ("out", "dq", "dk", "dv", "dbias"):
        if name in truth:
            gate = gate_of(name, case.torch_dtype)
            compare.assert_same_special_values(name, got[name], truth[name])
            # Slopes leave keys to which every weight is a subnormal number of fp16.
            info = torch.finfo(case.torch_dtype)
            quantum = info.tiny * info.eps * math.sqrt(case.seqlen_k)
            yield name, compare.measure(got[name], truth[name], gate.row_floor, quantum), gate


def _added(x: ModifierInputs) -> float:
    """The largest number that is added to a score."""
    mods = x.meaning({})
    parts = [mods.bias, mods.sinks]
    most = sum(float(t.masked_fill(t.isinf(), 0).abs().max()) for t in parts if t is not None)
    return most + (0.0 if mods.slopes is None else float(mods.slopes.max()) * x.plain.k.shape[1])


def exact(x: ModifierInputs) -> dict[str, Tensor]:
    """float64, by autograd through the oracle."""
    plain = x.plain
    qkv = [t.detach().double().requires_grad_() for t in (plain.q, plain.k, plain.v)]
    leaves = {name: t.double().requires_grad_() for name, t in x.leaves().items()}
    out, lse = attention_reference(*qkv, x.mcase.case.spec, mods=x.meaning(leaves))
    wanted = dict(zip(("dq", "dk", "dv"), qkv)) | {GRADIENTS[name]: t for name, t in leaves.items()}
    grads = torch.autograd.grad(out, list(wanted.values()), plain.dout.double())
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads))}


def gate_case(mcase: ModifierCase, target: Target) -> None:
    """All gates of one case. Raises as ``run_case`` does."""
    with naming(mcase, target):
        failed = [
            f"{name}: {'; '.join(wrong)}\n  {errors}"
            for name, errors, gate in measured(mcase, target)
            if (wrong := compare.violations(errors, gate))
        ]
        assert not failed, "\n    ".join(failed)
