"""flash_ext.explain() of calls over a cache against what those launch, and what both refuse.

Calls of CPU tensors take the road of an H200 up to the launch, which is left out and recorded.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flash_ext
from flash_ext import masks
from flash_ext._ops import plan as planned
from flash_ext._ops.library import _C
from tests.api.test_explained import facts_of
from tests.qkv import null_kernels

pytestmark = pytest.mark.everywhere

H200 = "9.0/132"  # as the null kernels pretend
PLACES = ("pages", "entries", "rows")
BYTES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
Given = dict[str, Any]


def a_call(
    new: list[int],
    room: int = 4096,
    heads: tuple[int, int] = (8, 2),
    head_dim: int | tuple[int, int] = 128,
    places: str = "pages",
    page_size: int = 64,
    elements: str = "",
    dtype: torch.dtype = torch.bfloat16,
    dense: bool = False,
    **options: Any,
) -> Given:
    """The arguments of attention_varlen; nobody reads what is in q, k and v.

    Args:
        new: queries of each sequence.
        room: keys that each sequence has room for.
        elements: of the cache, "e4m3" or "int8", else those of q.
        dense: q without cu_seqlens_q; all of ``new`` are equal.
    """
    batch, (h, h_k) = len(new), heads
    d, dv = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
    count = -(-room // page_size)
    rows = {"pages": (3, page_size), "entries": (batch, room), "rows": (batch * room,)}[places]
    k, v = (torch.empty(*rows, h_k, n, dtype=BYTES.get(elements, dtype)) for n in (d, dv))
    if (d, dv) == (576, 512):
        v = k[..., :512]
    q = torch.empty(*((batch, new[0]) if dense else (sum(new),)), h, d, dtype=dtype)
    bounds = None if dense else torch.tensor([0, *new]).cumsum(0).int()
    bounds_k = torch.arange(batch + 1, dtype=torch.int32) * room if places == "rows" else None
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds_k}
    given["seqused_k"] = torch.full((batch,), min(room, 5), dtype=torch.int32)
    if places == "pages":
        given["block_table"] = torch.zeros(batch, count, dtype=torch.int32)
    return given | options


def explained(given: Given) -> flash_ext._explain.Explanation:
    return flash_ext.explain(**given, gpu=H200)


def ran(given: Given) -> dict[str, Any]:
    with null_kernels():
        flash_ext.attention_varlen(**given)
        return _C.last_launch(of_this_thread=True)


def check(given: Given) -> dict[str, Any]:
    """That the explanation has the plan of the call itself, which is returned."""
    found, real = explained(given), ran(given)
    assert found.forward["assumed"] == [] and found.backward == {}
    assert found.backend == real["backend"]
    assert facts_of(found.forward) == facts_of(real)
    return real


KEEP = torch.ones(2, 4096, dtype=torch.bool)
OPTIONS: dict[str, Given] = {
    "nothing": {},
    "causal": {"causal": True},
    "a window": {"window_size": (500, 0)},
    "sinks": {"sinks": torch.zeros(8)},
    "softcap": {"softcap": 30.0, "causal": True},
    "softcap beyond 100": {"softcap": 200.0},
    "sinks and softcap": {"sinks": torch.zeros(8), "softcap": 5.0},
    "another scale": {"scale": -2.0, "softcap": 5.0},
    "slopes": {"bias": masks.ALiBi(torch.zeros(8)), "causal": True},
    "slopes of sequences": {"bias": masks.ALiBi(torch.zeros(2, 8))},
    "a bias": {"bias": torch.zeros(8, 1, 4001)},
    "a bias of sequences": {"bias": torch.zeros(2, 1, 1, 4096, dtype=torch.bfloat16)},
    "a table by distance": {"bias": masks.RelativePosition(torch.zeros(8, 32))},
    "padding": {"mask": masks.KeyMask(KEEP)},
    "a bool mask": {"mask": torch.ones(3, 4096, dtype=torch.bool).tril(), "sinks": torch.zeros(8)},
    "a mask of bands": {"mask": masks.Causal() & masks.Window(500, 0)},
    "bands beside padding": {"mask": masks.Causal() & masks.KeyMask(KEEP), "window_size": (700, 700)},
    "bounds": {"max_seqlen_q": 40, "max_seqlen_k": 1000},
    "determinism": {"deterministic": True},
}
NEW = {"a token": [1, 1], "4 tokens": [4, 4], "64 tokens": [64, 64], "a token and a prompt": [1, 700]}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("new", NEW.values(), ids=NEW)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_explained_is_what_calls_launch(options: Given, new: list[int], places: str) -> None:
    check(a_call(new, places=places, **options))


SHAPES: dict[str, Given] = {
    "as many key heads": {"heads": (4, 4)},
    "many heads of a key head": {"heads": (64, 1), "head_dim": 64},
    "more than a tile holds": {"heads": (129, 1), "head_dim": 64},
    "head_dim 256": {"head_dim": 256},
    "v narrower": {"head_dim": (192, 128)},
    "odd sizes": {"head_dim": (40, 72)},
    "rows that do not begin on 16 bytes": {"head_dim": 37},
    "fp16": {"dtype": torch.float16},
    "pages of a key": {"page_size": 1, "room": 300},
    "large pages": {"page_size": 256},
    "a short cache": {"room": 64},
    "a long one": {"room": 500_000},
    "latents": {"head_dim": (576, 512), "heads": (16, 1)},
    "latents of 128 heads": {"head_dim": (576, 512), "heads": (128, 1)},
    "e4m3": {"elements": "e4m3"},
    "int8 of 256": {"elements": "int8", "head_dim": 256},
    "e4m3, factors of heads": {"elements": "e4m3", "k_descale": torch.ones(2), "v_descale": torch.ones(2, 2)},
    "int8, factors of slots": {"elements": "int8", "k_descale": torch.ones(3, 64, 2)},
    "fp16, factors of slots": {"elements": "int8", "dtype": torch.float16, "v_descale": torch.ones(3, 64, 2)},
    "int8, a bias": {"elements": "int8", "bias": torch.zeros(8, 1, 300, dtype=torch.bfloat16)},
    "dense queries": {"dense": True},
    "dense queries, a window": {"dense": True, "window_size": (9000, 9000)},
    "dense queries, entries": {"dense": True, "places": "entries", "causal": True},
    "dense queries, rows": {"dense": True, "places": "rows", "sinks": torch.zeros(8), "softcap": 3.0},
    "one sequence": {"new": [40]},
    "many sequences": {"new": [1] * 300},
}


@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_and_elements(shape: Given, rows: int) -> None:
    check(a_call(**{"new": [rows, rows], **shape}))
    check(a_call(**{"new": [rows, rows], "max_seqlen_q": rows, "causal": True, **shape}))


@pytest.mark.parametrize("tokens", [1, 7])
def test_trees(tokens: int) -> None:
    tree = masks.TokenTree(torch.full((2 * tokens,), -1))
    for more in ({}, {"sinks": torch.zeros(8)}, {"elements": "e4m3"}):
        check(a_call([tokens] * 2, mask=tree, max_seqlen_q=tokens, **more))


def test_layouts_of_a_cache() -> None:
    """K and V side by side, rows that begin on other bytes, one row for all."""
    given = a_call([300, 2])
    both = torch.zeros(3, 64, 2, 256, dtype=torch.bfloat16)
    odd = torch.zeros(3, 64, 2, 129, dtype=torch.bfloat16)[..., :128]
    rows = [check(given | {"k": k, "v": v})["row"] for k, v in (both.split(128, -1), (odd, odd))]
    assert rows == ["sm90.fwd_cached", "sm80.fwd_cached"]
    assert "sm90" in explained(given | {"k": odd}).why_not and not explained(given).why_not
    check(given | {"v": both[:1, :1, :, :128].expand(3, 64, -1, -1)})


def test_queries_that_repeat_a_head() -> None:
    """Only kernels of latents copy them."""
    given = a_call([2, 2], heads=(16, 1), head_dim=(576, 512))
    check(given | {"q": given["q"][:, :1].expand(-1, 16, -1)})
    check(given | {"q": torch.empty(4, 16, 577, dtype=torch.bfloat16)[..., :576]})
    given = a_call([2, 2])
    found = explained(given | {"q": given["q"][:, :1].expand(-1, 8, -1)})
    assert found.forward["assumed"] == ["q has heads of its own, here it repeats one"]


def test_a_bound_of_another_integer_type_counts() -> None:
    class Sixteen:
        def __index__(self) -> int:
            return 16

    given = a_call([16, 16])
    plans = [check(given | {"max_seqlen_q": most}) for most in (16, Sixteen(), 17)]
    assert plans[0]["launches"] == plans[1]["launches"] != plans[2]["launches"]


def a_drawn_call(draw: random.Random) -> Given:
    batch = draw.choice([1, 2, 7])
    dense = draw.random() < 0.2
    new = [draw.choice([1, 4, 17, 90, 600])] * batch
    if not dense:
        new = [draw.choice([n, 1]) for n in new]
    heads = draw.choice([(8, 8), (8, 2), (32, 1), (6, 2)])
    places = draw.choice(PLACES)
    elements = draw.choice(["", "", "e4m3", "int8"]) if places != "rows" else ""
    head_dim = draw.choice([64, 128, 256, (128, 64)])
    given = a_call(
        new, draw.choice([100, 3000, 60000]), heads, head_dim, places, draw.choice([1, 16, 64]), elements,
        dense=dense, causal=draw.random() < 0.5,
    )  # fmt: skip
    if elements and draw.random() < 0.5:
        given["k_descale"] = torch.ones(given["k"].shape[:3] if draw.random() < 0.5 else (heads[1],))
    if draw.random() < 0.3:
        given["window_size"] = (draw.choice([-1, 60, 2000]), draw.choice([-1, 0, 30]))
    if draw.random() < 0.3:
        given["sinks"] = torch.zeros(heads[0])
    if draw.random() < 0.3:
        given["softcap"] = draw.choice([5.0, 300.0])
    for name, most in (("max_seqlen_q", max(new)), ("max_seqlen_k", 90)):
        if draw.random() < 0.5:
            given[name] = most
    kind = draw.randrange(8)
    shape = [draw.choice([1, n]) for n in (batch, heads[0], max(new), 90)]
    if kind == 0:
        given["bias"] = torch.zeros(shape, dtype=draw.choice([torch.float32, torch.bfloat16]))
    elif kind == 1:
        given["bias"] = masks.ALiBi(torch.zeros(heads[0]))
    elif kind == 2:
        given["mask"] = torch.ones(shape, dtype=torch.bool)
    elif kind == 3:
        given["mask"] = masks.KeyMask(torch.ones(batch, 90, dtype=torch.bool))
    elif kind == 4:
        ids = torch.zeros((batch, new[0]) if dense else (sum(new),), dtype=torch.int32)
        given["mask"] = masks.Documents(ids, torch.zeros(batch, 90, dtype=torch.int32))
    return given


def test_drawn_calls(seed: int) -> None:
    draw = random.Random(seed)
    rows = {check(a_drawn_call(draw))["row"] for _ in range(300)}
    assert len(rows) >= 6


def test_a_backend_in_words() -> None:
    """Calls of CPU tensors do not take one, so plans in words stand for them."""
    given = a_call([40, 40], room=4096, max_seqlen_q=40)
    for backend in ("sm80", "kv_splits=3", "sm90 row=sm80.fwd_cached"):
        found = explained(given | {"backend": backend}).forward
        words = f"fwd packed pages batch=2 seqlen=40/4096 heads=8/2 max_seqlen=40/0 gpu={H200} {backend}"
        assert facts_of(found) == facts_of(planned.plan(words))


def test_a_call_without_anything_to_compute_launches_nothing() -> None:
    given = a_call([1, 2])
    for changed in (
        {"block_table": given["block_table"][:, :0], "seqused_k": torch.zeros(2).int()},
        {"q": given["q"][:0], "cu_seqlens_q": torch.zeros(3).int()},
        {"cu_seqlens_q": torch.zeros(1).int(), "block_table": torch.zeros(0, 4).int(),
         "seqused_k": torch.zeros(0).int()},
    ):  # fmt: skip
        with null_kernels():
            flash_ext.attention_varlen(**a_call([1]))
            before = facts_of(_C.last_launch(of_this_thread=True))
            flash_ext.attention_varlen(**(given | changed))
            assert facts_of(_C.last_launch(of_this_thread=True)) == before
        found = explained(given | changed)
        assert found.forward == {} and found.backend is not None


def test_it_prints_itself() -> None:
    given = a_call([1, 30], elements="int8", k_descale=torch.ones(2), sinks=torch.zeros(8))
    text = str(explained(given))
    for said in ("call        packed pages int8 page_size=64 sinks", "launch      fwd_", "workspace"):
        assert said in text
    assert "backward" not in text


def test_on_the_cpu() -> None:
    found = flash_ext.explain(**a_call([1, 3], dtype=torch.float32))
    assert (found.backend, found.forward, found.backward) == ("cpu", {}, {})


def test_a_gpu_without_kernels_for_latents_says_why() -> None:
    found = flash_ext.explain(**a_call([1], heads=(16, 1), head_dim=(576, 512)), gpu="8.0/108")
    assert found.backend is None and found.why_not["sm80"] == "head_dim 576 > 256"


# ---- refusals ------------------------------------------------------------------------------------------

BASE = a_call([2, 1])
LATENTS = a_call([2, 1], heads=(16, 1), head_dim=(576, 512))
MISSING = NotImplementedError
REFUSED: dict[str, tuple[Given, type[Exception]]] = {
    "dropout": (BASE | {"dropout_p": 0.5}, MISSING),
    "chunks": (BASE | {"mask": masks.Chunks(8)}, MISSING),
    "top left": (BASE | {"mask": masks.Causal("top_left")}, MISSING),
    "a gradient of q": (BASE | {"q": BASE["q"].clone().requires_grad_()}, MISSING),
    "a gradient of sinks": (BASE | {"sinks": torch.zeros(8, requires_grad=True)}, MISSING),
    "a gradient of a bias": (BASE | {"bias": torch.zeros(8, 1, 9, requires_grad=True)}, MISSING),
    "no lengths": (BASE | {"seqused_k": None}, ValueError),
    "lengths in a list": (BASE | {"seqused_k": [1, 2]}, TypeError),
    "lengths of 64 bits": (BASE | {"seqused_k": BASE["seqused_k"].long()}, TypeError),
    "a negative length": (BASE | {"seqused_k": torch.tensor([-1, 1]).int()}, ValueError),
    "a length without room": (BASE | {"seqused_k": torch.tensor([1, 5000]).int()}, ValueError),
    "a page that is not there": (BASE | {"block_table": BASE["block_table"] + 3}, ValueError),
    "tables of other sequences": (BASE | {"block_table": BASE["block_table"][:1]}, ValueError),
    "pages without a dimension": (BASE | {"k": BASE["k"][0], "v": BASE["v"][0]}, ValueError),
    "no tensor": (BASE | {"k": None}, TypeError),
    "heads that do not divide": (BASE | {"q": BASE["q"][:, :3]}, ValueError),
    "factors of 16 bits": (BASE | {"k_descale": torch.ones(2)}, ValueError),
    "a bound below 0": (BASE | {"max_seqlen_q": -1}, ValueError),
    "a bound that is no number": (BASE | {"max_seqlen_k": "all"}, TypeError),
    "a window of one number": (BASE | {"window_size": 5}, TypeError),
    "causal in words": (BASE | {"causal": "top_left"}, TypeError),
    "a scale in a tensor": (BASE | {"scale": torch.ones(())}, TypeError),
    "sinks of other heads": (BASE | {"sinks": torch.zeros(2)}, ValueError),
    "an unknown keyword": (BASE | {"page_table": BASE["block_table"]}, TypeError),
    "an unaligned cache of 8 bits": (
        BASE | dict.fromkeys("kv", torch.zeros(3, 64, 2, 136, dtype=torch.int8)[..., 4:132]), ValueError
    ),
    "rows of 8 bits": (a_call([1, 1], places="rows", elements="int8"), MISSING),
    "latents elsewhere": (LATENTS | {"v": LATENTS["v"].clone()}, MISSING),
    "latents and a softcap": (LATENTS | {"softcap": 9.0}, MISSING),
    "too many rows": (
        BASE | {"q": BASE["q"][:1].expand(2**28, -1, -1), "cu_seqlens_q": torch.tensor([0, 1, 2**28]).int()},
        MISSING,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kind"), REFUSED.values(), ids=REFUSED)
def test_it_refuses_what_calls_refuse_in_their_words(given: Given, kind: type[Exception]) -> None:
    with pytest.raises(kind) as of_call, null_kernels():
        flash_ext.attention_varlen(**given)
    with pytest.raises(kind) as of_explanation:
        explained(given)
    words = [
        str(error.value).replace("explain()", "attention_varlen()") for error in (of_explanation, of_call)
    ]
    assert words[0] == words[1]


def test_arguments_of_other_calls_are_refused() -> None:
    q = torch.zeros(2, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="max_seqlen_q and max_seqlen_k belong to packed sequences"):
        flash_ext.explain(q, q, q, max_seqlen_q=8)
    with pytest.raises(NotImplementedError, match="k_descale and v_descale belong to a cache"):
        flash_ext.explain(q, q, q, k_descale=torch.ones(2))
    with pytest.raises(ValueError, match="layout is one of dense tensors, got 'bhsd' with a cache"):
        flash_ext.explain(**a_call([1], dense=True, layout="bhsd"))


def test_bounds_of_packed_sequences_change_nothing() -> None:
    q, bounds = torch.zeros(90, 8, 64, dtype=torch.bfloat16), torch.tensor([0, 40, 90]).int()
    without, given = (
        flash_ext.explain(q, q, q, bounds, bounds, gpu=H200, **more) for more in ({}, {"max_seqlen_q": 50})
    )
    assert without == given
