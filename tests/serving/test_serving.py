"""flash_ext.serving: the calls of serving engines, and a simulated server against float64."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import _owners, serving
from flash_ext.compat import flash_attn as fa
from tests.pages import Cache, check, close, make_cache, packed_queries, recorded, truth
from tests.qkv import dtype_on, on_devices

# As vLLM 0.33 and SGLang 0.4.10 declare them.
VLLM = (
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p softmax_scale causal "
    "window_size softcap alibi_slopes deterministic return_attn_probs block_table return_softmax_lse out "
    "scheduler_metadata q_descale k_descale v_descale num_splits output_scale fa_version s_aux cp_world_size "
    "cp_rank cp_tot_seqused_k mask_mod block_sparse_tensors aux_tensors dynamic_causal gather_kv_indices "
    "gather_kv_valid_length"
)
SGLANG = (
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
    "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale "
    "causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa "
    "only_qv sm_margin return_softmax_lse sinks score_mod aux_tensors ver out"
)


def test_signatures_are_those_of_the_engines() -> None:
    others = {
        "dropout_p": 0.0, "causal": False, "softcap": 0.0, "deterministic": False, "return_attn_probs": False,
        "return_softmax_lse": False, "num_splits": 0, "fa_version": 2, "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    check_signature(serving.flash_attn_varlen_func, VLLM, VLLM.split()[:6], others)
    others = {
        "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 0,
        "rotary_interleaved": True, "only_qv": False, "sm_margin": 0, "return_softmax_lse": False, "ver": 3,
    }  # fmt: skip
    check_signature(
        serving.flash_attn_with_kvcache, SGLANG + " mask alibi_slopes", SGLANG.split()[:3], others
    )


def check_signature(function: Any, names: str, needed: list[str], others: dict[str, Any]) -> None:
    """All names in order; what is neither needed nor among ``others`` defaults to None. Then any others."""
    found = dict(inspect.signature(function).parameters)
    assert found.popitem()[1].kind is inspect.Parameter.VAR_KEYWORD
    assert list(found) == names.split()
    wanted = dict.fromkeys(names.split()) | dict.fromkeys(needed, inspect.Parameter.empty) | others
    assert {name: p.default for name, p in found.items()} == wanted


@on_devices
def test_a_step_as_vllm_makes_it(device: str) -> None:
    """Interleaved K and V, pages with heads outside, one scale for all, a plan, an out that is a view."""
    lengths, counts = [65, 1, 200, 33], [1, 1, 40, 3]
    cache = make_cache(lengths, 16, 2, 64, device=device, dtype=dtype_on(device), layout="heads first")
    q, bounds, each = packed_queries(counts, 8, 64, device, dtype_on(device))
    plan = serving.get_scheduler_metadata(
        batch_size=4, max_seqlen_q=40, max_seqlen_k=200, num_heads_q=8, num_heads_kv=2, headdim=64,
        cache_seqlens=cache.lengths, qkv_dtype=q.dtype, cu_seqlens_q=bounds, page_size=16, causal=True,
        window_size=(-1, -1), num_splits=0,
    )  # fmt: skip
    assert plan.dtype == torch.int32 and plan.shape == (17,) and plan.device == q.device
    scale = torch.ones((), device=device).expand(4, 2)
    whole = torch.zeros(60, 8, 64, device=device, dtype=q.dtype)
    for splits in (0, 1, 32):
        out, lse = serving.flash_attn_varlen_func(
            q=q, k=cache.k, v=cache.v, out=whole[:45], cu_seqlens_q=bounds, max_seqlen_q=40,
            seqused_k=cache.lengths, max_seqlen_k=200, softmax_scale=0.125, causal=True, alibi_slopes=None,
            window_size=[-1, -1], block_table=cache.table, softcap=0, scheduler_metadata=plan, fa_version=3,
            q_descale=scale, k_descale=scale, v_descale=scale, num_splits=splits, s_aux=None,
            return_softmax_lse=True,
        )  # fmt: skip
        assert out.data_ptr() == whole.data_ptr()
        check(out, lse, bounds, each, cache, (-1, 0))
    assert not whole[45:].any()


@on_devices
def test_without_a_cache_everything_is_served(device: str) -> None:
    q, bounds, each = packed_queries([5, 9], 4, 64, device, dtype_on(device))
    k, v = (torch.randn(14, 2, 64, device=device).to(q.dtype) for _ in "kv")
    sinks, slopes = torch.randn(4, device=device), torch.rand(4, device=device)
    got = serving.flash_attn_varlen_func(
        q, k, v, 9, bounds, 9, bounds, causal=True, softcap=5.0, alibi_slopes=slopes, s_aux=sinks
    )
    want = flash_ext.attention_varlen(
        q, k, v, bounds, bounds, causal=True, softcap=5.0, bias=flash_ext.masks.ALiBi(slopes), sinks=sinks
    )
    assert isinstance(got, Tensor) and torch.equal(got, want)


@on_devices
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_as_sglang_makes_it(packed: bool, device: str) -> None:
    lengths = [70, 4, 129]
    cache = make_cache(lengths, 1, 1, 128, device=device, dtype=dtype_on(device))
    q, bounds, each = packed_queries([2, 2, 2], 8, 128, device, dtype_on(device))
    asked: dict[str, Any] = {"cu_seqlens_q": bounds, "max_seqlen_q": 2} if packed else {}
    out, lse = serving.flash_attn_with_kvcache(
        q if packed else q.view(3, 2, 8, 128), cache.k, cache.v, page_table=cache.table,
        cache_seqlens=cache.lengths, causal=True, return_softmax_lse=True, ver=3, **asked,
    )  # fmt: skip
    if not packed:
        assert out.shape == (3, 2, 8, 128) and lse.shape == (3, 8, 2)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    check(out, lse, bounds, each, cache, (-1, 0))


@on_devices
def test_entries_of_a_dense_cache(device: str) -> None:
    k, v = torch.randn(2, 5, 30, 2, 64, device=device).to(dtype_on(device))
    q = torch.randn(3, 1, 4, 64, device=device).to(k.dtype)
    entries = torch.tensor([4, 0, 4], dtype=torch.int32, device=device)
    lengths = torch.tensor([30, 3, 11], dtype=torch.int32, device=device)
    got = serving.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_batch_idx=entries)
    rows = [(k[e, :n], v[e, :n]) for e, n in zip(entries.tolist(), lengths.tolist())]
    close(got, torch.stack(truth(list(q), rows)[0]))
    whole = serving.flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    close(whole, torch.stack(truth(list(q), [(k[b, :7], v[b, :7]) for b in range(3)])[0]))
    whole = serving.flash_attn_with_kvcache(q, k, v, cache_batch_idx=entries)
    close(whole, torch.stack(truth(list(q), [(k[e], v[e]) for e in entries.tolist()])[0]))


def test_what_is_not_served_is_refused_by_name() -> None:
    cache = make_cache([9], 4)
    q, bounds, _ = packed_queries([1], 2, 64, "cpu", torch.float32)
    call = (q, cache.k, cache.v, 1, bounds, 9)
    one = torch.ones(1)
    refused = {
        "q_v": q, "dropout_p": 0.1, "return_attn_probs": True, "output_scale": one, "cp_world_size": 2,
        "cp_rank": 1, "cp_tot_seqused_k": one, "mask_mod": print, "block_sparse_tensors": one,
        "aux_tensors": [one], "dynamic_causal": one, "gather_kv_indices": one, "gather_kv_valid_length": one,
    }  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"^{name} is not served over a cache"):
            serving.flash_attn_varlen_func(
                *call, seqused_k=cache.lengths, block_table=cache.table, **{name: value}
            )
    q = q[None]
    refused = {
        "qv": q, "cu_seqlens_k_new": one, "rotary_seqlens": one, "attention_chunk": 4, "only_qv": True,
        "score_mod": print, "aux_tensors": [one], "sm_margin": 8,
    }  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"^{name} is not served over a cache"):
            serving.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=9, **{name: value})
    with pytest.raises(ValueError, match="page_table and cache_batch_idx must not be given together"):
        serving.flash_attn_with_kvcache(
            q, cache.k, cache.v, page_table=cache.table, cache_batch_idx=cache.lengths, cache_seqlens=9
        )
    with pytest.raises(ValueError, match="k, v and cache_seqlens must be given together"):
        serving.flash_attn_with_kvcache(q, cache.k, cache.v, k=q, cache_seqlens=9)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin must be given together"):
        serving.flash_attn_with_kvcache(q, cache.k, cache.v, q, q, rotary_cos=one[None], cache_seqlens=1)


def test_arguments_of_other_versions_are_taken_at_their_defaults_alone() -> None:
    cache = make_cache([9], 4)
    q, bounds, _ = packed_queries([1], 2, 64, "cpu", torch.float32)
    plan: dict[str, Any] = {
        "batch_size": 1, "max_seqlen_q": 1, "max_seqlen_k": 9, "num_heads_q": 2, "num_heads_kv": 2,
        "headdim": 64, "cache_seqlens": cache.lengths,
    }  # fmt: skip
    packed: dict[str, Any] = {
        "q": q, "k": cache.k, "v": cache.v, "max_seqlen_q": 1, "cu_seqlens_q": bounds, "max_seqlen_k": 9,
        "seqused_k": cache.lengths, "block_table": cache.table,
    }  # fmt: skip
    entry: dict[str, Any] = {"q": q[None], "k_cache": cache.k, "v_cache": cache.v, "cache_seqlens": 3}
    for function, call in (
        (serving.flash_attn_varlen_func, packed),
        (serving.flash_attn_with_kvcache, entry),
        (serving.get_scheduler_metadata, plan),
    ):
        function(**call, something_new=None, another=False)
        for value in (0, 1, 0.5, torch.ones(2)):
            with pytest.raises(NotImplementedError, match="^something_new is not known here, got "):
                function(**call, something_new=value)
    padded = serving.get_scheduler_metadata(**plan, cache_leftpad=cache.lengths)
    assert torch.equal(padded, serving.get_scheduler_metadata(**plan))
    for name, value in {"sm_margin": 4, "cu_seqlens_k_new": bounds}.items():
        with pytest.raises(NotImplementedError, match=f"^{name} is not served over a cache"):
            serving.get_scheduler_metadata(**plan, **{name: value})


def test_scales_and_numbers_of_parts_are_looked_at() -> None:
    cache = make_cache([9, 4], 4)
    q, bounds, _ = packed_queries([1, 2], 4, 64, "cpu", torch.float32)
    call = (q, cache.k, cache.v, 2, bounds, 9)
    places: dict[str, Any] = {"seqused_k": cache.lengths, "block_table": cache.table}
    for name in ("q_descale", "k_descale", "v_descale"):
        for scale, error, words in (
            (torch.full((2, 2), 0.5), NotImplementedError, "must hold ones"),
            (torch.tensor([[1.0, torch.nan]]).expand(2, 2), NotImplementedError, "must hold ones"),
            (torch.ones(2), ValueError, r"must have shape \(batch, h_k\) = \(2, 2\), got \(2,\)"),
            (torch.ones(2, 2, dtype=torch.float64), TypeError, "must be a torch.float32 tensor"),
            (1.0, TypeError, "must be a torch.float32 tensor, got float"),
        ):
            with pytest.raises(error, match=f"^{name} {words}"):
                serving.flash_attn_varlen_func(*call, **places, **{name: scale})
    with pytest.raises(NotImplementedError, match="^k_descale must hold ones"):
        serving.flash_attn_with_kvcache(
            q[:2, None], cache.k, cache.v, cache_seqlens=3, k_descale=torch.zeros(2, 2)
        )
    for number, error in ((-1, ValueError), (257, ValueError), (1.5, TypeError), (None, TypeError)):
        with pytest.raises(error, match="^num_splits must be"):
            serving.flash_attn_varlen_func(*call, **places, num_splits=number)
    with pytest.raises(ValueError, match="block_table and cu_seqlens_k must not be given together"):
        serving.flash_attn_varlen_func(*call, bounds, **places)
    with pytest.raises(
        ValueError, match=r"out must have the elements of \(3, 4, 64\), got shape \(2, 4, 64\)"
    ):
        serving.flash_attn_varlen_func(*call, **places, out=torch.empty(2, 4, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2, 5, 256])
def test_gpu_a_number_of_parts_is_taken(number: int, planned: bool) -> None:
    cache = make_cache([20000, 9000], 16, 1, 64, device="cuda", dtype=torch.bfloat16)
    q, bounds, each = packed_queries([1, 2], 4, 64, "cuda", torch.bfloat16)
    plan = torch.zeros(17, dtype=torch.int32, device="cuda") if planned else None
    found = []
    with recorded() as last_launch:
        for asked in (number, 0):
            out, lse = serving.flash_attn_varlen_func(
                q, cache.k, cache.v, 2, bounds, 20000, seqused_k=cache.lengths, block_table=cache.table,
                causal=True, num_splits=asked, scheduler_metadata=plan, return_softmax_lse=True,
            )  # fmt: skip
            check(out, lse, bounds, each, cache, (-1, 0))
            found.append(last_launch()["splits"])
    assert found[1] > 5
    assert found[0] == (found[1] if number == 0 or (planned and number > 1) else number)


@on_devices
@pytest.mark.parametrize("counts", [[1] * 6, [1, 3, 0, 40, 1, 2]], ids=str)
def test_a_shared_prefix_is_read_for_all(counts: list[int], device: str) -> None:
    like = {"device": device, "dtype": dtype_on(device)}
    for page_size, prefix, causal in ((16, 300, True), (1, 40, True), (8, 0, True), (16, 129, False)):
        lengths = [n + random.randint(0, 50) for n in counts]
        cache = make_cache([prefix, *lengths], page_size, 2, 64, None, **like)
        q, bounds, each = packed_queries(counts, 8, 64, **like, outside=2)
        for sinks in (None, torch.randn(8, device=device)):
            out, lse = serving.attention_shared_prefix(
                q, cache.k, cache.v, bounds, shared_block_table=cache.table[0], shared_prefix_len=prefix,
                block_table=cache.table[1:], seqused_k=cache.lengths[1:], max_seqlen_q=40, causal=causal,
                sinks=sinks,
            )  # fmt: skip
            rows = [tuple(torch.cat(both) for both in zip(cache.rows[0], own)) for own in cache.rows[1:]]
            whole = Cache(cache.k, cache.v, cache.table, cache.lengths, rows)
            check(out, lse, bounds, each, whole, (-1, 0 if causal else -1), sinks)
    on_device = torch.tensor([129], dtype=torch.int32, device=device)
    again, _ = serving.attention_shared_prefix(
        q, cache.k, cache.v, bounds, shared_block_table=cache.table[0], shared_prefix_len=on_device,
        block_table=cache.table[1:], seqused_k=cache.lengths[1:], causal=False, sinks=sinks,
    )  # fmt: skip
    close(again, out.double())


def test_what_a_shared_prefix_refuses() -> None:
    cache = make_cache([20, 3, 4], 4)
    q, bounds, _ = packed_queries([1, 2], 4, 64, "cpu", torch.float32)

    def call(q: Tensor = q, bounds: Tensor = bounds, **options: Any) -> None:
        given = {"shared_block_table": cache.table[0], "shared_prefix_len": 20,
                 "block_table": cache.table[1:], "seqused_k": cache.lengths[1:]} | options  # fmt: skip
        serving.attention_shared_prefix(q, cache.k, cache.v, bounds, **given)

    call()
    with serving.set_batch_invariant(True), pytest.raises(NotImplementedError, match="batch-invariant mode"):
        call()
    with pytest.raises(ValueError, match=r"shared_block_table must be a tensor of shape \(pages,\)"):
        call(shared_block_table=cache.table)
    with pytest.raises(ValueError, match="a key behind the prefix for each query, which sequence 1 has not"):
        call(seqused_k=torch.tensor([1, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="at least one sequence"):
        call(bounds=bounds[:1])
    with pytest.raises(NotImplementedError, match="has no gradient"):
        call(q=q.clone().requires_grad_())
    with pytest.raises(ValueError, match="must not exceed the room of a sequence, got 100"):
        call(shared_prefix_len=100)


@on_devices
def test_an_entry_that_is_not_there_has_no_keys(device: str) -> None:
    k, v = torch.randn(2, 2, 9, 2, 64, device=device).to(dtype_on(device))
    q, new = (torch.randn(3, 1, h, 64, device=device).to(k.dtype) for h in (4, 2))
    entries = torch.tensor([-1, 1, 2], dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 5, 4], dtype=torch.int32, device=device)
    before = k.clone()
    for given in ((), (new, new)):
        out, lse = serving.flash_attn_with_kvcache(
            q, k, v, *given, cache_seqlens=lengths, cache_batch_idx=entries, return_softmax_lse=True
        )
        assert not out[[0, 2]].any() and (lse[[0, 2]] == -torch.inf).all() and out[1].any()
    before[1, 5] = new[1, 0]
    assert torch.equal(k, before)


@on_devices
def test_what_would_be_wrong_without_a_word_is_refused(device: str) -> None:
    like = {"device": device, "dtype": dtype_on(device)}
    cache, q, new = (torch.randn(2, n, 2, 64, **like) for n in (9, 1, 1))
    call = (q, cache, cache.clone())
    short = torch.ones(8, 16, **like)
    with pytest.raises(ValueError, match="rotary_cos must have a row for each of 9 positions, got 8"):
        serving.flash_attn_with_kvcache(*call, new, new, rotary_cos=short, rotary_sin=short, cache_seqlens=3)
    for name, at in (("q", 0), ("k_cache", 1), ("k", 3)):
        tensors = [*call, new, new]
        tensors[at] = tensors[at].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"^{name} requires a gradient"):
            serving.flash_attn_with_kvcache(*tensors, cache_seqlens=3)
    with pytest.raises(TypeError, match="out must have the dtype of q"):
        serving.flash_attn_with_kvcache(*call, out=torch.empty_like(q, dtype=torch.float64), cache_seqlens=3)
    for window in ((None, None), (1,), 3):
        with pytest.raises(TypeError, match="window_size must be two integers"):
            serving.flash_attn_with_kvcache(*call, window_size=window, cache_seqlens=3)
    for name in ("cache_seqlens", "cache_batch_idx"):
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            serving.flash_attn_with_kvcache(*call, **{name: torch.zeros(3, device=device).int()})
        with pytest.raises(TypeError, match=f"{name} must be torch.int32, got torch.float32"):
            serving.flash_attn_with_kvcache(*call, **{name: torch.zeros(2, device=device)})
    if device == "cpu":
        with pytest.raises(ValueError, match="cache_seqlens must hold lengths from 0 to 9, got 10"):
            serving.flash_attn_with_kvcache(*call, new, new, cache_seqlens=10)
    paged = make_cache([9, 9], 4, **like)
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    queries = torch.randn(2, 4, 64, **like).requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        serving.flash_attn_varlen_func(
            queries, paged.k, paged.v, 1, bounds, 9, seqused_k=paged.lengths, block_table=paged.table
        )
    packed = torch.randn(2, 2, 64, **like)
    out = serving.flash_attn_varlen_func(queries, packed, packed, 1, bounds, 1, bounds)
    assert isinstance(out, Tensor) and out.requires_grad


def test_weights_over_a_cache_are_refused() -> None:
    cache = make_cache([9], 4)
    q, bounds, _ = packed_queries([1], 2, 64, "cpu", torch.float32)
    with pytest.raises(NotImplementedError, match="return_softmax is not served over a cache"):
        fa.flash_attn_interface._flash_attn_varlen_forward(
            q, cache.k, cache.v, bounds, bounds, 1, 9, 0.0, None, False, return_softmax=True,
            block_table=cache.table, seqused_k=cache.lengths,
        )  # fmt: skip


@on_devices
def test_pages_in_the_functions_of_flash_attn(device: str) -> None:
    cache = make_cache([70, 4, 129], 16, 2, 64, device=device, dtype=dtype_on(device))
    q, bounds, each = packed_queries([2, 1, 3], 4, 64, device, dtype_on(device))
    bounds_k = torch.nn.functional.pad(cache.lengths.cumsum(0), (1, 0)).int()
    out, lse, _ = fa.flash_attn_varlen_func(
        q, cache.k, cache.v, bounds, bounds_k, 3, 129, causal=True, block_table=cache.table,
        return_attn_probs=True,
    )  # fmt: skip
    check(out, lse, bounds, each, cache, (-1, 0))
    out, lse = fa.flash_attn_with_kvcache(
        q[:3, None], cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table,
        return_softmax_lse=True,
    )  # fmt: skip
    check(out[:, 0], lse[..., 0].t(), torch.arange(4, device=device).int(), list(q[:3].split(1)), cache)


# ---- a simulated server --------------------------------------------------------------------------------


class Server:
    """Sequences that come, grow, share a prefix and leave; pages that are used again, with NaN in between.

    What a sequence has seen is kept beside the cache, and every step's results are compared with float64.
    """

    MOST, ROOM, HEADS, HEADS_K, DIM = 6, 12, 4, 2, 64

    def __init__(self, device: str, page_size: int) -> None:
        self.page_size, self.device, self.dtype = page_size, device, dtype_on(device)
        pages = self.MOST * self.ROOM
        shape = (pages, page_size, self.HEADS_K, self.DIM)
        self.k, self.v = (torch.full(shape, torch.nan, device=device, dtype=self.dtype) for _ in "kv")
        self.free = list(range(pages))
        self.live: list[tuple[list[int], Tensor, Tensor]] = []  # pages, keys, values

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def join(self) -> None:
        """A new sequence, which may begin with whole pages of another one."""
        none = torch.empty(0, self.HEADS_K, self.DIM, device=self.device, dtype=self.dtype)
        pages, k, v = [], none, none
        if self.live and random.random() < 0.4:
            other, keys, values = random.choice(self.live)
            whole = random.randint(0, len(keys) // self.page_size)
            pages, end = other[:whole], whole * self.page_size
            k, v = keys[:end], values[:end]
        self.live.append((pages, k, v))

    def step(self) -> None:
        if self.live and (random.random() < 0.15 or len(self.free) < 2 * self.MOST):
            self.live.pop(random.randrange(len(self.live)))
        if len(self.live) < self.MOST and random.random() < 0.4:
            self.join()
        room = self.ROOM * self.page_size - max(5, self.page_size + 1)  # before the most new tokens
        self.live = [one for one in self.live if len(one[1]) <= room]
        used = {page for pages, *_ in self.live for page in pages}
        for page in {*range(len(self.k))} - used - {*self.free}:
            self.k[page], self.v[page] = torch.nan, torch.nan
            self.free.append(page)
        if not self.live:
            return
        counts = [random.choice([1, 1, 1, 2, 5, self.page_size + 1]) for _ in self.live]
        q, bounds, each = packed_queries(counts, self.HEADS, self.DIM, self.device, self.dtype)
        new_k, new_v = (self.randn(sum(counts), self.HEADS_K, self.DIM) for _ in "kv")
        slots, start = [], 0
        for i, (count, (pages, k, v)) in enumerate(zip(counts, self.live)):
            pages = list(pages)
            for at in range(len(k), len(k) + count):
                if at // self.page_size == len(pages):
                    pages.append(self.free.pop(random.randrange(len(self.free))))
                slots.append(pages[at // self.page_size] * self.page_size + at % self.page_size)
            own = slice(start, start + count)
            self.live[i] = (pages, torch.cat([k, new_k[own]]), torch.cat([v, new_v[own]]))
            start += count
        flash_ext.serving.append_kv(new_k, new_v, self.k, self.v, torch.tensor(slots, device=self.device))
        table = torch.randint(-(2**31), 2**31 - 1, (len(self.live), self.ROOM), dtype=torch.int64).int()
        for row, (pages, *_) in zip(table, self.live):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        lengths = torch.tensor([len(k) for _, k, _ in self.live], dtype=torch.int32, device=self.device)
        window = random.choice([(-1, 0), (-1, 0), (self.page_size + 3, 0), (-1, -1)])
        out, aux = flash_ext.attention_varlen(
            q, self.k, self.v, bounds, None, seqused_k=lengths, block_table=table.to(self.device),
            window_size=window, max_seqlen_q=random.choice([max(counts), None]),
            return_aux=flash_ext.AuxRequest(lse=True),
        )  # fmt: skip
        outs, lses = truth(each, [(k, v) for _, k, v in self.live], window)
        close(out, torch.cat(outs), "out")
        close(aux.lse, torch.cat(lses, 1), "lse")


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_simulated_server(page_size: int) -> None:
    server = Server("cpu", page_size)
    for _ in range(40):
        server.step()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [3, 16])
def test_gpu_a_simulated_server(page_size: int) -> None:
    server = Server("cuda", page_size)
    for _ in range(25):
        server.step()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_gpu_a_simulated_server_for_long(page_size: int) -> None:
    """10^4 steps in all."""
    server = Server("cuda", page_size)
    for _ in range(2500):
        server.step()


# ---- one place for two sequences ---------------------------------------------------------------------------


def appended(device: str, batch: int = 4) -> tuple[Tensor, list[Tensor], list[Tensor], dict[str, Any]]:
    """Queries, a cache of 6 pages or entries of 8 keys, and two new keys a sequence."""
    like = {"device": device, "dtype": dtype_on(device)}
    pools, new = (list(torch.randn(2, n, m, 2, 64, **like)) for n, m in ((6, 8), (batch, 2)))
    lengths = torch.tensor([3, 5, 0, 4][:batch], dtype=torch.int32, device=device)
    return torch.randn(batch, 2, 4, 64, **like), pools, new, {"cache_seqlens": lengths, "causal": True}


@pytest.mark.parametrize("entries, twice", [([1, 0, 1, 3], 1), ([2, 2, 2, 2], 2), ([9, 0, -1, 0], 0)])
def test_appending_twice_to_an_entry_is_refused(entries: list[int], twice: int) -> None:
    q, pools, new, options = appended("cpu")
    before = [pool.clone() for pool in pools]
    call = options | {"cache_batch_idx": torch.tensor(entries).int()}
    with pytest.raises(ValueError, match=f"cache_batch_idx must not name entry {twice} for two sequences"):
        serving.flash_attn_with_kvcache(q, *pools, *new, **call)
    assert all(torch.equal(a, b) for a, b in zip(pools, before))
    none = [x[:, :0] for x in new]
    for read in (serving.flash_attn_with_kvcache(q, *pools, *given, **call) for given in ((), none)):
        assert isinstance(read, Tensor) and not read.isnan().any()  # reading is not


@on_devices
def test_where_values_are_not_seen_the_first_has_the_entry(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_owners, "may_read", lambda t: False)
    q, pools, new, options = appended(device)
    wanted = [pool.clone() for pool in pools]
    for pool, x in zip(wanted, new):
        pool[1, 3:5], pool[0, 5:7], pool[3, 4:6] = x[0], x[1], x[3]
    entries = torch.tensor([1, 0, 1, 3], dtype=torch.int32, device=device)
    out, lse = serving.flash_attn_with_kvcache(
        q, *pools, *new, **options, cache_batch_idx=entries, return_softmax_lse=True
    )
    assert all(torch.equal(a, b) for a, b in zip(pools, wanted))
    rows = [(pools[0][e, :n], pools[1][e, :n]) for e, n in ((1, 5), (0, 7), (2, 0), (3, 6))]
    close(out, torch.stack(truth(list(q), rows, (-1, 0))[0]))
    assert not out[2].any() and (lse[2] == -torch.inf).all()


def test_two_new_keys_of_one_slot_are_refused() -> None:
    q, pools, new, options = appended("cpu", 2)
    before = [pool.clone() for pool in pools]
    for table, lengths, where in (
        ([[4, 1], [4, 2]], [5, 4], "row 5 of page 4 for sequences 0 and 1"),
        ([[3, 1], [0, 3]], [0, 8], "row 0 of page 3 for sequences 0 and 1"),
    ):
        places = {"cache_seqlens": torch.tensor(lengths).int(), "page_table": torch.tensor(table).int()}
        with pytest.raises(
            ValueError, match=f"page_table must not lead two new keys to one slot, got {where}"
        ):
            serving.flash_attn_with_kvcache(q, *pools, *new, **options | places)
    assert all(torch.equal(a, b) for a, b in zip(pools, before))
    # A prefix that both share, other rows of one page, and sequences that are full.
    for table, lengths in (
        ([[4, 1], [4, 2]], [8, 9]),
        ([[4, 1], [4, 2]], [1, 3]),
        ([[4, 1], [4, 1]], [16, 16]),
    ):
        places = {"cache_seqlens": torch.tensor(lengths).int(), "page_table": torch.tensor(table).int()}
        serving.flash_attn_with_kvcache(q, *pools, *new, **options | places)
