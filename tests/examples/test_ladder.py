"""The algorithms of the literature: worked numbers, theorems by counting, known mistakes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.ladder.algorithms import (
    BlockSizes,
    Memory,
    block_sizes,
    block_softmax,
    blocks,
    causal_mask,
    flash_attention_1,
    flash_attention_2,
    grid_attention,
    merge_softmax,
    normalise,
    softmax_2pass,
    softmax_3pass,
    sram_use,
    standard_attention,
    tile_kind,
)
from flash_ext._merge import merge_attention_states

NEG_INF = float("-inf")
SOFTMAX = [softmax_3pass, softmax_2pass]


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_qkv(seqlen_q=29, seqlen_k=37, head_dim=5, head_dim_v=4, dtype=torch.float64):
    return [torch.randn(n, d).to(dtype) for n, d in
            ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v))]  # fmt: skip


def exact(q, k, v, scale=1.0, mask=None):
    """softmax(scale q k^T) v by torch's own softmax; rows without a visible key are 0."""
    scores = (q.double() @ k.double().mT) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, NEG_INF)
    return scores.softmax(-1).nan_to_num(0.0) @ v.double()


def close(got, expected, atol=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol, check_dtype=False)


# ---- softmax -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", SOFTMAX)
@settings(max_examples=50)
@given(values=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20))
def test_softmax_is_the_definition(softmax, values):
    """Exp of each x_j over the sum of the exps of all x_j."""
    close(softmax(f64(*values)), torch.softmax(f64(*values), 0))


@pytest.mark.parametrize("softmax, passes", [(softmax_3pass, 3), (softmax_2pass, 2)])
def test_passes_are_reads(softmax, passes):
    """What does not fit on chip is read once per pass."""
    memory = Memory()
    softmax(torch.randn(50), memory)
    assert (memory.read, memory.written) == (passes * 50, 50)


def test_worked_example_of_three_blocks():
    """[1, 3], [2, 4], [3, 2]; maximum and sum are one number per row."""
    first, second, third = (block_softmax(f64(*x)) for x in ((1, 3), (2, 4), (3, 2)))
    e = math.exp
    assert float(first.row_max) == 3 and float(second.row_max) == 4
    for stats in (first, second):
        assert stats.row_max.dim() == stats.row_sum.dim() == 0
        close(stats.exps, f64(e(-2), 1))
        close(stats.row_sum, f64(e(-2) + 1)[0])
    two = merge_softmax(first, second)
    assert float(two.row_max) == 4
    close(two.exps, f64(e(-1) * e(-2), e(-1), e(-2), 1))
    close(two.row_sum, f64(e(-1) * (e(-2) + 1) + e(-2) + 1)[0])
    close(merge_softmax(two, third).softmax(), torch.softmax(f64(1, 3, 2, 4, 3, 2), 0))


@given(st.lists(st.lists(st.one_of(st.floats(-300, 300), st.just(NEG_INF)), max_size=4), max_size=5))
def test_blocks_of_any_sizes_merge(pieces):
    """Unequal, empty and hidden blocks; the empty one changes nothing."""
    x = f64(*(value for piece in pieces for value in piece))
    merged = block_softmax(f64())
    assert float(merged.row_max) == NEG_INF and float(merged.row_sum) == 0
    for piece in pieces:
        merged = merge_softmax(merged, block_softmax(f64(*piece)))
    whole = block_softmax(x)
    assert torch.equal(merged.row_max, whole.row_max)
    close(merged.row_sum, whole.row_sum)
    close(merged.exps, whole.exps)
    if (x > NEG_INF).any():
        close(merged.softmax(), torch.softmax(x, 0))


# ---- attention: every algorithm is exact ---------------------------------------------------------------


def run_grid(q, k, v, sizes, scale):
    return grid_attention(q[None, None], k[None, None], v[None, None], *sizes, scale)[0, 0]


ALGORITHMS = {
    "standard": lambda q, k, v, sizes, scale: standard_attention(q, k, v, scale),
    "flash1": flash_attention_1,
    "grid": run_grid,
    "flash2": lambda *args: flash_attention_2(*args)[0],
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(16, 16), (17, 23), (5, 40), (40, 5), (1, 1), (3, 0)])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 3), (1, 7), (64, 64)])
def test_algorithms_agree_with_softmax(name, seqlen_q, seqlen_k, sizes):
    """Tails, several query blocks, one.

    A place added twice, a tail read past its end or a padded column in the denominator would all show here.
    """
    q, k, v = random_qkv(seqlen_q, seqlen_k)
    close(ALGORITHMS[name](q, k, v, BlockSizes(*sizes), 0.7), exact(q, k, v, 0.7))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_softmax_of_scores_times_v_is_not_softmax_of_the_product(name):
    torch.manual_seed(0)
    q, k, v = random_qkv(6, 6, 3, 3)
    got = ALGORITHMS[name](q, k, v, BlockSizes(2, 2), 1.0)
    assert (got - torch.softmax(q @ k.T @ v, -1)).abs().max() > 0.1


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("logit", [300.0, -300.0, 1e4])
def test_large_logits(name, logit):
    """In float32, where exp would overflow at 89."""
    q, k, v = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [logit]]), torch.eye(3)
    close(ALGORITHMS[name](q, k, v, BlockSizes(2, 1), 1.0), exact(q, k, v), atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_statistics_are_not_kept_in_half_precision(name):
    """A float16 sum of 1 over 4096 keys stops at 2048; the answer must be good to one rounding."""
    q, k, v = random_qkv(4, 4096, 4, 4, torch.float16)
    got = ALGORITHMS[name](q, k, v, BlockSizes(4, 64), 0.1)
    assert got.dtype == torch.float16
    close(got, exact(q, k, v, 0.1), atol=2e-4)
    stuck = torch.tensor(2048.0, dtype=torch.float16)
    assert stuck + 1 == stuck


# ---- FlashAttention, Algorithm 1 -----------------------------------------------------------------------


@pytest.mark.parametrize("sram, head_dim, expected", [
    (1024, 64, (4, 4)), (4096, 16, (16, 64)), (100_000, 64, (64, 391)), (1000, 3, (3, 84)),
])  # fmt: skip
def test_block_sizes_in_the_order_of_the_paper(sram, head_dim, expected):
    """B_c = ceil(M / 4d) keys, B_r = min(B_c, d) queries; exchanged they break S <= M /
    4."""
    sizes = block_sizes(sram, head_dim)
    assert tuple(sizes) == expected
    assert (sizes.block_n, sizes.block_m) == (math.ceil(sram / 4 / head_dim), min(sizes.block_n, head_dim))


@given(st.integers(1, 200), st.integers(1, 200_000))
def test_half_of_the_fast_memory_for_k_and_v(head_dim, sram):
    """K_j and V_j take half, Q_i and O_i at most the other half, the scores at most a
    quarter."""
    use = sram_use(block_sizes(sram, head_dim), head_dim)
    rounding = 4 * head_dim  # ceil() may take one row more than M / 4d in each of the two halves
    assert sram / 2 <= use["k, v"] < sram / 2 + rounding
    assert use["q, o"] <= use["k, v"]
    assert use["scores"] < sram / 4 + rounding


def test_tile_of_the_example_with_25_tokens():
    """Blocks of 5; key block 3 with query block 2 is keys 11-15 with queries 6-10, from 1."""
    cut = blocks(25, 5)
    assert [(s.start + 1, s.stop) for s in (cut[3 - 1], cut[2 - 1])] == [(11, 15), (6, 10)]
    q, k, v = random_qkv(25, 25)
    tiles = {}
    flash_attention_1(q, k, v, BlockSizes(5, 5), observe=lambda s: tiles.update({(s.n_block, s.m_block): s}))
    maximum = (q[5:10] @ k[:15].T).amax(dim=1, keepdim=True)
    close(tiles[3 - 1, 2 - 1].row_max, maximum)


def test_key_blocks_run_outside():
    """For every key block all query blocks; FlashAttention-2 has it the other way
    round."""
    q, k, v = random_qkv(6, 6)
    order = {name: [] for name in ("flash1", "flash2")}
    for name, seen in order.items():
        ALGORITHMS_WITH_OBSERVER[name](q, k, v, BlockSizes(3, 2), observe=lambda s, seen=seen: seen.append(
            (s.n_block, s.m_block)))  # fmt: skip
    assert order["flash1"] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert order["flash2"] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


ALGORITHMS_WITH_OBSERVER = {"flash1": flash_attention_1, "flash2": flash_attention_2}


@pytest.mark.parametrize("name", ALGORITHMS_WITH_OBSERVER)
@settings(max_examples=40)
@given(seqlens=st.tuples(*[st.integers(1, 12)] * 2), sizes=st.tuples(*[st.integers(1, 5)] * 2))
def test_after_j_blocks_the_state_is_that_of_the_prefix(name, seqlens, sizes):
    """The induction over key blocks, checked at every
    step."""
    q, k, v = random_qkv(*seqlens)
    steps = []
    ALGORITHMS_WITH_OBSERVER[name](q, k, v, BlockSizes(*sizes), 0.8, observe=steps.append)
    m_blocks, n_blocks = (blocks(length, size) for length, size in zip(seqlens, sizes, strict=True))
    assert len(steps) == len(m_blocks) * len(n_blocks)
    for step in steps:
        rows, prefix = m_blocks[step.m_block], n_blocks[step.n_block].stop
        scores = q[rows] @ k[:prefix].T * 0.8
        close(step.row_max, scores.amax(dim=1, keepdim=True))
        close(step.row_sum, torch.exp(scores - step.row_max).sum(dim=1, keepdim=True))
        close(step.out, scores.softmax(dim=1) @ v[:prefix])


def two_block_state():
    """Exact output, scores, values and statistics of 4 rows over two key blocks; both move the maximum."""
    torch.manual_seed(0)
    q, k, v = random_qkv(4, 6)
    scores = [q @ k[:3].T, q @ k[3:].T]
    m1 = scores[0].amax(1, keepdim=True)
    m2 = torch.maximum(m1, scores[1].amax(1, keepdim=True))
    l1 = torch.exp(scores[0] - m1).sum(1, keepdim=True)
    l2 = torch.exp(m1 - m2) * l1 + torch.exp(scores[1] - m2).sum(1, keepdim=True)
    assert (m2 > m1).any() and (m2 == m1).any()
    return exact(q, k, v), scores, (v[:3], v[3:]), (m1, m2), (l1, l2)


def test_two_blocks_with_the_update_of_each_version():
    """Normalised every time, or once at the end."""
    expected, scores, values, (m1, m2), (l1, l2) = two_block_state()
    new = torch.exp(scores[1] - m2) @ values[1]
    out_1 = torch.exp(scores[0] - m1) @ values[0] / l1
    close((l1 * torch.exp(m1 - m2) * out_1 + new) / l2, expected)
    unnormalised = torch.exp(scores[0] - m1) @ values[0]
    close((torch.exp(m1 - m2) * unnormalised + new) / l2, expected)
    lse = [s.logsumexp(1)[None, None] for s in scores]
    parts = [(s.softmax(1) @ x)[None, :, None] for s, x in zip(scores, values, strict=True)]
    close(merge_attention_states(parts[0], lse[0], parts[1], lse[1])[0][0, :, 0], expected)


def test_the_rescale_factor_is_not_inverted():
    """l1 e^(m1 - m2) / l2. Printed inverted and without the exponential it misses by far.

    In exp(S - m) the minus sign counts.
    """
    expected, scores, values, (m1, m2), (l1, l2) = two_block_state()
    out_1 = torch.exp(scores[0] - m1) @ values[0] / l1
    new = torch.exp(scores[1] - m2) @ values[1] / l2
    close(l1 * torch.exp(m1 - m2) / l2 * out_1 + new, expected)
    assert ((l1 / l2) ** -1 * out_1 + new - expected).abs().max() > 0.1
    assert (l1 / l2 * out_1 + new - expected).abs().max() > 1e-3
    assert not torch.allclose(torch.exp(scores[0] * m1), torch.exp(scores[0] - m1))


def test_a_diagonal_matrix_from_the_left_scales_rows():
    """And with its inverse."""
    n = torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3)
    scaled = torch.diag(f64(1, 2, 3)) @ n
    assert torch.equal(scaled, torch.stack([1 * n[0], 2 * n[1], 3 * n[2]]))
    assert not torch.equal(scaled, n * f64(1, 2, 3))
    assert torch.equal(normalise(scaled, f64(1, 2, 3)[:, None]), n)


def test_state_starts_empty():
    """O = 0, l = 0, m = -inf, written to memory once, in the accumulation type."""
    memory = Memory()
    array = memory.allocate(3, 2, value=NEG_INF, like=torch.empty(0, dtype=torch.bfloat16))
    assert array.dtype == torch.float32 and (array == NEG_INF).all() and memory.written == 6
    q, k, v = random_qkv(3, 0)
    close(flash_attention_1(q, k, v, BlockSizes(2, 2)), torch.zeros(3, 4))
    out, lse = flash_attention_2(q, k, v, BlockSizes(2, 2))
    assert (out == 0).all() and (lse == NEG_INF).all()


def test_chip_works_on_copies():
    """Changing a loaded block must not reach memory without a counted store."""
    memory, array = Memory(), torch.zeros(4, 2)
    memory.load(array, slice(0, 2)).add_(1)
    assert (array == 0).all() and memory.accesses == 4
    memory.store(torch.ones(1, 2), array, slice(3, 4))
    assert array.sum() == 2 and memory.accesses == 6


# ---- FlashAttention-2 ----------------------------------------------------------------------------------


def test_one_logsumexp_per_row():
    """L = m + log l replaces the pair."""
    q, k, v = random_qkv()
    memory = Memory()
    _, lse = flash_attention_2(q, k, v, BlockSizes(8, 8), 0.3, memory=memory)
    close(lse, torch.logsumexp(q @ k.T * 0.3, dim=1))
    assert memory.written == v.shape[1] * len(q) + len(q)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(16, 16), (30, 30), (5, 40), (40, 5), (23, 17)])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 3), (3, 8), (64, 64)])
def test_causal(seqlen_q, seqlen_k, sizes):
    """Key j is hidden from row i for j > i + seqlen_k - seqlen_q; rows without keys are 0."""
    q, k, v = random_qkv(seqlen_q, seqlen_k)
    mask = torch.ones(seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q).bool()
    out, lse = flash_attention_2(q, k, v, BlockSizes(*sizes), 0.5, causal=True)
    close(out, exact(q, k, v, 0.5, mask))
    close(lse, torch.logsumexp((q @ k.T * 0.5).masked_fill(~mask, NEG_INF), dim=1))


@given(st.integers(0, 9), st.integers(1, 6), st.integers(0, 9), st.integers(1, 6), st.integers(-9, 9))
def test_tile_kinds(first_row, num_rows, first_col, num_cols, offset):
    """No mask where every column is at or before every row, nothing where none is."""
    rows, cols = slice(first_row, first_row + num_rows), slice(first_col, first_col + num_cols)
    visible = causal_mask(rows, cols, offset)
    expected = "full" if visible.all() else "partial" if visible.any() else "skip"
    assert tile_kind(rows, cols, offset) == expected


def test_causal_does_half_the_work_and_masks_one_tile_per_row_of_tiles():
    """136 of 256 tiles, 16 of them masked, so 1.88 times less work."""
    tiles = itertools.product(blocks(2048, 128), blocks(2048, 128))
    kinds = [tile_kind(rows, cols, 0) for rows, cols in tiles]
    assert (kinds.count("full"), kinds.count("partial"), kinds.count("skip")) == (120, 16, 120)
    q, k, v = random_qkv(64, 64)
    reads = []
    for causal in (False, True):
        memory = Memory()
        flash_attention_2(q, k, v, BlockSizes(4, 4), causal=causal, memory=memory)
        reads.append(memory.read - q.numel())
    assert reads[1] * 256 == reads[0] * 136
