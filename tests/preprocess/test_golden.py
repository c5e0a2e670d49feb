"""Every golden case of the published processor: sizes, grids, indices, ids, pixel values, audio counts, log-mel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from preprocess import (
    Frames,
    MediaLayout,
    MediaOptions,
    MediaTokenIds,
    Modality,
    Patches,
    ProcessorConfig,
    Waveform,
    expand,
)
from preprocess.audio import log_mel
from preprocess.patchify import PatchWriter, patchify
from preprocess.resize import frame_indices, frame_max_pixels, num_sampled_frames, smart_resize
from preprocess.tokens import label, slice_audio
from tests.fakes.clips import blocks

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "processor" / "expected_sglang.json").read_text())
MEL_CASES = json.loads((GOLDEN / "audio" / "expected_mel.json").read_text())["cases"]
IDS = MediaTokenIds.from_hf(CASES["token_ids"])
WITH_AUDIO = [case for case in CASES["videos"] if case["audio_tokens"] is not None]


def ascii_ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def case_id(case: dict[str, Any]) -> str:
    return f"{case['case']}-{case['config']}-{case['w']}x{case['h']}"


@pytest.fixture(scope="module")
def arrays() -> dict[str, NDArray[np.float32]]:
    return load_file(GOLDEN / "processor" / "pixel_values.safetensors")


def check_pixels(patches: Patches, expected: dict[str, Any]) -> None:
    values = patches.pixel_values
    assert list(values.shape) == expected["shape"]
    for row, column, value in expected["samples"]:
        assert values[row, column] == pytest.approx(value, abs=1e-4)
    tolerance = 1e-5 * (expected["sumsq"] * values.size) ** 0.5
    assert values.sum(dtype=np.float64) == pytest.approx(expected["sum"], abs=tolerance)
    assert np.square(values, dtype=np.float64).sum() == pytest.approx(expected["sumsq"], abs=tolerance)


@pytest.mark.parametrize("case", CASES["images"], ids=case_id)
def test_image(case: dict[str, Any], configs: dict[str, ProcessorConfig], arrays: dict[str, Any]) -> None:
    budget = configs[case["config"]].image_budget(MediaOptions())
    height, width = smart_resize(case["h"], case["w"], min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)
    assert (width, height) == (case["resized_w"], case["resized_h"])
    pixels = blocks(case["h"], case["w"], case["seed"])
    patches = patchify(Frames(pixels[None], np.zeros(1, np.float32)), height=height, width=width)
    assert list(patches.grid_thw) == case["grid_thw"]
    assert patches.num_tokens == case["pads"]
    expansion = expand(MediaLayout(Modality.IMAGE, grid_thw=patches.grid_thw), IDS, ascii_ids)
    assert len(expansion.token_ids) == case["ids"]
    check_pixels(patches, case["pixel_values"])
    full = arrays.get(f"image{case['case']}.pixel_values")
    assert (full is not None) == (case["config"] == "mini")
    if full is not None:
        np.testing.assert_allclose(patches.pixel_values, full, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES["videos"], ids=case_id)
def test_video_geometry_and_ids(case: dict[str, Any], configs: dict[str, ProcessorConfig]) -> None:
    budget = configs[case["config"]].video_budget(MediaOptions())
    indices = frame_indices(
        case["frames_in_file"], num_sampled_frames(case["frames_in_file"], case["fps"], budget)
    ).tolist()
    assert len(indices) == case["frames_used"]
    if "indices" in case:
        assert indices == case["indices"]
    else:
        assert indices[:6] == case["first_indices"]
        assert indices[-3:] == case["last_indices"]
    height, width = smart_resize(
        case["h"], case["w"], min_pixels=budget.min_pixels, max_pixels=frame_max_pixels(len(indices), budget)
    )
    assert (width, height) == (case["resized_w"], case["resized_h"])
    assert [-(-len(indices) // 2), height // 16, width // 16] == case["grid_thw"]
    if "labels" not in case:
        return
    timestamps_s = np.asarray(indices, dtype=np.float32) / np.float32(case["fps"])
    assert timestamps_s.tolist() == pytest.approx(case["timestamps"][: len(indices)], abs=1e-4)
    assert [label(timestamp_s) for timestamp_s in timestamps_s[::2]] == case["labels"]
    layout = MediaLayout(Modality.VIDEO, tuple(case["grid_thw"]), tuple(timestamps_s[::2].tolist()))
    assert layout.num_vision_tokens == case["pads_per_pair"] * case["grid_thw"][0]
    assert len(expand(layout, IDS, ascii_ids).token_ids) == case["ids"]


@pytest.mark.parametrize("case", [case for case in CASES["videos"] if "pixel_values" in case], ids=case_id)
def test_video_pixels(case: dict[str, Any], arrays: dict[str, Any]) -> None:
    writer = PatchWriter(num_frames=2 * case["grid_thw"][0], height=case["resized_h"], width=case["resized_w"])
    for position, index in enumerate(case["indices"]):
        writer.put(position, blocks(case["h"], case["w"], case["seed"] + index))
    patches = writer.patches()
    assert list(patches.grid_thw) == case["grid_thw"]
    check_pixels(patches, case["pixel_values"])
    if case.get("full"):
        np.testing.assert_allclose(patches.pixel_values, arrays["video10.pixel_values"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", WITH_AUDIO, ids=case_id)
def test_video_with_audio(case: dict[str, Any]) -> None:
    timestamps_s = np.asarray(case["indices"], dtype=np.float32) / np.float32(case["fps"])
    slices = slice_audio(timestamps_s, num_audio_tokens=case["audio_tokens"], tokens_per_s=6.25)
    assert [start for start, _ in slices] == case["audio_starts"]
    assert [length for _, length in slices] == case["audio_lens"]
    layout = MediaLayout(
        Modality.VIDEO,
        tuple(case["grid_thw"]),
        tuple(timestamps_s[::2].tolist()),
        slices,
        sum(length for _, length in slices),
    )
    for interleave_s, key in ((0.0, ""), (-1.0, "_interleave_-1"), (4.0, "_interleave_4")):
        expansion = expand(layout, IDS, ascii_ids, interleave_s=interleave_s)
        assert len(expansion.token_ids) == case[f"ids_with_audio{key}"]


@pytest.mark.parametrize("case", CASES["audio"], ids=lambda case: f"{case['samples']}")
def test_audio_counts(case: dict[str, Any], tiny: ProcessorConfig) -> None:
    samples = np.zeros((1, case["samples"]), dtype=np.float32)
    mel = log_mel(Waveform(samples, case["rate"]), tiny.audio)
    assert mel.log_mel.shape == (case["mel_frames"], 128)
    assert mel.num_tokens == case["audio_tokens"]
    expansion = expand(MediaLayout(Modality.AUDIO, num_audio_rows=mel.num_tokens), IDS, ascii_ids)
    assert len(expansion.token_ids) == case["ids"]


@pytest.mark.parametrize("case", MEL_CASES, ids=lambda case: f"{case['case']}-{case['rate']}Hz-{case['channels']}ch")
def test_log_mel(case: dict[str, Any], tiny: ProcessorConfig) -> None:
    arrays = load_file(GOLDEN / "audio" / "expected_mel.safetensors")
    mel = log_mel(Waveform(arrays[f"wav{case['case']}.samples"], case["rate"]), tiny.audio)
    expected = arrays[f"wav{case['case']}.log_mel"]
    assert mel.log_mel.shape == expected.shape == (case["mel_frames"], 128)
    assert mel.num_tokens == case["audio_tokens"]
    np.testing.assert_allclose(mel.log_mel, expected, atol=1e-3, rtol=0)
