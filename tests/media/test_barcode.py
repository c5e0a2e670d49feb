"""The barcode reader reads what was written, at any size, and refuses what was not."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.fakes.media.barcode import MARKS, BarcodeUnreadable, barcode_picture, read_barcode, read_marks


@given(st.integers(0, 65535), st.integers(10, 97), st.integers(16, 163))
def test_every_number_is_read_at_every_size(number: int, height: int, width: int) -> None:
    assert read_barcode(barcode_picture(number, height=height, width=width)) == number


@pytest.mark.parametrize("number", [0, 1, 77, 255, 256, 4095, 65535])
@pytest.mark.parametrize("size", [(64, 40), (130, 71), (640, 360)])
def test_numbers_and_colours_survive_jpeg_and_resizing(number: int, size: tuple[int, int]) -> None:
    file = io.BytesIO()
    Image.fromarray(barcode_picture(number)).save(file, "JPEG", quality=40)
    picture = np.asarray(Image.open(file).resize(size, Image.Resampling.BILINEAR))
    assert read_barcode(picture) == number
    np.testing.assert_allclose(read_marks(picture), MARKS, atol=30)


def test_other_pictures_are_refused() -> None:
    picture = barcode_picture(300)
    neighbour = barcode_picture(301)
    torn = np.concatenate([picture[:60], barcode_picture(9)[60:]])
    mixed = (picture.astype(int) + neighbour) // 2
    for wrong in (picture[::-1], picture[:, ::-1], picture[::-1, ::-1], torn, mixed, np.zeros_like(picture)):
        with pytest.raises(BarcodeUnreadable):
            read_barcode(wrong)


@given(st.integers(0, 65535), st.integers(0, 23))
def test_one_wrong_cell_is_noticed(number: int, cell: int) -> None:
    picture = barcode_picture(number, height=10, width=16)
    row, column = divmod(cell, 8)
    block = picture[2 * row + 2 : 2 * row + 4, 2 * column : 2 * column + 2]
    block[:] = 251 - block
    with pytest.raises(BarcodeUnreadable):
        read_barcode(picture)
