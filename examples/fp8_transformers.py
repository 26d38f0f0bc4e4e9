"""Run a Hugging Face model with its attention in fp8, and see what that costs and gives.

    python -m examples.fp8_transformers                                   # a small model, trained here first
    python -m examples.fp8_transformers --model path-or-name --steps 0    # one of yours, on random tokens

``register(quantize=...)`` is all that changes. In mode "fp8" queries, keys and values have 8 bits; in mode
"mixed" queries and keys keep 16. Prefills run so, steps of a few tokens do not. For each kind of attention
the program prints the loss and how often the likeliest token is the right one, both of the same held-out
text, and tokens a second of a prefill.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_ext.integrations.transformers import register

VOCABULARY, HALF = 64, 128  # a text is so many random words, twice


class Row(NamedTuple):
    """What one kind of attention gives."""

    name: str
    loss: float
    accuracy: float
    tokens_a_second: float


def texts(size: int, vocabulary: int) -> Tensor:
    """(size, 2 * HALF) ids whose second half repeats the first, as a copy that only attention can make."""
    return torch.randint(vocabulary, (size, HALF)).repeat(1, 2)


def small_model(transformers: Any, name: str) -> Any:
    """A Llama of head_dim 128."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=128, max_position_embeddings=1 << 17,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)


def seconds_of(model: Any, ids: Tensor, repeats: int = 3) -> float:
    """Of the fastest of a few prefills."""
    best = float("inf")
    for _ in range(repeats):
        if ids.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        model(ids, logits_to_keep=1)
        if ids.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def main(arguments: list[str] | None = None) -> list[Row]:
    """Trains, measures and prints; returns the rows of the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or name of a model to load; default: a small Llama")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--prefill", type=int, default=0, help="tokens; default 65536, on a CPU 512")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    import transformers  # after the options, since it takes seconds

    torch.manual_seed(0)
    names = {
        "16 bits": register("fext"),
        "mixed": register("fext_mixed", quantize="mixed"),
        "fp8": register("fext_fp8", quantize="fp8"),
    }
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation=names["16 bits"]
        )
    else:
        model = small_model(transformers, names["16 bits"])
    model.to(options.device)
    vocabulary = min(model.config.vocab_size, VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        ids = texts(options.batch, vocabulary).to(options.device)
        with torch.autocast(options.device, torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == options.steps - 1:
            print(f"step {step:4d}: loss {loss.item():.3f}")

    model = model.to(torch.bfloat16).eval()  # as a server holds it
    held_out = texts(options.batch, vocabulary).to(options.device)
    length = options.prefill or (65536 if options.device != "cpu" else 512)
    prompt = torch.randint(vocabulary, (1, length)).to(options.device)
    rows = []
    print(f"{'attention':10s} {'loss':>7s} {'accuracy':>9s} {'tokens a second':>16s}")
    for kind, name in names.items():
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits = model(held_out).logits[:, HALF - 1 : -1].float()  # of the words that are repeated
            wanted = held_out[:, HALF:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item()
            accuracy = (logits.argmax(-1) == wanted).float().mean().item()
            model(prompt, logits_to_keep=1)  # compiles and allocates
            rows.append(Row(kind, loss, accuracy, length / seconds_of(model, prompt)))
        print(f"{kind:10s} {loss:7.4f} {accuracy:9.3f} {rows[-1].tokens_a_second:16.0f}")
    return rows


if __name__ == "__main__":
    main()
