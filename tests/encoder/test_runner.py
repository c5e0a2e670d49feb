"""Same medium, same bytes, whoever is in the batch; and one bad medium fails alone."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder import runner as runner_module
from encoder.batcher import Lane
from encoder.cache.arena import checksum
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from encoder.local import LocalEncoder
from encoder.runner import MediumRows, TowerJob, TowerRunner
from encoder.towers.serving import ServingTowers
from encoder.towers.weights import Towers, load_towers
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaUnsupported
from preprocess.patchify import PatchWriter
from preprocess.pipeline import prepare
from preprocess.types import (
    MediaKey,
    MediaLayout,
    MediaOptions,
    MediaPart,
    MelFrames,
    Modality,
    Patches,
    Pixels,
    PreparedMedia,
)


@pytest.fixture(scope="module")
def runner(tiny_model_dir: Path) -> Iterator[TowerRunner]:
    made = TowerRunner.load(tiny_model_dir, EncoderConfig())
    yield made
    made.close()


def picture(height: int, width: int, num_slices: int = 1, seed: int = 0) -> Patches:
    grid = (num_slices, height, width)
    rows = np.random.RandomState(seed).standard_normal((num_slices * height * width, 1536)).astype(np.float32)
    return Patches(rows, grid)


def rows_for(runner: TowerRunner, layout: MediaLayout) -> MediumRows:
    return MediumRows(MediaKey("k"), layout, memoryview(bytearray(layout.num_rows * runner.row_bytes)))


def job_of(runner: TowerRunner, pictures: Patches | Pixels) -> TowerJob:
    """One part that is a whole medium."""
    layout = MediaLayout(modality=Modality.IMAGE, grid_thw=pictures.grid_thw)
    return TowerJob.of_part(rows_for(runner, layout), MediaPart(0, pictures))


def bytes_of(job: TowerJob) -> bytes:
    return bytes(job.rows.destination)


def test_batch_mates_do_not_change_a_byte(runner: TowerRunner) -> None:
    media = [picture(6, 6, seed=1), picture(6, 6, seed=2), picture(2, 2, seed=3), picture(4, 10, 3, seed=4)]
    alone = []
    for patches in media:
        job = job_of(runner, patches)
        assert runner.run_sync([job]) == [None]
        assert job.rows.checksum == checksum(job.rows.destination)
        alone.append(bytes_of(job))
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (1, 1, 1, 1)):
        jobs = [job_of(runner, media[i]) for i in order]
        runner.run_sync(jobs)
        assert [bytes_of(job) for job in jobs] == [alone[i] for i in order]


def test_a_long_video_runs_in_passes(runner: TowerRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    video = picture(4, 6, num_slices=7)
    whole, passes = job_of(runner, video), job_of(runner, video)
    runner.run_sync([whole])
    monkeypatch.setattr(runner_module, "PASS_PATCHES", 50)  # two slices of 24 patches
    runner.run_sync([passes])
    rows = [np.frombuffer(job.rows.destination, np.float32) for job in (whole, passes)]
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_parts_of_whole_passes_give_the_bytes_of_the_whole(
    runner: TowerRunner, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    monkeypatch.setattr(runner_module, "PASS_PATCHES", 50)
    video = picture(4, 6, num_slices=7)
    whole = job_of(runner, video)
    runner.run_sync([whole])
    rows = rows_for(runner, whole.rows.layout)
    parts = []
    for first in range(0, 7, 2):
        values = video.pixel_values[first * 24 : (first + 2) * 24]
        parts.append(MediaPart(first, Patches(values, (len(values) // 24, 4, 6))))
    for number in order:
        assert rows.checksum is None, "some rows are missing"
        assert runner.run_sync([TowerJob.of_part(rows, parts[number])]) == [None]
    assert bytes(rows.destination) == bytes_of(whole)
    assert rows.checksum == whole.rows.checksum


def test_pixels_give_the_bytes_of_patches(runner: TowerRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(0)
    media = []
    for height, width in ((50, 70), (64, 96), (50, 70)):
        frame = random.randint(0, 256, (height, width, 3), dtype=np.uint8)
        media.append(Pixels((frame, frame), 64, 96))
    media.append(Pixels(tuple(random.randint(0, 256, (40, 30, 3), dtype=np.uint8) for _ in range(10)), 64, 32))
    written = []
    for pixels in media:
        writer = PatchWriter(num_frames=len(pixels.frames), height=pixels.height, width=pixels.width)
        for number, frame in enumerate(pixels.frames):
            writer.put(number, frame)
        written.append(writer.patches())
    jobs = [job_of(runner, pixels) for pixels in media]
    expected = [job_of(runner, patches) for patches in written]
    # One batch: a part in several passes, and batch mates that come as patches.
    monkeypatch.setattr(runner_module, "PASS_PATCHES", 16)
    assert runner.run_sync([*jobs, *expected]) == [None] * 8
    assert [bytes_of(job) for job in jobs] == [bytes_of(job) for job in expected]
    assert [job.cost for job in jobs] == [job.cost for job in expected]
    assert jobs[0].size_bytes == 50 * 70 * 3


def test_one_medium_whose_pixels_cannot_be_cut_fails_alone(runner: TowerRunner) -> None:
    frame = np.zeros((50, 70, 3), dtype=np.uint8)
    good = Pixels((frame, frame), 64, 96)
    wrong = Pixels((frame[:, :, :2], frame[:, :, :2]), 64, 96)
    jobs = [job_of(runner, pixels) for pixels in (good, wrong, good)]
    outcomes = runner.run_sync(jobs)
    assert [type(outcome) for outcome in outcomes] == [type(None), TowerFailed, type(None)]
    assert bytes_of(jobs[0]) == bytes_of(jobs[2])


def test_one_bad_medium_fails_alone(runner: TowerRunner) -> None:
    good = picture(4, 4)
    lying = TowerJob.of_part(
        rows_for(runner, MediaLayout(modality=Modality.IMAGE, grid_thw=(1, 4, 4))), MediaPart(1, good)
    )
    short = job_of(runner, Patches(good.pixel_values, (1, 4, 6)))
    broken = job_of(runner, Patches(np.zeros((16, 99), np.float32), (1, 4, 4)))
    jobs = [job_of(runner, good), lying, short, broken, job_of(runner, good)]
    outcomes = runner.run_sync(jobs)
    assert outcomes[0] is outcomes[4] is None
    assert jobs[0].rows.checksum == jobs[4].rows.checksum == checksum(jobs[0].rows.destination)
    assert isinstance(outcomes[1], TowerFailed)
    assert "past the 4 of the layout" in str(outcomes[1])
    assert isinstance(outcomes[2], TowerFailed)
    assert isinstance(outcomes[3], TowerFailed)


def test_video_rows_are_pictures_then_the_kept_sound(
    runner: TowerRunner, tiny_model_dir: Path, make_mp4: Callable[..., bytes]
) -> None:
    processor = ProcessorConfig.from_hf(json.loads((tiny_model_dir / "config.json").read_text()))

    def rows_of(options: MediaOptions) -> tuple[PreparedMedia, np.ndarray]:
        media = prepare(
            make_mp4(with_audio=True), modality=Modality.VIDEO, options=options, config=processor, key=MediaKey("k")
        )
        rows = rows_for(runner, media.layout)
        assert media.patches is not None
        jobs = [TowerJob.of_part(rows, MediaPart(0, media.patches))]
        jobs += [] if media.mel is None else [TowerJob.of_sound(rows, media.mel)]
        assert runner.run_sync(jobs) == [None] * len(jobs)
        return media, np.frombuffer(rows.destination, np.float32).reshape(-1, runner.width)

    silent, pictures = rows_of(MediaOptions(use_audio=False))
    full, both = rows_of(MediaOptions())
    assert full.layout.audio_slices
    assert np.array_equal(both[: silent.layout.num_rows], pictures)
    assert full.mel is not None
    towers = load_towers(tiny_model_dir, torch.float32)
    assert towers.audio_tokenizer is not None
    assert towers.audio_encoder is not None
    with torch.inference_mode():
        sound = towers.audio_encoder([towers.audio_tokenizer.encode(torch.tensor(full.mel.log_mel))])
    kept = np.concatenate([sound[start : start + length].numpy() for start, length in full.layout.audio_slices])
    np.testing.assert_allclose(both[silent.layout.num_rows :], kept, atol=1e-5)


def test_threads_of_the_caller_are_left_alone(tiny_model_dir: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made = TowerRunner.load(tiny_model_dir, EncoderConfig(tower_threads=1))
        assert torch.get_num_threads() == 2
        made.close()
    finally:
        torch.set_num_threads(before)


def test_lane_and_cost(runner: TowerRunner) -> None:
    job = job_of(runner, picture(4, 6, 2))
    assert (job.lane, job.cost, job.size_bytes) == (Lane.VISION, 48, 48 * 1536 * 4)
    layout = MediaLayout(Modality.AUDIO, num_audio_rows=3)
    sound = TowerJob.of_sound(rows_for(runner, layout), MelFrames(np.zeros((40, 128), np.float32), 0.4))
    assert (sound.lane, sound.cost, sound.size_bytes) == (Lane.AUDIO, 40, 40 * 128 * 4)
    assert (sound.first_row, sound.num_rows) == (0, 3)


def test_no_towers_no_runner() -> None:
    with pytest.raises(ValueError, match="neither"):
        TowerRunner(Towers(None, None, None), dtype=torch.float32)


def test_local_encoder(tiny_model_dir: Path, make_png: Callable[..., bytes], make_wav: Callable[..., bytes]) -> None:
    encoder = LocalEncoder(tiny_model_dir, threads=1)
    layout, rows, key, _ = encoder.encode(make_png(1), Modality.IMAGE)
    assert rows.shape == (layout.num_rows, 192)
    assert rows.dtype == np.float32
    assert len(key) == 32
    again = encoder.encode(make_png(1), Modality.IMAGE, MediaOptions())
    assert np.array_equal(again[1], rows)
    assert again[2] == key
    assert encoder.encode(make_wav(1), Modality.AUDIO)[1].shape[0] == 7
    encoder.close()


def test_local_encoder_in_bfloat16_is_near(tiny_model_dir: Path, make_png: Callable[..., bytes]) -> None:
    rows = [
        LocalEncoder(tiny_model_dir, EncoderConfig(dtype=dtype)).encode(make_png(1), Modality.IMAGE)[1]
        for dtype in ("float32", "bfloat16")
    ]
    assert rows[1].dtype == np.float32
    assert np.abs(rows[0] - rows[1]).max() < 0.02


def test_a_modality_without_tower_is_refused(
    tiny_model_dir: Path, tmp_path: Path, make_wav: Callable[..., bytes]
) -> None:
    config = json.loads((tiny_model_dir / "config.json").read_text())
    del config["audio_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((tiny_model_dir / "model.safetensors").read_bytes())
    encoder = LocalEncoder(tmp_path)
    with pytest.raises(MediaUnsupported, match="audio"):
        encoder.encode(make_wav(), Modality.AUDIO)


def test_media_of_a_batch_share_a_pass_as_far_as_they_fit(runner: TowerRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    media = [picture(4, 4, seed=1), picture(4, 6, seed=2), picture(2, 2, 9, seed=3), picture(2, 2, seed=4)]

    def passes_of(jobs: list[TowerJob]) -> int:
        before = runner.num_passes
        assert runner.run_sync(jobs) == [None] * len(jobs)
        return runner.num_passes - before

    together = [job_of(runner, patches) for patches in media]
    assert passes_of(together) == 1
    monkeypatch.setattr(runner_module, "PASS_PATCHES", 40)
    # 16 + 24 patches, 36 + 4.
    assert passes_of([job_of(runner, patches) for patches in media]) == 2
    alone = [job_of(runner, patches) for patches in media]
    assert [passes_of([job]) for job in alone] == [1] * 4
    assert [bytes_of(job) for job in alone] == [bytes_of(job) for job in together]
    monkeypatch.setattr(runner_module, "PASS_PATCHES", 8)
    # Larger than a pass: by itself, in passes of its own.
    assert passes_of([job_of(runner, patches) for patches in media]) == 1 + 1 + 5 + 1


def test_sounds_of_a_batch_share_a_pass(runner: TowerRunner) -> None:
    def sound(frames: int) -> TowerJob:
        mel = np.random.RandomState(frames).standard_normal((frames, 128)).astype(np.float32)
        return TowerJob.of_sound(
            rows_for(runner, MediaLayout(Modality.AUDIO, num_audio_rows=-(-frames // 16))), MelFrames(mel, 1.0)
        )

    frames = (40, 333, 7, 40, 800)
    alone = [sound(number) for number in frames]
    assert [runner.run_sync([job]) for job in alone] == [[None]] * 5
    together = [sound(number) for number in frames]
    before = runner.num_passes
    # A picture between them is a pass of its own kind.
    assert runner.run_sync([*together[:2], job_of(runner, picture(2, 2)), *together[2:]]) == [None] * 6
    assert runner.num_passes == before + 2
    assert [bytes_of(job) for job in together] == [bytes_of(job) for job in alone]


def test_when_a_pass_fails_each_of_its_media_is_tried_alone(
    runner: TowerRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows_of = runner._towers.rows_of_pictures

    def too_large(pictures: list[torch.Tensor], grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        if len(grids) > 1:
            raise RuntimeError("out of memory, say")
        return rows_of(pictures, grids)

    monkeypatch.setattr(runner._towers, "rows_of_pictures", too_large)
    jobs = [job_of(runner, picture(4, 4, seed=number)) for number in range(3)]
    assert runner.run_sync(jobs) == [None] * 3
    assert "a pass of 3 media failed" in caplog.text


def test_where_company_matters_every_medium_runs_by_itself(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServingTowers, "keep_media_apart", lambda self: False)
    made = TowerRunner.load(tiny_model_dir, EncoderConfig())
    try:
        assert "each runs by itself" in caplog.text
        assert (made.packs, made.num_refused_packing) == (False, 1)
        jobs = [job_of(made, picture(4, 4, seed=number)) for number in range(3)]
        assert made.run_sync(jobs) == [None] * 3
        assert made.num_passes == 3
    finally:
        made.close()


def test_a_compiler_that_does_not_work_is_refused(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(ValueError, match=r"encoder.compile is true, but .* here: no C\+\+ compiler$"):
        TowerRunner.load(tiny_model_dir, EncoderConfig(compile=True))
