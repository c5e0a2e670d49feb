"""POST /v1/encode over a real encoder: the rows, the forms of an answer, and what goes wrong."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load

from encoder.config import EncoderConfig
from encoder.front.config import FrontConfig
from encoder.local import LocalEncoder
from encoder.server import EncoderServer
from encoder.sglang.config import SglangConfig
from preprocess.config import FetchLimits
from preprocess.types import MediaOptions, Modality
from tests.fakes.encoder_peer import until
from tests.fakes.front import fronted, part, rows_of
from tests.fakes.media_server import media_server

Bytes = Callable[..., bytes]


@pytest.fixture
def media(make_png: Bytes, make_wav: Bytes, make_mp4: Bytes) -> dict[Modality, bytes]:
    return {
        Modality.IMAGE: make_png(1),
        Modality.VIDEO: make_mp4(2, with_audio=True),
        Modality.AUDIO: make_wav(3),
    }


async def test_rows_are_those_of_local_encoding_and_everything_is_said_of_them(
    tiny_model_dir: Path, media: dict[Modality, bytes]
) -> None:
    local = LocalEncoder(tiny_model_dir)
    async with fronted(tiny_model_dir) as parts:
        items = [part(content, modality) for modality, content in media.items()]
        items[1]["fps"] = 2
        status, answer = await parts.encode(*items, model="tiny")
        assert status == 200
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        for item, (modality, content) in zip(answer["data"], media.items(), strict=True):
            options = MediaOptions(fps=2) if modality is Modality.VIDEO else MediaOptions()
            expected = local.encode(content, modality, options)
            assert np.array_equal(rows_of(item), expected.rows)
            assert item["key"] == expected.key
            assert item["modality"] == modality
            layout = expected.layout
            assert item["grid_thw"] == (list(layout.grid_thw) if layout.grid_thw else None)
            assert item["timestamps_s"] == list(layout.timestamps_s)
            assert item["num_audio_rows"] == layout.num_audio_rows
            assert item["warnings"] == list(expected.warnings)
            assert (item["dtype"], item["cached"]) == ("float32", False)
            assert item["timings"]["tower_s"] > 0
        _, again = await parts.encode(*items)
        assert [item["cached"] for item in again["data"]] == [True] * 3
        assert [item["embedding"] for item in again["data"]] == [item["embedding"] for item in answer["data"]]
        await parts.until_idle()
    local.close()


async def test_numbers_and_safetensors_carry_the_same_values(
    tiny_model_dir: Path, media: dict[Modality, bytes]
) -> None:
    async with fronted(tiny_model_dir) as parts:
        items = [part(media[Modality.IMAGE]), {"type": "image_url"}, part(media[Modality.AUDIO], "audio")]
        _, plain = await parts.encode(*items)
        _, numbers = await parts.encode(*items, encoding_format="float")
        headers = {"Accept": "application/x-safetensors"}
        async with parts.http.post("/v1/encode", json={"input": items}, headers=headers) as response:
            assert response.content_type == "application/x-safetensors"
            raw = await response.read()
        tensors = load(raw)
        assert tensors.keys() == {"0", "2"}
        for index in (0, 2):
            rows = rows_of(plain["data"][index])
            assert np.array_equal(np.array(numbers["data"][index]["embedding"], np.float32), rows)
            assert np.array_equal(tensors[str(index)], rows)
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert (8 + int.from_bytes(raw[:8], "little")) % 8 == 0
        known = {name: json.loads(text) for name, text in header["__metadata__"].items()}
        assert known["0"]["key"] == plain["data"][0]["key"]
        assert known["1"]["status"] == 400
        await parts.until_idle()


async def test_numbers_in_a_file_of_tensors_are_refused(tiny_model_dir: Path, make_png: Bytes) -> None:
    async with fronted(tiny_model_dir) as parts:
        body = {"input": [part(make_png(1))], "encoding_format": "float"}
        for accept, status in [("Application/X-Safetensors", 400), ("*/*, application/x-safetensors;q=0", 200)]:
            async with parts.http.post("/v1/encode", json=body, headers={"Accept": accept}) as response:
                assert (response.status, response.content_type) == (status, "application/json")
                if status == 400:
                    error = (await response.json())["error"]
                    assert error["param"] == "encoding_format"
                    assert "encoding_format" in error["message"]
                    assert "Accept" in error["message"]


@pytest.mark.parametrize("pixels", [0, 2**30])
@pytest.mark.parametrize("option", ["min_pixels", "max_pixels"])
async def test_either_side_of_a_limit_is_the_same_fault(
    tiny_model_dir: Path, make_png: Bytes, option: str, pixels: int
) -> None:
    async with fronted(tiny_model_dir) as parts:
        status, answer = await parts.encode(part(make_png(1), **{option: pixels}))
        place = f"input[0].image_url.{option}"
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_request", place)
        assert answer["error"]["message"].startswith(f"{place} is {pixels}, allowed is at ")


async def test_little_is_echoed_of_whatever_is_sent(tiny_model_dir: Path, make_png: Bytes) -> None:
    async with fronted(tiny_model_dir) as parts:
        url = part(make_png(1))["image_url"]["url"]
        video = json.dumps({"input": [{"type": "video_url", "video_url": {"url": url}, "fps": 0.125}]})
        bodies = [video.replace("0.125", "9" * num_digits) for num_digits in (300, 5000)]
        bodies += [json.dumps({"input": [{"type": "image_url", "x" * 9000: 1}]}), json.dumps({"x" * 9000: 1})]
        bodies += [json.dumps({"input": [], "model": "m" * 9000}), json.dumps({"input": [{"type": "t" * 9000}]})]
        for body in bodies:
            headers = {"Content-Type": "application/json"}
            async with parts.http.post("/v1/encode", data=body, headers=headers) as response:
                assert response.status == 400
                assert len(await response.read()) < 1000
        async with parts.http.get("/" + "x" * 5000) as response:
            assert response.status == 404
            assert len(await response.read()) < 1000


async def test_bfloat16_rows_keep_their_bits_in_every_form(tiny_model_dir: Path, make_png: Bytes) -> None:
    config = EncoderConfig(arena_bytes=2**22, dtype="bfloat16")
    async with fronted(tiny_model_dir, encoder=config) as parts:
        item = part(make_png(1))
        _, plain = await parts.encode(item)
        _, numbers = await parts.encode(item, encoding_format="float")
        bits = np.frombuffer(base64.b64decode(plain["data"][0]["embedding"]), np.uint16)
        floats = np.array(numbers["data"][0]["embedding"], np.float32)
        assert plain["data"][0]["dtype"] == "bfloat16"
        assert np.array_equal(floats.view(np.uint32) >> 16, bits.reshape(floats.shape))
        headers = {"Accept": "application/x-safetensors"}
        async with parts.http.post("/v1/encode", json={"input": [item]}, headers=headers) as response:
            raw = await response.read()
        assert raw.endswith(bits.tobytes())
        assert b'"BF16"' in raw


async def test_uploads_are_encoded_like_the_same_bytes_by_url(
    tiny_model_dir: Path, media: dict[Modality, bytes]
) -> None:
    async with fronted(tiny_model_dir) as parts:
        expected_items = [part(content, modality) for modality, content in media.items()]
        expected_items[1]["fps"] = 2
        _, expected = await parts.encode(*expected_items)
        form = aiohttp.FormData()
        form.add_field("fps", "2")
        form.add_field("image", media[Modality.IMAGE], filename="a")
        form.add_field("anything", media[Modality.VIDEO], filename="b", content_type="video/mp4")
        form.add_field("audio", media[Modality.AUDIO], filename="c")
        async with parts.http.post("/v1/encode", data=form) as response:
            assert response.status == 200
            answer = await response.json()
        assert [item["key"] for item in answer["data"]] == [item["key"] for item in expected["data"]]
        assert [item["embedding"] for item in answer["data"]] == [item["embedding"] for item in expected["data"]]
        await parts.until_idle()


def form_of(*fields: tuple[str, bytes, str | None, str]) -> aiohttp.FormData:
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value, filename, kind in fields:
        form.add_field(name, value if filename else value.decode(), filename=filename, content_type=kind)
    return form


PICTURE = ("image", b"no picture", "a.png", "image/png")


@pytest.mark.parametrize(
    ("form", "status", "param", "words"),
    [
        (form_of(("model", b"tiny", None, "text/plain")), 400, None, "the form has no file"),
        (form_of(PICTURE), 422, "image[0]", ""),
        (form_of(PICTURE, ("size", b"3", None, "text/plain")), 400, "size", 'unknown field "size"; allowed: files as'),
        (
            form_of(PICTURE, ("fps", b"3", None, "text/plain")),
            400,
            "fps",
            "fps is an option of video; there is no such",
        ),
        (form_of(PICTURE, ("max_pixels", b"x", None, "text/plain")), 400, "max_pixels", "it must be an integer"),
        (form_of(PICTURE, ("max_pixels", b"9", None, "text/plain")), 400, "max_pixels", "allowed is at least 1024"),
        (form_of(PICTURE, ("model", b"other", None, "text/plain")), 404, "model", 'model "other" is not served here'),
        (form_of(("f", b"abc", "a", "text/plain")), 400, "f", "allowed: image/*, video/*, audio/*"),
    ],
)
async def test_what_is_wrong_with_a_form_is_named(
    tiny_model_dir: Path, form: aiohttp.FormData, status: int, param: str | None, words: str
) -> None:
    async with fronted(tiny_model_dir) as parts, parts.http.post("/v1/encode", data=form) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (status, param)
        assert words in error["message"]


async def test_one_bad_item_fails_alone_and_in_its_place(tiny_model_dir: Path, make_png: Bytes) -> None:
    async with fronted(tiny_model_dir) as parts:
        good = part(make_png(1))
        bad = [part(b"no picture"), {"type": "image_url", "image_url": {"url": "ftp://a/b"}}, {"type": "text"}]
        too_wide = part(make_png(2), max_pixels=2**30)
        status, answer = await parts.encode(bad[0], good, bad[1], bad[2], too_wide, good)
        assert status == 200
        kinds = [item["object"] for item in answer["data"]]
        assert kinds == ["error", "embedding", "error", "error", "error", "embedding"]
        failed = [item for item in answer["data"] if item["object"] == "error"]
        assert [item["status"] for item in failed] == [422, 400, 400, 400]
        assert [item["error"]["param"] for item in failed] == [
            "input[0].image_url",
            "input[2].image_url",
            "input[3].type",
            "input[4].image_url.max_pixels",
        ]
        assert "allowed is at most 262144" in failed[3]["error"]["message"]
        await parts.until_idle()


async def test_when_all_fail_the_status_is_theirs(tiny_model_dir: Path) -> None:
    async with fronted(tiny_model_dir) as parts:
        status, answer = await parts.encode(part(b"no picture"))
        assert (status, answer["error"]["param"]) == (422, "input[0].image_url")
        assert "data" not in answer
        status, answer = await parts.encode({"type": "image_url"}, part(b"no picture"))
        assert (status, answer["error"]["param"]) == (400, "input[0].image_url")
        assert [item["status"] for item in answer["data"]] == [400, 422]


async def test_media_are_fetched_once_for_many_who_ask_together(tiny_model_dir: Path, make_png: Bytes) -> None:
    picture = make_png(1)
    async with media_server() as site:

        @site.script("/a.png")
        async def _(call: Any) -> None:
            await asyncio.sleep(0.2)
            await call.answer(picture)

        async with fronted(tiny_model_dir, fetch=FetchLimits(allow_private_addresses=True)) as parts:
            item = {"type": "image_url", "image_url": {"url": site.url("/a.png")}}
            answers = await asyncio.gather(*(parts.encode(item) for _ in range(50)))
            assert {status for status, _ in answers} == {200}
            assert len({answer["data"][0]["embedding"] for _, answer in answers}) == 1
            assert site.hits["/a.png"] == 1
            assert parts.server.info().counters["batch_jobs"] == 1
            assert await parts.metric('mimo_encoder_media_total{modality="image",outcome="encoded"}') >= 1
            await parts.until_idle()


@pytest.mark.parametrize("while_it", ["is fetched", "is encoded"])
async def test_whoever_asked_first_may_leave_while_others_wait(
    tiny_model_dir: Path, make_png: Bytes, while_it: str
) -> None:
    picture = make_png(1)
    async with media_server() as site:

        @site.script("/a.png")
        async def _(call: Any) -> None:
            await site.gate.wait()
            await call.answer(picture)

        fetch = FetchLimits(allow_private_addresses=True)
        async with fronted(tiny_model_dir, fetch=fetch) as parts:
            tower_is_free = threading.Event()
            parts.server._runner._thread.submit(tower_is_free.wait)
            item = {"type": "image_url", "image_url": {"url": site.url("/a.png")}}
            first = asyncio.create_task(parts.encode(item))
            await until(lambda: site.hits["/a.png"] == 1)
            others = [asyncio.create_task(parts.encode(item)) for _ in range(49)]
            await until(lambda: parts.front.desk.num_inflight == 50)
            if while_it == "is encoded":
                site.gate.set()
                await until(lambda: parts.server.info().num_pending == 50)
            first.cancel()
            await until(lambda: parts.front.desk.num_inflight == 49)
            site.gate.set()
            tower_is_free.set()
            answers = await asyncio.gather(*others)
            assert {status for status, _ in answers} == {200}
            assert len({answer["data"][0]["embedding"] for _, answer in answers}) == 1
            assert site.hits["/a.png"] == 1
            assert parts.server.info().counters["batch_jobs"] == 1
            await parts.until_idle()


async def test_a_client_that_leaves_takes_everything_it_asked_for_along(tiny_model_dir: Path) -> None:
    fetch = FetchLimits(allow_private_addresses=True)
    async with media_server() as site, fronted(tiny_model_dir, fetch=fetch) as parts:
        item = {"type": "image_url", "image_url": {"url": site.url("/gated")}}
        asking = [asyncio.create_task(parts.encode(item, item)) for _ in range(20)]
        await until(lambda: parts.front.desk.num_inflight == 40)
        assert await parts.metric("mimo_encoder_inflight_media") == 40
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await parts.until_idle()
        await until(lambda: site.num_open == 0 or not site.gate.is_set())
        assert await parts.metric("mimo_encoder_inflight_media") == 0
        assert await parts.metric("mimo_encoder_http_inflight_requests") == 0
        assert await parts.metric('mimo_encoder_media_total{modality="image",outcome="cancelled"}') == 40
        site.gate.set()


async def test_more_media_than_allowed_are_told_to_come_back(tiny_model_dir: Path, make_png: Bytes) -> None:
    async with media_server() as site:
        fetch = FetchLimits(allow_private_addresses=True)
        async with fronted(tiny_model_dir, fetch=fetch, max_inflight=2, max_items=2) as parts:
            item = {"type": "image_url", "image_url": {"url": site.url("/gated")}}
            asking = asyncio.create_task(parts.encode(item))
            await until(lambda: parts.front.desk.num_inflight == 1)
            body = {"input": [part(make_png(1)), part(make_png(2))]}
            async with parts.http.post("/v1/encode", json=body) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "encoder_busy"
            assert (await parts.encode(part(make_png(1))))[0] == 200
            site.gate.set()
            assert (await asking)[0] == 422
            await parts.until_idle()


async def test_a_request_ends_at_its_deadline(tiny_model_dir: Path) -> None:
    async with media_server() as site:
        fetch = FetchLimits(allow_private_addresses=True)
        async with fronted(tiny_model_dir, fetch=fetch, request_timeout_s=0.3) as parts:
            status, answer = await parts.encode({"type": "image_url", "image_url": {"url": site.url("/gated")}})
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
            await parts.until_idle()
            site.gate.set()


async def test_keys_are_asked_for_and_probes_need_none(tiny_model_dir: Path, make_png: Bytes) -> None:
    async with fronted(tiny_model_dir, api_keys=("right", "also")) as parts:
        body = {"input": [part(make_png(1))]}
        for headers, status in [
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer also"}, 200),
        ]:
            async with parts.http.post("/v1/encode", json=body, headers=headers) as response:
                assert response.status == status
        for path, status in [("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/nothing", 401)]:
            async with parts.http.get(path) as response:
                assert response.status == status


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"{", {}, 400, "the body is not JSON"),
        (b'{"input": [NaN]}', {}, 400, "the body is not JSON"),
        (b"[" * 100_000, {}, 400, "nested far too deeply"),
        (b'{"input": ["\xff"]}', {}, 400, "UTF-8"),
        (b"[" + b"1," * 100_001 + b"1]", {}, 400, "commas"),
        (b" " * 5000, {}, 413, "4096 bytes"),
        (
            b"{}",
            {"Content-Type": "text/plain"},
            415,
            "Content-Type is text/plain; allowed: application/json, multipart",
        ),
        (b"{}", {"Content-Encoding": "gzip"}, 415, "Content-Encoding is gzip; allowed: identity"),
        (b"--x--", {"Content-Type": "multipart/form-data"}, 400, "the body is no form"),
        (b"nothing", {"Content-Type": "multipart/form-data; boundary=x"}, 400, "the body is no form"),
    ],
)
async def test_bodies_that_are_none(
    tiny_model_dir: Path, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    limit = 4096 if status == 413 else 2**20
    async with fronted(tiny_model_dir, max_body_bytes=limit) as parts:
        sent = {"Content-Type": "application/json"} | headers
        async with parts.http.post("/v1/encode", data=body, headers=sent) as response:
            error = (await response.json())["error"]
            assert response.status == status
            assert words in error["message"]


async def test_a_body_that_comes_in_pieces_is_cut_off_at_the_limit(tiny_model_dir: Path) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1024

    async with fronted(tiny_model_dir, max_body_bytes=2**14) as parts:
        headers = {"Content-Type": "application/json"}
        async with parts.http.post("/v1/encode", data=endless(), headers=headers) as response:
            assert response.status == 413


async def test_a_client_that_stops_sending_is_told_so(tiny_model_dir: Path) -> None:
    async def stalled() -> Any:
        yield b"{"
        await asyncio.sleep(30)

    async with fronted(tiny_model_dir, body_timeout_s=0.2) as parts:
        headers = {"Content-Type": "application/json"}
        async with parts.http.post("/v1/encode", data=stalled(), headers=headers) as response:
            assert response.status == 408
            message = (await response.json())["error"]["message"]
            assert "nothing of the body came for 0.2 s (front.body_timeout_s); 1 bytes" in message


@pytest.mark.parametrize("path", ["/v1/encode", "/encode"])
@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x"])
async def test_a_client_that_sends_steadily_may_be_slow(tiny_model_dir: Path, path: str, content_type: str) -> None:
    async def steady() -> Any:
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        for _ in range(12):
            yield b" " * 100
            await asyncio.sleep(0.05)
        yield b"\r\n--x--\r\n"

    async def sent(least: float) -> tuple[int, str]:
        settings: dict[str, Any] = {"body_timeout_s": 0.2, "min_body_rate_bytes_s": least}
        async with (
            fronted(tiny_model_dir, sglang=SglangConfig(), **settings) as parts,
            parts.http.post(path, data=steady(), headers={"Content-Type": content_type}) as response,
        ):
            return response.status, await response.text()

    # The body is read to its end, and makes no sense.
    assert (await sent(500.0))[0] in (400, 415, 422)
    status, text = await sent(20_000.0)
    assert status == 408
    assert "less than 20000 bytes/s on average after 0.2 s (front.min_body_rate_bytes_s)" in text


def test_a_thin_line_is_fast_enough(tiny_model_dir: Path) -> None:
    """Of 1 Mbit/s, and a good deal thinner."""
    assert FrontConfig(model_dir=tiny_model_dir, model_name="m").min_body_rate_bytes_s <= 125_000 / 10


async def test_request_ids_routes_and_methods(tiny_model_dir: Path) -> None:
    async with fronted(tiny_model_dir) as parts:
        async with parts.http.get("/v1/models", headers={"X-Request-Id": "mine-7"}) as response:
            assert response.headers["X-Request-Id"] == "mine-7"
            card = (await response.json())["data"][0]
            assert (card["id"], card["width"], card["modalities"]) == ("tiny", 192, ["image", "video", "audio"])
        async with parts.http.get("/v1/encode", headers={"X-Request-Id": "bad id"}) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert response.headers["X-Request-Id"].startswith("req-")
        async with parts.http.get("/nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_route")


async def test_no_replica_is_503_after_a_while_and_health_names_it(tiny_model_dir: Path, make_png: Bytes) -> None:
    async with fronted(tiny_model_dir, restart_wait_s=0.1) as parts:
        server: EncoderServer = parts.server
        server._draining = True  # what a replica says of itself that goes away
        await until(lambda: not any(parts.client.infos().values()))
        status, answer = await parts.encode(part(make_png(1)))
        assert (status, answer["error"]["code"]) == (503, "encoder_unavailable")
        await until(lambda: parts.front.board.health().status == 503)
        async with parts.http.get("/health") as response:
            assert response.status == 503
            assert (await response.json())["replicas"] == {"e0": "not up"}
        server._draining = False
