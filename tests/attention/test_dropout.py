"""Which weights dropout drops, forward and backward, and where its numbers come from."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_ext
from tests import philox
from tests.attention.calls import differentiate, make_qkv
from tests.cases import dense, packed
from tests.graphs import capture
from tests.harness import Target, on_all_tiles, on_gpu_paths, on_paths, run_cases


def units(rows: int, first: int, width: int, device: str) -> Tensor:
    """(rows, width) float16: row first + c is the c-th unit vector, the others are 0."""
    unit = torch.zeros(rows, width, dtype=torch.float16, device=device)
    inside = min(width, rows - first)
    unit[first : first + inside, :inside] = torch.eye(inside, dtype=torch.float16, device=device)
    return unit


def forward_mask(
    rng: Tensor, p: float, shape: tuple[int, int, int, int, int], head_dim: int, path: str, **options
) -> Tensor:
    """(batch, heads, rows, keys) bool, what the forward kept: with q = 0 and v = I out shows the weights."""
    batch, rows, keys, heads, heads_k = shape
    q = torch.zeros(batch, rows, heads, head_dim, dtype=torch.float16, device=rng.device)
    k = torch.zeros(batch, keys, heads_k, head_dim, dtype=torch.float16, device=rng.device)
    parts = []
    for first in range(0, keys, head_dim):
        v = units(keys, first, head_dim, rng.device)[None, :, None].expand(batch, -1, heads_k, -1)
        out, _ = flash_ext.forward(q, k, v, dropout_p=p, rng=rng, backend=path, **options)
        parts.append(out.transpose(1, 2) != 0)
    return torch.cat(parts, -1)[..., :keys]


def backward_mask(
    rng: Tensor, p: float, shape: tuple[int, int, int, int, int], head_dim: int, path: str
) -> Tensor:
    """The same from dv = w^T dout with dout = I on one query head of each group at a time."""
    batch, rows, keys, heads, heads_k = shape
    group = heads // heads_k
    q = torch.zeros(batch, rows, heads, head_dim, dtype=torch.float16, device=rng.device)
    k, v = (
        torch.zeros(batch, keys, heads_k, head_dim, dtype=torch.float16, device=rng.device) for _ in range(2)
    )
    options = {"dropout_p": p, "rng": rng, "backend": path}
    out, lse = flash_ext.forward(q, k, v, **options)
    kept = torch.zeros(batch, heads, rows, keys, dtype=torch.bool, device=rng.device)
    for first in range(0, rows, head_dim):
        unit = units(rows, first, head_dim, rng.device)
        last = min(first + head_dim, rows)
        for member in range(group):
            dout = torch.zeros_like(out)
            dout[:, :, member::group] = unit[None, :, None]
            _, _, dv = flash_ext.backward(dout, q, k, v, out, lse, **options)  # (b, keys, heads_k, head_dim)
            kept[:, member::group, first:last] = dv.permute(0, 2, 3, 1)[:, :, : last - first] != 0
    return kept


def random_rng(device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (2,), generator=generator).to(device)


def defined_mask(rng: Tensor, p: float, shape: tuple[int, int, int, int, int]) -> Tensor:
    """By the definition, computed on the CPU whatever the device of the call."""
    batch, rows, keys, heads, _ = shape
    return philox.kept(rng.cpu(), p, torch.arange(batch), heads, rows, keys).to(rng.device)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@on_all_tiles
def test_forward_and_backward_drop_what_the_definition_says(target: Target, head_dim: int, p: float) -> None:
    """The mask that the CPU computes, bit for bit, seen in out and in dv, for every tile and group."""
    shapes = [(2, 200, 300, 4, 2), (1, 65, 130, 3, 1)] if target.device == "cuda" else [(2, 40, 70, 4, 2)]
    with target.active():
        for seed, shape in enumerate(shapes):
            rng = random_rng(target.device, seed)
            wanted = defined_mask(rng, p, shape)
            assert torch.equal(forward_mask(rng, p, shape, head_dim, target.choice), wanted), f"out, {shape}"
            assert torch.equal(backward_mask(rng, p, shape, head_dim, target.choice), wanted), f"dv, {shape}"


@on_paths
def test_masks_and_packing_do_not_move_the_draws(target: Target) -> None:
    """A key outside a window draws like any other; a sequence draws by its place in the batch."""
    rng, shape = random_rng(target.device, 5), (2, 130, 190, 2, 1)
    with target.active():
        wanted = defined_mask(rng, 0.5, shape)
        seen = torch.ones(130, 190, dtype=torch.bool, device=target.device).tril(60)
        got = forward_mask(rng, 0.5, shape, 128, target.choice, causal=True)
        assert torch.equal(got, wanted & seen)
        q = torch.zeros(130 + 7, 2, 256, dtype=torch.float16, device=target.device)
        k = torch.zeros(190 + 9, 1, 256, dtype=torch.float16, device=target.device)
        v = torch.cat([units(9, 0, 256, target.device), units(190, 0, 256, target.device)])[:, None]
        cu_q, cu_k = (
            torch.tensor(x, dtype=torch.int32, device=target.device) for x in ([0, 7, 137], [0, 9, 199])
        )
        out, _ = flash_ext.forward(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, dropout_p=0.5, rng=rng, backend=target.choice
        )
        assert torch.equal(out[7:, :, :190].transpose(0, 1) != 0, wanted[1])
        assert torch.equal(out[:7, :, :9].transpose(0, 1) != 0, wanted[0, :, :7, :9])


@on_all_tiles
def test_gradients_of_everything_under_dropout(target: Target) -> None:
    """dq by either kernel, dk, and the gradient of a bias see the same mask as out: against the oracle."""
    rows = 190 if target.device == "cuda" else 20
    cases = [
        dense(
            2,
            rows,
            257,
            4,
            2,
            head_dim,
            causal=causal,
            deterministic=deterministic,
            seed=head_dim,
            mods=("bias_1hqk", f"drop{p}"),
        )
        for head_dim in (64, 128, 256)
        for causal, deterministic in ((False, True), (True, False))
        for p in (0.1, 0.9)
    ]
    run_cases(cases, target, cpu=3)


@on_paths
def test_seeds_and_offsets_are_64_bits_wide(target: Target) -> None:
    """Read as unsigned: -1 is 2^64 - 1. No half is lost on the way to the kernels."""
    shape = (2, 33, 64, 2, 1)
    seeds, offsets = (0, 1, -1, 2**63 - 1, -(2**63)), (0, 2**32 - 1, 2**32, 2**63 - 1, -1)
    pairs = list(itertools.product(seeds, offsets))
    for pair in pairs if target.device == "cuda" else pairs[::2]:
        rng = torch.tensor(pair, device=target.device)
        wanted = defined_mask(rng, 0.5, shape)
        assert torch.equal(forward_mask(rng, 0.5, shape, 64, target.path), wanted), f"out, {pair}"
        assert torch.equal(backward_mask(rng, 0.5, shape, 64, target.path), wanted), f"dv, {pair}"


@on_paths
def test_keep_rate_of_a_thousand_masks(target: Target) -> None:
    """Over all, by row, key, head, place in 8 x 8 and by single weight: within a binomial's reach."""
    batch, p = (1000 if target.device == "cuda" else 150), 0.3
    rng, shape = random_rng(target.device, 9), (batch, 32, 64, 2, 1)
    kept = forward_mask(rng, p, shape, 64, target.path).double()
    rate = 1 - philox.threshold(p) / 65536
    by = {
        "all": kept.mean().view(1),
        "head": kept.mean((0, 2, 3)),
        "row": kept.mean((0, 1, 3)),
        "key": kept.mean((0, 1, 2)),
        "8 x 8": kept.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).mean((0, 1, 2, 4)).flatten(),
        "weight": kept.mean(0).flatten(),
        "mask": kept.mean((1, 2, 3)),
    }
    for name, rates in by.items():
        draws = kept.numel() / rates.numel()
        deviations = (rates - rate).abs() / math.sqrt(rate * (1 - rate) / draws)
        # 4.9 deviations for a single one, p = 1e-6; some more where the worst of thousands is looked at.
        limit = math.sqrt(4.9**2 + 2 * math.log(rates.numel()))
        assert deviations.max() < limit, f"by {name}: {float(deviations.max()):.2f} deviations"


# --------------------------------------------------------------------------------------------------
# Where the numbers come from


def small_qkv(target: Target) -> list[Tensor]:
    return make_qkv(target, 2, 70, 70, 4, 2, 64)


@on_paths
def test_seeds_repeat_calls_and_calls_differ(target: Target) -> None:
    """Two calls differ, manual_seed repeats both bitwise, and each takes two draws from the generator."""
    device = target.device
    qkv = small_qkv(target)

    def calls() -> list[Tensor]:
        torch.manual_seed(11)
        return [flash_ext.attention(*qkv, dropout_p=0.3, backend=target.path) for _ in range(2)]

    first, second = calls(), calls()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[0], first[1])
    after = torch.rand(3, device=device)
    torch.manual_seed(11)
    for _ in range(2):
        flash_ext.dropout_rng(device)
    assert torch.equal(after, torch.rand(3, device=device))


@on_paths
def test_a_generator_is_honoured_and_the_default_one_untouched(target: Target) -> None:
    device = target.device
    qkv = small_qkv(target)
    generator = torch.Generator(device)

    def call() -> Tensor:
        return flash_ext.attention(
            *qkv, dropout_p=0.3, generator=generator.manual_seed(5), backend=target.path
        )

    torch.manual_seed(1)
    expected = torch.rand(4, device=device)
    torch.manual_seed(1)
    a, b = call(), call()
    assert torch.equal(a, b)
    assert torch.equal(torch.rand(4, device=device), expected)
    rng = flash_ext.dropout_rng(device, generator.manual_seed(5))
    assert torch.equal(a, flash_ext.forward(*qkv, dropout_p=0.3, rng=rng, backend=target.path)[0])


@on_paths
def test_a_checkpointed_layer_equals_a_plain_one(target: Target) -> None:
    """The recomputed mask is that of the first pass: bitwise the same gradients."""
    qkv = small_qkv(target)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_ext.attention(
            q, k, v, dropout_p=0.4, causal=True, deterministic=True, backend=target.path
        )
        return flash_ext.attention(out, k, v, dropout_p=0.2, deterministic=True, backend=target.path)

    found = []
    for function in (layer, lambda *x: checkpoint(layer, *x, use_reentrant=False)):
        torch.manual_seed(3)
        out = function(*qkv)
        found.append([out, *torch.autograd.grad(out, qkv, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@on_paths
def test_short_sequences_and_everything_dropped(target: Target) -> None:
    cases = [dense(2, 1, 1, 4, 2, 64), dense(2, 1, 300, 4, 4, 128), dense(3, 5, 1, 2, 1, 64, causal=True),
             packed([1] * 9, [3] * 9, num_heads_k=1), packed([1, 0, 2], [0, 4, 1])]  # fmt: skip
    cases = [case.replace(mods=(f"drop{p}",)) for case in cases for p in (0.5, 1.0, 0.00001)]
    run_cases(cases, target, cpu=4)


@pytest.mark.caching
@on_gpu_paths
def test_every_replay_of_a_graph_drops_others_and_its_backward_the_same(target: Target) -> None:
    """With q = 0, v = I and dout = I the mask shows in out and, transposed, in dv."""
    size, replays = 64, 20
    q, k = (torch.zeros(1, size, 1, size, dtype=torch.float16, device="cuda") for _ in range(2))
    v = torch.eye(size, dtype=torch.float16, device="cuda")[None, :, None].clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        out = flash_ext.attention(q, k, v, dropout_p=0.5, backend=target.path)
        (dv,) = torch.autograd.grad(out, v, v.detach())
        return out.detach(), dv

    graph, (out, dv) = capture(step)
    masks = set()
    for _ in range(replays):
        graph.replay()
        forward, backward = out[0, :, 0] != 0, dv[0, :, 0].T != 0
        assert torch.equal(forward, backward)
        masks.add(bytes(forward.flatten().tolist()))
    assert len(masks) == replays


@on_paths
def test_dropout_of_nothing_is_off_and_of_everything_is_zero(target: Target) -> None:
    qkv = small_qkv(target)
    plain = flash_ext.attention(*qkv, backend=target.path)
    assert torch.equal(flash_ext.attention(*qkv, dropout_p=float("0"), backend=target.path), plain)
    out, lse, *grads = differentiate(target, qkv, dropout_p=1.0)
    assert lse.isfinite().all() and not any(t.any() for t in (out, *grads))
