"""Items of `POST /v1/encode` that are files or names: content inline, keys without content, ids of uploaded files."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.front import fronted, part, rows_of

Bytes = Callable[..., bytes]
UNKNOWN = "0" * 32


def file(content: bytes, head: str = "data:text/html;base64,", **options: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": head + base64.b64encode(content).decode()}, **options}


async def test_a_file_is_what_its_bytes_say(
    tiny_model_dir: Path, make_png: Bytes, make_wav: Bytes, make_mp4: Bytes
) -> None:
    contents = {"image": make_png(1), "audio": make_wav(1), "video": make_mp4(1)}
    async with fronted(tiny_model_dir) as parts:
        _, told = await parts.encode(*(part(content, kind) for kind, content in contents.items()))
        status, answer = await parts.encode(*(file(content) for content in contents.values()))
        assert status == 200
        assert [item["modality"] for item in answer["data"]] == list(contents)
        assert [item["key"] for item in answer["data"]] == [item["key"] for item in told["data"]]
        _, answer = await parts.encode(file(contents["video"], head="", fps=2), file(contents["image"], fps=2))
        good, bad = answer["data"]
        assert good["modality"] == "video"
        assert (bad["status"], bad["error"]["param"]) == (400, "input[1].fps")
        await parts.until_idle()


async def test_a_key_brings_the_rows_without_content(tiny_model_dir: Path, make_png: Bytes) -> None:
    async with fronted(tiny_model_dir) as parts:
        _, told = await parts.encode(part(make_png(1), max_pixels=8192))
        first = told["data"][0]
        status, answer = await parts.encode({"type": "image_url", "key": first["key"]})
        assert status == 200
        assert answer["data"][0]["cached"] is True
        assert (rows_of(answer["data"][0]) == rows_of(first)).all()
        status, answer = await parts.encode(
            {"type": "image_url", "key": UNKNOWN},
            {"type": "audio_url", "key": first["key"]},
            {"type": "image_url", "key": first["key"], "max_pixels": 8192},
            part(make_png(1)) | {"key": first["key"]},
            part(make_png(1), max_pixels=8192) | {"key": first["key"]},
        )
        assert status == 200
        errors = [item.get("error", {}) for item in answer["data"]]
        assert [(error.get("code"), error.get("param")) for error in errors] == [
            ("unknown_media", "input[0].key"),
            ("invalid_request", "input[1].key"),
            ("invalid_request", "input[2].max_pixels"),
            ("invalid_request", "input[3].key"),
            (None, None),
        ]
        assert answer["data"][0]["status"] == 404
        assert UNKNOWN in errors[0]["message"]
        await parts.until_idle()


async def test_only_names_that_nobody_knows_are_a_404(tiny_model_dir: Path) -> None:
    async with fronted(tiny_model_dir) as parts:
        status, answer = await parts.encode({"type": "video_url", "key": UNKNOWN})
        assert (status, answer["error"]["code"]) == (404, "unknown_media")
        await parts.until_idle()


@pytest.mark.parametrize(
    ("given", "status", "param", "words"),
    [
        ({"type": "image_url", "image_url": {"file_id": "file-1"}}, 400, "image_url.file_id", "keeps none"),
        ({"type": "file", "file": {"file_id": "file-1"}}, 400, "file.file_id", "keeps none"),
        ({"type": "image_url", "image_url": {"file_id": "a", "url": "b"}}, 400, "image_url.file_id", "give one"),
        ({"type": "file"}, 400, "file", "is required"),
        ({"type": "file", "file": {}}, 400, "file", "are both absent"),
        ({"type": "file", "file": {"file_id": "a", "file_data": "b"}}, 400, "file", "are both given"),
        ({"type": "file", "file": {"file_data": "file:///etc/passwd"}}, 400, "file.file_data", "is a URL"),
        ({"type": "file", "file": {"file_data": 3}}, 400, "file.file_data", "it must be a string"),
        ({"type": "file", "file": {"name": "a"}}, 400, "file.name", "unknown field"),
        ({"type": "image_url", "key": "../etc"}, 400, "key", "32 hexadecimal digits"),
        ({"type": "image_url", "key": 3}, 400, "key", "it must be a string"),
        (file(b"hello"), 415, "file", "(text) is no picture, video or sound"),
        (file(b"%PDF-1.7"), 415, "file", "(PDF document)"),
    ],
)
async def test_what_cannot_be_is_refused(
    tiny_model_dir: Path, given: dict[str, Any], status: int, param: str, words: str
) -> None:
    async with fronted(tiny_model_dir) as parts:
        found, answer = await parts.encode(given)
        assert (found, answer["error"]["param"]) == (status, f"input[0].{param}"), answer
        assert words in answer["error"]["message"]
