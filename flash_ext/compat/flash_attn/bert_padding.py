"""Between padded and packed tensors, as ``flash_attn.bert_padding`` does it. Differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: (n, ...) rows out of (total, ...)."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse: (first_axis_dim, ...) with ``values`` in the rows ``indices`` and 0 elsewhere."""
    output = values.new_zeros(first_axis_dim, *values.shape[1:])
    return output.index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Takes the padding out.

    Waits for the device, which counts the tokens. Results that stay on it are made packed from the start.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or int, 1 for tokens.
        unused_mask: (batch, seqlen), 1 for places that are kept though they hold no token.

    Returns:
        hidden_states (total, ...), indices (total,) into batch * seqlen, cu_seqlens (batch + 1,) int32, the
        longest length, and (batch,) int32 how many tokens each sequence has without the unused ones.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten()).flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts the padding back, as zeros: (total, ...) to (batch, seqlen, ...)."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    padded: Tensor = rows.unflatten(0, (batch, seqlen))
    return padded


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
