"""Requests that cannot be served, and trouble that must stay with the request it belongs to."""

import re
import threading
import time

import pytest
import torch

from epd.engine.plan import StepPlan, StepResult
from epd.engine.sequence import Sequence
from epd.transport.base import Peer, Received
from epd.types import Abort, Finish, FinishReason, Hello, MediaSpan, SamplingParams, Submit, WorkerInfo
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.fakes.mailbox import GATEWAY
from tests.oracles.plain_generate import plain_generate

PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(75)]


def truth(checkpoint: Checkpoint, token_ids: list[int], max_tokens: int = 8) -> list[int]:
    return plain_generate(checkpoint.model, token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def span(start: int, stop: int, *, row_start: int = 0, media: int = 0) -> MediaSpan:
    return MediaSpan(start=start, stop=stop, key="0" * 32, row_start=row_start, media=media)  # type: ignore[arg-type]


def test_a_prompt_beyond_the_context_is_told_the_numbers(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.submit(make_request("a", [1] * 2045, max_tokens=8))
    bench.submit(make_request("b", [], max_tokens=8))
    bench.submit(make_request("c", [1, 500], max_tokens=8))
    bench.submit(make_request("d", [1, 2], max_tokens=3, num_emitted=3))
    bench.run()
    assert (bench.finishes["a"].status, bench.finishes["a"].code) == (400, "context_length_exceeded")
    assert "2053" in bench.finishes["a"].message
    assert "2048" in bench.finishes["a"].message
    assert "500" in bench.finishes["c"].message
    assert {bench.finishes[i].code for i in "bcd"} == {"invalid_request"}


def test_the_context_is_what_the_pool_holds_when_that_is_less(make_bench: MakeBench) -> None:
    bench = make_bench(kv_budget_bytes=400_000, max_running=4)
    limit = bench.engine.identity.max_context_tokens
    assert limit < 1000
    bench.submit(make_request("a", [1] * (limit - 7), max_tokens=8))
    bench.submit(make_request("b", [3] * (limit - 40), max_tokens=40, ignore_eos=True))
    bench.run()
    assert bench.finishes["a"].status == 400
    assert len(bench.answers["b"]) == 40
    bench.assert_nothing_leased()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((span(2, 8), span(6, 9)), "overlaps"),
        ((span(2, 80),), "leaves the 75 prompt tokens"),
        ((span(2, 8, media=1),), "medium 1 of 1"),
        ((span(2, 8, row_start=10),), r"rows \[10, 16\), its embedding has 12"),
        ((span(2, 8, row_start=-1),), "rows"),
    ],
)
def test_spans_that_do_not_fit_their_rows_name_both(
    make_bench: MakeBench, spans: tuple[MediaSpan, ...], message: str
) -> None:
    bench = make_bench()
    ref = bench.rows.put("lease", 12, 64, seed=1)
    bench.submit(make_request("a", PROMPT, spans=spans, embeddings=(ref,)))
    bench.run()
    assert bench.finishes["a"].status == 400
    assert re.search(message, bench.finishes["a"].message)


def test_rows_of_another_width_are_refused(make_bench: MakeBench) -> None:
    bench = make_bench()
    ref = bench.rows.put("lease", 12, 32, seed=1)
    bench.submit(make_request("a", PROMPT, spans=(span(2, 8),), embeddings=(ref,)))
    bench.run()
    assert "width 32" in bench.finishes["a"].message


def test_a_lost_embedding_fails_its_request_alone(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench(chunk_tokens=40)
    ref = bench.rows.put("lease", 12, 64, seed=1)
    bench.submit(make_request("b", PROMPT[:20], ignore_eos=True))
    bench.submit(make_request("a", PROMPT, spans=(span(60, 70),), embeddings=(ref,)))
    bench.rows.rows.clear()
    bench.run()
    finish = bench.finishes["a"]
    assert (finish.code, finish.retryable) == ("embedding_lost", True)
    assert bench.answers["b"] == truth(checkpoint, PROMPT[:20])
    bench.assert_nothing_leased()


def test_waiting_is_bounded(make_bench: MakeBench) -> None:
    bench = make_bench(max_waiting=3, max_running=1)
    for i in range(5):
        bench.submit(make_request(f"r{i}", PROMPT[: 10 + i], ignore_eos=True))
    bench.run()
    refused = [r for r, finish in bench.finishes.items() if finish.code == "overloaded"]
    assert refused == ["r3", "r4"]
    assert bench.finishes["r3"].status == 503


def test_deadlines_end_requests_wherever_they_are(make_bench: MakeBench) -> None:
    bench = make_bench(max_running=1)
    late = bench.clock.unix_s + 10
    for request_id in ("running", "waiting"):
        bench.submit(make_request(request_id, PROMPT, max_tokens=200, ignore_eos=True, deadline_unix_s=late))
    for _ in range(5):
        bench.step()
    bench.clock.advance(9.0)
    bench.mailbox.put(Hello(sequence=1))
    bench.step()
    assert not bench.finishes
    bench.clock.advance(2.0)
    bench.run()
    assert {finish.status for finish in bench.finishes.values()} == {504}
    assert len(bench.finishes) == 2
    bench.assert_nothing_leased()


def test_short_of_pages_the_latest_goes_back_and_loses_nothing(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench(kv_budget_bytes=330_000, max_running=6, chunk_tokens=32, expected_sequence_tokens=64)
    prompts = {f"r{i}": PROMPT[i : i + 20] for i in range(6)}
    for request_id, token_ids in prompts.items():
        bench.submit(make_request(request_id, token_ids, max_tokens=60, ignore_eos=True))
    bench.run()
    assert bench.engine.scheduler.counters.retractions > 0
    for request_id, token_ids in prompts.items():
        assert bench.answers[request_id] == truth(checkpoint, token_ids, 60)
    bench.assert_nothing_leased()


def test_logits_that_are_not_finite_fail_alone_and_leave_no_prefix(make_bench: MakeBench) -> None:
    bench = make_bench(chunk_tokens=16)
    ref = bench.rows.put("lease", 12, 64, seed=1)
    bench.rows.rows["lease"][5] = torch.nan
    bench.submit(make_request("bad", PROMPT, spans=(span(2, 12),), embeddings=(ref,)))
    bench.submit(make_request("good", PROMPT, ignore_eos=True))
    bench.run()
    assert (bench.finishes["bad"].status, bench.finishes["bad"].code) == (500, "logits_not_finite")
    assert bench.finishes["good"].reason is FinishReason.LENGTH
    bench.submit(make_request("again", PROMPT, spans=(span(2, 12),), embeddings=(ref,)))
    bench.run()
    assert bench.finishes["again"].usage.cached_tokens == 0
    bench.assert_nothing_leased()


def test_a_chunk_that_is_not_finite_is_never_published(make_bench: MakeBench) -> None:
    bench = make_bench(chunk_tokens=16)
    ref = bench.rows.put("lease", 12, 64, seed=1)
    bench.rows.rows["lease"][5] = torch.nan
    bench.submit(make_request("bad", PROMPT, spans=(span(20, 30),), embeddings=(ref,)))
    bench.submit(make_request("same", PROMPT, spans=(span(20, 30),), embeddings=(ref,)))
    for _ in range(2):
        bench.step()
    # The second chunk, not the last one: nobody can have found what it wrote.
    assert bench.finishes["bad"].code == "logits_not_finite"
    assert bench.engine.scheduler.counters.prompt_tokens == 16
    bench.run()
    bench.assert_nothing_leased()


def test_wrong_kv_leaves_the_tree_while_others_lease_it(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.submit(make_request("first", PROMPT, ignore_eos=True))
    bench.run()
    other = [5] * 30
    bench.submit(make_request("elsewhere", other, ignore_eos=True))
    bench.run()
    bench.submit(make_request("running", [*PROMPT, 1, 2], max_tokens=200, ignore_eos=True))
    bench.step()
    storage = bench.engine.loop._mover._storage
    page = bench.engine.scheduler._roster.running["running"].page_table().full_pages[2]
    layer = storage.full_layer_indices[0]
    sound = storage.values(layer)[page].clone()
    storage.values(layer)[page] = torch.nan
    bench.submit(make_request("broken", [*PROMPT, 3, 4], ignore_eos=True))
    bench.step()
    assert {bench.finishes["broken"].code, bench.finishes["running"].code} == {"logits_not_finite"}
    storage.values(layer)[page] = sound
    for request_id, token_ids in (("again", [*PROMPT, 3, 4]), ("elsewhere again", other)):
        bench.submit(make_request(request_id, token_ids, ignore_eos=True))
    bench.run()
    assert bench.finishes["again"].usage.cached_tokens == 0
    assert bench.answers["again"] == truth(checkpoint, [*PROMPT, 3, 4])
    assert bench.finishes["elsewhere again"].usage.cached_tokens > 0
    bench.assert_nothing_leased()


def test_a_step_that_raises_ends_its_requests_and_the_worker_goes_on(
    checkpoint: Checkpoint, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(max_running=1)
    loop = bench.engine.loop
    run = loop._runner.run

    def run_out(plan: StepPlan) -> StepResult:
        if "a" in plan.request_ids:
            raise torch.OutOfMemoryError("no memory left")
        return run(plan)

    monkeypatch.setattr(loop._runner, "run", run_out)
    bench.submit(make_request("a", PROMPT))
    bench.submit(make_request("b", PROMPT, ignore_eos=True))
    # `run` returns by itself once a drain has nothing left; "b" is taken before that and runs to its end.
    original_step = loop.step

    def step(wait_s: float = 0.0) -> float:
        wait_s = original_step(0.0)
        bench.collect()
        if "b" in bench.finishes:
            loop.stop()
        return wait_s

    monkeypatch.setattr(loop, "step", step)
    loop.run()
    bench.collect()
    assert (bench.finishes["a"].status, bench.finishes["a"].code) == (500, "step_failed")
    assert bench.answers["b"] == truth(checkpoint, PROMPT)
    bench.assert_nothing_leased()


def test_a_silent_gateway_is_told_that_its_requests_ended(make_bench: MakeBench) -> None:
    bench = make_bench(peer_timeout_s=5.0, max_running=2)
    other = Peer(b"other")
    for request_id in ("running", "waiting"):
        request = make_request(request_id, PROMPT, max_tokens=500, ignore_eos=True)
        bench.mailbox.put(Submit(request=request), peer=other)
        bench.submit(make_request(f"our {request_id}", PROMPT[:9], max_tokens=500, ignore_eos=True))
    for _ in range(6):
        bench.clock.advance(1.5)
        bench.mailbox.put(Hello(sequence=1), peer=GATEWAY)
        bench.engine.loop.step()
    told = [(peer, message) for peer, message in bench.mailbox.sent if isinstance(message, Finish)]
    assert [(peer, finish.request_id) for peer, finish in told] == [(other, "running"), (other, "waiting")]
    assert {(f.reason, f.status, f.code, f.retryable) for _, f in told} == {
        (FinishReason.FAILED, 503, "gateway_silent", True)
    }
    bench.collect()
    for request_id in ("our running", "our waiting"):
        bench.mailbox.put(Abort(request_id=request_id))
    bench.run()
    assert bench.finishes["our running"].reason is FinishReason.CANCELLED
    bench.assert_nothing_leased()


def test_a_gateway_that_cannot_be_reached_loses_its_requests_at_once(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    for i in range(8):
        bench.submit(make_request(f"r{i}", PROMPT, max_tokens=500, ignore_eos=True))
    bench.step()
    bench.mailbox.unreachable.add(GATEWAY)
    for _ in range(3):
        bench.step()
    assert bench.engine.scheduler.is_idle
    bench.assert_nothing_leased()
    assert [record.message for record in caplog.records] == [f"peer {GATEWAY} is gone; 8 requests of it dropped"]
    bench.mailbox.unreachable.clear()
    bench.mailbox.put(Hello(sequence=1))
    bench.engine.loop.step()
    assert isinstance(bench.mailbox.sent[-1][1], WorkerInfo)


def test_hello_is_answered_while_busy(make_bench: MakeBench) -> None:
    bench: Bench = make_bench()
    bench.submit(make_request("a", PROMPT, max_tokens=50, ignore_eos=True))
    bench.step()
    bench.mailbox.put(Hello(sequence=42))
    bench.engine.loop.step()
    [info] = [message for message in bench.mailbox.take() if isinstance(message, WorkerInfo)]
    assert (info.sequence, info.ready, info.num_running, info.model) == (42, True, 1, "tiny")
    assert info.max_context_tokens == 2048
    assert info.eos_token_ids == (127,)
    assert info.counters["prompt_tokens"] > 0
    assert info.full_pages_free < info.full_pages_total


def test_draining_finishes_what_runs_and_hands_back_the_rest(make_bench: MakeBench) -> None:
    bench = make_bench(max_running=1)
    bench.submit(make_request("running", PROMPT, max_tokens=20, ignore_eos=True))
    bench.submit(make_request("waiting", PROMPT, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        bench.step()
    bench.engine.loop.drain()
    bench.submit(make_request("late", PROMPT))
    bench.mailbox.put(Hello(sequence=1))
    bench.engine.loop.step()
    assert [m.ready for m in [m for _, m in bench.mailbox.sent] if isinstance(m, WorkerInfo)] == [False]
    bench.engine.loop.run()
    bench.collect()
    assert bench.finishes["running"].reason is FinishReason.LENGTH
    assert all(bench.finishes[r].retryable and bench.finishes[r].code == "draining" for r in ("waiting", "late"))


def break_on_submit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request named "breaks" makes the step raise that takes it."""
    scheduler = bench.engine.scheduler
    submit = scheduler.submit

    def submit_or_break(sequence: Sequence) -> None:
        if sequence.request_id == "breaks":
            raise RuntimeError("a mistake of ours")
        submit(sequence)

    monkeypatch.setattr(scheduler, "submit", submit_or_break)


def test_a_message_that_breaks_a_draining_worker_leaves_no_request_unanswered(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ends in the middle of the inbox, with nothing running: what lies behind must still be refused."""
    bench = make_bench()
    break_on_submit(bench, monkeypatch)
    bench.engine.loop.drain()
    for request_id in ("breaks", "late"):
        bench.submit(make_request(request_id, PROMPT))
    bench.engine.loop.run()
    bench.collect()
    assert {name: finish.code for name, finish in bench.finishes.items()} == {
        "breaks": "step_failed",
        "late": "draining",
    }


def test_a_request_submitted_twice_runs_once(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.submit(make_request("a", PROMPT, ignore_eos=True))
    bench.submit(make_request("a", PROMPT, ignore_eos=True))
    bench.run()
    assert len(bench.answers["a"]) == 8


def test_trouble_that_is_about_no_request_ends_the_worker(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()

    def receive(timeout_s: float) -> list[Received]:
        raise OSError("the socket is gone")

    monkeypatch.setattr(bench.mailbox, "receive", receive)
    with pytest.raises(OSError, match="the socket is gone"):
        bench.engine.loop.run()


def test_a_message_that_breaks_the_worker_ends_its_own_request(
    checkpoint: Checkpoint, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    break_on_submit(bench, monkeypatch)
    bench.submit(make_request("breaks", PROMPT))
    bench.submit(make_request("good", PROMPT, ignore_eos=True))
    thread = threading.Thread(target=bench.engine.loop.run)
    thread.start()
    deadline = time.monotonic() + 30
    while len([m for _, m in list(bench.mailbox.sent) if isinstance(m, Finish)]) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    bench.engine.loop.stop()
    thread.join()
    bench.collect()
    assert bench.finishes["breaks"].code == "step_failed"
    assert bench.answers["good"] == truth(checkpoint, PROMPT)
