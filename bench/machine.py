"""The machine and the sources behind a run: device, driver, libraries, commit, clocks and power."""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import subprocess
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# What a machine that holds no repository can be told about the sources it was given.
COMMIT_VARIABLE = "FLASH_EXT_COMMIT"
# What nvidia-smi is asked before a run, and again after it.
CHANGING_STATE = ("power.draw", "clocks.sm", "clocks.mem", "temperature.gpu")
GPU_STATE = ("driver_version", "power.limit", "clocks.max.sm", *CHANGING_STATE)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """``--device``, which :func:`device_asked_for` fills in."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None, help="default cuda")


def device_asked_for(options: argparse.Namespace, parser: argparse.ArgumentParser, smallest: str) -> str:
    """That of ``--device``, else the GPU. Where there is none the program ends: it would run for hours.

    Args:
        smallest: the option that leaves seconds of it.
    """
    if options.device is None and not torch.cuda.is_available():
        parser.error(f"no GPU is visible to torch, and a CPU would take hours; "
                     f"{smallest} --device cpu tries the program itself, anywhere")  # fmt: skip
    return options.device or "cuda"


def collect(device: torch.device, commit: str | None) -> dict:
    """Facts about the machine and the sources, as they stand before the run.

    Args:
        commit: what to record as the commit; None asks git, then the environment variable FLASH_EXT_COMMIT.
    """
    sha, dirty = (commit, None) if commit else commit_of_sources()
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": sha,
        "dirty": dirty,
        **build_facts(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    if device.type != "cuda":
        return {**facts, "device": "CPU", "cpu_threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        **facts,
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cudnn": torch.backends.cudnn.version(),
        **gpu_state(),
    }


def commit_of_sources() -> tuple[str, bool | None]:
    """Short commit of this checkout and whether it was changed since; the environment's word without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() == ROOT:
            return git("rev-parse", "--short=12", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or no repository: told from outside, or not at all
    return os.environ.get(COMMIT_VARIABLE, "unknown"), None


def build_facts() -> dict:
    """Version of flash_ext and what its binary says of its own build; empty where it cannot be imported."""
    try:
        from flash_ext import info
        from flash_ext._ops.extension import build_record
    except ImportError:
        return {}
    facts = info.collect()
    extension = facts["extension"]
    known = {f"build_{key}": extension[key] for key in ("git_sha", "archs", "variant") if key in extension}
    # The hash of the kernel sources: a build before a commit names the one before it.
    if extension["loaded"] and (sources := build_record(Path(extension["file"])).get("sources")):
        known["build_sources"] = sources
    return {"flash_ext": facts["flash_ext"]["version"], **known}


def gpu_state(queries: tuple[str, ...] = GPU_STATE, suffix: str = "") -> dict[str, str]:
    """What nvidia-smi answers about the current GPU, by query name with dots replaced; empty without it.

    Args:
        queries: names as ``nvidia-smi --help-query-gpu`` lists them.
        suffix: appended to every key, to tell a later answer from an earlier one.
    """
    command = [
        "nvidia-smi",
        f"--id={visible_gpu()}",
        f"--query-gpu={','.join(queries)}",
        "--format=csv,noheader",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = next(csv.reader(answer.splitlines()), [""] * len(queries))
    return {
        query.replace(".", "_") + suffix: value.strip() for query, value in zip(queries, values, strict=True)
    }


def visible_gpu() -> str:
    """The id by which nvidia-smi knows the GPU that torch calls current."""
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else str(index)


class ClockLog:
    """Follows the SM clock and the power beside a run, by one ``nvidia-smi`` that prints five times a second.

    Attributes:
        samples: (time.monotonic() of arrival, SM clock in MHz, power in W).
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> ClockLog:
        command = [
            "nvidia-smi",
            f"--id={visible_gpu()}",
            "--query-gpu=clocks.sm,power.draw",
            "--format=csv,noheader,nounits",
            "--loop-ms=200",
        ]
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self  # no nvidia-smi: rows say nothing about clocks
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        for line in self._process.stdout:
            try:
                mhz, watts = (float(part) for part in line.split(","))
            except ValueError:
                continue  # "[N/A]" while the driver is busy
            self.samples.append((time.monotonic(), mhz, watts))

    def __exit__(self, *exc_info) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def between(self, start: float, end: float) -> tuple[float, float] | None:
        """Median SM clock (MHz) and power (W) between two ``time.monotonic()`` readings, None without any."""
        inside = [(mhz, watts) for when, mhz, watts in self.samples if start <= when <= end]
        if not inside:
            return None
        return statistics.median(mhz for mhz, _ in inside), statistics.median(watts for _, watts in inside)
