"""``python -m bench.accuracy``: errors against float64, ours beside the peers', on the same inputs.

    python -m bench.accuracy --peers fa2,cudnn,fa3 --fa3-lib PATH --cudart12 PATH --out out/accuracy.json
    python -m bench.accuracy --set fp8 --fa3-fp8-lib PATH    # attention in fp8, see bench/fp8_accuracy.py

Ten cases, half of them with outliers: N(0, 1) with N(0, 100) added to one element in a thousand, as in the
FlashAttention-3 paper (arXiv:2407.08608, section 4.3). The error of a tensor is its relative L2 distance to
what :mod:`tests.reference` and autograd make of the same inputs in float64. Prints a table, and for
each peer the largest and the smallest ratio of our error to its own; what cannot run has words instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench import fp8_accuracy, fp8_report, machine
from bench.attention import serving_paths
from bench.entrants import Entrant, Ours
from bench.inputs import Inputs
from bench.peers import Sdpa, make_peers
from bench.peers_fp8 import FP8_PEERS
from bench.runner import DTYPES
from bench.shapes import Case
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.reference import attention_reference

NAMES = ("out", "dq", "dk", "dv")


def _case(head_dim: int, causal: bool, outliers: bool, heads_k: int = 4) -> Case:
    parts = [f"d{head_dim}", "causal" if causal else "full", *(["gqa"] if heads_k < 4 else [])]
    name = "-".join([*parts, *(["outliers"] if outliers else [])])
    return Case(name, 1, 2048, 2048, 4, heads_k, head_dim, head_dim, causal)


CASES = (
    _case(64, False, False),
    _case(64, True, True),
    _case(96, True, True),
    _case(128, False, False),
    _case(128, False, True),
    _case(128, True, False),
    _case(128, True, True, heads_k=1),
    _case(192, True, False),
    _case(256, False, True),
    _case(256, True, False),
)


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """The benchmark's inputs of a case, with outliers in q, k and v where its name says so."""
    inputs = Inputs(case, dtype, device, seed)
    if case.name.endswith("outliers"):
        generator = torch.Generator(device).manual_seed(seed + 1)
        for tensor in inputs.qkv:
            draw = {"generator": generator, "device": device}
            chosen = torch.rand(tensor.shape, **draw) < 1e-3
            far = 10 * torch.randn(tensor.shape, **draw)
            tensor.copy_((tensor.float() + chosen * far).to(dtype))
    return inputs


def truth(inputs: Inputs) -> list[torch.Tensor]:
    """out, dq, dk and dv in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in inputs.qkv]
    spec = AttnSpec(default_scale(inputs.case.head_dim), -1, 0 if inputs.case.causal else -1)
    out, _ = attention_reference(*leaves, spec)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout.double())]


def results(entrant: Entrant, inputs: Inputs) -> list[torch.Tensor]:
    """The same of one column, whatever its layout and whatever else it returns."""
    out = entrant.prepare(inputs, "fwd")()
    out = out[0] if isinstance(out, Sequence) else out
    grads = [t for t in entrant.prepare(inputs, "bwd")() if t is not None and t.dtype == inputs.dtype][:3]
    found = [out, *grads]
    if isinstance(entrant, Sdpa):
        found = [tensor.transpose(1, 2) for tensor in found]
    shapes = [inputs.dout.shape, *(tensor.shape for tensor in inputs.qkv)]
    if [tensor.shape for tensor in found] != shapes:
        raise RuntimeError(
            f"shapes {[tuple(t.shape) for t in found]} instead of {[tuple(s) for s in shapes]}"
        )
    return found


def relative_l2(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def measure(entrants: list[Entrant], inputs: Inputs) -> dict[str, dict[str, float] | str]:
    """Errors of every column by tensor, or why it has none."""
    expected = truth(inputs)
    errors: dict[str, dict[str, float] | str] = {}
    for entrant in entrants:
        reason = entrant.why_not(inputs.case, "bwd")
        if reason:
            errors[entrant.name] = reason
            continue
        try:
            found = results(entrant, inputs)
        except Exception as error:  # noqa: BLE001 - a peer's failure is a result
            errors[entrant.name] = f"{type(error).__name__}: {error}"[:300]
            continue
        errors[entrant.name] = {n: relative_l2(g, e) for n, g, e in zip(NAMES, found, expected, strict=True)}
    return errors


def comparisons(rows: dict[str, dict], ours: str) -> list[str]:
    """For every peer, the largest ratio of our error to its own, and where it is."""
    said = []
    for peer in {name: None for errors in rows.values() for name in errors if name != ours}:
        ratios = [
            (errors[ours][tensor] / errors[peer][tensor], f"{case} {tensor}")
            for case, errors in rows.items()
            if isinstance(errors.get(peer), dict) and isinstance(errors[ours], dict)
            for tensor in NAMES
        ]
        if ratios:
            worst, where = max(ratios)
            best, where_best = min(ratios)
            said.append(
                f"{ours} against {peer}: error at most {worst:.3f} of its own ({where}), "
                f"at least {best:.3f} ({where_best}), {len(ratios)} tensors"
            )
    return said


def print_table(console: Console, rows: dict[str, dict]) -> None:
    names = list(next(iter(rows.values())))
    table = Table("case", "tensor", *names)
    for case, errors in rows.items():
        for tensor in NAMES:
            cells = [f"{e[tensor]:.3e}" if isinstance(e, dict) else "-" for e in errors.values()]
            table.add_row(case, tensor, *cells)
    console.print(table)
    for name in names:
        for words in {errors[name] for errors in rows.values() if isinstance(errors[name], str)}:
            console.print(f"{name}: {words}", highlight=False, markup=False)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", choices=("rounding", "fp8"), default="rounding")
    parser.add_argument(
        "--peers",
        default=None,
        help=f"comma list, or 'none'; default fa2,cudnn,fa3, and {','.join(FP8_PEERS)} with --set fp8",
    )
    parser.add_argument("--fa3-lib", default="", help="library that registers torch.ops.flash_attn_3")
    parser.add_argument("--cudart12", default="", help="libcudart.so.12 to load before it")
    parser.add_argument(
        "--fa3-fp8-lib", default="", help="library of vLLM that registers torch.ops._vllm_fa3_C"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="default bf16 (GPU, fp8), fp32 (CPU)")
    parser.add_argument("--seqlen", type=int, default=None, help="rows of every case; default 2048")
    parser.add_argument("--smoke", action="store_true", help="with --set fp8: short sequences, for a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=None, help="commit to record where there is no git to ask")
    parser.add_argument(
        "--out", type=Path, default=None, help="default out/accuracy.json, out/accuracy-fp8.json in fp8"
    )
    options = parser.parse_args(argv)
    in_fp8 = options.set == "fp8"
    if in_fp8 and options.seqlen is not None:
        parser.error("--set fp8 has lengths of its own")
    if in_fp8 and options.dtype == "fp32":
        parser.error("--set fp8 quantises bf16 or fp16")
    if in_fp8 and options.device == "cpu" and not options.smoke:
        parser.error("a CPU would take hours; --smoke tries the program itself")
    if options.smoke and not in_fp8:
        parser.error("--smoke belongs to --set fp8")
    options.seqlen = options.seqlen or 2048
    options.peers = options.peers or (",".join(FP8_PEERS) if in_fp8 else "fa2,cudnn,fa3")
    options.dtype = options.dtype or ("bf16" if in_fp8 or options.device == "cuda" else "fp32")
    options.out = options.out or Path("out/accuracy-fp8.json" if in_fp8 else "out/accuracy.json")
    return options


def print_absent(console: Console, absent: dict[str, str]) -> None:
    for name, reason in absent.items():
        console.print(f"peer {name} is not here: {reason}", highlight=False, markup=False)


def run_fp8(options: argparse.Namespace, console: Console) -> None:
    """The set ``fp8``: a line per row while it runs, then the table and what does not hold."""
    for errors in fp8_accuracy.run(options):
        if not errors.rows:
            print_absent(console, errors.metadata["absent_peers"])
            continue
        row = errors.rows[-1]
        cells = "  ".join(
            f"{n} {e:.3g} %" if isinstance(e, float) else f"{n} -" for n, e in row.errors.items()
        )
        console.print(f"{row.inputs:18} {row.seqlen_k:7}  {cells}", highlight=False, markup=False)
    if "stopped" in errors.metadata:
        console.print(f"stopped early: {errors.metadata['stopped']}", highlight=False, markup=False)
    demands = fp8_report.demands(errors)
    console.print("\n".join([*fp8_report.table(errors), *map(str, demands)]), highlight=False, markup=False)
    for path in fp8_report.write(errors, options.out):
        console.print(str(path), highlight=False)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    console = Console(soft_wrap=True)
    if options.set == "fp8":
        run_fp8(options, console)
        return 0
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    paths = serving_paths() if on_gpu else ["cpu"]
    dtype = DTYPES[options.dtype]
    named = [] if options.peers == "none" else options.peers.split(",")
    peers, absent = make_peers(named, options.fa3_lib, options.cudart12)
    print_absent(console, absent)
    entrants = [*(Ours(path) for path in paths), *peers]
    rows = {}
    for case in CASES:
        sized = Case(**(vars(case) | {"seqlen_q": options.seqlen, "seqlen_k": options.seqlen}))
        rows[case.name] = measure(entrants, make_inputs(sized, dtype, device, options.seed))
    print_table(console, rows)
    said = [line for path in paths for line in comparisons(rows, path)]
    console.print("\n".join(said), highlight=False, markup=False)
    record = {
        "metadata": machine.collect(device, options.commit) | {"dtype": str(dtype), "seqlen": options.seqlen},
        "errors": rows,
        "comparisons": said,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
