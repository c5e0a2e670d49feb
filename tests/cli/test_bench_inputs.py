"""Inputs of the benches and the plain ways, on small sizes: they are what their names say."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from cli import bench_plain
from cli.bench_inputs import Clip, LongClip, pictures, song
from cli.bench_media import processor
from preprocess.pipeline import open_media, prepare
from preprocess.sniff import sniff
from preprocess.types import MediaKey, MediaOptions, Modality
from tests.cli.test_bench import Steps
from tests.fakes.clips import picture_file

CLIP = Clip(duration_s=2, width=128, height=96, gop=20)


def packets(path: Path) -> list[Any]:
    with av.open(str(path)) as container:
        return [packet for packet in container.demux(video=0) if packet.pts is not None]


def test_clips(tmp_path: Path) -> None:
    steps = Steps()
    path = CLIP.path(tmp_path, steps)
    found = packets(path)
    assert len(found) == 50
    shown = sorted(found, key=lambda packet: packet.pts)
    assert [index for index, packet in enumerate(shown) if packet.is_keyframe] == [0, 20, 40]
    assert [packet.pts for packet in found] != [packet.pts for packet in shown], "there are B-frames"
    assert steps.num_done == 50
    before = path.stat().st_mtime_ns
    assert CLIP.path(tmp_path, steps) == path
    assert path.stat().st_mtime_ns == before, "made once"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_long_clips_play_on(tmp_path: Path) -> None:
    long = LongClip(CLIP, 3)
    assert long.duration_s == 6
    path = long.path(tmp_path, Steps())
    times = sorted(float(packet.pts * packet.time_base) for packet in packets(path))
    assert len(times) == 150
    assert np.allclose(np.diff(times), 0.04)
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="gray") for frame in container.decode(video=0)]
    assert len(frames) == 150
    # The second time shows what the first showed.
    assert np.array_equal(frames[0], frames[50])
    assert np.array_equal(frames[49], frames[149])


def test_an_interrupted_input_leaves_nothing(tmp_path: Path) -> None:
    class Interrupting(Steps):
        def advance(self, amount: int = 1) -> None:
            super().advance(amount)
            if self.num_done == 10:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CLIP.path(tmp_path, Interrupting())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {"quality": 90, "subsampling": 2}), ("PNG", {}), ("WEBP", {})])
def test_pictures(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    found = pictures(tmp_path, Steps(), kind=kind, num_files=3, width=200, height=150, **options)
    assert len(set(found)) == 3
    assert [sniff(content).upper() for content in found] == [kind.replace("WEBP", "WEBP")] * 3
    assert pictures(tmp_path, Steps(), kind=kind, num_files=3, width=200, height=150, **options) == found


def test_photographs_compress_as_photographs_do(tmp_path: Path) -> None:
    (content,) = pictures(
        tmp_path, Steps(), kind="JPEG", num_files=1, width=1000, height=750, quality=90, subsampling=2
    )
    assert 1.0 < len(content) * 8 / (1000 * 750) < 2.5


@pytest.mark.parametrize("kind", ["mp3", "m4a"])
def test_songs_and_the_plain_mel(tmp_path: Path, kind: str) -> None:
    path = song(tmp_path, Steps(), duration_s=2, kind=kind)
    samples, rate_hz = bench_plain.decoded_sound(path)
    assert (rate_hz, samples.shape[1]) == (48_000, 2)
    assert len(samples) == pytest.approx(2 * 48_000, abs=3000)
    if kind == "mp3":
        assert soundfile.info(str(path)).format == "MP3"
    plain = bench_plain.log_mel(path, rate_hz=24_000, num_fft=960, hop=240, num_mels=128)
    opened = open_media(
        path.read_bytes(), modality=Modality.AUDIO, options=MediaOptions(), config=processor(), key=MediaKey("0" * 32)
    )
    assert opened.mel is not None
    ours = opened.mel.log_mel
    assert abs(len(plain) - len(ours)) <= 2
    # Another resampler and another filter bank, the same music.
    rows = min(len(plain), len(ours))
    assert np.corrcoef(plain[20 : rows - 20].ravel(), ours[20 : rows - 20].ravel())[0, 1] > 0.9


def test_plain_pictures_are_in_our_order() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    content = picture_file(pixels)
    options = MediaOptions(min_pixels=64 * 96, max_pixels=64 * 96)
    ours = prepare(
        content, modality=Modality.IMAGE, options=options, config=processor(), key=MediaKey("0" * 32)
    ).patches
    assert ours is not None
    assert ours.grid_thw == (1, 4, 6)
    np.testing.assert_allclose(bench_plain.picture_patches(content, (64, 96)), ours.pixel_values, atol=1e-4)


def test_plain_frames(tmp_path: Path) -> None:
    path = CLIP.path(tmp_path, Steps())
    assert bench_plain.decord_frames(path, [0, 10, 49], 1) == 3
    assert bench_plain.scanned_frames(path, [0, 10, 49], 1) == 3
