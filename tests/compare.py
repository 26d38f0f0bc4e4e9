"""How results are judged: error metrics, their gates, and messages that point at the fault.

``got`` is what an implementation returned, ``ref`` the float64 truth computed from the same rounded inputs
and never rounded afterwards. Everything works on any device; each check costs one synchronisation.

A half-precision kernel with fp32 accumulation rounds three things: its inputs (not its fault), P before the
second product, and its output. With unit roundoff u that is 0.55 to 0.6 u in relative L2 norm whatever the
length, so the gates below are multiples of u. A tensor passes if it is within its gates for the whole tensor,
for the worst row and for the mean error, and if NaN and infinities stand exactly where the truth has them.

The gates hold for standard normal inputs with at least 128 rows and 64 features. Elsewhere the truth is no
fair measure of the error, above all in the gradients, where exact sums cancel to nothing and their roundings
do not; ``tests/truth.py`` gives every element its own noise for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

# ------------------------------------------------------------------------------------------------------------
# The gates, frozen here and nowhere else: the larger of the value derived from the roundings and 1.25 times
# the largest measured on an H200 (path sm80; `python -m tests.tools.calibrate`, 100 shapes of 256 to 4096 and
# `big_cases`). Comments give what was measured, in units of u, bf16 / fp16, and the margin of the gate over
# the larger one.

# Largest relative error of rounding to nearest.
UNIT_ROUNDOFF: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
)


@dataclass(frozen=True)
class Gate:
    """Limits of one tensor's errors, as fractions of the truth.

    Attributes:
        rel_l2: norm of the error over norm of the truth, whole tensor.
        worst_row: the same for the worst single row (last dimension), see ``row_floor``.
        signed_bias: absolute mean error over mean absolute value; rounding must not lean to one side.
        row_floor: rows smaller than this fraction of the typical row are measured against that instead.
    """

    rel_l2: float
    worst_row: float
    signed_bias: float
    row_floor: float = 1e-3


def _half_gates(u: float, signed_bias: float, dk_worst_row: float) -> dict[str, Gate]:
    return {
        # Measured: 0.607 / 0.607, margin 1.32; worst row 1.15 / 1.05, margin 1.25. A row of few
        # keys averages least: each of its weights and the result may be off by u.
        "out": Gate(0.8 * u, 1.44 * u, signed_bias),
        # Measured: 0.660 / 0.669, margin 1.27; worst row 12.3 / 11.3, margin 1.25.
        # Delta is formed from the rounded output and is off by e = 0.4 u sqrt(d). That shows where dS
        # cancels: in row 0 of a causal call, whose exact dq is 0, and in the few rows after it. Row 0 is off
        # by e |k|; a row of n keys has the size sqrt(d) sqrt(2.7 / n) |k|, 0.10 sqrt(d) |k| in quadratic mean
        # over n up to 2048. Against the floor of half of that, row 0 is off by 7.7 u in the mean, so by 15 u
        # now and then.
        "dq": Gate(0.85 * u, 15.4 * u, signed_bias, row_floor=0.5),
        # Measured: 0.654 / 0.650, margin 1.30; worst row 5.31 / 1.12, margin 1.26 / 1.78.
        # The same where a single query sees a key: its dk is p (dP - delta) q, so all of the row is off by
        # the error of delta, 0.4 u sqrt(d), over |dP - delta|, sqrt(d) in the mean and 0.1 sqrt(d) for 8 % of
        # the keys. Only the shapes in bf16 have such a row whose query sees few keys (a packed sequence of 1
        # query and 5 keys), so each type has its own gate. In fp16 the rows that remain, the last keys of
        # causal squares, reach 1.39 u for other data of the same shapes, with P, dS and the results rounded
        # in float64: margin 1.44 over that.
        "dk": Gate(0.85 * u, dk_worst_row * u, signed_bias),
        # Measured: 0.611 / 0.610, margin 1.39; worst row 1.02 / 1.10, margin 1.45.
        "dv": Gate(0.85 * u, 1.6 * u, signed_bias),
    }


def _full_gates(rel_l2: float) -> dict[str, Gate]:
    """float32 and float64: nothing is rounded on the way, errors are those of the accumulation."""
    gate = Gate(rel_l2, 4 * rel_l2, rel_l2, row_floor=0.05)
    return {"out": gate, "dq": Gate(rel_l2, 10 * rel_l2, rel_l2, row_floor=0.5), "dk": gate, "dv": gate}


GATES: Mapping[torch.dtype, Mapping[str, Gate]] = MappingProxyType(
    {
        # Signed bias measured: 7.8e-6 (dv), margin 3.8.
        torch.float16: MappingProxyType(_half_gates(UNIT_ROUNDOFF[torch.float16], 3e-5, dk_worst_row=2.0)),
        # Measured: 6.5e-5 (dk), margin 4.6.
        torch.bfloat16: MappingProxyType(_half_gates(UNIT_ROUNDOFF[torch.bfloat16], 3e-4, dk_worst_row=6.7)),
        torch.float32: MappingProxyType(_full_gates(1e-6)),
        torch.float64: MappingProxyType(_full_gates(4e-15)),
    }
)

# lse is float32 whatever the inputs are: this times the largest scaled |q| . |k|, at least 1.
# Measured on an H200: 0.049 of it.
LSE_GATE: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 3e-6, torch.float64: 1e-14})
# lse of the count probe, q = 0, where the truth is the logarithm of a whole number.
COUNT_LSE_GATE = 2e-6

# Largest ratio of a relative L2 error to that of PyTorch's FlashAttention-2 backend on the same inputs.
# Measured on an H200 for out: 1.055 (D 64, 512 keys, bf16), 1.058 (D 128, 1000 keys, fp16), 1.078 (D 256, 640
# keys, bf16). FlashAttention-2 moves its running maximum at once, so the largest weight of a row is exactly 1
# and its rounding costs nothing. The sm80 path leaves the maximum alone while scores exceed it by less than
# 2^8 and rounds that weight like any other. It makes up 12 % to 17 % of the sum of squared weights in these
# shapes, and the rounding of the weights 42 % to 45 % of the error's square with the weight exact: 0.45 (1 /
# (1 - 0.17) - 1) = 9 % more of the square, so a ratio of 1.05; the two algorithms in float64 with P and out
# rounded give 1.04 to 1.06. The gate is 1.15 since rows of fewer keys have larger shares, and the tiles of
# the two kernels differ in size and order. The backward has no running maximum.
PEER_RATIO: Mapping[str, float] = MappingProxyType({"out": 1.15, "dq": 1.05, "dk": 1.05, "dv": 1.05})


# ------------------------------------------------------------------------------------------------------------
# Metrics


@dataclass(frozen=True)
class Errors:
    """What separates a result from the truth. Indices are into the tensor, rows without the last one."""

    rel_l2: float
    worst_row: float
    worst_row_index: tuple[int, ...]
    signed_bias: float
    bias_noise: float
    max_abs: float
    worst_index: tuple[int, ...]
    worst_got: float
    worst_ref: float

    def __str__(self) -> str:
        return (
            f"rel-L2 {self.rel_l2:.3g}, worst row {self.worst_row:.3g} at {self.worst_row_index}, "
            f"signed bias {self.signed_bias:.3g}, worst element {self.worst_index}: "
            f"got {self.worst_got:.9g}, reference {self.worst_ref:.9g}, |difference| {self.max_abs:.3g}"
        )


def measure(got: Tensor, ref: Tensor, row_floor: float = 1e-3, quantum: float = 0.0) -> Errors:
    """Errors of ``got`` against ``ref`` (same shape), where ``ref`` is finite in got's dtype.

    Args:
        row_floor: rows with a norm below this fraction of the RMS row are divided by that instead.
        quantum: absolute error per element that is forgiven before anything is measured relatively (the
            spacing of subnormal numbers, below which no relative precision exists).
    """
    if got.shape != ref.shape:
        raise AssertionError(f"shape {tuple(got.shape)} where the reference has {tuple(ref.shape)}")
    if ref.numel() == 0:
        return Errors(0.0, 0.0, (), 0.0, 0.0, 0.0, (), 0.0, 0.0)
    finite = ref.detach().to(got.dtype).isfinite()
    got, ref = got.detach().double(), ref.detach().double()
    error = torch.where(finite, got - ref, 0.0)
    truth = torch.where(finite, ref, 0.0)

    rows_error = error.norm(dim=-1)
    rows_truth = truth.norm(dim=-1)
    root_numel, root_row = math.sqrt(ref.numel()), math.sqrt(ref.shape[-1])
    typical_row = truth.norm() / root_numel * root_row
    excess = (rows_error - quantum * root_row).clamp_min(0.0)
    ratio = _ratio(excess, torch.maximum(rows_truth, row_floor * typical_row))
    ratio = ratio.nan_to_num(nan=math.inf)
    row_flat, flat = ratio.argmax(), error.abs().nan_to_num(nan=math.inf).argmax()
    mean_truth = truth.abs().mean()
    numbers = torch.stack(
        [
            _ratio((error.norm() - quantum * root_numel).clamp_min(0.0), truth.norm()),
            ratio.flatten()[row_flat],
            _ratio((error.mean().abs() - quantum).clamp_min(0.0), mean_truth),
            _ratio(error.norm() / ref.numel(), mean_truth),
            error.flatten()[flat].abs(),
            got.flatten()[flat],
            ref.flatten()[flat],
            row_flat.double(),
            flat.double(),
        ]
    ).tolist()
    rel_l2, worst_row, bias, bias_noise, max_abs, worst_got, worst_ref, row_flat, flat = numbers
    return Errors(
        rel_l2=rel_l2, worst_row=worst_row, worst_row_index=_unravel(int(row_flat), ref.shape[:-1]),
        signed_bias=bias, bias_noise=bias_noise, max_abs=max_abs, worst_index=_unravel(int(flat), ref.shape),
        worst_got=worst_got, worst_ref=worst_ref,
    )  # fmt: skip


def _ratio(error: Tensor, scale: Tensor) -> Tensor:
    """error / scale, where no error is 0 and an error on a zero scale is infinite."""
    return torch.where(error == 0, 0.0, error / scale)


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for extent in reversed(shape):
        flat, here = divmod(flat, extent)
        index.append(here)
    return tuple(reversed(index))


# ------------------------------------------------------------------------------------------------------------
# Checks


def assert_same_special_values(name: str, got: Tensor, ref: Tensor) -> None:
    """NaN, +inf and -inf must stand exactly where the truth, rounded to got's dtype, has them."""
    ref = ref.detach().to(got.dtype)
    for kind, mine, theirs in (
        ("NaN", got.isnan(), ref.isnan()),
        ("+inf", got == math.inf, ref == math.inf),
        ("-inf", got == -math.inf, ref == -math.inf),
    ):
        wrong = mine != theirs
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} positions of {kind} differ; "
                f"first at {index}: got {got[index].item()}, reference {ref[index].item()}"
            )


def limits(errors: Errors, gate: Gate) -> dict[str, tuple[float, float]]:
    """What was measured and the limit of it, by words."""
    return {
        "rel-L2": (errors.rel_l2, gate.rel_l2),
        "worst row": (errors.worst_row, gate.worst_row),
        # Independent roundings alone give a mean of this many standard deviations about once in a million.
        "signed bias": (errors.signed_bias, gate.signed_bias + 5 * errors.bias_noise),
    }


def violations(errors: Errors, gate: Gate) -> list[str]:
    """Which limits of ``gate`` are passed, in words; empty if none."""
    found = limits(errors, gate)
    return [f"{what} {v:.3g} > {limit:.3g}" for what, (v, limit) in found.items() if not v <= limit]


def gate_of(name: str, dtype: torch.dtype, modified: bool = False) -> Gate:
    """The gate of out, dq, dk, dv or, of a call with modifiers, of dbias.

    The gradient of a bias, a sum of dS that nothing rounds before, has the gate of dq. With modifiers the
    worst row of dk in fp16 is that of bf16, since keys that few queries see occur in both types there.
    """
    gate = GATES[dtype]["dq" if name == "dbias" else name]
    if name != "dk" or not modified:
        return gate
    of_bf16 = GATES[torch.bfloat16]["dk"].worst_row / UNIT_ROUNDOFF[torch.bfloat16]
    return replace(gate, worst_row=of_bf16 * UNIT_ROUNDOFF[dtype])


def measure_for(gate: Gate, name: str, got: Tensor, ref: Tensor, dtype: torch.dtype, terms: int) -> Errors:
    """The errors that ``gate`` limits, of a call in ``dtype``; special values stand where they should.

    Args:
        terms: how many rounded terms each element sums. It matters only where they are subnormal numbers,
            whose absolute errors add up.
    """
    assert_same_special_values(name, got, ref)
    info = torch.finfo(dtype)
    return measure(got, ref, gate.row_floor, quantum=info.tiny * info.eps * math.sqrt(terms))


def assert_within_gates(name: str, got: Tensor, ref: Tensor) -> Errors:
    """Judges one tensor by the gates of its dtype and returns its errors, for calibration and reports.

    Args:
        name: "out", "dq", "dk" or "dv", optionally followed by a space and more words for the message.
        got: the result, in the dtype whose gates apply.
        ref: the truth, float64.
    """
    gate = GATES[got.dtype][name.split(maxsplit=1)[0]]
    errors = measure_for(gate, name, got, ref, got.dtype, terms=1)
    failed = violations(errors, gate)
    if failed:
        raise AssertionError(f"{name} ({got.dtype}): {'; '.join(failed)}\n  {errors}")
    return errors


def max_abs_logit(q: Tensor, k: Tensor, scale: float) -> float:
    """Largest |scale| * sum_d |q_d k_d| over the pairs of rows that meet in a score; sets the lse gate.

    Takes (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim) tensors. Of packed ones all
    pairs count, also across sequences, so the result may be too large. Non-finite values are left out.
    """
    if q.numel() == 0 or k.numel() == 0:
        return 0.0
    q, k = (x if x.dim() == 4 else x[None] for x in (q, k))
    q, k = (x.detach().float().abs().nan_to_num(0.0, 0.0, 0.0).transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return abs(scale) * max(float((rows @ k.mT).max()) for rows in q.split(512, dim=2))


def assert_lse(got: Tensor, ref: Tensor, largest_logit: float) -> float:
    """Judges lse, special values exactly and the rest absolutely; returns the share of the gate used."""
    assert_same_special_values("lse", got, ref)
    limit = LSE_GATE[got.dtype] * max(1.0, largest_logit)
    errors = measure(got, ref)
    if not errors.max_abs <= limit:
        raise AssertionError(f"lse: |difference| {errors.max_abs:.3g} > {limit:.3g}\n  {errors}")
    return errors.max_abs / limit


def assert_exact(name: str, got: Tensor, expected: Tensor) -> None:
    """Bitwise equality of values (dtype included); a NaN equals a NaN and -0 equals 0."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise AssertionError(
            f"{name}: {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    wrong = ~((got == expected) | (got.isnan() & expected.isnan()))
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are not exactly as expected; first at "
            f"{index}: got {got[index].item()!r}, expected {expected[index].item()!r}"
        )


def assert_within_twice_pytorch(name: str, got: Tensor, ref: Tensor, pytorch: Tensor) -> None:
    """The rule FlashAttention's own tests use: at most twice the error of PyTorch in the same precision.

    It is weaker than the gates at long sequences and kept so that users can compare. ``pytorch`` is the
    result of materialised attention in got's dtype; one rounding of the largest value is allowed on top.
    """
    limit = 2 * measure(pytorch, ref).max_abs
    if ref.numel():
        limit += 2 * UNIT_ROUNDOFF[got.dtype] * float(ref.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
    errors = measure(got, ref)
    if not errors.max_abs <= limit:
        raise AssertionError(f"{name}: {errors.max_abs:.3g} off, twice PyTorch's is {limit:.3g}\n  {errors}")
