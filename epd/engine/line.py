"""The line of requests that have no pages: those that can run, and those whose embeddings are on their way.

    put --rows here?--yes--> ready, fewest tokens first (queue.py) --first--> admitted
             | no              ^
             v                 |
          awaiting --collect---+---lost---> told to the scheduler, which ends them

Who awaits rows holds no pages and blocks nobody.
"""

from collections.abc import Callable, Iterator

from encoder.errors import EmbeddingLost
from epd.engine.feed import RowSupply
from epd.engine.healing import Outlook
from epd.engine.queue import WaitingQueue
from epd.engine.sequence import Sequence


class WaitingLine:
    """Keeps, for each of its sequences, the rows that it will read."""

    def __init__(self, supply: RowSupply, assess: Callable[[Sequence], Outlook], *, credit_tokens_per_s: float) -> None:
        """`assess` says what a sequence has to do with the cache as it is now."""
        self._supply = supply
        self._assess = assess
        self._ready = WaitingQueue(credit_tokens_per_s=credit_tokens_per_s)
        self._awaiting: dict[str, Sequence] = {}

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
        """Line up those whose rows have come; the sequences whose rows are lost, which stay where they are."""
        arrivals = self._supply.collect()
        for request_id in arrivals.ready:
            sequence = self._awaiting.get(request_id)
            if sequence is not None:
                self.put(sequence)
        lost = [(self._awaiting.get(request_id), error) for request_id, error in arrivals.lost]
        return [(sequence, error) for sequence, error in lost if sequence is not None]

    def first(self) -> tuple[Sequence, Outlook] | None:
        """The sequence to admit next, and where it starts; it stays in line.

        One that needs rows nobody asked for, because its prefix was evicted meanwhile, goes back to awaiting them.
        """
        while (sequence := self._ready.first()) is not None:
            outlook = self._assess(sequence)
            if self._supply.holds(sequence.request_id, sequence.refs_from(outlook.rows_from)):
                return sequence, outlook
            self._put(sequence, outlook)
        return None

    def renew_like(self, published: Sequence) -> None:
        """Prompts that begin like the one just computed have less to compute now."""
        first = published.chain.keys[:1]
        for sequence in [sequence for sequence in self if sequence.chain.keys[:1] == first] if first else []:
            self.put(sequence)

    def remove(self, request_id: str) -> Sequence:
        """Its rows are kept until the supply forgets them. Raises KeyError when it is not in line."""
        return self._awaiting.pop(request_id) if request_id in self._awaiting else self._ready.remove(request_id)

    def _put(self, sequence: Sequence, outlook: Outlook) -> None:
        request_id, refs = sequence.request_id, sequence.refs_from(outlook.rows_from)
        self._supply.want(request_id, refs, sequence.request.deadline_unix_s)
        if self._supply.holds(request_id, refs):
            self._awaiting.pop(request_id, None)
            self._ready.put(sequence, outlook.num_compute_tokens)
        else:
            if request_id in self._ready:
                self._ready.remove(request_id)
            self._awaiting[request_id] = sequence
