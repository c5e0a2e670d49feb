"""The media path against the published processor written out slowly, over drawn sizes, rates, lengths and options."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import (
    MediaInvalid,
    MediaKey,
    MediaLayout,
    MediaOptions,
    MediaTokenIds,
    Modality,
    ProcessorConfig,
    Waveform,
    expand,
    media_key,
)
from preprocess.audio import log_mel
from preprocess.pipeline import prepare
from preprocess.resize import frame_indices, frame_max_pixels, num_sampled_frames, smart_resize
from preprocess.tokens import label, slice_audio
from tests.fakes.clips import blocks, make_video, picture_file, sine, sound_file
from tests.oracles import processor_oracle as oracle
from tests.oracles.effort import effort

ID_WORDS = [f.name for f in dataclasses.fields(MediaTokenIds)]
IDS = {word: number for number, word in enumerate(ID_WORDS, start=1000)}
MEDIA_IDS = MediaTokenIds(**IDS)
INTERLEAVES = st.sampled_from([0.0, -1.0, 0.5, 1.0, 2.0, 4.0, 5.5, 60.0])
RATES = st.sampled_from([1.0, 2.0, 10.0, 12.5, 23.976, 24_000 / 1001, 25.0, 29.97, 30.0, 59.94, 240.0]) | st.floats(
    0.2, 240
)


def characters(text: str) -> list[int]:
    return [ord(character) for character in text]


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


VIDEO_OPTIONS = some(
    fps=st.floats(0.001, 240),
    max_frames=st.integers(2, 80),
    min_frames=st.integers(1, 80),
    min_pixels=st.integers(1, 80_000),
    max_pixels=st.integers(1024, 80_000),
) | some(
    num_frames=st.integers(2, 80),
    max_frames=st.integers(2, 80),
    min_frames=st.integers(1, 80),
)
IMAGE_OPTIONS = some(
    min_pixels=st.integers(1, 300_000),
    max_pixels=st.integers(1024, 300_000),
    detail=st.sampled_from(["auto", "low", "high"]),
)


def valid(options: dict[str, Any]) -> MediaOptions:
    try:
        return MediaOptions(**options)
    except ValueError:
        assume(False)
        raise


def over_a_ceiling(options: dict[str, Any], section: dict[str, Any], kind: str) -> bool:
    """Whether an option is beyond what the model's settings allow."""
    ceilings = {f"{bound}_pixels": section[f"{kind}_max_pixels"] for bound in ("min", "max")}
    if kind == "video":
        ceilings |= dict.fromkeys(("min_frames", "max_frames", "num_frames"), section["max_frames"])
    if any(options.get(name, 0) > ceiling for name, ceiling in ceilings.items()):
        return True
    if kind == "image":
        return False
    rules = oracle.video_rules(section, options)
    most = oracle.chosen_frames(10**6, 1e-9, rules)
    return options.get("min_pixels", 0) > max(section["video_min_pixels"], rules.total_pixels * 2 // len(most))


@pytest.fixture(scope="session")
def sections(golden: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Processor sections as they stand in config.json, by name."""
    found: dict[str, dict[str, Any]] = golden["processor_config"]
    return found


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    stretch=st.integers(1, 4000),
    options=IMAGE_OPTIONS,
    name=st.sampled_from(["real", "tiny", "mini"]),
)
@effort(300)
def test_image_sizes(
    height: int,
    width: int,
    stretch: int,
    options: dict[str, Any],
    name: str,
    configs: dict[str, ProcessorConfig],
    sections: dict[str, dict[str, Any]],
) -> None:
    given_options = valid(options)
    width *= stretch
    if over_a_ceiling(options, sections[name], "image"):
        with pytest.raises(MediaInvalid, match="allowed is at most"):
            configs[name].image_budget(given_options)
        return
    budget = configs[name].image_budget(given_options)
    rules = oracle.image_rules(sections[name], options)
    expected = oracle.resized(height, width, rules.min_pixels, rules.max_pixels)
    if expected is None:
        with pytest.raises(MediaInvalid, match="aspect ratio"):
            smart_resize(height, width, min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)
        return
    assert smart_resize(height, width, min_pixels=budget.min_pixels, max_pixels=budget.max_pixels) == expected
    # Whatever the request says, memory stays near the ceiling: growing rounds up by less than a unit a side.
    assert expected[0] * expected[1] <= sections[name]["image_max_pixels"] * 1.25 + 4 * 1024


@given(
    num_frames=st.integers(1, 300) | st.integers(1, 20_000),
    rate_fps=RATES,
    size=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    options=VIDEO_OPTIONS,
    name=st.sampled_from(["real", "tiny", "mini"]),
    sound_s=st.none() | st.floats(0, 30),
    interleave_s=INTERLEAVES,
)
@effort(250)
def test_video_geometry_labels_and_ids(
    num_frames: int,
    rate_fps: float,
    size: tuple[int, int],
    options: dict[str, Any],
    name: str,
    sound_s: float | None,
    interleave_s: float,
    configs: dict[str, ProcessorConfig],
    sections: dict[str, dict[str, Any]],
) -> None:
    given_options = valid(options)
    if over_a_ceiling(options, sections[name], "video"):
        with pytest.raises(MediaInvalid, match="allowed is at most"):
            configs[name].video_budget(given_options)
        return
    budget = configs[name].video_budget(given_options)
    rules = oracle.video_rules(sections[name], options)

    indices = frame_indices(num_frames, num_sampled_frames(num_frames, rate_fps, budget))
    expected_indices = oracle.chosen_frames(num_frames, rate_fps, rules)
    assert indices.tolist() == expected_indices

    most = frame_max_pixels(len(indices), budget)
    expected_size = oracle.resized(*size, rules.min_pixels, oracle.frame_pixels(len(indices), rules))
    if expected_size is None:
        return
    height, width = smart_resize(*size, min_pixels=budget.min_pixels, max_pixels=most)
    assert (height, width) == expected_size

    times_s = indices.astype(np.float32) / np.float32(rate_fps)
    expected_times_s = oracle.times(expected_indices, rate_fps)
    assert times_s.tolist() == [float(time_s) for time_s in expected_times_s]
    pair_times_s = expected_times_s[::2]
    assert [label(time_s) for time_s in times_s[::2].tolist()] == [oracle.clock(time_s) for time_s in pair_times_s]

    slices: tuple[tuple[int, int], ...] = ()
    shares = None
    if sound_s is not None:
        num_audio = oracle.audio_tokens(int(sound_s * 24_000))
        slices = slice_audio(times_s, num_audio_tokens=num_audio, tokens_per_s=configs[name].audio.tokens_per_s)
        shares = oracle.audio_shares(expected_times_s, num_audio)
        assert list(slices) == shares
    num_pairs = len(pair_times_s)
    layout = MediaLayout(
        Modality.VIDEO,
        (num_pairs, height // 16, width // 16),
        tuple(times_s[::2].tolist()),
        slices,
        sum(length for _, length in slices),
    )
    expansion = expand(layout, MEDIA_IDS, characters, interleave_s=interleave_s)
    pads = height * width // 1024
    assert expansion.token_ids == oracle.video_ids(pair_times_s, pads, shares, interleave_s, IDS, characters)


@given(
    height=st.integers(1, 130),
    width=st.integers(1, 130),
    options=some(min_pixels=st.integers(1, 9000), max_pixels=st.integers(1024, 12_000)),
    seed=st.integers(0, 1000),
)
@effort(8)
def test_images_pixel_by_pixel(
    height: int,
    width: int,
    options: dict[str, Any],
    seed: int,
    configs: dict[str, ProcessorConfig],
    sections: dict[str, dict[str, Any]],
) -> None:
    given_options = valid(options)
    pixels = blocks(height, width, seed)
    prepared = prepare(
        picture_file(pixels),
        modality=Modality.IMAGE,
        options=given_options,
        config=configs["mini"],
        key=MediaKey("0" * 32),
    )
    rules = oracle.image_rules(sections["mini"], options)
    new_size = oracle.resized(height, width, rules.min_pixels, rules.max_pixels)
    assert new_size is not None
    frame = oracle.bilinear(pixels, *new_size)
    assert prepared.patches is not None
    np.testing.assert_allclose(prepared.patches.pixel_values, oracle.patches([frame, frame]), atol=1e-4, rtol=0)
    expansion = expand(prepared.layout, MEDIA_IDS, characters)
    num_pads = new_size[0] * new_size[1] // 1024
    assert expansion.token_ids == [IDS["vision_start"], *[IDS["image_pad"]] * num_pads, IDS["vision_end"]]


def decoded(content: bytes) -> list[NDArray[np.uint8]]:
    with av.open(io.BytesIO(content)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@given(
    num_frames=st.integers(1, 30),
    rate=st.sampled_from([2, 10, 25]),
    size=st.sampled_from([(32, 48), (48, 64), (96, 32)]),
    sound_s=st.none() | st.floats(0.03, 4),
    options=some(fps=st.floats(0.2, 30), max_frames=st.integers(2, 6))
    | some(num_frames=st.integers(2, 7))
    | some(min_pixels=st.integers(1, 4000), use_audio=st.just(False)),
)
@effort(8)
def test_whole_videos_pixel_by_pixel(
    num_frames: int,
    rate: int,
    size: tuple[int, int],
    sound_s: float | None,
    options: dict[str, Any],
    configs: dict[str, ProcessorConfig],
    sections: dict[str, dict[str, Any]],
) -> None:
    sound = None if sound_s is None else sine(sound_s)[:, 0]
    content = make_video(num_frames, rate=rate, size=size, sound=sound, corner=True)
    prepared = prepare(
        content,
        modality=Modality.VIDEO,
        options=MediaOptions(**options),
        config=configs["mini"],
        key=MediaKey("0" * 32),
    )
    rules = oracle.video_rules(sections["mini"], options)
    indices = oracle.chosen_frames(num_frames, rate, rules)
    new_size = oracle.resized(*size, rules.min_pixels, oracle.frame_pixels(len(indices), rules))
    assert new_size is not None
    pictures = decoded(content)
    frames = [oracle.bilinear(pictures[index], *new_size) for index in indices]
    frames += frames[-1:] * (len(frames) % 2)
    assert prepared.patches is not None
    np.testing.assert_allclose(prepared.patches.pixel_values, oracle.patches(frames), atol=2e-4, rtol=0)

    times_s = oracle.times(indices, rate)
    shares = None
    if sound is not None and options.get("use_audio") is not False:
        assert prepared.mel is not None
        # The codec pads the sound to whole frames of its own: what was decoded is what counts.
        num_audio = oracle.audio_tokens((prepared.mel.log_mel.shape[0] - 1) * 240)
        assert num_audio >= oracle.audio_tokens(len(sound))
        shares = oracle.audio_shares(times_s, num_audio)
    else:
        assert prepared.mel is None
    assert prepared.layout.audio_slices == tuple(shares or ())
    expansion = expand(prepared.layout, MEDIA_IDS, characters)
    pads = new_size[0] * new_size[1] // 1024
    assert expansion.token_ids == oracle.video_ids(times_s[::2], pads, shares, 0.0, IDS, characters)


@given(num_samples=st.integers(481, 3000), channels=st.integers(1, 3), seed=st.integers(0, 1000))
@effort(6)
def test_sounds_value_by_value(num_samples: int, channels: int, seed: int, tiny: ProcessorConfig) -> None:
    samples = np.random.RandomState(seed).uniform(-1, 1, (channels, num_samples)).astype(np.float32)
    mel = log_mel(Waveform(samples, 24_000), tiny.audio)
    expected = oracle.log_mel(samples)
    assert mel.log_mel.shape == expected.shape
    np.testing.assert_allclose(mel.log_mel, expected, atol=1e-3, rtol=0)
    assert mel.num_tokens == oracle.audio_tokens(num_samples)


@given(num_samples=st.integers(1, 80_000))
@effort(15)
def test_sound_ids(num_samples: int, tiny: ProcessorConfig) -> None:
    prepared = prepare(
        sound_file(np.zeros((num_samples, 1), np.float32)),
        modality=Modality.AUDIO,
        options=MediaOptions(),
        config=tiny,
        key=MediaKey("0" * 32),
    )
    # Clips that reflection cannot pad are lengthened to one sample more than half a window.
    num_pads = oracle.audio_tokens(max(num_samples, 481))
    expansion = expand(prepared.layout, MEDIA_IDS, characters)
    assert expansion.token_ids == [IDS["audio_start"], *[IDS["audio_pad"]] * num_pads, IDS["audio_end"]]


PROBES = [
    (frames, rate, size)
    for frames in (1, 2, 3, 9, 40, 250, 20_000)
    for rate in (0.5, 10.0, 29.97)
    for size in ((20, 300), (64, 64), (700, 500))
]


def key_of(config: ProcessorConfig, modality: Modality, options: MediaOptions) -> MediaKey:
    return media_key(b"content", modality=modality, options=options, processor=config, tower_fingerprint="tower")


@given(
    first=VIDEO_OPTIONS, second=VIDEO_OPTIONS, shared=st.sets(st.sampled_from(sorted(MediaOptions.__struct_fields__)))
)
@effort(150)
def test_one_video_key_never_has_two_results(
    first: dict[str, Any],
    second: dict[str, Any],
    shared: set[str],
    configs: dict[str, ProcessorConfig],
    sections: dict[str, dict[str, Any]],
) -> None:
    second |= {name: value for name, value in first.items() if name in shared}
    options = [valid(first), valid(second)]
    for given_options in (first, second):
        assume(not over_a_ceiling(given_options, sections["tiny"], "video"))
    one, other = (key_of(configs["tiny"], Modality.VIDEO, given_options) for given_options in options)

    def results(given_options: dict[str, Any]) -> list[Any]:
        rules = oracle.video_rules(sections["tiny"], given_options)
        found: list[Any] = []
        for num_frames, rate_fps, size in PROBES:
            indices = oracle.chosen_frames(num_frames, rate_fps, rules)
            most = oracle.frame_pixels(len(indices), rules)
            found.append((indices, oracle.resized(*size, rules.min_pixels, most)))
        return found

    if results(first) != results(second):
        assert one != other
    if first == second:
        assert one == other
