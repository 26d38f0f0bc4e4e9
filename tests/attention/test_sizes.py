"""Shapes at which index products overflow 32 bits, and limits of a grid.

Windows keep the arithmetic small while the tensors are large. Everything here needs tens of GB of GPU memory.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import random

import pytest
import torch

import flash_ext
from flash_ext import AuxRequest
from flash_ext._ops.library import _C
from tests.cases import COMPILED_HEAD_DIMS, dense
from tests.harness import Target, choice_of, on_gpu_paths, on_targets, run_cases
from tests.tools.large import Large, random_tensor, run_large

pytestmark = pytest.mark.alone

WINDOW = (255, 0)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _give_memory_back():
    """These tests need most of the GPU: nothing cached before them, and nothing left behind."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def needs_memory(gib: int) -> None:
    """Skips the test where less GPU memory is free."""
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def dense_large(
    b: int, sq: int, sk: int, h: int, h_k: int, d: int, backward: bool = True, **options
) -> Large:
    q, k, v = random_tensor(b, sq, h, d), random_tensor(b, sk, h_k, d), random_tensor(b, sk, h_k, d)
    return Large(q, k, v, random_tensor(b, sq, h, d) if backward else None, **options)


# ---- products beyond 32 bits ----


@on_gpu_paths
def test_many_tiny_sequences(target: Target) -> None:
    """A float32 dq buffer padded to 128 rows per batch entry would have 2.17e9 elements."""
    run_cases([dense(8300, 1, 1, 16, 16, 128)], target)


@on_gpu_paths
def test_padded_batch_times_sequence(target: Target, seed: int) -> None:
    needs_memory(60)
    run_large(dense_large(400, 10496, 10496, 4, 4, 128, window=WINDOW), target, seed)


@on_gpu_paths
def test_padded_head_dim(target: Target, seed: int) -> None:
    needs_memory(40)
    run_large(dense_large(1600, 729, 729, 16, 16, 72), target, seed)


@on_gpu_paths
def test_just_over_2_to_31_elements(target: Target, seed: int) -> None:
    needs_memory(60)
    run_large(dense_large(1, 131073, 131073, 128, 128, 128, window=WINDOW), target, seed)


@on_gpu_paths
def test_over_2_to_32_elements(target: Target, seed: int) -> None:
    needs_memory(60)
    run_large(dense_large(2, 131073, 131073, 128, 128, 128, backward=False, window=WINDOW), target, seed)
    run_large(dense_large(2, 131073, 131073, 64, 64, 128, window=WINDOW), target, seed)


@on_gpu_paths
def test_batch_stride_over_2_to_31(target: Target, seed: int) -> None:
    needs_memory(16)
    stride, shape = 2**31 + 64, (3, 128, 4, 64)
    buffer = torch.full((2 * stride + 4 * 128 * 4 * 64,), math.nan, dtype=torch.bfloat16, device="cuda")
    parts = []
    for i in range(4):
        view = buffer.as_strided(shape, (stride, 256, 64, 1), i * 128 * 4 * 64)
        parts.append(view.copy_(random_tensor(*shape)))
    q, k, v, dout = parts
    run_large(Large(q, k, v, dout, causal=True), target, seed)


@on_gpu_paths
def test_packed_row_times_stride(target: Target, seed: int) -> None:
    """dout with a row stride of 9728: the offset of the last rows is beyond 2^31."""
    needs_memory(24)
    rng = random.Random(seed)
    lens, total = [], 410_923
    while total:
        lens.append(min(total, rng.randint(200, 312)))
        total -= lens[-1]
    total = sum(lens)
    q, k, v = (random_tensor(total, 16, 96) for _ in range(3))
    buffer = torch.empty(total * 9728, dtype=torch.bfloat16, device="cuda")
    dout = buffer.as_strided((total, 16, 96), (9728, 96, 1)).normal_()
    run_large(Large(q, k, v, dout, lens=[(n, n) for n in lens], causal=True), target, seed)


@on_gpu_paths
def test_decode_from_a_wide_cache(target: Target, seed: int) -> None:
    needs_memory(8)
    stride = 2**30
    buffer = torch.zeros(2 * stride + 2 * 4096 * 1024, dtype=torch.bfloat16, device="cuda")
    k, v = (buffer.as_strided((3, 4096, 8, 128), (stride, 1024, 128, 1), i * 4096 * 1024) for i in (0, 1))
    k.normal_()
    v.normal_()
    run_large(Large(random_tensor(3, 1, 32, 128), k, v), target, seed)


def check_rows_under_a_bias(seqlen: int, device: str, path: str) -> None:
    """Five rows of a square call with a bias against float64, out, lse and dq."""
    q, k, v = (random_tensor(1, seqlen, 1, 64, device=device).requires_grad_() for _ in range(3))
    bias = random_tensor(seqlen, seqlen, device=device)
    out, (lse, _) = flash_ext.attention(q, k, v, bias=bias, return_aux=AuxRequest(lse=True), backend=path)
    dout = random_tensor(1, seqlen, 1, 64, device=device)
    (dq,) = torch.autograd.grad(out, q, dout)
    keys, values = (t.detach()[0, :, 0].double() for t in (k, v))
    for row in (0, 1, seqlen // 2, seqlen - 2, seqlen - 1):
        scores = keys @ q.detach()[0, row, 0].double() / 8 + bias[row].double()
        weights = scores.softmax(0)
        change = values @ dout[0, row, 0].double()
        expected_dq = (weights * (change - weights @ change)) @ keys / 8
        assert abs(lse[0, 0, row].item() - scores.logsumexp(0).item()) < 1e-4, f"lse of row {row}"
        for name, got, expected in (("out", out, weights @ values), ("dq", dq, expected_dq)):
            error = (got[0, row, 0].double() - expected).norm() / expected.norm()
            assert error < (0.008 if name == "out" else 0.02), f"{name} of row {row} is off by {error:.2g}"


@pytest.mark.parametrize("seqlen", [46344, 65537])
@on_gpu_paths
def test_bias_of_over_2_to_31_elements(target: Target, seqlen: int) -> None:
    """Its rows are more than 2^15 elements apart, at 65537 without alignment."""
    needs_memory(24)
    check_rows_under_a_bias(seqlen, "cuda", target.path)


def test_the_look_at_rows_under_a_bias() -> None:
    check_rows_under_a_bias(700, "cpu", "cpu")


@on_gpu_paths
def test_one_head_32769(target: Target, seed: int) -> None:
    run_large(dense_large(1, 32769, 32769, 1, 1, 64), target, seed)


@on_gpu_paths
def test_ragged_keys(target: Target, seed: int) -> None:
    """90,000 packed keys of 128 heads of 192: 2.2e9 elements, few queries."""
    needs_memory(32)
    lens = [(3, 30_000), (1, 1), (64, 20_000), (200, 39_000), (0, 500), (17, 499)]
    total_q, total_k = (sum(n[side] for n in lens) for side in (0, 1))
    q, dout = (random_tensor(total_q, 128, 192) for _ in range(2))
    k, v = (random_tensor(total_k, 128, 192) for _ in range(2))
    run_large(Large(q, k, v, dout, lens=lens, causal=True), target, seed, samples=48)


@on_gpu_paths
def test_one_packed_sequence_whose_square_is_over_2_to_32(target: Target, seed: int) -> None:
    total = 190_485
    q, k, v, dout = (random_tensor(total, 2, 64) for _ in range(4))
    lens = [(100, 100), (total - 150, total - 150), (50, 50)]
    run_large(Large(q, k, v, dout, lens=lens, window=(1023, 0)), target, seed)


@on_gpu_paths
def test_133120_keys(target: Target, seed: int) -> None:
    run_large(dense_large(1, 133_120, 133_120, 1, 1, 16), target, seed, samples=24)


@on_gpu_paths
def test_uniform_attention_over_49999_keys(target: Target) -> None:
    n = 49_999
    v = random_tensor(1, n, 1, 64)
    q = torch.zeros_like(v)
    out, lse = torch.ops.flash_ext.fwd(
        q, random_tensor(1, n, 1, 64), v, None, None, 0, 0, 0.125, -1, -1, False, target.path
    )
    assert float((lse.double() - math.log(n)).abs().max()) < 1e-5
    mean = v.double().mean(1, keepdim=True)
    # P is 1 for every key, so only the sum in float32 and the rounding of the result remain.
    assert float((out.double() - mean).abs().max()) <= 2.0**-8 * float(mean.abs().max()) + 1e-5


@on_gpu_paths
def test_needle_at_the_end_of_a_million_keys(target: Target) -> None:
    n, d = 1_048_577, 128
    k = (torch.randint(0, 2, (1, n, 1, d), device="cuda") * 2 - 1).to(torch.bfloat16)
    v = random_tensor(1, n, 1, d)
    q = (4 * k[:, -1:]).expand(1, 1, 8, d).contiguous()
    out, lse = torch.ops.flash_ext.fwd(q, k, v, None, None, 0, 0, d**-0.5, -1, 0, False, target.path)
    # The needle's logit is 45; a million others of spread 4 hold a share of about 1e-10.
    assert float((out[0, 0] - v[0, -1]).abs().max()) <= 2.0**-7 * float(v[0, -1].abs().max())
    assert float((lse - 4 * math.sqrt(d)).abs().max()) < 1e-3


@on_gpu_paths
def test_strides_that_no_descriptor_holds(target: Target) -> None:
    """Dimensions of size 1 may carry any stride, 2^40 included, and rows may start off 16 bytes."""
    x = random_tensor(1, 200, 1, 64)
    huge = x.as_strided(x.shape, (2**40, 64, 2**41, 1))
    odd = random_tensor(200 * 1041).as_strided(x.shape, (0, 1041, 0, 1)).copy_(x)
    options = (None, None, 0, 0, 0.125, -1, 0, True)
    # Rows off 16 bytes run in the sm80 kernels on every path.
    for view, kernels in ((huge, target.path), (odd, "sm80")):
        found = torch.ops.flash_ext.fwd(view, view, view, *options, target.path)
        for got, wanted in zip(found, torch.ops.flash_ext.fwd(x, x, x, *options, kernels)):
            assert torch.equal(got, wanted)


def peak_extra_bytes(call) -> int:
    """Peak of GPU memory above what was allocated before the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


@pytest.mark.caching
@pytest.mark.parametrize("deterministic", [False, True])
@on_gpu_paths
def test_memory_is_linear_in_the_rows(target: Target, deterministic: bool) -> None:
    """Forward: out, lse, 13 MB above 65536 keys, at most 1 MB more.

    Backward: the gradients and the workspace that the plan states, which is at most a float32 dq and two
    numbers per row, for Hopper's kernels with up to 64 rows more a sequence. Nothing is sized batch *
    max_seqlen: one long and a thousand short sequences cost no more than their rows."""
    h, d, mib = 8, 128, 1 << 20
    options = (0, 0, d**-0.5, 255, 0, deterministic, target.path)
    for lens in ([8192], [65536] + [1] * 1000):
        total = sum(lens)
        q, k, v, dout = (random_tensor(total, h, d) for _ in range(4))
        cu = Large(q, k, v, lens=[(n, n) for n in lens]).cu_seqlens()
        row_bytes, stat_bytes = 2 * total * h * d, 4 * total * h
        out, lse = torch.ops.flash_ext.fwd(q, k, v, *cu, *options)
        forward = functools.partial(torch.ops.flash_ext.fwd, q, k, v, *cu, *options)
        shape = dict(batch=len(lens), seqlen_q=total, seqlen_k=total, num_heads=h, num_heads_k=h,
                     head_dim=d, head_dim_v=d, packed=True, window_size_left=255, window_size_right=0,
                     backend=target.path)  # fmt: skip
        # Above 65536 keys each multiprocessor has a place for what it keeps between stretches of them.
        kept = _C.plan("fwd", **shape)["workspace_bytes"]
        assert kept <= 16 * mib if total > 65536 else kept <= 16
        assert peak_extra_bytes(forward) <= row_bytes + stat_bytes + kept + mib
        plan = _C.plan("bwd", **shape, deterministic=deterministic)
        padding = 64 * (len(lens) + 1) * h * 4 * (d + 2) if plan["backend"] == "sm90" else 0
        assert plan["workspace_bytes"] <= 2 * row_bytes + 2 * stat_bytes + padding + mib
        backward = functools.partial(torch.ops.flash_ext.bwd, dout, q, k, v, out, lse, None, *cu, *options)
        assert peak_extra_bytes(backward) <= 3 * row_bytes + plan["workspace_bytes"] + mib


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A call by its sizes alone, and what a plan for it must say, in Python's integers."""

    batch: int
    rows_q: int
    rows_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    packed: bool
    causal: bool
    deterministic: bool

    @classmethod
    def drawn(cls, rng: random.Random, unit: int) -> Numbers:
        """Up to 2^40 rows; head sizes are multiples of ``unit``."""
        packed, group = rng.random() < 0.5, rng.choice((1, 2, 3, 8))
        heads_k = rng.choice((1, 2, 7, 16, 1024))
        rows = [2 ** rng.randint(0, 40 if packed else 29) + rng.randint(-1, 1) for _ in range(2)]
        sizes = [unit * rng.randint(1, 256 // unit) for _ in range(2)]
        flags = packed, rng.random() < 0.5, rng.random() < 0.5
        batch = 2 ** rng.randint(0, 20) - rng.randint(0, 1)
        return cls(batch, *rows, heads_k * group, heads_k, *sizes, *flags)

    def can_be_counted(self) -> bool:
        """Whether 63 bits hold its bytes."""
        return self.heads * max(self.rows_q, self.rows_k) * (1 if self.packed else self.batch) <= 2**50

    def plan(self, direction: str, path: str) -> dict:
        return _C.plan(direction, batch=self.batch, seqlen_q=self.rows_q, seqlen_k=self.rows_k,
                       num_heads=self.heads, num_heads_k=self.heads_k, head_dim=self.head_dim,
                       head_dim_v=self.head_dim_v, packed=self.packed, deterministic=self.deterministic,
                       window_size_right=0 if self.causal else -1,
                       backend=choice_of(path, short_kernels=0))  # fmt: skip

    def in_parts(self, parts: int) -> Numbers:
        """The call whose key heads are parts of its own; of more than one key head each is a batch entry."""
        if parts == 1:
            return self
        batch = self.batch if self.heads_k == 1 else self.heads_k
        return dataclasses.replace(self, batch=batch, heads=self.heads // self.heads_k, heads_k=parts)

    def parts_bytes(self, parts: int) -> int:
        rows = self.heads_k * self.rows_k * (1 if self.packed else self.batch)
        return 0 if parts == 1 else 4 * parts * rows * (self.head_dim + self.head_dim_v)

    def tiles(self, direction: str, plan: dict) -> int:
        heads, rows, block = self.heads, self.rows_q, plan["block_m"]
        if direction == "bwd":
            heads, rows, block = self.heads_k, self.rows_k, plan["block_n"]
        return heads * (rows // block + self.batch + 2 if self.packed else -(-rows // block) * self.batch)

    def packed_tiles(self) -> int:
        """Of up to 128 rows, those of whole queries; a packed call has a place before and behind."""
        queries = 128 // (self.heads // self.heads_k)
        return (self.batch + 2 * self.packed) * self.heads_k * -(-self.rows_q // queries)

    def split_grid(self, plan: dict) -> int:
        """CTAs of the forward for few queries: parts x key heads x tiles of all rows of a key head."""
        rows, block = self.rows_q * (self.heads // self.heads_k), plan["block_m"]
        tiles = rows // block + self.batch + 2 if self.packed else -(-rows // block) * self.batch
        return plan["splits"] * self.heads_k * tiles

    def split_bytes(self, parts: int) -> int:
        rows = self.heads * self.rows_q * (1 if self.packed else self.batch)
        states = -(-8 * parts * rows // 16) * 16
        return 0 if parts == 1 else states + 4 * parts * rows * (-(-self.head_dim_v // 4) * 4)

    def padded_head_dim(self) -> int:
        return next(size for size in COMPILED_HEAD_DIMS if size >= max(self.head_dim, self.head_dim_v))

    def head_dim_v_sm90(self) -> int:
        pairs = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
        return next(dv for d, dv in pairs if d >= self.head_dim and dv >= self.head_dim_v)

    def workspace_sm80(self, direction: str, block: int) -> int:
        rows = self.heads * self.rows_q * (1 if self.packed else self.batch)
        if direction == "fwd":
            in_stretches = not self.packed and self.rows_k > 1 << 19 and rows <= 1 << 18
            kept = -(-self.rows_q // block) * block * self.heads * self.batch
            return 4 * kept * (self.padded_head_dim() + 8) if in_stretches else 0
        return 4 * rows * (2 + (0 if self.deterministic else self.padded_head_dim()))

    def workspace_sm90(self, direction: str, block: int, kind: str, ctas: int, several: bool) -> int:
        """``block``: rows of a tile of queries. A counter where work is drawn, by CTAs that have ``several``
        work tiles, turns where it is ordered (``kind`` det)."""
        ordered = kind == "det"
        draws = self.packed or (self.causal and self.rows_q > 1)  # one row of a dense call sees all keys
        if direction == "fwd":
            in_stretches = self.rows_k > 1 << 16
            kept = ctas * block * (self.head_dim_v_sm90() + 8) if in_stretches else 0  # a place of each CTA
            return 4 * kept + (16 if several and (draws or self.saves_rounds(block)) else 0)
        per_head = self.rows_q // block + self.batch + 1 if self.packed else -(-self.rows_q // block)
        tiles = per_head * self.heads * (1 if self.packed else self.batch)
        if self.padded_head_dim() > 128 or kind == "dkdv":
            return 8 * tiles * block + (32 if draws else 0)
        assert ordered or not self.deterministic
        turns = -(-tiles // 4) * 16 if ordered else 0
        counter = 16 if (draws and several) or ordered else 0
        return 4 * tiles * block * (2 + self.padded_head_dim()) + turns + counter

    def bytes_of_stream_k(self, direction: str, plan: dict) -> int:
        """Of dk and dv, a place of each CTA, and a word of each block of keys that is divided."""
        words = self.tiles(direction, plan) % 132 + 132
        return 4 * words + 132 * 2 * 4 * plan["block_n"] * self.padded_head_dim()

    def saves_rounds(self, block: int) -> bool:
        """Whether 132 multiprocessors are through sooner where short last tiles of queries are drawn."""
        (whole, rows), heads = divmod(self.rows_q, block), self.batch * self.heads
        if whole == 0 or rows == 0 or heads * (whole + 1) >= 2**31:
            return False
        last = 20 + 80 * -(-rows // 64) // (block // 64)  # hundredths of a whole one
        if last == 100:
            return False
        drawn = max(-(-heads * whole // 132) * 100, heads * (100 * whole + last) // 132 + 40)
        in_step = any((whole + 1) % divisor == 0 for divisor in (2, 3, 11))
        dealt = -(-heads * (whole + 1) // 132) * 100 - (0 if in_step else heads * (100 - last) // 132)
        return drawn < dealt

    def workspace_of_pool(self, block: int, block_n: int) -> int:
        """Of a backward on 132 multiprocessors: accumulators of four rounds of heads, or of three."""
        blocks, per_head = -(-self.rows_k // block_n), -(-self.rows_q // block)
        group = -(-4 * blocks // 132)
        heads = group * -(-132 // (group * blocks))
        bytes_of_round = heads * (self.heads // self.heads_k) * per_head * block * self.padded_head_dim() * 4
        rounds = -(-self.batch * self.heads_k // heads)
        places = 4 if 20 * bytes_of_round <= 4 * (50 << 20) else 3
        assert rounds > places and 5 * places * bytes_of_round <= 4 * (50 << 20)
        words = 4 + (2 * rounds + 3) // 4 * 4
        return 8 * block * per_head * self.heads * self.batch + places * bytes_of_round + 4 * words + 16


@pytest.mark.parametrize("path", ["sm80", "sm90"])
def test_plans_agree_with_python_integers(pretended_gpu: None, seed: int, path: str) -> None:
    """Grid and workspace of random shapes up to 2^40 rows, which no 32-bit product survives."""
    rng = random.Random(seed)
    refused = divided = split = rings = twos = shared = packed = shares = 0
    few_tiles = [Numbers(3, rows, 65536, 2, 2, 56, 40, False, causal, False)
                 for rows in (128, 129, 1000) for causal in (False, True)]  # fmt: skip
    few_rounds = [Numbers(batch, rows, 8192, 5, 5, dim, 64, False, False, False)
                  for batch in (1, 2) for rows in (2**13, 2**29 - 64) for dim in (40, 64, 128)]  # fmt: skip
    chosen = [(call, "fwd") for call in few_tiles] + [(call, "bwd") for call in few_rounds]
    for i in range(12_000):
        call, direction = Numbers.drawn(rng, unit=8 if path == "sm90" else 1), rng.choice(("fwd", "bwd"))
        if i < len(chosen):
            call, direction = chosen[i]
        if not call.can_be_counted():
            continue
        plan = call.plan(direction, path)
        if plan["backend"] is None:
            assert "sequence length" in plan["reasons"][path]
            assert max(call.rows_q, call.rows_k) >= 2**30 - 1024
            refused += 1
            continue
        if "split" in plan["kernel"]:
            assert plan["backend"] == "sm80" and plan["grid"] == call.split_grid(plan) <= 2**31 - 1, call
            assert plan["workspace_bytes"] == call.split_bytes(plan["splits"]) <= 2**31, call
            split += 1
            continue
        assert plan["backend"] == path, call
        if plan["row"] == "sm90.fwd.parts":
            counter = 16 * plan["launches"][0]["dynamic"]
            assert sum(plan["workspace"].values()) == call.split_bytes(plan["splits"]) + counter, call
            assert plan["grid"] == min(call.tiles(direction, plan) * plan["splits"], 132), call
            shared += 1
            continue
        if plan["row"] == "sm90.fwd.packed":
            tiles = call.packed_tiles() * plan["splits"]
            counter = 16 * (tiles > 132)
            assert sum(plan["workspace"].values()) == call.split_bytes(plan["splits"]) + counter, call
            assert plan["grid"] == min(tiles, 132), call
            packed += 1
            continue
        parts = plan.get("gqa_splits", 1)
        divided += parts > 1
        run, workspace = call.in_parts(parts), sum(plan["workspace"].values()) - call.parts_bytes(parts)
        ctas = run.tiles(direction, plan)
        if path == "sm80":
            assert workspace == run.workspace_sm80(direction, plan["block_m"]), call
            assert plan["grid"] == ctas, call
        else:
            kind = plan["kernel"].rsplit("_", 1)[1]
            main = next(one for one in plan["launches"] if one["kernel"] == plan["kernel"])
            places = 132 * {"m64": 3, "stored1": 2}.get(kind, 1)
            tiles = ctas // main.get("unit_heads", 1)
            wanted = run.workspace_sm90(direction, plan["block_m"], kind, plan["grid"], tiles > places)
            twos += kind == "dkdv"
            if "stream_k_sums" in plan["workspace"]:
                wanted, shares = wanted + run.bytes_of_stream_k(direction, plan), shares + 1
            if kind == "pool":
                wanted, rings = run.workspace_of_pool(plan["block_m"], plan["block_n"]), rings + 1
            assert workspace == wanted, call
            assert plan["grid"] == min(tiles, places), call
    assert 100 < refused < 9_000 and divided > 20 and split > 20
    assert all((n > 4) == (path == "sm90") for n in (rings, twos, shared, packed, shares))


# ---- grids ----


@pytest.mark.parametrize("heads", [65535, 65536, 70000])
@on_gpu_paths
def test_more_heads_than_a_grid_dimension(target: Target, heads: int) -> None:
    run_cases([dense(1, 4, 4, heads, heads, 64)], target)


@on_gpu_paths
def test_a_million_batch_heads(target: Target, seed: int) -> None:
    run_large(dense_large(70000, 1, 7, 16, 1, 64), target, seed)


@on_targets("sm90")
def test_nine_million_tiles_of_queries(target: Target, seed: int) -> None:
    """More than 2^31 threads prepare them; 68 thousand rounds of heads take turns in four places."""
    needs_memory(30)
    run_large(dense_large(560000, 1, 3, 16, 16, 64), target.asking(dq_pool=1), seed)


@on_gpu_paths
def test_parts_of_eight_million_rows(target: Target, seed: int) -> None:
    """More rows to combine than a grid dimension has, and 4 GB of parts; of five keys one part has none."""
    needs_memory(16)
    x = dense_large(262500, 1, 5, 32, 4, 64, backward=False)
    chosen = target.asking(kv_splits=2)
    with chosen.active():
        run_large(x, chosen, seed)
        assert _C.last_launch()["splits"] == 2


@on_gpu_paths
def test_more_query_tiles_than_a_grid_dimension(target: Target, seed: int) -> None:
    run_large(dense_large(1, 128 * 65536 + 1, 16, 1, 1, 16), target, seed, samples=24)


@on_gpu_paths
def test_more_thread_blocks_than_a_grid_holds_are_an_exception(target: Target) -> None:
    needs_memory(32)
    q = torch.zeros(65536, 1, 32768, 1, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(65536, 1, 1, 1, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match=r"more than 2\^31 - 1 tiles"):
        torch.ops.flash_ext.fwd(q, k, k, None, None, 0, 0, 1.0, -1, -1, False, target.path)
    run_cases([dense(1, 5, 5, 1, 1, 64)], target)  # the context is as before


@on_gpu_paths
def test_a_refused_launch_is_an_exception(target: Target) -> None:
    """Told that a block may have less shared memory than any tile needs, the path refuses in words."""
    q = random_tensor(1, 8, 1, 64)
    _C.set_switch("smem_per_block", 1000)
    try:
        with pytest.raises(ValueError, match="shared memory"):
            torch.ops.flash_ext.fwd(q, q, q, None, None, 0, 0, 0.125, -1, -1, False, target.path)
    finally:
        _C.set_switch("smem_per_block", None)
    torch.ops.flash_ext.fwd(q, q, q, None, None, 0, 0, 0.125, -1, -1, False, target.path)


@on_gpu_paths
def test_results_do_not_depend_on_the_number_of_sms(target: Target) -> None:
    case_tensors = [random_tensor(2, 700, 4, 128) for _ in range(3)]
    options = (None, None, 0, 0, 128**-0.5, -1, 0, True, target.path)
    expected = torch.ops.flash_ext.fwd(*case_tensors, *options)
    for num_sms in (1, 2, 7, 48, 76, 108, 114, 131, 132, 264):
        _C.set_switch("num_sms", num_sms)
        try:
            for got, wanted in zip(torch.ops.flash_ext.fwd(*case_tensors, *options), expected):
                assert torch.equal(got, wanted), f"{num_sms} SMs"
        finally:
            _C.set_switch("num_sms", None)
