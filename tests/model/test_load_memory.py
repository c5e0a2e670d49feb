"""Loading takes the memory of the model and little more, measured on two gigabytes by a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from epd.model.inventory import take_inventory
from tests.fakes.quantized_files import QUANT
from tests.fakes.tiny_text import CONFIG

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.e2e
# Few layers of many megabytes: 1.0e9 parameters, 2 GB in bf16.
LARGE: dict[str, object] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 5,
    "hybrid_layer_pattern": [0, 1, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1, 1],
    "num_attention_heads": 32,
    "swa_num_attention_heads": 32,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 32,
    "torch_dtype": "bfloat16",
}
# 1.0 in fp32, (0, 1) in bf16, (0, 0, -0, 1.875) in e4m3: finite whatever it is read as.
PATTERN = bytes((0x00, 0x00, 0x80, 0x3F)) * (4 << 20)
# What was there before is not counted, nor is the code of libraries, half a gigabyte that the system maps when it is
# touched and takes away again as it likes.
PROGRAM = """
import json, resource, sys
from pathlib import Path
import torch
from epd.model.weights import load_text_model

def memory_bytes(kind):
    return int(Path("/proc/self/status").read_text().split(kind + ":")[1].split()[0]) << 10

before_bytes = memory_bytes("RssAnon")
weights = None if sys.argv[2] == "None" else sys.argv[2]
model = load_text_model(Path(sys.argv[1]), dtype=torch.bfloat16, weights=weights)
peak_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - memory_bytes("RssFile")
tensors = model.state_dict()
total_bytes = sum(tensor.nbytes for tensor in tensors.values())
last = tensors["lm_head"][-1, -4:].tolist()
print(json.dumps({"grown": peak_bytes - before_bytes, "total": total_bytes, "last": last}))
"""


def write_checkpoint(folder: Path, quantization: dict[str, object] | None) -> int:
    """Every tensor of the inventory, streamed; returns the size of the weights."""
    config_hf = CONFIG | LARGE | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config_hf))
    header, end = {}, 0
    for spec in take_inventory(config_hf, num_mtp_layers=0).main:
        start, end = end, end + spec.size_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, end, len(PATTERN)):
            file.write(PATTERN[: end - start])
    return end


@pytest.fixture(params=["bf16", "fp8"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    try:
        size_bytes = write_checkpoint(tmp_path, QUANT if request.param == "fp8" else None)
        assert size_bytes > (1.9e9 if request.param == "bf16" else 1.0e9)
        yield request.param, tmp_path
    finally:
        # Directories of past runs are kept otherwise.
        rmtree(tmp_path)


def measure(folder: Path, weights: str | None) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(weights)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


@pytest.mark.timeout(900)
def test_loading_takes_little_more_than_the_model(checkpoint: tuple[str, Path]) -> None:
    stored, folder = checkpoint
    for weights in (None,) if stored == "bf16" else (None, "keep"):
        measured = measure(folder, weights)
        assert measured["last"] == [0.0, 1.0, 0.0, 1.0]
        assert (1.9e9 if weights is None else 1.0e9) < measured["total"] < (2.1e9 if weights is None else 1.3e9)
        assert 0.9 * measured["total"] <= measured["grown"] <= 1.1 * measured["total"], measured
