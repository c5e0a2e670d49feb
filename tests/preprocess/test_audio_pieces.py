"""Sound computed piece by piece: the same bits however it is cut, the whole-file result, and little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import Waveform
from preprocess.audio import log_mel, resample
from preprocess.audio.decode import MelSink
from preprocess.audio.mel import MelWriter
from preprocess.audio.resample import Resampler, open_published, open_soxr_hq
from preprocess.audio.sources import SoundForm
from preprocess.config import AudioBudget
from tests.oracles import audio_whole

ROOT = Path(__file__).parents[2]
RATES = [8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000, 44_101, 23_999]
CUTS = st.lists(st.integers(0, 70_000), max_size=6)


def noise(num_channels: int, num_samples: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-1, 1, (num_channels, num_samples)).astype(np.float32)


def cut(samples: NDArray[np.float32], cuts: list[int]) -> list[NDArray[np.float32]]:
    """The samples in pieces, empty ones too."""
    return np.split(samples, sorted(min(at, samples.shape[-1]) for at in cuts), axis=-1)


def through(resampler: Resampler, pieces: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([*(resampler.feed(piece) for piece in pieces), resampler.finish()], axis=1)


@pytest.mark.parametrize("open_resampler", [open_published, open_soxr_hq])
@given(rate_hz=st.sampled_from(RATES), num_samples=st.integers(0, 70_000), cuts=CUTS, channels=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_resampled_pieces_are_the_whole_bit_for_bit(
    open_resampler: object, rate_hz: int, num_samples: int, cuts: list[int], channels: int
) -> None:
    assert callable(open_resampler)
    samples = noise(channels, num_samples)
    whole = through(open_resampler(channels, rate_hz, 24_000), [samples])
    assert whole.shape == (channels, -(-num_samples * 24_000 // rate_hz))
    pieces = through(open_resampler(channels, rate_hz, 24_000), cut(samples, cuts))
    np.testing.assert_array_equal(pieces, whole)


@given(num_samples=st.integers(1, 400_000), cuts=st.lists(st.integers(0, 400_000), max_size=6))
@settings(max_examples=8, deadline=None)
def test_log_mel_of_pieces_is_the_whole_bit_for_bit(num_samples: int, cuts: list[int]) -> None:
    samples = noise(1, num_samples)[0]
    results = []
    for pieces in ([samples], cut(samples, cuts)):
        writer = MelWriter(AudioBudget())
        for piece in pieces:
            writer.feed(piece)
        results.append(writer.finish())
    assert results[0].shape == (max(num_samples, 481) // 240 + 1, 128)
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("rate_hz", [44_100, 48_000, 44_101])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_a_sound_in_small_pieces_is_the_whole_bit_for_bit(rate_hz: int, channels: int) -> None:
    samples = noise(channels, 3 * rate_hz + 5)
    sink = MelSink(AudioBudget())
    for piece in np.split(samples, range(1023, samples.shape[1], 1023), axis=1):
        sink.put(SoundForm(channels, rate_hz), piece)
    whole = log_mel(Waveform(samples, rate_hz), AudioBudget())
    np.testing.assert_array_equal(sink.mel(whole.duration_s).log_mel, whole.log_mel)


# The last two would need filters of gigabytes as one convolution.
@pytest.mark.parametrize("rate_hz", RATES[:-2])
@pytest.mark.parametrize("num_samples", [1, 700, 90_001])
def test_resampling_equals_the_whole_file_convolution(rate_hz: int, num_samples: int) -> None:
    samples = noise(2, num_samples)
    expected = audio_whole.resampled(samples, rate_hz, 24_000).numpy()
    np.testing.assert_allclose(resample(samples, rate_hz, 24_000), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("rate_hz", [8000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_log_mel_equals_the_whole_file_transform(rate_hz: int, channels: int) -> None:
    samples = noise(channels, 11 * rate_hz + 3)
    mel = log_mel(Waveform(samples, rate_hz), AudioBudget())
    # As magnitudes: the logs of bands with nothing in them but rounding magnify it.
    expected = audio_whole.mel_magnitudes(samples, rate_hz)
    np.testing.assert_allclose(np.exp(mel.log_mel), np.maximum(expected, 1e-7), rtol=1e-5, atol=2e-5)


def test_every_channel_is_resampled_by_the_same_sums() -> None:
    samples = noise(4, 50_000)
    together = resample(samples, 44_100, 24_000)
    for channel in range(4):
        np.testing.assert_array_equal(together[channel], resample(samples[channel : channel + 1], 44_100, 24_000)[0])


def tone(hz: float, rate_hz: int) -> NDArray[np.float32]:
    return np.sin(2 * np.pi * hz * np.arange(2 * rate_hz) / rate_hz).astype(np.float32)[None]


def level_db(samples: NDArray[np.float32]) -> float:
    """Of the middle, against a full-scale sine."""
    middle = samples[0, len(samples[0]) // 4 : -len(samples[0]) // 4].astype(np.float64)
    return float(10 * np.log10(2 * np.square(middle).mean()))


def test_soxr_is_clean_where_the_published_resampler_lets_aliases_through() -> None:
    above = tone(13_000, 48_000)
    assert level_db(through(open_soxr_hq(1, 48_000, 24_000), [above])) < -100
    assert -20 < level_db(resample(above, 48_000, 24_000)) < -8
    below = tone(10_500, 48_000)
    assert level_db(through(open_soxr_hq(1, 48_000, 24_000), [below])) == pytest.approx(0, abs=0.05)


@given(rate_hz=st.sampled_from(RATES), num_samples=st.integers(1, 30_000), channels=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_soxr_counts_as_many_frames(rate_hz: int, num_samples: int, channels: int) -> None:
    waveform = Waveform(noise(channels, num_samples), rate_hz)
    published = log_mel(waveform, AudioBudget())
    clean = log_mel(waveform, AudioBudget(resampler="soxr_hq"))
    assert clean.log_mel.shape == published.log_mel.shape
    assert clean.duration_s == published.duration_s


def test_channels_that_cancel_leave_silence() -> None:
    left = noise(1, 48_000)
    mel = log_mel(Waveform(np.concatenate([left, -left]), 48_000), AudioBudget())
    assert mel.log_mel.max() == pytest.approx(np.log(1e-7), abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.5, -1.0])
def test_a_constant_is_found_in_the_lowest_bands_alone(value: float) -> None:
    mel = log_mel(Waveform(np.full((1, 24_000), value, np.float32), 24_000), AudioBudget()).log_mel
    assert np.isfinite(mel).all()
    loud = np.exp(mel[5:-5]).max(axis=0) > 1e-3
    assert not loud[4:].any()
    assert loud[:4].any() == (value != 0)


def test_levels_above_full_scale_are_kept() -> None:
    samples = tone(1000, 24_000)
    quiet, loud = (log_mel(Waveform(gain * samples, 24_000), AudioBudget()).log_mel for gain in (1, 100))
    band = quiet.mean(axis=0).argmax()
    np.testing.assert_allclose(loud[10:-10, band] - quiet[10:-10, band], np.log(100), atol=1e-4)


_ELEVEN_MINUTES = """
import resource, struct
import numpy as np
from preprocess import DecodeLimits
from preprocess.audio import audio_mel
from preprocess.config import AudioBudget

rate_hz, seconds = 48_000, 660
data = np.random.default_rng(0).integers(0, 256, (rate_hz * 2,), dtype=np.uint8).tobytes() * seconds
form = struct.pack("<HHIIHH", 1, 2, rate_hz, 2 * rate_hz, 2, 8)
riff = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + form
content = riff + b"data" + struct.pack("<I", len(data)) + data
before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mel, _ = audio_mel(content, AudioBudget(), DecodeLimits())
assert mel.log_mel.shape == (66_001, 128)
# Every second is the same, also where the rows go on in another chunk.
assert np.ptp(mel.log_mel[100:-101].reshape(658, -1), axis=0).max() < 0.02
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) // 1024)
"""


def test_memory_is_that_of_the_result() -> None:
    """Eleven minutes of 48 kHz stereo: 253 MB as a waveform, 34 MB as log-mel frames."""
    done = subprocess.run(
        [sys.executable, "-c", _ELEVEN_MINUTES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 120
