"""Prefill and decode as two engines that only share messages."""

from dataclasses import dataclass
from itertools import pairwise

import msgspec
import pytest

from epd.transport.base import Peer, Received
from epd.types import (
    Abort,
    ExpectKv,
    Finish,
    FinishReason,
    GenerateRequest,
    KvRefused,
    KvTransfer,
    Role,
    SamplingParams,
    Submit,
    TokenDelta,
)
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.fakes.clock import FakeClock
from tests.fakes.mailbox import GATEWAY, Mailbox
from tests.oracles.plain_generate import plain_generate

PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(75)]


@dataclass
class Pair:
    prefill: Bench
    decode: Bench
    clock: FakeClock

    def submit(self, request: GenerateRequest, *, expect: bool = True, incarnation: str | None = None) -> None:
        if expect:
            self.decode.mailbox.put(ExpectKv(request=request))
        known = self.decode.engine.identity.incarnation if incarnation is None else incarnation
        self.prefill.submit(request, decode_address="decode", decode_incarnation=known)

    def run(self, *, max_steps: int = 400) -> None:
        for _ in range(max_steps):
            self.prefill.step()
            self.decode.step()
            benches = (self.prefill, self.decode)
            if all(bench.engine.scheduler.is_idle and not bench.mailbox.inbox for bench in benches):
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def answer(self, request_id: str) -> list[int]:
        deltas = [*self.prefill.deltas, *self.decode.deltas]
        mine = sorted((delta for delta in deltas if delta.request_id == request_id), key=lambda delta: delta.index)
        for delta, following in pairwise(mine):
            assert following.index == delta.index + len(delta.token_ids)
        return [token for delta in mine for token in delta.token_ids]

    def finish(self, request_id: str) -> Finish:
        [finish] = [b.finishes[request_id] for b in (self.prefill, self.decode) if request_id in b.finishes]
        return finish

    def assert_nothing_leased(self) -> None:
        self.prefill.assert_nothing_leased()
        self.decode.assert_nothing_leased()


@pytest.fixture
def pair(make_bench: MakeBench) -> Pair:
    return make_pair(make_bench)


def make_pair(make_bench: MakeBench, *, both: dict[str, object] | None = None, **decode_changes: object) -> Pair:
    """Settings of both workers, and of decode alone."""
    links: dict[str, Mailbox] = {}
    clock = FakeClock()
    prefill = make_bench(links=links, address="prefill", clock=clock, role=Role.PREFILL, **(both or {}))
    decode = make_bench(links=links, address="decode", clock=clock, role=Role.DECODE, **(both or {}) | decode_changes)
    return Pair(prefill, decode, clock)


def truth(checkpoint: Checkpoint, token_ids: list[int], max_tokens: int = 8) -> list[int]:
    return plain_generate(checkpoint.model, token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize("length", [1, 4, 16, 17, 75])
@pytest.mark.parametrize("expect_first", [True, False])
def test_the_answer_is_the_same_over_two_workers(
    checkpoint: Checkpoint, pair: Pair, length: int, expect_first: bool
) -> None:
    request = make_request("a", PROMPT[:length], ignore_eos=True, max_tokens=30)
    pair.submit(request, expect=expect_first)
    pair.run()
    if not expect_first:
        assert pair.answer("a") == truth(checkpoint, PROMPT[:length], 30)[:1]
        pair.decode.mailbox.put(ExpectKv(request=request))
        pair.run()
    assert pair.answer("a") == truth(checkpoint, PROMPT[:length], 30)
    finish = pair.finish("a")
    assert finish.usage.completion_tokens == 30
    assert "a" in pair.decode.finishes
    assert {"queue_s", "first_token_s", "transfer_s", "decode_queue_s", "decode_s"} <= set(finish.timings)
    # Prefill and decode say it once each.
    assert [delta.index for delta in (*pair.prefill.deltas, *pair.decode.deltas) if delta.usage is not None] == [0, 1]
    pair.assert_nothing_leased()


def test_what_was_never_written_is_never_read(checkpoint: Checkpoint, pair: Pair) -> None:
    for bench in (pair.prefill, pair.decode):
        storage = bench.engine.loop._mover._storage
        for layer in (*storage.full_layer_indices, *storage.window_layer_indices):
            storage.keys(layer).fill_(float("nan"))
            storage.values(layer).fill_(float("nan"))
    prompts = {f"r{length}": PROMPT[:length] for length in (1, 5, 18, 75)}
    for request_id, token_ids in prompts.items():
        pair.submit(make_request(request_id, token_ids, ignore_eos=True))
    pair.run()
    for request_id, token_ids in prompts.items():
        assert pair.answer(request_id) == truth(checkpoint, token_ids)


def test_only_the_live_window_is_sent(pair: Pair) -> None:
    pair.submit(make_request("a", PROMPT * 4, ignore_eos=True))
    while not pair.decode.mailbox.inbox or not isinstance(pair.decode.mailbox.inbox[-1].message, KvTransfer):
        pair.prefill.step()
    transfer = pair.decode.mailbox.inbox[-1].message
    assert isinstance(transfer, KvTransfer)
    assert (transfer.first_full_page, transfer.num_full_pages) == (0, 75)
    # What the next token reads: 15 earlier tokens, 4 pages of 4.
    assert (transfer.first_window_page, transfer.num_window_pages) == (71, 4)


def test_decode_uses_the_prefix_it_already_has(checkpoint: Checkpoint, pair: Pair) -> None:
    pair.submit(make_request("a", PROMPT, ignore_eos=True, max_tokens=12))
    pair.run()
    second = PROMPT + pair.answer("a") + [1, 2, 3]
    pair.submit(make_request("b", second, ignore_eos=True))
    free_before = pair.decode.engine.cache.stats().full.free
    pair.run()
    assert pair.answer("b") == truth(checkpoint, second)
    assert pair.finish("b").usage.cached_tokens >= 72
    # 98 tokens of which 84 were in the tree: a few new pages, not 25.
    assert free_before - pair.decode.engine.cache.stats().full.free <= 5
    pair.assert_nothing_leased()


def test_an_answer_of_one_token_never_reaches_decode(pair: Pair) -> None:
    pair.submit(make_request("a", PROMPT, ignore_eos=True, max_tokens=1))
    pair.run()
    assert "a" in pair.prefill.finishes
    assert pair.decode.engine.loop.num_expected == 0
    pair.assert_nothing_leased()


def test_another_incarnation_refuses(pair: Pair) -> None:
    pair.submit(make_request("a", PROMPT), incarnation="the one before")
    pair.run()
    finish = pair.finish("a")
    assert (finish.reason, finish.retryable, finish.code) == (FinishReason.FAILED, True, "kv_refused")
    assert "the one before" in finish.message
    pair.submit(make_request("b", PROMPT), expect=False, incarnation="the one before")
    pair.run()
    pair.decode.mailbox.put(ExpectKv(request=make_request("b", PROMPT)))
    pair.run()
    assert pair.finish("b").retryable
    pair.assert_nothing_leased()


@pytest.mark.parametrize("changes", [{"page_size": 8}, {"dtype": "bfloat16"}, {"weights": "bfloat16"}])
def test_a_prompt_is_not_computed_for_a_worker_that_holds_kv_otherwise(
    make_bench: MakeBench, changes: dict[str, object]
) -> None:
    pair = make_pair(make_bench, **changes)
    infos = [bench.engine.loop._info(0) for bench in (pair.prefill, pair.decode)]
    assert infos[0].kv_fingerprint != infos[1].kv_fingerprint
    where = {"decode_address": "decode", "decode_incarnation": infos[1].incarnation}
    pair.prefill.submit(make_request("a", PROMPT), kv_fingerprint=infos[1].kv_fingerprint, **where)
    pair.prefill.run()
    finish = pair.prefill.finishes["a"]
    assert (finish.code, finish.status, finish.retryable) == ("kv_layout", 500, False)
    assert infos[1].kv_fingerprint in finish.message
    assert pair.prefill.engine.scheduler.counters.steps == 0
    pair.prefill.submit(make_request("b", PROMPT), kv_fingerprint=infos[0].kv_fingerprint, **where)
    pair.prefill.run()
    assert pair.prefill.engine.scheduler.counters.steps > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"layout_fingerprint": "other"},
        {"num_full_pages": 18},
        {"first_window_page": 16, "num_window_pages": 3},
        {"num_tokens": 0},
    ],
)
def test_kv_of_another_shape_is_refused(pair: Pair, changes: dict[str, object]) -> None:
    pair.submit(make_request("a", PROMPT))
    while not any(isinstance(item.message, KvTransfer) for item in pair.decode.mailbox.inbox):
        pair.prefill.step()
    *rest, last = pair.decode.mailbox.inbox
    wrong = msgspec.structs.replace(last.message, **changes)
    pair.decode.mailbox.inbox = [*rest, Received(last.peer, wrong, last.tensors)]
    pair.decode.step()
    assert isinstance(pair.prefill.mailbox.inbox[-1].message, KvRefused)
    pair.run()
    assert pair.finish("a").retryable


def test_a_decode_worker_that_is_gone_makes_the_request_retryable(pair: Pair) -> None:
    pair.prefill.mailbox.unreachable.add("decode")
    pair.submit(make_request("a", PROMPT))
    pair.prefill.run()
    finish = pair.finish("a")
    assert (finish.status, finish.code, finish.retryable) == (503, "decode_unreachable", True)
    pair.prefill.assert_nothing_leased()


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_at_any_time_ends_once_and_frees_all(pair: Pair, num_steps: int) -> None:
    pair.submit(make_request("a", PROMPT + PROMPT, ignore_eos=True, max_tokens=40))
    for _ in range(num_steps):
        pair.prefill.step()
        pair.decode.step()
    pair.prefill.mailbox.put(Abort(request_id="a"))
    pair.decode.mailbox.put(Abort(request_id="a"))
    pair.run()
    assert pair.finish("a").reason is FinishReason.CANCELLED
    assert pair.decode.engine.loop.num_expected == 0
    pair.assert_nothing_leased()


def test_kv_on_its_way_when_the_abort_comes_is_dropped(pair: Pair) -> None:
    pair.submit(make_request("a", PROMPT))
    while not any(isinstance(item.message, KvTransfer) for item in pair.decode.mailbox.inbox):
        pair.prefill.step()
    [expect, transfer] = pair.decode.mailbox.inbox
    pair.decode.mailbox.inbox = [expect, Received(GATEWAY, Abort(request_id="a")), transfer]
    pair.run()
    assert pair.finish("a").reason is FinishReason.CANCELLED
    assert not pair.decode.deltas
    pair.assert_nothing_leased()


def test_orphans_and_expectations_expire(pair: Pair) -> None:
    pair.submit(make_request("a", PROMPT), expect=False)
    pair.run()
    pair.decode.mailbox.put(ExpectKv(request=make_request("b", PROMPT, deadline_unix_s=pair.clock.unix_s + 5)))
    pair.decode.step()
    loop = pair.decode.engine.loop
    assert (loop.num_orphans, loop.num_expected) == (1, 1)
    for _ in range(20):
        pair.clock.advance(5.0)
        pair.decode.mailbox.put(Abort(request_id="nobody"))  # the gateway is alive
        pair.decode.step()
    assert (loop.num_orphans, loop.num_expected) == (0, 0)
    assert not pair.decode.finishes
    pair.assert_nothing_leased()


def test_transfers_wait_in_host_memory_for_a_place(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    pair = make_pair(make_bench, max_running=2)
    prompts = {f"r{i}": PROMPT[i : i + 30] for i in range(5)}
    for request_id, token_ids in prompts.items():
        pair.submit(make_request(request_id, token_ids, ignore_eos=True, max_tokens=10))
    pair.run()
    assert pair.decode.engine.scheduler.counters.largest_batch == 2
    for request_id, token_ids in prompts.items():
        assert pair.answer(request_id) == truth(checkpoint, token_ids, 10)
    pair.assert_nothing_leased()


def test_a_full_decode_worker_makes_the_request_retryable(make_bench: MakeBench) -> None:
    pair = make_pair(make_bench, max_running=1, max_waiting=1)
    for i in range(4):
        pair.submit(make_request(f"r{i}", PROMPT[i : i + 9], ignore_eos=True, max_tokens=40))
    pair.run()
    refused = [finish for finish in pair.decode.finishes.values() if finish.code == "overloaded"]
    assert refused
    assert all(finish.retryable and finish.status == 503 for finish in refused)
    pair.assert_nothing_leased()


def test_each_role_refuses_what_is_not_its_work(pair: Pair, make_bench: MakeBench) -> None:
    request = make_request("a", PROMPT)
    pair.prefill.mailbox.put(Submit(request=request))
    pair.prefill.mailbox.put(ExpectKv(request=make_request("b", PROMPT)))
    pair.decode.mailbox.put(Submit(request=request, decode_address="decode"))
    both = make_bench()
    both.mailbox.put(Submit(request=request, decode_address="decode"))
    for bench, request_ids in ((pair.prefill, "ab"), (pair.decode, "a"), (both, "a")):
        bench.run()
        assert [bench.finishes[request_id].code for request_id in request_ids] == ["wrong_role"] * len(request_ids)


def test_draining_decode_hands_back_what_it_expects(pair: Pair) -> None:
    pair.submit(make_request("a", PROMPT, ignore_eos=True, max_tokens=6))
    for _ in range(4):
        pair.prefill.step()
        pair.decode.step()
    pair.decode.mailbox.put(ExpectKv(request=make_request("b", PROMPT)))
    pair.decode.step()
    pair.decode.engine.loop.drain()
    pair.decode.mailbox.put(ExpectKv(request=make_request("c", PROMPT)))
    pair.decode.run()
    assert pair.decode.finishes["a"].reason is FinishReason.LENGTH
    for request_id in "bc":
        assert pair.decode.finishes[request_id].retryable
        assert pair.decode.finishes[request_id].code == "draining"


def test_a_delta_names_only_gateways(pair: Pair) -> None:
    """Replies of decode go to whoever announced the request, not to the prefill worker."""
    request = make_request("a", PROMPT, ignore_eos=True)
    other = Peer(b"another gateway")
    pair.decode.mailbox.put(ExpectKv(request=request), peer=other)
    pair.submit(request, expect=False)
    seen = set()
    for _ in range(30):
        pair.prefill.engine.loop.step()
        pair.decode.engine.loop.step()
        seen |= {peer for peer, message in pair.decode.mailbox.sent if isinstance(message, TokenDelta | Finish)}
    assert seen == {other}


def test_decode_ends_what_a_silent_gateway_announced(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    request = make_request("a", PROMPT, ignore_eos=True)
    pair.submit(request)
    pair.decode.step()
    pair.clock.advance(31.0)
    pair.decode.step()
    finish = pair.decode.finishes["a"]
    assert (finish.reason, finish.status, finish.code, finish.retryable) == (
        FinishReason.FAILED,
        503,
        "gateway_silent",
        True,
    )
    # The KV comes after all; the connection it comes by is no gateway, and nobody misses it.
    pair.run()
    pair.clock.advance(31.0)
    pair.decode.step()
    assert pair.decode.engine.loop.num_orphans == 0
    assert [record.message for record in caplog.records if "silent" in record.message] == [
        f"gateway {GATEWAY} fell silent; 1 requests of it are ended"
    ]
    pair.assert_nothing_leased()
