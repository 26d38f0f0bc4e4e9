"""Errors of attention in fp8, ours beside the peers', for ``python -m bench.accuracy --set fp8``.

The error is the relative Frobenius distance to float64 attention of the 16-bit inputs, before anything was
quantised. It is taken over sampled rows of every head, which a float64 attention over 131072 keys can afford.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch

from bench import machine
from bench.entrants import Entrant, make_ours
from bench.fp8_report import LONG, OURS, ErrorRow, Errors
from bench.inputs import DTYPES, Call, Inputs
from bench.peers import make_peers
from bench.shapes import Case

HEAD_DIM = 128
SAMPLED_ROWS = 256
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator], None]


def _normal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """N(0, 1), as drawn."""


def _outliers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """N(0, 100) added to one element in a thousand, as in the FlashAttention-3 paper."""
    draw = {"generator": generator, "device": q.device}
    for t in (q, k, v):
        chosen = torch.rand(t.shape, **draw) < 1e-3
        t += chosen * 10 * torch.randn(t.shape, **draw)


def _outlier_channels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """Two channels, the same of q and k, four times as large: scores have a standard deviation of 2."""
    chosen = torch.randperm(q.shape[-1], generator=generator, device=q.device)[:2]
    q[..., chosen] *= 4
    k[..., chosen] *= 4


def _peaked(times: float) -> Change:
    """Scores with that standard deviation: a row has a few large weights."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
        q *= times

    return change


def _mean(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """Values of mean 1."""
    v += 1


def _clustered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """512 values in a row, and the remainder, share a centre from N(0, 4)."""
    batch, keys, heads, size = v.shape
    draw = {"generator": generator, "device": v.device}
    centres = 2 * torch.randn(batch, -(-keys // 512), heads, size, **draw)
    v += centres.repeat_interleave(512, 1)[:, :keys]


KINDS: dict[str, Change] = {
    "normal": _normal,
    "outliers": _outliers,
    "outlier-channels": _outlier_channels,
    "peaked": _peaked(4),
    "sharply-peaked": _peaked(8),
    "values-mean-1": _mean,
    "values-clustered": _clustered,
}
OF_LONG = ("values-mean-1", "values-clustered")


def rows_of(smoke: bool) -> list[tuple[str, int, int]]:
    """(kind, queries, keys) of every row."""
    lengths, long, queries = ((256, 512), 1024, 64) if smoke else ((4096, 32768), LONG, 512)
    rows = [(kind, seqlen, seqlen) for seqlen in lengths for kind in KINDS]
    return rows + [(kind, queries, long) for kind in OF_LONG]


def make_inputs(
    kind: str, seqlen_q: int, seqlen_k: int, heads: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    """One batch entry of that kind, rounded to ``dtype`` at the end."""
    name = f"{kind}-{seqlen_q}-{seqlen_k}"
    case = Case(name, 1, seqlen_q, seqlen_k, heads, heads, HEAD_DIM, HEAD_DIM, inference=True)
    inputs = Inputs(case, torch.float32, device, seed)
    KINDS[kind](*inputs.qkv, torch.Generator(device).manual_seed(seed + 1))
    return inputs.in_type(dtype)


def sampled_rows(inputs: Inputs) -> torch.Tensor:
    """Which queries the error is taken over: all of a short sequence, else evenly spread ones."""
    count = min(SAMPLED_ROWS, inputs.case.seqlen_q)
    return torch.arange(count, device=inputs.device) * inputs.case.seqlen_q // count


def truth(inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """Those rows of (batch, seqlen, heads, size) in float64, a head at a time."""
    q, k, v = inputs.qkv

    def of_head(head: int) -> torch.Tensor:
        scores = q[:, rows, head].double() @ k[:, :, head].double().mT * HEAD_DIM**-0.5
        return torch.softmax(scores, -1) @ v[:, :, head].double()

    return torch.stack([of_head(head) for head in range(q.shape[2])], 2)


def out_of(call: Call) -> torch.Tensor:
    """What a forward call computes, as numbers."""
    return call().double() * getattr(call, "descale_out", 1.0)


def measure(entrants: list[Entrant], inputs: Inputs) -> dict[str, float | str]:
    """Errors in percent by column, or why there is none."""
    rows = sampled_rows(inputs)
    expected = truth(inputs, rows)
    errors: dict[str, float | str] = {}
    for entrant in entrants:
        reason = entrant.why_not(inputs.case, "fwd")
        if reason:
            errors[entrant.name] = reason
            continue
        try:
            out = out_of(entrant.prepare(inputs, "fwd"))[:, rows]
            errors[entrant.name] = 100 * ((out - expected).norm() / expected.norm()).item()
        except Exception as error:  # noqa: BLE001 - a peer's failure is a result
            errors[entrant.name] = f"{type(error).__name__}: {error}"[:300]
    return errors


def run(options: argparse.Namespace) -> Iterator[Errors]:
    """The run so far after every row; the first has none and says which peers are absent.

    Args:
        options: of ``python -m bench.accuracy``.
    """
    started = time.monotonic()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    named = [] if options.peers == "none" else options.peers.split(",")
    peers, absent = make_peers(named, options.fa3_lib, options.cudart12, options.fa3_fp8_lib)
    heads = 2 if options.smoke else 4
    about = {"dtype": options.dtype, "head_dim": HEAD_DIM, "num_heads": heads, "seed": options.seed}
    metadata = machine.collect(device, options.commit) | about | {"absent_peers": absent}
    errors = Errors(metadata, [])
    yield errors
    entrants = [*make_ours(list(OURS)), *peers]
    for kind, seqlen_q, seqlen_k in rows_of(options.smoke):
        try:
            inputs = make_inputs(kind, seqlen_q, seqlen_k, heads, dtype, device, options.seed)
            errors.rows.append(ErrorRow(kind, seqlen_q, seqlen_k, measure(entrants, inputs)))
        except RuntimeError as error:  # a peer left the device unusable
            metadata["stopped"] = str(error)[:300]
            return
        metadata["seconds"] = round(time.monotonic() - started, 1)
        yield errors
