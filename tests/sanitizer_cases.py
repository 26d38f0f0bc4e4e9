"""What run_sanitizer.sh runs under compute-sanitizer: every kernel once, on tensors of exactly their size.

No guards and no arena here: a guard would hide from memcheck the very access that it is there to find.
Results are only looked at for NaN; their values are the gauntlet's business.

    python -m tests.sanitizer_cases [--target sm80|sm80-99k|cpu] [--list]
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from tests.cases import COMPILED_HEAD_DIMS, Case, dense, packed
from tests.harness import TARGETS, Target
from tests.inputs import make_inputs


def sanitizer_cases() -> list[Case]:
    """Small cases (at most 192 rows, batch 2) that launch every kernel template with every loader."""
    cases = []
    for i, head_dim in enumerate(COMPILED_HEAD_DIMS):
        for dtype in ("bf16", "fp16"):
            deterministic = (i + (dtype == "fp16")) % 2 == 0
            common = {"dtype": dtype, "num_heads_k": 1, "head_dim": head_dim, "dlse": not deterministic}
            cases.append(Case(seqlen_q=131, seqlen_k=190, causal=True, deterministic=deterministic, **common))
            cases.append(
                packed(
                    [3, 0, 130],
                    [65, 9, 67],
                    window=(40, 3),
                    tail=5,
                    deterministic=not deterministic,
                    **common,
                )
            )
        # A head size below the compiled one, rows off 16 bytes: the element-wise loader and its tails.
        cases.append(
            dense(2, 66, 129, 2, 2, head_dim - 3, layout="odd", dout_layout="odd", deterministic=i % 2 == 0)
        )
    cases += [
        dense(1, 5, 0, 2, 2, 64),
        dense(1, 192, 1, 2, 1, 64, causal=True),
        dense(2, 65, 65, 2, 1, 192, 128, causal=True),
        dense(1, 40, 40, 1, 1, 8, layout="gap"),
        packed([0, 0, 7], [0, 5, 0], num_heads_k=1, deterministic=True),
        packed([1] * 20, [2] * 20, num_heads_k=1, hints=True),
    ]
    return cases


def exact(t: Tensor | None) -> Tensor | None:
    """The same values and strides in an allocation that ends with the last element (VL-09)."""
    if t is None:
        return None
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def run(case: Case, target: Target) -> None:
    """Forward and backward of one case. Raises AssertionError on NaN."""
    x = make_inputs(case, target.device)
    q, k, v, dout, dlse, cu_q, cu_k = map(
        exact, (x.q, x.k, x.v, x.dout, x.dlse, x.cu_seqlens_q, x.cu_seqlens_k)
    )
    left, right = case.effective_window
    options = (cu_q, cu_k, *x.max_seqlens, case.scale, left, right, case.deterministic, target.path)
    del x
    out, lse = torch.ops.flash_ext.fwd(q, k, v, *options)
    grads = torch.ops.flash_ext.bwd(dout, q, k, v, out, lse, dlse, *options)
    for name, t in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)):
        assert not t.isnan().any(), f"{case}: {name} holds NaN"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitizer_cases", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", choices=TARGETS, default="sm80")
    parser.add_argument("--list", action="store_true", help="print the cases")
    options = parser.parse_args()
    target = TARGETS[options.target]
    if target.why_not():
        print(f"target {target.name}: {target.why_not()}", file=sys.stderr)
        return 2
    cases = sanitizer_cases()
    with target.active():
        for case in cases:
            if options.list:
                print(case)
                continue
            print(f"case {case}", flush=True)
            run(case, target)
    print(f"{len(cases)} cases, target {target.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
