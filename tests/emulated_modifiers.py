"""A model of the kernels with modifiers: the CPU backend, rounding where tensor cores must; planted bugs.

Weights, dS and what they are multiplied with pass through the 16-bit type before every product; sums are
fp32. It tells on any machine whether ``modifier_probes.py`` and ``gates.py`` are right: without a
bug both pass, and each bug fails one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext._cpu import tiles as tiled
from flash_ext._ops.modifiers import Modifiers


class Tiles(tiled._ScoreTiles):
    """Products take factors of the 16-bit type."""

    def __init__(self, piece: Any, q: Tensor, k: Tensor, spec: Any, mods: Modifiers):
        super().__init__(piece, q, k, spec, mods)
        self.half = q.dtype

    def grouped(self, x: Tensor) -> Tensor:
        return super().grouped(x.to(self.half).to(x.dtype))


# Modifiers that are read wrongly, in both directions.
MISREAD: dict[str, Callable[[Modifiers], dict[str, Any]]] = {
    "bias_rounded": lambda m: {"bias": m.bias.bfloat16().to(m.bias.dtype)},  # one in fp32
    "bias_of_batch_0": lambda m: {"bias": m.bias[:1].expand_as(m.bias)},
    "bias_head": lambda m: {"bias": m.bias.roll(1, 1)},
    "distance_off_by_one": lambda m: {"bias": m.bias.roll(1, -1)},
    "distance_ends_lost": lambda m: {"bias": torch.nn.functional.pad(m.bias, (1, 1))},
    "bias_clamped": lambda m: {"bias": m.bias.clamp(max=6)},
    "slopes_head": lambda m: {"slopes": m.slopes.roll(1, -1)},
    "sink_twice": lambda m: {"sinks": m.sinks + math.log(2)},
    "sink_head": lambda m: {"sinks": m.sinks.roll(1)},
    "mask_shifted": lambda m: {"mask": m.mask.roll(1, -1)},
    "document_0": lambda m: {"document_q": m.document_q.clamp(max=0)},
}


class BiasBeforeCap(Tiles):
    def scores(self, q_block: Tensor, k: Tensor, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        cap, bias = self.mods.softcap, tiled._tile(self.mods.bias, rows, cols).to(self.dtype)
        tanh = ((self.product(q_block, k[:, :, cols].mT) * self.spec.scale + bias) / cap).tanh()
        return tanh * cap, tanh


class CapWithoutSlope(Tiles):
    def scores(self, *place: Any) -> tuple[Tensor, None]:
        return super().scores(*place)[0], None


class FromKey0(Tiles):
    """Distances are counted from the first key, whatever the row."""

    def distance(self, rows: slice, cols: slice) -> Tensor:
        return torch.arange(cols.start, cols.stop).expand(rows.stop - rows.start, -1)


class DropUnscaled(Tiles):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.keep_factor = 1.0


class DropByTile(Tiles):
    """The counter starts again with every tile of keys."""

    def kept(self, rows: slice, cols: slice) -> Tensor:
        return super().kept(rows, slice(0, cols.stop - cols.start))


class LastKeyLost(Tiles):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.is_masked = True

    def _visible(self, rows: slice, cols: slice) -> Tensor:
        visible = super()._visible(rows, cols)
        keys = torch.arange(cols.start, cols.stop)
        return visible & (keys != self.seqlen_k - 1)


class WeightsCut(Tiles):
    """Weights lose the last 3 bits of bf16 before every product, but not in their sum."""

    cutting = True

    def scores(self, *place: Any) -> tuple[Tensor, Tensor | None]:
        self.cutting = False
        found = super().scores(*place)
        self.cutting = True
        return found

    def product(self, x: Tensor, of_key_heads: Tensor) -> Tensor:
        if self.cutting:
            x = (x.contiguous().view(torch.int32) & ~0x7FFFF).view(torch.float32)
        return super().product(x, of_key_heads)


class SmallFlushed(Tiles):
    """What is below 1e-3 in a factor of dK or dV is lost."""

    def grouped(self, x: Tensor) -> Tensor:
        return super().grouped(x.masked_fill(x.abs() < 1e-3, 0))


class LastTileOfBias(tiled._ModifierGradients):
    """What a bias is broadcast over is not summed over tiles of rows."""

    def add_tile(self, dscores: Tensor, distance: Tensor, rows: slice, cols: slice) -> None:
        if self.dbias is not None and self.dbias.shape[2] == 1:
            self.dbias[..., tiled._span(cols, self.dbias.shape[3])] = 0
        super().add_tile(dscores, distance, rows, cols)


class SlopesOfFirstTile(tiled._ModifierGradients):
    """The gradient of slopes misses all tiles of keys but the first."""

    def add_tile(self, dscores: Tensor, distance: Tensor, rows: slice, cols: slice) -> None:
        super().add_tile(dscores, distance * (cols.start == 0), rows, cols)


class TableOfFirstTile(tiled._ModifierGradients):
    """The gradient by distance misses all tiles of keys but the first."""

    def add_tile(self, dscores: Tensor, distance: Tensor, rows: slice, cols: slice) -> None:
        super().add_tile(dscores * (cols.start == 0), distance, rows, cols)


class TableWithoutEnds(tiled._ModifierGradients):
    """Distances beyond the reach give the ends nothing."""

    def add_tile(self, dscores: Tensor, distance: Tensor, rows: slice, cols: slice) -> None:
        inside = distance.abs() <= self.dbias.shape[-1] // 2
        super().add_tile(dscores * inside, distance, rows, cols)


CHANGED = {
    "bias_before_cap": BiasBeforeCap, "cap_without_slope": CapWithoutSlope,
    "slopes_from_key_0": FromKey0, "distance_from_key_0": FromKey0,
    "drop_unscaled": DropUnscaled, "drop_by_tile": DropByTile,
    "last_key_lost": LastKeyLost, "weights_cut": WeightsCut, "small_flushed": SmallFlushed,
    "dbias_of_last_tile": LastTileOfBias, "dslopes_of_first_tile": SlopesOfFirstTile,
    "dtable_of_first_tile": TableOfFirstTile, "dtable_ends_lost": TableWithoutEnds,
}  # fmt: skip
BUGS = (*MISREAD, *CHANGED)


@contextlib.contextmanager
def model(bug: str = "") -> Iterator[None]:
    """Inside, the CPU path is the model, with a bug of ``BUGS`` or without."""

    class Misreading(Tiles):
        def __init__(self, piece: Any, q: Tensor, k: Tensor, spec: Any, mods: Modifiers):
            super().__init__(piece, q, k, spec, dataclasses.replace(mods, **MISREAD[bug](mods)))

    planted = Misreading if bug in MISREAD else CHANGED.get(bug, Tiles)
    with pytest.MonkeyPatch.context() as patch:
        of_gradients = issubclass(planted, tiled._ModifierGradients)
        patch.setattr(tiled, "_ScoreTiles", Tiles if of_gradients else planted)
        if of_gradients:
            patch.setattr(tiled, "_ModifierGradients", planted)
        yield
