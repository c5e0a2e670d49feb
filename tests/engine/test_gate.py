"""Steps over pages that are still arriving: each layer waits for its own bytes, and the results are those without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from epd.engine.gate import GatedAttention, arrivals_of, gated
from epd.engine.graphs import DecodeGraphs, GraphShapes, PlainRecorder, ScratchPages
from epd.engine.handoff import KvMover
from epd.engine.plan import DraftInput, PageTable, SequenceStep, StepPlan, StepResult
from epd.engine.runner import Runner
from epd.engine.sampler import SampleRow
from epd.kernels.backends import ReferenceBackend
from epd.kernels.base import AttentionBackend, AttentionContext, AttentionSpec, PagedSequence
from epd.kernels.cuda_sdpa import SdpaBackend
from epd.kv.copies import DONE, CopyFailed, CopyTicket, PageCopies
from epd.kv.host_storage import HostStorage
from epd.kv.layout import KvLayout
from epd.kv.storage import KvStorage
from epd.kv.stream_mover import StreamMover
from epd.model.hybrid import HybridModel
from epd.types import SamplingParams
from tests.fakes.guessing_model import guessing_model
from tests.fakes.stepped_lanes import SteppedLanes

PAGE, NUM_PAGES, NUM_HEADS = 4, 12, 3
PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(34)]
CACHED = 24
SAMPLE = SampleRow(SamplingParams(max_tokens=4), 0)
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return guessing_model().eval()


@dataclass
class Watched:
    """A backend that notes which layers have begun and ended."""

    inner: AttentionBackend
    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    name: str = "watched"

    def context(self, sequences: list[PagedSequence]) -> WatchedContext:
        return WatchedContext(self, self.inner.context(sequences))


@dataclass
class WatchedContext:
    at: Watched
    inner: AttentionContext

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        self.at.begun.append(spec.index)
        out = self.inner.attend(spec, q, k, v, sink)
        self.at.ended.append(spec.index)
        return out


class Rig:
    """A runner with a prompt's first tokens computed, copied to the host, and gone from the device."""

    def __init__(self, model: HybridModel, *, num_heads: int = NUM_HEADS, graphs: bool = False) -> None:
        self.model = model
        layers = [*model.config.layers, *(model.config.mtp_layer(k) for k in range(num_heads))]
        specs = [layer.attention for layer in layers]
        layout = KvLayout.from_specs(
            [spec for spec in specs if not spec.is_window], [spec for spec in specs if spec.is_window], PAGE, 4
        )
        sizes = {"num_full_pages": 2 * NUM_PAGES + 1, "num_window_pages": 2 * NUM_PAGES + 1}
        self.storage = KvStorage(layout, **sizes, dtype=torch.float32)
        for index in [spec.index for spec in specs]:
            self.storage.keys(index).zero_()
            self.storage.values(index).zero_()
        self.host = HostStorage(layout, num_full_pages=NUM_PAGES, num_window_pages=NUM_PAGES)
        self.lanes = SteppedLanes(self.storage, self.host)
        self.mover = StreamMover(self.storage, self.host, lanes=self.lanes)
        self.watched = Watched(ReferenceBackend(self.storage, page_size=PAGE))
        self.recorder = PlainRecorder()
        self.graphs = self._graphs() if graphs else None
        self.runner = Runner(
            model,
            self.storage,
            KvMover(self.storage, fingerprint="f", hidden_size=64, vocab_size=128),
            NoRows(),
            self.watched,
            num_heads=num_heads,
            graphs=self.graphs,
        )
        self.forward_layers = [layer.index for layer in layers]

    def _graphs(self) -> DecodeGraphs:
        return DecodeGraphs(
            self.model,
            SdpaBackend(self.storage, page_size=PAGE),
            GraphShapes((1,), (16,)),
            ScratchPages(2 * NUM_PAGES, 2 * NUM_PAGES),
            self.recorder,
            page_size=PAGE,
            device=torch.device("cpu"),
        )

    def prefill(self, num_tokens: int = CACHED) -> None:
        ahead = DraftInput(ahead=tuple(PROMPT[num_tokens : num_tokens + NUM_HEADS]))
        self.run(SequenceStep("a", 0, tuple(PROMPT[:num_tokens]), table(0), draft=ahead))

    def evict(self) -> None:
        """To the host, and elsewhere on the device from there on."""
        pages = tuple((page, page) for page in range(NUM_PAGES))
        self.lanes.release(len(self.forward_layers))
        self.mover.save(PageCopies(full=pages, window=pages)).wait()
        for index in self.forward_layers:
            self.storage.keys(index)[:NUM_PAGES] = torch.nan
            self.storage.values(index)[:NUM_PAGES] = torch.nan

    def load(self) -> CopyTicket:
        """To the second half of the device's pages."""
        pages = tuple((page, NUM_PAGES + page) for page in range(CACHED // PAGE))
        return self.mover.load(PageCopies(full=pages, window=pages))

    def run(self, *steps: SequenceStep, num_drafts: int = 0) -> StepResult:
        return self.runner.run(StepPlan(steps, num_drafts=num_drafts))

    def tokens(self, result: StepResult) -> list[int]:
        [outcome] = result.outcomes
        assert outcome.failure is None
        return [token.token_id for token in outcome.tokens] + list(outcome.tail.guesses if outcome.tail else ())


class NoRows:
    def tensor(self, ref: object) -> Tensor:
        raise AssertionError("no media here")


def table(first_page: int, num_pages: int = NUM_PAGES) -> PageTable:
    pages = tuple(range(first_page, first_page + num_pages))
    return PageTable(pages, pages, 0)


def without_windows(pages: PageTable) -> PageTable:
    """Those of the cached tokens are gone."""
    return replace(pages, window_pages=pages.window_pages[CACHED // PAGE :], window_start=CACHED // PAGE)


def rest(pages: PageTable, arrival: CopyTicket | None, *, heal_stop: int | None = None) -> SequenceStep:
    sample = SAMPLE if heal_stop is None else None
    return SequenceStep("a", CACHED, tuple(PROMPT[CACHED:]), pages, sample=sample, arrival=arrival, heal_stop=heal_stop)


class Running:
    """The step in a thread, as far as its layers let it."""

    def __init__(self, compute: Callable[[], StepResult]) -> None:
        self.results: list[StepResult] = []
        self.errors: list[CopyFailed] = []
        self._compute = compute
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.results.append(self._compute())
        except CopyFailed as error:
            self.errors.append(error)

    def is_stuck(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(PATIENCE_S / 0.002)):
        if condition():
            return
        done.wait(0.002)
    raise AssertionError("not within time")


def test_each_layer_waits_for_its_own_bytes_and_for_no_later_ones(model: HybridModel) -> None:
    """Trunk and heads. A layer's attention begins when its pages are there and the next layer's are not."""
    plain, rig = Rig(model), Rig(model)
    plain.prefill()
    expected = plain.tokens(plain.run(rest(table(0), None), num_drafts=NUM_HEADS))
    rig.prefill()
    rig.evict()
    rig.watched.begun.clear()
    rig.watched.ended.clear()
    ticket = rig.load()
    running = Running(lambda: rig.run(rest(table(NUM_PAGES), ticket), num_drafts=NUM_HEADS))
    for number in range(len(rig.forward_layers)):
        assert running.is_stuck()
        assert rig.watched.begun == rig.forward_layers[:number]
        rig.lanes.release()
        until(lambda number=number: rig.watched.ended == rig.forward_layers[: number + 1])  # type: ignore[misc]
    running.end()
    assert rig.tokens(running.results[0]) == expected
    assert len(expected) == 1 + NUM_HEADS
    assert ticket.is_done()


def test_an_arrival_fills_a_page_that_the_step_goes_on_in(model: HybridModel) -> None:
    """The last page that arrives is not full, and the first new token is written into it: after its bytes have come."""
    plain, rig = Rig(model), Rig(model)
    for each in (plain, rig):
        each.prefill(22)
    step = SequenceStep("a", 22, (PROMPT[22],), table(0), sample=SAMPLE)
    expected = plain.tokens(plain.run(step))
    rig.evict()
    ticket = rig.load()
    rig.lanes.release_all()
    assert rig.tokens(rig.run(replace(step, pages=table(NUM_PAGES), arrival=ticket))) == expected
    for layer in rig.model.config.layers:
        here = rig.storage.read_layer(layer.index, [NUM_PAGES + 5])
        there = plain.storage.read_layer(layer.index, [5])
        for ours, theirs in zip(here, there, strict=True):
            assert torch.allclose(ours[:, :3], theirs[:, :3], atol=1e-5)


def test_healing_waits_for_the_full_layers_it_reads(model: HybridModel) -> None:
    plain, rig = Rig(model, num_heads=0), Rig(model, num_heads=0)
    for each in (plain, rig):
        each.prefill(len(PROMPT))
    heal_stop = 32
    chunk = tuple(PROMPT[CACHED:heal_stop])
    step = replace(rest(without_windows(table(0)), None, heal_stop=heal_stop), token_ids=chunk)
    [outcome] = plain.run(step).outcomes
    assert outcome.failure is None
    rig.evict()
    pages = tuple((page, NUM_PAGES + page) for page in range(heal_stop // PAGE))
    ticket = rig.mover.load(PageCopies(full=pages))
    rig.watched.begun.clear()
    running = Running(lambda: rig.run(replace(step, pages=without_windows(table(NUM_PAGES)), arrival=ticket)))
    assert running.is_stuck()
    assert rig.watched.begun == []
    # The last full layer is above every window: healing does not run it, nor wait for it.
    rig.lanes.release()
    running.end()
    assert rig.watched.begun == [0, 1, 2]
    assert not ticket.is_done()
    rig.lanes.release_all()
    assert running.results[0].outcomes[0].failure is None
    for layer in rig.storage.window_layer_indices:
        ours = rig.storage.read_layer(layer, [NUM_PAGES + 7])
        theirs = plain.storage.read_layer(layer, [7])
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.allclose(mine, other, atol=1e-5)


def test_a_failed_copy_ends_the_step_and_not_the_runner(model: HybridModel) -> None:
    rig = Rig(model)
    rig.prefill()
    rig.evict()
    ticket = rig.load()
    rig.lanes.release(2)
    running = Running(lambda: rig.run(rest(table(NUM_PAGES), ticket)))
    assert running.is_stuck()
    rig.lanes.fail()
    running.end()
    assert [str(error) for error in running.errors] == ["pages could not be copied: the copy broke"]
    with pytest.raises(CopyFailed):
        rig.run(rest(table(NUM_PAGES), ticket))
    rig.lanes.release_all()
    assert rig.tokens(rig.run(rest(table(NUM_PAGES), rig.load())))


def test_a_step_with_arrivals_takes_no_graph(model: HybridModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(model, num_heads=0, graphs=True)
    rig.prefill()
    rig.evict()
    step = SequenceStep("a", CACHED, (PROMPT[CACHED],), table(NUM_PAGES), sample=SAMPLE)
    assert rig.graphs is not None
    ticket = rig.load()
    rig.lanes.release_all()
    waited = rig.tokens(rig.run(replace(step, arrival=_Held(ticket))))
    assert rig.graphs.num_recorded == 0
    # Over and well: nothing is left to wait for.
    assert rig.tokens(rig.run(replace(step, arrival=ticket))) == waited
    assert rig.graphs.num_recorded == 1
    assert rig.tokens(rig.run(step)) == waited


class _Held:
    """A ticket that is not done before somebody waited for all layers."""

    def __init__(self, ticket: CopyTicket) -> None:
        self._ticket = ticket

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        self._ticket.wait()

    def wait_layer(self, layer_index: int) -> None:
        self._ticket.wait_layer(layer_index)


def test_the_gate_is_there_when_something_is_on_its_way_and_only_then() -> None:
    backend = Watched(ReferenceBackend(None, page_size=PAGE))  # type: ignore[arg-type]
    assert gated(backend, ()) is backend
    held = _Held(DONE)
    wrapped = gated(backend, (held,))
    assert isinstance(wrapped, GatedAttention)
    assert wrapped.name == "watched"
    steps = [rest(table(0), arrival) for arrival in (None, held, DONE, held)]
    assert arrivals_of(steps) == (held,)
    assert arrivals_of(steps[:1]) == ()
