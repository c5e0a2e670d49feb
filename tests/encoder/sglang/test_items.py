"""Media as a language-only server writes them."""

import base64
import json

import pytest

from encoder.sglang.errors import BadRequest
from encoder.sglang.items import read_items
from preprocess.config import FetchLimits
from preprocess.fetch import Fetcher
from preprocess.types import MediaOptions, Modality

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(200))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://a.example/cat.png", "https://a.example/cat.png"),
        ("  http://a.example/x?y=1#z\n", "http://a.example/x?y=1#z"),
        ("data:image/png;base64,AAAA", "data:image/png;base64,AAAA"),
        ("file:///data/cat.png", "file:///data/cat.png"),
        ("s3://bucket/cat.png", "s3://bucket/cat.png"),
        ("/data/my cats/a?b#c.JPG", "file:///data/my%20cats/a%3Fb%23c.JPG"),
        ("/data/clip.mp4", "file:///data/clip.mp4"),
        (base64.b64encode(PNG).decode(), "data:;base64," + base64.b64encode(PNG).decode()),
        # Of a JPEG it begins like a path.
        (base64.b64encode(JPEG).decode(), "data:;base64," + base64.b64encode(JPEG).decode()),
    ],
)
def test_forms_of_a_url(text: str, url: str) -> None:
    for raw in (text, [text], {"url": text}, [[[{"url": text}]]]):
        (item,) = read_items(raw, Modality.IMAGE, max_items=4)
        assert (item.source.url, item.source.options, item.sha256) == (url, MediaOptions(), None)


async def test_base64_without_a_scheme_is_content() -> None:
    wrapped = base64.encodebytes(JPEG).decode()
    async with Fetcher(FetchLimits()) as fetcher:
        for text in (wrapped, wrapped.replace("\n", ""), base64.urlsafe_b64encode(JPEG).decode()):
            (item,) = read_items(text, Modality.IMAGE, max_items=1)
            assert await fetcher.fetch(item.source) == JPEG


def test_order_and_nesting() -> None:
    raw = ["data:,1", [["data:,2"], None, [{"url": "data:,3"}, []]], "data:,4"]
    assert [item.source.url for item in read_items(raw, Modality.AUDIO, max_items=4)] == [
        f"data:,{i}" for i in (1, 2, 3, 4)
    ]
    with pytest.raises(BadRequest, match="more than 3"):
        read_items(raw, Modality.AUDIO, max_items=3)
    deep: object = "data:,1"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(BadRequest, match="deep"):
        read_items(deep, Modality.IMAGE, max_items=1)


@pytest.mark.parametrize(
    ("modality", "raw", "options"),
    [
        (Modality.IMAGE, {"detail": "low"}, MediaOptions(detail="low")),
        (Modality.IMAGE, {"max_pixels": 65536, "fps": 2, "max_dynamic_patch": 6}, MediaOptions(max_pixels=65536)),
        (Modality.IMAGE, {"max_long_side_pixel": 100, "new": {"a": []}, "detail": None}, MediaOptions()),
        (Modality.VIDEO, {"fps": 2, "max_frames": 8, "max_tokens_per_frame": 5}, MediaOptions(fps=2, max_frames=8)),
        (Modality.VIDEO, {"preprocess_kwargs": {"fps": 4, "x": 1}, "detail": "low"}, MediaOptions(fps=4)),
        (Modality.VIDEO, {"preprocess_kwargs": {"fps": 4}, "fps": 1.5}, MediaOptions(fps=1.5)),
        (Modality.VIDEO, {"preprocess_kwargs": None}, MediaOptions()),
        (Modality.AUDIO, {"fps": 2, "detail": "low"}, MediaOptions()),
    ],
)
def test_options(modality: Modality, raw: dict[str, object], options: MediaOptions) -> None:
    (item,) = read_items([{"url": "data:,x", **raw}], modality, max_items=1)
    assert item.source.options == options


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([], "empty"),
        (None, "empty"),
        ([5], r"mm_items\[0\]: an item is 5, allowed is a string"),
        ([True], r"mm_items\[0\]"),
        (["data:,x", {"no_url": 1}], r"mm_items\[1\]: an item is an object without a url"),
        ([{"url": None}], "url is null, allowed is a string"),
        (["  "], "empty string"),
        (["relative/cat.png"], r'the item is "relative/cat.png", none of what is allowed: a URL, base64'),
        (["what is this?"], "none of what is allowed"),
        (["/etc/passwd"], r'the item is "/etc/passwd", a path with no known ending, which is not allowed'),
        (["//etc/passwd"], "a path with no known ending, which is not allowed"),
        (["/home/a/" + "long" * 40], "a path with no known ending, which is not allowed"),
        ([{"url": "data:,x", "detail": "medium"}], 'detail is "medium", allowed is "auto", "low", "high"'),
        ([{"url": "data:,x", "detail": 5}], 'detail is 5, allowed is "auto", "low", "high"'),
        ([{"url": "data:,x", "max_pixels": "many"}], 'max_pixels is "many", allowed is a whole number'),
        ([{"url": "data:,x", "max_pixels": 10**400}], "max_pixels is a number too large to show, allowed"),
        ([{"url": "data:,x", "max_pixels": 10**50}], "max_pixels is 1"),
        ([{"url": "data:,x", "content_hash": "md5:1"}], 'content_hash is "md5:1", allowed is sha256: and 64'),
        ([{"url": "data:,x", "content_hash": 5}], "content_hash is 5, allowed"),
        ([{"url": "data:,x", "preprocess_kwargs": 5}], "preprocess_kwargs is 5, allowed is an object"),
    ],
)
def test_what_is_refused(raw: object, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read_items(raw, Modality.IMAGE, max_items=10)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"fps": "2"}, 'fps is "2", allowed is a number'),
        ({"fps": 10**300}, "fps is a number too large to show, allowed is a smaller number"),
        ({"use_audio": 1}, "use_audio is 1, allowed is true or false"),
        ({"preprocess_kwargs": {"num_frames": 2.5}}, "num_frames is 2.5, allowed is a whole number"),
        ({"fps": 1e9}, "fps is 1000000000.0, allowed is 0"),
    ],
)
def test_options_are_refused_with_what_is_allowed(option: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        read_items(["data:,x", {"url": "data:,x"} | option], Modality.VIDEO, max_items=10)
    assert refused.value.message.startswith("mm_items[1]: ")
    assert len(refused.value.message) < 500


def test_base64_may_begin_with_a_slash() -> None:
    for head in (JPEG[:4], b"\xff\xfb\x90\x64", b"\xff\xe3\x18\xc4", b"\xff\xf1\x50\x80"):
        text = base64.b64encode(head + bytes(200)).decode()
        assert text.startswith("/")
        assert read_items(text, Modality.AUDIO, max_items=1)[0].source.url == f"data:;base64,{text}"


def test_hashes_are_of_pictures_only() -> None:
    raw = {"url": "data:,x", "content_hash": "sha256:" + "aB" * 32}
    assert read_items(raw, Modality.IMAGE, max_items=1)[0].sha256 == bytes([0xAB] * 32)
    assert read_items(raw, Modality.VIDEO, max_items=1)[0].sha256 is None


def test_items_come_from_json() -> None:
    body = json.loads('{"mm_items": [{"url": "data:,x", "fps": 1e0}]}')
    assert read_items(body["mm_items"], Modality.VIDEO, max_items=1)[0].source.options.fps == 1.0
