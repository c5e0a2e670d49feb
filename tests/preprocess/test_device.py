"""Patches as tensor operations: the bits of the other path, whatever is batched with what."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import Pixels, device
from preprocess.device import patches_on
from preprocess.patchify import PatchWriter
from tests.oracles.effort import effort
from tests.oracles.torch_patches import torch_patches

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIDES = st.integers(1, 4) | st.integers(1, 150) | st.sampled_from([32, 64, 96])


def noise(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def written(pixels: Pixels) -> NDArray[np.float32]:
    writer = PatchWriter(num_frames=len(pixels.frames), height=pixels.height, width=pixels.width)
    for number, frame in enumerate(pixels.frames):
        writer.put(number, frame)
    return writer.patches().pixel_values


@st.composite
def media(draw: st.DrawFn) -> Pixels:
    """An image, a clip of even or odd length, or one whose picture size changes on the way."""
    seed = draw(st.integers(0, 999))
    sizes = draw(st.lists(st.sampled_from([(40, 60), (64, 96), draw(st.tuples(SIDES, SIDES))]), min_size=1, max_size=4))
    frames = [noise(*size, seed=seed + number) for number, size in enumerate(sizes)]
    frames += frames[-1:] * (len(frames) % 2)
    height, width = draw(st.sampled_from([(64, 96), (32, 32), (96, 64)]))
    return Pixels(tuple(frames), height, width)


@pytest.mark.parametrize("name", DEVICES)
@given(pictures=st.lists(media(), max_size=5))
@effort(30)
def test_same_bits_as_the_writer(pictures: list[Pixels], name: str) -> None:
    results = patches_on(pictures, name)
    assert len(results) == len(pictures)
    for picture, result in zip(pictures, results, strict=True):
        t, h, w = picture.grid_thw
        assert result.shape == (t * h * w, 1536)
        assert result.dtype == torch.float32
        assert result.is_contiguous()
        np.testing.assert_allclose(
            result.cpu().numpy(), torch_patches(picture.frames, picture.height, picture.width), atol=1e-5, rtol=0
        )
        if name == "cpu":
            np.testing.assert_array_equal(result.numpy(), written(picture))


def test_batches_of_bounded_memory_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [Pixels((frame, frame), 64, 96) for frame in (noise(50, 70, seed) for seed in range(5))]
    expected = [written(picture) for picture in pictures]
    # Two pictures of 50 x 96 pixels a batch, then less than one.
    for most in (2 * 50 * 96, 10):
        monkeypatch.setattr(device, "_BATCH_PIXELS", most)
        for result, wanted in zip(patches_on(pictures, torch.device("cpu")), expected, strict=True):
            np.testing.assert_array_equal(result.numpy(), wanted)


def test_equal_pictures_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    resized = device._resized

    def counted(frames: list[NDArray[np.uint8]], height: int, width: int, where: torch.device) -> torch.Tensor:
        sizes.append(len(frames))
        return resized(frames, height, width, where)

    monkeypatch.setattr(device, "_resized", counted)
    images = [Pixels((frame, frame), 64, 96) for frame in (noise(50, 70, seed) for seed in range(3))]
    clip = Pixels(tuple(noise(50, 70, seed) for seed in range(4)), 64, 96)
    other = noise(51, 70, 0)
    patches_on([*images, clip, Pixels((other, other), 64, 96)], "cpu")
    # An image is uploaded and resized once, though it is both frames of its pair.
    assert sorted(sizes) == [1, 7]


def test_nothing_to_do() -> None:
    assert patches_on([], "cpu") == []
