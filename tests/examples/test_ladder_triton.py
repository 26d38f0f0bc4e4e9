"""The ladder's Triton kernel, where triton is installed: on a CPU by its interpreter, else on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.sources import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Lengths that no tile divides, grouped heads, head sizes that are no power of two and above 128, and rows
# that see no key.
PROGRAM = """
import sys
import torch
from examples.ladder import triton_flash2
device, dtype, limit = sys.argv[1], getattr(torch, sys.argv[2]), float(sys.argv[3])
cases = [(1, 2, 2, 130, 150, 64, False), (2, 4, 2, 70, 200, 40, True), (1, 1, 1, 200, 70, 16, True)]
cases += [(1, 2, 1, 130, 150, 200, True)]
for batch, heads, heads_k, seqlen_q, seqlen_k, d, causal in cases:
    torch.manual_seed(0)
    shapes = (seqlen_q, heads), (seqlen_k, heads_k), (seqlen_k, heads_k)
    q, k, v = (torch.randn(batch, h, n, d, device=device).to(dtype).transpose(1, 2) for n, h in shapes)
    out, lse = triton_flash2.attention(q, k, v, causal=causal)
    wide = [x.double().repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (q, k, v)]
    scores = wide[0] @ wide[1].mT * d**-0.5
    if causal:
        seen = torch.ones(seqlen_q, seqlen_k, device=device).tril(seqlen_k - seqlen_q).bool()
        scores = scores.masked_fill(~seen, float("-inf"))
    expected = (scores.softmax(-1).nan_to_num(0.0) @ wide[2]).transpose(1, 2)
    assert out.dtype == dtype and (out - expected).abs().max() < limit
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-3)
print("right")
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def test_interpreted() -> None:
    done = run("cpu", "float16", "2e-3", TRITON_INTERPRET="1")
    if "0-dimensional arrays" in done.stderr:
        pytest.skip("this triton's interpreter needs an older numpy")
    assert done.stdout == "right\n", done.stderr


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    done = run("cuda", "bfloat16", "2e-2")
    assert done.stdout == "right\n", done.stderr
