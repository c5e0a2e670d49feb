"""What is named on a command line or in a manifest, with which options, and where its output lies."""

import glob
import json
import os
from pathlib import Path

import pytest

from cli.encode_inputs import Input, check_names, check_places, find_inputs
from cli.load import ConfigError
from cli.media_files import refuse_unreadable
from cli.media_search import matches
from preprocess.types import MediaOptions, Modality

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with media in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "photos/b.jpg", "photos/deep/c.mp4", "photos/deep/d.txt", "photos/deep/e.JPG", "odd[1].png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def find(
    *arguments: str,
    manifests: tuple[str, ...] = (),
    modality: Modality | None = None,
    options: MediaOptions | None = None,
    recursive: bool = True,
) -> list[Input]:
    return find_inputs(arguments, manifests, modality=modality, options=options or MediaOptions(), recursive=recursive)


def locations(*arguments: str, modality: Modality | None = None, recursive: bool = True) -> list[str]:
    return [item.location for item in find(*arguments, modality=modality, recursive=recursive)]


def manifest(*lines: object) -> str:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path("list").write_text("\n".join(text) + "\n")
    return "list"


def test_directories_patterns_and_names() -> None:
    below = ["photos/b.jpg", "photos/deep/c.mp4", "photos/deep/e.JPG"]
    assert locations("photos") == below
    assert locations("photos", recursive=False) == ["photos/b.jpg"]
    assert locations("photos/**") == below
    assert locations("**/*.mp4") == ["photos/deep/c.mp4"]
    assert locations("phot*") == below
    assert locations("phot*", recursive=False) == ["photos/b.jpg"]
    assert locations("photos/deep/[a-d].*") == ["photos/deep/c.mp4"]
    # A file of just this name is meant, whatever else the pattern would match.
    assert locations("odd[1].png") == ["odd[1].png"]
    # None twice, in the order of their first naming.
    assert locations("photos/deep/c.mp4", "photos") == [below[1], below[0], below[2]]
    assert locations("photos/deep", modality=AUDIO) == [below[1], "photos/deep/d.txt", below[2]]
    assert [item.modality for item in find("photos")] == [IMAGE, VIDEO, IMAGE]


@pytest.mark.parametrize("argument", ["missing.png", "photos/deep/d.txt", "photos/*.mp4", "no/**"])
def test_what_names_nothing_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find("a.png", argument)
    assert argument in str(refused.value)


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to encode"):
        find()


def test_urls() -> None:
    png, unknown, data = find("https://h/x/y.png?size=1", "HTTP://h/", "data:audio/wav;base64,AAAA")
    assert [item.modality for item in (png, unknown, data)] == [IMAGE, None, AUDIO]
    assert all(item.is_url for item in (png, unknown, data))
    assert png.label == png.name == "https://h/x/y.png?size=1"
    assert png.place.startswith("h/x/y.png-")
    assert unknown.place.startswith("h-")
    assert find("http://h/a/../b.png#c")[0].place == "h/a/b.png"
    assert find("https://h/x/y.png?size=2")[0].place != png.place


def test_a_manifest() -> None:
    path = manifest(
        "a.png",
        "",
        {"path": "photos/deep/c.mp4", "id": "clips/one", "num_frames": 8},
        {"url": "https://h/v", "modality": "video", "fps": 3, "use_audio": False},
        "https://h/w.wav",
        {"path": "https://h/p.png"},
        {"path": "not/there/either.jpg"},
        "who-knows",
    )
    items = find(manifests=(path,), options=MediaOptions(max_frames=16, detail="low"))
    assert [(item.location, item.is_url, item.modality, item.id) for item in items] == [
        ("a.png", False, IMAGE, None),
        ("photos/deep/c.mp4", False, VIDEO, "clips/one"),
        ("https://h/v", True, VIDEO, None),
        ("https://h/w.wav", True, AUDIO, None),
        ("https://h/p.png", True, IMAGE, None),
        ("not/there/either.jpg", False, IMAGE, None),
        ("who-knows", False, None, None),
    ]
    # The command's options where they apply, and the line's own before them.
    assert items[0].options.applying_to(IMAGE) == MediaOptions(detail="low")
    assert items[1].options == MediaOptions(max_frames=16, num_frames=8)
    assert items[2].options == MediaOptions(max_frames=16, fps=3.0, use_audio=False)
    assert items[6].options == MediaOptions(max_frames=16, detail="low")
    assert (items[1].name, items[1].label, items[1].place) == ("clips/one", "photos/deep/c.mp4", "clips/one")


def test_a_manifest_of_any_bytes_from_standard_input() -> None:
    read, write = os.pipe()
    os.write(write, b'odd\xff.png\r\n{"path": "b.png"}\na.png')
    os.close(write)
    kept = os.dup(0)
    try:
        os.dup2(read, 0)
        items = find("a.png", manifests=("-",))
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(read)
    assert [item.label for item in items] == ["a.png", "odd\\xff.png", "b.png"]
    assert os.fsencode(items[1].location) == b"odd\xff.png"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"path": "a.png", "url": "https://h/"}, "one of path and url"),
        ({"id": "x"}, "one of path and url"),
        ({"path": "a.png", "speed": 2}, "unknown field 'speed'; allowed: path, url, id, "),
        ({"path": "a.png", "fps": 2}, "fps does not apply to image"),
        ({"path": "c.mp4", "fps": -2}, "fps is -2"),
        ({"path": "c.mp4", "fps": "fast"}, 'fps is "fast"; allowed: a number'),
        ({"path": "c.mp4", "max_frames": 2.5}, "max_frames is 2.5; allowed: a whole number"),
        ({"path": "ftp://h/a.png"}, "scheme ftp is not allowed; allowed: http, https, data"),
        ({"path": "c.mp4", "num_frames": 4}, "exclude each other"),
        ({"path": "c.mp4", "modality": "smell"}, 'modality is "smell"; allowed: image, video, audio'),
        ({"path": "nameless", "fps": 2}, "give modality"),
        ({"path": "a.png", "id": "../x"}, "id is '../x'"),
        ({"path": "a.png", "id": "/x"}, "id is '/x'"),
        ({"path": "a.png", "id": ""}, "id is ''"),
        ({"path": "a.png", "id": "__metadata__"}, "__metadata__"),
        ({"url": "a.png"}, "does not begin with http"),
        ({"path": "a\0.png"}, "zero byte"),
        ("{not json", "broken JSON: "),
    ],
)
def test_a_wrong_line_is_named(line: object, words: str) -> None:
    path = manifest("a.png", "", line)
    with pytest.raises(ConfigError) as refused:
        find(manifests=(path,), options=MediaOptions(fps=1.0))
    assert str(refused.value).startswith("list, line 3: ")
    assert words in str(refused.value)


def test_what_editors_and_people_put_into_a_manifest() -> None:
    Path("list").write_bytes(b"\xef\xbb\xbf# mine\r\n#\na.png\n#2.png\n")
    assert [item.location for item in find(manifests=("list",))] == ["a.png", "#2.png"]


@pytest.mark.parametrize("argument", ["photos", "photos/**", "photos/**/*.jpg", "phot*", "*"])
def test_a_directory_that_cannot_be_read_is_a_failure(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path.endswith("deep"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    items = find(argument)
    assert [item.location for item in items if item.fault is None][-1] == "photos/b.jpg"
    (denied,) = [item for item in items if item.fault is not None]
    assert (denied.location, denied.fault) == ("photos/deep", "cannot be read: Permission denied")


def test_other_schemes_and_other_files_are_named() -> None:
    with pytest.raises(ConfigError, match="scheme ftp is not allowed"):
        find("ftp://h/a.png")
    os.mkfifo("pipe.png")
    with pytest.raises(ConfigError, match=r"pipe\.png: is a fifo, no file"):
        find("pipe.png")


def test_patterns_match_as_the_standard_library_says() -> None:
    for name in (".hidden/x.png", "photos/.y.png", "photos/deep/deeper/z.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x")
    Path("photos/link").symlink_to("deep")
    asked = (
        "**",
        "*",
        "photos/*",
        "*/*.png",
        ".*/*",
        "photos/**/z.*",
        "**/deep/**",
        "./photos/../a.*",
        "p*/d*/[a-d].*",
    )
    for pattern in asked:
        expected = set(map(Path, glob.glob(pattern, recursive=True))) - {Path()}
        assert set(matches(pattern, refuse_unreadable)) == expected, pattern
    # A link that leads back is gone through once.
    Path("photos/deep/back").symlink_to("..")
    assert Path("photos/deep/back/b.jpg") in matches("photos/**/b.jpg", refuse_unreadable)


def test_a_manifest_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no-list"):
        find(manifests=("no-list",))


def test_an_option_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--fps"):
        find("a.png", options=MediaOptions(fps=1.0))
    # The content may be a video.
    assert find("a.png", "https://h/", options=MediaOptions(fps=1.0))


@pytest.mark.parametrize(
    ("location", "place"),
    [
        (os.fsdecode(b"p/a\xff.png"), "p/a\\xff.png"),
        ("p/a\\xff.png", "p/a\\\\xff.png"),
        ("a.png", "a.png"),
        ("./p/../q/a.png", "q/a.png"),
        ("/data/p/a.png", "data/p/a.png"),
        ("../../a.png", "a.png"),
    ],
)
def test_outputs_lie_as_inputs_do(location: str, place: str) -> None:
    assert Input(location, False, IMAGE, MediaOptions()).place == place


def test_collisions_are_named() -> None:
    a, b = (Input(location, False, IMAGE, MediaOptions()) for location in ("p/a.png", "../p/a.png"))
    with pytest.raises(ConfigError, match=r"p/a\.png and \.\./p/a\.png would both be written to p/a\.png\.safetensors"):
        check_places([a, b], ".safetensors")
    check_names([a, b])
    with pytest.raises(ConfigError, match=r"2 files would be named p/a\.png.*q\.png"):
        check_names([a, Input("q.png", False, IMAGE, MediaOptions(), "p/a.png")])
    inside = Input("x.png", False, IMAGE, MediaOptions(), "p/a.png.safetensors/x")
    with pytest.raises(ConfigError, match="a directory for that of"):
        check_places([a, inside], ".safetensors")
