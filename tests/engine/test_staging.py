"""KV that arrives before its sequence has a place: the same bytes by way of host pages, and no page kept for nobody."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.cache.tiers.host import HostTier
from epd.cache.tiers.tiered import StagedPages, TieredCache
from epd.engine.handoff import KvMover, draft_tail, kv_frames, size_bytes
from epd.engine.plan import DraftTail, HeldTransfer, KvImport, PageTable, StepPlan
from epd.engine.settling import settle
from epd.engine.staging import KvStager, write_staged
from epd.kernels.base import AttentionSpec
from epd.kv.copies import DONE, CopyFailed
from epd.kv.dual import DualPool
from epd.kv.host_storage import HostStorage
from epd.kv.layout import KvLayout
from epd.kv.storage import KvStorage
from epd.kv.stream_mover import StreamMover
from epd.transport.base import Message
from epd.types import Abort, FinishReason, Usage
from tests.engine.conftest import Checkpoint, MakeBench, make_request
from tests.engine.test_roles import Pair, make_pair, truth
from tests.fakes.guessing_model import guessing_model
from tests.fakes.stepped_lanes import SteppedLanes
from tests.fakes.tiny_checkpoint import write_checkpoint

PAGE, WINDOW = 4, 10
HIDDEN = 8
PROMPT = [(11 * i * i + 5 * i) % 120 for i in range(60)]


def spec(index: int, window_left: int | None, num_kv_heads: int) -> AttentionSpec:
    return AttentionSpec(index, window_left, num_heads=8, num_kv_heads=num_kv_heads, qk_dim=6, v_dim=4, scale=1.0)


def layout_of(dtype: torch.dtype) -> KvLayout:
    # The last is a draft head's.
    window = [spec(1, WINDOW - 1, 2), spec(2, WINDOW - 1, 3), spec(4, WINDOW - 1, 1)]
    return KvLayout.from_specs([spec(0, None, 1), spec(3, None, 2)], window, PAGE, dtype.itemsize)


class Worker:
    """Pages, their books and their bytes; no model."""

    def __init__(self, dtype: torch.dtype, *, host_pages: int = 40, seed: int = 0) -> None:
        layout = layout_of(dtype)
        self.storage = KvStorage(layout, num_full_pages=40, num_window_pages=40, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            for tensor in (self.storage.keys(layer), self.storage.values(layer)):
                tensor.view(torch.uint8).random_(0, 256, generator=generator)
        self.host = HostStorage(layout, num_full_pages=host_pages, num_window_pages=host_pages)
        self.pages = StreamMover(self.storage, self.host)
        self.cache = TieredCache(
            PrefixCache(
                DualPool(num_full_pages=40, num_window_pages=40),
                page_size=PAGE,
                window_tokens=WINDOW - 1,
                retention=RetentionPolicy(dense_retention_tokens=0, retention_stride_tokens=16),
            ),
            host=HostTier(num_full_pages=host_pages, num_window_pages=host_pages),
            mover=self.pages,
        )
        self.mover = KvMover(self.storage, fingerprint="f", hidden_size=HIDDEN, vocab_size=100)
        self.stager = KvStager(self.cache, self.host)

    @property
    def layers(self) -> list[int]:
        return sorted((*self.storage.full_layer_indices, *self.storage.window_layer_indices))

    def send(self, num_tokens: int, dtype: torch.dtype, *, tail_rows: int = 2) -> HeldTransfer:
        num_pages = -(-num_tokens // PAGE)
        order = random.Random(num_tokens)
        full, window = (order.sample(range(40), num_pages) for _ in range(2))
        tail_rows = min(tail_rows, num_tokens)
        tail = DraftTail(num_tokens, (5, 6), *(torch.randn(tail_rows, HIDDEN).to(dtype) for _ in range(2)))
        return self.mover.transfer(
            PageTable(tuple(full), tuple(window), 0),
            request_id="a",
            incarnation="i",
            num_tokens=num_tokens,
            first_token=1,
            first_window_page=self.cache.window_frontier(num_tokens),
            usage=Usage(prompt_tokens=num_tokens, completion_tokens=0),
            timings={},
            tail=tail if tail_rows else None,
        )

    def held(self, table: PageTable, num_tokens: int) -> dict[int, list[bytes]]:
        """Bytes of every page, by layer."""
        num_pages, held = -(-num_tokens // PAGE), {}
        for layer in self.layers:
            is_full = layer in self.storage.full_layer_indices
            first = 0 if is_full else self.cache.window_frontier(num_tokens)
            pages = table.full_pages if is_full else table.window_pages
            start = 0 if is_full else table.window_start
            chosen = [pages[page - start] for page in range(first, num_pages)]
            held[layer] = [
                bytes(t.view(torch.uint8).flatten().tolist()) for t in self.storage.read_layer(layer, chosen)
            ]
        return held


def keys_of(num_tokens: int, name: str = "k") -> list[bytes]:
    return [f"{name}{page}".encode() for page in range(num_tokens // PAGE)]


def table_of(row: object) -> PageTable:
    return PageTable(tuple(row.full_pages), tuple(row.window_pages), row.window_start)  # type: ignore[attr-defined]


def imported(worker: Worker, held: HeldTransfer) -> dict[int, list[bytes]]:
    """As it is done without a host tier."""
    transfer = held.transfer
    row = worker.cache.begin(keys_of(transfer.num_tokens), transfer.num_tokens, full_only=True)
    row.extend(transfer.num_tokens, window_start=worker.cache.window_frontier(transfer.num_tokens))
    worker.mover.write(KvImport("a", held, table_of(row), 0))
    return worker.held(table_of(row), transfer.num_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 15, 16, 17, 62])
def test_by_way_of_the_host_comes_what_an_import_writes(num_tokens: int, dtype: torch.dtype) -> None:
    held = Worker(dtype, seed=1).send(num_tokens, dtype)
    frontier = Worker(dtype).cache.window_frontier(num_tokens)
    assert Worker(dtype).mover.refusal(held, max_first_window_page=frontier) is None
    expected = imported(Worker(dtype, seed=2), held)
    worker = Worker(dtype, seed=3)
    staged = worker.stager.stage(keys_of(num_tokens), held)
    assert staged.staged is not None
    assert kv_frames(staged) == ()
    assert size_bytes(staged) == 2 * min(2, num_tokens) * HIDDEN * dtype.itemsize
    for ours, theirs in zip(_tail(staged), _tail(held), strict=True):
        assert torch.equal(ours, theirs)
    row = worker.cache.resume_staged(staged.staged)
    row.commit(num_tokens, keys_of(num_tokens))
    assert worker.held(table_of(row), num_tokens) == expected
    assert worker.stager.num_unstaged == 0
    row.finish()
    worker.cache.poll()
    worker.cache.check()
    stats = worker.cache.stats()
    assert stats.host is not None
    # What is whole stays, for others to find; a page that is not full goes.
    assert (stats.host.full.evictable, stats.host.full.free) == (num_tokens // PAGE, 40 - num_tokens // PAGE)


def _tail(held: HeldTransfer) -> tuple[torch.Tensor, torch.Tensor]:
    tail = draft_tail(held)
    assert tail is not None
    assert tail.guesses == (5, 6)
    return tail.embeds, tail.hidden


def test_without_heads_nothing_is_left_of_a_staged_transfer() -> None:
    dtype = torch.float32
    held = Worker(dtype).send(9, dtype, tail_rows=0)
    assert len(kv_frames(held)) == 2 * 5
    staged = Worker(dtype).stager.stage(keys_of(9), held)
    assert staged.tensors == ()
    assert draft_tail(staged) is None
    assert draft_tail(held) is None


def test_only_named_pages_are_written() -> None:
    dtype = torch.bfloat16
    sender, worker = Worker(dtype, seed=1), Worker(dtype)
    held = sender.send(30, dtype)
    for kind in ("full", "window"):
        worker.host.pool(kind).fill_(7)  # type: ignore[arg-type]
    # Out of order, in runs and apart: pages 2, 3 and 7 of 8, windows 6 and 7.
    named = StagedPages((), 30, full=((7, 0), (2, 11), (3, 12)), window=((7, 5), (6, 9)))
    write_staged(worker.host, held, named)
    for layer in worker.layers:
        kind, *parts = worker.host.parts(layer)
        is_full = kind == "full"
        pairs = {target: page for page, target in (named.full if is_full else named.window)}
        frames = kv_frames(held)
        order = [*worker.storage.full_layer_indices, *worker.storage.window_layer_indices]
        first = 0 if is_full else held.transfer.first_window_page
        for frame, part in zip(frames[2 * order.index(layer) :], parts, strict=False):
            sent = bytes(frame.data)
            for target in range(40):
                found = bytes(worker.host.page_view(kind, target)[part.start : part.start + part.size_bytes])
                page = pairs.get(target)
                at = 0 if page is None else (page - first) * part.size_bytes
                assert found == (bytes([7]) * part.size_bytes if page is None else sent[at : at + part.size_bytes])


def test_no_room_leaves_it_as_it_came_and_is_counted() -> None:
    dtype = torch.float32
    worker = Worker(dtype, host_pages=5)
    held = Worker(dtype, seed=1).send(24, dtype)
    assert worker.stager.stage(keys_of(24), held) is held
    assert worker.stager.num_unstaged == 1
    small = Worker(dtype, seed=1).send(16, dtype)
    staged = worker.stager.stage(keys_of(16), small)
    assert staged.staged is not None
    # It keeps its pages until it is taken or given up.
    other = Worker(dtype, seed=2).send(8, dtype)
    assert worker.stager.stage(keys_of(8, "other"), other) is other
    worker.cache.unstage(staged.staged)
    assert worker.stager.stage(keys_of(8, "other"), other).staged is not None
    assert worker.stager.num_unstaged == 2
    worker.cache.check()


def test_without_a_host_tier_nothing_is_staged_and_nothing_counted() -> None:
    device = PrefixCache(
        DualPool(num_full_pages=4, num_window_pages=4),
        page_size=PAGE,
        window_tokens=WINDOW - 1,
        retention=RetentionPolicy(dense_retention_tokens=0, retention_stride_tokens=16),
    )
    stager = KvStager(TieredCache(device), None)
    held = Worker(torch.float32).send(9, torch.float32)
    assert stager.stage(keys_of(9), held) is held
    assert stager.num_unstaged == 0


@pytest.mark.parametrize("how", ["abort", "finish", "commit"])
@pytest.mark.parametrize("breaks", [False, True])
def test_pages_that_somebody_writes_are_not_given_back(how: str, breaks: bool) -> None:
    """Whoever ends a row while its KV arrives waits for the copy, also for one that fails."""
    dtype = torch.float32
    worker, held = Worker(dtype), Worker(dtype, seed=1).send(22, dtype)
    lanes = SteppedLanes(worker.storage, worker.host)
    worker.pages._lanes = lanes
    staged = worker.stager.stage(keys_of(22), held).staged
    assert staged is not None
    row = worker.cache.resume_staged(staged)
    errors: list[CopyFailed] = []

    def end() -> None:
        try:
            _ = row.commit(22, keys_of(22)) if how == "commit" else getattr(row, how)()
        except CopyFailed as error:
            errors.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    lanes.release(4)
    thread.join(0.1)
    assert thread.is_alive()
    stats = worker.cache.stats()
    assert stats.host is not None
    num_windows = 6 - worker.cache.window_frontier(22)
    assert (stats.full.free, stats.window.free) == (40 - 6, 40 - num_windows)
    assert stats.host.full.pinned + stats.host.full.doomed == 6
    if breaks:
        lanes.fail()
    lanes.release_all()
    thread.join(20.0)
    assert not thread.is_alive()
    assert len(errors) == (how == "commit" and breaks)
    row.abort()
    worker.cache.poll()
    worker.cache.check()
    stats = worker.cache.stats()
    assert stats.host is not None
    assert (stats.full.leased, stats.window.leased) == (0, 0)
    assert (stats.host.full.pinned, stats.host.full.doomed, stats.host.num_failed_loads) == (0, 0, breaks)
    # Nothing of a copy that failed can be found.
    assert not breaks or stats.full.free == 40
    lanes.close()


# -- two workers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("guessing")
    return Checkpoint(folder, write_checkpoint(folder, guessing_model()))


def make_narrow(make_bench: MakeBench, *, both: dict[str, object] | None = None, host_bytes: int = 4 << 20) -> Pair:
    """The decode worker has one place."""
    return make_pair(make_bench, both=both, max_running=1, host_budget_bytes=host_bytes)


def num_staged(pair: Pair) -> int:
    return sum(arrived.held.staged is not None for arrived in pair.decode.engine.scheduler._roster.arrived)


def step(pair: Pair) -> None:
    pair.prefill.step()
    pair.decode.step()


def step_until_staged(pair: Pair, count: int) -> None:
    for _ in range(400):
        if num_staged(pair) == count:
            return
        step(pair)
    raise AssertionError(f"{num_staged(pair)} transfers are staged, not {count}")


def assert_host_is_at_rest(pair: Pair) -> None:
    for bench in (pair.prefill, pair.decode):
        assert settle(bench.engine.cache, 5.0)
        bench.engine.cache.check()
    pair.assert_nothing_leased()
    stats = pair.decode.engine.cache.stats().host
    assert stats is not None
    for pool in (stats.full, stats.window):
        assert (pool.filling, pool.pinned, pool.doomed) == (0, 0, 0)
    assert stats.num_pending_copies == 0


PROMPTS = {f"r{length}": [(token + length) % 120 for token in PROMPT[:length]] for length in (60, 41, 17, 3)}


@pytest.mark.parametrize("drafts", [0, 2])
def test_answers_are_those_of_one_worker(make_bench: MakeBench, guessing: Checkpoint, drafts: int) -> None:
    pair = make_narrow(make_bench, both={"checkpoint": guessing, "draft_tokens": drafts})
    for request_id, prompt in PROMPTS.items():
        pair.submit(make_request(request_id, prompt, ignore_eos=True, max_tokens=12))
    step_until_staged(pair, len(PROMPTS) - 1)
    roster = pair.decode.engine.scheduler._roster
    for arrived in roster.arrived:
        assert kv_frames(arrived.held) == ()
    pair.run()
    for request_id, prompt in PROMPTS.items():
        assert pair.answer(request_id) == truth(guessing, prompt, 12)
    assert roster.counters.imports == len(PROMPTS)
    assert pair.decode.engine.cache.stats().host.num_loads >= len(PROMPTS) - 1  # type: ignore[union-attr]
    assert_host_is_at_rest(pair)


def test_too_small_a_host_stages_what_fits(make_bench: MakeBench, checkpoint: Checkpoint) -> None:
    """A budget of a few pages: the rest stays as it came, and the answers are the same."""
    pair = make_narrow(make_bench, host_bytes=64 << 10)
    for request_id, prompt in PROMPTS.items():
        pair.submit(make_request(request_id, prompt, ignore_eos=True, max_tokens=12))
    pair.run()
    for request_id, prompt in PROMPTS.items():
        assert pair.answer(request_id) == truth(checkpoint, prompt, 12)
    assert pair.decode.engine.loop._stager.num_unstaged > 0
    assert_host_is_at_rest(pair)


@pytest.mark.parametrize("how", ["abort", "deadline", "peer"])
def test_every_reservation_ends(make_bench: MakeBench, checkpoint: Checkpoint, how: str) -> None:
    """By a place, an abort, or the clock. Nothing is kept for a request that is over."""
    pair = make_narrow(make_bench)
    for request_id, prompt in PROMPTS.items():
        deadline = 1_000_100.0 if how == "deadline" and request_id != "r60" else 2e6
        pair.submit(make_request(request_id, prompt, ignore_eos=True, max_tokens=30, deadline_unix_s=deadline))
    step_until_staged(pair, len(PROMPTS) - 1)
    reserved = pair.decode.engine.cache.stats().host
    assert reserved is not None
    assert reserved.full.pinned + reserved.full.filling >= (41 + 17 + 3) // PAGE
    if how == "abort":
        messages: list[Message] = [Abort(request_id=request_id) for request_id in PROMPTS if request_id != "r60"]
        for message in messages:
            pair.decode.mailbox.put(message)
    elif how == "deadline":
        pair.clock.advance(200.0)
    else:
        roster = pair.decode.engine.scheduler._roster
        pair.decode.engine.scheduler.drop_peer(roster.arrived[0].sequence.peer)
    step(pair)
    assert num_staged(pair) == 0
    pair.run()
    if how == "abort":
        assert pair.answer("r60") == truth(checkpoint, PROMPTS["r60"], 30)
        assert {pair.decode.finishes[each].reason for each in PROMPTS if each != "r60"} == {FinishReason.CANCELLED}
    assert_host_is_at_rest(pair)


def test_an_import_that_was_staged_is_not_written(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    """Its tensors are gone, so whoever wrote it would write nothing, or fail."""
    pair = make_narrow(make_bench)
    runner = pair.decode.engine.loop._runner
    written: list[KvImport] = []
    runner._mover.write = written.append  # type: ignore[method-assign]
    held = Worker(torch.float32).send(9, torch.float32)
    planned = KvImport("a", replace(held, tensors=()), PageTable((), (), 0), 0, DONE)
    runner.run(StepPlan(imports=(planned,)))
    assert written == []
    runner.run(StepPlan(imports=(replace(planned, arrival=None),)))
    assert len(written) == 1


def test_a_load_that_fails_ends_its_request_and_no_other(make_bench: MakeBench, checkpoint: Checkpoint) -> None:
    """The gateway hears that another attempt may go well; pages are back, and the worker goes on."""
    pair = make_narrow(make_bench)
    for request_id, prompt in PROMPTS.items():
        pair.submit(make_request(request_id, prompt, ignore_eos=True, max_tokens=6))
    step_until_staged(pair, len(PROMPTS) - 1)
    tiers = pair.decode.engine.tiers
    assert settle(tiers.cache, 5.0)
    assert tiers.host is not None
    assert tiers.mover is not None
    lanes = SteppedLanes(tiers.mover._device, tiers.host)
    tiers.mover._lanes = lanes
    lanes.fail()
    lanes.release_all()
    pair.run()
    [failed] = [request_id for request_id in PROMPTS if pair.finish(request_id).reason is FinishReason.FAILED]
    finish = pair.finish(failed)
    assert (finish.status, finish.code, finish.retryable) == (503, "kv_lost", True)
    assert "the copy broke" in finish.message
    for request_id, prompt in PROMPTS.items():
        if request_id != failed:
            assert pair.answer(request_id) == truth(checkpoint, prompt, 6)
    host = tiers.cache.stats().host
    assert host is not None
    assert (host.num_failed_loads, host.num_failed_saves) == (1, 0)
    assert_host_is_at_rest(pair)
    lanes.close()
