"""Media rows replace placeholder rows, or nothing is touched."""

import pytest
import torch

from epd.model.embed import EmbeddingMismatchError, EmbeddingSpan, merge_embeddings

HIDDEN = torch.arange(20.0).view(10, 2)


def test_rows_are_replaced_and_the_input_is_not() -> None:
    before = HIDDEN.clone()
    spans = [EmbeddingSpan(6, 9, torch.full((3, 2), 2.0)), EmbeddingSpan(1, 3, torch.full((2, 2), 1.0).double())]
    merged = merge_embeddings(HIDDEN, spans)
    assert torch.equal(merged[1:3], torch.full((2, 2), 1.0))
    assert torch.equal(merged[6:9], torch.full((3, 2), 2.0))
    kept = [0, 3, 4, 5, 9]
    assert torch.equal(merged[kept], HIDDEN[kept])
    assert torch.equal(HIDDEN, before)


def test_gradient_reaches_both() -> None:
    hidden, rows = HIDDEN.clone().requires_grad_(), torch.ones(2, 2, requires_grad=True)
    merge_embeddings(hidden, [EmbeddingSpan(4, 6, rows)]).sum().backward()
    assert hidden.grad is not None
    assert rows.grad is not None
    assert hidden.grad[:, 0].tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert float(rows.grad.sum()) == 4.0


def test_no_spans_is_no_change() -> None:
    assert torch.equal(merge_embeddings(HIDDEN, []), HIDDEN)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([EmbeddingSpan(1, 4, torch.ones(2, 2))], r"\[1, 4\) has 3 tokens of width 2, .* shape \[2, 2\]"),
        ([EmbeddingSpan(1, 4, torch.ones(3, 5))], r"width 2, .* shape \[3, 5\]"),
        ([EmbeddingSpan(8, 11, torch.ones(3, 2))], r"\[8, 11\) is not inside \[0, 10\)"),
        ([EmbeddingSpan(-1, 1, torch.ones(2, 2))], r"\[-1, 1\) is not inside"),
        ([EmbeddingSpan(0, 3, torch.ones(3, 2)), EmbeddingSpan(2, 4, torch.ones(2, 2))], r"\[2, 4\) is not inside \[3"),
    ],
)
def test_mismatches_are_refused(spans: list[EmbeddingSpan], message: str) -> None:
    with pytest.raises(EmbeddingMismatchError, match=message):
        merge_embeddings(HIDDEN, spans)
