"""Exact attention for PyTorch: FlashAttention kernels for NVIDIA GPUs, and a CPU implementation.

Functions: :func:`attention`, :func:`attention_varlen`, :func:`append_kv`,
:func:`scaled_dot_product_attention`, :func:`merge_attention_states`, the functional pair :func:`forward` and
:func:`backward` with :func:`dropout_rng`, :func:`set_batch_invariant` and :func:`is_batch_invariant`,
:func:`enable_sdpa` and :func:`disable_sdpa` for PyTorch's own attention, :func:`explain` for what a call
would run, and :func:`count` for what did; :func:`quantize_fp8` and :func:`attention_fp8`.
Values: :class:`AuxRequest`, :class:`AuxOutput`, :class:`Fp8Inputs` and :class:`Rotary`.
Modules: :mod:`flash_ext.masks`, :mod:`flash_ext.nn`, :mod:`flash_ext.distributed`, :mod:`flash_ext.serving`,
:mod:`flash_ext.compat`, :mod:`flash_ext.integrations`.
"""

from . import distributed, masks, nn
from ._append import Rotary, append_kv
from ._attention import AuxOutput, AuxRequest, attention, attention_varlen
from ._batch_invariance import is_batch_invariant, set_batch_invariant
from ._count import count
from ._explain import explain
from ._fp8 import Fp8Inputs, attention_fp8, quantize_fp8
from ._log import logged as _logged
from ._merge import merge_attention_states
from ._ops.arguments import dropout_rng
from ._pair import backward, forward
from ._sdpa import scaled_dot_product_attention
from ._sdpa_override import disable_sdpa, enable_sdpa

# These are what is called; with FLASH_EXT_LOG unset they stay the functions themselves.
attention, attention_varlen = _logged(attention), _logged(attention_varlen)
forward, backward = _logged(forward), _logged(backward)
append_kv = _logged(append_kv)
merge_attention_states, dropout_rng = _logged(merge_attention_states), _logged(dropout_rng)
scaled_dot_product_attention = _logged(scaled_dot_product_attention)
attention_fp8, quantize_fp8 = _logged(attention_fp8), _logged(quantize_fp8)
set_batch_invariant, is_batch_invariant = _logged(set_batch_invariant), _logged(is_batch_invariant)

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "Fp8Inputs",
    "Rotary",
    "append_kv",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "backward",
    "compat",
    "count",
    "disable_sdpa",
    "distributed",
    "dropout_rng",
    "enable_sdpa",
    "explain",
    "forward",
    "integrations",
    "is_batch_invariant",
    "masks",
    "merge_attention_states",
    "nn",
    "quantize_fp8",
    "scaled_dot_product_attention",
    "serving",
    "set_batch_invariant",
]

# These use the names above.
from . import compat, integrations, serving  # noqa: E402


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
