"""Every float tensor that a public function takes gets a gradient: one at a time, the others as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import flash_ext
from flash_ext import AuxRequest, masks
from flash_ext.compat import flash_attn as fa
from flash_ext.distributed import ring_attention, shard_sequence, ulysses_attention
from flash_ext.integrations import transformers as hf

BATCH, ROWS, HEADS, HEADS_K, HEAD_DIM = 2, 6, 4, 2, 8


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def qkv(heads_k: int = HEADS_K) -> dict[str, Tensor]:
    return {name: draw(BATCH, ROWS, heads, HEAD_DIM) for name, heads in zip("qkv", (HEADS, heads_k, heads_k))}


def heads_first() -> dict[str, Tensor]:
    names = ("query", "key", "value")
    return {name: t.transpose(1, 2) for name, t in zip(names, qkv(HEADS).values())}


def modified() -> dict[str, Tensor]:
    return {"bias": draw(ROWS, ROWS), "slopes": draw(HEADS).abs(), "sinks": draw(HEADS)}


def with_slopes(function: Callable) -> Callable:
    """With the slopes of an ALiBi, as a tensor, beside the bias."""

    def call(bias: Tensor, slopes: Tensor, **given: Any) -> Any:
        return function(bias=masks.DenseBias(bias) + masks.ALiBi(slopes), **given)

    return call


def by_distance(function: Callable) -> Callable:
    """With a table, as a tensor, for the argument ``bias``."""

    def call(table: Tensor, **given: Any) -> Any:
        return function(bias=masks.RelativePosition(table, bucketing="clip"), **given)

    return call


def states() -> dict[str, Tensor]:
    outs, lses = [draw(BATCH, ROWS, HEADS, HEAD_DIM) for _ in "ab"], [draw(BATCH, HEADS, ROWS) for _ in "ab"]
    return {"out_a": outs[0], "lse_a": lses[0], "out_b": outs[1], "lse_b": lses[1]}


def of_the_library(**given: Any) -> Tensor:
    return hf.attention_forward(torch.nn.Module(), softcap=2.0, **given)[0]


def layer(**given: Any) -> tuple[Tensor, ...]:
    module = flash_ext.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    return module.requires_grad_(False)(**given)


def layer_inputs() -> dict[str, Tensor]:
    inputs = {name: draw(BATCH, ROWS, 16) for name in ("query", "key", "value")}
    return inputs | {"attn_mask": draw(ROWS, ROWS), "key_padding_mask": draw(BATCH, ROWS)}


BOUNDS = torch.tensor([0, 2, ROWS], dtype=torch.int32)
PACKED = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}
WITH_LSE = {"return_aux": AuxRequest(lse=True)}
CALLS: dict[str, tuple[Callable, dict[str, Tensor], dict[str, Any]]] = {
    "attention": (with_slopes(flash_ext.attention), qkv() | modified(), {"dropout_p": 0.2} | WITH_LSE),
    "attention, a bias tensor": (flash_ext.attention, qkv() | {"bias": draw(HEADS, 1, ROWS)}, {}),
    "forward": (with_slopes(flash_ext.forward), qkv() | modified(), {"softcap": 2.0}),
    "attention_varlen": (with_slopes(flash_ext.attention_varlen),
                         {n: t[0] for n, t in qkv().items()} | modified(), PACKED | {"causal": True}),
    "attention, by distance": (by_distance(flash_ext.attention), qkv() | {"table": draw(HEADS, 5)},
                               {"dropout_p": 0.2} | WITH_LSE),
    "forward, by distance": (by_distance(flash_ext.forward), qkv() | {"table": draw(1, 5)}, {}),
    "attention_varlen, by distance": (by_distance(flash_ext.attention_varlen),
                                      {n: t[0] for n, t in qkv().items()} | {"table": draw(HEADS, 5)},
                                      PACKED | {"causal": True}),
    "merge": (flash_ext.merge_attention_states, states(), {}),
    "sdpa": (flash_ext.scaled_dot_product_attention,
             heads_first() | {"attn_mask": draw(BATCH, 1, ROWS, ROWS)}, {"is_causal": True}),
    "flash_attn_func": (fa.flash_attn_func, qkv() | {"alibi_slopes": draw(BATCH, HEADS).abs()},
                        {"causal": True, "return_attn_probs": True, "dropout_p": 0.2}),
    "qkvpacked": (fa.flash_attn_qkvpacked_func, {"qkv": draw(BATCH, ROWS, 3, HEADS, HEAD_DIM)}, {}),
    "kvpacked": (fa.flash_attn_kvpacked_func, {"q": draw(BATCH, ROWS, HEADS, HEAD_DIM),
                                               "kv": draw(BATCH, ROWS, 2, HEADS_K, HEAD_DIM)}, {}),
    "ring": (ring_attention, qkv(), {"causal": True} | WITH_LSE),
    "ulysses": (ulysses_attention, qkv(), {"softcap": 2.0}),
    "shard": (shard_sequence, {"t": draw(BATCH, ROWS)}, {}),
    "transformers": (of_the_library,
                     heads_first() | {"attention_mask": draw(BATCH, 1, ROWS, ROWS), "s_aux": draw(HEADS),
                                      "position_bias": draw(1, HEADS, ROWS, ROWS)}, {}),
    "layer": (layer, layer_inputs(), {}),
    "layer, causal": (layer, layer_inputs(), {"is_causal": True, "need_weights": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_input_alone_gets_its_gradient(name: str) -> None:
    function, tensors, options = CALLS[name]
    for wanted in tensors:
        given = {key: t.detach().clone().requires_grad_(key == wanted) for key, t in tensors.items()}
        results = function(**given, **options)
        parts = [t for t in tree_leaves(results) if t is not None]
        loss = sum(t.where(t.isfinite(), 0.0).sin().sum() for t in parts if t.requires_grad)
        assert isinstance(loss, Tensor), f"{wanted} is dropped"
        (grad,) = torch.autograd.grad(loss, given[wanted])
        assert grad.shape == given[wanted].shape and grad.isfinite().all() and grad.any(), wanted
