"""An embedding arena in plain Python: a list of pages, dictionaries, and a list for the order of eviction.

The truth that the shared index has to agree with, extent by extent. Slow, in one process, and obvious.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from encoder.cache.arena import Extent


@dataclass
class Held:
    """An entry or a reservation."""

    extent: Extent
    key: str
    holder: str = ""
    leases: set[int] = field(default_factory=set)


@dataclass
class MemoryArena:
    num_pages: int
    entries: dict[str, Held] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    """Keys without a lease, least recently used first."""
    reservations: dict[int, Held] = field(default_factory=dict)
    leases: dict[int, tuple[str, str, str, float]] = field(default_factory=dict)
    """(key, holder, owner, expires_s)"""
    dead: set[str] = field(default_factory=set)
    num_made: int = 0

    def reserve(self, holder: str, key: str, num_pages: int) -> int | None:
        """The number of the reservation; None when leases are in the way."""
        extent = self._make_room(num_pages)
        if extent is None and any(held.holder in self.dead for held in self.reservations.values()):
            self.reclaim()
            extent = self._make_room(num_pages)
        if extent is None:
            return None
        self.num_made += 1
        self.reservations[self.num_made] = Held(extent, key, holder)
        return self.num_made

    def publish(self, number: int) -> bool:
        held = self.reservations.pop(number)
        if held.key in self.entries:
            return False
        self.entries[held.key] = Held(held.extent, held.key)
        self.idle.append(held.key)
        return True

    def abandon(self, number: int) -> None:
        del self.reservations[number]

    def lease(self, key: str, holder: str, owner: str, expires_s: float) -> int:
        self.num_made += 1
        self.leases[self.num_made] = (key, holder, owner, expires_s)
        if not self.entries[key].leases:
            self.idle.remove(key)
        self.entries[key].leases.add(self.num_made)
        return self.num_made

    def release(self, number: int) -> bool:
        if number not in self.leases:
            return False
        key = self.leases.pop(number)[0]
        self.entries[key].leases.remove(number)
        if not self.entries[key].leases:
            self.idle.append(key)
        return True

    def release_owner(self, holder: str, owner: str) -> int:
        return self._release_all(lambda lease: lease[1:3] == (holder, owner))

    def keep_only(self, owner: str, numbers: set[int]) -> int:
        lost = sorted(n for n, lease in self.leases.items() if lease[2] == owner and n not in numbers)
        return sum(self.release(number) for number in lost)

    def expire(self, now_s: float) -> int:
        return self._release_all(lambda lease: lease[3] <= now_s)

    def clear(self) -> int:
        pages = sum(self.entries.pop(key).extent.num_pages for key in self.idle)
        self.idle.clear()
        return pages

    def reclaim(self) -> None:
        self.reservations = {n: held for n, held in self.reservations.items() if held.holder not in self.dead}

    def pages(self) -> str:
        """One letter per page: free, evictable, leased, reserved."""
        letters = ["."] * self.num_pages
        for held in self.entries.values():
            self._mark(letters, held.extent, "L" if held.leases else "e")
        for held in self.reservations.values():
            self._mark(letters, held.extent, "R")
        return "".join(letters)

    def _mark(self, letters: list[str], extent: Extent, letter: str) -> None:
        for page in range(extent.start, extent.stop):
            assert letters[page] == ".", "a page with two owners"
            letters[page] = letter

    def _make_room(self, num_pages: int) -> Extent | None:
        pages = self.pages()
        if "." * num_pages not in pages and "." * num_pages not in pages.replace("e", "."):
            return None
        while (start := self.pages().find("." * num_pages)) < 0:
            del self.entries[self.idle.pop(0)]
        return Extent(start, start + num_pages)

    def _release_all(self, meets: Callable[[tuple[str, str, str, float]], bool]) -> int:
        return sum(self.release(number) for number in sorted(n for n, lease in self.leases.items() if meets(lease)))
