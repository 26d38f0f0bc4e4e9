"""The public functions from outside: signatures, refusals in words, and what an import does."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import io
import itertools
import math
import operator
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_ext
from flash_ext import AuxOutput, AuxRequest, masks
from flash_ext._ops.library import _C
from flash_ext._ops.words import INSTEAD, OTHER_NAMES
from tests.qkv import make_packed, make_qkv, null_kernels

# ---- signatures ------------------------------------------------------------------------------------------

MODIFIERS = (
    "Tensor? bias, Tensor? mask, Tensor? document_q, Tensor? document_k, Tensor? prefix_lens, "
    "Tensor? hidden_rows, Tensor? hidden_keys, Tensor? blocks, Tensor? slopes, Tensor? sinks, Tensor? rng, "
    "float softcap, float dropout_p, SymInt block_rows, SymInt block_cols, SymInt sink_tokens, SymInt chunk, "
    "bool top_left"
)
WIDE = "bool wide=False"  # added later, hence the default; so is the next
WANT_LSE = "bool want_lse=True"
OPERATOR_SCHEMAS = {
    "fwd": "flash_ext::fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_size_left, "
    f"SymInt window_size_right, bool deterministic, str? backend, {WIDE}, {WANT_LSE}) "
    "-> (Tensor out, Tensor lse)",
    "bwd": "flash_ext::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float scale, SymInt window_size_left, SymInt window_size_right, bool deterministic, str? backend, "
    f"{WIDE}) -> (Tensor dq, Tensor dk, Tensor dv)",
    "fwd_mod": "flash_ext::fwd_mod(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_size_left, "
    f"SymInt window_size_right, {MODIFIERS}, bool want_row_max, bool deterministic, str? backend, {WIDE}, "
    f"{WANT_LSE}) -> (Tensor out, Tensor lse, Tensor row_max)",
    "bwd_mod": "flash_ext::bwd_mod(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? dlse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    f"float scale, SymInt window_size_left, SymInt window_size_right, {MODIFIERS}, bool need_qkv, "
    f"bool need_bias, bool need_slopes, bool need_sinks, bool deterministic, str? backend, {WIDE}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dslopes, Tensor dsinks)",
    "quantize_fp8": "flash_ext::quantize_fp8(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, bool by_block, bool smooth_k, bool smooth_v, bool hadamard, "
    "bool mixed, Tensor? cos_q=None, Tensor? sin_q=None, Tensor? cos_k=None, Tensor? sin_k=None, "
    "bool interleaved=False) -> (Tensor q8, Tensor k8, Tensor v8, Tensor q_descale, Tensor k_descale, "
    "Tensor v_descale, Tensor v_offset, Tensor k_offset, Tensor row_offset)",
    "fwd_fp8": "flash_ext::fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, "
    "Tensor v_descale, Tensor? v_offset, Tensor? row_offset, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? sinks, float scale, int window_size_left, int window_size_right, "
    f"ScalarType dtype, str? backend, {WANT_LSE}, bool want_row_max=False, bool small=False) "
    "-> (Tensor out, Tensor lse, Tensor row_max)",
    "fwd_cached": "flash_ext::fwd_cached(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? block_table, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float scale, SymInt window_size_left, SymInt window_size_right, Tensor? slopes, Tensor? sinks, "
    f"float softcap, str? backend, {WANT_LSE}, Tensor? tree=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, Tensor? mask=None, Tensor? document_q=None, Tensor? document_k=None, "
    "Tensor? bias=None) -> (Tensor out, Tensor lse)",
    "append_kv": "flash_ext::append_kv(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, Tensor? cos, Tensor? sin, Tensor? positions, bool interleaved, "
    "Tensor(c!)? k_descale=None, Tensor(d!)? v_descale=None) -> ()",
    "append_behind": "flash_ext::append_behind(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor lengths, Tensor? block_table, Tensor? entries, Tensor? cos, Tensor? sin, "
    "bool interleaved, Tensor? q, Tensor? cu_seqlens_q, bool counts, Tensor(c!)? k_descale, "
    "Tensor(d!)? v_descale) -> (Tensor new_lengths, Tensor turned_q)",
    "condense": "flash_ext::condense(Tensor x, SymInt block_rows=0, SymInt block_cols=0) -> Tensor",
}
# New parameters may only be added at the end or as keywords, with defaults; anything else breaks a caller.
SCORES = (
    "causal=False, window_size=(-1, -1), scale=None, mask=None, bias=None, sinks=None, softcap=0.0, "
    "dropout_p=0.0"
)
KERNELS = "deterministic=None, backend=None, **unknown"  # unknown keywords get words of their own
PUBLIC_PARAMETERS = {
    "attention": f"q, k, v, *, {SCORES}, generator=None, return_aux=None, layout='bshd', {KERNELS}",
    "attention_varlen": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *, "
    f"seqused_k=None, block_table=None, k_descale=None, v_descale=None, {SCORES}, generator=None, "
    f"return_aux=None, {KERNELS}",
    "serving.append_kv": "k_new, v_new, k_cache, v_cache, slot_mapping, rotary=None, k_descale=None, "
    "v_descale=None",
    "serving.attention_shared_prefix": "q, k_cache, v_cache, cu_seqlens_q, *, shared_block_table, "
    "shared_prefix_len, block_table, seqused_k, max_seqlen_q=None, max_seqlen_k=None, causal=True, "
    "scale=None, sinks=None, mask=None, k_descale=None, v_descale=None",
    "fp8.quantize_fp8": "q, k, v, *, granularity='block', smooth_k=True, smooth_v=True, hadamard=False, "
    "rotary=None, rotary_interleaved=False, mode='fp8', cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None",
    "fp8.attention_fp8": "x, *, causal=False, window_size=(-1, -1), scale=None, sinks=None, "
    "return_aux=None, backend=None, **unknown",
    "scaled_dot_product_attention": "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, "
    "scale=None, enable_gqa=False",
    "explain": "q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *, "
    f"seqused_k=None, block_table=None, k_descale=None, v_descale=None, {SCORES}, generator=None, "
    "return_aux=None, layout='bshd', deterministic=None, backend=None, gpu=None, **unknown",
    "count": "",
    "enable_sdpa": "",
    "disable_sdpa": "",
    "merge_attention_states": "out_a, lse_a, out_b, lse_b",
    "forward": "q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    f"{SCORES}, rng=None, out_dtype=None, {KERNELS}",
    "backward": "dout, q, k, v, out, lse, *, dlse=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    f"max_seqlen_q=None, max_seqlen_k=None, {SCORES}, rng=None, needs=('q', 'k', 'v'), "
    f"grad_dtype=None, {KERNELS}",
    "dropout_rng": "device, generator=None",
    "serving.set_batch_invariant": "mode",
    "serving.is_batch_invariant": "",
}


@pytest.mark.parametrize("name", OPERATOR_SCHEMAS)
def test_operator_schema(name: str) -> None:
    assert str(getattr(torch.ops.flash_ext, name).default._schema) == OPERATOR_SCHEMAS[name]


@pytest.mark.parametrize("name", PUBLIC_PARAMETERS)
def test_public_function(name: str) -> None:
    function = operator.attrgetter(name)(flash_ext)
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({PUBLIC_PARAMETERS[name]})"
    annotated = [*(p.annotation for p in signature.parameters.values()), signature.return_annotation]
    assert inspect.Parameter.empty not in annotated
    for parameter in signature.parameters.keys() - {"unknown"}:
        assert parameter in function.__doc__, f"{name} does not document {parameter}"
    if signature.parameters:
        for section in ("Source:", "Args:", "Returns:", "Raises:"):
            assert f"\n    {section}" in function.__doc__, f"{name} has no section {section}"


def test_all_names_are_public_and_typed() -> None:
    modules = {"compat", "distributed", "fp8", "integrations", "masks", "nn", "serving"}
    functions = {name for name in PUBLIC_PARAMETERS if "." not in name}
    assert set(flash_ext.__all__) == {*functions, *modules, "AuxOutput", "AuxRequest"}
    assert (Path(flash_ext.__file__).parent / "py.typed").exists()


def test_bounds_stand_where_varlen_attn_has_them() -> None:
    q, cu_seqlens = torch.randn(10, 2, 16), torch.tensor([0, 4, 10], dtype=torch.int32)
    packed = (q, q, q, cu_seqlens, cu_seqlens)
    want = flash_ext.attention_varlen(*packed, causal=True)
    assert torch.equal(flash_ext.attention_varlen(*packed, 6, 6, causal=True), want)
    assert flash_ext.explain(*packed, 6, 6).backend == "cpu"
    with pytest.raises(ValueError, match="max_seqlen_q"):
        flash_ext.attention_varlen(*packed, -1, 6)


def arguments_of_entry(name: str) -> list[str]:
    """As pybind11 documents them: ``name(q: torch.Tensor, ...) -> ...``."""
    line = getattr(_C, name).__doc__.splitlines()[0]
    return re.findall(r"(?:\(|, )(\w+): ", line.split(" -> ")[0])


def test_entries_of_the_extension_take_the_arguments_of_the_operators() -> None:
    """causal is resolved into the window on the way, wide left out; otherwise the order is the schema's."""
    for name, last in (("fwd", ["wide", "want_lse"]), ("bwd", ["wide"])):
        schema = [argument.name for argument in getattr(torch.ops.flash_ext, name).default._schema.arguments]
        entry = [argument for argument in arguments_of_entry(name) if argument != "causal"]
        assert entry == [argument for argument in schema if argument != "wide"]
        assert schema[-len(last) :] == last


def test_types_of_the_extension_are_declared() -> None:
    stub = ast.parse((Path(flash_ext.__file__).parent / "_C.pyi").read_text())
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    values = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    values |= {node.name for node in stub.body if isinstance(node, ast.ClassDef)}
    assert {*functions, *values} == {name for name in dir(_C) if not name.startswith("__")}
    for name in ("fwd", "bwd", "plan"):
        declared = functions[name].args
        assert [a.arg for a in (*declared.args, *declared.kwonlyargs)] == arguments_of_entry(name)


# ---- refusals --------------------------------------------------------------------------------------------


def dense(**changes: object) -> dict[str, object]:
    q, k, v = make_qkv(dtype=torch.bfloat16, seqlen_q=8)
    return {"q": q, "k": k, "v": v, **changes}


def packed(**changes: object) -> dict[str, object]:
    q, k, v, cu = make_packed()
    half = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}
    return {**half, "cu_seqlens_q": cu, "cu_seqlens_k": cu, **changes}


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def transposed(*shape: int) -> Tensor:
    return zeros(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def to_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def all_of(dtype: torch.dtype) -> dict[str, object]:
    return dense(**{name: tensor.to(dtype) for name, tensor in dense().items()})


CU = torch.tensor([0, 3, 3, 12], dtype=torch.int32)
EVERY_OTHER = torch.stack([CU, CU], 1)[:, 0]
# Case: arguments of forward, the exception, and its message: the argument, what was got or wanted.
REFUSED = {
    "k batch": (dense(k=zeros(3, 8, 2, 16)), ValueError, r"k must have the batch size of q, 2, got 3"),
    "v batch": (dense(v=zeros(3, 8, 2, 16)), ValueError, r"v must have the batch size of q, 2, got 3"),
    "v length": (dense(v=zeros(2, 9, 2, 16)), ValueError, r"v must have the sequence length of k, 8, got 9"),
    "v heads": (dense(v=zeros(2, 8, 1, 16)), ValueError, r"v must have the num_heads of k, 2, got 1"),
    "k head_dim": (dense(k=zeros(2, 8, 2, 15)), ValueError, r"k must have the head_dim of q, 16, got 15"),
    "no head_dim": (dense(q=zeros(2, 8, 4, 0), k=zeros(2, 8, 2, 0)), ValueError, r"head_dim of q and k"),
    "no head_dim_v": (dense(v=zeros(2, 8, 2, 0)), ValueError, r"head_dim of v must be at least 1, got 0"),
    "q rank": (dense(q=zeros(8, 4, 16)), ValueError, r"q must have shape \(batch, .*got \(8, 4, 16\)"),
    "k rank": (dense(k=zeros(8, 2, 16)), ValueError, r"k must have shape \(batch, .*got \(8, 2, 16\)"),
    "v scalar": (dense(v=zeros()), ValueError, r"v must have shape \(batch, .*got \(\)"),
    "q strides": (dense(q=transposed(2, 8, 4, 16)), ValueError, r"q must have stride 1 .*contiguous\(\)"),
    "k strides": (dense(k=transposed(2, 8, 2, 16)), ValueError, r"k must have stride 1 "),
    "v strides": (dense(v=transposed(2, 8, 2, 16)), ValueError, r"v must have stride 1 "),
    "q wider": (dense(q=zeros(2, 8, 4, 16).float()), TypeError, r"q torch.float32, k torch.b.*autocast"),
    "k other half": (dense(k=zeros(2, 8, 2, 16).half()), TypeError, r"q torch.bfloat16, k torch.float16, v"),
    "integers": (all_of(torch.int8), TypeError, r"q torch.int8, k torch.int8, v torch.int8"),
    "complex": (all_of(torch.complex64), TypeError, r"must all be torch.float16, .* got q torch.complex64"),
    "booleans": (all_of(torch.bool), TypeError, r"q torch.bool"),
    "window left": (dense(window_size=(-2, 0)), ValueError, r"window.* \(-1 is unlimited\), got \(-2, 0\)"),
    "window right": (dense(window_size=(3, -5)), ValueError, r"window.* got \(3, -5\)"),
    "window and causal": (dense(window_size=(3, -5), causal=True), ValueError, r"window.* got \(3, -5\)"),
    "scale nan": (dense(scale=math.nan), ValueError, r"scale must be finite, got nan"),
    "scale inf": (dense(scale=-math.inf), ValueError, r"scale must be finite, got -inf"),
    "backend name": (dense(backend="sm75"), ValueError, r"None .* one of sm90, sm80, cpu, got 'sm75'"),
    "one cu_seqlens": (packed(cu_seqlens_k=None), ValueError, r"given together, got only cu_seqlens_q"),
    "packed rank": (packed(q=zeros(1, 14, 4, 16)), ValueError, r"q must have shape \(total, num_heads"),
    "no cu_seqlens": (packed(cu_seqlens_q=None, cu_seqlens_k=None), ValueError, r"q .* shape \(batch, "),
    "cu_seqlens long": (packed(cu_seqlens_q=CU.long()), TypeError, r"cu_seqlens_q must be torch.int32"),
    "cu_seqlens 2-d": (packed(cu_seqlens_k=CU[None]), ValueError, r"cu_seqlens_k .*1,\), got \(1, 4\)"),
    "cu_seqlens empty": (packed(cu_seqlens_q=CU[:0]), ValueError, r"cu_seqlens_q .*1,\), got \(0,\)"),
    "cu_seqlens lengths": (packed(cu_seqlens_q=CU[:3]), ValueError, r"the same length .*, got 3 and 4"),
    "cu_seqlens strides": (packed(cu_seqlens_k=EVERY_OTHER), ValueError, r"cu_seqlens_k .* contiguous, .* 2"),
    "max_seqlen": (packed(max_seqlen_k=-1), ValueError, r"max_seqlen_k must not be negative, got -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_the_same_words_everywhere(case: str) -> None:
    """By the CPU path, by the road to the GPU, and while tracing for either; and beside modifiers."""
    args, exception, words = REFUSED[case]
    with pytest.raises(exception, match=words):
        flash_ext.forward(**args, softcap=2.0)
    with pytest.raises(exception, match=words) as on_cpu:
        flash_ext.forward(**args)
    with null_kernels(), pytest.raises(exception) as before_launch:
        flash_ext.forward(**args)
    assert str(before_launch.value) == str(on_cpu.value)
    on_meta = {name: to_meta(value) if isinstance(value, Tensor) else value for name, value in args.items()}
    with pytest.raises(exception) as traced:
        flash_ext.forward(**on_meta)
    assert str(traced.value) == str(on_cpu.value)


@pytest.mark.parametrize(("heads", "heads_k"), [(33, 2), (3, 2), (2, 4), (4, 0), (0, 2)])
def test_head_counts_that_do_not_divide(heads: int, heads_k: int) -> None:
    with pytest.raises(
        ValueError, match=f"num_heads of q must be a positive multiple.*{heads} and {heads_k}"
    ):
        flash_ext.attention(*make_qkv(heads=heads, heads_k=heads_k))


BACKWARD_REFUSED = {
    "dout dtype": ({"dout": zeros(2, 8, 4, 16).float()}, TypeError, r"dout must have the dtype of q"),
    "dout shape": ({"dout": zeros(2, 8, 4, 15)}, ValueError, r"dout .*\[2, 8, 4, 16\], got \(2, 8, 4, 15\)"),
    "out dtype": ({"out": zeros(2, 8, 4, 16).half()}, TypeError, r"out must have the dtype of q"),
    "out shape": ({"out": zeros(2, 9, 4, 16)}, ValueError, r"out must have shape"),
    "out strides": ({"out": transposed(2, 8, 4, 16)}, ValueError, r"out must have stride 1"),
    "lse dtype": ({"lse": zeros(2, 4, 8)}, TypeError, r"lse must be torch.float32, got torch.bfloat16"),
    "lse shape": ({"lse": zeros(2, 8, 4).float()}, ValueError, r"lse must have shape \[2, 4, 8\]"),
    "dlse dtype": ({"dlse": zeros(2, 4, 8)}, TypeError, r"dlse must be torch.float32"),
    "dlse shape": ({"dlse": zeros(2, 4).float()}, ValueError, r"dlse must have shape"),
    "dout none": ({"dout": None}, TypeError, r"dout must be a torch.Tensor, got NoneType"),
    "dlse number": ({"dlse": 0.0}, TypeError, r"dlse must be a torch.Tensor or None, got float"),
}  # fmt: skip


@pytest.mark.parametrize("case", BACKWARD_REFUSED)
def test_backward_refuses(case: str) -> None:
    changes, exception, words = BACKWARD_REFUSED[case]
    args = {"dout": zeros(2, 8, 4, 16), **dense(), "out": zeros(2, 8, 4, 16), "lse": torch.zeros(2, 4, 8)}
    flash_ext.backward(**args)
    with pytest.raises(exception, match=words):
        flash_ext.backward(**args | changes)
    with null_kernels(), pytest.raises(exception, match=words):
        flash_ext.backward(**args | changes)


MISUSED = {
    "none": (dense(k=None), "k must be a torch.Tensor, got NoneType"),
    "array": (dense(q=torch.zeros(1).numpy()), "q must be a torch.Tensor, got ndarray"),
    "list": (dense(v=[1.0]), "v must be a torch.Tensor, got list"),
    "window number": (dense(window_size=128), r"window_size must be a pair .*\(left, right\), got 128"),
    "window triple": (dense(window_size=(1, 2, 3)), "window_size must be a pair of ints"),
    "window floats": (dense(window_size=(1.5, 0.0)), "window_size must be a pair of ints"),
    "scale text": (dense(scale="1"), "scale must be a float or None, got str"),
    "scale gradient": (
        dense(scale=torch.tensor(1.0, requires_grad=True)),
        "scale must be a number, got Tensor. It would get no gradient",
    ),
    "causal text": (dense(causal="top_left"), r"causal must be a bool, got 'top_left'\. .*Causal\("),
    "backend number": (dense(backend=80), "backend must be a str or None, got int"),
    "cu_seqlens list": (packed(cu_seqlens_q=[0, 3]), "cu_seqlens_q must be a torch.Tensor or None, got list"),
    "max_seqlen text": (packed(max_seqlen_q="9"), "max_seqlen_q must be an int or None, got str"),
    "unknown": (dense(is_causal=True), r"forward\(\) has no keyword 'is_causal'. Did you mean causal=\?"),
    "misspelt": (dense(windowsize=(1, 0)), r"no keyword 'windowsize'. Did you mean window_size=\?"),
    "nothing like it": (dense(colour=1), r"has no keyword 'colour'\.$"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_misuse_names_the_argument(case: str) -> None:
    args, words = MISUSED[case]
    for more in ({}, {"softcap": 2.0}):
        with pytest.raises(TypeError, match=words):
            flash_ext.forward(**args, **more)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_libraries_lead_to_ours(name: str) -> None:
    """Where a function has what they lead to, and that exists."""
    hint = OTHER_NAMES[name]
    for value in re.findall(r"flash_ext\.([\w.]+)", hint):
        operator.attrgetter(value)(flash_ext)
    results = {"out": zeros(2, 8, 4, 16), "lse": torch.zeros(2, 4, 8)}
    backward = {"dout": zeros(2, 8, 4, 16), **dense(), **results}
    calls = {"attention": dense(), "attention_varlen": packed(), "forward": dense(), "backward": backward}
    for function, arguments in calls.items():
        parameters = inspect.signature(getattr(flash_ext, function)).parameters
        leads_on = "=" not in hint or hint.split("=")[0] in parameters
        assert leads_on or function in ("forward", "backward") or name in INSTEAD, hint
        otherwise = f" {INSTEAD[name]}" if name in INSTEAD else ""
        words = f"{function}() has no keyword {name!r}." + (
            f" Did you mean {hint}?" if leads_on else otherwise
        )
        assert name not in parameters
        with pytest.raises(TypeError) as refused:
            getattr(flash_ext, function)(**arguments, **{name: None})
        assert str(refused.value) == words


def test_no_keyword_of_another_function_is_proposed() -> None:
    for call, arguments, name in (
        (flash_ext.forward, dense(), "layout"),
        (flash_ext.forward, dense(), "return_aux"),
        (flash_ext.attention_varlen, packed(), "layout"),
    ):
        with pytest.raises(TypeError, match=rf"has no keyword '{name}'\.(?! Did you mean {name})"):
            call(**arguments, **{name: None})


@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}], ids=["plain", "modified"])
def test_heads_first_is_another_view_of_the_same(more: dict) -> None:
    """The results of the default layout, transposed, and so are the gradients."""
    leaves = make_qkv(seqlen_q=6, seqlen_k=9, requires_grad=True)
    request = AuxRequest(lse=True, max_scores=True)
    expected, aux = flash_ext.attention(*leaves, causal=True, return_aux=request, **more)
    turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in leaves]
    out, found = flash_ext.attention(*turned, causal=True, return_aux=request, layout="bhsd", **more)
    assert torch.equal(out, expected.transpose(1, 2)) and out.transpose(1, 2).is_contiguous()
    assert torch.equal(found.lse, aux.lse) and torch.equal(found.max_scores, aux.max_scores)
    assert torch.equal(flash_ext.attention(*turned, causal=True, layout="bhsd", **more), out)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, dout)
    for a, b in zip(torch.autograd.grad(out, turned, dout.transpose(1, 2)), wanted, strict=True):
        assert torch.equal(a, b.transpose(1, 2))


def test_layouts_that_are_refused() -> None:
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match='layout must be "bshd" or "bhsd", got \'sbhd\''):
        flash_ext.attention(q, k, v, layout="sbhd")
    with pytest.raises(ValueError, match=r"k must have shape \(batch, num_heads, .* got \(17, 2, 16\)"):
        flash_ext.attention(q, k[0], v, layout="bhsd")
    with pytest.raises(
        ValueError,
        match=r"got 17 and 12\. Tensors of shape \(batch, seqlen, num_heads, head_dim\) need no layout\.$",
    ):
        flash_ext.attention(q, k[:, :12], v[:, :12], layout="bhsd")
    three = k[:, :12, :1].expand(-1, -1, 3, -1)
    with pytest.raises(ValueError, match=r"num_heads of q must .* got 4 and 3\.$") as refused:
        flash_ext.attention(*(t.transpose(1, 2) for t in (q, three, three)), layout="bhsd")
    with pytest.raises(ValueError, match=f"^{re.escape(str(refused.value))}$"):
        flash_ext.attention(q, three, three)
    with pytest.raises(ValueError, match=r"got \(17, 4, 16\)\. Packed sequences go into attention_varlen\.$"):
        flash_ext.attention(q[0], k[0], v[0], layout="bhsd")
    with pytest.raises(
        TypeError, match="v must be a torch.Tensor, got ndarray. Convert it with torch.from_numpy"
    ):
        flash_ext.attention(q, k, v.numpy(), layout="bhsd")


def test_what_is_returned_beside_out() -> None:
    """Only what is asked for; torch's own request serves as well."""
    q, k, v = make_qkv()
    out = flash_ext.attention(q, k, v)
    for lse, max_scores in itertools.product((False, True), repeat=2):
        got, aux = flash_ext.attention(q, k, v, return_aux=AuxRequest(lse=lse, max_scores=max_scores))
        assert torch.equal(got, out) and type(aux) is AuxOutput
        assert (aux.lse is not None, aux.max_scores is not None) == (lse, max_scores)
    from torch.nn.attention.flex_attention import AuxRequest as TheirRequest

    _, aux = flash_ext.attention(q, k, v, return_aux=TheirRequest(lse=True))
    assert aux.lse is not None and aux.max_scores is None
    with pytest.raises(TypeError, match=r"return_aux must be .* got bool. Write AuxRequest\(lse=True\)"):
        flash_ext.attention(q, k, v, return_aux=True)


NESTED = torch.nested.nested_tensor([torch.zeros(8, 4, 16), torch.zeros(5, 4, 16)], layout=torch.jagged)
OTHER_LAYOUTS = {
    "nested": ("q", NESTED, r"q must be a dense tensor, got a nested one\. .*attention_varlen"),
    "sparse": ("v", torch.zeros(2, 8, 2, 16).to_sparse(), r"v must be a dense tensor.*sparse_coo.*to_dense"),
    "mkldnn": ("k", torch.zeros(2, 8, 2, 16).to_mkldnn(), "k must be a dense tensor.*_mkldnn"),
}


@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}], ids=["plain", "modified"])
@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_tensors_without_strides_are_named(case: str, more: dict) -> None:
    """Before torch's dispatcher says that the operator does not exist for a backend, or only its name."""
    name, t, words = OTHER_LAYOUTS[case]
    args = {key: value.float() for key, value in dense().items()} | {name: t}
    with pytest.raises(TypeError, match=words):
        flash_ext.attention(**args, **more)
    results = {"out": torch.zeros(2, 8, 4, 16), "lse": torch.zeros(2, 4, 8)}
    with pytest.raises(TypeError, match=words):
        flash_ext.backward(torch.zeros(2, 8, 4, 16), **args, **results, **more)


@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}], ids=["plain", "modified"])
def test_bounds_in_tensors_are_not_read(more: dict) -> None:
    """Reading one would wait for the device. A meta tensor has nothing to read: a look at it would raise."""
    args, bound = packed(**more), torch.tensor(9, device="meta")
    expected, bounded = flash_ext.forward(**args), args | {"max_seqlen_q": bound, "max_seqlen_k": bound}
    got = flash_ext.forward(**bounded)
    out, aux = flash_ext.attention_varlen(**bounded, return_aux=AuxRequest(lse=True))
    for result in (got, (out, aux.lse)):
        assert all(torch.equal(a, b) for a, b in zip(result, expected))
    for a, b in zip(*(flash_ext.backward(got[0], **x, out=got[0], lse=got[1]) for x in (args, bounded))):
        assert torch.equal(a, b)


def test_tracing_for_a_gpu_refuses_what_a_gpu_refuses() -> None:
    with FakeTensorMode():
        half, wide = (
            torch.empty(2, 8, 4, 64, device="cuda", dtype=t) for t in (torch.float16, torch.float32)
        )
        large = torch.empty(2, 8, 4, 257, device="cuda", dtype=torch.float16)
        with pytest.raises(TypeError, match=r"q torch.float32, k torch.float32, v torch.float32.*autocast"):
            flash_ext.attention(wide, wide, wide)
        with pytest.raises(TypeError, match="k torch.float16, v torch.float32"):
            flash_ext.attention(half, half, wide)
        for qkv, which in (((large, large, half), "q and k"), ((half, half, large), "v")):
            words = f"head_dim of {which} must be at most 256 on cuda, got 257"
            with pytest.raises(NotImplementedError, match=words):
                flash_ext.attention(*qkv)
        with pytest.raises(ValueError, match="one device, got q on cuda:0, k on cpu, v on cuda:0"):
            flash_ext.attention(half, half.cpu(), half)
        with pytest.raises(ValueError, match="cu_seqlens_k must be on the device of q"):
            bounds = torch.empty(4, dtype=torch.int32, device="cuda")
            rows = torch.empty(8, 4, 64, device="cuda", dtype=torch.float16)
            flash_ext.attention_varlen(rows, rows, rows, bounds, bounds.cpu())


def test_cpu_tensors_take_no_gpu_path() -> None:
    q, k, v = make_qkv()
    assert torch.equal(flash_ext.attention(q, k, v, backend="cpu"), flash_ext.attention(q, k, v))
    with pytest.raises(ValueError, match="sm80 backend: q is on cpu; cpu backend: accepts"):
        flash_ext.attention(q, k, v, backend="sm80")


@pytest.mark.gpu
def test_gpu_tensors_take_no_cpu_path() -> None:
    with pytest.raises(ValueError, match="sm80 backend: accepts; cpu backend: the tensors are on a GPU"):
        flash_ext.attention(*make_qkv("cuda"), backend="cpu")


# ---- loading ---------------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_import_touches_no_gpu_and_loads_neither_the_compiler_nor_dtensor() -> None:
    """The latter take seconds; a program that needs them loads them itself."""
    code = """
import sys, torch, flash_ext
print(flash_ext.__version__, torch.cuda.is_initialized())
print([name for name in ("torch._dynamo", "torch.distributed.tensor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [flash_ext.__version__, "False", "[]"]


# ---- pickles and copies ----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A user's module: it holds functions of the package, a block map and learned sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(4))
        self.block_mask = masks.BlockMask.from_dense(torch.rand(2, 1, 48, 48) < 0.5, 16)
        self.attention = functools.partial(flash_ext.attention, softcap=5.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, sinks=self.sinks, mask=masks.Causal("top_left") & self.block_mask)


def saved_and_loaded(layer: Layer, way: str) -> Layer:
    if way == "pickle":
        return pickle.loads(pickle.dumps(layer))
    if way == "deepcopy":
        return copy.deepcopy(layer)
    file = io.BytesIO()
    if way == "torch.save":
        torch.save(layer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = Layer()
    other.block_mask = layer.block_mask  # no state of a module: the rule that made it is the user's
    state = torch.load(file, weights_only=True)
    assert set(state) == {"sinks"}
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save", "state_dict"])
def test_modules_survive_being_saved(way: str) -> None:
    layer = Layer()
    q, k, v = make_qkv(seqlen_q=48)
    copied = saved_and_loaded(layer, way)
    assert copied.sinks is not layer.sinks and torch.equal(copied.sinks, layer.sinks)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for module in (layer, copied):
        module(*leaves).square().sum().backward()
    assert torch.equal(copied(q, k, v), layer(q, k, v))
    assert torch.equal(copied.sinks.grad, layer.sinks.grad)


def test_results_carry_nothing_that_cannot_be_saved() -> None:
    """Outputs are plain tensors. Masks and biases are in tests/masks/test_values.py."""
    q, k, v = make_qkv(seqlen_q=48)
    file = io.BytesIO()
    out, aux = flash_ext.attention(q, k, v, return_aux=AuxRequest(lse=True))
    torch.save((out, aux.lse), file)
    file.seek(0)
    assert all(torch.equal(a, b) for a, b in zip(torch.load(file, weights_only=True), (out, aux.lse)))
    for copied in (pickle.loads(pickle.dumps(aux)), copy.deepcopy(aux)):
        assert type(copied) is AuxOutput and torch.equal(copied.lse, aux.lse)
    for function in (flash_ext.attention, flash_ext.attention_varlen, flash_ext.backward):
        assert pickle.loads(pickle.dumps(function)) is function
