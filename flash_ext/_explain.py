"""What a call would run, without running it: :func:`explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._attention import Layout
from ._log import logged
from ._masks.biases import Bias
from ._masks.value import Mask
from ._ops import plan as plans
from ._ops.arguments import Asked, modifiers_of
from ._ops.described import described
from ._ops.dispatch import from_heads_first, operator_options
from ._ops.library import _C
from ._ops.spec import default_scale
from ._ops.words import refuse_unknown


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` gives; printed, a description for a reader.

    Attributes:
        backend: "sm90", "sm80" or "cpu"; None if none serves the call.
        forward, backward: plans: the row of the table of kernels and its evidence, launches with kernel, tile
            and grid, workspace in bytes. Empty on the CPU. The backward is that of q, k, v and, where they
            want a gradient, bias, slopes and sinks. "assumed" says in sentences what the plan has otherwise
            than the call, as a bias with heads of its own where they share one: kernels and workspace of the
            call may differ from such a plan. Without such sentences they are those of the plan.
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


@logged
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
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
        causal, window_size, scale, mask, sinks, softcap, dropout_p, layout, deterministic, backend: as there.
        bias: as there, and read as it is given. The first call of a DenseBias reads it so. Later ones on a
            GPU read a copy that it keeps, if its rows do not begin on 16 bytes.
        gpu: "9.0/132" explains for a GPU of that compute capability and so many multiprocessors, wherever the
            tensors are; None for the device of q.

    Returns:
        An object that prints itself as a table.

    Raises:
        ValueError, TypeError: as :func:`attention`, but where no backend serves the call the answer says so.
    """
    refuse_unknown(explain, unknown)
    if layout != "bshd":
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError(
                f"layout is one of dense tensors, got {layout!r} with cu_seqlens. Packed tensors are (total, "
                "num_heads, head_dim); leave layout out."
            )
        q, k, v = from_heads_first(layout, q, k, v)
    options = (None, None, scale, causal, window_size, deterministic, None if gpu else backend)
    _C.check_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options))
    asked = Asked(mask, bias, sinks, softcap, dropout_p)
    rng = q.new_empty(2) if dropout_p else None
    (left, right), mods = modifiers_of(q, k, cu_seqlens_q, asked, causal, window_size, rng)
    if q.device.type == "cpu" and gpu is None:
        why = "the tensors are on the CPU"
        return Explanation("cpu", {}, {}, {"sm90": why, "sm80": why})
    packed = cu_seqlens_q is not None
    numbers: dict[str, Any] = {
        "dtype": str(q.dtype).removeprefix("torch."),
        "batch": len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else q.shape[0],
        "seqlen_q": q.shape[0] if packed else q.shape[1], "seqlen_k": k.shape[0] if packed else k.shape[1],
        "num_heads": q.shape[-2], "num_heads_k": k.shape[-2], "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1], "packed": packed, "window_size_left": left, "window_size_right": right,
        "deterministic": bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
        "backend": backend, "tma": all(map(_is_tma_ready, (q, k, v))),
        "device": q.device.index or 0, "gpu": plans.facts(gpu) if gpu else None,
    }  # fmt: skip
    own_scale = default_scale(q.shape[-1]) if scale is None else scale

    def planned(direction: str) -> dict[str, Any]:
        words, assumed = described(
            q, k, cu_seqlens_q, mods, own_scale, of_backward=direction == "bwd", on_another_gpu=bool(gpu)
        )
        call = " ".join(["packed" if packed else "dense", *words])
        plan = _C.plan(direction, modifiers=words, **numbers)
        return {"call": call, "gpu": gpu or str(q.device), "assumed": assumed, **plan}

    forward, backward = planned("fwd"), planned("bwd")
    why_not = {name: why for name, why in forward["reasons"].items() if why}
    if forward["backend"] == "sm80" and "sm80" not in (backend or "") and not numbers["tma"]:
        why = "a row or head of q, k or v does not begin on 16 bytes, or one row stands for all"
        why_not.setdefault("sm90", why)
    return Explanation(forward["backend"], forward, backward, why_not)


def _is_tma_ready(t: Tensor) -> bool:
    """Whether the tensor copy engine can read it: rows and heads on 16 bytes, and not one row for all."""
    strides = (stride for stride, size in zip(t.stride()[:-1], t.shape[:-1]) if size > 1)
    repeats_a_row = t.shape[-3] > 1 and t.stride(-3) == 0
    is_aligned = t.data_ptr() % 16 == 0 and all(stride * t.element_size() % 16 == 0 for stride in strides)
    return is_aligned and not repeats_a_row
