"""From what a caller writes to what the operators take: every argument checked in words and in one shape.

Checks read metadata only, so they neither wait for a device nor break a graph.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._masks.atoms import Dense, if_exchanged
from .._masks.biases import Bias, DenseBias
from .._masks.lower import terms_for
from .._masks.operands import operands_of
from .._masks.value import Mask, Sizes, for_one_call
from .modifiers import Modifiers
from .prepared import check_devices, prepared
from .words import refuse_kind

if TYPE_CHECKING:
    from torch import Generator


class Asked(NamedTuple):
    """What a call asks for beyond scale and window, as the caller wrote it: :func:`flash_ext.attention`."""

    mask: Mask | Tensor | None = None
    bias: Bias | Tensor | None = None
    sinks: Tensor | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0


def modifiers_of(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    asked: Asked,
    causal: bool,
    window: tuple[int, int],
    rng: Tensor | None,
    keep_repeats: bool = False,
) -> tuple[tuple[int, int], Modifiers | None]:
    """The window and the modifiers of a call as the operators take them; None when nothing is asked for.

    Args:
        q, k, cu_seqlens_q: of the call; their shapes are needed, their own checks are the operators'.
        causal, window: as in :func:`flash_ext.attention`.
        rng: seed and offset for dropout; drawn or given, whatever dropout_p is.
        keep_repeats: leave an expanded bias as it is, because its gradient is wanted in its own shape.

    Raises:
        TypeError, ValueError: naming the argument, what it holds and what it should.
    """
    sizes = _sizes(q, k, cu_seqlens_q)
    softcap = _number("softcap", asked.softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (off) or a positive finite number, got {softcap}.")
    dropout_p = checked_dropout_p(asked.dropout_p)
    shown = prepared(mask_value(asked.mask), q, sizes, bool(causal), window)
    bias, slopes = added(bias_value(asked.bias, q), q, sizes, keep_repeats)
    sinks = asked.sinks
    if sinks is not None:
        sinks = _checked_sinks(sinks, q, sizes)
    if bias is None and slopes is None and sinks is None and softcap == 0 and dropout_p == 0:
        return shown.window, None if shown.is_plain else shown.mods
    mods = replace(
        shown.mods,
        bias=bias,
        slopes=slopes,
        sinks=sinks,
        rng=rng if dropout_p > 0 else None,
        softcap=softcap,
        dropout_p=dropout_p,
    )
    return shown.window, mods


# ---- values -------------------------------------------------------------------------------------------


def mask_value(mask: Any) -> Mask | None:
    """A mask as a value.

    Raises:
        TypeError: it is neither a mask nor a bool tensor.
    """
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            hint = "For 0 and 1 pass .bool()."
            if mask.is_floating_point():
                hint = f"A float tensor is added: bias=tensor. {hint}"
            raise TypeError(f"mask must be torch.bool, got {mask.dtype}. {hint}")
        return for_one_call(Dense(mask))
    if not isinstance(mask, Mask):
        hint = " A bias goes into bias=." if isinstance(mask, Bias) else ""
        if "flex_attention" in type(mask).__module__:
            hint = " Build one with flash_ext.masks.BlockMask.from_torch."
        refuse_kind("mask", mask, wanted="a mask of flash_ext.masks, a bool tensor or None", hint=hint)
    return mask


def bias_value(bias: Any, q: Tensor) -> Bias | None:
    """The same of a bias, whose tensors must be where q is.

    Raises:
        TypeError, ValueError: it is neither a bias nor a float tensor, or on another device.
    """
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        if not bias.is_floating_point():
            cure = "For a mask of 0 and 1 pass mask=tensor.bool(), for numbers to be added .float()"
            if bias.dtype == torch.bool:
                cure = "Give it as mask=, where True takes part"
            raise TypeError(f"bias must be floating point, got {bias.dtype}. {cure}.")
        value: Bias = DenseBias(bias)
    elif not isinstance(bias, Bias):
        hint = " A mask goes into mask=." if isinstance(bias, Mask) else ""
        refuse_kind("bias", bias, wanted="a bias of flash_ext.masks, a float tensor or None", hint=hint)
    else:
        value = bias
    check_devices(value, "bias", q)
    return value


def added(
    bias: Bias | None, q: Tensor, sizes: Sizes, keep_repeats: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Bias and slopes in the shapes of the operators."""
    if bias is None:
        return None, None
    terms = terms_for(None, bias, sizes)
    if terms.bias is not None:
        _check_bias_dtype(terms.bias, q)
    return operands_of(terms, sizes, _statistic(q), keep_repeats)


def _sizes(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None) -> Sizes:
    packed = cu_seqlens_q is not None
    layout = "(total, num_heads, head_dim)" if packed else "(batch, seqlen, num_heads, head_dim)"
    for name, t in (("q", q), ("k", k)):
        if t.dim() != (3 if packed else 4):
            hint = " Packed sequences go into attention_varlen." if not packed and t.dim() == 3 else ""
            raise ValueError(f"{name} must have shape {layout}, got {_shape(t)}.{hint}")
    if cu_seqlens_q is None:
        return Sizes(False, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {_shape(cu_seqlens_q)}.")
    return Sizes(True, cu_seqlens_q.shape[0] - 1, q.shape[1], q.shape[0], k.shape[0])


# ---- numbers -------------------------------------------------------------------------------------------


def _number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Tensor) or not hasattr(value, "__float__"):
        hint = " It would get no gradient; pass a number." if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be a number, got {type(value).__qualname__}.{hint}")
    return float(value)


def bound(max_seqlen: Any) -> Any:
    """A bound on lengths, 0 if unknown; one in a tensor is not read: that would wait for the device."""
    return 0 if max_seqlen is None or isinstance(max_seqlen, Tensor) else max_seqlen


def checked_dropout_p(dropout_p: Any) -> float:
    p = _number("dropout_p", dropout_p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must be a probability from 0 to 1, got {p}.")
    return p


# ---- dropout's random numbers --------------------------------------------------------------------------


def dropout_rng(device: torch.device | str, generator: Generator | None = None) -> Tensor:
    """Seed and offset of one call's dropout, drawn on the device: no host synchronisation.

    :func:`flash_ext.attention` draws its own; this is for :func:`flash_ext.forward` and
    :func:`flash_ext.backward`, which must be given the same. Drawing advances the generator as
    ``torch.randint`` of two int64 values does, inside a CUDA graph at every replay.

    Source: Philox, Salmon et al. 2011, as philox.py has it.

    Args:
        device: where the attention runs.
        generator: a generator on that device; None is the device's default one, which
            ``torch.manual_seed`` sets.

    Returns:
        (2,) int64.

    Raises:
        TypeError, ValueError: the generator is none, or is on another device.
    """
    device = torch.device(device)
    if generator is None:
        return torch.randint(0, 2**63 - 1, (2,), device=device)
    check_generator(generator, device)
    return torch.randint(0, 2**63 - 1, (2,), device=device, generator=generator)


def check_generator(generator: Any, device: torch.device) -> None:
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__qualname__}.")
    if generator.device.type != device.type or (device.index or 0) != (generator.device.index or 0):
        raise ValueError(
            f"generator must be on the device of q, {device}, got {generator.device}. "
            f'Make one with torch.Generator("{device}").'
        )


def checked_rng(rng: Any, q: Tensor) -> Tensor:
    """A given seed and offset, as :func:`dropout_rng` returns them."""
    if not isinstance(rng, Tensor):
        raise TypeError(f"rng must be a torch.Tensor or None, got {type(rng).__qualname__}.")
    if rng.dtype != torch.int64 or rng.shape != (2,):
        raise ValueError(
            f"rng must be torch.int64 of shape (2,), got {rng.dtype} of shape {_shape(rng)}. "
            "Draw it with flash_ext.dropout_rng(q.device)."
        )
    _check_device(rng, "rng", q)
    return rng


# ---- masks and biases ----------------------------------------------------------------------------------


def _check_bias_dtype(t: Tensor, q: Tensor) -> None:
    if t.dtype in (torch.float32, q.dtype):
        return
    device = q.device.type
    if torch.amp.autocast_mode.is_autocast_available(device) and torch.is_autocast_enabled(device):
        if t.dtype == torch.get_autocast_dtype(device):
            return
    raise TypeError(
        f"bias must be torch.float32 or the dtype of q, {q.dtype}, got {t.dtype}. Cast it with "
        f".to({q.dtype}) or .float()."
    )


# ---- tensors -------------------------------------------------------------------------------------------


def _checked_sinks(sinks: Any, q: Tensor, sizes: Sizes) -> Tensor:
    """In the dtype of the row statistics."""
    if not isinstance(sinks, Tensor):
        refuse_kind("sinks", sinks, True)
    if not sinks.is_floating_point():
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}. Convert it with .float().")
    _check_device(sinks, "sinks", q)
    if sinks.shape != (sizes.num_heads,):
        hint = if_exchanged(sizes, lambda other: sinks.shape == (other.num_heads,))
        raise ValueError(
            f"sinks must have shape (num_heads,), here ({sizes.num_heads},), got {_shape(sinks)}.{hint}"
        )
    statistic: Tensor = sinks.to(_statistic(q)).contiguous()
    return statistic


def _statistic(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check_device(t: Tensor, name: str, q: Tensor) -> None:
    if t.device != q.device:
        raise ValueError(
            f"{name} must be on the device of q, {q.device}, got {t.device}. Move it with .to(q.device)."
        )


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)
