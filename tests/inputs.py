"""Turns a ``Case`` into tensors: what they hold, and what a call with its modifiers is asked and means.

Where they lie in memory is in ``layouts.py``; what the names of modifiers stand for is in ``choices.py``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext
from flash_ext._ops.modifiers import Modifiers
from tests.cases import Case
from tests.choices import MAXIMA, Choice, make_choices, reach_of
from tests.layouts import Region, View, carve, place, qkv_regions, tensor_shapes, write
from tests.values import call_keywords


@dataclass
class Inputs:
    """What one call gets, and what its modifiers mean.

    q, k, v, dout: as in the contract, strides by the case's layout; tail rows of packed tensors are NaN.
    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, or None. dlse: lse-shaped fp32, or None.
    choices: one for each of the case's modifiers. guards: their buffers with snapshots.
    workspaces: bytes of the latest launch of each direction, none before one was seen.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    arena: Tensor
    snapshot: Tensor
    choices: list[Choice] = field(default_factory=list)
    guards: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    workspaces: dict[str, int] = field(default_factory=dict)

    def unchanged(self) -> bool:
        """Whether every input byte and every guard byte is as it was. Synchronises."""
        return torch.equal(self.arena, self.snapshot) and all(torch.equal(a, b) for a, b in self.guards)

    @property
    def max_seqlens(self) -> tuple[int, int]:
        """The hints to pass; zeros when the case gives none."""
        if not self.case.hints:
            return 0, 0
        return max(self.case.lens_q, default=0), max(self.case.lens_k, default=0)

    @property
    def generator(self) -> torch.Generator:
        """Dropout's source, at its start."""
        return torch.Generator(self.q.device).manual_seed(self.case.seed + 77)

    def leaves(self) -> dict[str, Tensor]:
        """What can have a gradient beside q, k and v: part to a leaf that shares the memory."""
        return {
            c.part: c.tensor.detach()
            for c in self.choices
            if c.part in ("bias", "position", "slopes", "sinks")
        }

    def entries(self, rows: int, keys: int) -> Tensor:
        """(rows, keys) int64: which entry of the table of ``distance<n>`` each pair of a sequence reads."""
        (name,) = (name for name in self.case.mods if name.startswith("distance"))
        n = reach_of(name)
        position = torch.arange(rows)[:, None] + (0 if self.case.has_top_left else keys - rows)
        distance = (torch.arange(keys) - position).clamp(-n, 0 if "before" in name else n)
        return (n + distance).to(self.q.device)

    def keywords(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """Of the public function: masks, biases, and all others of the choices."""
        case = self.case
        parts = {c.part: c.argument(leaves.get(c.part, c.tensor)) for c in self.choices if c.part != MAXIMA}
        found = {name: parts.pop(name) for name in ("sinks", "softcap", "dropout_p") if name in parts}
        if "dropout_p" in found:
            found["generator"] = self.generator
        return found | call_keywords(causal=case.causal, window=case.window, **parts)

    @property
    def asked(self) -> set[str]:
        """The parts of the choices that can matter: sink tokens and prefixes show what a band hides."""
        case, parts = self.case, {c.part for c in self.choices} - {MAXIMA}
        if case.window[0] < 0 and "chunk" not in parts:
            parts -= {"sink_tokens"}
        if "chunk" not in parts and not case.causal and case.window == (-1, -1):
            parts -= {"prefix_lens"}
        return parts

    def meaning(self, leaves: dict[str, Tensor]) -> Modifiers:
        """Of the oracle. Masks of several choices are ANDed."""
        fields: dict[str, Any] = {}
        for choice in self.choices:
            for name, value in choice.meaning(leaves.get(choice.part, choice.tensor)).items():
                fields[name] = self._both(fields[name], value) if name == "mask" and name in fields else value
        if "dropout_p" in fields:
            fields["rng"] = flash_ext.dropout_rng(self.q.device, self.generator)
        return Modifiers(**fields)

    def _both(self, a: Tensor, b: Tensor) -> Tensor:
        """a AND b; beyond the end of a packed one everything is hidden."""
        sizes = [max(a.shape[dim], b.shape[dim]) for dim in (2, 3)]

        def full(t: Tensor) -> Tensor:
            missing = [0 if t.shape[dim] == 1 else size - t.shape[dim] for dim, size in zip((2, 3), sizes)]
            return F.pad(t, (0, missing[1], 0, missing[0]))

        return full(a) & full(b)


def make_inputs(case: Case, device: str | torch.device) -> Inputs:
    """The tensors of ``case`` on ``device``; the same case and kind of device give the same values.

    Modifiers are the same on every device.
    """
    shapes = tensor_shapes(case)
    regions = qkv_regions(shapes, case.layout, case.torch_dtype)
    dout_layout = case.dout_layout if case.layout != "offset" else "offset"
    regions.append(
        Region({"dout": place(shapes["out"], dout_layout)}, case.torch_dtype, int(dout_layout == "offset"))
    )
    if case.dlse:
        lse_dtype = torch.float64 if case.dtype == "fp64" else torch.float32
        regions.append(Region({"dlse": place(shapes["lse"], "bshd")}, lse_dtype))
    if case.is_packed:
        for name, lens in (("cu_seqlens_q", case.lens_q), ("cu_seqlens_k", case.lens_k)):
            regions.append(Region({name: View((len(lens) + 1,), (1,))}, torch.int32))

    arena, views = carve(regions, device)
    generator = torch.Generator(device).manual_seed(case.seed)
    values = _values(case, shapes, device, generator)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in views:
            lens = case.lens_q if name.endswith("q") else case.lens_k
            values[name] = torch.tensor(list(itertools.accumulate(lens, initial=0)), dtype=torch.int32)
    for name, view in views.items():
        write(view, values[name], case.tail if name in ("q", "k", "v", "dout") else 0)
    inputs = {
        name: views.get(name) for name in ("q", "k", "v", "dout", "dlse", "cu_seqlens_q", "cu_seqlens_k")
    }
    choices, guards = make_choices(case, device)
    return Inputs(case=case, arena=arena, snapshot=arena.clone(), choices=choices, guards=guards, **inputs)


def _positions(lens: tuple[int, ...], total: int) -> Tensor:
    """Relative position of each packed row in its sequence, 0..1."""
    parts = [torch.linspace(0, 1, n) if n > 1 else torch.zeros(n) for n in lens]
    parts.append(torch.zeros(total - sum(lens)))
    return torch.cat(parts)


def _values(
    case: Case, shapes: dict[str, tuple[int, ...]], device: str | torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    """What the tensors hold, by ``case.data``, in fp32 (fp64 for fp64 cases)."""
    dtype = torch.float64 if case.dtype == "fp64" else torch.float32

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    def uniform(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, device=device, dtype=dtype, generator=generator)

    values = {name: normal(shapes[name]) for name in ("q", "k", "v")}
    values["dout"] = normal(shapes["out"])
    if case.dlse:
        values["dlse"] = normal(shapes["lse"])
    q, k, v = values["q"], values["k"], values["v"]
    if case.data == "outlier":  # activations of real models: one entry in a thousand is ten times larger
        for name in ("q", "k", "v"):
            values[name] += 10 * normal(shapes[name]) * (uniform(shapes[name]) < 1e-3)
    elif case.data == "large":
        for tensor in (q, k, v):
            tensor *= 3
    elif case.data == "biased":  # rounding errors of P no longer average out against a zero-mean V
        v += 2
    elif case.data in (
        "rising",
        "falling",
    ):  # the running maximum moves in every tile, or in the first one only
        ramp = _positions(case.lens_k, k.shape[0]) if case.is_packed else torch.linspace(0, 1, k.shape[1])
        ramp = (ramp if case.data == "rising" else 1 - ramp).to(device, dtype)[:, None, None]
        values["q"] = 0.3 * q + 1
        values["k"] = 0.3 * k + 30 / math.sqrt(case.head_dim) * ramp
    elif case.data == "peaked":
        q *= 6
    elif (
        case.data == "twins"
    ):  # several keys share the maximum exactly, so their P is exactly 1 before scaling
        direction = normal((case.head_dim,))
        values["q"] = 0.1 * q + direction
        k[..., ::2, :, :] = 3 * direction
        v -= 2
    elif case.data == "integer":  # small whole numbers, most of them zero: products and sums are exact
        for name, tensor in values.items():
            if name != "dlse":
                keep = uniform(tensor.shape) < 0.2
                values[name] = torch.where(keep, (tensor * 1.5).round().clamp(-2, 2), 0)
    elif case.data == "zero_q":  # every visible key weighs the same: lse is the logarithm of their count
        q.zero_()
    elif case.data == "tiny":  # subnormal V in fp16, far below the normal range of P in bf16
        v *= 2.0 ** (-20 if case.dtype == "fp16" else -100)
    elif case.data == "nan_row":
        special_row(q, case, 0)[:] = float("nan")
    elif case.data == "inf_value":
        special_row(v, case, 1)[:1] = float("inf")
    elif case.data != "normal":
        raise ValueError(f"unknown data kind {case.data!r}")
    return values


def special_row(tensor: Tensor, case: Case, side: int) -> Tensor:
    """The (head_dim,) view where a special value is planted: head 0, middle row of the first sequence.

    ``side`` is 0 for a tensor of query rows, 1 for one of key rows. Empty when that sequence has no rows.
    """
    length = next(iter(case.sequences()), (0, 0))[side]
    if length == 0:
        return tensor.new_empty(0)
    return (tensor if case.is_packed else tensor[0])[length // 2, 0]
