"""Options of one medium: where they may stand, what is refused and how, and which of them make another medium."""

import itertools
from typing import Any

import pytest

from epd.errors import InvalidRequest
from epd.gateway.conversation import read_conversation
from epd.gateway.media_parts import MediaPart
from epd.gateway.schema import ChatBody
from preprocess.keys import media_key
from preprocess.types import MediaOptions, Modality
from tests.fakes.gateway import AUDIO_URL, IMAGE_URL, RENDERER, VIDEO_URL, chat_body, running_gateway

PATH = "messages[0].content[1]"
URLS = {"image": IMAGE_URL, "video": VIDEO_URL, "audio": AUDIO_URL}


def part(kind: str, inside: dict[str, Any] | None = None, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": URLS[kind], **(inside or {})}, **(beside or {})}


def with_part(given: dict[str, Any]) -> dict[str, Any]:
    return chat_body([{"type": "text", "text": "hi"}, given])


def read(given: dict[str, Any]) -> MediaPart:
    body = ChatBody.model_validate(with_part(given))
    (medium,) = read_conversation(body, RENDERER.vocabulary.guard).media
    return medium


def options_of(given: dict[str, Any]) -> MediaOptions:
    return read(given).source.options


def key_of(kind: str, **options: Any) -> str:
    """The key under which the gateway asks for a medium with these options."""
    source = read(part(kind, options)).source
    assert RENDERER.processor is not None
    return media_key(
        b"content",
        modality=source.modality,
        options=source.options,
        processor=RENDERER.processor,
        tower_fingerprint="t",
    )


# The settings of these tests are the fallbacks: images 4096 to 4,194,304 pixels, videos the same, 16,777,216 in all,
# 2 fps, 8 to 256 frames.
REFUSED: list[tuple[str, dict[str, Any], str, list[str]]] = [
    # kind, options, the one at fault, words of the message
    ("image", {"detail": "ultra"}, "detail", ['"ultra"', '"auto"', '"low"', '"high"']),
    ("image", {"min_pixels": 0}, "min_pixels", ["0", "allowed is at least 1"]),
    ("image", {"min_pixels": -5}, "min_pixels", ["-5"]),
    ("image", {"min_pixels": 1.5}, "min_pixels", ["integer"]),
    ("image", {"min_pixels": "4096"}, "min_pixels", ["integer"]),
    ("image", {"min_pixels": True}, "min_pixels", ["integer"]),
    ("image", {"min_pixels": 4_194_305}, "min_pixels", ["4194305", "at most 4194304"]),
    ("image", {"max_pixels": 0}, "max_pixels", ["0", "at least 1024"]),
    ("image", {"max_pixels": 1023}, "max_pixels", ["1023", "at least 1024"]),
    ("image", {"max_pixels": 4_194_305}, "max_pixels", ["4194305", "at most 4194304"]),
    ("image", {"max_pixels": 2**31}, "max_pixels", ["must be less than 2147483648"]),
    ("image", {"max_pixels": 10**40}, "max_pixels", []),
    ("image", {"min_pixels": 9000, "max_pixels": 8000}, "min_pixels", ["9000", "at most max_pixels, which is 8000"]),
    ("image", {"detail": "low", "max_pixels": 300_000}, "max_pixels", ["300000", "detail is low", "262144"]),
    ("image", {"detail": "low", "min_pixels": 300_000}, "min_pixels", ["300000", "detail is low", "262144"]),
    ("video", {"fps": 0}, "fps", ["0.0", "0.001 to 240"]),
    ("video", {"fps": -1.5}, "fps", ["-1.5"]),
    ("video", {"fps": 240.5}, "fps", ["240.5"]),
    ("video", {"fps": 1e300}, "fps", ["1e+300"]),
    ("video", {"fps": "2"}, "fps", ["number"]),
    ("video", {"max_frames": 0}, "max_frames", ["0", "at least 2"]),
    ("video", {"max_frames": 1}, "max_frames", ["1", "at least 2"]),
    ("video", {"max_frames": 257}, "max_frames", ["257", "at most 256"]),
    ("video", {"max_frames": 2.0}, "max_frames", ["integer"]),
    ("video", {"min_frames": 0}, "min_frames", ["0", "at least 1"]),
    ("video", {"min_frames": 257}, "min_frames", ["257", "at most 256"]),
    ("video", {"num_frames": 1}, "num_frames", ["1", "at least 2"]),
    ("video", {"num_frames": 257}, "num_frames", ["257", "at most 256"]),
    ("video", {"num_frames": 8, "fps": 1.0}, "num_frames", ["fps is 1.0", "num_frames is 8"]),
    ("video", {"num_frames": 8, "max_frames": 6}, "num_frames", ["8", "max_frames, which is 6"]),
    ("video", {"num_frames": 8, "min_frames": 10}, "min_frames", ["10", "num_frames, which is 8"]),
    ("video", {"min_frames": 10, "max_frames": 8}, "min_frames", ["10", "max_frames, which is 8"]),
    ("video", {"min_pixels": 4_194_305}, "min_pixels", ["at most 4194304"]),
    # Each alone within its bound, together eight gigabytes: 256 frames share 33,554,432 pixels.
    ("video", {"min_pixels": 131_073}, "min_pixels", ["131073", "at most 131072", "256 frames"]),
    ("video", {"min_pixels": 4_194_304, "num_frames": 10}, "min_pixels", ["at most 3355443", "10 frames"]),
    ("video", {"use_audio": "no"}, "use_audio", ["true or false"]),
    ("video", {"media_resolution": "ultra"}, "media_resolution", ['"default"', '"max"']),
]


@pytest.mark.parametrize(("kind", "options", "field", "words"), REFUSED)
async def test_a_bad_option_is_refused_by_name(
    kind: str, options: dict[str, Any], field: str, words: list[str]
) -> None:
    async with running_gateway() as stack:
        for given, place in ((part(kind, options), f"{PATH}.{kind}_url"), (part(kind, beside=options), PATH)):
            status, answer, _ = await stack.post(with_part(given))
            assert status == 400, answer
            error = answer["error"]
            assert error["param"] == f"{place}.{field}", error
            assert field in error["message"]
            for word in words:
                assert word in error["message"], error
        # Found before the first byte is fetched.
        assert stack.fetcher.fetched == []
        assert not stack.encoder.encoded


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (part("image", {"fps": 1}), "image_url.fps"),
        (part("image", beside={"num_frames": 8}), "num_frames"),
        (part("video", {"detail": "low"}), "video_url.detail"),
        (part("audio", {"use_audio": True}), "audio_url.use_audio"),
        (part("video", beside={"total_pixels": 10**6}), "total_pixels"),
        (part("video", beside={"nframes": 8}), "nframes"),
        (part("image", beside={"resized_height": 64}), "resized_height"),
        ({"type": "image", "image": IMAGE_URL}, "type"),
        ({"type": "video", "video": [IMAGE_URL, IMAGE_URL]}, "type"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(given: dict[str, Any], place: str) -> None:
    async with running_gateway() as stack:
        status, answer, _ = await stack.post(with_part(given))
        assert status == 400
        assert answer["error"]["param"] == f"{PATH}.{place}"
        assert "allowed" in answer["error"]["message"]


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("image", {"min_pixels": 5000, "max_pixels": 90_000}),
    ("image", {"detail": "low"}),
    ("video", {"fps": 2, "max_frames": 10, "min_frames": 4, "min_pixels": 5000, "max_pixels": 9000}),
    ("video", {"num_frames": 6, "use_audio": False}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_options_stand_inside_or_beside(kind: str, options: dict[str, Any]) -> None:
    first, *others = options
    split = part(kind, {first: options[first]}, {name: options[name] for name in others})
    twice = part(kind, options, options)
    expected = options_of(part(kind, options))
    assert {name: getattr(expected, name) for name in expected.given()} == options
    assert options_of(part(kind, beside=options)) == options_of(split) == options_of(twice) == expected


def test_null_is_no_option() -> None:
    options = {"fps": None, "min_pixels": None, "use_audio": None, "media_resolution": None}
    assert options_of(part("video", options, options)) == MediaOptions()
    assert options_of(part("video", {"fps": None}, {"fps": 3})) == MediaOptions(fps=3.0)


def test_two_places_must_agree() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(part("video", {"fps": 2.0}, {"fps": 3.0}))
    assert refused.value.param == f"{PATH}.fps"
    assert f"{PATH}.video_url.fps is 2.0 and {PATH}.fps is 3.0" in refused.value.message


def test_the_model_maker_s_own_spelling() -> None:
    for level in ("default", "max"):
        given = part("video", beside={"fps": 2, "media_resolution": level})
        assert options_of(given) == MediaOptions(fps=2.0)


@pytest.mark.parametrize(
    ("inline", "url"),
    [
        ({"data": "QUJD", "format": "mp3"}, "data:audio/mpeg;base64,QUJD"),
        ({"data": "QUJD"}, "data:;base64,QUJD"),
        ({"data": "https://media.test/a.wav"}, "https://media.test/a.wav"),
        ({"data": "HTTP://media.test/a.wav", "format": "wav"}, "HTTP://media.test/a.wav"),
        ({"data": "data:audio/wav;base64,QUJD"}, "data:audio/wav;base64,QUJD"),
        # No other scheme: it goes on as base64, which it is not.
        ({"data": "file:///etc/passwd"}, "data:;base64,file:///etc/passwd"),
    ],
)
def test_inline_sound(inline: dict[str, str], url: str) -> None:
    source = read({"type": "input_audio", "input_audio": inline}).source
    assert (source.modality, source.url) == (Modality.AUDIO, url)


@pytest.mark.parametrize("name", [{"uuid": "mine"}, {"key": "0" * 32}], ids=["uuid", "key"])
@pytest.mark.parametrize("url", [None, {"url": ""}], ids=["null", "empty"])
@pytest.mark.parametrize("kind", URLS)
def test_a_name_stands_for_content_that_is_left_out(
    kind: str, url: dict[str, str] | None, name: dict[str, str]
) -> None:
    medium = read({"type": f"{kind}_url", f"{kind}_url": url, **name})
    assert not medium.has_source
    assert {"uuid": medium.uuid} == name or {"key": medium.key} == name


@pytest.mark.parametrize("inline", [None, {"data": "", "format": "wav"}], ids=["null", "empty"])
def test_a_name_stands_for_a_sound_that_is_left_out(inline: dict[str, str] | None) -> None:
    assert not read({"type": "input_audio", "input_audio": inline, "uuid": "mine"}).has_source


def test_an_empty_url_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is empty"):
        read({"type": "image_url", "image_url": {"url": ""}})


# Every line is one medium: its spellings share a key, and no two lines do.
SPELLINGS: dict[str, list[list[dict[str, Any]]]] = {
    "image": [
        [
            {},
            {"detail": "auto"},
            {"detail": "high"},
            {"min_pixels": 4096},
            {"max_pixels": 4_194_304},
            {"detail": "high", "min_pixels": 4096, "max_pixels": 4_194_304},
        ],
        [{"detail": "low"}, {"max_pixels": 262_144}, {"detail": "low", "max_pixels": 262_144}],
        [{"detail": "low", "max_pixels": 100_000}, {"max_pixels": 100_000}],
        # A picture has one unit at least; bounds below are the same bound. A lowered ceiling takes the floor with it.
        [{"min_pixels": 1}, {"min_pixels": 1024}],
        [{"min_pixels": 1025}],
        [{"max_pixels": 2000}, {"max_pixels": 2000, "min_pixels": 2000}],
        [{"max_pixels": 2000, "min_pixels": 1024}],
    ],
    "video": [
        [
            {},
            {"fps": 2},
            {"fps": 2.0},
            {"max_frames": 256},
            {"min_frames": 8},
            {"min_frames": 7},
            {"media_resolution": "max"},
            {"min_pixels": 4096, "max_pixels": 4_194_304},
        ],
        [{"fps": 1.5}],
        [{"max_frames": 10}, {"max_frames": 11}, {"max_frames": 11, "min_frames": 8}],
        # Bounds that meet: the lower gives way.
        [{"max_frames": 5}, {"max_frames": 4}, {"max_frames": 5, "min_frames": 4}, {"max_frames": 4, "min_frames": 3}],
        # A count leaves nothing for a rate or for bounds to decide.
        [
            {"num_frames": 8},
            {"num_frames": 7},
            {"num_frames": 9},
            {"num_frames": 8, "max_frames": 20},
            {"num_frames": 8, "min_frames": 4, "max_frames": 9},
        ],
        [{"num_frames": 6}, {"num_frames": 6, "min_frames": 5}],
        [{"use_audio": False}],
        # Not the default in other words: it fails where there is no sound.
        [{"use_audio": True}],
        [{"max_pixels": 9000}],
        [{"min_pixels": 9000}],
    ],
    "audio": [[{}]],
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_one_medium_has_one_key(kind: str) -> None:
    keys = [{key_of(kind, **options) for options in spellings} for spellings in SPELLINGS[kind]]
    for spellings, found in zip(SPELLINGS[kind], keys, strict=True):
        assert len(found) == 1, spellings
    for one, other in itertools.combinations(range(len(keys)), 2):
        assert keys[one].isdisjoint(keys[other]), (SPELLINGS[kind][one], SPELLINGS[kind][other])


async def test_the_key_travels_with_the_request() -> None:
    async with running_gateway() as stack:
        given = [part("image"), part("image", beside={"detail": "high"}), part("image", {"detail": "low"})]
        status, answer, _ = await stack.ask([*given, {"type": "text", "text": "?"}])
        assert status == 200, answer
        keys = [span.key for span in stack.worker.submitted[0].spans]
        assert keys[0] == keys[1] != keys[2]
