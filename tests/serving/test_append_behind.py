"""append_behind, which flash_attn_with_kvcache appends by: against torch's operators, bit by bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from bench import host_cost
from flash_ext import serving
from flash_ext.serving import Rotary, append_kv
from tests.covering import pairs_on_cpu
from tests.graphs import capture
from tests.qkv import AllOperators, null_kernels, on_devices

DTYPES = [torch.float16, torch.bfloat16]
EIGHT_BITS = [torch.float8_e4m3fn, torch.int8]
operator = torch.ops.flash_ext.append_behind.default


def places(
    lengths: Tensor, count: int, cache: Tensor, table: Tensor | None, entries: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, positions and new lengths, one token after the other."""
    pages, size = cache.shape[:2]
    room = size * (1 if table is None else table.shape[1])
    slots, positions, ends, owned = [], [], [], set()
    for b, length in enumerate(lengths.tolist()):
        first = min(max(length, 0), room)
        entry, has_keys = b, True
        if entries is not None:
            entry = int(entries[b])
            has_keys = 0 <= entry < pages and not (count and entry in owned)
            owned.add(entry)
        for at in range(first, first + count):
            page = entry if table is None else int(table[b, at // size]) if at < room else -1
            there = has_keys and at < room and 0 <= page < pages
            slots.append(page * size + at % size if there else -1)
            positions.append(at)
        ends.append(min(first + count, room) if has_keys else 0)
    on = lengths.device
    return (
        torch.tensor(slots, dtype=torch.int64, device=on),
        torch.tensor(positions, dtype=torch.int64, device=on),
        torch.tensor(ends, dtype=torch.int32, device=on),
    )


def turned(
    q: Tensor, cu: Tensor | None, lengths: Tensor, counts: bool, cos: Tensor, sin: Tensor, pairs: bool
) -> Tensor:
    """q (batch, rows, ..) or packed, in float32, products and sums rounded one by one."""
    if cu is None:
        at = lengths.long()[:, None] + torch.arange(q.shape[1], device=q.device) * counts
    else:
        row = torch.arange(q.shape[0], device=q.device)
        b = (row[:, None] >= cu[1:]).sum(1).clamp(max=lengths.shape[0] - 1)
        at = lengths.long()[b] + (row - cu[b]) * counts
    at = at.clamp(0, cos.shape[0] - 1)
    c, s = (x.float()[at][..., None, :] for x in (cos, sin))
    half = cos.shape[1]
    first, rest = q.float()[..., : 2 * half], q[..., 2 * half :]
    a, b = first.unflatten(-1, (half, 2) if pairs else (2, half)).unbind(-1 if pairs else -2)
    both = torch.stack((a * c - b * s, a * s + b * c), -1 if pairs else -2).flatten(-2)
    return torch.cat([both.to(q.dtype), rest], -1)


def angles(positions: int, half: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.rand(positions, half, device=device) * 6
    return x.cos().to(dtype), x.sin().to(dtype)


def make(way: str, count: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Arguments of the operator: 4 sequences, 12 pages or entries of 8 keys, lengths up to all and beyond."""
    batch, pages, size, heads, d = 4, 12, 8, 2, 64
    room = size * (3 if way == "table" else 1)
    entries = table = None
    if way == "table":
        table = torch.randperm(pages, device=device).int().view(batch, 3)
        table[1, 2], table[2, 0], table[3, 1] = -1, -(2**31), pages
    elif way == "entries":
        entries = torch.tensor([7, 0, 7, 12], dtype=torch.int32, device=device)
    lengths = torch.tensor([room, 3, -2, room - 2], device=device)
    lengths = lengths[torch.randperm(batch, device=device)]
    return {
        "k_new": torch.randn(batch, count, heads, d, device=device).to(dtype),
        "v_new": torch.randn(batch, count, heads, d + 32, device=device).to(dtype),
        "k_cache": torch.randn(pages, size, heads, d, device=device).to(dtype),
        "v_cache": torch.randn(pages, heads, size, d + 32, device=device).to(dtype).transpose(1, 2),
        "lengths": lengths, "block_table": table, "entries": entries, "cos": None, "sin": None,
        "interleaved": True, "q": None, "cu_seqlens_q": None, "counts": True,
        "k_descale": None, "v_descale": None,
    }  # fmt: skip


@pairs_on_cpu(way=["table", "entries", "neither"], count=[0, 1, 5], dtype=DTYPES)
def test_places_are_found(way: str, count: int, dtype: torch.dtype, device: str) -> None:
    call = make(way, count, dtype, device)
    for lengths in (call["lengths"], call["lengths"].int(), call["lengths"].repeat_interleave(2)[::2]):
        caches = [call[name].clone() for name in ("k_cache", "v_cache")]
        wanted = [x.clone() for x in caches]
        slots, _, ends = places(lengths, count, caches[0], call["block_table"], call["entries"])
        append_kv(call["k_new"].flatten(0, 1), call["v_new"].flatten(0, 1), *wanted, slots)
        own = {"k_cache": caches[0], "v_cache": caches[1], "lengths": lengths}
        found, none = operator(*(call | own).values())
        assert torch.equal(found, ends) and found.dtype == torch.int32 and none.numel() == 0
        assert all(torch.equal(a, b) for a, b in zip(caches, wanted, strict=True))
        assert count != 5 or way == "entries" or (slots >= 0).any()


@pairs_on_cpu(dtype=DTYPES, packed=[True, False], counts=[True, False], half=[4, 13, 32], pairs=[True, False])
def test_keys_and_queries_are_turned(
    dtype: torch.dtype, packed: bool, counts: bool, half: int, pairs: bool, device: str
) -> None:
    for wide, way in ((torch.float32, "table"), (dtype, "neither")):
        call = make(way, 2, dtype, device)
        cos, sin = angles(25, half, device, wide)
        if packed:
            q = torch.randn(9, 6, 64, device=device).to(dtype)
            cu = torch.tensor([1, 3, 3, 4, 7], dtype=torch.int32, device=device)
        else:
            q, cu = torch.randn(4, 6, 5, 64, device=device).to(dtype).transpose(1, 2), None
        wanted = [call[name].clone() for name in ("k_cache", "v_cache")]
        slots, positions, _ = places(call["lengths"], 2, wanted[0], call["block_table"], None)
        rotary = Rotary(cos, sin, positions, pairs)
        append_kv(call["k_new"].flatten(0, 1), call["v_new"].flatten(0, 1), *wanted, slots, rotary)
        call |= {"cos": cos, "sin": sin, "interleaved": pairs, "q": q, "cu_seqlens_q": cu, "counts": counts}
        _, found = operator(*call.values())
        assert torch.equal(call["k_cache"], wanted[0]) and torch.equal(call["v_cache"], wanted[1])
        assert torch.equal(found, turned(q, cu, call["lengths"], counts, cos, sin, pairs))
        assert found.is_contiguous()


@on_devices
@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("of", ["none", "heads", "sequences", "slots"])
def test_caches_of_8_bits(of: str, kind: torch.dtype, device: str) -> None:
    """With rotary factors, and queries of another type than new keys."""
    call = make("table", 5, torch.bfloat16, device)
    slots, positions, _ = places(call["lengths"], 5, call["k_cache"], call["block_table"], None)
    cos, sin = angles(40, 16, device, torch.float32)
    shape = {"none": (), "heads": (2,), "sequences": (4, 2), "slots": (12, 8, 2)}[of]
    given = [None if of == "none" else torch.rand(shape, device=device) + 0.1 for _ in "kv"]
    caches = [torch.zeros_like(call[name], dtype=torch.uint8) for name in ("k_cache", "v_cache")]
    wanted, factors = [x.clone() for x in caches], [None if x is None else x.clone() for x in given]
    append_kv(
        call["k_new"].flatten(0, 1), call["v_new"].flatten(0, 1), *(x.view(kind) for x in wanted), slots,
        Rotary(cos, sin, positions, False),
        *(x.repeat_interleave(5, 0) if of == "sequences" else x for x in factors),
    )  # fmt: skip
    q = torch.randn(4, 3, 6, 64, device=device).half()
    call |= {"cos": cos, "sin": sin, "interleaved": False, "q": q}
    call |= {"k_descale": given[0], "v_descale": given[1]}
    call |= {"k_cache": caches[0].view(kind), "v_cache": caches[1].view(kind)}
    _, found = operator(*call.values())
    assert all(torch.equal(a, b) for a, b in zip(caches, wanted, strict=True)) and caches[0].any()
    assert of != "slots" or all(torch.equal(a, b) for a, b in zip(given, factors, strict=True))
    assert torch.equal(found, turned(q, None, call["lengths"], True, cos, sin, False))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_gpu_agrees_with_the_cpu(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    dtype, count = random.choice(DTYPES), random.choice([0, 1, 2, 5, 33])
    call = make(random.choice(["table", "entries", "neither"]), count, dtype, "cpu")
    call["lengths"] = torch.randint(-3, 30, (4,), dtype=random.choice([torch.int32, torch.int64]))
    cos, sin = angles(40, random.choice([1, 8, 31, 32]), "cpu", random.choice([dtype, torch.float32]))
    call |= {"cos": cos, "sin": sin, "interleaved": seed % 2 == 0, "counts": seed % 3 != 0}
    call["q"] = torch.randn(4, random.choice([1, 7]), 14, 64).to(dtype)
    on_gpu = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
    assert all(torch.equal(a, b.cpu()) for a, b in zip(operator(*call.values()), operator(*on_gpu.values())))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(call[name], on_gpu[name].cpu())


# ---- by the function of engines --------------------------------------------------------------------------


def engine_call(way: str, packed: bool, rotary: bool | None, count: int, device: str) -> tuple[Any, ...]:
    """Queries, caches of 6 pages or entries of 16 keys, new rows and options of flash_attn_with_kvcache."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(3, 2, 6, 64, device=device).to(dtype)
    caches = [torch.randn(6, 16, 2, 64, device=device).to(dtype) for _ in "kv"]
    new = [torch.randn(3, count, 2, 64, device=device).to(dtype) for _ in "kv"]
    room = 32 if way == "table" else 16
    lengths = torch.tensor([random.randrange(room), room, room - 3], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    if way == "table":
        options["page_table"] = torch.randperm(6, device=device).int().view(3, 2)
    elif way == "entries":
        options["cache_batch_idx"] = torch.tensor([4, -1, 2], dtype=torch.int32, device=device)
    if packed:
        q = q.flatten(0, 1)
        options["cu_seqlens_q"] = torch.tensor([0, 3, 4, 6], dtype=torch.int32, device=device)
    if rotary is not None:
        cos, sin = angles(40, 16, device, dtype)
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary}
    return q, caches, new, options


@pairs_on_cpu(
    way=["table", "entries", "neither"], packed=[False, True], rotary=[None, True, False], count=[0, 1, 5]
)
def test_a_call_is_an_append_and_a_read(
    way: str, packed: bool, rotary: bool | None, count: int, device: str
) -> None:
    q, caches, new, options = engine_call(way, packed, rotary, count, device)
    table, entries = options.get("page_table"), options.get("cache_batch_idx")
    wanted = [x.clone() for x in caches]
    lengths = options["cache_seqlens"]
    slots, positions, ends = places(lengths, count, wanted[0], table, entries)
    factors, turned_q = None, q
    if rotary is not None:
        cos, sin = options["rotary_cos"], options["rotary_sin"]
        factors = Rotary(cos, sin, positions, rotary)
        turned_q = turned(q, options.get("cu_seqlens_q"), lengths, True, cos, sin, rotary)
    append_kv(new[0].flatten(0, 1), new[1].flatten(0, 1), *wanted, slots, factors)
    reads = {name: x for name, x in options.items() if "rotary" not in name} | {"cache_seqlens": ends}
    want = serving.flash_attn_with_kvcache(turned_q, *wanted, **reads)
    for given in (lengths, lengths.long()):
        own = [x.clone() for x in caches]
        got = serving.flash_attn_with_kvcache(q, *own, *new, **options | {"cache_seqlens": given})
        assert all(torch.equal(a, b) for a, b in zip((*own, *got), (*wanted, *want), strict=True))


@pytest.mark.parametrize("rotary", [None, True])
@pytest.mark.parametrize("way", ["table", "neither", "entries"])
def test_a_step_has_two_operators(way: str, rotary: bool | None) -> None:
    """Without a GPU: the two of this library, and of torch's, each of which is a launch, views alone."""
    q, caches, new, options = engine_call(way, False, rotary, 1, "cpu")
    given = [x.bfloat16() for x in (q, *caches, *new)]
    with host_cost.null_kernels("cpu"), AllOperators() as seen:
        serving.flash_attn_with_kvcache(*given, **options)
    views = ["aten.unsqueeze.default", "aten.slice.Tensor"] if way == "entries" else []
    ours = ["flash_ext.append_behind.default", "flash_ext.fwd_cached.default"]
    assert [name for name in seen.names if name not in views] == ours


def kernels_of(call: Any) -> list[str]:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_device]


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [None, True])
@pytest.mark.parametrize("way", ["table", "neither", "entries"])
def test_gpu_an_append_is_one_launch_more(way: str, rotary: bool | None) -> None:
    q, caches, new, options = engine_call(way, False, rotary, 1, "cuda")
    reads = {name: x for name, x in options.items() if "rotary" not in name}
    if way == "entries":  # the same read, without finding out which entries are there
        reads["page_table"] = reads.pop("cache_batch_idx")[:, None]
    alone = kernels_of(lambda: serving.flash_attn_with_kvcache(q, *caches, **reads))
    both = kernels_of(lambda: serving.flash_attn_with_kvcache(q, *caches, *new, **options))
    assert sum("append_kv_kernel" in name for name in both) == 1
    assert len(both) == len(alone) + 1, both


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["table", "neither", "entries"])
def test_gpu_a_graph_follows_lengths(way: str) -> None:
    q, caches, new, options = engine_call(way, False, True, 2, "cuda")
    lengths = options["cache_seqlens"]
    graph, results = capture(lambda: serving.flash_attn_with_kvcache(q, *caches, *new, **options))
    for _ in range(3):
        lengths.copy_(torch.randint(0, 17, (3,)))
        own = [x.clone() for x in caches]
        graph.replay()
        want = serving.flash_attn_with_kvcache(q, *own, *new, **options)
        assert all(torch.equal(a, b) for a, b in zip((*caches, *results), (*own, *want), strict=True))


# ---- as an operator --------------------------------------------------------------------------------------


@on_devices
def test_what_is_refused(device: str) -> None:
    call = make("table", 2, torch.bfloat16, device)
    before = call["k_cache"].clone()
    cos, sin = angles(30, 16, device, torch.float32)
    q = torch.zeros(4, 1, 6, 64, device=device).bfloat16()
    with_factors = {"cos": cos, "sin": sin, "q": q}
    entries = torch.zeros(4, dtype=torch.int32, device=device)
    for error, words, changed in (
        (ValueError, r"k_new must have shape \(batch, new_tokens, num_heads, head_dim\)", {"k_new": q[0]}),
        (ValueError, "v_new must have the tokens of k_new, 2, got 1", {"v_new": call["v_new"][:, :1]}),
        (ValueError, "k_cache must not be expanded to be written",
         {"k_cache": before[:1].expand(12, -1, -1, -1)}),
        (TypeError, "lengths must be torch.int32 or torch.int64", {"lengths": call["lengths"].float()}),
        (ValueError, r"lengths must have shape \(batch,\) with batch 4", {"lengths": call["lengths"][:3]}),
        (TypeError, "block_table must be torch.int32, got", {"block_table": call["block_table"].long()}),
        (ValueError, r"block_table must have shape \(batch, max_pages\)", {"block_table": entries}),
        (ValueError, "block_table must have stride 1",
         {"block_table": call["block_table"].t().contiguous().t()}),
        (ValueError, "block_table and entries must not be given together", {"entries": entries}),
        (TypeError, "entries must be torch.int32, got", {"block_table": None, "entries": entries.long()}),
        (ValueError, "k_cache must have an entry for each of 4 sequences, got 3",
         {"block_table": None, "k_cache": before[:3], "v_cache": call["v_cache"][:3]}),
        (ValueError, "cos and sin of a rotary embedding must be given together", {"cos": cos}),
        (ValueError, "cos and sin turn 66 features, but k_new has 64",
         {"cos": torch.ones(9, 33, device=device), "sin": torch.ones(9, 33, device=device)}),
        (ValueError, "q is given to be turned: cos and sin must be given with it", {"q": q}),
        (ValueError, r"q must have shape \(batch, seqlen_q, num_heads, head", with_factors | {"q": q[0]}),
        (ValueError, "q must have the head_dim of k_new, 64, got 32", with_factors | {"q": q[..., :32]}),
        (ValueError, "q must have the 4 sequences of k_new, got 3", with_factors | {"q": q[:3]}),
        (ValueError, "q must have the 4 sequences of k_new, got 3",
         with_factors | {"q": q[0], "cu_seqlens_q": entries}),
        (TypeError, "q must be torch.float16 or torch.bfloat16 on cuda", with_factors | {"q": q.int()}),
        (ValueError, "k_descale belongs to a cache of", {"k_descale": torch.ones(2, device=device)}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            operator(*(call | changed).values())
    assert torch.equal(call["k_cache"], before)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="q requires a gradient"):
        operator(*(call | with_factors | {"q": q.clone().requires_grad_()}).values())
    with pytest.raises(NotImplementedError, match="vmap over attention with a cache"):
        torch.vmap(lambda x: operator(*(call | {"k_new": x}).values()))(call["k_new"][None])


def test_it_is_traced_and_counted() -> None:
    q, caches, new, options = engine_call("table", False, True, 2, "cpu")
    wanted = [x.clone() for x in caches]
    with flash_ext.count() as counts:
        want = serving.flash_attn_with_kvcache(q, *wanted, *new, **options)
    assert counts.calls == {"serving": 1, "append_kv": 1}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(*new: Tensor) -> Any:
        return serving.flash_attn_with_kvcache(q, *caches, *new, **options)

    got = step(*new)
    assert all(torch.equal(a, b) for a, b in zip((*caches, *got), (*wanted, *want), strict=True))
    call = make("table", 2, torch.bfloat16, "cpu")
    cos, sin = angles(30, 16, "cpu", torch.float32)
    call |= {"cos": cos, "sin": sin}
    torch.library.opcheck(operator, tuple(call.values()), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(operator, tuple((call | {"q": q.bfloat16().repeat(2, 1, 1, 1)[:4]}).values()))


def test_factors_of_8_bits_may_be_expanded_where_it_is_traced() -> None:
    q, caches, new, options = engine_call("neither", False, None, 1, "cpu")
    scale = torch.tensor(0.5).expand(3, 2)
    options |= {"k_descale": scale, "v_descale": scale}
    narrow = [(x * 20).to(torch.int8) for x in caches]
    wanted = [x.clone() for x in narrow]
    want = serving.flash_attn_with_kvcache(q, *wanted, *new, **options)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(*new: Tensor) -> Any:
        return serving.flash_attn_with_kvcache(q, *narrow, *new, **options)

    got = step(*new)
    assert all(torch.equal(a, b) for a, b in zip((*narrow, *got), (*wanted, *want), strict=True))


@on_devices
def test_it_is_noticed_as_a_change_in_place(device: str) -> None:
    call = make("neither", 1, torch.float16, device)

    def versions() -> list[int]:
        return [call[name]._version for name in ("k_cache", "v_cache")]

    before = versions()
    operator(*call.values())
    assert all(a < b for a, b in zip(before, versions()))
    before = versions()
    with null_kernels():
        operator(*call.values())
    assert all(a < b for a, b in zip(before, versions()))
