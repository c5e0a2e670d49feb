"""Files, embeddings and names through a running service: sent once, used in every way there is."""

import io
import json
import urllib.request
from typing import Any

import pytest

from tests.e2e.service import KNOWN_ANSWERS, SAMPLES, Answer, Service, file_url, text_of

pytestmark = pytest.mark.e2e

PICTURE = KNOWN_ANSWERS["picture.png"]
QUESTION = {"type": "text", "text": PICTURE.question}


def upload(service: Service, name: str, **fields: str) -> dict[str, Any]:
    body = io.BytesIO()
    for field, value in ({"purpose": "user_data"} | fields).items():
        body.write(f'--b\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode())
    body.write(f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode())
    body.write((SAMPLES / name).read_bytes() + b"\r\n--b--\r\n")
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    request = urllib.request.Request(service.url + "/v1/files", data=body.getvalue(), headers=headers)
    with urllib.request.urlopen(request) as response:
        file: dict[str, Any] = json.loads(response.read())
        return file


def ask(service: Service, part: dict[str, Any], **fields: Any) -> Answer:
    return service.ask([part, QUESTION], temperature=0, **fields)


def encode(service: Service, *items: dict[str, Any]) -> list[dict[str, Any]]:
    answer = service.post("/v1/encode", {"input": list(items)})
    assert answer.status == 200, answer
    data: list[dict[str, Any]] = answer.body["data"]
    return data


@pytest.mark.parametrize("name", ["picture.png", "clip.mp4", "tones.wav"])
def test_an_uploaded_file_is_answered_about(epd: Service, name: str) -> None:
    known = KNOWN_ANSWERS[name]
    file = upload(epd, name)
    question = {"type": "text", "text": known.question}
    answer = epd.ask([{"type": "file", "file": {"file_id": file["id"]}}, question], temperature=0)
    assert text_of(answer) == known.answer
    assert epd.get(f"/v1/files/{file['id']}").body == file


def test_a_name_in_place_of_content(epd: Service) -> None:
    first = ask(epd, {"type": "image_url", "image_url": {"url": file_url("picture.png")}, "uuid": "e2e"})
    assert text_of(first) == PICTURE.answer
    (told,) = first.body["media"]
    for part in (
        {"type": "image_url", "image_url": None, "uuid": "e2e"},
        {"type": "image_url", "key": told["key"]},
    ):
        again = ask(epd, part)
        assert text_of(again) == PICTURE.answer
        assert again.body["media"][0]["key"] == told["key"]
        assert again.body["media"][0]["cached"] is True
        assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    unknown = ask(epd, {"type": "image_url", "key": "0" * 32})
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "unknown_media")


def test_chat_and_encode_speak_of_the_same_embeddings(epd: Service) -> None:
    """One is told the key by the other: nothing is sent twice, and nothing is on the shelf."""
    item = {"type": "image_url", "image_url": {"url": file_url("picture.png")}, "max_pixels": 20_000}
    (encoded,) = encode(epd, item)
    answer = ask(epd, {"type": "image_url", "key": encoded["key"]})
    assert answer.status == 200, answer
    assert answer.body["media"][0] == {
        "param": "messages[0].content[0].image_url",
        "key": encoded["key"],
        "uuid": None,
        "modality": "image",
        "tokens": encoded["rows"],
        "cached": True,
    }
    (again,) = encode(epd, {"type": "image_url", "key": encoded["key"]})
    assert again["embedding"] == encoded["embedding"]


@pytest.mark.parametrize("url", ["%2e%2e/README.md", "..%2fREADME.md", "%00", "x/../../README.md"])
def test_no_way_out_of_the_media_root(epd: Service, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{SAMPLES.as_uri()}/{url}"}}
    answer = ask(epd, part)
    assert answer.status == 400, answer
    assert answer.body["error"]["code"] in ("media_forbidden", "media_invalid")
    items = epd.post("/v1/encode", {"input": [part]})
    assert items.status == 400
