"""Float64 truth of a case with modifiers, and the noise that a correct kernel may add to each element.

Values and gradients are those of tests.reference, by autograd. The noise follows truth.py, with what the
modifiers change: dropout scales weights (w = keep * P) but not the P that multiplies delta; a softcap scales
dS once more; biases, slopes and the cap add roundings of fp32 to the logits. An error of delta is one number
for a whole row, so in a sum over keys it does not average out: there the row's terms are added before they
are squared. For the same reason sums that cancel (the gradient of a bias that all keys share, of a slope, of
a row that sees a single key) have an absolute noise from the size of their terms, not from that of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_ext._ops.modifiers import Modifiers
from tests.inputs import Inputs
from tests.reference import (
    _kept,
    _score_terms,
    _visible,
    attention_reference,
    of_sequence,
    row_max_reference,
)
from tests.truth import UNDERFLOW, UNIT_ROUNDOFF, WEIGHT_FLUSH, Truth, _directions, distinct

FP32 = 2.0**-22  # a few roundings of fp32
CAP_ERROR = 4e-7  # of tanh, which a cap multiplies; caps above CAP_FINE are computed to a relative error
CAP_FINE = 100.0

GRADIENTS = {"bias": "dbias", "position": "dtable", "slopes": "dslopes", "sinks": "dsinks"}


@dataclass
class _Piece:
    """Sequences of one shape: the whole batch of a dense call, or one packed sequence. Heads first."""

    mods: Modifiers
    q: Tensor  # (b, h, rows, d) float64, as k, v, dout; dlse (b, h, rows, 1)
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    lse: Tensor
    batch: Tensor  # (b,) indices
    place_q: Callable[[Tensor], Tensor]  # a full (b, s, h, d) or (total, h, d) tensor to this piece's part
    place_k: Callable[[Tensor], Tensor]


def compute_modifier_truth(x: Inputs) -> Truth:
    """Truth of one case: out, lse, row_max and the gradients in ``needs``, by the names of GRADIENTS."""
    value = exact(x)
    tensors = [_without_tail(t, x.case) for t in (x.q, x.k, x.v, x.dout)]
    leaves = {name: t.double() for name, t in x.leaves().items()}
    with torch.no_grad():
        noise, independent = _Noise(x, value, tensors, _dlse(x, value["lse"]), leaves).all()
    return Truth(value, noise, {}, independent)


def exact(x: Inputs) -> dict[str, Tensor]:
    """The values alone."""
    case = x.case
    cu = (x.cu_seqlens_q, x.cu_seqlens_k) if case.is_packed else ()
    qkv = [_without_tail(t, case).requires_grad_() for t in (x.q, x.k, x.v)]
    leaves = {name: t.double().requires_grad_() for name, t in x.leaves().items()}
    mods = x.meaning(leaves)
    out, lse = attention_reference(*qkv, case.spec, *cu, mods=mods)
    value = {"out": out.detach(), "lse": lse.detach()}
    with torch.no_grad():
        value["row_max"] = row_max_reference(*qkv, case.spec, *cu, mods=mods)
    wanted = _wanted(case.needs, qkv, leaves)
    if case.backward and wanted:
        dout = [_without_tail(x.dout, case), _dlse(x, lse)]
        grads = torch.autograd.grad([out, lse], list(wanted.values()), dout, allow_unused=True)
        for (name, t), grad in zip(wanted.items(), grads):
            value[name] = torch.zeros_like(t) if grad is None else grad
    return value


def _dlse(x: Inputs, lse: Tensor) -> Tensor:
    return torch.zeros_like(lse) if x.dlse is None else x.dlse.double().nan_to_num()


def _without_tail(t: Tensor, case) -> Tensor:
    """float64, with 0 instead of the poison in rows of no sequence, which nothing may read."""
    t = t.detach().double()
    if case.tail:
        t[-case.tail :] = 0
    return t


def _wanted(needs: tuple[str, ...], qkv: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = dict(zip(("dq", "dk", "dv"), qkv)) if "qkv" in needs else {}
    if "mods" in needs:
        wanted |= {GRADIENTS[name]: t for name, t in leaves.items()}
    return wanted


class _Noise:
    """Adds up the variances of all results, piece by piece."""

    def __init__(
        self, x: Inputs, value: dict[str, Tensor], tensors: list[Tensor], dlse: Tensor,
        leaves: dict[str, Tensor],
    ):  # fmt: skip
        self.x, self.case, self.value, self.leaves = x, x.case, value, leaves
        self.tensors, self.dlse = tensors, dlse
        self.mods = x.meaning(leaves)
        self.u, self.floor = UNIT_ROUNDOFF[self.case.torch_dtype], UNDERFLOW[self.case.torch_dtype]
        self.variance = {name: torch.zeros_like(t) for name, t in value.items()}
        self.counts = {name: 0.0 for name in value}
        self.by_delta: dict[str, float] = {"dq": 0.0, "dk": 0.0}
        self.delta_rows = 0.0

    def all(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        for piece in self._pieces():
            if not piece.k.numel():
                self._add_without_keys(piece)
            elif piece.q.numel():
                self._add(piece)
        noise, independent = {}, {}
        for name, t in self.value.items():
            if name in ("lse", "row_max"):
                noise[name] = self.variance[name]  # a bound
                independent[name] = 1.0
                continue
            unit, floor = self.u, self.floor
            if name in GRADIENTS.values():
                part = next(part for part, grad in GRADIENTS.items() if grad == name)
                dtype = next(c.tensor.dtype for c in self.x.choices if c.part == part)
                unit, floor = UNIT_ROUNDOFF.get(dtype, 2.0**-23), UNDERFLOW.get(dtype, 2.0**-126)
                independent[name] = self._independent_rows(name)
            else:
                independent[name] = self._independent(name)
            noise[name] = (self.variance[name] + unit**2 * t**2 + floor**2).sqrt()
        return noise, independent

    def _independent(self, name: str) -> float:
        count = max(min(self.counts[name], distinct(self.value[name])), 1.0)
        if name in self.by_delta:
            total = float(self.variance[name].sum())
            f = self.by_delta[name] / total if total > 0 else 0.0
            of_delta = self.delta_rows if name == "dq" else float(self.case.num_heads_k)
            count = 1 / ((1 - f) ** 2 / count + f**2 / max(of_delta, 1.0))
        return max(count, 1.0)

    def _independent_rows(self, name: str) -> float:
        """An error of delta is one number for a row of dS: by row where rows have their own, else by head."""
        shape = self.value[name].shape
        has_rows = name in ("dbias", "dtable") and len(shape) > 1
        return float(max(shape[:-1].numel() if has_rows else shape.numel(), 1))

    # ---- pieces ----

    def _pieces(self) -> list[_Piece]:
        case = self.case
        if not case.is_packed:

            def same(t: Tensor) -> Tensor:
                return t

            index = torch.arange(case.batch, device=self.dlse.device)
            return [self._piece(self.mods, same, same, self.dlse, self.value["lse"], index)]
        pieces, start_q, start_k = [], 0, 0
        for b, (len_q, len_k) in enumerate(case.sequences()):
            rows, keys = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
            own = of_sequence(self.mods, b, rows, keys)
            index = torch.tensor([b], device=self.dlse.device)
            pieces.append(self._piece(
                own, lambda t, rows=rows: t[None, rows], lambda t, keys=keys: t[None, keys],
                self.dlse[None, :, rows], self.value["lse"][None, :, rows], index,
            ))  # fmt: skip
            start_q, start_k = start_q + len_q, start_k + len_k
        return pieces

    def _piece(self, mods, place_q, place_k, dlse, lse, index) -> _Piece:
        group = self.case.num_heads // self.case.num_heads_k
        q, k, v, dout = self.tensors
        q, dout = (place_q(t).transpose(1, 2) for t in (q, dout))
        k, v = (place_k(t).repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
        return _Piece(mods, q, k, v, dout, dlse[..., None], lse[..., None], index, place_q, place_k)

    # ---- variances ----

    def _put_statistics(self, bound: Tensor, piece: _Piece) -> None:
        """``bound`` (b, h, rows, 1) of lse, which row_max shares."""
        for name in ("lse", "row_max"):
            by_row = self.variance[name].transpose(-1, -2)
            piece.place_q(by_row).transpose(1, 2).copy_(bound[..., 0])

    def _add_without_keys(self, piece: _Piece) -> None:
        """Nothing but sinks: lse is the sink, and dsinks the sum of dlse."""
        self._put_statistics(FP32 * piece.lse.abs().masked_fill(piece.lse.isinf(), 0), piece)
        if "dsinks" in self.value:
            self.variance["dsinks"] += (FP32 * piece.dlse.abs()).sum((0, 2, 3)) ** 2

    def _add(self, piece: _Piece) -> None:
        case, mods = self.case, piece.mods
        u, floor, scale = self.u, self.floor, case.effective_scale
        q, k, v, dout = piece.q, piece.k, piece.v, piece.dout
        (batch, heads, rows, _), keys = q.shape, k.shape[2]
        visible = _visible(case.spec, mods, rows, keys, q.device).expand(batch, heads, rows, keys)
        terms = _score_terms(mods, rows, keys, q.device)
        terms = q.new_zeros(1, 1, 1, 1) if terms is None else terms
        visible = visible & terms.isfinite()
        terms = terms.masked_fill(terms.isinf(), 0)
        kept = _kept(mods, piece.batch, heads, rows, keys)
        keep = q.new_ones(1, 1, 1, 1) if kept is None else kept
        keep_factor = float(keep.max()) if keep.numel() else 1.0

        raw = scale * (q @ k.mT)
        capped = torch.tanh(raw / mods.softcap) if mods.softcap else None
        slope = torch.ones_like(raw) if capped is None else 1 - capped**2
        scores = raw if capped is None else mods.softcap * capped
        lse = piece.lse.masked_fill(piece.lse.isinf(), 0)
        p = torch.exp(scores + terms - lse).masked_fill(~visible, 0)
        w = p * keep

        size = abs(scale) * (q.abs() @ k.abs().mT)
        slope_error = CAP_ERROR
        if mods.softcap:  # an error of the product arrives as much smaller as the cap is flat there
            wrong = 2.0**-21 * size
            steepest = 1 - torch.tanh((raw.abs() - 8 * wrong).clamp(min=0) / mods.softcap) ** 2
            size = torch.minimum(size * steepest, torch.full_like(size, 2.0**22 * mods.softcap))
            slope_error = CAP_ERROR + (2 * wrong / mods.softcap * steepest).clamp(max=1)
        reach = size.masked_fill(~visible, 0).amax(-1, keepdim=True)
        added = (terms.abs() * visible).amax(-1, keepdim=True)
        cap_error = CAP_ERROR * min(mods.softcap, CAP_FINE) + (2e-6 * reach if mods.softcap > CAP_FINE else 0)
        tilt = 2.0**-21 * reach + FP32 * added + 2.0**-23 * lse.abs() + cap_error
        bound = 3e-6 * reach.clamp(min=1) + FP32 * added + 2.0**-23 * lse.abs() + cap_error
        seen = visible.double()

        out = w @ v
        out_var = (
            u**2 * (out**2 + w**2 @ v**2)
            + tilt**2 * w.sum(-1, keepdim=True) * (w @ v**2)
            + (keep_factor * floor) ** 2 * (1 + seen @ v**2)
        )
        self._put("out", out_var, piece.place_q)
        self._put_statistics(bound, piece)
        n_rows, n_keys = seen.amax(-1).sum(-1), seen.amax(-2).sum(-1)
        self.delta_rows += float(n_rows.sum())
        group = heads // case.num_heads_k
        for name, second, lines in (("out", v, n_rows), ("dq", k, n_rows), ("dk", q, n_keys),
                                    ("dv", dout, n_keys)):  # fmt: skip
            if name in self.counts:
                by_head = _directions(second) * lines
                if name in ("dk", "dv"):
                    by_head = by_head.unflatten(1, (-1, group)).amin(2)
                self.counts[name] += float(by_head.sum())

        delta = (dout * out).sum(-1, keepdim=True) - piece.dlse
        delta_var = (dout**2 * out_var).sum(-1, keepdim=True) + (FP32 * delta) ** 2
        dp = keep * (dout @ v.mT) - delta
        ds = p * dp
        # What is subtracted in dS may be much larger than the difference.
        terms_of_ds = FP32 * p * (keep * (dout.abs() @ v.abs().mT) + delta.abs())
        if "dq" in self.value:
            psc = p * slope
            lost = seen * (floor**2 + WEIGHT_FLUSH**2 * dp**2)
            ds_var = (u**2 + tilt**2) * (ds * slope) ** 2 + lost + terms_of_ds**2 + (slope_error * ds) ** 2
            by_delta = scale**2 * delta_var * (psc @ k) ** 2
            self._put("dq", scale**2 * (ds_var @ k**2) + by_delta, piece.place_q)
            self.by_delta["dq"] += float(by_delta.sum())
            by_delta = scale**2 * ((delta_var * psc**2).mT @ q**2)
            self._put("dk", self._groups(scale**2 * (ds_var.mT @ q**2) + by_delta), piece.place_k)
            self.by_delta["dk"] += float(by_delta.sum())
            lost = (keep_factor * max(floor, WEIGHT_FLUSH)) ** 2 * seen
            self._put("dv", self._groups(((u**2 + tilt**2) * w**2 + lost).mT @ dout**2), piece.place_k)

        fp32 = terms_of_ds + tilt * ds.abs()  # of each term
        if "dbias" in self.value:
            self._add_bias(p, delta_var, fp32, ds, piece)
        if "dtable" in self.value:
            self._add_table(p, delta_var, fp32 + FP32 * ds.abs())
        if "dslopes" in self.value:
            shift = 0 if mods.top_left else keys - rows
            row, key = (torch.arange(n, device=q.device) for n in (rows, keys))
            distance = (row[:, None] + shift - key).abs().double()
            variance = (delta_var[..., 0] * (p * distance).sum(-1) ** 2).sum(-1)
            variance = variance + ((fp32 + FP32 * ds.abs()) * distance).sum((-2, -1)) ** 2
            mine = self.variance["dslopes"]
            if mine.dim() == 1:
                mine += variance.sum(0)
            else:
                mine[piece.batch] += variance
        if "dsinks" in self.value:
            weight = torch.exp(mods.sinks[:, None, None] - lse)
            size = weight * delta.abs()
            variance = (weight**2 * delta_var).sum((0, 2, 3)) + ((tilt + FP32) * size).sum((0, 2, 3)) ** 2
            self.variance["dsinks"] += variance

    def _add_bias(self, p: Tensor, delta_var: Tensor, fp32: Tensor, ds: Tensor, piece: _Piece) -> None:
        mine = self.variance["dbias"]
        mine = mine.view((1,) * (4 - mine.dim()) + tuple(mine.shape))
        fp32 = fp32 + FP32 * ds.abs()
        if mine.shape[3] == 1:
            by_delta, fp32 = (delta_var * p.sum(-1, keepdim=True) ** 2), fp32.sum(-1, keepdim=True)
        else:
            by_delta = delta_var * p**2
        for dim in (0, 1, 2):
            if mine.shape[dim] == 1:
                by_delta, fp32 = by_delta.sum(dim, keepdim=True), fp32.sum(dim, keepdim=True)
        variance = by_delta + fp32**2
        if mine.shape[0] > 1:
            mine = mine[int(piece.batch[0]) : int(piece.batch[-1]) + 1]
        rows, cols = (min(mine.shape[dim], variance.shape[dim]) for dim in (2, 3))
        mine[:, :, :rows, :cols] += variance[:, :, :rows, :cols]

    def _add_table(self, p: Tensor, delta_var: Tensor, fp32: Tensor) -> None:
        mine = self.variance["dtable"]
        index = self.x.entries(*p.shape[2:]).expand(p.shape)
        zeros = p.new_zeros(*p.shape[:3], mine.shape[1])
        by_row = zeros.scatter_add(3, index, p)  # an error of delta is one for all keys of a row
        variance = (delta_var * by_row**2).sum((0, 2))
        summed = zeros.scatter_add(3, index, fp32).sum((0, 2))
        if mine.shape[0] == 1:
            variance, summed = variance.sum(0, keepdim=True), summed.sum(0, keepdim=True)
        mine += variance + summed**2

    def _groups(self, t: Tensor) -> Tensor:
        return t.unflatten(1, (self.case.num_heads_k, -1)).sum(2)

    def _put(self, name: str, variance: Tensor, place: Callable[[Tensor], Tensor]) -> None:
        place(self.variance[name]).copy_(variance.transpose(1, 2))
