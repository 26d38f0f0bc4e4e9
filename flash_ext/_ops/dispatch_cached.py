"""From the public functions to the operator over a cache: types in words, values where the host sees them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from .._cpu.cached import BYTES
from .._masks.atoms import Dense, Documents, KeyMask
from .._masks.biases import ALiBi
from .._masks.token_tree import MOST_TOKENS, TokenTree
from .._masks.value import Mask, Sizes, leaves
from .arguments import added, bias_value, bound, mask_value
from .calls import keep_over_cache, kept_over_cache
from .dispatch import check_bounds, explain_options, explain_tensors, operator_options, refuse_tensor_scale
from .library import _C
from .library_cached import flops_fwd_cached as flops_fwd_cached  # which registers the operators
from .prepared import Prepared, prepared
from .words import refuse_kind

_is_compiling = torch.compiler.is_compiling

# Reads values on a GPU as well, which waits for it: for finding a wrong table.
CHECKS_DEVICE = os.environ.get("FLASH_EXT_CHECK", "0") not in ("", "0")

Masks = tuple[Tensor | None, Tensor | None, Tensor | None]
_NO_MASKS: Masks = (None, None, None)
_BOUNDS = {int, type(None)}


# causal and window with the bands of the mask, slopes, sinks, the words of a tree, other masks, and the bias.
OverCache = tuple[Any, tuple[int, int], Tensor | None, Tensor | None, Tensor | None, Masks, Tensor | None]


def modifiers_over_cache(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float | None,
    causal: Any,
    window: tuple[int, int],
    backend: str | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    mask: Any,
    bias: Any,
) -> OverCache:
    """Reads those arguments of :func:`run_cached`; gives what its operator takes for them.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument does not fit, or has no kernel over a cache.
    """
    total = None
    if bias is not None:
        if isinstance(bias, ALiBi):
            slopes = bias.slopes
        else:
            total, slopes = _added(bias, q, cu_seqlens_q, _is_bytes(k))
    if slopes is not None or sinks is not None:
        check_of_heads(q, slopes=slopes, sinks=sinks)
    words, masks = None, _NO_MASKS
    if isinstance(mask, TokenTree):
        words = _words_of(mask, q, cu_seqlens_q, window, slopes)
        if total is not None:
            raise NotImplementedError("a TokenTree has no bias beside it.")
        causal, window = False, (-1, -1)
    elif mask is not None:
        found = None
        if not _is_compiling():
            if {type(max_seqlen_q), type(max_seqlen_k)} <= _BOUNDS and cu_seqlens_k is None:
                found = kept_over_cache(mask, q, cu_seqlens_q, causal, window)
            if found is None:
                explain_options(max_seqlen_q, max_seqlen_k, scale, causal, window, None, backend)
        if found is None:
            found = _prepared_of(mask, q, cu_seqlens_q, cu_seqlens_k, causal, window)
        masks = (found.mods.mask, found.mods.document_q, found.mods.document_k)
        causal, window = False, found.window
    slopes, sinks = _as_operators_take(q, slopes), _as_operators_take(q, sinks)
    return causal, window, slopes, sinks, words, masks, total


def run_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float | None,
    causal: Any,
    window: tuple[int, int],
    backend: str | None,
    want_lse: bool = True,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    mask: Any = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    bias: Any = None,
) -> tuple[Tensor, Tensor]:
    """Calls ``fwd_cached``: out and lse of queries over keys of which the device knows how many there are.

    Args:
        q: (total_q, h, d) with ``cu_seqlens_q``, else (batch, seqlen_q, h, d).
        k, v: (num_pages, page_size, h_k, d) with ``block_table``, (total_k, h_k, d) with ``cu_seqlens_k``,
            else (entries, seqlen_k, h_k, d), an entry a sequence.
        seqused_k: (batch,) int32, how many keys each sequence has.
        want_lse: if not, lse has no elements.
        slopes: (h,) or (batch, h), those of ALiBi.
        mask: a TokenTree, which says what the new tokens see of each other instead of ``causal``, or another
            mask or bool tensor, as :func:`flash_ext.attention_varlen` takes them over a cache.
        k_descale, v_descale: float32 factors of k and v of 8 bits: of all, (h_k,), (batch, h_k) or
            (num_pages, page_size, h_k).
        bias: a bias or a float tensor, without ``slopes``.

    The others are those of :func:`flash_ext.attention_varlen`.
    """
    if scale is not None and isinstance(scale, Tensor):
        refuse_tensor_scale()
    places = (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    words, masks, total = None, _NO_MASKS, None
    if mask is not None or bias is not None or sinks is not None or slopes is not None:
        causal, window, slopes, sinks, words, masks, total = modifiers_over_cache(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window, backend,
            slopes, sinks, mask, bias,
        )  # fmt: skip
    if _is_compiling():
        options = operator_options(q, max_seqlen_q, max_seqlen_k, scale, causal, window, None, backend)
        traced: tuple[Tensor, Tensor] = torch.ops.flash_ext.fwd_cached.default(
            q,
            k,
            v,
            *places,
            *options[:5],
            slopes,
            sinks,
            softcap,
            backend,
            want_lse,
            words,
            k_descale,
            v_descale,
            *masks,
            total,
        )
        return traced
    most_q = max_seqlen_q if type(max_seqlen_q) in _BOUNDS else bound(max_seqlen_q)
    most_k = max_seqlen_k if type(max_seqlen_k) in _BOUNDS else bound(max_seqlen_k)
    try:
        left, right = window
        if CHECKS_DEVICE or q.is_cpu:
            check_values(q, k, *places)
        return _C.fwd_cached(
            q, k, v, *places, most_q, most_k, scale, causal, left, right, slopes, sinks, softcap, backend,
            want_lse, words, k_descale, v_descale, *masks, total,
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        explain_tensors(q=q, k=k, v=v)
        explain_tensors(True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        explain_tensors(True, seqused_k=seqused_k, block_table=block_table)
        explain_tensors(True, k_descale=k_descale, v_descale=v_descale)
        explain_options(max_seqlen_q, max_seqlen_k, scale, causal, window, None, backend)
        raise


def tree_of(mask: Any) -> TokenTree | None:
    """The mask of a function which takes no other."""
    if mask is None or isinstance(mask, TokenTree):
        return mask
    raise NotImplementedError(
        f"mask must be a masks.TokenTree or None here, got {type(mask).__qualname__}. attention_varlen takes "
        "others over a cache."
    )


def _prepared_of(
    given: Any,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: Any,
    window: Any,
) -> Prepared:
    """What the mask is to the call: the operator's tensors, and the window with the bands of the mask.

    Raises:
        TypeError, ValueError: the mask is none, or does not fit.
        NotImplementedError: no kernel over a cache knows a part of it.
    """
    mask = mask_value(given)
    assert mask is not None
    sizes = _sizes(q, cu_seqlens_q)
    if cu_seqlens_k is not None and sizes.batch > 1:
        _refuse_rows_of_all(mask)
    if not _asks_for_rows(mask):  # then what is prepared serves calls of any number of queries
        sizes = sizes._replace(q_len=0)
    found = prepared(mask, q, sizes, bool(causal), (window[0], window[1]))
    if cu_seqlens_k is None:
        keep_over_cache(mask, q, cu_seqlens_q, causal, window, found)
    return found


def _refuse_rows_of_all(mask: Mask) -> None:
    """Without seqused_k one dimension of keys is that of all packed rows; here each would take it."""
    for leaf in leaves(mask):
        of_keys = leaf.keep if isinstance(leaf, KeyMask) else getattr(leaf, "ids_k", None)
        if of_keys is not None and of_keys.dim() == 1:
            raise ValueError(
                f"{leaf!r} must have a row of keys for each sequence beside seqused_k, (batch, keys): packed "
                "rows of all sequences, (total_k,), are for calls without it."
            )


def _asks_for_rows(mask: Mask) -> bool:
    """Whether what is prepared has something for each query: ids, as also a KeyMask beside a Dense gives."""
    kinds = {type(leaf) for leaf in leaves(mask)}
    return Documents in kinds or {KeyMask, Dense} <= kinds


def _added(
    given: Any, q: Tensor, cu_seqlens_q: Tensor | None, is_bytes: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The operator's bias and slopes. Beside a cache of 8 bits kernels read a bias in float32."""
    sizes = _sizes(q, cu_seqlens_q)
    bias, slopes = added(bias_value(given, q), q, sizes, False)
    if bias is not None and is_bytes and q.dtype != torch.float64:
        bias = bias.float()
    return bias, slopes


def _sizes(q: Tensor, cu_seqlens_q: Tensor | None) -> Sizes:
    explain_tensors(q=q)
    explain_tensors(True, cu_seqlens_q=cu_seqlens_q)
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        rows = "batch, seqlen_q" if cu_seqlens_q is None else "total_q"
        raise ValueError(f"q must have shape ({rows}, num_heads, head_dim), got {tuple(q.shape)}.")
    if cu_seqlens_q is None:
        return Sizes(False, q.shape[0], q.shape[2], q.shape[1], 0, True)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(cu_seqlens_q.shape)}.")
    return Sizes(True, cu_seqlens_q.shape[0] - 1, q.shape[1], q.shape[0], 0, True)


def _words_of(
    tree: TokenTree, q: Tensor, cu_seqlens_q: Tensor | None, window: Any, slopes: Tensor | None
) -> Tensor:
    """A word for each row of q. Refuses what counts keys in order, which a path of a tree does not have."""
    if tuple(window) not in ((-1, -1), (-1, 0)):
        raise NotImplementedError(
            f"a TokenTree has no window beside it, got window_size {tuple(window)}: windows count keys in "
            "their order in the cache."
        )
    if slopes is not None:
        raise NotImplementedError(
            "a TokenTree has no ALiBi beside it: slopes count keys in their order in the cache."
        )
    if tree.words.device != q.device:
        raise ValueError(f"mask must be on the device of q, {q.device}, got {tree!r}: use .to(q.device).")
    if cu_seqlens_q is None:
        return tree.of_rows(Sizes(False, q.shape[0], q.shape[-2], q.shape[1], 0))
    if not _is_compiling() and may_read(cu_seqlens_q):
        longest = int(cu_seqlens_q.diff().max()) if cu_seqlens_q.numel() > 1 else 0
        if longest > MOST_TOKENS:
            raise ValueError(
                f"a TokenTree has at most {MOST_TOKENS} tokens a sequence, a bit for each, got {longest} "
                "rows. Split the call."
            )
    return tree.of_rows(Sizes(True, cu_seqlens_q.shape[0] - 1, q.shape[-2], q.shape[0], 0))


def check_of_heads(q: Tensor, **given: Tensor | None) -> None:
    """Slopes and sinks, in words, before anything runs."""
    for name, t in given.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            refuse_kind(name, t, True)
        if not t.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {t.dtype}.")
        if t.shape[-1:] != q.shape[-2:-1] or not 1 <= t.dim() <= (1 if name == "sinks" else 2):
            wanted = "(num_heads,)" if name == "sinks" else "(num_heads,) or (batch, num_heads)"
            raise ValueError(
                f"{name} must have shape {wanted} with num_heads {q.shape[-2]}, got {tuple(t.shape)}."
            )
        if t.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}.")
        if t.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"attention over a cache (seqused_k, block_table) has no gradient, and {name} requires one. "
                "Call it under torch.no_grad()."
            )


def _is_bytes(k: Any) -> bool:
    return isinstance(k, Tensor) and k.dtype in BYTES


def _as_operators_take(q: Tensor, t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    return t.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()


def may_read(t: Tensor) -> bool:
    """Whether values of ``t`` may be looked at: on the CPU, and where FLASH_EXT_CHECK asks for it."""
    if _is_compiling() or type(t) is not Tensor or torch._C._len_torch_dispatch_stack():
        return False
    return t.is_cpu or (CHECKS_DEVICE and not torch.cuda.is_current_stream_capturing())


def check_values(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Looks at lengths and pages. On a GPU, where nobody looks, they are kept inside what there is.

    Raises:
        ValueError: a length is negative or has no room, or an entry in use names a page that is not there.
    """
    given = [t for t in (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table) if t is not None]
    if any(t.dtype != torch.int32 or t.device != q.device for t in given):
        return  # refused in words below the operator
    if not all(may_read(t) for t in given):
        return
    if cu_seqlens_q is not None:
        rows = None if block_table is not None or cu_seqlens_k is None else cu_seqlens_k.cpu()
        check_bounds(q, k, cu_seqlens_q.cpu(), rows)
    if seqused_k is None or seqused_k.dim() != 1 or k.dim() < 3:
        return
    lengths = seqused_k.tolist()
    room = [k.shape[-3]] * len(lengths)
    if block_table is not None:
        if block_table.dim() != 2 or k.dim() != 4 or block_table.shape[0] != len(lengths):
            return
        room = [block_table.shape[1] * k.shape[1]] * len(lengths)
    elif cu_seqlens_k is not None:
        if cu_seqlens_k.dim() != 1 or cu_seqlens_k.shape[0] != len(lengths) + 1:
            return
        room = cu_seqlens_k.diff().tolist()
    for b, (length, most) in enumerate(zip(lengths, room, strict=True)):
        if length < 0:
            raise ValueError(f"seqused_k must hold lengths of at least 0, got {length} for sequence {b}.")
        if length > most:
            hint = "" if block_table is None else f": {block_table.shape[1]} pages of {k.shape[1]}"
            raise ValueError(
                f"seqused_k must not exceed the room of a sequence, got {length} for sequence {b}, which has "
                f"room for {most} keys{hint}."
            )
        if block_table is None:
            continue
        used = block_table[b, : -(-length // k.shape[1])]
        wrong = used[(used < 0) | (used >= k.shape[0])]
        if wrong.numel():
            raise ValueError(
                f"block_table must name pages from 0 to {k.shape[0] - 1} for the keys in use, got "
                f"{int(wrong[0])} for sequence {b}."
            )
