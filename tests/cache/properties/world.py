"""A real PrefixCache driven by a schedule, with a shadow beside it, and the hooks where invariants look.

Long because every kind of step is here, next to what it does to the shadow.

The shadow: `log` (what was inserted less what the pools saw go), `full_tags` and `window_tags` (for every slot of both
pools the tag of what was last written there), and per run the tags its tokens ought to have. A tag names a token and
everything before it, as a KV row does; a stub forward writes tags where a real one would write KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from epd.cache.keys import MediaRun, PageKeyChain, page_keys
from epd.cache.prefix import PrefixCache, PrefixHit
from epd.cache.sequence_pages import SequencePages
from epd.kv.errors import NoPages
from tests.cache.properties.policies import policy_of
from tests.cache.properties.schedule import Op, Setting, Step, setting_of, steps_of
from tests.oracles.page_log import PageLog, watched_pools

__all__ = ["HEAL_LAYERS", "Before", "Invariant", "Run", "Text", "World", "keys_of", "run_schedule"]

HEAL_LAYERS = 2
"""Window layers of the imagined model: healing re-runs so many windows."""
_MEDIA_ROW = 100
_WRONG = -1
_LONGEST = 56
_KNOWN_TEXTS = 10


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens in a namespace. An atom below 100 is a text token; 100 * m + row is row `row` of medium m."""

    namespace: int
    atoms: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.atoms)


@lru_cache(maxsize=20_000)
def keys_of(text: Text, page_size: int) -> list[bytes]:
    """Page keys by the production code, kept since few texts are looked up often. Not to be changed by the caller."""
    token_ids, media = _as_prompt(text.atoms)
    return page_keys(token_ids, media, page_size=page_size, seed=_seed(text.namespace))


def _seed(namespace: int) -> bytes:
    return b"model/layout/tenant" + bytes([namespace])


def _as_prompt(atoms: Sequence[int]) -> tuple[list[int], list[MediaRun]]:
    """Placeholders stand for media rows, each unbroken run of rows of a medium being one span."""
    media: list[MediaRun] = []
    start = 0
    while start < len(atoms):
        stop = start + 1
        if atoms[start] >= _MEDIA_ROW:
            while stop < len(atoms) and atoms[stop] == atoms[stop - 1] + 1:
                stop += 1
            medium, row = divmod(atoms[start], _MEDIA_ROW)
            media.append(MediaRun(start, stop, bytes([medium]) * 16, row))
        start = stop
    return [9 if atom >= _MEDIA_ROW else atom for atom in atoms], media


@dataclass(slots=True, eq=False)
class Run:
    """One running sequence; `tags[t]` is what token t's slots ought to hold."""

    namespace: int
    atoms: list[int]
    tags: list[int]
    keys: list[bytes]
    pages: SequencePages
    num_prompt_tokens: int
    num_leased_pages: int
    is_condemned: bool = False
    """What it published is hidden, and so is what it will publish."""
    was_handed: bool = False
    """Its windows were written for pages it had leased, so it has none before those."""
    is_reopened: bool = False
    """Windows were opened anew and not committed: what the row gave up for them may be gone."""
    reach_tokens: int = 0
    """The most room it ever asked for beyond its committed tokens: chunk and drafts, or what was healed."""
    chain: PageKeyChain | None = None
    """Made when the first token is decoded; `keys` is its list from then on."""

    @property
    def text(self) -> Text:
        return Text(self.namespace, tuple(self.atoms))


@dataclass(slots=True)
class Before:
    """A row as it was before a commit or its end."""

    full_pages: list[int]
    window_pages: list[int]
    window_start: int
    num_published: int
    num_committed: int

    @classmethod
    def of(cls, pages: SequencePages) -> Before:
        return cls(
            list(pages.full_pages),
            list(pages.window_pages),
            pages.window_start,
            pages.num_published_pages,
            pages.num_committed_tokens,
        )

    def window(self, page_index: int) -> int | None:
        offset = page_index - self.window_start
        return self.window_pages[offset] if 0 <= offset < len(self.window_pages) else None


class Invariant:
    """One property. Hooks do nothing here; a subclass looks where it must, asserts, and counts what it came to see."""

    num_cases = 0

    def before(self, world: World, step: Step) -> None: ...
    def after(self, world: World, step: Step) -> None: ...
    def on_begin(self, world: World, run: Run, limit_tokens: int, full_only: bool) -> None: ...
    def on_extend(self, world: World, run: Run, needed: tuple[int, int], before: Before, granted: bool) -> None: ...
    def on_commit(self, world: World, run: Run, before: Before) -> None: ...
    def on_evict(self, world: World, window: bool, wanted: int, freed: int) -> None: ...
    def on_end(self, world: World, run: Run, before: Before, aborted: bool) -> None: ...
    def at_end(self, world: World) -> None: ...


class World:
    """The cache, the shadow and the running sequences of one schedule."""

    def __init__(self, setting: Setting, invariants: Sequence[Invariant] = (), *, with_drafts: bool = True) -> None:
        """Without `with_drafts`, steps draft nothing that is then rejected."""
        self.setting = setting
        self.page_size, self.window_tokens = setting.page_size, setting.window_tokens
        self.pool, self._full, self._window = watched_pools(setting.num_full_pages, setting.num_window_pages)
        self.cache = PrefixCache(
            self.pool,
            page_size=setting.page_size,
            window_tokens=setting.window_tokens,
            retention=setting.retention,
            policy=policy_of(setting),
        )
        self.log = PageLog(page_size=setting.page_size, window_tokens=setting.window_tokens)
        self.full_tags = [0] * (setting.num_full_pages * setting.page_size)
        self.window_tags = [0] * (setting.num_window_pages * setting.page_size)
        self.runs: list[Run] = []
        self.texts = [Text(0, (0,) * 12)]
        self.inserted: set[tuple[int, tuple[int, ...]]] = set()
        """Every (namespace, tokens of whole pages) that was ever published."""
        self._lookups: list[tuple[Text, list[bytes], PrefixHit]] | None = None
        self._with_drafts = with_drafts
        self._hooks = {
            name: [getattr(one, name) for one in invariants if getattr(type(one), name) is not getattr(Invariant, name)]
            for name in ("before", "after", "on_begin", "on_extend", "on_commit", "on_evict", "on_end", "at_end")
        }

    # -- what invariants ask --------------------------------------------------------------------------------------

    def keys(self, text: Text) -> list[bytes]:
        return keys_of(text, self.page_size)

    def tags(self, text: Text) -> list[int]:
        """What the slots of each token ought to hold."""
        tag, tags = text.namespace, []
        for atom in text.atoms:
            tag = hash((tag, atom))
            tags.append(tag)
        return tags

    def lookups(self) -> list[tuple[Text, list[bytes], PrefixHit]]:
        """What is worth looking up, texts of late and what runs, and what is found: looked up once per step."""
        if self._lookups is None:
            texts = [*self.texts[-2:], *(run.text for run in self.runs[-2:])]
            found = ((text, self.keys(text)) for text in dict.fromkeys(texts))
            self._lookups = [(text, keys, self.cache.match(keys, len(text))) for text, keys in found]
        return self._lookups

    def window_pages_gone(self) -> list[int]:
        """Window pages the tree gave back since the log was last told."""
        return list(self._window.freed_by_tree)

    def window_limit(self, run: Run) -> int:
        """Window pages the run may hold: W + what it has in flight + the release interval, rounded up, and its tail."""
        retention, page_size = self.setting.retention, self.page_size
        in_flight = run.reach_tokens + retention.release_interval_tokens - 1
        return self.cache.window_pages + retention.tail_pages + -(-in_flight // page_size) + 1

    # -- running --------------------------------------------------------------------------------------------------

    def do(self, step: Step) -> None:
        for hook in self._hooks["before"]:
            hook(self, step)
        self._STEPS[step.op](self, step)
        self._lookups = None
        for hook in self._hooks["after"]:
            hook(self, step)

    def end(self, order: int) -> None:
        """End every run, in an order drawn from `order`, and look for the last time."""
        while self.runs:
            run = self.runs[order % len(self.runs)]
            self.end_run(run, aborted=order % 3 == 0)
            order = order * 5 // 3 + 1
        for hook in self._hooks["at_end"]:
            hook(self)

    def begin(
        self, text: Text, *, limit_tokens: int | None = None, full_only: bool = False, num_prompt_tokens: int = 0
    ) -> Run:
        keys = self.keys(text)
        pages = self.cache.begin(keys, len(text), max_cached_tokens=limit_tokens, full_only=full_only)
        run = Run(
            text.namespace,
            list(text.atoms),
            self.tags(text),
            keys,
            pages,
            num_prompt_tokens or len(text),
            pages.num_published_pages,
        )
        self.runs.append(run)
        for hook in self._hooks["on_begin"]:
            hook(self, run, len(text) if limit_tokens is None else min(len(text), limit_tokens + 1), full_only)
        return run

    def extend(self, run: Run, num_tokens: int, window_start: int | None = None) -> bool:
        """Make room; False where the pools have none."""
        pages = run.pages
        needed = pages.pages_needed(num_tokens, window_start=window_start)
        before = Before.of(pages)
        foretold = self.cache.fits(*needed)
        granted = True
        try:
            pages.extend(num_tokens, window_start=window_start)
        except NoPages:
            granted = False
        self._sync()
        if granted:
            started = pages.num_committed_tokens if window_start is None else window_start * self.page_size
            run.reach_tokens = max(run.reach_tokens, num_tokens - min(started, pages.num_committed_tokens))
        for hook in self._hooks["on_extend"]:
            hook(self, run, needed, before, granted)
        assert foretold == granted, f"fits{needed} said {foretold}, extend() {granted}"
        return granted

    def write(self, run: Run, start: int, stop: int, *, wrong: bool = False, full: bool = True) -> None:
        """The stub forward: tags of tokens [start, stop) go to the slots the row names for them."""
        page_size, pages, tags = self.page_size, run.pages, run.tags
        for position in range(start, stop):
            index, offset = divmod(position, page_size)
            tag = _WRONG if wrong else tags[position]
            if full:
                self.full_tags[pages.full_pages[index] * page_size + offset] = tag
            window = pages.window_page(index)
            if window is not None:
                self.window_tags[window * page_size + offset] = tag

    def commit(self, run: Run, num_tokens: int) -> None:
        before = Before.of(run.pages)
        run.pages.commit(num_tokens, run.keys)
        if not run.is_condemned:
            keys, num_pages = run.keys, num_tokens // self.page_size
            for index in range(min(before.num_published, before.window_start), num_pages):
                self.log.insert(keys[index], before.full_pages[index], before.window(index))
            for index in range(before.num_published, num_pages):
                self.inserted.add((run.namespace, tuple(run.atoms[: (index + 1) * self.page_size])))
        self._sync()
        for hook in self._hooks["on_commit"]:
            hook(self, run, before)

    def end_run(self, run: Run, *, aborted: bool) -> None:
        before = Before.of(run.pages)
        self.runs.remove(run)
        self.remember(run.text)
        if aborted:
            run.pages.abort()
        else:
            run.pages.finish()
        self._sync()
        for hook in self._hooks["on_end"]:
            hook(self, run, before, aborted)

    def evict(self, *, window: bool, num_pages: int) -> int:
        ledger = self.cache._ledger
        freed = ledger.evict_window(num_pages) if window else ledger.evict_full(num_pages)
        for hook in self._hooks["on_evict"]:
            hook(self, window, num_pages, freed)
        self._sync()
        return freed

    def remember(self, text: Text) -> None:
        self.texts.append(text)
        del self.texts[:-_KNOWN_TEXTS]

    # -- steps ----------------------------------------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        self.begin(self._prompt(step))

    def _again(self, step: Step) -> None:
        text = self.texts[step.a % len(self.texts)]
        self.begin(text, limit_tokens=step.c % (len(text) + 1) if step.b < 48 else None)

    def _advance(self, step: Step) -> None:
        run = self._run(step)
        if run is None:
            return
        done, prompt = run.pages.num_committed_tokens, run.num_prompt_tokens
        chunk = 1 + step.b % (3 * self.page_size + 2)
        stop = min(done + chunk, prompt) if done < prompt else done + chunk
        if stop > _LONGEST:
            self.end_run(run, aborted=False)
            return
        self._decode(run, stop, step.c % 2)
        if self.extend(run, stop):
            self.write(run, done, stop)
            self.commit(run, stop)

    def _speculate(self, step: Step) -> None:
        run = self._run(step)
        if run is None:
            return
        done = run.pages.num_committed_tokens
        num_drafts = 1 + step.b % 5
        num_accepted = step.c % (num_drafts + 1)
        last = max(done, len(run.atoms) - 1)
        if last + 1 + num_drafts > _LONGEST:
            return
        # Drafts come when the prompt is computed: its rest goes along with them.
        self._decode(run, last + 1 + num_accepted, step.c // 8 % 2)
        num_room = last + 1 + (num_drafts if self._with_drafts else num_accepted)
        if self.extend(run, num_room):
            self.write(run, done, last + 1 + num_accepted)
            self.write(run, last + 1 + num_accepted, num_room, wrong=True)
            self.commit(run, last + 1 + num_accepted)

    def _reject(self, step: Step) -> None:
        run = self._run(step)
        if run is None or not self._with_drafts:
            return
        done = run.pages.num_committed_tokens
        stop = done + 1 + step.b % (2 * self.page_size + 1)
        if self.extend(run, stop):
            self.write(run, done, stop, wrong=True)

    def _finish(self, step: Step) -> None:
        if (run := self._run(step)) is not None:
            self.end_run(run, aborted=False)

    def _abort(self, step: Step) -> None:
        if (run := self._run(step)) is not None:
            self.end_run(run, aborted=True)

    def _retract(self, step: Step) -> None:
        if (run := self._run(step)) is not None:
            self.end_run(run, aborted=True)
            self.begin(run.text, num_prompt_tokens=run.num_prompt_tokens)

    def _receive(self, step: Step) -> None:
        text = self._prompt(step)
        self._write_windows(self.begin(text, full_only=True), len(text), self.cache.window_frontier(len(text)))

    def _heal(self, step: Step) -> None:
        """Re-run the windows of every layer before the end of what the full pages hold; keep those that are exact."""
        run = self.begin(self.texts[step.a % len(self.texts)], full_only=True)
        stop = run.pages.num_cached_tokens
        # The last window layer must be given exact rows from the first page of its window on, not from N - W on: that
        # page is published whole, and next to an older window all of its tokens are read.
        exact_from = self.cache.window_frontier(stop) * self.page_size
        start = max(0, exact_from - (HEAL_LAYERS - 1) * self.window_tokens) // self.page_size
        self._write_windows(run, stop, start)

    def _write_windows(self, run: Run, num_tokens: int, start: int) -> None:
        """Full pages from the lease's end on and windows from page `start` on are filled; then the row goes on."""
        run.was_handed = True
        cached, frontier = run.pages.num_cached_tokens, self.cache.window_frontier(num_tokens)
        if not self.extend(run, num_tokens, start):
            self.end_run(run, aborted=True)
            return
        self.write(run, cached, num_tokens)
        if self.window_tokens:
            # What lies before the frontier is not exact in every layer.
            self.write(run, start * self.page_size, min(cached, frontier * self.page_size), wrong=True, full=False)
            self.write(run, max(frontier, start) * self.page_size, num_tokens, full=False)
            if start != frontier:
                self.extend(run, num_tokens, frontier)
        self.commit(run, num_tokens)

    def _reopen(self, step: Step) -> None:
        """As healing that is given up: what was opened, once or twice, never gets a commit."""
        run = self._run(step) if step.c % 2 else None
        if run is None:
            run = self.begin(self.texts[step.a % len(self.texts)], full_only=True)
            run.was_handed = True
        num_tokens = run.pages.num_committed_tokens + step.b // 8 % (self.page_size + 2)
        first = step.b % (run.pages.num_published_pages + 1)
        run.is_reopened = True
        if self.extend(run, num_tokens, first) and step.c // 2 % 2:
            self.extend(run, num_tokens, step.c // 8 % (run.pages.num_published_pages + 1))
        self.end_run(run, aborted=step.c // 4 % 4 == 0)

    def _serve(self, step: Step) -> None:
        text = self._prompt(step)
        run = self.begin(text)
        chunk = 1 + step.c % (4 * self.page_size)
        while (done := run.pages.num_committed_tokens) < len(text):
            stop = min(done + chunk, len(text))
            if not self.extend(run, stop):
                break
            self.write(run, done, stop)
            self.commit(run, stop)
        self.end_run(run, aborted=False)

    def _probe(self, step: Step) -> None:
        """fits() with a prompt foretells what is left after the lease, and giving the lease back undoes it."""
        text = self._prompt(step)
        keys, want = self.keys(text), (step.a % 13, step.b % 13)
        foretold = self.cache.fits(*want, keys=keys, num_tokens=len(text))
        run = self.begin(text)
        assert foretold == self.cache.fits(*want), "fits() with a prompt did not foretell what its lease leaves"
        self.end_run(run, aborted=True)

    def _evict(self, step: Step) -> None:
        self.evict(window=step.a % 2 == 0, num_pages=1000 if step.b > 230 else step.b % 7)

    def _condemn(self, step: Step) -> None:
        run = self._run(step)
        if run is None:
            return
        published, first = run.pages.num_published_pages, run.keys[:1]
        self.runs.remove(run)
        hidden = not run.is_condemned and published > 0
        run.pages.condemn()
        self._sync()
        if not hidden:
            return
        below = [key for run_ in self._ever(first[0]) for key in run_]
        self.log.hide(below)
        for other in self.runs:
            other.is_condemned |= other.pages.num_published_pages > 0 and other.keys[:1] == first
        self.inserted = {
            (namespace, atoms)
            for namespace, atoms in self.inserted
            if keys_of(Text(namespace, atoms), self.page_size)[:1] != first
        }

    def _clear(self, step: Step) -> None:
        self.cache.clear()
        self._sync()

    # -- the rest -------------------------------------------------------------------------------------------------

    def _ever(self, first: bytes) -> list[list[bytes]]:
        """Keys of everything ever published whose first page is `first`."""
        texts = (keys_of(Text(namespace, atoms), self.page_size) for namespace, atoms in self.inserted)
        return [keys for keys in texts if keys[0] == first]

    def _sync(self) -> None:
        if self._full.freed_by_tree or self._window.freed_by_tree:
            self.log.free(self._full.freed_by_tree, self._window.freed_by_tree)
            self._full.freed_by_tree.clear()
            self._window.freed_by_tree.clear()

    def _run(self, step: Step) -> Run | None:
        return self.runs[step.a % len(self.runs)] if self.runs else None

    def _decode(self, run: Run, stop: int, symbol: int) -> None:
        """Sample tokens until the run has `stop`."""
        if run.chain is None and len(run.atoms) < stop:
            run.chain = PageKeyChain(page_size=self.page_size, seed=_seed(run.namespace))
            run.chain.extend(*_as_prompt(run.atoms))
            run.keys = run.chain.keys
        while run.chain is not None and len(run.atoms) < stop:
            run.atoms.append(symbol)
            run.tags.append(hash((run.tags[-1], symbol)))
            run.chain.append(symbol)

    def _prompt(self, step: Step) -> Text:
        """A known text cut somewhere and continued by a run of one symbol, or of the rows of a medium."""
        source = self.texts[step.a % len(self.texts)]
        kept = source.atoms[: len(source) if step.b >= 160 else step.b % (len(source) + 1)]
        count, kind = step.c // 4 % (5 * self.page_size), step.c % 4
        row = _MEDIA_ROW * (1 + step.b % 2) + step.b // 2 % 3
        more = (kind % 2,) * count if kind < 3 else tuple(range(row, row + count))
        namespace = 1 - source.namespace if step.a >= 244 else source.namespace
        text = Text(namespace, (kept + more)[:_LONGEST] or (1,))
        self.remember(text)
        return text

    _STEPS: ClassVar = {
        Op.BEGIN: _begin,
        Op.AGAIN: _again,
        Op.ADVANCE: _advance,
        Op.SPECULATE: _speculate,
        Op.REJECT: _reject,
        Op.FINISH: _finish,
        Op.ABORT: _abort,
        Op.RETRACT: _retract,
        Op.RECEIVE: _receive,
        Op.HEAL: _heal,
        Op.SERVE: _serve,
        Op.PROBE: _probe,
        Op.EVICT: _evict,
        Op.CONDEMN: _condemn,
        Op.CLEAR: _clear,
        Op.REOPEN: _reopen,
    }


def run_schedule(
    schedule: bytes, invariants: Sequence[Invariant], *, roomy: bool = False, with_drafts: bool = True
) -> World:
    """Run a whole schedule; returns the world as it was left, every run ended."""
    world = World(setting_of(schedule, roomy=roomy), invariants, with_drafts=with_drafts)
    for step in steps_of(schedule):
        world.do(step)
    world.end(schedule[-1])
    return world
