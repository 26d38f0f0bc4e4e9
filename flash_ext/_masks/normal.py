"""The one form of masks that kernels execute, and which expressions have it.

::

    [ right & ((left & chunk) | sink tokens)  |  prefix ]  &  hides & hides & ...

An expression means what boolean algebra says. Here it is either brought to this form without a change of
meaning, or refused in words that name the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from .atoms import (
    Causal,
    Chunks,
    Dense,
    Documents,
    HiddenKeys,
    HiddenRows,
    KeyMask,
    Prefix,
    SinkTokens,
    Window,
)
from .block_mask import BlockMask
from .token_tree import TokenTree
from .value import And, Mask, Not, Or, leaves

M = TypeVar("M", bound=Mask)
UNLIMITED = 1 << 62
MOST_INTERVALS = 2
REACHES = (Causal, Window, Chunks, Prefix, SinkTokens)


class Refused(ValueError):
    """No kernel executes the mask or bias."""


class Box(NamedTuple):
    """Keys around the row's own position: at most so many before and after it, inside its chunk (0: none)."""

    left: int = UNLIMITED
    right: int = UNLIMITED
    chunk: int = 0

    def holds(self, other: Box) -> bool:
        """Whether every key of ``other`` is certainly one of this box."""
        whole = self.chunk == 0 or (other.chunk > 0 and self.chunk % other.chunk == 0)
        return self.left >= other.left and self.right >= other.right and whole


class Reach(NamedTuple):
    """``box``, and the first ``sink`` keys up to ``sink_right`` after the position, and prefixes.

    A box of None has no keys.
    """

    box: Box | None
    sink: int = 0
    sink_right: int = UNLIMITED
    prefixes: tuple[Prefix, ...] = ()


class Bands(NamedTuple):
    """What rows reach, in the numbers of the operators: -1 is no limit, a chunk of 0 is none."""

    left: int
    right: int
    chunk: int
    sink_tokens: int
    prefixes: tuple[Prefix, ...]


class Normal(NamedTuple):
    """A mask in the form that kernels execute.

    Attributes:
        words: the expression it was made of. The mask itself would keep itself alive.
        reach: what rows reach before anything hides; None is all keys.
        alignments: those of the bands that limit anything.
        documents: of one expression at most.
        hidden_rows, hidden_keys: two intervals at most, together.
        keys: expressions of KeyMask only, all ANDed.
        blocks: expressions of BlockMask only.
        dense: expressions of Dense and KeyMask.
    """

    words: str
    reach: Reach | None
    alignments: frozenset[str]
    documents: Documents | None
    hidden_rows: tuple[HiddenRows, ...]
    hidden_keys: tuple[HiddenKeys, ...]
    keys: tuple[Mask, ...]
    blocks: tuple[Mask, ...]
    dense: tuple[Mask, ...]

    def bands(self, left: int = -1, right: int = -1) -> Bands:
        """What rows reach, also limited by a window of so many keys before and after; -1 is no limit.

        Raises:
            ValueError: no kernel executes that.
        """
        more = None if left == right == -1 else Box(*_bounds(Window(left, right)))
        return closed(self.words, self.reach, more)


def normal_of(mask: Mask) -> Normal:
    """See :meth:`flash_ext.masks.Mask.normal`."""
    whole = pushed(mask)
    parts = _once(whole.masks if isinstance(whole, And) else (whole,))
    sorts: dict[str, list[Mask]] = {}
    for part in parts:
        sorts.setdefault(_sort(mask, part), []).append(part)
    if len(documents := sorts.get("documents", [])) > 1:
        refuse(mask, "Documents stands once in a mask: number the pairs, ids_a * count_b + ids_b.")
    for name in ("HiddenRows", "HiddenKeys"):
        count = sum(part.intervals.shape[-1] // 2 for part in sorts.get(name, []))  # type: ignore[attr-defined]
        if count > MOST_INTERVALS:
            refuse(mask, f"all {name} together may hold {MOST_INTERVALS} intervals each, here {count}.")
    reach = None
    if "reach" in sorts:
        reach = _intersection(mask, [(part, _reach(mask, part)) for part in sorts["reach"]])
    alignments = {
        leaf.alignment
        for leaf in leaves(whole)
        if isinstance(leaf, (Causal, Chunks)) or (isinstance(leaf, Window) and _bounds(leaf) != Box()[:2])
    }
    fields = ("HiddenRows", "HiddenKeys", "keys", "blocks", "dense")
    hides: list[Any] = [tuple(sorts.get(name, ())) for name in fields]
    own_documents: Any = documents[0] if documents else None
    # A compiler that traces sizes as symbols cannot write them out.
    words = "this mask" if torch.compiler.is_compiling() else repr(mask)
    return Normal(words, reach, frozenset(alignments), own_documents, *hides)


def refuse(mask: Mask | str, words: str) -> NoReturn:
    """Refuses a mask, given by itself or in words."""
    raise Refused(
        f"No kernel executes {mask}: {words} Or spend memory on it: BlockMask.from_mask(mask, q_len, k_len)."
    )


def pushed(mask: Mask, negated: bool = False) -> Mask:
    """The same mask with ``~`` at its leaves only, ``&`` and ``|`` flat."""
    if isinstance(mask, Not):
        return pushed(mask.mask, not negated)
    if not isinstance(mask, (And, Or)):
        return Not(mask) if negated else mask
    join = And if isinstance(mask, And) != negated else Or
    parts = [pushed(part, negated) for part in mask.masks]
    return join(tuple(one for part in parts for one in (part.masks if isinstance(part, join) else (part,))))


def _once(given: Sequence[M]) -> list[M]:
    """Each object once. By identity: a compiler would guard on the tensors that hash and == look at."""
    kept: list[M] = []
    for one in given:
        if not any(one is other for other in kept):
            kept.append(one)
    return kept


# ---- what hides ---------------------------------------------------------------------------------------


def _sort(mask: Mask, part: Mask) -> str:
    """Which field of the normal form a conjunct belongs to."""
    kinds = {type(leaf) for leaf in leaves(part)}
    if TokenTree in kinds:
        refuse(
            mask,
            "TokenTree is for attention over a cache alone, where it stands by itself: mask=TokenTree(words) "
            "beside seqused_k.",
        )
    if kinds <= {KeyMask}:
        return "keys"
    if kinds <= {Dense, KeyMask}:
        return "dense"
    if kinds <= {BlockMask}:
        return "blocks"
    if isinstance(part, Documents):
        return "documents"
    if isinstance(part, (HiddenRows, HiddenKeys)):
        return type(part).__name__
    if isinstance(part, Not):
        name = type(part.mask).__name__
        refuse(mask, f"~{name} has no kernel; ~ works on Dense, KeyMask and BlockMask.")
    if kinds <= set(REACHES):
        return "reach"
    return _refuse_union(mask, part)


def _refuse_union(mask: Mask, part: Mask) -> NoReturn:
    """A union in which something hides."""
    kinds = {type(leaf) for leaf in leaves(part)}
    hiding = " and ".join(sorted(kind.__name__ for kind in kinds - set(REACHES)))
    inner = [one for one in part.masks if isinstance(one, And)] if isinstance(part, Or) else []
    if kinds & {Prefix, SinkTokens}:
        widening = " and ".join(kind.__name__ for kind in (Prefix, SinkTokens) if kind in kinds)
        hint = ""
        if inner:
            hint = f" & is taken before |, here {inner[0]!r}: put parentheses around the union."
        refuse(
            mask,
            f"what hides ({hiding}), hides from Prefix and SinkTokens as well, so it may not stand inside "
            f"their union. Write (... | {widening}(...)) & {hiding}(...), with {hiding} outside the union."
            f"{hint}",
        )
    refuse(
        mask,
        f"a union with {hiding} has no kernel: | joins Dense with Dense or KeyMask, BlockMask with "
        "BlockMask, bands with bands, and widens by Prefix and SinkTokens.",
    )


# ---- what rows reach ----------------------------------------------------------------------------------

Parts = Sequence[tuple[Mask | str, Reach]]


def _reach(mask: Mask, part: Mask) -> Reach:
    if isinstance(part, Causal):
        return Reach(Box(right=0))
    if isinstance(part, Window):
        return Reach(Box(*_bounds(part)))
    if isinstance(part, Chunks):
        return Reach(Box(chunk=part.size))
    if isinstance(part, Prefix):
        return Reach(None, prefixes=(part,))
    if isinstance(part, SinkTokens):
        return Reach(None, sink=part.count)
    if isinstance(part, (And, Or)):
        parts = [(one, _reach(mask, one)) for one in part.masks]
        return _intersection(mask, parts) if isinstance(part, And) else _union(mask, part, parts)
    assert isinstance(part, Not)
    refuse(mask, f"~{type(part.mask).__name__} has no kernel; ~ works on Dense, KeyMask and BlockMask.")


def _bounds(window: Window) -> tuple[int, int]:
    left, right = (UNLIMITED if bound < 0 else bound for bound in (window.left, window.right))
    return left, right


def _intersection(mask: Mask | str, parts: Parts) -> Reach:
    """What all parts reach."""
    if len(parts) == 1:
        return parts[0][1]
    for part, reach in parts:
        if reach.box is None:
            _refuse_alone(mask, reach)
        if reach.prefixes:
            others = " & ".join(_in_parentheses(other) for other, _ in parts if other is not part)
            refuse(
                mask,
                f"Prefix(lens) is visible whatever Causal, Window and Chunks say, so nothing may narrow it: "
                f"write ({others} & ...) | Prefix(lens), with {others} inside the union.",
            )
    box = _meet(mask, [reach.box for _, reach in parts if reach.box is not None])
    sinks = {reach.sink for _, reach in parts if reach.sink}
    if not sinks:
        return Reach(box)
    if len(sinks) > 1:
        refuse(mask, f"SinkTokens of several numbers, {sorted(sinks)}, stand in several unions: write one.")
    right = UNLIMITED
    for part, reach in parts:
        assert reach.box is not None
        if not reach.sink and (reach.box.left < UNLIMITED or reach.box.chunk):
            refuse(
                mask,
                f"a left window or Chunks outside the union with SinkTokens, here {part}, would hide the "
                "sink tokens again: write Causal() & ((Window(...) & Chunks(...)) | SinkTokens(...)), with "
                "both inside.",
            )
        right = min(right, reach.sink_right if reach.sink else reach.box.right)
    return Reach(box, sinks.pop(), right)


def _meet(mask: Mask | str, boxes: list[Box]) -> Box:
    chunks = sorted({box.chunk for box in boxes if box.chunk})
    if any(chunk % chunks[0] for chunk in chunks):
        refuse(mask, f"Chunks of {chunks} positions cut each other: one size must divide the others.")
    return Box(min(box.left for box in boxes), min(box.right for box in boxes), chunks[0] if chunks else 0)


def _union(mask: Mask, union: Or, parts: Parts) -> Reach:
    """What any of the parts reaches."""
    prefixes = tuple(_once([prefix for _, reach in parts for prefix in reach.prefixes]))
    boxes = [reach.box for _, reach in parts if reach.box is not None]
    box = _hull(mask, union, boxes) if boxes else None
    sinks = [(reach.sink, reach.sink_right) for _, reach in parts if reach.sink]
    count, right = max(sinks, default=(0, UNLIMITED))
    if any(other > right for _, other in sinks):
        refuse(mask, "SinkTokens stand in two parts of a union whose bounds on the right differ: write one.")
    if box is not None and count:
        if box.left == UNLIMITED and not box.chunk and right <= box.right:
            count, right = 0, UNLIMITED  # they are inside
        elif right < box.right:
            refuse(
                mask,
                "SinkTokens stand under a lower bound on the right than the rest of the union: write "
                "Causal() & (Window(left, -1) | SinkTokens(count)), with one bound outside.",
            )
    return Reach(box, count, right, prefixes)


def _hull(mask: Mask, union: Or, boxes: list[Box]) -> Box:
    """The box that holds exactly the keys of any of them.

    Boxes without chunks are intervals around the same position, and so is what they hold together.
    """
    plain = [box for box in boxes if not box.chunk]
    rest = [box for box in boxes if box.chunk]
    if plain:
        rest.append(Box(max(box.left for box in plain), max(box.right for box in plain)))
    for box in rest:
        if all(box.holds(other) for other in rest):
            return box
    refuse(mask, f"the union {union!r} of Chunks with bands has no kernel, unless one holds the others.")


def closed(words: str, reach: Reach | None, more: Box | None) -> Bands:
    """The numbers of a reach to which nothing is added any more."""
    parts: list[tuple[Mask | str, Reach]] = [(words, reach)] if reach is not None else []
    if more is not None:
        left, right = (-1 if bound == UNLIMITED else bound for bound in more[:2])
        window = Causal() if (left, right) == (-1, 0) else Window(left, right)
        parts.append((window, Reach(more)))
    if not parts:
        return Bands(-1, -1, 0, 0, ())
    total = _intersection(words, parts)
    if total.box is None:
        _refuse_alone(words, total)
    left, right, chunk = total.box
    if total.sink and total.sink_right > right:
        bound = "Causal()" if right == 0 else f"Window(-1, {right})"
        inner = [f"Window({left}, -1)"] if left < UNLIMITED else []
        inner += [f"Chunks({chunk})"] if chunk else []
        cure = f"{bound} & ({' & '.join(inner) or 'Window(left, -1)'} | SinkTokens({total.sink}))"
        if len(inner) == 2:
            cure = f"{bound} & (({' & '.join(inner)}) | SinkTokens({total.sink}))"
        refuse(
            words,
            "it shows early rows keys after their own position, because the bound on the right stands inside "
            f"the union: write {cure}, or SlidingWindow(left, sink_tokens={total.sink}). Prefix says that "
            "every row sees them.",
        )
    left, right = (-1 if bound == UNLIMITED else bound for bound in (left, right))
    return Bands(left, right, chunk, total.sink, total.prefixes)


def _refuse_alone(mask: Mask | str, reach: Reach) -> NoReturn:
    if reach.prefixes:
        refuse(
            mask,
            "Prefix widens another mask and says nothing alone: write Causal() | Prefix(lens), which is "
            "PrefixLM(lens). For the first keys only: KeyMask.from_lengths(lens, k_len).",
        )
    refuse(
        mask,
        "SinkTokens widens another mask and says nothing alone: write Causal() & (Window(left, -1) | "
        "SinkTokens(count)), which is SlidingWindow(left, sink_tokens=count).",
    )


def _in_parentheses(mask: Mask | str) -> str:
    return f"({mask})" if isinstance(mask, (And, Or)) else str(mask)
