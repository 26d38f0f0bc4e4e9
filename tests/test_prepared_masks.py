"""A mask keeps what its first call made of it, and sees when its tensors change."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import flash_ext
from flash_ext import masks
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


# ---- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.caching
@pytest.mark.parametrize("used_before", [True, False])
def test_a_graph_reads_the_tensors_of_a_mask_anew(used_before: bool) -> None:
    """And leaves nothing in the mask: what a capture makes has no values before a replay."""
    q, k = (t.cuda().half() for t in some())
    flash_ext.attention(q, k, k, mask=torch.ones(24, 24, dtype=torch.bool, device="cuda"))
    first, second = (torch.arange(24, device="cuda") // n for n in (5, 7))  # int64: narrowed
    ids = first.clone()
    mask = masks.Documents(ids)
    if used_before:
        flash_ext.attention(q, k, k, mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_ext.attention(q, k, k, mask=mask)
    expected = {name: flash_ext.attention(q, k, k, mask=masks.Documents(t)) for name, t in
                (("first", first), ("second", second))}  # fmt: skip
    assert torch.equal(flash_ext.attention(q, k, k, mask=mask), expected["first"])
    graph.replay()
    assert torch.equal(captured, expected["first"])
    ids.copy_(second)
    graph.replay()
    assert torch.equal(captured, expected["second"])


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
