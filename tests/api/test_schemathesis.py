"""Schemathesis asks a real server everything that its document allows, and much that it does not."""

import asyncio
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.api.schemathesis_run import run_schemathesis, schemathesis_command
from tests.e2e.service import Service
from tests.fakes.gateway import running_gateway, says

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(int(600 * max(1.0, float(os.environ.get("MIMO_TEST_EFFORT", "1")))))
def test_it_finds_nothing(served: Service, tmp_path: Path) -> None:
    done = run_schemathesis(served.url, "--phases", "examples,coverage,fuzzing", num_examples=10, directory=tmp_path)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    assert num_generated(done) > 500
    # And it goes on as if nothing had been.
    assert served.get("/ready").status == 200
    assert "Traceback" not in served.log_path.read_text()


async def test_no_operation_forgets_its_key(tmp_path: Path) -> None:
    """Every operation is asked with the key, with a wrong one and with none."""
    async with running_gateway(says("ok"), api_keys=("sesame",)) as stack:
        arguments = ("--phases", "examples,coverage", "--mode", "positive", "--header", "Authorization: Bearer sesame")
        command = schemathesis_command(stack.url, *arguments, num_examples=1)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-20_000:]


def num_generated(done: subprocess.CompletedProcess[str]) -> int:
    match = re.search(r"(\d+) generated", done.stdout)
    assert match is not None, done.stdout
    return int(match.group(1))
