"""The tensors of a case in every layout an entrant wants, and how a call on them becomes what is timed."""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from collections.abc import Callable

import torch

from bench import asks, features
from bench.features import Asked, Work, window_rule
from bench.shapes import Case

Call = Callable[[], object]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Inputs:
    """Random N(0, 1) tensors of one case, the same for every entrant, in the layout each one wants.

    Attributes:
        q, k, v, dout: contiguous (batch, seqlen, heads, size), or (total, heads, size) for a packed case.
        cu_seqlens: int32 (batch + 1,) on the device for a packed case, else None.
    """

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(case.name.encode()))

        def draw(rows: int, heads: int, size: int) -> torch.Tensor:
            shape = (rows, heads, size) if case.packed else (case.batch, rows // case.batch, heads, size)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        self.q = draw(case.total_q, case.num_heads, case.head_dim)
        self.k = draw(case.total_k, case.num_heads_k, case.head_dim)
        self.v = draw(case.total_k, case.num_heads_k, case.head_dim_v)
        self.dout = draw(case.total_q, case.num_heads, case.head_dim_v)
        self.cu_seqlens = None
        if case.packed:
            ends = torch.tensor((0, *case.lengths)).cumsum(0)
            self.cu_seqlens = ends.to(device=device, dtype=torch.int32)

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as drawn."""
        return self.q, self.k, self.v

    def in_type(self, dtype: torch.dtype) -> Inputs:
        """The same tensors rounded to another type."""
        other = copy.copy(self)
        other.dtype = dtype
        for name in ("q", "k", "v", "dout"):
            setattr(other, name, getattr(self, name).to(dtype))
        for made in ("asked", "bhsd", "pairs", "hidden", "biased"):
            vars(other).pop(made, None)
        return other

    @functools.cached_property
    def asked(self) -> Asked:
        """What the case asks for; nothing beyond causal and window where it has no feature."""
        if self.case.asks:
            return asks.ask(self.case, self.dtype, self.device)
        if not self.case.feature:
            return Asked(rule=None if self.case.packed else window_rule(self.case))
        return features.ask(self.case, self.dtype, self.device)

    @property
    def without_dropout(self) -> Inputs:
        """The same with every weight kept, which has one right result."""
        other = copy.copy(self)
        other.case, other.asked = asks.without_dropout(self.case, self.asked)
        return other

    @functools.cached_property
    def pairs(self) -> int | None:
        """Visible pairs over all heads and batch entries; None where causal mask and window say it all."""
        if self.case.feature:
            return self.work().pairs
        if "mask" not in self.asked.options:
            return None
        seen = features.shared_mask(self.case, self.asked, self.device)
        case = self.case
        return int(seen.expand(-1, -1, case.seqlen_q, case.seqlen_k).sum()) * (
            case.batch * case.num_heads // (seen.shape[0] * seen.shape[1])
        )

    @functools.cached_property
    def hidden(self) -> torch.Tensor:
        """0 where a query sees a key and -inf elsewhere, in the dtype of q, for adding to the scores.

        Of 4 dimensions, each of which is 1 where the visibility does not depend on it.
        """
        seen = features.shared_mask(self.case, self.asked, self.device)
        return torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, float("-inf"))

    @functools.cached_property
    def biased(self) -> torch.Tensor:
        """:attr:`hidden` and the bias in one tensor."""
        return self.asked.bias + self.hidden

    def work(self, tile: tuple[int, int] | None = None) -> Work:
        """What the case's rule leaves to be scored, in pairs and in tiles of (queries, keys)."""
        asked, by = self.asked, {"by_batch": self.asked.by_batch, "by_head": self.asked.by_head}
        return features.count_work(self.case, asked.rule, self.device, tile=tile, **by)

    @functools.cached_property
    def bhsd(self) -> tuple[torch.Tensor, ...]:
        """q, k, v and dout as contiguous (batch, heads, seqlen, size); a packed case is one long sequence."""
        tensors = (self.q, self.k, self.v, self.dout)
        if self.case.packed:
            tensors = tuple(t.unsqueeze(0) for t in tensors)
        return tuple(t.transpose(1, 2).contiguous() for t in tensors)


def visible_mask(case: Case, device: torch.device) -> torch.Tensor:
    """Boolean (seqlen_q, seqlen_k), True where a query sees a key: the one way SDPA takes most masks."""
    return features.dense_mask(case, window_rule(case) or features.everything, device)[0, 0]


def through_autograd(
    forward: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    direction: str,
) -> Call:
    """The timed callable of an implementation that autograd can differentiate in all of ``inputs``.

    The backward is ``torch.autograd.grad(out, inputs, dout, retain_graph=True)``; ``dout`` takes the strides
    of ``out``, which is what a peer's fast road wants and what a training step hands over.
    """
    if direction == "fwd":
        return lambda: forward(*inputs)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = forward(*leaves)
    grad = torch.empty_like(out).copy_(dout)
    if direction == "bwd":
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    return lambda: torch.autograd.grad(forward(*leaves), leaves, grad)


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool):
    """PyTorch's own switch for repeatable kernels, without its habit of filling fresh memory."""
    if not enabled:
        yield
        return
    import torch.utils.deterministic as settings

    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fill
