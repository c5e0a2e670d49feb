"""Windows that are gone are restored by re-running their reach, and the answer stays the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.cache.prefix import PrefixHit
from epd.engine.healing import Resume, resume
from epd.types import SamplingParams
from tests.engine.conftest import Checkpoint, MakeBench, make_request
from tests.oracles.plain_generate import plain_generate

PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(200)]


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 100), st.sampled_from([1, 4, 16]))
def test_the_cheaper_way_is_taken_and_reaches_far_enough(
    usable: int, more: int, heal_tokens: int, page_size: int
) -> None:
    hit = PrefixHit(usable * page_size, (usable + more) * page_size)
    found = resume(hit, heal_tokens=heal_tokens, page_size=page_size)
    assert found.start % page_size == found.heal_stop % page_size == 0
    assert hit.num_tokens <= found.start <= found.heal_stop <= hit.num_full_only_tokens
    if found.heals:
        assert found.heal_stop == hit.num_full_only_tokens
        assert found.heal_stop - found.start >= heal_tokens
    else:
        assert found == Resume(hit.num_tokens, hit.num_tokens)
        assert heal_tokens == 0 or hit.num_full_only_tokens - heal_tokens < hit.num_tokens + page_size


@pytest.mark.parametrize("chunk_tokens", [4, 12, 64])
@pytest.mark.parametrize("num_shared", [37, 100, 200])
def test_a_prefix_without_windows_is_healed(
    checkpoint: Checkpoint, make_bench: MakeBench, num_shared: int, chunk_tokens: int
) -> None:
    bench = make_bench(chunk_tokens=chunk_tokens)
    bench.submit(make_request("first", PROMPT, ignore_eos=True))
    bench.run()
    # Full pages stay, every window goes: what a short window pool does to old prefixes.
    bench.engine.cache._ledger.evict_window(10_000)
    prompt = [*PROMPT[:num_shared], 1, 2, 3]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    truth = plain_generate(checkpoint.model, prompt, sampling)
    bench.submit(make_request("healed", prompt, ignore_eos=True))
    bench.run()
    usage = bench.finishes["healed"].usage
    reached = num_shared // 4 * 4
    # Two window layers that see 15 tokens back: 30 tokens, rounded up to pages of 4.
    assert (usage.cached_tokens, usage.healed_tokens) == (reached - 32, 32)
    assert bench.answers["healed"] == truth
    # The restored window is found by the next one, and is as good.
    bench.submit(make_request("again", prompt + truth[:4], ignore_eos=True, max_tokens=4))
    bench.run()
    assert bench.finishes["again"].usage.healed_tokens == 0
    assert bench.answers["again"] == truth[4:]
    bench.assert_nothing_leased()


def test_healing_gives_way_to_computing_when_it_would_cost_more(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.submit(make_request("first", PROMPT[:40], ignore_eos=True))
    bench.run()
    bench.engine.cache._ledger.evict_window(10_000)
    bench.submit(make_request("short", PROMPT[:30], ignore_eos=True))
    bench.run()
    usage = bench.finishes["short"].usage
    assert (usage.cached_tokens, usage.healed_tokens) == (0, 0)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    assert bench.answers["short"] == plain_generate(checkpoint.model, PROMPT[:30], sampling)
    bench.assert_nothing_leased()
