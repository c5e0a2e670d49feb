"""Work shared by threads: done once, by whoever is free, and a failure stops the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from preprocess.crew import NO_CREW, Crew, Teamwork


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(2)
    yield crew
    crew.close()


def test_an_errand_runs_once_whoever_runs_it(crew: Crew) -> None:
    for team in (crew, NO_CREW):
        calls: list[str] = []
        errand = team.start(lambda calls=calls: calls.append(threading.current_thread().name) or len(calls))  # type: ignore[misc]
        assert errand.result() == 1
        assert errand.result() == 1
        assert len(calls) == 1


def test_a_busy_crew_makes_nobody_wait(crew: Crew) -> None:
    gate = threading.Event()
    held = [crew.start(gate.wait) for _ in range(2)]
    time.sleep(0.05)
    assert crew.start(threading.get_ident).result() == threading.get_ident()
    assert crew.start(threading.get_ident).join() is None
    gate.set()
    assert all(errand.result() for errand in held)


def test_an_error_reaches_who_asks(crew: Crew) -> None:
    def fail() -> int:
        raise ValueError("no")

    for team in (crew, NO_CREW):
        with pytest.raises(ValueError, match="no"):
            team.start(fail).result()


@pytest.mark.parametrize("num_workers", [1, 2, 3, 10])
def test_workers_share_the_tasks(crew: Crew, num_workers: int) -> None:
    tasks = iter(range(100))
    lock = threading.Lock()
    done: list[int] = []
    threads: set[int] = set()

    def work() -> None:
        threads.add(threading.get_ident())
        while True:
            with lock:
                task = next(tasks, None)
            if task is None:
                return
            time.sleep(0.0005)
            done.append(task)

    Teamwork().run(crew, work, num_workers=num_workers)
    assert sorted(done) == list(range(100))
    assert len(threads) <= min(num_workers, 3)
    assert threading.get_ident() in threads


@pytest.mark.parametrize("fails_here", [True, False])
def test_one_failure_stops_all_and_is_raised_once(crew: Crew, fails_here: bool) -> None:
    team = Teamwork()
    caller = threading.get_ident()
    running = threading.Barrier(3)

    def work() -> None:
        running.wait(5)
        if (threading.get_ident() == caller) == fails_here:
            raise ValueError("broken")
        assert team.stop.wait(5)

    with pytest.raises(ValueError, match="broken"):
        team.run(crew, work, num_workers=3)
    assert team.stop.is_set()


def test_closing_drops_what_has_not_begun() -> None:
    crew = Crew(1)
    started = threading.Event()
    crew.start(lambda: started.set() or time.sleep(0.05))  # type: ignore[func-returns-value]
    started.wait(5)
    waiting = crew.start(lambda: 1)
    crew.close()
    assert waiting.join() is None


def test_a_crew_has_no_fewer_than_no_threads() -> None:
    with pytest.raises(ValueError, match="num_threads is -1"):
        Crew(-1)
