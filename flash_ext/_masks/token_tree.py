"""The mask of speculative decoding: which of a sequence's newest tokens each of them sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .atoms import _check_bool, _check_integers, _read
from .value import Mask, Points, Sizes, in_words

MOST_TOKENS = 64  # bits of a word


class TokenTree(Mask):
    """A tree of tokens at the end of each sequence: all see the keys before it, and of it what words say.

    It is for calls over a cache alone, whose last n keys are those of the n <= 64 rows of a sequence. There
    it takes the place of ``causal``. It is not combined with other masks.

    Source: SpecInfer, Miao et al. 2023, https://arxiv.org/abs/2305.09781.

    Args:
        words: (batch, n) int64, where batch may be 1 or left out: bit j of the word of a row says whether it
            sees key j of the n. Packed: (total_q,), or (batch or 1, n) where each sequence has n rows.

    Example:
        >>> tree = flash_ext.masks.TokenTree.from_parents(torch.tensor([-1, 0, 0]))
        >>> tree.to_dense(3, 4)[0, 0].int().tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """

    __slots__ = ("words",)
    _FIELDS = _CHILDREN = ("words",)
    words: Tensor

    def __init__(self, words: Tensor) -> None:
        if isinstance(words, Tensor) and words.dtype != torch.int64:
            cure = " A bool tensor goes into TokenTree.from_bool." if words.dtype == torch.bool else ""
            raise TypeError(f"words must be torch.int64, got {in_words(words)}.{cure}")
        _check_integers(words, "words", 1, 2, "(batch, n) or (n,), packed (total_q,)")
        if words.dim() == 2:
            _check_count(words.shape[1], words)
        self._fill(words)

    @classmethod
    def from_bool(cls, shown: Tensor) -> TokenTree:
        """From pairs of a row and a key that are True.

        Args:
            shown: (batch, n, n) or (n, n) bool, n at most 64.
        """
        _check_bool(shown, "shown", 2, 3, "(batch, n, n) or (n, n)")
        n = shown.shape[-1]
        if shown.shape[-2] != n:
            raise ValueError(f"shown must have a shape (batch, n, n) or (n, n), got {tuple(shown.shape)}.")
        _check_count(n, shown)
        return cls((shown.long() << torch.arange(n, device=shown.device)).sum(-1))

    @classmethod
    def from_parents(cls, parents: Tensor) -> TokenTree:
        """Each token sees itself and its ancestors.

        Args:
            parents: (batch, n) or (n,) integers, n at most 64: for each token the number of its parent among
                the n, in any order. A number that is none of theirs, as -1, makes it a root.
        """
        _check_integers(parents, "parents", 1, 2, "(batch, n) or (n,)")
        n = parents.shape[-1]
        _check_count(n, parents)
        words = (
            torch.ones_like(parents, dtype=torch.int64) << torch.arange(n, device=parents.device)
        ).clone()
        above = parents.long()
        for _ in range((MOST_TOKENS - 1).bit_length()):  # twice as many generations each time
            has_one = (above >= 0) & (above < n)
            at = above.where(has_one, 0)
            words = words | words.gather(-1, at).where(has_one, 0)
            above = above.gather(-1, at).where(has_one, -1)
        return cls(words)

    def of_rows(self, sizes: Sizes) -> Tensor:
        """A word for each row of a call: (total_q,), or (batch, q_len) where nothing is packed."""
        self._check(sizes)
        words = self.words
        if words.dim() == 1 and sizes.packed:
            return words.contiguous()
        words = words.expand(sizes.batch, words.shape[-1]).contiguous()
        return words.view(-1) if sizes.packed else words

    def _rule(self, points: Points) -> Tensor:
        if points.packed:
            flat = self.words.reshape(-1)
            word = flat[points.row_at % max(flat.shape[0], 1)]
        else:
            word = _read(self.words, points.b, points.row, trailing=1)
        bit = points.key - (points.k_len - points.q_len)
        return sees(word, bit)

    def _lead(self, packed: bool) -> tuple[int, int]:
        return (self.words.shape[0] if self.words.dim() == 2 and not packed else 1), 1

    def _check(self, sizes: Sizes) -> None:
        given = tuple(self.words.shape)
        each = given[-1] * sizes.batch if sizes.packed and len(given) == 2 else given[-1]
        # Not by `in`: a compiler finds no symbol among numbers that it is equal to.
        if each != sizes.q_len or (len(given) == 2 and given[0] != 1 and given[0] != sizes.batch):
            wanted = (
                f"(total_q,) = ({sizes.q_len},), or (batch, n) where each of {sizes.batch} sequences has "
                "n rows"
                if sizes.packed
                else f"(batch, q_len) = {(sizes.batch, sizes.q_len)}, where batch may be 1 or left out"
            )
            raise ValueError(f"TokenTree: words must have shape {wanted}, got {given}.")
        if not sizes.packed:
            _check_count(given[-1], self.words)


def sees(words: Tensor, bit: Tensor) -> Tensor:
    """Whether rows see the keys of these bits; below 0: keys before the tree. All shapes broadcast."""
    return (bit < 0) | ((bit < MOST_TOKENS) & (words >> bit.clamp(0, MOST_TOKENS - 1) & 1).bool())


def _check_count(n: Any, tensor: Tensor) -> None:
    if n > MOST_TOKENS:
        raise ValueError(
            f"a TokenTree has at most {MOST_TOKENS} tokens a sequence, a bit for each, got shape "
            f"{tuple(tensor.shape)}."
        )
