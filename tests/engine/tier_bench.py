"""Engines with tiny tiers of KV over a store that may be in trouble, and what they should have answered.

A `Stand` is what outlives an engine: the model, the store's directory or servers, the troubles. `Stand.start` makes an
engine on it, as a restart would; A tally counts which ways between the tiers were taken.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import epd.engine.tiers
from encoder.types import EmbeddingRef
from epd.cache.l3.base import StoreNode
from epd.cache.l3.client import StoreClient
from epd.cache.l3.placement import Placement
from epd.cache.tiers.tiered import TieredCache
from epd.config import EngineConfig
from epd.engine.plan import NOT_FINITE
from epd.engine.sampler import SampleRow, sample
from epd.engine.sequence import key_chain
from epd.engine.settling import settle
from epd.engine.worker import Engine, build_engine
from epd.kernels.reference import DenseAttention
from epd.kv.errors import PoolTooSmall
from epd.kv.stream_mover import StreamMover
from epd.types import Finish, FinishReason, GenerateRequest, MediaSpan, Role, SamplingParams
from tests.engine.conftest import Bench, Rows, make_request
from tests.engine.test_healing_schedules import MEDIA_SEED, NUM_MEDIA_ROWS, WIDTH, Prompt, World, media_rows
from tests.fakes.clock import FakeClock
from tests.fakes.faulty_mover import FaultyMover
from tests.fakes.faulty_node import FaultyNode, Troubles
from tests.fakes.mailbox import Mailbox

NUM_ANSWER = 4
SAMPLING = SamplingParams(max_tokens=NUM_ANSWER, ignore_eos=True, top_logprobs=0)
TIMEOUT_S = 0.02
SETTLE_S = 10.0
_CALM = Troubles()


class TierWorld(World):
    """Answers of NUM_ANSWER tokens, so that drafts of draft heads matter."""

    @torch.inference_mode()
    def answer(self, prompt: Prompt) -> tuple[tuple[int, float], ...]:
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


def to_request(request_id: str, prompt: Prompt) -> GenerateRequest:
    rows, more = prompt.media_rows, dict[str, Any]()
    if rows:
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
        more = {"spans": (span,), "embeddings": (ref,)}
    return make_request(request_id, prompt.token_ids, max_tokens=NUM_ANSWER, ignore_eos=True, top_logprobs=0, **more)


@dataclass
class Stand:
    """`make_nodes` opens the store's nodes anew for each engine; None: no store at all."""

    world: TierWorld = field(repr=False)
    rng: random.Random = field(repr=False)
    tally: Counter[str] = field(repr=False)
    monkeypatch: pytest.MonkeyPatch = field(repr=False)
    make_nodes: Callable[[], list[StoreNode]] | None = field(repr=False)
    troubles: Troubles = _CALM
    page_size: int = 4
    io_bytes: int = 1 << 16
    prefetch_timeout_s: float = 0.5
    draft_tokens: int = 0
    bad_copies: float = 0.0
    """How likely a load from the host is to fail, and four times as likely as a save."""
    is_exact: bool = True
    """Nobody left while something was read for him, so that all damage was looked at."""
    told: set[str] = field(default_factory=set, repr=False)
    """Requests that met KV which a test had damaged on the device, and were told so."""
    nodes: list[FaultyNode] = field(default_factory=list, repr=False)
    asked: dict[str, Prompt] = field(default_factory=dict, repr=False)
    benches: list[Bench] = field(default_factory=list, repr=False)

    def start(
        self, *, role: Role = Role.BOTH, clock: FakeClock | None = None, links: dict[str, Mailbox] | None = None
    ) -> Bench:
        """A new engine, with nothing in its memory."""
        rng, clock, has_store = self.rng, clock or FakeClock(), self.make_nodes is not None and role is not Role.DECODE
        config = EngineConfig(
            model_dir=self.world.folder,
            model_name="tiny",
            role=role,
            attention="reference",
            page_size=self.page_size,
            kv_budget_bytes=50_000,
            expected_sequence_tokens=104,
            chunk_tokens=rng.choice((max(4, self.page_size), 13, 24, 64)),
            max_running=4,
            retention_stride_tokens=rng.choice((16, 64, 4096)),
            dense_retention_tokens=0,
            decode_release_interval_tokens=rng.choice((1, 4)),
            draft_tokens=self.draft_tokens,
            host_budget_bytes=1,
            host_hit_threshold=rng.choice((1, 2)),
            kv_store="local" if has_store else "",
            kv_store_timeout_s=TIMEOUT_S,
            prefetch_timeout_s=self.prefetch_timeout_s,
        )
        mailbox, rows = Mailbox("prefill" if role is Role.PREFILL else "decode", links), Rows()
        rows.rows = {"medium": media_rows()}

        def build(config: EngineConfig) -> Engine:
            return build_engine(config, mailbox, model=self.world.model, embeddings=rows, clock=clock.clock)

        self.monkeypatch.setattr(epd.engine.tiers, "open_store", self._open)
        self.monkeypatch.setattr(
            epd.engine.tiers, "StreamMover", lambda *sides: FaultyMover(StreamMover(*sides), rng, self.bad_copies)
        )
        least = _least(build, config, r"below the ([0-9,]+) that")
        config = replace(config, kv_budget_bytes=int(least * rng.choice((1.0, 1.1, 1.5))))
        least = _least(build, config, r"host tier, or ([0-9,]+) and more")
        config = replace(config, host_budget_bytes=int(least * rng.choice((1.0, 4.0, 20.0, 40.0, 40.0))))
        bench = Bench(build(config), mailbox, clock, rows)
        _fill_with_nan(bench)
        self._watch(bench)
        self.benches.append(bench)
        return bench

    def request(self, prompt: Prompt) -> GenerateRequest:
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = prompt
        return to_request(request_id, prompt)

    def end(self, bench: Bench, *, flush_s: float = 0.5) -> None:
        """Count what it did, and close it; without time to flush it is as if it were killed."""
        cache, tiers = bench.engine.cache, bench.engine.tiers
        if flush_s:
            assert settle(cache, SETTLE_S)
            bench.assert_nothing_leased()
            check_pages(bench, self.world, self.asked, self.tally)
            cache.check()
        else:
            self.is_exact = False
        self._count(bench)
        if tiers.bridge is not None:
            tiers.bridge.close(flush_s)
        if tiers.mover is not None:
            tiers.mover.close()
        if cache.host is not None:
            for pool in (cache.host.full, cache.host.window):
                pool.check()
                # One that is killed has copies under way.
                held = pool.stats().filling + pool.stats().pinned + pool.stats().doomed
                assert not flush_s or not held, pool.stats()

    def __post_init__(self) -> None:
        # In slices a damaged value may be given up for what else is wrong with it. And who has no time looks at little.
        self.is_exact = self.io_bytes >= 1 << 16 and self.prefetch_timeout_s > 0.1

    @property
    def num_injected(self) -> int:
        """Values of which damaged bytes were handed to a client."""
        return sum(node.num_damaged_values for node in self.nodes)

    def _open(self, url: str, **settings: Any) -> StoreClient:
        """In place of `open_store`: what it makes, over nodes of this test."""
        assert self.make_nodes is not None
        nodes = [
            FaultyNode(node, self.troubles, random.Random(self.rng.random()), io_bytes=self.io_bytes)
            for node in self.make_nodes()
        ]
        self.nodes += nodes
        return StoreClient(
            nodes,
            placement=Placement([node.name for node in nodes]) if len(nodes) > 1 else None,
            io_bytes=self.io_bytes,
            timeout_s=settings["timeout_s"],
            value_bytes=settings["value_bytes"],
        )

    def _watch(self, bench: Bench) -> None:
        """Count what sets saves off, and what is condemned."""
        cache = bench.engine.cache

        def watched(name: str) -> Callable[..., None]:
            inner = getattr(cache, name)

            def call(*words: Any, **named: Any) -> None:
                before = num_saves(cache)
                inner(*words, **named)
                self.tally[f"saved when {name}"] += num_saves(cache) > before

            return call

        def condemn(keys: Sequence[bytes]) -> None:
            self.tally["condemned"] += 1
            inner_condemn(keys)

        inner_condemn = cache.condemn
        for name in ("admitted", "prefilled", "ended"):
            setattr(cache, name, watched(name))
        cache.condemn = condemn  # type: ignore[method-assign]

    def _count(self, bench: Bench) -> None:
        tally, counters = self.tally, bench.engine.scheduler.counters
        for name in (
            "healed_hits",
            "prefix_hits",
            "retractions",
            "host_hit_tokens",
            "store_hit_tokens",
            "short_loads",
            "failed_loads",
            "accepted_tokens",
            "imports",
        ):
            tally[name] += getattr(counters, name)
        host = bench.engine.cache.stats().host
        if host is not None:
            for name in (
                "num_loads",
                "num_local_window_pages",
                "num_saves",
                "num_rescued_pages",
                "num_unsaved_pages",
                "num_failed_loads",
                "num_failed_saves",
            ):
                tally[name] += getattr(host, name)
            tally["host evictions"] += host.full.num_evicted + host.window.num_evicted
        bridge = bench.engine.tiers.bridge
        if bridge is not None:
            stats = bridge.bridge_stats()
            for part in ("prefetch", "incoming", "writeback", "keepalive"):
                for name, value in getattr(stats, part).items():
                    tally[f"{part} {name}"] += value
            store = bridge.stats()
            for name in ("corrupt", "timeouts", "failures", "unkept"):
                tally[f"store {name}"] += getattr(store, name)
        for finish in bench.finishes.values():
            usage = finish.usage
            tally["healed over host pages"] += usage.healed_tokens > 0 and usage.host_tokens + usage.store_tokens > 0


def num_saves(cache: TieredCache) -> int:
    """Saves to the host that were asked for so far."""
    host = cache.stats().host
    return 0 if host is None else host.num_saves + host.num_pending_copies


def check_answers(stand: Stand) -> None:
    """Every request ended once, and all it was given is what the model says without any cache."""
    finishes: dict[str, Finish] = {}
    got: dict[str, dict[int, tuple[int, float]]] = {}
    for bench in stand.benches:
        finishes |= bench.finishes
        for delta in bench.deltas:
            place = got.setdefault(delta.request_id, {})
            for offset, (token, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
                assert delta.index + offset not in place, "a token was sent twice"
                place[delta.index + offset] = (token, logprob.logprob)
    assert set(finishes) == set(stand.asked)
    for request_id, prompt in stand.asked.items():
        answer = [got.get(request_id, {})[index] for index in range(len(got.get(request_id, {})))]
        truth, finish = stand.world.answer(prompt)[: len(answer)], finishes[request_id]
        assert [token for token, _ in answer] == [token for token, _ in truth]
        assert [logprob for _, logprob in answer] == pytest.approx([logprob for _, logprob in truth], abs=2e-4)
        if finish.reason is FinishReason.FAILED and finish.retryable:
            # Its gateway asks again: another worker's KV was lost on its way.
            assert finish.code == "kv_lost", finish
            assert stand.bad_copies, finish
        elif finish.reason is FinishReason.FAILED:
            assert request_id in stand.told, finish
            assert finish.code == NOT_FINITE, finish
        else:
            assert finish.reason in (FinishReason.LENGTH, FinishReason.CANCELLED), finish
            assert finish.reason is FinishReason.CANCELLED or len(answer) == NUM_ANSWER


def check_pages(bench: Bench, world: TierWorld, asked: dict[str, Prompt], tally: Counter[str]) -> None:
    """Every page that can be found, on the device and in host memory, holds what a fresh forward computes."""
    cache, device, host = bench.engine.cache, bench.engine.loop._mover._storage, bench.engine.tiers.host
    seed = bench.engine.scheduler._config.key_seed
    owners: dict[bytes, tuple[Prompt, int]] = {}
    for prompt in asked.values():
        chain = key_chain(to_request("x", prompt), page_size=cache.page_size, seed=seed)
        for token, _ in world.answer(prompt):
            chain.append(token)
        owners |= {key: (prompt, index) for index, key in enumerate(chain.keys)}
    found: dict[tuple[str, bool], dict[bytes, int]] = {
        (tier, is_window): {} for tier in ("device", "host") for is_window in (False, True)
    }
    # What was condemned in use is still there, where no lookup comes.
    for node in [node for node in cache.device.ledger.tree.nodes.values() if not node.is_hidden]:
        for offset, (key, page) in enumerate(zip(node.keys, node.full_pages, strict=True)):
            found["device", False][key] = page
            window_page = node.window_page(node.start + offset)
            if window_page is not None:
                found["device", True][key] = window_page
    if cache.host is not None:
        for is_window, pool in ((False, cache.host.full), (True, cache.host.window)):
            found["host", is_window] = {key: page for key, page in pool._ready.items() if key in owners}
    for (tier, is_window), pages in found.items():
        tally[f"pages looked at on the {tier}"] += len(pages)
        layers = device.window_layer_indices if is_window else device.full_layer_indices
        # Draft heads have no answer of their own to be held to: what they write may only cost guesses.
        for layer in [layer for layer in layers if layer < len(world.model.config.layers)] if pages else []:
            for kind, held in enumerate((device.keys(layer), device.values(layer))):
                rows = held
                if tier == "host":
                    assert host is not None
                    rows = host.layer_views(layer)[kind].view(held.dtype).reshape(-1, *held.shape[1:])
                assert set(pages) <= set(owners), "pages that no right answer leaves"
                wanted = torch.stack([_page(world, owners[key], layer, kind, cache.page_size) for key in pages])
                # False where something is NaN.
                near = torch.isclose(rows[list(pages.values())], wanted, atol=1e-4, rtol=1e-3).flatten(1).all(1)
                wrong = [owners[key] for key, is_near in zip(pages, near.tolist(), strict=True) if not is_near]
                assert not wrong, f"{tier} pages, {'window' if is_window else 'full'} layer {layer}: {wrong}"


def _page(world: TierWorld, owner: tuple[Prompt, int], layer: int, kind: int, page_size: int) -> Tensor:
    prompt, index = owner
    return world.layers(prompt)[layer][kind][index * page_size : (index + 1) * page_size]


def _least(build: Callable[[EngineConfig], Engine], config: EngineConfig, words: str) -> int:
    """The least budget, as the refusal of a smaller one says."""
    with pytest.raises(PoolTooSmall) as refused:
        build(config)
    found = re.search(words, str(refused.value))
    assert found is not None, refused.value
    return int(found[1].replace(",", ""))


def _fill_with_nan(bench: Bench) -> None:
    """Reading a page that nobody wrote shows."""
    storage, host = bench.engine.loop._mover._storage, bench.engine.tiers.host
    for layer in (*storage.full_layer_indices, *storage.window_layer_indices):
        storage.keys(layer).fill_(float("nan"))
        storage.values(layer).fill_(float("nan"))
    if host is not None:
        for kind in ("full", "window"):
            host.pool(kind).fill_(0xFF)
