"""Five hundred random schedules over tiers so small that pages are always on their way between them, and over stores
that are slow, refuse, lie, forget, lose parts, hand out damaged or foreign bytes, are full, get killed or are started
again: every answer is what the model says without any cache, and what can be found afterwards holds what a fresh
forward computes.

Schedules vary as those of healing do (models, pages, chunks, media, aborts, retractions, one worker or two), and
besides the sizes of the tiers, draft heads, and what is wrong with the store. A quarter of them damages KV on the
device itself: who reads that is told so and nobody else, and no tier keeps it. What is damaged in the store has to be
noticed by its checksum, and counted: as often as it was handed out. By default a fifth of the schedules runs;
MIMO_TEST_EFFORT=5 runs all.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

from epd.cache.l3.base import StoreNode
from epd.cache.l3.client import StoreClient
from epd.cache.l3.local import LocalNode
from epd.cache.l3.redis_node import RedisNode
from epd.types import Abort, Role
from tests.engine.conftest import Checkpoint
from tests.engine.test_healing_schedules import MODELS, STEM_LENGTH, WIDTH, Prompt, draw_prompt
from tests.engine.test_roles import Pair
from tests.engine.tier_bench import Stand, TierWorld, check_answers
from tests.engine.tier_troubles import disturb, forget_above, poison, retract, run
from tests.fakes.clock import FakeClock
from tests.fakes.faulty_node import FaultyNode, Troubles
from tests.fakes.mailbox import Mailbox
from tests.fakes.redis_server import running_redis
from tests.fakes.tiny_checkpoint import CHANGES
from tests.fakes.tiny_text import tiny_model

NUM_SCHEDULES = int(100 * float(os.environ.get("MIMO_TEST_EFFORT", "1")))
NUM_GROUPS = 10
NUM_HEADS = 2
TROUBLES = {
    "none": Troubles(),
    "slow": Troubles(slow=0.1, late=0.1),
    "failing": Troubles(failing=0.3),
    "missing": Troubles(missing=0.15, lying=0.3),
    "corrupt": Troubles(corrupt=0.2),
    "stale": Troubles(stale=0.2),
    "full": Troubles(full=0.5),
    "all": Troubles(slow=0.02, late=0.02, failing=0.05, missing=0.05, corrupt=0.05, stale=0.05, full=0.1, lying=0.1),
}
# What a run of many schedules must have done, and at least how often.
TRANSITIONS = {
    "saved when admitted": 20,
    "saved when prefilled": 100,
    "saved when ended": 70,
    "num_rescued_pages": 100,
    "num_failed_saves": 3,
    "num_loads": 20,
    "failed_loads": 1,
    "num_local_window_pages": 3,
    "host evictions": 200,
    "host_hit_tokens": 100,
    "store_hit_tokens": 100,
    "writeback written": 1000,
    "writeback refused": 100,
    "prefetch hit": 7,
    "prefetch partial": 10,
    "prefetch miss": 50,
    "prefetch timeout": 5,
    "prefetch no_room": 2,
    "prefetch aborted": 5,
    "prefetch fetched_pages": 100,
    "incoming published": 100,
    "incoming discarded": 100,
    "keepalive touches": 100,
    "store corrupt": 15,
    "store failures": 50,
    "store timeouts": 10,
    "prefix_hits": 80,
    "healed_hits": 10,
    "healed over host pages": 3,
    "condemned": 3,
    "told of damage": 3,
    "retractions": 3,
    "accepted_tokens": 1,
    "imports": 20,
    "restarts": 25,
    "killed": 7,
    "killed servers left alone": 1,
    "pages looked at on the device": 2000,
    "pages looked at on the host": 1000,
}


@pytest.fixture(scope="module")
def worlds(checkpoint: Checkpoint) -> list[TierWorld]:
    """The checkpoint's folder only names the workers; the models are smaller, differ in their layers, and have draft
    heads."""
    made = []
    for pattern, reach in MODELS:
        changes: dict[str, object] = {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": len(pattern),
            "hybrid_layer_pattern": list(pattern),
            "moe_layer_freq": [0, 1, *([0] * (len(pattern) - 2))],
            "moe_intermediate_size": 16,
            "sliding_window": reach + 1,
            "sliding_window_size": reach + 1,
        }
        model = tiny_model(NUM_HEADS, **(CHANGES | changes))  # type: ignore[arg-type]
        made.append(TierWorld(model.eval(), checkpoint.folder))
    return made


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    yield counted
    print("\n".join(f"{number:8} {name}" for name, number in sorted(counted.items())))
    # All groups ran, unless one was picked by hand.
    if counted["schedules"] >= 100:
        too_few = {name: counted[name] for name, least in TRANSITIONS.items() if counted[name] < least}
        assert not too_few, (too_few, counted)


def make_stand(
    worlds: Sequence[TierWorld],
    rng: random.Random,
    tally: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    make_nodes: Callable[[], list[StoreNode]],
) -> Stand:
    trouble = rng.choice(list(TROUBLES))
    return Stand(
        rng.choice(worlds),
        rng,
        tally,
        monkeypatch,
        make_nodes,
        troubles=TROUBLES[trouble],
        page_size=rng.choice((2, 4, 8)),
        io_bytes=rng.choice((1 << 16, 1 << 16, 500)),
        prefetch_timeout_s=rng.choice((0.005, 0.5, 0.5, 0.5)),
        draft_tokens=rng.choice((0, NUM_HEADS)),
        bad_copies=rng.choice((0.0, 0.0, 0.5)),
    )


def local_nodes(directory: Path) -> Callable[[], list[StoreNode]]:
    return lambda: [LocalNode(directory / "hot", directory / "cold", memory_bytes=1 << 18, disk_bytes=1 << 20)]


def run_alone(stand: Stand) -> None:
    rng, tally = stand.rng, stand.tally
    bench = stand.start()
    base = Prompt(rng.randrange(2), STEM_LENGTH, 0, rng.random() < 0.5)
    bench.submit(stand.request(base))
    run(stand, bench)
    for _ in range(rng.randrange(6, 14)):
        action = rng.random()
        if action < 0.4:
            for _ in range(rng.choice((1, 1, 3))):
                bench.submit(stand.request(draw_prompt(rng, base)))
        elif action < 0.56:
            bench.step()
        elif action < 0.66:
            disturb(bench, rng)
        elif action < 0.72:
            forget_above(bench)
        elif action < 0.8:
            for _ in range(2):
                bench.submit(stand.request(draw_prompt(rng, base)))
            bench.step()
            retract(bench)
        elif action < 0.85:
            stand.is_exact = False
            bench.mailbox.put(Abort(request_id=rng.choice(sorted(stand.asked))))
        elif action < 0.88:
            poison(stand, bench, base)
        elif action < 0.91:
            tally["killed"] += 1
            for node in stand.nodes:
                node.kill()
        else:
            run(stand, bench)
            stand.end(bench, flush_s=rng.choice((0.0, 0.5)))
            tally["restarts"] += 1
            bench = stand.start()
    run(stand, bench)
    stand.end(bench)


def run_pair(stand: Stand) -> None:
    rng, links, clock = stand.rng, dict[str, Mailbox](), FakeClock()
    prefill, decode = (stand.start(role=role, clock=clock, links=links) for role in (Role.PREFILL, Role.DECODE))
    pair = Pair(prefill, decode, clock)

    def run_both() -> None:
        until_s = time.monotonic() + 30
        while True:
            prefill.step()
            decode.step()
            if all(b.engine.scheduler.is_idle and not b.mailbox.inbox for b in (prefill, decode)):
                return
            if prefill.engine.scheduler.is_asleep and decode.engine.scheduler.is_asleep:
                time.sleep(0.0005)
            assert time.monotonic() < until_s, "still busy"

    base = Prompt(rng.randrange(2), STEM_LENGTH, 0, rng.random() < 0.5)
    pair.submit(stand.request(base))
    run_both()
    for _ in range(rng.randrange(6, 12)):
        action = rng.random()
        if action < 0.4:
            pair.submit(stand.request(draw_prompt(rng, base)))
        elif action < 0.65:
            rng.choice((prefill, prefill, decode)).step()
        elif action < 0.8:
            disturb(rng.choice((prefill, decode)), rng)
        elif action < 0.85:
            forget_above(prefill)
        elif action < 0.9:
            retract(rng.choice((prefill, decode)))
        else:
            stand.is_exact = False
            request_id = rng.choice(sorted(stand.asked))
            prefill.mailbox.put(Abort(request_id=request_id))
            decode.mailbox.put(Abort(request_id=request_id))
    run_both()
    for bench in (prefill, decode):
        stand.end(bench)


def check(stand: Stand) -> None:
    """Answers, and that what was damaged was noticed: each time, unless nobody waited for it any more."""
    check_answers(stand)
    stores = [bench.engine.tiers.bridge.stats() for bench in stand.benches if bench.engine.tiers.bridge is not None]
    num_corrupt = sum(store.corrupt for store in stores)
    # Once one page is damaged nobody waits for those after it, damaged or not.
    assert num_corrupt <= stand.num_injected
    if stand.is_exact and not sum(store.timeouts + store.failures for store in stores):
        assert bool(num_corrupt) == bool(stand.num_injected)
    stand.tally["schedules"] += 1


@pytest.mark.parametrize("kind", ["corrupt", "stale"])
def test_all_that_is_damaged_and_read_is_counted(tmp_path: Path, kind: str) -> None:
    """With nobody who leaves in the middle: as often as it was handed out, and what was not is what was put."""
    rng = random.Random(3)
    node = FaultyNode(local_nodes(tmp_path)()[0], Troubles(**{kind: 0.3}), rng, io_bytes=1 << 16)
    values = {b"f%016d" % number: rng.randbytes(rng.choice((1, 500, 4000))) for number in range(40)}
    client = StoreClient([node], io_bytes=1 << 16, timeout_s=5.0)
    num_right = 0
    for _ in range(10):
        done: SimpleQueue[tuple[bool, ...]] = SimpleQueue()
        client.put("group", [(key, [value]) for key, value in values.items()], done.put)
        assert all(done.get(timeout=10))
        buffers = {key: bytearray(len(value)) for key, value in values.items()}
        wanted = [(key, [memoryview(buffer)]) for key, buffer in buffers.items()]
        client.get("group", wanted, deadline_s=time.monotonic() + 10, on_done=done.put)
        for (key, value), is_there in zip(values.items(), done.get(timeout=10), strict=True):
            assert not is_there or buffers[key] == value
            num_right += is_there
    assert client.stats().corrupt == node.num_damaged_values == 400 - num_right > 80
    client.close()


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_tiers_change_no_answer(
    worlds: list[TierWorld], tally: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: int
) -> None:
    for seed in range(group, NUM_SCHEDULES, NUM_GROUPS):
        rng = random.Random(seed)
        stand = make_stand(worlds, rng, tally, monkeypatch, local_nodes(tmp_path / str(seed)))
        try:
            (run_pair if rng.random() < 0.2 else run_alone)(stand)
            check(stand)
        except BaseException as error:
            error.add_note(f"schedule {seed}: {stand}")
            raise


@pytest.mark.parametrize("seed", range(4))
def test_a_redis_server_that_is_killed_costs_no_answer(
    worlds: list[TierWorld], tally: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """Two real servers; one is killed in the middle of what it is asked for, and the next one, in some, is paused."""
    rng = random.Random(seed)
    with running_redis(tmp_path) as first, running_redis(tmp_path) as second:
        servers = [first, second]
        rng.shuffle(servers)

        def nodes() -> list[StoreNode]:
            return [RedisNode(server.url, ttl_s=None) for server in (first, second)]

        stand = make_stand(worlds, rng, tally, monkeypatch, nodes)
        bench = stand.start()
        base = Prompt(rng.randrange(2), STEM_LENGTH, 0, has_media=False)
        for number in range(18):
            bench.submit(stand.request(draw_prompt(rng, base) if number else base))
            for _ in range(rng.randrange(6)):
                bench.step()
            if number in (5, 9):
                run(stand, bench)
                forget_above(bench)
            if number == 12:
                servers[0].kill()
            if number == 15 and rng.random() < 0.5:
                servers[1].pause()
        run(stand, bench)
        servers[1].resume()
        stand.is_exact = False
        stand.end(bench)
        check(stand)
        bridge = bench.engine.tiers.bridge
        assert bridge is not None
        # Its node is left alone by now, or was asked for nothing since.
        [dead] = [node for node in bridge.stats().nodes if node.name == RedisNode(servers[0].url, ttl_s=None).name]
        tally["killed servers"] += 1
        tally["killed servers left alone"] += dead.breaker != "closed"
