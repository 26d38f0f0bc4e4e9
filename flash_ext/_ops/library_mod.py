"""The operators ``flash_ext::fwd_mod`` and ``flash_ext::bwd_mod``: attention with masks, biases and the rest.

They take the arguments of ``fwd`` and ``bwd`` with the fields of :class:`.modifiers.Modifiers` in between.
``flash_ext::condense`` brings the tensor of a mask into the form that kernels read. The extension module
registers schemas, the GPU implementations, autograd and autocast (csrc/api/); this module adds the CPU
implementations, shapes for tracing, vmap and FLOP formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._cpu import condensed, tiles
from .library import (
    _C,
    fake_results,
    flops_bwd,
    flops_fwd,
    is_built,
    register_sharding_rules,
    result_dtype,
)
from .modifiers import NAMES, Modifiers
from .spec import AttnSpec, wants_lse

# ---- arguments -----------------------------------------------------------------------------------------
# fwd_mod: q, k, v | cu_seqlens_q, cu_seqlens_k | max_seqlen_q, max_seqlen_k, scale, window_size_left,
#          window_size_right | the modifiers | want_row_max | deterministic, backend, wide, want_lse
# bwd_mod: dout, q, k, v, out, lse, dlse | the same up to the modifiers | need_* of qkv, bias, slopes, sinks |
#          deterministic, backend, wide
# `wide` and `want_lse` are missing where they are left at False and True.

NUM_MODIFIERS = len(NAMES)


def modifier_arguments(mods: Modifiers) -> tuple[Any, ...]:
    """The fields in the operators' order; written out, which is fast and which compilers can trace."""
    return (
        mods.bias, mods.mask, mods.document_q, mods.document_k, mods.prefix_lens, mods.hidden_rows,
        mods.hidden_keys, mods.blocks, mods.slopes, mods.sinks, mods.rng, mods.softcap, mods.dropout_p,
        mods.block_rows, mods.block_cols, mods.sink_tokens, mods.chunk, mods.top_left,
    )  # fmt: skip


def _split(rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], Modifiers, tuple[Any, ...]]:
    """What follows v, or dlse: (cu_seqlens and the five numbers), the modifiers, the flags at the end."""
    return rest[:7], Modifiers(*rest[7 : 7 + NUM_MODIFIERS]), rest[7 + NUM_MODIFIERS :]


def checked(rest: tuple[Any, ...], flags: list[bool]) -> tuple[Any, ...]:
    """What the checks of the extension take: all but the flags at the end that have defaults."""
    return rest[: len(rest) - len(flags)]


# ---- CPU -----------------------------------------------------------------------------------------------


def cpu_fwd_mod(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    head, mods, (want_row_max, _, _, *flags) = _split(rest)
    _C.check_fwd_mod(q, k, v, *checked(rest, flags))
    cu_seqlens_q, cu_seqlens_k, _, _, *spec = head
    return tiles.forward(
        q, k, v, AttnSpec(*spec), mods, cu_seqlens_q, cu_seqlens_k, want_row_max, result_dtype(q, flags),
        wants_lse(flags),
    )  # fmt: skip


def cpu_bwd_mod(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    head, mods, (need_qkv, need_bias, need_slopes, need_sinks, _, _, *wide) = _split(rest)
    _C.check_bwd_mod(dout, q, k, v, out, lse, dlse, *checked(rest, wide))
    need_bias, need_slopes, need_sinks = _given_needs(mods, need_bias, need_slopes, need_sinks)
    cu_seqlens_q, cu_seqlens_k, _, _, *spec = head
    *qkv, dbias, dslopes, dsinks = tiles.backward(
        dout, q, k, v, out, lse, AttnSpec(*spec), mods, dlse, cu_seqlens_q, cu_seqlens_k, need_bias,
        need_slopes, need_sinks, result_dtype(q, wide),
    )  # fmt: skip
    grads = (*(qkv if need_qkv else (None,) * 3), dbias, dslopes, dsinks)
    like = _gradients_are_like(q, k, v, lse, mods, wide)
    return tuple(
        t.new_empty(0, dtype=dtype) if grad is None else grad for grad, (t, dtype) in zip(grads, like)
    )


def _gradients_are_like(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mods: Modifiers, wide: list[bool]
) -> list[tuple[Tensor, torch.dtype]]:
    """What each gradient belongs to, and its dtype; one that is not needed has shape (0,)."""
    bias = q if mods.bias is None else mods.bias
    modifiers = (bias, *(lse if t is None else t for t in (mods.slopes, mods.sinks)))
    return [*((t, result_dtype(q, wide)) for t in (q, k, v)), *((t, t.dtype) for t in modifiers)]


def _given_needs(mods: Modifiers, need_bias: bool, need_slopes: bool, need_sinks: bool) -> tuple[bool, ...]:
    """What is absent has no gradient, whatever is asked."""
    asked = ((need_bias, mods.bias), (need_slopes, mods.slopes), (need_sinks, mods.sinks))
    return tuple(needed and t is not None for needed, t in asked)


# ---- shapes for tracing --------------------------------------------------------------------------------


def fake_fwd_mod(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    register_sharding_rules()
    _, _, (want_row_max, _, _, *flags) = _split(rest)
    _C.check_fwd_mod(q, k, v, *checked(rest, flags))
    out, lse = fake_results(q, v, result_dtype(q, flags), wants_lse(flags))
    *batch, rows, heads, _ = q.shape
    return out, lse, lse.new_empty((*batch, heads, rows) if want_row_max else 0)


def fake_bwd_mod(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    register_sharding_rules()
    head, mods, (need_qkv, need_bias, need_slopes, need_sinks, _, _, *wide) = _split(rest)
    _C.check_bwd_mod(dout, q, k, v, out, lse, dlse, *checked(rest, wide))
    needs = (*(need_qkv,) * 3, *_given_needs(mods, need_bias, need_slopes, need_sinks))
    like = _gradients_are_like(q, k, v, lse, mods, wide)
    return tuple(
        t.new_empty(t.shape if needed else 0, dtype=dtype) for (t, dtype), needed in zip(like, needs)
    )


# ---- condensed masks -----------------------------------------------------------------------------------


def cpu_condense(x: Tensor, block_rows: int = 0, block_cols: int = 0) -> Tensor:
    _C.check_condense(x, block_rows, block_cols)
    return condensed.condense(x, block_rows, block_cols)


def fake_condense(x: Tensor, block_rows: int = 0, block_cols: int = 0) -> Tensor:
    register_sharding_rules()
    _C.check_condense(x, block_rows, block_cols)
    shape = condensed.condensed_shape(x.shape, x.dtype == torch.bool, block_rows, block_cols)
    return x.new_empty(shape, dtype=torch.int32)


def vmap_condense(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, block_rows: int = 0, block_cols: int = 0
) -> tuple[Tensor, int]:
    own = (x.select(in_dims[0] or 0, i) for i in range(info.batch_size))
    return torch.stack([torch.ops.flash_ext.condense.default(t, block_rows, block_cols) for t in own]), 0


# ---- vmap ----------------------------------------------------------------------------------------------


def _mapped_by_calls(op: Any) -> Any:
    """One call per mapped element: right for every argument, and no faster than a loop.

    A dropout that is not mapped drops the same weights in every element.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        calls = [
            op(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        results = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return results, (0,) * len(results)

    return rule


# ---- registration --------------------------------------------------------------------------------------

if is_built:
    _ops = torch.ops.flash_ext
    _library = torch.library.Library("flash_ext", "IMPL")
    _library.impl("fwd_mod", cpu_fwd_mod, "CPU")
    _library.impl("bwd_mod", cpu_bwd_mod, "CPU")
    torch.library.register_fake("flash_ext::fwd_mod", fake_fwd_mod, lib=_library)
    torch.library.register_fake("flash_ext::bwd_mod", fake_bwd_mod, lib=_library)
    _library.impl("condense", cpu_condense, "CPU")
    torch.library.register_fake("flash_ext::condense", fake_condense, lib=_library)
    torch.library.register_vmap("flash_ext::condense", vmap_condense, lib=_library)
    torch.library.register_vmap("flash_ext::fwd_mod", _mapped_by_calls(_ops.fwd_mod.default), lib=_library)
    torch.library.register_vmap("flash_ext::bwd_mod", _mapped_by_calls(_ops.bwd_mod.default), lib=_library)
    register_flop_formula(_ops.fwd_mod, get_raw=True)(flops_fwd)
    register_flop_formula(_ops.bwd_mod, get_raw=True)(flops_bwd)
