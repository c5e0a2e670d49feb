"""What keeps an encoder process from starting, and how it says so."""

import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from encoder.config import EncoderConfig
from encoder.process import run_encoder


def missing(folder: Path, copy: Path) -> Path:
    return copy


def without_weights(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").write_bytes(b"")
    return copy


def cut_short(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return copy


def unchanged(folder: Path, copy: Path) -> Path:
    return folder


@pytest.mark.parametrize(
    ("make_folder", "config", "exit_code", "message"),
    [
        (missing, EncoderConfig(), 2, "config.json"),
        (without_weights, EncoderConfig(), 2, "0 bytes"),
        (cut_short, EncoderConfig(), 2, "cut short"),
        (unchanged, EncoderConfig(device="cuda:99"), 2, "encoder.device is 'cuda:99'"),
        (unchanged, EncoderConfig(device="abacus"), 2, "allowed: cpu, cuda"),
        (unchanged, EncoderConfig(arena_bytes=1 << 60), 1, ""),
    ],
)
def test_a_process_that_cannot_start_says_why_in_one_line(
    tiny_model_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make_folder: Callable[[Path, Path], Path],
    config: EncoderConfig,
    exit_code: int,
    message: str,
) -> None:
    model_dir = make_folder(tiny_model_dir, tmp_path / "copy")
    with pytest.raises(SystemExit) as ended:
        run_encoder(
            config, model_dir=model_dir, name="e0", address=f"ipc://{tmp_path}/e", arena=f"t-{uuid.uuid4().hex}"
        )
    assert ended.value.code == exit_code
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("encoder e0 cannot start: ")
    assert re.search(message, line)
    assert "\n" not in line


def test_isolation_that_the_system_does_not_have(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.pidfd_open")
    with pytest.raises(SystemExit) as ended:
        run_encoder(
            EncoderConfig(isolation="processes"),
            model_dir=tiny_model_dir,
            name="e0",
            address=f"ipc://{tmp_path}/e",
            arena=f"t-{uuid.uuid4().hex}",
        )
    assert ended.value.code == 2
    assert "isolation by processes needs Linux" in caplog.text
