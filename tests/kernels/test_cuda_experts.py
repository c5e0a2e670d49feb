"""Experts in shapes that do not depend on the routing give what the loop over experts gives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epd.kernels import cuda_experts
from epd.model.config import MoeConfig
from epd.model.moe import Moe

CONFIG = MoeConfig(
    num_experts=5,
    num_experts_per_token=2,
    intermediate_size=24,
    num_groups=1,
    num_groups_per_token=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    router_dtype="float32",
)
Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def random_moe(dtype: torch.dtype) -> Moe:
    moe = Moe(16, CONFIG, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in (*moe.parameters(), *moe.buffers()):
        tensor.data.normal_(std=0.3, generator=generator)
    # An expert that nobody takes.
    moe.correction_bias[3] = -100.0
    return moe


@pytest.mark.parametrize("compute", [cuda_experts.gathered_experts, cuda_experts.grouped_experts])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("num_tokens", [1, 9])
@torch.inference_mode()
def test_like_the_loop(compute: Compute, dtype: torch.dtype, tolerance: float, num_tokens: int) -> None:
    moe = random_moe(dtype)
    hidden = torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, _ = moe(hidden)
    assert isinstance(moe.gate_up, Tensor)
    assert isinstance(moe.down, Tensor)
    out = compute(hidden, *moe.route(hidden), moe.gate_up, moe.down)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_a_block_that_is_told_to_counts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = random_moe(torch.float32)
    hidden = torch.randn(7, 16)
    expected, counts = moe(hidden)
    monkeypatch.setattr(Moe, "_is_static", lambda self, hidden, num_rows: True)
    out, static_counts = moe(hidden)
    torch.testing.assert_close(out, expected)
    assert static_counts.tolist() == counts.tolist()
    assert static_counts[3] == 0


def test_weights_of_another_dtype_are_converted_after_they_are_gathered() -> None:
    moe = random_moe(torch.bfloat16)
    hidden = torch.randn(3, 16)
    assert isinstance(moe.gate_up, Tensor)
    assert isinstance(moe.down, Tensor)
    with torch.inference_mode():
        out = cuda_experts.gathered_experts(hidden, *moe.route(hidden), moe.gate_up, moe.down)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, moe(hidden)[0])


def test_says_when_neither_way_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = random_moe(torch.float32)
    assert isinstance(moe.gate_up, Tensor)
    assert isinstance(moe.down, Tensor)
    per_row = (2 * 24 * 16 + 16 * 24) * 4
    monkeypatch.setattr(cuda_experts, "_MAX_GATHERED_BYTES", 10 * per_row)
    assert cuda_experts.static_obstacle(moe.gate_up, moe.down, num_rows=10, dtype=torch.float32) is None
    reason = cuda_experts.static_obstacle(moe.gate_up, moe.down, num_rows=11, dtype=torch.float32)
    assert f"11 token-expert pairs would copy {11 * per_row:,} bytes" in str(reason)
