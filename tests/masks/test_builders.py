"""Masks from structures and from other libraries, what a mask leaves to do, and biases."""

from __future__ import annotations

import doctest
import importlib
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flash_ext
from flash_ext import masks
from flash_ext._masks.tiles import known_tiles
from flash_ext._masks.value import Sizes
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec
from tests.mask_expressions import BATCH, HEADS, LENGTHS, expressions
from tests.masks.test_masks import SLOW
from tests.reference import visible_mask

MODULES = ("atoms", "biases", "builders", "convert")


@pytest.mark.parametrize("name", [f"_masks.{name}" for name in MODULES] + ["masks"])
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(f"flash_ext.{name}")
    names = {"flash_ext": flash_ext, "torch": torch}
    tests = [test for test in doctest.DocTestFinder().find(module, globs=names) if test.examples]
    runner = doctest.DocTestRunner(verbose=False)
    failed = sum(runner.run(test).failed for test in tests)
    assert failed == 0 and (tests or name == "masks")


# ---- trees and spans ----------------------------------------------------------------------------------


@st.composite
def forests(draw) -> tuple[list[int], list[int]]:
    """Parents in depth-first order, and lengths of the segments."""
    parents: list[int] = []
    path: list[int] = []
    for segment in range(draw(st.integers(1, 9))):
        depth = draw(st.integers(0, len(path)))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return parents, draw(st.lists(st.integers(0, 4), min_size=len(parents), max_size=len(parents)))


@settings(max_examples=25)
@given(forests(), st.booleans())
def test_a_token_sees_its_ancestors_and_itself(forest: tuple[list[int], list[int]], on_tensor: bool) -> None:
    parents, lengths = forest
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    segment_of = [s for s, n in enumerate(lengths) for _ in range(n)]

    def descends(segment: int, ancestor: int) -> bool:
        while segment not in (ancestor, -1):
            segment = parents[segment]
        return segment == ancestor

    length = starts[-1]
    want = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            want[i, j] = descends(segment_of[i], segment_of[j])
    given = (torch.tensor(parents), torch.tensor(starts)) if on_tensor else (parents, starts)
    mask = masks.prefix_tree(*given)
    assert torch.equal(mask.to_dense(length, length)[0, 0], want)
    # Linear memory: two numbers a token.
    assert sum(t.numel() for t in mask._tensors()) == 2 * length
    if length:
        q = torch.randn(1, length, 1, 8)
        out = flash_ext.attention(q, q, q, mask=mask)
        torch.testing.assert_close(out, flash_ext.attention(q, q, q, mask=want))


def test_a_tree_of_tokens() -> None:
    """Of speculative decoding: each token is a segment."""
    parents = [-1, 0, 1, 1, 0]
    assert masks.prefix_tree(parents).to_dense(5, 5)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1],
    ]  # fmt: skip


def test_answers_of_a_tree_are_those_of_each_path() -> None:
    """A row of a prompt and three answers gives each answer what it has behind its own copy of the prompt."""
    lengths, heads = [7, 4, 5, 3], 2
    starts = [sum(lengths[:i]) for i in range(5)]
    q, k, v = (torch.randn(1, 19, heads, 8) for _ in range(3))
    mask = masks.prefix_tree([-1, 0, 0, 0], starts)
    out = flash_ext.attention(q, k, v, mask=mask)
    for answer in (1, 2, 3):
        path = [*range(7), *range(starts[answer], starts[answer + 1])]
        alone = flash_ext.attention(q[:, path], k[:, path], v[:, path], causal=True)
        torch.testing.assert_close(out[:, path], alone)


@pytest.mark.parametrize("parents, cu_seqlens, error, words", [
    ([0], None, ValueError, r"parents\[0\] must be -1 or the index of a segment before it, got 0"),
    ([-1, 2, 0], None, ValueError, r"parents\[1\] must be .* got 2"),
    ([-1, -2], None, ValueError, r"parents\[1\] must be .* got -2"),
    ([-1, 0, 0, 1], None, ValueError, "depth-first order: segment 3 continues segment 1, but a"),
    ([-1, -1, 0], None, ValueError, "depth-first order: segment 2 continues segment 0"),
    ([-1, 0], [0, 2], ValueError, r"one entry more than parents, 3, got \[0, 2\] of 2"),
    ([-1, 0], [1, 2, 3], ValueError, "cu_seqlens must start with 0"),
    ([-1, 0], [0, 3, 2], ValueError, "not decrease"),
    (torch.zeros(2), None, TypeError, "parents must be integers of one dimension, got float32"),
    ([-1], torch.zeros(1, 2).long(), TypeError, r"cu_seqlens must be .* got int64 \(1, 2\) cpu"),
])  # fmt: skip
def test_trees_that_are_none(parents: Any, cu_seqlens: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        masks.prefix_tree(parents, cu_seqlens)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(-1, 2), min_size=10, max_size=10), min_size=1, max_size=2), st.booleans()
)
def test_spans_see_both_ways_inside(rows: list[list[int]], batched: bool) -> None:
    ids = torch.tensor(rows if batched else rows[0])
    mask = masks.spans(ids)
    want = torch.zeros(len(rows) if batched else 1, 1, 10, 10, dtype=torch.bool)
    for b, row in enumerate(rows if batched else rows[:1]):
        for i in range(10):
            for j in range(10):
                run = row[min(i, j) : max(i, j) + 1]
                want[b, 0, i, j] = j <= i or (len(set(run)) == 1 and run[0] >= 0)
    assert torch.equal(mask.to_dense(10, 10), want)
    inside = mask & masks.Documents(torch.tensor([0] * 4 + [1] * 6))
    q = torch.randn(len(want), 10, 1, 8)
    torch.testing.assert_close(
        flash_ext.attention(q, q, q, mask=inside),
        flash_ext.attention(q, q, q, mask=inside.to_dense(10, 10)),
    )


def test_spans_are_built_on_their_device_and_hide_what_lies_beyond() -> None:
    assert masks.spans(torch.zeros(2, 5, dtype=torch.int32, device="meta")).device.type == "meta"
    mask = masks.spans(torch.tensor([-1, 0, 0]))
    assert mask.to_dense(3, 5)[0, 0].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    for wrong, error in (
        (torch.zeros(3), TypeError),
        ([0], TypeError),
        (torch.zeros(1, 1, 1).int(), ValueError),
    ):
        with pytest.raises(error, match="ids must"):
            masks.spans(wrong)


def test_shortcuts() -> None:
    lens, ids = torch.tensor([3]), torch.tensor([0, 0, 1, 1, 1, 2])
    row, key = torch.arange(6)[:, None], torch.arange(6)
    for mask, want in (
        (masks.SlidingWindow(2), (key <= row) & (row - key <= 2)),
        (masks.SlidingWindow(2, sink_tokens=1), (key <= row) & ((row - key <= 2) | (key < 1))),
        (masks.ChunkCausal(4), (key <= row) & (key // 4 == row // 4)),
        (masks.PrefixLM(lens), (key <= row) | (key < 3)),
        (masks.DocumentCausal(ids), (key <= row) & (ids[:, None] == ids)),
        (masks.KeyMask.from_lengths(lens, 6), (key < 3).expand(6, 6)),
    ):
        assert torch.equal(mask.to_dense(6, 6)[0, 0], want), mask


# ---- against the oracle of attention ------------------------------------------------------------------


@pytest.mark.parametrize("top_left", [False, True])
def test_single_masks_are_those_of_the_reference(top_left: bool) -> None:
    """flash_ext/reference.py says what kernels are judged by."""
    q_len, k_len = 9, 13
    alignment = "top_left" if top_left else "bottom_right"
    generator = torch.Generator().manual_seed(3)
    intervals = torch.randint(0, 13, (1, 1, 13, 4), generator=generator, dtype=torch.int32)
    truth = torch.rand(1, 1, q_len, k_len, generator=generator) < 0.5
    lens = torch.tensor([4], dtype=torch.int32)
    ids = torch.randint(-1, 3, (1, 13), generator=generator, dtype=torch.int32)
    blocks = torch.tensor([[[[True]]]])
    causal = masks.Causal(alignment)
    free, right = AttnSpec(1.0, -1, -1), AttnSpec(1.0, -1, 0)
    cases: list[tuple[masks.Mask, AttnSpec, Modifiers]] = [
        (causal, right, Modifiers(top_left=top_left)),
        (masks.Window(2, 3, alignment), AttnSpec(1.0, 2, 3), Modifiers(top_left=top_left)),
        (masks.Chunks(4, alignment), free, Modifiers(chunk=4, top_left=top_left)),
        (causal | masks.Prefix(lens), right, Modifiers(prefix_lens=lens, top_left=top_left)),
        (causal & (masks.Window(2, -1, alignment) | masks.SinkTokens(3)), AttnSpec(1.0, 2, 0),
         Modifiers(sink_tokens=3, top_left=top_left)),
        (masks.Documents(ids[:, :9], ids), free, Modifiers(document_q=ids[:, :9], document_k=ids)),
        (masks.HiddenRows(intervals), free, Modifiers(hidden_rows=intervals)),
        (masks.HiddenKeys(intervals[:, :, :9]), free, Modifiers(hidden_keys=intervals[:, :, :9])),
        (masks.Dense(truth), free, Modifiers(mask=truth)),
        (masks.BlockMask(blocks, 16), free, Modifiers(blocks=blocks, block_rows=16, block_cols=16)),
    ]  # fmt: skip
    for mask, spec, mods in cases:
        assert torch.equal(mask.to_dense(q_len, k_len)[0, 0], visible_mask(spec, q_len, k_len, mods=mods)), (
            mask
        )


# ---- what a mask leaves to do -------------------------------------------------------------------------


@settings(max_examples=20, suppress_health_check=SLOW)
@given(st.data())
def test_describe_counts_what_the_dense_mask_has(data: st.DataObject) -> None:
    q_len, k_len = data.draw(st.sampled_from(LENGTHS))
    mask = data.draw(expressions(q_len, k_len)).mask
    found = mask.describe(q_len, k_len, batch=BATCH, num_heads=HEADS)
    dense = mask.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS)
    assert found.density == pytest.approx(dense.double().mean().item())
    counts = dense.flatten(2).sum(2)
    whole, skipped = (counts == q_len * k_len).sum().item(), (counts == 0).sum().item()
    assert (found.skipped, found.cut, found.whole) == (skipped, BATCH * HEADS - whole - skipped, whole)
    assert (found.memory is None) == (found.refusal is not None)


@pytest.mark.parametrize("q_len, k_len", [(300, 300), (256, 520), (1, 700)])
def test_describe_counts_tiles_of_128(q_len: int, k_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in pieces of a few tiles."""
    mask = masks.SlidingWindow(130, sink_tokens=5)
    dense = mask.to_dense(q_len, k_len)[0, 0]
    counts = [0, 0, 0]
    for i in range(0, q_len, 128):
        for j in range(0, k_len, 128):
            tile = dense[i : i + 128, j : j + 128]
            counts[0 if not tile.any() else 2 if tile.all() else 1] += 1
    for piece in (1 << 22, 128 * 128, 300 * 128):
        monkeypatch.setattr("flash_ext._masks.dense.PIECE", piece)
        found = mask.describe(q_len, k_len, batch=3)
        assert [found.skipped, found.cut, found.whole] == [3 * n for n in counts]
        assert found.density == pytest.approx(dense.double().mean().item())
        assert str(found).splitlines()[1] == (
            f"{3 * sum(counts)} tiles: {found.skipped} skipped, {found.cut} cut, {found.whole} whole"
        )


@settings(max_examples=25, suppress_health_check=SLOW)
@given(st.data())
def test_tiles_that_are_known_are_what_they_are_said_to_be(data: st.DataObject) -> None:
    """And what is made of them is the mask: blocks, bits and counts."""
    q_len, k_len = data.draw(st.sampled_from([(70, 70), (50, 90), (90, 50)]))
    mask = data.draw(masks_of_runs(q_len, k_len))
    dense = mask.to_dense(q_len, k_len)
    sizes = Sizes(False, *dense.shape)
    known = known_tiles(mask, sizes, (16, 32), "cpu")
    tiles = masks.BlockMask.from_dense(dense, (16, 32))
    assert not (tiles.blocks & ~known.some).any()
    whole = masks.BlockMask.from_dense(~dense, (16, 32)).blocks
    assert not (known.every & whole).any()
    blocks = masks.BlockMask.from_mask(mask, q_len, k_len, block_size=(16, 32))
    assert torch.equal(blocks.blocks, tiles.blocks) and torch.equal(blocks.to_dense(q_len, k_len), dense)
    assert (blocks.bits is None) == (tiles.bits is None)


@st.composite
def masks_of_runs(draw, q_len: int, k_len: int) -> masks.Mask:
    """Expressions whose tensors change slowly, so that many tiles are of one kind."""
    alignment = draw(st.sampled_from(["bottom_right", "top_left"]))
    number = st.integers(0, 60)

    def runs(length: int, low: int, high: int) -> Tensor:
        values = draw(st.lists(st.integers(low, high), min_size=3, max_size=3))
        return torch.tensor(values).repeat_interleave(-(-length // 3))[:length]

    def intervals(length: int, most: int) -> Tensor:
        sides = [runs(length, 0, most) + torch.arange(length) % draw(st.sampled_from([1, 3])) for _ in (0, 1)]
        return torch.stack(sides, -1)[None].repeat(draw(st.sampled_from([1, 2])), 1, 1)

    leaves = {
        "causal": lambda: masks.Causal(alignment),
        "window": lambda: masks.Window(draw(st.integers(-1, 60)), draw(st.integers(-1, 60)), alignment),
        "chunks": lambda: masks.Chunks(draw(st.sampled_from([5, 16, 40])), alignment),
        "prefix": lambda: masks.Prefix(torch.tensor([draw(number), draw(number)])),
        "sink tokens": lambda: masks.SinkTokens(draw(number)),
        "documents": lambda: masks.Documents(runs(q_len, -1, 2), runs(k_len, -1, 2)),
        "rows": lambda: masks.HiddenRows(intervals(k_len, q_len)),
        "keys": lambda: masks.HiddenKeys(intervals(q_len, k_len)),
        "key mask": lambda: masks.KeyMask(runs(k_len, 0, 1) > 0),
    }
    mask = leaves[draw(st.sampled_from(sorted(leaves)))]()
    for _ in range(draw(st.integers(0, 3))):
        other = leaves[draw(st.sampled_from(sorted(leaves)))]()
        other = ~other if draw(st.booleans()) else other
        mask = mask & other if draw(st.booleans()) else mask | other
    return mask


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made inside had at a time, and the most of these tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = self.tensors = self.most_tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        results = func(*args, **(kwargs or {}))
        for t in tree_leaves(results):
            if torch.is_tensor(t) and t.untyped_storage()._cdata not in given:
                self.live += t.untyped_storage().nbytes()
                self.tensors += 1
                weakref.finalize(t.untyped_storage(), self.release, t.untyped_storage().nbytes())
        self.most = max(self.most, self.live)
        self.most_tensors = max(self.most_tensors, self.tensors)
        return results

    def release(self, size: int) -> None:
        self.live -= size
        self.tensors -= 1


def test_no_small_tensor_stays_while_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between larger ones that go it would keep the heap as large as all of those together."""
    n, size = 1600, 16  # a hundred pieces
    sides = torch.arange(n)[:, None], torch.arange(n)

    def rule(b: Any, h: Any, row: Tensor, key: Tensor) -> Tensor:
        return (row >= key) & (row - key < 40)

    for together in (1 << 20, 7):  # cut blocks whose bits lie in one tensor until all are joined
        monkeypatch.setattr("flash_ext._masks.block_mask._Collected.BYTES", together * size * 4)
        with PeakMemory() as peak:
            blocks = masks.BlockMask.from_rule(rule, None, None, n, n, size)
        assert torch.equal(blocks.to_dense(n, n)[0, 0], rule(None, None, *sides))
        assert blocks.bits is not None and peak.most_tensors < 25 + len(blocks.bits) // together


def test_describe_forms_nothing_of_the_size_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 6000
    monkeypatch.setattr("flash_ext._masks.dense.PIECE", 1 << 20)
    mask = masks.SlidingWindow(100) & masks.Documents(torch.arange(length) // 2500)
    with PeakMemory() as peak:
        mask.describe(length, length)
        masks.BlockMask.from_mask(mask, length, length)
    assert 0 < peak.most < length**2 // 2


def test_memory_is_that_of_the_condensed_form() -> None:
    """Bytes by docs: two bits a pair with summaries of 64 rows; 4.25 bytes an id, and the two ends of the one
    document that runs packed; 8.5 an interval.
    """
    n = 1024
    ids, truth = torch.zeros(n, dtype=torch.int64), torch.ones(n, n) > 0
    intervals = torch.zeros(2, n, 2, dtype=torch.int64)
    for mask, want in (
        (masks.SlidingWindow(100, sink_tokens=4), 0),
        (masks.Dense(truth), n * n // 4 * 65 // 64),
        (masks.KeyMask(truth[0]), 3 * n // 8),
        (masks.Documents(ids), n * 17 // 4 + 8),
        (masks.Documents(ids, ids), 2 * n * 17 // 4),
        (masks.Documents(ids) & masks.KeyMask(truth[0]), 2 * n * 17 // 4),
        (masks.HiddenRows(intervals), 2 * n * 17 // 2),
        (masks.PrefixLM(torch.tensor([3])), 4),
        (masks.BlockMask(truth[:8, :8], 128), n * n // 2048),
    ):
        assert mask.describe(n, n).memory == want, mask
    cut = masks.BlockMask.from_mask(masks.Causal(), n, n)
    assert cut.describe(n, n).memory == n * n // 2048 + n * n // 4 * 65 // 64  # cut blocks are written out


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("cols", [1, 2, 31, 127, 128, 129, 300])
def test_memory_of_a_dense_mask_is_what_condense_makes(rows: int, cols: int) -> None:
    tensor = torch.ones(2, 3, rows, cols, dtype=torch.bool)
    condensed = torch.ops.flash_ext.condense.default(tensor, 0, 0)
    described = masks.Dense(tensor).describe(max(rows, 2), max(cols, 2), batch=2, num_heads=3)
    assert described.memory == 4 * condensed.numel()


def test_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    mask = masks.SlidingWindow(300)
    dense = mask.to_dense(700, 1030)[0, 0].float()
    ax = mask.plot(700, 1030)
    image = torch.tensor(ax.images[0].get_array())
    assert image.shape == (350, 344)
    means = dense.unflatten(0, (350, 2)).mean(1)
    want = torch.stack([means[:, j : j + 3].mean(1) for j in range(0, 1030, 3)], 1)
    torch.testing.assert_close(image.float(), want)
    of_head = masks.Dense(torch.stack([torch.ones(3, 4), torch.zeros(3, 4)]) > 0)
    assert of_head.plot(3, 4, ax, head_index=1) is ax
    assert not ax.images[-1].get_array().any()
    with pytest.raises(ValueError, match="head_index must be from 0 to 1, got 2"):
        of_head.plot(3, 4, head_index=2)
    matplotlib.pyplot.close("all")


def test_plot_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'plot needs matplotlib: pip install "flash_ext\[demo\]"'):
        masks.Causal().plot(4, 4)


# ---- FlexAttention ------------------------------------------------------------------------------------


@settings(max_examples=20, suppress_health_check=SLOW)
@given(st.data())
def test_mask_mod_is_the_same_mask(data: st.DataObject) -> None:
    q_len, k_len = data.draw(st.sampled_from(LENGTHS))
    said = data.draw(expressions(q_len, k_len))
    theirs = create_mask(said.mask.to_mask_mod(q_len, k_len), BATCH, HEADS, q_len, k_len, device="cpu")
    assert torch.equal(theirs, said.means), said.mask


@settings(max_examples=8, suppress_health_check=SLOW)
@given(st.data())
def test_block_masks_of_torch_and_back(data: st.DataObject) -> None:
    q_len, k_len = data.draw(st.sampled_from(LENGTHS))
    said = data.draw(expressions(q_len, k_len))
    theirs = said.mask.to_torch(q_len, k_len, batch=BATCH, num_heads=HEADS, block_size=16)
    assert isinstance(theirs, TorchBlockMask)
    made = create_block_mask(
        said.mask.to_mask_mod(q_len, k_len), BATCH, HEADS, q_len, k_len, device="cpu", BLOCK_SIZE=16
    )
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "seq_lengths"):
        mine, other = getattr(theirs, name), getattr(made, name)
        assert torch.equal(mine, other) if torch.is_tensor(mine) else mine == other, name
    ours = masks.BlockMask.from_torch(theirs)
    assert torch.equal(ours.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS), said.means)


def test_flex_attention_computes_the_same() -> None:
    mask = masks.SlidingWindow(20, sink_tokens=2) & masks.Documents(torch.arange(96) // 40)
    q, k, v = (torch.randn(1, 2, 96, 16) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without a compiler
        theirs = flex_attention(q, k, v, block_mask=mask.to_torch(96, 96, block_size=32))
    torch.testing.assert_close(flash_ext.attention(q, k, v, mask=mask, layout="bhsd"), theirs)


# ---- xformers -----------------------------------------------------------------------------------------


def of_xformers(name: str, base: type = object, **attributes: Any) -> Any:
    """An object that looks like one of xformers, which need not be installed."""
    made = type(name, (base,), {})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def test_from_xformers() -> None:
    tensor = torch.zeros(1, 2, 4, 4)
    window = of_xformers("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=3)
    local = of_xformers("LocalAttentionFromBottomRightMask", window_left=2, window_right=1)
    for given_bias, want in (
        (of_xformers("LowerTriangularMask", Tensor), (masks.Causal("top_left"), None)),
        (of_xformers("LowerTriangularFromBottomRightMask"), (masks.Causal(), None)),
        (window, (masks.Causal() & masks.Window(2, -1), None)),
        (local, (masks.Window(2, 1), None)),
        (None, (None, None)),
        (tensor, (None, masks.DenseBias(tensor))),
    ):
        assert masks.from_xformers(given_bias) == want
    for attribute in ("_subtensor", "_bias"):
        both = of_xformers("LowerTriangularMaskWithTensorBias", **{attribute: tensor})
        assert masks.from_xformers(both) == (masks.Causal("top_left"), masks.DenseBias(tensor))
    with pytest.raises(ValueError, match="BlockDiagonalCausalMask lays out packed sequences: .*cu_seqlens_q"):
        masks.from_xformers(of_xformers("BlockDiagonalCausalMask"))
    with pytest.raises(TypeError, match="must be an attn_bias of xformers, a float tensor or None, got int"):
        masks.from_xformers(3)


# ---- biases -------------------------------------------------------------------------------------------


def test_biases_are_added() -> None:
    q, k, v = (torch.randn(2, n, 2, 8) for n in (6, 9, 9))
    dense, row = torch.randn(2, 6, 9), torch.randn(9)
    slopes, table = torch.tensor([0.5, 0.25]), torch.randn(2, 32)
    alibi, position = masks.ALiBi(slopes), masks.RelativePosition(table)
    for bias in (
        masks.DenseBias(dense),
        masks.DenseBias(row),
        alibi,
        masks.ALiBi(slopes.expand(2, 2)),
        position,
        position + alibi,
        masks.DenseBias(row) + alibi + masks.DenseBias(dense),
    ):
        for mask, top_left in ((None, False), (masks.Causal("top_left"), True), (masks.Window(3, 2), False)):
            want = bias.to_dense(6, 9, top_left=top_left)
            if mask is not None:
                want = want.masked_fill(~mask.to_dense(6, 9), -torch.inf)
            out = flash_ext.attention(q, k, v, mask=mask, bias=bias)
            torch.testing.assert_close(out, flash_ext.attention(q, k, v, bias=want))


def test_a_dense_mask_and_a_dense_bias() -> None:
    """The bias keeps its gradient."""
    q = torch.randn(1, 4, 2, 8)
    bias, keep = torch.randn(2, 4, 4, requires_grad=True), torch.ones(4, 4).tril() > 0
    out = flash_ext.attention(q, q, q, mask=keep, bias=bias)
    want = flash_ext.attention(q, q, q, bias=bias, causal=True)
    torch.testing.assert_close(out, want)
    gradients = [torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, want)]
    torch.testing.assert_close(*gradients)
    position = masks.RelativePosition(torch.randn(2, 32))
    out = flash_ext.attention(q, q, q, mask=keep, bias=position)
    torch.testing.assert_close(out, flash_ext.attention(q, q, q, bias=position, causal=True))
    row = torch.randn(4, 1)
    out = flash_ext.attention(q, q, q, mask=keep[0], bias=row)
    want = row.expand(4, 4).masked_fill(~keep[0], -torch.inf)
    torch.testing.assert_close(out, flash_ext.attention(q, q, q, bias=want))


def test_biases_that_are_refused() -> None:
    q = torch.randn(2, 4, 2, 8)
    row, column = (masks.DenseBias(torch.zeros(shape)) for shape in ((4, 1), (1, 4)))
    alibi, position = masks.ALiBi(torch.ones(2)), masks.RelativePosition(torch.zeros(2, 32))
    for bias, words in (
        (row + column, r"the sum would need 1 \* 1 \* 4 \* 4 elements, more than any of its parts has; add"),
        (alibi + alibi, r"ALiBi stands once in a sum: add the slopes, ALiBi\(slopes_a \+ slopes_b\)"),
        (
            position + row,
            r"one bias by distance or one by element: write it out, DenseBias\(position.to_dense",
        ),
        (position + position, "or add the tables"),
        (
            masks.DenseBias(torch.zeros(3, 4)),
            r"DenseBias: tensor must broadcast to .*= \(2, 2, 4, 4\), got \(3, 4\)",
        ),
        (masks.ALiBi(torch.ones(3)), r"ALiBi: slopes must have .*here \(2,\) or \(2, 2\), got \(3,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_ext.attention(q, q, q, bias=bias)
