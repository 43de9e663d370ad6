"""A form that would end the server's process, or fill its memory, ends a process of its own."""

from __future__ import annotations

import contextlib
import json
import random
import time

import pytest

from media.test_guide import GUIDES, schema, wander
from triptych.core.chat import Form, Tool
from triptych.errors import RequestError
from triptych.media.text import guide as guides
from triptych.media.text.rehearsal import rehearse
from triptych.testing import END_ID

LEAF = {"type": "string", "pattern": "a*b"}


def rules(number: int) -> str:
    return "start: r0\n" + "".join(f'r{at}: "a" r{at + 1} | "b"\n' for at in range(number)) + f'r{number}: "c"\n'


def doubled(number: int) -> dict:
    """Each definition is the next one twice: merged, two to the power of `number` of them."""
    defs = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(number)}
    return {"$defs": defs | {f"d{number}": LEAF}, "$ref": "#/$defs/d0"}


def chained(number: int) -> dict:
    """A reference to a reference, and so on, further than any stack reaches."""
    defs = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(number)}
    return {"$defs": defs | {f"d{number}": LEAF}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "form",
    [
        Form(kind="grammar", value=rules(3000)),
        Form(kind="grammar", value="start: A\nA: " + "B " * 500 + "\nB: /" + "x*" * 500 + "/"),
        Form(kind="regex", value="x*" * 50_000),
        schema(chained(3000)),
        schema(doubled(60)),
        schema(doubled(60), is_strict=False),
        Form(kind="tools", otherwise=None, is_needed=False),
    ],
    ids=["rules", "square", "regex", "chain", "merged", "merged, not strict", "tool"],
)
def test_a_form_that_would_bring_the_process_down_is_refused_and_the_next_one_is_held(form):
    with pytest.raises(RequestError, match="more time or memory"):
        GUIDES.compile(form, [Tool(name="f", parameters=doubled(60))])
    assert json.loads(wander(schema({"const": 1}), random.Random(0)) or "") == 1


@pytest.mark.parametrize("form", [Form(kind="grammar", value=rules(50)), schema(chained(50))])
def test_what_people_write_passes(form):
    assert GUIDES.compile(form).start().allowed().any()


def test_what_is_wrong_is_told_by_the_rehearsal_too():
    with pytest.raises(ValueError, match="unknown name"):
        rehearse("start: nowhere")


def test_llama_cpps_grammars_are_held_too_and_broken_ones_refused():
    form = Form(kind="grammar", value='root ::= "yes" | "no" more\nmore ::= "!"*\n')
    assert str(wander(form, random.Random(0))).rstrip("!") in ("yes", "no")
    with pytest.raises(RequestError, match="no GBNF"):
        GUIDES.compile(Form(kind="grammar", value="root ::= ("))


@pytest.mark.parametrize("value", ["root ::= a" + "\n" * 120_000, "\n" * 120_000, " \n" * 60_000 + "start: /a/"])
def test_blanks_without_end_keep_nobody_waiting(value):
    """llguidance's own look at what kind of grammar it is takes minutes for these, and the lock of Python with it."""
    began = time.process_time()
    with contextlib.suppress(RequestError):
        GUIDES.compile(Form(kind="grammar", value=value))
    assert time.process_time() - began < 5


def test_a_rehearsal_does_not_mind_tokens_of_another_vocabulary():
    rehearse('start: "a" <[49000]>')


def test_a_form_is_rehearsed_once(monkeypatch):
    form = Form(kind="grammar", value='start: "once"')
    GUIDES.compile(form)
    monkeypatch.setattr("subprocess.run", None)
    GUIDES.compile(form)


def test_references_in_any_order_are_looked_at_in_a_moment():
    """Each but the last ends because of the one after it."""
    defs = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}, "minItems": 1} for at in range(3000)}
    found = schema({"$defs": defs | {"d3000": LEAF}, "$ref": "#/$defs/d0"})
    with pytest.raises(RequestError, match="more time or memory|recursion|bytes, the limit"):
        GUIDES.compile(found)


def test_masks_that_cost_too_much_end_their_request_and_are_paid_by_all_its_answers_together(monkeypatch):
    monkeypatch.setattr(guides, "MASK_S", -guides.SPARE_S / 5)  # as if each took that long
    guide = GUIDES.compile(Form(kind="regex", value="[a-z]{1,50}"))
    answers = [guide.start() for _ in range(3)]

    def go_on() -> None:
        for answer in answers * 3:
            token = next(token for token, may in enumerate(answer.allowed()) if may and token != END_ID)
            answer.take(token, room=1000)

    with pytest.raises(RequestError, match="ms each to choose from"):
        go_on()
