"""The corpus as a whole: how much of what it holds, and that files with lying names come in as what they are."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from preprocess import Fetcher, FetchLimits, MediaKey, MediaOptions, MediaSource, ProcessorConfig
from preprocess.pipeline import prepare
from preprocess.types import Modality
from tests.fakes.media.case import Case, Refusal
from tests.fakes.media.corpus import corpus

CASES = corpus()


def test_names_are_unique() -> None:
    assert not [name for name, count in Counter(case.name for case in CASES).items() if count > 1]


def test_every_kind_is_there_in_numbers() -> None:
    counts = Counter((case.modality, isinstance(case.expect, Refusal)) for case in CASES)
    for modality, num_shown, num_refused in (
        (Modality.IMAGE, 100, 50),
        (Modality.VIDEO, 110, 25),
        (Modality.AUDIO, 80, 30),
    ):
        assert counts[modality, False] >= num_shown, counts
        assert counts[modality, True] >= num_refused, counts


def test_generating_twice_gives_the_same_kind_of_file(file_of: Callable[[Case], bytes]) -> None:
    # Not the same bytes: some encoders write the time. But nothing grows or shrinks by chance.
    for case in CASES[::25]:
        assert len(case.make()) == pytest.approx(len(file_of(case)), rel=0.02)


LIARS = [case for case in CASES if "-inside." in case.name or "-renamed." in case.name]
TYPES = {
    "jpg": "image/jpeg",
    "png": "image/png",
    "gif": "image/gif",
    "mp4": "video/mp4",
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
}


@pytest.mark.parametrize("case", LIARS, ids=lambda case: case.name)
async def test_names_and_declared_types_do_not_matter(
    case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig, tmp_path: Path
) -> None:
    content = file_of(case)
    path = tmp_path / case.name
    path.write_bytes(content)
    declared = TYPES[path.suffix[1:]]
    urls = (path.as_uri(), f"data:{declared};base64,{base64.b64encode(content).decode()}")
    async with Fetcher(FetchLimits(media_roots=(tmp_path,))) as fetcher:
        for url in urls:
            fetched = await fetcher.fetch(MediaSource(case.modality, url))
            assert fetched == content
            if isinstance(case.expect, Refusal):
                with pytest.raises(case.expect.error, match=case.expect.words):
                    prepare_as(case, fetched, config)
            else:
                prepare_as(case, fetched, config)


def prepare_as(case: Case, content: bytes, config: ProcessorConfig) -> None:
    media = prepare(content, modality=case.modality, options=MediaOptions(), config=config, key=MediaKey("0" * 32))
    assert media.layout.num_rows > 0
    if media.patches is not None:
        assert np.isfinite(media.patches.pixel_values).all()
