"""The columns of the benchmark: what an entrant is, and our own.

An entrant turns the inputs of a case into one callable per direction. What it lays out, copies or compiles
beforehand is not timed.
"""

from __future__ import annotations

import copy
import functools

from bench import asks, features
from bench.features import Work
from bench.inputs import DTYPES, Call, Inputs, through_autograd
from bench.record import Row
from bench.shapes import DIRECTIONS, Case, flops


def lacks(case: Case, *known: str) -> str:
    """Why an entrant that knows causal masks, windows and these features cannot take a case; "" if it can."""
    missing = [name for name, f in asks.wanted(case).items() if name not in known and not f.plain]
    return f"it does not do {' and '.join(missing)}" if missing else ""


class Entrant:
    """One column of the benchmark.

    Attributes:
        name: column name.
        ours: True for flash_ext itself.
        directions: which of fwd, bwd and both it takes part in.
    """

    name = ""
    ours = False
    directions: tuple[str, ...] = DIRECTIONS

    def why_not(self, case: Case, direction: str) -> str:
        """Why this entrant cannot take the case, in words; empty when it can."""
        return ""

    def takes(self, case: Case) -> bool:
        """False where the column has no meaning for a case, and no entry either."""
        return True

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        """The callable to time. May raise anything: the text ends up in the row."""
        raise NotImplementedError

    def flops(self, row: Row) -> float:
        """What the column computes in a row: the row's own count, unless it solves another problem."""
        return row.flops

    def tile(self, inputs: Inputs, call: Call) -> tuple[int, int] | None:
        """(queries, keys) of the tiles that a call works through, where that is known."""
        return None

    def work(self, inputs: Inputs, tile: tuple[int, int]) -> Work:
        """What is scored in tiles of that size."""
        return inputs.work(tile)


class Ours(Entrant):
    """``flash_ext.attention`` or ``attention_varlen`` as a user calls them, on one forced path."""

    ours = True

    def __init__(self, path: str) -> None:
        self.name = path
        self.path = None if path == "auto" else path

    def _options(self, inputs: Inputs) -> dict:
        case = inputs.case
        options = {
            "causal": case.causal,
            "window_size": case.window,
            "deterministic": case.deterministic,
            "backend": self.path,
        }
        if case.packed:
            options |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
            options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        return options

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        import flash_ext

        attention = flash_ext.attention_varlen if inputs.case.packed else flash_ext.attention
        options, asked = self._options(inputs), inputs.asked
        if asked.learned is None:
            fixed = functools.partial(attention, **options | asked.options)
            return through_autograd(fixed, inputs.qkv, inputs.dout, direction)

        def forward(q, k, v, learned):
            return attention(q, k, v, **options | asked.options_with(learned))

        return through_autograd(forward, (*inputs.qkv, asked.learned), inputs.dout, direction)

    def tile(self, inputs: Inputs, call: Call) -> tuple[int, int] | None:
        """What the launch itself records; asked in feature rows, whose tiles are counted."""
        return launched_tile(call) if inputs.case.feature and inputs.device.type == "cuda" else None


def launched_tile(call: Call) -> tuple[int, int]:
    """(block_m, block_n) of the last kernel that a call of ours launches."""
    from flash_ext import _C

    recording = _C.get_switch("record_launches")
    _C.set_switch("record_launches", 1)
    try:
        call()
    finally:
        _C.set_switch("record_launches", recording)
    launch = _C.last_launch()
    return launch["block_m"], launch["block_n"]


class OursPlain(Ours):
    """The kernels without modifiers on the inputs of a feature row: what its speed is held against."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.name = f"{path}-plain"

    def takes(self, case: Case) -> bool:
        return bool(case.feature)

    def flops(self, row: Row) -> float:
        return flops(features.plain_case(row.case), row.direction)

    def _plain(self, inputs: Inputs) -> Inputs:
        plain = copy.copy(inputs)
        plain.case = features.plain_case(inputs.case)
        vars(plain).pop("asked", None)
        return plain

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        return super().prepare(self._plain(inputs), direction)

    def work(self, inputs: Inputs, tile: tuple[int, int]) -> Work:
        return self._plain(inputs).work(tile)


class OursRaw(Ours):
    """``flash_ext.backward`` by itself, with no autograd around it, as raw kernels of peers are timed."""

    directions = ("bwd",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.name = f"{path}-raw"

    def takes(self, case: Case) -> bool:
        return not case.feature and not case.model

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        import flash_ext

        options = self._options(inputs)
        q, k, v, dout = *inputs.qkv, inputs.dout
        out, lse = flash_ext.forward(q, k, v, **options)
        return lambda: flash_ext.backward(dout, q, k, v, out, lse, **options)


class OursOrdered(OursRaw):
    """The same in the deterministic mode, beside peers whose gradients may differ from run to run."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.name = f"{path}-det"

    def takes(self, case: Case) -> bool:
        return super().takes(case) and not case.deterministic

    def _options(self, inputs: Inputs) -> dict:
        return super()._options(inputs) | {"deterministic": True}


class OursInType(Ours):
    """The same calls on the inputs rounded to another type: what a type costs, in interleaved rounds."""

    def __init__(self, path: str, dtype: str) -> None:
        super().__init__(path)
        self.name, self._dtype = f"{path}-{dtype}", DTYPES[dtype]

    def takes(self, case: Case) -> bool:
        return not case.feature and not case.asks

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        return super().prepare(inputs.in_type(self._dtype), direction)


class OursFp8(Ours):
    """``flash_ext.fp8.attention_fp8`` on what was quantised before, or with the quantisation in each call."""

    directions = ("fwd",)
    kinds = {
        "fp8": {},
        "fp8-hadamard": {"hadamard": True},
        "mixed": {"mode": "mixed"},
        "fp8+quantise": {},
    }

    def takes(self, case: Case) -> bool:
        serves = {"mixed": max(case.head_dim, case.head_dim_v) <= 128}
        serves["fp8-hadamard"] = case.head_dim & (case.head_dim - 1) == 0
        return not case.feature and not case.asks and serves.get(self.name, True)

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        import flash_ext

        case = inputs.case
        bounds = {f"cu_seqlens_{side}": inputs.cu_seqlens for side in "qk"} if case.packed else {}
        kind = self.kinds[self.name]
        quantise = functools.partial(flash_ext.fp8.quantize_fp8, *inputs.qkv, **kind, **bounds)
        attend = functools.partial(flash_ext.fp8.attention_fp8, causal=case.causal, window_size=case.window)
        if self.name == "fp8+quantise":
            return lambda: attend(quantise())
        return functools.partial(attend, quantise())


def make_ours(paths: list[str]) -> list[Entrant]:
    """The columns of each path of ours: as called by a user, the raw backward, plain and deterministic, and
    without the feature. ``sm90-fp16`` is that path in that type, ``fp8`` and its kin in that form, one column
    each."""
    kinds = (Ours, OursRaw, OursOrdered, OursPlain)
    columns: list[Entrant] = []
    for name in paths:
        path, _, dtype = name.partition("-")
        if name in OursFp8.kinds:
            columns.append(OursFp8(name))
            continue
        columns += [OursInType(path, dtype)] if dtype in DTYPES else [kind(name) for kind in kinds]
    return columns
