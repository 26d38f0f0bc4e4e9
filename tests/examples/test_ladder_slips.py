"""What articles about FlashAttention print and what is right: docs/articles.md lists these with their tests.

Slips that other files test are named there with their tests.
"""

from __future__ import annotations

import math

import pytest
import torch

from examples.ladder.algorithms import (
    BlockSizes,
    block_sizes,
    blocks,
    flash_attention_1,
    flash_attention_2,
    padded_attention,
    softmax_3pass,
    sram_use,
)
from tests.examples.test_ladder import close, exact, f64, random_qkv


def test_one_numerator_cannot_stand_for_all() -> None:
    """softmax(1, 2, 300) with e^1 in all three numerators does not sum to 1."""
    powers = torch.exp(f64(1, 2, 300))
    printed = torch.exp(f64(1, 1, 1)) / powers.sum()
    assert printed.sum() < 1e-100
    close(powers / powers.sum(), softmax_3pass(f64(1, 2, 300)))


def test_the_maximum_is_subtracted_for_the_range_not_for_precision() -> None:
    """Neighbours of float32 are apart by the same share of a number, whether it lies in 0..1 or not."""
    for value in (2.0**-20, 0.75, 1.0, 1000.0, 2.0**100):
        x = torch.tensor(value)
        gap = torch.nextafter(x, torch.tensor(math.inf)) - x
        assert 2**-24 <= (gap / x).item() <= 2**-23
    assert torch.exp(torch.tensor(89.0)).isinf() and torch.exp(torch.tensor(89.0) - 89.0) == 1


def test_a_diagonal_matrix_is_notation() -> None:
    """diag(l) X is a multiplication of rows: d products a row, where a matrix product would take N d."""
    row_factors, x = torch.rand(5, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    assert torch.equal(torch.diag(row_factors) @ x, row_factors[:, None] * x)


@pytest.mark.parametrize("algorithm", [flash_attention_1, flash_attention_2])
def test_keys_have_an_index_of_their_own(algorithm) -> None:
    """K_i, V_i in place of K_j, V_j would show a block of queries nothing but its own block of keys."""
    q, k, v = random_qkv(12, 12)
    found = algorithm(q, k, v, BlockSizes(4, 4))
    found = found[0] if isinstance(found, tuple) else found
    own_block = torch.block_diag(*(torch.ones(4, 4) for _ in range(3))).bool()
    close(found, exact(q, k, v))
    assert (found - exact(q, k, v, mask=own_block)).abs().max() > 0.1


def test_without_the_ceiling_the_last_rows_are_lost() -> None:
    """T_r = |N / B_r| is 2 for 10 rows in blocks of 4."""
    assert 10 // 4 == 2 and [block.stop for block in blocks(10, 4)] == [4, 8, 10]


def test_scores_need_the_transpose() -> None:
    q, k, _ = random_qkv(6, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        q @ k
    assert (q @ k.T).shape == (6, 4)


def test_a_block_of_v_is_rows() -> None:
    """Of its columns there are head_dim, whatever the number of keys."""
    q, k, v = random_qkv(6, 8)
    weights = (q @ k.T).softmax(-1)
    close(sum(weights[:, part] @ v[part] for part in blocks(8, 3)), exact(q, k, v))
    assert v[:, blocks(8, 3)[1]].shape != v[blocks(8, 3)[1]].shape


def test_what_is_divided_by_the_sums_are_weights_not_scores() -> None:
    """diag(l)^-1 exp(S - m) is P; S stands in its place in the printed proof."""
    q, k, _ = random_qkv()
    scores = q @ k.T
    exps = torch.exp(scores - scores.amax(1, keepdim=True))
    weights = exps / exps.sum(1, keepdim=True)
    close(weights, scores.softmax(1))
    assert (weights - scores).abs().max() > 0.1


def test_key_blocks_are_counted_by_the_keys() -> None:
    """T_c from the number of queries would cut 10 keys to 8 for 7 queries, and ask for a third block of two
    for 10 queries of 7 keys. The output has the features of v, not those of q."""
    for seqlen_q, seqlen_k in ((7, 10), (10, 7)):
        q, k = (torch.randn(2, 2, n, 3, dtype=torch.float64) for n in (seqlen_q, seqlen_k))
        v = torch.randn(2, 2, seqlen_k, 6, dtype=torch.float64)
        out = padded_attention(q, k, v)
        assert out.shape == (2, 2, seqlen_q, 6)
        close(out, exact(q, k, v, 3**-0.5))
    assert math.ceil(7 / 4) * 4 < 10 and len(torch.zeros(7).split(4)) < math.ceil(10 / 4)


def test_rounding_blocks_up_makes_them_larger() -> None:
    """ceil(M / 4d) is for a block of at least one row, not so that all fits: by a row a block it may not."""
    sizes = block_sizes(1000, 60)
    assert sizes.block_n == 5 and 1000 / (4 * 60) < 5
    assert sum(sram_use(sizes, 60).values()) > 1000
    assert len(blocks(100, 5)) < 100 / (1000 / (4 * 60))  # fewer blocks, not more


def test_row_statistics_are_returned() -> None:
    """Without them no backward can follow; the article computes and drops them."""
    q, k, v = random_qkv()
    _, lse = flash_attention_2(q, k, v, BlockSizes(8, 8))
    weights = torch.exp(q @ k.T - lse[:, None])
    close(weights.sum(1), torch.ones(len(q)))
    close(weights @ v, exact(q, k, v))


def test_both_comparisons_of_the_update_have_their_exponential() -> None:
    """exp(S m), as an article prints it where the minus sign is lost, is another number."""
    scores, largest = f64(1.0, 2.0), f64(2.0)
    assert not torch.allclose(torch.exp(scores * largest), torch.exp(scores - largest))
