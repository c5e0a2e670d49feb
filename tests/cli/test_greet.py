"""What is said when an encoder is ready can be pasted."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli.greet import greet_encoder
from cli.load_role import EncoderDeployment, load_any


def greeting(tmp_path: Path, **flags: object) -> str:
    config = load_any(runtime_dir=tmp_path, environ={}, flags={"role": "encoder", **flags})
    assert isinstance(config, EncoderDeployment)
    said = io.StringIO()
    greet_encoder(config, "127.0.0.1:8001", Console(file=said, width=80))
    return said.getvalue()


def test_it_says_where_and_how(tmp_path: Path) -> None:
    said = greeting(tmp_path, encoder={"replicas": 2})
    assert "2 replicas, at http://127.0.0.1:8001" in said
    assert "curl -s http://127.0.0.1:8001/v1/encode -F image=@samples/picture.png | \\\n    python3 -c " in said
    assert "--language-only --encoder-urls http://127.0.0.1:8001" in said
    assert "KEY" not in said


def test_it_speaks_of_keys_and_dialects_that_there_are(tmp_path: Path) -> None:
    said = greeting(tmp_path, front={"api_keys": ["secret"]}, sglang={"enabled": False})
    assert "-H 'Authorization: Bearer KEY'" in said
    assert "secret" not in said
    assert "sglang" not in said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_line_that_reads_the_rows_runs(tmp_path: Path, dtype: str) -> None:
    said = greeting(tmp_path, encoder={"dtype": dtype})
    if dtype == "bfloat16":
        assert "python3 -c" not in said
        return
    code = said.partition('python3 -c "')[2].partition('"')[0]
    answer = '{"data": [{"embedding": "AACAPwAAAEA=", "rows": 1, "width": 2}]}'
    done = subprocess.run([sys.executable, "-c", code], input=answer, capture_output=True, text=True, check=True)
    assert done.stdout == "[[1. 2.]]\n"
