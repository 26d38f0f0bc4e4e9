"""Every Python example of docs/integrations; the pages leave everything as it was."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.test_docs import INTEGRATIONS, ROOT, code_blocks, text_of

# Modules a page needs besides torch.
NEEDS = {"transformers.md": "transformers"}


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    module = NEEDS.get(path.name)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if path.name == "distributed.md" and not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    blocks = code_blocks(path, "python")
    assert blocks, "a page without an example"
    names: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)  # noqa: S102
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_the_readme_leads_to_every_page() -> None:
    readme = text_of(ROOT / "README.md")
    for path in INTEGRATIONS:
        assert f"({path.relative_to(ROOT).as_posix()})" in readme
