"""Routing rules and the sorted expert pass against a token-by-token computation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epd.model.moe import Moe, RouterStats
from tests.fakes.tiny_text import tiny_config, tiny_model


def moe_of(**changes: object) -> Moe:
    moe = tiny_model(**changes).layers[1].mlp
    assert isinstance(moe, Moe)
    return moe


def random_hidden(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, 192, generator=torch.Generator().manual_seed(3))


def token_by_token(moe: Moe, hidden: Tensor) -> Tensor:
    out = torch.zeros_like(hidden)
    for t, x in enumerate(hidden):
        scores = (moe.router @ x).sigmoid()
        chosen = (scores + moe.correction_bias).argsort(descending=True)[:2]
        for e in chosen:
            gate, up = (moe.gate_up[e] @ x).chunk(2)
            out[t] += scores[e] / scores[chosen].sum() * (moe.down[e] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_output_and_gradients_equal_token_by_token(num_tokens: int) -> None:
    moe = moe_of()
    results = []
    for forward in (lambda x: token_by_token(moe, x), lambda x: moe(x)[0]):
        moe.zero_grad()
        hidden = random_hidden(num_tokens).requires_grad_()
        out = forward(hidden)
        out.square().sum().backward()
        results.append([out, hidden.grad, *(p.grad for p in moe.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_one_token_without_gradients_equals_token_by_token() -> None:
    moe = moe_of()
    hidden = random_hidden(1)
    out, counts = moe(hidden)
    torch.testing.assert_close(out, token_by_token(moe, hidden), atol=1e-5, rtol=1e-4)
    assert counts.sum() == 2


def test_correction_bias_chooses_and_does_not_weigh() -> None:
    moe = moe_of()
    hidden = random_hidden(20)
    scores = (hidden @ moe.router.T).sigmoid()
    with torch.no_grad():
        moe.correction_bias.zero_()
        moe.correction_bias[5] = 10.0
    choice, weight = moe.route(hidden)
    assert bool((choice == 5).any(dim=1).all())
    expected = scores.gather(1, choice)
    torch.testing.assert_close(weight, expected / expected.sum(dim=1, keepdim=True))


def test_weights_are_scaled_and_left_unnormalised_when_the_config_says_so() -> None:
    hidden = random_hidden(4)
    moe = moe_of(norm_topk_prob=False, routed_scaling_factor=2.5)
    choice, weight = moe.route(hidden)
    torch.testing.assert_close(weight, 2.5 * (hidden @ moe.router.T).sigmoid().gather(1, choice))


def test_group_limit_keeps_the_best_groups() -> None:
    moe = moe_of(n_group=4, topk_group=1)
    hidden = random_hidden(30)
    choice, _ = moe.route(hidden)
    score = (hidden @ moe.router.T).sigmoid() + moe.correction_bias
    best_group = score.view(30, 4, 2).sum(-1).argmax(-1)
    assert torch.equal(choice // 2, best_group[:, None].expand(-1, 2))


def test_router_stays_fp32_in_bf16_models_and_under_autocast() -> None:
    config = tiny_config()
    moe = Moe(192, config.moe, dtype=torch.bfloat16, device="cpu")
    assert (moe.router.dtype, moe.correction_bias.dtype, moe.down.dtype) == (
        torch.float32, torch.float32, torch.bfloat16,
    )  # fmt: skip
    reference = moe_of()
    hidden = random_hidden(50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, weight = reference.route(hidden)
    assert torch.equal(weight, reference.route(hidden)[1])


def test_router_dtype_rounds_the_operands() -> None:
    moe, rounded = moe_of(), moe_of(moe_router_dtype="bfloat16")
    hidden = random_hidden(50)
    expected = (hidden.bfloat16().float() @ rounded.router.bfloat16().float().T).sigmoid()
    choice, weight = rounded.route(hidden)
    chosen = expected.gather(1, choice)
    torch.testing.assert_close(weight, chosen / chosen.sum(dim=1, keepdim=True))
    assert not torch.equal(weight, moe.route(hidden)[1])


def test_stats_count_every_assignment() -> None:
    moe, stats = moe_of(), RouterStats()
    for _ in range(2):
        stats.record(1, moe(random_hidden(40))[1])
    counts = stats.tokens_per_expert()[1]
    assert int(counts.sum()) == 2 * 40 * 2
    assert stats.imbalance()[1] == pytest.approx(float(counts.max()) / 20)
