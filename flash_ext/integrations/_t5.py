"""What T5 and its relatives in transformers need besides the registries, put in place by ``register()``.

Their attention makes its bias itself, (1, heads, queries, keys), before it asks the registry, and for cross
attention as many zeros. While a model runs on flash_ext, it makes the bias by distance instead, (heads,
distances), as small as the weights; :func:`flash_ext.integrations.transformers.attention_forward` knows it by
its two dimensions. It is a plain tensor, which layers share: gradient checkpointing and copies between
devices treat it like the bias.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from ..masks import RelativePosition

# Families whose attention classes are alike, by the name of the folder and of the class.
FAMILIES = {
    "t5": "T5Attention",
    "mt5": "MT5Attention",
    "umt5": "UMT5Attention",
    "longt5": "LongT5Attention",
    "pop2piano": "Pop2PianoAttention",
    "switch_transformers": "SwitchTransformersAttention",
}

_ours: set[str] = set()  # values of attn_implementation


def hand_on_distances(name: str) -> None:
    """Makes the families hand on the bias by distance while their attn_implementation is ``name``.

    Left as they are: those that a version of transformers does not have, or whose attention does not ask the
    registry, as in transformers 4.
    """
    _ours.add(name)
    for family, attention in FAMILIES.items():
        try:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        except ModuleNotFoundError:
            continue
        cls = getattr(module, attention, None)
        if cls is None or not hasattr(module, "ALL_ATTENTION_FUNCTIONS") or hasattr(cls, "_flash_ext_serves"):
            continue
        cls._flash_ext_serves = True
        cls.compute_bias = _by_distance(cls.compute_bias)
        if "position_bias" in inspect.signature(cls.forward).parameters:
            cls.forward = _without_zeros(cls.forward)


def relative_position(by_distance: Tensor) -> RelativePosition | None:
    """The bias of a layer, from what it was handed; None if that says that there is none."""
    return RelativePosition(by_distance, bucketing="clip") if by_distance.shape[1] else None


def hides_later_keys(module: Any) -> bool:
    """What an attention module says of itself; True if it says nothing.

    In some versions of transformers, 5.17 among them, UMT5 says no in its decoder, too. So a table in a
    decoder counts for more: only attention to the decoder's own tokens has one.
    """
    has_table = getattr(module, "_flash_ext_serves", False) and module.has_relative_attention_bias
    return bool(has_table and module.is_decoder) or bool(getattr(module, "is_causal", True))


def _is_ours(module: Any) -> bool:
    return module.config._attn_implementation in _ours


def _by_distance(library: Any) -> Any:
    """A ``compute_bias`` that gives (heads, distances) where the last query has the position of the last key.

    A static cache is longer than what it holds; there it makes what the library makes.
    """

    @functools.wraps(library)
    def compute_bias(
        self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        at_the_end = isinstance(past_seen_tokens, int) and past_seen_tokens + query_length == key_length
        if not (_is_ours(self) and at_the_end):
            dense: Tensor = library(self, query_length, key_length, device, past_seen_tokens)
            return dense
        embedding = self.relative_attention_bias
        device = embedding.weight.device if device is None else device
        # Called as a module, since what shards or adapts modules acts where they are called.
        table = embedding(torch.arange(self.relative_attention_num_buckets, device=device)).t()
        reach = self.relative_attention_max_distance
        bias = RelativePosition(table, bidirectional=not self.is_decoder, max_distance=reach)
        # In float32, so that what the layers send back is not rounded where it is summed.
        return bias.by_distance(torch.promote_types(table.dtype, torch.float32)).squeeze(0)

    return compute_bias


def _without_zeros(library: Any) -> Any:
    """A ``forward`` that gives layers without a bias of their own one without distances."""
    place = list(inspect.signature(library).parameters).index("position_bias") - 1  # without self

    @functools.wraps(library)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("position_bias")
        if given is None and not self.has_relative_attention_bias and _is_ours(self):
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            nothing = states.new_empty(self.n_heads, 0)
            if len(args) > place:
                args = (*args[:place], nothing, *args[place + 1 :])
            else:
                kwargs["position_bias"] = nothing
        return library(self, *args, **kwargs)

    return forward
