"""Grammars made in processes that are bounded: nobody else pays for a schema that has no end."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.errors import InvalidRequest, Overloaded
from epd.gateway.grammar import Calls, Form, Function, Wish
from epd.gateway.grammar_process import Grammars
from tests.fakes.gateway import MODEL_DIR, RENDERER
from tests.fakes.process_tree import children, command, gone
from tests.oracles.grammar_writer import MAKER

TOKENIZER = MODEL_DIR / "tokenizer.json"
# Seconds of work.
PATTERNED = {"type": "object", "properties": {"p": {"type": "string", "pattern": "[a-z0-9]{1,60}"}}, "required": ["p"]}
LONG = Wish(calls=Calls(tuple(Function(f"f{i}", PATTERNED, f"tools[{i}]", True) for i in range(400)), True, True))
WISHES = [
    Wish(Form("json", {"type": "object", "properties": {"größe": {"type": "integer", "maximum": 10**18}}}, "f")),
    Wish(Form("regex", "[a-c]{2,5}", "f")),
    Wish(Form("choice", ("yes", "nö", '"'), "f"), reasoning="may open"),
    Wish(Form("grammar", 'start: "a" | "b" start', "f")),
    Wish(calls=Calls((Function("get", {"type": "object"}, "p", True),), must_call=True, at_most_one=False)),
]


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, RENDERER.grammars, timeout_s=0.3)
    yield made
    made.close()


def makers() -> set[int]:
    """Process ids."""
    return {pid for pid in children(os.getpid()) if b"epd.gateway.grammar_child" in command(pid)}


def end(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert gone(list(pids))


def address_space_bytes(pid: int) -> int | None:
    """The limit, None where there is none."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    words = next(line for line in lines if line.startswith("Max address space")).split()
    return None if words[3] == "unlimited" else int(words[3])


async def test_they_are_those_of_this_process(grammars: Grammars) -> None:
    same = Grammars(TOKENIZER, MAKER)
    try:
        for wish in WISHES:
            assert await same.grammar(wish) == MAKER.grammar(wish)
    finally:
        same.close()
    assert await grammars.grammar(Wish()) is None


async def test_refusals_are_those_of_this_process(grammars: Grammars) -> None:
    wish = Wish(Form("json", {"type": "object", "properties": {"a": {"type": "strin"}}}, "field"))
    with pytest.raises(InvalidRequest) as here:
        RENDERER.grammars.grammar(wish)
    with pytest.raises(InvalidRequest) as there:
        await grammars.grammar(wish)
    assert (there.value.message, there.value.param) == (here.value.message, here.value.param)


async def test_what_has_no_end_is_ended(grammars: Grammars) -> None:
    others = makers()
    with pytest.raises(InvalidRequest, match=r"takes longer than 0\.3 s") as refused:
        await grammars.grammar(LONG)
    assert refused.value.param == "tools"
    assert makers() <= others
    assert await grammars.grammar(WISHES[1])


async def test_nobody_without_a_schema_waits(grammars: Grammars) -> None:
    hostile = [asyncio.ensure_future(grammars.grammar(LONG)) for _ in range(6)]
    await asyncio.sleep(0)
    # Threads that everybody uses are free.
    await asyncio.wait_for(asyncio.gather(*(asyncio.to_thread(time.sleep, 0) for _ in range(20))), 1.0)
    assert not any(task.done() for task in hostile)
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_more_than_can_wait_are_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.gateway.grammar_process._MAX_WAITING", 2)
    waiting = [asyncio.ensure_future(grammars.grammar(LONG)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 grammars are being made"):
        await grammars.grammar(LONG)
    grammars.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, InvalidRequest | Overloaded | asyncio.CancelledError) for result in results)


async def test_memory_is_bounded_and_a_process_that_dies_costs_its_own_wish_alone() -> None:
    patient = Grammars(TOKENIZER, RENDERER.grammars, timeout_s=60.0)
    others = makers()
    try:
        await patient.grammar(WISHES[0])
        making = asyncio.ensure_future(patient.grammar(LONG))
        await asyncio.sleep(0.5)
        mine = makers() - others
        assert all((address_space_bytes(pid) or 1 << 60) < 4 << 30 for pid in mine)
        end(mine)
        with pytest.raises(InvalidRequest, match="too much memory"):
            await making
    finally:
        patient.close()


async def test_a_known_grammar_needs_no_process(grammars: Grammars) -> None:
    first = await grammars.grammar(WISHES[1])
    end(makers())
    assert await grammars.grammar(WISHES[1]) is first
    # One that died in its sleep is replaced.
    assert await grammars.grammar(WISHES[2])


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    missing = Grammars(tmp_path / "tokenizer.json", RENDERER.grammars)
    with pytest.raises(Overloaded, match="cannot be made at present"):
        asyncio.run(missing.grammar(WISHES[0]))
    missing.close()
