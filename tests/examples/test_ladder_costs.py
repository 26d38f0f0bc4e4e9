"""The rest of the ladder: one program per query block, the padding mask, and what each algorithm costs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.ladder import algorithms
from examples.ladder.algorithms import (
    BlockSizes,
    Memory,
    blocks,
    decode_program,
    flash_attention_1,
    grid_attention,
    grid_size,
    padded_attention,
)
from examples.ladder.costs import attention_memory, io_complexity, kernel_bytes, measured_accesses
from tests.examples.test_ladder import close, exact, random_qkv

# ---- the grid ------------------------------------------------------------------------------------------


def test_decode_example():
    """Seqlen 256, block 64, batch 2, 4 heads: 32 programs, number 10 is batch 0, head 2, block 2."""
    assert grid_size(2, 4, 256, 64) == 32
    assert decode_program(10, 4, 256, 64) == (0, 2, 2)


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 20), st.integers(1, 8))
def test_every_query_block_has_one_program(batch, num_heads, seqlen_q, block_m):
    grid = range(grid_size(batch, num_heads, seqlen_q, block_m))
    places = [decode_program(pid, num_heads, seqlen_q, block_m) for pid in grid]
    num_m_blocks = len(blocks(seqlen_q, block_m))
    assert places == list(itertools.product(range(batch), range(num_heads), range(num_m_blocks)))


def test_grid_over_batches_and_heads_of_any_strides():
    """(batch, seqlen, num_heads, head_dim) memory seen as (batch, num_heads, seqlen,
    head_dim)."""
    q, k, v = (torch.randn(2, n, 3, 5, dtype=torch.float64).transpose(1, 2) for n in (11, 14, 14))
    close(grid_attention(q, k, v, 4, 4, 0.6), exact(q, k, v, 0.6))


def test_columns_beyond_the_end_weigh_nothing():
    """With all scores -5 a zero column would outweigh every real one, and none is read."""
    q, k, v = torch.full((1, 1, 3, 1), -5.0), torch.ones(1, 1, 5, 1), torch.ones(1, 1, 5, 1)
    memory = Memory()
    close(grid_attention(q, k, v, 2, 4, memory=memory), torch.ones(1, 1, 3, 1))
    assert memory.read == 3 + 2 * (5 + 5)  # q once; k and v once per query block; nothing beyond row 5


def test_tile_products_take_one_dtype():
    """P is converted before the second product, and sums stay in float32."""
    with pytest.raises(TypeError, match="float32 and torch.float16"):
        algorithms._product(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float16))
    q, k, v = (x[None, None] for x in random_qkv(20, 70, 8, 8, torch.float16))
    got = grid_attention(q, k, v, 8, 16, 0.3)
    assert got.dtype == torch.float16
    close(got, exact(q, k, v, 0.3), atol=1e-3)


# ---- the padding mask of the article's PyTorch function ------------------------------------------------


def padded_case(batch, num_heads, seqlen=10, head_dim=3, dtype=torch.float64):
    q, k, v = (torch.randn(batch, num_heads, seqlen, head_dim).to(dtype) for _ in range(3))
    return q, k, v, torch.rand(batch, seqlen) < 0.5


def assert_padded(q, k, v, mask, atol=1e-12):
    wide = None if mask is None else mask[:, None, None, :].expand(-1, q.shape[1], q.shape[2], -1)
    got = padded_attention(q, k, v, mask)
    assert got.dtype == q.dtype
    close(got, exact(q, k, v, q.shape[3] ** -0.5, wide), atol)


@pytest.mark.parametrize("batch, num_heads", [(1, 2), (2, 2), (3, 2), (2, 1), (2, 3)])
def test_padding_mask_belongs_to_the_batch_entry(batch, num_heads):
    """Spread as (B, 1, B_c) it met (B, H, B_r, B_c) by head for B = H and not at all for other B >
    1."""
    assert_padded(*padded_case(batch, num_heads))


def test_padding_mask_is_optional():
    q, k, v, _ = padded_case(2, 2)
    assert_padded(q, k, v, None)


@pytest.mark.parametrize("hidden", [slice(0, 4), slice(4, 8), slice(8, 10), slice(0, 8), slice(0, 10)])
def test_blocks_without_a_visible_key(hidden):
    """First, middle, last, all but the last, and every block of 4 keys hidden; no NaN, 0 if all."""
    q, k, v, _ = padded_case(2, 2)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, hidden] = False
    assert_padded(q, k, v, mask)


def test_no_epsilon_in_the_denominator():
    """1e-6 per block would show as an error of about as much in float64."""
    q, k, v, mask = padded_case(1, 2, seqlen=64)
    mask[:, 0] = True
    assert_padded(q, k, v, mask, atol=1e-14)


def test_padding_mask_must_be_boolean_and_fit():
    """A mask of 0.0 and 1.0 would be added to scores by others and hide nothing."""
    q, k, v, mask = padded_case(2, 2)
    with pytest.raises(TypeError, match="bool"):
        padded_attention(q, k, v, mask.half())
    with pytest.raises(ValueError, match=r"\(2, 10\)"):
        padded_attention(q, k, v, mask[:, :9])


def test_the_configuration_of_the_article():
    """Seed 1, 2 heads, 10 tokens, head_dim 3, float16, blocks of 4."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 10, 3, dtype=torch.float16) for _ in range(3))
    ours = padded_attention(q, k, v)
    assert ours.dtype == q.dtype
    backends = torch.nn.attention.SDPBackend
    theirs = {}
    for backend in (backends.MATH, backends.FLASH_ATTENTION):
        with torch.nn.attention.sdpa_kernel(backend):
            theirs[backend] = F.scaled_dot_product_attention(q, k, v)
    close(theirs[backends.MATH], theirs[backends.FLASH_ATTENTION], atol=1e-3)
    close(ours, theirs[backends.MATH], atol=1.2e-3)
    close(ours, exact(q, k, v, 3**-0.5), atol=5e-4)


# ---- costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen, per_head, of_16_heads", [
    (1024, "2 MB", "32 MB"), (4096, "32 MB", "512 MB"), (8192, "128 MB", "2 GB"), (32768, "2 GB", "32 GB"),
])  # fmt: skip
def test_memory_of_the_score_matrix(seqlen, per_head, of_16_heads):
    def in_bytes(text: str) -> int:
        number, unit = text.split()
        return int(number) * 2 ** {"MB": 20, "GB": 30}[unit]

    assert attention_memory(seqlen, seqlen).scores == in_bytes(per_head)
    assert attention_memory(seqlen, seqlen, num_heads=16).scores == in_bytes(of_16_heads)
    assert attention_memory(seqlen, seqlen, num_heads=16).flash == 16 * 4 * seqlen


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2"])
@pytest.mark.parametrize("size", [(64, 8, 256), (100, 8, 300), (96, 16, 4096), (33, 5, 1000)], ids=str)
def test_measured_accesses_are_the_closed_form(algorithm, size):
    """What the algorithms move, element by element, ragged blocks included."""
    assert measured_accesses(algorithm, *size) == io_complexity(algorithm, *size)


def test_key_blocks_are_read_once_and_the_rest_once_per_key_block():
    """T_c passes over Q, O, l and m; O, l and m are also written each time."""
    q, k, v = random_qkv(24, 20, 5, 5)
    memory = Memory()
    flash_attention_1(q, k, v, BlockSizes(6, 4), memory=memory)
    num_n_blocks = 5
    assert memory.read == k.numel() + v.numel() + num_n_blocks * (2 * q.numel() + 2 * len(q))
    assert memory.written == (num_n_blocks + 1) * (q.numel() + 2 * len(q))


def test_theorem_2_by_measurement():
    """Standard attention moves N d + N^2 elements to a constant, FlashAttention
    N^2 d^2 / M; with M well above d^2 the second is the smaller."""
    head_dim, sram = 8, 512
    lengths = (64, 128, 256, 512)
    standard = [measured_accesses("standard", n, head_dim, sram) for n in lengths]
    flash = [measured_accesses("flash1", n, head_dim, sram) for n in lengths]
    assert all(moved == 4 * (n * head_dim + n * n) for n, moved in zip(lengths, standard, strict=True))
    constants = [moved * sram / (n * head_dim) ** 2 for n, moved in zip(lengths, flash, strict=True)]
    assert max(constants) / min(constants) < 1.2, constants
    # Four times the length is sixteen times the traffic, for both.
    assert standard[-1] / standard[1] == pytest.approx(16, rel=0.1)
    assert flash[-1] / flash[1] == pytest.approx(16, rel=0.1)
    # Twice the fast memory is half the traffic, for FlashAttention.
    twice = measured_accesses("flash1", 512, head_dim, 2 * sram)
    assert flash[-1] / twice == pytest.approx(2, rel=0.1)


def test_flash_wins_when_the_fast_memory_is_large():
    """d^2 / M against 1, at the sizes of an A100 (d = 64, 100 KB of half precision)."""
    for seqlen in (1024, 4096):
        standard = io_complexity("standard", seqlen, 64, 50_000)
        assert io_complexity("flash1", seqlen, 64, 50_000) < standard / 3
        assert io_complexity("flash2", seqlen, 64, 50_000) < standard / 1.5


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(64, 64), (50, 77), (16, 9)])
def test_bytes_of_the_kernels_are_what_the_algorithms_move(seqlen_q, seqlen_k):
    """Element for element: 2 bytes for q, k, v and out, 4 for what is between blocks. The first pass of the
    kernel reads no state, the last stores no accumulator."""
    d, sizes = 8, BlockSizes(12, 20)
    q, k, v = random_qkv(seqlen_q, seqlen_k, d, d)
    memory = Memory()
    algorithms.flash_attention_2(q, k, v, sizes, memory=memory)
    moved = kernel_bytes("flash2", seqlen_q, seqlen_k, d, sizes)
    assert moved == 2 * memory.accesses + 2 * seqlen_q  # lse has twice the bytes
    memory, passes = Memory(), len(blocks(seqlen_k, sizes.block_n))
    flash_attention_1(q, k, v, sizes, memory=memory)
    wide = passes * 2 * seqlen_q * (d + 2) + seqlen_q * (d + 2)  # in and out in each pass, and the beginning
    narrow = memory.accesses - wide
    state = 4 * seqlen_q * (d + 2)
    expected = 2 * narrow + passes * 2 * state - state - 4 * seqlen_q * d + 2 * seqlen_q * d
    assert kernel_bytes("flash1", seqlen_q, seqlen_k, d, sizes) == expected
    memory = Memory()
    algorithms.standard_attention(q, k, v, memory=memory)
    assert kernel_bytes("standard", seqlen_q, seqlen_k, d, None) == 2 * memory.accesses


def test_bytes_need_tiles_and_a_known_algorithm():
    with pytest.raises(ValueError, match="tiles"):
        kernel_bytes("flash1", 8, 8, 8, None)
    with pytest.raises(ValueError, match='"flash1"'):
        kernel_bytes("flash3", 8, 8, 8, BlockSizes(4, 4))


@pytest.mark.parametrize("function", [io_complexity, measured_accesses])
def test_unknown_algorithm(function):
    with pytest.raises(ValueError, match='"flash1"'):
        function("flash3", 8, 4, 64)
