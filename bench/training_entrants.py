"""The attentions that a model is trained with, all of them causal and on (batch, seqlen, heads, head_dim)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# q (batch, seqlen, heads, head_dim), k and v with heads_k heads -> (batch, seqlen, heads, head_dim)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

OURS = "flash_ext"
SDPA_BACKENDS = {
    "sdpa": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "mem": SDPBackend.EFFICIENT_ATTENTION,
}
NAMES = (OURS, *SDPA_BACKENDS, "materialised")
DEFAULT_NAMES = (OURS, "sdpa", "cudnn", "materialised")


def is_ours(name: str) -> bool:
    """True for flash_ext itself, as it chooses its kernels or, ``flash_ext-sm80``, with its path named."""
    return name.partition("-")[0] == OURS


def check_names(names: list[str]) -> None:
    """Refuses names that no entrant has.

    Raises:
        ValueError: there is one.
    """
    for name in names:
        if name not in NAMES and not is_ours(name):
            raise ValueError(f"no entrant is called {name!r}; known: {', '.join(NAMES)}, {OURS}-PATH")


def make_attend(name: str) -> Attend:
    """The attention of a checked name. May raise anything, such as ImportError for a missing library."""
    if is_ours(name):
        import flash_ext

        return functools.partial(flash_ext.attention, causal=True, backend=name.partition("-")[2] or None)
    return materialised if name == "materialised" else functools.partial(sdpa, backend=SDPA_BACKENDS[name])


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    """``F.scaled_dot_product_attention``, heads in front; without a backend it chooses."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v by its formula. Of the scores the weights alone are kept."""
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q * q.shape[-1] ** -0.5, k, v))
    scores = q @ k.mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return (scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1) @ v).transpose(1, 2)


def chosen_backend(name: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Which kernel the entrant ``sdpa`` takes for tensors like these; empty for others, or if unknown."""
    if name != "sdpa":
        return ""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    try:
        number = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    except (AttributeError, RuntimeError, TypeError):  # a private function of torch
        return ""
    names = {backend.value: backend.name for backend in SDPBackend.__members__.values()}
    return names.get(int(number), "")
