"""Backwards of packed sequences that are short on average (stores_dq() and has_stored_short() in
csrc/plan/hopper_bwd.h): each sequence with its keys in one block has its dq stored, others add theirs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flash_ext
from flash_ext._ops.library import _C
from tests.cases import Case, packed
from tests.harness import TARGETS, Target, on_targets, run_cases

ROW, ONE_WARPGROUP = "sm90.bwd.whole_keys", "sm90.bwd.dq_stored_short"
SHORT = [100, 100, 64, 1, 0, 128, 17, 90]
MIXED = [40, 300, 7, 128, 129, 0, 33, 65, 90, 11, 3]  # two are longer than a block


def row(batch: int, total: int, **more) -> dict:
    sizes = dict(num_heads=8, num_heads_k=8, head_dim=64, head_dim_v=64, seqlen_q=total, seqlen_k=total)
    return _C.plan("bwd", batch=batch, packed=True, **(sizes | more))


def test_they_are_short_on_average(pretended_gpu) -> None:
    """And in the batch-invariant mode what else is packed must not choose."""
    assert row(300, 300 * 128)["row"] == ONE_WARPGROUP
    assert row(300, 300 * 128 + 1)["row"] == "sm90.bwd.dq_atomic"
    with TARGETS["cpu"].pretending(batch_invariant=1).active():
        assert row(300, 300 * 100)["row"] not in (ROW, ONE_WARPGROUP)


def test_units_of_heads(pretended_gpu) -> None:
    """In the passes and, of key heads, in the kernel: where CTAs have two units."""

    def units(batch: int, rows: int, **more) -> list[int]:
        return [launch.get("unit_heads", 1) for launch in row(batch, batch * rows, **more)["launches"]]

    assert units(300, 100) == [4, 4, 4]
    assert units(300, 100, num_heads_k=4) == [4, 2, 4]
    assert units(300, 128, num_heads=6, num_heads_k=3) == [2, 1, 2]
    assert units(200, 100) == [2, 2, 2] and units(60, 100) == [1, 1, 1]
    assert units(300, 100, deterministic=True) == [4, 1, 4]
    assert units(300, 129) == [1, 1, 1]
    assert units(2000, 100) == [4, 4, 4]  # whatever the longest may be
    with TARGETS["cpu"].pretending(num_sms=1).active():  # as test_units_are_right has it
        few = [units(8, 60, num_heads=h, num_heads_k=k) for h, k in ((4, 4), (4, 2), (6, 2), (3, 3))]
    assert few == [[4, 4, 4], [4, 2, 4], [2, 2, 2], [1, 1, 1]]


def test_there_is_room_for_what_is_added(pretended_gpu) -> None:
    """Lengths are not known: all may be in one sequence."""
    found = row(300, 300 * 100)
    assert found["workspace"]["dq_accum"] == 4 * 64 * 64 * 8 * (300 * 100 // 64 + 300 + 1)
    assert [launch["dq"] for launch in found["launches"]] == ["stored"] * 3


def cases(head_dim: int, row: str = ROW) -> list[Case]:
    """Above head_dim 64 one warpgroup has 64 keys."""
    few = dict(num_heads=4, num_heads_k=2, head_dim=head_dim)
    if row == ONE_WARPGROUP and head_dim > 64:
        short, mixed = ([n // 2 for n in lens] for lens in (SHORT, MIXED))
    else:
        short, mixed = SHORT, MIXED
    less = [n // 2 for n in short]
    return [
        packed(short, short, **few),
        packed(mixed, mixed, **few, causal=True, dtype="fp16", tail=5),
        packed(mixed, short + [0, 5, 20], **few, dlse=True),  # queries of sequences without keys
        packed(mixed, less + [3, 0, 200], **few, causal=True),  # and queries that see nothing
        packed(short, mixed[:8], **few, window=(20, 3), dtype="fp16"),
        packed([900], [60], **few | {"num_heads": 3, "num_heads_k": 1}),
        packed([5, 0, 3], [0, 1, 0], **few),
        packed(short * 40, short * 40, **few | {"num_heads": 2}),
    ]


@pytest.mark.parametrize("row", [ROW, ONE_WARPGROUP])
@pytest.mark.parametrize("head_dim", [24, 40, 64, 96, 128])
@on_targets("sm90-short")
def test_packed_short_sequences(target: Target, head_dim: int, row: str) -> None:
    chosen = target.asking(row=row)
    run_cases(cases(head_dim, row), chosen)
    with chosen.active():
        q = torch.randn(300, 4, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        bounds = [0, 128, 256, 300] if row == ROW else [0, 64, 128, 192, 256, 300]
        cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        flash_ext.attention_varlen(q, q, q, cu, cu, backend=chosen.choice).sum().backward()
        assert _C.last_launch()["row"] == row, _C.last_launch()


@pytest.mark.parametrize(("heads", "heads_k"), [(4, 4), (4, 2), (6, 2), (3, 3)])
@pytest.mark.parametrize("row", [ROW, ONE_WARPGROUP, "sm90.bwd.dq_atomic", "sm90.bwd.dq_ordered"])
@on_targets("sm90-short")
def test_units_are_right(target: Target, row: str, heads: int, heads_k: int) -> None:
    """Few CTAs have enough heads to be given several at a time, in the passes and with one warpgroup."""
    chosen = target.asking(row=row).pretending(num_sms=1)
    named = dict(num_heads=heads, num_heads_k=heads_k)
    for head_dim in (40, 64, 128):
        run_cases([dataclasses.replace(x, **named) for x in cases(head_dim, row)[:6]], chosen)


@on_targets("sm90-short")
def test_units_with_wide_heads(target: Target) -> None:
    few = dict(num_heads=4, num_heads_k=2, head_dim=192)
    cases = [packed(SHORT, SHORT, **few), packed(MIXED, MIXED, **few, causal=True)]
    run_cases(cases, target.pretending(num_sms=1))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@on_targets("sm90-short")
def test_with_modifiers(target: Target, head_dim: int) -> None:
    few = dict(num_heads=4, num_heads_k=2, head_dim=head_dim)
    named = (
        "padding",
        "hkeys1_h",
        "softcap30",
        "documents",
        "prefix",
        "drop0.1",
        "sinks",
        "mask_b1qk",
        "alibi",
    )
    cases = [packed(lens, lens, **few, causal=causal) for lens, causal in ((SHORT, False), (MIXED, True))]
    run_cases([case.replace(mods=(name,)) for case in cases for name in named], target)


@pytest.mark.parametrize("row", [ROW, ONE_WARPGROUP])
@on_targets("sm90-short")
def test_repeats_are_equal(target: Target, row: str) -> None:
    """Where all sequences have one block nothing is added, and every gradient has the same bits."""
    chosen = target.asking(row=row)
    with chosen.active():
        total = sum(SHORT)
        q, k, v, dout = (torch.randn(total, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        cu = torch.tensor([0, *SHORT], device="cuda").cumsum(0).int()
        bounds = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, backend=chosen.choice)
        out, lse = flash_ext.forward(q, k, v, **bounds)
        runs = [flash_ext.backward(dout, q, k, v, out, lse, **bounds) for _ in range(50)]
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
