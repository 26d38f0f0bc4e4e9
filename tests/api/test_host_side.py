"""What a GPU call does before its launch, run without a GPU: empty problems, views, choice of the path."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import flash_ext
from bench import host_cost
from flash_ext._ops.library import _C
from tests.qkv import make_qkv, null_kernels, reference, sdpa_counts

on_roads = pytest.mark.parametrize(
    ("device", "road"),
    [
        pytest.param("cpu", contextlib.nullcontext, id="cpu"),
        pytest.param("cpu", null_kernels, id="gpu-without-launch"),
        pytest.param("cuda", contextlib.nullcontext, id="gpu", marks=pytest.mark.gpu),
    ],
)


def launch_of(q: Tensor, k: Tensor, v: Tensor, **options: object) -> dict:
    flash_ext.forward(q, k, v, **options)
    return _C.last_launch()


def test_an_old_gpu_is_named() -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16)
    with null_kernels():
        out, lse = flash_ext.forward(q, k, v)
        _C.set_switch("compute_capability", 75)
        for call in (
            lambda: flash_ext.attention(q, k, v),
            lambda: flash_ext.backward(out, q, k, v, out, lse),
        ):
            words = r"no backend can run this call. sm90 backend: .*7\.5.* sm80 backend: .*7\.5"
            with pytest.raises(NotImplementedError, match=words):
                call()


EMPTY = [
    dict(batch=0, seqlen_q=3, seqlen_k=3),
    dict(seqlen_q=0, seqlen_k=3),
    dict(seqlen_q=3, seqlen_k=0),
    dict(seqlen_q=0, seqlen_k=0),
    dict(seqlen_q=3, heads=0, heads_k=0),
]


@on_roads
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_to_see(shape: dict[str, int], causal: bool, device: str, road) -> None:
    leaves = make_qkv(device, **shape, dtype=torch.bfloat16, requires_grad=True)
    with road():
        out, lse = flash_ext.forward(*leaves, causal=causal)
        (out.float().sum() + lse.exp().sum()).backward()
    assert out.shape == (*leaves[0].shape[:-1], 16)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@on_roads
@pytest.mark.parametrize(
    ("total_q", "total_k", "cu_q", "cu_k"), [(0, 5, [0, 0], [0, 5]), (5, 0, [0, 5], [0, 0]), (5, 5, [0], [0])]
)
def test_nothing_to_see_packed(
    total_q: int, total_k: int, cu_q: list[int], cu_k: list[int], device: str, road
) -> None:
    leaves = [
        torch.randn(rows, heads, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        for rows, heads in ((total_q, 4), (total_k, 2), (total_k, 2))
    ]
    cu_seqlens = [torch.tensor(cu, dtype=torch.int32, device=device) for cu in (cu_q, cu_k)]
    with road():
        out, (lse, _) = flash_ext.attention_varlen(
            *leaves, *cu_seqlens, return_aux=flash_ext.AuxRequest(lse=True)
        )
        (out.float().sum() + lse.exp().sum()).backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in leaves)


def shifted(t: Tensor) -> Tensor:
    """The same values one element further in memory."""
    buffer = t.new_empty(t.numel() + 1)[1:].view(t.shape)
    return buffer.copy_(t)


def test_alignment_is_seen_per_tensor() -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16, head_dim=64)
    odd_rows = torch.zeros(2, 17, 4, 65, dtype=torch.bfloat16)[..., :64]
    with null_kernels():
        assert launch_of(q, k, v)["aligned"]
        for i, t in enumerate((q, k, v)):
            tensors = [q, k, v]
            tensors[i] = shifted(t)
            assert not launch_of(*tensors)["aligned"]
        assert not launch_of(odd_rows, k, v)["aligned"]
        assert launch_of(q, k, v)["aligned"]
        _C.set_switch("unaligned", 1)
        assert not launch_of(q, k, v)["aligned"]
        _C.set_switch("unaligned", None)


def test_strides_of_single_dimensions_do_not_count() -> None:
    for dim, stride in itertools.product(range(3), (0, 3331333, 99990001)):
        shape = [2, 17, 4, 64]
        shape[dim] = 1
        plain = torch.randn(shape, dtype=torch.bfloat16)
        strides = list(plain.stride())
        strides[dim] = stride
        odd = plain.as_strided(shape, strides)
        with null_kernels():
            assert launch_of(odd, odd, odd)["aligned"]
        assert torch.equal(flash_ext.attention(odd, odd, odd), flash_ext.attention(plain, plain, plain))


def test_memory_beside_the_results() -> None:
    """A forward of many tiles allocates out and lse only, one of few at most 40 MB for parts of its keys. The
    backward's workspace is linear in the rows.
    """
    heads = {"num_heads": 4, "num_heads_k": 2, "head_dim": 64, "head_dim_v": 64}
    with null_kernels():
        for direction in ("fwd", "bwd"):
            small, large = (
                _C.plan(direction, batch=16, seqlen_q=n, seqlen_k=n, **heads) for n in (1024, 4096)
            )
            assert large["workspace_bytes"] == 4 * small["workspace_bytes"]
            assert (large["workspace_bytes"] > 0) == (direction == "bwd")
        few = [
            _C.plan("fwd", seqlen_q=n, seqlen_k=n, **heads)["workspace_bytes"] for n in range(64, 8192, 64)
        ]
        assert 0 < max(few) <= 40e6


def test_switches_have_names() -> None:
    with pytest.raises(ValueError, match="unknown switch 'x'; known: compute_capability, num_sms"):
        _C.set_switch("x", 1)
    assert _C.get_switch("num_sms") is None


def test_host_cost_is_measured_and_leaves_nothing_behind() -> None:
    times = host_cost.measure("cpu", number=2, repeats=1)
    named = {"empty op", "attention", "attention and its gradient", "prepared mask", "prepared bias"}
    assert named | {*host_cost.serving_calls("cpu"), *host_cost.modified_calls("cpu")} < {*times}
    assert all(value > 0 for value in times.values())
    assert _C.get_switch("skip_launch") is None
    q, k, v = make_qkv()
    torch.testing.assert_close(flash_ext.attention(q, k, v), reference(q, k, v)[0].float())


@pytest.mark.parametrize("name", [*host_cost.serving_calls("cpu")])
def test_host_cost_of_serving_is_that_of_a_launch_over_a_cache(name: str) -> None:
    """Each row takes the road of a GPU to its end. Nothing reads the values of lengths, pages and slots."""
    mode, call = host_cost.serving_calls("cpu")[name]
    with host_cost.null_kernels("cpu"), mode():
        _C.set_switch("record_launches", 1)
        try:
            flash_ext.attention(*make_qkv(dtype=torch.bfloat16))
            assert "cached" not in _C.last_launch()["kernel"]
            got = call()
            launched = _C.last_launch()["kernel"]
        finally:
            _C.set_switch("record_launches", None)
    assert ("cached" in launched) == (name != "append_kv")
    assert (got is None) == (name == "append_kv")
    assert isinstance(got, tuple) == name.endswith("lse")


def test_host_cost_of_modifiers_is_that_of_their_launch() -> None:
    """Each row runs what it says, to the end of a GPU's road; documents that run packed compare no ids."""
    timed = host_cost.modified_calls("cpu")
    with host_cost.null_kernels("cpu"):
        _C.set_switch("record_launches", 1)
        try:
            for name, (mode, call) in timed.items():
                with mode():
                    outs, rows = zip(*[(call(), _C.last_launch()["row"]) for _ in range(2)])
                is_plain = name == "attention, bhsd" or "packed" in name
                assert [".fwd_mod." in row for row in rows] == [not is_plain] * 2, name
                shape = (2, 16, 4, 64) if "bhsd" not in name else (2, 4, 16, 64)
                shape = (2, 64, 1, 64) if "packed" in name else shape
                assert all(out.shape == shape for out in outs), name
                assert all(out.requires_grad == ("graph" in name) for out in outs), name
        finally:
            _C.set_switch("record_launches", None)


def test_host_cost_reads_no_values() -> None:
    """What a CPU looks at and a GPU does not is left out: numbers that a CPU refuses go through."""
    q, (k, v) = torch.ones(1, 4, 64).bfloat16(), torch.zeros(2, 2, 16, 4, 64).bfloat16()
    bounds, wrong = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([99], dtype=torch.int32)
    options = dict(seqused_k=wrong, block_table=wrong[:, None])
    entries = dict(cache_seqlens=wrong, page_table=wrong[:, None])
    calls = (
        lambda: flash_ext.attention_varlen(q, k, v, bounds, None, **options),
        lambda: flash_ext.attention_varlen(q, q, q, bounds + 9, bounds),
        lambda: flash_ext.serving.append_kv(q, q, k, v, wrong),
        lambda: flash_ext.serving.flash_attn_with_kvcache(q[None], k, v, q[None], q[None], **entries),
    )
    for call in calls:
        with host_cost.null_kernels("cpu"):
            call()
        with pytest.raises(ValueError, match="must"):
            call()


@pytest.fixture
def overridden() -> Iterator[None]:
    """torch's operators on our implementations for tensors without memory."""
    torch.ops.flash_ext._set_sdpa("Meta")
    yield
    _C.set_switch("capturing", None)
    torch.ops.flash_ext._set_sdpa("")


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("capturing", [None, 0, 1])
def test_random_state_is_on_the_device_in_a_graph(capturing: int | None) -> None:
    """A graph holds results on the GPU only: while one is captured, seed and offset of torch's are there."""
    _C.set_switch("capturing", capturing)
    q, k, v = (torch.empty(2, 4, 9, 16, dtype=torch.bfloat16, device="meta") for _ in "qkv")
    mask, few = q.new_empty(9, 9), (k[:, :2], v[:, :2])
    aten = torch.ops.aten
    calls = {
        "_scaled_dot_product_flash_attention": lambda op: op(q, k, v),
        "_flash_attention_forward": lambda op: op(q, k, v, None, None, 4, 4, 0.0, False, False),
        "_scaled_dot_product_efficient_attention": lambda op: op(q, k, v, mask.expand(2, 4, 9, 9), True),
        "_scaled_dot_product_cudnn_attention": lambda op: op(q, *few, mask, True),
    }
    for name, call in calls.items():
        served = sdpa_counts()[name][0]
        tensors = [t for t in call(getattr(aten, name)) if isinstance(t, Tensor)]
        assert sdpa_counts()[name][0] == served + 1
        on_the_host = [t for t in tensors if t.device.type == "cpu"]
        expected = 2 if "efficient" in name and not capturing else 0
        assert len(on_the_host) == expected, name
        assert all(t.shape == () and t.dtype == torch.int64 for t in on_the_host)
