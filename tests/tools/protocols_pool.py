"""The ring of accumulators of dq (bwd/dq_pool.cuh, bwd/dq_pool_convert.cuh) for protocols.py:
additions, words of global memory, the warps that make dq. Who adds is in protocols_backward.py."""

from __future__ import annotations

import itertools
from collections import Counter

from tests.tools.protocols import END, Fault, barriers, join

PIECES, PIECE_SLOTS = 3, 2  # of a tile; more than there are places for
FINISHERS = 2


class Word:
    """Of global memory: counts what is done."""

    def __init__(self):
        self.value, self.known = 0, {}

    def passed(self, value):
        return self.value == value

    def check(self, value):
        pass

    def tell(self, me):
        self.value += 1
        join(self.known, me.clock)
        me.clock[me.name] += 1


class Flight:
    """Bulk operations of one role, which end whenever they like."""

    def __init__(self):
        self.copies, self.known = 0, {}

    def passed(self, _):
        return self.copies == 0

    def check(self, _):
        pass

    def learn(self, clock):
        join(self.known, clock)

    def take_off(self, me, operation):
        """The operation lands later, as machine.copies do: by setting its value."""
        self.copies += 1
        me.copies += 1
        event = (f"{me.name}'s flight", me.copies)
        me.machine.copies.append((self, operation, event, event))


class Accumulator:
    """A place for a tile, of one round after the other. `sums`: who has added, and when."""

    def __init__(self, name):
        self.name, self.round, self.sums, self.zeros = name, 0, {}, (None, 0)

    def check_add(self, me, turn):
        if self.round != turn or not me.knows(self.zeros):
            raise Fault(f"{me.name} adds to {self.name}, which may not be zero yet")

    def add(self, turn, what, event):
        if self.round != turn:
            raise Fault(f"an addition of {what} comes to {self.name} too late")
        self.sums[what] = event

    def take(self, me, expected):
        if set(self.sums) != expected or not all(me.knows(event) for event in self.sums.values()):
            raise Fault(f"{me.name} takes {self.name}, to which something may be added yet")


class Landing:
    """What a bulk operation does when it ends, with the event of that."""

    def __init__(self, act):
        self.act = act

    def __setattr__(self, name, value):
        self.act(value) if name == "value" else super().__setattr__(name, value)


class Ring:
    """`items`: (key head, tiles that it adds to, who adds to each), in the order of draws."""

    def __init__(self, m, items, tiles_per_head, heads, round_heads, places):
        self.m, self.items, self.round_heads, self.places = m, items, round_heads, places
        self.rounds = -(-heads // round_heads)
        self.tiles = [(head, tile) for head in range(heads) for tile in range(tiles_per_head)]
        self.draw = iter(self.tiles)
        self.added = [Word() for _ in range(self.rounds)]
        self.given_back = [Word() for _ in range(self.rounds)]
        self.per_round = round_heads * tiles_per_head
        self.items_of = Counter(self.round_of(head) for head, _ in items)
        self.at = {
            key: Accumulator(f"dQ {key}")
            for key in itertools.product(range(places), range(round_heads), range(tiles_per_head))
        }
        self.expected = {tile: set() for tile in self.tiles}
        for n, (head, tiles) in enumerate(items):
            for tile, adders in tiles.items():
                self.expected[head, tile] |= {(n, who) for who in adders}

    def round_of(self, head):
        return head // self.round_heads

    def place_of(self, head, tile):
        return self.at[self.round_of(head) % self.places, head % self.round_heads, tile]

    def turn_of(self, head):
        return self.round_of(head) // self.places

    def wait_before(self, n):
        before = self.round_of(self.items[n][0]) - self.places
        if before >= 0 and self.m.plant != "an item does not wait for its round":
            yield self.given_back[before], self.per_round

    def add(self, me, flight, n, tile, who):
        """Flight: of bulk additions, or None for those that are done at once."""
        head = self.items[n][0]
        place, turn = self.place_of(head, tile), self.turn_of(head)
        place.check_add(me, turn)
        if flight is None:
            place.add(turn, (n, who), (me.name, me.clock[me.name]))
        else:
            flight.take_off(me, Landing(lambda event: place.add(turn, (n, who), event)))


class Poll:
    """What a warp looks for that waits for two things at a time."""

    known: dict = {}

    def __init__(self, *ready):
        self.ready = ready

    def passed(self, _):
        return any(ready() for ready in self.ready)

    def check(self, _):
        pass


def convert_dq(me, x, ring, added, which):
    """Of bwd/dq_pool_convert.cuh. `added`: barriers of the places of items."""
    at, tells, pieces, flight = 0, which == 0, 0, Flight()
    piece_full = barriers(PIECE_SLOTS, 1)
    tile = next(ring.draw, None)

    def seen(barrier, phase):
        if barrier.passed(phase):
            barrier.check(phase)
            me.learn(barrier.known)
            return True
        return False

    def can_tell():
        full, phase = x.item.ready(at)
        if not tells or not full.passed(phase):
            return False
        return x.item.at(at).value == END or added[at % 2].passed(at // 2)

    def can_convert():
        if tile is None:
            return False
        r = ring.round_of(tile[0])
        return ring.added[r].passed(ring.items_of[r])

    def convert(head, t):
        nonlocal pieces
        place = ring.place_of(head, t)
        place.take(me, ring.expected[head, t])
        leaving = set()

        def load(piece):
            if (slot := piece % PIECE_SLOTS) in leaving:
                raise Fault(f"{me.name} loads a piece to the place of one that leaves")
            barrier = piece_full[slot]
            barrier.copies += 1
            me.arrive(barrier)
            me.machine.copies.append((barrier, Landing(lambda _: None), None, (None, 0)))

        for piece in range(pieces, pieces + PIECE_SLOTS):
            load(piece)
        for piece in range(pieces, pieces + PIECES):
            yield piece_full[piece % PIECE_SLOTS], piece // PIECE_SLOTS
            leaving.add(piece % PIECE_SLOTS)
            if piece > pieces:
                if me.machine.plant != "a piece is loaded early":
                    leaving.discard((piece - 1) % PIECE_SLOTS)
                if piece - 1 + PIECE_SLOTS < pieces + PIECES:
                    load(piece - 1 + PIECE_SLOTS)
        pieces += PIECES

        def zero(event):
            place.round, place.sums, place.zeros = place.round + 1, {}, event

        if ring.round_of(head) + ring.places < ring.rounds:
            flight.take_off(me, Landing(zero))
        if me.machine.plant != "a tile is given back before its zeros":
            yield flight, 0
        ring.given_back[ring.round_of(head)].tell(me)

    while tells or tile is not None:
        yield Poll(can_tell, can_convert), 0
        if can_tell():
            seen(*x.item.ready(at))
            if (n := me.look(x.item.at(at))) == END:
                tells = False
            else:
                seen(added[at % 2], at // 2)
                ring.added[ring.round_of(ring.items[n][0])].tell(me)
                x.item.let_go(me, at)
                at += 1
        if can_convert():
            me.learn(ring.added[ring.round_of(tile[0])].known)
            yield from convert(*tile)
            tile = next(ring.draw, None)
