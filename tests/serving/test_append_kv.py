"""append_kv: what lands in the cache, bit by bit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext.serving import Rotary, append_kv
from tests.covering import pairs_on_cpu
from tests.graphs import capture
from tests.qkv import null_kernels, on_devices

DTYPES = [torch.float16, torch.bfloat16]


def caches(shape: tuple[int, ...], dims: tuple[int, int], layout: str, **like) -> tuple[Tensor, Tensor]:
    pages, size, heads = shape
    if layout == "apart":
        return tuple(torch.randn(*shape, d, device=like["device"]).to(like["dtype"]) for d in dims)
    whole = torch.randn(pages, heads, size, sum(dims), device=like["device"]).to(like["dtype"])
    return whole.transpose(1, 2).split(dims, -1)


def by_definition(k: Tensor, r: Rotary) -> Tensor:
    """Keys turned in float32, products and sums rounded one by one."""
    half = r.cos.shape[1]
    c, s = (t.float()[r.positions.long()][:, None] for t in (r.cos, r.sin))
    first, rest = k.float()[..., : 2 * half], k[..., 2 * half :]
    pairs = first.unflatten(-1, (half, 2) if r.interleaved else (2, half))
    a, b = pairs.unbind(-1 if r.interleaved else -2)
    turned = torch.stack((a * c - b * s, a * s + b * c), -1 if r.interleaved else -2).flatten(-2)
    return torch.cat([turned.to(k.dtype), rest], -1)


@pairs_on_cpu(dims=[(64, 64), (128, 96), (37, 20), (256, 256)], layout=["apart", "heads first"], dtype=DTYPES)
def test_values_land_in_their_slots_and_nowhere_else(
    dims: tuple[int, int], layout: str, dtype: torch.dtype, device: str
) -> None:
    k_cache, v_cache = caches((5, 12, 3), dims, layout, dtype=dtype, device=device)
    before = k_cache.clone(), v_cache.clone()
    k, v = (torch.randn(3, 7, d, device=device).to(dtype).transpose(0, 1) for d in dims)  # heads outside
    slots = torch.tensor([0, 59, -1, 12, 11, -1, 30], device=device)
    for index in (slots, slots.int()):
        append_kv(k, v, k_cache, v_cache, index)
        for cache, old, new in zip((k_cache, v_cache), before, (k, v), strict=True):
            wanted = old.clone()
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    wanted[slot // 12, slot % 12] = new[token]
            assert torch.equal(cache, wanted)
            cache.copy_(old)


@pairs_on_cpu(dtype=DTYPES, factors=[torch.float32, None], rotary_dim=[8, 20, 64], interleaved=[True, False])
def test_keys_are_turned_as_torch_does(
    dtype: torch.dtype, factors: torch.dtype | None, rotary_dim: int, interleaved: bool, device: str
) -> None:
    k_cache, v_cache = caches((4, 16, 2), (64, 64), "heads first", dtype=dtype, device=device)
    k, v = torch.randn(2, 50, 2, 64, device=device).to(dtype)
    angles = torch.rand(100, rotary_dim // 2, device=device) * 6.28
    cos, sin = (x.to(factors or dtype) for x in (angles.cos(), angles.sin()))
    positions = torch.randint(0, 100, (50,), device=device)
    slots = torch.randperm(64, device=device)[:50]
    for at in (positions, positions.int()):
        rotary = Rotary(cos, sin, at, interleaved)
        append_kv(k, v, k_cache, v_cache, slots, rotary)
        assert torch.equal(k_cache[slots // 16, slots % 16], by_definition(k, rotary))
        assert torch.equal(v_cache[slots // 16, slots % 16], v)


@pytest.mark.gpu
def test_gpu_slots_outside_are_left_out() -> None:
    k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.ones(2, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    append_kv(k, v, k_cache, v_cache, torch.tensor([64, -5, 2**40, 3], device="cuda"))
    assert k_cache.float().sum().item() == v_cache.float().sum().item() == 128
    assert (k_cache[0, 3] == 1).all()


@pytest.mark.gpu
def test_gpu_a_graph_follows_slots() -> None:
    k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 64, device="cuda").bfloat16()
    slots = torch.tensor([0, -1], device="cuda")
    graph, _ = capture(lambda: append_kv(k, v, k_cache, v_cache, slots))
    slots.copy_(torch.tensor([20, 21]))
    graph.replay()
    assert torch.equal(k_cache[1, 4:6], k) and torch.equal(v_cache[1, 4:6], v)


def test_what_is_refused() -> None:
    k, v = torch.randn(2, 3, 2, 64)
    k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64)
    slots, cos = torch.arange(3), torch.ones(9, 40)
    whole = {"k_new": k, "v_new": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}

    def refuses(error: type[Exception], words: str, **changed: Any) -> None:
        with pytest.raises(error, match=words):
            append_kv(**(whole | changed))

    for wrong in (-2, 64):
        words = f"slot_mapping must hold slots from 0 to 63, or -1 .* got {wrong}"
        refuses(ValueError, words, slot_mapping=torch.tensor([0, wrong, 1]))
    expanded = k_cache[:1].expand(4, -1, -1, -1)
    refuses(ValueError, "k_cache must not be expanded to be written", k_cache=expanded)
    refuses(ValueError, "k_cache and v_cache must have the same pages", v_cache=v_cache[:2])
    refuses(ValueError, r"must have shape \(tokens,\), here \(3,\)", slot_mapping=slots[:2])
    refuses(TypeError, "slot_mapping must be torch.int32 or torch.int64", slot_mapping=slots.float())
    refuses(TypeError, "v_cache must have the dtype of k_new", v_cache=v_cache.half())
    refuses(ValueError, "v_new must have the 2 heads of k_new, got 1", v_new=v[:, :1])
    learns = k.clone().requires_grad_()
    refuses(NotImplementedError, "k_new requires a gradient, and append_kv has none", k_new=learns)
    refuses(TypeError, "k_new must be a torch.Tensor, got list", k_new=[1])
    refuses(ValueError, "cos and sin turn 80 features, but k_new has 64", rotary=Rotary(cos, cos, slots))
    refuses(ValueError, "sin must have shape", rotary=Rotary(cos[:, :8], cos[:, :4], slots))
    refuses(TypeError, "k_descale must be a torch.Tensor or None, got", k_descale=1.0)
    refuses(TypeError, "v_descale must be a torch.Tensor or None, got", v_descale=[1.0])
    positions: Any = [0, 1, 2]
    refuses(TypeError, "positions must be a torch.Tensor, got list", rotary=Rotary(cos, cos, positions))
    assert not k_cache.any() and not v_cache.any()


def test_it_is_traced_and_counted() -> None:
    k, v = torch.randn(2, 3, 2, 64)
    k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64)
    slots = torch.arange(3)
    with flash_ext.count() as counts:
        append_kv(k, v, k_cache, v_cache, slots)
    assert counts.calls["append_kv"] == 1

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(k: Tensor, v: Tensor) -> Tensor:
        append_kv(k * 2, v, k_cache, v_cache, slots + 4)
        return k_cache.sum()

    step(k, v)
    assert torch.equal(k_cache[0, 4:7], 2 * k) and torch.equal(v_cache[0, 4:7], v)
    args = (k, v, k_cache, v_cache, slots, None, None, None, True)
    torch.library.opcheck(torch.ops.flash_ext.append_kv.default, args)


@on_devices
def test_it_is_noticed_as_a_change_in_place(device: str) -> None:
    k, v = torch.randn(2, 3, 2, 64, device=device).half()
    k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64, device=device).half()
    before = k_cache._version, v_cache._version
    append_kv(k, v, k_cache, v_cache, torch.arange(3, device=device))
    assert k_cache._version > before[0] and v_cache._version > before[1]
    before = k_cache._version, v_cache._version
    with null_kernels():
        append_kv(k, v, k_cache, v_cache, torch.arange(3, device=device))
    assert k_cache._version > before[0] and v_cache._version > before[1]


@on_devices
def test_derivatives_of_factors_and_tangents_are_refused(device: str) -> None:
    k, v = torch.randn(2, 3, 2, 64, device=device).half()
    k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64, device=device).half()
    slots, cos = torch.arange(3, device=device), torch.ones(9, 8, device=device)
    with pytest.raises(NotImplementedError, match="cos requires a gradient"):
        rotary = Rotary(cos.clone().requires_grad_(), cos, slots)
        append_kv(k, v, k_cache, v_cache, slots, rotary)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        dual = torch.autograd.forward_ad.make_dual(k, k)
        append_kv(dual, v, k_cache, v_cache, slots)
