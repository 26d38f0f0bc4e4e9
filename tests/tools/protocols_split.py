"""The roles of the backward in two kernels for protocols.py, which tells what such a model is: plain above
head_dim 128, with modifiers at every head_dim. Items, steps and marks of the latter are those of
protocols_backward_mod.py. Consumers are the same for both, as in bwd_split/dkdv.cuh and dq.cuh."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from tests.tools.protocols import ALL, END, WARPS, Slots, cells, each_item
from tests.tools.protocols_backward import Items, KeyProducers
from tests.tools.protocols_backward_mod import Marks, ModProducers

MARK_SLOTS, DRAW_AHEAD = 2, 3


class Walk:
    """PlainSteps and ModSteps of bwd_split/steps.cuh: take_work(), take_following_work() and release_work().
    With modifiers every item has steps, and `marks` say which keys of a step are visible."""

    def __init__(self, me, x):
        self.me, self.item, self.items, self.place = me, x.item, x.items, 0
        self.marks = Marks(me, x.marks) if hasattr(x, "marks") else None

    def steps_of(self, n):
        return self.items[n] if self.marks else self.items[n][1]

    def step(self, at):
        """What is written for a step: its item, its number and, with modifiers, its head."""
        return (at.n, at.i, self.items[at.n][at.i][0]) if self.marks else (at.n, at.i)

    def take_bits(self, at):
        """Waits for the marks of a step that has tests."""
        if self.marks:
            if self.items[at.n][at.i][1]:
                yield from self.marks.take(("visible", *self.step(at)))
            self.me.read(self.item.at(at.place), at.n)

    def is_last(self, at):
        return at.i == at.count - 1

    def peek(self):
        return (yield from self.item.take(self.me, self.place))

    def taken(self, n):
        self.place += 1
        return SimpleNamespace(n=n, i=0, place=self.place - 1, count=len(self.steps_of(n)))

    def next(self):
        while (n := (yield from self.peek())) != END:
            at = self.taken(n)
            if at.count:
                return at
            self.item.let_go(self.me, at.place)
        return None

    def following(self):
        n = yield from self.peek()
        holds_any = self.me.machine.plant == "an item without steps is held"
        return self.taken(n) if n != END and (self.steps_of(n) or holds_any) else None

    def release(self, at):
        self.me.read(self.item.at(at.place), at.n)
        self.item.let_go(self.me, at.place)

    def walk(self, begin, step):
        """The loops of the kernels of dK and dV: begin(item), then step(what goes on, what begins beside it
        or None)."""
        while (at := (yield from self.next())) is not None:
            yield from begin(at)
            while at is not None:
                before, ends = SimpleNamespace(**vars(at)), self.is_last(at)
                if ends:
                    at = yield from self.following()
                else:
                    at.i += 1
                yield from step(before, at)
                if ends:
                    self.release(before)


def weights_between_warps(slots):
    """One ring of places for each pair of warps, with barriers of all of them."""
    weights = [Slots(f"weights {warp}", slots, WARPS, full=WARPS) for warp in range(WARPS)]
    for of_warp in weights:
        of_warp.full, of_warp.empty = weights[0].full, weights[0].empty
    return weights


def start_dkdv(m, x, role, slots, weight_stages=1, all_held=False, drops=False):
    """consume_dv() and consume_dk() of bwd_split/dkdv.cuh. all_held: K and V are read into registers. x: the
    rings, and with modifiers `step_at` and `drop_at`."""
    weights = weights_between_warps(weight_stages)

    def hold(me, keys, what, at, items_done):
        yield keys.ready(items_done)
        me.read(keys.at(0), (what, at.n))
        if all_held:
            keys.let_go(me, items_done)

    def begin_keys(me, keys, what, at):
        if not all_held:
            me.begin(keys.at(0), (what, at.n))

    def finish_rows(me, rows, keys, is_last):
        """A product of a row's place and of keys, and who may load there again."""
        ring, number = rows
        me.finish(ring.at(number), *([] if all_held else [keys.at(0)]))

        def let_go():
            ring.let_go(me, number)
            if is_last and not all_held:
                keys.let_go(me, 0)

        return let_go

    def read_step(me, walk, number, at):
        if walk.marks:
            me.read(x.step_at[number % slots], walk.step(at))

    def consume_weights(me, warp):
        walk, now = Walk(me, x), SimpleNamespace(q=0, dout=0, items=0)

        def issue_scores(at):
            if at.i == 0:
                yield from hold(me, x.k, "K", at, now.items)
                now.items += 1
            yield x.q.ready(now.q)
            read_step(me, walk, now.q, at)
            me.begin(x.q.at(now.q), walk.step(at))
            begin_keys(me, x.k, "K", at)

        def form_weights(at):
            yield from walk.take_bits(at)
            if drops:
                me.read(x.drop_at[now.q % slots], walk.step(at)[2])
            let_go = finish_rows(me, (x.q, now.q), x.k, walk.is_last(at))
            if walk.marks:
                me.read(x.item.at(at.place), at.n)
            me.read(x.stats_at[now.q % slots], walk.step(at))
            let_go()
            now.q += 1

        def begin(at):
            yield from issue_scores(at)
            yield from form_weights(at)
            yield from weights[warp].put(me, now.q - 1, walk.step(at))

        def step(before, at):
            if at:
                yield from issue_scores(at)
            yield x.dout.ready(now.dout)
            me.begin(x.dout.at(now.dout), walk.step(before))
            if at:
                yield from form_weights(at)
            me.finish(x.dout.at(now.dout))
            x.dout.let_go(me, now.dout)
            now.dout += 1
            if at:
                yield from weights[warp].put(me, now.q - 1, walk.step(at))

        yield from walk.walk(begin, step)

    def consume_gradients(me, warp):
        walk, now = Walk(me, x), SimpleNamespace(steps=0, items=0)  # of dP; dK is a step behind

        def read_delta(at):
            me.read(x.stats_at[now.steps % slots], walk.step(at))

        def issue_dp(at):
            if at.i == 0:
                yield from hold(me, x.v, "V", at, now.items)
                now.items += 1
            yield x.q.ready(now.steps)
            read_step(me, walk, now.steps, at)
            yield x.dout.ready(now.steps)
            if not drops:
                read_delta(at)
            me.begin(x.dout.at(now.steps), walk.step(at))
            begin_keys(me, x.v, "V", at)

        def form_ds(at):
            finish_rows(me, (x.dout, now.steps), x.v, walk.is_last(at))()
            yield weights[warp].ready(now.steps)
            if drops:
                read_delta(at)
            me.read(weights[warp].at(now.steps), walk.step(at))
            weights[warp].let_go(me, now.steps)
            now.steps += 1

        def begin(at):
            yield from issue_dp(at)
            yield from form_ds(at)

        def step(before, at):
            used = now.steps - 1
            if at:
                yield from issue_dp(at)
            me.begin(x.q.at(used), walk.step(before))
            if at:
                yield from form_ds(at)
            me.finish(x.q.at(used))
            x.q.let_go(me, used)
            if m.plant == "a step is read after its Q is let go":
                read_step(me, walk, used, before)

        yield from walk.walk(begin, step)

    for warp in range(WARPS):
        role(f"weights {warp}", consume_weights, warp)
        role(f"gradients {warp}", consume_gradients, warp)


def split_dkdv(m, items, slots=3, weight_stages=1, all_held=False, draws=False):
    """schedule_work() of bwd/produce.cuh and load_dkdv_steps() of bwd_split/produce.cuh, plain."""
    x = KeyProducers(m, 0, items, iter(range(len(items))), draws, slots, 1, swap=False, readers=WARPS)
    for name, body in dict(scheduler=x.schedule, keys=x.load_keys, queries=x.load_queries).items():
        x.role(name, body)
    x.role("douts", x.load_steps, x.dout)
    start_dkdv(m, x, x.role, slots, weight_stages, all_held)


def split_mod_dkdv(m, items, slots=3, drops=False, draws=False):
    """load_dkdv_steps() of bwd_split/produce.cuh with modifiers."""
    x = ModProducers(m, items, MARK_SLOTS, WARPS, draws, DRAW_AHEAD)
    x.k, x.v = Slots("K", 1, WARPS), Slots("V", 1, WARPS)
    x.q, x.dout = Slots("Q", slots, ALL, full=3), Slots("dO", slots, ALL)
    x.stats_at, x.step_at, x.drop_at = (cells(name, slots) for name in ("stats", "step", "keys of dropout"))

    def loader(me, number):
        marks, now = Marks(me, x.marks), SimpleNamespace(items=0, steps=0)
        fresh = 1 if m.plant == "keys of dropout of a head in one slot" else slots
        load_query = x.query_loader(me, drops, fresh)

        def begin(n):
            if number == 0:
                yield from x.k.load(me, now.items, ("K", n))
                yield from x.v.load(me, now.items, ("V", n))
            now.items += 1

        def use(step, is_tested, is_ending):
            if is_tested:
                yield from marks.leave(number, ("visible", *step))
            if number == 1:
                yield from load_query(step, is_ending)
            elif number == 2:
                yield from x.dout.load(me, now.steps, step)
            now.steps += 1

        yield from x.for_steps(me, begin, use)

    x.start(loader)
    start_dkdv(m, x, m.role, slots, drops=drops)


def start_dq(m, x, late_dp=False, drops=False):
    """consume_dq() of bwd_split/dq.cuh. late_dp: that product comes after the use of the scores."""

    def consumer(me, group, warp):
        walk, now = Walk(me, x), SimpleNamespace(steps=0, items=0)
        q, dout = x.q[group], x.dout[group]
        let_go_early = m.plant == "an item is let go before its last draw"

        def issue_dp(at):
            yield x.v.ready(now.steps)
            me.begin(dout.at(0), at.n)
            me.begin(x.v.at(now.steps), walk.step(at))

        def one_step(at):
            used, is_last = now.steps, walk.is_last(at)
            yield x.k.ready(used)
            if walk.marks:
                me.read(x.step_at[used % x.k.slots], walk.step(at))
            me.begin(q.at(0), at.n)
            me.begin(x.k.at(used), walk.step(at))
            if not late_dp:
                yield from issue_dp(at)
            yield from walk.take_bits(at)
            if let_go_early and is_last:
                walk.release(at)
            if drops:
                me.read(x.drop_at[at.place % len(x.drop_at)], at.n)
            me.finish(q.at(0), x.k.at(used))
            if is_last:
                q.let_go(me, now.items)
            me.read(x.item.at(at.place), at.n)
            if late_dp:
                yield from issue_dp(at)
            me.finish(dout.at(0), x.v.at(used))
            x.v.let_go(me, used)
            if is_last:
                dout.let_go(me, now.items)
            me.begin(x.k.at(used), walk.step(at))
            if m.plant == "K is let go before dQ is finished":
                x.k.let_go(me, used)
                me.finish(x.k.at(used))
            else:
                me.finish(x.k.at(used))
                x.k.let_go(me, used)
            now.steps += 1

        while (at := (yield from walk.next())) is not None:
            yield q.ready(now.items)
            yield dout.ready(now.items)
            while at.i < at.count:
                yield from one_step(at)
                at.i += 1
            if not let_go_early:
                walk.release(at)
            now.items += 1

    m.warps(2, consumer)


def rows_of_groups():
    return [Slots("Q", 1, WARPS) for _ in range(2)], [Slots("dO", 1, WARPS) for _ in range(2)]


def split_dq(m, items, k_stages=2, v_stages=1, draws=False):
    """schedule_work() of bwd/produce.cuh and load_dq_steps() of bwd_split/produce.cuh, plain. An item is a
    number and its tiles."""
    x = Items(m, 0, items, iter(range(len(items))), draws)
    x.q, x.dout = rows_of_groups()
    x.k, x.v = Slots("K", k_stages, ALL), Slots("V", v_stages, ALL)

    def load_rows(me):
        loaded = itertools.count()

        def use(n):
            at = next(loaded) if items[n][1] else None
            for rows in (*x.q, *x.dout) if items[n][1] else ():
                yield from rows.load(me, at, n)

        yield from each_item(me, x.item, use)

    x.role("scheduler", x.schedule)
    x.role("Q and dO", load_rows)
    x.role("K", x.load_steps, x.k, True)
    x.role("V", x.load_steps, x.v)
    start_dq(m, x)


def split_mod_dq(m, items, k_stages=2, v_stages=1, late_dp=False, drops=False, draws=False):
    """load_dq_steps() of bwd_split/produce.cuh with modifiers. Keys of dropout lie with an item."""
    x = ModProducers(m, items, MARK_SLOTS, ALL, draws, DRAW_AHEAD)
    x.q, x.dout = rows_of_groups()
    x.k, x.v = Slots("K", k_stages, ALL, full=2), Slots("V", v_stages, ALL)
    x.step_at = cells("step", k_stages)
    x.drop_at = cells("keys of dropout", 1 if m.plant == "one place for keys of dropout" else 2)

    def loader(me, number):
        marks, now = Marks(me, x.marks), SimpleNamespace(items=0, steps=0)

        def begin(n):
            if number == 0:
                if drops:
                    me.write(x.drop_at[now.items % len(x.drop_at)], n)
                for rows in (*x.q, *x.dout):
                    yield from rows.load(me, now.items, n)
            now.items += 1

        def use(step, is_tested, is_ending):
            at = now.steps
            if is_tested:
                yield from marks.leave(number, ("visible", *step))
            if number == 1:
                yield from x.k.load(me, at, step)
                me.write(x.step_at[at % k_stages], step)
                me.arrive(x.k.full[at % k_stages])
                if is_ending:
                    me.arrive(x.ending)
            elif number == 2:
                yield from x.v.load(me, at, step)
            now.steps += 1

        yield from x.for_steps(me, begin, use)

    x.start(loader)
    start_dq(m, x, late_dp, drops)
