"""flash_ext.compat.flash_attn: signatures, layouts, values and refusals of flash-attn 2.8."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from flash_ext.compat import flash_attn as fa
from flash_ext.compat.flash_attn import bert_padding
from flash_ext.compat.flash_attn import flash_attn_interface as interface
from tests.qkv import on_devices


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def draw(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype_of(device)) for shape in shapes]


def close(got: Tensor, expected: Tensor) -> None:
    got, expected = got.double(), expected.double()
    if not got.is_cuda:
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        return
    assert got.shape == expected.shape and torch.equal(got.isinf(), expected.isinf())
    finite = expected.masked_fill(expected.isinf(), 0.0)
    error = (got - expected).nan_to_num(0.0).norm() / finite.norm().clamp(min=1.0)
    assert not got.isnan().any() and error < 0.02, f"relative error {error:.3g}"


def by_definition(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """out, lse and weights (b, h, rows, keys) by the sentences of flash-attn's docstrings, in float64.

    One key head after the other, since all of a long cache would take a GPU's memory in float64.
    """
    rows, keys, heads_k = q.shape[1], k.shape[1], k.shape[2]
    offset = torch.arange(keys, device=q.device) - torch.arange(rows, device=q.device)[:, None] - keys + rows
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if left >= 0:
        hidden |= offset < -left
    if right >= 0:
        hidden |= offset > right
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    per_head = [None] * heads_k if slopes is None else slopes.double().chunk(heads_k, -1)
    parts = []
    for own_q, own_k, own_v, own_slopes in zip(q.chunk(heads_k, 2), k.unbind(2), v.unbind(2), per_head):
        own_q, own_k, own_v = own_q.double(), own_k.double(), own_v.double()
        scores = torch.einsum("bihd,bjd->bhij", own_q, own_k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if own_slopes is not None:
            scores = scores - own_slopes[..., None, None] * offset.abs()
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        out = torch.einsum("bhij,bjd->bihd", weights, own_v)
        parts.append((out, torch.logsumexp(scores, -1), weights))
    out, lse, weights = zip(*parts)
    return torch.cat(out, 2), torch.cat(lse, 1), torch.cat(weights, 1)


VARIANTS = [
    {},
    {"causal": True},
    {"window_size": (3, 1)},
    {"causal": True, "window_size": (4, -1), "softmax_scale": 0.3},
    {"softcap": 2.0, "causal": True},
    {"alibi": True},
]


def split(variant: dict, heads: int, batch: int, device: str) -> tuple[dict, dict]:
    """Keywords for flash-attn's functions and for the definition."""
    ours = {name: value for name, value in variant.items() if name != "alibi"}
    slopes = torch.rand(batch, heads, device=device) if "alibi" in variant else None
    if slopes is not None:
        ours["alibi_slopes"] = slopes
    theirs = {
        "scale": ours.get("softmax_scale"),
        "causal": ours.get("causal", False),
        "slopes": slopes,
        "window": ours.get("window_size", (-1, -1)),
        "softcap": ours.get("softcap", 0.0),
    }
    return ours, theirs


# ---- signatures ------------------------------------------------------------------------------------------

_DROPOUT = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
_DROPOUT += "alibi_slopes=None, deterministic=False, return_attn_probs=False"
_BOUNDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_FLAT = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
_OF_BACKWARD = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {_DROPOUT}",
    "flash_attn_qkvpacked_func": f"qkv, {_DROPOUT}",
    "flash_attn_kvpacked_func": f"q, kv, {_DROPOUT}",
    "flash_attn_varlen_func": f"q, k, v, {_BOUNDS}, {_DROPOUT}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_DROPOUT}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_BOUNDS}, {_DROPOUT}",
    "flash_attn_with_kvcache":
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False",
    "_flash_attn_forward": f"q, k, v, {_FLAT}, return_softmax",
    "_flash_attn_backward": f"{_OF_BACKWARD}, {_FLAT}, deterministic, rng_state=None",
    "_flash_attn_varlen_forward":
        f"q, k, v, {_BOUNDS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False",
    "_flash_attn_varlen_backward":
        f"{_OF_BACKWARD}, {_BOUNDS}, {_FLAT}, deterministic, rng_state=None, zero_tensors=False",
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name: str) -> None:
    parameters = inspect.signature(getattr(interface, name)).parameters
    written = [str(p.replace(annotation=p.empty)).replace(" ", "") for p in parameters.values()]
    assert ",".join(written) == SIGNATURES[name].replace(" ", "")
    if name.startswith("_"):
        # Ring implementations fill what getfullargspec() lists: None without a default, 0 for softcap.
        spec = inspect.getfullargspec(getattr(interface, name))
        assert spec.varargs is None and spec.varkw is None and spec.args == list(parameters)


def test_a_ring_calls_the_pair_by_keywords() -> None:
    def filled(function, **given):
        spec = inspect.getfullargspec(function)
        defaults = spec.defaults or ()
        known = dict(zip(spec.args, (None,) * (len(spec.args) - len(defaults)) + defaults, strict=True))
        return function(**known | {"softcap": 0.0} | given)

    q, k, v, dout = draw("cpu", (1, 6, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16), (1, 6, 2, 16))
    common = {"dropout_p": 0.0, "softmax_scale": 0.25, "causal": False} | dict.fromkeys(
        ("window_size_left", "window_size_right"), -1
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected, _, _ = by_definition(*leaves, scale=0.25)
    out, lse, _, _ = filled(interface._flash_attn_forward, q=q, k=k, v=v, return_softmax=False, **common)
    close(out, expected)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    results = dict(zip(("dq", "dk", "dv"), grads, strict=True)) | {"out": out, "softmax_lse": lse}
    filled(interface._flash_attn_backward, dout=dout, q=q, k=k, v=v, deterministic=False, **results, **common)
    for got, wanted in zip(grads, torch.autograd.grad(expected, leaves, dout.double()), strict=True):
        close(got, wanted)


def test_public_names() -> None:
    assert set(fa.__all__) == {name for name in SIGNATURES if not name.startswith("_")}


# ---- dense -----------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_dense_values_and_gradients(device: str, variant: dict) -> None:
    q, k, v = draw(device, (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16))
    ours, theirs = split(variant, 4, 2, device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = fa.flash_attn_func(q, k, v, deterministic=True, **ours)
    expected, lse, _ = by_definition(q, k, v, **theirs)
    close(out, expected)
    dout = torch.randn_like(out)
    for got, wanted in zip(torch.autograd.grad(out, leaves, dout),
                           torch.autograd.grad(expected, leaves, dout.double())):  # fmt: skip
        close(got, wanted)
    again, got_lse, weights = fa.flash_attn_func(q, k, v, return_attn_probs=True, **ours)
    assert torch.equal(again, out) and weights.shape == (0,)
    close(got_lse, lse)


def test_rows_without_keys_are_zero() -> None:
    q, k = draw("cpu", (1, 5, 1, 8), (1, 2, 1, 8))
    out, lse, _ = fa.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert (out[0, :3] == 0).all() and (lse[0, 0, :3] == -torch.inf).all()
    assert (out[0, 3:] != 0).all()


@on_devices
def test_packed_projections_are_read_in_place(device: str) -> None:
    (qkv,) = draw(device, (2, 7, 3, 4, 16))
    qkv.requires_grad_()
    out = fa.flash_attn_qkvpacked_func(qkv, causal=True)
    expected, _, _ = by_definition(*qkv.unbind(2), causal=True)
    close(out, expected)
    dout = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, qkv, dout)
    close(grad, torch.autograd.grad(expected, qkv, dout.double())[0])

    (q, kv) = draw(device, (2, 5, 4, 16), (2, 7, 2, 2, 16))
    close(fa.flash_attn_kvpacked_func(q, kv, window_size=(2, 0)),
          by_definition(q, *kv.unbind(2), window=(2, 0))[0])  # fmt: skip
    with pytest.raises(ValueError, match=r"qkv must have shape \(batch, seqlen, 3"):
        fa.flash_attn_qkvpacked_func(kv)


@on_devices
def test_a_last_stride_that_is_not_one_is_copied(device: str) -> None:
    q, k, v = draw(device, (1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    strided = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert strided.stride(-1) != 1
    assert torch.equal(fa.flash_attn_func(strided, k, v), fa.flash_attn_func(q, k, v))


# ---- dropout ---------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_weights_have_a_minus_where_dropped(device: str, packed: bool) -> None:
    heads, keys = 2, 300  # more keys than one call of the weights carries out
    shapes = ((1, 40, heads, 16), (1, keys, 1, 16), (1, keys, 1, 16))
    q, k, v = draw(device, *shapes)
    options = {"dropout_p": 0.3, "causal": True, "return_attn_probs": True}
    if packed:
        bounds = [torch.tensor([0, 0, n], dtype=torch.int32, device=device) for n in (40, keys)]
        out, lse, weights = fa.flash_attn_varlen_func(q[0], k[0], v[0], *bounds, 40, keys, **options)
        assert weights.shape == (2, heads, 128, 384) and (weights[0] == 0).all()
        out, weights = out[None], weights[1:]
    else:
        out, lse, weights = fa.flash_attn_func(q, k, v, **options)
        assert weights.shape == (1, heads, 128, 384)
    _, expected_lse, expected = by_definition(q, k, v, causal=True)
    close(lse if not packed else lse[None], expected_lse)
    assert (weights[:, :, 40:] == 0).all() and (weights[..., keys:] == 0).all()
    weights = weights[:, :, :40, :keys]
    close(weights.abs(), expected)
    seen = expected > 1e-6
    dropped = (weights < 0)[seen].double().mean()
    assert 0.27 < dropped < 0.33
    kept = weights.double().clamp(min=0) / 0.7
    close(out, torch.einsum("bhij,bjhd->bihd", kept, v.double().repeat_interleave(heads, 2)))


@on_devices
def test_dropout_pair_uses_the_same_mask(device: str) -> None:
    q, k, v = draw(device, (2, 9, 2, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    flat = (0.4, None, True, -1, -1, 0.0, None)
    out, lse, weights, rng = interface._flash_attn_forward(q, k, v, *flat, True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    _, _, plain = by_definition(*leaves, causal=True)
    kept = (weights[:, :, :9, :9] > 0).double()
    expected = torch.einsum("bhij,bjhd->bihd", plain * kept / 0.6, leaves[2].double())
    close(out, expected)
    dout = torch.randn_like(out)
    into = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    interface._flash_attn_backward(dout, q, k, v, out, lse, *into, *flat, False, rng)
    for got, wanted in zip(into, torch.autograd.grad(expected, leaves, dout.double())):
        close(got, wanted)
    with pytest.raises(ValueError, match="rng_state must be given"):
        interface._flash_attn_backward(dout, q, k, v, out, lse, *into, *flat, False)
    with pytest.raises(ValueError, match="return_softmax needs dropout_p"):
        interface._flash_attn_forward(q, k, v, 0.0, *flat[1:], True)


def test_dropout_is_repeatable_by_the_default_generator() -> None:
    q, k, v = draw("cpu", (1, 30, 2, 8), (1, 30, 2, 8), (1, 30, 2, 8))
    torch.manual_seed(3)
    first = fa.flash_attn_func(q, k, v, 0.5)
    second = fa.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(3)
    assert torch.equal(fa.flash_attn_func(q, k, v, 0.5), first) and not torch.equal(first, second)


# ---- packed ----------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_varlen_is_dense_sequence_by_sequence(device: str, variant: dict) -> None:
    lengths_q, lengths_k = (4, 0, 7), (6, 3, 7)
    q, k, v = draw(device, (11, 4, 16), (16, 2, 16), (16, 2, 16))
    ours, theirs = split(variant, 4, 3, device)
    bounds = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device)
              for n in (lengths_q, lengths_k)]  # fmt: skip
    longest = torch.tensor(7, device=device)  # as a tensor it is not read
    out = fa.flash_attn_varlen_func(q, k, v, *bounds, longest, longest, **ours)
    kv = fa.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *bounds, 7, 7, **ours)
    assert torch.equal(kv, out)
    slopes = theirs.pop("slopes")
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    for i, ((qi, ki, vi), got) in enumerate(zip(parts, out.split(lengths_q))):
        own = None if slopes is None else slopes[i : i + 1]
        expected, _, _ = by_definition(qi[None], ki[None], vi[None], slopes=own, **theirs)
        close(got, expected[0])


@on_devices
def test_varlen_pair(device: str) -> None:
    q, k, v, dout = draw(device, (11, 4, 16), (11, 2, 16), (11, 2, 16), (11, 4, 16))
    bounds = torch.tensor([0, 4, 11], dtype=torch.int32, device=device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = fa.flash_attn_varlen_func(*leaves, bounds, bounds, 7, 7, causal=True)
    grads = torch.autograd.grad(whole, leaves, dout)
    sizes = (bounds, bounds, 7, 7)
    out, lse, weights, _ = interface._flash_attn_varlen_forward(q, k, v, *sizes, 0.0, None, True)
    assert torch.equal(out, whole) and lse.shape == (4, 11) and weights.shape == (0,)
    into = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    flat = (0.0, None, True, -1, -1, 0.0, None)
    delta = interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, *into, *sizes, *flat, True)
    for got, wanted in zip(into, grads):
        close(got, wanted)
    expected = (dout.float() * out.float()).sum(-1).t()
    assert delta.shape == (4, 11 + 2 * 128)
    close(delta[:, :4], expected[:, :4])
    close(delta[:, 132:139], expected[:, 4:])
    qkv = torch.stack([k, k, v], 1)
    close(fa.flash_attn_varlen_qkvpacked_func(qkv, bounds, 7, causal=True),
          fa.flash_attn_varlen_func(k, k, v, bounds, bounds, 7, 7, causal=True))  # fmt: skip


def test_padding_and_back() -> None:
    x = torch.randn(3, 5, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert cu_seqlens.tolist() == [0, 2, 7, 7] and longest == 5 and used.tolist() == [2, 5, 0]
    back = bert_padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand_as(x).float())
    unused = torch.tensor([[0, 0, 1, 0, 0], [0] * 5, [0] * 5])
    _, _, cu_seqlens, _, used = bert_padding.unpad_input(x, mask, unused)
    assert cu_seqlens.tolist() == [0, 3, 8, 8] and used.tolist() == [2, 5, 0]


# ---- the pair, as ring implementations use it ------------------------------------------------------------


@on_devices
def test_pair_takes_merged_results(device: str) -> None:
    """A backward over half of the keys with the results over all of them: shares that add up."""
    q, k, v, dout = draw(device, (1, 6, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16), (1, 6, 2, 16))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected, _, _ = by_definition(*leaves)
    wanted = torch.autograd.grad(expected, leaves, dout.double())
    flat = (0.0, None, False, -1, -1, 0.0, None)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, *flat, False)
    assert not out.requires_grad
    dq_sum, parts = torch.zeros_like(q, dtype=torch.float32), []
    for half in (slice(0, 4), slice(4, 8)):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k[:, half]), torch.empty_like(v[:, half])
        delta = interface._flash_attn_backward(
            dout, q, k[:, half], v[:, half], out, lse, dq, dk, dv, *flat, False
        )
        dq_sum += dq
        parts.append((dk, dv))
    close(dq_sum, wanted[0])
    close(torch.cat([dk for dk, _ in parts], 1), wanted[1])
    close(torch.cat([dv for _, dv in parts], 1), wanted[2])
    assert delta.shape == (1, 2, 128)
    close(delta[..., :6], (dout.double() * out.double()).sum(-1).transpose(1, 2))


# ---- cache -----------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("seqlen_new", [0, 1, 3])
def test_kvcache(device: str, variant: dict, seqlen_new: int) -> None:
    batch, size, seqlen_q = 3, 12, 2
    q, k_cache, v_cache, k, v = draw(device, (batch, seqlen_q, 4, 16), *((5, size, 2, 16),) * 2,
                                     *((batch, seqlen_new, 2, 16),) * 2)  # fmt: skip
    lengths, entries = (0, 4, 9), (4, 0, 2)
    ours, theirs = split(variant, 4, batch, device)
    slopes = theirs.pop("slopes")
    before = k_cache.clone(), v_cache.clone()
    appended = {"k": k, "v": v} if seqlen_new else {}
    out, lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, **appended, return_softmax_lse=True,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        cache_batch_idx=torch.tensor(entries, dtype=torch.int32, device=device), **ours,
    )  # fmt: skip
    for i, (length, entry) in enumerate(zip(lengths, entries)):
        for old, new in ((before[0], k), (before[1], v)):
            old[entry, length : length + seqlen_new] = new[i]
        end = length + seqlen_new
        own = None if slopes is None else slopes[i : i + 1]
        expected, expected_lse, _ = by_definition(
            q[i : i + 1], before[0][entry, None, :end], before[1][entry, None, :end], slopes=own, **theirs
        )
        close(out[i], expected[0])
        close(lse[i], expected_lse[0])
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@on_devices
def test_kvcache_whole_and_with_left_padding(device: str) -> None:
    q, k, v = draw(device, (2, 1, 2, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    close(fa.flash_attn_with_kvcache(q, k, v), by_definition(q, k, v)[0])
    close(fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=5), by_definition(q, k[:, :5], v[:, :5])[0])
    pad = torch.tensor([2, 0], dtype=torch.int32, device=device)
    out = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=6, cache_leftpad=pad)
    for i, start in enumerate((2, 0)):
        close(out[i], by_definition(q[i : i + 1], k[i : i + 1, start:6], v[i : i + 1, start:6])[0][0])


@on_devices
def test_kvcache_with_room_between_entries(device: str) -> None:
    """Rows that are no run of one packed tensor give what a copy of them gives."""
    q, k, v = draw(device, (2, 2, 4, 16), *((3, 12, 2, 16),) * 2)
    lengths = torch.tensor([3, 8], dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    found = fa.flash_attn_with_kvcache(q, k[:, :9], v[:, :9], **options)
    wanted = fa.flash_attn_with_kvcache(q, k[:, :9].contiguous(), v[:, :9].contiguous(), **options)
    for a, b in zip(found, wanted):
        close(a, b)


# ---- refusals --------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("softcap", [0.0, 3.0])  # the second road copies entries
def test_kvcache_stays_inside_the_cache(softcap: float, device: str) -> None:
    """Whatever lengths and entries say: an index outside ends the process on a GPU, or shows another's."""
    q, k, v = draw(device, (4, 1, 2, 16), (4, 3, 2, 16), (4, 3, 2, 16))
    caches = draw(device, (4, 9, 2, 16), (4, 9, 2, 16))
    before = [cache.clone() for cache in caches]
    lengths = torch.tensor([2, 7, 9, -4], dtype=torch.int32, device=device)
    fa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, softcap=softcap)
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        old[0, 2:5], old[1, 7:], old[3, :3] = new[0], new[1, :2], new[3]
        assert torch.equal(cache, old)

    at_3 = torch.tensor([4, 3, -1, 2**31 - 1], dtype=torch.int32, device=device)  # one of four is there
    lengths = torch.tensor([0, 0, 5, 9], dtype=torch.int32, device=device)
    call = {"cache_seqlens": lengths, "cache_batch_idx": at_3, "softcap": softcap}
    out, lse = fa.flash_attn_with_kvcache(q, *caches, k, v, return_softmax_lse=True, **call)
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        old[3, :3] = new[1]
        assert torch.equal(cache, old)
    others = [0, 2, 3]
    assert (out[others] == 0).all() and (lse[others] == -torch.inf).all()
    close(out[1:2], by_definition(q[1:2], k[1:2], v[1:2], softcap=softcap)[0])
    nobody = torch.full_like(at_3, 4)
    fa.flash_attn_with_kvcache(q, *caches, k, v, **call | {"cache_batch_idx": nobody})
    assert torch.equal(caches[0], before[0]) and torch.equal(caches[1], before[1])
    whole = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=1000, softcap=softcap)
    assert torch.equal(whole, fa.flash_attn_with_kvcache(q, *caches, softcap=softcap))


def test_kvcache_refuses_in_words() -> None:
    q, k = draw("cpu", (1, 1, 1, 8), (1, 4, 1, 8))
    with pytest.raises(NotImplementedError, match="num_splits must be 0 or 1"):
        fa.flash_attn_with_kvcache(q, k, k, num_splits=3)
    zero = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="page_table and cache_batch_idx must not be given together"):
        fa.flash_attn_with_kvcache(q, k, k, block_table=zero[None], cache_batch_idx=zero)


def test_arrays_are_refused_in_words() -> None:
    x = torch.zeros(1, 4, 2, 8)
    array, cu = x.numpy(), torch.tensor([0, 4], dtype=torch.int32)
    calls = {
        "q": lambda: fa.flash_attn_func(array, array, array),
        "k": lambda: fa.flash_attn_func(x, array, array, return_attn_probs=True),
        "v": lambda: fa.flash_attn_varlen_func(x[0], x[0], array[0], cu, cu, 4, 4),
        "kv": lambda: fa.flash_attn_kvpacked_func(x, x[:, :, None].expand(-1, -1, 2, -1, -1).numpy()),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got ndarray.*torch.from_numpy"):
            call()
    with pytest.raises(TypeError, match="^q must be a torch.Tensor, got ndarray.*torch.from_numpy"):
        fa.flash_attn_func(array, array, array, return_attn_probs=True)


def test_refusals() -> None:
    q, k = draw("cpu", (1, 1, 1, 8), (1, 4, 1, 8))
    with pytest.raises(ValueError, match="k, v and cache_seqlens must be given together"):
        fa.flash_attn_with_kvcache(q, k, k, q, q)
    for given in ({"k": q, "v": q, "rotary_cos": q}, {"rotary_cos": q, "rotary_sin": q}):
        with pytest.raises(ValueError, match="rotary_cos, rotary_sin and k must be given together"):
            fa.flash_attn_with_kvcache(q, k, k, cache_seqlens=1, **given)
    for given, error, message in (
        ({"cache_seqlens": torch.tensor([1.0])}, TypeError, "cache_seqlens must be torch.int32"),
        ({"cache_seqlens": torch.zeros(2).int()}, ValueError, r"shape \(batch,\) = \(1,\), got \(2,\)"),
        ({"cache_batch_idx": torch.tensor([True])}, TypeError, "cache_batch_idx must be torch.int32"),
        ({"q": q.repeat(2, 1, 1, 1)}, ValueError, "an entry for each of the 2 sequences, got 1"),
        ({"k": q, "v": q, "cache_seqlens": 1, "rotary_cos": q[0, 0], "rotary_sin": q[0, 0]}, ValueError,
         "rotary_cos must have a row for each of 4 positions, got 1"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            fa.flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": k} | given)
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    arguments = (q[0], q[0], q[0], bounds, bounds, 1, 1)
    with pytest.raises(ValueError, match="k must have shape .* with block_table"):
        fa.flash_attn_varlen_func(*arguments, block_table=bounds[None])
    with pytest.raises(NotImplementedError, match="attention over a cache has no gradient"):
        fa.flash_attn_varlen_func(q[0].clone().requires_grad_(), *arguments[1:], block_table=bounds[None])
    with pytest.raises(NotImplementedError, match="dropout_p is not served over a cache"):
        fa.flash_attn_varlen_func(*arguments, 0.5, block_table=bounds[None])
    with pytest.raises(NotImplementedError, match="leftpad_k is not supported"):
        interface._flash_attn_varlen_forward(*arguments, 0.0, None, False, leftpad_k=bounds)
    used = interface._flash_attn_varlen_forward(*arguments, 0.0, None, False, seqused_k=bounds[:1])
    assert (used[0] == 0).all()
