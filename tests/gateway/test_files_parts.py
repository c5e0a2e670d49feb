"""Files in the parts of a conversation: uploaded ones by id, and inline. What they are is seen in their bytes."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preprocess.types import Modality
from tests.fakes.clips import make_video
from tests.fakes.gateway import Stack, running_gateway

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
WAV = b"RIFF\x24\0\0\0WAVEfmt " + bytes(100)
CLIP = make_video(4)
PATH = "messages[0].content[0]"


@asynccontextmanager
async def gateway(tmp_path: Path, **settings: Any) -> AsyncIterator[Stack]:
    async with running_gateway(files_dir=tmp_path / "files", **settings) as stack:
        yield stack


async def upload(stack: Stack, content: bytes, headers: Any = None) -> str:
    form = aiohttp.FormData({"purpose": "user_data"})
    form.add_field("file", content, filename="name.txt")
    async with stack.session.post("/v1/files", data=form, headers=headers) as response:
        file_id: str = (await response.json())["id"]
        return file_id


def by_id(file_id: str, **options: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": file_id}, **options}


def inline(content: bytes, *, head: str = "data:application/pdf;base64,", **options: Any) -> dict[str, Any]:
    data = head + base64.b64encode(content).decode()
    return {"type": "file", "file": {"file_data": data, "filename": "../../name.pdf"}, **options}


def encoded(stack: Stack) -> list[tuple[bytes, Modality]]:
    return [(content, modality) for content, modality, _ in stack.encoder.asked]


@pytest.mark.parametrize(
    ("content", "modality"), [(PNG, Modality.IMAGE), (WAV, Modality.AUDIO), (CLIP, Modality.VIDEO)]
)
async def test_a_file_is_what_its_bytes_say(tmp_path: Path, content: bytes, modality: Modality) -> None:
    async with gateway(tmp_path) as stack:
        parts = [by_id(await upload(stack, content)), inline(content), inline(content, head="")]
        status, answer, _ = await stack.ask(parts)
        assert status == 200, answer
        assert encoded(stack) == [(content, modality)] * 3
        assert answer["usage"]["prompt_tokens_details"][f"{modality}_tokens"] > 0


@pytest.mark.parametrize(
    ("kind", "modality"), [("image", Modality.IMAGE), ("video", Modality.VIDEO), ("audio", Modality.AUDIO)]
)
async def test_an_id_in_place_of_a_url_is_used_as_the_part_says(tmp_path: Path, kind: str, modality: Modality) -> None:
    async with gateway(tmp_path) as stack:
        file_id = await upload(stack, PNG)
        status, answer, _ = await stack.ask([{"type": f"{kind}_url", f"{kind}_url": {"file_id": file_id}}])
        assert status == 200, answer
        assert encoded(stack) == [(PNG, modality)]


async def test_options_are_those_of_urls(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        picture, clip = await upload(stack, PNG), await upload(stack, CLIP)
        status, answer, _ = await stack.ask(
            [
                by_id(picture, detail="low"),
                by_id(clip, fps=1.5, media_resolution="max"),
                {"type": "image_url", "image_url": {"file_id": picture, "max_pixels": 5000}},
            ]
        )
        assert status == 200, answer
        options = [asked[2] for asked in stack.encoder.asked]
        assert [(o.detail, o.fps, o.max_pixels) for o in options] == [
            ("low", None, None),
            (None, 1.5, None),
            (None, None, 5000),
        ]
        for part, field in ((by_id(picture, fps=2.0), "fps"), (by_id(clip, detail="low"), "detail")):
            status, answer, _ = await stack.ask([part])
            assert (status, answer["error"]["param"]) == (400, f"{PATH}.{field}")


NONE = "file-" + "0" * 32


@pytest.mark.parametrize(
    ("part", "status", "param", "words"),
    [
        (by_id(NONE), 404, f"{PATH}.file.file_id", NONE),
        (by_id("../../etc/passwd"), 404, f"{PATH}.file.file_id", "there is no file"),
        ({"type": "image_url", "image_url": {"file_id": NONE}}, 404, f"{PATH}.image_url.file_id", NONE),
        ({"type": "video_url", "video_url": {"file_id": NONE}}, 404, f"{PATH}.video_url.file_id", NONE),
        ({"type": "audio_url", "audio_url": {"file_id": NONE}}, 404, f"{PATH}.audio_url.file_id", NONE),
        (
            {"type": "image_url", "image_url": {"file_id": NONE, "url": "http://a/"}},
            400,
            f"{PATH}.image_url.file_id",
            "give one",
        ),
        ({"type": "image_url", "image_url": {}}, 400, f"{PATH}.image_url.url", "is required"),
        ({"type": "file", "file": {}}, 400, f"{PATH}.file", "are both absent; give one"),
        ({"type": "file", "file": {"file_id": NONE, "file_data": ""}}, 400, f"{PATH}.file", "are both given; give one"),
        ({"type": "file"}, 400, f"{PATH}.file", "is required"),
        ({"type": "file", "file": {"path": "/etc/passwd"}}, 400, f"{PATH}.file.path", "unknown field"),
        (inline(b"%PDF-1.7"), 415, f"{PATH}.file.file_data", "(PDF document) is no picture, video or sound"),
        (inline(b"hello"), 415, f"{PATH}.file.file_data", "(text) is no picture, video or sound"),
        (inline(b""), 415, f"{PATH}.file.file_data", "(empty file) is no picture"),
        (inline(PNG, head="data:;base64,&&&"), 400, f"{PATH}.file.file_data", "not base64"),
        (inline(PNG, head="file:///etc/passwd?"), 400, f"{PATH}.file.file_data", "allowed: base64, or a data: URL"),
        (inline(PNG, head="https://a/"), 400, f"{PATH}.file.file_data", "allowed: base64, or a data: URL"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, part: dict[str, Any], status: int, param: str, words: str
) -> None:
    async with gateway(tmp_path) as stack:
        found, answer, _ = await stack.ask([part])
        assert (found, answer["error"]["param"]) == (status, param), answer
        assert words in answer["error"]["message"]
        assert not stack.encoder.encoded


async def test_a_file_that_is_no_medium_says_so(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        file_id = await upload(stack, b"hello")
        status, answer, _ = await stack.ask([by_id(file_id)])
        assert (status, answer["error"]["param"]) == (415, f"{PATH}.file.file_id")
        assert "no picture, video or sound" in answer["error"]["message"]


async def test_another_key_s_file_is_no_file(tmp_path: Path) -> None:
    async with gateway(tmp_path, api_keys=("one", "two")) as stack:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        file_id = await upload(stack, PNG, one)
        body = {"model": "tiny", "messages": [{"role": "user", "content": [by_id(file_id)]}]}
        assert (await stack.post(body, headers=one))[0] == 200
        status, answer, _ = await stack.post(body, headers=two)
        assert (status, answer["error"]["code"]) == (404, "file_not_found")


async def test_limits_on_media_count_files(tmp_path: Path) -> None:
    async with gateway(tmp_path, max_media=2) as stack:
        status, answer, _ = await stack.ask([inline(PNG)] * 3)
        assert status == 400
        assert "allowed: at most 2" in answer["error"]["message"]


async def test_where_no_files_are_kept_ids_are_refused() -> None:
    async with running_gateway() as stack:
        status, answer, _ = await stack.ask([by_id(NONE)])
        assert (status, answer["error"]["param"]) == (400, f"{PATH}.file.file_id")
        assert "this server keeps none" in answer["error"]["message"]
