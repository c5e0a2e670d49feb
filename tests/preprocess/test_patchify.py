"""Resize, normalise and cut: against PyTorch's resize over drawn sizes, and the same bits however it is called."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from preprocess import DecodeLimits, Frames
from preprocess.bilinear import axis, bands
from preprocess.image import decode_image
from preprocess.patchify import PatchWriter, patchify
from preprocess.scratch import Scratch
from tests.oracles.effort import effort
from tests.oracles.torch_patches import torch_patches

UNITS = st.integers(1, 7)
SIDES = st.integers(1, 5) | st.integers(1, 260) | st.sampled_from([32, 64, 96, 128, 31, 33, 63, 65])
TOLERANCE = 1e-5
"""A tenth of what the published processor's values are held to."""


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def written(frames: list[NDArray[np.uint8]], height: int, width: int) -> NDArray[np.float32]:
    writer = PatchWriter(num_frames=len(frames), height=height, width=width)
    for number, frame in enumerate(frames):
        writer.put(number, frame)
    return writer.patches().pixel_values


@given(source=st.tuples(SIDES, SIDES), target=st.tuples(UNITS, UNITS), seed=st.integers(0, 999))
@example(source=(1, 1), target=(1, 1), seed=0)
@example(source=(1, 97), target=(1, 3), seed=0)
@example(source=(64, 96), target=(2, 3), seed=0)
@example(source=(64, 50), target=(2, 3), seed=0)
@example(source=(50, 96), target=(2, 3), seed=0)
@example(source=(7, 9), target=(1, 40), seed=0)
@example(source=(2000, 2), target=(1, 1), seed=0)
@effort(120)
def test_equal_to_the_resize_of_torch(source: tuple[int, int], target: tuple[int, int], seed: int) -> None:
    height, width = 32 * target[0], 32 * target[1]
    frames = [noise(*source, seed=seed), noise(*source, seed=seed + 1)]
    np.testing.assert_allclose(
        written(frames, height, width), torch_patches(frames, height, width), atol=TOLERANCE, rtol=0
    )


def test_large_pictures_have_the_single_precision_weights_of_torch() -> None:
    # Where positions are in the thousands, weights from more precise positions are off by ten times the tolerance.
    frame = noise(3, 9001)
    np.testing.assert_allclose(
        written([frame, frame], 32, 3328), torch_patches([frame, frame], 32, 3328), atol=TOLERANCE, rtol=0
    )


@given(sides=st.tuples(st.integers(1, 10_000), st.integers(1, 300)))
@effort(60)
def test_weights_are_those_of_torch_bit_for_bit(sides: tuple[int, int]) -> None:
    num_source, num_target = sides[0], 32 * sides[1]
    # Zeros and ones in turn: an output is one of its two weights.
    line = (np.arange(num_source) % 2).astype(np.float32)
    side = axis(num_source, num_target)
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(line).view(1, 1, 1, -1), size=(1, num_target), mode="bilinear", align_corners=False
    )
    ours = side.first_weight * line[side.first] + side.second_weight * line[side.second]
    np.testing.assert_array_equal(ours, resized.numpy().ravel())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_oriented_pictures(orientation: int) -> None:
    image = Image.fromarray(noise(45, 70))
    exif = image.getexif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    decoded = decode_image(file.getvalue(), DecodeLimits())
    upright = np.asarray(ImageOps.exif_transpose(Image.open(file)))
    height, width = (64, 96) if orientation < 5 else (96, 64)
    np.testing.assert_allclose(
        written([decoded, decoded], height, width),
        torch_patches([upright, upright], height, width),
        atol=TOLERANCE,
        rtol=0,
    )


def memory_orders() -> dict[str, NDArray[np.uint8]]:
    """One picture in every way that it may lie in memory."""
    picture = noise(70, 45, seed=4)
    padded = np.zeros((70, 64, 3), dtype=np.uint8)
    padded[:, 3:48] = picture
    shifted = np.zeros(picture.size + 1, dtype=np.uint8)
    shifted[1:] = picture.ravel()
    read_only = picture.copy()
    read_only.setflags(write=False)
    return {
        "plain": picture,
        "rows reversed": picture[::-1].copy()[::-1],
        "columns reversed": picture[:, ::-1].copy()[:, ::-1],
        "channels reversed": picture[:, :, ::-1].copy()[:, :, ::-1],
        "on its side": picture.transpose(1, 0, 2).copy().transpose(1, 0, 2),
        "planes": picture.transpose(2, 0, 1).copy().transpose(1, 2, 0),
        "window of a larger one": padded[:, 3:48],
        "odd address": shifted[1:].reshape(picture.shape),
        "four bytes a pixel": np.dstack([picture, picture[:, :, :1]])[:, :, :3],
        "read only": read_only,
    }


@pytest.mark.parametrize("size", [(64, 96), (96, 32), (64, 1024)])
@pytest.mark.parametrize("order", memory_orders())
def test_same_bits_wherever_the_picture_lies(order: str, size: tuple[int, int]) -> None:
    orders = memory_orders()
    expected = written([orders["plain"]] * 2, *size)
    np.testing.assert_array_equal(written([orders[order]] * 2, *size), expected)


def test_wide_and_narrow_bands_have_the_same_bits() -> None:
    # The pass down has one form for narrow pictures and one for wide ones: a doubled picture is both.
    once = noise(70, 512)
    twice = np.concatenate([once, once], axis=1)
    narrow = np.concatenate([band.copy() for band in bands(once, height=96, width=512, unit=32, memory=Scratch())])
    wide = np.concatenate([band.copy() for band in bands(twice, height=96, width=1024, unit=32, memory=Scratch())])
    np.testing.assert_array_equal(wide[:, :, :512], narrow)
    np.testing.assert_array_equal(wide[:, :, 512:], narrow)


def test_frames_of_different_sizes_in_any_order_from_many_threads() -> None:
    frames = [noise(40 + 7 * number, 90 - 5 * number, seed=number) for number in range(8)]
    writer = PatchWriter(num_frames=8, height=64, width=96)
    threads = [
        threading.Thread(target=writer.put, args=(number, frames[number])) for number in (5, 2, 7, 0, 3, 1, 6, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(writer.patches().pixel_values, written(frames, 64, 96))


def test_a_pair_at_once_is_both_frames() -> None:
    frame = noise(33, 120)
    writer = PatchWriter(num_frames=4, height=64, width=96)
    writer.put_pair(1, frame)
    writer.put(0, frame)
    writer.repeat(1)
    np.testing.assert_array_equal(writer.patches().pixel_values, written([frame] * 4, 64, 96))


@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_an_odd_count_has_its_last_frame_twice(num_frames: int) -> None:
    frames = np.stack([noise(40, 50, seed=number) for number in range(num_frames)])
    patches = patchify(Frames(frames, np.zeros(num_frames, np.float32)), height=32, width=64)
    expected = [*frames, frames[-1]][: num_frames + num_frames % 2]
    np.testing.assert_array_equal(patches.pixel_values, written(expected, 32, 64))


def test_writes_to_memory_of_the_caller() -> None:
    memory = np.full((2 * 4 * 6, 1536), np.nan, dtype=np.float32)
    frames = [noise(40, 50, seed=number) for number in range(4)]
    writer = PatchWriter(num_frames=4, height=64, width=96, rows=memory)
    for number, frame in enumerate(frames):
        writer.put(number, frame)
    assert writer.patches().pixel_values is memory
    np.testing.assert_array_equal(memory, written(frames, 64, 96))


@pytest.mark.parametrize(
    "rows",
    [
        np.empty((24, 1535), np.float32),
        np.empty((24, 1536), np.float64),
        np.empty((24, 3072), np.float32)[:, ::2],
    ],
)
def test_unfit_memory_is_refused(rows: NDArray[np.float32]) -> None:
    with pytest.raises(ValueError, match=r"wanted is contiguous float32 \(24, 1536\)"):
        PatchWriter(num_frames=2, height=64, width=96, rows=rows)


def test_missing_frames_and_odd_sizes_are_refused() -> None:
    writer = PatchWriter(num_frames=2, height=32, width=32)
    with pytest.raises(ValueError, match="frame 0 was not stored, so it cannot be repeated"):
        writer.repeat(1)
    writer.put(1, noise(32, 32))
    with pytest.raises(ValueError, match="frame 0 of 2 was not stored"):
        writer.patches()
    with pytest.raises(ValueError, match="positive even number"):
        PatchWriter(num_frames=3, height=32, width=32)
    with pytest.raises(ValueError, match="positive multiples of 32"):
        PatchWriter(num_frames=2, height=48, width=32)
