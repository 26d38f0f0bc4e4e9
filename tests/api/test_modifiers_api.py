"""Masks, biases and the other modifiers from outside: every pair of options, gradients, dropout."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flash_ext
from flash_ext import AuxRequest, _sdpa, masks
from flash_ext._cpu import tiles as tiled
from flash_ext._ops.modifiers import Modifiers
from tests.cpu.test_tiled import LargestTensor
from tests.modifier_options import (
    DIFFERENTIABLE,
    RESULTS_ONLY,
    Inputs,
    Option,
    call,
    combined,
    exclude_each_other,
    expected,
    gradients,
    leaves_of,
    make_inputs,
    make_options,
)
from tests.qkv import OperatorCalls, make_packed, make_qkv

# ---- all pairs -------------------------------------------------------------------------------------------


def test_the_options_are_all_there_are() -> None:
    for packed, function in ((False, flash_ext.attention), (True, flash_ext.attention_varlen)):
        options = make_options(make_inputs(packed)).values()
        named = {keyword for option in options for keyword in option.keywords}
        meant = {name for option in options for name in option.meaning}
        assert meant == {f.name for f in dataclasses.fields(Modifiers)} - {"rng"}, "what no option asks for"
        needed = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "unknown"}
        of_caches = {"seqused_k", "block_table", "k_descale", "v_descale"}
        assert named == set(inspect.signature(function).parameters) - needed - of_caches


def by_threes(options: dict[str, Option]) -> Iterator[tuple[str, ...]]:
    """Each option, then groups of up to three in which every two that go together meet."""
    together = {
        frozenset(pair)
        for pair in itertools.combinations(options, 2)
        if not exclude_each_other(*(options[name] for name in pair))
    }
    yield from ((name,) for name in options)
    to_come = dict.fromkeys(
        pair for pair in map(frozenset, itertools.combinations(options, 2)) if pair in together
    )
    while to_come:
        first, second = group = tuple(next(iter(to_come)))
        gains = {
            name: len(to_come.keys() & {frozenset((first, name)), frozenset((second, name))})
            for name in options
            if {frozenset((first, name)), frozenset((second, name))} <= together
        }
        if gains:
            group += (max(gains, key=gains.__getitem__),)
        for pair in itertools.combinations(group, 2):
            to_come.pop(frozenset(pair), None)
        yield group


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_every_pair_of_options(packed: bool) -> None:
    """All options of a group act, on results and gradients; none is dropped silently."""
    inputs = make_inputs(packed)
    options = make_options(inputs)
    for group in by_threes(options):
        option = combined(*(options[name] for name in group))
        leaves = leaves_of(inputs, option)
        results, exact = call(inputs, option), expected(inputs, option)
        assert len(results) == len(exact)
        for got, want in zip(
            (*results, *gradients(results, leaves)), (*exact, *gradients(exact, leaves)), strict=True
        ):
            torch.testing.assert_close(got, want, msg=lambda text, group=group: f"{group}: {text}")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_no_option_is_without_effect(packed: bool) -> None:
    """Guards the test of pairs: an option that changes nothing here could be dropped unnoticed."""
    inputs = make_inputs(packed)
    plain = call(inputs, Option())[0]
    results = {"lse", "largest scores", "lse and largest scores"}
    silent = {"hints", "heads first", "generator", "deterministic", "backend", *results}
    only_with_others = {"prefix", "sink tokens"}  # they show what another option hides
    for name, option in make_options(inputs).items():
        changed = not torch.equal(call(inputs, option)[0], plain)
        assert changed == (name not in silent | only_with_others), name


def of_the_pair(inputs: Inputs, options: dict[str, Option]) -> Iterator[tuple[str, Option, dict[str, Any]]]:
    """The options that the functional pair has, and its keywords for them."""
    bounds = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), inputs.cu, strict=False))
    for name, option in options.items():
        if not option.others.keys() & set(RESULTS_ONLY):
            rng = {"rng": flash_ext.dropout_rng("cpu")} if "dropout_p" in option.others else {}
            yield name, option, option.keywords | bounds | rng


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_functional_pair_equals_autograd(packed: bool) -> None:
    inputs = make_inputs(packed)
    for name, option, keywords in of_the_pair(inputs, make_options(inputs)):
        with torch.no_grad():
            out, lse = flash_ext.forward(*inputs.qkv, **keywords)
            dout, dlse = torch.randn_like(out), torch.randn_like(lse).where(lse.isfinite(), 0)
            needs = ("v", "k", "q", *option.needs)
            grads = flash_ext.backward(dout, *inputs.qkv, out, lse, dlse=dlse, needs=needs, **keywords)
        leaves = [*reversed(inputs.qkv), *option.tensors().values()]
        want = torch.autograd.grad(flash_ext.forward(*inputs.qkv, **keywords), leaves, (dout, dlse))
        for got, exact, leaf in zip(grads, want, leaves, strict=True):
            assert got.shape == leaf.shape
            torch.testing.assert_close(got, exact, rtol=0, atol=0, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_wide_results_beside_every_option(packed: bool) -> None:
    """out_dtype and grad_dtype, which only the pair has: rounded, the usual results."""
    inputs = make_inputs(packed, torch.bfloat16)
    options = {
        name: option.with_tensors({key: t.detach().float() for key, t in option.tensors().items()})
        for name, option in make_options(inputs).items()
    }
    for name, option, keywords in of_the_pair(inputs, options):
        with torch.no_grad():
            usual, lse = flash_ext.forward(*inputs.qkv, **keywords)
            wide, same_lse = flash_ext.forward(*inputs.qkv, out_dtype=torch.float32, **keywords)
            x = (torch.randn_like(usual), *inputs.qkv, usual, lse)
            needs = ("q", "k", "v", *option.needs)
            grads = flash_ext.backward(*x, needs=needs, **keywords)
            wide_grads = flash_ext.backward(*x, needs=needs, grad_dtype=torch.float32, **keywords)
        assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), usual), name
        assert torch.equal(lse, same_lse), name
        for need, got, wanted in zip(needs, wide_grads, grads, strict=True):
            assert got.dtype == torch.float32 or need not in "qkv", f"{name}: {need}"
            assert torch.equal(got.to(wanted.dtype), wanted), f"{name}: {need}"


# ---- masks -----------------------------------------------------------------------------------------------


def test_a_mask_may_have_any_strides() -> None:
    q, k, v = make_qkv(dtype=torch.float64)
    bias = torch.randn(2, 4, 17, 17, dtype=torch.float64)
    wide = torch.randn(2, 4, 17, 41, dtype=torch.float64)
    for strided in (
        bias.transpose(2, 3),
        bias.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2),
        wide[..., 3:20],
        wide[..., ::2][..., :17],
        bias[:1, :1].expand(2, 4, 17, 17),
        bias[..., :1].expand(2, 4, 17, 17),
        bias.flip(3),
    ):
        for name, t in (("bias", strided), ("mask", strided > 0)):
            got = flash_ext.attention(q, k, v, **{name: t})
            assert torch.equal(got, flash_ext.attention(q, k, v, **{name: t.contiguous()}))


def test_masks_and_biases_count_inside_packed_sequences() -> None:
    """Those of elements may be shorter or longer."""
    q, k, v, cu = make_packed(lengths=(3, 0, 9))
    bias, mask = torch.randn(5, 20), torch.rand(5, 20) > 0.4
    position = masks.RelativePosition(torch.randn(4, 5), bucketing="clip")
    given = ({"bias": bias}, {"mask": mask}, {"bias": position})
    whole = [flash_ext.attention_varlen(q, k, v, cu, cu, **options) for options in given]
    for start, length in ((0, 3), (3, 9)):
        one = [t[None, start : start + length] for t in (q, k, v)]
        own_bias, own_mask = torch.zeros(length, length), torch.zeros(length, length, dtype=torch.bool)
        rows = min(length, 5)
        own_bias[:rows], own_mask[:rows] = bias[:rows, :length], mask[:rows, :length]
        for out, own in zip(whole, ({"bias": own_bias}, {"mask": own_mask}, {"bias": position}), strict=True):
            torch.testing.assert_close(out[start : start + length], flash_ext.attention(*one, **own)[0])


@pytest.mark.parametrize("dims", [("batch",), ("batch", "rows"), ("keys",)])
def test_an_expanded_bias_gets_the_gradient_of_its_source(dims: tuple[str, ...]) -> None:
    names = ("batch", "heads", "rows", "keys")
    shape = [1 if name in dims else n for name, n in zip(names, (2, 4, 17, 17), strict=True)]
    q, k, v = make_qkv(dtype=torch.float64)
    source = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    grads = []
    for bias in (source, source.expand(2, 4, 17, 17), source.expand(2, 4, 17, 17) * 1):
        out = flash_ext.attention(q, k, v, bias=bias, causal=True)
        grads.append(torch.autograd.grad(out.sin().sum(), source)[0])
    assert torch.equal(grads[0], grads[1])
    torch.testing.assert_close(grads[0], grads[2])
    # One that collects a gradient of its own gets it element by element.
    kept = source.expand(2, 4, 17, 17)
    kept.retain_grad()
    leaf = source.detach().expand(2, 4, 17, 17).requires_grad_()
    view_of_leaf = source.detach().expand(2, 4, 17, 17).requires_grad_()
    for bias, used in ((kept, kept), (leaf, leaf), (view_of_leaf, view_of_leaf[:])):
        flash_ext.attention(q, k, v, bias=used, causal=True).sin().sum().backward()
        torch.testing.assert_close(bias.grad.sum_to_size(shape), grads[0])
        assert bias.grad.ne(0).sum() > source.numel()


def test_an_expanded_bias_costs_no_expanded_gradient() -> None:
    q, k, v = make_qkv(seqlen_q=4, dtype=torch.float64)
    source = torch.randn(1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    out = flash_ext.attention(q, k, v, bias=source.expand(2, 4, 4, 4))
    with OperatorCalls() as calls:
        out.sum().backward()
    assert [results[3].numel() for name, _, results in calls.seen if name == "bwd_mod"] == [source.numel()]


@pytest.fixture
def _watching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sdpa._ZeroOneWatch, "left", _sdpa.FLOAT_MASKS_LOOKED_AT)


@pytest.mark.usefixtures("_watching")
def test_a_float_mask_of_zeros_and_ones_warns_once() -> None:
    q, k, v = (t.transpose(1, 2) for t in make_qkv(heads_k=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for harmless in (torch.zeros(17), torch.randn(17, 17), torch.ones(17) > 0, torch.full((17,), 2.0)):
            flash_ext.scaled_dot_product_attention(q, k, v, attn_mask=harmless)
    zero_one = torch.ones(2, 1, 1, 17)
    zero_one[..., 9:] = 0
    with pytest.warns(UserWarning, match=r"holds only 0 and 1: .*pass attn_mask.bool\(\)") as caught:
        flash_ext.scaled_dot_product_attention(q, k, v, attn_mask=zero_one)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_ext.scaled_dot_product_attention(q, k, v, attn_mask=zero_one)


@pytest.mark.usefixtures("_watching")
def test_only_the_first_masks_are_looked_at() -> None:
    q, k, v = (t.transpose(1, 2) for t in make_qkv(heads_k=4))
    for _ in range(_sdpa.FLOAT_MASKS_LOOKED_AT):
        flash_ext.scaled_dot_product_attention(q, k, v, attn_mask=torch.randn(17))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_ext.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(17))


# ---- block masks -----------------------------------------------------------------------------------------


def test_whole_blocks_carry_no_element_mask() -> None:
    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i // 16) >= (j // 16)

    of_torch = create_block_mask(rule, None, None, 40, 50, device="cpu", BLOCK_SIZE=16)
    dense_mask = rule(None, None, torch.arange(40)[:, None], torch.arange(50))
    for block_mask in (
        masks.BlockMask.from_dense(dense_mask, 16),
        masks.BlockMask.from_rule(rule, None, None, 40, 50, 16),
        masks.BlockMask.from_torch(of_torch),
    ):
        assert block_mask.elements is None
        assert block_mask.blocks.squeeze().tolist() == torch.ones(3, 4).tril().bool().tolist()
        assert repr(block_mask) == "BlockMask(blocks (1, 1, 3, 4), block_size (16, 16), whole blocks)"


# ---- a bias by distance ----------------------------------------------------------------------------------


def test_a_table_of_any_float_type_gets_its_gradient_in_that_type() -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        table = torch.randn(4, 7).to(dtype).requires_grad_()
        transposed = torch.randn(7, 4).to(dtype).requires_grad_()  # as a module of T5 keeps it
        for leaf, given in ((table, table), (transposed, transposed.t())):
            bias = masks.RelativePosition(given, bucketing="clip")
            out, aux = flash_ext.attention(q, k, v, bias=bias, return_aux=AuxRequest(lse=True))
            (grad,) = torch.autograd.grad(out.float().sin().sum(), leaf)
            assert (grad.dtype, grad.shape) == (dtype, leaf.shape) and grad.any()
            dout = out.detach().float().cos().to(out.dtype)
            (by_pair,) = flash_ext.backward(dout, q, k, v, out, aux.lse, bias=bias, needs=("bias",))
            assert (by_pair.dtype, by_pair.shape) == (dtype, given.shape)
            torch.testing.assert_close(by_pair, grad if leaf is given else grad.t())


def test_a_relative_position_bias_forms_nothing_of_the_size_of_the_scores() -> None:
    rows, heads = 1200, 2
    q, k, v = (torch.randn(1, rows, heads, 4, requires_grad=True) for _ in range(3))
    table = torch.randn(heads, 32, requires_grad=True)
    with LargestTensor() as seen:
        out = flash_ext.attention(q, k, v, bias=masks.RelativePosition(table))
        torch.autograd.grad(out.sum(), (q, table))
    assert seen.numel <= 2.1 * heads * tiled.BLOCK_M * tiled.BLOCK_N < heads * rows * rows / 20


# ---- gradients of single options -------------------------------------------------------------------------


@pytest.mark.parametrize("which", DIFFERENTIABLE)
def test_only_an_option_needs_its_gradient(which: str) -> None:
    inputs = make_inputs(packed=False)
    option = next(o for o in make_options(inputs).values() if which in o.tensors())
    leaf = option.tensors()[which]
    (want,) = gradients(expected(inputs, option), [leaf])
    detached = [t.detach() for t in inputs.qkv]
    out = flash_ext.attention(*detached, **option.keywords)
    (got,) = torch.autograd.grad(out.sin().sum(), leaf)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_per_head_options_take_any_float_and_give_its_gradient(dtype: torch.dtype) -> None:
    q, k, v = make_qkv()
    for keywords in (lambda t: {"bias": masks.ALiBi(t)}, lambda t: {"sinks": t}):
        wide = torch.randn(4, requires_grad=True)
        leaf = wide.detach().to(dtype).requires_grad_()
        out = flash_ext.attention(q, k, v, **keywords(leaf))
        (grad,) = torch.autograd.grad(out.sin().sum(), leaf)
        assert grad.dtype == dtype
        rounded = leaf.detach().float().requires_grad_()
        (want,) = torch.autograd.grad(flash_ext.attention(q, k, v, **keywords(rounded)).sin().sum(), rounded)
        torch.testing.assert_close(grad, want.to(dtype))


def test_maxima_carry_no_gradient() -> None:
    q, k, v = make_qkv(requires_grad=True)
    out, aux = flash_ext.attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    assert (out.requires_grad, aux.lse.requires_grad, aux.max_scores.requires_grad) == (True, True, False)
    assert aux.max_scores.shape == aux.lse.shape == (2, 4, 17)
    _, aux = flash_ext.attention(q, k[:, :0], v[:, :0], return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None and (aux.max_scores == -torch.inf).all()


# ---- dropout ---------------------------------------------------------------------------------------------


def test_a_generator_of_another_device_is_refused() -> None:
    q, k, v = (t.to("meta") for t in make_qkv())
    with pytest.raises(ValueError, match=r'generator must be on the device of q, meta, got cpu. .*"meta"'):
        flash_ext.attention(q, k, v, dropout_p=0.1, generator=torch.Generator())


# ---- alignment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(9, 9), (9, 14), (14, 9)])
def test_alignments(lengths: tuple[int, int]) -> None:
    q, k, v = make_qkv(seqlen_q=lengths[0], seqlen_k=lengths[1], dtype=torch.float64)
    rows, keys = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    for alignment, shift in (("top_left", 0), ("bottom_right", lengths[1] - lengths[0])):
        for left, right in ((-1, 0), (2, 0), (2, 3), (-1, 1), (4, -1)):
            visible = torch.ones(*lengths, dtype=torch.bool)
            if left >= 0:
                visible &= keys >= rows + shift - left
            if right >= 0:
                visible &= keys <= rows + shift + right
            given = [{"mask": masks.Window(left, right, alignment)}]
            if right == 0:
                given.append({"mask": masks.Causal(alignment) & masks.Window(left, -1, alignment)})
            if alignment == "bottom_right":
                given.append({"causal": right == 0, "window_size": (left, right or -1)})
            want = flash_ext.attention(q, k, v, mask=visible)
            for keywords in given:
                torch.testing.assert_close(flash_ext.attention(q, k, v, **keywords), want)


@pytest.mark.parametrize(("keywords", "operator"),
                         [
                             ({"mask": masks.Causal()}, "fwd"), ({"mask": masks.Causal("top_left")}, "fwd"),
                             ({"mask": masks.SlidingWindow(3, sink_tokens=0)}, "fwd"),
                             ({"mask": masks.Window()}, "fwd"), ({"softcap": 0.0, "dropout_p": 0.0}, "fwd"),
                             ({"generator": torch.Generator()}, "fwd"),
                             ({"return_aux": AuxRequest(lse=True)}, "fwd"),
                             ({"return_aux": AuxRequest(max_scores=True)}, "fwd_mod"),
                             ({"softcap": 1.0}, "fwd_mod"),
                         ])  # fmt: skip
def test_what_asks_for_nothing_takes_the_plain_operator(keywords: dict, operator: str) -> None:
    with OperatorCalls() as calls:
        flash_ext.attention(*make_qkv(), **keywords)
    assert calls.names() == [operator]
