"""What files are used as, by their bytes."""

import io
import mmap
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from preprocess.recognise import media_type, modality_of
from preprocess.types import Modality
from tests.fakes.clips import make_video, sine

SOUND = sine(0.2)[:, 0]


def picture(kind: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, kind)
    return out.getvalue()


def sound(kind: str, subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, SOUND, 16000, format=kind, subtype=subtype)
    return out.getvalue()


def container(kind: str, codec: str) -> bytes:
    """A file with sound alone."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=48000)
        assert isinstance(stream, av.AudioStream)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 48000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48000
        for packet in stream.encode(frame):
            file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize(
    ("make", "modality", "kind"),
    [
        (lambda: picture("PNG"), Modality.IMAGE, "image/png"),
        (lambda: picture("JPEG"), Modality.IMAGE, "image/jpeg"),
        (lambda: picture("GIF"), Modality.IMAGE, "image/gif"),
        (lambda: picture("WEBP"), Modality.IMAGE, "image/webp"),
        (lambda: sound("WAV"), Modality.AUDIO, "audio/wav"),
        (lambda: sound("FLAC"), Modality.AUDIO, "audio/flac"),
        (lambda: sound("OGG", "VORBIS"), Modality.AUDIO, "audio/ogg"),
        (lambda: make_video(10), Modality.VIDEO, "video/mp4"),
        (lambda: make_video(10, sound=SOUND), Modality.VIDEO, "video/mp4"),
        (lambda: container("mp4", "aac"), Modality.AUDIO, "audio/mp4"),
        (lambda: container("matroska", "aac"), Modality.AUDIO, "audio/x-matroska"),
        (lambda: container("webm", "libopus"), Modality.AUDIO, "audio/webm"),
    ],
)
def test_media_are_what_their_bytes_say(
    make: Callable[[], bytes], modality: Modality, kind: str, tmp_path: Path
) -> None:
    content = make()
    assert (modality_of(content), media_type(content)) == (modality, kind)
    path = tmp_path / "file"
    path.write_bytes(content)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert (modality_of(mapped), media_type(mapped)) == (modality, kind)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"<html><script>alert(1)</script></html>",
        b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        b"%PDF-1.7 ...",
        b"PK\3\4....",
        b"\x7fELF....",
        bytes(1000),
    ],
)
def test_the_rest_is_nothing_a_browser_would_run(content: bytes) -> None:
    assert modality_of(content) is None
    assert media_type(content) == "application/octet-stream"


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 40])
def test_boxes_that_lie_end_the_search(length: int) -> None:
    """An MP4 whose boxes have no size, or reach beyond the end, is taken for a video: the decoder will tell."""
    for size in (b"\0\0\0\0", b"\0\0\0\1", b"\0\0\0\7", b"\xff\xff\xff\xff"):
        assert modality_of((size + b"ftypisom" + bytes(40))[: 12 + length]) is Modality.VIDEO
