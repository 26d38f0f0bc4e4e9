"""Calls that are kept: what the extension needs for a further call like one before.

That is their modifiers, their sizes, and the version counters of the tensors that they were made of
(csrc/api/prepared.h). A further call costs the host a third of one that reads its arguments in Python. The
mask keeps it, or the bias of a call without a mask. Calls with neither are kept by their sizes. Of a call
over a cache a mask keeps what it is to it, and the extension says whether that is right for the next one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._masks.biases import Bias
from .._masks.operands import may_be_copied, sources_of_bias, with_aligned_rows
from .._masks.value import Mask, Sizes, Value, is_capturing, is_traced
from .arguments import Asked, bound
from .library import _C
from .library_mod import modifier_arguments
from .modifiers import NAMES, Modifiers
from .prepared import Prepared, borders_for, kept_in, leaf_of_documents

_is_compiling = torch.compiler.is_compiling
_in_functorch = torch._C._are_functorch_transforms_active

MOST_CALLS = 64
BY_SIZES: dict[tuple[Any, ...], _C.PreparedCall] = {}  # calls without mask and bias
_NUMBERS = (float, int)
_DENSE = (Tensor, Parameter)  # a subclass of torch.Tensor wants to see the operators


def kept_call(
    q: Any, k: Any, mask: Any, bias: Any, softcap: Any, dropout_p: Any, scale: Any, causal: Any, window: Any
) -> _C.PreparedCall | None:
    """The call that is kept for these values, or sizes, and options."""
    if _is_compiling() or _in_functorch():
        return None
    holder = bias if mask is None else mask
    try:
        left, right = window
        if type(left) is not int or type(right) is not int:  # 1.0 is the key of 1, and refused
            return None
        if holder is None:
            if type(q) not in _DENSE or type(k) not in _DENSE:
                return None
            call = BY_SIZES[_by_sizes(q, k, causal, window)]
        else:
            partner, call = holder._calls[0 if mask is None else id(bias), causal, window]
            if mask is not None and partner is not bias:
                return None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # nested tensors have no sizes
        return None
    is_plain = type(softcap) in _NUMBERS and type(dropout_p) in _NUMBERS
    return call if is_plain and (scale is None or type(scale) in _NUMBERS) else None


def run_kept_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    scale: Any,
    causal: Any,
    window: Any,
    deterministic: bool | None,
    backend: str | None,
    mask: Any,
    bias: Any,
    sinks: Any,
    softcap: Any,
    dropout_p: Any,
) -> Tensor | None:
    """out of a kept call; None where there is none, or more to do than this.

    It is the shortest way, for layers of a model: they share a mask, and want out alone.
    """
    kept = kept_call(q, k, mask, bias, softcap, dropout_p, scale, causal, window)
    if kept is None or dropout_p != 0:
        return None
    if max_seqlen_q is not None or max_seqlen_k is not None:
        max_seqlen_q, max_seqlen_k = bound(max_seqlen_q), bound(max_seqlen_k)
    try:
        found = kept.fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, sinks, softcap, 0.0, None,
            False, deterministic, backend, False,
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError):
        return None  # the longer way refuses it in the caller's words
    return None if found is None else found[0]


def _copies_rows(q: Tensor) -> bool:
    """Whether kernels read rows of a bias that begin on 16 bytes sooner than others."""
    return q.is_cuda


def keep_call(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    asked: Asked,
    causal: Any,
    asked_window: Any,
    window: tuple[int, int],
    mods: Modifiers | None,
) -> _C.PreparedCall | None:
    """The call, which is kept where it may stand for another one; None where it may not."""
    mask, bias = asked.mask, asked.bias
    holder = bias if mask is None else mask
    if is_traced():
        return None
    if not (holder is None or isinstance(holder, Value)) or not (bias is None or isinstance(bias, Bias)):
        return None
    if type(causal) is not bool or type(asked_window) is not tuple or type(q) not in _DENSE:
        return None
    mods = mods or Modifiers()
    is_plain = not any(_is_asked(getattr(mods, name)) for name in NAMES if name not in _OWN)
    kept = None
    if isinstance(mask, Mask):
        kept = kept_in(mask)
        if kept is None or kept.versions() is None:
            return None
    sources = list(kept.tensors) if kept is not None else []
    missing = 0
    if bias is not None:
        of_bias = sources_of_bias(bias, mods.bias, mods.slopes)
        if of_bias is None:
            return None
        given, made_of = of_bias
        if (total := mods.bias) is not None:
            read, longest = total if given is None else given, max(q.shape[-3], k.shape[-3])
            if _copies_rows(q) and total.dim() == 4 and may_be_copied(read, longest, q.shape[-1]):
                if is_capturing():
                    return None
                mods = replace(mods, bias=with_aligned_rows(total))
                made_of = made_of if given is None else [*made_of, given]
            else:
                missing, mods = total.dim() - read.dim(), replace(mods, bias=read)
        sources += made_of
    if sources and q.is_cuda and is_capturing():
        return None
    call = _C.prepared_call(
        q, k, cu_seqlens_q, cu_seqlens_k, 0, 0, 1.0, *window, *modifier_arguments(mods)
    )  # fmt: skip
    if sources:
        call.watch(sources)
        call.bind_stream()
    call.set_missing_bias_dims(missing)
    if is_plain:
        call.set_plain()
    if cu_seqlens_q is None and (leaf := leaf_of_documents(mask)) is not None:
        call.expect_borders()
        call.watch([leaf.changes])
    if holder is None:
        _put(BY_SIZES, _by_sizes(q, k, causal, asked_window), call)
    else:
        partner = None if mask is None else bias
        _put(_calls_of(holder), (0 if mask is None else id(bias), causal, asked_window), (partner, call))
    return call


# What each call says anew, whatever the one said that was kept.
_OWN = ("sinks", "rng", "softcap", "dropout_p")


def _is_asked(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _by_sizes(q: Tensor, k: Tensor, causal: Any, window: Any) -> tuple[Any, ...]:
    """The key of a call in BY_SIZES."""
    return q.shape, k.shape, q.get_device(), causal, window


def packed_call(
    call: _C.PreparedCall | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mods: Modifiers | None,
    window: tuple[int, int],
    options: tuple[Any, ...],
    asked: Asked,
) -> tuple[Any, ...] | None:
    """What a dense call of documents is as one of packed sequences. The kept call is told, and runs so too.

    Returns:
        q, k, v, cu_seqlens_q, cu_seqlens_k, options and what else is asked for; None where it is none.
    """
    leaf = leaf_of_documents(asked.mask)
    if call is None or leaf is None or mods is None or not call.may_pack(q, k, v, asked.dropout_p):
        return None
    borders = borders_for(leaf, mods, Sizes(False, q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    call.set_borders(*(borders or (None, None)))
    if borders is None or not call.may_pack(q, k, v, asked.dropout_p):
        return None
    of_packed = (*options[:3], False, window, *options[5:])
    return *(t.flatten(0, 1) for t in (q, k, v)), *borders, of_packed, asked._replace(mask=None)


_OVER_CACHE = "over a cache"  # in keys, beside 0 and the numbers of biases


def kept_over_cache(
    mask: Any, q: Tensor, cu_seqlens_q: Tensor | None, causal: Any, window: Any
) -> Prepared | None:
    """What a mask is to a call over a cache, where it keeps that for calls of these sizes."""
    if type(causal) is not bool or type(window) is not tuple or _in_functorch():
        return None
    try:
        found, call = mask._calls[_OVER_CACHE, causal, window, q.shape]
        is_int = type(window[0]) is int and type(window[1]) is int  # 1. is the key of 1, and refused
        return found if is_int and call.fits(q, cu_seqlens_q) else None
    except (AttributeError, KeyError, TypeError):
        return None


def keep_over_cache(
    mask: Mask, q: Tensor, cu_seqlens_q: Tensor | None, causal: Any, window: Any, found: Prepared
) -> None:
    """Keeps it for :func:`kept_over_cache`, where it may stand for that of another call."""
    if _is_compiling() or _in_functorch() or torch._C._len_torch_dispatch_stack():
        return
    if type(causal) is not bool or type(window) is not tuple or type(q) not in _DENSE:
        return
    if any(type(side) is not int for side in window):
        return
    kept = kept_in(mask)
    if kept is None or kept.versions() is None or (kept.tensors and q.is_cuda and is_capturing()):
        return
    call = _C.prepared_call(  # whatever its keys are: fits() does not look at them
        q, q, cu_seqlens_q, None, 0, 0, 1.0, *found.window, *modifier_arguments(found.mods)
    )
    if kept.tensors:
        call.watch(list(kept.tensors))
        call.bind_stream()
    _put(_calls_of(mask), (_OVER_CACHE, causal, window, q.shape), (found, call))


def _calls_of(holder: Any) -> dict[tuple[Any, ...], Any]:
    try:
        calls: dict[tuple[Any, ...], Any] = holder._calls
    except AttributeError:
        calls = {}
        object.__setattr__(holder, "_calls", calls)
    return calls


def _put(calls: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[key] = value
