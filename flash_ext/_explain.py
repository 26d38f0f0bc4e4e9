"""What a call would run, without running it: :func:`explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._log import logged
from ._masks.biases import Bias
from ._masks.value import Mask
from ._ops import plan as plans
from ._ops.arguments import Asked, modifiers_of
from ._ops.dispatch import operator_options
from ._ops.library import _C
from ._ops.modifiers import Modifiers
from ._ops.words import refuse_unknown


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` gives; printed, a description for a reader.

    Attributes:
        backend: "sm90", "sm80" or "cpu"; None if none serves the call.
        forward, backward: plans: the row of the table of kernels and its evidence, launches with kernel, tile
            and grid, workspace in bytes. Empty on the CPU. The backward is that of q, k, v and, where they
            want a gradient, bias, slopes and sinks.
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
    deterministic: bool | None = None,
    backend: str | None = None,
    gpu: str | None = None,
    **unknown: Any,
) -> Explanation:
    """Which backend, kernels, tiles and workspace a call of :func:`attention` would take, and why not others.

    Nothing runs, and no tensor's values are read.

    Source:
        The tables of ``csrc/plan/``, which calls themselves follow.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k: as in :func:`attention` or, with both cu_seqlens, as in
            :func:`attention_varlen`.
        causal, window_size, scale, mask, bias, sinks, softcap, dropout_p, deterministic, backend: as there.
        gpu: "9.0/132" explains for a GPU of that compute capability and so many multiprocessors, wherever the
            tensors are; None for the device of q.

    Returns:
        An object that prints itself as a table.

    Raises:
        ValueError, TypeError: as :func:`attention`, but where no backend serves the call the answer says so.
    """
    refuse_unknown(explain, unknown)
    options = (None, None, scale, causal, window_size, deterministic, None if gpu else backend)
    _C.check_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *operator_options(q, *options))
    asked = Asked(mask, bias, sinks, softcap, dropout_p)
    rng = q.new_empty(2) if dropout_p else None
    (left, right), mods = modifiers_of(q, k, cu_seqlens_q, asked, causal, window_size, rng)
    if q.device.type == "cpu" and gpu is None:
        why = "the tensors are on the CPU"
        return Explanation("cpu", {}, {}, {"sm90": why, "sm80": why})
    packed = cu_seqlens_q is not None
    names = [] if mods is None else _names_of(mods)
    numbers: dict[str, Any] = {
        "dtype": str(q.dtype).removeprefix("torch."),
        "batch": len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else q.shape[0],
        "seqlen_q": q.shape[0] if packed else q.shape[1], "seqlen_k": k.shape[0] if packed else k.shape[1],
        "num_heads": q.shape[-2], "num_heads_k": k.shape[-2], "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1], "packed": packed, "window_size_left": left, "window_size_right": right,
        "deterministic": bool(deterministic), "backend": backend, "tma": all(map(_is_tma_ready, (q, k, v))),
        "device": q.device.index or 0, "gpu": plans.facts(gpu) if gpu else None,
    }  # fmt: skip
    shown = {"call": " ".join(["packed" if packed else "dense", *names]), "gpu": gpu or str(q.device)}
    forward = {**shown, **_C.plan("fwd", modifiers=names, **numbers)}
    wanted = set() if mods is None else _wanted_gradients(mods)
    own = [f"{name}_gradient" if name in wanted else name for name in names]
    backward = {**shown, **_C.plan("bwd", modifiers=own, **numbers)}
    why_not = {name: why for name, why in forward["reasons"].items() if why}
    if forward["backend"] == "sm80" and "sm80" not in (backend or "") and not numbers["tma"]:
        why_not.setdefault("sm90", "a row or head of q, k or v does not begin on 16 bytes")
    return Explanation(forward["backend"], forward, backward, why_not)


def _names_of(mods: Modifiers) -> list[str]:
    """The modifiers of a call in the words of plans."""
    bias, mask = mods.bias, mods.mask
    # As condensed (csrc/condensed.h) one row has two words of summary behind it.
    is_row = mask is not None and mask.shape[2] == (1 if mask.dtype == torch.bool else 3)
    found = {
        "softcap": mods.softcap > 0, "alibi": mods.slopes is not None,
        "bias": bias is not None and bias.dim() == 4, "relative": bias is not None and bias.dim() == 3,
        "dropout": mods.dropout_p > 0, "key_padding": is_row,
        "mask": mask is not None and not is_row, "blocks": mods.blocks is not None,
        "documents": mods.document_q is not None, "hidden_rows": mods.hidden_rows is not None,
        "hidden_keys": mods.hidden_keys is not None, "chunk": mods.chunk > 0,
        "prefix": mods.prefix_lens is not None, "sink_tokens": mods.sink_tokens > 0,
        "sinks": mods.sinks is not None,
    }  # fmt: skip
    return [name for name, is_there in found.items() if is_there]


def _wanted_gradients(mods: Modifiers) -> set[str]:
    """Those of the names of a call whose tensors want a gradient."""
    tensors = {"bias": mods.bias, "relative": mods.bias, "alibi": mods.slopes, "sinks": mods.sinks}
    return {name for name, t in tensors.items() if t is not None and t.requires_grad}


def _is_tma_ready(t: Tensor) -> bool:
    """Whether the tensor copy engine can read it: rows and heads that begin on 16 bytes."""
    strides = (stride for stride, size in zip(t.stride()[:-1], t.shape[:-1]) if size > 1)
    return t.data_ptr() % 16 == 0 and all(stride * t.element_size() % 16 == 0 for stride in strides)
