"""Where chat templates run: nothing leads out, and one render has a budget of steps, of CPU time and of new characters.

A template comes with its checkpoint, from wherever that came. Jinja's own sandbox keeps it from the interpreter but not
from taking all time and memory (its documentation says so), hence here

    loops, macros       every pass counts
    + * ~ %             the result's size is known before it is made, and counts
    filters, methods    those whose result can be larger than what they are given are measured first
    constants           nothing is computed when the template is compiled
"""

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

# Passes of loops and macro calls in one render; long conversations take thousands.
MAX_STEPS: Final = 5_000_000
MAX_CPU_S: Final = 2.0
# Characters (or items of lists) that operators, filters and methods may make in one render.
MAX_NEW_CHARS: Final = 256 << 20
MAX_VALUE_CHARS: Final = 32 << 20
# Items of lists and objects in one value that is written as text.
MAX_WRITTEN_ITEMS: Final = 1 << 19
_MAX_POWER_BITS: Final = 4096
# A width, indent or count in a template; nobody lays text out wider.
_MAX_WIDTH: Final = 1000
_STEPS_PER_CLOCK: Final = 256
_COUNT, _CONCAT = "count_step", "concat_step"
_RESERVED: Final = frozenset({_COUNT, _CONCAT})
# A width in a format: printf's and str.format's.
_WIDE_FORMAT: Final = re.compile(r"\d{4}|\*|\{[^{}]*\{")
_PADDING: Final = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})


class RanAway(Exception):
    """The render took more than any conversation needs."""


class Budget:
    """What one render may still use."""

    def __init__(self) -> None:
        self._steps_left = MAX_STEPS
        self._chars_left = MAX_NEW_CHARS
        # CPU time of this thread: a busy machine is not the template's fault.
        self._stop_s = time.thread_time() + MAX_CPU_S

    def variables(self) -> dict[str, Callable[..., Any]]:
        """What the compiled template calls."""
        return {"range": self.range, _COUNT: self.count, _CONCAT: self.concat}

    def count(self, num_steps: int = 1) -> str:
        """A pass of a loop or a call of a macro."""
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise RanAway(f"more than {MAX_STEPS} steps")
        if num_steps > 1 or self._steps_left % _STEPS_PER_CLOCK == 0:
            self._check_clock()
        return ""

    def make(self, num_chars: int) -> None:
        """A value of that size is about to come to be."""
        self._chars_left -= num_chars
        if num_chars > MAX_VALUE_CHARS or self._chars_left < 0:
            raise RanAway(f"a value of {num_chars} characters, {MAX_NEW_CHARS} in all are allowed")
        if num_chars > _STEPS_PER_CLOCK:
            self._check_clock()

    def write(self, *values: Any) -> None:
        """The values are about to be written as text."""
        self.make(_written_size(values))

    def concat(self, *values: Any) -> str:
        """The operator ~."""
        self.write(*values)
        return "".join(map(str, values))

    def range(self, *bounds: int) -> range:
        steps = jinja2.sandbox.safe_range(*bounds)
        self.count(len(steps))
        return steps

    def _check_clock(self) -> None:
        if time.thread_time() > self._stop_s:
            raise RanAway(f"more than {MAX_CPU_S:g} s of computing")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """No attribute that leads out, no change to what is given, nothing that grows without being counted."""

    # Jinja computes none of these in advance, and asks `call_binop` at each use.
    intercepted_binops = frozenset({"**", "*", "+", "%"})

    def __init__(self) -> None:
        # trim_blocks and lstrip_blocks are what templates are written for.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_output,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        del self.globals["lipsum"]
        self.filters |= {name: _measured(name, measure) for name, measure in _MEASURES.items()}
        self.filters["tojson"] = _to_json

    def compile_counted(self, source: str) -> tuple[jinja2.Template, jinja2.nodes.Template]:
        """The template, made to count, and its tree as written.

        Raises jinja2.TemplateSyntaxError, RecursionError or SyntaxError.
        """
        written = self.parse(source)
        used = {name.name for name in written.find_all(jinja2.nodes.Name)} & _RESERVED
        if used:
            raise jinja2.TemplateSyntaxError(f"{used.pop()} is a reserved name", 1)
        counted = _Counting().visit(self.parse(source))
        counted.set_environment(self)
        return self.template_class.from_code(self, self.compile(counted), self.make_globals(None)), written

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        match operator:
            case "**":
                if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
                    raise ValueError(f"a power has more than {_MAX_POWER_BITS} bits")
            case "%" if isinstance(left, str):
                _check_format(left)
                budget.write(left, right)
            case "*":
                budget.make(_product_size(left, right))
            case "+":
                budget.make(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | int):
            _measure_method(_budget(context), owner, name, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's safe str.format and str.format_map, measured."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @jinja2.pass_context
        def bounded(context: Any, *args: Any, **kwargs: Any) -> str:
            _measure_format(_budget(context), value.__self__, *args, **kwargs)
            return formatted(*args, **kwargs)

        return bounded


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body alone matters."""

    tags = {"generation"}  # noqa: RUF012 -- the library's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Counting(jinja2.visitor.NodeTransformer):
    """Makes every pass of a loop and every call of a macro count, and ~ a call."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 -- the library's name
        return self._count(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:  # noqa: N802 -- the library's name
        return self._count(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:  # noqa: N802 -- the library's name
        return self._count(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 -- the library's name
        self.generic_visit(node)
        return _call(_CONCAT, node.nodes, node.lineno)

    def _count(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call(_COUNT, [], node.lineno)).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]


def _call(name: str, arguments: list[jinja2.nodes.Expr], line: int) -> jinja2.nodes.Call:
    call = jinja2.nodes.Call(jinja2.nodes.Name(name, "load"), arguments, [], None, None)
    call.set_lineno(line)
    return call


@jinja2.pass_context
def _output(context: Any, value: Any) -> Any:
    """What an expression writes: blocks and macros collect it, and may write the collection twice."""
    _budget(context).write(value)
    return value


def _budget(context: Any) -> Budget:
    # The bound method knows its budget; reading it from the context makes the environment free of state.
    owner = context.resolve(_COUNT).__self__
    assert isinstance(owner, Budget), "the name is reserved"
    return owner


def _size(value: Any) -> int:
    """Characters or items that a copy of the value has; numbers none."""
    if isinstance(value, str | bytes | Sequence | Mapping):
        return len(value)
    return 0


def _written_size(value: Any) -> int:
    """At least a third of the characters of the value's text. Lists may hold one another many times over, so counting
    ends where too much is certain."""
    size, num_items, waiting = 0, 0, [value]
    while waiting and size <= MAX_VALUE_CHARS:
        item = waiting.pop()
        num_items += 1
        if num_items > MAX_WRITTEN_ITEMS:
            raise RanAway(f"a value of more than {MAX_WRITTEN_ITEMS} items is written as text")
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            size += 1
            waiting.extend(itertools.chain.from_iterable(item.items()))
        elif isinstance(item, Sequence | Set) and not isinstance(item, range):
            size += 1
            waiting.extend(item)
        else:
            size += item.bit_length() // 3 if isinstance(item, int) else 1
    return size


def _product_size(left: Any, right: Any) -> int:
    if isinstance(right, int):
        left, right = right, left
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) // 8
    return _size(right) * max(left, 0) if isinstance(left, int) else 0


def _check_format(pattern: str | bytes) -> None:
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    if "%" in text or "{" in text:
        found = _WIDE_FORMAT.search(text)
        if found is not None:
            raise ValueError(f"a format with {found[0]!r}; allowed are plain widths below {_MAX_WIDTH}")


def _check_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > _MAX_WIDTH:
        raise ValueError(f"a width of {width}; allowed is up to {_MAX_WIDTH}")


def _measure_method(
    budget: Budget, owner: str | bytes | int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    given = [*args, *kwargs.values()]
    if isinstance(owner, int) or name in _PADDING:
        for value in given:
            _check_width(value)
        return
    if name == "replace" and len(given) >= 2:
        budget.make(_replaced_size(owner, given[0], given[1]))
    elif name == "join" and given:
        budget.make(_joined_size(given[0], len(owner)))
    else:
        budget.make(len(owner))


def _replaced_size(text: Any, old: Any, new: Any) -> int:
    if not isinstance(text, str) or not isinstance(old, str):
        return _size(text) * max(_size(new), 1)
    return len(text) + text.count(old) * len(str(new))


def _joined_size(values: Any, num_separator_chars: int) -> int:
    """Of a sequence; what is only iterated over was made step by step."""
    if not isinstance(values, Sequence | Mapping):
        return 0
    return _written_size(values) + num_separator_chars * len(values)


def _measure_replace(budget: Budget, value: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    budget.write(value, old, new)
    budget.make(_replaced_size(str(value), str(old), str(new)))


def _measure_join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    budget.make(_joined_size(value, len(str(d))))


def _measure_indent(budget: Budget, s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    _check_width(width)
    budget.write(s, width)
    text = str(s)
    step = width if isinstance(width, int) else _size(width)
    budget.make(len(text) + (text.count("\n") + 1) * step)


def _measure_format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    budget.write(value)
    _check_format(str(value))
    # A value may be named several times: {0}{0}, %(a)s%(a)s.
    budget.make(_written_size([args, kwargs]) * max(len(str(value)) // 3, 1))


def _measure_widths(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    for width in itertools.chain(args, kwargs.values()):
        _check_width(width)
    budget.make(_size(value))


def _measure_written(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    budget.write(value, *args)


# Filters that begin by making a text of what they are given.
_WRITING: Final = (
    *("string", "upper", "lower", "capitalize", "title", "trim", "escape", "e", "forceescape", "safe", "striptags"),
    *("pprint", "urlencode", "xmlattr", "wordcount"),
)
_MEASURES: Final[dict[str, Callable[..., None]]] = {
    "replace": _measure_replace,
    "join": _measure_join,
    "indent": _measure_indent,
    "format": _measure_format,
    **dict.fromkeys(_WRITING, _measure_written),
    **dict.fromkeys(("center", "slice", "batch", "wordwrap", "round", "truncate", "urlize"), _measure_widths),
}


def _measured(name: str, measure: Callable[..., None]) -> Callable[..., Any]:
    """Jinja's own filter, after its measure. The library passes its own first argument to filters that ask for one."""
    plain = jinja2.filters.FILTERS[name]
    wants = getattr(plain, "jinja_pass_arg", None)

    @jinja2.pass_context
    @functools.wraps(plain, assigned=("__name__", "__doc__"), updated=())
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        measure(_budget(context), value, *args, **kwargs)
        match None if wants is None else wants.name:
            case None:
                return plain(value, *args, **kwargs)
            case "environment":
                return plain(context.environment, value, *args, **kwargs)
            case "eval_context":
                return plain(context.eval_ctx, value, *args, **kwargs)
            case _:
                return plain(context, value, *args, **kwargs)

    return bounded


@jinja2.pass_context
def _to_json(
    context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; templates are written for this one.
    for given in (indent, *(separators or ())):
        _check_width(len(given) if isinstance(given, str) else given)
    _budget(context).write(value)
    plain = json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return plain
    step = len(indent) if isinstance(indent, str) else indent
    # A line for every mark that may start one, indented as deep as anything is.
    lines = sum(map(plain.count, ",[{]}")) + 1
    _budget(context).make(len(plain) + lines * step * _depth(plain))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _depth(text: Iterable[str]) -> int:
    """An upper bound of the nesting of a JSON text."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest + 1
