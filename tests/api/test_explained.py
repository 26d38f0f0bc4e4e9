"""flash_ext.explain() against what calls plan: the same row, launches and workspace, or a word about why not.

Calls of CPU tensors take the road of an H200 up to the launch, which is left out and recorded.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._ops import plan as planned
from flash_ext._ops.library import _C
from tests.qkv import null_kernels

pytestmark = pytest.mark.everywhere

H200 = "9.0/132"  # as the null kernels pretend
BATCH, HEADS, ROWS = 2, 8, 256
FACTS = ("row", "launches", "workspace", "workspace_bytes", "splits", "gqa_splits", "q_splits")
Plan = dict[str, Any]


class Call(NamedTuple):
    """Sizes and options of a call; ``assumed``: what its plans say otherwise, forward and backward."""

    options: dict[str, Any] = {}
    rows: int = ROWS
    keys: int = ROWS
    heads_k: int = HEADS
    head_dim: int = 64
    packed: bool = False
    assumed: tuple[str, str] = ("", "")


def bias(*shape: int, float32: bool = False, gradient: bool = False, width: int = 0) -> dict[str, Tensor]:
    """``width``: elements from one row to the next, where those are more than the keys."""
    made = torch.zeros(*shape[:-1], width or shape[-1], dtype=torch.float32 if float32 else torch.bfloat16)
    return {"bias": made[..., : shape[-1]].detach().requires_grad_(gradient)}


def turned(*shape: int) -> dict[str, Tensor]:
    """A bias whose queries are neighbours, and not its keys."""
    return {"bias": torch.zeros(*shape, dtype=torch.bfloat16).transpose(2, 3)}


def slopes(*shape: int, gradient: bool = False) -> dict[str, masks.ALiBi]:
    return {"bias": masks.ALiBi(torch.zeros(*shape, requires_grad=gradient))}


def sinks(gradient: bool) -> dict[str, Tensor]:
    return {"sinks": torch.zeros(HEADS, requires_grad=gradient)}


def table(heads: int, gradient: bool) -> dict[str, masks.RelativePosition]:
    return {"bias": masks.RelativePosition(torch.zeros(heads, 32, requires_grad=gradient))}


def both(sentence: str) -> tuple[str, str]:
    return sentence, sentence


FULL = (BATCH, HEADS, ROWS, ROWS)
SHARED = (1, HEADS, ROWS, ROWS)
EXACT = {
    "plain": Call(),
    "causal": Call({"causal": True}),
    "a window": Call({"window_size": (64, 0)}),
    "grouped heads": Call({"causal": True}, heads_k=2, head_dim=128),
    "few queries": Call(rows=1, keys=4096, heads_k=2),
    "packed": Call({"causal": True}, packed=True),
    "packed, grouped": Call({"causal": True}, packed=True, heads_k=2, head_dim=128),
    "deterministic": Call({"deterministic": True}, rows=1024, keys=1024),
    "batch entries share a bias": Call(bias(*SHARED)),
    "batch entries share a bias, gradient": Call(bias(*SHARED, gradient=True)),
    "short, a bias": Call(bias(1, HEADS, 48, 48), rows=48, keys=48),
    "short, a bias, gradient": Call(bias(1, HEADS, 48, 48, gradient=True), rows=48, keys=48),
    "a full bias": Call(bias(*FULL)),
    "a full bias, gradient": Call(bias(*FULL, gradient=True)),
    "a full bias, gradient, causal": Call({"causal": True, **bias(*FULL, gradient=True)}),
    "fp32 bias": Call(bias(*SHARED, float32=True)),
    "fp32 bias, gradient": Call(bias(*SHARED, float32=True, gradient=True)),
    "fp32 bias of rows with room behind": Call(bias(1, HEADS, 256, 253, float32=True, width=256), keys=253),
    "fp32 bias and dropout": Call({"dropout_p": 0.1, **bias(*SHARED, float32=True)}),
    "a full bias, unaligned": Call(bias(BATCH, HEADS, ROWS, 253), keys=253),
    "a full bias, unaligned, gradient": Call(bias(BATCH, HEADS, ROWS, 253, gradient=True), keys=253),
    "unaligned bias and softcap": Call({"softcap": 20.0, **bias(BATCH, HEADS, ROWS, 253)}, keys=253),
    "an unaligned bias that is copied": Call(bias(BATCH, HEADS, 384, 253), rows=384, keys=253, head_dim=256),
    "slopes": Call({"causal": True, **slopes(HEADS)}),
    "slopes, gradient": Call({"causal": True, **slopes(HEADS, gradient=True)}),
    "slopes of batch entries": Call({"causal": True, **slopes(BATCH, HEADS)}),
    "packed, slopes": Call({"causal": True, **slopes(HEADS)}, packed=True),
    "a table by distance": Call(table(HEADS, False)),
    "softcap": Call({"softcap": 50.0, "causal": True}),
    "softcap and slopes": Call({"softcap": 50.0, **slopes(HEADS)}),
    "dropout": Call({"dropout_p": 0.1}),
    "packed, dropout": Call({"dropout_p": 0.1}, packed=True),
    "sinks": Call(sinks(False)),
    "sinks, gradient": Call(sinks(True)),
    "sinks and softcap, gradient": Call({"softcap": 50.0, **sinks(True)}),
    "padding": Call({"mask": masks.KeyMask(torch.ones(BATCH, ROWS).bool())}),
    "a bool mask": Call({"mask": torch.ones(ROWS, ROWS).tril().bool()}),
    "a square, whose alignments are one": Call({"mask": masks.Causal("top_left")}),
}
ASSUMED = {
    "rows share a bias, gradient": Call(
        bias(1, HEADS, 1, ROWS, gradient=True),
        assumed=both("the bias has shape (1, 8, 256, 256), here (1, 8, 1, 256)"),
    ),
    "heads share a bias, gradient": Call(
        bias(1, 1, ROWS, ROWS, gradient=True),
        assumed=both("the bias has shape (1, 8, 256, 256), here (1, 1, 256, 256)"),
    ),
    "a bias of keys that are one": Call(
        bias(1, HEADS, ROWS, 1), assumed=both("the bias has shape (1, 8, 256, 256), here (1, 8, 256, 1)")
    ),
    "a full fp32 bias, gradient": Call(
        bias(*FULL, float32=True, gradient=True),
        assumed=both("the bias has shape (1, 8, 256, 256), here (2, 8, 256, 256)"),
    ),
    "a shared bias, unaligned": Call(
        bias(1, HEADS, ROWS, 253),
        keys=253,
        assumed=both("rows of the bias begin on 16 bytes, here they do not"),
    ),
    "a full bias with room behind rows": Call(
        bias(BATCH, HEADS, ROWS, 253, width=256),
        keys=253,
        assumed=both("rows of the bias do not begin on 16 bytes, here they do"),
    ),
    "a turned bias": Call(
        turned(BATCH, HEADS, 253, 253),
        rows=253,
        keys=253,
        assumed=both("keys of the bias lie side by side, here they do not"),
    ),
    "one query and a bias": Call(
        bias(1, HEADS, 1, ROWS),
        rows=1,
        assumed=both("the bias repeats along no dimension, here along those of size 1"),
    ),
    "packed, a bias": Call(
        bias(1, HEADS, ROWS, ROWS),
        packed=True,
        assumed=both("the bias has shape (1, 8, 512, 512), here (1, 8, 256, 256)"),
    ),
    "slopes of batch entries, gradient": Call(
        slopes(BATCH, HEADS, gradient=True), assumed=("", "the slopes have shape (8,), here (2, 8)")
    ),
    "a table by distance, gradient": Call(
        table(1, True), assumed=("", "the table of the bias by distance has shape (1, 8, 257), here (1, 1, ")
    ),
    "a large softcap": Call({"softcap": 200.0}, assumed=both("the softcap is 30, here it is 200")),
    "almost no dropout": Call({"dropout_p": 1e-6}, assumed=both("the dropout is 0.1, here it is 1e-06")),
    "a negative scale": Call(
        {"scale": -1.0, "softcap": 9.0}, assumed=both("the scale is 1 / sqrt(head_dim), here it is -1")
    ),
    "rows that begin at the first key": Call(
        {"mask": masks.Causal("top_left")},
        keys=300,
        assumed=both("the last row stands at the last key, here the first row at the first"),
    ),
    "small blocks": Call(
        {"mask": masks.BlockMask(torch.ones(1, 1, 4, 4).bool(), block_size=(64, 64))},
        assumed=both("blocks have 128 rows, here 64"),
    ),
}


def arguments(call: Call) -> list[Tensor]:
    """q, k and v that want gradients, and the bounds of packed sequences."""
    sizes = [(call.rows, HEADS), (call.keys, call.heads_k), (call.keys, call.heads_k)]
    shapes = [(BATCH * n, h) if call.packed else (BATCH, n, h) for n, h in sizes]
    made = [torch.zeros(*s, call.head_dim, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    if call.packed:
        made += [torch.arange(BATCH + 1, dtype=torch.int32) * n for n in (call.rows, call.keys)]
    return made


def ran(call: Call) -> list[Plan]:
    """What the call itself plans, forward and backward."""
    attend = flash_ext.attention_varlen if call.packed else flash_ext.attention
    plans = []
    with null_kernels():
        out = attend(*arguments(call), **call.options)
        plans.append(_C.last_launch(of_this_thread=True))
        out.backward(torch.zeros_like(out))
        plans.append(_C.last_launch(of_this_thread=True))
    return plans


def explained(call: Call) -> list[Plan]:
    found = flash_ext.explain(*arguments(call), gpu=H200, **call.options)
    return [found.forward, found.backward]


def facts_of(plan: Plan) -> Plan:
    more = {"then": facts_of(plan["then"])} if "then" in plan else {}
    return {name: plan[name] for name in FACTS} | more


@pytest.mark.parametrize("call", EXACT.values(), ids=EXACT)
def test_what_is_explained_is_what_calls_plan(call: Call) -> None:
    for said, real in zip(explained(call), ran(call), strict=True):
        assert said["assumed"] == []
        assert facts_of(said) == facts_of(real)


@pytest.mark.parametrize("call", ASSUMED.values(), ids=ASSUMED)
def test_a_plan_of_another_call_says_so(call: Call) -> None:
    """The words of ``_C.plan`` do not have these calls."""
    found = flash_ext.explain(*arguments(call), gpu=H200, **call.options)
    for plan, sentence in zip((found.forward, found.backward), call.assumed, strict=True):
        said = [text for text in plan["assumed"] if text.startswith(sentence)]
        assert len(said) == len(plan["assumed"]) == bool(sentence)
    assert str(found).count("\nassumed     ") == sum(map(bool, call.assumed))


def any_call(draw: random.Random) -> Call:
    """A dense call with a bias of any shape, layout and dtype, and other modifiers beside it."""
    rows, keys = (draw.choice([1, 48, 77, 80, 253, 256, 300, 1024]) for _ in range(2))
    shape = [draw.choice([1, n, n]) for n in (BATCH, HEADS, rows, keys)]
    options: dict[str, Any] = {"causal": draw.random() < 0.5}
    kind = draw.randrange(5)
    if kind < 3:
        like = {"float32": draw.random() < 0.4, "gradient": draw.random() < 0.5}
        options |= bias(*shape, width=shape[3] + draw.choice([0, 0, 3, -shape[3] % 8]), **like)
    elif kind == 3:
        options |= slopes(*draw.choice([(HEADS,), (BATCH, HEADS)]), gradient=draw.random() < 0.5)
    if draw.random() < 0.3:
        options |= sinks(draw.random() < 0.5)
    options |= draw.choice([{}, {}, {"softcap": 30.0}, {"dropout_p": 0.1}])
    options |= draw.choice([{}, {}, {"mask": masks.SlidingWindow(64, sink_tokens=4)}])
    heads_k, head_dim = draw.choice([HEADS, 2]), draw.choice([32, 60, 64, 128, 192, 256])
    return Call(options, rows, keys, heads_k, head_dim)


def test_a_plan_that_assumes_nothing_is_that_of_the_call(seed: int) -> None:
    draw, exact = random.Random(seed), 0
    for _ in range(150):
        call = any_call(draw)
        for said, real in zip(explained(call), ran(call), strict=True):
            if not said["assumed"]:
                exact += 1
                assert facts_of(said) == facts_of(real), call
    assert exact > 60


def test_the_switch_of_torch_is_followed() -> None:
    """As calls do: whether they say False or nothing."""
    usual = facts_of(explained(Call(rows=1024, keys=1024))[1])
    torch.use_deterministic_algorithms(True)
    try:
        for asked in (None, False, True):
            call = Call({"deterministic": asked}, rows=1024, keys=1024)
            for said, real in zip(explained(call), ran(call), strict=True):
                assert facts_of(said) == facts_of(real)
            assert facts_of(explained(call)[1]) != usual
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_batch_invariant_mode_is_unknown_to_plans_for_another_gpu() -> None:
    with flash_ext.serving.set_batch_invariant(True):
        found = explained(Call())
    assert all(plan["assumed"] == ["the batch-invariant mode is off, here it is on"] for plan in found)


def test_one_row_for_all_is_no_row_of_the_copy_engine() -> None:
    """A key that is expanded over all positions has rows on 16 bytes, and yet no tensor map."""
    q = torch.zeros(BATCH, ROWS, HEADS, 64, dtype=torch.bfloat16)
    k = q[:, :1].expand(-1, ROWS, -1, -1)
    found = flash_ext.explain(q, k, q, gpu=H200)
    with null_kernels():
        flash_ext.attention(q, k, q)
        assert facts_of(found.forward) == facts_of(_C.last_launch(of_this_thread=True))
    assert found.backend == "sm80" and "one row stands for all" in found.why_not["sm90"]


def test_one_head_of_q_for_all_is_named() -> None:
    q = torch.zeros(BATCH, ROWS, 1, 64, dtype=torch.bfloat16)
    found = flash_ext.explain(q.expand(-1, -1, HEADS, -1), q, q, gpu=H200)
    assert found.forward["assumed"] == ["q has heads of its own, here it repeats one"]


def test_plans_in_words_assume_nothing() -> None:
    assert "assumed" not in planned.as_text(planned.plan(f"fwd alibi gpu={H200}"))


def qkv_of(rows: int = ROWS, head_dim: int = 64) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(BATCH, rows, HEADS, head_dim, dtype=torch.bfloat16) for _ in range(3))


def test_the_arguments_of_a_call_serve() -> None:
    q, k, v = qkv_of()
    plain = flash_ext.explain(q, k, v, causal=True, gpu=H200)
    generator = torch.Generator()
    lse = flash_ext.AuxRequest(lse=True)
    same = flash_ext.explain(q, k, v, causal=True, generator=generator, return_aux=lse, gpu=H200)
    assert same.forward == plain.forward
    largest = flash_ext.AuxRequest(max_scores=True)
    asked = flash_ext.explain(q, k, v, causal=True, return_aux=largest, gpu=H200)
    assert len(asked.forward["assumed"]) == len(plain.forward["assumed"]) + 1
    assert "largest scores" in asked.forward["assumed"][-1]
    modified = flash_ext.explain(q, k, v, softcap=30.0, return_aux=largest, gpu=H200)
    assert modified.forward == flash_ext.explain(q, k, v, softcap=30.0, gpu=H200).forward
    used = torch.full((BATCH,), ROWS, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="max_scores"):
        flash_ext.explain(q, k, v, seqused_k=used, return_aux=largest, gpu=H200)


def test_another_backend_that_could_run_is_named() -> None:
    short = flash_ext.explain(*qkv_of(rows=16, head_dim=16), gpu=H200)
    assert short.backend == "sm80" and "row sm80.fwd.short is preferred" in short.why_not["sm90"]
    asked_for = flash_ext.explain(*qkv_of(), backend="sm80", gpu=H200)
    assert asked_for.backend == "sm80" and "preferred" not in asked_for.why_not.get("sm90", "")
    assert "sm90" not in flash_ext.explain(*qkv_of(), gpu=H200).why_not


def test_arrays_of_numpy_get_a_way_out() -> None:
    numpy = pytest.importorskip("numpy")
    q, k, v = (numpy.zeros((BATCH, ROWS, HEADS, 64), numpy.float32) for _ in range(3))
    with pytest.raises(TypeError, match="q must be a torch.Tensor.*torch.from_numpy"):
        flash_ext.explain(q, k, v)


def test_a_type_without_kernels_is_an_answer() -> None:
    found = flash_ext.explain(*(t.float() for t in qkv_of()), gpu=H200)
    assert found.backend is None and not found.forward and not found.backward
    assert (
        "float32" in found.why_not["sm90"] and "float32" in found.why_not["sm80"] and "float32" in str(found)
    )
