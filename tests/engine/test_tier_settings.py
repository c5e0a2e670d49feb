"""Settings of the host tier and the store: what is refused, and by which words."""

import os
import re
from pathlib import Path

import pytest

from cli.load import ConfigError, load
from cli.settings_view import as_json
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
        ({"kv_store_io_bytes": 0}, "engine.kv_store_io_bytes is 0; allowed: 65,536 to 67,108,864"),
        ({"kv_store_io_bytes": 65_535}, "engine.kv_store_io_bytes is 65,535; allowed: 65,536 to 67,108,864"),
        ({"kv_store_io_bytes": 1 << 40}, "engine.kv_store_io_bytes is 1,099,511,627,776; allowed: 65,536 to"),
        ({"kv_store_timeout_s": 0.0}, "engine.kv_store_timeout_s is 0.0; allowed: more than 0 seconds"),
        ({"kv_store_ttl_s": -1.0}, "engine.kv_store_ttl_s is -1.0; allowed: more than 0 seconds"),
        ({"prefetch_timeout_s": -1.0}, "engine.prefetch_timeout_s is -1.0; allowed: 0 or more seconds"),
        ({"kv_store": "s3://bucket"}, "engine.kv_store is 's3://bucket': allowed: local, local:/DIR, redis"),
        ({"kv_store": "local:here"}, "engine.kv_store is 'local:here': allowed: local, local:/DIR"),
        ({"kv_store": "redis://h:1,local"}, "engine.kv_store is 'redis://h:1,local': the port"),
        ({"kv_store": "unix://host"}, "engine.kv_store is 'unix://host': the address of a Redis server's socket has"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_its_value_and_what_can_be(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        settings(**STORE | changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("kv_store_timeout_s", "more than 0"),
        ("kv_store_ttl_s", "more than 0"),
        ("prefetch_timeout_s", "0 or more"),
        ("prefetch_page_timeout_s", "0 or more"),
    ],
)
def test_a_time_is_finite(name: str, allowed: str, value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"engine.{name} is {value}; allowed: {allowed} seconds")):
        settings(**{name: value})


FORMS = (
    "local, local:/DIR, redis[s]://[[USER]:PASSWORD@]HOST[:PORT][/DB] or unix://[[USER]:PASSWORD@]/SOCKET[?db=DB] "
    "(several parted by commas), mooncake://MASTER:PORT[?OPTION=VALUE], or nothing"
)


@pytest.mark.parametrize(
    ("store", "shown", "why"),
    [
        ("redis://:hunter@h:99999/0", "redis://(hidden)@h:99999/0", "the port of an address redis:// is 99999, but"),
        ("redis://h:0", "redis://h:0", "the port of an address redis:// is 0, but ports are 1 to 65535"),
        ("redis://h:x", "redis://h:x", "the port of an address redis:// is no number, but ports are 1 to 65535"),
        ("redis://a,redis://b:70000", "redis://a,redis://b:70000", "the port of an address redis:// is 70000"),
        ("redis://:hunter@:1/0", "redis://(hidden)@:1/0", "an address redis:// names no host"),
        ("redis://", "redis://", "an address redis:// names no host"),
        ("redis://a b:1", "redis://a b:1", "an address redis:// names a strange host"),
        ("redis://h:1/x", "redis://h:1/x", "the database in a Redis server's address is no whole number"),
        ("redis://h:1/-1", "redis://h:1/-1", "the database in a Redis server's address is no whole number"),
        ("redis://h?db=3", "redis://h?db=3", "an address of redis:// has the option db; options it may have: none"),
        ("rediss://h?ssl_x=3", "rediss://h?ssl_x=3", "has the option ssl_x; options it may have: ssl_ca_certs, "),
        ("rediss://h?ssl_cert_reqs=x", "rediss://h?ssl_cert_reqs=x", "strange value, and not none, optional, req"),
        ("redis://h:1#x", "redis://h:1#x", "holds a #; write %23"),
        ("redis://[::1/0", "redis://[::1/0", "belongs to no IPv6 address"),
        ("redis://h,redis://h:6379/0", "redis://h,redis://h:6379/0", "it names redis://h:6379/0 twice"),
        ("redis://:hun/ter@h:1", "redis://(hidden)@h:1", "has a / in its password; write %2F"),
        ("redis://:hun,ter@h:0", "redis://(hidden)@h:0", "the port of an address redis:// is 0"),
        ("rediss://h:0?ssl_password=hunter", "rediss://h:0?ssl_password=(hidden)", "the port of an address rediss:"),
        ("unix:///", "unix:///", "has no path: unix:///SOCKET"),
        ("unix:///s?db=x", "unix:///s?db=x", "the database in a Redis server's address"),
        ("mooncake://m", "mooncake://m", "the address of a Mooncake store has no port, of 1 to 65535"),
        ("mooncake://m:0", "mooncake://m:0", "the port of an address mooncake:// is 0, but ports are 1 to 65535"),
        ("mooncake://:1", "mooncake://:1", "an address mooncake:// names no host"),
        ("mooncake://m:1/x", "mooncake://m:1/x", "the address of a Mooncake store is mooncake://MASTER:PORT"),
        ("mooncake://m:1?x=1", "mooncake://m:1?x=1", "of a Mooncake store has the option x; options it may have: host"),
        ("mooncake://m:1?replicas=0", "mooncake://m:1?replicas=0", "it must be a whole number from 1 on"),
        ("local:/a\nb", "local:/a\\nb", "it holds a control character"),
    ],
)
def test_an_address_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, store: str, shown: str, why: str
) -> None:
    """With what is wrong, what is allowed, and no password."""
    with pytest.raises(ConfigError) as refused:
        load(runtime_dir=tmp_path, environ={}, flags={"engine": STORE | {"kv_store": store}})
    words = str(refused.value)
    assert f"kv_store is '{shown}': " in words
    assert why in words
    assert words.endswith(f"; allowed: {FORMS}")
    assert "hun" not in words
    assert "ter@" not in words


@pytest.mark.parametrize(
    "store",
    [
        "local",
        "local:/var/kv",
        "redis://h:6379/0",
        "redis://:p@a:1/0,rediss://b:2/0?ssl_password=p@",
        "unix:///run/redis.sock?db=1,unix://:p@/run/other.sock,redis://:p@a",
        "mooncake://m:50051/?replicas=2",
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
    flags = {"engine": {"host_budget_bytes": 1 << 20, "kv_store": "local"}}
    place = load(runtime_dir=tmp_path, environ=os.environ, flags=flags).prefill[0].kv_store
    assert place == f"local:{os.environ['MIMO_KV_STORE_DIR']}"
    assert "mimo-tests-" in place
