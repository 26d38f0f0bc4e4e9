"""Where the compiled module and the tools that read it are."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from flash_ext._ops import library as ops


def module_file() -> Path:
    """The extension module that is loaded."""
    return Path(ops._C.__file__)


def disassemblers() -> Path | None:
    """A folder with cuobjdump and nvdisasm: pip's, else one on PATH, else the toolkit's."""
    on_path = shutil.which("cuobjdump")
    candidates = [Path(sysconfig.get_path("platlib")) / "nvidia/cu13/bin", Path("/usr/local/cuda/bin")]
    if on_path:
        candidates.insert(1, Path(on_path).parent)
    for folder in candidates:
        if (folder / "cuobjdump").is_file() and (folder / "nvdisasm").is_file():
            return folder
    return None
