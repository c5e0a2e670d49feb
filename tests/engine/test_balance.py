"""How evenly experts are used, from counts of a few forwards."""

import pytest
import torch

from epd.engine.balance import ExpertBalance
from tests.fakes.tiny_text import tiny_config, tiny_model


def looks(balance: ExpertBalance, num_steps: int, *counts: list[int]) -> int:
    """Steps in which every look sees `counts`, one list a layer; how many looks there were."""
    num_looks = 0
    for _ in range(num_steps):
        stats = balance.look()
        if stats is not None:
            num_looks += 1
            for layer, of_layer in enumerate(counts):
                stats.record(layer, torch.tensor(of_layer))
            balance.seen(stats)
    return num_looks


def told(balance: ExpertBalance) -> dict[str, float]:
    return {counter.labels["layers"]: counter.value for counter in balance.told()}


def test_nothing_is_told_before_a_look_and_by_a_model_without_experts() -> None:
    assert told(ExpertBalance(tiny_config())) == {}
    balance = ExpertBalance(tiny_config(moe_layer_freq=[0] * 8))
    assert looks(balance, 40) == 0
    assert told(balance) == {}


def test_the_busiest_expert_over_the_mean_by_layer() -> None:
    balance = ExpertBalance(tiny_config())
    # One look in sixteen steps, the first among them.
    assert looks(balance, 17, [2, 2, 2, 2], [8, 0, 0, 0]) == 2
    assert told(balance) == {"mean": 2.5, "worst": 4.0}


def test_what_was_long_ago_counts_for_little() -> None:
    balance = ExpertBalance(tiny_config())
    looks(balance, 1, [100, 0])
    looks(balance, 16 * 400, [1, 1])
    assert told(balance)["worst"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_the_model_counts_every_token_in_every_layer_with_experts(seed: int) -> None:
    model = tiny_model(seed=seed)
    balance = ExpertBalance(model.config)
    stats = balance.look()
    assert stats is not None
    hidden_TD = torch.randn(24, model.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    for layer in model.layers[1:3]:
        stats.record(layer.layer.index, layer.mlp(hidden_TD)[1])
    balance.seen(stats)
    found = told(balance)
    assert 1.0 <= found["mean"] <= found["worst"] <= model.config.moe.num_experts
    counts = stats.tokens_per_expert()
    assert {int(of_layer.sum()) for of_layer in counts.values()} == {24 * model.config.moe.num_experts_per_token}
