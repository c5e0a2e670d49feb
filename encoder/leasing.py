"""What an encoder server does with the arena for those who wait: publish, lease to each, read rows.

Each is one transaction. Where another process keeps the arena locked it waits, and the loop runs on meanwhile; requests
may come and go, so who gets a lease is looked up in the transaction itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from encoder.cache.patience import unlocked
from encoder.cache.room import RoomQueue
from encoder.cache.store import EmbeddingStore, Entry, Reservation
from encoder.errors import ArenaLocked
from encoder.failures import failure_of
from encoder.flight import Flight, Reply, Waiter
from encoder.passage import Arrival
from encoder.rows import rows_of
from encoder.types import EmbeddingRef, FetchRows
from preprocess.types import MediaKey


@dataclass(frozen=True, slots=True)
class Leased:
    """A published embedding, and a lease for each of some waiters. Nobody else knows of these leases yet."""

    entry: Entry
    refs: Sequence[tuple[Waiter, EmbeddingRef]]


class Leasing:
    """Of one store, on one event loop."""

    def __init__(
        self,
        store: EmbeddingStore,
        room: RoomQueue,
        *,
        wait_s: float,
        max_lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`wait_s` bounds the wait for a locked arena; `clock` is the time base of deadlines."""
        self._store = store
        self._room = room
        self._wait_s = wait_s
        self._max_lease_s = max_lease_s
        self._clock = clock

    def find(self, key: MediaKey, waiters: Sequence[Waiter]) -> Leased | None:
        """The embedding if it is published, by whichever encoder of this host. Raises ArenaLocked at once."""
        entry = self._store.lookup(key)
        if entry is None:
            return None
        try:
            with self._store.together():
                return Leased(entry, [(waiter, self._lease(waiter)) for waiter in waiters])
        except KeyError:
            # Another process needed the room just now.
            return None

    async def find_later(self, flight: Flight) -> Leased | None:
        """`find` for all who wait for a flight by then. Raises ArenaLocked."""
        return await unlocked(lambda: self.find(flight.key, flight.waiters), wait_s=self._wait_s)

    async def publish(self, flight: Flight, arrival: Arrival[Reservation]) -> Leased:
        """Raises EncoderBusy, ArenaLocked with nothing published and the room given back.

        Leases come in the same transaction: what nobody leases another process may evict the moment it is published.
        """
        place = arrival.place

        def publish() -> Leased:
            with self._store.together():
                self._store.publish(place, layout=arrival.layout, checksum=arrival.checksum, warnings=arrival.warnings)
                leased = self.find(flight.key, flight.waiters)
            assert leased is not None, "what was just published is there"
            return leased

        try:
            return await unlocked(publish, wait_s=self._wait_s)
        except BaseException:
            self._room.abandon(place)
            raise

    def send_rows(self, request: FetchRows, reply: Reply, asker: str) -> None:
        """Answer a reader that cannot map the arena. Raises ArenaLocked at once, and nobody has been answered."""
        reply(*rows_of(self._store, request, asker=asker))

    async def send_rows_later(self, request: FetchRows, reply: Reply, asker: str) -> None:
        """Answer when the arena lets it, or say why not."""
        try:
            await unlocked(lambda: self.send_rows(request, reply, asker), wait_s=self._wait_s)
        except ArenaLocked as error:
            reply(failure_of(request.request_id, error), ())

    def _lease(self, waiter: Waiter) -> EmbeddingRef:
        """Raises KeyError for a key that is not published."""
        expires_s = min(waiter.request.deadline_unix_s, self._clock() + self._max_lease_s)
        return self._store.lease(waiter.request.key, owner=waiter.peer, expires_s=expires_s)
