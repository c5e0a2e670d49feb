"""Schemas that are no schemas: whatever stands where, the answer is a grammar or a refusal that names the field."""

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from epd.errors import InvalidRequest
from epd.gateway.grammar import Calls, Form, Function, Wish
from tests.oracles.grammar_writer import MAKER

WORDS = """type properties required additionalProperties patternProperties items prefixItems minItems maxItems enum
    const anyOf oneOf allOf $ref $defs definitions pattern format minLength maxLength minimum maximum exclusiveMinimum
    multipleOf nullable uniqueItems not if title x-guidance description default"""
ODD: list[Any] = [None, True, False, 0, -1, 3, 2.5, 10**30, [], {}, ["a"], ["string", "null"], [1, None], [["a"]]]
TEXTS = ["", "string", "object", "array", "integer", "null", "#", "#/$defs/a", "^a$", "(", "date", "\0", "http://x"]
JUNK = st.sampled_from([*ODD, *TEXTS, {"a": {}}])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    JUNK,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(WORDS.split()), inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "b c", "<", ""]), inner, max_size=2),
        st.lists(inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(schema=st.dictionaries(st.sampled_from(WORDS.split()), SCHEMAS, max_size=4), is_strict=st.booleans())
def test_nonsense(schema: dict[str, Any], is_strict: bool) -> None:
    functions = (Function("f", schema, "tools[0].function.parameters", is_strict),)
    for wish in (Wish(Form("json", schema, "form")), Wish(calls=Calls(functions, must_call=True, at_most_one=True))):
        named = "form" if wish.form else "tools[0].function.parameters"
        param = None
        try:
            assert MAKER.grammar(wish)
        except InvalidRequest as error:
            param = error.param
        assert param is None or param.startswith(named)
        # A function that is not strict can always be called.
        assert param is None or wish.form or is_strict
