"""`mimo bench` ended from outside: no server that it started outlives it, and nothing is said that helps nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.signals import exit_code, terminable

ROOT = Path(__file__).parent.parent.parent

# Around a bench that never ends: the web server and, which takes its time to start, the real deployment.
_BENCH = """
import sys, time
from contextlib import contextmanager, nullcontext
from cli import bench, bench_encoder
from cli.app import main
from cli.bench_case import Case
from cli.bench_encoder_ours import encoder_deployment
from cli.bench_server import SameEverywhere, slow_server

@contextmanager
def opened(setting, bars):
    ours = nullcontext()
    if how == "whole":
        ours = encoder_deployment("mimo-nano", num_replicas=1, decode_threads=1, tower_threads=1)
    with slow_server(SameEverywhere(b""), 0.0), ours:
        print("ready", flush=True)
        time.sleep(600)

how = sys.argv.pop()
bench_encoder.CASES = (Case(name="encoder.endless", unit="s", ours="", baseline="", limit="", open=opened),)
sys.argv = ["mimo", "bench", "encoder", *sys.argv[1:]]
if __name__ == "__main__":
    main()
"""


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= {int(child)} | descendants(int(child))
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [("whole", signal.SIGKILL, -9), ("web", signal.SIGINT, 130)],
    ids=["kill", "int"],
)
def test_no_server_outlives_the_bench(tmp_path: Path, how: str, number: signal.Signals, code: int) -> None:
    script = tmp_path / "endless.py"
    script.write_text(_BENCH)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "MIMO_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        [sys.executable, str(script), how],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == "ready\n"
        below = descendants(bench.pid)
        # The web server; the deployment, its front and its encoder.
        assert len(below) >= (4 if how == "whole" else 1)
        if number == signal.SIGINT:
            # As the terminal does it: to all of the group.
            os.killpg(bench.pid, number)
        else:
            bench.send_signal(number)
        _, told = bench.communicate(timeout=60)
        assert bench.returncode == code
    assert "Traceback" not in told
    if code > 0:
        assert "interrupted; 0 of 1 cases were done" in told
    until_s = time.monotonic() + 30
    while any(map(is_alive, below)) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not [pid for pid in below if is_alive(pid)]


def test_sigterm_is_as_ctrl_c() -> None:
    former = signal.getsignal(signal.SIGTERM)
    raised = pytest.raises(KeyboardInterrupt)
    with raised as found, terminable():
        signal.raise_signal(signal.SIGTERM)
    assert exit_code(found.value) == 143
    assert exit_code(KeyboardInterrupt()) == 130
    assert signal.getsignal(signal.SIGTERM) == former
