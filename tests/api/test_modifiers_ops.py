"""``fwd_mod`` and ``bwd_mod`` inside PyTorch: schemas, shapes, tracing, transforms, autocast, counters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_ext
from flash_ext import AuxRequest, masks
from flash_ext._ops.library_mod import modifier_arguments
from flash_ext._ops.modifiers import NAMES, Modifiers
from tests.api.test_ops import check_tracing, with_gradients
from tests.graphs import capture
from tests.qkv import OperatorCalls, dtype_on, make_packed, make_qkv, on_devices

FWD = torch.ops.flash_ext.fwd_mod.default
BWD = torch.ops.flash_ext.bwd_mod.default

ROWS, KEYS, HEADS = 17, 23, 4
WITH_LSE = AuxRequest(lse=True)


# ---- registration ----------------------------------------------------------------------------------------


def everything(device: str, packed: bool) -> Modifiers:
    """All modifiers at once, in awkward strides."""
    batch = 3 if packed else 2
    rows, keys = ((14, 14) if packed else (ROWS, KEYS))  # fmt: skip

    def intervals(n: int) -> Tensor:
        bounds = torch.randint(0, 9, (n, 2), device=device, dtype=torch.int32)
        return bounds.expand(1, n, 2) if packed else bounds.expand(1, 1, n, 2)

    documents = [
        torch.randint(0, 2, (n,) if packed else (batch, n), device=device).int() for n in (rows, keys)
    ]
    return Modifiers(
        bias=torch.randn(HEADS, 1, KEYS, ROWS, device=device).permute(1, 0, 3, 2),
        mask=torch.rand(batch, 1, ROWS, 2 * KEYS, device=device)[..., ::2] > 0.1,
        document_q=documents[0],
        document_k=documents[1],
        prefix_lens=torch.arange(batch, device=device).int(),
        hidden_rows=intervals(keys).contiguous(),
        hidden_keys=intervals(rows).contiguous(),
        blocks=(torch.rand(2, 2, HEADS, batch, device=device) > 0.2).permute(3, 2, 1, 0),
        slopes=torch.rand(batch, HEADS, device=device),
        sinks=torch.randn(HEADS, device=device),
        rng=flash_ext.dropout_rng(device),
        softcap=3.0, dropout_p=0.2, block_rows=16, block_cols=16, sink_tokens=1, chunk=8, top_left=True,
    )  # fmt: skip


def operator_inputs(kind: str, device: str) -> tuple:
    """Arguments of fwd_mod without the three flags at the end."""
    packed = kind.endswith("packed")
    if packed:
        q, k, v, cu = make_packed(device)
        tensors = (q, k, v, cu, cu)
    else:
        tensors = (*make_qkv(device, seqlen_q=ROWS, seqlen_k=KEYS, head_dim_v=24), None, None)
    mods = everything(device, packed) if kind.startswith("all") else Modifiers()
    if kind == "bias and sinks":
        mods = Modifiers(
            bias=torch.randn(1, HEADS, ROWS, 1, device=device, dtype=dtype_on(device)),
            sinks=torch.randn(HEADS, device=device),
            mask=torch.rand(1, 1, 1, KEYS, device=device) > 0.5,
        )
    if kind.startswith("distance"):
        batch = 3 if packed else 2
        mods = Modifiers(bias=torch.randn(batch, HEADS, 2 * 5 + 1, device=device), softcap=2.0)
    return *tensors, 0, 0, 0.3, 9, 4, *modifier_arguments(mods)


KINDS = ("all", "all packed", "bias and sinks", "distance", "distance packed", "none")


def backward_inputs(kind: str, device: str) -> tuple:
    args = operator_inputs(kind, device)
    out, lse, _ = FWD(*args, False, False, None)
    needs = (kind != "bias and sinks", *(args[at] is not None for at in (10, 18, 19)))
    return torch.randn_like(out), *args[:3], out, lse, torch.randn_like(lse), *args[3:], *needs, False, None


def test_arguments_stand_in_the_order_of_the_fields() -> None:
    fields: dict[str, Any] = {name: name for name in NAMES}
    assert modifier_arguments(Modifiers(**fields)) == NAMES


@on_devices
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_fwd_mod(kind: str, device: str) -> None:
    """With gradients; without is in test_no_lse.py."""
    args = (*operator_inputs(kind, device), kind != "bias and sinks", False, None)
    torch.library.opcheck(FWD, with_gradients(args))


@on_devices
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_bwd_mod(kind: str, device: str) -> None:
    torch.library.opcheck(BWD, backward_inputs(kind, device))


@on_devices
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_for_tracing_are_the_real_ones(kind: str, device: str) -> None:
    check_tracing(FWD, (*operator_inputs(kind, device), True, False, None))
    check_tracing(BWD, backward_inputs(kind, device))


def test_public_calls_trace_on_meta() -> None:
    q, k, v = (t.to("meta") for t in make_qkv())
    mask = torch.empty(17, 17, device="meta", dtype=torch.bool)
    bias = torch.ones(17, 17, device="meta", requires_grad=True)
    out, aux = flash_ext.attention(
        q, k, v, bias=bias, dropout_p=0.1, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    assert (out.shape, aux.lse.shape, aux.max_scores.shape) == (q.shape, (2, 4, 17), (2, 4, 17))
    (grad,) = torch.autograd.grad(out, bias, torch.empty_like(out))
    assert grad.shape == bias.shape
    assert flash_ext.attention(q, k, v, mask=mask).shape == q.shape


def test_calls_trace_for_a_gpu() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 16, HEADS, 64, dtype=torch.bfloat16, device="cuda")
        bias = torch.empty(16, 16, device="cuda")
        out = flash_ext.attention(q, q, q, bias=bias, dropout_p=0.1)
        assert (out.shape, out.device.type) == (q.shape, "cuda")
        with pytest.raises(ValueError, match="bias must be on the device of q, cuda:0, got one on cpu"):
            flash_ext.attention(q, q, q, bias=torch.zeros(16, 16))
        with pytest.raises(ValueError, match="mask must be on the device of q, cuda:0, got one on cpu, Ca"):
            ids = torch.zeros(16, dtype=torch.int32)
            flash_ext.attention(q, q, q, mask=masks.DocumentCausal(ids))


# Field, the value of a direct call of the operator, and words of the refusal.
NOT_NORMALISED = {
    "bias rank": ({"bias": torch.zeros(ROWS, KEYS)}, ValueError, r"bias must have shape .*got \(17, 23\)"),
    "entries, even": ({"bias": torch.zeros(1, 4, 6)}, ValueError, "an odd number of entries, got 6"),
    "entries, none": ({"bias": torch.zeros(1, 4, 0)}, ValueError, "an odd number of entries, got 0"),
    "entries, heads": ({"bias": torch.zeros(1, 2, 5)}, ValueError, r"bias must have shape .*got \(1, 2, 5\)"),
    "entries, dtype": ({"bias": torch.zeros(1, 4, 5).bfloat16()}, TypeError, "must be torch.float32, got"),
    "entries, strides": ({"bias": torch.zeros(1, 5, 4).mT}, ValueError, "bias must be contiguous"),
    "bias dtype": ({"bias": torch.zeros(1, 1, 1, 1).double()}, TypeError, "bias must be torch.float32, got"),
    "mask dtype": ({"mask": torch.zeros(1, 1, 1, 1)}, TypeError, "mask must be torch.bool"),
    "one document": ({"document_q": torch.zeros(2, ROWS).int()}, ValueError, "must be given together"),
    "strides": ({"prefix_lens": torch.zeros(4).int()[::2]}, ValueError, "prefix_lens must be contiguous"),
    "slopes": ({"slopes": torch.zeros(2, 3)}, ValueError, r"slopes must have shape \(2, 4\), got \(2, 3\)"),
    "sinks": ({"sinks": torch.zeros(4).double()}, TypeError, "sinks must be torch.float32, got"),
    "no rng": ({"dropout_p": 0.5}, ValueError, "rng must be given with dropout_p"),
    "rng": ({"rng": torch.zeros(2)}, TypeError, "rng must be torch.int64"),
    "dropout": ({"dropout_p": 2.0}, ValueError, "dropout_p must be a probability"),
    "softcap": ({"softcap": -2.0}, ValueError, "softcap must be"),
    "chunk": ({"chunk": -1}, ValueError, "sink_tokens and chunk must not be negative, got 0 and -1"),
    "intervals": ({"hidden_rows": torch.zeros(1, 1, KEYS, 3).int()}, ValueError, "hidden_rows must have"),
    "block size": ({"blocks": torch.ones(1, 1, 1, 1) > 0, "block_rows": 8, "block_cols": 16}, ValueError,
                   r"block_rows and block_cols must be positive multiples of 16, got \(8, 16\)"),
    "blocks": ({"blocks": torch.ones(1, 1, 1, 1) > 0, "block_rows": 16, "block_cols": 16}, ValueError,
               "blocks must have shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_NORMALISED)
def test_the_operator_refuses_what_is_not_normalised(case: str) -> None:
    fields, exception, words = NOT_NORMALISED[case]
    q, k, v = make_qkv(seqlen_q=ROWS, seqlen_k=KEYS)
    for device in ("cpu", "meta"):
        moved = {
            n: t.to(device) if isinstance(t, Tensor) and case != "strides" else t for n, t in fields.items()
        }
        if case == "strides" and device == "meta":
            continue
        args = (*(t.to(device) for t in (q, k, v)), None, None, 0, 0, 0.3, -1, -1)
        with pytest.raises(exception, match=words):
            FWD(*args, *modifier_arguments(Modifiers(**moved)), False, False, None)


@on_devices
def test_a_gradient_that_is_not_needed_or_not_there_has_no_elements(device: str) -> None:
    args = backward_inputs("none", device)
    for needs, with_elements in (((False, True, True, True), 0), ((True, True, True, True), 3)):
        sizes = [grad.numel() > 0 for grad in BWD(*args[:-6], *needs, False, None)]
        assert sizes == [True] * with_elements + [False] * (6 - with_elements)


# ---- autograd and transforms -----------------------------------------------------------------------------


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    out, aux = flash_ext.attention(
        q, k, v, bias=bias, sinks=sinks, softcap=5.0, causal=True, return_aux=WITH_LSE
    )
    return out.sin().sum() + aux.lse.cos().sum()


def biased_inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    tensors = (*make_qkv(dtype=dtype), torch.randn(2, 1, 17, 17), torch.randn(HEADS))
    return [t.requires_grad_() for t in tensors]


def test_saved_tensors_are_guarded_against_writing() -> None:
    *inputs, sinks = biased_inputs()
    bias = inputs[3] * 1
    loss = biased(*inputs[:3], bias, sinks)
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def by_distance(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    bias = masks.RelativePosition(table, bucketing="clip")
    out, aux = flash_ext.attention(q, k, v, bias=bias, softcap=5.0, return_aux=WITH_LSE)
    return out.sin().sum() + aux.lse.cos().sum()


@pytest.mark.parametrize("function", [biased, by_distance])
def test_func_grad_and_vmap(function: Callable[..., Tensor]) -> None:
    """Of each input; and per sample, with queries and the last input mapped and the others shared."""
    inputs = biased_inputs()
    if function is by_distance:
        inputs = [*inputs[:3], torch.randn(HEADS, 9).requires_grad_()]
    expected = torch.autograd.grad(function(*inputs), inputs)
    first, *shared, last = [t.detach() for t in inputs]
    grad = torch.func.grad(function, argnums=tuple(range(len(inputs))))
    assert all(torch.equal(a, b) for a, b in zip(grad(first, *shared, last), expected, strict=True))

    queries, others = torch.stack([first, -first]), torch.stack([last, 2 * last])
    got = torch.vmap(grad, in_dims=(0, *(None for _ in shared), 0))(queries, *shared, others)
    for i in range(2):
        want = grad(queries[i], *shared, others[i])
        assert all(torch.equal(a[i], b) for a, b in zip(got, want, strict=True))


def test_a_table_has_no_further_derivatives() -> None:
    inputs = [t.requires_grad_() for t in (*make_qkv(), torch.randn(HEADS, 9))]
    (grad,) = torch.autograd.grad(by_distance(*inputs), inputs[3], create_graph=True)
    bias = masks.RelativePosition(inputs[3], bucketing="clip")
    out, lse = (t.detach() for t in flash_ext.forward(*inputs[:3], bias=bias))
    (by_pair,) = flash_ext.backward(torch.ones_like(out), *inputs[:3], out, lse, bias=bias, needs=("bias",))
    for first in (grad, by_pair):
        with pytest.raises(RuntimeError, match="second derivative of attention is not implemented"):
            first.sum().backward()
    q, k, v, table = (t.detach() for t in inputs)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(table, torch.ones_like(table))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            by_distance(q, k, v, dual)


def test_autocast_leaves_a_relative_position_bias_in_float32() -> None:
    q, k, v = make_qkv(dtype=torch.float32)
    half = [t.bfloat16() for t in (q, k, v)]
    for dtype in (torch.float32, torch.bfloat16):
        table = torch.randn(HEADS, 9).to(dtype).requires_grad_()
        bias = masks.RelativePosition(table, bucketing="clip")
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_ext.attention(q, k, v, bias=bias)
        plain = flash_ext.attention(*half, bias=bias)
        assert out.dtype == torch.bfloat16 and torch.equal(out, plain)
        (grad,) = torch.autograd.grad(out.float().sum(), table)
        assert grad.dtype == dtype


def test_vmap_over_packed_calls_and_dropout() -> None:
    q, k, v, cu = make_packed()
    shorter = cu.clone().clamp_(max=7)

    def call(q: Tensor, cu: Tensor) -> Tensor:
        return flash_ext.attention_varlen(q, k, v, cu, cu, sinks=torch.ones(HEADS))

    got = torch.vmap(call, in_dims=(None, 0))(q, torch.stack([cu, shorter]))
    assert torch.equal(got, torch.stack([call(q, cu), call(q, shorter)]))

    x = make_qkv()
    alike, different = (
        torch.vmap(lambda q: flash_ext.attention(q, *x[1:], dropout_p=0.5), randomness=mode)(
            torch.stack([x[0]] * 2)
        )
        for mode in ("same", "different")
    )
    assert torch.equal(alike[0], alike[1])
    assert not torch.equal(different[0], different[1])


def test_deterministic_mode_reaches_the_gradient() -> None:
    """As it was in the forward, by autograd and by a transform."""
    seen = []
    for how in ("argument", "global", "neither"):
        q, k, v = make_qkv(requires_grad=True)
        attend = functools.partial(flash_ext.attention, softcap=2.0, deterministic=how == "argument")
        torch.use_deterministic_algorithms(how == "global")
        try:
            out = attend(q, k, v)
            _, pull_back = torch.func.vjp(lambda q: attend(q, k, v), q.detach())  # noqa: B023
        finally:
            torch.use_deterministic_algorithms(False)
        with OperatorCalls() as calls:
            out.sum().backward()
            pull_back(torch.ones_like(out))
        seen += [args[-2] for name, args, _ in calls.seen if name == "bwd_mod"]
    assert seen == [True, True, True, True, False, False]


# ---- autocast --------------------------------------------------------------------------------------------


@on_devices
def test_autocast(device: str) -> None:
    q, k, v = make_qkv(device, dtype=torch.float32, requires_grad=True)
    half = [t.detach().bfloat16() for t in (q, k, v)]
    for bias_dtype in (torch.float32, torch.bfloat16):
        bias = torch.randn(17, 17, device=device).to(bias_dtype).requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            out, (lse, _) = flash_ext.attention(q, k, v, bias=bias, return_aux=WITH_LSE)
        plain, _ = flash_ext.forward(*half, bias=bias)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(out, plain)
        out.float().sum().backward()
        assert (q.grad.dtype, bias.grad.dtype) == (torch.float32, bias_dtype)
    with torch.autocast(device, torch.bfloat16):
        dout = torch.ones_like(out)
        dq, dbias = flash_ext.backward(dout, q, k, v, out, lse, bias=bias, needs=("q", "bias"))
    assert (dq.dtype, dbias.dtype) == (torch.bfloat16, torch.bfloat16)

    def loss(q: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return (
                flash_ext.attention(q, k.detach(), v.detach(), softcap=3.0, deterministic=True).float().sum()
            )

    (expected,) = torch.autograd.grad(loss(q), q)
    assert torch.equal(torch.func.grad(loss)(q.detach()), expected)


def test_a_half_bias_of_float32_inputs_is_taken_under_autocast_only() -> None:
    q, k, v = make_qkv()
    bias = torch.randn(17, 17).bfloat16()
    with pytest.raises(TypeError, match="bias must be .* got torch.bfloat16"):
        flash_ext.attention(q, k, v, bias=bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_ext.attention(q, k, v, bias=bias).dtype == torch.bfloat16


# ---- graphs ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.caching
def test_dropout_in_a_cuda_graph_draws_anew_at_every_replay() -> None:
    q, k, v = make_qkv("cuda")
    bias = torch.ones(17, 17, device="cuda")
    graph, out = capture(lambda: flash_ext.attention(q, k, v, dropout_p=0.5, bias=bias))
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(out.clone())
    assert not torch.equal(*draws)
