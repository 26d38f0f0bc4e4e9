"""What a row of the set ``models`` asks for, one or several of :data:`ASKS`, joined to one :class:`Asked`."""

from __future__ import annotations

import dataclasses
import functools

import torch

from bench import features
from bench.features import FEATURES, Asked, Draws, Feature, Rule
from bench.shapes import Case
from flash_ext import masks

SHIFTED_WINDOWS = 8  # windows on a side of an image
LEFT_CHUNKS = 2  # chunks before its own that a row sees


def _shifted_windows(case: Case, draws: Draws) -> Asked:
    """Of windows shifted by half their size: those at the lower and right edge hold parts of both edges.

    A window is a batch entry, the windows of an image one after the other. Swin's mask keeps each part to
    itself.
    """
    side = round(case.seqlen_q**0.5)
    window = torch.arange(case.batch, device=draws.device)[:, None]
    place = torch.arange(case.seqlen_q, device=draws.device)
    down, right = window // SHIFTED_WINDOWS % SHIFTED_WINDOWS, window % SHIFTED_WINDOWS
    wrapped = [
        (at == SHIFTED_WINDOWS - 1) & (inside >= side - side // 2)
        for at, inside in ((down, place // side), (right, place % side))
    ]
    ids = (2 * wrapped[0] + wrapped[1]).int()
    return Asked(
        {"mask": masks.Documents(ids)}, rule=lambda b, h, row, col: ids[b, row] == ids[b, col], by_batch=True
    )


def _left_chunks(case: Case, draws: Draws) -> Asked:
    """Chunks of 64 frames: a row sees its own chunk and the two before it."""
    # Short sequences, which are there to try the program, have four chunks.
    size = min(64, max(16, case.seqlen_q // 64 * 16))
    count = -(-case.seqlen_k // size)
    chunk = torch.arange(count, device=draws.device)
    behind = chunk[:, None] - chunk
    seen = (behind >= 0) & (behind <= LEFT_CHUNKS)
    return Asked(
        {"mask": masks.BlockMask(seen[None, None], size)},
        rule=lambda b, h, row, col: seen[row // size, col // size],
    )


# What a row may ask for; a name of the set ``features`` means the same here.
ASKS: dict[str, Feature] = {
    **{name: FEATURES[name] for name in ("key-padding", "dropout", "sinks")},
    **{name: FEATURES[name] for name in ("bias-grad", "relative-position-grad")},
    "relative-position-before-grad": Feature(
        functools.partial(features.relative_position, learns="bias", bidirectional=False)
    ),
    "softcap-50": Feature(functools.partial(features.softcap, cap=50.0), refused_by=("sdpa",)),
    "shifted-windows": Feature(_shifted_windows),
    "left-chunks": Feature(_left_chunks),
}


def wanted(case: Case) -> dict[str, Feature]:
    """The features that a case asks for, by name, whichever set it is in."""
    if case.feature:
        return {case.feature: FEATURES[case.feature]}
    return {name: ASKS[name] for name in case.asks}


def ask(case: Case, dtype: torch.dtype, device: torch.device) -> Asked:
    """All that a case asks for on tensors of a dtype and device, its causal mask and window included."""
    whole, draws = Asked(rule=features.window_rule(case)), Draws(case, dtype, device)
    for feature in wanted(case).values():
        whole = _joined(whole, feature.ask(case, draws))
    return whole


def _joined(first: Asked, second: Asked) -> Asked:
    """Both at once: a pair is visible where both show it.

    Raises:
        ValueError: both change the scores, or both learn a tensor.
    """
    if (first.learns and second.learns) or (first.score is not None and second.score is not None):
        raise ValueError("only one part of a row can change the scores or learn a tensor")
    options = first.options | second.options
    if "mask" in first.options and "mask" in second.options:
        options["mask"] = first.options["mask"] & second.options["mask"]
    learner, scorer = (first if first.learns else second), (first if first.score is not None else second)
    return Asked(
        options,
        learns=learner.learns,
        value_of=learner.value_of,
        rule=_both(first.rule, second.rule),
        by_batch=first.by_batch or second.by_batch,
        by_head=first.by_head or second.by_head,
        bias=scorer.bias,
        score=scorer.score,
    )


def _both(first: Rule | None, second: Rule | None) -> Rule | None:
    if first is None or second is None:
        return second if first is None else first
    return lambda b, h, row, col: first(b, h, row, col) & second(b, h, row, col)


def without_dropout(case: Case, asked: Asked) -> tuple[Case, Asked]:
    """The same row with every weight kept, which has one right result."""
    kept = {name: value for name, value in asked.options.items() if name != "dropout_p"}
    left = tuple(name for name in case.asks if name != "dropout")
    return dataclasses.replace(case, asks=left), dataclasses.replace(asked, options=kept)
