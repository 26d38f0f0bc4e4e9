"""What ``bench.paged`` times beside ours over the same keys: FlashAttention-3 as vLLM builds it, and cuDNN.

Neither is ever needed. What a peer throws is printed in its row, and the other columns stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.peers_fp8 import Forward

CUDNN = "cuDNN"
FA3_PAGES = (16, 64, 256)
Pool = tuple[Tensor, Tensor, Tensor]  # pages of k and of v, and their table


class Peers(NamedTuple):
    """Those that a run was given.

    Attributes:
        flash_mla: the operator of FlashMLA, for latents.
        fa3: the forward of FlashAttention-3.
        cudnn: whether PyTorch's cuDNN is timed, over keys without pages.
    """

    flash_mla: Callable[..., tuple[Tensor, ...]] | None = None
    fa3: Forward | None = None
    cudnn: bool = False


NO_PEERS = Peers()


def fa3_over_pages(
    forward: Forward, pool: Pool, lengths: Tensor, most: int, batch: int, queries: int
) -> Callable[[Tensor], Tensor]:
    """Takes q (batch, queries, heads, head_dim); causal where there are several. out has the rows in one."""
    k, v, table = pool
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * queries
    # 0 lets it choose how to split the keys, which only pays where there are few queries.
    splits = 0 if queries <= 16 else 1
    attend = forward(
        k=k, v=v, page_table=table, seqused_k=lengths, cu_seqlens_q=bounds, max_seqlen_q=queries,
        max_seqlen_k=most, softmax_scale=k.shape[-1] ** -0.5, is_causal=queries > 1, num_splits=splits,
    )  # fmt: skip
    return lambda q: attend(q=q.flatten(0, 1))


def cudnn_over_keys(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """One new token of each sequence, through PyTorch. Copies as cuDNN takes them are made before."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    shares_keys = q.shape[1] != k.shape[1]

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=shares_keys).transpose(1, 2)

    return call


def columns(
    peers: Peers, q: Tensor, kv: Tensor | None, pools: dict[int, Pool], lengths: Tensor, most: int
) -> dict[str, Callable[[], Tensor]]:
    """What peers do with the same keys, by name.

    kv: keys and values where all sequences have the same number, (2, batch, keys, heads, head_dim). Of
    several new tokens cuDNN is left out: PyTorch aligns their causal mask at the first key. pools: by the
    keys of a page.
    """
    found: dict[str, Callable[[], Tensor]] = {}
    if peers.fa3 is not None:
        for page in FA3_PAGES:
            attend = fa3_over_pages(peers.fa3, pools[page], lengths, most, *q.shape[:2])
            found[f"FA3 page {page}"] = functools.partial(attend, q)
    if peers.cudnn and kv is not None and q.shape[1] == 1:
        found[CUDNN] = cudnn_over_keys(q, *kv)
    return found
