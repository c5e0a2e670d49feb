"""Task generators: every sample is a pure function of a seed and an index."""

from collections.abc import Callable

from training.tasks import audio, image, read, text, video
from training.tasks.types import Sample

TASKS: dict[str, Callable[[int, int], Sample]] = {
    "shapes": image.sample,
    "read": read.sample,
    "video": video.sample,
    "keys": audio.sample,
    "beeps": audio.sample_beeps,
    "recall": text.sample,
    "records": text.records,
    "count": text.count,
    "repeat": text.repeat,
    "small_talk": text.small_talk,
}
"""What the built-in model was trained to do, with the generator of each task: (seed, index) to a sample."""
