"""Which kernels a call runs: the tables of csrc/plan/, what prints them, and the launches that follow."""

from __future__ import annotations

import functools
import math
import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext import info, masks
from flash_ext._ops import plan as planned
from flash_ext._ops.library import _C
from flash_ext._ops.library_mod import modifier_arguments
from flash_ext._ops.modifiers import Modifiers
from tests.harness import Target, on_gpu_paths, on_short_paths
from tests.launches import check_done_launches
from tests.qkv import null_kernels
from tests.sources import ROOT

SHAPE = {"seqlen_q": 4096, "seqlen_k": 4096, "num_heads": 16, "num_heads_k": 16, "head_dim": 128}
SHAPE["head_dim_v"] = 128

H200 = "gpu=9.0/132"


def read_table() -> dict[str, dict[str, dict[str, str]]]:
    """Of tests/kernels/plans.txt by section and call, what its plan is to have."""
    sections: dict[str, dict[str, dict[str, str]]] = {}
    for line in Path(__file__).with_name("plans.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("["):
            section, _, more = line[1:].partition("]")
            calls = sections[section] = {}
        elif line:
            call, _, facts = line.partition(" -> ")
            row, *others = facts.split()
            call += more if "gpu=" in call else f"{more} {H200}"
            assert call not in calls, f"{call} stands there twice"
            calls[call] = {"row": row} | dict(fact.split("=") for fact in others)
    return sections


TABLE = read_table()
EVERY_ROW = "a call for every row"


@pytest.mark.parametrize("section", TABLE)
def test_calls_have_the_plans_of_the_table(section: str) -> None:
    wrong = []
    for call, wanted in TABLE[section].items():
        plan = planned.plan(call)
        found = {name: str(plan[name]) for name in wanted}
        if found != wanted:
            wrong.append(f"{call}: {found}, not {wanted}")
        assert plan["launches"] and all(one["grid"] > 0 and one["threads"] > 0 for one in plan["launches"])
        # Parts begin on 128 bytes.
        between = plan["workspace_bytes"] - sum(plan["workspace"].values())
        assert 0 <= between < 128 * max(1, len(plan["workspace"])), call
    assert not wrong, "\n".join(wrong)


def test_what_an_instance_is_compiled_for_stands_in_the_plan():
    """A launcher picks by these, and by nothing that it finds out itself."""
    for keys, variant in ((1 << 19, None), ((1 << 19) + 1, "stretches")):
        (forward,) = planned.plan(f"fwd seqlen=4096/{keys} gpu=8.0/108")["launches"]
        assert forward.get("variant") == variant
    latents, dense = "heads=128/1 head_dim=576/512", "heads=32/8"
    for heads, variant in ((latents, "latents"), (dense, None)):
        _, merge = planned.plan(f"fwd pages seqlen=1/65536 {heads} {H200}")["launches"]
        assert merge.get("variant") == variant
    for head_dim, makes in ((64, True), (128, False)):
        launches = planned.plan(f"bwd batch=64 seqlen=64 head_dim={head_dim} {H200}")["launches"]
        assert any(one["kernel"].startswith("row_stats") for one in launches) != makes
        assert launches[-1].get("makes_stats", False) == makes


@pytest.mark.parametrize("heads", ["heads=2/1", "heads=128/1 head_dim=576/512"])
def test_a_cache_without_queries_has_a_plan(heads: str) -> None:
    """Its window reaches no key, so that there is nothing to divide."""
    assert planned.plan(f"fwd seqlen=0/17 {heads} window_size=0/0 pages {H200}")["workspace_bytes"] == 0


GPUS = pytest.mark.parametrize("gpu", [H200, "gpu=8.0/108"])


@GPUS
@pytest.mark.parametrize(
    "shape", ["fwd batch=4 head_dim=64", "fwd batch=4 head_dim=128", "fwd head_dim=256", "fwd seqlen=49",
              "bwd batch=4", "bwd batch=4 deterministic", "bwd head_dim=256", "bwd seqlen=49"]
)  # fmt: skip
def test_a_table_by_distance_takes_the_kernels_of_slopes(gpu: str, shape: str) -> None:
    rows = {planned.plan(f"{shape} {bias} {gpu}")["row"] for bias in ("relative", "alibi")}
    assert len(rows) == 1


@GPUS
def test_the_gradient_of_a_table_by_distance(gpu: str) -> None:
    """In parts of 257 entries a head, 8 of them here; by a kernel that short sequences do not have."""
    long, short = (
        planned.plan(f"bwd {shape} relative_gradient {gpu}") for shape in ("heads=8 batch=4", "seqlen=49")
    )
    for found in (long, short):
        assert any("bwd_bias" in launch["kernel"] for launch in found["launches"])
        assert not found["row"].endswith("short")
    assert long["workspace"]["dbias_partials"] % (4 * 8 * 257) == 0


@pytest.mark.parametrize(
    ("beside", "kernel"),
    [*((words, "bwd_bias_sm90") for words in ("", "causal", "key_padding", "mask")),
     ("documents", "bwd_bias_sm80"), ("dropout", "bwd_bias_sm80")],
)  # fmt: skip
def test_the_gradient_of_a_bias_that_batch_entries_share(beside: str, kernel: str) -> None:
    for head_dim, size in ((64, 64), (80, 128), (136, 256), (256, 256)):
        plan = planned.plan(f"bwd batch=64 seqlen=256 head_dim={head_dim} bias_gradient {beside} {H200}")
        (one,) = (one for one in plan["launches"] if one["kernel"].startswith("bwd_bias"))
        assert one["kernel"].startswith(kernel)
        assert kernel == "bwd_bias_sm80" or one["kernel"].startswith(f"{kernel}_hd{size}")


@pytest.mark.parametrize(
    ("call", "is_copied"),
    [
        ("fwd full_bias", False),
        ("fwd full_bias head_dim=128", False),
        ("bwd full_bias_gradient", True),
        ("bwd full_bias_gradient head_dim=128", True),
        ("fwd full_bias seqlen=49", False),
        ("fwd full_bias seqlen=584", False),
        ("fwd full_bias dropout", True),
        ("fwd full_bias dropout head_dim=128", True),
        ("bwd full_bias dropout head_dim=128", True),
        ("bwd full_bias_gradient deterministic", True),
        ("fwd full_bias head_dim=256", True),
        ("fwd full_bias gpu=8.0/108", True),
    ],
)
def test_a_bias_is_copied_where_kernels_want_rows_on_16_bytes(call: str, is_copied: bool) -> None:
    """577 keys: Hopper's forwards take an entry for each score as it lies, others a copy with 584."""
    shape = "seqlen=577 batch=2 heads=3 head_dim=64"
    words = [word for word in shape.split() if word.split("=")[0] + "=" not in call]
    plan = planned.plan(" ".join((call, *words, *([] if "gpu=" in call else [H200]))))
    assert plan["workspace"].get("bias_rows", 0) == (2 * 2 * 3 * 577 * 584 if is_copied else 0)


@pytest.mark.parametrize(
    ("call", "kernel", "words"),
    [
        ("fwd head_dim=128", "fwd_sm90", {}),
        ("fwd alibi head_dim=128", "fwd_mod_sm90", {"variant": "slopes"}),
        ("fwd mixed head_dim=128", "fwd_fp8_sm90", {"variant": "mixed"}),
        ("fwd fp8 head_dim=80", "fwd_fp8_sm90", {"variant": "half"}),
        ("fwd fp8 head_dim=64", "fwd_fp8_sm90", {}),
        ("fwd fp8 head_dim=192", "fwd_fp8_sm90", {"variant": "half"}),
        ("fwd any_fp8 head_dim=128", "fwd_fp8_sm90", {}),
        ("bwd deterministic head_dim=64", "bwd_sm90", {"dq": "ordered"}),
        ("bwd alibi head_dim=128", "bwd_mod_sm90", {"variant": "add", "dq": "atomic"}),
    ],
)
def test_launches_say_their_variant_and_what_becomes_of_dq(
    call: str, kernel: str, words: dict[str, str]
) -> None:
    plan = planned.plan(f"{call} batch=4 seqlen=8192 {H200}")
    (found,) = (one for one in plan["launches"] if one["kernel"].startswith(f"{kernel}_hd"))
    assert {name: found[name] for name in ("variant", "dq") if name in found} == words


@pytest.mark.parametrize("words, one_each, several",
                         [
                             ("fwd causal head_dim=64 seqlen=100", "heads=8", "heads=500"),
                             ("fwd causal alibi seqlen=300", "heads=8", "heads=500"),
                             ("fwd fp8 causal seqlen=300", "heads=8", "heads=500"),
                             ("fwd pages seqlen=16/8192 heads=32/8", "batch=1", "batch=17"),
                             ("fwd seqlen=16/8192 heads=32/8", "batch=16", "batch=17"),
                             ("bwd causal seqlen=1024 head_dim=256", "heads=8", "heads=500"),
                             ("bwd causal seqlen=1024 key_padding", "heads=8", "heads=500"),
                             ("bwd causal seqlen=1024", "heads=8", "heads=500"),
                         ])  # fmt: skip
def test_ctas_with_one_work_tile_fetch_none(words: str, one_each: str, several: str) -> None:
    """Work tiles of unequal length are fetched from a counter, which costs the launch 1.5 us."""

    def fetches(more: str) -> set[bool]:
        plan = planned.plan(f"{words} {more} {H200}")
        found = {one["dynamic"] for one in plan["launches"] if "dynamic" in one}
        assert True not in found or "tile_counters" in plan["workspace"]
        return found

    assert fetches(one_each) <= {False} and True in fetches(several)


def test_no_row_is_left_out() -> None:
    named = {wanted["row"] for wanted in TABLE[EVERY_ROW].values()}
    assert named == {row for _, row, _ in _C.plan_rows()}


def test_every_choice_has_its_evidence_in_the_page() -> None:
    """That of rows with a preference, and what comments of the sources name: a line of the table in
    docs/benchmarks.md, and a section with numbers in docs/evidence.md, in the same order."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = page.split("\n## Evidence\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^\| (.+?) \| .+ \|$", table, re.MULTILINE)[1:]  # behind the head
    ids = [line.partition("]")[0].removeprefix("[") for line in lines]
    assert lines == [f"[{name}](evidence.md#{name})" for name in ids]
    _, *sections = re.split(r"^## ", (ROOT / "docs" / "evidence.md").read_text(), flags=re.MULTILINE)
    measured = {heading: text for heading, _, text in (section.partition("\n") for section in sections)}
    del measured["More designs that lost"]
    assert list(measured) == ids
    assert not [
        name for name, text in measured.items() if not re.search(r"^\|.* \d[^|]* \|$", text, re.MULTILINE)
    ]
    named = {evidence for _, _, evidence in _C.plan_rows() if evidence}
    for path in (ROOT / "csrc").rglob("*.*"):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            named |= set(re.findall(r"// .*\bEvidence: ([a-z0-9-]+)", path.read_text()))
    assert sorted(ids) == sorted(named)


def test_a_row_may_be_asked_for(pretended_gpu) -> None:
    usual = _C.plan("bwd", **SHAPE)
    other = _C.plan("bwd", **SHAPE, backend="sm90 row=sm90.bwd.dq_ordered")
    assert other["row"] == "sm90.bwd.dq_ordered" != usual["row"]
    assert other["kernel"].endswith("_det")
    with pytest.raises(ValueError, match=r"backend sm80 has no row 'sm90\.bwd\.dq_ordered' for this call"):
        _C.plan("bwd", **SHAPE, backend="sm80 row=sm90.bwd.dq_ordered")


def test_a_row_of_the_other_direction_is_not_asked_for(pretended_gpu) -> None:
    for direction, row in (("bwd", "sm90.fwd.m128"), ("fwd", "sm90.bwd.dq_ordered")):
        assert _C.plan(direction, **SHAPE, backend=f"row={row}") == _C.plan(direction, **SHAPE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sm75", "no backend 'sm75'"),
        ("kv_splits=4 sm90", "no backend 'sm90'"),  # which goes first
        ("sm90  kv_splits=4", "no backend ''"),  # two spaces
        ("warps=4", "no constraint 'warps'; known: row, kv_splits"),
        ("kv_splits=", "kv_splits takes a number of at least 0, not ''"),
        ("kv_splits=-1", "kv_splits takes a number of at least 0"),
        ("kv_splits=4.5", "kv_splits takes a number of at least 0"),
        ("fwd_block_m=64", "fwd_block_m takes 128 or 192"),
        ("dq_pool=2", "dq_pool takes 0 or 1"),
        ("wide_tiles=2", "wide_tiles takes 0 or 1"),
        ("row=sm90.fwd", "no row 'sm90.fwd'"),
    ],
)
def test_texts_that_are_refused(pretended_gpu, text: str, message: str) -> None:
    """By calls in the words of every other wrong backend, too."""
    with pytest.raises(ValueError, match=f"^backend: {re.escape(message)}"):
        _C.plan("fwd", **SHAPE, backend=text)
    q = torch.zeros(1, 4, 1, 64)
    wanted = f"backend must be None (automatic) or one of sm90, sm80, cpu, got '{text}': {message}"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        flash_ext.attention(q, q, q, backend=text)


def test_deterministic_backwards_never_add_in_any_order(pretended_gpu) -> None:
    for head_dim in (64, 96, 128, 192, 256):
        for gpu in ("9.0/132", "8.0/108"):
            found = planned.plan(f"bwd deterministic head_dim={head_dim} gpu={gpu}")
            assert found["row"] != "sm90.bwd.dq_atomic"
            assert "dq_accum" not in found["workspace"] or found["row"] == "sm90.bwd.dq_ordered"


@pytest.mark.parametrize(("call", "message"),
                         [
                             ("fwd warp", "unknown modifier 'warp'"),
                             ("fwd fullbias", "unknown modifier 'fullbias'"),
                             ("fwd bias_gradient_x", "unknown modifier 'bias_gradient_x'"),
                             ("fwd colour=4", "unknown colour="),
                             ("fwd heads=0/1", "num_heads a multiple"),
                             ("fwd heads=5/2", "num_heads a multiple"), ("fwd batch=-1", "at least 0"),
                             ("fwd bwd", "either fwd or bwd"),
                             ("bwd softcap_gradient", "unknown modifier 'softcap_gradient'"),
                             ("bwd without_qkv bias", "must want another one, as bias_gradient"),
                             ("fwd bias_gradient without_qkv", "must want another one, as bias_gradient"),
                             ("fwd wide", "wide goes with bwd"),
                             ("fwd tree", "tree goes with a cache alone"),
                             ("fwd pages blocks", "blocks does not go with a cache"),
                             ("fwd pages fp8", "the fp8 forward has no cache"),
                             ("bwd pages", "over a cache has no backward"),
                             ("fwd pages rows packed", "a cache is one of pages, entries, rows"),
                             ("fwd int8", "a cache is one of pages, entries, rows"),
                             ("fwd rows", "rows of a cache go with packed queries"),
                             ("fwd packed rows e4m3", "a cache of 8 bits lies in pages or entries"),
                             ("fwd packed seqused", "seqused goes with fp8, any_fp8 or mixed"),
                             ("fwd pages packed seqused", "over a cache every sequence has a length"),
                             ("fwd pages slot_factors", "slots go with a cache of 8 bits"),
                             ("fwd slot_factors", "slots go with a cache of 8 bits"),
                             ("fwd pages int8 head_dim=72", "a multiple of 16"),
                             ("fwd pages page_size=0", "a page holds at least 1 key"),
                             ("fwd entries packed seqlen=1/0", "room for at least 1 key"),
                             ("fwd kv_splits=few", "kv_splits takes a number"),
                             ("fwd row=sm80.fwd.tall", "no row 'sm80.fwd.tall'"),
                         ])  # fmt: skip
def test_words_that_are_refused(pretended_gpu, call: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned.plan(f"{call} {H200}")


def test_another_gpu_is_no_switch_of_the_process() -> None:
    before = _C.get_switch("num_sms")
    assert planned.plan("bwd gpu=8.0/108")["backend"] == "sm80"
    assert planned.plan(f"bwd {H200}")["backend"] == "sm90"
    assert _C.get_switch("num_sms") == before
    with pytest.raises(ValueError, match="gpu= takes"):
        planned.plan("bwd gpu=9.0")


def test_plans_in_words(pretended_gpu) -> None:
    packed = planned.plan(f"fwd packed batch=4 seqlen=512 {H200}")
    rows = SHAPE | {"seqlen_q": 2048, "seqlen_k": 2048}
    assert packed["launches"] == _C.plan("fwd", batch=4, packed=True, **rows)["launches"]
    assert planned.plan(f"fwd head_dim=36/64 {H200}")["backend"] == "sm80", "rows of 72 bytes"
    assert planned.plan(f"bwd sinks {H200}")["row"] == planned.plan(f"bwd {H200}")["row"]
    assert planned.plan(f"kv_splits=3 fwd sm80 {H200}")["splits"] == 3


FACTS = ("row", "splits", "launches", "workspace", "workspace_bytes")


def facts_of(plan: dict) -> dict:
    return {name: plan[name] for name in FACTS}


def words_and_call(words: str, modifiers: str) -> Callable[[], object]:
    """The call over a cache that words say, on the CPU, of 4 sequences with 8 heads of 64 on 2 of keys."""
    asked, numbers = (
        {*words.split(), *modifiers.split()},
        dict(w.split("=") for w in words.split() if "=" in w),
    )
    rows, keys = map(int, numbers["seqlen"].split("/"))
    page = int(numbers.get("page_size", 64))
    packed = "packed" in asked
    dtype_q = torch.float16 if "float16" in asked else torch.bfloat16
    q = torch.zeros(*((4 * rows,) if packed else (4, rows)), 8, 64, dtype=dtype_q)
    shape = (4, -(-keys // page)) if "pages" in asked else ()
    places = {"pages": (4 * math.prod(shape[1:]), page), "entries": (4, keys), "rows": (4 * keys,)}
    (layout,) = asked & places.keys()
    dtype = torch.int8 if "int8" in asked else torch.float8_e4m3fn if "e4m3" in asked else q.dtype
    k = torch.zeros(*places[layout], 2, 64, dtype=dtype)
    factors = torch.ones(*places[layout], 2) if "slot_factors" in asked else None
    bounds = [torch.arange(5, dtype=torch.int32) * n for n in (rows, keys)]
    most = [int(n) for n in numbers.get("max_seqlen", "0/0").split("/")]
    return functools.partial(
        torch.ops.flash_ext.fwd_cached.default, q, k, k,
        bounds[0] if packed else None, bounds[1] if layout == "rows" else None,
        torch.zeros(4, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32) if shape else None,
        *most, 1.0, -1, 0 if "causal" in asked else -1,
        torch.zeros(8) if "alibi" in asked else None, torch.zeros(8) if "sinks" in asked else None,
        30.0 if "softcap" in asked else 0.0, None, True,
        torch.zeros(q.shape[: 1 if packed else 2], dtype=torch.int64) if "tree" in asked else None,
        factors, factors, torch.ones(4, 1, rows, keys, dtype=torch.bool) if "mask" in asked else None,
        *((torch.zeros(q.shape[: 1 if packed else 2]).int(), torch.zeros(4, keys).int())
          if "documents" in asked else (None, None)),
        torch.zeros(1, 8, rows, keys) if "float_bias" in asked else None,
    )  # fmt: skip


CACHES = (
    "pages seqlen=1/4000", "packed pages seqlen=1/4000 max_seqlen=1/3000", "packed pages seqlen=9/4000",
    "pages page_size=16 seqlen=30/1000", "pages page_size=12 seqlen=100/1000", "entries seqlen=1/3001",
    "entries seqlen=700/3001", "packed entries seqlen=40/3001 max_seqlen=40/0", "packed rows seqlen=5/1000",
    "packed rows seqlen=300/1000", "pages int8 seqlen=1/4000",
    "packed pages e4m3 seqlen=30/4000 max_seqlen=30/4000", "entries int8 seqlen=3/1000",
)  # fmt: skip
TOO_LONG_FOR_TREES = ("pages page_size=12 seqlen=100/1000", "entries seqlen=700/3001")
CACHED_CALLS = [
    (words, more)
    for words in CACHES
    for more in ("", "softcap sinks", "alibi", "mask", "documents sinks", "float_bias")
] + [(words, "tree") for words in CACHES if words not in TOO_LONG_FOR_TREES]
CACHED_CALLS += [
    (words, f"slot_factors {more}")
    for words in CACHES
    if "e4m3" in words or "int8" in words
    for more in ("", "float16", "float16 mask")
]


@pytest.mark.parametrize(("words", "modifiers"), CACHED_CALLS)
def test_words_of_a_cache_are_planned_as_its_calls(words: str, modifiers: str) -> None:
    causal = "causal" if modifiers != "tree" else ""
    with null_kernels():
        words_and_call(f"{words} {causal}", modifiers)()
        ran = _C.last_launch()
    found = planned.plan(f"fwd {words} {causal} {modifiers} batch=4 heads=8/2 head_dim=64 {H200}")
    assert facts_of(found) == facts_of(ran)


@pytest.mark.parametrize(
    ("gradients", "others", "seqlen"),
    [("sinks", "", 304), ("sinks", "", 48), ("sinks", "softcap", 304), ("alibi", "", 304), ("bias", "", 304),
     ("bias", "", 48), ("alibi sinks", "", 304), ("bias alibi", "", 304)],
)  # fmt: skip
@pytest.mark.parametrize("qkv", [True, False])
def test_gradients_in_words_are_planned_as_their_calls(
    gradients: str, others: str, seqlen: int, qkv: bool
) -> None:
    """That of sinks alone comes from a plan of its own, behind the one of q, k and v."""
    q = torch.zeros(2, seqlen, 4, 64, dtype=torch.bfloat16)
    lse = torch.zeros(2, 4, seqlen)
    made: dict[str, torch.Tensor] = {
        "sinks": torch.zeros(4), "bias": torch.zeros(1, 4, seqlen, seqlen, dtype=torch.bfloat16),
        "alibi": torch.zeros(4),
    }  # fmt: skip
    tensors = {name: made[name] for name in gradients.split()}
    mods = Modifiers(
        bias=tensors.get("bias"), slopes=tensors.get("alibi"), sinks=tensors.get("sinks"),
        softcap=30.0 if others else 0.0,
    )  # fmt: skip
    needs = [name in tensors for name in ("bias", "alibi", "sinks")]
    with null_kernels():
        torch.ops.flash_ext.bwd_mod.default(
            q, q, q, q, q, lse, None, None, None, 0, 0, 1.0, -1, -1, *modifier_arguments(mods), qkv, *needs,
            False, None,
        )  # fmt: skip
        ran = _C.last_launch()
    words = [f"{name}_gradient" for name in tensors] + ([] if qkv else ["without_qkv"])
    found = planned.plan(f"bwd {' '.join(words)} {others} batch=2 seqlen={seqlen} heads=4 head_dim=64 {H200}")
    assert facts_of(found) == facts_of(ran)
    assert ("then" in found) == ("then" in ran) == (qkv and words == ["sinks_gradient"] and not others)
    if "then" in found:
        assert facts_of(found["then"]) == facts_of(ran["then"])
        assert found["then"]["row"] == "bwd_mod.other_gradients"
        assert found["then"]["workspace"].keys() == {"stats_portable"}
        text = planned.as_text(found)
        assert text.count("\nrow  ") == 2 and "\nthen, for other gradients\n" in text


def test_launches_over_a_cache_say_which_sequences_are_theirs() -> None:
    text = planned.as_text(planned.plan(f"fwd packed pages seqlen=64/8192 heads=32/8 batch=4 sm80 {H200}"))
    for words in ("sequences of 1 to 16 rows", "sequences of 17 to 64 rows", "sequences of 65 or more rows"):
        assert f"{words} a key head" in text


@pytest.mark.parametrize("row", ["sm90.fwd_mod.m192.drop", "sm90.fwd_mod.m192.slopes", "sm90.bwd.dq_pool"])
def test_rows_that_cannot_are_refused(pretended_gpu, row: str) -> None:
    direction = "bwd" if "bwd" in row else "fwd"
    modifiers = ["bias", "dropout", "alibi"] if direction == "fwd" else []
    shape = SHAPE | {"seqlen_q": 300, "seqlen_k": 300}
    with pytest.raises(ValueError, match="has no row"):
        _C.plan(direction, **shape, modifiers=modifiers, backend=f"row={row}")


def test_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    call = f"bwd batch=4 seqlen=4096 heads=32/8 head_dim=128 causal alibi {H200}"
    monkeypatch.setattr(sys, "argv", ["info", "--plan", call])
    info.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"call        {call}"
    assert "row         sm90.bwd_mod.fused, evidence fused-bwd-mod" in lines
    assert any(
        line.startswith("launch      bwd_mod_sm90_hd128 (variant add, dq atomic): tile 64 x 128")
        for line in lines
    )
    assert lines[-1].startswith("workspace   ") and lines[-1].endswith(" bytes in all")
    monkeypatch.setattr(sys, "argv", ["info", "--plan", f"fwd warp {H200}"])
    with pytest.raises(SystemExit, match="2"):
        info.main()
    assert "unknown modifier 'warp'" in capsys.readouterr().err


@on_short_paths
def test_what_runs_is_what_the_plan_says(target: Target) -> None:
    """Launch by launch, of calls for all rows."""
    with target.active():
        for call in TABLE[EVERY_ROW]:
            if (H200 in call) != (target.path == "sm90"):
                continue
            words, numbers = call.split(), dict(w.split("=") for w in call.split() if "=" in w)
            if set(words) & {"mask", "bias_gradient", "pages"}:
                continue  # tests/attention and tests/serving have them
            seqlen, head_dim = numbers.get("seqlen", "1024").split("/"), int(numbers.get("head_dim", 128))
            heads = [int(n) for n in numbers.get("heads", "4").split("/")]
            rows, keys = int(seqlen[0]), int(seqlen[-1])
            make = dict(device="cuda", dtype=torch.bfloat16)
            q = torch.randn(2, rows, heads[0], head_dim, **make).requires_grad_()
            k, v = (torch.randn(2, keys, heads[-1], head_dim, **make).requires_grad_() for _ in range(2))
            options: dict = {"causal": "causal" in words, "deterministic": "deterministic" in words}
            bias: list[masks.Bias] = []
            asked = target.asking(row=numbers["row"]) if "row" in numbers else target
            if "alibi" in words:
                bias.append(masks.ALiBi(torch.rand(heads[0], device="cuda")))
            if "softcap" in words:
                options["softcap"] = 30.0
            if "dropout" in words:
                options["dropout_p"] = 0.1
            if "key_padding" in words:
                options["mask"] = masks.KeyMask(torch.ones(2, keys, device="cuda", dtype=torch.bool))
            if "bias" in words:
                bias.append(masks.DenseBias(torch.randn(1, heads[0], rows, keys, **make)))
            if bias:
                options["bias"] = functools.reduce(operator.add, bias)
            out = flash_ext.attention(q, k, v, backend=asked.choice, **options)
            check_done_launches(_C.last_launch())
            if "bwd" in words:
                out.sum().backward()
                check_done_launches(_C.last_launch())


@on_gpu_paths
def test_gradients_run_as_their_call_asked(target: Target) -> None:
    """By autograd, also in a compiled function."""
    backend = target.asking(kv_splits=3, gqa_splits=2).choice
    make = dict(device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [torch.randn(1, 700, heads, 64, **make) for heads in (4, 1, 1)]

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return flash_ext.attention(*qkv, backend=backend)

    with target.active():
        for call in (attend, torch.compile(attend, backend="aot_eager")):
            out = call(*leaves)
            assert _C.last_launch()["splits"] == 3
            torch.autograd.grad(out, leaves, torch.randn_like(out))
            assert _C.last_launch()["gqa_splits"] == 2


@on_gpu_paths
def test_a_row_leaves_the_gradient_of_sinks_to_its_own_plan(target: Target) -> None:
    """Sinks have a plan beside the plain backward, of a family in which the row of that one is not."""
    row = {"sm80": "sm80.bwd", "sm90": "sm90.bwd.dq_atomic"}[target.path]
    make = dict(device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [torch.randn(1, 700, 4, 64, **make) for _ in range(3)]
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    dout = torch.randn(1, 700, 4, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    with target.active():
        for backend in (target.choice, target.asking(row=row).choice):
            out = flash_ext.attention(*leaves, sinks=sinks, backend=backend)
            found.append(torch.autograd.grad(out, (*leaves, sinks), dout))
        assert _C.last_launch()["row"] == row
    assert torch.equal(found[0][3], found[1][3]) and found[0][3].abs().max() > 0
