"""The functions of ``flash_attn.flash_attn_interface``, version 2.8, on functions of :mod:`flash_ext`.

What all of them share:

* Shapes: q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim); packed, called
  varlen here, (total, nheads, headdim) with ``cu_seqlens`` (batch + 1,) int32.
* dropout_p: probability of dropping a weight. Which ones a seed drops is not what flash-attn would drop.
* softmax_scale: None is 1 / sqrt(headdim).
* causal, window_size: aligned at the bottom right; window_size counts (left, right) keys inclusive, -1 is
  unlimited.
* softcap: 0 is off. It may go with dropout here.
* alibi_slopes: (nheads,) or (batch, nheads): slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
* deterministic: a gradient of q that repeats bit for bit.
* return_attn_probs: return (out, softmax_lse, S_dmask). The lse carries a gradient here. S_dmask is empty
  without dropout; with it, softmax weights with a minus where one was dropped, see
  :func:`._probabilities.signed_weights`.

On a GPU tensors are float16 or bfloat16, on the CPU also float32 and float64; headdim is any size up to 256,
and that of v may differ. Errors are those of :func:`flash_ext.attention`.

Source: the interface of flash-attn 2.8, https://github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import attention, attention_varlen, backward, dropout_rng, forward, masks, serving
from ..._count import counting, tally
from ..._log import logged
from . import _probabilities
from ._kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_Window = tuple[int, int]
# (out, softmax_lse, S_dmask) with return_attn_probs, else out.
_Result = Tensor | tuple[Tensor, Tensor, Tensor]


# ---- dense ---------------------------------------------------------------------------------------------


@logged
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """Attention of (batch, seqlen, nheads, headdim) tensors; arguments as the module says.

    Returns:
        out (batch, seqlen_q, nheads, headdim); with ``return_attn_probs`` also softmax_lse (batch, nheads,
        seqlen_q) float32 and S_dmask.
    """
    options = {
        "causal": causal, "window_size": tuple(window_size), "scale": softmax_scale, "softcap": softcap,
        "bias": _alibi(alibi_slopes), "deterministic": deterministic,
    }  # fmt: skip
    return _attend(q, k, v, dropout_p, return_attn_probs, None, options)


@logged
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """:func:`flash_attn_func` of one tensor qkv (batch, seqlen, 3, nheads, headdim), read in place."""
    q, k, v = _unpacked(qkv, "qkv", 3, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@logged
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """:func:`flash_attn_func` with kv (batch, seqlen_k, 2, nheads_k, headdim), read in place."""
    k, v = _unpacked(kv, "kv", 2, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


# ---- packed --------------------------------------------------------------------------------------------


@logged
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> _Result:
    """Attention of packed sequences; arguments as the module says.

    ``max_seqlen_q`` and ``max_seqlen_k`` are not needed here; as tensors they are not read, so that the host
    need not wait, unless weights are asked for. With ``block_table`` (batch, max_pages) k and v are pages
    (num_pages, page_size, nheads_k, headdim), ``cu_seqlens_k`` has the lengths, and there is no gradient and
    no dropout; max_seqlen_q then chooses kernels.

    Returns:
        out (total_q, nheads, headdim); with ``return_attn_probs`` also softmax_lse (nheads, total_q) and
        S_dmask (batch, nheads, max_seqlen_q, max_seqlen_k), both rounded up.
    """
    if block_table is not None:
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = _over_pages(
            q, k, v, bounds, None, block_table, dropout_p, softmax_scale, causal, window_size, softcap,
            alibi_slopes,
        )  # fmt: skip
        return (out, lse, q.new_empty(0)) if return_attn_probs else out
    options = {
        "causal": causal, "window_size": tuple(window_size), "scale": softmax_scale, "softcap": softcap,
        "bias": _alibi(alibi_slopes), "deterministic": deterministic, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    return _attend(q, k, v, dropout_p, return_attn_probs, (max_seqlen_q, max_seqlen_k), options)


@logged
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """:func:`flash_attn_varlen_func` of one tensor qkv (total, 3, nheads, headdim)."""
    q, k, v = _unpacked(qkv, "qkv", 3, 1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@logged
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """:func:`flash_attn_varlen_func` with kv (total_k, 2, nheads_k, headdim)."""
    k, v = _unpacked(kv, "kv", 2, 1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


# ---- the pairs that other libraries import ---------------------------------------------------------------
# Ring implementations ask inspect.getfullargspec() which keywords to pass, which sees nothing behind a
# decorator: so these have none.


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, softmax_lse, S_dmask and rng_state (2,) int64, without autograd; the last is for the backward."""
    with torch.no_grad():
        options = {
            "causal": causal, "window_size": (window_size_left, window_size_right), "scale": softmax_scale,
            "softcap": softcap, "bias": _alibi(alibi_slopes),
        }  # fmt: skip
        return _run(q, k, v, dropout_p, return_softmax, None, options)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients into dq, dk and dv (None: not wanted) and returns rowsum(dout * out).

    Its shape is (batch, nheads, seqlen_q rounded up to 128), float32. ``out`` and ``softmax_lse`` may belong
    to a softmax over more keys than k has, as in ring attention.
    """
    with torch.no_grad():
        options = {
            "causal": causal, "window_size": (window_size_left, window_size_right), "scale": softmax_scale,
            "softcap": softcap, "bias": _alibi(alibi_slopes), "deterministic": deterministic,
        }  # fmt: skip
        _write_gradients((dout, q, k, v, out, softmax_lse), (dq, dk, dv), dropout_p, rng_state, options)
        delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
        return torch.nn.functional.pad(delta, (0, _probabilities.rounded(q.shape[1]) - q.shape[1]))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`_flash_attn_forward` of packed sequences; softmax_lse is (nheads, total_q).

    ``zero_tensors`` asks for what is so anyhow: rows of no sequence are 0.
    """
    with torch.no_grad():
        if leftpad_k is not None:
            raise NotImplementedError(
                "leftpad_k is not supported; cut the keys and pass their own cu_seqlens_k."
            )
        if block_table is not None or seqused_k is not None:
            if return_softmax:
                raise NotImplementedError("return_softmax is not served over a cache. Leave it out.")
            bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            window = (window_size_left, window_size_right)
            out, lse = _over_pages(
                q, k, v, bounds, seqused_k, block_table, dropout_p, softmax_scale, causal, window, softcap,
                alibi_slopes,
            )  # fmt: skip
            return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64)
        options = {
            "causal": causal, "window_size": (window_size_left, window_size_right), "scale": softmax_scale,
            "softcap": softcap, "bias": _alibi(alibi_slopes), "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
        }  # fmt: skip
        return _run(q, k, v, dropout_p, return_softmax, (max_seqlen_q, max_seqlen_k), options)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """:func:`_flash_attn_backward` of packed sequences; ``zero_tensors`` as in the forward.

    Returns rowsum(dout * out) as (nheads, total_q + 128 * batch) float32, sequence i's rows from
    cu_seqlens_q[i] + 128 * i on, where flash-attn has them.
    """
    with torch.no_grad():
        options = {
            "causal": causal, "window_size": (window_size_left, window_size_right), "scale": softmax_scale,
            "softcap": softcap, "bias": _alibi(alibi_slopes), "deterministic": deterministic,
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        }  # fmt: skip
        _write_gradients((dout, q, k, v, out, softmax_lse), (dq, dk, dv), dropout_p, rng_state, options)
        batch, total = cu_seqlens_q.numel() - 1, q.shape[0]
        at = torch.arange(total, device=q.device)
        sequence = torch.searchsorted(cu_seqlens_q[1:].long(), at, right=True).clamp(max=max(batch - 1, 0))
        delta = q.new_zeros(q.shape[1], total + 128 * batch, dtype=torch.float32)
        delta[:, at + 128 * sequence] = (dout.float() * out.float()).sum(-1).t()
        return delta


# Names under which flash-attn keeps the same functions as operators.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


# ---- what they do --------------------------------------------------------------------------------------


def _unpacked(t: Tensor, name: str, count: int, dim: int) -> tuple[Tensor, ...]:
    if not isinstance(t, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(t).__qualname__}. Convert an array: torch.from_numpy."
        )
    if t.dim() != dim + 3 or t.shape[dim] != count:
        layout = ("batch, seqlen" if dim == 2 else "total") + f", {count}, nheads, headdim"
        raise ValueError(f"{name} must have shape ({layout}), got {tuple(t.shape)}.")
    return t.unbind(dim)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    return_attn_probs: bool,
    max_seqlens: tuple[int | Tensor, int | Tensor] | None,
    options: dict[str, Any],
) -> _Result:
    if not return_attn_probs:
        return _out_alone(q, k, v, dropout_p=dropout_p, **options)
    out, lse, weights, _ = _run(q, k, v, dropout_p, dropout_p > 0, max_seqlens, options)
    return out, lse, weights


def _out_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Without lse, which no forward makes for nobody."""
    if counting:
        tally("compat.flash_attn")
    q, k, v = (_with_unit_stride(t) for t in (q, k, v))
    out: Tensor
    if cu_seqlens_q is None:
        out = attention(q, k, v, **options)
    else:
        out = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return out


def _over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor, int | Tensor, int | Tensor],
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: _Window,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out and lse of packed queries over a cache; ``cu_seqlens_k`` has its lengths if nothing else does."""
    if counting:
        tally("compat.flash_attn")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise NotImplementedError("attention over a cache has no gradient. Call it under torch.no_grad().")
    cu_seqlens_q, cu_seqlens_k, *longest = bounds
    used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    most = [n if isinstance(n, int) else 0 for n in longest]
    found = serving.flash_attn_varlen_func(
        _with_unit_stride(q), k, v, most[0], cu_seqlens_q, most[1],
        cu_seqlens_k if block_table is None else None, used, dropout_p=dropout_p,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, block_table=block_table, return_softmax_lse=True,
    )  # fmt: skip
    return found[0], found[1]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    return_softmax: bool,
    max_seqlens: tuple[int | Tensor, int | Tensor] | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, weights and the random numbers of one call, differentiable where autograd is on."""
    if counting:
        tally("compat.flash_attn")
    if return_softmax and dropout_p <= 0:
        raise ValueError("return_softmax needs dropout_p > 0, as in flash-attn.")
    q, k, v = (_with_unit_stride(t) for t in (q, k, v))
    if dropout_p > 0:
        rng = dropout_rng(q.device)
        out, lse = forward(q, k, v, dropout_p=dropout_p, rng=rng, **options)
    else:
        out, lse = forward(q, k, v, **options)
        rng = q.new_zeros(2, dtype=torch.int64)
    weights = q.new_empty(0)
    if return_softmax:
        longest = None if max_seqlens is None else (int(max_seqlens[0]), int(max_seqlens[1]))
        with torch.no_grad():
            weights = _probabilities.signed_weights(q, k, rng, dropout_p, longest, **options)
    return out, lse, weights, rng


def _write_gradients(
    tensors: tuple[Tensor, ...],
    into: tuple[Tensor | None, ...],
    dropout_p: float,
    rng_state: Tensor | None,
    options: dict[str, Any],
) -> None:
    dout, q, k, v, out, lse = tensors
    q, k, v, out = (_with_unit_stride(t) for t in (q, k, v, out))
    if dropout_p > 0:
        if rng_state is None:
            raise ValueError(f"rng_state must be given with dropout_p {dropout_p}: that of the forward pass.")
        options = {**options, "dropout_p": dropout_p, "rng": rng_state}
    for target, grad in zip(into, backward(dout, q, k, v, out, lse, **options)):
        if target is not None:
            target.copy_(grad)


def _alibi(slopes: Tensor | None) -> masks.Bias | None:
    return None if slopes is None else masks.ALiBi(slopes)


def _with_unit_stride(t: Tensor) -> Tensor:
    """As flash-attn does: a copy where the last stride is not 1. What is no tensor is refused later."""
    if not isinstance(t, Tensor) or t.stride(-1) == 1 or t.shape[-1] == 1:
        return t
    return t.contiguous()


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
