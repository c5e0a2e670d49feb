"""Rotation against its formula, channel by channel."""

import math

import torch

from epd.model.rope import rotate, rotation


def test_rotate_is_the_formula() -> None:
    positions = torch.tensor([0, 1, 977])
    x = torch.randn(3, 2, 10, generator=torch.Generator().manual_seed(0))
    out = rotate(x, rotation(positions, theta=100.0, rotary_dim=6))
    for t, position in enumerate(positions.tolist()):
        for j in range(3):
            angle = position * 100.0 ** (-2 * j / 6)
            low, high = x[t, :, j], x[t, :, j + 3]
            torch.testing.assert_close(out[t, :, j], low * math.cos(angle) - high * math.sin(angle), atol=1e-4, rtol=0)
            torch.testing.assert_close(
                out[t, :, j + 3], high * math.cos(angle) + low * math.sin(angle), atol=1e-4, rtol=0
            )
    assert torch.equal(out[..., 6:], x[..., 6:])
    assert torch.equal(out[0], x[0])


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(1))
    scores = [
        (rotate(q, rotation(torch.tensor([start + 5]), theta=1e4, rotary_dim=16)) *
         rotate(k, rotation(torch.tensor([start]), theta=1e4, rotary_dim=16))).sum()
        for start in (0, 100)
    ]  # fmt: skip
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)


def test_tables_first_made_in_inference_mode_serve_training() -> None:
    x = torch.randn(3, 2, 8, requires_grad=True)
    with torch.inference_mode():
        rotation(torch.arange(3), theta=77.0, rotary_dim=8)
    rotate(x, rotation(torch.arange(3), theta=77.0, rotary_dim=8)).sum().backward()
    assert x.grad is not None
