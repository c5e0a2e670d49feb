"""What a deployment has of tiers when its settings say nothing, or something, of them."""

from pathlib import Path

import pytest

from cli.load import HOST_BUDGET_BYTES, ConfigError, load
from epd.config import EngineConfig


def loaded(tmp_path: Path, **engine: object) -> EngineConfig:
    config = load(runtime_dir=tmp_path, flags={"engine": engine}, environ={"MIMO_KV_STORE_DIR": str(tmp_path / "kv")})
    return config.prefill[0]


def test_host_memory_and_the_store_of_this_host_are_used_unless_it_is_said_otherwise(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    assert config.host_budget_bytes == HOST_BUDGET_BYTES
    assert config.kv_store == f"local:{tmp_path / 'kv'}"


@pytest.mark.parametrize("engine", [{"host_budget_bytes": 0}, {"prefix_cache": False}])
def test_without_a_host_tier_there_is_no_store(tmp_path: Path, engine: dict[str, object]) -> None:
    config = loaded(tmp_path, **engine)
    assert (config.host_budget_bytes, config.kv_store) == (0, "")


def test_the_store_alone_can_be_left_out(tmp_path: Path) -> None:
    config = loaded(tmp_path, kv_store="")
    assert (config.host_budget_bytes, config.kv_store) == (HOST_BUDGET_BYTES, "")


def test_a_store_that_is_asked_for_without_a_host_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_store .* engine\.host_budget_bytes is 0"):
        loaded(tmp_path, kv_store="local", host_budget_bytes=0)


def test_a_stage_decides_for_itself(tmp_path: Path) -> None:
    flags = {"decode": {"host_budget_bytes": 0}}
    config = load(runtime_dir=tmp_path, flags=flags, environ={"MIMO_KV_STORE_DIR": str(tmp_path)})
    assert config.prefill[0].kv_store
    assert (config.decode[0].host_budget_bytes, config.decode[0].kv_store) == (0, "")
