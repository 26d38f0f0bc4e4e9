"""Tells somebody who waits at a terminal what a build is doing, when the program that started it does not.

pip keeps the output of a build to itself unless it is called with -v; then each file has its line. Without,
one hint goes to the terminal that pip itself writes to. Where that is none, it goes with the rest.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 5.0  # seconds; with all objects in the cache a build is done before


@contextlib.contextmanager
def hint(folder: Path, planned: dict[str, float], jobs: int) -> Iterator[None]:
    """While its body compiles what is planned (seconds by object) in a folder: a hint, if that takes long."""
    done, started = threading.Event(), time.time()

    def wait() -> None:
        if not done.wait(PATIENCE):
            left = {name: planned[name] for name in planned if not _is_made(folder / name, started)}
            tell(words(left, jobs))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    try:
        yield
    finally:
        done.set()
        waiting.join()


def words(left: dict[str, float], jobs: int) -> str:
    kernels = sum(name.endswith(".cu.o") for name in left)
    minutes = max(1, round(sum(left.values()) / max(1, min(jobs, len(left))) / 60))
    return (
        f"flash_ext: compiling {kernels} files of CUDA kernels and {len(left) - kernels} of C++, {jobs} "
        f"at a time, takes about {minutes} min: every head size and type has its own kernels. "
        "pip install -v shows each file, FLASH_EXT_ARCHS=native compiles for this GPU alone."
    )


def tell(text: str) -> None:
    """Writes to the terminal of the program that reads our output; without one, to that output."""
    if sys.stdout.isatty():
        print(f"\n{text}", flush=True)  # ninja has a line there that it writes again and again
        return
    terminal = terminal_of_reader()
    if terminal is None:
        print(text, flush=True)
        return
    try:
        # Neither made ours nor waited for: the user may have stopped it.
        file = os.open(terminal, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return
    with contextlib.suppress(OSError):
        if os.isatty(file) and _in_foreground(file):
            os.write(file, f"\r\n  {text}\r\n".encode())
    os.close(file)


def terminal_of_reader() -> str | None:
    """Where the nearest process before us whose output is not ours writes, if that is a terminal."""
    try:
        own, process = os.readlink("/proc/self/fd/1"), os.getppid()
        for _ in range(8):
            output = os.readlink(f"/proc/{process}/fd/1")
            if output != own:
                return output if output.startswith(("/dev/pts/", "/dev/tty")) else None
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _in_foreground(terminal: int) -> bool:
    """Whether it is our controlling terminal and shows our job, not another one."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False


def _is_made(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime >= since - 1
    except OSError:
        return False
