"""What an answer must look like, as one grammar for the workers, or the reason why it cannot be had.

    response_format, structured_outputs  --> content     JSON, a regex, one of several texts, a grammar of the client
    tools, tool_choice                   --> calls       see `grammar_tools`
    the prompt                           --> reasoning   free, first, and only where the prompt leaves room for it

    [<think> anything </think>] content | calls | text, calls in between

All of it is compiled here before any work is done, with the limits of the engine, so that a worker is never given what
it would refuse.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from epd.errors import InvalidRequest
from epd.gateway.answer import THINK_CLOSE, THINK_OPEN
from epd.gateway.grammar_faults import Unenforceable
from epd.gateway.grammar_reasons import in_words
from epd.gateway.grammar_regex import literal, regex, without
from epd.gateway.grammar_schema import enforceable
from epd.gateway.grammar_tools import Rules, exact_function, loose_function
from epd.gateway.grammar_words import parts
from epd.gateway.toolcalls import CALL_CLOSE, CALL_OPEN
from epd.gateway.vocabulary import Vocabulary
from epd.token_table import ANSWER_TAGS, TokenTable, compile_grammar

_MAX_ASKED_CHARACTERS = 256 << 10
# Parts of a schema that are looked through for what is at fault, and for how long.
_MAX_SEARCHED = 200
_MAX_SEARCH_S = 0.5
# Tokens of a made-up answer by which a grammar is tried.
_NUM_TRIED = 4


@dataclass(frozen=True, slots=True)
class Form:
    """What the text of an answer is to be; `param` names the field that says so."""

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    param: str
    is_lenient: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """One that may be called. `is_strict`: a call with other arguments must not come."""

    name: str
    parameters: dict[str, Any]
    param: str
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Calls:
    """Which calls an answer has: some or none among text, or nothing but calls (`must_call`). `is_limited`: there are
    other functions, which must not be called."""

    functions: tuple[Function, ...]
    must_call: bool
    at_most_one: bool
    is_limited: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """Of one request. `reasoning`: "open" if the prompt leaves the answer inside of it, "may open" if the answer can
    begin with it."""

    form: Form | None = None
    calls: Calls | None = None
    reasoning: Literal["none", "open", "may open"] = "none"

    @property
    def is_free(self) -> bool:
        """Any text will do."""
        calls = self.calls
        return self.form is None and (
            calls is None
            or not (calls.must_call or calls.is_limited or any(function.is_strict for function in calls.functions))
        )


class GrammarMaker:
    """One model's, without bounds of time and memory: those are `grammar_process`'s."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self.eos_token_ids = tuple(eos_token_ids)

    def grammar(self, wish: Wish) -> str | None:
        """None where nothing needs to be forced. Raises InvalidRequest naming the field."""
        if wish.is_free:
            return None
        check_size(wish)
        return self._made(wish)

    def reasoning_of(self, last_token_ids: Sequence[int], *, opens: bool) -> Literal["none", "open", "may open"]:
        """What the end of a prompt says of it; `opens`: it ends inside."""
        if opens:
            return "open"
        if self._table.id_of(THINK_OPEN) is None:
            return "none"
        tail = self._vocabulary.spell(last_token_ids[-8:]).decode("utf-8", "replace").rstrip()
        return "none" if tail.endswith(THINK_CLOSE) else "may open"

    @cached_property
    def _table(self) -> TokenTable:
        return table_of(self._vocabulary)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._table.tokenizer(self.eos_token_ids)

    # -- making --------------------------------------------------------------------------------------------------------

    def _made(self, wish: Wish) -> str:
        rules, grammars = Rules(), list[dict[str, Any]]()
        options: list[str] = []
        if wish.form is not None:
            grammars.append(self._content(wish.form))
            options.append(f"{self._gap(wish)} @content" if wish.form.kind == "json" else "@content")
        if wish.calls is not None:
            options.append(self._calls(rules, wish.calls, with_text=wish.form is None))
        body = rules.rule(" | ".join(options))
        start = f"start: {self._reasoning(rules, wish)} {body}"
        lark = "\n".join([start, *rules.lines])
        text = json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]}, ensure_ascii=False)
        self._compile(text, lambda why: InvalidRequest(f"{first_param(wish)}: {why}", param=first_param(wish)))
        return text

    def _content(self, form: Form) -> dict[str, Any]:
        """The client's own, as a grammar that stands alone, and compiles."""

        refusal = partial(_refusal, form.param)
        content: dict[str, Any] = {"name": "content"}
        match form.kind:
            case "json":
                try:
                    content["json_schema"] = enforceable(form.value, lenient=form.is_lenient)
                except Unenforceable as error:
                    raise _refusal(f"{form.param}{error.path}", str(error)) from error
            case "regex":
                content["lark_grammar"] = f"start: {regex(form.value)}"
            case "choice":
                content["lark_grammar"] = f"start: {' | '.join(map(literal, form.value))}"
            case "grammar":
                content["lark_grammar"] = _lark(form.value, refusal)
        try:
            self._compile(json.dumps({"grammars": [content]}, ensure_ascii=False), refusal)
        except InvalidRequest as error:
            if form.kind == "json":
                self._name_part(form)
            raise error
        return content

    def _name_part(self, form: Form) -> None:
        """Raises InvalidRequest for the smallest part of a schema that is refused alone, too, if it is found soon."""
        root = form.value if isinstance(form.value, Mapping) else {}
        shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
        nested = sorted(parts(root), key=lambda item: -len(item[0]))
        until_s = time.monotonic() + _MAX_SEARCH_S
        for path, part in nested[:_MAX_SEARCHED]:
            if time.monotonic() > until_s:
                return
            where = form.param + path
            alone: list[tuple[str, dict[str, Any]]] = []
            if "pattern" in part:
                alone.append((".pattern", {"type": "string", "pattern": part["pattern"]}))
            if "patternProperties" in part:
                keys = dict.fromkeys(part["patternProperties"], True)
                alone.append((".patternProperties", {"type": "object", "patternProperties": keys}))
            for more, schema in (*alone, ("", {**shared, **part})):
                refusal = partial(_refusal, where + more)
                try:
                    content = {"json_schema": enforceable(schema, lenient=form.is_lenient)}
                    self._compile(json.dumps({"grammars": [content]}, ensure_ascii=False), refusal)
                except Unenforceable:
                    continue

    def _calls(self, rules: Rules, calls: Calls, *, with_text: bool) -> str:
        named = [self._function(rules, function, must_call=calls.must_call) for function in calls.functions]
        any_function = rules.rule(" | ".join(named))
        opening, closing = self._tag(CALL_OPEN), self._tag(CALL_CLOSE)
        inside = f'"\\n" {any_function} "\\n" {closing}'
        if with_text and not calls.must_call:
            text = rules.terminal(without([CALL_OPEN]))
            lead = f"{text} {opening}"
            if self._table.id_of(CALL_OPEN) is None:
                lead = rules.until(without([CALL_OPEN]), CALL_OPEN)
            call = rules.rule(f"{lead} {inside}")
            return f"{call}{'?' if calls.at_most_one else '*'} {text}"
        call = rules.rule(f"{opening} {inside}")
        return call if calls.at_most_one else rules.rule(f'{call} ("\\n" {call})*')

    def _function(self, rules: Rules, function: Function, *, must_call: bool) -> str:
        """Exact where it can be and is wanted, else so that it can be read. Raises InvalidRequest where it must be."""
        if function.is_strict or must_call:
            alone = Rules()
            try:
                self._check(alone, exact_function(alone, function.name, function.parameters))
            except Unenforceable as error:
                if function.is_strict:
                    raise _refusal(f"{function.param}{error.path}", str(error)) from error
            else:
                return exact_function(rules, function.name, function.parameters)
        return loose_function(rules, function.name, function.parameters)

    def _check(self, rules: Rules, start: str) -> None:
        """Raises Unenforceable for rules that do not compile, or that nothing fits."""

        def refusal(path: str) -> Callable[[str], Unenforceable]:
            return lambda why: Unenforceable(path, why)

        for terminal, path in rules.probes:
            self._compile(f"start: V\nV: {terminal}", refusal(path))
        try:
            self._compile("\n".join([f"start: {start}", *rules.lines]), refusal(""))
        except Unenforceable:
            # Of one argument, if it is.
            for schema, path in rules.schemas:
                self._compile(json.dumps({"grammars": [{"json_schema": schema}]}), refusal(path))
            raise

    def _compile(self, grammar: str, refusal: Callable[[str], Exception]) -> None:
        """Raises what `refusal` makes of the reason."""
        try:
            matcher = compile_grammar(grammar, self._tokenizer)
        except ValueError as error:
            raise refusal(in_words(str(error))) from error
        # Some limits of the parser are only met once something is written.
        for _ in range(_NUM_TRIED):
            token_id = _first_allowed(matcher.compute_bitmask(), self.eos_token_ids)
            if matcher.is_error() or token_id is None:
                raise refusal(in_words(matcher.get_error() or "NoExtension"))
            if token_id in self.eos_token_ids:
                return
            matcher.consume_token(token_id)
        if matcher.is_error():
            raise refusal(in_words(matcher.get_error()))

    # -- around it -----------------------------------------------------------------------------------------------------

    def _tag(self, tag: str) -> str:
        token_id = self._table.id_of(tag)
        return literal(tag) if token_id is None else f"<[{token_id}]>"

    def _reasoning(self, rules: Rules, wish: Wish) -> str:
        if wish.reasoning == "none":
            return ""
        if self._table.id_of(THINK_CLOSE) is None:
            thought = rules.until(without([THINK_CLOSE]), THINK_CLOSE)
        else:
            thought = f"{rules.terminal(without([THINK_CLOSE]))} {self._tag(THINK_CLOSE)}"
        return thought if wish.reasoning == "open" else f"({self._tag(THINK_OPEN)} {thought})?"

    def _gap(self, wish: Wish) -> str:
        """What models put between reasoning and what comes after it; white space around JSON is nothing."""
        return "" if wish.reasoning == "none" else r"/[ \n]{1,2}/?"


def check_size(wish: Wish) -> None:
    """Raises InvalidRequest for more schemas than are looked at."""
    num_characters = len(repr(wish))
    if num_characters > _MAX_ASKED_CHARACTERS:
        raise InvalidRequest(
            f"the schemas of this request have {num_characters} characters; allowed: at most {_MAX_ASKED_CHARACTERS} "
            "where answers are to fit them",
            param=first_param(wish),
        )


def table_of(vocabulary: Vocabulary) -> TokenTable:
    """As `epd.token_table.load_token_table` makes it of the same file."""
    tokens, spellings = vocabulary.token_bytes, vocabulary.special_ids
    spelled = tuple(tokens.spelled(token_id) for token_id in range(vocabulary.num_token_ids))
    special = {token_id for text, token_id in spellings.items() if text in ANSWER_TAGS or not tokens.visible(token_id)}
    return TokenTable(spelled, frozenset(special), vocabulary.encode_plain)


def _lark(text: str, refusal: Callable[[str], InvalidRequest]) -> str:
    """Lark as it is, GBNF as Lark."""
    if "::=" not in text:
        return text
    try:
        converted: str = gbnf_to_lark(text)
    except Exception as error:  # the converter raises nothing narrower
        raise refusal(f"it is no GBNF: {' '.join(str(error).split())[:400]}") from error
    return converted


def first_param(wish: Wish) -> str:
    """The field that asks for it. For a wish that is not free."""
    if wish.form is not None:
        return wish.form.param
    assert wish.calls is not None
    return "tools" if len(wish.calls.functions) > 1 else wish.calls.functions[0].param


def _refusal(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where} cannot be enforced: {why}", param=where)


def _first_allowed(mask: bytes, ends: Sequence[int]) -> int | None:
    """The first token that may come, one that ends the answer only if there is no other; None if there is none."""
    allowed = (8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)
    last = None
    for token_id in allowed:
        if token_id not in ends:
            return token_id
        last = token_id
    return last
