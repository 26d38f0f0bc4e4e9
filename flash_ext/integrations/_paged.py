"""Continuous batching of transformers: names, the checks of the library, and what its paged cache holds.

``generate_batch`` runs the requests of a step as packed sequences of one entry, (1, tokens). Each layer puts
its new keys into a paged cache, which gives back the keys of all requests, packed as well, or where they lie.
What a request sees follows from that alone, so the names registered here have no function for masks.

The library asks for an implementation by a name that differs between its versions:

- transformers 4.57 takes any name, and builds a mask of tokens * cache for all but one.
- Others put "paged|" before the name themselves.
- 5.23 takes three names and those with "flash" in them, and removes "paged|" from what a user gives. The name
  for the time of ``generate_batch`` is one of our own there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..serving import append_kv

_ours: dict[str, str] = {}  # values of attn_implementation, and under which of them generate_batch runs
_MARK = "_flash_ext_serves"
# Where a table of pages keeps what the first of its layers found out for all.
_PLACES = "flash_ext_places"


def register(name: str, forward: Callable[..., Any]) -> None:
    """Lets ``generate_batch`` run models whose attn_implementation is ``name`` or "paged|" and the name.

    Args:
        name: what is registered for ``generate``.
        forward: the attention function for the paged cache.

    A version of the library that is not known here is left as it is: it refuses the names in its own words,
    or :func:`updated` refuses its cache.
    """
    from transformers import AttentionInterface

    package = "transformers.generation.continuous_batching"
    api = importlib.import_module(f"{package}.continuous_api")
    manager = getattr(api, "ContinuousBatchingManager", None)
    has_switch = hasattr(manager, "switch_to_cb_friendly_attn")
    prefixed = f"paged|{name}"
    paged = f"{name}_paged" if has_switch else prefixed
    for spelling in (name, prefixed, paged):
        _ours[spelling] = paged
    # As the library does with its own: a compiler would copy a cache that is changed in place.
    forward = torch.compiler.disable(forward)
    for spelling in {prefixed, paged}:
        AttentionInterface.register(spelling, forward)
    if manager is None or hasattr(manager, _MARK):
        return
    setattr(manager, _MARK, True)
    if has_switch:
        manager.switch_to_cb_friendly_attn = _switching(manager.switch_to_cb_friendly_attn)
        _allow_block_tables(importlib.import_module(f"{package}.initialization"))
    processor: Any = getattr(api, "ContinuousBatchProcessor", None)
    if hasattr(processor, "return_attention_mask"):
        processor.return_attention_mask = _without_mask(processor.return_attention_mask)
        manager.__init__ = _refusing(manager.__init__)


def _switching(library: Any) -> Any:
    """A ``switch_to_cb_friendly_attn`` that knows our names; the manager gives the model its own one back."""

    @functools.wraps(library)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        name = model.config._attn_implementation
        if name not in _ours:
            return library(self, model, *args, **kwargs)
        if name != _ours[name]:
            model.set_attn_implementation(_ours[name])
            self._original_attn_impl = name
        return None

    return switch_to_cb_friendly_attn


def _allow_block_tables(initialization: Any) -> None:
    """Lets steps in which every request has one token read the pages where they lie, without a copy.

    Not with sliding windows, whose pages are rings. Where the library has other parts than are known here,
    keys are copied.
    """
    wanted = "ensure_decode_fast_path_is_available"
    parts = (wanted, "group_layers_by_attn_type", "ATTN_TYPE_TO_ALLOCATOR")
    if not all(hasattr(initialization, part) for part in parts):
        return
    library = getattr(initialization, wanted)

    @functools.wraps(library)
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
        allocators = initialization.ATTN_TYPE_TO_ALLOCATOR
        if config._attn_implementation in _ours and all(
            allocators[kind].supports_block_table for kind in initialization.group_layers_by_attn_type(config)
        ):
            return None
        return library(config, cb_config, *args, **kwargs)

    setattr(initialization, wanted, ensure_decode_fast_path_is_available)


def _without_mask(library: Any) -> Any:
    """A ``return_attention_mask`` that says no for our names."""

    @functools.wraps(library)
    def return_attention_mask(self: Any) -> Any:
        return self.config._attn_implementation not in _ours and library(self)

    return return_attention_mask


def _refusing(library: Any) -> Any:
    """An ``__init__`` of the manager of transformers 4 that refuses models which would fail in its thread."""

    @functools.wraps(library)
    def __init__(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        name = model.config._attn_implementation
        if name in _ours:
            if name != _ours[name]:
                raise ValueError(
                    f"continuous batching does not run with attn_implementation={name!r} in this version of "
                    f"transformers. Call model.set_attn_implementation({_ours[name]!r}) first."
                )
            layer_types = getattr(model.config, "layer_types", None)
            windows = "sliding_attention" in layer_types if layer_types else _window_of_all(model.config)
            if windows:
                raise _windows_are_wrong()
        library(self, model, *args, **kwargs)

    return __init__


def _window_of_all(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is not None


def _windows_are_wrong() -> NotImplementedError:
    return NotImplementedError(
        "continuous batching of models with sliding windows is not supported in this version of "
        "transformers: its cache gives other keys than those of the window where a sequence is longer. "
        "transformers 5.23 gives the right ones."
    )


class Keys(NamedTuple):
    """What a layer sees after its new keys and values went into the cache.

    Attributes:
        k, v: for :func:`flash_ext.attention_varlen`, packed or in pages.
        places: its arguments that say where in k and v the keys of each request lie.
        window: how many keys a row sees, itself among them; None for all.
    """

    k: Tensor
    v: Tensor
    places: dict[str, Any]
    window: int | None


def updated(cache: Any, layer: int, key: Tensor, value: Tensor, given: dict[str, Any]) -> Keys:
    """Puts new keys and values of a layer into the library's paged cache.

    Args:
        cache: the library's ``PagedAttentionCache``.
        layer: the index of the layer.
        key, value: (1, heads_k, tokens, head_dim), those of the requests one behind the other.
        given: what the library passes along; changed.

    Raises:
        NotImplementedError: a cache that is not known here, or one that gives wrong keys.
    """
    if hasattr(cache, "layer_to_allocator"):
        return _from_allocators(cache, layer, key, value, given)
    if not hasattr(cache, "sliding_windows"):
        raise NotImplementedError(
            f"a cache of type {type(cache).__qualname__} is not known here; continuous batching is tested "
            "with transformers 4.57 and 5.23."
        )
    if cache.sliding_windows[layer] != 1:
        raise _windows_are_wrong()
    read, write = given["read_index"], given["write_index"]
    k, v = cache.update(
        key_states=key, value_states=value, layer_idx=layer, read_index=read, write_index=write
    )
    bounds = given["cu_seq_lens_k"]
    bounds = bounds["full_attention"] if isinstance(bounds, dict) else bounds
    return Keys(k, v, {"cu_seqlens_k": bounds.to(torch.int32)}, None)


def _from_allocators(cache: Any, layer: int, key: Tensor, value: Tensor, given: dict[str, Any]) -> Keys:
    """Of transformers 5.23, whose layers of one kind share an allocator; its answers are in ``given``."""
    allocator, tables = cache.layer_to_allocator[layer], given.get("block_table")
    key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=given)
    k, v = (t.squeeze(0).transpose(0, 1) for t in (key, value))
    bounds: Tensor = given["cu_seq_lens_k"].to(torch.int32)
    window: int | None = getattr(allocator, "sliding_window", None)
    if tables is None:
        return Keys(k, v, {"cu_seqlens_k": bounds}, window)
    k_cache, v_cache, table = given["k_cache"], given["v_cache"], given["block_table"]
    kept: dict[int, tuple[Tensor, Tensor]] = getattr(tables, _PLACES, {})
    # The first layer of a pass asks again: the numbers in a table change, in a CUDA graph between replays.
    if layer == allocator.layer_indices[0] or allocator.index not in kept:
        kept[allocator.index] = _places(bounds, table, k_cache.shape[1])
        setattr(tables, _PLACES, kept)
    lengths, slots = kept[allocator.index]
    append_kv(k, v, k_cache, v_cache, slots)
    # The library makes tables for steps of one token a request only.
    places = {"cu_seqlens_k": None, "seqused_k": lengths, "block_table": table, "max_seqlen_q": 1}
    return Keys(k_cache, v_cache, places, window)


def _places(bounds: Tensor, table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """How many keys each request has with its new one, and the slot of that; both (requests,).

    What fills a batch up has no keys, and pages -1. Its slot is the last row of page -1, which is -1.
    """
    lengths = bounds.diff()
    last = lengths.long() - 1
    page = table.gather(1, (last // page_size).clamp(min=0)[:, None]).squeeze(1).long()
    return lengths, page * page_size + last % page_size
