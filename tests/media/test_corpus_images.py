"""Generated picture files: displayed size, colour at marked points, or the expected error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from preprocess import MediaKey, MediaOptions, ProcessorConfig
from preprocess.image import decode_image
from preprocess.pipeline import prepare
from preprocess.types import Modality
from tests.fakes.media.case import Case, Mark, Picture, Refusal
from tests.fakes.media.image_cases import image_cases
from tests.fakes.media.image_fault_cases import image_fault_cases
from tests.oracles.unpatchify import unpatchify

CASES = image_cases() + image_fault_cases()
# Pillow's remarks on odd files; a service only logs them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]
SHOWN = [case for case in CASES if isinstance(case.expect, Picture)]
REFUSED = [case for case in CASES if isinstance(case.expect, Refusal)]


def check_marks(picture: NDArray[np.generic], marks: tuple[Mark, ...], tolerance: float) -> None:
    height, width = picture.shape[:2]
    places = [(int(y * height), int(x * width)) for y, x, _ in marks]
    seen = np.array([picture[place] for place in places], dtype=np.float64)
    wanted = np.array([colour for _, _, colour in marks], dtype=np.float64)
    np.testing.assert_allclose(seen, wanted, rtol=0, atol=tolerance, err_msg=f"at (y, x) {places}")


@pytest.mark.parametrize("case", SHOWN, ids=lambda case: case.name)
def test_pictures(case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig) -> None:
    expect, content = case.expect, file_of(case)
    assert isinstance(expect, Picture)
    pixels = decode_image(content, config.limits)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (expect.height, expect.width, 3)
    check_marks(pixels, expect.marks, expect.tolerance)
    assert len(np.unique(pixels[:, :, 0])) >= expect.num_levels

    prepared = prepare(content, modality=Modality.IMAGE, options=MediaOptions(), config=config, key=MediaKey("0" * 32))
    assert prepared.patches is not None
    grid = expect.grid
    if grid is None:
        assert expect.height % 32 == expect.width % 32 == 0, "a case of this size must say its grid"
        grid = (expect.height // 16, expect.width // 16)
    assert prepared.layout.grid_thw == prepared.patches.grid_thw == (1, *grid)
    first, second = unpatchify(prepared.patches.pixel_values, prepared.patches.grid_thw)
    np.testing.assert_array_equal(first, second)
    check_marks(first, expect.marks, expect.tolerance + 0.01)
    assert prepared.warnings == ()


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refusals(case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig) -> None:
    expect, content = case.expect, file_of(case)
    assert isinstance(expect, Refusal)
    with pytest.raises(expect.error, match=f"(?s){expect.words}") as caught:
        prepare(content, modality=Modality.IMAGE, options=MediaOptions(), config=config, key=MediaKey("0" * 32))
    assert type(caught.value) is expect.error
