"""flash_ext.nn.MultiheadAttention against torch's module with the same parameters."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash_ext
from flash_ext.nn import MultiheadAttention
from tests.qkv import on_devices

BATCH, ROWS, KEYS, EMBED, HEADS = 3, 7, 9, 24, 4


def pair(device: str = "cpu", **options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options).to(device, dtype)
    with torch.no_grad():  # biases start as zeros and would hide
        for parameter in theirs.parameters():
            parameter.uniform_(-0.5, 0.5)
    ours = MultiheadAttention(EMBED, HEADS, **options).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(like: nn.Module, kind: str = "cross", kdim: int = EMBED, vdim: int = EMBED) -> list[Tensor]:
    p = next(like.parameters())
    q, k, v = (torch.randn(BATCH, n, size, device=p.device, dtype=p.dtype)
               for n, size in ((ROWS, EMBED), (KEYS, kdim), (KEYS, vdim)))  # fmt: skip
    found = {"self": [q, q, q], "shared": [q, k, k], "cross": [q, k, v]}[kind]
    if like.batch_first:
        return found
    known = {id(t): t.transpose(0, 1).contiguous() for t in found}
    return [known[id(t)] for t in found]


def on(module: nn.Module, call: dict[str, Any]) -> dict[str, Any]:
    """A call's masks on the module's device, added ones in its type."""
    like = next(module.parameters())

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)

    return {name: moved(value) for name, value in call.items()}


def close(got: Tensor, expected: Tensor) -> None:
    if got.dtype == torch.float64:
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
        return
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-3)
    assert error < 0.05, f"relative error {error:.3g}"  # both are rounded to bfloat16 several times


def compare(theirs: nn.Module, ours: nn.Module, given: list[Tensor], **call: Any) -> None:
    """Output, weights and every gradient."""
    results = []
    for module in (theirs, ours):
        known = {id(t): t.detach().clone().requires_grad_() for t in given}
        leaves = list(known.values())
        bias = call.get("attn_mask")
        if bias is not None and bias.is_floating_point():
            call["attn_mask"] = bias = bias.detach().clone().requires_grad_()
            leaves.append(bias)
        out, weights = module(*(known[id(t)] for t in given), **call)
        loss = (out * torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)).sum()
        if weights is not None:
            loss = loss + weights.square().sum()
        parameters = dict(module.named_parameters())
        grads = torch.autograd.grad(loss, [*leaves, *parameters.values()], allow_unused=True)
        results.append((out, weights, grads))
    (expected, wanted_weights, wanted), (got, weights, grads) = results
    assert got.shape == expected.shape and got.dtype == expected.dtype
    close(got, expected)
    assert (weights is None) == (wanted_weights is None)
    if weights is not None:
        close(weights, wanted_weights)
    for a, b in zip(grads, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b)


# ---- the interface ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signature_is_torchs(method: str) -> None:
    theirs, ours = (
        [(p.name, p.default) for p in inspect.signature(getattr(cls, method)).parameters.values()]
        for cls in (nn.MultiheadAttention, MultiheadAttention)
    )
    assert ours == theirs


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 5}], ids=str)
def test_checkpoints_load_in_both_directions(options: dict) -> None:
    theirs, ours = pair(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(ours, nn.MultiheadAttention) and ours is not theirs


# ---- values ----------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["self", "shared", "cross"])
def test_inputs(kind: str, batch_first: bool, need_weights: bool, device: str) -> None:
    theirs, ours = pair(device, batch_first=batch_first)
    compare(theirs, ours, inputs(ours, kind), need_weights=need_weights)


CONSTRUCTIONS = [{"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 5, "vdim": 6},
                 {"add_bias_kv": True, "add_zero_attn": True, "kdim": 8, "vdim": 8}]  # fmt: skip


@on_devices
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", CONSTRUCTIONS, ids=str)
def test_constructions(options: dict, masked: bool, device: str) -> None:
    theirs, ours = pair(device, batch_first=True, **options)
    given = inputs(ours, kdim=options.get("kdim", EMBED), vdim=options.get("vdim", EMBED))
    call: dict[str, Any] = {"average_attn_weights": False}
    if masked:
        call["key_padding_mask"] = torch.arange(KEYS) >= torch.tensor([[9], [6], [3]])
        call["attn_mask"] = torch.rand(ROWS, KEYS) < 0.3
        call["attn_mask"][:, 0] = False  # every row sees a key
    compare(theirs, ours, given, **on(ours, call))


def masks() -> dict[str, Tensor | None]:
    hidden = torch.rand(BATCH * HEADS, ROWS, KEYS) < 0.4
    hidden[..., 0] = False
    return {"none": None, "bool": hidden[0], "bool3": hidden, "float": torch.randn(ROWS, KEYS).double(),
            "float3": torch.randn(BATCH * HEADS, ROWS, KEYS).double()}  # fmt: skip


def paddings() -> dict[str, Tensor | None]:
    hidden = torch.arange(KEYS) >= torch.tensor([[9], [5], [2]])
    return {"none": None, "bool": hidden, "float": torch.where(hidden, -torch.inf, 0.3).double()}


# torch warns that masks of different types are to go, and takes them.
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@on_devices
@pytest.mark.parametrize("mask, padding", list(itertools.product(masks(), paddings())))
def test_masks(mask: str, padding: str, device: str) -> None:
    theirs, ours = pair(device, batch_first=True)
    call = on(ours, {"attn_mask": masks()[mask], "key_padding_mask": paddings()[padding]})
    compare(theirs, ours, inputs(ours), **call)
    compare(theirs, ours, inputs(ours), **call, need_weights=False)


@on_devices
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_causal_hint(kind: str, padded: bool, device: str) -> None:
    theirs, ours = pair(device, batch_first=True)
    given = inputs(ours, kind)
    rows, keys = given[0].shape[1], given[1].shape[1]
    causal = torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1)
    call: dict[str, Any] = {"attn_mask": causal, "is_causal": True, "need_weights": False}
    if padded:
        call["key_padding_mask"] = torch.arange(keys) >= torch.tensor([[keys], [5], [2]])
    compare(theirs, ours, given, **on(ours, call))
    if not padded:
        # The mask itself is not read: that is what the hint is for.
        call["attn_mask"] = torch.zeros_like(causal)
        close(ours(*given, **call)[0], theirs(*given, attn_mask=causal, need_weights=False)[0])


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_mask_that_learns_is_read_despite_the_hint(need_weights: bool) -> None:
    """torch reads it when weights are wanted, and drops it with its gradient when they are not."""
    theirs, ours = pair(batch_first=True)
    given = inputs(ours, "self")
    rows = given[0].shape[1]
    bias = torch.randn(rows, rows, dtype=torch.float64)
    bias.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
    masks = [bias.clone().requires_grad_() for _ in range(2)]
    out, _ = ours(*given, attn_mask=masks[0], is_causal=True, need_weights=need_weights)
    expected, _ = theirs(*given, attn_mask=masks[1], need_weights=False)
    close(out, expected)
    wanted = torch.autograd.grad(expected.sin().sum(), masks[1])[0]
    close(torch.autograd.grad(out.sin().sum(), masks[0])[0], wanted)
    assert wanted.abs().max() > 1e-3


def test_without_a_batch() -> None:
    theirs, ours = pair()
    given = [t[:, 0] for t in inputs(ours)]
    compare(theirs, ours, given)
    compare(theirs, ours, given, attn_mask=masks()["bool"], key_padding_mask=paddings()["bool"][1],
            average_attn_weights=False)  # fmt: skip
    mask = torch.rand(HEADS, ROWS, KEYS) < 0.3
    mask[..., 0] = False
    compare(theirs, ours, given, attn_mask=mask)


@on_devices
def test_rows_without_keys_are_zero_and_not_nan(device: str) -> None:
    theirs, ours = pair(device, batch_first=True)
    given = inputs(ours)
    hidden = torch.zeros(BATCH, KEYS, dtype=torch.bool, device=device)
    hidden[1] = True
    out, weights = ours(*given, key_padding_mask=hidden)
    assert torch.equal(out[1], ours.out_proj.bias.expand(ROWS, -1)) and (weights[1] == 0).all()
    assert theirs(*given, key_padding_mask=hidden)[0][1].isnan().all()


@on_devices
def test_more_keys_than_weights_of_one_pass(device: str) -> None:
    theirs, ours = pair(device, batch_first=True)
    q = inputs(ours)[0]
    k = torch.randn(BATCH, 300, EMBED, dtype=q.dtype, device=device)
    compare(theirs, ours, [q, k, k])


# ---- dropout ---------------------------------------------------------------------------------------------


@on_devices
def test_dropout_drops_in_training_only_and_shows_in_the_weights(device: str) -> None:
    theirs, ours = pair(device, batch_first=True, dropout=0.25)
    given = inputs(ours)
    compare(theirs.eval(), ours.eval(), given)
    _, plain = ours(*given, average_attn_weights=False)
    out, weights = ours.train()(*given, average_attn_weights=False)
    dropped = weights == 0
    assert 0.15 < dropped.double().mean() < 0.35
    close(weights[~dropped], (plain / 0.75)[~dropped])
    v = nn.functional.linear(given[2], ours.in_proj_weight[2 * EMBED :], ours.in_proj_bias[2 * EMBED :])
    v = v.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    close(out, ours.out_proj((weights @ v).transpose(1, 2).flatten(2)))


# ---- where it is used ------------------------------------------------------------------------------------


def test_inside_torchs_layer() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True, dropout=0.0).double()
    x = torch.randn(BATCH, ROWS, EMBED, dtype=torch.float64)
    padding = torch.arange(ROWS) >= torch.tensor([[7], [5], [2]])
    expected = layer(x, src_key_padding_mask=padding)
    ours = MultiheadAttention(EMBED, HEADS, batch_first=True, dropout=0.0).double()
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    close(layer(x, src_key_padding_mask=padding), expected)


def test_one_input_is_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair()
    products, linear = [], nn.functional.linear
    monkeypatch.setattr(flash_ext.nn.F, "linear", lambda *a: products.append(a) or linear(*a))
    for kind, count in (("self", 2), ("shared", 3), ("cross", 4)):
        products.clear()
        ours(*inputs(ours, kind), need_weights=False)
        assert len(products) == count


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, error, message", [
    ({"is_causal": True}, ValueError, "attn_mask must be given"),
    ({"attn_mask": torch.zeros(2, 2, dtype=torch.bool)}, ValueError, r"attn_mask must have shape \(7, 9\)"),
    ({"attn_mask": torch.zeros(ROWS, KEYS, dtype=torch.int)}, TypeError, "attn_mask must be torch.bool"),
    ({"key_padding_mask": torch.zeros(2, KEYS, dtype=torch.bool)}, ValueError, "key_padding_mask must have"),
    ({"key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.int)}, TypeError, "key_padding_mask must be"),
])  # fmt: skip
def test_refusals(call: dict, error: type[Exception], message: str) -> None:
    _, ours = pair(batch_first=True)
    with pytest.raises(error, match=message):
        ours(*inputs(ours), **call)


def test_refuses_wrong_inputs() -> None:
    _, ours = pair(batch_first=True)
    q, k, v = inputs(ours)
    with pytest.raises(ValueError, match="all have 2 dimensions"):
        ours(q, k[0], v)
    with pytest.raises(ValueError, match="key must have 24 features"):
        ours(q, k[..., :5], v)
    nested = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
    with pytest.raises(TypeError, match="attention_varlen"):
        ours(nested, nested, nested)
