"""News from other threads."""

from __future__ import annotations

import threading
import time

from epd.cache.tiers.inbox import Inbox


def test_once_is_enough_to_wake() -> None:
    wakes: list[None] = []
    seen: list[int] = []
    inbox = Inbox(lambda: wakes.append(None))
    for number in range(5):
        inbox.post(lambda number=number: seen.append(number))
    assert len(wakes) == 1
    assert inbox.empty() == 5
    assert seen == [0, 1, 2, 3, 4]
    inbox.post(lambda: None)
    assert len(wakes) == 2


def test_quiet_news_waits_for_others() -> None:
    wakes: list[None] = []
    inbox = Inbox(lambda: wakes.append(None))
    inbox.post(lambda: None, wakes=False)
    assert wakes == []
    assert not inbox.wait(0.0)
    inbox.post(lambda: None)
    inbox.post(lambda: None, wakes=False)
    assert len(wakes) == 1
    assert inbox.empty() == 3


def test_news_that_posts_news_is_for_the_next_time() -> None:
    seen: list[str] = []
    inbox = Inbox()
    inbox.post(lambda: inbox.post(lambda: seen.append("second")))
    assert inbox.empty() == 1
    assert seen == []
    assert inbox.empty() == 1
    assert seen == ["second"]


def test_waiting_ends_with_news() -> None:
    inbox = Inbox()
    assert not inbox.wait(0.0)
    thread = threading.Timer(0.01, lambda: inbox.post(lambda: None))
    thread.start()
    assert inbox.wait(10.0)
    thread.join()
    inbox.empty()
    assert not inbox.wait(0.0)


def test_nothing_is_lost_between_threads() -> None:
    woken = threading.Event()
    seen: list[int] = []
    inbox = Inbox(woken.set)

    def post(first: int) -> None:
        for number in range(first, first + 500):
            inbox.post(lambda number=number: seen.append(number))

    threads = [threading.Thread(target=post, args=(start,)) for start in (0, 500, 1000)]
    for thread in threads:
        thread.start()
    by_s = time.monotonic() + 10.0
    while len(seen) < 1500 and time.monotonic() < by_s:
        # A wake that was lost would be waited for until then.
        if woken.wait(10.0):
            woken.clear()
            inbox.empty()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1500))
