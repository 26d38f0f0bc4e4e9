"""Trees of new tokens over caches: against float64 with the mask written out, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest, attention, attention_varlen, masks, serving
from flash_ext._ops.library import _C
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec, default_scale
from flash_ext.masks import TokenTree
from tests.covering import pairs_on_cpu
from tests.graphs import capture
from tests.pages import PLACES, Cache, attend, close, make_cache, packed_queries
from tests.qkv import dtype_on, null_kernels, on_devices
from tests.reference import attention_reference

LSE = AuxRequest(lse=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(17)
    random.seed(17)


def parents_of(n: int) -> list[int]:
    """A tree in which parents stand before their children, with roots of its own."""
    return [random.randrange(-1, i) for i in range(n)]


def path(parents: list[int], token: int) -> list[int]:
    """A token and its ancestors."""
    found = [token]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def shown_by(parents: list[int]) -> Tensor:
    """bool (n, n), a token at a time."""
    shown = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for token in range(len(parents)):
        shown[token, path(parents, token)] = True
    return shown


def over_keys(shown: Tensor, keys: int) -> Tensor:
    """The same over all keys of a sequence, of which the last ones are the tree's."""
    n = shown.shape[-1]
    whole = torch.ones(n, max(keys, n), dtype=torch.bool, device=shown.device)
    whole[:, max(keys, n) - n :] = shown
    return whole[:, max(keys, n) - keys :]


def check_trees(
    out: Tensor,
    lse: Tensor,
    q: list[Tensor],
    rows: list[tuple[Tensor, Tensor]],
    trees: list[Tensor],
    starts: list[int],
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """Every sequence of a packed call, and zeros where there is none."""
    inside = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
    for own, (k, v), shown, start in zip(q, rows, trees, starts):
        part = slice(start, start + len(own))
        inside[part] = True
        if not len(own):
            continue
        mask = over_keys(shown.to(out.device), len(k))[None, None]
        mods = Modifiers(mask=mask, sinks=sinks, softcap=softcap)
        spec = AttnSpec(default_scale(own.shape[-1]), -1, -1)
        want, want_lse = attention_reference(own[None], k[None], v[None], spec, mods=mods)
        close(out[part], want[0], "out")
        close(lse[:, part], want_lse[0], "lse")
    assert not out[~inside].any() and (lse[:, ~inside] == -torch.inf).all()


def words_of(trees: list[Tensor], outside: int, device: str) -> Tensor:
    """(total_q,) words, those of rows outside of all sequences too."""
    own = [TokenTree.from_bool(shown).words for shown in trees]
    edge = torch.full((outside,), -1)
    return torch.cat([edge, *own, edge]).to(device)


# (query heads, key heads, head_dim, head_dim_v)
HEADS = ((4, 4, 64, 64), (16, 2, 128, 128), (8, 1, 256, 256), (6, 2, 40, 72))


@pairs_on_cpu(heads=HEADS, options=["none", "sinks", "softcap", "both"], page_size=[1, 16, 24])
def test_trees_of_every_size(heads: tuple, options: str, page_size: int, device: str) -> None:
    """Trees of one token to 64, sequences that are all tree, shorter than it, long, and without keys."""
    h, h_k, d, dv = heads
    counts = [1, 7, 0, 64, 16, 33, 5, 2]
    lengths = [300, 7, 20, 700, 9, 1234, 0, 40] if device == "cuda" else [270, 7, 20, 300, 9, 90, 0, 40]
    cache = make_cache(lengths, page_size, h_k, d, dv, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, h, d, device, dtype_on(device), outside=2)
    trees = [shown_by(parents_of(n)) for n in counts]
    given: dict = {}
    if options in ("sinks", "both"):
        given["sinks"] = torch.randn(h, device=device)
    if options in ("softcap", "both"):
        given["softcap"] = 4.0
    mask = TokenTree(words_of(trees, 2, device))
    for bound in (64, None):
        out, aux = attention_varlen(
            q, cache.k, cache.v, bounds, None, mask=mask, max_seqlen_q=bound, return_aux=LSE, **given,
            **cache.places,
        )  # fmt: skip
        check_trees(out, aux.lse, each, cache.rows, trees, bounds.tolist(), **given)


@on_devices
def test_any_bits_do_and_causal_is_replaced(device: str) -> None:
    """Rows may see nothing of the tree, not even themselves, and what is behind them."""
    counts, lengths = [5, 20], [5, 90]
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, 4, 64, device, dtype_on(device))
    trees = [torch.rand(n, n) < 0.4 for n in counts]
    trees[0][2] = False
    mask = TokenTree(words_of(trees, 0, device))
    for given in ({}, {"causal": True}, {"window_size": (-1, 0)}):
        out, aux = attention_varlen(
            q, cache.k, cache.v, bounds, None, mask=mask, return_aux=LSE, **given, **cache.places
        )
        check_trees(out, aux.lse, each, cache.rows, trees, bounds.tolist())
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
@pytest.mark.parametrize("where", PLACES)
def test_trees_wherever_keys_lie(where: str, device: str) -> None:
    """Queries of one length in the function of an engine; packed keys that are cut by a length."""
    n, lengths = 12, [40, 12, 333]
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries([n] * 3, 4, 64, device, dtype_on(device))
    trees = [shown_by(parents_of(n)) for _ in lengths]
    mask = TokenTree.from_bool(torch.stack(trees)).to(device)
    out, lse = attend(where, cache, q, bounds, mask)
    check_trees(out, lse, each, cache.rows, trees, bounds.tolist())


@on_devices
def test_appended_trees(device: str) -> None:
    """The keys of the tree are written in the same call, behind those that there are."""
    n, like = 5, {"device": device, "dtype": dtype_on(device)}
    cache = make_cache([20, 33], 16, 2, 64, None, device, dtype_on(device), spare=2)
    cache.table[0, 2:], cache.table[1, 3:] = cache.k.shape[0] - 1, cache.k.shape[0] - 2
    q, (k, v) = torch.randn(2, n, 4, 64, **like), torch.randn(2, 2, n, 2, 64, **like)
    trees = [shown_by(parents_of(n)) for _ in range(2)]
    out, lse = serving.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cache_seqlens=cache.lengths, page_table=cache.table,
        mask=TokenTree.from_bool(torch.stack(trees)).to(device), return_softmax_lse=True,
    )  # fmt: skip
    rows = [
        (torch.cat([k_own, k[b]]), torch.cat([v_own, v[b]])) for b, (k_own, v_own) in enumerate(cache.rows)
    ]
    check_trees(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), list(q), rows, trees, [0, n])


@on_devices
def test_trees_behind_a_shared_prefix(device: str) -> None:
    counts = [3, 9, 1]
    cache = make_cache([100, 3, 30, 5], 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, 4, 64, device, dtype_on(device), outside=1)
    trees = [shown_by(parents_of(n)) for n in counts]
    out, lse = serving.attention_shared_prefix(
        q, cache.k, cache.v, bounds, shared_block_table=cache.table[0], shared_prefix_len=100,
        block_table=cache.table[1:], seqused_k=cache.lengths[1:], mask=TokenTree(words_of(trees, 1, device)),
    )  # fmt: skip
    rows = [tuple(torch.cat(both) for both in zip(cache.rows[0], own)) for own in cache.rows[1:]]
    check_trees(out, lse, each, rows, trees, bounds.tolist())


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


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: TokenTree([1]), TypeError, "words must be a torch.Tensor, got list"),
        (lambda: TokenTree(torch.ones(3).int()), TypeError, "words must be torch.int64, got int32"),
        (lambda: TokenTree(torch.ones(2, 2) > 0), TypeError, "A bool tensor goes into TokenTree.from_bool"),
        (lambda: TokenTree(torch.ones(1, 2, 2).long()), ValueError, r"got \(1, 2, 2\)"),
        (
            lambda: TokenTree(torch.ones(2, 65).long()),
            ValueError,
            r"at most 64 tokens .* got shape \(2, 65\)",
        ),
        (lambda: TokenTree.from_bool(torch.ones(2, 2)), TypeError, "shown must be torch.bool"),
        (lambda: TokenTree.from_bool(torch.ones(2, 3) > 0), ValueError, r"\(n, n\), got \(2, 3\)"),
        (lambda: TokenTree.from_bool(torch.ones(65, 65) > 0), ValueError, "at most 64 tokens"),
        (lambda: TokenTree.from_parents(torch.ones(2)), TypeError, "parents must be torch.int32 or"),
        (lambda: TokenTree.from_parents(torch.ones(65).long()), ValueError, "at most 64 tokens"),
    ],
)
def test_words_that_are_none(make, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


# ---- the host side --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 20, 64])
def test_trees_of_all_sizes_have_the_kernel_for_few_rows(count: int) -> None:
    k = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16)
    table, lengths = torch.zeros(3, 50).int(), torch.full((3,), 3000).int()
    q, bounds, _ = packed_queries([count] * 3, 8, 64, "cpu", torch.bfloat16)
    tree = TokenTree(torch.zeros(3, count, dtype=torch.int64))
    with null_kernels():
        attention_varlen(
            q, k, k, bounds, None, block_table=table, seqused_k=lengths, max_seqlen_q=count, mask=tree
        )
        found = [one["kernel"] for one in _C.last_launch()["launches"]]
    assert set(found) <= {"fwd_split_cached_mod_sm80_hd64", "fwd_merge_cached_sm80_hd64"}


def test_it_is_traced_as_one_operator() -> None:
    q, bounds, cache = small()
    tree = TokenTree.from_parents(torch.tensor([[-1, 0, 0], [-1, -1, 1]]))
    for dynamic, given in ((False, {}), (True, {"sinks": torch.randn(4)})):
        call = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        options = {"mask": tree, **given, **cache.places}
        traced = call(q, cache.k, cache.v, bounds, None, **options)
        close(traced, attention_varlen(q, cache.k, cache.v, bounds, None, **options).double())
    args = (q, cache.k, cache.v, bounds, None, cache.lengths, cache.table, 0, 0, 0.125, -1, -1, None, None)
    torch.library.opcheck(
        torch.ops.flash_ext.fwd_cached.default, (*args, 0.0, None, True, tree.words.flatten())
    )


# ---- on a GPU -------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_long_caches_in_parts_and_whole() -> None:
    """Several parts of the keys, for the rows of a tile and of several."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    counts, lengths = [4, 60, 31, 1], [9000, 60, 4097, 5000]
    cache = make_cache(lengths, 16, 1, 128, None, **like)
    for heads in (1, 8):
        q, bounds, each = packed_queries(counts, heads, 128, **like)
        trees = [shown_by(parents_of(n)) for n in counts]
        mask = TokenTree(words_of(trees, 0, "cuda"))
        for backend in (None, "kv_splits=1", "kv_splits=7"):
            out, aux = attention_varlen(
                q, cache.k, cache.v, bounds, None, mask=mask, max_seqlen_q=64, backend=backend,
                return_aux=LSE, **cache.places,
            )  # fmt: skip
            check_trees(out, aux.lse, each, cache.rows, trees, bounds.tolist())


@pytest.mark.gpu
def test_gpu_a_graph_follows_words_and_lengths() -> None:
    like = {"device": "cuda", "dtype": torch.bfloat16}
    counts = [6, 20]
    cache = make_cache([300, 90], 16, 2, 64, None, **like)
    q, bounds, each = packed_queries(counts, 8, 64, **like)
    words = words_of([shown_by(parents_of(n)) for n in counts], 0, "cuda")

    def call() -> tuple[Tensor, Tensor]:
        out, aux = attention_varlen(
            q, cache.k, cache.v, bounds, None, mask=TokenTree(words), max_seqlen_q=20, return_aux=LSE,
            **cache.places,
        )  # fmt: skip
        return out, aux.lse

    graph, (out, lse) = capture(call)
    for lengths in ([300, 90], [64, 20], [7, 5], [0, 33]):
        trees = [torch.rand(n, n) < 0.5 for n in counts]
        words.copy_(words_of(trees, 0, "cuda"))
        cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        rows = [tuple(x[:n] for x in own) for own, n in zip(cache.rows, lengths)]
        check_trees(out, lse, each, rows, trees, bounds.tolist())


@pytest.mark.gpu
def test_gpu_bits_depend_on_the_sequence_alone_in_the_mode() -> None:
    like = {"device": "cuda", "dtype": torch.bfloat16}
    cache = make_cache([5000, 100, 2000], 16, 1, 64, None, **like)
    q, bounds, _ = packed_queries([9, 1, 30], 4, 64, **like)
    words = words_of([shown_by(parents_of(n)) for n in (9, 1, 30)], 0, "cuda")
    with flash_ext.serving.set_batch_invariant(True):
        whole = attention_varlen(q, cache.k, cache.v, bounds, None, mask=TokenTree(words), **cache.places)
        alone = attention_varlen(
            q[:9], cache.k, cache.v, bounds[:2], None, mask=TokenTree(words[:9]),
            block_table=cache.table[:1], seqused_k=cache.lengths[:1],
        )  # fmt: skip
    assert torch.equal(whole[:9], alone)


@pytest.mark.gpu
def test_gpu_rows_behind_the_64th_key_of_a_tree_stay_inside() -> None:
    """Nobody looks at lengths there: of more queries than a word has bits, the keys behind it are hidden."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    cache = make_cache([130], 16, 1, 64, None, **like)
    q, bounds, each = packed_queries([100], 2, 64, **like)
    words = torch.full((100,), -1, device="cuda")
    out, aux = attention_varlen(
        q, cache.k, cache.v, bounds, None, mask=TokenTree(words), return_aux=LSE, **cache.places
    )
    shown = torch.ones(100, 100, dtype=torch.bool)
    shown[:, 64:] = False
    check_trees(out, aux.lse, each, cache.rows, [shown], [0])


@pytest.mark.gpu
def test_gpu_the_host_does_not_wait() -> None:
    like = {"device": "cuda", "dtype": torch.bfloat16}
    cache = make_cache([300, 77], 16, 2, 64, None, **like)
    q, bounds, _ = packed_queries([4, 4], 8, 64, **like)
    parents = torch.tensor([[-1, 0, 0, 1]], device="cuda")
    attention_varlen(q, cache.k, cache.v, bounds, None, mask=TokenTree.from_parents(parents), **cache.places)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask in (
            TokenTree.from_parents(parents),
            TokenTree.from_bool(parents[:, None] < parents[..., None]),
        ):
            attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, max_seqlen_q=4, **cache.places)
    finally:
        torch.cuda.set_sync_debug_mode("default")
