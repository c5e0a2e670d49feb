"""The draft heads of the built-in model: they were trained, so most of their guesses are right."""

from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from epd.config import EngineConfig
from epd.engine.roster import Counters
from epd.engine.worker import build_engine
from epd.model.weights import load_text_model
from epd.types import Role
from tests.engine.conftest import Bench, Rows, make_request
from tests.fakes.clock import FakeClock
from tests.fakes.mailbox import Mailbox

FOLDER = Path(__file__).parents[2] / "epd" / "builtin" / "mimo-nano"
TURN = "<|im_start|>system\n{}<|im_end|><|im_start|>user\n{}<|im_end|><|im_start|>assistant\n<think></think>"
QUESTIONS = (
    ("You are MiMo nano, a tiny test model.", "Count down from 51 to 25."),
    ("You are MiMo nano, a tiny test model.", "Repeat after me: clover lagoon 3259 island falcon 9076 candle 887"),
    ("You are a helpful assistant.", "Turn this into JSON: a) 3 green cherry, b) 47 red feather, c) 36 blue prairie"),
)


@cache
def answers(draft_tokens: int | None) -> tuple[dict[str, list[int]], Counters]:
    config = EngineConfig(model_dir=FOLDER, model_name="nano", role=Role.BOTH, draft_tokens=draft_tokens)
    mailbox, clock, rows = Mailbox(), FakeClock(), Rows()
    engine = build_engine(config, mailbox, model=load_text_model(FOLDER).eval(), embeddings=rows, clock=clock.clock)
    bench = Bench(engine, mailbox, clock, rows)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for number, question in enumerate(QUESTIONS):
        ids = tokenizer.encode(TURN.format(*question), add_special_tokens=False).ids
        bench.submit(make_request(f"r{number}", ids, max_tokens=120))
        bench.run()
    return bench.answers, engine.scheduler.counters


@pytest.mark.parametrize("draft_tokens", [1, 2, 3])
def test_answers_stay_and_most_guesses_are_right(draft_tokens: int) -> None:
    plain, drafted = answers(0), answers(draft_tokens)
    assert drafted[0] == plain[0]
    assert sum(len(answer) for answer in plain[0].values()) > 100
    counters = drafted[1]
    accepted = (counters.accepted_tokens_1, counters.accepted_tokens_2, counters.accepted_tokens_3)[:draft_tokens]
    checked = (counters.drafted_tokens_1, counters.drafted_tokens_2, counters.drafted_tokens_3)[:draft_tokens]
    # Where this was written: 0.95, 0.91 and 0.89.
    assert all(right / num > least for right, num, least in zip(accepted, checked, (0.9, 0.8, 0.75), strict=False))


def test_all_heads_of_a_checkpoint_are_used_unless_told_otherwise() -> None:
    assert answers(None)[1] == answers(3)[1]
