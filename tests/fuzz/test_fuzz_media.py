"""Damaged files of every format through isolated decoders, for a few seconds: see `scripts/fuzz_media` for more."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from tests.fuzz.campaign import Outcome, campaign, make_item
from tests.fuzz.mutations import mutate
from tests.fuzz.seeds import seeds
from tests.oracles.effort import scaled

SECONDS = scaled(45)
SEED = 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes need memfd and pidfd")
@pytest.mark.timeout(240)
async def test_damaged_media_do_no_harm(record_property: pytest.RecordProperty) -> None:
    """Nothing but MediaError, no answer after its deadline, no fault in our own code, all of it by worker processes."""
    bad: list[str] = []
    crashes: list[str] = []

    def report(outcome: Outcome) -> None:
        if outcome.bad or outcome.kind == "crash":
            line = f"--seed {SEED} --item {outcome.item.number} ({outcome.item.name}): {outcome.kind}: {outcome.words}"
            (bad if outcome.bad else crashes).append(line)

    counts = await campaign(SEED, itertools.count(), report=report, stop_after_s=SECONDS)
    num_items = sum(counts.values())
    record_property("fuzz_items", num_items)
    record_property("fuzz_crashes", crashes)
    if crashes:
        print(f"\n{len(crashes)} of {num_items} media crashed a library:", *crashes, sep="\n")
    assert not bad, "\n".join(bad)
    assert num_items >= 4 * SECONDS
    kinds = {kind for _, kind in counts}
    assert {"ok", "MediaUndecodable"} <= kinds, "damage that is always fatal, or never, tests nothing"


def test_items_can_be_made_again() -> None:
    """By number, whatever else was made before."""
    every = seeds()
    first = [make_item(5, number, every) for number in range(20)]
    again = [make_item(5, number, every) for number in reversed(range(20))]
    assert first == again[::-1]
    assert [item.content for item in first] != [make_item(6, item.number, every).content for item in first]


def test_damage_is_real_and_bounded() -> None:
    every = seeds()
    others = [seed.content for seed in every[:3]]
    changed = 0
    for number in range(300):
        content = every[number % len(every)].content
        damaged = mutate(random.Random(number), content, others)
        assert len(damaged) <= 2**20
        changed += damaged != content
    assert changed > 280
