"""What a call would run, without running it: :func:`explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._attention import Layout, _wants, refuse_factors_without_cache, refuse_over_cache
from ._log import logged
from ._masks.biases import Bias
from ._masks.value import Mask
from ._ops import plan as plans
from ._ops.arguments import Asked, modifiers_of
from ._ops.calls import keep_call, packed_call
from ._ops.described import Described, described, described_over_cache
from ._ops.dispatch import explain_options, explain_tensors, from_heads_first, operator_options
from ._ops.dispatch_cached import check_values, modifiers_over_cache
from ._ops.library import _C
from ._ops.modifiers import Modifiers
from ._ops.prepared import leaf_of_documents
from ._ops.spec import default_scale
from ._ops.words import refuse_unknown


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` gives; printed, a description for a reader.

    Attributes:
        backend: "sm90", "sm80" or "cpu"; None if none serves the call.
        forward, backward: plans: the row of the table of kernels and its evidence, launches with kernel, tile
            and grid, workspace in bytes. Empty on the CPU. Over a cache the backward is empty, and so is the
            forward of a call that launches nothing. The backward is that of q, k, v and, where they want a
            gradient, bias, slopes and sinks. "assumed" says in sentences what the plan has otherwise than the
            call, as a bias with heads of its own where they share one: kernels and workspace of the call may
            differ from such a plan. Without such sentences they are those of the plan.
        why_not: the reasons of the other backends, by name.
    """

    backend: str | None
    forward: dict[str, Any]
    backward: dict[str, Any]
    why_not: dict[str, str]

    def __str__(self) -> str:
        lines = [f"backend     {self.backend}"]
        lines += [f"not {name}    {why}" for name, why in self.why_not.items()]
        for direction in ("forward", "backward"):
            if found := getattr(self, direction):
                lines += ["", direction, plans.as_text(found)]
        return "\n".join(lines)


class _Call(NamedTuple):
    """A call for ``_C.plan``.

    Attributes:
        kind: where its rows are, in words.
        numbers: what ``_C.plan`` takes beside what all calls have.
        forward, backward: its modifiers; None without a backward.
        is_empty: nothing is launched, because there is nothing to compute.
    """

    kind: str
    numbers: dict[str, Any]
    forward: Described
    backward: Described | None = None
    is_empty: bool = False


@logged
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
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
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    return_aux: Any = None,
    layout: Layout = "bshd",
    deterministic: bool | None = None,
    backend: str | None = None,
    gpu: str | None = None,
    **unknown: Any,
) -> Explanation:
    """Which backend, kernels, tiles and workspace a call of :func:`attention` would take, and why not others.

    No attention runs. A mask without a call yet is prepared, as its first call would do it.

    Source:
        The tables of ``csrc/plan/``, which calls themselves follow.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k: as in :func:`attention` or, with both cu_seqlens, as in
            :func:`attention_varlen`.
        max_seqlen_q, max_seqlen_k: as in :func:`attention_varlen`.
        seqused_k, block_table, k_descale, v_descale: as in :func:`attention_varlen` over a cache. Without
            cu_seqlens_q the queries are dense, as in :func:`flash_ext.serving.flash_attn_with_kvcache`.
        causal, window_size, scale, mask, sinks, softcap, dropout_p, layout, deterministic, backend: as there.
        generator, return_aux: as there, so that the arguments of a call serve; the first changes no kernel.
        bias: as there, and read as it is given. The first call of a DenseBias reads it so. Later ones on a
            GPU read a copy that it keeps, if its rows do not begin on 16 bytes.
        gpu: "9.0/132" explains for a GPU of that compute capability and so many multiprocessors, wherever the
            tensors are; None for the device of q.

    Returns:
        An object that prints itself as a table.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`attention` and :func:`attention_varlen`, but
            where no backend serves the call the answer says so.
    """
    refuse_unknown(explain, unknown)
    explain_tensors(q=q, k=k, v=v)
    explain_tensors(True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    wants_max = return_aux is not None and _wants(return_aux)[1]
    has_cache = seqused_k is not None or block_table is not None
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if not has_cache and (k_descale is not None or v_descale is not None):
        refuse_factors_without_cache()
    if not (has_cache or is_packed or (max_seqlen_q is None and max_seqlen_k is None)):
        raise ValueError(
            "max_seqlen_q and max_seqlen_k belong to packed sequences (cu_seqlens_q) and to a cache "
            "(seqused_k). Leave them out."
        )
    if layout != "bshd":
        if has_cache or is_packed:
            beside = "cu_seqlens" if is_packed else "a cache"
            raise ValueError(
                f"layout is one of dense tensors, got {layout!r} with {beside}. Packed tensors are (total, "
                "num_heads, head_dim), pages (num_pages, page_size, num_heads, head_dim); leave layout out."
            )
        q, k, v = from_heads_first(layout, q, k, v)
    if has_cache and (generator is not None or wants_max):
        refuse_over_cache(generator=generator, max_scores=wants_max or None)
    asked = Asked(mask, bias, sinks, softcap, dropout_p)
    name = None if gpu else backend  # of another GPU only the plan knows whether it has one
    options = (max_seqlen_q, max_seqlen_k, scale, causal, window_size, deterministic, name)
    is_on_cpu = gpu is None and isinstance(q, Tensor) and q.device.type == "cpu"
    if has_cache:
        places = (cu_seqlens_q, None if block_table is not None else cu_seqlens_k, seqused_k, block_table)
        call = _over_cache(q, k, v, places, (k_descale, v_descale), options, asked, is_on_cpu, bool(gpu))
    else:
        packed = _as_packed(q, k, v, cu_seqlens_q, options, asked)
        if packed is not None:
            q, k, v, cu_seqlens_q, cu_seqlens_k, options, asked = packed
        call = _of_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, options, asked, bool(gpu))
        if packed is not None:
            call = call._replace(kind="dense, its documents as packed sequences")
    if wants_max and not call.forward.words:
        said = "no largest scores are asked for, without modifiers a matter of other kernels"
        call = call._replace(forward=call.forward._replace(assumed=[*call.forward.assumed, said]))
    if is_on_cpu:
        why = "the tensors are on the CPU"
        return Explanation("cpu", {}, {}, {"sm90": why, "sm80": why})
    facts = plans.facts(gpu) if gpu else None
    if q.dtype not in (torch.float16, torch.bfloat16):
        why = f"kernels take float16 and bfloat16, got {q.dtype}"
        return Explanation(None, {}, {}, {"sm90": why, "sm80": why})
    numbers = {
        "dtype": str(q.dtype).removeprefix("torch."),
        "batch": len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else q.shape[0],
        "num_heads": q.shape[-2], "num_heads_k": k.shape[-2], "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1], "packed": cu_seqlens_q is not None, "backend": backend,
        "device": q.device.index or 0, "gpu": facts, **call.numbers,
    }  # fmt: skip

    def planned(direction: str, x: Described | None) -> dict[str, Any]:
        if x is None:
            return {}
        plan = _C.plan(direction, modifiers=x.words, **numbers)
        said = {"call": " ".join([call.kind, *x.words]), "gpu": gpu or str(q.device), "assumed": x.assumed}
        return {**said, **plan}

    forward, backward = planned("fwd", call.forward), planned("bwd", call.backward)
    why_not = {name: why for name, why in forward["reasons"].items() if why}
    if forward["backend"] == "sm80" and "sm80" not in (backend or "") and not numbers["tma"]:
        why = "a row or head of q, k or v does not begin on 16 bytes, or one row stands for all"
        why_not.setdefault("sm90", why)
    is_portable = forward.get("row", "").startswith("sm80") and "sm80" not in (backend or "")
    if is_portable and forward["reasons"].get("sm90") == "":
        why = f"it can run the call, but row {forward['row']} is preferred (evidence {forward['evidence']})"
        why_not.setdefault("sm90", why)
    return Explanation(forward["backend"], {} if call.is_empty else forward, backward, why_not)


def _as_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, options: tuple[Any, ...], asked: Asked
) -> tuple[Any, ...] | None:
    """A dense call that runs as one of packed sequences, its documents."""
    if cu_seqlens_q is not None or asked.dropout_p or leaf_of_documents(asked.mask) is None:
        return None
    _C.check_fwd(q, k, v, None, None, *operator_options(q, *options))
    causal, window = options[3:5]
    own_window, mods = modifiers_of(q, k, None, asked, causal, window, None)
    call = keep_call(q, k, None, None, asked, causal, window, own_window, mods)
    return packed_call(call, q, k, v, mods, own_window, options, asked)


def _of_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: tuple[Any, ...],
    asked: Asked,
    on_another_gpu: bool,
) -> _Call:
    """Reads a call without a cache."""
    _C.check_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options))
    _, _, scale, causal, window, deterministic, _ = options
    rng = q.new_empty(2) if asked.dropout_p else None
    (left, right), mods = modifiers_of(q, k, cu_seqlens_q, asked, causal, window, rng)
    own_scale = default_scale(q.shape[-1]) if scale is None else scale
    forward, backward = (
        described(q, k, cu_seqlens_q, mods, own_scale, of_backward=of_backward, on_another_gpu=on_another_gpu)
        for of_backward in (False, True)
    )
    numbers = {
        "seqlen_q": q.shape[-3], "seqlen_k": k.shape[-3], "window_size_left": left,
        "window_size_right": right, "tma": all(map(_C.is_tma_ready, (q, k, v))),
        "deterministic": bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip
    return _Call("dense" if cu_seqlens_q is None else "packed", numbers, forward, backward)


def _over_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: tuple[Tensor | None, ...],
    factors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    asked: Asked,
    is_on_cpu: bool,
    on_another_gpu: bool,
) -> _Call:
    """Reads a call over a cache.

    Args:
        places: cu_seqlens_q, cu_seqlens_k, seqused_k and block_table.
        factors: k_descale and v_descale.
    """
    if asked.dropout_p:
        refuse_over_cache(dropout_p=asked.dropout_p)
    cu_seqlens_q, cu_seqlens_k, seqused_k, block_table = places
    explain_tensors(True, seqused_k=seqused_k, block_table=block_table)
    explain_tensors(True, k_descale=factors[0], v_descale=factors[1])
    most_q, most_k, scale, causal, window, _, backend = options
    explain_options(most_q, most_k, scale, causal, window, None, backend)
    causal, window, slopes, sinks, tree, masks, bias = modifiers_over_cache(
        q, k, cu_seqlens_q, cu_seqlens_k, most_q, most_k, scale, causal, window, backend, None, asked.sinks,
        asked.mask, asked.bias,
    )  # fmt: skip
    check_values(q, k, *places)
    *numbers, _, backend = operator_options(q, most_q, most_k, scale, causal, window, None, backend)
    arguments = (
        q, k, v, *places, *numbers, slopes, sinks, asked.softcap, backend, tree, *factors, *masks, bias,
    )  # fmt: skip
    _C.check_fwd_cached(*arguments)
    _C.check_cached_gradients(*arguments)
    layout, page_size, room = "entries", 0, k.shape[-3]
    if block_table is not None:
        layout, page_size, room = "pages", k.shape[1], k.shape[1] * block_table.shape[1]
    elif cu_seqlens_k is not None and cu_seqlens_q is not None:  # beside dense queries it makes no difference
        layout = "rows"
    elements = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(k.dtype, "")
    has_latents = _C.is_latents(k, v)
    mods = Modifiers(bias, *masks, slopes=slopes, sinks=sinks, softcap=asked.softcap)
    words = described_over_cache(
        q, mods, tree is not None, copies_q=has_latents, on_another_gpu=on_another_gpu
    )
    is_empty = 0 in (q.numel(), k.numel(), room) or (cu_seqlens_q is not None and len(cu_seqlens_q) == 1)
    if not (is_on_cpu or is_empty):
        _C.check_fwd_cached_gpu(*arguments)
    of_call = {
        "seqlen_q": q.shape[-3], "seqlen_k": max(room, 1), "window_size_left": numbers[3],
        "window_size_right": numbers[4], "cache": (layout, elements, page_size), "max_seqlen": numbers[:2],
        "tma": all(map(_C.is_tma_ready, (k, v) if has_latents else (q, k, v))),
        "slot_factors": any(t is not None and t.dim() == 3 for t in factors),
    }  # fmt: skip
    kind = ["dense" if cu_seqlens_q is None else "packed", layout, elements]
    kind += [f"page_size={page_size}"] if page_size else []
    return _Call(" ".join(filter(None, kind)), of_call, words, is_empty=is_empty)
