"""What no kernel executes is refused in words, and each proposed cure is executed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flash_ext
from flash_ext import masks
from flash_ext._masks.lower import Terms, terms_for
from flash_ext._masks.value import Sizes
from flash_ext.masks import (
    BlockMask,
    Causal,
    Chunks,
    Dense,
    Documents,
    HiddenRows,
    KeyMask,
    Mask,
    Prefix,
    SinkTokens,
    Window,
)

LENS, IDS = torch.tensor([2]), torch.tensor([0] * 5 + [1] * 3)
SIZES = Sizes(False, 1, 2, 8, 8)


def attend(mask: Any = None, bias: Any = None) -> torch.Tensor:
    q = torch.randn(1, 8, 2, 8, generator=torch.Generator().manual_seed(0))
    return flash_ext.attention(q, q, q, mask=mask, bias=bias)


INTERVALS = torch.zeros(8, 2, dtype=torch.int32)
TRUTH = torch.ones(8, 8) > 0

# The mask, the words, and what the words propose.
REFUSED: dict[str, tuple[Mask, str, Mask | None]] = {
    "sink tokens outside the right bound": (
        Window(7, 0) | SinkTokens(2),
        "shows early rows keys after their own position, because the bound on the right stands inside the "
        "union: write Causal() & (Window(7, -1) | SinkTokens(2)), or SlidingWindow(left, sink_tokens=2). "
        "Prefix says that every row sees them.",
        Causal() & (Window(7, -1) | SinkTokens(2)),
    ),
    "and with chunks": (
        (Window(-1, 3) & Chunks(4)) | SinkTokens(1),
        "write Window(-1, 3) & (Chunks(4) | SinkTokens(1)), or",
        Window(-1, 3) & (Chunks(4) | SinkTokens(1)),
    ),
    "and with both": (
        (Window(2, 3) & Chunks(4)) | SinkTokens(1),
        "write Window(-1, 3) & ((Window(2, -1) & Chunks(4)) | SinkTokens(1)), or",
        Window(-1, 3) & ((Window(2, -1) & Chunks(4)) | SinkTokens(1)),
    ),
    "causal sink tokens": (
        Causal() | SinkTokens(2),
        "Prefix says that every row sees them",
        masks.PrefixLM(LENS),
    ),
    "prefix alone": (
        Prefix(LENS),
        "Prefix widens another mask and says nothing alone: write Causal() | Prefix(lens), which is "
        "PrefixLM(lens). For the first keys only: KeyMask.from_lengths(lens, k_len).",
        KeyMask.from_lengths(LENS, 8),
    ),
    "prefix that hides": (Causal() & Prefix(LENS), "Prefix widens another mask", Causal() | Prefix(LENS)),
    "prefix and documents": (Documents(IDS) & Prefix(LENS), "Prefix widens another mask", None),
    "sink tokens alone": (
        SinkTokens(2) & Documents(IDS),
        "SinkTokens widens another mask and says nothing alone: write Causal() & (Window(left, -1) | "
        "SinkTokens(count)), which is SlidingWindow(left, sink_tokens=count).",
        masks.SlidingWindow(3, sink_tokens=2),
    ),
    "a narrowed prefix": (
        Causal() & (Window(3, -1) | Prefix(LENS)),
        "Prefix(lens) is visible whatever Causal, Window and Chunks say, so nothing may narrow it: write "
        "(Causal() & ...) | Prefix(lens), with Causal() inside the union.",
        (Causal() & Window(3, -1)) | Prefix(LENS),
    ),
    "hiding inside a union": (
        (Causal() & Documents(IDS)) | Prefix(LENS),
        "what hides (Documents), hides from Prefix and SinkTokens as well, so it may not stand inside their "
        "union. Write (... | Prefix(...)) & Documents(...), with Documents outside the union.",
        (Causal() | Prefix(LENS)) & Documents(IDS),
    ),
    "& before |": (
        Causal() | Prefix(LENS) & Documents(IDS),
        f"& is taken before |, here {Prefix(LENS) & Documents(IDS)!r}: put parentheses around the union.",
        (Causal() | Prefix(LENS)) & Documents(IDS),
    ),
    "chunks outside": (
        Causal() & Chunks(4) & (Window(3, -1) | SinkTokens(1)),
        "a left window or Chunks outside the union with SinkTokens, here Chunks(4), would hide the sink "
        "tokens again: write Causal() & ((Window(...) & Chunks(...)) | SinkTokens(...)), with both inside.",
        Causal() & ((Window(3, -1) & Chunks(4)) | SinkTokens(1)),
    ),
    "a left window outside": (
        Window(3, 0) & (Chunks(4) | SinkTokens(1)),
        "here Window(3, 0), would hide the sink tokens again",
        Causal() & ((Window(3, -1) & Chunks(4)) | SinkTokens(1)),
    ),
    "two numbers of sink tokens": (
        (Window(3, 0) | SinkTokens(1)) & (Window(2, 0) | SinkTokens(2)),
        "SinkTokens of several numbers, [1, 2], stand in several unions: write one.",
        None,
    ),
    "two bounds of sink tokens": (
        (Causal() & (Window(3, -1) | SinkTokens(3))) | (Window(-1, 2) & (Window(1, -1) | SinkTokens(2))),
        "SinkTokens stand in two parts of a union whose bounds on the right differ: write one.",
        None,
    ),
    "a low bound of sink tokens": (
        (Causal() & (Window(3, -1) | SinkTokens(3))) | Window(1, 2),
        "SinkTokens stand under a lower bound on the right than the rest of the union: write Causal() & "
        "(Window(left, -1) | SinkTokens(count)), with one bound outside.",
        None,
    ),
    "not causal": (
        ~Causal(),
        "~Causal has no kernel; ~ works on Dense, KeyMask and BlockMask.",
        ~KeyMask(TRUTH[0]),
    ),
    "not documents": (Causal() & ~Documents(IDS), "~Documents has no kernel; ~ works on", ~Dense(TRUTH)),
    "de morgan": (~(Causal() | Dense(TRUTH)), "~Causal has no kernel", ~Dense(TRUTH)),
    "not, in a union": (Causal() | ~Window(2, -1), "~Window has no kernel", None),
    "two documents": (
        Documents(IDS) & Documents(IDS + 1),
        "Documents stands once in a mask: number the pairs, ids_a * count_b + ids_b.",
        Documents(IDS * 3 + IDS + 1),
    ),
    "three intervals": (
        HiddenRows(INTERVALS) & HiddenRows(INTERVALS.repeat(1, 2)),
        "all HiddenRows together may hold 2 intervals each, here 3.",
        HiddenRows(INTERVALS.repeat(1, 2)),
    ),
    "chunks that cut": (
        Chunks(4) & Chunks(6),
        "Chunks of [4, 6] positions cut each other: one size must divide the others.",
        Chunks(4) & Chunks(8),
    ),
    "chunks in a union": (
        Chunks(4) | Window(1, 1),
        "the union Chunks(4) | Window(1, 1) of Chunks with bands has no kernel, unless one holds the others.",
        Chunks(4) | Window(5, 5) | Chunks(2) | Window(),
    ),
    "a union with documents": (
        Documents(IDS) | Causal(),
        "a union with Documents has no kernel: | joins Dense with Dense or KeyMask, BlockMask with "
        "BlockMask, bands with bands, and widens by Prefix and SinkTokens.",
        (Dense(TRUTH) | KeyMask(TRUTH[0])) & (BlockMask(TRUTH[:1, :1]) | BlockMask(TRUTH[:1, :1])),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_words_and_cures(name: str) -> None:
    mask, words, cure = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        attend(mask)
    text = str(caught.value)
    assert text.startswith(f"No kernel executes {mask!r}: ")
    assert text.endswith("Or spend memory on it: BlockMask.from_mask(mask, q_len, k_len).")
    assert mask.describe(8, 8).refusal == text and mask.describe(8, 8).memory is None
    for way_out in (BlockMask.from_mask(mask, 8, 8), cure):
        if way_out is not None:
            torch.testing.assert_close(attend(way_out), attend(way_out.to_dense(8, 8)))


def test_causal_and_window_are_joined_to_the_mask() -> None:
    prefix = Prefix(LENS)
    with pytest.raises(ValueError, match=re.escape("Causal() | Prefix(lens), which is PrefixLM(lens)")):
        terms_for(prefix, None, SIZES, True)
    with pytest.raises(ValueError, match="nothing may narrow it"):
        terms_for(masks.PrefixLM(LENS), None, SIZES, True)
    assert terms_for(Window(3, -1) | SinkTokens(2), None, SIZES, True) == Terms(3, 0, sink_tokens=2)
    assert terms_for(None, None, SIZES, True) == Terms(-1, 0)
    assert terms_for(Causal(), None, SIZES, window=(2, 5)) == Terms(2, 0)
    assert terms_for(Window(7, 1), None, SIZES, window=(2, 5)) == Terms(2, 1)
    assert terms_for(Window() & Window(-1, -1), None, SIZES) == Terms()
    for mask in (None, Causal()):
        for window in ((-2, -1), (-1, -2)):
            with pytest.raises(ValueError, match="must be a number of keys or -1 for no limit, got -2"):
                terms_for(mask, None, SIZES, True, window)


def test_alignments() -> None:
    """With equal lengths both are the same; else they do not mix."""
    mixed, longer = Causal() & Window(2, -1, "top_left"), SIZES._replace(k_len=9)
    assert terms_for(mixed, None, SIZES) == Terms(2, 0)
    with pytest.raises(ValueError, match="bands of both alignments do not go together where the"):
        terms_for(mixed, None, longer)
    with pytest.raises(ValueError, match="causal=True and window count from the bottom right"):
        terms_for(Window(2, -1, "top_left"), None, longer, True)
    assert mixed.describe(8, 9).refusal.endswith("BlockMask.from_mask(mask, q_len, k_len).")
    top = Causal("top_left") & Window(2, -1, "top_left") & Window()
    assert terms_for(top, None, longer) == Terms(2, 0, top_left=True)
    assert terms_for(top, None, SIZES) == Terms(2, 0)
    assert terms_for(Chunks(2, "top_left"), None, longer) == Terms(chunk=2, top_left=True)


# ---- arguments ----------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "alignment": (
        lambda: Causal("left"), ValueError, "alignment must be one of bottom_right, top_left, got 'left'",
    ), "alignment kind": (lambda: Causal(True), ValueError, "alignment must be one of"),
    "window": (lambda: Window(-2, 0), ValueError, "left must be a number of keys or -1 for no limit, got -2"),
    "window kind": (lambda: Window(0, 1.0), TypeError, "right must be an int, got float"),
    "window bool": (lambda: Window(True), TypeError, "left must be an int, got bool"),
    "chunks": (lambda: Chunks(0), ValueError, "size must be positive, got 0"),
    "sink tokens": (lambda: SinkTokens(-1), ValueError, "count must not be negative, got -1"),
    "sink tensor": (lambda: SinkTokens(LENS), TypeError, "count must be an int, got Tensor"),
    "lens": (
        lambda: Prefix(LENS.float()), TypeError, "lens must be torch.int32 or torch.int64, got torch.float32",
    ),
    "lens shape": (
        lambda: Prefix(LENS[None]), ValueError, r"lens must have a shape \(batch,\), got \(1, 1\)",
    ), "ids": (lambda: Documents([0, 1]), TypeError, "ids must be a torch.Tensor, got list"),
    "ids_k": (
        lambda: Documents(IDS, IDS.short()), TypeError, "ids_k must be torch.int32 or .* got torch.int16",
    ),
    "ids range": (lambda: Documents(IDS + 2**31), ValueError, "ids must be from -2\\*\\*31 to 2\\*\\*31 - 1"),
    "keep": (
        lambda: KeyMask(TRUTH[0].float()), TypeError,
        r"keep must be torch.bool .*DenseBias, in bias=. For 0 and 1 pass .bool\(\)",
    ),
    "keep kind": (
        lambda: KeyMask(IDS), TypeError, r"torch.bool \(True = take part\), got int64 \(8,\) cpu. For 0 and",
    ),
    "dense": (lambda: Dense(torch.zeros(3)), TypeError, "A float tensor is added to the scores: DenseBias"),
    "dense dims": (lambda: Dense(TRUTH[None, None, None]), ValueError, r"got \(1, 1, 1, 8, 8\)"),
    "intervals": (
        lambda: HiddenRows(INTERVALS[:, :1]), ValueError, r"pairs \[start, end\), got shape \(8, 1\)",
    ), "intervals dims": (lambda: masks.HiddenKeys(INTERVALS[0]), ValueError, "num_heads, q_len, 2 or 4"),
    "bias": (
        lambda: masks.DenseBias(TRUTH), TypeError,
        r"A mask of True and False is Dense\(tensor\), and goes into",
    ), "bias dims": (lambda: masks.DenseBias(torch.zeros(())), ValueError, "1 to 4 dimensions"),
    "slopes": (lambda: masks.ALiBi(IDS), TypeError, r"slopes must be floating point, got int64 \(8,\) cpu"),
    "slopes dims": (
        lambda: masks.ALiBi(torch.zeros(1, 1, 1)), ValueError, r"\(batch, num_heads\), got \(1, 1, 1\)",
    ),
    "from_mask": (
        lambda: BlockMask.from_mask(TRUTH, 8, 8), TypeError, "mask must be a mask of flash_ext.masks, got",
    ), "elements": (lambda: BlockMask(TRUTH, 16, TRUTH.float()), TypeError, "elements must be torch.bool"),
    "elements dims": (lambda: BlockMask(TRUTH, 16, TRUTH[0, 0]), ValueError, "elements must have 1 to 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    make, error, words = ARGUMENTS[name]
    with pytest.raises(error, match=words):
        make()


BLOCKS = BlockMask.from_dense(TRUTH.tril(), 16)
MISFITS: dict[str, tuple[Mask, str]] = {
    "lens": (
        masks.PrefixLM(torch.tensor([1, 2, 3])),
        r"Prefix: lens must have shape \(batch,\) = \(2,\) or \(1,\), got \(3,\)",
    ),
    "ids": (Documents(IDS[:5]), r"Documents: ids must have shape \(batch, q_len\) = \(2, 8\), .* got \(5,\)"),
    "ids batch": (Documents(IDS.expand(3, 8)), r"= \(2, 8\), where batch may be 1 or left out, got \(3, 8\)"),
    "ids_k": (Documents(IDS, IDS[:7]), r"Documents: ids_k must have shape \(batch, k_len\) = \(2, 8\)"),
    "keep": (KeyMask(TRUTH[0, :5]), r"KeyMask: keep must have shape \(batch, k_len\) = \(2, 8\)"),
    "rows": (
        HiddenRows(INTERVALS[:5]),
        r"HiddenRows: intervals must have shape \(batch, num_heads, k_len, 2 or 4\) "
        r"= \(2, 2, 8, 2 or 4\), where what stands before k_len may be 1 or left out, got \(5, 2\)",
    ),
    "row keys": (masks.HiddenKeys(INTERVALS.expand(3, 8, 2)), r"q_len, 2 or 4\) = .* got \(3, 8, 2\)"),
    "dense": (
        Dense(TRUTH[:2]),
        r"Dense: tensor must broadcast to .*= \(2, 2, 8, 8\), got \(2, 8\). A mask \(batch, ",
    ),
    "dense rows": (Dense(TRUTH[:5]), r"= \(2, 2, 8, 8\), got \(5, 8\).$"),
    "blocks": (
        BlockMask(TRUTH, 16),
        r"BlockMask: blocks must have shape \(2 or 1, 2 or 1, 1, 1\) .* got \(1, 1, 8, 8\)",
    ),
    "bits": (
        BlockMask.from_dense(TRUTH[:5].tril(), 16),
        r"its cut blocks are for \(5, 8\) rows and keys, got a .*\(8, 8",
    ),
    "in an expression": (Causal() & ~KeyMask(TRUTH[0, :5]), "KeyMask: keep must have shape"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_tensors_that_do_not_fit_the_call(name: str) -> None:
    mask, words = MISFITS[name]
    for use in (
        lambda: mask.to_dense(8, 8, batch=2, num_heads=2),
        lambda: mask.describe(8, 8, batch=2, num_heads=2),
        lambda: BlockMask.from_mask(mask, 8, 8, batch=2, num_heads=2),
        lambda: terms_for(mask, None, Sizes(False, 2, 2, 8, 8)),
    ):
        with pytest.raises(ValueError, match=words):
            use()


def test_one_tensor_of_ids_serves_equal_lengths_only() -> None:
    with pytest.raises(ValueError, match="Documents needs ids_k, ids of the keys, where lengths differ"):
        Documents(IDS).to_dense(8, 9)


def test_tensors_that_do_not_fit_each_other() -> None:
    mask = KeyMask(TRUTH[:2]) & Dense(TRUTH[:3, None, None])
    with pytest.raises(
        ValueError, match=r"must agree in batch and num_heads, or have 1, got \(2, 1\) and \(3, 1\)"
    ):
        mask.to_dense(8, 8)


def test_masks_and_biases_given_as_tensors() -> None:
    numbers, integers = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.int64)
    assert torch.equal(attend(TRUTH, numbers[0]), attend(Dense(TRUTH), masks.DenseBias(numbers[0])))
    theirs = Causal().to_torch(8, 8)
    for given, words in (
        (numbers, "must be torch.bool, got torch.float32. A float tensor is added: bias=tensor"),
        (integers, r"must be torch.bool, got torch.int64. For 0 and 1 pass .bool\(\)"),
        (masks.DenseBias(numbers), "got DenseBias. A bias goes into bias="),
        (theirs, "got BlockMask. Build one with flash_ext.masks.BlockMask.from_torch"),
        ("causal", "mask must be a mask of flash_ext.masks, a bool tensor or None, got str"),
    ):
        with pytest.raises(TypeError, match=words):
            attend(given)
    for given, words in (
        (TRUTH, "must be floating point, got torch.bool. Give it as mask="),
        (integers, r"must be floating point, got torch.int64. .*for numbers to be added .float\(\)"),
        (Causal(), "bias must be a bias .*got Causal. A mask goes into mask="),
        (1.0, "bias must be a bias of flash_ext.masks, a float tensor or None, got float"),
    ):
        with pytest.raises(TypeError, match=words):
            attend(None, given)


def test_public_names() -> None:
    """All of them, each with a docstring."""
    assert masks.__all__ == sorted(masks.__all__)
    shown = {name for name in vars(masks) if not name.startswith("_")} - {"annotations"}
    assert shown == set(masks.__all__)
    assert all(getattr(masks, name).__doc__ for name in masks.__all__)
    assert flash_ext.masks is masks
