"""What lanes and kernels know of each other's writes, for protocols.py, which tells what a model is.

There all lanes of a warp are one role. Here each is a role of its own, where only some of them see a word
or a barrier change: a vote tells what a lane has seen, not what it
knows. An acquiring load learns what the writer
knew, a relaxed one nothing; __syncwarp brings lanes together.
"""

from __future__ import annotations

import itertools
from collections import Counter

from tests.tools.protocols import Barrier, Cell, join
from tests.tools.protocols_pool import Word

LANES, TILES = 3, 3


class Warp:
    """What its lanes do together."""

    def __init__(self):
        self.votes, self.barriers, self.times = [], [], Counter()

    def meet(self, me, meetings, value):
        """The n-th meeting of a lane is that of the n-th time it comes."""
        at = self.times[me.name, id(meetings)]
        self.times[me.name, id(meetings)] += 1
        while len(meetings) <= at:
            meetings.append(Vote())
        meetings[at].values.append(value)
        return meetings[at]

    def vote(self, me, value):
        """The values of all lanes, and no knowledge of anything."""
        vote = self.meet(me, self.votes, value)
        yield vote, 0
        return vote.values

    def sync(self, me):
        meeting = self.meet(me, self.barriers, None)
        meeting.learn(me.clock)
        me.clock[me.name] += 1
        yield meeting, 0


class Vote:
    def __init__(self):
        self.values, self.known = [], {}

    def passed(self, _):
        return len(self.values) == LANES

    def check(self, _):
        pass

    def learn(self, clock):
        join(self.known, clock)


def acquire(me, word):
    me.learn(word.known)
    return word.value


def adds_in_turn(m):
    """wait_dq_semaphore() of bwd/dq_semaphore.cuh, with the early look of consume_independent() of
    bwd/consume_independent.cuh: every lane adds to what the lanes of another CTA have stored."""
    turn, cells, warp = Word(), [Cell(f"dQ of lane {lane}") for lane in range(LANES)], Warp()
    added = Barrier(LANES)

    def before(me, lane):
        me.write(cells[lane], "stored")
        me.arrive(added)
        yield from ()

    def pass_on(me):
        yield added, 0
        turn.tell(me)

    def after(me, lane):
        relaxed = m.plant == "the early look is relaxed"
        seen = turn.value if relaxed else acquire(me, turn)
        while any(value != 1 for value in (yield from warp.vote(me, seen))):
            seen = acquire(me, turn)
        me.write(cells[lane], "added")

    for lane in range(LANES):
        m.role(f"first {lane}", before, lane)
        m.role(f"second {lane}", after, lane)
    m.role("turns", pass_on)


def adds_to_many_tiles(m):
    """wait_dq_semaphores() of bwd/dq_semaphore.cuh: each lane asks for the turn of a tile, one lane adds to
    all of them."""
    turns, cells, warp = [Word() for _ in range(TILES)], [Cell(f"dQ {i}") for i in range(TILES)], Warp()

    def before(me, tile):
        me.write(cells[tile], "stored")
        turns[tile].tell(me)
        yield from ()

    def after(me, lane):
        at = 0
        while at < TILES:
            while True:
                here = at + lane < TILES and acquire(me, turns[at + lane]) == 1
                seen = yield from warp.vote(me, (lane, here))
                come = list(itertools.takewhile(lambda x: x[1], sorted(seen)))
                if come:
                    break
            if m.plant != "no __syncwarp behind the votes":
                yield from warp.sync(me)
            for tile in range(at, at + len(come)):
                if lane == 0:
                    me.write(cells[tile], "added")
            at += len(come)

    for tile in range(TILES):
        m.role(f"first {tile}", before, tile)
    for lane in range(LANES):
        m.role(f"lane {lane}", after, lane)


def finishes_a_round(m):
    """is_added() of bwd/dq_pool_convert.cuh: a lane takes what others have added when the count says
    that all is there."""
    count, cells, warp, adders = Word(), [Cell(f"dQ {i}") for i in range(TILES)], Warp(), TILES

    def before(me, tile):
        me.write(cells[tile], "added")
        count.tell(me)
        yield from ()

    def finish(me, lane):
        enough = any if m.plant == "the vote of any lane" else all
        while True:
            seen = acquire(me, count) == adders
            if enough((yield from warp.vote(me, seen))):
                break
        for cell in cells if lane == 0 else ():
            me.read(cell, "added")

    for tile in range(TILES):
        m.role(f"adder {tile}", before, tile)
    for lane in range(LANES):
        m.role(f"lane {lane}", finish, lane)


def leaves_a_step(m):
    """A warp of consume_dq() of bwd_split/dq.cuh with modifiers: all lanes read the step, one of them
    lets its place go, and the loader writes the next one there."""
    step, full, empty, warp = Cell("step"), Barrier(1), Barrier(1), Warp()
    steps = 4

    def load(me):
        for i in range(steps):
            yield empty, i - 1
            me.write(step, i)
            me.arrive(full)

    def consume(me, lane):
        for i in range(steps):
            yield full, i
            me.read(step, i)
            if m.plant == "no __syncwarp behind the read":
                yield from warp.vote(me, None)  # lanes are together, as the product makes them
            else:
                yield from warp.sync(me)
            if lane == 0:
                me.arrive(empty)

    m.role("loader", load)
    for lane in range(LANES):
        m.role(f"lane {lane}", consume, lane)


class Grid:
    """A kernel of a chain of programmatic launches: it begins when all CTAs of the one before have allowed it
    or are over, and what these knew then has happened before; griddepcontrol.wait waits for their end."""

    def __init__(self, before, ctas):
        self.before, self.allowed, self.over = before, Barrier(ctas), Barrier(ctas)

    def begin(self):
        """The launch orders what came before it; without one the stream does, in turn."""
        if self.before:
            yield self.before.allowed, 0

    def wait(self):
        if self.before:
            yield self.before.over, 0

    def end(self, me):
        me.arrive(self.over)


def early_kernels(m, ctas=2):
    """row_stats_kernel, the kernel of dK and dV and that of dQ (bwd_split/launch.cuh,
    bwd_split/launch_mod.cuh): the third reads the statistics of the first before it waits for the second."""
    begin = Grid(None, ctas)
    keys = Grid(begin, ctas)
    queries = Grid(keys, ctas)
    after = Cell("what the next kernel of the stream writes")
    stats, dk = [Cell(f"stats {i}") for i in range(ctas)], [Cell(f"dK {i}") for i in range(ctas)]

    def first(me, cta):
        me.arrive(begin.allowed)
        yield from begin.begin()
        me.write(stats[cta], "lse, delta")
        begin.end(me)

    def second(me, cta):
        yield from keys.begin()
        if m.plant == "the next kernel is allowed before the wait":
            me.arrive(keys.allowed)
            yield from keys.wait()
        else:
            yield from keys.wait()
            me.arrive(keys.allowed)
        for cell in stats:
            me.read(cell, "lse, delta")
        me.write(dk[cta], "gradient")
        keys.end(me)

    def third(me, cta):
        yield from queries.begin()
        for cell in stats:
            me.read(cell, "lse, delta")
        if m.plant != "the last kernel does not wait":
            yield from queries.wait()
        queries.end(me)

    def next_of_stream(me):
        yield queries.over, 0
        for cell in dk:
            me.read(cell, "gradient")
        me.write(after, "anything")

    for cta in range(ctas):
        m.role(f"begin {cta}", first, cta)
        m.role(f"keys {cta}", second, cta)
        m.role(f"queries {cta}", third, cta)
    m.role("next", next_of_stream)
