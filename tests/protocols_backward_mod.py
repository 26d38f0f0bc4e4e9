"""The roles of the backward with modifiers for tests/protocols.py, which tells what such a model is."""

from __future__ import annotations

from types import SimpleNamespace

from tests.protocols import CHUNK, END, WARPS, Barrier, Slots, barriers, cells, each_item

ALL = 2 * WARPS  # warps of both warpgroups


def backward_mod(
    m, items, slots=2, mark_slots=4, loaders_draw=False, consumers_draw=False, bias=False, draws=False
):
    """schedule_mod_keys() and load_mod_steps() of bwd_mod_produce.cuh, consume_mod_keys() of
    bwd_mod_consume.cuh. A step says which head it is of and whether it is tested. Loaders that draw leave a
    second mark for every step."""
    places = Slots("first place of keys", 1, ALL), Slots("second place", 1, ALL)
    q, dout, item = Slots("Q", slots, ALL, full=3), Slots("dO", slots, ALL), Slots("item", 2, ALL + 3)
    chunk, tile_of_bias, ending = Slots("chunk", 2, 3), Slots("bias", 1, ALL), Barrier(1)
    marks = [Slots(f"marks of loader {loader}", mark_slots, ALL, full=3) for loader in range(3)]
    for of_loader in marks:  # barriers of all loaders, places of their own
        of_loader.full, of_loader.empty = marks[0].full, marks[0].empty
    stats_at, step_at = cells("stats", slots), cells("step", 2 * slots)
    drop_at = cells("keys of dropout", slots)
    ds_full, ds_at = barriers(3, ALL), [cells(f"dS {slot} of", ALL) for slot in range(3)]
    pairs, drawn_at = barriers(WARPS, 2), [cells(f"draws {slot} for", ALL) for slot in range(2)]

    def scheduler(me):
        found = chunks = 0
        for n, steps in enumerate(items):
            yield item.left(found)
            me.write(item.at(found), n)
            for first in range(0, len(steps), CHUNK):
                me.arrive(chunk.full[(chunks - 1) % 2] if first else item.full[found % 2])
                yield chunk.left(chunks)
                me.write(chunk.at(chunks), (n, first, first + CHUNK >= len(steps)))
                chunks += 1
            if steps:
                me.arrive(chunk.full[(chunks - 1) % 2])
                if draws:
                    yield ending, found
                found += 1
        yield from item.put(me, found, END)

    def loader(me, number):
        now = SimpleNamespace(items=0, chunks=0, steps=0, marks=0, stale=0, head=None)

        def leave(step, is_tested):
            for which in ["visible"] * is_tested + ["dropped"] * loaders_draw:
                yield from marks[number].put(me, now.marks, (which, *step))
                now.marks += 1

        def load_query(step, is_ending):
            at, head = now.steps, step[2]
            yield from q.load(me, at, step)
            if now.head != head:
                now.stale, now.head = slots, head
            me.copy(q.full[at % slots], stats_at[at % slots], step)
            me.write(step_at[at % (2 * slots)], step)
            if consumers_draw and now.stale > 0:
                me.write(drop_at[at % slots], head)
            me.arrive(q.full[at % slots])
            if is_ending:
                me.arrive(ending)
            now.stale -= 1

        def load(step, is_ending):
            if number == 1:
                yield from load_query(step, is_ending)
            elif number == 2:
                yield from dout.load(me, now.steps, step)
            elif bias:
                yield from tile_of_bias.load(me, now.steps, step)
            now.steps += 1

        def use(n):
            now.head = None
            if number == 0:
                yield from places[now.items % 2].load(me, now.items, ("K", n))
                yield from places[1 - now.items % 2].load(me, now.items, ("V", n))
            now.items += 1
            is_last = False
            while not is_last:
                _, first, is_last = part = yield from chunk.take(me, now.chunks)
                count = min(CHUNK, len(items[n]) - first)
                for i, (head, is_tested) in enumerate(items[n][first : first + count], first):
                    marks_last = loaders_draw and m.plant != "marks before loads"
                    if not marks_last:
                        yield from leave((n, i, head), is_tested)
                    yield from load((n, i, head), is_last and i == first + max(0, count - 6))
                    if marks_last:
                        yield from leave((n, i, head), is_tested)
                me.read(chunk.at(now.chunks), part)
                chunk.let_go(me, now.chunks)
                now.chunks += 1

        yield from each_item(me, item, use)

    def consumer(me, group, warp):
        who, now = group * WARPS + warp, SimpleNamespace(steps=0, items=0, marks=0)

        def step_of(n):
            return step_at[n % (2 * slots)]

        def wait_for_ds_before():
            yield ds_full[(now.steps - 1) % 3], (now.steps - 1) // 3

        def issue_dq_before(k, step):
            for cell in ds_at[(now.steps - 1) % 3]:
                me.begin(cell, step)
            me.begin(k.at(0), ("K", step[0]))
            return [*ds_at[(now.steps - 1) % 3], k.at(0)]

        def take_mark(which, step):
            yield marks[0].ready(now.marks)
            for of_loader in marks:
                me.read(of_loader.at(now.marks), (which, *step))
            marks[0].let_go(me, now.marks)
            now.marks += 1

        def draw_dropped(head):
            me.read(drop_at[now.steps % slots], head)
            drawn = drawn_at[now.steps % 2]
            me.write(drawn[who ^ 1], now.steps)
            yield from me.sync(pairs[who // 2])
            me.read(drawn[who], now.steps)

        def one_step(k, v, step, before, is_tested):
            at = now.steps
            yield q.ready(at)
            me.read(step_of(at), step)
            if is_tested:
                yield from take_mark("visible", step)
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
                yield from take_mark("dropped", step)
            me.read(stats_at[at % slots], step)
            yield from wait_for_ds_before()
            me.write(ds_at[at % 3][who], step)
            me.fence()
            me.arrive(ds_full[at % 3])
            me.begin(dout.at(at), step)
            used = issue_dq_before(k, before) if before else []
            me.begin(q.at(at), step)
            me.finish(dout.at(at), *used)
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
            yield from wait_for_ds_before()
            me.finish(*issue_dq_before(k, before))
            k.let_go(me, now.items)
            me.read(step_of(now.steps - 1), before)
            now.items += 1

        yield from each_item(me, item, use)

    m.role("scheduler", scheduler)
    for number in range(3):
        m.role(f"loader {number}", loader, number)
    m.warps(2, consumer)
