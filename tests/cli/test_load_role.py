"""Settings of one stage by itself: the role, what belongs to it, and what does not."""

import json
import re
from pathlib import Path

import pytest

from cli.load import ConfigError, ServeConfig, load
from cli.load_role import EncoderDeployment, given_role, load_any
from cli.settings_view import as_json


def load_with(tmp_path: Path, *, toml: str = "", environ: dict[str, str] | None = None, **flags: object) -> object:
    file = None
    if toml:
        file = tmp_path / "deployment.toml"
        file.write_text(toml)
    return load_any(runtime_dir=tmp_path, file=file, environ=environ or {}, flags=flags)


def encoders(
    tmp_path: Path, *, toml: str = "", environ: dict[str, str] | None = None, **flags: object
) -> EncoderDeployment:
    config = load_with(tmp_path, toml=toml, environ=environ, **({"role": "encoder"} | flags))
    assert isinstance(config, EncoderDeployment)
    return config


def test_without_a_role_it_is_a_whole_pipeline(tmp_path: Path) -> None:
    assert isinstance(load_with(tmp_path), ServeConfig)


def test_defaults_are_one_replica_behind_a_front(tmp_path: Path) -> None:
    config = encoders(tmp_path)
    assert config.front.encoders == (f"ipc://{tmp_path}/encoder-0",)
    assert len(config.encoders) == 1
    assert (config.front.host, config.front.model_name, config.sglang.enabled) == ("127.0.0.1", "mimo-nano", True)


def test_files_environment_and_flags_meet(tmp_path: Path) -> None:
    toml = (
        'role = "encoder"\n[front]\nport = 1\nmax_inflight = 300\n[sglang]\nregister_urls = ["http://a:1"]\n'
        "[fetch]\nstall_timeout_s = 3\nmax_concurrency = 9\nmax_concurrency_per_request = 4\n[encoder]\nreplicas = 3\n"
    )
    environ = {"MIMO_SGLANG__REGISTER_URLS": "http://a:1,http://b:2", "MIMO_FRONT__API_KEYS": "x,y"}
    config = load_with(tmp_path, toml=toml, environ=environ, front={"port": 7})
    assert isinstance(config, EncoderDeployment)
    assert (config.front.port, config.front.max_inflight, config.front.api_keys) == (7, 300, ("x", "y"))
    assert config.sglang.register_urls == ("http://a:1", "http://b:2")
    assert (config.front.fetch.stall_timeout_s, config.front.fetch.max_concurrency) == (3.0, 9)
    assert config.front.fetch.max_concurrency_per_request == 4
    assert len(set(config.front.encoders)) == len(config.encoders) == 3


def test_the_shipped_configuration_is_the_defaults(tmp_path: Path) -> None:
    shipped = load_any(runtime_dir=tmp_path, file=Path("encoder"), environ={})
    assert shipped == encoders(tmp_path)
    assert given_role(Path("encoder"), "", {}) == "encoder"
    assert given_role(Path("epd"), "", {}) is None
    assert given_role(None, "", {"MIMO_ROLE": "encoder"}) == "encoder"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"role": "cook"},
            "role is 'cook'; allowed: encoder, gateway, prefill, decode, encoder-worker; without a role",
        ),
        (
            {"cluster": {"listen": "tcp://127.0.0.1:1"}},
            "cluster.listen is set, but role encoder has no section [cluster]",
        ),
        ({"mode": "epd"}, "mode is 'epd' and role is 'encoder'"),
        (
            {"engine": {"page_size": 32}},
            "engine.page_size is set, but role encoder has no section [engine]; allowed: [front]",
        ),
        ({"decode": {"replicas": 2}}, "decode.replicas is set"),
        ({"gateway": {"port": 1}}, "gateway.port is set"),
        ({"front": {"prot": 1}}, "unknown key front.prot; allowed: api_keys"),
        ({"front": {"model_dir": "x"}}, "unknown key front.model_dir"),
        ({"front": {"port": 70000}}, "front.port is 70000; allowed: 0 to 65535"),
        ({"front": {"max_items": 300}}, "front.max_items is 300; allowed: at most front.max_inflight, 256"),
        ({"front": {"drain_s": 15}}, "supervisor.drain_s is 15; allowed: more than front.drain_s, 15"),
        ({"fetch": {"stall_timeout_s": 0}}, "fetch.stall_timeout_s is 0.0; it must be greater than 0"),
        ({"sglang": {"transfer_backend": "mooncake"}}, "zmq_to_scheduler"),
        ({"encoder": {"wedged_after_s": 0}}, "wedged_after_s is 0.0"),
    ],
)
def test_what_does_not_belong_is_refused_by_name(tmp_path: Path, flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        encoders(tmp_path, **flags)


def test_a_pipeline_has_no_front(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"front\.port is set, but only role encoder has a section"):
        load_with(tmp_path, front={"port": 1})
    with pytest.raises(
        ConfigError, match=r"cluster\.listen is set, but only role gateway, prefill, decode or encoder-"
    ):
        load_with(tmp_path, cluster={"listen": "tcp://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="this command starts whole pipelines"):
        load(runtime_dir=tmp_path, environ={"MIMO_ROLE": "encoder"})


def test_what_is_printed_hides_keys(tmp_path: Path) -> None:
    shown = json.loads(as_json(encoders(tmp_path, front={"api_keys": ["secret"]})))
    assert shown["front"]["api_keys"] == ["(1 hidden)"]
    shown = json.loads(as_json(encoders(tmp_path, encoder={"embedding_store": "redis://:secret@host:1/0"})))
    assert shown["encoders"][0]["embedding_store"] == "redis://(hidden)@host:1/0"
    assert shown["sglang"]["transfer_backend"] == "auto"
