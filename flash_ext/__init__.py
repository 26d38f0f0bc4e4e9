"""Exact attention for PyTorch: FlashAttention kernels for NVIDIA GPUs, and a CPU implementation.

Public names: :func:`attention`, :func:`attention_varlen`, :func:`scaled_dot_product_attention`,
:func:`merge_attention_states`, and the functional pair :func:`forward` and :func:`backward`.
"""

from .functional import attention, attention_varlen, backward, forward
from .merge import merge_attention_states
from .sdpa import scaled_dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "attention",
    "attention_varlen",
    "backward",
    "forward",
    "merge_attention_states",
    "scaled_dot_product_attention",
]
