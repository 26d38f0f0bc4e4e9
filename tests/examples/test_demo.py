"""The demo: its text and packs, the attentions it compares, what it measures, and a whole small run."""

from __future__ import annotations

import contextlib
import io
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from examples.train import __main__ as demo
from examples.train import masked as demo_masked
from examples.train import measure as demo_measure
from examples.train import report as demo_report
from examples.train.measure import Schedule
from examples.train.model import ModelSize, Transformer, document_mask
from examples.train.report import MATERIALISED, OURS, PYTORCH, Progress, Results
from examples.train.text import pack_tokens, read_text, standard_library
from flash_ext import attention_varlen
from flash_ext.masks import ALiBi

pytestmark = pytest.mark.xdist_group("demo")  # which one process runs

CPU = torch.device("cpu")
TINY = demo.Preset(size=ModelSize(width=32, num_layers=2, num_heads=4, num_heads_k=2, head_dim=16),
                   schedule=Schedule(steps=24, seconds=120.0, learning_rate=4e-3), total=192, longest=100,
                   held_out_packs=2, checked=128,
                   masked_schedule=Schedule(steps=24, seconds=120.0, learning_rate=4e-3), masked_total=128,
                   memory_seqlens=(256, 512, 1024), access_seqlens=(64, 128), access_head_dim=16, sram=2048,
                   sample=20)  # fmt: skip


class Run(NamedTuple):
    """What the program found, printed, and drew where matplotlib is."""

    results: Results
    printed: str
    picture: Path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of the program, whose number of threads other tests do not keep."""
    before, found = torch.get_num_threads(), []
    picture = tmp_path_factory.mktemp("demo") / "new" / "demo.png"
    original, printed = demo.run, io.StringIO()

    def run(*arguments: Any) -> Results:
        found.append(original(*arguments))
        return found[0]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        steps, schedule = str(TINY.schedule.steps), replace(TINY.schedule, steps=1)
        patch.setattr(demo, "CPU", replace(TINY, schedule=schedule))
        patch.setattr(demo, "run", run)
        demo.main(["--device", "cpu", "--steps", steps, "--out", str(picture)])
    torch.set_num_threads(before)
    return Run(found[0], printed.getvalue(), picture)


@pytest.fixture
def results(program: Run) -> Results:
    return program.results


# ---- attentions and model --------------------------------------------------------------------------------


def some_pack(lengths: tuple[int, ...]):
    total = sum(lengths)
    tokens = bytearray(random.Random(5).randbytes(total))
    return pack_tokens(tokens, tokens, [sum(lengths[:i]) for i in range(len(lengths) + 1)])


def test_the_mask_is_causal_within_documents():
    lengths = (3, 1, 5)
    documents = [i for i, length in enumerate(lengths) for _ in range(length)]
    expected = [[documents[r] == documents[c] and c <= r for c in range(9)] for r in range(9)]
    assert document_mask(some_pack(lengths)).tolist() == expected


def test_all_attentions_compute_the_same():
    pack = some_pack((33, 1, 20, 10))
    q, k, v = (torch.randn(pack.total, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    ours, pytorch, materialised = (make(pack)(q, k, v) for make in demo.ATTENTIONS.values())
    assert ours.shape == q.shape
    torch.testing.assert_close(ours, materialised, rtol=0, atol=1e-13)
    torch.testing.assert_close(pytorch, materialised, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", demo.ATTENTIONS)
def test_no_row_sees_later_bytes_or_other_documents(name: str):
    model = Transformer(TINY.size)
    pack = some_pack((20, 30, 14))
    with torch.no_grad():
        before = model(pack, demo.ATTENTIONS[name])
        pack.tokens[35] ^= 1
        after = model(pack, demo.ATTENTIONS[name])
    changed = (before - after).abs().amax(dim=1) > 1e-5
    assert changed.nonzero().flatten().tolist() == list(range(35, 50))


# ---- measuring -------------------------------------------------------------------------------------------


def test_peak_bytes_counts_what_lives_at_a_time():
    mib = demo_report.MIB

    def one_after_the_other() -> None:
        torch.ones(mib, dtype=torch.uint8)
        torch.ones(2 * mib, dtype=torch.uint8)

    def both() -> None:
        small, large = (torch.ones(n * mib, dtype=torch.uint8) for n in (1, 2))
        del small, large
        torch.ones(2 * mib, dtype=torch.uint8)

    assert demo_measure.peak_bytes(one_after_the_other, CPU) == 2 * mib
    assert demo_measure.peak_bytes(both, CPU) == 3 * mib


# ---- a whole run -----------------------------------------------------------------------------------------


def test_both_curves_fall_together(results: Results):
    assert set(results.curves) == {OURS, PYTORCH}
    for name, curve in results.curves.items():
        assert len(curve.losses) == len(curve.seconds) == TINY.schedule.steps
        assert demo_report.last_loss(curve) < curve.losses[0] - 1.0
        assert results.held_out[name] < curve.losses[0] - 1.0
        assert min(curve.seconds) > 0
    ours, pytorch = results.curves[OURS].losses, results.curves[PYTORCH].losses
    assert ours[0] == pytest.approx(pytorch[0], abs=1e-5)  # one set of weights, one pack
    assert max(abs(a - b) for a, b in zip(ours, pytorch)) < 1e-3


def test_both_attentions_are_as_near_to_float64_as_float32_can_be(results: Results):
    assert set(results.distances) == {"out", "dq", "dk", "dv"}
    for distance in results.distances.values():
        assert distance.largest_value > 1e-3
        for name in (OURS, PYTORCH):
            assert 0 < distance.difference[name] < 1e-5 * max(1.0, distance.largest_value)


def test_distance_finds_a_wrong_attention():
    """Off by one part in a thousand in the output alone."""
    model = Transformer(TINY.size)

    def wrong(pack):
        attend = demo.pytorch_attention(pack)
        return lambda q, k, v: attend(q, k, v) + 1e-3 * v.repeat_interleave(2, dim=1).detach()

    attentions = {OURS: demo.flash_ext_attention, "wrong": wrong}
    distances = demo_measure.distance_from_float64(model, some_pack((20, 30)), attentions)
    assert distances["out"].difference["wrong"] > 100 * distances["out"].difference[OURS]
    assert distances["dq"].difference["wrong"] < 1e-5


def test_the_masked_model_learns_and_is_as_near_to_float64_as_float32_can_be(results: Results):
    masked = results.masked
    assert len(masked.curve.losses) == masked.planned_steps == TINY.masked_schedule.steps
    assert demo_report.last_loss(masked.curve) < masked.curve.losses[0] - 1.0
    assert masked.held_out < masked.curve.losses[0] - 1.0
    assert set(masked.distances) == {"out", "dq", "dk", "dv", "dslopes"}
    for tensor, distance in masked.distances.items():
        assert distance.largest_value > 1e-3, tensor
        for name in (OURS, MATERIALISED):
            assert 0 < distance.difference[name] < 1e-5 * max(1.0, distance.largest_value), (tensor, name)


def test_masked_training_is_the_packed_one_with_other_words():
    """Documents in one sequence, with ALiBi, attend as in a packed call; dropout differs by call."""
    pack = some_pack((33, 1, 20, 10))
    q, k, v = (torch.randn(pack.total, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    slopes = demo_masked.alibi_slopes(4, CPU)
    packed = attention_varlen(q, k, v, pack.cu_seqlens, pack.cu_seqlens, causal=True, bias=ALiBi(slopes))
    torch.testing.assert_close(demo_masked.masked_attention_without_dropout(pack)(q, k, v), packed)
    attend = demo_masked.masked_attention(pack)
    assert (attend(q, k, v) - attend(q, k, v)).abs().max() > 1e-3


def test_memory_grows_linearly_unless_materialised(results: Results):
    short, long = (results.attention_memory[n] for n in (512, 1024))
    assert long[OURS] < 2.1 * short[OURS]
    assert long[MATERIALISED] > 3.5 * short[MATERIALISED]
    assert long[MATERIALISED] > 10 * long[OURS]
    assert results.step_memory[OURS] < results.step_memory[MATERIALISED]


@pytest.mark.gpu
@pytest.mark.caching
def test_on_a_gpu_in_bfloat16():
    """Gates are wide: that the kernels are right is for other tests, this one is for the way to them."""
    device = torch.device("cuda")
    results = demo.run(TINY, device, read_text(standard_library()), 0, Progress())
    ours, pytorch = results.curves[OURS].losses, results.curves[PYTORCH].losses
    assert demo_report.last_loss(results.curves[OURS]) < ours[0] - 1.0
    assert max(abs(a - b) for a, b in zip(ours, pytorch)) < 0.1
    for distance in results.distances.values():
        assert 0 < distance.difference[OURS] < 0.02 * distance.largest_value
    for distance in results.masked.distances.values():
        assert 0 < distance.difference[OURS] < 0.03 * distance.largest_value
    assert results.attention_memory[1024][OURS] < results.attention_memory[1024][MATERIALISED] / 4
    assert "bfloat16" in results.heading[0]


def test_the_program_prints_a_report_and_writes_a_picture(program: Run):
    headings = ("Loss in nats", "from float64", "Masked model", "Peak memory", "HBM accesses", "Generated")
    for heading in (*headings, "Summary", "100%"):
        assert heading in program.printed
    pytest.importorskip("matplotlib")
    assert f"Picture: {program.picture}" in program.printed
    data = program.picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 600
