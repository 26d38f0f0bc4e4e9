"""``python -m bench.numerics``: errors of out and lse over very many keys, and of out where v is constant.

    python -m bench.numerics --out out/numerics.json    2048 rows of 8 heads, up to 4,194,304 keys
    python -m bench.numerics --smoke --device cpu

Rows are causal, at the end of the keys of one head, and are compared with float64. ``normal`` data is
N(0, 1). Of ``alike`` keys all weigh the same but two, which weigh e times as much: every addition rounds the
same way. ``plain`` is a call as it is, ``parts`` one whose keys are in 8 parts, ``mask`` one whose mask hides
nothing, which has kernels of its own. Errors are absolute for lse and relative L2 for out, beside those of a
naive evaluation, which does all in float32 but rounds weights and result. Where all keys share a value, out
is compared with it in ulps, the distances of neighbouring numbers of its type.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flash_ext
from bench import machine
from flash_ext import AuxRequest, masks
from tests.many_keys import by_parts

PARTS = 8
DATA = ("normal", "alike")
CALLS = ("plain", "parts", "mask")
LSE = AuxRequest(lse=True)


@dataclass(frozen=True)
class Sizes:
    """What is measured: rows, heads and head_dim over so many keys; head_dims and keys of a constant v."""

    rows: int
    heads: int
    head_dim: int
    keys: tuple[int, ...]
    constant_dims: tuple[int, ...]
    constant_keys: tuple[int, ...]


FULL = Sizes(2048, 8, 128, (2**16, 2**18, 2**20, 2**22), (64, 128, 256), (1, 2, 3, 5, 8, 16, 64, 2048))
SMOKE = Sizes(32, 2, 64, (64, 200), (64,), (1, 5))


def make_inputs(sizes: Sizes, keys: int, data: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q (rows, h, d), k and v (keys, 1, d) in bfloat16."""
    d, like = sizes.head_dim, {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(n, h, d, **like) for n, h in ((sizes.rows, sizes.heads), (keys, 1), (keys, 1)))
    if data == "alike":
        q.fill_(1)
        k.zero_()
        k[[0, keys - sizes.rows]] = d**-0.5  # seen by all rows; their score is 1
    return q, k, v


def options_of(call: str, path: str, keys: int, device: torch.device) -> dict[str, Any]:
    if call == "parts":
        return {"backend": f"{path} kv_splits={PARTS}"}
    shown = {"mask": masks.KeyMask(torch.ones(keys, dtype=torch.bool, device=device))}
    return {"backend": path, **(shown if call == "mask" else {})}


def measure(sizes: Sizes, paths: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """A row of errors for each number of keys, data, path and call."""
    for keys in sizes.keys:
        for data in DATA:
            q, k, v = make_inputs(sizes, keys, data, device)
            truth, wanted = by_parts(q, k[:, 0], v[:, 0], exact=True)
            naive = relative_l2(by_parts(q, k[:, 0], v[:, 0], exact=False)[0], truth)
            for path in paths:
                for call in CALLS if path != "cpu" else ("plain", "mask"):
                    options = options_of(call, path, keys, device)
                    out, (lse, _) = flash_ext.attention(
                        q[None], k[None], v[None], causal=True, return_aux=LSE, **options
                    )
                    yield {
                        "keys": keys,
                        "data": data,
                        "path": path,
                        "call": call,
                        "lse": float((lse[0] - wanted).abs().max()),
                        "out": relative_l2(out[0], truth),
                        "naive": naive,
                    }


def measure_constant(sizes: Sizes, paths: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """For each number of keys, head_dim, type and path: how far out is from values that all keys share."""
    for keys in sizes.constant_keys:
        for d in sizes.constant_dims:
            for dtype in (torch.bfloat16, torch.float16):
                like = {"device": device, "dtype": dtype}
                q, k = (torch.randn(4, n, 2, d, **like) for n in (256, keys))
                # Powers of two: the numbers below them are half as far, so that an error shows there first.
                v = torch.randint(-3, 4, (1, 1, 2, d), device=device).exp2().to(dtype)
                v = v.expand(4, keys, 2, d).contiguous()
                for path in paths:
                    off = ulps(flash_ext.attention(q, k, v, backend=path), v[:, :1])
                    yield {
                        "keys": keys,
                        "head_dim": d,
                        "dtype": str(dtype).removeprefix("torch."),
                        "path": path,
                        "worst": int(off.max()),
                        "share": float((off > 0).double().mean()),
                    }


def relative_l2(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def ulps(got: Tensor, expected: Tensor) -> Tensor:
    """How many numbers of their 16-bit type lie between two tensors, one of them counted."""

    def place(x: Tensor) -> Tensor:  # of a number among all of its type, in their order
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (place(got) - place(expected)).abs()


def line(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in row.items())  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.numerics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    machine.add_device_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a few hundred keys, for a CPU")
    parser.add_argument("--paths", default=None, help="comma list; default sm90,sm80 where they run, or cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=None, help="commit to record where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("out/numerics.json"))
    options = parser.parse_args(argv)
    options.device = machine.device_asked_for(options, parser, "--smoke")
    if options.device == "cpu" and not options.smoke:
        parser.error("a CPU would take hours; --smoke tries the program itself")
    return options


def paths_of(options: argparse.Namespace) -> list[str]:
    if options.paths:
        return options.paths.split(",")
    if options.device == "cpu":
        return ["cpu"]
    return ["sm90", "sm80"] if torch.cuda.get_device_capability()[0] == 9 else ["sm80"]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    device, paths = torch.device(options.device), paths_of(options)
    sizes = SMOKE if options.smoke else FULL
    torch.manual_seed(options.seed)
    record: dict[str, Any] = {"metadata": machine.collect(device, options.commit)}
    for name, rows in (("long", measure), ("constant", measure_constant)):
        record[name] = []
        for row in rows(sizes, paths, device):
            print(line(row), flush=True)
            record[name].append(row)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
