"""Settings of processes that serve one stage by itself: addresses, what each role may be told, and the secret."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from cli.cluster import KEY_VARIABLE, ClusterConfig, cluster_keys, near, own_address, with_advertised
from cli.load import ConfigError
from cli.load_role import RoleDeployment, load_any
from cli.settings_view import as_json
from encoder.cluster import ClusterKeys, new_secret
from epd.types import Role

ADDRESSES = {"prefill": ["tcp://prefill:7001"], "decode": ["tcp://decode:7002"], "encoders": ["tcp://encoder:7003"]}
LISTEN = {"listen": "tcp://127.0.0.1:7001"}


def load_role(
    tmp_path: Path,
    role: str,
    *,
    cluster: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    **rest: Any,
) -> RoleDeployment:
    flags = {"role": role} | ({"cluster": cluster} if cluster else {}) | rest
    config = load_any(runtime_dir=tmp_path, flags=flags, environ=environ or {})
    assert isinstance(config, RoleDeployment)
    return config


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_by_itself(tmp_path: Path, role: str) -> None:
    cluster = {"listen": "tcp://127.0.0.1:7001", "advertise": "tcp://10.0.0.7:7001", "health_port": 9001}
    config = load_role(tmp_path, role, cluster=cluster, engine={"page_size": 32}, **{role: {"max_running": 3}})
    (engine,) = config.prefill + config.decode
    assert (engine.role, engine.page_size, engine.max_running) == (Role(role), 32, 3)
    assert engine.name == f"{role}@10.0.0.7:7001"
    assert (config.gateway, config.encoders, config.cluster.health_host) == (None, (), "127.0.0.1")


def test_an_encoder_by_itself(tmp_path: Path) -> None:
    config = load_role(tmp_path, "encoder-worker", cluster=LISTEN, encoder={"arena_bytes": 1 << 26})
    assert [encoder.arena_bytes for encoder in config.encoders] == [1 << 26]


def test_a_gateway_by_itself(tmp_path: Path) -> None:
    config = load_role(tmp_path, "gateway", cluster=ADDRESSES, gateway={"port": 9, "api_keys": ["x"]})
    assert config.gateway is not None
    assert config.gateway.prefill == ("tcp://prefill:7001",)
    assert config.gateway.encoders == ("tcp://encoder:7003",)
    assert (config.gateway.port, config.gateway.ready_needs_all) == (9, False)
    shown = json.loads(as_json(config))
    assert shown["gateway"]["api_keys"] == ["(1 hidden)"]


def test_files_and_environment_serve_roles_as_well(tmp_path: Path) -> None:
    file = tmp_path / "decode.toml"
    file.write_text('role = "decode"\n[cluster]\nlisten = "tcp://127.0.0.1:7002"\n[decode]\nmax_running = 5\n')
    environ = {"MIMO_CLUSTER__ADVERTISE": "tcp://10.1.2.3:7002", KEY_VARIABLE: new_secret()}
    config = load_any(runtime_dir=tmp_path, file=file, environ=environ)
    assert isinstance(config, RoleDeployment)
    assert (config.decode[0].max_running, config.cluster.advertise) == (5, "tcp://10.1.2.3:7002")
    lists = {"MIMO_CLUSTER__PREFILL": "tcp://a:1,tcp://b:1", "MIMO_CLUSTER__DECODE": "tcp://c:1"}
    gateway = load_role(tmp_path, "gateway", environ=lists, cluster={"encoders": ["tcp://d:1"]})
    assert gateway.cluster.prefill == ("tcp://a:1", "tcp://b:1")


@pytest.mark.parametrize(
    ("role", "flags", "words"),
    [
        ("prefill", {}, "role prefill needs an address to listen on: --listen tcp://HOST:PORT"),
        ("prefill", {"cluster": LISTEN, "gateway": {"port": 1}}, "role prefill has no section [gateway]"),
        ("prefill", {"cluster": LISTEN, "decode": {"max_running": 1}}, "role prefill has no section [decode]"),
        ("prefill", {"cluster": LISTEN, "encoder": {"replicas": 1}}, "role prefill has no section [encoder]"),
        ("prefill", {"cluster": LISTEN, "prefill": {"replicas": 2}}, "prefill.replicas is set; role prefill is one"),
        ("decode", {"cluster": LISTEN, "mode": "epd"}, "mode is 'epd' and role is 'decode'"),
        ("decode", {"cluster": LISTEN | {"prefill": ["tcp://a:1"]}}, "cluster.prefill is set, but role decode has no"),
        ("encoder-worker", {"cluster": LISTEN, "front": {"port": 1}}, "role encoder-worker has no section [front]"),
        ("encoder-worker", {"cluster": LISTEN, "encoder": {"replicas": 2}}, "encoder.replicas is set"),
        ("gateway", {"cluster": ADDRESSES | LISTEN}, "cluster.listen is set, but role gateway has no such setting"),
        ("gateway", {"cluster": ADDRESSES | {"health_port": 1}}, "cluster.health_port is set, but role gateway"),
        ("gateway", {"cluster": ADDRESSES | {"decode": []}}, "cluster.decode (--decode) has none"),
        ("gateway", {"cluster": ADDRESSES | {"encoders": []}}, "cluster.encoders (--encoders) has none"),
        ("gateway", {"cluster": ADDRESSES, "engine": {"page_size": 16}}, "role gateway has no section [engine]"),
        ("gateway", {"cluster": ADDRESSES, "gateway": {"drain_s": 15}}, "supervisor.drain_s is 15; allowed: more than"),
        ("decode", {"cluster": {"listen": "tcp://127.0.0.1"}}, "cluster.listen is 'tcp://127.0.0.1'; allowed: tcp://"),
        ("decode", {"cluster": {"listen": "tcp://127.0.0.1:*"}}, "allowed: tcp://HOST:PORT"),
        ("decode", {"cluster": {"listen": "ipc:///tmp/x"}}, "allowed: tcp://HOST:PORT"),
        ("decode", {"cluster": {"listen": "tcp://127.0.0.1:70000"}}, "allowed: tcp://HOST:PORT"),
        ("decode", {"cluster": LISTEN | {"advertise": "tcp://0.0.0.0:1"}}, "an address that others can reach"),
        ("decode", {"cluster": LISTEN | {"health_port": 0}}, "cluster.health_port is 0; allowed: 1 to 65535"),
        ("decode", {"cluster": LISTEN | {"port": 0}}, "unknown key cluster.port; allowed: advertise, decode, encoders"),
        ("encoder-worker", {"cluster": LISTEN, "model": "text"}, "which takes text only and has no encoder"),
    ],
)
def test_what_does_not_concern_a_role_is_refused_by_name(
    tmp_path: Path, role: str, flags: dict[str, Any], words: str
) -> None:
    if flags.get("model") == "text":
        (tmp_path / "config.json").write_text("{}")
        flags = flags | {"model": str(tmp_path)}
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_role(tmp_path, role, **flags)


def test_a_gateway_of_a_text_model_needs_no_encoders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    cluster = {key: ADDRESSES[key] for key in ("prefill", "decode")}
    assert load_role(tmp_path, "gateway", cluster=cluster, model=str(tmp_path)).cluster.encoders == ()
    with pytest.raises(ConfigError, match="takes text only"):
        load_role(tmp_path, "gateway", cluster=ADDRESSES, model=str(tmp_path))


def test_without_a_secret_nothing_leaves_the_machine() -> None:
    assert cluster_keys(ClusterConfig(listen="tcp://127.0.0.1:1"), {}) is None
    assert cluster_keys(ClusterConfig(prefill=("tcp://localhost:1", "tcp://[::1]:1")), {}) is None
    for config in (ClusterConfig(listen="tcp://0.0.0.0:7001"), ClusterConfig(decode=("tcp://decode:1",))):
        with pytest.raises(ConfigError, match=r"is beyond this machine, and there is no cluster key; make one with"):
            cluster_keys(config, {})
    assert cluster_keys(ClusterConfig(listen="tcp://0.0.0.0:1", insecure=True), {}) is None


def test_the_secret_comes_from_a_file_or_the_environment_and_is_never_told(tmp_path: Path) -> None:
    secret, path = new_secret(), tmp_path / "key"
    path.write_text(secret + "\n")
    keys = ClusterKeys.derive(secret.encode())
    from_file = ClusterConfig(listen="tcp://0.0.0.0:1", key_file=path)
    assert cluster_keys(from_file, {}) == keys
    assert cluster_keys(ClusterConfig(), {KEY_VARIABLE: secret}) == keys
    with pytest.raises(ConfigError, match="are both set; give one"):
        cluster_keys(from_file, {KEY_VARIABLE: secret})
    with pytest.raises(ConfigError, match=r"cluster\.insecure is true and there is a cluster key"):
        cluster_keys(ClusterConfig(key_file=path, insecure=True), {})
    with pytest.raises(ConfigError, match="which cannot be read: No such file"):
        cluster_keys(ClusterConfig(key_file=tmp_path / "none"), {})
    weak = "a-secret-of-my-own"
    for config, environ in ((from_file, {}), (ClusterConfig(), {KEY_VARIABLE: weak})):
        path.write_text(weak)
        with pytest.raises(ConfigError, match="too easily guessed") as refused:
            cluster_keys(config, environ)
        assert weak not in str(refused.value)


def test_what_is_printed_holds_no_secret(tmp_path: Path) -> None:
    secret = new_secret()
    shown = as_json(load_role(tmp_path, "decode", cluster=LISTEN, environ={KEY_VARIABLE: secret}))
    assert secret not in shown


def test_what_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_advertised(ClusterConfig(listen="tcp://10.0.0.1:5")).advertise == "tcp://10.0.0.1:5"
    assert with_advertised(ClusterConfig()).advertise == ""
    chosen = ClusterConfig(listen="tcp://0.0.0.0:5", advertise="tcp://pod-1:5")
    assert with_advertised(chosen) == chosen
    monkeypatch.setattr("cli.cluster.own_address", lambda: "10.9.8.7")
    assert with_advertised(ClusterConfig(listen="tcp://0.0.0.0:5")).advertise == "tcp://10.9.8.7:5"
    monkeypatch.setattr("cli.cluster.own_address", lambda: "fd00::1")
    assert with_advertised(ClusterConfig(listen="tcp://[::]:5")).advertise == "tcp://[fd00::1]:5"
    monkeypatch.setattr("cli.cluster.own_address", lambda: None)
    with pytest.raises(ConfigError, match=r"give --advertise tcp://HOST:5"):
        with_advertised(ClusterConfig(listen="tcp://0.0.0.0:5"))


def test_the_own_address_is_one_to_listen_on() -> None:
    address = own_address()
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, 0), family=family).close()


def test_near() -> None:
    addresses = ["tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "ipc:///x"]
    assert [near(address) for address in addresses] == ["tcp://127.0.0.1:1", "tcp://[::1]:1", *addresses[2:]]
