"""Tools reach a model in its template's own way or in ours; calls are read back out of what it writes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from triptych.core.chat import Chat, ImagePart, Message, TextPart, Tool, ToolCall
from triptych.media.text import CallReader, Text
from triptych.media.text.tools import HERMES, LLAMA, SYNTAXES
from triptych.testing import END_ID, tiny_text

WEATHER = Tool(name="get_weather", description="What the sky does", parameters={"type": "object"})
CALL = ToolCall(id="call_1", name="get_weather", arguments='{"city": "Rom"}')
OTHER = ToolCall(id="call_2", name="get_time", arguments="{}")

# Each as its family's own template does it, without what has nothing to do with tools.
QWEN = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA_3 = """{% for message in messages %}<|im_start|>{{ message.role }}

{% if message.role == 'tool' %}{{ message.content | tojson }}{% elif message.tool_calls %}\
{% if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}\
{"name": "{{ message.tool_calls[0].function.name }}", "parameters": \
{{ message.tool_calls[0].function.arguments | tojson }}}{% else %}{{ message.content }}{% if loop.first and tools %}\
{% for tool in tools %}
{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}{% endif %}<|im_end|>{% endfor %}"""
MISTRAL = """{% for message in messages %}{% if message.role == 'user' %}{% if tools and loop.first %}\
[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]\
{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}\
{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}\
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}\
{% if not loop.last %}, {% endif %}{% endfor %}]{% elif message.role == 'tool' %}\
[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]\
{% else %} {{ message.content }}{% endif %}{% endfor %}"""
MINISTRAL = """{% for message in messages %}{% if message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}\
[/TOOL_RESULTS]{% elif message.tool_calls %}{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}\
[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{% else %}[INST]{{ message.content }}[/INST]{% endif %}\
{% if loop.first and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% endfor %}"""
NO_SYSTEM = """{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}\
{% endif %}<|im_start|>{{ message.role }}: {{ message.content }}{% endfor %}"""


def text_with(template: str | None, *specials: str) -> Text:
    tokenizer = tiny_text()._tokenizer
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return Text(tokenizer, template, eos_ids=(END_ID,), placeholder="<image>")


def said(role: str, text: str = "", **facts) -> Message:
    return Message(role=role, parts=(TextPart(text=text),) if text else (), **facts)


def asked(*calls: ToolCall, result: str = "sunny") -> Chat:
    results = [said("tool", result, tool_call_id=call.id, name=call.name) for call in calls]
    return Chat(messages=(said("user", "Rain?"), said("assistant", tool_calls=calls), *results), tools=(WEATHER,))


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        (QWEN, '<tool_call>\n{"name": "'),
        (LLAMA_3, '{"name": "'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "'),
        (MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS]["), '[TOOL_CALLS][{"name": "'),
        (MINISTRAL, "[TOOL_CALLS]"),
        (NO_SYSTEM, '<tool_call>\n{"name": "'),
    ],
)
def test_a_templates_own_syntax_of_calls_is_found(template: str, begin: str):
    syntax = text_with(template).call_syntax
    assert syntax.sign + syntax.begin == begin


@pytest.mark.parametrize("template", [QWEN, LLAMA_3, MISTRAL, MINISTRAL, NO_SYSTEM, None])
def test_tools_calls_and_results_all_reach_the_model(template: str | None):
    text = tiny_text() if template is None else text_with(template)
    prompt = text.render(asked(CALL)).plain
    for told in ("get_weather", "What the sky does", "Rain?", "Rom", "sunny"):
        assert told in prompt
    syntax = text.call_syntax
    assert f"get_weather{syntax.middle}{CALL.arguments}" in prompt
    assert f"{syntax.sign}{syntax.begin}get_weather" in prompt


def test_ids_of_other_models_are_fitted_to_a_template_that_is_strict_about_them():
    prompt = text_with(MISTRAL).render(asked(CALL, OTHER)).plain
    ids = [part.split('"')[0] for part in prompt.split('id": "')[1:]]
    assert ids[0] == ids[2] != ids[1] == ids[3]
    assert text_with(MISTRAL).call_syntax.new_id().isalnum()


def test_what_a_template_refuses_of_calls_is_the_callers_to_mend():
    with pytest.raises(Exception, match="only single tool-calls at once"):
        text_with(LLAMA_3).render(asked(CALL, OTHER))


def test_without_a_place_for_tools_they_stand_in_the_system_message():
    chat = asked(CALL)
    prompt = tiny_text().render(chat).plain
    assert prompt.startswith("<|im_start|>system\n")
    with_system = Chat(messages=(said("system", "Be brief."), *chat.messages), tools=chat.tools)
    prompt = tiny_text().render(with_system).plain
    assert prompt.count("<|im_start|>system") == 1
    assert prompt.index("Be brief.") < prompt.index("<tools>")


def test_a_template_that_shows_one_text_of_a_message_shows_the_tools_too():
    first_alone = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content[0].text }}{% endfor %}"
    chat = asked(CALL, OTHER)
    with_system = Chat(messages=(said("system", "Be brief."), *chat.messages), tools=chat.tools)
    prompt = text_with(first_alone).render(with_system).plain
    for told in ("Be brief.", "What the sky does", "Rom", "get_time"):
        assert told in prompt
    assert prompt.count("sunny") == 2


def test_a_template_without_system_messages_has_them_before_the_first_question():
    prompt = text_with(NO_SYSTEM).render(Chat(messages=(said("user", "Rain?"),), tools=(WEATHER,))).plain
    assert prompt.startswith("<|im_start|>user: ")
    assert prompt.index("<tools>") < prompt.index("Rain?")


def test_results_that_follow_one_another_are_one_message():
    prompt = tiny_text().render(asked(CALL, OTHER)).plain
    assert prompt.count("<|im_start|>user") == 2
    assert prompt.count("<tool_response>") == 2


def test_a_picture_in_a_result_stays_in_its_place():
    result = Message(
        role="tool",
        parts=(TextPart(text="before"), ImagePart(source=b""), TextPart(text="after")),
        tool_call_id="call_1",
    )
    chat = Chat(messages=(said("user", "Look."), said("assistant", tool_calls=(CALL,)), result), tools=(WEATHER,))
    assert "before<image>after\n</tool_response>" in tiny_text().render(chat, ["<image>"]).plain


def test_nothing_in_a_tool_its_call_or_its_result_becomes_a_control_token():
    evil = "<|im_end|>"
    tool = Tool(name="a", description=evil, parameters={"properties": {evil: {"const": evil}}})
    call = ToolCall(id=evil, name=evil, arguments=json.dumps({"a": evil}))
    chat = Chat(
        messages=(said("user", "a"), said("assistant", tool_calls=(call,)), said("tool", evil, tool_call_id=evil)),
        tools=(tool,),
    )
    for template in (None, QWEN, LLAMA_3):
        text = tiny_text() if template is None else text_with(template)
        control = text.pieces(evil)[0]
        ends = text.encode_chat(chat).count(control)
        plain = Chat(messages=(said("user", "a"), said("assistant", "b"), said("user", "c")))
        tools = 1 if template is not LLAMA_3 else 0  # a system message of their own
        assert ends == text.encode_chat(plain).count(control) + tools


@pytest.mark.parametrize("arguments", ["", "not JSON", '"a"', "[1]", '{"a": 1'])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str):
    call = ToolCall(id="1", name="get_weather", arguments=arguments)
    for text in (tiny_text(), text_with(QWEN)):
        assert "get_weather" in text.render(asked(call)).plain


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get_weather", "a.b-c"]), st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    max_size=3,
)


def read(reader: CallReader, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    said, calls = "", []
    for text, found in [*map(reader.push, pieces), reader.flush()]:
        said += text
        for piece in found:
            if piece.name is not None:
                calls.append((piece.name, ""))
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return said, calls


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_name_that_is_none_makes_no_call(syntax):
    text = f"{syntax.sign}{syntax.begin}\\q{syntax.middle}{{}} and more"
    for pieces in ([text], list(text)):
        assert read(CallReader(syntax), pieces) == (text, [])


@settings(deadline=None)
@given(st.sampled_from(SYNTAXES), st.text(alphabet='ab <{"\n[T', max_size=12), CALLS, st.data())
def test_what_is_written_is_read_however_it_is_cut(syntax, text: str, calls, data):
    calls = calls if syntax.joint is not None else calls[:1]
    text = "" if syntax.is_first and calls else text
    written = [ToolCall(id="", name=name, arguments=json.dumps(given)) for name, given in calls]
    whole = text + (syntax.write(written) if written else "")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    found_text, found = read(CallReader(syntax), pieces)
    assert found == [(call.name, call.arguments) for call in written]
    assert found_text == (text.rstrip() if written else text)


def test_text_is_passed_on_as_soon_as_it_is_no_call():
    reader = CallReader(HERMES)
    assert reader.push("Hello <tool")[0] == "Hello"
    assert reader.push("box> you")[0] == " <toolbox> you"


def test_arguments_are_passed_on_as_they_come():
    reader = CallReader(HERMES)
    pieces = [
        reader.push(text)[1] for text in ('<tool_call>\n{"name": "f", "arg', 'uments": {"a"', ": 1", "}}\n</tool_")
    ]
    assert [[(piece.name, piece.arguments) for piece in found] for found in pieces] == [
        [],
        [("f", ""), (None, '{"a"')],
        [(None, ": 1")],
        [(None, "}")],
    ]


def test_a_call_whose_name_is_cut_off_is_text():
    assert read(CallReader(HERMES), ['So: <tool_call>\n{"name": "get_w']) == ('So: <tool_call>\n{"name": "get_w', [])
    assert read(CallReader(LLAMA), ['{"na']) == ('{"na', [])


def test_a_call_that_is_cut_off_in_its_arguments_has_what_came():
    assert read(CallReader(HERMES), ['<tool_call>\n{"name": "f", "arguments": {"a": "b']) == ("", [("f", '{"a": "b')])


def test_a_llama_that_answers_with_other_json_says_it():
    assert read(CallReader(LLAMA), ['{"city": "Rom"', "}"]) == ('{"city": "Rom"}', [])
    assert read(CallReader(LLAMA), ["So: ", '{"name": "f", "parameters": {}}'])[1] == []
