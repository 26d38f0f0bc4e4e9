"""Autograd, compilers and fake tensors, misuse, on whatever device a path serves.

What only needs a CPU, and in more depth, is tested with the op layer; here every path goes through the same.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest
from tests.api.test_ops import check_tracing
from tests.attention.calls import normal
from tests.cases import dense, packed
from tests.harness import Target, on_gpu_paths, on_paths
from tests.inputs import make_inputs


def qkv(target: Target, *, sq: int = 65, sk: int = 65, h: int = 4, h_k: int = 2, d: int = 64) -> list[Tensor]:
    return [normal(target, 2, sq, h, d), normal(target, 2, sk, h_k, d), normal(target, 2, sk, h_k, d)]


def attend(target: Target, *tensors: Tensor, **options):
    return flash_ext.attention(*tensors, backend=target.path, deterministic=True, **options)


# ---- autograd ----


@on_paths
def test_any_subset_of_inputs_may_need_gradients(target: Target) -> None:
    tensors, dout = qkv(target), normal(target, 2, 65, 4, 64)
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(attend(target, *leaves, causal=True), leaves, dout)
    for subset in itertools.product((False, True), repeat=3):
        leaves = [t.clone().requires_grad_(wanted) for t, wanted in zip(tensors, subset)]
        out = attend(target, *leaves, causal=True)
        assert out.requires_grad == any(subset)
        if any(subset):
            out.backward(dout)
        for leaf, wanted, grad in zip(leaves, subset, expected):
            assert torch.equal(leaf.grad, grad) if wanted else leaf.grad is None


@on_paths
def test_backward_twice(target: Target) -> None:
    leaves, dout = [t.requires_grad_() for t in qkv(target)], normal(target, 2, 65, 4, 64)
    out = attend(target, *leaves)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("what", ["q", "k", "v", "out"])
@on_paths
def test_saved_tensors_changed_in_place_are_noticed(target: Target, what: str) -> None:
    leaves = [t.requires_grad_() for t in qkv(target)]
    inputs = [t * 1 for t in leaves]  # not leaves, so that they may be written
    out = attend(target, *inputs)
    loss = out.float().sum()
    dict(zip(("q", "k", "v", "out"), (*inputs, out)))[what].detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.caching
@on_gpu_paths
def test_no_activations_are_kept_without_gradients(target: Target) -> None:
    leaves = [t.requires_grad_() for t in qkv(target, sq=1024, sk=1024)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            before = torch.cuda.memory_allocated()
            out, (lse, _) = attend(target, *leaves, return_aux=AuxRequest(lse=True))
            kept = torch.cuda.memory_allocated() - before
            assert kept <= out.numel() * 2 + lse.numel() * 4 + 1024
            assert not out.requires_grad and not lse.requires_grad


@on_paths
def test_zero_gradients_and_one_nan_row(target: Target) -> None:
    leaves = [t.requires_grad_() for t in qkv(target)]
    out = attend(target, *leaves)
    assert not any(
        g.any() for g in torch.autograd.grad(out, leaves, torch.zeros_like(out), retain_graph=True)
    )
    dout = torch.randn_like(out)
    clean = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    dout[1, 30, 2] = float("nan")
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert dq[1, 30, 2].isnan().all()
    dq[1, 30, 2] = clean[0][1, 30, 2]
    assert torch.equal(dq, clean[0])
    for got, wanted in ((dk, clean[1]), (dv, clean[2])):  # query head 2 reads key head 1
        assert got[1, :, 1].isnan().all()
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1, :, 0], wanted[1, :, 0])


@on_paths
def test_a_gradient_of_another_form_is_refused(target: Target) -> None:
    q, k, v = qkv(target)
    out, lse = flash_ext.forward(q, k, v, backend=target.path)
    for dout, error in ((out.float(), TypeError), (out[:, :-1], ValueError), (out[..., :-1], ValueError)):
        with pytest.raises(error, match="dout"):
            flash_ext.backward(dout, q, k, v, out, lse, backend=target.path)
    for wrong, error in (
        (lse.double() if lse.dtype != torch.float64 else lse.float(), TypeError),
        (lse[:1], ValueError),
    ):
        with pytest.raises(error, match="lse"):
            flash_ext.backward(out, q, k, v, out, wrong, backend=target.path)


@on_paths
def test_vmap_agrees_with_a_loop(target: Target) -> None:
    q, k, v = (normal(target, 3, 2, 33, 2, 64) for _ in range(3))
    call = functools.partial(flash_ext.attention, causal=True, backend=target.path)
    looped = torch.stack([call(*parts) for parts in zip(q, k, v)])
    torch.testing.assert_close(torch.func.vmap(call)(q, k, v), looped, rtol=2.0**-7, atol=1e-3)


@on_paths
def test_lse_is_differentiable_and_backward_takes_given_results(target: Target) -> None:
    """The functional pair, with the gradient of lse, is what autograd computes."""
    tensors, dout = qkv(target, sq=50, sk=65), normal(target, 2, 50, 4, 64)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, (lse, _) = attend(target, *leaves, return_aux=AuxRequest(lse=True), window_size=(20, 3))
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    out, lse = flash_ext.forward(*tensors, window_size=(20, 3), backend=target.path)
    got = flash_ext.backward(
        dout, *tensors, out, lse, dlse=dlse, window_size=(20, 3), deterministic=True, backend=target.path
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


@on_paths
def test_backward_of_one_block_of_keys_of_a_larger_softmax(target: Target) -> None:
    """Ring attention: with out and lse of the whole, the gradients of each half of the keys are its share."""
    q, k, v = qkv(target, sq=40, sk=128)
    dout = normal(target, 2, 40, 4, 64)
    halves = [(k[:, :64], v[:, :64]), (k[:, 64:], v[:, 64:])]
    parts = [flash_ext.forward(q, *half, backend=target.path) for half in halves]
    out, lse = flash_ext.merge_attention_states(*parts[0], *parts[1])
    whole_out, whole_lse = flash_ext.forward(q, k, v, backend=target.path)
    torch.testing.assert_close(out, whole_out, rtol=2.0**-6, atol=4e-3)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)
    whole = flash_ext.backward(dout, q, k, v, whole_out, whole_lse, deterministic=True, backend=target.path)
    shares = [
        flash_ext.backward(dout, q, *half, whole_out, whole_lse, deterministic=True, backend=target.path)
        for half in halves
    ]
    dq = shares[0][0].float() + shares[1][0].float()
    torch.testing.assert_close(dq, whole[0].float(), rtol=0.03, atol=0.03)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([s[i] for s in shares], 1), whole[i], rtol=2.0**-6, atol=4e-3)


# ---- compilers and fake tensors ----


@pytest.mark.parametrize("kind", ["dense", "packed"])
@on_paths
def test_opcheck_with_odd_strides(target: Target, kind: str) -> None:
    case = dense(2, 17, 23, 4, 2, 24, layout="gap", dlse=True, deterministic=True)
    if kind == "packed":
        case = packed([9, 0, 8], [5, 3, 9], num_heads=4, num_heads_k=2, head_dim=24, layout="gap", dlse=True,
                      deterministic=True)  # fmt: skip
    x = make_inputs(case, target.device)
    options = (x.cu_seqlens_q, x.cu_seqlens_k, 0, 0, 0.2, -1, 0, True, target.path)
    arguments = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x.q, x.k, x.v)]
    torch.library.opcheck(torch.ops.flash_ext.fwd.default, (*arguments, *options))
    out, lse = torch.ops.flash_ext.fwd(x.q, x.k, x.v, *options)
    torch.library.opcheck(
        torch.ops.flash_ext.bwd.default,
        (x.dout, x.q, x.k, x.v, out, lse, x.dlse, *options),
        test_utils=("test_schema", "test_faketensor"),
    )


@on_paths
def test_fake_results_look_like_real_ones(target: Target) -> None:
    for layout in ("bshd", "bhsd", "gap", "odd", "packed"):
        for case in (
            dense(2, 30, 30, 4, 4, 24, layout=layout),
            packed([9, 3], [9, 3], head_dim=24, layout=layout),
        ):
            x = make_inputs(case, target.device)
            options = (x.cu_seqlens_q, x.cu_seqlens_k, 0, 0, 0.2, -1, -1, False, target.path)
            check_tracing(torch.ops.flash_ext.fwd.default, (x.q, x.k, x.v, *options))
            out, lse = torch.ops.flash_ext.fwd(x.q, x.k, x.v, *options)
            check_tracing(torch.ops.flash_ext.bwd.default, (x.dout, x.q, x.k, x.v, out, lse, None, *options))


@pytest.mark.slow
@on_gpu_paths
def test_inductor_compiles_a_training_step(target: Target) -> None:
    torch._dynamo.reset()
    weight = normal(target, 256, 256).requires_grad_()
    x = normal(target, 2, 128, 256)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight).unflatten(-1, (4, 64))
        return (
            flash_ext.attention(y, y, y, causal=True, backend=target.path).flatten(-2).float().square().mean()
        )

    grads = []
    for function in (step, torch.compile(step, fullgraph=True)):
        grads.append(torch.autograd.grad(function(x, weight), weight)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=0.05, atol=1e-3)


# ---- misuse ----


@on_paths
def test_misuse_raises_python_errors(target: Target) -> None:
    q, k, v = qkv(target)
    with pytest.raises(TypeError, match="no keyword 'dropout'. Did you mean dropout_p="):
        flash_ext.attention(q, k, v, dropout=0.1)
    with pytest.raises(TypeError):
        flash_ext.attention(q, k, v, True)
    for bad in (None, q.float().cpu().numpy(), [1.0]):
        with pytest.raises(TypeError, match="k must be a torch.Tensor"):
            flash_ext.attention(q, bad, v)
    with pytest.raises(TypeError, match="window_size"):
        flash_ext.attention(q, k, v, window_size=5)


@on_paths
def test_sdpa_twin_against_pytorch(target: Target) -> None:
    """PyTorch's own signature and semantics: (b, h, s, d), causal aligned top-left, any scale."""
    for lengths in ((70, 90), (90, 70)):
        q, k, v = (normal(target, 2, 4, s, 64) for s in (lengths[0], lengths[1], lengths[1]))
        for options in ({}, {"is_causal": True}, {"scale": 0.3}):
            expected = torch.nn.functional.scaled_dot_product_attention(
                q.double(), k.double(), v.double(), **options
            )
            got = flash_ext.scaled_dot_product_attention(q, k, v, **options)
            torch.testing.assert_close(got.double(), expected, rtol=2.0**-6, atol=4e-3)
