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
from flash_ext import masks
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.reference import attention_reference, row_max_reference
from tests.values import call_keywords

HEADS, HEADS_K, HEAD_DIM = 4, 2, 4
ROWS, KEYS = 20, 27  # dense lengths, and those of the longest packed sequence
LENGTHS_Q, LENGTHS_K, SPARE = (ROWS, 0, 7), (KEYS, 5, 9), 2
BLOCK = 16
REACH = 5
DIFFERENTIABLE = ("bias", "position", "slopes", "sinks")
RESULTS_ONLY = ("generator", "return_aux", "layout")  # keywords that the functional pair does not have


@dataclass(frozen=True)
class Option:
    """One option, or several together.

    Attributes:
        others: keywords of the public function that are neither masks nor biases.
        parts: arguments of ``tests.values.call_keywords``.
        meaning: fields of ``Modifiers``; masks of two options are ANDed.
    """

    others: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    meaning: dict[str, Any] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, Any]:
        """What the public function is called with. A mask or a bias of one tensor is the tensor itself."""
        found = call_keywords(**self.parts) if self.parts else {}
        for name, kind in (("mask", masks.Dense), ("bias", masks.DenseBias)):
            if isinstance(found.get(name), kind):
                found[name] = found[name].tensor
        return found | self.others

    def tensors(self) -> dict[str, Tensor]:
        """Those that may have a gradient, by the names of DIFFERENTIABLE."""
        given = {name: t for name, t in (self.parts | self.others).items() if name in DIFFERENTIABLE}
        return {name: t.table if name == "position" else t for name, t in given.items()}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Option:
        """The same with others in the places that :meth:`tensors` names."""
        changed = {name: _clipped(t) if name == "position" else t for name, t in tensors.items()}
        others, parts = (
            given | {name: t for name, t in changed.items() if name in given}
            for given in (self.others, self.parts)
        )
        return Option(others, parts, self.meaning)

    @property
    def needs(self) -> tuple[str, ...]:
        """What :func:`flash_ext.backward` calls the gradients of :meth:`tensors`."""
        return tuple("bias" if name == "position" else name for name in self.tensors())


def _clipped(table: Tensor) -> masks.RelativePosition:
    return masks.RelativePosition(table, bucketing="clip")


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
    prefixes = torch.tensor([5, 0, -3][:batch]).int()
    rows, keys = lead_q[-1], lead_k[-1]
    hidden_rows = torch.tensor([[2, 9]]).int().repeat(keys, 1)
    hidden_rows[1::3] = 0
    hidden_keys = torch.randint(0, KEYS, (HEADS, rows, 4)).int()
    leading = (slice(None),) if packed else (None, slice(None))
    whole = torch.rand(batch, HEADS, 2, 2) > 0.3
    cut = torch.rand(HEADS, ROWS, KEYS) > 0.4
    cut[0, :16, :16] = False
    cut_blocks = masks.BlockMask.from_dense(cut, BLOCK)
    sizes = {"block_rows": BLOCK, "block_cols": BLOCK}
    if packed:
        layout = {"hints": Option({"max_seqlen_q": ROWS, "max_seqlen_k": KEYS + 1})}
    else:
        layout = {"heads first": Option({"layout": "bhsd"})}

    def part(name: str, value: Any, **meaning: Any) -> Option:
        return Option(parts={name: value}, meaning=meaning)

    return layout | {
        "causal": part("causal", True),
        "top left": Option(parts={"causal": True, "top_left": True}, meaning={"top_left": True}),
        "top left window": Option(parts={"window": (4, 1), "top_left": True}, meaning={"top_left": True}),
        "window": part("window", (3, 2)),
        "scale": Option({"scale": -0.3}),
        "mask": part("mask", mask, mask=mask),
        "bias": part("bias", bias, bias=bias[None]),
        "relative position": part("position", _clipped(table), bias=table[None]),
        "key mask": part("keys", present, mask=padding),
        "alibi": part("slopes", slopes, slopes=slopes),
        "sinks": Option({"sinks": sinks}, meaning={"sinks": sinks}),
        "softcap": Option({"softcap": 0.7}, meaning={"softcap": 0.7}),
        "dropout": Option({"dropout_p": 0.4}, meaning={"dropout_p": 0.4}),
        "generator": Option({"generator": torch.Generator()}),
        "documents": part("documents", (ids_q, ids_k), document_q=ids_q, document_k=ids_k),
        "prefix": part("prefix_lens", prefixes, prefix_lens=prefixes),
        "sink tokens": part("sink_tokens", 2, sink_tokens=2),
        "chunks": part("chunk", 6, chunk=6),
        "hidden rows": part("hidden_rows", hidden_rows,
                            hidden_rows=hidden_rows[None] if packed else hidden_rows[None, None]),
        "hidden keys": part("hidden_keys", hidden_keys, hidden_keys=hidden_keys[leading]),
        "blocks": part("blocks", masks.BlockMask(whole, BLOCK), blocks=whole, **sizes),
        "cut blocks": part("blocks", cut_blocks, blocks=cut_blocks.blocks, mask=cut[None], **sizes),
        "lse": Option({"return_aux": flash_ext.AuxRequest(lse=True)}),
        "largest scores": Option({"return_aux": flash_ext.AuxRequest(max_scores=True)}),
        "lse and largest scores": Option({"return_aux": flash_ext.AuxRequest(lse=True, max_scores=True)}),
        "deterministic": Option({"deterministic": True}),
        "backend": Option({"backend": "cpu"}),
    }  # fmt: skip


def exclude_each_other(a: Option, b: Option) -> bool:
    """Whether the two are values of one keyword or part, or two biases."""
    shared = (a.others.keys() & b.others.keys()) | (a.parts.keys() & b.parts.keys())
    return bool(shared) or "bias" in a.meaning.keys() & b.meaning.keys()


def combined(*options: Option) -> Option:
    others: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    meaning: dict[str, Any] = {}
    for option in options:
        for name, value in option.meaning.items():
            if name == "mask" and name in meaning:
                value = value & meaning[name]
            meaning[name] = value
        others |= option.others
        parts |= option.parts
    return Option(others, parts, meaning)


def call(inputs: Inputs, option: Option) -> tuple[Tensor, ...]:
    """Everything that the public function returns; dropout draws from a freshly seeded generator.

    The order is out, lse, largest scores, whatever of them there is.
    """
    seed_generators(option)
    keywords = option.keywords
    heads_first = keywords.get("layout") == "bhsd"
    qkv = [t.transpose(1, 2) for t in inputs.qkv] if heads_first else inputs.qkv
    function = flash_ext.attention_varlen if inputs.packed else flash_ext.attention
    results = function(*qkv, *inputs.cu, **keywords)
    out, aux = (results, ()) if isinstance(results, Tensor) else results
    if aux:
        request = keywords["return_aux"]
        assert [t is not None for t in aux] == [request.lse, request.max_scores]
    return (out.transpose(1, 2) if heads_first else out, *(t for t in aux if t is not None))


def expected(inputs: Inputs, option: Option) -> tuple[Tensor, ...]:
    """What the oracle says to the same call."""
    others, parts = option.others, option.parts
    meaning = dict(option.meaning)
    if "dropout_p" in others:
        seed_generators(option)
        meaning["rng"] = flash_ext.dropout_rng("cpu", others.get("generator"))
    left, right = parts.get("window", (-1, -1))
    spec = AttnSpec(others.get("scale", default_scale(HEAD_DIM)), left, 0 if parts.get("causal") else right)
    mods = Modifiers(**meaning)
    out, lse = attention_reference(*inputs.qkv, spec, *inputs.cu, mods=mods)
    results = [out]
    request = others.get("return_aux", flash_ext.AuxRequest())
    if request.lse:
        results.append(lse)
    if request.max_scores:
        results.append(row_max_reference(*inputs.qkv, spec, *inputs.cu, mods=mods))
    return tuple(results)


def seed_generators(option: Option) -> None:
    torch.manual_seed(5)
    if "generator" in option.others:
        option.others["generator"].manual_seed(7)


def leaves_of(inputs: Inputs, option: Option) -> list[Tensor]:
    """Everything that asks for a gradient."""
    return [*inputs.qkv, *option.tensors().values()]


def gradients(results: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a loss that looks at every result with a gradient, finite entries only."""
    loss = sum(t.where(t.isfinite(), 0).sin().sum() for t in results if t.requires_grad)
    return torch.autograd.grad(loss, leaves)
