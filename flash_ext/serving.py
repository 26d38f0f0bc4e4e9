"""What a server needs beside attention: caches, and results that do not depend on the batch.

* :func:`append_kv` writes new keys and values into a cache, :class:`Rotary` turns the keys on the way,
* :func:`attention_shared_prefix` reads pages once that all sequences of a batch begin with,
* :func:`set_batch_invariant` and :func:`is_batch_invariant`: a mode in which a sequence has the same bits in
  any batch, for training as well,
* :func:`flash_attn_varlen_func` and :func:`get_scheduler_metadata` as vLLM calls them,
* :func:`flash_attn_with_kvcache` as SGLang and FlashAttention-3 have it,
* :func:`flash_mla_with_kvcache` and :func:`get_mla_metadata` as FlashMLA has them.

Arguments of engines that are not served are accepted at their defaults and refused by name otherwise, and so
are arguments that these functions do not know, where None or False is taken for the default. Lengths and
tables stay on the device: nothing waits for it, and a CUDA graph follows what they hold at each replay. There
is no gradient over a cache. Keys and values have 16 bits (on the CPU also float32 and float64) or 8
(float8_e4m3fn, int8), pages have any size and any strides with a unit last one.

These arguments of engines are alike in all functions:

* q_descale, k_descale, v_descale: (batch, h_k) float32, any strides: what q, k and v of 8 bits are multiplied
  by. A q in float8_e4m3fn becomes bfloat16, or what ``out`` has. For 16-bit tensors they are all ones; other
  values are refused on the CPU and with FLASH_EXT_CHECK=1, and change nothing on a GPU, where looking at
  them would wait for it;
* num_splits: parts of the keys of a sequence with few queries, up to 256; 0, or any number above 1 beside
  scheduler_metadata, which would say how many: as many as shapes ask for. The CPU has no parts;
* scheduler_metadata changes no result: the kernels divide keys by lengths that they read themselves;
* fa_version, ver, pack_gqa change no result: they choose among kernels of flash-attn.

Source: the interfaces of vLLM 0.33 and of FlashAttention-3, https://github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._append import Rotary, append_behind, append_kv
from ._attention import AuxRequest, attention_varlen
from ._batch_invariance import is_batch_invariant, set_batch_invariant
from ._count import counting, tally
from ._cpu.behind import Ends
from ._cpu.cached import BYTES
from ._latents import flash_mla_with_kvcache, get_mla_metadata
from ._left_padding import Padding
from ._log import logged
from ._masks.biases import ALiBi
from ._masks.token_tree import TokenTree
from ._masks.value import Mask
from ._ops.dispatch_cached import check_of_heads, may_read, run_cached
from ._owners import check_new_places
from ._shared_prefix import attention_shared_prefix

__all__ = [
    "Rotary",
    "append_kv",
    "attention_shared_prefix",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "get_scheduler_metadata",
    "is_batch_invariant",
    "set_batch_invariant",
]

Result = Tensor | tuple[Tensor, Tensor]


@logged
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    dynamic_causal: Any = None,
    gather_kv_indices: Any = None,
    gather_kv_valid_length: Any = None,
    **others: Any,
) -> Result:
    """Packed queries over pages, over packed keys with lengths, or over packed keys.

    Args:
        q: (total_q, h, d).
        k, v: (num_pages, page_size, h_k, d) with ``block_table``, else (total_k, h_k, d).
        max_seqlen_q, max_seqlen_k: bounds on the lengths, by which kernels are chosen.
        cu_seqlens_q: (batch + 1,) int32; cu_seqlens_k likewise, without ``block_table``.
        seqused_k: (batch,) int32, the keys of each sequence.
        softmax_scale, causal, window_size: as in :func:`flash_ext.attention_varlen`.
        softcap: c > 0 makes a score x into c * tanh(x / c).
        alibi_slopes: (h,) or (batch, h), the slopes of :class:`flash_ext.masks.ALiBi`.
        deterministic: as in :func:`flash_ext.attention_varlen`, where there is a gradient.
        block_table: (batch, max_pages) int32, with ``seqused_k`` and without ``cu_seqlens_k``.
        s_aux: (h,) floating point, the sinks of :func:`flash_ext.attention_varlen`.
        return_softmax_lse: also return lse (h, total_q) float32.
        out: (total_q, h, dv) in the dtype of q, written by a copy and returned.
        q_descale, k_descale, v_descale, num_splits, others: as the module says.

    Raises:
        NotImplementedError: an argument that is not served.
        TypeError, ValueError: an argument has a type, shape, dtype or value that does not fit.
    """
    _note()
    _refuse_unknown(others)
    if (  # handing over the names as well costs a decoding step 6 %
        q_v is not None or dropout_p or return_attn_probs or output_scale is not None or cp_world_size != 1
        or cp_rank or cp_tot_seqused_k is not None or mask_mod is not None or block_sparse_tensors is not None
        or aux_tensors is not None or dynamic_causal is not None or gather_kv_indices is not None
        or gather_kv_valid_length is not None
    ):  # fmt: skip
        _refuse(
            q_v=q_v, dropout_p=dropout_p or None, return_attn_probs=return_attn_probs or None,
            output_scale=output_scale, cp_world_size=None if cp_world_size == 1 else cp_world_size,
            cp_rank=cp_rank or None, cp_tot_seqused_k=cp_tot_seqused_k, mask_mod=mask_mod,
            block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, dynamic_causal=dynamic_causal,
            gather_kv_indices=gather_kv_indices, gather_kv_valid_length=gather_kv_valid_length,
        )  # fmt: skip
    if block_table is not None and cu_seqlens_k is not None:
        raise ValueError(
            "block_table and cu_seqlens_k must not be given together: seqused_k has the lengths."
        )
    window = _window(window_size)
    if block_table is None and seqused_k is None:
        _refuse_bytes(q=q, k=k, v=v)
    q, descales = _descales(q, k, cu_seqlens_q, out, q_descale, k_descale, v_descale)
    _check_out(out, q, v)
    if block_table is None and seqused_k is None:
        found, aux = attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            scale=softmax_scale, causal=causal, window_size=window, softcap=softcap, sinks=s_aux,
            bias=None if alibi_slopes is None else ALiBi(alibi_slopes),
            return_aux=AuxRequest(return_softmax_lse),
            deterministic=deterministic or None, backend=_backend(num_splits, q, scheduler_metadata, 0),
        )  # fmt: skip
        lse = aux.lse
    else:
        found, lse = run_cached(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, max_seqlen_q, max_seqlen_k,
            softmax_scale, causal, window, _backend(num_splits, q, scheduler_metadata), return_softmax_lse,
            alibi_slopes, s_aux, softcap, None, *descales,
        )  # fmt: skip
    return _result(found, lse, out, return_softmax_lse)


@logged
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
    ver: int = 3,
    out: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> Result:
    """New queries over a cache of pages or of entries, after k and v, if given, were written into it.

    Args:
        q: (batch, seqlen_q, h, d) or, with ``cu_seqlens_q``, (total_q, h, d).
        k_cache, v_cache: (num_pages, page_size, h_k, d) with ``page_table``, else (entries, seqlen, h_k, d).
        k, v: (batch, seqlen_new, h_k, d), written behind the ``cache_seqlens`` keys of their sequence; what
            has no room is left out.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2). k and q are turned by their positions in the
            cache; without causal, window and mask all of q by that of its first.
        cache_seqlens: int or (batch,) int32, the keys of each sequence before the append.
        cache_batch_idx: (batch,) int32, the entry of each sequence, without ``page_table``. A sequence whose
            entry is not there has no keys. Several may read one entry, but with k one of them only may have
            it: others are refused on the CPU. On a GPU the first in the batch has it, the others no keys.
        cache_leftpad: (batch,) int32, how many keys at the start of each sequence are padding, which is never
            read. ``cache_seqlens`` and positions of rotary factors count it. It costs a table of a number for
            each key that there is room for.
        page_table: (batch, max_pages) int32. Two new keys must not have one slot. That is refused on the CPU;
            on a GPU one of them is there afterwards, and which is not defined.
        max_seqlen_q: bound on the lengths of ``cu_seqlens_q``, by which kernels are chosen.
        softmax_scale, causal, window_size, softcap, sinks: as in :func:`flash_ext.attention_varlen`.
        return_softmax_lse: also return lse (batch, h, seqlen_q) or (h, total_q), float32.
        out: in the dtype of q, written by a copy and returned.
        mask: as :func:`flash_ext.attention_varlen` takes it over a cache; ``Documents`` has ids (batch,
            seqlen_q) where q is dense. A ``TokenTree`` takes the place of causal, and has no rotary factors,
            which turn tokens by their order and not by their depth. No other goes with ``cache_leftpad``.
        alibi_slopes: (h,) or (batch, h), the slopes of :class:`flash_ext.masks.ALiBi`.
        q_descale, k_descale, v_descale, num_splits, others: as the module says.

    Raises:
        NotImplementedError: an argument that is not served, or requires a gradient.
        ValueError: k without v or without cache_seqlens, one of the rotary factors without the other or with
            fewer rows than a sequence has room for; on the CPU also a length that is not there, and a place
            for two new keys.
        TypeError: an argument has a type or dtype that does not fit.
    """
    _note()
    _refuse_unknown(others)
    if (
        qv is not None or cu_seqlens_k_new is not None or attention_chunk or rotary_seqlens is not None
        or only_qv or score_mod is not None or aux_tensors is not None or sm_margin
    ):  # fmt: skip
        _refuse(
            qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens,
            attention_chunk=attention_chunk or None, only_qv=only_qv or None, score_mod=score_mod,
            aux_tensors=aux_tensors, sm_margin=sm_margin or None,
        )  # fmt: skip
    if page_table is not None and cache_batch_idx is not None:
        raise ValueError("page_table and cache_batch_idx must not be given together.")
    window = _window(window_size)
    if isinstance(mask, TokenTree) and (rotary_cos is not None or rotary_sin is not None):
        raise NotImplementedError(
            "mask=TokenTree is not available with rotary factors, which turn tokens by their order in the "
            "cache. Turn q and k by the depth of each token, and leave the factors out."
        )
    if sinks is not None:
        check_of_heads(q, sinks=sinks)
    if torch.is_grad_enabled():
        _refuse_gradient(
            q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            alibi_slopes=alibi_slopes,
        )  # fmt: skip
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    q, descales = _descales(q, k_cache, cu_seqlens_q, out, q_descale, k_descale, v_descale)
    _check_out(out, q, v_cache)
    appends = k is not None or v is not None or rotary_cos is not None or rotary_sin is not None
    table, entries = page_table, None
    if cache_batch_idx is not None:
        _check_numbers("cache_batch_idx", cache_batch_idx, batch, q)
        entries = cache_batch_idx.int()
        table = entries[:, None]
    padding = None
    if cache_leftpad is not None:
        _check_numbers("cache_leftpad", cache_leftpad, batch, q)
        padding = Padding.of(cache_leftpad, table, k_cache, v_cache, mask)
    lengths = cache_seqlens
    if isinstance(lengths, Tensor):
        _check_numbers("cache_seqlens", lengths, batch, q)
        if lengths.dtype == torch.int64 and not appends:
            lengths = lengths.int()
    elif isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    elif lengths is None and (table is not None or padding is not None):
        room = k_cache.shape[1] * (1 if table is None else table.shape[1])
        lengths = torch.full((batch,), room, dtype=torch.int32, device=q.device)
    if appends:
        if k is None or v is None or not isinstance(lengths, Tensor) or cache_seqlens is None:
            raise ValueError("k, v and cache_seqlens must be given together to append to the cache.")
        if (rotary_cos is None) != (rotary_sin is None):
            raise ValueError("rotary_cos and rotary_sin must be given together.")
        factors = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin)
        room = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
        if factors is not None and factors[0].shape[0] < room:
            rows = factors[0].shape[0]
            raise ValueError(f"rotary_cos must have a row for each of {room} positions, got {rows}.")
        if q.is_cpu and type(lengths) is Tensor and not torch.compiler.is_compiling():
            _check_lengths(lengths, room)
        counts = causal or window != (-1, -1) or mask is not None
        ends = Ends(lengths, page_table, entries)
        check_new_places(ends, k, k_cache)
        given = (
            _with_unit_stride(k), _with_unit_stride(v), k_cache, v_cache, ends, factors, rotary_interleaved,
            q if factors is None else _with_unit_stride(q), cu_seqlens_q, bool(counts),
            *((k_descale, v_descale) if k_cache.dtype in BYTES else (None, None)),
        )  # fmt: skip
        if torch.is_grad_enabled():
            with torch.no_grad():  # factors of 8 bits may ask for a gradient
                q, lengths = append_behind(*given)
        else:
            q, lengths = append_behind(*given)
    elif entries is not None and isinstance(lengths, Tensor):
        exists = (entries >= 0) & (entries < k_cache.shape[0])
        lengths = lengths.where(exists, 0)  # not the keys of another sequence
    if padding is not None:
        assert isinstance(lengths, Tensor)
        k_cache, v_cache = padding.keys
        table, lengths = padding.behind(q, cu_seqlens_q, lengths, table)
    found, lse = run_cached(
        q, k_cache, v_cache, cu_seqlens_q, None, lengths, table, max_seqlen_q, None, softmax_scale,
        causal, window, _backend(num_splits, q, scheduler_metadata), return_softmax_lse, alibi_slopes,
        sinks, softcap, mask, *descales,
    )  # fmt: skip
    return _result(found, lse, out, return_softmax_lse)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    **others: Any,
) -> Tensor:
    """Zeros (1 + 4 * batch_size, batch_size rounded up to 4) int32, the size of FlashAttention-3's plan.

    Kernels here divide keys by lengths that they read themselves, so there is nothing to plan; programs that
    keep a plan in a buffer of their own run as they are.

    Raises:
        NotImplementedError: an argument that is not served.
    """
    _refuse_unknown(others)
    _refuse(cu_seqlens_k_new=cu_seqlens_k_new, sm_margin=sm_margin or None)
    return torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32, device=cache_seqlens.device)


def _note() -> None:
    if counting:
        tally("serving")


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is not served over a cache, got {_shown(value)}. Leave it out."
            )


def _shown(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _refuse_unknown(others: dict[str, Any]) -> None:
    """Arguments that other versions of an engine pass, at what can only be their default."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is not known here, got {_shown(value)}. Leave it out.")


def _backend(num_splits: int, q: Tensor, plan: Tensor | None, whole: int = 1) -> str | None:
    """The constraint that ``num_splits`` is; ``whole``: kv_splits of keys in one part."""
    try:
        number = operator.index(num_splits)
    except TypeError:
        raise TypeError(f"num_splits must be an integer, got {num_splits!r}.") from None
    if not 0 <= number <= 256:
        raise ValueError(f"num_splits must be from 0 to 256, got {number}.")
    if number == 0 or not q.is_cuda or (number > 1 and plan is not None):
        return None
    return f"kv_splits={whole if number == 1 else number}"


def _check_descales(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, **scales: Tensor | None) -> None:
    """Scales must be float32 of (batch, h_k), and ones where somebody looks."""
    wanted = (q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, k.shape[-2])
    for name, scale in scales.items():
        if scale is None:
            continue
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
            found = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
            raise TypeError(f"{name} must be a torch.float32 tensor, got {found}.")
        if scale.shape != wanted:
            raise ValueError(f"{name} must have shape (batch, h_k) = {wanted}, got {tuple(scale.shape)}.")
        has_bytes = (q if name == "q_descale" else k).dtype in BYTES
        if not has_bytes and may_read(scale) and bool((scale != 1).any()):
            raise NotImplementedError(f"{name} must hold ones: scales of 16-bit tensors are not served.")


def _descales(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    out: Tensor | None,
    of_q: Tensor | None,
    of_k: Tensor | None,
    of_v: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """q of 16 bits and the factors of k and v, of which the former takes that of q along."""
    if of_q is not None or of_k is not None or of_v is not None:
        _check_descales(q, k, cu_seqlens_q, q_descale=of_q, k_descale=of_k, v_descale=of_v)
    if k.dtype not in BYTES:
        return q, (None, None)
    if q.dtype == torch.float8_e4m3fn:
        q = q.to(torch.bfloat16 if out is None else out.dtype)
        if of_q is not None:
            of_k = of_q if of_k is None else of_q * of_k
    return q, (of_k, of_v)


def _refuse_bytes(**tensors: Tensor) -> None:
    """Keys without a cache have 16 bits here; attention_fp8 takes those in e4m3."""
    for name, t in tensors.items():
        if isinstance(t, Tensor) and t.dtype in BYTES:
            raise NotImplementedError(
                f"{name} of 8 bits must lie in pages of a cache (block_table, seqused_k), got packed rows of "
                f"{t.dtype}. Convert q, k and v to 16 bits; or, in e4m3, call flash_ext.fp8.attention_fp8 "
                "with flash_ext.fp8.Fp8Inputs.of(q, k, v, cu_seqlens_q=..., cu_seqlens_k=...)."
            )


def _window(window_size: Sequence[int] | None) -> tuple[int, int]:
    if window_size is None:
        return (-1, -1)
    try:
        left, right = window_size
        return (operator.index(left), operator.index(right))
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two integers, got {window_size!r}.") from None


def _check_out(out: Tensor | None, q: Tensor, v: Tensor) -> None:
    if out is None:
        return
    if out.dtype != q.dtype:
        raise TypeError(f"out must have the dtype of q, {q.dtype}, got {out.dtype}.")
    wanted = (*q.shape[:-1], v.shape[-1])
    if out.numel() != math.prod(wanted):
        raise ValueError(f"out must have the elements of {wanted}, got shape {tuple(out.shape)}.")


def _refuse_gradient(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires a gradient, and attention over a cache has none. Call it under "
                "torch.no_grad()."
            )


def _check_numbers(name: str, t: Tensor, batch: int, q: Tensor) -> None:
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be torch.int32, got {t.dtype}.")
    if t.shape != (batch,):
        raise ValueError(f"{name} must have shape (batch,) = ({batch},), got {tuple(t.shape)}.")
    if t.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}.")


def _check_lengths(lengths: Tensor, room: int) -> None:
    """On the CPU; on a GPU, where nobody looks, they are kept inside what there is."""
    wrong = lengths[(lengths < 0) | (lengths > room)]
    if wrong.numel():
        raise ValueError(f"cache_seqlens must hold lengths from 0 to {room}, got {int(wrong[0])}.")


def _result(found: Tensor, lse: Tensor | None, out: Tensor | None, wants_lse: bool) -> Result:
    if out is not None:
        found = out.copy_(found.view(out.shape))
    if not wants_lse:
        return found
    assert lse is not None
    return found, lse


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
