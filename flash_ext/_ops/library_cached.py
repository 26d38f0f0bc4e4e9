"""The operators over a cache of keys and values as PyTorch sees them; library.py has the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from .._cpu import behind, cached
from .library import _C, fake_results, is_built
from .modifiers import Modifiers
from .spec import AttnSpec

# max_seqlen_q, max_seqlen_k, scale, window_size_left, window_size_right, slopes, sinks, softcap, backend.
# Behind them stand ``want_lse``, ``tree``, ``k_descale``, ``v_descale``, ``mask``, ``document_q``,
# ``document_k`` and ``bias`` where they have not their defaults.
NUM_OPTIONS = 9


def cpu_fwd_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    options, (want_lse, *later) = options[:NUM_OPTIONS], _behind(*options[NUM_OPTIONS:])
    _C.check_fwd_cached(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, *options, *later)
    _, _, scale, left, right, slopes, sinks, softcap, _ = options
    places = cached.Places(cu_seqlens_k, seqused_k, block_table)
    tree, k_descale, v_descale, mask, document_q, document_k, bias = later
    mods = Modifiers(
        bias=bias, mask=mask, document_q=document_q, document_k=document_k, slopes=slopes, sinks=sinks,
        softcap=softcap,
    )  # fmt: skip
    spec = AttnSpec(scale, left, right)
    out, lse = cached.forward(q, k, v, spec, cu_seqlens_q, places, mods, tree, k_descale, v_descale)
    return out, lse if want_lse else lse.new_empty(0)


def fake_fwd_cached(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    num_checked = 4 + NUM_OPTIONS
    want_lse, *later = _behind(*rest[num_checked:])
    _C.check_fwd_cached(q, k, v, *rest[:num_checked], *later)
    return fake_results(q, v, q.dtype, want_lse)


def _behind(
    want_lse: bool = True,
    tree: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    mask: Tensor | None = None,
    document_q: Tensor | None = None,
    document_k: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Any, ...]:
    """What stands behind the options, where defaults may be left out."""
    return want_lse, tree, k_descale, v_descale, mask, document_q, document_k, bias


def flops_fwd_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
    **__: Any,
) -> int:
    """Two products; lengths are read from the device, and while tracing the room of a sequence stands in."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    rows = q.shape[0] * q.shape[1] if cu_seqlens_q is None else q.shape[0]
    pages = 1 if block_table is None else block_table.shape[1]
    room = max_seqlen_k or k.shape[-3] * pages
    per_score = 2 * q.shape[-2] * (q.shape[-1] + v.shape[-1])
    traced = any(isinstance(t, FakeTensor) or t.is_meta for t in (q, seqused_k) if t is not None)
    if seqused_k is None or traced:
        return rows * room * per_score
    lengths = seqused_k.long().clamp(min=0)
    if cu_seqlens_q is None:
        return int(lengths.sum().item()) * q.shape[1] * per_score
    return int((cu_seqlens_q.diff().long() * lengths[:batch]).sum().item()) * per_score


def cpu_append_kv(*arguments: Any) -> None:
    _C.check_append_kv(*_with_descales(arguments))
    cached.append(*arguments)


def fake_append_kv(*arguments: Any) -> None:
    _C.check_append_kv(*_with_descales(arguments))


def _with_descales(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of ``append_kv``: torch leaves out k_descale and v_descale at the end where they are None."""
    return (*arguments, *(None,) * (11 - len(arguments)))


def cpu_append_behind(*arguments: Any) -> tuple[Tensor, Tensor]:
    _C.check_append_behind(*arguments)
    k_new, v_new, k_cache, v_cache, lengths, block_table, entries, *others = arguments
    ends = behind.Ends(lengths, block_table, entries)
    return behind.append(k_new, v_new, k_cache, v_cache, ends, *others)


def fake_append_behind(*arguments: Any) -> tuple[Tensor, Tensor]:
    _C.check_append_behind(*arguments)
    k_new, q = arguments[0], arguments[10]
    new_lengths = k_new.new_empty(k_new.shape[0], dtype=torch.int32)
    return new_lengths, k_new.new_empty(0) if q is None else q.new_empty(q.shape)


def _refuse_vmap(*_: Any) -> Any:
    raise NotImplementedError("vmap over attention with a cache is not implemented; call in a loop.")


if is_built:
    _library = torch.library.Library("flash_ext", "IMPL")
    _library.impl("fwd_cached", cpu_fwd_cached, "CPU")
    torch.library.register_fake("flash_ext::fwd_cached", fake_fwd_cached, lib=_library)
    torch.library.register_vmap("flash_ext::fwd_cached", _refuse_vmap, lib=_library)
    _library.impl("append_kv", cpu_append_kv, "CPU")
    torch.library.register_fake("flash_ext::append_kv", fake_append_kv, lib=_library)
    _library.impl("append_behind", cpu_append_behind, "CPU")
    torch.library.register_fake("flash_ext::append_behind", fake_append_behind, lib=_library)
    torch.library.register_vmap("flash_ext::append_behind", _refuse_vmap, lib=_library)
    register_flop_formula(torch.ops.flash_ext.fwd_cached, get_raw=True)(flops_fwd_cached)
