"""Verdicts of the health check, from what is noted of the replicas."""

from typing import Any

from encoder.front.health import STUCK_AFTER_S, HealthBoard
from encoder.types import EncoderInfo
from tests.fakes.clock import FakeClock

ADDRESSES = ("ipc:///tmp/x/encoder-0", "tcp://10.0.0.2:9000")


def info(name: str, **changes: Any) -> EncoderInfo:
    values: dict[str, Any] = {
        "sequence": 1,
        "replica": name,
        "incarnation": "a",
        "fingerprint": "f",
        "width": 4,
        "dtype": "float32",
        "modalities": (),
        "num_pending": 0,
        "num_cached": 0,
        "cached_bytes": 0,
        "capacity_bytes": 1,
        "leased_bytes": 0,
        "ready": True,
    }
    return EncoderInfo(**(values | changes))


def board(*infos: EncoderInfo | None, draining: bool = False, clock: FakeClock | None = None) -> HealthBoard:
    made = HealthBoard(ADDRESSES, clock=(clock or FakeClock()).clock.monotonic_s)
    made.note(dict(zip(ADDRESSES, infos, strict=True)), draining=draining)
    return made


def test_before_anything_is_known_every_replica_is_named() -> None:
    made = HealthBoard(ADDRESSES)
    assert made.health().status == 503
    assert made.health().body["replicas"] == {"encoder-0": "not up", "tcp://10.0.0.2:9000": "not up"}


def test_all_well_and_loaded_is_green() -> None:
    made = board(info("a", num_pending=200, tower_busy_s=50.0), info("b", num_pending=200))
    assert (made.health().status, made.ready().status) == (200, 200)


def test_one_replica_down_is_healthy_and_not_ready() -> None:
    made = board(info("a"), None)
    assert made.health().status == 200
    assert made.ready().status == 503
    assert made.ready().body["waiting_for"]["encoder"] == {"tcp://10.0.0.2:9000": "not up"}


def test_a_stuck_tower_counts_like_a_replica_that_is_down() -> None:
    made = board(info("a"), info("b", wedged=True, tower_busy_s=61.4))
    assert made.health().status == 200
    assert made.ready().body["waiting_for"]["encoder"] == {"b": "its tower has been at one batch for 61 s"}
    made = board(info("a", ready=False), info("b", wedged=True, tower_busy_s=61.4))
    assert made.health().status == 503
    assert set(made.health().body["replicas"]) == {"a", "b"}


def test_draining_is_healthy_and_not_ready() -> None:
    made = board(info("a"), info("b"), draining=True)
    assert made.health().status == 200
    assert (made.ready().status, made.ready().body["status"]) == (503, "draining")


def test_a_loop_without_a_pulse_is_red_until_it_is_felt_again() -> None:
    clock = FakeClock()
    made = board(info("a"), info("b"), clock=clock)
    clock.advance(STUCK_AFTER_S - 1)
    assert made.health().status == 200
    clock.advance(2)
    assert made.health().status == 503
    assert "event loop" in made.health().body["front"]
    assert made.ready().status == 503
    made.note({ADDRESSES[0]: info("a"), ADDRESSES[1]: info("b")}, draining=False)
    assert made.health().status == 200


def test_a_replica_that_went_down_keeps_its_name() -> None:
    made = board(info("a"), info("b"))
    made.note({ADDRESSES[0]: None, ADDRESSES[1]: None}, draining=False)
    assert set(made.health().body["replicas"]) == {"a", "b"}
