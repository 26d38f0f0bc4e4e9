"""enable_sdpa: torch's operators on our kernels, and back.

The implementations are the same for every device. Without a GPU they are registered for CPU tensors, for
which torch has no implementation of these operators, and run on the CPU path; what chooses the operators, and
what was there before, needs a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention as torch_attention

import flash_ext
from flash_ext._sdpa_override import NAME
from tests.qkv import sdpa_counts

aten = torch.ops.aten
(SDPA, SDPA_BACKWARD, FLASH, FLASH_BACKWARD, MASKED, MASKED_BACKWARD, GROUPED,
 GROUPED_BACKWARD) = sdpa_counts()  # fmt: skip
FORWARDS = (SDPA, FLASH, MASKED, GROUPED)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    torch.ops.flash_ext._set_sdpa("CPU")
    try:
        yield
    finally:
        torch.ops.flash_ext._set_sdpa("")


@contextlib.contextmanager
def counted(**expected: int) -> Iterator[None]:
    """Exactly these calls are served, and none goes back."""
    before = sdpa_counts()
    yield
    after = sdpa_counts()
    served = {name: after[name][0] - before[name][0] for name in after if after[name][0] != before[name][0]}
    assert served == expected
    assert all(after[name][1] == before[name][1] for name in after), "a call went back"


def draw(layout: str = "bshd", heads_k: int = 2) -> list[Tensor]:
    """q (2, 4, 9, 16), k and v (2, heads_k, 13, 16) in several memory layouts, bfloat16."""
    made = []
    for n, h in ((9, 4), (13, heads_k), (13, heads_k)):
        if layout == "bhsd":
            t = torch.randn(2, h, n, 16).bfloat16()
        elif layout == "bshd":
            t = torch.randn(2, n, h, 16).bfloat16().transpose(1, 2)
        elif layout == "sbhd":
            t = torch.randn(n, 2, h, 16).bfloat16().permute(1, 2, 0, 3)
        else:  # a slice of a fused projection
            t = torch.randn(2, n, 3, h, 16).bfloat16()[:, :, 1].transpose(1, 2)
        made.append(t)
    return made


LAYOUTS = ["bhsd", "bshd", "sbhd", "fused"]
TOP_LEFT = flash_ext.masks.Causal("top_left")


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """flash_ext's own function in torch's layout."""
    request = flash_ext.AuxRequest(lse=True)
    out, aux = flash_ext.attention(q, k, v, layout="bhsd", return_aux=request, **options)
    return out, aux.lse


def check(
    calls: dict[str, int], operator: Callable[[], tuple], leaves: list[Tensor], expected: Tensor, lse: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An operator gives what flash_ext's own function gave, bit for bit, and so do its gradients."""
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, dout)
    with on_cpu(), counted(**calls):
        out, got_lse, *_ = operator()
        grads = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(out, expected) and torch.equal(got_lse, lse)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    return out, grads


def check_strides(out: Tensor, grads: Sequence[Tensor], leaves: list[Tensor]) -> None:
    """The layout that torch promises: that of the inputs."""
    assert out.stride() == torch.empty_like(leaves[0]).stride()
    assert [g.stride() for g in grads] == [torch.empty_like(t).stride() for t in leaves]


# ---- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sdpa_operator(layout: str, causal: bool) -> None:
    leaves = [t.requires_grad_() for t in draw(layout)]
    expected, lse = dense(*leaves, causal=causal, scale=0.3)

    def operator() -> tuple:
        return aten._scaled_dot_product_flash_attention(*leaves, is_causal=causal, scale=0.3)

    out, grads = check({SDPA: 1, SDPA_BACKWARD: 1}, operator, leaves, expected, lse)
    check_strides(out, grads, leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_head_dim_of_v(layout: str) -> None:
    """Results keep the order of dimensions of q, as newer versions of torch allocate them."""
    q, k, v = draw(layout)
    v = v[..., :8]
    expected, _ = dense(q, k, v)
    with on_cpu(), counted(**{SDPA: 1}):
        out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert torch.equal(out, expected)
    order = [sorted(range(4), key=t.stride) for t in (out, q)]
    assert order[0] == order[1] and out.permute(order[0][::-1]).is_contiguous()


def test_backward_takes_merged_results() -> None:
    """As ring attention calls it: out and lse belong to more keys than k has."""
    q, k, v = draw()
    out, lse = dense(q, torch.cat([k, k], 2), torch.cat([v, v], 2))
    dout = torch.randn_like(out)
    as_ours = [t.transpose(1, 2) for t in (dout, q, k, v, out)]
    expected = flash_ext.backward(*as_ours, lse)
    state = torch.zeros(2).long()
    with on_cpu(), counted(**{SDPA_BACKWARD: 1}):
        got = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, 9, 13, 0.0, False, state, state
        )
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(got, expected))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sides", [(None, None), (3, 0), (-1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_operator(causal: bool, sides: tuple, packed: bool) -> None:
    window = tuple(-1 if side is None else side for side in sides)
    q, k, v = (torch.randn(2, 8, h, 16).bfloat16() for h in (4, 2, 2))
    bounds = None
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        bounds = torch.tensor([0, 5, 5, 16], dtype=torch.int32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = {"causal": causal, "window_size": window, "return_aux": flash_ext.AuxRequest(lse=True)}
    if packed:
        expected, (lse, _) = flash_ext.attention_varlen(*leaves, bounds, bounds, **options)
    else:
        expected, (lse, _) = flash_ext.attention(*leaves, **options)

    def operator() -> tuple:
        return aten._flash_attention_forward(
            *leaves, bounds, bounds, 11, 11, 0.0, causal, False, window_size_left=sides[0],
            window_size_right=sides[1],
        )  # fmt: skip

    check({FLASH: 1, FLASH_BACKWARD: 1}, operator, leaves, expected, lse)


def check_jagged(device: str, causal: bool) -> None:
    """Forward and gradients of jagged nested tensors against every sequence by itself, bit for bit."""
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    sequences = [[torch.randn(n, 4, 64, **options) for n in (30, 1, 64)] for _ in range(3)]
    nested = [torch.nested.as_nested_tensor(one, layout=torch.jagged).transpose(1, 2) for one in sequences]
    with counted(**{FLASH: 1, FLASH_BACKWARD: 1}):
        out = F.scaled_dot_product_attention(*nested, is_causal=causal)
        parts = out.transpose(1, 2).unbind()
        douts = [torch.randn_like(part) for part in parts]
        leaves = [t for one in sequences for t in one]
        grads = torch.autograd.grad(parts, leaves, douts)
    bounds = torch.tensor([0, 30, 31, 95], dtype=torch.int32, device=device)
    packed = [torch.cat([t.detach() for t in one]).requires_grad_() for one in sequences]
    expected = flash_ext.attention_varlen(*packed, bounds, bounds, causal=causal)
    wanted = torch.autograd.grad(expected, packed, torch.cat(douts))
    assert torch.equal(torch.cat(parts), expected)
    for i, own in enumerate(wanted):
        got = torch.cat(grads[3 * i : 3 * i + 3])
        error = (got.float() - own.float()).norm() / own.float().norm()
        assert error < 1e-3, f"relative error {error:.3g}"  # dq is summed in varying order on some paths


@pytest.mark.parametrize("causal", [False, True])
def test_jagged_nested_tensors(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the choice that torch makes on a GPU; its code for nested tensors is the same for all devices."""
    from torch.nested._internal import sdpa

    monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *a: torch_attention.SDPBackend.FLASH_ATTENTION)
    with on_cpu():
        check_jagged("cpu", causal)


BIASES = ["none", "full", "row", "key", "float32", "minus infinity"]


def make_bias(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    shape = {"row": (1, 4, 9, 1), "key": (2, 1, 1, 13)}.get(kind, (2, 4, 9, 13))
    bias = torch.randn(shape).to(torch.float32 if kind == "float32" else torch.bfloat16)
    if kind == "minus infinity":  # what torch makes of a bool mask
        bias = torch.where(bias > 0, 0.0, -torch.inf).to(bias.dtype)
    return bias.expand(2, 4, 9, 13)


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_k", [4, 2])  # newer versions of torch give it grouped heads as well
def test_masked_operator(heads_k: int, causal: bool, kind: str) -> None:
    leaves = [t.requires_grad_() for t in draw(heads_k=heads_k)]
    bias = make_bias(kind)
    if bias is not None:
        leaves.append(bias.detach().clone().requires_grad_())
    own = leaves[3] if bias is not None else None
    expected, lse = dense(*leaves[:3], mask=TOP_LEFT if causal else None, bias=own)

    def operator() -> tuple:
        return aten._scaled_dot_product_efficient_attention(*leaves[:3], own, True, is_causal=causal)

    # torch's backward relies on the padding, and runs if flash_ext is switched off before it.
    padded = F.pad(lse, (0, 32 - 9), value=torch.inf)
    check({MASKED: 1, MASKED_BACKWARD: 1}, operator, leaves, expected, padded)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(9, 13), (1, 13), (2, 4, 9, 13), (2, 1, 1, 13), (1, 4, 9, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_operator(dtype: torch.dtype, shape: tuple, layout: str) -> None:
    """cuDNN's operator, which is asked for a mask with grouped heads."""
    leaves = [t.requires_grad_() for t in draw(layout)]
    bias = torch.randn(shape).to(dtype)
    bias = torch.where(bias > 0.8, -65504.0, bias)  # what torch makes of a bool mask there
    expected, lse = dense(*leaves, bias=bias, scale=0.3)

    def operator() -> tuple:
        return aten._scaled_dot_product_cudnn_attention(*leaves, bias, True, scale=0.3)

    out, grads = check({GROUPED: 1, GROUPED_BACKWARD: 1}, operator, leaves, expected, lse[..., None])
    check_strides(out, grads, leaves)


def test_grouped_operator_without_a_mask() -> None:
    """Causal lengths that differ, aligned at the top left; and values of another head_dim."""
    q, k, v = draw()
    expected, _ = dense(q, k, v, mask=TOP_LEFT)
    narrow, _ = dense(q, k, v[..., :8])
    with on_cpu(), counted(**{GROUPED: 2}):
        got = aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, is_causal=True)[0]
        other = aten._scaled_dot_product_cudnn_attention(q, k, v[..., :8], None, False)[0]
    assert torch.equal(got, expected) and torch.equal(other, narrow)


def test_repeats_of_a_mask_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(heads_k=4)
    shapes = []
    original = flash_ext._cpu.tiles.forward
    monkeypatch.setattr(flash_ext._cpu.tiles, "forward",
                        lambda *a: shapes.append(a[4].bias) or original(*a))  # fmt: skip
    with on_cpu():
        for kind in ("full", "row", "key"):
            aten._scaled_dot_product_efficient_attention(q, k, v, make_bias(kind), False)
        _, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, False)
    assert [b if b is None else b.shape for b in shapes] == [(2, 4, 9, 13), (1, 4, 9, 1), (2, 1, 1, 13), None]
    assert lse.shape == (2, 4, 0)


def test_autocast_does_not_cast_again() -> None:
    """bfloat16 tensors inside a float16 region: operators that autocast leaves alone keep their type."""
    q, k, v = (t.transpose(1, 2) for t in draw())
    with on_cpu(), torch.autocast("cpu", dtype=torch.float16), counted(**{FLASH: 1}):
        out = aten._flash_attention_forward(q, k, v, None, None, 9, 13, 0.0, False, False)[0]
    assert out.dtype == torch.bfloat16


# ---- shapes that compilers rely on -----------------------------------------------------------------------


def calls_of(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """One call of every forward operator for tensors (batch, heads, rows, head_dim)."""
    mask = q.new_zeros(()).expand(2, 4, q.shape[2], k.shape[2])
    as_ours = [t.transpose(1, 2) for t in (q, k, v)]
    return {
        SDPA: lambda: aten._scaled_dot_product_flash_attention(q, k, v),
        FLASH: lambda: aten._flash_attention_forward(*as_ours, None, None, 9, 13, 0.0, False, False),
        MASKED: lambda: aten._scaled_dot_product_efficient_attention(q, k, v, mask, True),
        GROUPED: lambda: aten._scaled_dot_product_cudnn_attention(q, k[:, :2], v[:, :2], mask, True),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORWARDS)
def test_results_are_as_torch_foresees(name: str, layout: str) -> None:
    tensors = draw(layout, heads_k=4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        foreseen = calls_of(*(mode.from_tensor(t) for t in tensors))[name]()
    with on_cpu():
        got = calls_of(*tensors)[name]()
    for a, b in zip(got, foreseen, strict=True):
        assert type(a) in (Tensor, int, type(None)) and (a is None) == (b is None)
        if isinstance(a, Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        else:
            assert a == b


@pytest.mark.parametrize("name", FORWARDS)
def test_compiled(name: str) -> None:
    leaves = [t.requires_grad_() for t in draw(heads_k=4)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return calls_of(q, k, v)[name]()[0]

    with on_cpu():
        expected = call(*leaves)
        wanted = torch.autograd.grad(expected.sum(), leaves)
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
        grads = torch.autograd.grad(got.sum(), leaves)
    assert torch.equal(got, expected) and all(torch.equal(a, b) for a, b in zip(grads, wanted))


# ---- what goes back --------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_a_stock_kernel() -> Iterator[list[str]]:
    """Implementations that note their name and return marked results, in the place of torch's."""
    library = torch.library.Library("aten", "IMPL")
    reached: list[str] = []

    def kernel(name: str, count: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> tuple:
            reached.append(name)
            marks = [torch.full_like(args[0], 7.0) for _ in range(count)]
            if name in (SDPA, GROUPED):
                marks[2] = marks[3] = None
                marks[4], marks[5] = 1, 2
            return tuple(marks)

        return run

    for name, count in ((SDPA, 9), (SDPA_BACKWARD, 3), (FLASH, 5), (FLASH_BACKWARD, 3), (MASKED, 4),
                        (MASKED_BACKWARD, 4), (GROUPED, 9), (GROUPED_BACKWARD, 3)):  # fmt: skip
        library.impl(name, kernel(name, count), "CPU")
    try:
        yield reached
    finally:
        library._destroy()


def refused_calls() -> dict[str, tuple[str, Any]]:
    q, k, v = draw(heads_k=4)
    b, lse, seed = [t.transpose(1, 2) for t in (q, k, v)], torch.zeros(2, 4, 9), torch.zeros(2).long()
    wide = [torch.randn(1, 2, 4, 264).bfloat16() for _ in range(3)]
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    sdpa, flash = aten._scaled_dot_product_flash_attention, aten._flash_attention_forward
    masked, cudnn = aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention
    few_k, few_v, bias = k[:, :2], v[:, :2], torch.zeros(9, 13).bfloat16()
    backwards = {
        SDPA_BACKWARD: lambda dropout_p, scale: aten._scaled_dot_product_flash_attention_backward(
            q, q, k, v, q, lse, None, None, 9, 13, dropout_p, False, seed, seed, scale=scale),
        FLASH_BACKWARD: lambda dropout_p, scale: aten._flash_attention_backward(
            b[0], *b, b[0], lse, None, None, 9, 13, dropout_p, False, seed, seed, scale=scale),
        MASKED_BACKWARD: lambda dropout_p, scale: aten._scaled_dot_product_efficient_attention_backward(
            q, q, k, v, None, q, lse, seed, seed, dropout_p, [True, True, True, False], scale=scale),
        GROUPED_BACKWARD: lambda dropout_p, scale: aten._scaled_dot_product_cudnn_attention_backward(
            q, q, few_k, few_v, q, lse[..., None], seed, seed, bias, None, None, 9, 13, dropout_p, False,
            scale=scale),
    }  # fmt: skip
    dense_call = (None, None, 9, 13, 0.0, False, False)
    of_this_torch = {argument.name for argument in flash.default._schema.arguments}
    newer = {
        "block_table": (FLASH, lambda: flash(*b, *dense_call, block_table=bounds)),
        "num_splits": (FLASH, lambda: flash(*b, *dense_call, num_splits=2)),
    }  # arguments that torch 2.11 does not have
    return {name: call for name, call in newer.items() if name in of_this_torch} | {
        "dropout": (SDPA, lambda: sdpa(q, k, v, 0.1)),
        "debug mask": (SDPA, lambda: sdpa(q, k, v, 0.0, False, True)),
        "float32": (SDPA, lambda: sdpa(q.float(), k.float(), v.float())),
        "head_dim 264": (SDPA, lambda: sdpa(*wide)),
        "strided features": (SDPA, lambda: sdpa(q[..., ::2], k[..., ::2], v[..., ::2])),
        "heads do not divide": (SDPA, lambda: sdpa(q[:, :3], k[:, :2], v[:, :2])),
        "mixed types": (SDPA, lambda: sdpa(q, k.half(), v)),
        "dropout in backward": (SDPA_BACKWARD, lambda: backwards[SDPA_BACKWARD](0.1, None)),
        "packed dropout": (FLASH, lambda: flash(*b, None, None, 9, 13, 0.1, False, False)),
        "seqused_k": (FLASH, lambda: flash(*b, *dense_call, seqused_k=bounds)),
        "alibi_slopes": (FLASH, lambda: flash(*b, *dense_call, alibi_slopes=lse[0, 0])),
        "int64 bounds": (FLASH, lambda: flash(
            *(t[0] for t in b), bounds.long(), bounds.long(), 9, 9, 0.0, False, False)),
        "one side of bounds": (FLASH, lambda: flash(
            *(t[0] for t in b), bounds, None, 9, 9, 0.0, False, False)),
        "packed dropout in backward": (FLASH_BACKWARD, lambda: backwards[FLASH_BACKWARD](0.1, None)),
        "mask and dropout": (MASKED, lambda: masked(q, k, v, None, True, 0.1)),
        "3-d mask": (MASKED, lambda: masked(q, k, v, torch.zeros(4, 9, 13).bfloat16(), True)),
        "float64 mask": (MASKED, lambda: masked(q, k, v, torch.zeros(2, 4, 9, 13).double(), True)),
        "mask and dropout in backward": (MASKED_BACKWARD, lambda: backwards[MASKED_BACKWARD](0.1, None)),
        "grouped, mask and dropout": (GROUPED, lambda: cudnn(q, few_k, few_v, bias, True, 0.1)),
        "grouped, mask and debug mask": (
            GROUPED, lambda: cudnn(q, few_k, few_v, bias, True, 0.0, False, True)),
        "grouped, float64 mask": (GROUPED, lambda: cudnn(q, few_k, few_v, bias.double(), True)),
        "grouped, mask of other lengths": (GROUPED, lambda: cudnn(q, few_k, few_v, bias[1:], True)),
        "cuDNN asked for by name, ungrouped": (GROUPED, lambda: cudnn(q, k, v, bias, True)),
        "cuDNN asked for by name, no mask": (GROUPED, lambda: cudnn(q, few_k, few_v, None, True)),
        "grouped, dropout in backward": (GROUPED_BACKWARD, lambda: backwards[GROUPED_BACKWARD](0.1, None)),
        "scale nan": (SDPA, lambda: sdpa(q, k, v, scale=math.nan)),
        "scale inf": (FLASH, lambda: flash(*b, *dense_call, scale=math.inf)),
        "scale -inf": (MASKED, lambda: masked(q, k, v, None, True, scale=-math.inf)),
        "grouped, scale nan": (GROUPED, lambda: cudnn(q, few_k, few_v, bias, True, scale=math.nan)),
        **{f"scale nan in {name}": (name, lambda name=name: backwards[name](0.0, math.nan))
           for name in backwards},
    }  # fmt: skip


# What count() says of them, by a part of their names.
WORDS = {
    "dropout": "dropout_p is not 0",
    "debug mask": "a debug mask is asked for",
    "float32": "neither float16 nor bfloat16",
    "float64 mask": "neither float32 nor of the dtype of the query",
    "head_dim 264": "head_dim is not between 1 and 256",
    "strided": "the last dimension is not contiguous",
    "heads do not divide": "the shapes do not fit each other",
    "mixed types": "the dtypes differ",
    **dict.fromkeys(("seqused_k", "alibi_slopes", "block_table", "num_splits"), "seqused_k, alibi_slopes"),
    "int64 bounds": "no contiguous int32",
    "one side of bounds": "one of cu_seqlens_q and cu_seqlens_k",
    "3-d mask": "does not broadcast to the scores",
    "mask of other lengths": "does not broadcast to the scores",
    "cuDNN asked for": "cuDNN was chosen for it",
    "scale": "scale is not finite",
}


@pytest.mark.parametrize("reason", refused_calls())
def test_what_is_not_served_goes_back(reason: str) -> None:
    name, call = refused_calls()[reason]
    with with_a_stock_kernel() as reached:
        before = sdpa_counts()[name]
        with on_cpu(), flash_ext.count() as c:
            results = call()
        assert reached == [name]
        assert (results[0] == 7).all() and len(results) in (3, 4, 5, 9)
        assert sdpa_counts()[name] == (before[0], before[1] + 1)
        assert not c.torch_served
        ((operator, words),) = c.torch_returned
        assert operator == name and WORDS[next(key for key in WORDS if key in reason)] in words


def test_without_anything_to_go_back_to_it_says_so() -> None:
    q, k, v = (t.float() for t in draw())
    with on_cpu(), pytest.raises(NotImplementedError, match="this call because the dtype is neither"):
        aten._scaled_dot_product_flash_attention(q, k, v)


def test_switching_off_restores_the_dispatcher() -> None:
    q, k, v = draw()
    names = [*sdpa_counts()]
    with with_a_stock_kernel() as reached:
        before = [torch._C._dispatch_dump(f"aten::{name}") for name in names]
        with on_cpu():
            assert [torch._C._dispatch_dump(f"aten::{name}") for name in names] != before
        assert [torch._C._dispatch_dump(f"aten::{name}") for name in names] == before
        aten._scaled_dot_product_flash_attention(q, k, v)
        assert reached == [SDPA]


# ---- the switch ------------------------------------------------------------------------------------------


@pytest.fixture
def untouched() -> Iterator[None]:
    """Whatever a test does to the switch, nothing stays."""
    names = [*sdpa_counts()]
    before = [torch._C._dispatch_dump(f"aten::{name}") for name in names]
    yield
    flash_ext.disable_sdpa()
    assert [torch._C._dispatch_dump(f"aten::{name}") for name in names] == before
    assert torch_attention.current_flash_attention_impl() is None


def is_on() -> bool:
    return "api/sdpa.cpp" in torch._C._dispatch_dump(f"aten::{SDPA}")


@pytest.mark.usefixtures("untouched")
def test_on_and_off() -> None:
    assert not is_on()
    for _ in range(2):  # twice is as good as once
        flash_ext.enable_sdpa()
        assert is_on() and torch_attention.current_flash_attention_impl() == NAME
    flash_ext.disable_sdpa()
    assert not is_on() and torch_attention.current_flash_attention_impl() is None
    flash_ext.disable_sdpa()


@pytest.mark.usefixtures("untouched")
def test_as_a_context_manager() -> None:
    with flash_ext.enable_sdpa():
        with flash_ext.enable_sdpa():
            assert is_on()
        assert is_on(), "the outer one still holds"
    assert not is_on()
    with pytest.raises(KeyError), flash_ext.enable_sdpa():
        raise KeyError
    assert not is_on()


@pytest.mark.usefixtures("untouched")
def test_another_implementation_takes_over_and_comes_back() -> None:
    events = []

    class Other:
        def __init__(self) -> None:
            events.append("on")

        def remove(self) -> None:
            events.append("off")

    torch_attention.register_flash_attention_impl("other", register_fn=Other)
    with flash_ext.enable_sdpa():
        torch_attention.activate_flash_attention_impl("other")
        assert not is_on() and events == ["on"]
        torch_attention.restore_flash_attention_impl()
    events.clear()
    torch_attention.activate_flash_attention_impl("other")
    with flash_ext.enable_sdpa():
        assert is_on() and events == ["on", "off"]
    assert events == ["on", "off", "on"] and torch_attention.current_flash_attention_impl() == "other"
    flash_ext.enable_sdpa()
    flash_ext.enable_sdpa()
    flash_ext.disable_sdpa()
    assert torch_attention.current_flash_attention_impl() == "other"
    flash_ext.enable_sdpa()
    torch_attention.restore_flash_attention_impl()
    torch_attention.activate_flash_attention_impl(NAME)
    flash_ext.disable_sdpa()  # "other" was given up in between
    assert torch_attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("untouched")
def test_torchs_own_names_work() -> None:
    flash_ext.enable_sdpa()
    flash_ext.disable_sdpa()
    assert NAME in torch_attention.list_flash_attention_impls()
    torch_attention.activate_flash_attention_impl(NAME)
    assert is_on()
    torch_attention.restore_flash_attention_impl()
    assert not is_on()


@pytest.mark.usefixtures("untouched")
def test_the_order_of_the_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose first selection installs an order."""
    own = torch._C._get_sdp_priority_order()
    probe = torch.empty(1, 1, 1, 8, dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: probe)

    def select(*tensors: Tensor) -> None:
        if not torch.backends.cuda.math_sdp_enabled():
            raise RuntimeError("No available kernel")  # as with cuDNN alone, which takes no single key
        torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])

    monkeypatch.setattr(torch, "_fused_sdp_choice", select)
    try:
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.CUDNN_ATTENTION):
            flash_ext.enable_sdpa()
            assert not torch.backends.cuda.math_sdp_enabled()
        assert torch._C._get_sdp_priority_order() == [1, 2, 3, 0, 4]
        flash_ext.disable_sdpa()
        assert torch._C._get_sdp_priority_order() == [3, 1, 2, 0, 4]
    finally:
        torch._C._set_sdp_priority_order(own)


def test_without_the_extension_it_says_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_ext._sdpa_override, "is_built", False)
    missing = flash_ext._ops.extension.MissingExtension("not built: pip install .")
    monkeypatch.setattr(flash_ext._ops.library, "_C", missing)
    with pytest.raises(ImportError, match="pip install"):
        flash_ext.enable_sdpa()


@pytest.mark.usefixtures("untouched")
def test_cpu_tensors_are_not_affected() -> None:
    q = torch.randn(1, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with flash_ext.enable_sdpa(), counted():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), expected)
