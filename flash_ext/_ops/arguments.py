"""From what a caller writes to what the operators take: every modifier checked in words and in one shape.

Checks read metadata only, so they neither wait for a device nor break a graph. The one look at values is that
at float masks, see :func:`warn_about_zero_one_mask`.
"""

from __future__ import annotations

import math
import operator
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..block_mask import BlockMask, with_leading
from ..relative_position import RelativePosition
from .modifiers import Modifiers

if TYPE_CHECKING:
    from torch import Generator


class ModifierOptions(TypedDict, total=False):
    """The keywords for modifiers that every public function takes; see :func:`flash_ext.attention`."""

    attn_mask: Tensor | None
    bias: RelativePosition | None
    key_padding_mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    softcap: float
    dropout_p: float
    document_ids: Tensor | tuple[Tensor, Tensor] | None
    prefix_lens: Tensor | None
    sink_tokens: int
    chunk_size: int
    hidden_rows: Tensor | None
    hidden_keys: Tensor | None
    block_mask: BlockMask | None


class _Sizes(NamedTuple):
    """Sizes of one call. Packed: the lengths inside sequences are unknown, and rows and keys are totals."""

    packed: bool
    batch: int
    num_heads: int
    rows: int
    keys: int


def normalise(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    *,
    top_left: bool,
    rng: Tensor | None,
    keep_repeats: bool = False,
    attn_mask: Tensor | None = None,
    bias: RelativePosition | None = None,
    key_padding_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    prefix_lens: Tensor | None = None,
    sink_tokens: int = 0,
    chunk_size: int = 0,
    hidden_rows: Tensor | None = None,
    hidden_keys: Tensor | None = None,
    block_mask: BlockMask | None = None,
) -> Modifiers | None:
    """The modifiers of a call as the operators take them, or None when nothing is asked for.

    Args:
        q, k, cu_seqlens_q: of the call; their shapes are needed, their own checks are the operators'.
        top_left: alignment of the call.
        rng: seed and offset for dropout; drawn or given, whatever dropout_p is.
        keep_repeats: leave an expanded float mask as it is, because its gradient is wanted in its own shape.
        attn_mask and the rest: as in :func:`flash_ext.attention`.

    Raises:
        TypeError, ValueError: naming the argument, what it holds and what it should.
    """
    sizes = _sizes(q, k, cu_seqlens_q)
    softcap = _number("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (off) or a positive finite number, got {softcap}.")
    dropout_p = checked_dropout_p(dropout_p)
    sink_tokens = _count("sink_tokens", sink_tokens)
    chunk_size = _count("chunk_size", chunk_size)

    added = mask = None
    if attn_mask is not None:
        attn_mask = _checked_mask(attn_mask, "attn_mask", q, sizes, keep_repeats)
        added, mask = (None, attn_mask) if attn_mask.dtype == torch.bool else (attn_mask, None)
    if bias is not None:
        added = _by_distance(bias, added, q, sizes)
    blocks, block_rows, block_cols = None, 0, 0
    if block_mask is not None:
        blocks, block_rows, block_cols = _checked_blocks(block_mask, q, sizes)
        elements = _elements(block_mask, sizes)
        if elements is not None:
            elements = _checked_mask(elements, "block_mask.elements", q, sizes, False)
            mask = elements if mask is None else _both(mask, elements, sizes)
    if key_padding_mask is not None:
        _check_key_padding(key_padding_mask, q, sizes)
        if mask is None and document_ids is None and not sizes.packed:
            # As a mask it becomes one bit a key, which costs the kernels less than an id to compare.
            mask, key_padding_mask = key_padding_mask[:, None, None, :], None
    document_q, document_k = _documents(document_ids, key_padding_mask, q, sizes)
    if prefix_lens is not None:
        prefix_lens = _int_tensor(prefix_lens, "prefix_lens", q, [(sizes.batch,)], "(batch,)").contiguous()
    if hidden_rows is not None:
        hidden_rows = _intervals(hidden_rows, "hidden_rows", q, sizes, sizes.keys)
    if hidden_keys is not None:
        hidden_keys = _intervals(hidden_keys, "hidden_keys", q, sizes, sizes.rows)
    if alibi_slopes is not None:
        shapes = [(sizes.num_heads,), (sizes.batch, sizes.num_heads)]
        layout = "(num_heads,) or (batch, num_heads)"
        alibi_slopes = _per_head(alibi_slopes, "alibi_slopes", q, shapes, layout)
    if sinks is not None:
        sinks = _per_head(sinks, "sinks", q, [(sizes.num_heads,)], "(num_heads,)")

    tensors = (added, mask, document_q, prefix_lens, hidden_rows, hidden_keys, blocks, alibi_slopes, sinks)
    numbers = (softcap, dropout_p, sink_tokens, chunk_size, top_left)
    if all(tensor is None for tensor in tensors) and not any(numbers):
        return None
    return Modifiers(
        added, mask, document_q, document_k, prefix_lens, hidden_rows, hidden_keys, blocks, alibi_slopes,
        sinks, rng if dropout_p > 0 else None, softcap, dropout_p, block_rows, block_cols, sink_tokens,
        chunk_size, top_left,
    )  # fmt: skip


def _sizes(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None) -> _Sizes:
    packed = cu_seqlens_q is not None
    layout = "(total, num_heads, head_dim)" if packed else "(batch, seqlen, num_heads, head_dim)"
    for name, t in (("q", q), ("k", k)):
        if t.dim() != (3 if packed else 4):
            raise ValueError(f"{name} must have shape {layout}, got {_shape(t)}.")
    if cu_seqlens_q is None:
        return _Sizes(False, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {_shape(cu_seqlens_q)}.")
    return _Sizes(True, cu_seqlens_q.shape[0] - 1, q.shape[1], q.shape[0], k.shape[0])


# ---- numbers -------------------------------------------------------------------------------------------


def _number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Tensor) or not hasattr(value, "__float__"):
        hint = " It would get no gradient; pass a number." if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be a number, got {type(value).__qualname__}.{hint}")
    return float(value)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int):
        if isinstance(value, Tensor) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int, got {type(value).__qualname__}.")
        value = operator.index(value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}; 0 is off.")
    return value


def checked_dropout_p(dropout_p: Any) -> float:
    dropout_p = _number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be a probability from 0 to 1, got {dropout_p}.")
    return dropout_p


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


def _checked_mask(t: Any, name: str, q: Tensor, sizes: _Sizes, keep_repeats: bool) -> Tensor:
    """A mask or bias as a 4-d tensor in which broadcast dimensions have size 1."""
    _check_tensor(t, name)
    if t.dtype != torch.bool:
        _check_bias_dtype(t, name, q)
        warn_about_zero_one_mask(t)
    _check_device(t, name, q)
    if not 1 <= t.dim() <= 4:
        raise ValueError(f"{name} must have 1 to 4 dimensions, got shape {_shape(t)}.")
    added = 4 - t.dim()
    want = (sizes.batch, sizes.num_heads, sizes.rows, sizes.keys)
    # Packed calls look rows and keys up inside each sequence; a mask may end before or after one does.
    checked = want[:2] if sizes.packed else want
    for dim in range(added, len(checked)):
        size = t.shape[dim - added]
        if size != 1 and size != want[dim]:
            raise ValueError(_broadcast_error(t, name, sizes, want))
    if not keep_repeats:
        t = _without_repeats(t, [dim - added for dim in range(added, len(checked))])
    return with_leading(t, 4)


def _check_bias_dtype(t: Tensor, name: str, q: Tensor) -> None:
    if t.dtype in (torch.float32, q.dtype):
        return
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        if t.dtype == torch.get_autocast_dtype(device):
            return
    if t.is_floating_point():
        cure = f"Cast it with .to({q.dtype}) or .float()"
    else:
        cure = "For a mask of 0 and 1 pass .bool(), for numbers to be added .float()"
    raise TypeError(
        f"{name} must be torch.bool (True = take part), torch.float32 or the dtype of q, {q.dtype} (added to "
        f"the scores), got {t.dtype}. {cure}."
    )


def _by_distance(bias: Any, other: Tensor | None, q: Tensor, sizes: _Sizes) -> Tensor:
    """What distances read of a relative-position bias, (1, num_heads|1, 2 n + 1)."""
    if not isinstance(bias, RelativePosition):
        hint = " A bias in a tensor goes into attn_mask=." if isinstance(bias, Tensor) else ""
        raise TypeError(
            f"bias must be a flash_ext.RelativePosition or None, got {type(bias).__qualname__}.{hint}"
        )
    if other is not None:
        raise ValueError(
            f"attn_mask must be torch.bool beside bias, because a call adds one bias, got {other.dtype}. "
            "Pass the sum of both: attn_mask=attn_mask + bias.to_dense(seqlen_q, seqlen_k), without bias."
        )
    _check_device(bias.table, "the table of bias", q)
    if bias.num_heads not in (1, sizes.num_heads):
        raise ValueError(
            f"the table of bias must have the {sizes.num_heads} heads of q, or 1 for all of them, got "
            f"{bias.num_heads}: its shape is (num_heads, buckets), here {_shape(bias.table)}."
        )
    return bias.by_distance(_statistic(q)).contiguous()


def _broadcast_error(t: Tensor, name: str, sizes: _Sizes, want: tuple[int, ...]) -> str:
    if sizes.packed:
        shape = f"(batch, num_heads, rows, keys) = ({want[0]}, {want[1]}, any, any) inside each sequence"
        return f"{name} must broadcast to {shape}, got {_shape(t)}."
    hint = ""
    if t.dim() == 2 and t.shape[0] == sizes.batch and t.shape[1] == sizes.keys:
        hint = " For a mask (batch, seqlen_k) of keys pass key_padding_mask=."
    return f"{name} must broadcast to (batch, num_heads, seqlen_q, seqlen_k) = {want}, got {_shape(t)}.{hint}"


def _without_repeats(t: Tensor, dims: list[int]) -> Tensor:
    """``t`` with its expanded dimensions (stride 0) narrowed to 1, so that the kernels know they repeat.

    With a gradient this is done past the expand, from the tensor that was expanded: the kernels then sum over
    the repeats, and no gradient is written out in full. Where that tensor is unknown, as when compiling, or
    ``t`` collects a gradient of its own, every element must get its own gradient, and ``t`` stays as it is.
    """
    repeated = [dim for dim in dims if t.stride(dim) == 0 and t.shape[dim] > 1]
    if not repeated:
        return t
    if t.requires_grad:
        base = _expanded_tensor(t)
        if base is None:
            return t
        size = [1 if dim in repeated else n for dim, n in enumerate(t.shape)]
        return base.as_strided(size, t.stride(), t.storage_offset())
    for dim in repeated:
        t = t.narrow(dim, 0, 1)
    return t


def _expanded_tensor(t: Tensor) -> Tensor | None:
    """The tensor that ``t`` is a view of, if the gradient of ``t`` goes there and nowhere else."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    base = t._base
    if base is None or t.is_leaf or t.retains_grad or t._backward_hooks:
        return None
    repeats = any(stride == 0 and n > 1 for stride, n in zip(base.stride(), base.shape))
    is_plain = type(base) in (Tensor, torch.nn.Parameter) and base.dtype == t.dtype
    return base if is_plain and base.requires_grad and not repeats else None


def _both(a: Tensor, b: Tensor, sizes: _Sizes) -> Tensor:
    """a AND b. In packed calls either may end before the other; what is missing hides."""
    if not sizes.packed:
        return a & b
    ends = [_end(a.shape[dim], b.shape[dim]) for dim in (2, 3)]
    cut = [t[:, :, : ends[0], : ends[1]] for t in (a, b)]
    return cut[0] & cut[1]


def _end(a: int, b: int) -> int:
    """Size of the intersection of two sizes of which 1 repeats for ever."""
    if a == 1 or b == 1:
        return b if a == 1 else a
    return min(a, b)


# ---- the mask that is added although it was meant to be applied ----------------------------------------

FLOAT_MASKS_LOOKED_AT = 16
ELEMENTS_LOOKED_AT = (2, 2, 32, 32)  # along (batch, num_heads, seqlen_q, seqlen_k)


class _ZeroOneWatch:
    """How many float masks will still be looked at in this process."""

    left = FLOAT_MASKS_LOOKED_AT


def warn_about_zero_one_mask(t: Tensor) -> None:
    """Warns, once per process, about a float mask that holds only 0 and 1.

    Looked at are the first 16 float masks of the process, and of each at most 4096 elements spread over all
    of it; at least one must be 1, because a bias of zeros is a common start. On a GPU a look waits for the
    device. None is taken while compiling, tracing, capturing a CUDA graph, or under a dispatch mode or a
    torch.func transform.
    """
    if torch.compiler.is_compiling() or _ZeroOneWatch.left == 0:
        return
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or t.is_meta:
        return
    if type(t) not in (Tensor, torch.nn.Parameter) or not 1 <= t.dim() <= 4 or t.numel() == 0:
        return
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    _ZeroOneWatch.left -= 1
    limits = ELEMENTS_LOOKED_AT[4 - t.dim() :]
    sample = t.detach()[tuple(slice(None, None, -(-n // most)) for n, most in zip(t.shape, limits))]
    is_one = sample == 1
    if bool(is_one.any() & (is_one | (sample == 0)).all()):
        _ZeroOneWatch.left = 0
        warnings.warn(
            f"attn_mask is {t.dtype} and holds only 0 and 1: a float mask is added to the scores, not "
            "applied. For a mask of 1 = take part and 0 = hide pass attn_mask.bool().",
            UserWarning,
            stacklevel=7,  # the caller of attention
        )


# ---- structure -----------------------------------------------------------------------------------------


def _check_key_padding(key_padding_mask: Any, q: Tensor, sizes: _Sizes) -> None:
    _check_tensor(key_padding_mask, "key_padding_mask")
    if key_padding_mask.dtype != torch.bool:
        raise TypeError(
            "key_padding_mask must be torch.bool (True = take part), got "
            f"{key_padding_mask.dtype}. Convert it with .bool()."
        )
    _check_device(key_padding_mask, "key_padding_mask", q)
    shape = (sizes.keys,) if sizes.packed else (sizes.batch, sizes.keys)
    if key_padding_mask.shape != shape:
        layout = "(total_k,)" if sizes.packed else "(batch, seqlen_k)"
        raise ValueError(
            f"key_padding_mask must have shape {layout} = {shape}, got {_shape(key_padding_mask)}."
        )


def _documents(
    document_ids: Any, key_padding_mask: Tensor | None, q: Tensor, sizes: _Sizes
) -> tuple[Tensor | None, Tensor | None]:
    """Ids of rows and keys; a hidden key is one of no document (-1)."""
    shape_q, shape_k = ((n,) if sizes.packed else (sizes.batch, n) for n in (sizes.rows, sizes.keys))
    layout = "(total,)" if sizes.packed else "(batch, seqlen) or (seqlen,)"
    ids_q = ids_k = None
    if document_ids is not None:
        pair = document_ids
        if isinstance(document_ids, Tensor):
            if sizes.rows != sizes.keys:
                raise ValueError(
                    f"document_ids must be a pair (of q, of k) when the lengths differ, got one tensor for "
                    f"lengths {sizes.rows} and {sizes.keys}."
                )
            pair = (document_ids, document_ids)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                "document_ids must be a torch.Tensor or a pair of them (of q, of k), got "
                f"{type(document_ids).__qualname__}."
            )
        names = ("document_ids",) * 2 if pair[0] is pair[1] else ("document_ids[0]", "document_ids[1]")
        ids_q, ids_k = (
            _int_tensor(ids, name, q, [shape] if sizes.packed else [shape, shape[1:]], layout)
            .expand(shape)
            .contiguous()
            for ids, name, shape in zip(pair, names, (shape_q, shape_k))
        )
    if key_padding_mask is not None:
        if ids_k is None:
            ids_q = torch.zeros(shape_q, dtype=torch.int32, device=q.device)
            ids_k = key_padding_mask.to(torch.int32) - 1
        else:
            ids_k = ids_k.masked_fill(~key_padding_mask, -1)
        ids_k = ids_k.contiguous()
    return ids_q, ids_k


def _intervals(t: Any, name: str, q: Tensor, sizes: _Sizes, length: int) -> Tensor:
    """Hidden intervals (batch or 1, num_heads or 1, length, 2 n), packed without batch; contiguous."""
    lead = (sizes.num_heads,) if sizes.packed else (sizes.batch, sizes.num_heads)
    dims = len(lead) + 2
    what = ("total_k" if sizes.packed else "seqlen_k") if name == "hidden_rows" else (
        "total_q" if sizes.packed else "seqlen_q")  # fmt: skip
    layout = f"({'' if sizes.packed else 'batch, '}num_heads, {what}, 2 or 4)"
    _check_int32(t, name, q)
    given = _shape(t)
    fits = 2 <= t.dim() <= dims and t.shape[-1] in (2, 4) and t.shape[-2] == length
    if fits:
        t = with_leading(t, dims)
        fits = all(t.shape[dim] in (1, size) for dim, size in enumerate(lead))
    if not fits:
        raise ValueError(
            f"{name} must have shape {layout} with {what} = {length}, where batch and num_heads may be 1 or "
            f"left out, got {given}. The last dimension holds one or two pairs [start, end)."
        )
    return _without_repeats(t, list(range(dims - 2))).contiguous()


def _checked_blocks(block_mask: Any, q: Tensor, sizes: _Sizes) -> tuple[Tensor, int, int]:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask must be a flash_ext.BlockMask, got {type(block_mask).__qualname__}. Build one with "
            "flash_ext.BlockMask.from_dense, .from_rule or, from PyTorch's BlockMask, .from_torch."
        )
    blocks, (rows, cols) = block_mask.blocks, block_mask.block_size
    _check_device(blocks, "block_mask", q)
    want = (sizes.batch, sizes.num_heads, -(-sizes.rows // rows), -(-sizes.keys // cols))
    fits = all(n in (1, size) for n, size in zip(blocks.shape[:2], want))
    if not fits or (not sizes.packed and blocks.shape[2:] != want[2:]):
        tail = ", any, any)" if sizes.packed else f", {want[2]}, {want[3]})"
        raise ValueError(
            f"block_mask must hold ({want[0]} or 1, {want[1]} or 1{tail} blocks of {rows} by {cols} for this "
            f"call, got {_shape(blocks)}."
        )
    return _without_repeats(blocks, [0, 1]), rows, cols


def _elements(block_mask: BlockMask, sizes: _Sizes) -> Tensor | None:
    """The bits of cut blocks written out; on a side on which they repeat, as long as the call."""
    elements = block_mask.elements
    if elements is None or block_mask.lengths is None or sizes.packed:
        return elements
    ends = [n if own is None else None for own, n in zip(block_mask.lengths, (sizes.rows, sizes.keys))]
    return elements[:, :, : ends[0], : ends[1]]


# ---- tensors -------------------------------------------------------------------------------------------


def _per_head(t: Any, name: str, q: Tensor, shapes: list[tuple[int, ...]], layout: str) -> Tensor:
    """Slopes or sinks in the dtype of the row statistics."""
    _check_tensor(t, name)
    if not t.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {t.dtype}. Convert it with .float().")
    _check_device(t, name, q)
    _check_shape(t, name, shapes, layout)
    return t.to(_statistic(q)).contiguous()


def _statistic(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _int_tensor(t: Any, name: str, q: Tensor, shapes: list[tuple[int, ...]], layout: str) -> Tensor:
    _check_int32(t, name, q)
    _check_shape(t, name, shapes, layout)
    return t


def _check_int32(t: Any, name: str, q: Tensor) -> None:
    _check_tensor(t, name)
    if t.dtype != torch.int32:
        raise TypeError(f"{name} must be torch.int32, got {t.dtype}. Convert it with .to(torch.int32).")
    _check_device(t, name, q)


def _check_tensor(t: Any, name: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(t).__qualname__}.")


def _check_device(t: Tensor, name: str, q: Tensor) -> None:
    if t.device != q.device:
        raise ValueError(
            f"{name} must be on the device of q, {q.device}, got {t.device}. Move it with .to(q.device)."
        )


def _check_shape(t: Tensor, name: str, shapes: list[tuple[int, ...]], layout: str) -> None:
    if all(t.shape != shape for shape in shapes):
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {layout}, here {wanted}, got {_shape(t)}.")


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)
