"""fp8 attention with lengths on the device, with sinks and with the largest scores, against the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest
from flash_ext._cpu import fp8
from flash_ext._ops.library import _C
from flash_ext._ops.modifiers import Modifiers
from flash_ext.fp8 import Fp8Inputs, attention_fp8, quantize_fp8
from tests.covering import pairs_on_cpu
from tests.fp8.test_edges import e4m3
from tests.fp8.test_fp8 import (
    GATE,
    HEAD_SIZES,
    QUANTISATIONS,
    bounds_of,
    error_of,
    make,
    rising,
    spec_of,
)  # fmt: skip
from tests.graphs import capture
from tests.qkv import CPU_AND_HOPPER, ON_HOPPER, null_kernels, only_hopper
from tests.reference import attention_reference, row_max_reference

BOTH = AuxRequest(lse=True, max_scores=True)
MASKS = [{}, {"causal": True}, {"window_size": (70, 20)}, {"scale": -0.1}, {"scale": 0.0}]
LENGTHS = [0, 1, 128, 129, 200, 300]


# Of lse and the largest scores, relative to the largest. Tensor cores cut each product of a score to 2^-13 of
# the largest one (docs/fp8.md).
STAT_GATES = {"cpu": 1e-3, "cuda": 4e-3}


def int32(*numbers: int, device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def truth(x: Fp8Inputs, sinks: Tensor | None, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest scores of each sequence by itself, with the keys that it has."""
    q, k, v = (t.cpu() for t in x.dequantize(torch.float64))
    spec = spec_of(q, **options)
    mods = None if sinks is None else Modifiers(sinks=sinks.cpu().double())
    packed = x.cu_seqlens_q is not None
    rows = [slice(0, q.shape[1])] * len(q)
    keys = [slice(0, k.shape[1])] * len(k)
    if packed:
        rows, keys = (
            [slice(a, b) for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False)]
            for cu in (x.cu_seqlens_q, x.cu_seqlens_k)
        )
    if x.seqused_k is not None:
        keys = [slice(key.start, key.start + n) for key, n in zip(keys, x.seqused_k.tolist(), strict=True)]
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    stat = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse, row_max = (torch.full(stat, -math.inf, dtype=torch.float64) for _ in range(2))
    for b, (row, key) in enumerate(zip(rows, keys, strict=True)):
        own = [(t[part] if packed else t[b, part]).unsqueeze(0) for t, part in ((q, row), (k, key), (v, key))]
        place = (slice(None), row) if packed else (b, slice(None), row)
        (out[row] if packed else out[b, row])[:], lse[place] = (
            t.squeeze(0) for t in attention_reference(*own, spec, mods=mods)
        )
        row_max[place] = row_max_reference(*own, spec).squeeze(0)
    return out, lse, row_max


def check(x: Fp8Inputs, sinks: Tensor | None = None, gate: float = GATE, **options: object) -> None:
    want, want_lse, want_max = truth(x, sinks, **options)
    stat_gate = STAT_GATES[x.q.device.type]
    out, aux = attention_fp8(x, sinks=sinks, return_aux=BOTH, **options)
    for got, wanted in ((aux.lse, want_lse), (aux.max_scores, want_max)):
        seen = wanted.isfinite()
        assert torch.equal(got.cpu().isfinite(), seen)
        assert (got.cpu()[~seen] == -math.inf).all()
        largest = wanted[seen].abs().max().item() if seen.any() else 0.0
        assert (got.cpu().double() - wanted)[seen].abs().max().item() <= stat_gate * max(1.0, largest)
    assert error_of(out, want) <= gate
    assert not out.cpu()[(want_max == -math.inf).transpose(-1, -2)].any()
    # What is not asked for changes lse and out by rounding at most.
    plain, aux_lse = attention_fp8(x, sinks=sinks, return_aux=AuxRequest(lse=True), **options)
    assert aux_lse.max_scores is None and error_of(plain, want) <= gate
    assert torch.equal(attention_fp8(x, sinks=sinks, **options), plain)
    seen = want_lse.isfinite()
    largest = max(1.0, want_lse[seen].abs().max().item()) if seen.any() else 1.0
    assert (aux_lse.lse.cpu().double() - want_lse)[seen].abs().max().item() <= stat_gate * largest


def spoiled(used: list[int], device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """NaN and infinity behind the keys that are used; keys and values have means."""
    q, k, v = make(200, 300, batch=len(used), device=device, seed=seed)
    k, v = k + 2, v + 1
    for b, n in enumerate(used):
        k[b, n:], v[b, n:] = math.nan, math.inf
    return q, k, v


# ---- lengths --------------------------------------------------------------------------------------------


@pairs_on_cpu(gpu=ON_HOPPER, strength=1, how=QUANTISATIONS, options=MASKS)
def test_lengths_of_batch_entries(device: str, how: dict, options: dict) -> None:
    x = quantize_fp8(*spoiled(LENGTHS, device), seqused_k=int32(*LENGTHS, device=device), **how)
    _, k, v = x.dequantize(torch.float32)
    assert v.isfinite().all()
    assert x.mode == "mixed" or k.isfinite().all()  # which mixed mode leaves as it is
    check(x, gate=0.05, **options)  # few keys: no errors cancel


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("how", QUANTISATIONS[:3], ids=str)
def test_what_is_not_used_enters_no_factor_and_no_mean(device: str, how: dict) -> None:
    q, k, v = spoiled(LENGTHS, device)
    x = quantize_fp8(q, k, v, seqused_k=int32(*LENGTHS, device=device), **how)
    for b, n in enumerate(LENGTHS):
        own = slice(b, b + 1)
        if n == 0:  # alone it is not quantised at all
            assert not x.k[b].view(torch.uint8).bitwise_and(0x7F).any()
            continue
        alone = quantize_fp8(q[own], k[own, :n].contiguous(), v[own, :n].contiguous(), **how)
        for name in ("q_descale", "v_descale", "v_offset", "k_offset", "row_offset"):
            got, want = getattr(x, name), getattr(alone, name)
            assert (got is None) == (want is None), name
            if got is not None:
                torch.testing.assert_close(got[own], want, rtol=1e-5, atol=1e-5, msg=name)
        blocks = alone.k_descale.shape[-1]
        torch.testing.assert_close(x.k_descale[own, :, :blocks], alone.k_descale, rtol=1e-5, atol=1e-5)
        assert not x.k[b, n:].view(torch.uint8).bitwise_and(0x7F).any()
        unused = fp8.column_of_rows(300, None, x.v.device)[n:]
        assert not x.v[b].view(torch.uint8)[..., unused].any()


@pairs_on_cpu(gpu=ON_HOPPER, strength=1, how=QUANTISATIONS, options=MASKS[:3])
def test_lengths_of_packed_sequences(device: str, how: dict, options: dict) -> None:
    q, k, v = make(400, 700, packed=True, device=device)
    k, v = k + 2, v + 1
    starts, used = [5, 205, 240, 690], [130, 0, 449]
    for start, end, n in zip(starts, starts[1:], used, strict=False):
        k[start + n : end], v[start + n : end] = math.nan, math.inf
    q[:3], k[690:], v[:5] = math.nan, math.nan, math.nan
    x = quantize_fp8(
        q, k, v, **bounds_of([3, 103, 153, 390], starts, device=device),
        seqused_k=int32(*used, device=device), **how,
    )  # fmt: skip
    check(x, **options)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_of_tensors_that_are_fp8_already(device: str, packed: bool) -> None:
    if packed:
        q, k, v = make(130, 600, packed=True, device=device)
        places, used = bounds_of([0, 50, 130], [0, 290, 600], device=device), [200, 7]
        k[200:290], v[200:290], k[297:], v[297:] = (math.nan,) * 4
    else:
        places, used = {}, [0, 17, 130]
        q, k, v = make(130, 300, batch=3, device=device)
        for b, n in enumerate(used):
            k[b, n:], v[b, n:] = math.nan, math.nan
    x = Fp8Inputs.of(*e4m3(q, k, v), **places, seqused_k=int32(*used, device=device))
    assert x.v.float().isfinite().all()
    clean = Fp8Inputs.of(
        *e4m3(q, k.nan_to_num(0.0), v.nan_to_num(0.0)), **places, seqused_k=int32(*used, device=device)
    )
    check(clean, gate=0.05, causal=True)
    assert torch.equal(attention_fp8(x, causal=True), attention_fp8(clean, causal=True))


@pytest.mark.parametrize("device", CPU_AND_HOPPER[1:])
def test_lengths_on_a_gpu_are_clamped(device: str) -> None:
    q, k, v = make(100, 300, device=device)
    x = quantize_fp8(q, k, v, seqused_k=int32(-5, 10**9, device=device))
    want = quantize_fp8(q, k, v, seqused_k=int32(0, 300, device=device))
    assert torch.equal(attention_fp8(x), attention_fp8(want))


@pytest.mark.gpu
@only_hopper
def test_lengths_change_in_a_cuda_graph() -> None:
    q, k, v = make(130, 500, device="cuda")
    used = int32(500, 500, device="cuda")
    sinks = torch.randn(4, device="cuda")

    def call() -> tuple[Tensor, ...]:
        out, aux = attention_fp8(quantize_fp8(q, k, v, seqused_k=used), sinks=sinks, return_aux=BOTH)
        return out, aux.lse, aux.max_scores

    graph, found = capture(call)
    for lengths in ([500, 3], [0, 257]):
        used.copy_(int32(*lengths))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, call(), strict=True))


# ---- sinks and largest scores ----------------------------------------------------------------------------

SINKS = [0.5, -math.inf, 7.0, -3.0]


@pairs_on_cpu(gpu=ON_HOPPER, strength=1, how=QUANTISATIONS, options=MASKS)
def test_sinks(device: str, how: dict, options: dict) -> None:
    """Beside scores that a mean of keys has shifted by more than the sinks are apart."""
    q, k, v = make(device=device)
    x = quantize_fp8(q, k + 3, v + 1, **how)
    check(x, torch.tensor(SINKS, device=device), **options)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize(("dim", "dim_v", "mode"), HEAD_SIZES[4:])
def test_sinks_of_head_sizes(device: str, dim: int, dim_v: int, mode: str) -> None:
    rows, *used = (300, 2300, 1111) if device == "cuda" else (140, 300, 211)
    q, k, v = make(rows, used[0], dim=dim, dim_v=dim_v, device=device)
    x = quantize_fp8(q, k + 1, v + 1, mode=mode, seqused_k=int32(*used, device=device))
    check(x, torch.tensor(SINKS, device=device), causal=True)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_sinks_of_packed_sequences(device: str) -> None:
    """With rows that see no key, in sequences and outside of them."""
    q, k, v = make(400, 300, packed=True, device=device)
    places = bounds_of([3, 203, 253, 390], [0, 130, 130, 300], device=device)
    x = quantize_fp8(q, k + 2, v, **places)
    sinks = torch.tensor(SINKS, device=device)
    for options in ({}, {"causal": True}):
        check(x, sinks, **options)
    _, aux = attention_fp8(x, sinks=sinks, causal=True, return_aux=BOTH)
    assert (aux.lse[:, :3] == -math.inf).all() and (aux.lse[:, 390:] == -math.inf).all()
    assert torch.equal(aux.lse[:, 203:253], sinks[:, None].expand(4, 50))


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("packed", [False, True])
def test_without_any_key(device: str, packed: bool, sinks: list[float] | None) -> None:
    q, k, v = make(8, 0, packed=packed, device=device)
    places = bounds_of([2, 7], [0, 0], device=device) if packed else {}
    given = None if sinks is None else torch.tensor(sinks, device=device)
    out, aux = attention_fp8(quantize_fp8(q, k, v, **places), sinks=given, return_aux=BOTH)
    assert not out.any() and (aux.max_scores == -math.inf).all()
    inside = aux.lse[..., 2:7] if packed else aux.lse
    want = torch.tensor(sinks or [-math.inf] * 4, device=device)
    assert torch.equal(inside, want[:, None].expand_as(inside))
    if packed:
        assert (aux.lse[..., :2] == -math.inf).all() and (aux.lse[..., 7:] == -math.inf).all()


def one_rules(q: Tensor, k: Tensor) -> None:
    q[..., 0], k[..., 0] = 8, 0
    k[:, 17, :, 0] = 8


DATA: dict[str, Callable[[Tensor, Tensor], None]] = {
    "rising": lambda q, k: rising(q, k, k),
    "falling": lambda q, k: (rising(q, k, k), k.copy_(k.flip(1))),
    "one rules": one_rules,
    "equal scores": lambda q, k: q.zero_(),
    "all negative": lambda q, k: (q.abs_(), k.abs_().neg_()),
}


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("mode", ["fp8", "mixed"])
@pytest.mark.parametrize("data", DATA)
def test_largest_scores(device: str, mode: str, data: str) -> None:
    q, k, v = make(130, 1500 if device == "cuda" else 300, dim=128, device=device)
    DATA[data](q, k)
    check(quantize_fp8(q, k, v, mode=mode), gate=0.06)


@pytest.mark.parametrize("device", CPU_AND_HOPPER[1:])
def test_largest_scores_of_very_many_keys(device: str) -> None:
    """A GPU takes them in stretches, whose maxima are joined."""
    q, k, v = make(70, 70000, 1, 1, 64, batch=1, device=device)
    check(quantize_fp8(q, k + 1, v), torch.tensor([9.0], device=device), gate=0.06)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_go_straight_through(device: str, with_sinks: bool) -> None:
    tensors = [t.requires_grad_() for t in make(device=device)]
    sinks = torch.tensor(SINKS, device=device, requires_grad=True) if with_sinks else None
    leaves = [*tensors, sinks] if sinks is not None else tensors
    weight = torch.randn(2, 200, 4, 64, device=device)
    request = {"sinks": sinks, "causal": True, "return_aux": AuxRequest(lse=True)}
    grads = [
        torch.autograd.grad((out.float() * weight).sum() + aux.lse.sum(), leaves)
        for out, aux in (
            attention_fp8(quantize_fp8(*tensors), **request), flash_ext.attention(*tensors, **request)
        )
    ]  # fmt: skip
    for a, b in zip(*grads, strict=True):
        assert b.any() and error_of(a, b.double().cpu()) < 1e-2
    assert sinks is None or grads[0][3][1] == 0  # a sink of -inf
    with torch.no_grad():
        assert quantize_fp8(*tensors)._originals is None


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
def test_gradients_with_sinks_of_packed_sequences(device: str) -> None:
    """lse is not asked for; rows of no sequence leave no trace in the sinks' gradient."""
    tensors = [t.requires_grad_() for t in make(190, 300, packed=True, device=device)]
    places = bounds_of([3, 80, 80, 190], [5, 105, 140, 290], device=device)
    sinks = torch.randn(4, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(190, 4, 64, device=device)
    out = attention_fp8(quantize_fp8(*tensors, **places), sinks=sinks)
    got = torch.autograd.grad((out.float() * weight).sum(), [*tensors, sinks])
    request = AuxRequest(lse=True)
    out, aux = flash_ext.attention_varlen(*tensors, *places.values(), sinks=sinks, return_aux=request)
    want = torch.autograd.grad((out.float() * weight).sum(), [*tensors, sinks])
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and b.any()
    for a, b in zip(got[:3], want[:3], strict=True):
        assert error_of(a, b.double().cpu()) < 1e-2
    # A sink's gradient sums terms of either sign, one a row, and may be far smaller than they are. The error
    # was at most 0.0015 of the sum of their sizes with 24 seeds, and 0.034 of the gradient with another one.
    rows = slice(3, 190)
    of_rows = (out[rows].float() * weight[rows]).sum(2).T * (sinks[:, None] - aux.lse[:, rows]).exp()
    assert ((got[3] - want[3]).abs() <= 5e-3 * of_rows.abs().sum(1)).all()


# ---- operators, tracing, plans ---------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_sound(packed: bool, plain: bool) -> None:
    """Without the test of schemas, which wants to subtract results from each other."""
    q, k, v = make(70, 90, packed=packed)
    places = bounds_of([0, 30, 70], [0, 50, 90]) if packed else {}
    used, sinks = (None, None) if plain else (int32(20, 33), torch.tensor(SINKS))
    x = quantize_fp8(q, k, v, **places, seqused_k=used)
    bounds = (x.cu_seqlens_q, x.cu_seqlens_k)
    tensors = x.q, x.k, x.v, x.q_descale, x.k_descale, x.v_descale, x.v_offset, x.row_offset
    calls = {
        "quantize_fp8": (q, k, v, *bounds, used, True, True, True, False, False),
        "fwd_fp8": (*tensors, *bounds, used, sinks, 0.125, -1, 0, torch.bfloat16, None, True, True),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(
            getattr(torch.ops.flash_ext, name).default,
            arguments,
            test_utils=("test_faketensor", "test_autograd_registration"),
        )


def test_compiled() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, used: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        out, aux = attention_fp8(quantize_fp8(q, k, v, seqused_k=used), sinks=sinks, return_aux=BOTH)
        return out, aux.max_scores, attention_fp8(quantize_fp8(q, k, v), causal=True)

    arguments = (*make(), int32(100, 300), torch.tensor(SINKS))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*arguments)
    for a, b in zip(compiled, run(*arguments), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("packed", [False, True])
def test_one_kernel_serves_all_of_it(packed: bool) -> None:
    """And fetches its tiles one by one where lengths are on the device and a CTA has several."""
    places = bounds_of([0, 50, 100], [0, 50, 100]) if packed else {}
    tensors = make(100, 100, packed=packed)
    used, sinks = int32(20, 33), torch.tensor(SINKS)
    names, dynamic = set(), []
    plain, lengths = quantize_fp8(*tensors, **places), quantize_fp8(*tensors, **places, seqused_k=used)
    with null_kernels():
        for x, options in ((plain, {}), (plain, {"sinks": sinks, "return_aux": BOTH}), (lengths, {})):
            _C.set_switch("record_launches", 1)
            num_sms = _C.get_switch("num_sms")
            _C.set_switch("num_sms", 1)
            attention_fp8(x, **options)
            _C.set_switch("num_sms", num_sms)
            launch = _C.last_launch()
            _C.set_switch("record_launches", None)
            names.add(launch["kernel"])
            dynamic.append(launch["launches"][0]["dynamic"])
        got = quantize_fp8(*tensors, **places, seqused_k=used)
        out, aux = attention_fp8(lengths, sinks=sinks, return_aux=BOTH)
        _, largest = attention_fp8(lengths, sinks=sinks, return_aux=AuxRequest(max_scores=True))
    assert names == {"fwd_fp8_sm90_hd64"} and dynamic == [packed, packed, True]
    assert got.v.shape == lengths.v.shape and out.shape == lengths.q.shape
    assert aux.lse.shape == aux.max_scores.shape == ((4, 100) if packed else (2, 4, 100))
    assert largest.lse is None and largest.max_scores.shape == aux.lse.shape


def test_advice_beside_lengths() -> None:
    x = quantize_fp8(*make(40, 40), seqused_k=int32(3, 40))
    with null_kernels():
        _C.set_switch("compute_capability", 80)
        with pytest.raises(NotImplementedError, match=r"Call attention_varlen\(.*seqused_k=x.seqused_k\)"):
            attention_fp8(x)
    want = flash_ext.attention_varlen(
        *x.dequantize(), x.cu_seqlens_q, x.cu_seqlens_k, seqused_k=x.seqused_k, causal=True
    )
    assert error_of(attention_fp8(x, causal=True), want.double()) <= GATE
