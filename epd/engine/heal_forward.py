"""Healing on the model: the trapezoid of heal_rows.py as one forward over the healing sequences of a step.

Shape letters: T rows that the layers at hand run; D hidden width.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from epd.engine.heal_rows import first_rows
from epd.engine.plan import SequenceStep
from epd.kernels.base import AttentionBackend, PagedSequence
from epd.model.hybrid import HybridModel


def heal_windows(
    model: HybridModel,
    hidden_TD: Tensor,
    steps: Sequence[SequenceStep],
    attention: AttentionBackend,
    *,
    page_size: int,
) -> list[bool]:
    """Write the window keys and values of the steps' tokens in every layer where they matter, and nothing else.

    `hidden_TD` holds the steps' embeddings one after the other. Returns for each step whether what its last token was
    computed to, in the last layer it took part in, is finite.
    """
    reaches = [layer.window_left for layer in model.config.layers]
    rows = [first_rows(reaches, _heal_stop(step), page_size=page_size) for step in steps]
    starts = [step.start for step in steps]
    is_finite: dict[int, Tensor] = {}
    for firsts, group in groupby(range(len(rows[0])), key=lambda index: tuple(row[index] for row in rows)):
        layers = list(group)
        taking_part = [i for i, step in enumerate(steps) if max(firsts[i], step.start) < step.stop]
        if not taking_part:
            break
        hidden_TD = _keep(hidden_TD, steps, starts, firsts)
        starts = [max(start, min(first, step.stop)) for start, first, step in zip(starts, firsts, steps, strict=True)]
        positions_T = torch.cat([torch.arange(starts[i], steps[i].stop) for i in taking_part]).to(hidden_TD.device)
        paged = [_paged(steps[i], starts[i], firsts[i], page_size, hidden_TD.device) for i in taking_part]
        hidden_TD = model.run_layers(range(layers[0], layers[-1] + 1), hidden_TD, positions_T, attention.context(paged))
        ends = torch.tensor([steps[i].stop - starts[i] for i in taking_part], device=hidden_TD.device).cumsum(0) - 1
        is_finite.update(zip(taking_part, torch.isfinite(hidden_TD[ends]).all(dim=-1), strict=True))
    return torch.stack([is_finite[i] for i in range(len(steps))]).tolist()


def _keep(hidden_TD: Tensor, steps: Sequence[SequenceStep], starts: Sequence[int], firsts: Sequence[int]) -> Tensor:
    """The rows from `firsts` on, of rows that begin at `starts`."""
    kept, row = [], 0
    for step, start, first in zip(steps, starts, firsts, strict=True):
        num_rows = step.stop - start
        kept.append(hidden_TD[row + min(max(0, first - start), num_rows) : row + num_rows])
        row += num_rows
    return hidden_TD if sum(len(part) for part in kept) == row else torch.cat(kept)


def _paged(step: SequenceStep, start: int, first: int, page_size: int, device: torch.device) -> PagedSequence:
    """The step's rows from `start` on. In these layers windows begin at position `first`, or later if let go of."""
    window_start = max(step.pages.window_start, first // page_size)
    window_pages = step.pages.window_pages[window_start - step.pages.window_start :]
    return PagedSequence(
        num_new=step.stop - start,
        num_context=start,
        full_pages=torch.tensor(step.pages.full_pages, dtype=torch.int64, device=device),
        window_pages=torch.tensor(window_pages, dtype=torch.int64, device=device),
        window_start_page=window_start,
        write_full=False,
    )


def _heal_stop(step: SequenceStep) -> int:
    assert step.heal_stop is not None
    return step.heal_stop
