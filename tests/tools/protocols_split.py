"""The roles of the backward above head_dim 128 for protocols.py, which tells what such a model is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from tests.tools.protocols import END, WARPS, Barrier, Slots, each_item
from tests.tools.protocols_backward import ALL, KeyProducers


class WideItems:
    """PlainSteps of bwd_split/steps.cuh: take_work(), take_following_work() and release_work(). ModSteps
    has the same, but there every item has steps."""

    def __init__(self, me, item, items):
        self.me, self.item, self.items, self.place = me, item, items, 0

    def peek(self):
        return (yield from self.item.take(self.me, self.place))

    def taken(self, n):
        self.place += 1
        return SimpleNamespace(n=n, i=0, place=self.place - 1, count=len(self.items[n][1]))

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
        return self.taken(n) if n != END and (self.items[n][1] or holds_any) else None

    def release(self, at):
        self.me.read(self.item.at(at.place), at.n)
        self.item.let_go(self.me, at.place)

    def walk(self, begin, step):
        """The loops of the kernels of dK and dV: begin(item), then step(what goes on, what begins beside it
        or None)."""
        while (at := (yield from self.next())) is not None:
            yield from begin(at)
            while at is not None:
                before, ends = SimpleNamespace(**vars(at)), at.i == at.count - 1
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


def split_dkdv(m, items, slots=3, weight_stages=1, all_held=False, draws=False):
    """schedule_work() of bwd/produce.cuh, load_dkdv_steps() of bwd_split/produce.cuh, consume_dv() and
    consume_dk() of bwd_split/dkdv.cuh."""
    x = KeyProducers(m, 0, items, iter(range(len(items))), draws, slots, 1, swap=False, readers=WARPS)
    weights = weights_between_warps(weight_stages)

    def hold(me, keys, what, at, items_done):
        yield keys.ready(items_done)
        me.read(keys.at(0), (what, at.n))
        if all_held:
            keys.let_go(me, items_done)

    def use_keys(me, keys, what, at, is_over):
        if not all_held:
            me.finish(keys.at(0)) if is_over else me.begin(keys.at(0), (what, at.n))
            if is_over and at.i == at.count - 1:
                keys.let_go(me, 0)

    def consume_weights(me, warp):
        now = SimpleNamespace(q=0, dout=0, items=0)

        def issue_scores(at):
            if at.i == 0:
                yield from hold(me, x.k, "K", at, now.items)
                now.items += 1
            yield x.q.ready(now.q)
            me.begin(x.q.at(now.q), (at.n, at.i))
            use_keys(me, x.k, "K", at, False)

        def form_weights(at):
            me.finish(x.q.at(now.q))
            me.read(x.stats_at[now.q % slots], (at.n, at.i))
            x.q.let_go(me, now.q)
            use_keys(me, x.k, "K", at, True)
            now.q += 1

        def begin(at):
            yield from issue_scores(at)
            form_weights(at)
            yield from weights[warp].put(me, now.q - 1, (at.n, at.i))

        def step(before, at):
            if at:
                yield from issue_scores(at)
            yield x.dout.ready(now.dout)
            me.begin(x.dout.at(now.dout), (before.n, before.i))
            if at:
                form_weights(at)
            me.finish(x.dout.at(now.dout))
            x.dout.let_go(me, now.dout)
            now.dout += 1
            if at:
                yield from weights[warp].put(me, now.q - 1, (at.n, at.i))

        yield from WideItems(me, x.item, items).walk(begin, step)

    def consume_gradients(me, warp):
        now = SimpleNamespace(steps=0, items=0)  # of dP; dK is a step behind

        def issue_dp(at):
            if at.i == 0:
                yield from hold(me, x.v, "V", at, now.items)
                now.items += 1
            yield x.q.ready(now.steps)
            yield x.dout.ready(now.steps)
            me.read(x.stats_at[now.steps % slots], (at.n, at.i))
            me.begin(x.dout.at(now.steps), (at.n, at.i))
            use_keys(me, x.v, "V", at, False)

        def form_ds(at):
            me.finish(x.dout.at(now.steps))
            x.dout.let_go(me, now.steps)
            use_keys(me, x.v, "V", at, True)
            yield weights[warp].ready(now.steps)
            me.read(weights[warp].at(now.steps), (at.n, at.i))
            weights[warp].let_go(me, now.steps)
            now.steps += 1

        def begin(at):
            yield from issue_dp(at)
            yield from form_ds(at)

        def step(before, at):
            q = now.steps - 1
            if at:
                yield from issue_dp(at)
            me.begin(x.q.at(q), (before.n, before.i))
            if at:
                yield from form_ds(at)
            me.finish(x.q.at(q))
            x.q.let_go(me, q)

        yield from WideItems(me, x.item, items).walk(begin, step)

    roles = dict(scheduler=x.schedule_keys, keys=x.load_keys, queries=x.load_queries, douts=x.load_douts)
    for name, body in roles.items():
        x.role(name, body)
    for warp in range(WARPS):
        x.role(f"weights {warp}", consume_weights, warp)
        x.role(f"gradients {warp}", consume_gradients, warp)


def split_dq(m, items, k_stages=2, v_stages=1, draws=False):
    """schedule_work() of bwd/produce.cuh, load_dq_steps() of bwd_split/produce.cuh and consume_dq() of
    bwd_split/dq.cuh. An item is a number and its tiles."""
    item, ending = Slots("item", 2, ALL + 3), Barrier(1)
    q, dout = [Slots("Q", 1, WARPS) for _ in range(2)], [Slots("dO", 1, WARPS) for _ in range(2)]
    k, v = Slots("K", k_stages, ALL), Slots("V", v_stages, ALL)

    def scheduler(me):
        for n, (_, tiles) in enumerate(items):
            yield from item.put(me, n, n)
            if not tiles:
                me.arrive(ending)
            if draws:
                yield ending, n
        yield from item.put(me, len(items), END)

    def load_rows(me):
        loaded = itertools.count()

        def use(n):
            at = next(loaded) if items[n][1] else None
            for rows in (*q, *dout) if items[n][1] else ():
                yield from rows.load(me, at, n)

        yield from each_item(me, item, use)

    def load_keys(me, tiles, is_v):
        used = itertools.count()

        def use(n):
            for i in range(len(items[n][1])):
                yield from tiles.load(me, next(used), (n, i))
                if not is_v and i == len(items[n][1]) - 1:
                    me.arrive(ending)

        yield from each_item(me, item, use)

    def consume_keys(me, group, warp):
        walk, now = WideItems(me, item, items), SimpleNamespace(steps=0, items=0)

        def one_step(at):
            used, is_last = now.steps, at.i == at.count - 1
            yield k.ready(used)
            me.begin(q[group].at(0), at.n)
            me.begin(k.at(used), (at.n, at.i))
            yield v.ready(used)
            me.begin(dout[group].at(0), at.n)
            me.begin(v.at(used), (at.n, at.i))
            me.finish(q[group].at(0), k.at(used))
            if is_last:
                q[group].let_go(me, now.items)
            me.read(item.at(at.place), at.n)
            me.finish(dout[group].at(0), v.at(used))
            v.let_go(me, used)
            if is_last:
                dout[group].let_go(me, now.items)
            me.begin(k.at(used), (at.n, at.i))
            if m.plant == "K is let go before dQ is finished":
                k.let_go(me, used)
                me.finish(k.at(used))
            else:
                me.finish(k.at(used))
                k.let_go(me, used)
            now.steps += 1

        while (at := (yield from walk.next())) is not None:
            yield q[group].ready(now.items)
            yield dout[group].ready(now.items)
            while at.i < at.count:
                yield from one_step(at)
                at.i += 1
            walk.release(at)
            now.items += 1

    m.role("scheduler", scheduler)
    m.role("Q and dO", load_rows)
    m.role("K", load_keys, k, False)
    m.role("V", load_keys, v, True)
    m.warps(2, consume_keys)
