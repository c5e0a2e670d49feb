"""The Compose file: valid by the specification's own schema, and every argument accepted by the program."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.served import resolved, seconds, size_bytes

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "deploy" / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = {"prefill": "prefill", "decode": "decode", "encoder": "encoder-worker"}


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    """With the schema that the Compose specification publishes, which check-jsonschema brings along."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def settings(name: str) -> dict[str, Any]:
    return resolved(SERVICES[name]["command"], {})


def test_the_file_is_valid_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    done = validate(FILE)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("stop_grace_period", "stop_grace_perod"))
    assert validate(wrong).returncode != 0


def test_there_is_a_service_for_each_role() -> None:
    assert {name: settings(name)["role"] for name in SERVICES} == {"gateway": "gateway"} | WORKERS


@pytest.mark.parametrize("name", WORKERS)
def test_the_gateway_finds_each_stage_by_its_name(name: str) -> None:
    port = settings(name)["cluster"]["listen"].rpartition(":")[2]
    assert settings(name)["cluster"]["listen"] == f"tcp://0.0.0.0:{port}"
    gateway = settings("gateway")["gateway"]
    assert gateway["encoders" if name == "encoder" else name] == [f"tcp://{name}:{port}"]
    # More of them need ports and names of their own, which a published port or a fixed name would take.
    assert not {"ports", "container_name"} & set(SERVICES[name])


@pytest.mark.parametrize("name", SERVICES)
def test_the_secret_comes_by_file(name: str) -> None:
    (secret,) = SERVICES[name]["secrets"]
    assert settings(name)["cluster"]["key_file"] == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"][secret] == {"file": "./cluster.key"}
    assert "/deploy/cluster.key" in (ROOT / ".gitignore").read_text().splitlines()
    assert "deploy" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("name", WORKERS)
def test_the_image_s_health_check_asks_the_port_that_answers(name: str) -> None:
    port = settings(name)["cluster"]["health_port"]
    assert SERVICES[name]["environment"]["HEALTH_URL"] == f"http://127.0.0.1:{port}/ready"
    assert settings(name)["cluster"]["health_host"] == "127.0.0.1"


def test_the_gateway_is_published_to_this_machine_alone() -> None:
    port = settings("gateway")["gateway"]["port"]
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    # As the image's own health check assumes.
    assert "environment" not in SERVICES["gateway"]
    assert port == 8000


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_time_to_end_what_it_does(name: str) -> None:
    assert seconds(SERVICES[name]["stop_grace_period"]) >= settings(name)["supervisor"]["drain_s"] + 10


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_may_do_nothing_it_needs_not(name: str) -> None:
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"]
    (volume,) = service["volumes"]
    assert volume.partition(":")[2] == "/var/cache/mimo"
    assert volume.partition(":")[0] in COMPOSE["volumes"]
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    assert COMPOSE["networks"]["pipeline"]["internal"] is True
    assert service["networks"] == (["pipeline", "outside"] if name == "gateway" else ["pipeline"])


def test_shared_memory_holds_the_arena() -> None:
    (encoder,) = settings("encoder")["encoders"]
    assert encoder["arena_bytes"] + (64 << 20) <= size_bytes(SERVICES["encoder"]["shm_size"])
