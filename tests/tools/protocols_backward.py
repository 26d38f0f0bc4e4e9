"""The roles of the backward up to head_dim 128 for protocols.py, which tells what such a model is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from tests.tools.protocols import (
    ALL,
    END,
    WARPS,
    Barrier,
    Cell,
    DsPlaces,
    Slots,
    Turn,
    barriers,
    cells,
    each_item,
)
from tests.tools.protocols_pool import FINISHERS, Flight, Word, convert_dq


class Items:
    """Of a CTA: a block and its steps each. `draw` gives their numbers, `others` producers read them."""

    def __init__(self, m, cta, items, draw, draws, others=3, consumers=ALL):
        self.m, self.cta, self.items, self.draw, self.draws = m, cta, items, draw, draws
        self.item, self.ending = Slots("item", 2, consumers + others), Barrier(1)

    def role(self, name, body, *args):
        self.m.role(f"{self.cta}: {name}", body, *args)

    def schedule(self, me, load=None, others=None):
        """`load`: of an item. `others`: what items wait for beside a place."""
        place = 0
        while (n := next(self.draw, None)) is not None:
            yield self.item.left(place)
            if others:
                yield from others.wait_before(n)
            self.item.fill(me, place, n)
            if not self.items[n][1]:
                me.arrive(self.ending)
            if load:
                yield from load(me, n)
            if self.draws:
                yield self.ending, place
            place += 1
        yield from self.item.put(me, place, END)

    def load_steps(self, me, ring, tells=False):
        """`tells`: that the next item may be drawn."""
        used = itertools.count()

        def use(n):
            steps = self.items[n][1]
            for i in range(len(steps)):
                yield from ring.load(me, next(used), (n, i))
                if tells and i == len(steps) - 1:
                    me.arrive(self.ending)

        yield from each_item(me, self.item, use)


class KeyProducers(Items):
    """The roles of bwd/produce.cuh. An item is a block of keys and its steps, a step a tile of queries,
    (head, number), and the groups that see it."""

    def __init__(
        self, m, cta, items, draw, draws, slots, draw_ahead, swap, readers=0, others=3, consumers=ALL,
        own_stats=False,
    ):  # fmt: skip
        super().__init__(m, cta, items, draw, draws, others, consumers)
        self.draw_ahead, self.swap, self.loaded = draw_ahead, swap, 0
        self.k, self.v = Slots("K", 1, readers or consumers), Slots("V", 1, readers or consumers)
        self.q, self.dout = Slots("Q", slots, consumers, full=2 + own_stats), Slots("dO", slots, consumers)
        self.stats_at, self.own_stats = cells("stats", slots), own_stats
        self.o_at = cells("O and dS", slots)  # where consumers make the statistics

    def keys(self, n):
        """Where K and V of the n-th item with steps are."""
        return (self.v, self.k) if self.swap and n % 2 else (self.k, self.v)

    def load_keys_of(self, me, n):
        if self.items[n][1]:
            k, v = self.keys(self.loaded)
            yield from k.load(me, self.loaded, ("K", n))
            yield from v.load(me, self.loaded, ("V", n))
            self.loaded += 1

    def load_keys(self, me):
        yield from each_item(me, self.item, lambda n: self.load_keys_of(me, n))

    def load_queries(self, me, douts_too=False):
        used = itertools.count()

        def use(n):
            steps = self.items[n][1]
            for i in range(len(steps)):
                at = next(used)
                yield self.q.left(at)
                if douts_too:
                    yield self.dout.left(at)
                yield from self.q.load(me, at, (n, i))
                beside = self.o_at if self.own_stats else self.stats_at
                me.copy(self.q.full[at % self.q.slots], beside[at % self.q.slots], (n, i))
                if douts_too:
                    yield from self.dout.load(me, at, (n, i))
                if len(steps) - i == min(self.draw_ahead, len(steps)):
                    me.arrive(self.ending)

        yield from each_item(me, self.item, use)

    def load_lse(self, me):
        used = itertools.count()

        def use(n):
            for i in range(len(self.items[n][1])):
                at = next(used)
                yield self.q.left(at)
                me.copy(self.q.full[at % self.q.slots], self.stats_at[at % self.q.slots], (n, i))

        yield from each_item(me, self.item, use)


def backward(
    m, items, apart=False, slots=2, draws=False, ordered=False, ctas=1, ring=None, makes_dq=True,
    stores=False, sums=None, warpgroups=2, ds_slots=2, own_stats=False,
):  # fmt: skip
    """bwd/produce.cuh, consume_cooperative() of bwd/consume.cuh, consume_independent() of
    bwd/consume_independent.cuh, bwd/dq_semaphore.cuh, bwd/stream_k.cuh.

    Without dQ: of few rows."""
    turns = {}  # of each tile, first that of the first block to see it: init_dq_semaphore()
    for block, steps in items:
        for tile, groups in steps:
            turns.setdefault(tile, Turn(2 * block + min(groups) if apart else block))
    dq_at = {(tile, warp): Cell(f"dQ of {tile}") for tile in turns for warp in range(WARPS)}
    draw = iter(range(len(items)))
    for cta in range(ctas):
        others = 3 if ordered else 1 if stores and not own_stats else 2
        if sums:
            draw = iter(sums.of_cta[cta])
        x = KeyProducers(
            m, cta, items, draw, draws or ordered or ring, slots, 2, swap=not apart, others=others,
            consumers=warpgroups * WARPS, own_stats=own_stats,
        )  # fmt: skip
        order = None
        if ordered:
            stages = 2 if apart else 1
            dq = [Slots("dQ", 1, 1, full=ALL // stages) for _ in range(stages)]
            order = SimpleNamespace(turns=turns, dq_at=dq_at, dq=dq, stage_at=cells("stage", ALL))
        x.role("scheduler", x.schedule, x.load_keys_of, ring or sums)
        x.role("Q", x.load_queries, makes_dq and (apart or not ordered))
        added = barriers(2, ALL)
        if ring:
            for which in range(FINISHERS):
                x.role(f"dq {which}", convert_dq, x, ring, added, which)
        elif ordered:
            x.role("turns 0", pass_dq_semaphores, x, order, 0)
            x.role("turns 1", pass_dq_semaphores, x, order, 1) if apart else x.role(
                "dO", x.load_steps, x.dout
            )
        elif own_stats:
            x.role("lse", x.load_lse)
        elif stores:
            pass
        elif makes_dq:
            x.role("nobody", lambda me, x: each_item(me, x.item, lambda n: ()), x)
        else:
            x.role("dO", x.load_steps, x.dout)
        adds = RingAdder(x, ring, added) if ring else None
        consume = (
            consume_independent(x, order, adds, stores, sums, warpgroups, ds_slots)
            if apart
            else consume_cooperative(x, order, adds, makes_dq, sums)
        )
        for group, warp in itertools.product(range(warpgroups), range(WARPS)):
            x.role(f"consumer {group}.{warp}", consume, group, warp)


class SharedSums:
    """Sums of dK and dV that one CTA leaves to the next (StreamK in bwd/config.cuh): the last blocks of keys,
    more than one for each CTA and fewer than two, are divided by their steps."""

    def __init__(self, m, blocks, steps, ctas):
        self.m, self.items, self.of_cta, self.gives, self.takes = m, [], [], {}, {}
        self.words = [Word() for _ in range(blocks)]
        self.sums = [cells(f"sums of {block}", ALL) for block in range(blocks)]
        share = -(-blocks * steps // ctas)
        for begin in range(0, ctas * share, share):
            end, own = min(begin + share, blocks * steps), []
            for block in reversed(range(blocks)):
                first, last = max(begin, block * steps), min(end, (block + 1) * steps)
                if first >= last:
                    continue
                if last < (block + 1) * steps:
                    self.gives[len(self.items)] = block
                elif first > block * steps:
                    self.takes[len(self.items)] = block
                own.append(len(self.items))
                self.items.append((block, [((0, at % steps), (0, 1)) for at in range(first, last)]))
            self.of_cta.append(own)

    def wait_before(self, n):
        if n in self.takes and self.m.plant != "a CTA does not wait for sums":
            yield self.words[self.takes[n]], ALL

    def begin(self, me, who, n):
        if n in self.takes:
            me.read(self.sums[self.takes[n]][who], "sums")

    def end(self, me, who, n):
        if n not in self.gives:
            return
        early = self.m.plant == "sums are told before they are stored"
        if early:
            self.words[self.gives[n]].tell(me)
        me.write(self.sums[self.gives[n]][who], "sums")
        if not early:
            self.words[self.gives[n]].tell(me)


class RingAdder:
    """What consumers do for a ring: additions, and arrivals at `added` of the place of an item."""

    def __init__(self, x, ring, added):
        self.x, self.ring, self.added = x, ring, added
        self.flights, self.owed = [Flight() for _ in range(ALL)], [None] * ALL

    def add(self, me, who, n, i, staged):
        _, tile = self.x.items[n][1][i][0]
        self.ring.add(me, self.flights[who] if staged else None, n, tile, who)

    def arrive(self, me, place):
        me.arrive(self.added[place % 2])

    def settle(self, me, who):
        if self.owed[who] is not None:
            if self.x.m.plant != "an item is told before its last addition":
                yield self.flights[who], 0
            self.arrive(me, self.owed[who])
            self.owed[who] = None

    def settle_before(self, me, who, place):
        full, phase = self.x.item.ready(place)
        if not full.passed(phase) and self.x.m.plant != "a warp waits for an item before it settles":
            yield from self.settle(me, who)


def pass_dq_semaphores(me, x, order, group):
    """Of one warpgroup where they work apart: it has added by itself."""
    stages, taken = len(order.dq), itertools.count()
    apart, turns, dq = stages == 2, order.turns, order.dq[group]

    def use(n):
        block, steps = x.items[n]
        turn, held = block * stages + group, []

        def pass_on():
            for word in held:
                me.pass_on(word, turn + 1)
            held.clear()

        mine = [tile for tile, groups in steps if not apart or group in groups]
        for _, tiles in itertools.groupby(mine, key=lambda tile: tile[0]):  # of a head
            tiles, come = list(tiles), 0
            for i, tile in enumerate(tiles):
                at = next(taken)
                here = dq.full[0].passed(at)
                if held and (not here or (not apart and come == 0)):
                    pass_on()
                if not apart and come == 0:
                    yield turns[tile], turn
                    words = [turns[t] for t in tiles[i : i + 4]]
                    for word in itertools.takewhile(lambda word: word.passed(turn), words):
                        me.learn(word.known)
                        come += 1
                yield dq.ready(at)
                if not apart:
                    for cell in order.stage_at:
                        me.begin(cell, (n, tile))
                        me.finish(cell)
                    me.write(order.dq_at[tile, 0], turn)
                dq.let_go(me, at)
                come -= 1
                held.append(turns[tile])
            pass_on()

    yield from each_item(me, x.item, use)


def consume_cooperative(x, order, ring=None, makes_dq=True, sums=None):
    ds = DsPlaces(2 if x.m.plant == "two places for dS" else 3)

    def body(me, group, warp):
        who, now = group * WARPS + warp, SimpleNamespace(steps=0, items=0, added=0, place=-1)

        def issue_scores(n, i, k, v):
            at = now.steps
            yield x.q.ready(at)
            me.read(x.stats_at[at % x.q.slots], (n, i))
            me.begin(x.q.at(at), (n, i))
            me.begin(k.at(0), ("K", n))
            if i == 0:
                yield v.ready(now.items)
            yield x.dout.ready(at)
            me.begin(x.dout.at(at), (n, i))
            me.begin(v.at(0), ("V", n))

        def form_weights(n, i, k, v):
            at = now.steps
            me.finish(x.q.at(at), k.at(0))
            me.read(x.stats_at[at % x.q.slots], (n, i))
            me.finish(x.dout.at(at), v.at(0))

        def add_dq_before(n, i):
            if order:
                yield order.dq[0].left(now.added)
                me.write(order.stage_at[who], (n, x.items[n][1][i][0]))
                me.fence()
                me.arrive(order.dq[0].full[0])
                now.added += 1
            if ring:
                ring.add(me, who, n, i, staged=True)

        def before(place):
            now.place = place
            if ring:
                yield from ring.settle_before(me, who, place)

        def settle():
            if ring:
                yield from ring.settle(me, who)

        def use(n):
            k, v = x.keys(now.items)
            count = len(x.items[n][1])
            if count == 0:
                if ring:
                    yield from settle()
                    ring.arrive(me, now.place)
                return
            if sums:
                sums.begin(me, who, n)
            yield k.ready(now.items)
            yield from issue_scores(n, 0, k, v)
            form_weights(n, 0, k, v)
            for i in range(count):
                at, is_last = now.steps, i == count - 1
                early = x.m.plant == "K and V are let go before the last scores"
                if i == 0 if early else is_last:
                    v.let_go(me, now.items)
                    if not makes_dq:
                        k.let_go(me, now.items)
                if makes_dq:
                    if i > 0:
                        yield ds.ready(at - 1)
                    ds.write(me, at, who, (n, i), fenced=x.m.plant != "dS without a fence")
                me.begin(x.dout.at(at), (n, i))
                used = ds.begin_dq(me, at - 1, (n, i - 1), k, n) if makes_dq and i > 0 else []
                me.begin(x.q.at(at), (n, i))
                me.finish(x.dout.at(at), *used)
                yield from add_dq_before(n, i - 1) if makes_dq and i > 0 else settle()
                now.steps += 1
                if not is_last:
                    yield from issue_scores(n, i + 1, k, v)
                me.finish(x.q.at(at))
                x.q.let_go(me, at)
                x.dout.let_go(me, at)
                if not is_last:
                    form_weights(n, i + 1, k, v)
            if not makes_dq:
                now.items += 1
                return
            yield ds.ready(now.steps - 1)
            used = ds.begin_dq(me, now.steps - 1, (n, count - 1), k, n)
            if order:
                yield order.dq[0].left(now.added)
                me.write(order.stage_at[who], "gradients")
            if sums:
                sums.end(me, who, n)
            me.finish(*used)
            k.let_go(me, now.items)
            now.items += 1
            yield from add_dq_before(n, count - 1)
            if ring:
                ring.owed[who] = now.place

        yield from each_item(me, x.item, use, before, settle)

    return body


def consume_independent(x, order, ring=None, stores=False, sums=None, groups=2, ds_slots=2):
    named, meetings = barriers(2, WARPS), barriers(2, ALL)
    parts = cells("part of dQ", WARPS)
    ds_at = [[cells(f"dS {slot} of {group}", WARPS) for slot in range(ds_slots)] for group in range(groups)]
    made_at = [cells(f"made {slot}", WARPS) for slot in range(x.q.slots)]

    def body(me, group, warp):
        who, now = group * WARPS + warp, SimpleNamespace(steps=0, seen=0, items=0, place=-1)

        def one_step(n, i, turn, tile):
            at, ds = now.steps, ds_at[group][now.seen % ds_slots]
            if ds_slots == 1 and x.m.plant != "dS is written where dQ may read it":
                yield from me.sync(named[group])
            me.read(x.stats_at[at % x.q.slots], (n, i))
            rows, keys = (x.q.at(at), x.dout.at(at)), ((x.k.at(0), ("K", n)), (x.v.at(0), ("V", n)))
            for cell, value in (*((row, (n, i)) for row in rows), *keys):
                me.begin(cell, value)
            if x.own_stats:
                made, o_at = made_at[at % x.q.slots], x.o_at[at % x.q.slots]
                me.read(o_at, (n, i))
                me.write(made[warp], (n, i))
                if x.m.plant != "statistics are read before all have made theirs":
                    yield from me.sync(named[group])
                for cell in made:
                    me.read(cell, (n, i))
                if warp == 0:
                    me.write(o_at, ("dS", n, i))
            me.write(ds[warp], (n, i))
            me.fence()
            yield from me.sync(named[group])
            for cell in ds:
                me.begin(cell, (n, i))
            if x.own_stats:
                me.begin(o_at, ("dS", n, i))
            me.finish(*rows, x.v.at(0))
            waits = x.own_stats and x.m.plant != "O comes before dQ is made"
            if waits:
                me.finish(*ds, x.k.at(0), o_at)
            x.q.let_go(me, at)
            x.dout.let_go(me, at)
            if not waits:
                me.finish(*ds, x.k.at(0), *([o_at] if x.own_stats else []))
            meeting = meetings[now.seen % 2 if x.m.plant != "one meeting" else 0]
            if stores and groups == 2 and group == now.seen % 2:
                me.write(parts[warp], (n, i))
                me.arrive(meeting)
            elif stores and groups == 2:
                yield from me.sync(meeting)
                me.read(parts[warp], (n, i))
            if order:
                yield order.turns[tile], turn
                me.write(order.dq_at[tile, warp], turn)
                yield order.dq[group].left(now.seen)
                me.arrive(order.dq[group].full[0])
            if ring:
                ring.add(me, who, n, i, staged=False)
            now.seen += 1

        def use(n):
            block, steps = x.items[n]
            now.place += 1
            if not steps:
                if ring:
                    ring.arrive(me, now.place)
                return
            if sums:
                sums.begin(me, who, n)
            yield x.k.ready(now.items)
            yield x.v.ready(now.items)
            for i, (tile, groups) in enumerate(steps):
                yield x.q.ready(now.steps)
                yield x.dout.ready(now.steps)
                if stores or group in groups:
                    yield from one_step(n, i, 2 * block + group, tile)
                else:
                    x.q.let_go(me, now.steps)
                    x.dout.let_go(me, now.steps)
                now.steps += 1
            if ring:
                ring.arrive(me, now.place)
            x.k.let_go(me, now.items)
            x.v.let_go(me, now.items)
            now.items += 1
            if sums:
                sums.end(me, who, n)

        yield from each_item(me, x.item, use)

    return body
