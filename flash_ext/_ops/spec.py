"""The validated meaning of one attention call, for the operators, the CPU backend and the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttnSpec:
    """Options of one attention call after validation.

    Attributes:
        scale: factor on the raw dot products.
        window_left: how many keys before a query's aligned position take part, inclusive; -1 is unlimited.
        window_right: how many keys after it take part, inclusive; -1 is unlimited. Causal is 0.

    A query row ``i`` of a sequence with ``seqlen_q`` queries and ``seqlen_k`` keys is aligned with the key
    ``i + seqlen_k - seqlen_q`` (bottom-right alignment).
    """

    scale: float
    window_left: int = -1
    window_right: int = -1


def wants_lse(flags: Sequence[Any]) -> bool:
    """Of a forward; ``flags``: (wide, want_lse), in which the last ones may be missing."""
    return len(flags) < 2 or bool(flags[1])


def default_scale(head_dim: int) -> float:
    """1/sqrt(head_dim), the scale of Vaswani et al. 2017. 1 for no columns, which a check behind refuses."""
    return 1.0 / math.sqrt(max(head_dim, 1))
