"""The peers that attend in fp8, and what quantises for them: e4m3, nothing of it timed.

They take what ours takes, (batch, seqlen, heads, size) in memory. Neither of them is ever needed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from bench.entrants import Entrant, lacks
from bench.inputs import Call, Inputs
from bench.shapes import Case

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # number of e4m3


def per_head(t: torch.Tensor, heads_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(b, s, h, d) in e4m3, and a float32 factor (b, heads_k) for the heads that share a key head."""
    groups = t.float().unflatten(2, (heads_k, -1))
    descale = _factors(groups.abs().amax((1, 3, 4)))
    rounded = groups / descale[:, None, :, None, None]
    return _to_e4m3(rounded).flatten(2, 3), descale


def per_tensor(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(b, s, h, d) in e4m3, and one float32 factor (1, 1, 1, 1)."""
    descale = _factors(t.float().abs().amax()).reshape(1, 1, 1, 1)
    return _to_e4m3(t.float() / descale), descale


def _factors(largest: torch.Tensor) -> torch.Tensor:
    """What makes these numbers 448; 1 where all are zero."""
    return torch.where(largest > 0, largest / LARGEST, 1.0)


def _to_e4m3(t: torch.Tensor) -> torch.Tensor:
    return t.clamp(-LARGEST, LARGEST).to(E4M3)


class Fp8Peer(Entrant):
    """Dense full and causal forwards."""

    directions = ("fwd",)

    def why_not(self, case: Case, direction: str) -> str:
        if case.packed or case.window != (-1, -1) or lacks(case):
            return "only dense full and causal cases are wired up for it"
        if case.head_dim != case.head_dim_v or case.head_dim % 16:
            return "only one head_dim for q, k and v, a multiple of 16, is wired up for it"
        return ""


Forward = Callable[..., Callable[..., torch.Tensor]]


def fa3_of_vllm(library: str = "") -> Forward:
    """The forward of FlashAttention-3 in vLLM, by the names of its arguments.

    That build has packed queries only. It gives a call that takes the arguments left and returns out.

    Args:
        library: shared library that registers ``torch.ops._vllm_fa3_C``; empty to use an installed vLLM.
    """
    if library:
        torch.ops.load_library(library)
    else:
        import vllm.vllm_flash_attn  # noqa: F401 - importing it registers the ops
    forward = torch.ops._vllm_fa3_C.fwd.default
    # None of them has a default, and versions differ in what they have.
    names = [argument.name for argument in forward._schema.arguments]
    plain = {
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": False,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }

    def bind(**given: Any) -> Callable[..., torch.Tensor]:
        arguments = {name: (plain | given).get(name) for name in names}
        return lambda **left: forward(*(arguments | left).values())[0]

    return bind


class Fa3Fp8(Fp8Peer):
    """FlashAttention-3 as vLLM builds it, called raw, with a factor for each key head. It returns bf16.

    That build has packed sequences only, so the batch is handed over as sequences of one length.

    Args:
        library: shared library that registers ``torch.ops._vllm_fa3_C``; empty to use an installed vLLM.
    """

    name = "fa3-fp8"

    def __init__(self, library: str = "") -> None:
        self._forward = fa3_of_vllm(library)

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        case = inputs.case
        (q, q_descale), (k, k_descale), (v, v_descale) = (per_head(t, case.num_heads_k) for t in inputs.qkv)

        def bounds(seqlen: int) -> torch.Tensor:
            return seqlen * torch.arange(case.batch + 1, dtype=torch.int32, device=q.device)

        given = {
            "q": q.flatten(0, 1),
            "k": k.flatten(0, 1),
            "v": v.flatten(0, 1),
            "cu_seqlens_q": bounds(case.seqlen_q),
            "cu_seqlens_k": bounds(case.seqlen_k),
            "max_seqlen_q": case.seqlen_q,
            "max_seqlen_k": case.seqlen_k,
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
            "softmax_scale": case.head_dim**-0.5,
            "is_causal": case.causal,
            # 0 lets it choose how to split the keys, which only pays where there are few queries.
            "num_splits": 0 if case.seqlen_q <= 16 else 1,
        }
        call, shape = self._forward(**given), inputs.dout.shape
        return lambda: call().view(shape)


class CudnnFp8(Fp8Peer):
    """``sdpa_fp8`` of cuDNN's frontend, a factor for each tensor, a graph and a workspace for each case."""

    name = "cudnn-fp8"

    def __init__(self) -> None:
        import cudnn  # behind torch, whose cuDNN it then finds

        self._cudnn = cudnn
        cudnn.pygraph.sdpa_fp8  # noqa: B018 - raises here, not in the first row, when it is not there
        self._handle = cudnn.create_handle()

    def why_not(self, case: Case, direction: str) -> str:
        if case.causal and case.seqlen_q != case.seqlen_k:
            return "its causal mask is aligned top-left on Hopper, which means the same for squares only"
        return super().why_not(case, direction)

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        try:
            return CudnnPlan(self._cudnn, self._handle, inputs)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            raise


class CudnnPlan:
    """A finished graph on the quantised tensors of one case. Calls return out in what the GPU offers of bf16
    and e4m3, (batch, seqlen, heads, size).

    Attributes:
        descale_out: what out is to be multiplied by; 1 in bf16.
    """

    # Weights are at most 1. A power of two, so that the factor itself rounds nothing.
    SCALE_OF_WEIGHTS = 256.0

    def __init__(self, cudnn: Any, handle: int, inputs: Inputs) -> None:
        self._cudnn, self._handle, self._device = cudnn, handle, inputs.device
        tensors = [per_tensor(t) for t in inputs.qkv]
        self._shape = inputs.dout.shape
        try:
            self._build(inputs, torch.bfloat16)
        except Exception:  # noqa: BLE001 - GPUs before Blackwell; what e4m3 says is what the row shows
            self._build(inputs, E4M3)
        ones = torch.ones(1, 1, 1, 1, device=inputs.device)
        weights = ones * self.SCALE_OF_WEIGHTS
        largest = torch.empty(2, device=inputs.device)
        self._scale_out = ones.clone()
        inside = [t for t, _ in tensors] + [descale for _, descale in tensors]
        inside += [1 / weights, weights, self._scale_out, largest[:1], largest[1:]]
        self._buffers = dict(zip(self._places, inside))
        self.descale_out = 1.0
        if self._out_dtype == E4M3:
            self._choose_scale(tensors[2][1].item() * LARGEST)

    def _build(self, inputs: Inputs, out_dtype: torch.dtype) -> None:
        cudnn, case = self._cudnn, inputs.case
        e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=self._handle
        )
        scalar = {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1)}
        qkv = [
            graph.tensor(name=name, data_type=e4m3, **_bhsd(t.shape)) for name, t in zip("qkv", inputs.qkv)
        ]
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        factors = [graph.tensor(name=name, data_type=fp32, **scalar) for name in names]
        out, _, *largest = graph.sdpa_fp8(
            *qkv,
            *factors,
            attn_scale=case.head_dim**-0.5,
            use_causal_mask=case.causal,
            generate_stats=False,
            name="sdpa_fp8",
        )
        layout = _bhsd(self._shape)
        kind = e4m3 if out_dtype == E4M3 else cudnn.data_type.BFLOAT16
        out.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"]).set_data_type(kind)
        for t in largest:
            t.set_output(True).set_dim(scalar["dim"]).set_stride(scalar["stride"]).set_data_type(fp32)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = max(1, graph.get_workspace_size())
        self._workspace = torch.empty(size, dtype=torch.uint8, device=inputs.device)
        self._graph, self._out_dtype, self._out = graph, out_dtype, out.get_uid()
        self._places = [t.get_uid() for t in (*qkv, *factors, *largest)]

    def _choose_scale(self, largest_value: float) -> None:
        """Makes the largest output lie within a factor of 2 below what e4m3 has, by a power of two."""
        self._set_scale(largest_value)  # no output is larger than the largest value
        largest_out = self().float().abs().max().item() * self.descale_out
        self._set_scale(largest_out)

    def _set_scale(self, largest: float) -> None:
        room = LARGEST / (1.07 * largest) if largest > 0 else 1.0  # what was measured is itself rounded
        scale = torch.tensor(room).log2().floor().exp2().item()
        self._scale_out.fill_(scale)
        self.descale_out = 1 / scale

    def __call__(self) -> torch.Tensor:
        out = torch.empty(self._shape, dtype=self._out_dtype, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        self._graph.execute(self._buffers | {self._out: out}, self._workspace, handle=self._handle)
        return out


def _bhsd(shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """cuDNN's sizes and strides of a contiguous (batch, seqlen, heads, size)."""
    batch, seqlen, heads, size = shape
    return {
        "dim": (batch, heads, seqlen, size),
        "stride": (seqlen * heads * size, size, heads * size, 1),
    }


FP8_PEERS = ("cudnn-fp8", "fa3-fp8")
