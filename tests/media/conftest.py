"""Settings and generated files shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from preprocess.config import ImageBudget, ProcessorConfig, VideoBudget
from preprocess.types import UNIT_PIXELS
from tests.fakes.media.case import Case


@pytest.fixture(scope="session")
def config() -> ProcessorConfig:
    """Resizing leaves pictures alone whose sides are multiples of 32, up to four megapixels."""
    return ProcessorConfig(
        image=ImageBudget(min_pixels=UNIT_PIXELS, max_pixels=4096 * UNIT_PIXELS),
        video=VideoBudget(
            min_pixels=UNIT_PIXELS,
            max_pixels=4096 * UNIT_PIXELS,
            total_max_pixels=16_384 * UNIT_PIXELS,
            fps=2.0,
            min_frames=2,
            max_frames=256,
            num_frames=None,
            use_audio=None,
        ),
    )


@pytest.fixture(scope="session")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], bytes]:
    """The bytes of a case, made once and kept in a folder of this run."""
    folder = tmp_path_factory.mktemp("corpus")

    def make(case: Case) -> bytes:
        path: Path = folder / case.name
        if not path.exists():
            path.write_bytes(case.make())
        return path.read_bytes()

    return make
