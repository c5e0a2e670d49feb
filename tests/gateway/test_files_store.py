"""Files on disk: whole or not there, whatever dies when, and whoever else uses the same root."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from epd.errors import FilesFull, FileTooLarge, UnknownFile
from epd.gateway.files import FileLimits, FileStore, FilesUnusable, StoredFile

LIMITS = FileLimits(file_max_bytes=1000, total_bytes=3000, max_count=5, ttl_s=100.0)
OWNER, OTHER = "a" * 32, "b" * 32


@contextmanager
def opened(root: Path, limits: FileLimits = LIMITS, clock: Callable[[], float] = lambda: 1000.0) -> Iterator[FileStore]:
    store = FileStore(root / "files", limits, unix_clock=clock)
    store.open()
    yield store
    store.close()


def add(store: FileStore, content: bytes = b"content", *, owner: str = OWNER, ttl_s: float = 100.0) -> StoredFile:
    arriving = store.begin(owner)
    try:
        arriving.write(content)
        return arriving.commit(filename="name", purpose="user_data", ttl_s=ttl_s)
    finally:
        arriving.abandon()


def everything(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_file_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        file = add(store)
        add(store, b"of another", owner=OTHER)
    with opened(tmp_path) as store:
        assert store.of(OWNER) == [file]
        assert store.get(OWNER, file.id) == file
        assert store.read(OWNER, file.id, max_bytes=100) == b"content"
        store.delete(OWNER, file.id)
        assert store.of(OWNER) == []
    with opened(tmp_path) as store:
        assert store.of(OWNER) == []
        assert len(store.of(OTHER)) == 1


def test_nobody_else_can_read_what_is_kept(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with opened(tmp_path) as store:
            add(store)
    finally:
        os.umask(old)
    for path in (tmp_path / "files").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, f"{path} has mode {mode:o}"


def test_another_owner_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        file = add(store)
        for call in (store.get, store.delete, store.open_content):
            with pytest.raises(UnknownFile):
                call(OTHER, file.id)
        assert store.of(OTHER) == []
        assert store.of("") == []
        assert store.get(OWNER, file.id) == file


@pytest.mark.parametrize(
    "file_id",
    [
        "",
        ".",
        "..",
        "../file-" + "0" * 32,
        "/etc/passwd",
        "file-" + "0" * 31,
        "file-" + "0" * 32 + "/content",
        "file-" + "0" * 32 + "\n",
        "file-" + "0" * 32 + "\0",
        "file-" + "A" * 32,
        "FILE-" + "0" * 32,
        "file-" + "0" * 5000,
    ],
)
def test_what_does_not_look_like_an_id_is_never_a_path(
    tmp_path: Path, file_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        monkeypatch.setattr(store, "_read", lambda *_: pytest.fail("looked up on disk"))
        for call in (store.get, store.delete, store.open_content):
            with pytest.raises(UnknownFile):
                call(OWNER, file_id)


def test_ids_are_unguessable(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        ids = [add(store).id for _ in range(4)]
    digits = "".join(file_id.removeprefix("file-") for file_id in ids)
    assert len(set(ids)) == 4
    assert len(set(digits)) > 10
    assert len({file_id[: len("file-") + 6] for file_id in ids}) == 4


def test_an_upload_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        arriving = store.begin(OWNER)
        arriving.write(b"part")
        assert everything(tmp_path)
        arriving.abandon()
        arriving.abandon()
        assert everything(tmp_path) == []
        assert store.of(OWNER) == []


def test_a_file_that_is_too_large_is_refused_when_it_becomes_so(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        arriving = store.begin(OWNER)
        arriving.write(b"x" * 1000)
        with pytest.raises(FileTooLarge, match=r"allowed: 1000 \(gateway\.file_max_bytes\)"):
            arriving.write(b"x")
        arriving.abandon()


def test_the_limits_of_one_owner_are_no_other_s(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for _ in range(3):
            add(store, b"x" * 1000)
        with pytest.raises(FilesFull, match=r"allowed: 3000 \(gateway\.files_bytes\)"):
            add(store, b"x")
        assert len(add(store, b"x", owner=OTHER).id) == 37
        for _ in range(4):
            add(store, b"x", owner=OTHER)
        with pytest.raises(FilesFull, match=r"gateway\.files_count"):
            add(store, b"x", owner=OTHER)
        store.delete(OWNER, store.of(OWNER)[0].id)
        add(store, b"x" * 1000)
        assert len([path for path in everything(tmp_path) if path.name == "content"]) == 8


def test_what_arrives_at_the_same_time_counts_together(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        add(store, b"x" * 1000)
        one, two, three = (store.begin(OWNER) for _ in range(3))
        one.write(b"x" * 1000)
        two.write(b"x" * 1000)
        with pytest.raises(FilesFull, match="1000 bytes of files are kept, and 2001 are arriving"):
            three.write(b"x")
        for upload in (two, three):
            upload.abandon()
        four = store.begin(OWNER)
        four.write(b"x" * 1000)
        assert one.commit(filename="n", purpose="vision", ttl_s=1).size_bytes == 1000
        one.abandon()
        four.abandon()
        assert store.usage() == (2, 2000)


def test_stores_that_share_a_root_keep_the_limits_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each upload believes at first that there is room for it; one after another finds out."""
    check_room = FileStore._check_room

    def check_and_dawdle(store: FileStore, owner: str, size_bytes: int) -> int:
        kept_bytes = check_room(store, owner, size_bytes)
        time.sleep(0.02)
        return kept_bytes

    monkeypatch.setattr(FileStore, "_check_room", check_and_dawdle)
    with opened(tmp_path) as one, opened(tmp_path) as two:
        uploads = [store.begin(OWNER) for store in (one, two) * 3]
        for upload in uploads:
            upload.write(b"x" * 1000)
        kept: list[StoredFile] = []
        refused: list[FilesFull] = []

        def commit(number: int) -> None:
            try:
                kept.append(uploads[number].commit(filename=str(number), purpose="vision", ttl_s=50))
            except FilesFull as error:
                refused.append(error)
            finally:
                uploads[number].abandon()

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(len(uploads))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(kept), len(refused)) == (3, 3)
        assert {file.id for file in one.of(OWNER)} == {file.id for file in two.of(OWNER)} == {file.id for file in kept}


def test_what_one_deletes_is_gone_for_the_other_and_who_reads_reads_on(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        file = add(one)
        assert two.get(OWNER, file.id) == file
        _, descriptor = two.open_content(OWNER, file.id)
        one.delete(OWNER, file.id)
        with pytest.raises(UnknownFile):
            two.get(OWNER, file.id)
        assert two.of(OWNER) == []
        assert os.read(descriptor, 100) == b"content"
        os.close(descriptor)
        with pytest.raises(UnknownFile):
            two.delete(OWNER, file.id)


def test_files_go_when_their_time_is_over(tmp_path: Path) -> None:
    now_s = 1000.0
    with opened(tmp_path, clock=lambda: now_s) as store:
        short, long = add(store, ttl_s=10.0), add(store, ttl_s=1e9)
        assert (short.expires_unix_s, long.expires_unix_s) == (1010, 1100)
        now_s = 1010.0
        with pytest.raises(UnknownFile):
            store.get(OWNER, short.id)
        assert store.of(OWNER) == [long]
        store.sweep()
        assert len(everything(tmp_path)) == 2
        now_s = 1100.0
    with opened(tmp_path, clock=lambda: now_s) as store:
        assert everything(tmp_path) == []


@pytest.mark.parametrize("damage", ["no about", "torn about", "foreign about", "no content", "short content"])
def test_what_is_torn_is_removed_at_the_start(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as store:
        broken, whole = add(store), add(store)
    directory = tmp_path / "files" / "kept" / OWNER / broken.id
    match damage:
        case "no about":
            (directory / "about.json").unlink()
        case "torn about":
            (directory / "about.json").write_bytes((directory / "about.json").read_bytes()[:-20])
        case "foreign about":
            about = json.loads((directory / "about.json").read_text()) | {"id": whole.id}
            (directory / "about.json").write_text(json.dumps(about))
        case "no content":
            (directory / "content").unlink()
        case _:
            (directory / "content").write_bytes(b"cont")
    with opened(tmp_path) as store:
        assert store.of(OWNER) == [whole]
        assert not directory.exists()


_UPLOADING = """
import sys, time
from pathlib import Path
from epd.gateway.files import FileLimits, FileStore
store = FileStore(Path(sys.argv[1]), FileLimits(file_max_bytes=9, total_bytes=9, max_count=9, ttl_s=9),
                  unix_clock=time.time)
store.open()
upload = store.begin("")
upload.write(b"half")
print("writing", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_gateway_was_writing_goes_and_what_a_living_one_is_writing_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _UPLOADING, str(tmp_path / "files")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        with opened(tmp_path) as store:
            assert [path.name for path in everything(tmp_path)] == ["content"]
            other.kill()
            other.wait()
            store.sweep()
            assert everything(tmp_path) == []


def test_links_and_strangers_in_the_root_are_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    with opened(tmp_path) as store:
        file = add(store)
    root = tmp_path / "files"
    (root / "arriving" / "link").symlink_to(outside)
    (root / "kept" / "link").symlink_to(outside)
    (root / "kept" / OWNER / "link").symlink_to(outside)
    content = root / "kept" / OWNER / file.id / "content"
    content.unlink()
    content.symlink_to(outside / "precious")
    with opened(tmp_path) as store:
        store.sweep()
        with pytest.raises((UnknownFile, OSError)):
            store.open_content(OWNER, file.id)
    assert (outside / "precious").read_text() == "keep me"


def test_a_root_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("in the way")
    with pytest.raises(FilesUnusable, match=r"files_dir is .*files, which cannot be used: .*; name another"):
        FileStore(tmp_path / "files", LIMITS, unix_clock=time.time).open()
