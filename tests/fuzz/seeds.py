"""Small valid files of every format that the decoders take, to be damaged. The same bytes for the same libraries."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from typing import Any, Final

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, features

from preprocess.types import Modality
from tests.fakes.clips import blocks, make_video, picture_file, sine, sound_file
from tests.fakes.media.priority import ordinary_priority

_CLIP_SOUND: Final = 1.0
_EXACT: Final = {"fflags": "+bitexact"}
"""No random identifiers, no dates."""

# The encoder of AV1 talks a lot.
os.environ.setdefault("SVT_LOG", "0")


@dataclass(frozen=True)
class Seed:
    name: str
    modality: Modality
    make: Callable[[], bytes]

    @property
    def content(self) -> bytes:
        return _made(self)


@cache
def _made(seed: Seed) -> bytes:
    return seed.make()


def seeds() -> tuple[Seed, ...]:
    """Those that the libraries here can write, in a fixed order."""
    return (*_pictures(), *_videos(), *_sounds())


def _picture_of(mode: str) -> Image.Image:
    picture = Image.fromarray(blocks(48, 64, 7))
    if mode == "I;16":
        return Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    if mode in ("LA", "RGBA", "PA"):
        picture.putalpha(Image.fromarray(blocks(48, 64, 8)[:, :, 0]))
        return picture.convert(mode)
    return picture.convert(mode)


def _file(mode: str, kind: str, **options: Any) -> bytes:
    return picture_file(_picture_of(mode), kind, **options)


def _animation(kind: str) -> bytes:
    frames = [Image.fromarray(blocks(32, 40, number)) for number in range(4)]
    return picture_file(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)


def _with_exif() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "maker"
    return _file("RGB", "JPEG", exif=exif)


def _heic() -> bytes:
    import pillow_heif

    pillow_heif.register_heif_opener()
    return _file("RGB", "HEIF")


def _pictures() -> list[Seed]:
    makers: dict[str, Callable[[], bytes]] = {
        "jpeg": partial(_file, "RGB", "JPEG"),
        "jpeg-444": partial(_file, "RGB", "JPEG", subsampling=0, quality=97),
        "jpeg-progressive": partial(_file, "RGB", "JPEG", progressive=True),
        "jpeg-restart": partial(_file, "RGB", "JPEG", restart_marker_blocks=2),
        "jpeg-grey": partial(_file, "L", "JPEG"),
        "jpeg-cmyk": partial(_file, "CMYK", "JPEG"),
        "jpeg-exif": _with_exif,
        "png": partial(_file, "RGB", "PNG"),
        "png-rgba": partial(_file, "RGBA", "PNG"),
        "png-la": partial(_file, "LA", "PNG"),
        "png-palette": partial(_file, "P", "PNG"),
        "png-1": partial(_file, "1", "PNG"),
        "png-16": partial(_file, "I;16", "PNG"),
        "apng": partial(_animation, "PNG"),
        "gif": partial(_file, "P", "GIF"),
        "gif-animated": partial(_animation, "GIF"),
        "bmp": partial(_file, "RGB", "BMP"),
        "bmp-palette": partial(_file, "P", "BMP"),
        "tiff": partial(_file, "RGB", "TIFF"),
        "tiff-lzw": partial(_file, "RGB", "TIFF", compression="tiff_lzw"),
        "tiff-deflate": partial(_file, "L", "TIFF", compression="tiff_deflate"),
        "tiff-jpeg": partial(_file, "RGB", "TIFF", compression="jpeg"),
        "tiff-g4": partial(_file, "1", "TIFF", compression="group4"),
        "tiff-16": partial(_file, "I;16", "TIFF"),
        "ico": partial(_file, "RGBA", "ICO"),
        "ppm": partial(_file, "RGB", "PPM"),
        "pgm": partial(_file, "L", "PPM"),
        "webp": partial(_file, "RGB", "WEBP"),
        "webp-lossless": partial(_file, "RGBA", "WEBP", lossless=True),
        "webp-animated": partial(_animation, "WEBP"),
    }
    if features.check("jpg_2000"):
        makers["jp2"] = partial(_file, "RGB", "JPEG2000")
    if features.check("avif"):
        makers["avif"] = partial(_file, "RGB", "AVIF")
    try:
        import pillow_heif  # noqa: F401
    except ImportError:
        pass
    else:
        makers["heic"] = _heic
    return [Seed(name, Modality.IMAGE, make) for name, make in makers.items()]


def _clip(codec: str, container: str, *, sound: bool = False, count: int = 16, **options: Any) -> bytes:
    track = sine(_CLIP_SOUND)[:, 0] if sound else None
    options["options"] = {"fflags": "+bitexact", **options.get("options", {})}
    return make_video(count, size=(48, 64), codec=codec, container=container, corner=True, sound=track, **options)


def _raw_clip(codec: str, container: str, pixels: str, options: dict[str, str] | None = None) -> bytes:
    """For encoders that `make_video`'s settings do not suit."""
    file = io.BytesIO()
    with ordinary_priority(), av.open(file, mode="w", format=container, options=_EXACT) as output:
        stream: Any = output.add_stream(codec, rate=10, options=options or {})
        stream.width, stream.height, stream.pix_fmt = 64, 64, pixels
        stream.codec_context.gop_size = 8
        for index in range(12):
            frame = av.VideoFrame.from_ndarray(blocks(64, 64, index), format="rgb24").reformat(format=pixels)
            frame.pts, frame.time_base = index, Fraction(1, 10)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def _videos() -> list[Seed]:
    makers: dict[str, tuple[str, Callable[[], bytes]]] = {
        "mp4-h264": ("libx264", partial(_clip, "libx264", "mp4")),
        "mp4-h264-aac": ("libx264", partial(_clip, "libx264", "mp4", sound=True)),
        "mp4-h264-fragments": (
            "libx264",
            partial(_clip, "libx264", "mp4", options={"movflags": "frag_keyframe+empty_moov"}),
        ),
        "mp4-hevc": ("libx265", partial(_raw_clip, "libx265", "mp4", "yuv420p", {"x265-params": "log-level=none"})),
        "mp4-av1": ("libsvtav1", partial(_raw_clip, "libsvtav1", "mp4", "yuv420p", {"preset": "12"})),
        "mp4-mpeg4": ("mpeg4", partial(_clip, "mpeg4", "mp4")),
        "mkv-h264": ("libx264", partial(_clip, "libx264", "matroska", sound=True)),
        "mkv-ffv1": ("ffv1", partial(_raw_clip, "ffv1", "matroska", "yuv420p")),
        "webm-vp8": ("libvpx", partial(_raw_clip, "libvpx", "webm", "yuv420p")),
        "webm-vp9": ("libvpx-vp9", partial(_raw_clip, "libvpx-vp9", "webm", "yuv420p", {"cpu-used": "8"})),
        "ts-h264": ("libx264", partial(_clip, "libx264", "mpegts", sound=True)),
        "ts-mpeg2": ("mpeg2video", partial(_raw_mpeg2, "mpegts")),
        "avi-mjpeg": ("mjpeg", partial(_raw_clip, "mjpeg", "avi", "yuvj420p")),
        "avi-mpeg4": ("mpeg4", partial(_clip, "mpeg4", "avi")),
        "mov-h264": ("libx264", partial(_clip, "libx264", "mov", sound=True)),
        "mov-prores": ("prores_ks", partial(_raw_clip, "prores_ks", "mov", "yuv422p10le")),
        "flv-h264": ("libx264", partial(_clip, "libx264", "flv")),
        "gif-video": ("gif", partial(_animation, "GIF")),
        "apng-video": ("apng", partial(_animation, "PNG")),
        "webp-video": ("gif", partial(_animation, "WEBP")),
    }
    return [Seed(name, Modality.VIDEO, make) for name, (codec, make) in makers.items() if _writes(codec)]


def _raw_mpeg2(container: str) -> bytes:
    file = io.BytesIO()
    with ordinary_priority(), av.open(file, mode="w", format=container, options=_EXACT) as output:
        stream: Any = output.add_stream("mpeg2video", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for index in range(12):
            frame = av.VideoFrame.from_ndarray(blocks(64, 64, index), format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = index, Fraction(1, 25)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def _writes(codec: str) -> bool:
    return codec in av.codecs_available


def _pcm(dtype: str) -> NDArray[Any]:
    wave = sine(0.4, channels=2)
    return (wave * np.iinfo(dtype).max).astype(dtype) if dtype.startswith("int") else wave.astype(dtype)


def _encoded_sound(codec: str, container: str, layout: str = "stereo") -> bytes:
    file = io.BytesIO()
    with ordinary_priority(), av.open(file, mode="w", format=container, options=_EXACT) as output:
        stream: Any = output.add_stream(codec, rate=48_000, layout=layout)
        channels = stream.codec_context.layout.nb_channels
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=48_000)
        fifo = av.AudioFifo()
        wave = sine(0.4, rate_hz=48_000, channels=channels)
        frame = av.AudioFrame.from_ndarray(wave.reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate, frame.pts = 48_000, 0
        for converted in resampler.resample(frame):
            fifo.write(converted)
        size = stream.codec_context.frame_size or 1024
        while (piece := fifo.read(size, partial=True)) is not None:
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return file.getvalue()


def _sounds() -> list[Seed]:
    wav = {
        "wav-u8": ("WAV", "PCM_U8", "int16"),
        "wav-16": ("WAV", "PCM_16", "int16"),
        "wav-24": ("WAV", "PCM_24", "int32"),
        "wav-32": ("WAV", "PCM_32", "int32"),
        "wav-float": ("WAV", "FLOAT", "float32"),
        "wav-double": ("WAV", "DOUBLE", "float64"),
        "wav-ulaw": ("WAV", "ULAW", "int16"),
        "wav-adpcm": ("WAV", "MS_ADPCM", "int16"),
        "wavex": ("WAVEX", "PCM_16", "int16"),
        "rf64": ("RF64", "PCM_16", "int16"),
        "w64": ("W64", "PCM_16", "int16"),
        "aiff": ("AIFF", "PCM_16", "int16"),
        "au": ("AU", "PCM_16", "int16"),
        "caf": ("CAF", "PCM_16", "int16"),
        "flac": ("FLAC", "PCM_16", "int16"),
        "flac-24": ("FLAC", "PCM_24", "int32"),
        "mp3": ("MP3", "MPEG_LAYER_III", "float32"),
        "ogg-vorbis": ("OGG", "VORBIS", "float32"),
        "ogg-opus": ("OGG", "OPUS", "float32"),
    }
    made = [
        Seed(name, Modality.AUDIO, partial(_sound, kind, subtype, dtype))
        for name, (kind, subtype, dtype) in wav.items()
    ]
    encoded = {
        "m4a": ("aac", "ipod"),
        "aac": ("aac", "adts"),
        "ac3": ("ac3", "ac3"),
        "mka-flac": ("flac", "matroska"),
        "webm-opus": ("libopus", "webm"),
        "m4a-alac": ("alac", "ipod"),
        "tta": ("tta", "tta"),
        "wv": ("wavpack", "wv"),
    }
    made += [
        Seed(name, Modality.AUDIO, partial(_encoded_sound, codec, container))
        for name, (codec, container) in encoded.items()
        if _writes(codec)
    ]
    return made


def _sound(kind: str, subtype: str, dtype: str) -> bytes:
    return sound_file(_pcm(dtype), 24_000, kind=kind, subtype=subtype)
