"""Signs of life."""

from epd.engine.peers import PeerWatch
from epd.transport.base import Peer

GATEWAY, PREFILL = Peer(b"gateway"), Peer(b"prefill")


def test_only_gateways_are_missed() -> None:
    watch = PeerWatch(timeout_s=5.0)
    watch.heard(GATEWAY, 0.0, is_new=True)
    watch.heard(PREFILL, 0.0, is_new=False)
    assert watch.take_silent(5.0) == []
    watch.heard(GATEWAY, 4.0, is_new=False)
    assert watch.take_silent(8.0) == []
    assert watch.take_silent(9.1) == [GATEWAY]
    assert watch.take_silent(99.0) == []


def test_a_lost_peer_is_lost_until_it_is_heard() -> None:
    watch = PeerWatch(timeout_s=5.0)
    watch.heard(GATEWAY, 0.0, is_new=True)
    watch.lose(GATEWAY, 1.0)
    assert watch.is_lost(GATEWAY)
    assert watch.take_silent(5.5) == []
    watch.heard(GATEWAY, 5.6, is_new=True)
    assert not watch.is_lost(GATEWAY)
    watch.lose(PREFILL, 6.0)
    watch.take_silent(12.0)
    assert not watch.is_lost(PREFILL)
