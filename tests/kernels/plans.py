"""Plans of backwards and forwards: on a GPU, or on one that is pretended."""

from __future__ import annotations

from flash_ext._ops.library import _C
from tests.cases import Case
from tests.layouts import tensor_shapes

Both = int | tuple[int, int]  # one number for two that are equal


def plan(direction: str, *, batch: int, seqlen: Both, heads: Both, head_dim: Both, **more) -> dict:
    """``seqlen`` of queries and keys, ``heads`` of both, ``head_dim`` of keys and values."""

    def both(x: Both) -> tuple[int, int]:
        return x if isinstance(x, tuple) else (x, x)

    (rows, keys), (heads_q, heads_k), (width, width_v) = map(both, (seqlen, heads, head_dim))
    return _C.plan(
        direction, batch=batch, seqlen_q=rows, seqlen_k=keys, num_heads=heads_q, num_heads_k=heads_k,
        head_dim=width, head_dim_v=width_v, **more,
    )  # fmt: skip


def plan_of(case: Case, backend: str, **more) -> dict:
    """Of the backward of a case."""
    shapes, (left, right) = tensor_shapes(case), case.effective_window
    return plan(
        "bwd", batch=len(list(case.sequences())), seqlen=(shapes["q"][-3], shapes["k"][-3]),
        heads=(case.num_heads, case.num_heads_k), head_dim=(case.head_dim, case.dim_v),
        dtype="float16" if case.dtype == "fp16" else "bfloat16", packed=case.is_packed,
        window_size_left=left, window_size_right=right, backend=backend,
        **{"deterministic": case.deterministic} | more,
    )  # fmt: skip
