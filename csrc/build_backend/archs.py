"""Which GPUs a build is for: FLASH_EXT_ARCHS, else torch's TORCH_CUDA_ARCH_LIST, else all that are supported.

Both take what torch takes: numbers as 8.0, 9.0 or 9.0a, with +PTX for newer GPUs as well, and names as
Hopper; FLASH_EXT_ARCHS also ``native``, the GPUs of this machine. What comes out has one word for each thing
compiled: ``8.0`` is machine code, ``8.0+PTX`` is PTX alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from .environment import BuildProblem, Toolkit, find_torch, words_of

DEFAULT = "8.0 8.0+PTX 9.0a"
FORMS = "8.0 or newer, e.g. 8.0, 8.6+PTX, 9.0, Hopper, or native for the GPU that is here"
# As torch.utils.cpp_extension names them.
NAMES = {"ampere": "8.0 8.6+PTX", "ampere+tegra": "8.7", "ada": "8.9+PTX", "hopper": "9.0+PTX",
         "blackwell": "10.0 10.3 12.0 12.1+PTX", "blackwell+tegra": "11.0"}  # fmt: skip
OLD_NAMES = ("kepler", "kepler+tesla", "maxwell", "maxwell+tegra", "pascal", "pascal+tegra", "volta",
             "volta+tegra", "turing")  # fmt: skip


def chosen() -> tuple[str, ...]:
    """What to compile for, by the environment.

    Raises:
        BuildProblem: a word that means no architecture, none left that can run a kernel, or no GPU where the
            one that is here is asked for.
    """
    for variable in ("FLASH_EXT_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        if words := re.split(r"[\s;,]+", os.environ.get(variable, "").strip(" \t\n;,")):
            if words != [""]:
                return _read(variable, words)
    return tuple(DEFAULT.split())


def _read(variable: str, words: list[str]) -> tuple[str, ...]:
    ours = variable == "FLASH_EXT_ARCHS"
    found: list[str] = []
    too_old: list[str] = []
    for word in words:
        if word == "native" and ours:
            found += native()
            continue
        for part in NAMES.get(word.lower(), word).split():
            number = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", part)
            if number is None and word.lower() not in OLD_NAMES:
                raise BuildProblem(
                    f"{variable} is not understood", f"{variable} with {word!r}", FORMS, _mend(variable)
                )
            if number is None or int(number[1]) < 8:
                too_old.append(word)
            else:
                found += _words(f"{number[1]}.{number[2]}", number[3], bool(number[4]))
    # A list that is meant for every project may begin before our first GPU; one that is meant for us may not.
    if too_old and (ours or not found):
        raise BuildProblem(
            "no kernel runs before 8.0", f"{variable} with {too_old[0]!r}", FORMS, _mend(variable)
        )
    if too_old:
        print(f"{variable}: {' '.join(too_old)} left out, no kernel runs before 8.0", file=sys.stderr)
    return tuple(dict.fromkeys(found))


def _words(number: str, suffix: str, ptx: bool) -> Iterator[str]:
    """Machine code, and what serves newer GPUs."""
    # Hopper's kernels need the instructions that are no part of plain 9.0; PTX with them runs nowhere else.
    yield "9.0a" if number == "9.0" else number + suffix
    if ptx:
        yield "8.0+PTX" if number == "9.0" or suffix else f"{number}+PTX"


def check_compiler(toolkit: Toolkit, archs: tuple[str, ...]) -> None:
    """Refuses what this nvcc cannot compile for, before it tries.

    Raises:
        BuildProblem: it knows no such architecture.
    """
    known = re.findall(r"\bsm_(\d+)\b", words_of([str(toolkit.nvcc), "--list-gpu-code"]))
    for arch in archs:
        if known and re.sub(r"\D", "", arch) not in known:
            numbers = " ".join(f"{item[:-1]}.{item[-1]}" for item in known)
            raise BuildProblem(
                "the CUDA toolkit does not know an architecture",
                f"{arch}, and nvcc {toolkit.version}",
                f"one of {numbers}",
                _mend("TORCH_CUDA_ARCH_LIST"),
            )


def native() -> list[str]:
    """The part of the default build that the GPUs of this machine run."""
    torch = find_torch()
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from torch import cuda\n"
        "for i in range(cuda.device_count()): print('%d.%d' % cuda.get_device_capability(i))"
    )
    numbers = re.findall(
        r"^\s*(\d+\.\d+)\s*$",
        words_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]),
        re.M,
    )
    if not numbers and torch is not None:
        said = words_of([sys.executable, "-c", program, str(torch.root.parent)])
        numbers = re.findall(r"^(\d+\.\d+)$", said, re.M)
    majors = sorted({int(number.partition(".")[0]) for number in numbers})
    if not majors or majors[-1] < 8:
        found = f"GPUs of {', '.join(numbers)}" if majors else "none that nvidia-smi or torch sees"
        raise BuildProblem(
            "there is no GPU here to compile for",
            f"FLASH_EXT_ARCHS=native, and {found}",
            FORMS,
            _mend("FLASH_EXT_ARCHS"),
        )
    served = {8: "8.0", 9: "9.0a"}
    return [served.get(major, "8.0+PTX") for major in majors if major in served or major == majors[-1]]


def _mend(variable: str) -> str:
    return f"export FLASH_EXT_ARCHS='8.0+PTX 9.0', or unset {variable}"
