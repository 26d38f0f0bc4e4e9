"""The CPU backend with modifiers against the oracle, forward and backward, alone and in pairs, and what only
it promises: linear memory and no work on keys that nobody sees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from flash_ext._cpu import tiles as tiled
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec
from tests import compare
from tests.covering import covering_array
from tests.cpu.test_tiled import LargestTensor
from tests.reference import attention_reference, row_max_reference

INF = float("inf")
LEARNED = ("bias", "slopes", "sinks")


@dataclass
class Problem:
    """The tensors of one call, float64 unless cast."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    cu_seqlens: tuple[Tensor, Tensor] | tuple[()] = ()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def dense(
    batch: int, seqlen_q: int, seqlen_k: int, num_heads: int, num_heads_k: int, dim: int = 4
) -> Problem:
    shapes = ((seqlen_q, num_heads, dim), (seqlen_k, num_heads_k, dim), (seqlen_k, num_heads_k, dim - 1))
    q, k, v = (normal(batch, *shape) for shape in shapes)
    return Problem(q, k, v, normal(*q.shape[:3], dim - 1), normal(batch, num_heads, seqlen_q))


def packed(lens_q: list[int], lens_k: list[int], num_heads: int, num_heads_k: int, tail: int = 3) -> Problem:
    """Rows behind the last sequence belong to none."""
    one = dense(1, sum(lens_q) + tail, sum(lens_k) + tail, num_heads, num_heads_k)
    cu = (torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32) for lens in (lens_q, lens_k))
    return Problem(one.q[0], one.k[0], one.v[0], one.dout[0], one.dlse[0], tuple(cu))


def expected_of(problem: Problem, spec: AttnSpec, mods: Modifiers) -> dict[str, Tensor]:
    """Results and all gradients by autograd through the oracle."""
    given = {name: x for name in LEARNED if (x := getattr(mods, name)) is not None}
    learned = {name: x.double().requires_grad_() for name, x in given.items()}
    mods = dataclasses.replace(mods, **learned)
    q, k, v = (x.double().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out, lse = attention_reference(q, k, v, spec, *problem.cu_seqlens, mods=mods)
    row_max = row_max_reference(q, k, v, spec, *problem.cu_seqlens, mods=mods)
    leaves = {"q": q, "k": k, "v": v, **learned}
    arriving = (problem.dout.double(), problem.dlse.double())
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), arriving)
    found = {"out": out.detach(), "lse": lse.detach(), "row_max": row_max}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def run(problem: Problem, spec: AttnSpec, mods: Modifiers) -> dict[str, Tensor]:
    q, k, v = problem.q, problem.k, problem.v
    out, lse, row_max = tiled.forward(q, k, v, spec, mods, *problem.cu_seqlens, want_row_max=True)
    cu_seqlens = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), problem.cu_seqlens))
    grads = tiled.backward(problem.dout, q, k, v, out, lse, spec, mods, problem.dlse, **cu_seqlens,
                              need_bias=True, need_slopes=True, need_sinks=True)  # fmt: skip
    found = {"out": out, "lse": lse, "row_max": row_max}
    names = ("dq", "dk", "dv", "dbias", "dslopes", "dsinks")
    return found | {name: x for name, x in zip(names, grads, strict=True) if x is not None}


def assert_equals_reference(problem: Problem, spec: AttnSpec, mods: Modifiers) -> None:
    expected, got = expected_of(problem, spec, mods), run(problem, spec, mods)
    assert got.keys() == expected.keys()
    for name, x in got.items():
        assert x.is_contiguous() and x.shape == expected[name].shape, name
        compare.assert_same_special_values(name, x, expected[name])
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(x, expected[name], rtol=1e-11, atol=1e-11, msg=message)
    unseen = (expected["row_max"] == -INF).transpose(-1, -2)
    assert (got["out"][unseen] == 0).all() and (got["dq"][unseen] == 0).all()


# ---- Features, one factor each ---------------------------------------------------------------------------

LENS_Q, LENS_K = [45, 0, 20, 9], [60, 9, 70, 0]  # packed; dense has 2 x (45, 70)
HEADS = 4


def grid(batch: int, heads: int, rows: int, cols: int) -> Callable[[bool], tuple[int, ...]]:
    """A shape whose factors 1 stay 1; packed it has the size of no sequence."""

    def shape(is_packed: bool) -> tuple[int, ...]:
        b, r, c = (len(LENS_Q), 40, 75) if is_packed else (2, 45, 70)
        return (b if batch else 1, HEADS if heads else 1, r if rows else 1, c if cols else 1)

    return shape


def intervals(of_keys: bool, count: int, heads: int, batch: int) -> Callable[[bool], Tensor]:
    def draw(is_packed: bool) -> Tensor:
        total = (sum(LENS_K if of_keys else LENS_Q) + 3) if is_packed else (70 if of_keys else 45)
        start = torch.randint(-3, 60, (1 if is_packed else batch, heads, total, count, 1))
        pairs = torch.cat([start, start + torch.randint(0, 25, start.shape)], dim=-1)  # some are empty
        return (pairs[0] if is_packed else pairs).flatten(-2).to(torch.int32)

    return draw


def documents(is_packed: bool) -> dict[str, Tensor]:
    shapes = [(sum(lens) + 3,) if is_packed else (2, n) for lens, n in ((LENS_Q, 45), (LENS_K, 70))]
    ids_q, ids_k = (torch.randint(-1, 3, shape, dtype=torch.int32).sort(-1).values for shape in shapes)
    return {"document_q": ids_q, "document_k": ids_k}


def batch_of(is_packed: bool) -> int:
    return len(LENS_Q) if is_packed else 2


FEATURES: dict[str, list[Callable[[bool], dict]]] = {
    "bias": [
        lambda p: {"bias": normal(*grid(1, 1, 1, 1)(p))},
        lambda p: {"bias": normal(*grid(0, 1, 1, 0)(p)).transpose(1, 2).contiguous().transpose(1, 2)},
        lambda p: {"bias": normal(batch_of(p), HEADS, 2 * 13 + 1)},
        lambda p: {"bias": normal(1, HEADS, 2 * 90 + 1)},
    ],
    "mask": [
        lambda p: {"mask": torch.rand(grid(1, 0, 1, 1)(p)) > 0.4},
        lambda p: {"mask": (torch.rand(grid(0, 1, 0, 1)(p)) > 0.4).expand(grid(1, 1, 0, 1)(p))},
    ],
    "documents": [documents],
    "prefix": [lambda p: {"prefix_lens": torch.tensor([13, -4, 99, 1][: batch_of(p)], dtype=torch.int32)}],
    "hidden_rows": [
        lambda p: {"hidden_rows": intervals(True, 2, HEADS, 1)(p)},
        lambda p: {"hidden_rows": intervals(True, 1, 1, 2)(p)},
    ],
    "hidden_keys": [
        lambda p: {"hidden_keys": intervals(False, 1, HEADS, 2)(p)},
        lambda p: {"hidden_keys": intervals(False, 2, 1, 1)(p)},
    ],
    "blocks": [
        lambda p: {
            "blocks": torch.rand(batch_of(p), HEADS, 3, 3) > 0.4, "block_rows": 16, "block_cols": 32},
        lambda p: {"blocks": torch.rand(1, 1, 1, 5) > 0.3, "block_rows": 48, "block_cols": 16},
    ],
    "slopes": [
        lambda p: {"slopes": torch.rand(HEADS, dtype=torch.float64)},
        lambda p: {"slopes": torch.rand(batch_of(p), HEADS, dtype=torch.float64)},
    ],
    "sinks": [lambda p: {"sinks": normal(HEADS)}],
    "softcap": [lambda p: {"softcap": 1.5}],
    "dropout": [lambda p: {"dropout_p": 0.3, "rng": torch.randint(-(2**62), 2**62, (2,))}],
    "sink_tokens": [lambda p: {"sink_tokens": 5}],
    "chunk": [lambda p: {"chunk": 16}],
    "top_left": [lambda p: {"top_left": True}],
}  # fmt: skip
WINDOWS = [(-1, -1), (-1, 0), (9, 4)]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in each direction, ragged ones among them."""
    monkeypatch.setattr(tiled, "BLOCK_M", 24)
    monkeypatch.setattr(tiled, "BLOCK_N", 40)


def problem_of(is_packed: bool, num_heads_k: int = 2) -> Problem:
    return packed(LENS_Q, LENS_K, HEADS, num_heads_k) if is_packed else dense(2, 45, 70, HEADS, num_heads_k)


NAMES = list(FEATURES)
LEVELS = [len(WINDOWS), 2, 2, *(1 + len(levels) for levels in FEATURES.values())]


@pytest.mark.parametrize("row", covering_array(LEVELS, 2), ids=lambda row: "".join(map(str, row)))
def test_pairs_of_features(row, small_tiles):
    """Every two features meet, each present and absent, dense and packed, with each window and grouping."""
    is_packed = bool(row[1])
    fields = {}
    for name, level in zip(NAMES, row[3:], strict=True):
        if level:
            fields |= FEATURES[name][level - 1](is_packed)
    problem = problem_of(is_packed, num_heads_k=(4, 1)[row[2]])
    assert_equals_reference(problem, AttnSpec(-0.6, *WINDOWS[row[0]]), Modifiers(**fields))


@pytest.mark.parametrize("batch, seqlen_q, seqlen_k, heads", [
    (2, 0, 5, 2), (2, 5, 0, 2), (0, 5, 5, 2), (2, 5, 5, 0),
])  # fmt: skip
def test_empty_problems(batch, seqlen_q, seqlen_k, heads):
    mods = Modifiers(bias=normal(1, 1, 1, 1), sinks=normal(heads), slopes=normal(heads), mask=torch.ones(
        batch, 1, 1, seqlen_k, dtype=torch.bool), dropout_p=0.5, rng=torch.tensor([1, 2]))  # fmt: skip
    assert_equals_reference(dense(batch, seqlen_q, seqlen_k, heads, heads), AttnSpec(0.6), mods)


# ---- Gradients -------------------------------------------------------------------------------------------


def test_minus_infinity_by_distance_hides_and_nan_stays_with_its_rows(small_tiles):
    """As in a dense bias."""
    problem, entries = dense(1, 45, 45, 2, 1), normal(1, 2, 2 * 20 + 1)
    entries[..., 25:] = -INF
    by_distance = run(problem, AttnSpec(0.6), Modifiers(bias=entries))
    plain = run(problem, AttnSpec(0.6, -1, 4), Modifiers(bias=entries.masked_fill(entries == -INF, 0)))
    assert by_distance.keys() == plain.keys()
    for name, x in by_distance.items():
        torch.testing.assert_close(x, plain[name], rtol=0, atol=1e-12, msg=name)
    assert (by_distance["dbias"][..., 25:] == 0).all()

    entries = normal(1, 2, 2 * 20 + 1)
    entries[:, 0, 20 + 3] = math.nan
    got = run(problem, AttnSpec(0.6, 5, 5), Modifiers(bias=entries))
    assert torch.equal(got["lse"].isnan()[0, 0], torch.arange(45) < 42) and got["lse"][0, 1].isfinite().all()


# ---- Masks: who sees whom, and what it costs -------------------------------------------------------------


def visits(problem: Problem, spec: AttnSpec, mods: Modifiers, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tiles of scores the forward pass makes."""
    seen = []
    scores = tiled._ScoreTiles.scores
    with monkeypatch.context() as patch:
        patch.setattr(tiled._ScoreTiles, "scores", lambda *args: seen.append(0) or scores(*args))
        tiled.forward(problem.q, problem.k, problem.v, spec, mods)
    return len(seen)


def test_key_blocks_that_nobody_sees_are_skipped(monkeypatch):
    monkeypatch.setattr(tiled, "BLOCK_M", 16)
    monkeypatch.setattr(tiled, "BLOCK_N", 16)
    ids = (torch.arange(128) // 32).to(torch.int32)[None]
    rows = torch.arange(128, dtype=torch.int32)
    own_block = torch.stack([rows // 16 * 16 + 16, torch.full_like(rows, 128)], -1).view(1, 1, 128, 2)
    diagonal = torch.eye(8, dtype=torch.bool)[None, None]
    cases = [
        (Modifiers(), (-1, -1), 64),
        (Modifiers(), (-1, 0), 36),
        (Modifiers(), (16, 0), 15),
        (Modifiers(document_q=ids, document_k=ids), (-1, -1), 16),
        (Modifiers(document_q=ids, document_k=ids), (-1, 0), 12),
        (Modifiers(chunk=32), (-1, -1), 16),
        (Modifiers(sink_tokens=1), (16, 0), 21),
        (Modifiers(prefix_lens=torch.tensor([20])), (0, 0), 22),
        (Modifiers(blocks=diagonal, block_rows=16, block_cols=16), (-1, -1), 8),
        (Modifiers(mask=(rows < 48).view(1, 1, 1, 128)), (-1, -1), 24),
        (Modifiers(hidden_keys=own_block), (-1, -1), 36),
        (Modifiers(hidden_rows=own_block), (-1, -1), 36),
    ]
    problem = dense(1, 128, 128, 2, 1)
    for mods, window, expected in cases:
        assert visits(problem, AttnSpec(0.5, *window), mods, monkeypatch) == expected, (mods, window)


def test_memory_grows_linearly():
    """No tensor exceeds the inputs or one tile, whatever is combined with a broadcast bias."""
    seqlen, heads = 1280, 2
    problem = dense(1, seqlen, seqlen, heads, 1, dim=8)
    positions = torch.arange(seqlen, dtype=torch.int32)
    hidden = torch.stack([positions + 700, positions + 800], -1).view(1, 1, seqlen, 2)
    mods = Modifiers(
        bias=normal(1, heads, 1, seqlen), mask=torch.rand(1, 1, 1, seqlen) > 0.1, hidden_rows=hidden,
        document_q=positions[None] // 900, document_k=positions[None] // 900, slopes=normal(heads),
        sinks=normal(heads), softcap=3.0, dropout_p=0.1, rng=torch.tensor([1, 2]), sink_tokens=3,
        hidden_keys=hidden, blocks=torch.rand(1, 1, 20, 20) > 0.2, block_rows=64, block_cols=64,
    )  # fmt: skip
    with LargestTensor() as seen:
        run(problem, AttnSpec(0.6, -1, 0), mods)
    tile = heads * tiled.BLOCK_M * tiled.BLOCK_N
    assert tile <= seen.numel <= 1.2 * tile < seqlen * seqlen / 20
