"""Runs a case and checks what must hold for every case, whatever it is about.

F1 poison: free memory holds NaN before each call, so that nothing works by luck of a clean allocator.
F2 guards and F3 inputs unchanged: one comparison of the arena that holds all inputs and their surroundings.
F4 twice: a second run into freshly poisoned memory gives the same bits (dq: in deterministic mode).
F5 no CUDA error, the same current device and stream, no memory left behind.
F6 special values exactly where the truth has them, then every element within its noise (truth.py).
F7 the request reached the kernel: path, head size, determinism and loader of the recorded launch.
F8 cases that have hung or crashed elsewhere run in a child process: watchdog.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pytest
import torch
from torch import Tensor

from flash_ext._ops.library import _C
from flash_ext._ops.spec import AttnSpec
from tests import probes
from tests.cases import Case
from tests.inputs import POISON_BYTE, Inputs, make_inputs, tensor_shapes
from tests.judge import NoiseError, judge
from tests.refusals import check_refused
from tests.silence import WATCH, lose_context
from tests.truth import Truth, compute_truth


def choice_of(path: str, **constraints: int | str) -> str:
    """The text of ``backend=``: a path and what is asked of its kernels (Constraints in csrc/paths.h)."""
    return " ".join([path, *(f"{name}={value}" for name, value in constraints.items())])


@dataclass(frozen=True)
class Target:
    """Where a case runs: a device, a kernel path on it, and what its calls ask of the choice of kernels.

    switches: facts of the device to pretend.
    short: with the kernels for short sequences, which would otherwise keep small cases from all the others.
    constraints: of calls on a GPU.
    """

    name: str
    device: str
    path: str
    switches: tuple[tuple[str, int], ...] = ()
    short: bool = False
    constraints: tuple[tuple[str, int | str], ...] = ()

    @property
    def choice(self) -> str:
        """What calls pass as ``backend=``: the path and the constraints."""
        if self.device == "cpu":
            return self.path
        constraints = self.constraints if self.short else (("short_kernels", 0), *self.constraints)
        return choice_of(self.path, **dict(constraints))

    def asking(self, **constraints: int | str) -> Target:
        """The same with more constraints."""
        return dataclasses.replace(self, constraints=(*self.constraints, *constraints.items()))

    def pretending(self, **switches: int) -> Target:
        """The same with more switches."""
        return dataclasses.replace(self, switches=(*self.switches, *switches.items()))

    def why_not(self) -> str:
        """Why this machine cannot run the target; empty if it can."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return "needs a CUDA device, none is visible"
        return ""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Sets the switches for the duration, and records launches where there are any."""
        switches = dict(self.switches)
        if self.device == "cuda":
            switches["record_launches"] = 1
        for name, value in switches.items():
            _C.set_switch(name, value)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the matrices are tiny: more threads only wait for each other
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            for name in switches:
                _C.set_switch(name, None)

    def pick(self, cases: list[Any], cpu: int) -> list[Any]:
        """All cases on a GPU; about ``cpu`` of them, evenly spread, where there is none."""
        if self.device == "cuda" or len(cases) <= cpu:
            return cases
        return cases[:: math.ceil(len(cases) / cpu)]


SMALL_SMEM_BYTES = 101376  # what sm_86, sm_89 and sm_120 allow one block
TARGETS = {
    t.name: t
    for t in (
        Target("cpu", "cpu", "cpu"),
        Target("sm80", "cuda", "sm80"),
        Target("sm90", "cuda", "sm90"),
        Target("sm80-99k", "cuda", "sm80", (("smem_per_block", SMALL_SMEM_BYTES),)),
        Target("sm90-few", "cuda", "sm90", (("num_sms", 3),)),
        Target("sm80-short", "cuda", "sm80", short=True),
        Target("sm90-short", "cuda", "sm90", short=True),
    )
}


def on_targets(*names: str):
    """Parametrizes a test by targets; those on a GPU get the `gpu` marker."""
    parameters = [
        pytest.param(TARGETS[name], id=name, marks=pytest.mark.gpu if TARGETS[name].device == "cuda" else [])
        for name in names
    ]
    return pytest.mark.parametrize("target", parameters)


# Most tests: each path once. Those about tiles: also with the tiles of GPUs with little shared memory.
on_paths = on_targets("cpu", "sm80", "sm90")
on_all_tiles = on_targets("cpu", "sm80", "sm80-99k", "sm90")
# Also with three multiprocessors, whose CTAs go on from one work tile to the next.
on_all_schedules = on_targets("cpu", "sm80", "sm80-99k", "sm90", "sm90-few")
on_gpu_paths = on_targets("sm80", "sm90")
on_short_paths = on_targets("sm80-short", "sm90-short")
# With modifiers the sm90 path has all forwards and most backwards; the rest runs in the sm80 kernels.
on_modifier_paths = on_targets("cpu", "sm80", "sm90")
on_modifier_tiles = on_targets("cpu", "sm80", "sm80-99k", "sm90")
on_modifier_gpu_paths = on_targets("sm80", "sm90")


class CaseFailure(AssertionError):
    """A case did not hold; the message starts with the line that repeats it."""


class DeviceLost(RuntimeError):
    """The CUDA context no longer works: nothing that runs afterwards in this process means anything."""


class AnyCase(Protocol):
    """A plain case, or one with modifiers."""

    PROGRAM: ClassVar[str]

    def to_json(self) -> str: ...


def repro_line(case: AnyCase, target: Target) -> str:
    return f"python -m {case.PROGRAM} --target {target.name} --repro '{case.to_json()}'"


# --------------------------------------------------------------------------------------------------
# Calls


def call_forward(x: Inputs, target: Target) -> tuple[Tensor, Tensor]:
    """(out, lse) straight from the operator."""
    case = x.case
    left, right = case.effective_window
    return torch.ops.flash_ext.fwd(x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_k, *x.max_seqlens, case.scale,
                                   left, right, case.deterministic, target.choice)  # fmt: skip


def call_backward(x: Inputs, out: Tensor, lse: Tensor, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) straight from the operator."""
    case = x.case
    left, right = case.effective_window
    return torch.ops.flash_ext.bwd(x.dout, x.q, x.k, x.v, out, lse, x.dlse, x.cu_seqlens_q, x.cu_seqlens_k,
                                   *x.max_seqlens, case.scale, left, right, case.deterministic,
                                   target.choice)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Poison


@contextlib.contextmanager
def poisoned(device: str, sizes: Iterable[int]) -> Iterator[None]:
    """Inside, fresh memory holds NaN; on leaving a GPU, the bytes beside it are still what they were.

    ``sizes`` are the byte counts that the call is expected to allocate. On a GPU blocks of these sizes are
    filled, with small canaries kept between them, and freed: the caching allocator hands them out next. On
    the CPU, PyTorch itself fills new tensors.
    """
    if device == "cpu":
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # the mode in which fill_uninitialized_memory works
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)
        return
    canaries = [_poisoned_block(512)]
    holes = []
    for size in sizes:
        holes += [_poisoned_block(size), _poisoned_block(size)]
        canaries.append(_poisoned_block(512))
    del holes
    yield
    if not bool((torch.stack(canaries) == POISON_BYTE).all()):
        raise CaseFailure("memory that belongs to another tensor was written")


def _poisoned_block(size: int) -> Tensor:
    return torch.full((max(size, 1),), POISON_BYTE, dtype=torch.uint8, device="cuda")


def poison_pool(total: int = 2 << 30) -> None:
    """Fills free GPU memory with NaN in blocks of many sizes, for calls that are not run as cases."""
    sizes = [1 << power for power in range(9, 28)] * 4
    blocks, used = [], 0
    for size in sizes:
        if used + size <= total:
            blocks.append(_poisoned_block(size))
            used += size


def _plan(direction: str, case: Case, target: Target, tma: bool = True) -> dict:
    """What a case would launch, with tensors that TMA can read or with others, which have fewer rows."""
    if not tma:
        others = tuple(pair for pair in target.constraints if pair[0] != "row")
        target = dataclasses.replace(target, constraints=others)
    shapes = tensor_shapes(case)
    left, right = (min(reach, 2**31 - 1) for reach in case.effective_window)  # as the operators clamp it
    return _C.plan(
        direction, dtype="float16" if case.dtype == "fp16" else "bfloat16", packed=case.is_packed,
        batch=len(case.lens_q) if case.is_packed else case.batch, seqlen_q=shapes["q"][-3],
        seqlen_k=shapes["k"][-3], num_heads=case.num_heads, num_heads_k=case.num_heads_k,
        head_dim=case.head_dim, head_dim_v=case.dim_v, window_size_left=left, window_size_right=right,
        deterministic=case.deterministic and direction == "bwd", backend=target.choice, tma=tma,
    )  # fmt: skip


def _expected_allocations(case: Case, target: Target) -> tuple[list[int], list[int]]:
    """Byte counts that forward and backward allocate: results, then the workspace."""
    shapes = {name: math.prod(shape) for name, shape in tensor_shapes(case).items()}
    forward, backward = [2 * shapes["out"], 4 * shapes["lse"]], [2 * shapes[name] for name in "qkv"]
    return (
        [*forward, *planned_workspaces("fwd", case, target)],
        [*backward, *planned_workspaces("bwd", case, target)],
    )


def planned_workspaces(direction: str, case: Case, target: Target) -> set[int]:
    """Byte counts that the workspace of a call without modifiers may have."""
    if target.device == "cpu":
        return set()
    return {_plan(direction, case, target, tma).get("workspace_bytes", 0) for tma in (False, True)}


# --------------------------------------------------------------------------------------------------
# One case


@dataclass
class Results:
    """What the runs of one case returned, with the truth beside it."""

    inputs: Inputs
    tensors: dict[str, Tensor]
    truth: Truth
    errors: dict[str, NoiseError]


def run_case(case: Case, target: Target) -> Results:
    """Runs a case twice, checks F1 to F7 and returns the results.

    Raises:
        CaseFailure: something does not hold; the message begins with the line that repeats the case.
        DeviceLost: a CUDA error; the process cannot go on.
    """
    with naming(case, target):
        return _run_case(case, target)


@contextlib.contextmanager
def naming(case: AnyCase, target: Target) -> Iterator[None]:
    """Whatever is raised inside becomes a CaseFailure or DeviceLost that names the case."""
    WATCH.alive(repro_line(case, target))
    try:
        yield
    except Exception as error:
        words = f"{repro_line(case, target)}\n    "
        words += str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError) and target.device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # every later call would fail, whatever it does
                raise DeviceLost(words) from error
        raise CaseFailure(words) from error
    finally:
        WATCH.alive("")


def _run_case(case: Case, target: Target) -> Results:
    x = make_inputs(case, target.device)
    if case.invalid:
        check_refused(x, target.device)
        return Results(x, {}, Truth({}, {}, {}, {}), {})
    forward_sizes, backward_sizes = _expected_allocations(case, target)
    results: dict[str, Tensor] = {}
    repeats: dict[str, Tensor] = {}
    with staying_in_place(target.device):
        for run in (results, repeats):
            with poisoned(target.device, forward_sizes), leaving_nothing_behind(target.device, run):
                run["out"], run["lse"] = call_forward(x, target)
            _check_launch(case, target, "fwd", (x.q, x.k, x.v))
            if case.backward:
                out, lse = results["out"], results["lse"]
                with poisoned(target.device, backward_sizes), leaving_nothing_behind(target.device, run):
                    run["dq"], run["dk"], run["dv"] = call_backward(x, out, lse, target)
                _check_launch(case, target, "bwd", (x.q, x.k, x.v, x.dout, out))
    assert x.unchanged(), "an input or the memory around it was written"
    check_forms(case, results)
    truth = compute_truth(x, case.backward)
    errors = judge(results, repeats, truth, case.deterministic)
    return Results(x, results, truth, errors)


@contextlib.contextmanager
def staying_in_place(device: str) -> Iterator[None]:
    """F5: the current device and stream stay what they are, and all work ends without an error."""
    if device == "cpu":
        yield
        return
    place = torch.cuda.current_device(), torch.cuda.current_stream()
    yield
    torch.cuda.synchronize()
    now = torch.cuda.current_device(), torch.cuda.current_stream()
    assert place == now, f"current device or stream moved from {place} to {now}"


@contextlib.contextmanager
def leaving_nothing_behind(device: str, kept: dict[str, Tensor]) -> Iterator[None]:
    """F5: on a GPU, inside, nothing stays allocated but the tensors added to ``kept``."""
    if device == "cpu":
        yield
        return
    old = set(kept)
    before = torch.cuda.memory_allocated()
    yield
    # The allocator rounds up to 512 bytes, and does not split what is left of a large block.
    sizes = [t.untyped_storage().nbytes() for name, t in kept.items() if name not in old]
    allowed = sum(-(-size // 512) * 512 + (1 << 20 if size > 1 << 20 else 0) for size in sizes)
    grown = torch.cuda.memory_allocated() - before
    assert grown <= allowed, f"{grown} bytes stay allocated after the call, its results take {allowed}"


def check_done_launches(launch: dict) -> None:
    """What ran is what the plan says, launch by launch, and what a plan behind it says."""
    done, planned = _C.done_launches(), launch["launches"] + launch.get("then", {"launches": []})["launches"]
    ran_all = [one["name"] for one in done]
    assert len(done) == len(planned), f"{ran_all} ran, not {[one['kernel'] for one in planned]}"
    for ran, wanted in zip(done, planned, strict=True):
        assert wanted["kernel"].startswith(ran["name"]), f"{ran_all} ran, {wanted['kernel']} was planned"
        facts = ["pdl", "grid", "threads"] + (["smem_bytes"] if "smem_bytes" in wanted else [])
        for name in facts:
            assert ran[name] == wanted[name], f"{ran['name']} for {wanted['kernel']}: {name} {ran[name]}"


def launch_of(case: Case, target: Target, direction: str) -> dict | None:
    """The recorded launch, of that direction; None where nothing is launched."""
    nothing_to_do = not all(math.prod(shape) for shape in tensor_shapes(case).values()) or case.lens_q == ()
    if target.device == "cpu" or nothing_to_do:
        return None
    launch = _C.last_launch()
    assert launch is not None and launch["direction"] == direction, f"no {direction} launch was recorded"
    return launch


def check_launch_facts(launch: dict, case: Case, target: Target, wanted: str) -> None:
    """Path, head size, determinism and shared memory are those that were asked for."""
    if "split" in launch["kernel"] or "short" in launch["kernel"]:
        wanted = "sm80"  # the kernels for few queries and for short sequences serve both paths
    assert launch["backend"] == wanted, f"kernels of path {wanted} were due, of {launch['backend']} ran"
    compiled = int(launch["kernel"].rsplit("hd", 1)[1].split("_")[0])
    assert compiled >= max(case.head_dim, case.dim_v), (
        f"{launch['kernel']} for head sizes {case.head_dim}, {case.dim_v}"
    )
    if launch["direction"] == "bwd":
        assert launch["deterministic"] == case.deterministic, f"deterministic={launch['deterministic']} ran"
    limit = dict(target.switches).get("smem_per_block")
    assert limit is None or launch["smem_bytes"] <= limit, f"{launch['smem_bytes']} bytes of shared memory"


def _check_launch(case: Case, target: Target, direction: str, tensors: tuple[Tensor, ...]) -> None:
    """F7: the recorded launch is the one that was asked for."""
    if (launch := launch_of(case, target, direction)) is None:
        return
    wanted = kernels_of(target, native=direction == "fwd" or case.head_dim % 8 == 0, tensors=tensors)
    splits = dict(target.constraints).get("kv_splits")
    if direction == "fwd" and splits is not None:
        assert launch["splits"] == max(1, splits), f"keys in {launch['splits']} parts, not {splits}"
        in_parts = any(name in launch["kernel"] for name in ("split", "parts", "packed"))
        assert in_parts == (splits > 0), f"{launch['kernel']} ran for {splits} parts"
    check_done_launches(launch)
    assert launch["aligned"] == all(_is_aligned(t) for t in tensors), f"aligned={launch['aligned']} ran"
    check_launch_facts(launch, case, target, wanted)


def kernels_of(target: Target, native: bool, tensors: tuple[Tensor, ...]) -> str:
    """The path whose kernels run: sm90 has some of its own (``native``), for what TMA can read and write."""
    if target.path != "sm90":
        return target.path
    tensors = tensors[:4]  # out, which only forwards write and a backward reads in rows, is not among them
    ready = native and tensors[-1].shape[-1] % 8 == 0 and all(_is_aligned(t) for t in tensors)
    expanded = any(t.shape[-3] > 1 and t.stride(-3) == 0 for t in tensors)
    return "sm90" if ready and not expanded else "sm80"


def _is_aligned(t: Tensor) -> bool:
    """Whether every row starts on a 16-byte boundary."""
    strides = [s for n, s in zip(t.shape[:-1], t.stride()[:-1]) if n > 1]
    return t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in strides)


def check_forms(case: Case, results: dict[str, Tensor], leaves: Mapping[str, Tensor] | None = None) -> None:
    """Shapes and types of the results; contiguity of those that the operators make.

    ``leaves`` have the form of their gradients, by whose names they are known.
    """
    shapes, leaves = tensor_shapes(case), leaves or {}
    for name, t in results.items():
        is_statistic = name in ("lse", "row_max")
        shape = shapes["lse" if is_statistic else name.removeprefix("d")] if name not in leaves else None
        dtype = torch.float32 if is_statistic else case.torch_dtype
        if (leaf := leaves.get(name)) is not None:
            shape, dtype = tuple(leaf.shape), leaf.dtype
        assert tuple(t.shape) == shape, f"{name} has shape {tuple(t.shape)}, not {shape}"
        assert t.dtype == dtype, f"{name} is {t.dtype}, not {dtype}"
        assert leaf is not None or t.is_contiguous(), f"{name} has strides {t.stride()}"


# --------------------------------------------------------------------------------------------------
# Many cases in one test


def run_cases(cases: Iterable[Case], target: Target) -> dict[str, float]:
    """Runs all cases in one test, without pytest's cost per test, and fails with the first failures.

    Returns the largest error of each tensor over all cases, in noise units.
    """
    worst: dict[str, float] = {}

    def run(case: Case) -> None:
        for name, error in run_case(case, target).errors.items():
            worst[name] = max(error.largest, worst.get(name, 0.0))

    for_each_case(cases, target, run)
    return worst


def run_probes(cases: Iterable[Case], target: Target, only: Callable | None = None) -> None:
    """Runs the exact probes that fit each case, or one of them; masks, shapes and packing are what counts."""

    for_each_case(cases, target, lambda case: probe_case(case, target, only))


def probe_case(case: Case, target: Target, only: Callable | None = None) -> None:
    """The exact probes of one case, or just one, with the default scale. Raises as run_case() does."""
    with naming(case, target):
        _probe_case(case.replace(softmax_scale=None), target, only)


def _probe_case(case: Case, target: Target, only: Callable | None) -> None:

    def options(spec: AttnSpec) -> tuple:
        window = spec.window_left, spec.window_right
        return 0, 0, spec.softmax_scale, *window, case.deterministic, target.choice

    def forward(q, k, v, spec, cu_q, cu_k):
        cu_q, cu_k = (cu if cu is None else cu.contiguous() for cu in (cu_q, cu_k))
        return torch.ops.flash_ext.fwd(q, k, v, cu_q, cu_k, *options(spec))

    def backward(dout, q, k, v, out, lse, spec, dlse, cu_q, cu_k):
        cu_q, cu_k = (cu if cu is None else cu.contiguous() for cu in (cu_q, cu_k))
        return torch.ops.flash_ext.bwd(dout, q, k, v, out, lse, dlse, cu_q, cu_k, *options(spec))

    for probe in probes.probes_for(case) if only is None else [only]:
        if probe in (probes.permute_heads, probes.permute_sequences) and case.backward:
            probe(case, target.device, forward, backward)
        else:
            probe(case, target.device, forward)
    if case.backward and only is None:
        probes.sparse_dout(case, target.device, forward, backward)


def for_each_case(cases: Iterable, target: Target, run: Callable[[Any], Any], show: int = 8) -> None:
    """Runs all cases in one test and fails with the first failures."""
    reason = target.why_not()
    if reason:
        pytest.skip(reason)
    failures, count = [], 0
    with target.active():
        for case in cases:
            count += 1
            try:
                run(case)
            except CaseFailure as failure:
                failures.append(str(failure))
            except DeviceLost as lost:
                lose_context(str(lost))
    if failures:
        shown = "\n".join(failures[:show])
        pytest.fail(f"{len(failures)} of {count} cases failed\n{shown}", pytrace=False)
