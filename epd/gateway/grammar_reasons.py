"""Why llguidance takes no grammar, in words about what the user wrote."""

_TOO_MUCH = "its patterns, formats and lengths are too much together; allowed: smaller bounds, or simpler patterns"
_WORDS = (
    (("NoExtension", "Unsatisfiable", "Regex is empty"), "nothing fits it"),
    (("recursion limit",), "it is nested too deeply"),
    (("if regex is empty", "fuel exhausted", "lexer configuration", "too many states"), _TOO_MUCH),
    (
        ("Too many items",),
        "what must be written has no end, or is too long; allowed: rules with a way out, and fewer repetitions",
    ),
    (
        ("Current row has",),
        "too many optional properties or options may come next at one place; allowed: fewer of them",
    ),
    (("are not disjoint",), "two of its patterns may fit the same key; allowed: patterns that no key fits two of"),
    (
        ("lookarounds not supported",),
        "its pattern has an anchor or the edge of a word inside; allowed: ^ at its beginning, $ at its end",
    ),
    (("grammar size",), "it is too large for one grammar"),
)


def in_words(reason: str) -> str:
    """Without the parser's inner state, and regular expressions as it has them; its own words last where they are not
    known."""
    for mark in ("<state>", "<non-verbose/>"):
        reason = reason.partition(mark)[0]
    for marks, words in _WORDS:
        if any(mark in reason for mark in marks):
            return words
    if "regex parse error" in reason:
        return (
            f"it is no regular expression that is supported: {' '.join(reason.rpartition('error:')[2].split())[:200]}"
        )
    return f"no grammar can be made of it: {' '.join(reason.split())[:400]}"
