"""The store on this host: what is hot and cold, what goes, what is left after damage, removal and full file systems."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.cache.l3 import local as local_module
from epd.cache.l3 import open as open_module
from epd.cache.l3.base import NodeFailed
from epd.cache.l3.catalogue import Catalogue
from epd.cache.l3.client import StoreClient
from epd.cache.l3.local import LocalNode
from epd.cache.l3.mover import Mover
from epd.cache.l3.open import cold_root, hot_root, open_local, open_store
from epd.cache.l3.shelf import Shelf
from tests.fakes.store_calls import StoreCalls

SEGMENT = 1 << 16
MEMORY = 8 * SEGMENT
DISK = 16 * SEGMENT
VALUE = 3000


class Place:
    """Two directories, and nodes that work on them."""

    def __init__(self, root: Path) -> None:
        self.hot = root / "hot"
        self.cold = root / "cold"

    def open(self, *, memory: int = MEMORY, disk: int = DISK) -> LocalNode:
        return LocalNode(self.hot, self.cold, memory_bytes=memory, disk_bytes=disk, segment_bytes=SEGMENT)

    def files(self) -> list[Path]:
        return sorted([*self.hot.glob("*.seg"), *self.cold.glob("*.seg")])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def value(number: int, seed: int = 0) -> bytes:
    return random.Random(number * 1000 + seed).randbytes(VALUE)


def name(number: int) -> bytes:
    return b"f%016d" % number


def put(node: LocalNode, numbers: range | list[int], *, batch: int = 7) -> int:
    """How many of them are kept."""
    num_kept = 0
    numbers = list(numbers)
    for start in range(0, len(numbers), batch):
        some = numbers[start : start + batch]
        num_kept += sum(node.put([(name(number), [value(number)]) for number in some], timeout_s=1))
    return num_kept


def found(node: LocalNode, numbers: range | list[int]) -> set[int]:
    """Those that are there; what is there is right."""
    there: set[int] = set()
    numbers = list(numbers)

    def sink(index: int, content: memoryview | None) -> None:
        if content is not None:
            assert bytes(content) == value(numbers[index])
            there.add(numbers[index])

    node.get([name(number) for number in numbers], sink, timeout_s=1)
    return there


def tend(node: LocalNode) -> None:
    for _ in range(1000):
        if not node.tend():
            return
    raise AssertionError("there is no end to it")


def sizes(place: Place) -> tuple[int, int]:
    def of(root: Path) -> int:
        total = 0
        for path in root.glob("*.seg"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    return of(place.hot), of(place.cold)


def test_everything_is_kept_while_there_is_room(place: Place) -> None:
    node = place.open()
    numbers = range(300)
    assert put(node, numbers) == 300
    assert found(node, numbers) == set(numbers)
    counters = node.usage().counters
    assert counters["demoted"] > 100
    assert counters.get("evicted", 0) == 0
    assert node.usage().num_records == 300
    node.close()
    again = place.open()
    assert found(again, numbers) == set(numbers)
    assert again.exists([name(number) for number in numbers], timeout_s=1) == [True] * 300
    again.close()


@pytest.mark.parametrize("disk", [DISK, 0])
@pytest.mark.parametrize("tends", [True, False])
def test_bounded_and_the_oldest_go_first(place: Place, disk: int, tends: bool) -> None:
    node = place.open(disk=disk)
    for start in range(0, 1500, 50):
        assert put(node, range(start, start + 50)) == 50
        if tends:
            tend(node)
        hot, cold = sizes(place) if disk else (sizes_of_hot(place), 0)
        assert hot <= MEMORY
        assert cold <= disk
    there = found(node, range(1500))
    num_fitting = (MEMORY + disk) // VALUE
    assert there == set(range(min(there), 1500)), "a hole: something older outlived something newer"
    assert len(there) > 0.6 * num_fitting
    assert node.usage().num_records == len(there)
    assert node.usage().counters["evicted"] == 1500 - len(there)
    node.close()


def sizes_of_hot(place: Place) -> int:
    return sum(path.stat().st_size for path in place.hot.glob("*.seg"))


@pytest.mark.parametrize("disk", [DISK, 0])
@pytest.mark.parametrize("how", ["get", "touch"])
def test_what_is_used_stays(place: Place, disk: int, how: str) -> None:
    node = place.open(disk=disk)
    used = list(range(0, 100, 10))
    put(node, range(100))
    for start in range(100, 2000, 50):
        put(node, range(start, start + 50))
        if how == "get":
            assert found(node, used) == set(used)
        else:
            node.touch([name(number) for number in used], timeout_s=1)
        tend(node)
    assert found(node, used) == set(used)
    assert found(node, [5, 15, 25]) == set()
    assert node.usage().counters["promoted"] > 0
    node.close()


def test_what_is_read_twice_becomes_hot(place: Place) -> None:
    node = place.open()
    put(node, range(300))
    for _ in range(2):
        assert found(node, [0]) == {0}
    tend(node)
    cold_reads = node.usage().counters["cold_reads"]
    assert found(node, [0]) == {0}
    assert node.usage().counters["cold_reads"] == cold_reads
    # The copy on disk still stands behind it, and both die together.
    node.discard([name(0)], timeout_s=1)
    node.close()
    assert found(place.open(), [0]) == set()


def test_a_value_larger_than_a_segment_is_not_kept(place: Place) -> None:
    node = place.open()
    large = bytes(SEGMENT)
    assert node.put([(b"large", [large]), (name(1), [value(1)])], timeout_s=1) == [False, True]
    assert node.usage().counters["unkept"] == 1
    assert found(node, [1]) == {1}
    node.close()


def test_an_overwritten_value_does_not_come_back(place: Place) -> None:
    """Not when its successor is evicted, not for who opens the store later."""
    first, second = place.open(), place.open()
    put(first, [0])
    assert second.put([(name(0), [b"newer"])], timeout_s=1) == [True]
    put(second, range(1, 1500))
    for node in (first, second, place.open()):
        got: list[bytes | None] = []
        node.get([name(0)], lambda _, content, got=got: got.append(content and bytes(content)), timeout_s=1)
        assert got in ([None], [b"newer"])
        node.close()


def test_a_writer_that_ended_leaves_its_segment_to_the_next(place: Place) -> None:
    for number in range(20):
        node = place.open()
        put(node, [number])
        node.close()
    assert len(place.files()) == 1
    assert found(place.open(), range(20)) == set(range(20))


def test_writers_side_by_side_have_segments_of_their_own(place: Place) -> None:
    nodes = [place.open() for _ in range(3)]
    for number in range(60):
        put(nodes[number % 3], [number])
    assert len(place.files()) == 3
    for node in nodes:
        assert found(node, range(60)) == set(range(60))
        node.close()


def test_measuring_takes_no_notice_of_what_is_new(place: Place) -> None:
    """A look that nobody looked at would hide a segment for ever."""
    reader, writer = place.open(), place.open()
    put(writer, range(3))
    # Longer ago than clocks are coarse.
    time.sleep(0.1)
    shelf = Shelf(place.hot, max_bytes=MEMORY, is_hot=True)
    catalogue = Catalogue(shelf, None)
    catalogue.refresh()
    put(writer, range(3, 60))
    time.sleep(0.1)
    assert shelf.measure() == sizes_of_hot(place)
    catalogue.refresh()
    assert len(catalogue) == 60
    assert found(reader, range(60)) == set(range(60))
    catalogue.close()
    reader.close()
    writer.close()


def test_a_shelf_is_looked_at_in_the_order_in_which_things_move(place: Place) -> None:
    """Whatever moves between the looks at the two shelves is seen on one of them."""

    class Watched(Shelf):
        def look(self) -> set[str] | None:
            names = super().look()
            while node.tend():
                pass
            return names

    for hot_kind, cold_kind in ((Watched, Shelf), (Shelf, Watched)):
        node = place.open()
        while node.usage().used_bytes < MEMORY - SEGMENT or not node.tend():
            numbers = range(node.usage().num_records or 0, (node.usage().num_records or 0) + 5)
            assert put(node, numbers) == 5
        everything = node.usage().num_records
        catalogue = Catalogue(
            hot_kind(place.hot, max_bytes=MEMORY, is_hot=True), cold_kind(place.cold, max_bytes=DISK, is_hot=False)
        )
        num_demoted = node.usage().counters.get("demoted", 0)
        catalogue.refresh()
        assert node.usage().counters["demoted"] > num_demoted
        assert len(catalogue) == everything
        catalogue.close()
        node.close()
        shutil.rmtree(place.hot)
        shutil.rmtree(place.cold)


def test_many_deaths_at_once_are_all_heard_of(place: Place) -> None:
    killer, other = place.open(memory=32 * SEGMENT), place.open(memory=32 * SEGMENT)
    names = [name(number) for number in range(3000)]
    assert all(killer.put([(some, [b"x"]) for some in names], timeout_s=1))
    assert all(other.exists(names, timeout_s=1))
    for batch in (names[:5], names[5:2900]):
        killer.discard(batch, timeout_s=1)
        assert not any(other.exists(batch, timeout_s=1))
    assert all(other.exists(names[2900:], timeout_s=1))
    for node in (killer, other):
        node.close()


def test_more_writers_than_segments(place: Place) -> None:
    nodes = [place.open() for _ in range(10)]
    kept = [put(node, [number]) for number, node in enumerate(nodes)]
    assert kept == [1] * 8 + [0] * 2
    assert nodes[9].usage().counters["unkept"] == 1
    assert found(nodes[9], range(10)) == set(range(8))
    nodes[0].close()
    assert put(nodes[9], [9]) == 1
    for node in nodes[1:]:
        node.close()


def spoil(path: Path, files: list[Path], rng: random.Random) -> None:
    """In place, as whoever has it open sees it."""
    content = bytearray(path.read_bytes())
    if not content:
        return
    match rng.randrange(6):
        case 0:
            del content[rng.randrange(len(content)) :]
        case 1:
            at = rng.randrange(len(content))
            content[at : at + 4096] = rng.randbytes(4096)
        case 2:
            for _ in range(50):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case 3:
            content[:64] = rng.choice((bytes(64), rng.randbytes(64), b"MIMOKVS0" + bytes(content[8:64])))
        case 4:
            at = rng.randrange(len(content)) // 8 * 8
            content[64 : 64 + len(content) - at] = content[at:]
        case _:
            content = bytearray(rng.choice(files).read_bytes())
    with path.open("r+b") as file:
        file.write(content)
        file.truncate(len(content))


@pytest.mark.parametrize("seed", range(6))
def test_any_damage_to_the_files_gives_misses(place: Place, seed: int) -> None:
    """Whatever is done to them, also while they are in use, a client gets what was put or nothing."""
    rng = random.Random(seed)
    values = {name(number): value(number) for number in range(150)}
    clients = [StoreCalls(StoreClient([place.open()], timeout_s=5)) for _ in range(2)]
    num_found = 0
    for turn in range(4):
        assert all(clients[turn % 2].put(values))
        files = place.files()
        for path in rng.sample(files, min(3, len(files))):
            # Somebody may be moving it.
            with contextlib.suppress(FileNotFoundError):
                spoil(path, files, rng)
        clients.append(StoreCalls(StoreClient([place.open()], timeout_s=5)))
        for calls in clients:
            for key, content in calls.get(dict.fromkeys(values, VALUE)).items():
                assert content in (None, values[key])
                num_found += content is not None
        clients.pop(0).client.close()
        more = {name(1000 * turn + number): value(number) for number in range(500, 520)}
        assert all(clients[0].put(more))
        assert clients[0].get(dict.fromkeys(more, VALUE)) == more
    assert num_found > 500
    for calls in clients:
        calls.client.close()
        assert calls.client.stats().failures == 0


def test_damaged_values_are_counted_by_the_client(place: Place) -> None:
    calls = StoreCalls(StoreClient([place.open()], timeout_s=5))
    values = {name(number): value(number) for number in range(20)}
    assert all(calls.put(values))
    (path,) = place.files()
    content = path.read_bytes()
    spoiled = [content.index(values[name(number)]) + 100 for number in (3, 7)]
    with path.open("r+b") as file:
        for at in spoiled:
            file.seek(at)
            file.write(b"spoiled")
    got = calls.get(dict.fromkeys(values, VALUE))
    assert {key for key, content in got.items() if content is None} == {name(3), name(7)}
    assert all(content in (None, values[key]) for key, content in got.items())
    assert calls.client.stats().corrupt == 2
    calls.client.close()


def test_files_of_others_are_left_alone_or_set_aside(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    node = place.open()
    put(node, range(10))
    node.close()
    for root in (place.hot, place.cold):
        (root / "notes.txt").write_text("mine")
        (root / "other.seg").write_text("mine")
        (root / f"{1:020d}-0000abcd.seg").write_bytes(b"MIMOKVS0" + bytes(200))
        (root / f"{2:020d}-0000abcd.seg").symlink_to("/etc/passwd")
        (root / f"{3:020d}-0000abcd.seg").mkdir()
        os.mkfifo(root / f"{4:020d}-0000abcd.seg")
    (place.hot / ".new-left-over.seg").write_bytes(b"torn")
    again = place.open()
    assert found(again, range(10)) == set(range(10))
    assert put(again, range(10, 20)) == 10
    assert again.usage().counters["damaged_files"] == 8
    assert "set aside" in caplog.text
    for root in (place.hot, place.cold):
        assert (root / "notes.txt").read_text() == (root / "other.seg").read_text() == "mine"
        assert not (root / f"{1:020d}-0000abcd.seg").exists()
    assert not (place.hot / ".new-left-over.seg").exists()
    again.close()


@pytest.mark.parametrize("which", ["hot", "cold", "both", "files"])
def test_removed_while_in_use_it_begins_anew(place: Place, which: str) -> None:
    nodes = [place.open(), place.open()]
    for node in nodes:
        put(node, range(150))
    for root in (place.hot, place.cold):
        if which in (root.name, "both"):
            shutil.rmtree(root)
        elif which == "files":
            for path in root.glob("*.seg"):
                path.unlink()
    # So long may it take to be noticed.
    time.sleep(0.02)
    for node in nodes:
        there = found(node, range(150))
        assert not there if which in ("both", "files") else True
        tend(node)
    assert put(nodes[0], range(500, 520)) == 20
    assert put(nodes[1], range(520, 540)) == 20
    for node in (*nodes, place.open()):
        assert found(node, range(500, 540)) == set(range(500, 540))
        node.close()


def test_what_dies_while_it_is_moved_is_dead_where_it_arrives(place: Place) -> None:
    nodes = [
        LocalNode(place.hot, place.cold, memory_bytes=8 << 20, disk_bytes=64 << 20, segment_bytes=2 << 20)
        for _ in range(2)
    ]
    large = random.Random(0).randbytes(100_000)
    number = 0
    while not nodes[0].tend():
        assert nodes[0].put([(name(number), [large])], timeout_s=1) == [True]
        number += 1
    # It has begun; half of the oldest segment is copied, and not yet to be seen.
    assert nodes[0].tend()
    assert not list(place.cold.glob("[0-9]*.seg"))
    nodes[1].discard([name(0)], timeout_s=1)
    assert nodes[1].put([(name(1), [b"newer"])], timeout_s=1) == [True]
    tend(nodes[0])
    assert list(place.cold.glob("[0-9]*.seg"))
    for node in (*nodes, place.open()):
        got: dict[int, bytes | None] = {}
        node.get(
            [name(number) for number in range(3)],
            lambda i, content, got=got: got.update({i: content and bytes(content)}),
            timeout_s=1,
        )
        assert got == {0: None, 1: b"newer", 2: large}
        node.close()


def test_what_a_killed_process_left_half_moved_takes_no_room_for_long(place: Place) -> None:
    node = place.open()
    for root in (place.hot, place.cold):
        with (root / ".new-00000000000000000001-0000abcd.seg").open("wb") as left_over:
            left_over.truncate(7 * SEGMENT)
    assert put(node, range(350)) == 350
    assert found(node, range(350)) == set(range(350))
    assert not [path for root in (place.hot, place.cold) for path in root.glob(".new-*1-0000abcd.seg")]
    node.close()


def test_a_segment_that_is_moved_is_not_written_to(place: Place) -> None:
    node = place.open()
    assert put(node, [0]) == 1
    ended, *others = (place.open() for _ in range(7))
    for number, other in enumerate((ended, *others), 1):
        assert put(other, [number]) == 1
    ended.close()
    assert put(node, range(100, 112)) == 12
    assert node.tend(), "there is no room for another segment, and one that can be moved"
    # It has room for these.
    numbers = range(112, 125)
    assert put(node, numbers) == len(numbers)
    tend(node)
    assert found(node, numbers) == set(numbers)
    for other in (node, *others):
        other.close()
    assert found(place.open(), range(130)) == {*range(8), *range(100, 125)}


def test_what_its_writer_added_last_is_moved_with_the_rest(place: Place) -> None:
    writer = place.open()
    put(writer, range(3))
    catalogue = Catalogue(
        Shelf(place.hot, max_bytes=MEMORY, is_hot=True), Shelf(place.cold, max_bytes=DISK, is_hot=False)
    )
    catalogue.refresh()
    mover = Mover(catalogue, Counter())
    assert not mover.begin(None), "it is being written"
    put(writer, range(3, 6))
    writer.close()
    assert mover.begin(None)
    while not mover.step():
        pass
    mover.finish()
    catalogue.close()
    assert not list(place.hot.glob("[0-9]*.seg"))
    assert found(place.open(), range(6)) == set(range(6))


@contextlib.contextmanager
def small_file_system(root: Path, size_bytes: int) -> Iterator[None]:
    root.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(root)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_memory_that_is_smaller_than_it_should_be(place: Place) -> None:
    with small_file_system(place.hot, 3 * SEGMENT + 4096):
        node = place.open()
        assert put(node, range(200)) == 200
        assert found(node, range(200)) == set(range(200))
        assert node.usage().counters["full"] > 0
        node.close()


def test_full_memory_keeps_nothing_and_fails_nobody(place: Place) -> None:
    with small_file_system(place.hot, 4 * SEGMENT):
        node = place.open(disk=0)
        assert put(node, range(10)) == 10
        (place.hot / "filler").write_bytes(bytes(100))
        with contextlib.suppress(OSError), (place.hot / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(4096))
        assert put(node, range(10, 60), batch=1) < 50
        assert node.usage().counters["unkept"] > 0
        there = found(node, range(60))
        assert set(range(10)) <= there
        (place.hot / "filler").unlink()
        assert put(node, range(100, 110)) == 10
        assert found(node, range(100, 110)) == set(range(100, 110))
        node.close()


def test_a_full_disk_costs_the_oldest(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with small_file_system(place.cold, 3 * SEGMENT):
        node = place.open()
        for start in range(0, 600, 50):
            assert put(node, range(start, start + 50)) == 50
            tend(node)
            newest = range(max(0, start - 40), start + 50)
            assert found(node, newest) == set(newest)
        assert node.usage().counters["failed_demotions"] > 0
        assert "cannot write to its directory" in caplog.text
        assert not list(place.cold.glob(".new-*"))
        node.close()


def test_a_stopped_process_holds_up_nobody_for_long(place: Place) -> None:
    node = place.open()
    put(node, range(10))
    with (place.hot / "lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begun_s = time.monotonic()
        assert found(node, range(10)) == set(range(10))
        assert put(node, [10]) == 1
        node.tend()
        assert time.monotonic() - begun_s < 0.5
        # Putting something else in its place needs the lock.
        assert node.put([(name(0), [b"other"])], timeout_s=0.1) == [False]
        with pytest.raises(NodeFailed, match="lock"):
            node.discard([name(1)], timeout_s=0.1)
        assert time.monotonic() - begun_s < 4
    assert found(node, range(11)) == set(range(11))
    node.close()


def test_nobody_else_may_read_it(place: Place) -> None:
    node = place.open()
    put(node, range(200))
    for root in (place.hot, place.cold):
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}
    node.close()


def test_a_directory_of_somebody_else_is_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    place.hot.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NodeFailed, match="not a directory of this user"):
        place.open()
    place.hot.unlink()
    place.hot.write_text("a file")
    with pytest.raises(NodeFailed):
        place.open()


def test_too_little_memory_is_refused(place: Place) -> None:
    with pytest.raises(NodeFailed, match="allowed"):
        place.open(memory=1000)


@pytest.mark.parametrize("where", ["file", "below a file", "proc", "unwritable", "foreign"])
def test_a_directory_that_is_none_is_named_and_nothing_is_left_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(open_module, "SHARED_MEMORY", shared)
    directory = tmp_path / "kv"
    if where in ("file", "below a file"):
        directory.write_bytes(b"")
        directory = directory if where == "file" else directory / "deep"
    elif where == "proc":
        directory = Path("/proc/kv")
    elif where == "unwritable":
        cold_root(directory).mkdir(parents=True)
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:
        directory.mkdir()
        cold_root(directory).symlink_to(tmp_path)
    with pytest.raises(NodeFailed, match=f"needs a directory that can be written.*and {directory} is none") as refused:
        open_local(directory, memory_bytes=1 << 20, disk_bytes=1 << 20)
    assert str(shared) not in str(refused.value)
    assert list(shared.iterdir()) == []


def test_a_start_that_fails_later_leaves_nothing_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(open_module, "SHARED_MEMORY", shared)

    def fails(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(local_module, "Deaths", fails)
        with pytest.raises(NodeFailed, match=f"cannot open the local KV store in {tmp_path}/kv/.*No space left"):
            open_local(tmp_path / "kv", memory_bytes=1 << 20, disk_bytes=1 << 20)
        assert list(shared.iterdir()) == []
    node = open_local(tmp_path / "kv", memory_bytes=1 << 20, disk_bytes=1 << 20)
    # One that is there stays.
    with pytest.raises(NodeFailed, match=r"of 1,048,576 bytes of memory keeps no value of 300,000 bytes; allowed: eng"):
        open_local(tmp_path / "kv", memory_bytes=1 << 20, disk_bytes=1 << 20, largest_bytes=300_000)
    assert node.exists([b"a"], timeout_s=1) == [False]
    node.close()


def test_segments_have_room_for_the_largest_value(place: Place) -> None:
    largest = 250_000
    node = LocalNode(place.hot, place.cold, memory_bytes=1 << 20, disk_bytes=1 << 20, largest_bytes=largest)
    assert list(node.put([(name(0), [bytes(largest)]), (name(1), [bytes(300_000)])], timeout_s=5)) == [True, False]
    assert "a value of 300,0" in node.why_unkept
    assert "engine.kv_store_memory_bytes" in node.why_unkept
    node.close()


def test_urls(tmp_path: Path) -> None:
    settings = {"memory_bytes": 1 << 20, "disk_bytes": 1 << 20, "io_bytes": 4096, "timeout_s": 0.05, "ttl_s": None}
    directory = tmp_path / "some" / "where"
    try:
        client = open_store(f"local:{directory}", **settings)  # type: ignore[arg-type]
        calls = StoreCalls(client)
        assert calls.put({b"a": b"1"}) == (True,)
        client.close()
        node = open_local(directory, memory_bytes=1 << 20, disk_bytes=0)
        assert node.exists([b"a"], timeout_s=1) == [True]
        node.close()
        assert cold_root(directory).is_dir()
        assert str(os.geteuid()) in hot_root(directory).name
        assert hot_root(directory) != hot_root(tmp_path)
    finally:
        shutil.rmtree(hot_root(directory), ignore_errors=True)
    with pytest.raises(ValueError, match=r"allowed: local, local:/DIR, redis"):
        open_store("ftp://host", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("disk", [0, 6 * SEGMENT])
@pytest.mark.parametrize("seed", range(3))
def test_any_history_with_little_room(place: Place, seed: int, disk: int) -> None:
    """Three processes put, overwrite, discard, read, touch, move and restart; a value is the last one, or gone."""
    rng = random.Random(seed)
    nodes = [place.open(memory=6 * SEGMENT, disk=disk) for _ in range(3)]
    last: dict[int, int | None] = {}
    num_hits = 0
    for step in range(600):
        which = rng.randrange(3)
        node = nodes[which]
        numbers = [int(rng.triangular(0, 300, 0)) for _ in range(4)]
        what = rng.choice(("put", "put", "put", "get", "get", "touch", "discard", "tend", "tend", "reopen"))
        if what == "put":
            numbers = sorted(set(numbers))
            seeds = [step if rng.random() < 0.2 else 0 for _ in numbers]
            items = [(name(number), [value(number, some)]) for number, some in zip(numbers, seeds, strict=True)]
            kept = node.put(items, timeout_s=1)
            assert all(kept)
            last.update(zip(numbers, seeds, strict=True))
        elif what == "get":
            got: list[bytes | None] = [b""] * len(numbers)

            def sink(index: int, content: memoryview | None, got: list[bytes | None] = got) -> None:
                got[index] = None if content is None else bytes(content)

            there = node.exists([name(number) for number in numbers], timeout_s=1)
            node.get([name(number) for number in numbers], sink, timeout_s=1)
            assert there == [content is not None for content in got]
            for number, content in zip(numbers, got, strict=True):
                seed_of_last = last.get(number)
                right = None if seed_of_last is None else value(number, seed_of_last)
                assert content in (None, right), f"step {step}: {number} has another value than the last"
                num_hits += content is not None
        elif what == "touch":
            node.touch([name(number) for number in numbers], timeout_s=1)
        elif what == "discard":
            node.discard([name(numbers[0])], timeout_s=1)
            last[numbers[0]] = None
        elif what == "tend":
            node.tend()
        elif rng.random() < 0.3:
            node.close()
            nodes[which] = place.open(memory=6 * SEGMENT, disk=disk)
        if step % 20 == 0:
            hot_bytes, cold_bytes = sizes_of_hot(place), sum(path.stat().st_size for path in place.cold.glob("*"))
            assert hot_bytes <= 6 * SEGMENT
            assert cold_bytes <= disk
    assert num_hits > 60
    for node in nodes:
        node.close()


@pytest.mark.parametrize("tends", [True, False])
def test_files_open_and_records_known_are_bounded_however_much_comes(
    place: Place, tends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times what the store has room for, of which some is read, written again and discarded."""
    max_open_cold = 3
    monkeypatch.setattr("epd.cache.l3.catalogue._MAX_OPEN_COLD", max_open_cold)
    node, rng = place.open(), random.Random(7)
    # One is being moved: its copy is open, too.
    most_open = MEMORY // SEGMENT + max_open_cold + 1
    num_files = 0
    for number in range(0, 5 * (MEMORY + DISK) // VALUE, 4):
        put(node, range(number, number + 4))
        older = name(rng.randrange(number + 4))
        node.get([older], lambda index, value: None, timeout_s=1)
        if number % 16 == 0:
            node.put([(older, [value(number, seed=1)])], timeout_s=1)
            node.discard([name(rng.randrange(number + 4))], timeout_s=1)
        if tends:
            node.tend()
        num_files = max(num_files, len(place.files()))
        assert len(open_segments(place)) <= most_open, number
    assert num_files > most_open
    assert node.usage().num_records <= (MEMORY + DISK) // VALUE
    node.close()
    assert open_segments(place) == []


def open_segments(place: Place) -> list[str]:
    """Segments of the store that this process has open, those without a name included."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(descriptor.readlink())
            if target.startswith(str(place.hot.parent)) and ".seg" in target:
                found.append(target)
    return found
