"""The attention functions: dense, packed, and the functional pair of forward and backward.

Shapes are written with b = batch, h = query heads, h_k = key/value heads (h is a multiple of h_k; query head
i reads key head i // (h // h_k)), d = head_dim of q and k, dv = head_dim of v. Everything runs on CUDA
(float16, bfloat16; d and dv up to 256) and on CPU (also float32 and float64), accumulates in float32 or
wider, and needs memory linear in the sequence length.

Tensors may have any strides whose last one is 1. Results are contiguous. Nothing is copied, with one
exception: an incoming gradient whose last stride is not 1, such as that of ``out.sum()``.

Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from ._ops.arguments import ModifierOptions
from ._ops.dispatch import run_fwd, run_modified_fwd
from .block_mask import BlockMask
from .relative_position import RelativePosition

if TYPE_CHECKING:
    from typing_extensions import Unpack

Alignment: TypeAlias = Literal["bottom_right", "top_left"]

# The defaults as objects: what a caller left out is recognised by identity, without asking a tensor for its
# value. An explicit 0 takes the way through all checks, and means the same.
_OFF = 0.0
_NONE = 0


class Options(ModifierOptions, total=False):
    """The keywords of :func:`attention` that do not change what it returns."""

    causal: bool | Alignment
    window: tuple[int, int]
    softmax_scale: float | None
    generator: torch.Generator | None
    deterministic: bool
    path: str | None


class VarlenOptions(Options, total=False):
    """Those of :func:`attention_varlen`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[True, "row", "head"],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[True, "row", "head"],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Alignment = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    attn_mask: Tensor | None = None,
    bias: RelativePosition | None = None,
    key_padding_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = _OFF,
    dropout_p: float = _OFF,
    generator: torch.Generator | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    prefix_lens: Tensor | None = None,
    sink_tokens: int = _NONE,
    chunk_size: int = _NONE,
    hidden_rows: Tensor | None = None,
    hidden_keys: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    return_max_logits: bool | Literal["row", "head"] = False,
    deterministic: bool = False,
    path: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(softmax_scale * q @ k^T) @ v, exact, differentiable in q, k and v, with every mask and bias.

    Causal and window masks are aligned at the bottom right: row i sits at key i + seqlen_k - seqlen_q, so the
    last query sees the last key whatever the lengths. A row that sees no key has out 0, lse -inf, and
    contributes nothing to any gradient.

    In float16, gradients of q and k are lost, inf or NaN, where P (dP - delta), the gradient of a score,
    reaches 65504 (dout and v of N(0, 1) times 300). bfloat16 has no such limit.

    The order is: scale, softcap, bias and ALiBi added, masks, sinks in the denominator, softmax, dropout. All
    options combine; a key takes part when every mask lets it, and what is per head counts query heads. A
    float ``attn_mask``, the table of ``bias``, ``alibi_slopes`` and ``sinks`` get their gradients, the first
    summed over its broadcast dimensions.

    Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.

    Args:
        q: (b, seqlen_q, h, d) float16 or bfloat16; on CPU also float32 or float64.
        k: (b, seqlen_k, h_k, d), dtype of q.
        v: (b, seqlen_k, h_k, dv), dtype of q.
        causal: hide the keys after a row's aligned position; the same as a right window of 0. True or
            "bottom_right" aligns as said above, "top_left" puts row i at key i, for the window as well.
        window: (left, right), how many keys before and after the aligned position a row sees, both inclusive;
            -1 is unlimited.
        softmax_scale: factor on the dot products, any finite number, without a gradient; None is 1/sqrt(d).
        attn_mask: bool (True = take part), or float32 or the dtype of q and then added to the scores: -inf
            hides. 1 to 4 dimensions that broadcast from the right to (b, h, seqlen_q, seqlen_k); any strides,
            read in place. A float mask of only 0 and 1 warns once, because it hides nothing.
        bias: a :class:`flash_ext.RelativePosition` of h heads or 1, added to the scores by the distance of
            the key from the aligned position: nothing of size seqlen_q * seqlen_k is formed. Not with a float
            ``attn_mask``.
        key_padding_mask: (b, seqlen_k) bool, True = take part; holes anywhere.
        alibi_slopes: (h,) or (b, h) floating point: slope * |aligned position - key| is subtracted from the
            scores.
        sinks: (h,) floating point: one more logit per head in the denominator. A row that sees no key then
            has out 0 and lse = its sink.
        softcap: c > 0 makes a scaled score x into c * tanh(x / c); 0 is off. A number, without a gradient.
        dropout_p: probability, 0..1, of dropping a weight after the softmax; the others grow by 1/(1 - p),
            lse does not change. What is dropped depends on the random numbers and on the position only.
        generator: the source of dropout's random numbers, on the device of q; None is the device's default
            one. Each call with dropout draws two int64 from it. Checkpointing and torch.compile know the
            default one only.
        document_ids: (b, seqlen) or (seqlen,) int32, or a pair of them (of q, of k): a row sees the keys of
            its own document. Negative ids match nothing.
        prefix_lens: (b,) int32: the first keys of each sequence, visible to every row whatever ``causal``,
            ``window`` and ``chunk_size`` say.
        sink_tokens: this many first keys stay visible whatever the left window and ``chunk_size`` say.
        chunk_size: rows see the keys of their own chunk of this many positions; 0 is off.
        hidden_rows: (b, h, seqlen_k, 2 n) int32, n = 1 or 2; b and h may be 1 or left out: for each key, n
            intervals [start, end) of query rows that may not see it.
        hidden_keys: (b, h, seqlen_q, 2 n) int32: for each row, n intervals of keys it may not see.
        block_mask: a :class:`flash_ext.BlockMask`, the blocks of scores that take part.
        return_lse: also return the logsumexp of every row, within 1e-5 of the exact one of the scores up to 4
            million keys (with masks and biases for random data); a softcap adds 1e-7 of a score on "sm90"
            where scores are below 3/4 of a cap up to 100, else up to 3e-7 of the cap.
        return_max_logits: also return the largest final score (after bias and ALiBi, sinks not counted, -inf
            without any): True or "row" for every row, "head" for every head over batch and rows. Carries no
            gradient. GPUs leave out scores that are NaN, which out and lse do show.
        deterministic: make the gradient of q repeatable bit for bit, as all others always are. Slower on a
            GPU. ``torch.use_deterministic_algorithms(True)`` switches it on as well.
        path: the implementation: "sm90" or "sm80" on a GPU, "cpu" on CPU, None for the fastest that serves
            the call. For tests and tuning, constraints on the choice of kernels may follow or stand alone, as
            in "sm90 kv_splits=4": ``row`` (of ``python -m flash_ext.info --plan``), ``kv_splits``,
            ``gqa_splits``, ``fwd_block_m`` (128 or 192), ``dq_pool``, ``short_kernels`` (0 or 1). ``row`` is
            refused where it cannot run the call; the others count where a call has the choice they name.

    Returns:
        out (b, seqlen_q, h, dv), dtype of q; with ``return_lse`` also lse (b, h, seqlen_q), natural logarithm
        of the sum of exponentials of the final scores and the sink, float32 (float64 for float64 inputs).
        Both carry gradients. With ``return_max_logits`` last (b, h, seqlen_q) or (h,), dtype of lse.

    Raises:
        ValueError, TypeError: an argument has a shape, stride, device, dtype or value that does not fit; the
            message names it. Also a ``path`` that cannot serve the call, with every path's reason.
        NotImplementedError: a head_dim above 256 on a GPU, or a GPU that no path serves.

    Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> flash_ext.attention(q, k, v, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    if (
        attn_mask is None
        and bias is None
        and key_padding_mask is None
        and alibi_slopes is None
        and sinks is None
        and softcap is _OFF
        and dropout_p is _OFF
        and document_ids is None
        and prefix_lens is None
        and sink_tokens is _NONE
        and chunk_size is _NONE
        and hidden_rows is None
        and hidden_keys is None
        and block_mask is None
        and generator is None
        and return_max_logits is False
        and causal.__class__ is not str
    ):
        result = run_fwd(q, k, v, None, None, None, None, softmax_scale, causal, window, deterministic, path)
        return result if return_lse else result[0]
    options = (None, None, softmax_scale, causal, window, deterministic, path)
    asked = {
        "attn_mask": attn_mask, "bias": bias, "key_padding_mask": key_padding_mask,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "softcap": softcap, "dropout_p": dropout_p,
        "document_ids": document_ids, "prefix_lens": prefix_lens, "sink_tokens": sink_tokens,
        "chunk_size": chunk_size, "hidden_rows": hidden_rows, "hidden_keys": hidden_keys,
        "block_mask": block_mask,
    }  # fmt: skip
    return _with_statistics(q, k, v, None, None, options, asked, generator, return_lse, return_max_logits)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[True, "row", "head"],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[True, "row", "head"],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | Alignment = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    attn_mask: Tensor | None = None,
    bias: RelativePosition | None = None,
    key_padding_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = _OFF,
    dropout_p: float = _OFF,
    generator: torch.Generator | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    prefix_lens: Tensor | None = None,
    sink_tokens: int = _NONE,
    chunk_size: int = _NONE,
    hidden_rows: Tensor | None = None,
    hidden_keys: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    return_max_logits: bool | Literal["row", "head"] = False,
    deterministic: bool = False,
    path: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """:func:`attention` for sequences of different lengths, packed one after the other without padding.

    Sequence i has rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q and the corresponding rows of k and v; it
    sees its own keys only. Either side of a sequence may be empty. The values of cu_seqlens stay on the
    device: there is no host synchronisation. Values outside the tensors are clamped, values that decrease
    are forced into order, and rows that belong to no sequence have out 0, lse -inf and gradients 0. A forward
    takes the keys of a sequence from wherever cu_seqlens_k says, also where sequences share them; gradients
    are right only where cu_seqlens_k does not decrease.

    Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.

    Args:
        q: (total_q, h, d); dtypes as in :func:`attention`.
        k: (total_k, h_k, d).
        v: (total_k, h_k, dv).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on the device of q, contiguous: where each sequence
            starts, and where the last one ends.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths in rows, for FLOP counts; no kernel needs
            them, and they change no result. Leave them out when not at hand. A negative one is refused; one
            in a tensor is not read, because that would wait for the device.
        causal, window: as in :func:`attention`, with the alignment of each sequence by its own lengths.
        attn_mask: (batch, h, rows, keys) in coordinates inside each sequence; where rows or keys (unless 1)
            end before a sequence does, a bool mask hides and a float one adds 0.
        key_padding_mask: (total_k,) bool.
        document_ids: (total,) int32, or a pair (total_q,), (total_k,).
        hidden_rows, hidden_keys: (h, total_k, 2 n) and (h, total_q, 2 n) int32, h may be 1 or left out; the
            intervals count inside each sequence.
        block_mask: blocks inside each sequence; what lies beyond the map is hidden.
        bias: as in :func:`attention`, by distances inside each sequence.
        alibi_slopes, prefix_lens: as in :func:`attention`, b being the number of sequences.
        softmax_scale, sinks, softcap, dropout_p, generator, sink_tokens, chunk_size, return_lse,
            deterministic, path: as in :func:`attention`.
        return_max_logits: as in :func:`attention`; (h, total_q) by row.

    Returns:
        out (total_q, h, dv); with ``return_lse`` also lse (h, total_q). As in :func:`attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: as in :func:`attention`.
    """
    if (
        attn_mask is None
        and bias is None
        and key_padding_mask is None
        and alibi_slopes is None
        and sinks is None
        and softcap is _OFF
        and dropout_p is _OFF
        and document_ids is None
        and prefix_lens is None
        and sink_tokens is _NONE
        and chunk_size is _NONE
        and hidden_rows is None
        and hidden_keys is None
        and block_mask is None
        and generator is None
        and return_max_logits is False
        and causal.__class__ is not str
    ):
        result = run_fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window,
            deterministic, path,
        )  # fmt: skip
        return result if return_lse else result[0]
    options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, deterministic, path)
    asked = {
        "attn_mask": attn_mask, "bias": bias, "key_padding_mask": key_padding_mask,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "softcap": softcap, "dropout_p": dropout_p,
        "document_ids": document_ids, "prefix_lens": prefix_lens, "sink_tokens": sink_tokens,
        "chunk_size": chunk_size, "hidden_rows": hidden_rows, "hidden_keys": hidden_keys,
        "block_mask": block_mask,
    }  # fmt: skip
    return _with_statistics(
        q, k, v, cu_seqlens_q, cu_seqlens_k, options, asked, generator, return_lse, return_max_logits
    )


def _with_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: tuple[Any, ...],
    asked: dict[str, Any],
    generator: torch.Generator | None,
    return_lse: bool,
    return_max_logits: bool | Literal["row", "head"],
) -> Tensor | tuple[Tensor, ...]:
    """out, then lse and the maxima if they are asked for."""
    if return_max_logits not in (False, True, "row", "head"):
        raise ValueError(f'return_max_logits must be a bool, "row" or "head", got {return_max_logits!r}.')
    out, lse, row_max = run_modified_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, options, asked, generator=generator, draws=True,
        want_row_max=return_max_logits is not False,
    )  # fmt: skip
    results = [out, lse] if return_lse else [out]
    if return_max_logits is not False and row_max is not None:
        results.append(_over_rows(row_max) if return_max_logits == "head" else row_max)
    return results[0] if len(results) == 1 else tuple(results)


def _over_rows(row_max: Tensor) -> Tensor:
    """(b, h, seqlen_q) or (h, total_q) to (h,); -inf where there is no row."""
    by_head = row_max.movedim(-2, 0).flatten(1)
    return by_head.amax(1) if by_head.shape[1] else by_head.new_full(by_head.shape[:1], float("-inf"))
