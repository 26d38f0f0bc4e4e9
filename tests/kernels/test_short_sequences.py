"""Hopper forwards of packed sequences that are short on average: tiles of 64 queries, of which three are
under way on a multiprocessor, and work tiles that are units of heads (csrc/plan/hopper.h)."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from flash_ext._ops.library import _C
from tests.cases import Case, dense, packed
from tests.graphs import capture
from tests.harness import TARGETS, Target, choice_of, on_targets, run_case, run_cases

M64 = "sm90.fwd.m64"


def planned(batch: int, rows: int, **more) -> dict:
    total = batch * rows
    sizes = dict(batch=batch, seqlen_q=total, seqlen_k=total, head_dim=64, head_dim_v=64, packed=True)
    return _C.plan("fwd", **(sizes | dict(num_heads=16, num_heads_k=16) | more))


def main(found: dict) -> dict:
    (launch,) = (one for one in found["launches"] if one["kernel"] == found["kernel"])
    return launch


def unit(found: dict) -> int:
    return main(found).get("unit_heads", 1)


# ---- which calls ----


def test_what_else_is_packed_does_not_choose(pretended_gpu) -> None:
    assert planned(100, 64)["row"] == M64
    with TARGETS["cpu"].pretending(batch_invariant=1).active():
        assert planned(100, 64)["row"] != M64


def test_three_ctas_fit_a_multiprocessor(pretended_gpu) -> None:
    launch = main(planned(1000, 64))
    assert launch["grid"] == 3 * 132 and 3 * (launch["smem_bytes"] + 1024) <= 228 * 1024


@pytest.mark.parametrize(("heads", "expected"), [(16, 4), (20, 4), (6, 2), (3, 1), (1, 1)])
def test_units_divide_the_heads(pretended_gpu, heads: int, expected: int) -> None:
    for head_dim in (64, 80, 128):
        found = planned(300, 64, num_heads=heads, num_heads_k=1, head_dim=head_dim, head_dim_v=head_dim)
        assert unit(found) == expected
        assert main(found)["tiles"] % (heads // expected) == 0


def test_no_units_where_tiles_are_long(pretended_gpu) -> None:
    assert unit(planned(300, 128)) == 4 and unit(planned(300, 129)) == 1
    assert unit(planned(300, 64, head_dim=192, head_dim_v=192)) == 1
    assert unit(planned(2000, 64)) == 4  # of whose keys one sequence may have more than are taken at once
    assert (
        unit(planned(1000, 64, packed=False, seqlen_q=64, seqlen_k=64, backend="sm90 short_kernels=0")) == 1
    )


def test_each_cta_has_two_units(pretended_gpu) -> None:
    for head_dim, ctas in ((64, 3 * 132), (128, 132)):
        sizes = dict(head_dim=head_dim, head_dim_v=head_dim, num_heads=4, num_heads_k=4)
        assert unit(planned(2 * ctas, 64, **sizes)) == 4
        assert unit(planned(2 * ctas - 1, 64, **sizes)) == 2
        assert unit(planned(ctas - 1, 64, **sizes)) == 1


# ---- results ----

SHORT = [64, 64, 1, 17, 33, 64, 50, 127]
MIXED = [40, 300, 7, 64, 65, 0, 33, 129, 16, 11, 3]


def cases(head_dim: int, heads: int, heads_k: int) -> list[Case]:
    few = dict(num_heads=heads, num_heads_k=heads_k, head_dim=head_dim, backward=False)
    less = [n // 2 for n in SHORT]
    return [
        packed(SHORT, SHORT, **few),
        packed(MIXED, MIXED, **few, causal=True, dtype="fp16", tail=5),
        packed(MIXED, [*SHORT, 0, 5, 20], **few),  # queries of sequences without keys
        packed(MIXED, [*less, 3, 0, 200], **few, causal=True),  # and queries that see nothing
        packed(SHORT, MIXED[:8], **few, window=(20, 3), dtype="fp16", tail=70),
        packed([5, 0, 3], [0, 1, 0], **few, layout="gap"),
        packed(MIXED * 40, MIXED * 40, **few),  # a CTA has several units
    ]


@pytest.mark.parametrize(("heads", "heads_k"), [(4, 4), (4, 1), (6, 2), (3, 3), (8, 4)])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128])
@on_targets("sm90")
def test_units_are_right(target: Target, head_dim: int, heads: int, heads_k: int) -> None:
    """Few CTAs have enough of them for units of heads."""
    run_cases(cases(head_dim, heads, heads_k), target.pretending(num_sms=1))


@pytest.mark.parametrize("head_dim", [8, 40, 64])
@on_targets("sm90")
def test_tiles_of_64_queries_are_right(target: Target, head_dim: int) -> None:
    chosen = target.asking(row=M64)
    few = dict(backward=False)
    run_cases(
        [
            dense(2, 127, 129, 3, 1, head_dim, causal=True, **few),
            dense(1, 128, 1000, 4, 2, head_dim, dtype="fp16", **few),
            dense(3, 385, 385, 2, 2, head_dim, causal=True, layout="bhsd", **few),
            dense(2, 640, 333, 4, 4, head_dim, max(8, head_dim - 8), window=(100, 30), **few),
            dense(60, 192, 256, 4, 4, head_dim, causal=True, **few),
            dense(2, 300, 70, 2, 2, head_dim, scale=-0.3, **few),
            packed([1, 130, 0, 700], [5, 130, 7, 656], num_heads=4, num_heads_k=2, head_dim=head_dim, **few),
        ],
        chosen,
    )


@on_targets("sm90")
def test_many_keys_go_in_stretches(target: Target) -> None:
    """Three CTAs of a multiprocessor keep what they have of a stretch each for itself."""
    chosen = target.asking(row=M64, kv_splits=0)
    with chosen.active():
        run_case(dense(1, 500, 70_000, 60, 1, 64, causal=True, backward=False), chosen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("row", "head_dim"), [(M64, 64), ("sm90.fwd.m128", 128), ("sm90.fwd.m192", 128)])
@on_targets("sm90")
def test_a_sequence_of_a_unit_may_have_many_keys(
    target: Target, row: str, head_dim: int, causal: bool
) -> None:
    """Each head of the unit has its stretches: bits are those of the head alone, which has no unit."""
    rows = [7, 64, 200, 1, 50, 64, 130, 64]
    keys = [7, 70_000, 200, 131_073, 0, 64, 65_537, 3]
    chosen = target.asking(row=row, kv_splits=0).pretending(num_sms=1)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int().cuda() for lens in (rows, keys))
    q, k, v = (torch.randn(n, 4, head_dim, device="cuda", dtype=torch.bfloat16) for n in (
        sum(rows), sum(keys), sum(keys)))  # fmt: skip

    def run(backend: str, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = (t[:, heads].contiguous() for t in (q, k, v))
        return flash_ext.forward(*part, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal, backend=backend)

    with chosen.active():
        sizes = dict(seqlen_k=sum(keys), num_heads=4, num_heads_k=4, head_dim=head_dim, head_dim_v=head_dim)
        assert unit(planned(8, 0, seqlen_q=sum(rows), backend=chosen.choice, **sizes)) == 4
        out, lse = run(chosen.choice, slice(None))
        for h in range(4):
            alone = run(chosen.choice, slice(h, h + 1))
            assert torch.equal(out[:, h : h + 1], alone[0]) and torch.equal(lse[h : h + 1], alone[1])
    other = run(choice_of("sm80", short_kernels=0), slice(None))
    torch.testing.assert_close(out, other[0], rtol=2.0**-7, atol=1e-2)
    torch.testing.assert_close(lse, other[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("row", [M64, "sm90.fwd.m128", "sm90.fwd.m192"])
@on_targets("sm90")
def test_300_repeats_are_equal(target: Target, row: str) -> None:
    """Ten units and more for each CTA, whose lanes must not lose each other."""
    chosen = target.asking(row=row)
    with chosen.active():
        lens = torch.randint(1, 128, (512,), device="cuda")
        cu = torch.cat((torch.zeros(1, device="cuda"), lens.cumsum(0))).int()
        q, k, v = (torch.randn(int(cu[-1]), 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        bounds = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, backend=chosen.choice)
        first = flash_ext.forward(q, k, v, **bounds)
        for _ in range(300):
            again = flash_ext.forward(q, k, v, **bounds)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.caching
@pytest.mark.parametrize("head_dim", [64, 128])
@on_targets("sm90")
def test_lengths_change_between_replays(target: Target, head_dim: int) -> None:
    """The counter of work tiles is given up by the last unit, whatever units hold."""
    batch, total, target = 40, 40 * 50, target.pretending(num_sms=1)
    q, k, v = (torch.randn(total, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def bounds(longest: int) -> torch.Tensor:
        rest = torch.arange(1, batch + 1) * (total - longest) // batch
        return torch.cat((torch.zeros(1), rest[:-1] + longest, torch.full((1,), total))).int()

    cu = bounds(50).cuda()
    options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)

    def step(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_ext.forward(q, k, v, backend=backend, **options)

    with target.active():
        graph, captured = capture(lambda: step(target.choice))
        for longest in (50, 64, 65, 700, 1, 1990, 50):
            cu.copy_(bounds(longest))
            for t in captured:
                t.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured[0], step(target.choice)[0])
            other = step(choice_of("sm80", short_kernels=0))
            for a, b in zip(captured, other, strict=True):
                torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-2)
