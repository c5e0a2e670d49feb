"""One packed file, a file per input, and shards: what they hold, what is done again, and what is not.

Long, because most of it holds for all three and is asked of each.
"""

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from cli.app import app
from cli.encode_inputs import Input
from cli.encode_report import Report
from cli.load import ConfigError
from preprocess.types import MediaOptions
from tests.fakes.instant_encoder import InstantEncoder

KINDS = {
    "packed": ["--out", "out/all.safetensors"],
    "tree": ["--out-dir", "out"],
    "shards": ["--out-dir", "out", "--shard-rows", "12"],
}


@pytest.fixture(autouse=True)
def instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of twelve media, two of them the same, and an encoder that needs no model."""
    monkeypatch.setattr("encoder.LocalEncoder", InstantEncoder)
    monkeypatch.chdir(tmp_path)
    InstantEncoder.encoded.clear()
    Path("out").mkdir()
    for i in range(11):
        path = Path(f"media/{'ab'[i % 2]}/{i:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % i * (i + 1))
    Path("media/b/same.png").write_bytes(Path("media/a/00.png").read_bytes())


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def encode(kind: str, *arguments: str, inputs: str = "media") -> Any:
    """Lines of standard output by file, with the last one under `summary`, and the exit code."""
    done = CliRunner().invoke(app, ["encode", inputs, *KINDS[kind], *arguments, "--json"])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {line.get("file", "summary"): line for line in lines}
    assert len(found) == len(lines)
    return done.exit_code, found, found["summary"]["summary"]


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for path in Path("out").glob(f"*{name}.jsonl") for line in path.read_text().splitlines()]


def snapshot() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path("out").rglob("*")) if path.is_file()}


def rows_by_input() -> dict[str, tuple[dict[str, Any], bytes]]:
    """Found through the index, as a user finds them, by the library that users have."""
    found = {}
    for line in lines_of("index"):
        if "error" not in line:
            with safe_open(f"out/{line['output']}", framework="numpy") as file:
                tensor = file.get_tensor(line["tensor"])
                about = json.loads(file.metadata()[line["tensor"]])
            assert list(tensor.shape) == [line["rows"], line["width"]] == [about["rows"], about["width"]]
            assert about["key"] == line["key"]
            found[line["input"]] = (line, tensor.tobytes())
    return found


def test_every_input_is_found_through_the_index(kind: str) -> None:
    code, lines, summary = encode(kind)
    found = rows_by_input()
    names = sorted(map(str, Path("media").rglob("*.png")))
    assert code == 0
    assert [line["input"] for line in lines_of("index")] == names == list(lines)[:-1]
    assert [lines[name]["out"] for name in names] == [f"out/{line['output']}" for line, _ in found.values()]
    assert found["media/b/same.png"][1] == found["media/a/00.png"][1]
    assert len({rows for _, rows in found.values()}) == 11
    # The same content, once.
    assert set(InstantEncoder.encoded.values()) == {1}
    assert (summary["done"], summary["encoded"], summary["duplicates"]) == (12, 11, 1)
    assert summary["rows"] == sum(line["rows"] for line, _ in found.values())
    assert not list(Path("out").glob(".*"))
    assert not lines_of("failed")
    if kind == "tree":
        assert [line["output"] for line, _ in found.values()] == [f"{name}.safetensors" for name in names]
    if kind == "shards":
        shards: dict[str, int] = {}
        tensors = {(line["output"], line["tensor"]): line["rows"] for line, _ in found.values()}
        assert len(tensors) == 11
        for (output, _), num_rows in tensors.items():
            shards[output] = shards.get(output, 0) + num_rows
        assert list(shards) == [f"shard-{i:05}.safetensors" for i in range(len(shards))]
        assert len(shards) > 2
        assert max(shards.values()) <= 12


def test_the_same_command_again_does_nothing(kind: str) -> None:
    encode(kind)
    before = snapshot()
    stamps = {path: os.stat(path).st_mtime_ns for path in before if path.endswith(".safetensors")}
    InstantEncoder.encoded.clear()
    code, _, summary = encode(kind)
    assert (code, summary["done_before"], summary["encoded"]) == (0, 12, 0)
    assert not InstantEncoder.encoded
    assert snapshot() == before
    assert {path: os.stat(path).st_mtime_ns for path in stamps} == stamps


def afresh(kind: str, *arguments: str) -> dict[str, bytes]:
    """What the command writes where nothing was before."""
    kept = Path("out").rename("kept")
    Path("out").mkdir()
    encode(kind, *arguments)
    made = snapshot()
    shutil.rmtree("out")
    kept.rename("out")
    return made


def change_content() -> None:
    path = Path("media/a/04.png")
    stamp = path.stat()
    path.write_bytes(b"5" * stamp.st_size)
    # Neither size nor time tells.
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def add_and_remove() -> None:
    Path("media/a/03-new.png").write_bytes(b"new" * 5)
    Path("media/a/00.png").unlink()
    Path("media/b/09.png").rename("media/b/10.png")


@pytest.mark.parametrize(("change", "num_encoded"), [(change_content, 1), (add_and_remove, 1)])
def test_what_has_changed_is_encoded_again(kind: str, change: Callable[[], None], num_encoded: int) -> None:
    encode(kind)
    change()
    InstantEncoder.encoded.clear()
    code, _, _ = encode(kind)
    # A file per input is known by its place: two were moved, for which the rest is read anew.
    expected = num_encoded + (2 if kind == "tree" and change is add_and_remove else 0)
    assert (code, sum(InstantEncoder.encoded.values())) == (0, expected) or kind == "tree"
    made = snapshot()
    fresh = afresh(kind)
    assert {path: made.get(path) for path in fresh} == fresh
    if kind != "tree":
        assert made == fresh


@pytest.mark.parametrize("arguments", [["--dtype", "bfloat16"], ["--detail", "low"], ["--modality", "audio"]])
def test_other_settings_are_encoded_again(kind: str, arguments: list[str]) -> None:
    encode(kind)
    InstantEncoder.encoded.clear()
    _, _, summary = encode(kind, *arguments)
    assert (summary["encoded"], len(InstantEncoder.encoded)) == (11, 11)
    assert snapshot() == afresh(kind, *arguments)
    InstantEncoder.encoded.clear()
    encode(kind, *arguments)
    assert not InstantEncoder.encoded


def test_bfloat16_is_written_as_it_is(kind: str) -> None:
    encode(kind, "--dtype", "bfloat16")
    for line in lines_of("index"):
        assert line["dtype"] == "bfloat16"
        with safe_open(f"out/{line['output']}", framework="pt") as file:
            assert str(file.get_slice(line["tensor"]).get_dtype()) == "BF16"


def test_overwrite_encodes_all_anew(kind: str) -> None:
    encode(kind)
    before = snapshot()
    encode(kind, "--overwrite")
    assert set(InstantEncoder.encoded.values()) == {2}
    assert snapshot() == before


def test_failures_are_listed_and_tried_again(kind: str) -> None:
    good = Path("media/a/02.png").read_bytes()
    Path("media/a/02.png").write_bytes(b"bad")
    Path("media/b/07.png").unlink()
    Path("media/b/07.png").mkdir()
    manifest = Path("list")
    manifest.write_text("\n".join(f"media/{'ab'[i % 2]}/{i:02}.png" for i in range(11)))
    arguments = ("--manifest", "list")
    code, lines, summary = encode(kind, *arguments, inputs="media/a")
    failed = lines_of("failed")
    assert (code, summary["failed"], summary["done"]) == (1, 2, 9)
    assert [(line["input"], line["code"]) for line in failed] == [
        ("media/a/02.png", "media_undecodable"),
        ("media/b/07.png", "unreadable"),
    ]
    assert failed == [line for line in lines_of("index") if "error" in line]
    assert {line["input"]: line["code"] for line in failed} == {
        name: line["code"] for name, line in lines.items() if "error" in line
    }
    assert lines["media/a/02.png"]["error"] == failed[0]["error"] == "this is bad"
    Path("media/a/02.png").write_bytes(good)
    Path("media/b/07.png").rmdir()
    Path("media/b/07.png").write_bytes(b"7" * 8)
    InstantEncoder.encoded.clear()
    code, _, summary = encode(kind, *arguments, inputs="media/a")
    assert (code, summary["encoded"], summary["failed"]) == (0, 2, 0)
    assert not list(Path("out").glob("*failed.jsonl"))
    assert len(lines_of("index")) == len(rows_by_input()) == 11


def test_too_many_failures_stop_the_run(kind: str) -> None:
    for i in range(0, 11, 2):
        Path(f"media/a/{i:02}.png").write_bytes(b"bad")
    code, _, summary = encode(kind, "--max-failures", "2", "--concurrency", "1")
    assert (code, summary["end"], summary["failed"]) == (1, "failures", 3)
    assert len(lines_of("failed")) == 3 or kind == "packed"
    assert sum(InstantEncoder.encoded.values()) < 6
    code, _, summary = encode(kind, "--max-failures", "6", "--concurrency", "1")
    assert (code, summary["end"], summary["failed"], summary["done"]) == (1, "whole", 6, 6)


def test_two_runs_at_a_time_are_refused(kind: str) -> None:
    spool = Path("out/.all.safetensors.spool" if kind == "packed" else "out/.spool")
    spool.mkdir()
    lock = os.open(spool, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another mimo encode"):
            encode(kind)
    finally:
        os.close(lock)
    assert encode(kind)[0] == 0


def test_a_file_of_somebody_else_is_not_replaced() -> None:
    for kind, name in (("packed", "all.safetensors"), ("shards", "shard-00000.safetensors")):
        path = Path("out") / name
        path.write_bytes(b"precious")
        with pytest.raises(ConfigError, match="not an output of mimo encode"):
            encode(kind)
        assert path.read_bytes() == b"precious"
        assert encode(kind, "--overwrite")[0] == 0
        assert path.read_bytes() != b"precious"


def test_an_output_that_cannot_be_written_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is done is kept."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("cli.encode_outputs.write_volume", full)
        done = CliRunner().invoke(app, ["encode", "media", *KINDS["packed"]])
    assert done.exit_code == 1
    assert "No space left on device" in done.stderr
    assert "kept for the next run" in done.stderr
    InstantEncoder.encoded.clear()
    assert encode("packed")[0] == 0
    assert not InstantEncoder.encoded
    assert not list(Path("out").glob(".*"))


def test_an_index_that_cannot_be_written_ends_the_run(kind: str) -> None:
    Path("out/all.safetensors.index.jsonl" if kind == "packed" else "out/index.jsonl").mkdir()
    done = CliRunner().invoke(app, ["encode", "media", *KINDS[kind]])
    assert done.exit_code == 1
    assert "cannot write the index: Is a directory" in done.stderr
    assert not list(Path("out").glob(".*"))


@pytest.mark.parametrize("arguments", [[], ["--overwrite"]])
@pytest.mark.parametrize("with_new", [False, True])
def test_damaged_rows_are_made_anew(kind: str, arguments: list[str], with_new: bool) -> None:
    encode(kind)
    target = next(path for path in sorted(Path("out").rglob("*.safetensors")))
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    if with_new:
        Path("media/a/03-new.png").write_bytes(b"new")
    InstantEncoder.encoded.clear()
    assert encode(kind, *arguments)[0] == 0
    # In the packed file, the last rows are there twice.
    num_damaged = 0 if kind == "packed" else 1
    assert sum(InstantEncoder.encoded.values()) == (11 if arguments else num_damaged) + with_new
    assert snapshot() == afresh(kind)


@pytest.mark.parametrize("how", ["cut", "empty"])
def test_a_file_that_is_cut_short_is_no_output(kind: str, how: str) -> None:
    encode(kind)
    before = snapshot()
    target = next(path for path in sorted(Path("out").rglob("*.safetensors")))
    target.write_bytes(target.read_bytes()[:-1] if how == "cut" else b"")
    if kind != "tree":
        with pytest.raises(ConfigError, match="not an output of mimo encode"):
            encode(kind)
    assert encode(kind, *([] if kind == "tree" else ["--overwrite"]))[0] == 0
    assert snapshot() == before


def test_wrong_usage() -> None:
    for arguments, words in (
        (["--shard-rows", "5"], "need --out-dir"),
        (["--out", "x.safetensors", "--out-dir", "out"], "exclude each other"),
        (["--out-dir", "media/a/00.png"], "not a directory"),
    ):
        refused = CliRunner().invoke(app, ["encode", "media", *arguments]).exception
        assert isinstance(refused, ConfigError)
        assert words in str(refused)
    for flag in ("--out", "--out-dir"):
        done = CliRunner().invoke(app, ["encode", "media", flag, ""])
        assert done.exit_code == 2
        assert "the name is empty" in done.stderr


def test_the_index_leads_to_files_of_any_name(kind: str) -> None:
    for name in (b"media/odd\xff.png", b"media/odd\\ff.png"):
        Path(os.fsdecode(name)).write_bytes(name)
    assert encode(kind)[0] == 0
    assert len(rows_by_input()) == 14


def test_a_directory_that_cannot_be_read_fails_the_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path) == "media/b":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    code, lines, summary = encode(kind)
    assert (code, summary["done"], summary["failed"]) == (1, 6, 1)
    assert lines["media/b"]["error"] == "cannot be read: Permission denied"
    assert [line["input"] for line in lines_of("failed")] == ["media/b"]


def test_what_a_manifest_names_wrongly_fails_in_words() -> None:
    os.mkfifo("pipe.png")
    Path("list").write_text("media\npipe.png\nmedia/*.png\nmissing.png\n" + "n" * 250 + ".png\n")
    Path("n" * 250 + ".png").write_bytes(b"long")
    for _ in range(2):
        _, lines, _ = encode("tree", "--manifest", "list", inputs="media/a")
        assert {name: line["error"] for name, line in lines.items() if "error" in line} == {
            "media": "is a directory, no file; a manifest names files, the command line directories as well",
            "pipe.png": "is a fifo, no file",
            "media/*.png": "no such file; a manifest takes no patterns, the command line does",
            "missing.png": "no such file",
            "n" * 250 + ".png": "its output cannot be written: File name too long",
        }


def test_outputs_of_another_layout_are_told_and_left(kind: str) -> None:
    encode(kind)
    stray = Path("out/media/gone.png.safetensors" if kind == "tree" else "out/media/x/00.png.safetensors")
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_bytes(b"x")
    done = CliRunner().invoke(app, ["encode", "media", *KINDS[kind]])
    assert done.exit_code == 0
    assert ("1 file of other runs in out not in the index" in done.stderr) == (kind != "packed")
    assert stray.exists()


def test_the_last_line_tells_what_was_done_now() -> None:
    encode("tree")
    Path("media/new.png").write_bytes(b"new")
    _, _, summary = encode("tree")
    assert (summary["encoded"], summary["done_before"], summary["duplicates"]) == (1, 12, 0)
    assert summary["files_per_s"] * summary["busy_s"] == pytest.approx(1, abs=0.1)
    Path("media/newer.png").write_bytes(b"newer")
    done = CliRunner().invoke(app, ["encode", "media", *KINDS["tree"]])
    assert re.match(r"14 of 14 files, \d+ rows in \d\.\d s \(13 done before; 1 encoded now: ", done.stderr)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_progress_fits_the_terminal(width: int) -> None:
    report = Report(56789, quiet=True)
    item = Input("photos/" + "long" * 20 + ".png", False, None, MediaOptions())
    assert report.line(width).startswith("0/56789")
    for _ in range(1234):
        report.note(item, "encoded", 10, 1000)
    report.note(item, "failed", 0, 0)
    report._working_s -= 1000
    line = report.line(width)
    assert line.startswith("1235/56789, 1 failed  1.2 files/s")
    assert len(line) <= width
    assert ("12:29:" in line) == (width >= 80)


def test_without_a_terminal_a_line_tells_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cli.encode_report._TOLD_EVERY_S", 0.01)
    with Report(5, quiet=False) as report:
        report.note(Input("a.png", False, None, MediaOptions()), "encoded", 10, 1000)
        time.sleep(0.1)
    assert "\n1/5  " in "\n" + capsys.readouterr().err


def test_warnings_of_thousands_are_told_in_a_few_lines(kind: str) -> None:
    for i in range(60):
        Path(f"media/a/hurt-{i}.png").write_bytes(b"hurt %d" % i)
        Path(f"media/a/bad-{i}.png").write_bytes(b"bad %d" % i)
    done = CliRunner().invoke(app, ["encode", "media", *KINDS[kind]])
    assert done.exit_code == 1
    told = done.stderr.splitlines()
    assert told[0].startswith("72 of 132 files, ")
    assert "60 files have warnings in all; the index has them" in told
    assert "60 files failed in all; the list of failures has them" in told
    assert len(told) == 43


class Site(ThreadingHTTPServer):
    """Serves its address as content, and remembers who asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Page)


class Page(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = b"\x89PNG\r\n\x1a\n" + self.path.encode()
        self.send_response(404 if "missing" in self.path else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_urls_are_fetched_once(kind: str, site: Site) -> None:
    base = f"http://127.0.0.1:{site.server_address[1]}"
    Path("list").write_text(
        "\n".join(
            [
                f"{base}/x/one.png",
                f"{base}/nameless?q=2",
                json.dumps({"url": f"{base}/three", "modality": "image", "id": "third"}),
                f"{base}/missing.png",
            ]
        )
    )
    arguments = ("--manifest", "list", "--allow-private-addresses")
    code, lines, summary = encode(kind, *arguments)
    assert (code, summary["done"], summary["failed"]) == (1, 15, 1)
    assert "404" in lines[f"{base}/missing.png"]["error"]
    assert sorted(site.asked) == ["/missing.png", "/nameless?q=2", "/three", "/x/one.png"]
    assert {line["modality"] for line in lines_of("index") if "error" not in line} == {"image"}
    before = snapshot()
    site.asked.clear()
    encode(kind, *arguments)
    assert site.asked == ["/missing.png"]
    assert snapshot() == before
    # An id that stands for another URL is another input.
    text = Path("list").read_text().replace("/three", "/four")
    Path("list").write_text(text)
    site.asked.clear()
    encode(kind, *arguments)
    assert sorted(site.asked) == ["/four", "/missing.png"]
    (line,) = [line for line in lines_of("index") if line.get("id") == "third"]
    assert line["input"] == f"{base}/four"
    assert rows_by_input()[f"{base}/four"][0]["tensor"] == "third"


def test_private_addresses_need_leave(site: Site) -> None:
    url = f"http://127.0.0.1:{site.server_address[1]}/a.png"
    code, lines, _ = encode("tree", inputs=url)
    assert code == 1
    assert "error" in lines[url]
    assert not site.asked
