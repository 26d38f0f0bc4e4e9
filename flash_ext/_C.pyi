"""The extension module; written in csrc/api/bindings.cpp."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

build_info: dict[str, str]

def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    deterministic: bool | None,
    backend: str | None,
    want_lse: bool = True,
) -> tuple[Tensor, Tensor]: ...
def fwd_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    slopes: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    backend: str | None,
    want_lse: bool,
    tree: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    mask: Tensor | None,
    document_q: Tensor | None,
    document_k: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]: ...
def append_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None: ...
def append_behind(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    entries: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q: Tensor | None,
    cu_seqlens_q: Tensor | None,
    counts: bool,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
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
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    deterministic: bool | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def check_fwd(*arguments: Any) -> None: ...
def check_bwd(*arguments: Any) -> None: ...
def check_fwd_cached(*arguments: Any) -> None: ...
def check_cached_gradients(*arguments: Any) -> None: ...
def check_fwd_cached_gpu(*arguments: Any) -> None: ...
def is_latents(k: Tensor, v: Tensor) -> bool: ...
def is_tma_ready(t: Tensor) -> bool: ...
def check_fwd_mod(*arguments: Any) -> None: ...
def check_bwd_mod(*arguments: Any) -> None: ...
def check_append_kv(*arguments: Any) -> None: ...
def check_append_behind(*arguments: Any) -> None: ...
def check_condense(x: Tensor, block_rows: int, block_cols: int) -> None: ...

class PreparedCall:
    def watch(self, sources: list[Tensor]) -> None: ...
    def bind_stream(self) -> None: ...
    def set_missing_bias_dims(self, count: int) -> None: ...
    def set_plain(self) -> None: ...
    def expect_borders(self) -> None: ...
    def set_borders(self, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None: ...
    def may_pack(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> bool: ...
    def fits(self, q: Tensor, cu_seqlens_q: Tensor | None) -> bool: ...
    def fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        scale: float | None,
        sinks: Tensor | None,
        softcap: float,
        dropout_p: float,
        rng: Tensor | None,
        want_row_max: bool,
        deterministic: bool | None,
        backend: str | None,
        want_lse: bool,
    ) -> tuple[Tensor, Tensor, Tensor] | None: ...
    def bwd(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        scale: float | None,
        sinks: Tensor | None,
        softcap: float,
        dropout_p: float,
        rng: Tensor | None,
        deterministic: bool | None,
        backend: str | None,
    ) -> tuple[Tensor, Tensor, Tensor] | None: ...

def prepared_call(*arguments: Any) -> PreparedCall: ...
def path_names() -> str: ...
def plan(
    direction: str,
    *,
    dtype: str = "bfloat16",
    batch: int = 1,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    head_dim: int,
    head_dim_v: int,
    packed: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    deterministic: bool = False,
    modifiers: Sequence[str] = (),
    backend: str | None = None,
    device: int = 0,
    gpu: tuple[int, int, int, int, int] | None = None,
    tma: bool = True,
    need_qkv: bool = True,
    cache: tuple[str, str, int] | None = None,
    max_seqlen: tuple[int, int] = (0, 0),
    own_lengths: bool = False,
    slot_factors: bool = False,
    wide: bool = False,
) -> dict[str, Any]: ...
def plan_rows() -> list[tuple[str, str, str]]: ...
def done_launches() -> list[dict[str, Any]]: ...
def device_facts(device: int = 0) -> dict[str, Any]: ...
def get_switch(name: str) -> int | None: ...
def set_switch(name: str, value: int | None) -> None: ...
def last_launch(of_this_thread: bool = False) -> dict[str, Any] | None: ...
def sdpa_served() -> list[tuple[str, int]]: ...
def sdpa_returned() -> dict[tuple[str, str], int]: ...
def set_sdpa_log(function: Callable[[str, str | None, list[Tensor]], None]) -> None: ...
def use_null_kernels_on_cpu(enable: bool) -> None: ...
