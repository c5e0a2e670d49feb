"""A deterministic toy model whose forward runs through the pages of the real pools, and the same without any cache.

Three layers, window, full, window, of integer recurrences modulo 2^64. Per layer a token stores kv = mix(h), and

    h' = mix(h + sum of kv[u] x odd weight of u over the tokens u it sees)

where a window layer sees W tokens to its left and itself, a full layer all. One wrong word in what a token sees changes
its output, so equal outputs mean equal KV. Everything else, the schedules too, is `World`'s.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tests.cache.properties.schedule import Op, Setting, setting_of, steps_of
from tests.cache.properties.world import HEAL_LAYERS, Run, Text, World

__all__ = ["LAYERS", "ToyWorld", "run_toy"]

Words = npt.NDArray[np.uint64]

LAYERS = ("window", "full", "window")
assert LAYERS.count("window") == HEAL_LAYERS
_POSITIONS = np.arange(128, dtype=np.uint64)
_WEIGHTS = _POSITIONS * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
_WRONG = np.uint64(0xDEAD)


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return words ^ (words >> np.uint64(32))


def _embed(namespace: int, atoms: list[int] | tuple[int, ...]) -> Words:
    return _mix(np.asarray(atoms, dtype=np.uint64) * np.uint64(0x100000001B3) + np.uint64(namespace + 1))


def _seen(kv: Words, first: int, start: int, reach: int | None) -> Words:
    """Weighted sums over what tokens [start, first + len(kv)) see of `kv`, whose first word is token `first`'s."""
    sums = np.zeros(len(kv) + 1, dtype=np.uint64)
    np.cumsum(kv * _WEIGHTS[first : first + len(kv)], out=sums[1:])
    upper = sums[start - first + 1 :]
    if reach is None:
        return upper
    lows = np.maximum(np.arange(start, first + len(kv)) - reach, first) - first
    seen: Words = upper - sums[lows]
    return seen


@lru_cache(maxsize=20_000)
def plain_forward(text: Text, window_tokens: int) -> tuple[tuple[Words, ...], Words]:
    """KV words of every layer and the outputs of every token, computed at once without a cache."""
    h, stored = _embed(text.namespace, text.atoms), []
    for layer, kind in enumerate(LAYERS):
        kv = _mix(h + np.uint64(layer))
        stored.append(kv)
        h = _mix(h + _seen(kv, 0, 0, window_tokens if kind == "window" else None))
    return tuple(stored), h


class ToyWorld(World):
    """Instead of tags, words of a model; every output that is computed is compared with the one without a cache."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        size = setting.page_size
        self.num_compared = 0
        self._kv = [
            np.zeros((setting.num_window_pages if kind == "window" else setting.num_full_pages, size), dtype=np.uint64)
            for kind in LAYERS
        ]

    def write(self, run: Run, start: int, stop: int, *, wrong: bool = False, full: bool = True) -> None:
        """Drafts that will be rejected leave words of no model; anything else is a forward, and its outputs count."""
        if start >= stop:
            return
        if wrong:
            for layer in range(len(LAYERS)):
                self._store(run, layer, start, np.full(stop - start, _WRONG))
            return
        outputs = self._forward(run, start, stop, writes_full=True)
        expected = plain_forward(run.text, self.window_tokens)[1][start:stop]
        assert np.array_equal(outputs, expected), "the cache changed an output"
        self.num_compared += stop - start

    def compare_rows(self) -> None:
        """KV of every row is the plain forward's in every layer: all of it in full ones, the last window in others."""
        for run in self.runs:
            committed = run.pages.num_committed_tokens
            expected = plain_forward(run.text, self.window_tokens)[0]
            for layer, kind in enumerate(LAYERS):
                first = 0 if kind == "full" else max(0, committed - self.window_tokens)
                assert np.array_equal(self._load(run, layer, first, committed), expected[layer][first:committed])

    def _decode(self, run: Run, stop: int, symbol: int) -> None:
        """Greedy: the next token is the plain model's, which the cached one's outputs are compared with."""
        while len(run.atoms) < stop:
            output = plain_forward(run.text, self.window_tokens)[1][-1]
            super()._decode(run, len(run.atoms) + 1, int(output) % 2)

    def _write_windows(self, run: Run, num_tokens: int, start: int) -> None:
        run.was_handed = True
        cached, frontier = run.pages.num_cached_tokens, self.cache.window_frontier(num_tokens)
        if not self.extend(run, num_tokens, start):
            self.end_run(run, aborted=True)
            return
        if cached < num_tokens or start == frontier:
            self._take_over(run, num_tokens, cached)
        else:
            # Healing, in chunks of a page and a bit; full layers read what is there and write nothing.
            at = start * self.page_size
            while at < num_tokens:
                stop = min(num_tokens, at + self.page_size + 1)
                self._forward(run, at, stop, writes_full=False)
                at = stop
            self.extend(run, num_tokens, frontier)
        self.commit(run, num_tokens)

    def _take_over(self, run: Run, num_tokens: int, cached: int) -> None:
        """KV computed elsewhere arrives: full pages that were missing, and the window pages of the row."""
        stored = plain_forward(run.text, self.window_tokens)[0]
        for layer, kind in enumerate(LAYERS):
            first = cached if kind == "full" else run.pages.window_start * self.page_size
            self._store(run, layer, first, stored[layer][first:num_tokens])

    def _forward(self, run: Run, start: int, stop: int, *, writes_full: bool) -> Words:
        h = _embed(run.namespace, run.atoms[start:stop])
        for layer, kind in enumerate(LAYERS):
            kv = _mix(h + np.uint64(layer))
            if kind == "full":
                if writes_full:
                    self._store(run, layer, start, kv)
                h = _mix(h + _seen(self._load(run, layer, 0, stop), 0, start, None))
            elif not self.window_tokens:
                h = _mix(h + _seen(kv, start, start, 0))
            else:
                self._store(run, layer, start, kv)
                first = max(0, start - self.window_tokens, run.pages.window_start * self.page_size)
                h = _mix(h + _seen(self._load(run, layer, first, stop), first, start, self.window_tokens))
        return h

    def _slots(self, run: Run, layer: int, start: int, stop: int) -> tuple[Words, npt.NDArray[np.int64]]:
        """The layer's words in one line, and where in it tokens [start, stop) of the row are."""
        size, pages = self.page_size, run.pages
        kind = LAYERS[layer]
        ids = pages.full_pages if kind == "full" else pages.window_pages
        shift = 0 if kind == "full" else pages.window_start * size
        tokens = np.arange(start - shift, stop - shift)
        assert start >= shift, "the row has no window page there"
        return self._kv[layer].reshape(-1), np.asarray(ids, dtype=np.int64)[tokens // size] * size + tokens % size

    def _store(self, run: Run, layer: int, start: int, kv: Words) -> None:
        if len(kv) and (self.window_tokens or LAYERS[layer] == "full"):
            words, slots = self._slots(run, layer, start, start + len(kv))
            words[slots] = kv

    def _load(self, run: Run, layer: int, start: int, stop: int) -> Words:
        if start >= stop:
            return np.zeros(0, dtype=np.uint64)
        words, slots = self._slots(run, layer, start, stop)
        loaded: Words = words[slots]
        return loaded


def run_toy(schedule: bytes) -> int:
    """Run a schedule with the toy model; returns how many outputs were compared."""
    world = ToyWorld(setting_of(schedule))
    for step in steps_of(schedule):
        world.do(step)
        if step.op in (Op.HEAL, Op.RECEIVE, Op.AGAIN, Op.RETRACT):
            world.compare_rows()
    world.compare_rows()
    world.end(schedule[-1])
    world.cache.check()
    return world.num_compared
