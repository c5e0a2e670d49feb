"""What carries arrays and messages between a pool and its workers, and what it refuses from them."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from preprocess.isolation.shared_arrays import ArrayPlace, Handover, Reader, Writer, put_bytes, read_bytes
from preprocess.isolation.wire import Channel, Decoded, FromWorker, Hangup, Part, Taken, ToWorker
from preprocess.types import MediaLayout, Modality

Pair = tuple[Channel[ToWorker], Channel[FromWorker]]


def handed(writer: Writer, reader: Reader, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    handover, fd = writer.put(arrays)
    assert handover.fresh == (fd is not None)
    taken = reader.take(handover, fd)
    if fd is not None:
        os.close(fd)
    return taken


def test_content_goes_over_unchanged() -> None:
    for content in (b"", b"x", os.urandom(3_000_000)):
        fd = put_bytes(content)
        assert read_bytes(fd) == content
        os.close(fd)


def test_arrays_go_over_unchanged() -> None:
    writer, reader = Writer(max_bytes=2**30), Reader(max_spare_bytes=2**20)
    random = np.random.RandomState(0)
    arrays = (
        random.randint(0, 256, (5, 7, 3)).astype(np.uint8),
        random.rand(11, 128).astype(np.float32),
        np.zeros((0, 128), dtype=np.float32),
        random.randint(0, 256, (64, 64, 3)).astype(np.uint8)[::-1, ::-1].transpose(1, 0, 2),
    )
    taken = handed(writer, reader, *arrays)
    for ours, theirs in zip(arrays, taken, strict=True):
        assert theirs.dtype == ours.dtype
        assert theirs.flags.writeable
        assert theirs.flags.c_contiguous
        np.testing.assert_array_equal(theirs, ours)


def test_a_buffer_is_used_again_only_when_the_last_view_is_gone() -> None:
    writer, reader = Writer(max_bytes=2**30), Reader(max_spare_bytes=2**20)
    ones = np.ones((100, 100), dtype=np.float32)
    (first,) = handed(writer, reader, ones)
    view = first.reshape(-1)[5:9]
    del first
    gc.collect()
    assert reader.given_back() == ((), ())
    (second,) = handed(writer, reader, 2 * ones)
    assert view.tolist() == [1, 1, 1, 1]
    del view
    kept, dropped = reader.given_back()
    assert (len(kept), dropped) == (1, ())
    writer.recycle(kept, dropped)
    handover, fd = writer.put([3 * ones])
    assert fd is None
    assert handover.buffer == kept[0]
    (third,) = reader.take(handover, None)
    assert (second == 2).all()
    assert (third == 3).all()


def mapped_bytes() -> int:
    """Of shared media in this process."""
    ranges = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "mimo-" in line
    ]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


def test_arrays_hold_no_descriptor_and_free_their_memory() -> None:
    writer, reader = Writer(max_bytes=2**30), Reader(max_spare_bytes=0)

    descriptors, before = len(os.listdir("/proc/self/fd")), mapped_bytes()
    held = [handed(writer, reader, np.full(10, number, dtype=np.float32)) for number in range(40)]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mapped_bytes() == before + 2 * 40 * 65_536
    assert [array[3] for (array,) in held] == list(range(40))
    view = held[7][0][5:]
    held.clear()
    kept, dropped = reader.given_back()
    assert (len(kept), len(dropped)) == (0, 39)
    writer.recycle(kept, dropped)
    assert view.tolist() == [7] * 5
    del view
    writer.recycle(*reader.given_back())
    assert mapped_bytes() == before


def test_spare_memory_is_bounded() -> None:
    writer, reader = Writer(max_bytes=2**30), Reader(max_spare_bytes=600_000)
    ones = np.ones(100_000, dtype=np.float32)
    before = mapped_bytes()
    held = [handed(writer, reader, ones) for _ in range(4)]
    del held
    kept, dropped = reader.given_back()
    assert (len(kept), len(dropped)) == (1, 3)
    writer.recycle(kept, dropped)
    assert mapped_bytes() == before + 2 * 458_752, "the writer's mapping and the reader's"


def test_arrays_outlive_their_reader() -> None:
    writer, reader = Writer(max_bytes=2**30), Reader(max_spare_bytes=0)
    (array,) = handed(writer, reader, np.full(10, 7, dtype=np.uint8))
    reader.close()
    del writer
    assert array.tolist() == [7] * 10
    del array
    assert reader.given_back() == ((), ())


def test_a_result_beyond_the_bound() -> None:
    with pytest.raises(MemoryError, match="takes 400 bytes, allowed are 399"):
        Writer(max_bytes=399).put([np.zeros(100, dtype=np.float32)])


@pytest.mark.parametrize(
    "place",
    [
        ArrayPlace("uint8", (65_537,), 0),
        ArrayPlace("float32", (16_384,), 64),
        ArrayPlace("uint8", (-1,), 0),
        ArrayPlace("uint8", (1,), -64),
        ArrayPlace("float32", (1,), 2),
        ArrayPlace("uint8", (2**40, 2**40), 0),
        ArrayPlace("uint8", (1, 1, 1, 1, 1), 0),
    ],
)
def test_places_outside_the_memory_are_refused(place: ArrayPlace) -> None:
    writer, reader = Writer(max_bytes=2**30), Reader(max_spare_bytes=0)
    _, fd = writer.put([np.zeros(10, dtype=np.uint8)])
    assert fd is not None
    with pytest.raises(ValueError, match=r"outside|no array"):
        reader.take(Handover(0, True, (place,)), fd)
    os.close(fd)


def test_buffers_that_cannot_be_are_refused() -> None:
    writer, reader = Writer(max_bytes=2**30), Reader(max_spare_bytes=0)
    handover, fd = writer.put([np.zeros(10, dtype=np.uint8)])
    assert fd is not None
    held = reader.take(handover, fd)
    with pytest.raises(ValueError, match="not there to be used"):
        reader.take(Handover(handover.buffer, False, handover.places), None)
    with pytest.raises(ValueError, match="not there to be used"):
        reader.take(Handover(77, False, handover.places), None)
    with pytest.raises(ValueError, match="exists already"):
        reader.take(handover, fd)
    os.close(fd)
    assert held[0].tolist() == [0] * 10


def test_memory_that_can_shrink_is_refused() -> None:
    """Cut short under a reader, it would end the whole process."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="empty"):
        Reader(max_spare_bytes=0).take(Handover(0, True, ()), fd)
    os.close(fd)
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    place = ArrayPlace("uint8", (10,), 0)
    with pytest.raises(ValueError, match="not sealed"):
        Reader(max_spare_bytes=0).take(Handover(0, True, (place,)), fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    Reader(max_spare_bytes=0).take(Handover(0, True, (place,)), fd)
    os.close(fd)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Pair]]:
    ours, theirs = socket.socketpair()
    raw = ours.dup()
    channels = (Channel[ToWorker](ours, ToWorker), Channel[FromWorker](theirs, FromWorker))
    yield raw, channels
    raw.close()
    for channel in channels:
        channel.close()


def test_large_messages_and_descriptors_in_order(pair: tuple[socket.socket, Pair]) -> None:
    _, (worker, pool) = pair
    timestamps = tuple(float(second) for second in range(8_000))
    layout = MediaLayout(Modality.VIDEO, grid_thw=(1, 2, 2), timestamps_s=timestamps)
    assert layout.timestamps_s == timestamps
    words = tuple(f"warning {number}" for number in range(5_000))
    fds = [put_bytes(bytes([number])) for number in range(3)]
    for number, fd in enumerate(fds):
        worker.send(Part(number=number, first_pair=0, pictures=Handover(0, True, ())), fd)
        os.close(fd)
    worker.send(Decoded(warnings=words))
    for number in range(3):
        message = pool.wait()
        assert isinstance(message, Part)
        assert message.number == number
        fd = pool.take_fd()
        assert read_bytes(fd) == bytes([number])
        os.close(fd)
    message = pool.wait()
    assert isinstance(message, Decoded)
    assert message.warnings == words
    with pytest.raises(Hangup, match="without its descriptor"):
        pool.take_fd()


def test_descriptors_that_nobody_takes_are_closed(pair: tuple[socket.socket, Pair]) -> None:
    _, (worker, pool) = pair
    fd = put_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    worker.send(Taken(number=1), fd)
    with pytest.raises(Hangup):
        pool.wait()  # Taken is not a worker's word
    assert len(os.listdir("/proc/self/fd")) == before + 1
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    os.close(fd)


@pytest.mark.parametrize(
    "nonsense", [b"\xff\xff\xff\x7f", b"\x01\x00\x00\x00\xc1", b"\x02\x00\x00\x00\x93\x01", b"\x00\x00\x00\x00"]
)
def test_nonsense_is_a_hangup(pair: tuple[socket.socket, Pair], nonsense: bytes) -> None:
    raw, (_, pool) = pair
    raw.sendall(nonsense)
    with pytest.raises(Hangup, match="nonsense"):
        pool.wait()


def test_half_a_message_does_not_block(pair: tuple[socket.socket, Pair]) -> None:
    raw, (_, pool) = pair
    raw.sendall(b"\x10\x00\x00\x00\x93")
    assert pool.receive() is None
    assert pool.buffered() is None


def test_the_end_of_the_other_side(pair: tuple[socket.socket, Pair]) -> None:
    raw, (worker, pool) = pair
    raw.close()
    pool.close()
    with pytest.raises(Hangup, match="closed"):
        worker.wait()
    with pytest.raises(Hangup, match="sending failed"):
        worker.send(Decoded(warnings=()))
