"""A process that dies in the middle of a chosen system call on a local KV store, as often as there are such calls.

`python -m tests.fakes.store_crash ROOT STEP` forks a child for every STEP-th call. The child does the same things each
time, and dies at its call: before it, after it, or in the middle of what it writes. Afterwards the store is opened, and
must hold what the child had completed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epd.cache.l3.local import LocalNode

SEGMENT_BYTES = 1 << 16
CALLS = ("pwritev", "pwrite", "ftruncate", "unlink", "replace", "rename", "open", "close")
DIED = 9


def open_node(root: Path) -> LocalNode:
    return LocalNode(
        root / "hot",
        root / "cold",
        memory_bytes=4 * SEGMENT_BYTES,
        disk_bytes=64 * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
    )


def key_of(number: int) -> bytes:
    return b"f%016d" % number


def value_of(number: int, seed: int) -> bytes:
    return random.Random(number * 100 + seed).randbytes(4000)


def work(node: LocalNode, note: Callable[[str, list[int], int], None]) -> None:
    """Puts that fill and demote, promotions, overwriting, discarding; each noted when it begins and when it is done."""
    for turn in range(14):
        numbers = list(range(turn * 6, turn * 6 + 6))
        note("put", numbers, 0)
        kept = node.put([(key_of(number), [value_of(number, 0)]) for number in numbers], timeout_s=5)
        assert all(kept)
        note("done", numbers, 0)
        if turn >= 4:
            again = numbers[0] - 24
            note("put", [again], turn)
            assert node.put([(key_of(again), [value_of(again, turn)])], timeout_s=5) == [True]
            note("done", [again], turn)
            gone = numbers[1] - 24
            note("discard", [gone], 0)
            node.discard([key_of(gone)], timeout_s=5)
            note("done", [gone], -1)
            for _ in range(2):
                node.get([key_of(number) for number in (0, 2, 3)], lambda _, value: None, timeout_s=5)
        for _ in range(3):
            node.tend()
    node.close()


def die_at(call: int) -> list[int]:
    """Arm the calls; the list counts how many there have been."""
    count = [0]

    def armed(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*words: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                if name == "pwritev" and call % 3:
                    content = b"".join(words[1])
                    os.lseek(words[0], words[2], os.SEEK_SET)
                    os.write(words[0], content[: len(content) * (call % 3) // 3])
                elif name == "pwrite" and call % 3:
                    os.lseek(words[0], words[2], os.SEEK_SET)
                    os.write(words[0], words[1][: len(words[1]) // 2])
                elif call % 2:
                    original(*words, **named)
                os._exit(DIED)
            return original(*words, **named)

        return wrapper

    for name in CALLS:
        setattr(os, name, armed(getattr(os, name), name))
    return count


def child(root: Path, call: int, pipe: int) -> None:
    node = open_node(root)
    count = die_at(call)
    write = os.write

    def note(what: str, numbers: list[int], seed: int) -> None:
        write(pipe, json.dumps([what, numbers, seed]).encode() + b"\n")

    work(node, note)
    write(pipe, json.dumps(["calls", [], count[0]]).encode() + b"\n")
    os._exit(0)


def allowed_after(notes: list[list[Any]]) -> dict[int, set[int | None]]:
    """For each number the seeds that its value may have; None is none."""
    allowed: dict[int, set[int | None]] = {}
    for what, numbers, seed in notes:
        for number in numbers:
            if what == "done":
                allowed[number] = {None if seed < 0 else seed}
            else:
                allowed[number] = allowed.get(number, {None}) | {seed if what == "put" else None}
    return allowed


def check(root: Path, notes: list[list[Any]]) -> None:
    allowed = allowed_after(notes)
    for _ in range(2):
        node = open_node(root)
        numbers = sorted(allowed)

        def sink(index: int, content: memoryview | None, numbers: list[int] = numbers) -> None:
            number = numbers[index]
            values = {None if seed is None else value_of(number, seed) for seed in allowed[number]}
            found = None if content is None else bytes(content)
            assert found in values, f"number {number} is none of {allowed[number]}"

        node.get([key_of(number) for number in numbers], sink, timeout_s=5)
        late = key_of(10_000)
        assert node.put([(late, [b"late"])], timeout_s=5) == [True]
        for _ in range(3):
            node.tend()
        node.close()


def main() -> None:
    base, step = Path(sys.argv[1]), int(sys.argv[2])
    call, num_deaths = 1, 0
    while True:
        root = base / str(call)
        root.mkdir()
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            child(root, call, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            notes = [json.loads(line) for line in pipe]
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, DIED), f"the child ended with {code} at call {call}"
        num_deaths += code == DIED
        try:
            check(root, [note for note in notes if note[0] != "calls"])
        except AssertionError as error:
            sys.exit(f"after death at call {call}: {error}")
        shutil.rmtree(root)
        if code == 0:
            break
        call += step
    print(num_deaths)


if __name__ == "__main__":
    main()
