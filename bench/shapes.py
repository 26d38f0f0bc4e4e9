"""Named attention problems and the arithmetic and traffic each one costs.

No torch in here: the formulas are plain integers, so a report can be rebuilt on any machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import random
from dataclasses import dataclass

from bench import models

# Three ways to time a case. "both" is a forward that keeps what its backward needs, then that backward.
DIRECTIONS = ("fwd", "bwd", "both")


@dataclass(frozen=True)
class Case:
    """One attention problem.

    Attributes:
        name: unique name, as ``--cases`` and ``bench/profile.sh`` take it.
        batch: number of sequences.
        seqlen_q: queries per sequence; for packed cases the longest one.
        seqlen_k: keys per sequence; for packed cases the longest one.
        num_heads: query heads.
        num_heads_k: key and value heads; divides ``num_heads``.
        head_dim: feature size of q and k.
        head_dim_v: feature size of v and out.
        causal: bottom-right aligned causal mask.
        window: inclusive reach (left, right) in keys, -1 unlimited.
        lengths: packed sequence lengths, queries and keys alike; empty for a dense case.
        deterministic: asks for a bitwise repeatable backward.
        feature: what a row of the set ``features`` asks for beyond causal and window, a name of
            ``bench.features.FEATURES``; empty elsewhere.
        model: in the set ``models`` whose call it is, in words; empty elsewhere.
        asks: what such a row asks for beyond causal and window, names of ``bench.asks.ASKS``.
        inference: nothing is trained, so there is no backward to time.
    """

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    lengths: tuple[int, ...] = ()
    deterministic: bool = False
    feature: str = ""
    model: str = ""
    asks: tuple[str, ...] = ()
    inference: bool = False

    @property
    def packed(self) -> bool:
        """True when the sequences lie end to end without padding."""
        return bool(self.lengths)

    @property
    def total_q(self) -> int:
        """Query rows over all sequences."""
        return sum(self.lengths) if self.packed else self.batch * self.seqlen_q

    @property
    def total_k(self) -> int:
        """Key rows over all sequences."""
        return sum(self.lengths) if self.packed else self.batch * self.seqlen_k

    @property
    def masked(self) -> bool:
        """True when some query may not see some key of its own sequence."""
        return self.causal or self.window != (-1, -1)

    @property
    def directions(self) -> tuple[str, ...]:
        """The ways in which it makes sense to time the case."""
        return ("fwd",) if self.inference else DIRECTIONS

    @property
    def mask_label(self) -> str:
        """What a panel or a table calls the mask, e.g. ``causal`` or ``window 1024,0``."""
        if self.window != (-1, -1):
            left, right = self.window
            return f"{'causal ' if self.causal else ''}window {left},{right}"
        return "causal" if self.causal else "full"

    @property
    def panel(self) -> tuple:
        """What two cases share that differ only in sequence length at a constant number of tokens."""
        return (
            self.head_dim,
            self.head_dim_v,
            self.mask_label,
            self.num_heads,
            self.num_heads_k,
            self.total_q,
            self.packed,
            self.deterministic,
            self.inference,
        )


def visible_pairs(case: Case) -> int | float:
    """(query, key) pairs that are scored, per head, over all sequences.

    A causal square counts as half of the full square, diagonal included, as every published attention
    table does; every other mask counts its visible pairs exactly.
    """
    lengths = [(n, n) for n in case.lengths] or [(case.seqlen_q, case.seqlen_k)] * case.batch
    return sum(_pairs_of_sequence(sq, sk, case.causal, case.window) for sq, sk in lengths)


@functools.cache
def _pairs_of_sequence(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> int | float:
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return seqlen_q * seqlen_k
    if left < 0 and right == 0 and seqlen_q == seqlen_k:
        return seqlen_q * seqlen_k / 2
    pairs = 0
    for row in range(seqlen_q):
        aligned = row + seqlen_k - seqlen_q
        first = 0 if left < 0 else max(0, aligned - left)
        last = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, aligned + right)
        pairs += max(0, last - first + 1)
    return pairs


def flops(case: Case, direction: str, pairs: float | None = None) -> float:
    """Floating-point operations of the matrix products, a multiply-add counting as two.

    Forward: QK^T over head_dim and PV over head_dim_v. Backward: QK^T again, dS K and dS^T Q over head_dim,
    dO V^T and P^T dO over head_dim_v, so 2.5 times the forward where both are equal. Softmax is not counted.

    Args:
        pairs: (query, key) pairs that are scored, over all heads and sequences; None for those of the case's
            causal mask and window.
    """
    pairs = visible_pairs(case) * case.num_heads if pairs is None else pairs
    forward = 2.0 * pairs * (case.head_dim + case.head_dim_v)
    backward = 2.0 * pairs * (3 * case.head_dim + 2 * case.head_dim_v)
    return {"fwd": forward, "bwd": backward, "both": forward + backward}[direction]


def output_bytes(case: Case, direction: str, itemsize: int) -> int:
    """Bytes of what a call returns: out and the fp32 lse, or dq, dk and dv, or all five.

    Args:
        itemsize: bytes of one element of q, k and v.
    """
    out = case.total_q * case.num_heads * case.head_dim_v * itemsize
    lse = case.total_q * case.num_heads * 4
    grads = (
        case.total_q * case.num_heads * case.head_dim
        + case.total_k * case.num_heads_k * (case.head_dim + case.head_dim_v)
    ) * itemsize
    return {"fwd": out + lse, "bwd": grads, "both": out + lse + grads}[direction]


def traffic_bytes(case: Case, direction: str, itemsize: int) -> int:
    """Least device memory traffic of a call, bytes: each input read once, each output written once."""
    inputs = (
        case.total_q * case.num_heads * case.head_dim
        + case.total_k * case.num_heads_k * (case.head_dim + case.head_dim_v)
    ) * itemsize
    out = case.total_q * case.num_heads * case.head_dim_v * itemsize
    lse = case.total_q * case.num_heads * 4
    forward = inputs + out + lse
    backward = inputs + 2 * out + lse + output_bytes(case, "bwd", itemsize)  # out and dout are both read
    return {"fwd": forward, "bwd": backward, "both": forward + backward}[direction]


def _dense(
    name: str,
    batch: int,
    seqlen_q: int,
    num_heads: int,
    head_dim: int,
    *,
    seqlen_k: int = 0,
    num_heads_k: int = 0,
    head_dim_v: int = 0,
    **options,
) -> Case:
    return Case(
        name,
        batch,
        seqlen_q,
        seqlen_k or seqlen_q,
        num_heads,
        num_heads_k or num_heads,
        head_dim,
        head_dim_v or head_dim,
        **options,
    )


def _packed(
    name: str, lengths: tuple[int, ...], num_heads: int, head_dim: int, *, num_heads_k: int = 0, **options
) -> Case:
    return Case(
        name,
        len(lengths),
        max(lengths),
        max(lengths),
        num_heads,
        num_heads_k or num_heads,
        head_dim,
        head_dim,
        lengths=lengths,
        **options,
    )


def long_tailed(documents: int, tokens: int) -> tuple[int, ...]:
    """Lengths of packed documents, ``tokens`` together: a few long ones among many short ones, in no order.

    The n-th longest is an n-th of the longest; of 64 documents six hold half of the tokens.
    """
    weights = [1 / rank for rank in range(1, documents + 1)]
    ends = [round(tokens * sum(weights[:n]) / sum(weights)) for n in range(documents + 1)]
    lengths = [last - first for first, last in zip(ends, ends[1:])]
    # An odd step visits each of them once where their number is a power of two.
    return tuple(lengths[37 * i % documents] for i in range(documents))


def _constant_work(
    prefix: str, tokens: int, width: int, head_dims: tuple[int, ...], seqlens: tuple[int, ...], **options
) -> list[Case]:
    """So many tokens and such a model width, whatever the head_dim and the sequence length."""
    return [
        _dense(
            f"{prefix}d{head_dim}-{'causal' if causal else 'full'}-s{seqlen}",
            tokens // seqlen,
            seqlen,
            width // head_dim,
            head_dim,
            causal=causal,
            **options,
        )
        for head_dim in head_dims
        for causal in (False, True)
        for seqlen in seqlens
    ]


def _around() -> list[Case]:
    """Single changes to batch 4, 16 heads, 4096 tokens, head_dim 128, and decoding over a long cache."""
    cases = []
    for head_dim, head_dim_v in ((96, 96), (128, 128), (192, 128), (192, 192)):
        for causal in (False, True):
            cases.append(
                _dense(
                    f"b4-d{head_dim}-dv{head_dim_v}-{'causal' if causal else 'full'}",
                    4,
                    4096,
                    16,
                    head_dim,
                    head_dim_v=head_dim_v,
                    causal=causal,
                )
            )
    cases.append(_packed("docs-8x2048-causal", (2048,) * 8, 16, 128, causal=True))
    cases.append(_packed("docs-64-long-tailed-causal", long_tailed(64, 16384), 16, 128, causal=True))
    cases.append(_dense("window-1024-s16384", 1, 16384, 16, 128, causal=True, window=(1024, 0)))
    cases.append(_dense("gqa-32-8-causal-s4096", 4, 4096, 32, 128, num_heads_k=8, causal=True))
    for batch, seqlen_k in (
        (1, 8192),
        (1, 131072),
        (16, 8192),
        (16, 32768),
        (64, 8192),
        (128, 2048),
        (128, 8192),
    ):
        cases.append(
            _dense(f"decode-b{batch}-k{seqlen_k}", batch, 1, 32, 128, seqlen_k=seqlen_k, num_heads_k=8)
        )
    return cases


def _shapes() -> list[Case]:
    """What is served beyond the headline: sizes, heads, windows, packing, uneven lengths, repeatability."""
    cases = [_dense(f"d{d}-causal", 4, 4096, 16, d, causal=True) for d in (40, 80, 160, 224)]
    cases += [
        _dense("d64-dv128-causal", 4, 4096, 16, 64, head_dim_v=128, causal=True),
        _dense("d128-dv64-causal", 4, 4096, 16, 128, head_dim_v=64, causal=True),
        _dense("gqa-16-4-full", 4, 4096, 16, 128, num_heads_k=4),
        _dense("mqa-16-1-causal", 4, 4096, 16, 128, num_heads_k=1, causal=True),
        _dense("window-128-s8192", 2, 8192, 16, 128, causal=True, window=(128, 0)),
        _dense("window-4096-s16384", 1, 16384, 16, 128, causal=True, window=(4096, 0)),
        _dense("window-256-both-sides-s8192", 2, 8192, 16, 128, window=(256, 256)),
        _dense("chunk-1024-of-16384-causal", 2, 1024, 16, 128, seqlen_k=16384, causal=True),
        _dense("cross-4096-to-1024", 4, 4096, 16, 128, seqlen_k=1024),
        _dense("odd-s4095-causal", 4, 4095, 16, 128, causal=True),
        _dense("odd-s1000-full", 16, 1000, 16, 128),
        _dense("one-long-sequence", 1, 32768, 4, 128, causal=True),
        _packed("docs-64x256-causal", (256,) * 64, 16, 128, causal=True),
        _packed(
            "docs-ragged-causal", (7000, 0, 13, 4001, 511, 2048, 1, 1500, 900, 410), 16, 128, causal=True
        ),
        _packed("docs-ragged-gqa-full", (6000, 3000, 129, 2871, 4384), 32, 128, num_heads_k=8),
    ]
    cases += [
        _dense(f"deterministic-d{d}-causal", 4, 4096, 2048 // d, d, causal=True, deterministic=True)
        for d in (64, 128, 256)
    ]
    return cases


# Features with a causal mask, and those whose window is a quarter of the length.
_CAUSAL_FEATURES = ("plain-causal", "window", "documents", "prefix", "sink-tokens", "chunked", "hidden-rows")
_WINDOWED_FEATURES = ("window", "sink-tokens")
PACKED_SUFFIX = "-packed"  # of a row that has the documents of another as packed sequences
_DOCUMENTS = 8  # per sequence


def document_lengths(batch: int, seqlen: int) -> list[list[int]]:
    """Of the documents of each sequence of the row "documents"; where one ends is drawn, evenly."""
    draws = random.Random("documents")
    of_all = []
    for _ in range(batch):
        ends = sorted(draws.sample(range(1, seqlen), _DOCUMENTS - 1))
        of_all.append([end - begin for begin, end in zip([0, *ends], [*ends, seqlen], strict=True)])
    return of_all


FEATURE_NAMES = (
    "plain",
    "plain-causal",
    "window",
    "key-padding",
    "bool-mask",
    "bool-mask-causal",
    "bias",
    "bias-grad",
    "bias-fp32",
    "bias-batch",
    "bias-batch-grad",
    "alibi",
    "alibi-grad",
    "relative-position",
    "relative-position-grad",
    "softcap",
    "sinks",
    "dropout",
    "documents",
    "prefix",
    "sink-tokens",
    "chunked",
    "hidden-rows",
    "blocks-128-all",
    "blocks-128-half",
    "blocks-128-quarter",
    "blocks-64-half",
)


def _features(prefix: str, batch: int, seqlen: int, num_heads: int, head_dim: int, **options) -> list[Case]:
    """One case per mask, bias and modifier, all of one shape."""
    return [
        _dense(
            prefix + name,
            batch,
            seqlen,
            num_heads,
            head_dim,
            causal=name in _CAUSAL_FEATURES,
            window=(seqlen // 4, 0) if name in _WINDOWED_FEATURES else (-1, -1),
            feature=name,
            **options,
        )
        for name in FEATURE_NAMES
    ]


def _documents(name: str, batch: int, seqlen: int, num_heads: int, head_dim: int) -> list[Case]:
    """The row "documents" of the features, and the same documents as packed sequences."""
    lengths = tuple(length for of_one in document_lengths(batch, seqlen) for length in of_one)
    return [
        _dense(name, batch, seqlen, num_heads, head_dim, causal=True, feature="documents"),
        _packed(name + PACKED_SUFFIX, lengths, num_heads, head_dim, causal=True),
    ]


def _model(row: models.ModelRow) -> Case:
    """The case of one row of the set ``models``."""
    lengths: tuple[int, ...] = ()
    if row.documents:
        tokens = row.batch * row.seqlen
        even = (tokens // row.documents,) * row.documents
        lengths = even if row.even else long_tailed(row.documents, tokens)
    options = {name: getattr(row, name) for name in ("causal", "window", "model", "asks", "inference")}
    heads_k = row.num_heads_k or row.num_heads
    if lengths:
        return _packed(row.name, lengths, row.num_heads, row.head_dim, num_heads_k=heads_k, **options)
    return _dense(
        row.name,
        row.batch,
        row.seqlen,
        row.num_heads,
        row.head_dim,
        seqlen_k=row.seqlen_k,
        num_heads_k=heads_k,
        head_dim_v=row.head_dim_v,
        **options,
    )


def shrunken(case: Case) -> Case:
    """A row of the set ``models`` with all that is special about it, small enough for a CPU.

    At most 4 heads in the same proportions, lengths in proportion up to 64, sizes a quarter.
    """
    group = case.num_heads // case.num_heads_k
    heads_k = 1 if group > 1 else min(case.num_heads, 4)
    longest = max(case.seqlen_q, case.seqlen_k)

    def fewer(count: int) -> int:
        return count if count <= 1 else max(3, round(count * min(1.0, 64 / longest)))

    lengths = tuple(min(fewer(n), 40) for n in case.lengths[:5])
    left, right = case.window
    return dataclasses.replace(
        case,
        name=f"smoke-{case.name}",
        batch=len(lengths) or min(case.batch, 64 if "shifted-windows" in case.asks else 3),
        seqlen_q=max(lengths) if lengths else fewer(case.seqlen_q),
        seqlen_k=max(lengths) if lengths else fewer(case.seqlen_k),
        num_heads=heads_k * min(group, 4),
        num_heads_k=heads_k,
        head_dim=case.head_dim // 4,
        head_dim_v=case.head_dim_v // 4,
        window=(left if left < 0 else fewer(left), right),
        lengths=lengths,
    )


def _smoke() -> list[Case]:
    """Seconds on a CPU: one case of every kind, to try the program itself."""
    return [
        _dense("smoke-full-s32", 2, 32, 2, 16),
        _dense("smoke-full-s64", 1, 64, 2, 16),
        _dense("smoke-causal-s32", 2, 32, 2, 16, causal=True),
        _dense("smoke-causal-s64", 1, 64, 2, 16, causal=True),
        _dense("smoke-gqa-window", 1, 48, 4, 8, num_heads_k=2, causal=True, window=(16, 0)),
        _dense("smoke-uneven", 1, 16, 2, 16, seqlen_k=40, head_dim_v=24, causal=True),
        _packed("smoke-docs", (20, 0, 33), 2, 16, causal=True),
        _dense("smoke-deterministic", 1, 32, 2, 16, causal=True, deterministic=True),
    ]


SETS: dict[str, list[Case]] = {
    "headline": _constant_work("", 16384, 2048, (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)),
    "around": _around(),
    "features": _features("feature-", 4, 4096, 16, 128),
    "features-d64": _features("d64-feature-", 4, 4096, 32, 64),
    "features-d256": _features("d256-feature-", 4, 4096, 8, 256),
    "features-deterministic": _features("deterministic-feature-", 4, 4096, 16, 128, deterministic=True),
    "documents": [
        *_documents("d128-documents", 4, 4096, 16, 128),
        *_documents("d64-documents", 4, 4096, 32, 64),
    ],
    "shapes": _shapes(),
    "fp8": _constant_work("fp8-", 16384, 2048, (64, 128, 256), (1024, 4096, 16384), inference=True),
    "models": [_model(row) for row in models.ROWS],
    "smoke": _smoke(),
    "smoke-features": _features("smoke-feature-", 2, 128, 2, 16),
    "smoke-documents": _documents("smoke-documents", 2, 128, 2, 16),
    "smoke-fp8": _constant_work("smoke-fp8-", 128, 128, (64,), (64, 128), inference=True),
    "smoke-models": [shrunken(_model(row)) for row in models.ROWS],
}
# Forwards whose columns are those of fp8, unless others are asked for.
FP8_SETS = ("fp8", "smoke-fp8")


def find_case(name: str) -> Case:
    """The case of that name, whichever set it is in.

    Raises:
        ValueError: no set has it; the message lists the names that come nearest.
    """
    by_name = {case.name: case for cases in SETS.values() for case in cases}
    if name not in by_name:
        near = ", ".join(difflib.get_close_matches(name, by_name, n=5, cutoff=0.3)) or "none is close"
        raise ValueError(f"no benchmark case is called {name!r}; nearest: {near}")
    return by_name[name]
