"""Covering arrays: few rows in which every combination of ``strength`` factor levels occurs.

Most defects need the meeting of two or three particular options, not of all of them, so a few thousand rows
find what a full grid of millions would.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest


def covering_array(levels: list[int], strength: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Rows of level indices that cover every ``strength``-way combination, one greedy row at a time.

    Each row starts from a combination that is still uncovered and then takes, factor by factor, the level
    that covers the most uncovered combinations with the factors already set (ties are broken by the seed).

    Args:
        levels: number of levels of each factor.
        strength: how many factors are combined, 1..len(levels).
        seed: of the tie breaks; the same seed gives the same rows.
    Raises:
        ValueError: strength outside its range, or a factor without levels.
    """
    if not 1 <= strength <= len(levels):
        raise ValueError(f"strength must be 1..{len(levels)}, got {strength}")
    if min(levels) < 1:
        raise ValueError(f"every factor needs at least one level, got {levels}")
    rng = random.Random(seed)
    # uncovered[group of factors] = set of level tuples still to come
    uncovered = {
        group: set(itertools.product(*(range(levels[f]) for f in group)))
        for group in itertools.combinations(range(len(levels)), strength)
    }
    rows = []
    for group in sorted(uncovered, key=lambda g: -len(uncovered[g])):
        while uncovered[group]:
            row = dict(zip(group, min(uncovered[group])))
            rest = [f for f in range(len(levels)) if f not in row]
            rng.shuffle(rest)
            for factor in rest:
                row[factor] = _best_level(row, factor, levels[factor], uncovered, strength, rng)
            _mark(row, uncovered)
            rows.append(tuple(row[f] for f in range(len(levels))))
    return rows


def _best_level(
    row: dict[int, int], factor: int, count: int, uncovered: dict, strength: int, rng: random.Random
) -> int:
    gain = [0] * count
    for others in itertools.combinations(sorted(row), strength - 1):
        group = tuple(sorted((*others, factor)))
        open_here = uncovered[group]
        if not open_here:
            continue
        position = group.index(factor)
        fixed = [row[f] for f in others]
        for level in range(count):
            if tuple(fixed[:position] + [level] + fixed[position:]) in open_here:
                gain[level] += 1
    best = max(gain)
    return rng.choice([level for level in range(count) if gain[level] == best])


def _mark(row: dict[int, int], uncovered: dict) -> None:
    for group, open_here in uncovered.items():
        open_here.discard(tuple(row[f] for f in group))


def pairs_on_cpu(
    gpu: Sequence[pytest.MarkDecorator] = (pytest.mark.gpu,), strength: int = 2, **factors: Sequence
) -> pytest.MarkDecorator:
    """A test's factors and its ``device``: all combinations on a GPU, on the CPU all pairs of levels alone.

    Options choose among kernels on a GPU, and meet in one and the same code on the CPU.

    Args:
        gpu: marks of the cases on a GPU.
        strength: how many factors are combined on the CPU.
    """
    levels = [list(factor) for factor in factors.values()]
    covered = covering_array([len(own) for own in levels], strength)
    on_cpu = ([own[i] for own, i in zip(levels, row)] for row in covered)
    cases = [(*row, "cpu") for row in on_cpu] + [(*row, "cuda") for row in itertools.product(*levels)]
    return pytest.mark.parametrize(
        (*factors, "device"),
        [
            pytest.param(*case, id="-".join(map(str, case)), marks=gpu if case[-1] == "cuda" else ())
            for case in cases
        ],
    )
