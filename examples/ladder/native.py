"""The CUDA kernels of the ladder, called on torch tensors.

They are no part of the package: ``python setup.py build_ladder`` compiles them, and the first call does so
where that has not been done. q, k, v are (batch, num_heads, seqlen, head_dim) bfloat16, contiguous, head_dim
64 or 128.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .algorithms import BlockSizes

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(__file__).resolve().parent / "kernels" / "ladder.so"

# What flash1.cu and flash2.cu are compiled for, by head_dim; the first of FlashAttention is the fastest on
# an H100.
FLASH1_SIZES = {
    64: (BlockSizes(64, 256), BlockSizes(32, 256), BlockSizes(32, 128)),
    128: (BlockSizes(32, 256), BlockSizes(32, 128), BlockSizes(16, 128)),
}
FLASH2_SIZES = {64: BlockSizes(128, 64), 128: BlockSizes(128, 32)}


class Passes(enum.IntEnum):
    """How often a kernel of softmax reads its row; the names of softmax.cuh."""

    THREE = 0
    TWO = 1
    BLOCKS = 2
    ON_CHIP = 3


def build() -> None:
    """Compiles what is out of date.

    Raises:
        RuntimeError: nvcc or something else is missing, in words.
    """
    command = [sys.executable, "setup.py", "--quiet", "build_ladder"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the kernels of the ladder were not built:\n{done.stdout}{done.stderr}")


@functools.cache
def library() -> ctypes.CDLL:
    """The library, built where it is missing."""
    if not LIBRARY.is_file():
        build()
    loaded = ctypes.CDLL(str(LIBRARY))
    pointer, i32, i64, f32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    signatures = {
        "ladder_softmax": [pointer] * 2 + [i64, i64, i32, pointer],
        "ladder_flash1": [pointer] * 7 + [i64] + [i32] * 3 + [f32] + [i32] * 2 + [pointer],
        "ladder_flash2": [pointer] * 5 + [i64] + [i32] * 3 + [f32] + [i32] * 2 + [pointer],
        "ladder_backward": [pointer] * 11 + [i64] + [i32] * 3 + [f32, i32, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, ctypes.c_char_p
    return loaded


def _call(name: str, x: Tensor, *arguments: object) -> None:
    """Launches on the current stream of x's device."""
    with torch.cuda.device(x.device):
        refusal = getattr(library(), name)(*arguments, torch.cuda.current_stream().cuda_stream)
    if refusal is not None:
        raise RuntimeError(f"{name}: {refusal.decode()}")


def softmax(x: Tensor, passes: Passes) -> Tensor:
    """Softmax of the rows of x, (rows, length) float32; the length is a multiple of 4."""
    if x.ndim != 2 or x.dtype != torch.float32 or not x.is_contiguous() or not x.is_cuda:
        raise ValueError(
            f"x must be (rows, length) float32, contiguous, on a GPU, got {tuple(x.shape)} {x.dtype}"
        )
    out = torch.empty_like(x)
    _call("ladder_softmax", x, x.data_ptr(), out.data_ptr(), *x.shape, int(passes))
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> None:
    """``others`` have the shape of q."""
    for name, x in {"q": q, "k": k, "v": v, **others}.items():
        if x.ndim != 4 or x.dtype != torch.bfloat16 or not x.is_contiguous() or not x.is_cuda:
            raise ValueError(
                f"{name} must be (batch, num_heads, seqlen, head_dim) bfloat16, contiguous, on a GPU, "
                f"got {tuple(x.shape)} {x.dtype}"
            )
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    for name, x in others.items():
        if x.shape != q.shape:
            raise ValueError(f"{name} must have the shape of q, {tuple(q.shape)}, got {tuple(x.shape)}")


class Flash1State(NamedTuple):
    """What FlashAttention keeps in memory between key blocks: accumulator, row maxima and row sums."""

    acc: Tensor
    row_max: Tensor
    row_sum: Tensor

    @classmethod
    def empty(cls, q: Tensor) -> Flash1State:
        """For these queries; the kernel fills it."""
        acc = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        return cls(acc, acc.new_empty(q.shape[:3]), acc.new_empty(q.shape[:3]))


def flash1(
    q: Tensor, k: Tensor, v: Tensor, sizes: BlockSizes | None = None, state: Flash1State | None = None
) -> Tensor:
    """FlashAttention, one CTA a head, scaled by 1 / sqrt(head_dim); ``sizes`` is one of FLASH1_SIZES."""
    _check(q, k, v)
    batch, num_heads, seqlen_q, head_dim = q.shape
    sizes = sizes or FLASH1_SIZES.get(head_dim, (BlockSizes(0, 0),))[0]
    state = state or Flash1State.empty(q)
    out = torch.empty_like(q)
    _call(
        "ladder_flash1", q, *(x.data_ptr() for x in (q, k, v, out, *state)), batch * num_heads, seqlen_q,
        k.shape[2], head_dim, head_dim**-0.5, *sizes,
    )  # fmt: skip
    return out


def flash2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    one_cta_per_head: bool = False,
    normalise_each_step: bool = False,
    want_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """FlashAttention-2, scaled by 1 / sqrt(head_dim).

    Args:
        one_cta_per_head: no parallelism over the sequence, as in FlashAttention.
        normalise_each_step: the accumulator is divided after every key tile, as in FlashAttention.
        want_lse: False: lse is neither stored nor returned.
    """
    _check(q, k, v)
    batch, num_heads, seqlen_q, head_dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if want_lse else None
    _call(
        "ladder_flash2", q, *(x.data_ptr() for x in (q, k, v, out)), None if lse is None else lse.data_ptr(),
        batch * num_heads, seqlen_q, k.shape[2], head_dim, head_dim**-0.5, one_cta_per_head,
        normalise_each_step,
    )  # fmt: skip
    return out, lse


class BackwardScratch(NamedTuple):
    """What a backward keeps in memory while it runs: two numbers for each row, and dQ between key blocks."""

    stats: Tensor
    acc: Tensor

    @classmethod
    def empty(cls, q: Tensor) -> BackwardScratch:
        """For these queries; the kernels fill it."""
        acc = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        return cls(acc.new_empty(2, *q.shape[:3]), acc)


def backward(
    version: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scratch: BackwardScratch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, scaled by 1 / sqrt(head_dim).

    Args:
        version: 1: FlashAttention, one CTA a head. 2: FlashAttention-2, one CTA for each key block of a head.
        out, lse: of :func:`flash2`.
        dout: gradient of out.
    """
    _check(q, k, v, out=out, dout=dout)
    if lse.shape != q.shape[:3] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(f"lse must be {tuple(q.shape[:3])} float32, got {tuple(lse.shape)} {lse.dtype}")
    batch, num_heads, seqlen_q, head_dim = q.shape
    scratch = scratch or BackwardScratch.empty(q)
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _call(
        "ladder_backward", q, *(x.data_ptr() for x in (q, k, v, out, lse, dout, *gradients, *scratch)),
        batch * num_heads, seqlen_q, k.shape[2], head_dim, head_dim**-0.5, version,
    )  # fmt: skip
    return gradients
