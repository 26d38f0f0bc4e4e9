"""The probes and the gates themselves: a correct implementation passes, each planted fault is caught."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests import probes
from tests.cases import dense, packed
from tests.cpu.test_tiled import tiled_backward, tiled_forward
from tests.harness import TARGETS, CaseFailure

CPU = TARGETS["cpu"]
CAUSAL = dense(2, 70, 100, 4, 2, 64, causal=True)
WINDOW = dense(1, 90, 90, 2, 1, 64, window=(20, 7), dtype="fp16")
FULL = dense(2, 40, 64, 4, 2, 64, 32)
PACKED = packed([3, 0, 70, 40], [50, 9, 69, 0], num_heads=4, num_heads_k=2, head_dim=64, tail=5, causal=True)
SMALL = dense(1, 30, 12, 2, 1, 8, dtype="fp32", causal=True)  # rows without keys, no needle
FLAT = packed([5, 20], [7, 20], num_heads=2, num_heads_k=2, head_dim=64, dtype="fp32", tail=2)


@pytest.fixture(autouse=True)
def plant(monkeypatch: pytest.MonkeyPatch):
    """Probes call the tiled algorithm; returns a function that plants others in its place."""

    def put(forward=tiled_forward, backward=tiled_backward) -> None:
        monkeypatch.setattr(probes, "forward", lambda *args: forward(*args[:-2]))
        monkeypatch.setattr(probes, "backward", lambda *args: backward(*args[:7], None, *args[7:-2]))

    put()
    return put


@pytest.mark.parametrize("case", [CAUSAL, WINDOW, FULL, PACKED, SMALL, FLAT], ids=str)
def test_a_correct_implementation_passes(case):
    probes.probe_case(case.replace(deterministic=True), CPU)


EMPTY = [
    dense(0, 3, 3, 2, 2, 64), dense(2, 0, 5, 2, 2, 64), dense(2, 5, 0, 2, 2, 64),
    packed([], [], num_heads=2, num_heads_k=2, head_dim=64),
    packed([0, 0], [0, 3], num_heads=2, num_heads_k=1, head_dim=64, tail=2),
]  # fmt: skip


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_probes_fit_empty_problems(case):
    probes.probe_case(case, CPU)


# ---- planted faults: each takes what the implementation takes and is wrong in one way ----------------------


def shifted_window(left: int, right: int):
    def forward(q, k, v, spec, *cu_seqlens):
        wrong = dataclasses.replace(
            spec,
            window_left=spec.window_left + (left if spec.window_left >= 0 else 0),
            window_right=max(spec.window_right + right, 0) if spec.window_right >= 0 else -1,
        )
        return tiled_forward(q, k, v, wrong, *cu_seqlens)

    return forward


def newest_key_lost(q, k, v, spec, *cu_seqlens):
    """Only in the last row of a dense call, where tolerances are blind (M3)."""
    out, lse = tiled_forward(q, k, v, spec, *cu_seqlens)
    out[:, -1:], lse[:, :, -1:] = tiled_forward(
        q[:, -1:], k[:, :-1], v[:, :-1], dataclasses.replace(spec, window_left=-1, window_right=-1)
    )
    return out, lse


def tail_key_counted(q, k, v, spec, *cu_seqlens):
    """A zero-filled row after the last key takes part in the denominator."""
    pad = torch.zeros_like(k[:, :1]), torch.zeros_like(v[:, :1])
    return tiled_forward(q, torch.cat([k, pad[0]], 1), torch.cat([v, pad[1]], 1), spec, *cu_seqlens)


def lse_in_log2(q, k, v, spec, *cu_seqlens):
    out, lse = tiled_forward(q, k, v, spec, *cu_seqlens)
    return out, lse / math.log(2)


def wrong_key_head(q, k, v, spec, *cu_seqlens):
    """Query head h reads key head h % num_heads_k (M18)."""
    order = torch.arange(q.shape[-2]).view(-1, k.shape[-2]).T.flatten()
    out, lse = tiled_forward(q[..., order, :], k, v, spec, *cu_seqlens)
    back = order.argsort()
    return out[..., back, :], lse[..., back, :]


def weights_rounded_in_one_sum(q, k, v, spec, *cu_seqlens):
    """P cut off to 7 bits before P v, but not before its row sum."""
    out, lse = tiled_forward(q, k, v, spec, *cu_seqlens)
    return (out.float() * (1 - 2.0**-7)).to(out.dtype), lse


def empty_rows_not_zeroed(q, k, v, spec, *cu_seqlens):
    out, lse = tiled_forward(q, k, v, spec, *cu_seqlens)
    out[(lse == -math.inf).transpose(-1, -2)] = 1e-30
    return out, lse


def neighbour_sequence_read(q, k, v, spec, cu_q, cu_k):
    """Each sequence's keys start one row early."""
    early = cu_k.clone()
    early[1:-1] -= 1
    return tiled_forward(q, k, v, spec, cu_q, early)


def first_entry_for_all(q, k, v, spec, *cu_seqlens):
    """Every batch entry reads the keys of the first one."""
    return tiled_forward(q, k[:1].expand_as(k), v[:1].expand_as(v), spec, *cu_seqlens)


FAULTS = [
    (shifted_window(0, 1), CAUSAL, {"count", "indicator", "needle"}),
    (shifted_window(0, -1), WINDOW, {"count", "indicator", "needle"}),
    (shifted_window(1, 0), WINDOW, {"count", "indicator", "needle"}),
    (shifted_window(-1, 0), WINDOW, {"count", "indicator", "needle"}),
    (newest_key_lost, dense(1, 60, 400, 2, 1, 64, causal=True), {"count"}),
    (tail_key_counted, FULL, {"count", "indicator", "integer", "duplicate"}),
    (lse_in_log2, FULL, {"count", "duplicate"}),
    (wrong_key_head, FULL, {"needle", "integer", "permute_heads"}),
    (weights_rounded_in_one_sum, FULL, {"ones"}),
    (empty_rows_not_zeroed, SMALL, {"count"}),
    (neighbour_sequence_read, PACKED, {"count"}),
    (first_entry_for_all, FULL, {"permute_sequences", "needle"}),
]


@pytest.mark.parametrize("fault, case, catchers", FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_a_planted_fault_is_caught(plant, fault, case, catchers):
    caught, case = set(), case.replace(backward=False)
    plant(fault)
    for probe in probes.probes_for(case):
        try:
            probe(case, CPU)
        except CaseFailure as error:
            caught.add(probe.__name__)
            assert "nan" not in str(error) and isinstance(error.__cause__, AssertionError)
    assert catchers <= caught


@pytest.mark.parametrize("fault", ["hidden key", "visible key", "other row"])
def test_sparse_dout_catches_faulty_gradients(plant, fault):
    def backward(*args):
        dq, dk, dv = tiled_backward(*args)
        if fault == "hidden key":  # one element of the first row's dk, far beyond its diagonal
            dk[0, -1, 0, 0] += 1e-6
        elif fault == "visible key":
            dv[:, 0] = 0
        else:
            dq[:, 35] += 1e-6
        return dq, dk, dv

    plant(tiled_forward, backward)
    with pytest.raises(CaseFailure, match={"other row": "dq of another row"}.get(fault, fault)):
        probes.sparse_dout(CAUSAL, CPU)


# ---- the gates ---------------------------------------------------------------------------------------------
