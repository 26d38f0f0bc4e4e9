"""Hopper forwards whose last tile of queries is short (csrc/sm90/fwd/tiles.h) are scheduled dynamically with
equal keys, too."""

from __future__ import annotations

import itertools

import pytest
import torch

from flash_ext._ops.library import _C
from tests.cases import dense
from tests.harness import Target, call, choice_of, on_targets, run_case
from tests.inputs import make_inputs
from tests.kernels.plans import plan

COUNTER = 16  # bytes; a call whose items are dealt needs none


def test_no_number_of_multiprocessors_or_rows_breaks_the_rule(pretended_gpu) -> None:
    backend = choice_of("sm90", short_kernels=0, kv_splits=0)
    for num_sms in (1, 2, 7, 78, 114, 132):
        _C.set_switch("num_sms", num_sms)  # which the fixture takes back
        for seqlen, heads in itertools.product((1, 63, 64, 191, 192, 193, 320, 1000, 5000), (1, 3, 40)):
            found = plan("fwd", batch=3, seqlen=seqlen, heads=heads, head_dim=128, backend=backend)
            assert found["backend"] == "sm90" and found["workspace_bytes"] in (0, COUNTER)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@on_targets("sm90")
def test_drawn_items_give_the_bits_of_dealt_ones(target: Target, head_dim: int) -> None:
    """Six multiprocessors draw what 132 find in their first round."""

    def on(num_sms: int) -> Target:
        return target.pretending(num_sms=num_sms).asking(fwd_block_m=192, kv_splits=0)

    cases = [
        dense(3, 440, 300, 4, 2, head_dim, backward=False),
        dense(4, 650, 333, 3, 1, head_dim, dtype="fp16", backward=False),
        dense(5, 320, 200, 2, 2, head_dim, backward=False),
    ]
    for case in cases:
        for num_sms, counter in ((6, COUNTER), (132, 0)):
            with on(num_sms).active():
                found = plan(
                    "fwd", batch=case.batch, seqlen=(case.seqlen_q, case.seqlen_k),
                    heads=(case.num_heads, case.num_heads_k), head_dim=head_dim, backend=on(num_sms).choice,
                )  # fmt: skip
            assert found["workspace_bytes"] == counter
        with on(6).active():
            run_case(case, on(6))
        for mods in ("sinks", "alibi", "softcap30", "drop0.1"):
            modified = case.replace(mods=(mods,))
            with on(6).active():
                run_case(modified, on(6))
            results = []
            for num_sms in (6, 132):
                with on(num_sms).active():
                    results.append(call(make_inputs(modified, target.device), on(num_sms)))
            for drawn, dealt in zip(*results, strict=True):
                assert torch.equal(drawn, dealt), (str(case), mods)
