"""The line of requests that have no pages: those that can run, and those that something is still fetched for.

    put --all here?--yes--> ready, fewest tokens first (queue.py) --first--> admitted
             | no              ^
             v                 |
          awaiting --collect---+---lost---> told to the scheduler, which ends them

Embeddings are waited for until they come or are lost, cached KV only for a bounded time (fetching.py). Who awaits
something holds no pages and blocks nobody.

What a sequence has to compute changes with the cache: less when others publish what it begins with, more when pages are
evicted. The first is looked at again for those named by `renew_like`, a bounded number at a time; the second when
a sequence has come to the front, which is where its key was too small.
"""

import itertools
from collections.abc import Callable, Iterator

from encoder.errors import EmbeddingLost
from epd.engine.feed import RowSupply
from epd.engine.fetching import PrefixSupply
from epd.engine.healing import Outlook
from epd.engine.queue import WaitingQueue
from epd.engine.sequence import Sequence

# Lookups per call, so that no step hangs on a long line.
_MAX_RENEWALS = 16


class WaitingLine:
    """Keeps, for each of its sequences, the rows that it will read."""

    def __init__(
        self,
        supply: RowSupply,
        prefixes: PrefixSupply,
        assess: Callable[[Sequence], Outlook],
        *,
        credit_tokens_per_s: float,
        now_s: Callable[[], float],
    ) -> None:
        """`assess` says what a sequence has to do with the cache as it is now; `now_s` is monotonic."""
        self._now_s = now_s
        self._supply = supply
        self._prefixes = prefixes
        self._assess = assess
        self._ready = WaitingQueue(credit_tokens_per_s=credit_tokens_per_s)
        self._awaiting: dict[str, Sequence] = {}
        self._outdated: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._ready) + len(self._awaiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        yield from self._ready
        yield from self._awaiting.values()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ready or request_id in self._awaiting

    @property
    def num_ready(self) -> int:
        """Those that wait for nothing but pages and a place."""
        return len(self._ready)

    def put(self, sequence: Sequence) -> None:
        """Add a sequence, or renew what is known of it."""
        self._put(sequence, self._assess(sequence))

    def collect(self) -> list[tuple[Sequence, EmbeddingLost]]:
        """Line up those that nothing more is fetched for; the sequences whose rows are lost, which stay where they
        are."""
        arrivals = self._supply.collect()
        for request_id in (*self._prefixes.collect(), *arrivals.ready):
            sequence = self._awaiting.get(request_id)
            if sequence is not None:
                self.put(sequence)
        lost = [(self._awaiting.get(request_id), error) for request_id, error in arrivals.lost]
        return [(sequence, error) for sequence, error in lost if sequence is not None]

    def first(self) -> tuple[Sequence, Outlook] | None:
        """The sequence to admit next, and where it starts; it stays in line.

        One that has more to do than it was lined up for goes back to where it belongs, and if it needs rows nobody
        asked for, to awaiting them.
        """
        self._renew()
        while (sequence := self._ready.first()) is not None:
            outlook = self._assess(sequence)
            is_renewed = self._ready.num_compute_tokens(sequence.request_id) == outlook.num_compute_tokens
            if is_renewed and self._is_ready(sequence, outlook):
                return sequence, outlook
            self._put(sequence, outlook)
        return None

    def behind_first(self, limit: int) -> Iterator[tuple[Sequence, Outlook]]:
        """Those that may go while there is no room for the first; see `WaitingQueue.behind_first`."""
        for sequence in self._ready.behind_first(limit):
            outlook = self._assess(sequence)
            if self._is_ready(sequence, outlook):
                yield sequence, outlook

    def renew_like(self, published: Sequence) -> None:
        """Prompts that begin like the one just computed have less to compute now."""
        first = published.chain.keys[:1]
        if first:
            self._outdated |= {waiting.request_id: waiting for waiting in self if waiting.chain.keys[:1] == first}

    def remove(self, request_id: str) -> Sequence:
        """Its rows are kept until the supply forgets them. Raises KeyError when it is not in line."""
        self._outdated.pop(request_id, None)
        return self._awaiting.pop(request_id) if request_id in self._awaiting else self._ready.remove(request_id)

    def _renew(self) -> None:
        for request_id in list(itertools.islice(self._outdated, _MAX_RENEWALS)):
            self.put(self._outdated.pop(request_id))

    def _is_ready(self, sequence: Sequence, outlook: Outlook) -> bool:
        refs = sequence.refs_from(outlook.resume.start)
        return self._supply.holds(sequence.request_id, refs) and not self._prefixes.is_fetching(sequence.request_id)

    def _put(self, sequence: Sequence, outlook: Outlook) -> None:
        request_id, refs = sequence.request_id, sequence.refs_from(outlook.resume.start)
        self._supply.want(request_id, refs, sequence.request.deadline_unix_s)
        if self._is_ready(sequence, outlook):
            if self._awaiting.pop(request_id, None) is not None and sequence.ready_s is None:
                sequence.ready_s = self._now_s()
            self._ready.put(sequence, outlook.num_compute_tokens)
        else:
            if request_id in self._ready:
                self._ready.remove(request_id)
            self._awaiting[request_id] = sequence
