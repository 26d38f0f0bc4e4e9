"""How the operators run on DTensor: replicated, sharded over the batch, or sharded over heads.

Sharding over sequences is redistributed by DTensor to one of these; ring attention is built from
:func:`flash_ext.forward`, :func:`flash_ext.backward` and :func:`flash_ext.merge_attention_states` instead.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# For one mesh dimension: placements of the results, then of the arguments (None for what is no tensor).
Strategy = tuple[list[Any], list[Any]]

NUM_OPTIONS = 7  # of the operators' arguments, the last ones that are no tensors


@functools.cache
def register_once() -> None:
    """Registers the rules with DTensor; later calls do nothing."""
    register_sharding(torch.ops.flash_ext.fwd.default)(fwd_strategies)
    register_sharding(torch.ops.flash_ext.bwd.default)(bwd_strategies)


def fwd_strategies(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *options: Any
) -> list[Strategy]:
    cu = Replicate() if cu_seqlens_q is not None else None
    return [
        ([full, statistic], [full, full, full, cu, cu, *[None] * NUM_OPTIONS])
        for full, statistic in _placements(k, cu_seqlens_q is not None)
    ]


def bwd_strategies(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *options: Any,
) -> list[Strategy]:
    cu = Replicate() if cu_seqlens_q is not None else None
    return [
        (
            [full, full, full],
            [
                *[full] * 5,
                statistic,
                statistic if dlse is not None else None,
                cu,
                cu,
                *[None] * NUM_OPTIONS,
            ],
        )
        for full, statistic in _placements(k, cu_seqlens_q is not None)
    ]


def _placements(k: Any, packed: bool) -> list[tuple[Any, Any]]:
    """Placements of tensors with rows, heads and head_dim, each with that of lse and dlse."""
    placements: list[tuple[Any, Any]] = [(Replicate(), Replicate())]
    if not packed:
        placements.append((Shard(0), Shard(0)))
    if _divides_heads(k):
        placements.append((Shard(1), Shard(0)) if packed else (Shard(2), Shard(1)))
    return placements


def _divides_heads(k: Any) -> bool:
    """Whether every way to shard heads gives each rank whole groups of query heads.

    A rank's query heads must find their key head among its own, which holds if the key heads divide evenly,
    over one mesh dimension or several. DTensor itself excludes meshes with more ranks than key heads.
    """
    num_heads_k = k.shape[-2]
    sizes = k.mesh.shape
    products = (
        math.prod(chosen)
        for length in range(1, len(sizes) + 1)
        for chosen in itertools.combinations(sizes, length)
    )
    return all(num_heads_k % product == 0 or num_heads_k < product for product in products)
