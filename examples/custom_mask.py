"""Write a mask of your own as a rule, and attend with it, forward and backward.

    python -m examples.custom_mask --seqlen 1024

The rule here: a token sees the ``--window`` keys before it, and of everything earlier only landmarks, the
first 16 tokens of every 256. Blocks of scores that the rule hides as a whole cost no time and no memory.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from flash_ext import attention, masks


def landmarks(window: int):
    """The rule: which keys j a row i sees. All arguments are integer tensors that broadcast."""

    def rule(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((i - j < window) | (j % 256 < 16))

    return rule


def written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with every score in memory, to compare with."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Compares; returns the largest difference of the output and of each gradient."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--window", type=int, default=128, help="keys that a row sees, its own among them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    n, rule = options.seqlen, landmarks(options.window)
    # Building looks at every score once and waits for the GPU: build once, use in every layer and step. None
    # for batch and heads means the same mask for all of them.
    mask = masks.BlockMask.from_rule(rule, None, None, n, n, block_size=64, device=options.device)
    print(f"{mask.density():.0%} of the blocks are computed")

    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32  # float32 runs on the CPU only
    shape = (2, n, 4, 64)  # batch, tokens, heads, head_dim
    tensors = [torch.randn(shape, device=options.device, dtype=dtype) for _ in range(4)]
    dout = tensors.pop()
    ours = [x.clone().requires_grad_() for x in tensors]
    out = attention(*ours, mask=mask)
    out.backward(dout)

    theirs = [x.float().requires_grad_() for x in tensors]
    rows = torch.arange(n, device=options.device)
    expected = written_out(*theirs, rule(None, None, rows[:, None], rows))
    expected.backward(dout.float())

    pairs = {"out": (out, expected)} | {
        f"d{name}": (x.grad, y.grad) for name, x, y in zip("qkv", ours, theirs)
    }
    differences = {name: (a.float() - b).abs().max().item() for name, (a, b) in pairs.items()}
    for name, difference in differences.items():
        print(f"{name}: largest difference {difference:.1e}")
    return differences


if __name__ == "__main__":
    main()
