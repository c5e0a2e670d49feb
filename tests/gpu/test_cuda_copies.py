"""On a CUDA device: pages between device and pinned host memory, beside what the device computes."""

from pathlib import Path

import pytest
import torch

from epd.config import EngineConfig
from epd.engine.trial import EngineTrial
from epd.kernels.base import AttentionSpec
from epd.kv.copies import CopyFailed, PageCopies
from epd.kv.cuda_lanes import CudaLanes
from epd.kv.host_storage import HostStorage
from epd.kv.lanes import parts_of
from epd.kv.layout import KvLayout
from epd.kv.storage import KvStorage
from epd.kv.stream_mover import StreamMover
from epd.types import Role

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

NANO = Path(__file__).parents[2] / "epd" / "builtin" / "mimo-nano"
NUM_PAGES = 256


def spec(index: int, window_left: int | None) -> AttentionSpec:
    return AttentionSpec(index, window_left, num_heads=8, num_kv_heads=2, qk_dim=192, v_dim=128, scale=1.0)


def make(dtype: torch.dtype) -> tuple[KvStorage, HostStorage, StreamMover]:
    layout = KvLayout.from_specs([spec(0, None), spec(3, None)], [spec(1, 127), spec(2, 127)], 16, dtype.itemsize)
    device = KvStorage(
        layout, num_full_pages=NUM_PAGES, num_window_pages=NUM_PAGES, dtype=dtype, device=torch.device("cuda")
    )
    host = HostStorage(layout, num_full_pages=NUM_PAGES, num_window_pages=NUM_PAGES, pinned=True)
    return device, host, StreamMover(device, host)


def fill(device: KvStorage, value: float | None) -> None:
    """With noise for None."""
    for layer in range(4):
        for pages in (device.keys(layer), device.values(layer)):
            _ = pages.normal_() if value is None else pages.fill_(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_evicted_loaded_elsewhere_is_the_same(dtype: torch.dtype) -> None:
    device, _, mover = make(dtype)
    fill(device, None)
    before = {layer: (device.keys(layer).clone(), device.values(layer).clone()) for layer in range(4)}
    order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0)).tolist()
    saved = tuple(zip(range(100), order[:100], strict=True))
    mover.save(PageCopies(full=saved, window=saved)).wait()
    fill(device, 7.0)
    targets = order[100:200]
    loaded = tuple((host_page, target) for (_, host_page), target in zip(saved, targets, strict=True))
    local = ((order[200], order[201]), (order[202], order[203]))
    ticket = mover.load(PageCopies(full=loaded, window=loaded, local_window=local))
    for layer in range(4):
        ticket.wait_layer(layer)
        # On the computing stream, with nothing waited for by the processor.
        for pages, was in zip((device.keys(layer), device.values(layer)), before[layer], strict=True):
            assert torch.equal(pages[targets], was[:100])
    ticket.wait()
    assert ticket.is_done()
    assert mover.stats().in_flight == 0
    mover.close()


def test_a_save_sees_what_was_computed_before_it_and_a_load_what_was_read() -> None:
    device, host, mover = make(torch.bfloat16)
    pairs = tuple((page, page) for page in range(NUM_PAGES))
    big = torch.randn(4096, 4096, device="cuda")
    for turn in range(4):
        # The device is busy for a while, and writes the pages afterwards.
        for _ in range(20):
            big = torch.tanh(big @ big)
        fill(device, float(turn))
        saved = mover.save(PageCopies(full=pairs, window=pairs))
        saved.wait()
        assert bool((torch.frombuffer(host.page_view("full", 5), dtype=torch.bfloat16) == turn).all())
        for _ in range(20):
            big = torch.tanh(big @ big)
        read = device.keys(0).float().sum()
        host.pool("full").zero_()
        mover.load(PageCopies(full=pairs)).wait()
        # The load came after the sum was asked for, so the sum is that of the old pages.
        assert float(read) == turn * device.keys(0).numel()
        assert float(device.keys(0).abs().sum()) == 0.0
    mover.close()


def test_an_error_of_the_device_is_a_failed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host, _ = make(torch.bfloat16)
    lanes = CudaLanes(parts_of(device, host), device.device)

    def broken(*arguments: int) -> None:
        raise RuntimeError("cudaMemcpy2DAsync ended with 1")

    monkeypatch.setattr(lanes, "_copy", broken)
    mover = StreamMover(device, host, lanes=lanes)
    ticket = mover.load(PageCopies(full=((0, 0),)))
    with pytest.raises(CopyFailed, match="ended with 1"):
        ticket.wait()
    with pytest.raises(CopyFailed):
        ticket.wait_layer(3)
    mover.close()


def test_an_engine_answers_alike_from_the_host() -> None:
    config = EngineConfig(
        role=Role.BOTH,
        name="gpu",
        model_dir=NANO,
        model_name="nano",
        dtype="float32",
        device="cuda",
        kv_budget_bytes=64 << 20,
        host_budget_bytes=64 << 20,
    )
    trial = EngineTrial(config)
    prompt = torch.randint(1, 1400, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    answers = []
    for _ in range(3):
        request = trial.submit(prompt, max_tokens=8)
        while request not in trial.usage:
            trial.step()
        answers.append((trial.answers[request], trial.usage[request].host_tokens))
        trial.settle()
        trial.forget("device")
    assert [answer for answer, _ in answers[1:]] == [answers[0][0]] * 2
    assert answers[0][1] == 0
    assert min(host_tokens for _, host_tokens in answers[1:]) > 2900
    trial.close()
