"""``flash_attn_with_kvcache`` of flash-attn 2.8: attention over dense or paged caches, append in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import serving
from ..._count import counting, tally
from ..._log import logged
from ..._owners import with_one_owner


@logged
@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over the keys in a cache, after k and v, if given, were written into it.

    Causal and window masks are aligned at the bottom right of what each sequence has in the cache: its last
    query sits at its last key. Nothing waits for the device. No gradient, as in flash-attn.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim), with block_table (num_pages,
            page_size, nheads_k, headdim); written in place if k is given.
        k, v: (batch, seqlen_new, nheads_k, headdim), placed at ``cache_seqlens`` of their sequence. Keys that
            the cache has no room for are left out: flash-attn writes them somewhere.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2). k and q are rotated by their positions in the
            cache, left padding included, before the call; without causal and window all of q by that of its
            first.
        cache_seqlens: int or (batch,) int32, how many keys each sequence has before the append; None is
            all of the cache, and then nothing can be appended.
        cache_batch_idx: (batch,) int32, which entry of the cache a sequence has; None is its own index. A
            sequence whose entry is not there has no keys. Several sequences may read one entry, but with k
            one of them only may have it: on the CPU that is refused, on a GPU, where the host does not see
            the values, the first of them in the batch has the entry, and the others have none.
        cache_leftpad: (batch,) int32, how many keys at the start are padding, which is never read. Lengths
            and positions count it.
        block_table: (batch, max_pages) int32, the pages of each sequence; with it no cache_batch_idx. Pages
            have any size.
        softmax_scale, causal, window_size, softcap: as in :func:`flash_attn_func`.
        rotary_interleaved: pairs are neighbouring features; otherwise the halves of the rotated ones.
        alibi_slopes: (nheads,) or (batch, nheads).
        num_splits: 0 or 1; into how many parts keys are split is chosen from the shapes.
        return_softmax_lse: also return the lse.

    Returns:
        out (batch, seqlen_q, nheads, headdim) and, if asked for, softmax_lse (batch, nheads, seqlen_q).

    Raises:
        NotImplementedError: ``num_splits`` above 1, or what does not go with ``block_table``.
        ValueError: k without v or without ``cache_seqlens``, rotary factors without k, one without the
            other, or fewer than the cache has positions, a cache with fewer entries than sequences, k with a
            cache that is expanded or, on the CPU, with an entry for two sequences, numbers on another device
            than the cache, and what :func:`flash_ext.attention` refuses.
    """
    if counting:
        tally("compat.flash_attn")
    if num_splits not in (0, 1):
        raise NotImplementedError(
            f"num_splits must be 0 or 1, the number of parts is chosen from the shapes; got {num_splits}."
        )
    if block_table is not None:
        return serving.flash_attn_with_kvcache(
            q if q.stride(-1) == 1 else q.contiguous(), k_cache, v_cache, k, v, None, rotary_cos, rotary_sin,
            cache_seqlens, cache_batch_idx, cache_leftpad, block_table, softmax_scale=softmax_scale,
            causal=causal, window_size=window_size, softcap=softcap, rotary_interleaved=rotary_interleaved,
            num_splits=num_splits, return_softmax_lse=return_softmax_lse, alibi_slopes=alibi_slopes,
        )  # fmt: skip
    batch, seqlen_q = q.shape[:2]
    _check(batch, k_cache, cache_seqlens, cache_batch_idx, cache_leftpad)
    appends = k is not None and k.shape[1] > 0
    if appends:
        _check_own_rows(k_cache=k_cache, v_cache=v_cache)
    size = k_cache.shape[1]
    lengths = _lengths(cache_seqlens, batch, k_cache).clamp(0, size)
    leftpad = None if cache_leftpad is None else cache_leftpad.long().expand(batch)
    if cache_batch_idx is None:
        entries, exists = torch.arange(batch, device=q.device), None
    else:
        # A sequence whose entry is not there has no keys, and no other's.
        entries, exists = _inside(cache_batch_idx.long().expand(batch), k_cache.shape[0])
        if appends:
            exists = with_one_owner(entries, exists)
        lengths = lengths.where(exists, 0)
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None:
            raise ValueError("rotary_cos, rotary_sin and k must be given together.")
        if rotary_cos.shape[0] < size:
            rows = rotary_cos.shape[0]
            raise ValueError(f"rotary_cos must have a row for each of {size} positions, got {rows}.")
        first, factors = lengths[:, None], (rotary_cos, rotary_sin, rotary_interleaved)
        k = _rotated(k, first + torch.arange(k.shape[1], device=q.device), *factors)
        counts = causal or tuple(window_size) != (-1, -1)
        q = _rotated(q, first + torch.arange(seqlen_q, device=q.device) * counts, *factors)
    if k is not None or v is not None:
        if k is None or v is None or cache_seqlens is None:
            raise ValueError("k, v and cache_seqlens must be given together to append to the cache.")
        _append(k_cache, k, entries, exists, lengths)
        _append(v_cache, v, entries, exists, lengths)
        lengths = (lengths + k.shape[1]).clamp(max=size)
        lengths = lengths if exists is None else lengths.where(exists, 0)
    runs = batch > 0 and _is_one_run_of_rows(k_cache) and _is_one_run_of_rows(v_cache)
    if runs and softcap == 0.0 and alibi_slopes is None:
        starts = torch.zeros_like(lengths) if leftpad is None else leftpad
        runs_of_rows = entries, starts, lengths
        out, lse = _attend_to_runs(q, k_cache, v_cache, *runs_of_rows, softmax_scale, causal, window_size)
        return (out, lse) if return_softmax_lse else out
    return serving.flash_attn_with_kvcache(
        q if q.stride(-1) == 1 else q.contiguous(), k_cache, v_cache, cache_seqlens=lengths,
        cache_batch_idx=None if cache_batch_idx is None else entries,
        cache_leftpad=None if leftpad is None else leftpad.clamp(0, size), softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, return_softmax_lse=return_softmax_lse,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _check(
    batch: int,
    k_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
) -> None:
    """Sizes and types; values stay on the device and are kept inside the cache."""
    given = {"seqlens": cache_seqlens, "batch_idx": cache_batch_idx, "leftpad": cache_leftpad}
    for name, t in ((f"cache_{what}", t) for what, t in given.items()):
        if not isinstance(t, Tensor):
            continue
        if t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be torch.int32, got {t.dtype}.")
        if t.shape not in ((batch,), ()):
            raise ValueError(f"{name} must have shape (batch,) = ({batch},), got {tuple(t.shape)}.")
        if t.device != k_cache.device:
            raise ValueError(f"{name} must be on the device of k_cache, {k_cache.device}, got {t.device}.")
    if cache_batch_idx is None and k_cache.shape[0] < batch:
        raise ValueError(
            f"k_cache must have an entry for each of the {batch} sequences, got {k_cache.shape[0]}; "
            "cache_batch_idx lets sequences share them."
        )


def _check_own_rows(**caches: Tensor) -> None:
    for name, cache in caches.items():
        if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape)):
            strides = tuple(cache.stride())
            raise ValueError(f"{name} must not be expanded to append to it, got strides {strides}.")


def _inside(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The index where it lies in 0..size - 1, else one that does; and where it does."""
    inside = index.clamp(0, max(size - 1, 0))
    return inside, (inside == index) & (size > 0)


def _append(cache: Tensor, new: Tensor, entries: Tensor, exists: Tensor | None, lengths: Tensor) -> None:
    """Writes ``new`` behind the ``lengths`` keys that the entries have; what does not fit is left out.

    Reading how much fits would wait for the device, and an index outside ends the process there. So the rows
    that do not fit write once more what the last one that does wrote, or what was there; and a sequence
    without an entry writes what the first one that has one does.
    """
    size, count = cache.shape[1], new.shape[1]
    if size == 0 or count == 0 or cache.shape[0] == 0:
        return
    fitting = (size - lengths).clamp(0, count)
    who = torch.arange(new.shape[0], device=new.device)
    if exists is not None:
        who = who.where(exists, exists.long().argmax())
        fitting = fitting.where(exists, 0)
    row = torch.arange(count, device=new.device).minimum((fitting[who] - 1).clamp(min=0)[:, None])
    place = entries[who][:, None], (lengths[who][:, None] + row).clamp(max=size - 1)
    fits = (fitting[who] > 0)[:, None, None, None]
    cache[place] = new[who[:, None], row].to(cache.dtype).where(fits, cache[place])


def _is_one_run_of_rows(cache: Tensor) -> bool:
    """Whether entries follow one another, so that all their rows are those of one packed tensor."""
    entries, rows, *_ = cache.shape
    follows = entries <= 1 or rows == 0 or cache.stride(0) == rows * cache.stride(1)
    return follows and cache.stride(-1) == 1 and entries * rows < 2**30


def _attend_to_runs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    entries: Tensor,
    starts: Tensor,
    lengths: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """out and lse of a packed call over the whole cache, in which every other sequence has no queries.

    Those have the keys between the used part of one entry and that of the next, wherever this lies: a start
    that comes after its end makes a sequence without keys. So nothing is copied or hidden by a mask. The
    operator takes such bounds, which :func:`flash_ext.forward` refuses where it can look at them.
    """
    batch, seqlen_q, num_heads, _ = q.shape
    size = k_cache.shape[1]
    ends = entries * size + lengths
    starts = torch.minimum(entries * size + starts.clamp(0, size), ends)
    bounds_k = torch.stack([starts, ends], dim=1).flatten()
    first_rows = torch.arange(batch, device=q.device) * seqlen_q
    bounds_q = torch.stack([first_rows, first_rows + seqlen_q], dim=1).flatten()
    packed = q.reshape(batch * seqlen_q, *q.shape[2:])
    packed = packed if packed.stride(-1) == 1 else packed.contiguous()
    left, right = window_size
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if softmax_scale is None else softmax_scale
    out, lse = torch.ops.flash_ext.fwd.default(
        packed, k_cache.flatten(0, 1), v_cache.flatten(0, 1), bounds_q.to(torch.int32),
        bounds_k.to(torch.int32), seqlen_q, size, scale, left, 0 if causal and right >= -1 else right,
        False, None,
    )  # fmt: skip
    out = out.view(batch, seqlen_q, num_heads, out.shape[-1])
    return out, lse.view(num_heads, batch, seqlen_q).transpose(0, 1).contiguous()


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (batch, rows, heads, features) with its first 2 * cos.shape[1] features turned by the positions.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (t.float()[positions][:, :, None] for t in (cos, sin))
    turned, rest = x.float().split([2 * cos.shape[1], x.shape[-1] - 2 * cos.shape[1]], dim=-1)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    parts = (a * c - b * s, a * s + b * c)
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned, rest], dim=-1).to(x.dtype)


def _lengths(cache_seqlens: int | Tensor | None, batch: int, k_cache: Tensor) -> Tensor:
    """(batch,) int64: keys of each sequence before the append."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens.long().expand(batch)
    length = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    return torch.full((batch,), length, device=k_cache.device)
