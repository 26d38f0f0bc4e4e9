"""What the modifiers refuse, and in which words: the argument, what it holds, and the way out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flash_ext
from tests.qkv import make_packed, make_qkv

HALF = torch.bfloat16


def dense(**keywords: object) -> dict[str, object]:
    q, k, v = make_qkv(seqlen_q=8, seqlen_k=10, dtype=HALF)
    return {"q": q, "k": k, "v": v, **keywords}


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def torch_blocks() -> object:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)


def by_distance(heads: int = 4, **options: object) -> flash_ext.RelativePosition:
    return flash_ext.RelativePosition(torch.zeros(heads, 32, **options))


def blocks(*shape: int, size: int = 16) -> flash_ext.BlockMask:
    return flash_ext.BlockMask(torch.ones(shape, dtype=torch.bool), size)


REFUSED = {
    "mask kind": ({"attn_mask": "causal"}, TypeError, "attn_mask must be a torch.Tensor or None, got str"),
    "mask uint8": ({"attn_mask": torch.ones(8, 10, dtype=torch.uint8)}, TypeError,
                   r"attn_mask must be torch.bool .* got torch.uint8. For a mask of 0 and 1 pass .bool\(\)"),
    "mask int": ({"attn_mask": ints(8, 10)}, TypeError, r"attn_mask must be .* got torch.int32.*\.bool\(\)"),
    "mask double": ({"attn_mask": torch.zeros(8, 10).double()}, TypeError, "got torch.float64. Cast it"),
    "mask half": ({"attn_mask": torch.zeros(8, 10).half()}, TypeError, r"q, torch.bfloat16 .* torch.float16"),
    "mask scalar": ({"attn_mask": torch.zeros(())}, ValueError, r"attn_mask must have 1 to 4 .* shape \(\)"),
    "mask 5-d": ({"attn_mask": torch.zeros(1, 1, 1, 1, 1)}, ValueError, r"attn_mask must have 1 to 4 dim"),
    "mask rows": ({"attn_mask": torch.zeros(7, 10)}, ValueError,
                  r"must broadcast to \(batch, num_heads, seqlen_q, seqlen_k\) = \(2, 4, 8, 10\), got"),
    "mask of keys": ({"attn_mask": torch.zeros(2, 10) > 0}, ValueError, r"pass key_padding_mask="),
    "mask key heads": ({"attn_mask": torch.zeros(2, 2, 8, 10)}, ValueError, r"attn_mask must broadcast"),
    "mask device": ({"attn_mask": torch.zeros(8, 10, device="meta")}, ValueError,
                    r"attn_mask must be on the device of q, cpu, got meta. Move it with .to\(q.device\)"),
    "bias tensor": ({"bias": torch.zeros(8, 10)}, TypeError,
                    "bias must be a flash_ext.RelativePosition or None, got Tensor. .* goes into attn_mask="),
    "bias kind": ({"bias": "t5"}, TypeError, "bias must be a flash_ext.RelativePosition or None, got str.$"),
    "bias heads": ({"bias": by_distance(3)}, ValueError,
                   r"the table of bias must have the 4 heads of q, or 1 .* got 3: .* here \(3, 32\)"),
    "bias key heads": ({"bias": by_distance(2)}, ValueError, "must have the 4 heads of q, .* got 2"),
    "bias device": ({"bias": by_distance(device="meta")}, ValueError,
                    "the table of bias must be on the device of q, cpu, got meta"),
    "two biases": ({"bias": by_distance(), "attn_mask": torch.zeros(8, 10)}, ValueError,
                   r"attn_mask must be torch.bool beside bias, .* got torch.float32. .*bias.to_dense\("),
    "padding kind": ({"key_padding_mask": [True]}, TypeError, "key_padding_mask must be a torch.Tensor"),
    "padding dtype": ({"key_padding_mask": torch.ones(2, 10)}, TypeError, r"key_padding_mask .*\.bool\(\)"),
    "padding shape": ({"key_padding_mask": torch.ones(2, 8) > 0}, ValueError,
                      r"key_padding_mask must have shape \(batch, seqlen_k\) = \(2, 10\), got \(2, 8\)"),
    "slopes kind": ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes must be a torch.Tensor .* float"),
    "slopes dtype": ({"alibi_slopes": ints(4)}, TypeError, r"alibi_slopes must be floating .*\.float"),
    "slopes shape": ({"alibi_slopes": torch.ones(3)}, ValueError,
                     r"must have shape \(num_heads,\) or \(batch, num_heads\), here \(4,\) or \(2, 4\)"),
    "sinks dtype": ({"sinks": ints(4)}, TypeError, "sinks must be floating point, got torch.int32"),
    "sinks shape": ({"sinks": torch.ones(2, 4)}, ValueError, r"sinks must have shape \(num_heads,\)"),
    "softcap sign": ({"softcap": -1.0}, ValueError, r"softcap must be 0 \(off\) or a positive .* got -1"),
    "softcap nan": ({"softcap": float("nan")}, ValueError, "softcap must be .* got nan"),
    "softcap inf": ({"softcap": float("inf")}, ValueError, "softcap must be .* got inf"),
    "softcap tensor": ({"softcap": torch.tensor(2.0, requires_grad=True)}, TypeError,
                       "softcap must be a number, got Tensor. It would get no gradient"),
    "softcap zero tensor": ({"softcap": torch.tensor(0.0)}, TypeError, "softcap must be a number"),
    "softcap text": ({"softcap": "2"}, TypeError, "softcap must be a number, got str"),
    "dropout sign": ({"dropout_p": -0.1}, ValueError, r"dropout_p must be a probability .* got -0\.1"),
    "dropout above": ({"dropout_p": 1.1}, ValueError, r"dropout_p must be .* from 0 to 1, got 1\.1"),
    "dropout nan": ({"dropout_p": float("nan")}, ValueError, "dropout_p must be a probability"),
    "dropout tensor": ({"dropout_p": torch.tensor(0.1)}, TypeError, "dropout_p must be a number, got Tensor"),
    "generator kind": ({"generator": 7}, TypeError, "generator must be a torch.Generator or None, got int"),
    "ids kind": ({"document_ids": 3}, TypeError, r"document_ids must be a torch.Tensor or a pair"),
    "ids lengths": ({"document_ids": ints(2, 8)}, ValueError, r"document_ids must be a pair .* 8 and 10"),
    "ids dtype": ({"document_ids": (ints(2, 8).long(), ints(2, 10))}, TypeError,
                  r"document_ids\[0\] must be torch.int32, got torch.int64. Convert it"),
    "ids shape": ({"document_ids": (ints(2, 8), ints(2, 9))}, ValueError, r"document_ids\[1\] must have"),
    "ids float": ({"document_ids": (torch.zeros(8), ints(10))}, TypeError, r"document_ids\[0\] must be"),
    "prefix dtype": ({"prefix_lens": torch.ones(2)}, TypeError, "prefix_lens must be torch.int32"),
    "prefix shape": ({"prefix_lens": ints(3)}, ValueError, r"prefix_lens must have shape .* here \(2,\)"),
    "sink tokens sign": ({"sink_tokens": -1}, ValueError, "sink_tokens must not be negative, got -1;"),
    "sink tokens kind": ({"sink_tokens": 1.5}, TypeError, "sink_tokens must be an int, got float"),
    "sink tokens tensor": ({"sink_tokens": ints()}, TypeError, "sink_tokens must be an int, got Tensor"),
    "chunk sign": ({"chunk_size": -4}, ValueError, "chunk_size must not be negative, got -4"),
    "chunk kind": ({"chunk_size": "4"}, TypeError, "chunk_size must be an int, got str"),
    "rows float": ({"hidden_rows": torch.zeros(10, 2)}, TypeError, "hidden_rows must be torch.int32, got"),
    "rows length": ({"hidden_rows": ints(8, 2)}, ValueError, r"hidden_rows must .* seqlen_k = 10"),
    "rows pairs": ({"hidden_rows": ints(10, 3)}, ValueError, r"hidden_rows .* one or two pairs"),
    "rows heads": ({"hidden_rows": ints(3, 10, 2)}, ValueError, r"hidden_rows must .* got \(3, 10, 2\)"),
    "keys length": ({"hidden_keys": ints(10, 2)}, ValueError, r"hidden_keys must .* seqlen_q = 8"),
    "blocks kind": ({"block_mask": torch.ones(1, 1) > 0}, TypeError, "a flash_ext.BlockMask.*from_dense"),
    "blocks of torch": ({"block_mask": torch_blocks()}, TypeError, r"flash_ext.BlockMask, .*from_torch"),
    "blocks count": ({"block_mask": blocks(1, 2)}, ValueError, r"must hold \(2 or 1, 4 or 1, 1, 1\) b"),
    "blocks heads": ({"block_mask": blocks(2, 2, 1, 1)}, ValueError, r"block_mask must hold"),
    "maxima": ({"return_max_logits": "rows"}, ValueError, 'must be a bool, "row" or "head"'),
    "causal": ({"causal": "left"}, ValueError, 'causal must be a bool, "bottom_right" or'),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case: str) -> None:
    keywords, exception, words = REFUSED[case]
    with pytest.raises(exception, match=words):
        flash_ext.attention(**dense(**keywords))


def test_arguments_are_checked_beside_modifiers_too() -> None:
    mask = torch.ones(8, 10, dtype=torch.bool)
    for changes, exception, words in (
        ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
        ({"q": torch.zeros(8, 4, 16)}, ValueError, r"q must have shape \(batch, .* got \(8, 4, 16\)"),
        ({"window": 5}, TypeError, "window must be a pair of ints"),
        ({"window": (-2, 0)}, ValueError, r"window .*got \(-2, 0\)"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite"),
        ({"softmax_scale": torch.tensor(0.5, requires_grad=True)}, TypeError,
         "softmax_scale must be a number, got Tensor. It would get no gradient"),
        ({"path": "sm75"}, ValueError, "path must be None"),
        ({"v": torch.zeros(2, 10, 2, 16)}, TypeError, "v torch.float32"),
    ):
        with pytest.raises(exception, match=words):
            flash_ext.attention(**{**dense(attn_mask=mask), **changes})


def test_a_scale_that_learns_is_refused_rather_than_dropped() -> None:
    """By plain calls, by both halves of the pair, under torch.func: pybind11 would take its number."""
    q, k, v = make_qkv()
    scale = torch.tensor(0.5)
    out, lse = flash_ext.forward(q, k, v, softmax_scale=0.5)
    calls = (
        lambda s: flash_ext.attention(q, k, v, softmax_scale=s),
        lambda s: flash_ext.attention(q, k, v, softmax_scale=s, return_max_logits=True)[0],
        lambda s: flash_ext.forward(q, k, v, softmax_scale=s, out_dtype=torch.float32)[0],
        lambda s: flash_ext.backward(out, q, k, v, out, lse, softmax_scale=s)[0],
        lambda s: flash_ext.backward(out, q, k, v, out, lse, softmax_scale=s, grad_dtype=torch.float32)[0],
        lambda s: flash_ext.backward(out, q, k, v, out, lse, softmax_scale=s, softcap=1.0)[0],
        lambda s: flash_ext.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=s,
                                                         enable_gqa=True),
        lambda s: torch.func.grad(lambda t: flash_ext.attention(q, k, v, softmax_scale=t).sum())(s),
    )  # fmt: skip
    for call in calls:
        for leaf in (scale, torch.nn.Parameter(scale)):
            with pytest.raises(TypeError, match="softmax_scale must be a number, got (Tensor|Parameter)"):
                call(leaf)


def test_packed_calls_refuse_dense_layouts() -> None:
    q, k, v, cu = make_packed(lengths=(3, 0, 9), spare=2)
    for keywords, words in (
        ({"key_padding_mask": torch.ones(3, 9) > 0}, r"key_padding_mask must have shape \(total_k,\)"),
        ({"document_ids": ints(3, 9)}, r"document_ids must have shape \(total,\), here \(14,\)"),
        ({"hidden_rows": ints(3, 4, 14, 2)}, r"hidden_rows must have shape \(num_heads, total_k, 2 or 4\)"),
        ({"attn_mask": torch.zeros(2, 1, 9, 9)}, r"\(batch, num_heads, rows, keys\) = \(3, 4, any, any\)"),
        ({"prefix_lens": ints(4)}, r"prefix_lens must have shape \(batch,\), here \(3,\)"),
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
        ({"needs": ("q", "bias")}, "needs names bias, which is not given"),
        ({"needs": ("attn_mask",), "bias": by_distance()}, "needs names attn_mask, which is not given"),
        ({"needs": ("sinks",)}, "needs names sinks, which is not given"),
        ({"needs": ("attn_mask",), "attn_mask": torch.ones(17, 17) > 0}, "a bool mask has no gradient"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_ext.backward(out, q, k, v, out, lse, **keywords)
    (dk,) = flash_ext.backward(out, q, k, v, out, lse, needs=("k",))
    assert torch.equal(dk, flash_ext.backward(out, q, k, v, out, lse)[1])


def test_block_masks_refuse() -> None:
    ones = torch.ones(4, 4, dtype=torch.bool)
    for make, exception, words in (
        (lambda: flash_ext.BlockMask(ones, 24), ValueError, "positive multiples of 16, got 24"),
        (lambda: flash_ext.BlockMask(ones, (16, 0)), ValueError, "positive multiples of 16"),
        (lambda: flash_ext.BlockMask(ones, 16.0), TypeError, "block_size must be an int or a pair"),
        (lambda: flash_ext.BlockMask(ones.int(), 16), TypeError, r"blocks must be torch.bool .*\.bool\(\)"),
        (lambda: flash_ext.BlockMask(ones[0], 16), ValueError, r"blocks must have shape .* got \(4,\)"),
        (lambda: flash_ext.BlockMask.from_dense([1], 16), TypeError, "mask must be a torch.Tensor, got list"),
        (lambda: flash_ext.BlockMask.from_dense(ones[0], 16), ValueError, "mask must have shape"),
        (lambda: flash_ext.BlockMask.from_torch(ones), TypeError, "flex_attention.BlockMask, got Tensor"),
        (lambda: flash_ext.BlockMask.from_rule(lambda b, h, i, j: i - j, None, None, 4, 4), TypeError,
         "the result of rule must be torch.bool"),
    ):  # fmt: skip
        with pytest.raises(exception, match=words):
            make()
