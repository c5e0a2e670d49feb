"""Media embeddings into the rows of their placeholder tokens.

Shape letters: T tokens of the forward, D hidden width, R rows of one piece of media.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


class EmbeddingMismatchError(ValueError):
    """A span and its embedding rows, or two spans, do not fit. Nothing was written."""


@dataclass(frozen=True, slots=True)
class EmbeddingSpan:
    """Rows [start, stop) of the forward take `rows` [R, D]; R must be stop - start. Any float dtype, any device."""

    start: int
    stop: int
    rows: Tensor


def merge_embeddings(hidden_TD: Tensor, spans: Sequence[EmbeddingSpan]) -> Tensor:
    """Return a copy of token embeddings [T, D] with the spans' rows in place of those of the placeholders.

    The rows are cast to the dtype and device of `hidden_TD`. Raises EmbeddingMismatchError, with both counts, before
    anything is written.
    """
    num_tokens, width = hidden_TD.shape
    free_from = 0
    for span in sorted(spans, key=lambda s: s.start):
        if not free_from <= span.start <= span.stop <= num_tokens:
            raise EmbeddingMismatchError(
                f"span [{span.start}, {span.stop}) is not inside [{free_from}, {num_tokens}), the tokens left"
            )
        if tuple(span.rows.shape) != (span.stop - span.start, width):
            raise EmbeddingMismatchError(
                f"span [{span.start}, {span.stop}) has {span.stop - span.start} tokens of width {width}, "
                f"its embedding has shape {list(span.rows.shape)}"
            )
        free_from = span.stop
    if not spans:
        return hidden_TD
    merged_TD = hidden_TD.clone()
    for span in spans:
        merged_TD[span.start : span.stop] = span.rows.to(merged_TD)
    return merged_TD
