"""Samples in files: what a reader of the files gets is what the sample shows."""

import io
import json

import av
import numpy as np
import pytest
import soundfile
from PIL import Image as Pil

from preprocess.types import Modality
from training.files import CLIPS, File, chat_json, chat_messages, conversation, in_files
from training.tasks import TASKS
from training.tasks.types import HELD_OUT_SEED, Clip, Image, Sample, Sound, Turn


def files_of(sample: Sample) -> list[File]:
    return [part for message in in_files(sample).messages for part in message.parts if isinstance(part, File)]


def test_a_picture_is_lossless() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    [file] = files_of(Sample("t", (Turn((Image(pixels), "What?"), "answer"),)))
    assert (file.modality, file.media_type) == (Modality.IMAGE, "image/png")
    assert np.array_equal(np.asarray(Pil.open(io.BytesIO(file.content))), pixels)


def test_a_sound_keeps_16_bits() -> None:
    samples = np.sin(np.arange(2400) / 10).astype(np.float32) * 0.9
    [file] = files_of(Sample("t", (Turn(("What?", Sound(samples)), "answer"),)))
    assert (file.modality, file.media_type) == (Modality.AUDIO, "audio/wav")
    read, rate_hz = soundfile.read(io.BytesIO(file.content), dtype="float32")
    assert rate_hz == 24_000
    assert np.abs(read - samples).max() < 1 / 16_000


def test_a_clip_is_sent_whole() -> None:
    """Every frame at the clip's own rate, not only the frames that the sample holds."""
    frames, rate = CLIPS["video"](HELD_OUT_SEED, 0)
    [clip] = [
        part for m in conversation("video", HELD_OUT_SEED, 0).messages for part in m.parts if isinstance(part, File)
    ]
    assert (clip.modality, clip.media_type) == (Modality.VIDEO, "video/mp4")
    with av.open(io.BytesIO(clip.content)) as container:
        [stream] = container.streams.video
        assert stream.codec_context.name == "h264"
        assert stream.average_rate == rate
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    assert decoded.shape == frames.shape
    assert np.abs(decoded.astype(int) - frames).mean() < 8


def test_a_clip_that_is_not_given_is_refused() -> None:
    clip = Clip(np.zeros((2, 8, 8, 3), dtype=np.uint8), np.zeros(2, dtype=np.float32))
    with pytest.raises(ValueError, match="only the sampled frames"):
        in_files(Sample("t", (Turn((clip, "What?"), "answer"),)))


def test_earlier_turns_are_history_and_only_the_last_answer_is_wanted() -> None:
    sample = Sample("t", (Turn(("one?",), "1"), Turn(("two?",), "2"), Turn(("three?",), "3")), system="Be brief.")
    asked = in_files(sample)
    assert asked.answer == "3"
    assert chat_messages(asked.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "three?"},
    ]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_gives_a_chat_request_and_the_same_one_again(task: str) -> None:
    body, answer = chat_json(task, HELD_OUT_SEED, 1)
    assert (body, answer) == chat_json(task, HELD_OUT_SEED, 1)
    messages = json.loads(body)
    assert messages[-1]["role"] == "user"
    assert answer
    kinds = {"image_url", "video_url", "audio_url", "text"}
    for message in messages:
        if isinstance(message["content"], list):
            assert {part["type"] for part in message["content"]} <= kinds
            for part in message["content"]:
                if part["type"] != "text":
                    assert part[part["type"]]["url"].startswith("data:")
