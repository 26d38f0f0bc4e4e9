"""The CPU backend against the oracle, forward and backward, and what only it promises: linear memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flash_ext._cpu import tiles as tiled
from flash_ext._ops.modifiers import Modifiers
from tests import compare
from tests.cases import Case, dense, packed
from tests.inputs import Inputs, make_inputs
from tests.reference import attention_reference

INF = float("inf")


def tiled_forward(q, k, v, spec, *cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a call without modifiers."""
    out, lse, row_max = tiled.forward(q, k, v, spec, Modifiers(), *cu_seqlens)
    assert row_max.shape == (0,) and row_max.dtype == lse.dtype
    return out, lse


def tiled_backward(dout, q, k, v, out, lse, spec, dlse=None, *cu_seqlens) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of one."""
    *grads, dbias, dslopes, dsinks = tiled.backward(
        dout, q, k, v, out, lse, spec, Modifiers(), dlse, *cu_seqlens
    )
    assert dbias is dslopes is dsinks is None
    return tuple(grads)


def truth(inputs: Inputs) -> dict[str, torch.Tensor]:
    """out, lse and, by autograd through the oracle, dq, dk and dv."""
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = attention_reference(q, k, v, inputs.case.spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse.double()
    tail = inputs.case.tail if inputs.case.is_packed else 0
    dout = inputs.dout.double()
    if tail:  # rows of no sequence hold NaN
        dout = torch.cat([dout[:-tail], torch.zeros_like(dout[-tail:])])
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def run(inputs: Inputs) -> dict[str, torch.Tensor]:
    cu_seqlens = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    q, k, v, spec = inputs.q, inputs.k, inputs.v, inputs.case.spec
    out, lse = tiled_forward(q, k, v, spec, *cu_seqlens)
    dq, dk, dv = tiled_backward(inputs.dout, q, k, v, out, lse, spec, inputs.dlse, *cu_seqlens)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_equals_truth(case: Case) -> None:
    """float64 on both sides, so equal to rounding; -inf and exact zeros where the oracle has them."""
    inputs = make_inputs(case, "cpu")
    expected = truth(inputs)
    for name, got in run(inputs).items():
        assert got.is_contiguous(), name
        compare.assert_same_special_values(name, got, expected[name])
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(got, expected[name], rtol=1e-11, atol=1e-12, msg=message)
        empty = (expected["lse"] == -INF).transpose(-1, -2)
        if name in ("out", "dq"):
            assert (got[empty] == 0).all(), name
    assert inputs.unchanged()


SHAPES = [
    dense(2, 5, 5, 4, 2, 8, 6, dlse=True),
    dense(1, 300, 100, 4, 1, 16, dlse=True),  # more queries than keys
    dense(1, 17, 513, 3, 3, 5, 7),
    dense(2, 130, 257, 6, 2, 1, 3, dlse=True),
    dense(1, 257, 130, 2, 1, 33),
    dense(2, 0, 5, 2, 2, 4),
    dense(2, 5, 0, 2, 1, 4, 3, dlse=True),
    dense(0, 5, 5, 2, 1, 4, 3),
    dense(2, 5, 5, 0, 0, 4),
    dense(1, 1, 129, 2, 1, 8),
    packed([3, 0, 130, 64], [70, 9, 129, 0], num_heads=4, num_heads_k=2, head_dim=8, tail=9, dlse=True),
    packed([0, 0, 5], [0, 3, 9], num_heads=2, num_heads_k=1, head_dim=4, head_dim_v=6),  # empties first
    packed([4, 0, 0], [6, 2, 0], num_heads=2, num_heads_k=1, head_dim=4, dlse=True),  # and last
    packed([0, 0], [0, 0], num_heads=2, num_heads_k=2, head_dim=4, tail=3),
    packed([], [], num_heads=2, num_heads_k=2, head_dim=4, tail=3),
]
MASKS = [
    (False, (-1, -1)), (True, (-1, -1)), (False, (10, 0)), (False, (0, 0)), (False, (1, 0)), (False, (0, 1)),
    (False, (-1, 3)), (False, (3, -1)), (True, (63, 1)), (False, (128, 128)), (False, (2**31 - 1, 2**31 - 1)),
]  # fmt: skip


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_equals_the_oracle(case):
    """Every mask on every shape."""
    for causal, window in MASKS:
        assert_equals_truth(case.replace(dtype="fp64", causal=causal, window=window))


LENGTHS = st.integers(0, 20)
EDGES = st.one_of(st.just(-1), st.integers(0, 20))


@settings(max_examples=40)
@given(st.data())
def test_equals_the_oracle_on_random_shapes(data):
    """Small tiles, so that every shape has full, partial, skipped and ragged ones."""
    num_heads_k = data.draw(st.integers(1, 2))
    fields = dict(
        dtype="fp64", num_heads=num_heads_k * data.draw(st.integers(1, 3)), num_heads_k=num_heads_k,
        head_dim=data.draw(st.integers(1, 5)), head_dim_v=data.draw(st.integers(1, 5)),
        window=(data.draw(EDGES), data.draw(EDGES)), causal=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([0.7, -0.7])), dlse=data.draw(st.booleans()),
    )  # fmt: skip
    if data.draw(st.booleans()):
        lengths = data.draw(st.lists(st.tuples(LENGTHS, LENGTHS), max_size=4))
        tail = data.draw(st.integers(0, 2))
        case = packed([q for q, _ in lengths], [k for _, k in lengths], tail=tail, **fields)
    else:
        seqlen_q, seqlen_k = data.draw(LENGTHS), data.draw(LENGTHS)
        case = Case(batch=data.draw(st.integers(0, 3)), seqlen_q=seqlen_q, seqlen_k=seqlen_k, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "BLOCK_M", data.draw(st.integers(1, 7)))
        patch.setattr(tiled, "BLOCK_N", data.draw(st.integers(1, 7)))
        patch.setattr(tiled, "MAX_SCORES", data.draw(st.sampled_from([1, 200, tiled.MAX_SCORES])))
        assert_equals_truth(case)


def test_backward_leaves_out_rows_whose_given_lse_is_minus_infinity():
    """Even rows that see keys here: in a ring their lse may come from elsewhere, and it alone decides."""
    inputs = make_inputs(dense(1, 30, 50, 4, 2, 8, dtype="fp64", dlse=True), "cpu")
    q, k, v, spec = inputs.q, inputs.k, inputs.v, inputs.case.spec
    out, lse = tiled_forward(q, k, v, spec)
    rows = slice(5, 12)
    inputs.dout[:, rows] = inputs.dlse[:, :, rows] = 0
    expected = tiled_backward(inputs.dout, q, k, v, out, lse, spec, inputs.dlse)
    inputs.dout[:, rows] = inputs.dlse[:, :, rows] = 7
    lse[:, :, rows] = -INF
    got = tiled_backward(inputs.dout, q, k, v, out, lse, spec, inputs.dlse)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert (got[0][:, rows] == 0).all()


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_memory_grows_linearly():
    """No tensor exceeds the inputs or one tile, so none of N * N is ever made."""
    largest = []
    for seqlen in (512, 2048):
        inputs = make_inputs(dense(1, seqlen, seqlen, 2, 1, 16, dtype="fp32", causal=True), "cpu")
        with LargestTensor() as seen:
            run(inputs)
        tile = inputs.case.num_heads * tiled.BLOCK_M * tiled.BLOCK_N
        assert seen.numel <= max(tile, inputs.q.numel())
        largest.append(seen.numel)
    assert largest[0] >= 2 * tiled.BLOCK_M * tiled.BLOCK_N, "the mode saw no tile, so it measures nothing"
    assert largest[-1] < 2048 * 2048 / 50
