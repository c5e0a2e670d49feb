"""Conversations as the model reads them, written out by hand; templates of all published forms; templates that fail.

Long because every prompt stands here whole, as a reader would want to see it.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from epd.errors import InvalidRequest
from epd.gateway.conversation import Conversation, read_conversation
from epd.gateway.render import Renderer
from epd.gateway.schema import ChatBody
from epd.gateway.template import ChatTemplate
from tests.fakes.gateway import AUDIO_URL, IMAGE_URL, MODEL_DIR, RENDERER, VIDEO_URL
from tests.oracles.hf_template import hf_render

VOCABULARY = RENDERER.vocabulary
TEMPLATE = RENDERER.template

DEFAULT_SYSTEM = "<|im_start|>system\nYou are MiMo nano, a tiny test model.<|im_end|>"
ASK = "<|im_start|>assistant\n"
NO_THINKING = "<think></think>"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
AUDIO = "<|mimo_audio_start|><|audio_pad|><|mimo_audio_end|>"

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "hi"}
THOUGHT = {"role": "assistant", "content": "hello", "reasoning_content": "A greeting."}
MORE = {"role": "user", "content": "more"}
THINKING = {"enable_thinking": True}

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Its name"},
        "days": {"type": ["integer", "null"]},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather <now>", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
DECLARED = """

You may call these functions:
<tools>
<function>
<name>weather</name>
<description>Weather <now></description>
<parameters>
<parameter>
<name>city</name>
<type>string</type>
<description>Its name</description>
</parameter>
<parameter>
<name>days</name>
<type>["integer", "null"]</type>
</parameter>
<parameter>
<name>unit</name>
<enum>["C", "F"]</enum>
</parameter>
<required>["city"]</required>
</parameters>
</function>
<function>
<name>time</name>
<parameters>
</parameters>
</function>
</tools>

Write each call like this:
<tool_call>
<function=NAME>
<parameter=KEY>VALUE</parameter>
</function>
</tool_call>"""


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "id-time", "content": text}


CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        call("weather", '{"city": "Paris <3>", "days": 3, "unit": null, "more": {"a": ["\\u00e9", true]}}'),
        call("time", ""),
    ],
}
CALLED = (
    "\n<tool_call>\n<function=weather>\n<parameter=city>Paris <3></parameter>\n<parameter=days>3</parameter>\n"
    '<parameter=unit>null</parameter>\n<parameter=more>{"a": ["\u00e9", true]}</parameter>\n</function>\n</tool_call>'
    "\n<tool_call>\n<function=time>\n</function>\n</tool_call>"
)

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "the least": ([HI], {}, f"{DEFAULT_SYSTEM}<|im_start|>user\nhi<|im_end|>{ASK}{NO_THINKING}"),
    "a system message": (
        [SYSTEM, HI],
        {},
        f"<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nhi<|im_end|>{ASK}{NO_THINKING}",
    ),
    "a developer is the system": (
        [{**SYSTEM, "role": "developer"}, HI],
        {},
        f"<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nhi<|im_end|>{ASK}{NO_THINKING}",
    ),
    "thinking": (
        [HI],
        {"chat_template_kwargs": THINKING},
        f"{DEFAULT_SYSTEM}<|im_start|>user\nhi<|im_end|>{ASK}",
    ),
    "effort is thinking": ([HI], {"reasoning_effort": "low"}, f"{DEFAULT_SYSTEM}<|im_start|>user\nhi<|im_end|>{ASK}"),
    "the least effort is none": (
        [HI],
        {"reasoning_effort": "minimal"},
        f"{DEFAULT_SYSTEM}<|im_start|>user\nhi<|im_end|>{ASK}{NO_THINKING}",
    ),
    "several turns": (
        [HI, {"role": "assistant", "content": "hello"}, MORE],
        {},
        f"{DEFAULT_SYSTEM}<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n<think></think>hello<|im_end|>"
        f"<|im_start|>user\nmore<|im_end|>{ASK}{NO_THINKING}",
    ),
    "reasoning is kept": (
        [HI, THOUGHT, MORE],
        {},
        f"{DEFAULT_SYSTEM}<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n<think>A greeting.</think>hello"
        f"<|im_end|><|im_start|>user\nmore<|im_end|>{ASK}{NO_THINKING}",
    ),
    "reasoning is dropped": (
        [HI, THOUGHT, MORE],
        {"chat_template_kwargs": {"keep_all_reasoning": False}},
        f"{DEFAULT_SYSTEM}<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n<think></think>hello<|im_end|>"
        f"<|im_start|>user\nmore<|im_end|>{ASK}{NO_THINKING}",
    ),
    "reasoning after the last user message stays": (
        [HI, {**CALLING, "reasoning_content": "Look."}, result("rain"), result("noon")],
        {"tools": TOOLS, "chat_template_kwargs": {"keep_all_reasoning": False, **THINKING}},
        f"<|im_start|>system\nYou are MiMo nano, a tiny test model.{DECLARED}<|im_end|><|im_start|>user\nhi<|im_end|>"
        f"<|im_start|>assistant\n<think>Look.</think>{CALLED}<|im_end|>"
        "<|im_start|>tool\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n<|im_end|>"
        f"{ASK}",
    ),
    "tools": (
        [SYSTEM, HI],
        {"tools": TOOLS},
        f"<|im_start|>system\nBe brief.{DECLARED}<|im_end|><|im_start|>user\nhi<|im_end|>{ASK}{NO_THINKING}",
    ),
    "no tools after all": (
        [SYSTEM, HI],
        {"tools": TOOLS, "tool_choice": "none"},
        f"<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nhi<|im_end|>{ASK}{NO_THINKING}",
    ),
    "text, a call, a result, an answer": (
        [HI, {"role": "assistant", "content": "Wait.", "tool_calls": [call("time", "{}")]}, result("noon"), THOUGHT],
        {},
        f"{DEFAULT_SYSTEM}<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n<think></think>Wait."
        "\n<tool_call>\n<function=time>\n</function>\n</tool_call><|im_end|>"
        "<|im_start|>tool\n<tool_response>\nnoon\n</tool_response>\n<|im_end|>"
        f"<|im_start|>assistant\n<think>A greeting.</think>hello<|im_end|>{ASK}{NO_THINKING}",
    ),
    "media": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": IMAGE_URL}},
                    {"type": "video_url", "video_url": {"url": VIDEO_URL}},
                    {"type": "text", "text": "b"},
                    {"type": "audio_url", "audio_url": {"url": AUDIO_URL}},
                    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
                ],
            }
        ],
        {},
        f"{DEFAULT_SYSTEM}<|im_start|>user\na{IMAGE}{VIDEO}b{AUDIO}{AUDIO}<|im_end|>{ASK}{NO_THINKING}",
    ),
    "nothing said": (
        [{"role": "user", "content": ""}],
        {},
        f"{DEFAULT_SYSTEM}<|im_start|>user\n<|im_end|>{ASK}{NO_THINKING}",
    ),
}


_MARKUP = re.compile(
    r"\s*(</?(?:tools|function|name|description|parameters|parameter|type|enum|required|tool_call)\b[^<>]*>)\s*|(?<=\n)\n"
)


def even(text: str) -> str:
    """Without the white space beside tags of declarations and calls: template revisions differ in it."""
    return _MARKUP.sub(r"\1", text)


def conversation(messages: list[dict[str, Any]], guard: Any = VOCABULARY.guard, **fields: Any) -> Conversation:
    return read_conversation(ChatBody.model_validate({"model": "tiny", "messages": messages, **fields}), guard)


@pytest.mark.parametrize("name", CASES)
def test_conversations_written_out(name: str) -> None:
    """The prompt's tokens spell the expected text, and its special tokens are tokens."""
    messages, fields, expected = CASES[name]
    built = conversation(messages, **fields)
    prompt = RENDERER.render(built)
    slots = iter([IMAGE, VIDEO, AUDIO, AUDIO])
    shown = "".join(
        VOCABULARY.spell(piece).decode() if isinstance(piece, tuple) else next(slots) for piece in prompt.pieces
    )
    assert even(shown) == even(expected)
    if not fields.get("tools") and "tool_call" not in expected:
        assert shown == expected
    assert not prompt.opens_reasoning
    ids = [token_id for piece in prompt.pieces if isinstance(piece, tuple) for token_id in piece]
    assert ids.count(VOCABULARY.special_ids["<|im_start|>"]) == expected.count("<|im_start|>")


@pytest.mark.parametrize("name", CASES)
def test_conversations_as_transformers_renders_them(name: str) -> None:
    messages, fields, expected = CASES[name]
    built = conversation(messages, guard=str, **fields)
    options = {} if built.reasoning_effort is None else {"enable_thinking": built.reasoning_effort == "low"}
    theirs = hf_render(MODEL_DIR, built.messages, built.tools, **built.options, **options)
    assert TEMPLATE.render(built.messages, tools=built.tools, options={**built.options, **options}) == theirs
    assert even(theirs) == even(expected)


def test_both_copies_of_the_template_are_one() -> None:
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    assert config["chat_template"] == (MODEL_DIR / "chat_template.jinja").read_text()


def rendered(source: str, messages: Any = (HI,), **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, tools=None, options=options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}x", "<s>x"),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n", "user\n"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=true) }}", '{"a": "\\u00e9", "b": 1}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x }}", "a"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') }}{{ f('b') }}", "[a][b]"),
        ("{{ messages[0].content.split('i')[0] }}{{ messages[::-1][0]['role'].startswith('u') }}", "hTrue"),
        ("{{ '' if documents is none else 'd' }}{{ '' if tools is none else 't' }}{{ add_generation_prompt }}", "True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% endfor %}", "a1"),
    ],
)
def test_what_published_templates_use(source: str, expected: str) -> None:
    assert rendered(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only one turn') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ ''|attr('__class__')|attr('__base__')|list|first|int + none }}",
        "{{ range.__func__.__globals__ }}",
        "{{ range.__self__._num_left }}",
        "{{ range.__self__ }}{{ range.__func__.__globals__['json'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__['__builtins__'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% set x = range(99999) | list | length %}{% endfor %}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f(n) %}{% if n %}{{ caller() }}{% call f(n - 1) %}{% endcall %}{% endif %}{% endmacro %}{{ f(1) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ (10 ** 999) ** 999 ** 9 }}",
        "{{ 1 // 0 }}",
        "{{ messages.x.y }}",
        "{{ messages[0].content + 1 }}",
        "{{ {}|tojson(indent={}) }}",
        "{{ '%d' % 'x' }}",
        "{% include 'other' %}",
        "{% import 'other' as o %}",
    ],
)
def test_a_template_that_fails_is_the_request_s_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.gateway.sandbox.MAX_STEPS", 20_000)
    with pytest.raises(InvalidRequest) as refused:
        rendered(source)
    assert refused.value.param == "messages"
    assert refused.value.message.startswith("the chat template ")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x | no_such_filter }}", "{% no_such_tag %}", "{{ 'a", "{% endfor %}"]
)
def test_what_is_no_template_is_refused_at_the_start(source: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        ChatTemplate(source, {})


def test_deep_nesting_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})


def test_long_conversations_are_no_runaways() -> None:
    messages = [HI, THOUGHT] * 1000
    assert TEMPLATE.render(messages, tools=None, options={}).count("<|im_start|>") == 2002


def folder(path: Path, tokenizer: Any, **files: str) -> Path:
    """A checkpoint's directory; names of files have `__` for a dot and `--` nowhere."""
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name, content in files.items():
        file = path / name.replace("__", ".").replace("_in_", "/")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    return path


def prompts(template: ChatTemplate) -> tuple[str, str]:
    """Without and with tools."""
    return (
        template.render([HI], tools=None, options={}),
        template.render([HI], tools=[{"type": "function"}], options={}),
    )


NAMED = [{"name": "default", "template": "d{{ eos_token }}"}, {"name": "tool_use", "template": "t{{ tools[0].type }}"}]


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert prompts(ChatTemplate.load(folder(tmp_path, {"chat_template": "x{{ eos_token }}", "eos_token": "E"}))) == (
        "xE",
        "xE",
    )
    named = ChatTemplate.load(
        folder(tmp_path, {"chat_template": NAMED, "eos_token": {"content": "E", "lstrip": False}})
    )
    assert prompts(named) == ("dE", "tfunction")
    assert named.renders_tools
    assert not named.reads("tools", with_tools=False)
    only = ChatTemplate.load(folder(tmp_path, {"chat_template": NAMED[:1]}))
    assert prompts(only) == ("d", "d")
    assert not only.renders_tools
    beside = folder(tmp_path, {"chat_template": "x"}, chat_template__json=json.dumps({"chat_template": "j"}))
    assert prompts(ChatTemplate.load(beside)) == ("j", "j")
    own = folder(tmp_path, {"chat_template": "x"}, chat_template__jinja="o")
    assert prompts(ChatTemplate.load(own)) == ("o", "o")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("more")
    assert prompts(ChatTemplate.load(own)) == ("o", "more")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (None, "no chat template"),
        ([], "no chat template"),
        (NAMED[1:], "only templates named 'tool_use'"),
        (5, "neither a template nor a list"),
        ([5], "neither a template nor a list"),
        ([{"name": "default"}], "neither a template nor a list"),
        ([*NAMED, NAMED[0]], "neither a template nor a list"),
    ],
)
def test_no_usable_template(tmp_path: Path, declared: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate.load(folder(tmp_path, {"chat_template": declared}))


def other_model(source: str) -> Renderer:
    config = {"max_position_embeddings": 1000, "eos_token_id": 1}
    return Renderer(vocabulary=VOCABULARY, template=ChatTemplate(source, {}), config=config, generation={})


def test_effort_where_the_template_has_other_words() -> None:
    own = other_model("{{ reasoning_effort }}")
    assert VOCABULARY.spell(own.render(conversation([HI], reasoning_effort="high")).pieces[0]) == b"high"  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no such option") as refused:
        own.render(conversation([HI], chat_template_kwargs=THINKING))
    assert refused.value.param == "chat_template_kwargs.enable_thinking"
    with pytest.raises(InvalidRequest, match="no way to say so") as refused:
        other_model("{{ messages }}").render(conversation([HI], reasoning_effort="high"))
    assert refused.value.param == "reasoning_effort"


def test_a_template_that_thinks_by_default() -> None:
    """Published copies differ in the default; what the template does is what counts."""
    source = (MODEL_DIR / "chat_template.jinja").read_text().replace("is not none else false", "is not none else true")
    thinks = other_model(source)
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {}}, True),
    ]
    for fields, thinking in cases:
        prompt = thinks.render(conversation([HI], **fields))
        assert VOCABULARY.spell(prompt.pieces[-1]).decode().endswith(ASK) == thinking  # type: ignore[arg-type]
