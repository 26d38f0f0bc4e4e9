"""Attention of sequences that begin with the same keys: :func:`attention_shared_prefix`."""

from __future__ import annotations

import torch
from torch import Tensor

from ._batch_invariance import is_batch_invariant
from ._count import counting, tally
from ._log import logged
from ._masks.token_tree import TokenTree
from ._merge import add_sinks, merge_attention_states
from ._ops.dispatch_cached import check_of_heads, may_read, run_cached, tree_of


@logged
def attention_shared_prefix(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    *,
    shared_block_table: Tensor,
    shared_prefix_len: int | Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    sinks: Tensor | None = None,
    mask: TokenTree | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences that begin with the same keys, which are read once for all of their queries.

    Sequence i has the ``shared_prefix_len`` keys of ``shared_block_table``, then ``seqused_k[i]`` of its own.
    Its queries are level with its last own keys, of which it has as many as queries or more, so that each
    query sees the whole prefix. Two calls over the cache and a merge: it pays where the prefix is long and
    the batch large.

    Args:
        q: (total_q, h, d).
        k_cache, v_cache: (num_pages, page_size, h_k, d), as for :func:`flash_ext.attention_varlen`.
        cu_seqlens_q: (batch + 1,) int32.
        shared_block_table: (pages,) int32, the pages of the prefix in order.
        shared_prefix_len: int or (1,) int32, the keys of the prefix.
        block_table: (batch, max_pages) int32, the pages behind the prefix.
        seqused_k: (batch,) int32, the keys of each sequence behind the prefix.
        max_seqlen_q, max_seqlen_k: bounds on queries and on own keys, by which kernels are chosen.
        causal: hide the keys behind that of a query.
        scale, sinks: as in :func:`flash_ext.attention_varlen`.
        mask: a :class:`flash_ext.masks.TokenTree` of the queries, which takes the place of causal.
        k_descale, v_descale: as in :func:`flash_ext.attention_varlen`, but for one of each sequence.

    Returns:
        out (total_q, h, dv) in the dtype of q, and lse (h, total_q) float32.

    Raises:
        NotImplementedError: a tensor requires a gradient, or the batch-invariant mode is on, in which keys
            are not divided by what a sequence shares with others.
        ValueError, TypeError: an argument does not fit; on the CPU also fewer own keys than queries.

    Source: Hydragen, Juravsky et al. 2024, https://arxiv.org/abs/2402.05099.
    """
    if counting:
        tally("serving")
    if is_batch_invariant():
        raise NotImplementedError(
            "attention_shared_prefix is not available in the batch-invariant mode: how keys are divided "
            "depends on the batch. Call attention_varlen with whole tables."
        )
    check_of_heads(q, sinks=sinks)
    tree = tree_of(mask)
    if not isinstance(shared_block_table, Tensor) or shared_block_table.dim() != 1:
        raise ValueError("shared_block_table must be a tensor of shape (pages,), one for all sequences.")
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 1:
        raise ValueError("cu_seqlens_q must have bounds of at least one sequence.")
    if (causal or tree is not None) and may_read(seqused_k) and may_read(cu_seqlens_q):
        missing = (cu_seqlens_q.diff() > seqused_k).nonzero()
        if missing.numel():
            raise ValueError(
                "seqused_k must count a key behind the prefix for each query, which sequence "
                f"{int(missing[0])} has not."
            )
    if isinstance(shared_prefix_len, int):
        length = torch.full((1,), shared_prefix_len, dtype=torch.int32, device=q.device)
    else:
        length = shared_prefix_len
    bounds = cu_seqlens_q[::batch].contiguous()  # of all queries
    shared, shared_lse = run_cached(
        q, k_cache, v_cache, bounds, None, length, shared_block_table[None], None, None, scale, False,
        (-1, -1), None, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    own, own_lse = run_cached(
        q, k_cache, v_cache, cu_seqlens_q, None, seqused_k, block_table, max_seqlen_q, max_seqlen_k, scale,
        causal, (-1, -1), None, mask=tree, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    out, lse = merge_attention_states(shared, shared_lse, own, own_lse)
    return out, add_sinks(out, lse, sinks, cu_seqlens_q, True)
