"""Random schedules, five hundred with MIMO_TEST_EFFORT=3, in which windows get lost and are healed: what is answered,
and what is left in the tree, are what computing everything afresh gives.

Schedules vary the model (three patterns of layers, of different reach), pages, chunks and pools; prompts share stems
and media; windows and whole prefixes are evicted, requests aborted, sequences retracted, and in some two workers hand
prompts over. Pages that were never written hold NaN, so that reading one shows. Log-probabilities are compared too: a
window that is wrong in its last few rows may not change which token is likeliest.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from encoder.types import EmbeddingRef
from epd.config import EngineConfig
from epd.engine.sampler import SampleRow, sample
from epd.engine.sequence import key_chain
from epd.engine.worker import build_engine
from epd.kernels.base import AttentionSpec
from epd.kernels.reference import DenseAttention
from epd.kv.errors import PoolTooSmall
from epd.model.embed import EmbeddingSpan, merge_embeddings
from epd.model.hybrid import HybridModel
from epd.types import Abort, FinishReason, GenerateRequest, MediaSpan, Role, SamplingParams
from tests.engine.conftest import Bench, Checkpoint, Rows, make_request
from tests.engine.test_roles import Pair
from tests.fakes.clock import FakeClock
from tests.fakes.mailbox import Mailbox
from tests.fakes.tiny_checkpoint import CHANGES
from tests.fakes.tiny_text import tiny_model
from tests.oracles.effort import scaled

NUM_SCHEDULES = scaled(500)
NUM_GROUPS = 10
NUM_ANSWER = 2
WIDTH = 32
NUM_MEDIA_ROWS = 13
MEDIA_SEED = 7
MEDIA_START = 22
SAMPLING = SamplingParams(max_tokens=NUM_ANSWER, ignore_eos=True, top_logprobs=0)
STEM_LENGTH = 96
STEMS = [tuple((5 * i * i + stem * 31 + i) % 120 for i in range(STEM_LENGTH)) for stem in range(2)]
# Layers, window layers 1, and how far those see. The reach of the second is no multiple of a page less one.
MODELS = (((0, 1, 1, 0), 15), ((0, 1, 0, 1, 1), 6), ((1, 0, 1), 9))


@dataclass(frozen=True)
class Prompt:
    """Tokens of a stem, then a tail; in media prompts some of the stem's tokens are the rows of a medium."""

    stem: int
    length: int
    tail: int
    has_media: bool

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*STEMS[self.stem][: self.length], *((self.tail,) * self.tail))

    @property
    def media_rows(self) -> range:
        """Tokens of the prompt that are rows of the medium."""
        stop = min(MEDIA_START + NUM_MEDIA_ROWS, self.length) if self.has_media else 0
        return range(MEDIA_START, max(MEDIA_START, stop))


@dataclass
class Tally:
    """What the schedules of this run did, so that the test knows that it tested something."""

    healed_hits: int = 0
    prefix_hits: int = 0
    retractions: int = 0
    aborted_while_healing: int = 0
    retracted_while_healing: int = 0
    healed_before_handover: int = 0
    published_pages: int = 0
    window_pages: int = 0


@dataclass
class World:
    """A model and what it says about prompts, computed once and without any cache."""

    model: HybridModel
    folder: Path
    answers: dict[Prompt, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    kv: dict[tuple[Prompt, tuple[int, ...]], dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @torch.inference_mode()
    def answer(self, prompt: Prompt) -> tuple[tuple[int, float], ...]:
        """(token, log-probability) of each token of the answer."""
        if prompt not in self.answers:
            tokens, answer = list(prompt.token_ids), []
            for index in range(NUM_ANSWER):
                hidden = self.forward(prompt, tokens, DenseAttention([len(tokens)]))
                sampled = sample(self.model.logits(hidden[-1:]), [SampleRow(SAMPLING, index)])[0]
                assert sampled is not None
                assert sampled.logprob is not None
                answer.append((sampled.token_id, sampled.logprob.logprob))
                tokens.append(sampled.token_id)
            self.answers[prompt] = tuple(answer)
        return self.answers[prompt]

    def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """With the answer, whose last token is never computed."""
        return (*prompt.token_ids, *(token for token, _ in self.answer(prompt)))

    @torch.inference_mode()
    def layers(self, prompt: Prompt) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of every layer for all tokens of prompt and answer."""
        tokens = self.tokens(prompt)
        if (prompt, tokens) not in self.kv:
            recorder = Recorder(len(tokens))
            self.forward(prompt, tokens, recorder)
            self.kv[prompt, tokens] = recorder.kv
        return self.kv[prompt, tokens]

    def forward(self, prompt: Prompt, tokens: Sequence[int], attention: DenseAttention) -> Tensor:
        rows = prompt.media_rows
        spans = [EmbeddingSpan(rows.start, rows.stop, media_rows()[: len(rows)])] if rows else []
        hidden = merge_embeddings(self.model.embed(torch.tensor(list(tokens))), spans)
        return self.model(hidden, torch.arange(len(tokens)), attention)


class Recorder(DenseAttention):
    """Dense attention that remembers keys and values by layer."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__([num_tokens])
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        self.kv[spec.index] = (k_TKH.clone(), v_TKV.clone())
        return super().attend(spec, q_TNH, k_TKH, v_TKV, sink_N)


@cache
def media_rows() -> Tensor:
    return torch.randn(NUM_MEDIA_ROWS, WIDTH, generator=torch.Generator().manual_seed(MEDIA_SEED))


@pytest.fixture(scope="module")
def worlds(checkpoint: Checkpoint) -> list[World]:
    """The checkpoint's folder only names the workers; the models are smaller and differ in their layers."""
    made = []
    for pattern, reach in MODELS:
        changes: dict[str, object] = {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": len(pattern),
            "hybrid_layer_pattern": list(pattern),
            "moe_layer_freq": [0, 1, *([0] * (len(pattern) - 2))],
            "moe_intermediate_size": 16,
            "sliding_window": reach + 1,
            "sliding_window_size": reach + 1,
        }
        made.append(World(tiny_model(**(CHANGES | changes)).eval(), checkpoint.folder))
    return made


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counted = Tally()
    yield counted
    # All groups ran, unless one was picked by hand.
    share = NUM_SCHEDULES / 500
    if counted.healed_hits > 100 * share:
        assert min(counted.prefix_hits, counted.healed_before_handover) > 20 * share, counted
        assert min(counted.aborted_while_healing, counted.retracted_while_healing, counted.retractions) > 5 * share, (
            counted
        )
        assert counted.window_pages > 1000 * share, counted


def draw_prompt(rng: random.Random, like: Prompt | None = None) -> Prompt:
    """Lengths at page borders and next to them, near the start and far from it; mostly what begins like `like`."""
    length = rng.choice((7, 24, 33, 48, 49, 63, 72, 80, 95, STEM_LENGTH))
    if like is not None and rng.random() < 0.85:
        return Prompt(like.stem, length, rng.choice((0, 2)), like.has_media)
    return Prompt(rng.randrange(2), length, rng.choice((0, 2)), rng.random() < 0.5)


def to_request(request_id: str, prompt: Prompt) -> GenerateRequest:
    rows = prompt.media_rows
    if not rows:
        return make_request(request_id, prompt.token_ids, max_tokens=NUM_ANSWER, ignore_eos=True, top_logprobs=0)
    ref = EmbeddingRef(
        key=f"{MEDIA_SEED:032x}",  # type: ignore[arg-type]
        arena="none",
        offset_bytes=0,
        num_rows=NUM_MEDIA_ROWS,
        width=WIDTH,
        dtype="float32",
        checksum=0,
        lease_id="medium",
    )
    span = MediaSpan(start=rows.start, stop=rows.stop, key=ref.key, row_start=0, media=0)
    return make_request(
        request_id,
        prompt.token_ids,
        max_tokens=NUM_ANSWER,
        ignore_eos=True,
        top_logprobs=0,
        spans=(span,),
        embeddings=(ref,),
    )


def make(world: World, rng: random.Random, *, role: Role, clock: FakeClock, links: dict[str, Mailbox]) -> Bench:
    page_size = rng.choice((2, 4, 8))
    return make_with(world, rng, page_size=page_size, role=role, clock=clock, links=links)


def make_with(
    world: World, rng: random.Random, *, page_size: int, role: Role, clock: FakeClock, links: dict[str, Mailbox]
) -> Bench:
    config = EngineConfig(
        model_dir=world.folder,
        model_name="tiny",
        role=role,
        attention="reference",
        page_size=page_size,
        kv_budget_bytes=50_000,
        expected_sequence_tokens=104,
        chunk_tokens=rng.choice((max(4, page_size), 8, 13, 24, 64)),
        max_running=4,
        retention_stride_tokens=rng.choice((16, 64, 4096)),
        dense_retention_tokens=0,
        decode_release_interval_tokens=rng.choice((1, 4)),
    )
    address = "prefill" if role is Role.PREFILL else "decode"
    mailbox, rows = Mailbox(address, links), Rows()
    rows.rows = {"medium": media_rows()}
    try:
        build_engine(config, mailbox, model=world.model, embeddings=rows, clock=clock.clock)
    except PoolTooSmall as error:
        [least] = re.findall(r"below the ([0-9,]+) that", str(error))
    budget = int(int(least.replace(",", "")) * rng.choice((1.0, 1.2, 2.0)))
    config = replace(config, kv_budget_bytes=budget)
    engine = build_engine(config, mailbox, model=world.model, embeddings=rows, clock=clock.clock)
    storage = engine.loop._mover._storage
    for layer in (*storage.full_layer_indices, *storage.window_layer_indices):
        storage.keys(layer).fill_(float("nan"))
        storage.values(layer).fill_(float("nan"))
    return Bench(engine, mailbox, clock, rows)


def healing_ids(bench: Bench) -> set[str]:
    return {sequence.request_id for sequence in bench.engine.scheduler._roster.running.values() if sequence.is_healing}


def disturb(bench: Bench, rng: random.Random) -> None:
    """Pages go as other requests would make them go."""
    ledger = bench.engine.cache.device._ledger
    if rng.random() < 0.8:
        ledger.evict_window(rng.choice((1, 3, 10, 1000)))
    else:
        ledger.evict_full(rng.choice((1, 3, 10)))


def retract(bench: Bench, tally: Tally) -> None:
    """Put the latest sequence back, as if the earliest had found no page; its step has not been planned yet."""
    running = list(bench.engine.scheduler._roster.running.values())
    if len(running) > 1:
        tally.retracted_while_healing += running[-1].is_healing
        assert bench.engine.scheduler._retract_after(running[0], {})


def first_of_all(bench: Bench, rng: random.Random, submit: Callable[[Prompt], None], run: Callable[[], None]) -> Prompt:
    """Compute a long prompt and lose its windows, all or some: what most of the others will begin with."""
    base = Prompt(rng.randrange(2), STEM_LENGTH, 0, rng.random() < 0.5)
    submit(base)
    run()
    bench.engine.cache.device._ledger.evict_window(rng.choice((2, 6, 1000, 1000, 1000)))
    return base


def check_tree(bench: Bench, world: World, asked: dict[str, Prompt], tally: Tally) -> None:
    """Every page that can be found holds what a fresh forward over its tokens computes, in every layer of its pool."""
    cache_, storage = bench.engine.cache, bench.engine.loop._mover._storage
    page_size, seed = cache_.page_size, bench.engine.scheduler._config.key_seed
    owners: dict[bytes, tuple[Prompt, int]] = {}
    for prompt in asked.values():
        chain = key_chain(to_request("x", prompt), page_size=page_size, seed=seed)
        for token, _ in world.answer(prompt):
            chain.append(token)
        owners |= {key: (prompt, index) for index, key in enumerate(chain.keys)}
    found: dict[bool, list[tuple[Prompt, int, int]]] = {False: [], True: []}
    for node in cache_.device._ledger.tree.nodes.values():
        for offset, (key, page) in enumerate(zip(node.keys, node.full_pages, strict=True)):
            found[False].append((*owners[key], page))
            window_page = node.window_page(node.start + offset)
            if window_page is not None:
                found[True].append((*owners[key], window_page))
    tally.published_pages += len(found[False])
    tally.window_pages += len(found[True])
    for is_window, layers in ((False, storage.full_layer_indices), (True, storage.window_layer_indices)):
        if not found[is_window]:
            continue
        pages = torch.tensor([page for _, _, page in found[is_window]])
        for layer in layers:
            for kind, held in enumerate((storage.keys(layer), storage.values(layer))):
                wanted = torch.stack(
                    [
                        world.layers(prompt)[layer][kind][index * page_size : (index + 1) * page_size]
                        for prompt, index, _ in found[is_window]
                    ]
                )
                # False where something is NaN.
                assert torch.allclose(held[pages], wanted, atol=1e-4, rtol=1e-3)


def check_answers(
    world: World, asked: dict[str, Prompt], deltas: Sequence[object], reasons: dict[str, FinishReason]
) -> None:
    assert set(reasons) == set(asked)
    got: dict[str, dict[int, tuple[int, float]]] = {}
    for delta in deltas:
        for offset, (token, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):  # type: ignore[attr-defined]
            place = got.setdefault(delta.request_id, {})  # type: ignore[attr-defined]
            assert delta.index + offset not in place, "a token was sent twice"  # type: ignore[attr-defined]
            place[delta.index + offset] = (token, logprob.logprob)  # type: ignore[attr-defined]
    for request_id, prompt in asked.items():
        answer = [got.get(request_id, {})[index] for index in range(len(got.get(request_id, {})))]
        truth = world.answer(prompt)[: len(answer)]
        assert [token for token, _ in answer] == [token for token, _ in truth]
        assert [logprob for _, logprob in answer] == pytest.approx([logprob for _, logprob in truth], abs=2e-4)
        whole = reasons[request_id] is FinishReason.LENGTH
        assert whole or reasons[request_id] is FinishReason.CANCELLED
        assert not whole or len(answer) == NUM_ANSWER


def count(bench: Bench, tally: Tally) -> None:
    counters = bench.engine.scheduler.counters
    tally.healed_hits += counters.healed_hits
    tally.prefix_hits += counters.prefix_hits
    tally.retractions += counters.retractions


def run_alone(world: World, rng: random.Random, tally: Tally) -> None:
    bench = make(world, rng, role=Role.BOTH, clock=FakeClock(), links={})
    asked: dict[str, Prompt] = {}

    def submit(prompt: Prompt) -> None:
        request_id = f"r{len(asked)}"
        asked[request_id] = prompt
        bench.submit(to_request(request_id, prompt))

    base = first_of_all(bench, rng, submit, bench.run)
    for _ in range(rng.randrange(5, 10)):
        action = rng.random()
        if action < 0.4:
            submit(draw_prompt(rng, base))
        elif action < 0.7:
            bench.step()
        elif action < 0.8:
            disturb(bench, rng)
        elif action < 0.9:
            retract(bench, tally)
        else:
            healing = healing_ids(bench)
            request_id = rng.choice(sorted(healing or asked))
            tally.aborted_while_healing += request_id in healing
            bench.mailbox.put(Abort(request_id=request_id))
    bench.run()
    check_answers(world, asked, bench.deltas, {r: finish.reason for r, finish in bench.finishes.items()})
    bench.assert_nothing_leased()
    check_tree(bench, world, asked, tally)
    count(bench, tally)


def run_pair(world: World, rng: random.Random, tally: Tally) -> None:
    links: dict[str, Mailbox] = {}
    clock, page_size = FakeClock(), rng.choice((2, 4, 8))
    prefill, decode = (
        make_with(world, rng, page_size=page_size, role=role, clock=clock, links=links)
        for role in (Role.PREFILL, Role.DECODE)
    )
    pair, asked = Pair(prefill, decode, clock), dict[str, Prompt]()

    def submit(prompt: Prompt) -> None:
        request_id = f"r{len(asked)}"
        asked[request_id] = prompt
        pair.submit(to_request(request_id, prompt))

    base = first_of_all(prefill, rng, submit, pair.run)
    for _ in range(rng.randrange(5, 10)):
        action = rng.random()
        if action < 0.4:
            submit(draw_prompt(rng, base))
        elif action < 0.75:
            rng.choice((prefill, prefill, decode)).step()
        elif action < 0.85:
            disturb(rng.choice((prefill, decode)), rng)
        elif action < 0.95:
            retract(rng.choice((prefill, decode)), tally)
        else:
            request_id = rng.choice(sorted(asked))
            prefill.mailbox.put(Abort(request_id=request_id))
            decode.mailbox.put(Abort(request_id=request_id))
    pair.run()
    reasons = {request_id: pair.finish(request_id).reason for request_id in asked}
    check_answers(world, asked, [*prefill.deltas, *decode.deltas], reasons)
    pair.assert_nothing_leased()
    tally.healed_before_handover += sum(
        finish.usage.healed_tokens > 0 for finish in decode.finishes.values() if finish.reason is FinishReason.LENGTH
    )
    for bench in (prefill, decode):
        check_tree(bench, world, asked, tally)
        count(bench, tally)


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_healing_changes_nothing(worlds: list[World], tally: Tally, group: int) -> None:
    for seed in range(group, NUM_SCHEDULES, NUM_GROUPS):
        rng = random.Random(seed)
        run = run_pair if rng.random() < 0.2 else run_alone
        try:
            run(worlds[rng.randrange(len(worlds))], rng, tally)
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
