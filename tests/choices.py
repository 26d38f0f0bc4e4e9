"""What the names of a case's modifiers stand for: tensors, arguments of a call, and their meaning.

A name says everything about a modifier: its shape, type, strides and kind of values. So a case stays a line
of JSON, and its tensors are made anew from names and seed. What a name means to the oracle is written out by
hand here, not taken from the package's own normalisation.

    bias_<dims>, mask_<dims>   a tensor with these dimensions out of b, h, q, k, 1 for one that is broadcast:
                               bias_bhqk, mask_b11k, bias_qk; then, each after "_": f32 (else the dtype of q),
                               t (rows and keys swapped in memory), odd (rows off 16 bytes), skip (every
                               second key of a wider tensor), inf (-inf in places and over whole tiles),
                               expanded (repeated by stride 0 where a dimension is 1), blocky (the same over
                               100 x 100), short and long (packed: ends before or after the sequences)
    distance<n>                a clipped relative-position bias of reach n, its table in fp32; _before: keys
                               after the row read the entry of distance 0, _shared: all heads have one row,
                               _half: the table has the dtype of q, _inf: a third of it is -inf
    padding (holes anywhere), padding_left, padding_right (nothing of some sequences, all of others),
    documents, prefix, sinks, top (causal at the top left), alibi (by head), alibi_b (by sequence)
    sinktok<n>, chunk<n>, softcap<x>, drop<p>, blocks<rows>x<cols>, with _b and _h: a map for each
    hrows<n>, hkeys<n>         n hidden intervals; with _b and _h, as above
    maxima                     nothing but the largest scores, which every call with modifiers asks for
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext import masks
from tests.cases import Case
from tests.layouts import guarded, strides_for, tensor_shapes

MAXIMA = "maxima"  # the part of a choice that is nothing of a call's own


@dataclass
class Choice:
    """One modifier of a call.

    part: of ``tests.values.values``, or a keyword of the public functions. tensor: its values where the call
    reads them, guarded; None for a number. argument: from that tensor, or a leaf that shares its memory, to
    what the part is given.
    meaning: from the same to fields of ``Modifiers``.
    """

    part: str
    tensor: Tensor | None
    argument: Callable[[Any], Any]
    meaning: Callable[[Any], dict[str, Any]]


class _Maker:
    """Makes the modifiers of one case."""

    def __init__(self, case: Case, device: str | torch.device):
        self.case = case
        self.device, self.guards = device, []
        shapes = tensor_shapes(case)
        lengths = list(case.sequences())
        self.packed, self.batch, self.heads = case.is_packed, len(lengths), case.num_heads
        self.rows, self.keys = (max((n[side] for n in lengths), default=0) for side in (0, 1))
        self.total_q, self.total_k = shapes["q"][-3], shapes["k"][-3]

    def make(self, name: str) -> Choice:
        seed = zlib.crc32(name.encode()) ^ self.case.seed
        self.random = torch.Generator().manual_seed(seed)
        kind, *flags = name.split("_")
        stem, number = re.fullmatch(r"([a-z]+)(.*)", kind).groups()
        return getattr(self, f"_{stem}")(number, flags)

    # ---- values ----

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def _chance(self, p: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random) < p

    def _whole(self, low: int, high: int, *shape: int) -> Tensor:
        """low..high, both included."""
        return torch.randint(low, max(low, high) + 1, shape, generator=self.random, dtype=torch.int32)

    def _place(self, values: Tensor, strides: tuple[int, ...] | None = None, lead: int = 0) -> Tensor:
        """``values`` where the call reads them, between guards that are noted."""
        tensor, buffer = guarded(values, self.device, strides, lead)
        self.guards.append((buffer, buffer.clone()))
        return tensor

    def _number(self, part: str, value: float | int, **meaning: Any) -> Choice:
        return Choice(part, None, lambda _: value, lambda _: meaning)

    # ---- by element ----

    def _sizes(self, dims: str, flags: list[str]) -> list[int]:
        rows, keys = self.rows, self.keys
        if "short" in flags:
            rows, keys = max(2, rows * 2 // 3), max(2, keys * 2 // 3)
        if "long" in flags:
            rows, keys = rows + 5, keys + 70
        sizes = {"1": 1, "b": self.batch, "h": self.heads, "q": rows, "k": keys}
        return [sizes[dim] for dim in dims]

    def _strides(self, shape: list[int], flags: list[str]) -> tuple[tuple[int, ...], int]:
        order = list(range(len(shape)))
        if "t" in flags:
            order[-2:] = order[-1], order[-2]
        gaps = [0] * len(shape)
        if "odd" in flags:
            gaps[-2] = 1 if shape[-1] % 2 == 0 else 2
        strides = strides_for(tuple(shape), tuple(order), tuple(gaps))
        if "skip" in flags:
            strides = tuple(2 * s for s in strides)
        return strides, 1 if "odd" in flags else 0

    def _by_element(self, values: Tensor, dims: str, flags: list[str]) -> tuple[Tensor, Callable]:
        tensor = self._place(values, *self._strides(list(values.shape), flags))
        full = self._sizes("bhqk"[4 - len(dims) :], flags)

        def argument(t: Tensor) -> Tensor:
            return t.expand(full) if "expanded" in flags else t

        return tensor, argument

    def _bias(self, _: str, flags: list[str]) -> Choice:
        dims = flags[0]
        values = self._normal(*self._sizes(dims, flags))
        if "inf" in flags:
            values[self._chance(0.3, *values.shape)] = -math.inf
            values[..., : values.shape[-1] // 2] = -math.inf
            values[..., : values.shape[-2] // 3, :] = -math.inf
        values = values.to(torch.float32 if "f32" in flags else self.case.torch_dtype)
        tensor, argument = self._by_element(values, dims, flags)
        return Choice("bias", tensor, argument, lambda t: {"bias": _four_dims(t)})

    def _mask(self, _: str, flags: list[str]) -> Choice:
        dims = flags[0]
        sizes = self._sizes(dims, flags)
        if "blocky" in flags:
            coarse = self._chance(0.5, *sizes[:-2], *(-(-n // 100) for n in sizes[-2:]))
            values = coarse.repeat_interleave(100, -2).repeat_interleave(100, -1)[
                ..., : sizes[-2], : sizes[-1]
            ]
        else:
            values = self._chance(0.7, *sizes)
        tensor, argument = self._by_element(values, dims, flags)
        return Choice("mask", tensor, argument, lambda t: {"mask": _four_dims(t)})

    def _distance(self, n: str, flags: list[str]) -> Choice:
        n, both = int(n), "before" not in flags
        values = self._normal(1 if "shared" in flags else self.heads, 2 * n + 1 if both else n + 1)
        if "inf" in flags:
            values[self._chance(0.33, *values.shape)] = -math.inf
        tensor = self._place(values.to(self.case.torch_dtype if "half" in flags else torch.float32))

        def argument(t: Tensor) -> masks.RelativePosition:
            return masks.RelativePosition(t, bucketing="clip", bidirectional=both)

        def meaning(t: Tensor) -> dict[str, Any]:
            return {"bias": (t if both else torch.cat([t, t[:, -1:].expand(-1, n)], 1))[None]}

        argument(tensor).by_distance()  # what it keeps for later calls is made before memory is counted
        return Choice("position", tensor, argument, meaning)

    # ---- structure ----

    def _padding(self, _: str, flags: list[str]) -> Choice:
        shape = (self.total_k,) if self.packed else (self.batch, self.keys)
        values = self._chance(0.75, *shape)
        if flags:
            lengths = [n for _, n in self.case.sequences()]
            # None of the first sequence is hidden, all of the second, and so on.
            hidden = [n * at // 4 for n, at in zip(lengths, itertools.cycle((0, 4, 1, 3)))]
            kept = [torch.arange(n) >= cut for n, cut in zip(lengths, hidden)]
            kept = [t.flip(0) for t in kept] if "right" in flags else kept
            values = torch.stack(kept) if kept and not self.packed else torch.cat([*kept, values[:0]])
            values = F.pad(values, (0, shape[-1] - values.shape[-1]))
        tensor = self._place(values)
        by_sequence = torch.zeros(self.batch, 1, 1, max(self.keys, 2), dtype=torch.bool, device=self.device)
        start = 0
        for b, (_, n) in enumerate(self.case.sequences()):
            by_sequence[b, 0, 0, :n] = tensor[start : start + n] if self.packed else tensor[b]
            start += n
        if not self.packed:
            by_sequence = by_sequence[..., : self.keys]
        return Choice("keys", tensor, lambda t: t, lambda _: {"mask": by_sequence})

    def _documents(self, *_: Any) -> Choice:
        """Two documents and a few keys of none, in order, for rows and keys in one tensor."""
        if self.packed:
            ids = [self._whole(0, 1, n).int() for n in (self.total_q, self.total_k)]
        else:
            ids = [self._whole(0, 1, self.batch, n).sort(1)[0].int() for n in (self.rows, self.keys)]
        ids[1][self._chance(0.05, *ids[1].shape)] = -1
        sizes = [t.numel() for t in ids]
        both = self._place(torch.cat([t.flatten() for t in ids]))
        document_q, document_k = (t.view(ids[i].shape) for i, t in enumerate(both.split(sizes)))
        meaning = {"document_q": document_q, "document_k": document_k}
        return Choice("documents", both, lambda _: (document_q, document_k), lambda _: meaning)

    def _prefix(self, *_: Any) -> Choice:
        tensor = self._place(self._whole(-2, self.keys // 2, self.batch))
        return Choice("prefix_lens", tensor, lambda t: t, lambda t: {"prefix_lens": t})

    def _sinktok(self, n: str, _: list[str]) -> Choice:
        return self._number("sink_tokens", int(n), sink_tokens=int(n))

    def _chunk(self, n: str, _: list[str]) -> Choice:
        return self._number("chunk", int(n), chunk=int(n))

    def _hrows(self, n: str, flags: list[str]) -> Choice:
        return self._intervals("hidden_rows", int(n), self.total_k, self.rows, flags)

    def _hkeys(self, n: str, flags: list[str]) -> Choice:
        return self._intervals("hidden_keys", int(n), self.total_q, self.keys, flags)

    def _intervals(self, part: str, n: int, places: int, limit: int, flags: list[str]) -> Choice:
        lead = [] if self.packed else [self.batch if "b" in flags else 1]
        lead.append(self.heads if "h" in flags else 1)
        if "h" not in flags:  # neighbours hide alike, so that whole tiles are hidden
            start = self._whole(0, limit, *lead, -(-places // 90), n).repeat_interleave(90, -2)
            start = start[..., :places, :] + self._whole(0, 3, *lead, places, n)
        else:
            start = self._whole(-3, limit, *lead, places, n)
        end = start + self._whole(0, limit // 3, *lead, places, n)
        tensor = self._place(torch.stack([start, end], -1).flatten(-2).int())
        return Choice(part, tensor, lambda t: t, lambda t: {part: t})

    def _blocks(self, size: str, flags: list[str]) -> Choice:
        rows, cols = map(int, size.split("x"))
        lead = [self.batch if "b" in flags else 1, self.heads if "h" in flags else 1]
        shape = [*lead, -(-self.rows // rows), -(-self.keys // cols)]
        tensor = self._place(self._chance(0.7, *shape), *self._strides(shape, flags))
        meaning = {"block_rows": rows, "block_cols": cols}
        return Choice("blocks", tensor, lambda t: masks.BlockMask(t, (rows, cols)),
                       lambda t: {"blocks": t, **meaning})  # fmt: skip

    # ---- scores, denominator, weights ----

    def _alibi(self, _: str, flags: list[str]) -> Choice:
        shape = (self.batch, self.heads) if "b" in flags else (self.heads,)
        tensor = self._place(self._normal(*shape).abs() * 0.1)
        return Choice("slopes", tensor, lambda t: t, lambda t: {"slopes": t})

    def _sinks(self, *_: Any) -> Choice:
        tensor = self._place(self._normal(self.heads) * 2)
        return Choice("sinks", tensor, lambda t: t, lambda t: {"sinks": t})

    def _softcap(self, x: str, _: list[str]) -> Choice:
        return self._number("softcap", float(x), softcap=float(x))

    def _drop(self, p: str, _: list[str]) -> Choice:
        return self._number("dropout_p", float(p), dropout_p=float(p))

    def _top(self, *_: Any) -> Choice:
        return self._number("top_left", True, top_left=True)

    def _maxima(self, *_: Any) -> Choice:
        return self._number(MAXIMA, True)


def reach_of(name: str) -> int:
    return int(name.removeprefix("distance").split("_")[0])


def _four_dims(t: Tensor) -> Tensor:
    return t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))


def make_choices(case: Case, device: str | torch.device) -> tuple[list[Choice], list[tuple[Tensor, Tensor]]]:
    """A choice for each modifier of a case, and the buffers of their tensors with snapshots."""
    maker = _Maker(case, device)
    choices = [maker.make(name) for name in case.mods]
    parts = [choice.part for choice in choices]
    if len(set(parts)) < len(parts):
        raise ValueError(f"{case}: two modifiers of one part")
    return choices, maker.guards
