"""Settings of the host tier and the store: what is refused, and by which words."""

import os
import re
from pathlib import Path

import pytest

from cli.load import ConfigError, as_json, load
from epd.config import EngineConfig
from epd.types import Role

STORE = {"host_budget_bytes": 1 << 20}


def settings(**changes: object) -> EngineConfig:
    return EngineConfig(model_dir=Path(), model_name="none", role=Role.BOTH, **changes)  # type: ignore[arg-type]


def test_there_are_no_tiers_unless_asked_for() -> None:
    config = settings()
    assert (config.host_budget_bytes, config.kv_store) == (0, "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host_budget_bytes": -1}, "engine.host_budget_bytes is -1; allowed: 0 or more"),
        ({"host_hit_threshold": 0}, "engine.host_hit_threshold is 0; allowed: 1 or more"),
        ({"kv_store_memory_bytes": 0}, "engine.kv_store_memory_bytes is 0; it must be greater than 0"),
        ({"kv_store_disk_bytes": 0}, "engine.kv_store_disk_bytes is 0; it must be greater than 0"),
        ({"kv_store_io_bytes": 0}, "engine.kv_store_io_bytes is 0; it must be greater than 0"),
        ({"kv_store_timeout_s": 0.0}, "engine.kv_store_timeout_s is 0.0; it must be greater than 0"),
        ({"kv_store_ttl_s": -1.0}, "engine.kv_store_ttl_s is -1.0; it must be greater than 0"),
        ({"prefetch_timeout_s": -1.0}, "engine.prefetch_timeout_s is -1.0; it must not be negative"),
        ({"prefetch_page_timeout_s": float("nan")}, "engine.prefetch_page_timeout_s is nan; it must not be negative"),
        ({"kv_store": "s3://bucket"}, "engine.kv_store is 's3://bucket'; allowed: local, local:/DIR, redis"),
        ({"kv_store": "local:here"}, "engine.kv_store is 'local:here'; allowed: local, local:/DIR"),
        ({"kv_store": "redis://h:1,local"}, "engine.kv_store is 'redis://h:1,local'; allowed"),
        ({"kv_store": "unix://host"}, "engine.kv_store is 'unix://host'; allowed"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_its_value_and_what_can_be(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        settings(**STORE | changes)


@pytest.mark.parametrize(
    "store",
    [
        "local",
        "local:/var/kv",
        "redis://h:6379/0",
        "redis://:p@a:1/0,rediss://b:2/0?ssl_password=p@",
        "unix:///run/redis.sock?db=1,unix://:p@/run/other.sock,redis://:p@a",
        "mooncake://m:50051/?x=1",
    ],
)
def test_every_kind_of_store_needs_the_host(store: str) -> None:
    assert settings(**STORE, kv_store=store).kv_store == store
    with pytest.raises(ValueError, match=r"engine\.kv_store is '.*' and engine\.host_budget_bytes is 0") as refused:
        settings(kv_store=store)
    assert "p@" not in str(refused.value)


def test_a_role_has_its_own_store_and_no_password_is_shown(tmp_path: Path) -> None:
    flags = {"prefill": {"host_budget_bytes": 1 << 20, "kv_store": "redis://me:secret@a:1/0,redis://b:2/0"}}
    config = load(runtime_dir=tmp_path, environ={}, flags=flags)
    assert config.prefill[0].kv_store == "redis://me:secret@a:1/0,redis://b:2/0"
    assert config.decode[0].kv_store.startswith("local:")
    shown = as_json(config)
    assert "secret" not in shown
    assert "redis://(hidden)@a:1/0,redis://b:2/0" in shown
    with pytest.raises(ConfigError, match=r"decode\.kv_store is 'local:/.*' and decode\.host_budget_bytes is 0"):
        load(runtime_dir=tmp_path, environ={}, flags={"decode": {"kv_store": "local", "host_budget_bytes": 0}})


def test_a_local_store_is_in_the_users_cache_unless_the_environment_says_otherwise(tmp_path: Path) -> None:
    flags = {"engine": {"host_budget_bytes": 1 << 20, "kv_store": "local"}}

    def place(**environ: str) -> str:
        config = load(runtime_dir=tmp_path, environ=environ, flags=flags)
        assert config.prefill[0].kv_store == config.decode[0].kv_store
        return config.prefill[0].kv_store

    assert place() == f"local:{Path.home()}/.cache/mimo-epd/kv"
    assert place(MIMO_CACHE_DIR="/a") == "local:/a/kv"
    assert place(MIMO_CACHE_DIR="/a", MIMO_KV_STORE_DIR="/b") == "local:/b"


def test_servers_of_tests_keep_nothing_where_the_users_do(tmp_path: Path) -> None:
    assert load(runtime_dir=tmp_path, file=Path("epd"), environ=os.environ).prefill[0].kv_store == ""
    flags = {"engine": {"host_budget_bytes": 1 << 20, "kv_store": "local"}}
    place = load(runtime_dir=tmp_path, environ=os.environ, flags=flags).prefill[0].kv_store
    assert place == f"local:{os.environ['MIMO_KV_STORE_DIR']}"
    assert "mimo-tests-" in place
