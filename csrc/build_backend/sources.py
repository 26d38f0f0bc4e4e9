"""The name of the kernel sources: a hash of all that the compilers read below csrc/.

A build writes it into the module; flash_ext/_ops/extension.py compares it with the sources beside the
package, and runs this file by its path, so it needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".cpp", ".cu", ".cuh", ".h")


def content_hash(csrc: Path) -> str:
    """The same for two folders whose sources have the same names and bytes."""
    total = hashlib.sha256()
    files = {path.relative_to(csrc).as_posix(): path for path in csrc.rglob("*") if path.suffix in SUFFIXES}
    for name in sorted(files):
        total.update(f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]
