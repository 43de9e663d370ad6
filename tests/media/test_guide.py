"""An answer that is held to a form has it, whatever the model would rather say and however little it may say."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from media.test_tools import LLAMA_3, MINISTRAL, MISTRAL, QWEN, read, text_with
from schemas import random_schema
from triptych.core.chat import Form, Tool
from triptych.errors import RequestError
from triptych.media.text import CallReader, Guides, Text
from triptych.media.text.guide import MAX_FORM_BYTES
from triptych.testing import END_ID, VOCAB, tiny_text

TEXT = tiny_text()
GUIDES = Guides(TEXT, VOCAB)
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
    },
)
TIME = Tool(name="get", parameters={})


def schema(value, **facts) -> Form:
    return Form(kind="schema", value=value, **facts)


def wander(form: Form, rng: random.Random, *, room: int = 200, tools: Sequence[Tool] = ()) -> str | None:
    """What a model says that knows nothing but what it may say; None where it does not come to its end."""
    said = spoken(form, rng, room, tools)
    return TEXT.detokenizer().push(said[:-1]) if said[-1] == END_ID else None


def spoken(form: Form, rng: random.Random, room: int, tools: Sequence[Tool] = ()) -> list[int]:
    matcher = GUIDES.compile(form, tools).start()
    said: list[int] = []
    while len(said) < room and END_ID not in said:
        token = int(rng.choice(np.flatnonzero(matcher.allowed())))
        said.append(matcher.take(token, room=room - len(said) - 1))
    return said


def takes(form: Form, text: str, tools: Sequence[Tool] = ()) -> bool:
    """Whether a text may be said, with its end."""
    matcher = GUIDES.compile(form, tools).start()
    for token in [*TEXT.spell(text), END_ID]:
        if not matcher.allowed()[token]:
            return False
        matcher.take(token, room=1000)
    return True


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**9))
def test_every_answer_is_valid_by_its_schema(seed: int):
    rng = random.Random(seed)
    asked = random_schema(rng, depth=2)
    answer = wander(schema(asked, is_strict=False), rng, room=600)
    assert answer is not None
    jsonschema.validate(json.loads(answer), asked, format_checker=FORMATS)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 40))
def test_an_answer_of_few_tokens_is_complete_too(seed: int, spare: int):
    rng = random.Random(seed)
    asked = schema(random_schema(rng, depth=1), is_strict=False)
    least = len(GUIDES.compile(asked).ending)
    answer = wander(asked, rng, room=least + spare)
    assert answer is not None
    jsonschema.validate(json.loads(answer), asked.value)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**9))
def test_an_answer_with_room_for_all_but_its_end_is_complete_as_well(seed: int):
    rng = random.Random(seed)
    asked = schema(random_schema(rng, depth=1), is_strict=False)
    said = spoken(asked, rng, len(GUIDES.compile(asked).ending) - 1)
    jsonschema.validate(json.loads(TEXT.detokenizer().push(said)), asked.value)


LONG = "affirmative, that is certainly what the picture shows"


@pytest.mark.parametrize(
    ("form", "least"),
    [
        (Form(kind="choice", value=[LONG, "no"]), 2),
        (Form(kind="choice", value=["abcdef", "abx"]), 3),
        (Form(kind="regex", value=f"({LONG}|no)"), None),
        (Form(kind="regex", value='("[a-z]{30}"|x)'), None),
        (Form(kind="regex", value="abc"), 3),
        (Form(kind="grammar", value=f'start: "{LONG}" | "no"'), None),
        (schema({"enum": [LONG, "no"]}), None),
        (schema({"anyOf": [{"const": LONG}, {"type": "integer"}]}), None),
        (schema({"type": "integer", "minimum": 2, "maximum": 10}), None),
        (schema({"enum": [12345, 7]}), None),
        (schema({"type": "object", "properties": {"ab": {"type": "string"}}, "required": ["ab"]}), len('{"ab":""}')),
        (Form(kind="json"), 2),
    ],
)
def test_the_shortest_answer_is_told_only_where_it_is_known(form: Form, least: int | None):
    assert GUIDES.compile(form).num_least == least


@pytest.mark.parametrize("choices", [[LONG, "no"], ["abcdefgh", "abx"], ["yes", "no"], ["y", "n"]])
def test_a_choice_that_fits_is_made_however_few_tokens_there_are(choices: list[str]):
    least = min(map(len, choices))
    for room in (least, least + 1):
        for seed in range(8):
            said = spoken(Form(kind="choice", value=choices), random.Random(seed), room)
            assert TEXT.detokenizer().push(token for token in said if token != END_ID) in choices


def test_an_end_that_one_spelling_alone_leads_to_is_found():
    addresses = schema({"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 2})
    for seed in range(20):
        assert len(json.loads(wander(addresses, random.Random(seed), room=60) or "[]")) >= 2
    for expression in ("a+b", "[a-z]+[0-9]:[a-z]+!", "(ab|ac)+;"):
        held = Form(kind="regex", value=expression)
        assert re.fullmatch(expression, wander(held, random.Random(1), room=25) or "")


def test_any_json_object_comes_to_its_end():
    for seed in range(20):
        assert isinstance(json.loads(wander(Form(kind="json"), random.Random(seed), room=40) or ""), dict)


def test_blanks_are_few():
    asked = schema({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False})
    for seed in range(30):
        assert re.fullmatch(r"(?:[^ \n]| (?! )|\n {0,32}(?! ))+", wander(asked, random.Random(seed)) or "")


def test_an_expression_a_choice_and_a_grammar_hold():
    assert re.fullmatch(
        "[0-9]{3}-[a-f]+", wander(Form(kind="regex", value="[0-9]{3}-[a-f]+"), random.Random(1), room=20) or ""
    )
    assert wander(Form(kind="choice", value=["ja", 'n"ein', "é\n"]), random.Random(2)) in ("ja", 'n"ein', "é\n")
    for grammar in ('start: "a" b+\nb: /[xy]/', 'root ::= "a" [xy]+'):
        assert re.fullmatch("a[xy]+", wander(Form(kind="grammar", value=grammar), random.Random(3), room=30) or "")


def test_a_control_token_in_a_form_is_plain_text():
    assert takes(Form(kind="choice", value=["<|im_end|>!"]), "<|im_end|>!")
    assert not set(TEXT.spell("<|im_end|>")) & TEXT.silent_ids


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (schema({"type": "strin"}), "strin"),
        (schema({"$ref": "http://example.org/x.json"}), "example.org"),
        (schema(False), "false"),
        (schema({"enum": []}), "empty"),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "."),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "string", "format": "colour"}), "colour"),
        (Form(kind="regex", value="(?=a)b"), "look-around"),
        (Form(kind="regex", value="(a"), "unclosed"),
        (Form(kind="grammar", value="start: nothing"), "nothing"),
        (Form(kind="grammar", value='root ::= "a" ('), "."),
        (Form(kind="grammar", value='start: s\ns: s "a"'), "."),
    ],
)
def test_a_form_that_cannot_be_held_is_refused_with_the_reason(form: Form, reason: str):
    with pytest.raises(RequestError, match=reason) as caught:
        GUIDES.compile(form)
    assert "state" not in caught.value.message
    assert len(caught.value.message) < 500


def test_what_cannot_be_held_of_a_schema_is_left_to_the_model_unless_it_is_strict():
    asked = {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "maxItems": 3}
    assert wander(schema(asked, is_strict=False), random.Random(0)) is not None


def test_an_expression_that_looks_around_is_left_to_the_model_too():
    odd = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": "^(?!x)a"}},
        "required": ["pattern"],
    }
    with pytest.raises(RequestError, match="look-around"):
        GUIDES.compile(schema(odd))
    assert wander(schema(odd, is_strict=False), random.Random(0)) is not None
    assert wander(Form(kind="tools", is_single=True), random.Random(0), tools=[Tool(name="f", parameters=odd)])
    as_value = {"const": {"pattern": "(?=a)"}}
    assert json.loads(wander(schema(as_value, is_strict=False), random.Random(0)) or "") == as_value["const"]


def test_a_form_too_large_is_refused_with_numbers():
    huge = {"enum": [f"{index:06}" for index in range(MAX_FORM_BYTES // 8)]}
    with pytest.raises(RequestError, match=f"{MAX_FORM_BYTES:,}"):
        GUIDES.compile(schema(huge))


def test_a_schema_nested_beyond_reason_is_refused():
    nested: dict = {"type": "integer"}
    for _ in range(5_000):
        nested = {"type": "array", "items": nested}
    with pytest.raises(RequestError):
        GUIDES.compile(schema(nested))


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "replace")), st.sampled_from(["regex", "grammar"]))
def test_any_text_for_a_form_is_held_or_refused(text: str, kind):
    try:
        guide = GUIDES.compile(Form(kind=kind, value=text))
    except RequestError:
        return
    assert guide.start().allowed().any()


def test_a_form_that_turns_out_to_be_too_complex_says_so_in_mid_answer():
    nested = Form(kind="grammar", value='start: a{1000}\na: b{1000}\nb: "x"{1000} "y"')
    with pytest.raises(RequestError, match="cannot be held"):
        wander(nested, random.Random(0), room=1_000)


def test_matchers_of_one_guide_do_not_know_of_one_another():
    guide = GUIDES.compile(Form(kind="choice", value=["ab", "cd"]))
    one, other = guide.start(), guide.start()
    one.take(TEXT.spell("a")[0], room=9)
    assert other.allowed()[TEXT.spell("c")[0]]
    assert not one.allowed()[TEXT.spell("c")[0]]


# ── calls of tools ─────────────────────────────────────────────────────────────────────────────────────────────

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
AUTO = Form(kind="tools", is_needed=False)


def test_free_text_stays_free_until_a_call_begins():
    assert takes(AUTO, 'Any {"text": 1}, even <tool_', [WEATHER])
    assert takes(AUTO, "", [WEATHER])
    assert takes(AUTO, f"Let me see.\n{CALL}", [WEATHER])
    assert not takes(AUTO, "<tool_call> no", [WEATHER])


@pytest.mark.parametrize(
    ("call", "is_taken"),
    [
        (CALL, True),
        (CALL.replace("get_weather", "get_whether"), False),
        (CALL.replace("Rom", "Constantinople"), False),  # maxLength
        (CALL.replace('{"city": "Rom"}', '{"unit": "c"}'), False),  # required
        (CALL.replace('"Rom"', '"Rom", "unit": "k"'), False),  # enum
        (CALL.replace('"Rom"', '"Rom", "more": 1'), False),  # not declared
        ('<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>', False),
    ],
)
def test_a_calls_name_and_arguments_are_held_to_the_tools(call: str, is_taken: bool):
    for needed in (True, False):
        assert takes(Form(kind="tools", is_needed=needed), call, [WEATHER, TIME]) is is_taken


def test_a_call_that_is_needed_is_all_there_is():
    needed = Form(kind="tools")
    assert takes(needed, CALL, [WEATHER])
    assert not takes(needed, "", [WEATHER])
    assert not takes(needed, f"Well: {CALL}", [WEATHER])


def test_calls_are_several_unless_one_is_asked_for():
    assert takes(Form(kind="tools"), f"{CALL}\n{CALL}", [WEATHER])
    assert not takes(Form(kind="tools", is_single=True), f"{CALL}\n{CALL}", [WEATHER])


def test_only_the_tools_that_are_named_may_be_called():
    assert not takes(Form(kind="tools", value=("get",)), CALL, [WEATHER, TIME])
    assert takes(Form(kind="tools", value=("get_weather",)), CALL, [WEATHER, TIME])


def test_an_answer_that_calls_nothing_may_have_a_form_too():
    either = Form(
        kind="tools",
        is_needed=False,
        otherwise=schema({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}),
    )
    assert takes(either, CALL, [WEATHER])
    assert takes(either, '{"a": 1}', [WEATHER])
    assert not takes(either, "free text", [WEATHER])


@pytest.mark.parametrize(
    "form",
    [
        Form(kind="choice", value=["ja", "nein"]),
        Form(kind="regex", value="ja|n[^/]*n"),
        Form(kind="grammar", value='start: "ja" | call\ncall: "nein"'),
        Form(kind="grammar", value='root ::= "ja" | "nein"'),
        schema({"enum": ["ja"]}),
    ],
)
def test_that_form_may_be_of_any_kind(form: Form):
    either = Form(kind="tools", is_needed=False, otherwise=form)
    words = '"ja"' if form.kind == "schema" else "ja"
    assert takes(either, words, [WEATHER])
    assert takes(either, CALL, [WEATHER])
    assert not takes(either, "jein", [WEATHER])
    assert wander(either, random.Random(0), room=60, tools=[WEATHER]) is not None


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**9))
def test_calls_of_any_schema_come_to_their_end(seed: int):
    rng = random.Random(seed)
    tool = Tool(name="do", parameters=random_schema(rng, depth=1))
    answer = wander(Form(kind="tools", is_single=True), rng, room=5_000, tools=[tool])
    assert answer is not None
    call = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    jsonschema.validate(call["arguments"], dict(tool.parameters))


# ── other tokenizers ───────────────────────────────────────────────────────────────────────────────────────────


def sentencepiece(*specials: str, template: str | None = None) -> Text:
    """Llama 2's kind: a blank before every text, which the decoder takes away."""
    letters = '▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>|/_0123456789.,!?é{}[]":'
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "</s>": 257}
    vocab |= {token: 258 + index for index, token in enumerate([*letters, '▁{"', '▁"', '":', "▁[", "ab", "▁ab"])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("a", "b"), ("▁", "ab")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("</s>", *specials)])
    return Text(tokenizer, template, eos_ids=(257,))


def wander_in(text: Text, form: Form, seed: int, tools: Sequence[Tool] = ()) -> str:
    rng = random.Random(seed)
    matcher = Guides(text, 400).compile(form, tools).start()
    said: list[int] = []
    for room in range(300, -1, -1):
        said.append(matcher.take(int(rng.choice(np.flatnonzero(matcher.allowed()))), room=room))
        if said[-1] == 257:
            break
    assert said[-1] == 257 or not form.is_needed, "only free text may be cut"
    return text.detokenizer(shown=text.call_syntax.words).push(token for token in said if token != 257)


def test_a_blank_that_a_decoder_takes_away_breaks_no_form():
    asked = {"type": "object", "properties": {"a": {"enum": [" x", "ab"]}}, "required": ["a"]}
    for seed in range(10):
        jsonschema.validate(json.loads(wander_in(sentencepiece(), schema(asked), seed)), asked)
        assert wander_in(sentencepiece(), Form(kind="choice", value=["ab", " b"]), seed) in ("ab", " b")
        grammar = Form(kind="grammar", value='start: "ab" /[0-9]{2}/')
        assert re.fullmatch("ab[0-9]{2}", wander_in(sentencepiece(), grammar, seed))


@pytest.mark.parametrize(
    ("template", "specials"),
    [
        (MISTRAL, ["[TOOL_CALLS]"]),
        (MINISTRAL, ["[TOOL_CALLS]", "[ARGS]"]),
        (QWEN, ["<tool_call>", "</tool_call>"]),
        (QWEN, []),
    ],
)
@pytest.mark.parametrize("needed", [True, False])
def test_the_words_of_a_syntax_may_be_special_tokens(template: str, specials: list[str], needed: bool):
    text = sentencepiece(*specials, template=template)
    asked = Form(kind="tools", is_needed=needed)
    for seed in range(5):
        said, calls = summed(text, wander_in(text, asked, seed, [WEATHER]))
        assert {name for name, _ in calls} <= {"get_weather"}
        assert bool(calls) or not needed
        for _, arguments in calls:
            jsonschema.validate(json.loads(arguments), dict(WEATHER.parameters))
        assert not needed or said == ""


def summed(text: Text, answer: str) -> tuple[str, list[tuple[str, str]]]:
    return read(CallReader(text.call_syntax), [answer])


def test_a_llama_may_say_anything_but_a_call_that_is_none():
    text = text_with(LLAMA_3)
    guides = Guides(text, VOCAB)
    for said, is_taken in (
        ('{"name": "get_weather", "parameters": {"city": "Rom"}}', True),
        ('{"name": "get_whether", "parameters": {"city": "Rom"}}', False),
        ('{"city": "Rom"}', True),
        ("It is dry.", True),
    ):
        matcher = guides.compile(AUTO, [WEATHER]).start()
        ids = [*text.spell(said), END_ID]
        assert all(matcher.allowed()[token] and matcher.take(token, room=999) == token for token in ids) is is_taken


def test_a_llamas_calls_could_not_be_told_from_an_answer_in_json():
    either = Form(kind="tools", is_needed=False, otherwise=Form(kind="json"))
    with pytest.raises(RequestError, match="could not be told"):
        Guides(text_with(LLAMA_3), VOCAB).compile(either, [WEATHER])
