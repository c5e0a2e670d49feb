"""When a process that has drained may go: all that was said has been read."""

from encoder.parting import Partings


def test_over_once_the_last_word_was_answered() -> None:
    partings: Partings[str] = Partings()
    assert partings.is_over
    partings.spoke("a")
    partings.spoke("b")
    due = dict(partings.take_due())
    assert set(due) == {"a", "b"}
    assert partings.take_due() == []
    partings.answered("a", due["a"])
    assert not partings.is_over
    partings.forget("b")
    assert partings.is_over
    partings.answered("b", due["b"])
    assert partings.is_over


def test_a_goodbye_to_an_earlier_farewell_proves_nothing() -> None:
    partings: Partings[str] = Partings()
    partings.spoke("a")
    [(_, first)] = partings.take_due()
    partings.spoke("a")
    partings.answered("a", first)
    assert not partings.is_over
    [(_, second)] = partings.take_due()
    partings.answered("a", first)
    assert not partings.is_over
    partings.answered("a", second)
    assert partings.is_over


def test_an_unanswered_farewell_can_be_repeated() -> None:
    partings: Partings[str] = Partings()
    partings.spoke("a")
    [(_, first)] = partings.take_due()
    [(_, again)] = partings.take_due(again=True)
    assert again != first
    partings.answered("a", again)
    assert partings.take_due(again=True) == []
