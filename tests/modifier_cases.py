"""Cases with modifiers: a plain ``Case`` and the names of what its call asks for beyond scale and window.

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
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._ops.modifiers import Modifiers
from tests.cases import Case, packed
from tests.covering import covering_array
from tests.inputs import GUARD_BYTES, POISON_BYTE, Inputs, make_inputs, strides_for, tensor_shapes
from tests.values import call_keywords


@dataclass(frozen=True)
class ModifierCase:
    """A plain case and its modifiers.

    needs: which inputs ask for a gradient, out of "qkv" and "mods" (biases, slopes and sinks).
    """

    PROGRAM: ClassVar[str] = "tests.modifier_harness"  # repeats one with --repro

    case: Case = Case()
    mods: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("qkv", "mods")

    def to_json(self) -> str:
        plain = self.case.to_json()[1:-1]
        needs = "" if self.needs == ("qkv", "mods") else f'"needs":"{self.needs[0]}"'
        parts = [f'"mods":"{",".join(self.mods)}"', needs, plain]
        return "{" + ",".join(part for part in parts if part) + "}"

    @staticmethod
    def from_json(text: str) -> ModifierCase:
        """The inverse of ``to_json``. Raises TypeError on an unknown field."""
        fields = json.loads(text)
        mods = tuple(filter(None, fields.pop("mods", "").split(",")))
        needs = fields.pop("needs", None)
        case = Case.from_json(json.dumps(fields))
        return ModifierCase(case, mods, (needs,) if needs else ("qkv", "mods"))

    def replace(self, **changes: Any) -> ModifierCase:
        """With other fields of the plain case."""
        return dataclasses.replace(self, case=self.case.replace(**changes))

    def __str__(self) -> str:
        return self.to_json()

    @property
    def has_top_left(self) -> bool:
        return "top" in self.mods

    @property
    def dropout_p(self) -> float:
        return next((float(name[4:]) for name in self.mods if name.startswith("drop")), 0.0)


@dataclass
class _Choice:
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


@dataclass
class ModifierInputs:
    """What one call gets, and what it means.

    plain: q, k, v, dout, dlse, cu_seqlens. choices: by name. guards: buffers with their snapshots.
    workspaces: bytes of the latest launch of each direction, none before one was seen.
    """

    mcase: ModifierCase
    plain: Inputs
    choices: list[_Choice]
    guards: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    workspaces: dict[str, int] = field(default_factory=dict)

    def unchanged(self) -> bool:
        return self.plain.unchanged() and all(torch.equal(a, b) for a, b in self.guards)

    @property
    def generator(self) -> torch.Generator:
        """Dropout's source, at its start."""
        return torch.Generator(self.plain.q.device).manual_seed(self.mcase.case.seed + 77)

    def leaves(self) -> dict[str, Tensor]:
        """What can have a gradient beside q, k and v: part to a leaf that shares the memory."""
        return {
            c.part: c.tensor.detach()
            for c in self.choices
            if c.part in ("bias", "position", "slopes", "sinks")
        }

    def entries(self, rows: int, keys: int) -> Tensor:
        """(rows, keys) int64: which entry of the table of ``distance<n>`` each pair of a sequence reads."""
        (name,) = (name for name in self.mcase.mods if name.startswith("distance"))
        n = _reach(name)
        position = torch.arange(rows)[:, None] + (0 if self.mcase.has_top_left else keys - rows)
        distance = (torch.arange(keys) - position).clamp(-n, 0 if "before" in name else n)
        return (n + distance).to(self.plain.q.device)

    def keywords(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """Of the public function: masks, biases, and all others of the choices."""
        case = self.mcase.case
        parts = {c.part: c.argument(leaves.get(c.part, c.tensor)) for c in self.choices}
        found = {name: parts.pop(name) for name in ("sinks", "softcap", "dropout_p") if name in parts}
        if "dropout_p" in found:
            found["generator"] = self.generator
        return found | call_keywords(causal=case.causal, window=case.window, **parts)

    @property
    def asked(self) -> set[str]:
        """The parts of the choices that can matter: sink tokens and prefixes show what a band hides."""
        case, parts = self.mcase.case, {c.part for c in self.choices}
        if case.window[0] < 0 and "chunk" not in parts:
            parts -= {"sink_tokens"}
        if "chunk" not in parts and not case.causal and case.window == (-1, -1):
            parts -= {"prefix_lens"}
        return parts

    def meaning(self, leaves: dict[str, Tensor]) -> Modifiers:
        """Of the oracle. Masks of several choices are ANDed."""
        fields: dict[str, Any] = {}
        for choice in self.choices:
            for name, value in choice.meaning(leaves.get(choice.part, choice.tensor)).items():
                fields[name] = self._both(fields[name], value) if name == "mask" and name in fields else value
        if "dropout_p" in fields:
            fields["rng"] = flash_ext.dropout_rng(self.plain.q.device, self.generator)
        return Modifiers(**fields)

    def _both(self, a: Tensor, b: Tensor) -> Tensor:
        """a AND b; beyond the end of a packed one everything is hidden."""
        sizes = [max(a.shape[dim], b.shape[dim]) for dim in (2, 3)]

        def full(t: Tensor) -> Tensor:
            missing = [0 if t.shape[dim] == 1 else size - t.shape[dim] for dim, size in zip((2, 3), sizes)]
            return F.pad(t, (0, missing[1], 0, missing[0]))

        return full(a) & full(b)


class _Maker:
    """Makes the modifiers of one case."""

    def __init__(self, mcase: ModifierCase, device: str | torch.device):
        case = self.case = mcase.case
        self.device, self.guards = device, []
        shapes = tensor_shapes(case)
        lengths = list(case.sequences())
        self.packed, self.batch, self.heads = case.is_packed, len(lengths), case.num_heads
        self.rows, self.keys = (max((n[side] for n in lengths), default=0) for side in (0, 1))
        self.total_q, self.total_k = shapes["q"][-3], shapes["k"][-3]

    def make(self, name: str) -> _Choice:
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
        """``values`` on the device with these strides, poison before, behind and between them."""
        strides = values.contiguous().stride() if strides is None else strides
        numel = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides)) if values.numel() else 0
        size = (numel + lead) * values.dtype.itemsize
        total = (2 * GUARD_BYTES + size + 15) // 16 * 16
        buffer = torch.full((total,), POISON_BYTE, dtype=torch.uint8, device=self.device)
        whole = buffer[GUARD_BYTES : GUARD_BYTES + size].view(values.dtype)
        view = whole.as_strided(values.shape, strides, whole.storage_offset() + lead)
        view.copy_(values)
        self.guards.append((buffer, buffer.clone()))
        return view

    def _number(self, part: str, value: float | int, **meaning: Any) -> _Choice:
        return _Choice(part, None, lambda _: value, lambda _: meaning)

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

    def _bias(self, _: str, flags: list[str]) -> _Choice:
        dims = flags[0]
        values = self._normal(*self._sizes(dims, flags))
        if "inf" in flags:
            values[self._chance(0.3, *values.shape)] = -math.inf
            values[..., : values.shape[-1] // 2] = -math.inf
            values[..., : values.shape[-2] // 3, :] = -math.inf
        values = values.to(torch.float32 if "f32" in flags else self.case.torch_dtype)
        tensor, argument = self._by_element(values, dims, flags)
        return _Choice("bias", tensor, argument, lambda t: {"bias": _four_dims(t)})

    def _mask(self, _: str, flags: list[str]) -> _Choice:
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
        return _Choice("mask", tensor, argument, lambda t: {"mask": _four_dims(t)})

    def _distance(self, n: str, flags: list[str]) -> _Choice:
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
        return _Choice("position", tensor, argument, meaning)

    # ---- structure ----

    def _padding(self, _: str, flags: list[str]) -> _Choice:
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
        return _Choice("keys", tensor, lambda t: t, lambda _: {"mask": by_sequence})

    def _documents(self, *_: Any) -> _Choice:
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
        return _Choice("documents", both, lambda _: (document_q, document_k), lambda _: meaning)

    def _prefix(self, *_: Any) -> _Choice:
        tensor = self._place(self._whole(-2, self.keys // 2, self.batch))
        return _Choice("prefix_lens", tensor, lambda t: t, lambda t: {"prefix_lens": t})

    def _sinktok(self, n: str, _: list[str]) -> _Choice:
        return self._number("sink_tokens", int(n), sink_tokens=int(n))

    def _chunk(self, n: str, _: list[str]) -> _Choice:
        return self._number("chunk", int(n), chunk=int(n))

    def _hrows(self, n: str, flags: list[str]) -> _Choice:
        return self._intervals("hidden_rows", int(n), self.total_k, self.rows, flags)

    def _hkeys(self, n: str, flags: list[str]) -> _Choice:
        return self._intervals("hidden_keys", int(n), self.total_q, self.keys, flags)

    def _intervals(self, part: str, n: int, places: int, limit: int, flags: list[str]) -> _Choice:
        lead = [] if self.packed else [self.batch if "b" in flags else 1]
        lead.append(self.heads if "h" in flags else 1)
        if "h" not in flags:  # neighbours hide alike, so that whole tiles are hidden
            start = self._whole(0, limit, *lead, -(-places // 90), n).repeat_interleave(90, -2)
            start = start[..., :places, :] + self._whole(0, 3, *lead, places, n)
        else:
            start = self._whole(-3, limit, *lead, places, n)
        end = start + self._whole(0, limit // 3, *lead, places, n)
        tensor = self._place(torch.stack([start, end], -1).flatten(-2).int())
        return _Choice(part, tensor, lambda t: t, lambda t: {part: t})

    def _blocks(self, size: str, flags: list[str]) -> _Choice:
        rows, cols = map(int, size.split("x"))
        lead = [self.batch if "b" in flags else 1, self.heads if "h" in flags else 1]
        shape = [*lead, -(-self.rows // rows), -(-self.keys // cols)]
        tensor = self._place(self._chance(0.7, *shape), *self._strides(shape, flags))
        meaning = {"block_rows": rows, "block_cols": cols}
        return _Choice("blocks", tensor, lambda t: masks.BlockMask(t, (rows, cols)),
                       lambda t: {"blocks": t, **meaning})  # fmt: skip

    # ---- scores, denominator, weights ----

    def _alibi(self, _: str, flags: list[str]) -> _Choice:
        shape = (self.batch, self.heads) if "b" in flags else (self.heads,)
        tensor = self._place(self._normal(*shape).abs() * 0.1)
        return _Choice("slopes", tensor, lambda t: t, lambda t: {"slopes": t})

    def _sinks(self, *_: Any) -> _Choice:
        tensor = self._place(self._normal(self.heads) * 2)
        return _Choice("sinks", tensor, lambda t: t, lambda t: {"sinks": t})

    def _softcap(self, x: str, _: list[str]) -> _Choice:
        return self._number("softcap", float(x), softcap=float(x))

    def _drop(self, p: str, _: list[str]) -> _Choice:
        return self._number("dropout_p", float(p), dropout_p=float(p))

    def _top(self, *_: Any) -> _Choice:
        return self._number("top_left", True, top_left=True)


def _reach(name: str) -> int:
    return int(name.removeprefix("distance").split("_")[0])


def _four_dims(t: Tensor) -> Tensor:
    return t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))


def make_modifier_inputs(mcase: ModifierCase, device: str | torch.device) -> ModifierInputs:
    """The tensors of a case; the same case gives the same modifiers on every device."""
    maker = _Maker(mcase, device)
    choices = [maker.make(name) for name in mcase.mods]
    slots = [choice.part for choice in choices]
    if len(set(slots)) < len(slots):
        raise ValueError(f"{mcase}: two modifiers of one part")
    return ModifierInputs(mcase, make_inputs(mcase.case, device), choices, maker.guards)


# --------------------------------------------------------------------------------------------------
# Named lists

BIASES = (
    "bias_bhqk", "bias_1hqk", "bias_qk_f32", "bias_b11k", "bias_bh1k_f32", "bias_bhq1", "bias_11qk_odd",
    "bias_1hqk_t", "bias_b1qk_skip_f32", "bias_hqk_inf", "bias_1hqk_inf_f32", "bias_h11_expanded",
    "bias_b1qk_expanded_f32", "bias_bhqk_short", "bias_11qk_f32_long",
)  # fmt: skip
DISTANCES = (
    "distance0", "distance20", "distance128", "distance9_before", "distance100_before_half",
    "distance30_shared", "distance300_half", "distance60_inf",
)  # fmt: skip
MASKS = (
    "mask_b1qk", "mask_bhqk", "mask_b11k", "mask_1hq1", "mask_qk_odd", "mask_1hqk_t", "mask_b1qk_skip",
    "mask_h1k_expanded", "mask_bhqk_blocky", "mask_11qk_blocky_t", "mask_b1qk_short", "mask_1hqk_long",
)  # fmt: skip
STRUCTURE = (
    "padding", "padding_left", "padding_right", "documents", "prefix", "sinktok1", "sinktok40", "chunk7",
    "chunk100", "hrows1", "hrows2_bh", "hkeys1_h", "hkeys2_b", "blocks16x16_h", "blocks64x128_bh",
    "blocks48x16_b_t", "blocks128x64", "top",
)  # fmt: skip
SCORES = (
    "alibi", "alibi_b", "sinks", "softcap0.5", "softcap30", "softcap1000", "drop0.1", "drop0.5", "drop0.9",
)  # fmt: skip
ALL_MODIFIERS = BIASES + DISTANCES + MASKS + STRUCTURE + SCORES

LENGTHS = ((130, 150), (200, 256), (65, 300), (257, 100), (1, 129), (64, 64), (300, 300))
# For the CPU path, whose tiles have 128 rows and 256 keys.
FEW_TILES = ((30, 45), (50, 64), (20, 140), (140, 60), (1, 129), (32, 32), (60, 270))
_SHAPES: dict[str, tuple] = {
    "head_dims": ((64, None), (40, None), (96, None), (128, None), (192, 128), (256, None), (64, 72)),
    "mask": ((False, (-1, -1)), (True, (-1, -1)), (False, (40, 9)), (True, (70, -1))),
    "heads": ((2, 2), (4, 2), (3, 1), (8, 1)),
    "packing": ("dense", "varlen", "varlen_tail"),
    "dtype": ("bf16", "fp16"),
    "deterministic": (False, True),
    "layout": ("bshd", "bhsd", "gap", "odd", "offset", "packed"),
}

# Levels of the pairwise array; "" is off, and stands twice where a modifier hides much.
_PAIRED: dict[str, tuple[str, ...]] = {
    "bias": (
        "", "", "bias_bhqk", "bias_qk_f32", "bias_bh1k", "bias_1hq1_f32", "bias_1hqk_t", "bias_11qk_odd",
        "bias_hqk_inf", "distance25", "distance150_before_half",
    ), "dense mask": ("", "", "mask_b1qk", "mask_1hqk_t", "mask_bhqk_blocky", "mask_h1k_expanded"),
    "padding": ("", "padding", "padding_left"), "documents": ("", "", "documents"), "prefix": ("", "prefix"),
    "sink tokens": ("", "sinktok5", "sinktok40"), "chunk": ("", "", "chunk32", "chunk100"),
    "hidden rows": ("", "", "hrows1", "hrows2_bh"), "hidden keys": ("", "", "hkeys1_h", "hkeys2"),
    "blocks": ("", "", "blocks16x16_h", "blocks48x16_b", "blocks64x128", "blocks128x64_bh_t"),
    "slopes": ("", "alibi", "alibi_b"), "sinks": ("", "sinks"), "softcap": ("", "softcap1", "softcap30"),
    "dropout": ("", "drop0.1", "drop0.9"), "alignment": ("", "", "top"),
}  # fmt: skip


def single_cases(lengths: tuple = LENGTHS) -> list[ModifierCase]:
    """Each modifier alone, with every length, head size, mask, group, packing, type and mode once."""
    factors = {"modifier": ALL_MODIFIERS, "seqlens": lengths, **_SHAPES}
    return [_from_levels(level, [level["modifier"]], index) for index, level in _levels(factors)]


def paired_cases(lengths: tuple = LENGTHS) -> list[ModifierCase]:
    """Every two levels of all modifiers and shapes together at least once."""
    factors = {**_PAIRED, "seqlens": lengths, **_SHAPES}
    return [
        _from_levels(level, [level[name] for name in _PAIRED], index) for index, level in _levels(factors)
    ]


def _levels(factors: dict[str, tuple]) -> list[tuple[int, dict[str, Any]]]:
    rows = covering_array([len(levels) for levels in factors.values()], 2)
    return [
        (index, {name: levels[at] for (name, levels), at in zip(factors.items(), row)})
        for index, row in enumerate(rows)
    ]


def _from_levels(level: dict[str, Any], mods: list[str], index: int) -> ModifierCase:
    seqlen_q, seqlen_k = level["seqlens"]
    (causal, window), (num_heads, num_heads_k) = level["mask"], level["heads"]
    head_dim, head_dim_v = level["head_dims"]
    mods = [name for name in mods if name]
    common = dict(
        dtype=level["dtype"], num_heads=num_heads, num_heads_k=num_heads_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal or "top" in mods, window=window, dlse=index % 3 == 0,
        deterministic=level["deterministic"], layout=level["layout"], seed=index,
    )  # fmt: skip
    needs = ("mods",) if index % 5 == 4 and any(_has_gradient(name) for name in mods) else ("qkv", "mods")
    if level["packing"] == "dense":  # where nothing can end early or late
        mods = [name.removesuffix("_short").removesuffix("_long") for name in mods]
        case = Case(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **common)
    else:
        case = packed(
            [7, 0, seqlen_q],
            [11, 5, seqlen_k],
            tail=9 if level["packing"] == "varlen_tail" else 0,
            hints=index % 2 == 0,
            **common,
        )
    return ModifierCase(case, tuple(mods), needs)


def _has_gradient(name: str) -> bool:
    return name.startswith(("bias", "distance", "alibi", "sinks"))
