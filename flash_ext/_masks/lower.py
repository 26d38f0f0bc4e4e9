"""From mask and bias values to the terms of the operators, tensor by tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .atoms import (
    Causal,
    Dense,
    Documents,
    HiddenKeys,
    HiddenRows,
    KeyMask,
    Window,
)
from .biases import ALiBi, Bias, DenseBias, terms_of
from .block_algebra import value_of
from .block_mask import BlockMask, with_leading
from .normal import Normal, Refused, refuse
from .relative_position import RelativePosition
from .token_tree import TokenTree
from .value import And, Mask, Not, Or, Sizes, leaves

INT32_MAX = torch.iinfo(torch.int32).max
# What kernels over a cache know beside TokenTree.
OVER_CACHE = (Causal, Window, KeyMask, Dense, Documents)


class Terms(NamedTuple):
    """A mask and a bias in the terms of the operators, every tensor checked against the sizes of the call.

    Attributes:
        left, right: window, -1 is no limit.
        top_left: alignment; False where both are the same.
        chunk, sink_tokens: 0 is none.
        prefix_lens: (batch,) int32.
        documents: int32 of rows and of keys, the same object where one tensor serves both.
        keys: bool (batch, k_len) or (total_k,); over a cache (batch or 1, any).
        hidden_rows, hidden_keys: int32, with two or four numbers in the last dimension.
        blocks: one map.
        dense: bool of 1 to 4 dimensions.
        bias: floating, of 1 to 4 dimensions.
        slopes: (num_heads,) or (batch, num_heads).
        position: the bias by distance.
    """

    left: int = -1
    right: int = -1
    top_left: bool = False
    chunk: int = 0
    sink_tokens: int = 0
    prefix_lens: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None
    keys: Tensor | None = None
    hidden_rows: Tensor | None = None
    hidden_keys: Tensor | None = None
    blocks: BlockMask | None = None
    dense: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    position: RelativePosition | None = None


def terms_for(
    mask: Mask | None,
    bias: Bias | None,
    sizes: Sizes,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> Terms:
    """The terms of a call. Tensors are merged here, so the result is worth keeping.

    Args:
        mask, bias: values, or None.
        sizes: of the call.
        causal, window: as ``mask & Causal() & Window(*window)``.

    Raises:
        ValueError: no kernel executes the mask, or a tensor does not fit the sizes.
        NotImplementedError: no kernel over a cache knows a part of the mask.
    """
    left, right = window
    right = 0 if causal and right >= -1 else right
    of_bias = _of_bias(bias, sizes)
    if mask is None:
        limits = Window(left, right)
        return Terms(limits.left, limits.right, **of_bias)
    if sizes.cached:
        _check_over_cache(mask)
    normal = mask.normal()
    bands = normal.bands(left, right)
    mask._check(sizes)
    # Where no length differs both alignments are the same.
    same = not sizes.packed and not sizes.cached and sizes.q_len == sizes.k_len
    asked = {"bottom_right"} if left >= 0 or right >= 0 else set()
    alignments = set() if same else normal.alignments | asked
    if len(alignments) > 1:
        refuse(
            mask,
            "bands of both alignments do not go together where the lengths differ, and causal=True and "
            "window count from the bottom right: use one alignment.",
        )
    top_left = alignments == {"top_left"}
    lens = [prefix.lens for prefix in bands.prefixes]
    return Terms(
        left=bands.left, right=bands.right, top_left=top_left, chunk=bands.chunk,
        sink_tokens=bands.sink_tokens, prefix_lens=_longest(lens, sizes), documents=_documents(normal),
        keys=_keys(normal, sizes), hidden_rows=_intervals(normal.hidden_rows),
        hidden_keys=_intervals(normal.hidden_keys), blocks=_blocks(normal, sizes),
        dense=_dense(normal, sizes), **of_bias,
    )  # fmt: skip


# ---- masks --------------------------------------------------------------------------------------------


def _check_over_cache(mask: Mask) -> None:
    for leaf in leaves(mask):
        name, where = type(leaf).__name__, "over a cache (seqused_k, block_table)"
        if isinstance(leaf, TokenTree):
            raise NotImplementedError(f"mask=TokenTree(words) stands by itself {where}, got {mask!r}.")
        is_at_top = isinstance(leaf, (Causal, Window)) and leaf.alignment == "top_left"
        if is_at_top or not isinstance(leaf, OVER_CACHE):
            raise NotImplementedError(
                f"{leaf if is_at_top else name} is not available in a mask {where}: that has Causal, Window "
                "(from the bottom right), KeyMask, Dense and Documents, or a TokenTree by itself. Gather the "
                "keys, and call attention_varlen without these arguments."
            )


def narrowed(numbers: Tensor, least: int) -> Tensor:
    """int32; numbers beyond it mean what its ends mean."""
    if numbers.dtype == torch.int32:
        return numbers
    return numbers.clamp(least, INT32_MAX).to(torch.int32)


def _longest(lens: list[Tensor], sizes: Sizes) -> Tensor | None:
    if not lens:
        return None
    longest = narrowed(lens[0], 0)
    for other in lens[1:]:
        longest = torch.maximum(longest, narrowed(other, 0))
    return longest.expand(sizes.batch)


def _documents(normal: Normal) -> tuple[Tensor, Tensor] | None:
    documents = normal.documents
    if documents is None:
        return None
    rows, keys = (
        (ids[0] if ids.dim() == 2 and len(ids) == 1 else ids) for ids in (documents.ids, documents.of_keys)
    )
    rows = rows.to(torch.int32)
    return rows, rows if documents.ids_k is None else keys.to(torch.int32)


def _keys(normal: Normal, sizes: Sizes) -> Tensor | None:
    if not normal.keys:
        return None
    keep = _evaluated(And(normal.keys) if len(normal.keys) > 1 else normal.keys[0], sizes.cached)
    if sizes.cached:
        return keep[:, 0, 0, :]
    if sizes.packed:
        return keep.reshape(sizes.k_len)
    return keep[:, 0, 0, :].expand(sizes.batch, sizes.k_len)


def _intervals(parts: tuple[HiddenRows, ...] | tuple[HiddenKeys, ...]) -> Tensor | None:
    if not parts:
        return None
    given = [narrowed(part.intervals, 0) for part in parts]
    if len(given) == 1:
        return given[0]
    shape = torch.broadcast_shapes(*(t.shape[:-1] for t in given))
    return torch.cat([t.expand(*shape, t.shape[-1]) for t in given], dim=-1)


def _dense(normal: Normal, sizes: Sizes) -> Tensor | None:
    if not normal.dense:
        return None
    whole = And(normal.dense) if len(normal.dense) > 1 else normal.dense[0]
    if isinstance(whole, Dense):
        return whole.tensor
    is_packed = sizes.packed and not sizes.cached
    if is_packed and any(isinstance(leaf, KeyMask) for part in normal.dense for leaf in leaves(part)):
        raise ValueError(
            f"{normal.words}: KeyMask counts packed keys and Dense those of a sequence, so a union of both "
            "has no kernel in packed calls."
        )
    if sizes.packed or sizes.cached:
        _check_ends(normal)
    return _evaluated(whole, sizes.cached)


def _check_ends(normal: Normal) -> None:
    """A union of what ends with what repeats for ever would end nowhere, and every tensor ends."""
    for part in normal.dense:
        # A KeyMask repeats its row and never its column.
        given = [(1, 1, 1, *leaf.tensor.shape)[-2:] for leaf in leaves(part) if isinstance(leaf, Dense)]
        given += [(1, max(leaf.keep.shape[-1], 2)) for leaf in leaves(part) if isinstance(leaf, KeyMask)]
        if isinstance(part, Or) and any(1 in side and len(set(side)) > 1 for side in zip(*given)):
            raise ValueError(
                f"{normal.words}: a union of Dense masks of which one repeats its row or its column has no "
                "kernel in packed calls and over a cache, where a KeyMask repeats its row: expand it to the "
                "longest sequence."
            )


def _evaluated(mask: Mask, cached: bool) -> Tensor:
    """An expression of Dense and KeyMask as one bool tensor of 4 dimensions; what is missing is hidden."""
    is_negated = isinstance(mask, Not)
    leaf = mask.mask if isinstance(mask, Not) else mask
    if isinstance(leaf, Dense):
        return ~with_leading(leaf.tensor, 4) if is_negated else with_leading(leaf.tensor, 4)
    if isinstance(leaf, KeyMask):
        keep = leaf.keep if leaf.keep.dim() == 2 else leaf.keep[None]
        keep = (~keep if is_negated else keep)[:, None, None, :]
        # A single key of a cache is one key; a dimension of 1 would stand for all of them.
        return _continued(keep, 3, 2) if cached and keep.shape[3] == 1 else keep
    assert isinstance(mask, (And, Or))
    total = _evaluated(mask.masks[0], cached)
    for part in mask.masks[1:]:
        total = _joined(total, _evaluated(part, cached), isinstance(mask, And))
    return total


def _joined(a: Tensor, b: Tensor, every: bool) -> Tensor:
    """a & b or a | b. Packed calls have tensors that end before each other."""
    for dim in (2, 3):
        ends = {t.shape[dim] for t in (a, b)} - {1}
        if len(ends) == 2 and every:
            a, b = (t if t.shape[dim] == 1 else t.narrow(dim, 0, min(ends)) for t in (a, b))
        elif len(ends) == 2:
            a, b = (t if t.shape[dim] == 1 else _continued(t, dim, max(ends)) for t in (a, b))
    return a & b if every else a | b


def _continued(t: Tensor, dim: int, length: int) -> Tensor:
    if t.shape[dim] == length:
        return t
    shape = [*t.shape[:dim], length - t.shape[dim], *t.shape[dim + 1 :]]
    return torch.cat([t, t.new_zeros(shape)], dim)


def _blocks(normal: Normal, sizes: Sizes) -> BlockMask | None:
    if not normal.blocks:
        return None
    return value_of(And(normal.blocks) if len(normal.blocks) > 1 else normal.blocks[0], sizes)


# ---- biases -------------------------------------------------------------------------------------------


def _of_bias(bias: Bias | None, sizes: Sizes) -> dict[str, Any]:
    """Those fields of the terms."""
    if bias is None:
        return {}
    parts = terms_of(bias)
    slopes = [part.slopes for part in parts if isinstance(part, ALiBi)]
    positions = [part for part in parts if isinstance(part, RelativePosition)]
    dense = [part.tensor for part in parts if isinstance(part, DenseBias)]
    if len(slopes) + len(positions) + len(dense) != len(parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise TypeError(f"A bias is made of DenseBias, ALiBi and RelativePosition, got {kinds}.")
    if len(slopes) > 1:
        raise Refused(f"{bias!r}: ALiBi stands once in a sum: add the slopes, ALiBi(slopes_a + slopes_b).")
    if len(positions) > 1 or (positions and dense):
        raise Refused(
            f"{bias!r}: a call adds one bias by distance or one by element: write it out, "
            "DenseBias(position.to_dense(q_len, k_len)), or add the tables."
        )
    bias._check(sizes)
    return {
        "bias": _sum_of(bias, dense),
        "slopes": slopes[0] if slopes else None,
        "position": positions[0] if positions else None,
    }


def _sum_of(bias: Bias, dense: list[Tensor]) -> Tensor | None:
    """The sum of the tensors, if it needs no more elements than the largest of them has."""
    if len(dense) < 2:
        return dense[0] if dense else None
    shape = _joint_shape(bias, dense)
    if not any(with_leading(tensor, 4).shape == shape for tensor in dense):
        raise Refused(
            f"{bias!r}: the sum would need {' * '.join(map(str, shape))} elements, more than any of its "
            "parts has; add the tensors yourself if that is meant."
        )
    total = dense[0]
    for tensor in dense[1:]:
        total = total + tensor
    return total


def _joint_shape(names: object, tensors: list[Tensor]) -> torch.Size:
    try:
        shape: torch.Size = torch.broadcast_shapes((1, 1, 1, 1), *(tensor.shape for tensor in tensors))
    except RuntimeError:
        found = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"{names!r}: the shapes {found} do not broadcast with each other.") from None
    return shape
