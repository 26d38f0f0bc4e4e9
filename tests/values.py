"""Mask and bias values from the parts that kernels know, for tests that combine parts at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from flash_ext import masks
from flash_ext._cpu import condensed
from flash_ext._ops.modifiers import Modifiers


def values(
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    top_left: bool = False,
    chunk: int = 0,
    sink_tokens: int = 0,
    prefix_lens: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    keys: Tensor | None = None,
    hidden_rows: Tensor | None = None,
    hidden_keys: Tensor | None = None,
    blocks: masks.BlockMask | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    position: masks.RelativePosition | None = None,
) -> dict[str, Any]:
    """``mask`` and ``bias`` of a call, without those that are not asked for.

    The mask is ``[right & ((left & chunk) | sink tokens) | prefix] & everything that hides``, the form that
    kernels execute; what limits nothing is left out.
    """
    alignment = "top_left" if top_left else "bottom_right"
    left, right = window[0], 0 if causal else window[1]
    inner: masks.Mask | None = None
    if left >= 0:
        inner = masks.Window(left, -1, alignment)
    if chunk:
        own = masks.Chunks(chunk, alignment)
        inner = own if inner is None else inner & own
    if inner is not None and sink_tokens:
        # A right bound stands outside, that of a chunk is its end: sink tokens show beyond neither.
        inner = inner | masks.SinkTokens(sink_tokens)
    outer: masks.Mask | None = masks.Causal(alignment) if right == 0 else None
    if right > 0:
        outer = masks.Window(-1, right, alignment)
    shown = inner if outer is None else outer if inner is None else outer & inner
    if shown is not None and prefix_lens is not None:
        shown = shown | masks.Prefix(prefix_lens)
    hides: list[masks.Mask] = [] if shown is None else [shown]
    if documents is not None:
        hides.append(masks.Documents(*(documents if isinstance(documents, tuple) else (documents,))))
    tensors = (keys, hidden_rows, hidden_keys, mask)
    kinds = (masks.KeyMask, masks.HiddenRows, masks.HiddenKeys, masks.Dense)
    hides += [kind(tensor) for kind, tensor in zip(kinds, tensors) if tensor is not None]
    if blocks is not None:
        hides.append(blocks)
    whole = None
    for part in hides:
        whole = part if whole is None else whole & part
    total: masks.Bias | None = None
    dense = None if bias is None else masks.DenseBias(bias)
    for added in (dense, None if slopes is None else masks.ALiBi(slopes), position):
        if added is not None:
            total = added if total is None else total + added
    return {name: value for name, value in (("mask", whole), ("bias", total)) if value is not None}


def call_keywords(
    *, causal: bool = False, window: tuple[int, int] = (-1, -1), **parts: Any
) -> dict[str, Any]:
    """All of a call's ``causal``, ``window_size``, ``mask`` and ``bias``, for the parts of :func:`values`.

    ``causal`` and ``window`` stay keywords unless a part widens or aligns them: then they are in the mask.
    """
    if any(parts.get(name) is not None for name in ("top_left", "sink_tokens", "prefix_lens")):
        return {"causal": False, "window_size": (-1, -1)} | values(causal=causal, window=window, **parts)
    return {"causal": causal, "window_size": window} | values(**parts)


def plain(mods: Modifiers, rows: int, keys: int) -> Modifiers:
    """What was condensed for a dense call, written out."""
    mods = condensed.plain_form(mods, rows, keys, False)
    own = {}
    if mods.document_q is not None:
        own = {"document_q": mods.document_q[:, :rows], "document_k": mods.document_k[:, :keys]}
    if mods.mask is not None:
        own["mask"] = condensed.plain_mask(mods.mask)[..., :keys]
    return replace(mods, **own)
