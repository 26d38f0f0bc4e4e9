"""The tests of the transformers integration with the other pinned version, in a process of its own.

That version is in a folder beside the environment's packages, where `make test` installs it, or where
FLASH_EXT_OTHER_TRANSFORMERS says. On a machine with a GPU the process runs the tests of that, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import pins, prepare  # noqa: E402

FOLDER = Path(
    os.environ.get("FLASH_EXT_OTHER_TRANSFORMERS") or Path(sys.prefix) / prepare.OTHER_TRANSFORMERS
).resolve()


@pytest.mark.slow
@pytest.mark.everywhere
def test_with_the_other_transformers(request: pytest.FixtureRequest) -> None:
    if not FOLDER.is_dir():
        pytest.skip("a second transformers is not here; make test installs it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    version = "import transformers; print(transformers.__version__)"
    found = subprocess.run([sys.executable, "-c", version], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == pins.pin("transformers-other"), found.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    names = ("transformers", "t5", "continuous_batching")
    modules = [f"tests/integrations/test_{name}.py" for name in names]
    done = subprocess.run(
        [*command, *modules], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
