"""Multi-head latent attention over a cache, called as FlashMLA is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._count import counting, tally
from ._log import logged
from ._ops.dispatch_cached import run_cached


@logged
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    out: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries over latents: the values are the first columns of the keys.

    Args:
        q: (batch, seqlen_q, h, d) float16 or bfloat16, on the CPU also float32 and float64. On a GPU d is
            576, or at most 256.
        k_cache: (num_pages, page_size, 1, d), of which pages may lie anywhere.
        block_table: (batch, max_pages) int32, the pages of each sequence in order.
        cache_seqlens: (batch,) int32, how many latents each sequence has, those of the new tokens included.
        head_dim_v: columns of a latent that are its value. On a GPU 512 of 576, or at most 256.
        tile_scheduler_metadata, num_splits: from :func:`get_mla_metadata`; they change no result.
        softmax_scale: default 1 / sqrt(d). Models whose keys had another head_dim before they were absorbed
            give that of theirs.
        causal: the last query sees all latents, each one before it one less.
        out: where the result is written as well, (batch, seqlen_q, h, head_dim_v) in the dtype of q.
        others: arguments of other versions of FlashMLA, at None or False.

    Returns:
        out, (batch, seqlen_q, h, head_dim_v) in the dtype of q, and lse, (batch, h, seqlen_q) natural
        logarithms in float32, of a float64 q in float64. A row without latents has 0 and -inf.

    Raises:
        TypeError, ValueError: a shape, dtype or device does not fit; on the CPU also a length or a page.
        NotImplementedError: no Hopper GPU, other head sizes, or an argument that is not served.

    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, and the interface of FlashMLA,
    https://github.com/deepseek-ai/FlashMLA.
    """
    _refuse(others)
    if not isinstance(k_cache, Tensor) or k_cache.dim() != 4 or k_cache.shape[2] != 1:
        shape = tuple(k_cache.shape) if isinstance(k_cache, Tensor) else k_cache
        raise ValueError(f"k_cache must have shape (num_pages, page_size, 1, head_dim), got {shape}.")
    if not 1 <= head_dim_v <= k_cache.shape[-1]:
        raise ValueError(f"head_dim_v must be from 1 to head_dim {k_cache.shape[-1]}, got {head_dim_v}.")
    if out is not None:
        _check_out(out, q, head_dim_v)
    if counting:
        tally("serving")
    found, lse = run_cached(
        q, k_cache, k_cache[..., :head_dim_v], None, None, cache_seqlens, block_table, None, None,
        softmax_scale, causal, (-1, -1), None,
    )  # fmt: skip
    return (found if out is None else out.copy_(found)), lse


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int = 1,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Zeros in the form that FlashMLA's plan had at first: int32 (1, 8) and (batch + 1,).

    The kernel divides latents by lengths that it reads itself, so there is nothing to plan. The same zeros
    serve every step.

    Raises:
        NotImplementedError: an argument that is not served.
    """
    _refuse(others)
    device, batch = (None, 0) if cache_seqlens is None else (cache_seqlens.device, cache_seqlens.shape[0])
    plan = torch.zeros(1, 8, dtype=torch.int32, device=device)
    return plan, torch.zeros(batch + 1, dtype=torch.int32, device=device)


def _check_out(out: Tensor, q: Tensor, head_dim_v: int) -> None:
    wanted = (*q.shape[:-1], head_dim_v)
    if tuple(out.shape) != wanted or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out must have shape {wanted} in {q.dtype} on {q.device}, got {tuple(out.shape)} {out.dtype} on "
            f"{out.device}."
        )


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and value is not False:
            shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} is not served over latents, got {shown}. Leave it out.")
