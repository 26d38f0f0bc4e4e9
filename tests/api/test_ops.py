"""The operators inside PyTorch: schemas, shapes, autograd, transforms, autocast, checkpoints, counters."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flash_ext
from flash_ext import AuxRequest
from flash_ext._ops.library import _C
from tests.qkv import OperatorCalls, make_packed, make_qkv, null_kernels, on_devices, reference, tolerance

FWD = torch.ops.flash_ext.fwd.default
BWD = torch.ops.flash_ext.bwd.default


# ---- registration ----------------------------------------------------------------------------------------

OPTIONS = (0, 0, 0.3, 5, 0, False, None)  # max_seqlen_*, scale, window, deterministic, backend


def operator_inputs(layout: str, device: str) -> tuple:
    """Arguments of fwd with strides that a contiguous assumption would break."""
    if layout == "packed":
        q, k, v, cu = make_packed(device)
        return q, k, v, cu, cu, *OPTIONS
    if layout == "contiguous":
        return *make_qkv(device, seqlen_k=23, head_dim_v=24), None, None, *OPTIONS
    if layout == "split":  # of one projection, rows of all three interleaved
        q, k, v = make_qkv(device, batch=2, seqlen_q=11)
        joint = torch.cat([q, k, v], dim=2)
        return *joint.split([4, 2, 2], dim=2), None, None, *OPTIONS
    if layout == "heads first":  # (b, h, s, d) seen as (b, s, h, d), keys expanded over the batch
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in make_qkv(device, seqlen_q=11))
        return q, k[:1].expand_as(k), v, None, None, *OPTIONS
    raise AssertionError(layout)


LAYOUTS = ("contiguous", "split", "heads first", "packed")


def backward_inputs(layout: str, device: str, with_dlse: bool) -> tuple:
    q, k, v, *rest = operator_inputs(layout, device)
    out, lse = FWD(q, k, v, *rest)
    dout = torch.randn_like(out).transpose(0, 1).contiguous().transpose(0, 1)
    return dout, q, k, v, out, lse, torch.randn_like(lse) if with_dlse else None, *rest


def with_gradients(args: tuple) -> tuple:
    """The same arguments, where every float tensor asks for a gradient."""
    return tuple(
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    )


@on_devices
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout: str, device: str) -> None:
    """Each layout with gradients or without, and with dlse or without."""
    args = operator_inputs(layout, device)
    torch.library.opcheck(FWD, with_gradients(args) if layout != "split" else args)
    torch.library.opcheck(BWD, backward_inputs(layout, device, layout in ("contiguous", "packed")))


def check_tracing(op: torch._ops.OpOverload, args: tuple) -> None:
    """On fake tensors and on meta an operator gives results of the real shapes, strides and types."""
    real = op(*args)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    meta = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
    for expected, traced, on_meta in zip(real, fake, meta, strict=True):
        assert expected.is_contiguous()
        for t in (traced, on_meta):
            assert (t.shape, t.stride(), t.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert traced.device == expected.device


def test_lse_is_as_wide_as_float64_inputs() -> None:
    q, k, v = make_qkv(dtype=torch.float64)
    out, (lse, _) = flash_ext.attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    assert FWD(q.to("meta"), k.to("meta"), v.to("meta"), None, None, *OPTIONS)[1].dtype == torch.float64


def test_the_fast_entry_goes_through_the_dispatcher() -> None:
    q, k, v = make_qkv(requires_grad=True)
    with OperatorCalls() as calls:
        flash_ext.attention(q, k, v).sum().backward()
    assert calls.names() == ["fwd", "bwd"]


# ---- autograd --------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_gradients_through_out_and_lse(used: str, device: str) -> None:
    inputs = make_qkv(device, seqlen_q=13, seqlen_k=19, head_dim_v=24, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grads = []
    for call, leaves in ((flash_ext.forward, inputs), (reference, exact)):
        out, lse = call(*leaves, causal=True)
        loss = {"out": out.double().sin().sum(), "lse": lse.double().sin().sum()}
        loss["both"] = loss["out"] + loss["lse"]
        grads.append(torch.autograd.grad(loss[used], leaves, allow_unused=True))
    for got, expected in zip(*grads, strict=True):
        exact_grad = torch.zeros_like(got) if expected is None else expected.to(got.dtype)
        torch.testing.assert_close(got, exact_grad, **tolerance(device))


def test_gradcheck_of_both_results() -> None:
    inputs = make_qkv(
        seqlen_q=4, seqlen_k=5, head_dim=3, head_dim_v=2, dtype=torch.float64, requires_grad=True
    )
    assert torch.autograd.gradcheck(functools.partial(flash_ext.forward, window_size=(2, 1)), inputs)


@on_devices
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_second_derivatives_raise(options: dict[str, float], device: str) -> None:
    q, k, v = make_qkv(device)

    def loss(q: Tensor) -> Tensor:
        return flash_ext.attention(q, k, v, **options).square().sum()

    words = "second derivative of attention is not implemented"
    with pytest.raises(RuntimeError, match=words):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)
    (grad,) = torch.autograd.grad(loss(q.requires_grad_()), q, create_graph=True)
    with pytest.raises(RuntimeError, match=words):
        grad.sum().backward()


@on_devices
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_without_gradients(mode, device: str) -> None:
    inputs = make_qkv(device, requires_grad=True)
    with mode():
        out, lse = flash_ext.forward(*inputs)
    assert out.grad_fn is None
    assert lse.grad_fn is None
    assert not out.requires_grad


def test_forward_mode_raises() -> None:
    q, k, v = make_qkv()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flash_ext.attention(dual, k, v)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: flash_ext.attention(q, k, v), (q,), (q,))


# ---- torch.func ------------------------------------------------------------------------------------------


@on_devices
def test_func_grad(device: str) -> None:
    q, k, v = make_qkv(device)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, (lse, _) = flash_ext.attention(
            q, k, v, causal=True, return_aux=AuxRequest(lse=True), deterministic=True
        )
        return out.float().sin().sum() + lse.sum()

    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@on_devices
@pytest.mark.parametrize("dim", [0, 2, -1])
def test_vmap_dense(dim: int, device: str) -> None:
    q, k, v = make_qkv(device)
    stacked = torch.stack([q, 2 * q, -q], dim)

    def call(q: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = flash_ext.attention(q, k, v, causal=True, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    out, lse = torch.vmap(call, in_dims=dim)(stacked)
    for i, one in enumerate((q, 2 * q, -q)):
        one_out, one_lse = call(one)
        assert torch.equal(out[i], one_out)
        assert torch.equal(lse[i], one_lse)


@on_devices
def test_vmap_packed(device: str) -> None:
    sets = [make_packed(device) for _ in range(3)]
    cu = sets[0][3]
    q, k, v = (torch.stack([one[i] for one in sets]) for i in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        request = AuxRequest(lse=True)
        out, aux = flash_ext.attention_varlen(q, k, v, cu, cu, causal=True, return_aux=request)
        return out, aux.lse

    out, lse = torch.vmap(call)(q, k, v)
    for i in range(3):
        one_out, one_lse = call(q[i], k[i], v[i])
        assert torch.equal(out[i], one_out)
        assert torch.equal(lse[i], one_lse)
    with pytest.raises(NotImplementedError, match="cu_seqlens"):
        torch.vmap(lambda cu: flash_ext.attention_varlen(q[0], k[0], v[0], cu, cu))(torch.stack([cu, cu]))


@on_devices
@pytest.mark.parametrize("packed", [False, True])
def test_per_sample_gradients(packed: bool, device: str) -> None:
    """vmap over grad: the rule of the backward operator."""
    if packed:
        sets = [make_packed(device) for _ in range(3)]
        cu = sets[0][3]
        inputs = [torch.stack([one[i] for one in sets]) for i in range(3)]
        call = functools.partial(flash_ext.attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu)
    else:
        inputs = [torch.stack([t, t.flip(0), 2 * t]) for t in make_qkv(device)]
        call = flash_ext.attention

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v, causal=True, deterministic=True).float().sin().sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    got = torch.vmap(grad)(*inputs)
    for i in range(3):
        for a, b in zip(got, grad(*(t[i] for t in inputs)), strict=True):
            torch.testing.assert_close(a[i], b, **tolerance(device))


def test_jacobian_of_a_small_case() -> None:
    q, k, v = make_qkv(batch=1, seqlen_q=3, head_dim=4, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda q: flash_ext.attention(q, k, v))(q)
    leaf = q.clone().requires_grad_()
    rows = [
        torch.autograd.grad(value, leaf, retain_graph=True)[0]
        for value in flash_ext.attention(leaf, k, v).flatten()
    ]
    torch.testing.assert_close(jacobian.flatten(0, 3), torch.stack(rows))


# ---- autocast --------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    q, k, v = make_qkv(device, dtype=torch.float32, requires_grad=True)
    with torch.autocast(device, dtype):
        out, (lse, _) = flash_ext.attention(q, k, v.to(dtype), return_aux=AuxRequest(lse=True))
        with torch.autocast(device, enabled=False):
            plain = flash_ext.attention(*(t.to(dtype) for t in (q, k, v)))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(out, plain)
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (q, k, v))
    with torch.autocast(device, dtype):
        grads = flash_ext.backward(torch.ones_like(out), q, k, v, out, lse)
    assert all(grad.dtype == dtype for grad in grads)


@on_devices
def test_autocast_under_torch_func(device: str) -> None:
    q, k, v = make_qkv(device, dtype=torch.float32)

    def loss(q: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return flash_ext.attention(q, k, v, deterministic=True).float().sin().sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    got = torch.func.grad(loss)(q)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


# ---- what training setups attach -------------------------------------------------------------------------


@on_devices
def test_checkpoint_recomputes_once(device: str) -> None:
    inputs = make_qkv(device, requires_grad=True)
    with OperatorCalls() as calls:
        checkpoint(flash_ext.attention, *inputs, use_reentrant=False).sum().backward()
    assert calls.names().count("fwd") == 2


@on_devices
def test_selective_checkpoint_saves_the_operator(device: str) -> None:
    inputs = make_qkv(device, requires_grad=True)

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is FWD else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with OperatorCalls() as calls:
        out = checkpoint(
            lambda q, k, v: flash_ext.attention(q.sin(), k, v),
            *inputs,
            use_reentrant=False,
            context_fn=contexts,
        )
        out.sum().backward()
    assert calls.names().count("fwd") == 1
    assert torch.Tag.nondeterministic_seeded not in FWD.tags


@on_devices
def test_saved_tensors_can_be_offloaded(device: str) -> None:
    inputs = make_qkv(device, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t.cpu(), lambda t: t.to(device)
    ):
        out = flash_ext.attention(*inputs, deterministic=True)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert len(packed) == 5  # q, k, v, out, lse
    expected = torch.autograd.grad(flash_ext.attention(*inputs, deterministic=True).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@on_devices
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 1.0}])
def test_flop_counts_are_those_of_sdpa(options: dict, device: str) -> None:
    b, s_q, s_k, h, d, d_v = 2, 17, 23, 4, 16, 24
    inputs = make_qkv(device, seqlen_q=s_q, seqlen_k=s_k, head_dim_v=d_v, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = flash_ext.attention(*inputs, **options)
    forward = 2 * b * h * s_q * s_k * (d + d_v)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * b * h * s_q * s_k * (3 * d + 2 * d_v)


def test_flop_counts_of_packed_input() -> None:
    q, k, v, cu = make_packed(lengths=(3, 0, 9), spare=2)
    per_score = 2 * 4 * (16 + 16)
    with FlopCounterMode(display=False) as counter:
        flash_ext.attention_varlen(q, k, v, cu, cu)
    assert counter.get_total_flops() == per_score * (3 * 3 + 9 * 9)
    on_meta = [t.to("meta") for t in (q, k, v, cu, cu)]
    with FlopCounterMode(display=False) as counter:  # lengths unknown: bounds when given, else equal lengths
        flash_ext.attention_varlen(*on_meta, max_seqlen_q=9, max_seqlen_k=9)
    assert counter.get_total_flops() == per_score * 3 * 9 * 9
    with FlopCounterMode(display=False) as counter:
        flash_ext.attention_varlen(*on_meta)
    assert counter.get_total_flops() == per_score * (14 * 14 // 3)


@pytest.mark.parametrize("how", ["argument", "global", "neither"])
def test_deterministic_mode_reaches_the_launch(how: str) -> None:
    leaves = make_qkv(dtype=torch.bfloat16, requires_grad=True)
    with null_kernels():
        out = flash_ext.attention(*leaves, deterministic=how == "argument")
        torch.use_deterministic_algorithms(how == "global")
        try:
            out.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        launch = _C.last_launch()
    assert launch["direction"] == "bwd"
    assert launch["deterministic"] == (how != "neither")
