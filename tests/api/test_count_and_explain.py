"""flash_ext.count() and flash_ext.explain(): what ran, and what would run."""

from __future__ import annotations

import threading

import pytest
import torch

import flash_ext
from flash_ext import masks
from flash_ext.compat import flash_attn
from flash_ext.integrations import transformers as integration

pytestmark = pytest.mark.everywhere

H200 = "9.0/132"


def qkv(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(*shape, dtype=dtype) for _ in range(3)]


def test_entries_are_counted_while_it_is_asked_for():
    q, k, v = qkv(1, 8, 2, 16)
    cu = torch.tensor([0, 8]).int()
    flash_ext.attention(q, k, v)
    with flash_ext.count() as c:
        flash_ext.attention(q, k, v)
        flash_ext.attention(q, k, v, mask=masks.Causal("top_left"))
        flash_ext.attention_varlen(q[0], k[0], v[0], cu, cu)
        out, lse = flash_ext.forward(q, k, v)
        flash_ext.backward(out, q, k, v, out, lse)
        flash_attn.flash_attn_func(q, k, v)
    flash_ext.attention(q, k, v)
    own = {"attention": 3, "attention_varlen": 1, "forward": 1, "backward": 1}
    assert c.calls == {**own, "compat.flash_attn": 1}
    assert "'attention': 3" in repr(c)


def test_a_module_and_what_it_calls():
    layer = flash_ext.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 5, 16)
    with flash_ext.count() as c:
        layer(x, x, x, need_weights=False)
        flash_ext.scaled_dot_product_attention(*qkv(1, 2, 5, 8))
    assert c.calls == {
        "nn.MultiheadAttention": 1, "forward": 1, "scaled_dot_product_attention": 1, "attention": 1
    }  # fmt: skip


def test_entries_of_the_modules_are_counted():
    q, k, v = qkv(1, 8, 2, 16, dtype=torch.bfloat16)
    with flash_ext.count() as c:
        flash_ext.fp8.attention_fp8(flash_ext.fp8.quantize_fp8(q, k, v))
        flash_ext.serving.append_kv(k[0], v[0], k, v, torch.arange(8))
        flash_ext.serving.flash_attn_with_kvcache(q, k, v, cache_seqlens=8)
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=8)
    assert c.calls == {"attention_fp8": 1, "append_kv": 1, "serving": 1, "compat.flash_attn": 1}


def test_parts_and_processes_are_counted():
    q, k, v = qkv(1, 8, 2, 16)
    parts = [flash_ext.forward(q, k[:, keys], v[:, keys]) for keys in (slice(4), slice(4, 8))]
    with flash_ext.count() as c:
        flash_ext.merge_attention_states(*parts[0], *parts[1])
        flash_ext.distributed.ring_attention(q, k, v)
        flash_ext.distributed.ulysses_attention(q, k, v)
    ring = c.calls.pop("forward")  # of each half of a share
    assert ring >= 1
    assert c.calls == {
        "merge_attention_states": 1, "distributed.ring_attention": 1, "distributed.ulysses_attention": 1,
        "attention": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "reason, given",
    [
        (None, {}),
        ("the model has neither float16 nor bfloat16", {"dtype": torch.float32}),
        ("mask is given", {"attention_mask": torch.ones(1, 1, 160, 160).tril() > 0}),
        ("softcap is given", {"softcap": 2.0}),
        ("window_size is given", {"sliding_window": 9}),
        ("there are fewer than 128 queries or keys", {"rows": 127}),
        ("a head size is no multiple of 16", {"head_dim": 24}),
        ("a head size is above 256", {"head_dim": 272}),
    ],
)
def test_a_layer_that_does_not_run_in_fp8_is_counted(reason: str | None, given: dict):
    options = {"dtype": torch.bfloat16, "rows": 160, "head_dim": 32, "attention_mask": None} | given
    dtype, rows, head_dim, mask = (
        options.pop(name) for name in ("dtype", "rows", "head_dim", "attention_mask")
    )
    q, k, v = qkv(1, 2, rows, head_dim, dtype=dtype)
    with flash_ext.count() as c:
        layer = integration.attention_forward
        layer(torch.nn.Module(), q, k, v, mask, is_causal=True, quantize="fp8", **options)
    entry = "integrations.transformers"
    assert c.fell_back == ({} if reason is None else {(entry, reason): 1})
    assert c.calls["attention_fp8"] == (reason is None) and c.calls[entry] == 1
    assert str(dict(c.fell_back)) in repr(c)


def test_packed_layers_of_the_batch_invariant_mode_are_counted():
    q, k, v = qkv(1, 2, 300, 32, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 140, 300], dtype=torch.int32)
    options = {"is_causal": True, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    with flash_ext.serving.set_batch_invariant(True), flash_ext.count() as c:
        for mode in (None, "fp8"):  # of which one asks for fp8
            integration.attention_forward(torch.nn.Module(), q, k, v, None, quantize=mode, **options)
    reason = "sequences are packed in the batch-invariant mode"
    assert c.fell_back == {("integrations.transformers", reason): 1}


def test_counts_nest_and_see_all_threads():
    q, k, v = qkv(1, 8, 2, 16)
    with flash_ext.count() as outer:
        with flash_ext.count() as inner:
            threads = [threading.Thread(target=flash_ext.attention, args=(q, k, v)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        flash_ext.attention(q, k, v)
    assert (outer.calls["attention"], inner.calls["attention"]) == (5, 4)


def test_torch_operators_are_not_counted_before_they_are_taken_over():
    with flash_ext.count() as c:
        torch.nn.functional.scaled_dot_product_attention(*qkv(1, 2, 8, 16))
    assert not c.calls and not c.torch_served and not c.torch_returned


def test_a_compiled_call_is_not_counted_and_works():
    q, k, v = qkv(1, 8, 2, 16)
    call = torch.compile(flash_ext.attention, fullgraph=True, backend="eager")
    with flash_ext.count() as c:
        torch.testing.assert_close(call(q, k, v), flash_ext.attention(q, k, v))
    assert c.calls["attention"] == 1


def test_padding_is_told_from_a_mask_of_rows():
    """Also in the form that a mask keeps."""
    q, k, v = (torch.empty(2, 4096, 16, 128, dtype=torch.bfloat16) for _ in "qkv")
    keep = torch.arange(4096).expand(2, -1) < 3000
    for mask in (masks.KeyMask(keep), masks.Dense(keep[:, None, None, :])):
        assert flash_ext.explain(q, k, v, mask=mask, gpu=H200).forward["row"] == "sm90.fwd_mod.m192.hide"
    rows = masks.Dense(torch.ones(4096, 4096).tril() > 0)
    assert flash_ext.explain(q, k, v, mask=rows, gpu=H200).forward["row"] == "sm90.fwd_mod.m128.hide"


def test_a_plan_of_both_directions():
    q, k, v = qkv(2, 512, 8, 64, dtype=torch.bfloat16)
    slopes = torch.rand(8)
    found = flash_ext.explain(q, k, v, causal=True, bias=masks.ALiBi(slopes), gpu=H200)
    assert found.backend == "sm90" and found.why_not == {}
    assert "slopes" in found.forward["row"] and found.backward["row"].startswith("sm90.bwd_mod")
    text = str(found)
    for said in ("backend     sm90", "launch      fwd_mod_sm90_hd64", "workspace", found.backward["row"]):
        assert said in text


def test_the_plan_is_that_of_the_sizes_in_words():
    q, k = (torch.empty(4, 4096, heads, 128, dtype=torch.float16) for heads in (16, 4))
    found = flash_ext.explain(q, k, k, causal=True, gpu=H200)
    from flash_ext._ops import plan

    words = plan.plan(f"fwd batch=4 seqlen=4096 heads=16/4 head_dim=128 causal float16 gpu={H200}")
    for name in ("row", "launches", "workspace_bytes", "kernel"):
        assert found.forward[name] == words[name], name


def test_a_bias_that_wants_a_gradient_changes_the_backward_only():
    q, k, v = qkv(2, 256, 4, 32, dtype=torch.bfloat16)
    kernels = []
    for wanted in (False, True):
        bias = torch.zeros(4, 256, 256, dtype=torch.bfloat16, requires_grad=wanted)
        found = flash_ext.explain(q, k, v, bias=bias, gpu=H200)
        both = (found.forward, found.backward)
        kernels.append([[launch["kernel"] for launch in one["launches"]] for one in both])
    assert kernels[0][0] == kernels[1][0]
    assert any("bias" in kernel for kernel in kernels[1][1]) and kernels[0][1] != kernels[1][1]


def test_gradients_of_sinks_and_slopes_are_explained():
    q, k, v = qkv(4, 256, 4, 64, dtype=torch.bfloat16)
    for wanted in (False, True):
        sinks, slopes = (torch.zeros(4, requires_grad=wanted) for _ in range(2))
        assert ("then" in flash_ext.explain(q, k, v, sinks=sinks, gpu=H200).backward) == wanted
        found = flash_ext.explain(q, k, v, bias=flash_ext.masks.ALiBi(slopes), gpu=H200).backward
        assert any("bias" in launch["kernel"] for launch in found["launches"]) == wanted


def test_strides_that_the_copy_engine_cannot_read():
    q = torch.randn(2, 128, 4, 60, dtype=torch.bfloat16)
    found = flash_ext.explain(q, q, q, gpu=H200)
    assert found.backend == "sm80" and found.why_not["sm90"]
    assert f"not sm90    {found.why_not['sm90']}" in str(found)


def test_on_the_cpu():
    q, k, v = qkv(1, 8, 2, 16)
    found = flash_ext.explain(q, k, v)
    assert (found.backend, found.forward, found.backward) == ("cpu", {}, {})
    assert set(found.why_not) == {"sm90", "sm80"}


@pytest.mark.parametrize("gpu", [None, H200])
@pytest.mark.parametrize("more", [{}, {"bias": masks.ALiBi(torch.rand(8))}], ids=["plain", "modified"])
def test_heads_first_is_explained_as_the_same_tensors(more: dict, gpu: str | None):
    """As attention takes them: as transposed views. What begins on other bytes has other kernels."""
    q, k, v = qkv(2, 8, 512, 64, dtype=torch.bfloat16)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    found = flash_ext.explain(q, k, v, causal=True, layout="bhsd", gpu=gpu, **more)
    assert found == flash_ext.explain(*turned, causal=True, gpu=gpu, **more)


def test_layouts_that_are_refused():
    q, k, v = qkv(2, 8, 2, 16)
    with pytest.raises(ValueError, match='layout must be "bshd" or "bhsd", got \'sbhd\''):
        flash_ext.explain(q, k, v, layout="sbhd")
    with pytest.raises(ValueError, match="Packed sequences go into attention_varlen"):
        flash_ext.explain(q[0], k[0], v[0], layout="bhsd")
    cu = torch.tensor([0, 8]).int()
    with pytest.raises(ValueError, match="layout is one of dense tensors, got 'bhsd' with cu_seqlens"):
        flash_ext.explain(q[0], k[0], v[0], cu, cu, layout="bhsd")


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"mask": torch.ones(3, 3).bool()}, ValueError),
        ({"is_causal": True}, TypeError),
        ({"gpu": "nine"}, ValueError),
    ],
)
def test_what_attention_refuses_is_refused(wrong: dict, error: type[Exception]):
    with pytest.raises(error):
        flash_ext.explain(*qkv(1, 8, 2, 16), **wrong)
