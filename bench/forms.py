"""Answers held to random schemas and calls of random tools: how many are valid, how long masks take.

usage: python bench/forms.py [BUNDLE|demo] --json bench/results/forms.json

Each schema is the form of an answer drawn at temperature 1, with few tokens to say it in; some are asked once more
without. The judge is `jsonschema`. Masks are timed on the answers that came, one matcher at a time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import record

from triptych import Session
from triptych.core.chat import Chat, Form, Message, TextPart, Tool
from triptych.core.request import FinishReason, Sampling
from triptych.engine.config import EngineConfig
from triptych.errors import OverloadError
from triptych.media.text import Guides
from triptych.media.text.guide import WATCHED
from triptych.session.answer import Answer, Stream

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from schemas import random_schema  # noqa: E402

AT_ONCE = 16
ROOM = (20, 80)  # tokens of an answer, besides the least that its form takes
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "uuid"])


@dataclass
class Tally:
    """What came of one kind of question."""

    valid: list[bool] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def take(self, answer: Answer, text: str, schema: dict[str, Any]) -> None:
        try:
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
            self.valid.append(True)
        except (ValueError, jsonschema.ValidationError) as error:
            self.valid.append(False)
            self.faults.append(f"{str(error).splitlines()[0][:100]}: {text[:200]}")
        self.stopped.append(answer.finish is FinishReason.STOP)
        self.num_tokens += len(answer.token_ids)


@dataclass(frozen=True)
class Question:
    seed: int
    schema: dict[str, Any]
    is_call: bool = False

    @property
    def form(self) -> Form:
        if self.is_call:
            return Form(kind="tools", is_single=True)
        return Form(kind="schema", value=self.schema, is_strict=False)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (Tool(name="file_record", parameters=self.schema),) if self.is_call else ()

    def begin(self, session: Session, *, is_held: bool) -> Stream:
        text = "File a record of something you like."
        chat = Chat(messages=(Message(role="user", parts=(TextPart(text=text),)),), tools=self.tools)
        prompt = session.prepare_chat(chat, form=self.form if is_held else None)
        least = 0 if prompt.guide is None else prompt.guide.num_least or 0
        room = min(least + random.Random(self.seed).randint(*ROOM), session.context_of(prompt) - prompt.num_tokens)
        sampling = Sampling(max_tokens=room, temperature=1.0, seed=self.seed)
        while True:
            try:
                return session.start(prompt, sampling, request_id=f"{self.seed}-{is_held}-{self.is_call}")
            except OverloadError as error:  # a machine that is busy with other things
                time.sleep(error.retry_after_s)


def ask(session: Session, questions: Sequence[Question], *, is_held: bool) -> Iterator[tuple[Question, Answer]]:
    for start in range(0, len(questions), AT_ONCE):
        some = questions[start : start + AT_ONCE]
        streams = [question.begin(session, is_held=is_held) for question in some]
        yield from zip(some, [stream.answer() for stream in streams], strict=True)
        print(f"{start + len(some)} of {len(questions)}", file=sys.stderr, flush=True)


def time_masks(guides: Guides, question: Question, token_ids: Sequence[int]) -> tuple[float, list[float], list[float]]:
    """Milliseconds to compile the form; microseconds of each token's mask, far from the last and near to it."""
    began = time.perf_counter()
    guide = guides.compile(question.form, question.tools)
    compile_ms = 1e3 * (time.perf_counter() - began)
    far, near = list[float](), list[float]()
    for spent, room in ((far, 1_000_000), (near, WATCHED - 1)):
        matcher = guide.start()
        for token in token_ids:
            began = time.perf_counter()
            matcher.allowed()
            matcher.take(token, room=room)
            spent.append(1e6 * (time.perf_counter() - began))
    return compile_ms, far, near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", default="demo")
    parser.add_argument("--count", type=int, default=200, help="schemas, and a quarter as many tools")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    schemas = [random_schema(random.Random(seed)) for seed in range(asked.count)]
    questions = [Question(seed, schema) for seed, schema in enumerate(schemas)]
    calls = [Question(seed, schema, is_call=True) for seed, schema in enumerate(schemas[: asked.count // 4])]
    held, free, called = Tally(), Tally(), Tally()
    compiled, far, near = list[float](), list[float](), list[float]()
    with Session.open(asked.bundle, config=EngineConfig(num_threads=1)) as session:
        guides = Guides(session.text, session.manifest.spec.decoder.vocab_size)
        for question, answer in ask(session, questions, is_held=True):
            held.take(answer, answer.text, question.schema)
            compile_ms, *masks = time_masks(guides, question, answer.token_ids)
            compiled.append(compile_ms)
            far += masks[0]
            near += masks[1]
        for question, answer in ask(session, calls, is_held=True):
            called.take(answer, answer.calls[0].arguments if answer.calls else "", question.schema)
        for question, answer in ask(session, questions[: asked.count // 10], is_held=False):
            free.take(answer, answer.text, question.schema)
    for fault in held.faults + called.faults:
        print(fault, file=sys.stderr)
    write(asked.json, {"held": held, "called": called, "free": free}, {"compile": compiled, "far": far, "near": near})


def write(path: Path, tallies: dict[str, Tally], times: dict[str, list[float]]) -> None:
    share = {name: sum(tally.valid) / len(tally.valid) for name, tally in tallies.items()}
    measures = [
        record.measure("form compiled, with its shortest answer", "a schema", "ms", times["compile"]),
        record.measure("mask and step of one answer", "far from its last token", "µs", times["far"]),
        record.measure("mask and step of one answer", "its end kept in reach", "µs", times["near"]),
        record.measure("valid answers, no form", "the same question", "share", [share["free"]]),
    ]
    held, called = tallies["held"], tallies["called"]
    targets = [
        record.Target(name="valid answers", value=share["held"], unit="share", at_least=1.0),
        record.Target(name="valid arguments of calls", value=share["called"], unit="share", at_least=1.0),
        record.Target(
            name="answers that ended by themselves",
            value=sum(held.stopped + called.stopped) / len(held.stopped + called.stopped),
            unit="share",
            at_least=1.0,
        ),
    ]
    settings = {
        name: {"questions": len(tally.valid), "valid": sum(tally.valid), "stopped": sum(tally.stopped),
               "tokens": tally.num_tokens}
        for name, tally in tallies.items()
    }  # fmt: skip
    record.write(path, record.record("forms", measures, targets, settings))
    print(json.dumps(settings | {"share": share}))


if __name__ == "__main__":
    main()
