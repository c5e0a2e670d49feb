"""Everything that needs a CUDA device, in one run of a few minutes: the tests marked `gpu`, then timings. Prints JSON.

    scripts/gpu_check --out gpu.json

Run by scripts/gpu_check; with `--device cpu` only the timings are run, with a small model, to try the script itself.
Timings are of a random bf16 checkpoint with MiMo-V2's head widths: a 4,096-token prompt, then decode at batch 1, 8, 32.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from epd.config import EngineConfig
from epd.engine.trial import EngineTrial
from epd.model.random_checkpoint import write_random_checkpoint
from epd.types import Role
from tests.fakes.tiny_text import CONFIG

# All together, and the tests among it: what is late is left out.
BUDGET_S, TESTS_S = 280.0, 160
BACKENDS = ("auto", "flashinfer", "flex", "sdpa", "reference")
# Twelve layers of the published head widths: what attention and launches cost shows, and it is written in seconds.
LARGE: dict[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],
    "num_attention_heads": 16,
    "swa_num_attention_heads": 16,
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 4,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "moe_intermediate_size": 512,
    "n_routed_experts": 16,
    "moe_layer_freq": [0] + [1] * 11,
    "max_position_embeddings": 16_384,
    "eos_token_id": 31_999,
    "pad_token_id": 31_998,
    "attention_projection_layout": "split",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    prompt_tokens: int
    batches: tuple[int, ...]
    decode_steps: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one backend; `refused` says why it could not be had, everything else is then empty.

    `first_s`: the first prompt, with all that is compiled then.
    """

    attention: str
    cuda_graphs: bool
    name: str = ""
    refused: str = ""
    first_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: dict[int, float] | None = None
    num_graphs: int = 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--no-tests", action="store_true", help="timings only")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here; nothing was run", file=sys.stderr)
        return 2
    start_s = time.monotonic()
    report: dict[str, object] = {"torch": torch.__version__, "device": _device_name(options.device)}
    failed = False
    if options.device == "cuda" and not options.no_tests:
        outcomes = _run_tests()
        report["tests"] = outcomes
        failed = bool(outcomes["failed"])
    report["timings"] = [asdict(timing) for timing in _timings(options.device, start_s + BUDGET_S)]
    report["wall_s"] = round(time.monotonic() - start_s, 1)
    text = json.dumps(report, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)
    return int(failed)


class _Outcomes:
    """A plugin that keeps what became of each test."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)[-600:]
        elif report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr)[-200:]
        elif report.when == "call":
            self.passed += 1


def _run_tests() -> dict[str, object]:
    outcomes = _Outcomes()
    folder = Path(__file__).parent
    # What is printed on the way goes beside the JSON, not into it.
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        pytest.main(
            ["-q", "-m", "gpu", "--timeout", "100", "--session-timeout", str(TESTS_S), str(folder)], plugins=[outcomes]
        )
    finally:
        sys.stdout = stdout
    return {"passed": outcomes.passed, "failed": outcomes.failed, "skipped": outcomes.skipped}


def _timings(device: str, stop_s: float) -> list[Timing]:
    is_cuda = device == "cuda"
    config = CONFIG | (LARGE if is_cuda else {"attention_projection_layout": "split"})
    sizes = Sizes(4096, (1, 8, 32), 64) if is_cuda else Sizes(40, (1, 2), 4)
    backends = BACKENDS if is_cuda else ("sdpa",)
    timings = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), config, seed=1)
        for attention in backends:
            for cuda_graphs in (True, False) if is_cuda and attention != "reference" else (False,):
                if time.monotonic() < stop_s:
                    timings.append(_timing(Path(folder), device, attention, cuda_graphs, sizes))
    return timings


def _timing(folder: Path, device: str, attention: str, cuda_graphs: bool, sizes: Sizes) -> Timing:
    config = EngineConfig(
        model_dir=folder,
        model_name="random",
        role=Role.BOTH,
        device=device,
        dtype="bfloat16",
        attention=attention,
        cuda_graphs=cuda_graphs,
        kv_budget_bytes=(2 << 30) if device == "cuda" else (64 << 20),
        expected_sequence_tokens=sizes.prompt_tokens,
        chunk_tokens=2048,
        max_running=max(sizes.batches),
        prefix_cache=False,
        draft_tokens=0,
    )
    try:
        trial = EngineTrial(config)
    except ValueError as error:
        return Timing(attention, cuda_graphs, refused=str(error))
    first_s = _prefill(trial, sizes.prompt_tokens, seed=0)
    prefill_s = _prefill(trial, sizes.prompt_tokens, seed=1)
    decode = {batch: round(_decode(trial, batch, sizes.decode_steps), 1) for batch in sizes.batches}
    runner = trial._engine.loop._runner
    return Timing(
        attention,
        cuda_graphs,
        name=runner._attention.name,
        first_s=round(first_s, 3),
        prefill_tokens_per_s=round(sizes.prompt_tokens / prefill_s, 1),
        decode_tokens_per_s=decode,
        num_graphs=0 if runner._graphs is None else runner._graphs.num_recorded,
    )


def _prefill(trial: EngineTrial, num_tokens: int, *, seed: int) -> float:
    """Seconds to the first token of one prompt."""
    start_s = time.perf_counter()
    trial.submit([(i * i + 17 * seed) % 900 for i in range(num_tokens)], max_tokens=1)
    trial.finish()
    return time.perf_counter() - start_s


def _decode(trial: EngineTrial, batch: int, num_steps: int) -> float:
    """Tokens per second of `batch` sequences, recording and compiling left out."""
    for j in range(batch):
        trial.submit([(i * i + j) % 900 for i in range(32)], max_tokens=2 * num_steps)
    num_given = 0
    while num_given < batch * num_steps // 2:
        num_given += trial.step()
    start_s, num_timed = time.perf_counter(), 0
    for _ in range(num_steps):
        num_timed += trial.step()
    speed = num_timed / (time.perf_counter() - start_s)
    trial.finish()
    return speed


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
