"""Exact attention for PyTorch: FlashAttention kernels for NVIDIA GPUs, and a CPU implementation.

Functions: :func:`attention`, :func:`attention_varlen`, :func:`scaled_dot_product_attention`,
:func:`merge_attention_states`, the functional pair :func:`forward` and :func:`backward` with
:func:`dropout_rng`, :func:`enable_sdpa` and :func:`disable_sdpa` for PyTorch's own attention, :func:`explain`
for what a call would run, and :func:`count` for what did.
Values: :class:`AuxRequest` and :class:`AuxOutput`.
Modules: :mod:`flash_ext.masks`, :mod:`flash_ext.nn`, :mod:`flash_ext.distributed`, :mod:`flash_ext.serving`,
:mod:`flash_ext.fp8`, :mod:`flash_ext.compat`, :mod:`flash_ext.integrations`.
"""

from . import distributed, fp8, masks, nn, serving
from ._attention import AuxOutput, AuxRequest, attention, attention_varlen
from ._count import count
from ._explain import explain
from ._log import logged as _logged
from ._merge import merge_attention_states
from ._ops.arguments import dropout_rng
from ._pair import backward, forward
from ._sdpa import scaled_dot_product_attention
from ._sdpa_override import disable_sdpa, enable_sdpa

# These are what is called; with FLASH_EXT_LOG unset they stay the functions themselves.
attention, attention_varlen = _logged(attention), _logged(attention_varlen)
forward, backward = _logged(forward), _logged(backward)
merge_attention_states, dropout_rng = _logged(merge_attention_states), _logged(dropout_rng)
scaled_dot_product_attention = _logged(scaled_dot_product_attention)

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "attention",
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
    "fp8",
    "integrations",
    "masks",
    "merge_attention_states",
    "nn",
    "scaled_dot_product_attention",
    "serving",
]

# These use the names above.
from . import compat, integrations  # noqa: E402


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
