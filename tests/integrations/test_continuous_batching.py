"""Continuous batching of transformers: ``generate_batch`` gives the tokens that ``generate`` gives.

Truth is the library's eager attention in float32, one prompt at a time. Prompts differ in length, some share
their beginning, and a step has room for fewer tokens than a prompt has, so that prompts come in pieces beside
other requests that decode.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

import flash_ext
from flash_ext.integrations import _paged as paged
from flash_ext.integrations import transformers as integration
from tests.integrations.test_transformers import DECODERS, IS_5, NAME, VOCABULARY, calls, make, transformers

PACKAGE = "transformers.generation.continuous_batching"
API = importlib.import_module(f"{PACKAGE}.continuous_api")
# Versions of the library that check the implementation's name.
CHECKS_NAMES = hasattr(API.ContinuousBatchingManager, "switch_to_cb_friendly_attn")
PAGED = f"paged|{NAME}"
SPELLINGS = [PAGED, NAME] if CHECKS_NAMES else [PAGED]
# Those whose sliding caches give the right keys; models with windows are refused in the others.
SHAPES = DECODERS if Version(transformers.__version__) >= Version("5.23") else ["llama"]
needs_checks = pytest.mark.skipif(not CHECKS_NAMES, reason="of transformers 5.23")
NEW = 9
STEP = 12  # tokens
PAGE = 4


@pytest.fixture(autouse=True)
def memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library asks psutil, which need not be here; transformers 4 does not ask at all."""
    if not torch.cuda.is_available():
        cache = importlib.import_module(f"{PACKAGE}.cache")
        memory = (torch.device("cpu"), 2**30, 0, 0)
        monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: memory)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 14, 1, 6, 4)]
    return [*drawn, drawn[1][:9] + [5, 2], drawn[1][:8]]


def of_generate(model: Any) -> list[list[int]]:
    """What the library's eager attention continues each prompt with."""
    other = copy.deepcopy(model).float()
    other.set_attn_implementation("eager")
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device=other.device)
        mask = torch.ones_like(ids)
        out = other.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def of_generate_batch(model: Any, **more: Any) -> list[Any]:
    """The outputs of ``generate_batch``, in the order of the prompts; ``more`` for its configuration."""
    config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    page = "block_size"
    if IS_5 and "page_size" in inspect.signature(transformers.ContinuousBatchingConfig).parameters:
        page = "page_size"
    sizes = {"num_blocks": 48, "max_batch_tokens": STEP, page: PAGE} | more
    batching = {}
    if IS_5:
        batching["continuous_batching_config"] = transformers.ContinuousBatchingConfig(**sizes)
    else:
        for name, value in sizes.items():
            setattr(config, name, value)
    outputs = model.generate_batch(prompts(), generation_config=config, progress_bar=False, **batching)
    by_prompt = [outputs[f"req_{i}"] for i in range(len(prompts()))]
    assert [list(output.prompt_ids) for output in by_prompt] == prompts()
    return by_prompt


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.generated_tokens) for output in outputs]


def use(model: Any, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "paged|" is not needed in transformers 5.23
        model.set_attn_implementation(name)


@contextlib.contextmanager
def layers_run(model: Any) -> Iterator[list[Any]]:
    """The attention layers that run, one entry a call."""
    seen: list[Any] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda module, *_: seen.append(module))
        for layer in model.model.layers
    ]
    yield seen
    for handle in handles:
        handle.remove()


# ---- generate_batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_generate(shape: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every layer of every step runs here, with what is special about it."""
    model = make(shape, "cpu")
    expected = of_generate(model)
    use(model, name)
    with layers_run(model) as layers, flash_ext.count() as counted, calls(monkeypatch) as seen:
        outputs = of_generate_batch(model)
    assert tokens_of(outputs) == expected
    assert len(layers) > 2 * NEW and len(seen) == len(layers)
    assert counted.calls["integrations.transformers"] == len(layers)
    assert counted.calls["attention_varlen"] == len(layers)
    for layer, call in zip(layers, seen):
        window = getattr(layer, "sliding_window", None) or getattr(layer.config, "sliding_window", None)
        if shape in ("gemma2", "gpt_oss") and layer.layer_idx == 1:
            window = None
        assert call["function"] == "attention_varlen" and call["causal"]
        assert call["window_size"] == (-1 if window is None else window - 1, -1)
        assert call["softcap"] == (1.0 if shape == "gemma2" else 0.0)
        assert (call["sinks"] is None) == (shape != "gpt_oss")


@pytest.mark.parametrize("shape", ["gemma2", "gpt_oss"])
def test_soft_cap_and_sinks_without_windows(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every version, and in transformers 5.23 over pages in place."""
    model = make(shape, "cpu", layer_types=["full_attention"] * 2)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
        layer.attention_type = "full_attention"
    expected = of_generate(model)
    use(model, PAGED)
    with calls(monkeypatch) as seen, flash_ext.count() as counted:
        outputs = of_generate_batch(model)
    assert tokens_of(outputs) == expected
    assert all(call["window_size"] == (-1, -1) for call in seen)
    assert all(call["softcap"] == 1.0 if shape == "gemma2" else call["sinks"] is not None for call in seen)
    assert bool(counted.calls["append_kv"]) == CHECKS_NAMES


@pytest.mark.skipif(not IS_5, reason="transformers 4 gives no log probabilities")
@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_are_those_of_eager_attention(shape: str) -> None:
    model = make(shape, "cpu")
    use(model, PAGED)
    outputs = of_generate_batch(model, return_logprobs=True)
    use(model, "eager")
    for output in outputs:
        new = list(output.generated_tokens)
        ids = torch.tensor([list(output.prompt_ids) + new])
        logs = model(ids).logits[0, -len(new) - 1 : -1].log_softmax(-1)
        expected = logs.gather(1, torch.tensor(new)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=1e-4, atol=1e-4)


@needs_checks
@pytest.mark.parametrize("shape", ["llama", "gpt_oss"])
def test_batches_that_are_filled_up(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for CUDA graphs: rows of no request, keys of no request, and requests without pages."""
    runner = importlib.import_module(f"{PACKAGE}.model_runner").ModelRunner
    library = runner.__init__

    def padding(self: Any, *args: Any, **kwargs: Any) -> None:
        library(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(runner, "__init__", padding)
    model = make(shape, "cpu")
    expected = of_generate(model)
    use(model, NAME)
    with calls(monkeypatch) as seen:
        sizes = {"q_padding_interval_size": 8, "kv_padding_interval_size": 32, "use_cuda_graph": False}
        outputs = of_generate_batch(model, **sizes)
    empty = [call for call in seen if bool((call.get("seqused_k", torch.ones(1)) == 0).any())]
    assert seen and bool(empty) == (shape == "llama")
    assert tokens_of(outputs) == expected


def test_what_was_to_run_in_fp8_is_counted() -> None:
    """The cache has the type of the model, and so have its calls."""
    model = make("llama", "cpu")
    expected = of_generate(model)
    use(model, f"paged|{integration.register('fext_quantised', quantize='fp8')}")
    with flash_ext.count() as counted:
        outputs = of_generate_batch(model)
    assert tokens_of(outputs) == expected
    entry = "integrations.transformers"
    assert counted.fell_back == {(entry, "continuous batching has no fp8"): counted.calls[entry]}


@needs_checks
def test_steps_of_one_token_read_pages_in_place() -> None:
    """Unless the configuration says no: then keys are copied, as they are where a layer has a window."""
    model = make("llama", "cpu")
    use(model, NAME)
    with flash_ext.count() as in_place:
        first = tokens_of(of_generate_batch(model))
    with flash_ext.count() as copied:
        second = tokens_of(of_generate_batch(model, max_blocks_per_request=0))
    assert first == second == of_generate(model)
    assert in_place.calls["append_kv"] > NEW and copied.calls["append_kv"] == 0
    model = make("gpt_oss", "cpu")
    use(model, NAME)
    with flash_ext.count() as with_windows:
        of_generate_batch(model)
    assert with_windows.calls["append_kv"] == 0


@needs_checks
@pytest.mark.parametrize("shape", ["llama", "gemma2"])
def test_pages_of_every_length(shape: str) -> None:
    """A page ends inside, before and behind what is new."""
    model = make(shape, "cpu")
    expected = of_generate(model)
    use(model, NAME)
    for page_size in (5, 16):
        assert tokens_of(of_generate_batch(model, page_size=page_size)) == expected


@needs_checks
def test_the_model_has_its_implementation_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would replace it by flash-attn, where that can be had."""
    monkeypatch.setattr(API, "is_flash_attn_3_available", lambda **_: True)
    model = make("llama", "cpu")
    expected = of_generate(model)
    use(model, PAGED)
    assert model.config._attn_implementation == NAME
    with calls(monkeypatch) as seen:
        assert tokens_of(of_generate_batch(model)) == expected
    assert seen and model.config._attn_implementation == NAME
    prompt = prompts()[1]
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    assert out[0, len(prompt) :].tolist() == expected[1]


@needs_checks
def test_other_implementations_are_checked_by_the_library() -> None:
    model = make("llama", "cpu")
    expected = of_generate(model)
    use(model, "sdpa")
    with flash_ext.count() as counted:
        assert tokens_of(of_generate_batch(model)) == expected
    assert not counted.calls
    use(model, "flex_attention")
    with pytest.raises(ValueError, match="flex_attention is not supported"):
        of_generate_batch(model)


def test_a_name_of_ones_own() -> None:
    """One that quantises too, whose steps stay in the type of the model."""
    name = integration.register("fext_fp8", quantize="fp8")
    model = make("llama", "cpu")
    expected = of_generate(model)
    use(model, f"paged|{name}")
    with flash_ext.count() as counted:
        assert tokens_of(of_generate_batch(model)) == expected
    assert counted.calls["attention_varlen"] and not counted.calls["attention_fp8"]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True] if CHECKS_NAMES else [False])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_on_a_gpu(shape: str, graphs: bool) -> None:
    """In bfloat16 a token may be another one that is about as likely."""
    model = make(shape, "cuda")
    use(model, PAGED)
    more = {"use_cuda_graph": graphs} if CHECKS_NAMES else {}
    with flash_ext.count() as counted:
        outputs = of_generate_batch(model, **more)
    assert counted.calls["integrations.transformers"]
    truth = copy.deepcopy(model).float()
    truth.set_attn_implementation("eager")
    use(model, "eager")
    for output in outputs:
        new = list(output.generated_tokens)
        assert len(new) == NEW
        ids = torch.tensor([list(output.prompt_ids) + new], device="cuda")
        logits, rounded = (m(ids).logits[0, -len(new) - 1 : -1].float() for m in (truth, model))
        chosen = logits.gather(1, ids[0, -len(new) :, None]).squeeze(1)
        error = (rounded - logits).abs().amax(1)
        assert (logits.amax(1) - chosen <= 5 * error + 0.05).all()


def test_a_table_that_stays_is_read_again_in_every_pass() -> None:
    """A CUDA graph is captured in a second pass over the tables of the first."""
    k_cache, v_cache = torch.zeros(2, 3, PAGE, 2, 16)
    tables, bounds = torch.tensor([[[2], [-1]]], dtype=torch.int32), torch.tensor([0, 2, 2])

    def update(
        key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        found = {"k_cache": k_cache, "v_cache": v_cache, "block_table": kwargs["block_table"][0]}
        kwargs.update(found, cu_seq_lens_k=kwargs["cu_seq_lens_k"]["full_attention"])
        return key_states, value_states

    allocator = SimpleNamespace(index=0, layer_indices=[0, 1])
    cache = SimpleNamespace(layer_to_allocator={0: allocator, 1: allocator}, update=update)
    for page in (2, 0):
        tables[0, 0, 0] = page
        for layer in (0, 1):
            key = torch.randn(1, 2, 2, 16)  # of one request, and of none
            given = {"cu_seq_lens_k": {"full_attention": bounds}, "block_table": tables}
            keys = paged.updated(cache, layer, key, 2 * key, given)
            assert torch.equal(k_cache[page, 1], key[0, :, 0]) and torch.equal(
                v_cache[page, 1], 2 * key[0, :, 0]
            )
            assert keys.places["seqused_k"].tolist() == [2, 0] and keys.window is None
            k_cache[page, 1] = v_cache[page, 1] = 0
            assert not k_cache.any() and not v_cache.any()


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHECKS_NAMES, reason="of transformers 4")
def test_transformers_4_is_told_what_to_write_and_what_its_cache_cannot_do() -> None:
    model = make("llama", "cpu")
    use(model, NAME)
    with pytest.raises(ValueError, match=r"set_attn_implementation\('paged\|fext'\) first"):
        of_generate_batch(model)
    for shape in ("mistral", "gpt_oss"):
        model = make(shape, "cpu")
        use(model, PAGED)
        with pytest.raises(NotImplementedError, match="sliding windows is not supported in this version"):
            of_generate_batch(model)


@pytest.mark.skipif(CHECKS_NAMES, reason="of transformers 4")
def test_the_sliding_cache_of_transformers_4_is_wrong_for_its_own_attention() -> None:
    """Why it is refused. Where this fails, the refusal can go."""
    model = make("mistral", "cpu")
    expected = of_generate(model)
    use(model, "eager_paged")
    assert tokens_of(of_generate_batch(model)) != expected


class Cache(SimpleNamespace):
    """One that gives back what it is given, as transformers 4 shapes it."""

    def update(self, key_states: Tensor, value_states: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)


def one_request(**changes: Any) -> dict[str, Any]:
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    return {
        "cache": Cache(sliding_windows={0: 1}), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
        "read_index": [], "write_index": [], **changes,
    }  # fmt: skip


def test_bounds_may_be_named_by_the_kind_of_layer() -> None:
    layer = make("llama", "cpu").model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    plain = one_request()
    named = one_request(cu_seq_lens_k={"full_attention": plain["cu_seq_lens_k"], "sliding_attention": None})
    out, weights = integration.paged_attention_forward(layer, q, k, k, None, **plain)
    assert out.shape == (1, 3, 4, 16) and weights is None
    expected = flash_ext.attention(*(t.transpose(1, 2) for t in (q, k, k)), causal=True)
    torch.testing.assert_close(out, expected)
    assert torch.equal(out, integration.paged_attention_forward(layer, q, k, k, None, **named)[0])


@pytest.mark.parametrize("changes, error, message", [
    ({"cache": None}, ValueError, "no paged cache came with the call"),
    ({"cu_seq_lens_q": None}, ValueError, "no paged cache came with the call"),
    ({"attention_mask": torch.zeros(1, 1, 3, 3)}, NotImplementedError, "attention_mask is not supported in"),
    ({"attention_mask": {"full_attention": None}}, NotImplementedError, "attention_mask is not supported in"),
    ({"position_bias": torch.zeros(1, 4, 3, 3)}, NotImplementedError, "position_bias is not supported in"),
    ({"is_causal": False}, NotImplementedError, "is_causal=False is not supported"),
    ({"output_attentions": True}, ValueError, "weights are never formed"),
    ({"indices": torch.zeros(1, 3, 2)}, NotImplementedError, "indices: keys chosen"),
    ({"cache": object()}, NotImplementedError, "a cache of type object is not known here"),
    ({"cache": Cache(sliding_windows={0: 4})}, NotImplementedError, "its cache gives other keys"),
])  # fmt: skip
def test_refusals(changes: dict, error: type[Exception], message: str) -> None:
    layer = make("llama", "cpu").model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    given = {"attention_mask": None, **one_request(**changes)}
    with pytest.raises(error, match=message):
        integration.paged_attention_forward(layer, q, k, k, **given)


def test_a_version_that_is_not_known_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = SimpleNamespace(ContinuousBatchingManager=type("Manager", (), {}))
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        return empty if name.startswith(PACKAGE) else real(name, package)

    monkeypatch.setattr(paged.importlib, "import_module", import_module)
    monkeypatch.setattr(paged, "_ours", {})
    paged.register("another", integration.paged_attention_forward)
    assert paged._ours == {"another": "paged|another", "paged|another": "paged|another"}
    assert "paged|another" in transformers.AttentionInterface._global_mapping
    transformers.AttentionInterface._global_mapping.pop("paged|another")
    paged._allow_block_tables(SimpleNamespace())
