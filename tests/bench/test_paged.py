"""``bench.paged``: its rows, what they call, and how peers are called beside ours."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench import paged, paged_peers
from bench.paged_peers import Peers
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


# ---- keys and values apart: peers, appended keys, trees ----------------------------------------------------

SMALL = paged.Row("small", (300, 300), heads=4, heads_k=2, head_dim=32)


def formula(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> list[Tensor]:
    """Of each sequence: q (batch, queries, heads, size), k and v with more keys than it has."""
    group = q.shape[2] // k.shape[2]
    outs = []
    for own, keys, values, n in zip(q.double(), k.double(), v.double(), lengths, strict=True):
        keys, values = (x[:n].repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", own, keys) * q.shape[-1] ** -0.5
        hidden = torch.ones(len(own), n, dtype=torch.bool).triu(1 + n - len(own)) & causal
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return outs


class FlashAttention3:
    """vLLM's forward by the formula: what it was given, and something added to its output."""

    def __init__(self, added: float = 0.0) -> None:
        self.added, self.given = added, []

    def __call__(self, **given: object) -> Callable[..., Tensor]:
        return functools.partial(self.attend, **given)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, seqused_k: Tensor, cu_seqlens_q: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, is_causal: bool, num_splits: int,
    ) -> Tensor:  # fmt: skip
        lengths = seqused_k.tolist()
        assert max_seqlen_k == max(lengths) and softmax_scale == q.shape[-1] ** -0.5
        assert cu_seqlens_q.tolist() == [i * max_seqlen_q for i in range(len(lengths) + 1)]
        assert is_causal == (max_seqlen_q > 1) and num_splits == (0 if max_seqlen_q <= 16 else 1)
        self.given.append(k.shape[1])
        gathered = [x[page_table.long()].flatten(1, 2) for x in (k, v)]
        outs = formula(q.unflatten(0, (-1, max_seqlen_q)), *gathered, lengths, is_causal)
        return torch.cat(outs).to(q.dtype) + self.added


@pytest.mark.parametrize("queries", [1, 4, 20])
def test_flash_attention_3_over_pages(queries: int):
    for lengths in ((300, 300), (300, 40)):
        row = dataclasses.replace(SMALL, lengths=lengths, queries=queries)
        fa3 = FlashAttention3()
        found = paged.calls(row, "cpu", peers=Peers(fa3=fa3))
        names = [name for name in found if name.startswith("FA3")]
        assert names == ["FA3 page 16", "FA3 page 64", "FA3 page 256"]
        for name in names:
            assert paged.difference(found, name) < 1e-3
        assert fa3.given == [16, 64, 256]


def test_the_library_of_vllm_is_called_by_the_names_it_has(monkeypatch: pytest.MonkeyPatch):
    paths, library = [], torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    library.define(
        "fwd(Tensor q, Tensor? page_table, float softcap, int num_splits, int sm_margin) -> Tensor[]"
    )
    library.impl("fwd", lambda q, table, cap, splits, margin: [q + splits, q + cap + margin], "CPU")
    try:
        call = paged.fa3_of_vllm("a library")(num_splits=3, another=None)
        assert call(q=torch.zeros(1)).item() == 3 and paths == ["a library"]
    finally:
        library._destroy()


def test_cudnn_takes_one_new_token_of_one_length(monkeypatch: pytest.MonkeyPatch):
    used = []
    monkeypatch.setattr(
        paged_peers, "sdpa_kernel", lambda kind: used.append(kind) or contextlib.nullcontext()
    )
    found = paged.calls(SMALL, "cpu", peers=Peers(cudnn=True))
    assert paged.difference(found, "cuDNN") < 1e-3 and used == [SDPBackend.CUDNN_ATTENTION]
    for row in (dataclasses.replace(SMALL, queries=2), dataclasses.replace(SMALL, lengths=(300, 20))):
        assert "cuDNN" not in paged.calls(row, "cpu", peers=Peers(cudnn=True))
    assert not {"cuDNN", "FA3 page 16"} & set(paged.calls(SMALL, "cpu"))


@pytest.mark.parametrize("queries", [1, 3])
def test_keys_that_are_appended(queries: int):
    """By one call and by several: the same cache, the same result, and again the same."""
    row = dataclasses.replace(SMALL, lengths=(300, 70), queries=queries, appends=True)
    fa3 = FlashAttention3()
    found = paged.append_calls(row, "cpu", Peers(fa3=fa3))
    assert list(found) == ["one call", "separate", "FA3 separate"]
    first = found["one call"]()
    assert first.shape == (2, queries, 4, 32)
    for peer in ("separate", "FA3 separate"):
        assert paged.difference(found, peer) < 1e-2
    assert torch.equal(found["one call"](), first) and fa3.given == [64]
    assert list(paged.append_calls(row, "cpu")) == ["one call", "separate"]


def test_halves_are_turned_by_the_angles_of_positions():
    x, angles = torch.randn(2, 3, 4, 8, dtype=torch.float64).float(), torch.rand(10, 4) * 6
    positions = torch.tensor([[2, 3, 9], [0, 1, 2]])
    q, k = paged.both_turned(x, x[:, :, :1], angles.cos(), angles.sin(), positions)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.exp(1j * angles.double())[positions][:, :, None]
    wanted = torch.cat([turned.real, turned.imag], -1).float()
    assert torch.allclose(q, wanted, atol=1e-5) and torch.allclose(k, wanted[:, :, :1], atol=1e-5)


def test_rows_of_trees_appended_keys_and_many_key_heads():
    rows = {row.name: row for row in paged.ROWS}
    for tokens in (8, 16, 32, 64):
        assert all(rows[f"{tokens}-new-b{batch}-k8192"].queries == tokens for batch in (1, 16))
    assert all(rows[f"append-b{batch}-k8192"].appends for batch in (1, 4, 16))
    for keys in (8192, 32768):
        row = rows[f"mha-32-b16-k{keys}"]
        assert (row.heads, row.heads_k, row.lengths) == (32, 32, (keys,) * 16)


def test_a_tree_is_timed_beside_a_chain():
    row = dataclasses.replace(SMALL, queries=8)
    found = paged.calls(row, "cpu")
    tree, chain = found["tree"](), found["page 64"]()
    assert torch.equal(tree[:, 0], chain[:, 0]) and not torch.allclose(tree[:, 4:], chain[:, 4:])
    shown = paged.tree_of(row, "cpu").to_dense(8, 8)[0, 0]
    assert shown.sum(1).tolist() == [1, 2, 2, 3, 3, 3, 3, 4]
    assert "tree" not in paged.calls(SMALL, "cpu")


def test_caches_of_8_bits_with_factors_of_heads():
    found = paged.calls(SMALL, "cpu")
    exact = found["page 64"]()
    for name in ("e4m3", "int8", "int8 of heads"):
        error = (found[name]().view_as(exact) - exact).float().norm() / exact.float().norm()
        assert 1e-4 < error < 0.1, name


@pytest.mark.parametrize("added", [0.0, 0.1])
def test_peers_that_differ_have_no_times(
    added: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    append = dataclasses.replace(SMALL, name="append", appends=True)
    monkeypatch.setattr(paged, "ROWS", [SMALL, append])
    monkeypatch.setattr(paged, "fa3_of_vllm", lambda path: FlashAttention3(added))
    tried = ["--device", "cpu", "--rounds", "1", "--budget", "0", "--vllm-fa3-lib", "a.so", "--cudnn"]
    if added:
        with pytest.raises(SystemExit, match="FA3 page 256: small, FA3 separate: append"):
            paged.main(tried)
        return
    lines = paged.main(tried)
    names = {(line["row"], line["name"]) for line in lines}
    assert {("small", "FA3 page 64"), ("small", "int8 of heads"), ("append", "FA3 separate")} <= names
    assert all(line["difference"] < 1e-2 for line in lines)
    assert "cuDNN" in capsys.readouterr().out  # which a CPU has not: told, and the others stay
