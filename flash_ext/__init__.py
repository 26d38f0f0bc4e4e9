"""Exact attention for PyTorch: FlashAttention kernels for NVIDIA GPUs, and a CPU implementation.

Public names: :func:`attention`, :func:`attention_varlen`, :func:`scaled_dot_product_attention`,
:class:`BlockMask` for block-sparse attention, :class:`RelativePosition` for a bias by distance,
:func:`merge_attention_states`, the functional pair :func:`forward` and :func:`backward` with
:func:`dropout_rng`, :func:`set_batch_invariant` and :func:`is_batch_invariant`, and :func:`enable_sdpa` and
:func:`disable_sdpa` for PyTorch's own attention.
Modules: :mod:`flash_ext.masks`, :mod:`flash_ext.nn`, :mod:`flash_ext.distributed`, :mod:`flash_ext.compat`,
:mod:`flash_ext.integrations`.
"""

from . import distributed as distributed
from . import masks as masks
from . import nn as nn
from ._attention import attention, attention_varlen
from ._batch_invariance import is_batch_invariant, set_batch_invariant
from ._log import logged
from ._merge import merge_attention_states
from ._ops.arguments import dropout_rng
from ._pair import backward, forward
from ._sdpa import scaled_dot_product_attention
from ._sdpa_override import disable_sdpa, enable_sdpa
from .block_mask import BlockMask
from .relative_position import RelativePosition

# These are what is called; with FLASH_EXT_LOG unset they stay the functions themselves.
attention, attention_varlen = logged(attention), logged(attention_varlen)
forward, backward = logged(forward), logged(backward)
merge_attention_states, dropout_rng = logged(merge_attention_states), logged(dropout_rng)
scaled_dot_product_attention = logged(scaled_dot_product_attention)
set_batch_invariant, is_batch_invariant = logged(set_batch_invariant), logged(is_batch_invariant)

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "RelativePosition",
    "__version__",
    "attention",
    "attention_varlen",
    "backward",
    "disable_sdpa",
    "dropout_rng",
    "enable_sdpa",
    "forward",
    "is_batch_invariant",
    "merge_attention_states",
    "scaled_dot_product_attention",
    "set_batch_invariant",
]

# These use the names above.
from . import compat as compat  # noqa: E402
from . import integrations as integrations  # noqa: E402
