"""Modules: :class:`MultiheadAttention`, with the parameters and the call of torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._count import counting, tally
from ._log import logged
from ._masks.atoms import Causal, Dense, KeyMask
from ._masks.value import And, Mask, for_one_call
from ._ops.arguments import dropout_rng
from ._pair import forward as attend

__all__ = ["MultiheadAttention"]

# Weights are carried out this many keys at a time: the largest head_dim of v on a GPU.
_COLUMNS = 256


class MultiheadAttention(torch.nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` on flash_ext: same constructor, call, parameters and state_dict.

    Checkpoints load in either direction. Every option of torch's module is served: cross attention, ``kdim``
    and ``vdim``, ``bias``, ``add_bias_kv``, ``add_zero_attn``, ``batch_first``, input without a batch, both
    masks of both kinds, dropout in training.

    What differs: a row that may see no key is 0 before the output projection, where torch's is NaN; a seed
    drops other weights; on a GPU the input must be float16 or bfloat16, or autocast on.

    ``torch.nn.TransformerEncoderLayer`` in evaluation may bypass any attention module's forward; switch that
    off with ``torch.backends.mha.set_fastpath_enabled(False)``.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn: as torch's.
        kdim, vdim, batch_first, device, dtype: as torch's.

    Example:
        >>> layer = flash_ext.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> layer(x, x, x, need_weights=False)[0].shape
        torch.Size([2, 10, 64])
    """

    @logged
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of query over key and value.

        Args:
            query: (seqlen_q, batch, embed_dim), with ``batch_first`` (batch, seqlen_q, embed_dim), or
                (seqlen_q, embed_dim).
            key, value: likewise with seqlen_k, kdim and vdim.
            key_padding_mask: (batch, seqlen_k) or (seqlen_k,): bool, True = leave out; or float, added.
            need_weights: also return the weights, as torch does unless told not to. They take memory of
                seqlen_q * seqlen_k numbers a head and further passes, one for every 256 keys.
            attn_mask: (seqlen_q, seqlen_k) or (batch * num_heads, seqlen_q, seqlen_k): bool, True = may not
                see; or float, added, with a gradient.
            average_attn_weights: average the weights over the heads.
            is_causal: says that ``attn_mask``, which must be given, is the causal mask: it is then not read,
                unless its gradient is wanted, and what it would hide is not computed.

        Returns:
            out, in the shape of query; and the weights after dropout, (batch, seqlen_q, seqlen_k) or
            (batch, num_heads, seqlen_q, seqlen_k), without batch if query has none, or None.

        Raises:
            ValueError, TypeError: shapes or types that do not fit, ``is_causal`` without a mask, or nested
                tensors.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError("nested tensors are not supported; use flash_ext.attention_varlen.")
        if counting:
            tally("nn.MultiheadAttention")
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask must be given with is_causal, as in torch.nn.MultiheadAttention.")
        batched = query.dim() == 3
        self._check_shapes(query, key, value)
        if batched and not self.batch_first:
            query, key, value = _transposed(query, key, value)
        elif not batched:
            query, key, value = _unsqueezed(query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = self._project(query, key, value)
        k, v, key_padding_mask, attn_mask = self._extend(k, v, key_padding_mask, attn_mask)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in (q, k, v))
        options = self._options(q, k, key_padding_mask, attn_mask, is_causal)
        if self.dropout > 0 and self.training:
            options |= {"dropout_p": self.dropout, "rng": dropout_rng(q.device)}
        out, _ = attend(q, k, v, **options)
        out = F.linear(out.flatten(2), self.out_proj.weight, self.out_proj.bias)
        weights = None
        if need_weights:
            weights = _weights(q, k, options)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                "query, key and value must all have 2 dimensions, or all 3 with a batch, got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
            )
        for name, t, size in (
            ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim),
        ):  # fmt: skip
            if t.shape[-1] != size:
                raise ValueError(f"{name} must have {size} features, got shape {tuple(t.shape)}.")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v (batch, seqlen, embed_dim); the same input twice is projected at once."""
        bias = self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases)]
        e = self.embed_dim

        def part(x: Tensor, start: int, end: int) -> list[Tensor]:
            rows = slice(start * e, end * e)
            projected = F.linear(x, self.in_proj_weight[rows], None if bias is None else bias[rows])
            return list(projected.split(e, dim=-1))

        if query is key and key is value:
            return part(query, 0, 3)
        if key is value:
            return [*part(query, 0, 1), *part(key, 1, 3)]
        return [*part(query, 0, 1), *part(key, 1, 2), *part(value, 2, 3)]

    def _extend(
        self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """With the keys that ``add_bias_kv`` and ``add_zero_attn`` put behind, which masks let through."""
        added = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1)], dim=1)
            added += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            added += 1
        if added and key_padding_mask is not None:
            key_padding_mask = F.pad(key_padding_mask, (0, added))
        if added and attn_mask is not None:
            attn_mask = F.pad(attn_mask, (0, added))
        return k, v, key_padding_mask, attn_mask

    def _options(
        self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> dict[str, Any]:
        """Masks as :func:`flash_ext.attention` takes them, which has True for what takes part."""
        batch, rows, heads = q.shape[:3]
        keys = k.shape[1]
        masks: list[Mask] = []
        biases: list[Tensor] = []
        adds_keys = self.bias_k is not None or self.add_zero_attn
        if is_causal and not adds_keys and mask is not None and not mask.requires_grad:
            masks, mask = [Causal("top_left")], None
        if mask is not None:
            if mask.shape not in ((rows, keys), (batch * heads, rows, keys)):
                raise ValueError(
                    f"attn_mask must have shape {(rows, keys)} or {(batch * heads, rows, keys)}, got "
                    f"{tuple(mask.shape)} (with the keys that the module adds)."
                )
            mask = mask if mask.dim() == 2 else mask.unflatten(0, (batch, heads))
            if mask.dtype == torch.bool:
                masks.append(Dense(~mask))
            else:
                biases.append(_as_bias(mask, "attn_mask", q))
        if padding is not None:
            if padding.shape != (batch, keys):
                raise ValueError(
                    f"key_padding_mask must have shape {(batch, keys)}, got {tuple(padding.shape)} (with the "
                    "keys that the module adds)."
                )
            if padding.dtype == torch.bool:
                masks.append(KeyMask(~padding))
            else:
                biases.append(_as_bias(padding, "key_padding_mask", q)[:, None, None])
        options: dict[str, Any] = {}
        if masks:
            options["mask"] = for_one_call(masks[0] if len(masks) == 1 else And(tuple(masks)))
        if biases:
            options["bias"] = biases[0] if len(biases) == 1 else biases[0] + biases[1]
        return options


def _as_bias(mask: Tensor, name: str, q: Tensor) -> Tensor:
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be torch.bool (True = leave out) or floating point, got {mask.dtype}.")
    return mask if mask.dtype in (torch.float32, q.dtype) else mask.to(q.dtype)


def _transposed(*tensors: Tensor) -> list[Tensor]:
    """Batch and sequence swapped; what is one tensor stays one, so that it is projected once."""
    known: dict[int, Tensor] = {id(t): t.transpose(0, 1) for t in tensors}
    return [known[id(t)] for t in tensors]


def _unsqueezed(*tensors: Tensor) -> list[Tensor]:
    known: dict[int, Tensor] = {id(t): t[None] for t in tensors}
    return [known[id(t)] for t in tensors]


def _weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """(batch, num_heads, seqlen_q, seqlen_k): the output for values that are the rows of a unit matrix."""
    keys = k.shape[1]
    unit = torch.eye(keys, dtype=q.dtype, device=q.device)
    parts = []
    for columns in unit.split(_COLUMNS, dim=1):
        v = columns.contiguous()[:, None].expand(*k.shape[:3], -1)
        parts.append(attend(q, k, v, **options)[0])
    return torch.cat(parts, dim=-1).transpose(1, 2) if parts else q.new_zeros(*q.shape[:2], q.shape[2], 0)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
