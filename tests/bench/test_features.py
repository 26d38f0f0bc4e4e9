"""The benchmark's set of features: every column solves one problem, and what it visits is counted right."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import pytest
import torch

from bench import features
from bench.entrants import Entrant, OursPlain, launched_tile, make_ours
from bench.feature_report import AIMS, aim_of, checks
from bench.features import FEATURES, Work, count_work
from bench.inputs import Inputs
from bench.peers import Fa2, Fa3, Fa4, Flex, make_peers
from bench.record import DIRECTION_FILES, Entry, Results, Row, feature_pair, fill_ratios, stored_text
from bench.runner import Setup, run
from bench.shapes import FEATURE_NAMES, SETS, Case, find_case, flops, traffic_bytes
from flash_ext import masks
from flash_ext._ops.arguments import Asked, modifiers_of
from flash_ext._ops.library import _C
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.bench.test_bench import Truth, assert_solves, spec_of
from tests.bench.test_models import IdleTimer
from tests.qkv import null_kernels
from tests.reference import attention_reference, visible_mask
from tests.sources import ROOT
from tests.values import plain

CPU = torch.device("cpu")
SMOKE = SETS["smoke-features"]
by_case = pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.feature)


@functools.cache
def inputs_of(case: Case) -> Inputs:
    return Inputs(case, torch.float32, CPU, 0)


def asked_of(inputs: Inputs, options: dict):
    """What the oracle takes for a case: scale and window, and the modifiers."""
    case, rest = inputs.case, dict(options)
    causal, window = rest.pop("causal", case.causal), rest.pop("window_size", case.window)
    window, mods = modifiers_of(inputs.q, inputs.k, None, Asked(**rest), causal, window, None)
    return AttnSpec(default_scale(case.head_dim), *window), mods and plain(mods, case.seqlen_q, case.seqlen_k)


@functools.cache
def oracle(case: Case) -> Truth:
    """out and the gradients of q, k, v and what is learned, float64."""
    inputs = inputs_of(case)
    asked, leaves = inputs.asked, [t.detach().double().requires_grad_() for t in inputs.qkv]
    learned = None if asked.learned is None else asked.learned.detach().clone().requires_grad_()
    leaves += [] if learned is None else [learned]
    spec, mods = asked_of(inputs, asked.options if learned is None else asked.options_with(learned))
    out, _ = attention_reference(*leaves[:3], spec, mods=mods)
    return out.detach(), torch.autograd.grad(out, leaves, inputs.dout.double())


# ---- the set ---------------------------------------------------------------------------------------------


def test_every_feature_is_a_row_of_both_sets():
    for name in ("features", "smoke-features"):
        assert tuple(case.feature for case in SETS[name]) == FEATURE_NAMES == tuple(FEATURES)
    for case in SETS["features"]:
        shape = (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.head_dim_v)
        assert shape == (4, 16, 4096, 4096, 128, 128)
    assert find_case("feature-window").window == (1024, 0)
    assert all(not case.feature for name in ("headline", "around", "shapes", "smoke") for case in SETS[name])


@by_case
def test_the_rule_is_what_our_options_mean(case: Case):
    inputs = inputs_of(case)
    asked = inputs.asked
    seen = features.dense_mask(
        case, asked.rule or features.everything, CPU, by_batch=asked.by_batch, by_head=asked.by_head
    ).expand(case.batch, case.num_heads, -1, -1)
    options = {k: v for k, v in asked.options.items() if k != "dropout_p"}
    spec, mods = asked_of(inputs, options)
    for b, h in itertools.product(range(case.batch), range(case.num_heads)):
        expected = visible_mask(spec, case.seqlen_q, case.seqlen_k, None, mods, b, h)
        assert torch.equal(seen[b, h], expected)


@pytest.mark.parametrize(("name", "share"), [("all", 1.0), ("half", 0.5), ("quarter", 0.25)])
def test_block_maps_have_their_density_in_every_row_and_column(name: str, share: float):
    sizes = {"batch": 1, "num_heads": 2, "seqlen_q": 1024, "seqlen_k": 1024}
    case = dataclasses.replace(find_case(f"feature-blocks-128-{name}"), **sizes)
    asked = features.ask(case, torch.bfloat16, CPU)
    blocks = asked.options["mask"].blocks
    assert blocks.shape == (1, 2, 8, 8)
    assert (blocks.sum(2) == 8 * share).all() and (blocks.sum(3) == 8 * share).all()
    work = count_work(case, asked.rule, CPU, by_head=True, tile=(128, 32))
    assert work == Work(int(2 * share * 1024**2), int(2 * share * 8 * 32), int(2 * share * 1024**2))


# ---- what is counted -------------------------------------------------------------------------------------


def brute_force(case: Case, rule) -> list[tuple[int, int, int, int]]:
    """Batch entry, head, row and column of every visible score, by walking over all of them."""
    places = itertools.product(*map(range, (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)))
    return [at for at in places if rule is None or bool(rule(*map(torch.tensor, at)))]


@pytest.mark.parametrize("name", ["plain", "window", "documents", "blocks-64-half", "key-padding"])
def test_work_is_what_a_walk_over_all_scores_finds(name: str):
    case = dataclasses.replace(find_case(f"smoke-feature-{name}"), seqlen_q=40, seqlen_k=40)
    asked = features.ask(case, torch.float32, CPU)
    visible = brute_force(case, asked.rule)
    by = {"by_batch": asked.by_batch, "by_head": asked.by_head}
    for height, width in ((16, 8), (7, 13), (64, 64)):
        tiles = {
            (b, h, row // height, col // width): min(height, 40 - row // height * height)
            * min(width, 40 - col // width * width)
            for b, h, row, col in visible
        }
        expected = Work(len(visible), len(tiles), sum(tiles.values()))
        assert count_work(case, asked.rule, CPU, tile=(height, width), **by) == expected


@by_case
def test_rows_count_pairs_and_bytes(case: Case):
    """A row's work is its visible pairs, and what a feature reads and learns is traffic."""
    setup = Setup([Idle()], IdleTimer(), CPU, torch.float32, {"matmul_tflops": 1.0, "copy_gbps": 1.0}, 1, 0.0)
    results = Results({}, setup.ceilings)
    run(results, [case], ["fwd", "bwd", "both"], setup, lambda row: None)
    inputs = inputs_of(case)
    pairs, asked = inputs.work().pairs, inputs.asked
    read = sum(t.numel() * t.element_size() for t in tensors_of(asked.options))
    learned = 0 if asked.learned is None else asked.learned.numel() * 4
    extra = {"fwd": read, "bwd": read + learned, "both": 2 * read + learned}
    for row in results.rows:
        assert row.pairs == pairs and row.flops == flops(case, row.direction, pairs)
        assert row.traffic_bytes == traffic_bytes(case, row.direction, 4) + extra[row.direction]


def tensors_of(options: dict) -> list[torch.Tensor]:
    """The tensors that the options of one feature hold."""
    names = ("keep", "ids", "intervals", "slopes", "table", "blocks")
    found = [value for value in options.values() if isinstance(value, torch.Tensor)]
    for value in options.values():
        found += [getattr(value, name) for name in names if hasattr(value, name)]
        if isinstance(value, masks.Mask):
            found += [part.lens for part in getattr(value, "masks", ()) if isinstance(part, masks.Prefix)]
    return found


class Idle(Entrant):
    name = "idle"
    ours = True

    def prepare(self, inputs, direction):
        return lambda: 1.0

    def tile(self, inputs, call):
        return 32, 16


# ---- who solves what -------------------------------------------------------------------------------------


@by_case
def test_ours_solves_what_is_asked(case: Case):
    inputs = inputs_of(case)
    ours, raw, ordered, plain = make_ours(["cpu"])
    assert ours.takes(case) and plain.takes(case) and not raw.takes(case) and not ordered.takes(case)
    if case.feature == "dropout":  # other draws in every call: its mean is the case without it
        kept = torch.stack([ours.prepare(inputs, "fwd")() for _ in range(60)]).mean(0)
        expected, _ = attention_reference(*inputs.qkv, spec_of(case))
        assert (kept.double() - expected).abs().mean() < 0.02
        for direction in ("bwd", "both"):
            assert len(ours.prepare(inputs, direction)()) == 3
        return
    assert_solves(ours, inputs, oracle(case), ("fwd", "bwd", "both"), atol=2e-5)


@by_case
def test_plain_column_leaves_out_the_feature(case: Case):
    inputs = inputs_of(case)
    plain = features.plain_case(case)
    out, _ = attention_reference(*inputs.qkv, spec_of(plain))
    column = OursPlain("cpu")
    torch.testing.assert_close(column.prepare(inputs, "fwd")().double(), out, rtol=1e-4, atol=1e-5)
    by_itself = count_work(plain, features.window_rule(plain), CPU, tile=(32, 16))
    assert column.work(inputs, (32, 16)) == by_itself
    row = Row(case, "bwd", "fp32", 1.0, 1)
    assert column.flops(row) == flops(plain, "bwd") and make_ours(["cpu"])[0].flops(row) == 1.0
    causal = case.causal or case.feature == "bool-mask-causal"
    assert (plain.causal, plain.feature) == (causal, "")
    assert plain.window == ((-1, -1) if case.feature == "window" else case.window)


@by_case
def test_sdpa_peers_solve_the_same_problem(case: Case):
    (peer,), _ = make_peers(["math"])
    if case.feature in ("softcap", "sinks"):
        assert case.feature in peer.why_not(case, "fwd")
        return
    assert peer.why_not(case, "fwd") == ""
    if case.feature == "dropout":
        return
    # The gradient of a bias that PyTorch makes of slopes or of a table is another one than theirs.
    learned = case.feature in ("bias-grad", "bias-batch-grad")
    options = {"atol": 2e-5, "heads_first": True, "learned": learned}
    assert_solves(peer, inputs_of(case), oracle(case), ("fwd", "bwd"), **options)


@by_case
def test_flex_solves_the_same_problem(case: Case, flex: Flex):
    if case.feature == "dropout":
        assert "dropout" in flex.why_not(case, "fwd")
        return
    assert flex.why_not(case, "fwd") == ""
    assert_solves(flex, inputs_of(case), oracle(case), ("fwd",), heads_first=True)


@by_case
def test_raw_peers_refuse_what_they_would_ignore(case: Case):
    plain = case.feature in ("plain", "plain-causal", "window")
    fa2, fa3, fa4 = (kind.__new__(kind) for kind in (Fa2, Fa3, Fa4))
    assert (fa2.why_not(case, "fwd") == "") == (plain or case.feature == "dropout")
    assert (fa3.why_not(case, "fwd") == "") == (plain or case.feature == "softcap")
    assert (fa4.why_not(case, "fwd") == "") == (plain and case.feature != "window")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_softcap_reaches_the_peer_that_has_one(direction: str):
    class Ops:
        def __init__(self):
            self.caps = []

        def fwd(self, q, k, v, *, softcap=0.0, **options):
            self.caps.append(softcap)
            return q, q.sum(-1)

        def bwd(self, dout, q, k, v, out, lse, *, softcap=0.0, **options):
            self.caps.append(softcap)

    for case in (c for c in SMOKE if c.feature in ("plain", "softcap")):
        peer = Fa3.__new__(Fa3)
        peer._ops = Ops()
        peer.prepare(inputs_of(case), direction)()
        assert set(peer._ops.caps) == {features.SOFTCAP if case.feature == "softcap" else 0.0}


def test_tiles_are_those_of_the_launch():
    """Launches of the plain kernels are recorded without a GPU; those with modifiers only on one."""
    sizes = {"seqlen_q": 64, "seqlen_k": 64, "num_heads": 1, "num_heads_k": 1}
    case = dataclasses.replace(find_case("feature-alibi"), batch=1, **sizes)
    inputs = Inputs(case, torch.bfloat16, CPU, 0)
    with null_kernels():
        _C.set_switch("record_launches", None)
        for direction in ("fwd", "bwd"):
            plan = _C.plan(direction, **sizes, head_dim=128, head_dim_v=128)
            found = launched_tile(OursPlain("auto").prepare(inputs, direction))
            assert found == (plan["block_m"], plan["block_n"])
        assert _C.get_switch("record_launches") is None


def test_documents_are_the_same_by_ids_and_packed():
    by_ids, packed = SETS["smoke-documents"]
    ids = inputs_of(by_ids).asked.options["mask"].ids
    runs = [row.unique_consecutive(return_counts=True)[1] for row in ids]
    assert packed.lengths == tuple(torch.cat(runs).tolist()) and packed.causal
    of_one_head = sum(n * (n + 1) // 2 for n in packed.lengths)
    assert inputs_of(by_ids).work().pairs == packed.num_heads * of_one_head


# ---- from a recorded run ---------------------------------------------------------------------------------


def timed(name: str, ms: float, *, ours: bool = False, tile=None, scores: int | None = None) -> Entry:
    return Entry(
        name, ours, median_ms=ms, q1_ms=0.9 * ms, q3_ms=1.1 * ms, round_medians_ms=[ms], launches=9,
        tflops=1.0, matmul_pct=1.0, gbps=1.0, copy_pct=1.0, tile=tile, tile_scores=scores,
        tiles=scores and scores // 4096,
    )  # fmt: skip


def recorded(slow: str = "", rows_of: str = "features") -> Results:
    """A run in which every feature works at 0.95 of the plain speed per visited score, `slow` at 0.4.

    The plain kernel takes 1 ms for all scores in tiles of 128 x 64, ours visits 3/4 of them by 128 x 32; mem
    takes 3 ms, and does not do softcap and sinks.
    """
    rows = []
    for direction, case in itertools.product(("fwd", "bwd"), SETS[rows_of]):
        full = case.batch * case.num_heads * case.seqlen_q * case.seqlen_k
        row = Row(case, direction, "bf16", flops(case, direction, full // 2), 1, pairs=full // 2)
        speed = 0.4 if case.feature == slow else 0.95
        row.entries = [
            timed("sm80", 0.75 / speed, ours=True, tile=(128, 32), scores=full * 3 // 4),
            timed("sm80-plain", 1.0, ours=True, tile=(128, 64), scores=full),
            timed("mem", 3.0),
        ]
        if case.feature in ("softcap", "sinks"):
            row.entries[2] = Entry("mem", status="refused", text=f"SDPA does not do {case.feature}")
        fill_ratios(row)
        rows.append(row)
    about = {"device": "a GPU", "torch": "2.0", "date": "2026-01-01"}
    return Results(about, {"matmul_tflops": 700.0, "copy_gbps": 4000.0}, rows)


def test_ratios_are_speeds_on_visited_tiles():
    row = recorded().rows[0]
    ours, plain, mem = row.entries
    assert ours.of_plain == pytest.approx(0.95) and plain.of_plain == pytest.approx(1.0)
    assert mem.of_plain == pytest.approx(0.25)  # three quarters of the work in three times the time
    assert ours.tile_tflops == pytest.approx(0.95 * plain.tile_tflops)
    assert plain.tile_tflops == pytest.approx(2 * row.flops / 1e-3 / 1e12)  # half of the scores are visible


def test_each_path_is_held_against_its_own_plain_kernel():
    row = recorded().rows[0]
    full = row.entries[1].tile_scores
    faster = [
        timed("sm90", 0.5, ours=True, tile=(128, 128), scores=full),
        timed("sm90-plain", 0.25, ours=True, tile=(128, 128), scores=full),
    ]
    row.entries = faster + row.entries
    fill_ratios(row)
    ratios = {entry.name: entry.of_plain for entry in row.entries}
    assert ratios == pytest.approx(
        {"sm90": 0.5, "sm90-plain": 1.0, "sm80": 0.95, "sm80-plain": 1.0, "mem": 0.25 / 3}
    )
    assert feature_pair(row) == (row.entry("sm90"), row.entry("sm90-plain"))


OF_PLAIN = "speed on visited tiles over plain"


def test_demands_hold_and_fail_by_name():
    assert all(check.holds for check in checks(recorded()))
    names = {check.feature for check in checks(recorded())}
    assert names == set(FEATURE_NAMES)
    failed = {(c.direction, c.what) for c in checks(recorded("softcap")) if not c.holds}
    assert failed == {(d, OF_PLAIN) for d in ("fwd", "bwd")}
    per_tile = [
        c for c in checks(recorded("blocks-128-quarter")) if "per visited tile" in c.what and not c.holds
    ]
    assert [c.feature for c in per_tile] == ["blocks-128-quarter"] * 2
    assert per_tile[0].value == pytest.approx(2.375)


@pytest.mark.parametrize(("rows_of", "head_dim"), [("features-d64", 64), ("features", 128)])
def test_each_head_size_has_aims_of_its_own(rows_of: str, head_dim: int):
    aims = AIMS[head_dim]
    assert set(aims) < set(FEATURE_NAMES)
    found = {(c.feature, c.direction): c for c in checks(recorded(rows_of=rows_of)) if c.what == OF_PLAIN}
    assert {(feature, way) for feature in FEATURE_NAMES for way in ("fwd", "bwd")} == set(found)
    for (feature, direction), check in found.items():
        others = 0.5 if direction == "bwd" and feature.endswith("-grad") else 0.8
        assert check.limit == aims.get(feature, (others, others))[direction == "bwd"]
    # All run at 0.95 of the plain speed.
    slow = {("sinks", "fwd"), ("sinks", "bwd")} if head_dim == 64 else set()
    assert {at for at, check in found.items() if not check.holds} == slow


def test_other_head_sizes_and_the_repeatable_backward_have_the_general_aims():
    for rows_of, directions in (("features-d256", {"fwd", "bwd"}), ("features-deterministic", {"bwd"})):
        rows = [row for row in recorded(rows_of=rows_of).rows if row.direction in directions]
        sums = [row.direction == "bwd" and row.case.feature.endswith("-grad") for row in rows]
        assert rows and [aim_of(row) for row in rows] == [0.5 if is_sum else 0.8 for is_sum in sums]


def test_the_page_of_limits_has_what_the_stored_run_misses():
    """Of both head sizes: the aims, the measured shares, and the commit and date of the run."""
    page, results = (ROOT / "docs" / "limits.md").read_text(), ROOT / "bench" / "results"
    row = r"^\| `([\w-]+)`, (forward|backward), (\d+) \| ([\d.]+) \| ([\d.]+) \|"
    written = {(name, way, int(d)): (aim, share) for name, way, d, aim, share in re.findall(row, page, re.M)}
    columns = [(way, d) for d in (128, 64) for way in ("forward", "backward")]
    for name, cells in re.findall(r"^\| `([\w-]+)` \|((?: [\d.]* \|){4})$", page, re.M):
        for (way, d), share in zip(columns, cells.split("|"), strict=False):
            general = "0.50" if way == "backward" and name.endswith("-grad") else "0.80"
            if share.strip():
                written[name, way, d] = (general, share.strip())
    missed = {}
    for name, head_dim in (("features", 128), ("features-d64", 64)):
        path = max(results.glob(f"*/{name}.json.gz"))
        date, commit = path.parent.name[:10], path.parent.name.rpartition("-")[2]
        assert f"Commit {commit}, {date}." in page
        for check in checks(Results.from_json(stored_text(path))):
            if check.what == OF_PLAIN and not check.holds:
                at = (check.feature, DIRECTION_FILES[check.direction], head_dim)
                missed[at] = (f"{check.limit:.2f}", f"{check.value:.2f}")
    assert written == missed


def test_documents_are_held_against_packed_sequences():
    by_ids, packed = SETS["documents"][:2]
    assert packed.name == by_ids.name + "-packed"

    def found(*times: float) -> list:
        rows = [Row(case, "fwd", "bf16", 1, 1) for case in (by_ids, packed)]
        for row, ms in zip(rows, times, strict=False):
            row.entries = [timed("auto", ms, ours=True)]
        of_all = checks(Results({}, {}, rows))
        return [check for check in of_all if "packed" in check.what]

    slow, fast, unknown = found(1.0, 0.9), found(1.0, 0.96), found(1.0)
    assert [check.holds for check in slow + fast + unknown] == [False, True, False]
    assert slow[0].value == pytest.approx(0.9) and unknown[0].value is None
