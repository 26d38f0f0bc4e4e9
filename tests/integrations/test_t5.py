"""T5 and its relatives in transformers: their bias stays small, results are those of eager attention."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable
from types import NoneType
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext.integrations import _t5 as t5
from flash_ext.masks import KeyMask, RelativePosition
from tests.cpu.test_tiled import LargestTensor
from tests.integrations import test_transformers as base
from tests.integrations.test_transformers import NAME, VOCABULARY, calls, close, tokens, transformers, use

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 14,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
LENGTH = 19  # so that some distances are beyond the largest
OWN = {
    "t5": ("T5", {}),
    "mt5": ("MT5", {}),
    "umt5": ("UMT5", {}),
    "longt5": ("LongT5", {"local_radius": 5}),
    # A single expert: a choice would turn on the rounding of its score.
    "switch_transformers": ("SwitchTransformers", {
        "num_experts": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "num_decoder_layers": 2,
    }),
    "pop2piano": ("Pop2Piano", {}),
}  # fmt: skip


WHY_NOT = f"T5 of transformers {transformers.__version__} does not ask the registry"
ASKS = hasattr(importlib.import_module("transformers.models.t5.modeling_t5"), "ALL_ATTENTION_FUNCTIONS")
needs_t5 = pytest.mark.skipif(not ASKS, reason=WHY_NOT)
each_family = pytest.mark.parametrize("family", OWN)
sides = pytest.mark.parametrize("side", ["none", "left", "right"])


def make(family: str, kind: str = "ForConditionalGeneration", **changes: Any) -> Any:
    """A model with weights large enough for attention not to be the mean of all values."""
    name, own = OWN[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | own | changes)
    torch.manual_seed(1)
    cls = getattr(transformers, f"{name}{kind}")
    model = cls._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                scale = 1.0 if "relative_attention_bias" in parameter_name else 0.1
                parameter.normal_(0, scale)
    return model.eval()


def padding(side: str, device: str = "cpu") -> Tensor | None:
    return base.padding(side, device, LENGTH, 6)


def batch_of(family: str, side: str, device: str = "cpu") -> dict[str, Any]:
    """What a training step is given: padding in the encoder, and labels that are left out in the decoder."""
    labels = tokens(device, 2, LENGTH - 4)
    labels[0, -3:] = -100
    inputs: dict[str, Any] = {"input_ids": tokens(device, 2, LENGTH), "labels": labels}
    if family == "pop2piano":
        inputs["inputs_embeds"] = torch.randn(2, LENGTH, SIZES["d_model"], device=device)
        del inputs["input_ids"]
    mask = padding(side, device)
    return inputs if mask is None else inputs | {"attention_mask": mask}


Step = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]


def step(name: str, inputs: dict[str, Any]) -> Step:
    """A training step: the loss, and the gradients of all parameters."""

    def run(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        use(model, name)
        model.zero_grad()
        output = model(**inputs)
        if getattr(output, "loss", None) is None:  # of an encoder: of its real tokens
            states = output.last_hidden_state.float()
            mask = inputs.get("attention_mask")
            kept = torch.ones(states.shape[:2], device=states.device) if mask is None else mask
            loss = (states.cos() * kept[..., None]).sum()
        else:
            loss = output.loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), grads

    return run


def equal_to_eager(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    expected, wanted = step("eager", inputs)(model)
    got, grads = step(NAME, inputs)(model)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert grads.keys() == wanted.keys()
    for name in grads:
        close(grads[name], wanted[name], "cpu")
    return grads


def is_bias(name: str) -> bool:
    return "relative_attention_bias" in name


def is_bidirectional(bias: RelativePosition) -> bool:
    """Whether later keys read other entries than that of distance 0."""
    later = bias.table.detach()[:, bias.reach :]
    return not torch.equal(later, later[:, :1].expand_as(later))


# ---- training ------------------------------------------------------------------------------------------


@needs_t5
@sides
@each_family
def test_a_training_step(family: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    with calls(monkeypatch) as seen:
        grads = equal_to_eager(model, batch_of(family, side))
    tables = {name for name in grads if is_bias(name)}
    # UMT5 has a table in each layer, and the encoder of LongT5 an attention of its own.
    assert len(tables) == (4 if family == "umt5" else 2)
    assert all(grads[name].abs().amax(0).gt(0).all() for name in tables)
    served = [options for options in seen if isinstance(options.get("bias"), RelativePosition)]
    assert len(seen) == (4 if family == "longt5" else 6)
    if family != "switch_transformers":  # whose encoder makes a mask that is added, of its own
        assert len(served) == (2 if family == "longt5" else 4)
    decoders = [options for options in served if not is_bidirectional(options["bias"])]
    assert len(decoders) == 2 and all(options["causal"] for options in decoders)
    assert all(options["scale"] == 1.0 for options in seen)
    if family not in ("umt5", "switch_transformers"):
        assert not any(isinstance(options.get("bias"), Tensor) for options in seen)


@needs_t5
@sides
@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
def test_an_encoder_alone(family: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch_of(family, side)
    del inputs["labels"]
    with calls(monkeypatch) as seen:
        equal_to_eager(make(family, "EncoderModel"), inputs)
    assert len(seen) == 2
    for options in seen:
        assert is_bidirectional(options["bias"])
        assert options["bias"].reach == SIZES["relative_attention_max_distance"]
        assert isinstance(options.get("mask"), KeyMask if side != "none" else NoneType)


@needs_t5
def test_a_padded_decoder() -> None:
    inputs = batch_of("t5", "right")
    mask = torch.ones(2, LENGTH - 4, dtype=torch.long)
    mask[0, -3:] = 0  # where labels are left out
    equal_to_eager(make("t5"), inputs | {"decoder_attention_mask": mask})


@needs_t5
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    """What the first layer makes is an input of the others, and sums what they send back."""
    model, inputs = make(family), batch_of(family, "left")
    expected, wanted = step("eager", inputs)(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model.enable_input_require_grads()
    got, grads = step(NAME, inputs)(model)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for name in wanted:
        close(grads[name], wanted[name], "cpu")


def copied(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments of a layer as they come from another device: without attributes."""

    def copy_of(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    return tuple(map(copy_of, args)), {name: copy_of(value) for name, value in kwargs.items()}


@needs_t5
@pytest.mark.parametrize("family, side", [
    *itertools.product(["t5", "umt5"], ["none", "left", "right"]),
    ("mt5", "left"), ("longt5", "left"), ("switch_transformers", "left"), ("pop2piano", "left"),
])  # fmt: skip
def test_layers_on_several_devices(family: str, side: str) -> None:
    """What a layer is told of its mask then is whether it hides later keys."""
    model = make(family)
    for block in (*model.encoder.block, *model.decoder.block):
        block.register_forward_pre_hook(copied, with_kwargs=True)
    equal_to_eager(model, batch_of(family, side))


@needs_t5
def test_dropout_reaches_the_kernels_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make("t5", dropout_rate=0.4), batch_of("t5", "none")
    use(model, NAME)
    with calls(monkeypatch) as seen:
        model.train()(**inputs)
        model.eval()(**inputs)
    assert [options["dropout_p"] for options in seen] == [0.4] * 6 + [0.0] * 6


@needs_t5
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_nothing_of_the_size_of_the_scores(family: str, checkpointing: bool) -> None:
    """For cross attention either, where the library makes zeros; UMT5 leaves no way around those."""
    length = 130
    ids = tokens("cpu", 1, length)
    model = make(family, "EncoderModel") if family == "umt5" else make(family)
    inputs = {"input_ids": ids} if family == "umt5" else {"input_ids": ids, "labels": ids}
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    largest = {}
    for name in ("eager", NAME):
        with LargestTensor() as seen:
            step(name, inputs)(model)
        largest[name] = seen.numel
    assert largest["eager"] >= SIZES["num_heads"] * length**2
    assert largest[NAME] < length**2


# ---- generation ----------------------------------------------------------------------------------------


@needs_t5
@pytest.mark.parametrize("family, cache", [
    *itertools.product(["t5", "umt5"], ["dynamic", "static", "none"]),
    ("mt5", "static"), ("longt5", "dynamic"), ("switch_transformers", "none"),
])  # fmt: skip
def test_generate(family: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the largest distance, with two beams, whose caches are put in order."""
    model = make(family, relative_attention_max_distance=6)
    ids, mask = tokens("cpu", 2, LENGTH), padding("right")
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "use_cache": cache != "none",
                               "num_beams": 2, "return_dict_in_generate": True,
                               "output_logits": True}  # fmt: skip
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    use(model, "eager")
    expected = model.generate(ids, attention_mask=mask, **options)
    use(model, NAME)
    with calls(monkeypatch) as seen:
        got = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(got.sequences, expected.sequences) and got.sequences.shape == (2, 11)
    close(torch.stack(got.logits), torch.stack(expected.logits), "cpu")
    served = sum(options.get("bias") is not None for options in seen)
    assert cache == "static" or served >= 2 * 10  # two layers of the decoder, each time


@needs_t5
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_several_queries_against_a_cache(family: str, static: bool) -> None:
    """Queries that do not start at position 0, and keys that do not end at the last one."""
    model, ids, targets = make(family), tokens("cpu", 2, LENGTH), tokens("cpu", 2, 24)
    mask = padding("left")
    with torch.no_grad():
        use(model, "eager")
        whole = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
        use(model, NAME)
        encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
        own = transformers.DynamicCache(config=model.config)
        if static:
            own = transformers.StaticCache(config=model.config, max_cache_len=30)
        cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache(config=model.config))
        parts = [
            model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=targets[:, start:end],
                  past_key_values=cache, use_cache=True).logits
            for start, end in ((0, 6), (6, 9), (9, 10), (10, 24))
        ]  # fmt: skip
    close(torch.cat(parts, 1), whole, "cpu")


# ---- masks, biases and modes of the caller -------------------------------------------------------------


@needs_t5
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_callers_own_4d_mask(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is added makes the sum of both, since a call has one bias."""
    keep = torch.rand(2, 1, LENGTH, LENGTH) < 0.6
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.where(keep, torch.randn(keep.shape), torch.finfo(torch.float32).min)
    mask = keep if dtype == torch.bool else added
    hides = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    model, ids = make("t5", "EncoderModel"), tokens("cpu", 2, LENGTH)
    use(model, "eager")
    expected = model(input_ids=ids, attention_mask=hides if dtype == torch.bool else added).last_hidden_state
    use(model, NAME)
    with calls(monkeypatch) as seen:
        got = model(input_ids=ids, attention_mask=mask).last_hidden_state
    close(got, expected, "cpu")
    kind = RelativePosition if dtype == torch.bool else Tensor
    assert all(isinstance(options["bias"], kind) for options in seen)


@needs_t5
@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("of", ["self", "cross"])
def test_a_bias_that_a_layer_is_given_counts(of: str, positional: bool) -> None:
    """Of a caller who runs a layer alone; and without one the layer with a table makes its own."""
    block = make("t5").decoder.block[0]
    layer = block.layer[0].SelfAttention if of == "self" else block.layer[1].EncDecAttention
    states, keys = torch.randn(2, 5, 32), torch.randn(2, 7, 32) if of == "cross" else None
    for bias in (torch.randn(1, 4, 5, 7 if of == "cross" else 5), None):
        outputs = []
        for name in ("eager", NAME):
            layer.config._attn_implementation = name
            mask = torch.ones(2, 1, 5, 7 if of == "cross" else 5, dtype=torch.bool)
            mask = mask if name == NAME else torch.zeros(mask.shape)
            if positional:
                outputs.append(layer(states, mask, keys, bias)[0])
            else:
                given = {"mask": mask, "key_value_states": keys, "position_bias": bias}
                outputs.append(layer(hidden_states=states, **given)[0])
        close(outputs[1], outputs[0], "cpu")


@needs_t5
def test_other_implementations_are_left_as_they_are() -> None:
    model = make("t5")
    attention, cross = (model.decoder.block[0].layer[i] for i in (0, 1))
    states = torch.randn(2, 5, 32)
    for name in ("eager", NAME, "sdpa"):
        use(model, name)
        bias = attention.SelfAttention.compute_bias(5, 5)
        assert bias.shape == ((4, 29) if name == NAME else (1, 4, 5, 5))
        zeros = cross.EncDecAttention(states, key_value_states=states)[1]
        assert zeros.shape == ((4, 0) if name == NAME else (1, 4, 5, 5))


@needs_t5
def test_registering_again_changes_nothing() -> None:
    cls = transformers.models.t5.modeling_t5.T5Attention
    before = cls.forward, cls.compute_bias
    assert base.integration.register() == NAME
    assert (cls.forward, cls.compute_bias) == before


@needs_t5
def test_a_second_name_serves_as_well() -> None:
    model, inputs = make("t5"), batch_of("t5", "left")
    expected, _ = step(NAME, inputs)(model)
    base.integration.register("another")
    try:
        got, _ = step("another", inputs)(model)
        assert torch.equal(got, expected)
        assert model.encoder.block[0].layer[0].SelfAttention.compute_bias(5, 5).shape == (4, 29)
    finally:
        t5._ours.discard("another")
        transformers.AttentionInterface._global_mapping.pop("another")


# torch 2.11 does not trace how the library makes a cache, whoever attends.
traces_caches = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="the library's own attention does not compile with a cache"
)


@needs_t5
@pytest.mark.slow
@pytest.mark.parametrize("family, side, use_cache", [
    pytest.param("t5", "left", True, marks=traces_caches), ("umt5", "none", False),
])  # fmt: skip
def test_compiled_model(family: str, side: str, use_cache: bool) -> None:
    model = make(family, num_layers=1)
    inputs = batch_of(family, side) | {"use_cache": use_cache}
    expected, wanted = step("eager", inputs)(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    use(model, NAME)
    torch.compiler.reset()
    model.zero_grad()
    loss = compiled(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        close(parameter.grad, wanted[name], "cpu")


@pytest.mark.skipif(ASKS, reason="of versions whose T5 does not ask the registry")
def test_versions_that_do_not_ask_keep_their_attention() -> None:
    for family in OWN:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        assert not hasattr(getattr(module, t5.FAMILIES[family]), "_flash_ext_serves")
    model = make("t5")
    inputs = batch_of("t5", "left")
    expected, _ = step("eager", inputs)(model)
    assert torch.equal(step(NAME, inputs)(model)[0], expected)


# ---- on a GPU ------------------------------------------------------------------------------------------


@needs_t5
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@sides
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_a_training_step_on_a_gpu(
    family: str, side: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not much farther from float32 than the library's attention in the same type."""
    changes = {"d_kv": 64, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    model = make(family, **changes).to("cuda", dtype)
    ids = tokens("cuda", 2, 300)
    mask = torch.ones_like(ids) if side == "none" else base.padding(side, "cuda", 300, 77)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": tokens("cuda", 2, 260)}
    expected, wanted = step("eager", inputs)(model)
    with calls(monkeypatch) as seen:
        got, grads = step(NAME, inputs)(model)
    assert sum(isinstance(options.get("bias"), RelativePosition) for options in seen) == 4
    truth, true_grads = step("eager", inputs)(copy.deepcopy(model).float())
    base.as_close(got, expected, truth, 0.0, model)
    floor = 1e-3 * sum(float(t.norm()) for t in true_grads.values()) / len(true_grads)
    assert grads.keys() == wanted.keys()
    for name in grads:
        base.as_close(grads[name], wanted[name], true_grads[name], floor, model)


@needs_t5
@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_on_a_gpu(cache: str) -> None:
    """The first tokens: later ones follow other tokens where two are as likely."""
    model, ids, mask = (
        make("t5").to("cuda", torch.bfloat16),
        tokens("cuda", 2, LENGTH),
        padding("left", "cuda"),
    )
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "output_logits": True,
                               "return_dict_in_generate": True}  # fmt: skip
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    results = []
    for name in ("eager", NAME):
        use(model, name)
        results.append(model.generate(ids, attention_mask=mask, **options))
    close(results[1].logits[0], results[0].logits[0], "cuda")
    assert results[1].sequences.shape == results[0].sequences.shape
