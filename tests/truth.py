"""Float64 truth of a case together with the rounding noise that a correct kernel may add to each element.

A fixed relative tolerance cannot judge random shapes and data: with one key dq is exactly zero, with values
that cancel any relative error may be large, and a generous absolute one hides a wrong row of small numbers.
So every element gets its own standard deviation, from the roundings that the algorithm cannot avoid:

    forward   P to the storage type before P V, the output; the logits in fp32
    backward  P before P^T dO, dS before dS K and dS^T Q, delta from the rounded output; the results

Weights below the normal range of fp32 are lost altogether: see WEIGHT_FLUSH.

The gradients are explicit formulas here, not autograd, and all sequences of a packed batch are computed at
once in padded form, where their scores are not too many (LARGEST_MATRIX); test_harness.py holds them against
tests.reference, which shares no code with this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.cases import Case
from tests.inputs import Inputs

# Unit roundoff, and the absolute error left below the normal range: half the smallest fp16 subnormal, and the
# fp32 flush-to-zero threshold where bf16 itself would reach further down.
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
UNDERFLOW = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}
# A mean of two numbers below the normal range lies half-way between two others every second time. Rounding it
# weighs 0.71 units of that error in the mean, any other one 0.58.
HALF_WAY = 1.25
# A weight of the backward is an fp32 exponential that comes out as 0 below 2^-126 (ex2.approx.ftz). What is
# lost lies anywhere in [0, 2^-126), so it enters dS times |dP - delta| and dv times |dout|. An error spread
# evenly over [0, a) has the root mean square 0.58 a, one of rounding to nearest 0.43 u: to weigh the same in
# units of noise, a must be counted 1.35 times. 2 leaves room for tensors of a few elements that are all just
# below.
WEIGHT_FLUSH = 2 * 2.0**-126
# Scores of several heads are formed together while they are no more than these, 256 MiB in float64. About ten
# such matrices live at once, and 16 processes share the memory of a GPU.
LARGEST_MATRIX = 2**25


@dataclass
class Truth:
    """Exact results and the noise of each element, in the shapes of the call's results, float64.

    ``unspecified`` marks elements about which nothing is promised: a NaN reaches what shares its tile, as a
    matrix product multiplies it by the zero weight of a masked pair.
    For lse, ``noise`` is the largest allowed absolute error rather than a deviation.
    ``independent`` is, for each result but lse, how many of its errors are independent of each other: at most
    one per element, but a single one where a single rounding (of a weight, of delta) reaches all elements.
    """

    value: dict[str, Tensor]
    noise: dict[str, Tensor]
    unspecified: dict[str, Tensor]
    independent: dict[str, float]


@dataclass
class _Padded:
    """A case as one dense batch, or a part of it: q, dout (b, h, mq, .), k, v (b, h_k, mk, .)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    visible: Tensor  # (b, 1, mq, mk) bool
    rows_q: Tensor  # (b, mq) row of each padded place in the packed tensors
    valid_q: Tensor  # (b, mq) bool
    rows_k: Tensor
    valid_k: Tensor
    key_head: Tensor  # (1, h) which of those in k and v each head reads

    def cut(self, dim: int, first: int) -> list[_Padded]:
        """What has the first few batch entries (``dim`` 0) or heads (1), and what has the others; views."""
        names = ["q", "dout", "dlse"]
        names += ["k", "v", "visible", "rows_q", "valid_q", "rows_k", "valid_k"] if dim == 0 else ["key_head"]
        halves = zip(*(t.tensor_split((first,), dim) for t in (getattr(self, name) for name in names)))
        return [replace(self, **dict(zip(names, half))) for half in halves]


class _Found(NamedTuple):
    """What comes of matrices of scores, by name of a result, (b, h or h_k, rows, .).

    ``variance`` is without the rounding of gradients themselves, and of lse it is the largest error.
    ``by_delta`` is what errors of delta have in it. ``sums`` of a backward go over all rows and heads.
    """

    value: dict[str, Tensor]
    variance: dict[str, Tensor]
    by_delta: dict[str, Tensor]
    sums: dict[str, Tensor]


def compute_truth(inputs: Inputs, backward: bool) -> Truth:
    """Truth of one case. Memory: about ten matrices of LARGEST_MATRIX, and q, k, v and the results."""
    case = inputs.case
    if case.torch_dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"the noise model covers fp16 and bf16, got {case.dtype}")
    padded = _pad(inputs)
    u, floor = UNIT_ROUNDOFF[case.torch_dtype], UNDERFLOW[case.torch_dtype]
    value, variance, by_delta, sums = _find(padded, case, backward)
    noise = {"out": variance["out"].sqrt(), "lse": variance["lse"]}
    if backward:
        alike = _group(case) if sums["weight alike"] > 0.5 * sums["weight"] else 1
        for name in ("dk", "dv"):
            variance[name] *= alike
        by_delta["dk"] *= alike
        for name in ("dq", "dk", "dv"):
            noise[name] = (variance[name] + u**2 * value[name] ** 2 + floor**2).sqrt()

    independent = _count_independent(padded, case, value, noise, by_delta, sums)
    value = {name: _unpad(name, t, padded, inputs) for name, t in value.items()}
    noise = {name: _unpad(name, t, padded, inputs) for name, t in noise.items()}
    if case.is_packed:  # rows of no sequence
        outside = torch.ones(inputs.q.shape[0], dtype=torch.bool, device=inputs.q.device)
        outside[padded.rows_q[padded.valid_q]] = False
        value["lse"][:, outside] = float("-inf")
    truth = Truth(value, noise, {}, independent)
    _plant_special_values(truth, padded, inputs)
    return truth


def _find(padded: _Padded, case: Case, backward: bool) -> _Found:
    """Of halves where a matrix of scores would be too large, first of the batch, then of the heads.

    One head is not divided, nor in a backward those of one key head, whose dk and dv are their sums.
    """
    batch, heads = padded.q.shape[:2]
    together = _group(case) if backward else 1
    dim, first = (0, batch // 2) if batch > 1 else (1, heads // (2 * together) * together)
    if not first or batch * heads * padded.visible.shape[2:].numel() <= LARGEST_MATRIX:
        return _find_at_once(padded, case, backward)
    a, b = (_find(half, case, backward) for half in padded.cut(dim, first))
    joined = [{name: torch.cat((x[name], y[name]), dim) for name in x} for x, y in zip(a[:-1], b[:-1])]
    return _Found(*joined, {name: a.sums[name] + b.sums[name] for name in a.sums})


def _find_at_once(padded: _Padded, case: Case, backward: bool) -> _Found:
    u, floor = UNIT_ROUNDOFF[case.torch_dtype], UNDERFLOW[case.torch_dtype]
    scale, visible = case.effective_scale, padded.visible
    q, dout = padded.q, padded.dout
    k, v = (t.index_select(1, padded.key_head[0]) for t in (padded.k, padded.v))

    scores = (scale * (q @ k.mT)).masked_fill(~visible, float("-inf"))
    lse = (
        torch.logsumexp(scores, -1, keepdim=True)
        if scores.shape[-1]
        else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    )
    p = torch.exp(scores - lse.masked_fill(lse.isinf(), 0))
    reach = abs(scale) * (q.abs() @ k.abs().mT).masked_fill(~visible, 0)
    reach = reach.amax(-1, keepdim=True) if reach.shape[-1] else torch.zeros_like(lse)
    # The logits and the exponent's subtraction are fp32: a relative error of every weight of the row. Tensor
    # cores truncate where they add, up to 16 times for a dot product.
    tilt = 2.0**-21 * reach + 2.0**-23 * lse.abs().masked_fill(lse.isinf(), 0)
    seen = visible.double()
    q2, k2, v2, dout2, p2 = (t * t for t in (q, k, v, dout, p))

    out = p @ v
    out_var = u**2 * (out**2 + p2 @ v2) + tilt**2 * (p @ v2) + floor**2 * (HALF_WAY**2 + seen @ v2)
    value = {"out": out, "lse": lse}
    variance = {
        "out": out_var,
        "lse": 3e-6 * reach.clamp(min=1) + 2.0**-23 * lse.abs().masked_fill(lse.isinf(), 0),
    }
    if not backward:
        return _Found(value, variance, {}, {})

    delta = (dout * out).sum(-1, keepdim=True) - padded.dlse
    dp = dout @ v.mT - delta
    ds = p * dp
    delta_var = (dout2 * out_var).sum(-1, keepdim=True)
    rounding = u**2 + tilt**2
    # The last part is lost below any precision.
    ds_var = rounding * ds**2 + seen * (floor**2 + WEIGHT_FLUSH**2 * dp**2)
    p_var = rounding * p2 + seen * max(floor, WEIGHT_FLUSH) ** 2
    dq, dk, dv = scale * (ds @ k), scale * (ds.mT @ q), p.mT @ dout
    dq_by_delta = scale**2 * delta_var * (p @ k) ** 2
    dk_by_delta = scale**2 * ((delta_var * p2).mT @ q2)
    dq_var = scale**2 * (ds_var @ k2) + dq_by_delta
    dk_var = scale**2 * (ds_var.mT @ q2) + dk_by_delta
    dk, dk_var, dk_by_delta, dv, dv_var = (
        _sum_groups(t, case) for t in (dk, dk_var, dk_by_delta, dv, p_var.mT @ dout2)
    )
    value |= {"dq": dq, "dk": dk, "dv": dv}
    variance |= {"dq": dq_var, "dk": dk_var, "dv": dv_var}
    # Keys that share a row's largest weight share its rounding: a row is flat where they hold most of it.
    tied = (p >= (1 - 1e-9) * p.amax(-1, keepdim=True)) & visible if p.shape[-1] else visible
    flat = (tied.sum(-1) > 1) & ((p * tied).sum(-1) > 0.5)
    sums = {"flat rows": flat.sum(), **_weigh_alike(p, dout, case)}
    return _Found(value, variance, {"dq": dq_by_delta, "dk": dk_by_delta}, sums)


def _pad(inputs: Inputs) -> _Padded:
    case, device = inputs.case, inputs.q.device
    lens = torch.tensor(list(case.sequences()), dtype=torch.int64).reshape(-1, 2)
    mq, mk = case.seqlen_q, case.seqlen_k
    if case.is_packed:
        mq, mk = (int(lens[:, side].max()) if len(lens) else 0 for side in (0, 1))
    lens = lens.to(device)

    def places(side: int, size: int, stride: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(size, device=device)
        start = (
            lens[:, side].cumsum(0) - lens[:, side]
            if case.is_packed
            else torch.arange(len(lens), device=device) * stride
        )
        return start[:, None] + position, position < lens[:, side, None]

    rows_q, valid_q = places(0, mq, case.seqlen_q)
    rows_k, valid_k = places(1, mk, case.seqlen_k)

    def gather(t: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
        flat = t if t.ndim == 3 else t.flatten(0, 1)
        if not len(flat):
            return flat.new_zeros(*rows.shape, *flat.shape[1:], dtype=torch.float64).transpose(1, 2)
        t = flat[rows.clamp(max=len(flat) - 1)].double()
        return t.masked_fill_(~valid[:, :, None, None], 0).nan_to_num_(0, 0, 0).transpose(1, 2)

    q, dout = gather(inputs.q, rows_q, valid_q), gather(inputs.dout, rows_q, valid_q)
    k, v = gather(inputs.k, rows_k, valid_k), gather(inputs.v, rows_k, valid_k)
    key_head = torch.arange(case.num_heads, device=device)[None] // _group(case)
    dlse = torch.zeros(q.shape[:3], dtype=torch.float64, device=device)[..., None]
    if inputs.dlse is not None:
        rows_first = inputs.dlse.T if case.is_packed else inputs.dlse.transpose(1, 2)
        dlse = gather(rows_first[..., None], rows_q, valid_q)

    left, right = case.effective_window
    centre = torch.arange(mq, device=device)[:, None] + (lens[:, 1] - lens[:, 0])[:, None, None]
    column = torch.arange(mk, device=device)
    visible = valid_q[:, :, None] & valid_k[:, None, :]
    if left >= 0:
        visible = visible & (column >= centre - left)
    if right >= 0:
        visible = visible & (column <= centre + right)
    return _Padded(q, k, v, dout, dlse, visible[:, None], rows_q, valid_q, rows_k, valid_k, key_head)


def _group(case: Case) -> int:
    """How many query heads share a key head; 1 where there are none."""
    return max(case.num_heads // max(case.num_heads_k, 1), 1)


def _sum_groups(t: Tensor, case: Case) -> Tensor:
    """Sums query heads that share a key head: (b, h, mk, d) to (b, h_k, mk, d)."""
    return t.unflatten(1, (-1, _group(case))).sum(2)


def _weigh_alike(p: Tensor, dout: Tensor, case: Case) -> dict[str, Tensor]:
    """Sums that say whether the variance of a sum over a group exceeds the sum of the variances.

    Query heads with the same weights and the same dout make the same errors of P and dS, and equal errors add
    up while independent ones add in quadrature: n^2 variances instead of n. Weights count as the same where
    they differ by less than the 16-bit types can tell, which must hold for more than half of all weight. It
    holds for none where dout differs anywhere: NaN, which stays in a sum.
    """
    group = _group(case)
    nowhere = {"weight alike": p.new_full((), float("nan")), "weight": p.new_zeros(())}
    if group < 2:
        return nowhere
    weights, same = (t.unflatten(1, (-1, group)) for t in (p, dout))
    if not torch.equal(same, same[:, :, :1].expand_as(same)):
        return nowhere
    close = (weights - weights[:, :, :1]).abs() <= 2.0**-9 * weights[:, :, :1]
    return {"weight alike": (weights * close).sum(), "weight": weights.sum()}


def _count_independent(
    padded: _Padded,
    case: Case,
    value: dict[str, Tensor],
    noise: dict[str, Tensor],
    by_delta: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> dict[str, float]:
    """How many independent errors each result has, at least; see ``Truth``.

    The errors of a product E X, with errors E of the first factor, lie in the row space of X: per row of E
    there are as many independent ones as X has directions of weight, not as X has columns. An error of delta
    reaches a whole row of dq, and in dk all keys that the row sees, by one number; of dk no more than one
    independent number per head is taken for granted. Elements with equal truth err alike.

    The mean of m squares, n = (1 - f) / m_product + f in m_delta squares, of deviations that have the share f
    of their variance from delta varies as one of 1 / ((1 - f)^2 / m_product + f^2 / m_delta) squares.
    """
    if not value["out"].numel() or not padded.k.shape[2]:
        return {name: 1.0 for name in value if name != "lse"}
    rows = padded.visible.any(-1).sum(-1).double()  # (b, 1)
    keys = padded.visible.any(-2).sum(-1).double()
    heads = float(len(rows) * case.num_heads_k)
    # Where most rows are flat, the errors of dv differ between columns only.
    flat = "dv" in value and bool(sums["flat rows"] > 0.5 * case.num_heads * rows.sum())
    found: dict[str, float] = {}
    for name, second, lines in (
        ("out", padded.v, rows),
        ("dq", padded.k, rows),
        ("dk", padded.q, keys),
        ("dv", padded.dout, keys.clamp(max=1) if flat else keys),
    ):
        if name not in value:
            continue
        by_head = _directions(second) * lines
        if name in ("out", "dq"):
            by_head = by_head.index_select(1, padded.key_head[0])
        else:
            by_head = by_head.unflatten(1, (case.num_heads_k, -1)).amin(2)
        count = min(float(by_head.sum()), distinct(value[name]))
        if name in by_delta:
            share = torch.nan_to_num(by_delta[name] / noise[name] ** 2, nan=0.0)
            f = float(share.sum() / (noise[name] > 0).sum().clamp(min=1))
            of_delta = float(rows.sum()) * case.num_heads if name == "dq" else heads
            count = 1 / ((1 - f) ** 2 / max(count, 1.0) + f**2 / max(of_delta, 1.0))
        found[name] = max(count, 1.0)
    return found


def distinct(t: Tensor) -> float:
    """How many different numbers of fp32 it holds."""
    numbers = t.float().flatten()
    if numbers.is_cuda:
        return float(numbers.unique().numel())
    ordered = np.sort(numbers.numpy())  # in a tenth of the time that PyTorch takes for it
    return float((ordered[1:] != ordered[:-1]).sum() + min(len(ordered), 1))


def _directions(x: Tensor) -> Tensor:
    """Participation ratio of the singular values of x (b, h, rows, columns): (sum s^2)^2 / sum s^4, (b, h).

    1 if all rows are multiples of one, about the number of columns (or of rows, if fewer) if they are random.
    """
    gram = x.mT @ x
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.nan_to_num(trace**2 / (gram**2).sum((-2, -1)), nan=0.0)


def _unpad(name: str, t: Tensor, padded: _Padded, inputs: Inputs) -> Tensor:
    """From (b, heads, rows, d) to the shape of the call's result; rows of no sequence are 0."""
    t = t.transpose(1, 2)
    if inputs.case.is_packed:
        rows, valid, like = (
            (padded.rows_k, padded.valid_k, inputs.k)
            if name in ("dk", "dv")
            else (padded.rows_q, padded.valid_q, inputs.q)
        )
        flat = t.new_zeros(like.shape[0], *t.shape[2:])
        flat[rows[valid]] = t[valid]
        t = flat
    if name != "lse":
        return t
    return t.squeeze(-1).mT.contiguous()


def _plant_special_values(truth: Truth, padded: _Padded, inputs: Inputs) -> None:
    """Where the one NaN row of q, or the one infinite entry of v, must show, and where it may."""
    case = inputs.case
    lengths = next(iter(case.sequences()), (0, 0))
    if case.data not in ("nan_row", "inf_value") or 0 in lengths or not case.num_heads:
        return
    first = {name: t if case.is_packed else t[0] for name, t in truth.value.items()}
    first["lse"] = truth.value["lse"] if case.is_packed else truth.value["lse"][0]
    seen = padded.visible[0, 0]
    nan = float("nan")
    if case.data == "nan_row":
        row = lengths[0] // 2
        keys = seen[row].nonzero().squeeze(-1)
        if len(keys):
            first["out"][row, 0] = nan
            first["lse"][0, row] = nan
        if "dq" in first:
            if len(keys):
                first["dq"][row, 0] = nan
            for name in ("dk", "dv"):
                hidden = torch.zeros_like(truth.value[name], dtype=torch.bool)
                (hidden if case.is_packed else hidden[0])[: lengths[1], 0] = True
                (hidden if case.is_packed else hidden[0])[keys, 0] = False
                truth.unspecified[name] = hidden
                first[name][keys, 0] = nan
        return
    key, group = lengths[1] // 2, _group(case)
    rows = seen[: lengths[0], key]
    hidden = torch.zeros_like(truth.value["out"], dtype=torch.bool)
    block = (hidden if case.is_packed else hidden[0])[: lengths[0], :group, 0]
    block[~rows] = True
    truth.unspecified["out"] = hidden
    first["out"][: lengths[0], :group, 0][rows] = float("inf")
