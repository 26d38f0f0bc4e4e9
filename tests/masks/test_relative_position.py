"""RelativePosition: which entry a distance reads, the bias by distance and written out, their gradients."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext._masks import relative_position
from flash_ext.masks import RelativePosition
from tests.qkv import on_devices

KINDS = [
    {"buckets": 32},
    {"buckets": 8, "max_distance": 20},
    {"buckets": 12, "bidirectional": False, "max_distance": 15},
    {"buckets": 9, "bucketing": "clip"},
    {"buckets": 6, "bucketing": "clip", "bidirectional": False},
    {"buckets": 1, "bucketing": "clip"},
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))


def made(kind: dict[str, Any], heads: int = 3, dtype: torch.dtype = torch.float64) -> RelativePosition:
    options = dict(kind)
    table = torch.randn(heads, options.pop("buckets"), dtype=dtype).requires_grad_()
    return RelativePosition(table, **options)


def detached(bias: RelativePosition) -> RelativePosition:
    options = {"bucketing": bias.bucketing, "bidirectional": bias.bidirectional}
    return RelativePosition(bias.table.detach(), max_distance=bias.max_distance, **options)


def entries_of(buckets: int, **options: Any) -> tuple[Tensor, int]:
    """The entry that each distance from -n to n reads, and n."""
    bias = RelativePosition(torch.arange(buckets, dtype=torch.float64)[None], **options)
    return bias.by_distance(torch.float64)[0, 0].long(), bias.reach


# ---- entries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [
    (32, 128), (32, 20), (32, 1000), (4, 3), (6, 5), (8, 128), (16, 64), (33, 128), (64, 256), (64, 33),
    (128, 150), (256, 300), (320, 800), (20, 81), (12, 96),
])  # fmt: skip
def test_entries_of_t5_are_those_of_the_library(buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Also where not every wide bucket has a distance, and where the number of buckets is odd."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-300, 301)
    theirs = t5.T5Attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    ours, n = entries_of(buckets, bidirectional=bidirectional, max_distance=max_distance)
    assert n == max_distance
    assert torch.equal(ours[distance.clamp(-n, n) + n], theirs)


def test_the_default_is_that_of_t5() -> None:
    bias = RelativePosition(torch.zeros(2, 32))
    assert (bias.bucketing, bias.bidirectional, bias.max_distance, bias.reach) == ("t5", True, 128, 128)


def test_entries_of_clip() -> None:
    for n in (0, 1, 4):
        both, reach = entries_of(2 * n + 1, bucketing="clip")
        assert reach == n and both.tolist() == list(range(2 * n + 1))
        causal, reach = entries_of(n + 1, bucketing="clip", bidirectional=False)
        assert reach == n and causal.tolist() == [*range(n + 1), *[n] * n]


def test_later_keys_of_the_causal_t5_read_the_entry_of_distance_0() -> None:
    entries, n = entries_of(32, bidirectional=False)
    assert set(entries[n:].tolist()) == {0} and entries[0] == 31


# ---- the bias ------------------------------------------------------------------------------------------


@each_kind
def test_by_distance_and_its_gradient_against_loops(kind: dict[str, Any]) -> None:
    bias = made(kind)
    entries, n = entries_of(**kind)
    assert bias.reach == n
    by_distance = bias.by_distance(torch.float64)
    assert by_distance.shape == (1, 3, 2 * n + 1) and by_distance.dtype == torch.float64
    given = torch.randn_like(by_distance)
    expected = torch.zeros_like(bias.table)
    with torch.no_grad():
        for head in range(3):
            for at, entry in enumerate(entries.tolist()):
                assert by_distance[0, head, at] == bias.table[head, entry]
                expected[head, entry] += given[0, head, at]
    (by_autograd,) = torch.autograd.grad(by_distance, bias.table, given)
    torch.testing.assert_close(by_autograd, expected)
    adjoint = bias.gradient(given)
    torch.testing.assert_close(adjoint, expected)
    assert adjoint.dtype == bias.table.dtype and not adjoint.requires_grad


@each_kind
@pytest.mark.parametrize("q_len, k_len, top_left", [
    (5, 5, False), (3, 40, False), (3, 40, True), (40, 7, False), (40, 7, True), (1, 9, False), (0, 4, False),
])  # fmt: skip
def test_to_dense_against_a_loop(kind: dict[str, Any], q_len: int, k_len: int, top_left: bool) -> None:
    bias = made(kind)
    entries, n = entries_of(**kind)
    dense = bias.to_dense(q_len, k_len, top_left=top_left)
    assert dense.shape == (1, 3, q_len, k_len) and dense.dtype == torch.float64
    given = torch.randn_like(dense)
    expected = torch.zeros_like(bias.table)
    for row in range(q_len):
        centre = row if top_left else row + k_len - q_len
        for key in range(k_len):
            entry = entries[n + min(max(key - centre, -n), n)]
            assert torch.equal(dense[0, :, row, key], bias.table[:, entry])
            expected[:, entry] += given[0, :, row, key]
    (gradient,) = torch.autograd.grad(dense, bias.table, given)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types(dtype: torch.dtype) -> None:
    """Narrow tables are widened before anything is summed."""
    bias = made(KINDS[0], dtype=dtype)
    assert bias.by_distance().dtype == torch.float32
    assert bias.to_dense(2, 2).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    given = torch.full((1, 3, 257), 1 + 2**-7)
    (by_autograd,) = torch.autograd.grad(bias.by_distance(), bias.table, given)
    adjoint = bias.gradient(given)
    assert adjoint.dtype == by_autograd.dtype == dtype
    torch.testing.assert_close(adjoint, by_autograd, rtol=0, atol=0)
    # The entry of the far keys serves more than 32 distances: summed in 8 bits, it would stop growing.
    counts = torch.bincount(entries_of(32)[0], minlength=32)
    torch.testing.assert_close(adjoint[0], (counts * (1 + 2**-7)).to(dtype), rtol=0, atol=0)


def test_a_table_that_is_a_view_or_the_result_of_a_layer() -> None:
    weight = torch.nn.Embedding(32, 4).weight
    RelativePosition(weight.t()).by_distance().sum().backward()
    assert weight.grad.shape == (32, 4)
    torch.testing.assert_close(weight.grad[:, 0], torch.bincount(entries_of(32)[0], minlength=32).float())


@each_kind
def test_the_bias_by_distance_is_the_callers_own(kind: dict[str, Any]) -> None:
    """A write to it does not reach the table."""
    bias = detached(made(kind))
    before = bias.table.clone()
    bias.by_distance(torch.float64).zero_()
    assert torch.equal(bias.table, before)


def test_values_that_are_not_finite_stay_where_they_are() -> None:
    table = torch.zeros(1, 5)
    table[0, 3], table[0, 0] = -torch.inf, torch.nan
    by_distance = RelativePosition(table, bucketing="clip").by_distance()[0, 0]
    assert by_distance.isneginf().tolist() == [False, False, False, True, False]
    assert by_distance.isnan().tolist() == [True, False, False, False, False]


# ---- compilers, transforms, modes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dynamic, kinds", [(False, KINDS[:1]), (True, KINDS[1:4])], ids=["static", "dynamic"]
)
def test_compiles_to_one_graph(dynamic: bool, kinds: list[dict[str, Any]]) -> None:
    def weighed(tables: list[Tensor], by: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for table, weights, kind in zip(tables, by, kinds):
            bias = RelativePosition(table, **{name: n for name, n in kind.items() if name != "buckets"})
            total = total + (bias.by_distance()[0, 0] * weights).sum() + bias.to_dense(3, 7).square().sum()
        return total

    tables = [torch.randn(3, kind["buckets"], requires_grad=True) for kind in kinds]
    by = [torch.randn(2 * made(kind).reach + 1) for kind in kinds]
    relative_position._kept.clear()  # nothing of it may be needed, or made, inside
    torch.compiler.reset()
    compiled = torch.compile(weighed, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = [function(tables, by) for function in (compiled, weighed)]
    gradients = [torch.autograd.grad(result, tables) for result in results]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_an_object_made_outside_is_compiled_in() -> None:
    bias = made(KINDS[1])
    compiled = torch.compile(lambda: bias.by_distance(torch.float64), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), bias.by_distance(torch.float64))


def test_exports() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + RelativePosition(self.weight.t()).to_dense(3, 5)

    module, x = Module(), torch.randn(1, 4, 3, 5)
    for strict in (True, False):
        relative_position._kept.clear()
        torch.testing.assert_close(torch.export.export(module, (x,), strict=strict).module()(x), module(x))


def test_transforms_leave_nothing_behind() -> None:
    """What is made inside a transform is dead outside, and what is made in inference mode has no gradient."""
    table = torch.randn(3, 8)

    def loss(table: Tensor) -> Tensor:
        return RelativePosition(table, max_distance=20).by_distance().square().sum()

    expected = torch.autograd.functional.jacobian(loss, table)
    for function in (torch.func.grad(loss), torch.func.jacfwd(loss)):
        relative_position._kept.clear()
        torch.testing.assert_close(function(table), expected)
        torch.testing.assert_close(torch.func.grad(loss)(table), expected)
        torch.testing.assert_close(torch.autograd.functional.jacobian(loss, table), expected)
    relative_position._kept.clear()
    several = torch.stack((table, 2 * table))
    found = torch.func.vmap(torch.func.grad(loss))(several)
    torch.testing.assert_close(found, torch.stack((expected, 2 * expected)))
    relative_position._kept.clear()
    with torch.inference_mode():
        loss(table)
    torch.testing.assert_close(torch.autograd.functional.jacobian(loss, table), expected)


def test_fake_tensors_leave_nothing_behind() -> None:
    relative_position._kept.clear()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert RelativePosition(torch.empty(2, 32)).to_dense(4, 5).shape == (1, 2, 4, 5)
    assert RelativePosition(torch.ones(2, 32)).to_dense(4, 5).sum() == 40


def test_entries_are_made_once() -> None:
    relative_position._kept.clear()
    threads = [threading.Thread(target=made(KINDS[0]).by_distance) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (kept,) = relative_position._kept.values()
    made(KINDS[0]).by_distance()
    assert next(iter(relative_position._kept.values())) is kept


@pytest.mark.gpu
@pytest.mark.caching
@pytest.mark.parametrize("known", [True, False], ids=["made before", "made inside"])
def test_captured_in_a_cuda_graph(known: bool) -> None:
    """Also if the first call of a process is the captured one."""
    table = torch.randn(3, 32, device="cuda", requires_grad=True)
    table.square().sum().backward()  # libraries that cannot be set up inside a capture
    relative_position._kept.clear()
    if known:
        RelativePosition(table).by_distance()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_distance = RelativePosition(table).by_distance()
        given = torch.ones_like(by_distance)
        (gradient,) = torch.autograd.grad(by_distance, table, given)
    with torch.no_grad():
        table.uniform_()
    graph.replay()
    now = RelativePosition(table)
    assert torch.equal(by_distance, now.by_distance())
    torch.testing.assert_close(gradient, now.gradient(torch.ones_like(by_distance)))


@on_devices
def test_on_a_device_and_in_a_fixed_order(device: str) -> None:
    """The entries are those of the CPU, whatever logarithm the device has."""
    on_cpu = made(KINDS[0], dtype=torch.float32)
    bias = RelativePosition(on_cpu.table.detach().to(device).requires_grad_())
    by_distance = bias.by_distance()
    assert torch.equal(by_distance.cpu(), on_cpu.by_distance())
    given = torch.randn_like(by_distance)
    first, second = (torch.autograd.grad(bias.by_distance(), bias.table, given)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(bias.gradient(given), bias.gradient(given))
    torch.testing.assert_close(first, bias.gradient(given))


# ---- the object ----------------------------------------------------------------------------------------


GOOD = torch.zeros(2, 32)


@pytest.mark.parametrize("error, words, table, options", [
    (TypeError, "table must be a torch.Tensor, got list", [[0.0]], {}),
    (TypeError, "table must have a floating dtype, got torch.int64", torch.zeros(2, 32).long(), {}),
    (ValueError, r"table must have the shape .*got \(32,\)", torch.zeros(32), {}),
    (ValueError, r"table must have .*got \(1, 2, 32\).*turned by \.t\(\)", torch.zeros(1, 2, 32), {}),
    (ValueError, "neither of them 0", torch.zeros(0, 32), {}),
    (ValueError, "neither of them 0", torch.zeros(2, 0), {"bucketing": "clip"}),
    (ValueError, "bucketing must be one of t5, clip, got 'log'", GOOD, {"bucketing": "log"}),
    (TypeError, "bidirectional must be a bool, got int", GOOD, {"bidirectional": 1}),
    (TypeError, "max_distance must be an int, got float", GOOD, {"max_distance": 128.0}),
    (TypeError, "max_distance must be an int, got bool", GOOD, {"max_distance": True}),
    (ValueError, "max_distance must be above 8, .*got 8", GOOD, {"max_distance": 8}),
    (ValueError, "max_distance must be above 16", GOOD, {"max_distance": 16, "bidirectional": False}),
    (ValueError, "max_distance must be above 8, .*got -1", GOOD, {"max_distance": -1}),
    (ValueError, "at least 4 buckets", torch.zeros(2, 3), {}),
    (ValueError, "at least 2 buckets", torch.zeros(2, 1), {"bidirectional": False}),
    (ValueError, "max_distance belongs to bucketing='t5', got 128", torch.zeros(2, 5),
     {"bucketing": "clip", "max_distance": 128}),
    (ValueError, "odd number of buckets .*got 32", GOOD, {"bucketing": "clip"}),
])  # fmt: skip
def test_refused_in_words(error: type, words: str, table: Any, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        RelativePosition(table, **options)


@pytest.mark.parametrize("shape", [(3, 257), (1, 2, 257), (1, 3, 255), (2, 3, 257)])
def test_a_gradient_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"dby_distance must have the shape \(1, 3, 257\)"):
        made(KINDS[0]).gradient(torch.zeros(shape))
