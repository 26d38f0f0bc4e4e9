"""How the operators run on DTensor: replicated, sharded over the batch, or sharded over heads.

Masks, biases and the other modifiers are sharded along where they have the dimension, and replicated where
they are broadcast over it; the gradient of what is broadcast is then a sum over ranks (``Partial``). A call
with dropout runs replicated, because which weights are dropped depends on the place in the whole batch and
among all heads.

Sharding over sequences is redistributed by DTensor to one of these; ring attention is built from
:func:`flash_ext.forward`, :func:`flash_ext.backward` and :func:`flash_ext.merge_attention_states` instead.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .modifiers import NAMES, Modifiers
from .spec import wants_lse

# For one mesh dimension: placements of the results, then of the arguments (None for what is no tensor).
Strategy = tuple[list[Any], list[Any]]

# Of the forwards: lengths, scale and window; with modifiers then the fields of Modifiers.
NUM_NUMBERS, NUM_MODIFIERS = 5, len(NAMES)
BIAS, SLOPES, SINKS = map(NAMES.index, ("bias", "slopes", "sinks"))  # places among the modifiers


@functools.cache
def register_once() -> None:
    """Registers the rules with DTensor; later calls do nothing."""
    register_sharding(torch.ops.flash_ext.fwd.default)(fwd_strategies)
    register_sharding(torch.ops.flash_ext.bwd.default)(bwd_strategies)
    register_sharding(torch.ops.flash_ext.fwd_mod.default)(fwd_mod_strategies)
    register_sharding(torch.ops.flash_ext.bwd_mod.default)(bwd_mod_strategies)
    register_sharding(torch.ops.flash_ext.condense.default)(condense_strategies)


def fwd_strategies(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *options: Any
) -> list[Strategy]:
    cu = Replicate() if cu_seqlens_q is not None else None
    wanted = wants_lse(options[NUM_NUMBERS + 2 :])
    return [
        ([full, statistic if wanted else Replicate()], [full, full, full, cu, cu, *[None] * len(options)])
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
                *[None] * len(options),
            ],
        )
        for full, statistic in _placements(k, cu_seqlens_q is not None)
    ]


# ---- with modifiers ------------------------------------------------------------------------------------


def fwd_mod_strategies(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *rest: Any) -> list[Strategy]:
    mods, flags = _modifiers(rest)
    want_row_max, wanted = flags[0], wants_lse(flags[3:])  # behind deterministic and path
    packed = cu_q is not None
    cu = Replicate() if packed else None
    return [
        (
            [full, *(statistic if is_there else Replicate() for is_there in (wanted, want_row_max))],
            [full, full, full, cu, cu, *[None] * NUM_NUMBERS, *placed, *[None] * len(flags)],
        )
        for full, statistic, placed, _ in _modified_placements(q, k, mods, packed)
    ]


def bwd_mod_strategies(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    cu_q: Any,
    cu_k: Any,
    *rest: Any,
) -> list[Strategy]:
    mods, flags = _modifiers(rest)
    need_qkv, *needs = flags[:4]
    packed = cu_q is not None
    cu = Replicate() if packed else None
    strategies = []
    for full, statistic, placed, summed in _modified_placements(q, k, mods, packed):
        # What is not needed comes back empty.
        grads = [full if need_qkv else Replicate()] * 3
        for at, needed in zip((BIAS, SLOPES, SINKS), needs, strict=True):
            grads.append(summed[at] if needed and placed[at] is not None else Replicate())
        arguments = [*[full] * 5, statistic, statistic if dlse is not None else None, cu, cu]
        arguments += [*[None] * NUM_NUMBERS, *placed, *[None] * len(flags)]
        strategies.append((grads, arguments))
    return strategies


def condense_strategies(x: Any, *block_size: Any) -> list[Strategy]:
    """Batch entries and heads are condensed each for itself; lengths never shard."""
    lead = len(x.shape) - (1 if len(x.shape) <= 2 else 2)
    placements = [Replicate(), *(Shard(dim) for dim in range(lead))]
    return [([placed], [placed, *[None] * len(block_size)]) for placed in placements]


def _modifiers(rest: tuple[Any, ...]) -> tuple[Modifiers, tuple[Any, ...]]:
    """The modifiers, and the flags behind them, of what follows cu_seqlens."""
    end = NUM_NUMBERS + NUM_MODIFIERS
    return Modifiers(*rest[NUM_NUMBERS:end]), rest[end:]


def _modified_placements(
    q: Any, k: Any, mods: Modifiers, packed: bool
) -> list[tuple[Any, Any, list[Any], list[Any]]]:
    """:func:`_placements` with those of the modifiers' fields and of their gradients."""
    found = []
    for full, statistic in _placements(k, packed):
        if full != Replicate() and mods.dropout_p > 0:
            continue
        over_heads = full == (Shard(1) if packed else Shard(2))
        over_batch = not over_heads and full == Shard(0)
        size = q.shape[-2] if over_heads else q.shape[0]
        dims = _sharded_dims(mods, packed, over_batch, over_heads)
        placed: list[Any] = [None] * NUM_MODIFIERS
        summed: list[Any] = [None] * NUM_MODIFIERS
        for at, (tensor, dim) in enumerate(dims):
            if tensor is None:
                continue
            if dim is not None and tensor.shape[dim] == size:
                placed[at] = summed[at] = Shard(dim)
            else:
                placed[at] = Replicate()
                summed[at] = Replicate() if full == Replicate() else Partial()
        found.append((full, statistic, placed, summed))
    return found


def _sharded_dims(
    mods: Modifiers, packed: bool, over_batch: bool, over_heads: bool
) -> list[tuple[Any, int | None]]:
    """The tensors among the modifiers, and in which dimension each has the batch entries, or the heads."""

    def dim(batch: int | None, head: int | None) -> int | None:
        return batch if over_batch else head if over_heads else None

    four, intervals = dim(0, 1), dim(0, 0 if packed else 1)
    slopes = dim(None, 0) if mods.slopes is None or len(mods.slopes.shape) == 1 else dim(0, 1)
    return [
        (mods.bias, four),
        (mods.mask, four),
        (mods.document_q, dim(0, None)),
        (mods.document_k, dim(0, None)),
        (mods.prefix_lens, dim(0, None)),
        (mods.hidden_rows, intervals),
        (mods.hidden_keys, intervals),
        (mods.blocks, four),
        (mods.slopes, slopes),
        (mods.sinks, dim(None, 0)),
        (mods.rng, None),
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
