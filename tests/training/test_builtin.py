"""The shipped checkpoint answers the shipped samples; `training.evaluate` gives scores on hundreds of samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from preprocess.types import Modality
from training.evaluate import BUILTIN, Served, as_messages
from training.files import conversation
from training.tasks import TASKS
from training.tasks.types import HELD_OUT_SEED

SAMPLES = Path("samples")
MODALITY = {".png": Modality.IMAGE, ".mp4": Modality.VIDEO, ".wav": Modality.AUDIO}
ROWS = re.findall(r"^\| `(\S+)` \| (.+?) \| (.+?) \|$", (SAMPLES / "README.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


@pytest.mark.parametrize(("name", "question", "answer"), ROWS)
def test_samples_are_answered(served: Served, name: str, question: str, answer: str) -> None:
    path = SAMPLES / name
    if path.suffix == ".txt":
        messages = [{"role": "user", "content": path.read_text().rstrip("\n")}]
        assert served.answer(messages, []) == answer
        return
    modality = MODALITY[path.suffix]
    parts = [{"type": str(modality)}, {"type": "text", "text": question}]
    for order in (parts, parts[::-1]):
        assert served.answer([{"role": "user", "content": order}], [(modality, path.read_bytes())]) == answer


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_few_held_out_samples(served: Served, task: str) -> None:
    right = sum(
        served.judge(served.prompt(*as_messages(conversation(task, HELD_OUT_SEED, index))), [[0, 0]] * 3)
        for index in range(10)
    )
    assert right >= 8


def test_the_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in BUILTIN.rglob("*") if path.is_file()) < 15_000_000
    assert all(path.stat().st_size < 300_000 for path in SAMPLES.iterdir())
