"""Tests of the tests: the truth agrees with the oracle, the checks pass a right kernel and see a wrong one.

The kernel is the model of emulated.py, so all of this runs without a GPU.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch

from tests import emulated, harness, watchdog
from tests.cases import Case, covering_cases, dense, packed, random_cases
from tests.covering import covering_array
from tests.inputs import make_inputs
from tests.judge import RMS_LIMIT, rms_limit
from tests.reference import attention_reference
from tests.sampled import Pair, Sequence, backward_keys, backward_rows, corner_samples, forward_rows
from tests.tools import large
from tests.truth import _find_at_once, compute_truth

CPU = harness.TARGETS["cpu"]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch):
    """Makes the harness call the kernel model; returns a function that plants a bug in it."""

    def plant(bug: str = "") -> None:
        monkeypatch.setattr(harness, "call_forward", lambda x, t: emulated.forward(x, t, bug))
        monkeypatch.setattr(harness, "call_backward", lambda x, o, s, t: emulated.backward(x, o, s, t, bug))

    plant()
    with CPU.active():
        yield plant


def oracle(case: Case) -> dict[str, torch.Tensor]:
    """Results of tests.reference, gradients by autograd."""
    x = make_inputs(case, "cpu")
    q, k, v = (t.double().nan_to_num(0).requires_grad_() for t in (x.q, x.k, x.v))
    out, lse = attention_reference(q, k, v, case.spec, x.cu_seqlens_q, x.cu_seqlens_k)
    loss = (out * x.dout.nan_to_num(0)).sum()
    if case.dlse:
        loss = loss + (lse.masked_fill(lse.isinf(), 0) * x.dlse).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def test_truth_agrees_with_the_oracle(seed: int) -> None:
    """Two implementations without common code: padded formulas here, per-sequence autograd there."""
    cases = [
        c
        for c in random_cases(seed, 15, limit=70, max_work=60_000)
        if not c.invalid and c.data not in ("nan_row", "inf_value", "tiny")
    ]
    with CPU.active():
        for case in cases:
            truth, expected = compute_truth(make_inputs(case, "cpu"), backward=True), oracle(case)
            for name, t in expected.items():
                assert torch.equal(truth.value[name].isinf(), t.isinf()), f"{case}: {name}"
                torch.testing.assert_close(
                    truth.value[name],
                    t,
                    rtol=1e-9,
                    atol=1e-9,
                    msg=lambda text, name=name, case=case: f"{case}: {name}: {text}",
                )


def test_special_values_of_the_truth_agree_with_the_oracle() -> None:
    """Where a NaN query or an infinite value shows, row by row."""
    for data, causal in itertools.product(("nan_row", "inf_value"), (False, True)):
        for case in (
            dense(2, 9, 12, 4, 2, 8, data=data, causal=causal),
            packed([5, 4], [7, 3], num_heads=2, num_heads_k=1, head_dim=8, data=data, causal=causal),
        ):
            x = make_inputs(case, "cpu")
            truth = compute_truth(x, backward=data == "nan_row")
            q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
            out, lse = attention_reference(
                q, k, v, case.spec, x.cu_seqlens_q, x.cu_seqlens_k, isolate_rows=True
            )
            found = {"out": out.detach(), "lse": lse.detach()}
            if data == "nan_row":
                found.update(zip(("dq", "dk", "dv"), torch.autograd.grad((out * x.dout).sum(), (q, k, v))))
            for name, t in found.items():
                free = truth.unspecified.get(name, torch.zeros_like(t, dtype=torch.bool))
                t, value = t.masked_fill(free, 0), truth.value[name].masked_fill(free, 0)
                torch.testing.assert_close(value, t, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_model_passes_on_every_kind_of_data(model, seed: int) -> None:
    """The noise is large enough: a kernel that rounds as it must stays inside, whatever the data."""
    drawn = [c for c in random_cases(seed + 1, 200, limit=130, max_work=60_000) if not c.invalid]
    one_of_each = {case.data: case for case in drawn}
    harness.run_cases([*drawn[:5], *one_of_each.values()], CPU)


# Few cases that together notice every planted bug; small enough to run once per bug.
WATCHFUL = [
    dense(2, 67, 100, 4, 2, 64, causal=True, dlse=True),
    dense(1, 100, 67, 4, 2, 40, dtype="fp16", causal=True),
    dense(1, 90, 90, 2, 2, 64, window=(17, 3)),
    dense(1, 40, 150, 2, 1, 32, data="rising"),
    packed([5, 0, 40], [9, 3, 41], num_heads=2, num_heads_k=1, head_dim=24, tail=7),
]


@pytest.mark.parametrize("bug", sorted(emulated.BUGS))
def test_planted_bug_is_noticed(model, bug: str) -> None:
    model(bug)
    for case in WATCHFUL:
        try:
            harness.run_case(case, CPU)
        except harness.CaseFailure as failure:
            assert "--repro" in str(failure)
            return
    pytest.fail(f"nothing noticed: {emulated.BUGS[bug]}")


# dk of keys whose weights lie around 2^-126, where the model loses them as ex2.approx.ftz does.
VANISHING = [
    dense(1, 31, 127, 3, 3, 192, scale=0.5, data="large"),
    packed([33, 2], [33, 204], num_heads=8, num_heads_k=1, head_dim=256, scale=0.5, data="peaked"),
]


@pytest.mark.parametrize("case", VANISHING, ids=["large", "peaked"])
def test_weights_below_the_normal_range_are_allowed_for(model, case, monkeypatch) -> None:
    harness.run_case(case, CPU)
    monkeypatch.setattr("tests.truth.WEIGHT_FLUSH", 2.0**-149)
    with pytest.raises(harness.CaseFailure, match="dk: error"):
        harness.run_case(case, CPU)


def test_limit_of_the_mean_follows_the_number_of_independent_errors() -> None:
    """As tight as can be where errors are independent, and no tighter than chance where they are not."""

    def limits(case: Case) -> dict[str, float]:
        independent = compute_truth(make_inputs(case, "cpu"), backward=True).independent
        return {name: rms_limit(count) for name, count in independent.items()}

    for causal in (False, True):
        assert max(limits(dense(2, 150, 200, 4, 4, 128, causal=causal)).values()) < RMS_LIMIT + 0.06
    for case in (
        dense(1, 1, 50, 1, 1, 64),  # one query: dk is a multiple of q, and delta is off by one number
        dense(1, 30, 50, 1, 1, 64, data="twins"),  # equal weights and nearly equal queries
    ):
        assert limits(case)["dk"] > 2 * RMS_LIMIT
    flat = limits(dense(1, 61, 255, 1, 1, 32, data="zero_q"))  # every key has the same dv
    assert flat["dv"] > RMS_LIMIT + 0.2 and flat["out"] > RMS_LIMIT + 0.2


def test_equal_heads_of_a_group_err_alike() -> None:
    """dv of seven heads with the same weights and dout is seven times as uncertain as of one, not sqrt(7)."""
    noise = []
    for heads in (1, 7):
        x = make_inputs(dense(1, 9, 15, heads, 1, 8, data="zero_q"), "cpu")
        x.dout.copy_(x.dout[:, :, :1].clone() if heads == 1 else noise[0][1].expand_as(x.dout))
        noise.append((compute_truth(x, backward=True).noise["dv"], x.dout))
    torch.testing.assert_close(noise[1][0], 7 * noise[0][0])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        dense(3, 9, 15, 6, 2, 8, dlse=True, data="nan_row"),
        dense(1, 9, 15, 7, 1, 8, data="zero_q", dout_layout="expanded"),
        packed([5, 0, 40], [9, 3, 41], num_heads=6, num_heads_k=2, head_dim=24, tail=7, causal=True),
        packed([5, 9], [9, 9], num_heads=4, num_heads_k=2, head_dim=8, data="zero_q", dout_layout="expanded"),
    ],
)
def test_parts_of_the_truth_are_the_whole(case: Case, backward: bool, monkeypatch) -> None:
    """However few scores may be held: entries and heads one by one, in a backward those of a key head."""
    x, parts = make_inputs(case, "cpu"), []

    def find_at_once(padded, *rest):
        parts.append(tuple(padded.q.shape[:2]))
        return _find_at_once(padded, *rest)

    monkeypatch.setattr("tests.truth._find_at_once", find_at_once)
    whole = compute_truth(x, backward)
    batch = len(list(case.sequences()))
    assert parts == [(batch, case.num_heads)]
    parts.clear()
    monkeypatch.setattr("tests.truth.LARGEST_MATRIX", 1)
    divided = compute_truth(x, backward)
    together = case.num_heads // case.num_heads_k if backward else 1
    assert parts == [(1, together)] * (batch * case.num_heads // together)
    for found, wanted in ((divided.value, whole.value), (divided.noise, whole.noise)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14, equal_nan=True)
    assert divided.independent == pytest.approx(whole.independent, rel=1e-12)
    assert divided.unspecified.keys() == whole.unspecified.keys()


def test_lost_key_is_noticed_in_a_long_row(model) -> None:
    """The bug that a comparison with twice PyTorch's error misses in bf16: one key of 2048."""
    case = dense(1, 8, 2048, 1, 1, 64, causal=True, backward=False)
    harness.run_case(case, CPU)
    model("newest_key")
    with pytest.raises(harness.CaseFailure, match="lse"):
        harness.run_case(case, CPU)


def test_stray_reads_and_writes_are_noticed(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries stand around inputs, results and workspaces of every case."""
    case = dense(1, 5, 7, 1, 1, 8, layout="gap", backward=False)

    def reads_beyond(x, target):
        widened = x.v.as_strided(
            x.v.shape, (x.v.stride(0), x.v.stride(1), x.v.stride(2), 1), x.v.storage_offset() + 1
        )
        return attention_reference(x.q, x.k, widened, case.spec)[0].to(x.q.dtype), emulated.forward(
            x, target
        )[1]

    def writes_beyond(x, target):
        x.arena[x.arena.numel() - 1] = 0
        return emulated.forward(x, target)

    for fault, words in ((reads_beyond, "special values"), (writes_beyond, "memory around it")):
        monkeypatch.setattr(harness, "call_forward", fault)
        with pytest.raises(harness.CaseFailure, match=words):
            harness.run_case(case, CPU)


def test_sampled_truth_agrees_with_the_oracle() -> None:
    rng = random.Random(0)
    for case in (
        dense(2, 130, 150, 4, 2, 24, causal=True, window=(40, 0), dlse=True),
        dense(1, 130, 100, 4, 2, 24, 40, window=(-1, 3)),
    ):
        x, expected, b = make_inputs(case, "cpu"), oracle(case), case.batch - 1
        seq = Sequence(x.q[b], x.k[b], x.v[b], expected["out"][b], expected["lse"][b], x.dout[b],
                       x.dlse[b] if case.dlse else None, expected["dq"][b], expected["dk"][b],
                       expected["dv"][b])  # fmt: skip
        rows, keys = (corner_samples(rng, 12, h, n) for h, n in ((4, case.seqlen_q), (2, case.seqlen_k)))
        out, lse, _ = forward_rows(seq, case.spec, rows)
        for pair in (out, lse, backward_rows(seq, case.spec, rows), *backward_keys(seq, case.spec, keys)):
            torch.testing.assert_close(pair.actual.double(), pair.expected, rtol=1e-9, atol=1e-9)


def test_sampled_rows_that_cancel() -> None:
    """One query, one key: the exact dk is 0, and what fp32 sums leave of it is forgiven, but no more."""
    heads = {"num_heads": 2, "num_heads_k": 2, "head_dim": 192}
    case = packed([3, 1, 64], [3000, 1, 2000], dtype="fp16", causal=True, **heads)
    x = make_inputs(case, "cpu")
    out, lse = emulated.forward(x, CPU)
    all_inputs = large.Large(x.q, x.k, x.v, x.dout, lens=[(3, 3000), (1, 1), (64, 2000)], causal=True)
    grads = emulated.backward(x, out, lse, CPU)
    pairs = []
    for b in range(3):
        seq = large.sequence_of(all_inputs, out, lse, grads, b)
        samples = corner_samples(random.Random(b), 10, 2, seq.k.shape[0])
        pairs.append(backward_keys(seq, case.spec, samples)[0])
    dk = Pair(*(torch.cat([getattr(p, part) for p in pairs]) for part in ("actual", "expected", "cancelled")))
    assert not dk.expected[10:20].any() and dk.actual[10:20].any()
    large.check_gates("dk", dk, 68)
    with pytest.raises(AssertionError, match=r"worst row .* at \(1\d,\)"):
        large.check_gates("dk", dataclasses.replace(dk, cancelled=0 * dk.cancelled), 68)
    wrong = dk.actual.clone()
    wrong[10] += 1e-3 * dk.expected[20:].abs().max()
    with pytest.raises(AssertionError, match="worst row"):
        large.check_gates("dk", dataclasses.replace(dk, actual=wrong), 68)


def test_covering_array_covers() -> None:
    levels = [4, 3, 3, 2, 2]
    for strength in (1, 2, 3):
        rows = covering_array(levels, strength)
        for group in itertools.combinations(range(len(levels)), strength):
            seen = {tuple(row[f] for f in group) for row in rows}
            assert len(seen) == torch.tensor([levels[f] for f in group]).prod()
    assert len(covering_array(levels, 3)) < 60  # of 144 in the full grid
    assert len(covering_cases(2)) < 400


# Instead of Python: the first one begins a case that does not end, the second one dies, the third answers.
CHILDREN = """#!/bin/sh
echo begun >> {count}
case $(wc -l < {count}) in
1) echo ready; echo start; exec sleep 60 ;;
2) cat > /dev/null; echo "KeyError: 'nowhere'" >&2; exit 1 ;;
*) cat > /dev/null; echo ready; echo start; echo "done "; echo start; echo done 6e6f ;;
esac
"""


def test_watchdog_survives_a_hang_and_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that stays silent, and one that dies, cost one case each; the others are still judged."""
    program = tmp_path / "python"
    program.write_text(CHILDREN.format(count=tmp_path / "count"))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    short = dense(1, 8, 8, 1, 1, 8)
    (hung,) = watchdog.run_guarded([short], CPU, seconds=0.2)
    assert "no answer" in hung.problem
    problems = [outcome.problem for outcome in watchdog.run_guarded([short] * 3, CPU)]
    assert problems == ["the process died with code 1: KeyError: 'nowhere'", "", "no"]


def test_a_child_of_the_watchdog_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Here in this process; tests/attention/test_varlen.py starts some."""
    short = dense(1, 8, 8, 1, 1, 8)
    cases = (short, short.replace(data="no such kind"))
    monkeypatch.setattr(sys, "argv", ["watchdog", "cpu"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(case.to_json() + "\n" for case in cases)))
    watchdog.main()
    *lines, refused = capsys.readouterr().out.splitlines()
    assert lines == ["ready", "start", "done ", "start"]
    assert "unknown data kind" in bytes.fromhex(refused.removeprefix("done ")).decode()
    monkeypatch.setattr(sys, "argv", ["watchdog", "nowhere"])
    with pytest.raises(KeyError, match="nowhere"):
        watchdog.main()
