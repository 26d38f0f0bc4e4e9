"""Threads whose first CUDA work is a call of ours, and threads whose context somebody else has changed."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import subprocess
import sys
import threading

import pytest
import torch

import flash_ext
from flash_ext._ops.library import _C
from tests.harness import Target, on_gpu_paths
from tests.qkv import null_kernels
from tests.sources import ROOT
from tests.tools import thread_soak
from tests.tools.thread_soak import FAMILIES, calls_of, has_kernels, in_new_threads


def same_as_here(call: thread_soak.Call, results: tuple[torch.Tensor, ...]) -> bool:
    """What may differ from run to run, a dq added in any order, differs by rounding."""
    pairs = [(a.float(), b.float()) for a, b in zip(results, call())]
    return all(torch.allclose(a, b, rtol=2.0**-6, atol=2.0**-6) for a, b in pairs)


def calls_that_run(name: str, target: Target) -> dict[str, thread_soak.Call]:
    if not has_kernels(FAMILIES[name], target.device, target.path):
        pytest.skip("fp8 and latents have kernels on Hopper only")
    return calls_of(FAMILIES[name], target.device, target.path)


def drop_context() -> None:
    """As a library that pops what it has pushed and a little more: the thread has no current context."""
    status = ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent(None)
    assert status == 0, f"cuCtxSetCurrent: {status}"


@pytest.mark.parametrize("after_a_drop", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@on_gpu_paths
def test_the_first_cuda_work_of_a_thread(target: Target, name: str, after_a_drop: bool) -> None:
    """Also after a drop: a context that was bound by an earlier call may be gone at the next."""
    calls = calls_that_run(name, target)
    torch.cuda.synchronize()

    def work(call: thread_soak.Call) -> tuple[torch.Tensor, ...]:
        if after_a_drop:
            call()
            drop_context()
        return call()

    results, raised = in_new_threads({what: lambda c=call: work(c) for what, call in calls.items()})
    assert not raised, raised
    for what, call in calls.items():
        assert same_as_here(call, results[what]), what


@on_gpu_paths
def test_the_first_work_of_autograds_thread(target: Target) -> None:
    """The engine has a thread for each device, which begins with the first backward of a process."""
    code = f"""
import torch, flash_ext
from tests.tools.thread_soak import FAMILIES, calls_of
calls_of(FAMILIES["causal"], "cuda", "{target.path}")  # by the operators: autograd has not run yet
q, k, v, dout = (torch.randn(2, 300, h, 128, device="cuda").bfloat16() for h in (4, 2, 2, 4))
leaves = [t.requires_grad_() for t in (q, k, v)]
out = flash_ext.attention(*leaves, causal=True, backend="{target.path}")
grads = torch.autograd.grad(out, leaves, dout)
torch.cuda.synchronize()
print(all(bool(t.isfinite().all()) for t in grads))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


@on_gpu_paths
def test_a_thread_with_forward_and_backward_of_autograd(target: Target) -> None:
    qkv = [torch.randn(2, 300, h, 128, device="cuda").bfloat16().requires_grad_() for h in (4, 2, 2)]
    dout = torch.randn(2, 300, 4, 128, device="cuda").bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        out = flash_ext.attention(*qkv, causal=True, deterministic=True, backend=target.path)
        return (out.detach(), *torch.autograd.grad(out, qkv, dout))

    expected = step()
    results, raised = in_new_threads({"step": step})
    assert not raised, raised
    assert all(torch.equal(a, b) for a, b in zip(results["step"], expected))


@on_gpu_paths
def test_threads_that_go_from_device_to_device(target: Target) -> None:
    """Also with the context of the other device left current behind torch's back."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    names = ("hd128", "packed", "mask", "few queries", "hd256")
    calls = {(name, d): calls_of(FAMILIES[name], f"cuda:{d}", target.path) for name in names for d in (0, 1)}
    driver = ctypes.CDLL("libcuda.so.1")
    contexts = []
    for device in (0, 1):
        torch.cuda.synchronize(device)
        context = ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        contexts.append(context)
    found: dict[str, list[tuple]] = {}

    def alternate(first: int, foreign: bool) -> None:
        results = []
        for i in range(6):
            device = (first + i) % 2
            if foreign:
                assert driver.cuCtxSetCurrent(contexts[1 - device]) == 0
            for name in names:
                results += [(name, device, what, call()) for what, call in calls[name, device].items()]
        found[f"first {first}, foreign {foreign}"] = results

    raised: list[BaseException] = []

    def guarded(*how) -> None:
        try:
            alternate(*how)
        except Exception as error:
            raised.append(error)

    try:
        for first in (0, 1):
            for foreign in (False, True):
                thread = threading.Thread(target=guarded, args=(first, foreign))
                thread.start()
                thread.join()
    finally:
        for device in (0, 1):
            driver.cuDevicePrimaryCtxRelease_v2(device)
    assert not raised, raised
    assert len(found) == 4
    for how, results in found.items():
        for name, device, what, got in results:
            assert all(t.device.index == device for t in got), (how, name, what)
            assert same_as_here(calls[name, device][what], got), (how, name, what)


@pytest.mark.gpu
def test_a_short_soak() -> None:
    count, failures = thread_soak.soak(["cuda"], seconds=3, per_second=40)
    assert not failures, failures[:5]
    assert count >= 40


# ---- without a GPU ----


def test_families_run_on_the_cpu() -> None:
    """The calls themselves are sound: small ones of each kind of option."""
    others = {"latents": {"forward"}, "pages": {"forward", "append"}, "fp8": {"quantise", "forward"}}
    for name in ("hd64", "packed", "mask", "blocks", "bias", "dropout", "packed tiles over pages",
                 "softcap over pages", "packed tiles over pages of int8", "softcap over pages of e4m3",
                 "latents over pages", "fp8", "fp8, mixed"):  # fmt: skip
        family = FAMILIES[name]
        heads_k, d = family.sizes[4:] if family.latents else (2, 64)
        small = dataclasses.replace(family, sizes=(1, 20, 24, 4, heads_k, d))
        results, raised = in_new_threads(calls_of(small, "cpu", "cpu"))
        wanted = next((calls for what, calls in others.items() if what in name), {"forward", "backward"})
        assert not raised and set(results) == wanted, (name, raised)


def test_families_have_every_kernel_that_makes_tensor_maps(pretended_gpu: None) -> None:
    """And those for few queries, and for short sequences."""
    found = set()
    with null_kernels():
        for family in FAMILIES.values():
            for call in calls_of(family, "cpu").values():
                call()
                found |= {re.sub("_hd.*", "", one["kernel"]) for one in _C.last_launch()["launches"]}
    kinds = ("", "_cached", "_latent", "_mod", "_fp8")
    kinds += ("_packed", "_packed_mod", "_packed_quantized", "_packed_quantized_mod")
    wanted = {f"fwd{kind}_sm90" for kind in kinds}
    wanted |= {"bwd_sm90", "bwd_q_sm90", "bwd_mod_sm90", "bwd_q_mod_sm90", "bwd_bias_sm90"}
    wanted |= {"fwd_short_sm80", "bwd_short_sm80", "fwd_split_sm80"}
    wanted |= {"fwd_split_cached_sm80", "fwd_split_cached_mod_sm80", "fwd_split_quantized_sm80"}
    assert wanted - found == set()
