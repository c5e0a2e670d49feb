"""What an answer may go on with: grammars compiled beside the loop, and for each running answer where it stands in its
own.

    SampleRow.answer (all tokens so far) --> AnswerState: kept from the step before, rolled back or replayed to fit
                                             |-- LLMatcher: mask of the tokens that may come next
                                             '-- counts of its tokens, for penalties

A state is a function of the tokens: whatever happened since it was last used (drafts that were wrong, a step undone, a
retraction, another worker), `advance_to` makes it fit, and one that was thrown away is made anew. V vocabulary.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from torch.nn.functional import pad

from epd.engine.penalties import biased, penalised, without
from epd.token_table import TokenTable, compile_grammar
from epd.types import SamplingParams

logger = logging.getLogger(__name__)

_MAX_COMPILED = 64
# Sets of end tokens: one for each kind of gateway there is.
_MAX_TOKENIZERS = 4


class GrammarFailed(Exception):
    """The answer cannot go on in its grammar: it does not compile, or its parser met a limit."""


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """Everything before a token that is to be sampled. The answer is the last `num_emitted` of `prompt`, written by
    earlier attempts, and `generated`."""

    request_id: str
    prompt: tuple[int, ...]
    num_emitted: int
    generated: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the answer."""
        return (*self.prompt[len(self.prompt) - self.num_emitted :], *self.generated)

    @property
    def question(self) -> tuple[int, ...]:
        return self.prompt[: len(self.prompt) - self.num_emitted]


class Grammars:
    """Compiled grammars by their text, the last used ones. A matcher made of one shares what was computed for it.

    All that takes time is done on a thread of its own, from the vocabulary on.
    """

    def __init__(self, load_table: Callable[[], TokenTable], eos_token_ids: Collection[int]) -> None:
        """`load_table` reads the model's vocabulary; where it raises ValueError or OSError there are no grammars."""
        self._eos_token_ids = frozenset(eos_token_ids)
        # One thread: it competes with the steps.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        # Only that thread touches these two.
        self._table = cache(load_table)
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], Future[LLMatcher]] = OrderedDict()

    def begin(self, sampling: SamplingParams) -> Future[LLMatcher]:
        """Start to compile, so that it is done by the time the prompt is. Cheap where it was done before."""
        assert sampling.grammar is not None
        key = (sampling.grammar, sampling.stop_token_ids)
        if key not in self._compiled:
            self._compiled[key] = self._pool.submit(self._compile, sampling.grammar, sampling.stop_token_ids)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def matcher(self, sampling: SamplingParams) -> LLMatcher:
        """At the beginning of the grammar, for one answer. Raises GrammarFailed."""
        try:
            return self.begin(sampling).result().deep_copy()
        except (ValueError, OSError) as error:
            raise GrammarFailed(f"the grammar does not compile: {error}") from error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str, stop_token_ids: tuple[int, ...]) -> LLMatcher:
        table = self._table()
        # What ends the answer. A stop that is text is no end: a grammar could not have it inside.
        ends = self._eos_token_ids | (table.special_ids & frozenset(stop_token_ids))
        if ends not in self._tokenizers:
            if len(self._tokenizers) >= _MAX_TOKENIZERS:
                self._tokenizers.clear()
            self._tokenizers[ends] = table.tokenizer(ends)
        return compile_grammar(grammar, self._tokenizers[ends])


class AnswerState:
    """Where one answer stands. Tokens are pushed as they are sampled; `advance_to` is for what happened in between."""

    def __init__(self, grammars: Grammars, sampling: SamplingParams, question: Sequence[int]) -> None:
        self._grammars = grammars
        self.sampling = sampling
        self._tokens: list[int] = []
        self._counts: Counter[int] = Counter()
        # Of the question, each token once.
        self._question = torch.tensor(
            sorted(set(question)) if sampling.repetition_penalty != 1 else [], dtype=torch.int64
        )
        self._matcher = None if sampling.grammar is None else grammars.matcher(sampling)

    def advance_to(self, token_ids: Sequence[int]) -> None:
        """These are the answer's tokens. Raises GrammarFailed where they are none of the grammar's."""
        kept = _num_shared(self._tokens, token_ids)
        self._roll_back(len(self._tokens) - kept)
        for token_id in token_ids[kept:]:
            self.push(token_id)

    def push(self, token_id: int) -> None:
        """Raises GrammarFailed for a token that cannot come next."""
        if self._matcher is not None and not self._matcher.consume_token(token_id):
            raise GrammarFailed(_why(self._matcher))
        self._tokens.append(token_id)
        self._counts[token_id] += 1

    def odds(self, logits_V: Tensor, index: int, end_token_ids: Collection[int]) -> Tensor:
        """Logits to draw output position `index` from. Raises GrammarFailed."""
        sampling = self.sampling
        if sampling.has_penalties:
            logits_V = penalised(logits_V, sampling, self._counts, self._question)
        goes_on = index < sampling.min_tokens
        if self._matcher is not None:
            goes_on |= sampling.ignore_eos
            logits_V = logits_V.masked_fill(~_mask(self._matcher, logits_V), float("-inf"))
        # Of what the grammar allows: where that is only the end, the answer ends.
        return without(logits_V, end_token_ids) if goes_on else logits_V

    def _roll_back(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        kept = self._tokens[: len(self._tokens) - num_tokens]
        self._counts.subtract(self._tokens[len(kept) :])
        self._counts += Counter()
        self._tokens = kept
        if self._matcher is not None and (self._matcher.is_error() or not self._matcher.rollback(num_tokens)):
            self._matcher = self._grammars.matcher(self.sampling)
            if not self._matcher.consume_tokens(kept):
                raise GrammarFailed(_why(self._matcher))


class Answers:
    """States of the answers that were sampled last, by request. One that is needed again is made from its tokens."""

    def __init__(self, grammars: Grammars, eos_token_ids: Collection[int], *, max_states: int) -> None:
        self._grammars = grammars
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_states = max_states
        self._states: OrderedDict[str, AnswerState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def close(self) -> None:
        self._grammars.close()

    def state(self, sampling: SamplingParams, answer: AnswerSoFar) -> AnswerState:
        """Of this answer as it is now. Raises GrammarFailed, and forgets what it had."""
        state = self._states.pop(answer.request_id, None)
        if state is None or state.sampling != sampling:
            state = AnswerState(self._grammars, sampling, answer.question)
        state.advance_to(answer.token_ids)
        self._states[answer.request_id] = state
        if len(self._states) > self._max_states:
            self._states.popitem(last=False)
        return state

    def odds(self, logits_V: Tensor, sampling: SamplingParams, index: int, state: AnswerState | None) -> Tensor:
        """Logits to draw from; `state` is None for an answer whose tokens do not matter. Raises GrammarFailed."""
        ends = self._eos_token_ids.union(sampling.stop_token_ids)
        if sampling.logit_bias:
            logits_V = biased(logits_V, sampling.logit_bias)
        if state is not None:
            return state.odds(logits_V, index, ends)
        return without(logits_V, ends) if index < sampling.min_tokens else logits_V


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    length = min(len(first), len(second))
    if list(first[:length]) == list(second[:length]):
        return length
    return next(i for i in range(length) if first[i] != second[i])


def _mask(matcher: LLMatcher, logits_V: Tensor) -> Tensor:
    """[V] bool, which tokens may come next. Raises GrammarFailed where none may."""
    packed = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarFailed(_why(matcher))
    if not any(packed):
        raise GrammarFailed("no token can go on with the answer")
    # Packed to the device, where it is an eighth of the size; there is no kernel for bits, on the CPU there is.
    packed_B = np.frombuffer(packed, dtype=np.uint8)
    if logits_V.device.type == "cpu":
        known_V = torch.from_numpy(np.unpackbits(packed_B, bitorder="little").view(np.bool_))
    else:
        bytes_B = torch.from_numpy(packed_B.copy()).to(logits_V.device)
        bits = torch.arange(8, dtype=torch.uint8, device=logits_V.device)
        known_V = ((bytes_B[:, None] >> bits) & 1).flatten().bool()
    num_ids = len(logits_V)
    # Of a vocabulary padded beyond the tokenizer: the rest is no tokens.
    return known_V[:num_ids] if len(known_V) >= num_ids else pad(known_V, (0, num_ids - len(known_V)))


def _why(matcher: LLMatcher) -> str:
    reason = matcher.get_error().strip().splitlines()
    return reason[0] if reason else f"the parser stopped: {matcher.stop_reason()}"
