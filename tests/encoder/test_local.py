"""The encoder without a server: few parts at a time, the same settings, and an end in order."""

import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest

from encoder import tower_queue as queue_module
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from encoder.local import LocalEncoder
from encoder.runner import MediumRows, TowerJob, TowerRunner
from preprocess.errors import MediaError
from preprocess.types import MediaOptions, MediaPart, Modality, Patches
from tests.fakes.media_parts import NUM_PARTS, PART_BYTES, SMALL_PASS, RowsOf


def test_a_local_encoder_gives_the_same_and_holds_few_parts(
    tiny_model_dir: Path,
    whole_rows: RowsOf,
    monkeypatch: pytest.MonkeyPatch,
    clip: bytes,
) -> None:
    monkeypatch.setattr(queue_module, "MAX_HELD_BYTES", 2 * PART_BYTES)
    alive, most = 0, 0
    counting = threading.Lock()
    of_part = TowerJob.of_part.__func__  # type: ignore[attr-defined]

    def counted(kind: type[TowerJob], rows: MediumRows, part: MediaPart) -> TowerJob:
        nonlocal alive, most
        with counting:
            alive += 1
            most = max(most, alive)

        def gone() -> None:
            nonlocal alive
            with counting:
                alive -= 1

        job: TowerJob = of_part(kind, rows, part)
        assert isinstance(part.pictures, Patches)
        weakref.finalize(part.pictures.pixel_values, gone)
        return job

    monkeypatch.setattr(TowerJob, "of_part", classmethod(counted))
    encoder = LocalEncoder(tiny_model_dir, EncoderConfig(max_batch_patches=SMALL_PASS))
    try:
        layout, rows, _, warnings = encoder.encode(clip, Modality.VIDEO)
    finally:
        encoder.close()
    expected, media = whole_rows(clip, Modality.VIDEO)
    assert layout == media.layout
    assert warnings == media.warnings == ()
    assert rows.tobytes() == expected
    assert 1 <= most <= 4 < NUM_PARTS


@pytest.mark.parametrize("config", [EncoderConfig(preprocess="tower"), EncoderConfig(isolation="processes")])
def test_a_local_encoder_heeds_its_settings(
    tiny_model_dir: Path,
    whole_rows: RowsOf,
    damaged: bytes,
    config: EncoderConfig,
) -> None:
    encoder = LocalEncoder(tiny_model_dir, config)
    try:
        expected, media = whole_rows(damaged, Modality.VIDEO)
        found = encoder.encode(damaged, Modality.VIDEO)
        assert found.rows.tobytes() == expected
        assert found.warnings == media.warnings
        assert found.warnings
        with pytest.raises(MediaError):
            encoder.encode(b"no medium", Modality.VIDEO)
    finally:
        encoder.close()


def test_towers_share_the_work_and_give_the_same(
    tiny_model_dir: Path, whole_rows: RowsOf, monkeypatch: pytest.MonkeyPatch, clip: bytes
) -> None:
    worked = set()
    run = TowerRunner.run

    async def noted(self: TowerRunner, jobs: Sequence[TowerJob]) -> list[TowerFailed | None]:
        worked.add(id(self))
        return await run(self, jobs)

    monkeypatch.setattr(TowerRunner, "run", noted)
    encoder = LocalEncoder(tiny_model_dir, num_towers=2)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: encoder.encode(clip, Modality.VIDEO).rows.tobytes(), range(4)))
    finally:
        encoder.close()
    assert len(worked) == 2
    assert set(found) == {whole_rows(clip, Modality.VIDEO)[0]}


def test_settings_tell_all_that_rows_depend_on_but_the_content(tiny_model_dir: Path) -> None:
    found = set()
    for config in (EncoderConfig(), EncoderConfig(dtype="bfloat16"), EncoderConfig(tower_threads=2)):
        encoder = LocalEncoder(tiny_model_dir, config)
        found.add(encoder.settings(Modality.VIDEO, MediaOptions()))
        found.add(encoder.settings(Modality.VIDEO, MediaOptions(fps=3.0)))
        found.add(encoder.settings(Modality.IMAGE, MediaOptions()))
        encoder.close()
    assert len(found) == 9
    again = LocalEncoder(tiny_model_dir, num_towers=2)
    assert again.settings(Modality.IMAGE, MediaOptions(detail="high")) in found
    again.close()


def test_closing_a_local_encoder_ends_what_it_is_at(tiny_model_dir: Path, small_parts: None, clip: bytes) -> None:
    encoder = LocalEncoder(tiny_model_dir)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(encoder.encode, clip, Modality.VIDEO) for _ in range(4)]
        time.sleep(0.05)
        encoder.close()
        encoder.close()
        assert any(isinstance(call.exception(), CancelledError) for call in calls)
    with pytest.raises(RuntimeError, match="closed"):
        encoder.encode(clip, Modality.VIDEO)


def test_a_local_encoder_that_is_forgotten_ends_its_threads(tiny_model_dir: Path) -> None:
    before = set(threading.enumerate())
    LocalEncoder(tiny_model_dir)
    assert set(threading.enumerate()) <= before
