"""Generated sound files: rate, length, frequency and level per channel, log-mel frames, or the expected error."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from preprocess import MediaKey, MediaOptions, ProcessorConfig, Waveform
from preprocess.audio import decode_audio
from preprocess.pipeline import prepare
from preprocess.types import Modality, PreparedMedia
from tests.fakes.media.case import Case, Refusal, Sound
from tests.fakes.media.sound_cases import sound_cases
from tests.fakes.media.sounds import sines
from tests.oracles import processor_oracle

CASES = sound_cases()
HEARD = [case for case in CASES if isinstance(case.expect, Sound)]
REFUSED = [case for case in CASES if isinstance(case.expect, Refusal)]
MODEL_RATE_HZ = 24_000
# Codecs' run-in and run-out, and the resampler's reach.
EDGE_S = 0.15
# Of a tone at half scale that lies above what 24 kHz can hold, 55 dB below the same tone where it can be heard.
INAUDIBLE = math.log(120) - 55 / 20 * math.log(10)


def prepared(content: bytes, config: ProcessorConfig) -> PreparedMedia:
    return prepare(content, modality=Modality.AUDIO, options=MediaOptions(), config=config, key=MediaKey("0" * 32))


def check_channel(samples: NDArray[np.float64], rate_hz: int, tone_hz: float, expect: Sound) -> None:
    """Samples are a sine of this frequency and level, plus at most as much of anything else as is tolerated."""
    if not tone_hz:
        # A constant, or nothing.
        level = expect.amplitude if len(expect.tones_hz) == expect.tones_hz.count(0.0) else 0.0
        assert float(np.abs(samples - level).max()) <= expect.tolerance
        return
    # Best fit of sine and cosine: no grid of frequencies, no window.
    angle = 2 * np.pi * tone_hz * np.arange(len(samples)) / rate_hz
    basis = np.stack([np.sin(angle), np.cos(angle)], axis=1)
    weights, *_ = np.linalg.lstsq(basis, samples, rcond=None)
    assert float(np.hypot(*weights)) == pytest.approx(expect.amplitude, abs=expect.tolerance)
    rest = samples - basis @ weights
    assert float(np.sqrt(np.mean(rest**2))) <= expect.tolerance


def check_onset(waveform: Waveform, expect: Sound) -> None:
    """The tone begins when it should: encoders' run-in, which all of them add, is gone."""
    loud = np.abs(waveform.samples).max(axis=0) > expect.amplitude / 2
    assert float(np.argmax(loud)) / expect.rate_hz == pytest.approx(expect.onset_s, abs=0.004)


def check_waveform(waveform: Waveform, expect: Sound) -> None:
    assert waveform.rate_hz == expect.rate_hz
    assert waveform.samples.shape[0] == len(expect.tones_hz)
    assert waveform.samples.dtype == np.float32
    assert waveform.duration_s == pytest.approx(expect.duration_s, abs=expect.tolerance_s)
    edge = round(EDGE_S * expect.rate_hz) if expect.duration_s > 4 * EDGE_S else 0
    if expect.onset_s:
        check_onset(waveform, expect)
        return
    for samples, tone_hz in zip(waveform.samples, expect.tones_hz, strict=True):
        inner = samples[edge : len(samples) - edge].astype(np.float64)
        check_channel(inner, expect.rate_hz, tone_hz, expect)


@functools.cache
def spectrum(tones_hz: tuple[float, ...], amplitude: float) -> NDArray[np.float64]:
    """[128] log-mel magnitudes of the mean of these tones."""
    heard = sines(tones_hz, MODEL_RATE_HZ, 0.5, amplitude).astype(np.float32)
    frames: NDArray[np.float64] = processor_oracle.log_mel(heard.T)
    return np.median(frames[10:-10], axis=0)


def check_mel(media: PreparedMedia, waveform: Waveform, expect: Sound) -> None:
    assert media.mel is not None
    num_samples = max(-(-waveform.samples.shape[1] * MODEL_RATE_HZ // expect.rate_hz), 481)
    assert media.mel.log_mel.shape == (num_samples // 240 + 1, 128)
    assert media.mel.duration_s == pytest.approx(waveform.duration_s)
    assert media.layout.num_audio_rows == processor_oracle.audio_tokens(num_samples)
    assert np.isfinite(media.mel.log_mel).all()
    if expect.duration_s < 4 * EDGE_S or expect.onset_s:
        return
    # What the model hears: the mean of the channels at 24 kHz, and nothing that 24 kHz cannot hold.
    tones = [tone_hz if tone_hz < MODEL_RATE_HZ / 2 else 0.0 for tone_hz in expect.tones_hz]
    wanted = spectrum(tuple(tones), expect.amplitude)
    seen = np.median(media.mel.log_mel[20:-20], axis=0)
    peaks = wanted > max(wanted.max() - 3, INAUDIBLE)
    np.testing.assert_allclose(
        seen[peaks], wanted[peaks], atol=max(0.02, 2.5 * expect.tolerance / (expect.amplitude or 1))
    )
    if not peaks.any():
        assert seen.max() < INAUDIBLE


@pytest.mark.parametrize("case", HEARD, ids=lambda case: case.name)
def test_sounds(case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig) -> None:
    expect, content = case.expect, file_of(case)
    assert isinstance(expect, Sound)
    waveform, warnings = decode_audio(content, config.limits)
    check_waveform(waveform, expect)
    assert warnings == ()
    media = prepared(content, config)
    check_mel(media, waveform, expect)
    assert media.patches is None
    assert media.warnings == ()


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refusals(case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig) -> None:
    expect, content = case.expect, file_of(case)
    assert isinstance(expect, Refusal)
    with pytest.raises(expect.error, match=f"(?s){expect.words}") as caught:
        prepared(content, config)
    assert type(caught.value) is expect.error
