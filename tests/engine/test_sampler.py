"""The sampler against plain probability arithmetic."""

import math

import pytest
import torch

from epd.engine.sampler import SampledToken, SampleRow, sample, uniform
from epd.types import SamplingParams


def row(index: int = 0, **params: object) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=8, **params), index)  # type: ignore[arg-type]


def draws(logits: torch.Tensor, num_draws: int, **params: object) -> list[int]:
    sampled = [sample(logits[None], [row(index, **params)])[0] for index in range(num_draws)]
    return [token.token_id for token in sampled if token is not None]


def test_greedy_takes_the_largest_whatever_the_batch() -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0))
    together = sample(logits, [row(seed=i) for i in range(16)])
    assert together == [SampledToken(int(logits[i].argmax())) for i in range(16)]


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = torch.bincount(torch.tensor(draws(probabilities.log(), 4000, temperature=1.0, seed=3)), minlength=4)
    assert torch.allclose(counts / 4000, probabilities, atol=0.03)


def test_temperature_sharpens() -> None:
    probabilities = torch.tensor([0.6, 0.4])
    share = draws(probabilities.log(), 2000, temperature=0.25, seed=1).count(0) / 2000
    assert share == pytest.approx(0.6**4 / (0.6**4 + 0.4**4), abs=0.03)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 0.000001}, {0}),
        ({"top_k": 3, "top_p": 0.99}, {0, 1, 2}),
        ({"top_k": 1}, {0}),
        ({"top_k": 99}, {0, 1, 2, 3}),
    ],
)
def test_cuts_leave_exactly_the_allowed_tokens(params: dict[str, object], allowed: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(logits, 300, temperature=1.0, **params)) == allowed


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    alone = sample(logits[1:2], [row(5, temperature=1.0, seed=9)])[0]
    batched = sample(logits, [row(1, temperature=1.0), row(5, temperature=1.0, seed=9), row(2)])[1]
    assert alone == batched
    assert len({draws(logits[0], 1, temperature=5.0, seed=seed)[0] for seed in range(40)}) > 10
    assert all(0 <= uniform(-seed, index) < 1 for seed in range(5) for index in range(5))


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    token = sample(logits, [row(temperature=0.5, top_logprobs=2, seed=4)])[0]
    assert token is not None
    assert token.logprob is not None
    total = math.log(sum(math.exp(x) for x in (2.0, 1.0, 0.0)))
    assert token.logprob.logprob == pytest.approx(float(logits[0, token.token_id]) - total, abs=1e-5)
    assert [token_id for token_id, _ in token.logprob.top] == [0, 1]
    only_chosen = sample(logits, [row(top_logprobs=0)])[0]
    assert only_chosen is not None
    assert only_chosen.logprob is not None
    assert only_chosen.logprob.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = torch.zeros(2, 4)
    logits[0, 2] = bad
    first, second = sample(logits, [row(), row()])
    assert first is None
    assert second is not None


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 2.0}])
def test_rows_beyond_the_tokenizer_are_no_tokens(params: dict[str, object]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    padded = torch.cat([logits, torch.full((4,), 9.0)])
    for index in range(200):
        there = row(index, top_logprobs=8, **params)
        assert sample(padded[None], [there], num_token_ids=4) == sample(logits[None], [there])
        assert sample(padded[None], [there], num_token_ids=8) == sample(padded[None], [there])


def test_what_a_padding_row_holds_harms_nobody() -> None:
    logits = torch.tensor([[1.0, 0.0, math.nan]])
    assert sample(logits, [row()], num_token_ids=2) == [SampledToken(0)]
