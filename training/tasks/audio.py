"""Audio tasks: transcribe telephone keys (DTMF); tell and count high and low beeps."""

from __future__ import annotations

import numpy as np
import soxr
from numpy.typing import NDArray

from training.tasks.types import Part, Sample, Sound, Turn, generator, pick, pick_system

RATE_HZ = 24_000
OTHER_RATES_HZ = (8_000, 16_000, 22_050, 44_100, 48_000)
KEYS = "0123456789"
LOW_HZ = {"1": 697, "2": 697, "3": 697, "4": 770, "5": 770, "6": 770, "7": 852, "8": 852, "9": 852, "0": 941}
HIGH_HZ = {"1": 1209, "4": 1209, "7": 1209, "2": 1336, "5": 1336, "8": 1336, "0": 1336, "3": 1477, "6": 1477, "9": 1477}
QUESTIONS = (
    "Which keys were pressed?",
    "Which digits do you hear?",
    "Transcribe the tones.",
    "What number was dialled?",
    "Write down the keys.",
    "Which tone sequence was played?",
)
BEEP_QUESTIONS = (
    "How many beeps are there?",
    "Count the beeps.",
    "Which beeps do you hear?",
    "Are the beeps high or low?",
    "Describe the beeps.",
)
PITCHES = ("low", "high")
PITCH_RANGES_HZ = {"low": (280.0, 520.0), "high": (1500.0, 2800.0)}


def tone(rng: np.random.Generator, key: str, num_samples: int) -> NDArray[np.float32]:
    """Two sines with random phases, a small tilt between them and 5 ms ramps."""
    time = np.arange(num_samples) / RATE_HZ
    tilt = float(rng.uniform(0.75, 1.3))
    drift = 1 + float(rng.uniform(-0.006, 0.006))
    low = np.sin(2 * np.pi * LOW_HZ[key] * drift * time + rng.uniform(0, 6.28))
    high = np.sin(2 * np.pi * HIGH_HZ[key] * drift * time + rng.uniform(0, 6.28))
    ramp = np.minimum(1.0, np.minimum(np.arange(num_samples), np.arange(num_samples)[::-1]) / (0.005 * RATE_HZ))
    return ((low + tilt * high) / (1 + tilt) * ramp).astype(np.float32)


def finish(rng: np.random.Generator, pieces: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Join, set the level, and spoil the sound as files do: noise, another rate, 16 bits; `[N]` float32."""
    pieces.append(np.zeros(int(float(rng.uniform(0.0, 0.3)) * RATE_HZ), np.float32))
    level = float(10 ** rng.uniform(-1.3, -0.05))
    samples = np.concatenate(pieces) * level
    if rng.random() < 0.6:
        noise = rng.standard_normal(len(samples), dtype=np.float32)
        samples = samples + noise * level * float(10 ** rng.uniform(-3.5, -1.6))
    if rng.random() < 0.35:  # files of another rate lose the top of the band, or get it back as noise
        other_hz = int(rng.choice(OTHER_RATES_HZ))
        samples = soxr.resample(soxr.resample(samples, RATE_HZ, other_hz), other_hz, RATE_HZ)
    if rng.random() < 0.8:  # 16-bit files round
        samples = np.round(samples * 32767) / 32768
    return np.clip(samples, -1, 1).astype(np.float32)


def render(rng: np.random.Generator, keys: str) -> tuple[NDArray[np.float32], tuple[tuple[int, int], ...]]:
    """The sound, `[N]` float32, and the `[start, stop)` sample range of each key."""
    silence = float(rng.uniform(0.03, 0.4))
    pieces = [np.zeros(int(silence * RATE_HZ), np.float32)]
    ranges = []
    position = len(pieces[0])
    even = rng.random() < 0.5
    length_s, gap_s = float(rng.uniform(0.1, 0.25)), float(rng.uniform(0.08, 0.2))
    for key in keys:
        if not even:
            length_s, gap_s = float(rng.uniform(0.1, 0.25)), float(rng.uniform(0.08, 0.2))
        burst = tone(rng, key, int(length_s * RATE_HZ))
        ranges.append((position, position + len(burst)))
        pieces += [burst, np.zeros(int(gap_s * RATE_HZ), np.float32)]
        position += len(burst) + len(pieces[-1])
    return finish(rng, pieces), tuple(ranges)


def draw_keys(rng: np.random.Generator, alphabet: str) -> str:
    """Three to six keys; one sequence in five repeats a key on purpose."""
    keys = [pick(rng, tuple(alphabet)) for _ in range(int(rng.integers(3, 7)))]
    if rng.random() < 0.2:
        place = int(rng.integers(len(keys) - 1))
        keys[place + 1] = keys[place]
    return "".join(keys)


def describe_keys(keys: str) -> str:
    """The wanted answer: one by one, then the number, then its length."""
    return f"I hear the keys {' '.join(keys)}. That makes the number {keys}, which has {len(keys)} digits."


def sample(seed: int, index: int, few: bool = False) -> Sample:
    """One question about one sound; `few` keeps to three different keys, so that many are heard twice and more."""
    rng = generator("audio few" if few else "audio", seed, index)
    keys = draw_keys(rng, "".join(rng.choice(list(KEYS), 3, replace=False)) if few else KEYS)
    samples, ranges = render(rng, keys)
    question = pick(rng, QUESTIONS)
    sound = Sound(samples)
    parts: tuple[Part, ...] = (sound, question) if rng.random() < 0.6 else (question, sound)
    labels = tuple(value for key, (start, stop) in zip(keys, ranges, strict=True) for value in (int(key), start, stop))
    return Sample("keys", (Turn(parts, describe_keys(keys)),), pick_system(rng), labels)


def beep(rng: np.random.Generator, pitch_hz: float, num_samples: int) -> NDArray[np.float32]:
    """One sine with 8 ms ramps, sometimes with a weak octave above."""
    time = np.arange(num_samples) / RATE_HZ
    wave = np.sin(2 * np.pi * pitch_hz * time + rng.uniform(0, 6.28))
    if rng.random() < 0.3:
        wave = 0.85 * wave + 0.15 * np.sin(4 * np.pi * pitch_hz * time + rng.uniform(0, 6.28))
    ramp = np.minimum(1.0, np.minimum(np.arange(num_samples), np.arange(num_samples)[::-1]) / (0.008 * RATE_HZ))
    return (wave * ramp).astype(np.float32)


def render_beeps(
    rng: np.random.Generator, pitches: list[str]
) -> tuple[NDArray[np.float32], tuple[tuple[int, int], ...]]:
    """The sound, `[N]` float32, with one low and one high pitch, and the `[start, stop)` sample range of each beep."""
    hz = {name: float(rng.uniform(*PITCH_RANGES_HZ[name])) for name in PITCHES}
    pieces = [np.zeros(int(float(rng.uniform(0.03, 0.4)) * RATE_HZ), np.float32)]
    ranges = []
    position = len(pieces[0])
    for pitch in pitches:
        burst = beep(rng, hz[pitch], int(float(rng.uniform(0.12, 0.25)) * RATE_HZ))
        ranges.append((position, position + len(burst)))
        pieces += [burst, np.zeros(int(float(rng.uniform(0.1, 0.25)) * RATE_HZ), np.float32)]
        position += len(burst) + len(pieces[-1])
    return finish(rng, pieces), tuple(ranges)


def describe_beeps(pitches: list[str]) -> str:
    """The wanted answer: one by one, then the counts."""
    low, high = pitches.count("low"), pitches.count("high")
    return f"In this sound I hear {', '.join(pitches)}. That makes {len(pitches)} beeps: {low} low and {high} high."


def sample_beeps(seed: int, index: int) -> Sample:
    """One question about two to eight beeps."""
    rng = generator("beeps", seed, index)
    pitches = [pick(rng, PITCHES) for _ in range(2 + int(rng.integers(7)))]
    samples, ranges = render_beeps(rng, pitches)
    sound = Sound(samples)
    question = pick(rng, BEEP_QUESTIONS)
    parts: tuple[Part, ...] = (sound, question) if rng.random() < 0.6 else (question, sound)
    labels = tuple(
        value
        for pitch, (start, stop) in zip(pitches, ranges, strict=True)
        for value in (len(KEYS) + PITCHES.index(pitch), start, stop)
    )
    return Sample("beeps", (Turn(parts, describe_beeps(pitches)),), pick_system(rng), labels)
