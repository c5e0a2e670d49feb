"""The client against scripted replicas: routing, one retry, silence, late replies, cancellation."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from encoder.client import ArenaReader, EncoderClient
from encoder.errors import EmbeddingLost, EncodeDeadline, EncoderBusy, EncoderError, EncoderUnavailable, ReplicaLost
from encoder.failures import error_of
from encoder.links import LinkDown, Received
from encoder.ring import Ring
from encoder.types import (
    CancelEncode,
    EmbeddingRef,
    EncodeFailure,
    EncodeReply,
    EncodeRequest,
    EncoderInfo,
    Farewell,
    FromEncoder,
    Goodbye,
    KeepLeases,
    Ping,
    ReleaseLeases,
    StageTimings,
    ToEncoder,
)
from encoder.wire import TensorFrame
from preprocess.errors import MediaUndecodable
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality
from tests.fakes.encoder_peer import until

KEY = MediaKey("0123456789abcdef0123456789abcdef")


class ScriptedLink:
    """A replica whose behaviour is one function of the request; it answers pings by itself unless `mute`."""

    def __init__(self, name: str, behave: "Callable[[ScriptedLink, EncodeRequest], None]") -> None:
        self.on_change: Callable[[], None] | None = None
        self.name = name
        self.connected = False
        self.mute = False
        self.wedged = False
        self.incarnation = f"{name}1"
        self.sent: list[ToEncoder] = []
        self._behave = behave
        self._inbox: asyncio.Queue[Received] = asyncio.Queue()

    def open(self) -> None:
        self.set_connected(True)

    def set_connected(self, connected: bool) -> None:
        self.connected = connected
        if self.on_change is not None:
            self.on_change()

    def send(self, message: ToEncoder, tensors: Sequence[TensorFrame] = ()) -> None:
        if not self.connected:
            raise LinkDown(self.name)
        self.sent.append(message)
        if isinstance(message, Ping) and not self.mute:
            self.deliver(self.info(message.sequence))
        if isinstance(message, EncodeRequest):
            self._behave(self, message)

    def deliver(self, message: FromEncoder) -> None:
        self._inbox.put_nowait((message, ()))

    async def receive(self) -> Received:
        return await self._inbox.get()

    def close(self) -> None:
        self.connected = False

    def info(self, sequence: int) -> EncoderInfo:
        return EncoderInfo(
            sequence=sequence,
            replica=self.name,
            incarnation=self.incarnation,
            fingerprint="f",
            width=4,
            dtype="float32",
            modalities=(Modality.IMAGE,),
            num_pending=0,
            num_cached=0,
            cached_bytes=0,
            capacity_bytes=0,
            leased_bytes=0,
            ready=True,
            wedged=self.wedged,
            arena="none",
        )

    def requests(self) -> list[EncodeRequest]:
        return [message for message in self.sent if isinstance(message, EncodeRequest)]


def reply_to(link: ScriptedLink, request: EncodeRequest) -> EncodeReply:
    ref = EmbeddingRef(
        key=request.key,
        arena="none",
        offset_bytes=0,
        num_rows=1,
        width=4,
        dtype="float32",
        checksum=0,
        lease_id=f"{link.incarnation}:{len(link.sent)}",
    )
    layout = MediaLayout(modality=Modality.IMAGE, grid_thw=(1, 2, 2))
    return EncodeReply(
        request_id=request.request_id, key=request.key, layout=layout, ref=ref, cached=False, timings=StageTimings()
    )


def answer(link: ScriptedLink, request: EncodeRequest) -> None:
    link.deliver(reply_to(link, request))


def refuse(link: ScriptedLink, request: EncodeRequest) -> None:
    busy = EncodeFailure(
        request_id=request.request_id, code="encoder_busy", message="full", status=503, retry_after_s=2.0
    )
    link.deliver(busy)


def fail(link: ScriptedLink, request: EncodeRequest) -> None:
    link.deliver(EncodeFailure(request_id=request.request_id, code="tower_failed", message="no memory", status=500))


def take_for_gone(link: ScriptedLink, request: EncodeRequest) -> None:
    link.deliver(EncodeFailure(request_id=request.request_id, code="cancelled", message="gone", status=499))


def reject(link: ScriptedLink, request: EncodeRequest) -> None:
    bad = EncodeFailure(request_id=request.request_id, code="media_undecodable", message="not a picture", status=422)
    link.deliver(bad)


def die(link: ScriptedLink, request: EncodeRequest) -> None:
    link.set_connected(False)


def ignore(link: ScriptedLink, request: EncodeRequest) -> None:
    pass


@asynccontextmanager
async def client_of(*links: ScriptedLink, silence_timeout_s: float = 15.0) -> AsyncIterator[EncoderClient]:
    async with EncoderClient(links, ping_period_s=0.02, silence_timeout_s=silence_timeout_s) as client:
        yield client


async def encode(client: EncoderClient, timeout_s: float = 5.0) -> EncodeReply:
    return await client.encode(b"content", Modality.IMAGE, MediaOptions(), KEY, time.time() + timeout_s)


def owner_first(*behaviours: Callable[[ScriptedLink, EncodeRequest], None]) -> list[ScriptedLink]:
    """Links whose behaviours come in the order in which the ring prefers them for KEY."""
    names = [f"replica-{index}" for index in range(len(behaviours))]
    order = list(Ring(names).preference(KEY))
    return [ScriptedLink(name, behave) for name, behave in zip(order, behaviours, strict=True)]


async def test_a_key_goes_to_its_owner() -> None:
    links = owner_first(answer, answer, answer)
    async with client_of(*links) as client:
        for _ in range(3):
            await encode(client)
    assert [len(link.requests()) for link in links] == [3, 0, 0]


@pytest.mark.parametrize("behave", [die, refuse, fail, take_for_gone])
async def test_one_retry_on_the_next_replica(behave: Callable[[ScriptedLink, EncodeRequest], None]) -> None:
    links = owner_first(behave, answer, answer)
    async with client_of(*links) as client:
        reply = await encode(client)
    assert reply.ref.lease_id.startswith(links[1].incarnation)
    assert [len(link.requests()) for link in links] == [1, 1, 0]
    assert links[0].requests()[0].request_id != links[1].requests()[0].request_id


async def test_only_one_retry_where_replicas_live() -> None:
    links = owner_first(refuse, refuse, answer)
    async with client_of(*links) as client:
        with pytest.raises(EncoderBusy):
            await encode(client)
    assert not links[2].requests()


async def test_two_losses_in_a_row_end_in_an_answer_and_three_do_not() -> None:
    links = owner_first(die, die, answer)
    async with client_of(*links) as client:
        assert (await encode(client)).ref.lease_id.startswith(links[2].incarnation)
    links = owner_first(die, die, die, answer)
    async with client_of(*links) as client:
        with pytest.raises(ReplicaLost):
            await encode(client)
    assert not links[3].requests()


async def test_the_medium_s_own_fault_is_not_retried() -> None:
    links = owner_first(reject, answer)
    async with client_of(*links) as client:
        with pytest.raises(MediaUndecodable, match="not a picture"):
            await encode(client)
    assert not links[1].requests()


async def test_a_busy_single_replica_says_when_to_come_back() -> None:
    async with client_of(*owner_first(refuse)) as client:
        with pytest.raises(EncoderBusy) as caught:
            await encode(client)
    assert caught.value.retry_after_s == 2.0


async def test_a_single_replica_is_retried_after_its_restart() -> None:
    def die_once(link: ScriptedLink, request: EncodeRequest) -> None:
        if len(link.requests()) > 1:
            answer(link, request)
            return
        link.set_connected(False)
        link.incarnation = "second"
        asyncio.get_running_loop().call_later(0.05, link.set_connected, True)

    async with client_of(*owner_first(die_once)) as client:
        assert (await encode(client)).ref.lease_id.startswith("second")


async def test_a_restart_seen_only_by_its_incarnation_ends_what_was_owed() -> None:
    def restart_once(link: ScriptedLink, request: EncodeRequest) -> None:
        if link.incarnation == "second":
            answer(link, request)
        link.incarnation = "second"

    async with client_of(*owner_first(restart_once)) as client:
        assert (await encode(client)).ref.lease_id.startswith("second")


async def test_a_silent_replica_is_given_up() -> None:
    def fall_silent(link: ScriptedLink, request: EncodeRequest) -> None:
        link.mute = True

    links = owner_first(fall_silent, answer)
    async with client_of(*links, silence_timeout_s=0.1) as client:
        reply = await encode(client)
        assert reply.ref.lease_id.startswith(links[1].incarnation)
        assert client.infos()[links[0].name] is None
        links[0].mute = False
        await asyncio.sleep(0.1)
        assert client.infos()[links[0].name] is not None


async def test_who_answers_no_ping_is_passed_over_before_it_is_given_up() -> None:
    links = owner_first(ignore, answer)
    async with client_of(*links, silence_timeout_s=1.0) as client:
        owed = asyncio.create_task(encode(client))
        await asyncio.sleep(0.1)
        links[0].mute = True
        await asyncio.sleep(0.7)
        assert client.infos()[links[0].name] is not None
        assert (await encode(client)).ref.lease_id.startswith(links[1].incarnation)
        assert client.loads() == {links[0].name: 1, links[1].name: 0}
        assert (await owed).ref.lease_id.startswith(links[1].incarnation)
        assert CancelEncode(request_id=links[0].requests()[0].request_id) in links[0].sent


async def test_a_client_that_stood_still_itself_gives_nobody_up() -> None:
    link = ScriptedLink("a", ignore)
    async with client_of(link, silence_timeout_s=0.2) as client:
        owed = asyncio.create_task(encode(client, timeout_s=1.0))
        await asyncio.sleep(0.1)
        time.sleep(0.5)  # noqa: ASYNC251 - this is the point
        for _ in range(5):
            await asyncio.sleep(0)
            assert client.infos()["a"] is not None
        with pytest.raises(EncodeDeadline):
            await owed
    assert len(link.requests()) == 1


async def test_a_stuck_tower_is_passed_over_while_there_is_another() -> None:
    links = owner_first(answer, answer)
    links[0].wedged = True
    async with client_of(*links) as client:
        assert (await encode(client)).ref.lease_id.startswith(links[1].incarnation)
        links[1].wedged = True
        await asyncio.sleep(0.1)
        assert (await encode(client)).ref.lease_id.startswith(links[0].incarnation)


async def test_a_replica_that_ends_is_waited_for_if_it_is_the_only_one() -> None:
    def refuse_once(link: ScriptedLink, request: EncodeRequest) -> None:
        if len(link.requests()) > 1:
            answer(link, request)
            return
        link.deliver(
            EncodeFailure(request_id=request.request_id, code="encoder_unavailable", message="it ends", status=503)
        )

    async with client_of(*owner_first(refuse_once)) as client:
        assert (await encode(client)).cached is False


async def test_a_connection_that_is_back_begins_with_the_leases_still_held() -> None:
    link = ScriptedLink("a", answer)
    async with client_of(link) as client:
        kept, given_back = await encode(client), await encode(client)
        link.set_connected(False)
        client.release(given_back.ref)
        told = len(link.sent)
        link.set_connected(True)
        assert link.sent[told] == KeepLeases(lease_ids=(kept.ref.lease_id,))


async def test_nobody_up_is_said_at_the_deadline() -> None:
    link = ScriptedLink("a", answer)
    link.mute = True
    async with client_of(link) as client:
        with pytest.raises(EncoderUnavailable):
            await encode(client, timeout_s=0.1)
        with pytest.raises(EncoderUnavailable):
            await client.info(timeout_s=0.05)


async def test_no_answer_by_the_deadline_cancels_and_a_late_one_is_released() -> None:
    link = ScriptedLink("a", ignore)
    async with client_of(link) as client:
        with pytest.raises(EncodeDeadline):
            await encode(client, timeout_s=0.05)
        request = link.requests()[0]
        assert CancelEncode(request_id=request.request_id) in link.sent
        late = reply_to(link, request)
        link.deliver(late)
        await asyncio.sleep(0.05)
        assert ReleaseLeases(lease_ids=(late.ref.lease_id,)) in link.sent


async def test_a_cancelled_call_cancels_at_the_replica() -> None:
    link = ScriptedLink("a", ignore)
    async with client_of(link) as client:
        task = asyncio.create_task(encode(client))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert CancelEncode(request_id=link.requests()[0].request_id) in link.sent


async def test_release_goes_to_the_process_that_gave_the_lease() -> None:
    links = owner_first(answer, answer)
    async with client_of(*links) as client:
        reply = await encode(client)
        client.release(reply.ref)
        expected = ReleaseLeases(lease_ids=(reply.ref.lease_id,))
        assert expected in links[0].sent
        assert expected not in links[1].sent


async def test_closing_ends_waiting_calls() -> None:
    async with client_of(ScriptedLink("a", ignore)) as client:
        task = asyncio.create_task(encode(client))
        await asyncio.sleep(0.05)
    with pytest.raises(EncoderUnavailable):
        await task


def test_every_code_comes_back_as_its_class() -> None:
    failure = EncodeFailure(request_id="r", code="media_undecodable", message="m", status=422)
    assert isinstance(error_of(failure), MediaUndecodable)
    unknown = EncodeFailure(request_id="r", code="from_the_future", message="m", status=500)
    assert type(error_of(unknown)) is EncoderError


def test_a_reference_to_nothing_is_lost() -> None:
    link = ScriptedLink("a", answer)
    request = EncodeRequest(
        request_id="r", key=KEY, modality=Modality.IMAGE, options=MediaOptions(), deadline_unix_s=0.0
    )
    for arena in ("no-such-arena", "../evil"):
        ref = reply_to(link, request).ref
        lost = EmbeddingRef(**{field: getattr(ref, field) for field in ref.__struct_fields__} | {"arena": arena})
        with pytest.raises(EmbeddingLost):
            ArenaReader().array(lost)


def test_the_client_loads_no_torch() -> None:
    probe = "import sys, encoder, encoder.client, encoder.fingerprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


async def test_a_farewell_is_answered_and_the_replica_not_asked_again() -> None:
    links = owner_first(answer, answer)
    async with client_of(*links) as client:
        await encode(client)
        links[0].mute = True
        links[0].deliver(Farewell(sequence=4))
        await until(lambda: Goodbye(sequence=4) in links[0].sent)
        await encode(client)
        await encode(client)
    assert [len(link.requests()) for link in links] == [1, 2]
