"""The JSON of a request: what is taken, and the words with which the rest is refused."""

from typing import Any, get_args

import pytest
from pydantic import BaseModel

from encoder.front.items import OPTION_SHAPES, PARTS, Item, read_encode_body
from encoder.front.problems import Refused
from epd.gateway import schema_parts as schema
from epd.gateway.media_parts import read_medium
from preprocess.types import MediaOptions, Modality

URL = "http://example.org/a"
PNG = {"type": "image_url", "image_url": {"url": URL}}


def read_one(part: Any) -> Item | Refused:
    (item,) = read_encode_body({"input": [part]}, max_items=8).items
    return item


GATEWAY_PARTS: dict[str, type[BaseModel]] = {
    "image_url": schema.ImagePart,
    "video_url": schema.VideoPart,
    "audio_url": schema.AudioPart,
    "input_audio": schema.InputAudioPart,
}


def test_parts_have_the_fields_they_have_in_a_chat_completion() -> None:
    assert PARTS.keys() == GATEWAY_PARTS.keys()
    shapes = {
        Modality.IMAGE: schema.ImageOptions.model_fields,
        Modality.VIDEO: schema.VideoOptions.model_fields,
        Modality.AUDIO: {},
    }
    assert {modality: set(known) for modality, known in OPTION_SHAPES.items()} == {
        modality: set(known) for modality, known in shapes.items()
    }
    for modality, known in OPTION_SHAPES.items():
        for name, allowed in known.items():
            if isinstance(allowed, tuple):
                literal = next(kind for kind in get_args(shapes[modality][name].annotation) if get_args(kind))
                assert set(allowed) == set(get_args(literal))


@pytest.mark.parametrize(
    "part",
    [
        PNG,
        {"type": "image_url", "image_url": {"url": URL, "detail": "low", "max_pixels": 2048}},
        {"type": "image_url", "image_url": {"url": URL, "max_pixels": 2048}, "max_pixels": 2048},
        {"type": "image_url", "image_url": {"url": URL, "min_pixels": None}, "detail": "high"},
        {"type": "video_url", "video_url": {"url": URL}, "fps": 2, "use_audio": False, "media_resolution": "max"},
        {"type": "video_url", "video_url": {"url": URL, "num_frames": 8, "max_pixels": 4096}},
        {"type": "audio_url", "audio_url": {"url": URL}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
        {"type": "input_audio", "input_audio": {"data": URL, "format": "wav"}},
    ],
)
def test_a_part_is_read_as_the_gateway_reads_it(part: dict[str, Any]) -> None:
    ours = read_one(part)
    theirs = read_medium(GATEWAY_PARTS[part["type"]].model_validate(part), "input[0]", None, is_told=False)
    assert isinstance(ours, Item)
    assert (ours.param, ours.source) == (theirs.param, theirs.source)
    assert ours.option_params == theirs.option_params


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        (3, "input[0]", "input[0] is 3; it must be an object"),
        ({}, "input[0].type", "field input[0].type is required"),
        ({"type": "text", "text": "a"}, "input[0].type", 'input[0].type is "text"; allowed: "image_url", "video_url"'),
        ({"type": ["image_url"]}, "input[0].type", "input[0].type is an array with 1 item; allowed"),
        ({"type": "image_url"}, "input[0].image_url", "field input[0].image_url is required"),
        ({"type": "image_url", "image_url": URL}, "input[0].image_url", "it must be an object"),
        ({"type": "image_url", "image_url": {}}, "input[0].image_url.url", "field input[0].image_url.url is required"),
        (PNG | {"fps": 2}, "input[0].fps", "unknown field input[0].fps (value 2); allowed fields: type, image_url, de"),
        (PNG | {"max_pixels": "9"}, "input[0].max_pixels", 'input[0].max_pixels is "9"; it must be an integer'),
        (PNG | {"max_pixels": True}, "input[0].max_pixels", "it must be an integer"),
        (PNG | {"max_pixels": 2**40}, "input[0].max_pixels", "it must be a smaller number"),
        (PNG | {"max_pixels": 4}, "input[0].max_pixels", "max_pixels is 4, allowed is at least 1024"),
        (PNG | {"detail": "big"}, "input[0].detail", 'input[0].detail is "big"; allowed: "auto", "low", "high"'),
        (
            {"type": "image_url", "image_url": {"url": URL, "max_pixels": 2048}, "max_pixels": 4096},
            "input[0].max_pixels",
            "input[0].image_url.max_pixels is 2048 and input[0].max_pixels is 4096; give one",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "exe"}},
            "input[0].input_audio.format",
            'is "exe"; allowed: "wav", "mp3"',
        ),
    ],
)
def test_a_fault_of_one_part_names_field_value_and_what_is_allowed(part: Any, param: str, words: str) -> None:
    fault = read_one(part)
    assert isinstance(fault, Refused)
    assert (fault.problem.status, fault.problem.param) == (400, param)
    assert words in fault.problem.message


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ([], None, "the body is []; it must be an object"),
        ({}, "input", "field input is required"),
        ({"input": PNG}, "input", "input is an object with 2 fields; it must be an array"),
        ({"input": None}, "input", "input is null; it must be an array"),
        ({"input": []}, "input", "input is []; it must not be empty"),
        ({"input": [PNG] * 9}, "input", "input has 9 items; allowed: at most 8"),
        ({"input": [PNG], "inputs": 1}, "inputs", "unknown field inputs (value 1); allowed fields: input, model, enc"),
        ({"input": [PNG], "model": 3}, "model", "model is 3; it must be a string"),
        ({"input": [PNG], "encoding_format": "hex"}, "encoding_format", 'is "hex"; allowed: "base64", "float"'),
        ({"input": [PNG], "encoding_format": ""}, "encoding_format", 'is ""; allowed: "base64", "float"'),
        ({"input": [PNG], "encoding_format": 0}, "encoding_format", 'is 0; allowed: "base64", "float"'),
    ],
)
def test_a_fault_of_the_whole_ends_all_of_it(body: Any, param: str | None, words: str) -> None:
    with pytest.raises(Refused) as refused:
        read_encode_body(body, max_items=8)
    assert refused.value.problem.param == param
    assert words in refused.value.problem.message


def test_a_bad_part_stands_beside_good_ones() -> None:
    items = read_encode_body({"input": [PNG, {"type": "image_url"}, PNG]}, max_items=8).items
    assert [isinstance(item, Item) for item in items] == [True, False, True]
    good = items[2]
    assert isinstance(good, Item)
    assert good.param == "input[2].image_url"
    assert good.source.options == MediaOptions()
