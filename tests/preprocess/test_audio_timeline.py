"""Sound is heard when the file says: silence for what is missing, nothing from before the first picture."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from preprocess import DecodeLimits, MediaKey, MediaOptions, Modality, ProcessorConfig, Waveform, prepare
from preprocess.audio import audio_mel, decode_audio, decode_track
from preprocess.audio.ogg import is_intact
from preprocess.audio.timeline import Timeline
from preprocess.config import AudioBudget, ImageBudget, VideoBudget
from preprocess.types import UNIT_PIXELS
from tests.fakes.clips import make_video, sound_file

LIMITS = DecodeLimits()
RATE_HZ = 48_000
TURN_S = 3.0
KINDS = [("mp4", "aac"), ("matroska", "libopus"), ("mpegts", "aac"), ("matroska", "pcm_s16le")]
Change = Callable[[Any, float], bool]
"""May change a packet, whose time in seconds is given; False drops it."""


def two_tones() -> NDArray[np.float32]:
    """[6 s]: 1 kHz up to `TURN_S`, 4 kHz from there."""
    at_s = np.arange(6 * RATE_HZ) / RATE_HZ
    samples: NDArray[np.float32] = (0.5 * np.sin(2 * np.pi * np.where(at_s < TURN_S, 1000, 4000) * at_s)).astype("f4")
    return samples


def sound(container: str, codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, mode="w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=RATE_HZ, layout="mono")
        samples = two_tones()
        for start in range(0, len(samples), 960):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + 960], format="flt", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE_HZ, start, Fraction(1, RATE_HZ)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def remuxed(content: bytes, container: str, change: Change, video: bytes | None = None, video_s: float = 0) -> bytes:
    """The sound with its packets changed, beside the pictures of `video`, which begin at `video_s`."""
    file = io.BytesIO()
    packets: list[Any] = []
    with av.open(file, mode="w", format=container) as output, av.open(io.BytesIO(content), mode="r") as source:
        copy: Any = output.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux():
            if packet.size and packet.pts is not None and change(packet, float(packet.pts * packet.time_base)):
                packet.stream = copy
                packets.append(packet)
        if video is not None:
            pictures = av.open(io.BytesIO(video), mode="r")
            picture_copy: Any = output.add_stream_from_template(pictures.streams.video[0])
            for picture in pictures.demux(video=0):
                if picture.pts is not None and picture.dts is not None:
                    delay = round(video_s / picture.time_base)
                    picture.pts, picture.dts, picture.stream = picture.pts + delay, picture.dts + delay, picture_copy
                    packets.append(picture)
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            output.mux(packet)
    return file.getvalue()


def kept(packet: Any, at_s: float) -> bool:
    return True


def gap(packet: Any, at_s: float) -> bool:
    return not 0.8 <= at_s < 1.8


def moved(by_s: float, since_s: float = -1.0) -> Change:
    def change(packet: Any, at_s: float) -> bool:
        if at_s >= since_s:
            packet.pts += round(by_s / packet.time_base)
            packet.dts += round(by_s / packet.time_base)
        return True

    return change


def turn_s(waveform: Waveform) -> float:
    """When the higher tone begins."""
    samples = waveform.samples[0].astype(np.float64)
    at_s = np.arange(len(samples)) / RATE_HZ
    # Each tone mixed down to zero and averaged over 20 ms.
    levels = [
        np.abs(np.convolve(samples * np.exp(-2j * np.pi * tone_hz * at_s), np.ones(960) / 960, mode="same"))
        for tone_hz in (1000, 4000)
    ]
    return float(np.argmax((levels[1] > levels[0]) & (levels[1] > 0.1))) / RATE_HZ


def silent_s(waveform: Waveform) -> float:
    blocks = waveform.samples[0, : waveform.samples.shape[1] // 96 * 96].reshape(-1, 96)
    return float((blocks == 0).all(axis=1).sum()) * 96 / RATE_HZ


@pytest.mark.parametrize(("container", "codec"), KINDS)
def test_missing_packets_become_silence(container: str, codec: str) -> None:
    whole = sound(container, codec)
    before, warnings = decode_audio(remuxed(whole, container, kept), LIMITS)
    assert warnings == ()
    assert turn_s(before) == pytest.approx(TURN_S, abs=0.05)
    after, (warning,) = decode_audio(remuxed(whole, container, gap), LIMITS)
    assert turn_s(after) == pytest.approx(turn_s(before), abs=0.03)
    assert after.samples.shape[1] == pytest.approx(before.samples.shape[1], abs=0.03 * RATE_HZ)
    assert silent_s(after) == pytest.approx(1.0, abs=0.1)
    assert "a gap of 1.0" in warning or "a gap of 0.9" in warning


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("matroska", "aac")])
def test_damaged_packets_become_silence(container: str, codec: str) -> None:
    whole = sound(container, codec)
    content = bytearray(whole)
    with av.open(io.BytesIO(whole), mode="r") as source:
        for packet in source.demux(audio=0):
            if packet.size and packet.pts is not None and not gap(packet, float(packet.pts * packet.time_base)):
                at = whole.index(bytes(packet))
                content[at : at + packet.size] = b"\xff" * packet.size
    after, warnings = decode_audio(bytes(content), LIMITS)
    assert turn_s(after) == pytest.approx(TURN_S, abs=0.05)
    assert any("damaged packets were skipped" in warning for warning in warnings)
    assert any("filled with silence" in warning for warning in warnings)


@pytest.mark.parametrize("share", [0.25, 0.75])
@pytest.mark.parametrize("codec", ["vorbis", "opus"])
def test_damaged_pages_of_ogg_become_silence(codec: str, share: float) -> None:
    noise = np.random.default_rng(0).normal(scale=0.1, size=(10 * RATE_HZ, 1)).astype(np.float32)
    noise[5 * RATE_HZ :] *= 0.1
    content = sound_file(noise, RATE_HZ, kind="OGG", subtype=codec.upper())
    assert is_intact(content)
    assert is_intact(content * 2)
    before, warnings = decode_audio(content, LIMITS)
    assert warnings == ()
    at = round(share * len(content))
    damaged = content[:at] + bytes(1000) + content[at + 1000 :]
    assert not is_intact(damaged)
    after, warnings = decode_audio(damaged, LIMITS)
    assert any("filled with silence" in warning for warning in warnings), warnings
    assert abs(after.samples.shape[1] - before.samples.shape[1]) < 0.02 * RATE_HZ
    assert 0.1 < silent_s(after) < 3
    # What is quiet stays quiet, where it was.
    assert float(np.abs(after.samples[0, round(5.1 * RATE_HZ) :]).max()) < 0.1
    assert float(np.abs(after.samples[0, round(4.8 * RATE_HZ) : round(4.98 * RATE_HZ)]).max()) > 0.1


@pytest.mark.parametrize(("container", "codec"), KINDS)
@pytest.mark.parametrize("late_s", [0.0, 0.05, 0.5, 2.0, -0.5, -2.0])
def test_the_track_of_a_video_starts_with_its_first_picture(container: str, codec: str, late_s: float) -> None:
    change, video_s = (moved(late_s), 0.0) if late_s > 0 else (kept, -late_s)
    content = remuxed(sound(container, codec), container, change, make_video(40), video_s)
    config = ProcessorConfig(
        image=ImageBudget(min_pixels=UNIT_PIXELS, max_pixels=64 * UNIT_PIXELS),
        video=VideoBudget(UNIT_PIXELS, 64 * UNIT_PIXELS, 64 * UNIT_PIXELS, 2.0, 2, 16, None, None),
    )
    media = prepare(content, modality=Modality.VIDEO, options=MediaOptions(), config=config, key=MediaKey("0" * 32))
    assert media.mel is not None
    low, high = (media.mel.log_mel[:, band - 2 : band + 3].max(axis=1) for band in (40, 83))
    turned = int(np.argmax((high > low) & (high > -1))) / 100
    if abs(late_s) > 0.1:
        (warning,) = media.warnings
        assert ("begins" if late_s > 0 else "cut off") in warning
        (told_s,) = re.findall(r"\d+\.\d+", warning)
        assert float(told_s) == pytest.approx(abs(late_s), abs=0.1)
        assert turned == pytest.approx(TURN_S + late_s, abs=0.1)
    else:
        assert media.warnings == ()
        assert turned == pytest.approx(TURN_S, abs=0.15)


def test_sound_that_ends_before_the_first_picture_is_none() -> None:
    content = remuxed(sound("matroska", "pcm_s16le"), "matroska", kept, make_video(5), 10)
    assert decode_track(content, LIMITS, start_s=10)[0] is None
    assert decode_track(content, LIMITS, start_s=10)[1] == (
        "audio: 10.00 s of sound come before the first picture; cut off",
    )


def test_a_sound_file_begins_with_its_first_sample() -> None:
    content = remuxed(sound("matroska", "libopus"), "matroska", moved(5.0))
    waveform, warnings = decode_audio(content, LIMITS)
    assert warnings == ()
    assert turn_s(waveform) == pytest.approx(TURN_S, abs=0.05)


@pytest.mark.parametrize("by_s", [1e5, -2.0, 0.05])
def test_times_that_are_absurd_or_jump_back_are_not_followed(by_s: float) -> None:
    content = remuxed(sound("matroska", "libopus"), "matroska", moved(by_s, since_s=2.5))
    mel, warnings = audio_mel(content, AudioBudget(), LIMITS)
    assert mel.duration_s == pytest.approx(6, abs=0.1)
    assert len(warnings) == (by_s > 1)
    assert all("not followed" in warning for warning in warnings)


class _Frame:
    def __init__(self, at_s: float | None, num_samples: int = 480) -> None:
        self.samples, self.sample_rate = num_samples, RATE_HZ
        self.time_base = Fraction(1, 1000)
        self.pts = None if at_s is None else round(at_s * 1000)


def test_drift_is_made_up_for_and_silence_is_bounded() -> None:
    timeline = Timeline(None, 100.0)
    # Frames of 10 ms that come each 11 ms: whenever 0.1 s are missing, they are filled in.
    offsets = [timeline.offset_s(_Frame(0.011 * at)) for at in range(1000)]
    assert sum(offsets) == pytest.approx(1.0, abs=0.11)
    assert min(offset for offset in offsets if offset) > 0.1
    assert sum(timeline.offset_s(_Frame(20.0 * at)) for at in range(1, 50)) <= 90
    assert len(timeline.warnings) == 2


def test_frames_without_a_time_follow_each_other() -> None:
    timeline = Timeline(0.0, 100.0)
    assert [timeline.offset_s(_Frame(at)) for at in (None, None, 5.0, None, 5.02, 6.0)] == pytest.approx(
        [0, 0, 0, 0, 0, 0.97]
    )
