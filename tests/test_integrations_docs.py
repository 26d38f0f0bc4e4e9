"""Every Python example of docs/integrations, each page in a process of its own.

The pages change what PyTorch and other libraries call; a process of its own leaves the other tests alone.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import INTEGRATIONS, ROOT, code_blocks

# Modules a page needs besides torch.
NEEDS = {"transformers.md": "transformers"}


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    module = NEEDS.get(path.name)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    blocks = code_blocks(path, "python")
    assert blocks, "a page without an example"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
