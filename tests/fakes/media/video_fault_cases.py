"""Damaged videos, and things sent as video that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from preprocess.errors import MediaError, MediaInvalid, MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.types import Modality
from tests.fakes.media.case import Case, Clip, DamagedClip, Expectation, Refusal
from tests.fakes.media.image_cases import HAS_HEIF, heic
from tests.fakes.media.images import huge_header, quarters, saved
from tests.fakes.media.video_cases import evenly, open_groups
from tests.fakes.media.videos import (
    Track,
    clip,
    cut_after,
    declared_but_empty,
    index_first,
    song_with_cover,
    sound_alone,
    with_noise,
    without_head,
)


def video_fault_cases() -> list[Case]:
    return [
        case
        for part in (_noise, _headless, _cut, _size_changes, _none_decodes, _no_video, _no_image)
        for case in part()
    ]


def _video(name: str, make: Callable[[], bytes], expect: Expectation, num_frames: int = 12) -> Case:
    return Case(name, Modality.VIDEO, make, expect, num_frames)


def _refused(name: str, make: Callable[[], bytes], error: type[MediaError], words: str) -> Case:
    return _video(name, make, Refusal(error, words))


def _noise() -> Iterator[Case]:
    """Random bytes over some packets of the third of five groups, frames 24 to 35; others do not need them."""
    for name, container, codec in (
        ("noise.mp4", "mp4", "libx264"),
        ("noise.mkv", "matroska", "libx264"),
        ("noise-mpeg4.avi", "avi", "mpeg4"),
        ("noise-hevc.mp4", "mp4", "libx265"),
        ("noise-vp9.webm", "webm", "libvpx-vp9"),
    ):
        options = {
            "libx264": {"x264-params": "keyint=12:min-keyint=12:scenecut=0:open-gop=0"},
            "libx265": {
                "preset": "ultrafast",
                "x265-params": "keyint=12:min-keyint=12:open-gop=0:log-level=none:pools=1",
            },
            "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
        }.get(codec, {})
        make = partial(_noisy, codec=codec, container=container, codec_options=options)
        expect = DamagedClip(160, 96, 60, 10, lost=range(24, 36), num_readable=9, warning="damaged|decode")
        yield _video(name, make, expect)
    # The first key frame itself: its group is lost, what follows is right.
    expect = DamagedClip(160, 96, 60, 10, lost=range(12), num_readable=9, warning="damaged|decode")
    yield _video("noise-at-the-start.mkv", partial(_noisy, first=0, last=2, container="matroska"), expect)


def _noisy(first: int = 25, last: int = 30, **shot: object) -> bytes:
    return with_noise(clip(range(60), **shot), first, last)


def _headless() -> Iterator[Case]:
    """Begins with frame 5, which like those up to 11 needs one that is not there."""
    for container, extension in (("matroska", "mkv"), ("mpegts", "ts"), ("mp4", "mp4")):
        make = partial(_without_head, container)
        expect = DamagedClip(160, 96, 55, 10, lost=range(5, 12), first=5, num_readable=10, warning="damaged|decode")
        yield _video(f"headless.{extension}", make, expect)

    # From key frame 12 on: 9, 10 and 11 lead it, and need a frame that is not there.
    for codec, name in (("libx264", "h264"), ("libx265", "hevc")):
        # An mp4 begins with the picture of its first packet; its list hides those that lead it.
        hidden = Clip(160, 96, **evenly(48, first=12))
        yield _video(f"headless-leading-{name}.mp4", partial(_from_second_group, codec, "mp4"), hidden, 8)
        for container, extension in (("matroska", "mkv"), ("mpegts", "ts")):
            make = partial(_from_second_group, codec, container)
            expect = DamagedClip(160, 96, 51, 10, lost=range(9, 12), first=9, num_readable=10, warning=None)
            yield _video(f"headless-leading-{name}.{extension}", make, expect)


def _from_second_group(codec: str, container: str) -> bytes:
    return without_head(open_groups(codec, container), container, 9)


def _without_head(container: str) -> bytes:
    return without_head(clip(range(60), b_frames=0, container=container), container, 5)


def _cut() -> Iterator[Case]:
    """60 % of the bytes: what is there is sampled. Pictures have about the same size, but for the key frames."""
    expect = DamagedClip(
        160, 96, 60, 10, lost=range(0), num_readable=9, warning="announces|damaged|decode|before the end|cut short"
    )
    options = {"x264-params": "bframes=2:keyint=12:scenecut=0"}
    for name, make in (
        ("cut.mp4", lambda: index_first(clip(range(60), codec_options=options))),
        ("cut-fragments.mp4", partial(clip, range(60), container_options={"movflags": "frag_keyframe+empty_moov"})),
        ("cut.mkv", partial(clip, range(60), container="matroska", codec_options=options)),
        ("cut.avi", partial(clip, range(60), container="avi", codec="mpeg4")),
        (
            "cut.webm",
            partial(clip, range(60), container="webm", codec="libvpx", codec_options={"deadline": "realtime"}),
        ),
        ("cut.flv", partial(clip, range(60), container="flv", codec="flv")),
    ):
        yield _video(name, partial(_cut_off, make), expect)
    # A transport stream does not say how long it is.
    make = partial(clip, range(60), container="mpegts", codec_options=options)
    yield _video("cut.ts", partial(_cut_off, make), replace(expect, warning=None))
    yield _refused(
        "cut-before-index.mp4", lambda: cut_after(clip(range(60)), 60), MediaUndecodable, "cannot be opened|decode"
    )
    yield _refused("index-alone.mp4", _index_alone, MediaUndecodable, "no frame")


def _cut_off(make: Callable[[], bytes]) -> bytes:
    return cut_after(make(), 60)


def _index_alone() -> bytes:
    content = index_first(clip(range(20)))
    return content[: content.index(b"mdat") + 4]


def _size_changes() -> Iterator[Case]:
    """Two transport streams one after the other: frames keep their places, the first decides on the size."""
    for name, other in (("smaller", (48, 80)), ("larger", (192, 320)), ("other-shape", (160, 96))):
        expect = Clip(160, 96, **evenly(40, 10, 12))
        yield _video(f"size-changes-to-{name}.ts", partial(_two_sizes, other), expect)


def _two_sizes(other: tuple[int, int]) -> bytes:
    # The first part's times are moved by the two frames that its B frames need.
    first = clip(range(20), container="mpegts", b_frames=0)
    return first + clip(range(20, 40), container="mpegts", size=other, pts=range(20, 40), b_frames=0)


def _none_decodes() -> Iterator[Case]:
    noise = partial(_noisy, first=0, last=59, container="matroska")
    yield _refused("all-noise.mkv", noise, MediaUndecodable, "no frame of the video decodes")
    for container, extension in (("mp4", "mp4"), ("matroska", "mkv")):
        make = partial(declared_but_empty, container)
        yield _refused(f"no-frames.{extension}", make, MediaUndecodable, "no frames|no frame")
    yield _refused("bomb-as-video.gif", partial(huge_header, "GIF", 12_000, 12_000), MediaTooLarge, "12000 x 12000")
    # FFmpeg forgets sizes of which it could never hold a picture.
    yield _refused(
        "bomb-as-video-65535.gif", partial(huge_header, "GIF", 65_535, 65_535), MediaTooLarge, "65535 x 65535"
    )
    yield _refused("strip.mp4", partial(clip, range(4), size=(32, 6480)), MediaInvalid, "aspect ratio")


def _no_video() -> Iterator[Case]:
    tone = Track(1.0)
    for name, make in (
        ("sound-alone.m4a", partial(sound_alone, tone, "mp4")),
        ("sound-alone.mka", partial(sound_alone, tone, "matroska")),
        ("sound-alone.wav", partial(sound_alone, Track(1.0, codec="pcm_s16le"), "wav")),
        ("sound-alone.mp3", partial(sound_alone, Track(1.0, codec="libmp3lame"), "mp3")),
    ):
        yield _refused(name, make, MediaUndecodable, "no video stream")
    yield _refused("cover-alone.mp3", _song, MediaUndecodable, "no video stream besides cover art")
    for kind in ("JPEG", "BMP", "TIFF", "AVIF", "ICO"):
        make = partial(saved, quarters(64, 64), kind)
        yield _refused(f"picture-as-video.{kind.lower()}", make, MediaUnsupported, f"expected a video, found {kind}")
    if HAS_HEIF:
        # FFmpeg would show the first tile of it.
        make = partial(heic, 1)
        yield _refused("picture-as-video.heic", make, MediaUnsupported, "expected a video, found HEIC")
    for name, content, error, words in (
        ("empty.mp4", b"", MediaUndecodable, "empty file"),
        ("words.mp4", b"just words", MediaUndecodable, "text"),
        ("page.mp4", b"<!doctype html><html></html>", MediaUnsupported, "HTML"),
        ("playlist.m3u8", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", MediaUnsupported, "HLS playlist"),
        ("script.ffconcat", b"ffconcat version 1.0\nfile /etc/passwd\n", MediaUndecodable, "text"),
        (
            "session.sdp",
            b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nm=video 5 RTP/AVP 96\r\n",
            MediaUndecodable,
            "text",
        ),
        ("document-as-video.pdf", b"%PDF-1.7\n" + bytes(200), MediaUnsupported, "PDF"),
        ("zeros.mp4", bytes(5000), MediaUndecodable, "unknown data"),
        ("only-ftyp.mp4", clip(range(4))[:32], MediaUndecodable, "cannot be opened"),
    ):
        yield _refused(name, partial(bytes, content), error, words)


def _song() -> bytes:
    return song_with_cover(sound_alone(Track(1.0, codec="libmp3lame"), "mp3"), saved(quarters(64, 64), "PNG"))


def _no_image() -> Iterator[Case]:
    """Videos and sound sent as pictures."""
    for name, make, found in (
        ("video-as-picture.mp4", partial(clip, range(4)), "MP4"),
        ("video-as-picture.webm", partial(clip, range(4), container="webm", codec="libvpx"), "Matroska"),
        ("video-as-picture.ts", partial(clip, range(4), container="mpegts"), "MPEG-TS"),
        ("sound-as-picture.mp3", partial(sound_alone, Track(0.5, codec="libmp3lame"), "mp3"), "MP3"),
    ):
        yield Case(name, Modality.IMAGE, make, Refusal(MediaUnsupported, f"expected an image, found {found}"))
    picture = partial(saved, np.zeros((8, 8, 3), np.uint8), "PNG")
    yield Case("picture-as-sound.png", Modality.AUDIO, picture, Refusal(MediaUnsupported, "expected audio, found PNG"))
