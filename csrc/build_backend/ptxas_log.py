"""Reads what `ptxas -v` says of every kernel, and refuses the build when a kernel would be slow or wrong.

A spill, a stack frame or an ignored Hopper instruction hint compiles without an error and silently costs the
benefit of the kernel, so each of them fails the build by the kernel's name. In a few kernels producer
warps may keep registers in memory: those that compute have the others.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace

# C7508 setmaxnreg ignored; C7510-C7519 wgmma serialised, waits injected, and their kin.
FATAL_WARNING = re.compile(r"C75(?:08|1[0-9])\b")
_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\w+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SMEM = re.compile(r"(\d+) bytes smem")
# With modifiers at head_dim 64: forwards in tiles of 192 queries and 128 keys, backwards whose warpgroups
# have 128 keys each. Producers, of which the scheduler needs 56 registers, have 32, and 24 or 40. Bytes a
# thread, at most; tests/packaging/test_build.py looks where they are.
_SPILLING_PRODUCERS = re.compile(r"(fwd|bwd)_mod_sm90_kernel<.*ModTraits<[^<>]*, true> ?>")
_PRODUCER_BYTES = {"fwd": 128, "bwd": 256}


@dataclass(frozen=True)
class KernelResources:
    """One kernel on one architecture. Sizes in bytes; registers and frames per thread."""

    source: str
    symbol: str
    arch: str
    name: str = ""  # demangled
    registers: int = 0
    barriers: int = 0
    static_smem: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    @property
    def may_spill(self) -> bool:
        """Whether it is one of those whose producers have few registers."""
        return _SPILLING_PRODUCERS.search(self.name) is not None

    @property
    def misuses_memory(self) -> bool:
        """Whether registers are kept in local memory where that is slow."""
        found = _SPILLING_PRODUCERS.search(self.name)
        allowed = _PRODUCER_BYTES[found.group(1)] if found else 0
        return max(self.stack, self.spill_stores, self.spill_loads) > allowed


def parse_log(source: str, log: str) -> tuple[list[KernelResources], list[str]]:
    """Kernels and other warnings in the output of one nvcc run over ``source``.

    Frames of functions that were not inlined count for the kernel that was compiled last before them, which
    is the one that ptxas was working on.
    """
    kernels: list[KernelResources] = []
    other = []
    for line in log.splitlines():
        entry = _ENTRY.search(line)
        if entry:
            kernels.append(KernelResources(source, entry.group(1), entry.group(2)))
            continue
        frame, used = _FRAME.search(line), _USED.search(line)
        if frame and kernels:
            sizes = [int(item) for item in frame.groups()]
            last = kernels[-1]
            kernels[-1] = replace(
                last,
                stack=max(last.stack, sizes[0]),
                spill_stores=max(last.spill_stores, sizes[1]),
                spill_loads=max(last.spill_loads, sizes[2]),
            )
        elif used and kernels:
            kernels[-1] = replace(
                kernels[-1],
                registers=int(used.group(1)),
                barriers=_number(_BARRIERS, line),
                static_smem=_number(_SMEM, line),
            )
        elif line.strip() and not _FUNCTION.search(line) and not _is_chatter(line):
            other.append(line)
    return kernels, other


def _is_chatter(line: str) -> bool:
    return (
        "ptxas info" in line
        and not FATAL_WARNING.search(line)
        and ("bytes gmem" in line or "Compile time" in line)
    )


def _number(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match.group(1)) if match else 0


def demangle(kernels: list[KernelResources]) -> list[KernelResources]:
    """Adds readable names; without c++filt the symbols stand in for them."""
    symbols = "\n".join(item.symbol for item in kernels)
    try:
        done = subprocess.run(["c++filt"], input=symbols, capture_output=True, text=True, check=True)
        names = done.stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        names = symbols.splitlines()
    return [replace(item, name=name) for item, name in zip(kernels, names, strict=True)]


def violations(kernels: list[KernelResources], warnings: list[str]) -> list[str]:
    """What must not be shipped, one line each."""
    found = []
    for item in kernels:
        if item.misuses_memory:
            found.append(
                f"{item.source} for {item.arch}: {item.stack} bytes of stack, {item.spill_stores} / "
                f"{item.spill_loads} bytes of spill stores / loads in {item.name or item.symbol}"
            )
    found += [line.strip() for line in warnings if FATAL_WARNING.search(line)]
    return found
