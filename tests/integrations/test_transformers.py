"""transformers: models with random weights give what they give with the library's own attention.

Truth is the library's eager attention in float32. (In float64 its rows without keys are NaN.) On a GPU
models are in bfloat16, and what the library's own attention loses by that is the measure of what ours may
lose. A mask that is off by one key changes results by a tenth and more.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext import masks
from flash_ext.integrations import transformers as integration
from tests.qkv import AllOperators, on_devices

transformers = pytest.importorskip("transformers", minversion="4.57")
from transformers import masking_utils  # noqa: E402

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
NAME = integration.register()

VOCABULARY = 67
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def config_of(shape: str) -> Any:
    """Small configs with what makes each family special: windows, softcap, sinks, biases."""
    if shape == "llama":
        return transformers.LlamaConfig(**DECODER)
    if shape == "mistral":
        return transformers.MistralConfig(**DECODER, sliding_window=4)
    if shape == "gemma2":
        layers = ["sliding_attention", "full_attention"]
        return transformers.Gemma2Config(
            **DECODER, sliding_window=4, attn_logit_softcapping=1.0, query_pre_attn_scalar=16,
            final_logit_softcapping=None, layer_types=layers,
        )  # fmt: skip
    if shape == "gpt_oss":
        layers = ["sliding_attention", "full_attention"]
        # Every expert for every token: a choice would turn on the rounding of its score.
        return transformers.GptOssConfig(
            **DECODER, sliding_window=4, num_local_experts=2, num_experts_per_tok=2, layer_types=layers
        )
    return transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


DECODERS = ["llama", "mistral", "gemma2", "gpt_oss"]


# Older versions of the library, 5.0 among them, do not look its attention up.
BERT = importlib.import_module("transformers.models.bert.modeling_bert")
needs_bert = pytest.mark.skipif(
    "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(BERT),
    reason=f"Bert of transformers {transformers.__version__} does not ask the registry",
)
ALL_SHAPES = [*DECODERS, pytest.param("bert", marks=needs_bert)]  # T5 has tests of its own


def make(shape: str, device: str, **changes: Any) -> Any:
    config = config_of(shape)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    kind = transformers.AutoModelForMaskedLM if shape == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Larger than the library draws them, so that attention is not the mean of all values.
            if "norm" not in parameter_name:
                parameter.normal_(0, 0.3)
    model.eval()
    return model if device == "cpu" else model.to(device, torch.bfloat16)


@contextlib.contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict]]:
    """Options of every call that reaches flash_ext."""
    seen: list[dict] = []
    for name in ("attention", "attention_varlen"):
        original = getattr(integration, name)

        def spy(*args: Any, _original: Any = original, _name: str = name, **options: Any) -> Any:
            seen.append({"function": _name, **options})
            return _original(*args, **options)

        monkeypatch.setattr(integration, name, spy)
    yield seen
    monkeypatch.undo()


def close(got: Tensor, expected: Tensor, device: str) -> None:
    assert got.shape == expected.shape and not got.isnan().any()
    error = (got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-3)
    # Measured 2.1e-5 (t5, torch 2.11), and on a GPU 0.034 (llama, padded on the right).
    limit = 5e-5 if device == "cpu" else 0.06
    assert error < limit, f"relative error {error:.2g}"


# Of a tensor's norm, what its error may be beside that of eager attention. T5's ReLU turns roundings into
# switches: the errors of any two ways to compute it are unlike, and torch's sdpa has been seen at 2.5 % of a
# gradient's norm where eager attention was at 0.7 %.
SHARE_OF_NORM = {"t5": 0.03}


def as_close(got: Tensor, eager: Tensor, truth: Tensor, floor: float, model: Any) -> None:
    """On a GPU: not much farther from the truth than the library's attention in the same type."""
    assert got.shape == truth.shape and not got.isnan().any()
    error, allowed = ((t.float() - truth).norm().item() for t in (got, eager))
    share = SHARE_OF_NORM.get(model.config.model_type, 0.01)
    limit = 2.5 * allowed + share * truth.norm().item() + floor
    assert error <= limit, f"error {error:.2g}, of eager {allowed:.2g}"


Runner = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]


def tokens(device: str, batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), device=device)


def padding(side: str, device: str, length: int = 11, hidden: int = 5) -> Tensor | None:
    if side == "none":
        return None
    mask = torch.ones(2, length, dtype=torch.long, device=device)
    mask[1, slice(0, hidden) if side == "left" else slice(length - hidden, length)] = 0
    return mask


def use(model: Any, name: str) -> None:
    """On submodels as well: T5's have copies of its configuration, which not every version changes."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(name)


def run(model: Any, name: str, loss_mask: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a loss over real tokens."""
    use(model, name)
    model.zero_grad()
    logits = model(**inputs).logits
    weights = torch.linspace(-1, 1, logits.shape[-1], device=logits.device, dtype=logits.dtype)
    ((logits * weights).sum(-1) * loss_mask).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def compare(model: Any, device: str, loss_mask: Tensor, **inputs: Any) -> None:
    compare_runs(
        lambda m: run(m, "eager", loss_mask, **inputs),
        lambda m: run(m, NAME, loss_mask, **inputs),
        model,
        device,
        loss_mask.bool(),
    )


def compare_runs(eager: Runner, ours: Runner, model: Any, device: str, real: Tensor) -> None:
    """Logits of real tokens, and gradients, of two ways to run a model."""
    expected, wanted = eager(model)
    got, grads = ours(model)
    assert grads.keys() == wanted.keys()
    if device == "cpu":
        close(got[real], expected[real], device)
        for name in grads:
            if wanted[name].abs().sum() > 1e-3:  # a key's bias has none but rounding
                close(grads[name], wanted[name], device)
        return
    truth, true_grads = eager(copy.deepcopy(model).float())
    as_close(got[real], expected[real], truth[real], 0.0, model)
    floor = 1e-3 * sum(float(t.norm()) for t in true_grads.values()) / len(true_grads)
    for name in grads:
        as_close(grads[name], wanted[name], true_grads[name], floor, model)


# ---- logits and gradients --------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_padded(shape: str, side: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, mask = make(shape, device), tokens(device), padding(side, device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if mask is not None:
        inputs["attention_mask"] = mask
    loss_mask = torch.ones_like(ids) if mask is None else mask
    with calls(monkeypatch) as seen:
        compare(model, device, loss_mask, **inputs)
    assert len(seen) == 2
    # Said by rule: no mask of the size of the scores was made.
    wanted = NoneType if mask is None else masks.KeyMask
    assert all(isinstance(options.get("mask"), wanted) and "bias" not in options for options in seen)
    assert all(options["causal"] == (shape != "bert") for options in seen)
    if shape in ("mistral", "gemma2", "gpt_oss"):
        assert any(options["window_size"][0] == 3 for options in seen)
    assert any(options["sinks"] is not None for options in seen) == (shape == "gpt_oss")
    assert any(options["softcap"] > 0 for options in seen) == (shape == "gemma2")


def each_alone(model: Any, ids: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of sequences that are passed through the library's attention one by one."""
    sequences = [own[None] for own in ids[0].split(lengths)]
    parts = [run(model, "eager", torch.ones_like(own), input_ids=own) for own in sequences]
    names = {name for _, grads in parts for name in grads}
    sums = {name: sum(grads[name] for _, grads in parts if name in grads) for name in names}
    return torch.cat([logits for logits, _ in parts], 1), sums


@on_devices
@pytest.mark.parametrize("bounds", [False, True], ids=["positions", "bounds"])
@pytest.mark.parametrize("shape", DECODERS)
def test_packed(shape: str, bounds: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarting positions mark sequences; the library's flattening collator gives their bounds as well."""
    model, ids, lengths = make(shape, device), tokens(device, 1, 16), (6, 1, 9)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if bounds:
        ends = torch.tensor([0, 6, 7, 16], device=device)
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    with calls(monkeypatch) as seen:
        compare_runs(
            lambda m: each_alone(m, ids, lengths),
            lambda m: run(m, NAME, torch.ones_like(ids), **inputs),
            model,
            device,
            torch.ones_like(ids).bool(),
        )
    assert {options["function"] for options in seen} == {"attention_varlen" if bounds else "attention"}
    wanted = NoneType if bounds else masks.Documents
    assert all(isinstance(options.get("mask"), wanted) and "bias" not in options for options in seen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, ids, mask = make("mistral", "cpu"), tokens("cpu"), padding("left", "cpu")
    expected, wanted = run(model, "eager", mask, input_ids=ids, attention_mask=mask, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model.model.embed_tokens.weight.requires_grad_()
    got, grads = run(model, NAME, mask, input_ids=ids, attention_mask=mask, use_cache=False)
    close(got[mask.bool()], expected[mask.bool()], "cpu")
    for name in wanted:
        close(grads[name], wanted[name], "cpu")


def test_layers_prepare_their_mask_once() -> None:
    """Forward and backward of both layers; the sliding and the full one have masks of their own."""
    for shape, masks_of_model in (("llama", 1), ("gemma2", 2)):
        model, ids, present = make(shape, "cpu"), tokens("cpu"), padding("right", "cpu")
        use(model, NAME)

        def step(model=model, ids=ids, present=present) -> None:
            model(input_ids=ids, attention_mask=present).logits.sum().backward()

        step()
        with AllOperators() as found:
            step()
        assert found.names.count("flash_ext.condense.default") == masks_of_model
        for name in ("flash_ext.fwd_mod.default", "flash_ext.bwd_mod.default"):
            assert found.names.count(name) == 2


def test_cross_attention_over_more_keys_than_queries() -> None:
    """The mask function of an encoder's keys is told nothing but lengths."""
    if not IS_5:
        pytest.skip("bidirectional mask functions came with transformers 5")
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 7:] = False
    got = integration.attention_mask(batch_size=2, q_length=3, kv_length=9, attention_mask=mask,
                                     mask_function=masking_utils.bidirectional_mask_function)  # fmt: skip
    assert torch.equal(got, mask)


def test_dropout_reaches_the_kernels_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make("llama", "cpu", attention_dropout=0.4), tokens("cpu")
    use(model, NAME)
    with calls(monkeypatch) as seen:
        model.train()(input_ids=ids)
        model.eval()(input_ids=ids)
    assert [options["dropout_p"] for options in seen] == [0.4, 0.4, 0.0, 0.0]


# ---- caches ----------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("shape", DECODERS)
def test_generate(shape: str, cache: str, device: str) -> None:
    model, ids, mask = make(shape, device), tokens(device), padding("left", device)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "use_cache": cache != "none",
                               "return_dict_in_generate": True, "output_logits": True}  # fmt: skip
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    results = []
    for name in ("eager", NAME):
        use(model, name)
        results.append(model.generate(ids, attention_mask=mask, **options))
    if device == "cpu":
        assert torch.equal(results[1].sequences, results[0].sequences)
        close(torch.stack(results[1].logits), torch.stack(results[0].logits), device)
    else:
        close(results[1].logits[0], results[0].logits[0], device)  # later ones follow other tokens


@on_devices
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("shape", DECODERS)
def test_several_queries_against_a_cache(shape: str, static: bool, side: str, device: str) -> None:
    """A prompt in pieces: queries that do not start at position 0, keys that do not end at the last one."""
    model, ids, mask = make(shape, device), tokens(device), padding(side, device)
    use(model, "eager")
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits
        use(model, NAME)
        cache = transformers.DynamicCache(config=model.config)
        if static:
            cache = transformers.StaticCache(config=model.config, max_cache_len=20, max_batch_size=2,
                                             device=device, dtype=model.dtype)  # fmt: skip
        parts = []
        for start, end in ((0, 5), (5, 8), (8, 9), (9, 11)):
            own = None if mask is None else mask[:, :end]
            positions = torch.arange(start, end, device=device)
            extra = {} if IS_5 else {"cache_position": positions}
            if mask is not None:
                extra["position_ids"] = torch.arange(start, end, device=device)[None].expand(2, -1)
            parts.append(model(input_ids=ids[:, start:end], attention_mask=own, past_key_values=cache,
                               use_cache=True, **extra).logits)  # fmt: skip
    got, real = torch.cat(parts, 1), torch.ones_like(ids).bool() if mask is None else mask.bool()
    close(got[real], whole[real], device)


# ---- masks -----------------------------------------------------------------------------------------------


def test_patterns_are_recognised() -> None:
    causal = masking_utils.causal_mask_function
    assert integration.recognise(causal) == integration.Pattern(causal=True)
    window = masking_utils.sliding_window_causal_mask_function(4)
    assert integration.recognise(window) == integration.Pattern(causal=True, left=3)
    nested = masking_utils.and_masks(window, masking_utils.sliding_window_overlay(3))
    assert integration.recognise(nested) == integration.Pattern(causal=True, left=2)
    ids = torch.tensor([[0, 0, 1]])
    packed = masking_utils.packed_sequence_mask_function(ids)
    found = integration.recognise(masking_utils.and_masks(window, packed))
    assert (found.causal, found.left) == (True, 3) and found.documents is ids
    single = masking_utils.packed_sequence_mask_function(torch.zeros(1, 3))
    assert integration.recognise(single) == integration.Pattern()
    for unknown in (
        masking_utils.or_masks(causal, window),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
        masking_utils.and_masks(causal, lambda b, h, i, j: j >= 0),
        masking_utils.and_masks(packed, packed),
    ):
        assert integration.recognise(unknown) is None


@pytest.mark.skipif(not IS_5, reason="bidirectional mask functions came with transformers 5")
def test_bidirectional_patterns_are_recognised() -> None:
    assert integration.recognise(masking_utils.bidirectional_mask_function) == integration.Pattern()
    window = masking_utils.sliding_window_bidirectional_mask_function(4)
    assert integration.recognise(window) == integration.Pattern(left=4, right=4)


def test_an_unknown_pattern_becomes_the_librarys_mask() -> None:
    """Chunks: image tokens, blocks and the like take the same way."""
    function = masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2]))
    place = {"q_length": 9, "q_offset": 0} if IS_5 else {"cache_position": torch.arange(9)}
    arguments = {"batch_size": 2, "kv_length": 9, "mask_function": function, "allow_is_causal_skip": False,
                 "attention_mask": torch.ones(2, 9).bool(), **place}  # fmt: skip
    got = integration.attention_mask(**arguments)
    assert got.shape == (2, 1, 9, 9) and torch.equal(got, masking_utils.sdpa_mask(**arguments))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_callers_own_4d_mask(dtype: torch.dtype) -> None:
    model, ids = make("llama", "cpu"), tokens("cpu")
    keep = torch.rand(2, 1, 11, 11) < 0.5
    keep |= torch.eye(11, dtype=torch.bool)
    mask = keep if dtype == torch.bool else torch.where(keep, 0.0, torch.finfo(dtype).min)
    use(model, "sdpa")
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        use(model, NAME)
        close(model(input_ids=ids, attention_mask=mask).logits, expected, "cpu")


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_that_lost_its_pattern_means_what_flash_attn_is_told(packed: bool) -> None:
    """As after a copy to another device; detaching, as reentrant checkpointing does, loses nothing."""
    model, mask = make("mistral", "cpu"), padding("right", "cpu")
    layer = model.model.layers[0].self_attn
    q, k, v = (torch.randn(2, heads, 11, 16) for heads in (4, 2, 2))
    place = {"q_length": 11, "q_offset": 0} if IS_5 else {"cache_position": torch.arange(11)}
    function = masking_utils.sliding_window_causal_mask_function(4)
    ids = (torch.arange(22, dtype=torch.int32) // 5).view(2, 11)
    if packed:
        mask.fill_(1)
        function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(ids))
    carried = integration.attention_mask(batch_size=2, kv_length=11, mask_function=function,
                                         attention_mask=mask.bool(), **place)  # fmt: skip
    expected, _ = integration.attention_forward(layer, q, k, v, carried)
    got, _ = integration.attention_forward(layer, q, k, v, carried.clone(), sliding_window=4)
    assert torch.equal(got, expected)
    layer.is_causal = False  # not every decoder's layers say it
    got, _ = integration.attention_forward(layer, q, k, v, carried.detach())
    assert torch.equal(got, expected)
    others = [ids, carried[:, :10], carried[1:], carried.view(11, 2), carried.view(torch.int8)]
    assert not any(map(integration._kept, others))
    storage = weakref.ref(carried.untyped_storage())
    del ids, function, carried, others
    assert storage() is None


def test_gradients_by_torch_func() -> None:
    """Tensors that a transform makes have no storage."""
    model, ids, mask = make("llama", "cpu"), tokens("cpu"), padding("left", "cpu")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, p, (ids, mask)).logits[:, -1].cos().sum()

    wanted = torch.func.grad(loss)(parameters)
    use(model, NAME)
    for name, grad in torch.func.grad(loss)(parameters).items():
        close(grad, wanted[name], "cpu")


@pytest.mark.slow
def test_compiled_model() -> None:
    model = make("mistral", "cpu", num_hidden_layers=1)
    ids, mask = tokens("cpu"), padding("left", "cpu")
    use(model, NAME)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        got = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
    close(got[mask.bool()], expected[mask.bool()], "cpu")


def gemma4(window: int) -> Any:
    """Its last two layers take keys from those before, and compute only the rows whose logits are kept."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Gemma 4")
    own = {
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = transformers.Gemma4TextConfig(**DECODER | {"num_hidden_layers": 4}, sliding_window=window, **own)
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("window", [4, 64])
@pytest.mark.parametrize("side", ["none", "left"])
def test_rows_cut_out_of_masks(window: int, side: str) -> None:
    model, ids, mask = gemma4(window), tokens("cpu"), padding(side, "cpu")
    for kept in (0, 1, 3):
        call = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": kept}
        use(model, "eager")
        expected = model(**call).logits
        use(model, NAME)
        close(model(**call).logits[:, -3:], expected[:, -3:], "cpu")
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    got = model.generate(ids, **options)
    use(model, "eager")
    assert torch.equal(got, model.generate(ids, **options))


def test_keys_whose_features_lie_apart() -> None:
    """As convolutions over keys leave them (Inkling)."""
    layer = make("llama", "cpu").model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 16, 5).mT, torch.randn(1, 2, 16, 5).mT
    got, _ = integration.attention_forward(layer, q, k, v, None)
    expected, _ = integration.attention_forward(layer, q, k.contiguous(), v.contiguous(), None)
    assert k.stride(-1) != 1 and torch.equal(got, expected)


@pytest.mark.skipif(not IS_5, reason="the family does not ask the registry before transformers 5")
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_decoder_whose_layers_do_not_say_that_they_are_causal(side: str) -> None:
    """The mask says it: its family knows neither torch's attention nor flash-attn, whom a flag would do."""
    config = transformers.PegasusXConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, block_size=8,
        num_global_tokens=4, stagger_local_blocks=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.PegasusXForConditionalGeneration(config).eval()
    assert model.model.decoder.layers[0].self_attn.is_causal is False
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
    ids = tokens("cpu")
    use(model, "eager")
    mask = padding(side, "cpu")
    call = {"input_ids": ids, "decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask}
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    expected = model(**call).logits[real]
    use(model, NAME)
    close(model(**call).logits[real], expected, "cpu")


def test_a_deterministic_backward_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ModernBERT asks for it."""
    layer = make("llama", "cpu").model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    with calls(monkeypatch) as seen:
        integration.attention_forward(layer, q, k, k, None, deterministic=True)
        integration.attention_forward(layer, q, k, k, None, deterministic=None)
    assert [call["deterministic"] for call in seen] == [True, None]


# ---- refusals --------------------------------------------------------------------------------------------


def test_names_with_flash_are_refused_and_why() -> None:
    with pytest.raises(ValueError, match="must not contain 'flash'"):
        integration.register("flash_ext")
    if not IS_5:
        model, ids = make("llama", "cpu"), tokens("cpu")
        expected, wanted = run(model, NAME, torch.ones_like(ids), input_ids=ids)
        got, grads = run(model, "flash_ext", torch.ones_like(ids), input_ids=ids)
        assert torch.equal(got, expected) and all(torch.equal(grads[name], wanted[name]) for name in wanted)
    if IS_5:  # the reason: the library takes it for a package of its own
        transformers.AttentionInterface.register("flash_ext", integration.attention_forward)
        try:
            with pytest.raises(Exception, match="flash"):
                make("llama", "cpu").set_attn_implementation("flash_ext")
        finally:
            transformers.AttentionInterface._global_mapping.pop("flash_ext")


@pytest.mark.parametrize("extra, error, message", [
    ({"output_attentions": True}, ValueError, "weights are never formed"),
    ({"head_mask": torch.ones(4)}, ValueError, "head_mask"),
    ({"cache": object()}, NotImplementedError, "continuous batching"),
    ({"indices": torch.zeros(1, 3, 2)}, NotImplementedError, "indices: keys chosen"),
    ({"block_indices": torch.zeros(1, 2, 3, 1)}, NotImplementedError, "block_indices: blocks of keys chosen"),
    ({"sinks": torch.zeros(1, 4, 3, 1)}, NotImplementedError, "sinks: sinks of each query"),
])  # fmt: skip
def test_refusals(extra: dict, error: type[Exception], message: str) -> None:
    layer = make("llama", "cpu").model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    with pytest.raises(error, match=message):
        integration.attention_forward(layer, q, k, k, None, **extra)


def test_keys_chosen_by_index_are_refused_from_within_a_model() -> None:
    """DeepSeek 3.2 hides the others in the mask for "sdpa" and "eager" only."""
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek 3.2")
    sizes = {
        "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 4, "index_n_heads": 2,
        "index_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8,
    }  # fmt: skip
    config = transformers.DeepseekV32Config(**DECODER | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(NotImplementedError, match="indices: keys chosen for each query"):
        model(input_ids=tokens("cpu"))
