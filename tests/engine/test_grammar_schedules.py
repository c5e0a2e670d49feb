"""Answers under grammars, penalties and biases, in schedules that undo and repeat steps: with draft heads, in tight
pools, cut into attempts, handed from one worker to another. They are those of a fresh state for every token."""

import random
from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from epd.engine.grammar import Answers, Grammars
from epd.token_table import TokenTable, load_token_table
from epd.types import Abort, FinishReason, SamplingParams
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.engine.test_draft_schedules import check, least_bytes
from tests.engine.test_roles import make_pair
from tests.fakes.guessing_model import guessing_model
from tests.fakes.tiny_checkpoint import write_checkpoint
from tests.fakes.tiny_tokenizer import END, write_tokenizer
from tests.oracles.plain_generate import plain_generate

NUM_LONGEST = 16
PROMPTS = [tuple((5 * i * i + length * 31 + i) % 95 for i in range(length)) for length in (3, 20, 33)]
LIST = 'start: "[" item ("," item){0,9} "]"\nitem: "true" | /[0-9]{1,3}/ | "{" /"[ab]{0,4}"/ ":" item "}"\n'
MANNERS: tuple[dict[str, object], ...] = (
    {"grammar": LIST},
    {"grammar": LIST, "temperature": 1.3, "seed": 4, "ignore_eos": True, "stop_token_ids": (END,)},
    # Some come to their end before the ninth token.
    {"grammar": LIST, "temperature": 1.2, "seed": 6, "min_tokens": 9},
    {"grammar": 'start: "12" | "ab" | "12ab"', "temperature": 1.0, "seed": 5, "min_tokens": 14},
    {"grammar": "start: /[a-c]*/", "temperature": 1.0, "seed": 1, "repetition_penalty": 1.4},
    {"temperature": 0.8, "seed": 2, "frequency_penalty": 1.5, "presence_penalty": -0.5, "ignore_eos": True},
    {"repetition_penalty": 1.8, "logit_bias": ((40, 3.0), (41, -100.0)), "min_tokens": 9},
    {"temperature": 1.0, "min_p": 0.3, "top_k": 20, "seed": 3},
)
Oracle = Callable[[int, int], list[int]]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model whose tokens have spellings."""
    folder = tmp_path_factory.mktemp("speaking")
    write_tokenizer(folder)
    return Checkpoint(folder, write_checkpoint(folder, guessing_model()))


@pytest.fixture(scope="module")
def oracle(speaking: Checkpoint) -> Oracle:
    table: TokenTable = load_token_table(speaking.folder)
    grammars = Grammars(lambda: table, (END,))

    @cache
    def longest(prompt: int, manner: int) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=NUM_LONGEST, **MANNERS[manner])  # type: ignore[arg-type]
        fresh = lambda: Answers(grammars, (END,), max_states=1)  # noqa: E731
        return tuple(plain_generate(speaking.model, PROMPTS[prompt], sampling, make_answers=fresh))

    return lambda prompt, manner: list(longest(prompt, manner))


def test_the_manners_are_no_idle_words(speaking: Checkpoint, oracle: Oracle) -> None:
    """Each changes answers, and grammars are kept."""
    spelled = load_token_table(speaking.folder).spelled
    for manner in range(len(MANNERS)):
        words = MANNERS[manner]
        plain = {key: value for key, value in words.items() if key in ("temperature", "seed", "top_k", "ignore_eos")}
        sampling = SamplingParams(max_tokens=NUM_LONGEST, **plain)  # type: ignore[arg-type]
        differ = [
            plain_generate(speaking.model, PROMPTS[i], sampling) != oracle(i, manner) for i in range(len(PROMPTS))
        ]
        assert any(differ)
        if "grammar" in words:
            text = b"".join(spelled[token] for token in oracle(0, manner))
            assert text[:1] == b"[" or set(text) <= set(b"abc12")


@pytest.mark.parametrize("block", range(6))
def test_one_worker(make_bench: MakeBench, speaking: Checkpoint, oracle: Oracle, block: int) -> None:
    rng = random.Random(block)
    draft_tokens, chunk_tokens = rng.randint(0, 3), rng.choice([4, 24, 64])
    bench = make_bench(
        checkpoint=speaking,
        draft_tokens=draft_tokens,
        draft_max_batch_tokens=rng.choice([6, 100]),
        chunk_tokens=chunk_tokens,
        kv_budget_bytes=least_bytes(draft_tokens, chunk_tokens) + rng.choice([0, 4 << 20]),
        # States of fewer answers than run are kept, or of all.
        max_running=rng.choice([2, 6]),
        expected_sequence_tokens=64,
    )
    asked: dict[str, tuple[int, int, int]] = {}
    for number in range(12):
        prompt, manner = rng.randrange(len(PROMPTS)), rng.randrange(len(MANNERS))
        truth = oracle(prompt, manner)
        # As a gateway does that lost a worker after so many tokens.
        emitted = rng.choice([0, 0, rng.randint(0, max(0, len(truth) - 1))])
        asked[f"r{number}"] = (prompt, manner, emitted)
        tokens = (*PROMPTS[prompt], *truth[:emitted])
        request = make_request(f"r{number}", tokens, max_tokens=NUM_LONGEST, num_emitted=emitted, **MANNERS[manner])
        bench.submit(request)
        for _ in range(rng.randint(0, 4)):
            bench.step()
        if rng.random() < 0.3:
            bench.mailbox.put(Abort(request_id=f"r{rng.randint(0, number)}"))
        if rng.random() < 0.3:
            bench.engine.cache.device._ledger.evict_window(1000)
    bench.run()
    for request_id, (prompt, manner, emitted) in asked.items():
        finish, answer = bench.finishes[request_id], bench.answers.get(request_id, [])
        check(answer, finish, oracle(prompt, manner)[emitted:])
    bench.assert_nothing_leased()


@pytest.mark.parametrize("manner", range(len(MANNERS)))
def test_handed_over(make_bench: MakeBench, speaking: Checkpoint, oracle: Oracle, manner: int) -> None:
    pair = make_pair(make_bench, both={"checkpoint": speaking, "draft_tokens": 2})
    for prompt in range(len(PROMPTS)):
        pair.submit(make_request(f"r{prompt}", PROMPTS[prompt], max_tokens=NUM_LONGEST, **MANNERS[manner]))
    pair.run()
    for prompt in range(len(PROMPTS)):
        truth, finish = oracle(prompt, manner), pair.finish(f"r{prompt}")
        assert pair.answer(f"r{prompt}") == truth
        assert finish.reason is (FinishReason.LENGTH if len(truth) == NUM_LONGEST else FinishReason.STOP)
    pair.assert_nothing_leased()


def bench_of(make_bench: MakeBench, speaking: Checkpoint, **params: object) -> Bench:
    bench = make_bench(checkpoint=speaking, draft_tokens=0)
    bench.submit(make_request("r", PROMPTS[0], max_tokens=12, **params))
    bench.run()
    return bench


def test_an_answer_ends_with_its_grammar_whatever_ignores_ends(make_bench: MakeBench, speaking: Checkpoint) -> None:
    bench = bench_of(make_bench, speaking, grammar='start: "12" "ab"', ignore_eos=True, stop_token_ids=(END,))
    spelled = load_token_table(speaking.folder).spelled
    assert b"".join(spelled[token] for token in bench.answers["r"]) == b"12ab"
    assert bench.finishes["r"].reason is FinishReason.STOP


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_an_answer_that_is_to_be_longer_ends_with_its_grammar(
    make_bench: MakeBench, speaking: Checkpoint, draft_tokens: int
) -> None:
    bench = make_bench(checkpoint=speaking, draft_tokens=draft_tokens)
    bench.submit(make_request("r", PROMPTS[0], max_tokens=20, min_tokens=15, grammar='start: "12" | "12ab"'))
    bench.run()
    spelled = load_token_table(speaking.folder).spelled
    assert b"".join(spelled[token] for token in bench.answers["r"]) == b"12ab"
    assert bench.finishes["r"].reason is FinishReason.STOP


def test_a_grammar_that_fails_ends_its_request_alone(make_bench: MakeBench, speaking: Checkpoint) -> None:
    bench = make_bench(checkpoint=speaking, draft_tokens=0)
    stuck = 'start: "12" A\nA: /a/ & /b/\n'
    for name, grammar in (("broken", "start: nothing"), ("stuck", stuck), ("sound", 'start: "ab"')):
        bench.submit(make_request(name, PROMPTS[1], grammar=grammar))
    bench.submit(make_request("plain", PROMPTS[1], ignore_eos=True))
    bench.run()
    assert {name: finish.reason for name, finish in bench.finishes.items()} == {
        "broken": FinishReason.FAILED,
        "stuck": FinishReason.FAILED,
        "sound": FinishReason.STOP,
        "plain": FinishReason.LENGTH,
    }
    assert bench.finishes["broken"].code == bench.finishes["stuck"].code == "grammar_failed"
    assert (bench.finishes["broken"].status, bench.finishes["broken"].retryable) == (400, False)
    assert "nothing" in bench.finishes["broken"].message
    bench.assert_nothing_leased()


def test_a_model_without_a_tokenizer_has_no_grammars(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.submit(make_request("r", PROMPTS[0], grammar='start: "a"'))
    bench.run()
    assert bench.finishes["r"].code == "grammar_failed"


def test_log_probabilities_stay_the_models_own(make_bench: MakeBench, speaking: Checkpoint) -> None:
    bench = bench_of(make_bench, speaking, grammar='start: "12"', top_logprobs=3)
    scored = [entry for delta in bench.deltas for entry in delta.logprobs]
    # Forced, and yet unlikely.
    assert all(entry.logprob < -0.5 and entry.top[0][1] > entry.logprob for entry in scored)


def test_attempts_pass_the_same_sampling(speaking: Checkpoint) -> None:
    """What travels is what is applied: the fields survive the wire."""
    sampling = SamplingParams(max_tokens=3, grammar="start: /a/", logit_bias=((3, 1.5),), min_p=0.5)
    sent = msgspec.msgpack.encode(sampling)
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == sampling
