"""The soak itself: it would notice what it looks for, and half a minute of it finds nothing."""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import pytest

from tests.e2e.service import SAMPLES, Service, running_service
from tests.soak.clients import End
from tests.soak.run import Soak, soak
from tests.soak.watch import Sample, growth, total_slope


def samples(name: str, pid: int, first_s: float, *, per_minute: int) -> list[Sample]:
    """Ten minutes of a process that grows."""
    return [
        Sample(first_s + at_s, name, pid, at_s, (200 << 20) + int(per_minute * at_s / 60), 30)
        for at_s in range(0, 600, 10)
    ]


def test_growth_is_found_in_every_life_of_a_process() -> None:
    lives = samples("decode-0", 1, 0.0, per_minute=1 << 20) + samples("decode-0", 2, 600.0, per_minute=3 << 20)
    (found,) = growth(lives)
    assert found.num_processes == 2
    assert found.memory_bytes_per_minute == pytest.approx(2 << 20, rel=1e-3)
    assert found.fds_per_minute == pytest.approx(0)


def test_the_whole_is_looked_at_when_all_of_it_is_there() -> None:
    two = samples("a", 1, 0.0, per_minute=1 << 20) + samples("b", 2, 0.0, per_minute=1 << 20)
    memory, fds = total_slope(two)
    assert memory == pytest.approx(2 << 20, rel=1e-3)
    assert fds == pytest.approx(0)


@pytest.mark.parametrize("outcome", ["wrong", "fault", "hung", "cut"])
def test_what_must_not_be_is_a_fault(outcome: str) -> None:
    run = Soak(Service("http://127.0.0.1:1", 1, Path("log")), random.Random(1), 0.0)
    run.num_asked, run.ends = 2, [(time.monotonic(), End("text", outcome, 1.0)), (0.0, End("text", "right", 1.0))]
    assert len(run.faults()) == 1
    run.ends.pop()
    assert len(run.faults()) == 2


def test_a_killed_gateway_explains_broken_connections_around_it() -> None:
    run = Soak(Service("http://127.0.0.1:1", 1, Path("log")), random.Random(1), 0.0)
    run.num_asked, run.kills = 2, [(100.0, "gateway"), (200.0, "decode-0")]
    run.ends = [(100.5, End("text", "cut", 1.0)), (200.5, End("text", "cut", 1.0))]
    assert len(run.faults()) == 1


@pytest.mark.e2e
async def test_half_a_minute_finds_nothing(tmp_path: Path) -> None:
    options = argparse.Namespace(
        minutes=0.4,
        share=0.8,
        rate=3.0,
        clients=2,
        calibrate=1.0,
        kill_every=6.0,
        leave=0.2,
        sample=2.0,
        settled=2.0,
        seed=3,
    )
    with running_service(tmp_path, "--mode", "epd", "--media-root", str(SAMPLES)) as service:
        found = await soak(service, options)
    assert found["faults"] == []
    assert found["held"] == []
    assert found["outcomes"]["right"] > found["asked"] / 3
    assert sum(found["kills"].values()) >= 3
