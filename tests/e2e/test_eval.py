"""`mimo eval` on a service of its own: every held-out sample of every task gets an answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service import ROOT
from training.tasks import TASKS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_every_task_is_answered_and_nothing_is_left(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "cli", "eval", "--count", "3", "--concurrency", "4", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert [task["task"] for task in found["tasks"]] == list(TASKS)
    for task in found["tasks"]:
        assert (task["answered"], task["errors"]) == (3, {})
        assert task["answer_tokens"]["min"] >= 1
        assert 0 < task["ttft_p50_s"] <= task["total_p50_s"]
    assert list(tmp_path.glob("mimo-*")) == []
