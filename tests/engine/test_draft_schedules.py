"""Random schedules with draft heads: shared prefixes, sampled and stopped answers, evictions that call for healing,
tight pools, aborts, one worker and two. Answers are those of full recomputation, and nothing stays leased."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest

from epd.engine.roster import Counters
from epd.types import Abort, ExpectKv, Finish, FinishReason, SamplingParams
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.engine.test_roles import Pair, make_pair
from tests.fakes.guessing_model import guessing_model
from tests.fakes.tiny_checkpoint import write_checkpoint
from tests.oracles.plain_generate import plain_generate

NUM_LONGEST = 20
STEMS = [[(5 * i * i + stem * 31 + i) % 120 for i in range(64)] for stem in range(2)]


@dataclass(frozen=True)
class Ask:
    """One of few requests, so that prompts share prefixes of every kind and the oracle computes each only once."""

    stem: int
    length: int
    max_tokens: int
    manner: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(STEMS[self.stem][: self.length])

    @property
    def params(self) -> dict[str, object]:
        return [
            {"ignore_eos": True},
            {"ignore_eos": True, "temperature": 0.9, "seed": self.stem},
            {"stop_token_ids": tuple(range(self.stem, 127, 9))},
        ][self.manner]


Script = list[Ask | tuple[str, int]]
Oracle = Callable[[Ask], list[int]]


def random_script(rng: random.Random) -> Script:
    script: Script = []
    for _ in range(rng.randint(5, 14)):
        roll = rng.random()
        if roll < 0.6:
            length = rng.choice([1, 7, 20, 33, 47, 48, 64, 64])
            script.append(Ask(rng.randint(0, 1), length, rng.choice([1, 2, 4, 10, 15, NUM_LONGEST]), rng.randint(0, 2)))
        elif roll < 0.8:
            script.append(("step", rng.choice([1, 2, 4, 20])))
        elif roll < 0.9:
            script.append(("evict", rng.choice([3, 30, 1000])))
        else:
            script.append(("abort", rng.randint(0, 6)))
    return script


# Over all examples, so that a schedule without right or wrong drafts would not go unnoticed.
seen = Counters()


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("guessing")
    return Checkpoint(folder, write_checkpoint(folder, guessing_model()))


@pytest.fixture(scope="module")
def oracle(guessing: Checkpoint) -> Oracle:
    @cache
    def longest(stem: int, length: int, manner: int) -> tuple[int, ...]:
        ask = Ask(stem, length, NUM_LONGEST, manner)
        sampling = SamplingParams(max_tokens=NUM_LONGEST, **ask.params)  # type: ignore[arg-type]
        return tuple(plain_generate(guessing.model, ask.prompt, sampling))

    return lambda ask: list(longest(ask.stem, ask.length, ask.manner)[: ask.max_tokens])


def check(answer: list[int], finish: Finish, truth: list[int]) -> None:
    if finish.reason is FinishReason.CANCELLED:
        assert answer == truth[: len(answer)]
    else:
        assert finish.reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert answer == truth
        assert finish.usage.completion_tokens == len(truth) + (finish.reason is FinishReason.STOP)


def least_bytes(draft_tokens: int, chunk_tokens: int) -> int:
    """The smallest budget for six running sequences of 64 tokens: full pages of two layers, windows of two and the
    heads'. 24 pages of 64 tokens to share, each sequence takes up to 19."""
    return 2560 * (22 + (2 + draft_tokens) * (6 * 7 + chunk_tokens // 4))


def note(bench: Bench) -> None:
    counters = bench.engine.scheduler.counters
    for name in ("drafted_tokens", "accepted_tokens", "accepted_tokens_3", "healed_tokens", "retractions"):
        setattr(seen, name, getattr(seen, name) + getattr(counters, name))


@pytest.mark.parametrize("block", range(10))
def test_one_worker(make_bench: MakeBench, guessing: Checkpoint, oracle: Oracle, block: int) -> None:
    for number in range(12):
        one_worker(make_bench, guessing, oracle, random.Random(100 * block + number))


def one_worker(make_bench: MakeBench, guessing: Checkpoint, oracle: Oracle, rng: random.Random) -> None:
    script, draft_tokens, chunk_tokens = random_script(rng), rng.randint(1, 3), rng.choice([4, 24, 64])
    bench: Bench = make_bench(
        checkpoint=guessing,
        draft_tokens=draft_tokens,
        draft_max_batch_tokens=rng.choice([6, 100]),
        chunk_tokens=chunk_tokens,
        kv_budget_bytes=least_bytes(draft_tokens, chunk_tokens) + rng.choice([0, 60_000, 4 << 20]),
        max_running=6,
        expected_sequence_tokens=64,
        prefix_cache=rng.random() < 0.8,
    )
    asked: list[Ask] = []
    for action in script:
        match action:
            case Ask():
                request = make_request(f"r{len(asked)}", action.prompt, max_tokens=action.max_tokens, **action.params)
                asked.append(action)
                bench.submit(request)
            case ("step", value):
                for _ in range(value):
                    bench.step()
            case ("evict", value):
                # As other requests would; what was found before may now need healing.
                bench.engine.cache.device._ledger.evict_window(value)
            case (_, value):
                bench.mailbox.put(Abort(request_id=f"r{value}"))
    bench.run()
    assert set(bench.finishes) == {f"r{number}" for number in range(len(asked))}
    for number, ask in enumerate(asked):
        check(bench.answers.get(f"r{number}", []), bench.finishes[f"r{number}"], oracle(ask))
    bench.assert_nothing_leased()
    note(bench)


@pytest.mark.parametrize("block", range(5))
def test_two_workers_in_any_order(make_bench: MakeBench, guessing: Checkpoint, oracle: Oracle, block: int) -> None:
    for number in range(12):
        two_workers(make_bench, guessing, oracle, random.Random(5000 + 100 * block + number))


def two_workers(make_bench: MakeBench, guessing: Checkpoint, oracle: Oracle, rng: random.Random) -> None:
    script, draft_tokens = random_script(rng), rng.randint(1, 3)
    kv_budget_bytes = least_bytes(draft_tokens, 64) + rng.choice([0, 4 << 20])
    both: dict[str, object] = {"checkpoint": guessing, "draft_tokens": draft_tokens}
    pair: Pair = make_pair(
        make_bench, both=both, kv_budget_bytes=kv_budget_bytes, max_running=6, expected_sequence_tokens=64
    )
    asked: list[Ask] = []
    late: list[ExpectKv] = []
    turns = iter(rng.choices(["prefill", "decode", "expect"], k=30))
    for action in script:
        match action:
            case Ask():
                request = make_request(f"r{len(asked)}", action.prompt, max_tokens=action.max_tokens, **action.params)
                asked.append(action)
                pair.submit(request, expect=False)
                late.append(ExpectKv(request=request))
            case ("step", value):
                for turn in (next(turns, "prefill") for _ in range(value)):
                    if turn == "expect" and late:
                        pair.decode.mailbox.put(late.pop(0))
                    (pair.decode if turn == "decode" else pair.prefill).step()
            case ("evict", value):
                for bench in (pair.prefill, pair.decode):
                    bench.engine.cache.device._ledger.evict_window(value)
            case (_, value) if value < len(asked):
                # A gateway announces before it aborts, and tells both.
                for expect in [e for e in late if e.request.request_id == f"r{value}"]:
                    late.remove(expect)
                    pair.decode.mailbox.put(expect)
                pair.prefill.mailbox.put(Abort(request_id=f"r{value}"))
                pair.decode.mailbox.put(Abort(request_id=f"r{value}"))
    for expect in late:
        pair.decode.mailbox.put(expect)
    pair.run()
    for number, ask in enumerate(asked):
        check(pair.answer(f"r{number}"), pair.finish(f"r{number}"), oracle(ask))
    pair.assert_nothing_leased()
    note(pair.decode)


def test_everything_was_seen() -> None:
    """After the tests above: there were right and wrong drafts, healing and sequences put back."""
    if seen.drafted_tokens == 0:
        pytest.skip("the schedules did not run in this process")
    assert 0.2 * seen.drafted_tokens < seen.accepted_tokens < 0.9 * seen.drafted_tokens
    assert seen.accepted_tokens_3 > 20
    assert seen.healed_tokens > 0
    assert seen.retractions > 0


def test_print():
    print(seen)
