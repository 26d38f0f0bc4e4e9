"""F7: the recorded launch is the one that was asked for, and what a call is expected to allocate."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from torch import Tensor

from flash_ext._ops.library import _C
from tests.cases import Case
from tests.inputs import Inputs
from tests.layouts import tensor_shapes

if TYPE_CHECKING:
    from tests.harness import Target


def check_launch(x: Inputs, target: Target, direction: str, out: Tensor | None = None) -> None:
    """Kernels, path, head size, determinism and shared memory are those that the case asked for.

    ``out``: of a backward, where it is called by itself.
    """
    case = x.case
    # Kernels for short sequences do it all the same.
    if direction == "bwd" and _has_row_sums_alone(x) and (_C.last_launch() or {}).get("direction") != "bwd":
        return
    if (launch := _launch_of(case, target, direction)) is None:
        return
    check_done_launches(launch)
    native, tensors = direction == "fwd" or case.head_dim % 8 == 0, [x.q, x.k, x.v]
    if not case.mods:
        tensors += [] if out is None else [x.dout, out]
        _check_splits(launch, target)
        assert launch["aligned"] == all(_is_aligned(t) for t in tensors), f"aligned={launch['aligned']} ran"
    elif direction == "bwd" and _has_plain_backward(x):
        # With up to 128 keys the short targets take the kernel for modifiers.
        is_plain = "_mod" not in launch["kernel"] or target.short
        assert is_plain, f"{launch['kernel']} ran where the plain backward was due"
    elif direction == "bwd":
        native = _has_hopper_backward(x)
    _check_facts(launch, case, target, _kernels_of(target, native, tensors))


def _check_splits(launch: dict, target: Target) -> None:
    splits = dict(target.constraints).get("kv_splits")
    if launch["direction"] == "fwd" and splits is not None:
        assert launch["splits"] == max(1, splits), f"keys in {launch['splits']} parts, not {splits}"
        in_parts = any(name in launch["kernel"] for name in ("split", "parts", "packed"))
        assert in_parts == (splits > 0), f"{launch['kernel']} ran for {splits} parts"


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


def _launch_of(case: Case, target: Target, direction: str) -> dict | None:
    """The recorded launch, of that direction; None where nothing is launched."""
    nothing_to_do = not all(math.prod(shape) for shape in tensor_shapes(case).values()) or case.lens_q == ()
    if target.device == "cpu" or nothing_to_do:
        return None
    launch = _C.last_launch()
    assert launch is not None and launch["direction"] == direction, f"no {direction} launch was recorded"
    return launch


def _check_facts(launch: dict, case: Case, target: Target, wanted: str) -> None:
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


def _kernels_of(target: Target, native: bool, tensors: list[Tensor]) -> str:
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


# --------------------------------------------------------------------------------------------------
# Which kernels calls with modifiers have on Hopper


def _has_row_bias(x: Inputs) -> bool:
    """Whether the bias has one value for all keys of a row: a backward takes it out of lse."""
    bias = x.leaves().get("bias")
    return not x.case.is_packed and bias is not None and bias.dim() > 0 and bias.shape[-1] == 1


def _has_row_sums_alone(x: Inputs) -> bool:
    """Whether nothing but the gradient of a bias of rows is wanted, which without sinks follows from lse."""
    return "qkv" not in x.case.needs and _has_row_bias(x) and {*x.leaves()} == {"bias"}


def _has_plain_backward(x: Inputs) -> bool:
    """Whether nothing but what lse holds is asked for beside the window: sinks, and a bias of rows."""
    case = x.case
    in_lse = {"sinks", "top_left"} | ({"bias"} if _has_row_bias(x) else set())
    if "qkv" not in x.case.needs or x.asked - in_lse:
        return False
    if not x.case.has_top_left:
        return True
    if case.is_packed:
        return False
    # At the top left causal calls hide keys, unless there is one; with as many rows both alignments are one.
    hides_left = 0 <= case.window[0] < case.seqlen_q - 1
    return case.seqlen_q == case.seqlen_k or (case.seqlen_k == 1 and not hides_left)


def _has_hopper_backward(x: Inputs) -> bool:
    """Whether the modifiers and the head_dim are some for which the sm90 path has a modified backward."""
    case, asked = x.case, x.asked
    if case.head_dim % 8 != 0 or "qkv" not in x.case.needs:
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


def _takes_one_kernel(x: Inputs, bias: Tensor | None) -> bool:
    """Of head_dims up to 128 and gradients in any order."""
    case = x.case
    if bias is None:
        return True
    if bias.dim() < 2 or bias.shape[-2] == 1:
        # A row for all has no end, unless it was expanded, by the longest sequence.
        expanded = any(name.startswith("bias") and "expanded" in name for name in x.case.mods)
        return not (case.is_packed and expanded) or max(case.lens_q) >= sum(case.lens_q) + case.tail
    return _is_staged(bias)


# --------------------------------------------------------------------------------------------------
# What a call allocates


def expected_allocations(x: Inputs, target: Target, direction: str) -> list[int]:
    """Byte counts: results, then the workspace.

    With modifiers also many others, for what masks are brought into; their workspace is known once seen.
    """
    case = x.case
    shapes = {name: math.prod(shape) for name, shape in tensor_shapes(case).items()}
    sizes = [2 * shapes["out"], 4 * shapes["lse"]] if direction == "fwd" else [2 * shapes[t] for t in "qkv"]
    if not case.mods:
        return [*sizes, *_planned_workspaces(direction, case, target)]
    more = (
        [4 * shapes["lse"]]  # of the largest scores
        if direction == "fwd"
        else [t.numel() * t.element_size() for t in x.leaves().values()]
    )
    return [*(512 << i for i in range(14)), x.workspaces.get(direction, 0), *sizes, *more]


def note_workspace(x: Inputs) -> None:
    """What the latest call has allocated, for the next one with these inputs."""
    if (launch := _C.last_launch()) is not None:
        x.workspaces[launch["direction"]] = launch["workspace_bytes"]


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


def _planned_workspaces(direction: str, case: Case, target: Target) -> set[int]:
    """Byte counts that the workspace of a call without modifiers may have."""
    if target.device == "cpu":
        return set()
    return {_plan(direction, case, target, tma).get("workspace_bytes", 0) for tma in (False, True)}
