"""The roles of the backward with modifiers in two kernels for protocols.py, which tells what such a
model is. Items, steps and marks are those of protocols_backward_mod.py."""

from __future__ import annotations

from types import SimpleNamespace

from tests.tools.protocols import WARPS, Slots, cells
from tests.tools.protocols_backward_mod import ALL, Marks, ModProducers
from tests.tools.protocols_split import WideItems, weights_between_warps

MARK_SLOTS, DRAW_AHEAD = 2, 3


class Walk(WideItems):
    def __init__(self, me, x):
        super().__init__(me, x.item, list(enumerate(x.items)))

    def step(self, at):
        return (at.n, at.i, self.items[at.n][1][at.i][0])

    def visible(self, marks, at):
        """Waits for the marks of a step that has tests."""
        if self.items[at.n][1][at.i][1]:
            yield from marks.take(("visible", *self.step(at)))

    def is_last(self, at):
        return at.i == at.count - 1


def split_mod_dkdv(m, items, slots=3, drops=False, draws=False):
    """load_dkdv_steps() of bwd_split/produce.cuh, consume_dv() and consume_dk() of bwd_split/dkdv.cuh."""
    x = ModProducers(m, items, MARK_SLOTS, WARPS, draws, DRAW_AHEAD)
    k, v = Slots("K", 1, WARPS), Slots("V", 1, WARPS)
    q, dout = Slots("Q", slots, ALL, full=3), Slots("dO", slots, ALL)
    stats_at, step_at, drop_at = (cells(name, slots) for name in ("stats", "step", "keys of dropout"))
    weights = weights_between_warps(1)

    def loader(me, number):
        marks, now = Marks(me, x.marks), SimpleNamespace(items=0, steps=0, stale=0, head=None)

        def begin(n):
            now.head = None
            if number == 0:
                yield from k.load(me, now.items, ("K", n))
                yield from v.load(me, now.items, ("V", n))
            now.items += 1

        def load_query(step, is_ending):
            at, head = now.steps, step[2]
            yield q.left(at)
            if drops and head != now.head:
                now.stale = 1 if m.plant == "keys of dropout of a head in one slot" else slots
            now.head = head
            now.stale -= 1
            if drops and now.stale >= 0:
                me.write(drop_at[at % slots], head)
            me.copy(q.full[at % slots], q.at(at), step)
            me.copy(q.full[at % slots], stats_at[at % slots], step)
            me.write(step_at[at % slots], step)
            me.arrive(q.full[at % slots])
            if is_ending:
                me.arrive(x.ending)

        def use(step, is_tested, is_ending):
            if is_tested:
                yield from marks.leave(number, ("visible", *step))
            if number == 1:
                yield from load_query(step, is_ending)
            elif number == 2:
                yield from dout.load(me, now.steps, step)
            now.steps += 1

        yield from x.for_steps(me, begin, use)

    def consume_weights(me, warp):
        walk, marks, now = Walk(me, x), Marks(me, x.marks), SimpleNamespace(q=0, dout=0, items=0)

        def issue_scores(at):
            if at.i == 0:
                yield k.ready(now.items)
                me.read(k.at(0), ("K", at.n))  # columns that are held
                now.items += 1
            yield q.ready(now.q)
            me.read(step_at[now.q % slots], walk.step(at))
            me.begin(q.at(now.q), walk.step(at))
            me.begin(k.at(0), ("K", at.n))

        def take_bits(at):
            yield from walk.visible(marks, at)
            me.read(x.item.at(at.place), at.n)
            if drops:
                me.read(drop_at[now.q % slots], walk.step(at)[2])

        def form_weights(at):
            me.finish(q.at(now.q), k.at(0))
            me.read(x.item.at(at.place), at.n)
            me.read(stats_at[now.q % slots], walk.step(at))
            q.let_go(me, now.q)
            if walk.is_last(at):
                k.let_go(me, 0)
            now.q += 1

        def send_weights(at):
            yield from weights[warp].put(me, now.q - 1, walk.step(at))

        def begin(at):
            yield from issue_scores(at)
            yield from take_bits(at)
            form_weights(at)
            yield from send_weights(at)

        def step(before, at):
            if at:
                yield from issue_scores(at)
            yield dout.ready(now.dout)
            me.begin(dout.at(now.dout), walk.step(before))
            if at:
                yield from take_bits(at)
                form_weights(at)
            me.finish(dout.at(now.dout))
            dout.let_go(me, now.dout)
            now.dout += 1
            if at:
                yield from send_weights(at)

        yield from walk.walk(begin, step)

    def consume_gradients(me, warp):
        walk, now = Walk(me, x), SimpleNamespace(steps=0, items=0)  # of dP; dK is a step behind

        def read_delta(at):
            me.read(stats_at[now.steps % slots], walk.step(at))

        def issue_dp(at):
            if at.i == 0:
                yield v.ready(now.items)
                me.read(v.at(0), ("V", at.n))
                now.items += 1
            yield q.ready(now.steps)
            me.read(step_at[now.steps % slots], walk.step(at))
            yield dout.ready(now.steps)
            if not drops:
                read_delta(at)
            me.begin(dout.at(now.steps), walk.step(at))
            me.begin(v.at(0), ("V", at.n))

        def form_ds(at):
            me.finish(dout.at(now.steps), v.at(0))
            dout.let_go(me, now.steps)
            if walk.is_last(at):
                v.let_go(me, 0)
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
            me.begin(q.at(used), walk.step(before))
            if at:
                yield from form_ds(at)
            me.finish(q.at(used))
            q.let_go(me, used)
            if m.plant == "a step is read after its Q is let go":
                me.read(step_at[used % slots], walk.step(before))

        yield from walk.walk(begin, step)

    x.start(loader)
    for warp in range(WARPS):
        m.role(f"weights {warp}", consume_weights, warp)
        m.role(f"gradients {warp}", consume_gradients, warp)


def split_mod_dq(m, items, k_stages=2, v_stages=1, late_dp=False, drops=False, draws=False):
    """load_dq_steps() of bwd_split/produce.cuh with consume_dq() of bwd_split/dq.cuh. Keys of dropout lie
    with an item. `late_dp`: that product comes after the use of the scores."""
    x = ModProducers(m, items, MARK_SLOTS, ALL, draws, DRAW_AHEAD)
    q, dout = [Slots("Q", 1, WARPS) for _ in range(2)], [Slots("dO", 1, WARPS) for _ in range(2)]
    k, v = Slots("K", k_stages, ALL, full=2), Slots("V", v_stages, ALL)
    step_at = cells("step", k_stages)
    drop_at = cells("keys of dropout", 1 if m.plant == "one place for keys of dropout" else 2)

    def loader(me, number):
        marks, now = Marks(me, x.marks), SimpleNamespace(items=0, steps=0)

        def begin(n):
            if number == 0:
                if drops:
                    me.write(drop_at[now.items % len(drop_at)], n)
                for rows in (*q, *dout):
                    yield from rows.load(me, now.items, n)
            now.items += 1

        def use(step, is_tested, is_ending):
            at = now.steps
            if is_tested:
                yield from marks.leave(number, ("visible", *step))
            if number == 1:
                yield from k.load(me, at, step)
                me.write(step_at[at % k_stages], step)
                me.arrive(k.full[at % k_stages])
                if is_ending:
                    me.arrive(x.ending)
            elif number == 2:
                yield from v.load(me, at, step)
            now.steps += 1

        yield from x.for_steps(me, begin, use)

    def consumer(me, group, warp):
        walk, marks, now = Walk(me, x), Marks(me, x.marks), SimpleNamespace(steps=0, items=0)
        let_go_early = m.plant == "an item is let go before its last draw"

        def issue_dp(at):
            yield v.ready(now.steps)
            me.begin(dout[group].at(0), at.n)
            me.begin(v.at(now.steps), walk.step(at))

        def draw(at):
            me.read(x.item.at(at.place), at.n)
            if let_go_early and walk.is_last(at):
                walk.release(at)
            if drops:
                me.read(drop_at[at.place % len(drop_at)], at.n)

        def one_step(at):
            used, is_last = now.steps, walk.is_last(at)
            yield k.ready(used)
            me.read(step_at[used % k_stages], walk.step(at))
            me.begin(q[group].at(0), at.n)
            me.begin(k.at(used), walk.step(at))
            if not late_dp:
                yield from issue_dp(at)
            yield from walk.visible(marks, at)
            draw(at)
            me.finish(q[group].at(0), k.at(used))
            if is_last:
                q[group].let_go(me, now.items)
            me.read(x.item.at(at.place), at.n)
            if late_dp:
                yield from issue_dp(at)
            me.finish(dout[group].at(0), v.at(used))
            v.let_go(me, used)
            if is_last:
                dout[group].let_go(me, now.items)
            me.begin(k.at(used), walk.step(at))
            me.finish(k.at(used))
            k.let_go(me, used)
            now.steps += 1

        while (at := (yield from walk.next())) is not None:
            yield q[group].ready(now.items)
            yield dout[group].ready(now.items)
            while at.i < at.count:
                yield from one_step(at)
                at.i += 1
            if not let_go_early:
                walk.release(at)
            now.items += 1

    x.start(loader)
    m.warps(2, consumer)
