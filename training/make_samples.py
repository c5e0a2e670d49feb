"""Write the files of samples/: held-out media, none of which took part in training.

python -m training.make_samples
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from training.files import Conversation, File, conversation
from training.tasks.types import HELD_OUT_SEED

FOLDER = Path("samples")
SEED = HELD_OUT_SEED + 1


def first(task: str, wanted: Callable[[str], bool]) -> Conversation:
    """The first one-question sample of this seed whose answer is as wanted and that has no system line of its own."""
    found = (conversation(task, SEED, index) for index in range(10_000))
    return next(asked for asked in found if len(asked.messages) == 1 and wanted(asked.answer))


FILES: tuple[tuple[str, str, str, Callable[[str], bool]], ...] = (
    (
        "picture.png",
        "shapes",
        "What is in the picture?",
        lambda answer: "red circle" in answer and "3 shapes" in answer,
    ),
    ("word.png", "read", "What is written in the picture?", lambda answer: "river" in answer),
    ("number.png", "read", "What is written in the picture?", lambda answer: "5 digits" in answer),
    ("clip.mp4", "video", "What happens in the video?", lambda answer: "right, then up" in answer),
    ("tones.wav", "keys", "Which keys were pressed?", lambda answer: "6 digits" in answer),
    ("beeps.wav", "beeps", "How many beeps are there?", lambda answer: "5 beeps" in answer),
)
"""File, task, the question asked about it, what its answer has to hold."""


def main() -> None:
    """Pictures, a clip, sounds, a long text, and a table of what they show."""
    FOLDER.mkdir(exist_ok=True)
    rows = []
    for name, task, question, wanted in FILES:
        asked = first(task, wanted)
        (content,) = (part.content for part in asked.messages[0].parts if isinstance(part, File))
        (FOLDER / name).write_bytes(content)
        rows.append((name, question, asked.answer))
    recall = first("recall", lambda _: True)
    (FOLDER / "recall.txt").write_text(f"{recall.messages[0].parts[0]}\n")
    rows.append(("recall.txt", "(the last sentence of the file)", recall.answer))
    table = "\n".join(f"| `{name}` | {question} | {answer} |" for name, question, answer in rows)
    (FOLDER / "README.md").write_text(
        "# Samples\n\n"
        "Media to try the server with. `python -m training.make_samples` generated them; mimo-nano has not seen\n"
        "them while it was trained. The answers are those of greedy decoding (`temperature` 0).\n\n"
        f"| file | question | answer |\n|---|---|---|\n{table}\n"
    )


if __name__ == "__main__":
    main()
