"""What people send by mistake: a 4xx that names the part, at once, and nobody else notices."""

import base64
import io
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from tests.e2e.service import SAMPLES, Service, file_url, text_of

pytestmark = pytest.mark.e2e

FAULT_KNOWN_S = 2.0
QUESTION = {"type": "text", "text": "What is in the picture?"}


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def picture_bytes() -> bytes:
    return (SAMPLES / "picture.png").read_bytes()


def part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def closed_port_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}/a.png"


def empty_video() -> bytes:
    """An MP4 whose only track is a sound: a container without frames."""
    import av
    import numpy as np

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4800), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


MEDIA_FAULTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "truncated image": (part("image", data_url("image/png", picture_bytes()[:-200])), (422,)),
    "text named png": (part("image", data_url("image/png", b"just a note\n" * 20)), (415, 422)),
    "empty image": (part("image", data_url("image/png", b"")), (400, 415, 422)),
    "svg": (part("image", data_url("image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>")), (415,)),
    "truncated sound": (
        part("audio", data_url("audio/wav", (SAMPLES / "tones.wav").read_bytes()[:2000])),
        (422,),
    ),
    "zero-byte audio": (part("audio", data_url("audio/wav", b"")), (400, 415, 422)),
    "video without frames": (part("video", data_url("video/mp4", empty_video())), (415, 422)),
    "picture as audio": (part("audio", data_url("audio/wav", picture_bytes())), (415, 422)),
    "missing file": (part("image", file_url("no-such-picture.png")), (400, 404)),
    "file outside the root": (part("image", "file:///etc/passwd"), (400, 403)),
    "loopback address": (part("image", closed_port_url()), (400,)),
    "metadata service": (part("image", "http://169.254.169.254/latest/meta-data"), (400,)),
    "unresolvable host": (part("image", "http://no-such-host.invalid/a.png"), (400,)),
    "unknown scheme": (part("image", "ftp://example.org/a.png"), (400,)),
    "broken base64": (part("image", "data:image/png;base64,@@@@"), (400, 422)),
}


@pytest.mark.parametrize("fault", MEDIA_FAULTS)
def test_a_bad_medium_is_refused_by_name(epd: Service, fault: str) -> None:
    bad, statuses = MEDIA_FAULTS[fault]
    answer = epd.ask([part("image", file_url("picture.png")), bad, QUESTION])
    assert answer.status in statuses, answer
    error = answer.body["error"]
    assert "messages[0].content[1]" in error["param"], error
    assert error["message"]
    assert "Errno" not in error["message"], error
    assert "<none>" not in error["message"], error
    assert error["code"]
    assert answer.seconds < FAULT_KNOWN_S


REQUEST_FAULTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown model": ({"model": "gpt-9"}, 404, "model"),
    "unknown field": ({"temprature": 1}, 400, "temprature"),
    "unknown part": ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, 400, "content"),
    "no choices": ({"n": 0}, 400, "n"),
    "negative max_tokens": ({"max_tokens": -1}, 400, "max_tokens"),
    "no messages": ({"messages": []}, 400, "messages"),
    "prompt too long": ({"messages": [{"role": "user", "content": "word " * 60_000}]}, 400, "messages"),
}


@pytest.mark.parametrize("fault", REQUEST_FAULTS)
def test_a_bad_request_is_refused_by_field(epd: Service, fault: str) -> None:
    change, status, param = REQUEST_FAULTS[fault]
    body = {"model": "mimo-nano", "messages": [{"role": "user", "content": "hello"}]} | change
    answer = epd.post("/v1/chat/completions", body)
    assert answer.status == status, answer
    assert param in (answer.body["error"]["param"] or ""), answer
    assert answer.seconds < FAULT_KNOWN_S


def test_not_json_and_unknown_routes_are_openai_errors(epd: Service) -> None:
    for answer, status in (
        (epd.post("/v1/chat/completions", b"{not json"), 400),
        (epd.get("/v1/nothing"), 404),
        (epd.get("/v1/chat/completions"), 405),
    ):
        assert answer.status == status
        assert answer.body["error"]["message"]


def test_bad_items_cost_their_neighbours_nothing(epd: Service) -> None:
    """Sixteen requests at once, every second one broken: the sound half is answered as if alone."""
    good = [part("image", file_url("picture.png")), QUESTION]
    expected = text_of(epd.ask(good))
    bad_parts = [entry for entry, _ in MEDIA_FAULTS.values()]

    def ask(i: int) -> tuple[bool, int, str]:
        if i % 2:
            answer = epd.ask([bad_parts[(i // 2) % len(bad_parts)], QUESTION])
            return True, answer.status, ""
        answer = epd.ask(good)
        return False, answer.status, text_of(answer)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(ask, range(16)))
    for is_bad, status, text in results:
        assert 400 <= status < 500 if is_bad else (status, text) == (200, expected)


def test_odd_but_sound_pictures_are_answered(epd: Service) -> None:
    """Palette, alpha, greyscale and tiny pictures go through; the answer is the model's, the status is ours."""
    for mode in ("P", "RGBA", "L", "LA", "CMYK", "1"):
        buffer = io.BytesIO()
        Image.new("RGB", (5, 3), "red").convert("RGBA" if mode == "LA" else "RGB").convert(mode).save(
            buffer, "TIFF" if mode == "CMYK" else "PNG"
        )
        kind = "image/tiff" if mode == "CMYK" else "image/png"
        assert epd.ask([part("image", data_url(kind, buffer.getvalue())), QUESTION]).status == 200, mode
