"""Processor settings and golden cases shared by the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preprocess import ProcessorConfig

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Expected sizes, ids and pixel samples of the published processor."""
    loaded: dict[str, Any] = json.loads((GOLDEN / "processor" / "expected_sglang.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def configs(golden: dict[str, Any]) -> dict[str, ProcessorConfig]:
    """The three processor settings of the golden cases, by name."""
    return {
        name: ProcessorConfig.from_hf({"processor_config": section})
        for name, section in golden["processor_config"].items()
    }


@pytest.fixture(scope="session")
def tiny(configs: dict[str, ProcessorConfig]) -> ProcessorConfig:
    return configs["tiny"]
