"""An engine with every tier, asked for one prompt at a time, whose KV can be taken away tier by tier."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cli.bench_case import BenchFailed, Setting, Stopwatch
from cli.load import BUILTIN_MODELS
from epd.config import EngineConfig
from epd.types import Role, Usage

if TYPE_CHECKING:
    from epd import EngineTrial

__all__ = ["MODEL", "PAGE_SIZE", "Prompts", "Served", "State", "TierEngine", "long_model"]

MODEL = "mimo-nano"
PAGE_SIZE = 16
_CHUNK_TOKENS = 2048
_DEVICE_BYTES = 512 << 20
_HOST_BYTES = 512 << 20
_STORE_BYTES = 512 << 20
_PATIENCE_S = 30.0
# Ids that are no marks, in every tokenizer we carry.
_IDS = range(300, 1000)

State = Literal["L1", "L2", "L3", "heal", "cold"]
"""Where a prompt's KV is when it is asked for. `heal`: on the device, with every window gone and no other tier."""


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt's answer: how long its first token took, and where its KV came from."""

    ttft_s: float
    usage: Usage


def long_model(folder: Path, num_positions: int) -> Path:
    """mimo-nano with more positions, in `folder`: its weights and all else are links. What it then says means nothing,
    and takes as long as if it did."""
    source = BUILTIN_MODELS[MODEL].resolve()
    made = folder / MODEL
    made.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (made / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = max(num_positions, config["max_position_embeddings"])
    (made / "config.json").write_text(json.dumps(config))
    return made


class Prompts:
    """Random tokens of one length, another prompt each time."""

    def __init__(self, num_tokens: int) -> None:
        self._chance = random.Random(num_tokens)
        self.num_tokens = num_tokens

    def take(self) -> list[int]:
        return self._chance.choices(_IDS, k=self.num_tokens)


class TierEngine:
    """One request at a time, in the calling thread; copies and the store have threads of their own, as in a worker."""

    def __init__(self, model_dir: Path, setting: Setting, *, num_tokens: int, host: bool, store: Path | None) -> None:
        """For prompts of `num_tokens`. `store`: the directory of a local one, which outlives the engine."""
        from epd import EngineTrial

        self._trial: EngineTrial = EngineTrial(
            EngineConfig(
                model_dir=model_dir,
                model_name=MODEL,
                role=Role.BOTH,
                threads=setting.num_threads,
                page_size=PAGE_SIZE,
                kv_budget_bytes=_DEVICE_BYTES,
                expected_sequence_tokens=num_tokens + 1,
                chunk_tokens=_CHUNK_TOKENS,
                max_running=1,
                host_budget_bytes=_HOST_BYTES if host else 0,
                kv_store=f"local:{store}" if store is not None else "",
                kv_store_memory_bytes=_STORE_BYTES,
                # It is the time that reading takes which is measured, on a busy machine too.
                prefetch_timeout_s=_PATIENCE_S,
            )
        )

    def ask(self, prompt: list[int], state: State | None = None) -> Served:
        """Time to the first token. Raises BenchFailed when the KV was not where `state` says."""
        trial = self._trial
        with Stopwatch() as watch:
            request_id = trial.submit(prompt, max_tokens=1)
            while request_id not in trial.usage:
                trial.step()
        served = Served(watch.elapsed_s, trial.usage[request_id])
        trial.finish()
        if state is not None:
            _require(state, served.usage, len(prompt))
        return served

    def settle(self) -> None:
        """Step until nothing is being copied, written to the store, or read from it."""
        self._trial.settle()

    def move_to(self, state: State) -> None:
        """Take away what was computed so far, until it is where `state` says. What is still to be saved is saved."""
        self.settle()
        if state == "heal":
            self._trial.forget("windows")
        if state in ("L2", "L3", "cold"):
            self._trial.forget("device")
        if state in ("L3", "cold"):
            self._trial.forget("host")

    def close(self) -> None:
        """Ends the engine; what its store was given is kept."""
        self._trial.close()


def _require(state: State, usage: Usage, num_tokens: int) -> None:
    """At least one token is computed, and whole pages are found; of those healed, KV was found in full layers only."""
    whole = (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    cached, host, store, healed = usage.cached_tokens, usage.host_tokens, usage.store_tokens, usage.healed_tokens
    is_right = {
        "L1": (cached, host, store, healed) == (whole, 0, 0, 0),
        "L2": (cached, host, store, healed) == (whole, whole, 0, 0),
        "L3": (cached, host, store, healed) == (whole, 0, whole, 0),
        "heal": healed > 0 and cached + healed >= whole and host == store == 0,
        "cold": cached == healed == 0,
    }[state]
    if not is_right:
        raise BenchFailed(
            f"of {num_tokens} tokens that were to be found as {state}, {cached} were cached, {host} of them on the "
            f"host and {store} in the store, and {healed} healed"
        )
