"""Requests that know a key and have no content: answered from what there is, and never computed."""

import time
from collections.abc import Callable

import msgspec
import pytest

from encoder.errors import EmbeddingUnknown
from encoder.types import EncodeFailure, EncodeReply, EncodeRequest, EncoderInfo
from preprocess.types import MediaOptions, Modality
from tests.encoder.test_client import KEY, ScriptedLink, answer, client_of
from tests.fakes.encoder_peer import Opener, until


async def test_a_key_is_answered_from_the_arena_and_never_computed(
    open_peer: Opener, make_png: Callable[..., bytes]
) -> None:
    async with open_peer() as peer:
        unknown = await peer.answer(peer.send(peer.request(make_png(1), key_only=True), None))
        assert isinstance(unknown, EncodeFailure)
        assert (unknown.status, unknown.code) == (404, "unknown_media")
        assert peer.server.info().counters.get("encoded", 0) == 0

        encoded = await peer.encode(make_png(1))
        known = await peer.answer(peer.send(peer.request(make_png(1), key_only=True), None))
        assert isinstance(known, EncodeReply)
        assert isinstance(encoded, EncodeReply)
        assert known.cached
        assert known.ref.checksum == encoded.ref.checksum
        assert known.ref.lease_id != encoded.ref.lease_id
        assert peer.server.info().num_pending == 0


async def test_a_key_joins_what_is_being_computed(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        first = peer.send(peer.request(make_png(1)), make_png(1))
        second = peer.send(peer.request(make_png(1), key_only=True), None)
        for request_id in (first, second):
            assert isinstance(await peer.answer(request_id), EncodeReply)
        assert peer.server.info().counters["encoded"] == 1


async def test_content_that_comes_while_a_key_is_looked_for_serves_both(
    open_peer: Opener, make_png: Callable[..., bytes]
) -> None:
    """The flight of a key alone has nothing to compute, until somebody joins it who has the content."""
    async with open_peer() as peer:
        first = peer.send(peer.request(make_png(1), key_only=True), None)
        second = peer.send(peer.request(make_png(1)), make_png(1))
        for request_id in (first, second):
            assert isinstance(await peer.answer(request_id), EncodeReply), request_id


async def test_wrong_content_that_joins_is_refused_alone(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        first = peer.send(peer.request(make_png(1), key_only=True), None)
        second = peer.send(peer.request(make_png(1)), make_png(2))
        answers = [await peer.answer(request_id) for request_id in (first, second)]
        assert [answer.code for answer in answers if isinstance(answer, EncodeFailure)] == [
            "unknown_media",
            "key_mismatch",
        ]


class Host(ScriptedLink):
    """A replica with an arena of its own, or one that is shared, which has the embedding or not."""

    def __init__(self, name: str, asked: list[str], *, has_it: bool = False, arena: str = "") -> None:
        super().__init__(name, self._look)
        self._asked = asked
        self._has_it = has_it
        self._arena = arena or f"arena of {name}"

    def info(self, sequence: int) -> EncoderInfo:
        return msgspec.structs.replace(super().info(sequence), arena=self._arena)

    def _look(self, link: ScriptedLink, request: EncodeRequest) -> None:
        assert request.key_only
        self._asked.append(self.name)
        if self._has_it:
            answer(link, request)
        else:
            unknown = EncodeFailure(request_id=request.request_id, code="unknown_media", message="no", status=404)
            link.deliver(unknown)


async def ask(*hosts: Host) -> EncodeReply:
    async with client_of(*hosts) as client:
        await until(lambda: all(client.infos().values()))
        return await client.encode(None, Modality.IMAGE, MediaOptions(), KEY, time.time() + 5)


async def test_every_host_is_asked_before_a_key_is_unknown() -> None:
    asked: list[str] = []
    with pytest.raises(EmbeddingUnknown):
        await ask(*(Host(name, asked) for name in ("a", "b", "c")))
    assert sorted(asked) == ["a", "b", "c"]


async def test_replicas_that_share_an_arena_are_asked_once() -> None:
    asked: list[str] = []
    with pytest.raises(EmbeddingUnknown):
        await ask(*(Host(name, asked, arena="shared") for name in ("a", "b")))
    assert len(asked) == 1


@pytest.mark.parametrize("owner", ["a", "b"])
async def test_the_host_that_has_it_answers(owner: str) -> None:
    asked: list[str] = []
    reply = await ask(*(Host(name, asked, has_it=name == owner) for name in ("a", "b")))
    assert reply.key == KEY
    assert asked[-1] == owner
