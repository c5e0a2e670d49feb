"""The forms of an answer, on rows of many pieces; and what a client that does not read can hold up."""

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from encoder.front import reply
from encoder.front.desk import Encoding
from encoder.front.problems import Problem
from encoder.front.reply import all_failed, safetensors_head, write_json, write_rows
from encoder.types import StageTimings
from preprocess.types import MediaKey, MediaLayout, Modality
from tests.fakes.encoder_peer import until
from tests.fakes.front import Fronted, fronted, part, rows_of


class Written:
    """Collects what is written."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def write(self, piece: bytes) -> None:
        self.pieces.append(piece)

    @property
    def whole(self) -> bytes:
        return b"".join(self.pieces)


def encoding(num_rows: int, width: int, released: list[int] | None = None) -> Encoding:
    rows = np.random.default_rng(num_rows).standard_normal((num_rows, width)).astype(np.float32)
    return Encoding(
        key=MediaKey("k"),
        layout=MediaLayout(Modality.IMAGE, grid_thw=(1, 2, 2 * num_rows)),
        dtype="float32",
        num_rows=num_rows,
        width=width,
        cached=False,
        warnings=(),
        timings=StageTimings(),
        fetch_s=0.0,
        rows=memoryview(rows.tobytes()),
        _end=lambda: None if released is None else released.append(num_rows),
    )


def values_of(item: Encoding) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return np.frombuffer(item.rows, np.float32).reshape(item.num_rows, item.width)


PROBLEM = Problem(422, "media_undecodable", "no picture", "input[1]")


async def written_json(results: Sequence[Encoding | Problem], form: Any) -> tuple[Any, list[bytes]]:
    response = Written()
    await write_json(response, results, model="m", encoding_format=form)  # type: ignore[arg-type]
    return json.loads(response.whole), response.pieces


@pytest.mark.parametrize("num_rows", [1, 700, 2048, 3001])
async def test_pieces_join_to_the_whole(num_rows: int) -> None:
    results = [encoding(num_rows, 192), PROBLEM, encoding(3, 192)]
    expected = [values_of(result) for result in results if isinstance(result, Encoding)]
    body, pieces = await written_json(results, "base64")
    assert max(map(len, pieces)) <= 2**20
    assert [item["object"] for item in body["data"]] == ["embedding", "error", "embedding"]
    for index, values in zip((0, 2), expected, strict=True):
        assert np.array_equal(rows_of(body["data"][index]), values)
    body, _ = await written_json([encoding(num_rows, 192), PROBLEM, encoding(3, 192)], "float")
    for index, values in zip((0, 2), expected, strict=True):
        assert np.array_equal(np.array(body["data"][index]["embedding"], np.float32), values)


async def test_a_file_is_as_long_as_it_says() -> None:
    results = [encoding(2048, 192), PROBLEM, encoding(3, 192)]
    head, size_bytes = safetensors_head(results, model="m")
    response = Written()
    await write_rows(response, results)  # type: ignore[arg-type]
    raw = head + response.whole
    assert len(raw) == size_bytes
    tensors = load(raw)
    assert np.array_equal(tensors["0"], values_of(results[0]))  # type: ignore[arg-type]
    assert np.array_equal(tensors["2"], values_of(results[2]))  # type: ignore[arg-type]


async def test_an_item_is_let_go_as_soon_as_it_is_written() -> None:
    released: list[int] = []
    results = [encoding(1, 4, released), encoding(2, 4, released)]
    seen: list[list[int]] = []

    class Watching(Written):
        async def write(self, piece: bytes) -> None:
            seen.append(list(released))

    await write_json(Watching(), results, model="m", encoding_format="base64")  # type: ignore[arg-type]
    assert released == [1, 2]
    assert [1] in seen


def test_what_may_be_tried_again_is_told_before_what_may_not() -> None:
    busy = Problem(503, "encoder_busy", "full", "input[1]", retry_after_s=3.0)
    response = all_failed([PROBLEM, busy])
    assert (response.status, response.headers["Retry-After"]) == (503, "3")
    assert isinstance(response.body, bytes)
    body = json.loads(response.body)
    assert body["error"]["code"] == "encoder_busy"
    assert [item["status"] for item in body["data"]] == [422, 503]


def test_base64_of_pieces_is_base64_of_the_whole() -> None:
    assert reply._PIECE_BYTES % 3 == 0
    raw = bytes(range(256)) * 40
    joined = b"".join(base64.b64encode(raw[start : start + 3 * 7]) for start in range(0, len(raw), 3 * 7))
    assert joined == base64.b64encode(raw)


async def test_rows_that_are_not_copied_stay_leased_until_they_are_sent(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    item = part(make_png(1))
    async with fronted(tiny_model_dir) as parts:
        _, copied = await parts.encode(item, item)
    async with fronted(tiny_model_dir, max_reply_bytes=0) as parts:
        status, answer = await parts.encode(item, item)
        assert status == 200
        assert [item["embedding"] for item in answer["data"]] == [item["embedding"] for item in copied["data"]]
        await parts.until_idle()


@asynccontextmanager
async def half_answered(
    model_dir: Path, picture: bytes, request_timeout_s: float
) -> AsyncIterator[tuple[Fronted, socket.socket]]:
    """A client that asked for more than its socket holds and does not read. Of the rows some are copies, the others lie
    in the arena."""
    async with fronted(model_dir, max_reply_bytes=2**20, request_timeout_s=request_timeout_s) as parts:
        assert (await parts.encode(part(picture)))[0] == 200
        body = json.dumps({"input": [part(picture)] * 30, "encoding_format": "float"}).encode()
        lines = ["POST /v1/encode HTTP/1.1", "Host: a", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, ("127.0.0.1", parts.front.port))
            await loop.sock_sendall(connection, head.encode() + body)
            await loop.sock_recv(connection, 1)
            assert parts.server.info().leased_bytes > 0
            yield parts, connection
        assert parts.front._front._endpoint._copied_bytes == 0


async def test_a_client_that_does_not_read_is_cut_off_at_the_deadline(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with half_answered(tiny_model_dir, make_png(1, 512, 512), 3.0) as (parts, connection):
        await until(lambda: parts.front._front.admission.num_inflight == 0)
        await parts.until_idle()
        raw = b""
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
                raw += piece
        # What was cut off does not look whole.
        assert not raw.endswith(b"0\r\n\r\n")


async def test_a_client_that_leaves_in_the_middle_of_its_answer_holds_nothing(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with half_answered(tiny_model_dir, make_png(1, 512, 512), 300.0) as (parts, connection):
        connection.close()
        await until(lambda: parts.front._front.admission.num_inflight == 0)
        await parts.until_idle()
