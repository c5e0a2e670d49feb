"""Norms, rotation and routing of few rows by the compiled kernel, against torch; products are in `test_experts`."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epd.kernels.few_rows import MAX_ROWS, FewRows, few_rows_kernel, load_few_rows
from epd.model.attention import RMSNorm
from epd.model.rope import rotate, rotation

DTYPES = (torch.float32, torch.bfloat16)
# fp32 sums in another order; in bf16 a rounding that falls the other way, one unit of the last place.
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-5, "rtol": 2.0**-7}}
# A product of two roundings.
TWICE = {torch.float32: CLOSE[torch.float32], torch.bfloat16: {"atol": 1e-5, "rtol": 2.0**-6}}


@pytest.fixture(scope="module")
def kernel() -> FewRows:
    loaded = load_few_rows()
    if loaded is None:
        pytest.skip("no C++ compiler")
    return loaded


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(1, 200), st.sampled_from(DTYPES), st.integers(0, 99))
def test_norm_equals_torch(kernel: FewRows, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    chance = drawn(seed)
    x = (torch.randn(rows, width, generator=chance) * 10.0 ** (seed % 5 - 2)).to(dtype)
    weight = torch.randn(width, generator=chance).to(dtype)
    actual = kernel.norm(x, weight, 1e-5)
    wanted = F.rms_norm(x.float(), (width,), eps=1e-5).to(dtype) * weight
    torch.testing.assert_close(actual, wanted, **TWICE[dtype])
    assert torch.equal(kernel.norm(x[-1:], weight, 1e-5)[0], actual[-1])


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 9),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 20), st.integers(0, 5), st.integers(1, 20)),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_turn_equals_torch(
    kernel: FewRows,
    rows: int,
    shares: tuple[int, int],
    widths: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    (groups, num_kv_heads), (half, rest, v_dim) = shares, widths
    num_heads, qk_dim = groups * num_kv_heads, 2 * half + rest
    sizes = [num_heads * qk_dim, num_kv_heads * qk_dim, num_kv_heads * v_dim]
    qkv = torch.randn(rows, sum(sizes), generator=drawn(seed)).to(dtype)
    table = rotation(torch.randint(0, 5000, (rows,), generator=drawn(seed)), theta=1e4, rotary_dim=2 * half)
    actual = kernel.turn(qkv, table, (num_heads, num_kv_heads), (qk_dim, v_dim), 0.7)
    q, k, v = torch.split(qkv, sizes, dim=-1)
    wanted = (
        rotate(q.unflatten(-1, (num_heads, qk_dim)), table),
        rotate(k.unflatten(-1, (num_kv_heads, qk_dim)), table),
        v.unflatten(-1, (num_kv_heads, v_dim)) * 0.7,
    )
    for got, want in zip(actual, wanted, strict=True):
        torch.testing.assert_close(got, want, **CLOSE[dtype])
    last = kernel.turn(qkv[-1:], (table[0][-1:], table[1][-1:]), (num_heads, num_kv_heads), (qk_dim, v_dim), 0.7)
    assert all(torch.equal(alone[0], together[-1]) for alone, together in zip(last, actual, strict=True))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 80),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_routing_equals_torch(
    kernel: FewRows,
    tokens: int,
    num_experts: int,
    width: int,
    dtype: torch.dtype,
    is_rounded: bool,
    is_normed: bool,
    seed: int,
) -> None:
    chance = drawn(seed)
    x = torch.randn(tokens, width, generator=chance).to(dtype)
    router = torch.randn(num_experts, width, generator=chance)
    bias = torch.randn(num_experts, generator=chance)
    num_choices = 1 + seed % num_experts
    choice, weight = kernel.route(x, router, bias, num_choices, is_rounded=is_rounded, is_normed=is_normed, scale=1.5)
    score = scores(x, router, is_rounded=is_rounded)
    # By rank, not by index: scores that are all but equal may change places.
    rank = score + bias
    torch.testing.assert_close(rank.gather(1, choice), rank.topk(num_choices).values, atol=1e-5, rtol=1e-5)
    assert all(len(set(row)) == num_choices for row in choice.tolist())
    wanted = score.gather(1, choice)
    if is_normed:
        wanted = wanted / (wanted.sum(dim=-1, keepdim=True) + 1e-20)
    torch.testing.assert_close(weight, wanted * 1.5, atol=1e-5, rtol=1e-4)
    alone = kernel.route(x[-1:], router, bias, num_choices, is_rounded=is_rounded, is_normed=is_normed, scale=1.5)
    assert torch.equal(alone[0][0], choice[-1])
    assert torch.equal(alone[1][0], weight[-1])


def scores(x: Tensor, router: Tensor, *, is_rounded: bool) -> Tensor:
    operands = (x.bfloat16(), router.bfloat16()) if is_rounded else (x, router)
    return F.linear(*(part.float() for part in operands)).sigmoid()


def test_what_is_not_a_number_still_goes_to_experts_that_exist(kernel: FewRows) -> None:
    x = torch.full((2, 8), torch.nan)
    choice, _ = kernel.route(x, torch.ones(6, 8), torch.zeros(6), 3, is_rounded=False, is_normed=True, scale=1.0)
    assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in choice.tolist())


@torch.no_grad()
def test_a_module_leaves_few_rows_to_the_kernel_and_many_to_torch(kernel: FewRows) -> None:
    norm = RMSNorm(24, 1e-5, dtype=torch.float32, device="cpu")
    norm.weight.normal_(generator=drawn(1))
    x = torch.randn(MAX_ROWS + 1, 24, generator=drawn(2))
    assert few_rows_kernel(x, norm.weight) is None
    assert few_rows_kernel(x[:-1], norm.weight) is not None
    torch.testing.assert_close(norm(x[:-1]), norm(x)[:-1], atol=1e-5, rtol=1e-5)
