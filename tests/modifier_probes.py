"""Exact probes of calls with modifiers: inputs whose right answer follows from what the modifiers mean.

They are the probes of ``probes.py`` for masks, biases, slopes, sinks, softcap and dropout; which stands for
what is a table in docs/testing.md. With q = 0 a softcap leaves 0, so a score is what is added to it, and with
v = I the weights themselves stand in out: every weight of every pair is looked at, not a sum of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_ext._ops.modifiers import Modifiers
from tests import compare
from tests.cases import Case
from tests.harness import Target, call, naming
from tests.inputs import Inputs, make_inputs
from tests.modifier_truth import CAP_ERROR, CAP_FINE
from tests.probes import _assert_moved
from tests.probes import _check as check
from tests.reference import _kept, _score_terms, _visible, of_sequence

FP32 = 4e-6  # relative error of a weight by fp32 arithmetic, for scores of size 1; it grows with them
# Two roundings to subnormal numbers of fp16, doubled; and what bf16 keeps above where ex2.approx.ftz gives 0.
FLOOR = {torch.float16: 2.0**-23, torch.bfloat16: 2.0**-120}


@dataclass(frozen=True)
class Part:
    """One sequence: its rows and keys among all, and by (num_heads, row, key) what q = 0 leaves of a call.

    visible: masks, and a bias of -inf. terms: what is added to a score, 0 where it is hidden. keep: the
    factor of dropout. sinks: (num_heads, 1, 1), -inf without. cap_error: what a softcap makes of 0 at worst.
    All tensors but the first are float64.
    """

    rows: slice
    keys: slice
    visible: Tensor
    terms: Tensor
    keep: Tensor
    sinks: Tensor
    cap_error: float

    @property
    def lse(self) -> Tensor:
        """(num_heads, rows, 1), -inf where there is neither key nor sink."""
        scores = self.terms.masked_fill(~self.visible, -math.inf)
        sinks = self.sinks.expand(*scores.shape[:2], 1)
        return torch.cat([scores, sinks], -1).logsumexp(-1, keepdim=True)

    @property
    def weights(self) -> Tensor:
        """After the softmax, before dropout."""
        lse = self.lse.masked_fill(self.lse == -math.inf, 0)
        return torch.exp(self.terms - lse).masked_fill(~self.visible, 0)

    @property
    def size(self) -> float:
        """Of the largest score."""
        sinks = self.sinks[self.sinks.isfinite()]
        return max(float(t.abs().max()) if t.numel() else 0.0 for t in (self.terms, sinks))

    @property
    def score_error(self) -> float:
        """Of fp32 arithmetic, absolute."""
        return 2.0**-21 * self.size + self.cap_error

    @property
    def weight_error(self) -> float:
        """Of fp32 arithmetic, relative."""
        return FP32 * (1 + self.size) + self.cap_error


def parts_of(x: Inputs) -> list[Part]:
    """What every sequence of a case sees and adds."""
    case, mods = x.case, x.meaning({})
    device, heads = x.q.device, case.num_heads
    found, start_q, start_k = [], 0, 0
    for b, (len_q, len_k) in enumerate(case.sequences()):
        rows, keys = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
        own = of_sequence(mods, b, rows, keys) if case.is_packed else of_sequence(mods, b)
        grid = (1, heads, len_q, len_k)
        visible = _visible(case.spec, own, len_q, len_k, device).expand(grid)
        terms = _score_terms(own, len_q, len_k, device)
        terms = torch.zeros(grid, dtype=torch.float64, device=device) if terms is None else terms.expand(grid)
        keep = _kept(own, torch.tensor([b], device=device), heads, len_q, len_k)
        visible = visible & terms.isfinite()
        found.append(Part(
            rows, keys, visible[0], terms.masked_fill(~visible, 0)[0],
            torch.ones_like(terms)[0] if keep is None else keep[0], _sinks_of(own, heads, device),
            CAP_ERROR * min(own.softcap, CAP_FINE),
        ))  # fmt: skip
        start_q, start_k = start_q + len_q, start_k + len_k
    return found


def _sinks_of(mods: Modifiers, heads: int, device: torch.device) -> Tensor:
    if mods.sinks is None:
        return torch.full((heads, 1, 1), -math.inf, dtype=torch.float64, device=device)
    return mods.sinks.double()[:, None, None]


def flat(x: Inputs, t: Tensor) -> Tensor:
    """(rows of all sequences, heads, features), a view."""
    return t if x.case.is_packed else t.flatten(0, 1)


def flat_statistic(x: Inputs, t: Tensor) -> Tensor:
    """(rows of all sequences, heads) of lse or row_max."""
    return t.T if x.case.is_packed else t.transpose(1, 2).flatten(0, 1)


def _close(what: str, got: Tensor, expected: Tensor, allowed: Tensor) -> None:
    """NaN is never close."""
    got = got.double()
    check(what, ~((got - expected).abs() <= allowed) & (got != expected), got, expected)


def _units(x: Inputs, like: Tensor, spans: list[slice], first: int) -> Tensor:
    """Row first + c of every sequence is the c-th unit vector, in all heads; the others are 0."""
    t = torch.zeros_like(like)
    for span in spans:
        end = min(first + t.shape[-1], span.stop - span.start)
        here = torch.arange(first, max(first, end), device=t.device)
        flat(x, t)[span.start + here, :, here - first] = 1
    return t


# ---- forward ---------------------------------------------------------------------------------------------


def count_probe(case: Case, target: Target) -> None:
    """q = 0 and masks: lse is the logarithm of the number of visible keys; rows without any give 0 and -inf.

    With what is added to scores: lse and row_max are those of the added numbers and the sink.
    """
    with naming(case, target):
        x = make_inputs(case.replace(data="zero_q"), target.device)
        out, lse, row_max = call(x, target)
        out, lse, row_max = flat(x, out), flat_statistic(x, lse), flat_statistic(x, row_max)
        for part in parts_of(x):
            wanted, got = part.lse[..., 0].T, lse[part.rows]
            n = part.visible.sum(-1).T
            limit = compare.COUNT_LSE_GATE + part.score_error
            wrong = ~((got.double() - wanted).abs() <= limit) & (got != wanted)
            check("lse", wrong, got.double().exp(), n)
            leak = (n == 0) & (out[part.rows] != 0).any(-1)
            check("out of rows that see nothing", leak, out[part.rows].amax(-1), n)
            scores = part.terms.masked_fill(~part.visible, -math.inf)
            largest = scores.amax(-1).T if scores.shape[-1] else torch.full_like(wanted, -math.inf)
            got = row_max[part.rows]
            wrong = ~((got.double() - largest).abs() <= part.score_error) & (got != largest)
            check("row_max", wrong, got, n)


def mask_probe(case: Case, target: Target) -> None:
    """q = 0, v = I on as many keys at a time as v has columns: out is not 0 just where a key is visible."""
    with naming(case, target):
        x = make_inputs(case.replace(data="zero_q"), target.device)
        for first, got, part in _seen_through_v(x, target):
            wanted = part.visible[..., first : first + got.shape[-1]].transpose(0, 1)
            check(f"keys from {first} on", (got != 0) != wanted, got, wanted)


def _seen_through_v(x: Inputs, target: Target) -> Iterator[tuple[int, Tensor, Part]]:
    """By sequence and stretch of keys from ``first`` on: (rows, heads, keys) of the weights in out."""
    parts, width = parts_of(x), x.case.dim_v
    for first in range(0, max((p.visible.shape[2] for p in parts), default=0), width):
        v = _units(x, x.v, [p.keys for p in parts], first)
        out = flat(x, call(x, target, [x.q, x.k, v])[0])
        for part in parts:
            keys = min(width, max(part.visible.shape[2] - first, 0))
            yield first, out[part.rows, :, :keys], part


def weights_probe(case: Case, target: Target) -> None:
    """q = 0, v = I: out is the matrix of weights, exactly 0 where a key is hidden or dropped.

    With dout = I they stand in dv, too, as the backward forms them again.
    """
    with naming(case, target):
        x = make_inputs(case.replace(data="zero_q"), target.device)
        group = case.num_heads // case.num_heads_k
        for first, got, part in _seen_through_v(x, target):
            wanted = (part.weights * part.keep)[..., first : first + got.shape[-1]].transpose(0, 1)
            _close(f"weights of keys from {first} on", got, wanted, _allowed(x, wanted, part))
        if not case.backward or case.needs != ("qkv", "mods"):
            return
        parts, width = parts_of(x), case.dim_v
        v = x.v.detach().requires_grad_()
        out = call(x, target, [x.q, x.k, v])[0]
        for first in range(0, max((p.visible.shape[1] for p in parts), default=0), width):
            dout = _units(x, x.dout, [p.rows for p in parts], first)
            dv = flat(x, torch.autograd.grad(out, v, dout, retain_graph=True)[0])
            for part in parts:
                by_key = (part.weights * part.keep)[:, first : first + width].transpose(0, 2)
                wanted = by_key.unflatten(2, (-1, group)).sum(-1).transpose(1, 2)  # (keys, key heads, rows)
                got = dv[part.keys, :, : wanted.shape[-1]]
                allowed = group * _allowed(x, wanted, part)
                _close(f"weights of rows from {first} on, in dv", got, wanted, allowed)


def _allowed(x: Inputs, weights: Tensor, part: Part) -> Tensor:
    """P and the result are rounded; where a weight is exactly 0 nothing is allowed."""
    u, floor = (table[x.case.torch_dtype] for table in (compare.UNIT_ROUNDOFF, FLOOR))
    keep = float(part.keep.max()) if part.keep.numel() else 1.0
    return ((2.1 * u + part.weight_error) * weights + keep * floor) * (weights != 0)


def integer_probe(case: Case, target: Target) -> None:
    """q = 0 and small whole v: where a power of two of keys is visible, out is the rounded mean, bitwise.

    Only masks, and dropout of one half, which doubles what it keeps.
    """
    with naming(case, target):
        x = make_inputs(case.replace(data="zero_q"), target.device)
        random = torch.Generator().manual_seed(case.seed)
        whole = torch.randint(-4, 5, x.v.shape, generator=random)
        v = whole.to(x.v)
        out = flat(x, call(x, target, [x.q, x.k, v])[0])
        group = case.num_heads // case.num_heads_k
        for part in parts_of(x):
            n = part.visible.sum(-1, keepdim=True)
            values = flat(x, v)[part.keys].repeat_interleave(group, 1).transpose(0, 1).double()
            mean = ((part.visible * part.keep) @ values / n.clamp(min=1)).transpose(0, 1).to(out.dtype)
            exact = ((n > 0) & (n & (n - 1) == 0)).transpose(0, 1)
            check("mean of whole numbers", exact & (out[part.rows] != mean), out[part.rows], mean)


def ones_probe(case: Case, target: Target) -> None:
    """v = 1: what multiplies v and what is summed for the denominator must be the same weights."""
    if case.dropout_p:
        return
    with naming(case, target):
        x = make_inputs(case, target.device)
        out, lse, row_max = call(x, target, [x.q, x.k, torch.ones_like(x.v)])
        out, lse, row_max = flat(x, out), flat_statistic(x, lse).double(), flat_statistic(x, row_max)
        u = compare.UNIT_ROUNDOFF[case.torch_dtype]
        for part in parts_of(x):
            empty = row_max[part.rows] == -math.inf
            share = torch.exp(part.sinks[..., 0].T - lse[part.rows].masked_fill(empty, 0))
            wanted = (1 - share).masked_fill(empty, 0)[..., None].expand_as(out[part.rows])
            limit = (1.01 if "sinks" not in case.mods else 2.1) * u
            _close("out of ones", out[part.rows], wanted, limit * wanted + 1e-4 * (share[..., None] > 0))


def needle_probe(case: Case, target: Target) -> None:
    """Row i asks loudly for key (i * step) % seqlen_k, with three steps.

    If the key is visible out is its value, up to what the others weigh and times what dropout makes of it;
    if it is hidden its large logit leaves no trace in row_max. Keys to which a bias or a slope adds much less
    than to another are not heard.
    """
    with naming(case, target):
        x = make_inputs(case, target.device)
        generator = torch.Generator().manual_seed(case.seed)
        scale = 1 / math.sqrt(case.head_dim)
        sign = torch.randint(0, 2, x.k.shape, generator=generator) * 2 - 1
        k = sign.to(x.k)
        v = torch.randn(x.v.shape, generator=generator).to(x.v)
        group = case.num_heads // case.num_heads_k
        logit, softcap = 4 * math.sqrt(case.head_dim), x.meaning({}).softcap
        logit = softcap * math.tanh(logit / softcap) if softcap else logit
        u = compare.UNIT_ROUNDOFF[case.torch_dtype]
        parts = [part for part in parts_of(x) if part.visible.numel()]
        for step in (1, 7, 31):
            q = torch.zeros_like(x.q)
            asked = []
            for part in parts:
                rows, keys = part.visible.shape[1:]
                asked.append((torch.arange(rows, device=q.device) * step) % keys)
                flat(x, q)[part.rows] = 4 * flat(x, k)[part.keys][asked[-1]].repeat_interleave(group, 1)
            out, _, row_max = call(x, target, [q, k, v], scale=scale)
            out, row_max = flat(x, out), flat_statistic(x, row_max)
            for part, wanted in zip(parts, asked):
                index = wanted.expand(case.num_heads, -1)[..., None]
                sees = part.visible.gather(2, index)[..., 0].T
                least = part.terms.masked_fill(~part.visible, -math.inf).amax(-1).T - 6
                heard = sees & (part.terms.gather(2, index)[..., 0].T >= least)
                hidden = ~sees & (row_max[part.rows] > 0.75 * logit + part.size)
                check("a hidden key's logit", hidden, row_max[part.rows], sees)
                value = flat(x, v)[part.keys][wanted].repeat_interleave(group, 1).double()
                keep = part.keep.gather(2, index).transpose(0, 1)
                error = (out[part.rows].double() - keep * value).abs()
                most = float(part.keep.max())
                wrong = heard & (error > 2 * u * keep * value.abs() + most * u).any(-1)
                check("a visible key's value", wrong, out[part.rows].amax(-1), sees)


# ---- forward and backward --------------------------------------------------------------------------------


def sparse_dout_probe(case: Case, target: Target) -> None:
    """dout on single rows: dk and dv are exactly 0 at keys the row does not see, and dv is not elsewhere.

    What dropout drops has no dv either.
    """
    with naming(case, target):
        x = make_inputs(case, target.device)
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        out = call(x, target, [q, k, v])[0]
        part = max(parts_of(x), key=lambda part: part.visible.shape[1])
        group, len_q = case.num_heads // case.num_heads_k, part.visible.shape[1]
        for row in sorted({0, len_q // 3, len_q // 2, len_q - 1}):
            dout = torch.zeros_like(out)
            flat(x, dout)[part.rows.start + row] = 8
            dq, dk, dv = torch.autograd.grad(out, [q, k, v], dout, retain_graph=True)
            for name, grad, seen in (
                ("dk", dk, part.visible), ("dv", dv, part.visible & (part.keep > 0)),
            ):  # fmt: skip
                size = flat(x, grad).abs().amax(-1).T
                by_key = torch.zeros_like(size, dtype=torch.bool)
                by_key[:, part.keys] = seen[:, row].unflatten(0, (-1, group)).any(1)
                check(f"row {row}: {name} of a hidden key", ~by_key & (size != 0), size, by_key)
                adds = any(m.startswith(("alibi", "bias", "distance")) for m in case.mods)
                certain = name == "dv" and not adds
                check(f"row {row}: {name} of a key", by_key & (size == 0) & certain, size, by_key)
            others = flat(x, dq).clone()
            others[part.rows.start + row] = 0
            assert not others.any(), f"row {row}: dq of another row is not 0"


def shift_probe(case: Case, target: Target) -> None:
    """bias + c, with a power of two (or 0) of its own for every row and head that the bias tells apart.

    lse and row_max move by c, out and all gradients only by rounding. The sums are exact in every type. A
    sink moves by the c of its head, which is then one number.
    """
    with naming(case, target):
        x = make_inputs(case, target.device)
        tensors = {c.part: c.tensor for c in x.choices}
        bias, sinks = tensors["bias"], tensors.get("sinks")
        base = ((bias * 16).round() / 16).clamp(min=-3, max=3).masked_fill(bias == -math.inf, -math.inf)
        bias.copy_(base)
        before = _everything(x, target)
        c = _shifts(base, case.seed, by_head_only=sinks is not None)
        bias.copy_(base + c)
        if sinks is not None:
            sinks.add_(c.flatten())
        after = _everything(x, target)
        u = compare.UNIT_ROUNDOFF[case.torch_dtype]
        logit = compare.max_abs_logit(x.q, x.k, case.effective_scale)
        limit = 2 * compare.LSE_GATE[torch.float32] * max(1.0, logit) + 2.0**-20 * 16
        c = c.reshape((1,) * (4 - c.dim()) + tuple(c.shape)).double()
        for b, part in enumerate(parts_of(x)):
            rows = c[min(b, len(c) - 1), ..., 0]
            rows = rows[:, : part.visible.shape[1]].expand(case.num_heads, part.visible.shape[1]).T
            for name in ("lse", "row_max"):
                was, now = (flat_statistic(x, t[name])[part.rows].double() for t in (before, after))
                _close(f"{name} of a shifted bias", now, was + rows, torch.full_like(was, limit))
        for name in before.keys() - {"lse", "row_max"}:
            gate = compare.GATES[case.torch_dtype]["out"]
            errors = compare.measure(after[name], before[name].double())
            near = errors.rel_l2 <= 2 * 0.85 * u and (name != "out" or errors.worst_row <= 2 * gate.worst_row)
            assert near, f"{name} of a shifted bias: {errors}"


def _shifts(base: Tensor, seed: int, by_head_only: bool) -> Tensor:
    """0, +-1, +-2, +-4 or +-8, of the size of the bias but for a single key; or (num_heads|1, 1, 1)."""
    shape = (base.shape[-3] if base.dim() > 2 else 1, 1, 1) if by_head_only else (*base.shape[:-1], 1)
    random = torch.Generator().manual_seed(seed)
    powers = torch.tensor([-8.0, -4, -2, -1, 0, 1, 2, 4, 8])
    return powers[torch.randint(9, shape, generator=random)].to(base)


def _everything(x: Inputs, target: Target, scale: float = 1.0, **changes: Any) -> dict[str, Tensor]:
    """out, lse, row_max and all gradients for ``scale`` times dout and dlse."""
    qkv = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    leaves = {name: t.requires_grad_() for name, t in x.leaves().items()}
    out, lse, row_max = call(x, target, qkv, **x.keywords(leaves), **changes)
    found = {"out": out.detach(), "lse": lse.detach(), "row_max": row_max}
    if not x.case.backward:
        return found
    outputs, gradients = [out], [x.dout * scale]
    if x.dlse is not None:
        outputs, gradients = [*outputs, lse], [*gradients, x.dlse * scale]
    wanted = dict(zip(("dq", "dk", "dv"), qkv)) | {f"d {name}": t for name, t in leaves.items()}
    return found | dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), gradients)))


def scaling_probe(case: Case, target: Target) -> None:
    """Powers of two pass through exactly, in bf16: v, q against the scale, and dout through all gradients."""
    with naming(case, target):
        case = case.replace(dtype="bf16")  # no subnormal numbers, whose roundings do not scale
        x = make_inputs(case, target.device)
        q, k, v = x.q, x.k, x.v
        out, lse, _ = call(x, target)
        compare.assert_exact("out with v * 8", call(x, target, [q, k, v * 8])[0], out * 8)
        scaled = call(x, target, [q * 4, k, v], scale=case.effective_scale / 4)
        compare.assert_exact("out with q * 4 and scale / 4", scaled[0], out)
        compare.assert_exact("lse with q * 4 and scale / 4", scaled[1], lse)
        once, eightfold = _everything(x, target), _everything(x, target, scale=8.0)
        for name in once.keys() - {"out", "lse", "row_max"}:
            if name != "dq" or case.deterministic:
                compare.assert_exact(f"{name} with dout * 8", eightfold[name], once[name] * 8)


def dlse_probe(case: Case, target: Target) -> None:
    """q = 0, dout = 0, whole numbers for dlse: gradients of bias, slopes and sinks are sums of known weights.

    dS = P dlse, and no 16-bit number is on the way, so the sums over broadcast dimensions are exact to fp32.
    """
    with naming(case, target):
        x = make_inputs(case.replace(data="zero_q"), target.device)
        leaves = {name: t.requires_grad_() for name, t in x.leaves().items()}
        out, lse, _ = call(x, target, **x.keywords(leaves))
        random = torch.Generator().manual_seed(case.seed)
        dlse = torch.randint(-4, 5, lse.shape, generator=random).to(lse)
        grads = torch.autograd.grad([out, lse], list(leaves.values()), [torch.zeros_like(out), dlse])
        wanted, allowed = _sums(x, flat_statistic(x, dlse).double(), leaves)
        for name, grad in zip(leaves, grads):
            unit = 0 if grad.dtype == torch.float32 else compare.UNIT_ROUNDOFF[grad.dtype]
            floor = FLOOR.get(grad.dtype, 1e-30)
            limit = allowed[name] + unit * wanted[name].abs() + floor
            _close(f"gradient of {name}", grad, wanted[name], limit)


def _sums(x: Inputs, dlse: Tensor, leaves: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By leaf the gradient for dS = P dlse, dlse (rows, heads), and by how much the sum may be off."""
    top_left = x.meaning({}).top_left
    wanted, allowed = (
        {name: torch.zeros_like(t, dtype=torch.float64) for name, t in leaves.items()} for _ in range(2)
    )
    for b, part in enumerate(parts_of(x)):
        by_row = dlse[part.rows].T[..., None]  # (num_heads, rows, 1)
        rows, keys = part.visible.shape[1:]
        centre = torch.arange(rows, device=dlse.device)[:, None] + (0 if top_left else keys - rows)
        distance = (centre - torch.arange(keys, device=dlse.device)).abs()
        ds = part.weights * by_row
        lse = part.lse.masked_fill(part.lse == -math.inf, 0)
        sink_weights = torch.exp(part.sinks - lse)
        terms = {"bias": ds, "slopes": -ds * distance, "sinks": sink_weights * by_row}
        for name in leaves.keys() & terms.keys():
            add = _add_to_bias if name == "bias" else _add_by_head
            add(wanted[name], b, terms[name])
            add(allowed[name], b, part.weight_error * terms[name].abs())
        if "position" in leaves:
            entries = x.entries(rows, keys)
            _add_to_table(wanted["position"], entries, ds)
            _add_to_table(allowed["position"], entries, part.weight_error * ds.abs())
    return wanted, allowed


def _add_by_head(sums: Tensor, b: int, terms: Tensor) -> None:
    """``sums`` (num_heads,) or (batch, num_heads), ``terms`` (num_heads, rows, keys) of sequence ``b``."""
    (sums if sums.dim() == 1 else sums[b]).add_(terms.sum((1, 2)))


def _add_to_table(sums: Tensor, entries: Tensor, terms: Tensor) -> None:
    """``sums`` (num_heads|1, entries), ``entries`` (rows, keys): which one a pair reads."""
    by_entry = terms.new_zeros(terms.shape[0], sums.shape[1])
    by_entry.index_add_(1, entries.flatten(), terms.flatten(1))
    sums += by_entry.sum_to_size(sums.shape)


def _add_to_bias(sums: Tensor, b: int, terms: Tensor) -> None:
    """``sums`` has the shape of a bias; packed ones may end before or behind a sequence."""
    sums = sums.view((1,) * (4 - sums.dim()) + tuple(sums.shape))
    sums = sums[min(b, len(sums) - 1)]
    terms = terms[:, : terms.shape[1] if sums.shape[1] == 1 else sums.shape[1]]
    terms = terms[:, :, : terms.shape[2] if sums.shape[2] == 1 else sums.shape[2]]
    rows, keys = (1 if n == 1 else have for n, have in zip(sums.shape[1:], terms.shape[1:]))
    if terms.numel():
        sums[:, :rows, :keys] += terms.sum_to_size(sums.shape[0], rows, keys)


# ---- permutations ----------------------------------------------------------------------------------------


def permute_probe(case: Case, target: Target) -> None:
    """Dense: key heads with their query heads, or batch entries, in another order give the same bits in it.

    Not for dropout, whose draws belong to a place.
    """
    with naming(case, target):
        group = case.num_heads // case.num_heads_k
        for which, size in (("heads", case.num_heads_k), ("batch", case.batch)):
            order = torch.arange(size).roll(1)  # nothing stays in its place
            order_q = (order[:, None] * group + torch.arange(group)).flatten() if which == "heads" else order
            dim = 2 if which == "heads" else 0
            x = make_inputs(case, target.device)
            before = _everything(x, target)
            for c in x.choices:
                if c.tensor is not None:
                    _reorder(c.tensor, _dim_of(c.part, which), order_q)
            for t, own in ((x.q, order_q), (x.dout, order_q), (x.k, order), (x.v, order)):
                _reorder(t, -2 if which == "heads" else -4, own)
            if x.dlse is not None:
                _reorder(x.dlse, -2 if which == "heads" else -3, order_q)
            after = _everything(x, target)
            names = {"out", "lse", "row_max", "dk", "dv", *(["dq"] if case.deterministic else [])}
            for name in sorted(after.keys() & names):
                own = order if name in ("dk", "dv") else order_q
                by = (1 if which == "heads" else 0) if name in ("lse", "row_max") else dim
                _assert_moved(f"{name}, {which} in another order", after[name], before[name].index_select(
                    by, own.to(before[name].device)))  # fmt: skip


def _dim_of(part: str, which: str) -> int | None:
    """The dimension, from the right, in which a modifier tells heads or batch entries apart."""
    if part in ("bias", "mask", "blocks", "hidden_rows", "hidden_keys"):
        return -3 if which == "heads" else -4
    by_head, by_batch = {
        "position": (-2, None), "slopes": (-1, -2), "sinks": (-1, None), "keys": (None, -2),
        "prefix_lens": (None, -1),
    }[part]  # fmt: skip
    return by_head if which == "heads" else by_batch


def _reorder(t: Tensor, dim: int | None, order: Tensor) -> None:
    """In place, where there is something to reorder."""
    if dim is not None and t.dim() >= -dim and t.shape[dim] > 1:
        t.copy_(t.index_select(dim, order.to(t.device)))
