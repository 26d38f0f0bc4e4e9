"""forward(out_dtype=...) and backward(grad_dtype=...): results as they were accumulated.

Rounded, they are what a call without the option returns, bit for bit: the option changes nothing but the last
step. Unrounded, they are closer to the truth.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_ext
from flash_ext import masks
from flash_ext._cpu.tiles import accumulator_dtype
from flash_ext._ops.library import _C
from tests.harness import Target, on_all_tiles, on_paths
from tests.memory import poison_pool
from tests.qkv import make_packed, make_qkv, null_kernels, on_devices
from tests.values import values

FWD, BWD = torch.ops.flash_ext.fwd.default, torch.ops.flash_ext.bwd.default
FWD_MOD, BWD_MOD = torch.ops.flash_ext.fwd_mod.default, torch.ops.flash_ext.bwd_mod.default
PLAIN = (None, None, 0, 0, 0.3, 5, 0)  # cu_seqlens, max_seqlens, scale, window

# ---- against the rounded results -------------------------------------------------------------------------

# head_dim, head_dim_v: every compiled size, sizes below them, and rows that no 16-byte store fits.
SIZES = [
    (64, 64), (40, 56), (96, 96), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256), (33, 17),
    (5, 250),
]  # fmt: skip
# seqlen_q, seqlen_k, options
SHAPES: list[tuple[int, int, dict[str, Any]]] = [
    (150, 170, {}),
    (257, 257, {"causal": True}),
    (300, 70, {"causal": True}),  # rows that see no key, and tiles of them
    (70, 300, {"window_size": (30, 4), "scale": -0.2}),  # the same of keys that nobody sees
]
CPU_SHAPES: list[tuple[int, int, dict[str, Any]]] = [  # its tiles have 128 rows and 256 keys
    (150, 40, {"causal": True}),
    (40, 270, {"window_size": (30, 4), "scale": -0.2}),
]


def modes(target: Target) -> tuple[bool, ...]:
    """Deterministic or not: other kernels on a GPU, the same code on a CPU."""
    return (True, False) if target.device == "cuda" else (True,)


def both_ways(
    x: list[Tensor], target: Target, deterministic: bool = True, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """out, lse, dq, dk, dv of q, k, v and dout: rounded and wide, from the same rounded out."""
    q, k, v, dout = x
    options |= {"backend": target.choice, "deterministic": deterministic}
    wide = accumulator_dtype(q)
    if target.device == "cuda":
        poison_pool(1 << 26)
    out, lse = flash_ext.forward(q, k, v, **options)
    out_wide, lse_wide = flash_ext.forward(q, k, v, out_dtype=wide, **options)
    grads = flash_ext.backward(dout, q, k, v, out, lse, **options)
    grads_wide = flash_ext.backward(dout, q, k, v, out, lse, grad_dtype=wide, **options)
    return [out, lse, *grads], [out_wide, lse_wide, *grads_wide]


def check_rounding(rounded: list[Tensor], wide: list[Tensor], deterministic: bool = True) -> None:
    """Bit for bit; without deterministic mode dq is the same sum in another order."""
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), rounded, wide, strict=True):
        assert b.dtype == accumulator_dtype(a) and b.is_contiguous() and a.shape == b.shape, name
        if deterministic or name != "dq":
            assert torch.equal(b.to(a.dtype), a), f"{name}: rounding the wide result gives another"
        else:
            torch.testing.assert_close(b.to(a.dtype), a, rtol=0.01, atol=1e-4)


def check_distance(
    rounded: list[Tensor], wide: list[Tensor], x: list[Tensor], options: dict[str, Any]
) -> None:
    """The wide results are closer to float64, which starts from the same rounded out."""
    q, k, v, dout = (t.double().cpu() for t in x)
    options = {n: o.to("cpu") if hasattr(o, "to") else o for n, o in options.items()}
    out, lse = flash_ext.forward(q, k, v, **options)
    truth = (out, lse, *flash_ext.backward(dout, q, k, v, rounded[0].double().cpu(), lse, **options))
    for name, a, b, t in zip(("out", "", "dq", "dk", "dv"), rounded, wide, truth, strict=True):
        if name:
            errors = [(r.double().cpu() - t).norm() for r in (b, a)]
            assert errors[0] < errors[1], (name, errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{s[0]}-{s[1]}")
@on_paths
def test_rounding_a_wide_result_gives_the_usual_one(target: Target, sizes: tuple, dtype: torch.dtype) -> None:
    for seqlen_q, seqlen_k, options in SHAPES if target.device == "cuda" else CPU_SHAPES:
        torch.manual_seed(seqlen_q)
        qkv = make_qkv(
            target.device, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=sizes[0], head_dim_v=sizes[1],
            dtype=dtype,
        )  # fmt: skip
        x = [*qkv, torch.randn(*qkv[0].shape[:-1], sizes[1], device=target.device).to(dtype)]
        for deterministic in modes(target):
            with target.active():
                rounded, wide = both_ways(x, target, deterministic, **options)
            check_rounding(rounded, wide, deterministic)
            check_distance(rounded, wide, x, options)


@pytest.mark.parametrize("head_dim", [64, 128, 24, 7])
@on_paths
def test_packed_input(target: Target, head_dim: int) -> None:
    """Sequences without queries or keys, and rows of no sequence, whose results are zeros."""
    torch.manual_seed(0)
    device = target.device
    bounds = ([3, 90, 90, 230, 300], [2, 70, 140, 140, 260])
    cu_q, cu_k = (torch.tensor(b, device=device, dtype=torch.int32) for b in bounds)
    sizes = ((310, 4), (270, 2), (270, 2), (310, 4))
    x = [torch.randn(*size, head_dim, device=device).bfloat16() for size in sizes]
    for causal, deterministic in itertools.product((False, True), modes(target)):
        options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": causal}
        with target.active():
            rounded, wide = both_ways(x, target, deterministic, **options)
        check_rounding(rounded, wide, deterministic)
        check_distance(rounded, wide, x, options)
        assert wide[0][:3].eq(0).all() and wide[0][300:].eq(0).all() and wide[3][260:].eq(0).all()


MODIFIERS: list[dict[str, Any]] = [
    {"softcap": 3.0},
    {"mask": masks.DocumentCausal(torch.arange(150).div(40).int().expand(2, 150))},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window_size": (20, 0)},
    values(bias=torch.arange(150.0).sin() * 3, slopes=torch.tensor([0.1, 0.0, 0.3, -0.01])),
    values(keys=torch.arange(300).view(2, 150) % 7 > 1, causal=True, top_left=True),
    {"dropout_p": 0.3, "rng": torch.tensor([5, 7]), "softcap": 20.0},
]


@pytest.mark.parametrize("modifiers", MODIFIERS, ids=lambda m: "+".join(m))
@on_all_tiles
def test_with_modifiers(target: Target, modifiers: dict[str, Any]) -> None:
    options = {n: o.to(target.device) if hasattr(o, "to") else o for n, o in modifiers.items()}
    sizes = (64, 128, 192, 256, 33) if target.device == "cuda" else (33,)
    for head_dim, deterministic in itertools.product(sizes, modes(target)):
        torch.manual_seed(0)
        q, k, v = make_qkv(target.device, seqlen_q=150, head_dim=head_dim, dtype=torch.bfloat16)
        x = [q, k, v, torch.randn_like(q)]
        with target.active():
            rounded, wide = both_ways(x, target, deterministic, **options)
        check_rounding(rounded, wide, deterministic)
        check_distance(rounded, wide, x, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_wide_inputs_it_changes_nothing(dtype: torch.dtype) -> None:
    q, k, v = make_qkv(dtype=dtype, requires_grad=True)
    out, lse = flash_ext.forward(q, k, v, out_dtype=dtype)
    assert torch.equal(out, flash_ext.forward(q, k, v)[0])
    out.sum().backward()  # the dtypes of gradients agree, so they exist
    assert q.grad is not None
    with torch.no_grad():
        named = flash_ext.backward(out, q, k, v, out, lse, grad_dtype=dtype)
        assert all(torch.equal(a, b) for a, b in zip(named, flash_ext.backward(out, q, k, v, out, lse)))
    assert torch.equal(flash_ext.forward(q, k, v, out_dtype=dtype, softcap=2.0)[0],
                       flash_ext.forward(q, k, v, softcap=2.0)[0])  # fmt: skip


def test_merging_keeps_float32() -> None:
    q, k, v = make_qkv(seqlen_k=40, dtype=torch.bfloat16)
    whole = flash_ext.forward(q, k, v, out_dtype=torch.float32)
    parts = [flash_ext.forward(q, k[:, keys], v[:, keys], out_dtype=torch.float32)
             for keys in (slice(0, 15), slice(15, 40))]  # fmt: skip
    merged = flash_ext.merge_attention_states(*parts[0], *parts[1])
    assert merged[0].dtype == torch.float32
    torch.testing.assert_close(merged, whole, atol=1e-6, rtol=1e-5)


# ---- refusals --------------------------------------------------------------------------------------------


def test_dtypes_that_are_refused() -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16)
    out, lse = flash_ext.forward(q, k, v, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    allowed = "must be None, the dtype of q, torch.bfloat16, or torch.float32"
    for extra, (wrong, error, words) in itertools.product(({}, {"softcap": 1.0}), (
        (torch.float16, ValueError, f"{allowed}, got torch.float16"),
        (torch.float64, ValueError, f"{allowed}, got torch.float64"),
        ("float32", TypeError, "must be a torch.dtype or None, got str"),
        (float, TypeError, "must be a torch.dtype or None, got type"),
    )):  # fmt: skip
        with pytest.raises(error, match=f"out_dtype {words}"):
            flash_ext.forward(q, k, v, out_dtype=wrong, **extra)
        with pytest.raises(error, match=f"grad_dtype {words}"):
            flash_ext.backward(out, q, k, v, out, lse, grad_dtype=wrong, **extra)
    with pytest.raises(ValueError, match=r"the dtype of q, torch.float64, got torch.float32"):
        flash_ext.forward(q.double(), k.double(), v.double(), out_dtype=torch.float32)


def test_arguments_of_a_wrong_type_are_named() -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16)
    out, lse = flash_ext.forward(q, k, v)
    forward: dict[str, Any] = {"q": q, "k": k, "v": v, "out_dtype": torch.float32}
    for changes, error, words in (
        ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
        ({"q": [1]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"window_size": 3}, TypeError, "window_size must be a pair"),
        ({"k": k[..., :8]}, ValueError, "head_dim of q"),
    ):
        with pytest.raises(error, match=words):
            flash_ext.forward(**forward | changes)
    with pytest.raises(TypeError, match="dlse must be a torch.Tensor or None"):
        flash_ext.backward(out, q, k, v, out, lse, dlse=1, grad_dtype=torch.float32)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out must have the dtype of q"):  # a merged one is rounded first
        flash_ext.backward(out, q, k, v, out.float(), lse, grad_dtype=torch.float32)


@pytest.mark.parametrize("extra", [{}, {"softcap": 1.0}], ids=["plain", "modified"])
def test_a_wide_out_has_no_gradient(extra: dict[str, Any]) -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="out_dtype: a result wider than q has no gradient"):
        flash_ext.forward(q, k, v, out_dtype=torch.float32, **extra)
    with torch.no_grad():
        out, lse = flash_ext.forward(q, k, v, out_dtype=torch.float32, **extra)
    assert not out.requires_grad
    small = out.bfloat16()
    grads = flash_ext.backward(small, q, k, v, small, lse, grad_dtype=torch.float32, **extra)
    with pytest.raises(RuntimeError, match="second derivative of attention is not implemented"):
        grads[0].sum().backward()

    def loss(q: Tensor) -> Tensor:
        return flash_ext.forward(q, k.detach(), v.detach(), out_dtype=torch.float32, **extra)[0].sum()

    with pytest.raises(NotImplementedError, match="out_dtype"):
        torch.func.grad(loss)(q.detach())


# ---- inside PyTorch --------------------------------------------------------------------------------------


def plain_inputs(device: str) -> tuple[Any, ...]:
    return *make_qkv(device, seqlen_k=23, head_dim_v=24, dtype=torch.bfloat16), *PLAIN


@on_devices
def test_opcheck(device: str) -> None:
    args = (*plain_inputs(device), True, None, True)
    torch.library.opcheck(FWD, args)
    out, lse = FWD(*args)
    assert out.dtype == torch.float32
    out, dout = out.bfloat16(), torch.randn_like(out).bfloat16()
    torch.library.opcheck(BWD, (dout, *args[:3], out, lse, torch.randn_like(lse), *args[3:]))
    modifiers = (*(None,) * 11, 2.0, 0.0, 0, 0, 0, 0, False)
    torch.library.opcheck(FWD_MOD, (*args[:-3], *modifiers, True, *args[-3:]))
    modifiers += (True, False, False, False)  # needs
    torch.library.opcheck(BWD_MOD, (dout, *args[:3], out, lse, None, *args[3:-3], *modifiers, *args[-3:]))


def test_fake_results_and_those_on_the_way_to_a_kernel() -> None:
    """Dtypes as on the CPU: of fake tensors, on the meta device, and where kernels for GPUs are called."""
    args = plain_inputs("cpu")
    out, lse = FWD(*args, False, None, True)
    grads = BWD(out.bfloat16(), *args[:3], out.bfloat16(), lse, None, *args[3:], False, None, True)
    wanted = [(t.shape, t.stride(), t.dtype) for t in (out, lse, *grads)]
    assert {dtype for _, _, dtype in wanted} == {torch.float32}

    def found(q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        out, lse = FWD(q, k, v, *PLAIN, False, None, True)
        small = out.to(q.dtype)
        grads = BWD(small, q, k, v, small, lse, None, *PLAIN, False, None, True)
        return [(t.shape, t.stride(), t.dtype) for t in (out, lse, *grads)]

    with FakeTensorMode() as mode:
        assert found(*(mode.from_tensor(t) for t in args[:3])) == wanted
    assert found(*(t.to("meta") for t in args[:3])) == wanted
    with null_kernels():
        assert found(*args[:3]) == wanted
        q, k, v = args[:3]
        none = (q, k[:, :0], v[:, :0])  # no keys: nothing is launched
        out, lse = flash_ext.forward(*none, out_dtype=torch.float32)
        assert out.dtype == torch.float32 and out.eq(0).all()
        grads = flash_ext.backward(out.bfloat16(), *none, out.bfloat16(), lse, grad_dtype=torch.float32)
        assert {t.dtype for t in grads} == {torch.float32} and grads[0].eq(0).all()
        out, lse = flash_ext.forward(q, k, v, softcap=1.0, out_dtype=torch.float32)
        assert out.dtype == torch.float32 and "fwd_mod" in _C.last_launch()["row"]


@on_devices
def test_compiled(device: str) -> None:
    q, k, v = make_qkv(device, dtype=torch.bfloat16)

    def pair(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = flash_ext.forward(q, k, v, causal=True, out_dtype=torch.float32)
        small = out.bfloat16()
        options = {"causal": True, "deterministic": True, "grad_dtype": torch.float32}
        grads = flash_ext.backward(small, q, k, v, small, lse, **options)
        capped = flash_ext.forward(q, k, v, softcap=2.0, out_dtype=torch.float32)
        return out, *grads, *capped

    with torch.no_grad():
        for a, b in zip(torch.compile(pair, fullgraph=True, backend="aot_eager")(q, k, v), pair(q, k, v)):
            assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b)


def test_vmap_and_autocast() -> None:
    q, k, v = (t.unsqueeze(1) for t in make_qkv(batch=3, dtype=torch.bfloat16))
    for extra in ({}, {"softcap": 2.0}):
        options = {"out_dtype": torch.float32, **extra}
        mapped = torch.func.vmap(lambda *x, o=options: flash_ext.forward(*x, **o))(q, k, v)
        for i in range(3):
            one = flash_ext.forward(q[i], k[i], v[i], **options)
            torch.testing.assert_close([t[i] for t in mapped], [*one])
    wide = make_qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        out, _ = flash_ext.forward(*wide, out_dtype=torch.float32)
    expected, _ = flash_ext.forward(*(t.bfloat16() for t in wide), out_dtype=torch.float32)
    assert torch.equal(out, expected)


def test_flop_counts_are_those_of_the_usual_call() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v, cu = make_packed()
    q, k, v = (t.bfloat16() for t in (q, k, v))
    counts = []
    for dtype in (None, torch.float32):
        with FlopCounterMode(display=False) as counter:
            out, lse = flash_ext.forward(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, out_dtype=dtype)
            small = out.bfloat16()
            flash_ext.backward(small, q, k, v, small, lse, cu_seqlens_q=cu, cu_seqlens_k=cu, grad_dtype=dtype)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
