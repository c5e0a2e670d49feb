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
from encoder.runner import TowerJob, TowerRunner
from encoder.towers.weights import Towers, load_towers
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaUnsupported
from preprocess.pipeline import prepare
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality, Patches, PreparedMedia


@pytest.fixture(scope="module")
def runner(tiny_model_dir: Path) -> Iterator[TowerRunner]:
    made = TowerRunner.load(tiny_model_dir, EncoderConfig())
    yield made
    made.close()


def picture(height: int, width: int, num_slices: int = 1, seed: int = 0) -> PreparedMedia:
    grid = (num_slices, height, width)
    rows = np.random.RandomState(seed).standard_normal((num_slices * height * width, 1536)).astype(np.float32)
    layout = MediaLayout(modality=Modality.IMAGE, grid_thw=grid)
    return PreparedMedia(MediaKey(f"{seed}"), layout, Patches(rows, grid), None)


def job_of(runner: TowerRunner, prepared: PreparedMedia) -> TowerJob:
    return TowerJob(prepared, memoryview(bytearray(prepared.layout.num_rows * runner.row_bytes)))


def test_batch_mates_do_not_change_a_byte(runner: TowerRunner) -> None:
    media = [picture(6, 6, seed=1), picture(6, 6, seed=2), picture(2, 2, seed=3), picture(4, 10, 3, seed=4)]
    alone = []
    for prepared in media:
        job = job_of(runner, prepared)
        outcome = runner.run_sync([job])[0]
        assert outcome == checksum(job.destination)
        alone.append(bytes(job.destination))
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (1, 1, 1, 1)):
        jobs = [job_of(runner, media[i]) for i in order]
        runner.run_sync(jobs)
        assert [bytes(job.destination) for job in jobs] == [alone[i] for i in order]


def test_a_long_video_runs_in_passes(runner: TowerRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    video = picture(4, 6, num_slices=7)
    whole, parts = job_of(runner, video), job_of(runner, video)
    runner.run_sync([whole])
    monkeypatch.setattr(runner_module, "PASS_PATCHES", 50)  # two slices of 24 patches
    runner.run_sync([parts])
    rows = [np.frombuffer(job.destination, np.float32) for job in (whole, parts)]
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


def test_one_bad_medium_fails_alone(runner: TowerRunner) -> None:
    good = picture(4, 4)
    lying = PreparedMedia(MediaKey("x"), MediaLayout(modality=Modality.IMAGE, grid_thw=(1, 4, 6)), good.patches, None)
    broken = PreparedMedia(MediaKey("y"), good.layout, Patches(np.zeros((16, 99), np.float32), (1, 4, 4)), None)
    jobs = [job_of(runner, media) for media in (good, lying, broken, good)]
    outcomes = runner.run_sync(jobs)
    assert outcomes[0] == outcomes[3] == checksum(jobs[0].destination)
    assert isinstance(outcomes[1], TowerFailed)
    assert "[4, 192] rows, the layout says [6, 192]" in str(outcomes[1])
    assert isinstance(outcomes[2], TowerFailed)


def test_video_rows_are_pictures_then_the_kept_sound(
    runner: TowerRunner, tiny_model_dir: Path, make_mp4: Callable[..., bytes]
) -> None:
    processor = ProcessorConfig.from_hf(json.loads((tiny_model_dir / "config.json").read_text()))

    def rows_of(options: MediaOptions) -> tuple[PreparedMedia, np.ndarray]:
        media = prepare(
            make_mp4(with_audio=True), modality=Modality.VIDEO, options=options, config=processor, key=MediaKey("k")
        )
        job = job_of(runner, media)
        assert isinstance(runner.run_sync([job])[0], int)
        return media, np.frombuffer(job.destination, np.float32).reshape(-1, runner.width)

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


def test_lane_and_cost() -> None:
    job = TowerJob(picture(4, 6, 2), memoryview(b""))
    assert (job.lane, job.cost) == (Lane.VISION, 48)


def test_no_towers_no_runner() -> None:
    with pytest.raises(ValueError, match="neither"):
        TowerRunner(Towers(None, None, None), dtype=torch.float32)


def test_local_encoder(tiny_model_dir: Path, make_png: Callable[..., bytes], make_wav: Callable[..., bytes]) -> None:
    encoder = LocalEncoder(tiny_model_dir, threads=1)
    layout, rows, key = encoder.encode(make_png(1), Modality.IMAGE)
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
