"""Whatever is written under the mask fits the schema it was made for: random schemas, random tokens."""

import json
import random
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from epd.errors import InvalidRequest
from epd.gateway.answer import AnswerParser, Content, Reasoning
from epd.gateway.grammar import Calls, Form, Function, Wish
from tests.oracles.grammar_writer import MAKER, NoEnd, written
from tests.oracles.random_schemas import parameters, whole
from tests.oracles.whole_calls import ToolCall, with_whole_calls

# A tag that a value spells, and what never can be: both are told of, and nothing to test here.
_NOT_TO_BE_HAD = ("spells a tag", "nsatisfiable", "no text fits", "nothing fits", "add to needs", "fits several")
# Without shrinking, which takes minutes here.
PATIENT = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)


def fits(value: object, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(value)


def written_if_it_can(wish: Wish, rng: random.Random) -> str | None:
    """None for what is refused with one of the known reasons, and for what chance does not end."""
    refused = ""
    try:
        return written(wish, rng)
    except NoEnd:
        return None
    except InvalidRequest as error:
        refused = error.message
    assert any(words in refused for words in _NOT_TO_BE_HAD), refused
    return None


@PATIENT
@given(schema=whole(), seed=st.integers(0, 2**32))
def test_json(schema: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    text = written_if_it_can(Wish(Form("json", schema, "f")), rng)
    if text is not None:
        fits(json.loads(text), schema)


@PATIENT
@given(schema=parameters(), seed=st.integers(0, 2**32), must_call=st.booleans(), thinks=st.booleans())
def test_calls(schema: dict[str, Any], seed: int, must_call: bool, thinks: bool) -> None:
    """The reader of calls gets values out of them that fit, and nothing else is in the answer."""
    rng = random.Random(seed)
    functions = (Function("get", schema, "f", True), Function("other.one", {}, "g", False))
    wish = Wish(calls=Calls(functions, must_call, at_most_one=False), reasoning="may open" if thinks else "none")
    text = written_if_it_can(wish, rng)
    if text is None:
        return
    parser = AnswerParser(tools={"get": schema, "other.one": {}})
    pieces = with_whole_calls([*parser.push(text), *parser.close()])
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert len(calls) == text.count("<tool_call>")
    assert bool(calls) or not must_call
    for call in calls:
        fits(json.loads(call.arguments), schema if call.name == "get" else {"type": "object"})
    assert not must_call or not any(isinstance(piece, Content) for piece in pieces)
    assert thinks or not any(isinstance(piece, Reasoning) for piece in pieces)


def test_most_random_schemas_can_be_had() -> None:
    """Else the two above would be idle."""
    had = asked = 0

    @settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schema=parameters())
    def count(schema: dict[str, Any]) -> None:
        nonlocal had, asked
        asked += 1
        try:
            MAKER.grammar(Wish(calls=Calls((Function("get", schema, "f", True),), True, True)))
            had += 1
        except InvalidRequest:
            pass

    count()
    assert had > 0.7 * asked
