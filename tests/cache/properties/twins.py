"""Properties of two worlds: the same schedule with and without something that must leave no trace."""

from __future__ import annotations

from tests.cache.properties.schedule import Op, setting_of, steps_of
from tests.cache.properties.world import World

__all__ = ["drafts_leave_no_trace", "splits_are_unobservable"]


def drafts_leave_no_trace(schedule: bytes) -> int:
    """Rejected drafts change neither what is published, nor any hit, nor in which order pages would be evicted.

    Returns the draft tokens that were rejected. Pools are roomy: what drafts need, they need.
    """
    setting = setting_of(schedule, roomy=True)
    drafted, plain = World(setting), World(setting, with_drafts=False)
    rejected = 0
    for step in steps_of(schedule):
        drafted.do(step)
        plain.do(step)
        rejected += step.op in (Op.SPECULATE, Op.REJECT)
        _same(drafted, plain)
    for world in (drafted, plain):
        world.end(schedule[-1])
    _same(drafted, plain)
    for window in (True, False):
        while drafted.evict(window=window, num_pages=1):
            plain.evict(window=window, num_pages=1)
            assert _live(drafted) == _live(plain), "a rejected draft changed who is evicted"
    return rejected


def splits_are_unobservable(schedule: bytes) -> int:
    """Nodes cut anywhere, at any time: every hit, every live page and every size stays as without. Returns the cuts."""
    setting = setting_of(schedule, roomy=True)
    cut, plain = World(setting), World(setting)
    num_cuts = 0
    for step in steps_of(schedule):
        if step.op is Op.EVICT:
            # Which page goes first may depend on where nodes end; that as many go is another property.
            continue
        cut.do(step)
        plain.do(step)
        ledger = cut.cache._ledger
        long = [node for node in ledger.tree.nodes.values() if node.num_pages > 1]
        if long:
            lower = long[step.a % len(long)]
            upper = ledger.tree.split(lower, 1 + step.b % (lower.num_pages - 1))
            ledger.windows_changed(lower)
            ledger.windows_changed(upper)
            num_cuts += 1
        _same(cut, plain)
    cut.cache.check()
    for world in (cut, plain):
        world.end(schedule[-1])
    _same(cut, plain)
    return num_cuts


def _live(world: World) -> dict[bytes, bool]:
    return {key: entry.window is not None for key, entry in world.log.entries.items()}


def _same(one: World, other: World) -> None:
    assert _live(one) == _live(other)
    assert one.lookups() == other.lookups()
    ours, theirs = one.cache.stats(), other.cache.stats()
    assert (ours.full.evictable, ours.window.evictable) == (theirs.full.evictable, theirs.window.evictable)
    assert ours.num_hit_tokens == theirs.num_hit_tokens
