"""The dialect as a language-only server sees it, told by receivers written from the protocol's description alone.

Long, because every rule of the protocol has its case, and all of them share one front and one receiver.
"""

import asyncio
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from encoder.sglang.pickles import Tensor
from preprocess.types import Modality
from tests.encoder.sglang.conftest import Encoder, Opener, until
from tests.fakes.sglang_desk import FakeDesk, rows_of, url_of
from tests.fakes.sglang_receiver import Receiver

IMAGE = {"grid": [1, 4, 6]}
OTHER = {"grid": [1, 2, 2], "name": "other"}
SILENT = {"grid": [2, 2, 4], "times": [0.0, 1.0]}
SOUNDING = {"grid": [3, 2, 2], "times": [0.0, 2.0, 4.0], "slices": [[0, 12], [12, 5], [17, 0]]}


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    opened = [Receiver(), Receiver()]
    yield opened
    for receiver in opened:
        receiver.close()


def part(items: object, *, name: str = "a", modality: str = "IMAGE", **more: object) -> dict[str, object]:
    """A call of `/encode` for one part."""
    return {
        "req_id": f"{name}_local_part_0",
        "num_parts": 1,
        "part_idx": 0,
        "modality": modality,
        "mm_items": items,
        "prefill_host": "127.0.0.1",
        "embedding_port": None,
        "time_stats_json": None,
        "encoder_idx": 0,
        "encoder_url": "http://anywhere",
        "something_new": {"a": 1},
    } | more


def registration(receiver: Receiver, *, name: str = "a", count: int = 1) -> dict[str, object]:
    return {
        "req_id": f"{name}_local_part_0",
        "receive_count": count,
        "receive_url": receiver.url,
        "modality": "IMAGE",
    }


def expected_rows(*specs: dict[str, Any], num_rows: list[int], dtype: str = "bfloat16", width: int = 8) -> bytes:
    contents = [json.dumps(spec).encode() for spec in specs]
    row_bytes = width * (2 if dtype == "bfloat16" else 4)
    # The vision rows of each: the first ones.
    return b"".join(
        rows_of(content, 64, width, dtype)[: rows * row_bytes] for content, rows in zip(contents, num_rows, strict=True)
    )


async def encoded(encoder: Encoder, call: dict[str, object], *ranks: Receiver) -> tuple[int, Any]:
    """Encode a part with the ranks registered at the same time."""
    name = str(call["req_id"]).removesuffix("_local_part_0")
    answers = await asyncio.gather(
        encoder.post("/encode", call),
        *(encoder.post("/scheduler_receive_url", registration(rank, name=name, count=len(ranks))) for rank in ranks),
    )
    assert all(answer == (200, None) for answer in answers[1:])
    return answers[0]


async def test_an_image_reaches_every_rank(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    assert await encoded(encoder, part([url_of(**IMAGE)]), *receivers) == (200, None)
    for receiver in receivers:
        message = await receiver.receive()
        header = message.header
        assert (header.req_id, header.num_parts, header.part_idx) == ("a_local_part_0", 1, 0)
        assert (header.modality, header.dtype, header.shape) == ("image", "bfloat16", (6, 8))
        assert header.grid == ((1, 4, 6),)
        assert message.rows == expected_rows(IMAGE, num_rows=[6])
        assert await receiver.is_silent()
    await encoder.is_quiet()


async def test_several_items_are_one_frame_in_order(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    # The first is the last to be ready.
    slow = {**IMAGE, "pause_ms": 50}
    call = part([url_of(**slow), {"url": url_of(**OTHER), "detail": "high"}, [[url_of(**IMAGE)]]])
    assert (await encoded(encoder, call, receivers[0]))[0] == 200
    message = await receivers[0].receive()
    assert message.header.grid == ((1, 4, 6), (1, 2, 2), (1, 4, 6))
    assert message.header.shape == (13, 8)
    assert message.rows == expected_rows(slow, OTHER, IMAGE, num_rows=[6, 1, 6])
    await encoder.is_quiet()


async def test_sound_travels_in_its_own_tensor(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(send_video_sound=True)
    call = part([url_of(**SILENT), url_of(**SOUNDING)], modality="video")
    assert (await encoded(encoder, call, receivers[0]))[0] == 200
    message = await receivers[0].receive()
    header = message.header
    assert header.grid == ((2, 2, 4), (3, 2, 2))
    assert header.video_timestamps == (0.0, 1.0, 0.0, 2.0, 4.0)
    assert header.audio_units == (0, 3)
    assert header.audio_lengths == (12, 5, 0)
    assert header.shape == (7, 8)
    assert message.rows == expected_rows(SILENT, SOUNDING, num_rows=[4, 3])
    whole = rows_of(json.dumps(SOUNDING).encode(), 20, 8, "bfloat16")
    assert header.audio_rows == Tensor("bfloat16", (17, 8), whole[3 * 16 :])
    await encoder.is_quiet()


async def test_sound_is_left_out_where_the_reader_cannot_take_it(
    open_encoder: Opener, receivers: list[Receiver]
) -> None:
    encoder = await open_encoder()
    assert (await encoded(encoder, part(url_of(**SOUNDING), modality="VIDEO"), receivers[0]))[0] == 200
    header = (await receivers[0].receive()).header
    assert (header.audio_units, header.audio_rows, header.shape) == ((0,), None, (3, 8))
    item = {"url": url_of(**SOUNDING), "use_audio": True}
    status, answer = await encoder.post("/encode", part(item, modality="VIDEO", name="b"))
    assert status == 400
    assert "send_video_sound" in answer["message"]


async def test_silent_videos_count_as_such(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    assert (await encoded(encoder, part(url_of(**SILENT), modality="VIDEO"), receivers[0]))[0] == 200
    header = (await receivers[0].receive()).header
    assert (header.audio_units, header.audio_lengths, header.audio_rows) == ((0,), (), None)


async def test_sound_that_ends_before_the_first_frame_is_none(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(send_video_sound=True)
    deaf = SILENT | {"slices": [[0, 0], [0, 0]]}
    call = part([url_of(**deaf), url_of(**SOUNDING)], modality="VIDEO")
    assert (await encoded(encoder, call, receivers[0]))[0] == 200
    header = (await receivers[0].receive()).header
    assert (header.audio_units, header.audio_lengths) == ((0, 3), (12, 5, 0))


async def test_an_id_may_come_again_after_its_end(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    assert (await encoder.post("/encode", part(url_of(fail="no"))))[0] == 400
    assert (await encoded(encoder, part(url_of(**IMAGE)), receivers[0]))[0] == 200
    assert (await receivers[0].receive()).rows == expected_rows(IMAGE, num_rows=[6])
    await encoder.is_quiet()
    assert encoder.dialect.gauges()["ended_parts"] == 1


async def test_sounds_have_a_tensor_of_lengths(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(FakeDesk(dtype="float32"))
    call = part([url_of(rows=5), url_of(rows=2)], modality="AUDIO")
    assert (await encoded(encoder, call, receivers[0]))[0] == 200
    message = await receivers[0].receive()
    assert message.header.grid == ((5,), (2,))
    assert (message.header.modality, message.header.dtype) == ("audio", "float32")
    assert message.rows == expected_rows({"rows": 5}, {"rows": 2}, num_rows=[5, 2], dtype="float32")


async def test_receivers_may_come_first(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    early = [
        asyncio.create_task(encoder.post("/scheduler_receive_url", registration(receiver, count=2)))
        for receiver in receivers
    ]
    await asyncio.sleep(0.05)
    assert encoder.dialect.gauges()["waiting_receivers"] == 2
    assert not any(task.done() for task in early)
    assert (await encoder.post("/encode", part(url_of(**IMAGE))))[0] == 200
    assert [await task for task in early] == [(200, None)] * 2
    for receiver in receivers:
        assert (await receiver.receive()).rows is not None
    await encoder.is_quiet()


async def test_a_receiver_that_comes_late_is_served_when_it_comes(
    open_encoder: Opener, receivers: list[Receiver]
) -> None:
    encoder = await open_encoder()
    encoding = asyncio.create_task(encoder.post("/encode", part(url_of(**IMAGE))))
    await until(lambda: encoder.desk.num_leased)
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[0], count=2)))[0] == 200
    # Served at once, without the other.
    assert (await receivers[0].receive()).rows == expected_rows(IMAGE, num_rows=[6])
    # The same again changes nothing.
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[0], count=2)))[0] == 200
    assert encoder.desk.num_leased == 1
    assert not encoding.done()
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[1], count=2)))[0] == 200
    assert (await receivers[1].receive()).rows == expected_rows(IMAGE, num_rows=[6])
    assert await encoding == (200, None)
    assert await receivers[0].is_silent()
    await encoder.is_quiet()
    # After the end: the same again is fine, another is not.
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[0], count=2)))[0] == 200
    third = Receiver()
    status, answer = await encoder.post("/scheduler_receive_url", registration(third, count=2))
    third.close()
    assert (status, answer["status"], answer["req_id"]) == (400, "error", "a_local_part_0")
    assert await receivers[0].is_silent()


async def test_counts_that_differ_are_refused(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    encoding = asyncio.create_task(encoder.post("/encode", part(url_of(**IMAGE))))
    await until(lambda: encoder.desk.num_leased)
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[0], count=2)))[0] == 200
    status, answer = await encoder.post("/scheduler_receive_url", registration(receivers[1], count=3))
    assert status == 400
    assert "receive_count" in answer["message"]
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[1], count=2)))[0] == 200
    assert (await encoding)[0] == 200


async def test_a_tokenizer_names_its_port_in_the_call(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    call = part(url_of(**IMAGE), embedding_port=receivers[0].port)
    assert await encoder.post("/encode", call) == (200, None)
    assert (await receivers[0].receive()).rows == expected_rows(IMAGE, num_rows=[6])
    await encoder.is_quiet()
    # Its ports are new for every request: nothing is kept.
    assert encoder.dialect.gauges()["sockets"] == 0


async def test_a_list_of_ports_gets_a_copy_each(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    call = part(url_of(**IMAGE), embedding_port=[receiver.port for receiver in receivers])
    assert await encoder.post("/encode", call) == (200, None)
    for receiver in receivers:
        assert (await receiver.receive()).rows == expected_rows(IMAGE, num_rows=[6])


@pytest.mark.parametrize(
    ("backend", "port"), [("zmq_to_scheduler", 25000), ("zmq_to_tokenizer", [25000]), ("zmq_to_tokenizer", None)]
)
async def test_the_other_backend_is_refused_by_name(open_encoder: Opener, backend: str, port: object) -> None:
    encoder = await open_encoder(transfer_backend=backend)
    status, answer = await encoder.post("/encode", part(url_of(**IMAGE), embedding_port=port))
    assert status == 500
    assert backend in answer["message"]
    assert not encoder.desk.sources


async def test_large_rows_of_one_medium_are_sent_from_where_they_lie(
    open_encoder: Opener, receivers: list[Receiver]
) -> None:
    """The fake overwrites rows at their release: a lease that ended too early would show."""
    encoder = await open_encoder(FakeDesk(dtype="float32", width=4096))
    large = {"grid": [1, 32, 64]}
    assert (await encoded(encoder, part(url_of(**large)), *receivers))[0] == 200
    expected = rows_of(json.dumps(large).encode(), 512, 4096, "float32")
    for receiver in receivers:
        assert (await receiver.receive()).rows == expected
    await encoder.is_quiet()


@pytest.mark.parametrize("early", [True, False])
async def test_a_failure_is_told_to_the_caller_and_to_every_rank(
    open_encoder: Opener, receivers: list[Receiver], early: bool
) -> None:
    encoder = await open_encoder()
    call = part([url_of(**IMAGE), url_of(fail="no picture at all", pause_ms=30)])
    if early:
        status, answer = await encoded(encoder, call, *receivers)
    else:
        status, answer = await encoder.post("/encode", call)
        for receiver in receivers:
            # The part is gone: told all the same.
            assert (await encoder.post("/scheduler_receive_url", registration(receiver, count=2)))[0] == 200
    assert status == 400
    assert answer == {"status": "error", "message": "mm_items[1]: no picture at all", "req_id": "a_local_part_0"}
    for receiver in receivers:
        message = await receiver.receive()
        assert message.rows is None
        assert message.header.error_msg == "mm_items[1]: no picture at all"
        assert message.header.error_code == 400
        assert message.header.req_id == "a_local_part_0"
    await encoder.is_quiet()


async def test_a_failure_nobody_foresaw_is_told_as_well(
    open_encoder: Opener, receivers: list[Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    encoder = await open_encoder()
    status, answer = await encoded(encoder, part(url_of(crash="secret")), receivers[0])
    assert (status, answer["status"]) == (500, "error")
    assert "secret" not in answer["message"]
    assert (await receivers[0].receive()).header.error_code == 500
    assert "ZeroDivisionError" in caplog.text
    await encoder.is_quiet()


async def test_an_id_is_for_one_part_at_a_time(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    first = asyncio.create_task(encoder.post("/encode", part(url_of(wait="gate", **IMAGE))))
    await until(lambda: encoder.desk.sources)
    status, answer = await encoder.post("/encode", part(url_of(**OTHER)))
    assert status == 409
    assert answer["req_id"] == "a_local_part_0"
    encoder.desk.gates["gate"].set()
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[0])))[0] == 200
    assert (await first)[0] == 200
    assert (await receivers[0].receive()).header.grid == ((1, 4, 6),)
    await encoder.is_quiet()


async def test_content_that_is_not_what_was_hashed(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    content = json.dumps(IMAGE).encode()
    right, wrong = hashlib.sha256(content).hexdigest(), hashlib.sha256(b"x").hexdigest()
    for name, digest, status in (("a", wrong, 400), ("b", right, 200)):
        item = {"url": url_of(**IMAGE), "content_hash": f"sha256:{digest}"}
        assert (await encoded(encoder, part([item], name=name), receivers[0]))[0] == status


async def test_nobody_comes(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(send_timeout_s=0.2, registration_timeout_s=0.2)
    status, answer = await encoder.post("/encode", part(url_of(**IMAGE)))
    assert status == 504
    assert "receivers" in answer["message"]
    status, answer = await encoder.post("/scheduler_receive_url", registration(receivers[0], name="never"))
    assert status == 504
    await encoder.is_quiet()


async def test_media_that_take_too_long(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(encode_timeout_s=0.2)
    status, _ = await encoded(encoder, part([url_of(**IMAGE), url_of(wait="never", **IMAGE)]), receivers[0])
    assert status == 504
    assert (await receivers[0].receive()).header.error_code == 504
    await encoder.is_quiet()


@pytest.mark.parametrize("as_list", [False, True])
async def test_a_port_that_speaks_http_gets_nothing(open_encoder: Opener, as_list: bool) -> None:
    """Its own, which answers the first bytes of ZeroMQ with 400."""
    encoder = await open_encoder(connect_timeout_s=1.0)
    port: object = [encoder.port] if as_list else encoder.port
    status, answer = await encoder.post("/encode", part(url_of(**IMAGE), embedding_port=port))
    assert status == 504
    assert str(encoder.port) in answer["message"]
    await encoder.is_quiet()


async def test_one_dead_receiver_costs_nobody_else(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(connect_timeout_s=0.5)
    live, dead = receivers
    dead.close()
    started_s = asyncio.get_running_loop().time()
    broken = asyncio.create_task(encoded(encoder, part(url_of(**IMAGE)), live, dead))
    assert (await live.receive()).rows is not None
    for name in "bcdef":
        assert (await encoded(encoder, part(url_of(**IMAGE), name=name), live))[0] == 200
    assert asyncio.get_running_loop().time() - started_s < 0.5
    status, answer = await broken
    assert status == 504
    assert "took no connection" in answer["message"]
    # The living rank of the broken request learns of it, after what it had got.
    names = [(await live.receive()).header for _ in range(6)]
    assert sum(header.error_code == 504 for header in names) == 1
    await encoder.is_quiet()


async def test_a_receiver_is_served_again_after_it_was_gone(open_encoder: Opener) -> None:
    encoder = await open_encoder(connect_timeout_s=0.3)
    first = Receiver()
    assert (await encoded(encoder, part(url_of(**IMAGE), name="a"), first))[0] == 200
    assert (await first.receive()).rows is not None
    port = first.port
    first.close()
    await asyncio.sleep(0.05)
    assert (await encoded(encoder, part(url_of(**IMAGE), name="b"), first))[0] == 504
    await encoder.is_quiet()
    again = Receiver()
    again.socket.bind(f"tcp://127.0.0.1:{port}")
    again.url = f"127.0.0.1:{port}"
    assert (await encoded(encoder, part(url_of(**IMAGE), name="c"), again))[0] == 200
    assert (await again.receive()).header.req_id.startswith("c_")
    again.close()


@pytest.mark.parametrize("moment", ["encoding", "waiting for receivers", "connecting"])
async def test_a_caller_that_leaves_takes_everything_with_it(open_encoder: Opener, moment: str) -> None:
    encoder = await open_encoder()
    gate = {"wait": "gate"} if moment == "encoding" else {}
    dead = Receiver()
    dead.close()
    port = dead.port if moment == "connecting" else None
    calls = [
        asyncio.create_task(encoder.post("/encode", part(url_of(**gate, **IMAGE), name=f"n{i}", embedding_port=port)))
        for i in range(20)
    ]
    waiting = [
        asyncio.create_task(encoder.post("/scheduler_receive_url", registration(dead, name=f"w{i}"))) for i in range(20)
    ]

    def is_reached() -> bool:
        gauges = encoder.dialect.gauges()
        counts = [gauges["parts"], gauges["waiting_receivers"], 20 if gate else encoder.desk.num_leased]
        return min(counts) == 20 and (port is None or gauges["messages"] == 20)

    await until(is_reached)
    for task in (*calls, *waiting):
        task.cancel()
    await asyncio.gather(*calls, *waiting, return_exceptions=True)
    await encoder.is_quiet()


async def test_ipv6(open_encoder: Opener) -> None:
    try:
        receiver = Receiver("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    encoder = await open_encoder()
    assert (await encoded(encoder, part(url_of(**IMAGE)), receiver))[0] == 200
    assert (await receiver.receive()).rows is not None
    call = part(url_of(**IMAGE), name="b", prefill_host="::1", embedding_port=receiver.port)
    assert (await encoder.post("/encode", call))[0] == 200
    assert (await receiver.receive()).rows is not None
    receiver.close()


async def test_messages_of_one_rank_come_in_order(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    assert (await encoded(encoder, part(url_of(**IMAGE), name="first"), receivers[0]))[0] == 200
    for i in range(10):
        assert (await encoded(encoder, part(url_of(**IMAGE), name=f"n{i}"), receivers[0]))[0] == 200
    names = [(await receivers[0].receive()).header.req_id for _ in range(11)]
    assert names == [f"{name}_local_part_0" for name in ("first", *(f"n{i}" for i in range(10)))]
    assert encoder.dialect.gauges()["sockets"] == 1


FAULTS: list[tuple[dict[str, object], str]] = [
    ({"req_id": ""}, "req_id"),
    ({"req_id": 5}, "req_id"),
    ({"req_id": "x" * 2000}, "req_id"),
    ({"modality": "SMELL"}, "modality"),
    ({"modality": None}, "modality"),
    ({"mm_items": None}, "mm_items"),
    ({"mm_items": []}, "mm_items"),
    ({"mm_items": [[], [None]]}, "mm_items"),
    ({"mm_items": [5]}, "mm_items[0]"),
    ({"mm_items": [{"pixel_values": []}]}, "mm_items[0]"),
    ({"mm_items": ["nothing of a kind!"]}, "mm_items[0]"),
    ({"num_parts": 0}, "num_parts"),
    ({"num_parts": True}, "num_parts"),
    ({"num_parts": 1.0}, "num_parts"),
    ({"part_idx": 1}, "part_idx"),
    ({"part_idx": False}, "part_idx"),
    ({"num_parts": 65537}, "num_parts is 65537, allowed is a whole number, 1 to 65536"),
    ({"hashes": {"a": 1}}, "hashes is an object with 1 field, allowed"),
    ({"embedding_port": 0}, "embedding_port is 0, allowed is a port, 1 to 65535"),
    ({"embedding_port": 70000}, "embedding_port is 70000, allowed is a port, 1 to 65535"),
    ({"embedding_port": [5000, 70000]}, "embedding_port[1] is 70000, allowed"),
    ({"embedding_port": True}, "embedding_port is true, allowed"),
    ({"embedding_port": []}, "embedding_port is [], allowed"),
    ({"embedding_port": "5000"}, 'embedding_port is "5000", allowed'),
    ({"embedding_port": 5000, "prefill_host": None}, "prefill_host is missing, allowed"),
    ({"embedding_port": 5000, "prefill_host": 7}, "prefill_host is 7, allowed"),
    ({"embedding_port": 5000, "prefill_host": "a b;ipc:///tmp/x"}, 'prefill_host is "a b;ipc'),
    ({"embedding_port": 5000, "prefill_host": "fe80::1%a;b"}, "prefill_host is "),
    ({"embedding_port": 5000, "prefill_host": "::1]:80"}, "prefill_host is "),
    ({"embedding_port": 5000, "prefill_host": "999.1.1.1"}, 'prefill_host is "999.1.1.1", allowed'),
    ({"embedding_port": [5000], "prefill_host": "127.1"}, 'prefill_host is "127.1", allowed'),
]


@pytest.mark.parametrize(("change", "word"), FAULTS)
async def test_calls_that_make_no_sense(
    open_encoder: Opener, receivers: list[Receiver], change: dict[str, object], word: str
) -> None:
    encoder = await open_encoder()
    status, answer = await encoder.post("/encode", part(url_of(**IMAGE)) | change)
    assert (status, answer["status"]) == (400, "error")
    assert word in answer["message"]
    assert not encoder.desk.sources
    await encoder.is_quiet()
    if "req_id" not in change:
        # Its receivers need not wait for a part that will not come.
        assert (await encoder.post("/scheduler_receive_url", registration(receivers[0])))[0] == 200
        assert (await receivers[0].receive()).header.error_msg == answer["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"receive_url": None},
        {"receive_url": "nowhere"},
        {"receive_url": "host:99999"},
        {"receive_url": "tcp://host:5000"},
        {"receive_url": "a;b:5000"},
        {"receive_count": 0},
        {"receive_count": True},
        {"receive_count": None},
    ],
)
async def test_registrations_that_make_no_sense(open_encoder: Opener, change: dict[str, object]) -> None:
    encoder = await open_encoder()
    body = {"req_id": "a", "receive_count": 1, "receive_url": "127.0.0.1:5000", "modality": "IMAGE"} | change
    status, answer = await encoder.post("/scheduler_receive_url", body)
    assert (status, answer["req_id"]) == (400, "a")


@pytest.mark.parametrize(("body", "status"), [(b"[1]", 422), (b"{", 422), (b"\xff", 422), (b"x" * 2000, 413)])
async def test_bodies_that_are_no_objects(open_encoder: Opener, body: bytes, status: int) -> None:
    encoder = await open_encoder(max_body_bytes=1000)
    async with encoder.session.post(encoder.url + "/encode", data=body) as response:
        assert response.status == status
        assert (await response.json())["status"] == "error"


@pytest.mark.parametrize("path", ["/send", "/scheduler_receive_meta_data"])
async def test_the_backend_that_is_not_spoken(open_encoder: Opener, path: str) -> None:
    encoder = await open_encoder()
    status, answer = await encoder.post(path, {"req_id": "a", "part_idx": 0})
    assert status == 501
    assert "zmq_to_scheduler" in answer["message"]
    # A part that ranks of that backend wait for ends, too, and holds nothing.
    encoding = asyncio.create_task(encoder.post("/encode", part(url_of(**IMAGE), name="b")))
    await until(lambda: encoder.desk.num_leased)
    assert (await encoder.post(path, {"req_id": "b_local_part_0", "part_idx": 0}))[0] == 501
    assert (await encoding)[0] == 501
    await encoder.is_quiet()
    with pytest.raises(ValueError, match="mooncake"):
        await open_encoder(transfer_backend="mooncake")


async def test_limits_are_told_with_503(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(max_parts=1, max_waiting=1)
    first = asyncio.create_task(encoder.post("/encode", part(url_of(wait="gate", **IMAGE))))
    await until(lambda: encoder.desk.sources)
    async with encoder.session.post(encoder.url + "/encode", json=part(url_of(**IMAGE), name="b")) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    early = asyncio.create_task(encoder.post("/scheduler_receive_url", registration(receivers[0], name="c")))
    await until(lambda: encoder.dialect.gauges()["waiting_receivers"])
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[0], name="d")))[0] == 503
    for task in (first, early):
        task.cancel()
    await asyncio.gather(first, early, return_exceptions=True)
    await encoder.is_quiet()


async def test_only_networks_that_are_allowed(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(receiver_networks=("10.0.0.0/8", "fd00::/8"))
    status, answer = await encoder.post("/scheduler_receive_url", registration(receivers[0]))
    assert status == 400
    assert 'receive_url is "127.0.0.1", allowed is an address of the networks' in answer["message"]
    assert "10.0.0.0/8, fd00::/8 (receiver_networks)" in answer["message"]
    call = part(url_of(**IMAGE), embedding_port=5000, prefill_host="localhost")
    status, answer = await encoder.post("/encode", call)
    assert status == 400
    assert 'prefill_host is "localhost", allowed is an address' in answer["message"]


async def test_little_is_echoed_of_whatever_is_sent(open_encoder: Opener) -> None:
    encoder = await open_encoder()
    for name in ("req_id", "num_parts", "modality", "mm_items", "embedding_port", "prefill_host", "hashes"):
        change = {"embedding_port": 5000} | {name: {"x" * 9000: "y"} if name == "hashes" else "?" * 9000}
        async with encoder.session.post(encoder.url + "/encode", json=part([url_of(**IMAGE)]) | change) as response:
            assert response.status == 400
            assert len(await response.read()) < 1000


async def test_a_model_without_the_tower(open_encoder: Opener) -> None:
    encoder = await open_encoder(FakeDesk(modalities=(Modality.IMAGE,)))
    status, answer = await encoder.post("/encode", part(url_of(rows=5), modality="AUDIO"))
    assert status == 400
    assert "modality is AUDIO, allowed is what this model encodes: IMAGE" in answer["message"]


async def test_large_bodies_pass_the_framework(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    call = json.dumps(part(url_of(**IMAGE, padding="x" * 4_000_000), embedding_port=receivers[0].port))
    async with encoder.session.post(encoder.url + "/encode", data=io.BytesIO(call.encode())) as response:
        assert response.status == 200
    assert (await receivers[0].receive()).header.grid == ((1, 4, 6),)


@pytest.mark.parametrize("room", [0, 1 << 20])
async def test_rows_that_nobody_fetches_leave_the_arena(
    open_encoder: Opener, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("encoder.sglang.dialect._PATIENCE_S", 0.05)
    encoder = await open_encoder(max_copied_bytes=room)
    encoding = asyncio.create_task(encoder.post("/encode", part(url_of(**IMAGE))))
    await until(lambda: encoder.desk.num_encoded)
    assert encoder.desk.num_leased == 1
    await asyncio.sleep(0.2)
    assert encoder.desk.num_leased == (0 if room else 1)
    for receiver in receivers:
        assert (await encoder.post("/scheduler_receive_url", registration(receiver, count=2)))[0] == 200
        assert (await receiver.receive()).rows == expected_rows(IMAGE, num_rows=[6])
    assert (await encoding)[0] == 200
    await encoder.is_quiet()
    assert encoder.dialect._num_copied_bytes == 0


async def test_an_encoder_that_leaves_takes_no_new_parts(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    begun = asyncio.create_task(encoder.post("/encode", part(url_of(**IMAGE))))
    await until(lambda: encoder.desk.num_leased)
    await encoder.dialect.withdraw()
    status, answer = await encoder.post("/encode", part(url_of(**IMAGE), name="b"))
    assert status == 503
    assert "being stopped" in answer["message"]
    # What was begun is brought to its end.
    assert (await encoder.post("/scheduler_receive_url", registration(receivers[0])))[0] == 200
    assert (await begun)[0] == 200


async def test_receivers_may_be_named(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder(connect_timeout_s=5.0)
    call = part(url_of(**IMAGE), embedding_port=receivers[0].port, prefill_host="localhost")
    assert (await encoder.post("/encode", call))[0] in (200, 504)
    call = part(url_of(**IMAGE), name="b", embedding_port=receivers[0].port, prefill_host="no-such-host.invalid")
    status, answer = await encoder.post("/encode", call)
    assert status == 504
    assert "does not resolve" in answer["message"]
    await encoder.is_quiet()


async def test_many_items_go_in_turns(open_encoder: Opener, receivers: list[Receiver]) -> None:
    encoder = await open_encoder()
    call = part([url_of(**OTHER, number=i) for i in range(300)], embedding_port=receivers[0].port)
    assert (await encoder.post("/encode", call))[0] == 200
    assert (await receivers[0].receive()).header.shape == (300, 8)
    await encoder.is_quiet()


async def test_health_is_quick_and_honest(open_encoder: Opener) -> None:
    encoder = await open_encoder()
    async with encoder.session.get(encoder.url + "/health_generate") as response:
        assert response.status == 200


async def test_forgetting(open_encoder: Opener, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of parts that ended goes after the time in which anybody may still ask."""
    monkeypatch.setattr("encoder.sglang.dialect._SWEEP_PERIOD_S", 0.02)
    encoder = await open_encoder(send_timeout_s=0.2)
    assert (await encoded(encoder, part(url_of(**IMAGE)), receivers[0]))[0] == 200
    assert encoder.dialect.gauges()["ended_parts"] == 1
    await asyncio.sleep(0.4)
    assert encoder.dialect.gauges()["ended_parts"] == 0


async def test_gadgets_to_the_http_port_do_nothing(open_encoder: Opener, tmp_path: Path) -> None:
    """The one port that this side opens takes JSON; a pickle is refused as what it is."""
    encoder = await open_encoder()
    gadget = f"cos\nsystem\n(S'touch {tmp_path}/gadget'\ntR.".encode()
    for path in ("/encode", "/scheduler_receive_url", "/send", "/scheduler_receive_meta_data"):
        for content_type in ("application/json", "application/octet-stream", "application/python-pickle"):
            async with encoder.session.post(
                encoder.url + path, data=gadget, headers={"Content-Type": content_type}
            ) as response:
                assert response.status == 422
    reader, writer = await asyncio.open_connection("127.0.0.1", encoder.port)
    writer.write(gadget + b"\n\n")
    assert (await reader.read()).startswith((b"", b"HTTP/1.0 400", b"HTTP/1.1 400"))
    writer.close()
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240
