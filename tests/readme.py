"""The README as a program: ``python -m tests.readme`` prints its lines as one shell script, in their order.

Lines of its ``sh`` blocks, and what its text names of our programs and of commands that install or
measure, are taken as they stand. Each Python block is added to a file in the folder, which is then run.
What measures a GPU takes hours: it is given none, and must end in words that say so. What compiles for
the GPU of the machine may say that there is none. .ci/run gives the script an empty environment.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
SAVED = "quickstart.py"
# A fenced block, or a command in the text.
STEP = re.compile(
    r"^```(\w*)\n(.*?)^```$"
    r"|`(python -m (?:flash_ext|bench)\.[^`\n]+|make bench"
    r"|(?:FLASH_EXT_ARCHS=native |uv )pip install [^`\n]+)`",
    re.M | re.S,
)
MEASURES = re.compile(r"make bench|python -m bench\.")
FOR_THIS_GPU = re.compile(r"FLASH_EXT_ARCHS=native ")
BEGINNING = """\
set -e
asks_for_a_gpu() {
  if said=$(CUDA_VISIBLE_DEVICES= bash -c "$1" 2>&1) || ! grep "no GPU is visible to torch" <<<"$said"; then
    printf '%s\\nwithout a GPU it did not say that it needs one: %s\\n' "$said" "$1"
    return 1
  fi
}
compiles_for_a_gpu() {
  if ! said=$(bash -c "$1" 2>&1) && ! grep "there is no GPU here to compile for" <<<"$said"; then
    printf '%s\\nit did not compile, and did not say that there is no GPU: %s\\n' "$said" "$1"
    return 1
  fi
}
uv() {
  type -P uv > /dev/null || pip install --quiet uv
  command uv "$@"
}
"""


def steps(text: str) -> list[tuple[str, str]]:
    """("sh", line) and ("python", block) in their order; a command that comes again is left out."""
    found: list[tuple[str, str]] = []
    for language, block, program in STEP.findall(text):
        if language == "python":
            found.append(("python", block))
        lines = block.splitlines() if language == "sh" else [program] if program else []
        known = {command_of(line) for kind, line in found if kind == "sh"}
        found += [("sh", line) for line in lines if line.strip() and command_of(line) not in known]
    return found


def command_of(line: str) -> str:
    return line.partition("  #")[0].strip()


def script(text: str) -> str:
    lines = [BEGINNING, f"rm -f {SAVED}"]
    for kind, step in steps(text):
        if kind == "python":
            lines += [f"cat >> {SAVED} <<'END'\n{step}END", f"echo '$ python {SAVED}'", f"python {SAVED}"]
            continue
        lines.append(f"echo {shlex.quote('$ ' + step)}")
        function = (
            "asks_for_a_gpu" if MEASURES.match(step)
            else "compiles_for_a_gpu" if FOR_THIS_GPU.match(step)
            else ""
        )  # fmt: skip
        lines.append(f"{function} {shlex.quote(step)}" if function else step)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(script(README.read_text(encoding="utf-8")))
