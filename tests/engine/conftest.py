"""Engines over a tiny random checkpoint, stepped by hand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from epd.config import EngineConfig
from epd.engine.feed import Deliver
from epd.engine.worker import Engine, build_engine
from epd.model.hybrid import HybridModel
from epd.types import Finish, GenerateRequest, MediaSpan, Role, SamplingParams, Submit, TokenDelta
from tests.fakes.clock import FakeClock
from tests.fakes.mailbox import Mailbox
from tests.fakes.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    model: HybridModel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    return Checkpoint(folder, write_checkpoint(folder))


class Rows:
    """Embedding rows by lease id, in place of the arena: here as soon as they are asked for or, with `is_slow`, when
    the test says so."""

    def __init__(self) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        self.is_slow = False
        self.fetched: list[str] = []
        self._under_way: list[tuple[EmbeddingRef, Deliver]] = []

    def put(self, name: str, num_rows: int, width: int, *, seed: int) -> EmbeddingRef:
        self.rows[name] = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
        return EmbeddingRef(
            key=f"{seed:032x}",  # type: ignore[arg-type]
            arena="none",
            offset_bytes=0,
            num_rows=num_rows,
            width=width,
            dtype="float32",
            checksum=0,
            lease_id=name,
        )

    def fetch(self, ref: EmbeddingRef, deadline_unix_s: float, deliver: Deliver) -> Callable[[], None]:
        self.fetched.append(ref.lease_id)
        self._under_way.append((ref, deliver))
        if not self.is_slow:
            self.arrive()
        return lambda: None

    def arrive(self) -> None:
        """Deliver everything that was asked for, also what nobody waits for any more."""
        under_way, self._under_way = self._under_way, []
        for ref, deliver in under_way:
            rows = self.rows.get(ref.lease_id)
            deliver(EmbeddingLost(f"{ref.lease_id} is gone") if rows is None else rows)

    def close(self) -> None:
        pass


@dataclass
class Bench:
    """One engine, its mailbox, its clock, its embeddings."""

    engine: Engine
    mailbox: Mailbox
    clock: FakeClock
    rows: Rows
    answers: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    deltas: list[TokenDelta] = field(default_factory=list)

    def submit(self, request: GenerateRequest, **where: str) -> None:
        self.mailbox.put(Submit(request=request, **where))

    def step(self) -> None:
        self.engine.loop.step()
        self.engine.loop.check()
        self.collect()

    def collect(self) -> None:
        for message in self.mailbox.take():
            if isinstance(message, TokenDelta):
                self.deltas.append(message)
                self.answers.setdefault(message.request_id, []).extend(message.token_ids)
            elif isinstance(message, Finish):
                assert message.request_id not in self.finishes, "a request ended twice"
                self.finishes[message.request_id] = message

    def run(self, *, max_steps: int = 2000) -> None:
        """Step until idle."""
        for _ in range(max_steps):
            self.step()
            if self.engine.scheduler.is_idle and not self.mailbox.inbox:
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def assert_nothing_leased(self) -> None:
        stats = self.engine.cache.stats()
        assert stats.full.leased == 0
        assert stats.window.leased == 0
        assert stats.num_sequences == 0
        self.engine.feed.check()
        assert (self.engine.feed.held_bytes, self.engine.feed.num_requests) == (0, 0)


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(checkpoint: Checkpoint) -> Iterator[MakeBench]:
    def make(
        *,
        links: dict[str, Mailbox] | None = None,
        address: str = "worker",
        clock: FakeClock | None = None,
        checkpoint: Checkpoint = checkpoint,
        **changes: object,
    ) -> Bench:
        config = replace(
            EngineConfig(
                model_dir=checkpoint.folder,
                model_name="tiny",
                role=Role.BOTH,
                page_size=4,
                kv_budget_bytes=4 << 20,
                expected_sequence_tokens=128,
                chunk_tokens=64,
                max_running=16,
                retention_stride_tokens=32,
                dense_retention_tokens=0,
                decode_release_interval_tokens=8,
            ),
            **changes,  # type: ignore[arg-type]
        )
        mailbox, clock, rows = Mailbox(address, links), clock or FakeClock(), Rows()
        engine = build_engine(config, mailbox, model=checkpoint.model, embeddings=rows, clock=clock.clock)
        return Bench(engine, mailbox, clock, rows)

    return make


def make_request(
    request_id: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 8,
    spans: tuple[MediaSpan, ...] = (),
    embeddings: tuple[EmbeddingRef, ...] = (),
    deadline_unix_s: float = 2e6,
    num_emitted: int = 0,
    use_cache: bool = True,
    **sampling: object,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        token_ids=tuple(token_ids),
        spans=spans,
        embeddings=embeddings,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        arrival_unix_s=1e6,
        deadline_unix_s=deadline_unix_s,
        num_emitted=num_emitted,
        use_cache=use_cache,
    )
