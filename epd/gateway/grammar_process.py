"""Grammars, each made within bounds: of time, of memory, and of what it costs anybody else.

    request --> known? --> a thread of this --> a process that makes it --> grammar, or why there is none
                                                 killed when it is not done in time, gone when it takes too much memory

A schema of a few lines can keep the grammar library busy for hours and grow without end, and nothing stops a thread.
So grammars are made in processes of their own, at a low priority; requests that want none never wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final

import msgspec
from xxhash import xxh3_128_hexdigest

from epd.errors import InvalidRequest, Overloaded
from epd.gateway.grammar import GrammarMaker, Wish, check_size, first_param
from epd.gateway.grammar_child import Made, receive, send

logger = logging.getLogger(__name__)

_NUM_PROCESSES: Final = 2
_MAX_WAITING: Final = 64
_MAX_REMEMBERED: Final = 256
TIMEOUT_S: Final = 3.0
"""For one request's grammar, all its schemas together."""
_START_TIMEOUT_S: Final = 60.0


class Grammars:
    """One model's. Belongs to one event loop."""

    def __init__(self, tokenizer: Path, maker: GrammarMaker, *, timeout_s: float = TIMEOUT_S) -> None:
        """`tokenizer` is the tokenizer.json that `maker` goes by."""
        self._maker = maker
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._known: OrderedDict[str, str] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="grammars")
        self._own = threading.local()
        self._processes: set[_Process] = set()
        self._num_waiting = 0
        self._is_closed = False

    async def grammar(self, wish: Wish) -> str | None:
        """None where nothing needs to be forced. Raises InvalidRequest naming the field; Overloaded."""
        if wish.is_free:
            return None
        check_size(wish)
        key = xxh3_128_hexdigest(repr(wish).encode())
        if key not in self._known:
            if self._num_waiting >= _MAX_WAITING:
                raise Overloaded(f"{_MAX_WAITING} grammars are being made, which is the limit", retry_after_s=1.0)
            self._num_waiting += 1
            try:
                made = await asyncio.get_running_loop().run_in_executor(self._threads, self._made, wish)
            finally:
                self._num_waiting -= 1
            if made.grammar is None:
                raise InvalidRequest(made.refusal or "this cannot be enforced", param=made.param)
            self._known[key] = made.grammar
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def close(self) -> None:
        """What is being made comes to nothing."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            process.end()

    def _made(self, wish: Wish) -> Made:
        try:
            return self._process().made(wish, self._timeout_s)
        except TimeoutError:
            why = f"it takes longer than {self._timeout_s:g} s to make a grammar of it"
        except EOFError:
            why = "it takes too much memory to make a grammar of it"
        param = first_param(wish)
        return Made(refusal=f"{param} cannot be enforced: {why}; give a simpler one", param=param)

    def _process(self) -> _Process:
        """This thread's own, a new one after one that ended. Raises Overloaded."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is not None and process.is_ready:
            return process
        if process is not None:
            process.end()
            self._processes.discard(process)
        process = self._own.process = _Process(self._tokenizer, self._maker.eos_token_ids)
        self._processes.add(process)
        if self._is_closed:
            process.end()
            raise Overloaded("this server is shutting down", retry_after_s=5.0)
        return process


class _Process:
    """One that makes grammars, for one thread. It ends with the gateway: its input does."""

    def __init__(self, tokenizer: Path, eos_token_ids: tuple[int, ...]) -> None:
        """Raises Overloaded where it does not come to life."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "epd.gateway.grammar_child", str(tokenizer), *map(str, eos_token_ids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal is the gateway's.
            start_new_session=True,
        )
        self._is_idle = False
        try:
            self._read(_START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            logger.error("the process that makes grammars does not start: %r", error)
            raise Overloaded("grammars cannot be made at present", retry_after_s=5.0) from error
        self._is_idle = True

    @property
    def is_ready(self) -> bool:
        """It lives, and waits for a wish."""
        return self._is_idle and self._process.poll() is None

    def made(self, wish: Wish, timeout_s: float) -> Made:
        """Raises TimeoutError, or EOFError where it ended over it; then it is to be used no more."""
        assert self._process.stdin is not None
        self._is_idle = False
        try:
            send(self._process.stdin, wish)
        except OSError as error:
            self.end()
            self._close()
            raise EOFError from error
        made = self._read(timeout_s)
        self._is_idle = True
        return made

    def _read(self, timeout_s: float) -> Made:
        pipe = self._process.stdout
        assert pipe is not None
        try:
            # It writes an answer at once and whole.
            if not _has_come(pipe, timeout_s):
                raise TimeoutError
            raw = receive(pipe)
            if raw is None:
                raise EOFError
        except BaseException:
            self.end()
            self._close()
            raise
        return msgspec.json.decode(raw, type=Made)

    def end(self) -> None:
        """At once, whatever it is at. From any thread, and more than once."""
        is_idle, self._is_idle = self._is_idle, False
        self._process.kill()
        self._process.wait()
        # Whoever waits for an answer sees the end of it, and closes.
        if is_idle:
            self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _has_come(pipe: IO[bytes], timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            if selector.select(left_s):
                return True
    return False
