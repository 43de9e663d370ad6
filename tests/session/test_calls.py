"""Calls of tools in an answer's stream; tools in a prompt."""

from __future__ import annotations

import pytest

from triptych.core.chat import Chat, Form, Message, TextPart, Tool
from triptych.core.request import Delta, FinishReason, Sampling, Timing, Usage
from triptych.errors import ContextError, RequestError
from triptych.media.text.tools import HERMES
from triptych.session import Ending
from triptych.session.answer import Stream
from triptych.testing import END_ID, plan, tiny_session, tiny_text

USAGE = Usage(prompt_tokens=1, cached_tokens=0, image_tokens=0, completion_tokens=1)
TIMING = Timing(queue_s=0, encode_s=0, prefill_s=0, decode_s=0)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = Tool(name="f", description="does it", parameters={"properties": {"a": {"type": "integer"}}})


def heard(said: str, *, ending: Ending | None = None, finish: FinishReason = FinishReason.STOP) -> list:
    """A stream's deltas where a model writes this, byte by byte."""
    text = tiny_text()
    stream = Stream("a", text, ending or Ending(), lambda id: None, HERMES)
    for token in text.spell(said):
        stream.push(Delta(request_id="a", token_ids=(token,)))
    last = (END_ID,) if finish is FinishReason.STOP else ()
    stream.push(Delta(request_id="a", token_ids=last, finish=finish, usage=USAGE, timing=TIMING))
    return list(stream)


def summed(deltas: list) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", []
    for delta in deltas:
        assert not (delta.text and calls), "what is said comes before what is called"
        text += delta.text
        for call in delta.calls:
            if call.name is not None:
                assert call.id
                calls.append((call.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    return text, calls


def test_text_and_calls_come_apart():
    assert summed(heard("I look. " + CALL)) == ("I look.", [("f", '{"a": 1}')])
    assert summed(heard(f"{CALL}\n{CALL}")) == ("", [("f", '{"a": 1}')] * 2)
    assert summed(heard("No call <tool> here")) == ("No call <tool> here", [])


def test_each_call_has_an_id_of_its_own():
    ids = [call.id for delta in heard(f"{CALL}\n{CALL}") for call in delta.calls if call.id]
    assert len(set(ids)) == 2


def test_a_stop_string_ends_what_is_said_and_no_call():
    stop = Ending(stop=["\n", "name", "look"])
    assert summed(heard(CALL, ending=stop)) == ("", [("f", '{"a": 1}')])
    deltas = heard("I look. " + CALL, ending=stop)
    assert summed(deltas) == ("I ", [])
    assert deltas[-1].stop_reason == "look"


def test_the_beginning_of_a_stop_string_is_said_when_a_call_follows():
    assert summed(heard("I lo" + CALL, ending=Ending(stop=["look"]))) == ("I lo", [("f", '{"a": 1}')])


def test_an_answer_cut_off_in_a_call_keeps_what_came():
    deltas = heard(CALL[:45], finish=FinishReason.LENGTH)
    assert summed(deltas) == ("", [("f", '{"a": ')])
    assert deltas[-1].finish is FinishReason.LENGTH


def chat(*texts: str) -> Chat:
    return Chat(messages=tuple(Message(role="user", parts=(TextPart(text=text),)) for text in texts), tools=(TOOL,))


def test_a_whole_answer_has_its_calls():
    with tiny_session(plan(max_model_len=2048, num_blocks=512)) as session:
        prompt = session.prepare_chat(chat("do it"), form=Form(kind="tools", is_single=True))
        answer = session.start(prompt, Sampling(max_tokens=100, temperature=0.0), request_id="a").answer()
        assert answer.text == ""
        assert [call.name for call in answer.calls] == ["f"]
        assert answer.finish is FinishReason.STOP


def test_tools_are_never_forgotten():
    with tiny_session(plan(kv_budget=0.5, max_model_len=2048, num_blocks=512)) as session:
        prompt = session.prepare_chat(chat("?"))
        kept = session.text.detokenizer().push(prompt.token_ids[: prompt.num_protected].tolist())
        assert "does it" in kept
        assert "?" not in kept


def test_tools_count_as_text_of_the_prompt():
    with tiny_session() as session, pytest.raises(ContextError, match="characters"):
        session.prepare_chat(Chat(messages=chat("?").messages, tools=(Tool(name="f", description="a" * 200_000),)))


def test_a_form_is_refused_before_the_prompt_is_looked_at():
    with tiny_session() as session, pytest.raises(RequestError, match="strin"):
        session.prepare_chat(chat("?"), form=Form(kind="schema", value={"type": "strin"}))


def test_a_question_may_ask_for_a_form():
    with tiny_session() as session:
        answer = session.ask("yes or no?", form=Form(kind="choice", value=["yes", "no"]), max_tokens=9)
        assert answer.text in ("yes", "no")
        with pytest.raises(RequestError, match=r"takes \d+ tokens, at most 2"):
            session.ask("who?", form=Form(kind="choice", value=["a long word"]), max_tokens=2)
