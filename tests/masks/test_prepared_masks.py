"""A mask keeps what its first call made of it, and sees when its tensors change."""

from __future__ import annotations

import copy
import gc
import math
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile

import flash_ext
from flash_ext import masks
from flash_ext._cpu import condensed
from flash_ext._masks import value
from flash_ext._masks.value import Sizes, only_leaf
from flash_ext._ops import prepared
from flash_ext._ops.arguments import Asked, modifiers_of

pytestmark = pytest.mark.everywhere


def made_by(mask: masks.Mask, q: torch.Tensor, k: torch.Tensor, **options):
    causal, window = options.get("causal", False), options.get("window", (-1, -1))
    return modifiers_of(q, k, None, Asked(mask=mask), causal, window, None)[1]


def some(rows: int = 24, keys: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, rows, 2, 8), torch.randn(2, keys, 2, 8)


def every_kind() -> dict[str, masks.Mask]:
    ids = torch.arange(24) // 5  # int64: narrowed once
    return {
        "documents": masks.Documents(ids) & masks.Causal(),
        "keys": masks.KeyMask(torch.rand(2, 24) > 0.3),
        "keys of documents": masks.KeyMask(torch.rand(2, 24) > 0.3) & masks.Documents(ids),
        "prefix": masks.PrefixLM(torch.tensor([3, 9])),
        "hidden rows": masks.HiddenRows(torch.randint(0, 24, (24, 2))),
        "hidden keys": masks.HiddenKeys(torch.randint(0, 24, (24, 4))),
        "dense": masks.Dense(torch.rand(24, 24) > 0.3) & masks.Dense(torch.rand(2, 1, 24, 24) > 0.3),
        "blocks": masks.BlockMask(torch.rand(2, 1, 2, 2) > 0.4, 16),
    }


@pytest.mark.parametrize("name", every_kind())
def test_the_second_call_makes_nothing(name: str, monkeypatch: pytest.MonkeyPatch):
    mask, (q, k) = every_kind()[name], some()
    first = flash_ext.attention(q, k, k, mask=mask)
    monkeypatch.setattr(prepared, "terms_for", lambda *a: pytest.fail("made again"))
    assert torch.equal(flash_ext.attention(q, k, k, mask=mask), first)
    # Further modifiers are another matter.
    monkeypatch.undo()
    flash_ext.attention(q, k, k, mask=mask, sinks=torch.randn(2))


@pytest.mark.parametrize("name", every_kind())
def test_a_change_in_place_is_seen(name: str):
    mask, (q, k) = every_kind()[name], some()
    flash_ext.attention(q, k, k, mask=mask)
    for tensor in mask._tensors():
        changed = ~tensor if tensor.dtype == torch.bool else tensor.flip(-2 if tensor.dim() > 1 else 0)
        tensor.view_as(tensor).copy_(changed)
    q_len = q.shape[1]
    expected = flash_ext.attention(q, k, k, mask=mask.to_dense(q_len, q_len, batch=2, num_heads=1))
    torch.testing.assert_close(flash_ext.attention(q, k, k, mask=mask), expected)


def test_one_mask_serves_several_sizes_and_options():
    mask = masks.Window(5, -1)
    for rows, keys in ((24, 24), (7, 24), (24, 24)):
        q, k = some(rows, keys)
        for options in ({}, {"causal": True}, {"window_size": (2, 3)}):
            got = flash_ext.attention(q, k, k, mask=mask, **options)
            dense = mask.to_dense(rows, keys)
            if options.get("causal"):
                dense = dense & masks.Causal().to_dense(rows, keys)
            if "window_size" in options:
                dense = dense & masks.Window(2, 3).to_dense(rows, keys)
            torch.testing.assert_close(got, flash_ext.attention(q, k, k, mask=dense))


def test_a_mask_keeps_what_it_made_for_a_few_sizes_only():
    mask = masks.Documents(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    ids = masks.KeyMask(torch.ones(1, 24).bool())
    for batch in range(1, 30):
        q = torch.randn(batch, 24, 2, 8)
        flash_ext.attention(q, q, q, mask=ids)
    assert len(ids._prepared.made) <= prepared.MOST_PREPARED
    assert not hasattr(mask, "_prepared")


def test_copies_and_pickles_begin_anew():
    mask, (q, k) = every_kind()["documents"], some()
    flash_ext.attention(q, k, k, mask=mask)
    twin = copy.deepcopy(mask)
    assert not hasattr(twin, "_prepared")
    assert torch.equal(flash_ext.attention(q, k, k, mask=twin), flash_ext.attention(q, k, k, mask=mask))


def test_threads_share_a_mask():
    mask, (q, k) = every_kind()["keys of documents"], some()
    expected = flash_ext.attention(q, k, k, mask=copy.deepcopy(mask))
    results: list[torch.Tensor] = []

    def attend() -> None:
        results.extend(flash_ext.attention(q[:n], k[:n], k[:n], mask=mask) for n in (2, 2, 2))

    threads = [threading.Thread(target=attend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 18 and all(torch.equal(result, expected) for result in results)


def test_inference_tensors_have_no_versions_and_work():
    q, k = some()
    with torch.inference_mode():
        keep = torch.rand(2, 24) > 0.3
        mask = masks.KeyMask(keep)
        first = flash_ext.attention(q, k, k, mask=mask)
        keep.logical_not_()
        second = flash_ext.attention(q, k, k, mask=mask)
    assert not torch.equal(first, second)


def test_a_gradient_is_that_of_the_forward_although_the_mask_changes_between():
    (q, k), keep = some(), torch.rand(2, 24) > 0.3
    grads = []
    for change in (False, True):
        own = keep.clone()
        leaf = q.clone().requires_grad_()
        mask = masks.KeyMask(own) & masks.Documents(torch.zeros(24, dtype=torch.int64))
        out = flash_ext.attention(leaf, k, k, mask=mask)
        if change:
            own.logical_not_()
        grads.append(torch.autograd.grad(out.sum() * 1.0, leaf)[0])
    assert torch.equal(*grads)


def test_another_device_is_refused_also_after_a_first_use():
    mask, (q, k) = every_kind()["documents"], some()
    flash_ext.attention(q, k, k, mask=mask)
    q, k = q.to("meta"), k.to("meta")
    with pytest.raises(ValueError, match=r"mask must be on the device of q, meta"):
        made_by(mask, q, k)


# ---- once for all layers --------------------------------------------------------------------------------


def passes_of(call: Callable[[], object]) -> int:
    """How often a call condenses something, on the CPU."""
    passes, condense = [], condensed.condense
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(condensed, "condense", lambda *given: passes.append(given) or condense(*given))
        call()
    return len(passes)


@pytest.mark.parametrize("name", every_kind())
def test_two_layers_and_their_gradients_condense_once(name: str):
    mask, (q, k) = every_kind()[name], some()
    leaves = [t.requires_grad_() for t in (q, k)]

    def layers() -> None:
        x = flash_ext.attention(leaves[0], leaves[1], leaves[1], mask=mask)
        x = flash_ext.attention(x, leaves[1], leaves[1], mask=mask)
        torch.autograd.grad(x.sum() * 1.0, leaves)

    first = passes_of(layers)
    assert first == {"prefix": 0, "keys of documents": 2}.get(name, 1)
    assert passes_of(layers) == 0
    with torch.no_grad():
        out, lse = flash_ext.forward(*leaves, k, mask=mask)
        assert passes_of(lambda: flash_ext.forward(*leaves, k, mask=mask)) == 0
        assert passes_of(lambda: flash_ext.backward(out, *leaves, k, out, lse, mask=mask)) == 0


def test_layers_of_other_windows_share_what_is_kept():
    mask, (q, k) = every_kind()["dense"], some()
    for options in ({}, {"causal": True}, {"window_size": (3, 3)}):
        want = 0 if options else 1
        assert passes_of(lambda options=options: flash_ext.attention(q, k, k, mask=mask, **options)) == want
        expected = flash_ext.attention(q, k, k, mask=copy.deepcopy(mask), **options)
        assert torch.equal(flash_ext.attention(q, k, k, mask=mask, **options), expected)
    assert len({id(found.mods.mask) for found in mask._prepared.made.values()}) == 1


def test_expressions_of_one_leaf_share_what_it_is_condensed_to():
    q, k = some()
    for name in ("documents", "prefix", "hidden rows", "blocks"):
        leaf = only_leaf(every_kind()[name])
        bands = (masks.Causal(), masks.Causal() & masks.Window(5, -1), masks.Causal() & masks.Chunks(6))
        found = [band | leaf if name == "prefix" else leaf & band for band in bands]
        for at, mask in enumerate(found):
            passes = passes_of(lambda mask=mask: flash_ext.attention(q, k, k, mask=mask))
            assert passes == (0 if at or name == "prefix" else 1)
            expected = flash_ext.attention(q, k, k, mask=copy.deepcopy(mask))
            assert torch.equal(flash_ext.attention(q, k, k, mask=mask), expected)
        kept = [list(mask._prepared.made.values())[0].mods for mask in found]
        assert len({tuple(map(id, prepared._tensors(mods))) for mods in kept}) == 1
        for tensor in leaf._tensors():
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
        for mask in found:
            expected = flash_ext.attention(q, k, k, mask=copy.deepcopy(mask))
            assert torch.equal(flash_ext.attention(q, k, k, mask=mask), expected)
        leaf.refresh()


def test_which_leaf_is_the_only_one():
    dense, keys = masks.Dense(torch.ones(24, 24) > 0), masks.KeyMask(torch.ones(24) > 0)
    assert only_leaf(dense) is dense and only_leaf(dense & masks.Causal()) is dense
    for mask in (masks.Causal(), ~dense, ~dense & masks.Causal(), dense & keys, dense & ~keys):
        assert only_leaf(mask) is None and only_leaf(mask & ~dense) is None
    assert only_leaf((masks.Causal() | masks.Prefix(torch.ones(2).int())) & dense) is None
    q, k = some()
    flash_ext.attention(q, k, k, mask=dense & masks.Causal())
    out = flash_ext.attention(q, k, k, mask=~dense & masks.Causal())
    assert torch.equal(out, torch.zeros_like(out))


def test_a_tensor_is_condensed_once_a_call_forward_and_backward():
    (q, k), keep = some(), torch.rand(24, 24) > 0.3
    leaf = q.requires_grad_()

    def layer() -> None:
        torch.autograd.grad(flash_ext.attention(leaf, k, k, mask=keep).sum() * 1.0, leaf)

    assert [passes_of(layer), passes_of(layer)] == [1, 1]


@pytest.mark.parametrize("name", every_kind())
def test_what_is_kept_takes_the_bytes_that_describe_tells(name: str):
    mask, (q, k) = every_kind()[name], some()
    flash_ext.attention(q, k, k, mask=mask)
    (found,) = mask._prepared.made.values()
    held = sum(t.nbytes for t in prepared._tensors(found.mods))
    assert held == mask.describe(24, 24, batch=2, num_heads=2).memory > 0


def test_bytes_of_cut_blocks_and_of_odd_lengths():
    cut = masks.BlockMask.from_mask(masks.Causal(), 37, 37, block_size=16)
    odd = masks.HiddenRows(torch.zeros(2, 37, 2, dtype=torch.int64)) & masks.Documents(torch.zeros(37).int())
    for mask in (cut, odd, odd & masks.KeyMask(torch.ones(37) > 0)):
        q = torch.randn(3, 37, 2, 8)
        flash_ext.attention(q, q, q, mask=mask)
        (found,) = mask._prepared.made.values()
        held = sum(t.nbytes for t in prepared._tensors(found.mods))
        assert held == mask.describe(37, 37, batch=3, num_heads=2).memory > 0


@pytest.mark.parametrize("name", every_kind())
def test_a_mask_that_was_used_dies_with_its_last_reference(name: str):
    mask, (q, k) = every_kind()[name], some()
    bias = masks.ALiBi(torch.ones(2))
    for _ in range(2):
        flash_ext.attention(q, k, k, mask=mask)
        flash_ext.attention(q, k, k, mask=mask, bias=bias)
    gc.disable()
    try:
        death = weakref.ref(mask)
        del mask
        assert death() is None
    finally:
        gc.enable()


def test_a_first_use_in_inference_mode_serves_training():
    mask, (q, k) = every_kind()["documents"], some()
    with torch.inference_mode():
        expected = flash_ext.attention(q, k, k, mask=mask)
    leaf = q.clone().requires_grad_()
    out = flash_ext.attention(leaf, k, k, mask=mask)
    out.sum().backward()
    assert torch.equal(out, expected) and leaf.grad.abs().sum() > 0


def test_a_mask_that_was_used_compiles_and_one_graph_condenses_once_for_two_layers():
    ops = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        ops.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def layers(q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mask = masks.DocumentCausal(ids)
        x = flash_ext.attention(q, k, k, mask=mask)
        return flash_ext.attention(x, k, k, mask=mask).square().sum()

    (q, k), ids = some(), torch.arange(24) // 5
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layers(leaf, k, ids), leaf)
    aot = aot_autograd(fw_compiler=backend, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(layers, fullgraph=True, backend=aot)
    (got,) = torch.autograd.grad(compiled(leaf, k, ids), leaf)
    torch.testing.assert_close(got, expected)
    counts = [ops.count(f"flash_ext.{name}.default") for name in ("condense", "fwd_mod", "bwd_mod")]
    assert counts == [1, 2, 2]
    used = masks.DocumentCausal(ids)
    flash_ext.attention(q, k, k, mask=used)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return flash_ext.attention(q, k, k, mask=used)

    held = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(held(q), layer(q))


def test_a_mask_in_a_transform_is_condensed_entry_by_entry():
    (q, k), ids = some(), torch.stack([torch.arange(24) // 5, torch.arange(24) // 7])
    queries = torch.stack([q, -q])

    def one(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return flash_ext.attention(q, k, k, mask=masks.Documents(ids) & masks.Causal())

    for call in (one, torch.func.grad(lambda q, ids: one(q, ids).square().sum())):
        got = torch.vmap(call)(queries, ids)
        assert all(torch.equal(got[i], call(queries[i], ids[i])) for i in range(2))


# ---- CUDA graphs, as far as they are seen without one ---------------------------------------------------


def test_a_capture_finds_what_was_made_before_and_keeps_it():
    mask, (q, k) = every_kind()["documents"], some()
    flash_ext.attention(q, k, k, mask=mask)
    kept = prepared.kept_in(mask)
    ((*key, _),), (found,) = kept.made.keys(), kept.made.values()
    for _ in range(2):
        assert prepared._for_graph(mask, kept, tuple(key), kept.versions()) is found
    assert kept.in_graphs == [found]
    for size in range(1, 2 * prepared.MOST_PREPARED):  # pushes out what no graph reads
        flash_ext.attention(*(t[:1].repeat(size + 2, 1, 1, 1) for t in (q, k, k)), mask=mask)
    assert kept.in_graphs == [found] and all(one is not found for one in kept.made.values())
    with pytest.raises(ValueError, match="mask is not prepared for 24 rows and 24 keys, batch 2 and 2 heads"):
        prepared._for_graph(mask, kept, tuple(key), kept.versions())
    flash_ext.attention(q, k, k, mask=mask)
    mask.masks[0].ids.add_(1)
    with pytest.raises(ValueError, match="a CUDA graph is being captured: make one call with this mask"):
        prepared._for_graph(mask, kept, tuple(key), kept.versions())


def test_refresh_writes_into_the_memory_that_is_there():
    ids = torch.arange(24, dtype=torch.int32) // 5
    mask, (q, k) = masks.DocumentCausal(ids), some()
    masks.Causal().refresh()
    mask.refresh()  # nothing is there
    flash_ext.attention(q, k, k, mask=mask)
    (before,) = mask._prepared.made.values()
    held = before.mods.document_q
    ids.copy_(torch.arange(24) // 7)
    mask.refresh()
    (after,) = mask._prepared.made.values()
    assert after.mods.document_q is held and torch.equal(held[:, :24], ids.expand(2, 24))
    assert passes_of(lambda: flash_ext.attention(q, k, k, mask=mask)) == 0
    expected = flash_ext.attention(q, k, k, mask=copy.deepcopy(mask))
    assert torch.equal(flash_ext.attention(q, k, k, mask=mask), expected)


def test_refresh_between_forward_and_backward_is_noticed():
    ids = torch.arange(24, dtype=torch.int32) // 5
    mask, (q, k) = masks.DocumentCausal(ids), some()
    out = flash_ext.attention(q.requires_grad_(), k, k, mask=mask)
    mask.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_mask_that_is_built_during_a_capture_keeps_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(value, "is_capturing", lambda: True)
    mask, (q, k) = masks.DocumentCausal(torch.arange(24) // 5), some()
    monkeypatch.undo()
    for _ in range(2):
        assert passes_of(lambda: flash_ext.attention(q, k, k, mask=mask)) == 1
    assert mask._prepared is None and not hasattr(mask, "_calls")


# ---- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.caching
def test_a_graph_wants_a_mask_that_is_prepared() -> None:
    """And reads what the mask was then; with refresh() it follows the mask's tensors."""
    q, k = (t.cuda().half() for t in some())
    first, second = (torch.arange(24, device="cuda") // n for n in (5, 7))  # int64: narrowed
    expected = {
        name: flash_ext.attention(q, k, k, mask=masks.Documents(t))
        for name, t in (("1", first), ("2", second))
    }
    ids = first.clone()
    mask = masks.Documents(ids)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="mask is not prepared for 24 rows and 24 keys"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            flash_ext.attention(q, k, k, mask=mask)
    flash_ext.attention(q, k, k, mask=mask)
    graphs = []
    for refreshed in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            if refreshed:
                mask.refresh()
            captured = flash_ext.attention(q, k, k, mask=mask)
        graphs.append((graph, captured))
    ids.copy_(second)
    assert torch.equal(flash_ext.attention(q, k, k, mask=mask), expected["2"])
    for (graph, captured), want in zip(graphs, ("1", "2")):
        graph.replay()
        assert torch.equal(captured, expected[want])
    # What the graphs read outlives what other sizes and changes push out.
    for n in range(1, 2 * prepared.MOST_PREPARED):
        ids.add_(1)
        flash_ext.attention(q[:, :, :, :8].repeat(n, 1, 1, 1), *[k.repeat(n, 1, 1, 1)] * 2, mask=mask)
    torch.cuda.empty_cache()
    graphs[0][0].replay()
    assert torch.equal(graphs[0][1], expected["2"])  # the second graph has written into what both read


@pytest.mark.gpu
@pytest.mark.caching
def test_a_mask_that_a_graph_builds_follows_its_tensors() -> None:
    q, k = (t.cuda().half() for t in some())
    first, second = (torch.arange(24, device="cuda") // n for n in (5, 7))
    flash_ext.attention(q, k, k, mask=masks.Documents(first))
    ids = first.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_ext.attention(q, k, k, mask=masks.Documents(ids))
    for given in (first, second):
        ids.copy_(given)
        graph.replay()
        assert torch.equal(captured, flash_ext.attention(q, k, k, mask=masks.Documents(given)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", every_kind())
def test_a_further_layer_launches_attention_kernels_only(name: str) -> None:
    q, k = (t.cuda().half() for t in some())
    mask = every_kind()[name].to("cuda")
    leaves = [t.requires_grad_() for t in (q, k)]

    def layer() -> list[str]:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            out = flash_ext.attention(leaves[0], leaves[1], leaves[1], mask=mask)
            torch.autograd.grad(out, leaves[0], torch.ones_like(out))
            torch.cuda.synchronize()
        return [event.key for event in found.key_averages()]

    passes = ("pack_mask", "group_mask", "pack_blocks", "group_document_ids", "group_intervals")
    layer()
    assert not [key for key in layer() if any(one in key for one in passes)]


@pytest.mark.gpu
@pytest.mark.caching
def test_what_one_stream_makes_is_not_read_by_another() -> None:
    q, k = (t.cuda().half() for t in some())
    mask = masks.Documents(torch.arange(24, device="cuda") // 5)
    expected = flash_ext.attention(q, k, k, mask=masks.Documents(torch.arange(24, device="cuda") // 5))
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(200_000_000)  # about 0.1 s, behind which the ids of this stream are narrowed
        flash_ext.attention(q, k, k, mask=mask)
    with torch.cuda.stream(other):
        got = flash_ext.attention(q, k, k, mask=mask)
    other.synchronize()
    assert torch.equal(got, expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("block_size", [(16, 16), (48, 64), (112, 32), (128, 128)], ids=str)
def test_cut_blocks_are_written_out_in_pieces(
    block_size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as one bool for each pair: of 64k x 64k that would be 4 GiB."""
    keep = torch.rand(2, 3, 1000, 300) < 0.5
    keep[:, :, :300, 100:], keep[:, 1, 600:] = False, True
    mask = masks.BlockMask.from_dense(keep, block_size)
    want = torch.ops.flash_ext.condense.default(keep, 0, 0)
    sizes = Sizes(False, 2, 3, 1000, 300)
    largest = []

    def noting(t: torch.Tensor) -> torch.Tensor:
        largest.append(t.numel())
        return torch.ops.flash_ext.condense.default(t, 0, 0)

    monkeypatch.setattr(prepared, "_condensed", noting)
    for most in (1, 2 * 3 * 300 * 400, 2**26):
        monkeypatch.setattr(prepared, "MOST_ELEMENTS", most)
        largest.clear()
        assert torch.equal(prepared._condensed_elements(mask, sizes), want)
        assert len(largest) == 1 if most == 2**26 else len(largest) > 1
        rows = math.lcm(block_size[0], 64)
        assert max(largest) <= max(most, 2 * 3 * rows * 300)
