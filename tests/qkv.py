"""Small inputs for tests of the op layer, on the CPU always and on a GPU where there is one."""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_ext._ops.library import _C
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.reference import attention_reference

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
only_hopper = pytest.mark.skipif(not HOPPER, reason="needs Hopper")
ON_HOPPER = [pytest.mark.gpu, only_hopper]  # marks
CPU_AND_HOPPER = ["cpu", pytest.param("cuda", marks=ON_HOPPER)]


def dtype_on(device: str) -> torch.dtype:
    """The widest type the device computes in, so that tolerances can be tight."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def tolerance(device: str) -> dict[str, float]:
    return {"atol": 1e-5, "rtol": 1e-5} if device == "cpu" else {"atol": 3e-2, "rtol": 3e-2}


def make_qkv(
    device: str = "cpu",
    *,
    batch: int = 2,
    seqlen_q: int = 17,
    seqlen_k: int | None = None,
    heads: int = 4,
    heads_k: int = 2,
    head_dim: int = 16,
    head_dim_v: int | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a dense call, N(0, 1)."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, heads_k, head_dim),
        (batch, seqlen_k, heads_k, head_dim_v or head_dim),
    )
    dtype = dtype or dtype_on(device)
    return tuple(
        torch.randn(shape, device=device, dtype=dtype, requires_grad=requires_grad) for shape in shapes
    )


def blank_qkv(**options) -> tuple[Tensor, ...]:
    """Those of make_qkv(), zeros: for calls without kernels, where drawing 16-bit numbers took longest."""
    return tuple(
        torch.zeros_like(t, device="cpu", requires_grad=t.requires_grad) for t in make_qkv("meta", **options)
    )


def make_packed(
    device: str = "cpu", *, lengths: tuple[int, ...] = (3, 0, 9), spare: int = 2, requires_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (total, heads, head_dim) and cu_seqlens; ``spare`` rows at the end belong to no sequence."""
    total = sum(lengths) + spare
    tensors = (
        torch.randn(total, heads, 16, device=device, dtype=dtype_on(device), requires_grad=requires_grad)
        for heads in (4, 2, 2)
    )
    bounds = torch.tensor((0, *lengths), device=device).cumsum(0).to(torch.int32)
    return *tensors, bounds


def reference(
    q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """out and lse of the oracle, float64, differentiable."""
    return attention_reference(
        q, k, v, AttnSpec(default_scale(q.shape[-1]), -1, 0 if causal else -1), *cu_seqlens
    )


@contextlib.contextmanager
def null_kernels() -> Iterator[None]:
    """Inside, CPU tensors take the road of GPU tensors, up to the launch, which is left out.

    Kernels for short sequences take short ones: calls of CPU tensors may not ask for others by ``backend=``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        _C.use_null_kernels_on_cpu(True)
    _C.set_switch("record_launches", 1)
    try:
        yield
    finally:
        _C.set_switch("record_launches", None)
        _C.use_null_kernels_on_cpu(False)


class OperatorCalls(TorchDispatchMode):
    """Notes the calls of flash_ext's operators that reach the dispatcher: name, arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "flash_ext":
            self.seen.append((func._opname, args, results))
        return results

    def names(self) -> list[str]:
        return [name for name, _, _ in self.seen]


class AllOperators(TorchDispatchMode):
    """Notes the names of all operators that are called inside, torch's own too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def sdpa_counts() -> dict[str, tuple[int, int]]:
    """By torch's operator: how many calls ran here since the start, and how many went back."""
    returned: collections.Counter[str] = collections.Counter()
    for (name, _), number in _C.sdpa_returned().items():
        returned[name] += number
    return {name: (served, returned[name]) for name, served in _C.sdpa_served()}
