"""A store of compiled objects that outlives build folders, and what ninja starts in place of a compiler.

    python cache.py SETTINGS KIND OBJECT -- COMPILER ARGUMENT ...

An object is known by what made it: the compilers' versions, the command, and the bytes of the source and of
every header that the compiler read. Where the store has it, it is copied; else the compiler runs, and what it
made is added. Paths are written relative to named roots (sources, toolkit, torch), so that a toolkit in a
temporary folder finds what an earlier one left. A header that appears in front of one that was read is not
noticed, here or by ninja.

SETTINGS is a JSON file that a build writes (compile.py): ``store``, a folder or null; ``roots``, folders by
name; ``identity``, a text for each KIND of compiler run. The compiler's words go to OBJECT.log, and to the
screen when it fails or, but for kernels, says anything. Needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 1  # of an entry; another one is not looked at
LIMIT = 512 * 2**20  # bytes in a store; a full build is 13 MB
HITS = "from_cache"  # in the build folder: a line for each object that was copied
KERNELS = "nvcc"  # the kind of run whose words are many and mean nothing wrong
# Compilers read these, too; headers found through them count by their bytes as any other.
VARIABLES = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
)


# ---------------------------------------------------------------- where it lies


def folder() -> tuple[Path | None, str]:
    """The store of this user, made when it is missing, or None and why there is none.

    FLASH_EXT_CACHE names another folder; ``off`` or ``0`` is none.
    """
    asked = os.environ.get("FLASH_EXT_CACHE", "")
    if asked.lower() in ("off", "0"):
        return None, ""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    try:
        home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        store = Path(asked).expanduser().absolute() if asked else home / "flash_ext"
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Objects of somebody else would become code of this user.
        if not asked and store.stat().st_uid != os.geteuid():
            return None, f"{store} belongs to another user"
        with tempfile.TemporaryFile(dir=store):
            return store, ""
    except (OSError, RuntimeError) as problem:
        return None, str(problem)


def trim(store: Path, limit: int = LIMIT) -> None:
    """Removes what was used longest ago, until the rest fits, and what a killed build left half written."""
    known = []
    for path in store.glob("*/*"):
        with contextlib.suppress(OSError):  # another build may have removed it
            state = path.stat()
            if path.name.endswith(".part") and time.time() - state.st_mtime > 86400:
                path.unlink()
            elif not path.name.endswith(".part"):
                known.append((state.st_mtime_ns, state.st_size, path))
    total = sum(size for _, size, _ in known)
    for _, size, path in sorted(known):
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


# ---------------------------------------------------------------- one object


class Run:
    """One compiler run: its name in the store, and what it needs to be found there or be added."""

    def __init__(self, settings: dict[str, Any], kind: str, made: str, command: list[str]) -> None:
        self.kind, self.made, self.command = kind, Path(made), command
        self.source = command[command.index("-c") + 1]
        # The longest first: one root may lie in another.
        self.roots = sorted(settings["roots"].items(), key=lambda item: -len(item[1]))
        self.identity = settings["identity"][kind]
        # What such a flag means is the processor's matter.
        depends_on_machine = any("=native" in item for item in command)
        self.store = Path(settings["store"]) if settings["store"] and not depends_on_machine else None

    def start(self) -> int:
        """Copies or compiles; the status is the compiler's."""
        if self.store is None:
            return self.compile()
        name = self.name()
        if self.copied(name):
            with open(HITS, "a", encoding="utf-8") as hits:
                hits.write(f"{self.made}\n")
            return 0
        started = time.time_ns()
        status = self.compile()
        if status == 0:
            try:
                self.add(name, started)
            except OSError as problem:
                print(f"{self.made} is not kept: {problem}", file=sys.stderr)
        return status

    def compile(self) -> int:
        with open(f"{self.made}.log", "wb") as log:
            done = subprocess.run(self.command, stdout=log, stderr=subprocess.STDOUT, check=False)
        self.show(done.returncode)
        return done.returncode

    def show(self, status: int = 0) -> None:
        if status or self.kind != KERNELS:
            sys.stdout.write(Path(f"{self.made}.log").read_text(encoding="utf-8", errors="replace"))

    def name(self) -> str:
        """Of all that is known before the compiler has named its headers."""
        parts = [
            FORMAT,
            self.identity,
            [os.environ.get(item, "") for item in VARIABLES],
            [self.short(item) for item in self.command],
            content(self.source),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def short(self, text: str) -> str:
        """With roots by name."""
        for name, root in self.roots:
            text = re.sub(re.escape(root) + r"(?=/|$)", f"${name}", text)
        return text

    def long(self, text: str) -> str:
        name, slash, rest = text.partition("/")
        return dict(self.roots)[name[1:]] + slash + rest if name.startswith("$") else text

    def copied(self, name: str) -> bool:
        """Whether an entry has read the same headers; its object, log and dependencies then lie here."""
        for path in self.entries(name):
            try:
                head, _, body = path.read_bytes().partition(b"\n")
                entry = json.loads(head)
                if hashlib.sha256(body).hexdigest() != entry["sha256"]:
                    path.unlink()  # half a disk's write, or another accident
                    continue
                headers = {self.long(item): digest for item, digest in entry["dependencies"].items()}
                if any(content(item) != digest for item, digest in headers.items()):
                    continue
                os.utime(path)
            except (OSError, ValueError, KeyError):
                continue
            size = entry["object"]
            Path(f"{self.made}.log").write_bytes(body[size:])
            rule = " ".join([f"{self.made}:", *map(escaped, headers)])
            Path(f"{self.made}.d").write_text(rule + "\n", encoding="utf-8")
            self.made.unlink(missing_ok=True)
            self.made.write_bytes(body[:size])
            self.show()
            return True
        return False

    def entries(self, name: str) -> list[Path]:
        """The newest first."""
        assert self.store is not None
        found = []
        for path in (self.store / name[:2]).glob(f"{name}-*"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found, reverse=True)]

    def add(self, name: str, started: int) -> None:
        """Keeps what the compiler made; not if a file has changed since it started."""
        assert self.store is not None
        read = list(dependencies(Path(f"{self.made}.d").read_text(encoding="utf-8")))
        headers = {self.short(item): content(item) for item in read}
        if any(os.stat(item).st_mtime_ns >= started for item in read):
            return
        made = self.made.read_bytes()
        body = made + Path(f"{self.made}.log").read_bytes()
        entry = {"object": len(made), "sha256": hashlib.sha256(body).hexdigest(), "dependencies": headers}
        which = hashlib.sha256(json.dumps(headers, sort_keys=True).encode()).hexdigest()[:16]
        target = self.store / name[:2] / f"{name}-{which}"
        target.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".part", delete=False) as part:
            try:
                part.write(json.dumps(entry).encode() + b"\n" + body)
                part.flush()
                os.replace(part.name, target)  # a build beside this one sees all of it or nothing
            except OSError:
                os.unlink(part.name)
                raise


def place(made: Path, target: Path) -> None:
    """Copies a file to where others look for it: they find all of it, or what was there before.

    A process that has the old one loaded keeps it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(made, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def content(path: str) -> str:
    """The hash of a file, or of nothing where it is gone."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def dependencies(rule: str) -> Iterator[str]:
    """The files behind the colon of a makefile's rule."""
    behind = rule.replace("\\\n", " ").partition(": ")[2]
    for item in dict.fromkeys(re.findall(r"(?:\\.|[^\s\\])+", behind)):
        yield re.sub(r"\\(.)", r"\1", item).replace("$$", "$")


def escaped(path: str) -> str:
    return re.sub(r"([ #\\])", r"\\\1", path).replace("$", "$$")


if __name__ == "__main__":
    at = sys.argv.index("--")
    written = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    raise SystemExit(Run(written, *sys.argv[2:at], sys.argv[at + 1 :]).start())
