"""Compares results with their truth, element by element in units of the noise that each may have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.truth import Truth

# Unit roundoff counts as one deviation of an element's noise. Rounding to nearest gives 0.4 to 0.5 in the
# mean and at most 1 for a single rounding; sums of many roundings are normal.
RMS_LIMIT = 0.62  # measured on an H200 0.429 (fp16 dk); margin 1.45
MAX_LIMIT = 3.5  # measured on an H200 2.32 (fp16 out), 2.46 over random cases (tiny dk); margin 1.42
# The noise of lse is a bound already.
LSE_LIMIT = 1.0  # measured on an H200 0.066, 0.449 over random cases (twins); margin 2.2
# The mean of m independent squares of normal deviations of size s scatters by s / sqrt(2 m) around s: by
# 0.44 / sqrt(m) for s = RMS_LIMIT. This is 4.5 times that: even a tensor whose true mean is the limit fails
# by chance less than once in 10^5. With m = 1 the limit on the largest error does most of the work.
RMS_SCATTER = 2.0


def rms_limit(independent: float) -> float:
    """Limit of the root mean square over a tensor that has this many independent errors."""
    return RMS_LIMIT + RMS_SCATTER / math.sqrt(max(independent, 1.0))


@dataclass(frozen=True)
class NoiseError:
    """Errors of one tensor in noise units: root mean square and largest."""

    rms: float
    largest: float


def judge(
    results: dict[str, Tensor], repeats: dict[str, Tensor], truth: Truth, deterministic: bool
) -> dict[str, NoiseError]:
    """Checks special values, errors and the repetition of all tensors with one synchronisation.

    Args:
        results, repeats: out, lse and, after a backward, dq, dk, dv of two runs.
        deterministic: whether dq has to repeat bit for bit as well.

    Raises:
        AssertionError: with what is wrong and where.
    """
    numbers = []
    for name, got in results.items():
        ignored = _ignored(got, truth, name)
        wrong = _wrong_special_values(got, truth.value[name]) & ~ignored
        error = _in_noise_units(got, truth, name).masked_fill(ignored | wrong, 0)
        repeats_count = name != "dq" or deterministic
        zero = error.new_zeros(())
        numbers += [
            wrong.sum().double(),
            (_bits(got) != _bits(repeats[name])).sum().double() if repeats_count else zero,
            error.square().mean().sqrt() if error.numel() else zero,
            error.amax() if error.numel() else zero,
        ]
    values = iter(torch.stack(numbers).tolist())
    errors, problems = {}, []
    for name, got in results.items():
        special, changed, rms, largest = (next(values) for _ in range(4))
        errors[name] = NoiseError(rms, largest)
        mean_limit = LSE_LIMIT if name == "lse" else rms_limit(truth.independent[name])
        limit = LSE_LIMIT if name == "lse" else MAX_LIMIT
        if special:
            problems.append(_describe_special(name, got, truth))
        if changed:
            problems.append(_describe_change(name, got, repeats[name]))
        if not rms <= mean_limit or not largest <= limit:
            problems.append(_describe_error(name, got, truth, rms, mean_limit, limit))
    if problems:
        raise AssertionError("\n    ".join(problems))
    return errors


def _ignored(got: Tensor, truth: Truth, name: str) -> Tensor:
    unspecified = truth.unspecified.get(name)
    return torch.zeros_like(got, dtype=torch.bool) if unspecified is None else unspecified


def _bits(t: Tensor) -> Tensor:
    return t.view(torch.int16 if t.element_size() == 2 else torch.int32)


def _wrong_special_values(got: Tensor, value: Tensor) -> Tensor:
    """Where NaN, inf or -inf stand in one of the two only."""
    return (
        (got.isnan() != value.isnan())
        | ((got == math.inf) != (value == math.inf))
        | ((got == -math.inf) != (value == -math.inf))
    )


def _in_noise_units(got: Tensor, truth: Truth, name: str) -> Tensor:
    value, noise = truth.value[name], truth.noise[name]
    error = (got.double() - value).abs() / noise
    # Where the truth allows no error at all, none is zero units and any is infinitely many.
    error = torch.where(noise > 0, error, torch.where(got.double() == value, 0.0, math.inf))
    return torch.where(value.isfinite(), error, 0.0)


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def _describe_special(name: str, got: Tensor, truth: Truth) -> str:
    wrong = _wrong_special_values(got, truth.value[name]) & ~_ignored(got, truth, name)
    at = _first(wrong)
    return (
        f"{name}: {int(wrong.sum())} special values differ, first at {at}: got {got[at].item()}, "
        f"expected {truth.value[name][at].item()}"
    )


def _describe_change(name: str, got: Tensor, repeat: Tensor) -> str:
    wrong = _bits(got) != _bits(repeat)
    at = _first(wrong)
    return (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ between two runs, first at {at}: "
        f"{got[at].item()!r} and {repeat[at].item()!r}"
    )


def _describe_error(name: str, got: Tensor, truth: Truth, rms: float, mean_limit: float, limit: float) -> str:
    ignored = _ignored(got, truth, name) | _wrong_special_values(got, truth.value[name])
    error = _in_noise_units(got, truth, name).masked_fill(ignored, 0)
    at = tuple(x.item() for x in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"{name}: error {rms:.3g} noise units in the mean (limit {mean_limit:.3g}), "
        f"worst {error[at].item():.3g} (limit {limit}) "
        f"at {at}: got {got[at].item():.9g}, expected {truth.value[name][at].item():.9g}; "
        f"{int((error > limit).sum())} of {error.numel()} elements beyond the limit"
    )
