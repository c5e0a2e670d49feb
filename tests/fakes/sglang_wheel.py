"""Modules of the real sglang wheel, for tests of what its readers accept. Nothing of it is installed."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from cli.models import cache_dir
from tests.fakes import sglang_stock
from tests.fakes.sglang_receiver import NAMES

VERSION = "0.5.23"
TOKEN_IDS = {
    "vision_start": 1,
    "vision_end": 2,
    "image_pad": 3,
    "video_pad": 4,
    "audio_pad": 5,
    "video_start": 6,
    "video_end": 7,
    "audio_start": 8,
    "audio_end": 9,
}
assert NAMES.embedding_data.module in sglang_stock.REAL


class WheelUnavailable(Exception):
    """It cannot be had here; the message says why."""


def wheel_modules() -> Path:
    """A directory with the modules under test, downloaded once per user and release. Raises WheelUnavailable."""
    home = cache_dir(os.environ) / f"sglang-{VERSION}"
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
        try:
            done = subprocess.run(
                [*command, "--only-binary=:all:", "-d", scratch, f"sglang=={VERSION}"],
                capture_output=True,
                text=True,
                check=False,
                timeout=180,
            )
        except subprocess.TimeoutExpired as error:
            raise WheelUnavailable(f"sglang {VERSION} was not downloaded within 180 s") from error
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            last = done.stderr.strip().splitlines()[-1:] or ["pip gave no wheel"]
            raise WheelUnavailable(f"sglang {VERSION} cannot be downloaded: {last[0]}")
        fresh = Path(scratch) / "modules"
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in sglang_stock.REAL:
                path = name.replace(".", "/")
                members = {f"{path}.py", f"{path}/__init__.py"} & set(wheel.namelist())
                wheel.extractall(fresh, members)
        # Another run may have been faster.
        if not home.is_dir():
            fresh.rename(home)
    return home


class StockServer:
    """One process, or one per rank, of the wheel's receiving half."""

    def __init__(self, modules: Path, kind: str, num_ranks: int, log: Path) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, sglang_stock.__file__, str(modules), kind, str(num_ranks), json.dumps(TOKEN_IDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )

    def ask(self, **command: object) -> Any:
        """The answer to one command. Blocks; use a thread. Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the stock process ended with {self._process.wait()}; see {self._log.name}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
