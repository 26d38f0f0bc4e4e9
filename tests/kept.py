"""What takes long to make and depends on files alone, kept by their content in the store of compiled objects.

A test that disassembles the module, or compiles a program, looks here first. ``FLASH_EXT_CACHE=off`` makes
everything again, as it does for builds.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import cache  # noqa: E402


def kept(what: str, parts: list[bytes], make: Callable[[], bytes]) -> bytes:
    """What ``make`` returned when it last met these parts. ``what`` names it, and its form: change both."""
    store, _ = cache.folder()
    if store is None:
        return make()
    digests = [hashlib.sha256(part).hexdigest() for part in (what.encode(), *parts)]
    name = hashlib.sha256("".join(digests).encode()).hexdigest()
    entry = store / name[:2] / f"{name}.kept"
    try:
        digest, _, body = entry.read_bytes().partition(b"\n")
        if digest.decode() == hashlib.sha256(body).hexdigest():
            os.utime(entry)  # the store forgets what nobody has used for longest
            return body
    except (OSError, UnicodeDecodeError):
        pass
    body = make()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        made.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        try:
            cache.place(made, entry)
        except OSError as problem:  # a full disk is no fault of the test
            print(f"{what} is not kept: {problem}", file=sys.stderr)
    return body


def compiled(command: list[str], made: Path) -> subprocess.CompletedProcess[str]:
    """Runs a C++ compiler's command, which names everything but what it makes, or copies what it made before.

    Known by the sources behind their preprocessor: the folders they are in have new names each time.
    """
    read = subprocess.run([*command, "-E", "-P"], capture_output=True, check=False)
    if read.returncode:
        said = read.stderr.decode(errors="replace")
        return subprocess.CompletedProcess(command, read.returncode, "", said)

    def make() -> bytes:
        subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=True)
        return made.read_bytes()

    version = subprocess.run([command[0], "-v"], capture_output=True, check=True).stderr
    flags = [item for item in command if item.startswith("-") and item[:2] not in ("-I", "-L")]
    try:
        body = kept("compiled 1", [version, *(flag.encode() for flag in flags), read.stdout], make)
    except subprocess.CalledProcessError as failed:
        return subprocess.CompletedProcess(command, failed.returncode, failed.stdout, failed.stderr)
    made.write_bytes(body)
    made.chmod(0o755)
    return subprocess.CompletedProcess(command, 0, "", "")
