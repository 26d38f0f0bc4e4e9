"""Words for first mistakes: names of other libraries, layouts that do not fit, arrays of other kinds."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

# What other functions call what is here called otherwise.
OTHER_NAMES = {
    "is_causal": "causal=",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "attn_mask": "mask= (bool, True = take part) or bias= (added to the scores)",
    "attention_mask": "mask= (bool, True = take part) or bias= (added to the scores)",
    "attn_bias": "bias=",
    "position_bias": "bias=flash_ext.masks.RelativePosition(table)",
    "alibi": "bias=flash_ext.masks.ALiBi(slopes)",
    "score_mod": "bias= or softcap= for a change of the scores, and mask= for what is hidden",
    "mask_mod": "mask=flash_ext.masks.BlockMask.from_rule(rule, batch, num_heads, q_len, k_len)",
    "key_padding_mask": "mask=flash_ext.masks.KeyMask(keep), where True takes part",
    "alibi_slopes": "bias=flash_ext.masks.ALiBi(slopes)",
    "document_ids": "mask=flash_ext.masks.Documents(ids)",
    "prefix_lens": "mask=flash_ext.masks.PrefixLM(lens)",
    "hidden_rows": "mask=flash_ext.masks.HiddenRows(intervals)",
    "hidden_keys": "mask=flash_ext.masks.HiddenKeys(intervals)",
    "sink_tokens": "mask=flash_ext.masks.SlidingWindow(left, sink_tokens=n)",
    "chunk_size": "mask=flash_ext.masks.ChunkCausal(size)",
    "block_mask": "mask=flash_ext.masks.BlockMask.from_torch(block_mask)",
    "window": "window_size=",
    "sliding_window": "window_size=(left, 0)",
    "dropout": "dropout_p=",
    "return_lse": "return_aux=flash_ext.AuxRequest(lse=True)",
    "return_max_logits": "return_aux=flash_ext.AuxRequest(max_scores=True)",
    "return_softmax_lse": "return_aux=flash_ext.AuxRequest(lse=True)",
    "path": "backend=",
    "s_aux": "sinks=",
    "learnable_sink": "sinks=",
    "max_q": "max_seqlen_q=",
    "max_k": "max_seqlen_k=",
    "cache_seqlens": "seqused_k=",
    "page_table": "block_table=",
}
# What to do where a function has no keyword for it.
PACKED = "Packed sequences go into flash_ext.attention_varlen."
CACHED = "Keys in a cache go into flash_ext.attention_varlen."
LSE = "Leave it out: flash_ext.forward returns out and lse."
INSTEAD = {
    "enable_gqa": "Grouped heads need no switch: leave it out.",
    "cu_seqlens": PACKED,
    "cu_seqlens_q": PACKED,
    "cu_seqlens_k": PACKED,
    "cu_seq_q": PACKED,
    "cu_seq_k": PACKED,
    "max_seqlen_q": PACKED,
    "max_seqlen_k": PACKED,
    "max_q": PACKED,
    "max_k": PACKED,
    "seqused_k": CACHED,
    "cache_seqlens": CACHED,
    "block_table": CACHED,
    "page_table": CACHED,
    "layout": "Leave it out: packed tensors are (total, num_heads, head_dim), dense ones (batch, seqlen, "
    "num_heads, head_dim). Where heads come first, pass t.transpose(1, 2).",
    "num_splits": 'Leave it out: splits are chosen. To time others on a GPU, write backend="kv_splits=4".',
    "return_aux": LSE,
    "return_lse": LSE,
    "return_softmax_lse": LSE,
    "return_attn_probs": "The weights are not returned. For lse pass return_aux=flash_ext.AuxRequest("
    "lse=True) to flash_ext.attention or attention_varlen; flash_ext.forward always returns it.",
}


def refuse_unknown(function: Callable[..., Any], unknown: dict[str, Any]) -> None:
    """Raises for a keyword that no parameter of a function takes, with the one that was probably meant.

    Raises:
        TypeError: there is one.
    """
    for name in unknown:
        meant = OTHER_NAMES.get(name, "")
        helps = bool(meant)
        if not torch.compiler.is_compiling():  # which traces neither inspect nor difflib
            known = inspect.signature(function).parameters.keys() - {"unknown"}
            near = difflib.get_close_matches(name, sorted(known), 1)
            meant = meant or (f"{near[0]}=" if near else "")
            # What is a parameter elsewhere only would lead from one refusal to the next.
            helps = bool(meant) and ("=" not in meant or meant.split("=")[0] in known)
        hint = f" Did you mean {meant}?" if helps else f" {INSTEAD[name]}" if name in INSTEAD else ""
        raise TypeError(f"{function.__name__}() has no keyword {name!r}.{hint}")


def refuse_kind(
    name: str, value: Any, may_be_none: bool = False, *, wanted: str = "", hint: str = ""
) -> NoReturn:
    """Raises for what is no torch.Tensor.

    Args:
        wanted: what it must be, if that is more than a tensor.
        hint: what to say of other things than arrays.
    """
    wanted = wanted or ("a torch.Tensor or None" if may_be_none else "a torch.Tensor")
    is_array = hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__")
    if is_array:
        hint = " Convert it with torch.from_numpy or torch.from_dlpack."
    raise TypeError(f"{name} must be {wanted}, got {type(value).__qualname__}.{hint}")
