"""``flash_ext::condense``: each layout packs and unpacks, and calls read what is condensed as what is not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_ext._cpu import condensed
from flash_ext._ops.library_mod import modifier_arguments
from flash_ext._ops.modifiers import Modifiers
from tests.qkv import make_qkv, on_devices

CONDENSE = torch.ops.flash_ext.condense.default
FWD, BWD = torch.ops.flash_ext.fwd_mod.default, torch.ops.flash_ext.bwd_mod.default
LENGTHS = (0, 1, 2, 31, 32, 33, 63, 64, 65, 130)


def bits_of(words: Tensor) -> Tensor:
    """One number at a time, by hand."""
    return torch.stack([(words >> i) & 1 for i in range(32)], -1).flatten(-2).bool()


@on_devices
@pytest.mark.parametrize("rows", LENGTHS)
def test_a_mask_and_its_groups(rows: int, device: str) -> None:
    for cols in LENGTHS:
        mask = torch.rand(2, 3, rows, cols, device=device) > 0.4
        mask[:, :, : rows // 2, : cols // 2] = True
        mask[:, :, rows // 2 :, : cols // 3] = False
        if rows > 2 and cols > 2:  # any strides
            mask = mask.mT.contiguous().mT
        got = CONDENSE(mask)
        groups, has_tiles = -(-rows // 64), rows >= 64 and cols != 1
        words = [] if cols == 1 else [-(-cols // 128) * 4]
        assert got.shape == (2, 3, rows + (66 if has_tiles else 2) * groups, *words)
        if cols == 1:
            assert torch.equal(got[:, :, :rows], -mask[..., 0].int())
            got = got[..., None]
        bits = bits_of(got)[..., :cols]
        assert torch.equal(bits[:, :, :rows], mask)
        for g in range(groups):
            part = mask[:, :, 64 * g : 64 * g + 64]
            assert torch.equal(bits[:, :, rows + g], part.any(2))
            assert torch.equal(bits[:, :, rows + groups + g], part.all(2))
        if cols > 1:
            assert not bits_of(got[:, :, :rows])[..., cols:].any()
            plain = condensed.plain_mask(got.cpu())
            assert torch.equal(plain[..., :cols], mask.cpu()) and not plain[..., cols:].any()
        if has_tiles:
            check_tiles(got[:, :, rows + 2 * groups :].unflatten(2, (groups, 64)).flatten(-2), mask)
        assert condensed.rows_of_mask(got.shape[2], cols == 1) == rows


def check_tiles(tiles: Tensor, mask: Tensor) -> None:
    """``tiles``: (batch, heads, groups, all words of a group). Bit by bit, as csrc/condensed.h has it."""
    word, bit = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    row = (bit // 16 * 32 + bit % 8 // 2 * 8 + word % 4 * 2 + bit % 2).to(mask.device)
    col = (word // 4 + bit % 16 // 8 * 8).to(mask.device)
    rows, cols = mask.shape[2:]
    whole = F.pad(mask, (0, -cols % 128, 0, -rows % 64))
    for group, tile in itertools.product(range(tiles.shape[2]), range(tiles.shape[3] // 32)):
        got = bits_of(tiles[:, :, group, 32 * tile : 32 * tile + 32, None])
        assert torch.equal(got, whole[:, :, 64 * group + row, 16 * tile + col])


@on_devices
@pytest.mark.parametrize("size", [(16, 16), (32, 128), (512, 48)])
def test_a_block_map(size: tuple[int, int], device: str) -> None:
    for row_blocks, key_blocks in itertools.product((0, 1, 3), (0, 1, 2, 5)):
        blocks = torch.rand(2, 1, row_blocks, key_blocks, device=device) > 0.5
        got = CONDENSE(blocks, *size)
        granules = blocks.repeat_interleave(size[0] // 16, 2).repeat_interleave(size[1] // 16, 3)
        assert got.shape == (2, 1, granules.shape[2], -(-granules.shape[3] // 32))
        bits, cols = bits_of(got), granules.shape[3]
        assert torch.equal(bits[..., :cols], granules) and not bits[..., cols:].any()


@on_devices
@pytest.mark.parametrize("length", LENGTHS)
def test_ids_and_their_groups(length: int, device: str) -> None:
    for lead in ((), (3,)):
        ids = torch.randint(-5, 1000, (*lead, length), device=device, dtype=torch.int32)
        got = CONDENSE(ids)
        first = length + length % 2
        assert got.shape == (*lead, first + 2 * -(-length // 32))
        assert torch.equal(got[..., :length], ids) and not got[..., length:first].any()
        for g in range(-(-length // 32)):
            part = ids[..., 32 * g : 32 * g + 32]
            assert torch.equal(got[..., first + 2 * g], part.amin(-1))
            assert torch.equal(got[..., first + 2 * g + 1], part.amax(-1))


@on_devices
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_intervals_and_their_groups(length: int, count: int, device: str) -> None:
    for lead in ((2,), (2, 3)):
        x = torch.randint(0, 1000, (*lead, length, 2 * count), device=device, dtype=torch.int32)
        got = CONDENSE(x)
        numbers = 2 * count * length
        first = numbers + -numbers % 4
        assert got.shape == (*lead, first + 4 * count * -(-length // 32))
        assert torch.equal(got[..., :numbers], x.flatten(-2)) and not got[..., numbers:first].any()
        for g, k in itertools.product(range(-(-length // 32)), range(count)):
            part = x[..., 32 * g : 32 * g + 32, 2 * k : 2 * k + 2]
            at = first + 4 * (count * g + k)
            ends = [bound(part[..., side], -1) for side in (0, 1) for bound in (torch.amin, torch.amax)]
            assert torch.equal(got[..., at : at + 4], torch.stack(ends, -1))


def inputs_of_condense(device: str = "cpu") -> dict[str, tuple]:
    whole = torch.randint(0, 9, (3, 70), device=device, dtype=torch.int32)
    pairs = torch.randint(0, 70, (3, 2, 33, 4), device=device, dtype=torch.int32)
    return {
        "mask": (torch.rand(3, 2, 70, 40, device=device) > 0.5,),
        "column": (torch.rand(3, 2, 70, 1, device=device) > 0.5,),
        "blocks": (torch.rand(3, 2, 5, 7, device=device) > 0.5, 32, 48),
        "ids": (whole,),
        "packed ids": (whole[0],),
        "intervals": (pairs,),
        "packed intervals": (pairs[0],),
    }


@on_devices
@pytest.mark.parametrize("kind", inputs_of_condense())
def test_opcheck_of_condense(kind: str, device: str) -> None:
    torch.library.opcheck(CONDENSE, inputs_of_condense(device)[kind])


@pytest.mark.parametrize("kind", inputs_of_condense())
def test_condense_commutes_with_slices_and_is_mapped(kind: str) -> None:
    x, *size = inputs_of_condense()[kind]
    whole = CONDENSE(x, *size)
    if "packed" not in kind:
        assert torch.equal(CONDENSE(x[1:], *size), whole[1:])
        if x.dim() > 2:
            assert torch.equal(CONDENSE(x[:, 1:], *size), whole[:, 1:])
    both = torch.stack([x, x.flip(-1)], 1)
    mapped = torch.vmap(lambda t: CONDENSE(t, *size), in_dims=1)(both)
    assert torch.equal(mapped, torch.stack([whole, CONDENSE(x.flip(-1), *size)]))
    with FakeTensorMode() as mode:
        assert CONDENSE(mode.from_tensor(x), *size).shape == whole.shape
    assert CONDENSE(x.to("meta"), *size).shape == whole.shape


@pytest.mark.parametrize(
    ("x", "size", "error", "words"),
    [
        (torch.zeros(1, 1, 2, 2), (), TypeError, "condense takes a bool mask or block map, or int32 ids"),
        (torch.zeros(2, 2).bool(), (), ValueError, "4 dimensions"),
        (torch.zeros(1, 1, 2, 2).bool(), (16, 0), ValueError, r"multiples of 16, .*got \(16, 0\)"),
        (torch.zeros(1, 1, 2, 2).bool(), (8, 16), ValueError, r"multiples of 16, .*got \(8, 16\)"),
        (torch.zeros(3, dtype=torch.int32), (16, 16), ValueError, "ids of 1 or 2"),
        (torch.zeros(1, 3, 3, dtype=torch.int32), (), ValueError, "2 or 4 numbers, got 3"),
    ],
)
def test_condense_refuses(x: Tensor, size: tuple, error: type[Exception], words: str) -> None:
    for device in ("cpu", "meta"):
        with pytest.raises(error, match=words):
            CONDENSE(x.to(device), *size)


# ---- what the operators take ---------------------------------------------------------------------------


def every_mask(
    device: str, packed: bool, rows: int = 70, keys: int = 90, heads: int = 4
) -> dict[str, Modifiers]:
    """Modifiers of a dense call of batch 2, or of three packed sequences."""

    def intervals(length: int, other: int, pairs: int) -> Tensor:
        shape = (heads, length, pairs, 2) if packed else (2, heads, length, pairs, 2)
        ends = torch.randint(0, other, shape, device=device)
        return ends.sort(-1)[0].flatten(-2).int()

    def ids(length: int) -> Tensor:
        lead = () if packed else (2,)
        return (torch.arange(length, device=device) // 30 - 1).expand(*lead, length).contiguous().int()

    def seen(*shape: int) -> Tensor:
        return torch.rand(shape, device=device) > 0.3

    lead = 3 if packed else 2
    return {
        "mask": Modifiers(mask=seen(lead, heads, rows, keys).mT.contiguous().mT),
        "rows": Modifiers(mask=seen(lead, 1, rows, 1)),
        "keys": Modifiers(mask=seen(1, heads, 1, keys)),
        "nothing": Modifiers(mask=torch.zeros(1, 1, 1, 1, device=device).bool()),
        "documents": Modifiers(document_q=ids(rows), document_k=ids(keys)),
        "hidden rows": Modifiers(hidden_rows=intervals(keys, rows, 1)),
        "hidden keys": Modifiers(hidden_keys=intervals(rows, keys, 2)),
        "blocks": Modifiers(
            blocks=seen(lead, 1, -(-rows // 32), -(-keys // 48)), block_rows=32, block_cols=48
        ),
    }


def condensed_form(mods: Modifiers) -> Modifiers:
    names = ("mask", "document_q", "document_k", "hidden_rows", "hidden_keys")
    own = {name: CONDENSE(getattr(mods, name)) for name in names if getattr(mods, name) is not None}
    if mods.blocks is not None:
        own["blocks"] = CONDENSE(mods.blocks, mods.block_rows, mods.block_cols)
    return replace(mods, **own)


def operands(device: str, packed: bool) -> tuple[Tensor | None, ...]:
    """q, k, v and cu_seqlens of a call that :func:`every_mask` masks."""
    q, k, v = make_qkv(device, seqlen_q=70, seqlen_k=90)
    if not packed:
        return q, k, v, None, None
    bounds = (torch.tensor([0, 11, n - 20, n], dtype=torch.int32, device=device) for n in (70, 90))
    return q[0], k[0], v[0], *bounds


@on_devices
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", every_mask("cpu", False))
def test_a_call_reads_condensed_masks_as_plain_ones(kind: str, packed: bool, device: str) -> None:
    q, k, v, *cu = operands(device, packed)
    mods = every_mask(device, packed)[kind]
    results = []
    for given in (mods, condensed_form(mods)):
        args = (*cu, 0, 0, 0.3, -1, 20, *modifier_arguments(given))
        out, lse, _ = FWD(q, k, v, *args, False, False, None)
        grads = BWD(out, q, k, v, out, lse, None, *args, True, False, False, False, True, None)
        results.append((out, lse, *grads[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_of_calls_with_condensed_masks(packed: bool) -> None:
    """With every kind at once. A mask of one column, of rows, has a form of its own."""
    q, k, v, *cu = operands("cpu", packed)
    one = every_mask("cpu", packed)
    every = replace(
        one["blocks"],
        mask=one["mask"].mask,
        document_q=one["documents"].document_q,
        document_k=one["documents"].document_k,
        hidden_rows=one["hidden rows"].hidden_rows,
        hidden_keys=one["hidden keys"].hidden_keys,
    )
    for mods in (every, one["rows"], one["keys"]):
        args = (*cu, 0, 0, 0.3, -1, 20, *modifier_arguments(condensed_form(mods)))
        torch.library.opcheck(FWD, (q, k, v, *args, False, False, None))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("packed", [False, True])
def test_condensed_masks_of_other_sizes_are_refused(packed: bool, device: str) -> None:
    tensors = [t if t is None else t.to(device) for t in operands("cpu", packed)]
    for name, mods in every_mask("cpu", packed, rows=140, keys=223).items():
        if name == "nothing" or (packed and name in ("mask", "rows", "keys", "blocks")):
            continue
        own = modifier_arguments(condensed_form(mods))
        args = [t.to(device) if isinstance(t, Tensor) else t for t in own]
        with pytest.raises(ValueError, match="must have shape"):
            FWD(*tensors, 0, 0, 0.3, -1, -1, *args, False, False, None)
    if packed:  # no number of rows gives a mask of 67
        wrong = modifier_arguments(Modifiers(mask=torch.zeros(1, 1, 67, 3, dtype=torch.int32, device=device)))
        with pytest.raises(ValueError, match="rows and those of its groups and tiles .*, got 67"):
            FWD(*tensors, 0, 0, 0.3, -1, -1, *wrong, False, False, None)
