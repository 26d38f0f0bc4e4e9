"""Backwards whose query heads are divided among CTAs (csrc/gqa_splits.h): when, and that they stay right."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from flash_ext._ops.library import _C
from tests.cases import Case, dense, packed
from tests.harness import Target, choice_of, on_all_tiles, on_gpu_paths, run_cases
from tests.kernels.plans import plan

# ---- when ----


def test_workspace_holds_the_parts(pretended_gpu):
    """In fp32, one dk and dv for each part."""
    for path in ("sm80", "sm90"):
        one, eight, none = (
            plan(
                "bwd",
                batch=8,
                seqlen=4096,
                heads=(16, 1),
                head_dim=128,
                window_size_right=0,
                backend=choice_of(path, gqa_splits=parts),
            )
            for parts in (1, 8, 3)
        )
        assert (one["gqa_splits"], eight["gqa_splits"], none["gqa_splits"]) == (1, 8, 1)
        more = {name: size for name, size in eight["workspace"].items() if name not in one["workspace"]}
        assert more == dict.fromkeys(("dk_partials", "dv_partials"), 8 * 4 * 4096 * 8 * 128)
        names = [[launch["kernel"] for launch in x["launches"]] for x in (one, eight)]
        assert names[1] == [*names[0], "sum_parts_hd128"]
        assert eight["kernel"] == one["kernel"]


# ---- gradients ----


def cases() -> list[Case]:
    return [
        dense(2, 130, 200, 4, 1, 64, causal=True),
        dense(1, 200, 130, 8, 2, 128, dtype="fp16"),
        dense(1, 77, 300, 12, 3, 40, causal=True, deterministic=True),
        dense(1, 150, 150, 8, 2, 192, 128, causal=True, dlse=True),
        dense(2, 90, 190, 4, 1, 256, window=(60, 10), deterministic=True),
        dense(2, 66, 129, 4, 1, 33, layout="odd", dout_layout="odd"),  # element by element
        dense(1, 70, 70, 4, 2, 96, layout="bhsd", causal=True),
        packed([70, 0, 5, 200], [70, 3, 5, 100], num_heads=8, num_heads_k=1, head_dim=96, causal=True,
               tail=9),
        packed([3, 0, 130], [65, 9, 67], num_heads=4, num_heads_k=1, head_dim=256, deterministic=True),
        dense(1, 0, 5, 4, 1, 64),
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2, 4])
@on_all_tiles
def test_gradients_of_divided_heads(target: Target, parts: int) -> None:
    run_cases(cases(), target.asking(gqa_splits=parts), cpu=1)


@on_gpu_paths
def test_what_ran_is_what_was_planned(target: Target) -> None:
    """The numbers of the heuristic reach the launch; fp32 gradients are sums that nothing has rounded."""
    q, dout = (torch.randn(1, 1024, 32, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, 1024, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with target.active():
        out, lse = flash_ext.forward(q, k, v, causal=True, backend=target.choice)
        gradients = {}
        for wide in (None, torch.float32):
            found = flash_ext.backward(dout, q, k, v, out, lse, causal=True, deterministic=True,
                                       backend=target.choice, grad_dtype=wide)  # fmt: skip
            assert _C.last_launch()["gqa_splits"] > 1
            gradients[wide] = found
    for rounded, exact in zip(gradients[None], gradients[torch.float32], strict=True):
        assert exact.dtype == torch.float32 and torch.equal(rounded, exact.bfloat16())
