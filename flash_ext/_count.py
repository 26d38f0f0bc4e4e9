"""How often attention ran here, and from where it was asked: :func:`count`."""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType
from typing import Any

import torch

from ._ops.library import _C

# Those that count at present. Entries look at it first, which is all that they pay otherwise.
counting: list[Counts] = []
_lock = threading.Lock()


class Counts:
    """What :func:`count` gives.

    Attributes:
        calls: calls of each public entry: ``attention``, ``attention_varlen``, ``forward``, ``backward``,
            ``scaled_dot_product_attention``, ``append_kv``, ``attention_fp8``, ``nn.MultiheadAttention``,
            ``serving`` (the calls of engines), ``compat.flash_attn``, ``integrations.transformers``,
            ``distributed.ring_attention``, ``distributed.ulysses_attention``, ``merge_attention_states``. An
            entry that calls another counts for both.
        fell_back: calls that ran in another way than was asked for, by (entry, reason): under ``quantize`` of
            ``integrations.transformers`` those in the type of the model instead of fp8.
        torch_served: calls of torch's own operators that ran here under :func:`flash_ext.enable_sdpa`, by the
            operator's name; forward and backward are operators of their own.
        torch_returned: those that went back to the implementation of torch, by (operator, reason).
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.fell_back: Counter[tuple[str, str]] = Counter()
        self.torch_served: Counter[str] = Counter()
        self.torch_returned: Counter[tuple[str, str]] = Counter()
        self._served: Counter[str] = Counter()
        self._returned: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Counts:
        self._served, self._returned = _served(), Counter(_C.sdpa_returned())
        with _lock:
            counting.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            counting.remove(self)
        self.torch_served += _served() - self._served
        self.torch_returned += Counter(_C.sdpa_returned()) - self._returned

    def __repr__(self) -> str:
        parts: dict[str, Counter[Any]] = {
            "calls": self.calls,
            "fell_back": self.fell_back,
            "torch_served": self.torch_served,
            "torch_returned": self.torch_returned,
        }
        return f"Counts({', '.join(f'{name}={dict(part)}' for name, part in parts.items())})"


def count() -> Counts:
    """Counts calls in a ``with`` statement, of all threads: is attention really run here?

    Calls inside compiled graphs and replays of CUDA graphs are not seen, except those of torch's operators,
    which are counted where they run. ``torch_served`` and ``torch_returned`` are filled at the end.

    Example:
        >>> q = torch.randn(1, 8, 2, 16)
        >>> with flash_ext.count() as c:
        ...     out = flash_ext.attention(q, q, q)
        >>> c.calls["attention"]
        1
    """
    return Counts()


def tally(entry: str) -> None:
    """One more call of an entry; entries ask ``if counting`` first."""
    if torch.compiler.is_compiling():
        return
    with _lock:
        for counts in counting:
            counts.calls[entry] += 1


def tally_fallback(entry: str, reason: str) -> None:
    """One more call of an entry that runs in another way than was asked for; asked as :func:`tally` is."""
    if torch.compiler.is_compiling():
        return
    with _lock:
        for counts in counting:
            counts.fell_back[entry, reason] += 1


def _served() -> Counter[str]:
    return Counter({name: number for name, number in _C.sdpa_served()})
