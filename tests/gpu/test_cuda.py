"""On a CUDA device: the oracle suite of the backends, graphs against the ordinary way, CPU against CUDA."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epd.config import EngineConfig
from epd.engine.trial import EngineTrial
from epd.kernels.backends import BACKENDS, make_backend
from epd.kernels.cuda_experts import gathered_experts, grouped_experts
from epd.types import Role
from tests.kernels.test_backends import BATCHES, Batch, Case

# Torch and Triton warn of what a device could do better; what is asked here is whether the numbers are right.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

NANO = Path(__file__).parents[2] / "epd" / "builtin" / "mimo-nano"
# Largest difference from the fp32 truth. In fp32 sums of another order; flex_attention may multiply in TF32.
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 5e-2}
ON_CUDA = [name for name in BACKENDS if name not in ("cpu", "cpu-torch")]


class CudaBatch(Batch):
    """A case of the oracle suite whose pages and tables lie on the device."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__(case, dtype)
        self._pages = [(keys.cuda(), values.cuda()) for keys, values in self._pages]
        self.sequences = [
            dataclasses.replace(s, full_pages=s.full_pages.cuda(), window_pages=s.window_pages.cuda())
            for s in self.sequences
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_oracle_suite(name: str, batch: str, dtype: torch.dtype) -> None:
    case = Case(BATCHES[batch], num_heads=8, num_kv_heads={0: 1, 1: 2}, qk_dim=192, v_dim=128)
    on_cuda = CudaBatch(case, dtype)
    try:
        backend = make_backend(name, on_cuda, page_size=case.page_size, device_type="cuda")
    except ValueError as error:
        pytest.skip(str(error))
    attention = backend.context(on_cuda.sequences)
    for index, spec in enumerate(on_cuda.specs):
        sink = None if on_cuda.sink is None else on_cuda.sink.to("cuda", dtype)
        out = attention.attend(spec, *(x.cuda() for x in on_cuda.new_tokens(index)), sink)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.float().cpu(), on_cuda.truth(index), atol=tolerance, rtol=tolerance)
        for pool, expected in zip(
            (on_cuda.keys(index), on_cuda.values(index)), on_cuda.expected_pages[index], strict=True
        ):
            # What nobody wrote may have been made finite.
            written = ~expected.isnan()
            assert torch.equal(pool.cpu()[written], expected[written])


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
@torch.inference_mode()
def test_experts(num_tokens: int) -> None:
    """Both ways on the device against the gathering one in fp32 on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    hidden, gate_up, down = random(num_tokens, 64), random(8, 256, 64), random(8, 64, 128)
    choice = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(num_tokens)])
    weight = torch.rand(num_tokens, 2, generator=generator)
    rounded = [x.bfloat16() for x in (hidden, gate_up, down)]
    truth = gathered_experts(rounded[0].float(), choice, weight, rounded[1].float(), rounded[2].float())
    on_device = [x.cuda() for x in rounded]
    for compute in (gathered_experts, grouped_experts):
        out = compute(on_device[0], choice.cuda(), weight.cuda(), on_device[1], on_device[2])
        torch.testing.assert_close(out.float().cpu(), truth, atol=3e-2, rtol=3e-2)


def answers(**changes: object) -> tuple[list[list[int]], int]:
    """Greedy answers of mimo-nano to prompts that come one step after the other, and how many graphs were recorded."""
    config = EngineConfig(
        model_dir=NANO, model_name="nano", role=Role.BOTH, kv_budget_bytes=64 << 20, draft_tokens=0, max_running=8
    )
    trial = EngineTrial(replace(config, **changes))  # type: ignore[arg-type]
    for j in range(5):
        trial.submit([(7 * i * i + 31 * j) % 1500 for i in range(5 + 60 * j)], max_tokens=24 + 8 * j)
        trial.step()
    while len(trial.usage) < 5:
        trial.step()
    graphs = trial._engine.loop._runner._graphs
    return list(trial.answers.values()), 0 if graphs is None else graphs.num_recorded


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_graphs_answer_like_the_ordinary_way(attention: str) -> None:
    with_graphs, num_recorded = answers(device="cuda", attention=attention)
    assert num_recorded > 1
    assert answers(device="cuda", attention=attention, cuda_graphs=False) == (with_graphs, 0)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "reference"])
def test_cuda_answers_like_the_cpu(attention: str) -> None:
    assert answers(device="cuda", attention=attention)[0] == answers(device="cpu")[0]
