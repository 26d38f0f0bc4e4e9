"""Runs cases with modifiers through the public functions, both ways, under the rules of harness.py.

F1 to F7 hold as there: poisoned memory, guards around every tensor that the call reads, unchanged inputs, the
same bits twice (dq: in deterministic mode), nothing left behind, special values and noise, and the launch
that was asked for.

    python -m tests.modifier_harness --target sm80 --repro '{"mods":"bias_1hqk,drop0.5","causal":true}'
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import flash_ext
from flash_ext._ops.library import _C
from tests.harness import (
    TARGETS,
    Target,
    check_done_launches,
    check_forms,
    check_launch_facts,
    for_each_case,
    kernels_of,
    launch_of,
    leaving_nothing_behind,
    naming,
    poisoned,
    staying_in_place,
)
from tests.inputs import tensor_shapes
from tests.judge import judge
from tests.modifier_cases import ModifierCase, ModifierInputs, make_modifier_inputs
from tests.modifier_truth import GRADIENTS, compute_modifier_truth

RESULTS = ("out", "lse", "row_max")
EVERYTHING = flash_ext.AuxRequest(lse=True, max_scores=True)


# --------------------------------------------------------------------------------------------------
# Calls


def call(
    x: ModifierInputs, target: Target, qkv: list[Tensor] | None = None, **changes: Any
) -> tuple[Tensor, ...]:
    """out, lse and the largest scores of the public function; ``changes`` replace keywords."""
    case, plain = x.mcase.case, x.plain
    qkv = [plain.q, plain.k, plain.v] if qkv is None else qkv
    options = dict(
        scale=case.softmax_scale, return_aux=EVERYTHING, deterministic=case.deterministic,
        backend=target.choice,
    )  # fmt: skip
    bounds: tuple[Tensor, ...] = ()
    attention = flash_ext.attention
    if case.is_packed:
        attention, bounds = flash_ext.attention_varlen, (plain.cu_seqlens_q, plain.cu_seqlens_k)
        if case.hints:
            options["max_seqlen_q"], options["max_seqlen_k"] = plain.max_seqlens
    out, aux = attention(*qkv, *bounds, **(options | x.keywords({}) | changes))
    return out, aux.lse, aux.max_scores


def call_and_differentiate(x: ModifierInputs, target: Target) -> dict[str, Tensor]:
    """All results of the public function and the gradients that the case needs, detached."""
    case, plain, needs = x.mcase.case, x.plain, x.mcase.needs
    qkv = [t.detach().requires_grad_("qkv" in needs) for t in (plain.q, plain.k, plain.v)]
    leaves = {name: t.requires_grad_("mods" in needs) for name, t in x.leaves().items()}
    with poisoned(target.device, _allocations(x, "fwd")):
        results = call(x, target, qkv, **x.keywords(leaves))
    _note_workspace(x)
    found = {name: t.detach() for name, t in zip(RESULTS, results)}
    wanted = dict(zip(("dq", "dk", "dv"), qkv)) if "qkv" in needs else {}
    if "mods" in needs:
        wanted |= {GRADIENTS[name]: t for name, t in leaves.items()}
    if not case.backward or not wanted:
        return found
    _check_launch(x, target, "fwd")
    outputs, gradients = [results[0]], [plain.dout]
    if plain.dlse is not None:
        outputs, gradients = [*outputs, results[1]], [*gradients, plain.dlse]
    with poisoned(target.device, _allocations(x, "bwd")):
        grads = torch.autograd.grad(outputs, list(wanted.values()), gradients)
    _note_workspace(x)
    found |= dict(zip(wanted, grads))
    _check_launch(x, target, "bwd")
    return found


def _allocations(x: ModifierInputs, direction: str) -> list[int]:
    """Byte counts that a call is expected to allocate, and many others for what masks are brought into."""
    shapes = {name: math.prod(shape) for name, shape in tensor_shapes(x.mcase.case).items()}
    sizes = [*(512 << i for i in range(14)), x.workspaces.get(direction, 0)]
    if direction == "fwd":
        return [*sizes, 2 * shapes["out"], 4 * shapes["lse"], 4 * shapes["lse"]]
    leaves = [t.numel() * t.element_size() for t in x.leaves().values()]
    return [*sizes, 2 * shapes["q"], 2 * shapes["k"], 2 * shapes["v"], *leaves]


def _note_workspace(x: ModifierInputs) -> None:
    """What the latest call has allocated, for the next one with these inputs."""
    if (launch := _C.last_launch()) is not None:
        x.workspaces[launch["direction"]] = launch["workspace_bytes"]


def _has_row_bias(x: ModifierInputs) -> bool:
    """Whether the bias has one value for all keys of a row: a backward takes it out of lse."""
    bias = x.leaves().get("bias")
    return not x.mcase.case.is_packed and bias is not None and bias.dim() > 0 and bias.shape[-1] == 1


def _has_plain_backward(x: ModifierInputs) -> bool:
    """Whether nothing but what lse holds is asked for beside the window: sinks, and a bias of rows."""
    case = x.mcase.case
    in_lse = {"sinks", "top_left"} | ({"bias"} if _has_row_bias(x) else set())
    if "qkv" not in x.mcase.needs or x.asked - in_lse:
        return False
    if not x.mcase.has_top_left:
        return True
    if case.is_packed:
        return False
    # At the top left causal calls hide keys, unless there is one; with as many rows both alignments are one.
    hides_left = 0 <= case.window[0] < case.seqlen_q - 1
    return case.seqlen_q == case.seqlen_k or (case.seqlen_k == 1 and not hides_left)


def _has_hopper_backward(x: ModifierInputs) -> bool:
    """Whether the modifiers and the head_dim are some for which the sm90 path has a modified backward."""
    case, asked = x.mcase.case, x.asked
    if case.head_dim % 8 != 0 or "qkv" not in x.mcase.needs:
        return False
    bias = None if _has_row_bias(x) else x.leaves().get("bias")
    if "softcap" in asked and (asked & {"dropout_p", "slopes", "position"} or bias is not None):
        return False
    size = max(case.head_dim, case.dim_v)
    shares_rows = bias is None or bias.dim() < 2 or bias.shape[-2] == 1
    is_wide = bias is not None and bias.element_size() == 4 and bias.shape[-1] > 1
    is_wide = is_wide and (bias.stride(-1) == 1 or _is_copied(bias))
    in_two_kernels = case.deterministic or size > 128
    takes_two = shares_rows or is_wide or (in_two_kernels and _is_staged(bias))
    if in_two_kernels:
        return takes_two
    return takes_two or _takes_one_kernel(x, bias)


def _is_copied(bias: Tensor) -> bool:
    """Whether the host makes a copy with aligned rows where they are not: where rows and columns differ."""
    return bias.dim() >= 2 and all(n > 1 and s != 0 for n, s in zip(bias.shape[-2:], bias.stride()[-2:]))


def _is_staged(bias: Tensor) -> bool:
    """Whether its rows are what TMA can read."""
    if _is_copied(bias):
        return bias.element_size() == 2
    strides = [stride for size, stride in zip(bias.shape[:-1], bias.stride()) if size > 1]
    whole = bias.shape[-1] > 1 and bias.stride(-1) == 1 and bias.data_ptr() % 16 == 0
    return bias.element_size() == 2 and whole and all(stride % 8 == 0 for stride in strides)


def _takes_one_kernel(x: ModifierInputs, bias: Tensor | None) -> bool:
    """Of head_dims up to 128 and gradients in any order."""
    case = x.mcase.case
    if bias is None:
        return True
    if bias.dim() < 2 or bias.shape[-2] == 1:
        # A row for all has no end, unless it was expanded, by the longest sequence.
        expanded = any(name.startswith("bias") and "expanded" in name for name in x.mcase.mods)
        return not (case.is_packed and expanded) or max(case.lens_q) >= sum(case.lens_q) + case.tail
    return _is_staged(bias)


def _check_launch(x: ModifierInputs, target: Target, direction: str) -> None:
    """F7: the recorded launch is the one that was asked for."""
    case = x.mcase.case
    if (launch := launch_of(case, target, direction)) is None:
        return
    has_plain_backward = direction == "bwd" and _has_plain_backward(x)
    check_done_launches(launch)
    if has_plain_backward:
        native = case.head_dim % 8 == 0
        # With up to 128 keys the short targets take the kernel for modifiers.
        is_plain = "_mod" not in launch["kernel"] or target.short
        assert is_plain, f"{launch['kernel']} ran where the plain backward was due"
    else:
        native = direction == "fwd" or _has_hopper_backward(x)
    wanted = kernels_of(target, native=native, tensors=(x.plain.q, x.plain.k, x.plain.v))
    check_launch_facts(launch, case, target, wanted)


# --------------------------------------------------------------------------------------------------
# One case


def run_case(mcase: ModifierCase, target: Target) -> dict[str, Any]:
    """Runs a case twice, checks F1 to F7 and returns the errors in noise units by result.

    Raises:
        CaseFailure: something does not hold; the message begins with the line that repeats the case.
        DeviceLost: a CUDA error; the process cannot go on.
    """
    with naming(mcase, target):
        x = make_modifier_inputs(mcase, target.device)
        runs: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        with staying_in_place(target.device):
            for run in runs:
                with leaving_nothing_behind(target.device, run):
                    run |= call_and_differentiate(x, target)
        assert x.unchanged(), "an input or the memory around it was written"
        first, second = runs  # the second found poison where its workspace lay
        check_forms(mcase.case, second, {GRADIENTS[name]: t for name, t in x.leaves().items()})
        return judge(second, first, compute_modifier_truth(x), mcase.case.deterministic)


# --------------------------------------------------------------------------------------------------
# Many cases in one test


def for_each(
    mcases: Iterable[ModifierCase],
    target: Target,
    run: Callable[[ModifierCase, Target], Any] = run_case,
    cpu: int | None = None,
) -> None:
    """Runs all cases in one test and fails with the first failures; about ``cpu`` of them without a GPU."""
    mcases = list(mcases) if cpu is None else target.pick(list(mcases), cpu)
    for_each_case(mcases, target, lambda mcase: run(mcase, target))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.modifier_harness", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", choices=TARGETS, default="cpu")
    parser.add_argument("--repro", type=ModifierCase.from_json, required=True, help="the case, as JSON")
    options = parser.parse_args()
    target = TARGETS[options.target]
    if target.why_not():
        print(f"target {target.name}: {target.why_not()}", file=sys.stderr)
        return 2
    with target.active():
        for name, error in run_case(options.repro, target).items():
            print(f"{name}: rms {error.rms:.3g}, largest {error.largest:.3g} noise units")
    return 0


if __name__ == "__main__":
    sys.exit(main())
