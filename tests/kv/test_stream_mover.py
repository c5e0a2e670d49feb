"""Bytes between device and host: the same ones, all of them and no others, layer by layer."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epd.kernels.base import AttentionSpec
from epd.kernels.page_copies import CopyLibrary, copy_library
from epd.kv import stream_mover
from epd.kv.copies import DONE, CopyFailed, PageCopies
from epd.kv.cuda_lanes import strided_copies
from epd.kv.host_storage import HostStorage
from epd.kv.lanes import Lanes, Moves, NativeLanes, Part, Progress, ThreadLanes, ThreadProgress, parts_of
from epd.kv.layout import KvLayout
from epd.kv.storage import KvStorage
from epd.kv.stream_mover import StreamMover
from tests.fakes.stepped_lanes import CopyBroken, SteppedLanes

MakeLanes = Callable[[KvStorage, HostStorage], Lanes]
BLOCKED_S = 0.05


def native(device: KvStorage, host: HostStorage) -> Lanes:
    library = copy_library()
    if isinstance(library, str):
        pytest.skip(library)
    assert isinstance(library, CopyLibrary)
    return NativeLanes(parts_of(device, host), library)


def threads(device: KvStorage, host: HostStorage) -> Lanes:
    return ThreadLanes(parts_of(device, host))


class StridedLanes:
    """What a CUDA device is asked for, done by the processor at once."""

    def __init__(self, device: KvStorage, host: HostStorage) -> None:
        self._parts = parts_of(device, host)

    def start(self, moves: Moves) -> Progress:
        progress = ThreadProgress(len(self._parts))
        for part in self._parts:
            for target, target_pitch, source, source_pitch, width, height in strided_copies(part, moves):
                assert width <= min(target_pitch, source_pitch)
                for row in range(height):
                    ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
            progress.advance()
        over: Future[None] = Future()
        over.set_result(None)
        progress.follow(over)
        return progress

    def close(self) -> None:
        pass


LANES = [native, threads, StridedLanes]


def spec(index: int, window_left: int | None, num_kv_heads: int = 2, qk_dim: int = 6, v_dim: int = 4) -> AttentionSpec:
    return AttentionSpec(index, window_left, 8, num_kv_heads, qk_dim, v_dim, 1.0)


LAYOUT = KvLayout.from_specs([spec(0, None), spec(3, None)], [spec(1, 7, 3), spec(2, 7, 3), spec(4, 7)], 4, 4)


class Memory:
    """Both sides, filled with bytes that differ everywhere."""

    def __init__(
        self,
        layout: KvLayout = LAYOUT,
        dtype: torch.dtype = torch.float32,
        *,
        num_device: tuple[int, int] = (9, 7),
        num_host: tuple[int, int] = (8, 6),
        seed: int = 0,
    ) -> None:
        self.device = KvStorage(layout, num_full_pages=num_device[0], num_window_pages=num_device[1], dtype=dtype)
        self.host = HostStorage(layout, num_full_pages=num_host[0], num_window_pages=num_host[1])
        self._generator = torch.Generator().manual_seed(seed)
        self.scramble()

    @property
    def layers(self) -> list[int]:
        return sorted((*self.device.full_layer_indices, *self.device.window_layer_indices))

    def scramble(self) -> None:
        for layer in self.layers:
            for pages in self._device_bytes(layer):
                pages.random_(0, 256, generator=self._generator)
        for kind in ("full", "window"):
            self.host.pool(kind).random_(0, 256, generator=self._generator)  # type: ignore[arg-type]

    def device_pages(self, layer: int, pages: Sequence[int]) -> list[bytes]:
        keys, values = self._device_bytes(layer)
        return [bytes(keys[page].tolist()) + bytes(values[page].tolist()) for page in pages]

    def host_pages(self, layer: int, pages: Sequence[int]) -> list[bytes]:
        """By the documented place in a page, not by the views that copies use."""
        kind, (start, key_bytes), (_, value_bytes) = self.host.parts(layer)
        return [bytes(self.host.page_view(kind, page)[start : start + key_bytes + value_bytes]) for page in pages]

    def everything(self) -> dict[tuple[str, int], list[bytes]]:
        host, device, held = self.host, self.device, {}
        for layer in self.layers:
            is_full = layer in device.full_layer_indices
            on_device = device.num_full_pages if is_full else device.num_window_pages
            in_host = host.num_full_pages if is_full else host.num_window_pages
            held["device", layer] = self.device_pages(layer, range(on_device))
            held["host", layer] = self.host_pages(layer, range(in_host))
        return held

    def _device_bytes(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = (t.view(torch.uint8).flatten(1) for t in (self.device.keys(layer), self.device.values(layer)))
        return keys, values


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KvLayout, torch.dtype]:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]))
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    sizes = st.integers(1, 5)
    specs = [spec(i, 7 if window else None, draw(sizes), draw(sizes), draw(sizes)) for i, window in enumerate(kinds)]
    full, window = [s for s in specs if not s.is_window], [s for s in specs if s.is_window]
    return KvLayout.from_specs(full, window, draw(st.integers(1, 4)), dtype.itemsize), dtype


@st.composite
def some_pairs(draw: st.DrawFn, num_sources: int, num_targets: int) -> tuple[tuple[int, int], ...]:
    """Pages to pages: in runs, apart, none; a source may be read twice."""
    targets = draw(st.lists(st.integers(0, num_targets - 1), unique=True, max_size=num_targets))
    shift = draw(st.integers(0, num_sources - 1))
    if draw(st.booleans()):
        return tuple(((target + shift) % num_sources, target) for target in targets)
    return tuple((draw(st.integers(0, num_sources - 1)), target) for target in targets)


@pytest.mark.parametrize("lanes", LANES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_copy_moves_what_was_asked_for_and_nothing_else(lanes: MakeLanes, data: st.DataObject) -> None:
    layout, dtype = data.draw(layouts())
    memory = Memory(layout, dtype, seed=data.draw(st.integers(0, 99)))
    mover = StreamMover(memory.device, memory.host, lanes=lanes(memory.device, memory.host))
    is_load = data.draw(st.booleans())
    sides = ((8, 9), (6, 7)) if is_load else ((9, 8), (7, 6))
    full, window = (data.draw(some_pairs(*side)) for side in sides)
    taken = {target for _, target in window}
    local = tuple(
        (source, target)
        for source, target in (data.draw(some_pairs(7, 7)) if is_load else ())
        if target not in taken and source not in taken and source != target
    )
    written = {target for _, target in local}
    local = tuple(pair for pair in local if pair[0] not in written)
    expected = memory.everything()
    source_side, target_side = ("host", "device") if is_load else ("device", "host")
    before = memory.everything()
    for layer in memory.layers:
        for source, target in full if layer in memory.device.full_layer_indices else window:
            expected[target_side, layer][target] = before[source_side, layer][source]
        for source, target in local if layer in memory.device.window_layer_indices else ():
            expected["device", layer][target] = before["device", layer][source]
    copies = PageCopies(full, window, local)
    (mover.load if is_load else mover.save)(copies).wait()
    assert memory.everything() == expected
    moved_bytes = len(full) * layout.full_page_bytes + (len(window) + len(local)) * layout.window_page_bytes
    stats = mover.stats()
    assert (stats.loaded_bytes, stats.saved_bytes) == ((moved_bytes, 0) if is_load else (0, moved_bytes))
    mover.close()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_saved_evicted_loaded_elsewhere_is_the_same(lanes: MakeLanes, dtype: torch.dtype) -> None:
    layout = KvLayout(LAYOUT.full_layers, LAYOUT.window_layers, 4, dtype.itemsize)
    memory = Memory(layout, dtype)
    mover = StreamMover(memory.device, memory.host, lanes=lanes(memory.device, memory.host))
    before = memory.everything()
    mover.save(PageCopies(full=((2, 5), (3, 6), (8, 0)), window=((6, 1), (0, 2)))).wait()
    for layer in memory.layers:
        memory.device.keys(layer).view(torch.uint8).fill_(0xEE)
        memory.device.values(layer).view(torch.uint8).fill_(0xEE)
    ticket = mover.load(PageCopies(full=((5, 1), (6, 7), (0, 4)), window=((1, 5), (2, 3))))
    ticket.wait()
    assert ticket.is_done()
    for layer in memory.device.full_layer_indices:
        assert memory.device_pages(layer, [1, 7, 4]) == [before["device", layer][page] for page in (2, 3, 8)]
    for layer in memory.device.window_layer_indices:
        assert memory.device_pages(layer, [5, 3]) == [before["device", layer][page] for page in (6, 0)]
    assert mover.stats().in_flight == 0
    mover.close()


def blocks(wait: Callable[[], None]) -> threading.Thread:
    """Run it in a thread, and see it wait."""
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(BLOCKED_S)
    assert thread.is_alive()
    return thread


def ends(thread: threading.Thread) -> None:
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_layer_is_waited_for_and_no_later_one() -> None:
    memory = Memory()
    lanes = SteppedLanes(memory.device, memory.host)
    mover = StreamMover(memory.device, memory.host, lanes=lanes)
    expected = memory.host_pages(0, [4])
    ticket = mover.load(PageCopies(full=((4, 0),), window=((5, 1),)))
    assert not ticket.is_done()
    assert mover.stats().in_flight == 1
    first = blocks(lambda: ticket.wait_layer(0))
    lanes.release()
    ends(first)
    assert memory.device_pages(0, [0]) == expected
    for layer in memory.layers[1:]:
        waiting = blocks(lambda layer=layer: ticket.wait_layer(layer))  # type: ignore[misc]
        ticket.wait_layer(layer - 1)
        lanes.release()
        ends(waiting)
        kind = "full" if layer == 3 else "window"
        source, target = (4, 0) if kind == "full" else (5, 1)
        assert memory.device_pages(layer, [target]) == memory.host_pages(layer, [source])
    ticket.wait()
    assert ticket.is_done()
    # Every layer was seen to be waited for so long, more or less.
    assert mover.stats().stalled_s > BLOCKED_S
    mover.close()


class HandLanes:
    """Moves nothing; the test says how many parts have arrived."""

    def __init__(self) -> None:
        self.progress = ThreadProgress(10)

    def start(self, moves: Moves) -> Progress:
        return self.progress

    def close(self) -> None:
        pass


def test_a_layer_is_there_when_its_values_are_too() -> None:
    memory, lanes = Memory(), HandLanes()
    ticket = StreamMover(memory.device, memory.host, lanes=lanes).load(PageCopies(full=((0, 0),), window=((0, 0),)))
    for layer in memory.layers:
        lanes.progress.advance()
        waiting = blocks(lambda layer=layer: ticket.wait_layer(layer))  # type: ignore[misc]
        lanes.progress.advance()
        ends(waiting)


def test_only_layers_that_are_moved_are_waited_for() -> None:
    memory = Memory()
    lanes = SteppedLanes(memory.device, memory.host)
    mover = StreamMover(memory.device, memory.host, lanes=lanes)
    full, window = mover.load(PageCopies(full=((1, 1),))), mover.load(PageCopies(window=((1, 1),)))
    local = mover.load(PageCopies(local_window=((2, 3),)))
    for layer in (1, 2, 4, 99):
        full.wait_layer(layer)
    for layer in (0, 3):
        window.wait_layer(layer)
        local.wait_layer(layer)
    waiting = [blocks(lambda: full.wait_layer(0)), blocks(lambda: window.wait_layer(1))]
    waiting.append(blocks(lambda: local.wait_layer(4)))
    lanes.release_all()
    for thread in waiting:
        ends(thread)
    mover.close()
    assert mover.load(PageCopies()) is DONE


def test_a_copy_that_fails_says_so_to_whoever_waits_and_the_next_one_goes_well() -> None:
    memory = Memory()
    lanes = SteppedLanes(memory.device, memory.host)
    mover = StreamMover(memory.device, memory.host, lanes=lanes)
    ticket = mover.load(PageCopies(full=((4, 0),), window=((5, 1),)))
    failures: list[CopyFailed] = []

    def wait(layer: int) -> None:
        with pytest.raises(CopyFailed) as caught:
            ticket.wait_layer(layer)
        failures.append(caught.value)

    lanes.release()
    ticket.wait_layer(0)
    waiting = blocks(lambda: wait(1))
    lanes.fail()
    ends(waiting)
    with pytest.raises(CopyFailed, match="the copy broke"):
        ticket.wait()
    with pytest.raises(CopyFailed):
        ticket.wait_layer(4)
    assert isinstance(failures[0].__cause__, CopyBroken)
    assert ticket.is_done()
    lanes.release_all()
    again = mover.load(PageCopies(full=((4, 0),)))
    again.wait()
    assert memory.device_pages(3, [0]) == memory.host_pages(3, [4])
    mover.close()


def test_a_copy_whose_end_fails_has_failed() -> None:
    """As on a device that tells of an error when it is waited for."""
    memory, lanes = Memory(), HandLanes()
    ticket = StreamMover(memory.device, memory.host, lanes=lanes).load(PageCopies(full=((0, 0),)))
    work: Future[None] = Future()
    lanes.progress.follow(work)
    for _ in range(10):
        lanes.progress.advance()
    ticket.wait_layer(3)
    assert not ticket.is_done()
    work.set_exception(CopyBroken("the device is gone"))
    assert ticket.is_done()
    with pytest.raises(CopyFailed, match="the device is gone"):
        ticket.wait()


def test_a_thread_that_fails_half_way() -> None:
    """The lanes that run without a compiler, with host memory too short for what is asked of its fourth part."""
    memory = Memory()
    parts = list(parts_of(memory.device, memory.host))
    parts[3] = Part(parts[3].layer_index, parts[3].kind, parts[3].device, parts[3].host[:2])
    mover = StreamMover(memory.device, memory.host, lanes=ThreadLanes(parts))
    ticket = mover.load(PageCopies(full=((4, 0),), window=((5, 1),)))
    with pytest.raises(CopyFailed, match="could not broadcast"):
        ticket.wait()
    assert ticket.is_done()
    with pytest.raises(CopyFailed):
        ticket.wait_layer(2)
    mover.load(PageCopies(full=((4, 0),))).wait()
    mover.close()


@pytest.mark.parametrize(
    ("copies", "named"),
    [
        (PageCopies(full=((0, 0), (8, 1))), r"full pages \[\(8, 1\)\] are outside \[0, 8\) and \[0, 9\)"),
        (PageCopies(full=((0, 9),)), r"full pages \[\(0, 9\)\]"),
        (PageCopies(window=((-1, 0),)), r"window pages \[\(-1, 0\)\] are outside \[0, 6\) and \[0, 7\)"),
        (PageCopies(window=((0, 7),)), r"window pages \[\(0, 7\)\]"),
        (PageCopies(full=((0, 0),), local_window=((7, 0),)), r"window pages \[\(7, 0\)\] are outside \[0, 7\)"),
    ],
)
def test_pages_that_are_not_there_are_refused_and_nothing_moves(copies: PageCopies, named: str) -> None:
    memory = Memory()
    mover = StreamMover(memory.device, memory.host)
    before = memory.everything()
    with pytest.raises(IndexError, match=named):
        mover.load(copies)
    with pytest.raises((IndexError, ValueError)):
        mover.save(PageCopies(full=((0, 8),), local_window=copies.local_window))
    with pytest.raises(ValueError, match="local_window is not empty"):
        mover.save(PageCopies(local_window=((0, 1),)))
    mover.close()
    assert memory.everything() == before
    assert mover.stats().loaded_bytes == 0


def test_loads_go_before_saves() -> None:
    """Somebody waits for a load. Of many saves the last is not done when a load that came after them is."""
    layout = KvLayout.from_specs([spec(0, None, 8, 256, 256)], [], 64, 4)
    device = KvStorage(layout, num_full_pages=8, num_window_pages=0, dtype=torch.float32)
    host = HostStorage(layout, num_full_pages=8, num_window_pages=0)
    mover = StreamMover(device, host, lanes=native(device, host))
    went_before = False
    # A megabyte per page. On a busy machine everything may be over before this thread is asked again.
    for _ in range(5):
        saves = [mover.save(PageCopies(full=tuple((page, page) for page in range(7)))) for _ in range(40)]
        mover.load(PageCopies(full=((7, 7),))).wait()
        went_before = went_before or not saves[-1].is_done()
        for save in saves:
            save.wait()
        if went_before:
            break
    assert went_before
    mover.close()


@pytest.mark.parametrize("lanes", [native, threads])
def test_a_mover_that_is_let_go_of_ends_what_it_began(lanes: MakeLanes) -> None:
    memory = Memory()
    mover = StreamMover(memory.device, memory.host, lanes=lanes(memory.device, memory.host))
    ticket = mover.save(PageCopies(full=((1, 2), (2, 3))))
    num_threads = threading.active_count()
    del mover
    gc.collect()
    ticket.wait()
    assert memory.host_pages(3, [2, 3]) == memory.device_pages(3, [1, 2])
    assert threading.active_count() < num_threads


def test_a_closed_mover_takes_nothing() -> None:
    memory = Memory()
    mover = StreamMover(memory.device, memory.host)
    mover.close()
    mover.close()
    with pytest.raises(RuntimeError, match="closed"):
        mover.load(PageCopies(full=((0, 0),)))


def test_unlike_layouts_are_refused() -> None:
    host = HostStorage(KvLayout(LAYOUT.full_layers, (), 4, 4), num_full_pages=1, num_window_pages=0)
    with pytest.raises(ValueError, match="layout is kv1/"):
        StreamMover(Memory().device, host)


def test_without_a_compiler_threads_do_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stream_mover, "copy_library", lambda: "there is no C++ compiler")
    memory = Memory()
    with caplog.at_level("INFO"):
        mover = StreamMover(memory.device, memory.host)
    assert "run by run: there is no C++ compiler" in caplog.text
    mover.save(PageCopies(full=((1, 2),))).wait()
    assert memory.host_pages(0, [2]) == memory.device_pages(0, [1])
    assert {thread.name.split("_")[0] for thread in threading.enumerate()} >= {"KV saves"}
    mover.close()


@pytest.mark.parametrize("lanes", [native, threads])
def test_many_copies_from_many_threads_that_wait(lanes: MakeLanes) -> None:
    memory = Memory(num_device=(64, 64), num_host=(64, 64))
    mover = StreamMover(memory.device, memory.host, lanes=lanes(memory.device, memory.host))
    pages = np.random.default_rng(0).permutation(64).tolist()
    expected = memory.everything()
    failures: list[str] = []

    def wait(ticket_layer: tuple[object, int]) -> None:
        ticket, layer = ticket_layer
        ticket.wait_layer(layer)  # type: ignore[attr-defined]
        ticket.wait()  # type: ignore[attr-defined]
        if not ticket.is_done():  # type: ignore[attr-defined]
            failures.append("waited and not done")

    tickets = [mover.load(PageCopies(full=((page, page),), window=((page, page),))) for page in pages]
    waiting = [threading.Thread(target=wait, args=((ticket, i % 5),)) for i, ticket in enumerate(tickets)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        ends(thread)
    assert not failures
    for layer in memory.layers:
        assert memory.device_pages(layer, range(64)) == expected["host", layer]
    mover.close()
