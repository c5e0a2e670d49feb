"""Odds after penalties, biases and cuts, against what the words for them mean, token by token."""

import math
import random

import pytest
import torch

from epd.engine.grammar import Answers, AnswerSoFar, Grammars
from epd.engine.sampler import DraftChain, SampleRow, sample, sample_chains, uniform
from epd.types import SamplingParams

NUM_IDS = 12
END = 11


def no_vocabulary() -> None:
    raise ValueError("no vocabulary")


def make_answers(max_states: int = 4) -> Answers:
    return Answers(Grammars(no_vocabulary, (END,)), (END,), max_states=max_states)  # type: ignore[arg-type]


def slow_odds(logits: list[float], sampling: SamplingParams, prompt: list[int], answer: list[int]) -> list[float]:
    odds = list(logits)
    for token_id, value in sampling.logit_bias:
        odds[token_id] += value
    for token_id in range(NUM_IDS):
        if token_id in prompt or token_id in answer:
            factor = sampling.repetition_penalty
            odds[token_id] = odds[token_id] / factor if odds[token_id] > 0 else odds[token_id] * factor
        count = answer.count(token_id)
        odds[token_id] -= count * sampling.frequency_penalty + (count > 0) * sampling.presence_penalty
        if len(answer) < sampling.min_tokens and token_id in (END, *sampling.stop_token_ids):
            odds[token_id] = -math.inf
    return odds


def slow_draw(odds: list[float], sampling: SamplingParams, index: int) -> int:
    order = sorted(range(NUM_IDS), key=lambda token_id: -odds[token_id])
    if sampling.temperature == 0:
        return order[0]
    weights = [math.exp((odds[token_id] - odds[order[0]]) / sampling.temperature) for token_id in order]
    num_kept = sum(weight >= sampling.min_p * weights[0] for weight in weights)
    weights = weights[:num_kept]
    if sampling.top_p < 1:
        reached = 0.0
        for number, weight in enumerate(weights, start=1):
            reached += weight / sum(weights)
            if reached >= sampling.top_p:
                weights = weights[:number]
                break
    target, reached = sum(weights) * uniform(sampling.seed, index), 0.0
    for token_id, weight in zip(order, weights, strict=False):
        reached += weight
        if reached > target:
            return token_id
    return order[len(weights) - 1]


def random_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=100,
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1, 1.0]),
        seed=rng.randrange(100),
        min_tokens=rng.choice([0, 0, 3]),
        stop_token_ids=rng.choice([(), (10,)]),
        logit_bias=rng.choice([(), ((2, 5.0), (3, -100.0)), ((END, 100.0),)]),
        frequency_penalty=rng.choice([0.0, 0.6, -2.0]),
        presence_penalty=rng.choice([0.0, 1.1, -0.4]),
        repetition_penalty=rng.choice([1.0, 1.7, 0.5]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_those_of_the_definitions(seed: int) -> None:
    """Rows of several answers, some of whose states were thrown away, some of whose tokens are others by now."""
    rng, answers = random.Random(seed), make_answers(max_states=2)
    asked = [(random_sampling(rng), [rng.randrange(NUM_IDS) for _ in range(4)]) for _ in range(3)]
    written: list[list[int]] = [[] for _ in asked]
    for _ in range(12):
        if rng.random() < 0.2:
            # A step was undone, and what came instead is another token.
            victim = rng.choice(written)
            victim[len(victim) // 2 :] = [rng.randrange(NUM_IDS)]
        logits = torch.tensor([[rng.gauss(0, 2) for _ in range(NUM_IDS)] for _ in asked])
        emitted = [rng.randint(0, len(tokens)) for tokens in written]
        rows = [
            SampleRow(sampling, len(tokens), AnswerSoFar(str(i), (*prompt, *tokens[:n]), n, tuple(tokens[n:])))
            for i, ((sampling, prompt), tokens, n) in enumerate(zip(asked, written, emitted, strict=True))
        ]
        for i, token in enumerate(sample(logits, rows, answers=answers)):
            sampling, prompt = asked[i]
            odds = slow_odds(logits[i].tolist(), sampling, prompt, written[i])
            assert token is not None
            assert token.token_id == slow_draw(odds, sampling, len(written[i]))
            written[i].append(token.token_id)
    assert len(answers) == min(2, sum(sampling.looks_back for sampling, _ in asked))


@pytest.mark.parametrize("seed", range(20))
def test_drafts_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    sampling = random_sampling(rng)
    logits = torch.randn(4, NUM_IDS, generator=torch.Generator().manual_seed(seed)) * 2
    alone: list[int] = []
    for index in range(4):
        so_far = AnswerSoFar("r", (1, 2), 0, tuple(alone))
        token = sample(logits[index : index + 1], [SampleRow(sampling, index, so_far)], answers=make_answers())[0]
        assert token is not None
        alone.append(token.token_id)
    for num_right in range(4):
        drafts = (*alone[:num_right], *[(token + 1) % NUM_IDS for token in alone[num_right:3]])
        row = SampleRow(sampling, 0, AnswerSoFar("r", (1, 2), 0, ()))
        [tokens] = sample_chains(logits, [DraftChain(row, drafts)], answers=make_answers())
        assert isinstance(tokens, tuple)
        assert [token.token_id for token in tokens] == alone[: num_right + 1]


def test_a_bias_beyond_the_vocabulary_is_nothing() -> None:
    sampling = SamplingParams(max_tokens=1, logit_bias=((NUM_IDS, 100.0), (4, 3.0)))
    [token] = sample(torch.zeros(1, NUM_IDS), [SampleRow(sampling, 0)], answers=make_answers())
    assert token is not None
    assert token.token_id == 4


def test_nothing_but_an_end_may_be_left() -> None:
    """`min_tokens` cannot ask for what a bias or a grammar rules out."""
    sampling = SamplingParams(max_tokens=1, min_tokens=1, logit_bias=tuple((i, -100.0) for i in range(NUM_IDS)))
    logits = torch.zeros(1, 1)
    [token] = sample(
        logits, [SampleRow(sampling, 0)], answers=Answers(Grammars(no_vocabulary, (0,)), (0,), max_states=1)
    )  # type: ignore[arg-type]
    assert token is not None
    assert token.token_id == 0
