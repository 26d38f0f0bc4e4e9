"""Switches of the process, turned while other threads attend: nothing crashes, and no call is a mixture."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.utils import cpp_extension

import flash_ext
from flash_ext import _batch_invariance as batch_invariance
from flash_ext import _log as log
from flash_ext import _sdpa_override as sdpa_override
from flash_ext._ops.library import _C
from tests.integrations.test_sdpa_override import is_on, untouched
from tests.kept import kept
from tests.qkv import make_qkv, null_kernels

__all__ = ["untouched"]  # a fixture


def in_threads(*functions: Callable[[], Any]) -> None:
    """Runs them side by side, and raises what one of them raised."""
    raised: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    if raised:
        raise raised[0]


class Meeting:
    """The first thread to come waits until another has done its part, or cannot while the first is here."""

    def __init__(self) -> None:
        self.first, self.here, self.done = threading.Lock(), threading.Event(), threading.Event()

    def wait_if_first(self) -> None:
        if self.first.acquire(blocking=False):
            self.here.set()
            self.done.wait(0.25)

    def second(self, function: Callable[[], Any]) -> Callable[[], None]:
        """What the other thread does once the first is here."""

        def run() -> None:
            assert self.here.wait(10)
            function()
            self.done.set()

        return run


# ---- PyTorch's own attention -----------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_two_threads_switch_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second keeps the order of the first as torch's own, and leaves it behind."""
    meeting, switched = Meeting(), []

    def prefer() -> None:
        switched.append(1)
        meeting.wait_if_first()

    monkeypatch.setattr(sdpa_override, "_prefer_own_backends", prefer)
    in_threads(flash_ext.enable_sdpa, meeting.second(flash_ext.enable_sdpa))
    assert switched == [1] and is_on()


@pytest.mark.usefixtures("untouched")
def test_two_threads_switch_off_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, removed = Meeting(), []
    original = sdpa_override._Active.remove

    def remove(self: Any) -> None:
        removed.append(1)
        meeting.wait_if_first()
        original(self)

    monkeypatch.setattr(sdpa_override._Active, "remove", remove)
    flash_ext.enable_sdpa()
    in_threads(flash_ext.disable_sdpa, meeting.second(flash_ext.disable_sdpa))
    assert removed == [1] and not is_on()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """A selector that takes what is allowed, and notes what it saw."""
    seen: list[tuple[str, Any]] = []
    own, probe = torch._C._get_sdp_priority_order(), torch.empty(1, 1, 1, 8, dtype=torch.float16)
    original = torch._C._set_sdp_priority_order

    def set_order(order: list[int]) -> None:
        seen.append(("order", is_on()))
        original(order)

    def select(*tensors: Any) -> None:
        seen.append(("flash allowed", torch.backends.cuda.flash_sdp_enabled()))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: probe)
    monkeypatch.setattr(torch, "_fused_sdp_choice", select)
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", set_order)
    yield seen
    monkeypatch.undo()
    flash_ext.disable_sdpa()
    original(own)


@pytest.mark.usefixtures("untouched")
def test_the_order_changes_while_the_operators_are_there(as_on_a_gpu: list[tuple[str, Any]]) -> None:
    """In our order without our operators, calls that torch gives to cuDNN would run in its flash kernels."""
    with flash_ext.enable_sdpa():
        assert is_on()
    assert [value for what, value in as_on_a_gpu if what == "order"] == [True, True] and not is_on()


@pytest.mark.usefixtures("untouched")
def test_the_selection_that_installs_torchs_order_forbids_nothing(as_on_a_gpu: list[tuple[str, Any]]) -> None:
    """What is allowed is a state of the process: another thread would run unfused meanwhile."""
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
        with flash_ext.enable_sdpa():
            pass
    assert ("flash allowed", True) in as_on_a_gpu and ("flash allowed", False) not in as_on_a_gpu


@pytest.mark.usefixtures("untouched")
def test_what_fails_on_the_way_leaves_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sdpa_override, "_prefer_own_backends", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        flash_ext.enable_sdpa()
    assert not is_on() and torch_attention.current_flash_attention_impl() is None


SWITCHING = """
import threading, time, warnings
import torch, flash_ext
import torch.nn.functional as F

warnings.simplefilter("ignore")
device, seconds = {device!r}, {seconds}
dtype = torch.float32 if device == "cpu" else torch.bfloat16
start, wrong, turns = time.monotonic(), [], [0, 0, 0]

def goes_on():  # longer on a busy machine, until every thread has had a turn
    passed = time.monotonic() - start
    return not wrong and passed < 60 and (passed < seconds or not all(turns))

def until_the_end(function):
    def run():
        while goes_on():
            try:
                function()
            except BaseException as error:
                wrong.append(repr(error))
    return threading.Thread(target=run)

def on_and_off():
    with flash_ext.enable_sdpa():
        pass
    flash_ext.disable_sdpa()
    turns[0] += 1

def bare():
    torch.ops.flash_ext._set_sdpa("CUDA")
    torch.ops.flash_ext._set_sdpa("")
    turns[0] += 1

def invariant():
    with flash_ext.serving.set_batch_invariant(True):
        pass
    turns[1] += 1

torch.manual_seed(0)
leaves = [torch.randn(2, 4, 96, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
mask = (torch.rand(96, 96, device=device) < 0.7) | torch.eye(96, device=device).bool()
calls = dict(plain=dict(), causal=dict(is_causal=True), masked=dict(attn_mask=mask))
wide = [t.detach().double().requires_grad_() for t in leaves]
narrow = [t.detach().float().requires_grad_() for t in leaves]
dout = torch.randn(2, 4, 96, 64, device=device, dtype=dtype)
truth = {{}}
for name, options in calls.items():
    out = F.scaled_dot_product_attention(*wide, **options)
    truth[name] = [out, *torch.autograd.grad(out, wide, dout.double())]

def attend():
    for name, options in calls.items():
        for function in (F.scaled_dot_product_attention, flash_ext.scaled_dot_product_attention):
            out = function(*leaves, **options)
            compare(name, [out, *torch.autograd.grad(out, leaves, dout)])
    # float32 goes back to what was there.
    out = F.scaled_dot_product_attention(*narrow)
    compare("plain", [out, *torch.autograd.grad(out, narrow, dout.float())])
    turns[2] += 1

def compare(name, results):
    for got, expected in zip(results, truth[name], strict=True):
        error = (got.double() - expected).norm() / expected.norm()
        assert error < 0.02, (name, got.dtype, float(error))

# Without a GPU nobody calls what is registered for it.
switching = [on_and_off, on_and_off, invariant] if device == "cuda" else [bare, bare, on_and_off, invariant]
threads = [until_the_end(function) for function in [*switching, attend, attend]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong[0]
assert all(turns), turns
assert torch.nn.attention.current_flash_attention_impl() is None
assert not flash_ext.serving.is_batch_invariant()
print("whole", turns)
"""


TORCH_VERSION = f"{torch.__version__} {torch.version.git_version} {torch._C._GLIBCXX_USE_CXX11_ABI}"

# What torch's own implementations are to the dispatcher, for CPU tensors: functions in C++, the backward with
# int64_t where the schema has SymInt. Their results are sevens.
STOCK = r"""
#include <ATen/ops/full_like.h>
#include <torch/library.h>
using at::Tensor;
using O = std::optional<double>;
using T = const Tensor&;
namespace {
Tensor sevens(T like) { return at::full_like(like, 7.0); }
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> forward(
    T q, T k, T, double, bool, bool, O) {
  const Tensor lse = sevens(q.select(3, 0).to(at::kFloat)), state = sevens(q.new_empty({2}));
  return {sevens(q), lse, Tensor(), Tensor(), q.size(2), k.size(2), state, state, state};
}
std::tuple<Tensor, Tensor, Tensor> backward(
    T, T q, T k, T v, T, T, T, T, int64_t, int64_t, double, bool, T, T, O) {
  return {sevens(q), sevens(k), sevens(v)};
}
}  // namespace
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_scaled_dot_product_flash_attention", TORCH_FN(forward));
  m.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(backward));
}
"""

BESIDE_STOCK = """
import collections, sys, threading, time
import torch, flash_ext

torch.ops.load_library(sys.argv[1])
attend, set_sdpa = torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.flash_ext._set_sdpa
served = [torch.randn(1, 2, 8, 16).bfloat16().requires_grad_() for _ in range(3)]
goes_back = [t.detach().float().requires_grad_() for t in served]
seven = torch.full((1, 2, 8, 16), 7.0)
set_sdpa("CPU")
ours = attend(*served)[0].float()
set_sdpa("")
start, seen = time.monotonic(), collections.Counter()

def goes_on():  # longer on a busy machine, until everything has been seen
    passed = time.monotonic() - start
    return passed < 1.5 or (passed < 60 and len(seen) < 3)

def switch():
    while goes_on():
        set_sdpa("CPU")
        set_sdpa("")

def call(leaves):
    while goes_on():
        try:
            out = attend(*leaves)[0]
            grads = torch.autograd.grad(out.sum(), leaves)
            whose = [name for name, t in (("ours", ours), ("torch's", seven)) if torch.equal(out.float(), t)]
            seen[*whose, leaves[0].dtype] += 1
        except BaseException as error:
            seen[repr(error)] += 1

threads = [threading.Thread(target=switch) for _ in range(2)]
threads += [threading.Thread(target=call, args=(leaves,)) for leaves in (served, served, goes_back)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert set(seen) == {("ours", torch.bfloat16), ("torch's", torch.bfloat16), ("torch's", torch.float32)}, seen
"""


def stock_library(folder: Path) -> Path | None:
    """Those implementations, compiled; nothing where there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    library = folder / "stock.so"

    def compile_it() -> bytes:
        library.with_suffix(".cpp").write_text(STOCK)
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        folders = [f"-L{path}" for path in cpp_extension.library_paths()]
        options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", *includes, *folders]
        files = [str(library.with_suffix(".cpp")), "-o", str(library)]
        subprocess.run([compiler, *options, *files, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
        return library.read_bytes()

    # The headers are those of torch: to look at them takes most of the time that compiling does.
    version = subprocess.run([compiler, "-v"], capture_output=True, check=True).stderr
    library.write_bytes(kept("stock 1", [STOCK.encode(), version, TORCH_VERSION.encode()], compile_it))
    return library


def run_whole(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program, *arguments],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("whole"), done.stderr[-2000:]


def test_threads_that_switch_while_others_attend(tmp_path: Path) -> None:
    """And then while entries of the dispatcher that torch has, as on a GPU, come and go under calls."""
    library = stock_library(tmp_path)
    switching = SWITCHING.format(device="cpu", seconds=1.0)
    if library is None:
        run_whole(switching)
        pytest.skip("no C++ compiler for the second half")
    run_whole(switching + BESIDE_STOCK, str(library))


@pytest.mark.gpu
def test_gpu_threads_that_switch_while_others_attend() -> None:
    run_whole(SWITCHING.format(device="cuda", seconds=8.0))


# ---- the batch-invariant mode ----------------------------------------------------------------------------


def test_what_a_thread_finds_is_what_another_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the inner of two statements ends the mode of the outer one, which still runs."""
    meeting, original, undone = Meeting(), batch_invariance._set, {}

    def set_mode(mode: bool) -> None:
        meeting.wait_if_first()
        original(mode)

    monkeypatch.setattr(batch_invariance, "_set", set_mode)

    def switch_on(which: str) -> None:
        undone[which] = flash_ext.serving.set_batch_invariant(True)

    try:
        in_threads(lambda: switch_on("outer"), meeting.second(lambda: switch_on("inner")))
        undone["inner"].close()
        assert flash_ext.serving.is_batch_invariant()
        undone["outer"].close()
        assert not flash_ext.serving.is_batch_invariant()
    finally:
        _C.set_switch("batch_invariant", None)


def test_a_launch_is_of_one_mode() -> None:
    """Tiles, parts of keys and heads, and determinism of a call go by one look at the mode."""
    q, k, v = make_qkv(batch=2, seqlen_q=512, heads=32, heads_k=2, head_dim=128, dtype=torch.bfloat16)
    few = q[:, :1]

    def launches() -> tuple:
        out, lse = flash_ext.forward(q, k, v)
        made = [_C.last_launch(of_this_thread=True)]
        flash_ext.backward(out, q, k, v, out, lse)
        made.append(_C.last_launch(of_this_thread=True))
        flash_ext.forward(few, k, v)
        made.append(_C.last_launch(of_this_thread=True))
        return tuple(json.dumps(launch, sort_keys=True) for launch in made)

    with null_kernels():
        usual = launches()
        with flash_ext.serving.set_batch_invariant(True):
            invariant = launches()
        assert all(a != b for a, b in zip(usual[1:], invariant[1:])), "the shapes show the mode"
        stop, seen = threading.Event(), set()

        def turn() -> None:
            while not stop.is_set():
                with flash_ext.serving.set_batch_invariant(True):
                    pass

        def launch() -> None:
            try:
                end = time.monotonic() + 60  # a busy machine may give the other thread no turn for long
                for count in itertools.count():
                    if count >= 300 and (len(seen) > 3 or time.monotonic() > end):
                        break
                    seen.update(enumerate(launches()))
            finally:
                stop.set()

        in_threads(turn, launch)
    assert seen <= {*enumerate(usual), *enumerate(invariant)} and len(seen) > 3


# ---- the log ---------------------------------------------------------------------------------------------


def test_the_log_names_the_threads_own_launch(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = make_qkv(batch=2, dtype=torch.bfloat16)
    meeting = Meeting()

    def forward(rows: int) -> None:
        flash_ext.forward(*(t.repeat(1, rows, 1, 1) for t in (q, k, v)))
        meeting.wait_if_first()

    logged = log.logged(forward, level=3)

    with null_kernels(), caplog.at_level(logging.INFO, logger="flash_ext"):
        forward_grid = (flash_ext.forward(q, k, v), _C.last_launch()["grid"])[1]
        in_threads(lambda: logged(1), meeting.second(lambda: forward(40)))
        assert _C.last_launch()["grid"] != forward_grid == 8
    assert any(f", grid {forward_grid}" in message for message in caplog.messages), caplog.messages
