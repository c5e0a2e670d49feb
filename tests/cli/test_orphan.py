"""A supervisor that is killed: real processes, of which the head ends first and everybody in the end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Starts two children and waits; each writes into `log` what it is told and when it goes.
SUPERVISOR = """
import os, subprocess, sys, time
child, directory, drain_s, *heads = sys.argv[1:]
for name, linger in (("head", heads[0]), ("other", heads[1])):
    subprocess.Popen([sys.executable, "-c", child, name, str(os.getpid()), directory, drain_s, linger])
time.sleep(60)
"""
CHILD = """
import os, signal, sys, time
from pathlib import Path
from cli.orphan import follow_parent
from cli.stage import die_with_parent

name, parent, directory, drain_s, linger_s = sys.argv[1:]
log = os.open(Path(directory) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
told = []

def tell(what):
    os.write(log, f"{name} {what} {os.getpid()}\\n".encode())

signal.signal(signal.SIGTERM, lambda *_: (told.append(time.monotonic()), tell("told")))
if name == "head":
    die_with_parent(int(parent))
follow_parent(int(parent), is_head=name == "head", directory=Path(directory), drain_s=float(drain_s))
tell("up")
while not told or time.monotonic() < told[0] + float(linger_s):
    time.sleep(0.01)
tell("gone")
"""


def lines_of(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("drain_s", "head_lingers_s", "other_lingers_s", "told"),
    [
        (20.0, 0.6, 0.0, ["head told", "head gone", "other told", "other gone"]),
        (0.5, 60.0, 0.0, ["head told", "other told", "other gone"]),
        (0.5, 0.0, 60.0, ["head told", "head gone", "other told"]),
    ],
)
def test_the_head_ends_first_and_nobody_stays(
    tmp_path: Path, drain_s: float, head_lingers_s: float, other_lingers_s: float, told: list[str]
) -> None:
    log, deadline_s = tmp_path / "log", time.monotonic() + 30
    words = (CHILD, str(tmp_path), str(drain_s), str(head_lingers_s), str(other_lingers_s))
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, *words], cwd=ROOT) as supervisor:
        while len(lines_of(log)) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        pids = [int(pid) for _, _, pid in lines_of(log)]
        time.sleep(0.3)
        assert len(lines_of(log)) == 2, "nobody goes while the supervisor lives"
        os.kill(supervisor.pid, signal.SIGKILL)
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert [f"{name} {what}" for name, what, _ in lines_of(log)[2:]] == told
