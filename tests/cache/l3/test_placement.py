"""Sessions over nodes: everyone places alike, and a node that comes or goes moves its own sessions only."""

import subprocess
import sys
from collections import Counter
from collections.abc import Container
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.cache.l3.placement import Placement

ROOT = Path(__file__).parents[3]
names = st.lists(st.integers(1, 65535), min_size=1, max_size=6, unique=True).map(
    lambda ports: [f"redis://10.0.0.1:{port}/0" for port in ports]
)
groups = st.text(max_size=40)
SESSIONS = [f"session-{i}" for i in range(6000)]


def owner(nodes: list[str], group: str, blocked: Container[str] = ()) -> str | None:
    """Whom a client goes to that finds `blocked` dead."""
    return next((name for name in Placement(nodes).order(group) if name not in blocked), None)


def placed(nodes: list[str], blocked: Container[str] = ()) -> dict[str, str | None]:
    placement = Placement(nodes)
    return {
        session: next((name for name in placement.order(session) if name not in blocked), None) for session in SESSIONS
    }


def nodes_named(count: int) -> list[str]:
    return [f"redis://10.0.0.{i}:6379/0" for i in range(count)]


@settings(deadline=None)
@given(names, groups, st.randoms())
def test_the_same_nodes_in_any_order_place_alike(nodes: list[str], group: str, random: Random) -> None:
    shuffled = [*nodes]
    random.shuffle(shuffled)
    order = [*Placement(nodes).order(group)]
    assert order == [*Placement(shuffled).order(group)]
    assert sorted(order) == sorted(nodes)


@settings(deadline=None)
@given(names.filter(lambda nodes: len(nodes) > 1), groups)
def test_a_node_that_is_blocked_and_one_that_is_gone_place_alike(nodes: list[str], group: str) -> None:
    """Who has heard that a node is gone and who only finds it dead write to the same place."""
    gone = owner(nodes, group)
    assert gone is not None
    rest = [name for name in nodes if name != gone]
    assert owner(nodes, group, {gone}) == owner(rest, group)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_one_more_node_takes_its_share_and_moves_nothing_else(count: int) -> None:
    before, after = placed(nodes_named(count)), placed(nodes_named(count + 1))
    moved = {session for session in SESSIONS if before[session] != after[session]}
    assert {after[session] for session in moved} == {nodes_named(count + 1)[-1]}
    share = len(SESSIONS) / (count + 1)
    assert 0.75 * share < len(moved) < 1.25 * share


def test_a_dead_node_costs_its_own_sessions_and_spreads_them_over_the_others() -> None:
    nodes = nodes_named(4)
    before, during = placed(nodes), placed(nodes, frozenset(nodes[:1]))
    moved = [session for session in SESSIONS if before[session] != during[session]]
    assert {*moved} == {session for session in SESSIONS if before[session] == nodes[0]}
    assert 0.2 * len(SESSIONS) < len(moved) < 0.3 * len(SESSIONS)
    takers = Counter(during[session] for session in moved)
    assert set(takers) == {*nodes[1:]}
    assert min(takers.values()) > 0.15 * len(moved)
    assert placed(nodes) == before, "it comes back to what it held"


def test_sessions_spread_evenly() -> None:
    counts = Counter(placed(nodes_named(3)).values())
    assert all(0.26 < count / len(SESSIONS) < 0.41 for count in counts.values()), counts


def test_other_processes_place_alike() -> None:
    """No seed of the interpreter's own goes into it."""
    script = (
        "from epd.cache.l3.placement import Placement; import sys;"
        f"p = Placement({nodes_named(5)!r}); print(*(next(p.order(f'session-{{i}}')) for i in range(50)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    here = placed(nodes_named(5))
    assert done.stdout.split() == [here[f"session-{i}"] for i in range(50)]


def test_nodes_are_named_once_and_there_may_be_none() -> None:
    with pytest.raises(ValueError, match="distinct"):
        Placement(["redis://a:1/0", "redis://a:1/0"])
    assert [*Placement([]).order("session")] == []
