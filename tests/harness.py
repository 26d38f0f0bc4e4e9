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
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext._ops.library import _C
from tests.cases import Case
from tests.inputs import Inputs, make_inputs
from tests.judge import NoiseError, judge
from tests.launches import check_launch, expected_allocations, note_workspace
from tests.layouts import tensor_shapes
from tests.memory import leaving_nothing_behind, poisoned, staying_in_place
from tests.modifier_truth import GRADIENTS, compute_modifier_truth
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


class CaseFailure(AssertionError):
    """A case did not hold; the message starts with the line that repeats it."""


class DeviceLost(RuntimeError):
    """The CUDA context no longer works: nothing that runs afterwards in this process means anything."""


def repro_line(case: Case, target: Target) -> str:
    return f"python -m tests.tools.fuzz --target {target.name} --repro '{case.to_json()}'"


@contextlib.contextmanager
def naming(case: Case, target: Target) -> Iterator[None]:
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


# --------------------------------------------------------------------------------------------------
# Calls

RESULTS = ("out", "lse", "row_max")
EVERYTHING = flash_ext.AuxRequest(lse=True, max_scores=True)


def call_forward(x: Inputs, target: Target) -> tuple[Tensor, Tensor]:
    """(out, lse) straight from the operator."""
    case = x.case
    left, right = case.effective_window
    return torch.ops.flash_ext.fwd(x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_k, *x.max_seqlens,
                                   case.effective_scale, left, right, case.deterministic,
                                   target.choice)  # fmt: skip


def call_backward(x: Inputs, out: Tensor, lse: Tensor, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) straight from the operator."""
    case = x.case
    left, right = case.effective_window
    return torch.ops.flash_ext.bwd(x.dout, x.q, x.k, x.v, out, lse, x.dlse, x.cu_seqlens_q, x.cu_seqlens_k,
                                   *x.max_seqlens, case.effective_scale, left, right, case.deterministic,
                                   target.choice)  # fmt: skip


def call(x: Inputs, target: Target, qkv: list[Tensor] | None = None, **changes: Any) -> tuple[Tensor, ...]:
    """out, lse and the largest scores, by the public function; ``changes`` replace keywords."""
    case = x.case
    qkv = [x.q, x.k, x.v] if qkv is None else qkv
    options = dict(
        scale=case.scale, return_aux=EVERYTHING, deterministic=case.deterministic,
        backend=target.choice,
    )  # fmt: skip
    bounds: tuple[Tensor, ...] = ()
    attention = flash_ext.attention
    if case.is_packed:
        attention, bounds = flash_ext.attention_varlen, (x.cu_seqlens_q, x.cu_seqlens_k)
        if case.hints:
            options["max_seqlen_q"], options["max_seqlen_k"] = x.max_seqlens
    out, aux = attention(*qkv, *bounds, **(options | x.keywords({}) | changes))
    return out, aux.lse, aux.max_scores


def compute(x: Inputs, target: Target) -> dict[str, Tensor]:
    """All results of a case, detached: by the operators, with modifiers by the public functions.

    Free memory is poisoned before each call, and its launch is checked.
    """
    return _by_public_functions(x, target) if x.case.mods else _by_operators(x, target)


def _by_operators(x: Inputs, target: Target) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with _around_a_call(x, target, "fwd"), leaving_nothing_behind(target.device, found):
        found["out"], found["lse"] = call_forward(x, target)
    check_launch(x, target, "fwd")
    if x.case.backward:
        out, lse = found["out"], found["lse"]
        with _around_a_call(x, target, "bwd"), leaving_nothing_behind(target.device, found):
            found["dq"], found["dk"], found["dv"] = call_backward(x, out, lse, target)
        check_launch(x, target, "bwd", out)
    return found


def _by_public_functions(x: Inputs, target: Target) -> dict[str, Tensor]:
    """The gradients are those that the case needs."""
    needs = x.case.needs
    qkv = [t.detach().requires_grad_("qkv" in needs) for t in (x.q, x.k, x.v)]
    leaves = {name: t.requires_grad_("mods" in needs) for name, t in x.leaves().items()}
    with _around_a_call(x, target, "fwd"):
        results = call(x, target, qkv, **x.keywords(leaves))
    note_workspace(x)
    found = {name: t.detach() for name, t in zip(RESULTS, results)}
    wanted = dict(zip(("dq", "dk", "dv"), qkv)) if "qkv" in needs else {}
    if "mods" in needs:
        wanted |= {GRADIENTS[name]: t for name, t in leaves.items()}
    if not x.case.backward or not wanted:
        return found
    check_launch(x, target, "fwd")
    outputs, gradients = [results[0]], [x.dout]
    if x.dlse is not None:
        outputs, gradients = [*outputs, results[1]], [*gradients, x.dlse]
    with _around_a_call(x, target, "bwd"):
        grads = torch.autograd.grad(outputs, list(wanted.values()), gradients)
    note_workspace(x)
    check_launch(x, target, "bwd")
    return found | dict(zip(wanted, grads))


def _around_a_call(x: Inputs, target: Target, direction: str) -> contextlib.AbstractContextManager[None]:
    return poisoned(target.device, expected_allocations(x, target, direction))


def truth_of(x: Inputs) -> Truth:
    """Float64 results of a case and their noise."""
    return compute_modifier_truth(x) if x.case.mods else compute_truth(x, x.case.backward)


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
        x = make_inputs(case, target.device)
        if case.invalid:
            check_refused(x, target.device)
            return Results(x, {}, Truth({}, {}, {}, {}), {})
        runs: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        with staying_in_place(target.device):
            for run in runs:
                with leaving_nothing_behind(target.device, run):
                    run |= compute(x, target)
        assert x.unchanged(), "an input or the memory around it was written"
        first, second = runs  # the second found poison where its workspace lay
        check_forms(case, second, {GRADIENTS[name]: t for name, t in x.leaves().items()})
        truth = truth_of(x)
        return Results(x, second, truth, judge(second, first, truth, case.deterministic))


def check_forms(case: Case, results: dict[str, Tensor], leaves: Mapping[str, Tensor]) -> None:
    """Shapes and types of the results; contiguity of those that the operators make.

    ``leaves`` have the form of their gradients, by whose names they are known.
    """
    shapes = tensor_shapes(case)
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


def run_cases(
    cases: Iterable[Case],
    target: Target,
    run: Callable[[Case, Target], Any] = run_case,
    cpu: int | None = None,
) -> None:
    """Runs all cases in one test, without pytest's cost per test, and fails with the first failures.

    Args:
        run: what is done with each of them; it raises CaseFailure where something does not hold.
        cpu: about how many of them are run where there is no GPU; all by default.
    """
    if reason := target.why_not():
        pytest.skip(reason)
    failures, count = [], 0
    with target.active():
        for case in cases if cpu is None else target.pick(list(cases), cpu):
            count += 1
            try:
                run(case, target)
            except CaseFailure as failure:
                failures.append(str(failure))
            except DeviceLost as lost:
                lose_context(str(lost))
    if failures:
        shown = "\n".join(failures[:8])
        pytest.fail(f"{len(failures)} of {count} cases failed\n{shown}", pytrace=False)
