"""Hugging Face transformers: ``attn_implementation="fext"`` after one call of :func:`register`.

Two functions are put into the library's registries. The one for masks (:func:`attention_mask`) recognises the
patterns that the kernels know by rule (causal, sliding windows, packed sequences, padding) and hands them on
in a few bytes per key; any other pattern becomes the mask that the library makes for PyTorch's attention.
The other one (:func:`attention_forward`) calls :func:`flash_ext.attention`. A third one
(:func:`paged_attention_forward`) serves continuous batching, see :mod:`._paged`.

The name is not "flash_ext" because transformers 5 takes every name with "flash" in it for a flash-attention
package that it loads itself, and refuses those it does not know. Transformers 4 takes that name, too.

Tested with transformers 4.57 and 5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .. import attention, attention_varlen, masks
from .._count import counting, tally, tally_fallback
from .._log import logged
from ..serving import is_batch_invariant
from . import _fp8 as fp8
from . import _paged as paged
from ._t5 import hand_on_distances, hides_later_keys, relative_position

__all__ = [
    "NAME",
    "NAME_IN_4",
    "attention_forward",
    "attention_mask",
    "paged_attention_forward",
    "recognise",
    "register",
]

NAME = "fext"
NAME_IN_4 = "flash_ext"

# Where a mask from here keeps its pattern, and so does its storage.
_ATTRIBUTE = "flash_ext_pattern"
# And where it keeps the value that all layers are given.
_VALUE = "flash_ext_mask"


@logged
def register(name: str = NAME, quantize: Literal["fp8", "mixed"] | None = None) -> str:
    """Makes ``attn_implementation=name`` run on flash_ext, for every model that asks the library's registry.

    In transformers 4 "flash_ext" is registered as well. In transformers 5 the attention classes of T5 and its
    relatives hand on their biases by distance under this name, see :mod:`.t5`. "paged|" before the name is
    the one for ``generate_batch``, see :mod:`._paged`.

    Args:
        name: the name to register. One with "flash" in it is refused, see the module.
        quantize: run prefills and training passes in fp8, as :func:`flash_ext.fp8.attention_fp8` does, in
            this mode of :func:`flash_ext.fp8.quantize_fp8`. Masks other than causal, windows, modifiers,
            steps of fewer than 128 queries and continuous batching stay in the type of the model. Give it a
            name of its own to have both.

    Returns:
        The name.

    Raises:
        ImportError: transformers is not installed, or has no such registries (before 4.57).
        ValueError: the name cannot work, or there is no such mode.

    Example:
        >>> flash_ext.integrations.transformers.register()
        'fext'
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fext")
    """
    if "flash" in name:
        raise ValueError(
            f"name must not contain 'flash', got {name!r}: transformers 5 takes such names for packages that "
            f"it loads itself. The default is {NAME!r}."
        )
    fp8.check_mode(quantize)
    from transformers import AttentionInterface, __version__
    from transformers.masking_utils import AttentionMaskInterface

    functions: list[Callable[..., Any]] = [attention_forward, paged_attention_forward]
    if quantize:
        functions = [functools.partial(function, quantize=quantize) for function in functions]
    forward, over_pages = functions
    for accepted in (name, NAME_IN_4) if __version__.startswith("4.") else (name,):
        AttentionMaskInterface.register(accepted, attention_mask)
        AttentionInterface.register(accepted, forward)
        paged.register(accepted, over_pages)
        hand_on_distances(accepted)
    return name


# ---- masks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """What a mask function of the library hides, in the terms of :func:`flash_ext.attention`.

    Attributes:
        causal: hide later keys.
        left, right: how many keys before and after its own a row sees, inclusive; -1 is unlimited.
        documents: (batch, length) ids of packed sequences, of which each sees itself only.
        padded: whether the mask that carries the pattern hides keys itself.
    """

    causal: bool = False
    left: int = -1
    right: int = -1
    documents: Tensor | None = None
    padded: bool = False


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one forward pass, in the library's own terms.

    Args:
        batch_size, kv_length, kv_offset, mask_function, attention_mask, kwargs: as in the library's
            ``sdpa_mask``; attention_mask is (batch, seen) bool, True for tokens.
        q_length, q_offset: length and first position of the queries (transformers 5).
        cache_position: (q_length,) their positions (transformers 4).

    Returns:
        A 2-D tensor with a :class:`Pattern`, bool (True = token) or int32 (ids of packed sequences), aligned
        at the bottom right: also where nothing but a causal mask is meant, since not every decoder's layers
        say themselves that they are causal. Or what the library makes for PyTorch's attention, a 4-D bool
        mask or None, if the pattern is not known here, while tracing, for single queries, and for models that
        take their masks apart.
    """
    # Transformers itself is a lazy module, from which the compiler of torch 2.11 does not trace an import.
    from transformers.masking_utils import causal_mask_function

    arguments = {
        "batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset,
        "attention_mask": attention_mask, **kwargs,
    }  # fmt: skip
    if mask_function is not None:
        arguments["mask_function"] = mask_function
    if cache_position is not None:
        arguments["cache_position"] = cache_position
        q_length, q_offset = cache_position.shape[0], cache_position[:1]
    else:
        arguments |= {"q_length": q_length, "q_offset": q_offset}
    if _takes_masks_apart(kwargs.get("config")):
        whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return _library_mask(arguments | whole)
    if q_length is None or q_length == 1 or _is_tracing(attention_mask, q_offset):
        # For one query the library's mask has as many elements as there are keys.
        return _library_mask(arguments)
    pattern = recognise(causal_mask_function if mask_function is None else mask_function)
    if pattern is None:
        return _library_mask(arguments)

    square = kv_length == q_length and kv_offset == 0
    end = kv_offset + kv_length
    if square or not (pattern.causal or pattern.left >= 0 or pattern.right >= 0):
        last = end  # equal lengths, or nothing depends on positions, as in cross attention
    else:
        last = int(q_offset) + q_length  # reads the device once a forward pass
    # A static cache is longer than what it holds; the mask ends with the last query, where the keys are cut.
    if last != end and not (pattern.causal and kv_offset == 0 and last < end):
        return _library_mask(arguments)
    keys = last - kv_offset
    padding = _padding(attention_mask, kv_offset, keys)
    return _mask_with(pattern, padding, batch_size, keys, kwargs.get("device") or _device(cache_position))


# By what configurations tell that a model itself indexes its masks.
_TAKES_MASKS_APART = (
    "num_kv_shared_layers",  # Gemma 4 cuts rows out; without a mask the others would sit at the first keys
    "index_topk",  # DeepSeek 3.2 and its kin look up what their sparse attention may choose from
    "keep_window_size",  # Doge adds a mask of its own
)


def _takes_masks_apart(config: Any) -> bool:
    """Whether the model needs masks that are there and have four dimensions."""
    return any(getattr(config, name, None) for name in _TAKES_MASKS_APART)


def _library_mask(arguments: dict[str, Any]) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(**arguments)
    return mask


def recognise(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function of the library, None for one that is not known here.

    The library makes these functions by closures, so they are told apart by the names of their makers, and
    what they hold is read from the closure.
    """
    maker = getattr(function, "__qualname__", "").split(".")[0]
    if maker == "causal_mask_function":
        return Pattern(causal=True)
    if maker == "bidirectional_mask_function":
        return Pattern()
    held = _held_by(function)
    if maker == "sliding_window_overlay":
        return Pattern(left=held["sliding_window"] - 1)  # the library counts a row's own key
    if maker == "sliding_window_bidirectional_overlay":
        return Pattern(left=held["sliding_window"], right=held["sliding_window"])
    if maker == "packed_sequence_mask_function":
        ids = held["packed_sequence_mask"]
        # transformers 4 makes ids for a single sequence as well.
        several = _is_tracing(ids) or is_batch_invariant() or bool((ids[:, -1] != 0).any())
        return Pattern(documents=ids if several else None)
    if maker == "remap_positions_for_packed_sequence":
        # Positions count up by one within a sequence, so that distances, and with them windows, stay.
        return recognise(held["mask_function"])
    if maker != "and_masks":
        return None
    parts = [recognise(part) for part in held["mask_functions"]]
    found: Pattern | None = Pattern()
    for part in parts:
        found = None if part is None or found is None else _both(found, part)
    return found


def _held_by(function: Callable[..., Any]) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return {} if code is None else {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells)}


def _both(a: Pattern, b: Pattern) -> Pattern | None:
    """What both show. Two sets of documents are not combined: the library makes one at most."""
    if a.documents is not None and b.documents is not None:
        return None
    documents = b.documents if a.documents is None else a.documents
    return Pattern(a.causal or b.causal, _narrower(a.left, b.left), _narrower(a.right, b.right), documents)


def _narrower(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def _padding(mask: Tensor | None, kv_offset: int, keys: int) -> Tensor | None:
    """(batch, keys) bool of the keys that are there, or None if all are tokens; reads the device once.

    In the batch-invariant mode never None: what other sequences hold must not choose the kernel.
    """
    if mask is None:
        return None
    mask = mask[:, kv_offset : kv_offset + keys].bool()
    mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[1]))
    return None if not is_batch_invariant() and bool(mask.all()) else mask


def _mask_with(
    pattern: Pattern, padding: Tensor | None, batch: int, keys: int, device: torch.device | str | None
) -> Tensor:
    if pattern.documents is not None:
        mask = pattern.documents.to(torch.int32, copy=True)  # the caller's tensor may serve other masks
        if padding is not None:
            mask = mask.masked_fill(~padding, -1)
    elif padding is not None:
        mask = padding
    else:
        mask = torch.ones(batch, keys, dtype=torch.bool, device=device)
    # Without the ids, which nobody asks for again.
    _keep(mask, replace(pattern, documents=None, padded=padding is not None))
    return mask


def _keep(mask: Tensor, pattern: Pattern) -> None:
    """Puts the pattern on the mask and on its storage.

    Checkpointing with use_reentrant=True runs a layer again with detached tensors. These are other objects,
    without the attributes of the first ones; the storage is the same object.
    """
    setattr(mask, _ATTRIBUTE, pattern)
    if _has_storage(mask):
        setattr(mask.untyped_storage(), _ATTRIBUTE, (pattern, _view(mask)))


def _kept(mask: Tensor | None) -> Pattern | None:
    """The pattern of a mask from here, or of the same view of its storage."""
    pattern: Pattern | None = getattr(mask, _ATTRIBUTE, None)
    if pattern is not None or mask is None or mask.dim() != 2 or _is_tracing(mask) or not _has_storage(mask):
        return pattern
    pattern, view = getattr(mask.untyped_storage(), _ATTRIBUTE, (None, None))
    return pattern if view == _view(mask) else None


def _has_storage(mask: Tensor) -> bool:
    """Not what wraps another tensor: DTensor, and whatever torch.func.grad makes."""
    return type(mask) is Tensor and not torch._C._are_functorch_transforms_active()


def _view(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.storage_offset(), tuple(t.shape), t.stride()


def _device(cache_position: Tensor | None) -> torch.device | None:
    return None if cache_position is None else cache_position.device


def _value(kind: type[masks.Documents] | type[masks.KeyMask], mask: Tensor) -> masks.Mask:
    """The value of a mask. The library hands one tensor to all layers, which then prepare it once."""
    if _is_tracing(mask):
        return kind(mask)
    value = getattr(mask, _VALUE, None)
    if type(value) is not kind:
        value = kind(mask.detach())  # the tensor itself would be kept alive by what it holds
        setattr(mask, _VALUE, value)
    return value


def _is_tracing(*values: Any) -> bool:
    """Whether values must not be read: while a compiler or a tracer looks on, or a CUDA graph is captured."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return any(
        isinstance(value, (torch.fx.Proxy, torch._subclasses.fake_tensor.FakeTensor)) for value in values
    )


# ---- attention -----------------------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    quantize: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The library's attention function.

    Args:
        module: the layer; its ``is_causal`` counts where neither ``is_causal`` nor the mask says.
        query: (batch, heads, q_length, head_dim).
        key, value: (batch, heads_k, kv_length, head_dim and head_dim_v), not repeated for the query heads.
        attention_mask: what :func:`attention_mask` returns, or a 4-D mask, bool or added, of the caller.
        dropout: probability of dropping a weight.
        scaling: factor on the dot products; None is 1 / sqrt(head_dim).
        is_causal: hide later keys, if there is no mask.
        sliding_window: how many keys a row sees, itself among them, where the mask does not say.
        softcap: None is off.
        s_aux: (heads,) attention sinks.
        position_bias: (1 or batch, heads, q_length, kv_length), added to the scores; or (heads, distances),
            T5's bias by distance, see :mod:`.t5`.
        cu_seq_lens_q, cu_seq_lens_k: bounds of packed sequences, (sequences + 1,).
        quantize: of :func:`register`.
        kwargs: what else the library passes along; ``deterministic`` (ModernBERT) is handed on, and what
            would change the result is refused.

    Returns:
        (batch, q_length, heads, head_dim_v) and None.

    Raises:
        ValueError: attention weights are asked for, or heads masked.
        NotImplementedError: the paged cache of continuous batching, which :func:`paged_attention_forward`
            takes, keys chosen by index, sinks per query.
        TypeError: float32 on a GPU; the rest as :func:`flash_ext.attention`.
    """
    if counting:
        tally(fp8.ENTRY)
    _refuse(kwargs)
    if kwargs.get("cache") is not None or kwargs.get("block_table") is not None:
        raise NotImplementedError(
            "the paged cache of continuous batching is not supported under this name, whose masks know "
            f"nothing of it. Write 'paged|' before the name: model.set_attn_implementation('paged|{NAME}')."
        )
    q, k, v = (_with_unit_stride(t.transpose(1, 2)) for t in (query, key, value))
    pattern = _kept(attention_mask)
    if pattern is None:
        pattern = _pattern_of_module(module, attention_mask, is_causal, sliding_window, q, k)
    options = _options(pattern, scaling, softcap, s_aux, dropout)
    options["deterministic"] = kwargs.get("deterministic")
    bounds = [bound.to(torch.int32) for bound in (cu_seq_lens_q, cu_seq_lens_k) if bound is not None]
    if len(bounds) == 2 and not pattern.padded and position_bias is None:
        packed = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        if fp8.takes(quantize, *packed, options):
            out = fp8.attend(quantize, *packed, options, *bounds)
        else:
            out = attention_varlen(*packed, bounds[0], bounds[1], **options)
        return out.unflatten(0, q.shape[:2]), None

    said = pattern.padded or (attention_mask is not None and attention_mask.dtype == torch.int32)
    if not said and (attention_mask is None or attention_mask.dim() == 2):
        # Not every model shows its positions to the mask function.
        ids = _documents(kwargs.get("position_ids"), q, k)
        attention_mask = attention_mask if ids is None else ids
    if attention_mask is None:
        if pattern.causal and k.shape[1] > q.shape[1] > 1:
            # What the library means without a mask: a first pass into a longer, still empty static cache.
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    elif attention_mask.dim() == 2:
        k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]
        if attention_mask.dtype == torch.int32:
            options["mask"] = _value(masks.Documents, attention_mask)
        elif pattern.padded:
            options["mask"] = _value(masks.KeyMask, attention_mask)
    else:
        fitting = _fitting(attention_mask[..., : k.shape[1]], q)
        options["mask" if fitting.dtype == torch.bool else "bias"] = fitting
    if position_bias is not None and position_bias.dim() == 2:
        position, position_bias = relative_position(position_bias), None
        if position is None or options.get("bias") is None:
            options["bias"] = position
        else:  # a call has one bias: the sum
            position_bias = position.to_dense(q.shape[1], k.shape[1])
    if position_bias is not None:
        position_bias = position_bias[..., : k.shape[1]]
        added, position_bias = options.get("bias"), _fitting(position_bias, q)
        options["bias"] = position_bias if added is None else position_bias + added
    if fp8.takes(quantize, q, k, v, options):
        return fp8.attend(quantize, q, k, v, options), None
    return attention(q, k, v, **options), None


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    quantize: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The library's attention function for continuous batching, over its paged cache.

    Every request sees its own keys, causally, and those of its window where the layer has one.

    Args:
        module: the layer; its ``layer_idx`` says which keys of the cache are its own.
        query: (1, heads, tokens, head_dim), the new tokens of all requests one behind the other.
        key, value: (1, heads_k, tokens, head_dim), not repeated for the query heads.
        attention_mask: None.
        dropout, scaling, softcap, s_aux: as in :func:`attention_forward`.
        is_causal: True or None.
        sliding_window: how many keys a row sees, itself among them, where the cache does not keep fewer.
        position_bias: None.
        cache: the library's ``PagedAttentionCache``, which takes the new keys and values.
        cu_seq_lens_q: (requests + 1,) bounds of the requests among the tokens.
        quantize: of :func:`register`; the cache has the type of the model, and so has the call.
        kwargs: what the cache needs, and what else the library passes along.

    Returns:
        (1, tokens, heads, head_dim) and None. Rows that fill a batch up, of no request, are 0.

    Raises:
        ValueError: there is no cache, or what :func:`attention_forward` refuses so.
        NotImplementedError: a mask, a bias, attention that is not causal, and a cache that is not known here
            or gives wrong keys.
        TypeError: float32 on a GPU; the rest as :func:`flash_ext.attention_varlen`.
    """
    if counting:
        tally(fp8.ENTRY)
        if quantize is not None:
            tally_fallback(fp8.ENTRY, "continuous batching has no fp8")
    _refuse(kwargs)
    if cache is None or cu_seq_lens_q is None:
        raise ValueError(
            "this attn_implementation is for continuous batching, and no paged cache came with the call. Use "
            f"the name without 'paged|', such as {NAME!r}, for generate() and for other calls of a model."
        )
    for name, what in (("attention_mask", attention_mask), ("position_bias", position_bias)):
        if what is not None:
            raise NotImplementedError(
                f"{name} is not supported in continuous batching, where the paged cache itself says what "
                "each request sees."
            )
    if is_causal is False:
        raise NotImplementedError("is_causal=False is not supported in continuous batching.")
    layer: Any = module
    key, value = _with_unit_stride(key), _with_unit_stride(value)
    k, v, places, window = paged.updated(cache, layer.layer_idx, key, value, kwargs)
    q = _with_unit_stride(query).squeeze(0).transpose(0, 1)
    left = _narrower(*(-1 if size is None else size - 1 for size in (window, sliding_window)))
    options = _options(Pattern(causal=True, left=left), scaling, softcap, s_aux, dropout)
    out: Tensor = attention_varlen(q, k, v, cu_seq_lens_q.to(torch.int32), **places, **options)
    return out.unsqueeze(0), None


def _options(
    pattern: Pattern, scaling: float | None, softcap: float | None, s_aux: Tensor | None, dropout: float
) -> dict[str, Any]:
    return {
        "causal": pattern.causal, "window_size": (pattern.left, pattern.right), "scale": scaling,
        "softcap": softcap or 0.0, "sinks": s_aux, "dropout_p": dropout,
    }  # fmt: skip


# What models compute for kernels of their own, and put into the mask only if the implementation is called
# "sdpa" or "eager": sparse attention of DeepSeek 3.2 and GLM, blocks of MiniMax M3, sinks of Inkling 2.
_BY_OTHER_KERNELS = {
    "indices": "keys chosen for each query by their index",
    "block_indices": "blocks of keys chosen for each query by their index",
    "sinks": "sinks of each query",
}


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: the weights are never formed. Use attn_implementation='eager'."
        )
    if kwargs.get("head_mask") is not None:
        raise ValueError("head_mask is not supported. Use attn_implementation='eager'.")
    for name, what in _BY_OTHER_KERNELS.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: {what} are not supported. Use attn_implementation='eager'.")


def _pattern_of_module(
    module: torch.nn.Module,
    mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
    q: Tensor,
    k: Tensor,
) -> Pattern:
    """Without a pattern on the mask: a 4-D mask says it all, else the module and its arguments do.

    A 2-D mask loses its pattern when it is copied to another device. What then counts is what the library
    tells flash-attn, or what T5's relatives are known to do.
    """
    if mask is not None and mask.dim() != 2:
        return Pattern()
    causal = hides_later_keys(module) if is_causal is None else is_causal
    causal = bool(causal) and q.shape[1] > 1
    window = (-1, -1)
    if sliding_window is not None and k.shape[1] > sliding_window:
        window = (sliding_window - 1, sliding_window - 1)
    return Pattern(causal, *window, padded=mask is not None)


def _documents(position_ids: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Ids of packed sequences, which restarting positions mark; None for a single one.

    The rule is the library's, ``find_packed_sequence_indices``. Reads the device once a forward pass: all
    layers are given the same tensor, which keeps the answer.
    """
    if position_ids is None or position_ids.dim() != 2 or not 1 < q.shape[1] == k.shape[1] or _is_tracing(q):
        return None
    if not hasattr(position_ids, _ATTRIBUTE):
        ids = (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1, dtype=torch.int32)
        setattr(position_ids, _ATTRIBUTE, (ids, bool((ids[:, -1] != 0).any())))
    found: tuple[Tensor, bool] = getattr(position_ids, _ATTRIBUTE)
    ids, several = found
    return ids if several or is_batch_invariant() else None


def _with_unit_stride(t: Tensor) -> Tensor:
    """A copy where features do not lie side by side, as convolutions over keys leave them."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _fitting(mask: Tensor, q: Tensor) -> Tensor:
    """A mask of a dtype that is taken: some models make theirs in float32 or in the dtype of the weights."""
    return mask if mask.dtype in (torch.bool, torch.float32, q.dtype) else mask.to(q.dtype)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
