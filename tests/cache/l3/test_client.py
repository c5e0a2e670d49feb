"""The client over nodes that are dead, late or stuck: every call is answered once, in time, and never wrongly."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from epd.cache.l3.breaker import Breaker
from epd.cache.l3.client import StoreClient
from epd.cache.l3.notices import Notice
from epd.cache.l3.placement import Placement
from tests.fakes.scripted_node import ScriptedNode
from tests.fakes.store_calls import StoreCalls

TIMEOUT_S = 0.05


@contextmanager
def opened(*nodes: ScriptedNode, timeout_s: float = TIMEOUT_S, max_put_bytes: int = 1 << 20) -> Iterator[StoreCalls]:
    client = StoreClient(
        nodes,
        placement=Placement([node.name for node in nodes]) if len(nodes) > 1 else None,
        io_bytes=1000,
        timeout_s=timeout_s,
        max_put_bytes=max_put_bytes,
    )
    calls = StoreCalls(client)
    yield calls
    for node in nodes:
        node.trouble = None
        node.free.set()
    client.close()
    calls.check()


def until(is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_refuses_what_makes_no_store() -> None:
    with pytest.raises(ValueError, match="0 nodes"):
        StoreClient([])
    with pytest.raises(ValueError, match="placement"):
        StoreClient([ScriptedNode("a"), ScriptedNode("b")])
    with pytest.raises(ValueError, match="io_bytes"):
        StoreClient([ScriptedNode()], io_bytes=0)


def test_calls_move_io_bytes_at_most_and_one_slice_at_least() -> None:
    node = ScriptedNode()
    with opened(node) as calls:
        values = {b"k%d" % number: bytes(400) for number in range(5)} | {b"large": bytes(2500)}
        assert all(calls.put(values))
        assert calls.get({key: len(value) for key, value in values.items()}) == values
    assert [size for what, size in node.calls if what == "get"] == [2, 2, 1, 1, 1, 1]


def test_no_keys_is_an_answer() -> None:
    with opened(ScriptedNode()) as calls:
        assert calls.get({}) == {}
        assert calls.put({}) == ()
        assert calls.exists([]) == []


def test_a_node_that_hangs_costs_no_more_than_the_deadline() -> None:
    node = ScriptedNode()
    with opened(node) as calls:
        assert all(calls.put({b"a": b"1", b"b": b"2"}))
        node.hang()
        buffers = [bytearray(b"?"), bytearray(b"?")]
        begun_s = time.monotonic()
        answer = calls.begin()
        calls.client.get(
            "group",
            [(b"a", [memoryview(buffers[0])]), (b"b", [memoryview(buffers[1])])],
            deadline_s=begun_s + 0.06,
            on_key=answer.on_key,
            on_done=answer.on_done,
        )
        # It had given one of the two.
        assert answer.wait() == (False, False) or answer.answers[0].count(True) <= 1
        assert answer.at_s is not None
        assert 0.05 < answer.at_s - begun_s < 0.5
        held = [bytes(buffer) for buffer in buffers]
        # Who waits behind is answered in time, too.
        begun_s = time.monotonic()
        assert calls.exists([b"a"], deadline_s=0.05) == [False]
        assert time.monotonic() - begun_s < 0.5
        buffers[0][:] = buffers[1][:] = b"!"
        node.free.set()
        until(lambda: calls.client.stats().nodes[0].breaker == "closed")
        calls.settle()
        assert buffers == [b"!", b"!"], held
        assert calls.get({b"a": 1, b"b": 1}) == {b"a": b"1", b"b": b"2"}
    assert calls.client.stats().timeouts >= 2


def test_what_came_before_the_deadline_counts() -> None:
    node = ScriptedNode()
    with opened(node, timeout_s=1) as calls:
        values = {b"%d" % number: bytes(900) for number in range(4)}
        assert all(calls.put(values))
        answer = calls.begin()
        buffers = [bytearray(900) for _ in values]

        def on_key(index: int, is_there: bool) -> None:
            answer.on_key(index, is_there)
            if index == 1:
                node.hang()

        calls.client.get(
            "group",
            [(key, [memoryview(buffer)]) for key, buffer in zip(values, buffers, strict=True)],
            deadline_s=time.monotonic() + 0.2,
            on_key=on_key,
            on_done=answer.on_done,
        )
        assert answer.wait() == (True, True, False, False)


def test_a_stuck_node_is_left_alone_at_once() -> None:
    node = ScriptedNode()
    with opened(node) as calls:
        node.hang()
        answer = calls.begin()
        calls.client.put("group", [(b"a", [b"1"])], answer.on_done)
        assert node.is_hanging.wait(5)
        time.sleep(3 * TIMEOUT_S + 0.05)
        begun_s = time.monotonic()
        assert calls.get({b"a": 1}, deadline_s=5) == {b"a": None}
        assert time.monotonic() - begun_s < 1
        assert calls.client.stats().nodes[0].breaker != "closed"
        node.free.set()
        answer.wait()
        until(lambda: calls.client.stats().nodes[0].breaker == "closed")
        assert calls.put({b"a": b"2"}) == (True,)


@pytest.mark.parametrize("trouble", ["refuse", "late", "bug"])
def test_the_breaker_opens_and_a_probe_closes_it(trouble: str) -> None:
    node = ScriptedNode()
    with opened(node) as calls:
        assert all(calls.put({b"a": b"1"}))
        node.trouble = trouble
        for _ in range(2):
            assert calls.get({b"a": 1}) == {b"a": None}
        assert calls.client.stats().nodes[0].breaker != "closed"
        num_calls = len([what for what, _ in node.calls if what == "get"])
        begun_s = time.monotonic()
        for _ in range(50):
            assert calls.get({b"a": 1}) == {b"a": None}
            assert calls.put({b"b": b"2"}) == (False,)
        assert time.monotonic() - begun_s < 1
        assert len([what for what, _ in node.calls if what == "get"]) == num_calls
        node.trouble = None
        until(lambda: calls.client.stats().nodes[0].breaker == "closed")
        assert calls.get({b"a": 1}) == {b"a": b"1"}
    assert calls.client.stats().nodes[0].counters["skipped"] >= 100


def test_cancelling_answers_at_once_and_leaves_the_buffers_alone() -> None:
    node = ScriptedNode()
    with opened(node) as calls:
        assert all(calls.put({b"a": b"1", b"b": b"2"}))
        node.hang()
        buffers = [bytearray(1), bytearray(1)]
        answer = calls.begin()
        items = [(key, [memoryview(buffer)]) for key, buffer in zip((b"a", b"b"), buffers, strict=True)]
        cancel = calls.client.get("group", items, deadline_s=time.monotonic() + 9, on_done=answer.on_done)
        assert node.is_hanging.wait(5)
        cancel()
        assert answer.wait(0).count(True) <= 1
        buffers[0][:] = buffers[1][:] = b"!"
        cancel()
        node.free.set()
        calls.settle()
        assert buffers == [b"!", b"!"]
        # And a cancelled one that never came to the node is not asked for.
        cancel()


def test_a_full_queue_drops_puts_and_holds_up_nobody() -> None:
    node = ScriptedNode()
    with opened(node, max_put_bytes=10_000, timeout_s=5) as calls:
        node.hang()
        answers = []
        begun_s = time.monotonic()
        for number in range(40):
            answers.append(calls.begin())
            calls.client.put("group", [(b"%d" % number, [bytes(1000)])], answers[-1].on_done)
        assert time.monotonic() - begun_s < 2
        dropped = [answer for answer in answers[10:] if answer.wait(5) == (False,)]
        assert len(dropped) == 30
        node.free.set()
        assert all(answer.wait() == (True,) for answer in answers[:10])
        assert calls.client.stats().dropped == 30
        # Larger than the bound, and alone: it goes.
        assert calls.put({b"large": bytes(20_000)}) == (True,)


def test_requests_overtake_puts() -> None:
    node = ScriptedNode()
    with opened(node, timeout_s=5) as calls:
        assert all(calls.put({b"a": b"1"}))
        node.hang()
        put = calls.begin()
        calls.client.put("group", [(b"%d" % number, [bytes(900)]) for number in range(10)], put.on_done)
        assert node.is_hanging.wait(5)
        got = calls.begin()
        calls.client.get(
            "group", [(b"a", [memoryview(bytearray(1))])], deadline_s=time.monotonic() + 9, on_done=got.on_done
        )
        node.free.set()
        assert got.wait() == (True,)
        assert put.wait() == (True,) * 10
    kinds = [what for what, _ in node.calls]
    assert kinds.index("get") == 2


def test_a_put_that_is_not_kept_is_counted() -> None:
    node = ScriptedNode()
    with opened(node) as calls:
        node.keeps = False
        assert calls.put({b"a": b"1", b"b": bytes(5000)}) == (False, False)
        assert calls.client.stats().unkept == 2
        assert calls.client.stats().failures == 0


def test_discarded_before_it_was_written() -> None:
    node = ScriptedNode()
    with opened(node, timeout_s=5) as calls:
        node.hang()
        first, second = calls.begin(), calls.begin()
        calls.client.put("group", [(b"z", [b"1"])], first.on_done)
        assert node.is_hanging.wait(5)
        calls.client.put("group", [(b"a", [b"1"]), (b"b", [b"2"])], second.on_done)
        calls.client.discard("group", [b"a", b"z"])
        node.free.set()
        assert second.wait() == (False, True)
        assert calls.exists([b"a", b"b", b"z"]) == [False, True, False]


def test_what_could_not_be_discarded_is_a_miss_until_it_was() -> None:
    node = ScriptedNode()
    with opened(node) as calls:
        assert all(calls.put({b"a": b"1", b"b": b"2", b"c": b"3"}))
        node.trouble = "refuse"
        for _ in range(2):
            calls.get({b"a": 1})
        calls.client.discard("group", [b"a", b"b"])
        time.sleep(0.05)
        # The node answers again, but the probe has not been: nothing is asked.
        node.trouble = None
        until(lambda: calls.client.stats().nodes[0].breaker == "closed")
        assert calls.get({b"a": 1, b"b": 1, b"c": 1}) == {b"a": None, b"b": None, b"c": b"3"}
        assert calls.exists([b"a", b"b", b"c"]) == [False, False, True]
        until(lambda: node.values.keys() == {b"c"})
        assert calls.put({b"a": b"4"}) == (True,)
        assert calls.get({b"a": 1}) == {b"a": b"4"}


def test_a_dead_node_gives_its_groups_to_the_next_one_and_gets_them_back() -> None:
    nodes = [ScriptedNode(f"node-{number}") for number in range(3)]
    with opened(*nodes) as calls:
        groups = [f"session-{number}" for number in range(60)]
        for group in groups:
            calls.group = group
            assert calls.put({group.encode(): group.encode()}) == (True,)
        held = [set(node.values) for node in nodes]
        assert all(held)
        assert sum(map(len, held)) == 60
        nodes[1].trouble = "refuse"
        for _ in range(2):
            calls.group = next(iter(held[1])).decode()
            calls.get({b"x": 1})
        for group in groups:
            calls.group = group
            found = calls.get({group.encode(): len(group)})[group.encode()]
            assert (found is None) == (group.encode() in held[1])
            if found is None:
                assert calls.put({group.encode(): group.encode()}) == (True,)
                assert calls.get({group.encode(): len(group)}) == {group.encode(): group.encode()}
        nodes[1].trouble = None
        until(lambda: calls.client.stats().nodes[1].breaker == "closed")
        calls.group = groups[0]
        calls.client.discard(groups[0], [groups[0].encode()])
        calls.settle()
        until(lambda: not any(groups[0].encode() in node.values for node in nodes))


def test_closing_does_not_wait_for_a_node_that_hangs() -> None:
    node = ScriptedNode()
    client = StoreClient([node], timeout_s=TIMEOUT_S)
    calls = StoreCalls(client)
    node.hang()
    answers = [calls.begin() for _ in range(4)]
    client.put("group", [(b"a", [b"1"])], answers[0].on_done)
    assert node.is_hanging.wait(5)
    client.put("group", [(b"b", [b"1"])], answers[1].on_done)
    client.get("g", [(b"a", [memoryview(bytearray(1))])], deadline_s=time.monotonic() + 99, on_done=answers[2].on_done)
    client.exists("g", [b"a"], deadline_s=time.monotonic() + 99, on_done=answers[3].on_done)
    begun_s = time.monotonic()
    client.close(0.1)
    client.close(0.1)
    assert time.monotonic() - begun_s < 4
    assert [answer.wait(0) for answer in answers] == [(False,)] * 4
    calls.check()
    node.free.set()


def test_every_call_is_answered_once_under_load_while_it_closes() -> None:
    rng = random.Random(5)
    nodes = [ScriptedNode(f"node-{number}") for number in range(2)]
    client = StoreClient(
        nodes, placement=Placement(["node-0", "node-1"]), io_bytes=500, timeout_s=0.01, max_put_bytes=20_000
    )
    calls = [StoreCalls(client, group=f"session-{number}") for number in range(4)]
    is_over = threading.Event()

    def trouble() -> None:
        while not is_over.wait(0.01):
            node = rng.choice(nodes)
            node.trouble = rng.choice(("refuse", "late", "bug", None, None))

    def work(mine: StoreCalls, seed: int) -> None:
        chance = random.Random(seed)
        while not is_over.is_set():
            keys = [b"%d" % chance.randrange(50) for _ in range(5)]
            answer = mine.begin()
            by_s = time.monotonic() + chance.choice((0.0, 0.001, 0.02))
            cancel = None
            match chance.randrange(4):
                case 0:
                    cancel = client.put(mine.group, [(key, [bytes(300)]) for key in keys], answer.on_done)
                case 1:
                    items = [(key, [memoryview(bytearray(300))]) for key in keys]
                    cancel = client.get(
                        mine.group, items, deadline_s=by_s, on_key=answer.on_key, on_done=answer.on_done
                    )
                case 2:
                    client.exists(mine.group, keys, deadline_s=by_s, on_done=answer.on_done)
                case _:
                    client.discard(mine.group, keys)
                    answer.on_done(())
            if cancel is not None and chance.random() < 0.3:
                cancel()
            time.sleep(0.0005)

    threads = [threading.Thread(target=trouble)]
    threads += [threading.Thread(target=work, args=(mine, seed)) for seed, mine in enumerate(calls)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    client.close(0.2)
    is_over.set()
    for thread in threads:
        thread.join()
    until(lambda: client.num_under_way == 0)
    for mine in calls:
        for answer in mine.all:
            answer.wait()
        mine.check()
    assert sum(len(mine.all) for mine in calls) > 200
    assert all(node.is_closed for node in nodes)


# What is not kept


def test_what_a_node_refuses_or_is_not_given_is_counted_by_node_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    full, other = ScriptedNode("full"), ScriptedNode("other")
    full.keeps = False
    with opened(full, max_put_bytes=10_000, timeout_s=5) as calls:
        for number in range(5):
            # Of several slices: a value counts once.
            assert calls.put({b"%d" % number: bytes(2500)}) == (False,)
        stats = calls.client.stats()
        assert dict(stats.nodes[0].counters) == {"refused": 5, "kept": 0, "unkept": 5}
        assert (stats.puts, stats.unkept) == (0, 5)
        assert caplog.text.count("does not keep what it is given (1 pages): it does not say why") == 1
        full.keeps = True
        assert calls.put({b"5": bytes(2500)}) == (True,)
        assert calls.client.stats().nodes[0].counters["kept"] == 1
        full.hang()
        answers = [calls.begin() for _ in range(15)]
        for number, answer in enumerate(answers):
            calls.client.put("group", [(b"%d" % number, [bytes(1000)])], answer.on_done)
        full.free.set()
        for answer in answers:
            answer.wait()
        until(lambda: calls.client.stats().nodes[0].counters["unkept"] == 10)
        assert calls.client.stats().nodes[0].counters["dropped"] == 5
    # The others, at the end.
    lines = [record.getMessage() for record in caplog.records if "given" in record.getMessage()]
    assert [line.partition("(")[2].partition(")")[0] for line in lines] == ["1 pages", "1 pages", "4 pages", "4 pages"]
    assert "bytes wait to be written, of 10,000 that may" in lines[1]
    with opened(full, other) as calls:
        for trouble, group in (("refuse", 0), (None, 9)):
            full.trouble = other.trouble = trouble
            assert calls.put({b"%d" % group: b"1"}) == (trouble is None,)
        stats = calls.client.stats()
        assert sum(node.counters.get("unkept", 0) for node in stats.nodes) == 1
        assert sum(node.counters.get("refused", 0) for node in stats.nodes) == 0


def test_a_node_that_knows_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Knowing(ScriptedNode):
        why_unkept = "its memory is full"

    node = Knowing("100%s")
    node.keeps = False
    with opened(node) as calls:
        calls.put({b"a": b"1"})
    assert "node 100%s does not keep what it is given (1 pages): its memory is full" in caplog.text


def test_damaged_records_are_counted_and_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    node = ScriptedNode()
    with opened(node) as calls:
        for number in range(20):
            node.values[b"%d" % number] = b"nonsense"
            assert calls.get({b"%d" % number: 1}) == {b"%d" % number: None}
            # Before the call has ended for good, and for everybody.
            assert calls.client.stats().corrupt == number + 1
    lines = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert [line.partition("(")[2] for line in lines] == ["1)", "19)"]


def test_a_notice_is_written_at_once_and_then_at_most_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    notice = Notice("%(count)s for %(why)s", every_s=60.0, clock=lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for now_s in (0.0, 1.0, 59.0, 60.0, 61.0):
            notice.add(2, f"reason {now_s:g}")
        now_s = 119.0
        notice.tell()
        assert [record.getMessage() for record in caplog.records] == ["2 for reason 0", "6 for reason 60"]
        now_s = 120.0
        notice.tell()
        notice.tell(at_the_end=True)
    assert [record.getMessage() for record in caplog.records[2:]] == ["2 for reason 61"]


def test_a_node_that_stays_away_is_tried_every_few_seconds_and_no_less() -> None:
    now_s = 0.0
    breaker = Breaker("node", lambda: now_s)
    breaker.trip("gone")
    probes = []
    while now_s < 60.0:
        if breaker.probes():
            probes.append(now_s)
            breaker.failed("still gone")
        now_s += 0.25
    pauses = [after - before for before, after in itertools.pairwise(probes)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert set(pauses[4:]) == {5.0}
