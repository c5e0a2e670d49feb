"""Logits to tokens. A row's draw depends on its own logits, its seed and its output position, never on its batch.

Shape letters: S sequences that need a token, V vocabulary.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from epd.engine.grammar import Answers, AnswerSoFar, AnswerState, GrammarFailed
from epd.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row is sampled for: output position `index` of the whole answer. `answer` is there if
    `sampling.looks_back`."""

    sampling: SamplingParams
    index: int
    answer: AnswerSoFar | None = None


@dataclass(frozen=True, slots=True)
class DraftChain:
    """A row, and what was guessed to come after it: draft i is right if it is what row `index + i` is sampled as."""

    row: SampleRow
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None


def sample(
    logits_SV: Tensor, rows: Sequence[SampleRow], *, num_token_ids: int | None = None, answers: Answers | None = None
) -> list[SampledToken | None]:
    """One token per row of fp32 logits; None where a row holds a NaN or an infinity: that would be noise.

    `num_token_ids` is what the tokenizer knows: rows of a padded vocabulary beyond it are no tokens, neither to be
    drawn nor to take part in a probability. `answers` is needed for rows that are not drawn as the model would have it.
    Raises GrammarFailed.
    """
    if not rows:
        return []
    table = _Logits(logits_SV[:, :num_token_ids], answers)
    return [table.token(position, row, table.state(row)) for position, row in enumerate(rows)]


def sample_chains(
    logits_SV: Tensor,
    chains: Sequence[DraftChain],
    *,
    num_token_ids: int | None = None,
    answers: Answers | None = None,
) -> list[tuple[SampledToken, ...] | GrammarFailed]:
    """The tokens of every chain: drafts that were right, and one more. None at all where its first row is not finite,
    and the reason where its grammar has no token for it.

    Each chain owns one row and one for each draft. A row is sampled as `sample` would, and only while every draft
    before it is what was sampled: so the tokens are those of sampling one at a time, whatever the drafts are.
    """
    if not chains:
        return []
    table, first, sampled = _Logits(logits_SV[:, :num_token_ids], answers), 0, []
    for chain in chains:
        sampled.append(table.chain(first, chain))
        first += 1 + len(chain.drafts)
    return sampled


class _Logits:
    """Rows of one forward: what is asked of all of them in one go, and the rest row by row."""

    def __init__(self, logits_SV: Tensor, answers: Answers | None) -> None:
        self._logits_SV = logits_SV
        self._answers = answers
        self._finite = torch.isfinite(logits_SV).all(dim=-1).tolist()
        self._greedy = logits_SV.argmax(dim=-1).tolist()

    def state(self, row: SampleRow) -> AnswerState | None:
        """Raises GrammarFailed."""
        if not row.sampling.looks_back:
            return None
        assert self._answers is not None, "a row looks back, and nobody keeps answers"
        assert row.answer is not None, "a row looks back, and does not know its answer"
        return self._answers.state(row.sampling, row.answer)

    def chain(self, first: int, chain: DraftChain) -> tuple[SampledToken, ...] | GrammarFailed:
        tokens: list[SampledToken] = []
        try:
            state = self.state(chain.row)
            # After the last draft comes a token that nothing was guessed for.
            for number, draft in enumerate((*chain.drafts, None)):
                token = self.token(first + number, SampleRow(chain.row.sampling, chain.row.index + number), state)
                if token is None:
                    # The next step begins here, and fails if it still is not finite without a wrong draft beside it.
                    break
                tokens.append(token)
                if token.token_id != draft:
                    break
                if state is not None:
                    state.push(token.token_id)
        except GrammarFailed as error:
            # With tokens to give the next step begins after them, and fails.
            return tuple(tokens) or error
        return tuple(tokens)

    def token(self, position: int, row: SampleRow, state: AnswerState | None) -> SampledToken | None:
        """Raises GrammarFailed."""
        if not self._finite[position]:
            return None
        logits_V = odds_V = self._logits_SV[position]
        greedy = self._greedy[position]
        if row.sampling.changes_odds:
            assert self._answers is not None, "a row has other odds, and nobody knows them"
            odds_V = self._answers.odds(logits_V, row.sampling, row.index, state)
            greedy = int(odds_V.argmax())
        token_id = greedy if row.sampling.temperature == 0 else _draw(odds_V, row)
        return SampledToken(token_id, _logprob(logits_V, token_id, row.sampling.top_logprobs))


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) fixed by the seed and the output position: the generator a retry can repeat."""
    counter = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index)
    return (xxhash.xxh3_64_intdigest(counter) >> 11) * 2.0**-53


def _draw(logits_V: Tensor, row: SampleRow) -> int:
    """Inverse transform over the tokens that min_p, top_k and then top_p leave, most probable first.

    min_p keeps tokens at least so probable in relation to the most probable one. top_p keeps the shortest run of most
    probable tokens whose mass reaches it; the most probable one always stays.
    """
    sampling = row.sampling
    num_kept = logits_V.shape[0] if sampling.top_k is None else min(sampling.top_k, logits_V.shape[0])
    top_V, ids_V = torch.topk(logits_V, num_kept) if num_kept < logits_V.shape[0] else logits_V.sort(descending=True)
    share_V = torch.softmax(top_V.double() / sampling.temperature, dim=-1)
    if sampling.min_p > 0:
        # They are in order; what is left out takes no part in what top_p counts.
        num_likely = int((share_V >= sampling.min_p * share_V[0]).sum())
        share_V = share_V[:num_likely] / share_V[:num_likely].sum()
    mass_V = share_V.cumsum(dim=-1)
    if sampling.top_p < 1.0:
        # The first position whose cumulative mass reaches top_p is the last one kept.
        last = int(torch.searchsorted(mass_V, torch.tensor(sampling.top_p, dtype=mass_V.dtype, device=mass_V.device)))
        mass_V = mass_V[: last + 1]
    target = mass_V[-1] * uniform(sampling.seed, row.index)
    chosen = int(torch.searchsorted(mass_V, target, right=True))
    return int(ids_V[min(chosen, mass_V.shape[0] - 1)])


def _logprob(logits_V: Tensor, token_id: int, num_top: int | None) -> TokenLogprob | None:
    """Log-probabilities of the model itself, before temperature and cuts."""
    if num_top is None:
        return None
    logprob_V = torch.log_softmax(logits_V, dim=-1)
    values, ids = torch.topk(logprob_V, min(num_top, logprob_V.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id=token_id, logprob=float(logprob_V[token_id]), top=top)
