"""A bias by distance on every path: the operators on plain numbers, tables by the public functions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext._ops.library_mod import modifier_arguments
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec
from tests import compare
from tests import modifier_probes as probes
from tests.cases import Case, dense, packed
from tests.graphs import capture
from tests.harness import Target, on_gpu_paths, on_paths, on_short_paths, on_targets, run_cases
from tests.reference import attention_reference, of_sequence

FWD, BWD = torch.ops.flash_ext.fwd_mod.default, torch.ops.flash_ext.bwd_mod.default
HEAD_DIMS = (32, 64, 128, 256)
REACHES = (0, 5, 128, 5000)
HEADS, HEADS_K = 4, 2
LENS_Q, LENS_K = (70, 0, 131, 33), (90, 8, 200, 0)  # packed; dense calls have the third twice
SCALE = 0.3


# ---- the operators ---------------------------------------------------------------------------------------


@dataclass
class Call:
    """The tensors of one call of the operators."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    cu: tuple[Tensor, ...]
    spec: AttnSpec
    mods: Modifiers

    def arguments(self) -> tuple:
        spec = (self.spec.scale, self.spec.window_left, self.spec.window_right)
        return *(self.cu or (None, None)), 0, 0, *spec, *modifier_arguments(self.mods)

    def run(self, target: Target, deterministic: bool, need_qkv: bool = True) -> dict[str, Tensor]:
        flags = (deterministic, target.choice)
        out, lse, row_max = FWD(self.q, self.k, self.v, *self.arguments(), True, *flags)
        grads = BWD(
            self.dout, self.q, self.k, self.v, out, lse, self.dlse, *self.arguments(), need_qkv, True, False,
            False, *flags,
        )  # fmt: skip
        return dict(zip(("out", "lse", "row_max", "dq", "dk", "dv", "dbias"), (out, lse, row_max, *grads)))

    def exact(self) -> dict[str, Tensor]:
        """By autograd through the oracle."""
        leaves = [t.detach().double().requires_grad_() for t in (self.q, self.k, self.v, self.mods.bias)]
        mods = Modifiers(**(vars(self.mods) | {"bias": leaves[3]}))
        out, lse = attention_reference(*leaves[:3], self.spec, *self.cu, mods=mods)
        finite = lse.where(lse.isfinite(), 0)
        grads = torch.autograd.grad([out, finite], leaves, [self.dout.double(), self.dlse.double()])
        found = {"out": out.detach(), "lse": lse.detach()}
        return found | dict(zip(("dq", "dk", "dv", "dbias"), grads))

    def sizes(self, truth: dict[str, Tensor]) -> Tensor:
        """What the terms of dbias add up to without their signs: what its rounding errors go by."""
        sums = torch.zeros_like(truth["dbias"])
        rows_q = (0, *torch.tensor(LENS_Q).cumsum(0).tolist())
        rows_k = (0, *torch.tensor(LENS_K).cumsum(0).tolist())
        for b in range(len(LENS_Q) if self.cu else len(self.q)):
            at_q, at_k = ((slice(*x[b : b + 2]) if self.cu else b) for x in (rows_q, rows_k))
            own = of_sequence(self.mods, b, *((at_q, at_k) if self.cu else ()))
            q, dout, out = (t[at_q].double().transpose(0, 1) for t in (self.q, self.dout, truth["out"]))
            group = HEADS // HEADS_K
            k, v = (t[at_k].double().repeat_interleave(group, 1).transpose(0, 1) for t in (self.k, self.v))
            lse, dlse = (t[:, at_q] if self.cu else t[b] for t in (truth["lse"], self.dlse.double()))
            distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
            distance += 0 if own.top_left else q.shape[1] - k.shape[1]
            distance, n = distance.to(q.device), own.bias.shape[2] // 2
            index = n + distance.clamp(-n, n)
            scores = SCALE * q @ k.mT + own.bias[0].double()[:, index]
            p = torch.exp(scores - lse[..., None]).nan_to_num(0, 0)
            left, right = self.spec.window_left, self.spec.window_right
            p = p.masked_fill((right >= 0) & (distance > right) | (left >= 0) & (distance < -left), 0)
            delta = (dout.abs() * out.abs()).sum(-1, keepdim=True) + dlse.abs()[..., None]
            terms = p * (dout.abs() @ v.abs().mT + delta)
            mine = sums[min(b, len(sums) - 1)]
            by_head = mine.new_zeros(HEADS, mine.shape[1]).index_add(1, index.flatten(), terms.flatten(1))
            mine += by_head.sum_to_size(mine.shape)
        return sums


def make_call(
    device: str, is_packed: bool, head_dim: int, reach: int, *, dtype: torch.dtype = torch.float16,
    batch: bool = False, heads: bool = True, window: tuple[int, int] = (-1, -1), top_left: bool = False,
) -> Call:  # fmt: skip
    lead_q = (sum(LENS_Q),) if is_packed else (2, LENS_Q[2])
    lead_k = (sum(LENS_K),) if is_packed else (2, LENS_K[2])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(device)

    leads = ((lead_q, HEADS), (lead_k, HEADS_K), (lead_k, HEADS_K))
    q, k, v = (normal(*lead, count, head_dim) for lead, count in leads)
    q, dout = q / head_dim**0.5, normal(*lead_q, HEADS, head_dim)
    dlse = normal(*((HEADS, *lead_q) if is_packed else (2, HEADS, lead_q[1])))
    cu = tuple(torch.tensor((0, *lens), device=device).cumsum(0).int() for lens in (LENS_Q, LENS_K))
    count = len(LENS_Q) if is_packed else 2
    entries = normal(count if batch else 1, HEADS if heads else 1, 2 * reach + 1)
    mods = Modifiers(bias=entries, top_left=top_left)
    tensors = (t.to(dtype) for t in (q, k, v, dout))
    return Call(*tensors, dlse, cu if is_packed else (), AttnSpec(SCALE, *window), mods)


def assert_right(call: Call, found: dict[str, Tensor]) -> None:
    truth, u = call.exact(), compare.UNIT_ROUNDOFF[call.q.dtype]
    assert found["dbias"].dtype == torch.float32 and found["dbias"].is_contiguous()
    seen = truth["lse"].isfinite()
    assert torch.equal(found["lse"].isfinite(), seen)
    torch.testing.assert_close(found["lse"][seen].double(), truth["lse"][seen], rtol=0, atol=1e-4)
    for name in ("out", "dq", "dk", "dv"):
        error = (found[name].double() - truth[name]).norm() / truth[name].norm()
        assert error < 3 * u, f"{name} is off by {error / u:.2f} units of rounding"
    # Only out, in delta, is rounded to 16 bits on the way to this sum.
    error, allowed = (found["dbias"].double() - truth["dbias"]).abs(), (u / 8 + 1e-5) * call.sizes(truth)
    most = (error / allowed).nan_to_num(0).max()
    assert (error <= allowed).all(), f"dbias: {most:.2f} times what is allowed"


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("reach", REACHES)
@on_paths
def test_operators_against_the_oracle(target: Target, reach: int, is_packed: bool) -> None:
    """Forward, dq, dk, dv and the gradient of the entries, whose bits repeat in either mode."""
    shapes = itertools.cycle(itertools.product((False, True), (True, False)))
    sizes = HEAD_DIMS if target.device == "cuda" else HEAD_DIMS[:1]  # the CPU has one kernel for all
    bounds = ((-1, -1), False), ((-1, 0), False), ((40, 9), True)
    with target.active():
        for head_dim, (window, top_left) in itertools.product(sizes, bounds):
            batch, heads = next(shapes)
            dtype = torch.bfloat16 if window[1] == 0 else torch.float16
            call = make_call(target.device, is_packed, head_dim, reach, dtype=dtype, batch=batch, heads=heads,
                             window=window, top_left=top_left)  # fmt: skip
            for deterministic in (False, True) if target.device == "cuda" else (True,):
                found = call.run(target, deterministic)
                assert_right(call, found)
                again = call.run(target, deterministic)
                for name in found.keys() - ({"dq"} if not deterministic else set()):
                    assert torch.equal(found[name], again[name]), f"{name} differs from run to run"
            alone = call.run(target, True, need_qkv=False)
            assert alone["dq"].numel() == alone["dk"].numel() == alone["dv"].numel() == 0
            assert_right(call, alone | {name: found[name] for name in ("dq", "dk", "dv")})


@on_paths
def test_a_distance_that_no_pair_has_gets_zero(target: Target) -> None:
    with target.active():
        call = make_call(target.device, False, 64, 5000, window=(-1, 0))
        dbias = call.run(target, False)["dbias"]
    rows, keys = LENS_Q[2], LENS_K[2]
    assert not dbias[..., 5001:].any() and not dbias[..., : 5000 - keys + 1].any()
    assert rows <= keys and dbias[..., 5000 - keys + 1 : 5001].all()


@on_paths
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_entry_that_no_pair_has_may_be_nan(target: Target, head_dim: int) -> None:
    """The last tile has such distances: of rows and keys behind the sequence's end."""
    with target.active():
        call = make_call(target.device, False, head_dim, 5000)
        rows, keys = LENS_Q[2], LENS_K[2]
        assert rows % 64 != 0 and keys % 64 != 0
        for unused in (call.mods.bias[..., : 5000 - keys + 1], call.mods.bias[..., 5000 + rows :]):
            unused.fill_(torch.nan)
        assert_right(call, call.run(target, True))


# ---- tables, by the public functions ---------------------------------------------------------------------


def table_cases() -> list[Case]:
    """Every head size and reach, dense and packed, in both modes, alone and beside other modifiers."""
    beside = ("", "alibi", "softcap5", "drop0.5", "sinks", "padding", "mask_b1qk", "documents", "top",
              "prefix", "blocks64x128_h", "alibi,softcap5", "drop0.1,alibi", "chunk100",
              "hkeys1_h")  # fmt: skip
    cases = []
    grid = itertools.product(HEAD_DIMS, REACHES, (False, True), (False, True))
    for index, (head_dim, reach, is_packed, deterministic) in enumerate(grid):
        flags = ("", "_before", "_shared", "_half", "_inf")[index % 5]
        flags = "" if flags == "_inf" and reach == 0 else flags  # every key would be hidden at once
        mods = (f"distance{reach}{flags}", *filter(None, beside[index % len(beside)].split(",")))
        # Slopes leave keys to which every weight is a subnormal number of fp16.
        dtype = "bf16" if "alibi" in mods else ("bf16", "fp16")[index // 2 % 2]
        common = {"causal": index % 3 == 0 or "top" in mods, "dtype": dtype,
                  "deterministic": deterministic, "dlse": index % 2 == 0, "seed": index}  # fmt: skip
        if is_packed:
            heads = {"num_heads": 4, "num_heads_k": 2, "head_dim": head_dim}
            case = packed(list(LENS_Q), list(LENS_K), tail=5, **heads, **common)
        else:
            case = dense(2, (65, 200)[index % 2], 257, 4, 2, head_dim, **common)
        cases.append(case.replace(mods=mods))
        if index % 4 == 0:
            cases.append(case.replace(mods=mods, needs=("mods",)))
    return cases


@on_targets("cpu", "sm80", "sm80-99k", "sm90")
def test_tables_alone_and_beside_other_modifiers(target: Target) -> None:
    run_cases(table_cases(), target, cpu=4)


@on_short_paths
def test_tables_of_short_sequences(target: Target) -> None:
    cases = [
        dense(5, rows, keys, 4, heads_k, head_dim, causal=causal, seed=rows, mods=(name,), needs=needs)
        for rows, keys in ((1, 1), (16, 16), (17, 49), (64, 64), (49, 20), (64, 128))
        for head_dim, heads_k, causal in ((32, 4, False), (64, 2, True), (128, 4, True))
        for name, needs in (
            ("distance5", ("qkv", "mods")),
            ("distance128_half", ("qkv", "mods")),
            ("distance30_before", ("mods",)),
        )
    ]
    run_cases(cases, target)


@on_paths
def test_tables_where_few_queries_meet_many_keys(target: Target) -> None:
    """As in decoding: one to a few rows, whose distances are those of the last positions."""
    keys = 3000 if target.device == "cuda" else 300
    cases = [
        dense(2, rows, keys, heads, heads_k, head_dim, causal=causal, seed=rows, mods=(name,))
        for rows, causal in ((1, False), (3, True), (16, True))
        for heads, heads_k, head_dim in ((8, 2, 64), (4, 4, 128))
        for name in ("distance128", "distance2000_before", "distance5000")
    ]
    run_cases(cases, target, cpu=1)


@pytest.mark.parametrize("probe", ["count_probe", "weights_probe", "dlse_probe", "ones_probe"])
@on_paths
def test_exact_probes_of_every_reach(target: Target, probe: str) -> None:
    cases = []
    for index, (head_dim, reach) in enumerate(itertools.product(HEAD_DIMS, (*REACHES, 31, 200))):
        heads = {"num_heads": 4, "num_heads_k": 2, "head_dim": head_dim}
        for case in (
            dense(2, 150, 257, 4, 2, head_dim, causal=index % 2 == 0, seed=index),
            packed([7, 0, 190, 64], [90, 9, 130, 0], seed=index, **heads),
        ):
            cases.append(case.replace(mods=(f"distance{reach}{('', '_before', '_shared')[index % 3]}",)))
    run_cases(cases, target, getattr(probes, probe), cpu=3)


def t5(device: str, *, buckets: int = 32, **options) -> flash_ext.masks.RelativePosition:
    weight = torch.randn(buckets, HEADS, device=device, requires_grad=True)
    return flash_ext.masks.RelativePosition(weight.t(), **options)


@pytest.mark.parametrize("is_bidirectional", [True, False])
@on_paths
def test_t5_is_the_bias_written_out(target: Target, is_bidirectional: bool) -> None:
    bias = t5(target.device, bidirectional=is_bidirectional)
    causal, top = {"causal": True}, {"mask": flash_ext.masks.Causal("top_left")}
    square = {} if is_bidirectional else causal
    for rows, keys, hides in ((300, 300, square), (100, 400, causal), (260, 90, top)):
        q, k, v = (
            torch.randn(2, n, h, 64, device=target.device).half().requires_grad_()
            for n, h in ((rows, HEADS), (keys, HEADS_K), (keys, HEADS_K))
        )
        written_out = bias.to_dense(rows, keys, top_left=hides is top)
        aux = flash_ext.AuxRequest(lse=True)
        options = {**hides, "return_aux": aux, "backend": target.path, "deterministic": True}
        results = [flash_ext.attention(q, k, v, bias=given, **options) for given in (bias, written_out)]
        torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(results[0][1].lse, results[1][1].lse, rtol=1e-5, atol=1e-5)
        grads = [torch.autograd.grad(out.float().square().sum(), (bias.table, q, k, v)) for out, _ in results]
        for name, by_distance, by_tensor in zip(("table", "q", "k", "v"), *grads):
            error = (by_distance.float() - by_tensor.float()).norm() / by_tensor.float().norm()
            assert error < 3e-3, f"gradient of {name}: {error:.1e}"


# ---- memory, graphs, repeats -----------------------------------------------------------------------------


@pytest.mark.caching
@on_gpu_paths
def test_nothing_of_the_size_of_the_scores(target: Target) -> None:
    rows = 8192
    q, k, v, dout = (torch.randn(1, rows, HEADS, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    bias = t5("cuda")

    def run() -> None:
        out = flash_ext.attention(q, k, v, bias=bias, backend=target.path)
        torch.autograd.grad(out, (q, k, v, bias.table), dout)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    linear = 3 * q.numel() * 2
    assert peak <= 8 * linear < HEADS * rows * rows, f"{peak} bytes; q, k and v have {linear}"


@pytest.mark.caching
@on_gpu_paths
def test_a_graph_reads_the_table_anew_at_every_replay(target: Target) -> None:
    q, k, v = (torch.randn(2, 200, HEADS, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    table = torch.randn(HEADS, 32, device="cuda", requires_grad=True)

    def run() -> tuple[Tensor, Tensor]:
        bias = flash_ext.masks.RelativePosition(table)
        out = flash_ext.attention(q, k, v, bias=bias, causal=True, backend=target.path)
        return out, torch.autograd.grad(out.float().square().sum(), table)[0]

    graph, captured = capture(run)
    for _ in range(2):
        with torch.no_grad():
            table.copy_(torch.randn_like(table))
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(captured, run()))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@on_gpu_paths
def test_a_hundred_repeats_give_the_same_gradient_of_the_table(target: Target, head_dim: int) -> None:
    case = Case(batch=3, seqlen_q=500, seqlen_k=700, num_heads=HEADS, num_heads_k=HEADS_K, head_dim=head_dim)
    q, k, v, dout = (
        torch.randn(case.batch, n, h, head_dim, device="cuda").bfloat16().requires_grad_()
        for n, h in ((500, HEADS), (700, HEADS_K), (700, HEADS_K), (500, HEADS))
    )
    for bias in (t5("cuda"), t5("cuda", buckets=2 * 100 + 1, bucketing="clip")):
        out = flash_ext.attention(q, k, v, bias=bias, backend=target.path)
        leaves = (bias.table, k, v)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for _ in range(100):
            again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again))
