"""Text for the demo: Python sources cut into documents, and documents packed one after the other.

A document is a function, a method or the head of a class or module, so lengths differ by a factor of a
hundred. It starts with the byte 0, which says where to begin when text is generated.
"""

from __future__ import annotations

import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

NUM_BYTES = 256
DOCUMENT_START = b"\0"
# Where a document ends and the next begins: before a class, and before a function or a method.
BOUNDARY = re.compile(rb"^(?=(?: {4})?(?:(?:async )?def|class) )", re.MULTILINE)
HELD_OUT_EVERY = 20


@dataclass(frozen=True)
class Text:
    """Documents to train on, and those of other files, kept back to judge with."""

    training: list[bytes]
    held_out: list[bytes]
    num_files: int
    source: Path

    @property
    def num_bytes(self) -> int:
        """Size of the documents to train on."""
        return sum(map(len, self.training))


@dataclass(frozen=True)
class Pack:
    """Documents one after the other without padding.

    Attributes:
        tokens: (total,) int64, one per byte.
        targets: (total,) int64, the byte that follows each.
        positions: (total,) int64, counted from the start of each document.
        cu_seqlens: (documents + 1,) int32, where each document starts and where the last one ends.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor

    @property
    def total(self) -> int:
        """Rows of the pack."""
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device."""
        return Pack(*(x.to(device) for x in (self.tokens, self.targets, self.positions, self.cu_seqlens)))


def standard_library() -> Path:
    """The folder with the sources of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(folder: Path) -> Text:
    """Cuts every ``*.py`` directly in ``folder`` into documents; one file in twenty is held out.

    Raises:
        FileNotFoundError: fewer than two such files, as in an installation without sources.
    """
    paths = sorted(folder.glob("*.py"))
    training: list[bytes] = []
    held_out: list[bytes] = []
    for number, path in enumerate(paths, start=1):
        pieces = BOUNDARY.split(path.read_bytes())
        side = held_out if number % HELD_OUT_EVERY == 0 or number == len(paths) else training
        side += [DOCUMENT_START + piece for piece in pieces if piece.strip()]
    if not training or not held_out:
        raise FileNotFoundError(
            f"need at least two Python files with text in {folder}, found {len(paths)}; "
            "name another folder with --text FOLDER"
        )
    return Text(training, held_out, len(paths), folder)


def draw_pack(documents: list[bytes], total: int, longest: int, rng: random.Random) -> Pack:
    """Documents drawn at random until ``total`` tokens are full; the last one is cut to fit.

    Args:
        documents: each with at least two bytes.
        longest: tokens taken from the front of a document at most.
    """
    tokens, targets, cu_seqlens = bytearray(), bytearray(), [0]
    while len(tokens) < total:
        document = rng.choice(documents)[: min(longest, total - len(tokens)) + 1]
        tokens += document[:-1]
        targets += document[1:]
        cu_seqlens.append(len(tokens))
    return pack_tokens(tokens, targets, cu_seqlens)


def pack_tokens(tokens: bytearray, targets: bytearray, cu_seqlens: list[int]) -> Pack:
    """The tensors of a :class:`Pack`, on the CPU."""
    bounds = torch.tensor(cu_seqlens)
    starts = bounds[:-1].repeat_interleave(bounds.diff())
    return Pack(
        tokens=torch.frombuffer(tokens, dtype=torch.uint8).long(),
        targets=torch.frombuffer(targets, dtype=torch.uint8).long(),
        positions=torch.arange(len(tokens)) - starts,
        cu_seqlens=bounds.int(),
    )
