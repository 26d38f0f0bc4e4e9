"""Layout, strides and alignment; head sizes, head counts and types."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._ops.library import _C
from tests import probes
from tests.attention.calls import assert_same, attend, differentiate
from tests.attention.calls import normal as random_tensor
from tests.cases import COMPILED_HEAD_DIMS, HEAD_DIMS, dense, packed
from tests.harness import (
    SMALL_SMEM_BYTES,
    Target,
    on_all_tiles,
    on_gpu_paths,
    on_paths,
    on_targets,
    run_cases,
)
from tests.qkv import make_qkv, null_kernels

# ---- layout ----


@on_all_tiles
def test_every_layout_and_head_size(target: Target) -> None:
    """Transposed, gapped, misaligned, shifted; dense and packed. What lies between rows is NaN."""
    cases = []
    for layout in ("bhsd", "sbhd", "gap", "odd", "offset", "packed", "expanded", "singleton"):
        for head_dim in (33, 40, 64, 100, 128, 256):
            common = dict(
                layout=layout, dout_layout=layout if layout in ("gap", "odd") else "bshd", causal=True
            )
            cases.append(dense(2, 70, 70, 4, 2, head_dim, **common))
            packing = dict(num_heads=4, num_heads_k=2, head_dim=head_dim, deterministic=True)
            cases.append(packed([70, 0, 5], [70, 3, 5], **packing, **common))
    run_cases(cases, target, cpu=14)


@on_paths
def test_gradients_of_a_packed_projection(target: Target) -> None:
    """q, k and v split from one (b, s, (h + 2 h_k) d) tensor, or unbound from (b, s, 3, h, d)."""
    b, s, h, h_k, d = 2, 65, 4, 2, 64
    qkv = random_tensor(target, b, s, (h + 2 * h_k) * d)
    dout = random_tensor(target, b, s, h, d)
    parts = [t.unflatten(-1, (-1, d)) for t in qkv.split([h * d, h_k * d, h_k * d], dim=-1)]
    out, _, *gradients = differentiate(target, [t.contiguous() for t in parts], dout, causal=True)
    expected = [out, *gradients]
    leaf = qkv.clone().requires_grad_()
    views = [t.unflatten(-1, (-1, d)) for t in leaf.split([h * d, h_k * d, h_k * d], dim=-1)]
    out, _ = attend(target, *views, deterministic=True, causal=True)
    (grad,) = torch.autograd.grad(out, leaf, dout)
    assert torch.equal(out, expected[0])
    assert torch.equal(grad, torch.cat([g.flatten(-2) for g in expected[1:]], dim=-1))

    three = random_tensor(target, b, s, 3, h, d)
    expected = differentiate(target, [t.contiguous() for t in three.unbind(2)], dout)
    leaf = three.clone().requires_grad_()
    out, _ = attend(target, *leaf.unbind(2), deterministic=True)
    (grad,) = torch.autograd.grad(out, leaf, dout)
    assert torch.equal(grad, torch.stack(expected[2:], dim=2))


@on_paths
def test_strides_of_the_incoming_gradient(target: Target) -> None:
    """The gradient of out.sum() has stride 0 everywhere; others have other strides than out."""
    qkv = [random_tensor(target, 2, 65, 4, 64) for _ in range(3)]
    leaves = [t.clone().requires_grad_() for t in qkv]
    attend(target, *leaves, deterministic=True)[0].sum().backward()
    for leaf, grad in zip(leaves, differentiate(target, qkv)[2:]):
        assert torch.equal(leaf.grad, grad)
    dout = random_tensor(target, 2, 65, 4, 64)
    wide = dout.new_full((2, 65, 4, 80), float("nan"))
    wide[..., :64] = dout
    every_second = torch.stack([dout, dout.new_full(dout.shape, float("nan"))], dim=-1)[..., 0]
    expected = differentiate(target, qkv, dout)
    for view in (dout.transpose(1, 2).contiguous().transpose(1, 2), wide[..., :64], every_second):
        assert_same(differentiate(target, qkv, view), expected, str(view.stride()))


MODIFIED = "softcap", "key mask", "slopes", "sinks"


def modifier(name: str, device: torch.device) -> dict:
    """One modifier for two sequences of 97 and four heads; none for an empty name."""
    made = {
        "": lambda: {},
        "softcap": lambda: {"softcap": 20.0},
        "key mask": lambda: {"mask": masks.KeyMask.from_lengths(torch.tensor([50, 97], device=device), 97)},
        "slopes": lambda: {"bias": masks.ALiBi(torch.rand(4, device=device))},
        "sinks": lambda: {"sinks": torch.randn(4, device=device)},
    }
    return made[name]()


@pytest.mark.parametrize("name", ["", *MODIFIED])
@on_paths
def test_incoming_gradients_that_tma_cannot_read(target: Target, name: str) -> None:
    """The gradient of out.sum(1) has row stride 0, which was 16 bytes to TMA: it read other rows."""
    q, k, v = (random_tensor(target, 2, 97, 4, 64) for _ in range(3))
    options = modifier(name, q.device)
    row = random_tensor(target, 2, 1, 4, 64)
    room = random_tensor(target, 2 * 97 * 4 * 64 + 1)
    shifted = room[1:].view(2, 97, 4, 64)
    odd = random_tensor(target, 2, 97, 4, 65)[..., :64]
    for dout in (row.expand(2, 97, 4, 64), shifted, odd):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = flash_ext.attention(*leaves, backend=target.path, **options)
        got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        wanted = torch.autograd.grad(out, leaves, dout.contiguous().clone())
        for a, b in zip(got, wanted):
            # By other kernels than the copy's, which round otherwise.
            torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("name", MODIFIED)
def test_which_kernel_reads_incoming_gradients(pretended_gpu, name: str) -> None:
    """Kernels for Hopper where TMA can read dout, the portable ones where it cannot."""
    shape = (2, 97, 4, 64)
    q, k, v = make_qkv(batch=2, seqlen_q=97, heads=4, heads_k=4, head_dim=64, dtype=torch.bfloat16)
    options = modifier(name, q.device)
    dtype = {"dtype": torch.bfloat16}
    douts = {
        "whole": (torch.zeros(shape, **dtype), True),
        "expanded over the batch": (torch.zeros(1, 97, 4, 64, **dtype).expand(shape), True),
        "expanded over rows": (torch.zeros(2, 1, 4, 64, **dtype).expand(shape), False),
        "misaligned": (torch.zeros(2 * 97 * 4 * 64 + 1, **dtype)[1:].view(shape), False),
        "odd strides": (torch.zeros(2, 97, 4, 65, **dtype)[..., :64], False),
    }
    with null_kernels():
        out, lse = flash_ext.forward(q, k, v, **options)[:2]
        for layout, (dout, is_read) in douts.items():
            flash_ext.backward(dout, q, k, v, out, lse, **options)
            assert ("sm90" in _C.last_launch()["kernel"]) == is_read, layout


@on_paths
def test_expanded_heads_equal_grouped_heads(target: Target) -> None:
    """k and v repeated over heads with stride 0 give what the grouped call gives; gradients sum up."""
    for seqlen_k in (64, 65):
        q, dout = (random_tensor(target, 2, 70, 4, 64) for _ in range(2))
        k, v = (random_tensor(target, 2, seqlen_k, 1, 64) for _ in range(2))
        grouped = attend(target, q, k, v)
        expanded = attend(target, q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1))
        assert all(torch.equal(a, b) for a, b in zip(grouped, expanded))
        leaves = [t.clone().requires_grad_() for t in (k, v)]
        out, _ = attend(target, q, *(t.expand(-1, -1, 4, -1) for t in leaves))
        summed = torch.autograd.grad(out, leaves, dout)
        for got, wanted in zip(summed, differentiate(target, (q, k, v), dout)[3:]):
            # Four rounded gradients and their rounded sum, against one rounding.
            torch.testing.assert_close(got, wanted, rtol=0.03, atol=0.03)


@on_paths
def test_keys_expanded_over_the_batch(target: Target) -> None:
    q = random_tensor(target, 3, 70, 4, 64)
    k, v = (random_tensor(target, 1, 65, 2, 64) for _ in range(2))
    shared = attend(target, q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))
    copied = attend(target, q, k.repeat(3, 1, 1, 1), v.repeat(3, 1, 1, 1))
    assert all(torch.equal(a, b) for a, b in zip(shared, copied))


def shifted(t: Tensor) -> Tensor:
    """A copy whose first element is 2 bytes past a 16-byte boundary."""
    buffer = torch.full((t.numel() + 16,), float("nan"), dtype=t.dtype, device=t.device)
    return buffer[1 : 1 + t.numel()].view(t.shape).copy_(t)


@on_targets("cpu", "sm80")  # two loaders of the same kernels
def test_each_tensor_misaligned_in_turn(target: Target) -> None:
    """q, k, v, out, lse, dout and dlse, one at a time, start off their natural alignment."""
    shape, options = (2, 65, 4, 64), (None, None, 0, 0, 0.125, -1, 0, True, target.path)
    q, k, v, dout = (random_tensor(target, *shape) for _ in range(4))
    dlse = torch.randn(2, 4, 65, device=target.device)
    out, lse = torch.ops.flash_ext.fwd(q, k, v, *options)
    for i in range(3):
        moved = [shifted(t) if i == j else t for j, t in enumerate((q, k, v))]
        assert all(torch.equal(a, b) for a, b in zip(torch.ops.flash_ext.fwd(*moved, *options), (out, lse)))
    arguments = (dout, q, k, v, out, lse, dlse)
    expected = torch.ops.flash_ext.bwd(*arguments, *options)
    for i in range(len(arguments)):
        moved = [shifted(t) if i == j else t for j, t in enumerate(arguments)]
        got = torch.ops.flash_ext.bwd(*moved, *options)
        assert all(torch.equal(a, b) for a, b in zip(got, expected)), f"argument {i}"


@on_targets("sm90")
def test_what_tma_does_not_read_may_be_misaligned(target: Target) -> None:
    """out, lse and dlse of the backward: the same kernels, the same bits."""
    options = (None, None, 0, 0, 0.125, -1, 0, True, target.choice)
    q, k, v, dout = (random_tensor(target, 2, 65, 4, 64) for _ in range(4))
    dlse = torch.randn(2, 4, 65, device=target.device)
    arguments = (dout, q, k, v, *torch.ops.flash_ext.fwd(q, k, v, *options), dlse)
    with target.active():
        expected = torch.ops.flash_ext.bwd(*arguments, *options)
        for i in (4, 5, 6):
            moved = [shifted(t) if i == j else t for j, t in enumerate(arguments)]
            got = torch.ops.flash_ext.bwd(*moved, *options)
            assert _C.last_launch()["backend"] == "sm90"
            assert all(torch.equal(a, b) for a, b in zip(got, expected)), f"argument {i}"


@on_gpu_paths
def test_alignment_is_looked_at_in_every_call(target: Target) -> None:
    """Aligned, misaligned, aligned again, same shape: nothing about the first call may be remembered.

    What TMA cannot read runs in the sm80 kernels, of which there are two loaders.
    """
    q, k, v = (random_tensor(target, 1, 130, 2, 64) for _ in range(3))
    with target.active():
        expected = attend(target, q, k, v)
        for tensors in ((q, k, v), (shifted(q), k, v), (q, k, shifted(v)), (q, k, v)):
            got = attend(target, *tensors)
            aligned, path = tensors[0] is q and tensors[2] is v, _C.last_launch()["backend"]
            assert _C.last_launch()["aligned"] == aligned
            assert path == (target.path if aligned else "sm80")
            if path == target.path:
                assert_same(got, expected)
            # Two kernels round their weights to bf16 at different multiples: 1.1e-3 between them was seen.
            torch.testing.assert_close(got[0], expected[0], rtol=2.0**-7, atol=3e-3)
            torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-5)


@on_paths
def test_strides_beyond_16_bits(target: Target) -> None:
    rows = 300 if target.device == "cuda" else 20
    run_cases([dense(1, rows, 128, 128, 128, 8, causal=True), dense(1, 8, 8, 1, 1, 8, layout="gap")], target)
    heads = random_tensor(target, 4, 65537, 1, 8)  # rows are 65537 * 8 elements apart
    q = heads.transpose(0, 1)[:8].permute(2, 1, 0, 3)
    assert q.stride(1) > 2**16
    assert torch.equal(attend(target, q, q, q)[0], attend(target, *(q.contiguous() for _ in range(3)))[0])


@on_paths
def test_one_tensor_for_everything(target: Target) -> None:
    """q, k and v are the same object: its gradient is the sum of three."""
    x, dout = (random_tensor(target, 1, 65, 4, 64) for _ in range(2))
    out, _, dq, dk, dv = differentiate(target, [x.clone() for _ in range(3)], dout)
    leaf = x.clone().requires_grad_()
    same, _ = attend(target, leaf, leaf, leaf, deterministic=True)
    (grad,) = torch.autograd.grad(same, leaf, dout)
    assert torch.equal(same, out)
    torch.testing.assert_close(grad.float(), dq.float() + dk.float() + dv.float(), rtol=0.02, atol=0.02)


# ---- head sizes, head counts, types ----


@on_all_tiles
def test_every_kind_of_head_dim(target: Target) -> None:
    rows = 257 if target.device == "cuda" else 50
    cases = [
        dense(2, rows, rows, 4, 2, d, dtype=("bf16", "fp16")[d % 2], causal=d % 3 == 0, deterministic=det)
        for d in HEAD_DIMS
        for det in ((False, True) if d in (8, 16) else (False,))
    ]
    run_cases(cases, target, cpu=8)


@on_all_tiles
def test_values_of_another_head_dim(target: Target) -> None:
    sizes = ((192, 128), (128, 192), (64, 256), (96, 160), (8, 256), (256, 8), (1, 256), (33, 65))
    cases = [dense(2, 100, 130, 4, 2, d, dv, causal=c) for d, dv in sizes for c in (False, True)]
    run_cases(cases, target, cpu=5)
    run_cases(cases, target, probes.indicator, cpu=3)


@on_gpu_paths
def test_head_dim_576_is_refused_on_gpus(target: Target) -> None:
    q, v = random_tensor(target, 1, 4, 1, 576), random_tensor(target, 1, 4, 1, 512)
    with pytest.raises(NotImplementedError, match="head_dim"):
        attend(target, q, q, v)


@pytest.mark.parametrize("smem", [SMALL_SMEM_BYTES, 166912, 232448])
@on_targets("sm80")
def test_no_plan_needs_more_shared_memory_than_there_is(target: Target, smem: int) -> None:
    _C.set_switch("smem_per_block", smem)
    try:
        for direction in ("fwd", "bwd"):
            for head_dim in HEAD_DIMS:
                plan = _C.plan(direction, seqlen_q=300, seqlen_k=300, num_heads=4, num_heads_k=2,
                               head_dim=head_dim, head_dim_v=head_dim, backend=target.path)  # fmt: skip
                assert plan["backend"] == target.path and plan["smem_bytes"] <= smem, (
                    f"{direction} {head_dim}: {plan}"
                )
    finally:
        _C.set_switch("smem_per_block", None)


@on_all_tiles
def test_group_sizes(target: Target) -> None:
    cases = [
        dense(1, 70, 90, g * h_k, h_k, 64, causal=True, deterministic=g % 2 == 0)
        for g in (1, 2, 3, 5, 6, 7, 8, 12, 16, 64, 71, 128)
        for h_k in ((1, 2) if g < 16 else (1,))
    ]
    # Of multi-query attention with a ragged tile lse was wrong.
    cases += [dense(2, s, s, 8, 1, 64, causal=c) for s in (65, 129) for c in (False, True)]
    run_cases(cases, target, cpu=7)


@pytest.mark.parametrize("h, h_k, h_v", [(33, 2, 2), (3, 2, 2), (2, 4, 4), (4, 0, 0), (4, 2, 4), (4, 4, 2)])
@on_paths
def test_head_counts_that_do_not_divide(target: Target, h: int, h_k: int, h_v: int) -> None:
    q, k, v = (random_tensor(target, 1, 8, heads, 64) for heads in (h, h_k, h_v))
    with pytest.raises(ValueError, match="num_heads"):
        attend(target, q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.complex64, torch.bool])
@on_gpu_paths
def test_types_that_no_gpu_path_takes(target: Target, dtype: torch.dtype) -> None:
    q = torch.zeros(1, 8, 1, 64, dtype=dtype, device="cuda")
    with pytest.raises(TypeError, match=str(dtype)):
        attend(target, q, q, q)


@on_paths
def test_mixed_types(target: Target) -> None:
    """Refused with all three named; inside autocast they are cast."""
    q, k, v = (
        random_tensor(target, 1, 8, 2, 64, dtype=t) for t in (torch.bfloat16, torch.float16, torch.bfloat16)
    )
    with pytest.raises(TypeError, match="q torch.bfloat16, k torch.float16, v torch.bfloat16"):
        attend(target, q, k, v)
    with torch.autocast(target.device, torch.bfloat16):
        out, _ = attend(target, q.float(), k, v)
    expected, _ = attend(target, q, k.to(torch.bfloat16), v)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)


@on_targets("sm80")
def test_every_compiled_head_dim_runs_in_every_mode(target: Target) -> None:
    """By the recorded launches: forward, backward and deterministic backward, with both classes of tiles."""
    seen = set()
    for switches in ({}, {"smem_per_block": SMALL_SMEM_BYTES}):
        with target.active():
            for name, value in switches.items():
                _C.set_switch(name, value)
            try:
                for head_dim in COMPILED_HEAD_DIMS:
                    for deterministic in (False, True):
                        q, k, v = (
                            random_tensor(target, 1, 130, 2, head_dim).requires_grad_() for _ in range(3)
                        )
                        out, _ = attend(target, q, k, v, deterministic=deterministic)
                        seen.add((bool(switches), _C.last_launch()["kernel"]))
                        out.sum().backward()
                        seen.add((bool(switches), _C.last_launch()["kernel"]))
            finally:
                for name in switches:
                    _C.set_switch(name, None)
    wanted = {
        (small, f"{kernel}_{target.path}_hd{d}")
        for small in (False, True)
        for kernel in ("fwd", "bwd", "bwd+bwd_q")
        for d in COMPILED_HEAD_DIMS
    }
    assert seen == wanted


@on_gpu_paths
def test_the_kernels_that_ran_are_those_of_the_plan(target: Target) -> None:
    """The profiler's own record, so that no plan can claim what was not launched."""
    for head_dim, deterministic in itertools.product((64, 128, 256), (False, True)):
        q, k, v = (random_tensor(target, 1, 130, 2, head_dim).requires_grad_() for _ in range(3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            attend(target, q, k, v, deterministic=deterministic)[0].sum().backward()
            torch.cuda.synchronize()
        names = [event.key for event in profile.key_averages()]
        forward = {"sm80": "sm80::fwd_kernel", "sm90": "sm90::fwd_sm90_kernel"}[target.path]
        assert any(forward in name for name in names), names
        backward = "sm80::bwd_kernel"
        if target.path == "sm90":
            backward = "sm90::bwd_split_sm90_kernel" if head_dim > 128 else "sm90::bwd_sm90_kernel"
        assert any(backward in name for name in names), names
        assert not any("flash_fwd" in name or "flash_bwd" in name for name in names), (
            "PyTorch's own kernel ran"
        )
