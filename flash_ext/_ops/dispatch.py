"""From the public functions to the operators: which operator, by which road, and words for wrong types."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._cpu.tiles import accumulator_dtype
from .._masks.biases import ALiBi, DenseBias, terms_of
from .._masks.relative_position import RelativePosition
from .._masks.value import Value, is_traced
from .arguments import (
    Asked,
    bias_value,
    bound,
    check_generator,
    checked_dropout_p,
    checked_rng,
    dropout_rng,
    modifiers_of,
)
from .calls import keep_call, kept_call, packed_call
from .documents import dense, dense_rows, packed_rows
from .functorch import (
    ModifiedGradientFunction,
    apply_modified_under_transforms,
    apply_under_transforms,
    differentiates,
)
from .library import _C
from .library_mod import modifier_arguments
from .modifiers import Modifiers
from .prepared import leaf_of_documents
from .spec import default_scale
from .words import refuse_kind

_is_compiling = torch.compiler.is_compiling
_in_functorch = torch._C._are_functorch_transforms_active

# ---- calls without modifiers ---------------------------------------------------------------------------


def run_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float | None,
    causal: Any,
    window: tuple[int, int],
    deterministic: bool | None,
    backend: str | None,
    *,
    want_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Calls ``fwd`` by the route that the situation needs; the last one is the everyday one.

    A compiler and vmap must see the operator itself, torch.func transforms that differentiate need a Python
    autograd function, and everything else takes the extension's own entry, which costs less than half of
    torch.ops. Although ``want_lse`` is False, lse is there where transforms differentiate and where autograd
    keeps it.
    """
    if scale is not None and isinstance(scale, Tensor):
        refuse_tensor_scale()
    if _is_compiling():
        options = (max_seqlen_q, max_seqlen_k, scale, causal, window, deterministic, backend)
        result: tuple[Tensor, Tensor] = torch.ops.flash_ext.fwd.default(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options), *_flags(False, want_lse)
        )
        return result
    if max_seqlen_q is not None or max_seqlen_k is not None:
        max_seqlen_q, max_seqlen_k = bound(max_seqlen_q), bound(max_seqlen_k)
    try:
        if _in_functorch():
            options = (max_seqlen_q, max_seqlen_k, scale, causal, window, deterministic, backend)
            arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options))
            if differentiates():
                return apply_under_transforms(*arguments)
            mapped: tuple[Tensor, Tensor] = torch.ops.flash_ext.fwd.default(
                *arguments, *_flags(False, want_lse)
            )
            return mapped
        left, right = window
        return _C.fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, left,
            right, deterministic, backend, want_lse,
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError):
        options = (max_seqlen_q, max_seqlen_k, scale, causal, window, deterministic, backend)
        _explain_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
        raise


def run_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls ``bwd``; ``options`` as in :func:`run_fwd`."""
    if isinstance(options[2], Tensor):
        refuse_tensor_scale()
    tensors = (dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k)
    grads: tuple[Tensor, Tensor, Tensor]
    if _is_compiling() or _in_functorch():
        grads = torch.ops.flash_ext.bwd.default(*tensors, *operator_options(q, *options))
        return grads
    try:
        max_seqlen_q, max_seqlen_k, scale, causal, (left, right), deterministic, backend = options
        return _C.bwd(
            *tensors, bound(max_seqlen_q), bound(max_seqlen_k), scale, causal, left, right,
            deterministic, backend,
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError):
        _explain_bwd(*tensors, *options)
        raise


# Two of their own for wider results, so that everyday calls pay nothing for the question.


def run_fwd_as(
    out_dtype: torch.dtype | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *options: Any,
    want_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`run_fwd` with an out of ``out_dtype``, None for the dtype of q; a wider one has no gradient."""
    if out_dtype is None or not _is_wide("out_dtype", out_dtype, q):
        return run_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options, want_lse=want_lse)
    if not _is_compiling():
        _explain_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    result: tuple[Tensor, Tensor] = torch.ops.flash_ext.fwd.default(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options), *_flags(True, want_lse)
    )
    return result


def run_bwd_as(
    grad_dtype: torch.dtype | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`run_bwd` with gradients of ``grad_dtype``, None for the dtype of q."""
    tensors = (dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k)
    if grad_dtype is None or not _is_wide("grad_dtype", grad_dtype, q):
        return run_bwd(*tensors, *options)
    if not _is_compiling():
        _explain_bwd(*tensors, *options)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.flash_ext.bwd.default(
        *tensors, *operator_options(q, *options), True
    )
    return grads


def _flags(wide: bool, want_lse: bool) -> tuple[bool, ...]:
    """The last arguments of a forward, without those at their defaults, so that graphs do not name them."""
    return (wide,) * wide if want_lse else (wide, False)


def _explain_fwd(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *options: Any) -> None:
    """Raises in words where an argument of a forward has a wrong type."""
    explain_tensors(q=q, k=k, v=v)
    explain_tensors(True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    explain_options(*options)


def _explain_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, cu_q: Any, cu_k: Any, *options: Any
) -> None:
    """The same for a backward."""
    explain_tensors(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    explain_tensors(True, dlse=dlse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    explain_options(*options)


def _is_wide(name: str, dtype: Any, q: Any) -> bool:
    """Whether results of ``dtype`` are those that the operators call wide; what else is allowed is that of q.

    It is true for float32 inputs and float32 as well: under autocast they become 16-bit ones.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype or None, got {type(dtype).__qualname__}.")
    explain_tensors(q=q)
    wide = accumulator_dtype(q)
    if dtype not in (wide, q.dtype):
        allowed = f"the dtype of q, {q.dtype}" + ("" if wide == q.dtype else f", or {wide}")
        raise ValueError(f"{name} must be None, {allowed}, got {dtype}.")
    return dtype == wide


# ---- calls with modifiers ------------------------------------------------------------------------------


def run_modified_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: tuple[Any, ...],
    asked: Asked,
    *,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    draws: bool = False,
    want_row_max: bool = False,
    want_lse: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and row_max of a call that names modifiers; ``fwd`` if none of them turns out to be on.

    Args:
        options: what :func:`run_fwd` takes after cu_seqlens_k.
        asked: everything else but dropout's random numbers.
        generator: where dropout's random numbers come from if ``draws``.
        rng: seed and offset, if it does not draw.
        want_row_max: also return the largest final score of every row.
        want_lse: if not, lse may come without elements.
        out_dtype: that of out, None for the dtype of q.
    """
    is_checked = generator is None or (draws and asked.dropout_p != 0)  # else by nobody but this function
    if out_dtype is None and is_checked:
        kept = kept_call(q, k, *asked[:2], *asked[3:], *options[2:5])
        if kept is not None:
            if draws and asked.dropout_p > 0:
                rng, draws = dropout_rng(q.device, generator), False
            found = _run_kept(
                kept.fwd, q, k, v, cu_seqlens_q, cu_seqlens_k, bound(options[0]), bound(options[1]),
                options[2], asked.sinks, asked.softcap, asked.dropout_p, rng, want_row_max, options[5],
                options[6], want_lse,
            )  # fmt: skip
            if found is not None:
                return found  # type: ignore[no-any-return]
    if not _is_compiling():
        _explain_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
        values = (value for value in (asked.mask, asked.bias) if isinstance(value, Value))
        _refuse_forward_mode(
            q, k, v, asked.bias, asked.sinks, *(t for value in values for t in value._tensors())
        )
    if generator is not None:
        check_generator(generator, q.device)
    if draws and checked_dropout_p(asked.dropout_p) > 0:
        rng = dropout_rng(q.device, generator)
    else:
        rng = _given_rng(q, rng, asked.dropout_p)
    *first, causal, asked_window, deterministic, backend = options
    window, mods = modifiers_of(q, k, cu_seqlens_q, asked, causal, asked_window, rng)
    call = keep_call(q, k, cu_seqlens_q, cu_seqlens_k, asked, causal, asked_window, window, mods)
    packed = packed_call(call, q, k, v, mods, window, options, asked)
    if packed is not None:
        out, lse, row_max = run_modified_fwd(
            *packed, want_row_max=want_row_max, want_lse=want_lse, out_dtype=out_dtype
        )
        row_max = None if row_max is None else dense_rows(row_max, len(q))
        return dense(out, len(q)), dense_rows(lse, len(q)), row_max
    options = (*first, False, window, deterministic, backend)
    if mods is None and not want_row_max:
        plain = run_fwd_as(out_dtype, q, k, v, cu_seqlens_q, cu_seqlens_k, *options, want_lse=want_lse)
        return *plain, None
    *numbers, deterministic, backend = operator_options(q, *options)
    wide = out_dtype is not None and _is_wide("out_dtype", out_dtype, q)
    by_function = _in_functorch() and not wide and differentiates()
    run = apply_modified_under_transforms if by_function else torch.ops.flash_ext.fwd_mod.default
    flags = () if by_function else _flags(wide, want_lse)
    result: tuple[Tensor, Tensor, Tensor] = run(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *numbers, *modifier_arguments(mods or Modifiers()), want_row_max,
        deterministic, backend, *flags,
    )  # fmt: skip
    return result


def _run_kept(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a kept call gives; None where it does not serve, or refuses what is refused better later."""
    try:
        return call(*arguments)
    except (TypeError, ValueError, NotImplementedError):
        return None


GRADIENTS = ("q", "k", "v", "bias", "slopes", "sinks")


def run_modified_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: tuple[Any, ...],
    asked: Asked,
    rng: Tensor | None,
    needs: tuple[str, ...],
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The gradients named in ``needs``, in its order; those of q, k and v in ``grad_dtype``."""
    if grad_dtype is None and needs == GRADIENTS[:3]:
        kept = kept_call(q, k, *asked[:2], *asked[3:], *options[2:5])
        if kept is not None:
            qkv = _run_kept(
                kept.bwd, dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, bound(options[0]),
                bound(options[1]), options[2], asked.sinks, asked.softcap, asked.dropout_p, rng, options[5],
                options[6],
            )  # fmt: skip
            if qkv is not None:
                return qkv  # type: ignore[no-any-return]
    if not _is_compiling():
        explain_tensors(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
        explain_tensors(True, dlse=dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    explain_options(*options)
    sources = _sources_of_gradients(asked, q)
    _check_needs(needs, sources)
    rng = _given_rng(q, rng, asked.dropout_p)
    *first, causal, window, deterministic, backend = options
    asked_window = window
    window, mods = modifiers_of(q, k, cu_seqlens_q, asked, causal, window, rng, keep_repeats=True)
    if leaf_of_documents(asked.mask) is not None:
        kept = keep_call(q, k, cu_seqlens_q, cu_seqlens_k, asked, causal, asked_window, window, mods)
        packed = packed_call(kept, q, k, v, mods, window, options, asked)
        if packed is not None and _fits_backward(q, v, dout, out, lse, dlse):
            rows_q, rows_k, rows_v, cu_seqlens_q, cu_seqlens_k, options, asked = packed
            found = run_modified_bwd(
                dout.flatten(0, 1), rows_q, rows_k, rows_v, out.flatten(0, 1), packed_rows(lse),
                None if dlse is None else packed_rows(dlse), cu_seqlens_q, cu_seqlens_k, options, asked, None,
                needs, grad_dtype,
            )  # fmt: skip
            qkv = {*GRADIENTS[:3]}
            return tuple(dense(g, len(q)) if n in qkv else g for n, g in zip(needs, found))
    options = (*first, False, window, deterministic, backend)
    tensors = (dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k)
    if mods is None:
        named = dict(zip("qkv", run_bwd_as(grad_dtype, *tensors, *options)))
        return tuple(named[name] for name in needs)
    *numbers, deterministic, backend = operator_options(q, *options)
    wanted = [bool({*"qkv"} & {*needs}), *(name in needs for name in GRADIENTS[3:])]
    call: Callable[..., Any] = torch.ops.flash_ext.bwd_mod.default
    if _in_functorch():
        call = ModifiedGradientFunction.apply
    wide = grad_dtype is not None and _is_wide("grad_dtype", grad_dtype, q)
    grads = call(*tensors, *numbers, *modifier_arguments(mods), *wanted, deterministic, backend, wide)
    named = dict(zip(GRADIENTS, grads))
    for name in {*GRADIENTS[3:]} & {*needs}:
        source = sources[name]
        if isinstance(source, RelativePosition):
            named[name] = source.gradient(named[name])
        else:
            named[name] = named[name].reshape(source.shape).to(source.dtype)
    return tuple(named[name] for name in needs)


def _fits_backward(q: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> bool:
    """Whether these have the shapes of a dense call; others are refused further on, in its words."""
    shape, rows = (*q.shape[:3], v.shape[-1]), (q.shape[0], q.shape[2], q.shape[1])
    return dout.shape == out.shape == shape and lse.shape == rows and (dlse is None or dlse.shape == rows)


def _sources_of_gradients(asked: Asked, q: Tensor) -> dict[str, Any]:
    """What the gradients beside those of q, k and v belong to, by their names; None where there is none."""
    bias = bias_value(asked.bias, q)
    parts = () if bias is None else terms_of(bias)
    slopes = [part.slopes for part in parts if isinstance(part, ALiBi)]
    added: list[Any] = [
        part.tensor if isinstance(part, DenseBias) else part for part in parts if not isinstance(part, ALiBi)
    ]
    return {
        "bias": added[0] if len(added) == 1 else None,  # the sum of several has no gradient of its own
        "slopes": slopes[0] if slopes else None,
        "sinks": asked.sinks,
    }


def _refuse_forward_mode(*tensors: Any) -> None:
    """Raises if one of them carries a tangent, which the operator would drop."""
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                "forward-mode automatic differentiation of attention is not implemented; use reverse mode."
            )


def _given_rng(q: Tensor, rng: Tensor | None, dropout_p: float) -> Tensor | None:
    """The random numbers that a caller holds, because forward and backward must use the same."""
    if rng is not None:
        return checked_rng(rng, q)
    if checked_dropout_p(dropout_p) > 0:
        raise ValueError(
            f"rng must be given with dropout_p {dropout_p}, the same in forward and backward. Draw it with "
            "flash_ext.dropout_rng(q.device)."
        )
    return None


def _check_needs(needs: Any, sources: dict[str, Any]) -> None:
    if not isinstance(needs, (tuple, list)) or any(name not in GRADIENTS for name in needs):
        raise ValueError(f"needs must be a tuple of names out of {GRADIENTS}, got {needs!r}.")
    for name in needs:
        if name in GRADIENTS[3:] and sources[name] is None:
            what = {
                "bias": "one DenseBias or RelativePosition in bias=",
                "slopes": "an ALiBi in bias=",
                "sinks": "sinks=",
            }
            raise ValueError(f"needs names {name}, the gradient of {what[name]}, which is not given.")


def from_heads_first(layout: Any, q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(b, heads, seqlen, features) as (b, seqlen, heads, features).

    Raises:
        ValueError, TypeError: the layout is another one, or these are no tensors of four dimensions.
    """
    if type(q) is type(k) is type(v) is Tensor and layout == "bhsd" and q.dim() == k.dim() == v.dim() == 4:
        # The everyday call asks for no more than this; what it lets through is refused further on.
        try:
            heads, heads_k = q.shape[1], k.shape[1]
            if heads == heads_k or (heads > heads_k > 0 and heads % heads_k == 0):
                return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        except RuntimeError:  # nested and sparse tensors, which have words below
            pass
    _explain_heads_first(layout, q=q, k=k, v=v)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _explain_heads_first(layout: Any, **tensors: Any) -> None:
    if layout != "bhsd":
        raise ValueError(f'layout must be "bshd" or "bhsd", got {layout!r}.')
    for name, t in tensors.items():
        explain_tensors(**{name: t})
        if t.dim() != 4:
            hint = " Packed sequences go into attention_varlen." if name == "q" and t.dim() == 3 else ""
            raise ValueError(
                f"{name} must have shape (batch, num_heads, seqlen, head_dim), got {tuple(t.shape)}.{hint}"
            )
    q, k = tensors["q"], tensors["k"]
    heads, heads_k = q.shape[1], k.shape[1]
    if heads != heads_k and (heads < 1 or heads_k < 1 or heads % heads_k):
        length, length_k = q.shape[2], k.shape[2]
        is_default = length >= 1 and length_k >= 1 and length % length_k == 0
        hint = " Tensors of shape (batch, seqlen, num_heads, head_dim) need no layout." if is_default else ""
        # In the words of the operator, which cannot know that the layout is given.
        raise ValueError(
            "num_heads of q must be a positive multiple of num_heads of k and v, got "
            f"{heads} and {heads_k}.{hint}"
        )


def operator_options(
    q: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float | None,
    causal: Any,
    window: tuple[int, int],
    deterministic: bool | None,
    backend: str | None,
) -> tuple[int, int, float, int, int, bool, str | None]:
    """The operator's options, with the defaults resolved and causal folded into the window.

    The entries of the extension module do the same (csrc/api/bindings.cpp).
    """
    if isinstance(causal, str):  # true, whatever it says
        _refuse_word_for_causal(causal)
    left, right = window
    if scale is None:
        scale = default_scale(q.shape[-1])
    if causal and right >= -1:
        right = 0
    bounds = bound(max_seqlen_q), bound(max_seqlen_k)
    return *bounds, scale, left, right, bool(deterministic), backend


def refuse_tensor_scale() -> None:
    """Raises: pybind11 would take a tensor of one element for the number in it."""
    raise TypeError(
        "scale must be a number, got Tensor. It would get no gradient; pass a number, and multiply q "
        "by a factor that learns."
    )


def _refuse_word_for_causal(causal: str) -> NoReturn:
    raise TypeError(
        f'causal must be a bool, got {causal!r}. Alignments: mask=flash_ext.masks.Causal("top_left").'
    )


# ---- words for arguments of a wrong type ---------------------------------------------------------------
# The everyday call asks for them only after a failure, and pays nothing for them.


def explain_tensors(may_be_none: bool = False, /, **tensors: Any) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not (may_be_none and value is None):
            refuse_kind(name, value, may_be_none)
        if value is not None:
            check_strided(name, value)


def check_strided(name: str, t: Tensor) -> None:
    """Raises for a nested or sparse tensor, which no operator here takes."""
    if t.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one. Pass its values() and offsets() to "
            "attention_varlen, or call flash_ext.enable_sdpa() and PyTorch's own function."
        )
    if t.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {t.layout}. Call .to_dense().")


def explain_options(
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    scale: Any,
    causal: Any,
    window: Any,
    deterministic: Any,
    backend: Any,
) -> None:
    # What pybind11 converts: anything with __index__ is an int, with __float__ a float, with __bool__ a bool.
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not is_pair or not all(hasattr(value, "__index__") for value in window):
        raise TypeError(f"window_size must be a pair of ints (left, right), got {window!r}.")
    if any(value < -1 for value in window):
        raise ValueError(
            "window_size must be (left, right) with values of at least -1 (-1 is unlimited), got "
            f"{tuple(window)}."
        )
    for name, value in {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}.items():
        if value is not None and not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int or None, got {type(value).__qualname__}.")
    if isinstance(scale, Tensor):
        refuse_tensor_scale()
    if scale is not None and not hasattr(scale, "__float__"):
        raise TypeError(f"scale must be a float or None, got {type(scale).__qualname__}.")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}.")
    if isinstance(causal, str):
        _refuse_word_for_causal(causal)
    for name, value in {"causal": causal, "deterministic": deterministic}.items():
        if value is not None and not hasattr(value, "__bool__"):
            raise TypeError(f"{name} must be a bool, got {type(value).__qualname__}.")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a str or None, got {type(backend).__qualname__}.")


def check_bounds(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Any) -> None:
    """Looks at cu_seqlens on the CPU, where that is free; not at those of a compiler or a transform.

    Raises:
        ValueError: they decrease or leave the tensors.
    """
    if is_traced():
        return
    for name, cu_seqlens, rows in (("cu_seqlens_q", cu_seqlens_q, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        if cu_seqlens is None:  # keys in pages have no bounds
            continue
        # Whatever else is wrong with them is refused below the operators.
        is_plain = type(cu_seqlens) is Tensor and cu_seqlens.is_cpu
        if not is_plain or cu_seqlens.dim() != 1 or not isinstance(rows, Tensor) or rows.dim() != 3:
            return
        values = cu_seqlens.tolist()
        for start, end in itertools.pairwise([0, *values, rows.shape[0]]):
            if start > end:
                raise ValueError(
                    f"{name} must start at 0 or later, not decrease, and end within the {rows.shape[0]} rows "
                    f"that there are, got {end} after {start}."
                )
