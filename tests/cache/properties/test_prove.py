"""The proof's own command: what it refuses before it starts, what it tells when it is stopped, and of a failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cache.properties import prove
from tests.cache.properties.schedule import size_of

ROOT = Path(__file__).parents[3]
SCHEDULE = bytes(range(7, 7 + size_of(3))).hex()


def run(*arguments: str) -> object:
    with pytest.raises(SystemExit) as end:
        prove.main(arguments)
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "no-such-folder/log"), "--out no-such-folder/log: No such file or directory"),
        (("--schedule", "zz"), "--schedule: non-hexadecimal"),
        (("--schedule", "00ff"), "--schedule: 2 bytes; a schedule has at least 6"),
        (("--jobs", "0"), "must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    arguments: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--schedules", "1000000000") == 2
    assert message in capsys.readouterr().err


def test_one_schedule_is_told_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--schedule", SCHEDULE, "--out", str(tmp_path / "log")) == 0
    told = capsys.readouterr().out
    assert told.startswith("1 schedule as given, ")
    assert not re.search(r"\b1 (schedules|cases|steps|failures)\b", told)
    assert (tmp_path / "log").read_text() == told


def test_a_failure_names_the_command_that_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(schedule: bytes) -> int:
        raise AssertionError("as it should")

    monkeypatch.setitem(prove.BESIDE, "rejected drafts leave no trace", fails)
    assert run("--schedules", "1") == 1
    (command,) = re.findall(r"scripts/prove_kv (--schedule [0-9a-f]+)\n", capsys.readouterr().out)
    assert run(*command.split()) == 1
    told = capsys.readouterr().out
    assert command in told
    assert re.search(r"FAILED 1 .*rejected drafts leave no trace", told)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_what_was_proved(number: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = ("--schedules", "1000000", "--jobs", "2", "--out", str(log))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cache.properties.prove", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline_s = time.monotonic() + 60
    while not log.exists() or "started" not in log.read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    time.sleep(1)
    if number is signal.SIGINT:
        # As a terminal does it: the workers get it too.
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert f"stopped by {number.name}, " in out
    assert len(re.findall(r"^(?:holds|untried) ", out, re.MULTILINE)) == len(prove.INVARIANTS) + len(prove.BESIDE)
    assert out in log.read_text()
