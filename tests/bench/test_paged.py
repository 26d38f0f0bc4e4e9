"""``bench.paged``: its rows of latents, and how FlashMLA is called beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import paged
from flash_ext import serving

NAMES = """mla-b1-h16 mla-b1-h128 mla-b16-h16 mla-b16-h128 mla-b64-h64 mla-b128-h16 mla-b128-h32 mla-b128-h64
mla-b128-h128 mla-b128-h128-2-new""".split()
ONE = paged.Row("mla-small", (192, 100), 2, 16, 1, paged.LATENT, paged.LATENT_VALUE)
TRIED = ["--device", "cpu", "--rows", "mla-small", "--rounds", "1", "--budget", "0"]


class Peer:
    """FlashMLA's operator by the function of ours, with something added to its output."""

    def __init__(self, added: float = 0.0) -> None:
        self.added, self.plans = added, []

    def __call__(
        self, q: Tensor, pool: Tensor, head_dim_v: int, lengths: Tensor, table: Tensor, scale: float,
        causal: bool, metadata: Tensor | None, splits: Tensor | None, extra: None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.plans.append((metadata, splits))
        out, lse = serving.flash_mla_with_kvcache(
            q, pool, table, lengths, head_dim_v, softmax_scale=scale, causal=causal
        )
        return out + self.added, lse, torch.tensor([len(self.plans)]), torch.tensor([-len(self.plans)])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "ROWS", [ONE])


def give_peer(monkeypatch: pytest.MonkeyPatch, peer: object) -> list[str]:
    """Stands in for the library; returns the paths that are loaded."""
    paths: list[str] = []
    monkeypatch.setattr(paged, "flash_mla", lambda path: paths.append(path) or peer)
    return paths


def test_rows_of_latents():
    rows = {row.name: row for row in paged.ROWS}
    assert len(rows) == len(paged.ROWS)
    assert [name for name in rows if name.startswith("mla-")] == NAMES
    for name in NAMES:
        _, batch, heads, *new = name.split("-")
        row, count = rows[name], int(batch[1:])
        assert row.lengths == (8192 if count <= 16 else 4096,) * count
        assert (row.heads, row.queries) == (int(heads[1:]), int(new[0]) if new else 1)
        assert (row.heads_k, row.head_dim, row.head_dim_v) == (1, 576, 512)
    assert {row.name for row in paged.ROWS if row.head_dim_v} == set(NAMES)


def test_bytes_and_operations():
    assert ONE.bytes == 292 * 576 * 2
    assert ONE.operations == 2 * 16 * (192 + 191 + 100 + 99) * (576 + 512)
    apart = paged.Row("apart", (10, 20), 3, heads=4, heads_k=2, head_dim=8)
    assert apart.bytes == 2 * 30 * 2 * 8 * 2
    assert apart.operations == 4 * 4 * 8 * (10 + 9 + 8 + 20 + 19 + 18)
    assert all(row.queries <= min(row.lengths) for row in paged.ROWS)


def test_calls_with_masks_and_biases():
    """Each does something else than the call as it is, but sinks of 0 in a small part."""
    row = paged.Row("small", (40, 23), 3, heads=4, heads_k=2, head_dim=32)
    found = paged.calls(row, "cpu", modified=True)
    names = ["plain", "sinks", "softcap", "ALiBi", "KeyMask", "Dense", "Documents", "DenseBias", "tree"]
    assert list(found) == names + [f"e4m3 {name}" for name in names]
    results = {name: call() for name, call in found.items()}
    for name, out in results.items():
        kind = "e4m3 " if name.startswith("e4m3") else ""
        assert out.isfinite().all()
        assert torch.equal(out, results[kind + "plain"]) == name.endswith("plain")
    assert (results["e4m3 KeyMask"] - results["KeyMask"]).norm() < 0.1 * results["KeyMask"].norm()


def test_options():
    given = paged.make_parser().parse_args([])
    assert given.flashmla_lib == ""
    assert paged.make_parser().parse_args(["--flashmla-lib", "a.so"]).flashmla_lib == "a.so"


@pytest.mark.parametrize("queries", [1, 2])
def test_latents_against_the_formula(queries: int):
    row = paged.Row("row", (192, 100), queries, 16, 1, paged.LATENT, paged.LATENT_VALUE)
    seen = []

    def formula(q, pool, head_dim_v, lengths, table, scale, causal, *plan):
        seen.append(table.flatten().tolist())
        outs = []
        for b, n in enumerate(lengths.tolist()):
            keys = pool[table[b].long()].flatten(0, 2)[:n].double()
            scores = scale * torch.einsum("qhd,kd->hqk", q[b].double(), keys)
            hidden = torch.ones(queries, n, dtype=torch.bool).triu(1 + n - queries)
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
            outs.append(torch.einsum("hqk,kd->qhd", weights, keys[:, :head_dim_v]))
            assert causal == (queries > 1)
        return torch.stack(outs), None, 1, 2

    assert paged.difference(paged.latent_calls(row, "cpu", formula)) < paged.LARGEST_DIFFERENCE
    assert sorted(seen[0]) == list(range(6))  # each page belongs to one sequence


def test_the_plan_of_the_first_call_is_used_again():
    peer = Peer()
    call = paged.latent_calls(ONE, "cpu", peer)[paged.PEER]
    for _ in range(3):
        call()
    assert peer.plans == [(None, None), (1, -1), (1, -1)]


def test_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch):
    paths = []
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    library = torch.library.Library("_flashmla_C", "FRAGMENT")
    library.define("dense_decode_fwd(Tensor q) -> Tensor")
    library.impl("dense_decode_fwd", lambda q: q + 1, "CPU")
    try:
        assert paged.flash_mla("a library")(torch.zeros(1)).item() == 1
        assert paths == ["a library"]
    finally:
        library._destroy()


def test_without_a_library_ours_alone_is_timed(small: None, tmp_path: Path):
    file = tmp_path / "paged.json"
    line, of_one = paged.main([*TRIED, "--json", str(file)])
    assert json.loads(file.read_text()) == [line, of_one] and of_one["name"] == "page 1"
    assert (line["row"], line["name"], line["host_us"]) == ("mla-small", paged.OURS, None)
    assert line["tb_s"] == pytest.approx(ONE.bytes / line["us"] / 1e6)
    assert line["tflop_s"] == pytest.approx(ONE.operations / line["us"] / 1e6)


def test_both_are_timed_where_they_agree(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    paths = give_peer(monkeypatch, Peer(1e-3))
    lines = paged.main([*TRIED, "--flashmla-lib", "a.so"])
    assert paths == ["a.so"] and [line["name"] for line in lines] == [paged.OURS, "page 1", paged.PEER]
    assert all(0 < line["difference"] < 1e-2 for line in lines)
    assert capsys.readouterr().out.count("differ by") == 1


@pytest.mark.parametrize("added", [0.1, float("nan")])
def test_other_results_have_no_times(
    added: float, small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    give_peer(monkeypatch, Peer(added))
    file = tmp_path / "paged.json"
    with pytest.raises(SystemExit, match="FlashMLA: mla-small"):
        paged.main([*TRIED, "--flashmla-lib", "a.so", "--json", str(file)])
    assert json.loads(file.read_text()) == []


def test_a_peer_that_throws_leaves_ours(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def refuse(*arguments: object) -> tuple[Tensor, ...]:
        raise RuntimeError("not these heads")

    give_peer(monkeypatch, refuse)
    lines = paged.main([*TRIED, "--flashmla-lib", "a.so"])
    assert [line["name"] for line in lines] == [paged.OURS, "page 1"]
    assert "not these heads" in capsys.readouterr().out
