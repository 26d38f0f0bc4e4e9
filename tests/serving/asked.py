"""Masks of every kind over a cache, and what each means for every pair of a query and a key."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec, default_scale
from flash_ext.masks import Dense, Documents, KeyMask, TokenTree
from tests.pages import Cache, close, run
from tests.reference import attention_reference


def fitted(t: Tensor, b: int, heads: int, rows: int, keys: int) -> Tensor:
    """(heads, rows, keys) of sequence b; where rows or keys end, False or 0."""
    t = t[(None,) * (4 - t.dim())]
    t = t[b if t.shape[0] > 1 else 0].expand(heads, -1, -1)
    found = t.new_zeros(heads, rows, keys)
    r, c = (size if own == 1 else min(size, own) for size, own in zip((rows, keys), t.shape[1:]))
    found[:, :r, :c] = t[:, : r if t.shape[1] > 1 else 1, : c if t.shape[2] > 1 else 1]
    return found


def fitted_keys(keep: Tensor, b: int, heads: int, rows: int, keys: int) -> Tensor:
    """The same of (batch, n) or (n,), where one key is one key."""
    own = keep if keep.dim() == 1 else keep[b if len(keep) > 1 else 0]
    found = own.new_zeros(keys)
    found[: len(own)] = own[:keys]
    return found.expand(heads, rows, keys)


def fitted_ids(ids: Tensor, ids_k: Tensor, b: int, heads: int, keys: int) -> Tensor:
    """The same of ids of the rows of a sequence, and of the keys of all."""
    own = ids_k if ids_k.dim() == 1 else ids_k[b if len(ids_k) > 1 else 0]
    of_keys = torch.full((keys,), -1, device=ids.device)
    of_keys[: len(own)] = own[:keys]
    return ((ids[:, None] == of_keys) & (of_keys >= 0)).expand(heads, len(ids), keys)


@dataclass
class Asked:
    """What a call is given, and what that is for a sequence of it.

    Attributes:
        options: of the call.
        shown: (b, rows, keys) to bool (heads, rows, keys).
        added: the same of what is added, None for nothing.
    """

    options: dict[str, Any]
    shown: Any = None
    added: Any = None

    def check(
        self, out: Tensor, lse: Tensor, q: list[Tensor], rows: list[tuple[Tensor, Tensor]], starts: list[int],
        rounded: bool = False,
    ) -> None:  # fmt: skip
        """Every sequence of a packed call, and zeros where there is none. ``rounded``: as in pages.check."""
        given = self.options
        left, right = given.get("window_size", (-1, -1))
        right = 0 if given.get("causal") else right
        inside = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
        for b, (own, (k, v), start) in enumerate(zip(q, rows, starts)):
            part = slice(start, start + len(own))
            inside[part] = True
            if not len(own):
                continue
            shown = None if self.shown is None else self.shown(b, len(own), len(k))[None]
            added = None if self.added is None else self.added(b, len(own), len(k))[None]
            mods = Modifiers(
                mask=shown, bias=added, sinks=given.get("sinks"), softcap=given.get("softcap", 0.0)
            )
            spec = AttnSpec(default_scale(own.shape[-1]), left, right)
            want, want_lse = attention_reference(own[None], k[None], v[None], spec, mods=mods)
            close(out[part], want[0], "out", rounded)
            close(lse[:, part], want_lse[0], "lse", rounded)
        assert not out[~inside].any() and (lse[:, ~inside] == -torch.inf).all()


# ---- trees ----------------------------------------------------------------------------------------------


def parents_of(n: int) -> list[int]:
    """A tree in which parents stand before their children, with roots of its own."""
    return [random.randrange(-1, i) for i in range(n)]


def path(parents: list[int], token: int) -> list[int]:
    """A token and its ancestors."""
    found = [token]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def shown_by(parents: list[int]) -> Tensor:
    """bool (n, n), a token at a time."""
    shown = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for token in range(len(parents)):
        shown[token, path(parents, token)] = True
    return shown


def over_keys(shown: Tensor, keys: int) -> Tensor:
    """The same over all keys of a sequence, of which the last ones are the tree's."""
    n = shown.shape[-1]
    whole = torch.ones(n, max(keys, n), dtype=torch.bool, device=shown.device)
    whole[:, max(keys, n) - n :] = shown
    return whole[:, max(keys, n) - keys :]


def words_of(trees: list[Tensor], outside: int, device: str) -> Tensor:
    """(total_q,) words, those of rows outside of all sequences too."""
    own = [TokenTree.from_bool(shown).words for shown in trees]
    edge = torch.full((outside,), -1)
    return torch.cat([edge, *own, edge]).to(device)


# ---- of every kind --------------------------------------------------------------------------------------

KINDS = (
    "keys", "one row of keys", "dense", "dense of heads", "documents", "keys and dense", "everything", "tree",
)  # fmt: skip


def of_trees(trees: list[Tensor], words: Tensor) -> Asked:
    """A tree for each sequence, bool (n, n)."""

    def shown(b: int, m: int, n: int) -> Tensor:
        return over_keys(trees[b].to(words.device), n)[None]

    return Asked({"mask": TokenTree(words)}, shown)


def ask(kind: str, counts: list[int], lengths: list[int], heads: int, device: str, outside: int = 0) -> Asked:
    """Masks that end before the longest sequence does, and of which each hides a half or a third.

    A tree is one of up to 64 tokens in each sequence, with roots of its own.
    """
    if kind == "tree":
        trees = [shown_by(parents_of(n)) for n in counts]
        return of_trees(trees, words_of(trees, outside, device))
    batch, rows, keys = len(counts), max(max(counts) - 1, 2), max(max(lengths) - 3, 2)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device) < 0.6

    keep = draw(keys) if kind == "one row of keys" else draw(batch, keys)
    dense = draw(batch, heads, rows, keys) if kind == "dense of heads" else draw(batch, 1, rows, keys)
    ids = torch.randint(-1, 3, (sum(counts) + 2 * outside,), device=device)
    ids_k = torch.randint(-1, 3, (batch, keys), device=device)
    start = torch.tensor([0, *counts]).cumsum(0) + outside

    def of_keys(b: int, m: int, n: int) -> Tensor:
        return fitted_keys(keep, b, heads, m, n)

    def of_pairs(b: int, m: int, n: int) -> Tensor:
        return fitted(dense, b, heads, m, n)

    def of_ids(b: int, m: int, n: int) -> Tensor:
        return fitted_ids(ids[start[b] : start[b + 1]], ids_k, b, heads, n)

    parts = {
        "keys": [(KeyMask(keep), of_keys)], "dense": [(Dense(dense), of_pairs)],
        "documents": [(Documents(ids, ids_k), of_ids)],
        "keys and dense": [(KeyMask(keep), of_keys), (Dense(dense), of_pairs)],
        "everything": [(Documents(ids, ids_k), of_ids), (KeyMask(keep), of_keys), (Dense(dense), of_pairs)],
    }  # fmt: skip
    chosen = parts[{"one row of keys": "keys", "dense of heads": "dense"}.get(kind, kind)]
    mask: Any = chosen[0][0]
    for value, _ in chosen[1:]:
        mask = mask & value

    def shown(b: int, m: int, n: int) -> Tensor:
        return torch.stack([rule(b, m, n) for _, rule in chosen]).all(0)

    return Asked({"mask": mask}, shown)


def call(
    q: Tensor, cache: Cache, bounds: Tensor, asked: Asked, each: list[Tensor], rounded: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs and checks."""
    out, lse = run(q, bounds, cache, **asked.options, **more)
    asked.check(out, lse, each, cache.rows, bounds.tolist(), rounded)
    return out, lse
