"""The twin of PyTorch's attention against PyTorch's own, and the merging of partial results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import flash_ext
from tests.qkv import OperatorCalls, make_qkv, on_devices, reference, tolerance

# ---- scaled_dot_product_attention ------------------------------------------------------------------------

SDPA_SHAPES = {
    "2-d": ((5, 8), (7, 8), (7, 4)),
    "3-d": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "4-d": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 12)),
    "5-d": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "more queries": ((2, 3, 9, 8), (2, 3, 4, 8), (2, 3, 4, 8)),
    "same lengths": ((2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    "one key": ((2, 3, 6, 8), (2, 3, 1, 8), (2, 3, 1, 8)),
    "one key head": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "one value head": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8)),
    "one query head": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one batch of keys": ((2, 3, 5, 8), (1, 3, 7, 8), (3, 7, 8)),
    "broadcast to 5-d": ((3, 3, 5, 8), (3, 1, 3, 7, 8), (3, 1, 3, 7, 8)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", SDPA_SHAPES)
def test_sdpa_agrees_with_pytorch(case: str, is_causal: bool) -> None:
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in SDPA_SHAPES[case]]
    results = []
    for function in (flash_ext.scaled_dot_product_attention, torch_sdpa):
        out = function(*inputs, is_causal=is_causal, scale=0.4)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


MASK_SHAPES = {
    "4-d": [(5, 7), (5, 1), (3, 5, 7), (2, 1, 1, 7), (2, 3, 5, 7), (1, 3, 1, 7)],
    "2-d": [(5, 7), (1, 7)],
    "3-d": [(5, 7), (3, 5, 7), (3, 1, 7)],
    "5-d": [(5, 7), (2, 3, 5, 7), (2, 2, 1, 5, 7), (2, 1, 3, 1, 7), (1, 1, 1, 5, 7)],
    "more queries": [(9, 4), (2, 1, 9, 1)],
    "one key head": [(3, 5, 7)],
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("case", MASK_SHAPES)
def test_sdpa_with_masks_agrees_with_pytorch(case: str, kind: str) -> None:
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in SDPA_SHAPES[case]]
    for shape in MASK_SHAPES[case]:
        mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        if kind == "bool":
            mask = (mask > 0).index_fill(-1, torch.tensor(0), True)  # no row is empty
        leaves = [*inputs, mask] if kind == "float" else inputs
        results = []
        for function in (flash_ext.scaled_dot_product_attention, torch_sdpa):
            out = function(*inputs, attn_mask=mask, scale=0.4)
            results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("lengths", [(6, 6), (5, 8), (8, 5)])
def test_sdpa_mask_and_causal_are_both_obeyed(lengths: tuple[int, int]) -> None:
    q, k, v = (
        t.transpose(1, 2)
        for t in make_qkv(seqlen_q=lengths[0], seqlen_k=lengths[1], heads_k=4, dtype=torch.float64)
    )
    mask = (torch.rand(2, 1, *lengths) > 0.3).index_fill(-1, torch.tensor(0), True)
    out = flash_ext.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    torch.testing.assert_close(out, torch_sdpa(q, k, v, mask & torch.ones(lengths).tril().bool()))


def test_sdpa_dropout_keeps_the_mean() -> None:
    q, k, v = (t.transpose(1, 2) for t in make_qkv(seqlen_q=8, heads_k=4))
    plain = flash_ext.scaled_dot_product_attention(q, k, v)
    many = [t.expand(200, -1, -1, -1, -1).flatten(0, 1) for t in (q, k, v)]  # each copy draws for itself
    calls = [flash_ext.scaled_dot_product_attention(*many, dropout_p=0.25) for _ in range(2)]
    assert not torch.equal(*calls)
    draws = torch.cat([call.unflatten(0, (200, -1)) for call in calls])
    assert not torch.equal(draws[0], draws[1])
    error = (draws.mean(0) - plain).abs() / (draws.std(0) / 20 + 1e-6)
    assert error.max() < 6  # standard errors, over 1024 elements


@on_devices
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 33), (20, 45), (45, 20)])
def test_sdpa_grouped_heads(lengths: tuple[int, int], is_causal: bool, device: str) -> None:
    q, k, v = (t.transpose(1, 2) for t in make_qkv(device, seqlen_q=lengths[0], seqlen_k=lengths[1]))
    out = flash_ext.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    expected = torch_sdpa(q.double(), k.double(), v.double(), is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out.double(), expected, **tolerance(device))


def test_sdpa_reads_its_inputs_in_place() -> None:
    """No copies: what reaches the operator is the caller's memory, whichever order its dimensions have."""
    q, k, v = (t.transpose(1, 2) for t in make_qkv(heads_k=4))
    contiguous = [t.contiguous() for t in (q, k, v)]
    for inputs in ((q, k, v), contiguous):
        with OperatorCalls() as calls:
            flash_ext.scaled_dot_product_attention(*inputs, is_causal=True)
        ((_, args, _),) = calls.seen
        assert [t.data_ptr() for t in args[:3]] == [t.data_ptr() for t in inputs]


def test_sdpa_refuses_in_words() -> None:
    q, k, v = (t.transpose(1, 2) for t in make_qkv())
    for wrong in (None, [1.0]):
        with pytest.raises(TypeError, match="key must be a torch.Tensor, got"):
            flash_ext.scaled_dot_product_attention(q, wrong, v)
    five = [t.expand(3, 2, 4, 17, 16) for t in (q, q, q)]
    grouped = {"enable_gqa": True}
    for args, options, error, words in (
        ((q, k, v.to_sparse()), {}, TypeError,
         "value must be a dense tensor, got one of layout torch.sparse_coo"),
        ((q, k, v, torch.ones(17, 16).bool()), grouped, ValueError,
         r"attn_mask must broadcast to .*\(2, 4, 17, 17\), got \(17, 16\)"),
        ((q, k, v, torch.ones(17, 17).byte()), grouped, TypeError,
         r"attn_mask must be torch.bool .* got torch.uint8.*\.bool\(\)"),
        ((q, k, v.numpy()), {}, TypeError,
         "value must be a torch.Tensor, got ndarray. Convert it with torch.from_numpy"),
        ((q, k, v, torch.ones(17, 17).numpy()), grouped, TypeError,
         "attn_mask must be a torch.Tensor or None, got ndarray. Convert it with torch.from_numpy"),
        ((q, k, v, None, 1.5), grouped, ValueError,
         r"dropout_p must be a probability from 0 to 1, got 1\.5"),
        ((*five, torch.ones(5, 1, 17, 17).bool()), {}, ValueError,
         r"attn_mask must broadcast .*\(3, 2\) in front, got \(5, 1, "),
        ((q, k, v), {}, ValueError, r"same number of heads.*\(4, 2, 2\).*enable_gqa=True"),
        ((q, k[:1].expand(3, -1, -1, -1), v), {}, ValueError,
         "leading dimensions of query, key and value must broadcast"),
        ((q, k, torch.ones(3)), {}, ValueError, "value must have at least 2 dimensions"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            flash_ext.scaled_dot_product_attention(*args, **options)
    with FakeTensorMode():
        wide = torch.empty(2, 4, 8, 64, device="cuda")
        with pytest.raises(TypeError, match="torch.float32.*autocast"):
            flash_ext.scaled_dot_product_attention(wide, wide, wide)


# ---- merge_attention_states ------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("packed", [False, True])
def test_merging_parts_gives_the_whole(packed: bool, device: str) -> None:
    q, k, v = make_qkv(device, batch=1, seqlen_q=9, seqlen_k=20)
    whole = flash_ext.forward(q, k, v)
    parts = [flash_ext.forward(q, k[:, s], v[:, s]) for s in (slice(0, 13), slice(13, 20))]
    if packed:
        whole, *parts = ([t[0] for t in state] for state in (whole, *parts))
    out, lse = flash_ext.merge_attention_states(*parts[0], *parts[1])
    assert out.dtype == q.dtype
    torch.testing.assert_close(out, whole[0], **tolerance(device))
    torch.testing.assert_close(lse, whole[1], **tolerance("cpu"))


def random_state(*, empty: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """A float64 state (2, 5, 3, 4) in which the rows ``empty`` have seen no key."""
    out, lse = torch.randn(2, 5, 3, 4, dtype=torch.float64), 20 * torch.randn(2, 3, 5, dtype=torch.float64)
    for row in empty:
        out[:, row], lse[:, :, row] = 0, -torch.inf
    return out.requires_grad_(), lse.requires_grad_()


def test_merging_is_a_commutative_monoid() -> None:
    a, b, c = random_state(), random_state(empty=(1, 2)), random_state(empty=(2,))
    merge = flash_ext.merge_attention_states
    neutral = random_state(empty=tuple(range(5)))
    for got, expected in (
        (merge(*a, *b), merge(*b, *a)),
        (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))),
        (merge(*a, *neutral), a),
        (merge(*neutral, *a), a),
        (merge(*neutral, *neutral), neutral),
    ):
        torch.testing.assert_close(got, expected)


def test_merging_does_not_overflow() -> None:
    out = torch.ones(1, 1, 1, 1)
    high, low = (torch.full((1, 1, 1), value) for value in (1e4, -1e4))
    merged, lse = flash_ext.merge_attention_states(out, high, 3 * out, high)
    assert merged.item() == 2.0
    assert lse.item() == pytest.approx(1e4 + 0.6931, abs=1e-3)
    assert flash_ext.merge_attention_states(out, high, 3 * out, low)[0].item() == 1.0


def test_merging_is_differentiable() -> None:
    a, b = random_state(), random_state()
    assert torch.autograd.gradcheck(flash_ext.merge_attention_states, (*a, *b))
    # Rows that saw nothing, on either side or on both, give exact zeros and no NaN.
    a, b = random_state(empty=(0, 1)), random_state(empty=(1, 2))
    out, lse = flash_ext.merge_attention_states(*a, *b)
    grads = torch.autograd.grad(out.sum() + lse.where(lse.isfinite(), 0).sum(), (*a, *b))
    assert all(grad.isfinite().all() for grad in grads)
    for grad, empty in zip(grads[1::2], ((0, 1), (1, 2)), strict=True):
        assert not grad[:, :, list(empty)].any()


def test_attention_over_merged_states_trains_like_the_whole() -> None:
    leaves = make_qkv(seqlen_q=9, seqlen_k=20, dtype=torch.float64, requires_grad=True)
    q, k, v = leaves
    parts = [flash_ext.forward(q, k[:, s], v[:, s]) for s in (slice(0, 13), slice(13, 20))]
    out, lse = flash_ext.merge_attention_states(*parts[0], *parts[1])
    whole_out, whole_lse = reference(q, k, v)
    got = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)
    expected = torch.autograd.grad(whole_out.sin().sum() + whole_lse.cos().sum(), leaves)
    torch.testing.assert_close(got, expected)


def test_merging_refuses() -> None:
    out, lse = random_state()
    for states, error, words in (
        ((out[0, 0], lse, out, lse), ValueError, "out_a must have shape"),
        ((out, lse, out[:1], lse), ValueError, "out_b must have the shape of out_a"),
        ((out, lse.transpose(1, 2), out, lse), ValueError, r"lse_a must have .*\(2, 3, 5\), got \(2, 5, 3\)"),
        ((out, lse, out, lse[:, :1]), ValueError, "lse_b must have shape"),
        ((out, None, out, lse), TypeError, "lse_a must be a torch.Tensor, got NoneType"),
        ((out.detach().numpy(), lse, out, lse), TypeError,
         "out_a must be a torch.Tensor, got ndarray. Convert it with torch.from_numpy"),
        ((out, lse, out.int(), lse), TypeError, "out_b must be floating point, got torch.int32"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            flash_ext.merge_attention_states(*states)
