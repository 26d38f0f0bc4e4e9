"""What several tests of the benchmark stand on."""

from __future__ import annotations

import pytest
from torch.nn.attention import flex_attention as flex_attention_module

from bench import host_cost
from bench.peers import Flex


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Flex:
    """By its unfused, uncompiled road, which knows no gradients; what is compiled is the same functions."""
    monkeypatch.setattr(flex_attention_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    peer = Flex.__new__(Flex)
    peer._attention = flex_attention_module.flex_attention
    peer._block_mask = flex_attention_module.create_block_mask
    return peer


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's cost of a call is measured by two calls, not by thousands."""
    measure = host_cost.measure
    monkeypatch.setattr(host_cost, "measure", lambda device, number, repeats: measure(device, 2, 1))
