"""Every way to compute routed experts against the loop that defines them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epd.kernels.experts import looped_experts, sorted_experts
from epd.kernels.few_rows import FewRows, can_take, load_few_rows
from epd.model.packed import PackedMatrix, PlainRows, linear

DTYPES = (torch.float32, torch.bfloat16)
# Of the largest result: fp32 sums in another order, and bf16 roundings that fall the other way.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def kernel() -> FewRows:
    loaded = load_few_rows()
    if loaded is None:
        pytest.skip("no C++ compiler")
    return loaded


class Problem:
    """Random experts, and tokens that choose among `chosen` of them only, each expert at most once per token."""

    def __init__(
        self, num_tokens: int, chosen: list[int], per_token: int, *, num_experts: int, dtype: torch.dtype, seed: int
    ) -> None:
        chance = torch.Generator().manual_seed(seed)
        width, inner = int(torch.randint(1, 90, (), generator=chance)), int(torch.randint(1, 70, (), generator=chance))
        self.hidden = torch.randn(num_tokens, width, generator=chance).to(dtype)
        self.gate_up = (torch.randn(num_experts, 2 * inner, width, generator=chance) * width**-0.5).to(dtype)
        self.down = (torch.randn(num_experts, width, inner, generator=chance) * inner**-0.5).to(dtype)
        picks = [torch.randperm(len(chosen), generator=chance)[:per_token] for _ in range(num_tokens)]
        self.choice = torch.tensor(chosen)[torch.stack(picks)]
        self.weight = torch.rand(num_tokens, self.choice.shape[1], generator=chance)

    @property
    def routing(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.choice, self.weight

    def wanted(self) -> Tensor:
        return looped_experts(*self.routing, list(self.gate_up), list(self.down), linear_of_torch)


def linear_of_torch(x: Tensor, weight: object) -> Tensor:
    assert isinstance(weight, Tensor)
    return torch.nn.functional.linear(x, weight)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_experts = draw(st.integers(1, 9))
    chosen = draw(st.lists(st.integers(0, num_experts - 1), min_size=1, unique=True))
    return Problem(
        draw(st.integers(1, 20)),
        chosen,
        draw(st.integers(1, len(chosen))),
        num_experts=num_experts,
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1 << 16)),
    )


def assert_same(actual: Tensor, wanted: Tensor) -> None:
    assert actual.dtype == wanted.dtype
    allowed = TOLERANCE[wanted.dtype] * max(1e-6, float(wanted.abs().max()))
    assert float((actual.float() - wanted.float()).abs().max()) <= allowed


@settings(max_examples=60, deadline=None)
@given(problems())
def test_sorting_equals_the_loop(problem: Problem) -> None:
    assert_same(sorted_experts(*problem.routing, problem.gate_up, problem.down, linear_of_torch), problem.wanted())


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_kernel_equals_the_loop(kernel: FewRows, problem: Problem) -> None:
    assert_same(kernel.experts(*problem.routing, problem.gate_up, problem.down), problem.wanted())


@settings(max_examples=20, deadline=None)
@given(problems())
def test_packed_matrices_equal_plain_ones(problem: Problem) -> None:
    packed = [[PackedMatrix([PlainRows(m)]) for m in stack] for stack in (problem.gate_up, problem.down)]
    assert_same(sorted_experts(*problem.routing, *packed, linear), problem.wanted())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chosen", [[4], [0, 7], list(range(8))], ids=["all to one", "most are empty", "all"])
@pytest.mark.parametrize("num_tokens", [1, 8, 33])
def test_shares_of_the_experts(kernel: FewRows, num_tokens: int, chosen: list[int], dtype: torch.dtype) -> None:
    problem = Problem(num_tokens, chosen, min(2, len(chosen)), num_experts=8, dtype=dtype, seed=1)
    for actual in (
        sorted_experts(*problem.routing, problem.gate_up, problem.down, linear_of_torch),
        kernel.experts(*problem.routing, problem.gate_up, problem.down),
    ):
        assert_same(actual, problem.wanted())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_batch(kernel: FewRows, dtype: torch.dtype) -> None:
    problem = Problem(19, list(range(5)), 3, num_experts=5, dtype=dtype, seed=4)
    together = kernel.experts(*problem.routing, problem.gate_up, problem.down)
    for token in range(19):
        alone = [part[token : token + 1] for part in problem.routing]
        assert torch.equal(kernel.experts(*alone, problem.gate_up, problem.down)[0], together[token])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 200), st.sampled_from(DTYPES), st.integers(0, 99))
def test_a_product_of_few_rows(kernel: FewRows, rows: int, outs: int, ins: int, dtype: torch.dtype, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, ins, generator=chance).to(dtype) for n in (rows, outs))
    actual = kernel.linear(x, weight)
    wanted = x.double() @ weight.double().T
    # Every sum is fp32, rounded once.
    torch.testing.assert_close(
        actual, wanted.to(dtype), atol=2e-5 * ins**0.5, rtol=1e-2 if dtype.itemsize == 2 else 1e-5
    )
    assert torch.equal(kernel.linear(x[-1:], weight)[0], actual[-1])


def test_what_is_not_a_number_stays_so(kernel: FewRows) -> None:
    x, weight = torch.zeros(2, 70, dtype=torch.bfloat16), torch.ones(3, 70, dtype=torch.bfloat16)
    x[0, 69], x[1, 0] = torch.nan, torch.inf
    out = kernel.linear(x, weight)
    assert bool(out[0].isnan().all())
    assert bool((out[1] == torch.inf).all())


def test_a_row_of_another_layout_is_read_right(kernel: FewRows) -> None:
    x, weight = torch.randn(40, 3).T, torch.randn(5, 40)
    torch.testing.assert_close(kernel.linear(x, weight), x @ weight.T)


def test_gradients_other_dtypes_and_other_layouts_are_left_to_torch() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    assert not can_take(x, weight)
    with torch.no_grad():
        assert can_take(x, weight)
        assert not can_take(x, weight.bfloat16())
        assert not can_take(x.half(), weight.half())
        assert not can_take(x, torch.randn(8, 4).T)
        assert not can_take(x.to("meta"), weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not can_take(x, weight)


def test_gradients_pass_through_sorting() -> None:
    results = []
    for compute in (looped_experts, sorted_experts):
        problem = Problem(7, [0, 2, 3], 2, num_experts=4, dtype=torch.float32, seed=6)
        inputs = [part.requires_grad_() for part in (problem.hidden, problem.weight, problem.gate_up, problem.down)]
        compute(
            *problem.routing, problem.gate_up.unbind(), problem.down.unbind(), linear_of_torch
        ).square().sum().backward()
        results.append([part.grad for part in inputs])
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-4)
