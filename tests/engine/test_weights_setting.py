"""The settings of the engine that say how weights are read and held reach the model."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from epd.config import EngineConfig
from epd.engine.identity import kv_arithmetic
from epd.engine.worker import build_engine
from epd.model.weights import export_text_state, load_text_model
from epd.types import Role, SamplingParams
from tests.engine.conftest import Bench, Rows, make_request
from tests.fakes.clock import FakeClock
from tests.fakes.mailbox import Mailbox
from tests.fakes.quantized_files import QUANT, fuse, quantize_state
from tests.fakes.tiny_checkpoint import CHANGES
from tests.fakes.tiny_text import CONFIG, tiny_model
from tests.oracles.plain_generate import plain_generate

PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(30)]


def config_of(folder: Path, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {"model_dir": folder, "model_name": "tiny", "role": Role.BOTH, "page_size": 4}
    return EngineConfig(**settings | {"kv_budget_bytes": 4 << 20, "expected_sequence_tokens": 128} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_shards", "settings"),
    [(2, {"weights": "keep"}), (2, {"weights": "bfloat16"}), (1, {"qkv_layout": "plain", "weights": "keep"})],
)
def test_an_engine_generates_what_its_model_says(tmp_path: Path, num_shards: int, settings: dict[str, str]) -> None:
    state = quantize_state(fuse(export_text_state(tiny_model(**CHANGES)), num_shards=num_shards), num_shards=num_shards)
    save_file(state, tmp_path / "model.safetensors")
    changes = {"attention_projection_layout": "fused_qkv", "quantization_config": QUANT}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | CHANGES | changes))
    mailbox, clock = Mailbox("worker", None), FakeClock()
    engine = build_engine(config_of(tmp_path, **settings), mailbox, embeddings=Rows(), clock=clock.clock)
    bench = Bench(engine, mailbox, clock, Rows())
    bench.submit(make_request("r", PROMPT))
    bench.run()
    expected = plain_generate(load_text_model(tmp_path, **settings), PROMPT, SamplingParams(max_tokens=8))  # type: ignore[arg-type]
    assert bench.answers["r"] == expected
    assert len(expected) == 8


def test_kv_is_exchanged_between_equal_numbers_only(tmp_path: Path) -> None:
    plain = kv_arithmetic(config_of(tmp_path))
    assert kv_arithmetic(config_of(tmp_path, weights="keep")) == plain
    assert kv_arithmetic(config_of(tmp_path, weights="float32", qkv_layout="interleaved")) == plain
    changes = ({"weights": "bfloat16"}, {"qkv_layout": "plain"}, {"dtype": "bfloat16"})
    assert len({plain, *(kv_arithmetic(config_of(tmp_path, **change)) for change in changes)}) == 4


@pytest.mark.parametrize("change", [{"weights": "int4"}, {"qkv_layout": "guess"}])
def test_other_values_are_refused(tmp_path: Path, change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"engine\.\w+ is '\w+'; allowed: .*, "):
        config_of(tmp_path, **change)
