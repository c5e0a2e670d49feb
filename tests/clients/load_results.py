"""What public load tools write down of a run, read: requests, errors, tokens, times.

Each tool has its own file; the readers fail loudly when a tool says something else than it did in the version that is
installed here, so that a changed format is no silent success.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ResultUnreadable(Exception):
    """There is no result file, or it has another shape than the tool's version should write."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run, as the tool itself saw it. Times are means: one is 0 where a busy client reads an answer at once."""

    num_completed: int
    num_errors: int
    prompt_tokens: int
    """All prompts together, by the server's usage."""
    completion_tokens: int
    ttft_s: float
    inter_token_s: float

    def problems(self, num_asked: int, *, may_ask_more: bool = False) -> list[str]:
        """What is wrong with the run, in words; empty when nothing is."""
        found = []
        if self.num_errors:
            found.append(f"{self.num_errors} requests failed")
        if self.num_completed < num_asked:
            found.append(f"{self.num_completed} of {num_asked} requests completed")
        if self.num_completed > num_asked and not may_ask_more:
            found.append(f"{self.num_completed} requests completed, {num_asked} were asked for")
        if self.prompt_tokens <= 0:
            found.append("no prompt tokens were counted: the usage is missing")
        if self.completion_tokens < self.num_completed:
            found.append(f"{self.completion_tokens} tokens in {self.num_completed} answers")
        if self.ttft_s <= 0:
            found.append(f"a time to first token of {self.ttft_s} s")
        if self.inter_token_s <= 0:
            found.append(f"a time between tokens of {self.inter_token_s} s: nothing was streamed")
        return found


def read_aiperf(directory: Path) -> Result:
    run = _load(_only(directory, "profile_export_aiperf.json"))
    errors = sum(entry["count"] for entry in run["error_summary"])
    if run["was_cancelled"] or not run["is_complete"]:
        errors = max(errors, 1)
    return Result(
        num_completed=int(run["request_count"]["avg"]) if "request_count" in run else 0,
        num_errors=errors,
        prompt_tokens=int(run["total_usage_prompt_tokens"]["avg"]),
        completion_tokens=int(run["total_usage_completion_tokens"]["avg"]),
        ttft_s=run["time_to_first_token"]["avg"] / 1000,
        inter_token_s=run["inter_token_latency"]["avg"] / 1000,
    )


def read_guidellm(directory: Path) -> Result:
    (run,) = _load(_only(directory, "guidellm.json"))["benchmarks"]
    metrics = run["metrics"]
    totals = metrics["request_totals"]

    def successful(name: str) -> Any:
        return metrics[name]["successful"]

    return Result(
        num_completed=totals["successful"],
        # A request that was under way when the count was reached is no error of the server; none should be, here.
        num_errors=totals["errored"] + totals["incomplete"],
        prompt_tokens=int(successful("prompt_token_count")["total_sum"]),
        completion_tokens=int(successful("output_token_count")["total_sum"]),
        ttft_s=successful("time_to_first_token_ms")["mean"] / 1000,
        inter_token_s=successful("inter_token_latency_ms")["mean"] / 1000,
    )


def read_genai_bench(directory: Path) -> Result:
    run = _load(_only(directory, "*_num_concurrency_*.json"))["aggregated_metrics"]
    stats = run["stats"]
    return Result(
        num_completed=run["num_completed_requests"],
        num_errors=run["num_error_requests"],
        prompt_tokens=int(stats["num_input_tokens"]["sum"]),
        completion_tokens=int(stats["num_output_tokens"]["sum"]),
        ttft_s=stats["ttft"]["mean"],
        inter_token_s=stats["tpot"]["mean"],
    )


def read_vllm(directory: Path) -> Result:
    run = _load(_only(directory, "vllm.json"))
    return Result(
        num_completed=run["completed"],
        num_errors=run["failed"],
        prompt_tokens=run["total_input_tokens"],
        completion_tokens=run["total_output_tokens"],
        ttft_s=run["mean_ttft_ms"] / 1000,
        inter_token_s=run["mean_itl_ms"] / 1000,
    )


READERS: dict[str, Callable[[Path], Result]] = {
    "aiperf": read_aiperf,
    "guidellm": read_guidellm,
    "genai-bench": read_genai_bench,
    "vllm": read_vllm,
}


def read(tool: str, directory: Path) -> Result:
    """Raises ResultUnreadable."""
    try:
        return READERS[tool](directory)
    except (KeyError, TypeError, ValueError) as error:
        raise ResultUnreadable(f"{tool} wrote something else than expected in {directory}: {error!r}") from error


def _only(directory: Path, pattern: str) -> Path:
    """The one file of that name below the directory."""
    found = sorted(directory.rglob(pattern))
    if len(found) != 1:
        raise ResultUnreadable(f"{len(found)} files {pattern} below {directory}; one was expected")
    return found[0]


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
