"""What each row of the set ``features`` asks for: as our options, as a mask or bias, and as a rule.

Every visibility is one rule on index tensors. Peers get what it says as a dense mask or as a FlexAttention
function, and the work of a row is counted from it: visible pairs, and tiles with at least one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from bench.shapes import Case, document_lengths
from flash_ext import masks

# rule(b, h, row, col) -> bool and score(score, b, h, row, col) -> score, on index tensors that broadcast
# with each other: FlexAttention's mask_mod and score_mod.
Rule = Callable[[Any, Any, Any, Any], torch.Tensor]
ScoreRule = Callable[[Any, Any, Any, Any, Any], torch.Tensor]

SOFTCAP = 30.0
DROPOUT_P = 0.1
SINK_TOKENS = 4
BUCKETS = 32  # of a relative-position table, for distances up to 128, as models of the T5 family have it


@dataclass
class Asked:
    """One feature on the tensors of one case.

    Attributes:
        options: keywords of ``flash_ext.attention`` beyond those of the case, or in their place.
        learns: the option whose tensor gets a gradient in the backward; empty for q, k and v alone.
        value_of: makes that option of its tensor; None for the tensor itself.
        rule: visibility, causal and window included; None where every query sees every key.
        by_batch, by_head: whether the rule looks at b and at h.
        bias: what SDPA's ``attn_mask`` adds, (batch or 1, num_heads, seqlen_q, seqlen_k) in the dtype of q;
            None where nothing is added.
        score: for the tensor that is learned (or the option's own), FlexAttention's change of a score.
    """

    options: dict[str, Any] = field(default_factory=dict)
    learns: str = ""
    value_of: Callable[[torch.Tensor], Any] | None = None
    rule: Rule | None = None
    by_batch: bool = False
    by_head: bool = False
    bias: torch.Tensor | None = None
    score: Callable[[torch.Tensor | None], ScoreRule] | None = None

    @property
    def learned(self) -> torch.Tensor | None:
        """The tensor whose gradient is wanted beside those of q, k and v."""
        return pytree.tree_leaves(self.options[self.learns])[0] if self.learns else None

    def options_with(self, learned: torch.Tensor) -> dict[str, Any]:
        """The options with another tensor in the place of the learned one."""
        return self.options | {self.learns: self.value_of(learned) if self.value_of else learned}

    @property
    def option_bytes(self) -> int:
        """Bytes of the tensors that the options hold, each counted once."""
        tensors = {id(t): t for t in pytree.tree_leaves(self.options) if isinstance(t, torch.Tensor)}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    @property
    def learned_bytes(self) -> int:
        """Bytes of the gradient that comes beside those of q, k and v."""
        return 0 if self.learned is None else self.learned.numel() * self.learned.element_size()


# ---- rules -----------------------------------------------------------------------------------------------


def window_rule(case: Case) -> Rule | None:
    """The rule of a dense case's causal mask and window, aligned at the bottom right; None without either."""
    if not case.masked:
        return None
    shift, (left, right) = case.seqlen_k - case.seqlen_q, case.window

    def seen(b: Any, h: Any, row: Any, col: Any) -> torch.Tensor:
        aligned = row + shift
        visible = col >= 0
        if case.causal:
            visible = visible & (col <= aligned)
        if left >= 0:
            visible = visible & (col >= aligned - left)
        if right >= 0:
            visible = visible & (col <= aligned + right)
        return visible

    return seen


def dense_mask(
    case: Case, rule: Rule, device: torch.device, by_batch: bool = False, by_head: bool = False
) -> torch.Tensor:
    """Boolean (batch or 1, num_heads or 1, seqlen_q, seqlen_k), True where a query sees a key."""
    batch, heads = (case.batch if by_batch else 1), (case.num_heads if by_head else 1)
    seen = torch.stack(list(_masks(case, rule, device, batch, heads)))
    return seen.view(batch, heads, case.seqlen_q, case.seqlen_k)


def shared_mask(case: Case, asked: Asked, device: torch.device) -> torch.Tensor:
    """The same in 4 dimensions, each of which is 1 where the rule does not look at it."""
    batch, heads = (case.batch if asked.by_batch else 1), (case.num_heads if asked.by_head else 1)
    sizes = (batch, heads, case.seqlen_q, case.seqlen_k)
    b, h, row, col = (
        torch.arange(n, device=device).view([-1 if i == d else 1 for i in range(4)])
        for d, n in enumerate(sizes)
    )
    return (asked.rule or everything)(b, h, row, col)


def _masks(case: Case, rule: Rule, device: torch.device, batch: int, heads: int) -> Iterator[torch.Tensor]:
    """The mask (seqlen_q, seqlen_k) of each batch entry and head in turn, heads running faster."""
    row = torch.arange(case.seqlen_q, device=device)[:, None]
    col = torch.arange(case.seqlen_k, device=device)[None, :]
    for b in range(batch):
        for h in range(heads):
            index = (torch.tensor(at, device=device) for at in (b, h))
            yield rule(*index, row, col).expand(case.seqlen_q, case.seqlen_k)


@dataclass(frozen=True)
class Work:
    """How much of the score matrices of a case is scored, over all batch entries and heads.

    Attributes:
        pairs: visible (query, key) pairs.
        tiles: tiles of the asked size with at least one visible pair; 0 when no size was asked.
        tile_scores: scores in those tiles, the parts beyond the ends of a sequence left out.
    """

    pairs: int
    tiles: int = 0
    tile_scores: int = 0


def count_work(
    case: Case,
    rule: Rule | None,
    device: torch.device,
    *,
    by_batch: bool = False,
    by_head: bool = False,
    tile: tuple[int, int] | None = None,
) -> Work:
    """Counts pairs and visited tiles of a dense case by looking at every score.

    Args:
        rule: who sees whom; None is everybody everybody.
        by_batch, by_head: whether the rule looks at b and at h; what it does not look at is counted once.
        tile: (queries, keys) of a tile.
    """
    rows, cols = tile or (case.seqlen_q, case.seqlen_k)
    batch, heads = (case.batch if by_batch else 1), (case.num_heads if by_head else 1)
    row_sizes = _part_sizes(case.seqlen_q, rows, device)
    col_sizes = _part_sizes(case.seqlen_k, cols, device)
    sizes = row_sizes[:, None] * col_sizes[None, :]
    pairs = tiles = tile_scores = 0
    for seen in _masks(case, rule or everything, device, batch, heads):
        padded = F.pad(seen, (0, -case.seqlen_k % cols, 0, -case.seqlen_q % rows))
        visited = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).any(3).any(1)
        pairs += int(seen.sum())
        tiles += int(visited.sum())
        tile_scores += int((sizes * visited).sum())
    times = case.batch * case.num_heads // (batch * heads)
    if tile is None:
        return Work(times * pairs)
    return Work(times * pairs, times * tiles, times * tile_scores)


def everything(b: Any, h: Any, row: Any, col: Any) -> torch.Tensor:
    """The rule of a case without any mask."""
    return (row >= 0) & (col >= 0)


def _part_sizes(length: int, part: int, device: torch.device) -> torch.Tensor:
    starts = torch.arange(0, length, part, device=device)
    return (length - starts).clamp(max=part)


# ---- features --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """The random parts of a feature, the same for every run of a case."""

    case: Case
    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator("normal"), device=self.device)
        return values.to(dtype or self.dtype)

    def half(self, *shape: int) -> torch.Tensor:
        """Bool, each True with probability 1/2."""
        values = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return values.random_(0, 2, generator=self._generator("half")).bool()

    def document_starts(self) -> torch.Tensor:
        """(batch, documents) int64: where the documents of each sequence begin, ascending, the first at 0."""
        lengths = torch.tensor(document_lengths(self.case.batch, self.case.seqlen_q))
        return (lengths.cumsum(1) - lengths).to(self.device)

    def block_offsets(self, blocks: int, taken: int) -> torch.Tensor:
        """(num_heads, blocks) bool, ``taken`` of each row True."""
        generator = self._generator("blocks")
        order = torch.rand(self.case.num_heads, blocks, generator=generator, device=self.device)
        return order.argsort(1).argsort(1) < taken

    def _generator(self, what: str) -> torch.Generator:
        seed = zlib.crc32(f"{self.case.name} {what}".encode())
        return torch.Generator(self.device).manual_seed(seed)


def _plain(case: Case, draws: Draws) -> Asked:
    return Asked(rule=window_rule(case))


def _key_padding(case: Case, draws: Draws) -> Asked:
    """Keys at the right end are padding: none, 1/8, 2/8 and 3/8 of the length, and so on again."""
    kept = torch.tensor([case.seqlen_k * (8 - b % 4) // 8 for b in range(case.batch)], device=draws.device)
    mask = torch.arange(case.seqlen_k, device=draws.device) < kept[:, None]
    return Asked({"mask": masks.KeyMask(mask)}, rule=lambda b, h, row, col: col < kept[b], by_batch=True)


def _bool_mask(case: Case, draws: Draws) -> Asked:
    """Half of the scores hidden at random, differently in each batch entry: every tile is visited."""
    mask = draws.half(case.batch, 1, case.seqlen_q, case.seqlen_k)
    return Asked({"mask": mask}, rule=lambda b, h, row, col: mask[b, 0, row, col], by_batch=True)


def _bool_mask_causal(case: Case, draws: Draws) -> Asked:
    """A causal mask given as a tensor per batch entry: tiles above the diagonal can be skipped."""
    rule = window_rule(dataclasses.replace(case, causal=True))
    assert rule is not None
    mask = dense_mask(case, rule, draws.device).repeat(case.batch, 1, 1, 1)
    return Asked({"mask": mask}, rule=rule)


def _bias(
    case: Case, draws: Draws, *, learns: str = "", dtype: torch.dtype | None = None, by_batch: bool = False
) -> Asked:
    """One bias per head, shared by the batch or not. SDPA takes the dtype of q only."""
    batch = case.batch if by_batch else 1
    bias = draws.normal(batch, case.num_heads, case.seqlen_q, case.seqlen_k, dtype=dtype)

    def score(learned: torch.Tensor | None) -> ScoreRule:
        added = bias if learned is None else learned
        return lambda s, b, h, row, col: s + added[b if by_batch else 0, h, row, col]

    return Asked({"bias": bias}, learns=learns, bias=bias.to(draws.dtype), score=score)


def _alibi(case: Case, draws: Draws, *, learns: str = "") -> Asked:
    """Slopes 2^(-8 (h + 1) / num_heads); SDPA gets the same as a bias."""
    heads, shift = case.num_heads, case.seqlen_k - case.seqlen_q
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=draws.device, dtype=torch.float32))
    row = torch.arange(case.seqlen_q, device=draws.device)[:, None]
    col = torch.arange(case.seqlen_k, device=draws.device)
    bias = (-slopes[:, None, None] * (row + shift - col).abs())[None].to(draws.dtype)

    def score(learned: torch.Tensor | None) -> ScoreRule:
        per_head = slopes if learned is None else learned
        return lambda s, b, h, row, col: s - per_head[h] * (row + shift - col).abs()

    return Asked({"bias": masks.ALiBi(slopes)}, learns=learns, value_of=masks.ALiBi, bias=bias, score=score)


def relative_position(case: Case, draws: Draws, *, learns: str = "", bidirectional: bool = True) -> Asked:
    """A table of T5; SDPA gets it written out, FlexAttention the entry of each distance."""
    heads, shift = case.num_heads, case.seqlen_k - case.seqlen_q
    bias_of = functools.partial(masks.RelativePosition, bidirectional=bidirectional)
    asked = bias_of(draws.normal(heads, BUCKETS, dtype=torch.float32))
    order = torch.arange(BUCKETS, device=draws.device, dtype=torch.float32)
    numbered = bias_of(order[None])
    entry, reach = numbered.by_distance()[0, 0].int(), asked.reach
    bias = asked.to_dense(case.seqlen_q, case.seqlen_k).to(draws.dtype)

    def score(learned: torch.Tensor | None) -> ScoreRule:
        table = asked.table if learned is None else learned
        return lambda s, b, h, row, col: s + table[h, entry[(col - row - shift).clamp(-reach, reach) + reach]]

    return Asked({"bias": asked}, learns=learns, value_of=bias_of, bias=bias, score=score)


def softcap(case: Case, draws: Draws, *, cap: float = SOFTCAP) -> Asked:
    def score(_: torch.Tensor | None) -> ScoreRule:
        return lambda s, b, h, row, col: cap * torch.tanh(s / cap)

    return Asked({"softcap": cap}, score=score)


def _sinks(case: Case, draws: Draws) -> Asked:
    sinks = draws.normal(case.num_heads, dtype=torch.float32)
    return Asked({"sinks": sinks}, learns="sinks")


def _dropout(case: Case, draws: Draws) -> Asked:
    return Asked({"dropout_p": DROPOUT_P})


def _documents(case: Case, draws: Draws) -> Asked:
    """Documents of uneven lengths, causal inside each."""
    position = torch.arange(case.seqlen_q, device=draws.device).expand(case.batch, -1).contiguous()
    ids = torch.searchsorted(draws.document_starts(), position, right=True).int()
    base = window_rule(case)
    assert base is not None
    return Asked(
        {"mask": masks.Documents(ids)},
        rule=lambda b, h, row, col: base(b, h, row, col) & (ids[b, row] == ids[b, col]),
        by_batch=True,
    )


def _hidden_rows(case: Case, draws: Draws) -> Asked:
    """The mask of ``documents`` said by key: rows from the end of a key's document on do not see it."""
    starts = F.pad(draws.document_starts(), (0, 1), value=case.seqlen_q)
    position = torch.arange(case.seqlen_k, device=draws.device).expand(case.batch, -1).contiguous()
    ends = starts.gather(1, torch.searchsorted(starts, position, right=True))
    intervals = torch.stack((ends, torch.full_like(ends, case.seqlen_q)), -1).int()[:, None]
    base = window_rule(case)
    assert base is not None
    return Asked(
        {"mask": masks.HiddenRows(intervals.contiguous())},
        rule=lambda b, h, row, col: base(b, h, row, col) & (row < ends[b, col]),
        by_batch=True,
    )


def _prefix(case: Case, draws: Draws) -> Asked:
    """The first 1/8 to 4/8 of the keys are visible to every query, the rest causally."""
    lens = torch.tensor([case.seqlen_k * (1 + b % 4) // 8 for b in range(case.batch)], dtype=torch.int32)
    lens, base = lens.to(draws.device), window_rule(case)
    assert base is not None
    return Asked(
        {"causal": False, "mask": masks.PrefixLM(lens)},
        rule=lambda b, h, row, col: base(b, h, row, col) | (col < lens[b]),
        by_batch=True,
    )


def _sink_tokens(case: Case, draws: Draws) -> Asked:
    """A causal window that never forgets the first keys."""
    base = window_rule(case)
    assert base is not None
    return Asked(
        {"window_size": (-1, -1), "mask": masks.SlidingWindow(case.window[0], sink_tokens=SINK_TOKENS)},
        rule=lambda b, h, row, col: base(b, h, row, col) | ((col < SINK_TOKENS) & (col <= row)),
    )


def _chunked(case: Case, draws: Draws) -> Asked:
    """Causal inside chunks of a quarter of the length."""
    chunk, base = case.seqlen_k // 4, window_rule(case)
    assert base is not None
    return Asked(
        {"mask": masks.Chunks(chunk)},
        rule=lambda b, h, row, col: base(b, h, row, col) & (row // chunk == col // chunk),
    )


def _blocks(case: Case, draws: Draws, *, size: int, share: float) -> Asked:
    """Random blocks per head, with the same number in every row and every column of blocks."""
    # Short sequences, which are there to try the program, have blocks of an eighth of their length.
    size = min(size, max(16, case.seqlen_q // 8))
    count = -(-case.seqlen_k // size)
    offsets = draws.block_offsets(count, round(count * share))
    row, col = torch.arange(count, device=draws.device)[:, None], torch.arange(count, device=draws.device)
    blocks = offsets[:, (col - row) % count][None]
    return Asked(
        {"mask": masks.BlockMask(blocks, size)},
        rule=lambda b, h, row, col: blocks[0, h, row // size, col // size],
        by_head=True,
    )


@dataclass(frozen=True)
class Feature:
    """One row of the set.

    Attributes:
        ask: makes the options and the rule for the tensors of a case.
        plain: served by the kernels without modifiers.
        base: what differs in the plain case that the row is held against; its causal mask and window stay.
        refused_by: peers that cannot do it, "sdpa" (every backend) or "flex".
    """

    ask: Callable[[Case, Draws], Asked]
    plain: bool = False
    base: dict[str, Any] = field(default_factory=dict)
    refused_by: tuple[str, ...] = ()


FEATURES: dict[str, Feature] = {
    "plain": Feature(_plain, plain=True),
    "plain-causal": Feature(_plain, plain=True),
    "window": Feature(_plain, plain=True, base={"window": (-1, -1)}),
    "key-padding": Feature(_key_padding),
    "bool-mask": Feature(_bool_mask),
    "bool-mask-causal": Feature(_bool_mask_causal, base={"causal": True}),
    "bias": Feature(_bias),
    "bias-grad": Feature(functools.partial(_bias, learns="bias")),
    "bias-fp32": Feature(functools.partial(_bias, dtype=torch.float32)),
    "bias-batch": Feature(functools.partial(_bias, by_batch=True)),
    "bias-batch-grad": Feature(functools.partial(_bias, by_batch=True, learns="bias")),
    "alibi": Feature(_alibi),
    "alibi-grad": Feature(functools.partial(_alibi, learns="bias")),
    "relative-position": Feature(relative_position),
    "relative-position-grad": Feature(functools.partial(relative_position, learns="bias")),
    "softcap": Feature(softcap, refused_by=("sdpa",)),
    "sinks": Feature(_sinks, refused_by=("sdpa",)),
    "dropout": Feature(_dropout, refused_by=("flex",)),
    "documents": Feature(_documents),
    "prefix": Feature(_prefix),
    "sink-tokens": Feature(_sink_tokens),
    "chunked": Feature(_chunked),
    "hidden-rows": Feature(_hidden_rows),
    "blocks-128-all": Feature(functools.partial(_blocks, size=128, share=1.0)),
    "blocks-128-half": Feature(functools.partial(_blocks, size=128, share=0.5)),
    "blocks-128-quarter": Feature(functools.partial(_blocks, size=128, share=0.25)),
    "blocks-64-half": Feature(functools.partial(_blocks, size=64, share=0.5)),
}


def ask(case: Case, dtype: torch.dtype, device: torch.device) -> Asked:
    """The feature of a case on tensors of a dtype and device."""
    return FEATURES[case.feature].ask(case, Draws(case, dtype, device))


def plain_case(case: Case) -> Case:
    """The case without its feature: what the kernels without modifiers are given for comparison."""
    return dataclasses.replace(case, feature="", **FEATURES[case.feature].base)
