"""A call in the words of plans, and what those words say otherwise than the call.

``_C.plan`` plans what words and numbers say, and a word stands for one kind of tensor (``NamedModifiers`` in
csrc/api/modifiers.cpp). Where a call has another kind, the plan is that of a call which differs from it. The
difference is named here, because rows of plans, launches and workspace may depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._masks.operands import has_aligned_rows
from .library import _C
from .modifiers import Modifiers


class Described(NamedTuple):
    """A call for ``_C.plan``.

    Attributes:
        words: its modifiers.
        assumed: what those words say otherwise than the call, in sentences for a reader; empty where the plan
            is that of the call.
    """

    words: list[str]
    assumed: list[str]


def described(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    mods: Modifiers | None,
    scale: float,
    *,
    of_backward: bool,
    on_another_gpu: bool,
) -> Described:
    """The words of a call that :func:`.arguments.modifiers_of` has read.

    Args:
        mods: None for a call without modifiers.
        of_backward: the call is the backward, which makes the gradients that its modifiers want.
        on_another_gpu: ``_C.plan`` gets the facts of the GPU as numbers.
    """
    assumed = _of_every_call(on_another_gpu)
    if not of_backward:
        assumed += _of_heads(q)
    if mods is None:
        return Described([], assumed)
    if not 2.0**-60 <= scale <= 2.0**10:  # beyond it and at factors below 0 some kernels are not taken
        assumed.append(f"the scale is 1 / sqrt(head_dim), here it is {scale:g}")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    sizes = (batch, q.shape[-2], q.shape[-3], k.shape[-3])
    found = {
        "softcap": _softcap(mods, assumed), "alibi": _slopes(mods, sizes, of_backward, assumed),
        **_bias(mods.bias, sizes, of_backward, assumed), "dropout": _dropout(mods, assumed),
        **_mask(mods.mask), "blocks": _blocks(mods, assumed), "documents": mods.document_q is not None,
        "hidden_rows": mods.hidden_rows is not None, "hidden_keys": mods.hidden_keys is not None,
        "chunk": mods.chunk > 0, "prefix": mods.prefix_lens is not None,
        "sink_tokens": mods.sink_tokens > 0, "sinks": mods.sinks is not None,
    }  # fmt: skip
    if mods.top_left:
        assumed.append("the last row stands at the last key, here the first row at the first")
    tensors = {"alibi": mods.slopes, "sinks": mods.sinks, **dict.fromkeys(_BIASES, mods.bias)}
    words = [
        f"{name}_gradient" if of_backward and _wants_gradient(tensors.get(name)) else name
        for name, is_there in found.items()
        if is_there
    ]
    return Described(words, assumed)


def described_over_cache(
    q: Tensor, mods: Modifiers, has_tree: bool, *, copies_q: bool, on_another_gpu: bool
) -> Described:
    """The same of a call over a cache, whose plan asks which modifiers there are, and nothing about them.

    Args:
        has_tree: its mask is a TokenTree.
        copies_q: the kernel reads a contiguous copy of q.
    """
    assumed = _of_every_call(on_another_gpu) + ([] if copies_q else _of_heads(q))
    bias = mods.bias
    found = {
        "softcap": mods.softcap > 0, "alibi": mods.slopes is not None,
        "relative": bias is not None and bias.dim() == 3, "bias": bias is not None and bias.dim() == 4,
        **_mask(mods.mask), "documents": mods.document_k is not None, "sinks": mods.sinks is not None,
        "tree": has_tree,
    }  # fmt: skip
    return Described([name for name, is_there in found.items() if is_there], assumed)


def _of_every_call(on_another_gpu: bool) -> list[str]:
    is_unknown = on_another_gpu and _C.get_switch("batch_invariant") == 1
    return ["the batch-invariant mode is off, here it is on"] if is_unknown else []


def _of_heads(q: Tensor) -> list[str]:
    repeats = q.shape[-2] > 1 and q.stride(-2) == 0
    return ["q has heads of its own, here it repeats one"] if repeats else []


_BIASES = ("bias", "full_bias", "float_bias", "relative")
_TABLE_ENTRIES = 257  # of the word "relative", a head
_BLOCK_ROWS = 128  # of the word "blocks"


def _wants_gradient(t: Tensor | None) -> bool:
    return t is not None and t.requires_grad


def _softcap(mods: Modifiers, assumed: list[str]) -> bool:
    if mods.softcap > 100:  # kFineSoftcap in csrc/modifiers.h: what kernels without a fine tanh do not take
        assumed.append(f"the softcap is 30, here it is {mods.softcap:g}")
    return mods.softcap > 0


def _dropout(mods: Modifiers, assumed: list[str]) -> bool:
    if 0 < mods.dropout_p <= 2.0**-17:  # of 16 bits a draw, this rounds to no dropout
        assumed.append(f"the dropout is 0.1, here it is {mods.dropout_p:g}")
    return mods.dropout_p > 0


def _slopes(mods: Modifiers, sizes: tuple[int, ...], of_backward: bool, assumed: list[str]) -> bool:
    """Only their gradient depends on how many there are."""
    slopes = mods.slopes
    if slopes is None:
        return False
    if of_backward and slopes.requires_grad and slopes.dim() == 2 and slopes.shape[0] > 1:
        assumed.append(f"the slopes have shape {(sizes[1],)}, here {tuple(slopes.shape)}")
    return True


def _mask(mask: Tensor | None) -> dict[str, bool]:
    if mask is None:
        return {}
    # As condensed (csrc/condensed.h) one row has two words of summary behind it, one column no dimension.
    condensed = mask.dtype != torch.bool
    is_row = mask.shape[2] == (3 if condensed else 1)
    is_column = not is_row and (mask.dim() == 3 if condensed else mask.shape[3] == 1)
    return {"key_padding": is_row, "query_padding": is_column, "mask": not is_row and not is_column}


def _blocks(mods: Modifiers, assumed: list[str]) -> bool:
    if mods.blocks is not None and mods.block_rows < _BLOCK_ROWS:
        assumed.append(f"blocks have {_BLOCK_ROWS} rows, here {mods.block_rows}")
    return mods.blocks is not None


def _bias(
    bias: Tensor | None, sizes: tuple[int, ...], of_backward: bool, assumed: list[str]
) -> dict[str, bool]:
    """The word that stands for the kind of bias nearest to this one."""
    if bias is None:
        return {}
    batch, heads, rows, keys = sizes
    here = tuple(bias.shape)
    if bias.dim() == 3:
        table = (1, heads, _TABLE_ENTRIES)
        if of_backward and bias.requires_grad and here != table:
            assumed.append(f"the table of the bias by distance has shape {table}, here {here}")
        return {"relative": True}
    # As csrc/api/modifiers.cpp asks: elements are neighbours as well.
    is_aligned = bias.shape[-1] > 1 and bias.stride(-1) == 1 and has_aligned_rows(bias)
    word, shape, aligned = "bias", (1, heads, rows, keys), True
    if bias.dtype == torch.float32:
        word = "float_bias"
    elif here[0] > 1 or (batch == 1 and not is_aligned):
        word, shape, aligned = "full_bias", (batch, heads, rows, keys), keys % 8 == 0
    if here != shape:
        assumed.append(f"the bias has shape {shape}, here {here}")
    elif 1 in shape[1:]:
        assumed.append("the bias repeats along no dimension, here along those of size 1")
    has_rows = here[3] > 1  # one value for all keys of a row has no place to begin at
    if has_rows and is_aligned != aligned:
        begin = "begin" if aligned else "do not begin"
        assumed.append(f"rows of the bias {begin} on 16 bytes, here they {'do' if is_aligned else 'do not'}")
    elif has_rows and not aligned and bias.stride(-1) != 1:
        assumed.append("keys of the bias lie side by side, here they do not")
    return {word: True}
