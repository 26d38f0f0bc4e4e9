"""Masks of other libraries from ours, and ours from theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .atoms import Causal, Window
from .biases import Bias, DenseBias
from .block_mask import BlockMask, checked_block_size
from .value import Mask, Points

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def to_mask_mod(mask: Mask, q_len: int, k_len: int) -> MaskMod:
    """See :meth:`flash_ext.masks.Mask.to_mask_mod`."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask._shown(Points(b, h, q_idx, kv_idx, q_len, k_len, q_idx, kv_idx), False)

    return mask_mod


def to_torch(
    mask: Mask,
    q_len: int,
    k_len: int,
    batch: int | None,
    num_heads: int | None,
    block_size: int | tuple[int, int],
) -> Any:
    """See :meth:`flash_ext.masks.Mask.to_torch`."""
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    size = checked_block_size(block_size)
    own = BlockMask.from_mask(mask, q_len, k_len, batch=batch, num_heads=num_heads, block_size=size)
    cut = torch.zeros_like(own.blocks) if own.index is None else own.index >= 0
    # As torch has it: where the lengths cut a block, the rule is asked.
    cut[:, :, q_len // size[0] :] |= own.blocks[:, :, q_len // size[0] :]
    cut[..., k_len // size[1] :] |= own.blocks[..., k_len // size[1] :]
    return TorchBlockMask.from_kv_blocks(
        *_listed(cut), *_listed(own.blocks & ~cut), size, to_mask_mod(mask, q_len, k_len), (q_len, k_len)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each row of blocks has, and which, first those that it has."""
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def from_xformers(bias: Any) -> tuple[Mask | None, Bias | None]:
    """The mask and the bias that an ``attn_bias`` of xformers holds.

    It is recognised by the name of its class, so xformers need not be installed.

    Args:
        bias: one of the classes of ``xformers.ops.fmha.attn_bias`` that keep nothing but a band, or that and
            a tensor; a tensor, which is added; or None.

    Returns:
        What goes into ``mask=`` and into ``bias=``, None where there is none.

    Raises:
        TypeError: the class is another one.
        ValueError: it lays out packed sequences, which is no mask here.

    Example:
        >>> class LowerTriangularMask: ...
        >>> flash_ext.masks.from_xformers(LowerTriangularMask())
        (Causal('top_left'), None)
    """
    name = type(bias).__name__
    # Some of these are tensors by class, so the name is looked at first.
    if name == "LowerTriangularMask":
        return Causal("top_left"), None
    if name == "LowerTriangularMaskWithTensorBias":
        tensor = getattr(bias, "_subtensor", None)
        return Causal("top_left"), DenseBias(bias._bias if tensor is None else tensor)
    if name == "LowerTriangularFromBottomRightMask":
        return Causal(), None
    if name == "LowerTriangularFromBottomRightLocalAttentionMask":
        return Causal() & Window(bias._window_size - 1, -1), None
    if name == "LocalAttentionFromBottomRightMask":
        return Window(bias.window_left, bias.window_right), None
    if "BlockDiagonal" in name:
        raise ValueError(
            f"{name} lays out packed sequences: give bias.q_seqinfo.seqstart and bias.k_seqinfo.seqstart to "
            "attention_varlen as cu_seqlens_q and cu_seqlens_k. Paged, padded and gappy keys are not "
            "supported."
        )
    if bias is None:
        return None, None
    if isinstance(bias, Tensor):
        return None, DenseBias(bias)
    raise TypeError(f"bias must be an attn_bias of xformers, a float tensor or None, got {name}.")
