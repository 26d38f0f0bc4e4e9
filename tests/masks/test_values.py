"""Masks and biases as objects: they cannot change, compare without a look at values, and travel."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_ext
from flash_ext import masks
from flash_ext._masks.lower import terms_for
from flash_ext._masks.value import Sizes, Value
from tests.qkv import on_devices

IDS = torch.tensor([0, 0, 1, 1])
TRUTH = torch.ones(4, 4).tril() > 0
TABLE = torch.zeros(2, 32)


def cut_blocks() -> masks.BlockMask:
    return masks.BlockMask.from_dense(TRUTH, 16)


VALUES: dict[str, Callable[[], Value]] = {
    "causal": lambda: masks.Causal(), "causal top left": lambda: masks.Causal("top_left"),
    "window": lambda: masks.Window(3, -1), "chunks": lambda: masks.Chunks(2),
    "prefix": lambda: masks.Prefix(IDS[:1]), "sink tokens": lambda: masks.SinkTokens(2),
    "documents": lambda: masks.Documents(IDS), "two ids": lambda: masks.Documents(IDS, IDS),
    "keys": lambda: masks.KeyMask(TRUTH[3]), "rows": lambda: masks.HiddenRows(IDS[:, None].expand(4, 2)),
    "row keys": lambda: masks.HiddenKeys(IDS[:, None].expand(4, 2)),
    "blocks": lambda: masks.BlockMask(TRUTH[:1, :1], 16), "cut blocks": cut_blocks,
    "dense": lambda: masks.Dense(TRUTH), "tree": lambda: masks.TokenTree(IDS),
    "and": lambda: masks.Causal() & masks.Documents(IDS) & masks.Dense(TRUTH),
    "or": lambda: masks.Causal() | masks.Prefix(IDS[:1]), "not": lambda: ~masks.Dense(TRUTH),
    "dense bias": lambda: masks.DenseBias(torch.zeros(4, 4)), "alibi": lambda: masks.ALiBi(torch.ones(2)),
    "position": lambda: masks.RelativePosition(TABLE),
    "sum": lambda: masks.ALiBi(torch.ones(2)) + masks.DenseBias(torch.zeros(4, 4)),
}  # fmt: skip
each_value = pytest.mark.parametrize("name", VALUES)


def shows(value: Value) -> Tensor:
    return value.to_dense(4, 4)


def fields_of(value: Value) -> list[object]:
    return [torch.is_tensor(leaf) and leaf.tolist() for leaf in pytree.tree_leaves(value)]


# ---- one by one ---------------------------------------------------------------------------------------


@each_value
def test_a_value_cannot_be_changed(name: str) -> None:
    value = VALUES[name]()
    for attribute in (value._FIELDS[0], "new"):
        with pytest.raises(AttributeError, match=f"cannot be changed: make a new {type(value).__name__}"):
            setattr(value, attribute, None)
        with pytest.raises(AttributeError, match="cannot be changed"):
            delattr(value, attribute)
    assert not hasattr(value, "__dict__")


@each_value
def test_values_travel(name: str, tmp_path) -> None:
    """Through pickle, deepcopy, torch.save with torch.load's default, and .to()."""
    value = VALUES[name]()
    assert copy.copy(value) is value
    file = tmp_path / "value.pt"
    torch.save({"mask": value}, file)
    others = [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(2, 6)]
    others += [copy.deepcopy(value), value.to("cpu"), torch.load(file)["mask"]]
    for other in others:
        assert type(other) is type(value) and repr(other) == repr(value)
        assert fields_of(other) == fields_of(value)
        assert torch.equal(shows(other), shows(value))
    assert copy.deepcopy([value, value])[0] is not value


@each_value
def test_equal_is_the_same_class_numbers_and_tensors(name: str) -> None:
    value, fields = VALUES[name](), VALUES[name]()._fields()
    again = object.__new__(type(value))
    again._fill(*value._fields())
    assert (value == again) is True and hash(value) == hash(again)
    for at, field in enumerate(fields):
        if isinstance(field, Tensor):
            other = object.__new__(type(value))
            other._fill(*fields[:at], field.clone(), *fields[at + 1 :])
            assert (value == other) is False
    for other in (None, 3, TRUTH, masks.Window(5), "causal"):
        assert (value == other) is False and (other == value) is False or isinstance(other, Tensor)


@each_value
def test_repr_shows_no_values(name: str) -> None:
    """It must not wait for a device: here every look at a value raises."""
    value, mode = VALUES[name](), FakeTensorMode()
    fake = pytree.tree_map(mode.from_tensor, value)  # has no values, and raises where they are looked at
    with mode:
        assert repr(fake) == repr(value)


# ---- signs --------------------------------------------------------------------------------------------


def test_expressions_are_flat_in_the_order_written() -> None:
    a, b, c = masks.Causal(), masks.Chunks(2), masks.Dense(TRUTH)
    assert (a & b & c).masks == (a & (b & c)).masks == (a, b, c)
    assert (a | (b | c)).masks == (a, b, c)
    assert ~~(a & b) == a & b
    assert (a | b & c).masks == (a, b & c)  # as Python has it


@each_value
def test_a_value_has_no_truth_value(name: str) -> None:
    with pytest.raises(TypeError, match="has no truth value: (combine masks with & and |join biases with +)"):
        bool(VALUES[name]())
    with pytest.raises(TypeError, match="no truth value"):
        VALUES[name]() and masks.Causal()


@pytest.mark.parametrize("other, words", [
    (TRUTH, "joins masks, got Tensor. A bool tensor is a mask as Dense"),
    (torch.zeros(4, 4), r"joins masks, got Tensor. A float one is a bias.*DenseBias\(tensor\)"),
    (masks.ALiBi(torch.ones(2)), "joins masks, got ALiBi. A bias is added to the scores: give it as bias="),
    (None, "joins masks, got NoneType"),
    (True, "joins masks, got bool"),
])  # fmt: skip
def test_masks_join_masks_only(other: object, words: str) -> None:
    for sign, join in (("&", lambda a, b: a & b), (r"\|", lambda a, b: a | b)):
        with pytest.raises(TypeError, match=f"{sign} {words}"):
            join(masks.Causal(), other)
        with pytest.raises(TypeError, match=sign):
            join(other, masks.Causal())


def test_a_mask_is_not_added() -> None:
    for other in (masks.Window(1, 1), TRUTH, 1):
        with pytest.raises(TypeError, match=r"A mask is not added: a & b .*, a \| b"):
            masks.Causal() + other


@pytest.mark.parametrize("other, words", [
    (torch.zeros(4, 4), r"\+ joins biases, got Tensor. A float tensor is a bias as DenseBias"),
    (TRUTH, r"\+ joins biases, got Tensor. A mask shows or hides: give it as mask="),
    (masks.Causal(), r"\+ joins biases, got Causal. A mask shows or hides"),
    (1.0, r"\+ joins biases, got float"),
])  # fmt: skip
def test_biases_join_biases_only(other: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        masks.ALiBi(torch.ones(2)) + other
    with pytest.raises(TypeError):
        other + masks.ALiBi(torch.ones(2))


# ---- what is kept, and for how long -------------------------------------------------------------------


@each_value
def test_a_value_dies_with_its_last_reference(name: str) -> None:
    """Its tensors are memory of a GPU, which must not wait for the garbage collector."""
    value = VALUES[name]()
    if isinstance(value, masks.Mask) and not name.startswith(("prefix", "tree")):
        value.normal()
    gc.disable()
    try:
        death = weakref.ref(value)
        del value
        assert death() is None
    finally:
        gc.enable()


def test_the_normal_form_is_made_once_an_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_ext._masks import normal

    calls = []
    original = normal.normal_of
    monkeypatch.setattr(normal, "normal_of", lambda mask: calls.append(mask) or original(mask))
    mask = masks.DocumentCausal(IDS)
    for _ in range(3):
        terms_for(mask, None, Sizes(False, 1, 1, 4, 4))
    assert len(calls) == 1


# ---- pytree -------------------------------------------------------------------------------------------


@each_value
def test_leaves_are_the_tensors(name: str) -> None:
    value = VALUES[name]()
    leaves, spec = pytree.tree_flatten(value)
    assert all(torch.is_tensor(leaf) for leaf in leaves)
    assert {id(leaf) for leaf in leaves} == {id(tensor) for tensor in value._tensors()}
    again = pytree.tree_unflatten(leaves, spec)
    assert again == value
    loaded = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert loaded == spec and pytree.tree_unflatten(leaves, loaded) == value
    json.loads(pytree.treespec_dumps(spec))
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
    assert all(key.startswith(f".{name}") for key, name in zip(keys[:1], value._CHILDREN))
    assert pytree.tree_flatten(pytree.tree_map(lambda _: 0, value))[0] == [0] * len(leaves)


def test_vmap_and_grad_reach_the_tensors() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])
    shown = torch.vmap(lambda mask: mask.to_dense(4, 4)[0, 0])(masks.Documents(ids))
    assert torch.equal(shown, ids[:, :, None] == ids[:, None])

    def loss(bias: masks.Bias) -> Tensor:
        return (bias.to_dense(4, 4) * torch.arange(16.0).view(4, 4)).sum()

    gradient = torch.func.grad(loss)(masks.DenseBias(torch.zeros(4, 4)))
    assert isinstance(gradient, masks.DenseBias)
    assert torch.equal(gradient.tensor, torch.arange(16.0).view(4, 4))


def test_a_compiled_function_takes_values() -> None:
    """As arguments, and made inside; other tensors of the same structure need no other graph."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def layer(q: Tensor, mask: masks.Mask) -> Tensor:
        return flash_ext.attention(q, q, q, mask=mask & masks.Window(2, -1))

    q = torch.randn(1, 4, 1, 8)
    for ids in (IDS, torch.tensor([0, 1, 1, 1])):
        want = masks.DocumentCausal(ids) & masks.Window(2, -1)
        torch.testing.assert_close(
            layer(q, masks.DocumentCausal(ids)), flash_ext.attention(q, q, q, mask=want.to_dense(4, 4))
        )
    assert counter.frame_count == 1


def test_to_moves_and_refuses_two_devices() -> None:
    mask = masks.Causal() & masks.Documents(IDS)
    moved = mask.to("meta")
    assert (str(mask.device), str(moved.device), masks.Causal().device) == ("cpu", "meta", None)
    assert repr(moved) == "Causal() & Documents(ids=int64 (4,) meta)"
    with pytest.raises(ValueError, match=r"must be on one device, got cpu and meta: use .to\(device\)"):
        (moved & mask).device  # noqa: B018


def test_a_cut_block_mask_keeps_bits_only() -> None:
    """4096 x 4096 pairs: 2 kB a cut block, nothing of the size of the scores."""
    mask = masks.BlockMask.from_mask(masks.SlidingWindow(512, sink_tokens=4), 4096, 4096)
    kept = sum(tensor.numel() * tensor.element_size() for tensor in mask._tensors())
    assert mask.bits is not None and mask.bits.shape[1:] == (128, 4)
    assert kept == 5 * 32 * 32 + 2048 * len(mask.bits) < 300_000
    file = io.BytesIO()
    torch.save(mask, file)
    assert file.tell() < 320_000


@each_value
def test_wrappers_of_modules_hand_a_value_through(name: str) -> None:
    """FSDP casts the floating tensors that it finds in containers and dataclasses."""
    from torch.distributed.utils import _apply_to_tensors

    value = VALUES[name]()
    args = _apply_to_tensors(lambda tensor: tensor.to(torch.bfloat16), (value, {"mask": value}))
    assert args[0] is value and args[1]["mask"] is value


@pytest.mark.parametrize("shape", [(40, 50), (2, 1, 40, 50), (1, 2, 40, 50), (50,), (40, 1), (2, 1, 1, 50)])
@pytest.mark.parametrize("heads", [1, 2])
def test_elements_of_a_block_mask(shape: tuple[int, ...], heads: int) -> None:
    """Bits are what was given, also where it repeats, and blocks that hide everything leave the map."""
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = torch.rand(1, heads, 3, 4, generator=generator) < 0.7
    elements = torch.rand(shape, generator=generator) < 0.5
    elements[..., :16] = elements[..., 32:48] = False
    mask = masks.BlockMask(blocks, 16, elements)
    keep = blocks.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :40, :50] & elements
    assert torch.equal(mask.to_dense(40, 50), keep)
    assert torch.equal((~mask).to_dense(40, 50), ~keep)
    if shape[-1] == 50:
        assert not mask.blocks[..., [0, 2]].any()
    q, k = torch.randn(2, 40, 2, 8), torch.randn(2, 50, 2, 8)
    out = flash_ext.attention(q, k, k, mask=mask)
    torch.testing.assert_close(out, flash_ext.attention(q, k, k, mask=keep))


def test_elements_of_a_block_mask_end_where_they_were_given_to() -> None:
    """In packed calls what lies beyond is hidden; a longer mask than the map is cut."""
    blocks, truth = torch.ones(2, 2) > 0, torch.ones(20, 25) > 0
    truth[3, 4] = False
    mask = masks.BlockMask(blocks, 16, truth)
    assert mask.lengths == (20, 25) and torch.equal(mask.elements, truth[None, None])
    q = torch.randn(30, 1, 8)
    cu = torch.tensor([0, 30], dtype=torch.int32)
    out = flash_ext.attention_varlen(q, q, q, cu, cu, mask=mask)
    keep = torch.zeros(30, 30) > 0
    keep[:20, :25] = truth
    torch.testing.assert_close(out, flash_ext.attention(q[None], q[None], q[None], mask=keep)[0])
    assert masks.BlockMask(blocks, 16, torch.ones(40, 1) > 0).lengths == (32, None)
    # Whether there are bits does not depend on what they are.
    assert masks.BlockMask(blocks, 16, torch.ones(32, 32) > 0).elements.all()


def test_nothing_to_see() -> None:
    """Lengths of 0 everywhere."""
    for lengths in ((0, 4), (4, 0), (0, 0)):
        ids = [torch.zeros(n, dtype=torch.int32) for n in lengths]
        intervals = torch.zeros(lengths[1], 2).int()
        for mask in (masks.Causal(), masks.Dense(torch.ones(1) > 0), masks.Causal() | masks.Chunks(2),
                     masks.Documents(*ids), masks.HiddenRows(intervals)):  # fmt: skip
            assert mask.to_dense(*lengths).shape == (1, 1, *lengths)
            assert mask.describe(*lengths)[:4] == (0.0, 0, 0, 0)
            blocks = masks.BlockMask.from_mask(mask, *lengths)
            assert blocks.blocks.numel() == 0 and blocks.bits is None


def test_a_mask_is_an_input_of_an_exported_program(tmp_path) -> None:
    """Saved and loaded, with other ids; a mask of other numbers is another structure."""

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, mask: masks.Mask) -> Tensor:
            return flash_ext.attention(q, q, q, mask=mask)

    q = torch.randn(1, 4, 1, 8)
    program = torch.export.export(Layer(), (q, masks.DocumentCausal(IDS)))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    mask = masks.DocumentCausal(torch.tensor([0, 1, 1, 1]))
    want = flash_ext.attention(q, q, q, mask=mask.to_dense(4, 4))
    torch.testing.assert_close(loaded(q, mask), want)
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        loaded(q, masks.Documents(IDS))


@on_devices
def test_blocks_and_builders_on_a_device(device: str) -> None:
    """Condensing, bits and conversions give what they give on the CPU."""
    ids = torch.arange(150) // 60
    tree = masks.prefix_tree([-1, 0, 0], [0, 50, 90, 150])
    for mask in (tree & masks.Documents(ids), masks.spans(ids) | masks.Chunks(32), ~masks.Dense(ids > 0)):
        want = mask.to_dense(150, 150)
        moved = mask.to(device)
        assert torch.equal(moved.to_dense(150, 150).cpu(), want)
        assert moved.describe(150, 150)[:4] == mask.describe(150, 150)[:4]
        blocks = masks.BlockMask.from_mask(moved, 150, 150, block_size=(32, 48))
        assert blocks.blocks.device.type == device
        assert torch.equal(blocks.to_dense(150, 150).cpu(), want)
        again = masks.BlockMask.from_torch(moved.to_torch(150, 150))
        assert torch.equal(again.to_dense(150, 150).cpu(), want)
        q = torch.randn(1, 150, 2, 64, device=device, dtype=torch.float16)
        for given in (blocks, ~blocks | (blocks & masks.BlockMask.from_dense(want.to(device), 16))):
            keep = given.to_dense(150, 150)
            out = flash_ext.attention(q, q, q, mask=given)
            expected = flash_ext.attention(q, q, q, mask=keep)
            torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
