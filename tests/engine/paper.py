"""A scheduler over real pools and a real cache, with a model on paper: hundreds of schedules in a second."""

from dataclasses import dataclass, field

from encoder.types import EmbeddingRef
from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.cache.tiers.tiered import TieredCache
from epd.engine.admission import Limits
from epd.engine.drafting import DraftPolicy
from epd.engine.feed import EmbeddingFeed
from epd.engine.heal_cost import HealCost, LayerCost
from epd.engine.plan import Failure, HeldTransfer, SequenceStep, StepPlan
from epd.engine.scheduler import Scheduler, SchedulerConfig
from epd.engine.sequence import Sequence
from epd.kv.dual import DualPool
from epd.transport.base import Peer
from epd.types import Finish, GenerateRequest, KvTransfer, Role, TokenDelta
from tests.engine.conftest import Rows
from tests.fakes.clock import FakeClock
from tests.fakes.paper_model import VOCABULARY, PaperModel, media_token, paper_answer

PEER = Peer(b"gateway")
WIDTH = 4
CREDIT = 100.0


def paper_cost(page_size: int, *, reach: int = 6) -> HealCost:
    """A full layer and two window layers; every token costs the same, wherever it is."""
    layers = (LayerCost(None, 10, 0), LayerCost(reach, 10, 0), LayerCost(reach, 10, 0), LayerCost(None, 10, 0))
    return HealCost(layers, page_size)


@dataclass
class Paper:
    """One worker without its loop. `finishes` and `answers` are what a gateway has been told."""

    scheduler: Scheduler
    cache: TieredCache
    model: PaperModel
    clock: FakeClock
    rows: Rows
    feed: EmbeddingFeed
    requests: dict[str, GenerateRequest] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    plan: StepPlan = field(default_factory=StepPlan)

    def submit(self, request: GenerateRequest, *, decode_address: str | None = None) -> Sequence:
        self.requests[request.request_id] = request
        sequence = Sequence(request=request, peer=PEER, arrival_s=self.clock.clock.monotonic_s())
        sequence.decode_address = decode_address
        self.arrivals[request.request_id] = sequence.arrival_s
        self.scheduler.submit(sequence)
        self.collect()
        return sequence

    def submit_transfer(self, request: GenerateRequest) -> Sequence:
        """As if another worker had computed the prompt and its first token."""
        self.requests[request.request_id] = request
        tokens = identities(request)
        [first_token] = paper_answer(tokens, 1)
        self.model.imported[request.request_id] = tokens
        self.answers.setdefault(request.request_id, []).append(first_token)
        sequence = Sequence(request=request, peer=PEER, arrival_s=self.clock.clock.monotonic_s())
        transfer = KvTransfer(
            request_id=request.request_id,
            incarnation="",
            num_tokens=len(tokens),
            first_token=first_token,
            page_size=self.cache.page_size,
            num_full_layers=2,
            num_window_layers=2,
            first_full_page=0,
            num_full_pages=-(-len(tokens) // self.cache.page_size),
            first_window_page=0,
            num_window_pages=-(-len(tokens) // self.cache.page_size),
            cached_tokens=0,
            healed_tokens=0,
            layout_fingerprint="",
            timings={},
        )
        self.scheduler.submit_transfer(sequence, HeldTransfer(transfer, ()))
        self.collect()
        return sequence

    def step(self) -> StepPlan:
        self.begin_step()
        self.end_step()
        return self.plan

    def begin_step(self) -> None:
        """Plan only; between this and `end_step` nothing may happen to the scheduler in a real worker, either."""
        self.plan = self.scheduler.plan()

    def end_step(self, *, handover_failure: Failure | None = None) -> None:
        self.scheduler.commit(self.plan, self.model.run(self.plan))
        for sequence in self.scheduler.take_handoffs():
            self.scheduler.handed_over(sequence, handover_failure)
        self.cache.check()
        self.collect()

    def collect(self) -> None:
        for reply in self.scheduler.take_replies():
            message = reply.message
            if isinstance(message, TokenDelta):
                answer = self.answers.setdefault(message.request_id, [])
                assert message.request_id not in self.finishes, "a token after the end"
                assert message.index == len(answer), "a token is lost, or sent twice"
                answer += message.token_ids
            elif isinstance(message, Finish):
                assert message.request_id not in self.finishes, "a request ended twice"
                self.finishes[message.request_id] = message

    def run(self, *, max_steps: int = 3000, pass_s: float = 0.0) -> int:
        """Step until idle; the steps it took."""
        for number in range(max_steps):
            if self.scheduler.is_idle:
                return number
            self.step()
            self.clock.advance(pass_s)
        raise AssertionError(f"still busy after {max_steps} steps")

    def truth(self, request_id: str) -> list[int]:
        request = self.requests[request_id]
        return paper_answer(identities(request), request.sampling.max_tokens)

    def assert_nothing_leased(self) -> None:
        """Every page is free or evictable, nobody is counted anywhere, and no rows are held."""
        stats = self.cache.stats()
        assert (stats.full.leased, stats.window.leased, stats.num_sequences) == (0, 0, 0)
        self.feed.check()
        assert (self.feed.held_bytes, self.feed.num_requests) == (0, 0)
        scheduler = self.scheduler
        assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
        assert scheduler.is_idle
        assert not scheduler._roster._by_id
        assert not scheduler._roster.waiting._outdated


def identities(request: GenerateRequest) -> list[int]:
    """The prompt as the model sees it: rows of media in place of their placeholders."""
    tokens = list(request.token_ids)
    for span in request.spans:
        for offset in range(span.start, span.stop):
            tokens[offset] = media_token(request.embeddings[span.media], span.row_start + offset - span.start)
    return tokens


def num_new(step: SequenceStep) -> int:
    return len(step.token_ids)


def make_paper(
    *,
    num_full_pages: int = 200,
    num_window_pages: int = 200,
    page_size: int = 4,
    window_tokens: int = 6,
    chunk_tokens: int = 16,
    max_running: int = 4,
    role: Role = Role.BOTH,
    release_interval_tokens: int = 1,
    stride_tokens: int = 16,
    reach: int = 6,
) -> Paper:
    clock, rows = FakeClock(), Rows()
    device = PrefixCache(
        DualPool(num_full_pages=num_full_pages, num_window_pages=num_window_pages),
        page_size=page_size,
        window_tokens=window_tokens,
        retention=RetentionPolicy(
            retention_stride_tokens=stride_tokens, release_interval_tokens=release_interval_tokens
        ),
    )
    feed = EmbeddingFeed(rows, limit_bytes=1 << 20, wake=lambda: None)
    config = SchedulerConfig(
        role=role,
        limits=Limits(
            max_context_tokens=(num_full_pages - 1) * page_size,
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            max_waiting=10_000,
        ),
        eos_token_ids=frozenset(),
        page_size=page_size,
        key_seed=b"paper",
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        heal_cost=paper_cost(page_size, reach=reach),
        waiting_credit_tokens_per_s=CREDIT,
        drafting=DraftPolicy(),
    )
    cache = TieredCache(device)
    scheduler = Scheduler(config, cache, clock.clock, feed)
    model = PaperModel(page_size, window_tokens, feed.tensor)
    return Paper(scheduler, cache, model, clock, rows, feed)


def text_ref(rows: Rows, name: str, num_rows: int, *, seed: int) -> EmbeddingRef:
    return rows.put(name, num_rows, WIDTH, seed=seed)
