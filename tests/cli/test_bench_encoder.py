"""`mimo bench encoder`: what is compared is the same work, what is told is what was measured. Nothing here is timed."""

import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cli import bench_encoder, bench_encoder_ours
from cli.app import app
from cli.bench_case import Bars, BenchFailed, Setting
from cli.bench_encoder_load import Load, put_load
from cli.bench_encoder_media import Album, Picture, mixed_album, paths, zipf_ranks
from cli.bench_encoder_plain import PlainEncoder
from cli.bench_encoder_ring import _Workload
from cli.bench_server import SameEverywhere, slow_server
from cli.load import BUILTIN_MODELS
from encoder import LocalEncoder
from preprocess.types import Modality

FIELDS = {"name", "ours", "baseline", "unit", "ratio", "limit", "of_limit", "runs"}
MODEL_DIR = BUILTIN_MODELS["mimo-nano"]


class Quiet:
    """Progress that nobody watches."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, amount: int = 1) -> None: ...


def picture(kind: str, height: int = 120, width: int = 150) -> Picture:
    pixels = np.random.default_rng(3).integers(0, 256, (height // 10, width // 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.repeat(10, axis=0).repeat(10, axis=1)).save(file, kind)
    return Picture(kind, file.getvalue(), height, width)


# Media


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("stamp", [b"", b"1", b"12", b"x" * 60_000])
def test_a_stamp_makes_another_medium_of_the_same_picture(kind: str, stamp: bytes) -> None:
    plain = picture(kind)
    stamped = plain.stamped(stamp)
    assert stamped != plain.content
    with Image.open(io.BytesIO(plain.content)) as before, Image.open(io.BytesIO(stamped)) as after:
        assert np.array_equal(np.asarray(before), np.asarray(after))


def test_stamped_pictures_are_sound_files_with_keys_of_their_own() -> None:
    encoder = LocalEncoder(MODEL_DIR, threads=1)
    try:
        for kind in ("JPEG", "PNG", "WEBP"):
            plain = picture(kind)
            ours = [encoder.encode(plain.stamped(stamp), Modality.IMAGE) for stamp in (b"1", b"2")]
            assert ours[0].key != ours[1].key
            assert np.array_equal(ours[0].rows, ours[1].rows)
            assert ours[0].warnings == ()
    finally:
        encoder.close()


def test_the_album_is_mixed_and_always_the_same(tmp_path: Path) -> None:
    album = mixed_album(tmp_path, Quiet(), num_pictures=20, min_side=32, max_side=200)
    assert Counter(each.kind for each in album.pictures) == {"JPEG": 12, "PNG": 4, "WEBP": 4}
    sides = sorted(max(each.height, each.width) for each in album.pictures)
    assert (sides[0], sides[-1]) == (32, 200)
    assert len(set(sides)) == 20
    for each in album.pictures:
        assert max(each.height, each.width) / min(each.height, each.width) < 1.9
        with Image.open(io.BytesIO(each.content)) as image:
            assert (image.format, image.size) == (each.kind, (each.width, each.height))
    assert mixed_album(tmp_path, Quiet(), num_pictures=20, min_side=32, max_side=200) == album
    assert album("/3/abc") == album.pictures[3].stamped(b"abc")


def test_repeats_are_of_earlier_media_and_as_many_as_asked() -> None:
    album = Album((picture("JPEG"), picture("PNG")))
    fresh = paths(50, album, repeated_share=0.0, stamp="a")
    assert len(set(fresh)) == 50
    assert {path.split("/")[1] for path in fresh} == {"0", "1"}
    repeating = paths(100, album, repeated_share=0.3, stamp="b")
    assert len(set(repeating)) == 70
    assert not set(repeating) & set(fresh), "another run asks for media of its own"
    first = {path: repeating.index(path) for path in repeating}
    new = sorted(first, key=lambda path: first[path])
    assert new == [f"/{index % 2}/b-{index}" for index in range(70)], "new ones come in turn, repeats after them"
    assert paths(100, album, repeated_share=0.3, stamp="b") == repeating


def test_popularity_follows_the_law() -> None:
    ranks = Counter(zipf_ranks(60_000, num_media=50, exponent=1.0, seed=1))
    assert ranks[0] / ranks[1] == pytest.approx(2, rel=0.1)
    assert ranks[0] / ranks[9] == pytest.approx(10, rel=0.2)
    assert zipf_ranks(9, num_media=5, exponent=1.0, seed=1) != zipf_ranks(9, num_media=5, exponent=1.0, seed=2)
    workload = _Workload(num_media=5, exponent=1.0, num_requests=60, num_warming=20, cached_media=2)
    asked = workload.ranks(4)
    known = sum(rank in asked[:index] for index, rank in enumerate(asked) if index >= 20)
    assert workload.known_share(4) == known / 40


# Contenders


def test_the_plain_way_encodes_what_ours_does() -> None:
    plain, ours = PlainEncoder(MODEL_DIR, num_threads=1), LocalEncoder(MODEL_DIR, threads=1)
    try:
        assert plain.num_threads == 1
        for kind in ("JPEG", "PNG", "WEBP"):
            content = picture(kind).content
            expected = ours.encode(content, Modality.IMAGE).rows
            rows = plain.encode(content)
            assert rows.shape == expected.shape
            assert np.linalg.norm(rows - expected) < 0.1 * np.linalg.norm(expected)
    finally:
        ours.close()


def test_loads_are_described_by_their_quantiles() -> None:
    load = Load(elapsed_s=2.0, latencies_s=np.arange(1.0, 102.0), num_cached=0)
    assert (load.throughput, load.latency_s(0.5), load.latency_s(0.95)) == (50.5, 51.0, 96.0)


def test_an_answer_that_is_none_ends_the_bench() -> None:
    wrong = pytest.raises(BenchFailed, match="not what a server of embeddings answers")
    with slow_server(SameEverywhere(b"{}"), 0.0) as server, wrong:
        put_load(server, ["http://127.0.0.1/x"] * 3, concurrency=2)
    with pytest.raises(BenchFailed, match="no answer from"):
        put_load(server, ["http://127.0.0.1/x"], concurrency=1)


def test_a_deployment_that_cannot_start_says_why() -> None:
    deployment = bench_encoder_ours.encoder_deployment(
        "no-such-model", num_replicas=1, decode_threads=1, tower_threads=1
    )
    with pytest.raises(BenchFailed, match="no-such-model"), deployment:
        pass


# The command


def run(*arguments: str, cache: Path) -> Any:
    return CliRunner(env={"MIMO_CACHE_DIR": str(cache)}).invoke(app, ["bench", "encoder", *arguments])


def found_in(path: Path) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(path.read_text())["results"]}


@pytest.mark.timeout(300)
def test_real_servers_on_tiny_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both cases with the same servers, which take seconds to start."""
    json_file, plot = tmp_path / "found.json", tmp_path / "found.png"
    with ExitStack() as stack:
        opened: list[Any] = []
        once = bench_encoder._rivals

        @contextmanager
        def shared(setting: Setting, bars: Bars) -> Iterator[Any]:
            if not opened:
                opened.append(stack.enter_context(once(setting, bars)))
            yield opened[0]

        monkeypatch.setattr(bench_encoder, "_rivals", shared)
        done = run(
            *("--quick", "--runs", "1", "--threads", "1", "--json", str(json_file), "--plot", str(plot)),
            *("--only", "throughput_c64_repeat30", "--only", "sweep"),
            cache=tmp_path / "cache",
        )
    assert done.exit_code == 0, done.output
    found = found_in(json_file)
    repeating, sweep = found["encoder.throughput_c64_repeat30"], found["encoder.sweep"]
    for each in found.values():
        assert set(each) >= FIELDS
        assert each["unit"] == "req/s"
        assert each["ratio"] == pytest.approx(each["ours"] / each["baseline"], rel=1e-3)
    assert repeating["of_limit"] == pytest.approx(repeating["ours"] / repeating["limit"], rel=1e-3)
    figures = repeating["figures"]
    assert 0 < figures["ours"]["p50_s"] <= figures["ours"]["p95_s"]
    assert figures["baseline"]["cached"] == 0
    assert 0 < figures["largest_relative_error"] < 0.1
    assert {"encoder-0", "front"} <= set(figures["ours"]["cpu_s_per_request"])
    assert "CPU per request: ours" in done.stdout
    assert "Pillow, another resampler" in done.stdout
    assert sweep["figures"]["concurrency"] == [1, 2]
    assert all(len(sweep["figures"][who]["p95_s"]) == 2 for who in ("ours", "baseline"))
    assert sweep["ours"] == max(sweep["figures"]["ours"]["throughput"])
    # An answer takes at least the delay of the server that the picture comes from.
    assert sweep["figures"]["ours"]["p50_s"][0] >= 0.02
    assert "2 at a time: ours" in done.stdout
    assert "plain way p50" in done.stdout
    with Image.open(plot) as image:
        assert image.height > image.width / 2, "panels below the ratios"


@pytest.mark.timeout(120)
def test_the_ring_hits_more_often_than_taking_turns(tmp_path: Path) -> None:
    json_file = tmp_path / "found.json"
    done = run("--quick", "--runs", "1", "--only", "ring_hit_rate", "--json", str(json_file), cache=tmp_path / "cache")
    assert done.exit_code == 0, done.output
    ring = found_in(json_file)["encoder.ring_hit_rate"]
    assert 0 < ring["baseline"] < ring["ours"] < ring["limit"] < 1
    assert ring["unit"] == "hits"


def test_servers_that_encode_differently_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "ours": np.ones((2, 3)),
        "same": np.full((2, 3), 1.01),
        "other": np.full((2, 3), 2.0),
        "short": np.ones((1, 3)),
    }
    monkeypatch.setattr(bench_encoder, "encoded", lambda server, urls: [rows[server]])
    assert bench_encoder._largest_error("ours", "same", ["u"]) == pytest.approx(0.0099, abs=1e-4)
    for wrong in ("other", "short"):
        with pytest.raises(BenchFailed):
            bench_encoder._largest_error("ours", wrong, ["u"])


def test_names_are_what_others_compare_by(tmp_path: Path) -> None:
    assert [each.name for each in bench_encoder.CASES] == [
        *("encoder.throughput_c64", "encoder.throughput_c64_repeat30", "encoder.sweep", "encoder.ring_hit_rate"),
        *("encoder.tower_vision_flops", "encoder.tower_audio_flops"),
    ]
    done = run("--list", cache=tmp_path)
    assert done.exit_code == 0
    for each in bench_encoder.CASES:
        assert f"{each.name}\n" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert "Example: mimo bench encoder" in CliRunner().invoke(app, ["bench", "encoder", "--help"]).stdout
