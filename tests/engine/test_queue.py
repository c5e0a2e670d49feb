"""The waiting line against the rule it implements."""

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.engine.queue import WaitingQueue
from epd.engine.sequence import Sequence
from epd.transport.base import Peer
from tests.engine.conftest import make_request

CREDIT = 100.0


def sequence(request_id: str, arrival_s: float) -> Sequence:
    return Sequence(request=make_request(request_id, [1]), peer=Peer(b"g"), arrival_s=arrival_s)


operations = st.lists(
    st.tuples(st.sampled_from(["put", "renew", "take", "remove"]), st.integers(0, 400), st.floats(0, 10)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_first_is_the_least_compute_minus_credit(script: list[tuple[str, int, float]]) -> None:
    queue = WaitingQueue(credit_tokens_per_s=CREDIT)
    plain: dict[str, tuple[float, int]] = {}
    arrivals: dict[str, float] = {}
    for order, (operation, num_compute, arrival_s) in enumerate(script):
        names = list(plain)
        if operation == "put":
            name = f"r{order}"
            arrivals[name] = arrival_s
            queue.put(sequence(name, arrival_s), num_compute)
            plain[name] = (num_compute + CREDIT * arrival_s, order)
        elif names and operation == "renew":
            name = names[num_compute % len(names)]
            queue.put(sequence(name, arrivals[name]), num_compute)
            plain[name] = (num_compute + CREDIT * arrivals[name], plain[name][1])
        elif names:
            name = min(plain, key=lambda n: plain[n]) if operation == "take" else names[num_compute % len(names)]
            assert queue.remove(name).request_id == name
            del plain[name]
        first = queue.first()
        assert (None if first is None else first.request_id) == min(plain, key=lambda n: plain[n], default=None)
        assert len(queue) == len(plain)
        assert {item.request_id for item in queue} == set(plain)


def test_waiting_outweighs_length_in_the_end() -> None:
    queue = WaitingQueue(credit_tokens_per_s=CREDIT)
    queue.put(sequence("long", 0.0), 1000)
    queue.put(sequence("soon", 5.0), 10)
    first = queue.first()
    assert first is not None
    assert first.request_id == "soon"
    queue.remove("soon")
    # Whoever comes ten seconds later or more is behind, however short.
    queue.put(sequence("later", 10.0), 1)
    first = queue.first()
    assert first is not None
    assert first.request_id == "long"
