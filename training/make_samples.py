"""Write the files of samples/: held-out media, none of which took part in training.

python -m training.make_samples
"""

from __future__ import annotations

from pathlib import Path

from training.evaluate import mp4_bytes, png_bytes, wav_bytes
from training.tasks import audio, image, text, video
from training.tasks.types import HELD_OUT_SEED, Image, Sample, Sound

FOLDER = Path("samples")
SEED = HELD_OUT_SEED + 1
PICTURE_ANSWER, CLIP_ENDING = "a red circle", "right"


def first(task: str, wanted: str) -> int:
    """Index of the first sample of this seed whose answer ends as wanted."""
    make = {"image": image.sample, "video": video.sample}[task]
    return next(index for index in range(10_000) if make(SEED, index).turns[0].answer.endswith(wanted))


def pixels(sample: Sample) -> Image:
    """The picture of an image sample."""
    return next(part for part in sample.turns[0].question if isinstance(part, Image))


def main() -> None:
    """A picture, a clip, a sound, a long text, and a table of what they show."""
    FOLDER.mkdir(exist_ok=True)
    picture = image.sample(SEED, first("image", PICTURE_ANSWER))
    (FOLDER / "picture.png").write_bytes(png_bytes(pixels(picture).pixels_HWC))
    clip_index = first("video", f"moves {CLIP_ENDING}")
    (FOLDER / "clip.mp4").write_bytes(mp4_bytes(*video.full_clip(SEED, clip_index)))
    scene = video.sample(SEED, clip_index).turns[0].answer
    tones = audio.sample(SEED, 0)
    sound = next(part for part in tones.turns[0].question if isinstance(part, Sound))
    (FOLDER / "tones.wav").write_bytes(wav_bytes(sound.samples_N))
    recall = text.sample(SEED, 0).turns[0]
    (FOLDER / "recall.txt").write_text(f"{recall.question[0]}\n")
    rows = (
        ("picture.png", "What is in the picture?", picture.turns[0].answer),
        ("clip.mp4", "What happens in the video?", scene),
        ("clip.mp4", "Which way does it move?", CLIP_ENDING),
        ("tones.wav", "Which keys were pressed?", tones.turns[0].answer),
        ("recall.txt", "(the last sentence of the file)", recall.answer),
    )
    table = "\n".join(f"| `{name}` | {question} | {answer} |" for name, question, answer in rows)
    (FOLDER / "README.md").write_text(
        "# Samples\n\n"
        "Media to try the server with. `python -m training.make_samples` generated them; mimo-nano has not seen\n"
        "them while it was trained. The answers are those of greedy decoding (`temperature` 0).\n\n"
        f"| file | question | answer |\n|---|---|---|\n{table}\n"
    )


if __name__ == "__main__":
    main()
