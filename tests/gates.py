"""The gates of ``compare.py`` for whole cases, plain and with modifiers: large tensors of normal data."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tests import compare
from tests.cases import Case, dense
from tests.harness import Target, compute, naming
from tests.inputs import Inputs, make_inputs
from tests.modifier_truth import exact

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


def gated_cases(rows: int = 1024) -> list[Case]:
    """Each in both types, causal in one of them, every row with a fifth of the keys before it."""
    cases = []
    for index, name in enumerate(GATED):
        mods = tuple(name.split(","))
        for at, dtype in enumerate(("bf16", "fp16")):
            causal = mods[0] in ALWAYS_CAUSAL or (index + at) % 2 == 0 and mods[0] not in NEVER_CAUSAL
            window = (rows // 4, -1) if mods[0] == "sinktok40" else (-1, -1)
            cases.append(dense(1, rows, rows + rows // 4, 4, 2, (64, 128)[index // 2 % 2], dtype=dtype,
                               causal=causal, window=window, seed=index, mods=mods))  # fmt: skip
    return cases


def measured(
    x: Inputs, got: dict[str, Tensor], truth: dict[str, Tensor]
) -> Iterator[tuple[str, compare.Errors, compare.Gate]]:
    """Of out, dq, dk, dv and the gradient of a bias: its errors and its gate; lse is judged."""
    case = x.case
    share_of_lse_gate(x, got["lse"], truth["lse"])
    for name in ("out", "dq", "dk", "dv", "dbias"):
        if name in truth:
            gate = compare.gate_of(name, case.torch_dtype, modified=bool(case.mods))
            # Slopes leave keys to which every weight is a subnormal number of fp16.
            terms = case.seqlen_k if case.mods else 1
            errors = compare.measure_for(gate, name, got[name], truth[name], case.torch_dtype, terms)
            yield name, errors, gate


def share_of_lse_gate(x: Inputs, got: Tensor, truth: Tensor) -> float:
    """The gate is that of the largest score and of what is added to it. Raises AssertionError beyond it."""
    mods = x.meaning({})
    parts = [mods.bias, mods.sinks]
    added = sum(float(t.masked_fill(t.isinf(), 0).abs().max()) for t in parts if t is not None)
    added += 0.0 if mods.slopes is None else float(mods.slopes.max()) * x.k.shape[1]
    return compare.assert_lse(got, truth, compare.max_abs_logit(x.q, x.k, x.case.effective_scale) + added)


def check_gates(x: Inputs, got: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """All gates of one case's results. Raises AssertionError."""
    failed = [
        f"{name}: {'; '.join(wrong)}\n  {errors}"
        for name, errors, gate in measured(x, got, truth)
        if (wrong := compare.violations(errors, gate))
    ]
    assert not failed, "\n    ".join(failed)


def gate_case(case: Case, target: Target) -> None:
    """Runs a case once, and all gates. Raises as ``run_case`` does."""
    with naming(case, target):
        x = make_inputs(case, target.device)
        check_gates(x, compute(x, target), exact(x))
