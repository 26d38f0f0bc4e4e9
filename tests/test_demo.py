"""The demo: its text and packs, the attentions it compares, what it measures, and a whole small run."""

from __future__ import annotations

import io
import os
import random
import struct
import sys
from pathlib import Path

import pytest
import torch

from examples.ladder.costs import io_complexity
from examples.train import __main__ as demo
from examples.train import masked as demo_masked
from examples.train import measure as demo_measure
from examples.train import report as demo_report
from examples.train.measure import Curve, Schedule
from examples.train.model import ModelSize, Transformer, document_mask, generate, rotary_angles, rotate
from examples.train.report import MATERIALISED, OURS, PYTORCH, Progress, Results
from examples.train.text import BOUNDARY, DOCUMENT_START, draw_pack, pack_tokens, read_text, standard_library
from flash_ext import attention_varlen
from flash_ext.masks import ALiBi

CPU = torch.device("cpu")
TINY = demo.Preset(
    size=ModelSize(width=32, num_layers=2, num_heads=4, num_heads_k=2, head_dim=16),
    schedule=Schedule(steps=24, seconds=120.0, learning_rate=4e-3),
    total=192,
    longest=100,
    held_out_packs=2,
    checked=128,
    masked_schedule=Schedule(steps=24, seconds=120.0, learning_rate=4e-3),
    masked_total=128,
    memory_seqlens=(256, 512, 1024),
    access_seqlens=(64, 128),
    access_head_dim=16,
    sram=2048,
    sample=20,
)


@pytest.fixture(autouse=True)
def _same_threads():
    """A run chooses its number of threads; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def results() -> Results:
    before = torch.get_num_threads()
    found = demo.run(TINY, CPU, read_text(standard_library()), 0, Progress())
    torch.set_num_threads(before)
    return found


# ---- text and packs --------------------------------------------------------------------------------------


def test_documents_are_whole_functions_and_lose_nothing():
    source = b'import os\n\nclass A:\n    def f(self):\n        pass\n\nasync def g():\n    x = "def "\n'
    pieces = BOUNDARY.split(source)
    assert b"".join(pieces) == source
    assert [piece.split(b"(")[0].split(b":")[0].strip() for piece in pieces] == [
        b"import os\n\n".strip(), b"class A", b"def f", b"async def g",
    ]  # fmt: skip


def test_held_out_files_are_not_trained_on(tmp_path: Path):
    for number in range(21):
        (tmp_path / f"m{number:02}.py").write_text(f"only_in_{number:02} = 1\n")
    text = read_text(tmp_path)
    assert text.num_files == 21
    assert text.held_out == [DOCUMENT_START + b"only_in_%02d = 1\n" % n for n in (19, 20)]
    assert len(text.training) == 19
    assert not set(text.training) & set(text.held_out)


def test_a_folder_without_sources_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="--text FOLDER") as caught:
        read_text(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_packs_are_full_and_made_of_fronts_of_documents(seed: int):
    documents = [DOCUMENT_START + bytes([i] * length) for i, length in enumerate((1, 7, 30, 90), start=1)]
    rng = random.Random(seed)
    for total in (1, 2, 50, 333):
        pack = draw_pack(documents, total, 40, rng)
        assert pack.total == total == pack.cu_seqlens[-1]
        assert pack.cu_seqlens.dtype == torch.int32
        for start, end in zip(pack.cu_seqlens[:-1].tolist(), pack.cu_seqlens[1:].tolist()):
            assert 0 < end - start <= 40
            tokens, targets = bytes(pack.tokens[start:end].tolist()), bytes(pack.targets[start:end].tolist())
            assert tokens[1:] == targets[:-1]
            assert any(document.startswith(tokens + targets[-1:]) for document in documents)
            assert pack.positions[start:end].tolist() == list(range(end - start))


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


def test_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    positions = torch.tensor([0, 5, 40, 45])
    turned = [rotate(x.expand(4, 1, 16), rotary_angles(positions, 16)) for x in (q, k)]
    scores = (turned[0] @ turned[1].mT).flatten()  # equal positions
    torch.testing.assert_close(scores, scores[:1].expand(4), rtol=1e-5, atol=1e-5)
    products = turned[0].squeeze(1) @ turned[1].squeeze(1).mT
    torch.testing.assert_close(products[1, 0], products[3, 2], rtol=1e-5, atol=1e-5)
    assert (products[1, 0] - products[0, 1]).abs() > 1e-3


def test_generated_text_repeats_by_seed_and_ends_at_a_new_document():
    model = Transformer(TINY.size)
    first, again, other = (generate(model, "def ", 12, 1.0, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.startswith("def ")
    with torch.no_grad():  # a model that always answers with the byte 0
        model.norm.weight.zero_()
        model.head.weight.zero_()
        model.head.bias = torch.nn.Parameter(100.0 * torch.nn.functional.one_hot(torch.tensor(0), 256))
    assert generate(model, "def ", 12, 1.0, 1) == "def "
    for byte, written in ((27, "\\x1b"), (200, "\\xc8"), (10, "\n"), (97, "a")):
        model.head.bias = torch.nn.Parameter(100.0 * torch.nn.functional.one_hot(torch.tensor(byte), 256))
        assert generate(model, "def ", 2, 1.0, 1) == "def " + 2 * written


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


def test_peak_bytes_sees_inside_operators():
    """A tile of scores is neither input nor result of flash_ext's operator."""
    pack = some_pack((256,))
    q, k, v = torch.randn(3, 256, 2, 16)
    peak = demo_measure.peak_bytes(lambda: demo.flash_ext_attention(pack)(q, k, v), CPU)
    out_and_lse = 4 * (256 * 2 * 16 + 256 * 2)
    tile = 4 * 2 * 128 * 256
    assert peak is not None and peak > out_and_lse + tile


def test_the_profiler_stays_quiet_and_stderr_comes_back(capfd: pytest.CaptureFixture[str]):
    demo_measure.peak_bytes(lambda: torch.ones(9), CPU)
    os.write(2, b"heard\n")
    with pytest.raises(ZeroDivisionError):
        demo_measure.peak_bytes(lambda: 1 // 0, CPU)
    os.write(2, b"heard again\n")
    assert capfd.readouterr().err == "heard\nheard again\n"


def test_training_ends_with_its_time(seed: int):
    """One step is always made; the learning rate falls with whichever of steps and time is nearer its end."""
    schedule = Schedule(steps=100, seconds=20.0, learning_rate=1.0)
    assert schedule.progress(50, 2.0) == 0.5
    assert schedule.progress(10, 15.0) == 0.75
    assert schedule.progress(10, 30.0) == 1.0
    models = {OURS: (Transformer(TINY.size), demo.flash_ext_attention)}
    seen: list[float] = []
    curves = demo_measure.train_side_by_side(
        models,
        lambda: some_pack((20, 30)),
        Schedule(steps=50, seconds=1e-6, learning_rate=1e-3),
        lambda progress, _: seen.append(progress),
    )
    assert seen == [1.0]
    assert len(curves[OURS].losses) == len(curves[OURS].seconds) == 1


def test_the_number_of_threads_is_left_as_it_was():
    model = Transformer(TINY.size)
    before = torch.get_num_threads()
    chosen = demo_measure.quickest_thread_count(model, some_pack((20, 30)), demo.flash_ext_attention)
    assert 1 <= chosen <= before == torch.get_num_threads()
    assert all(parameter.grad is None for parameter in model.parameters())


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


def test_the_pictured_weights_are_masked_and_dropped():
    """Rows add up to 1 without dropout; with it a tenth of the visible weights is gone, the rest grows."""
    pack = some_pack((60, 1, 67))
    q, k = torch.randn(pack.total, 4, 16), torch.randn(pack.total, 2, 16)
    slopes = demo_masked.alibi_slopes(4, CPU)
    assert slopes.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    whole, dropped = (demo_masked.weights_of(pack, q, k, slopes, p, seed=3) for p in (0.0, 0.1))
    torch.testing.assert_close(whole.sum(-1), torch.ones(4, pack.total))
    seen = document_mask(pack)
    assert torch.equal(whole > 0, seen.expand_as(whole))
    kept = dropped > 0
    assert 0.87 < (kept.sum() / (whole > 0).sum()).item() < 0.93
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.9, rtol=1e-4, atol=0)


def test_masked_training_is_the_packed_one_with_other_words():
    """Documents in one sequence, with ALiBi, attend as in a packed call; dropout differs by call."""
    pack = some_pack((33, 1, 20, 10))
    q, k, v = (torch.randn(pack.total, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    slopes = demo_masked.alibi_slopes(4, CPU)
    packed = attention_varlen(q, k, v, pack.cu_seqlens, pack.cu_seqlens, causal=True, bias=ALiBi(slopes))
    torch.testing.assert_close(demo_masked.masked_attention_without_dropout(pack)(q, k, v), packed)
    attend = demo_masked.masked_attention(pack)
    assert (attend(q, k, v) - attend(q, k, v)).abs().max() > 1e-3


def test_masked_comparison_finds_other_weights_dropped(monkeypatch: pytest.MonkeyPatch):
    model, pack = Transformer(TINY.size), some_pack((40, 50))
    right = demo_masked.ours
    monkeypatch.setattr(demo_masked, "ours", lambda pack, p, seed=None: right(pack, p, seed and seed + 1))
    distances, _ = demo_masked.compare_with_float64(model, pack, (OURS, MATERIALISED), 7)
    for distance in distances.values():
        assert distance.difference[OURS] > 100 * distance.difference[MATERIALISED]


def test_memory_grows_linearly_unless_materialised(results: Results):
    short, long = (results.attention_memory[n] for n in (512, 1024))
    assert long[OURS] < 2.1 * short[OURS]
    assert long[MATERIALISED] > 3.5 * short[MATERIALISED]
    assert long[MATERIALISED] > 10 * long[OURS]
    assert results.step_memory[OURS] < results.step_memory[MATERIALISED]


def test_accesses_are_those_of_the_ladder(results: Results):
    assert [counted.seqlen for counted in results.accesses] == [64, 128]
    for counted in results.accesses:
        assert counted.standard == io_complexity("standard", counted.seqlen, 16, 2048)
        assert counted.flash == io_complexity("flash1", counted.seqlen, 16, 2048)


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


def test_the_report_carries_the_numbers(results: Results):
    text = demo_report.as_text(results)
    for curve in results.curves.values():
        assert f"{demo_report.last_loss(curve):.4f}" in text
        assert f"{curve.median_seconds * 1e3:.1f}" in text
    for distance in results.distances.values():
        assert f"{distance.difference[OURS]:.2e}" in text
    for distance in results.masked.distances.values():
        assert f"{distance.difference[MATERIALISED]:.2e}" in text
    assert f"{results.masked.held_out:.4f}" in text and "24 of 24 steps" in text
    for size in results.attention_memory[1024].values():
        assert demo_report.mib(size) in text
    for counted in results.accesses:
        assert f"{counted.standard:,}" in text and f"{counted.flash:,}" in text
    assert results.sample.splitlines()[0] in text
    assert text.isascii()


def test_a_short_training_and_missing_memory_are_told(results: Results, tmp_path: Path):
    curves = {name: Curve(curve.losses[:3], curve.seconds[:3]) for name, curve in results.curves.items()}
    memory = {1024: {**results.attention_memory[1024], MATERIALISED: None}}
    cut = demo.replace(results, curves=curves, attention_memory={**results.attention_memory, **memory})
    text = demo_report.as_text(cut)
    assert "ended after 3 of 24 steps" in text
    assert "out of memory" in text
    assert "ended after" not in demo_report.as_text(results)
    if demo_report.draw(cut, tmp_path / "cut.png"):
        assert (tmp_path / "cut.png").stat().st_size > 10_000


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(demo, "CPU", demo.replace(TINY, memory_seqlens=(64, 128), sample=5))
    demo.main(["--device", "cpu", "--steps", "12", *arguments])


def test_the_program_prints_a_report_and_writes_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "demo.png"
    run_main(monkeypatch, "--out", str(path))
    printed = capsys.readouterr().out
    assert f"Picture: {path}" in printed
    headings = ("Loss in nats", "from float64", "Masked model", "Peak memory", "HBM accesses", "Generated")
    for heading in (*headings, "Summary"):
        assert heading in printed
    assert "100%" in printed
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 600


def test_without_matplotlib_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    run_main(monkeypatch, "--out", str(tmp_path / "demo.png"))
    printed = capsys.readouterr().out
    assert "No picture: matplotlib is not installed" in printed
    assert "Summary" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--steps", "--seconds"])
def test_no_training_at_all_is_refused(option: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        demo.main([option, "0"])
    assert f"{option} must be positive, got 0" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("with_rich", [True, False])
def test_progress_on_a_terminal(with_rich: bool, monkeypatch: pytest.MonkeyPatch):
    if with_rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "160")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stdout", Terminal())
    with Progress() as progress:
        progress.stage("Training ...")
        progress.show(0.5, {OURS: Curve([3.25], [0.1])})
    written = sys.stdout.getvalue()
    assert "step 1, loss: flash_ext 3.250" in written
    assert "50%" in written
    assert ("\x1b[" in written) == with_rich
