"""What run_sanitizer.sh runs under compute-sanitizer: every kernel once, on tensors of exactly their size.

No guards and no arena here: a guard would hide from memcheck the very access that it is there to find.
Results are only looked at for NaN; tests/attention judges their values.

    python -m tests.tools.sanitizer_cases [--target sm80|sm80-99k|sm90|cpu] [--only TEXT] [--list]
    python -m tests.tools.sanitizer_cases --target sm90 --from-host     for initcheck, which follows ours only
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import flash_ext
from flash_ext.fp8 import Fp8Mode, Granularity, attention_fp8, quantize_fp8
from tests.cases import COMPILED_HEAD_DIMS, Case, dense, few_query_cases, packed
from tests.harness import EVERYTHING, TARGETS, Target
from tests.inputs import make_inputs
from tests.pages import in_bytes, make_cache, packed_queries
from tests.tools.sanitizer_tiles import tall_cases, wide_cases


def sanitizer_cases() -> list[Case]:
    """Small cases (at most 192 queries) that launch every kernel template with every loader."""
    cases = []
    for i, head_dim in enumerate(COMPILED_HEAD_DIMS):
        for dtype in ("bf16", "fp16"):
            deterministic = (i + (dtype == "fp16")) % 2 == 0
            common = {"dtype": dtype, "num_heads_k": 1, "head_dim": head_dim, "dlse": not deterministic}
            cases.append(Case(seqlen_q=131, seqlen_k=190, causal=True, deterministic=deterministic, **common))
            cases.append(packed([3, 0, 130], [65, 9, 67], window=(40, 3), tail=5,
                                deterministic=not deterministic, **common))  # fmt: skip
        # A head size below the compiled one, rows off 16 bytes: the element-wise loader and its tails.
        cases.append(
            dense(2, 66, 129, 2, 2, head_dim - 3, layout="odd", dout_layout="odd", deterministic=i % 2 == 0)
        )
    cases += [
        dense(1, 5, 0, 2, 2, 64),
        dense(1, 192, 1, 2, 1, 64, causal=True),
        dense(2, 65, 65, 2, 1, 192, 128, causal=True),
        dense(1, 40, 40, 1, 1, 8, layout="gap"),
        packed([0, 0, 7], [0, 5, 0], num_heads_k=1, deterministic=True),
        packed([1] * 20, [2] * 20, num_heads_k=1, hints=True),
        *few_query_cases()[::3],
        # Packed tiles on Hopper: queries of several heads of a key head.
        *(dense(1, 16, 3000, 8, 2, head_dim, causal=True) for head_dim in (128, 256)),
        *divided_cases(),
    ]
    return cases


def divided_cases() -> list[Case]:
    """Backwards whose query heads any GPU of 20 multiprocessors or more divides (csrc/gqa_splits.h). Parts of
    one key head and of one batch entry, added four columns at a time and one by one.
    """
    return [
        dense(1, 192, 190, 16, 1, 64, causal=True, deterministic=True),
        dense(1, 192, 130, 32, 2, 61, dtype="fp16", layout="odd", dout_layout="odd"),
        packed([160, 0, 32], [100, 9, 30], num_heads=16, num_heads_k=1, head_dim=128, dtype="fp16"),
    ]


def pool_cases() -> list[Case]:
    """Backwards that have accumulators of dq in a pool with_pool() (csrc/sm90/bwd/dq_pool.cuh)."""
    return [
        dense(20, 66, 130, 2, 1, 56, causal=True),
        dense(30, 65, 70, 2, 1, 128),
        dense(30, 130, 65, 2, 1, 96, dtype="fp16"),
    ]


def with_pool(target: Target) -> Target:
    return target.pretending(num_sms=3).asking(dq_pool=1)


def stream_k_cases() -> list[Case]:
    """Backwards whose last blocks of keys with_stream_k() divides (csrc/sm90/bwd/config.cuh)."""
    return [
        dense(1, 1030, 200, 4, 4, 64),
        dense(1, 1030, 200, 2, 2, 128, dtype="fp16"),
        dense(1, 1000, 120, 4, 4, 96),
    ]


WHOLE_KEYS, ONE_WARPGROUP = "sm90.bwd.whole_keys", "sm90.bwd.dq_stored_short"


def with_stream_k(target: Target) -> Target:
    return target.pretending(num_sms=3).asking(row="sm90.bwd.dq_atomic")


def one_warpgroup(q_splits: int) -> Target:
    return TARGETS["sm90-short"].asking(row=ONE_WARPGROUP, q_splits=q_splits)


def one_warpgroup_cases() -> list[Case]:
    """Dense and packed, of which sequences with more keys than a block add theirs."""
    lens = [64, 1, 0, 130, 30, 17]
    shapes = dict(num_heads=2, num_heads_k=1, tail=3)
    return [
        *(packed(lens, lens, **shapes, head_dim=dim, causal=dim == 64) for dim in (40, 64, 96, 128)),
        dense(3, 130, 64, 2, 2, 64, causal=True),
        dense(3, 65, 60, 2, 2, 128),
        dense(3, 200, 100, 2, 2, 64, dlse=True),
    ]


def shared_key_cases() -> list[Case]:
    """Backwards that store dq, with two warpgroups that share the keys, or have keys of their own."""
    return [
        dense(3, 130, 128, 2, 2, 80, causal=True),
        dense(2, 65, 100, 4, 2, 96, dtype="fp16", dlse=True),
        dense(3, 130, 200, 2, 2, 56),
    ]


def packed_short_cases() -> list[Case]:
    """Backwards that store dq of sequences with at most 128 keys and add that of others (stores_dq())."""
    lens = [64, 1, 0, 130, 17, 90]
    return [
        packed(lens, lens, num_heads=2, num_heads_k=1, head_dim=head_dim, causal=head_dim == 64, tail=3)
        for head_dim in (40, 64, 128)
    ]


def few_row_cases() -> list[Case]:
    """Backwards in two kernels on_one_multiprocessor() (csrc/sm90/bwd/tiles.h)."""
    return [
        dense(2, 66, 130, 3, 3, 128, causal=True, deterministic=True),
        dense(1, 190, 200, 3, 3, 104, dtype="fp16"),
    ]


def on_one_multiprocessor(target: Target) -> Target:
    return target.pretending(num_sms=1)


def two_kernel_cases() -> list[Case]:
    """Backwards with modifiers in two kernels (csrc/sm90/bwd_split/kernel.cuh), with steps enough to come to
    each place in shared memory again, with tests and without: every kind of kernel at every head_dim."""
    found = []
    for head_dim in (64, 128, 192, 256):
        common = {"head_dim": head_dim, "num_heads_k": 1, "deterministic": True}
        wide = Case(seqlen_q=150, seqlen_k=700, **common)
        bf16, fp16 = wide, wide.replace(dtype="fp16", causal=True)
        found += [bf16.replace(mods=mods) for mods in (("blocks64x128",), ("padding", "hkeys2_b"))]
        found.append(fp16.replace(mods=("alibi", "documents")))
        found += [bf16.replace(mods=mods) for mods in (("softcap30",), ("drop0.5", "padding"))]
    return found


def long_cases() -> list[Case]:
    """Forwards whose keys are in stretches (csrc/sm90/fwd/tiles.h), dense and packed."""
    return [
        dense(1, 3, 66_000, 2, 1, 64, causal=True),
        packed([2, 0, 3], [9, 100, 65_700], num_heads=1, num_heads_k=1, head_dim=128, dtype="fp16"),
    ]


# Beside each: which kernels it is there for, beyond fwd_mod and bwd_mod, which all of them launch.
MODIFIED = (
    (False, ("bias_1hqk", "sinks", "softcap30")),  # bwd_bias over the batch; the bias staged
    (True, ("documents", "hrows1", "mask_b1qk", "alibi")),  # pack_mask and groups of masks, labels, intervals
    (False, ("bias_b1qk_skip_f32", "hkeys2_b", "blocks16x16_h", "drop0.5")),  # pack_blocks; bias by element
    (False, ("bias_bhqk_odd", "padding", "alibi_b", "prefix")),  # a bias off 16 bytes; mask bits by key
    (True, ("distance40", "hkeys1_h", "sinks")),  # bwd_bias by distance
    (True, ("bias_hqk_inf", "sinktok5", "chunk32", "blocks64x128", "hrows2_bh", "sinks", "drop0.1")),
)


def sanitizer_modifier_cases() -> list[Case]:
    """The same for the kernels with modifiers: each of them, for every head size, with every loader."""
    found = []
    for i, head_dim in enumerate(COMPILED_HEAD_DIMS):
        for j, (is_packed, mods) in enumerate(MODIFIED):
            common = {"dtype": ("bf16", "fp16")[(i + j) % 2], "num_heads_k": 1, "causal": j % 2 == 0}
            common |= {"deterministic": (i + j // 2) % 2 == 0, "dlse": j == 1, "seed": 10 * i + j}
            if is_packed:
                case = packed([3, 0, 130], [65, 9, 67], num_heads=2, tail=5, head_dim=head_dim, **common)
            else:
                case = Case(batch=2, seqlen_q=131, seqlen_k=150, num_heads=2, head_dim=head_dim - j, **common)
            found.append(case.replace(mods=mods))
    # Nothing but the bias asks for a gradient: bwd_bias by itself. And lists of tiles that are empty.
    alone = Case(batch=2, seqlen_q=70, seqlen_k=90, num_heads=2, num_heads_k=1)
    for name in ("bias_11qk_odd", "alibi", "distance9_before_half"):
        found.append(alone.replace(mods=(name,), needs=("mods",)))
    found.append(packed([0, 0, 7], [0, 5, 0], num_heads_k=1, mods=("mask_b1qk", "sinks")))
    # A head_dim that TMA cannot read keeps a call in portable kernels.
    many = Case(batch=10, seqlen_q=192, seqlen_k=150, num_heads=8, num_heads_k=8, head_dim=127)
    some = {"num_heads": 2, "num_heads_k": 1, "tail": 5, "head_dim": 128, "deterministic": True}
    found.append(many.replace(mods=("blocks64x128",)))
    found.append(packed([3, 0, 130], [65, 9, 67], **some, mods=("blocks16x16_h", "drop0.5")))
    # Forwards for Hopper with one change in tall tiles.
    for mods in (("softcap30", "padding"), ("drop0.5", "padding"), ("alibi", "padding")):
        found.append(packed([3, 0, 190], [65, 9, 167], **some, mods=mods))
    # A bias whose rows Hopper's forward reads where they begin (csrc/sm90/fwd_mod/loose_bias.cuh).
    for head_dim in (64, 128):
        case = Case(batch=2, seqlen_q=131, seqlen_k=150, num_heads=2, num_heads_k=1, head_dim=head_dim)
        found.append(case.replace(mods=("bias_bhqk_odd", "padding")))
        found.append(case.replace(mods=("bias_1hqk_f32", "padding")))
        found.append(case.replace(mods=("bias_1hqk", "mask_bhqk")))
        # Sums over rows beside dK, in parts for batch entries; a bias of rows, which leaves with lse.
        found.append(case.replace(mods=("bias_1h1k", "padding")))
        found.append(case.replace(mods=("bias_bhq1_f32", "padding")))
    # A gradient of a bias above head_dim 128, in two halves: a bias that TMA brings, one that it cannot.
    for head_dim, bias in ((256, "bias_1hqk"), (136, "bias_11qk_f32")):
        case = Case(batch=2, seqlen_q=131, seqlen_k=150, num_heads=2, num_heads_k=1, head_dim=head_dim)
        found.append(case.replace(mods=(bias, "padding"), causal=head_dim == 256))
    # Few queries of many keys, which are split.
    for rows, head_dim in ((1, 64), (20, 128), (3, 256)):
        case = Case(batch=1, seqlen_q=rows, seqlen_k=3000, num_heads=4, num_heads_k=2, head_dim=head_dim)
        found.append(case.replace(mods=("padding", "sinks", "bias_1hqk_odd")))
    return found


def short_cases() -> list[Case]:
    """Sequences of at most 80 queries and keys, for targets with kernels of their own for them."""
    found = []
    for i, head_dim in enumerate((32, 64, 80, 128)):
        common = {"batch": 3, "num_heads": 2, "num_heads_k": 2, "deterministic": i % 2 == 0}
        found.append(Case(seqlen_q=49, seqlen_k=64, head_dim=head_dim, causal=True, **common))
        odd = {"head_dim": head_dim - 3, "layout": "odd", "dout_layout": "odd"}
        found.append(Case(seqlen_q=64, seqlen_k=17, **odd, **common))
        for j, (is_packed, mods) in enumerate(MODIFIED):
            mods = ("bias_1hqk_odd", "drop0.5") if is_packed and mods[-1] != "alibi" else mods
            case = Case(seqlen_q=49, seqlen_k=(49, 61)[j % 2], head_dim=head_dim - j, **common)
            case = case.replace(causal=j % 2 == 0, dtype=("bf16", "fp16")[(i + j) % 2])
            found.append(case.replace(mods=mods))
    wide = Case(batch=3, seqlen_q=20, seqlen_k=31, num_heads=2, num_heads_k=2, head_dim=256)
    found += [wide.replace(seqlen_q=9, seqlen_k=16), wide.replace(mods=("bias_1hqk_odd", "drop0.5"))]
    found.append(wide.replace(seqlen_q=64, seqlen_k=49, mods=("bias_1hqk_odd", "drop0.5")))
    for head_dim in (32, 64, 77):
        tall = Case(batch=3, seqlen_q=77, seqlen_k=80, num_heads=2, num_heads_k=2, head_dim=head_dim)
        found.append(tall.replace(causal=head_dim == 64, mods=("bias_bhqk_odd", "softcap2")))
    return found


def exact(t: Tensor | None, device: str | None = None) -> Tensor | None:
    """The same values and strides in an allocation that ends with the last element.

    ``device``: another one, to which the whole allocation is copied at once, by no kernel.
    """
    if t is None:
        return None
    if device is not None and torch.device(device).type != t.device.type:
        here = exact(t)
        once = torch.empty(0, dtype=t.dtype).set_(here.untyped_storage())
        return once.to(device).as_strided(here.shape, here.stride())
    once = t
    for dim, stride in enumerate(t.stride()):
        if stride == 0:
            once = once.narrow(dim, 0, 1)  # what is repeated is held, and written, once
    held = torch.empty_strided(once.shape, once.stride(), dtype=t.dtype, device=t.device).copy_(once)
    return held.expand(t.shape)


def run(case: Case, target: Target, from_host: bool = False) -> None:
    """Forward and backward of one case. Raises AssertionError on NaN.

    ``from_host``: tensors come from the CPU, out and lse by way of it, so that no kernel but ours writes what
    ours read.
    """
    if case.mods:
        _run_modified(case, target, from_host)
        return
    x = make_inputs(case, "cpu" if from_host else target.device)
    q, k, v, dout, dlse, cu_q, cu_k = (
        exact(t, target.device) for t in (x.q, x.k, x.v, x.dout, x.dlse, x.cu_seqlens_q, x.cu_seqlens_k)
    )
    scale, (left, right) = case.effective_scale, case.effective_window
    options = (cu_q, cu_k, *x.max_seqlens, scale, left, right, case.deterministic, target.choice)
    del x
    out, lse = torch.ops.flash_ext.fwd(q, k, v, *options)
    if from_host:
        out, lse = (exact(t.cpu(), target.device) for t in (out, lse))
    grads = torch.ops.flash_ext.bwd(dout, q, k, v, out, lse, dlse, *options)
    for name, t in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)):
        assert not t.isnan().any(), f"{case}: {name} holds NaN"


def _run_modified(case: Case, target: Target, from_host: bool = False) -> None:
    """By the public functions. ``from_host``: only inputs are."""
    x = make_inputs(case, "cpu" if from_host else target.device)
    device = target.device
    qkv = [exact(t, device).requires_grad_("qkv" in case.needs) for t in (x.q, x.k, x.v)]
    for choice in x.choices:
        choice.tensor = exact(choice.tensor, device)
    dout, dlse, bounds = exact(x.dout, device), exact(x.dlse, device), ()
    leaves = {name: t.requires_grad_() for name, t in x.leaves().items()}
    options = {"return_aux": EVERYTHING, "deterministic": case.deterministic, "backend": target.choice}
    attention = flash_ext.attention
    if case.is_packed:
        attention = flash_ext.attention_varlen
        bounds = (exact(x.cu_seqlens_q, device), exact(x.cu_seqlens_k, device))
    # Labels of documents are made beside the tensors of the choices, and are still where the inputs were.
    chosen = x.keywords(leaves)
    options |= tree_map_only(Tensor, lambda t: t if t.device == dout.device else exact(t, device), chosen)
    if "generator" in options:
        options["generator"] = torch.Generator(device).manual_seed(case.seed + 77)
    del x
    out, (lse, top) = attention(*qkv, *bounds, **options)
    wanted = [t for t in (*qkv, *leaves.values()) if t.requires_grad]
    outputs, gradients = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    grads = torch.autograd.grad(outputs, wanted, gradients)
    for t in (out, lse, top, *grads):
        assert not t.isnan().any(), f"{case}: a result holds NaN"


class CacheCase(NamedTuple):
    """New keys are appended to a paged cache, then queries of every sequence see it."""

    page_size: int
    head_dim: int
    counts: tuple[int, ...]  # queries of each sequence
    lengths: tuple[int, ...]  # its keys
    rotary: bool = False


def cache_cases() -> list[CacheCase]:
    """Few queries whose keys are split, and many."""
    found = []
    for head_dim in (64, 128, 256, 40):
        found.append(CacheCase(16, head_dim, (1, 3, 0, 1), (1500, 17, 5, 0), head_dim != 40))
        found.append(CacheCase(1, head_dim, (1, 70), (33, 130)))
        found.append(CacheCase(8, head_dim, (90, 0, 200), (101, 7, 333)))
        found.append(CacheCase(16, head_dim, (9, 0, 50), (1500, 7, 333)))
        found.append(CacheCase(48, head_dim, (140, 0, 20), (101, 7, 333)))
    # Heads of 36 columns do not start on 16 bytes.
    found.append(CacheCase(16, 36, (90, 0, 200), (101, 7, 333)))
    return [*found, CacheCase(48, 128, (20, 40), (700, 2100), True)]


def run_cached(case: CacheCase, target: Target, from_host: bool = False) -> None:
    """Raises AssertionError on NaN, which slots without a key hold."""
    made_on = "cpu" if from_host else target.device
    sizes = (list(case.lengths), case.page_size, 2, case.head_dim)
    cache = make_cache(*sizes, device=made_on, dtype=torch.bfloat16)
    q, bounds, _ = packed_queries(list(case.counts), 8, case.head_dim, made_on, torch.bfloat16)
    new = torch.randn(2, 5, 2, case.head_dim, device=made_on).to(torch.bfloat16)
    angles = torch.rand(9, case.head_dim // 4, device=made_on)
    places = torch.tensor([0, 4, 8, 2, 2], device=made_on)
    # The keys behind the last ones are of nobody; -1 is left out.
    slots = torch.tensor(
        [-1, *range(cache.k.shape[0] * case.page_size - 4, cache.k.shape[0] * case.page_size)]
    )
    q, bounds, k, v, table, lengths, slots, cos, sin, places, k_new, v_new = (
        exact(t, target.device)
        for t in (q, bounds, cache.k, cache.v, cache.table, cache.lengths, slots.to(made_on), angles.cos(),
                  angles.sin(), places, *new)
    )  # fmt: skip
    rotary = flash_ext.serving.Rotary(cos, sin, places) if case.rotary else None

    def attend(k: Tensor, v: Tensor, **options) -> None:
        out = flash_ext.attention_varlen(
            q, k, v, bounds, None, seqused_k=lengths, block_table=table, backend=target.choice, **options
        )
        assert not out.isnan().any(), f"{case}: a result holds NaN, with {', '.join(options)}"

    for softcap in (0.0, 9.0):
        attend(k, v, causal=True, softcap=softcap)
    # Masks, ids and biases that end before the longest sequence does.
    batch, rows, keys = len(case.counts), max(max(case.counts) - 1, 1), max(case.lengths) - 3
    given = (
        torch.rand(batch, keys, device=made_on) < 0.5, torch.rand(8, rows, keys, device=made_on) < 0.5,
        torch.zeros(sum(case.counts), device=made_on).int(), torch.zeros(batch, keys, device=made_on).int(),
        torch.randn(1, 8, rows, keys, device=made_on),
    )  # fmt: skip
    keep, pairs, ids, ids_k, bias = (exact(t, target.device) for t in given)
    values = flash_ext.masks
    for mask in (values.KeyMask(keep), values.Dense(pairs) & values.Documents(ids, ids_k)):
        attend(k, v, mask=mask, bias=bias)
    if max(case.counts) <= 64:
        words = exact(torch.randint(-(2**63), 2**63 - 1, (sum(case.counts),), device=made_on), target.device)
        attend(k, v, mask=values.TokenTree(words))
    if case.head_dim % 16 == 0:
        for dtype, factors in ((torch.float8_e4m3fn, "slots"), (torch.int8, "sequences")):
            narrow, descales = in_bytes(cache, dtype, factors)
            k8, v8 = (exact(x.view(torch.uint8), target.device).view(dtype) for x in (narrow.k, narrow.v))
            of_k, of_v = (exact(x, target.device) for x in descales.values())
            attend(k8, v8, causal=True, k_descale=of_k, v_descale=of_v)
            given = (of_k, of_v) if factors == "slots" else (None, None)
            flash_ext.serving.append_kv(k_new, v_new, k8, v8, slots, rotary, *given)
    flash_ext.serving.append_kv(k_new, v_new, k, v, slots, rotary)
    # The same slots behind the keys of two sequences on the last page; full ones; entries that are not there.
    pairs = [x[:4].unflatten(0, (2, 2)) for x in (k_new, v_new)]
    factors = (cos, sin) if case.rotary else (None, None)
    rows = exact(torch.randn(2, 3, 8, case.head_dim, device=made_on).to(torch.bfloat16), target.device)
    size, last = case.page_size, torch.full((2, 1), k.shape[0] - 1, dtype=torch.int32, device=made_on)
    for at, pages, entries in (
        ([max(size - 4, 0), max(size - 2, 1)], last, None),
        ([size, size - 2], None, None),
        ([-9, size], None, torch.tensor([-1, k.shape[0]], dtype=torch.int32, device=made_on)),
    ):
        of_two = [torch.tensor(at, device=made_on), pages, entries]
        of_two = [exact(x, target.device) for x in of_two]
        _, turned = torch.ops.flash_ext.append_behind.default(
            *pairs, k, v, *of_two, *factors, True, rows if case.rotary else None, None, True, None, None
        )
        assert not turned.isnan().any(), f"{case}: a turned query holds NaN"
    assert not k.view(-1, *k.shape[2:])[slots[1:]].isnan().any()


class LatentCase(NamedTuple):
    """Queries of a head of 576 columns, whose first 512 are the value as well."""

    page_size: int
    heads: int
    counts: tuple[int, ...]
    lengths: tuple[int, ...]


def latent_cases() -> list[LatentCase]:
    """Parts of keys, tiles of many queries and of a part of one."""
    return [
        LatentCase(64, 16, (1, 3, 0, 1), (1500, 17, 5, 0)),
        LatentCase(8, 128, (2, 1), (333, 70)),
        LatentCase(24, 3, (70, 0, 9), (101, 7, 333)),
    ]


def run_latents(case: LatentCase, target: Target, from_host: bool = False) -> None:
    """Raises AssertionError on NaN, which slots without a key hold."""
    made_on = "cpu" if from_host else target.device
    cache = make_cache(list(case.lengths), case.page_size, 1, 576, 576, made_on, torch.bfloat16)
    q, bounds, _ = packed_queries(list(case.counts), case.heads, 576, made_on, torch.bfloat16)
    q, bounds, k, table, lengths = (
        exact(t, target.device) for t in (q, bounds, cache.k, cache.table, cache.lengths)
    )
    for causal in (False, True):
        out, aux = flash_ext.attention_varlen(
            q, k, k[..., :512], bounds, None, causal=causal, seqused_k=lengths, block_table=table,
            return_aux=flash_ext.AuxRequest(lse=True), backend=target.choice,
        )  # fmt: skip
        for t in (out, aux.lse):
            assert not t.isnan().any(), f"{case}: a result holds NaN"


class Fp8Case(NamedTuple):
    """Keys, values and, in mode "fp8", queries of 8 bits: the passes that make them, and the forward."""

    mode: Fp8Mode
    head_dim: int
    head_dim_v: int
    causal: bool = False
    packed: bool = False
    dtype: torch.dtype = torch.bfloat16
    turned: int = 0  # features of q and k that rotary factors turn
    rows: int = 131
    keys: int = 190
    used: tuple[int, ...] = ()  # keys of each sequence; empty: all
    window: tuple[int, int] = (-1, -1)
    granularity: Granularity = "block"
    hadamard: bool = False

    @property
    def lengths(self) -> list[int]:
        """Keys of the two sequences."""
        return list(self.used) or ([65, self.keys - 65] if self.packed else [self.keys] * 2)


# The accumulator of products takes 1024. What the third 1024 come to joins what the first ones left.
MANY_KEYS = 2200


def fp8_cases() -> list[Fp8Case]:
    """Every head size in both modes, lengths that end inside tiles, more keys than an accumulator takes."""
    many = {"rows": 40, "keys": MANY_KEYS}
    return [
        Fp8Case("fp8", 64, 64, causal=True, dtype=torch.float16),
        Fp8Case("fp8", 96, 80, packed=True),
        Fp8Case("fp8", 128, 128),
        Fp8Case("fp8", 128, 128, packed=True, turned=48),
        Fp8Case("fp8", 192, 128, causal=True),
        Fp8Case("fp8", 256, 256, packed=True, dtype=torch.float16),
        Fp8Case("mixed", 64, 48, packed=True),
        Fp8Case("mixed", 96, 96, causal=True),
        Fp8Case("mixed", 128, 128, causal=True, dtype=torch.float16),
        Fp8Case("fp8", 64, 64, **many),
        Fp8Case("fp8", 128, 128, window=(1500, 20), **many),
        Fp8Case("fp8", 192, 192, packed=True, granularity="head", **many),
        Fp8Case("fp8", 256, 256, hadamard=True, **many),
        Fp8Case("mixed", 128, 128, used=(MANY_KEYS - 13, 1030), **many),
    ]


def run_fp8(case: Fp8Case, target: Target, from_host: bool = False) -> None:
    """Raises AssertionError on NaN, which rows behind the keys that are used hold."""
    made_on = "cpu" if from_host else target.device
    sizes = ((case.rows, 4, case.head_dim), (case.keys, 2, case.head_dim), (case.keys, 2, case.head_dim_v))
    q, k, v = (torch.randn(*(() if case.packed else (2,)), *shape, device=made_on) for shape in sizes)
    # The first keys come last. Theirs are the largest scores, so that maxima rise behind 1024 keys as well.
    k *= torch.linspace(max(case.keys / 500, 1), 1, case.keys, device=made_on)[:, None, None]
    for b, count in enumerate(case.used):
        k[b, count:], v[b, count:] = torch.nan, torch.nan
    q, k, v = (exact(t.to(case.dtype), target.device) for t in (q, k, v))
    bounds = {}
    if case.packed:
        bounds = {"cu_seqlens_q": [0, 3, case.rows], "cu_seqlens_k": [0, case.lengths[0], case.keys]}
    if case.used:
        bounds |= {"seqused_k": list(case.used)}
    places = {
        name: exact(torch.tensor(x, dtype=torch.int32, device=made_on), target.device)
        for name, x in bounds.items()
    }
    rotary = None
    if case.turned:
        of_q, of_k = (torch.rand(2, t.shape[-3], case.turned // 2, device=made_on) for t in (q, k))
        rotary = tuple(tuple(exact(t, target.device) for t in of) for of in (of_q, of_k))
    how = {"mode": case.mode, "granularity": case.granularity, "hadamard": case.hadamard, "rotary": rotary}
    x = quantize_fp8(q, k, v, **how, **places)
    if not from_host:
        held = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
        x = dataclasses.replace(x, **{n: exact(t) for n, t in held.items() if isinstance(t, Tensor)})
    sinks = exact(torch.randn(4, device=made_on), target.device)
    masks = {"causal": case.causal, "window_size": case.window}
    # Where the largest scores are asked for, no tile is formed with an older maximum.
    for request, own in ((flash_ext.AuxRequest(lse=True), None), (EVERYTHING, sinks)):
        out, aux = attention_fp8(x, **masks, sinks=own, return_aux=request)
        for t in (out, *aux):
            assert t is None or not t.isnan().any(), f"{case}: a result holds NaN"


AnyCase = Case | CacheCase | LatentCase | Fp8Case


def run_any(case: AnyCase, target: Target, from_host: bool = False) -> None:
    runs = {CacheCase: run_cached, LatentCase: run_latents, Fp8Case: run_fp8}
    runs.get(type(case), run)(case, target, from_host)


def groups_of(target: Target) -> list[tuple[str, Target, list[AnyCase]]]:
    """What they are, where they run, cases."""
    if target.short:
        return [(", short", target, short_cases())]
    cases = [*sanitizer_cases(), *sanitizer_modifier_cases(), *cache_cases()]
    groups: list[tuple[str, Target, list[AnyCase]]] = [("", target, cases)]
    if target.path == "sm90":
        groups += [
            (", in a pool", with_pool(target), pool_cases()),
            (", in Stream-K", with_stream_k(target), stream_k_cases()),
            (", packed and short", TARGETS["sm90-short"].asking(row=WHOLE_KEYS), packed_short_cases()),
            (", of one warpgroup", one_warpgroup(1), one_warpgroup_cases()),
            (", of one warpgroup, shared out", one_warpgroup(2), [dense(2, 300, 100, 2, 2, 64)]),
            (", of shared keys", TARGETS["sm90-short"].asking(row="sm90.bwd.dq_stored"), shared_key_cases()),
            (", of few rows", on_one_multiprocessor(target), few_row_cases()),
            (", in two kernels", target, two_kernel_cases()),
            (", in tall tiles", target.asking(fwd_block_m=192, wide_tiles=0), tall_cases()),
            (", in wide tiles", target.asking(fwd_block_m=192, wide_tiles=1), wide_cases()),
            (", of many keys", target, long_cases()),
            (", over latents", target, latent_cases()),
            (", in fp8", target, fp8_cases()),
        ]
    return groups


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.sanitizer_cases", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", choices=TARGETS, default="sm80")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line holds it")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th of them, from the K-th on")
    parser.add_argument("--from-host", action="store_true", help="no kernel but ours writes what ours read")
    options = parser.parse_args()
    target = TARGETS[options.target]
    if target.why_not():
        print(f"target {target.name}: {target.why_not()}", file=sys.stderr)
        return 2
    first, step = map(int, options.part.split("/"))
    if not 1 <= first <= step:
        parser.error(f"--part {options.part}: K is one of 1 to N")
    seen = count = 0
    for what, chosen, cases in groups_of(target):
        with chosen.active():
            for case in cases:
                line = f"{case}{what}"
                if options.only not in line:
                    continue
                seen += 1
                if seen % step != first % step:
                    continue
                count += 1
                print(line if options.list else f"case {line}", flush=True)
                if not options.list:
                    run_any(case, chosen, options.from_host)
    print(f"{count} cases, target {target.name}")
    return 0 if count else 2


if __name__ == "__main__":
    sys.exit(main())
