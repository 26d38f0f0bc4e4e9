"""What is compiled, and with which tools: the switches of a build, the flags that follow, the programs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import archs, environment

LEFT_OUT = "-DFLASH_EXT_LEFT_OUT"  # csrc/call.h

# Compressed for size: line tables would otherwise make up nine tenths of a module that has them. A switch
# that misses a member of its enum is an error: a new element type is then asked for everywhere it matters.
# -O2 is of the host's code, as in CXX_FLAGS: nvcc hands no level to the compilers of the kernels.
NVCC_FLAGS = [
    "-std=c++20",
    "-O2",
    "--compress-mode=size",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-g0,-Wswitch,-Werror=switch",
]
CXX_FLAGS = [
    "-std=c++20",
    "-O2",
    "-g0",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror=switch",
    "-DTORCH_EXTENSION_NAME=_C",
]


def _is_set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


@dataclass(frozen=True)
class Variant:
    """What is compiled: architectures, switches, and which planted bug. Each variant has its own objects."""

    archs: tuple[str, ...]
    debug: bool = False
    mutant: int | None = None
    lineinfo: bool = False

    @classmethod
    def from_environment(cls) -> Variant:
        mutant = os.environ.get("FLASH_EXT_MUTANT") or None
        number = int(mutant) if mutant else None
        return cls(archs.chosen(), _is_set("FLASH_EXT_DEBUG"), number, _is_set("FLASH_EXT_LINEINFO"))

    @property
    def name(self) -> str:
        return f"mutant{self.mutant}" if self.mutant is not None else "debug" if self.debug else "release"

    @property
    def nvcc_flags(self) -> list[str]:
        return self.common_nvcc_flags + self.gencode(self.archs)

    @property
    def common_nvcc_flags(self) -> list[str]:
        return NVCC_FLAGS + (["-lineinfo"] if self.lineinfo else [])

    def gencode_of(self, source: Path) -> list[str]:
        """Kernels, or tiles of portable ones, that only Hopper has the means for are compiled for it alone.

        And the small tiles of portable kernels for all others alone, since Hopper takes the large ones. Each
        of these kernels twice made a third of a build's time. In a build without Hopper its kernels are left
        out (csrc/call.h).
        """
        if "_sm90" in source.stem or "_sm80_large" in source.stem:
            if "9.0a" not in self.archs:
                return [LEFT_OUT, *self.gencode(self.archs[:1])]
            own = ("9.0a",)
        elif "_sm80" in source.stem:
            own = tuple(arch for arch in self.archs if arch != "9.0a")
        else:
            own = ()
        return self.gencode(own or self.archs)

    @staticmethod
    def gencode(archs: tuple[str, ...]) -> list[str]:
        flags = []
        for arch in archs:
            number = arch.removesuffix("+PTX").replace(".", "")
            kind = "compute" if arch.endswith("+PTX") else "sm"
            flags.append(f"-gencode=arch=compute_{number},code={kind}_{number}")
        return flags

    @property
    def holds_paths(self) -> bool:
        """Whether objects name the folder that they were compiled in, by line tables or assertions."""
        return self.lineinfo or self.debug

    @property
    def defines(self) -> list[str]:
        return ["-DFLASH_EXT_DEBUG=1"] if self.debug else []


@dataclass(frozen=True)
class Tools:
    """Everything the graph refers to; found once, in words when something is missing."""

    torch: environment.TorchInstall
    toolkit: environment.Toolkit
    cxx: str
    ninja: str
    python_include: Path

    @classmethod
    def find(cls) -> Tools:
        environment.check_platform()
        torch = environment.check_torch(environment.find_torch())
        toolkit = environment.check_toolkit()
        return cls(
            torch,
            toolkit,
            environment.check_host_compiler(toolkit),
            environment.find_ninja(),
            environment.check_python_headers(),
        )
