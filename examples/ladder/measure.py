"""Times, bytes and memory of the ladder's rungs. Every section is a list of plain rows, for a file of
results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext
from bench.timing import Timer, measure

from . import native
from .costs import kernel_bytes
from .rungs import RUNGS, Call, Rung, rungs_for

Row = dict[str, object]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        softmax: (rows, length) of the softmax kernels.
        lengths, tokens, width: of the series over lengths: tokens / length batch entries, width / head_dim
            heads.
        head_dims: of that series.
        few_heads: (seqlen, head_dim), for one batch entry with 1, 2, 4 and 8 heads.
        breakdown: (batch, num_heads, seqlen, head_dim) of the parts of standard attention.
        rounds, budget_s: of each row.
    """

    softmax: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    tokens: int
    width: int
    head_dims: tuple[int, ...]
    few_heads: tuple[tuple[int, int], ...]
    breakdown: tuple[int, int, int, int]
    rounds: int
    budget_s: float


GPU = Scale(
    softmax=((264, 1 << 20), (16384, 16384)),
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    tokens=16384,
    width=2048,
    head_dims=(64, 128),
    few_heads=((4096, 64), (16384, 128)),
    breakdown=(16, 16, 1024, 64),
    rounds=3,
    budget_s=0.15,
)
# Seconds on two cores: it shows that everything runs, no more.
CPU = Scale(
    softmax=((4, 4096),),
    lengths=(64, 128),
    tokens=128,
    width=128,
    head_dims=(64,),
    few_heads=((128, 64),),
    breakdown=(1, 2, 64, 16),
    rounds=1,
    budget_s=0.0,
)
HEADS = (1, 2, 4, 8)
OF_FORWARD = 2.5  # operations of a backward, which has five products, over those of a forward, which has two
LIMIT = 0.02  # of a result's largest error: bf16 outputs below 1, and scores of standard attention in bf16


def operations(batch: int, num_heads: int, seqlen: int, head_dim: int) -> float:
    """Floating-point operations of both matrix products."""
    return 4.0 * batch * num_heads * seqlen * seqlen * head_dim


def random_qkv(shape: tuple[int, int, int, int], device: torch.device, count: int = 3) -> list[Tensor]:
    """q, k and v of (batch, num_heads, seqlen, head_dim), N(0, 1): bfloat16 on a GPU, float32 on a CPU.

    ``count`` 4: the gradient of the output, too.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(count)]


def timed(calls: dict[str, Call], timer: Timer, scale: Scale) -> dict[str, Row]:
    """Median and quartiles in ms by name, in interleaved rounds; a call that fails has its words instead."""
    samples, failures = measure(calls, timer, scale.rounds, scale.budget_s)
    rows: dict[str, Row] = {name: {"error": f"{type(e).__name__}: {e}"} for name, e in failures.items()}
    for name, of in samples.items():
        q1, median, q3 = of.quartiles()
        rows[name] = {"ms": median, "q1_ms": q1, "q3_ms": q3}
    return {name: rows[name] for name in calls}


def _with_rates(found: dict[str, Row], shape: tuple[int, int, int, int], section: str) -> list[Row]:
    rows = []
    is_backward = section == "backward"
    work = operations(*shape) * (OF_FORWARD if is_backward else 1.0)
    for name, row in found.items():
        row = {"section": section, "name": name, "shape": list(shape), **row}
        if "ms" in row:
            row["tflops"] = work / float(row["ms"]) * 1e-9  # type: ignore[arg-type]
        rung = RUNGS.get(name)
        if rung is not None and rung.algorithm and not is_backward:
            batch, num_heads, seqlen, head_dim = shape
            sizes = rung.sizes[head_dim] if rung.sizes else None
            moved = kernel_bytes(rung.algorithm, seqlen, seqlen, head_dim, sizes)
            row["counted_bytes"] = batch * num_heads * moved
        rows.append(row)
    return rows


# ---- sections ------------------------------------------------------------------------------------------


def check_results(device: torch.device) -> list[Row]:
    """The largest error of every rung against float64, at lengths that no tile divides.

    Raises:
        AssertionError: one is wrong: nothing should be timed.
    """
    rows: list[Row] = []
    for shape in ((1, 2, 333, 64), (2, 1, 200, 128)):
        q, k, v = random_qkv(shape, device)
        weights = (q.double() @ k.double().mT * shape[3] ** -0.5).softmax(-1)
        expected = weights @ v.double()
        for rung in rungs_for(device):
            found = rung.prepare(q, k, v)()
            found = found[0] if isinstance(found, tuple) else found
            assert isinstance(found, Tensor)
            if found.shape != expected.shape:
                found = found.transpose(1, 2)
            rows.append(_checked(rung.name, shape, (found.double() - expected).abs().max().item()))
        if device.type == "cuda":
            for sizes in native.FLASH1_SIZES[shape[3]]:
                error = (native.flash1(q, k, v, sizes).double() - expected).abs().max().item()
                rows.append(_checked(f"fa1 {sizes.block_m} x {sizes.block_n}", shape, error))
            lse = native.flash2(q, k, v)[1]
            assert lse is not None
            true_lse = torch.logsumexp(q.double() @ k.double().mT * shape[3] ** -0.5, -1)
            rows.append(_checked("fa2-ladder, lse", shape, (lse.double() - true_lse).abs().max().item()))
        rows += _check_backward(shape, device)
    if device.type == "cuda":
        x = torch.randn(7, 40000, device=device) * 5
        x[:, :9] = -math.inf
        for passes in native.Passes:
            error = (native.softmax(x, passes) - x.softmax(-1)).abs().max().item()
            rows.append(_checked(f"softmax {passes.name}", (7, 40000), error, 1e-5))
    return rows


def _check_backward(shape: tuple[int, int, int, int], device: torch.device) -> list[Row]:
    q, k, v, dout = random_qkv(shape, device, 4)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    weights = (leaves[0] @ leaves[1].mT * shape[3] ** -0.5).softmax(-1)
    expected = torch.autograd.grad(weights @ leaves[2], leaves, dout.double())
    rows = []
    for rung in rungs_for(device):
        if rung.backward is None:
            continue
        found = rung.backward(q, k, v, dout)()
        assert isinstance(found, tuple)
        errors = [(one - other).abs().max().item() for one, other in zip(found, expected, strict=True)]
        rows.append(_checked(f"{rung.name}, backward", shape, max(errors)))
    return rows


def _checked(name: str, shape: tuple[int, ...], error: float, limit: float = LIMIT) -> Row:
    assert error < limit, f"{name} at {shape}: largest error {error}"
    return {"section": "errors", "name": name, "shape": list(shape), "error_vs_float64": error}


def softmax_rows(device: torch.device, timer: Timer, scale: Scale) -> list[Row]:
    """Kernels by how often they read a row, and PyTorch's."""
    rows: list[Row] = []
    for shape in scale.softmax:
        x = torch.randn(shape, device=device)
        calls: dict[str, Call] = {"PyTorch": partial(torch.softmax, x, -1)}
        reads = {"PyTorch": 0}
        if device.type == "cuda":
            for passes, count in zip(native.Passes, (3, 2, 2, 1), strict=True):
                if passes is native.Passes.ON_CHIP and shape[1] * 4 > 200_000:
                    continue
                name = passes.name.lower().replace("_", " ")
                calls[name] = partial(native.softmax, x, passes)
                reads[name] = count
        for name, row in timed(calls, timer, scale).items():
            size = x.numel() * 4
            row = {"section": "softmax", "name": name, "shape": list(shape), **row}
            if reads[name]:
                row["counted_bytes"] = (reads[name] + 1) * size
            rows.append(row)
    return rows


def tile_rows(device: torch.device, timer: Timer, scale: Scale) -> list[Row]:
    """Every size that FlashAttention is compiled for, and every tile of the Triton kernel."""
    rows: list[Row] = []
    if device.type != "cuda":
        return rows
    for head_dim in scale.head_dims:
        for seqlen in (1024, 4096):
            shape = (scale.tokens // seqlen, scale.width // head_dim, seqlen, head_dim)
            q, k, v = random_qkv(shape, device)
            state = native.Flash1State.empty(q)
            calls: dict[str, Call] = {
                f"fa1 {sizes.block_m} x {sizes.block_n}": partial(native.flash1, q, k, v, sizes, state)
                for sizes in native.FLASH1_SIZES[head_dim]
            }
            if RUNGS["triton"].takes(device):
                from . import triton_flash2

                x, y, z = (t.transpose(1, 2) for t in (q, k, v))
                for tile in triton_flash2.TILES[head_dim]:
                    name = "triton {} x {}, {} warps, {} stages".format(*tile)
                    calls[name] = partial(triton_flash2.attention, x, y, z, tile=tile)
            rows += _with_rates(timed(calls, timer, scale), shape, "tiles")
    return rows


def length_rows(device: torch.device, timer: Timer, scale: Scale) -> list[Row]:
    """Every rung over lengths at a constant number of tokens: the figure of the FlashAttention-2 paper."""
    rows: list[Row] = []
    for head_dim in scale.head_dims:
        for seqlen in scale.lengths:
            shape = (scale.tokens // seqlen, scale.width // head_dim, seqlen, head_dim)
            rows += _with_rates(
                _timed_rungs(rungs_for(device), shape, device, timer, scale), shape, "lengths"
            )
    return rows


def backward_rows(device: torch.device, timer: Timer, scale: Scale) -> list[Row]:
    """The rungs that have a backward, over the lengths of :func:`length_rows`; the forward is not in it."""
    rows: list[Row] = []
    for head_dim in scale.head_dims:
        for seqlen in scale.lengths:
            shape = (scale.tokens // seqlen, scale.width // head_dim, seqlen, head_dim)
            tensors = random_qkv(shape, device, 4)
            calls = {rung.name: rung.backward(*tensors) for rung in rungs_for(device) if rung.backward}
            rows += _with_rates(timed(calls, timer, scale), shape, "backward")
            timer.release()
    return rows


def few_head_rows(device: torch.device, timer: Timer, scale: Scale) -> list[Row]:
    """One batch entry with few heads: whether the sequence gives work to the rest of the GPU."""
    rows: list[Row] = []
    for seqlen, head_dim in scale.few_heads:
        for num_heads in HEADS:
            shape = (1, num_heads, seqlen, head_dim)
            rows += _with_rates(_timed_rungs(rungs_for(device), shape, device, timer, scale), shape, "heads")
    return rows


def _timed_rungs(
    rungs: list[Rung], shape: tuple[int, int, int, int], device: torch.device, timer: Timer, scale: Scale
) -> dict[str, Row]:
    q, k, v = random_qkv(shape, device)
    found = timed({rung.name: rung.prepare(q, k, v) for rung in rungs}, timer, scale)
    timer.release()
    return found


def breakdown_rows(device: torch.device, timer: Timer, scale: Scale) -> list[Row]:
    """Where standard attention with a causal mask and dropout spends its time, and flash_ext as a whole."""
    shape = scale.breakdown
    q, k, v = random_qkv(shape, device)
    seqlen, p = shape[2], 0.1
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu_(1)
    q_scaled = q * shape[3] ** -0.5
    scores = q_scaled @ k.mT
    masked = scores.masked_fill(hidden, -math.inf)
    weights = masked.softmax(-1)
    dropped = F.dropout(weights, p)
    x, y, z = (t.transpose(1, 2) for t in (q, k, v))
    calls: dict[str, Callable[[], object]] = {
        "matmul q k": lambda: q_scaled @ k.mT,
        "mask": lambda: scores.masked_fill(hidden, -math.inf),
        "softmax": lambda: masked.softmax(-1),
        "dropout": lambda: F.dropout(weights, p),
        "matmul p v": lambda: dropped @ v,
        "flash_ext": lambda: flash_ext.attention(x, y, z, causal=True, dropout_p=p),
        "flash_ext, no dropout": lambda: flash_ext.attention(x, y, z, causal=True),
    }
    found = timed(calls, timer, scale)
    return [
        {"section": "breakdown", "name": name, "shape": list(shape), **row} for name, row in found.items()
    ]


def forward_only_rows(device: torch.device, timer: Timer, scale: Scale) -> list[Row]:
    """What a forward holds: with gradients, under no_grad, and what storing lse costs a kernel."""
    seqlen = scale.lengths[-1]
    shape = (scale.tokens // seqlen, scale.width // 64, seqlen, 64)
    q, k, v = random_qkv(shape, device)
    x, y, z = (t.transpose(1, 2) for t in (q, k, v))
    result = x.numel() * x.element_size()
    rows: list[Row] = []

    def held(call: Call) -> tuple[int | None, int | None]:
        """Bytes at the peak, and when it has returned, beyond the inputs and the output."""
        peak = timer.peak_bytes(call)
        if peak is None:
            return None, None
        before = torch.cuda.memory_allocated(device)
        kept = call()
        after = torch.cuda.memory_allocated(device) - before
        del kept
        return peak - result, after - result

    def graph() -> Tensor:
        with torch.enable_grad():
            return flash_ext.attention(*(t.detach().requires_grad_() for t in (x, y, z)))

    calls: dict[str, Call] = {
        "with a graph": graph,
        "no_grad": lambda: flash_ext.attention(x, y, z),
        "no_grad, lse asked for": lambda: flash_ext.forward(x, y, z),
    }
    with torch.no_grad():
        for name, call in calls.items():
            peak, kept = held(call)
            rows.append({"section": "forward only", "name": name, "shape": list(shape), "peak_bytes": peak,
                         "kept_bytes": kept, "lse_bytes": 4 * math.prod(shape[:3])})  # fmt: skip
    if device.type == "cuda":
        pair: dict[str, Call] = {
            "fa2-ladder, with lse": lambda: native.flash2(q, k, v),
            "fa2-ladder, without lse": lambda: native.flash2(q, k, v, want_lse=False),
        }
        for name, row in timed(pair, timer, scale).items():
            rows.append({"section": "forward only", "name": name, "shape": list(shape), **row})
    return rows
