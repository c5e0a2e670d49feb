"""What the soak asks: texts, pictures, clips and sounds, streamed or whole, mostly with one right answer."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.e2e.service import KNOWN_ANSWERS, SAMPLES, file_url

# Of the pictures this share is in a file that nobody has seen: encoded anew.
_NEW_PICTURES = 0.3


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `right` is the only right answer, None where any will do; `num_choices` of it are expected."""

    kind: str
    path: str
    body: Mapping[str, Any]
    right: str | None = None
    num_choices: int = 1

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def draw(rng: random.Random) -> Ask:
    """The next request of the mix."""
    kind = rng.choices(list(_MAKERS), weights=[weight for weight, _ in _MAKERS.values()])[0]
    return _MAKERS[kind][1](rng)


def _chat(kind: str, content: Any, rng: random.Random, right: str | None, **fields: Any) -> Ask:
    body = {
        "model": "mimo-nano",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 64,
        **({"temperature": 0} if right else {}),
        **fields,
    }
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Ask(kind, "/v1/chat/completions", body, right, int(fields.get("n", 1)))


def _words(rng: random.Random) -> Ask:
    first = rng.randrange(1, 400)
    return _chat("text", f"Count from {first} to {first + 9}.", rng, None, temperature=rng.choice([0, 0.7]), n=1)


def _choices(rng: random.Random) -> Ask:
    return _chat("choices", f"Count from {rng.randrange(1, 400)} on.", rng, None, temperature=0.8, n=2, max_tokens=24)


def _long(rng: random.Random) -> Ask:
    text = (SAMPLES / "recall.txt").read_text(encoding="utf-8").replace("\n", " ").strip()
    return _chat("long", text, rng, KNOWN_ANSWERS["recall.txt"].answer)


def _medium(kind: str, file: str, rng: random.Random) -> Ask:
    known = KNOWN_ANSWERS[file]
    url = _unseen(file, rng) if kind == "image" and rng.random() < _NEW_PICTURES else file_url(file)
    parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}, {"type": "text", "text": known.question}]
    return _chat(kind, parts, rng, known.answer)


def _unseen(file: str, rng: random.Random) -> str:
    """The same picture in other bytes."""
    chunks, buffer = PngInfo(), io.BytesIO()
    chunks.add_text("Comment", str(rng.getrandbits(64)))
    with Image.open(SAMPLES / file) as picture:
        picture.save(buffer, "PNG", pnginfo=chunks)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _wrong(rng: random.Random) -> Ask:
    """Refused at once, whatever else goes on."""
    return _chat("refused", [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], rng, None)


_MAKERS = {
    "text": (5, _words),
    "choices": (1, _choices),
    "long": (1, _long),
    "image": (4, lambda rng: _medium("image", "picture.png", rng)),
    "video": (1, lambda rng: _medium("video", "clip.mp4", rng)),
    "audio": (2, lambda rng: _medium("audio", "tones.wav", rng)),
    "refused": (0.5, _wrong),
}
