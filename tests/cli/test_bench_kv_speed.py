"""The speed cases on the small model: both sides compute the same function, and every case runs to its figures."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cli.bench_case import BenchFailed, Setting, run_case
from cli.bench_kv_speed import SPEED_PACKAGES, speed_cases
from cli.bench_kv_speed_model import QUICK_MODEL, SPEED_MODEL
from cli.bench_kv_speed_plain import EXPERTS, TransformersModel, fastest_experts
from epd import EngineTrial
from epd.config import EngineConfig
from epd.types import Role

pytest.importorskip("transformers")


class SilentBars:
    def begin(self, what: str, total: int) -> None: ...

    def advance(self, amount: int = 1) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def folder(cache_dir: Path) -> Path:
    return QUICK_MODEL.folder(cache_dir, SilentBars())


def trial_of(folder: Path, dtype: str) -> EngineTrial:
    config = EngineConfig(
        model_dir=folder, model_name="random", role=Role.BOTH, dtype=dtype, kv_budget_bytes=16 << 20, max_running=4
    )
    return EngineTrial(config)


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, QUICK_MODEL.vocab_size - 2, (length,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("experts", EXPERTS)
def test_logits_equal_transformers_beyond_the_window(folder: Path, experts: str) -> None:
    theirs = TransformersModel(folder, dtype="float32")
    theirs.use_experts(experts)
    prompt = prompt_of(3 * QUICK_MODEL.window)
    wanted = theirs.logits(prompt)
    assert 0.5 < float(wanted.std()) < 2
    torch.testing.assert_close(trial_of(folder, "float32").logits(prompt), wanted, atol=1e-4, rtol=0)


def test_logits_in_bf16_are_as_close_as_rounding_allows(folder: Path) -> None:
    prompt = prompt_of(40)
    exact = TransformersModel(folder, dtype="float32").logits(prompt)
    theirs, ours = TransformersModel(folder).logits(prompt), trial_of(folder, "bfloat16").logits(prompt)
    apart = [float((logits - exact).square().mean().sqrt()) for logits in (theirs, ours)]
    assert apart[1] < 1.5 * apart[0]


def test_the_engine_answers_as_transformers_generates(folder: Path) -> None:
    trial, theirs = trial_of(folder, "float32"), TransformersModel(folder, dtype="float32")
    prompts = [prompt_of(length=60)[start:][:40] for start in (0, 20)]
    ids = [trial.submit(prompt, max_tokens=8) for prompt in prompts]
    while len(trial.usage) < 2:
        trial.step()
    first = theirs.prefill(prompts)
    again = first.again()
    # The first tokens are what the batch holds to go on from.
    generated = [first.tokens, *(first.step() for _ in range(7))]
    assert [list(answer) for answer in zip(*generated, strict=True)] == [trial.answers[name] for name in ids]
    assert again.step() == generated[1]
    assert trial.usage[ids[0]].completion_tokens == 8


def test_the_checkpoint_is_written_once_and_whole(cache_dir: Path, folder: Path) -> None:
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert QUICK_MODEL.folder(cache_dir, SilentBars()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in cache_dir.iterdir()] == [folder.name]


def test_sizes_are_what_the_files_hold(folder: Path) -> None:
    model = TransformersModel(folder)
    assert QUICK_MODEL.num_parameters() == pytest.approx(model.num_parameters, rel=0.01)
    assert 280e6 < SPEED_MODEL.num_parameters() < 320e6
    # A batch chooses some of the experts twice, and never more than there are.
    assert SPEED_MODEL.step_weights(1) < SPEED_MODEL.step_weights(8) < 8 * SPEED_MODEL.step_weights(1)
    assert SPEED_MODEL.step_weights(1000) < SPEED_MODEL.num_parameters()
    assert SPEED_MODEL.attention_products(1) == SPEED_MODEL.num_layers * 12 * 320


def test_the_fastest_experts_are_in_use_afterwards(folder: Path) -> None:
    model = TransformersModel(folder)
    waits = {"eager": 30, "grouped_mm": 0, "batched_mm": 30}
    torch_sleep = torch.randn(400, 400)

    def work() -> None:
        for _ in range(waits[model.experts]):
            torch_sleep @ torch_sleep

    assert fastest_experts(model, EXPERTS, work, tries=2) == "grouped_mm"
    assert model.experts == "grouped_mm"


@pytest.mark.parametrize("case", speed_cases(), ids=lambda case: case.name)
def test_every_case_runs(case: object, cache_dir: Path) -> None:
    setting = Setting(cache_dir=cache_dir, num_threads=1, quick=True)
    result = run_case(case, setting, runs=2, bars=SilentBars())  # type: ignore[arg-type]
    assert len(result.samples["ours"]) == len(result.samples["baseline"]) == len(result.samples["limit"]) == 2
    assert result.ratio is not None
    assert result.ratio > 0
    assert result.findings.figures["experts"] in EXPERTS
    assert result.findings.figures["tokens_per_s"] > 0


def test_models_that_differ_are_not_compared(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = TransformersModel.logits
    monkeypatch.setattr(TransformersModel, "logits", lambda self, ids: logits(self, ids).flip(0))
    with pytest.raises(BenchFailed, match="apart"):
        run_case(speed_cases()[0], Setting(cache_dir=cache_dir, num_threads=1, quick=True), runs=1, bars=SilentBars())


def test_packages_name_the_other_side() -> None:
    assert "transformers" in SPEED_PACKAGES
