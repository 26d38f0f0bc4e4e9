"""Every option of the public functions once: what the caller writes, and what it means to the oracle.

The meaning is written out by hand in the oracle's terms, not derived from the package's own normalisation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flash_ext
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.reference import attention_reference, row_max_reference

HEADS, HEADS_K, HEAD_DIM = 4, 2, 4
ROWS, KEYS = 20, 27  # dense lengths, and those of the longest packed sequence
LENGTHS_Q, LENGTHS_K, SPARE = (ROWS, 0, 7), (KEYS, 5, 9), 2
BLOCK = 16
REACH = 5
DIFFERENTIABLE = ("attn_mask", "bias", "alibi_slopes", "sinks")


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        keywords: what the public function is called with.
        meaning: fields of ``Modifiers``; masks of two options are ANDed.
    """

    keywords: dict[str, Any]
    meaning: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call in float64; ``cu`` is empty or (cu_seqlens_q, cu_seqlens_k)."""

    qkv: tuple[Tensor, ...]
    cu: tuple[Tensor, ...]

    @property
    def packed(self) -> bool:
        return bool(self.cu)


def make_inputs(packed: bool, dtype: torch.dtype = torch.float64) -> Inputs:
    lead_q, lead_k = ((sum(lengths) + SPARE,) for lengths in (LENGTHS_Q, LENGTHS_K))
    if not packed:
        lead_q, lead_k = (2, ROWS), (2, KEYS)
    shapes = ((*lead_q, HEADS, HEAD_DIM), (*lead_k, HEADS_K, HEAD_DIM), (*lead_k, HEADS_K, HEAD_DIM))
    qkv = tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    cu = tuple(torch.tensor((0, *lengths)).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_K))
    return Inputs(qkv, cu if packed else ())


def make_options(inputs: Inputs) -> dict[str, Option]:
    """All options of :func:`flash_ext.attention` or, for packed input, :func:`flash_ext.attention_varlen`."""
    packed, q, k, _ = inputs.packed, *inputs.qkv
    batch = 3 if packed else 2
    lead_q, lead_k = q.shape[:-2], k.shape[:-2]
    real = functools.partial(torch.randn, dtype=torch.float64, requires_grad=True)

    mask = torch.rand(batch, 1, ROWS, KEYS) > 0.3
    bias, slopes, sinks = real(HEADS, ROWS, 1), real(batch, HEADS), real(HEADS)
    table = real(HEADS, 2 * REACH + 1)
    present = torch.rand(lead_k) > 0.3
    padding = torch.zeros(batch, 1, 1, KEYS, dtype=torch.bool)
    for b in range(batch):
        own = present[inputs.cu[1][b] : inputs.cu[1][b + 1]] if packed else present[b]
        padding[b, 0, 0, : len(own)] = own
    ids_q, ids_k = torch.randint(-1, 2, lead_q).int(), torch.randint(-1, 2, lead_k).int()
    documents = {"document_q": ids_q, "document_k": ids_k}
    prefixes = torch.tensor([5, 0, -3][:batch]).int()
    rows, keys = lead_q[-1], lead_k[-1]
    hidden_rows = torch.tensor([[2, 9]]).int().repeat(keys, 1)
    hidden_rows[1::3] = 0
    hidden_keys = torch.randint(0, KEYS, (HEADS, rows, 4)).int()
    leading = (slice(None),) if packed else (None, slice(None))
    whole = torch.rand(batch, HEADS, 2, 2) > 0.3
    cut = torch.rand(HEADS, ROWS, KEYS) > 0.4
    cut[0, :16, :16] = False
    cut_blocks = flash_ext.BlockMask.from_dense(cut, BLOCK)
    sizes = {"block_rows": BLOCK, "block_cols": BLOCK}
    hints = {"hints": Option({"max_seqlen_q": ROWS, "max_seqlen_k": KEYS + 1})} if packed else {}
    return hints | {
        "causal": Option({"causal": True}),
        "top left": Option({"causal": "top_left"}, {"top_left": True}),
        "bottom right": Option({"causal": "bottom_right"}),
        "window": Option({"window": (3, 2)}),
        "scale": Option({"softmax_scale": -0.3}),
        "bool mask": Option({"attn_mask": mask}, {"mask": mask}),
        "bias": Option({"attn_mask": bias}, {"bias": bias[None]}),
        "relative position": Option({"bias": flash_ext.RelativePosition(table, bucketing="clip")},
                                    {"bias": table[None]}),
        "padding": Option({"key_padding_mask": present}, {"mask": padding}),
        "alibi": Option({"alibi_slopes": slopes}, {"slopes": slopes}),
        "sinks": Option({"sinks": sinks}, {"sinks": sinks}),
        "softcap": Option({"softcap": 0.7}, {"softcap": 0.7}),
        "dropout": Option({"dropout_p": 0.4}, {"dropout_p": 0.4}),
        "generator": Option({"generator": torch.Generator()}),
        "documents": Option({"document_ids": (ids_q, ids_k)}, documents),
        "prefix": Option({"prefix_lens": prefixes}, {"prefix_lens": prefixes}),
        "sink tokens": Option({"sink_tokens": 2}, {"sink_tokens": 2}),
        "chunks": Option({"chunk_size": 6}, {"chunk": 6}),
        "hidden rows": Option({"hidden_rows": hidden_rows},
                              {"hidden_rows": hidden_rows[None] if packed else hidden_rows[None, None]}),
        "hidden keys": Option({"hidden_keys": hidden_keys}, {"hidden_keys": hidden_keys[leading]}),
        "blocks": Option({"block_mask": flash_ext.BlockMask(whole, BLOCK)}, {"blocks": whole, **sizes}),
        "cut blocks": Option({"block_mask": cut_blocks},
                             {"blocks": cut_blocks.blocks, "mask": cut[None], **sizes}),
        "lse": Option({"return_lse": True}),
        "row maxima": Option({"return_max_logits": True}),
        "head maxima": Option({"return_max_logits": "head"}),
        "deterministic": Option({"deterministic": True}),
        "path": Option({"path": "cpu"}),
    }  # fmt: skip


def exclude_each_other(a: Option, b: Option) -> bool:
    """Whether the two are values of one keyword, or two biases."""
    return bool(a.keywords.keys() & b.keywords.keys()) or "bias" in a.meaning.keys() & b.meaning.keys()


def combined(*options: Option) -> Option:
    keywords: dict[str, Any] = {}
    meaning: dict[str, Any] = {}
    for option in options:
        for name, value in option.meaning.items():
            if name == "mask" and name in meaning:
                value = value & meaning[name]
            meaning[name] = value
        keywords |= option.keywords
    return Option(keywords, meaning)


def call(inputs: Inputs, keywords: dict[str, Any]) -> tuple[Tensor, ...]:
    """Everything that the public function returns; dropout draws from a freshly seeded generator."""
    seed_generators(keywords)
    function = flash_ext.attention_varlen if inputs.packed else flash_ext.attention
    results = function(*inputs.qkv, *inputs.cu, **keywords)
    return results if isinstance(results, tuple) else (results,)


def expected(inputs: Inputs, option: Option) -> tuple[Tensor, ...]:
    """What the oracle says to the same call."""
    keywords = option.keywords
    meaning = dict(option.meaning)
    if "dropout_p" in keywords:
        seed_generators(keywords)
        meaning["rng"] = flash_ext.dropout_rng("cpu", keywords.get("generator"))
    left, right = keywords.get("window", (-1, -1))
    scale = keywords.get("softmax_scale", default_scale(HEAD_DIM))
    spec = AttnSpec(scale, left, 0 if keywords.get("causal") else right)
    mods = Modifiers(**meaning)
    out, lse = attention_reference(*inputs.qkv, spec, *inputs.cu, mods=mods)
    results = [out]
    if keywords.get("return_lse"):
        results.append(lse)
    if keywords.get("return_max_logits"):
        row_max = row_max_reference(*inputs.qkv, spec, *inputs.cu, mods=mods)
        by_head = row_max.transpose(0, -2).flatten(1).amax(1)
        results.append(by_head if keywords["return_max_logits"] == "head" else row_max)
    return tuple(results)


def seed_generators(keywords: dict[str, Any]) -> None:
    torch.manual_seed(5)
    if "generator" in keywords:
        keywords["generator"].manual_seed(7)


def differentiable(keywords: dict[str, Any]) -> dict[str, Tensor]:
    """The floating tensors among the values of keywords; of a relative-position bias its table."""
    given = {name: keywords[name] for name in DIFFERENTIABLE if keywords.get(name) is not None}
    tensors = {name: value.table if name == "bias" else value for name, value in given.items()}
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


def with_tensors(keywords: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The keywords with other tensors in the places that :func:`differentiable` names."""
    if "bias" in tensors:
        tensors = tensors | {"bias": flash_ext.RelativePosition(tensors["bias"], bucketing="clip")}
    return keywords | tensors


def leaves_of(inputs: Inputs, keywords: dict[str, Any]) -> list[Tensor]:
    """Everything that asks for a gradient."""
    return [*inputs.qkv, *differentiable(keywords).values()]


def gradients(results: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a loss that looks at every result with a gradient, finite entries only."""
    loss = sum(t.where(t.isfinite(), 0).sin().sum() for t in results if t.requires_grad)
    return torch.autograd.grad(loss, leaves)
