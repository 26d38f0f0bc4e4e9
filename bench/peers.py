"""Everything that is timed: our paths, and the implementations they are compared with.

An entrant turns the inputs of a case into one callable per direction. What it lays out, copies or compiles
beforehand is not timed. None of the peers is ever needed: what is not there is reported and left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.shapes import DIRECTIONS, Case

Call = Callable[[], object]


class Inputs:
    """Random N(0, 1) tensors of one case, the same for every entrant, in the layout each one wants.

    Attributes:
        q, k, v, dout: contiguous (batch, seqlen, heads, size), or (total, heads, size) for a packed case.
        cu_seqlens: int32 (batch + 1,) on the device for a packed case, else None.
    """

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(case.name.encode()))

        def draw(rows: int, heads: int, size: int) -> torch.Tensor:
            shape = (rows, heads, size) if case.packed else (case.batch, rows // case.batch, heads, size)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        self.q = draw(case.total_q, case.num_heads, case.head_dim)
        self.k = draw(case.total_k, case.num_heads_k, case.head_dim)
        self.v = draw(case.total_k, case.num_heads_k, case.head_dim_v)
        self.dout = draw(case.total_q, case.num_heads, case.head_dim_v)
        self.cu_seqlens = None
        if case.packed:
            ends = torch.tensor((0, *case.lengths)).cumsum(0)
            self.cu_seqlens = ends.to(device=device, dtype=torch.int32)

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as drawn."""
        return self.q, self.k, self.v

    @functools.cached_property
    def bhsd(self) -> tuple[torch.Tensor, ...]:
        """q, k, v and dout as contiguous (batch, heads, seqlen, size); a packed case is one long sequence."""
        tensors = (self.q, self.k, self.v, self.dout)
        if self.case.packed:
            tensors = tuple(t.unsqueeze(0) for t in tensors)
        return tuple(t.transpose(1, 2).contiguous() for t in tensors)


def visible_mask(case: Case, device: torch.device) -> torch.Tensor:
    """Boolean (seqlen_q, seqlen_k), True where a query sees a key: the one way SDPA takes most masks."""
    aligned = torch.arange(case.seqlen_q, device=device)[:, None] + case.seqlen_k - case.seqlen_q
    col = torch.arange(case.seqlen_k, device=device)[None, :]
    left, right = case.window
    mask = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=device)
    if case.causal:
        mask &= col <= aligned
    if left >= 0:
        mask &= col >= aligned - left
    if right >= 0:
        mask &= col <= aligned + right
    return mask


def through_autograd(
    forward: Callable[..., torch.Tensor], qkv: tuple[torch.Tensor, ...], dout: torch.Tensor, direction: str
) -> Call:
    """The timed callable of an implementation that autograd can differentiate.

    The backward is ``torch.autograd.grad(out, inputs, dout, retain_graph=True)``; ``dout`` takes the strides
    of ``out``, which is what a peer's fast road wants and what a training step hands over.
    """
    if direction == "fwd":
        return lambda: forward(*qkv)
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    out = forward(*leaves)
    grad = torch.empty_like(out).copy_(dout)
    if direction == "bwd":
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    return lambda: torch.autograd.grad(forward(*leaves), leaves, grad)


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool):
    """PyTorch's own switch for repeatable kernels, without its habit of filling fresh memory."""
    if not enabled:
        yield
        return
    import torch.utils.deterministic as settings

    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fill


class Entrant:
    """One column of the benchmark.

    Attributes:
        name: column name.
        ours: True for flash_ext itself.
        directions: which of fwd, bwd and both it takes part in.
    """

    name = ""
    ours = False
    directions: tuple[str, ...] = DIRECTIONS

    def why_not(self, case: Case, direction: str) -> str:
        """Why this entrant cannot take the case, in words; empty when it can."""
        return ""

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        """The callable to time. May raise anything: the text ends up in the row."""
        raise NotImplementedError


class Ours(Entrant):
    """``flash_ext.attention`` or ``attention_varlen`` as a user calls them, on one forced path."""

    ours = True

    def __init__(self, path: str) -> None:
        self.name = path
        self.path = None if path == "auto" else path

    def _options(self, inputs: Inputs) -> dict:
        case = inputs.case
        options = {
            "causal": case.causal,
            "window": case.window,
            "deterministic": case.deterministic,
            "path": self.path,
        }
        if case.packed:
            options |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
            options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        return options

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        import flash_ext

        attention = flash_ext.attention_varlen if inputs.case.packed else flash_ext.attention
        forward = functools.partial(attention, **self._options(inputs))
        return through_autograd(forward, inputs.qkv, inputs.dout, direction)


class OursRaw(Ours):
    """``flash_ext.backward`` by itself, with no autograd around it, as raw kernels of peers are timed."""

    directions = ("bwd",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.name = f"{path}-raw"

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        import flash_ext

        options = self._options(inputs)
        q, k, v, dout = *inputs.qkv, inputs.dout
        out, lse = flash_ext.forward(q, k, v, **options)
        return lambda: flash_ext.backward(dout, q, k, v, out, lse, **options)


class Sdpa(Entrant):
    """One backend of ``F.scaled_dot_product_attention``, contiguous (batch, heads, seqlen, size) tensors."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def why_not(self, case: Case, direction: str) -> str:
        return "packed sequences are not expressible through SDPA" if case.packed else ""

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        case = inputs.case
        options = {"enable_gqa": True} if case.num_heads_k != case.num_heads else {}
        # SDPA's own causal flag is aligned top-left; it means the same as ours only for squares.
        if case.causal and case.window == (-1, -1) and case.seqlen_q == case.seqlen_k:
            options["is_causal"] = True
        elif case.masked:
            options["attn_mask"] = visible_mask(case, inputs.device)

        def forward(q, k, v):
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(q, k, v, **options)

        *qkv, dout = inputs.bhsd
        call = through_autograd(forward, tuple(qkv), dout, direction)

        def repeatable() -> object:
            with deterministic_algorithms(True):
                return call()

        return repeatable if case.deterministic else call


class Fa2(Sdpa):
    """PyTorch's own FlashAttention-2: through SDPA, or by the op beneath it for masks SDPA cannot name."""

    def __init__(self) -> None:
        super().__init__("fa2", SDPBackend.FLASH_ATTENTION)

    def why_not(self, case: Case, direction: str) -> str:
        return ""

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

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        case = inputs.case
        *qkv, dout = inputs.bhsd
        block_mask = None
        if case.masked or case.packed:
            block_mask = self._block_mask(
                self._mask_mod(inputs),
                None,
                None,
                qkv[0].shape[2],
                qkv[1].shape[2],
                device=str(inputs.device),
            )

        def forward(q, k, v):
            return self._attention(
                q, k, v, block_mask=block_mask, enable_gqa=case.num_heads_k != case.num_heads
            )

        return through_autograd(forward, tuple(qkv), dout, direction)

    @staticmethod
    def _mask_mod(inputs: Inputs) -> Callable[..., torch.Tensor]:
        case = inputs.case
        shift = 0 if case.packed else case.seqlen_k - case.seqlen_q
        left, right = case.window
        documents = None
        if case.packed:
            documents = torch.repeat_interleave(torch.tensor(case.lengths)).to(inputs.device)

        def visible(b, h, row, col):
            aligned = row + shift
            seen = col >= 0
            if case.causal:
                seen = seen & (col <= aligned)
            if left >= 0:
                seen = seen & (col >= aligned - left)
            if right >= 0:
                seen = seen & (col <= aligned + right)
            if documents is not None:
                seen = seen & (documents[row] == documents[col])
            return seen

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

    def prepare(self, inputs: Inputs, direction: str) -> Call:
        case, (q, k, v), dout = inputs.case, inputs.qkv, inputs.dout
        left, right = case.window
        options = {
            "softmax_scale": case.head_dim**-0.5,
            "is_causal": case.causal,
            "window_size_left": left,
            "window_size_right": 0 if case.causal and left >= 0 else right,
        }
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
        if case.packed or case.window != (-1, -1):
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


def raw_pair(forward: Callable[[], tuple], backward: Callable[..., object], direction: str) -> Call:
    """The timed callable of a forward that returns (out, lse) and a backward that takes them."""
    if direction == "fwd":
        return forward
    if direction == "both":
        return lambda: backward(*forward())
    out, lse = forward()
    return lambda: backward(out, lse)


# "all" on a GPU. The unfused math backend must be named: it materialises what the others exist to avoid.
GPU_PEERS = ("fa2", "cudnn", "mem", "flex", "fa3", "fa4")
CPU_PEERS = ("math",)


def make_peers(
    names: list[str], fa3_lib: str = "", cudart12: str = ""
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
    }
    found, absent = [], {}
    for name in names:
        if name not in makers:
            raise ValueError(f"no peer is called {name!r}; known: {', '.join(makers)}")
        try:
            found.append(makers[name]())
        except Exception as error:  # noqa: BLE001 - a broken peer library must not end the run
            absent[name] = f"{type(error).__name__}: {error}"
    return found, absent


def make_ours(paths: list[str]) -> list[Entrant]:
    """Two columns per path of ours: as called by a user, and the raw backward."""
    return [entrant for path in paths for entrant in (Ours(path), OursRaw(path))]
