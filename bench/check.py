"""Is a result right? A slice of it against the formula of attention in float64, before anything is timed.

The truth is formed from the rule and the change of scores that a row gives to FlexAttention, not from the
options of ours or the masks of SDPA, so that a misread option shows on either side.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench import features
from bench.entrants import Entrant
from bench.inputs import Call, Inputs
from tests.compare import GATES

ROWS = 64  # of a slice
# The gates are for whole tensors of standard normal inputs; a slice of a row with masks and biases averages
# less, and a peer gets its bias rounded.
SLACK = 4.0
# Dropping a share p of the weights moves out by sqrt(p / (1 - p)) of itself; so many calls are near to that.
# Under a causal mask the few weights of the first rows decide: of single calls one of some ten is not.
DROPOUT_SLACK, DROPOUT_CALLS = 0.25, 8


class WrongResult(RuntimeError):
    """What a column computes is not what its row asks for."""


@dataclass(frozen=True)
class Slice:
    """Some query rows of one head of one sequence, and what is right there in float64, (rows, size)."""

    at: tuple
    out: torch.Tensor
    dq: torch.Tensor


def slices(inputs: Inputs) -> list[Slice]:
    """The slices of a row that are looked at: the first and the last head of up to three sequences."""
    return [_slice(inputs, b, h) for b in _sequences(inputs) for h in {0, inputs.case.num_heads - 1}]


def _sequences(inputs: Inputs) -> set[int]:
    case = inputs.case
    if not case.packed:
        return {0, case.batch // 2, case.batch - 1}
    filled = [b for b, length in enumerate(case.lengths) if length]
    return {filled[0], filled[-1], case.lengths.index(max(case.lengths))}


def _rows(count: int) -> list[int]:
    """All of a few, else the middle of each of 64 equal parts. The first rows of a causal mask, which have
    gradients near 0, are no measure of the others."""
    return list(range(count)) if count <= ROWS else [(2 * i + 1) * count // (2 * ROWS) for i in range(ROWS)]


def _slice(inputs: Inputs, b: int, h: int) -> Slice:
    case, asked, device = inputs.case, inputs.asked, inputs.device
    h_k = h * case.num_heads_k // case.num_heads
    start, sq, sk, rule = 0, case.seqlen_q, case.seqlen_k, asked.rule
    if case.packed:
        start, sq, sk = sum(case.lengths[:b]), case.lengths[b], case.lengths[b]
        rule = features.window_rule(case)  # one for all lengths: queries and keys are equally many
    rows = torch.tensor(_rows(sq), device=device)
    at = (rows + start, h) if case.packed else (b, rows, h)
    keys = (slice(start, start + sk), h_k) if case.packed else (b, slice(None), h_k)
    q = inputs.q[at].double().requires_grad_()
    k, v = inputs.k[keys].double(), inputs.v[keys].double()
    index = (torch.tensor(b, device=device), torch.tensor(h, device=device))
    row, col = rows[:, None], torch.arange(sk, device=device)[None]
    scores = q @ k.T * case.head_dim**-0.5
    if asked.score is not None:
        scores = asked.score(None)(scores, *index, row, col)
    if rule is not None:
        scores = scores.masked_fill(~rule(*index, row, col), float("-inf"))
    if "sinks" in asked.options:
        sink = asked.options["sinks"][h].double().expand(len(rows), 1)
        weights = torch.softmax(torch.cat((scores, sink), 1), 1)[:, :-1]
    else:
        weights = torch.softmax(scores, 1)
    out = weights @ v
    (dq,) = torch.autograd.grad(out, q, inputs.dout[at].double())
    return Slice(at, out.detach(), dq)


def demand(entrant: Entrant, inputs: Inputs, direction: str, call: Call, right: Sequence[Slice]) -> None:
    """Runs a call once and compares its slices: out of a forward, else the gradient of q.

    With dropout it is the call of the same row without it that is compared, and for the forward with it how
    far its result is from that.

    Args:
        right: what :func:`slices` says of ``inputs``.

    Raises:
        WrongResult: they differ by more than roundings; the message says by how much.
    """
    p = inputs.asked.options.get("dropout_p", 0.0)
    what = "out" if direction == "fwd" else "dq"
    sure = entrant.prepare(inputs.without_dropout, direction) if p else call
    error = _error(sure(), inputs, what, right)
    limit = SLACK * GATES[inputs.dtype][what].rel_l2
    if not error <= limit:
        raise WrongResult(f"{what} is off by {error:.3g} of its norm, limit {limit:.3g}")
    if p and what == "out":
        shares = [_error(call(), inputs, what, right) for _ in range(DROPOUT_CALLS)]
        share, expected = statistics.fmean(x * x for x in shares) ** 0.5, (p / (1 - p)) ** 0.5
        if not abs(share / expected - 1) <= DROPOUT_SLACK:
            raise WrongResult(f"dropout of {p} moves out by {share:.3g} of its norm, not by {expected:.3g}")


def _error(result: object, inputs: Inputs, what: str, right: Sequence[Slice]) -> float:
    """Norm of the error over the norm of the truth, all slices together."""
    like = inputs.dout if what == "out" else inputs.q
    tensor = _rows_first(result, like)
    pairs = [(tensor[part.at].double(), getattr(part, what)) for part in right]
    off = sum((got - truth).square().sum().item() for got, truth in pairs)
    return (off / sum(truth.square().sum().item() for _, truth in pairs)) ** 0.5


def _rows_first(result: object, like: torch.Tensor) -> torch.Tensor:
    """The tensor of a result that has the shape of q or dout, in the layout of ours."""
    for tensor in _tensors(result):
        for turned in (tensor, tensor.squeeze(0), *(t.transpose(-3, -2) for t in _heads_first(tensor))):
            if turned.shape == like.shape:
                return turned
    raise WrongResult(f"it returned nothing of the shape {tuple(like.shape)}")


def _heads_first(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.dim() == 4:
        yield tensor
        if tensor.shape[0] == 1:
            yield tensor[0]


def _tensors(result: object) -> Iterator[torch.Tensor]:
    parts = result if isinstance(result, Sequence) else (result,)
    return (part for part in parts if isinstance(part, torch.Tensor))
