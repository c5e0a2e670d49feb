"""The server without sockets: admission, deduplication, deadlines, cancellation, leases, draining."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from encoder.client import ArenaReader
from encoder.fingerprint import checkpoint_fingerprint
from encoder.types import CancelEncode, EncodeFailure, EncodeReply, EncoderInfo, FromEncoder, Ping
from preprocess.types import Modality
from tests.fakes.encoder_peer import CONFIG, Opener, until


async def test_miss_then_hit(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        first = await peer.encode(make_png(1))
        second = await peer.encode(make_png(1))
        assert isinstance(first, EncodeReply)
        assert isinstance(second, EncodeReply)
        assert (first.cached, second.cached) == (False, True)
        assert first.ref.checksum == second.ref.checksum
        assert first.ref.lease_id != second.ref.lease_id
        assert first.timings.tower_s > 0
        assert second.timings.tower_s == 0
        rows = ArenaReader().tensor(first.ref)
        assert rows.shape == (first.layout.num_rows, 192)
        assert rows.isfinite().all()


async def test_equal_media_in_flight_are_computed_once(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        ids = [peer.send(peer.request(make_png(seed)), make_png(seed)) for seed in (1, 1, 2, 1)]
        answers = [await peer.answer(request_id) for request_id in ids]
        assert all(isinstance(answer, EncodeReply) for answer in answers)
        counters = peer.server.info().counters
        assert (counters["encoded"], counters["joined"]) == (2, 2)


async def test_inline_rows_equal_the_arena(open_peer: Opener, make_wav: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        request = peer.request(make_wav(1), Modality.AUDIO, inline=True)
        answer = await peer.answer(peer.send(request, make_wav(1)))
        assert isinstance(answer, EncodeReply)
        frame = peer.replies[request.request_id][0][1][0]
        assert (frame.dtype, frame.shape) == ("float32", (7, 192))
        assert bytes(frame.data) == bytes(ArenaReader().content(answer.ref))


async def test_beyond_the_bound_requests_are_refused(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        ids = [peer.send(peer.request(make_png(seed)), make_png(seed)) for seed in range(20)]
        answers = [await peer.answer(request_id) for request_id in ids]
        refused = [answer for answer in answers if isinstance(answer, EncodeFailure)]
        assert len(refused) == 20 - CONFIG.max_pending
        assert {(answer.code, answer.status, answer.retry_after_s) for answer in refused} == {
            ("encoder_busy", 503, 1.0)
        }
        assert isinstance(await peer.encode(make_png(99)), EncodeReply)
        assert peer.server.info().num_pending == 0


async def test_content_waiting_to_be_decoded_is_bounded(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(replace(CONFIG, max_pending_bytes=100_000)) as peer:  # one picture has 37 kB
        ids = [peer.send(peer.request(make_png(seed)), make_png(seed)) for seed in range(5)]
        answers = [await peer.answer(request_id) for request_id in ids]
        assert [isinstance(answer, EncodeReply) for answer in answers] == [True, True, False, False, False]
        assert all(answer.code == "encoder_busy" for answer in answers if isinstance(answer, EncodeFailure))
        assert isinstance(await peer.encode(make_png(9)), EncodeReply)


async def test_jobs_that_wait_together_are_batched(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(replace(CONFIG, max_batch_wait_s=0.2)) as peer:
        ids = [peer.send(peer.request(make_png(seed)), make_png(seed)) for seed in range(6)]
        for request_id in ids:
            assert isinstance(await peer.answer(request_id), EncodeReply)
        assert peer.server.info().counters["batches"] < 6


@pytest.mark.parametrize(
    ("content", "modality", "code", "status"),
    [
        (b"this is no picture", Modality.IMAGE, "media_undecodable", 422),
        (b"", Modality.AUDIO, "media_undecodable", 422),
        (b"neither is this", Modality.VIDEO, "media_undecodable", 422),
    ],
)
async def test_bad_media_fail_alone(
    open_peer: Opener, make_png: Callable[..., bytes], content: bytes, modality: Modality, code: str, status: int
) -> None:
    async with open_peer() as peer:
        bad = peer.send(peer.request(content, modality), content)
        good = peer.send(peer.request(make_png(1)), make_png(1))
        failure = await peer.answer(bad)
        assert isinstance(failure, EncodeFailure)
        assert (failure.code, failure.status) == (code, status)
        assert isinstance(await peer.answer(good), EncodeReply)


async def test_requests_that_cannot_be_right_are_refused(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        content = make_png(1)
        foreign = peer.request(content, key="0" * 32)
        cases = {
            "key_mismatch": peer.send(foreign, content),
            "wire_error": peer.send(peer.request(content), None),
            "deadline_exceeded": peer.send(peer.request(content, deadline_unix_s=time.time() - 1), content),
        }
        for code, request_id in cases.items():
            answer = await peer.answer(request_id)
            assert isinstance(answer, EncodeFailure)
            assert answer.code == code


async def test_a_duplicate_id_is_a_conflict(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        request = peer.request(make_png(1))
        peer.send(request, make_png(1))
        peer.send(request, make_png(1))
        conflict, _ = peer.replies[request.request_id].pop(0)
        assert isinstance(conflict, EncodeFailure)
        assert conflict.status == 409
        assert isinstance(await peer.answer(request.request_id), EncodeReply)


async def test_deadline_and_cancel_each_give_one_reply(open_peer: Opener, make_mp4: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        clip = make_mp4(1, 60)
        late = peer.send(peer.request(clip, Modality.VIDEO, deadline_unix_s=time.time() + 0.002), clip)
        other = make_mp4(2, 60)
        request = peer.request(other, Modality.VIDEO)
        peer.send(request, other)
        peer.server.handle(
            CancelEncode(request_id=request.request_id), (), lambda *_: pytest.fail("no reply to a cancel"), peer="peer"
        )
        answers = [await peer.answer(request_id) for request_id in (late, request.request_id)]
        codes = [answer.code for answer in answers if isinstance(answer, EncodeFailure)]
        assert codes == ["deadline_exceeded", "cancelled"]
        assert isinstance(await peer.encode(other, modality=Modality.VIDEO), EncodeReply)


async def test_cancelling_one_of_two_leaves_the_other(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        requests = [peer.request(make_png(1)) for _ in range(2)]
        for request in requests:
            peer.send(request, make_png(1))
        peer.server.handle(CancelEncode(request_id=requests[0].request_id), (), lambda *_: None, peer="peer")
        assert isinstance(await peer.answer(requests[0].request_id), EncodeFailure)
        assert isinstance(await peer.answer(requests[1].request_id), EncodeReply)


async def test_leases_of_a_vanished_peer_end_at_its_deadline(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        await peer.encode(make_png(1), deadline_unix_s=time.time() + 1.0)
        assert peer.server.info().leased_bytes > 0
        await until(lambda: not peer.server.info().leased_bytes)


async def test_a_peer_known_to_be_gone_loses_its_leases_at_once(
    open_peer: Opener, make_png: Callable[..., bytes]
) -> None:
    async with open_peer() as peer:
        await peer.encode(make_png(1))
        peer.server.disconnect("somebody else")
        assert peer.server.info().leased_bytes > 0
        peer.server.disconnect("peer")
        assert peer.server.info().leased_bytes == 0


async def test_stop_drains_then_refuses(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        ids = [peer.send(peer.request(make_png(seed)), make_png(seed)) for seed in range(4)]
        stopping = asyncio.create_task(peer.server.stop())
        await asyncio.sleep(0)
        late = await peer.encode(make_png(9))
        await stopping
        assert isinstance(late, EncodeFailure)
        assert late.code == "encoder_unavailable"
        for request_id in ids:
            assert isinstance(await peer.answer(request_id), EncodeReply)


async def test_stop_without_patience_ends_everyone(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        ids = [peer.send(peer.request(make_png(seed)), make_png(seed)) for seed in range(8)]
        await peer.server.stop(drain_s=0.0)
        answers = [await peer.answer(request_id) for request_id in ids]
        assert all(isinstance(a, EncodeReply) or a.code == "encoder_unavailable" for a in answers)


async def test_ping_tells_who_and_how_loaded(open_peer: Opener, tiny_model_dir: Path) -> None:
    async with open_peer() as peer:
        infos: list[FromEncoder] = []
        peer.server.handle(Ping(sequence=7), (), lambda message, _: infos.append(message))
        info = peer.server.info(7)
        (told,) = infos
        assert isinstance(told, EncoderInfo)
        # Processor time goes on.
        assert structs.replace(told, counters={}) == structs.replace(info, counters={})
        assert told.counters.keys() == info.counters.keys()
        assert (info.replica, info.width, info.dtype) == ("e0", 192, "float32")
        assert info.fingerprint == checkpoint_fingerprint(tiny_model_dir)
        assert set(info.modalities) == set(Modality)
