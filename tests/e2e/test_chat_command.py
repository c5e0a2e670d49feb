"""`mimo chat` in a terminal: one question on a pipeline of its own, and on a running server."""

import os
import subprocess
import sys

import pytest

from tests.e2e.service import KNOWN_ANSWERS, ROOT, Service

pytestmark = pytest.mark.e2e


def chat(
    *arguments: str, stdin: str = "", program: tuple[str, ...] = ("-m", "cli")
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, "chat", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, input=stdin, capture_output=True, text=True, check=False, timeout=200
    )


# What takes seconds and 150 MB to import, and none of our processes needs unless something is compiled.
_HEAVY = ("torch._dynamo", "sympy", "torchvision", "transformers")
_PROBED = f"""
import sys
from cli.app import main
try:
    main()
finally:
    print("loaded:", [name for name in {_HEAVY} if name in sys.modules], file=sys.stderr)
"""


def test_one_question_without_a_server_and_without_a_compiler() -> None:
    known = KNOWN_ANSWERS["picture.png"]
    done = chat("--image", "samples/picture.png", known.question, program=("-c", _PROBED))
    assert (done.returncode, done.stdout) == (0, f"{known.answer}\n"), done.stderr
    assert "loaded: []" in done.stderr


def test_one_question_to_a_server(epd: Service) -> None:
    known = KNOWN_ANSWERS["clip.mp4"]
    done = chat("--url", f"{epd.url}/v1/", "--video", "samples/clip.mp4", known.question)
    assert (done.returncode, done.stdout) == (0, f"{known.answer}\n"), done.stderr


def test_standard_input_is_one_question(epd: Service) -> None:
    known = KNOWN_ANSWERS["tones.wav"]
    done = chat("--url", epd.url, "--audio", "samples/tones.wav", stdin=f"{known.question}\n")
    assert (done.returncode, done.stdout) == (0, f"{known.answer}\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("--url", "http://127.0.0.1:1", "hello"), 1, "127.0.0.1:1"),
        (("--url", "127.0.0.1:8000", "hello"), 2, "http://127.0.0.1:8000"),
        (("--url", "http://127.0.0.1:1", " "), 2, "empty"),
        (("--image", "missing.png", "hello"), 2, "missing.png"),
    ],
)
def test_failures_are_one_line(arguments: tuple[str, ...], code: int, word: str) -> None:
    done = chat(*arguments)
    assert done.returncode == code
    assert word in done.stderr
    assert "Traceback" not in done.stderr
