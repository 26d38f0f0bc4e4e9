"""The tables that "FlashAttention: principles and code" (https://gsfall.cn/archives/93) prints, made again.

Its inputs are random numbers of torch's CUDA generator with seed 1. That is Philox4x32 with ten rounds and
the transformation of Box and Muller, so a CPU can draw them. The article's puzzle is answered here, too:
with a mask its function and PyTorch seemed to disagree. No table that it prints was made with the mask that
it draws.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.ladder.algorithms import padded_attention
from tests import philox

SHAPE = (1, 2, 10, 3)  # batch, heads, tokens, features
ROUNDING = 5e-5  # of four printed digits


def printed() -> dict[str, Tensor]:
    """Table by name, of SHAPE."""
    text = (Path(__file__).parent / "printed_tables.txt").read_text(encoding="utf-8")
    tables: dict[str, Tensor] = {}
    for part in text.split("# ")[2:]:
        name, _, numbers = part.partition("\n")
        tables[name] = torch.tensor([float(x) for x in numbers.split()], dtype=torch.float64).view(SHAPE)
    return tables


def words(seed: int, call: int, count: int) -> list[Tensor]:
    """Four words for each of ``count`` threads, in the generator's call of that number: curand with the
    thread as its subsequence; every call takes four of it."""
    threads, zero = torch.arange(count), torch.zeros(1, dtype=torch.int64)
    counter = [zero + call, zero, threads, zero]
    drawn = philox.philox(counter, [torch.tensor([seed]), zero], rounds=10)
    return [word.expand(count) for word in drawn]


def cuda_randn(seed: int, call: int, shape: tuple[int, ...]) -> Tensor:
    """torch.randn(..., device="cuda", dtype=torch.float16) where a thread has one element: up to 256
    elements.
    """
    x, y, *_ = words(seed, call, math.prod(shape))
    u = (x.float() * 2**-32 + 2**-33).double()
    v = (y.float() * (2**-32 * 2 * math.pi) + 2**-32 * math.pi).double()
    return ((-2 * u.log()).sqrt() * v.sin()).half().view(shape)


def cuda_randint_of_two(seed: int, call: int, shape: tuple[int, ...]) -> Tensor:
    """torch.randint(0, 2, ..., device="cuda")."""
    return (words(seed, call, math.prod(shape))[0] % 2).view(shape)


def article_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the mask, drawn one after the other."""
    q, k, v = (cuda_randn(1, call, SHAPE) for call in range(3))
    return q, k, v, cuda_randint_of_two(1, 3, (1, 10))


def article_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The article's function: everything in half precision, 1e-6 added to the sum of every block, blocks of
    three queries and four keys."""
    blocks = []
    for q_i in q.split(3, dim=-2):
        out, row_max, row_sum = torch.zeros_like(q_i), q_i[..., :1] * 0 - math.inf, q_i[..., :1] * 0
        for k_j, v_j in zip(k.split(4, dim=-2), v.split(4, dim=-2), strict=True):
            scores = q_i @ k_j.mT / q.shape[-1] ** 0.5
            block_max = scores.amax(-1, keepdim=True)
            exps = torch.exp(scores - block_max)
            block_sum = exps.sum(-1, keepdim=True) + 1e-6
            new_max = torch.maximum(row_max, block_max)
            old, new = torch.exp(row_max - new_max), torch.exp(block_max - new_max)
            new_sum = old * row_sum + new * block_sum
            out = (row_sum * old * out + new * (exps @ v_j)) / new_sum
            row_max, row_sum = new_max, new_sum
        blocks.append(out)
    return torch.cat(blocks, dim=-2)


def exact(mask: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """Float64 attention of the article's inputs; hidden where mask is 0, or with ``added`` on the scores."""
    q, k, v = (x.double() for x in article_inputs()[:3])
    scores = q @ k.mT * 3**-0.5
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -math.inf)
    if added is not None:
        scores = scores + added[:, None, None, :].double()
    return scores.softmax(-1) @ v


def apart(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


@pytest.mark.parametrize("name, limit", [("math", 2e-4), ("flash", 3.5e-4), ("own", 1.4e-3)])
def test_every_printed_table_is_attention_of_these_inputs(name: str, limit: float) -> None:
    """Within the rounding of float16: the article's function adds the errors of statistics in half
    precision.
    """
    assert apart(printed()[name], exact()) < limit + ROUNDING


def test_pytorch_prints_its_table() -> None:
    q, k, v, _ = article_inputs()
    with sdpa_kernel(SDPBackend.MATH):
        assert apart(F.scaled_dot_product_attention(q, k, v), printed()["math"]) < 3e-4


def test_the_function_of_the_article_prints_its_table() -> None:
    """Number by number: what is left is the order of sums on a GPU."""
    q, k, v, _ = article_inputs()
    got = article_function(q, k, v)
    assert apart(got, printed()["own"]) < 6e-4
    assert apart(got, printed()["own"]) < apart(exact(), printed()["own"])


def test_float32_statistics_bring_it_nearer() -> None:
    q, k, v, _ = article_inputs()
    assert apart(padded_attention(q, k, v), exact()) < apart(article_function(q, k, v), exact()) / 2


def test_no_printed_table_used_the_mask() -> None:
    """Hidden keys or added ones and zeros would each show a hundred times over."""
    mask = article_inputs()[3]
    assert mask.tolist() == [[1, 0, 0, 1, 0, 0, 0, 1, 0, 1]]
    for name, table in printed().items():
        assert apart(table, exact(mask=mask)) > 1, name
        assert apart(table, exact(added=mask)) > 0.4, name


def test_why_the_mask_seemed_to_change_nothing() -> None:
    """A float mask is added to scores, so 1 hides no key: it multiplies its weight by e. All ones change
    nothing. Bool hides."""
    q, k, v, mask = article_inputs()
    with sdpa_kernel(SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(q, k, v)
        added = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.half()[:, None, None, :])
        ones = F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones_like(mask).half()[:, None, None, :]
        )
        hidden = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool()[:, None, None, :])
    assert apart(ones, plain) < 1e-3
    assert apart(added, exact(added=mask)) < 2e-3
    assert apart(hidden, exact(mask=mask)) < 2e-3
    assert apart(padded_attention(q, k, v, mask.bool()), exact(mask=mask)) < 2e-3
