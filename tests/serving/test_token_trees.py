"""Trees of new tokens over caches: against float64 with the mask written out, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext import attention, attention_varlen, masks, serving
from flash_ext.masks import TokenTree
from tests.graphs import capture
from tests.pages import Cache, close, make_cache, packed_queries, run
from tests.qkv import dtype_on, on_devices
from tests.serving.asked import ask, call, of_trees, over_keys, parents_of, path, shown_by, words_of


@on_devices
def test_any_bits_do_and_causal_is_replaced(device: str) -> None:
    """Rows may see nothing of the tree, not even themselves, and what is behind them."""
    counts, lengths = [5, 20], [5, 90]
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, 4, 64, device, dtype_on(device))
    trees = [torch.rand(n, n) < 0.4 for n in counts]
    trees[0][2] = False
    asked = of_trees(trees, words_of(trees, 0, device))
    for given in ({}, {"causal": True}, {"window_size": (-1, 0)}):
        out, lse = run(q, bounds, cache, **asked.options, **given)
        asked.check(out, lse, each, cache.rows, bounds.tolist())
    assert not out[2].any()


@on_devices
def test_a_chain_is_causal(device: str) -> None:
    counts, lengths = [6, 6, 6], [6, 50, 300]
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    q, bounds, _ = packed_queries(counts, 4, 64, device, dtype_on(device))
    chain = TokenTree.from_parents(torch.arange(-1, 5, device=device)[None])  # one for all sequences
    got = attention_varlen(q, cache.k, cache.v, bounds, None, mask=chain, **cache.places)
    want = attention_varlen(q, cache.k, cache.v, bounds, None, causal=True, **cache.places)
    close(got, want.double())


@on_devices
def test_appended_trees(device: str) -> None:
    """The keys of the tree are written in the same call, behind those that there are."""
    n, like = 5, {"device": device, "dtype": dtype_on(device)}
    cache = make_cache([20, 33], 16, 2, 64, None, device, dtype_on(device), spare=2)
    cache.table[0, 2:], cache.table[1, 3:] = cache.k.shape[0] - 1, cache.k.shape[0] - 2
    q, (k, v) = torch.randn(2, n, 4, 64, **like), torch.randn(2, 2, n, 2, 64, **like)
    asked = ask("tree", [n, n], [20 + n, 33 + n], 4, device)
    out, lse = serving.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cache_seqlens=cache.lengths, page_table=cache.table,
        mask=TokenTree(asked.options["mask"].words.view(2, n)), return_softmax_lse=True,
    )  # fmt: skip
    rows = [
        (torch.cat([k_own, k[b]]), torch.cat([v_own, v[b]])) for b, (k_own, v_own) in enumerate(cache.rows)
    ]
    asked.check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), list(q), rows, [0, n])


@on_devices
def test_trees_behind_a_shared_prefix(device: str) -> None:
    counts = [3, 9, 1]
    cache = make_cache([100, 3, 30, 5], 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, 4, 64, device, dtype_on(device), outside=1)
    asked = ask("tree", counts, [103, 130, 105], 4, device, outside=1)
    out, lse = serving.attention_shared_prefix(
        q, cache.k, cache.v, bounds, shared_block_table=cache.table[0], shared_prefix_len=100,
        block_table=cache.table[1:], seqused_k=cache.lengths[1:], **asked.options,
    )  # fmt: skip
    rows = [tuple(torch.cat(both) for both in zip(cache.rows[0], own)) for own in cache.rows[1:]]
    asked.check(out, lse, each, rows, bounds.tolist())


# ---- the value ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 17, 63, 64])
def test_ways_to_say_a_tree(n: int) -> None:
    several = [parents_of(n) for _ in range(3)]
    several[0] = list(range(-1, n - 1))  # as deep as can be
    shown = torch.stack([shown_by(parents) for parents in several])
    tree = TokenTree.from_bool(shown)
    assert tree.words.shape == (3, n) and tree.words.dtype == torch.int64
    assert torch.equal(TokenTree.from_parents(torch.tensor(several)).words, tree.words)
    assert torch.equal(TokenTree.from_bool(shown[1]).words, tree.words[1])
    for row in range(n):
        assert int(tree.words[1, row]) % 2**64 == sum(2**key for key in path(several[1], row))
    # In any order, and with any number for no parent.
    order = torch.randperm(n)
    place = order.argsort()
    moved = torch.tensor([place[several[1][i]] if several[1][i] >= 0 else n + 5 for i in order.tolist()])
    assert torch.equal(
        TokenTree.from_parents(moved).words, TokenTree.from_bool(shown[1][order][:, order]).words
    )


def test_it_is_written_out() -> None:
    shown = torch.stack([shown_by(parents_of(4)) for _ in range(2)])
    tree = TokenTree.from_bool(shown)
    assert repr(tree) == "TokenTree(words=int64 (2, 4) cpu)"
    for keys in (2, 4, 9):
        want = torch.stack([over_keys(own, keys) for own in shown])[:, None]
        assert torch.equal(tree.to_dense(4, keys), want)
    bounds, bounds_k = torch.tensor([0, 4, 8]), torch.tensor([0, 5, 9])
    want = torch.zeros(8, 9, dtype=torch.bool)
    want[:4, :5], want[4:, 5:] = over_keys(shown[0], 5), shown[1]
    for words in (tree.words, tree.words.flatten()):
        got = TokenTree(words).to_dense(8, 9, cu_seqlens_q=bounds, cu_seqlens_k=bounds_k)
        assert torch.equal(got[0, 0], want)


def test_contiguous_calls_take_it_as_blocks() -> None:
    """There no kernel knows trees, and the refusal says what does."""
    tree = TokenTree.from_parents(torch.tensor([-1, 0, 0]))
    q, (k, v) = torch.randn(1, 3, 2, 8), torch.randn(2, 1, 5, 2, 8)
    with pytest.raises(
        ValueError, match=r"TokenTree is for attention over a cache alone.*BlockMask.from_mask"
    ):
        attention(q, k, v, mask=tree)
    with pytest.raises(ValueError, match="TokenTree is for attention over a cache alone"):
        attention(q, k, v, mask=masks.Causal() & tree)
    out = attention(q, k, v, mask=masks.BlockMask.from_mask(tree, 3, 5))
    close(out, attention(q, k, v, mask=tree.to_dense(3, 5)).double())


# ---- what is refused ------------------------------------------------------------------------------------


def small() -> tuple[Tensor, Tensor, Cache]:
    cache = make_cache([40, 9], 8)
    q, bounds, _ = packed_queries([3, 3], 4, 64, "cpu", torch.float32)
    return q, bounds, cache


def test_what_is_refused() -> None:
    q, bounds, cache = small()
    call = (q, cache.k, cache.v, bounds, None)
    tree = TokenTree(torch.zeros(6, dtype=torch.int64))
    for given, error, words in (
        ({"window_size": (5, 0)}, NotImplementedError, r"no window beside it, got window_size \(5, 0\)"),
        ({"bias": masks.ALiBi(torch.ones(4))}, NotImplementedError, "no ALiBi beside it"),
        ({"mask": tree & masks.Causal()}, NotImplementedError, r"mask=TokenTree\(words\) stands by itself"),
        ({"mask": TokenTree(tree.words[:5])}, ValueError, r"words must have shape \(total_q,\) = \(6,\)"),
        ({"mask": TokenTree(tree.words.view(3, 2))}, ValueError, r"of 2 sequences has n rows, got \(3, 2\)"),
    ):
        with pytest.raises(error, match=words):
            attention_varlen(*call, **{"mask": tree, **given}, **cache.places)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        attention_varlen(q.clone().requires_grad_(), *call[1:], mask=tree, **cache.places)
    long = make_cache([70], 8)
    many, one, _ = packed_queries([65], 4, 64, "cpu", torch.float32)
    with pytest.raises(ValueError, match="at most 64 tokens a sequence, a bit for each, got 65 rows"):
        attention_varlen(
            many, long.k, long.v, one, None, mask=TokenTree(torch.zeros(65).long()), **long.places
        )
    operator = torch.ops.flash_ext.fwd_cached
    rest = (*call[1:], cache.lengths, cache.table, 0, 0, 0.125)
    for window, slopes in (((-1, 0), None), ((-1, -1), torch.ones(4))):
        with pytest.raises(NotImplementedError, match="a tree takes the place of causal"):
            operator(q, *rest, *window, slopes, None, 0.0, None, True, tree.words)
    with pytest.raises(TypeError, match="tree must be torch.int64, got torch.int32"):
        operator(q, *rest, -1, -1, None, None, 0.0, None, True, tree.words.int())
    with pytest.raises(ValueError, match=r"tree must have shape \(6\), got \(5,\)"):
        operator(q, *rest, -1, -1, None, None, 0.0, None, True, tree.words[:5])
    with pytest.raises(ValueError, match="a tree has at most 64 new tokens a sequence, got 65"):
        dense = (many[None], *long.rows[0])
        operator(
            dense[0], dense[1][None], dense[2][None], None, None, None, None, 0, 0, 0.125, -1, -1, None, None,
            0.0, None, True, torch.zeros(1, 65).long(),
        )  # fmt: skip


def test_what_the_functions_of_engines_refuse() -> None:
    q, _, cache = small()
    dense = (q.view(2, 3, 4, 64), cache.k, cache.v)
    factors = {"rotary_cos": torch.ones(99, 32), "rotary_sin": torch.ones(99, 32)}
    tree = TokenTree(torch.zeros(2, 3, dtype=torch.int64))
    places = {"cache_seqlens": cache.lengths, "page_table": cache.table}
    with pytest.raises(NotImplementedError, match="not available with rotary factors"):
        serving.flash_attn_with_kvcache(*dense, mask=tree, **factors, **places)
    packed = (q, cache.k, cache.v, torch.tensor([0, 3, 6], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="mask must be a masks.TokenTree or None here, got Causal"):
        serving.attention_shared_prefix(
            *packed, shared_block_table=cache.table[0, :2], shared_prefix_len=16, mask=masks.Causal(),
            **cache.places,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"\(batch, q_len\) = \(2, 3\), where batch may be 1 or left out"):
        serving.flash_attn_with_kvcache(*dense, mask=TokenTree(tree.words[:, :2]), **places)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: TokenTree([1]), TypeError, "words must be a torch.Tensor, got list"),
    (lambda: TokenTree(torch.ones(3).int()), TypeError, "words must be torch.int64, got int32"),
    (lambda: TokenTree(torch.ones(2, 2) > 0), TypeError, "A bool tensor goes into TokenTree.from_bool"),
    (lambda: TokenTree(torch.ones(1, 2, 2).long()), ValueError, r"got \(1, 2, 2\)"),
    (lambda: TokenTree(torch.ones(2, 65).long()), ValueError, r"at most 64 .* got shape \(2, 65\)"),
    (lambda: TokenTree.from_bool(torch.ones(2, 2)), TypeError, "shown must be torch.bool"),
    (lambda: TokenTree.from_bool(torch.ones(2, 3) > 0), ValueError, r"\(n, n\), got \(2, 3\)"),
    (lambda: TokenTree.from_bool(torch.ones(65, 65) > 0), ValueError, "at most 64 tokens"),
    (lambda: TokenTree.from_parents(torch.ones(2)), TypeError, "parents must be torch.int32 or"),
    (lambda: TokenTree.from_parents(torch.ones(65).long()), ValueError, "at most 64 tokens"),
]


@pytest.mark.parametrize(("make", "error", "words"), WRONG)
def test_words_that_are_none(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


# ---- on a GPU -------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_a_graph_follows_words_and_lengths() -> None:
    like = {"device": "cuda", "dtype": torch.bfloat16}
    counts = [6, 20]
    cache = make_cache([300, 90], 16, 2, 64, None, **like)
    q, bounds, each = packed_queries(counts, 8, 64, **like)
    words = words_of([shown_by(parents_of(n)) for n in counts], 0, "cuda")

    graph, (out, lse) = capture(lambda: run(q, bounds, cache, mask=TokenTree(words), max_seqlen_q=20))
    for lengths in ([300, 90], [64, 20], [7, 5], [0, 33]):
        trees = [torch.rand(n, n) < 0.5 for n in counts]
        words.copy_(words_of(trees, 0, "cuda"))
        cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        rows = [tuple(x[:n] for x in own) for own, n in zip(cache.rows, lengths)]
        of_trees(trees, words).check(out, lse, each, rows, bounds.tolist())


@pytest.mark.gpu
def test_gpu_rows_behind_the_64th_key_of_a_tree_stay_inside() -> None:
    """Nobody looks at lengths there: of more queries than a word has bits, the keys behind it are hidden."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    cache = make_cache([130], 16, 1, 64, None, **like)
    q, bounds, each = packed_queries([100], 2, 64, **like)
    shown = torch.ones(100, 100, dtype=torch.bool)
    shown[:, 64:] = False
    call(q, cache, bounds, of_trees([shown], torch.full((100,), -1, device="cuda")), each)
