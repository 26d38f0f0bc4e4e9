"""The passes that quantise to e4m3 on GPUs, emulated on a CPU, against the implementation for the CPU.

Their own sources are compiled, grids included; tests/tools/emulation/fp8_launch.h stands in for CUDA.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flash_ext._cpu import fp8
from tests.kept import compiled
from tests.kernels.test_emulation import EMULATION, copy_sources
from tests.sources import ROOT, replace_in

pytestmark = pytest.mark.xdist_group("emulation")  # one builds the program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("the emulation is built with g++, which is not here")
    folder = tmp_path_factory.mktemp("fp8_passes")
    csrc = copy_sources(folder)
    for part in (
        "passes/fp8_passes.cuh", "passes/fp8_stats.cuh", "passes/fp8_rotary.cuh", "passes/rounding_loss.h",
        "inst/fp8_passes.cu",
    ):  # fmt: skip
        (csrc / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "csrc" / part, csrc / part)
    shutil.copy(EMULATION / "fp8_launch.h", csrc / "launch.h")
    (csrc / "cuda_fp8.h").write_text("#pragma once\n", encoding="utf-8")
    replace_in(
        csrc / "passes" / "fp8_passes.cuh",
        "extern __shared__ __align__(16) uint8_t tile_bytes_of_v[];",
        "uint8_t* const tile_bytes_of_v = emu::smem;",
    )
    built = folder / "fp8_passes"
    command = ["g++", "-std=c++20", "-O1", "-U_FORTIFY_SOURCE", f"-I{csrc}"]
    done = compiled([*command, str(EMULATION / "fp8_passes.cpp")], built)
    assert done.returncode == 0, done.stderr[-4000:]
    return built


SHAPES = {  # batch, heads, heads_k, rows, keys, d, dv; bounds of packed sequences; how many keys each has
    "one block": (1, 1, 1, 128, 128, 128, 64),
    "ragged": (2, 4, 2, 130, 301, 64, 48),
    "few rows": (1, 2, 1, 3, 17, 16, 32),
    "wide": (1, 2, 2, 40, 140, 192, 128),
    "256": (1, 1, 1, 33, 150, 256, 256),
    "packed": (3, 2, 1, 300, 420, 64, 96, [2, 131, 131, 290], [0, 20, 205, 411]),
    "packed of one": (1, 1, 1, 140, 20, 48, 48, [0, 140], [4, 20]),
}
WAYS = {  # by_block, smooth_k, smooth_v, hadamard, mixed
    "blocks": (True, True, True, False, False),
    "blocks as they are": (True, False, False, False, False),
    "heads": (False, True, True, False, False),
    "rotated": (True, True, True, True, False),
    "mixed": (True, True, True, False, True),
}
# Keys of each sequence of a shape, which may be none, all, or more than there are, and in which ways.
USED = {
    "ragged": ([0, 131], tuple(WAYS)),
    "few rows": ([9], ("blocks", "heads")),
    "wide": ([-3], ("blocks", "mixed")),
    "packed": ([20, 100, 17], tuple(WAYS)),
    "packed of one": ([15], ("blocks as they are", "mixed")),
}


def counts(shape: str, way: str) -> bool:
    return way in USED.get(shape, ([], ()))[1]


# Of which cases q and k are turned, and how many features: halves of a row, or neighbours.
TURNS = {
    ("ragged", "blocks"): (1, 64),
    ("ragged", "heads"): (2, 32),
    ("few rows", "blocks"): (1, 16),
    ("wide", "blocks"): (1, 96),
    ("256", "rotated"): (1, 256),
    ("packed", "blocks"): (2, 64),
    ("packed", "rotated"): (1, 32),
    ("packed of one", "blocks as they are"): (2, 16),
}
# The other type differs in how it is read alone, and a rotation wants a power of two.
CASES = [
    (shape, way, torch.bfloat16, uses, False)
    for uses in (False, True)
    for shape, (*_, d, _) in ((name, numbers[:7]) for name, numbers in SHAPES.items())
    for way in WAYS
    if (way != "rotated" or d & (d - 1) == 0) and (not uses or counts(shape, way))
] + [("ragged", "blocks", torch.float16, False, False), ("packed", "heads", torch.float16, False, False)]
CASES += [(*case, torch.bfloat16, uses, True) for case in TURNS for uses in sorted({False, counts(*case)})]


Case = tuple[str, str, torch.dtype, bool, bool]


def make(case: Case) -> tuple[bytes, tuple]:
    """What the program reads, and the arguments of quantize() for the CPU.

    ``uses``: sequences have fewer keys than room for them, and NaN lies behind.
    """
    shape, way, dtype, uses, turns = case
    batch, heads, heads_k, rows, keys, d, dv, *bounds = SHAPES[shape]
    torch.manual_seed(0)
    front = [] if bounds else [batch]
    q, k, v = (
        torch.randn(*front, *size).to(dtype)
        for size in ((rows, heads, d), (keys, heads_k, d), (keys, heads_k, dv))
    )
    k += 3
    v[..., 5] += 2
    v[..., 1] = 0
    cu = [torch.tensor(x, dtype=torch.int32) for x in bounds] or [None, None]
    used = torch.tensor(USED[shape][0], dtype=torch.int32) if uses else None
    kept = None
    if used is not None:
        room = cu[1].diff() if bounds else torch.tensor([keys])
        kept = used.clamp(min=0).minimum(room.int())
        of_rows = fp8.used_rows(keys, cu[1], kept)[..., None, None].expand_as(k)
        k[~of_rows] = math.nan
        v[~of_rows[..., :1].expand_as(v)] = math.nan
    turn = TURNS[shape, way] if turns else (0, 0)
    numbers = [*SHAPES[shape][:7], bool(bounds), *WAYS[way], dtype == torch.float16, uses, *turn]
    rotary: list[torch.Tensor] = []
    if turns:
        for n in (rows, keys):
            angles = torch.rand(n, turn[1] // 2) * 6
            rotary += [angles.cos(), angles.sin()]
    given = [x for x in (*cu, used) if x is not None]
    parts = [torch.tensor([int(x) for x in numbers], dtype=torch.int32), *given]
    parts += [x.view(torch.int16) for x in (q, k, v)] + rotary
    data = b"".join(x.numpy().tobytes() for x in parts)
    return data, (q, k, v, *cu, kept, *WAYS[way], *(rotary or [None] * 4), turn[0] == 2)


@pytest.fixture(scope="module")
def results(program: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, bytearray]:
    """Of one run of the program, whose first case waits for the stacks of all threads."""
    folder = tmp_path_factory.mktemp("fp8_cases")
    places = {case: (folder / f"case {i}", folder / f"result {i}") for i, case in enumerate(CASES)}
    for case, (place, _) in places.items():
        place.write_bytes(make(case)[0])
    names = [str(path) for pair in places.values() for path in pair]
    done = subprocess.run([str(program), *names], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return {case: bytearray(result.read_bytes()) for case, (_, result) in places.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_passes_agree_with_the_cpu(results: dict[Case, bytearray], case: Case) -> None:
    """Numbers but for those that a mean's last bit moves; factors and offsets to a few bits."""
    result, (_, arguments) = results[case], make(case)
    rows, keys, *bounds = (*SHAPES[case[0]][3:5], *SHAPES[case[0]][7:])
    by_block, cu, kept = WAYS[case[1]][0], arguments[3:5], arguments[5]
    want = fp8.quantize(*arguments)
    known = [None, None] if not bounds else [slice(x[0], x[-1]) for x in bounds]
    at = 0
    moved = factor = torch.zeros(())
    counted = fp8.used_rows(keys, cu[1], kept)  # keys that are in a mean
    if counted is None:
        counted = torch.tensor(keys if not bounds else bounds[1][-1] - bounds[1][0])
    else:
        counted = counted.sum(-1).clamp(min=1).reshape(-1, *([1, 1] if not bounds else []))
    names = ("q", "k", "v", "q_factor", "k_factor", "v_factor", "v_offset", "k_offset", "row_offset")
    for name, t in zip(names, want, strict=True):
        size = t.numel() * t.element_size()
        assert at + size <= len(result)
        if size == 0:
            continue
        got = torch.frombuffer(result, dtype=t.dtype, count=t.numel(), offset=at).view(t.shape)
        at += size
        a, b = t.float(), got.float()
        if name in ("q", "k") and bounds:
            a, b = (x[known[name == "k"]] for x in (a, b))
        if name == "v" and bounds:
            columns = fp8.column_of_rows(keys, cu[1], t.device)[known[1]]
            a, b = a[..., columns], b[..., columns]
        if name in ("q_factor", "k_factor") and bounds and by_block:
            side = name == "k_factor"
            used = fp8.block_of_rows(keys if side else rows, cu[side], t.device)[known[side]].unique()
            a, b = a[..., used], b[..., used]
        if name == "row_offset" and bounds:
            a, b = a[..., known[0]], b[..., known[0]]
        if name in ("q", "k", "v"):
            assert (a != b).float().mean() <= 0.01, name
            assert (a - b).abs().max() <= 32, name  # one step where steps are largest
            moved = (a - b).abs().sum(-1)
        elif name == "v_offset":  # what a number moves by comes back with the mean
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 + (moved * factor / counted).max().item())
        else:
            gate = 1e-4 if name == "row_offset" else 1e-5
            torch.testing.assert_close(b, a, rtol=gate, atol=gate)
            factor = a
    assert at == len(result)
