"""PyTorch's own attention on these kernels: :func:`enable_sdpa` and :func:`disable_sdpa`.

``torch.nn.functional.scaled_dot_product_attention`` asks a selector for a backend and calls that backend's
operator. Two things are changed, through torch's registry of flash-attention implementations:

* The operators of three backends get implementations on the dispatch key CUDA (csrc/api/sdpa.cpp). That of
  flash serves calls without a mask, ``varlen_attn`` and jagged nested tensors; the memory-efficient one calls
  with ``attn_mask``, and causal ones whose lengths differ, which the selector never gives to the first; and
  cuDNN's those of them with grouped heads, which it gives to neither. What the kernels do not serve goes to
  the implementation that was there.
* The selector's order puts the first two first; else cuDNN would get the calls on Hopper.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from ._log import logged, note
from ._ops.library import is_built

# The name in torch's registry, for torch.nn.attention.activate_flash_attention_impl.
NAME = "flash_ext"

# Held from the first look at what is active to the last change: torch's registry has no lock of its own.
_switching = threading.RLock()

# What was active when :func:`enable_sdpa` came, for :func:`disable_sdpa`.
_previous: str | None = None

_FIRST = (SDPBackend.FLASH_ATTENTION.value, SDPBackend.EFFICIENT_ATTENTION.value)


@logged
def enable_sdpa() -> contextlib.ExitStack:
    """Lets PyTorch's own attention functions run on flash_ext's kernels.

    That is ``F.scaled_dot_product_attention``, with masks as well, ``torch.nn.attention.varlen_attn``, jagged
    nested tensors, torch's ``context_parallel``, and what is built on them, forward and backward, compiled or
    not. Calls that the kernels do not serve (dropout, float32, paged caches and so on) run as before. CPU
    tensors are not affected. :func:`flash_ext.count` tells which ran here and why others did not; a GPU
    without kernels, or none at all, is warned of once.

    The selector's order becomes flash, memory-efficient, then the others as they were. The order that torch
    chooses by itself is installed at the first call, so that one tiny call is made on the current GPU; enable
    after forking processes, not before.

    The switch is one of the process, and threads may turn it while others attend: every call of an operator
    is served here or as before, and a backward takes what either forward left. Of ``with`` statements that
    overlap in time, the one that switched on switches off.

    Returns:
        An object that may be ignored or used in a ``with`` statement, at whose end the implementation that
        was active before is again: none, another one, or this one.

    Raises:
        ImportError: the extension module is missing; the message says what mends it.

    Example:
        >>> with flash_ext.enable_sdpa():
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    if not is_built:
        from ._ops.library import _C

        _C.fwd  # noqa: B018  raises, in words
    global _previous
    with _switching:
        active = current_flash_attention_impl()
        if active != NAME:
            _warn_without_gpu()
            register_flash_attention_impl(NAME, register_fn=_Active)
            activate_flash_attention_impl(NAME)
            _previous = active
    undo = contextlib.ExitStack()
    if active != NAME:
        undo.callback(disable_sdpa)
    return undo


@logged
def disable_sdpa() -> None:
    """Takes back what :func:`enable_sdpa` did; does nothing if flash_ext is not active.

    The operators' previous implementations and the selector's previous order are in force again, and so is
    another implementation of torch's registry that was active then.
    """
    with _switching:
        if current_flash_attention_impl() == NAME:
            previous = _previous
            restore_flash_attention_impl()
            if previous is not None:
                activate_flash_attention_impl(previous)


@functools.cache
def _warn_without_gpu() -> None:
    """Once; that a GPU has no kernels says the first call on it (csrc/api/sdpa.h)."""
    if not torch.cuda.is_available():
        words = "flash_ext.enable_sdpa() serves CUDA tensors, and torch sees no GPU: all runs as before."
        warnings.warn(words, stacklevel=3)


class _Active:
    """The handle that torch's registry keeps while flash_ext is the active implementation."""

    # Operators come before the selector's order and go after it: in our order torch's flash kernels would get
    # what torch gives to cuDNN. Only a call that has chosen its operator when all is taken back gets them.

    def __init__(self) -> None:
        with _switching:
            torch.ops.flash_ext._set_sdpa("CUDA")
            try:
                self._order = _prefer_own_backends()
            except BaseException:
                torch.ops.flash_ext._set_sdpa("")
                raise
        note("PyTorch's attention runs on flash_ext")

    def remove(self) -> None:
        """Called by the registry when something else is activated, or nothing."""
        global _previous
        with _switching:
            _previous = None
            if self._order is not None:
                torch._C._set_sdp_priority_order(self._order)
            torch.ops.flash_ext._set_sdpa("")
        note("PyTorch's attention runs as before")


def _prefer_own_backends() -> list[int] | None:
    """Puts the overridden backends first and returns the order as it was; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    # torch installs its default order at the first selection, over whatever was set before. Every backend
    # takes this call.
    probe = torch.empty(1, 1, 64, 64, dtype=torch.float16, device="cuda")
    try:
        torch._fused_sdp_choice(probe, probe, probe)
    except RuntimeError:
        # The caller allows none that is there. What is allowed is a state of the process, which other threads
        # see; but then they cannot attend either.
        with sdpa_kernel(SDPBackend.MATH):
            torch._fused_sdp_choice(probe, probe, probe)
    order: list[int] = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([*_FIRST, *(backend for backend in order if backend not in _FIRST)])
    return order
