"""Fine-tune a Hugging Face model with flash_ext as its attention.

    python -m examples.finetune_transformers                              # a tiny model with random weights
    python -m examples.finetune_transformers --model path-or-name         # one of yours

One call of ``register()`` is all that changes: the model then takes ``attn_implementation="fext"``. The task
is a small one that needs attention: sentences end with the words they began with.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from flash_ext.integrations.transformers import register

PADDING = 0


def batch_of(size: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Sentences of 8 to 16 words followed by themselves, padded on the right; and what is no padding."""
    ids = torch.full((size, 32), PADDING)
    for row, length in zip(ids, torch.randint(8, 17, (size,)).tolist()):
        row[: 2 * length] = torch.randint(1, vocabulary, (length,)).repeat(2)
    return ids, (ids != PADDING).long()


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; returns the loss of every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or name of a model to load; default: a tiny Llama")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate; 2e-5 suits a trained model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    import transformers  # after the options, since it takes seconds

    torch.manual_seed(0)
    name = register()  # "fext"
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, attn_implementation=name)
    else:
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PADDING, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    model.to(options.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        ids, real = (t.to(options.device) for t in batch_of(options.batch, min(model.config.vocab_size, 32)))
        labels = ids.masked_fill(real == 0, -100)  # no loss on padding
        # bfloat16 takes the fast kernels of a GPU; weights stay as they were loaded.
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device != "cpu"):
            loss = model(ids, attention_mask=real, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
