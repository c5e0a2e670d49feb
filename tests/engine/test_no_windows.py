"""A model without window layers has no window pool: the same schedules, the same answers, the same books."""

from pathlib import Path

import pytest

from epd.types import KvTransfer
from tests.engine.conftest import Checkpoint, MakeBench, make_request
from tests.engine.test_roles import PROMPT, make_pair, truth
from tests.engine.test_schedules import oracle, test_one_worker, test_two_workers_in_any_order
from tests.fakes.tiny_llama import write_llama_checkpoint

# Collected here a second time: `checkpoint` below takes the place of the usual one.
__all__ = ["oracle", "test_one_worker", "test_two_workers_in_any_order"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("tiny-llama")
    return Checkpoint(folder, write_llama_checkpoint(folder))


def test_the_whole_budget_is_full_pages(make_bench: MakeBench) -> None:
    bench = make_bench(kv_budget_bytes=1 << 20)
    stats = bench.engine.cache.stats()
    assert stats.window.total == 0
    # 4 layers of 2 heads with keys and values of 16 floats: 4096 bytes per page of 4 tokens.
    assert stats.full.total == (1 << 20) // 4096


def test_requests_run_together(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench()
    prompts = {f"r{i}": PROMPT[i : i + 20 + 3 * i] for i in range(8)}
    for request_id, token_ids in prompts.items():
        bench.submit(make_request(request_id, token_ids, ignore_eos=True, max_tokens=12))
    bench.run()
    assert bench.engine.scheduler.counters.largest_batch == 8
    for request_id, token_ids in prompts.items():
        assert bench.answers[request_id] == truth(checkpoint, token_ids, 12)
    bench.assert_nothing_leased()


def test_a_prefix_is_reused_and_nothing_heals(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.submit(make_request("a", PROMPT, ignore_eos=True))
    bench.run()
    bench.submit(make_request("b", [*PROMPT[:50], 9, 9], ignore_eos=True))
    bench.run()
    assert bench.answers["b"] == truth(checkpoint, [*PROMPT[:50], 9, 9])
    # Any page boundary may be resumed from, wherever windows were kept in other models.
    assert bench.finishes["b"].usage.cached_tokens == 48
    assert bench.finishes["b"].usage.healed_tokens == 0


@pytest.mark.parametrize("length", [1, 4, 17, 75])
def test_a_handoff_has_no_window_pages(checkpoint: Checkpoint, make_bench: MakeBench, length: int) -> None:
    pair = make_pair(make_bench)
    pair.submit(make_request("a", PROMPT[:length], ignore_eos=True, max_tokens=20))
    while not pair.decode.mailbox.inbox or not isinstance(pair.decode.mailbox.inbox[-1].message, KvTransfer):
        pair.prefill.step()
    transfer = pair.decode.mailbox.inbox[-1].message
    assert (transfer.num_window_layers, transfer.num_window_pages) == (0, 0)
    pair.run()
    assert pair.answer("a") == truth(checkpoint, PROMPT[:length], 20)
    assert "a" in pair.decode.finishes
    pair.assert_nothing_leased()
