"""Whose turn it is: a fixed number of slots, of which one asker may hold only some, handed out in rotation.

    waiting, one slot:  asker A   a1 a2 a3 ... a100
                        asker B   b1 b2               granted:  a1 b1 c1 a2 b2 a3 a4 ...
                        asker C   c1

An asker with a hundred turns waiting does not stand before one with a single turn, only beside it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable


class Turns:
    """`total` slots, at most `per_asker` of them in one asker's hands. Belongs to one event loop."""

    def __init__(self, *, total: int, per_asker: int) -> None:
        if total < 1 or per_asker < 1:
            raise ValueError(f"total is {total}, per_asker is {per_asker}; allowed is 1 or more")
        self._num_free = total
        self._per_asker = per_asker
        self._held: Counter[Hashable] = Counter()
        # Dictionaries for their order and for removal from the middle.
        self._waiting: dict[Hashable, dict[Turn, None]] = {}
        self._rotation: dict[Hashable, None] = {}
        """Askers with a turn waiting and below their share; the next to be served comes first."""

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_waiting(self) -> int:
        """Turns that were asked for and not granted; one that several ask for counts several times."""
        return sum(map(len, self._waiting.values()))

    def add(self, turn: Turn, asker: Hashable) -> None:
        """The turn waits in this asker's queue too, unless it has been granted or ended."""
        self._waiting.setdefault(asker, {})[turn] = None
        if self._held[asker] < self._per_asker:
            self._rotation.setdefault(asker)
        self._serve()

    def remove(self, turn: Turn, asker: Hashable) -> None:
        """The asker does not want it any more, or has it."""
        queue = self._waiting.get(asker)
        if queue is None:
            return
        queue.pop(turn, None)
        if not queue:
            del self._waiting[asker]
            self._rotation.pop(asker, None)

    def give_back(self, asker: Hashable) -> None:
        """The slot that was charged to this asker is free."""
        self._num_free += 1
        self._held[asker] -= 1
        if not self._held[asker]:
            del self._held[asker]
        if asker in self._waiting:
            self._rotation.setdefault(asker)
        self._serve()

    def _serve(self) -> None:
        while self._num_free and self._rotation:
            asker = next(iter(self._rotation))
            del self._rotation[asker]
            turn = next(iter(self._waiting[asker]))
            self._num_free -= 1
            self._held[asker] += 1
            turn.grant(asker)
            if asker in self._waiting and self._held[asker] < self._per_asker:
                # Behind all others.
                self._rotation[asker] = None


class Turn:
    """One slot asked for, by one asker or by several who want the same thing. Whoever's turn comes first pays."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._askers: Counter[Hashable] = Counter()
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.payer: Hashable | None = None
        """The asker in whose share it is; None before it is granted and after its end."""
        self._is_waiting = True

    @property
    def num_askers(self) -> int:
        return self._askers.total()

    @property
    def is_granted(self) -> bool:
        """Holds a slot now."""
        return self.payer is not None

    def join(self, asker: Hashable) -> None:
        """One more wants it; the same asker may join several times."""
        self._askers[asker] += 1
        if self._is_waiting and self._askers[asker] == 1:
            self._turns.add(self, asker)

    def leave(self, asker: Hashable) -> None:
        self._askers[asker] -= 1
        if not self._askers[asker]:
            del self._askers[asker]
            self._turns.remove(self, asker)

    async def wait(self) -> None:
        """Returns once the slot is held."""
        await self._granted

    def grant(self, asker: Hashable) -> None:
        """For `Turns`: the slot is this turn's, at this asker's expense."""
        self.payer = asker
        self._leave_queues()
        if not self._granted.done():
            self._granted.set_result(None)

    def end(self) -> None:
        """Gives the slot back, or stops waiting for it. Does nothing the second time."""
        payer, self.payer = self.payer, None
        self._leave_queues()
        if payer is not None:
            self._turns.give_back(payer)

    def _leave_queues(self) -> None:
        self._is_waiting = False
        for asker in self._askers:
            self._turns.remove(self, asker)
