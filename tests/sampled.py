"""Float64 truth for a few rows and keys of inputs that are too large to check as a whole.

The forward truth of a row needs that row's visible keys only. The backward truth of a row or a key follows
the contract of ``backward``: it takes out and lse as given, so it needs no other rows' softmax.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_ext._ops.spec import AttnSpec
from tests.reference import visible_interval


@dataclass
class Sequence:
    """Views of one sequence: q, out, dout, dq (rows, h, d or dv); k, v, dk, dv (keys, h_k, d or dv);
    lse, dlse (h, rows). Gradients are None in a forward-only check, dlse None when not given."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor | None = None
    dlse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]


@dataclass
class Pair:
    """What was computed, in its own type, and what is true, float64; both (samples, features).

    ``cancelled`` is the absolute error of each element of a gradient that fp32 sums may leave where
    dP - delta cancels, those of several rows or keys in quadrature; None for other results.
    """

    actual: Tensor
    expected: Tensor
    cancelled: Tensor | None = None


# dP and delta are sums in fp32, of head_dim_v terms each. Tensor cores truncate where they add 16 terms to
# the accumulator: 16 times for 256 terms, an error of at most 16 * 2^-23 = 2^-19 of the sum of the terms'
# sizes. Where both sums are equal, as for a row with a single key, whose dP - delta is exactly 0, this is all
# of dS.
FP32_SUM_ERROR = 2.0**-19


def corner_samples(rng: random.Random, count: int, *sizes: int) -> list[tuple[int, ...]]:
    """``count`` index tuples below ``sizes``: all first, all last, then random ones."""
    samples = [tuple(0 for _ in sizes), tuple(n - 1 for n in sizes)]
    samples += [tuple(rng.randrange(n) for n in sizes) for _ in range(max(count - 2, 0))]
    return samples


def forward_rows(seq: Sequence, spec: AttnSpec, samples: list[tuple[int, int]]) -> tuple[Pair, Pair, float]:
    """out and lse of (head, row) samples, and the largest scaled |q|.|k| seen, which scales lse's gate."""
    out, out_true, lse, lse_true, magnitude = [], [], [], [], []
    for h, row in samples:
        lo, hi = visible_interval(spec, row, seq.q.shape[0], seq.k.shape[0])
        q, k = seq.q[row, h].double(), seq.k[lo : max(lo, hi), h // seq.group].double()
        scores = spec.scale * (k @ q)
        out.append(seq.out[row, h])
        lse.append(seq.lse[h, row])
        lse_true.append(torch.logsumexp(scores, 0) if hi > lo else scores.new_tensor(float("-inf")))
        out_true.append(torch.softmax(scores, 0) @ seq.v[lo : max(lo, hi), h // seq.group].double())
        magnitude.append((k.abs() @ q.abs()).amax() if hi > lo else scores.new_zeros(()))
    bound = abs(spec.scale) * float(torch.stack(magnitude).max())
    return (
        Pair(torch.stack(out), torch.stack(out_true)),
        Pair(torch.stack(lse)[:, None], torch.stack(lse_true)[:, None]),
        bound,
    )


def _score_gradient(
    seq: Sequence, spec: AttnSpec, h: int, rows: slice, keys: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """P, dS and the error that fp32 sums leave in dS, (rows, keys) of head ``h``.

    For a block in which every row sees every key.
    """
    h_k = h // seq.group
    q, dout, out = (t[rows, h].double() for t in (seq.q, seq.dout, seq.out))
    k, v = seq.k[keys, h_k].double(), seq.v[keys, h_k].double()
    p = torch.exp(spec.scale * (q @ k.T) - seq.lse[h, rows].double()[:, None])
    delta = (dout * out).sum(-1)
    if seq.dlse is not None:
        delta = delta - seq.dlse[h, rows].double()
    terms = dout.abs() @ v.abs().T + (dout * out).abs().sum(-1)[:, None]
    return p, p * (dout @ v.T - delta[:, None]), p * FP32_SUM_ERROR * terms


def backward_rows(seq: Sequence, spec: AttnSpec, samples: list[tuple[int, int]]) -> Pair:
    """dq of (head, row) samples."""
    actual, expected, cancelled = [], [], []
    for h, row in samples:
        lo, hi = visible_interval(spec, row, seq.q.shape[0], seq.k.shape[0])
        keys = slice(lo, max(lo, hi))
        _, ds, ds_error = _score_gradient(seq, spec, h, slice(row, row + 1), keys)
        actual.append(seq.dq[row, h])
        k = seq.k[keys, h // seq.group].double()
        expected.append(spec.scale * (ds @ k)[0])
        cancelled.append(abs(spec.scale) * (ds_error**2 @ k**2).sqrt()[0])
    return Pair(torch.stack(actual), torch.stack(expected), torch.stack(cancelled))


def rows_seeing(key: int, spec: AttnSpec, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Half-open interval of rows whose visible interval contains ``key``."""
    aligned = key - (seqlen_k - seqlen_q)  # the row aligned with this key; may lie outside
    first = 0 if spec.window_right < 0 else max(0, aligned - spec.window_right)
    last = seqlen_q if spec.window_left < 0 else min(seqlen_q, aligned + spec.window_left + 1)
    return first, max(first, last)


def backward_keys(seq: Sequence, spec: AttnSpec, samples: list[tuple[int, int]]) -> tuple[Pair, Pair]:
    """dk and dv of (key head, key) samples."""
    dk, dk_true, dk_cancelled, dv, dv_true = [], [], [], [], []
    for h_k, key in samples:
        rows = slice(*rows_seeing(key, spec, seq.q.shape[0], seq.k.shape[0]))
        sum_k = torch.zeros(seq.k.shape[-1], dtype=torch.float64, device=seq.k.device)
        sum_error = torch.zeros_like(sum_k)
        sum_v = torch.zeros(seq.v.shape[-1], dtype=torch.float64, device=seq.k.device)
        for h in range(h_k * seq.group, (h_k + 1) * seq.group):
            p, ds, ds_error = _score_gradient(seq, spec, h, rows, slice(key, key + 1))
            q = seq.q[rows, h].double()
            sum_k += spec.scale * (ds.T @ q)[0]
            sum_error += spec.scale**2 * (ds_error.T**2 @ q**2)[0]
            sum_v += (p.T @ seq.dout[rows, h].double())[0]
        dk.append(seq.dk[key, h_k])
        dv.append(seq.dv[key, h_k])
        dk_true.append(sum_k)
        dk_cancelled.append(sum_error.sqrt())
        dv_true.append(sum_v)
    return (
        Pair(torch.stack(dk), torch.stack(dk_true), torch.stack(dk_cancelled)),
        Pair(torch.stack(dv), torch.stack(dv_true)),
    )
