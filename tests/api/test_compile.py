"""torch.compile and torch.export: no graph breaks, few recompilations, the numbers of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flash_ext
from flash_ext import AuxRequest, masks
from tests.qkv import make_packed, make_qkv, on_devices, tolerance
from tests.values import values

HEADS = 4


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Inductor keeps in fp32 what eager mode rounds to bf16 between two operators, and so may be closer to the
# truth or further from it. Of the plain layer below, eager mode in bf16 is 0.75 u of the root mean square off
# in the mean (u = 2^-8), and in 40 tries of 4224 to 8448 elements at most 5.1 u beyond 3 %. The difference of
# two such results is sqrt(2) times that: 7.2 u. A result in wrong strides is off by 256 u and more.
BF16_ROUNDINGS = 8 * 2.0**-8


def check_training_step(
    compiled: Callable, eager: Callable, inputs: Sequence[Tensor], fuses: bool = False
) -> None:
    """Results and gradients of a function that returns one tensor or several, from the same random numbers.

    Args:
        fuses: whether the compiler may round elsewhere than eager mode does, see ``BF16_ROUNDINGS``.
    """
    everything = []
    for function in (compiled, eager):
        torch.manual_seed(11)
        leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in inputs]
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(result.float().sin().where(result.isfinite(), 0).sum() for result in results)
        everything.append((*results, *torch.autograd.grad(loss, leaves)))
    for got, expected in zip(*everything, strict=True):
        assert got.dtype == expected.dtype
        limits = tolerance(inputs[0].device.type)
        if fuses and expected.dtype == torch.bfloat16:
            limits["atol"] = BF16_ROUNDINGS * float(expected.detach().float().square().mean().sqrt())
        torch.testing.assert_close(got, expected, **limits)


# ---- one graph for many lengths --------------------------------------------------------------------------


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, aux = flash_ext.attention(1.5 * q, k, v, causal=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@on_devices
def test_one_graph_serves_many_lengths(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(with_lse, fullgraph=True, backend=counter)
    for seqlen in (5, 9, 17, 33, 34, 41, 57, 64, 65, 80):
        check_training_step(compiled, with_lse, make_qkv(device, seqlen_q=seqlen))
    assert counter.frame_count <= 2  # the first length, then any length


@on_devices
@pytest.mark.parametrize("bounds", ["none", "int", "tensor"])
def test_packed_calls_do_not_break_the_graph(bounds: str, device: str) -> None:
    counter = CompileCounterWithBackend("eager")

    def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int | Tensor) -> Tensor:
        known = {} if bounds == "none" else {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return flash_ext.attention_varlen(q, k, v, cu, cu, causal=True, **known)

    compiled = torch.compile(packed, fullgraph=True, backend=counter)
    for lengths in ((3, 0, 9), (4, 1, 7), (20, 2, 1), (5, 6, 7), (8, 8, 8)):
        q, k, v, cu = make_packed(device, lengths=lengths)
        longest = torch.tensor(max(lengths), device=device) if bounds == "tensor" else max(lengths)
        # Plain functions of three tensors, so that gradients are checked for those only.
        check_training_step(
            lambda q, k, v: compiled(q, k, v, cu, longest),  # noqa: B023
            lambda q, k, v: packed(q, k, v, cu, longest),  # noqa: B023
            (q, k, v),
        )
    assert counter.frame_count <= 3


@on_devices
def test_one_graph_serves_many_lengths_of_masks_and_dropout(device: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        visible = torch.ones(q.shape[1], k.shape[1], device=q.device, dtype=torch.bool).tril()
        out = flash_ext.attention(q, k, v, mask=visible, dropout_p=0.2)
        mask = masks.Causal("top_left") & (masks.Window(8, -1, "top_left") | masks.SinkTokens(1))
        return out + flash_ext.attention(q, k, v, mask=mask, bias=bias, softcap=4.0)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seqlen in (5, 9, 17, 33, 41):
        inputs = [*make_qkv(device, seqlen_q=seqlen), torch.randn(HEADS, 1, seqlen, device=device)]
        check_training_step(compiled, layer, inputs)
    assert counter.frame_count <= 3


@on_devices
def test_one_graph_serves_many_lengths_of_a_relative_position_bias(device: str) -> None:
    """The object is made inside, or outside of a table that is no input."""

    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = masks.RelativePosition(table.t(), max_distance=20)
        return flash_ext.attention(q, k, v, bias=bias, causal=True)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seqlen in (5, 9, 17, 33, 41):
        inputs = [*make_qkv(device, seqlen_q=seqlen), torch.randn(16, HEADS, device=device)]
        check_training_step(compiled, layer, inputs)
    assert counter.frame_count <= 3

    bias = masks.RelativePosition(torch.randn(HEADS, 9, device=device), bucketing="clip")
    attention = torch.compile(flash_ext.attention, fullgraph=True, backend="eager")
    inputs = make_qkv(device)
    torch.testing.assert_close(
        attention(*inputs, bias=bias), flash_ext.attention(*inputs, bias=bias), **tolerance(device)
    )


@on_devices
def test_sdpa_twin(device: str) -> None:
    counter = CompileCounterWithBackend("eager")

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    compiled = torch.compile(sdpa, fullgraph=True, dynamic=True, backend=counter)
    # Equal lengths, more keys, more queries: one graph each, which serves other lengths of its kind.
    for first, other in (((7, 7), (9, 9)), ((8, 13), (20, 31)), ((13, 8), (31, 20))):
        for lengths in (first, other):
            q, k, v = make_qkv(device, seqlen_q=lengths[0], seqlen_k=lengths[1])
            compiled_before = counter.frame_count
            check_training_step(compiled, sdpa, tuple(t.transpose(1, 2) for t in (q, k, v)))
        assert counter.frame_count == compiled_before


# ---- arguments -------------------------------------------------------------------------------------------


@on_devices
def test_every_modifier_compiles(device: str) -> None:
    slopes, sinks = torch.rand(HEADS, device=device), torch.randn(HEADS, device=device)
    table = torch.randn(HEADS, 9, device=device)
    ids = torch.arange(17, device=device, dtype=torch.int32) // 5
    present = torch.rand(2, 17, device=device) > 0.2
    intervals = torch.zeros(17, 2, device=device, dtype=torch.int32)
    prefixes = torch.tensor([0, 3], device=device, dtype=torch.int32)
    blocks = masks.BlockMask(torch.ones(2, 2, device=device, dtype=torch.bool), 16)

    def layer(
        q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sinks: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        given = values(
            causal=True, window=(12, -1), chunk=9, sink_tokens=1, prefix_lens=prefixes, documents=ids,
            keys=present, hidden_rows=intervals, hidden_keys=intervals, blocks=blocks, slopes=slopes,
            position=masks.RelativePosition(table, bucketing="clip"),
        )  # fmt: skip
        request = AuxRequest(max_scores=True)
        out, aux = flash_ext.attention(q, k, v, sinks=sinks, return_aux=request, **given)
        return out, aux.max_scores

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    check_training_step(compiled, layer, [*make_qkv(device), slopes, sinks, table])


@pytest.mark.parametrize("expanded", ["inside", "outside"])
def test_an_expanded_bias_compiles(expanded: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flash_ext.attention(q, k, v, bias=bias.expand(2, HEADS, 17, 17))

    inputs = [*make_qkv(), torch.randn(HEADS, 1, 17)]
    if expanded == "outside":
        inputs[3] = inputs[3].expand(2, HEADS, 17, 17)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    check_training_step(compiled, layer, inputs)


def test_the_mask_with_a_warning_compiles() -> None:
    """A look at values would break the graph."""
    sdpa = flash_ext.scaled_dot_product_attention
    compiled = torch.compile(sdpa, fullgraph=True, backend="eager")
    q, k, v = (t.transpose(1, 2) for t in make_qkv(heads_k=4))
    mask = torch.ones(17, 17)
    torch.testing.assert_close(
        compiled(q, k, v, attn_mask=mask), sdpa(q, k, v, attn_mask=mask), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("wrong, words", [
    ({"causal": "top_left"}, r"causal must be a bool, got 'top_left'.*masks\.Causal"),
    ({"return_lse": True}, "Did you mean return_aux="), ({"masc": True}, "no keyword 'masc'"),
])  # fmt: skip
def test_wrong_arguments_are_refused_in_words(wrong: dict, words: str) -> None:
    """Also with one graph, where the words are inside those of the compiler.

    A word for causal is true, whatever it says: taken for True it would mean another alignment.
    """
    calls = [torch.compile(flash_ext.attention, fullgraph=True, backend="eager"), flash_ext.attention]
    if "causal" in wrong:
        calls[0] = torch.compile(flash_ext.attention, backend="eager")
    for call in calls:
        with pytest.raises(Exception, match=words):
            call(*make_qkv(seqlen_k=21), **wrong)


def test_merging_compiles() -> None:
    def both_halves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [flash_ext.forward(q, k[:, s], v[:, s]) for s in (slice(0, 8), slice(8, None))]
        return flash_ext.merge_attention_states(*parts[0], *parts[1])

    compiled = torch.compile(both_halves, fullgraph=True, backend="aot_eager")
    check_training_step(compiled, both_halves, make_qkv(seqlen_k=21))


@on_devices
def test_autocast_inside_and_outside(device: str) -> None:
    inputs = make_qkv(device, dtype=torch.float32)

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return flash_ext.attention(q, k, v, causal=True)

    def outside(function: Callable) -> Callable:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return function(q, k, v, causal=True)

        return call

    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    assert compiled(*inputs).dtype == torch.bfloat16
    check_training_step(compiled, inside, inputs)
    compiled = torch.compile(flash_ext.attention, fullgraph=True, backend="aot_eager")
    check_training_step(outside(compiled), outside(flash_ext.attention), inputs)


# ---- code generation and export --------------------------------------------------------------------------


@pytest.mark.slow
@on_devices
def test_inductor_keeps_strides(device: str) -> None:
    """Inductor may choose layouts of what it computes; the operators need unit strides and get them."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x @ weight).unflatten(-1, (8, 16)).split([4, 2, 2], dim=2)
        keys = k.transpose(1, 2).cos().transpose(1, 2)
        out = flash_ext.attention(q.sin(), keys, v, causal=True)
        twin = flash_ext.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
        )
        biased = flash_ext.attention(q.sin(), keys, v, causal=True, bias=bias.tanh().mT)
        return (out + twin.transpose(1, 2)).flatten(2).tanh(), biased

    x = torch.randn(2, 33, 64, device=device, dtype=make_qkv(device)[0].dtype)
    weight = torch.randn(64, 128, device=device, dtype=x.dtype) / 8
    bias = torch.randn(HEADS, 33, 33, device=device)
    check_training_step(torch.compile(layer, fullgraph=True), layer, (x, weight, bias), fuses=True)


@pytest.mark.slow
@on_devices
def test_inductor_draws_new_numbers_for_every_call(device: str) -> None:
    @torch.compile(fullgraph=True)
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.attention(q, k, v, dropout_p=0.5)

    inputs = make_qkv(device, heads_k=4)
    draws = torch.stack([layer(*inputs) for _ in range(64)]).float()
    assert all(not torch.equal(a, b) for a, b in zip(draws, draws[1:]))
    plain = flash_ext.attention(*inputs).float()
    error = (draws.mean(0) - plain).abs() / (draws.std(0) / 8 + 1e-6)
    assert error.max() < 7  # standard errors, over 2176 elements


def test_compiled_autograd() -> None:
    inputs = make_qkv(requires_grad=True)
    expected = torch.autograd.grad(flash_ext.attention(*inputs).sum(), inputs)
    out = flash_ext.attention(*inputs)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        out.sum().backward()
    for leaf, grad in zip(inputs, expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad)


def test_export() -> None:
    """With open lengths, and with a bias."""

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            return flash_ext.attention(q, k, v, bias=bias, causal=True)

    seqlen = torch.export.Dim("seqlen")
    program = torch.export.export(Layer(), make_qkv(), dynamic_shapes={n: {1: seqlen} for n in "qkv"})
    inputs = make_qkv(seqlen_q=40)
    assert torch.equal(program.module()(*inputs), Layer()(*inputs))

    inputs = (*make_qkv(), torch.randn(HEADS, 1, 1))
    assert torch.equal(torch.export.export(Layer(), inputs).module()(*inputs), Layer()(*inputs))


@pytest.mark.gpu
@pytest.mark.caching
def test_cuda_graphs_of_the_compiler() -> None:
    compiled = torch.compile(with_lse, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        check_training_step(
            lambda *inputs: tuple(t.clone() for t in compiled(*inputs)),
            with_lse,
            make_qkv("cuda", seqlen_q=128),
        )
