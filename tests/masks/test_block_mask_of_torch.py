"""BlockMask.from_torch: what a torch BlockMask holds is looked at before it is followed.

On a GPU an index outside that is followed ends in an assertion of the device, after which the process has
lost the GPU. So these tests go on with the device after every refusal. torch's constructors follow indices:
bad ones are put in afterwards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import create_block_mask

import flash_ext
from tests.qkv import on_devices

SIZE, ROWS, COLUMNS = 16, 3, 4
LOWEST, HIGHEST = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max


def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i + 4 >= j


def of_torch(device: str, full: bool = True) -> TorchBlockMask:
    """(1, 2, 3, 4) blocks; two lists of key blocks, or one."""
    made = create_block_mask(rule, 1, 2, ROWS * SIZE, COLUMNS * SIZE, device=device, BLOCK_SIZE=SIZE)
    if full:
        return made
    both = made.kv_num_blocks + made.full_kv_num_blocks
    indices = torch.arange(COLUMNS, dtype=torch.int32, device=device).expand(1, 2, ROWS, COLUMNS).contiguous()
    return TorchBlockMask.from_kv_blocks(both, indices, BLOCK_SIZE=SIZE, mask_mod=rule)


LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def with_attributes(given: TorchBlockMask, **attributes: Any) -> TorchBlockMask:
    """With what its constructor would not take."""
    for name, value in attributes.items():
        setattr(given, name, value)
    return given


def expected(device: str) -> Tensor:
    index = torch.arange(ROWS * SIZE, device=device)[:, None], torch.arange(COLUMNS * SIZE, device=device)
    return rule(None, None, *index)


def masked(block_mask: flash_ext.masks.BlockMask) -> Tensor:
    """(rows, keys) of head 1, as bool."""
    whole = block_mask.blocks.expand(1, 2, -1, -1)[0, 1]
    whole = whole.repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)
    return whole if block_mask.elements is None else whole & block_mask.elements[0, -1]


@on_devices
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("junk", [-1, COLUMNS, LOWEST, HIGHEST])
def test_what_is_not_used_may_be_anything(junk: int, full: bool, device: str) -> None:
    given = of_torch(device, full)
    for kind in ("kv", "full_kv") if full else ("kv",):
        counts, indices = getattr(given, f"{kind}_num_blocks"), getattr(given, f"{kind}_indices")
        indices.masked_fill_(torch.arange(COLUMNS, device=device) >= counts[..., None], junk)
    assert torch.equal(masked(flash_ext.masks.BlockMask.from_torch(given)), expected(device))


# An index is below the number of columns, a number of indices may be all of them.
OUTSIDE = [
    (name, value) for name in LISTS for value in (-1, COLUMNS + name.endswith("num_blocks"), LOWEST, HIGHEST)
]


@on_devices
@pytest.mark.parametrize("name, value", OUTSIDE)
def test_what_is_outside_is_refused(name: str, value: int, device: str) -> None:
    given, at, words = of_torch(device), (0, 1, 2), f"from 0 to {COLUMNS}, and holds"
    if name.endswith("indices"):
        counts = getattr(given, name.replace("indices", "num_blocks"))
        used = torch.arange(COLUMNS, device=device) < counts[..., None]
        at, words = used.nonzero()[-1].tolist(), f"from 0 to {COLUMNS - 1} where they are used"
    getattr(given, name)[tuple(at)] = value
    with pytest.raises(ValueError, match=f"block_mask.{name} must be {words}"):
        flash_ext.masks.BlockMask.from_torch(given)
    assert torch.equal(masked(flash_ext.masks.BlockMask.from_torch(of_torch(device))), expected(device))


@on_devices
def test_any_values_are_followed_or_refused(device: str) -> None:
    """Against the lists read one entry after another on the host."""
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(30):
        lists, fine = [], True
        for _ in range(2):
            counts = torch.randint(-1 if torch.rand((), generator=generator) < 0.1 else 0, COLUMNS + 1,
                                   (1, 2, ROWS), generator=generator)  # fmt: skip
            indices = torch.randint(-2, COLUMNS + 2, (1, 2, ROWS, COLUMNS), generator=generator)
            if torch.rand((), generator=generator) < 0.8:
                used = torch.arange(COLUMNS) < counts[..., None]
                indices = torch.where(used, indices.clamp(0, COLUMNS - 1), indices)
            lists += [counts.int().to(device), indices.int().to(device)]
            for count, row in zip(counts.flatten().tolist(), indices.flatten(0, 2).tolist()):
                fine &= count >= 0 and all(0 <= i < COLUMNS for i in row[: max(count, 0)])
        given = with_attributes(of_torch(device), **dict(zip(LISTS, lists)))
        if not fine:
            refused += 1
            with pytest.raises(ValueError, match="block_mask.(full_)?kv_(indices|num_blocks) must be from 0"):
                flash_ext.masks.BlockMask.from_torch(given)
            continue
        seen = torch.zeros(ROWS * SIZE, COLUMNS * SIZE, dtype=torch.bool)
        for (counts, indices), cut in zip((lists[:2], lists[2:]), (True, False)):
            for row, (count, columns) in enumerate(zip(counts[0, 1].tolist(), indices[0, 1].tolist())):
                for column in columns[:count]:
                    place = slice(row * SIZE, (row + 1) * SIZE), slice(column * SIZE, (column + 1) * SIZE)
                    seen[place] |= expected("cpu")[place] if cut else True
        assert torch.equal(masked(flash_ext.masks.BlockMask.from_torch(given)).cpu(), seen)
    assert 3 < refused < 27


@pytest.mark.parametrize("attributes, error, words", [
    ({"kv_indices": torch.zeros(1, 2, 3, 4)}, TypeError, "kv_indices must be .* integers, got torch.float32"),
    ({"kv_num_blocks": torch.ones(1, 2, 3).bool()}, TypeError, "kv_num_blocks must be .*got torch.bool"),
    ({"full_kv_num_blocks": None}, TypeError, "full_kv_num_blocks must be .* integers, got NoneType"),
    ({"full_kv_indices": [0]}, TypeError, "full_kv_indices must be a tensor of integers, got list"),
    ({"kv_num_blocks": torch.ones(1, 2, 4).int()}, ValueError, r"the shape of kv_indices .*got \(1, 2, 4\)"),
    ({"kv_indices": torch.zeros(4).int(), "kv_num_blocks": torch.ones(()).int()}, ValueError, r"got \(\)"),
    ({"full_kv_indices": torch.zeros(1, 2, 3, 5).int()}, ValueError,
     r"full_kv_indices must have the shape and device of kv_indices, \(1, 2, 3, 4\)"),
    ({"full_kv_num_blocks": torch.ones(1, 2, 3, device="meta").int()}, ValueError, "its device: .* on meta"),
    ({"seq_lengths": (49, 64)}, ValueError, "3 row blocks of 16 .* too few for its lengths 49 and 64"),
    ({"seq_lengths": (48, 65)}, ValueError, "4 key blocks of 16, too few for its lengths 48 and 65"),
])  # fmt: skip
def test_lists_that_do_not_fit_are_refused(attributes: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        flash_ext.masks.BlockMask.from_torch(with_attributes(of_torch("cpu"), **attributes))


def test_lists_of_fewer_dimensions_are_for_all() -> None:
    whole = of_torch("cpu")
    lists = [getattr(whole, name)[0, 0] for name in LISTS]
    given = TorchBlockMask.from_kv_blocks(*lists, BLOCK_SIZE=SIZE, mask_mod=rule)
    assert torch.equal(masked(flash_ext.masks.BlockMask.from_torch(given)), expected("cpu"))


def test_the_answers_are_read_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a rule to evaluate, building waits for the device twice: for the answers, and for that."""
    reads = []
    for name in ("tolist", "__bool__", "item"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda t, name=name, original=original: reads.append(name) or original(t)
        )
    whole = create_block_mask(lambda b, h, i, j: i // SIZE >= j // SIZE, 1, 1, 64, 64, device="cpu",
                              BLOCK_SIZE=SIZE)  # fmt: skip
    reads.clear()
    flash_ext.masks.BlockMask.from_torch(whole)
    assert reads == ["tolist", "__bool__"]
