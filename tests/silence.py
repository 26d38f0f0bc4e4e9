"""What ends a test that hangs, and how the run still says which one it was.

A kernel that never ends makes every process that shares its GPU crawl, so that a limit on the length of a
test ends other ones as well: in a run of twelve processes it ended two, without a word of theirs, and what
replaced them ended the run (KeyError in pytest-xdist 3.8). Here the limit stands on silence: a test, and in
it each case, has to come to an end of its own. Who does not is ended with its process, since nothing less
ends its kernel; after that the others have more time, and another process runs the rest.

Each process keeps a note of the test and the case that it is in. Whatever ends the process, be it a hang, a
crash or a lost CUDA context, leaves the note, so that the report has the line that repeats the case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

# Beside 14 other processes the longest test without cases took 40 s; all kernels compiled from PTX, a minute.
GPU_SECONDS = 120.0
OTHER_SECONDS = 300.0  # beside a GPU: tests that need none build and install
DEAF_SECONDS = 30.0  # so much later where a hang keeps the interpreter's lock as well
REPLACED_PROCESSES = "3"  # in one run; one more ends it


class Watch:
    """The test and the case that this process runs, and since when."""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        self.note = Path()
        self.case = ""
        self.seconds = self.since = 0.0
        self.thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, item: pytest.Item, seconds: float, note: Path) -> Iterator[None]:
        """Inside, ``seconds`` without a sign of life end the process."""
        self.note, self.seconds, self.item = note, seconds, item
        self.alive("")
        if self.thread is None:
            self.thread = threading.Thread(target=self._listen, name="tests.silence", daemon=True)
            self.thread.start()
        try:
            yield
        finally:
            self.item = None
            faulthandler.cancel_dump_traceback_later()
            note.unlink(missing_ok=True)

    def alive(self, case: str) -> None:
        """A case begins, or has ended (""). Nothing where no test is watched."""
        if self.item is not None:
            self.case, self.since = case, time.monotonic()
            self.note.write_text(json.dumps({"test": self.item.nodeid, "case": case}))

    def _listen(self) -> None:
        while True:
            time.sleep(min(1.0, self.seconds / 4))
            if self.item is None:
                continue
            silent = time.monotonic() - self.since
            if silent > self.seconds and not self._another_has_just_been_ended():
                self.end_process(f"nothing came to an end in {silent:.0f} s")
            faulthandler.dump_traceback_later(self.seconds + DEAF_SECONDS, exit=True, file=sys.__stderr__)
            if self.item is None:  # it ended in between
                faulthandler.cancel_dump_traceback_later()

    def _another_has_just_been_ended(self) -> bool:
        """Then its kernel may have been what kept this process waiting: half of the time once more."""
        ended = [time.time() - path.stat().st_mtime for path in self.note.parent.glob("*.ended")]
        if min(ended, default=self.seconds) > self.seconds / 2:
            return False
        self.since = time.monotonic() - self.seconds / 2
        return True

    def end_process(self, why: str) -> NoReturn:
        """Ends the process with the name of its test, the line that repeats its case, and all stacks."""
        assert self.item is not None
        words = {"test": self.item.nodeid, "case": self.case, "why": why}
        self.note.with_suffix(".ended").touch()
        self.note.write_text(json.dumps(words))
        if capture := self.item.config.pluginmanager.getplugin("capturemanager"):
            capture.suspend_global_capture(in_=True)
        print(f"\n{in_words(words)}", file=sys.__stderr__, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        os._exit(3)


WATCH = Watch()


def lose_context(words: str) -> NoReturn:
    """The CUDA context is lost: no later test of this process would mean anything.

    One process of several is replaced: pytest.exit() in it would end them all with an INTERNALERROR.
    """
    if WATCH.item is not None and hasattr(WATCH.item.config, "workerinput"):
        WATCH.end_process(f"CUDA context lost in\n{words}")
    pytest.exit(f"CUDA context lost in\n{words}", returncode=3)


def in_words(note: dict[str, str]) -> str:
    return "\n    ".join(text for text in (note["test"], note["case"], note.get("why", "")) if text)


def note_of(room: Path, process: str) -> Path:
    return room / f"{process}.note"


def read(note: Path) -> dict[str, str]:
    """What a process last wrote; empty if nothing, or if it is just writing."""
    try:
        return json.loads(note.read_text())
    except (OSError, ValueError):
        return {}


def has_ended_another(item: pytest.Item, own: Path) -> bool:
    """Whether a process of this run was ended in this test: pytest-xdist then hands it to the next one.

    A run begins every test once, so a note of another process about it can only have been left behind.
    """
    return any(read(note).get("test") == item.nodeid for note in own.parent.glob("*.note") if note != own)


def scheduler(config: pytest.Config, log: object) -> object:
    """That of --dist loadgroup, with what pytest-xdist 3.8 lacks where one process replaces another.

    It sends tests to a process that has not collected them, and loses tests over the KeyError of that or ends
    with it; and it gives a process one test at first, which waits there for a second one for ever.
    """
    from xdist.scheduler import LoadGroupScheduling

    class Replacing(LoadGroupScheduling):
        def _reschedule(self, node) -> None:
            if node not in self.registered_collections:
                return
            super()._reschedule(node)
            if sum(not done for unit in self.assigned_work[node].values() for done in unit.values()) < 2:
                super()._reschedule(node)  # another one, or the word that there is none

    return Replacing(config, log)
