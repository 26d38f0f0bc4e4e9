"""transformers with layers in fp8: which calls of a model run so, and what that costs in accuracy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flash_ext
from flash_ext.integrations import _fp8 as fp8
from flash_ext.integrations import transformers as integration
from tests.qkv import CPU_AND_HOPPER

transformers = pytest.importorskip("transformers", minversion="4.57")

ROWS = 160


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The mode of every call that runs in fp8."""
    seen: list[str] = []
    original = fp8.quantize_fp8

    def spy(*tensors: Any, mode: str, **options: Any) -> Any:
        seen.append(mode)
        return original(*tensors, mode=mode, **options)

    monkeypatch.setattr(fp8, "quantize_fp8", spy)
    yield seen


def make_model(device: str = "cpu", **more: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, pad_token_id=0, bos_token_id=None,
        eos_token_id=None, **more,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval().to(device, torch.bfloat16)


def in_mode(model: Any, mode: str | None) -> Any:
    name = integration.register(f"fext_{mode}", quantize=mode)
    other = copy.deepcopy(model)
    other.set_attn_implementation(name)
    return other


def tokens(device: str, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(1, 67, (2, rows), generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("device", CPU_AND_HOPPER)
@pytest.mark.parametrize(("mode", "gate"), [("fp8", 0.06), ("mixed", 0.05)])
def test_a_prefill(device: str, mode: str, gate: float, quantised: list[str]) -> None:
    model = make_model(device)
    ids = tokens(device)
    with torch.no_grad():
        want, got = (m(ids).logits.float() for m in (model, in_mode(model, mode)))
    assert quantised == [mode, mode]  # a layer each
    error = float((got - want).norm() / want.norm())
    assert 0 < error < gate


def test_what_stays_as_it_is(quantised: list[str]) -> None:
    """Padding, few queries, float32, and the name without a mode."""
    model, ids = make_model(), tokens("cpu")
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    with torch.no_grad():
        in_mode(model, "fp8")(ids, attention_mask=mask)
        in_mode(model, "fp8")(ids[:, :100])
        in_mode(model.float(), "fp8")(ids)
        in_mode(make_model(), None)(ids)
    assert quantised == []


def test_generation_quantises_the_prefill(quantised: list[str]) -> None:
    with torch.no_grad():
        in_mode(make_model(), "fp8").generate(tokens("cpu")[:1], max_new_tokens=3, do_sample=False)
    assert quantised == ["fp8", "fp8"]


def test_gradients_are_those_without_fp8(quantised: list[str]) -> None:
    """Of what the layers are given, which their outputs change a little."""
    model, ids = make_model(), tokens("cpu")
    grads = []
    for other in (in_mode(model, None), in_mode(model, "mixed")):
        other(ids, labels=ids).loss.backward()
        grads.append(torch.cat([p.grad.float().flatten() for p in other.parameters()]))
    assert quantised == ["mixed", "mixed"]
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 0.1


def test_packed_sequences(quantised: list[str]) -> None:
    """Bounds reach the quantisation: documents do not see each other."""
    q, k, v = (torch.randn(1, h, 300, 32, dtype=torch.bfloat16) for h in (4, 2, 2))
    bounds = torch.tensor([0, 140, 300], dtype=torch.int32)
    module = torch.nn.Module()
    options = {"is_causal": True, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    out, _ = integration.attention_forward(module, q, k, v, None, quantize="fp8", **options)
    rows = [t.transpose(1, 2)[0] for t in (q, k, v)]
    want = flash_ext.attention_varlen(*rows, bounds, bounds, causal=True)
    assert quantised == ["fp8"]
    assert float((out[0].float() - want.float()).norm() / want.float().norm()) < 0.08


def test_modes_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="quantize must be None, 'fp8' or 'mixed', got 'int8'"):
        integration.register(quantize="int8")
