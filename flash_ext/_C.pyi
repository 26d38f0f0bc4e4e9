"""The extension module (csrc/api_bindings.cpp). Use the functions of the package instead of these."""

from typing import Any, Literal, TypedDict

from torch import Tensor

class BuildInfo(TypedDict):
    version: str
    git_sha: str
    torch: str
    cuda: str
    archs: str
    flags: str
    variant: str

class DeviceFacts(TypedDict):
    compute_capability: tuple[int, int]
    num_sms: int
    smem_per_block: int
    l2_bytes: int

build_info: BuildInfo

def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    deterministic: bool,
    path: str | None,
) -> tuple[Tensor, Tensor]: ...
def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    deterministic: bool,
    path: str | None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def check_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    path: str | None,
    /,
) -> None: ...
def check_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    path: str | None,
    /,
) -> None: ...
def path_names() -> str: ...
def plan(
    direction: Literal["fwd", "bwd"],
    *,
    dtype: Literal["float16", "bfloat16"] = ...,
    batch: int = ...,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    head_dim: int,
    head_dim_v: int,
    packed: bool = ...,
    max_seqlen_q: int = ...,
    max_seqlen_k: int = ...,
    window_left: int = ...,
    window_right: int = ...,
    deterministic: bool = ...,
    path: str | None = ...,
    device: int = ...,
) -> dict[str, Any]: ...
def device_facts(device: int = ...) -> DeviceFacts: ...
def get_switch(name: str, /) -> int | None: ...
def set_switch(name: str, value: int | None, /) -> None: ...
def last_launch() -> dict[str, Any] | None: ...
def use_null_kernels_on_cpu(enable: bool, /) -> None: ...
