"""What is installed here and which kernels serve this machine: ``python -m flash_ext.info [--json]``.

``--plan "bwd batch=4 seqlen=4096 heads=32/8 head_dim=128 causal"`` prints what one call would launch.

Works without a GPU, and when the extension module is missing or belongs to another torch: then it says so and
names the command that mends it. Attach the ``--json`` output to a bug report.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, current_flash_attention_impl

from . import __version__
from ._ops import library as ops
from ._ops import plan as planned
from ._ops.extension import PACKAGE, MissingExtension, in_source_folder, is_of_sources_beside, mend

__all__ = ["as_text", "collect", "main"]

HEAD_DIMS = (64, 96, 128, 192, 256)
OTHER_PACKAGES = (
    "numpy", "triton", "flash-attn", "flash-attn-4", "xformers", "transformers", "diffusers", "timm",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Everything below as one JSON-ready dict.

    Keys: "flash_ext" (version, location), "extension" (loaded, message, and what it was built from),
    "runtime" (Python, torch, CUDA, driver, platform), "devices" (one entry per GPU with the backend that
    serves it), "cpu", "sdpa" (who serves PyTorch's own attention, and in which order it asks) and "packages".
    """
    return {
        "flash_ext": {"version": __version__, "location": str(Path(__file__).parent)},
        "extension": _extension(),
        "runtime": _runtime(),
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "cpu": {"backend": "cpu", "threads": torch.get_num_threads()},
        "sdpa": _sdpa(),
        "packages": _packages(),
    }


def _extension() -> dict[str, Any]:
    if isinstance(ops._C, MissingExtension):
        return {"loaded": False, "message": ops._C.message}
    file = Path(ops._C.__file__)
    message = None
    if in_source_folder(PACKAGE) and not is_of_sources_beside(PACKAGE, file):
        message = f"the sources have changed since it was built. Build it again: {mend(PACKAGE)}"
    return {"loaded": True, "message": message, "file": str(file), **ops._C.build_info}


def _runtime() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": _driver_version(),
        "cuda_available": torch.cuda.is_available(),
        "platform": platform.platform(),
    }


def _driver_version() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    report: dict[str, Any] = {
        "index": index,
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }
    if not isinstance(ops._C, MissingExtension):
        report["backends"] = {direction: _served(direction, index) for direction in ("fwd", "bwd")}
    return report


def _served(direction: str, device: int) -> dict[str, Any]:
    """The backend that runs a plain bfloat16 problem of each head_dim, and why the others do not."""
    chosen: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for head_dim in HEAD_DIMS:
        try:
            plan = ops._C.plan(
                direction,
                seqlen_q=4096,
                seqlen_k=4096,
                num_heads=16,
                num_heads_k=16,
                head_dim=head_dim,
                head_dim_v=head_dim,
                device=device,
            )
        except RuntimeError as error:  # the device cannot be read
            return {"kernels": {}, "refused": {"all": str(error)}}
        chosen[str(head_dim)] = {"backend": plan["backend"], "kernel": plan.get("kernel")}
        refused.update({name: reason for name, reason in plan["reasons"].items() if reason})
    refused["cpu"] = "serves CPU tensors only"
    return {"kernels": chosen, "refused": refused}


def _sdpa() -> dict[str, Any]:
    backends = {backend.value: backend.name for backend in SDPBackend.__members__.values()}
    return {
        "flash_attention": current_flash_attention_impl() or "PyTorch's own",
        "order": [backends[number] for number in torch._C._get_sdp_priority_order()],
    }


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in OTHER_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def as_text(info: dict[str, Any]) -> str:
    """The report for a reader at a terminal."""
    extension, runtime = info["extension"], info["runtime"]
    lines = [f"flash_ext {info['flash_ext']['version']} in {info['flash_ext']['location']}", ""]
    if extension["loaded"]:
        commit = extension["git_sha"] or "not from a repository"
        lines += [
            f"module        {extension['file']}",
            f"built for     torch {extension['torch']}, CUDA {extension['cuda']}",
            f"built as      {extension['variant']}, commit {commit}",
            f"machine code  {extension['archs']}",
            f"nvcc flags    {extension['flags']}",
            *([f"out of date   {extension['message']}"] if extension["message"] else []),
        ]
    else:
        lines += [f"extension     not loaded: {extension['message']}"]
    cuda = runtime["torch_cuda"] or "none, a CPU-only build"
    lines += [
        f"running       torch {runtime['torch']} (CUDA {cuda}), Python {runtime['python']}",
        f"driver        {runtime['driver'] or 'none found'}",
        f"platform      {runtime['platform']}",
        "",
    ]
    for device in info["devices"]:
        lines += _device_lines(device)
    if not info["devices"]:
        lines += [
            "no GPU is visible to torch: tensors on the CPU are served by backend cpu "
            f"({info['cpu']['threads']} threads)"
        ]
    sdpa = info["sdpa"]
    lines += [
        "",
        f"torch SDPA    flash attention by {sdpa['flash_attention']}",
        f"  order       {', '.join(sdpa['order'])}",
    ]
    found = [f"{name} {version}" for name, version in info["packages"].items() if version]
    lines += ["", f"also here     {', '.join(found) or 'none of ' + ', '.join(OTHER_PACKAGES)}"]
    return "\n".join(lines)


def _device_lines(device: dict[str, Any]) -> list[str]:
    lines = [
        f"GPU {device['index']}         {device['name']}, "
        f"compute capability {device['compute_capability']}, "
        f"{device['num_sms']} SMs, {device['memory_gib']} GiB"
    ]
    for direction, served in device.get("backends", {}).items():
        for head_dim, choice in served["kernels"].items():
            serves = f"backend {choice['backend']}: {choice['kernel']}" if choice["backend"] else "no backend"
            lines.append(f"  {direction}, head_dim {head_dim:>3}  {serves}")
        lines += [f"  {direction}, not {name}: {reason}" for name, reason in served["refused"].items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flash_ext.info", description="What is installed and what runs."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--plan", metavar="CALL", help=planned.HELP)
    args = parser.parse_args()
    if args.plan is not None:
        try:
            plan = planned.plan(args.plan)
        except (ImportError, ValueError, RuntimeError) as error:
            parser.error(str(error))
        sys.stdout.write((json.dumps(plan, indent=2) if args.json else planned.as_text(plan)) + "\n")
        return
    info = collect()
    sys.stdout.write((json.dumps(info, indent=2) if args.json else as_text(info)) + "\n")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])


if __name__ == "__main__":
    main()
