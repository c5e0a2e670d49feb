"""Draft heads beside the trunk: they write their window rows for every token, and guess the next tokens.

Row t of head k takes the trunk's normed hidden state of token t and the embedding of token t + 1 + k, and guesses token
t + 2 + k. So the last rows of a step need tokens that come after it:

    inside a prompt      known: the step brings them along (`DraftInput.ahead`)
    at its end           the sampled token, then guesses: head k takes what the heads before it guessed
    nothing known        the last known token again, where nobody wants guesses

Rows that took a wrong guess are written once more by the next step, when the tokens are known; what that needs, the
embedding and hidden state of the last `num_heads - 1` tokens, is the `DraftTail`. While nobody wants guesses, because
too many sequences decode, the tail also gathers what the rows of decoded tokens need, and a page of them is written at
once.

Whatever the rows hold, only guesses depend on it, and every guess is checked by the trunk. So the rows are never a
reason not to use a page. Those at a page's end depend on tokens of the page behind it: of a shared page they may be
those of another continuation, or written anew by it while others read. Healing does not run the layers above the last
window layer, so there are no rows of tokens that were healed: their pages hold zeros, which a head sees and learns
nothing from. All that costs is acceptance, for a window's length at most.

Shape letters: T tokens of the trunk's forward; E rows of embeddings: T and those of known tokens after them; R rows of
the heads; S sequences that sample; G guesses; D hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epd.engine.plan import DraftTail, SequenceStep
from epd.kernels.base import AttentionBackend, KvStorage, PagedSequence
from epd.model.hybrid import HybridModel

# A sequence's pages for a forward over tokens [start, stop).
PagesOf = Callable[[SequenceStep, int, int], PagedSequence]


@dataclass(frozen=True, slots=True)
class HeadRun:
    """A step whose tokens have been computed and checked.

    Rows `[first, first + num_rows)` of the forward are its tokens, drafts that were wrong left out. `next_id` is the
    token after them if one was sampled, else the step's `ahead` begins at row `ahead_first` of the embeddings.
    """

    step: SequenceStep
    first: int
    num_rows: int
    next_id: int | None
    ahead_first: int

    @property
    def num_known(self) -> int:
        """Tokens known after those of the run."""
        return len(self.step.draft.ahead) if self.next_id is None else 1


class DraftHeads:
    """The first `num_heads` heads of a model."""

    def __init__(
        self,
        model: HybridModel,
        storage: KvStorage,
        pages_of: PagesOf,
        *,
        num_heads: int,
        page_size: int,
        num_token_ids: int | None,
    ) -> None:
        self._model = model
        self._pages_of = pages_of
        self._num_heads = num_heads
        self._page_size = page_size
        self._num_token_ids = num_token_ids
        self._storage = storage
        self._layers = [model.config.mtp_layer(k).index for k in range(num_heads)]
        self._window_left = model.config.mtp_layer(0).window_left or 0
        for layer in self._layers:
            # A row that was never written may be read: it must be a number.
            storage.keys(layer).zero_()
            storage.values(layer).zero_()

    def run(
        self,
        embed_ED: Tensor,
        hidden_TD: Tensor,
        runs: Sequence[HeadRun],
        attention: AttentionBackend,
        *,
        num_drafts: int,
    ) -> list[DraftTail]:
        """Write the runs' rows of every head; guess up to `num_drafts` tokens for those that sampled one."""
        waits = [run.next_id is not None and run.num_rows == 1 for run in runs]
        # Of a token that was decoded the tail keeps what its rows need, up to a page: for as long a sequence holds the
        # windows that they read. Once one tail is full all are written: a forward costs more than its rows.
        is_due = any(wait and _num_tail_rows(run) >= self._page_size for run, wait in zip(runs, waits, strict=True))
        if num_drafts or is_due:
            return self._write(embed_ED, hidden_TD, runs, attention, num_drafts=num_drafts)
        writing = [run for run, wait in zip(runs, waits, strict=True) if not wait]
        written = iter(self._write(embed_ED, hidden_TD, writing, attention, num_drafts=0) if writing else ())
        return [
            _longer_tail(run, embed_ED, hidden_TD) if wait else next(written)
            for run, wait in zip(runs, waits, strict=True)
        ]

    def _write(
        self,
        embed_ED: Tensor,
        hidden_TD: Tensor,
        runs: Sequence[HeadRun],
        attention: AttentionBackend,
        *,
        num_drafts: int,
    ) -> list[DraftTail]:
        rows = _HeadRows(self._model, embed_ED, hidden_TD, runs, num_heads=self._num_heads)
        for run in runs:
            rows.add(run, self._num_kept(run))
        spans = [
            (run.step.start - kept, run.step.start + run.num_rows) for run, kept in zip(runs, rows.kept, strict=True)
        ]
        positions_R = torch.cat([torch.arange(start, stop) for start, stop in spans]).to(hidden_TD.device)
        context = attention.context(
            [self._pages_of(run.step, start, stop) for run, (start, stop) in zip(runs, spans, strict=True)]
        )
        hidden_RD = rows.hidden()
        guesses: list[Tensor] = []
        for k in range(self._num_heads):
            out_RD = self._model.draft(k, rows.embedded(k), hidden_RD, positions_R, context)
            if k < num_drafts and rows.sampled_rows:
                logits_SV = self._model.logits(out_RD[rows.index(rows.sampled_rows)])
                guesses.append(logits_SV[:, : self._num_token_ids].argmax(dim=-1))
                rows.put_guesses(k, guesses[-1])
        guessed = torch.stack(guesses, dim=1).tolist() if guesses else [()] * len(rows.sampled_rows)
        return rows.tails(guessed)

    def blank(self, window_pages: Sequence[int]) -> None:
        """Say of whole pages that there are no rows."""
        index = torch.tensor(window_pages, dtype=torch.int64, device=self._storage.keys(self._layers[0]).device)
        for layer in self._layers:
            self._storage.keys(layer)[index] = 0
            self._storage.values(layer)[index] = 0

    def _num_kept(self, run: HeadRun) -> int:
        """Rows before the run to be written again, as far back as the sequence still has the windows they read."""
        step, tail = run.step, run.step.draft.tail
        num_right = run.num_rows - len(step.token_ids)
        if tail is None or (tail.guesses and num_right >= self._num_heads - 1):
            # What the rows took for granted was right.
            return 0
        num_kept = len(tail.hidden)
        while (
            num_kept and max(0, step.start - num_kept - self._window_left) < step.pages.window_start * self._page_size
        ):
            num_kept -= 1
        return num_kept


def _num_tail_rows(run: HeadRun) -> int:
    tail = run.step.draft.tail
    return 0 if tail is None else len(tail.hidden)


def _longer_tail(run: HeadRun, embed_ED: Tensor, hidden_TD: Tensor) -> DraftTail:
    """The run's tail and its own rows, none of which is written."""
    tail, stop = run.step.draft.tail, run.first + run.num_rows
    embeds, hidden = embed_ED[run.first : stop], hidden_TD[run.first : stop]
    if tail is not None:
        embeds, hidden = torch.cat([tail.embeds.to(embeds), embeds]), torch.cat([tail.hidden.to(hidden), hidden])
    # Not a view: it would keep the rows of all sequences.
    return DraftTail(run.step.start + run.num_rows, (), embeds.clone(), hidden.clone())


class _HeadRows:
    """Where the heads' inputs come from: row numbers into one tensor of embeddings and one of hidden states.

    Embeddings: those of the forward, then those of the tails, of the sampled tokens, and of the guesses of each head.
    """

    def __init__(
        self, model: HybridModel, embed_ED: Tensor, hidden_TD: Tensor, runs: Sequence[HeadRun], *, num_heads: int
    ) -> None:
        self._model = model
        self._runs = runs
        self._num_heads = num_heads
        tails = [run.step.draft.tail for run in runs]
        held = [tail for tail in tails if tail is not None]
        next_ids = [run.next_id for run in runs if run.next_id is not None]
        self._num_sampled = len(next_ids)
        self._tail_rows = _starts([0 if tail is None else len(tail.hidden) for tail in tails])
        num_tail_rows = sum(len(tail.hidden) for tail in held)
        self._device = hidden_TD.device
        self._hidden = torch.cat([hidden_TD, *(tail.hidden.to(hidden_TD) for tail in held)])
        self._num_hidden = len(hidden_TD)
        self._embed_tails = len(embed_ED)
        self._embed_sampled = self._embed_tails + num_tail_rows
        self._embed_guesses = self._embed_sampled + self._num_sampled
        guessed = embed_ED.new_zeros(self._num_sampled * (num_heads - 1), embed_ED.shape[1])
        self._embed = torch.cat(
            [embed_ED, *(tail.embeds.to(embed_ED) for tail in held), model.embed(self.index(next_ids)), guessed]
        )
        self._num_guessed = 0
        self.kept: list[int] = []
        self.sampled_rows: list[int] = []
        self._hidden_rows: list[list[int]] = []
        self._embed_rows: list[list[int]] = []

    def add(self, run: HeadRun, num_kept: int) -> None:
        """The next run, with the last `num_kept` rows of its tail before it."""
        tail, new = run.step.draft.tail, range(run.first, run.first + run.num_rows)
        tail_stop = self._tail_rows[len(self.kept)] + (0 if tail is None else len(tail.hidden))
        kept = range(tail_stop - num_kept, tail_stop)
        self._hidden_rows.append([*(self._num_hidden + row for row in kept), *new])
        self._embed_rows.append([*(self._embed_tails + row for row in kept), *new])
        self.kept.append(num_kept)
        if run.next_id is not None:
            self.sampled_rows.append(sum(len(rows) for rows in self._hidden_rows) - 1)

    def index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def hidden(self) -> Tensor:
        """[R, D] for every head."""
        return self._hidden[self.index([row for rows in self._hidden_rows for row in rows])]

    def embedded(self, k: int) -> Tensor:
        """[R, D] for head k: each row's token is k + 1 further on."""
        taken: list[int] = []
        number = 0
        for run, rows in zip(self._runs, self._embed_rows, strict=True):
            if run.next_id is None:
                behind = [run.ahead_first + i for i in range(run.num_known)]
            else:
                guesses = [self._embed_guesses + j * self._num_sampled + number for j in range(self._num_guessed)]
                behind = [self._embed_sampled + number, *guesses]
                number += 1
            strip = [*rows, *behind, *([behind[-1]] * self._num_heads)]
            taken += strip[k + 1 : k + 1 + len(rows)]
        return self._embed[self.index(taken)]

    def put_guesses(self, k: int, ids_S: Tensor) -> None:
        """What head k guessed, for the heads after it."""
        if k + 1 < self._num_heads:
            first = self._embed_guesses + k * self._num_sampled
            self._embed[first : first + self._num_sampled] = self._model.embed(ids_S)
            self._num_guessed = k + 1

    def tails(self, guessed: Sequence[Sequence[int]]) -> list[DraftTail]:
        """Of each run; `guessed` for those that sampled, in order."""
        tails, guesses = [], iter(guessed)
        for run, embed_rows, hidden_rows in zip(self._runs, self._embed_rows, self._hidden_rows, strict=True):
            num_kept = min(max(0, self._num_heads - run.num_known), len(hidden_rows))
            first = len(hidden_rows) - num_kept
            tails.append(
                DraftTail(
                    num_tokens=run.step.start + run.num_rows,
                    guesses=() if run.next_id is None else tuple(next(guesses)),
                    embeds=self._embed[self.index(embed_rows[first:])],
                    hidden=self._hidden[self.index(hidden_rows[first:])],
                )
            )
        return tails


def _starts(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts
