"""Every container and codec: duration to the sample where the format declares it, pitch, level, channels, no delay.

Long, because all of it is one list of kinds of file and shares their writers.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, cast

import av
import numpy as np
import pytest
from av.stream import Disposition
from numpy.typing import NDArray

from preprocess import (
    DecodeLimits,
    MediaDecodeTimeout,
    MediaOptions,
    MediaTooLarge,
    MediaUndecodable,
    MediaUnsupported,
    Modality,
    ProcessorConfig,
    Waveform,
    media_key,
)
from preprocess.audio import audio_mel, decode_audio, decode_track, log_mel, track_mel
from preprocess.config import AudioBudget
from preprocess.container import PacketReader
from tests.fakes.clips import make_video, sine, sound_file

LIMITS = DecodeLimits()
BUDGET = AudioBudget()
LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}


def song(rate_hz: int, channels: int = 1, *, num_samples: int | None = None) -> NDArray[np.float32]:
    """[N, channels]: a tone of 440 Hz that starts late, so that a delay shows; an odd number of samples."""
    num_samples = rate_hz + 777 if num_samples is None else num_samples
    samples = sine(num_samples / rate_hz + 1, rate_hz=rate_hz, channels=channels)[:num_samples]
    samples[: num_samples // 3] = 0
    return samples


def encoded(
    samples_NC: NDArray[np.float32],
    rate_hz: int,
    container: str,
    codec: str,
    *,
    options: dict[str, str] | None = None,
    muxer: dict[str, str] | None = None,
) -> bytes:
    """[N, channels] through FFmpeg."""
    file = io.BytesIO()
    with av.open(file, mode="w", format=container, options=muxer or {}) as output:
        _encode(output, samples_NC, rate_hz, codec, options)
    return file.getvalue()


def _encode(output: Any, samples_NC: NDArray[np.float32], rate_hz: int, codec: str, options: Any = None) -> None:
    stream = output.add_stream(codec, rate=rate_hz, layout=LAYOUTS[samples_NC.shape[1]], options=options or {})
    _fill(output, stream, samples_NC, rate_hz)


def _fill(output: Any, stream: Any, samples_NC: NDArray[np.float32], rate_hz: int) -> None:
    for start in range(0, len(samples_NC), 960):
        block = np.ascontiguousarray(samples_NC[start : start + 960]).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(block, format="flt", layout=LAYOUTS[samples_NC.shape[1]])
        frame.sample_rate, frame.pts, frame.time_base = rate_hz, start, Fraction(1, rate_hz)
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


def mp3(samples_NC: NDArray[np.float32], rate_hz: int = 44_100, *, header: bool = True, **options: str) -> bytes:
    muxer = {} if header else {"write_xing": "0", "id3v2_version": "0"}
    return encoded(samples_NC, rate_hz, "mp3", "libmp3lame", options=options, muxer=muxer)


def peak_hz(samples_N: NDArray[np.float32], rate_hz: int) -> float:
    return float(np.abs(np.fft.rfft(samples_N)).argmax() * rate_hz / len(samples_N))


def onset(samples_N: NDArray[np.float32]) -> int:
    """Where the sound rises to a quarter of its peak for good."""
    return int(np.argmax(np.abs(samples_N) > 0.12))


def check(waveform: Waveform, samples_NC: NDArray[np.float32], rate_hz: int, delay: tuple[int, int]) -> None:
    assert (waveform.samples.shape[0], waveform.rate_hz) == (samples_NC.shape[1], rate_hz)
    for channel_N in waveform.samples:
        assert peak_hz(channel_N[len(channel_N) // 2 :], rate_hz) == pytest.approx(440, abs=5)
        steady_N = channel_N[len(channel_N) // 2 : -2048]
        assert np.sqrt(2 * np.square(steady_N).mean()) == pytest.approx(0.5, abs=0.07)
        assert delay[0] <= onset(channel_N) - onset(samples_NC[:, 0]) <= delay[1]


EXACT: list[tuple[str, str, int, int]] = [
    # container, codec, rate, channels
    *[
        ("wav", codec, 44_100, 2)
        for codec in ("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le")
    ],
    *[("wav", codec, 8000, 1) for codec in ("pcm_alaw", "pcm_mulaw")],
    *[("wav", "pcm_s16le", 48_000, channels) for channels in (6, 8)],
    *[("w64", "pcm_s24le", 44_100, 2), ("aiff", "pcm_s16be", 44_100, 2), ("au", "pcm_s16be", 44_100, 1)],
    *[("caf", "pcm_s24be", 44_100, 2), ("caf", "pcm_f32be", 44_100, 2)],
    *[("flac", "flac", rate_hz, 2) for rate_hz in (8000, 44_100, 96_000, 192_000)],
    *[("flac", "flac", 48_000, channels) for channels in (1, 6, 8)],
    *[("ogg", "flac", 44_100, 2), ("matroska", "flac", 44_100, 2), ("mp4", "flac", 44_100, 2)],
    *[("mp3", "libmp3lame", rate_hz, 1) for rate_hz in (8000, 16_000, 22_050, 32_000, 44_100, 48_000)],
    *[("mp3", "libmp3lame", 44_100, 2), ("ipod", "alac", 44_100, 2), ("mov", "pcm_s16le", 44_100, 2)],
    *[("ipod", "aac", rate_hz, 1) for rate_hz in (8000, 22_050, 44_100, 96_000)],
    *[("mp4", "aac", 48_000, 2), ("mp4", "libopus", 48_000, 2), ("mov", "aac", 44_100, 2)],
    *[(container, "libopus", 48_000, channels) for container in ("ogg", "webm") for channels in (1, 2, 6)],
    ("matroska", "pcm_s16le", 44_100, 2),
]


@pytest.mark.parametrize(("container", "codec", "rate_hz", "channels"), EXACT)
def test_kinds_that_declare_their_length(container: str, codec: str, rate_hz: int, channels: int) -> None:
    samples = song(rate_hz, channels)
    content = encoded(samples, rate_hz, container, codec)
    waveform, warnings = decode_audio(content, LIMITS)
    assert warnings == ()
    # The one writer that pads to whole bytes of 8.
    assert waveform.samples.shape[1] - len(samples) in ((0, 1, 2, 3) if container == "w64" else (0,))
    # Codecs ring before the onset; some filter the lowest rates.
    check(waveform, samples, rate_hz, (-60, 60))
    mel, _ = audio_mel(content, BUDGET, LIMITS)
    np.testing.assert_array_equal(mel.log_mel, log_mel(waveform, BUDGET).log_mel)
    assert mel.duration_s == pytest.approx(waveform.duration_s)


@pytest.mark.parametrize(
    ("container", "codec", "rate_hz", "channels", "delay"),
    [
        # Nothing in these says how many samples come before the sound.
        ("adts", "aac", 44_100, 2, 1024),
        ("mpegts", "aac", 44_100, 2, 1024),
        ("flv", "aac", 44_100, 2, 1024),
        ("avi", "libmp3lame", 44_100, 2, 1105),
        ("mp2", "mp2", 44_100, 2, 481),
        ("ac3", "ac3", 48_000, 2, 256),
        ("matroska", "aac", 44_100, 2, 0),
        ("mp4", "libmp3lame", 44_100, 2, 0),
        ("amr", "libopencore_amrnb", 8000, 1, 100),
        ("wav", "adpcm_ms", 44_100, 2, 0),
        ("wav", "adpcm_ima_wav", 44_100, 2, 0),
    ],
)
def test_kinds_that_do_not(container: str, codec: str, rate_hz: int, channels: int, delay: int) -> None:
    samples = song(rate_hz, channels)
    waveform, warnings = decode_audio(encoded(samples, rate_hz, container, codec), LIMITS)
    assert warnings == ()
    assert 0 <= waveform.samples.shape[1] - len(samples) <= delay + 1152
    check(waveform, samples, rate_hz, (delay - 80, delay + 80))


@pytest.mark.parametrize("kind", ["OGG", "WAVEX", "RF64", "BW64"])
def test_kinds_libsndfile_writes(kind: str) -> None:
    samples = song(44_100, 2)
    content = sound_file(samples, 44_100, kind="RF64" if kind == "BW64" else kind)
    waveform, _ = decode_audio(kind.encode() + content[4:] if kind == "BW64" else content, LIMITS)
    assert waveform.samples.shape == samples.T.shape
    check(waveform, samples, 44_100, (-60, 60))


def rifx(samples_NC: NDArray[np.float32], rate_hz: int) -> bytes:
    """WAV with every number turned round."""
    data = (samples_NC * 32767).astype(">i2").tobytes()
    channels = samples_NC.shape[1]
    form = struct.pack(">HHIIHH", 1, channels, rate_hz, 2 * channels * rate_hz, 2 * channels, 16)
    size = struct.pack(">I", 36 + len(data))
    return b"RIFX" + size + b"WAVEfmt " + struct.pack(">I", 16) + form + b"data" + struct.pack(">I", len(data)) + data


def test_a_wav_of_big_endian_numbers() -> None:
    samples = song(44_100, 2)
    waveform, _ = decode_audio(rifx(samples, 44_100), LIMITS)
    np.testing.assert_allclose(waveform.samples.T, samples, atol=1e-4)
    with pytest.raises(MediaUndecodable, match="truncated audio"):
        decode_audio(rifx(samples, 44_100)[:5000], LIMITS)
    # Refused rather than played as noise.
    unsized = rifx(samples, 44_100)[:40] + bytes(4) + rifx(samples, 44_100)[44:]
    with pytest.raises(MediaUndecodable, match="no decodable audio"):
        decode_audio(unsized, LIMITS)


@pytest.mark.parametrize(
    ("options", "header"), [({}, False), ({"compression_level": "9"}, True), ({"joint_stereo": "0"}, True)]
)
def test_mp3_variants(options: dict[str, str], header: bool) -> None:
    samples = song(44_100, 2)
    waveform, warnings = decode_audio(mp3(samples, header=header, **options), LIMITS)
    assert warnings == ()
    delay = 0 if header else 1105
    assert waveform.samples.shape[1] - len(samples) == (0 if header else 1203)
    check(waveform, samples, 44_100, (delay - 60, delay + 60))


@pytest.mark.parametrize("options", [{"abr": "1", "b": "96000"}, {"qscale": "4"}])
def test_a_variable_mp3_without_a_header_is_whole(options: dict[str, str]) -> None:
    samples = song(44_100, 2)
    waveform, warnings = decode_audio(mp3(samples, header=False, **options), LIMITS)
    assert warnings == ()
    assert waveform.samples.shape[1] >= len(samples)


def id3(num_bytes: int) -> bytes:
    """A tag of a picture that is full of what looks like the start of a frame."""
    return (
        b"ID3\4\0\0"
        + bytes(num_bytes >> shift & 127 for shift in (21, 14, 7, 0))
        + (b"\xff\xfb" * num_bytes)[:num_bytes]
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (id3(10), b""),
        (id3(3_000_000), b""),
        (id3(100) + id3(5000), b"TAG" + bytes(125)),
        (b"", b"TAG" + b"song".ljust(125)),
    ],
)
def test_tags_around_an_mp3(before: bytes, after: bytes) -> None:
    samples = song(44_100, 2)
    content = encoded(samples, 44_100, "mp3", "libmp3lame", muxer={"id3v2_version": "0"})
    waveform, warnings = decode_audio(before + content + after, LIMITS)
    assert warnings == ()
    assert waveform.samples.shape[1] == len(samples)
    check(waveform, samples, 44_100, (-60, 60))
    # The announced length is found behind the tag.
    _, (warning,) = decode_audio((before + content)[: len(before) + len(content) // 2], LIMITS)
    assert "samples more than it holds" in warning


@pytest.mark.parametrize("junk", [bytes(700), np.random.default_rng(0).bytes(3000)])
def test_an_mp3_behind_junk(junk: bytes) -> None:
    samples = song(44_100, 2)
    waveform, _ = decode_audio(b"ID3\3\0\0\0\0\0\0" + junk + mp3(samples, header=False), LIMITS)
    assert waveform.samples.shape[1] == pytest.approx(len(samples) + 1203, abs=2 * 1152)


@pytest.mark.parametrize("kind", ["flac", "adts"])
def test_other_kinds_behind_an_id3_tag(kind: str) -> None:
    samples = song(44_100, 2)
    content = encoded(samples, 44_100, kind, {"flac": "flac", "adts": "aac"}[kind])
    tagged, _ = decode_audio(id3(1000) + content, LIMITS)
    plain, _ = decode_audio(content, LIMITS)
    np.testing.assert_allclose(tagged.samples, plain.samples, atol=1e-6)


def vorbis(samples_NC: NDArray[np.float32], rate_hz: int) -> bytes:
    return sound_file(samples_NC, rate_hz, kind="OGG", subtype="VORBIS")


def opus(samples_NC: NDArray[np.float32], rate_hz: int) -> bytes:
    return encoded(samples_NC, rate_hz, "ogg", "libopus")


@pytest.mark.parametrize("write", [vorbis, opus])
def test_chained_ogg_is_whole(write: Callable[[NDArray[np.float32], int], bytes]) -> None:
    samples = song(48_000, 2)
    waveform, warnings = decode_audio(write(samples, 48_000) * 3, LIMITS)
    assert warnings == ()
    assert waveform.samples.shape[1] == 3 * len(samples)
    with pytest.raises(MediaUndecodable, match="truncated audio"):
        decode_audio((write(samples, 48_000) * 2)[:-500], LIMITS)


def joined_ogg() -> bytes:
    return vorbis(song(44_100, 2), 44_100) + vorbis(song(22_050, 1), 22_050)


def joined_adts() -> bytes:
    return b"".join(
        encoded(song(rate_hz, channels), rate_hz, "adts", "aac") for rate_hz, channels in ((44_100, 2), (22_050, 1))
    )


def joined_ts() -> bytes:
    return b"".join(encoded(song(44_100, channels), 44_100, "mpegts", "aac") for channels in (2, 1))


def joined_mp3() -> bytes:
    return b"".join(mp3(song(44_100, channels), header=False) for channels in (2, 1))


@pytest.mark.parametrize("write", [joined_ogg, joined_adts, joined_ts, joined_mp3])
def test_sound_that_changes_its_form(write: Callable[[], bytes]) -> None:
    content = write()
    mel, (warning,) = audio_mel(content, BUDGET, LIMITS)
    assert warning.startswith("the sound changes on the way, from 2 channels at 44100 Hz to 1 channel at ")
    seconds = [
        len(song(44_100)) / 44_100,
        len(song(22_050)) / 22_050 if "22050" in warning else len(song(44_100)) / 44_100,
    ]
    assert mel.duration_s == pytest.approx(sum(seconds), abs=0.2)
    assert len(mel.log_mel) == pytest.approx(100 * sum(seconds), abs=20)
    # Both parts hold the tone, at the same pitch: 440 Hz lies in the same band.
    first, second = mel.log_mel[60:95], mel.log_mel[-30:-10]
    assert np.median(first.argmax(axis=1)) == np.median(second.argmax(axis=1))
    with pytest.raises(MediaUnsupported, match="changes on the way"):
        decode_audio(content, LIMITS)


def two_tracks(container: str, default: int | None) -> bytes:
    """Tracks of 440 Hz and 880 Hz, in this order."""
    file = io.BytesIO()
    tones = (sine(1.0, rate_hz=48_000), sine(1.0, rate_hz=48_000, tone_hz=880.0))
    with av.open(file, mode="w", format=container) as output:
        streams: list[Any] = [output.add_stream("aac", rate=48_000, layout="mono") for _ in tones]
        for index, stream in enumerate(streams):
            stream.disposition = Disposition.default if index == default else Disposition(0)
        for stream, tone in zip(streams, tones, strict=True):
            _fill(output, stream, tone, 48_000)
    return file.getvalue()


@pytest.mark.parametrize("container", ["matroska", "mp4"])
@pytest.mark.parametrize(("default", "expected_hz"), [(0, 440), (1, 880), (None, 440)])
def test_the_default_track_is_taken(container: str, default: int | None, expected_hz: int) -> None:
    if container == "mp4" and default == 1:
        expected_hz = 880
    waveform, _ = decode_track(two_tracks(container, default), LIMITS)
    assert waveform is not None
    assert peak_hz(waveform.samples[0], 48_000) == pytest.approx(expected_hz, abs=5)


@pytest.mark.parametrize("channels", [2, 6, 8])
@pytest.mark.parametrize(("container", "codec"), [("wav", "pcm_s16le"), ("flac", "flac"), ("matroska", "pcm_f32le")])
def test_channels_keep_their_order_and_count_alike(container: str, codec: str, channels: int) -> None:
    tones = [300.0 * (channel + 1) for channel in range(channels)]
    samples = np.concatenate([sine(0.5, rate_hz=48_000, tone_hz=tone) for tone in tones], axis=1)
    content = encoded(samples, 48_000, container, codec)
    waveform, _ = decode_audio(content, LIMITS)
    found = [peak_hz(channel_N, 48_000) for channel_N in waveform.samples]
    assert found == pytest.approx(tones, abs=3)
    # Every channel has the same share of the mono sound, the bass too.
    mel, _ = audio_mel(content, BUDGET, LIMITS)
    mono = log_mel(Waveform(samples.mean(axis=1)[None].astype(np.float32), 48_000), BUDGET)
    np.testing.assert_allclose(np.exp(mel.log_mel[5:-5]), np.exp(mono.log_mel[5:-5]), atol=2e-2)


@pytest.mark.parametrize("kind", ["adts", "amr"])
def test_streams_that_are_cut_short_give_a_warning(kind: str) -> None:
    content = encoded(song(8000, 1), 8000, kind, {"adts": "aac", "amr": "libopencore_amrnb"}[kind])
    _, warnings = decode_audio(content[: int(0.6 * len(content)) + 3], LIMITS)
    assert warnings


@pytest.mark.parametrize("kind", ["W64", "CAF"])
def test_unknown_sizes_declare_nothing(kind: str) -> None:
    content = bytearray(sound_file(song(24_000), kind=kind))
    at = content.index(b"data") + {"W64": 16, "CAF": 4}[kind]
    content[at : at + 8] = b"\xff" * 8
    assert decode_audio(bytes(content), LIMITS)[0].samples.shape[1] >= len(song(24_000))


@pytest.mark.parametrize(
    "write",
    [
        lambda samples: sound_file(samples, 48_000),
        lambda samples: sound_file(samples, 48_000, kind="FLAC"),
        lambda samples: mp3(samples, 48_000, header=False),
        lambda samples: opus(samples, 48_000),
        lambda samples: vorbis(samples, 48_000) * 2,
        lambda samples: encoded(samples, 48_000, "adts", "aac"),
    ],
    ids=["wav", "flac", "mp3", "opus", "chained vorbis", "adts"],
)
def test_limits_hold_in_every_decoder(write: Callable[[NDArray[np.float32]], bytes]) -> None:
    content = write(song(48_000, num_samples=60_000))
    with pytest.raises(MediaTooLarge, match="over 1 s"):
        audio_mel(content, BUDGET, DecodeLimits(max_duration_s=1.2))
    calls = 0

    def stop_at_second() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MediaDecodeTimeout("late")

    with pytest.raises(MediaDecodeTimeout):
        audio_mel(write(song(48_000, 2, num_samples=300_000)), BUDGET, LIMITS, check_deadline=stop_at_second)


def test_a_header_of_hours_is_refused_before_decoding() -> None:
    content = bytearray(sound_file(song(24_000), kind="FLAC"))
    content[21] |= 0x0F
    content[22:26] = b"\xff" * 4

    def never() -> None:
        raise AssertionError("decoded")

    with pytest.raises(MediaTooLarge):
        audio_mel(bytes(content), BUDGET, LIMITS, check_deadline=never)


def test_absurd_numbers_of_channels_are_refused() -> None:
    with pytest.raises(MediaUnsupported, match="100 channels"):
        audio_mel(sound_file(np.zeros((10, 100), np.float32)), BUDGET, LIMITS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_a_number_is_refused_or_left_out(value: float) -> None:
    samples = song(24_000)
    samples[10_000:20_000] = value
    with pytest.raises(MediaUndecodable, match=r"not finite|too large"):
        audio_mel(sound_file(samples, subtype="FLOAT"), BUDGET, LIMITS)
    track = encoded(samples, 24_000, "matroska", "pcm_f32le")
    mel, (warning,) = track_mel(track, BUDGET, LIMITS)
    assert mel is None
    assert warning.endswith("left out")


def test_the_track_of_a_video_is_its_mel() -> None:
    content = make_video(10, sound=sine(1.0)[:, 0])
    waveform, _ = decode_track(content, LIMITS)
    mel, warnings = track_mel(content, BUDGET, LIMITS)
    assert waveform is not None
    assert mel is not None
    assert warnings == ()
    np.testing.assert_array_equal(mel.log_mel, log_mel(waveform, BUDGET).log_mel)
    assert track_mel(make_video(3), BUDGET, LIMITS) == (None, ())


def test_a_track_that_appears_on_the_way_is_no_error() -> None:
    class Container:
        """PyAV, where a joined file has more tracks at its end than at its start."""

        def demux(self, _: object) -> Iterator[str]:
            yield "packet"
            raise IndexError

    reader = PacketReader(cast(Any, Container()), None)
    assert list(reader) == ["packet"]
    assert reader.damage is None


def test_the_resampler_is_a_setting_and_part_of_the_key(golden: dict[str, Any]) -> None:
    def config(**extra: object) -> ProcessorConfig:
        return ProcessorConfig.from_hf({"processor_config": {**golden["processor_config"]["tiny"], **extra}})

    content = sound_file(song(48_000), 48_000)
    keys, mels = [], []
    for chosen in (config(), config(audio_resampler="published"), config(audio_resampler="soxr_hq")):
        keys.append(
            media_key(content, modality=Modality.AUDIO, options=MediaOptions(), processor=chosen, tower_fingerprint="x")
        )
        mels.append(audio_mel(content, chosen.audio, LIMITS)[0].log_mel)
    assert keys[0] == keys[1] != keys[2]
    assert config().fingerprint() != config(audio_resampler="soxr_hq").fingerprint()
    np.testing.assert_array_equal(mels[0], mels[1])
    assert mels[0].shape == mels[2].shape
    assert np.abs(mels[0] - mels[2]).max() > 0.01
    with pytest.raises(ValueError, match=r"processor_config\.audio_resampler is 'best', allowed is"):
        config(audio_resampler="best")


@pytest.mark.parametrize("milliseconds", [1, 333, 500, 1000])
@pytest.mark.parametrize("codec", ["aac", "libopus", "flac"])
def test_an_mp4_that_is_cut_by_its_edit_list(milliseconds: int, codec: str) -> None:
    """Editors leave the packets as they are and tell the player where to stop, in milliseconds here."""
    content = bytearray(encoded(song(48_000, 2), 48_000, "mp4", codec))
    at = content.index(b"elst") + 12
    content[at : at + 4] = struct.pack(">I", milliseconds)
    waveform, warnings = decode_audio(bytes(content), LIMITS)
    assert warnings == ()
    assert 0 <= waveform.samples.shape[1] - 48 * milliseconds <= 48
    whole, _ = decode_audio(encoded(song(48_000, 2), 48_000, "mp4", codec), LIMITS)
    np.testing.assert_allclose(waveform.samples, whole.samples[:, : waveform.samples.shape[1]], atol=1e-6)
