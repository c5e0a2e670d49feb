"""The workloads of `mimo bench kv`: agents at work, people in conversation, questions about documents.

All are drawn: no public trace is long or agent-like enough to stand for the first, and the two others are made again
from the statistics of published traces. What a workload may be told is the fields of its class here, each with its
meaning in configs/bench/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cli.bench_kv_bounds import Factor, Rising, Share, Span, Tokens
from cli.bench_kv_draws import Draws, LogNormal, Mixture, Pareto
from cli.bench_kv_trace import Run, Session, Trace, Turn

__all__ = ["AgentWorkload", "ConversationWorkload", "Sessions", "SyntheticWorkload", "Workload"]

Seed = Annotated[int, Span(0, 1 << 32)]
Sessions = Annotated[int, Span(1, 10_000)]
_MOST_REQUESTS = 1_000_000
"""Of a workload: hours of replay. Beyond it memory ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkload:
    seed: Seed
    num_sessions: Sessions
    session_every_s: Factor
    num_templates: Annotated[int, Span(1, 10_000)]
    template_tokens: Annotated[tuple[int, int], Rising(Span(1, 1 << 20), 2)]
    template_zipf: Annotated[float, Span(0, 10)]
    steps: Annotated[tuple[int, int], Rising(Span(1, 1000), 2)]
    context_limit: Pareto
    start_share: Annotated[tuple[float, float], Rising(Span(0, 1), 2)]
    tool_result: LogNormal
    answer: LogNormal
    most_added: Tokens
    pause: Mixture
    branch_share: Share
    compaction_share: Share
    compaction_keeps: Share

    def __post_init__(self) -> None:
        _check_size(self.num_sessions * self.steps[1], "num_sessions and steps")

    def trace(self, num_sessions: int | None = None) -> Trace:
        draws = Draws(self.seed)
        low, high = self.template_tokens
        templates = [
            Run(draws.content(), 0, round(draws.value(Pareto(low, high, 0.2)))) for _ in range(self.num_templates)
        ]
        shares = draws.ranks(self.num_templates, self.template_zipf)
        time_s, sessions = 0.0, []
        for _ in range(self.num_sessions if num_sessions is None else num_sessions):
            sessions.append(Session(time_s, self._turns(draws, templates[draws.choice(shares)])))
            time_s += self.session_every_s * draws.value(_WAITING)
        return Trace("agent", tuple(sessions))

    def _turns(self, draws: Draws, template: Run) -> tuple[Turn, ...]:
        first_step, last_step = self.steps
        num_steps = first_step + draws.below(last_step - first_step + 1)
        limit = max(round(draws.value(self.context_limit)), template.length + 2 * self.most_added)
        task = max(1, round((limit - template.length) * draws.between(*self.start_share)))
        turns: list[Turn] = []
        # Tokens at the end of each step since the last compaction: where a branch can go back to.
        ends: list[int] = []
        for step in range(num_steps):
            answer = Run(draws.content(), 0, draws.length(self.answer, self.most_added))
            if step == 0:
                kept, added = 0, [template, Run(draws.content(), 0, task)]
            else:
                kept, added = self._next(draws, template, ends, limit - answer.length)
            turns.append(Turn(draws.value(self.pause) if step else 0.0, kept, tuple(added), answer))
            ends.append(kept + sum(run.length for run in added) + answer.length)
        return tuple(turns)

    def _next(self, draws: Draws, template: Run, ends: list[int], limit: int) -> tuple[int, list[Run]]:
        """What the next prompt keeps and adds. Brings `ends` in line."""
        result = Run(draws.content(), 0, draws.length(self.tool_result, self.most_added))
        if len(ends) > 1 and draws.chance(self.branch_share):
            del ends[1 + draws.below(len(ends) - 1) :]
        if draws.chance(self.compaction_share) or ends[-1] + result.length > limit:
            summary = max(1, round((ends[-1] - template.length) * self.compaction_keeps))
            ends.clear()
            return template.length, [Run(draws.content(), 0, summary), result]
        return ends[-1], [result]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationWorkload:
    seed: Seed
    span_s: Factor
    sessions_per_s: Factor
    replayed_share: Annotated[float, Span(0, 1, above=True)]
    fano_per_minute: Annotated[float, Span(1, 1000)]
    head_tokens: Annotated[int, Span(0, 1 << 20)]
    several_turns_share: Share
    more_turns: Annotated[float, Span(0.01, 1)]
    long_share: Share
    long_turns: Pareto
    first_prompt: LogNormal
    most_prompt: Tokens
    added: Mixture
    answer: LogNormal
    most_answer: Tokens
    pause: LogNormal
    retry_share: Share

    def __post_init__(self) -> None:
        if self.long_turns.high > 1000 or self.long_turns.low < 1:
            bounds = f"low {self.long_turns.low:,} and high {self.long_turns.high:,}"
            raise ValueError(f"long_turns has {bounds}; allowed: from 1 to 1,000")
        turns = 1 + self.several_turns_share * max(self.long_share * self.long_turns.high, 1 / self.more_turns)
        _check_rate(self.span_s, self.sessions_per_s, self.replayed_share, turns)

    def trace(self, num_sessions: int | None = None, *, share: float | None = None) -> Trace:
        """`share` of the sessions, by default those that are replayed."""
        draws = Draws(self.seed)
        head = Run(draws.content(), 0, self.head_tokens)
        rate = self.sessions_per_s * (self.replayed_share if share is None else share)
        # A part of the sessions of a bursty process is less bursty.
        fano = 1 + (self.fano_per_minute - 1) * rate / self.sessions_per_s
        starts = draws.arrivals(rate, self.span_s, fano_per_minute=fano)[:num_sessions]
        sessions = tuple(Session(start_s, self._turns(draws, head, self.span_s - start_s)) for start_s in starts)
        return Trace("conversation", sessions)

    def _turns(self, draws: Draws, head: Run, span_s: float) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        ends: list[int] = []
        time_s = 0.0
        for index in range(self._num_turns(draws)):
            answer = Run(draws.content(), 0, draws.length(self.answer, self.most_answer))
            pause_s, kept = 0.0, 0
            if index == 0:
                length = draws.length(self.first_prompt, self.most_prompt)
                added = [Run(head.content, 0, min(head.length, length))]
                added += [Run(draws.content(), 0, length - head.length)] if length > head.length else []
            else:
                pause_s = draws.value(self.pause)
                time_s += pause_s
                if len(ends) > 1 and draws.chance(self.retry_share):
                    del ends[-1]
                kept = ends[-1]
                room = self.most_prompt - kept
                if room < 1:
                    break
                added = [Run(draws.content(), 0, draws.length(self.added, room))]
            # The trace ends when its time is over, whoever is still talking.
            if time_s > span_s:
                break
            turns.append(Turn(pause_s, kept, tuple(added), answer))
            ends.append(kept + sum(run.length for run in added) + answer.length)
        return tuple(turns)

    def _num_turns(self, draws: Draws) -> int:
        if not draws.chance(self.several_turns_share):
            return 1
        if draws.chance(self.long_share):
            return round(draws.value(self.long_turns))
        return 1 + draws.geometric(self.more_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    seed: Seed
    span_s: Factor
    sessions_per_s: Factor
    replayed_share: Annotated[float, Span(0, 1, above=True)]
    several_turns_share: Share
    more_turns: Annotated[float, Span(0.01, 1)]
    most_turns: Annotated[int, Span(1, 1000)]
    single_prompt: Mixture
    document: LogNormal
    most_prompt: Tokens
    known_document_share: Share
    question: LogNormal
    fresh_share: Share
    answer: LogNormal
    most_answer: Tokens
    pause: LogNormal

    def __post_init__(self) -> None:
        turns = 1 + self.several_turns_share * min(self.most_turns, 1 / self.more_turns)
        _check_rate(self.span_s, self.sessions_per_s, self.replayed_share, turns)

    def trace(self, num_sessions: int | None = None, *, share: float | None = None) -> Trace:
        """`share` of the sessions, by default those that are replayed."""
        draws = Draws(self.seed)
        rate = self.sessions_per_s * (self.replayed_share if share is None else share)
        documents: list[Run] = []
        sessions = []
        for start_s in draws.arrivals(rate, self.span_s)[:num_sessions]:
            sessions.append(Session(start_s, self._turns(draws, documents, self.span_s - start_s)))
        return Trace("synthetic", tuple(sessions))

    def _turns(self, draws: Draws, documents: list[Run], span_s: float) -> tuple[Turn, ...]:
        if not draws.chance(self.several_turns_share):
            prompt = Run(draws.content(), 0, draws.length(self.single_prompt, self.most_prompt))
            return (Turn(0.0, 0, (prompt,), self._answer(draws)),)
        if documents and draws.chance(self.known_document_share):
            document = documents[draws.below(len(documents))]
        else:
            document = Run(draws.content(), 0, draws.length(self.document, self.most_prompt))
            documents.append(document)
        turns: list[Turn] = []
        length, time_s = document.length, 0.0
        for index in range(min(self.most_turns, 1 + draws.geometric(self.more_turns))):
            pause_s = draws.value(self.pause) if index else 0.0
            time_s += pause_s
            # A fresh question is asked of the document alone, another goes on with what was said.
            kept = 0 if index == 0 else document.length if draws.chance(self.fresh_share) else length
            question = Run(draws.content(), 0, draws.length(self.question, self.most_prompt))
            if time_s > span_s or kept + question.length > self.most_prompt:
                break
            answer = self._answer(draws)
            turns.append(Turn(pause_s, kept, (question,) if index else (document, question), answer))
            length = (kept or document.length) + question.length + answer.length
        return tuple(turns)

    def _answer(self, draws: Draws) -> Run:
        return Run(draws.content(), 0, draws.length(self.answer, self.most_answer))


def _check_rate(span_s: float, sessions_per_s: float, share: float, turns: float) -> None:
    """Raises ValueError when there are too many requests, or hardly any."""
    num_sessions = span_s * sessions_per_s * share
    if num_sessions < 1:
        raise ValueError(
            f"span_s, sessions_per_s and replayed_share make {num_sessions:.2g} sessions; allowed: at least 1"
        )
    _check_size(num_sessions * turns, "span_s, sessions_per_s, replayed_share and turns")


def _check_size(num_requests: float, names: str) -> None:
    if num_requests > _MOST_REQUESTS:
        raise ValueError(f"{names} make {num_requests:,.0f} requests; allowed: up to {_MOST_REQUESTS:,}")


Workload = AgentWorkload | ConversationWorkload | SyntheticWorkload

# Between two sessions: as with a Poisson process, roughly, and never far from its mean of 1.
_WAITING = LogNormal(-0.125, 0.5)
