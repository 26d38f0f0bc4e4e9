"""The CPU backend with modifiers against the oracle, forward and backward, alone and in pairs, and what only
it promises: linear memory and no work on keys that nobody sees."""

from __future__ import annotations

import dataclasses
import itertools
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
from tests import compare, philox
from tests.covering import covering_array
from tests.reference import attention_reference, row_max_reference, visible_mask
from tests.test_tiled import LargestTensor

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


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("feature, level", [(f, n) for f in FEATURES for n in range(len(FEATURES[f]))])
def test_single_features(feature, level, is_packed, small_tiles, monkeypatch):
    """Each without a window and with one, batch entries
    together and one by one."""
    mods = Modifiers(**FEATURES[feature][level](is_packed))
    for window, max_scores in zip(WINDOWS[::2], (tiled.MAX_SCORES, 1)):
        monkeypatch.setattr(tiled, "MAX_SCORES", max_scores)
        assert_equals_reference(problem_of(is_packed), AttnSpec(0.6, *window), mods)


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


def everything(is_packed: bool) -> dict:
    """All features that leave most keys visible."""
    names = ("bias", "prefix", "slopes", "sinks", "softcap", "dropout", "sink_tokens")
    return {key: x for name in names for key, x in FEATURES[name][0](is_packed).items()}


@pytest.mark.parametrize("batch, seqlen_q, seqlen_k, heads", [
    (2, 0, 5, 2), (2, 5, 0, 2), (0, 5, 5, 2), (2, 5, 5, 0),
])  # fmt: skip
def test_empty_problems(batch, seqlen_q, seqlen_k, heads):
    mods = Modifiers(bias=normal(1, 1, 1, 1), sinks=normal(heads), slopes=normal(heads), mask=torch.ones(
        batch, 1, 1, seqlen_k, dtype=torch.bool), dropout_p=0.5, rng=torch.tensor([1, 2]))  # fmt: skip
    assert_equals_reference(dense(batch, seqlen_q, seqlen_k, heads, heads), AttnSpec(0.6), mods)


def test_no_sequence_at_all():
    problem = packed([], [], 2, 1)
    got = run(problem, AttnSpec(0.6), Modifiers(bias=normal(1, 1, 3, 3), sinks=normal(2)))
    assert (got["lse"] == -INF).all()
    assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv", "dbias", "dsinks"))


def test_packed_is_dense_laid_end_to_end(small_tiles):
    """The same tensors both ways, dropout included, which goes by the index of the sequence."""
    fields = (
        everything(False)
        | documents(False)
        | {
            "hidden_rows": intervals(True, 2, HEADS, 2)(False),
            "hidden_keys": intervals(False, 1, 1, 2)(False),
        }
    )
    problem, spec = dense(2, 45, 70, HEADS, 2), AttnSpec(0.6, -1, 3)
    expected = run(problem, spec, Modifiers(**fields))
    for name in ("document_q", "document_k"):
        fields[name] = fields[name].flatten()
    for name in ("hidden_rows", "hidden_keys"):
        fields[name] = torch.cat(list(fields[name]), dim=1)
    flat = Problem(*(x.flatten(0, 1) for x in (problem.q, problem.k, problem.v, problem.dout)),
                   torch.cat(list(problem.dlse), dim=1),
                   tuple(n * torch.arange(3, dtype=torch.int32) for n in (45, 70)))  # fmt: skip
    for name, got in run(flat, spec, Modifiers(**fields)).items():
        whole = expected[name]
        if name in ("lse", "row_max"):
            whole = torch.cat(list(whole), dim=1)
        elif name in ("out", "dq", "dk", "dv"):
            whole = whole.flatten(0, 1)
        torch.testing.assert_close(got, whole, rtol=0, atol=1e-12, msg=name)


# ---- Gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", list(itertools.product([0, 1], repeat=4)), ids=str)
def test_bias_gradient_of_every_broadcast(pattern, small_tiles):
    """Summed over the dimensions of size 1, dense and, with fewer rows than a sequence, packed."""
    for is_packed in (False, True):
        mods = Modifiers(bias=normal(*grid(*pattern)(is_packed)))
        assert_equals_reference(problem_of(is_packed), AttnSpec(0.6, -1, 2), mods)


@pytest.mark.parametrize("reach", [0, 5, 44, 69, 300])
@pytest.mark.parametrize("batch, heads", [(1, 1), (1, HEADS), (2, 1), (2, HEADS)])
@pytest.mark.parametrize("top_left", [False, True])
def test_bias_by_distance(reach, batch, heads, top_left, small_tiles):
    """Summed over batch or heads where it is broadcast; distances that no pair has get a gradient of 0."""
    for is_packed in (False, True):
        own_batch = batch if batch == 1 else batch_of(is_packed)
        mods = Modifiers(bias=normal(own_batch, heads, 2 * reach + 1), top_left=top_left)
        for window in WINDOWS:
            assert_equals_reference(problem_of(is_packed), AttnSpec(0.6, *window), mods)


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


class Attention(torch.autograd.Function):
    """The backend as autograd sees it."""

    @staticmethod
    def forward(ctx, q, k, v, bias, slopes, sinks, spec, mods):
        mods = dataclasses.replace(mods, bias=bias, slopes=slopes, sinks=sinks)
        out, lse, _ = tiled.forward(q, k, v, spec, mods)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spec, ctx.mods = spec, mods
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        grads = tiled.backward(dout, *ctx.saved_tensors, ctx.spec, ctx.mods, dlse, need_bias=True,
                                  need_slopes=True, need_sinks=True)  # fmt: skip
        return *grads, None, None


@pytest.mark.parametrize("window", [(-1, -1), (1, 0)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradcheck(window, dropout_p):
    """Finite differences of every float input at once, rows without keys among them."""
    q, k, v = normal(1, 5, 2, 2), normal(1, 3, 1, 2), normal(1, 3, 1, 2)
    biases = normal(1, 1, 5, 3), normal(1, 2, 2 * 2 + 1)
    mods = Modifiers(softcap=1.2, dropout_p=dropout_p, rng=torch.tensor([4, 5]), sink_tokens=1)

    def attention(*leaves):
        return Attention.apply(*leaves, AttnSpec(0.8, *window), mods)

    for bias in biases:
        leaves = (q, k, v, bias, torch.rand(2, dtype=torch.float64), normal(2))
        assert torch.autograd.gradcheck(attention, tuple(x.requires_grad_() for x in leaves))


def test_only_what_is_asked_for():
    problem, mods = dense(1, 9, 9, 2, 1), Modifiers(bias=normal(1, 1, 9, 9), sinks=normal(2))
    out, lse, _ = tiled.forward(problem.q, problem.k, problem.v, AttnSpec(0.6), mods)
    grads = tiled.backward(problem.dout, problem.q, problem.k, problem.v, out, lse, AttnSpec(0.6), mods,
                              need_sinks=True)  # fmt: skip
    assert grads[3] is None and grads[4] is None and grads[5].shape == (2,)


def test_empty_rows_pass_nothing_on_but_to_the_sink(small_tiles):
    """A row without keys: q and dout may hold anything; its lse is the sink, so dlse goes there."""
    problem, spec = dense(1, 30, 20, 2, 1), AttnSpec(0.5, -1, 0)
    mods = Modifiers(bias=normal(1, 1, 30, 20), slopes=torch.rand(2))
    clean = run(problem, spec, mods)
    problem.q[:, :10] = problem.dout[:, :10] = math.nan
    problem.dlse[:, :, :10] = INF
    for name, got in run(problem, spec, mods).items():
        assert torch.equal(got, clean[name]), name

    problem = dense(1, 30, 20, 2, 1)
    sinks = normal(2)
    got = run(problem, spec, Modifiers(sinks=sinks))
    assert torch.equal(got["lse"][0, :, :10], sinks[:, None].expand(2, 10))
    problem.dlse[:, :, :10] += 1
    more = run(problem, spec, Modifiers(sinks=sinks))["dsinks"]
    torch.testing.assert_close(more - got["dsinks"], torch.full_like(sinks, 10.0))


def test_backward_takes_out_and_lse_as_given():
    """Ring attention: gradients of parts of the keys make up the whole."""
    problem, spec = dense(1, 30, 50, 4, 2), AttnSpec(0.7)
    mods = Modifiers(bias=normal(1, 4, 30, 50), softcap=2.0, sinks=normal(4))
    expected = run(problem, spec, mods)
    parts = []
    for keys in (slice(0, 13), slice(13, 50)):
        part = dataclasses.replace(mods, bias=mods.bias[..., keys])
        parts.append(tiled.backward(
            problem.dout, problem.q, problem.k[:, keys], problem.v[:, keys], expected["out"], expected["lse"],
            spec, part, problem.dlse, need_bias=True, need_sinks=True))  # fmt: skip
    (dq, dk, dv, dbias, _, dsinks), second = parts
    whole = {"dq": dq + second[0], "dk": torch.cat([dk, second[1]], 1), "dv": torch.cat([dv, second[2]], 1),
             "dbias": torch.cat([dbias, second[3]], -1), "dsinks": dsinks}  # fmt: skip
    for name, got in whole.items():
        torch.testing.assert_close(got, expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lowest", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_number_is_no_mask(lowest, dtype, small_tiles):
    """Rows with it everywhere weigh all keys alike, forward and backward; -inf empties a row."""
    problem = dense(1, 20, 30, 2, 1)
    problem.q, problem.k, problem.v, problem.dout, problem.dlse = (
        x.to(dtype) for x in (problem.q, problem.k, problem.v, problem.dout, problem.dlse)
    )
    bias = torch.randn(1, 1, 20, 30)
    bias[0, 0, 3:6] = torch.finfo(lowest).min
    bias[0, 0, 8:11] = -INF
    bias[0, 0, 15, ::2], bias[0, 0, 16, ::2] = torch.finfo(lowest).min, -INF
    expected, got = (
        expected_of(problem, AttnSpec(0.5), Modifiers(bias=bias)),
        run(problem, AttnSpec(0.5), Modifiers(bias=bias)),
    )
    if lowest != torch.float16:  # nothing of q.k is left beside so large a number
        mean = problem.v[0, :, 0].mean(0)
        torch.testing.assert_close(got["out"][0, 3:6], mean.expand(3, 2, -1))
    assert (got["out"][0, 8:11] == 0).all() and (got["lse"][0, :, 8:11] == -INF).all()
    assert (got["dbias"][0, 0, 8:11] == 0).all()
    exact = dtype == torch.float64
    for name, x in got.items():
        tolerance = dict(rtol=1e-6, atol=1e-6) if exact else dict(rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(x.double(), expected[name].double(), **tolerance, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision(dtype):
    """Sums in float32 whatever the storage type; gradients in the types of their inputs."""
    problem = dense(2, 45, 70, HEADS, 2, dim=32)
    stored = (x.to(dtype) for x in (problem.q, problem.k, problem.v, problem.dout))
    # A large dlse of one sign keeps the sums for slopes and sinks from cancelling.
    problem, fields = Problem(*stored, 3 + problem.dlse.float().abs()), everything(False)
    fields["bias"] = fields["bias"].to(dtype)
    fields["slopes"], fields["sinks"] = fields["slopes"].float(), fields["sinks"].float()
    mods, spec = Modifiers(**fields), AttnSpec(0.2, -1, 3)
    expected, got = expected_of(problem, spec, mods), run(problem, spec, mods)
    for name in ("out", "dq", "dk", "dv", "dbias"):
        assert got[name].dtype == dtype, name
    for name in ("lse", "row_max", "dslopes", "dsinks"):
        assert got[name].dtype == torch.float32, name
    for name, x in got.items():
        error = (x.double() - expected[name]).norm() / expected[name].norm()
        assert error < max(2 * torch.finfo(dtype).eps, 1e-6), (name, float(error))


# ---- Dropout ---------------------------------------------------------------------------------------------


def test_dropout_shows_its_mask_forward_and_backward(monkeypatch):
    """With v = 1 of n, out is the weights and dv their transpose, on tiles of any size."""
    batch, seqlen, heads, p, rng = 2, 50, 4, 0.3, torch.tensor([2**62 + 1, -7])
    q = torch.zeros(batch, seqlen, heads, 2)
    k, v = torch.zeros(batch, seqlen, 2, 2), torch.eye(seqlen).expand(batch, 2, -1, -1).transpose(1, 2)
    weights = (philox.factors(rng, p, torch.arange(batch), heads, seqlen, seqlen) / seqlen).float()
    for block_m, block_n in ((128, 256), (16, 32), (7, 11)):
        monkeypatch.setattr(tiled, "BLOCK_M", block_m)
        monkeypatch.setattr(tiled, "BLOCK_N", block_n)
        mods = Modifiers(dropout_p=p, rng=rng)
        out, lse, _ = tiled.forward(q, k, v, AttnSpec(1.0), mods)
        torch.testing.assert_close(out.transpose(1, 2), weights)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(seqlen)))  # of what is not dropped yet
        dout = torch.eye(seqlen).expand(batch, heads, -1, -1).transpose(1, 2)
        dv = tiled.backward(dout, q, k, v, out, lse, AttnSpec(1.0), mods)[2]
        of_key_heads = weights.unflatten(1, (2, 2)).sum(2).mT
        torch.testing.assert_close(dv.transpose(1, 2), of_key_heads)


def test_everything_dropped_is_zero():
    problem, mods = dense(1, 9, 9, 2, 1), Modifiers(dropout_p=1.0, rng=torch.tensor([1, 2]))
    problem.dlse.zero_()
    got = run(problem, AttnSpec(0.6), mods)
    assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))
    assert got["lse"].isfinite().all()


# ---- Masks: who sees whom, and what it costs -------------------------------------------------------------

MASKS = ("mask", "documents", "prefix", "hidden_rows", "hidden_keys", "blocks", "sink_tokens", "chunk",
         "top_left")  # fmt: skip


@pytest.mark.parametrize("feature", MASKS)
@pytest.mark.parametrize("window", WINDOWS)
def test_count_probe(feature, window, small_tiles):
    """With q = 0 exp(lse) counts the keys that a row sees."""
    for draw in FEATURES[feature]:
        mods, spec = Modifiers(**draw(False)), AttnSpec(1.0, *window)
        problem = dense(2, 45, 70, HEADS, 2)
        _, lse, _ = tiled.forward(torch.zeros_like(problem.q), problem.k, problem.v, spec, mods)
        for b, h in itertools.product(range(2), range(HEADS)):
            count = visible_mask(spec, 45, 70, mods=mods, b=b, h=h).sum(1)
            assert torch.equal(lse[b, h].exp().round().long(), count), (b, h)


@pytest.mark.parametrize("count", [1, 2])
def test_hidden_intervals_are_half_open(count, small_tiles):
    """Adjacent, empty, reversed and outlying intervals, counted by hand."""
    pairs = torch.tensor([[0, 1, 1, 2], [5, 5, 3, 2], [-9, 3, 28, 99], [0, 30, 0, 30]])[:, : 2 * count]
    hidden = pairs.to(torch.int32).repeat(8, 1)[:30].view(1, 1, 30, 2 * count)
    problem = dense(1, 30, 30, 1, 1)
    problem.q.zero_()

    def counts(mods):
        return tiled.forward(problem.q, problem.k, problem.v, AttnSpec(1.0), mods)[1].exp().round().long()

    expected = torch.tensor([29, 30, 27, 0] if count == 1 else [28, 30, 25, 0]).repeat(8)[:30]
    assert torch.equal(counts(Modifiers(hidden_keys=hidden))[0, 0], expected)
    by_row = [sum(not any(s <= i < e for s, e in keys.view(-1, 2).tolist()) for keys in hidden[0, 0])
              for i in range(30)]  # fmt: skip
    assert torch.equal(counts(Modifiers(hidden_rows=hidden))[0, 0], torch.tensor(by_row))


@pytest.mark.parametrize("value", [False, True])
def test_whole_masks(value):
    """Of one value everywhere."""
    problem = dense(1, 40, 50, 2, 1)
    for mods in (
        Modifiers(mask=torch.full((1, 1, 1, 1), value)),
        Modifiers(blocks=torch.full((1, 1, 3, 4), value), block_rows=16, block_cols=16),
    ):
        got = run(problem, AttnSpec(0.6), mods)
        if value:
            plain = run(problem, AttnSpec(0.6), Modifiers())
            assert all(torch.equal(x, plain[name]) for name, x in got.items())
        else:
            assert (got["lse"] == -INF).all()
            assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


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
    seqlen, heads = 1536, 2
    problem = dense(1, seqlen, seqlen, heads, 1, dim=8)
    positions = torch.arange(seqlen, dtype=torch.int32)
    hidden = torch.stack([positions + 700, positions + 800], -1).view(1, 1, seqlen, 2)
    mods = Modifiers(
        bias=normal(1, heads, 1, seqlen), mask=torch.rand(1, 1, 1, seqlen) > 0.1, hidden_rows=hidden,
        document_q=positions[None] // 900, document_k=positions[None] // 900, slopes=normal(heads),
        sinks=normal(heads), softcap=3.0, dropout_p=0.1, rng=torch.tensor([1, 2]), sink_tokens=3,
        hidden_keys=hidden, blocks=torch.rand(1, 1, 24, 24) > 0.2, block_rows=64, block_cols=64,
    )  # fmt: skip
    with LargestTensor() as seen:
        run(problem, AttnSpec(0.6, -1, 0), mods)
    tile = heads * tiled.BLOCK_M * tiled.BLOCK_N
    assert tile <= seen.numel <= 1.2 * tile < seqlen * seqlen / 20
