"""Exact probes: inputs whose right answer is known without a reference, so that one wrong key cannot hide.

A tolerance that suits rounding lets a kernel lose the newest key of 8192. A probe does not: with q = 0 the
lse is the logarithm of how many keys a row sees, and one key more or less moves it a hundred times further
than rounding.

Every probe takes a case without modifiers (shape, heads, mask, packing and dtype are used; its data kind,
layout and scale are not) and a target, and raises CaseFailure. ``probe_case`` runs those that fit a case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_ext._ops.spec import AttnSpec
from tests import compare
from tests.cases import Case
from tests.harness import Target, naming
from tests.reference import visible_interval

Probe = Callable[[Case, Target], None]


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, cu_q: Tensor | None, cu_k: Tensor | None, case: Case,
    target: Target,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) straight from the operator."""
    return torch.ops.flash_ext.fwd(q, k, v, cu_q, cu_k, *_options(spec, case, target))


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttnSpec,
    cu_q: Tensor | None, cu_k: Tensor | None, case: Case, target: Target,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) straight from the operator."""
    options = _options(spec, case, target)
    return torch.ops.flash_ext.bwd(dout, q, k, v, out, lse, None, cu_q, cu_k, *options)


def _options(spec: AttnSpec, case: Case, target: Target) -> tuple:
    window = spec.window_left, spec.window_right
    return 0, 0, spec.scale, *window, case.deterministic, target.choice


def _probe(check: Probe) -> Probe:
    """Its failures name the case, and the scale is the default one."""

    @functools.wraps(check)
    def run(case: Case, target: Target) -> None:
        with naming(case, target):
            check(case.replace(scale=None), target)

    return run


@dataclass
class _Rows:
    """All sequences of a case side by side: tensors (total, heads, features), whether it is packed or dense.

    lo, hi: (total_q, 1) int64, the keys each row sees as rows of the key tensor; both 0 in tail rows.
    sequence_start, sequence_len: (total_k, 1) int64, first key and length of each key's sequence.
    """

    case: Case
    target: Target
    generator: torch.Generator

    def __init__(self, case: Case, target: Target):
        self.case, self.target, self.device = case, target, target.device
        self.generator = torch.Generator(self.device).manual_seed(case.seed)
        self.bounds: list[tuple[int, int, int, int]] = []  # start and length of queries, then of keys
        intervals, starts, start_q, start_k = [], [], 0, 0
        for len_q, len_k in case.sequences():
            self.bounds.append((start_q, len_q, start_k, len_k))
            seen = [visible_interval(case.spec, row, len_q, len_k) for row in range(len_q)]
            intervals += [(start_k + lo, start_k + max(lo, hi)) for lo, hi in seen]
            starts += [(start_k, len_k)] * len_k
            start_q, start_k = start_q + len_q, start_k + len_k
        tail = case.tail if case.is_packed else 0
        self.total_q, self.total_k = start_q + tail, start_k + tail
        intervals += [(0, 0)] * tail
        starts += [(start_k, tail)] * tail
        self.lo, self.hi = self._columns(intervals)
        self.sequence_start, self.sequence_len = self._columns(starts)

    def _columns(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        table = torch.tensor(pairs, dtype=torch.int64, device=self.device).reshape(-1, 2)
        return table[:, :1], table[:, 1:]

    @property
    def count(self) -> Tensor:
        """(total_q, 1) number of keys each row sees."""
        return self.hi - self.lo

    @property
    def shape_q(self) -> tuple[int, int, int]:
        return self.total_q, self.case.num_heads, self.case.head_dim

    @property
    def shape_k(self) -> tuple[int, int, int]:
        return self.total_k, self.case.num_heads_k, self.case.head_dim

    @property
    def shape_v(self) -> tuple[int, int, int]:
        return self.total_k, self.case.num_heads_k, self.case.dim_v

    @property
    def shape_out(self) -> tuple[int, int, int]:
        return self.total_q, self.case.num_heads, self.case.dim_v

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return self._cast(torch.randn(shape, device=self.device, generator=self.generator))

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Values in [1, 2): products with weights that sum to 1 stay there, far from subnormal numbers."""
        return self._cast(1 + torch.rand(shape, device=self.device, generator=self.generator) * 0.99)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """Whole numbers low..high, both included."""
        return self._cast(torch.randint(low, high + 1, shape, device=self.device, generator=self.generator))

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.case.torch_dtype)

    def repeat_group(self, x: Tensor) -> Tensor:
        """(rows, num_heads_k, features) -> (rows, num_heads, features), as query heads read key heads."""
        return x.repeat_interleave(self.case.num_heads // self.case.num_heads_k, dim=1)

    def run(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse) as (total_q, num_heads, dim_v) and (total_q, num_heads)."""
        q, k, v = self._shaped(q, True), self._shaped(k, False), self._shaped(v, False)
        out, lse = forward(q, k, v, spec or self.case.spec, *self._cu_seqlens(), self.case, self.target)
        return out.reshape(self.shape_out), self._flat_lse(lse)

    def run_backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) as (total, heads, features)."""
        q, dout = self._shaped(q, True), self._shaped(dout, True)
        k, v = self._shaped(k, False), self._shaped(v, False)
        how = self.case.spec, *self._cu_seqlens(), self.case, self.target
        out, lse = forward(q, k, v, *how)
        dq, dk, dv = backward(dout, q, k, v, out, lse, *how)
        return dq.reshape(self.shape_q), dk.reshape(self.shape_k), dv.reshape(self.shape_v)

    def _shaped(self, x: Tensor, is_query: bool) -> Tensor:
        case = self.case
        if not case.is_packed:
            return x.reshape(case.batch, case.seqlen_q if is_query else case.seqlen_k, *x.shape[1:])
        if case.tail:
            x = x.clone()
            x[-case.tail :] = math.nan
        return x

    def _flat_lse(self, lse: Tensor) -> Tensor:
        return lse.transpose(-1, -2).reshape(self.total_q, self.case.num_heads)

    def _cu_seqlens(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.case.is_packed:
            return None, None
        table = torch.tensor([(0, 0), *((q + nq, k + nk) for q, nq, k, nk in self.bounds)], dtype=torch.int32)
        return tuple(column.contiguous().to(self.device) for column in table.T)


def _check(what: str, wrong: Tensor, got: Tensor, expected: Tensor) -> None:
    """Fails if ``wrong`` is True anywhere; the tensors give the values for the message."""
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        here, wanted = (x.expand_as(wrong)[index].item() for x in (got, expected))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} places are wrong; first at {index}: "
            f"got {here:.9g}, expected {wanted:.9g}"
        )


def _check_close(what: str, got: Tensor, expected: Tensor, relative: float) -> None:
    got, expected = got.double(), expected.double()
    _check(what, ~((got - expected).abs() <= relative * expected.abs()), got, expected)


@_probe
def count(case: Case, target: Target) -> None:
    """q = 0: lse is the logarithm of the number of visible keys; rows without keys give 0 and -inf."""
    rows = _Rows(case, target)
    q = torch.zeros(rows.shape_q, dtype=case.torch_dtype, device=target.device)
    out, lse = rows.run(q, rows.normal(rows.shape_k), rows.normal(rows.shape_v))
    expected = rows.count.double().log().expand_as(lse)
    empty = rows.count == 0
    right = ((lse.double() - expected).abs() <= compare.COUNT_LSE_GATE) | (empty & (lse == expected))
    _check("count probe, lse against ln(visible keys)", ~right, lse, expected)
    leak = empty.unsqueeze(-1) & ~(out == 0)
    _check("count probe, out of rows that see nothing", leak, out, torch.zeros_like(out))


@_probe
def indicator(case: Case, target: Target) -> None:
    """q = 0, column c of v is 1 from key t_c on: out is exactly 0 where no such key is visible."""
    rows = _Rows(case, target)
    place = torch.rand(case.dim_v, device=target.device, generator=rows.generator)
    threshold = rows.sequence_start + (place * (rows.sequence_len + 1)).long()  # (total_k, dim_v) key rows
    key = torch.arange(rows.total_k, device=target.device).unsqueeze(1)
    v = (key >= threshold).to(case.torch_dtype).unsqueeze(1).expand(rows.shape_v)
    q = torch.zeros(rows.shape_q, dtype=case.torch_dtype, device=target.device)
    out, _ = rows.run(q, rows.normal(rows.shape_k), v)

    marked = (key >= threshold).double().cumsum(0)
    marked = torch.cat([marked.new_zeros(1, case.dim_v), marked])
    ones = marked[rows.hi[:, 0]] - marked[rows.lo[:, 0]]
    share = (ones / rows.count.clamp_min(1)).unsqueeze(1)
    _check_close("indicator probe", out, share.expand_as(out), 2 * compare.UNIT_ROUNDOFF[case.torch_dtype])


@_probe
def integer(case: Case, target: Target) -> None:
    """q = 0 and small whole v: where a power of two of keys is visible, out is the rounded mean, bitwise."""
    rows = _Rows(case, target)
    v = rows.integers(-4, 4, rows.shape_v)
    q = torch.zeros(rows.shape_q, dtype=case.torch_dtype, device=target.device)
    out, _ = rows.run(q, rows.normal(rows.shape_k), v)
    total = rows.repeat_group(v.double()).cumsum(0)
    total = torch.cat([total.new_zeros(1, *total.shape[1:]), total])
    n = rows.count
    mean = (total[rows.hi[:, 0]] - total[rows.lo[:, 0]]) / n.clamp_min(1).unsqueeze(-1)
    power_of_two = (n[:, 0] > 0) & (n[:, 0] & (n[:, 0] - 1) == 0)
    compare.assert_exact("integer probe", out[power_of_two], mean[power_of_two].to(out.dtype))


@_probe
def needle(case: Case, target: Target) -> None:
    """Keys are random signs; each row asks loudly for one of them, at or just beyond an edge of its window.

    If that key is visible out is its value; if it is not, its large logit must leave no trace in lse.
    """
    rows = _Rows(case, target)
    spec = AttnSpec(1 / math.sqrt(case.head_dim), *case.effective_window)
    logit = 4 * math.sqrt(case.head_dim)
    k = rows.integers(0, 1, rows.shape_k) * 2 - 1
    v = rows.normal(rows.shape_v)
    left, right = case.effective_window
    offsets = {-left - 1, -left} if left >= 0 else {-3}
    offsets |= {right, right + 1} if right >= 0 else {3}
    key_of_row = torch.full((rows.total_q,), -1, dtype=torch.int64, device=target.device)
    for offset in sorted(offsets):
        for start_q, len_q, start_k, len_k in rows.bounds:
            key = torch.arange(len_q, device=target.device) + len_k - len_q + offset
            inside = (key >= 0) & (key < len_k)
            key_of_row[start_q : start_q + len_q] = torch.where(inside, key + start_k, -1)
        asked = key_of_row >= 0
        q = torch.zeros(rows.shape_q, dtype=case.torch_dtype, device=target.device)
        q[asked] = 4 * rows.repeat_group(k[key_of_row[asked]])
        out, lse = rows.run(q, k, v, spec)

        visible = asked & (key_of_row >= rows.lo[:, 0]) & (key_of_row < rows.hi[:, 0])
        wanted = rows.repeat_group(v[key_of_row[visible]])
        what = f"needle probe, key at offset {offset} from the aligned one"
        # The other keys keep a weight of some 1e-6 between them, which is no fault in float32.
        u = max(compare.UNIT_ROUNDOFF[case.torch_dtype], 2.0**-14)
        error = (out[visible].double() - wanted.double()).abs()
        _check(f"{what}, visible", ~(error <= 2 * u * wanted.abs() + u / 2), out[visible], wanted)
        hidden = lse[asked & ~visible]
        _check(f"{what}, hidden", ~(hidden < 0.75 * logit), hidden, hidden.new_tensor(0.75 * logit))


@_probe
def scaling(case: Case, target: Target) -> None:
    """Powers of two pass through exactly: v * 8 gives out * 8, q * 4 with scale / 4 changes nothing."""
    rows = _Rows(case, target)
    q, k, v = rows.normal(rows.shape_q), rows.normal(rows.shape_k), rows.uniform(rows.shape_v)
    out, lse = rows.run(q, k, v)
    scaled_out, scaled_lse = rows.run(q, k, v * 8)
    compare.assert_exact("scaling probe, out with v * 8", scaled_out, out * 8)
    compare.assert_exact("scaling probe, lse with v * 8", scaled_lse, lse)
    quarter = replace(case.spec, scale=case.spec.scale / 4)
    scaled_out, scaled_lse = rows.run(q * 4, k, v, quarter)
    compare.assert_exact("scaling probe, out with q * 4 and scale / 4", scaled_out, out)
    compare.assert_exact("scaling probe, lse with q * 4 and scale / 4", scaled_lse, lse)


@_probe
def ones(case: Case, target: Target) -> None:
    """v = 1: the weights that multiply v and those summed for the denominator must be the same ones."""
    rows = _Rows(case, target)
    v = torch.ones(rows.shape_v, dtype=case.torch_dtype, device=target.device)
    out, _ = rows.run(rows.normal(rows.shape_q), rows.normal(rows.shape_k), v)
    expected = (rows.count > 0).unsqueeze(-1).expand_as(out).double()
    # Half precision hides the order in which the two sums were formed behind the rounding of out.
    roundings = 1 if case.torch_dtype.itemsize == 2 else 32
    _check_close("ones probe", out, expected, roundings * compare.UNIT_ROUNDOFF[case.torch_dtype])


@_probe
def duplicate(case: Case, target: Target) -> None:
    """Every key and value twice, nothing hidden: the same out, and lse + ln 2."""
    rows = _Rows(case, target)
    twice = case.replace(seqlen_k=2 * case.seqlen_k)
    if case.is_packed:
        twice = case.replace(lens_k=tuple(2 * n for n in case.lens_k))
    rows_twice = _Rows(twice, target)
    q, k, v = rows.normal(rows.shape_q), rows.normal(rows.shape_k), rows.uniform(rows.shape_v)
    spans = [(start, start + n) for _, _, start, n in rows.bounds for _ in range(2)]
    spans.append((sum(n for *_, n in rows.bounds), rows.total_k))  # the tail once
    index = torch.cat([torch.arange(start, end, device=target.device) for start, end in spans])
    out, lse = rows.run(q, k, v)
    out_twice, lse_twice = rows_twice.run(q, k[index], v[index])
    roundings = 2 if case.torch_dtype.itemsize == 2 else 32
    _check_close("duplicate probe, out", out_twice, out, roundings * compare.UNIT_ROUNDOFF[case.torch_dtype])
    largest = compare.max_abs_logit(q, k, case.effective_scale)
    compare.assert_lse(lse_twice, lse.double() + math.log(2.0), largest)


@_probe
def permute_keys(case: Case, target: Target) -> None:
    """Nothing hidden: the order of the keys of a sequence changes out and lse by rounding only."""
    rows = _Rows(case, target)
    q, k, v = rows.normal(rows.shape_q), rows.normal(rows.shape_k), rows.normal(rows.shape_v)
    index = torch.arange(rows.total_k, device=target.device)
    for _, _, start, n in rows.bounds:
        index[start : start + n] = start + torch.randperm(n, device=target.device, generator=rows.generator)
    out, lse = rows.run(q, k, v)
    out_permuted, lse_permuted = rows.run(q, k[index], v[index])
    rel_l2 = compare.measure(out_permuted, out).rel_l2
    limit = 2 * compare.GATES[case.torch_dtype]["out"].rel_l2
    assert rel_l2 <= limit, f"key permutation probe: rel-L2 {rel_l2:.3g} > {limit:.3g}"
    compare.assert_lse(lse_permuted, lse, 2 * compare.max_abs_logit(q, k, case.effective_scale))


@_probe
def permute_heads(case: Case, target: Target) -> None:
    """Key heads in another order, with their query heads: the same bits in that order."""
    rows = _Rows(case, target)
    order_k = torch.arange(case.num_heads_k, device=target.device).roll(1)  # no head stays in its place
    group = case.num_heads // case.num_heads_k
    order_q = (order_k[:, None] * group + torch.arange(group, device=target.device)).flatten()
    index_q = (torch.arange(rows.total_q, device=target.device)[:, None], order_q)
    index_k = (torch.arange(rows.total_k, device=target.device)[:, None], order_k)
    _same_bits("head permutation probe", rows, rows, index_q, index_k)


@_probe
def permute_sequences(case: Case, target: Target) -> None:
    """Batch entries or packed sequences in another order: the same bits in that order."""
    rows = _Rows(case, target)
    order = torch.arange(len(rows.bounds)).roll(1).tolist()  # no sequence stays in its place
    moved = case
    if case.is_packed:
        lens_q, lens_k = (tuple(lens[b] for b in order) for lens in (case.lens_q, case.lens_k))
        moved = case.replace(lens_q=lens_q, lens_k=lens_k)

    def rows_in_order(which: int, total: int) -> tuple[Tensor, Tensor]:
        spans = [rows.bounds[b][which : which + 2] for b in order]
        covered = sum(n for _, n in spans)
        index = [torch.arange(start, start + n, device=target.device) for start, n in spans]
        index.append(torch.arange(covered, total, device=target.device))
        heads = case.num_heads_k if which else case.num_heads
        return torch.cat(index)[:, None], torch.arange(heads, device=target.device)

    index_q, index_k = rows_in_order(0, rows.total_q), rows_in_order(2, rows.total_k)
    _same_bits("sequence permutation probe", rows, _Rows(moved, target), index_q, index_k)


def _assert_moved(what: str, got: Tensor, expected: Tensor) -> None:
    """The same bits on a GPU. On the CPU the same but for rounding: in which order the library there sums a
    product of matrices depends on how they are aligned, as heads of 81 features are each in its own way.
    """
    if got.is_cuda:
        compare.assert_exact(what, got, expected)
        return
    same = (got == expected) | (got.isnan() & expected.isnan())
    a, b = got.double(), expected.double()
    size = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() else 0.0
    allowed = 2 * compare.UNIT_ROUNDOFF.get(got.dtype, 0.0) * b.abs() + 1e-5 * size
    _check(what, ~(same | ((a - b).abs() <= allowed)), got, expected)


def _same_bits(
    what: str, rows: _Rows, moved: _Rows, index_q: tuple[Tensor, Tensor], index_k: tuple[Tensor, Tensor]
) -> None:
    """Runs a case and its permutation by (row, head) indices and compares what comes out."""
    q, k, v = rows.normal(rows.shape_q), rows.normal(rows.shape_k), rows.normal(rows.shape_v)
    out, lse = rows.run(q, k, v)
    out_moved, lse_moved = moved.run(q[index_q], k[index_k], v[index_k])
    _assert_moved(f"{what}, out", out_moved, out[index_q])
    _assert_moved(f"{what}, lse", lse_moved, lse[index_q])
    if not rows.case.backward:
        return
    dout = rows.normal(rows.shape_out)
    dq, dk, dv = rows.run_backward(dout, q, k, v)
    dq_moved, dk_moved, dv_moved = moved.run_backward(dout[index_q], q[index_q], k[index_k], v[index_k])
    _assert_moved(f"{what}, dk", dk_moved, dk[index_k])
    _assert_moved(f"{what}, dv", dv_moved, dv[index_k])
    if rows.case.deterministic:
        _assert_moved(f"{what}, dq", dq_moved, dq[index_q])


@_probe
def sparse_dout(case: Case, target: Target) -> None:
    """dout on one row only: dk and dv are exactly 0 at every key it does not see, and not 0 elsewhere.

    Tried for the first, middle and last row of the sequence with the most query rows.
    """
    rows = _Rows(case, target)
    if not rows.bounds:
        return
    start_q, len_q, _, _ = max(rows.bounds, key=lambda b: b[1])
    q, k, v = rows.normal(rows.shape_q), rows.normal(rows.shape_k), rows.normal(rows.shape_v)
    key = torch.arange(rows.total_k, device=target.device)
    for row in sorted({start_q + i for i in (0, len_q // 2, len_q - 1) if 0 <= i < len_q}):
        dout = torch.zeros(rows.shape_out, dtype=case.torch_dtype, device=target.device)
        dout[row] = 8 * rows.normal(rows.shape_out[1:])
        dq, dk, dv = rows.run_backward(dout, q, k, v)
        visible = (key >= rows.lo[row]) & (key < rows.hi[row])
        for name, grad in (("dk", dk), ("dv", dv)):
            what = f"sparse dout probe, row {row}, {name}"
            hidden = grad[~visible]
            _check(f"{what} of a hidden key", ~(hidden == 0), hidden, torch.zeros_like(hidden))
            if name == "dk" and int(visible.sum()) == 1:
                continue  # a softmax over one key is constant, its gradient exactly zero
            largest = grad[visible].abs().amax(dim=-1)
            tiny = torch.full_like(largest, torch.finfo(case.torch_dtype).tiny)
            _check(f"{what} of a visible key, at least", ~(largest > 0), largest, tiny)
        others = dq[torch.arange(rows.total_q, device=target.device) != row]
        what = f"sparse dout probe, row {row}, dq of another row"
        _check(what, ~(others == 0), others, torch.zeros_like(others))


def probes_for(case: Case) -> list[Probe]:
    """The probes that fit a case; with a backward the permutations compare gradients, too."""
    probes = [count, indicator, integer, scaling, ones, permute_sequences]
    if case.num_heads:
        probes.append(permute_heads)
    if case.head_dim >= 64:
        probes.append(needle)
    if case.effective_window == (-1, -1):
        probes += [duplicate, permute_keys]
    if case.backward:
        probes.append(sparse_dout)
    return probes


def probe_case(case: Case, target: Target) -> None:
    """All exact probes of one case. Raises as ``run_case`` does."""
    for probe in probes_for(case):
        probe(case, target)
