"""The commands of README and docs/, run as a reader would: from the repository's directory, in the order they stand.

Only these things differ: ports are free ones, `make serve` has been done already, a command that serves is asked for
its settings instead (`--print-config`; the tests in tests/e2e start them), and what is written goes to a copy of the
directory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, SHELL, Block, blocks, documents
from tests.e2e.service import free_port, running_service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# Those of the command line's own document are run by tests/cli/test_docs_cli.py, in one process.
RUN = [
    block
    for path in documents()
    for block in blocks(path)
    if block.saying == "run" and path != ROOT / "docs" / "cli.md"
]
# A copy has these; all others are written by the commands.
_COPIED = ("README.md", "Makefile", "pyproject.toml", "samples", "configs", "deploy", "docs", "scripts", "epd/builtin")


@pytest.fixture(scope="module")
def ports(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What stands at the ports that the documents name: the pipeline at 8000, an encoder by itself at 8001."""
    log_dir = tmp_path_factory.mktemp("documented")
    pipeline = ("--mode", "epd", "--media-root", str(directory / "samples"))
    encoder = ("--role", "encoder", "--encoders", "2", "--media-root", str(directory / "samples"))
    needed = {port for port in ("8000", "8001") if any(f":{port}" in block.text for block in RUN)}
    with running_service(log_dir, *pipeline) as serving:
        found = {"8000": serving.url.rpartition(":")[2], "8001": str(free_port())}
        if "8001" not in needed:
            yield found
            return
        with running_service(log_dir, *encoder) as encoding:
            yield found | {"8001": encoding.url.rpartition(":")[2]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the repository's, where commands may write."""
    copy = tmp_path_factory.mktemp("reader") / "mimo-epd"
    copy.mkdir()
    for name in _COPIED:
        source, target = ROOT / name, copy / name
        if source.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target)
        elif source.exists():
            shutil.copy(source, target)
    (copy / ".venv" / "bin").mkdir(parents=True)
    for command in ("python", "pip", "mimo"):
        (copy / ".venv" / "bin" / command).symlink_to(Path(sys.executable).parent / command)
    return copy


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.where)
def test_it_runs(block: Block, ports: dict[str, str], directory: Path, tmp_path: Path) -> None:
    text = block.text
    for documented, port in ports.items():
        text = text.replace(f"127.0.0.1:{documented}", f"127.0.0.1:{port}").replace(
            f"localhost:{documented}", f"localhost:{port}"
        )
    if block.language in SHELL:
        command = ["bash", "-euo", "pipefail", "-c", "\n".join(_runnable(line) for line in _commands(text))]
    else:
        command = [sys.executable, "-c", text]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MIMO_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{block.where}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert not re.search(r'"error": ?\{', done.stdout), f"{block.where}\n{done.stdout[-3000:]}"


def _commands(text: str) -> list[str]:
    """Lines of a shell; of a console session those after the prompt."""
    lines = text.replace("\\\n", " ").splitlines()
    return (
        [line[2:] for line in lines if line.startswith("$ ")] if any(line.startswith("$ ") for line in lines) else lines
    )


def _runnable(line: str) -> str:
    """A command that would serve until it is stopped tells its settings instead."""
    if re.match(r"\s*make (serve|test)\b", line):
        return re.sub(r"make (\w+)", r"make -n \1 PYTHON=python >/dev/null", line)
    if re.match(r"\s*(\S*/)?mimo serve\b", line) and "--print-config" not in line:
        command, hash_, comment = line.partition(" #")
        return f"{command.rstrip().removesuffix('&')} --print-config >/dev/null {hash_}{comment}"
    return line
