"""What a test runs: the frozen ``Case``, the named lists of cases, and the seeded random generator.

A case holds plain numbers only, so that any failure can be repeated from one line of JSON
(``python -m tests.tools.fuzz --repro '...'``). Tensors are made from a case in ``inputs.py``; what must hold
for every case is in ``harness.py``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flash_ext._ops.spec import AttnSpec, default_scale
from tests.covering import covering_array

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

# How q, k and v (and, by ``dout_layout``, dout) lie in memory; inputs.py says what each means.
LAYOUTS = ("bshd", "bhsd", "sbhd", "gap", "odd", "offset", "packed", "expanded", "singleton")
# What the tensors hold; inputs.py says what each is for.
DATA_KINDS = ("normal", "outlier", "large", "biased", "rising", "falling", "peaked", "twins", "integer",
              "zero_q", "tiny", "nan_row", "inf_value")  # fmt: skip
# Requests that must be refused before anything is launched; refusals.py makes them.
INVALID_KINDS = ("heads_ratio", "kv_heads", "kv_length", "head_dim", "head_dim_wide", "dtype_mix",
                 "dtype_int", "window_low", "scale_nan", "scale_inf", "last_stride", "rank", "batch",
                 "path")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One attention problem with everything that can change how it is computed.

    Dense when ``lens_q`` is None: q (batch, seqlen_q, num_heads, head_dim). Packed otherwise: one sequence
    per entry of ``lens_q`` / ``lens_k``, then ``tail`` rows that belong to no sequence; ``batch``,
    ``seqlen_q`` and ``seqlen_k`` are then ignored.

    mods: names of what the call asks for beyond scale and window (``choices.py``). Without any the operators
    are called, with some the public functions.
    needs: with some, which inputs ask for a gradient, out of "qkv" and "mods" (biases, slopes and sinks).
    """

    dtype: str = "bf16"
    batch: int = 1
    seqlen_q: int = 128
    seqlen_k: int = 128
    num_heads: int = 2
    num_heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None  # None: as head_dim
    lens_q: tuple[int, ...] | None = None
    lens_k: tuple[int, ...] | None = None
    tail: int = 0
    hints: bool = False  # packed: pass max_seqlen_q and max_seqlen_k
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    layout: str = "bshd"
    dout_layout: str = "bshd"
    data: str = "normal"
    dlse: bool = False
    deterministic: bool = False
    backward: bool = True
    invalid: str = ""
    seed: int = 0
    mods: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("qkv", "mods")

    @property
    def is_packed(self) -> bool:
        return self.lens_q is not None

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def effective_scale(self) -> float:
        return default_scale(self.head_dim) if self.scale is None else self.scale

    @property
    def effective_window(self) -> tuple[int, int]:
        """(left, right) with ``causal`` folded in."""
        left, right = self.window
        return left, (0 if right < 0 else min(right, 0)) if self.causal else right

    @property
    def spec(self) -> AttnSpec:
        left, right = self.effective_window
        return AttnSpec(self.effective_scale, left, right)

    @property
    def has_top_left(self) -> bool:
        return "top" in self.mods

    @property
    def dropout_p(self) -> float:
        return next((float(name[4:]) for name in self.mods if name.startswith("drop")), 0.0)

    def sequences(self) -> Iterator[tuple[int, int]]:
        """(seqlen_q, seqlen_k) of every sequence."""
        if self.is_packed:
            yield from zip(self.lens_q, self.lens_k)
        else:
            for _ in range(self.batch):
                yield self.seqlen_q, self.seqlen_k

    @property
    def work(self) -> int:
        """Score elements over all heads: what a reference that materialises them has to hold."""
        return self.num_heads * sum(q * k for q, k in self.sequences())

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """The fields that differ from the defaults, modifiers first, as one line of JSON."""
        shown = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        names = {name: ",".join(shown.pop(name)) for name in ("mods", "needs") if name in shown}
        return json.dumps(names | shown, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Case:
        """The inverse of ``to_json``. Raises TypeError on an unknown field."""
        fields = json.loads(text)
        for name in ("lens_q", "lens_k", "window"):
            if fields.get(name) is not None:
                fields[name] = tuple(fields[name])
        for name in ("mods", "needs"):
            if name in fields:
                fields[name] = tuple(filter(None, fields[name].split(",")))
        return Case(**fields)

    def __str__(self) -> str:
        return self.to_json()


def packed(lens_q: list[int], lens_k: list[int], **fields: Any) -> Case:
    """A packed case from two lists of lengths."""
    if len(lens_q) != len(lens_k):
        raise ValueError(f"{len(lens_q)} query lengths but {len(lens_k)} key lengths")
    return Case(lens_q=tuple(lens_q), lens_k=tuple(lens_k), **fields)


def dense(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    head_dim: int,
    head_dim_v: int | None = None,
    **fields: Any,
) -> Case:
    """A dense case, from its numbers in the order in which lists write them."""
    return Case(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=num_heads,
                num_heads_k=num_heads_k, head_dim=head_dim, head_dim_v=head_dim_v, **fields)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Named lists

# Kernels are compiled for these head sizes; every other size runs in the next larger one with a zero tail.
COMPILED_HEAD_DIMS = (64, 96, 128, 192, 256)

HEAD_DIMS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 56, 59, 63, 64, 65, 72, 80, 88, 95, 96,
             97, 100, 104, 111, 112, 120, 127, 128, 129, 136, 144, 160, 176, 184, 192, 203, 208, 224, 240,
             248, 255, 256)  # fmt: skip

MASKS = ((False, (-1, -1)), (True, (-1, -1)), (False, (31, 0)), (False, (64, 64)), (False, (0, 1)),
         (False, (-1, 3)), (False, (3, -1)), (True, (127, 1)))  # fmt: skip

SEQLEN_PAIRS = ((1, 1), (1, 129), (5, 3), (17, 64), (63, 65), (64, 64), (65, 127), (113, 203), (128, 128),
                (128, 217), (129, 1), (200, 256), (257, 100), (300, 300))  # fmt: skip

GROUPS = ((1, 1), (4, 4), (4, 2), (6, 2), (8, 1))


def small_cases() -> list[Case]:
    """One case per compiled kernel: every head size, type, packing and mask that selects another instance."""
    cases = []
    for head_dim in COMPILED_HEAD_DIMS:
        for dtype in ("bf16", "fp16"):
            for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (40, 8))):
                common = dict(dtype=dtype, causal=causal, window=window, dlse=causal)
                cases.append(dense(2, 130, 150, 4, 2, head_dim, **common))
                cases.append(packed([3, 0, 130, 64], [70, 9, 129, 0], num_heads=4, num_heads_k=2,
                                    head_dim=head_dim, **common))  # fmt: skip
                # A head size below the compiled one takes the loads with a tail.
                cases.append(dense(1, 70, 90, 2, 1, head_dim - 9, deterministic=True, **common))
                # Several blocks of keys that add to one dq, in rows that TMA reads.
                cases.append(dense(1, 200, 300, 2, 1, head_dim - 8, deterministic=True, **common))
    return cases


def edge_cases() -> list[Case]:
    """Shapes at which kernels have broken: around tiles, empty, one row, more queries than keys."""
    cases = []
    for seqlen_q, seqlen_k in (
        (0, 5),
        (5, 0),
        (1, 1),
        (1, 2),
        (2, 1),
        (127, 129),
        (129, 127),
        (255, 257),
        (3, 300),
        (300, 3),
        (64, 65),
        (65, 64),
        (16, 1),
        (1, 1023),
    ):
        for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (5, 0)), (False, (0, 2))):
            cases.append(dense(2, seqlen_q, seqlen_k, 4, 2, 64, causal=causal, window=window))
    # The portable forward takes 32 keys of a last tile of 96 where no row sees more.
    for seqlen_k in (31, 32, 33, 127, 128, 129, 161, 224, 225):
        cases.append(dense(1, 140, seqlen_k, 2, 1, 64))
        cases.append(dense(1, seqlen_k + 7, seqlen_k, 2, 2, 40, causal=True, dtype="fp16"))
        cases.append(dense(1, 260, seqlen_k, 1, 1, 64, window=(50, 3)))
    for head_dim in (1, 8, 33, 72, 100, 160, 224):
        cases.append(dense(2, 77, 91, 3, 1, head_dim, causal=True))
    cases.append(dense(1, 40, 40, 4, 4, 192, 128))
    cases.append(dense(1, 40, 40, 4, 4, 64, 256))
    return cases


def few_query_cases() -> list[Case]:
    """Calls whose keys the host splits: both tiles of rows, every compiled size, masks, layouts, packing."""
    return [
        *(dense(2, 1, 4000, 8, 2, d, dtype=t) for d in (40, 64, 128, 192, 256) for t in ("bf16", "fp16")),
        *(dense(1, 5, 3000, 16, 2, d, causal=True) for d in (64, 96, 128, 256)),
        dense(1, 1, 20000, 8, 8, 128), dense(1, 1, 5000, 71, 1, 64),
        dense(3, 7, 2500, 6, 3, 128, 64, causal=True), dense(2, 4, 6000, 8, 2, 128, window=(2000, 0)),
        dense(2, 40, 5000, 8, 2, 128, window=(3000, 100)),
        dense(1, 100, 9000, 1, 1, 64, causal=True, dtype="fp16"),
        dense(1, 16, 1000, 4, 2, 100, causal=True, layout="odd"), dense(2, 3, 1100, 4, 1, 128, layout="bhsd"),
        dense(1, 2, 900, 4, 2, 64, scale=-0.3),
        packed([1] * 9, [3000, 1, 0, 700, 1500, 64, 65, 2999, 12], num_heads=8, num_heads_k=2, head_dim=128,
               causal=True),
        packed([1, 4, 0, 2], [900, 2000, 30, 1], num_heads=4, num_heads_k=1, tail=3, causal=True),
        packed([5, 1, 9], [1200, 1800, 700], num_heads=2, num_heads_k=1, head_dim=192, head_dim_v=128,
               window=(1000, 3)),
    ]  # fmt: skip


def big_cases() -> list[Case]:
    """Shapes that fill the GPU; still small enough for a full float64 reference."""
    return [
        dense(2, 2048, 2048, 4, 4, 128, causal=True), dense(2, 2048, 2048, 4, 2, 64, dtype="fp16"),
        dense(1, 4096, 4096, 2, 1, 128, causal=True, window=(1024, 0)),
        dense(1, 3000, 5000, 2, 2, 256, causal=True), dense(4, 1024, 1024, 6, 2, 96, dlse=True),
        dense(1, 2500, 2500, 3, 3, 192, dtype="fp16", causal=True),
        packed([2048, 1, 700, 0, 1500], [2048, 5, 900, 3, 1500], num_heads=4, num_heads_k=2, head_dim=128,
               causal=True),
        packed([600] * 6, [600] * 6, num_heads=4, num_heads_k=4, head_dim=64, dtype="fp16", tail=37,
               dlse=True), *crowded_cases(),
    ]  # fmt: skip


def crowded_cases() -> list[Case]:
    """More tiles than multiprocessors, those without anything to do among the others."""
    lens_q, lens_k = [200, 0, 150, 300, 0, 400, 90, 0, 64], [300, 400, 0, 100, 333, 20, 128, 200, 0]
    return [
        packed(
            lens_q,
            lens_k,
            num_heads=32,
            num_heads_k=32,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            window=window,
        )
        for head_dim, head_dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
        # The second leaves rows without keys, but no key to one row alone, whose dk nearly cancels.
        for window in ((-1, -1), (-1, 7))
    ]


# --------------------------------------------------------------------------------------------------
# Covering array: every combination of three factors appears in some case

FACTORS: dict[str, tuple] = {
    "seqlens": SEQLEN_PAIRS,
    "head_dims": ((8, None), (33, None), (64, None), (72, None), (96, None), (100, None), (128, None),
                  (160, None), (192, 128), (224, None), (256, None), (64, 128)),
    "mask": MASKS,
    "layout": ("bshd", "bhsd", "gap", "odd", "offset", "packed"),
    "heads": GROUPS,
    "packing": ("dense", "varlen", "varlen_tail"),
    "dtype": ("bf16", "fp16"),
    "deterministic": (False, True),
}  # fmt: skip


def covering_cases(strength: int, seed: int = 0) -> list[Case]:
    """Cases in which every ``strength`` levels of different ``FACTORS`` occur together at least once."""
    return [from_levels(level, index) for index, level in enumerate(levels_of(FACTORS, strength, seed))]


def levels_of(factors: dict[str, tuple], strength: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of a covering array, each with a level of every factor by name."""
    rows = covering_array([len(levels) for levels in factors.values()], strength, seed)
    return [{name: levels[at] for (name, levels), at in zip(factors.items(), row)} for row in rows]


def from_levels(level: dict[str, Any], index: int) -> Case:
    """The case of one row; what else can change goes round with ``index``."""
    seqlen_q, seqlen_k = level["seqlens"]
    causal, window = level["mask"]
    head_dim, head_dim_v = level["head_dims"]
    num_heads, num_heads_k = level["heads"]
    fields = dict(dtype=level["dtype"], num_heads=num_heads, num_heads_k=num_heads_k, head_dim=head_dim,
                  head_dim_v=head_dim_v, causal=causal, window=window, layout=level["layout"],
                  deterministic=level["deterministic"], dlse=index % 3 == 0, seed=index)  # fmt: skip
    if level["packing"] == "dense":
        return Case(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **fields)
    # A short sequence, an empty one and the pair itself: three different offsets into the packed rows.
    return packed(
        [7, 0, seqlen_q],
        [11, 5, seqlen_k],
        tail=9 if level["packing"] == "varlen_tail" else 0,
        hints=index % 2 == 0,
        **fields,
    )


# --------------------------------------------------------------------------------------------------
# Random cases

_TILES = (16, 32, 64, 80, 96, 112, 128, 192, 256)
_PRIMES = (3, 5, 7, 11, 13, 37, 61, 67, 97, 131, 191, 211, 257, 307, 383, 509)
_PRIME_HEAD_DIMS = (3, 5, 7, 13, 31, 37, 59, 61, 67, 71, 97, 101, 103, 127, 131, 193, 211, 251)


def _random_length(rng: random.Random, limit: int) -> int:
    """A length up to ``limit``, mostly where kernels break: 0, 1, 2, primes, near tiles and powers of two."""
    kind = rng.random()
    if kind < 0.12:
        length = rng.choice((0, 1, 1, 2))
    elif kind < 0.50:
        length = rng.choice(_TILES) + rng.choice((-1, 0, 1))
    elif kind < 0.65:
        length = 2 ** rng.randint(1, 9) + rng.choice((-1, 0, 1))
    elif kind < 0.80:
        length = rng.choice(_PRIMES)
    else:
        length = rng.randint(1, limit)
    return min(length, limit)


def _random_head_dim(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(COMPILED_HEAD_DIMS)
    if kind < 0.65:
        return min(256, max(1, rng.choice(COMPILED_HEAD_DIMS) + rng.choice((-8, -1, 1, 8))))
    if kind < 0.80:
        return rng.choice(_PRIME_HEAD_DIMS)
    return rng.randint(1, 256)


def _random_window(rng: random.Random, seqlen_k: int) -> tuple[int, int]:
    if rng.random() < 0.55:
        return -1, -1
    edges = (-1, 0, 1, 2, 31, 63, 64, 65, 127, 128, seqlen_k, 2**31 - 1, 2**31 - 1 - seqlen_k)
    return rng.choice(edges), rng.choice(edges)


def random_case(rng: random.Random, limit: int = 384, max_work: int = 3_000_000) -> Case:
    """One case drawn with the biases that find kernel bugs: odd sizes, layouts, data and requests.

    Args:
        rng: source of every choice; the same state gives the same case.
        limit: longest sequence.
        max_work: most score elements (heads * sum of seqlen_q * seqlen_k); heads and batch shrink to fit.
    """
    dtype = rng.choice(("bf16", "fp16"))
    head_dim = _random_head_dim(rng)
    head_dim_v = _random_head_dim(rng) if rng.random() < 0.15 else None
    num_heads_k = rng.choice((1, 1, 2, 3))
    num_heads = num_heads_k * rng.choice((1, 1, 2, 3, 4, 5, 7, 8))
    causal = rng.random() < 0.5
    scale = rng.choice((None,) * 8 + (0.0, -1.0 / math.sqrt(head_dim), 1e-3, 0.5))
    kind = rng.random()
    data = (
        rng.choice(("nan_row", "inf_value"))
        if kind < 0.10
        else rng.choice(("integer", "zero_q"))
        if kind < 0.25
        else rng.choice(("outlier", "large", "biased", "rising", "falling", "peaked", "twins", "tiny"))
        if kind < 0.45
        else "normal"
    )
    kind = rng.random()
    layout = (
        rng.choice(("offset", "odd"))
        if kind < 0.10
        else rng.choice(("bhsd", "sbhd", "gap", "packed", "expanded", "singleton"))
        if kind < 0.35
        else "bshd"
    )
    if data == "inf_value":  # forward only: its gradients are NaN almost everywhere
        scale = None
        layout = "bshd" if layout == "expanded" else layout  # which would repeat the infinite entry
    invalid = rng.choice(INVALID_KINDS) if rng.random() < 0.05 else ""
    if invalid == "last_stride" and head_dim == 1:  # the stride of a single element does not matter
        invalid = "path"
    fields = dict(dtype=dtype, num_heads=num_heads, num_heads_k=num_heads_k, head_dim=head_dim,
                  head_dim_v=head_dim_v, causal=causal, scale=scale, data=data, layout=layout,
                  dout_layout=rng.choice(("bshd", "bshd", "bshd", "bhsd", "gap", "odd", "expanded")),
                  dlse=rng.random() < 0.3, deterministic=rng.random() < 0.5,
                  backward=rng.random() < 0.85 and data != "inf_value", invalid=invalid,
                  seed=rng.randrange(2**31))  # fmt: skip
    if rng.random() < 0.4:
        count = rng.choice((1, 2, 3, 5, 9, 40))
        cap = max(8, limit * 3 // (count + 2))
        lens_q = [0 if rng.random() < 0.1 else _random_length(rng, cap) for _ in range(count)]
        lens_k = [
            n if rng.random() < 0.4 else 0 if rng.random() < 0.1 else _random_length(rng, cap) for n in lens_q
        ]
        case = packed(lens_q, lens_k, tail=rng.choice((0, 0, 0, 1, 50)), hints=rng.random() < 0.5,
                      window=_random_window(rng, max(lens_k)), **fields)  # fmt: skip
    else:
        seqlen_q = _random_length(rng, limit)
        seqlen_k = seqlen_q if rng.random() < 0.4 else _random_length(rng, limit)
        case = Case(
            batch=rng.choice((1, 1, 2, 3, 5)),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            window=_random_window(rng, seqlen_k),
            **fields,
        )
    return _shrink_to(case, max_work)


def _shrink_to(case: Case, max_work: int) -> Case:
    if case.work > max_work and not case.is_packed:
        case = case.replace(batch=1)
    if case.work > max_work:
        case = case.replace(num_heads=case.num_heads // case.num_heads_k, num_heads_k=1)
    if case.work > max_work:
        case = case.replace(num_heads=1)
    return case


def random_cases(seed: int, count: int, **limits: int) -> list[Case]:
    """``count`` random cases of one seed."""
    rng = random.Random(seed)
    return [random_case(rng, **limits) for _ in range(count)]
