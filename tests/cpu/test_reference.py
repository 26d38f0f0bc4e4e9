"""The float64 oracle against things that are not ours: SDPA's math, plain Python loops, finite
differences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec, default_scale
from tests import philox
from tests.reference import attention_reference, row_max_reference, sequence_bounds, visible_mask

INF = float("inf")


def normal(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def brute_force_mask(seqlen_q: int, seqlen_k: int, left: int, right: int) -> torch.Tensor:
    """Bottom-right aligned window, one comparison at a time."""
    mask = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for row in range(seqlen_q):
        for col in range(seqlen_k):
            distance = col - (row + seqlen_k - seqlen_q)
            mask[row, col] = (left == -1 or distance >= -left) and (right == -1 or distance <= right)
    return mask


WINDOW_EDGES = st.one_of(st.just(-1), st.integers(0, 14), st.just(2**31 - 1))


@settings(max_examples=50)
@given(st.integers(0, 12), st.integers(0, 12), WINDOW_EDGES, WINDOW_EDGES)
def test_visible_mask_is_the_window_of_the_contract(seqlen_q, seqlen_k, left, right):
    spec = AttnSpec(1.0, left, right)
    expected = brute_force_mask(seqlen_q, seqlen_k, left, right)
    assert torch.equal(visible_mask(spec, seqlen_q, seqlen_k), expected)


@pytest.mark.parametrize("scale", [0.4, -0.7, 0.0])
@pytest.mark.parametrize("left, right", [(-1, -1), (-1, 0), (2, 0), (0, 3), (1, 1)])
def test_matches_scalar_loops(scale, left, right):
    """The definition, one number at a time, with every mask applied by a comparison of positions."""
    seqlen_q, seqlen_k, head_dim, head_dim_v = 6, 4, 3, 2
    q = normal(1, seqlen_q, 1, head_dim)
    k, v = normal(1, seqlen_k, 1, head_dim), normal(1, seqlen_k, 1, head_dim_v)
    out, lse = attention_reference(q, k, v, AttnSpec(scale, left, right))
    mask = brute_force_mask(seqlen_q, seqlen_k, left, right)
    for row in range(seqlen_q):
        scores = {j: scale * sum(float(q[0, row, 0, c] * k[0, j, 0, c]) for c in range(head_dim))
                  for j in range(seqlen_k) if mask[row, j]}  # fmt: skip
        if not scores:
            assert lse[0, 0, row] == -INF and torch.equal(out[0, row, 0], torch.zeros(2, dtype=torch.float64))
            continue
        denominator = sum(math.exp(s) for s in scores.values())
        assert float(lse[0, 0, row]) == pytest.approx(math.log(denominator), abs=1e-13)
        for c in range(head_dim_v):
            expected = sum(math.exp(s) * float(v[0, j, 0, c]) for j, s in scores.items()) / denominator
            assert float(out[0, row, 0, c]) == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("left, right", [(-1, -1), (-1, 0), (1, 0)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(4, 4), (3, 5), (5, 2)])
def test_gradients_of_out_and_lse_by_finite_differences(seqlen_q, seqlen_k, left, right):
    q = normal(1, seqlen_q, 2, 2, grad=True)
    k, v = normal(1, seqlen_k, 1, 2, grad=True), normal(1, seqlen_k, 1, 3, grad=True)
    spec = AttnSpec(0.8, left, right)

    def finite_outputs(q, k, v):
        out, lse = attention_reference(q, k, v, spec)
        return out, lse.masked_fill(lse == -INF, 0.0)

    assert torch.autograd.gradcheck(finite_outputs, (q, k, v))


@pytest.mark.parametrize("seqlen_q, seqlen_k, left, right", [
    (5, 3, -1, 0), (128, 1, -1, 0), (30, 10, 1, 0), (30, 10, 0, 0), (4, 0, -1, -1), (0, 4, -1, -1),
])  # fmt: skip
def test_empty_rows_are_exactly_zero(seqlen_q, seqlen_k, left, right):
    """Out 0, lse -inf, and no gradient in or out, whatever
    arrives."""
    q = normal(2, seqlen_q, 2, 4, grad=True)
    k, v = normal(2, seqlen_k, 1, 4, grad=True), normal(2, seqlen_k, 1, 4, grad=True)
    out, lse = attention_reference(q, k, v, AttnSpec(0.5, left, right))
    empty = ~brute_force_mask(seqlen_q, seqlen_k, left, right).any(dim=1)
    assert torch.equal(lse == -INF, empty.expand_as(lse))
    assert (out[:, empty] == 0).all()
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
    assert (dq[:, empty] == 0).all()
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))


@pytest.mark.parametrize("lens_q, lens_k", [
    ([3, 0, 5], [4, 2, 5]), ([0, 3, 0], [2, 3, 0]), ([2, 1, 0], [0, 6, 3]), ([0, 0], [0, 0]), ([], []),
])  # fmt: skip
def test_packed_is_one_dense_call_per_sequence(lens_q, lens_k):
    """Two rows beyond the last sequence belong to nobody."""
    total_q, total_k = sum(lens_q) + 2, sum(lens_k) + 2
    q = normal(total_q, 4, 3, grad=True)
    k, v = normal(total_k, 2, 3, grad=True), normal(total_k, 2, 5, grad=True)
    spec = AttnSpec(0.6, 2, 1)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (lens_q, lens_k))
    out, lse = attention_reference(q, k, v, spec, cu_q, cu_k)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))

    expected = [torch.zeros_like(x) for x in (out, q, k, v)]
    expected_lse = torch.full_like(lse, -INF)
    start_q = start_k = 0
    for len_q, len_k in zip(lens_q, lens_k, strict=True):
        rows_q, rows_k = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
        slices = ((q, rows_q), (k, rows_k), (v, rows_k))
        parts = [x.detach()[None, rows].requires_grad_() for x, rows in slices]
        out_b, lse_b = attention_reference(*parts, spec)
        grads_b = torch.autograd.grad((out_b, lse_b), parts, (dout[None, rows_q], dlse[None, :, rows_q]))
        expected_lse[:, rows_q] = lse_b[0]
        for whole, rows, part in zip(
            expected, (rows_q, rows_q, rows_k, rows_k), (out_b, *grads_b), strict=True
        ):
            whole[rows] = part[0]
        start_q, start_k = start_q + len_q, start_k + len_k
    torch.testing.assert_close((out, *grads), tuple(expected), rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)


@settings(max_examples=50)
@given(st.lists(st.integers(-20, 20), min_size=1, max_size=6), st.integers(0, 9))
def test_sequence_bounds_stay_inside(cu, total):
    """Any cu_seqlens, however broken, gives ordered ranges within the tensor; a sound one is taken as it
    is."""
    bounds = sequence_bounds(torch.tensor(cu, dtype=torch.int32), total)
    assert len(bounds) == len(cu) - 1
    assert all(0 <= start <= end <= total for start, end in bounds)
    if cu == sorted(cu) and cu[0] >= 0 and cu[-1] <= total:
        assert bounds == list(zip(cu[:-1], cu[1:], strict=True))


class TestIsolateRows:
    """With isolate_rows a special value shows where it is visible and nowhere else."""

    spec = AttnSpec(0.5, 3, 0)

    def run(self, q, k, v, dout=None):
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out, lse = attention_reference(q, k, v, self.spec, isolate_rows=True)
        dout = torch.ones_like(out) if dout is None else dout
        return out, lse, *torch.autograd.grad(out, (q, k, v), dout)

    def test_same_numbers_on_finite_input(self):
        q, k, v = normal(2, 9, 4, 3), normal(2, 7, 2, 3), normal(2, 7, 2, 2)
        out, lse, *_ = self.run(q, k, v)
        expected = attention_reference(q, k, v, self.spec)
        torch.testing.assert_close((out, lse), expected, rtol=0, atol=1e-14)

    def test_nan_key_reaches_the_rows_that_see_it(self):
        q, k, v = normal(1, 9, 1, 3), normal(1, 7, 1, 3), normal(1, 7, 1, 2)
        k[0, 2, 0, 1] = math.nan
        out, lse, dq, dk, dv = self.run(q, k, v)
        sees = brute_force_mask(9, 7, 3, 0)[:, 2]
        assert torch.equal(out.isnan().any(-1).flatten(), sees)
        assert torch.equal(lse.isnan().flatten(), sees)
        assert torch.equal(dq.isnan().any(-1).flatten(), sees)
        reached = brute_force_mask(9, 7, 3, 0)[sees].any(dim=0)  # keys that share a row with the bad one
        assert torch.equal(dk.isnan().any(-1).flatten(), reached)

    def test_nan_value_stays_out_of_the_weights(self):
        q, k, v = normal(1, 9, 1, 3), normal(1, 7, 1, 3), normal(1, 7, 1, 2)
        v[0, 4, 0, 0] = math.nan
        out, lse, *_ = self.run(q, k, v)
        assert torch.equal(out.isnan()[0, :, 0, 0], brute_force_mask(9, 7, 3, 0)[:, 4])
        assert not out[..., 1].isnan().any() and not lse.isnan().any()

    def test_nan_dout_of_an_empty_row_is_not_used(self):
        q, k, v = normal(1, 9, 1, 3), normal(1, 7, 1, 3), normal(1, 7, 1, 2)
        dout = torch.ones(1, 9, 1, 2, dtype=torch.float64)
        dout[0, 0] = math.nan
        assert not any(grad.isnan().any() for grad in self.run(q, k, v, dout)[2:])


def brute_force_rule(row, col, seqlen_q, seqlen_k, left, right, top_left, prefix, sink_tokens, chunk):
    """The rule by position for one pair, in intervals as the contract states it."""
    centre = row + (0 if top_left else seqlen_k - seqlen_q)
    before_chunks = hi = seqlen_k if right == -1 else min(seqlen_k, centre + right + 1)
    lo = 0 if left == -1 else max(0, centre - left)
    if chunk:
        first = centre // chunk * chunk
        lo, hi = (0, 0) if centre < 0 else (max(lo, first), min(hi, first + chunk))
    return lo <= col < hi or col < max(min(prefix, seqlen_k), min(sink_tokens, before_chunks))


@given(st.data())
def test_rule_by_position(data):
    """Prefix, sink tokens, chunks, windows and both alignments in any combination."""
    seqlen_q, seqlen_k = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    left, right, top_left = data.draw(WINDOW_EDGES), data.draw(WINDOW_EDGES), data.draw(st.booleans())
    prefix, sink_tokens, chunk = (data.draw(st.integers(low, 10)) for low in (-2, 0, 0))
    mods = Modifiers(prefix_lens=torch.tensor([0, prefix], dtype=torch.int32), sink_tokens=sink_tokens,
                     chunk=chunk, top_left=top_left)  # fmt: skip
    got = visible_mask(AttnSpec(1.0, left, right), seqlen_q, seqlen_k, mods=mods, b=1)
    rule = (seqlen_q, seqlen_k, left, right, top_left, prefix, sink_tokens, chunk)
    expected = [[brute_force_rule(i, j, *rule) for j in range(seqlen_k)] for i in range(seqlen_q)]
    assert torch.equal(got, torch.tensor(expected, dtype=torch.bool).view(seqlen_q, seqlen_k))


def test_masks_by_content():
    """Documents, intervals of rows and keys, and blocks: each pair judged by itself."""
    seqlen_q, seqlen_k = 20, 37
    document_q, document_k = torch.randint(-1, 3, (2, seqlen_q)), torch.randint(-1, 3, (2, seqlen_k))
    hidden_rows = torch.randint(-2, seqlen_q + 3, (1, 3, seqlen_k, 4))
    hidden_keys = torch.randint(-2, seqlen_k + 3, (2, 1, seqlen_q, 2))
    blocks = torch.tensor([[[[1, 0], [0, 1]], [[1, 1], [1, 1]], [[0, 1], [1, 1]]]], dtype=torch.bool)
    one_by_one = {
        "documents": (Modifiers(document_q=document_q, document_k=document_k),
                      lambda b, h, i, j: document_q[b, i] == document_k[b, j] >= 0),
        "hidden_rows": (Modifiers(hidden_rows=hidden_rows), lambda b, h, i, j: not any(
            s <= i < e for s, e in hidden_rows[0, h, j].view(2, 2))),
        "hidden_keys": (Modifiers(hidden_keys=hidden_keys), lambda b, h, i, j: not (
            hidden_keys[b, 0, i, 0] <= j < hidden_keys[b, 0, i, 1])),
        "blocks": (Modifiers(blocks=blocks, block_rows=16, block_cols=32),
                   lambda b, h, i, j: blocks[0, h, i // 16, j // 32]),
    }  # fmt: skip
    for name, (mods, sees) in one_by_one.items():
        for b, h in ((0, 0), (1, 2)):
            got = visible_mask(AttnSpec(1.0), seqlen_q, seqlen_k, mods=mods, b=b, h=h)
            expected = [[bool(sees(b, h, i, j)) for j in range(seqlen_k)] for i in range(seqlen_q)]
            assert torch.equal(got, torch.tensor(expected)), name
            assert got.any() and not got.all(), name


@pytest.mark.parametrize("shape", [(2, 4, 20, 37), (1, 4, 1, 37), (2, 1, 20, 1), (1, 1, 20, 37)])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal"])
def test_masks_match_sdpa_math(kind, shape):
    """What SDPA can express, with the gradient of an additive mask; its causal is top-left."""
    q, k, v = normal(2, 20, 4, 8, grad=True), normal(2, 37, 2, 8, grad=True), normal(2, 37, 2, 6, grad=True)
    bias = normal(*shape, grad=True)
    mask = torch.rand(shape) > 0.4
    mask[..., :2] = True  # SDPA's math has NaN in rows that see nothing
    mods = {"none": Modifiers(), "bool": Modifiers(mask=mask), "float": Modifiers(bias=bias),
            "causal": Modifiers(top_left=True)}  # fmt: skip
    spec = AttnSpec(default_scale(8), -1, 0 if kind == "causal" else -1)
    out, _ = attention_reference(q, k, v, spec, mods=mods[kind])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        sdpa = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=kind == "causal", enable_gqa=True,
            attn_mask={"bool": mask, "float": bias}.get(kind),
        ).transpose(1, 2)  # fmt: skip
    torch.testing.assert_close(out, sdpa, rtol=0, atol=1e-13)
    leaves = (q, k, v, bias) if kind == "float" else (q, k, v)
    ours, theirs = (torch.autograd.grad(x, leaves, torch.ones_like(out).cumsum(1)) for x in (out, sdpa))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("reach", [0, 1, 4, 30])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(6, 6), (5, 9), (9, 5)])
def test_a_bias_by_distance_is_the_dense_one_gathered_by_hand(seqlen_q, seqlen_k, reach, top_left):
    """Entry n is distance 0 of the aligned key, the ends serve all distances beyond; gradients as well."""
    q, k, v = normal(2, seqlen_q, 4, 3, grad=True), normal(2, seqlen_k, 2, 3), normal(2, seqlen_k, 2, 2)
    entries = normal(2, 4, 2 * reach + 1, grad=True)
    shift = 0 if top_left else seqlen_k - seqlen_q
    rows = [
        [entries[:, :, reach + min(max(j - i - shift, -reach), reach)] for j in range(seqlen_k)]
        for i in range(seqlen_q)
    ]
    gathered = torch.stack([torch.stack(row, -1) for row in rows], -2)
    assert gathered.shape == (2, 4, seqlen_q, seqlen_k)
    results = [
        attention_reference(q, k, v, AttnSpec(0.6, 5, 3), mods=Modifiers(bias=bias, top_left=top_left))
        for bias in (entries, gathered)
    ]
    torch.testing.assert_close(*results, rtol=0, atol=1e-14)
    ours, theirs = (torch.autograd.grad((out.sin().sum() + lse.where(lse.isfinite(), 0).sum()), (q, entries))
                    for out, lse in results)  # fmt: skip
    assert ours[1].abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_order_of_operations_in_scalar_loops():
    """Scale, softcap, bias, ALiBi; then the sink in the denominator; dropout on the weights."""
    q, k, v = normal(1, 3, 2, 4), normal(1, 5, 1, 4), normal(1, 5, 1, 1)
    bias, slopes, sinks = normal(1, 1, 3, 5), torch.rand(1, 2), normal(2)
    rng = torch.tensor([3, 4])
    mods = Modifiers(bias=bias, slopes=slopes, sinks=sinks, softcap=0.7, dropout_p=0.25, rng=rng)
    out, lse = attention_reference(q, k, v, AttnSpec(0.9), mods=mods)
    row_max = row_max_reference(q, k, v, AttnSpec(0.9), mods=mods)
    keep = philox.kept(rng, 0.25, torch.tensor([0]), 2, 3, 5)
    for h in range(2):
        for i in range(3):
            scores = [0.7 * math.tanh(0.9 * float(q[0, i, h] @ k[0, j, 0]) / 0.7) + float(bias[0, 0, i, j])
                      - float(slopes[0, h]) * abs(i + 2 - j) for j in range(5)]  # fmt: skip
            weights = [math.exp(s) for s in scores]
            denominator = sum(weights) + math.exp(float(sinks[h]))
            total = sum(w * float(v[0, j, 0, 0]) / 0.75 for j, w in enumerate(weights) if keep[0, h, i, j])
            assert float(lse[0, h, i]) == pytest.approx(math.log(denominator), abs=1e-13)
            assert float(out[0, i, h, 0]) == pytest.approx(total / denominator, abs=1e-13)
            assert float(row_max[0, h, i]) == pytest.approx(max(scores), abs=1e-13)


def test_sink_formula():
    """q = 0, n keys, v = 1: out = n / (n + e^sink); a row without keys keeps the sink as its lse."""
    sinks = torch.tensor([0.3, -2.0, 5.0], dtype=torch.float64)
    q, k, v = torch.zeros(1, 7, 3, 2), normal(1, 4, 3, 2), torch.ones(1, 4, 3, 1)
    out, lse = attention_reference(q, k, v, AttnSpec(1.0, -1, 0), mods=Modifiers(sinks=sinks))
    count = torch.tensor([0, 0, 0, 1, 2, 3, 4])[:, None]
    torch.testing.assert_close(out[0, :, :, 0], count / (count + sinks.exp()), rtol=1e-14, atol=0)
    torch.testing.assert_close(lse[0].T, (count + sinks.exp()).log(), rtol=1e-14, atol=1e-15)


def test_the_lowest_number_is_a_bias_and_minus_infinity_is_a_mask():
    """Over a whole row the first gives uniform weights, the second an empty row."""
    q, k, v = normal(1, 2, 1, 4), normal(1, 5, 1, 4), normal(1, 5, 1, 3, grad=True)
    bias = torch.stack([torch.full((5,), torch.finfo(torch.float32).min), torch.full((5,), -INF)])
    bias = bias.view(1, 1, 2, 5).requires_grad_()
    out, lse = attention_reference(q, k, v, AttnSpec(0.5), mods=Modifiers(bias=bias))
    torch.testing.assert_close(out[0, 0, 0], v[0, :, 0].mean(0))
    assert (out[0, 1] == 0).all() and lse[0, 0, 1] == -INF and lse[0, 0, 0].isfinite()
    dv, dbias = torch.autograd.grad(out.sum(), (v, bias))
    torch.testing.assert_close(dv, torch.full_like(dv, 0.2))
    assert (dbias[0, 0, 1] == 0).all() and dbias.isfinite().all()
