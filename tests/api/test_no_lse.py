"""Forwards that nobody asks for lse: the output has the same bits, and no lse is there."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest, masks
from flash_ext._ops import plan as planned
from flash_ext._ops.dispatch_cached import run_cached
from flash_ext._ops.library import _C
from flash_ext._ops.library_mod import modifier_arguments
from flash_ext._ops.modifiers import Modifiers
from flash_ext.compat import flash_attn
from tests.api.test_ops import with_gradients
from tests.conftest import NO_CACHING
from tests.graphs import capture
from tests.qkv import OperatorCalls, make_packed, make_qkv, null_kernels, on_devices, tolerance

OPS = torch.ops.flash_ext
LSE = AuxRequest(lse=True)
BATCH = 2
Attention = Callable[..., Any]


def elements_of(call: Attention) -> list[int]:
    """How many elements the lse of each forward has."""
    with OperatorCalls() as calls:
        call()
    return [results[1].numel() for name, _, results in calls.seen if name.startswith("fwd")]


# ---- what public calls ask for ---------------------------------------------------------------------------


def public_calls(device: str) -> dict[str, Attention]:
    """Calls that take ``return_aux``, by what they are about."""
    q, k, v = make_qkv(device)
    p, pk, pv, cu = make_packed(device, spare=0)
    keep = torch.rand(2, 17, device=device) > 0.3
    prepared = masks.KeyMask(keep)
    dense = functools.partial(flash_ext.attention, q, k, v)
    packed = functools.partial(flash_ext.attention_varlen, p, pk, pv, cu, cu)
    used = torch.tensor([2, 0, 5], device=device, dtype=torch.int32)
    return {
        "dense": dense,
        "heads first": functools.partial(
            flash_ext.attention, *(t.transpose(1, 2) for t in (q, k, v)), layout="bhsd"
        ),
        "masked": functools.partial(dense, mask=keep[:, None, None, :], causal=True),
        "prepared": functools.partial(dense, mask=prepared),
        "sinks": functools.partial(dense, sinks=torch.randn(4, device=device), softcap=3.0),
        "packed": packed,
        "packed, masked": functools.partial(packed, mask=masks.SlidingWindow(3, sink_tokens=1)),
        "cached": functools.partial(packed, seqused_k=used),
        "no keys": functools.partial(flash_ext.attention, q, k[:, :0], v[:, :0]),
    }


NAMES = tuple(public_calls("cpu"))


@on_devices
@pytest.mark.parametrize("name", NAMES)
def test_lse_is_made_where_it_is_asked_for(name: str, device: str) -> None:
    call = public_calls(device)[name]
    with torch.no_grad():
        for _ in range(2):  # the second one finds what the mask has kept
            wanted, aux = call(return_aux=LSE)
            assert aux.lse.isfinite().any() or name == "no keys"
            assert elements_of(lambda: call(return_aux=LSE)) == [aux.lse.numel()]
            assert elements_of(call) == [0]
            assert torch.equal(call(), wanted)
            with_maxima = functools.partial(call, return_aux=AuxRequest(max_scores=True))
            if name == "cached":  # which has none
                continue
            assert elements_of(with_maxima) == [0]
            out, found = with_maxima()
            assert found.lse is None
            if device == "cuda" and name in ("dense", "heads first"):  # maxima are another operator's, there
                torch.testing.assert_close(out, wanted, rtol=2**-6, atol=2**-7)
            else:
                assert torch.equal(out, wanted)
            both = call(return_aux=AuxRequest(lse=True, max_scores=True))[1]
            assert torch.equal(found.max_scores, both.max_scores)


@on_devices
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_a_gradient_has_its_lse(options: dict[str, float], device: str) -> None:
    """Where autograd keeps it for the backward, it is there whatever was asked."""
    leaves = make_qkv(device, requires_grad=True)
    dout = torch.randn_like(leaves[0])
    options = {"deterministic": True, **options}
    found = []
    for more in ({}, {"return_aux": LSE}):
        call = functools.partial(flash_ext.attention, *leaves, **options, **more)
        assert elements_of(call) == [2 * 4 * 17]
        out = call()[0] if more else call()
        found.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][1].abs().max() > 0
    with torch.no_grad():
        assert elements_of(lambda: flash_ext.attention(*leaves, **options)) == [0]


def test_the_functional_pair_has_it() -> None:
    q, k, v = make_qkv()
    assert elements_of(lambda: flash_ext.forward(q, k, v)) == [2 * 4 * 17]
    assert elements_of(lambda: flash_ext.forward(q, k, v, softcap=2.0)) == [2 * 4 * 17]


@on_devices
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_under_vmap_as_without(options: dict[str, float], device: str) -> None:
    """vmap asks for no gradient by itself; autograd around it does, and a transform that differentiates."""
    q, k, v = make_qkv(device)
    attend = functools.partial(flash_ext.attention, deterministic=True, **options)
    mapped = torch.vmap(lambda *x: attend(*(t[None] for t in x))[0])
    calls = 2 if options else 1  # with modifiers one for each element
    each = BATCH // calls * 4 * 17
    assert elements_of(lambda: mapped(q, k, v)) == [0] * calls
    close = functools.partial(torch.testing.assert_close, **tolerance(device))
    close(mapped(q, k, v), attend(q, k, v))
    leaves = make_qkv(device, requires_grad=True)
    assert elements_of(lambda: mapped(*leaves)) == [each] * calls
    with torch.no_grad():
        assert elements_of(lambda: mapped(*leaves)) == [0] * calls
    close(*(torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (mapped, attend)))
    grad = torch.func.grad(lambda *x: mapped(*x).square().sum(), argnums=(0, 1, 2))
    assert elements_of(lambda: grad(q, k, v)) == [each] * calls
    with torch.autocast(device, torch.bfloat16):
        assert mapped(q.float(), k.float(), v.float()).dtype == torch.bfloat16


def other_calls() -> dict[str, Attention]:
    """Calls whose lse has a flag of its own."""
    p, pk, pv, cu = make_packed(spare=0)
    serving = functools.partial(flash_ext.serving.flash_attn_varlen_func, p, pk, pv, 9, cu, 9, cu)
    packed = functools.partial(flash_attn.flash_attn_varlen_func, p, pk, pv, cu, cu, 9, 9)
    dense = functools.partial(flash_attn.flash_attn_func, *make_qkv())
    return {
        "serving": serving,
        "serving, cached": functools.partial(serving, seqused_k=torch.tensor([2, 0, 5], dtype=torch.int32)),
        "flash_attn": dense,
        "flash_attn, dropout": functools.partial(dense, dropout_p=0.5),
        "flash_attn, packed": packed,
        "flash_attn, packed, dropout": functools.partial(packed, dropout_p=0.5),
    }


@pytest.mark.parametrize("name", other_calls())
def test_other_functions_ask_for_what_they_return(name: str) -> None:
    call, flag = other_calls()[name], "return_softmax_lse" if "serving" in name else "return_attn_probs"
    with_lse = functools.partial(call, **{flag: True})
    assert elements_of(call) == [0]
    assert (
        elements_of(with_lse)[0]
        == (2 * 17 if name.startswith("flash_attn") and "packed" not in name else 12) * 4
    )
    found = []
    for function in (call, with_lse):
        torch.manual_seed(3)
        found.append(function())
    assert torch.equal(found[0], found[1][0])


# ---- the operators ---------------------------------------------------------------------------------------


def operator_calls(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Operators and their arguments up to ``want_lse``."""
    q, k, v = make_qkv(device)
    p, pk, pv, cu = make_packed(device)
    used = torch.tensor([2, 0, 5], device=device, dtype=torch.int32)
    numbers = (0, 0, 0.3, 9, 4)
    mods = modifier_arguments(Modifiers(sinks=torch.randn(4, device=device)))
    return {
        "fwd": (OPS.fwd.default, (q, k, v, None, None, *numbers, False, None, False)),
        "fwd packed": (OPS.fwd.default, (p, pk, pv, cu, cu, *numbers, False, None, False)),
        "fwd_mod": (
            OPS.fwd_mod.default, (q, k, v, None, None, *numbers, *mods, False, False, None, False)),
        "fwd_mod maxima": (
            OPS.fwd_mod.default, (p, pk, pv, cu, cu, *numbers, *mods, True, False, None, False)),
        "fwd_cached": (
            OPS.fwd_cached.default, (p, pk, pv, cu, cu, used, None, *numbers, None, None, 0.0, None)),
    }  # fmt: skip


OPERATORS = tuple(operator_calls("cpu"))


@on_devices
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_without_lse(name: str, device: str) -> None:
    op, args = operator_calls(device)[name]
    with_lse, without = op(*args, True), op(*args, False)
    assert without[1].shape == (0,) and without[1].dtype == with_lse[1].dtype
    assert with_lse[1].numel() > 0
    others = ((a, b) for i, (a, b) in enumerate(zip(with_lse, without, strict=True)) if i != 1)
    assert all(torch.equal(a, b) for a, b in others)
    assert all(torch.equal(a, b) for a, b in zip(op(*args), with_lse, strict=True))  # the default


@on_devices
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, device: str) -> None:
    op, args = operator_calls(device)[name]
    if name in ("fwd", "fwd_mod"):  # the same ones of packed sequences without gradients
        args = with_gradients(args)
    torch.library.opcheck(op, (*args, False))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_gpu_side_returns_what_the_cpu_does(name: str) -> None:
    op, args = operator_calls("cpu")[name]
    args = tuple(a.bfloat16() if isinstance(a, Tensor) and a.dim() > 2 else a for a in args)
    wanted = [(t.shape, t.dtype) for t in op(*args, False)]
    with null_kernels():
        assert [(t.shape, t.dtype) for t in op(*args, False)] == wanted


def test_no_keys_at_all() -> None:
    """Nothing runs; with sinks dense lse is the sink, and packed sequences would need a kernel for it."""
    mods = modifier_arguments(Modifiers(sinks=torch.randn(4)))
    numbers = (0, 0, 0.3, -1, -1)
    q, k, v = (t.bfloat16() for t in make_qkv())
    p, pk, pv, cu = (t.bfloat16() if t.is_floating_point() else t for t in make_packed())
    with null_kernels():
        for tensors in ((q, k[:, :0], v[:, :0], None, None), (p, pk[:0], pv[:0], cu, cu * 0)):
            out, lse, row_max = OPS.fwd_mod.default(
                *tensors, *numbers, *mods, True, False, None, False, False
            )
            assert not out.any() and lse.shape == (0,) and (row_max == -torch.inf).all()


@on_devices
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_compiled(needs_gradient: bool, options: dict[str, float], device: str) -> None:
    leaves = make_qkv(device, requires_grad=needs_gradient)
    options = {"deterministic": True, **options}

    def attend(*qkv: Tensor) -> Tensor:
        return 2 * flash_ext.attention(*qkv, **options)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    elements = [2 * 4 * 17 if needs_gradient else 0]
    assert torch.equal(compiled(*leaves), attend(*leaves))
    assert elements_of(lambda: attend(*leaves)) == elements
    if needs_gradient:
        grads = (torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, attend))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_sharded_without_lse() -> None:
    """What has no elements is the same on every rank."""
    pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.tensor import Replicate

    from flash_ext._ops import dtensor

    class Mesh:
        shape = (2,)

    q, k, v = make_qkv()
    k.mesh = Mesh  # type: ignore[attr-defined]
    options = (0, 0, 0.25, -1, -1, False, None)
    for flags, is_there in (((), True), ((False, False), False)):
        strategies = dtensor.fwd_strategies(q, k, v, None, None, *options, *flags)
        assert any(placements[1] != Replicate() for placements, _ in strategies) == is_there
        assert all(len(arguments) == 5 + 7 + len(flags) for _, arguments in strategies)
        rest = (*options[:5], *modifier_arguments(Modifiers()), True, False, None, *flags)
        modified = dtensor.fwd_mod_strategies(q, k, v, None, None, *rest)
        assert any(placements[1] != Replicate() for placements, _ in modified) == is_there
        assert any(placements[2] != Replicate() for placements, _ in modified)


@on_devices
@pytest.mark.parametrize("wanted", [False, True])
def test_torch_says_whether_it_wants_it(wanted: bool, device: str) -> None:
    """Its operator for masks has an argument for that; the one without a mask always wants lse."""
    q, k, v = (t.to(torch.bfloat16).transpose(1, 2) for t in make_qkv(device, heads_k=4))
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    set_sdpa = OPS._set_sdpa.default
    set_sdpa("CUDA" if device == "cuda" else "CPU")
    try:
        out, lse, *_ = op(q, k, v, None, wanted)
    finally:
        set_sdpa("")
    assert lse.shape == (2, 4, 32 if wanted else 0)
    ours = flash_ext.attention(*(t.transpose(1, 2) for t in (q, k, v)))
    if device == "cpu":
        assert torch.equal(out.transpose(1, 2), ours)
    else:  # whose kernel is that of calls without modifiers
        torch.testing.assert_close(out.transpose(1, 2), ours, rtol=2**-6, atol=2**-7)


# ---- fp8 -------------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("mode", ["fp8", "mixed"])
@pytest.mark.parametrize("packed", [False, True])
def test_fp8(mode: str, packed: bool, device: str) -> None:
    """Where k is shifted, its lse is put back in a second step."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    make = {"device": device, "dtype": torch.bfloat16}
    shape = (300,) if packed else (2, 150)
    q, k, v = (torch.randn(*shape, heads, 64, **make) for heads in (4, 2, 2))
    cu = torch.tensor([0, 100, 100, 300], device=device, dtype=torch.int32) if packed else None
    bounds = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {}
    x = flash_ext.fp8.quantize_fp8(q, k, v, mode=mode, **bounds)
    call = functools.partial(flash_ext.fp8.attention_fp8, x, causal=True)
    wanted, aux = call(return_aux=LSE)
    assert elements_of(lambda: call(return_aux=LSE)) == [aux.lse.numel()] == [300 * 4]
    assert elements_of(call) == [0]
    assert torch.equal(call(), wanted)


@on_devices
def test_gradients_of_fp8(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    make = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    leaves = [torch.randn(1, 70, 2, 64, **make) for _ in range(3)]
    dout = torch.randn_like(leaves[0])
    found = []
    for more in ({}, {"return_aux": LSE}):
        out = flash_ext.fp8.attention_fp8(flash_ext.fp8.quantize_fp8(*leaves), **more)
        found.append(torch.autograd.grad(out[0] if more else out, leaves, dout))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(grad.abs().max() > 0 for grad in found[0])


# ---- every row of the plan on a GPU ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowCall:
    """A forward that a row of csrc/plan/ runs.

    Attributes:
        row: its name; asked for, unless the call is one of short sequences, whose row is the first choice.
        lengths: of the queries and of the keys.
        options: words for what the call has beside q, k and v.
        asks: more constraints of ``backend=``.
    """

    row: str
    lengths: tuple[int, int] = (333, 457)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 128
    options: tuple[str, ...] = ()
    asks: str = ""

    @property
    def backend(self) -> str:
        path, *_, last = self.row.split(".")
        row = "" if last == "short" or "fwd_cached" in self.row else f"row={self.row} short_kernels=0"
        return " ".join(filter(None, (path, row, self.asks)))

    def __str__(self) -> str:
        words = "+".join(self.options).replace(" ", "_")
        return f"{self.row}-{'x'.join(map(str, self.lengths))}-{self.head_dim}{words and '-' + words}"


def row_calls() -> Iterator[RowCall]:
    """For each row: calls with whole and cut tiles, with rows that see no key, and packed ones."""
    hides_rows = (457, 333)  # the first rows of a causal call see nothing
    short = RowCall("sm80.fwd.short", lengths=(49, 49), head_dim=64)
    yield from (short, dataclasses.replace(short, lengths=(49, 33), options=("causal",)))
    modified_short = dataclasses.replace(short, row="sm80.fwd_mod.short", options=("bias",))
    yield from (modified_short, dataclasses.replace(modified_short, options=("bias", "sinks", "dropout")))
    for row, head_dim in (("sm80.fwd", 64), ("sm80.fwd", 256), ("sm90.fwd.m64", 64), ("sm90.fwd.m128", 64),
                          ("sm90.fwd.m128", 128), ("sm90.fwd.m192", 128),
                          ("sm90.fwd.m128_wide", 256)):  # fmt: skip
        call = RowCall(row, head_dim=head_dim)
        yield call
        yield dataclasses.replace(call, lengths=hides_rows, options=("causal",))
        yield dataclasses.replace(call, options=("packed", "causal"))
    split = RowCall("sm80.fwd.split_kv", lengths=(1, 2000), heads=(8, 2))
    for asks in ("kv_splits=1", "kv_splits=5"):
        yield dataclasses.replace(split, asks=asks)
        yield dataclasses.replace(split, asks=asks, options=("packed",))
        yield dataclasses.replace(split, row="sm80.fwd_mod.split_kv", asks=asks, options=("sinks", "softcap"))
        few = dataclasses.replace(split, row="sm90.fwd.packed", lengths=(16, 2000), asks=asks)
        yield from (few, dataclasses.replace(few, options=("causal",)))
    parts = RowCall("sm90.fwd.parts", lengths=(300, 2000), heads=(8, 2), asks="kv_splits=3")
    yield from (parts, dataclasses.replace(parts, lengths=hides_rows, options=("causal",)))
    for row, *options in (
        ("sm80.fwd_mod", "bias", "mask"), ("sm80.fwd_mod", "sinks", "dropout"),
        ("sm90.fwd_mod.m192.slopes", "alibi"), ("sm90.fwd_mod.m192.cap", "softcap"),
        ("sm90.fwd_mod.m192.bias", "bias"), ("sm90.fwd_mod.m192.words", "mask"),
        ("sm90.fwd_mod.m192.loose_bias", "full_bias"),
        ("sm90.fwd_mod.m192.hide", "key_padding"), ("sm90.fwd_mod.m128.exponents", "alibi"),
        ("sm90.fwd_mod.m128.bias", "bias"), ("sm90.fwd_mod.m128.drop", "dropout"),
        ("sm90.fwd_mod.m128.loose_bias", "full_bias"), ("sm90.fwd_mod.m128.float_bias", "float_bias"),
        ("sm90.fwd_mod.m128.hide", "mask"), ("sm90.fwd_mod.m128.all", "bias", "dropout", "sinks"),
    ):  # fmt: skip
        call = RowCall(row, options=tuple(options))
        yield call
        yield dataclasses.replace(call, lengths=hides_rows, options=(*options, "causal"))
    for variant, option in (("drop", "dropout"), ("float_bias", "float_bias")):
        call = RowCall(f"sm90.fwd_mod.m192.{variant}", head_dim=64, options=(option,))
        yield from (call, dataclasses.replace(call, lengths=hides_rows, options=(option, "causal")))
    for variant, option in (
        ("slopes", "alibi"), ("cap", "softcap"), ("bias", "bias"), ("hide", "key_padding"),
    ):  # fmt: skip
        call = RowCall(f"sm90.fwd_mod.m192_wide.{variant}", head_dim=64, options=(option,))
        yield from (call, dataclasses.replace(call, lengths=hides_rows, options=(option, "causal")))
    for head_dim in (64, 128):
        for mode in ("fp8", "mixed"):
            for more in ((), ("causal",), ("packed", "causal")):
                yield RowCall("sm90.fwd_fp8", head_dim=head_dim, options=(mode, *more))
    for asks in ("kv_splits=1", "kv_splits=5"):
        yield RowCall("sm80.fwd_cached", (3, 700), (8, 2), options=("pages",), asks=asks)
        yield RowCall("sm80.fwd_cached", (200, 700), (8, 2), options=("pages", "causal"), asks=asks)
        yield RowCall("sm80.fwd_cached.mod", (3, 700), (8, 2), options=("pages", "softcap"), asks=asks)
        for rows in (3, 30):
            yield RowCall(
                "sm80.fwd_cached.quantized", (rows, 700), (8, 2), options=("pages", "e4m3"), asks=asks
            )
    for asks in ("kv_splits=1", "kv_splits=5"):
        yield RowCall("sm90.fwd_cached.packed", (30, 700), (8, 2), options=("pages", "causal"), asks=asks)
        for name, *more in (("quantized", "e4m3"), ("quantized", "e4m3", "softcap"), ("mod", "softcap")):
            row = f"sm90.fwd_cached.packed_{name}"
            yield RowCall(row, (30, 700), (8, 2), options=("pages", *more), asks=asks)
        yield RowCall("sm90.fwd_cached.latent", (3, 700), (8, 1), 576, ("pages", "causal"), asks)
    yield RowCall("sm90.fwd_cached", (200, 700), (8, 2), options=("pages",))
    yield RowCall("sm90.fwd_cached", (200, 700), (8, 2), options=("pages", "causal"))  # some see nothing


ROW_CALLS = tuple(row_calls())


def test_every_forward_of_the_plan_is_here() -> None:
    forwards = {row for _, row, _ in _C.plan_rows() if row.split(".")[1].startswith("fwd")}
    assert {call.row for call in ROW_CALLS} == forwards


@pytest.mark.parametrize("call", ROW_CALLS, ids=str)
def test_rows_serve_these_calls(call: RowCall) -> None:
    sizes = [f"{name}={a}/{b}" for name, (a, b) in (("seqlen", call.lengths), ("heads", call.heads))]
    batch = 1 if "packed" in call.options else BATCH  # packed lengths are those of all sequences together
    head_dim = "576/512" if call.head_dim == 576 else str(call.head_dim)
    words = [*sizes, f"head_dim={head_dim}", f"batch={batch}", call.backend, *call.options]
    assert planned.plan(f"fwd {' '.join(words)} gpu=9.0/132")["row"] == call.row


class Prepared:
    """The tensors of a call, and the two ways to make it; masks and pages are prepared before."""

    def __init__(self, call: RowCall) -> None:
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        rows, keys = call.lengths
        self.words = {*call.options}
        packed = "packed" in self.words
        lead = () if packed else (BATCH,)
        q = torch.randn(*lead, rows, call.heads[0], call.head_dim, **make)
        k, v = (torch.randn(*lead, keys, call.heads[1], call.head_dim, **make) for _ in range(2))
        self.qkv = (q, k, v)
        self.rows = q.numel() // call.head_dim  # of all heads
        self.bounds = tuple(
            torch.tensor([0, n // 3, n // 3, n], device="cuda", dtype=torch.int32) for n in call.lengths
        )
        self.backend = call.backend
        self.options: dict[str, Any] = {"causal": "causal" in self.words}
        if "softcap" in self.words:
            self.options["softcap"] = 30.0
        if "dropout" in self.words:
            self.options["dropout_p"] = 0.1
        if "sinks" in self.words:
            self.options["sinks"] = torch.randn(call.heads[0], device="cuda")
        if "alibi" in self.words:
            self.options["bias"] = masks.ALiBi(torch.rand(call.heads[0], device="cuda"))
        if "full_bias" in self.words:
            full = torch.randn(BATCH, call.heads[0], rows, keys, **make)
            self.options["bias"] = masks.DenseBias(full.requires_grad_())  # of others a value keeps a copy
        if "bias" in self.words:
            self.options["bias"] = masks.DenseBias(torch.randn(1, call.heads[0], rows, keys, **make))
        if "float_bias" in self.words:
            self.options["bias"] = masks.DenseBias(torch.randn(1, call.heads[0], rows, keys, device="cuda"))
        keep = torch.rand(BATCH, 1, rows, keys, device="cuda") > 0.3
        if "mask" in self.words:
            self.options["mask"] = masks.Dense(keep)
        if "key_padding" in self.words:
            self.options["mask"] = masks.KeyMask(keep[:, 0, 0])
        if self.words & {"fp8", "mixed"}:
            mode = "fp8" if "fp8" in self.words else "mixed"
            bounds = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.bounds)) if packed else {}
            self.fp8 = flash_ext.fp8.quantize_fp8(q, k, v, mode=mode, **bounds)
        if "pages" in self.words:
            size = 64
            count = -(-keys // size)
            self.pages = [
                torch.randn(BATCH * count, size, call.heads[1], call.head_dim, **make) for _ in range(2)
            ]
            if call.head_dim == 576:  # latents, whose first columns are the value
                self.pages[1] = self.pages[0][..., :512]
            if "e4m3" in self.words:
                self.pages = [x.to(torch.float8_e4m3fn) for x in self.pages]
            self.table = torch.randperm(BATCH * count, device="cuda").int().view(BATCH, count)
            self.used = torch.tensor([keys, keys // 7], device="cuda", dtype=torch.int32)

    def __call__(self, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
        """out, and lse where it is wanted; with the same random numbers each time."""
        torch.manual_seed(5)
        request = LSE if wants_lse else None
        if self.words & {"fp8", "mixed"}:
            result = flash_ext.fp8.attention_fp8(
                self.fp8, causal=self.options["causal"], return_aux=request, backend=self.backend
            )
        elif "pages" in self.words:
            out, lse = run_cached(
                self.qkv[0], *self.pages, None, None, self.used, self.table, None, None, None,
                self.options["causal"], (-1, -1), self.backend, wants_lse,
                softcap=self.options.get("softcap", 0.0),
            )  # fmt: skip
            return out, lse if wants_lse else None
        elif "packed" in self.words:
            result = flash_ext.attention_varlen(
                *self.qkv, *self.bounds, return_aux=request, backend=self.backend, **self.options
            )
        else:
            result = flash_ext.attention(*self.qkv, return_aux=request, backend=self.backend, **self.options)
        return (result[0], result[1].lse) if wants_lse else (result, None)


def allocated(call: Callable[[], Any]) -> int:
    """Bytes that a call asks torch's allocator for."""

    def total() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.allocated"]

    before = total()
    kept = call()
    after = total()
    del kept
    return after - before


@pytest.fixture
def recorded() -> Iterator[None]:
    _C.set_switch("record_launches", 1)
    yield
    _C.set_switch("record_launches", None)


@pytest.mark.gpu
@pytest.mark.parametrize("call", ROW_CALLS, ids=str)
def test_every_row_without_lse(call: RowCall, recorded: None) -> None:
    """The bits of the output, and the bytes that are not allocated."""
    if call.row.startswith("sm90") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    run = Prepared(call)
    with torch.no_grad():
        wanted, lse = run(True)
        row = _C.last_launch()["row"]
        assert row == call.row
        assert lse is not None and lse.isfinite().any()
        out, none = run(False)
        assert none is None and _C.last_launch()["row"] == row
        assert torch.equal(out, wanted)
        assert torch.equal(run(True)[1], lse)
        if NO_CACHING not in os.environ:
            assert allocated(lambda: run(True)) - allocated(lambda: run(False)) == 4 * run.rows


@pytest.mark.gpu
def test_a_graph_without_lse() -> None:
    """Captured, the launch has no place for lse either."""
    q, k, v = (torch.randn(2, 300, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wanted = flash_ext.attention(q, k, v, return_aux=LSE)[0]
    graph, out = capture(lambda: flash_ext.attention(q, k, v))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
