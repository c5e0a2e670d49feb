"""Questions whose answers are known, in the shapes that clients send."""

import base64
from typing import Any, Literal

from pydantic import BaseModel, Field

from tests.e2e.service import KNOWN_ANSWERS, SAMPLES

MODEL = "mimo-nano"
GREEDY: Any = {"model": MODEL, "temperature": 0}


def data_url(name: str, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode((SAMPLES / name).read_bytes()).decode()}"


PICTURE_URL = data_url("picture.png", "image/png")
SOUND = base64.b64encode((SAMPLES / "tones.wav").read_bytes()).decode()


def question(name: str, part: dict[str, Any]) -> list[Any]:
    """Messages that ask what the sample's row of the table asks."""
    return [{"role": "user", "content": [part, {"type": "text", "text": KNOWN_ANSWERS[name].question}]}]


MEDIA: dict[str, list[Any]] = {
    "picture.png": question("picture.png", {"type": "image_url", "image_url": {"url": PICTURE_URL}}),
    "tones.wav": question("tones.wav", {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}),
    "clip.mp4": question("clip.mp4", {"type": "video_url", "video_url": {"url": data_url("clip.mp4", "video/mp4")}}),
}

PICTURE = MEDIA["picture.png"]
PICTURE_ANSWER = KNOWN_ANSWERS["picture.png"].answer


class Shape(BaseModel):
    """What a small model can be held to: every text in it has an end."""

    form: Literal["square", "circle", "cross", "triangle"]
    colour: Literal["red", "blue", "purple", "white"]
    count: int = Field(ge=0, le=9)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint the picture",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"type": "string", "enum": ["red", "green"]},
                "layers": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["colour", "layers"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
"""Its arguments are short in every case, so that a call ends."""
