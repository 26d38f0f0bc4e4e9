"""Cases whose tensors or indices are too large for a full truth: sampled rows and keys, and a look for NaN.

Their point is index arithmetic beyond 2^31 and 2^32. A wrong offset gives another row's values, or poison, so
a few dozen well spread samples with the first and the last element among them show it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_ext._ops.spec import AttnSpec, default_scale
from tests import compare
from tests.harness import Target
from tests.layouts import POISON_BYTE
from tests.sampled import Pair, Sequence, backward_keys, backward_rows, corner_samples, forward_rows

SEQUENCES = 6  # how many batch entries or packed sequences are looked at


@dataclass
class Large:
    """Inputs of a large call.

    q, k, v: dense (b, s, h, d) or packed (total, h, d), any strides. dout: shaped as out; None: no backward.
    lens: (len_q, len_k) of each packed sequence, or None when dense.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None
    lens: list[tuple[int, int]] | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)

    @property
    def spec(self) -> AttnSpec:
        return AttnSpec(default_scale(self.q.shape[-1]), self.window[0], 0 if self.causal else self.window[1])

    def cu_seqlens(self) -> tuple[Tensor | None, Tensor | None]:
        if self.lens is None:
            return None, None
        sums = [list(itertools.accumulate((n[side] for n in self.lens), initial=0)) for side in (0, 1)]
        return tuple(torch.tensor(s, dtype=torch.int32, device=self.q.device) for s in sums)


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    """N(0, 1) without a float32 copy, which would not fit."""
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def run_large(x: Large, target: Target, seed: int, samples: int = 64) -> None:
    """Runs forward, and backward if there is a dout, and compares samples. Raises AssertionError."""
    spec, (cu_q, cu_k) = x.spec, x.cu_seqlens()
    options = (0, 0, spec.scale, spec.window_left, spec.window_right, False, target.choice)
    _poison(2 * x.q.numel() // x.q.shape[-1] * x.v.shape[-1])
    out, lse = torch.ops.flash_ext.fwd(x.q, x.k, x.v, cu_q, cu_k, *options)
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if x.dout is not None:
        _poison(2 * x.q.numel())
        grads = torch.ops.flash_ext.bwd(x.dout, x.q, x.k, x.v, out, lse, None, cu_q, cu_k, *options)
    for name, t in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)):
        assert t is None or not _any_nan(t), f"{name} contains NaN"

    rng = random.Random(seed)
    pairs: dict[str, list[Pair]] = {}
    largest = 0.0
    chosen = _choose_sequences(x, rng)
    for b in chosen:
        seq = sequence_of(x, out, lse, grads, b)
        count = -(-samples // len(chosen))
        rows = corner_samples(rng, count, seq.q.shape[1], seq.q.shape[0])
        pair_out, pair_lse, bound = forward_rows(seq, spec, rows)
        largest = max(largest, bound)
        found = {"out": pair_out, "lse": pair_lse}
        if x.dout is not None:
            keys = corner_samples(rng, count, seq.k.shape[1], seq.k.shape[0])
            found["dq"] = backward_rows(seq, spec, rows)
            found["dk"], found["dv"] = backward_keys(seq, spec, keys)
        for name, pair in found.items():
            pairs.setdefault(name, []).append(pair)
    for name, parts in pairs.items():
        actual, expected = (torch.cat([getattr(p, side) for p in parts]) for side in ("actual", "expected"))
        if name == "lse":
            compare.assert_lse(actual, expected, largest)
            continue
        terms = x.q.shape[-3] if name in ("dk", "dv") else x.k.shape[-3]
        cancelled = torch.cat([p.cancelled for p in parts]) if name in ("dq", "dk") else None
        check_gates(name, Pair(actual, expected, cancelled), terms)


def check_gates(name: str, pair: Pair, terms: int) -> None:
    """The gates of compare.py, wider for few samples and by what float32 sums of that many terms lose.

    Tensor cores truncate when they add 16 terms to an accumulator, which takes half a unit in the last place
    each time: nothing beside 16 bits for 10^5 terms, but 2 % for 10^7. The errors that ``pair.cancelled``
    allows are forgiven before anything is measured relatively.

    The truth of these gradients takes out as given, so the error of delta, which makes the worst rows of dq
    and dk wide, is none here: their worst rows are held to the gate of dv.
    """
    actual, expected = pair.actual, pair.expected
    extra = 2.0**-24 * terms / 16
    gates = compare.GATES[actual.dtype]
    gate = dataclasses.replace(
        gates[name],
        rel_l2=1.25 * gates[name].rel_l2 + extra,
        worst_row=2 * gates["out" if name == "out" else "dv"].worst_row + 2 * extra,
        signed_bias=gates[name].signed_bias + extra,
    )
    if pair.cancelled is not None:
        error = actual.double() - expected
        expected = expected + error.clamp(-pair.cancelled, pair.cancelled)
    errors = compare.measure(actual, expected, gate.row_floor)
    failed = compare.violations(errors, gate)
    assert not failed, f"{name}: {'; '.join(failed)}\n  {errors}"


def _poison(size: int) -> None:
    """Leaves a freed block of ``size`` NaN bytes for the call's largest result."""
    torch.full((size,), POISON_BYTE, dtype=torch.uint8, device="cuda")


def _any_nan(t: Tensor) -> bool:
    """Whether a tensor holds NaN; in pieces, because the mask of a whole one may not fit."""
    return any(bool(piece.isnan().any()) for piece in t.flatten().split(1 << 30))


def _choose_sequences(x: Large, rng: random.Random) -> list[int]:
    """First, last and random sequences that have rows and keys."""
    if x.lens is None:
        candidates = list(range(x.q.shape[0]))
    else:
        candidates = [b for b, (len_q, len_k) in enumerate(x.lens) if len_q and len_k]
    inner = candidates[1:-1]
    return sorted({candidates[0], candidates[-1], *rng.sample(inner, min(len(inner), SEQUENCES - 2))})


def sequence_of(x: Large, out: Tensor, lse: Tensor, grads: tuple[Tensor | None, ...], b: int) -> Sequence:
    """Views of batch entry or packed sequence ``b``."""
    dq, dk, dv = grads
    if x.lens is None:
        parts = (t if t is None else t[b] for t in (x.dout, None, dq, dk, dv))
        return Sequence(x.q[b], x.k[b], x.v[b], out[b], lse[b], *parts)
    start_q, start_k = (sum(n[side] for n in x.lens[:b]) for side in (0, 1))
    rows, keys = slice(start_q, start_q + x.lens[b][0]), slice(start_k, start_k + x.lens[b][1])
    by_row = (t if t is None else t[rows] for t in (x.dout, None, dq))
    by_key = (t if t is None else t[keys] for t in (dk, dv))
    return Sequence(x.q[rows], x.k[keys], x.v[keys], out[rows], lse[:, rows], *by_row, *by_key)
