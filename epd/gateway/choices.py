"""Several answers at the same time, as one stream of their events: the choices of a request.

    run 0 (prompt A)  prefill ----first token----> tokens ...
    run 1 (prompt A)           waits for its prompt's KV -> tokens ...       a failure ends all
    run 2 (prompt B)  prefill ----first token----> tokens ...

The first run of a prompt computes it; the others of the same prompt begin when that is done, and find it in the cache.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from encoder.types import EmbeddingRef

_T = TypeVar("_T")

# Events that wait for a client that reads slowly, for each run.
_WAITING_EVENTS = 4


async def merged(runs: Sequence[Callable[[], AsyncGenerator[_T, None]]], *, limit: int) -> AsyncGenerator[_T, None]:
    """The events of all runs as they come, those of a run in order; at most `limit` runs at a time, begun in order.

    The first failure is raised; whatever ends this, every run has ended before it returns.
    """
    if len(runs) == 1:
        async with aclosing(runs[0]()) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[_T | None] = asyncio.Queue(_WAITING_EVENTS * len(runs))
    places = asyncio.Semaphore(limit)

    async def pump(run: Callable[[], AsyncGenerator[_T, None]]) -> None:
        async with places, aclosing(run()) as events:
            async for event in events:
                await queue.put(event)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    ended = asyncio.gather(*tasks)
    ended.add_done_callback(lambda _: _wake(queue))
    try:
        while not (ended.done() and queue.empty()):
            if ended.done() and (ended.cancelled() or ended.exception() is not None):
                break
            waited = await queue.get()
            if waited is not None:
                yield waited
        await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, ended, return_exceptions=True)


def _wake(queue: "asyncio.Queue[_T | None]") -> None:
    """Whoever waits for an event looks whether any will come. A full queue is not waited for."""
    if not queue.full():
        queue.put_nowait(None)


class SharedPrompt:
    """What the runs of one prompt share: the first one's first token, and the embeddings until all have read them."""

    def __init__(
        self,
        num_runs: int,
        *,
        refresh: Callable[[bool], Awaitable[tuple[EmbeddingRef, ...]]],
        release: Callable[[], None],
    ) -> None:
        """`refresh` gets new references; True: beside those that are held, which somebody may still read."""
        self._refresh = refresh
        self._release = release
        self._reading = set(range(num_runs))
        self._computed = asyncio.Event()
        self._refreshing = asyncio.Lock()

    async def computed(self) -> None:
        """The first run has a first token, or has ended."""
        await self._computed.wait()

    async def refreshed(self, run: int) -> tuple[EmbeddingRef, ...]:
        """References for another attempt of a run."""
        async with self._refreshing:
            others = self._reading - {run}
            self._reading.add(run)
            return await self._refresh(bool(others))

    def has_read(self, run: int) -> None:
        """A run has its first token, so it has read every row."""
        if run == 0:
            self._computed.set()
        if run in self._reading:
            self._reading.discard(run)
            if not self._reading:
                self._release()

    @contextmanager
    def running(self, run: int) -> Iterator[None]:
        """While the run reads; what it has not read by its end it will not."""
        try:
            yield
        finally:
            self.has_read(run)
