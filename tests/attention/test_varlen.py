"""Packed sequences: empty, short and many ones, and index values from outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest, masks
from tests.attention.calls import assert_same, differentiate
from tests.cases import dense, packed
from tests.harness import (
    Target,
    on_all_schedules,
    on_all_tiles,
    on_gpu_paths,
    on_paths,
    on_targets,
    run_cases,
)
from tests.inputs import make_inputs
from tests.probes import probe_case
from tests.tools.large import Large, random_tensor, run_large
from tests.watchdog import problems, run_guarded

# Cases that have hung or crashed other kernels: they run where a hang costs one child.
HAZARDS = [
    packed([0, 0, 1023], [0, 1, 2045], num_heads=4, num_heads_k=2, head_dim=128),
    packed([1743, 1559], [1743, 1559], num_heads=2, num_heads_k=1, head_dim=128, causal=True),
    packed([1] * 5, [0, 17, 0, 4096, 0], num_heads=4, num_heads_k=1, head_dim=128),
    packed([3] * 5, [0, 17, 0, 4096, 0], num_heads=4, num_heads_k=1, head_dim=64, causal=True),
    dense(2, 128, 0, 4, 4, 64, causal=True),
    packed([257], [257], head_dim=256, window=(31, 0)),
]


@on_gpu_paths
def test_hazards_in_a_child(target: Target) -> None:
    found = problems(run_guarded(HAZARDS, target), target)
    assert not found, found


@on_targets("cpu")
def test_some_hazards(target: Target) -> None:
    run_cases(HAZARDS[-2:], target)


@on_all_tiles
def test_empty_sequences_at_both_ends(target: Target) -> None:
    n = [0, 1208, 840, 0] if target.device == "cuda" else [0, 120, 84, 0]
    cases = [
        packed(n, n, num_heads=2, num_heads_k=1, head_dim=d, causal=c)
        for d in (256, 64)
        for c in (False, True)
    ]
    run_cases(cases, target, cpu=1)


@on_all_schedules
def test_empty_sequences_anywhere(target: Target) -> None:
    patterns = ([0, 9, 70], [70, 0, 9], [70, 9, 0], [0, 0, 0, 70, 0, 0, 0], [0, 0, 0], [1, 0, 1, 0, 129])
    cases = [
        packed(q, k, num_heads=4, num_heads_k=2, causal=c, deterministic=c, tail=t)
        for a, b in ((0, 0), (0, 1), (1, 0), (3, 4), (4, 4), (5, 5))
        for q, k in ((patterns[a], patterns[b][: len(patterns[a])]),)
        if len(q) == len(k)
        for c in (False, True)
        for t in (0, 5)
    ]
    cases += [packed([0, 70], [70, 0], tail=1), packed([70, 0, 3], [0, 70, 0], causal=True, hints=True)]
    run_cases(cases, target, cpu=10)
    one_key = [
        packed([76, 34, 146], [1] * 3, num_heads=2, head_dim=d, deterministic=d == 64) for d in (64, 128)
    ]
    run_cases(one_key, target)


@on_all_tiles
def test_ten_thousand_short_sequences(target: Target, seed: int) -> None:
    count = 10_000 if target.device == "cuda" else 100
    generator = torch.Generator().manual_seed(seed)
    n, m = (torch.randint(0, 4, (count,), generator=generator).tolist() for _ in range(2))
    run_cases(
        [packed(n, m, num_heads=2, num_heads_k=1, causal=c, deterministic=c) for c in (False, True)], target
    )


@on_gpu_paths
def test_one_long_sequence_and_a_thousand_of_one(target: Target, seed: int) -> None:
    lens = [65536] + [1] * 1000
    q, k, v, dout = (random_tensor(sum(lens), 2, 64) for _ in range(4))
    run_large(Large(q, k, v, dout, lens=[(n, n) for n in lens], causal=True), target, seed)


@on_paths
def test_length_hints_never_change_a_result(target: Target) -> None:
    """max_seqlen_* may be missing, exact, too large or too small."""
    x = make_inputs(packed([3, 150, 0, 70], [9, 200, 5, 70], num_heads=4, num_heads_k=2), target.device)
    given = (target, (x.q, x.k, x.v), x.dout, x.cu_seqlens_q, x.cu_seqlens_k)
    expected = differentiate(*given, causal=True)
    for rows, keys in ((150, 200), (10_000, 10_000), (1, 1), (2**31 - 1, 1)):
        got = differentiate(*given, causal=True, max_seqlen_q=rows, max_seqlen_k=keys)
        assert_same(got, expected, f"{rows}, {keys}")


@on_paths
def test_permuting_sequences_permutes_results(target: Target) -> None:
    common = {"num_heads": 4, "num_heads_k": 2, "deterministic": True}
    cases = [
        packed([70, 3, 0, 150], [60, 3, 9, 150], head_dim=d, causal=c, **common)
        for d in (64, 128)
        for c in (False, True)
    ]
    run_cases(cases, target, probe_case, cpu=2)


def run_with_cu(x, cu_q: list[int], cu_k: list[int], target: Target) -> tuple[Tensor, ...]:
    """Forward and backward of the tensors of ``x`` under other cu_seqlens."""
    cu = [torch.tensor(c, dtype=torch.int32, device=x.q.device) for c in (cu_q, cu_k)]
    options = (0, 0, 0.125, -1, 0, True, target.path)
    out, lse = torch.ops.flash_ext.fwd(x.q, x.k, x.v, *cu, *options)
    return (out, lse, *torch.ops.flash_ext.bwd(x.dout, x.q, x.k, x.v, out, lse, None, *cu, *options))


@on_paths
def test_cu_seqlens_outside_the_tensors_are_clamped(target: Target) -> None:
    """Below 0, beyond the end, not starting at 0: as if clamped; other rows get 0 and -inf."""
    x = make_inputs(packed([40, 50, 30], [40, 50, 30], num_heads=2, num_heads_k=1), target.device)
    big = 2**31 - 1
    for wild, tame in (
        ([-5, 3, 50, 10**6], [0, 3, 50, 120]),
        ([-(2**31), 0, 0, big], [0, 0, 0, 120]),
        ([20, 30, 60, 100], [20, 30, 60, 100]),
        ([big, big, big, big], [120, 120, 120, 120]),
    ):
        got, expected = run_with_cu(x, wild, wild, target), run_with_cu(x, tame, tame, target)
        assert_same(got, expected, str(wild))
        covered = torch.zeros(120, dtype=torch.bool, device=x.q.device)
        covered[tame[0] : tame[-1]] = True
        assert not got[0][~covered].any() and got[1][:, ~covered].isneginf().all()
        assert not any(t[~covered].any() for t in got[2:])
        assert x.unchanged()


@on_paths
def test_decreasing_cu_seqlens_stay_inside(target: Target) -> None:
    """Nothing outside the tensors is read or written, and nothing hangs. What comes out is the business of
    tests/kernels/test_packed_bounds.py."""
    x = make_inputs(packed([40, 50, 30], [40, 50, 30], num_heads=2, num_heads_k=1), target.device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20 if target.device == "cuda" else 4):
        wild_q, wild_k = torch.randint(-50, 200, (2, 4), generator=generator).tolist()
        run_with_cu(x, wild_q, wild_k, target)
        assert x.unchanged()


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@on_gpu_paths
def test_decreasing_cu_seqlens_of_many_blocks_do_not_hang(target: Target, head_dim: int) -> None:
    """Additions to dq in order would wait for turns of blocks that no item covers, if they shared rows."""
    lengths = [700, 1300, 500, 500]
    x = make_inputs(packed(lengths, lengths, num_heads=2, num_heads_k=1, head_dim=head_dim), target.device)
    generator = torch.Generator().manual_seed(0)
    for same in (False, True) * 10:
        wild_q, wild_k = torch.randint(-50, 3100, (2, 5), generator=generator).tolist()
        run_with_cu(x, wild_q, wild_q if same else wild_k, target)
        assert x.unchanged()


BAD_CU = {
    "int64": lambda cu: cu.long(),
    "float": lambda cu: cu.float(),
    "two-dimensional": lambda cu: cu[None],
    "strided": lambda cu: torch.stack([cu, cu], 1)[:, 0],
    "shorter": lambda cu: cu[:-1],
}


@pytest.mark.parametrize("kind", BAD_CU)
@on_paths
def test_cu_seqlens_of_a_wrong_form_are_refused(target: Target, kind: str) -> None:
    x = make_inputs(packed([4, 5], [4, 5]), target.device)
    with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
        flash_ext.attention_varlen(
            x.q, x.k, x.v, BAD_CU[kind](x.cu_seqlens_q), x.cu_seqlens_k, backend=target.path
        )


@on_gpu_paths
def test_cu_seqlens_on_another_device_are_refused(target: Target) -> None:
    x = make_inputs(packed([4, 5], [4, 5]), target.device)
    with pytest.raises(ValueError, match="cu_seqlens"):
        flash_ext.attention_varlen(x.q, x.k, x.v, x.cu_seqlens_q.cpu(), x.cu_seqlens_k, backend=target.path)


# ---- nothing waits for the device ----

# Keywords of a packed call with three sequences of up to 200 rows, 4 heads and 400 rows in all.
PACKED_MODIFIERS = {
    "nothing": lambda device: {},
    "bias": lambda device: {"bias": torch.randn(1, 4, 200, 200, device=device).requires_grad_()},
    "by distance": lambda device: {
        "bias": masks.RelativePosition(torch.randn(4, 32, device=device, requires_grad=True))
    },
    "mask": lambda device: {"mask": torch.rand(3, 1, 200, 200, device=device) < 0.7},
    "padding": lambda device: {"mask": masks.KeyMask(torch.rand(400, device=device) < 0.7)},
    "documents": lambda device: {"mask": masks.Documents((torch.arange(400, device=device) // 60).int())},
    "prefix": lambda device: {
        "causal": False,
        "mask": masks.PrefixLM(torch.tensor([3, 0, 90], device=device).int()),
    },
    "structure": lambda device: {
        "causal": False,
        "mask": masks.Causal() & (masks.Chunks(64) | masks.SinkTokens(3)),
    },
    "hidden rows": lambda device: {
        "mask": masks.HiddenRows(torch.tensor([20, 50], device=device).int().repeat(1, 400, 1))
    },
    "blocks": lambda device: {"mask": masks.BlockMask(torch.rand(1, 4, 4, 4, device=device) < 0.7, 64)},
    "learned": lambda device: {
        "bias": masks.ALiBi(torch.rand(4, device=device).requires_grad_()),
        "sinks": torch.randn(4, device=device).requires_grad_(),
        "softcap": 20.0,
    },
    "dropout": lambda device: {"dropout_p": 0.1},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", PACKED_MODIFIERS)
@on_gpu_paths
def test_packed_calls_do_not_wait_for_the_device(target: Target, name: str, deterministic: bool) -> None:
    """Forward and backward, plain and modified."""
    bounds = torch.tensor([0, 137, 200, 400], dtype=torch.int32, device=target.device)
    qkv = [
        torch.randn(400, heads, 64, device=target.device).bfloat16().requires_grad_() for heads in (4, 2, 2)
    ]
    keywords = PACKED_MODIFIERS[name](target.device)
    tensors = [getattr(value, "table", getattr(value, "slopes", value)) for value in keywords.values()]
    leaves = [*qkv, *(t for t in tensors if isinstance(t, Tensor) and t.requires_grad)]
    options = {"causal": True, "deterministic": deterministic, "backend": target.path} | keywords

    def step() -> tuple[Tensor, ...]:
        out, (lse, _) = flash_ext.attention_varlen(
            *qkv, bounds, bounds, return_aux=AuxRequest(lse=True), **options
        )
        # Not lse itself: it is -inf in rows whose keys are all hidden.
        return torch.autograd.grad((out, lse), leaves, (out.detach(), torch.ones_like(lse)))

    step()  # what only a first call in a process pays for
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(grad).all() for grad in grads)


@on_gpu_paths
def test_a_wait_would_be_noticed(target: Target) -> None:
    """The mode that the test above trusts raises for what reads a value back."""
    bounds = torch.tensor([0, 5], device=target.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            bounds.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
