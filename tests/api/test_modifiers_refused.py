"""What the modifiers refuse, and in which words: the argument, what it holds, and the way out."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest, masks
from tests.qkv import make_packed, make_qkv, null_kernels

HALF = torch.bfloat16


def dense(**keywords: object) -> dict[str, object]:
    q, k, v = make_qkv(seqlen_q=8, seqlen_k=10, dtype=HALF)
    return {"q": q, "k": k, "v": v, **keywords}


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def by_distance(heads: int = 4, **options: object) -> masks.RelativePosition:
    return masks.RelativePosition(torch.zeros(heads, 32, **options))


def blocks(*shape: int, size: int = 16) -> masks.BlockMask:
    return masks.BlockMask(torch.ones(shape, dtype=torch.bool), size)


def rectangle(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


# The keywords of a call are made when it is: some are refused before there is a call. What values refuse
# when they are made, or for sizes that are not theirs, is in tests/masks/test_refused.py.
REFUSED = {
    "mask uint8": (lambda: {"mask": torch.ones(8, 10, dtype=torch.uint8)}, TypeError,
                   r"mask must be torch.bool, got torch.uint8. For 0 and 1 pass .bool\(\)"),
    "mask scalar": (lambda: {"mask": rectangle()}, ValueError,
                    r"must have a shape that broadcasts .*got \(\)"),
    "mask rows": (lambda: {"mask": rectangle(7, 10)}, ValueError,
                  r"must broadcast to \(batch, num_heads, q_len, k_len\) = \(2, 4, 8, 10\), got \(7, 10\)"),
    "mask of keys": (lambda: {"mask": rectangle(2, 10)}, ValueError,
                     r"mask \(batch, k_len\) of keys is a KeyMask"),
    "mask key heads": (lambda: {"mask": rectangle(2, 2, 8, 10)}, ValueError, "Dense: tensor must broadcast"),
    "mask device": (lambda: {"mask": torch.zeros(8, 10, device="meta", dtype=torch.bool)}, ValueError,
                    r"mask must be on the device of q, cpu, got one on meta, .*\.to\(q.device\)"),
    "bias double": (lambda: {"bias": torch.zeros(8, 10).double()}, TypeError, "got torch.float64. Cast it"),
    "bias half": (lambda: {"bias": torch.zeros(8, 10).half()}, TypeError,
                  "q, torch.bfloat16, got torch.float16"),
    "bias scalar": (lambda: {"bias": torch.zeros(())}, ValueError,
                    r"must have 1 to 4 dimensions, got shape \(\)"),
    "bias rows": (lambda: {"bias": torch.zeros(7, 10)}, ValueError, r"must broadcast to .*\(2, 4, 8, 10\)"),
    "bias device": (lambda: {"bias": by_distance(device="meta")}, ValueError,
                    "bias must be on the device of q, cpu, got one on meta, RelativePosition"),
    "position heads": (lambda: {"bias": by_distance(3)}, ValueError,
                       r"RelativePosition: table must have shape \(4 or 1, buckets\).*got \(3, 32\)"),
    "position key heads": (lambda: {"bias": by_distance(2)}, ValueError, r"got \(2, 32\)"),
    "two positions": (lambda: {"bias": by_distance() + by_distance()}, ValueError, "or add the tables"),
    "position and dense": (lambda: {"bias": by_distance() + masks.DenseBias(torch.zeros(8, 10))}, ValueError,
                           r"one bias by distance or one by element: write it out, .*to_dense\("),
    "bias sum": (lambda: {"bias": masks.DenseBias(torch.zeros(8, 1)) + masks.DenseBias(torch.zeros(10))},
                 ValueError, r"the sum would need 1 \* 1 \* 8 \* 10 elements"),
    "key mask kind": (lambda: {"mask": masks.KeyMask([True])}, TypeError,
                      "keep must be a torch.Tensor, got list"),
    "slopes kind": (lambda: {"bias": masks.ALiBi(0.5)}, TypeError,
                    "slopes must be a torch.Tensor, got float"),
    "slopes shape": (lambda: {"bias": masks.ALiBi(torch.ones(3))}, ValueError,
                     r"must have shape \(num_heads,\) or \(batch, num_heads\), here \(4,\) or \(2, 4\)"),
    "two slopes": (lambda: {"bias": masks.ALiBi(torch.ones(4)) + masks.ALiBi(torch.ones(4))}, ValueError,
                   r"ALiBi stands once in a sum: add the slopes"),
    "sinks dtype": (lambda: {"sinks": ints(4)}, TypeError, "sinks must be floating point, got torch.int32"),
    "sinks shape": (lambda: {"sinks": torch.ones(2, 4)}, ValueError, r"sinks must have shape \(num_heads,\)"),
    "softcap sign": (lambda: {"softcap": -1.0}, ValueError,
                     r"softcap must be 0 \(off\) or a positive .* got -1"),
    "softcap nan": (lambda: {"softcap": float("nan")}, ValueError, "softcap must be .* got nan"),
    "softcap inf": (lambda: {"softcap": float("inf")}, ValueError, "softcap must be .* got inf"),
    "softcap tensor": (lambda: {"softcap": torch.tensor(2.0, requires_grad=True)}, TypeError,
                       "softcap must be a number, got Tensor. It would get no gradient"),
    "softcap zero tensor": (lambda: {"softcap": torch.tensor(0.0)}, TypeError, "softcap must be a number"),
    "softcap text": (lambda: {"softcap": "2"}, TypeError, "softcap must be a number, got str"),
    "dropout sign": (lambda: {"dropout_p": -0.1}, ValueError,
                     r"dropout_p must be a probability .* got -0\.1"),
    "dropout above": (lambda: {"dropout_p": 1.1}, ValueError, r"dropout_p must be .* from 0 to 1, got 1\.1"),
    "dropout nan": (lambda: {"dropout_p": float("nan")}, ValueError, "dropout_p must be a probability"),
    "dropout tensor": (lambda: {"dropout_p": torch.tensor(0.1)}, TypeError,
                       "dropout_p must be a number, got Tensor"),
    "generator kind": (lambda: {"generator": 7}, TypeError,
                       "generator must be a torch.Generator or None, got int"),
    "two documents": (lambda: {"mask": masks.Documents(ints(8), ints(10)) & masks.Documents(ints(10))},
                      ValueError, "Documents stands once in a mask: number the pairs"),
    "prefix and causal": (lambda: {"mask": masks.Prefix(ints(2)), "causal": True}, ValueError,
                          "Prefix widens another mask and says nothing alone.*PrefixLM"),
    "sink tokens alone": (lambda: {"mask": masks.SinkTokens(2)}, ValueError,
                          "SlidingWindow.left, sink_tokens=count"),
    "rows float": (lambda: {"mask": masks.HiddenRows(torch.zeros(10, 2))}, TypeError,
                   "intervals must be torch.int32 or torch.int64, got torch.float32"),
    "blocks heads": (lambda: {"mask": blocks(2, 2, 1, 1)}, ValueError, "BlockMask: blocks must have shape"),
    "mask array": (lambda: {"mask": rectangle(8, 10).numpy()}, TypeError,
                   r"mask must be a mask .*, got ndarray\. Convert it with torch.from_numpy"),
    "bias array": (lambda: {"bias": torch.zeros(8, 10).numpy()}, TypeError,
                   r"bias must be a bias .*, got ndarray\. Convert it with torch.from_numpy"),
    "sinks array": (lambda: {"sinks": torch.ones(4).numpy()}, TypeError,
                    r"sinks must be a torch.Tensor or None, got ndarray\. Convert it with torch.from_numpy"),
    "mask list": (lambda: {"mask": [True]}, TypeError, r"a bool tensor or None, got list\.$"),
    "bias for mask": (lambda: {"mask": by_distance()}, TypeError, r"got RelativePosition\. A bias goes into"),
    "aux kind": (lambda: {"return_aux": "lse"}, TypeError,
                 "return_aux must be a flash_ext.AuxRequest or None, got str"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case: str) -> None:
    keywords, exception, words = REFUSED[case]
    with pytest.raises(exception, match=words):
        flash_ext.attention(**dense(**keywords()))


OTHER_KEYWORDS = {
    "softmax_scale": "scale=", "is_causal": "causal=", "window": "window_size=", "path": "backend=",
    "attn_mask": "mask= .* or bias= ", "key_padding_mask": "masks.KeyMask", "alibi_slopes": "masks.ALiBi",
    "document_ids": "masks.Documents", "prefix_lens": "masks.PrefixLM", "sink_tokens": "masks.SlidingWindow",
    "chunk_size": "masks.ChunkCausal", "block_mask": "masks.BlockMask.from_torch", "return_lse": "AuxRequest",
    "hidden_rows": "masks.HiddenRows", "hidden_keys": "masks.HiddenKeys", "return_max_logits": "AuxRequest",
    "sofcap": "softcap=", "dropuot_p": "dropout_p=",
}  # fmt: skip
WITHOUT_COUNTERPART = {
    "enable_gqa": "Grouped heads need no switch: leave it out.",
    "cu_seqlens_q": "Packed sequences go into flash_ext.attention_varlen.",
    "block_table": "Keys in a cache go into flash_ext.attention_varlen.",
}


@pytest.mark.parametrize("name", [*OTHER_KEYWORDS, *WITHOUT_COUNTERPART])
def test_another_keyword_is_answered_with_ours_or_with_what_to_do(name: str) -> None:
    """What other functions answer is in test_api.py."""
    answer = f"Did you mean .*{OTHER_KEYWORDS[name]}" if name in OTHER_KEYWORDS else WITHOUT_COUNTERPART[name]
    with pytest.raises(TypeError, match=rf"^attention\(\) has no keyword '{name}'. {answer}"):
        flash_ext.attention(*make_qkv(), **{name: None})


PACKED_ALONE = r"Packed sequences go into flash_ext\.attention_varlen\.$"
CACHE_ALONE = r"Keys in a cache go into flash_ext\.attention_varlen\.$"
LSE_ANYWAY = r"Leave it out: flash_ext\.forward returns out and lse\.$"
# Function, keyword, and what is said of it.
KEYWORDS = [
    ("attention_varlen", "max_q", r"Did you mean max_seqlen_q=\?$"),
    ("attention_varlen", "max_k", r"Did you mean max_seqlen_k=\?$"),
    ("attention_varlen", "cu_seq_q", r"Did you mean cu_seqlens_q=\?$"),
    ("attention_varlen", "cache_seqlens", r"Did you mean seqused_k=\?$"),
    ("attention_varlen", "page_table", r"Did you mean block_table=\?$"),
    ("attention_varlen", "learnable_sink", r"Did you mean sinks=\?$"),
    ("attention_varlen", "return_attn_probs", r"weights are not returned\. For lse .*AuxRequest\(lse=True\)"),
    ("attention_varlen", "num_splits", r'Leave it out.* backend="kv_splits=4"\.$'),
    ("attention_varlen", "layout", r"Leave it out: packed tensors are \(total, num_heads, head_dim\)"),
    ("attention", "learnable_sink", r"Did you mean sinks=\?$"),
    ("attention", "max_q", PACKED_ALONE),
    ("attention", "max_k", PACKED_ALONE),
    ("attention", "max_seqlen_k", PACKED_ALONE),
    ("attention", "cu_seq_k", PACKED_ALONE),
    ("attention", "cache_seqlens", CACHE_ALONE),
    ("attention", "page_table", CACHE_ALONE),
    ("forward", "max_k", r"Did you mean max_seqlen_k=\?$"),
    ("forward", "cache_seqlens", CACHE_ALONE),
    ("forward", "layout", r"Leave it out: .* pass t\.transpose\(1, 2\)\.$"),
    ("forward", "return_aux", LSE_ANYWAY),
    ("forward", "return_lse", LSE_ANYWAY),
    ("forward", "return_softmax_lse", LSE_ANYWAY),
    ("forward", "return_attn_probs", r"flash_ext\.forward always returns it\.$"),
]


@pytest.mark.parametrize(("function", "name", "words"), KEYWORDS)
def test_keywords_that_other_functions_have(function: str, name: str, words: str) -> None:
    q, k, v, cu = make_packed()
    packed = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    arguments = packed if function == "attention_varlen" else dense()
    with pytest.raises(TypeError, match=rf"^{function}\(\) has no keyword '{name}'\. .*{words}"):
        getattr(flash_ext, function)(**arguments, **{name: None})


def test_a_scale_that_learns_is_refused_rather_than_dropped() -> None:
    """By plain calls, by both halves of the pair, under torch.func: pybind11 would take its number."""
    q, k, v = make_qkv()
    scale = torch.tensor(0.5)
    out, lse = flash_ext.forward(q, k, v, scale=0.5)
    calls = (
        lambda s: flash_ext.attention(q, k, v, scale=s),
        lambda s: flash_ext.attention(q, k, v, scale=s, return_aux=AuxRequest(lse=True))[0],
        lambda s: flash_ext.forward(q, k, v, scale=s, out_dtype=torch.float32)[0],
        lambda s: flash_ext.backward(out, q, k, v, out, lse, scale=s)[0],
        lambda s: flash_ext.backward(out, q, k, v, out, lse, scale=s, grad_dtype=torch.float32)[0],
        lambda s: flash_ext.backward(out, q, k, v, out, lse, scale=s, softcap=1.0)[0],
        lambda s: flash_ext.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=s,
                                                         enable_gqa=True),
        lambda s: torch.func.grad(lambda t: flash_ext.attention(q, k, v, scale=t).sum())(s),
    )  # fmt: skip
    for call in calls:
        for leaf in (scale, torch.nn.Parameter(scale)):
            with pytest.raises(TypeError, match="^scale must be a number, got (Tensor|Parameter)"):
                call(leaf)


def test_packed_calls_refuse_dense_layouts() -> None:
    q, k, v, cu = make_packed(lengths=(3, 0, 9), spare=2)
    for keywords, words in (
        ({"mask": masks.KeyMask(rectangle(3, 9))}, r"keep must .* \(total_k,\) = \(14,\), got \(3, 9\)"),
        ({"mask": masks.Documents(ints(3, 9))}, r"ids must have shape \(total_q,\) = \(14,\), got \(3, 9\)"),
        (
            {"mask": masks.HiddenRows(ints(3, 4, 14, 2))},
            r"HiddenRows: intervals must have shape \(num_heads, total_k, 2 or 4\) = \(4, 14, 2 or 4\)",
        ),
        ({"mask": rectangle(2, 1, 9, 9)}, r"\(batch, num_heads, any, any\) = \(3, 4, any, any\)"),
        ({"bias": torch.zeros(2, 1, 9, 9)}, r"\(batch, num_heads, any, any\) = \(3, 4, any, any\)"),
        ({"mask": masks.PrefixLM(ints(4))}, r"Prefix: lens must have shape \(batch,\) = \(3,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_ext.attention_varlen(q, k, v, cu, cu, **keywords)


def test_the_pair_refuses() -> None:
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match=r"rng must be given with dropout_p 0\.1.*dropout_rng\(q.device\)"):
        flash_ext.forward(q, k, v, dropout_p=0.1)
    with pytest.raises(ValueError, match=r"rng must be torch.int64 of shape \(2,\), got torch.int32"):
        flash_ext.forward(q, k, v, dropout_p=0.1, rng=ints(2))
    out, lse = flash_ext.forward(q, k, v)
    for keywords, words in (
        ({"needs": ("q", "table")}, "needs must be a tuple of names out of"),
        (
            {"needs": ("q", "bias")},
            "bias, the gradient of one DenseBias or RelativePosition in bias=, which is not given",
        ),
        (
            {"needs": ("slopes",), "bias": by_distance()},
            "needs names slopes, the gradient of an ALiBi in bias=, which is not given",
        ),
        (
            {"needs": ("bias",), "bias": masks.ALiBi(torch.ones(4))},
            "needs names bias, the gradient of one DenseBias",
        ),
        (
            {"needs": ("bias",), "bias": masks.DenseBias(torch.zeros(17)) + masks.DenseBias(torch.ones(17))},
            "needs names bias, the gradient of one DenseBias",
        ),
        ({"needs": ("sinks",)}, "needs names sinks, the gradient of sinks=, which is not given"),
        ({"needs": ("mask",), "mask": rectangle(17, 17)}, "needs must be a tuple of names out of"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_ext.backward(out, q, k, v, out, lse, **keywords)
    (dk,) = flash_ext.backward(out, q, k, v, out, lse, needs=("k",))
    assert torch.equal(dk, flash_ext.backward(out, q, k, v, out, lse)[1])


def test_block_masks_refuse() -> None:
    ones = torch.ones(4, 4, dtype=torch.bool)
    for make, exception, words in (
        (lambda: masks.BlockMask(ones, 24), ValueError, "positive multiples of 16, got 24"),
        (lambda: masks.BlockMask(ones, (16, 0)), ValueError, "positive multiples of 16"),
        (lambda: masks.BlockMask(ones, 16.0), TypeError, "block_size must be an int or a pair"),
        (lambda: masks.BlockMask(ones.int(), 16), TypeError, r"blocks must be torch.bool .*\.bool\(\)"),
        (lambda: masks.BlockMask(ones[0], 16), ValueError, r"blocks must have shape .* got \(4,\)"),
        (lambda: masks.BlockMask.from_dense([1], 16), TypeError, "mask must be a torch.Tensor, got list"),
        (lambda: masks.BlockMask.from_dense(ones[0], 16), ValueError, "mask must have shape"),
        (lambda: masks.BlockMask.from_torch(ones), TypeError, "flex_attention.BlockMask, got Tensor"),
        (lambda: masks.BlockMask.from_rule(lambda b, h, i, j: i - j, None, None, 4, 4), TypeError,
         "the result of rule must be torch.bool"),
    ):  # fmt: skip
        with pytest.raises(exception, match=words):
            make()


# ---- first mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (
            ((2, 8, 100, 16), (2, 8, 128, 16)),
            r'got 100 and 128\. Tensors of shape .* need layout="bhsd", and transpose',
        ),
        (((2, 8, 100, 16), (2, 2, 128, 16)), r'need layout="bhsd", and transpose'),
        (((2, 100, 8, 16), (2, 128, 3, 16)), r"got 8 and 3\.$"),
        (((100, 8, 16), (100, 8, 16)), r"Packed sequences go into attention_varlen\.$"),
    ],
)
def test_another_layout_is_guessed(shapes: tuple, words: str) -> None:
    q, k = (torch.zeros(shape) for shape in shapes)
    for options in ({}, {"softcap": 2.0}):
        with pytest.raises(ValueError, match=words):
            flash_ext.attention(q, k, k, **options)


LENGTH, HEADS = 64, 8
OF_LENGTH = {
    "mask": lambda: {"mask": rectangle(LENGTH, LENGTH)},
    "mask of heads": lambda: {"mask": rectangle(2, HEADS, LENGTH, LENGTH)},
    "bias": lambda: {"bias": torch.zeros(HEADS, LENGTH, LENGTH)},
    "keys": lambda: {"mask": masks.KeyMask(rectangle(2, LENGTH))},
    "keys of all": lambda: {"mask": masks.KeyMask(rectangle(LENGTH))},
    "documents": lambda: {"mask": masks.Documents(ints(2, LENGTH), ints(2, LENGTH))},
    "sinks": lambda: {"sinks": torch.ones(HEADS)},
    "slopes": lambda: {"bias": masks.ALiBi(torch.ones(HEADS))},
    "table": lambda: {"bias": by_distance(HEADS)},
}


@pytest.mark.parametrize("heads_k", [HEADS, 2])
@pytest.mark.parametrize("case", OF_LENGTH)
def test_heads_first_is_guessed_from_what_is_beside_q(case: str, heads_k: int) -> None:
    """Where all lengths are one, q, k and v fit either way. The cure that is proposed is executed."""
    q, k = torch.zeros(2, HEADS, LENGTH, 16), torch.zeros(2, heads_k, LENGTH, 16)
    words = r"\. It would fit with heads and length exchanged: .* with layout=\"bhsd\" .* transpose\(1, 2\)"
    given = OF_LENGTH[case]()
    with pytest.raises(ValueError, match=words):
        flash_ext.attention(q, k, k, **given)
    assert flash_ext.attention(q, k, k, layout="bhsd", **given).shape == q.shape
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    with pytest.raises(ValueError, match=words):
        flash_ext.attention(q, k, k, layout="bhsd", **given)


def test_heads_first_is_not_guessed_from_what_fits_neither_way() -> None:
    q = torch.zeros(2, HEADS, LENGTH, 16)
    for given in (
        {"mask": rectangle(LENGTH, LENGTH - 1)},
        {"mask": rectangle(3, 1, LENGTH, LENGTH)},
        {"mask": masks.KeyMask(rectangle(3, LENGTH))},
        {"mask": masks.KeyMask(rectangle(2, LENGTH - 1))},
        {"sinks": torch.ones(3)},
        {"bias": masks.ALiBi(torch.ones(3))},
    ):
        with pytest.raises(ValueError, match=r"got \([\d, ]*\)\.$"):
            flash_ext.attention(q, q, q, **given)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([0, 6, 4, 10], "cu_seqlens_q must .*not decrease, .* within the 10 rows .*, got 4 after 6"),
        ([0, 6, 12], "got 10 after 12"),
        ([-1, 6, 10], "got -1 after 0"),
    ],
)
def test_cu_seqlens_on_the_cpu(bounds: list[int], words: str) -> None:
    """Looking costs nothing there. A compiler and a transform have no values to look at."""
    x, cu = torch.randn(10, 2, 16), torch.tensor(bounds, dtype=torch.int32)
    good = torch.tensor([0, 6, 10][: len(bounds)] + [10] * (len(bounds) - 3), dtype=torch.int32)
    for options in ({}, {"softcap": 2.0}):
        with pytest.raises(ValueError, match=words):
            flash_ext.attention_varlen(x, x, x, cu, good, **options)
        with pytest.raises(ValueError, match=words.replace("cu_seqlens_q", "cu_seqlens_k")):
            flash_ext.attention_varlen(x, x, x, good, cu, **options)
    compiled = torch.compile(flash_ext.attention_varlen, backend="aot_eager", fullgraph=True)
    assert compiled(x, x, x, good, good).shape == x.shape


@pytest.mark.parametrize("bounds", [[0, 6, 4, 10], [0, 4, 12], [-1, 6, 10]])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_cu_seqlens_of_the_functional_pair(bounds: list[int], options: dict) -> None:
    """In the words of attention_varlen, also under the road of a GPU."""
    x, cu = torch.randn(10, 2, 16, dtype=torch.bfloat16), torch.tensor(bounds, dtype=torch.int32)
    good = torch.tensor([0, 6, 10][: len(bounds)] + [10] * (len(bounds) - 3), dtype=torch.int32)
    lse = torch.zeros(2, 10)
    for q_bounds, k_bounds in ((cu, good), (good, cu)):
        with pytest.raises(ValueError, match="not decrease") as refused:
            flash_ext.attention_varlen(x, x, x, q_bounds, k_bounds, **options)
        packed = {"cu_seqlens_q": q_bounds, "cu_seqlens_k": k_bounds, **options}
        for road in (contextlib.nullcontext, null_kernels):
            with road(), pytest.raises(ValueError, match=re.escape(str(refused.value))):
                flash_ext.forward(x, x, x, **packed)
            with road(), pytest.raises(ValueError, match=re.escape(str(refused.value))):
                flash_ext.backward(x, x, x, x, x, lse, **packed)
    packed = {"cu_seqlens_q": good, "cu_seqlens_k": good}
    compiled = torch.compile(flash_ext.forward, backend="aot_eager", fullgraph=True)
    assert compiled(x, x, x, **packed)[0].shape == x.shape


@pytest.mark.parametrize("wrong", [None, 3])
def test_packed_calls_of_no_tensor_are_refused_in_words(wrong: object) -> None:
    x, cu = torch.randn(10, 2, 16), torch.tensor([0, 6, 10], dtype=torch.int32)
    for attend in (flash_ext.attention_varlen, flash_ext.forward):
        for tensors in ((wrong, x, x), (x, wrong, x)):
            with pytest.raises(TypeError, match="must be a torch.Tensor, got"):
                attend(*tensors, cu_seqlens_q=cu, cu_seqlens_k=cu)
