"""Prepares the environment that `make` runs in, and prints the path of its interpreter.

    python3 csrc/build_backend/prepare.py [--venv auto|system|FOLDER] [--extras NAME ...]
                                          [--modules NAME ...]

``auto`` uses .venv: it is made, and filled with the pinned torch and the extras of pyproject.toml that are
asked for, on the first run and reused afterwards. Only where no package index can be reached and python3
already has a CUDA build of torch does it use that python3 as it is; ``system`` asks for this outright.
Standard output carries the path alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from build_backend import environment, pins  # noqa: E402

STAMP = "flash_ext-requirements.json"
# A second transformers, for tests/integrations/test_versions.py, in a folder that no interpreter looks into.
OTHER_TRANSFORMERS = "flash_ext-other-transformers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default="auto", help="auto, system, or the folder of a virtual environment")
    parser.add_argument("--extras", nargs="*", default=[], help="of pyproject.toml, that a venv must have")
    parser.add_argument("--modules", nargs="*", default=[], help="what a python3 used as it is must have")
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)  # inside the venv, by itself
    args = parser.parse_args()
    try:
        if args.fill:
            fill(args.extras)
        else:
            print(interpreter(args.venv, args.extras, args.modules))
    except environment.BuildProblem as problem:
        raise SystemExit(f"\n{problem}") from None


def interpreter(venv: str, extras: list[str], modules: list[str]) -> Path:
    if sys.version_info < (3, 10):  # noqa: UP036  (this script may be started by any python3)
        raise environment.BuildProblem(
            "Python is too old",
            sys.version.split()[0],
            "Python 3.10 or newer",
            "apt-get install python3, or make PYTHON=/path/to/python3",
        )
    folder = pins.ROOT / (".venv" if venv == "auto" else venv)
    if venv == "system" or (venv == "auto" and not (folder / STAMP).is_file() and must_use_system()):
        check_system(modules)
        return Path(sys.executable)
    python = folder / "bin" / "python"
    if not python.exists():
        make_venv(folder)
    subprocess_or_exit([str(python), __file__, "--fill", "--extras", *extras])
    return python


def must_use_system() -> bool:
    torch = environment.find_torch()
    if torch is None or torch.cuda is None or reaches_index():
        return False
    say(f"no package index can be reached: using {sys.executable} with torch {torch.version} as it is")
    return True


def reaches_index() -> bool:
    """Whether pip can fetch a package; a small one that every build needs is tried."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--no-cache-dir",
                "--retries",
                "0",
                "--timeout",
                "8",
                "--dest",
                folder,
                "ninja",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    return done.returncode == 0


def check_system(modules: list[str]) -> None:
    """Refuses a python3 without a fitting torch, ninja, or one of the modules that are wanted."""
    environment.check_torch(environment.find_torch())
    environment.find_ninja()
    wanted = ["setuptools", *modules]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise environment.BuildProblem(
            "this Python lacks modules",
            f"{sys.executable} has no {', '.join(missing)}",
            ", ".join(wanted),
            f"{sys.executable} -m pip install {' '.join(missing)} (or leave VENV=system out)",
        )


def make_venv(folder: Path) -> None:
    say(f"making {folder}")
    done = subprocess.run(
        [sys.executable, "-m", "venv", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        number = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise environment.BuildProblem(
            "no virtual environment can be made",
            " ".join(done.stdout.split())[:300],
            "a Python whose virtual environments have pip",
            f"apt-get install python{number}-venv",
        )


def fill(extras: list[str]) -> None:
    """Installs what is missing into the environment this runs in; what its stamp lists is there."""
    project = pins.pyproject()
    wanted = [pins.torch_requirement(), *project["build-system"]["requires"]]
    wanted += [item for extra in extras for item in project["project"]["optional-dependencies"][extra]]
    stamp = Path(sys.prefix) / STAMP
    known = installed(stamp)
    missing = [item for item in wanted if item not in known]
    if environment.find_toolkit()[0] is None:
        missing.append(pins.toolkit_requirement(beside=pins.torch_requirement()))
    if missing:
        say(f"installing into {sys.prefix}, some minutes on a slow line: {', '.join(missing)}")
        install(*dict.fromkeys([*wanted, *missing]))
    if "test" in extras:
        wanted.append(other_transformers(known))
    names = {name_of(item) for item in wanted}
    known = {item for item in known if name_of(item) not in names} | set(wanted)
    stamp.write_text(json.dumps({"python": sys.version.split()[0], "installed": sorted(known)}))


def other_transformers(known: set[str]) -> str:
    """A second one, which conflicts with that of the tests, in its own folder; what the stamp says of it."""
    wanted = f"transformers=={pins.pin('transformers-other')}"
    record = f"{OTHER_TRANSFORMERS}: {wanted}"
    if record not in known:
        folder = Path(sys.prefix) / OTHER_TRANSFORMERS
        say(f"installing into {folder}, for tests: {wanted}")
        shutil.rmtree(folder, ignore_errors=True)
        install("--no-warn-conflicts", "--target", str(folder), wanted)
    return record


def installed(stamp: Path) -> set[str]:
    """The requirements that this Python's environment was filled with."""
    record = json.loads(stamp.read_text()) if stamp.is_file() else {}
    return set(record.get("installed", ())) if record.get("python") == sys.version.split()[0] else set()


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group().lower()


def install(*what: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
            *what,
        ],
        stdout=sys.stderr,
        check=False,
    )
    if done.returncode:
        raise environment.BuildProblem(
            "pip could not install what is needed",
            "its words are above",
            "a package index that pip can reach, or a python3 that has them all",
            "make test VENV=system (uses python3's own torch)",
        )


def subprocess_or_exit(command: list[str]) -> None:
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
