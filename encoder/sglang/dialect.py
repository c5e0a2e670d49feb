"""One part from its call to its receivers: encode all media at once, join their rows, push them to whoever waits.

Every lease ends once: after the last receiver's message is on the network, or when the part fails, runs out of time, or
its caller goes away. A failure is told twice, as the protocol wants it: to the caller, and to every receiver.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from encoder.errors import EncoderError, EncoderUnavailable
from encoder.sglang.bootstrap import Bootstrap
from encoder.sglang.config import SglangConfig
from encoder.sglang.errors import (
    BadRequest,
    CallerGone,
    DialectError,
    Overloaded,
    ReceiverUnreachable,
    TimedOut,
    dialect_error,
)
from encoder.sglang.items import Item
from encoder.sglang.message import Desk, Encoded, Hold, Writer
from encoder.sglang.post import Post
from encoder.sglang.receivers import Part, Receivers
from encoder.sglang.requests import EncodeCall, Registration
from encoder.wire import Buffer
from preprocess.errors import MediaError

logger = logging.getLogger(__name__)

# Media of one part that are encoded at a time: below what the desk takes from all parts together.
_AT_ONCE: Final = 64
_SWEEP_PERIOD_S: Final = 5.0
# Ranks register while their part is encoded. Those that have not by then may never come, and hold no room in the arena.
_PATIENCE_S: Final = 3.0
# A receiver of failures has heard of them by HTTP as well, and may be gone for that reason.
_NEWS_PATIENCE_S: Final = 3.0


class SglangDialect:
    """The dialect of one process. `start` and `stop` on the event loop that serves it."""

    def __init__(
        self,
        desk: Desk,
        config: SglangConfig,
        *,
        is_healthy: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`is_healthy` answers `/health_generate`; without it, whether the desk knows what it encodes.

        `clock` gives Unix seconds, as the desk's deadlines are.
        """
        self.config = config
        self._desk = desk
        self._clock = clock
        self._is_healthy = is_healthy
        self._writer = Writer(config)
        self._bootstrap = Bootstrap(config)
        self._post: Post | None = None
        self._receivers = Receivers(
            tell=self._tell,
            clock=time.monotonic,
            registration_timeout_s=config.registration_timeout_s,
            memory_s=config.send_timeout_s,
            max_parts=config.max_parts,
            max_waiting=config.max_waiting,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_leased = 0
        self._num_copied_bytes = 0
        self._is_leaving = False

    async def start(self) -> None:
        """Before the first call."""
        self._post = Post(send_timeout_s=self.config.send_timeout_s, connect_timeout_s=self.config.connect_timeout_s)
        self._spawn(self._sweep())

    def announce(self, port: int, *, host: str = "") -> None:
        """Tell the bootstrap servers of `register_urls` of this encoder. Call it when `port` takes connections.

        `host` is what is listened on; where that is every address, they are told one that reaches this host.
        """
        self._bootstrap.start(host, port)

    async def withdraw(self) -> None:
        """Take no new parts from now on, and tell the bootstrap servers, in two seconds at most."""
        self._is_leaving = True
        await self._bootstrap.stop()

    async def stop(self) -> None:
        """After the last call: close what is open. Withdraws first, where that was not done."""
        await self.withdraw()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._post is not None:
            await self._post.close()
            self._post = None

    def gauges(self) -> dict[str, int]:
        """What is going on, by name; all zero when nothing is, but for sockets that are kept and ended parts."""
        post = self._post
        return {
            "parts": self._receivers.num_parts,
            "leases": self._num_leased,
            "waiting_receivers": self._receivers.num_waiting,
            "ended_parts": self._receivers.num_ended,
            "messages": 0 if post is None else post.num_on_their_way,
            "sockets": 0 if post is None else post.num_kept,
        }

    @property
    def is_healthy(self) -> bool:
        """Whether an encoder is behind this."""
        if self._is_healthy is not None:
            return self._is_healthy()
        try:
            return bool(self._desk.modalities)
        except EncoderUnavailable:
            return False

    async def register(self, registration: Registration) -> None:
        """Take in one receiver; returns when its part is known. Raises DialectError."""
        await self._receivers.register(registration)

    def check_open(self) -> None:
        """Raises Overloaded once `withdraw` was called."""
        if self._is_leaving:
            raise Overloaded("this encoder is being stopped; another one serves", retry_after_s=5.0)

    def refuse(self, req_id: str, error: DialectError) -> None:
        """A call for this part came to nothing: its receivers, there or yet to come, are told."""
        self._receivers.refuse(req_id, error)

    def fail(self, req_id: str, error: DialectError) -> None:
        """The receivers of this part want it in a way that is not served; nobody will come for it."""
        self._receivers.fail(req_id, error)

    async def encode(self, call: EncodeCall) -> None:
        """Encode one part and push it; returns when every receiver's copy is on the network. Raises DialectError."""
        try:
            part = self._receivers.open(call.part, call.endpoints, is_shared=call.is_shared)
        except Overloaded as error:
            self.refuse(call.part.req_id, error)
            raise
        try:
            await self._deliver(part, await self._encode(call))
        except (MediaError, EncoderError, DialectError) as error:
            refusal = dialect_error(error)
            self._receivers.close(part, refusal)
            logger.info("part %s failed with %d: %s", call.part.req_id, refusal.status, refusal.message)
            raise refusal from error
        except asyncio.CancelledError:
            self._receivers.close(part, CallerGone("the request was given up"))
            raise
        except BaseException:
            self._receivers.close(part, DialectError("internal error of the encoder"))
            raise
        self._receivers.close(part)

    async def _encode(self, call: EncodeCall) -> list[Encoded]:
        """The media, encoded side by side and in order. Of a part that fails nothing stays leased."""
        modality = call.part.modality
        if modality not in self._desk.modalities:
            allowed = ", ".join(known.upper() for known in self._desk.modalities)
            raise BadRequest(f"modality is {modality.upper()}, allowed is what this model encodes: {allowed}")
        # The rows must outlive the sending, and the lease ends at the deadline that the desk is given.
        deadline_unix_s = self._clock() + self.config.encode_timeout_s + 2 * self.config.send_timeout_s
        places = asyncio.Semaphore(_AT_ONCE)

        async def encode(index: int, item: Item) -> Encoded:
            async with places:
                try:
                    return await self._desk.encode(
                        item.source, asker=call.part.req_id, deadline_unix_s=deadline_unix_s, sha256=item.sha256
                    )
                except MediaError as error:
                    raise dialect_error(error, place=f"mm_items[{index}]") from error

        tasks = [asyncio.create_task(encode(index, item)) for index, item in enumerate(call.items)]
        try:
            async with asyncio.timeout(self.config.encode_timeout_s) as limit:
                return list(await asyncio.gather(*tasks))
        except BaseException as error:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_release)
            if isinstance(error, TimeoutError) and limit.expired():
                raise TimedOut(f"the media were not encoded within {self.config.encode_timeout_s:g} s") from error
            raise

    async def _deliver(self, part: Part, encoded: Sequence[Encoded]) -> None:
        """One copy to every receiver, to each as soon as it is known. Raises DialectError if any did not get it."""
        load = _Load(encoded, self._count)
        pushes: list[asyncio.Task[None]] = []
        copying: asyncio.Task[None] | None = None
        try:
            load.frames = self._writer.data(part.id, encoded)
            if len(encoded) > 1:
                # Their rows were copied into one frame, which ZeroMQ keeps alive by itself.
                load.let_go()
            else:
                copying = asyncio.create_task(self._copy(load))
            shortage = await self._begin(part, load, pushes)
            # Those that were begun end by themselves, each with its own limits of time.
            await asyncio.gather(*pushes, return_exceptions=True)
        finally:
            for task in (*pushes, copying):
                if task is not None:
                    task.cancel()
            load.let_go()
            self._num_copied_bytes -= load.num_copied_bytes
        if shortage is not None:
            raise shortage
        for push in pushes:
            push.result()

    async def _begin(self, part: Part, load: "_Load", pushes: "list[asyncio.Task[None]]") -> TimedOut | None:
        """Push to every receiver there is and will be. Returns what to say where some did not come in time."""
        assert self._post is not None, "the dialect was not started"
        try:
            async with asyncio.timeout(self.config.send_timeout_s) as limit:
                async for endpoint in part.destinations():
                    pushing = self._post.push(endpoint, load.frames, load.hold, is_shared=part.is_shared)
                    push = asyncio.create_task(pushing)
                    push.add_done_callback(_look)
                    pushes.append(push)
        except TimeoutError:
            if not limit.expired():
                raise
            wanted = "none" if part.receive_count is None else f"{len(part.endpoints)} of {part.receive_count}"
            return TimedOut(f"{wanted} of the receivers said where they are within {self.config.send_timeout_s:g} s")
        return None

    async def _copy(self, load: "_Load") -> None:
        """Where receivers are long in coming, move the rows out of the arena, while there is room for copies."""
        await asyncio.sleep(_PATIENCE_S)
        size_bytes = memoryview(load.frames[1]).nbytes
        if self._num_copied_bytes + size_bytes <= self.config.max_copied_bytes:
            self._num_copied_bytes += size_bytes
            load.copy()

    def _tell(self, part: Part, endpoint: str, error: DialectError) -> None:
        """Push the news of a failure, behind everyone's back."""
        if not part.is_shared and isinstance(error, CallerGone):
            # Its socket was of this one call, and has gone with the caller.
            return
        frame = self._writer.failure(part.id, error)

        async def tell() -> None:
            try:
                if self._post is not None:
                    await self._post.push(
                        endpoint, [frame], Hold(), is_shared=part.is_shared, connect_timeout_s=_NEWS_PATIENCE_S
                    )
            except ReceiverUnreachable as unreachable:
                logger.info("could not tell of the failure of %s: %s", part.id.req_id, unreachable.message)

        self._spawn(tell())

    def _count(self, change: int) -> None:
        self._num_leased += change

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_PERIOD_S)
            self._receivers.sweep()
            if self._post is not None:
                self._post.sweep()


class _Load:
    """The frames of one part, and who keeps the memory they are in."""

    def __init__(self, encoded: Sequence[Encoded], on_change: Callable[[int], None]) -> None:
        self.frames: tuple[bytes, Buffer] = (b"", b"")
        self.hold = Hold(encoded, on_change)
        self.num_copied_bytes = 0
        self._end_own_use = self.hold.take()

    def let_go(self) -> None:
        """End the leases, at once or with the last message that is on its way."""
        self._end_own_use()
        self.hold = Hold()

    def copy(self) -> None:
        """Messages from now on come from a copy."""
        header, rows = self.frames
        self.num_copied_bytes = memoryview(rows).nbytes
        self.frames = header, bytes(rows)
        self.let_go()


def _release(task: "asyncio.Task[Encoded]") -> None:
    """What was encoded for a part that failed meanwhile."""
    if not task.cancelled() and task.exception() is None:
        task.result().release()


def _look(task: "asyncio.Task[None]") -> None:
    """An error that nobody waits for any more is not news."""
    if not task.cancelled():
        task.exception()
