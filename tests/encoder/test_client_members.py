"""Replicas that join and leave a client while it encodes."""

import asyncio
import time

import pytest

from encoder.client import EncoderClient
from encoder.errors import EncoderUnavailable
from tests.encoder.test_client import ScriptedLink, answer, client_of, encode, ignore, reply_to

PERIOD_S = 0.02


async def until(condition: "object") -> None:
    assert callable(condition)
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the client's own state
            await asyncio.sleep(0.005)


async def test_a_client_of_nobody_waits_for_the_first_to_join() -> None:
    async with client_of() as client:
        with pytest.raises(EncoderUnavailable):
            await encode(client, timeout_s=0.05)
        asking = asyncio.create_task(encode(client))
        await asyncio.sleep(0)
        link = ScriptedLink("new", answer)
        client.add(link)
        await asyncio.wait_for(asking, 5)
        assert len(link.requests()) == 1
        client.add("new")
        assert list(client.infos()) == ["new"]


async def test_a_retired_replica_ends_what_it_owes_and_gets_nothing_new() -> None:
    old, new = ScriptedLink("old", ignore), ScriptedLink("new", answer)
    async with client_of(old) as client:
        asking = asyncio.create_task(encode(client))
        await until(old.requests)
        client.add(new)
        client.retire("old")
        assert list(client.infos()) == ["new"]
        for _ in range(3):
            await encode(client)
        assert (len(old.requests()), len(new.requests())) == (1, 3)
        await asyncio.sleep(3 * PERIOD_S)
        assert old.connected
        old.deliver(reply_to(old, old.requests()[0]))
        reply = await asyncio.wait_for(asking, 5)
        # Its rows are still leased there.
        await asyncio.sleep(3 * PERIOD_S)
        assert old.connected
        client.release(reply.ref)
        await until(lambda: not old.connected)


async def test_a_retired_replica_that_dies_is_forgotten_and_its_media_go_elsewhere() -> None:
    old, new = ScriptedLink("old", ignore), ScriptedLink("new", answer)
    async with client_of(old) as client:
        asking = asyncio.create_task(encode(client))
        await until(old.requests)
        client.add(new)
        client.retire("old")
        old.set_connected(False)
        await asyncio.wait_for(asking, 5)
        assert len(new.requests()) == 1
        await until(lambda: "old" not in client.loads())


async def test_one_that_is_listed_again_keeps_its_link() -> None:
    link = ScriptedLink("a", answer)
    async with client_of(link) as client:
        client.retire("a")
        client.add("a")
        await encode(client)
        assert link.connected
        assert len(link.requests()) == 1


async def test_members_are_known_by_address_before_the_client_starts() -> None:
    client = EncoderClient.connect([])
    client.add("tcp://127.0.0.1:1")
    async with client:
        assert client.infos() == {"tcp://127.0.0.1:1": None}
        client.retire("tcp://127.0.0.1:1")
        assert client.infos() == {}
        started_s = time.monotonic()
        with pytest.raises(EncoderUnavailable):
            await encode(client, timeout_s=0.05)
        assert time.monotonic() - started_s < 5
