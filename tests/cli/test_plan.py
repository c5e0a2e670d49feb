"""`mimo plan` against arithmetic written out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.errors import ConfigError
from cli.load import BUILTIN_MODELS
from cli.plan_units import GPUS, flops, gib, parse_bytes, parse_link, parse_picture, parse_tokens, seconds
from cli.plan_work import replica_ratio
from encoder.checkpoint import read_json_object
from epd import count_heads, plan_worker, text_config
from epd.config import EngineConfig
from epd.types import Role

GIB = 1 << 30
# One layer of MiMo-V2.5: 4 KV heads in full layers, 8 in window layers; 192 wide keys, 128 wide values, two bytes.
FULL_LAYER, WINDOW_LAYER = 4 * (192 + 128) * 2, 8 * (192 + 128) * 2
FULL, WINDOW = 9 * FULL_LAYER, 39 * WINDOW_LAYER
DRAFT = 3 * WINDOW_LAYER


def planned(*words: str, exit_code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert done.exit_code == exit_code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_kv_of_v25_is_the_published_arithmetic() -> None:
    kv = planned("mimo-v2.5", "--context", "128k")["kv"]
    assert (FULL, WINDOW, DRAFT) == (23_040, 199_680, 15_360)
    assert (kv["full_bytes_per_token"], kv["window_bytes_per_token"]) == (FULL, WINDOW)
    assert (kv["window_tokens"], kv["draft_bytes_per_token"]) == (128, DRAFT)
    assert kv["sequence_bytes"] == FULL * 131_072 + WINDOW * 128 == 3_045_457_920
    assert kv["single_pool_bytes"] == 222_720 * 131_072
    assert kv["ratio"] == pytest.approx((23_040 * 131_072 + 25_559_040) / (222_720 * 131_072))


def test_kv_of_pro_is_the_published_arithmetic() -> None:
    kv = planned("mimo-v2.5-pro", "--context", "1m", "--tp", "16")["kv"]
    assert kv["sequence_bytes"] == 51_200 * 2**20 + 307_200 * 128
    assert kv["single_pool_bytes"] == 358_400 * 2**20
    assert kv["contexts"][0] == {
        "num_tokens": 1024,
        "size_bytes": 51_200 * 1024 + 307_200 * 128,
        "single_pool_bytes": 358_400 * 1024,
    }


@pytest.mark.parametrize(("model", "expected"), [("mimo-v2.5", 39 * 127), ("mimo-v2.5-pro", 60 * 127)])
def test_healing_takes_the_windows_one_after_another(model: str, expected: int) -> None:
    healing = planned(model, "--context", "64k", "--tp", "16")["healing"]
    assert healing["num_tokens"] == expected in (4_953, 7_620)
    assert 0 < healing["share_of_prefill"] < expected / 65_536


def test_weights_of_all_are_those_of_one_gpu_and_the_towers() -> None:
    done = CliRunner().invoke(app, ["plan", "mimo-v2.5", "--gpu", "l4", "--tp", "1"], env={"COLUMNS": "200"})
    line = next(" ".join(line.split()) for line in done.stdout.splitlines() if "weights" in line)
    assert line.startswith("weights 291.6 GiB 293.4 GiB in all, 1.8 GiB of it towers, which are an encoder's;")


def test_weights_are_shared_out_and_routers_repeated() -> None:
    report = planned("mimo-v2.5", "--tp", "8", "--gpu", "h200")
    assert report["weights"]["total_bytes"] == 315_031_102_208
    parts = report["weights"]["parts"]
    whole = parts["router"] + parts["norms"]
    towers = parts["vision"] + parts["speech_embeddings"] + parts["audio_encoder"]
    assert whole == 197_180_416 + 794_624
    shared = 315_031_102_208 - whole - towers
    assert report["worker"]["weight_bytes"] == pytest.approx(shared / 8 + whole, abs=8)
    assert report["weights"]["tower_bytes"] == towers + 625_029_120
    budget = int(143_771 * 2**20 * 0.9) - report["worker"]["weight_bytes"]
    assert report["worker"]["kv_budget_bytes"] == budget


def test_kv_heads_are_split_as_far_as_they_go() -> None:
    """At 8 GPUs the four KV heads of a full layer are on two GPUs each, the eight of a window layer on one."""
    worker = planned("mimo-v2.5", "--tp", "8")["worker"]
    assert worker["full_page_bytes"] == 16 * 9 * 1 * 320 * 2
    assert worker["window_page_bytes"] == 16 * (39 + 3) * 1 * 320 * 2


def test_sequences_that_fit() -> None:
    report = planned("mimo-v2.5", "--tp", "4", "--context", "32k")
    worker = report["worker"]
    # On one of four GPUs: one head of a full layer, two of a window layer.
    full_page, window_page = 16 * 9 * 640, 16 * 42 * 2 * 640
    # 127 earlier tokens and 128 that wait to be let go: 16 pages; a tail page, and one at either end.
    sequence = (2048 + 1) * full_page + (16 + 1 + 2) * window_page
    assert worker["running_sequence_bytes"] == sequence
    chunk = 2048 // 16 * window_page
    assert worker["num_sequences"] == (worker["kv_budget_bytes"] - chunk) // sequence
    single = 32_768 * (9 * 640 + 42 * 2 * 640)
    assert worker["num_single_pool_sequences"] == worker["kv_budget_bytes"] // single
    assert worker["num_sequences"] > 9 * worker["num_single_pool_sequences"]


def test_pools_are_those_of_the_engine() -> None:
    """For one GPU the split is what `mimo serve` would make of the settings that the plan names."""
    report = planned("mimo-nano", "--memory", "1GiB", "--context", "2k", "--concurrency", "16")
    settings = report["settings"]
    config = EngineConfig(
        model_dir=BUILTIN_MODELS["mimo-nano"],
        model_name="mimo-nano",
        role=Role.BOTH,
        device="cuda",
        **{key.removeprefix("engine."): value for key, value in settings.items()},
    )
    text = text_config(config, read_json_object(config.model_dir / "config.json"))
    pools = plan_worker(config, text, num_heads=count_heads(config, 3)).pools
    assert report["worker"]["pools"] == {
        "num_full_pages": pools.num_full_pages,
        "num_window_pages": pools.num_window_pages,
        "size_bytes": pools.size_bytes,
    }


def test_the_fewest_gpus_that_do_are_taken() -> None:
    assert planned("mimo-v2.5")["worker"]["tp"] == 4
    assert planned("mimo-v2.5", "--gpu", "h100")["worker"]["tp"] == 8
    many = planned("mimo-v2.5", "--concurrency", "400", "--context", "32k")["worker"]
    assert many["tp"] > 4
    assert many["num_sequences"] >= 400


def test_what_does_not_fit_is_said_with_a_way_out() -> None:
    done = CliRunner().invoke(app, ["plan", "mimo-v2.5", "--gpu", "l4", "--tp", "2"])
    assert done.exit_code == 1
    assert "--tp" in done.stderr
    assert "weights take 14" in done.stderr
    report = planned("mimo-v2.5", "--tp", "4", "--concurrency", "2000", exit_code=1)
    assert "not 2000" in report["why_not"]
    assert report["settings"] is None


def test_weights_without_room_are_helped_by_what_makes_room() -> None:
    why = planned("mimo-v2.5", "--gpu", "l4", "--tp", "2", exit_code=1)["why_not"]
    assert "--tp 16" in why
    assert "--context" not in why
    one = planned("mimo-nano", "--memory", "1MiB", "--context", "1k", "--tp", "1", exit_code=1)["why_not"]
    assert "GPUs of more than" in one
    assert "--context" not in one


def test_gpus_are_named_in_any_case_and_sized_once() -> None:
    assert planned("mimo-v2.5", "--gpu", "H100")["gpu"]["name"] == "h100"
    said = CliRunner().invoke(app, ["plan", "mimo-nano", "--memory", "1GiB", "--context", "2k"]).stdout
    assert said.startswith("mimo-nano on a GPU of 1.0 GiB\n")


def test_transfer_is_all_full_pages_and_the_live_window() -> None:
    transfer = planned("mimo-v2.5", "--prompt", "1000", "--link", "400Gb/s")["transfer"]
    # 1,000 tokens are 63 pages; the window's 127 tokens are 8 pages before the last whole one, page 62.
    expected = 63 * 16 * FULL + (63 - (62 - 8)) * 16 * (WINDOW + DRAFT)
    assert transfer["kv_bytes"] == expected
    assert transfer["kv_s"] == pytest.approx(expected / 50e9)


def layer_flops(*, heads: int, kv_heads: int, is_moe: bool) -> int:
    """Two per weight that a token meets in one layer of MiMo-V2.5."""
    width = 4096
    attention = width * (heads * 192 + kv_heads * 192 + kv_heads * 128) + heads * 128 * width
    return 2 * (attention + (8 * 3 * width * 2048 + width * 256 if is_moe else 3 * width * 16384))


def test_prefill_and_decode_flops_by_hand() -> None:
    num_prompt, num_answer = 600, 11
    work = planned("mimo-v2.5", "--prompt", str(num_prompt), "--answer", str(num_answer), "--tp", "4")["work"]
    head = 2 * 4096 * 152_576

    def rows(start: int, stop: int) -> int:
        full = layer_flops(heads=64, kv_heads=4, is_moe=True)
        dense = layer_flops(heads=64, kv_heads=4, is_moe=False)
        window = layer_flops(heads=64, kv_heads=8, is_moe=True)
        pair = 2 * 64 * (192 + 128)
        seen = sum(9 * (t + 1) + 39 * min(t + 1, 128) for t in range(start, stop))
        return (stop - start) * (dense + 8 * full + 39 * window) + seen * pair

    assert work["flops"]["prefill"] == rows(0, num_prompt) + head
    assert work["flops"]["decode"] == rows(num_prompt, num_prompt + num_answer - 1) + (num_answer - 1) * head


def test_what_the_cache_has_is_not_computed() -> None:
    cold, warm = (planned("mimo-v2.5", "--prompt", "8k", "--cached", share)["work"] for share in ("0", "0.75"))
    assert warm["flops"]["prefill"] < 0.3 * cold["flops"]["prefill"]
    assert warm["flops"]["decode"] == cold["flops"]["decode"]


def test_a_picture_is_tokens_and_flops_by_hand() -> None:
    work = planned("mimo-v2.5", "--images", "3", "--image-size", "640x320", "--prompt", "100")["work"]
    patches, tokens = 40 * 20, 20 * 10
    assert work["media_tokens"] == 3 * (tokens + 2)
    assert work["prompt_tokens"] == 100 + 3 * (tokens + 2)
    # 32 query heads and 8 KV heads of 64; 28 blocks, of which 4 see all and 24 see 64 patches to either side.
    block = 1280 * (32 + 16) * 64 + 32 * 64 * 1280 + 3 * 1280 * 4608
    band = sum(min(i, 64) + min(patches - 1 - i, 64) + 1 for i in range(patches))
    pairs = 4 * patches * patches + 24 * band
    merger = tokens * (5120 * 5120 + 5120 * 4096)
    by_hand = 2 * (patches * (1536 * 1280 + 28 * block) + 2 * pairs * 2048 + merger)
    assert work["flops"]["encode"] == 3 * by_hand


def test_a_video_is_pairs_of_frames_and_a_sound_its_groups() -> None:
    video = planned("mimo-v2.5", "--video-seconds", "10", "--video-size", "320x320")["work"]
    # One frame a second: five pairs of 10 x 10 tokens, each with a label of five and two delimiters.
    assert video["media_tokens"] == 5 * (100 + 7) + 2
    sound = planned("mimo-v2.5", "--audio-seconds", "8")["work"]
    # 25 code frames a second in groups of four.
    assert sound["media_tokens"] == 8 * 25 // 4 + 2
    assert sound["flops"]["encode"] > 0


def test_replicas_follow_the_time_a_stage_takes() -> None:
    assert replica_ratio({"encode": 1.0, "prefill": 3.1, "decode": 0.5}) == {"encode": 2, "prefill": 6, "decode": 1}
    assert replica_ratio({"encode": 0.0, "prefill": 1.0, "decode": 1.2}) == {"encode": 0, "prefill": 1, "decode": 1}
    work = planned("mimo-v2.5", "--images", "2", "--answer", "500")["work"]
    times = work["worker_seconds"]
    assert times["prefill"] == pytest.approx(work["flops"]["prefill"] / (4 * 989e12 * 0.4))
    assert times["encode"] == pytest.approx(work["flops"]["encode"] / (989e12 * 0.4))
    assert times["decode"] == pytest.approx(499 * work["decode_step_s"] / work["assumed"]["decode_batch"])
    assert work["replicas"] == replica_ratio(times)


def test_a_decode_step_reads_what_its_batch_touches() -> None:
    """One sequence: all weights outside experts, 8 of 256 experts, and its KV."""
    report = planned("mimo-v2.5", "--tp", "4", "--concurrency", "1", "--prompt", "1k", "--answer", "1")
    parts = report["weights"]["parts"]
    others = sum(parts[part] for part in ("full_attention", "window_attention", "dense_mlp", "router", "norms"))
    read = others + parts["lm_head"] + parts["experts"] * 8 / 256 + 1024 * FULL + 128 * (WINDOW + DRAFT)
    assert report["work"]["decode_step_s"] == pytest.approx(read / (4 * 4800e9 * 0.6), rel=1e-6)
    assert report["work"]["decode_is_memory_bound"]


def test_memory_alone_gives_no_seconds() -> None:
    work = planned("mimo-v2.5", "--memory", "141GiB", "--tp", "4")["work"]
    assert (work["worker_seconds"], work["replicas_from"]) == (None, "flops")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "no such path"),
        (("mimo-v2.5", "--gpu", "h900"), "h200"),
        (("mimo-v2.5", "--gpu", "h200", "--memory", "80GiB"), "give one"),
        (("mimo-v2.5", "--context", "2m"), "1,048,576 positions"),
        (("mimo-v2.5", "--weights", "int3"), "keep, bfloat16, float32"),
        (("mimo-v2.5-pro", "--images", "1"), "no pictures"),
        (("smollm2-nowhere", "--audio-seconds", "1"), "MODEL is"),
        (("mimo-v2.5", "--plot", "kv.txt"), ".png"),
        (("mimo-v2.5", "--tp", "3"), "64 heads are shared out to 1, 2, 4, 8, 16, 32, 64 GPUs"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "mimo-v2.5", "--plot", str(tmp_path / "kv.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "kv.png").read_bytes().startswith(b"\x89PNG")


def test_it_reads_well() -> None:
    said = CliRunner().invoke(app, ["plan", "mimo-v2.5", "--images", "1"]).stdout
    assert "H = 4,953 tokens" in said
    assert "23,040 bytes a token" in said
    assert "tensor parallelism" in said
    assert (
        "mimo serve --set engine.kv_budget_bytes"
        in CliRunner().invoke(app, ["plan", "mimo-nano", "--memory", "1GiB", "--context", "2k"]).stdout
    )


def test_units() -> None:
    assert parse_bytes("80GiB", "--memory") == 80 * GIB
    assert parse_bytes("1.5 gb", "--memory") == 1_500_000_000
    assert parse_tokens("32k", "--context") == 32_768
    assert parse_link("400Gb/s") == 50e9
    assert parse_link("50GB/s") == 50e9
    assert parse_picture("1280x720", "--video-size") == (720, 1280)
    assert (gib(3 * GIB), seconds(0.0032), seconds(0.0), flops(1.5e12)) == ("3.0 GiB", "3.2 ms", "0 s", "1.5 TFLOP")
    for wrong in ("", "80", "x", "-1GiB", "0GiB"):
        with pytest.raises(ConfigError, match="--memory"):
            parse_bytes(wrong, "--memory")
    for wrong in ("0", "k", "1.5.2", "-3"):
        with pytest.raises(ConfigError, match="--context"):
            parse_tokens(wrong, "--context")
    for wrong in ("0x3", "3", "x"):
        with pytest.raises(ConfigError, match="--video-size"):
            parse_picture(wrong, "--video-size")
    with pytest.raises(ConfigError, match="--link"):
        parse_link("fast")
    assert all(gpu.memory_bytes > 20 * GIB for gpu in GPUS.values())
