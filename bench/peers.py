"""The implementations that ours are compared with.

None of the peers is ever needed: what is not there is reported and left out.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import asks, features
from bench.entrants import Entrant, lacks
from bench.features import window_rule
from bench.inputs import Call, Inputs, deterministic_algorithms, through_autograd
from bench.peers_fp8 import CudnnFp8, Fa3Fp8
from bench.shapes import Case


def refused(case: Case, peer: str, words: str) -> str:
    """What a case asks for that a kind of peer cannot do, behind ``words``; "" if it can do all of it."""
    missing = [name for name, feature in asks.wanted(case).items() if peer in feature.refused_by]
    return f"{words} {' and '.join(missing)}" if missing else ""


class Sdpa(Entrant):
    """One backend of ``F.scaled_dot_product_attention``, contiguous (batch, heads, seqlen, size) tensors."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def why_not(self, case: Case, direction: str) -> str:
        if case.packed:
            return "packed sequences are not expressible through SDPA"
        return refused(case, "sdpa", "SDPA does not do")

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        case, asked = inputs.case, inputs.asked
        options: dict = {"dropout_p": asked.options.get("dropout_p", 0.0)}
        group = case.num_heads // case.num_heads_k
        copies_heads = group > 1 and self.backend == SDPBackend.EFFICIENT_ATTENTION
        if group > 1 and not copies_heads:
            options["enable_gqa"] = True
        learned = (asked.bias,) if asked.learned is not None and asked.bias is not None else ()
        hidden = None
        # SDPA's own causal flag is aligned top-left; it means the same as ours only for squares.
        square = case.seqlen_q == case.seqlen_k and case.window == (-1, -1)
        if case.causal and square and asked.bias is None and "mask" not in asked.options:
            options["is_causal"] = True
        elif case.model and asked.rule is not None:
            options["attn_mask"] = inputs.hidden if asked.bias is None else inputs.biased
            hidden = inputs.hidden if learned else None
        elif asked.rule is not None:
            by = {"by_batch": asked.by_batch, "by_head": asked.by_head}
            options["attn_mask"] = features.dense_mask(case, asked.rule, inputs.device, **by)
        elif asked.bias is not None:
            options["attn_mask"] = asked.bias
        if direction == "fwd":
            learned = ()

        def forward(q, k, v, bias=None):
            given = options
            if bias is not None:
                given = options | {"attn_mask": bias if hidden is None else bias + hidden}
            if copies_heads:
                k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(q, k, v, **given)

        *qkv, dout = inputs.bhsd
        call = through_autograd(forward, (*qkv, *learned), dout, direction)

        def repeatable() -> object:
            with deterministic_algorithms(True):
                return call()

        return repeatable if case.deterministic else call


class Fa2(Sdpa):
    """PyTorch's own FlashAttention-2: through SDPA, or by the op beneath it for masks SDPA cannot name."""

    def __init__(self) -> None:
        super().__init__("fa2", SDPBackend.FLASH_ATTENTION)

    def why_not(self, case: Case, direction: str) -> str:
        return lacks(case, "dropout")

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        case = inputs.case
        square = case.seqlen_q == case.seqlen_k
        if not case.packed and case.window == (-1, -1) and (square or not case.causal):
            return super().prepare(inputs, direction)
        left, right = (None if reach < 0 else reach for reach in case.window)

        def forward(q, k, v):
            return torch.ops.aten._flash_attention_forward(
                q,
                k,
                v,
                inputs.cu_seqlens,
                inputs.cu_seqlens,
                case.seqlen_q,
                case.seqlen_k,
                0.0,
                case.causal,
                False,
                window_size_left=left,
                window_size_right=right,
            )[0]

        return through_autograd(forward, inputs.qkv, inputs.dout, direction)


class Flex(Entrant):
    """Compiled FlexAttention with a block mask built beforehand."""

    name = "flex"

    def __init__(self) -> None:
        import torch._functorch.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Past this many shapes torch.compile silently falls back to the unfused road.
        torch._dynamo.config.recompile_limit = 1000
        # A donated buffer forbids retain_graph, which the timed backward needs.
        torch._functorch.config.donated_buffer = False
        self._attention = torch.compile(flex_attention, dynamic=False)
        self._block_mask = torch.compile(create_block_mask, dynamic=False)

    def why_not(self, case: Case, direction: str) -> str:
        return refused(case, "flex", "FlexAttention does not do")

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        case, asked = inputs.case, inputs.asked
        *qkv, dout = inputs.bhsd
        block_mask, rule = None, self._mask_mod(inputs)
        if rule is not None:
            block_mask = self._block_mask(
                rule,
                case.batch if asked.by_batch else None,
                case.num_heads if asked.by_head else None,
                qkv[0].shape[2],
                qkv[1].shape[2],
                device=str(inputs.device),
            )
        options = {"block_mask": block_mask, "enable_gqa": case.num_heads_k != case.num_heads}
        if "sinks" in asked.options:
            forward = functools.partial(self._with_sinks, options)
        else:

            def forward(q, k, v, learned=None):
                change = asked.score and asked.score(learned)
                return self._attention(q, k, v, score_mod=change, **options)

        learned = () if asked.learned is None else (asked.learned,)
        return through_autograd(forward, (*qkv, *learned), dout, direction)

    def _with_sinks(self, options: dict, q, k, v, sinks) -> torch.Tensor:
        """A sink scales a row by e^lse / (e^lse + e^sink)."""
        from torch.nn.attention.flex_attention import AuxRequest

        out, extra = self._attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        return out * torch.sigmoid(extra.lse - sinks[:, None])[..., None].to(out.dtype)

    @staticmethod
    def _mask_mod(inputs: Inputs) -> features.Rule | None:
        case = inputs.case
        if not case.packed:
            return inputs.asked.rule
        # One long square without a shift: causal and window are the same inside each document.
        base = window_rule(dataclasses.replace(case, seqlen_k=case.seqlen_q, lengths=()))
        documents = torch.repeat_interleave(torch.tensor(case.lengths)).to(inputs.device)

        def visible(b, h, row, col):
            seen = documents[row] == documents[col]
            return seen if base is None else seen & base(b, h, row, col)

        return visible


class Fa3(Entrant):
    """FlashAttention-3's registered ops, called raw: no autograd around the backward.

    Args:
        library: shared library that registers ``torch.ops.flash_attn_3``; empty to use an installed package.
        cudart12: the CUDA 12 runtime that such a library was linked against; empty when it is already found.
    """

    name = "fa3"

    def __init__(self, library: str = "", cudart12: str = "") -> None:
        if cudart12:
            ctypes.CDLL(cudart12, mode=ctypes.RTLD_GLOBAL)
        if library:
            torch.ops.load_library(library)
        else:
            import flash_attn_interface  # noqa: F401 - importing it registers the ops
        self._ops = torch.ops.flash_attn_3
        self._ops.fwd  # noqa: B018 - raises here, not in the first row, when the library lacks it

    def why_not(self, case: Case, direction: str) -> str:
        return lacks(case, "softcap", "softcap-50")

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        case, (q, k, v), dout = inputs.case, inputs.qkv, inputs.dout
        left, right = case.window
        options = {
            "softmax_scale": case.head_dim**-0.5,
            "is_causal": case.causal,
            "window_size_left": left,
            "window_size_right": 0 if case.causal and left >= 0 else right,
        }
        if "softcap" in inputs.asked.options:
            options["softcap"] = inputs.asked.options["softcap"]
        if case.packed:
            options |= {
                "cu_seqlens_q": inputs.cu_seqlens,
                "cu_seqlens_k": inputs.cu_seqlens,
                "max_seqlen_q": case.seqlen_q,
                "max_seqlen_k": case.seqlen_k,
            }
        # 0 lets it choose how to split the keys, which only pays where there are few queries.
        num_splits = 0 if case.seqlen_q <= 16 else 1

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            return tuple(self._ops.fwd(q, k, v, num_splits=num_splits, **options)[:2])

        def backward(out, lse) -> object:
            return self._ops.bwd(dout, q, k, v, out, lse, deterministic=case.deterministic, **options)

        return raw_pair(forward, backward, direction)


class Fa4(Entrant):
    """FlashAttention-4's Python kernels (``flash_attn.cute``), called raw; a shape's first call compiles."""

    name = "fa4"

    def __init__(self) -> None:
        from flash_attn.cute import interface

        self._interface = interface

    def why_not(self, case: Case, direction: str) -> str:
        if case.packed or case.window != (-1, -1) or lacks(case):
            return "only dense full and causal cases are wired up for it"
        return (
            "no deterministic backward is wired up for it"
            if case.deterministic and direction != "fwd"
            else ""
        )

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        (q, k, v), dout, causal = inputs.qkv, inputs.dout, inputs.case.causal

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            return tuple(self._interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2])

        def backward(out, lse) -> object:
            return self._interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=causal)

        return raw_pair(forward, backward, direction)


class TritonFlash2(Entrant):
    """The forward of FlashAttention-2 in Triton that :mod:`examples.ladder.triton_flash2` has, called raw."""

    name = "triton"
    directions = ("fwd",)

    def __init__(self) -> None:
        from examples.ladder import triton_flash2

        self._attention = triton_flash2.attention

    def why_not(self, case: Case, direction: str) -> str:
        dense = not case.packed and case.window == (-1, -1) and case.head_dim == case.head_dim_v
        return "" if dense and not lacks(case) else "it does dense full and causal cases with one head_dim"

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        return functools.partial(self._attention, *inputs.qkv, causal=inputs.case.causal)


def raw_pair(forward: Callable[[], tuple], backward: Callable[..., object], direction: str) -> Call:
    """The timed callable of a forward that returns (out, lse) and a backward that takes them."""
    if direction == "fwd":
        return forward
    if direction == "both":
        return lambda: backward(*forward())
    out, lse = forward()
    return lambda: backward(out, lse)


# "all" on a GPU. The unfused math backend must be named: it materialises what the others exist to avoid.
GPU_PEERS = ("fa2", "cudnn", "mem", "flex", "fa3", "fa4", "triton")
CPU_PEERS = ("math",)


def make_peers(
    names: list[str], fa3_lib: str = "", cudart12: str = "", fa3_fp8_lib: str = ""
) -> tuple[list[Entrant], dict[str, str]]:
    """The peers of those names that are here, and for each of the others what is missing.

    Raises:
        ValueError: a name that no peer has.
    """
    makers: dict[str, Callable[[], Entrant]] = {
        "fa2": Fa2,
        "cudnn": lambda: Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        "mem": lambda: Sdpa("mem", SDPBackend.EFFICIENT_ATTENTION),
        "math": lambda: Sdpa("math", SDPBackend.MATH),
        "flex": Flex,
        "fa3": lambda: Fa3(fa3_lib, cudart12),
        "fa4": Fa4,
        "triton": TritonFlash2,
        "fa3-fp8": lambda: Fa3Fp8(fa3_fp8_lib),
        "cudnn-fp8": CudnnFp8,
    }
    found, absent = [], {}
    for name in names:
        if name not in makers:
            raise ValueError(f"no peer is called {name!r}; known: {', '.join(makers)}")
        try:
            found.append(makers[name]())
        except Exception as error:  # noqa: BLE001 - a broken peer library must not end the run
            causes = [str(cause) for cause in (error, error.__cause__) if cause is not None]
            absent[name] = f"{type(error).__name__}: {'; '.join(causes)}"
    return found, absent
