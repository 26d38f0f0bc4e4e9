"""Backwards with sinks and no other modifier (csrc/api/ops.cpp): which kernels run, and that they are right.

The sink is in lse, so dq, dk and dv are those of the backward without modifiers.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._ops.library import _C
from tests.cases import Case, dense, packed
from tests.harness import Target, on_all_tiles, on_gpu_paths, on_paths, run_cases
from tests.qkv import blank_qkv, null_kernels

HEADS = 4
KERNELS = {64: "bwd_sm90_hd64", 96: "bwd_sm90_hd96", 128: "bwd_sm90_hd128", 192: "bwd_sm90_hd192",
           256: "bwd_sm90_hd256"}  # fmt: skip


def launched(
    *, deterministic: bool = False, cu: Tensor | None = None, learned: bool = True, **options
) -> dict:
    """The launch of a backward, left out. ``shape`` goes to make_qkv()."""
    qkv = blank_qkv(
        **{"dtype": torch.bfloat16, "heads": HEADS, "requires_grad": True, **options.pop("shape")}
    )
    if learned and "sinks" in options:
        options["sinks"] = options["sinks"].clone().requires_grad_()
    with null_kernels():
        if cu is None:
            out = flash_ext.attention(*qkv, deterministic=deterministic, **options)
        else:
            rows = [t.flatten(0, 1) for t in qkv]
            out = flash_ext.attention_varlen(*rows, cu, cu, deterministic=deterministic, **options)
        out.sum().backward()
        launch = _C.last_launch()
    assert launch["direction"] == "bwd" and launch["deterministic"] == deterministic
    return launch


# ---- which kernels ----


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"window_size": (50, 20)}], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", KERNELS)
def test_sinks_alone_run_the_plain_backward(
    head_dim: int, deterministic: bool, is_packed: bool, more: dict
) -> None:
    call = {"shape": {"seqlen_q": 1100, "head_dim": head_dim}, "deterministic": deterministic, **more}
    if is_packed:
        call["cu"] = torch.tensor([0, 250, 590], dtype=torch.int32)
    wanted = KERNELS[head_dim] + ("_det" if deterministic and head_dim <= 128 else "")
    plain = launched(**call)
    assert plain["kernel"] == wanted
    for learned in (False, True):
        launch = launched(**call, sinks=torch.zeros(HEADS), learned=learned)
        of_sinks = launch.pop("then", None)
        assert launch == plain
        assert (of_sinks and of_sinks["row"]) == ("bwd_mod.other_gradients" if learned else None)


def test_head_dims_apart_and_rows_that_tma_cannot_read() -> None:
    sinks = torch.zeros(HEADS)
    apart = {"seqlen_q": 300, "head_dim": 192, "head_dim_v": 128}
    assert launched(shape=apart, sinks=sinks)["kernel"] == "bwd_sm90_hd192_v128"
    for deterministic, kernel in ((False, "bwd_sm80_hd64"), (True, "bwd+bwd_q_sm80_hd64")):
        call = {"shape": {"head_dim": 33}, "deterministic": deterministic}
        assert launched(**call, sinks=sinks)["kernel"] == kernel


def test_query_heads_are_divided_as_without_sinks() -> None:
    shape = {"batch": 1, "seqlen_q": 1024, "heads": 32, "heads_k": 4, "head_dim": 128}
    call = {"shape": shape, "causal": True}
    launch = launched(**call, sinks=torch.zeros(32), learned=False)
    assert launch["gqa_splits"] > 1 and launch == launched(**call)


def test_the_batch_invariant_mode_runs_the_deterministic_one() -> None:
    shape = {"seqlen_q": 512, "seqlen_k": 512, "heads": HEADS, "head_dim": 128}
    qkv = blank_qkv(dtype=torch.bfloat16, **shape, requires_grad=True)
    with null_kernels(), flash_ext.serving.set_batch_invariant(True):
        flash_ext.attention(*qkv, sinks=torch.zeros(HEADS)).sum().backward()
        assert _C.last_launch()["kernel"] == "bwd_sm90_hd128_det"


ROWS, KEYS = 300, 200
BESIDE = {
    "KeyMask": lambda: {"mask": masks.KeyMask(torch.ones(2, KEYS, dtype=torch.bool))},
    "Dense": lambda: {"mask": torch.ones(2, 1, ROWS, KEYS, dtype=torch.bool)},
    "DenseBias": lambda: {"bias": torch.zeros(2, 1, ROWS, KEYS, dtype=torch.bfloat16)},
    "ALiBi": lambda: {"bias": masks.ALiBi(torch.ones(HEADS))},
    "softcap": lambda: {"softcap": 2.0},
    "dropout": lambda: {"dropout_p": 0.5},
    "Documents": lambda: {
        "mask": masks.Documents(
            torch.zeros(2, ROWS, dtype=torch.int32), torch.zeros(2, KEYS, dtype=torch.int32)
        )
    },
    "PrefixLM": lambda: {"mask": masks.PrefixLM(torch.tensor([3, 4], dtype=torch.int32))},
    "SlidingWindow": lambda: {"mask": masks.SlidingWindow(50, sink_tokens=4)},
    "ChunkCausal": lambda: {"mask": masks.ChunkCausal(100)},
    "HiddenRows": lambda: {"mask": masks.HiddenRows(torch.zeros(2, 1, KEYS, 2, dtype=torch.int32))},
    "HiddenKeys": lambda: {"mask": masks.HiddenKeys(torch.zeros(2, 1, ROWS, 2, dtype=torch.int32))},
    "BlockMask": lambda: {"mask": masks.BlockMask(torch.rand(1, 1, 5, 4) < 0.5, (64, 64))},
    "causal at the top left": lambda: {"mask": masks.Causal("top_left")},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", BESIDE)
def test_what_else_is_asked_for_takes_the_modified_kernels(name: str, deterministic: bool) -> None:
    launch = launched(
        shape={"seqlen_q": ROWS, "seqlen_k": KEYS, "heads_k": HEADS, "head_dim": 128},
        deterministic=deterministic, sinks=torch.zeros(HEADS), **BESIDE[name](),
    )  # fmt: skip
    assert launch["kernel"] == ("bwd_mod_sm90_hd128_det" if deterministic else "bwd_mod_sm90_hd128")


def test_both_alignments_are_one_where_rows_and_keys_are_as_many() -> None:
    """Lengths of packed sequences are not known."""
    mask = masks.Causal("top_left")
    call = {"shape": {"seqlen_q": 1100, "head_dim": 64}, "sinks": torch.zeros(HEADS), "mask": mask}
    assert launched(**call)["kernel"] == "bwd_sm90_hd64"
    assert "_mod" in launched(**call, cu=torch.tensor([0, 250, 600], dtype=torch.int32))["kernel"]


def test_gradients_that_are_asked_for() -> None:
    """Whichever they are; dq, dk and dv in fp32 as well."""
    q, k, v = blank_qkv(dtype=torch.bfloat16, heads=HEADS, head_dim=64)
    sinks = torch.zeros(HEADS)
    with null_kernels():
        out, lse = flash_ext.forward(q, k, v, sinks=sinks)
        for needs in (("q", "k", "v"), ("q", "k", "v", "sinks"), ("sinks", "v"), ("sinks",)):
            found = flash_ext.backward(
                out, q, k, v, out, lse, sinks=sinks, needs=needs, grad_dtype=torch.float32
            )
            shapes = {"q": q.shape, "k": k.shape, "v": v.shape, "sinks": sinks.shape}
            assert [t.shape for t in found] == [shapes[name] for name in needs]
            assert all(t.dtype == torch.float32 for t in found)


# ---- gradients ----


def cases() -> list[Case]:
    """Lengths around the tiles, rows without keys, rows of no sequence, divided heads, any strides."""
    found = []
    for index, (head_dim, deterministic) in enumerate(itertools.product(KERNELS, (False, True))):
        common = {"deterministic": deterministic, "dtype": ("bf16", "fp16")[index // 2 % 2], "seed": index}
        found += [
            dense(2, 200, 333, 4, 2, head_dim, causal=True, dlse=True, **common),
            dense(2, 300, 130, 4, 4, head_dim, causal=index % 2 == 0, **common),
            dense(2, 257, 257, 4, 1, head_dim, window=(70, 30), dlse=index % 2 == 0, **common),
            dense(1, 520, 520, 8, 1, head_dim, causal=True, **common),
            packed([1, 300, 0, 77, 20], [5, 290, 3, 77, 0], num_heads=4, num_heads_k=2, head_dim=head_dim,
                   causal=index % 2 == 1, dlse=True, tail=9, **common),
        ]  # fmt: skip
    found += [
        dense(2, 150, 200, 4, 2, 192, 128, causal=True, dlse=True),
        dense(2, 66, 129, 4, 2, 33, layout="odd", dout_layout="odd"),
        dense(1, 200, 70, 8, 2, 40, layout="bhsd", causal=True, deterministic=True),
        dense(2, 1, 300, 4, 2, 128, dlse=True),
        dense(40, 130, 130, 4, 4, 128, causal=True),
    ]
    return [case.replace(mods=("sinks",)) for case in found]


@on_all_tiles
def test_gradients_are_those_of_the_reference(target: Target) -> None:
    """Bit by bit the same in a second run, dq where that was asked for; a launch of plain kernels."""
    # On the CPU each kind once: it has one kernel for all sizes of heads.
    run_cases(cases() if target.device == "cuda" else cases()[:8:2], target)


@on_all_tiles
def test_gradients_of_divided_heads(target: Target) -> None:
    some = [case for case in cases() if case.num_heads_k == 1 or case.batch == 1]
    run_cases(some, target.asking(gqa_splits=2), cpu=1)


@pytest.mark.parametrize("head_dim", KERNELS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 9)}], ids=str)
@on_gpu_paths
def test_gradients_are_those_without_sinks_from_the_same_lse(
    target: Target, options: dict, head_dim: int
) -> None:
    """Bit by bit, rounded and not, again and again."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    q, dout = (torch.randn(2, 700, 4, head_dim, **like) for _ in range(2))
    k, v = (torch.randn(2, 500, 2, head_dim, **like) for _ in range(2))
    sinks = torch.randn(4, device="cuda")
    options = {"backend": target.path, **options}
    out, lse = flash_ext.forward(q, k, v, sinks=sinks, **options)
    options |= {"dlse": torch.randn_like(lse), "deterministic": True}
    given = dout, q, k, v, out, lse
    for grad_dtype in (None, torch.float32):
        wanted = flash_ext.backward(*given, grad_dtype=grad_dtype, **options)
        for _ in range(3):
            found = flash_ext.backward(*given, sinks=sinks, grad_dtype=grad_dtype, **options)
            assert all(torch.equal(one, two) for one, two in zip(wanted, found, strict=True))


@on_paths
def test_rows_of_no_sequence_do_not_count(target: Target) -> None:
    """Whatever their incoming gradients hold; all gradients, from autograd and from backward()."""
    dtype = torch.float32 if target.device == "cpu" else torch.bfloat16
    like = {"device": target.device, "dtype": dtype}
    rows, first, last = 90, 5, 80
    q, dout = (torch.randn(rows, HEADS, 64, **like) for _ in range(2))
    k, v = (torch.randn(rows, 2, 64, **like) for _ in range(2))
    sinks = torch.randn(HEADS, device=target.device)
    cu = torch.tensor([first, 40, last], dtype=torch.int32, device=target.device)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "sinks": sinks, "causal": True, "backend": target.path}
    out, lse = flash_ext.forward(q, k, v, **options)
    needs = ("q", "k", "v", "sinks")
    outside = [*range(first), *range(last, rows)]
    found = []
    for value in (0.0, torch.nan):
        dout[outside] = value
        dlse = torch.zeros_like(lse)
        dlse[:, outside] = value
        found.append(flash_ext.backward(
            dout, q, k, v, out, lse, dlse=dlse, needs=needs, deterministic=True, **options))  # fmt: skip
    for name, one, two in zip(needs, *found, strict=True):
        assert one.isfinite().all() and torch.equal(one, two), name
