"""Attention over sequences that are split across processes: a ring, and Ulysses.

Both take a process group of torch.distributed (NCCL on GPUs, gloo on CPU) and the process's own share of the
sequence, and are differentiable. :func:`shard_sequence` makes the shares.

* :func:`ring_attention` passes keys and values around; each process computes its queries against every share
  as it comes by, while the next one is on its way, and merges the results, which the kernels leave in
  float32: what comes out is rounded once. The sequence may be as long as all processes together can hold.
* :func:`ulysses_attention` exchanges the sequence for the heads, attends over all of the sequence with its
  share of the heads, and changes back. Less communication, but no more processes than heads.

Source: Liu et al. 2023, https://arxiv.org/abs/2310.01889 (ring); the zigzag order is that of
https://github.com/zhuzilin/ring-flash-attention; Jacobs et al. 2023, https://arxiv.org/abs/2309.14509
(Ulysses).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ._attention import AuxOutput, attention
from ._count import counting, tally
from ._log import logged
from ._masks.atoms import Documents
from ._masks.value import for_one_call
from ._merge import merge_into
from ._ops.dispatch import explain_options, operator_options
from ._ops.functorch import cast_as_autocast
from ._ops.library import _C
from ._pair import backward, forward

__all__ = ["gather_sequence", "ring_attention", "shard_sequence", "ulysses_attention"]

Group: TypeAlias = "dist.ProcessGroup | None"


# ---- shares of a sequence --------------------------------------------------------------------------------


@logged
def shard_sequence(t: Tensor, group: Group = None, *, dim: int = 1, zigzag: bool = True) -> Tensor:
    """This process's share of a sequence that every process holds.

    With ``zigzag`` the sequence is cut into twice as many pieces as there are processes, and process r takes
    the pieces r and 2 n - 1 - r: under a causal mask all processes then have the same work.

    Args:
        t: a tensor with the whole sequence along ``dim``: q, k, v, token or document ids, positions.
        group: the process group, None for all processes.
        dim: the dimension of the sequence.
        zigzag: the order for :func:`ring_attention`; False is one piece each, for :func:`ulysses_attention`.

    Returns:
        A contiguous copy with 1 / n of the length.

    Raises:
        ValueError: the length does not divide by 2 n (n without zigzag).
    """
    rank, world = _place(group)
    count = 2 * world if zigzag else world
    if t.shape[dim] % count:
        raise ValueError(f"the length along dim {dim} must divide by {count}, got {t.shape[dim]}; pad it.")
    pieces = t.chunk(count, dim) if t.shape[dim] else (t,) * count
    return torch.cat([pieces[i] for i in _piece_numbers(rank, world, zigzag)], dim)


@logged
@torch.no_grad()
def gather_sequence(t: Tensor, group: Group = None, *, dim: int = 1, zigzag: bool = True) -> Tensor:
    """The whole sequence from every process's share, on every process: undoes :func:`shard_sequence`.

    Without gradient.
    """
    _, world = _place(group)
    shares = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(world)]
    if world == 1:
        shares = [t]
    else:
        dist.all_gather(shares, t.contiguous(), group=group)
    pieces: dict[int, Tensor] = {}
    for rank, share in enumerate(shares):
        numbers = _piece_numbers(rank, world, zigzag)
        pieces |= dict(zip(numbers, share.chunk(len(numbers), dim)))
    return torch.cat([pieces[i] for i in sorted(pieces)], dim)


def _place(group: Group) -> tuple[int, int]:
    """Rank and size; a program without process groups is a group of one."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _piece_numbers(rank: int, world: int, zigzag: bool) -> tuple[int, ...]:
    return (rank, 2 * world - 1 - rank) if zigzag else (rank,)


# ---- ring ------------------------------------------------------------------------------------------------


@logged
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    mask: Documents | None = None,
    zigzag: bool = True,
    deterministic: bool | None = None,
    return_aux: Any = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """:func:`flash_ext.attention` over a sequence of which every process holds a share.

    Shares have the same length on every process. Of what a mask hides between two shares nothing is computed;
    shares that are hidden as a whole still come by. Results of single shares are float32 (float64 for
    float64), are merged and summed in it, gradients of keys on their way round the ring as well, and are
    rounded once, to the dtype of the inputs. The backward starts from that rounded out, as the one of
    :func:`flash_ext.attention` does.

    Args:
        q: (b, share, h, d), this process's queries.
        k, v: (b, share, h_k, d) and (b, share, h_k, dv).
        group: the process group, None for all processes.
        causal, window_size, scale, softcap, deterministic: as in :func:`flash_ext.attention`, in positions
            of the whole sequence.
        mask: :class:`flash_ext.masks.Documents` of the (b, share) ids of this process's share of packed
            documents, or None: a row sees the keys of its own document.
        zigzag: whether shares are in the order of :func:`shard_sequence` by default; False is one piece each.
        return_aux: a :class:`flash_ext.AuxRequest` to return the logsumexp as well; None for out alone.

    Returns:
        out (b, share, h, dv), dtype of q; with ``return_aux`` (out, :class:`flash_ext.AuxOutput`), whose lse
        is (b, h, share). Both carry gradients.

    Raises:
        ValueError: shares that cannot be halved in zigzag order, and what :func:`flash_ext.attention`
            refuses.
    """
    if counting:
        tally("distributed.ring_attention")
    rank, world = _place(group)
    q, k, v = cast_as_autocast(q, k, v)  # here, so that the backward, outside of autocast, gets what was used
    asked = (None, None, scale, causal, window_size, deterministic, None)
    explain_options(*asked)
    *sizes, scale, left, right, deterministic, backend = operator_options(q, *asked)
    _C.check_fwd(q, k, v, None, None, *sizes, scale, left, right, deterministic, backend)
    if getattr(return_aux, "max_scores", False):
        raise NotImplementedError("ring_attention returns lse, not max_scores.")
    share = q.shape[1]
    if k.shape[1] != share:
        raise ValueError(f"q and k must have shares of the same length, got {share} and {k.shape[1]}.")
    if zigzag and share % 2:
        raise ValueError(f"a share in zigzag order has two halves; its length must be even, got {share}.")
    document_ids = _ids_of(mask, q)
    options = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
    plan = _Plan(rank, world, share, zigzag, left, right, options)
    out, lse = _ring(q, k, v, document_ids, plan, group)
    if return_aux is None:
        return out
    return out, AuxOutput(lse if return_aux.lse else None)


def _ids_of(mask: Any, q: Tensor) -> Tensor | None:
    """Ids of one share; those of all of the sequence would be taken for the first ones."""
    if mask is None:
        return None
    if not isinstance(mask, Documents) or mask.ids_k is not None:
        raise TypeError(
            "mask must be flash_ext.masks.Documents(ids) of this process's share, without ids_k, or None, "
            f"got {mask!r}."
        )
    if mask.ids.shape != q.shape[:2]:
        raise ValueError(
            f"the ids of mask must have shape (batch, share) = {tuple(q.shape[:2])}, got "
            f"{tuple(mask.ids.shape)}. shard_sequence cuts them."
        )
    return mask.ids


@dataclass(frozen=True)
class _Plan:
    """Who holds what, and which rows of one share see which keys of another."""

    rank: int
    world: int
    share: int
    zigzag: bool
    left: int
    right: int
    options: dict[str, Any]

    def visits(self, source: int) -> list[tuple[slice, slice, tuple[int, int]]]:
        """Rows here, keys of ``source``, and the window between them, for every pair of pieces with any.

        Where order alone decides what is seen, rows that see the same are one visit.
        """
        own = _piece_numbers(self.rank, self.world, self.zigzag)
        other = _piece_numbers(source, self.world, self.zigzag)
        n = self.share // len(own)
        by_order = self.left < 0 and self.right <= 0
        if by_order and (self.right < 0 or source == self.rank):
            return [(slice(0, self.share), slice(0, self.share), (-1, self.right))]
        if by_order:
            before = [sum(piece < own_piece for piece in other) for own_piece in own]
            spans = [(before.index(m) * n, before.count(m) * n, m * n) for m in sorted({*before} - {0})]
            return [(slice(row, row + rows), slice(0, keys), (-1, -1)) for row, rows, keys in spans]
        found = []
        for a, q_piece in enumerate(own):
            for b, k_piece in enumerate(other):
                visit = _visible_block((q_piece - k_piece) * n, n, n, self.left, self.right)
                if visit is not None:
                    (r0, r1), (k0, k1), window = visit
                    found.append((slice(a * n + r0, a * n + r1), slice(b * n + k0, b * n + k1), window))
        return found


def _visible_block(
    offset: int, rows: int, keys: int, left: int, right: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None:
    """A window between two pieces of a sequence, as one between parts of them aligned at the bottom right.

    Row i of the first piece sits at key i + offset of the second and sees the keys from ``left`` before to
    ``right`` after it (-1: no end). What sees nothing, or is seen by nobody, is cut off; for what remains the
    window of :func:`flash_ext.attention` has two sides that are not negative.

    Returns:
        (first row, end), (first key, end), window; None if nothing is visible.
    """
    # Row i sees the keys from i + low to i + high.
    low = -(rows + keys) if left < 0 else offset - left
    high = rows + keys if right < 0 else offset + right
    r0, r1 = max(0, -high), min(rows, keys - low)
    if r0 >= r1:
        return None
    k0, k1 = max(0, r0 + low), min(keys, r1 + high)
    if k0 >= k1:
        return None
    centre = (k1 - k0) - (r1 - r0)  # row 0 of the parts sits here
    shift = r0 - k0
    window = (-1 if left < 0 else centre - shift - low, -1 if right < 0 else shift + high - centre)
    return (r0, r1), (k0, k1), window


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, plan: _Plan, group: Group
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        found: tuple[Tensor, Tensor] | None = None
        held = [k, v] if ids is None else [k, v, ids]
        for step in range(plan.world):
            coming = _pass_on(held, group) if step + 1 < plan.world else None
            for rows, keys, window in plan.visits((plan.rank - step) % plan.world):
                part = forward(
                    q[:, rows], held[0][:, keys], held[1][:, keys], window_size=window, out_dtype=wide,
                    **plan.options, **_documents(ids, held, rows, keys),
                )  # fmt: skip
                if found is None and part[0].shape[1] == q.shape[1]:
                    found = part
                    continue
                found = found or _no_keys(q, v, wide)
                merge_into(found[0][:, rows], found[1][:, :, rows], *part)
            held = held if coming is None else coming.wait()
        out, lse = found or _no_keys(q, v, wide)
        rounded = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, rounded, lse, ids)
        ctx.plan, ctx.group = plan, group
        return rounded, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, ids = ctx.saved_tensors
        plan, group = ctx.plan, ctx.group
        dq: Tensor | None = None
        held = [k, v] if ids is None else [k, v, ids]
        returning = None
        for step in range(plan.world):
            coming = _pass_on(held, group) if step + 1 < plan.world else None
            dk: Tensor | None = None
            dv: Tensor | None = None
            for rows, keys, window in plan.visits((plan.rank - step) % plan.world):
                parts = backward(
                    dout[:, rows], q[:, rows], held[0][:, keys], held[1][:, keys], out[:, rows],
                    lse[:, :, rows], dlse=dlse[:, :, rows], window_size=window, grad_dtype=lse.dtype,
                    **plan.options, **_documents(ids, held, rows, keys),
                )  # fmt: skip
                dq = _add(dq, q, rows, parts[0])
                dk, dv = _add(dk, k, keys, parts[1]), _add(dv, v, keys, parts[2])
            sums = [_or_zeros(dk, k, lse.dtype), _or_zeros(dv, v, lse.dtype)]
            if returning is not None:  # what the processes before found for these keys
                sums = [own.add_(others) for own, others in zip(sums, returning.wait())]
            # Gradients follow their keys, and after the last step go home, which is one further.
            returning = _pass_on(sums, group) if plan.world > 1 else None
            held = held if coming is None else coming.wait()
        dk, dv = sums if returning is None else returning.wait()
        return _or_zeros(dq, q, lse.dtype).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


_ring: Callable[..., tuple[Tensor, Tensor]] = _RingFunction.apply


def _add(total: Tensor | None, like: Tensor, at: slice, part: Tensor) -> Tensor:
    """``part`` added to a sum of the shape of ``like``; None: of nothing so far."""
    if total is None and part.shape == like.shape:
        return part
    total = _or_zeros(total, like, part.dtype)
    total[:, at] += part
    return total


def _or_zeros(total: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device=like.device) if total is None else total


def _no_keys(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out and lse of rows that have seen none."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return out, q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)


def _documents(ids: Tensor | None, held: list[Tensor], rows: slice, keys: slice) -> dict[str, Any]:
    return {} if ids is None else {"mask": for_one_call(Documents(ids[:, rows], held[2][:, keys]))}


class _Coming:
    """Tensors on their way from the process before; what is being sent is kept until it has left."""

    def __init__(self, works: list[Any], received: list[Tensor], sent: list[Tensor]) -> None:
        self._works, self._received, self._sent = works, received, sent

    def wait(self) -> list[Tensor]:
        """On a GPU the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


def _pass_on(tensors: list[Tensor], group: Group) -> _Coming:
    """Sends the tensors to the next process of the ring while those of the one before arrive."""
    rank, world = _place(group)
    after, before = (rank + 1) % world, (rank - 1) % world
    if group is not None:
        after, before = dist.get_global_rank(group, after), dist.get_global_rank(group, before)
    sent = [t.contiguous() for t in tensors]
    received = [torch.empty_like(t) for t in sent]
    operations = []
    for t, into in zip(sent, received):
        operations += [dist.P2POp(dist.isend, t, after, group), dist.P2POp(dist.irecv, into, before, group)]
    return _Coming(dist.batch_isend_irecv(operations), received, sent)


# ---- Ulysses ---------------------------------------------------------------------------------------------


@logged
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    mask: Documents | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """:func:`flash_ext.attention` over a sequence of which every process holds one piece, by its heads.

    Args:
        q: (b, share, h, d), this process's queries; the pieces are in the order of the processes, as of
            ``shard_sequence(..., zigzag=False)``. h divides by the number of processes.
        k, v: (b, share, h_k, d) and (b, share, h_k, dv). h_k divides by that number, or it by h_k: then key
            heads are repeated for the exchange.
        group: the process group, None for all processes.
        causal, window_size, scale, softcap, deterministic: as in :func:`flash_ext.attention`.
        mask: :class:`flash_ext.masks.Documents` of the (b, share) ids of this process's share of packed
            documents, or None.

    Returns:
        out (b, share, h, dv), dtype of q.

    Raises:
        ValueError: heads that do not divide, and what :func:`flash_ext.attention` refuses.
    """
    if counting:
        tally("distributed.ulysses_attention")
    _, world = _place(group)
    h, h_k = q.shape[2], k.shape[2]
    if h % world or (h_k % world and world % h_k):
        raise ValueError(
            f"the heads of q ({h}) must divide by the {world} processes, and those of k ({h_k}) divide by "
            "them or they by those; use ring_attention for any number of heads."
        )
    document_ids = _ids_of(mask, q)
    if h_k % world:
        k, v = (t.repeat_interleave(world // h_k, dim=2) for t in (k, v))
    if document_ids is not None:
        mask = for_one_call(Documents(gather_sequence(document_ids, group, zigzag=False)))
    out = attention(
        *(_exchange(t, group, True) for t in (q, k, v)), causal=causal, window_size=window_size,
        scale=scale, mask=mask, softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    return _exchange(out, group, False)


class _Exchange(torch.autograd.Function):
    """(b, share, h, d) of a part of the sequence to (b, seqlen, h / n, d) of a part of the heads, or back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(t, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.group, not ctx.to_heads), None, None


_exchange: Callable[..., Tensor] = _Exchange.apply


def _exchanged(t: Tensor, group: Group, to_heads: bool) -> Tensor:
    _, world = _place(group)
    if world == 1:
        return t
    split, joined = (2, 1) if to_heads else (1, 2)
    sent = torch.stack(t.chunk(world, dim=split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=joined)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])
