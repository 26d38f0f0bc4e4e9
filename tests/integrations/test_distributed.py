"""DTensor: two processes, replicated, batch-sharded and head-sharded, against one process.

The same checks run over gloo on the CPU and over NCCL on two GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, distributed

import flash_ext
from flash_ext import masks
from tests import processes
from tests.processes import process_group

WORLD_SIZE = 2


def draw(mesh, *shapes: tuple[int, ...]) -> list[Tensor]:
    """The same tensors in every process, on its device: float32 on the CPU, bfloat16 on a GPU."""
    generator = torch.Generator().manual_seed(len(shapes[0]))
    dtype = torch.float32 if mesh.device_type == "cpu" else torch.bfloat16
    return [torch.randn(shape, generator=generator).to(mesh.device_type, dtype) for shape in shapes]


# ---- what each process runs ------------------------------------------------------------------------------

Call = Callable[..., tuple[Tensor, ...]]


def agree(
    mesh, call: Call, inputs: Sequence[Tensor], placements: Sequence, what: str, **limits: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The results of a call, and their gradients, are with sharded inputs those of one process.

    Returns what it gave with sharded inputs. Its first result counts for the gradients, and its second.
    """
    from torch.distributed.tensor import distribute_tensor

    def run(given: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        results = call(*leaves)
        loss = results[0].sin().sum()
        if len(results) > 1:
            loss = loss + torch.where(results[1].isfinite(), results[1], 0.0).sum()
        return results, torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])

    expected, wanted = run([*inputs])
    sharded = zip(inputs, placements, strict=True)
    results, grads = run([distribute_tensor(t.detach(), mesh, [placement]) for t, placement in sharded])
    for got, truth in zip((*results, *grads), (*expected, *wanted), strict=True):
        close(got.full_tensor(), truth, what, **limits)
    return results, grads


def close(got: Tensor, expected: Tensor, what: str, **limits: float) -> None:
    torch.testing.assert_close(got, expected, **limits, msg=lambda text: f"{what}: {text}")


def summed_in_another_order(mesh) -> dict[str, float]:
    """On a GPU gradients may be, from weights that are rounded to bfloat16."""
    return {} if mesh.device_type == "cpu" else {"atol": 2e-2, "rtol": 2e-2}


def check_dense(mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard

    def call(*qkv: Tensor) -> tuple[Tensor, ...]:
        request = flash_ext.AuxRequest(lse=True)
        out, (lse, _) = flash_ext.attention(*qkv, causal=True, return_aux=request)
        return out, lse

    inputs = draw(mesh, (4, 10, 4, 8), (4, 10, 2, 8), (4, 10, 2, 8))
    for placement, of_lse in (
        (Replicate(), Replicate()),
        (Shard(0), Shard(0)),  # batch
        (Shard(2), Shard(1)),  # heads
        (Shard(1), None),  # sequence: redistributed to something that works
    ):
        (out, lse), _ = agree(mesh, call, inputs, [placement] * 3, f"dense, {placement}")
        if of_lse is not None:
            assert out.placements == (placement,) and lse.placements == (of_lse,)


def check_packed(mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard

    inputs = draw(mesh, (10, 4, 8), (10, 2, 8), (10, 2, 8))
    inputs.append(torch.tensor([0, 3, 3, 9], dtype=torch.int32, device=mesh.device_type))

    def call(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
        return (flash_ext.attention_varlen(q, k, v, bounds, bounds, causal=True),)

    for placement, kept in ((Replicate(), True), (Shard(1), True), (Shard(0), False)):
        placements = [placement, placement, placement, Replicate()]
        (out,), _ = agree(mesh, call, inputs, placements, f"packed, {placement}")
        assert (out.placements == (placement,)) == kept


def check_groups_stay_whole(mesh) -> None:
    """Three key heads on two ranks: sharding heads would part query heads from their key head."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs = draw(mesh, (4, 10, 6, 8), (4, 10, 3, 8), (4, 10, 3, 8))
    got = flash_ext.attention(*(distribute_tensor(t, mesh, [Shard(2)]) for t in inputs))
    assert got.placements != (Shard(2),)
    assert got.placements in ((Replicate(),), (Shard(0),))
    torch.testing.assert_close(got.full_tensor(), flash_ext.attention(*inputs))


def check_compiled(mesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    inputs = draw(mesh, (4, 10, 4, 8), (4, 10, 2, 8), (4, 10, 2, 8))
    compiled = torch.compile(flash_ext.attention, fullgraph=True, backend="aot_eager")
    sharded = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in inputs]
    got = compiled(*sharded, causal=True)
    got.sum().backward()
    leaves = [t.requires_grad_() for t in inputs]
    out = flash_ext.attention(*leaves, causal=True)
    torch.testing.assert_close(got.full_tensor(), out)
    for t, grad in zip(sharded, torch.autograd.grad(out.sum(), leaves), strict=True):
        torch.testing.assert_close(t.grad.full_tensor(), grad)


def modifier_options(mesh, batch: int, rows: int, heads: int, packed: bool) -> dict[str, dict[str, Tensor]]:
    """Calls with modifiers that have a batch or head dimension, and with some that are broadcast over it."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(mesh.device_type)

    def ints(highest: int, *shape: int) -> Tensor:
        return torch.randint(0, highest, shape, generator=generator).int().to(mesh.device_type)

    lead = () if packed else (batch,)
    spans = ints(rows, *lead, heads, rows, 2).sort(-1).values
    return {
        "own bias": {"bias": normal(batch, heads, rows, rows)},
        "shared bias": {"bias": normal(1, heads, rows, rows)},
        "bias of all": {"bias": normal(1, 1, rows, rows)},
        "bias by entry": {"bias": normal(batch, 1, 1, rows)},
        "own mask": {"mask": normal(batch, heads, rows, rows) > -1},
        "shared mask": {"mask": normal(1, 1, rows, rows) > -1},
        "structure": {"documents": ints(2, *lead, rows), "prefix": ints(rows, batch)},
        "own intervals": {"hidden_rows": spans},
        "shared intervals": {"hidden_keys": spans[..., :1, :, :].contiguous()},
        "slopes": {"slopes": normal(heads), "sinks": normal(heads)},
        "own slopes": {"slopes": normal(batch, heads)},
        "table": {"table": normal(heads, 7)},
        "shared table": {"table": normal(1, 7)},
    }


def as_values(parts: dict[str, Tensor]) -> dict:
    """The keywords of a causal call of which the tensors are parts."""
    given = dict(parts)
    mask: masks.Mask = masks.Causal()
    if "prefix" in given:
        mask = mask | masks.Prefix(given.pop("prefix"))
    kinds = {"documents": masks.Documents, "mask": masks.Dense, "hidden_rows": masks.HiddenRows,
             "hidden_keys": masks.HiddenKeys}  # fmt: skip
    for name, kind in kinds.items():
        if name in given:
            mask = mask & kind(given.pop(name))
    if "slopes" in given:
        given["bias"] = masks.ALiBi(given.pop("slopes"))
    if "table" in given:
        given["bias"] = masks.RelativePosition(given.pop("table"), bucketing="clip")
    return given | {"mask": mask}


def check_modifiers(mesh, packed: bool = False) -> None:
    """Every modifier, sharded along or broadcast: results and all gradients are those of one process."""
    from torch.distributed.tensor import Replicate, Shard

    batch, heads, rows = 4, 4, 10
    shapes = [(batch, rows, h, 8) for h in (heads, 2, 2)]
    bounds: tuple[Tensor, ...] = ()
    if packed:
        batch, shapes = 3, [(rows, h, 8) for h in (heads, 2, 2)]
        bounds = (torch.tensor([0, 3, 3, 9], dtype=torch.int32, device=mesh.device_type),) * 2
    inputs = draw(mesh, *shapes)
    attention = flash_ext.attention_varlen if packed else flash_ext.attention
    of_qkv = [Replicate(), Shard(1)] if packed else [Replicate(), Shard(2), Shard(0)]
    for name, options in modifier_options(mesh, batch, rows, heads, packed).items():

        def call(*tensors: Tensor, names: tuple[str, ...] = tuple(options)) -> tuple[Tensor, ...]:
            given = tensors[: -len(names)]
            parts = dict(zip(names, tensors[-len(names) :], strict=True))
            aux = flash_ext.AuxRequest(lse=True, max_scores=True)
            out, (lse, top) = attention(*given, return_aux=aux, **as_values(parts))
            return out, lse, top

        everywhere = [*bounds, *options.values()]
        for placement in of_qkv:
            placements = [placement] * 3 + [Replicate()] * len(everywhere)
            what, limits = f"{name}, {placement}", summed_in_another_order(mesh)
            (out, _, _), _ = agree(mesh, call, [*inputs, *everywhere], placements, what, **limits)
            assert out.placements == (placement,), f"{what}: became {out.placements}"


def check_packed_modifiers(mesh) -> None:
    check_modifiers(mesh, packed=True)


def check_sharded_modifiers(mesh) -> None:
    """Modifiers that come sharded already stay where they are, and a gradient has their shape."""
    from torch.distributed.tensor import Shard

    def dense_and_alibi(*given: Tensor) -> tuple[Tensor, ...]:
        both = masks.DenseBias(given[3]) + masks.ALiBi(given[4])
        return (flash_ext.attention(*given[:3], bias=both),)

    def by_table(*given: Tensor) -> tuple[Tensor, ...]:
        return (flash_ext.attention(*given[:3], bias=masks.RelativePosition(given[3], max_distance=6)),)

    qkv = draw(mesh, (4, 10, 4, 8), (4, 10, 2, 8), (4, 10, 2, 8))
    bias, slopes, table = draw(mesh, (4, 4, 10, 10), (4, 4), (4, 8))
    for call, own, of_qkv, of_own in (
        (dense_and_alibi, [bias, slopes.float()], Shard(0), Shard(0)),
        (dense_and_alibi, [bias, slopes.float()], Shard(2), Shard(1)),
        (by_table, [table.float()], Shard(2), Shard(0)),
    ):
        placements = [of_qkv] * 3 + [of_own] * len(own)
        what, limits = f"{call.__name__}, {of_qkv}", summed_in_another_order(mesh)
        (out,), grads = agree(mesh, call, [*qkv, *own], placements, what, **limits)
        assert out.placements == (of_qkv,)
        assert [grad.placements for grad in grads] == [(placement,) for placement in placements]


def check_prepared_masks(mesh) -> None:
    """What a mask keeps is sharded as its tensor is, and serves further layers and their gradients."""
    from torch.distributed.tensor import Shard, distribute_tensor

    q, k = draw(mesh, (4, 10, 4, 8), (4, 10, 2, 8))
    (dense,) = draw(mesh, (4, 4, 10, 10))
    (ids,) = draw(mesh, (4, 10))
    for of_qkv, tensor, of_mask in (
        (Shard(0), dense > -1, Shard(0)),
        (Shard(2), dense > -1, Shard(1)),
        (Shard(0), (ids > 0).int(), Shard(0)),
    ):
        kind = masks.Dense if tensor.dtype == torch.bool else masks.Documents
        results = []
        for given in (tensor, distribute_tensor(tensor, mesh, [of_mask])):
            mask = kind(given)
            leaves = [t.detach() for t in (q, k)]
            if given is not tensor:
                leaves = [distribute_tensor(t, mesh, [of_qkv]) for t in leaves]
            leaves = [t.requires_grad_() for t in leaves]
            out = leaves[0]
            for _ in range(2):
                out = flash_ext.attention(out, leaves[1], leaves[1], mask=mask)
            results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
            (found,) = mask._prepared.made.values()
            kept = [t for t in (found.mods.mask, found.mods.document_q) if t is not None]
            assert all(getattr(t, "placements", (of_mask,)) == (of_mask,) for t in kept) and len(kept) == 1
        for plain, sharded in zip(*results, strict=True):
            what = f"prepared {kind.__name__}, {of_mask}"
            close(sharded.full_tensor(), plain, what, **summed_in_another_order(mesh))


def check_dropout_is_not_sharded(mesh) -> None:
    """Which weights are dropped depends on the place in the whole call: inputs are gathered first."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs = draw(mesh, (4, 10, 4, 8), (4, 10, 2, 8), (4, 10, 2, 8))
    rng = torch.tensor([5, 3], device=mesh.device_type)
    expected, _ = flash_ext.forward(*inputs, dropout_p=0.4, rng=rng)
    for placement in (Shard(0), Shard(2)):
        sharded = [distribute_tensor(t, mesh, [placement]) for t in inputs]
        got, _ = flash_ext.forward(*sharded, dropout_p=0.4, rng=distribute_tensor(rng, mesh, [Replicate()]))
        assert got.placements == (Replicate(),)
        torch.testing.assert_close(got.full_tensor(), expected)


CHECKS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        check_dense,
        check_packed,
        check_groups_stay_whole,
        check_compiled,
        check_modifiers,
        check_packed_modifiers,
        check_sharded_modifiers,
        check_prepared_masks,
        check_dropout_is_not_sharded,
    )
}


def run_all(rank: int, size: int, port: int, backend: str) -> None:
    # Sharding rules are registered when DTensor comes into use, and not by importing flash_ext.
    assert "flash_ext._ops.dtensor" not in sys.modules
    with process_group(rank, WORLD_SIZE, port, backend):
        from torch.distributed.tensor import init_device_mesh

        mesh = init_device_mesh("cuda" if backend == "nccl" else "cpu", (WORLD_SIZE,))
        for check in CHECKS.values():
            check(mesh)


# ---- the tests -------------------------------------------------------------------------------------------


@processes.forked
@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")
def test_dtensor_on_two_processes() -> None:
    processes.start(run_all, WORLD_SIZE, "gloo")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")
def test_dtensor_on_two_gpus() -> None:
    if torch.cuda.device_count() < WORLD_SIZE:
        pytest.skip("needs two CUDA devices")
    if not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    processes.start(run_all, WORLD_SIZE, "nccl", on_gpus=True)
