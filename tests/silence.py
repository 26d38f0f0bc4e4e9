"""Tests that end their process: which case they were in, and that no second process begins them again.

pytest-timeout ends a test that hangs, with its process, since nothing less ends its kernel; others crash, or
lose their CUDA context. Each process keeps a note of its test and its case, which outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

REPLACED_PROCESSES = "3"  # in one run; one more ends it


class Watch:
    """The test and the case that this process of several runs."""

    note: Path | None = None  # none: one process runs all tests
    test = ""

    def alive(self, case: str) -> None:
        """A case begins, or has ended ("")."""
        if self.note:
            write(self.note, {"test": self.test, "case": case})


WATCH = Watch()


def lose_context(words: str) -> NoReturn:
    """The CUDA context is lost: no later test of this process would mean anything.

    One process of several is replaced: pytest.exit() in it would end them all with an INTERNALERROR.
    """
    words = f"CUDA context lost in\n{words}"
    if WATCH.note:
        WATCH.alive(words)
        print(words, file=sys.__stderr__, flush=True)
        os._exit(3)
    pytest.exit(words, returncode=3)


def write(note: Path, words: dict[str, str]) -> None:
    """At once, since another process may be reading."""
    own = note.with_suffix(f".{os.getpid()}")
    own.write_text(json.dumps(words))
    own.replace(note)


def read(note: Path) -> dict[str, str]:
    """What was last written there; empty if nothing."""
    return json.loads(note.read_text()) if note.is_file() else {}


def has_ended_another(test: str, own: Path) -> bool:
    """Whether a process of this run was ended in this test: pytest-xdist then hands it to the next one."""
    return any(read(note).get("test") == test for note in own.parent.glob("*.note") if note != own)


def scheduler(config: pytest.Config, log: object, groups: Path) -> object:
    """That of --dist loadgroup, by the groups of a note: names of groups do not reach it with pytest 9.2.

    And with what pytest-xdist 3.8 lacks where one process replaces another: it sends tests to a process that
    has not collected them, and loses tests over the KeyError of that or ends with it; it gives a process
    one test at first, or what the ended one has done already, and waits for it for ever; and it ends where it
    sends tests to a process that has ended too, which it has not been told of.
    """
    from xdist.scheduler import LoadGroupScheduling

    group_of: dict[str, str] = {}

    class Replacing(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of.get(nodeid) or super()._split_scope(nodeid)

        def schedule(self) -> None:
            group_of.update(read(groups))  # all processes have collected
            super().schedule()

        def _assign_work_unit(self, node) -> None:
            with contextlib.suppress(OSError):  # what it has of work goes to others when its end is known
                super()._assign_work_unit(node)

        def _reschedule(self, node) -> None:
            if node not in self.registered_collections:
                return
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)  # another one, or the word that there is none

    return Replacing(config, log)
