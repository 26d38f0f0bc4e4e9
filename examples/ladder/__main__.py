"""Runs the ladder: ``python -m examples.ladder``. Times every rung from the textbook to flash_ext side by
side, at many lengths and with few heads; the backward of those that have one; the passes of softmax; the
parts of standard attention; and, where ncu is installed, counts what each rung moves.

Results go to a JSON file, which ``python -m examples.claims`` reads, and to tables on the screen. On a CPU
only what runs there is timed, in seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from bench import machine
from bench.timing import copy_gbps, make_timer, matmul_tflops

from . import measure, profile
from .measure import CPU, GPU, Row
from .report import as_text

SECTIONS = {
    "softmax": measure.softmax_rows,
    "tiles": measure.tile_rows,
    "lengths": measure.length_rows,
    "backward": measure.backward_rows,
    "heads": measure.few_head_rows,
    "breakdown": measure.breakdown_rows,
    "forward-only": measure.forward_only_rows,
}


def write(path: Path, results: Mapping[str, object]) -> None:
    """As JSON, compressed where the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=0).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Entry; returns all rows."""
    parser = argparse.ArgumentParser(prog="python -m examples.ladder", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default=None, help="default: the GPU if there is one"
    )
    parser.add_argument(
        "--only", default=",".join((*SECTIONS, "profile")), help="comma list; default %(default)s"
    )
    parser.add_argument("--commit", default=None, help="commit to record where there is no git to ask")
    parser.add_argument(
        "--out", type=Path, default=Path("out/ladder.json"), help="file (default %(default)s)"
    )
    parser.add_argument("--under-ncu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.under_ncu:
        profile.run_all()
        return []
    chosen = [word.strip() for word in options.only.split(",") if word.strip()]
    unknown = [word for word in chosen if word not in (*SECTIONS, "profile")]
    if unknown:
        parser.error(f"no section is called {unknown[0]!r}; known: {', '.join((*SECTIONS, 'profile'))}")

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    scale, timer = (GPU if device.type == "cuda" else CPU), make_timer(device)
    rows = measure.check_results(device)
    ceilings: dict[str, float] = {}
    if device.type == "cuda":
        ceilings = {
            "matmul_tflops": matmul_tflops(timer, device, torch.bfloat16),
            "copy_gbps": copy_gbps(timer, device),
        }
    for name, section in SECTIONS.items():
        if name in chosen:
            started = time.monotonic()
            rows += section(device, timer, scale)
            timer.release()
            print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    if "profile" in chosen and device.type == "cuda":
        rows += profile.profile_rows()
    results = {
        "kind": "ladder",
        "metadata": machine.collect(device, options.commit),
        "ceilings": ceilings,
        "rows": rows,
    }
    write(options.out, results)
    print(as_text(rows))
    print(f"\n{options.out}")
    return rows


if __name__ == "__main__":
    main()
