"""The roles of the backward with modifiers for protocols.py, which tells what such a model is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from tests.tools.protocols import ALL, CHUNK, END, WARPS, Barrier, DsPlaces, Slots, barriers, cells, each_item

BROUGHT = "brought"  # of a step: it is tested, and TMA brings the marks


class Marks:
    """Those that the loaders leave, as one role goes through them."""

    def __init__(self, me, of_loaders):
        self.me, self.of_loaders, self.count = me, of_loaders, 0

    def leave(self, loader, mark):
        yield from self.of_loaders[loader].put(self.me, self.count, mark)
        self.count += 1

    def bring(self, loader, mark):
        """The first loader asks for those of all. The others wait as well, else they would arrive early."""
        slots = self.of_loaders[0]
        full = slots.full[self.count % slots.slots]
        plant = self.me.machine.plant
        if plant != "marks are brought to a place in use" or loader > 0:
            if plant != "loaders do not wait for marks that are brought" or loader == 0:
                yield slots.left(self.count)
        for of_loader in self.of_loaders if loader == 0 else ():
            self.me.copy(full, of_loader.at(self.count), mark, arrives=False)
        self.me.arrive(full)
        self.count += 1

    def take(self, mark):
        of_all = self.of_loaders[0]
        is_early = self.me.machine.plant == "marks are let go before they are read"
        yield of_all.ready(self.count)
        if is_early:
            of_all.let_go(self.me, self.count)
        for of_loader in self.of_loaders:
            self.me.read(of_loader.at(self.count), mark)
        if not is_early:
            of_all.let_go(self.me, self.count)
        self.count += 1


class ModProducers:
    """schedule_bwd_work(), for_bwd_steps(), places of MaskWordMaker and BringsMaskTiles of
    bwd_mod/produce.cuh. A step says which head it is of and whether it is tested, or BROUGHT; `readers` are
    the warps that read marks."""

    def __init__(self, m, items, mark_slots, readers, draws, draw_ahead):
        self.m, self.items, self.draws, self.draw_ahead = m, items, draws, draw_ahead
        self.item, self.chunk, self.ending = Slots("item", 2, ALL + 3), Slots("chunk", 2, 3), Barrier(1)
        self.marks = [Slots(f"marks of loader {n}", mark_slots, readers, full=3) for n in range(3)]
        for of_loader in self.marks:  # barriers of all loaders, places of their own
            of_loader.full, of_loader.empty = self.marks[0].full, self.marks[0].empty

    def schedule(self, me):
        item, chunk, found, chunks = self.item, self.chunk, 0, 0
        for n, steps in enumerate(self.items):
            yield item.left(found)
            me.write(item.at(found), n)
            for first in range(0, len(steps), CHUNK):
                me.arrive(chunk.full[(chunks - 1) % 2] if first else item.full[found % 2])
                yield chunk.left(chunks)
                me.write(chunk.at(chunks), (n, first, first + CHUNK >= len(steps)))
                chunks += 1
            if steps:
                me.arrive(chunk.full[(chunks - 1) % 2])
                if self.draws:
                    yield self.ending, found
                found += 1
        yield from item.put(me, found, END)

    def for_steps(self, me, begin, use):
        """begin(item), then use((item, number, head), is tested, is where the next is drawn) for steps."""
        taken = itertools.count()

        def of_item(n):
            yield from begin(n)
            is_last = False
            while not is_last:
                at = next(taken)
                _, first, is_last = part = yield from self.chunk.take(me, at)
                count = min(CHUNK, len(self.items[n]) - first)
                ending = first + max(0, count - self.draw_ahead) if is_last else None
                for i, (head, is_tested) in enumerate(self.items[n][first : first + count], first):
                    yield from use((n, i, head), is_tested, i == ending)
                me.read(self.chunk.at(at), part)
                self.chunk.let_go(me, at)

        yield from each_item(me, self.item, of_item)

    def query_loader(self, me, drops, fresh):
        """Of Q, its statistics and its step; of the keys of dropout to so many places after another head."""
        now = SimpleNamespace(steps=0, stale=0, head=None)
        slots = self.q.slots

        def load(step, is_ending):
            at, (n, _, head) = now.steps, step
            yield from self.q.load(me, at, step)
            if now.head != (n, head):
                now.stale, now.head = fresh, (n, head)
            me.copy(self.q.full[at % slots], self.stats_at[at % slots], step)
            me.write(self.step_at[at % len(self.step_at)], step)
            if drops and now.stale > 0:
                me.write(self.drop_at[at % slots], head)
            me.arrive(self.q.full[at % slots])
            if is_ending:
                me.arrive(self.ending)
            now.stale -= 1
            now.steps += 1

        return load

    def start(self, loader):
        self.m.role("scheduler", self.schedule)
        for number in range(3):
            self.m.role(f"loader {number}", loader, number)


def backward_mod(
    m,
    items,
    slots=2,
    mark_slots=4,
    loaders_draw=False,
    consumers_draw=False,
    bias=False,
    draws=False,
    ds_places=3,
    seen=None,
):
    """load_mod_steps() of bwd_mod/produce.cuh, consume_mod_keys() of bwd_mod/consume.cuh. Loaders that draw
    leave a second mark for every step. Of two places for dS a warp waits for its own. With `seen`, the groups
    that see a step, consume_mod_independent() of bwd_mod/consume_independent.cuh."""
    x = ModProducers(m, items, mark_slots, ALL, draws, draw_ahead=6)
    places = Slots("first place of keys", 1, ALL), Slots("second place", 1, ALL)
    q, dout = x.q, x.dout = Slots("Q", slots, ALL, full=3), Slots("dO", slots, ALL)
    tile_of_bias = Slots("bias", 1, ALL)
    of_groups = [[Slots(f"bias {b} of {group}", 1, WARPS) for b in range(2)] for group in range(2)]
    biases = [tile_of_bias] if seen is None else of_groups[0] + of_groups[1]
    x.stats_at, x.step_at = cells("stats", slots), cells("step", 2 * slots if seen is None else slots)
    x.drop_at = cells("keys of dropout", slots)
    ds, ds_empty = DsPlaces(ds_places), barriers(ds_places, ALL)
    pairs, drawn_at = barriers(WARPS, 2), [cells(f"draws {slot} for", ALL) for slot in range(2)]

    def loader(me, number):
        marks, now = Marks(me, x.marks), SimpleNamespace(items=0, steps=0)
        load_query = x.query_loader(me, consumers_draw, slots)

        def leave(step, is_tested):
            if is_tested:
                way = marks.bring if is_tested == BROUGHT else marks.leave
                yield from way(number, ("visible", *step))
            if loaders_draw:
                yield from marks.leave(number, ("dropped", *step))

        def load(step, is_ending):
            if number == 1:
                yield from load_query(step, is_ending)
            elif number == 2:
                yield from dout.load(me, now.steps, step)
            elif bias:
                for of_bias in biases:
                    yield from of_bias.load(me, now.steps, step)
            now.steps += 1

        def begin(n):
            if number == 0:
                yield from places[now.items % 2].load(me, now.items, ("K", n))
                yield from places[1 - now.items % 2].load(me, now.items, ("V", n))
            now.items += 1

        def use(step, is_tested, is_ending):
            marks_last = loaders_draw and m.plant != "marks before loads"
            if not marks_last:
                yield from leave(step, is_tested)
            yield from load(step, is_ending)
            if marks_last:
                yield from leave(step, is_tested)

        yield from x.for_steps(me, begin, use)

    def consumer(me, group, warp):
        who, now = group * WARPS + warp, SimpleNamespace(steps=0, items=0)
        marks = Marks(me, x.marks)

        def step_of(n):
            return x.step_at[n % (2 * slots)]

        def draw_dropped(head):
            me.read(x.drop_at[now.steps % slots], head)
            drawn = drawn_at[now.steps % 2]
            me.write(drawn[who ^ 1], now.steps)
            yield from me.sync(pairs[who // 2])
            me.read(drawn[who], now.steps)

        def one_step(k, v, step, before, is_tested):
            at = now.steps
            yield q.ready(at)
            me.read(step_of(at), step)
            if is_tested:
                yield from marks.take(("visible", *step))
            me.begin(q.at(at), step)
            me.begin(k.at(0), ("K", step[0]))
            if consumers_draw:
                yield from draw_dropped(step[2])
            yield dout.ready(at)
            me.begin(dout.at(at), step)
            me.begin(v.at(0), ("V", step[0]))
            me.finish(q.at(at), k.at(0))
            if bias:
                yield tile_of_bias.ready(at)
                me.read(tile_of_bias.at(at), step)
                tile_of_bias.let_go(me, at)
            me.finish(dout.at(at), v.at(0))
            if loaders_draw:
                yield from marks.take(("dropped", *step))
            me.read(x.stats_at[at % slots], step)
            if ds_places > 2:
                yield ds.ready(at - 1)
            elif m.plant != "the place of dS is not waited for":
                yield ds_empty[at % 2], (at + 1) // 2 - 1
            ds.write(me, at, who, step)
            if ds_places == 2:
                yield ds.ready(at - 1)
            me.begin(dout.at(at), step)
            used = ds.begin_dq(me, at - 1, before, k, before[0]) if before else []
            me.begin(q.at(at), step)
            me.finish(dout.at(at), *used)
            if ds_places == 2:
                me.arrive(ds_empty[(at + 1) % 2])
            if before:
                me.read(step_of(at - 1), before)  # add_dq_before()
            me.finish(q.at(at))
            me.read(step_of(at), step)
            q.let_go(me, at)
            dout.let_go(me, at)
            now.steps += 1

        def use(n):
            k, v = places[now.items % 2], places[1 - now.items % 2]
            yield k.ready(now.items)
            yield v.ready(now.items)
            before = None
            for i, (head, is_tested) in enumerate(items[n]):
                yield from one_step(k, v, (n, i, head), before, is_tested)
                before = (n, i, head)
            v.let_go(me, now.items)
            yield ds.ready(now.steps - 1)
            me.finish(*ds.begin_dq(me, now.steps - 1, before, k, before[0]))
            k.let_go(me, now.items)
            me.read(step_of(now.steps - 1), before)
            now.items += 1

        yield from each_item(me, x.item, use)

    x.start(loader)
    if seen is None:
        m.warps(2, consumer)
        return
    apart = consume_apart(x, places, of_groups, seen, slots, consumers_draw, bias)
    m.warps(2, apart)


def consume_apart(x, places, biases, seen, slots, draws, bias):
    """Warpgroups with keys of their own, in two blocks."""
    named, pairs = barriers(2, WARPS), barriers(WARPS, 2)
    drawn_at = [cells(f"draws of block {b} for", ALL) for b in range(2)]
    ds_at = [[cells(f"dS {slot} of {group}", 2 * WARPS) for slot in range(2)] for group in range(2)]

    def consumer(me, group, warp):
        who, now = group * WARPS + warp, SimpleNamespace(steps=0, seen=0, items=0)
        marks = Marks(me, x.marks)

        def let_go(at):
            x.q.let_go(me, at)
            x.dout.let_go(me, at)

        def block(b, at, step, k, v, ds):
            rows = (
                (x.q.at(at), step),
                (x.dout.at(at), step),
                (k.at(0), ("K", step[0])),
                (v.at(0), ("V", step[0])),
            )
            for cell, value in rows:
                me.begin(cell, value)
            if draws:
                me.read(x.drop_at[at % slots], step[2])
                drawn = drawn_at[0 if x.m.plant == "one place for draws" else b]
                me.write(drawn[who ^ 1], (at, b))
                yield from me.sync(pairs[who // 2])
                me.read(drawn[who], (at, b))
            me.read(x.stats_at[at % slots], step)
            if bias:
                of_bias = biases[group][b]
                if x.m.plant != "a bias is not waited for":
                    yield of_bias.ready(at)
                me.read(of_bias.at(at), step)
                of_bias.let_go(me, at)
            me.finish(*(cell for cell, _ in rows))
            me.write(ds[b * WARPS + warp], step)

        def one_step(k, v, step, is_tested):
            at = now.steps
            yield x.q.ready(at)
            yield x.dout.ready(at)
            me.read(x.step_at[at % slots], step)
            if is_tested:
                yield from marks.take(("visible", *step))
            now.steps += 1
            if group not in seen[step[:2]]:
                for of_bias in biases[group] * bias:
                    yield of_bias.ready(at)
                    of_bias.let_go(me, at)
                let_go(at)
                return
            ds = ds_at[group][now.seen % 2 if x.m.plant != "one place for dS" else 0]
            now.seen += 1
            for b in range(2):
                yield from block(b, at, step, k, v, ds)
            me.fence()
            for cell in (x.q.at(at), x.dout.at(at)):  # products of dV and dK
                me.begin(cell, step)
            yield from me.sync(named[group])
            for cell in ds:
                me.begin(cell, step)
            me.begin(k.at(0), ("K", step[0]))
            me.finish(x.q.at(at), x.dout.at(at))
            me.read(x.step_at[at % slots], step)
            let_go(at)
            me.finish(*ds, k.at(0))

        def use(n):
            k, v = places[now.items % 2], places[1 - now.items % 2]
            yield k.ready(now.items)
            yield v.ready(now.items)
            for i, (head, is_tested) in enumerate(x.items[n]):
                yield from one_step(k, v, (n, i, head), is_tested)
            k.let_go(me, now.items)
            v.let_go(me, now.items)
            now.items += 1

        yield from each_item(me, x.item, use)

    return consumer
