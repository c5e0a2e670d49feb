"""Media options through a running service: what they do to a prompt, and what is refused."""

import base64
from typing import Any

import pytest

from tests.e2e.service import Answer, Service, file_url
from tests.fakes.clips import make_video, sine

pytestmark = pytest.mark.e2e

QUESTION = {"type": "text", "text": "What is to be seen?"}


def video_part(sound_s: float | None, **options: Any) -> dict[str, Any]:
    """Four seconds of pictures and so much sound, as an MP4 in a data URL."""
    sound = None if sound_s is None else sine(sound_s)[:, 0]
    content = base64.b64encode(make_video(40, sound=sound)).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{content}"}, **options}


def image_part(**options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": file_url("picture.png")}, **options}


def tokens(answer: Answer, kind: str) -> int:
    assert answer.status == 200, answer
    found: int = answer.body["usage"]["prompt_tokens_details"][f"{kind}_tokens"]
    return found


def ask(service: Service, part: dict[str, Any]) -> Answer:
    return service.ask([part, QUESTION], max_tokens=1)


# Eight frames of the clip are used, the first two half a second apart, so that it ends at 4.4 s, after 27 rows of
# sound. One row of video is 32 x 32 pixels of a pair: 12 of each pair at 96 x 128.
@pytest.mark.parametrize(("sound_s", "num_rows"), [(None, 0), (0.5, 4), (1.0, 7), (4.0, 26), (9.0, 27)])
def test_sound_of_any_length_is_answered(epd: Service, sound_s: float | None, num_rows: int) -> None:
    answer = ask(epd, video_part(sound_s))
    assert tokens(answer, "video") == 4 * 12 + num_rows
    silent = ask(epd, video_part(sound_s, use_audio=False))
    assert tokens(silent, "video") == 4 * 12


def test_sound_that_is_required(epd: Service) -> None:
    assert tokens(ask(epd, video_part(1.0, use_audio=True)), "video") == 4 * 12 + 7
    answer = ask(epd, video_part(None, use_audio=True))
    assert answer.status == 422, answer
    error = answer.body["error"]
    assert error["param"] == "messages[0].content[0].video_url"
    assert "use_audio is true, but the video has no audio track" in error["message"]


@pytest.mark.parametrize(
    ("options", "num_pairs"),
    [({"fps": 4.0}, 8), ({"max_frames": 4}, 2), ({"num_frames": 6}, 3), ({"fps": 240, "media_resolution": "max"}, 20)],
)
def test_frames(epd: Service, options: dict[str, Any], num_pairs: int) -> None:
    assert tokens(ask(epd, video_part(None, **options)), "video") == num_pairs * 12


def test_pixels(epd: Service) -> None:
    default = tokens(ask(epd, image_part()), "image")
    assert tokens(ask(epd, image_part(detail="high")), "image") == default
    assert tokens(ask(epd, image_part(max_pixels=5000)), "image") <= 4 < default
    assert tokens(ask(epd, image_part(min_pixels=200_000)), "image") >= 195


def test_the_same_picture_in_other_words_hits_the_cache(epd: Service) -> None:
    question = {"type": "text", "text": "A question for the cache. " * 4}
    first, again = (
        epd.ask([image_part(**options), question], max_tokens=1)
        for options in ({"max_pixels": 30_000}, {"max_pixels": 30_000, "min_pixels": 8192, "detail": "low"})
    )
    assert again.body["usage"]["prompt_tokens"] == first.body["usage"]["prompt_tokens"]
    assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "field"),
    [({"max_frames": 65}, "max_frames"), ({"min_pixels": 40_000}, "min_pixels"), ({"fps": 0}, "fps")],
)
def test_refusals_name_the_field(epd: Service, options: dict[str, Any], field: str) -> None:
    answer = ask(epd, video_part(None, **options))
    assert answer.status == 400, answer
    assert answer.body["error"]["param"] == f"messages[0].content[0].{field}"
