"""Multi-head latent attention over a cache: keys of one head whose first columns are the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_ext import attention_varlen, serving
from tests.covering import pairs_on_cpu
from tests.graphs import capture
from tests.pages import Cache, check, close, make_cache, packed_queries, recorded, run, truth
from tests.qkv import CPU_AND_HOPPER, ON_HOPPER, only_hopper

on_devices = pytest.mark.parametrize("device", CPU_AND_HOPPER)
D, DV = 576, 512


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(only_hopper(test))


LENGTHS = {"cpu": (200, 64, 0, 130, 5, 1, 129, 70), "cuda": (200, 64, 0, 1000, 5, 1, 129, 2049)}


def latents(lengths: Sequence[int], page_size: int, device: str, dtype: torch.dtype | None = None) -> Cache:
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    cache = make_cache(list(lengths), page_size, 1, D, D, device, dtype)
    return replace(cache, v=cache.k[..., :DV], rows=[(k, k[..., :DV]) for k, _ in cache.rows])


def packed(
    cache: Cache, heads: int, counts: Sequence[int], window: tuple[int, int], backend: str | None = None
) -> None:
    """Queries of each sequence, compared with float64."""
    q, bounds, each = packed_queries(list(counts), heads, D, str(cache.k.device), cache.k.dtype, outside=3)
    out, lse = run(q, bounds, cache, window_size=window, max_seqlen_q=max(counts), backend=backend)
    check(out, lse, bounds, each, cache, window)


@pairs_on_cpu(
    gpu=ON_HOPPER,
    strength=1,
    heads=[1, 3, 16, 64, 71, 128],
    window=[(-1, -1), (-1, 0), (100, 0), (30, 7)],
)
def test_heads_of_every_number(heads: int, window: tuple[int, int], device: str) -> None:
    """Tiles of 64 rows that hold many queries, one, and a part of one."""
    counts = (1, 2, 3, 2, 0, 1, 4, 5) if heads > 16 else (5, 16, 17, 64, 0, 1, 33, 32)
    packed(latents(LENGTHS[device], 64, device), heads, counts, window)


@on_devices
@pytest.mark.parametrize("page_size", [1, 24, 64, 1000])
def test_pages_of_every_size(page_size: int, device: str) -> None:
    packed(latents(LENGTHS[device], page_size, device), 16, (1, 2, 3, 4, 0, 1, 2, 1), (-1, 0))


@on_devices
@pytest.mark.parametrize("count", [1, 2, 4])
def test_as_flash_mla_is_called(count: int, device: str) -> None:
    """An entry a sequence: every head and query, whatever plan it is given."""
    cache = latents((200, 64, 0, 1000), 64, device)
    q = torch.randn(4, count, 16, D, device=device).to(cache.k.dtype)
    plan = serving.get_mla_metadata(cache.lengths, count * 16, 1)
    assert [t.dtype for t in plan] == [torch.int32] * 2 and plan[1].shape == (5,)
    out, lse = serving.flash_mla_with_kvcache(q, cache.k, cache.table, cache.lengths, DV, *plan, causal=True)
    kept = torch.empty_like(out)
    again, _ = serving.flash_mla_with_kvcache(
        q, cache.k, cache.table, cache.lengths, DV, serving.get_mla_metadata()[0], causal=True, out=kept
    )
    assert again is kept and torch.equal(kept, out)
    outs, lses = truth(list(q), cache.rows, (-1, 0))
    close(out, torch.stack(outs), "out")
    close(lse, torch.stack(lses), "lse")
    scaled, _ = serving.flash_mla_with_kvcache(
        q * 2, cache.k, cache.table, cache.lengths, DV, softmax_scale=0.5 * D**-0.5
    )
    outs, _ = truth(list(q), cache.rows, (-1, -1))
    close(scaled, torch.stack(outs), "with a scale")


@on_hopper
def test_more_rows_than_are_divided() -> None:
    """Beside sequences whose latents are in parts."""
    cache = latents((3000, 700, 2500), 64, "cuda")
    for window in ((-1, 0), (40, 0)):
        packed(cache, 128, (9, 1, 40), window)


@on_devices
def test_tensors_as_callers_hold_them(device: str) -> None:
    """q with other strides and off 16 bytes, one page of a larger storage, heads added by unsqueeze."""
    cache = latents((40, 64), 64, device)
    wide = torch.zeros(len(cache.k), 64, D + 64, device=device, dtype=cache.k.dtype)
    wide[..., :D] = cache.k[:, :, 0]
    k, v = wide[..., :D].unsqueeze(-2), wide[..., :DV].unsqueeze(-2)
    bounds = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    numbers = torch.randn(4, 3, D, device=device).to(k.dtype)
    outs, _ = truth([numbers[:1], numbers[1:]], cache.rows, (-1, 0))
    shifted = torch.zeros(4 * 3 * D + 1, device=device, dtype=k.dtype)[1:].view(4, 3, D).copy_(numbers)
    for q in (numbers, numbers.transpose(0, 1).contiguous().transpose(0, 1), shifted):
        out = attention_varlen(q, k, v, bounds, None, causal=True, **cache.places)
        close(out, torch.cat(outs), "out")
    one = cache.table[:1, :1]
    out = attention_varlen(
        numbers[:1], k, v, bounds[:2], None, seqused_k=cache.lengths[:1], block_table=one, causal=True
    )
    close(out, outs[0], "a page")


@on_devices
def test_entries_of_any_length(device: str) -> None:
    """A sequence an entry, 100 latents of room each."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    k = torch.randn(3, 100, 1, D, device=device).to(dtype)
    lengths = torch.tensor([100, 7, 0], dtype=torch.int32, device=device)
    q = torch.randn(6, 16, D, device=device).to(dtype)
    bounds = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=device)
    out = attention_varlen(q, k, k[..., :DV], bounds, None, causal=True, seqused_k=lengths)
    rows = [(k[b, :n, :], k[b, :n, :, :DV]) for b, n in enumerate((100, 7, 0))]
    close(out, torch.cat(truth(list(q.split(2)), rows, (-1, 0))[0]), "out")


@on_devices
@pytest.mark.parametrize("heads", [3, 128])
def test_sinks(heads: int, device: str) -> None:
    """In tiles of many queries, and of one."""
    cache = latents((200, 5), 64, device)
    q, bounds, each = packed_queries([2, 1], heads, D, device, cache.k.dtype)
    sinks = torch.linspace(-1, 2, heads, device=device)
    out, lse = run(q, bounds, cache, causal=True, sinks=sinks)
    check(out, lse, bounds, each, cache, (-1, 0), sinks)


@on_hopper
def test_compiled_and_under_autocast() -> None:
    cache = latents((200, 64, 5), 64, "cuda")
    q = torch.randn(3, 1, 16, D, device="cuda")

    def attend(q: Tensor) -> Tensor:
        return serving.flash_mla_with_kvcache(q, cache.k, cache.table, cache.lengths, DV, causal=True)[0]

    half = attend(q.bfloat16())
    assert torch.equal(torch.compile(attend, fullgraph=True)(q.bfloat16()), half)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(attend(q), half)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        attend(q.bfloat16().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_hopper
def test_keys_in_parts(dtype: torch.dtype) -> None:
    """As many parts as are asked for, and as shapes ask for; results do not depend on where parts begin."""
    cache = latents((20000, 17, 0, 8191, 300), 64, "cuda", dtype)
    for counts in ((1, 1, 1, 1, 1), (2, 4, 0, 3, 8)):
        for backend in (None, "sm90 kv_splits=1", "sm90 kv_splits=3", "sm90 kv_splits=40"):
            packed(cache, 16, counts, (-1, 0), backend)
            packed(cache, 128, counts, (-1, -1), backend)


@on_hopper
def test_the_kernel_that_runs_and_its_bits() -> None:
    """Repeated, and in the batch-invariant mode beside other sequences, the same bits."""
    cache = latents((5000, 77, 1300, 64), 64, "cuda")
    q = torch.randn(4, 2, 64, D, device="cuda", dtype=torch.bfloat16)

    def attend(*rows: int) -> tuple[Tensor, Tensor]:
        picked = list(rows)
        return serving.flash_mla_with_kvcache(
            q[picked], cache.k, cache.table[picked], cache.lengths[picked], DV, causal=True
        )

    with recorded() as last_launch:
        first = attend(0, 1, 2, 3)
        kernels = [one["kernel"] for one in last_launch()["launches"]]
    assert kernels == ["fwd_latent_sm90_hd576_v512", "fwd_merge_cached_sm80_hd256"]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(attend(0, 1, 2, 3), first, strict=True))
    with serving.set_batch_invariant(True):
        whole = attend(0, 1, 2, 3)
        for b in range(4):
            assert all(torch.equal(a[0], x[b]) for a, x in zip(attend(b), whole, strict=True))


@on_hopper
def test_scores_that_jump() -> None:
    """Scores that jump by hundreds from page to page, beside NaN in slots that no length covers."""
    cache = latents((700, 3), 64, "cuda")
    cache.k[..., DV] = torch.randperm(cache.k.shape[0], device="cuda").view(-1, 1, 1) * 40.0
    cache.rows = []
    for table, length in zip(cache.table.long(), (700, 3), strict=True):
        position = torch.arange(length, device="cuda")
        k = cache.k[table[position // 64], position % 64]
        cache.rows.append((k, k[..., :DV]))
    packed(cache, 64, (2, 1), (-1, -1))


@on_hopper
def test_a_graph_follows_lengths_and_tables() -> None:
    cache = latents((500, 64, 900), 64, "cuda")
    q = torch.randn(3, 1, 128, D, device="cuda", dtype=torch.bfloat16)
    lengths, table = cache.lengths.clone(), cache.table.clone()

    def attend() -> Tensor:
        return serving.flash_mla_with_kvcache(q, cache.k, table, lengths, DV)[0]

    graph, out = capture(attend)
    lengths.copy_(torch.tensor([3, 0, 400]))
    table[2] = cache.table[0]
    graph.replay()
    assert torch.equal(out, attend())
    assert out[1].count_nonzero() == 0


def test_what_is_refused() -> None:
    cache = latents((70, 3), 64, "cpu")
    q = torch.randn(2, 1, 4, D)
    call = dict(q=q, k_cache=cache.k, block_table=cache.table, cache_seqlens=cache.lengths, head_dim_v=DV)
    with pytest.raises(NotImplementedError, match="indices is not served"):
        serving.flash_mla_with_kvcache(**call, indices=cache.table)
    with pytest.raises(NotImplementedError, match="is_fp8_kvcache is not served"):
        serving.get_mla_metadata(cache.lengths, 4, 1, is_fp8_kvcache=True)
    serving.flash_mla_with_kvcache(**call, is_fp8_kvcache=False, indices=None)
    for name, value, said in (
        ("head_dim_v", 577, "from 1 to head_dim 576"),
        ("head_dim_v", 0, "from 1 to head_dim 576"),
        ("k_cache", cache.k[:, :, 0], r"\(num_pages, page_size, 1, head_dim\)"),
        ("k_cache", cache.k.expand(-1, -1, 2, -1), r"\(num_pages, page_size, 1, head_dim\)"),
        ("q", q[..., :575], "head_dim of q"),
        ("cache_seqlens", cache.lengths[:1], "seqused_k must have shape"),
        ("out", torch.empty(2, 1, 4, D), r"out must have shape \(2, 1, 4, 512\)"),
        ("out", torch.empty(2, 1, 4, DV).double(), "in torch.float32 on cpu, got .* torch.float64"),
    ):
        with pytest.raises(ValueError, match=said):
            serving.flash_mla_with_kvcache(**call | {name: value})


@on_hopper
def test_what_a_gpu_refuses() -> None:
    cache = latents((70, 3), 64, "cuda")
    q = torch.randn(2, 1, 4, D, device="cuda", dtype=torch.bfloat16)
    call = dict(cu_seqlens_q=torch.tensor([0, 1, 2], device="cuda", dtype=torch.int32), cu_seqlens_k=None)
    flat = q.flatten(0, 1)
    with pytest.raises(NotImplementedError, match="the same memory"):
        attention_varlen(flat, cache.k, cache.v.contiguous(), **call, **cache.places)
    with pytest.raises(NotImplementedError, match="no softcap, no biases"):
        attention_varlen(flat, cache.k, cache.v, **call, **cache.places, softcap=20.0)
    with pytest.raises(NotImplementedError, match="head_dim of v must be at most 256"):
        attention_varlen(flat[..., :256], cache.k[..., :256], cache.k[..., :300], **call, **cache.places)
