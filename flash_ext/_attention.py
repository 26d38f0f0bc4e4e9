"""The attention functions, dense and packed.

Shapes are written with b = batch, h = query heads, h_k = key/value heads (h is a multiple of h_k; query head
i reads key head i // (h // h_k)), d = head_dim of q and k, dv = head_dim of v. Everything runs on CUDA
(float16, bfloat16; d and dv up to 256) and on CPU (also float32 and float64), accumulates in float32 or
wider, and needs memory linear in the sequence length.

Tensors may have any strides whose last one is 1. Results are contiguous. Nothing is copied, with one
exception: an incoming gradient whose last stride is not 1, such as that of ``out.sum()``.

Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, TypedDict, overload

import torch
from torch import Tensor

from ._count import counting, tally
from ._masks.biases import Bias
from ._masks.value import Mask
from ._ops.arguments import Asked
from ._ops.calls import run_kept_fwd
from ._ops.dispatch import check_bounds, from_heads_first, run_fwd, run_modified_fwd
from ._ops.dispatch_cached import run_cached
from ._ops.words import refuse_unknown

if TYPE_CHECKING:
    from typing_extensions import Unpack

Layout: TypeAlias = Literal["bshd", "bhsd"]

# The defaults as objects: what a caller left out is recognised by identity, without asking a tensor for its
# value. An explicit 0 takes the way through all checks, and means the same.
_OFF = 0.0


class AuxRequest(NamedTuple):
    """What a call returns beside out, in an :class:`AuxOutput`. torch's own AuxRequest serves as well.

    Attributes:
        lse: the logsumexp of every row, within 1e-5 of the exact one of the scores for random data of up to 4
            million keys (up to 3e-3 off where nearly all of so many weigh the same); a softcap adds 1e-7 of a
            score on "sm90" where scores are below 3/4 of a cap up to 100, else up to 3e-7 of the cap. It
            carries a gradient. No call makes one that neither its caller nor a gradient needs.
        max_scores: the largest final score of every row, after biases, sinks not counted, within 1e-6 of
            itself; with a softcap on "sm80" within 3e-7 of the cap. It carries no gradient. GPUs leave out
            scores that are NaN, which out and lse do show.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was asked for by an :class:`AuxRequest`, float32 (float64 for float64 inputs), else None.

    Attributes:
        lse: (b, h, seqlen_q), packed (h, total_q): natural logarithm of the sum of exponentials of the final
            scores and the sink; -inf in rows that see neither.
        max_scores: the same shape; -inf in rows that see no key.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


class Options(TypedDict, total=False):
    """The keywords of :func:`attention_varlen` that do not change what it returns."""

    causal: bool
    window_size: tuple[int, int]
    scale: float | None
    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    sinks: Tensor | None
    softcap: float
    dropout_p: float
    generator: torch.Generator | None
    deterministic: bool | None
    backend: str | None


class DenseOptions(Options, total=False):
    """Those of :func:`attention`."""

    layout: Layout


class VarlenOptions(Options, total=False):
    """Those of :func:`attention_varlen`."""

    seqused_k: Tensor | None
    block_table: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_aux: None = None, **options: Unpack[DenseOptions]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_aux: Any, **options: Unpack[DenseOptions]
) -> tuple[Tensor, AuxOutput]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = _OFF,
    dropout_p: float = _OFF,
    generator: torch.Generator | None = None,
    return_aux: Any = None,
    layout: Layout = "bshd",
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """softmax(scale * q @ k^T) @ v, exact, differentiable in q, k and v, with every mask and bias.

    ``causal`` and ``window_size`` are aligned at the bottom right: row i sits at key i + seqlen_k - seqlen_q,
    so the last query sees the last key whatever the lengths. ``flash_ext.masks.Causal("top_left")`` and its
    kin align otherwise. A row that sees no key has out 0, lse -inf, and contributes nothing to any gradient.

    In float16, gradients of q and k are lost, inf or NaN, where P (dP - delta), the gradient of a score,
    reaches 65504 (dout and v of N(0, 1) times 300). Without dropout and a gradient of lse it does not while
    the norm of a row of dout times that of a row of v stays below 1e5. bfloat16 has no such limit.

    The order is: scale, softcap, biases added, masks, sinks in the denominator, softmax, dropout. All options
    combine; a key takes part when ``mask``, ``causal`` and ``window_size`` all let it, and what is per head
    counts query heads. Biases and ``sinks`` get their gradients, summed over broadcast dimensions.

    Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.

    Args:
        q: (b, seqlen_q, h, d) float16 or bfloat16; on CPU also float32 or float64.
        k: (b, seqlen_k, h_k, d), dtype of q.
        v: (b, seqlen_k, h_k, dv), dtype of q.
        causal: hide the keys after a row's aligned position; as ``mask & Causal()``.
        window_size: (left, right), how many keys before and after the aligned position a row sees, both
            inclusive; -1 is unlimited. As ``mask & Window(left, right)``.
        scale: factor on the dot products, any finite number, without a gradient; None is 1/sqrt(d).
        mask: which keys take part: a value of :mod:`flash_ext.masks`, or a bool tensor (True = take part) of
            1 to 4 dimensions that broadcast from the right to (b, h, seqlen_q, seqlen_k), which counts as
            ``masks.Dense`` of it. Any strides, read in place.
        bias: what is added to the scores: a bias of :mod:`flash_ext.masks`, or a tensor, float32 or of the
            dtype of q, of the shapes of a mask, which counts as ``masks.DenseBias`` of it. -inf hides.
        sinks: (h,) floating point: one more logit per head in the denominator. A row that sees no key then
            has out 0 and lse = its sink.
        softcap: c > 0 makes a scaled score x into c * tanh(x / c); 0 is off. A number, without a gradient.
        dropout_p: probability, 0..1, of dropping a weight after the softmax; the others grow by 1/(1 - p),
            lse does not change. What is dropped depends on the random numbers and on the position only.
        generator: the source of dropout's random numbers, on the device of q; None is the device's default
            one. Each call with dropout draws two int64 from it. Checkpointing and torch.compile know the
            default one only.
        return_aux: an :class:`AuxRequest` to return lse or the largest scores as well; None for out alone.
        layout: "bhsd" for q, k, v and out of (b, h, seqlen, d): they are read in place, and out is a
            transposed view of a contiguous tensor.
        deterministic: make the gradient of q repeatable bit for bit, as all others always are. Slower on a
            GPU. None does as ``torch.use_deterministic_algorithms`` says, which False does not overrule.
        backend: the implementation: "sm90" or "sm80" on a GPU, "cpu" on CPU, None for the fastest that serves
            the call. For tests and tuning, constraints on the choice of kernels may follow or stand alone, as
            in "sm90 kv_splits=4": ``row`` (of ``python -m flash_ext.info --plan``), ``kv_splits``,
            ``gqa_splits``, ``q_splits``, ``fwd_block_m`` (128 or 192), ``wide_tiles``, ``dq_pool`` or
            ``short_kernels`` (0, 1). ``row`` is refused where it cannot run the call; the others count where
            a call has the choice they name.

    Returns:
        out (b, seqlen_q, h, dv), dtype of q; with ``return_aux`` (out, :class:`AuxOutput`).

    Raises:
        ValueError, TypeError: an argument has a shape, stride, device, dtype or value that does not fit, or
            no kernel executes the mask; the message names it. Also a ``backend`` that cannot serve the call,
            with every backend's reason.
        NotImplementedError: a head_dim above 256 on a GPU, or a GPU that no backend serves.

    Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> flash_ext.attention(q, k, v, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    if unknown:
        refuse_unknown(attention, unknown)
    if counting:
        tally("attention")
    if layout != "bshd":
        q, k, v = from_heads_first(layout, q, k, v)
    if (
        mask is None
        and bias is None
        and sinks is None
        and softcap is _OFF
        and dropout_p is _OFF
        and generator is None
        and return_aux is None
    ):
        out = run_fwd(
            q, k, v, None, None, None, None, scale, causal, window_size, deterministic, backend,
            want_lse=False,
        )[0]  # fmt: skip
        return out if layout == "bshd" else out.transpose(1, 2)
    if generator is None and return_aux is None:
        kept = run_kept_fwd(
            q, k, v, None, None, None, None, scale, causal, window_size, deterministic, backend, mask, bias,
            sinks, softcap, dropout_p,
        )  # fmt: skip
        if kept is not None:
            return kept if layout == "bshd" else kept.transpose(1, 2)
    options = (None, None, scale, causal, window_size, deterministic, backend)
    asked = Asked(mask, bias, sinks, softcap, dropout_p)
    out, aux = _with_aux(q, k, v, None, None, options, asked, generator, return_aux)
    if layout != "bshd":
        out = out.transpose(1, 2)
    return out if return_aux is None else (out, aux)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_aux: None = None,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_aux: Any,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, AuxOutput]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = _OFF,
    dropout_p: float = _OFF,
    generator: torch.Generator | None = None,
    return_aux: Any = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """:func:`attention` for sequences of different lengths, packed one after the other without padding.

    Sequence i has rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q and the corresponding rows of k and v; it
    sees its own keys only. Either side of a sequence may be empty. Rows that belong to no sequence have out
    0, lse -inf and gradients 0. On a GPU nobody looks at the values of cu_seqlens, because that would wait
    for it: values outside the tensors are clamped there, and values that decrease are forced into order.

    Source: FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.

    With ``seqused_k`` keys and values are a cache: how many keys each sequence has is read on the device, so
    a CUDA graph follows lengths and pages that change between replays. Nothing behind a length is read. There
    is no gradient and no dropout. Masks are a ``TokenTree`` by itself, or made of ``Causal`` and ``Window``
    (from the bottom right), ``KeyMask``, ``Dense`` and ``Documents``; others are refused by name. On a GPU
    lengths and pages outside of what there is are clamped; with the environment variable FLASH_EXT_CHECK=1
    they are refused as on the CPU.

    Args:
        q: (total_q, h, d); dtypes as in :func:`attention`.
        k: (total_k, h_k, d); with ``block_table`` (num_pages, page_size, h_k, d), pages of any size, any
            strides with a unit last one.
        v: (total_k, h_k, dv); with ``block_table`` (num_pages, page_size, h_k, dv).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on the device of q, contiguous: where each sequence
            starts, and where the last one ends. With ``block_table`` the latter is not read, None will do.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths in rows, for FLOP counts, where torch's own
            ``varlen_attn`` has them. No kernel needs them, and they change no result. Leave them out when not
            at hand. A negative one is refused; one in a tensor is not read, because that would wait for the
            device. Over a cache they choose kernels as well: give max_seqlen_q there, or a decoding step
            launches kernels for long prompts in vain.
        seqused_k: (batch,) int32: sequence i has the first seqused_k[i] of its keys.
        block_table: (batch, max_pages) int32, rows of any stride: the pages of each sequence in order. Needs
            ``seqused_k``; entries behind a length may hold anything.
        k_descale, v_descale: float32 factors of a cache of 8 bits. k and v are then float8_e4m3fn or int8 in
            pages or entries, with head sizes that are multiples of 16 and rows that start on 16 bytes, and q
            keeps its 16 bits. Shape () or (1,): one for all; (h_k,): of heads; (batch, h_k): of sequences and
            heads; (num_pages, page_size, h_k): of slots and heads, as :func:`flash_ext.serving.append_kv`
            writes them. Any strides; None is 1.
        causal, window_size: as in :func:`attention`, with the alignment of each sequence by its own lengths.
        mask, bias: as in :func:`attention`. Bands, prefixes, intervals, blocks and distances count inside
            each sequence; ``Documents`` and ``KeyMask`` lie over the packed rows. A tensor is (batch, h,
            rows, keys) in coordinates inside each sequence; where rows or keys (unless 1) end before a
            sequence does, a mask hides and a bias adds 0. Over a cache row i is the i-th query of its
            sequence in this call, and key j the j-th of its keys, wherever that lies; ``KeyMask`` is (batch,
            keys) and ``Documents`` has ids (total_q,) and ids_k (batch, keys), where keys beyond are hidden.
        scale, sinks, softcap, dropout_p, generator, return_aux, deterministic, backend: as in
            :func:`attention`.

    Returns:
        out (total_q, h, dv); with ``return_aux`` (out, :class:`AuxOutput`).

    Raises:
        ValueError, TypeError, NotImplementedError: as in :func:`attention`; on the CPU also where cu_seqlens
            decrease or leave the tensors, and where lengths or pages in use are not there.
    """
    if unknown:
        refuse_unknown(attention_varlen, unknown)
    if counting:
        tally("attention_varlen")
    if seqused_k is not None or block_table is not None:
        wants_max = return_aux is not None and getattr(return_aux, "max_scores", False)
        if dropout_p or generator is not None or wants_max:
            refuse_over_cache(dropout_p=dropout_p or None, generator=generator, max_scores=wants_max or None)
        wants_lse = return_aux is not None and _wants(return_aux)[0]
        out, lse = run_cached(
            q, k, v, cu_seqlens_q, None if block_table is not None else cu_seqlens_k, seqused_k, block_table,
            max_seqlen_q, max_seqlen_k, scale, causal, window_size, backend, wants_lse, None, sinks, softcap,
            mask, k_descale, v_descale, bias,
        )  # fmt: skip
        return out if return_aux is None else (out, AuxOutput(lse if wants_lse else None))
    if k_descale is not None or v_descale is not None:
        refuse_factors_without_cache()
    if isinstance(cu_seqlens_q, Tensor) and cu_seqlens_q.is_cpu:
        check_bounds(q, k, cu_seqlens_q, cu_seqlens_k)
    if (
        mask is None
        and bias is None
        and sinks is None
        and softcap is _OFF
        and dropout_p is _OFF
        and generator is None
        and return_aux is None
    ):
        return run_fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_size,
            deterministic, backend, want_lse=False,
        )[0]  # fmt: skip
    if generator is None and return_aux is None:
        kept = run_kept_fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_size,
            deterministic, backend, mask, bias, sinks, softcap, dropout_p,
        )  # fmt: skip
        if kept is not None:
            return kept
    options = (max_seqlen_q, max_seqlen_k, scale, causal, window_size, deterministic, backend)
    asked = Asked(mask, bias, sinks, softcap, dropout_p)
    out, aux = _with_aux(q, k, v, cu_seqlens_q, cu_seqlens_k, options, asked, generator, return_aux)
    return out if return_aux is None else (out, aux)


def refuse_over_cache(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is not available over a cache (seqused_k, block_table). Gather the keys, and call "
                "attention_varlen without these arguments."
            )


def refuse_factors_without_cache() -> NoReturn:
    raise NotImplementedError(
        "k_descale and v_descale belong to a cache (seqused_k, block_table). Fp8Inputs.of takes tensors in "
        "e4m3 without one."
    )


def _wants(request: Any) -> tuple[bool, bool]:
    """Whether lse and the largest scores are asked for."""
    if request is not None and not hasattr(request, "lse"):
        raise TypeError(
            "return_aux must be a flash_ext.AuxRequest or None, got "
            f"{type(request).__qualname__}. Write AuxRequest(lse=True)."
        )
    return bool(getattr(request, "lse", False)), bool(getattr(request, "max_scores", False))


def _with_aux(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: tuple[Any, ...],
    asked: Asked,
    generator: torch.Generator | None,
    request: Any,
) -> tuple[Tensor, AuxOutput]:
    """out, and what is asked for beside it."""
    wants_lse, wants_max = _wants(request)
    out, lse, max_scores = run_modified_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, options, asked, generator=generator, draws=True,
        want_row_max=wants_max, want_lse=wants_lse,
    )  # fmt: skip
    return out, AuxOutput(lse if wants_lse else None, max_scores if wants_max else None)
