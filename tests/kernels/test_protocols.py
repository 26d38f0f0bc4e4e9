"""Waits and arrivals of the Hopper kernels in the model of tests/tools/protocols.py: nothing hangs, nothing
is overwritten while it may be read, everything read was written for that step; and the model notices
mistakes."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.tools.protocols import Fault, Machine, Slots
from tests.tools.protocols_backward import SharedSums, backward
from tests.tools.protocols_backward_mod import BROUGHT, backward_mod
from tests.tools.protocols_forward import forward, forward_mod
from tests.tools.protocols_memory import (
    adds_in_turn,
    adds_to_many_tiles,
    early_kernels,
    finishes_a_round,
    leaves_a_step,
)
from tests.tools.protocols_pool import Ring
from tests.tools.protocols_split import split_dkdv, split_dq, split_mod_dkdv, split_mod_dq

# Of each model, every one with other items and another order of roles; to find a mistake may take more.
RUNS, RUNS_WITH_A_MISTAKE = 15, 25
LENGTHS = (0, 1, 1, 2, 3, 5, 8)


def counts(rnd):
    return [rnd.choice(LENGTHS) for _ in range(rnd.randint(0, 10))]


def seen_by(rnd, groups):
    return tuple(group for group in range(groups) if rnd.random() < 0.6)


def run_forward(m, rnd, *, apart=False, converts=False, by_rows=False):
    groups = 2 if converts else rnd.choice((2, 3))
    items = [[seen_by(rnd, groups) for _ in range(count)] for count in counts(rnd)]
    for tiles in filter(None, items):
        tiles[-1] = tuple({0, *tiles[-1]})
    stages, raw_stages = rnd.choice(((3, 4), (6, 8))) if converts else (rnd.choice((4, 5, 8)), 0)
    draws = rnd.random() < 0.5
    forward(m, items, stages, rnd.choice((1, 2)), groups, draws, apart, raw_stages, by_rows)


def run_forward_mod(m, rnd, **beside):
    items = [[seen_by(rnd, 2) or (0, 1) for _ in range(count)] for count in counts(rnd)]
    forward_mod(m, items, rnd.choice((1, 2)), draws=rnd.random() < 0.5, **beside)


def run_forward_tall(m, rnd, *, q_stages=2, kv_stages=(5, 8), **beside):
    items = [[seen_by(rnd, 3) or (0, 1) for _ in range(count)] for count in counts(rnd)]
    stages = dict(q_stages=q_stages, kv_stages=rnd.choice(kv_stages))
    forward_mod(m, items, draws=rnd.random() < 0.5, groups=3, **stages, **beside)


def key_items(rnd, apart=False):
    """Blocks of keys and the tiles of queries that see them, of one or two heads."""
    heads, tiles, causal = rnd.choice((1, 2)), rnd.randint(0, 6), rnd.random() < 0.6
    blocks = range(rnd.randint(0, 5))

    def groups(block, tile):
        if not causal or not apart:
            return (0, 1) if not causal or tile >= block else ()
        return tuple(group for group in (0, 1) if tile >= 2 * block + group)

    walk = [(head, tile) for head in range(heads) for tile in reversed(range(tiles))]
    return [(b, [(at, groups(b, at[1])) for at in walk if groups(b, at[1])]) for b in blocks]


def run_backward(m, rnd, *, apart, ordered):
    ctas = rnd.randint(1, 3) if ordered else 1
    backward(m, key_items(rnd, apart), apart, 5 if apart else 2, rnd.random() < 0.5, ordered, ctas)


def run_few_rows(m, rnd):
    backward(m, key_items(rnd), slots=4, draws=rnd.random() < 0.5, makes_dq=False)


def run_few_keys(m, rnd):
    """One block of keys a head, which two warpgroups see by turns or together."""
    items = [(0, steps) for _, steps in key_items(rnd, apart=True)]
    backward(m, items, apart=True, slots=4, draws=rnd.random() < 0.5, stores=True)


def run_one_warpgroup(m, rnd):
    items = [(0, [(at, (0,)) for at, _ in steps]) for _, steps in key_items(rnd)]
    ds_slots, draws = rnd.choice((1, 2)), rnd.random() < 0.5
    backward(m, items, apart=True, draws=draws, stores=True, warpgroups=1, ds_slots=ds_slots)


def run_own_stats(m, rnd):
    items = [(0, [(at, (0,)) for at, _ in steps]) for _, steps in key_items(rnd)]
    draws = rnd.random() < 0.5
    backward(m, items, apart=True, draws=draws, stores=True, warpgroups=1, own_stats=True)


def run_ring(m, rnd, *, apart):
    """Heads in rounds that come to a place three times or more, by fewer CTAs than a round has items, too."""
    round_heads, places, blocks, tiles = (rnd.randint(1, 2) for _ in range(4))
    heads, group = round_heads * 3 * places + rnd.randint(1, 3), rnd.randint(1, round_heads)
    groups = [range(first, min(first + group, heads)) for first in range(0, heads, group)]
    if round_heads % group:
        groups = [[head] for head in range(heads)]
    causal, items, adders = rnd.random() < 0.5, [], []
    for of_group in groups:
        for block, head in itertools.product(range(blocks), of_group):
            seen = [(tile, (1,) if apart and causal and tile == block else (0, 1)) for tile in range(tiles)]
            seen = [(tile, who) for tile, who in seen if not causal or tile >= block]
            items.append((block, [((head, tile), who) for tile, who in seen]))
            adders.append((head, {tile: [2 * g + w for g in who for w in (0, 1)] for tile, who in seen}))
    ring = Ring(m, adders, tiles, heads, round_heads, places)
    backward(m, items, apart, 5 if apart else 2, ctas=rnd.randint(1, 3), ring=ring)


def run_stream_k(m, rnd, *, apart):
    ctas = rnd.randint(1, 4)
    sums = SharedSums(m, ctas + rnd.randint(0, ctas - 1), rnd.randint(1, 6), ctas)
    backward(m, sums.items, apart, 5 if apart else 2, ctas=ctas, sums=sums)


def numbered(rnd):
    return [(n, [((0, tile), ()) for tile in range(count)]) for n, count in enumerate(counts(rnd))]


def run_split_dkdv(m, rnd):
    slots, weight_stages, all_held = rnd.choice(((4, 1, True), (3, 2, True), (3, 1, False)))
    split_dkdv(m, numbered(rnd), slots, weight_stages, all_held, draws=rnd.random() < 0.5)


def run_split_dq(m, rnd):
    split_dq(m, numbered(rnd), *rnd.choice(((3, 3), (2, 2), (2, 1))), draws=rnd.random() < 0.5)


def mod_items(rnd, heads=(0, 0, 1), tests=(False, True)):
    steps = [[(rnd.choice(heads), rnd.choice(tests)) for _ in range(count)] for count in counts(rnd)]
    return [sorted(of_item, key=lambda step: step[0]) for of_item in steps]


def run_split_mod_dkdv(m, rnd):
    split_mod_dkdv(m, mod_items(rnd), rnd.choice((3, 4)), drops=rnd.random() < 0.5, draws=rnd.random() < 0.5)


def run_split_mod_dq(m, rnd):
    slots = rnd.choice(((2, 1, True), (2, 1, False), (2, 2, False), (4, 4, False)))
    items = mod_items(rnd, heads=(0,))
    split_mod_dq(m, items, *slots, drops=rnd.random() < 0.5, draws=rnd.random() < 0.5)


def run_backward_mod(m, rnd, *, slots, **kind):
    items = mod_items(rnd, tests=(False, True, BROUGHT))
    kind["bias"] = kind.get("bias", False) and rnd.random() < 0.6
    backward_mod(m, items, slots, **kind, draws=rnd.random() < 0.5)


def run_wide_mod(m, rnd):
    items = mod_items(rnd, tests=(False, True, BROUGHT))
    seen = {
        (n, i): rnd.choice(((0, 1), (0,), (1,))) for n, steps in enumerate(items) for i in range(len(steps))
    }
    kind = rnd.choice(({"bias": True, "mark_slots": 1, "slots": 3}, {"consumers_draw": True}, {}))
    backward_mod(m, items, **({"slots": 4} | kind), seen=seen, draws=rnd.random() < 0.5)


def model(run, **fixed):
    return lambda m, rnd: run(m, rnd, **fixed)


SCORE_KINDS = {
    "hiding": {},
    "adding": dict(mark_slots=1, bias=True),
    "adding fp32": dict(mark_slots=1, bias=True),
    "capping": {},
    "dropping": dict(consumers_draw=True),
    "adding and dropping": dict(mark_slots=1, loaders_draw=True, bias=True),
}
TWO_PLACES_OF_DS = ("adding fp32", "adding and dropping")  # at head_dim 128
MODELS = {
    "forward": run_forward,
    "forward over a cache": model(run_forward, apart=True),
    "forward over a cache, by rows": model(run_forward, apart=True, by_rows=True),
    "forward over bytes": model(run_forward, apart=True, converts=True),
    "forward over bytes, by rows": model(run_forward, apart=True, converts=True, by_rows=True),
    "forward with modifiers": run_forward_mod,
    "forward with modifiers, tall tiles": run_forward_tall,
    "forward with a bias": model(run_forward_mod, beside="bias"),
    "forward with a loose bias": model(run_forward_mod, beside="bias", places=4, parts=2),
    "forward with a bias in parts": model(run_forward_mod, beside="bias", places=3, parts=2),
    "forward with a bias in fp32, 128": model(run_forward_mod, beside="bias", parts=2),
    "forward with a bias, tall tiles, 64": model(run_forward_tall, kv_stages=(8,), beside="bias", places=3),
    "forward with a bias, tall tiles, 128": model(
        run_forward_tall, q_stages=1, kv_stages=(4, 5), beside="bias"
    ),
    "forward with words, tall tiles": model(run_forward_tall, kv_stages=(4, 8), beside="words", places=4),
    "backward of few rows": run_few_rows,
    "backward of few keys": run_few_keys,
    "backward of one warpgroup": run_one_warpgroup,
    "backward with modifiers, blocks of 256 keys": run_wide_mod,
    "backward that makes its statistics": run_own_stats,
    "wide backward, keys": run_split_dkdv,
    "wide backward, queries": run_split_dq,
    "wide with modifiers, keys": run_split_mod_dkdv,
    "wide with modifiers, queries": run_split_mod_dq,
}
for way in ("together", "apart"):
    for order in ("", ", in order"):
        MODELS[f"backward {way}{order}"] = model(run_backward, apart=way == "apart", ordered=bool(order))
    MODELS[f"backward {way}, in a ring"] = model(run_ring, apart=way == "apart")
    MODELS[f"backward {way}, Stream-K"] = model(run_stream_k, apart=way == "apart")
for name, kind in SCORE_KINDS.items():
    for head_dim, slots in ((64, 4), (128, 2)):
        ds_places = 2 if head_dim == 128 and name in TWO_PLACES_OF_DS else 3
        MODELS[f"backward {name}, {head_dim}"] = model(
            run_backward_mod, slots=slots, ds_places=ds_places, **kind
        )
for of_memory in (adds_in_turn, adds_to_many_tiles, finishes_a_round, leaves_a_step, early_kernels):
    MODELS[of_memory.__name__] = lambda m, rnd, run=of_memory: run(m)


def run(name, seed, plant=None):
    m = Machine(plant)
    MODELS[name](m, random.Random(seed))
    m.run(seed)


def faults(name, plant=None):
    for seed in range(RUNS_WITH_A_MISTAKE):
        try:
            run(name, seed, plant)
        except Fault as fault:
            yield str(fault)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_hangs_and_every_read_finds_what_it_is_for(name):
    for seed in range(RUNS):
        run(name, seed)


@pytest.mark.parametrize(
    "name, plant, fault",
    [
        ("backward adding and dropping, 128", "marks before loads", "deadlock"),  # it was so once
        ("backward adding and dropping, 64", "marks before loads", "deadlock"),
        ("backward adding fp32, 128", "the place of dS is not waited for", "overwrites dS"),
        ("backward of few keys", "one meeting", "part of dQ"),
        ("backward that makes its statistics", "O comes before dQ is made", "O and dS"),
        ("backward with modifiers, blocks of 256 keys", "one place for draws", "draws"),
        ("backward with modifiers, blocks of 256 keys", "a bias is not waited for", "bias"),
        ("backward with modifiers, blocks of 256 keys", "one place for dS", "dS"),
        ("backward hiding, 64", "marks are brought to a place in use", "overwrites marks"),
        ("backward adding, 128", "loaders do not wait for marks that are brought", "one arrival too many"),
        ("backward with modifiers, blocks of 256 keys", "marks are let go before they are read", "marks"),
        ("backward that makes its statistics", "statistics are read before all have made theirs", "made"),
        ("backward of one warpgroup", "dS is written where dQ may read it", "overwrites dS"),
        ("wide backward, keys", "an item without steps is held", "deadlock"),
        ("wide backward, queries", "K is let go before dQ is finished", "overwrites K"),
        ("wide with modifiers, keys", "marks are let go before they are read", "overwrites marks"),
        ("wide with modifiers, keys", "a step is read after its Q is let go", "overwrites step"),
        ("wide with modifiers, keys", "keys of dropout of a head in one slot", "in keys of dropout"),
        ("wide with modifiers, queries", "marks are let go before they are read", "overwrites marks"),
        ("wide with modifiers, queries", "an item is let go before its last draw", "overwrites item"),
        ("wide with modifiers, queries", "one place for keys of dropout", "overwrites keys of dropout"),
        ("forward", "parity of V", "deadlock"),
        ("forward", "K let go early", "overwrites"),
        ("forward", "a warp keeps Q", "deadlock"),
        ("forward with a bias, tall tiles, 64", "a place is let go before it is read", "overwrites bias"),
        ("forward with words, tall tiles", "a place is let go before it is read", "overwrites words"),
        ("forward over a cache", "V does not wait for the next item", "overwrites"),
        ("forward over a cache, by rows", "rows are not waited for", "may not be written yet"),
        ("forward over a cache, by rows", "rows without a fence", "may not see K or V"),
        ("forward over bytes", "V does not wait for the next item", "overwrites"),
        ("forward over bytes", "elements without a fence", "may not see K or V"),
        ("forward over bytes", "factors are not waited for", "may not be written yet"),
        ("backward of few rows", "K and V are let go before the last scores", "overwrites V"),
        ("backward together", "two places for dS", "overwrites dS"),
        ("backward together", "dS without a fence", "may not see dS"),
        ("backward together, in a ring", "an item is told before its last addition", "may be added yet"),
        ("backward together, in a ring", "a tile is given back before its zeros", "may not be zero yet"),
        ("backward apart, in a ring", "a tile is given back before its zeros", "may not be zero yet"),
        ("backward together, in a ring", "an item does not wait for its round", "may not be zero yet"),
        ("backward apart, in a ring", "an item does not wait for its round", "may not be zero yet"),
        ("backward together, in a ring", "a warp waits for an item before it settles", "deadlock"),
        ("backward apart, in a ring", "a piece is loaded early", "one that leaves"),
        ("backward together, Stream-K", "a CTA does not wait for sums", "sums"),
        ("backward apart, Stream-K", "a CTA does not wait for sums", "sums"),
        ("backward together, Stream-K", "sums are told before they are stored", "may not be written yet"),
        ("backward apart, Stream-K", "sums are told before they are stored", "may not be written yet"),
        ("adds_in_turn", "the early look is relaxed", "overwrites dQ"),
        ("adds_to_many_tiles", "no __syncwarp behind the votes", "overwrites dQ"),
        ("finishes_a_round", "the vote of any lane", "may not be written yet"),
        ("leaves_a_step", "no __syncwarp behind the read", "overwrites step"),
        ("early_kernels", "the next kernel is allowed before the wait", "may not be written yet"),
        ("early_kernels", "the last kernel does not wait", "may not be written yet"),
    ],
)
def test_a_planted_mistake_is_found(name, plant, fault):
    assert any(fault in found for found in faults(name, plant))


RINGS = {
    "forward": ("K or V", "Q"),
    "forward over a cache": ("K or V", "Q"),
    "forward over a cache, by rows": ("K or V", "Q"),
    "forward over bytes": ("K or V", "Q", "bytes"),
    "forward with a bias": ("K or V", "Q", "bias", "chunk"),
    "forward with a bias in parts": ("K or V", "Q", "bias", "chunk"),
    "forward with a bias, tall tiles, 128": ("K or V", "Q", "bias", "chunk"),
    "forward with words, tall tiles": ("K or V", "Q", "words", "chunk"),
    "backward of few rows": ("K", "V", "Q", "dO", "item"),
    "backward together": ("K", "V", "Q", "dO", "item"),
    "backward together, in order": ("K", "V", "Q", "dO", "item", "dQ"),
    "backward apart": ("K", "V", "Q", "dO", "item"),
    "backward together, in a ring": ("K", "V", "Q", "dO", "item"),
    "backward apart, in a ring": ("K", "V", "Q", "dO", "item"),
    "backward together, Stream-K": ("K", "V", "Q", "dO", "item"),
    "wide backward, keys": ("K", "V", "Q", "dO", "item", "weights"),
    "wide backward, queries": ("K", "V", "Q", "dO", "item"),
    "wide with modifiers, keys": ("K", "V", "Q", "dO", "item", "chunk", "marks", "weights"),
    "wide with modifiers, queries": ("K", "V", "Q", "dO", "item", "chunk", "marks"),
    "backward adding, 128": ("first place", "second place", "Q", "dO", "item", "chunk", "bias", "marks"),
    "backward dropping, 64": ("first place", "second place", "Q", "dO", "item", "chunk", "marks"),
}


@pytest.mark.parametrize("side", ("full", "empty"))
@pytest.mark.parametrize("name, ring", [(name, ring) for name, rings in RINGS.items() for ring in rings])
def test_a_barrier_that_expects_another_number_of_arrivals_is_found(monkeypatch, name, ring, side):
    make = Slots.__init__

    def planted(self, name, slots, empty, full=1):
        count = {"full": full, "empty": empty}
        if name.startswith(ring):
            count[side] += -1 if count[side] > 1 else 1
        make(self, name, slots, **count)

    monkeypatch.setattr(Slots, "__init__", planted)
    assert any(faults(name))
