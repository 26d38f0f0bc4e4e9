"""The benchmark's packed documents of long-tailed lengths, and a path of ours in another type."""

from __future__ import annotations

import pytest
import torch

from bench.entrants import make_ours
from bench.inputs import Inputs
from bench.shapes import SETS, find_case


def test_documents_of_long_tailed_lengths():
    case = find_case("docs-64-long-tailed-causal")
    lengths = sorted(case.lengths, reverse=True)
    assert len(lengths) == 64 and case.total_q == 16384 and case in SETS["around"]
    assert lengths[0] > 30 * lengths[32] and lengths[-1] > 16 and sum(lengths[:6]) * 2 > 16384
    assert list(case.lengths) not in (lengths, lengths[::-1])


def test_a_path_in_another_type_is_one_more_column():
    pytest.importorskip("flash_ext._C", reason="the extension is not built")
    *columns, halves = make_ours(["cpu", "cpu-fp16"])
    assert [c.name for c in (*columns[:1], halves)] == ["cpu", "cpu-fp16"] and len(columns) == 4
    inputs = Inputs(find_case("smoke-causal-s32"), torch.float32, torch.device("cpu"), 0)
    out = halves.prepare(inputs, "fwd")()
    assert out.dtype == torch.float16 and inputs.q.dtype == torch.float32
    torch.testing.assert_close(out.float(), columns[0].prepare(inputs, "fwd")(), rtol=2e-2, atol=2e-2)
    assert all(grad.dtype == torch.float16 for grad in halves.prepare(inputs, "bwd")())
