"""The gateway's files of a checkpoint: each fault is one error that names the file and what is allowed."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.load import BUILTIN_MODELS
from encoder.checkpoint import CheckpointError
from epd.config import GatewayConfig
from epd.gateway.process import run_gateway
from epd.gateway.render import Renderer

GENERATION = "generation_config.json"
NANO = BUILTIN_MODELS["mimo-nano"]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """What the gateway reads of the built-in model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in NANO.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    return folder


def changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def with_tokens(folder: Path, **entry: object) -> None:
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["added_tokens"].append(spec["added_tokens"][-1] | entry)
    path.write_text(json.dumps(spec))


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json", "is missing: the model cannot be"),
    "empty tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json", "supported: 'BPE'"),
    "deep tokenizer": (lambda d: (d / "tokenizer.json").write_text("[" * 10**5), "tokenizer.json", "too deeply"),
    "odd tokenizer": (
        lambda d: changed(d / "tokenizer.json", added_tokens=[1]), "tokenizer.json", "not laid out like a tokenizer",
    ),
    "odd merges": (
        lambda d: changed(d / "tokenizer.json", model={"type": "BPE", "vocab": {"a": 0}, "merges": 3}),
        "tokenizer.json",
        "no tokenizer can be made of it",
    ),
    "odd id": (lambda d: with_tokens(d, id=-1, content="<odd>"), "tokenizer.json", "has id -1, allowed is an integer"),
    "large tokenizer": (
        lambda d: changed(d / "config.json", vocab_size=1535, eos_token_id=0),
        "tokenizer.json",
        "largest token id is 1,535, allowed is below vocab_size of config.json, 1,535",
    ),
    "no template": (without_templates, "tokenizer_config.json", "has no chat template"),
    "broken template": (
        lambda d: (d / "chat_template.jinja").write_text("{% if %}"), "chat_template.jinja", "line 1: Expected an expr",
    ),
    "unreadable template": (
        lambda d: (d / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja", "is not UTF-8 text",
    ),
    "cut settings": (lambda d: (d / "tokenizer_config.json").write_text("{"), "tokenizer_config.json", "is not JSON"),
    "cut generation": (
        lambda d: (d / GENERATION).write_text('{"eos_token_id":"x"'), GENERATION, "not JSON",
    ),
    "temperature": (
        lambda d: changed(d / GENERATION, temperature=-0.1), GENERATION, "from 0 to 2, got -0.1",
    ),
    "top_p": (lambda d: changed(d / GENERATION, top_p="all"), GENERATION, "above 0 up to 1"),
    "top_k": (lambda d: changed(d / GENERATION, top_k=1.5), GENERATION, "an integer from 0"),
    "end": (
        lambda d: changed(d / GENERATION, eos_token_id=[1, 1536]),
        GENERATION,
        "eos_token_id: expected an integer from 0 to 1,535",
    ),
    "config": (lambda d: (d / "config.json").write_text("[]"), "config.json", "holds no JSON object"),
    "context": (lambda d: changed(d / "config.json", max_position_embeddings=0), "config.json", "an integer from 1 to"),
    "vocabulary": (lambda d: changed(d / "config.json", vocab_size=None), "config.json", "vocab_size: expected"),
    "own end": (lambda d: changed(d / "config.json", eos_token_id="x"), "config.json", "eos_token_id: expected"),
    "processor": (
        lambda d: changed(d / "config.json", processor_config={"fps": 0}), "config.json", "processor_config.fps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_begins_with_the_file(model_dir: Path, fault: str) -> None:
    damage, file, words = FAULTS[fault]
    damage(model_dir)
    with pytest.raises(CheckpointError) as refused:
        Renderer.load(model_dir)
    assert str(refused.value).startswith(f"{model_dir / file}")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_whole_is_taken(model_dir: Path) -> None:
    assert Renderer.load(model_dir).vocabulary.num_token_ids == 1536
    (model_dir / "generation_config.json").unlink()
    for name in ("config.json", "tokenizer.json"):
        (model_dir / name).write_text("\ufeff" + (model_dir / name).read_text())
    assert Renderer.load(model_dir).defaults.temperature == 1.0


def test_a_gateway_that_cannot_read_its_checkpoint_is_not_to_be_started_again(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model_dir / "chat_template.jinja").write_text("{% if %}")
    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run_gateway(GatewayConfig(model_dir=model_dir, model_name="broken"))
    assert ended.value.code == 2
    (record,) = caplog.records
    assert "gateway cannot start" in record.message
    assert record.exc_info is None
