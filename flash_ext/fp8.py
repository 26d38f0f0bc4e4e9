"""Attention with products in fp8 (e4m3): what quantises q, k and v, the value it returns, and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from ._attention import AuxOutput, _wants
from ._count import counting, tally
from ._cpu import fp8
from ._log import logged
from ._masks.value import is_traced
from ._merge import add_sinks
from ._ops import fp8 as _operators  # noqa: F401  (registers the operators)
from ._ops.dispatch import check_bounds, explain_options
from ._ops.dispatch_cached import check_values
from ._ops.spec import default_scale
from ._ops.words import refuse_kind, refuse_unknown
from ._rotary import RotaryFactors, factors_of, turn

__all__ = ["Fp8Inputs", "attention_fp8", "quantize_fp8"]

Granularity: TypeAlias = Literal["block", "head"]
Fp8Mode: TypeAlias = Literal["fp8", "mixed"]

_HALVES = (torch.float16, torch.bfloat16)
# Keywords of attention() that have no fp8 kernel.
_MODIFIERS = ("mask", "bias", "softcap", "dropout_p", "generator")


@dataclass(frozen=True, eq=False)
class Fp8Inputs:
    """q, k and v of one attention call in fp8, as :func:`quantize_fp8` or :meth:`of` makes them.

    With n = ``q_descale`` and so on, what they stand for is q * n, k * n + ``k_offset`` and v * n +
    ``v_offset``; :meth:`dequantize` returns that.

    Attributes:
        q, k: (b, seqlen, h, d) float8_e4m3fn, packed (total, h, d); in mixed mode of ``dtype``.
        v: float8_e4m3fn, transposed: (b, h_k, dv, columns), packed (h_k, dv, columns), see docs/fp8.md.
        q_descale, k_descale: (b, h, n) float32, packed (h, n): n factors of 128 rows each, or one. None in
            mixed mode.
        v_descale: (b, h_k, dv) float32, packed (h_k, dv).
        v_offset: shape of v_descale, or None: the mean of v less that of v * v_descale. It is added to out.
        k_offset: (b, h_k, d) float32, packed (h_k, d), or None: taken off every row of k.
        row_offset: shape of lse, or None: q * k_offset, which lse gets back.
        cu_seqlens_q, cu_seqlens_k: of packed sequences, else None.
        dtype: float16 or bfloat16, of out.
        hadamard: whether q and k are rotated. ``k_offset`` is not.
        seqused_k: (b,) int32, or None: sequence i has the first seqused_k[i] of its keys. v holds zeros for
            the others, and what k holds for them does not matter.
        small: whether no number of q and k exceeds 15 in size, as :func:`quantize_fp8` leaves them. Products
            of their rows then fit float16, with which kernels are faster from head_dim 65 on. Where it says
            so of larger numbers, keys may be left out, and rows NaN.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor
    v_offset: Tensor | None = None
    k_offset: Tensor | None = None
    row_offset: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    hadamard: bool = False
    seqused_k: Tensor | None = None
    small: bool = False
    _originals: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    @property
    def mode(self) -> Fp8Mode:
        return "mixed" if self.q_descale is None else "fp8"

    def dequantize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The q, k and v that the fp8 numbers stand for, rounded to ``dtype``, None for that of out.

        v has its rows back. With a rotation q and k are rotated both, which no score shows. Keys from
        ``seqused_k`` on stand for nothing.
        """
        q, k, offset = self.q.float(), self.k.float(), self.k_offset
        if self.q_descale is not None and self.k_descale is not None:
            q = fp8.dequantize_rows(self.q, self.q_descale, self.cu_seqlens_q)
            k = fp8.dequantize_rows(self.k, self.k_descale, self.cu_seqlens_k)
        if offset is not None:
            offset = fp8.rotate(offset) if self.hadamard else offset
            k = k + (offset if self.cu_seqlens_k is not None else offset.unsqueeze(1))
        v = fp8.rows_of_values(self.v, k.shape[-3], self.cu_seqlens_k)
        dim = -3 if self.cu_seqlens_k is None else 0
        v = v * self.v_descale.unsqueeze(dim)
        if self.v_offset is not None:
            v = v + self.v_offset.unsqueeze(dim)
        to = dtype or self.dtype
        return q.to(to), k.to(to), v.to(to, memory_format=torch.contiguous_format)

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Fp8Inputs:
        """From tensors that are e4m3 already, such as a cache; v is transposed once, which copies it.

        Args:
            q: (b, seqlen_q, h, d) float8_e4m3fn, packed (total_q, h, d); or float16 or bfloat16, with k, for
                the mixed mode.
            k: (b, seqlen_k, h_k, d), dtype of q.
            v: (b, seqlen_k, h_k, dv) float8_e4m3fn.
            q_descale, k_descale: float32 factors that make numbers of them: one for all (shape () or (1,)),
                or one for each batch entry and head, (b, h_k) or of q (b, h). Packed: one for each head,
                (h_k,) or (h,), or for each sequence and head, (sequences, h_k) or (sequences, h). At least 0;
                on a GPU, where nobody looks, negative ones give NaN. Any strides, 0 as well. None is 1.
            v_descale: the same, but that packed sequences share it: (sequences, h_k) only with a stride of 0
                over several. Or one for each channel, (b, h_k, dv), packed (h_k, dv).
            cu_seqlens_q, cu_seqlens_k: as in :func:`attention_varlen`, for packed sequences.
            seqused_k: (b,) int32: sequence i, dense or packed, has the first seqused_k[i] of its keys; what
                lies behind may be NaN.
            dtype: of out; in mixed mode that of q.

        Raises:
            ValueError, TypeError: a shape, dtype or device does not fit, a factor on the CPU is negative, or
                a tensor requires a gradient, which would get none; the message names it.
        """
        for name, t in (("q", q), ("k", k), ("v", v)):
            if not isinstance(t, Tensor):
                refuse_kind(name, t)
            if t.dtype not in (fp8.E4M3, *(_HALVES if name != "v" else ())):
                _refuse_dtype(name, t.dtype)
        if q.dtype != k.dtype:
            raise TypeError(f"q and k must share one dtype, got {q.dtype} and {k.dtype}.")
        _refuse_gradients(q=q, k=k, v=v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        mixed = q.dtype in _HALVES
        dtype = q.dtype if mixed else dtype
        if dtype not in _HALVES:
            raise TypeError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype}.")
        _check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k)
        _check_lengths(q, k, cu_seqlens_k, seqused_k)
        batch = () if cu_seqlens_q is not None else (q.shape[0],)
        heads_k = k.shape[-2]
        if mixed and (q_descale is not None or k_descale is not None):
            raise ValueError("q_descale and k_descale belong to q and k in fp8, and these have 16 bits.")
        return cls(
            q,
            k,
            fp8.transpose_values(v, cu_seqlens_k, seqused_k),
            None if mixed else _descale("q_descale", q_descale, q, batch, heads_k, cu_seqlens_q),
            None if mixed else _descale("k_descale", k_descale, k, batch, heads_k, cu_seqlens_k),
            _descale("v_descale", v_descale, v, batch, heads_k, cu_seqlens_k, v.shape[-1]),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dtype=dtype,
            seqused_k=seqused_k,
        )


@logged
def quantize_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    granularity: Granularity = "block",
    smooth_k: bool = True,
    smooth_v: bool = True,
    hadamard: bool = False,
    rotary: RotaryFactors | None = None,
    rotary_interleaved: bool = False,
    mode: Fp8Mode = "fp8",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Fp8Inputs:
    """q, k and v in fp8 for :func:`attention_fp8`, on every GPU and on the CPU.

    Source: means of keys, Zhang et al. 2024, https://arxiv.org/abs/2410.02367; blocks and rotation, Shah et
    al. 2024, https://arxiv.org/abs/2407.08608.

    Where a gradient is asked for, the result keeps q, k and v, and attention passes gradients straight
    through the rounding: they are those of :func:`attention` at q, k and v.

    Args:
        q: (b, seqlen_q, h, d) float16 or bfloat16, packed (total_q, h, d). d and dv are multiples of 16.
        k: (b, seqlen_k, h_k, d), dtype of q.
        v: (b, seqlen_k, h_k, dv), dtype of q.
        granularity: "block": q and k have a factor for each 128 rows of a head, "head": one for a head. v has
            one for each channel.
        smooth_k: take the mean over the keys off k. Changes no weight; lse gets it back.
        smooth_v: take the mean over the keys off v, and the mean of what rounding changes. Exact, because the
            weights of a row add up to 1; it keeps what all values have in common out of the sums that fp8
            tensor cores round.
        hadamard: rotate q and k, after random signs, so that an outlier spreads over all channels. Wants
            a d that is a power of two, and "block": factors of "head" belong to the rows before they turn.
        rotary: rotary position embedding, applied to q and k before all else, which saves passes over them:
            (cos, sin) for both, or ((cos, sin) of q, (cos, sin) of k). Each is (seqlen, rotary_dim / 2), (b,
            seqlen, rotary_dim / 2) or packed (total, rotary_dim / 2), float32 or dtype of q, a row for each
            row of q or k. Turns the first rotary_dim features, a multiple of 16, in float32; where gradients
            are asked for or ``mode`` is "mixed" the turned q and k are rounded to their dtype.
        rotary_interleaved: pairs are neighbouring features, else feature i and i + rotary_dim / 2.
        mode: "mixed" leaves q and k as they are: weights then are as exact as without fp8.
        cu_seqlens_q, cu_seqlens_k: as in :func:`attention_varlen`, for packed sequences, which share means,
            the factors of v, and with granularity "head" those of q and k: what is in one sequence changes
            how the others are rounded, and infinity in one may make NaN of all.
        seqused_k: (b,) int32: sequence i, dense or packed, has the first seqused_k[i] of its keys. What lies
            behind is not read: it enters no mean and no factor. Read on the device, where lengths outside of
            what there is are clamped, here and by every call of :func:`attention_fp8`, which must find the
            same ones. There is no gradient then.

    Returns:
        An :class:`Fp8Inputs`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: packed sequences in the batch-invariant mode, see cu_seqlens; ``seqused_k`` where
            a gradient is asked for.

    Example:
        >>> q, k, v = (torch.randn(1, 256, 4, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> flash_ext.fp8.attention_fp8(flash_ext.fp8.quantize_fp8(q, k, v), causal=True).shape
        torch.Size([1, 256, 4, 64])
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            refuse_kind(name, t)
        if t.dtype not in _HALVES:
            raise TypeError(
                f"quantize_fp8 takes torch.float16 or torch.bfloat16, got {name} {t.dtype}. "
                + ("Use Fp8Inputs.of for tensors in e4m3." if t.dtype == fp8.E4M3 else "Convert it first.")
            )
        if t.dtype != q.dtype:
            raise TypeError(f"q, k and v must share one dtype, got q {q.dtype} and {name} {t.dtype}.")
    _check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k)
    _check_lengths(q, k, cu_seqlens_k, seqused_k)
    if granularity not in ("block", "head"):
        raise ValueError(f"granularity must be 'block' or 'head', got {granularity!r}.")
    if mode not in ("fp8", "mixed"):
        raise ValueError(f"mode must be 'fp8' or 'mixed', got {mode!r}.")
    mixed, d = mode == "mixed", q.shape[-1]
    if hadamard and (mixed or granularity != "block" or d & (d - 1) != 0):
        raise ValueError(
            "hadamard wants mode 'fp8', granularity 'block' and a head_dim that is a power of two, got "
            f"mode {mode!r}, granularity {granularity!r} and head_dim {d}."
        )
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if wants_gradient and seqused_k is not None:
        raise NotImplementedError(
            "attention with seqused_k has no gradient, and q, k or v requires one. Call quantize_fp8 under "
            "torch.no_grad()."
        )
    rotary_factors: tuple[Tensor | None, ...] = (None, None, None, None)
    if rotary is None and rotary_interleaved:
        raise ValueError("rotary_interleaved says how rotary is meant, which is None.")
    if rotary is not None:
        of_q, of_k = factors_of(rotary, q, k)
        if mixed or wants_gradient:
            q, k = turn(q, of_q, rotary_interleaved), turn(k, of_k, rotary_interleaved)
        else:
            rotary_factors = (*of_q, *of_k)
    plain = tuple(t.detach() if t.stride(-1) == 1 else t.detach().contiguous() for t in (q, k, v))
    q8, k8, v8, q_descale, k_descale, v_descale, v_offset, k_offset, row_offset = (
        torch.ops.flash_ext.quantize_fp8.default(
            *plain,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            granularity == "block",
            smooth_k,
            smooth_v,
            hadamard,
            mixed,
            *rotary_factors,
            rotary_interleaved,
        )
    )
    shifts_k = smooth_k and not mixed
    x = Fp8Inputs(
        plain[0] if mixed else q8,
        plain[1] if mixed else k8,
        v8,
        None if mixed else q_descale,
        None if mixed else k_descale,
        v_descale,
        v_offset if smooth_v else None,
        k_offset if shifts_k else None,
        row_offset if shifts_k else None,
        cu_seqlens_q,
        cu_seqlens_k,
        q.dtype,
        hadamard,
        seqused_k,
        not mixed,
    )
    if wants_gradient:
        object.__setattr__(x, "_originals", (q, k, v))
    return x


@logged
def attention_fp8(
    x: Fp8Inputs,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_aux: Any = None,
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """:func:`attention` of q, k and v in fp8: the softmax of what they stand for, with products in e4m3.

    On Hopper GPUs, in mixed mode for d and dv up to 128, and on the CPU, which rounds the same numbers.
    Weights are rounded to e4m3 below a maximum that keeps each of them below its largest number, 448; sums
    are float32, of weights before that rounding. Masks other than these, biases, softcap and dropout have no
    fp8 kernel and are refused.

    Source: FlashAttention-3, Shah et al. 2024, https://arxiv.org/abs/2407.08608.

    Args:
        x: from :func:`quantize_fp8`, or :meth:`Fp8Inputs.of`; dense or packed.
        causal, window_size, scale: as in :func:`attention`. The default scale is 1/sqrt(d).
        sinks: (h,) floating point, as in :func:`attention`: one more logit per head in the denominator,
            beside the scores of ``x.dequantize()``.
        return_aux: an :class:`AuxRequest`, to return lse and the largest scores as well: those of the scores
            of ``x.dequantize()``. A call that asks for the largest scores takes longer on a GPU: it looks for
            a maximum in every tile of keys.
        backend: "sm90" on a GPU, "cpu" on the CPU, or None.

    Returns:
        out, (b, seqlen_q, h, dv) or packed (total_q, h, dv), of ``x.dtype``; with ``return_aux``
        (out, :class:`AuxOutput`). Differentiable where x keeps its originals, in the sinks as well; the
        backward pass runs the forward without fp8 again, because it needs an lse that belongs to q and k.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no fp8 kernel runs the call.
    """
    for name in unknown:
        if name in _MODIFIERS:
            if isinstance(x, Fp8Inputs) and x.seqused_k is not None:
                raise NotImplementedError(
                    f"{name} has no fp8 kernel, and no kernel beside seqused_k. Gather the keys that are "
                    f"used, and call attention_varlen with {name}=... without fp8."
                )
            packed = isinstance(x, Fp8Inputs) and x.cu_seqlens_q is not None
            without = (
                "attention_varlen(*x.dequantize(), x.cu_seqlens_q, x.cu_seqlens_k"
                if packed
                else "attention(*x.dequantize()"
            )
            raise NotImplementedError(f"{name} has no fp8 kernel. Call {without}, {name}=...) without fp8.")
    if unknown:
        refuse_unknown(attention_fp8, unknown)
    if not isinstance(x, Fp8Inputs):
        raise TypeError(
            f"attention_fp8 takes what quantize_fp8(q, k, v) returns, got {type(x).__qualname__}."
        )
    if counting:
        tally("attention_fp8")
    explain_options(None, None, scale, causal, window_size, None, backend)
    scale = default_scale(x.q.shape[-1]) if scale is None else float(scale)
    left, right = window_size
    wants = _wants(return_aux)
    sinks = _sinks(sinks, x)
    if x.q.is_cpu and backend not in (None, "cpu"):
        raise ValueError(f"backend {backend!r} runs on a GPU, and q is on the CPU.")
    options = (scale, int(left), 0 if causal else int(right), backend)
    if x._originals is None:
        out, lse, row_max = _forward(x, sinks, options, wants)
    else:
        out, lse, row_max = _straight_through(*x._originals, sinks, x, options, wants)
    if return_aux is None:
        return out
    return out, AuxOutput(lse if wants[0] else None, row_max if wants[1] else None)


def _forward(
    x: Fp8Inputs,
    sinks: Tensor | None,
    options: tuple[float, int, int, str | None],
    wants: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    *numbers, backend = options
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.flash_ext.fwd_fp8.default(
        x.q, x.k, x.v, x.q_descale, x.k_descale, x.v_descale, x.v_offset, x.row_offset, x.cu_seqlens_q,
        x.cu_seqlens_k, x.seqused_k, sinks, *numbers, x.dtype, None if x.q.is_cpu else backend, *wants,
        x.small,
    )  # fmt: skip
    return result


class _StraightThrough(torch.autograd.Function):
    """out, lse and the largest scores in fp8; gradients as if nothing had been rounded."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        x: Fp8Inputs,
        options: Any,
        wants: Any,
    ) -> Any:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.bounds, ctx.options, ctx.wants_lse = (x.cu_seqlens_q, x.cu_seqlens_k), options, wants[0]
        out, lse, row_max = _forward(x, sinks, options, wants)
        ctx.mark_non_differentiable(row_max)
        return out, lse, row_max

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor, _: Tensor) -> Any:
        *qkv, sinks = ctx.saved_tensors
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in qkv)
        options = (0, 0, *ctx.options[:3], False, None)
        out, lse = torch.ops.flash_ext.fwd.default(q, k, v, *ctx.bounds, *options)
        # Below the whole denominator the weights of keys are what a sink leaves of them, and nothing else of
        # a backward knows of it.
        lse = add_sinks(out, lse, sinks, ctx.bounds[0], True)
        dlse_or_none = dlse if ctx.wants_lse else None
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # The sink's weight has no value: its score gets what the sums of a row leave.
            delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
            if dlse_or_none is not None:
                delta = delta - dlse_or_none
            weight = torch.exp(sinks[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
            terms = weight * -delta
            dsinks = terms.sum(-1) if terms.dim() == 2 else terms.sum((0, -1))
        tensors = (dout, q, k, v, out, lse, dlse_or_none, *ctx.bounds)
        return *torch.ops.flash_ext.bwd.default(*tensors, *options), dsinks, None, None, None


_straight_through: Callable[..., tuple[Tensor, Tensor, Tensor]] = _StraightThrough.apply


# ---- checks ----------------------------------------------------------------------------------------------


def _refuse_dtype(name: str, dtype: torch.dtype) -> NoReturn:
    if "float8" in str(dtype):
        hint = " Its numbers have another form: convert it to torch.float16, and quantise that."
    else:
        hint = " Call quantize_fp8(q, k, v), which makes them."
    raise TypeError(f"{name} must be torch.float8_e4m3fn, got {dtype}.{hint}")


def _refuse_gradients(**tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, t in tensors.items():
        if isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and Fp8Inputs.of passes none on: detach it, or call "
                "quantize_fp8(q, k, v)."
            )


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> None:
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together.")
    packed = cu_seqlens_q is not None
    dims = 3 if packed else 4
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != dims:
            shape = "(total, h, d)" if packed else "(b, seqlen, h, d)"
            raise ValueError(f"{name} must have shape {shape}, got {tuple(t.shape)}.")
        if t.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got q on {q.device}, {name} on {t.device}.")
        if t.shape[-1] % 16 != 0 or not 16 <= t.shape[-1] <= 256:
            raise ValueError(
                f"fp8 wants a head_dim that is a multiple of 16 up to 256, got {name} {tuple(t.shape)}."
            )
    if (
        k.shape[:-1] != v.shape[:-1]
        or q.shape[-1] != k.shape[-1]
        or (not packed and q.shape[0] != k.shape[0])
    ):
        raise ValueError(
            f"q, k and v do not fit each other: got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(
            "num_heads of q must be a positive multiple of num_heads of k and v, got "
            f"{q.shape[-2]} and {k.shape[-2]}."
        )
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if (
            cu.dtype != torch.int32
            or cu.dim() != 1
            or cu.shape != cu_seqlens_q.shape
            or cu.device != q.device
        ):
            raise ValueError(
                f"{name} must be (batch + 1,) int32 on the device of q, got {tuple(cu.shape)} {cu.dtype}."
            )
        if not cu.is_contiguous() or cu.shape[0] < 1:
            raise ValueError(f"{name} must be contiguous, with at least one number.")
    if cu_seqlens_q.is_cpu:
        check_bounds(q, k, cu_seqlens_q, cu_seqlens_k)


def _check_lengths(q: Tensor, k: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None) -> None:
    if seqused_k is None:
        return
    if not isinstance(seqused_k, Tensor):
        refuse_kind("seqused_k", seqused_k)
    batch = q.shape[0] if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
    if seqused_k.dtype != torch.int32 or seqused_k.shape != (batch,) or seqused_k.device != q.device:
        raise ValueError(
            f"seqused_k must be (batch,) = ({batch},) int32 on the device of q, got {tuple(seqused_k.shape)} "
            f"{seqused_k.dtype} on {seqused_k.device}."
        )
    if not seqused_k.is_contiguous():
        raise ValueError("seqused_k must be contiguous.")
    if not is_traced():
        check_values(q, k, None, cu_seqlens_k, seqused_k, None)


def _sinks(sinks: Tensor | None, x: Fp8Inputs) -> Tensor | None:
    """As the operator takes them."""
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor):
        refuse_kind("sinks", sinks)
    if not sinks.is_floating_point():
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}. Convert it with .float().")
    if sinks.shape != x.q.shape[-2:-1] or sinks.device != x.q.device:
        raise ValueError(
            f"sinks must have shape (num_heads,) = ({x.q.shape[-2]},) on {x.q.device}, got "
            f"{tuple(sinks.shape)} on {sinks.device}."
        )
    if x._originals is None and sinks.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "sinks requires a gradient, and x keeps no q, k and v to make one from: detach it, or quantise "
            "tensors that require a gradient."
        )
    return sinks.float().contiguous()


def _descale(
    name: str, t: Tensor | None, x: Tensor, batch: tuple[int, ...], heads_k: int, cu_seqlens: Tensor | None,
    channels: int = 1,
) -> Tensor:  # fmt: skip
    """A view of (b, heads, channels or 1), packed without b, for x; of packed sequences (heads, blocks)."""
    heads = x.shape[-2]
    if t is None:
        t = x.new_ones((), dtype=torch.float32)
    if not isinstance(t, Tensor):
        refuse_kind(name, t)
    if t.dtype != torch.float32 or t.device != x.device:
        raise TypeError(f"{name} must be torch.float32 on {x.device}, got {t.dtype} on {t.device}.")
    if t.is_cpu and not is_traced() and bool((t < 0).any()):
        raise ValueError(f"{name} must be 0 or more: put a sign into the numbers that it multiplies.")
    if t.numel() == 1 and t.dim() <= 1:
        return t.reshape(()).expand(*batch, heads, 1)
    if channels > 1 and t.shape == (*batch, heads, channels):
        return t
    sequences = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    lead = (sequences,) if cu_seqlens is not None and t.dim() == 2 else batch
    if t.shape == (*lead, heads_k) and heads != heads_k:
        t = t.unsqueeze(-1).expand(*t.shape, heads // heads_k).flatten(-2)
    if t.shape != (*lead, heads):
        want = f"(), (1,) or {(*batch, heads)}" + (f" or {(*batch, heads, channels)}" if channels > 1 else "")
        want += "" if cu_seqlens is None else f" or {(sequences, heads)}"
        raise ValueError(f"{name} must have shape {want}, got {tuple(t.shape)}.")
    if lead == batch or cu_seqlens is None:
        return t.unsqueeze(-1)
    if channels == 1:
        return fp8.factors_of_blocks(t, cu_seqlens, x.shape[0])
    if sequences > 1 and t.stride(0) != 0:
        raise NotImplementedError(
            f"{name} must be the same for all packed sequences, which share the factors of v: one for each "
            f"head, {(heads,)}, or expanded over sequences. Call those with factors of their own in turn."
        )
    return t[0].unsqueeze(-1)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
