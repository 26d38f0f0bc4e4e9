"""Masks and biases as values: say which keys a row sees by joining small objects.

Masks combine with ``&``, ``|`` and ``~``, biases with ``+``. An expression means what boolean algebra says;
what no kernel executes is refused in words that name the way out. ``docs/masks.md`` has examples.

======================  ==============================================  ======================================
mask                    arguments                                       shows
======================  ==============================================  ======================================
:class:`Causal`         alignment                                       keys up to the row's own position
:class:`Window`         left, right, alignment                          so many keys before and after it
:class:`Chunks`         size, alignment                                 keys of its own chunk of positions
:class:`Prefix`         lens (batch,)                                   the first keys, whatever bands say
:class:`SinkTokens`     count                                           the first keys, up to the right bound
:class:`Documents`      ids (batch, q_len), ids_k                       keys of its own document
:class:`KeyMask`        keep (batch, k_len) bool                        keys that are True
:class:`HiddenRows`     intervals (batch, num_heads, k_len, 2 or 4)     keys whose intervals miss the row
:class:`HiddenKeys`     intervals (batch, num_heads, q_len, 2 or 4)     keys that its intervals miss
:class:`BlockMask`      blocks (batch, num_heads, m, n), block_size     blocks, and bits of those that are cut
:class:`Dense`          tensor (batch, num_heads, q_len, k_len) bool    pairs that are True
:class:`TokenTree`      words (batch, n) int64                          bits of the newest keys of a cache
======================  ==============================================  ======================================

Shortcuts: :func:`SlidingWindow`, :func:`ChunkCausal`, :func:`PrefixLM`, :func:`DocumentCausal`; builders:
:func:`prefix_tree`, :func:`spans`. Biases: :class:`DenseBias`, :class:`ALiBi`, :class:`RelativePosition`.
"""

from __future__ import annotations

from ._masks.atoms import (
    Causal,
    Chunks,
    Dense,
    Documents,
    HiddenKeys,
    HiddenRows,
    KeyMask,
    Prefix,
    SinkTokens,
    Window,
)
from ._masks.biases import ALiBi, Bias, DenseBias
from ._masks.block_mask import BlockMask
from ._masks.builders import ChunkCausal, DocumentCausal, PrefixLM, SlidingWindow, prefix_tree, spans
from ._masks.convert import from_xformers
from ._masks.describe import BiasDescription, Description
from ._masks.relative_position import RelativePosition
from ._masks.token_tree import TokenTree
from ._masks.value import Mask

__all__ = [
    "ALiBi",
    "Bias",
    "BiasDescription",
    "BlockMask",
    "Causal",
    "ChunkCausal",
    "Chunks",
    "Dense",
    "DenseBias",
    "Description",
    "DocumentCausal",
    "Documents",
    "HiddenKeys",
    "HiddenRows",
    "KeyMask",
    "Mask",
    "Prefix",
    "PrefixLM",
    "RelativePosition",
    "SinkTokens",
    "SlidingWindow",
    "TokenTree",
    "Window",
    "from_xformers",
    "prefix_tree",
    "spans",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
