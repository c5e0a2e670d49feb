"""Draft heads in the engine: answers are those without drafts, token for token, and nothing of a wrong draft stays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from epd.cache.prefix import CacheStats
from epd.config import EngineConfig
from epd.engine.roster import Counters
from epd.engine.sampler import DraftChain, SampleRow, sample, sample_chains
from epd.engine.worker import build_engine
from epd.kernels.base import AttentionSpec
from epd.kernels.reference import DenseAttention
from epd.model.embed import EmbeddingSpan, merge_embeddings
from epd.transport.base import Received
from epd.transport.frames import to_frame
from epd.types import Abort, FinishReason, Hello, KvTransfer, MediaSpan, Role, SamplingParams, WorkerInfo
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.engine.test_roles import Pair, make_pair
from tests.fakes.guessing_model import guessing_model
from tests.fakes.mailbox import Mailbox
from tests.fakes.tiny_checkpoint import write_checkpoint

PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(150)]
NUM_HEADS = 3


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("guessing")
    return Checkpoint(folder, write_checkpoint(folder, guessing_model()))


@pytest.fixture
def make(make_bench: MakeBench, guessing: Checkpoint) -> MakeBench:
    def make(draft_tokens: int = NUM_HEADS, **changes: object) -> Bench:
        settings = {"draft_max_batch_tokens": 1000} | changes
        return make_bench(checkpoint=guessing, draft_tokens=draft_tokens, **settings)

    return make


def run(bench: Bench, **requests: tuple[Sequence[int], dict[str, object]]) -> Bench:
    for request_id, (prompt, params) in requests.items():
        bench.submit(make_request(request_id, prompt, **params))  # type: ignore[arg-type]
    bench.run()
    bench.assert_nothing_leased()
    return bench


def counters(bench: Bench) -> Counters:
    return bench.engine.scheduler.counters


def acceptance(bench: Bench) -> tuple[int, ...]:
    c = counters(bench)
    return (
        *(c.drafted_tokens_1, c.drafted_tokens_2, c.drafted_tokens_3),
        *(c.accepted_tokens_1, c.accepted_tokens_2, c.accepted_tokens_3),
    )


def test_a_chain_is_sampled_as_one_token_at_a_time() -> None:
    generator = torch.Generator().manual_seed(3)
    for seed in range(60):
        logits = 4 * torch.randn(9, 12, generator=generator)
        sampling = SamplingParams(max_tokens=9, temperature=seed % 3 * 0.6, seed=seed, top_logprobs=2)
        alone = [sample(logits[i : i + 1], [SampleRow(sampling, 5 + i)])[0] for i in range(4)]
        right = [token.token_id for token in alone if token is not None]
        for num_right in range(4):
            drafts = (*right[:num_right], *((right[i] + 1) % 12 for i in range(num_right, 3)))
            other = DraftChain(SampleRow(sampling, 0), (1,))
            [tokens, _] = sample_chains(logits[:6], [DraftChain(SampleRow(sampling, 5), drafts), other])
            assert list(tokens) == alone[: num_right + 1]


def test_a_chain_ends_before_a_row_that_is_not_finite() -> None:
    logits = torch.eye(4)
    logits[1, 2] = float("nan")
    row = SampleRow(SamplingParams(max_tokens=4), 0)
    # The row is the second's own after a right draft, nobody's after a wrong one.
    assert [len(sample_chains(logits, [DraftChain(row, drafts)])[0]) for drafts in ((0, 1, 2), (3, 1, 2))] == [1, 1]
    assert sample_chains(logits[1:], [DraftChain(row, (1, 2))]) == [()]


@pytest.mark.parametrize("draft_tokens", [1, 2, 3])
@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": True},
        {"ignore_eos": True, "temperature": 0.8, "top_p": 0.9, "seed": 4},
        {"temperature": 1.0, "seed": 11, "stop_token_ids": tuple(range(0, 120, 9))},
        {"stop_token_ids": tuple(range(3, 120, 17)), "top_logprobs": 3},
        {"ignore_eos": True, "top_logprobs": 0},
    ],
)
def test_answers_are_those_without_drafts(make: MakeBench, draft_tokens: int, params: dict[str, object]) -> None:
    """Lengths of 1, 2, ... end in every place of a run of accepted drafts; so do stop tokens."""
    requests = {f"r{n}": (PROMPT[n : n + 9], {"max_tokens": n, **params}) for n in range(1, 13)}
    plain, drafted = run(make(0), **requests), run(make(draft_tokens), **requests)
    assert drafted.answers == plain.answers
    for request_id, finish in plain.finishes.items():
        assert (drafted.finishes[request_id].reason, drafted.finishes[request_id].usage) == (
            finish.reason,
            finish.usage,
        )
    logprobs = [
        {(delta.request_id, delta.index + i): one for delta in bench.deltas for i, one in enumerate(delta.logprobs)}
        for bench in (plain, drafted)
    ]
    assert logprobs[0].keys() == logprobs[1].keys()
    for key, one in logprobs[0].items():
        assert one.token_id == logprobs[1][key].token_id
        assert one.logprob == pytest.approx(logprobs[1][key].logprob, abs=1e-4)
    assert counters(plain).generated_tokens == counters(drafted).generated_tokens
    assert 0 < counters(drafted).accepted_tokens < counters(drafted).drafted_tokens
    assert counters(drafted).steps < counters(plain).steps


def test_up_to_the_last_token_of_the_context(make: MakeBench) -> None:
    settings = {"kv_budget_bytes": 345_000, "max_running": 1, "expected_sequence_tokens": 64, "prefix_cache": False}
    for num_prompt in range(20, 24):
        plain, drafted = make(0), make(3, **settings)
        length = drafted.engine.identity.max_context_tokens - num_prompt
        assert length < 100
        request = {"a": (PROMPT[:num_prompt], {"max_tokens": length, "ignore_eos": True})}
        assert run(drafted, **request).answers == run(plain, **request).answers
        assert len(drafted.answers["a"]) == length
        assert counters(drafted).accepted_tokens > 10


def test_nothing_of_a_wrong_draft_stays(make: MakeBench) -> None:
    """Tree, anchors and pools are those of never having drafted; an identical prompt hits as much."""

    def look(draft_tokens: int) -> tuple[CacheStats, list[tuple[int, int, int]], int, list[int]]:
        bench = make(draft_tokens)
        for name, length in (("a", 40), ("b", 75), ("again", 75), ("c", 150), ("once more", 40)):
            run(bench, **{name: (PROMPT[:length], {"ignore_eos": True, "max_tokens": 30})})
        ledger = bench.engine.cache.device._ledger
        segments = sorted((node.start, node.stop, node.window_start) for node in ledger.tree.nodes.values())
        hits = [finish.usage.cached_tokens for finish in bench.finishes.values()]
        return bench.engine.cache.stats(), segments, len(ledger.anchored), hits

    stats, segments, num_anchored, hits = look(0)
    drafted_stats, *drafted = look(3)
    assert drafted == [segments, num_anchored, hits]
    assert hits == [0, 40, 72, 72, 36]
    assert drafted_stats.num_nodes == stats.num_nodes
    assert drafted_stats.full.evictable == stats.full.evictable
    assert drafted_stats.window.evictable == stats.window.evictable


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_windows_of_a_running_sequence_are_bounded(make: MakeBench, chunk_tokens: int) -> None:
    bench = make(chunk_tokens=chunk_tokens)
    bench.submit(make_request("a", PROMPT, ignore_eos=True, max_tokens=300))
    most = 0
    while "a" not in bench.finishes:
        bench.step()
        for sequence in bench.engine.scheduler._roster.running.values():
            assert sequence.pages is not None
            most = max(most, len(sequence.pages.window_pages))
    # A window of 15, a chunk or release interval, three drafts, in pages of 4; a tail page, one in part at each end.
    assert most <= -(-(15 + max(chunk_tokens, 8) + NUM_HEADS) // 4) + 3


@dataclass
class Recording:
    """Attention without a cache that remembers the keys and values it was given."""

    length: int
    keys: Tensor | None = None
    values: Tensor | None = None

    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        self.keys, self.values = k_TKH, v_TKV
        return DenseAttention([self.length]).attend(spec, q_TNH, k_TKH, v_TKV, sink_N)


@torch.inference_mode()
def assert_rows_are_exact(bench: Bench, guessing: Checkpoint, request_id: str, spans: Sequence[EmbeddingSpan]) -> int:
    """Every row of every head whose token is known is what one pass over the sequence gives; returns how many."""
    model, sequence = guessing.model, bench.engine.scheduler._roster.running[request_id]
    storage, pages = bench.engine.loop._mover._storage, sequence.pages
    assert pages is not None
    num_tokens, num_compared = sequence.num_tokens, 0
    embed_TD = merge_embeddings(model.embed(torch.tensor(sequence.token_ids)), spans)
    hidden_TD = model(embed_TD, torch.arange(num_tokens), DenseAttention([num_tokens]))
    first = pages.window_start * 4
    for k in range(NUM_HEADS):
        # The last rows wait for tokens that are not there yet.
        stop = min(sequence.num_computed, num_tokens - 1 - k)
        if stop <= first:
            continue
        dense = Recording(num_tokens - 1 - k)
        shifted = embed_TD[k + 1 :]
        model.draft(k, shifted, hidden_TD[: len(shifted)], torch.arange(len(shifted)), dense)
        layer = model.config.mtp_layer(k).index
        for stored, wanted in ((storage.keys(layer), dense.keys), (storage.values(layer), dense.values)):
            assert wanted is not None
            rows = stored[torch.tensor(pages.window_pages, dtype=torch.int64)].flatten(0, 1)
            # Of a row of earlier tokens that was right in its time only rounding may differ.
            torch.testing.assert_close(rows[: stop - first], wanted[first:stop], atol=1e-4, rtol=1e-4)
        num_compared += stop - first
    return num_compared


@pytest.mark.parametrize("chunk_tokens", [4, 10])
@pytest.mark.parametrize("num_prompt", [1, 2, 3, 17, 33, 34, 61])
def test_rows_are_those_of_one_pass(make: MakeBench, guessing: Checkpoint, num_prompt: int, chunk_tokens: int) -> None:
    """At chunk ends, at the prompt's end and after wrong guesses, over text and media; what is in the window, at every
    step of the answer."""
    bench = make(chunk_tokens=chunk_tokens)
    media, spans = (), ()
    embeddings = ()
    if num_prompt > 30:
        # Media across chunk ends, and up to two tokens before the prompt's end.
        stop = num_prompt - 2
        ref = bench.rows.put("medium", 60, 64, seed=5)
        media, embeddings = (MediaSpan(key="5" * 32, start=5, stop=stop, row_start=0, media=0),), (ref,)  # type: ignore[arg-type]
        spans = (EmbeddingSpan(5, stop, bench.rows.rows["medium"][: stop - 5]),)
    bench.submit(
        make_request("a", PROMPT[:num_prompt], ignore_eos=True, max_tokens=25, spans=media, embeddings=embeddings)
    )
    num_compared = 0
    while "a" not in bench.finishes:
        bench.step()
        if "a" in bench.engine.scheduler._roster.running and bench.engine.scheduler._roster.running["a"].num_computed:
            num_compared += assert_rows_are_exact(bench, guessing, "a", spans)
    assert num_compared > 200
    assert 0 < counters(bench).accepted_tokens < counters(bench).drafted_tokens


def test_what_heads_have_stored_never_changes_an_answer(make: MakeBench) -> None:
    requests = {f"r{n}": (PROMPT[n : n + 40], {"max_tokens": 20, "ignore_eos": True}) for n in range(3)}
    plain = run(make(0), **requests)
    bench = make()
    storage = bench.engine.loop._mover._storage
    for request_id, (prompt, params) in requests.items():
        bench.submit(make_request(request_id, prompt, **params))  # type: ignore[arg-type]
    for step in range(200):
        for layer in storage.window_layer_indices[-NUM_HEADS:]:
            storage.keys(layer).fill_(float("nan") if step % 2 else 50.0)
            storage.values(layer).fill_(-50.0)
        bench.step()
    assert bench.answers == plain.answers
    bench.assert_nothing_leased()


def test_a_hand_over_costs_no_acceptance(make_bench: MakeBench, make: MakeBench, guessing: Checkpoint) -> None:
    for num_prompt in (1, 2, 17, 33, 76, 150):
        request = make_request("a", PROMPT[:num_prompt], ignore_eos=True, max_tokens=40)
        alone = make()
        alone.submit(request)
        alone.run()
        settings = {"checkpoint": guessing, "draft_tokens": 3}
        pair: Pair = make_pair(make_bench, both=settings)
        pair.submit(request)
        pair.run()
        assert pair.answer("a") == alone.answers["a"]
        assert acceptance(pair.decode) == acceptance(alone)
        assert counters(pair.decode).steps == counters(alone).steps - counters(pair.prefill).steps + 1
        pair.assert_nothing_leased()


def test_a_hand_over_to_other_settings_is_refused(make_bench: MakeBench, guessing: Checkpoint) -> None:
    pair = make_pair(make_bench, both={"checkpoint": guessing, "draft_tokens": 3}, draft_tokens=2)
    pair.submit(make_request("a", PROMPT, ignore_eos=True))
    pair.run()
    finish = pair.finish("a")
    assert (finish.code, finish.retryable) == ("kv_refused", True)
    pair.assert_nothing_leased()


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({}, ()),
        ({}, ((2, 64),)),
        ({}, ((2, 64), (1, 64))),
        ({}, ((2, 63), (2, 63))),
        ({}, ((18, 64), (18, 64))),
        ({"draft_token_ids": (3, 128)}, ((2, 64), (2, 64))),
        ({"draft_token_ids": (-1,)}, ((2, 64), (2, 64))),
    ],
)
def test_what_heads_cannot_go_on_with_is_refused(
    make_bench: MakeBench, guessing: Checkpoint, changes: dict[str, object], shapes: tuple[tuple[int, ...], ...]
) -> None:
    pair = make_pair(make_bench, both={"checkpoint": guessing, "draft_tokens": 3})
    pair.submit(make_request("a", PROMPT[:17], ignore_eos=True))
    while not any(isinstance(item.message, KvTransfer) for item in pair.decode.mailbox.inbox):
        pair.prefill.step()
    *rest, last = pair.decode.mailbox.inbox
    assert isinstance(last.message, KvTransfer)
    kv = last.tensors[: 2 * (last.message.num_full_layers + last.message.num_window_layers)]
    wrong = (*kv, *(to_frame(torch.zeros(shape)) for shape in shapes))
    pair.decode.mailbox.inbox = [*rest, Received(last.peer, msgspec.structs.replace(last.message, **changes), wrong)]
    pair.run()
    assert (pair.finish("a").code, pair.finish("a").retryable) == ("kv_refused", True)
    pair.assert_nothing_leased()


def test_after_a_hit_heads_go_on_at_once(make: MakeBench) -> None:
    """The second turn drafts as if its prefix had been computed anew; but for the rows at the end of the hit, which
    belong to the first turn."""
    first = run(make(), a=(PROMPT[:100], {"max_tokens": 40, "ignore_eos": True}))
    turn = [*PROMPT[:100], *first.answers["a"], *PROMPT[:7]]
    request = {"b": (turn, {"max_tokens": 60, "ignore_eos": True})}
    cold, before = run(make(), **request), acceptance(first)
    warm = run(first, **request)
    assert warm.answers["b"] == cold.answers["b"]
    assert warm.finishes["b"].usage.cached_tokens >= 136
    gained = [after - earlier for after, earlier in zip(acceptance(warm), before, strict=True)]
    assert abs(gained[3] - acceptance(cold)[3]) <= 2
    assert gained[3] > 15


def test_after_healing_heads_go_on_at_once(make: MakeBench) -> None:
    bench = run(make(), a=(PROMPT, {"max_tokens": 4, "ignore_eos": True}))
    bench.engine.cache.device._ledger.evict_window(10_000)
    storage = bench.engine.loop._mover._storage
    for layer in storage.window_layer_indices[-NUM_HEADS:]:
        storage.keys(layer).fill_(float("nan"))
        storage.values(layer).fill_(float("nan"))
    before = acceptance(bench)
    request = {"b": ([*PROMPT[:140], 1, 2], {"max_tokens": 60, "ignore_eos": True})}
    run(bench, **request)
    assert bench.finishes["b"].usage.healed_tokens > 0
    cold = run(make(), **request)
    assert bench.answers["b"] == cold.answers["b"]
    gained = [after - earlier for after, earlier in zip(acceptance(bench), before, strict=True)]
    assert gained[3] / gained[0] > 0.8 * acceptance(cold)[3] / acceptance(cold)[0]


def test_a_sequence_put_back_loses_no_token_and_drafts_again(make: MakeBench) -> None:
    settings = {"max_running": 6, "expected_sequence_tokens": 64}
    requests = {f"r{i}": (PROMPT[i : i + 30], {"max_tokens": 40, "ignore_eos": True}) for i in range(6)}
    plain = run(make(0), **requests)
    tight = run(make(kv_budget_bytes=810_000, **settings), **requests)
    assert counters(tight).retractions > 0
    assert tight.answers == plain.answers
    assert counters(tight).accepted_tokens_1 > 0.4 * counters(tight).drafted_tokens_1


def test_the_more_decode_together_the_fewer_drafts_each_has(make: MakeBench) -> None:
    def drafted(num_requests: int) -> list[bool]:
        requests = {f"r{i}": (PROMPT[i : i + 9], {"max_tokens": 20, "ignore_eos": True}) for i in range(num_requests)}
        c = counters(run(make(draft_max_batch_tokens=8), **requests))
        return [c.drafted_tokens_1 > 0, c.drafted_tokens_2 > 0, c.drafted_tokens_3 > 0]

    assert drafted(2) == [True, True, True]
    bench = make(draft_max_batch_tokens=8)
    for i in range(5):
        bench.submit(make_request(f"r{i}", PROMPT[i : i + 9], max_tokens=60, ignore_eos=True))
    for _ in range(10):
        bench.step()
    # Eight tokens are too few for a draft each of five.
    assert counters(bench).drafted_tokens == 0
    for i in range(3):
        bench.mailbox.put(Abort(request_id=f"r{i}"))
    bench.run()
    assert counters(bench).accepted_tokens_3 > 0
    assert {finish.reason for finish in bench.finishes.values()} == {FinishReason.CANCELLED, FinishReason.LENGTH}
    bench.assert_nothing_leased()


def test_rows_are_made_up_for_when_there_is_room_again(make: MakeBench, guessing: Checkpoint) -> None:
    """While too many decode, rows wait; the sequence that is left has them all with its next guesses."""
    for num_steps in (3, 4, 5, 6, 9, 14):
        bench = make(draft_max_batch_tokens=8, chunk_tokens=200)
        for i in range(5):
            bench.submit(make_request(f"r{i}", PROMPT[i : i + 30], max_tokens=60, ignore_eos=True))
        for _ in range(num_steps):
            bench.step()
        assert counters(bench).drafted_tokens == 0
        for i in range(4):
            bench.mailbox.put(Abort(request_id=f"r{i}"))
        bench.step()
        assert_rows_are_exact(bench, guessing, "r4", ())
        bench.run()
        assert (
            bench.answers["r4"] == run(make(0), r4=(PROMPT[4:34], {"max_tokens": 60, "ignore_eos": True})).answers["r4"]
        )
        assert counters(bench).accepted_tokens_3 > 0


def test_counters_are_reported(make: MakeBench) -> None:
    bench = run(make(), a=(PROMPT[:9], {"max_tokens": 80, "ignore_eos": True}))
    bench.mailbox.put(Hello(sequence=1))
    bench.engine.loop.step()
    [info] = [message for message in bench.mailbox.take() if isinstance(message, WorkerInfo)]
    c = counters(bench)
    assert info.counters["drafted_tokens"] == c.drafted_tokens > 0
    assert info.counters["accepted_tokens"] == c.accepted_tokens > 0
    # Every step gives a token of its own, and all but the first and the last have drafts: nothing is computed twice.
    assert c.generated_tokens == c.steps + c.accepted_tokens == 80
    assert c.drafted_tokens_1 >= c.steps - 2
    # The second guess follows from the first, which follows from the token.
    assert c.accepted_tokens_2 > 0.4 * c.accepted_tokens_1 > 0.16 * c.drafted_tokens_1
    by_position = [info.counters[f"accepted_tokens_{n}"] for n in (1, 2, 3)]
    assert sum(by_position) == c.accepted_tokens
    assert by_position == sorted(by_position, reverse=True)


def test_more_heads_than_the_checkpoint_holds_are_refused(checkpoint: Checkpoint, guessing: Checkpoint) -> None:
    config = EngineConfig(model_dir=checkpoint.folder, model_name="tiny", role=Role.BOTH, draft_tokens=2)
    with pytest.raises(ValueError, match=r"engine\.draft_tokens is 2, .* holds 0 draft heads"):
        build_engine(config, Mailbox())
    with pytest.raises(ValueError, match=r"engine\.draft_tokens"):
        EngineConfig(model_dir=Path(), model_name="tiny", role=Role.BOTH, draft_tokens=4)
    build_engine(replace(config, model_dir=guessing.folder), Mailbox())
