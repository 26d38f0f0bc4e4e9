"""Bounds of a window that hide nothing: dense calls run as without them (csrc/api/tensors.cpp).

Lengths of packed sequences are not known where kernels are chosen, so theirs stay.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import flash_ext
from flash_ext import masks
from flash_ext._ops.library import _C
from tests.harness import Target, choice_of, on_paths
from tests.kernels.plans import plan
from tests.qkv import blank_qkv, make_qkv, null_kernels
from tests.values import values


def planned(direction: str, seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1, **more) -> dict:
    return plan(
        direction, seqlen=(seqlen_q, seqlen_k), window_size_left=left, window_size_right=right,
        **{"batch": 4, "heads": 16, "head_dim": 128} | more,
    )  # fmt: skip


def hides(seqlen_q: int, seqlen_k: int, left: int, right: int) -> bool:
    """Row by row and key by key."""
    for row, key in itertools.product(range(seqlen_q), range(seqlen_k)):
        centre = row + seqlen_k - seqlen_q
        if (left >= 0 and key < centre - left) or (right >= 0 and key > centre + right):
            return True
    return False


def test_a_window_is_none_where_it_hides_nothing(pretended_gpu) -> None:
    """Forwards of few rows draw tiles, of which a CTA has several, only where there is a window: 16 bytes."""
    path = choice_of("sm90", kv_splits=0, short_kernels=0)
    _C.set_switch("num_sms", 1)
    for seqlen_q, seqlen_k in itertools.product((1, 2, 5), repeat=2):
        for left, right in itertools.product(range(-1, 7), repeat=2):
            found = planned("fwd", seqlen_q, seqlen_k, left, right, backend=path)["workspace_bytes"]
            wanted = 16 if hides(seqlen_q, seqlen_k, left, right) else 0
            assert found == wanted, (seqlen_q, seqlen_k, left, right)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("lengths", "idle", "same"),
    [
        ((512, 512), (511, 0), (-1, 0)),
        ((2048, 2048), (2**31 - 1, 0), (-1, 0)),
        ((512, 2048), (2047, 0), (-1, 0)),
        ((2048, 512), (511, 0), (-1, 0)),
        ((2048, 512), (511, 100), (-1, 100)),
        ((512, 512), (511, 511), (-1, -1)),
        ((512, 2048), (-1, 511), (-1, -1)),
        ((2048, 512), (600, 2047), (-1, -1)),
        ((1, 4096), (4095, 0), (-1, -1)),  # a causal row alone sees all keys
    ],
)
def test_plans_are_those_without_the_bound(
    pretended_gpu, lengths: tuple[int, int], idle: tuple[int, int], same: tuple[int, int], direction: str,
    head_dim: int,
) -> None:  # fmt: skip
    assert planned(direction, *lengths, *idle, head_dim=head_dim) == planned(
        direction, *lengths, *same, head_dim=head_dim
    )


def test_a_right_bound_beside_a_left_one_stays(pretended_gpu) -> None:
    """Keys of a window are counted with both: 100 of 8192 are too few to be split for four rows."""
    more = {"batch": 64, "heads": (16, 1)}
    assert planned("fwd", 4, 8192, 100, 3, **more) != planned("fwd", 4, 8192, 100, -1, **more)


@pytest.mark.parametrize(
    ("left", "alignment", "tall"),
    [
        (-1, "top_left", True),
        (511, "top_left", True),  # as many rows: the last one is level with key 511, beyond the end
        (510, "top_left", False),
        (299, "top_left", False),
        (-1, "bottom_right", True),
        (299, "bottom_right", True),  # the last row is level with the last key
        (298, "bottom_right", False),
    ],
)
def test_the_bound_is_counted_from_the_alignment(left: int, alignment: str, tall: bool) -> None:
    """Of calls with modifiers; with a window 512 rows of 300 keys have lower tiles, which are not tall."""
    q, k, v = blank_qkv(batch=4, seqlen_q=512, seqlen_k=300, heads=16, heads_k=16, head_dim=128,
                       dtype=torch.bfloat16)  # fmt: skip
    with null_kernels():
        flash_ext.forward(q, k, v, mask=masks.Window(left, 0, alignment), sinks=torch.zeros(16))
        assert _C.last_launch()["kernel"] == "fwd_mod_sm90_hd128" + ("_m192" if tall else "")


# As tests/values.py names them.
MODIFIERS = {
    "none": {},
    "sink tokens": {"sink_tokens": 3},
    "chunks": {"chunk": 40},
    "prefixes": {"prefix_lens": torch.tensor([5, 60], dtype=torch.int32)},
    "ALiBi": {"slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
}


@pytest.mark.parametrize("name", MODIFIERS)
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@on_paths
def test_results_are_those_without_the_bound(target: Target, alignment: str, name: str) -> None:
    """Bit by bit; the smallest bound that hides nothing, and one less is another call."""
    for lengths in ((90, 90), (70, 130), (130, 70), (1, 90)):
        check_results(target, *lengths, alignment, name)


def check_results(target: Target, seqlen_q: int, seqlen_k: int, alignment: str, name: str) -> None:
    dtype = torch.float32 if target.device == "cpu" else torch.bfloat16
    qkv = make_qkv(target.device, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, dtype=dtype)
    dout = torch.randn_like(qkv[0])
    parts = {key: x.to(target.device) if isinstance(x, torch.Tensor) else x
               for key, x in MODIFIERS[name].items()}  # fmt: skip
    parts |= {"causal": True, "top_left": alignment == "top_left"}

    def results(left: int) -> list[torch.Tensor]:
        options = {"backend": target.path, **values(window=(left, -1), **parts)}
        out, lse = flash_ext.forward(*qkv, **options)
        grads = flash_ext.backward(dout, *qkv, out, lse, deterministic=True, **options)
        return [out, lse, *grads]

    level = (seqlen_q if alignment == "top_left" else seqlen_k) - 1
    # Without a window sink tokens are nothing.
    without = results(level + 2 if name == "sink tokens" else -1)
    for left in (level, level + 1, 2**31 - 1):
        assert all(torch.equal(one, two) for one, two in zip(results(left), without, strict=True)), (
            seqlen_q,
            seqlen_k,
            left,
        )
    if name == "none" and alignment == "bottom_right":
        assert not torch.equal(results(level - 1)[0], without[0])
