"""The ids the trainer makes are the ids the server makes, and the generators repeat themselves exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.batch import Encoder, collate
from training.evaluate import Served, as_messages
from training.files import conversation
from training.tasks import TASKS
from training.tasks.types import HELD_OUT_SEED, Clip, Codes, Image, Sample, Sound, Turn
from training.vocabulary import BUILTIN

SEED = HELD_OUT_SEED + 7


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


def with_codes(sample: Sample) -> Sample:
    """Sounds replaced by code groups of the right number; the ids do not depend on the codes."""
    turns = tuple(
        Turn(
            tuple(
                Codes(torch.zeros(-(-(len(part.samples_N) // 240 + 1) // 16), 4, 4, dtype=torch.long))
                if isinstance(part, Sound)
                else part
                for part in turn.question
            ),
            turn.answer,
        )
        for turn in sample.turns
    )
    return Sample(sample.task, turns, sample.system, sample.labels, sample.marks)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_training_ids_are_the_served_ids(served: Served, task: str) -> None:
    encode = Encoder(BUILTIN)
    for index in range(4 if task == "video" else 8):
        sample = TASKS[task](SEED, index)
        prompt = served.prompt(*as_messages(conversation(task, SEED, index)))
        encoded = encode(with_codes(sample))
        assert encoded.ids == prompt.ids
        # What training asks for last is the last answer and the end of its turn, at the places the server would fill.
        answer_ids = prompt.ids[prompt.answer_start :]
        assert answer_ids == [*encode.text(sample.turns[-1].answer), encode.tokenizer.token_to_id("<|im_end|>")]
        assert encoded.wanted[prompt.answer_start :] == [True] * len(answer_ids)
        assert not encoded.wanted[prompt.answer_start - 1]
        places = [place for _, _, _, where, _ in encoded.pixels for place in where]
        places += [place for _, where in encoded.sounds for place in where]
        assert places == [place for where, _ in prompt.rows for place in where]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_generators_repeat_and_differ(task: str) -> None:
    def media(sample: Sample) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for part in sample.turns[0].question:
            if isinstance(part, Image):
                found.append(part.pixels_HWC)
            elif isinstance(part, Clip):
                found.append(part.frames_THWC)
            elif isinstance(part, Sound):
                found.append(part.samples_N)
        return found

    once, again, other = TASKS[task](SEED, 3), TASKS[task](SEED, 3), TASKS[task](SEED, 4)
    assert [turn.answer for turn in once.turns] == [turn.answer for turn in again.turns]
    assert all(np.array_equal(a, b) for a, b in zip(media(once), media(again), strict=True))
    assert once.turns != other.turns if not media(once) else not np.array_equal(media(once)[0], media(other)[0])


def test_collate_marks_the_token_before_each_answer_token() -> None:
    encode = Encoder(BUILTIN)
    samples = [encode(TASKS[task](SEED, index)) for task in ("repeat", "small_talk", "count") for index in range(3)]
    batch = collate(samples)
    assert sum(count * length for count, length in batch.groups) == len(batch.ids_T)
    assert torch.equal(batch.ids_T[batch.rows_A + 1], batch.targets_A)
    assert len(batch.rows_A) == sum(sum(sample.wanted) for sample in samples)
