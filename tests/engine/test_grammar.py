"""The state of one answer, whatever happened to its tokens; grammars and what they refuse."""

import random
from pathlib import Path

import pytest
import torch

from epd.engine.grammar import Answers, AnswerSoFar, GrammarFailed, Grammars
from epd.engine.sampler import SampleRow, sample
from epd.token_table import TokenTable, load_token_table
from epd.types import SamplingParams
from tests.fakes.tiny_tokenizer import END, write_tokenizer

LIST = 'start: "[" item ("," item){0,9} "]"\nitem: "true" | /[0-9]{1,3}/ | "{" /"[ab]{0,4}"/ ":" item "}"\n'


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    folder: Path = tmp_path_factory.mktemp("tokens")
    write_tokenizer(folder)
    return load_token_table(folder)


def allowed(answers: Answers, sampling: SamplingParams, tokens: list[int]) -> list[int]:
    state = answers.state(sampling, AnswerSoFar("r", (), 0, tuple(tokens)))
    odds = answers.odds(torch.zeros(128), sampling, len(tokens), state)
    return torch.isfinite(odds).nonzero().flatten().tolist()


def test_a_state_that_was_kept_is_one_made_anew(table: TokenTable) -> None:
    """Tokens are added one and several at a time, taken back, and replaced by others; the end is met and undone."""
    rng, sampling = random.Random(1), SamplingParams(max_tokens=99, grammar=LIST)
    grammars = Grammars(lambda: table, (END,))
    kept, tokens, num_ends = Answers(grammars, (END,), max_states=2), [], 0
    for _ in range(400):
        choices = allowed(kept, sampling, tokens)
        assert choices == allowed(Answers(grammars, (END,), max_states=1), sampling, tokens)
        num_ends += choices == [END]
        if choices == [END] or rng.random() < 0.15:
            tokens = tokens[: rng.randint(0, len(tokens))]
        else:
            tokens = [*tokens, rng.choice([token for token in choices if token != END])]
    assert num_ends > 5


def test_all_that_is_written_spells_the_grammar(table: TokenTable) -> None:
    sampling = SamplingParams(max_tokens=99, temperature=1.0, grammar="start: /a{2}b+/ | <think> /1+/ </think>")
    answers, texts = Answers(Grammars(lambda: table, (END,)), (END,), max_states=8), set()
    for seed in range(30):
        tokens: list[int] = []
        while tokens[-1:] != [END]:
            row = SampleRow(sampling, 100 * seed + len(tokens), AnswerSoFar(str(seed), (5,), 0, tuple(tokens)))
            [token] = sample(torch.zeros(1, 128), [row], answers=answers)
            assert token is not None
            tokens.append(token.token_id)
        texts.add(b"".join(table.spelled[token] for token in tokens[:-1]))
    assert all(text.strip(b"b") in (b"aa",) or text.startswith(b"<think>1") for text in texts)
    assert {b"aab", b"<think>1</think>"} & texts


def test_tokens_of_no_such_answer_are_refused(table: TokenTable) -> None:
    answers = Answers(Grammars(lambda: table, (END,)), (END,), max_states=1)
    sampling = SamplingParams(max_tokens=9, grammar='start: "[" /[ab]/')
    with pytest.raises(GrammarFailed):
        allowed(answers, sampling, [0, 0])
    # The state that failed is not kept.
    assert len(answers) == 0
    assert allowed(answers, sampling, []) != []


def test_special_tokens_come_only_where_a_grammar_names_them(table: TokenTable) -> None:
    answers = Answers(Grammars(lambda: table, (END,)), (END,), max_states=1)
    free = allowed(answers, SamplingParams(max_tokens=9, grammar="start: /(?s:.*)/"), [])
    assert {token for token in free if token >= 110} == {END}
    ids = [table.id_of(tag) for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")]
    assert ids == [126, 125, 124, 123, 127]
    assert (table.id_of("<unknown>"), table.id_of("a")) == (None, None)
    named = allowed(answers, SamplingParams(max_tokens=9, grammar="start: <tool_call> | /x/"), [])
    assert 124 in named


def test_an_end_of_the_client_ends_a_grammar_too(table: TokenTable) -> None:
    """Where it is a special token; a stop that is text does not break up what is written."""
    grammars = Grammars(lambda: table, (END,))
    spaces = SamplingParams(max_tokens=9, grammar="start: /a/", stop_token_ids=(126, 3))
    a = table.encode("a")
    assert allowed(Answers(grammars, (END,), max_states=1), spaces, a) == [126, END]


@pytest.mark.parametrize("is_biased", [True, False])
def test_what_must_go_on_ends_with_its_grammar(table: TokenTable, is_biased: bool) -> None:
    """`min_tokens` takes the end away only where the grammar has something else."""
    answers = Answers(Grammars(lambda: table, (END,)), (END,), max_states=1)
    biased = ((END, -100.0),) if is_biased else ()
    sampling = SamplingParams(max_tokens=9, min_tokens=9, grammar='start: "a" | "ab"', logit_bias=biased)
    a, b = table.encode("a"), table.encode("b")
    assert allowed(answers, sampling, a) == b
    assert allowed(answers, sampling, [*a, *b]) == [END]


def test_few_states_are_kept(table: TokenTable) -> None:
    answers = Answers(Grammars(lambda: table, (END,)), (END,), max_states=3)
    sampling = SamplingParams(max_tokens=9, grammar="start: /a+/")
    for number in range(10):
        answers.state(sampling, AnswerSoFar(str(number), (), 0, ()))
    assert len(answers) == 3
