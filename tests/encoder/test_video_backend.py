"""Which library decodes videos is the encoder's setting. Gateways follow it; it is refused where it does not work."""

import asyncio
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.load import ConfigError, load
from encoder.client import EncoderClient
from encoder.config import EncoderConfig
from encoder.local import LocalEncoder
from encoder.process import open_server, run_encoder, serve
from epd.gateway.conversation import MediaPart
from epd.gateway.media import MediaStage
from preprocess.config import ProcessorConfig, VideoBackend
from preprocess.errors import BackendUnavailable
from preprocess.types import MediaKey, MediaSource, Modality
from tests.encoder.conftest import TINY_CONFIG
from tests.fakes.media.videos import clip
from tests.fakes.stages import FakeFetcher

VIDEO_URL, IMAGE_URL = "https://media.test/a.mp4", "https://media.test/a.png"


async def keys_over_the_wire(
    model_dir: Path, folder: Path, backend: VideoBackend, contents: dict[str, bytes]
) -> list[MediaKey]:
    """The keys of replies to a gateway whose own settings know nothing of the backend."""
    config = EncoderConfig(video_backend=backend, arena_bytes=2**22)
    address, stop = f"ipc://{folder}/{backend}.sock", asyncio.Event()
    with open_server(config, model_dir=model_dir, name="e0", arena=f"t-{uuid.uuid4().hex}") as server:
        serving = asyncio.create_task(serve(server, address, stop))
        async with EncoderClient.connect([address]) as client:
            stage = MediaStage(
                fetcher=FakeFetcher(contents),
                encoder=client,
                processor=ProcessorConfig.from_hf(TINY_CONFIG),
                clock=time.monotonic,
                patience_s=lambda: 30.0,
            )
            replies = []
            for modality, url in ((Modality.VIDEO, VIDEO_URL), (Modality.IMAGE, IMAGE_URL)):
                medium = await stage.fetch(MediaPart("part", MediaSource(modality, url)), asker="request")
                replies.append(await stage.encode(medium, time.time() + 60))
            for reply in replies:
                client.release(reply.ref)
        stop.set()
        await serving
    return [reply.key for reply in replies]


async def test_the_gateway_computes_the_key_of_the_encoder_s_backend(
    tiny_model_dir: Path, tmp_path: Path, make_png: Callable[..., bytes]
) -> None:
    contents = {VIDEO_URL: clip(range(12)), IMAGE_URL: make_png(1)}
    ours = await keys_over_the_wire(tiny_model_dir, tmp_path, "pyav", contents)
    theirs = await keys_over_the_wire(tiny_model_dir, tmp_path, "decord", contents)
    assert ours[0] != theirs[0]
    assert ours[1] == theirs[1]
    local = LocalEncoder(tiny_model_dir, EncoderConfig(video_backend="decord"))
    assert local.encode(contents[VIDEO_URL], Modality.VIDEO)[2] == theirs[0]
    local.close()


def test_a_backend_that_is_not_installed_is_refused_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"encoder\.video_backend is 'opencv'.*allowed: pyav, torchcodec, decord"):
        load(runtime_dir=tmp_path, environ={"MIMO_ENCODER__VIDEO_BACKEND": "opencv"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'torchcodec', which is not installed; install mimo-epd\[torchcodec\]"):
        load(runtime_dir=tmp_path, environ={"MIMO_ENCODER__VIDEO_BACKEND": "torchcodec"})


def test_a_backend_that_does_not_work_keeps_the_encoder_from_starting(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def does_not_load(backend: VideoBackend) -> None:
        raise BackendUnavailable(f"video_backend is {backend!r}, which does not work here")

    monkeypatch.setattr("encoder.process.load_video_backend", does_not_load)
    config = EncoderConfig(video_backend="decord")
    with pytest.raises(SystemExit) as ended:
        run_encoder(config, model_dir=tiny_model_dir, name="e0", address=f"ipc://{tmp_path}/e", arena="t-none")
    assert ended.value.code == 2
    assert "does not work here" in caplog.text
    monkeypatch.setattr("encoder.local.load_video_backend", does_not_load)
    with pytest.raises(BackendUnavailable):
        LocalEncoder(tiny_model_dir, config)
