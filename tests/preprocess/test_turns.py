"""Slots in rotation: nobody waits for all of another's turns, nobody holds more than a share, nothing leaks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.turns import Turn, Turns


def asked(turns: Turns, *askers: str) -> Turn:
    turn = Turn(turns)
    for asker in askers:
        turn.join(asker)
    return turn


async def test_rotation() -> None:
    turns = Turns(total=1, per_asker=1)
    first = asked(turns, "a")
    queue = {name: asked(turns, name[0]) for name in ("a2", "a3", "b1", "b2", "c1")}
    order = []
    holder = first
    while queue:
        holder.end()
        (name,) = [name for name, turn in queue.items() if turn.is_granted]
        order.append(name)
        holder = queue.pop(name)
    assert order == ["b1", "c1", "a2", "b2", "a3"]


async def test_share_of_one_asker() -> None:
    turns = Turns(total=4, per_asker=2)
    many = [asked(turns, "a") for _ in range(5)]
    assert [turn.is_granted for turn in many] == [True, True, False, False, False]
    other = asked(turns, "b")
    assert other.is_granted
    assert turns.num_free == 1
    many[0].end()
    assert many[2].is_granted
    assert not many[3].is_granted


async def test_shared_turn_goes_with_whoever_comes_first() -> None:
    turns = Turns(total=2, per_asker=1)
    held, deep, deeper = (asked(turns, "a") for _ in range(3))
    assert not deeper.is_granted
    deeper.join("b")
    assert deeper.is_granted, "b has a free share"
    deeper.end()
    held.end()
    assert deep.is_granted
    deep.end()
    assert (turns.num_free, turns.num_waiting) == (2, 0)


async def test_leaving_the_queue() -> None:
    turns = Turns(total=1, per_asker=1)
    held = asked(turns, "a")
    left = asked(turns, "b")
    left.leave("b")
    last = asked(turns, "b", "c")
    last.leave("b")
    assert turns.num_waiting == 1
    held.end()
    assert not left.is_granted
    assert last.is_granted
    last.end()
    last.end()
    assert turns.num_free == 1


async def test_wait_returns_when_granted() -> None:
    turns = Turns(total=1, per_asker=1)
    held, waiting = asked(turns, "a"), asked(turns, "b")
    task = asyncio.create_task(waiting.wait())
    await asyncio.sleep(0)
    assert not task.done()
    held.end()
    await task


async def test_a_cancelled_wait_can_still_be_granted_and_ended() -> None:
    turns = Turns(total=1, per_asker=1)
    held, waiting = asked(turns, "a"), asked(turns, "b")
    task = asyncio.create_task(waiting.wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    held.end()
    waiting.end()
    assert turns.num_free == 1


@given(seed=st.integers(0, 10_000), total=st.integers(1, 5), per_asker=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_any_order_of_events(seed: int, total: int, per_asker: int) -> None:
    """Slots add up, shares hold, and no slot is free while somebody below the share waits."""

    async def play() -> None:
        chance = random.Random(seed)
        turns = Turns(total=total, per_asker=per_asker)
        alive: dict[Turn, list[str]] = {}
        for _ in range(80):
            event = chance.random()
            if event < 0.5 or not alive:
                names = chance.sample("abcd", chance.randint(1, 2))
                alive[asked(turns, *names)] = names
            elif event < 0.6:
                turn = chance.choice(list(alive))
                name = chance.choice("abcd")
                turn.join(name)
                alive[turn].append(name)
            elif event < 0.75:
                turn = chance.choice(list(alive))
                turn.leave(alive[turn].pop(chance.randrange(len(alive[turn]))))
                if not alive[turn]:
                    turn.end()
                    del alive[turn]
            else:
                turn = chance.choice(list(alive))
                turn.end()
                del alive[turn]
            held = Counter(turn.payer for turn in alive if turn.is_granted)
            assert held.total() + turns.num_free == total
            assert max(held.values(), default=0) <= per_asker
            if turns.num_free:
                waiting = {name for turn, names in alive.items() if not turn.is_granted for name in names}
                assert all(held[name] >= per_asker for name in waiting)
        for turn in alive:
            turn.end()
        assert (turns.num_free, turns.num_waiting) == (total, 0)

    asyncio.run(play())


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        Turns(total=sizes[0], per_asker=sizes[1])
