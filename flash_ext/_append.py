"""New keys and values into a cache of pages: :func:`append_kv`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._count import counting, tally
from ._cpu.behind import Ends
from ._log import logged
from ._ops.dispatch import explain_tensors
from ._ops.dispatch_cached import CHECKS_DEVICE
from ._ops.library import _C


class Rotary(NamedTuple):
    """Rotary position embedding of keys, for :func:`append_kv`.

    The first ``rotary_dim`` features of a key are pairs, each turned by the angle that ``cos`` and ``sin``
    hold for its position; the others stay.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.

    Attributes:
        cos, sin: (positions, rotary_dim / 2), float32 or the dtype of the keys, with a unit last stride.
        positions: (tokens,) int32 or int64, the row of cos and sin for each new key. One that is not there
            counts as the nearest that is.
        interleaved: pairs are neighbouring features, else feature i and i + rotary_dim / 2.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    interleaved: bool = True


@logged
def append_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    rotary: Rotary | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Writes new keys and values into a cache, in place and in one kernel.

    Two tokens must not name one slot: which of them is there afterwards is not defined. There is no gradient.

    Source: reshape_and_cache of vLLM, Kwon et al. 2023, https://arxiv.org/abs/2309.06180.

    Args:
        k_new: (tokens, h_k, d) float16 or bfloat16, on the CPU any floating point; any strides with a unit
            last one.
        v_new: (tokens, h_k, dv), dtype of k_new.
        k_cache, v_cache: (num_pages, page_size, h_k, d) and (.., dv), dtype of k_new, or both float8_e4m3fn
            or int8. Any strides with a unit last one that do not repeat a slot; a dense cache (batch, seqlen,
            h_k, d) is one with a page for each sequence.
        slot_mapping: (tokens,) int32 or int64: page * page_size + row of the page. A token with -1 is left
            out. Other values outside of the cache are refused on the CPU and left out on a GPU.
        rotary: turn the keys before they are written.
        k_descale, v_descale: float32, of a cache of 8 bits (float8_e4m3fn or int8), which holds x / factor
            rounded to nearest, at most 448 or 127 in size. Of shape (), (1,), (h_k,) or (tokens, h_k) they
            are given; of shape (num_pages, page_size, h_k) each slot gets a factor of its own, written here:
            its largest element over 448 or 127. None is 1.

    Returns:
        Nothing.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument that does not fit.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64)        # 4 pages of 16 keys, 2 heads
        >>> k, v = torch.randn(2, 3, 2, 64)
        >>> flash_ext.serving.append_kv(k, v, k_cache, v_cache, torch.tensor([17, -1, 40]))
        >>> bool((k_cache[1, 1] == k[0]).all())
        True
    """
    if counting:
        tally("append_kv")
    if rotary is not None and not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a serving.Rotary or None, got {type(rotary).__qualname__}.")
    cos, sin, positions, interleaved = (None, None, None, True) if rotary is None else rotary
    try:
        if CHECKS_DEVICE or isinstance(slot_mapping, Tensor) and slot_mapping.is_cpu:
            _check_slots(slot_mapping, k_cache)
        # A compiler must see the operator itself; the entry of the extension costs half as much.
        append = torch.ops.flash_ext.append_kv.default if torch.compiler.is_compiling() else _C.append_kv
        append(
            k_new, v_new, k_cache, v_cache, slot_mapping, cos, sin, positions, interleaved, k_descale,
            v_descale,
        )  # fmt: skip
    except (TypeError, RuntimeError, AttributeError):
        if not torch.compiler.is_compiling():
            explain_tensors(k_new=k_new, v_new=v_new, k_cache=k_cache, v_cache=v_cache)
            explain_tensors(slot_mapping=slot_mapping)
            if rotary is not None:
                explain_tensors(cos=cos, sin=sin, positions=positions)
            explain_tensors(True, k_descale=k_descale, v_descale=v_descale)
        raise


def append_behind(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ends: Ends,
    factors: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    counts: bool,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Writes as many new tokens for each sequence behind the keys that it has, in one kernel.

    k_new, v_new: (batch, new_tokens, h_k, d). factors: cos and sin, by which k_new and q are turned, these
    from the length of their sequence on or, unless ``counts``, by that alone.

    Returns:
        q, turned where there are factors, and how many keys there are then, (batch,) int32.
    """
    if counting:
        tally("append_kv")
    cos, sin = (None, None) if factors is None else factors
    compiling = torch.compiler.is_compiling()
    if compiling:  # which takes an argument that may be written for one that is, and this may be expanded
        k_descale, v_descale = (None if x is None else x.clone() for x in (k_descale, v_descale))
    append = torch.ops.flash_ext.append_behind.default if compiling else _C.append_behind
    try:
        lengths, turned_q = append(
            k_new, v_new, k_cache, v_cache, *ends, cos, sin, interleaved, None if factors is None else q,
            cu_seqlens_q, counts, k_descale, v_descale,
        )  # fmt: skip
    except (TypeError, RuntimeError, AttributeError):
        if not compiling:
            explain_tensors(k_new=k_new, v_new=v_new, k_cache=k_cache, v_cache=v_cache, q=q)
            explain_tensors(True, cos=cos, sin=sin, cu_seqlens_q=cu_seqlens_q)
            explain_tensors(True, **ends._asdict(), k_descale=k_descale, v_descale=v_descale)
        raise
    return q if factors is None else turned_q, lengths


def _check_slots(slots: Tensor, cache: Tensor) -> None:
    if torch.compiler.is_compiling() or type(slots) is not Tensor or torch._C._len_torch_dispatch_stack():
        return
    if slots.is_floating_point() or cache.dim() != 4:
        return  # refused in words by the operator
    if slots.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    check_slots(slots, cache)


def check_slots(slots: Tensor, cache: Tensor) -> None:
    """Refuses ``slots`` that are neither of the cache nor -1; reads them.

    Raises:
        ValueError: there is such a slot.
    """
    room = cache.shape[0] * cache.shape[1]
    wrong = slots[(slots < -1) | (slots >= room)]
    if wrong.numel():
        raise ValueError(
            f"slot_mapping must hold slots from 0 to {room - 1}, or -1 for a token that is left out, got "
            f"{int(wrong[0])}."
        )
