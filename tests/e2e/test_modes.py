"""One answer, whatever the deployment: mixed prompts, 200 with MIMO_TEST_EFFORT=3, through every mode, with and without
prefix cache, alone and sixteen at a time, greedy. The reference is the plainest way: one process, no cache, one request
at a time."""

import base64
import io
import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image, ImageDraw

from tests.e2e.service import SAMPLES, Service, running_service, text_of
from tests.oracles.effort import scaled

pytestmark = pytest.mark.e2e

NUM_PROMPTS = scaled(200)
MAX_TOKENS = 12
MODES = ("unified", "e-pd", "epd")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")


def _url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _picture(rng: random.Random) -> Image.Image:
    width, height = rng.choice([(96, 96), (128, 96), (70, 150), (200, 120)])
    picture = Image.new("RGB", (width, height), rng.choice(["white", "black", "gray"]))
    x, y, r = rng.randrange(20, width - 20), rng.randrange(20, height - 20), rng.randrange(10, 20)
    draw = rng.choice([ImageDraw.ImageDraw.ellipse, ImageDraw.ImageDraw.rectangle])
    draw(ImageDraw.Draw(picture), (x - r, y - r, x + r, y + r), fill=rng.choice(COLOURS))
    return picture


def _image_part(rng: random.Random) -> dict[str, Any]:
    buffer = io.BytesIO()
    _picture(rng).save(buffer, "PNG")
    return {"type": "image_url", "image_url": {"url": _url("image/png", buffer.getvalue())}}


def _video_part(rng: random.Random) -> dict[str, Any]:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 96, 96, "yuv420p"
        for i in range(rng.choice([6, 8, 11])):
            picture = Image.new("RGB", (96, 96), "white")
            ImageDraw.Draw(picture).ellipse((6 * i, 30, 6 * i + 20, 50), fill=rng.choice(COLOURS))
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode(None))
    return {"type": "video_url", "video_url": {"url": _url("video/mp4", buffer.getvalue())}}


def _audio_part(rng: random.Random) -> dict[str, Any]:
    rate = rng.choice([16000, 24000, 44100])
    time_s = np.arange(int(rate * rng.uniform(0.3, 2.0))) / rate
    tone = sum(np.sin(2 * np.pi * rng.uniform(600, 1700) * time_s) for _ in range(2)) * 0.2
    buffer = io.BytesIO()
    soundfile.write(buffer, tone.astype(np.float32), rate, format="WAV")
    return {"type": "audio_url", "audio_url": {"url": _url("audio/wav", buffer.getvalue())}}


@cache
def prompts() -> list[list[dict[str, Any]]]:
    """Mixed conversations: shared beginnings, reused media, lengths around page and window borders."""
    rng = random.Random(20261130)
    media = [
        *(_image_part(rng) for _ in range(8)),
        *(_video_part(rng) for _ in range(4)),
        *(_audio_part(rng) for _ in range(4)),
    ]
    systems = [None, "Answer briefly.", "You answer questions about keys, shapes and tones. " * 12]
    conversations = []
    for _ in range(NUM_PROMPTS):
        words = rng.choice([3, 8, 30, 60, 120, 250])
        filler = " ".join(
            rng.choice(["amber", "key", "of", "the", "blue", "7", "is", "stone", "and"]) for _ in range(words)
        )
        text = {"type": "text", "text": f"{filler} What is the key of {rng.choice(COLOURS)}?"}
        parts = [rng.choice(media) for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))]
        system = rng.choice(systems)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        conversations.append([*messages, {"role": "user", "content": [*parts, text]}])
    return conversations


def answers(service: Service, batch: int) -> list[str]:
    def ask(messages: list[dict[str, Any]]) -> str:
        body = {"model": "mimo-nano", "messages": messages, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        return text_of(service.post("/v1/chat/completions", body))

    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(ask, prompts()))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    log_dir = tmp_path_factory.mktemp("reference")
    arguments = ("--mode", "unified", "--no-prefix-cache", "--media-root", str(SAMPLES))
    with running_service(log_dir, *arguments) as service:
        return answers(service, batch=1)


def test_the_reference_says_something(reference: list[str]) -> None:
    assert len(reference) == NUM_PROMPTS
    assert len(set(reference)) > 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("mode", MODES)
def test_every_deployment_gives_the_same_answers(
    tmp_path: Path, reference: list[str], mode: str, prefix_cache: bool
) -> None:
    flag = "--prefix-cache" if prefix_cache else "--no-prefix-cache"
    with running_service(tmp_path, "--mode", mode, flag) as service:
        for batch in (1, 16):
            found = answers(service, batch)
            different = [i for i, (ours, theirs) in enumerate(zip(found, reference, strict=True)) if ours != theirs]
            assert not different, (batch, [(i, found[i], reference[i]) for i in different[:3]])
    said = service.log_path.read_text()
    assert re.search(r"epd\.engine\.worker: KV: [\d,]+ bytes as \d+ full pages", said)
    assert 'attention over pages: "' in said
