"""Video files whose frames carry their number, and what must come out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from preprocess.types import Modality
from tests.fakes.media.barcode import barcode_picture
from tests.fakes.media.case import Case, Clip, Expectation, Tone
from tests.fakes.media.images import quarters, saved
from tests.fakes.media.videos import (
    Track,
    clip,
    clip_of_pictures,
    copied_from,
    index_first,
    with_cover_stream,
    with_matrix,
)

_H, _W = 96, 160
_QUICK_VPX: Final = {"deadline": "realtime", "cpu-used": "8"}
_X265: Final = {"preset": "ultrafast", "x265-params": "log-level=none:pools=1"}


def video_cases() -> list[Case]:
    parts = (_codecs, _pictures, _groups, _containers, _lengths, _rates, _turned, _cuts, _sound)
    return [case for part in parts for case in part()]


def evenly(num_frames: int, rate_fps: float | Fraction = 10, wanted: int = 8, *, first: int = 0) -> dict[str, Any]:
    """`numbers` and `times_s` of a clip with an even rate: indices spread from first to last, time index / rate."""
    count = 1 if num_frames == 1 else max(min(wanted, num_frames) // 2 * 2, 2)
    indices = sorted({int(index) for index in np.linspace(0, num_frames - 1, count)})
    return {
        "numbers": tuple(first + index for index in indices),
        "times_s": tuple(float(index / Fraction(rate_fps)) for index in indices),
    }


def by_time(times_s: Sequence[float], wanted: int = 8) -> dict[str, Any]:
    """The same of a clip with an uneven rate: moments spread evenly from first frame to last, the frame then shown.

    Where that gives too few, those furthest in time from all others are added, one by one.
    """
    wanted = min(wanted, len(times_s)) // 2 * 2
    moments = np.linspace(0, times_s[-1], wanted)
    numbers = sorted({max(number for number, shown in enumerate(times_s) if shown <= at + 1e-9) for at in moments})
    while len(numbers) < wanted:
        apart_s = [round(min(abs(shown - times_s[number]) for number in numbers), 6) for shown in times_s]
        numbers = sorted([*numbers, apart_s.index(max(apart_s))])
    return {"numbers": tuple(numbers), "times_s": tuple(times_s[number] for number in numbers)}


def _video(name: str, make: Callable[[], bytes], expect: Expectation, num_frames: int = 8) -> Case:
    return Case(name, Modality.VIDEO, make, expect, num_frames)


def _plain(num_frames: int, **changes: Any) -> Clip:
    values = {"width": _W, "height": _H, **evenly(num_frames), **changes}
    return Clip(**values)


def _codecs() -> Iterator[Case]:
    """Codecs and containers, 30 frames at 10 per second in groups of 12."""
    for name, codec, container, options in (
        ("h264.mp4", "libx264", "mp4", {}),
        ("h264.mov", "libx264", "mov", {}),
        ("h264.mkv", "libx264", "matroska", {}),
        ("h264.ts", "libx264", "mpegts", {}),
        ("h264.flv", "libx264", "flv", {}),
        ("h264.avi", "libx264", "avi", {}),
        ("h264.3gp", "libx264", "3gp", {}),
        ("hevc.mp4", "libx265", "mp4", _X265),
        ("hevc.mkv", "libx265", "matroska", _X265),
        ("hevc.ts", "libx265", "mpegts", _X265),
        ("vp8.webm", "libvpx", "webm", _QUICK_VPX),
        ("vp9.webm", "libvpx-vp9", "webm", _QUICK_VPX),
        ("vp9.mp4", "libvpx-vp9", "mp4", _QUICK_VPX),
        ("mpeg4.mp4", "mpeg4", "mp4", {}),
        ("mpeg4.avi", "mpeg4", "avi", {}),
        ("sorenson.flv", "flv", "flv", {}),
        ("wmv.asf", "wmv2", "asf", {}),
        ("ffv1.mkv", "ffv1", "matroska", {}),
    ):
        yield _video(
            name, partial(clip, range(30), codec=codec, container=container, codec_options=options), _plain(30)
        )
    av1 = {"codec": "libsvtav1", "codec_options": {"preset": "8", "crf": "12"}, "bit_rate": None}
    yield _video("av1.mp4", partial(clip, range(30), container="mp4", **av1), _plain(30))
    yield _video("av1.webm", partial(clip, range(30), container="webm", **av1), _plain(30))
    jpeg = {"codec": "mjpeg", "pixel_format": "yuvj420p"}
    yield _video("mjpeg.avi", partial(clip, range(30), container="avi", **jpeg), _plain(30))
    yield _video("mjpeg.mov", partial(clip, range(30), container="mov", **jpeg), _plain(30))
    # As cameras write them: every frame a whole file, with the camera's notes in it.
    for codec, kind in (("mjpeg", "JPEG"), ("png", "PNG")):
        make = partial(_camera_frames, codec, kind)
        yield _video(f"camera-notes-{kind.lower()}.mov", make, _plain(12))
    yield _video("png.mov", partial(clip, range(12), container="mov", codec="png", pixel_format="rgb24"), _plain(12))
    yield _video("raw.avi", partial(clip, range(12), container="avi", codec="rawvideo"), _plain(12))
    prores = {"codec": "prores_ks", "pixel_format": "yuv422p10le"}
    yield _video("prores.mov", partial(clip, range(12), container="mov", **prores), _plain(12))
    broadcast = Clip(_W, _H, **evenly(40, 25))
    mpeg2 = partial(clip, range(40), codec="mpeg2video", rate=Fraction(25))
    yield _video("mpeg2.ts", partial(mpeg2, container="mpegts", b_frames=2), broadcast)
    yield _video("mpeg2.mpg", partial(mpeg2, container="mpeg"), broadcast)
    interlaced = {"codec_options": {"flags": "+ildct+ilme"}}
    yield _video("interlaced.ts", partial(mpeg2, container="mpegts", **interlaced), broadcast)


def _camera_frames(codec: str, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 1, "a camera"
    pictures = [saved(barcode_picture(number), kind, exif=exif) for number in range(12)]
    return clip_of_pictures(pictures, "mov", codec)


def _pictures() -> Iterator[Case]:
    """Depth, chroma, range, odd sizes."""
    for name, codec, pixel_format in (
        ("h264-10-bit.mp4", "libx264", "yuv420p10le"),
        ("h264-444.mp4", "libx264", "yuv444p"),
        ("h264-422-10-bit.mp4", "libx264", "yuv422p10le"),
        ("h264-rgb.mp4", "libx264rgb", "rgb24"),
        ("hevc-10-bit.mp4", "libx265", "yuv420p10le"),
        ("hevc-12-bit.mp4", "libx265", "yuv420p12le"),
        ("hevc-gbr.mp4", "libx265", "gbrp"),
        ("vp9-alpha.webm", "libvpx-vp9", "yuva420p"),
        ("ffv1-alpha.mkv", "ffv1", "bgra"),
        ("av1-10-bit.mp4", "libsvtav1", "yuv420p10le"),
    ):
        options = {"libx265": _X265, "libvpx-vp9": _QUICK_VPX, "libsvtav1": {"preset": "8", "crf": "12"}}.get(codec, {})
        container = {"webm": "webm", "mkv": "matroska"}.get(name.rsplit(".", 1)[1], "mp4")
        changes = {"codec": codec, "container": container, "pixel_format": pixel_format, "codec_options": options}
        rate = {"bit_rate": None} if codec == "libsvtav1" else {}
        yield _video(name, partial(clip, range(14), **changes, **rate), _plain(14))
    yield _video("grey.mp4", partial(clip, range(14), pixel_format="gray"), _plain(14, colour_tolerance=None))
    # (1, 1) is BT.709, limited; (5, 2) is BT.601, full range. The tags say so.
    for name, colour in (("bt709.mp4", (1, 1)), ("bt709-full-range.mp4", (1, 2)), ("bt601-full-range.mp4", (5, 2))):
        yield _video(name, partial(clip, range(14), colour=colour), _plain(14, colour_tolerance=12))
    yield _video("full-range.mp4", partial(clip, range(14), pixel_format="yuvj420p"), _plain(14, colour_tolerance=20))
    odd = {"width": 161, "height": 97}
    yield _video("odd-444.mp4", partial(clip, range(9), size=(97, 161), pixel_format="yuv444p"), _plain(9, **odd))
    vp9 = {"codec": "libvpx-vp9", "container": "webm", "codec_options": _QUICK_VPX}
    yield _video("odd-vp9.webm", partial(clip, range(9), size=(97, 161), **vp9), _plain(9, **odd))
    mpeg4 = {"codec": "mpeg4", "container": "avi"}
    yield _video("odd-mpeg4.avi", partial(clip, range(9), size=(97, 161), **mpeg4), _plain(9, **odd))
    # Coded in blocks of 16, shown without the last rows.
    cropped = partial(clip, range(9), size=(90, 150))
    yield _video("cropped.mp4", cropped, _plain(9, width=150, height=90))
    hevc = partial(clip, range(9), size=(90, 150), codec="libx265", codec_options=_X265)
    yield _video("cropped-hevc.mp4", hevc, _plain(9, width=150, height=90))


def _groups() -> Iterator[Case]:
    """Groups of pictures: long, open, with leading pictures, every frame a key frame."""
    x264 = "keyint={gop}:min-keyint={gop}:scenecut=0:bframes=3:b-adapt=0:b-pyramid={pyramid}:open-gop={open}"
    for name, gop, pyramid, is_open in (
        ("closed-groups.mp4", 12, "none", 0),
        ("open-groups.mp4", 12, "normal", 1),
        ("long-group.mp4", 250, "normal", 0),
    ):
        params = {"x264-params": x264.format(gop=gop, pyramid=pyramid, open=is_open)}
        yield _video(name, partial(clip, range(100), codec_options=params), _plain(100, **evenly(100, wanted=24)), 24)
    only_keys = partial(clip, range(40), gop=1)
    yield _video("only-key-frames.mp4", only_keys, _plain(40))
    no_b = partial(clip, range(100), codec_options={"x264-params": "bframes=0:keyint=25"})
    yield _video("no-b-frames.mp4", no_b, _plain(100, **evenly(100, wanted=24)), 24)
    refresh = {"x264-params": "intra-refresh=1:keyint=30:bframes=0"}
    yield _video("no-second-key-frame.mp4", partial(clip, range(60), codec_options=refresh), _plain(60))
    x265 = "open-gop=1:keyint=12:min-keyint=12:bframes=3:b-adapt=0:scenecut=0:log-level=none:pools=1"
    params = {"preset": "ultrafast", "x265-params": x265}
    for name, container in (
        ("leading-pictures.mp4", "mp4"),
        ("leading-pictures.mkv", "matroska"),
        ("leading-pictures.ts", "mpegts"),
    ):
        make = partial(clip, range(100), codec="libx265", container=container, codec_options=params)
        yield _video(name, make, _plain(100, **evenly(100, wanted=24)), 24)
    mpeg4 = partial(clip, range(40), codec="mpeg4", container="avi", b_frames=2)
    yield _video("b-frames.avi", mpeg4, _plain(40))
    hidden = {**_QUICK_VPX, "deadline": "good", "auto-alt-ref": "1", "lag-in-frames": "12"}
    vp9 = partial(clip, range(40), codec="libvpx-vp9", container="webm", codec_options=hidden)
    yield _video("hidden-frames.webm", vp9, _plain(40))


def open_groups(codec: str = "libx265", container: str = "mp4", num_frames: int = 60) -> bytes:
    """Key frames every 12, three B frames between others: 9, 10 and 11 come after key frame 12 and lead it."""
    params = "open-gop=1:keyint=12:min-keyint=12:bframes=3:b-adapt=0:scenecut=0"
    if codec == "libx265":
        options = {"preset": "ultrafast", "x265-params": f"{params}:log-level=none:pools=1"}
    else:
        options = {"x264-params": f"{params}:b-pyramid=none"}
    return clip(range(num_frames), codec=codec, container=container, codec_options=options)


_FRAGMENTS: Final = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}


def _containers() -> Iterator[Case]:
    yield _video("fragmented.mp4", partial(clip, range(40), container_options=_FRAGMENTS), _plain(40))
    yield _video("index-first.mp4", lambda: index_first(clip(range(40))), _plain(40))
    vp8 = {"codec": "libvpx", "container": "webm", "codec_options": _QUICK_VPX}
    live = partial(clip, range(40), **vp8, container_options={"live": "1"}, streamed=True)
    yield _video("live-without-duration.webm", live, _plain(40))
    yield _video("streamed.mkv", partial(clip, range(40), container="matroska", streamed=True), _plain(40))
    yield _video("streamed.ts", partial(clip, range(40), container="mpegts", streamed=True), _plain(40))
    yield _video("announces-more.avi", _announces_more, _plain(30, warning="announces 99 frames and holds 30"))
    yield _video("one-group.ts", partial(clip, range(20), container="mpegts", gop=250), _plain(20))
    # What a file is, its bytes say.
    yield _video("mkv-inside.mp4", partial(clip, range(20), container="matroska"), _plain(20))


def _announces_more() -> bytes:
    content = clip(range(30), codec="mpeg4", container="avi")
    for mark, offset in ((b"avih", 24), (b"strh", 40)):
        at = content.index(mark) + offset
        content = content[:at] + (99).to_bytes(4, "little") + content[at + 4 :]
    return content


def _lengths() -> Iterator[Case]:
    for num_frames in (1, 2, 3, 4, 5):
        yield _video(f"{num_frames}-frames.mp4", partial(clip, range(num_frames)), _plain(num_frames))
    for container, extension in (("matroska", "mkv"), ("mpegts", "ts")):
        yield _video(f"1-frame.{extension}", partial(clip, [7], container=container), _plain(1, **evenly(1, first=7)))
    yield _video("high-numbers.mp4", partial(clip, range(41_000, 41_050)), _plain(50, **evenly(50, first=41_000)))


def _rates() -> Iterator[Case]:
    fast, ntsc = Fraction(240), Fraction(30_000, 1001)
    yield _video("240-fps.mp4", partial(clip, range(240), rate=fast), _plain(240, **evenly(240, fast)))
    yield _video("29.97-fps.mp4", partial(clip, range(60), rate=ntsc), _plain(60, **evenly(60, ntsc)))
    yield _video(
        "23.976-fps.mkv",
        partial(clip, range(48), rate=Fraction(24_000, 1001), container="matroska"),
        _plain(48, **evenly(48, Fraction(24_000, 1001))),
    )
    yield _video("1-fps.mp4", partial(clip, range(12), rate=Fraction(1)), _plain(12, **evenly(12, 1)))
    # A rate asked for: 60 frames at 10 per second last 6 s, at 2 per second that is 12; an odd count loses one.
    for fps, count in ((2.0, 12), (0.8, 4), (1.25, 6), (10.0, 60)):
        make = partial(clip, range(60))
        yield Case(f"asked-{fps}-fps.mp4", Modality.VIDEO, make, _plain(60, **evenly(60, wanted=count)), fps=fps)
    milliseconds = Fraction(1, 1000)
    # Quick at first and slow at the end, as a screen recorder writes; one still picture for long; dropped frames.
    for name, pts in (
        ("slowing", [40 * at if at < 25 else 1000 + 200 * (at - 25) for at in range(45)]),
        ("long-still", [0, 100, 200, 300, 6000, 6100, 6200, 6300]),
        ("dropped", [100 * at for at in range(60) if not 17 <= at < 45]),
    ):
        for container, extension in (("mp4", "mp4"), ("matroska", "mkv")):
            make = partial(clip, range(len(pts)), container=container, pts=pts, time_base=milliseconds)
            expect = _plain(len(pts), **by_time([at / 1000 for at in pts]))
            yield _video(f"uneven-{name}.{extension}", make, expect)
    # A little unrest, rounded times: still an even rate.
    shaken = [100 * at + (at * 7 % 5) * 10 for at in range(40)]
    yield _video(
        "shaken.mkv", partial(clip, range(40), container="matroska", pts=shaken, time_base=milliseconds), _plain(40)
    )
    for container, extension in (("matroska", "mkv"), ("mp4", "mp4"), ("mpegts", "ts")):
        late = partial(clip, range(40), container=container, pts=range(30, 70))
        yield _video(f"starts-at-3-s.{extension}", late, _plain(40))
    # Of every four frames two at the same time: they are told apart by counting.
    twice = [at - (at % 4 == 3) for at in range(40)]
    jpegs = partial(_same_times, twice)
    yield _video("same-times.mkv", jpegs, _plain(40))
    early = {"avoid_negative_ts": "disabled"}
    negative = partial(clip, range(40), container="matroska", pts=range(-5, 35), container_options=early)
    yield _video("negative-times.mkv", negative, _plain(40))


def _same_times(times: Sequence[int]) -> bytes:
    return clip_of_pictures([saved(barcode_picture(at), "JPEG") for at in range(len(times))], "matroska", times=times)


def _rotated(number: int) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    return lambda picture: np.rot90(picture, number)


def _turned() -> Iterator[Case]:
    """Stored so that the matrix (a, b, c, d) shows the pictures upright, x' = a x + c y, y' = b x + d y."""
    for name, matrix, turn in (
        # x' = -y, y' = x turns by 90 degrees clockwise, so it is stored turned the other way. And so on.
        ("90", (0, 1, -1, 0), _rotated(1)),
        ("180", (-1, 0, 0, -1), _rotated(2)),
        ("270", (0, -1, 1, 0), _rotated(3)),
        ("mirrored", (-1, 0, 0, 1), np.fliplr),
        ("upside-down", (1, 0, 0, -1), np.flipud),
        ("transposed", (0, 1, 1, 0), lambda picture: picture.swapaxes(0, 1)),
        ("transposed-back", (0, -1, -1, 0), lambda picture: np.rot90(picture.swapaxes(0, 1), 2)),
    ):
        lies = matrix[0] == 0
        size = (_W, _H) if lies else (_H, _W)
        yield _video(f"turned-{name}.mp4", partial(_with_turn, matrix, turn, size, "mp4"), _plain(20))
    yield _video("turned-90.mov", partial(_with_turn, (0, 1, -1, 0), _rotated(1), (_W, _H), "mov"), _plain(20))
    hevc = partial(_with_turn, (0, -1, 1, 0), _rotated(3), (_W, _H), "mp4", codec="libx265", codec_options=_X265)
    yield _video("turned-270-hevc.mp4", hevc, _plain(20))
    portrait = partial(clip, range(20), size=(_W, _H))
    yield _video("portrait.mp4", portrait, _plain(20, width=_H, height=_W))


def _with_turn(
    matrix: tuple[int, int, int, int],
    turn: Callable[[NDArray[np.uint8]], NDArray[np.uint8]],
    size: tuple[int, int],
    container: str,
    **changes: Any,
) -> bytes:
    return with_matrix(clip(range(20), container=container, size=size, turn=turn, **changes), matrix)


def _cuts() -> Iterator[Case]:
    """Cut without coding again: what lies before the cut is needed for decoding and not shown."""
    for container, extension in (("mp4", "mp4"), ("mov", "mov")):
        make = partial(_copied, container)
        yield _video(f"edit-list.{extension}", make, _plain(43, **evenly(43, first=17)))
    # Of a group with leading pictures; the cut lies in the middle, and on the key frame itself.
    for first in (17, 24):
        make = partial(_open_groups_from, first)
        yield _video(f"edit-list-leading-{first}.mp4", make, _plain(60 - first, **evenly(60 - first, first=first)))
    # Matroska has no such list: everything from the key frame on is shown.
    make = partial(_copied, "matroska", options={"avoid_negative_ts": "disabled"})
    yield _video("copied.mkv", make, _plain(48, **evenly(48, first=12)))


def _open_groups_from(first: int) -> bytes:
    return copied_from(open_groups(), "mp4", first)


def _copied(container: str, **changes: Any) -> bytes:
    return copied_from(clip(range(60)), container, 17, **changes)


def _sound() -> Iterator[Case]:
    """Sound beside pictures: none, as long, longer, shorter, two tracks, cover art."""
    for name, container, track in (
        ("aac.mp4", "mp4", Track(2.0)),
        ("aac-stereo.mkv", "matroska", Track(2.0, layout="stereo", rate_hz=44_100)),
        ("mp3.avi", "avi", Track(2.0, codec="libmp3lame", rate_hz=44_100)),
        ("opus.webm", "webm", Track(2.0, codec="libopus", rate_hz=48_000)),
        ("pcm.mov", "mov", Track(2.0, codec="pcm_s16le", rate_hz=16_000)),
        ("aac.ts", "mpegts", Track(2.0)),
    ):
        codec = {"codec": "libvpx", "codec_options": _QUICK_VPX} if container == "webm" else {}
        make = partial(clip, range(20), container=container, tracks=(track,), **codec)
        yield _video(f"with-{name}", make, _plain(20, tone=Tone(2.0, 440.0)))
    yield _video("long-sound.mp4", partial(clip, range(20), tracks=(Track(5.0),)), _plain(20, tone=Tone(5.0, 440.0)))
    yield _video("short-sound.mp4", partial(clip, range(20), tracks=(Track(0.5),)), _plain(20, tone=Tone(0.5, 440.0)))
    two = (Track(2.0, 440.0), Track(2.0, 2000.0))
    yield _video("two-tracks.mp4", partial(clip, range(20), tracks=two), _plain(20, tone=Tone(2.0, 440.0)))
    yield _video(
        "two-tracks.mkv", partial(clip, range(20), tracks=two, container="matroska"), _plain(20, tone=Tone(2.0, 440.0))
    )
    cover = partial(saved, quarters(64, 64), "JPEG")
    yield _video("cover-beside.mp4", lambda: with_cover_stream(range(20), cover(), cover_first=True), _plain(20))
