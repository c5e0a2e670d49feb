"""Sound files and what they must come out as."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import MediaError, MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.types import Modality
from tests.fakes.media.case import Case, Expectation, Refusal, Sound
from tests.fakes.media.images import riff_chunk
from tests.fakes.media.sounds import encoded, id3_tag, packed, sines, sound_file, wav
from tests.fakes.media.videos import Track, clip

_RATE: Final = 16_000
_FIVE_ONE: Final = (300.0, 700.0, 1100.0, 1500.0, 1900.0, 2300.0)


def sound_cases() -> list[Case]:
    parts = (
        _uncompressed,
        _compressed,
        _rates,
        _channels,
        _levels,
        _odd_headers,
        _onsets,
        _short,
        _broken,
        _other_files,
    )
    return [case for part in parts for case in part()]


def _sound(name: str, make: Callable[[], bytes], expect: Expectation) -> Case:
    return Case(name, Modality.AUDIO, make, expect)


def _refused(name: str, make: Callable[[], bytes], error: type[MediaError], words: str) -> Case:
    return _sound(name, make, Refusal(error, words))


def _written(kind: str, subtype: str, tones_hz: Sequence[float] = (440.0,), rate_hz: int = _RATE) -> bytes:
    return sound_file(sines(tones_hz, rate_hz, 1.0), rate_hz, kind, subtype)


def _uncompressed() -> Iterator[Case]:
    for subtype, tolerance in (
        ("PCM_U8", 0.01),
        ("PCM_16", 1e-3),
        ("PCM_24", 1e-3),
        ("PCM_32", 1e-3),
        ("FLOAT", 1e-3),
        ("DOUBLE", 1e-3),
        ("ULAW", 0.02),
        ("ALAW", 0.02),
        ("IMA_ADPCM", 0.03),
        ("MS_ADPCM", 0.03),
    ):
        block = 0.1 if "ADPCM" in subtype else 1e-4
        expect = Sound(_RATE, 1.0, (440.0,), tolerance=tolerance, tolerance_s=block)
        yield _sound(f"{subtype.lower()}.wav", partial(_written, "WAV", subtype), expect)
    exact = Sound(_RATE, 1.0, (440.0,), tolerance=1e-3)
    for kind, subtype, name in (
        ("WAVEX", "PCM_16", "extensible-16.wav"),
        ("WAVEX", "PCM_24", "extensible-24.wav"),
        ("WAVEX", "FLOAT", "extensible-float.wav"),
        ("RF64", "PCM_16", "rf64.wav"),
        ("AIFF", "PCM_16", "pcm-16.aiff"),
        ("AIFF", "PCM_24", "pcm-24.aiff"),
        ("AIFF", "FLOAT", "float.aifc"),
        ("AU", "PCM_16", "pcm-16.au"),
        ("AU", "FLOAT", "float.au"),
        ("CAF", "PCM_16", "pcm-16.caf"),
        ("CAF", "PCM_24", "pcm-24.caf"),
        ("CAF", "ALAC_16", "alac.caf"),
    ):
        yield _sound(name, partial(_written, kind, subtype), exact)


def _coded(container: str, codec: str, rate_hz: int, tones_hz: Sequence[float] = (440.0,)) -> bytes:
    return encoded(sines(tones_hz, rate_hz, 1.0), rate_hz, container, codec)


def _compressed() -> Iterator[Case]:
    exact = Sound(_RATE, 1.0, (440.0,), tolerance=1e-3)
    yield _sound("16.flac", partial(_written, "FLAC", "PCM_16"), exact)
    yield _sound("24.flac", partial(_written, "FLAC", "PCM_24"), exact)
    yield _sound("vorbis.ogg", partial(_written, "OGG", "VORBIS"), Sound(_RATE, 1.0, (440.0,), tolerance=0.03))
    yield _sound(
        "libsndfile.opus",
        partial(_written, "OGG", "OPUS", rate_hz=48_000),
        Sound(48_000, 1.0, (440.0,), tolerance=0.03, tolerance_s=0.03),
    )
    yield _sound(
        "libsndfile.mp3",
        partial(_written, "MP3", "MPEG_LAYER_III"),
        Sound(_RATE, 1.0, (440.0,), tolerance=0.03, tolerance_s=0.08),
    )
    # Encoders add up to two frames of silence, which not every container can take back.
    for name, container, codec, rate_hz, slack_s in (
        ("lame.mp3", "mp3", "libmp3lame", 44_100, 0.06),
        ("aac.m4a", "ipod", "aac", 44_100, 0.05),
        ("aac.mp4", "mp4", "aac", 48_000, 0.05),
        ("aac.aac", "adts", "aac", 44_100, 0.08),
        ("alac.m4a", "ipod", "alac", 44_100, 0.001),
        ("flac.ogg", "ogg", "flac", 44_100, 0.001),
        ("flac.mka", "matroska", "flac", 44_100, 0.002),
        ("opus.ogg", "ogg", "libopus", 48_000, 0.03),
        ("opus.webm", "webm", "libopus", 48_000, 0.03),
        ("opus-24k.ogg", "ogg", "libopus", 24_000, 0.03),
        ("wma.wma", "asf", "wmav2", 44_100, 0.15),
        ("ac3.ac3", "ac3", "ac3", 48_000, 0.07),
        ("pcm.mov", "mov", "pcm_s16le", 44_100, 0.001),
        ("wavpack.mka", "matroska", "wavpack", 44_100, 0.002),
        ("mp3.mka", "matroska", "libmp3lame", 44_100, 0.08),
    ):
        rate_out = 48_000 if codec == "libopus" else rate_hz
        expect = Sound(rate_out, 1.0, (440.0,), tolerance=0.03, tolerance_s=slack_s)
        yield _sound(f"{name}", partial(_coded, container, codec, rate_hz), expect)


def _rates() -> Iterator[Case]:
    for rate_hz in (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000, 192_000):
        expect = Sound(rate_hz, 1.0, (440.0,), tolerance=1e-3)
        yield _sound(f"rate-{rate_hz}.wav", partial(_written, "WAV", "PCM_16", rate_hz=rate_hz), expect)
    # No tone may come back as another one below 12 kHz.
    above = Sound(96_000, 1.0, (20_000.0,), tolerance=1e-3)
    yield _sound("ultrasound.wav", partial(_written, "WAV", "PCM_16", (20_000.0,), 96_000), above)
    prime = Sound(44_101, 1.0, (440.0,), tolerance=1e-3)
    yield _sound("odd-rate.wav", partial(_written, "WAV", "PCM_16", rate_hz=44_101), prime)
    slow = partial(wav, bytes(200), rate_hz=1, channels=1, bits=16)
    yield _refused("rate-of-1.wav", slow, MediaUnsupported, "1 Hz")


def _channels() -> Iterator[Case]:
    exact = partial(Sound, _RATE, 1.0, tolerance=1e-3)
    for name, tones in (
        ("stereo", (440.0, 1000.0)),
        ("one-side", (440.0, 0.0)),
        ("three", (440.0, 1000.0, 2000.0)),
        ("5.1", _FIVE_ONE),
        ("7.1", (*_FIVE_ONE, 2700.0, 3100.0)),
    ):
        yield _sound(f"{name}.wav", partial(_written, "WAV", "PCM_16", tones), exact(tones))
    yield _sound("stereo.flac", partial(_written, "FLAC", "PCM_16", (440.0, 1000.0)), exact((440.0, 1000.0)))
    lossy = partial(Sound, tolerance=0.05, tolerance_s=0.06)
    yield _sound(
        "stereo.mp3", partial(_coded, "mp3", "libmp3lame", 44_100, (440.0, 1000.0)), lossy(44_100, 1.0, (440.0, 1000.0))
    )
    yield _sound(
        "stereo.m4a", partial(_coded, "ipod", "aac", 44_100, (440.0, 1000.0)), lossy(44_100, 1.0, (440.0, 1000.0))
    )
    yield _sound(
        "5.1.flac", partial(_coded, "flac", "flac", 48_000, _FIVE_ONE), Sound(48_000, 1.0, _FIVE_ONE, tolerance=1e-3)
    )
    # Two samples for two channels: the shorter side is not time.
    two = partial(wav, packed(np.full((2, 2), 0.5), 16), rate_hz=_RATE, channels=2, bits=16)
    yield _sound("2-samples-stereo.wav", two, Sound(_RATE, 2 / _RATE, (0.0, 0.0), amplitude=0.5))


def _levels() -> Iterator[Case]:
    silence = Sound(_RATE, 1.0, (0.0,), amplitude=0.0)
    yield _sound("silence.wav", partial(_written, "WAV", "PCM_16", (0.0,)), silence)
    yield _sound(
        "silence.mp3",
        partial(_coded, "mp3", "libmp3lame", 44_100, (0.0,)),
        Sound(44_100, 1.0, (0.0,), amplitude=0.0, tolerance_s=0.06),
    )
    loud = sines((440.0,), _RATE, 1.0, amplitude=3.0)
    make = partial(sound_file, loud, _RATE, "WAV", "FLOAT")
    yield _sound("above-full-scale.wav", make, Sound(_RATE, 1.0, (440.0,), amplitude=3.0, tolerance=1e-3))
    full = sines((440.0,), _RATE, 1.0, amplitude=1.0)
    yield _sound(
        "full-scale.wav",
        partial(sound_file, full, _RATE, "WAV", "PCM_16"),
        Sound(_RATE, 1.0, (440.0,), amplitude=1.0, tolerance=1e-3),
    )
    soft = sines((440.0,), _RATE, 1.0, amplitude=0.002)
    yield _sound(
        "soft-24.wav",
        partial(sound_file, soft, _RATE, "WAV", "PCM_24"),
        Sound(_RATE, 1.0, (440.0,), amplitude=0.002, tolerance=1e-5),
    )


def _odd_headers() -> Iterator[Case]:
    tone = sines((440.0,), _RATE, 1.0)
    exact = Sound(_RATE, 1.0, (440.0,), tolerance=1e-3)
    form: dict[str, Any] = {"rate_hz": _RATE, "channels": 1}
    for bits in (8, 16, 24, 32):
        expect = Sound(_RATE, 1.0, (440.0,), tolerance=0.01 if bits == 8 else 1e-3)
        make = partial(
            wav,
            packed(tone, bits),
            bits=bits,
            before=riff_chunk(b"JUNK", bytes(28)),
            after=riff_chunk(b"LIST", b"INFOISFT" + bytes(7)),
            **form,
        )
        yield _sound(f"chunks-around-{bits}.wav", make, expect)
    for name, declared in (("0", 0), ("ffffffff", 0xFFFFFFFF), ("7fffffff", 0x7FFFFFFF)):
        make = partial(wav, packed(tone, 16), bits=16, declared=declared, **form)
        yield _sound(f"recorded-to-a-pipe-{name}.wav", make, exact)
    floats = tone.astype("<f4").tobytes()
    yield _sound(
        "float-with-chunks.wav",
        partial(
            wav,
            floats,
            bits=32,
            form=3,
            before=riff_chunk(b"fact", bytes(4)),
            after=riff_chunk(b"id3 ", bytes(33)),
            **form,
        ),
        exact,
    )
    mp3 = Sound(44_100, 1.0, (440.0,), tolerance=0.03, tolerance_s=0.06)
    yield _sound("tag-of-sync-words.mp3", lambda: id3_tag(50_000) + _coded("mp3", "libmp3lame", 44_100), mp3)
    yield _sound("tag-behind.mp3", lambda: _coded("mp3", "libmp3lame", 44_100) + b"TAG" + bytes(125), mp3)
    yield _sound("wav-inside.mp3", partial(_written, "WAV", "PCM_16"), exact)
    yield _sound("mp3-inside.wav", partial(_coded, "mp3", "libmp3lame", 44_100), mp3)


def _onsets() -> Iterator[Case]:
    """Half a second of silence, then the tone. Encoders put 10 to 50 ms in front, and say how much."""
    for name, container, codec, rate_hz in (
        ("onset.mp3", "mp3", "libmp3lame", 44_100),
        ("onset.m4a", "ipod", "aac", 44_100),
        ("onset.mp4", "mp4", "aac", 24_000),
        ("onset.mka", "matroska", "aac", 44_100),
        ("onset.ogg", "ogg", "libopus", 48_000),
        ("onset.webm", "webm", "libopus", 48_000),
        ("onset.flac", "flac", "flac", 44_100),
    ):
        expect = Sound(rate_hz, 1.0, (440.0,), tolerance_s=0.06, onset_s=0.5)
        yield _sound(name, partial(_late_tone, container, codec, rate_hz), expect)
    vorbis = Sound(_RATE, 1.0, (440.0,), tolerance_s=0.01, onset_s=0.5)
    yield _sound("onset-vorbis.ogg", lambda: sound_file(_late(_RATE), _RATE, "OGG", "VORBIS"), vorbis)


def _late(rate_hz: int) -> NDArray[np.float64]:
    samples = sines((440.0,), rate_hz, 1.0)
    samples[: rate_hz // 2] = 0
    return samples


def _late_tone(container: str, codec: str, rate_hz: int) -> bytes:
    return encoded(_late(rate_hz), rate_hz, container, codec)


def _short() -> Iterator[Case]:
    for num_samples in (1, 2, 100, 241):
        tone = np.full((num_samples, 1), 0.5)
        expect = Sound(_RATE, num_samples / _RATE, (0.0,), amplitude=0.5, tolerance_s=1e-9)
        yield _sound(f"{num_samples}-samples.wav", partial(sound_file, tone, _RATE, "WAV", "PCM_16"), expect)
    brief = sines((440.0,), 44_100, 0.01)
    yield _sound(
        "10-ms.flac", partial(sound_file, brief, 44_100, "FLAC", "PCM_16"), Sound(44_100, 0.01, (440.0,), tolerance=0.2)
    )


def _broken() -> Iterator[Case]:
    tone = sines((440.0,), _RATE, 1.0)
    for name, value in (("nan", np.nan), ("infinite", np.inf)):
        bad = tone.copy()
        bad[5000] = value
        yield _refused(f"{name}.wav", partial(sound_file, bad, _RATE, "WAV", "FLOAT"), MediaUndecodable, "not finite")
    for kind, extension in (("WAV", "wav"), ("AIFF", "aiff"), ("AU", "au"), ("CAF", "caf")):
        empty = partial(sound_file, np.zeros((0, 1)), _RATE, kind, "PCM_16")
        yield _refused(
            f"no-samples.{extension}", empty, MediaUndecodable, "no decodable audio|no samples|cannot be opened"
        )
    # STREAMINFO, the last block of the header: 16 kHz, 1 channel, 16 bits, an unknown number of samples; no frames.
    info = bytes.fromhex("10001000") + bytes(6) + (16_000 << 44 | 15 << 36).to_bytes(8, "big") + bytes(16)
    yield _refused("no-frames.flac", lambda: b"fLaC\x80\0\0\x22" + info, MediaUndecodable, "no decodable audio")
    for name, make in (
        ("cut.wav", partial(_written, "WAV", "PCM_16")),
        ("cut-24.wav", partial(_written, "WAV", "PCM_24")),
        ("cut.flac", partial(_written, "FLAC", "PCM_16")),
        ("cut.aiff", partial(_written, "AIFF", "PCM_16")),
        ("cut.au", partial(_written, "AU", "PCM_16")),
        ("cut.ogg", partial(_written, "OGG", "VORBIS")),
    ):
        for percent in (50, 90):
            yield _refused(
                f"{percent}-{name}", partial(_first_percent, make, percent), MediaUndecodable, "truncated|damaged"
            )
    yield _refused(
        "cut.m4a",
        partial(_first_percent, partial(_coded, "ipod", "aac", 44_100), 50),
        MediaUndecodable,
        "cannot be opened|truncated",
    )
    yield _refused(
        "header-alone.wav", lambda: _written("WAV", "PCM_16")[:44], MediaUndecodable, "truncated|no decodable|damaged"
    )
    yield _refused(
        "head-of-header.flac",
        lambda: _written("FLAC", "PCM_16")[:20],
        MediaUndecodable,
        "damaged|cannot be opened|truncated",
    )
    yield _refused(
        "noise.mp3", lambda: b"ID3\3\0\0\0\0\0\0" + np.random.default_rng(3).bytes(3000), MediaUndecodable, "MP3"
    )
    yield _refused("empty.wav", bytes, MediaUndecodable, "empty file")
    yield _refused("lasts-too-long.wav", _hours, MediaTooLarge, "7200 s")


def _first_percent(make: Callable[[], bytes], percent: int) -> bytes:
    content = make()
    return content[: len(content) * percent // 100]


def _hours() -> bytes:
    """Three hours at 1 kHz of 8 bits: ten megabytes."""
    return wav(bytes([128]) * (3 * 3600 * 1000), rate_hz=1000, channels=1, bits=8)


def _other_files() -> Iterator[Case]:
    video = partial(clip, range(10), tracks=(Track(1.0, 1000.0),))
    yield _sound("sound-of-a-video.mp4", video, Sound(24_000, 1.0, (1000.0,), tolerance=0.03, tolerance_s=0.1))
    yield _refused("silent-video.mp4", partial(clip, range(10)), MediaUndecodable, "no decodable audio")
    for name, content, error, words in (
        ("words.wav", b"not a sound", MediaUndecodable, "text"),
        ("page.mp3", b"<html><body>404</body></html>", MediaUnsupported, "HTML"),
        ("playlist.m3u", b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/x.mp3\n", MediaUnsupported, "HLS playlist"),
        ("zeros.wav", bytes(4000), MediaUndecodable, "unknown data"),
    ):
        yield _refused(name, partial(bytes, content), error, words)
