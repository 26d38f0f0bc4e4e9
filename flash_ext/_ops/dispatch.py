"""From the public functions to the operators: which operator, by which road, and words for wrong types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._cpu.tiles import accumulator_dtype
from .arguments import check_generator, checked_dropout_p, checked_rng, dropout_rng, normalise
from .functorch import ModifiedGradientFunction, apply_modified_under_transforms, apply_under_transforms
from .library import _C
from .library_mod import modifier_arguments
from .modifiers import Modifiers
from .spec import default_scale

_is_compiling = torch.compiler.is_compiling
_in_functorch = torch._C._are_functorch_transforms_active

# What `causal` may be besides a bool, and whether it aligns at the top left.
ALIGNMENTS = {"bottom_right": False, "top_left": True}

# ---- calls without modifiers ---------------------------------------------------------------------------


def run_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: Any,
    window: tuple[int, int],
    deterministic: bool,
    path: str | None,
) -> tuple[Tensor, Tensor]:
    """Calls ``fwd`` by the route that the situation needs; the last one is the everyday one.

    A compiler must see the operator itself, torch.func transforms need a Python autograd function, and
    everything else takes the extension's own entry, which costs less than half of torch.ops.
    """
    if softmax_scale is not None and isinstance(softmax_scale, Tensor):
        refuse_tensor_scale()
    if _is_compiling():
        options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, deterministic, path)
        result: tuple[Tensor, Tensor] = torch.ops.flash_ext.fwd.default(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options)
        )
        return result
    if max_seqlen_q is not None or max_seqlen_k is not None:
        max_seqlen_q, max_seqlen_k = _bound(max_seqlen_q), _bound(max_seqlen_k)
    try:
        if _in_functorch():
            options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, deterministic, path)
            return apply_under_transforms(
                q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options)
            )
        left, right = window
        return _C.fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, left,
            right, deterministic, path,
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError):
        options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, deterministic, path)
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
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, (left, right), deterministic, path = options
        return _C.bwd(
            *tensors, _bound(max_seqlen_q), _bound(max_seqlen_k), softmax_scale, causal, left, right,
            deterministic, path,
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
) -> tuple[Tensor, Tensor]:
    """:func:`run_fwd` with an out of ``out_dtype``, None for the dtype of q; a wider one has no gradient."""
    if out_dtype is None or not _is_wide("out_dtype", out_dtype, q):
        return run_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    if not _is_compiling():
        _explain_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    result: tuple[Tensor, Tensor] = torch.ops.flash_ext.fwd.default(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options), True
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


def _explain_fwd(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *options: Any
) -> None:
    """Raises in words where an argument of a forward has a wrong type."""
    _explain_tensors(q=q, k=k, v=v)
    _explain_tensors(True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _explain_options(*options)


def _explain_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, cu_q: Any, cu_k: Any, *options: Any
) -> None:
    """The same for a backward."""
    _explain_tensors(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    _explain_tensors(True, dlse=dlse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    _explain_options(*options)


def _is_wide(name: str, dtype: Any, q: Any) -> bool:
    """Whether results of ``dtype`` are those that the operators call wide; what else is allowed is that of q.

    It is true for float32 inputs and float32 as well: under autocast they become 16-bit ones.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype or None, got {type(dtype).__qualname__}.")
    _explain_tensors(q=q)
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
    asked: dict[str, Any],
    *,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    draws: bool = False,
    want_row_max: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and row_max of a call that names modifiers; ``fwd`` if none of them turns out to be on.

    Args:
        options: what :func:`run_fwd` takes after cu_seqlens_k, with ``causal`` as the caller wrote it.
        asked: the keywords of :class:`flash_ext._ops.arguments.ModifierOptions`.
        generator: where dropout's random numbers come from if ``draws``.
        rng: seed and offset, if it does not draw.
        want_row_max: also return the largest final score of every row.
        out_dtype: that of out, None for the dtype of q.
    """
    if not _is_compiling():
        _explain_tensors(q=q, k=k, v=v)
        _explain_tensors(True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        table = getattr(asked["bias"], "table", None)
        _refuse_forward_mode(q, k, v, asked["attn_mask"], table, asked["alibi_slopes"], asked["sinks"])
    options, top_left = resolve_causal(q, k, cu_seqlens_q, options)
    if generator is not None:
        check_generator(generator, q.device)
    if draws and checked_dropout_p(asked["dropout_p"]) > 0:
        rng = dropout_rng(q.device, generator)
    else:
        rng = _given_rng(q, rng, asked["dropout_p"])
    mods = normalise(q, k, cu_seqlens_q, top_left=top_left, rng=rng, **asked)
    if mods is None and not want_row_max:
        return *run_fwd_as(out_dtype, q, k, v, cu_seqlens_q, cu_seqlens_k, *options), None
    *numbers, deterministic, path = operator_options(q, *options)
    wide = (True,) if out_dtype is not None and _is_wide("out_dtype", out_dtype, q) else ()
    differentiates = _in_functorch() and not wide
    call = apply_modified_under_transforms if differentiates else torch.ops.flash_ext.fwd_mod.default
    result: tuple[Tensor, Tensor, Tensor] = call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *numbers, *modifier_arguments(mods or Modifiers()), want_row_max,
        deterministic, path, *wide,
    )  # fmt: skip
    return result


GRADIENTS = ("q", "k", "v", "attn_mask", "bias", "alibi_slopes", "sinks")


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
    asked: dict[str, Any],
    rng: Tensor | None,
    needs: tuple[str, ...],
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The gradients named in ``needs``, in its order; those of q, k and v in ``grad_dtype``."""
    if not _is_compiling():
        _explain_tensors(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
        _explain_tensors(True, dlse=dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options, top_left = resolve_causal(q, k, cu_seqlens_q, options)
    _check_needs(needs, asked)
    rng = _given_rng(q, rng, asked["dropout_p"])
    mods = normalise(q, k, cu_seqlens_q, top_left=top_left, rng=rng, keep_repeats=True, **asked)
    tensors = (dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k)
    if mods is None:
        named = dict(zip("qkv", run_bwd_as(grad_dtype, *tensors, *options)))
        return tuple(named[name] for name in needs)
    *numbers, deterministic, path = operator_options(q, *options)
    groups = ({"q", "k", "v"}, {"attn_mask", "bias"}, {"alibi_slopes"}, {"sinks"})
    wanted = [bool(group & {*needs}) for group in groups]
    call = ModifiedGradientFunction.apply if _in_functorch() else torch.ops.flash_ext.bwd_mod.default
    wide = grad_dtype is not None and _is_wide("grad_dtype", grad_dtype, q)
    grads = call(*tensors, *numbers, *modifier_arguments(mods), *wanted, deterministic, path, wide)
    dq, dk, dv, dbias, dslopes, dsinks = grads
    named = dict(zip(GRADIENTS, (dq, dk, dv, dbias, dbias, dslopes, dsinks)))
    for name in {*GRADIENTS[3:]} & {*needs}:
        if name == "bias":
            named[name] = asked[name].gradient(named[name])
        else:
            named[name] = named[name].reshape(asked[name].shape).to(asked[name].dtype)
    return tuple(named[name] for name in needs)


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


def _check_needs(needs: Any, asked: dict[str, Any]) -> None:
    if not isinstance(needs, (tuple, list)) or any(name not in GRADIENTS for name in needs):
        raise ValueError(f"needs must be a tuple of names out of {GRADIENTS}, got {needs!r}.")
    for name in needs:
        if name in GRADIENTS[3:] and asked[name] is None:
            raise ValueError(f"needs names {name}, which is not given.")
    if "attn_mask" in needs and getattr(asked["attn_mask"], "dtype", None) == torch.bool:
        raise ValueError("needs names attn_mask, but a bool mask has no gradient.")


def resolve_causal(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, options: tuple[Any, ...]
) -> tuple[tuple[Any, ...], bool]:
    """The options with ``causal`` as a bool, and whether the alignment is at the top left.

    With equal lengths of a dense call both alignments are the same one.
    """
    causal = options[3]
    top_left = False
    if isinstance(causal, str):
        if causal not in ALIGNMENTS:
            raise ValueError(f'causal must be a bool, "bottom_right" or "top_left", got {causal!r}.')
        top_left, causal = ALIGNMENTS[causal], True
        if cu_seqlens_q is None and q.dim() == 4 and k.dim() == 4 and q.shape[1] == k.shape[1]:
            top_left = False
    options = (*options[:3], causal, *options[4:])
    if not _is_compiling():
        _explain_options(*options)
    return options, top_left


def operator_options(
    q: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: Any,
    window: tuple[int, int],
    deterministic: bool,
    path: str | None,
) -> tuple[int, int, float, int, int, bool, str | None]:
    """The operator's options, with the defaults resolved and causal folded into the window.

    The entries of the extension module do the same (csrc/api/bindings.cpp).
    """
    left, right = window
    if softmax_scale is None:
        softmax_scale = default_scale(q.shape[-1])
    if causal and right >= -1:
        right = 0
    bounds = _bound(max_seqlen_q), _bound(max_seqlen_k)
    return *bounds, softmax_scale, left, right, deterministic, path


def _bound(max_seqlen: Any) -> Any:
    """A bound on lengths, 0 if unknown; one in a tensor is not read: that would wait for the device."""
    return 0 if max_seqlen is None or isinstance(max_seqlen, Tensor) else max_seqlen


def refuse_tensor_scale() -> None:
    """Raises: pybind11 would take a tensor of one element for the number in it."""
    raise TypeError(
        "softmax_scale must be a number, got Tensor. It would get no gradient; pass a number, and multiply q "
        "by a factor that learns."
    )


# ---- words for arguments of a wrong type ---------------------------------------------------------------
# The everyday call asks for them only after a failure, and pays nothing for them.


def _explain_tensors(may_be_none: bool = False, /, **tensors: Any) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not (may_be_none and value is None):
            wanted = "a torch.Tensor or None" if may_be_none else "a torch.Tensor"
            raise TypeError(f"{name} must be {wanted}, got {type(value).__qualname__}.")
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


def _explain_options(
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    softmax_scale: Any,
    causal: Any,
    window: Any,
    deterministic: Any,
    path: Any,
) -> None:
    # What pybind11 converts: anything with __index__ is an int, with __float__ a float, with __bool__ a bool.
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not is_pair or not all(hasattr(value, "__index__") for value in window):
        raise TypeError(f"window must be a pair of ints (left, right), got {window!r}.")
    for name, value in {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}.items():
        if value is not None and not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int or None, got {type(value).__qualname__}.")
    if isinstance(softmax_scale, Tensor):
        refuse_tensor_scale()
    if softmax_scale is not None and not hasattr(softmax_scale, "__float__"):
        raise TypeError(f"softmax_scale must be a float or None, got {type(softmax_scale).__qualname__}.")
    for name, value in {"causal": causal, "deterministic": deterministic}.items():
        if not hasattr(value, "__bool__"):
            raise TypeError(f"{name} must be a bool, got {type(value).__qualname__}.")
    if path is not None and not isinstance(path, str):
        raise TypeError(f"path must be a str or None, got {type(path).__qualname__}.")
