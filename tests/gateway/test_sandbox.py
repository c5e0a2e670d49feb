"""Templates that would take all time or memory: refused before the memory is taken."""

import tracemalloc
from typing import Any

import pytest

from epd.errors import InvalidRequest
from epd.gateway import sandbox
from epd.gateway.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]
PEAK_BYTES = 32 << 20

DOUBLING = "{% set ns = namespace(s='ab', l=[1, 2]) %}{% for _ in range(60) %}{% set ns.X = Y %}{% endfor %}"
BOMBS = [
    DOUBLING.replace("X", "s").replace("Y", "ns.s ~ ns.s"),
    DOUBLING.replace("X", "s").replace("Y", "ns.s + ns.s"),
    DOUBLING.replace("X", "s").replace("Y", "[ns.s, ns.s]|join"),
    DOUBLING.replace("X", "s").replace("Y", "[ns.s, ns.s]|join(ns.s)"),
    DOUBLING.replace("X", "s").replace("Y", "''.join([ns.s, ns.s])"),
    DOUBLING.replace("X", "s").replace("Y", "ns.s.join([ns.s, ns.s])"),
    DOUBLING.replace("X", "s").replace("Y", "ns.s|replace('a', ns.s)"),
    DOUBLING.replace("X", "s").replace("Y", "ns.s.replace('a', ns.s)"),
    DOUBLING.replace("X", "s").replace("Y", "ns.s|replace('', ns.s)"),
    DOUBLING.replace("X", "s").replace("Y", "'%s%s'|format(ns.s, ns.s)"),
    DOUBLING.replace("X", "s").replace("Y", "'%s%s' % (ns.s, ns.s)"),
    DOUBLING.replace("X", "s").replace("Y", "'{0}{0}'.format(ns.s)"),
    DOUBLING.replace("X", "s").replace("Y", "(ns.s ~ '\\n')|indent(ns.s, true)"),
    DOUBLING.replace("X", "l").replace("Y", "ns.l + ns.l"),
    DOUBLING.replace("X", "l").replace("Y", "ns.l * 2"),
    *(
        DOUBLING.replace("X", "l").replace("Y", "[ns.l, ns.l]") + use
        for use in (
            *("{{ ns.l }}", "{{ ns.l ~ 'x' }}", "{{ ns.l|string }}", "{{ ns.l|tojson }}", "{{ ns.l|upper }}"),
            *("{{ '%s' % ns.l }}", "{{ '%s'|format(ns.l) }}", "{{ '{}'.format(ns.l) }}", "{{ ns.l|join('-') }}"),
            *("{{ '-'.join(ns.l|map('string')) }}", "{{ 'x'|replace('x', ns.l) }}", "{{ ns.l|pprint }}"),
            *("{{ ns.l|escape }}", "{{ ns.l|urlencode }}", "{{ ns.l|trim }}", "{{ {'a': ns.l}|xmlattr }}"),
            "{{ ns.l|indent }}",
        )
    ),
    "{% macro f(n) %}{% if n %}{% set s = f(n - 1) %}{{ s }}{{ s }}{% else %}x{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set s = 'ab' %}{% for _ in range(60) %}{% set t %}{{ s }}{{ s }}{% endset %}{% endfor %}{{ 'x' * 2000000000 }}",
    "{{ 'x' * 2000000000 }}",
    "{{ 2000000000 * 'x' }}",
    "{{ [1] * 2000000000 }}",
    "{{ 'x'.ljust(2000000000) }}",
    "{{ 'x'.center(width=2000000000) }}",
    "{{ '\t'.expandtabs(2000000000) }}",
    "{{ 'x'|center(2000000000) }}",
    "{{ 'x'|indent(2000000000, true) }}",
    "{{ [1]|slice(2000000000)|list }}",
    "{{ [1]|batch(2000000000, 0)|list }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '%2000000000d'|format(1) }}",
    "{{ '{:2000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 2000000000) }}",
    "{{ (5).to_bytes(2000000000) }}",
    "{{ messages|tojson(indent=2000000000) }}",
    "{{ messages|tojson(separators=(',' * 9999999, ':')) }}",
    "{{ 1|round(2000000000) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_bomb_is_refused_before_its_memory_is_taken(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_VALUE_CHARS", 1 << 20)
    monkeypatch.setattr(sandbox, "MAX_NEW_CHARS", 4 << 20)
    monkeypatch.setattr(sandbox, "MAX_WRITTEN_ITEMS", 10_000)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 20_000)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as refused:
            render(source)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.param == "messages"
    assert "MemoryError" not in refused.value.message
    assert peak_bytes < PEAK_BYTES


@pytest.mark.parametrize("source", BOMBS)
def test_a_bomb_that_is_never_reached_costs_nothing_at_the_start(source: str) -> None:
    tracemalloc.start()
    try:
        text = render(f"{{% if messages[0].content == 'boom' %}}{source}{{% endif %}}ok")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text == "ok"
    assert peak_bytes < PEAK_BYTES


def test_computing_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_CPU_S", 0.0)
    with pytest.raises(InvalidRequest, match="s of computing"):
        render("{% for i in range(99999) %}{% endfor %}")


def test_the_budget_is_of_one_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 25_000)
    template = ChatTemplate("{% for i in range(9999) %}{% endfor %}{{ messages[0].content * 3 }}", {})
    for _ in range(3):
        assert template.render(MESSAGES, tools=None, options={}) == "hellohellohello"


@pytest.mark.parametrize(
    "source",
    [
        "{% set count_step = 1 %}",
        "{{ count_step() }}",
        "{% macro f(concat_step) %}{% endmacro %}",
        "{% for count_step in messages %}{% endfor %}",
    ],
)
def test_the_budget_cannot_be_replaced(source: str) -> None:
    with pytest.raises(ValueError, match="reserved"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [1] }}", "a1None[1]"),
        ("{{ 'a' * 3 + 'b' }}", "aaab"),
        ("{{ 7 % 4 }}{{ 2 * 3 }}{{ 1 + 1 }}{{ 2 ** 3 }}", "3628"),
        ("{{ '%5.2f|%s' % (1.5, 'x') }}", " 1.50|x"),
        ("{{ '{:>4}{}'.format('a', 'b') }}", "   ab"),
        ("{{ [1, 2]|join(', ') }}{{ {'a': 1}|join }}", "1, 2a"),
        ("{{ messages|join(',', attribute='content') }}", "hello"),
        ("{{ messages|map(attribute='content')|join(',') }}", "hello"),
        ("{{ 'a\nb'|indent(2) }}{{ 'a'|indent(width=3, first=true) }}", "a\n  b   a"),
        ("{{ 'banana'|replace('a', 'o', 2) }}{{ 'banana'.replace('a', 'o') }}", "bonona" + "bonono"),
        ("{{ 'abc'|center(5) }}{{ 'a'.ljust(3) }}|", " abc a  |"),
        ("{{ [1, 2, 3]|batch(2)|list }}{{ [1, 2]|slice(2)|list }}", "[[1, 2], [3]][[1], [2]]"),
        ("{{ 2.5|round }}{{ 1.234|round(1) }}", "2.01.2"),
        ("{{ {'b': 1, 'a': ['<x>', 'é']}|tojson }}", '{"b": 1, "a": ["<x>", "é"]}'),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ 'x'|upper|lower|title|trim }}{{ 'a b'.split(' ')|length }}", "X2"),
    ],
)
def test_what_templates_do_gives_what_jinja_gives(source: str, text: str) -> None:
    assert render(source) == text


def render(source: str, **options: Any) -> str:
    return ChatTemplate(source, {}).render(MESSAGES, tools=None, options=options)
