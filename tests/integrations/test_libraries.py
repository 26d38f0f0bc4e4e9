"""timm and diffusers, whose models call ``F.scaled_dot_product_attention``, on our kernels by enable_sdpa.

What chooses torch's operators needs a GPU. Without one, a mode makes the choice that torch makes there, and
the operators are registered for CPU tensors: so every attention call of these libraries, with its strides,
keywords and masks, reaches the implementations that serve it on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import flash_ext
from tests.integrations.test_sdpa_override import (
    GROUPED,
    GROUPED_BACKWARD,
    MASKED,
    MASKED_BACKWARD,
    SDPA,
    SDPA_BACKWARD,
    on_cpu,
)
from tests.qkv import on_devices, sdpa_counts

aten = torch.ops.aten
BACKWARD_OF = {SDPA: SDPA_BACKWARD, MASKED: MASKED_BACKWARD, GROUPED: GROUPED_BACKWARD}


class ChosenAsOnAGpu(TorchFunctionMode):
    """F.scaled_dot_product_attention by the operator that torch's selector gives a call on Hopper."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        call = choose if function is F.scaled_dot_product_attention else function
        return call(*args, **(kwargs or {}))


def choose(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    grouped, rows, keys = query.shape[1] != key.shape[1], query.shape[2], key.shape[2]
    assert dropout_p == 0 and (enable_gqa or not grouped)
    plain = attn_mask is None and value.shape[-1] == query.shape[-1] and (rows == keys or not is_causal)
    if plain:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = -65504.0 if grouped else -torch.inf
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, hidden)
    options = {"is_causal": is_causal, "scale": scale}
    if grouped:
        return aten._scaled_dot_product_cudnn_attention(query, key, value, attn_mask, True, **options)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:2], rows, keys)
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, **options)[0]


@contextlib.contextmanager
def taken_over(device: str) -> Iterator[None]:
    if device == "cuda":
        with flash_ext.enable_sdpa():
            yield
    else:
        with on_cpu(), ChosenAsOnAGpu():
            yield


def library(name: str, *needed: str) -> Any:
    """The module, or a skip that says why not: beside another torch than its own it may raise anything."""
    try:
        module = importlib.import_module(name)
        for part in needed:  # which the module may import by now only
            getattr(module, part)
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {str(error)[:80]}")
    return module


def outcome(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor]:
    """The result and the gradients of all weights."""
    model.zero_grad()
    out = run(model)
    out.float().square().mean().backward()
    grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
    return out.detach().float(), torch.cat([g.flatten() for g in grads])


def of_torch(model: nn.Module, run: Callable[[nn.Module], Tensor], *choices: list[SDPBackend]) -> tuple:
    """The same by torch's own attention, by the first of ``choices`` whose numbers are numbers."""
    before = sdpa_counts()
    for backends in choices:
        with sdpa_kernel(backends):
            found = outcome(model, run)
        if all(t.isfinite().all() for t in found):
            break
    else:
        raise AssertionError(f"torch's own attention gives NaN by each of {choices}")
    assert sdpa_counts() == before, "torch's own attention was ours"
    return found


UNFUSED = [SDPBackend.MATH]
# Without cuDNN, which torch 2.11 asks first on an H200: gradients of a transformer below were NaN there.
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def compare(
    model: nn.Module, device: str, calls: dict[str, int], run: Callable[[nn.Module], Tensor],
    prepare: Callable[[nn.Module], object] = lambda given: None,
) -> None:  # fmt: skip
    """Results and gradients are as near to those in float32 as with torch's attention; ``calls`` are served.

    Beside a newer library there may be more calls, but never other ones, nor any that go back. ``prepare``
    changes the model in bfloat16, for both attentions, into one that need not run in float32.
    """
    torch.manual_seed(1)
    with torch.no_grad():  # some layers start as zeros and would hide
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    truth = model.to(device).eval()
    given = copy.deepcopy(truth).to(torch.bfloat16)
    prepare(given)
    right = of_torch(truth, run, UNFUSED)
    theirs = of_torch(given, run, FUSED, UNFUSED)
    before = sdpa_counts()
    with taken_over(device):
        ours = outcome(given, run)
    after = sdpa_counts()
    assert all(after[name][1] == before[name][1] for name in after), "a call went back"
    served = {name: after[name][0] - before[name][0] for name in after if after[name] != before[name]}
    wanted = {**calls, **{BACKWARD_OF[name]: n for name, n in calls.items()}}
    assert served.keys() == wanted.keys() and all(served[name] >= wanted[name] for name in wanted), served
    for exact, by_torch, found in zip(right, theirs, ours, strict=True):
        error, allowed = (found - exact).norm(), (by_torch - exact).norm()
        limit = 1.5 * allowed + 1e-3 * exact.norm()
        assert error <= limit, f"error {error:.3g}, of torch's own attention {allowed:.3g}"


def draw(*shape: int, like: nn.Module) -> Tensor:
    """The same numbers for every type."""
    parameter = next(like.parameters())
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16().to(parameter.device, parameter.dtype)


# ---- timm ------------------------------------------------------------------------------------------------


class AsInTimm(nn.Module):
    """The attention call of timm 1.0's layers: slices of one projection, exchanged by permute."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        batch, rows, width = x.shape
        split = self.qkv(x).reshape(batch, rows, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=0.0, is_causal=is_causal)
        return self.proj(out.transpose(1, 2).reshape(batch, rows, width))


@on_devices
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_the_attention_call_of_timm(kind: str, device: str) -> None:
    model = AsInTimm(64, 4)
    options: dict[str, Any] = {"is_causal": True} if kind == "causal" else {}
    if kind == "mask":
        options["attn_mask"] = (torch.arange(17) < torch.tensor([[17], [9]])).to(device)[:, None, None]
    compare(model, device, {MASKED if kind == "mask" else SDPA: 1},
            lambda m: m(draw(2, 17, 64, like=m), **options))  # fmt: skip


@on_devices
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_timm(name: str, device: str) -> None:
    timm = library("timm")
    model = timm.create_model(
        name, img_size=32, patch_size=8, depth=2, embed_dim=64, num_heads=4, num_classes=3
    )
    compare(model, device, {SDPA: 2}, lambda m: m(draw(2, 3, 32, 32, like=m)))


# ---- diffusers -------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("masked", [False, True])
def test_diffusers_unet(masked: bool, device: str) -> None:
    """Self- and cross-attention of an image model; the mask hides words."""
    diffusers = library("diffusers", "UNet2DConditionModel")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), norm_num_groups=8, cross_attention_dim=32,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    words = (torch.arange(11) < torch.tensor([[11], [7]])).to(device) if masked else None

    def run(m: nn.Module) -> Tensor:
        image, text = draw(2, 4, 8, 8, like=m), draw(2, 11, 32, like=m)
        return m(image, torch.tensor([3], device=device), text, encoder_attention_mask=words).sample

    layers = 4  # one on the way down, one in the middle, two on the way up
    calls = {SDPA: layers, MASKED: layers} if masked else {SDPA: 2 * layers}
    compare(model, device, calls, run)


@on_devices
@pytest.mark.parametrize("backend", ["native", "_native_flash"])
def test_diffusers_backends(backend: str, device: str) -> None:
    """A transformer that asks the library's dispatcher for its attention."""
    diffusers = library("diffusers", "FluxTransformer2DModel")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    model.set_attention_backend("native")  # which float32 has as well

    def run(m: nn.Module) -> Tensor:
        places = torch.stack([torch.arange(16), torch.arange(16) // 4, torch.arange(16) % 4], -1).to(device)
        return m(
            hidden_states=draw(2, 16, 4, like=m), encoder_hidden_states=draw(2, 5, 32, like=m),
            pooled_projections=draw(2, 32, like=m), timestep=torch.tensor([0.5, 0.5], device=device),
            img_ids=places, txt_ids=torch.zeros(5, 3, device=device),
        ).sample  # fmt: skip

    compare(model, device, {SDPA: 2}, run, lambda given: given.set_attention_backend(backend))
