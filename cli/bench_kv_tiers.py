"""How long a prompt takes to its first token by where its KV is: device, host, store, on the device without its
windows, or nowhere; and what an engine that starts again finds in the store that another left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from cli.bench_case import Bars, Case, Contest, Findings, Panel, Setting
from cli.bench_kv_tiers_engine import MODEL, Prompts, State, TierEngine, long_model

__all__ = ["ttft_tier_cases"]

_LENGTHS = {"1k": 1024, "8k": 8192, "32k": 32768}
_QUICK_SHARE = 16
_LEAST_TOKENS = 256
"""Of a quick prompt: more than the model's window, so that there is something to heal."""
_REPEATS = 5
"""Of what takes milliseconds, per round: the figure is their median."""
_NUM_HELD = 4
"""Prompts that the store holds when an engine starts again."""
_STORE = "store"
_SEEN = "sent before, and since then"
_WORDS: dict[State, str] = {
    "L1": "the same prompt sent again, its KV on the device",
    "L2": f"{_SEEN} gone from the device: loaded from the host's memory",
    "L3": f"{_SEEN} gone from the device and the host: read from the local store's memory",
    "heal": f"{_SEEN} every window evicted, with no other tier: the last rows run again",
    "cold": "a prompt of the same length that nobody sent before",
}


def ttft_tier_cases() -> tuple[Case, ...]:
    """`tiers.ttft_l2_8k` and its like, and `tiers.restart_8k`."""
    contests: tuple[tuple[str, State, State], ...] = (
        ("l2", "L2", "L1"),
        ("l3", "L3", "cold"),
        ("heal", "heal", "cold"),
    )
    cases = [
        Case(
            name=f"tiers.ttft_{name}_{short}",
            unit="s",
            ours=_WORDS[ours],
            baseline=_WORDS[rival],
            limit="none",
            open=partial(_opened, num_tokens=num_tokens, state=ours, rival=rival),
        )
        for name, ours, rival in contests
        for short, num_tokens in _LENGTHS.items()
    ]
    restart = Case(
        name="tiers.restart_8k",
        unit="s",
        ours="sent to an engine before this one, which has ended: read from the local store that it left",
        baseline=_WORDS["cold"],
        limit="none",
        open=_restarted,
    )
    return (*cases, restart)


@dataclass(slots=True)
class _Clocks:
    """What was measured in each state, for the picture that shows all of them."""

    num_tokens: int
    times_s: dict[State, list[float]] = field(default_factory=dict)

    def note(self, state: State, seconds: float) -> float:
        self.times_s.setdefault(state, []).append(seconds)
        return seconds

    def findings(self, drawn: tuple[State, ...]) -> Findings:
        ms = {state: 1000 * median(self.times_s[state]) for state in _WORDS if state in self.times_s}
        return Findings(
            lines=(", ".join(f"{state} {_digits(value)} ms" for state, value in ms.items()),),
            figures={"ttft_ms": {state: float(f"{value:.5g}") for state, value in ms.items()}},
            panels=(
                Panel(
                    title=f"time to the first token, {MODEL}",
                    x_label="tokens of the prompt",
                    y_label="ms",
                    curves={state: [(self.num_tokens, value)] for state, value in ms.items() if state in drawn},
                    y_is_logarithmic=True,
                ),
            ),
        )


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextmanager
def _opened(setting: Setting, bars: Bars, *, num_tokens: int, state: State, rival: State) -> Iterator[Contest]:
    with _stage(setting, bars, num_tokens) as (folder, model_dir, prompts):
        store = folder / _STORE if state == "L3" else None
        engine = TierEngine(model_dir, setting, num_tokens=prompts.num_tokens, host=state != "heal", store=store)
        try:
            prompt = prompts.take()
            # Twice: neither the first prompt nor the first one that is found pays for what is made once.
            for _ in range(2):
                engine.ask(prompt)
            clocks = _Clocks(prompts.num_tokens)

            def found(wanted: State) -> Callable[[], float]:
                return lambda: clocks.note(wanted, median(_found_s(engine, prompt, wanted) for _ in range(_REPEATS)))

            yield Contest(
                detail=f"{MODEL}, {prompts.num_tokens} tokens, one request at a time, in this process",
                ours=found(state),
                baseline=found(rival) if rival == "L1" else lambda: clocks.note(rival, _cold_s(engine, prompts)),
                # What is measured in two cases is drawn once.
                findings=lambda: clocks.findings(("heal",) if state == "heal" else (state, rival)),
            )
        finally:
            engine.close()


@contextmanager
def _stage(setting: Setting, bars: Bars, num_tokens: int) -> Iterator[tuple[Path, Path, Prompts]]:
    """A directory that goes again, in it a model, and prompts of so many tokens, fewer if it is to be quick."""
    from encoder import num_threads
    from epd import remove_local_store

    length = max(_LEAST_TOKENS, num_tokens // _QUICK_SHARE) if setting.quick else num_tokens
    with num_threads(setting.num_threads), TemporaryDirectory(prefix="mimo-bench-kv-") as name:
        folder = Path(name)
        bars.begin("loading the engine", 1)
        try:
            yield folder, long_model(folder, length + 2), Prompts(length)
        finally:
            # Its memory is elsewhere, and would stay.
            remove_local_store(folder / _STORE)


def _found_s(engine: TierEngine, prompt: list[int], state: State) -> float:
    engine.move_to(state)
    return engine.ask(prompt, state).ttft_s


def _cold_s(engine: TierEngine, prompts: Prompts) -> float:
    seconds = engine.ask(prompts.take(), "cold").ttft_s
    engine.settle()
    return seconds


@contextmanager
def _restarted(setting: Setting, bars: Bars) -> Iterator[Contest]:
    with _stage(setting, bars, _LENGTHS["8k"]) as (folder, model_dir, prompts):
        held = [prompts.take() for _ in range(_NUM_HELD)]
        with _Restarts(folder, model_dir, setting, num_tokens=prompts.num_tokens) as engines:
            for prompt in held:
                engines.engine.ask(prompt)
            shares: list[float] = []

            def restarted_s() -> float:
                engine = engines.again()
                served = [engine.ask(prompt) for prompt in held]
                num_found = sum(one.usage.store_tokens for one in served)
                shares.append(num_found / (_NUM_HELD * prompts.num_tokens))
                return median(one.ttft_s for one in served)

            yield Contest(
                detail=f"{MODEL}, {_NUM_HELD} prompts of {prompts.num_tokens} tokens in the store, "
                "a new engine in this process for each round",
                ours=restarted_s,
                baseline=lambda: _cold_s(engines.engine, prompts),
                findings=lambda: Findings(
                    lines=(f"{median(shares):.2%} of these tokens came from the store, {min(shares):.2%} at worst",),
                    figures={"hit_share": round(median(shares), 5), "least_hit_share": round(min(shares), 5)},
                ),
            )


class _Restarts:
    """One engine at a time on one store."""

    def __init__(self, folder: Path, model_dir: Path, setting: Setting, *, num_tokens: int) -> None:
        self._start = partial(TierEngine, model_dir, setting, num_tokens=num_tokens, host=True, store=folder / _STORE)
        self.engine = self._start()

    def __enter__(self) -> _Restarts:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def again(self) -> TierEngine:
        """Another engine, once the one there is has ended."""
        self.engine.settle()
        self.engine.close()
        self.engine = self._start()
        return self.engine
