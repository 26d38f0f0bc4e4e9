"""Streams, CUDA graphs, devices, processes, and running out of memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest
from tests.attention.calls import assert_same, results
from tests.cases import Case, dense, packed
from tests.graphs import capture
from tests.harness import Target, call_forward, on_gpu_paths, run_case
from tests.inputs import Inputs, make_inputs
from tests.sources import ROOT

CASES = [
    dense(2, 300, 300, 4, 2, 128, causal=True, deterministic=True),
    packed([1, 200, 0, 77], [5, 190, 3, 77], num_heads=4, num_heads_k=2, head_dim=64, causal=True,
           deterministic=True, dlse=True),
]  # fmt: skip


# ---- devices ----


@contextlib.contextmanager
def stream_of_another_device(device: int) -> Iterator[torch.cuda.Stream]:
    """A new stream is the current one of that device, which itself is not the current device."""
    current = torch.cuda.current_device()
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(before)
    try:
        torch.cuda.set_stream(stream)  # this makes its device the current one
        torch.cuda.set_device(current)
        yield stream
        before.wait_stream(stream)
    finally:
        torch.cuda.set_stream(before)
        torch.cuda.set_device(current)


@on_gpu_paths
def test_tensors_on_a_device_that_is_not_current(target: Target) -> None:
    """Also with a stream of that device: where GPUs reach each other's memory, a kernel that was launched on
    the wrong one gives the right numbers, but no other device launches into this stream."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for case in CASES:
        here, there = make_inputs(case, "cuda:0"), make_inputs(case, "cuda:1")
        for name in ("q", "k", "v", "dout", "dlse"):
            if getattr(here, name) is not None:
                getattr(there, name).copy_(getattr(here, name))
        expected = results(here, target)
        for streams in (contextlib.nullcontext(), stream_of_another_device(1)):
            with streams:
                assert torch.cuda.current_device() == 0
                got = results(there, target)
                assert torch.cuda.current_device() == 0
            assert all(t.device == torch.device("cuda:1") for t in got)
            assert_same([t.to("cuda:0") for t in got], expected, str(case))


@on_gpu_paths
def test_tensors_on_different_devices_are_refused(target: Target) -> None:
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    others = [torch.device("cpu")] + ([torch.device("cuda:1")] if torch.cuda.device_count() > 1 else [])
    for other in others:
        with pytest.raises(ValueError, match="one device"):
            flash_ext.attention(q, q.to(other), q)


@on_gpu_paths
def test_a_backend_of_another_device_is_refused(target: Target) -> None:
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="path|backend"):
        flash_ext.attention(q, q, q, backend="cpu")
    with pytest.raises(ValueError, match="path|backend"):
        flash_ext.attention(q.cpu(), q.cpu(), q.cpu(), backend=target.path)


# ---- streams ----


@on_gpu_paths
def test_work_is_done_on_the_current_stream(target: Target) -> None:
    """Inputs that a slow kernel on a side stream is still to write: a launch elsewhere would read zeros."""
    for case in CASES:
        x = make_inputs(case, target.device)
        expected = results(x, target)
        kept = {name: getattr(x, name).clone() for name in ("q", "k", "v", "dout")}
        for name in kept:
            getattr(x, name).zero_()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # about 50 ms
            for name, values in kept.items():
                getattr(x, name).copy_(values)
            got = results(x, target)
        stream.synchronize()
        assert_same(got, expected, str(case))


@on_gpu_paths
def test_autograd_uses_the_stream_of_the_forward(target: Target) -> None:
    q, k, v, dout = (torch.randn(2, 200, 4, 64, device="cuda").to(torch.bfloat16) for _ in range(4))

    def run() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = flash_ext.attention(*leaves, causal=True, deterministic=True, backend=target.path)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    expected = run()
    kept = [t.clone() for t in (q, k, v, dout)]
    for t in (q, k, v, dout):
        t.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for t, values in zip((q, k, v, dout), kept):
            t.copy_(values)
        got = run()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


# ---- graphs ----


def refill(x: Inputs, seed: int) -> None:
    """Other values for the same tensors, in place."""
    other = make_inputs(x.case.replace(seed=seed), x.q.device)
    for name in ("q", "k", "v", "dout", "dlse"):
        if getattr(x, name) is not None:
            getattr(x, name).copy_(getattr(other, name))


@pytest.mark.caching
@pytest.mark.parametrize("backward", [False, True])
@on_gpu_paths
def test_graph_capture_and_replay_with_new_data(target: Target, backward: bool) -> None:
    """Capture fails on any synchronisation or allocation outside the pool; replays read the new inputs."""
    for case in CASES:
        x = make_inputs(case, target.device)

        def call(x: Inputs = x) -> list[Tensor]:
            return results(x, target) if backward else list(call_forward(x, target))

        graph, captured = capture(call)
        for seed in range(100 if backward else 20):
            refill(x, seed)
            for t in captured:
                t.fill_(float("nan"))
            graph.replay()
            assert_same(captured, call(), f"{case}, replay {seed}")


@pytest.mark.caching
@on_gpu_paths
def test_graph_replay_with_other_lengths(target: Target) -> None:
    """Lengths are read on the device at every replay; those seen at capture mean nothing."""
    x = make_inputs(
        packed([100, 50, 50], [100, 50, 50], num_heads=4, num_heads_k=2, deterministic=True), "cuda"
    )
    graph, captured = capture(lambda: results(x, target))
    for lens in ([1, 1, 1], [0, 200, 0], [200, 0, 0], [0, 0, 0], [3, 190, 7], [64, 64, 72]):
        cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
        x.cu_seqlens_q.copy_(cu)
        x.cu_seqlens_k.copy_(cu)
        graph.replay()
        assert_same(captured, results(x, target), str(lens))


@on_gpu_paths
def test_the_same_shapes_at_other_addresses(target: Target) -> None:
    """TMA descriptors hold addresses: memory that was freed and given out again, or lies elsewhere, is read
    where it is now."""
    for case in CASES:
        held, addresses = [], set()
        with target.active():
            for seed in range(6):
                x = run_case(case.replace(seed=seed), target).inputs
                addresses.add(x.k.data_ptr())
                if seed % 2:
                    held.append(x)  # so that the next one has to lie elsewhere
        assert len(addresses) > 1, "all inputs lay at one address: nothing was tried"


@pytest.mark.caching
@on_gpu_paths
def test_autograd_inside_a_graph(target: Target) -> None:
    leaves = [torch.randn(2, 200, 4, 64, device="cuda").to(torch.bfloat16).requires_grad_() for _ in range(3)]
    dout = torch.randn(2, 200, 4, 64, device="cuda").to(torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out = flash_ext.attention(*leaves, causal=True, deterministic=True, backend=target.path)
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, captured = capture(step)
    for _ in range(5):
        with torch.no_grad():
            for t in (*leaves, dout):
                t.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step()))


@on_gpu_paths
def test_every_option_counts_in_every_call(target: Target) -> None:
    """Calls that differ in one option only, in turn: nothing of a former call is kept."""
    base = dense(1, 150, 150, 2, 1, 64, deterministic=True)
    variants: list[Case] = [
        base,
        base.replace(scale=0.5),
        base.replace(causal=True),
        base.replace(window=(9, -1)),
        base.replace(window=(9, 3)),
        base.replace(head_dim_v=40),
        base,
    ]
    first = {}
    for _ in range(2):
        for case in variants:
            got = results(make_inputs(case, target.device), target)
            expected = first.setdefault(case, got)
            assert_same(got, expected, str(case))
    for i, a in enumerate(variants[:-1]):
        for b in variants[i + 1 : -1]:
            assert first[a][0].shape != first[b][0].shape or not torch.equal(first[a][0], first[b][0]), (
                f"{a} as {b}"
            )


# ---- processes ----

FORK = """
import os, sys
import torch, flash_ext
assert not torch.cuda.is_initialized(), "importing made a CUDA context"
child = os.fork()
if child == 0:
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    out = flash_ext.attention(q, q, q, causal=True)
    torch.cuda.synchronize()
    os._exit(0 if torch.isfinite(out).all() else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@on_gpu_paths
def test_fork_after_import(target: Target) -> None:
    """Importing makes no context, so a forked child can use the GPU."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


TRAP = """
import time
import torch, flash_ext

q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
assert torch.isfinite(flash_ext.attention(q, q, q)).all()
torch._assert_async(torch.zeros(1, device="cuda"))
time.sleep(1)  # the trap has come by then, and nobody has asked for it yet
for call in range(3):
    try:
        flash_ext.attention(q, q, q)
        print("no exception")
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
"""


@on_gpu_paths
def test_a_lost_context_is_an_exception_that_says_so(target: Target) -> None:
    """After a trap on the device, here an assertion of PyTorch's: one exception a call, no crash, no hang."""
    done = subprocess.run(
        [sys.executable, "-c", TRAP], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout
    for line in lines:
        assert "flash_ext forward, backend sm" in line and "the CUDA context is lost" in line, line


CHILD = """
import os
from tests.harness import TARGETS
from tests.attention.test_system import digest
print("ready", flush=True)
input()
for _ in range(20):
    print(digest(TARGETS[os.environ["FLASH_EXT_TEST_TARGET"]]), flush=True)
"""


def digest(target: Target) -> str:
    """Hash of the bits of all results of all cases."""
    bits = hashlib.sha256()
    for case in CASES:
        for t in results(make_inputs(case, target.device), target):
            bits.update(t.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return bits.hexdigest()


def digests_of_children(count: int, target: Target, environment: dict[str, str]) -> list[str]:
    """What processes that run at the same time print, each 20 digests."""
    own = {"PYTHONPATH": str(ROOT), "FLASH_EXT_TEST_TARGET": target.name}
    environment = {**os.environ, **own, **environment}
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CHILD],
                    cwd=ROOT,
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for _ in range(count)
        ]
        try:
            for child in children:
                assert child.stdout.readline() == "ready\n"
            for child in children:
                child.stdin.write("\n")
                child.stdin.flush()
            printed = [child.communicate(timeout=120)[0].split() for child in children]
        finally:
            for child in children:
                child.kill()
    assert all(child.returncode == 0 for child in children)
    return [line for lines in printed for line in lines]


@on_gpu_paths
def test_processes_share_a_gpu(target: Target) -> None:
    """Three at a time give the bits of one by itself."""
    expected = digest(target)
    found = digests_of_children(3, target, {})
    assert found == [expected] * 60


@on_gpu_paths
def test_processes_share_a_gpu_through_mps(target: Target, tmp_path: Path) -> None:
    """The same as clients of one server, whose kernels run side by side."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("needs nvidia-cuda-mps-control")
    expected = digest(target)
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log"),
    }
    for folder in environment.values():
        Path(folder).mkdir()
    own = {**os.environ, **environment}
    started = subprocess.run([control, "-d"], env=own, capture_output=True, text=True, check=False)
    if started.returncode:
        pytest.skip("nvidia-cuda-mps-control does not start here")
    try:
        probe = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
        if subprocess.run(probe, env=own, capture_output=True, timeout=120, check=False).returncode:
            pytest.skip("no process reaches the GPU through MPS here")
        assert digests_of_children(3, target, environment) == [expected] * 60
    finally:
        subprocess.run([control], input="quit\n", env=own, text=True, timeout=60, check=False)


@pytest.mark.alone
@pytest.mark.caching
@on_gpu_paths
def test_out_of_memory_is_an_exception_and_the_next_call_works(target: Target) -> None:
    case = CASES[0]
    expected = results(make_inputs(case, target.device), target)
    q = torch.zeros(1, 1 << 20, 8, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hold = torch.empty(max(free - (1 << 30), 0), dtype=torch.uint8, device="cuda")  # 1 GiB left, out needs 2
    try:
        with pytest.raises(torch.OutOfMemoryError):
            flash_ext.attention(q, q, q, window_size=(1, 0), backend=target.path)
    finally:
        del hold, q  # in the traceback of a failure they would fill the GPU for the tests behind
        torch.cuda.empty_cache()
    assert_same(results(make_inputs(case, target.device), target), expected, "after out of memory")


def test_meta_tensors_give_shapes() -> None:
    q, k = (
        torch.empty(2, 5, 4, 64, device="meta", dtype=torch.bfloat16),
        torch.empty(2, 9, 2, 64, device="meta", dtype=torch.bfloat16),
    )
    out, (lse, _) = flash_ext.attention(q, k, k[..., :40], return_aux=AuxRequest(lse=True))
    assert (out.shape, out.dtype) == ((2, 5, 4, 40), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
