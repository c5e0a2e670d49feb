"""Sound decoding, resampling and the mel front end."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import DecodeLimits, MediaError, MediaTooLarge, MediaUndecodable, MediaUnsupported, Waveform, audio
from preprocess.audio import decode_track, log_mel, resample
from preprocess.config import AudioBudget
from tests.fakes.clips import make_video, picture_file, sine, sound_file

LIMITS = DecodeLimits()


def decode_audio(content: bytes, limits: DecodeLimits) -> Waveform:
    """The sound of a file that gives no warning."""
    waveform, warnings = audio.decode_audio(content, limits)
    assert warnings == ()
    return waveform


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_wav_of_every_width(subtype: str, channels: int) -> None:
    samples = sine(0.1, rate_hz=16_000, channels=channels) * np.linspace(0.5, 1, channels, dtype=np.float32)
    waveform = decode_audio(sound_file(samples, 16_000, subtype=subtype), LIMITS)
    assert waveform.rate_hz == 16_000
    assert waveform.samples.shape == (channels, 1600)
    np.testing.assert_allclose(waveform.samples.T, samples, atol=1 / 120 if subtype == "PCM_U8" else 1e-4)


def test_float_peaks_above_one_are_kept() -> None:
    samples = 3 * sine(0.1)
    assert decode_audio(sound_file(samples, subtype="FLOAT"), LIMITS).samples.max() == pytest.approx(1.5, abs=1e-3)


@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)])
@pytest.mark.parametrize("channels", [1, 2])
def test_compressed_kinds(kind: str, subtype: str | None, channels: int) -> None:
    samples = sine(0.5, rate_hz=48_000, channels=channels)
    waveform = decode_audio(sound_file(samples, 48_000, kind=kind, subtype=subtype), LIMITS)
    assert waveform.samples.shape[0] == channels
    assert waveform.duration_s == pytest.approx(0.5, abs=0.06)
    assert peak_hz(waveform) == pytest.approx(440, abs=10)


def peak_hz(waveform: Waveform) -> float:
    spectrum = np.abs(np.fft.rfft(waveform.samples[0]))
    return float(spectrum.argmax() * waveform.rate_hz / waveform.samples.shape[1])


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_the_track_of_a_video(container: str) -> None:
    content = make_video(10, container=container, sound=sine(1.0)[:, 0])
    waveform, warnings = decode_track(content, LIMITS)
    assert waveform is not None
    assert warnings == ()
    assert waveform.duration_s == pytest.approx(1.0, abs=0.1)
    assert peak_hz(waveform) == pytest.approx(440, abs=10)
    np.testing.assert_array_equal(decode_audio(content, LIMITS).samples, waveform.samples)


@pytest.mark.parametrize("layout", ["mono", "stereo", "5.1", "7.1"])
def test_tracks_of_many_channels(layout: str) -> None:
    content = make_video(10, container="matroska", sound=sine(1.0)[:, 0], sound_layout=layout)
    waveform, _ = decode_track(content, LIMITS)
    assert waveform is not None
    assert waveform.samples.shape[0] == {"mono": 1, "stereo": 2, "5.1": 6, "7.1": 8}[layout]
    # The bass channel of 5.1 and 7.1 is band limited by the codec; every other one holds the tone.
    loud = np.abs(waveform.samples[:, 5000:15_000]).max(axis=1)
    assert (loud > 0.3).sum() >= waveform.samples.shape[0] - 1
    np.testing.assert_allclose(waveform.samples[0, 5000:15_000], waveform.samples[-1, 5000:15_000], atol=0.1)


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 8, 12])
@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_both_decoders_agree_on_every_width(channels: int, subtype: str) -> None:
    samples = sine(0.05, channels=channels) * np.linspace(0.2, 1, channels, dtype=np.float32)
    by_soundfile = decode_audio(sound_file(samples, subtype=subtype), LIMITS)
    by_ffmpeg, _ = decode_track(sound_file(samples, kind="W64", subtype=subtype), LIMITS)
    assert by_ffmpeg is not None
    np.testing.assert_allclose(by_ffmpeg.samples, by_soundfile.samples, atol=1e-6)


@pytest.mark.parametrize("rate_hz", [1, 999, 1_000_000])
def test_absurd_rates_are_refused(rate_hz: int) -> None:
    with pytest.raises(MediaUnsupported, match=f"{rate_hz} Hz"):
        decode_audio(sound_file(sine(0.05), rate_hz), LIMITS)


def test_a_silent_clip_is_normal() -> None:
    assert decode_track(make_video(3), LIMITS) == (None, ())
    with pytest.raises(MediaUndecodable, match="no decodable audio"):
        decode_audio(make_video(3), LIMITS)


def test_packed_and_planar_frames_agree() -> None:
    samples = np.stack([sine(0.1)[:, 0], -sine(0.1, tone_hz=880)[:, 0]], axis=1)
    # FFmpeg hands out packed samples of uncompressed sound.
    packed, _ = decode_track(sound_file(samples, kind="W64", subtype="PCM_16"), LIMITS)
    assert packed is not None
    np.testing.assert_allclose(packed.samples.T, samples, atol=1e-4)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", MediaUndecodable, "empty file"),
        (b"hello", MediaUndecodable, "found text"),
        (b"\0" * 1000, MediaUndecodable, "unknown data"),
        (b"RIFF\0\0\0\0WAVE", MediaUndecodable, "WAV"),
        (b"ID3\4\0\0\0\0\0\0", MediaUndecodable, "MP3"),
        (b"%PDF-1.7", MediaUnsupported, "PDF"),
    ],
)
def test_other_things_are_named(content: bytes, error: type[MediaError], words: str) -> None:
    with pytest.raises(error, match=words):
        decode_audio(content, LIMITS)


def test_a_picture_is_not_sound() -> None:
    with pytest.raises(MediaError, match="PNG"):
        decode_audio(picture_file(np.zeros((8, 8, 3), np.uint8)), LIMITS)


def test_no_samples_and_no_numbers() -> None:
    with pytest.raises(MediaUndecodable, match="no decodable audio"):
        decode_audio(sound_file(np.zeros((0, 1), np.float32)), LIMITS)
    with pytest.raises(MediaUndecodable, match="not finite"):
        decode_audio(sound_file(np.full((100, 1), np.nan, np.float32), subtype="FLOAT"), LIMITS)


def test_a_trailing_chunk_and_a_lying_size_do_no_harm() -> None:
    content = bytearray(sound_file(sine(0.1), subtype="PCM_24"))
    content += b"LIST" + struct.pack("<I", 10_000) + b"xx"
    assert decode_audio(bytes(content), LIMITS).samples.shape == (1, 2400)
    at = content.index(b"data")
    content[at + 4 : at + 8] = struct.pack("<I", 2**31)
    assert decode_audio(bytes(content), LIMITS).samples.shape[1] >= 2400


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        *[(kind, "PCM_16") for kind in ("WAV", "WAVEX", "RF64", "AIFF", "AU", "FLAC")],
        *[("OGG", subtype) for subtype in ("VORBIS", "OPUS")],
    ],
)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_truncated_sounds_are_errors(kind: str, subtype: str, share: float) -> None:
    noise = np.random.default_rng(3).uniform(-0.3, 0.3, (30_000, 1)).astype(np.float32)
    content = sound_file(noise, kind=kind, subtype=subtype)
    assert decode_audio(content, LIMITS).rate_hz in (24_000, 48_000)
    with pytest.raises(MediaUndecodable) as refusal:
        decode_audio(content[: int(len(content) * share)], LIMITS)
    assert f"{int(len(content) * share)} bytes" in refusal.value.message
    assert "Errno" not in refusal.value.message


def test_a_truncated_wav_says_how_much_is_missing() -> None:
    content = sound_file(sine(1.0))
    with pytest.raises(MediaUndecodable, match=r"truncated audio \(WAV, 2000 bytes\): .* 46044 bytes more"):
        decode_audio(content[:2000], LIMITS)


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
def test_a_wav_written_to_a_pipe_declares_no_size(size: int) -> None:
    content = bytearray(sound_file(sine(0.1)))
    at = content.index(b"data")
    content[at + 4 : at + 8] = struct.pack("<I", size)
    content[4:8] = struct.pack("<I", 0xFFFFFFFF)
    assert decode_audio(bytes(content), LIMITS).samples.shape == (1, 2400)


def test_a_flac_of_unknown_length_is_taken() -> None:
    content = bytearray(sound_file(sine(0.5), kind="FLAC"))
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    assert decode_audio(bytes(content), LIMITS).samples.shape == (1, 12_000)


def test_an_ogg_cut_between_pages_gives_a_warning() -> None:
    noise = np.random.default_rng(3).uniform(-0.3, 0.3, (60_000, 1)).astype(np.float32)
    content = sound_file(noise, kind="OGG", subtype="VORBIS")
    waveform, warnings = audio.decode_audio(content[: content.rindex(b"OggS")], LIMITS)
    assert waveform.samples.shape[1] < 60_000
    assert warnings == ("the sound ends without its end mark; it may be cut short",)


def test_a_shortened_mp3_gives_a_warning() -> None:
    content = sound_file(sine(2.0), kind="MP3")
    waveform, (warning,) = audio.decode_audio(content[: len(content) // 2], LIMITS)
    assert waveform.duration_s < 1.5
    assert "samples more than it holds" in warning


def test_duration_limit() -> None:
    limits = DecodeLimits(max_duration_s=0.5)
    with pytest.raises(MediaTooLarge, match="limit"):
        decode_audio(sound_file(sine(0.6)), limits)
    with pytest.raises(MediaTooLarge, match="limit"):
        decode_track(make_video(3, sound=sine(1.0)[:, 0]), limits)


@pytest.mark.parametrize("num_samples", [1, 239, 240, 480])
def test_short_clips_are_lengthened_and_keep_their_duration(num_samples: int) -> None:
    mel = log_mel(Waveform(np.full((1, num_samples), 0.1, np.float32), 24_000), AudioBudget())
    assert mel.log_mel.shape == (3, 128)
    assert mel.num_tokens == 1
    assert mel.duration_s == pytest.approx(num_samples / 24_000)


@given(num_samples=st.integers(481, 50_000))
@settings(max_examples=25, deadline=None)
def test_token_count(num_samples: int) -> None:
    mel = log_mel(Waveform(np.zeros((1, num_samples), np.float32), 24_000), AudioBudget())
    assert mel.log_mel.shape[0] == num_samples // 240 + 1
    assert mel.num_tokens == -(-(num_samples // 240 + 1) // 16)


def test_channels_are_averaged_after_resampling() -> None:
    left, right = sine(0.2, rate_hz=16_000)[:, 0], sine(0.2, rate_hz=16_000, tone_hz=1000)[:, 0]
    stereo = log_mel(Waveform(np.stack([left, right]), 16_000), AudioBudget())
    mono = log_mel(Waveform(((left + right) / 2)[None], 16_000), AudioBudget())
    # Compared as magnitudes: the logs of near-silent bands magnify the last bit.
    np.testing.assert_allclose(np.exp(stereo.log_mel), np.exp(mono.log_mel), atol=1e-4)


def direct_resample(samples: NDArray[np.float32], from_hz: int, to_hz: int) -> NDArray[np.float64]:
    """The slow truth: every output sample as its sum over every input sample, in float64."""
    divisor = np.gcd(from_hz, to_hz)
    step_in, step_out = from_hz // divisor, to_hz // divisor
    cutoff = min(step_in, step_out) * 0.99
    num_out = -(-len(samples) * step_out // step_in)
    at = np.arange(num_out)[:, None] / step_out - np.arange(len(samples))[None, :] / step_in
    t = np.clip(at * cutoff, -6, 6)
    kernel = np.sinc(t) * np.cos(np.pi * t / 12) ** 2 * cutoff / step_in
    return np.asarray(kernel @ samples.astype(np.float64))


@pytest.mark.parametrize("from_hz", [8000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000, 44_101, 23_999])
def test_resampling_equals_the_direct_sum(from_hz: int) -> None:
    samples = np.random.default_rng(0).standard_normal((2, 700)).astype(np.float32)
    resampled = resample(samples, from_hz, 24_000)
    assert resampled.dtype == np.float32
    for channel in (0, 1):
        expected = direct_resample(samples[channel], from_hz, 24_000)
        np.testing.assert_allclose(resampled[channel], expected, atol=2e-5)


def test_a_tone_survives_resampling() -> None:
    resampled = resample(np.ascontiguousarray(sine(1.0, rate_hz=44_100).T), 44_100, 24_000)
    assert peak_hz(Waveform(resampled, 24_000)) == pytest.approx(440, abs=1)
