"""The manifests: valid for Kubernetes, in step with each other, and every argument accepted by the program."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import ValidationError

from encoder.cluster import ClusterKeys, WeakSecret
from epd.gateway.metrics_workers import role_metrics
from tests.deploy.served import resolved, size_bytes

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
ROLES = {"gateway": "gateway", "prefill": "prefill", "decode": "decode", "encoder": "encoder-worker"}
CALLS = {"gateway": {"prefill", "decode", "encoder"}, "prefill": {"decode", "encoder"}, "decode": {"encoder"}}
# `preStop: sleep` came with the first.
VERSIONS = ("1.31", "1.33", "1.37")

Manifest = dict[str, Any]


def manifests() -> list[tuple[str, Manifest]]:
    """All of them by file, examples as well."""
    return [
        (path.name, manifest)
        for path in sorted(FOLDER.glob("*.yaml"))
        if path.name != "kustomization.yaml"
        for manifest in yaml.safe_load_all(path.read_text())
    ]


ALL = manifests()
IDS = [f"{manifest['kind']} {manifest['metadata']['name']}" for _, manifest in ALL]


def of(kind: str, name: str) -> Manifest:
    (found,) = [m for _, m in ALL if (m["kind"], m["metadata"]["name"]) == (kind, f"mimo-{name}")]
    return found


def pod(name: str) -> Manifest:
    spec: Manifest = of("Deployment", name)["spec"]["template"]["spec"]
    return spec


def container(name: str) -> Manifest:
    (only,) = pod(name)["containers"]
    assert isinstance(only, dict)
    return only


@pytest.fixture
def config_map(tmp_path: Path) -> Path:
    """The directory that the pods see as /etc/mimo."""
    for name, text in of("ConfigMap", "config")["data"].items():
        (tmp_path / name).write_text(text)
    return tmp_path


def settings(name: str, config_map: Path) -> dict[str, Any]:
    """What the program makes of a container's arguments and environment."""
    environment = {"POD_IP": "10.1.2.3"}
    for variable in container(name)["env"]:
        # From secrets or fields: a value of that kind.
        environment.setdefault(variable["name"], variable.get("value", "k1,k2"))
    arguments = [
        re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], argument).replace("/etc/mimo", str(config_map))
        for argument in container(name)["args"]
    ]
    return resolved(arguments, environment)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("file", "manifest"), ALL, ids=IDS)
def test_every_manifest_is_valid(file: str, manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_would_notice() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(of("Deployment", "decode")))
    wrong["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises((kubernetes_validate.ValidationError, ValidationError)):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_kustomization_names_every_file_but_the_examples() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == {file for file in files if ".example." not in file}
    assert [image["name"] for image in kustomization["images"]] == ["mimo-epd"]
    assert {m["metadata"].get("namespace", kustomization["namespace"]) for _, m in ALL} == {kustomization["namespace"]}


@pytest.mark.parametrize("name", ROLES)
def test_the_program_accepts_what_a_pod_gives_it(name: str, config_map: Path) -> None:
    config = settings(name, config_map)
    assert config["role"] == ROLES[name]
    assert config["cluster"]["key_file"] == "/run/secrets/mimo/cluster-key"
    assert not config["cluster"]["insecure"]
    assert f"--config=/etc/mimo/{name}.toml" in container(name)["args"]
    assert f"{name}.toml" in of("ConfigMap", "config")["data"]
    if name == "gateway":
        assert config["gateway"]["api_keys"] == ["(2 hidden)"]
    else:
        assert config["cluster"]["advertise"].startswith("tcp://10.1.2.3:")


def test_every_file_of_settings_is_used() -> None:
    assert set(of("ConfigMap", "config")["data"]) == {f"{name}.toml" for name in ROLES}


@pytest.mark.parametrize("name", ["prefill", "decode", "encoder"])
def test_ports_agree_from_the_flag_to_the_gateway(name: str, config_map: Path) -> None:
    config, ports = settings(name, config_map), {p["name"]: p["containerPort"] for p in container(name)["ports"]}
    port = ports["cluster"]
    assert config["cluster"]["listen"] == f"tcp://0.0.0.0:{port}"
    assert config["cluster"]["advertise"] == f"tcp://10.1.2.3:{port}"
    assert (config["cluster"]["health_host"], config["cluster"]["health_port"]) == ("0.0.0.0", ports["health"])
    (service_port,) = of("Service", name)["spec"]["ports"]
    assert (service_port["port"], service_port["targetPort"]) == (port, "cluster")
    # Headless, or the name would stand for one address that hides the pods.
    assert of("Service", name)["spec"]["clusterIP"] == "None"
    assert of("Service", name)["spec"]["publishNotReadyAddresses"] is True
    key = "encoders" if name == "encoder" else name
    assert settings("gateway", config_map)["gateway"][key] == [f"tcp://mimo-{name}:{port}"]


def test_the_gateway_s_service_leads_to_its_port(config_map: Path) -> None:
    (port,) = container("gateway")["ports"]
    config = settings("gateway", config_map)["gateway"]
    assert (config["host"], config["port"]) == ("0.0.0.0", port["containerPort"])
    (service_port,) = of("Service", "gateway")["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]
    annotations = of("Deployment", "gateway")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])


@pytest.mark.parametrize("name", ROLES)
def test_selectors_meet_their_pods_and_nobody_else_s(name: str) -> None:
    deployment = of("Deployment", name)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    own = {"app.kubernetes.io/name": f"mimo-{name}"}
    assert own.items() <= labels.items()
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        of("Service", name)["spec"]["selector"],
        of("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"],
        of("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"],
    ]
    assert selectors == [own] * 4


@pytest.mark.parametrize("name", ROLES)
def test_probes_ask_what_the_program_answers(name: str) -> None:
    only = container(name)
    names = {port["name"] for port in only["ports"]}
    probe_port = "http" if name == "gateway" else "health"
    assert probe_port in names
    for kind, path in (("livenessProbe", "/health"), ("readinessProbe", "/ready")):
        assert only[kind]["httpGet"] == {"path": path, "port": probe_port}


@pytest.mark.parametrize("name", ROLES)
def test_a_pod_has_time_to_end_what_it_does(name: str, config_map: Path) -> None:
    config = settings(name, config_map)
    drain_s = config["supervisor"]["drain_s"]
    pause_s = container(name).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    grace_s = pod(name)["terminationGracePeriodSeconds"]
    # Beside the drain, a worker waits for gateways to read its last words, and gives back shared memory.
    assert grace_s >= pause_s + drain_s + 10
    if name == "gateway":
        assert pause_s >= 5
        assert drain_s > config["gateway"]["drain_s"]
    strategy = of("Deployment", name)["spec"]["strategy"]["rollingUpdate"]
    assert (strategy["maxSurge"], strategy["maxUnavailable"]) == (1, 0)
    assert of("PodDisruptionBudget", name)["spec"]["maxUnavailable"] < of("Deployment", name)["spec"]["replicas"]


@pytest.mark.parametrize("name", ROLES)
def test_a_pod_may_do_nothing_it_needs_not(name: str) -> None:
    security = pod(name)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 10001
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container(name)["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(name)["automountServiceAccountToken"] is False
    # MIMO_GATEWAY_PORT and the like, of the Service mimo-gateway, would be settings that nobody knows.
    assert pod(name)["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ROLES)
def test_what_is_mounted_is_there_and_what_is_written_is_writable(name: str) -> None:
    volumes = {volume["name"]: volume for volume in pod(name)["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container(name)["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    for path in ("/tmp", "/var/cache/mimo", *(["/dev/shm"] if name == "encoder" else [])):
        assert "emptyDir" in volumes[mounts[path]["name"]], path
    assert {"name": "MIMO_CACHE_DIR", "value": "/var/cache/mimo"} in container(name)["env"]
    assert volumes["config"]["configMap"]["name"] == of("ConfigMap", "config")["metadata"]["name"]
    secret = of("Secret", "cluster")
    assert volumes["cluster-key"]["secret"]["secretName"] == secret["metadata"]["name"]
    assert volumes["cluster-key"]["secret"]["defaultMode"] & 0o007 == 0
    assert "cluster-key" in secret["stringData"]


def test_memory_holds_what_the_settings_ask_for(config_map: Path) -> None:
    (shm,) = [volume["emptyDir"] for volume in pod("encoder")["volumes"] if volume["name"] == "shm"]
    (encoder,) = settings("encoder", config_map)["encoders"]
    assert encoder["arena_bytes"] + (64 << 20) <= size_bytes(shm["sizeLimit"])
    # The volume is in memory, and counts.
    assert size_bytes(shm["sizeLimit"]) < size_bytes(container("encoder")["resources"]["limits"]["memory"])
    for name in ("prefill", "decode"):
        (engine,) = settings(name, config_map)[name]
        needed = engine["kv_budget_bytes"] + engine["host_budget_bytes"] + (1 << 30)
        assert needed <= size_bytes(container(name)["resources"]["limits"]["memory"])


def test_prefill_and_decode_hold_kv_in_the_same_way(config_map: Path) -> None:
    (prefill,), (decode,) = (settings(name, config_map)[name] for name in ("prefill", "decode"))
    for key in ("page_size", "dtype", "weights", "qkv_layout", "window_left", "draft_tokens", "model_name"):
        assert prefill[key] == decode[key], key


def test_the_network_is_open_where_stages_talk_and_nowhere_else(config_map: Path) -> None:
    assert of("NetworkPolicy", "closed")["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ports = {name: container(name)["ports"][0]["containerPort"] for name in ROLES}
    for name in ROLES:
        spec = of("NetworkPolicy", name)["spec"]
        egress = {
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"].removeprefix("mimo-"): rule["ports"]
            for rule in spec.get("egress", ())
            for peer in rule["to"]
            if "podSelector" in peer
        }
        assert egress == {to: [{"protocol": "TCP", "port": ports[to]}] for to in CALLS.get(name, ())}
        ingress = {
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"].removeprefix("mimo-")
            for rule in spec["ingress"]
            if [port["port"] for port in rule["ports"]] == [ports[name]]
            for peer in rule.get("from", ())
        }
        assert ingress == {caller for caller, called in CALLS.items() if name in called}


def test_the_secret_of_the_example_is_refused() -> None:
    with pytest.raises(WeakSecret):
        ClusterKeys.derive(of("Secret", "cluster")["stringData"]["cluster-key"].encode())


def test_autoscaling_is_by_a_metric_that_exists() -> None:
    hpa = of("HorizontalPodAutoscaler", "decode")["spec"]
    assert hpa["scaleTargetRef"]["name"] == "mimo-decode"
    assert hpa["minReplicas"] == of("Deployment", "decode")["spec"]["replicas"]
    assert "mimo_decode_queue_requests" in (FOLDER / "autoscaling.example.yaml").read_text()
    assert "mimo_decode_queue_requests" in {family.name for family in role_metrics("mimo_decode", [])}
