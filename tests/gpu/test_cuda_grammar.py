"""Masks, penalties and biases of rows on a CUDA device: what is drawn is what is drawn on the CPU."""

from pathlib import Path

import pytest
import torch

from epd.engine.grammar import Answers, AnswerSoFar, Grammars
from epd.engine.sampler import SampleRow, sample
from epd.token_table import load_token_table
from epd.types import SamplingParams

pytestmark = pytest.mark.gpu

NANO = Path(__file__).parents[2] / "epd" / "builtin" / "mimo-nano"
END = 1519
MANNERS = (
    {"grammar": 'start: "[" /[0-9]{1,4}/ ("," /[a-z]{2,5}/)* "]"'},
    {"grammar": "start: /(?s:.){9,40}/", "repetition_penalty": 1.5, "ignore_eos": True},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5, "logit_bias": ((70, 4.0), (71, -100.0)), "min_tokens": 5},
)


@pytest.mark.parametrize("manner", range(len(MANNERS)))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_are_drawn_as_on_the_cpu(manner: int, temperature: float) -> None:
    table = load_token_table(NANO)
    sampling = SamplingParams(max_tokens=30, temperature=temperature, **MANNERS[manner])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(manner)
    # A vocabulary that is padded beyond the tokenizer.
    logits = torch.randn(24, 1600, generator=generator) * 3
    written: dict[str, list[int]] = {}
    for device in ("cpu", "cuda"):
        answers = Answers(Grammars(lambda: table, (END,)), (END,), max_states=1)
        tokens = written.setdefault(device, [])
        for index in range(24):
            row = SampleRow(sampling, index, AnswerSoFar("r", (5, 6, 70), 0, tuple(tokens)))
            [token] = sample(logits[index : index + 1].to(device), [row], answers=answers)
            assert token is not None
            if token.token_id == END:
                break
            tokens.append(token.token_id)
    assert written["cuda"] == written["cpu"]
