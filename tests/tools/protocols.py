"""A model of how warps of the Hopper kernels wait for each other (csrc/sm90).

It does not read the kernels: a role is the order of waits, arrivals, reads and writes of the function that
the docstring of its model names, copied by hand. Whoever changes that order there changes it here as well.
The models are in protocols_forward.py, protocols_backward.py, protocols_pool.py,
protocols_split.py, protocols_backward_mod.py and protocols_memory.py.

A role is a generator that yields what it waits for. Clocks of what each role knows to have happened find a
read or write that nothing orders behind what it needs, in whatever order the roles ran; orders drawn at
random, with slow and fast roles, find deadlocks and phases that somebody misses. A warpgroup has two warps
here, and chunks hold two steps. Left out are time, what is in a tile, lanes of a warp but in
protocols_memory.py, and everything in global memory but the additions to dQ in order and in a ring, and the
sums of Stream-K.
"""

from __future__ import annotations

import itertools
import random

WARPS = 2  # of a warpgroup
ALL = 2 * WARPS  # of two warpgroups
CHUNK = 2  # steps
END = "end"


class Fault(AssertionError):
    pass


def join(clock, other):
    for name, stamp in other.items():
        if clock.get(name, 0) < stamp:
            clock[name] = stamp


class Barrier:
    """An mbarrier, or a named barrier of warps: as one nobody comes to twice in a phase."""

    def __init__(self, count):
        self.count, self.arrived, self.copies, self.phase = count, 0, 0, 0
        self.clock, self.known = {}, {}  # of all that arrived, of those in completed phases

    def passed(self, phase):
        """As the hardware sees it, which knows parities only."""
        return (self.phase ^ phase) & 1 == 1

    def check(self, phase):
        if self.phase != phase + 1:
            raise Fault(f"a wait for phase {phase} ends in phase {self.phase}")

    def arrive(self, clock):
        self.arrived += 1
        if self.arrived > self.count:
            raise Fault("one arrival too many")
        self.learn(clock)

    def learn(self, clock):
        join(self.clock, clock)
        if self.arrived == self.count and self.copies == 0:
            self.arrived, self.phase, self.known = 0, self.phase + 1, dict(self.clock)


class Turn:
    """A word of bwd/dq_semaphore.cuh: whose turn it is to add to a tile."""

    def __init__(self, first):
        self.value, self.known = first, {}

    def passed(self, block):
        return self.value == block

    def check(self, block):
        pass


class Cell:
    """A place in shared memory; a product may read it until its role says that it is over."""

    def __init__(self, name):
        self.name, self.value, self.writer, self.fenced = name, None, (None, 0), True
        self.readers, self.under_way = {}, {}


class Role:
    def __init__(self, machine, name, body, *args):
        self.machine, self.name, self.clock, self.unfenced = machine, name, {name: 1}, []
        self.copies, self.want, self.body = 0, None, body(self, *args)

    def knows(self, event):
        return event[0] is None or self.clock.get(event[0], 0) >= event[1]

    def arrive(self, barrier):
        barrier.arrive(self.clock)
        self.clock[self.name] += 1

    def sync(self, barrier):
        phase = barrier.phase
        self.arrive(barrier)
        yield barrier, phase

    def pass_on(self, turn, value):
        turn.value = value
        join(turn.known, self.clock)
        self.clock[self.name] += 1

    def learn(self, known):
        join(self.clock, known)

    def check_free(self, cell):
        for name in cell.readers:
            if name != self.name and cell.under_way.get(name, 0):
                raise Fault(f"{self.name} overwrites {cell.name} while {name} reads it")
        if not all(self.knows(read) for read in cell.readers.items()) or not self.knows(cell.writer):
            raise Fault(f"{self.name} overwrites {cell.name}, which may still be in use")

    def write(self, cell, value):
        self.check_free(cell)
        cell.value, cell.writer = value, (self.name, self.clock[self.name])
        cell.readers, cell.fenced = {}, False
        self.unfenced.append(cell)

    def fence(self):
        for cell in self.unfenced:
            cell.fenced = True
        self.unfenced.clear()

    def fence_copy(self, cell):
        cell.fenced = self.knows(cell.writer)

    def copy(self, barrier, cell, value, fenced=True, arrives=True):
        """TMA, or without a fence cp.async; it ends whenever it likes."""
        self.check_free(cell)
        self.copies += 1
        event = (f"{self.name}'s copy", self.copies)
        cell.value, cell.writer, cell.readers, cell.fenced = None, event, {}, fenced
        barrier.copies += 1
        if arrives:
            self.arrive(barrier)
        self.machine.copies.append((barrier, cell, value, event))

    def look(self, cell):
        if not self.knows(cell.writer):
            raise Fault(f"{self.name} reads {cell.name}, which may not be written yet")
        cell.readers[self.name] = self.clock[self.name]
        return cell.value

    def read(self, cell, value):
        if (found := self.look(cell)) != value:
            raise Fault(f"{self.name} reads {found} in {cell.name} instead of {value}")

    def begin(self, cell, value):
        self.read(cell, value)
        if not cell.fenced:
            raise Fault(f"a product of {self.name} may not see {cell.name}")
        cell.under_way[self.name] = cell.under_way.get(self.name, 0) + 1

    def finish(self, *cells):
        for cell in cells:
            cell.under_way[self.name] -= 1
            cell.readers[self.name] = self.clock[self.name]


class Machine:
    def __init__(self, plant=None):
        self.roles, self.copies, self.plant = [], [], plant

    def role(self, name, body, *args):
        self.roles.append(Role(self, name, body, *args))

    def warps(self, groups, body):
        for group, warp in itertools.product(range(groups), range(WARPS)):
            self.role(f"consumer {group}.{warp}", body, group, warp)

    def run(self, seed):
        rnd = random.Random(seed)
        speed = {role: rnd.random() ** 6 + 1e-4 for role in self.roles}
        speed_of_copies = rnd.random() ** 6 + 1e-4
        alive = list(self.roles)
        while alive or self.copies:
            ready = [role for role in alive if role.want is None or role.want[0].passed(role.want[1])]
            if not ready and not self.copies:
                raise Fault("deadlock of " + ", ".join(role.name for role in alive))
            choices = ready + [None] * bool(self.copies)
            role = rnd.choices(choices, [speed.get(x, speed_of_copies) for x in choices])[0]
            if role is None:
                self.land(*self.copies.pop(rnd.randrange(len(self.copies))))
                continue
            if role.want is not None:
                role.want[0].check(role.want[1])
                role.learn(role.want[0].known)
            role.want = next(role.body, END)
            if role.want is END:
                alive.remove(role)

    def land(self, barrier, cell, value, event):
        cell.value = value
        barrier.copies -= 1
        barrier.learn(dict([event]))


def barriers(slots, count):
    return [Barrier(count) for _ in range(slots)]


def cells(name, count):
    return [Cell(f"{name} {i}") for i in range(count)]


class Slots:
    """A ring of places with its barriers: `full` arrivals when one is filled, `empty` when all have left it.
    Roles count its uses, as PipelineState of fwd/config.cuh does."""

    def __init__(self, name, slots, empty, full=1):
        self.slots, self.cells = slots, cells(name, slots)
        self.full, self.empty = barriers(slots, full), barriers(slots, empty)

    def ready(self, n):
        return self.full[n % self.slots], n // self.slots

    def left(self, n):
        return self.empty[n % self.slots], n // self.slots - 1

    def at(self, n):
        return self.cells[n % self.slots]

    def fill(self, me, n, value):
        me.write(self.at(n), value)
        me.arrive(self.full[n % self.slots])

    def put(self, me, n, value):
        yield self.left(n)
        self.fill(me, n, value)

    def load(self, me, n, value):
        yield self.left(n)
        me.copy(self.full[n % self.slots], self.at(n), value)

    def take(self, me, n):
        yield self.ready(n)
        return me.look(self.at(n))

    def let_go(self, me, n):
        me.arrive(self.empty[n % self.slots])


class DsPlaces:
    """Places for dS, to which every warp writes its part and whose parts a product reads together."""

    def __init__(self, slots):
        self.slots, self.full = slots, barriers(slots, ALL)
        self.parts = [cells(f"dS {slot} of", ALL) for slot in range(slots)]

    def ready(self, n):
        return self.full[n % self.slots], n // self.slots

    def write(self, me, n, who, value, fenced=True):
        me.write(self.parts[n % self.slots][who], value)
        if fenced:
            me.fence()
        me.arrive(self.full[n % self.slots])

    def begin_dq(self, me, n, value, k, item):
        """The product with K; what it reads."""
        for part in self.parts[n % self.slots]:
            me.begin(part, value)
        me.begin(k.at(0), ("K", item))
        return [*self.parts[n % self.slots], k.at(0)]


def each_item(me, items_at, use, before=None, at_end=None):
    """What all but the scheduler do for items; use(number of the item), before(its place) a wait for it."""
    for place in itertools.count():
        if before:
            yield from before(place)
        if (n := (yield from items_at.take(me, place))) == END:
            if at_end:
                yield from at_end()
            return
        yield from use(n)
        me.read(items_at.at(place), n)
        items_at.let_go(me, place)
