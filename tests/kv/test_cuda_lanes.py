"""What a CUDA device is asked for, and in which order; its streams are stand-ins that note it.

Copies are done by the processor as soon as they are asked for, so that bytes can be looked at as well. The same on a
device is in tests/gpu.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from epd.kernels.base import AttentionSpec
from epd.kv import cuda_lanes
from epd.kv.copies import CopyFailed, PageCopies
from epd.kv.cuda_lanes import CudaLanes
from epd.kv.host_storage import HostStorage
from epd.kv.lanes import parts_of
from epd.kv.layout import KvLayout
from epd.kv.storage import KvStorage
from epd.kv.stream_mover import StreamMover

COMPUTING = 1


def spec(index: int, window_left: int | None) -> AttentionSpec:
    return AttentionSpec(index, window_left, num_heads=8, num_kv_heads=2, qk_dim=6, v_dim=4, scale=1.0)


LAYOUT = KvLayout.from_specs([spec(0, None), spec(2, None)], [spec(1, 7)], 4, 4)


@dataclass
class FakeStream:
    cuda_stream: int
    log: list[tuple[object, ...]] = field(default_factory=list)

    def record_event(self) -> tuple[int, int]:
        """What was asked of this stream until now."""
        self.log.append(("record",))
        return self.cuda_stream, len(self.log)

    def wait_event(self, event: tuple[int, int]) -> None:
        self.log.append(("wait", *event))

    def synchronize(self) -> None:
        self.log.append(("synchronize",))


@dataclass
class Rig:
    device: KvStorage
    host: HostStorage
    mover: StreamMover
    streams: dict[int, FakeStream]
    fails_at: int | None = None

    @property
    def computing(self) -> FakeStream:
        return self.streams[COMPUTING]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    device = KvStorage(LAYOUT, num_full_pages=8, num_window_pages=8, dtype=torch.float32)
    host = HostStorage(LAYOUT, num_full_pages=8, num_window_pages=8)
    streams = {COMPUTING: FakeStream(COMPUTING)}

    def new_stream(device: torch.device) -> FakeStream:
        number = len(streams) + 1
        return streams.setdefault(number, FakeStream(number))

    def copy(target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int) -> None:
        log = streams[stream].log
        if made.fails_at is not None and sum(entry[0] == "copy" for entry in log) == made.fails_at:
            raise RuntimeError("cudaMemcpy2DAsync ended with 700")
        log.append(("copy", width, rows))
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

    monkeypatch.setattr(cuda_lanes, "_stream", new_stream)
    monkeypatch.setattr(cuda_lanes, "_memcpy_2d", lambda: copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[COMPUTING])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    lanes = CudaLanes(parts_of(device, host), device.device)
    made = Rig(device, host, StreamMover(device, host, lanes=lanes), streams)
    yield made
    made.mover.close()


def test_a_load_begins_after_what_was_computed_and_layers_are_waited_for_on_the_device(rig: Rig) -> None:
    rig.host.pool("full").random_(0, 256, generator=torch.Generator().manual_seed(0))
    ticket = rig.mover.load(PageCopies(full=((3, 0), (4, 1), (6, 2)), window=((1, 7),), local_window=((2, 6),)))
    ticket.wait()
    loads = rig.streams[2].log
    assert loads[0] == ("wait", COMPUTING, 1)
    # Keys are 4 x 2 x 6 numbers, values 4 x 2 x 4; runs of two pages and one, then the window's two ways.
    full = [("copy", 192, 2), ("copy", 192, 1), ("record",), ("copy", 128, 2), ("copy", 128, 1), ("record",)]
    window = [("copy", 192, 1), ("copy", 192, 1), ("record",), ("copy", 128, 1), ("copy", 128, 1), ("record",)]
    assert loads[1:] == [*full, *window, *full, ("synchronize",)]
    assert rig.computing.log == [("record",)]
    for layer, num_asked in ((0, 7), (1, 13), (2, 19)):
        ticket.wait_layer(layer)
        assert rig.computing.log[-1] == ("wait", 2, num_asked)
    keys, values = rig.host.layer_views(2)
    for side, pages in ((rig.device.keys(2), keys), (rig.device.values(2), values)):
        assert torch.equal(side[:3].view(torch.uint8).flatten(1), pages[[3, 4, 6]])


def test_saves_have_a_stream_of_their_own(rig: Rig) -> None:
    rig.mover.save(PageCopies(full=((0, 5),))).wait()
    assert rig.streams[2].log == []
    assert rig.streams[3].log[0] == ("wait", COMPUTING, 1)
    assert rig.streams[3].log[-1] == ("synchronize",)
    assert sum(entry[0] == "copy" for entry in rig.streams[3].log) == 4


@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_error_is_a_failed_copy_and_what_had_begun_is_waited_for(rig: Rig, fails_at: int) -> None:
    rig.fails_at = fails_at
    ticket = rig.mover.load(PageCopies(full=((3, 0),)))
    with pytest.raises(CopyFailed, match="ended with 700"):
        ticket.wait()
    assert ticket.is_done()
    assert rig.streams[2].log[-1] == ("synchronize",)
    with pytest.raises(CopyFailed):
        ticket.wait_layer(2)
    rig.fails_at = None
    rig.mover.load(PageCopies(full=((3, 0),))).wait()


def test_the_runtime_that_torch_brings_is_found_or_named() -> None:
    if torch.version.cuda is None:
        with pytest.raises(OSError, match="libcudart"):
            cuda_lanes._memcpy_2d()
        return
    copy = cuda_lanes._memcpy_2d()
    if not torch.cuda.is_available():
        rows = torch.zeros(2, 8, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync ended with"):
            copy(rows.data_ptr(), 8, rows.data_ptr(), 8, 8, 1, 0)
