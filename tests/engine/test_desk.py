"""Every order of announcement, transfer and abort: at most one sequence, and a Finish where one is due."""

import itertools

import pytest

from epd.engine.desk import HandoffDesk, Ready, Refused
from epd.engine.plan import HeldTransfer
from epd.transport.base import Peer
from epd.types import KvTransfer
from tests.engine.conftest import make_request

GATEWAY = Peer(b"gateway")


def held(request_id: str = "a") -> HeldTransfer:
    transfer = KvTransfer(
        request_id=request_id,
        incarnation="i",
        num_tokens=1,
        first_token=0,
        page_size=4,
        num_full_layers=0,
        num_window_layers=0,
        first_full_page=0,
        num_full_pages=1,
        first_window_page=0,
        num_window_pages=1,
        cached_tokens=0,
        healed_tokens=0,
        layout_fingerprint="f",
    )
    return HeldTransfer(transfer, ())


def desk() -> HandoffDesk:
    return HandoffDesk(orphan_timeout_s=10.0, max_orphans=2)


REQUEST = make_request("a", [1], deadline_unix_s=1000.0)


@pytest.mark.parametrize("order", list(itertools.permutations(["expect", "arrive", "abort"])))
@pytest.mark.parametrize("by_gateway", [True, False])
def test_every_order(order: tuple[str, ...], by_gateway: bool) -> None:
    at = desk()
    outcomes = []
    for event in order:
        if event == "expect":
            outcomes.append(at.expect(REQUEST, GATEWAY, 0.0))
        elif event == "arrive":
            outcomes.append(at.arrive(held(), None, 0.0))
        else:
            at.abort("a", 0.0, by_gateway=by_gateway)
    said = [outcome for outcome in outcomes if outcome is not None]
    if order.index("abort") == 2:
        assert [type(outcome) for outcome in said] == [Ready]
    elif order == ("expect", "abort", "arrive") and by_gateway:
        # Prefill has let go without a Finish, so it is due here: cancelled.
        assert [(type(o), o.message) for o in said if isinstance(o, Refused)] == [(Refused, None)]
    else:
        assert said == []
    assert (at.num_expected, at.num_orphans) == (0, 0)


@pytest.mark.parametrize("expect_first", [True, False])
def test_a_refusal_reaches_the_gateway_in_either_order(expect_first: bool) -> None:
    at = desk()
    outcomes = [at.expect(REQUEST, GATEWAY, 0.0)] if expect_first else []
    outcomes.append(at.arrive(held(), "wrong layout", 0.0))
    if not expect_first:
        outcomes.append(at.expect(REQUEST, GATEWAY, 0.0))
    assert isinstance(outcomes[-1], Refused)
    assert outcomes[-1].message == "wrong layout"
    assert [outcome for outcome in outcomes[:-1] if outcome is not None] == []
    assert at.expect(REQUEST, GATEWAY, 0.0) is None


def test_what_nobody_asks_for_is_bounded_and_expires() -> None:
    at = desk()
    for request_id in "abc":
        at.arrive(held(request_id), None, 0.0)
    assert (at.num_orphans, at.num_dropped) == (2, 1)
    at.expire(11.0, 0.0)
    assert (at.num_orphans, at.num_dropped) == (0, 3)
    late = at.expect(REQUEST, GATEWAY, 11.0)
    assert isinstance(late, Refused)
    at.expire(200.0, 0.0)
    assert at.expect(REQUEST, GATEWAY, 200.0) is None
    assert at.num_expected == 1
    at.expire(201.0, 1061.0)
    assert at.num_expected == 0


def test_a_gateway_that_is_gone_takes_its_expectations_along() -> None:
    at = desk()
    at.expect(REQUEST, GATEWAY, 0.0)
    at.expect(make_request("b", [1]), Peer(b"other"), 0.0)
    assert [expected.request for expected in at.drop_peer(GATEWAY, 0.0)] == [REQUEST]
    assert at.arrive(held(), None, 0.0) is None
    assert at.num_expected == 1
