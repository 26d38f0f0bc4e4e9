"""The benchmark's set of models: its rows, who solves them, and that a wrong result is never timed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench import asks, features, peers, timing
from bench.entrants import Entrant, make_ours
from bench.inputs import Inputs
from bench.model_report import best_peer, over_ours
from bench.peers import Fa2, Fa3, Fa4, Flex, Sdpa, make_peers
from bench.record import Entry, Results, Row
from bench.runner import Setup, run
from bench.shapes import SETS, Case, find_case, flops, traffic_bytes, visible_pairs
from tests.bench.test_bench import Truth, assert_solves

CPU = torch.device("cpu")
SMOKE = SETS["smoke-models"]


def kind_of(case: Case) -> tuple:
    """What makes a row another problem than one of other sizes."""
    equal = (
        case.num_heads == case.num_heads_k,
        case.seqlen_q == case.seqlen_k,
        case.head_dim == case.head_dim_v,
    )
    return tuple(sorted(case.asks)), case.causal, case.packed, case.window == (-1, -1), case.inference, equal


by_kind = pytest.mark.parametrize(
    "case", {kind_of(case): case for case in reversed(SMOKE)}.values(), ids=lambda case: case.name
)


@functools.cache
def inputs_of(case: Case) -> Inputs:
    """With every weight kept: dropout has no one result."""
    return Inputs(case, torch.float32, CPU, 0).without_dropout


# ---- the rows --------------------------------------------------------------------------------------------


def test_every_row_is_tried_small_and_asks_for_what_exists():
    assert [c.name for c in SMOKE] == [f"smoke-{c.name}" for c in SETS["models"]]
    for case, small in zip(SETS["models"], SMOKE, strict=True):
        assert set(case.asks) <= set(asks.ASKS) and not (case.packed and case.asks)
        assert (small.asks, small.causal, small.packed, small.inference) == (
            case.asks, case.causal, case.packed, case.inference
        )  # fmt: skip
        assert (small.num_heads > small.num_heads_k) == (case.num_heads > case.num_heads_k)
        assert (small.seqlen_q == small.seqlen_k) == (case.seqlen_q == case.seqlen_k)
        assert (small.window == (-1, -1)) == (case.window == (-1, -1))
        assert small.total_q * small.num_heads < 40_000


def test_shifted_windows_hide_what_swin_hides():
    """The mask as Swin's code makes it: an image of labelled regions, cut into windows."""
    case = dataclasses.replace(find_case("swin-shifted"), batch=128)
    image = torch.zeros(56, 56)
    parts = (slice(0, -7), slice(-7, -3), slice(-3, None))
    for label, (down, right) in enumerate((a, b) for a in parts for b in parts):
        image[down, right] = label
    windows = image.view(8, 7, 8, 7).transpose(1, 2).reshape(64, 49)
    seen = features.shared_mask(case, asks.ask(case, torch.float32, CPU), CPU)
    expected = (windows[:, None] == windows[:, :, None]).repeat(2, 1, 1)
    assert torch.equal(seen, expected[:, None])


def test_rows_with_masks_count_their_pairs_and_bytes():
    for case in SMOKE:
        inputs = Inputs(case, torch.float32, CPU, 0)
        masked = {"key-padding", "shifted-windows", "left-chunks"} & set(case.asks)
        if not masked:
            assert inputs.pairs is None
            continue
        seen = features.shared_mask(case, inputs.asked, CPU)
        whole = seen.expand(case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
        assert inputs.pairs == whole.sum() < visible_pairs(case) * case.num_heads
        results = timed_by([Right()], [case], ["bwd"])
        extra = inputs.asked.option_bytes + inputs.asked.learned_bytes
        assert results.rows[0].pairs == inputs.pairs
        assert results.rows[0].flops == flops(case, "bwd", inputs.pairs)
        assert results.rows[0].traffic_bytes == traffic_bytes(case, "bwd", 4) + extra


# ---- who solves what -------------------------------------------------------------------------------------


def formula(inputs: Inputs, learned: torch.Tensor | None, leaves: list[torch.Tensor]) -> torch.Tensor:
    """out by plain matrix products, of all rows at once, in the dtype of the leaves."""
    case, asked = inputs.case, inputs.asked
    q, k, v = (t if case.packed else t.flatten(0, 1) for t in leaves)
    lengths = case.lengths or None
    sizes_q, sizes_k = lengths or (case.seqlen_q,) * case.batch, lengths or (case.seqlen_k,) * case.batch
    outs = []
    for b, (qs, ks, vs) in enumerate(zip(q.split(sizes_q), k.split(sizes_k), v.split(sizes_k), strict=True)):
        row, col = torch.arange(len(qs))[:, None], torch.arange(len(ks))[None]
        rule = asked.rule or (features.window_rule(case) if case.packed else None)
        heads = []
        for h in range(case.num_heads):
            h_k = h // (case.num_heads // case.num_heads_k)
            scores = qs[:, h] @ ks[:, h_k].T / case.head_dim**0.5
            at = torch.tensor(b), torch.tensor(h)
            if asked.score is not None:
                scores = asked.score(learned)(scores, *at, row, col)
            if rule is not None:
                scores = scores.masked_fill(~rule(*at, row, col), float("-inf"))
            weights = scores.exp()
            total = weights.sum(1, keepdim=True)
            if "sinks" in asked.options:
                total = total + learned[h].exp()
            heads.append(weights / total @ vs[:, h_k])
        outs.append(torch.stack(heads, 1))
    return torch.cat(outs).view_as(inputs.dout)


TRUTHS: dict[Case, Truth] = {}


def truth(inputs: Inputs) -> Truth:
    """out and all gradients in float64, that of what is learned last. The inputs of a case never differ."""
    if inputs.case not in TRUTHS:
        TRUTHS[inputs.case] = results_of_formula(inputs)
    return TRUTHS[inputs.case]


def results_of_formula(inputs: Inputs) -> Truth:
    leaves = [t.detach().double().requires_grad_() for t in inputs.qkv]
    learned = inputs.asked.learned
    if learned is not None:
        leaves.append(learned.detach().double().requires_grad_())
    out = formula(inputs, leaves[3] if learned is not None else None, leaves[:3])
    return out.detach(), torch.autograd.grad(out, leaves, inputs.dout.double())


def directions_of(case: Case) -> tuple[str, ...]:
    return ("fwd",) if case.inference else ("fwd", "bwd")


@by_kind
def test_ours_agrees_with_the_formula(case: Case):
    pytest.importorskip("flash_ext._C", reason="the extension is not built")
    inputs, ours = inputs_of(case), make_ours(["cpu"])[0]
    assert_solves(ours, inputs, truth(inputs), directions_of(case), atol=5e-5)


@by_kind
def test_sdpa_agrees_with_the_formula_where_it_can(case: Case):
    (peer,), _ = make_peers(["math"])
    why = peer.why_not(case, "fwd")
    if case.packed or {"sinks", "softcap-50"} & set(case.asks):
        assert "packed" in why or case.asks[0] in why
        return
    assert why == ""
    # The gradient of a relative position is the one of its bias written out.
    options = {"atol": 5e-5, "heads_first": True, "learned": "bias-grad" in case.asks}
    inputs = inputs_of(case)
    assert_solves(peer, inputs, truth(inputs), directions_of(case), **options)


@by_kind
def test_flex_agrees_with_the_formula_where_it_can(case: Case, flex: Flex):
    if "dropout" in case.asks:
        assert "dropout" in flex.why_not(case, "fwd")
        return
    assert flex.why_not(case, "fwd") == ""
    inputs = inputs_of(case)
    out = flex.prepare(inputs, "fwd")().transpose(1, 2)
    out = out.squeeze(0) if case.packed else out
    torch.testing.assert_close(out.double(), truth(inputs)[0], rtol=1e-4, atol=1e-5)


@by_kind
def test_raw_peers_refuse_what_they_would_ignore(case: Case):
    fa2, fa3, fa4 = (kind.__new__(kind) for kind in (Fa2, Fa3, Fa4))
    assert (fa2.why_not(case, "fwd") == "") == (set(case.asks) <= {"dropout"})
    assert (fa3.why_not(case, "fwd") == "") == (set(case.asks) <= {"softcap-50"})
    plain = not case.asks and not case.packed and case.window == (-1, -1)
    assert (fa4.why_not(case, "fwd") == "") == plain


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_backend_without_groups_gets_copies_of_the_heads(direction: str, monkeypatch: pytest.MonkeyPatch):
    """And the copies are part of the call: their gradients are those of the heads they are copies of."""
    given = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **options):
        given.append((q.shape[1], k.shape[1], v.shape[1], options.get("enable_gqa", False)))
        return attend(q, k, v, **options)

    monkeypatch.setattr(peers, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setattr(peers.F, "scaled_dot_product_attention", spy)
    inputs = inputs_of(find_case("smoke-llama3-8b-8k"))
    found = Sdpa("mem", SDPBackend.EFFICIENT_ATTENTION).prepare(inputs, direction)()
    assert given and set(given) == {(4, 4, 4, False)}
    out, grads = truth(inputs)
    pairs = [(found, out)] if direction == "fwd" else zip(found, grads, strict=True)
    for mine, right in pairs:
        torch.testing.assert_close(mine.transpose(1, 2).double(), right, rtol=1e-4, atol=5e-5)


# ---- a wrong result has no time --------------------------------------------------------------------------


class Right(Entrant):
    """The formula, in the layout of ours; ``spoil`` turns its tensors into what is returned."""

    name = "right"
    ours = True

    def __init__(self, spoil=lambda inputs, tensors: tensors) -> None:
        self.spoil = spoil

    def prepare(self, inputs, direction):
        out, grads = truth(inputs)
        p = inputs.asked.options.get("dropout_p", 0.0)
        if direction == "fwd" and p:
            out = self.dropped(inputs, out, p)
        tensors = [t.to(inputs.dtype) for t in ((out,) if direction == "fwd" else grads)]
        return lambda: self.spoil(inputs, tensors)

    def dropped(self, inputs, out, p):
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return out + noise.double() * out.std() * (p / (1 - p)) ** 0.5


class IgnoresDropout(Right):
    name = "ignores dropout"

    def dropped(self, inputs, out, p):
        return out


class IdleTimer:
    def launch(self, call, count):
        return [1.0] * count, 1.0

    def synchronize(self):
        pass

    def peak_bytes(self, call):
        return 0

    def release(self):
        pass


def timed_by(entrants: list[Entrant], cases: list[Case], directions: list[str], rows=()) -> Results:
    results = Results({}, {"matmul_tflops": 1.0, "copy_gbps": 1.0}, list(rows))
    setup = Setup(entrants, IdleTimer(), CPU, torch.float32, results.ceilings, 1, 0.0)
    run(results, cases, directions, setup, lambda row: None)
    return results


@by_kind
def test_the_right_result_is_timed_and_a_wrong_one_is_not(case: Case):
    def of_another_head(inputs, tensors):
        return [t.roll(1, -2) if t.shape[:-1] == inputs.q.shape[:-1] else t for t in tensors]

    def heads_first(inputs, tensors):
        turned = [t[None] if inputs.case.packed else t for t in tensors[:1]]
        return turned[0].transpose(1, 2)

    wrong, peer = Right(of_another_head), Right(heads_first)
    wrong.name, peer.name = "wrong", "peer"
    for row in timed_by([Right(), wrong, peer], [case], ["fwd", "bwd"]).rows:
        right, other, turned = (row.entry(name) for name in ("right", "wrong", "peer"))
        assert right.status == turned.status == "ok", (right.text, turned.text)
        assert other.status == "error" and other.median_ms is None
        what = "out" if row.direction == "fwd" else "dq"
        assert f"WrongResult: {what} is off by" in other.text


@pytest.mark.parametrize("name", ["bert-large-512", "gpt2-1k"])
def test_dropout_must_drop_its_share(name: str):
    pytest.importorskip("flash_ext._C", reason="the extension is not built")
    torch.manual_seed(0)  # what is dropped of a causal row's first keys moves much of so small an out
    row = timed_by([IgnoresDropout(), *make_ours(["cpu"])[:1]], [find_case(f"smoke-{name}")], ["fwd"]).rows[0]
    assert "dropout of 0.1 moves out by" in row.entry("ignores dropout").text
    assert row.entry("cpu").status == "ok", row.entry("cpu").text


@pytest.mark.parametrize(("name", "left_out"),
                         [
                             ("bert-large-512-no-dropout", "key-padding"),
                             ("swin-shifted", "shifted-windows"), ("swin-windows", "bias-grad"),
                             ("t5-large-decoder", "relative-position-before-grad"),
                             ("gpt-oss-120b-full", "sinks"), ("conformer-chunks", "left-chunks"),
                             ("alphafold-triangle-256", "key-padding"),
                         ])  # fmt: skip
def test_a_column_that_ignores_what_is_asked_has_no_time(name: str, left_out: str):
    pytest.importorskip("flash_ext._C", reason="the extension is not built")

    class Careless(Entrant):
        name = "careless"

        def prepare(self, inputs, direction):
            rest = tuple(ask for ask in inputs.case.asks if ask != left_out)
            case = dataclasses.replace(inputs.case, asks=rest)
            other = Inputs(case, inputs.dtype, CPU, 0)
            return make_ours(["cpu"])[0].prepare(other, direction)

    careless, ours = (
        timed_by([entrant], [find_case(f"smoke-{name}")], ["fwd"]).rows[0].entries[0]
        for entrant in (Careless(), make_ours(["cpu"])[0])
    )
    assert ours.status == "ok", ours.text
    assert careless.status == "error" and "WrongResult" in careless.text


# ---- timing ----------------------------------------------------------------------------------------------


def test_the_device_waits_for_as_long_as_the_host_queues(monkeypatch: pytest.MonkeyPatch):
    """Else a call whose host time exceeds its GPU time is timed by the host's."""
    least, most = timing.HEAD_START_S
    assert timing.head_start_cycles(40, 0.0) == int(least * timing.CYCLES_PER_S)
    assert timing.head_start_cycles(40, 300e-6) == pytest.approx(12e-3 * timing.CYCLES_PER_S)
    assert timing.head_start_cycles(3, 1.0) == int(most * timing.CYCLES_PER_S)

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    waited = []
    properties = type("Properties", (), {"L2_cache_size": 1024})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    timer = timing.CudaTimer(CPU)

    def call() -> None:
        torch.ones(1 << 20).sum()  # about a millisecond

    _, call_us = timer.launch(call, 3)
    timer.launch(call, 8)
    assert waited[0] == timing.head_start_cycles(3, 0.0)
    assert waited[1] == timing.head_start_cycles(8, 1e-6 * call_us)


# ---- the report ------------------------------------------------------------------------------------------


def timed(name: str, ms: float, ours: bool = False) -> Entry:
    return Entry(name, ours, median_ms=ms, q1_ms=0.9 * ms, q3_ms=1.1 * ms, tflops=1.0, matmul_pct=1.0)


def recorded() -> Results:
    """Three rows forward: a peer at 1.5 of ours and one at 3, one at half of ours, and one with no peer."""
    entries = {
        "vit-b16": [timed("auto", 0.02, True), timed("cudnn", 0.03), timed("mem", 0.06)],
        "flux-4608": [timed("auto", 2.0, True), timed("cudnn", 1.0), timed("mem", 4.0)],
        "gpt-oss-120b-full": [timed("auto", 1.0, True)],
    }
    entries["vit-b16"].append(Entry("fa2", status="error", text="RuntimeError: no kernel"))
    entries["gpt-oss-120b-full"].append(Entry("mem", status="refused", text="SDPA does not do sinks"))
    rows = [Row(find_case(name), "fwd", "bf16", 1.0, 1, parts) for name, parts in entries.items()]
    rows.append(Row(find_case("flux-4608"), "bwd", "bf16", 1.0, 1, [timed("cudnn", 1.0)]))
    rows[-1].entries.append(Entry("auto", True, status="error", text="WrongResult: dq is off"))
    about = {"device": "a GPU", "torch": "2.0", "date": "2026-01-01"}
    return Results(about, {"matmul_tflops": 700.0, "copy_gbps": 4000.0}, rows)


def test_the_best_peer_over_ours():
    rows = recorded().rows
    assert [over_ours(row) for row in rows] == [pytest.approx(1.5), pytest.approx(0.5), None, None]
    assert [best_peer(row) and best_peer(row).name for row in rows] == ["cudnn", "cudnn", None, "cudnn"]
