"""What a bias says it costs, against what calls read, keep and write; and its picture."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext
from flash_ext import masks
from flash_ext._masks.operands import with_aligned_rows
from flash_ext._ops import calls
from flash_ext._ops.modifiers import Modifiers
from tests.masks.test_builders import PeakMemory

BATCH, ROWS, KEYS, HEADS = 2, 6, 9, 4  # too short for copies that a GPU alone makes


def biases(learned: bool) -> dict[str, masks.Bias]:
    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape).to(dtype).requires_grad_(learned)

    slopes, table = new(HEADS), masks.RelativePosition(new(HEADS, 32))
    return {
        "dense": masks.DenseBias(new(BATCH, 1, ROWS, KEYS)),
        "row": masks.DenseBias(new(KEYS)),
        "column of a head": masks.DenseBias(new(HEADS, ROWS, 1)),
        "expanded": masks.DenseBias(new(HEADS, 1, KEYS).expand(BATCH, HEADS, ROWS, KEYS)),
        "expanded leaf": masks.DenseBias(new(KEYS).detach().expand(ROWS, KEYS).requires_grad_(learned)),
        "sum": masks.DenseBias(new(ROWS, KEYS)) + masks.DenseBias(new(KEYS)),
        "sum with an expanded one": masks.DenseBias(new(HEADS, ROWS, KEYS))
        + masks.DenseBias(new(1, KEYS).expand(ROWS, KEYS)),
        "slopes": masks.ALiBi(slopes),
        "slopes in 16 bits": masks.ALiBi(new(BATCH, HEADS, dtype=torch.bfloat16)),
        "slopes with gaps": masks.ALiBi(new(2 * HEADS)[::2]),
        "table": table,
        "table in 16 bits": masks.RelativePosition(new(HEADS, 6, dtype=torch.float16), bidirectional=False),
        "table of one head": masks.RelativePosition(new(1, 9), bucketing="clip"),
        "table and slopes": table + masks.ALiBi(slopes.detach().half()),
        "dense and slopes": masks.DenseBias(new(1, ROWS, KEYS)) + masks.ALiBi(new(HEADS).detach().double()),
    }


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(BATCH, n, HEADS, 8, dtype=dtype) for n in (ROWS, KEYS, KEYS))
    return q, k, v


def distinct_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the elements that lie in different places."""
    total = 0
    for t in tensors:
        if t is not None:
            strides = zip(t.shape, t.stride())
            total += torch.Size([n for n, stride in strides if stride]).numel() * t.element_size()
    return total


class Operators(TorchDispatchMode):
    """The tensors that forwards were given and backwards returned, as bias and slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []
        self.written: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        if func is torch.ops.flash_ext.fwd_mod.default:
            self.read = [args[names.index(name)] for name in ("bias", "slopes")]
        if func is torch.ops.flash_ext.bwd_mod.default:
            self.written = [results[3], results[4]]
        return results


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", biases(False))
def test_memory_and_gradient_are_those_of_the_operators(name: str, learned: bool) -> None:
    bias = biases(learned)[name]
    q, k, v = qkv()
    with Operators() as seen:
        out = flash_ext.attention(q.requires_grad_(), k, v, bias=bias)
        out.sum().backward()
    for found in (bias.describe(ROWS, KEYS, batch=BATCH, num_heads=HEADS), bias.describe(ROWS, KEYS)):
        assert found.refusal is None
        assert found.memory == distinct_bytes(*seen.read) > 0
        assert found.gradient == sum(t.nbytes for t in seen.written)
        assert (found.gradient > 0) == learned
    with torch.no_grad():
        assert bias.describe(ROWS, KEYS) == found


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", biases(False))
def test_kept_are_the_copies_of_a_call(name: str, learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no view of the bias's own tensors; a call that is not kept keeps nothing."""
    kept: list[Modifiers] = []
    arguments = calls.modifier_arguments
    monkeypatch.setattr(calls, "modifier_arguments", lambda mods: (kept.append(mods), arguments(mods))[1])
    bias = biases(learned)[name]
    flash_ext.attention(*qkv(), bias=bias)
    own = {t.untyped_storage().data_ptr() for t in bias._tensors()}
    held = [t for mods in kept for t in (mods.bias, mods.slopes) if t is not None]
    copies = [t for t in held if t.untyped_storage().data_ptr() not in own]
    assert bias.describe(ROWS, KEYS).kept == sum(t.nbytes for t in copies)


def test_rows_that_do_not_begin_on_16_bytes_are_kept_in_others() -> None:
    """Rows of 197 elements become rows of 200."""
    n, heads = 197, 8
    full = torch.randn(heads, n, n)
    wide = torch.randn(heads, n, 200)
    for tensor, want in (
        (full, 4 * heads * n * 200),
        (full.bfloat16(), 2 * heads * n * 200),
        (full[:, :1], 4 * heads * 200),
        (wide[..., :n], 0),
        (wide[..., 1 : n + 1], 4 * heads * n * 200),
        (full.transpose(1, 2), 4 * heads * n * 200),
        (torch.randn(heads, n, 400)[..., : 2 * n : 2], 4 * heads * n * 200),
        (full[:, :, :1], 0),
        (full[:, :1].expand(heads, n, n), 4 * heads * 200),
        (wide[:, :1, :n].expand(heads, n, n), 0),
        (full.clone().requires_grad_(), 0),
    ):
        found = masks.DenseBias(tensor).describe(n, n, batch=3)
        assert found.kept == want, tensor.shape
        assert found.memory == distinct_bytes(tensor)
        if want:
            copy = with_aligned_rows(tensor[None, :, :1] if tensor.stride(1) == 0 else tensor[None])
            assert want == copy.untyped_storage().nbytes()
    for length, want in ((63, 0), (65, 4 * 65 * 72)):  # short sequences are read as they are
        assert masks.DenseBias(torch.zeros(length, length)).describe(length, length).kept == want
    assert masks.DenseBias(torch.zeros(2, 1, 63)).describe(65, 63).kept == 4 * 2 * 64
    half = masks.ALiBi(torch.ones(heads).half())
    assert (masks.DenseBias(full) + half).describe(n, n).kept == 4 * heads * n * 200 + 4 * heads
    learned = masks.ALiBi(torch.ones(heads).half().requires_grad_())
    assert (masks.DenseBias(full) + learned).describe(n, n).kept == 0  # a gradient goes through what is made


def test_a_bias_in_double_precision() -> None:
    """q has it too, and so have slopes."""
    bias = masks.DenseBias(torch.randn(ROWS, KEYS).double()) + masks.ALiBi(torch.rand(HEADS).double())
    with Operators() as seen:
        flash_ext.attention(*qkv(torch.float64), bias=bias)
    found = bias.describe(ROWS, KEYS)
    assert found.memory == distinct_bytes(*seen.read) == 8 * (ROWS * KEYS + HEADS) and found.kept == 0


def test_refusals_are_those_of_calls() -> None:
    row, column = (masks.DenseBias(torch.zeros(shape)) for shape in ((ROWS, 1), (1, KEYS)))
    alibi, position = masks.ALiBi(torch.ones(HEADS)), masks.RelativePosition(torch.zeros(HEADS, 32))
    for bias in (row + column, alibi + alibi, position + row, position + position):
        with pytest.raises(ValueError) as refused:
            flash_ext.attention(*qkv(), bias=bias)
        found = bias.describe(ROWS, KEYS, batch=BATCH, num_heads=HEADS)
        assert found == (None, None, None, str(refused.value))
        assert str(found) == found.refusal


def test_a_tensor_that_does_not_fit_raises() -> None:
    alibi, position = masks.ALiBi(torch.ones(3)), masks.RelativePosition(torch.zeros(2, 32))
    for bias, options, words in (
        (masks.DenseBias(torch.zeros(3, 4)), {}, r"DenseBias: tensor must broadcast to .*, got \(3, 4\)"),
        (alibi, {"num_heads": 2}, r"ALiBi: slopes must have .*here \(2,\) or \(1, 2\), got \(3,\)"),
        (position, {"num_heads": 3}, r"RelativePosition: table must have shape \(3 or 1, buckets\)"),
        (alibi + position, {}, r"must agree in batch and num_heads, or have 1, got \(1, 3\) and \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=words):
            bias.describe(ROWS, KEYS, **options)


def test_a_description_prints_itself() -> None:
    table = torch.zeros(8, 32)
    assert str(masks.RelativePosition(table).describe(10, 10)) == (
        "8224 bytes are read by a forward\n8224 bytes of copies are kept on a GPU\n0 bytes of gradient"
    )
    found = masks.DenseBias(torch.zeros(8, 4, 4, dtype=torch.bfloat16, requires_grad=True)).describe(4, 4)
    assert str(found) == (
        "256 bytes are read by a forward\n0 bytes of copies are kept on a GPU\n256 bytes of gradient"
    )


def test_describe_forms_nothing_of_the_size_of_the_scores() -> None:
    n = 4001
    learned = torch.zeros(8, 1, n, requires_grad=True)
    assert masks.DenseBias(torch.empty(8, n, n, device="meta")).describe(n, n).kept == 4 * 8 * n * 4008
    with PeakMemory() as peak:
        assert masks.DenseBias(learned.expand(8, n, n)).describe(n, n).gradient == 4 * 8 * n
        (masks.RelativePosition(torch.zeros(8, 32)) + masks.ALiBi(torch.ones(8).half())).describe(n, n)
    assert 0 < peak.most < n * n // 16


# ---- pictures -----------------------------------------------------------------------------------------


@pytest.fixture
def pyplot() -> Any:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    yield pytest.importorskip("matplotlib.pyplot")
    matplotlib.pyplot.close("all")


def image_of(ax: Any) -> Tensor:
    """NaN where it is blank."""
    return torch.tensor(ax.images[-1].get_array().filled(torch.nan))


@pytest.mark.parametrize("name", biases(False))
def test_a_picture_has_the_numbers_of_each_batch_entry_and_head(name: str, pyplot: Any) -> None:
    for learned in (False, True):
        bias = biases(learned)[name]
        dense = bias.to_dense(ROWS, KEYS).detach().float().expand(BATCH, HEADS, ROWS, KEYS)
        for b, h in ((0, 1), (1, 3)):
            ax = bias.plot(ROWS, KEYS, batch_index=b, head_index=h)
            torch.testing.assert_close(image_of(ax), dense[b, h])
            pyplot.close("all")


@pytest.mark.parametrize("piece", [1 << 22, 1000])
def test_a_picture_of_a_long_bias_has_means(piece: int, pyplot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in pieces. What is not finite does not count, and a point of nothing else is blank."""
    monkeypatch.setattr("flash_ext._masks.dense.PIECE", piece)
    hidden = torch.arange(1030) >= 1000
    hidden[1] = True
    bias = masks.ALiBi(torch.tensor([0.5, 0.25])) + masks.DenseBias(
        torch.zeros(1030).masked_fill(hidden, -torch.inf)
    )
    ax = bias.plot(700, 1030, head_index=1)
    dense = bias.to_dense(700, 1030)[0, 1].masked_fill(hidden, torch.nan)
    rows = dense.unflatten(0, (350, 2))
    want = torch.stack([rows[:, :, j : j + 3].flatten(1).nanmean(1) for j in range(0, 1030, 3)], 1)
    image = image_of(ax)
    assert image.shape == (350, 344)
    torch.testing.assert_close(image, want, equal_nan=True)
    assert image[:, 334:].isnan().all() and not image[:, :334].isnan().any()
    own, bar = ax.figure.axes
    shown = want[:, :334]
    assert own is ax and bar.get_ylim() == pytest.approx((shown.min().item(), shown.max().item()))
    assert bias.plot(700, 1030, ax) is ax
    ax.figure.canvas.draw()


def test_pictures_of_nothing_are_drawn(pyplot: Any) -> None:
    hidden = masks.DenseBias(torch.full((3, 3), -torch.inf)).plot(3, 3)
    assert image_of(hidden).isnan().all()
    hidden.figure.canvas.draw()
    with pytest.warns(UserWarning, match="identical low and high ylims"):
        masks.ALiBi(torch.ones(1)).plot(0, 3).figure.canvas.draw()


def test_a_picture_forms_nothing_of_the_size_of_the_scores(
    pyplot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 3000
    monkeypatch.setattr("flash_ext._masks.dense.PIECE", 1 << 16)
    bias = masks.RelativePosition(torch.randn(4, 32)) + masks.ALiBi(torch.rand(4))
    with PeakMemory() as peak:
        bias.plot(length, length)
    assert 0 < peak.most < length**2 // 2


def test_plot_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="head_index must be from 0 to 2, got 3"):
        masks.ALiBi(torch.ones(3)).plot(4, 4, head_index=3)
    with pytest.raises(ValueError, match="DenseBias: tensor must broadcast to"):
        masks.DenseBias(torch.zeros(3, 4)).plot(4, 4)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'plot needs matplotlib: pip install "flash_ext\[demo\]"'):
        masks.ALiBi(torch.ones(3)).plot(4, 4)
