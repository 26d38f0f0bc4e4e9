"""A value keeps the call in which it stood: a further one gives what a first one gives, at less host time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash_ext
from flash_ext import _attention, masks
from flash_ext._masks.operands import may_be_copied, with_aligned_rows
from flash_ext._ops import calls, dispatch
from tests.masks.test_prepared_masks import every_kind, some

pytestmark = pytest.mark.everywhere


def biases() -> dict[str, masks.Bias]:
    return {
        "dense": masks.DenseBias(torch.randn(2, 2, 24, 24)),
        "two dimensions": masks.DenseBias(torch.randn(24, 24)),
        "expanded": masks.DenseBias(torch.randn(2, 1, 24).expand(2, 24, 24)),
        "sum": masks.DenseBias(torch.randn(24, 24)) + masks.DenseBias(torch.randn(1, 24)),
        "slopes": masks.ALiBi(torch.rand(2)),
        "slopes to convert": masks.ALiBi(torch.rand(2).double()),
        "both": masks.ALiBi(torch.rand(2)) + masks.DenseBias(torch.randn(24)),
        "position": masks.RelativePosition(torch.randn(2, 32)),
    }


def fresh(value: masks.Mask | masks.Bias | None):
    return None if value is None else copy.deepcopy(value)


@pytest.mark.parametrize("bias", [None, *biases()])
@pytest.mark.parametrize("name", [None, "window", "plain", "documents", "dense"])
def test_a_kept_call_gives_what_a_first_one_gives(name: str | None, bias: str | None):
    plain = {"window": masks.SlidingWindow(5, sink_tokens=2), "plain": masks.Causal(), None: None}
    mask = plain[name] if name in plain else every_kind()[name]
    added = None if bias is None else biases()[bias]
    if mask is None and added is None:
        return
    q, k = some()
    aux = flash_ext.AuxRequest(lse=True, max_scores=True)
    for options in (
        {}, {"causal": True}, {"window_size": (9, 4)}, {"scale": 0.3}, {"softcap": 3.0}, {"scale": 1},
        {"sinks": torch.randn(2)}, {"sinks": torch.randn(2).double()}, {"return_aux": aux},
    ):  # fmt: skip
        if name == "window" and "window_size" in options:
            continue
        expected = flash_ext.attention(q, k, k, mask=fresh(mask), bias=fresh(added), **options)
        for _ in range(2):  # the second one finds what the first has kept
            got = flash_ext.attention(q, k, k, mask=mask, bias=added, **options)
            for a, b in zip(tensors_of(got), tensors_of(expected), strict=True):
                assert torch.equal(a, b), options
    assert (mask if mask is not None else added)._calls
    dropped = []
    for pair in ((mask, added), (fresh(mask), fresh(added))):
        torch.manual_seed(3)
        dropped.append(flash_ext.attention(q, k, k, mask=pair[0], bias=pair[1], dropout_p=0.3))
    assert torch.equal(*dropped)


def tensors_of(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [result[0], *result[1]]


@pytest.mark.parametrize("bias", biases())
def test_gradients_of_a_bias_through_kept_calls(bias: str):
    mask, added = every_kind()["documents"], biases()[bias]
    q, k = some()
    with torch.no_grad():  # keeps a call that knows of no gradient
        for _ in range(2):
            flash_ext.attention(q, k, k, mask=mask, bias=added)
    sources = list(added._tensors())
    for source in sources:
        source.requires_grad_()
    grads = []
    for _ in range(3):
        out = flash_ext.attention(q, k, k, mask=mask, bias=added)
        grads.append(torch.autograd.grad(out.square().sum(), sources))
    expected = flash_ext.attention(q, k, k, mask=fresh(mask), bias=added)
    grads.append(torch.autograd.grad(expected.square().sum(), sources))
    assert all(torch.equal(a, b) for one in grads[:3] for a, b in zip(one, grads[3], strict=True))
    assert all(grad.shape == source.shape for grad, source in zip(grads[0], sources))


def test_a_bias_that_is_written_is_read_anew():
    q, k = some()
    for bias in biases().values():
        for _ in range(2):
            flash_ext.attention(q, k, k, bias=bias)
        for source in bias._tensors():
            if 0 not in source.stride():
                source.mul_(-2)
        expected = flash_ext.attention(q, k, k, bias=fresh(bias))
        assert torch.equal(flash_ext.attention(q, k, k, bias=bias), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_a_table_that_learns_is_read_in_each_call(fused: bool):
    """Fused optimizers write parameters without counting, so no version says that one has changed.

    And a second forward needs a conversion of its own: a backward frees what autograd keeps of the first.
    """
    table = torch.nn.Parameter(torch.randn(2, 32))
    optimizer = torch.optim.AdamW([table], lr=1.0, fused=fused)
    (q, k), learned = some(), masks.RelativePosition(table)
    for _ in range(2):
        for _ in range(2):
            out = flash_ext.attention(q, k, k, bias=learned)
            (table.grad,) = torch.autograd.grad(out.sin().sum(), table)
        optimizer.step()
        with torch.no_grad():
            got = flash_ext.attention(q, k, k, bias=learned)
            assert torch.equal(got, flash_ext.attention(q, k, k, bias=fresh(learned)))
            assert not torch.equal(got, out)
    assert not hasattr(learned, "_calls")


def test_a_detached_table_is_converted_once_and_changes_are_seen(monkeypatch: pytest.MonkeyPatch):
    table, made = torch.nn.Parameter(torch.randn(2, 32)), []
    convert = masks.RelativePosition.by_distance

    def counted(self: masks.RelativePosition, dtype: torch.dtype) -> torch.Tensor:
        made.append(dtype)
        return convert(self, dtype)

    monkeypatch.setattr(masks.RelativePosition, "by_distance", counted)
    (q, k), bias = some(), masks.RelativePosition(table.detach())
    for change in (1, -2):
        with torch.no_grad():
            table.mul_(change)  # as optimizers do that count
        made.clear()
        got = [flash_ext.attention(q, k, k, bias=bias) for _ in range(3)]
        assert len(made) == 1
        wanted = flash_ext.attention(q, k, k, bias=masks.RelativePosition(table))
        assert all(torch.equal(out, wanted) for out in got)


@pytest.mark.parametrize("kind", ["plain", "expanded", "sum"])
def test_copies_with_aligned_rows_follow_their_sources(kind: str, monkeypatch: pytest.MonkeyPatch):
    """As calls on a GPU make them of rows of 197 elements."""
    read: list[torch.Tensor] = []
    arguments = calls.modifier_arguments
    monkeypatch.setattr(calls, "_copies_rows", lambda q: True)
    monkeypatch.setattr(
        calls, "modifier_arguments", lambda mods: (read.append(mods.bias), arguments(mods))[1]
    )
    source = torch.randn(2, 1 if kind == "expanded" else 197, 197)
    bias: masks.Bias = masks.DenseBias(source.expand(2, 197, 197))
    if kind == "sum":
        bias = bias + masks.DenseBias(torch.randn(197, 197))
    q, k = torch.randn(1, 197, 2, 16), torch.randn(1, 197, 2, 16)
    for change in (1, -2):
        source.mul_(change)
        want = flash_ext.attention(q, k, k, bias=fresh(bias))
        for _ in range(2):  # the second one reads the copy
            assert torch.equal(flash_ext.attention(q, k, k, bias=bias), want)
    held = read[-1]
    assert held.untyped_storage().nbytes() == bias.describe(197, 197).kept > 0 and held.stride(-2) == 200


def test_a_bias_with_odd_rows_is_copied_into_aligned_ones():
    bias = torch.randn(2, 1, 24, 77)
    aligned = with_aligned_rows(bias)
    assert torch.equal(aligned, bias) and aligned.stride() == (24 * 80, 24 * 80, 80, 1)
    assert may_be_copied(bias, 77, 81) and not may_be_copied(aligned, 77, 81)
    learned = bias.clone().requires_grad_()
    assert not any(may_be_copied(t, 77, 81) for t in (learned, bias[..., :1], aligned[..., :76]))
    assert not may_be_copied(bias, 64, 81)
    assert not may_be_copied(bias, 77, 80)  # a short sequence up to 80 there


def test_pairs_of_kept_calls():
    mask, bias, (q, k) = every_kind()["dense"], biases()["dense"], some()
    out, lse = flash_ext.forward(q, k, k, mask=mask, bias=bias)
    for _ in range(3):
        again = flash_ext.forward(q, k, k, mask=mask, bias=bias)
        assert all(torch.equal(a, b) for a, b in zip(again, (out, lse), strict=True))
        got = flash_ext.backward(out, q, k, k, out, lse, mask=mask, bias=bias, dlse=lse)
        want = flash_ext.backward(out, q, k, k, out, lse, mask=fresh(mask), bias=fresh(bias), dlse=lse)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_packed_kept_calls():
    cu = torch.tensor([0, 9, 24, 48], dtype=torch.int32)
    q = torch.randn(48, 2, 8)
    mask = masks.DocumentCausal(torch.arange(48) // 5)
    expected = flash_ext.attention_varlen(q, q, q, cu, cu, mask=copy.deepcopy(mask))
    for bound in (None, 30, torch.tensor(30)):
        got = flash_ext.attention_varlen(q, q, q, cu, cu, mask=mask, max_seqlen_q=bound, max_seqlen_k=bound)
        assert torch.equal(got, expected)
    other = torch.tensor([0, 48], dtype=torch.int32)
    got = flash_ext.attention_varlen(q, q, q, other, other, mask=mask)
    assert torch.equal(got, flash_ext.attention_varlen(q, q, q, other, other, mask=copy.deepcopy(mask)))


@pytest.mark.parametrize(
    "change",
    [
        {"causal": "yes"}, {"scale": torch.ones(())}, {"softcap": torch.ones(())}, {"softcap": -1.0},
        {"dropout_p": 2.0}, {"sinks": torch.ones(3)}, {"backend": "sm90"}, {"window_size": (1, 2, 3)},
        {"scale": float("nan")}, {"v": torch.randn(2, 23, 2, 8)}, {"k": torch.randn(2, 24, 3, 8)},
        {"q": torch.randn(24, 2, 8)}, {"q": torch.randn(1, 24, 2, 8)}, {"q": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_masked", [True, False])
def test_kept_calls_refuse_in_the_same_words(change: dict, is_masked: bool):
    """Whether a mask keeps the call, or calls without one are kept by their sizes."""
    q, k = some()
    given = {"q": q, "k": k, "v": k, "softcap": 3.0}
    given |= {"mask": masks.DocumentCausal(torch.arange(24) // 5)} if is_masked else {}
    flash_ext.attention(**given)
    said = []
    for mask in [given["mask"], copy.deepcopy(given["mask"])] if is_masked else [None, None]:
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as refusal:
            flash_ext.attention(**given | {"mask": mask} | change)
        said.append(str(refusal.value))
        if not is_masked:
            calls.BY_SIZES.clear()
    assert said[0] == said[1]


MODIFIERS = ({"softcap": 3.0}, {"sinks": torch.tensor([0.5, -1.0])}, {"softcap": 2, "causal": True},
             {"softcap": 3.0, "window_size": (5, 0)})  # fmt: skip


@pytest.mark.parametrize("options", [*MODIFIERS, {"dropout_p": 0.3}])
def test_calls_without_values_are_kept_by_their_sizes(options: dict):
    """Forward and backward, of any numbers in the same sizes; of other sizes another call is kept."""
    calls.BY_SIZES.clear()
    for sizes in range(1, 3):
        for _ in range(2):
            given = [torch.randn(2, 8 * sizes, 2, 16, requires_grad=True) for _ in "qkv"]
            found = []
            for is_kept in (True, False):
                kept = dict(calls.BY_SIZES)
                if not is_kept:
                    calls.BY_SIZES.clear()
                torch.manual_seed(3)
                out = flash_ext.attention(*given, **options)
                found.append([out, *torch.autograd.grad(out.sin().sum(), given)])
                calls.BY_SIZES.update(kept)
            assert all(map(torch.equal, *found))
        assert len(calls.BY_SIZES) == sizes


@pytest.mark.parametrize("first", [{"softcap": 3.0}, {"sinks": torch.zeros(2)}, {"dropout_p": 0.5}, {}])
@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=["none", "causal"])
def test_a_kept_call_serves_others_by_the_plain_operator(mask: masks.Mask | None, first: dict):
    """What the first call asked for beside mask and bias says nothing of a later one."""
    calls.BY_SIZES.clear()
    (q, k), mask = some(), copy.deepcopy(mask)
    flash_ext.attention(q, k, k, mask=mask, return_aux=flash_ext.AuxRequest(lse=True), **first)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        flash_ext.attention(q, k, k, mask=mask, return_aux=flash_ext.AuxRequest(lse=True))
        flash_ext.attention(q, k, k, mask=mask, softcap=3.0)
    ran = [event.key for event in seen.key_averages() if event.key.startswith("flash_ext::")]
    assert sorted(ran) == ["flash_ext::fwd", "flash_ext::fwd_mod"]


@pytest.mark.parametrize("name", [None, "documents"])
def test_no_kept_call_stands_for_numbers_of_another_type(name: str | None):
    """1 and 1.0 are one key of a dict, and 1.0 is refused."""
    (q, k), mask = some(), name and every_kind()[name]
    flash_ext.attention(q, k, k, mask=mask, softcap=3.0, window_size=(1, 1))
    for window in ((1.0, 1), (1, 1.0)):
        with pytest.raises(TypeError, match="window_size must be a pair of ints"):
            flash_ext.attention(q, k, k, mask=mask, softcap=3.0, window_size=window)


def test_a_kept_call_leaves_checks_and_types_as_they_were():
    """Nested tensors and generators are refused, and a subclass keeps its type, whatever ran before."""

    class Own(torch.Tensor):
        pass

    q, k = some()
    flash_ext.attention(q, k, k, softcap=3.0)
    nested = torch.nested.nested_tensor([*q])
    with pytest.raises(TypeError, match="q must be a"):
        flash_ext.attention(nested, nested, nested, softcap=3.0)
    with pytest.raises(TypeError, match="generator"):
        flash_ext.attention(q, k, k, softcap=3.0, generator="x")
    assert type(flash_ext.attention(q, k.as_subclass(Own), k, softcap=3.0)) is Own


def test_sizes_keep_so_many_calls():
    for rows in range(1, calls.MOST_CALLS + 2):
        q = torch.randn(1, rows, 1, 8)
        flash_ext.attention(q, q, q, softcap=3.0)
        assert len(calls.BY_SIZES) <= calls.MOST_CALLS


def test_layers_take_the_short_way(monkeypatch: pytest.MonkeyPatch):
    """Out alone under a value that keeps its call; all else takes the longer way, to the same results."""
    q, k = (t.requires_grad_() for t in some())
    cu = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    mask, bias = every_kind()["documents"], masks.ALiBi(torch.rand(2))

    def dense(**more):
        return flash_ext.attention(q, k, k, **more)

    def packed(**more):
        return flash_ext.attention_varlen(q[0], k[0], k[0], cu, cu, **more)

    def heads_first(**more):
        return flash_ext.attention(*(t.transpose(1, 2) for t in (q, k, k)), layout="bhsd", **more)

    def without_values(mask, softcap=3.0, **more):
        return flash_ext.attention(q, k, k, softcap=softcap, **more)

    longer = []
    original = _attention.run_modified_fwd
    monkeypatch.setattr(_attention, "run_modified_fwd", lambda *a, **b: longer.append(b) or original(*a, **b))
    for call in (dense, packed, heads_first, without_values):
        value = {"bias": bias} if call is packed else {"mask": mask}
        out = call(**value)
        longer.clear()
        for options in ({}, {"dropout_p": 0.0}, {"softcap": 9.0}, {"sinks": torch.zeros(2)}):
            got = call(**value, **options)
            assert not longer, options
            wanted, _ = call(**value, **options, return_aux=flash_ext.AuxRequest())
            assert longer, options
            longer.clear()
            assert torch.equal(got, wanted)
            grads = [torch.autograd.grad(t.sin().sum(), (q, k)) for t in (got, wanted)]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert torch.equal(call(**value), out)
        for options in ({"dropout_p": 0.1}, {"generator": torch.Generator()}):
            call(**value, **options)
            assert longer, options
            longer.clear()


@pytest.mark.parametrize("heads_k", [2, 1])
def test_heads_first_looks_for_no_words(heads_k: int, monkeypatch: pytest.MonkeyPatch):
    """What puts refusals into words is not asked where a call is right."""
    q, k = (t.transpose(1, 2) for t in some())
    k, mask = k[:, :heads_k], every_kind()["documents"]

    def run(**more):
        return flash_ext.attention(q, k, k, layout="bhsd", **more)

    wanted = [run(mask=mask), run(causal=True)]
    monkeypatch.setattr(dispatch, "explain_tensors", lambda *a, **b: pytest.fail("words are looked for"))
    assert all(map(torch.equal, [run(mask=mask), run(causal=True)], wanted))


@pytest.mark.filterwarnings("ignore::UserWarning")  # about prototypes
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("kind", ["sparse", "nested", "mkldnn", "array"])
def test_heads_first_refuses_other_tensors_in_the_same_words(kind: str, name: str):
    q, _ = (t.transpose(1, 2) for t in some())
    other = {
        "sparse": q.to_sparse, "nested": lambda: torch.nested.nested_tensor([*q]),
        "mkldnn": q.contiguous().to_mkldnn, "array": q.numpy,
    }[kind]()  # fmt: skip
    given, mask = {"q": q, "k": q, "v": q, "layout": "bhsd"}, every_kind()["documents"]
    flash_ext.attention(**given, mask=mask)
    said = []
    for options in ({"layout": "bshd"}, {}, {"mask": mask}, {"softcap": 1.0}):
        with pytest.raises(TypeError, match=f"{name} must be a") as refusal:
            flash_ext.attention(**given | {name: other} | options)
        said.append(str(refusal.value))
    assert len({*said}) == 1


def test_a_kept_call_of_another_bias_is_not_taken():
    mask, (q, k) = every_kind()["dense"], some()
    for _ in range(20):  # objects that may lie where one before has lain
        bias = masks.DenseBias(torch.randn(24, 24))
        expected = flash_ext.attention(q, k, k, mask=fresh(mask), bias=fresh(bias))
        assert torch.equal(flash_ext.attention(q, k, k, mask=mask, bias=bias), expected)
    assert len(mask._calls) <= calls.MOST_CALLS


def test_tensors_without_values_take_no_kept_call():
    mask, (q, k) = every_kind()["documents"], some()
    flash_ext.attention(q, k, k, mask=mask)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        assert flash_ext.attention(fake, fake, fake, mask=mask).shape == q.shape
    with FlopCounterMode(display=False) as counter:
        flash_ext.attention(q, k, k, mask=mask)
    assert counter.get_total_flops() > 0
