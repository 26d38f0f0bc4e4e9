"""Dense calls whose mask says documents alone run as packed sequences where documents stand together."""

from __future__ import annotations

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash_ext
from flash_ext import AuxRequest, masks, serving
from flash_ext._masks.documents import LEAST_ROWS, borders_of, says_documents_alone
from flash_ext._ops import prepared

ROWS, HEADS = 320, 4
GROWING = torch.cat([torch.full((n,), i) for i, n in enumerate((70, 130, 1, 119))])
OTHERS = torch.cat([torch.full((n,), i) for i, n in ((9, 150), (-1, 40), (3, 100), (-7, 30))])
BATCH = torch.stack([GROWING, OTHERS])
SHORT = torch.arange(ROWS) // 5
cpu = pytest.mark.everywhere


def qkv(head_dim: int = 16, heads_k: int = HEADS, **like: Any) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(1)
    shapes = [(2, ROWS, heads, head_dim) for heads in (HEADS, heads_k, heads_k)]
    return tuple(torch.randn(shape, generator=make).to(**like).requires_grad_() for shape in shapes)


def runs_packed(mask: masks.Mask, *tensors: Tensor, dropout_p: float = 0.0) -> bool:
    """Whether calls that the mask keeps run so; it must keep one."""
    ((_, call),) = mask._calls.values()
    return call.may_pack(*tensors, dropout_p)


def by_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "borders_of", lambda _: None)


# ---- borders -------------------------------------------------------------------------------------------


@cpu
def test_borders_of_documents_that_stand_together() -> None:
    found = borders_of(BATCH.int())
    assert found is not None and found.cu_seqlens_q.dtype == torch.int32
    # Rows of no document have no keys, and a sequence of no rows has theirs.
    assert found.cu_seqlens_q.tolist() == [0, 70, 200, 201, 320, 470, 510, 510, 610, 640, 640]
    assert found.cu_seqlens_k.tolist() == [0, 70, 200, 201, 320, 470, 470, 510, 610, 610, 640]
    same = borders_of(GROWING[None].int())
    assert same is not None and same.cu_seqlens_q is same.cu_seqlens_k
    # The same id in two batch entries names two documents.
    assert borders_of(torch.zeros(3, 64, dtype=torch.int32)).cu_seqlens_q.tolist() == [0, 64, 128, 192]


@cpu
@pytest.mark.parametrize(
    "ids",
    [
        torch.cat([GROWING, GROWING[:70]]),
        torch.cat([GROWING, torch.full((50,), -1), torch.full((50,), 3)]),
        torch.arange(640) // (LEAST_ROWS - 1),
        torch.zeros(LEAST_ROWS - 1),
        torch.zeros(0),
    ],
    ids=["apart", "apart beside none", "short", "few rows", "no rows"],
)
def test_ids_without_borders(ids: Tensor) -> None:
    assert borders_of(ids[None].int()) is None


@cpu
def test_which_masks_say_documents_alone() -> None:
    own = masks.Documents(BATCH)
    for mask in (own, masks.DocumentCausal(BATCH), own & masks.Window(5, 5) & masks.Causal()):
        assert says_documents_alone(mask)
    keys = masks.KeyMask(torch.ones(ROWS) > 0)
    band = masks.Causal() & (masks.Window(5, -1) | masks.SinkTokens(2))
    for mask in (
        masks.Causal(),
        keys & own,
        own & masks.Chunks(64),
        own & band,
        masks.Documents(BATCH, BATCH.clone()),
    ):
        assert not says_documents_alone(mask)


# ---- results -------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 3)},
    "softcap": {"softcap": 5.0, "causal": True},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "ALiBi": {"bias": masks.ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.01]))},
    "distances": {"bias": masks.RelativePosition(torch.linspace(-1, 1, HEADS * 8).reshape(HEADS, 8))},
    "scale": {"scale": -0.3, "deterministic": True},
}


def everything(mask: masks.Mask, tensors: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """out, lse and maxima of attention() with its gradients, and what the functional pair gives."""
    out, aux = flash_ext.attention(*tensors, mask=mask, return_aux=AuxRequest(True, True), **options)
    assert out.is_contiguous() and aux.lse.is_contiguous() and aux.max_scores.is_contiguous()
    factors = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    seen = aux.lse.isfinite()
    found = [out, aux.lse, aux.max_scores]
    found += torch.autograd.grad((out, aux.lse), tensors, (factors, seen.to(aux.lse.dtype)))
    with torch.no_grad():
        # The largest scores are a matter of other kernels on a GPU.
        out, aux = flash_ext.attention(*tensors, mask=mask, return_aux=AuxRequest(lse=True), **options)
        assert torch.equal(flash_ext.attention(*tensors, mask=mask, **options), out)
        pair = flash_ext.forward(*tensors, mask=mask, **options)
        assert torch.equal(pair[0], out) and torch.equal(pair[1], aux.lse)
        grads = flash_ext.backward(
            factors, *tensors, *pair, dlse=seen.to(aux.lse.dtype), mask=mask, **options
        )
        # A mask of its own has not seen a forward.
        fresh = flash_ext.backward(
            factors, *tensors, *pair, dlse=seen.to(aux.lse.dtype), mask=copy.deepcopy(mask), **options
        )
    if options.get("deterministic") or not out.is_cuda:
        assert all(map(torch.equal, grads, fresh))
    return [*found, *grads]


@cpu
@pytest.mark.parametrize("heads_k", [HEADS, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_ids(name: str, heads_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, mask = qkv(heads_k=heads_k, dtype=torch.float64), masks.Documents(BATCH)
    got = everything(mask, tensors, **OPTIONS[name])
    assert runs_packed(mask, *tensors)
    by_ids(monkeypatch)
    mask = masks.Documents(BATCH)
    want = everything(mask, tensors, **OPTIONS[name])
    assert not runs_packed(mask, *tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@cpu
def test_what_packed_sequences_are_not_runs_by_ids() -> None:
    tensors = qkv()
    heads_first = tuple(t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    slopes = masks.ALiBi(torch.rand(2, HEADS))
    for given, options in (
        (heads_first, {}),
        (tensors, {"bias": slopes}),
        (tensors, {"bias": torch.zeros(ROWS, ROWS)}),
        (tensors, {"dropout_p": 0.5}),
    ):
        mask = masks.Documents(BATCH)
        flash_ext.attention(*given, mask=mask, **options)
        if not isinstance(options.get("bias"), Tensor):
            assert not runs_packed(mask, *given, dropout_p=options.get("dropout_p", 0.0))
        flash_ext.attention(*tensors, mask=mask)  # the same mask, where it may
        call = mask._calls[id(None), False, (-1, -1)][1]
        assert call.may_pack(*tensors, 0.0)


@cpu
def test_wide_heads_want_longer_documents() -> None:
    """Of 32 tokens on average; one mask serves both."""
    for length, packs in ((20, False), (32, True)):
        mask = masks.Documents(torch.arange(20 * length) // length)
        for head_dim, may in ((128, True), (160, packs), (64, True)):
            q, k, v = (torch.randn(1, 20 * length, 2, head_dim) for _ in range(3))
            got = flash_ext.attention(q, k, v, mask=mask)
            assert runs_packed(mask, q, k, v) == may
            assert mask._calls[id(None), False, (-1, -1)][1].may_pack(q, k, v, 0.0) == may
            torch.testing.assert_close(
                got, flash_ext.attention(q, k, v, mask=mask.to_dense(20 * length, 20 * length))
            )
            assert torch.equal(got, flash_ext.attention(q, k, v, mask=mask))


@cpu
def test_a_changed_id_is_seen() -> None:
    tensors, ids = qkv(), BATCH.clone()
    mask = masks.Documents(ids)
    flash_ext.attention(*tensors, mask=mask)
    for change in (lambda: ids[0].fill_(4), lambda: ids[0, :5].fill_(9), lambda: ids[0, -5:].fill_(9)):
        change()
        for used in (mask, mask & masks.Causal()):
            got = flash_ext.attention(*tensors, mask=used)
            assert torch.equal(got, flash_ext.attention(*tensors, mask=copy.deepcopy(used)))
    assert not mask._calls[id(None), False, (-1, -1)][1].may_pack(*tensors, 0.0)  # 9 stands apart
    ids.copy_(BATCH)
    mask.refresh()
    got = flash_ext.attention(*tensors, mask=mask)
    assert torch.equal(got, flash_ext.attention(*tensors, mask=masks.Documents(BATCH)))
    assert mask._calls[id(None), False, (-1, -1)][1].may_pack(*tensors, 0.0)


@cpu
@pytest.mark.parametrize("first", ["leaf", "causal", "window"])
@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
def test_refresh_reaches_every_expression(seen: bool, first: str) -> None:
    """Also where no version counter tells of the change."""
    tensors, ids = tuple(t.detach() for t in qkv()), BATCH.clone()
    own = masks.Documents(ids)
    used = {"leaf": own, "causal": own & masks.Causal(), "window": masks.Window(30, 3) & own}
    for mask in (used[first], *used.values()):
        flash_ext.attention(*tensors, mask=mask)
    for others in (BATCH.flip(0), torch.cat([BATCH[:, 160:], BATCH[:, :160]], 1), BATCH % 2):
        (ids if seen else ids.data).copy_(others)
        for mask in used.values():
            mask.refresh()
        for mask in used.values():
            want = flash_ext.attention(*tensors, mask=copy.deepcopy(mask))
            assert torch.equal(flash_ext.attention(*tensors, mask=mask), want)


@cpu
@pytest.mark.parametrize("ids", [BATCH, SHORT], ids=["together", "short"])
def test_layers_and_windows_look_once(ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Tensor] = []
    monkeypatch.setattr(prepared, "borders_of", lambda ids: looks.append(ids) or borders_of(ids))
    tensors, own = qkv(), masks.Documents(ids)
    for mask in (own, own, own & masks.Causal(), own & masks.Window(30, 0)):
        flash_ext.attention(*tensors, mask=mask)
        flash_ext.attention(*tensors, mask=mask, causal=True)
    assert len(looks) == 1
    dropping = masks.Documents(BATCH)
    flash_ext.attention(*tensors, mask=dropping, dropout_p=0.5)
    assert len(looks) == 1  # nobody asks where these begin


@cpu
@pytest.mark.parametrize("ids", [BATCH, GROWING, SHORT], ids=["none", "all", "short"])
def test_bytes_that_are_kept_are_those_that_describe_tells(ids: Tensor) -> None:
    """Where documents begin is one tensor for rows and keys if each row has a document, else two."""
    tensors, own = qkv(), masks.Documents(ids)
    for mask in (own, own & masks.Causal(), masks.DocumentCausal(ids) & masks.KeyMask(torch.ones(ROWS) > 0)):
        mask = copy.deepcopy(mask)
        flash_ext.attention(*tensors, mask=mask)
        (made,), leaf = mask._prepared.made.values(), prepared.kept_in_leaf(mask)
        borders = [] if leaf is None else [t for _, found in leaf.borders.values() for t in found or ()]
        held = {id(t): t.nbytes for t in (*prepared._tensors(made.mods), *borders)}
        assert sum(held.values()) == mask.describe(ROWS, ROWS, batch=2, num_heads=HEADS).memory
        assert bool(borders) == (ids is not SHORT and mask._prepared.is_of_documents)


@cpu
def test_threads_that_prepare_one_mask_find_the_same() -> None:
    tensors = tuple(t.detach() for t in qkv())
    want = flash_ext.attention(*tensors, mask=masks.Documents(BATCH))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            mask, barrier = masks.Documents(BATCH), threading.Barrier(8)

            def call(_: int, mask: masks.Mask = mask, barrier: threading.Barrier = barrier) -> Tensor:
                barrier.wait()
                return flash_ext.attention(*tensors, mask=mask)

            assert all(torch.equal(found, want) for found in pool.map(call, range(8)))


@cpu
def test_in_the_batch_invariant_mode_no_entry_decides_for_others() -> None:
    tensors, mask = tuple(t.detach() for t in qkv()), masks.Documents(BATCH)
    for _ in range(2):
        with serving.set_batch_invariant(True):
            found = flash_ext.attention(*tensors, mask=mask)
            assert not runs_packed(mask, *tensors)
            apart = torch.stack([BATCH[0], torch.arange(ROWS) % 2])
            assert torch.equal(flash_ext.attention(*tensors, mask=masks.Documents(apart))[0], found[0])
            alone = flash_ext.attention(*(t[:1] for t in tensors), mask=masks.Documents(BATCH[:1]))
            assert torch.equal(alone[0], found[0])
        flash_ext.attention(*tensors, mask=mask)


@cpu
def test_results_are_no_views() -> None:
    """A view made under no_grad could not be changed in place by what learns."""
    for batch in (2, 1):
        tensors, mask = tuple(t[:batch] for t in qkv()), masks.Documents(BATCH[:batch])
        with torch.no_grad():
            results = [*flash_ext.forward(*tensors, mask=mask)]
            results += flash_ext.backward(results[0], *tensors, *results, mask=mask)
            results.append(flash_ext.attention(*tensors, mask=mask))
        out = flash_ext.attention(*tensors, mask=mask)
        assert not any(t._is_view() for t in (*results, out))
        factor = torch.ones((), requires_grad=True)
        results[-1].mul_(factor).sum().backward()
        assert factor.grad is not None
        out.detach_()


@cpu
def test_traced_calls_take_ids_of_their_inputs() -> None:
    tensors = tuple(t.detach() for t in qkv())

    def layer(*given: Tensor) -> Tensor:
        return flash_ext.attention(*given[:3], mask=masks.Documents(given[3]))

    flash_ext.attention(*tensors, mask=masks.Documents(BATCH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, (*tensors, BATCH), check_trace=False)
    for ids in (BATCH, BATCH.flip(0), BATCH % 2):
        torch.testing.assert_close(traced(*tensors, ids), layer(*tensors, ids))


@cpu
def test_no_heads() -> None:
    tensors = tuple(t.detach()[:, :, :0] for t in qkv())
    found = flash_ext.forward(*tensors, mask=masks.Documents(BATCH))
    assert [t.shape for t in found] == [(2, ROWS, 0, 16), (2, 0, ROWS)]


@cpu
def test_what_a_graph_reads_runs_by_ids_from_then_on() -> None:
    """Replays may change ids, and no version counter tells."""
    tensors, own = qkv(), masks.Documents(BATCH)
    causal, other = own & masks.Causal(), own & masks.Window(9, -1)
    for mask in (causal, other):
        flash_ext.attention(*tensors, mask=mask)
        assert runs_packed(mask, *tensors)
    kept = prepared.kept_in(causal)
    ((*key, _),) = kept.made
    prepared._for_graph(causal, kept, tuple(key), kept.versions())
    for mask in (causal, other, own & masks.Window(3, 3)):
        flash_ext.attention(*tensors, mask=mask)
        assert not runs_packed(mask, *tensors)


@cpu
def test_compilers_transforms_and_modes_take_ids() -> None:
    tensors, mask = tuple(t.detach() for t in qkv()), masks.Documents(BATCH)
    want = flash_ext.attention(*tensors, mask=mask)
    compiled = torch.compile(lambda *t: flash_ext.attention(*t, mask=mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), want)
    mapped = torch.vmap(lambda *t: flash_ext.attention(*t, mask=mask))(*(t[None] for t in tensors))
    torch.testing.assert_close(mapped[0], want)
    with FlopCounterMode(display=False) as counter:
        flash_ext.attention(*tensors, mask=mask)
    assert counter.get_total_flops() == 4 * 2 * HEADS * ROWS * ROWS * 16


@cpu
def test_explain_says_so() -> None:
    q, k, v = (t.detach().bfloat16() for t in qkv(head_dim=64))
    said = flash_ext.explain(q, k, v, mask=masks.DocumentCausal(BATCH), gpu="9.0/132")
    assert said.forward["call"] == "dense, its documents as packed sequences" == said.backward["call"]
    cu_seqlens = borders_of(BATCH.int())
    packed = flash_ext.explain(*(t.flatten(0, 1) for t in (q, k, v)), *cu_seqlens, causal=True, gpu="9.0/132")
    assert said.forward["launches"] == packed.forward["launches"]
    assert said.backward["launches"] == packed.backward["launches"]
    heads_first = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    said = flash_ext.explain(*heads_first, layout="bhsd", mask=masks.DocumentCausal(BATCH), gpu="9.0/132")
    assert said.forward["call"] == "dense documents"


@cpu
def test_wrong_arguments_are_refused_in_the_words_of_a_dense_call() -> None:
    (q, k, v), mask = (t.detach() for t in qkv()), masks.Documents(BATCH)
    with pytest.raises(ValueError, match=r"\(batch, seqlen, num_heads, head_dim\)"):
        flash_ext.attention(q[0], k[0], v[0], mask=mask)
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match="head_dim"):
            flash_ext.attention(q, k[..., :8], v, mask=mask)
        for keys in (k[:1], torch.cat([k, k])):
            with pytest.raises(ValueError, match="k must have the batch size of q, 2, got"):
                flash_ext.attention(q, keys, keys, mask=mask)
        with pytest.raises(ValueError, match="v must have the sequence length of k, 320, got 640"):
            flash_ext.attention(q, k, torch.cat([v, v], 1), mask=mask)
        out, lse = flash_ext.forward(q, k, v, mask=mask)
        with pytest.raises(ValueError, match=r"lse must have shape \[2, 4, 320\]"):
            flash_ext.backward(out, q, k, v, out, lse[:, :2], mask=mask)


# ---- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "sm80"])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_on_a_gpu(name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {key: move(value) for key, value in OPTIONS[name].items()} | {"backend": backend}
    for head_dim, heads_k in ((64, HEADS), (128, 1)):
        tensors = qkv(head_dim, heads_k, device="cuda", dtype=torch.bfloat16)
        mask = masks.Documents(BATCH.cuda())
        got = everything(mask, tensors, **options)
        assert runs_packed(mask, *tensors)
        with pytest.MonkeyPatch.context() as patch:
            by_ids(patch)
            want = everything(masks.Documents(BATCH.cuda()), tensors, **options)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
            error = (a.float() - b.float()).nan_to_num().abs().max() / b.float().nan_to_num().abs().max()
            assert error < 0.02


def move(value: Any) -> Any:
    return value.to("cuda") if isinstance(value, (Tensor, masks.Bias)) else value


@pytest.mark.gpu
@pytest.mark.caching
def test_a_graph_takes_ids_and_follows_them() -> None:
    tensors = tuple(t.detach() for t in qkv(64, device="cuda", dtype=torch.bfloat16))
    first, second = BATCH.cuda(), (torch.arange(ROWS, device="cuda") // 80).expand(2, ROWS).contiguous()
    ids = first.clone()
    mask = masks.Documents(ids)
    want = {
        name: flash_ext.attention(*tensors, mask=masks.Documents(t))
        for name, t in (("1", first), ("2", second))
    }
    flash_ext.attention(*tensors, mask=mask)
    assert runs_packed(mask, *tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask.refresh()
        captured = flash_ext.attention(*tensors, mask=mask)
    for ids_now, name in ((second, "2"), (first, "1")):
        ids.copy_(ids_now)
        graph.replay()
        torch.testing.assert_close(captured, want[name], rtol=0.02, atol=0.02)
        torch.testing.assert_close(flash_ext.attention(*tensors, mask=mask), want[name], rtol=0.02, atol=0.02)
    assert not runs_packed(mask, *tensors)


@pytest.mark.gpu
def test_only_the_first_call_waits() -> None:
    tensors = qkv(64, device="cuda", dtype=torch.bfloat16)
    mask = masks.Documents(BATCH.cuda())

    def step() -> None:
        flash_ext.attention(*tensors, mask=mask).square().mean().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            flash_ext.attention(*tensors, mask=masks.Documents(mask.ids))
    finally:
        torch.cuda.set_sync_debug_mode("default")
