"""The roles of the forward kernels for protocols.py, which tells what such a model is."""

from __future__ import annotations

from types import SimpleNamespace

from tests.tools.protocols import CHUNK, END, WARPS, Barrier, Slots, barriers, cells


def forward(
    m, items, kv_stages=4, q_stages=2, groups=2, draws=False, apart=False, raw_stages=0, by_rows=False
):
    """schedule_work() and load_tiles() of fwd/produce.cuh, consume() of fwd/consume.cuh. An item is a list
    of tiles, a tile the groups that see it; group 0 sees the last one. ``apart``: load_cached_tiles() of
    fwd_cached/produce.cuh, which has a role for K and one for V. ``by_rows``: lanes copy. Where there are no
    bytes pass_on_tiles() of fwd_cached/copies.cuh then tells the consumers. ``raw_stages``: of the ring of
    bytes that convert_tiles() of fwd_cached/convert.cuh leaves, with load_slot_factors() of
    fwd_cached/quantized.cuh. Of its warps the first one writes, and the others let go of what they have
    read."""
    kv = Slots("K or V", kv_stages, groups * WARPS, full=WARPS if raw_stages else 1)
    q = Slots("Q", q_stages, groups * WARPS)
    raw, factors = Slots("bytes", max(raw_stages, 1), WARPS), Slots("factors", max(raw_stages, 1), 1)
    copied = raw if raw_stages else kv
    item, ending, turn = Slots("item", 4, 1), Barrier(1), barriers(groups, 2 * WARPS)
    landed = barriers(kv_stages, 1)

    def scheduler(me):
        found = 0
        for n, tiles in enumerate(items):
            if not tiles:
                continue
            yield q.left(found)
            item.fill(me, found, n)
            yield from q.load(me, found, n)
            if draws:
                yield ending, found
            found += 1
        yield q.left(found)
        item.fill(me, found, END)
        q.fill(me, found, END)

    def loader(me, load, tells):
        """K of a tile, then V of the one before; `tells` that the next item may be drawn."""
        used = place = 0
        v = None
        while (n := (yield from item.take(me, place))) != END:
            for left in range(len(items[n]), 0, -1):
                if tells and left == min(3, len(items[n])):
                    me.arrive(ending)
                for what in (("K", n, left), v) if v else (("K", n, left),):
                    yield from load(me, used, what)
                    used += 1
                v = ("V", n, left)
            me.read(item.at(place), n)
            place += 1
        if v:
            yield from load(me, used, v)

    def loader_of(what):
        def role(me):
            used, begun, place = int(what == "V"), 0, 0
            while (n := (yield from item.take(me, place))) != END:
                for left in range(len(items[n]), 0, -1):
                    if what == "V":
                        is_last = left == 1
                        if is_last and m.plant != "V does not wait for the next item":
                            is_last = (yield from item.take(me, place + 1)) == END
                        used += not is_last
                    else:
                        if left == min(3, len(items[n])):
                            me.arrive(ending)
                        used += begun > 1
                    if by_rows:
                        yield copied.left(used)
                        bars, slots = (copied.full, raw_stages) if raw_stages else (landed, kv_stages)
                        me.copy(bars[used % slots], copied.at(used), (what, n, left), fenced=False)
                    else:
                        yield from copied.load(me, used, (what, n, left))
                    used, begun = used + 1, begun + 1
                me.read(item.at(place), n)
                place += 1

        return role

    def passes_on(me):
        used = place = 0
        while (n := (yield from item.take(me, place))) != END:
            for _ in range(2 * len(items[n])):
                if m.plant != "rows are not waited for":
                    yield landed[used % kv_stages], used // kv_stages
                if m.plant != "rows without a fence":
                    me.fence_copy(kv.at(used))
                me.arrive(kv.full[used % kv_stages])
                used += 1
            me.read(item.at(place), n)
            place += 1

    def load_factors(me, used, what):
        yield raw.left(used)
        me.copy(factors.full[used % raw_stages], factors.at(used), what)

    def converter(me, warp):
        used = place = 0
        while (n := (yield from item.take(me, place))) != END:
            for _ in range(2 * len(items[n])):
                yield raw.ready(used)
                if m.plant != "factors are not waited for":
                    yield factors.ready(used)
                yield kv.left(used)
                what = me.look(raw.at(used))
                me.read(factors.at(used), what)
                if warp == 0:
                    me.write(kv.at(used), what)
                    if m.plant != "elements without a fence":
                        me.fence()
                raw.let_go(me, used)
                me.arrive(kv.full[used % kv_stages])
                used += 1
            place += 1

    def consumer(me, group, warp):
        now = SimpleNamespace(used=0, items=-1, n=None, left=0, new=False)

        def next_step():
            now.new = now.left == 0
            if now.new:
                yield q.ready(now.items + 1)
                if (n := me.look(item.at(now.items + 1))) == END:
                    return False
                now.n, now.left, now.items = n, len(items[n]), now.items + 1
            now.left -= 1
            return True

        def is_seen():
            return group in items[now.n][-1 - now.left]

        def pingpong_arrive():
            me.arrive(turn[(group + 1) % groups])

        def skip_slot():
            yield kv.ready(now.used)
            kv.let_go(me, now.used)
            now.used += 1

        def finish_q():
            if now.left == 0 and (m.plant != "a warp keeps Q" or (group, warp) != (0, 1)):
                q.let_go(me, now.items)

        def issue(what):
            barrier, phase = kv.ready(now.used)
            yield barrier, phase + (m.plant == "parity of V" and what[0] == "V")
            me.begin(kv.at(now.used), what)
            now.used += 1
            return now.used - 1

        def issue_scores():
            me.begin(q.at(now.items), now.n)
            k = yield from issue(("K", now.n, now.left + 1))
            if m.plant == "K let go early":
                kv.let_go(me, k)
            return k

        def finish_scores(k):
            me.finish(kv.at(k), q.at(now.items))
            if m.plant != "K let go early":
                kv.let_go(me, k)
            finish_q()
            me.read(item.at(now.items), now.n)  # mask()

        def finish_output(v):
            me.finish(kv.at(v))
            kv.let_go(me, v)

        def weights():
            return SimpleNamespace(n=now.n, item=now.items, v=("V", now.n, now.left + 1))

        if group == groups - 1:
            me.arrive(turn[0])
        started, of = False, None
        has_step = yield from next_step()
        while has_step:
            yield from me.sync(turn[group])
            if not is_seen():
                yield from skip_slot()
                if started:
                    yield from skip_slot()
                pingpong_arrive()
                finish_q()
                started, has_step = True, (yield from next_step())
                continue
            k = yield from issue_scores()
            pingpong_arrive()
            if started:
                yield from skip_slot()
            started = True
            finish_scores(k)
            of = weights()
            while (has_step := (yield from next_step())) and is_seen():
                yield from me.sync(turn[group])
                k = yield from issue_scores()
                v = yield from issue(of.v)
                pingpong_arrive()
                finish_scores(k)
                finish_output(v)
                if now.new:
                    me.read(item.at(of.item), of.n)  # store()
                of = weights()
            if has_step:
                yield from me.sync(turn[group])
                yield from skip_slot()
            v = yield from issue(of.v)
            if has_step:
                pingpong_arrive()
            finish_output(v)
            me.read(item.at(of.item), of.n)
            if has_step:
                finish_q()
                has_step = yield from next_step()

    m.role("scheduler", scheduler)
    if apart:
        m.role("loader of K", loader_of("K"))
        m.role("loader of V", loader_of("V"))
        if by_rows and not raw_stages:
            m.role("passes on", passes_on)
    else:
        m.role("loader", loader, kv.load, True)
    if raw_stages:
        m.role("loader of factors", loader, load_factors, False)
        for warp in range(WARPS):
            m.role(f"converter {warp}", converter, warp)
    m.warps(groups, consumer)


def forward_mod(m, items, q_stages=2, beside="", draws=False, groups=2, kv_stages=4, places=2, parts=1):
    """schedule_mod_work(), load_mod_tiles() and load_beside() of fwd_mod/produce.cuh, MaskedConsumer of
    fwd_mod/consume.cuh, with three groups as T::kM192 has it. An item is a list of steps, a step the groups
    that see it. ``beside`` the scores stands nothing, a "bias" or "words", in so many `places`, `parts` for a
    step. Beside tall tiles a role of its own loads them. Words are read while products run."""
    kv, q = Slots("K or V", kv_stages, groups * WARPS), Slots("Q", q_stages, groups * WARPS)
    by_itself = groups == 3 and beside != ""
    extra, parts = Slots(beside, places, groups * WARPS), parts if beside else 0
    chunk, ending, turn = Slots("chunk", 4, 1 + by_itself), Barrier(1), barriers(groups, 2 * WARPS)
    work_at, step_at = cells("item", 8), cells("step", kv_stages)

    def chunks_of(steps):
        """Where they begin and end; of tall tiles the first is what is left over."""
        begins = range(-(-len(steps) % CHUNK) if groups == 3 else 0, len(steps), CHUNK)
        return [(max(at, 0), min(at + CHUNK, len(steps))) for at in begins]

    def scheduler(me):
        found = chunks = 0
        for n, steps in enumerate(items):
            me.write(work_at[found % 8], n)
            parts = chunks_of(steps)
            for at, (first, end) in enumerate(parts):
                if at > 0:
                    me.arrive(chunk.full[(chunks - 1) % 4])
                if at == 1:
                    yield from q.load(me, found, n)
                yield chunk.left(chunks)
                me.write(chunk.at(chunks), (n, first, end))
                chunks += 1
            if not steps:
                continue
            me.arrive(chunk.full[(chunks - 1) % 4])
            if len(parts) == 1:
                yield from q.load(me, found, n)
            if draws:
                yield ending, found
            found += 1
        yield from chunk.put(me, chunks, END)

    def load_extra(me, step, what):
        for part in range(step * parts, (step + 1) * parts):
            yield extra.left(part)
            me.copy(extra.full[part % places], extra.at(part), what, fenced=beside == "bias")

    def loader_of_extra(me):
        steps = chunks = found = 0
        while (part := (yield from chunk.take(me, chunks))) != END:
            n, first, end = part
            for i in range(first, end):
                me.read(work_at[found % 8], n)
                yield from load_extra(me, steps, (n, i))
                steps += 1
            me.read(work_at[found % 8], n)
            me.read(chunk.at(chunks), part)
            chunk.let_go(me, chunks)
            chunks += 1
            found += end == len(items[n])

    def loader(me):
        used = steps = chunks = found = 0
        v = None
        while (part := (yield from chunk.take(me, chunks))) != END:
            n, first, end = part
            is_last = end == len(items[n])
            me.read(work_at[found % 8], n)
            for i in range(first, end):
                if is_last and i == max(first, end - 6):
                    me.arrive(ending)
                yield kv.left(used)
                me.write(step_at[used % kv_stages], (n, i))
                for what in (("K", n, i), v) if v else (("K", n, i),):
                    yield from kv.load(me, used, what)
                    used += 1
                if not by_itself:
                    yield from load_extra(me, steps, (n, i))
                steps += 1
                v = ("V", n, i)
            me.read(work_at[found % 8], n)
            me.read(chunk.at(chunks), part)
            chunk.let_go(me, chunks)
            chunks += 1
            found += is_last
        yield kv.left(used)
        me.write(step_at[used % kv_stages], END)
        kv.fill(me, used, END)
        if v:
            yield from kv.load(me, used + 1, v)

    def consumer(me, group, warp):
        now = SimpleNamespace(used=0, items=-1, step=None, next=None)

        def look_ahead():
            yield kv.ready(now.used)
            now.next = me.look(step_at[now.used % kv_stages])

        def begin_step():
            now.step = now.next
            if now.step == END:
                now.used += 1
                return False
            if now.step[1] == 0:
                now.items += 1
                yield q.ready(now.items)
            return True

        def skip_slot():
            yield kv.ready(now.used)
            kv.let_go(me, now.used)
            now.used += 1

        def use_extra(seen):
            for part in range(parts):
                n = now.used // 2 * parts + part
                yield extra.ready(n)
                if m.plant == "a place is let go before it is read":
                    extra.let_go(me, n)
                if seen:
                    me.read(extra.at(n), now.step)
                if m.plant != "a place is let go before it is read":
                    extra.let_go(me, n)

        def skip_step():
            yield from skip_slot()
            yield from use_extra(False)

        def complete():
            if beside == "words":
                yield from use_extra(True)

        def finish_q():
            if now.step[1] == len(items[now.step[0]]) - 1:
                q.let_go(me, now.items)

        def issue_scores():
            me.begin(q.at(now.items), now.step[0])
            me.begin(kv.at(now.used), ("K", *now.step))
            now.used += 1

        def finish_scores(k_ago):
            me.finish(kv.at(now.used - k_ago), q.at(now.items))
            kv.let_go(me, now.used - k_ago)
            finish_q()
            me.read(work_at[now.items % 8], now.step[0])
            if beside == "bias":
                yield from use_extra(True)

        def issue_output(of):
            yield kv.ready(now.used)
            me.begin(kv.at(now.used), ("V", *of))
            now.used += 1

        def finish_output():
            me.finish(kv.at(now.used - 1))
            kv.let_go(me, now.used - 1)

        def is_seen():
            return group in items[now.step[0]][now.step[1]]

        if group == groups - 1:
            me.arrive(turn[0])
        started = is_passed = False
        yield from look_ahead()
        has_step = yield from begin_step()
        while True:
            if not has_step or now.step[1] == 0:
                if (finished := now.items - has_step) >= 0:
                    me.look(work_at[finished % 8])  # store()
                if not has_step:
                    break
            if not is_seen():
                if not is_passed:
                    yield from me.sync(turn[group])
                    yield from skip_step()
                    if started:
                        yield from skip_slot()
                    me.arrive(turn[(group + 1) % groups])
                is_passed, started = False, True
                finish_q()
                yield from look_ahead()
                has_step = yield from begin_step()
                continue
            yield from me.sync(turn[group])
            issue_scores()
            me.arrive(turn[(group + 1) % groups])
            yield from complete()
            if started:
                yield from skip_slot()
            yield from finish_scores(2 if started else 1)
            started, of = True, now.step
            yield from look_ahead()
            while (has_step := (yield from begin_step())) and is_seen():
                yield from me.sync(turn[group])
                issue_scores()
                yield from issue_output(of)
                me.arrive(turn[(group + 1) % groups])
                yield from complete()
                yield from finish_scores(2)
                yield from look_ahead()
                finish_output()
                if now.step[1] == 0:
                    me.look(work_at[(now.items - 1) % 8])
                of = now.step
            if has_step:
                yield from me.sync(turn[group])
                yield from skip_step()
            yield from issue_output(of)
            if has_step:
                me.arrive(turn[(group + 1) % groups])
            is_passed = has_step
            finish_output()

    m.role("scheduler", scheduler)
    m.role("loader", loader)
    if by_itself:
        m.role(f"loader of {beside}", loader_of_extra)
    m.warps(groups, consumer)
