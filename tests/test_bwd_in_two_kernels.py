"""The Hopper backward with modifiers in two kernels (csrc/sm90/bwd_wide_mod.cuh): which calls run it, and that it is
right: above head_dim 128, in a fixed order also below, and up to 128 with biases that only it reads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import flash_ext
from flash_ext.ops import _C
from tests import compare
from tests.cases import dense, packed
from tests.harness import TARGETS, Target, on_targets
from tests.modifier_cases import ModifierCase, make_modifier_inputs
from tests.modifier_gates import gate_case, gate_of
from tests.modifier_harness import call_and_differentiate, for_each, naming, run_case
from tests.qkv import make_qkv, null_kernels

on_hopper = on_targets("sm90")

# ---- which kernels -------------------------------------------------------------------------------------

HEADS, ROWS, KEYS = 4, 72, 96
ONE, TWO, OLD = "in one kernel", "in two", "portable"
COMPILED = (64, 128, 192, 256)  # head_dims of the modified kernels
PORTABLE = (64, 96, 128, 192, 256)


def bias(dtype: torch.dtype, rows: int = ROWS, keys: int = KEYS) -> torch.Tensor:
    return torch.zeros(2, HEADS, rows, keys, dtype=dtype)


def half(rows: int = ROWS, keys: int = KEYS) -> torch.Tensor:
    return bias(torch.bfloat16, rows, keys)


def single(rows: int = ROWS, keys: int = KEYS) -> torch.Tensor:
    return bias(torch.float32, rows, keys)


def slopes() -> dict:
    return {"alibi_slopes": torch.ones(HEADS)}


DROPS, CAPS = {"dropout_p": 0.5}, {"softcap": 2.0}
HIDES = {"attn_mask": torch.ones(2, 1, ROWS, KEYS, dtype=torch.bool)}

# Options, then what runs: in a fixed order up to 64 and 128, above 128, in any order up to 64 and 128.
CHOICES: dict[str, tuple[Callable[[], dict], tuple[str, ...]]] = {
    "mask": (lambda: HIDES, (TWO, TWO, TWO, ONE, ONE)),
    "mask and sinks": (lambda: {**HIDES, "sinks": torch.zeros(HEADS)}, (TWO, TWO, TWO, ONE, ONE)),
    "slopes": (slopes, (TWO, TWO, TWO, ONE, ONE)),
    "softcap": (lambda: CAPS, (TWO, TWO, TWO, ONE, ONE)),
    "softcap and mask": (lambda: {**CAPS, **HIDES}, (TWO, TWO, TWO, ONE, ONE)),
    "chunks": (lambda: {"chunk_size": 32, "causal": True}, (TWO, TWO, TWO, ONE, ONE)),
    "dropout": (lambda: DROPS, (OLD, TWO, TWO, ONE, ONE)),
    "dropout and slopes": (lambda: {**DROPS, **slopes()}, (OLD, TWO, TWO, ONE, ONE)),
    "16 bits": (lambda: {"attn_mask": half()}, (OLD, OLD, TWO, ONE, ONE)),
    "16 bits, dropout": (lambda: {"attn_mask": half(), **DROPS}, (OLD, OLD, TWO, ONE, ONE)),
    "16 bits, one row": (lambda: {"attn_mask": half(rows=1)}, (TWO, TWO, TWO, ONE, ONE)),
    "16 bits, one key": (lambda: {"attn_mask": half(keys=1)}, (OLD, OLD, OLD, OLD, OLD)),
    "16 bits, odd rows": (lambda: {"attn_mask": half(keys=KEYS + 1)[..., :KEYS]}, (OLD, OLD, OLD, OLD, OLD)),
    "16 bits, odd start": (lambda: {"attn_mask": half(keys=KEYS + 8)[..., 1 : KEYS + 1]},
                           (OLD, OLD, OLD, OLD, OLD)),
    "16 bits, turned": (lambda: {"attn_mask": half(KEYS, ROWS).mT}, (OLD, OLD, OLD, OLD, OLD)),
    "32 bits": (lambda: {"attn_mask": single()}, (TWO, TWO, TWO, TWO, TWO)),
    "32 bits, slopes": (lambda: {"attn_mask": single(), **slopes()}, (TWO, TWO, TWO, TWO, TWO)),
    "32 bits, dropout": (lambda: {"attn_mask": single(), **DROPS}, (OLD, TWO, TWO, OLD, TWO)),
    "32 bits, one row": (lambda: {"attn_mask": single(rows=1)}, (TWO, TWO, TWO, ONE, ONE)),
    "32 bits, one key": (lambda: {"attn_mask": single(keys=1)}, (OLD, OLD, OLD, OLD, OLD)),
    "32 bits, odd rows": (lambda: {"attn_mask": single(keys=KEYS + 1)[..., :KEYS]}, (TWO, TWO, TWO, TWO, TWO)),
    "32 bits, every second key": (lambda: {"attn_mask": single(keys=2 * KEYS)[..., ::2]},
                                  (OLD, OLD, OLD, OLD, OLD)),
    "32 bits, turned": (lambda: {"attn_mask": single(KEYS, ROWS).mT}, (OLD, OLD, OLD, OLD, OLD)),
    "softcap and dropout": (lambda: {**CAPS, **DROPS}, (OLD, OLD, OLD, OLD, OLD)),
    "softcap and slopes": (lambda: {**CAPS, **slopes()}, (OLD, OLD, OLD, OLD, OLD)),
    "softcap and a bias": (lambda: {**CAPS, "attn_mask": single()}, (OLD, OLD, OLD, OLD, OLD)),
    "softcap and a bias of one row": (lambda: {**CAPS, "attn_mask": half(rows=1)}, (OLD, OLD, OLD, OLD, OLD)),
}  # fmt: skip


def launched(head_dim: int, deterministic: bool, is_packed: bool = False, head_dim_v: int | None = None,
             needs: tuple[int, ...] = (0, 1, 2), **options) -> dict:  # fmt: skip
    """The launch of a backward, left out."""
    qkv = make_qkv(seqlen_q=ROWS, seqlen_k=KEYS, heads=HEADS, head_dim=head_dim, head_dim_v=head_dim_v,
                   dtype=torch.bfloat16)  # fmt: skip
    for index in needs:
        qkv[index].requires_grad_()
    with null_kernels():
        if is_packed:
            cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (ROWS, KEYS)]
            rows = [t.flatten(0, 1) for t in qkv]
            out = flash_ext.attention_varlen(*rows, *cu, deterministic=deterministic, **options)
        else:
            out = flash_ext.attention(*qkv, deterministic=deterministic, **options)
        out.sum().backward()
        launch = _C.last_launch()
    assert launch["direction"] == "bwd" and launch["deterministic"] == deterministic
    return launch


def compiled_for(size: int, sizes: tuple[int, ...] = COMPILED) -> int:
    return min(compiled for compiled in sizes if compiled >= size)


def kernel_of(kind: str, size: int, deterministic: bool) -> str:
    """Its recorded name."""
    if kind == ONE:
        return f"bwd_mod_sm90_hd{compiled_for(size)}"
    if kind == TWO:
        return f"bwd_mod_sm90_hd{compiled_for(size)}" + ("_det" if size <= 128 else "")
    in_order = deterministic or size > 128
    return ("bwd_mod+bwd_q_mod" if in_order else "bwd_mod") + f"_sm80_hd{compiled_for(size, PORTABLE)}"


def wanted_kernel(kinds: tuple[str, ...], size: int, deterministic: bool) -> str:
    at = 2 if size > 128 else (0 if deterministic else 3) + (size > 64)
    return kernel_of(kinds[at], size, deterministic)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize("name", CHOICES)
def test_which_kernels_run(name: str, deterministic: bool) -> None:
    """Of every head_dim that TMA reads, from 64 on; packed sequences run those of dense ones."""
    options, kinds = CHOICES[name]
    for head_dim in range(64, 257, 8):
        wanted = wanted_kernel(kinds, head_dim, deterministic)
        for is_packed in (False, True) if head_dim % 64 == 0 else (False,):
            launch = launched(head_dim, deterministic, is_packed, **options())
            assert launch["kernel"] == wanted, f"head_dim {head_dim}, packed {is_packed}"


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_the_larger_head_dim_counts(deterministic: bool) -> None:
    for sizes in ((64, 128), (128, 64), (192, 128), (128, 192), (64, 256), (160, 136), (8, 64)):
        wanted = wanted_kernel((TWO, TWO, TWO, ONE, ONE), max(sizes), deterministic)
        assert launched(sizes[0], deterministic, head_dim_v=sizes[1], **HIDES)["kernel"] == wanted


@pytest.mark.parametrize("sizes", [(100, 100), (132, 132), (192, 196), (255, 255), (33, 33), (64, 60)], ids=str)
def test_rows_that_tma_cannot_read_are_portable(sizes: tuple[int, int]) -> None:
    for deterministic in (False, True):
        launch = launched(sizes[0], deterministic, head_dim_v=sizes[1], **HIDES)
        assert launch["path"] == "sm80" and launch["kernel"].endswith(f"sm80_hd{compiled_for(max(sizes), PORTABLE)}")


@pytest.mark.parametrize("name", ["bias", "slopes"])
def test_gradients_of_modifiers_alone_are_portable(name: str) -> None:
    keyword, leaf = ("attn_mask", single()) if name == "bias" else ("alibi_slopes", torch.ones(HEADS))
    for head_dim, deterministic in itertools.product(COMPILED, (False, True)):
        given = {keyword: leaf.requires_grad_()}
        assert launched(head_dim, deterministic, needs=(), **given)["path"] == "sm80"
        assert launched(head_dim, True, **given)["path"] == "sm90"


@pytest.mark.parametrize("head_dim", COMPILED)
def test_tiles_of_the_launch(head_dim: int) -> None:
    launch = launched(head_dim, True, **HIDES)
    assert (launch["block_m"], launch["block_n"]) == (48 if head_dim == 256 else 64, 64)
    assert launch["threads"] == 384 and launch["smem_bytes"] <= 232448 and launch["grid"] <= 132


# ---- workspace -----------------------------------------------------------------------------------------


def allocated(head_dim: int, rows: int, deterministic: bool, options: dict) -> list[int]:
    """Bytes of what a backward of 2 sequences allocates beside dq, dk and dv."""
    q, k, v = make_qkv(seqlen_q=rows, heads=HEADS, head_dim=head_dim, dtype=torch.bfloat16, requires_grad=True)
    with null_kernels():
        out = flash_ext.attention(q, k, v, deterministic=deterministic, **options)
        dout = torch.ones_like(out)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            grads = torch.autograd.grad(out, (q, k, v), dout)
    events = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    found = [nbytes for nbytes in events if nbytes > 0]
    for t in grads:
        found.remove(t.nbytes)
    return found


@pytest.mark.parametrize("rows", [47, 300, 1024])
def test_the_workspace_is_two_statistics_a_row_and_no_accumulator(rows: int) -> None:
    """Twice: as portable kernels have them, and by tiles of this kernel; then two counters."""
    for head_dim in (64, 128, 160, 192, 256):
        tile = 48 if head_dim > 192 else 64
        wanted = 8 * 2 * HEADS * (rows + -(-rows // tile) * tile) + 32
        assert allocated(head_dim, rows, True, CAPS) == [wanted]
        assert allocated(head_dim, rows, False, CAPS)[0] == wanted
        # In any order up to 128 dq is added up in memory.
        assert len(allocated(head_dim, rows, False, CAPS)) == (2 if head_dim <= 128 else 1)


def test_portable_kernels_above_128_have_no_accumulator_either() -> None:
    options = {**CAPS, **slopes()}
    assert launched(256, False, **options)["path"] == "sm80"
    for head_dim, deterministic in itertools.product((192, 256), (False, True)):
        assert len(allocated(head_dim, 300, deterministic, options)) == 1


# ---- results -------------------------------------------------------------------------------------------

FIXED = {"deterministic": True}
SIZES: dict[str, dict] = {
    "192": {"head_dim": 192},
    "192_v128": {"head_dim": 192, "head_dim_v": 128},
    "256": {"head_dim": 256},
    "160_v136": {"head_dim": 160, "head_dim_v": 136},
    "64 fixed": {"head_dim": 64, **FIXED},
    "128 fixed": {"head_dim": 128, **FIXED},
    "96 fixed": {"head_dim": 96, **FIXED},
}
# Modifiers of a case and the sizes that it is run with: a is 192, 192_v128 or 160_v136 in turn, b 256, c 64, d 128 or
# 96 in turn. In capitals: portable kernels.
MODS = {
    "sinks,mask_bhqk": "abcd",
    "mask_b1qk": "abcd",
    "mask_bhqk_blocky": "abcd",
    "mask_11qk_blocky_t": "abcd",
    "mask_1hq1": "abcd",
    "padding": "abcd",
    "padding_left,sinks": "abcd",
    "padding_right": "abcd",
    "bias_bhqk_f32": "abcd",
    "bias_bhqk": "abCD",
    "bias_1hqk": "abCD",
    "bias_1hqk_f32,sinks": "abcd",
    "bias_b1qk_f32_expanded": "abcd",
    "bias_b1qk_f32_odd": "abcd",
    "bias_b11k": "abcd",
    "bias_bh1k_f32": "abcd",
    "bias_hqk_inf": "abCD",
    "bias_1hqk_inf_f32": "abcd",
    "bias_11qk_odd": "ABCD",
    "bias_1hqk_t": "ABCD",
    "bias_b1qk_skip_f32": "ABCD",
    "bias_bhq1_f32": "ABCD",
    "bias_1hqk_f32,alibi,mask_none": "",
    "alibi": "abcd",
    "alibi_b,sinks": "abcd",
    "alibi,bias_qk_f32,padding": "abcd",
    "softcap0.5": "abcd",
    "softcap30,mask_bhqk_blocky,sinks": "abcd",
    "softcap5,alibi": "ABCD",
    "drop0.5": "abCd",
    "drop0.1,bias_1hqk_f32": "abCd",
    "drop0.5,bias_b1qk": "abCD",
    "drop0.1,mask_b1qk,alibi,sinks": "abCd",
    "documents": "abcd",
    "prefix": "abcd",
    "sinktok5": "abcd",
    "chunk48": "abcd",
    "chunk100,hkeys1": "abcd",
    "hrows1": "abcd",
    "hrows2_bh": "abcd",
    "hkeys2_b": "abcd",
    "blocks16x16_h": "abcd",
    "blocks64x64_bh": "abcd",
    "blocks128x128_bh": "abcd",
    "blocks48x16_b_t,bias_qk_f32": "abcd",
    "top": "abcd",
}  # fmt: skip
