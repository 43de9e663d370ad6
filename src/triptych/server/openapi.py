"""What `/openapi.json` says, made of the records that bodies become and answers come from."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from triptych.core.policy import Compression
from triptych.server.about import VERSION, Health, ModelCard, ModelList, Version
from triptych.server.answer import JsonAnswer
from triptych.server.anthropic.answers import MessageAnswer, TokenCount
from triptych.server.anthropic.bodies import COUNT, MESSAGES
from triptych.server.body import Fields
from triptych.server.dashboard import Glance
from triptych.server.inspect import InspectionAnswer
from triptych.server.openai.answers import Answer, ChoiceAnswer, TextChoice
from triptych.server.openai.fields import CHAT, COMPLETION, MESSAGE
from triptych.server.props import Props
from triptych.server.refusals import MESSAGES_PATH, ErrorBody, MessagesErrorBody
from triptych.server.responses.answers import ResponseAnswer
from triptych.server.responses.bodies import RESPONSES
from triptych.server.tokens import DETOKENIZE, TOKENIZE, DetokenizeAnswer, TokenizeAnswer

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"
REFUSALS = {
    400: "The request must change.",
    401: "No API key, or a wrong one.",
    403: "A web page that may not ask this server.",
    404: "A model that is not served.",
    413: "The body is too large.",
    415: "A body that was packed.",
    429: "Too much at once; Retry-After says when to come back.",
    500: "The server's fault.",
    503: "The server is stopping.",
    504: "Not answered in time.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path. answer: None where it is plain text; bodies: any of them will do."""

    path: str
    summary: str
    answer: type[msgspec.Struct] | None
    bodies: tuple[Fields[Any], ...] = ()
    streams: bool = False
    choice: type[msgspec.Struct] | None = None  # what an `Answer` has several of

    @property
    def method(self) -> str:
        return "post" if self.bodies else "get"


OPERATIONS = (
    Operation(path="/v1/chat/completions", summary="Continue a conversation of texts and pictures", answer=Answer,
              bodies=(CHAT,), streams=True, choice=ChoiceAnswer),
    Operation(path="/v1/completions", summary="Continue a text", answer=Answer, bodies=(COMPLETION,), streams=True,
              choice=TextChoice),
    Operation(path="/v1/responses", summary="Continue a conversation, OpenAI's newer shape", answer=ResponseAnswer,
              bodies=(RESPONSES,), streams=True),
    Operation(path="/v1/messages", summary="Continue a conversation, Anthropic's shape", answer=MessageAnswer,
              bodies=(MESSAGES,), streams=True),
    Operation(path="/v1/messages/count_tokens", summary="Count a conversation's tokens", answer=TokenCount,
              bodies=(COUNT,)),
    Operation(path="/v1/media/inspect", summary="What would become of a chat's pictures", answer=InspectionAnswer,
              bodies=(CHAT,)),
    Operation(path="/tokenize", summary="A text's or a chat's token ids", answer=TokenizeAnswer,
              bodies=(TOKENIZE, CHAT)),
    Operation(path="/detokenize", summary="Token ids' text", answer=DetokenizeAnswer, bodies=(DETOKENIZE,)),
    Operation(path="/v1/models", summary="What is served", answer=ModelList),
    Operation(path="/v1/models/{name}", summary="One of what is served", answer=ModelCard),
    Operation(path="/props", summary="What the server can do, and where", answer=Props),
    Operation(path="/health", summary="Whether the engine moves", answer=Health),
    Operation(path="/stats", summary="The server at one moment", answer=Glance),
    Operation(path="/version", summary="Triptych's version", answer=Version),
    Operation(path="/metrics", summary="For Prometheus", answer=None),
)  # fmt: skip


async def openapi(request: Request) -> Response:
    """`GET /openapi.json`."""
    return JsonAnswer(document())


@functools.cache
def document() -> Schema:
    schemas, names = _schemas()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triptych", "version": VERSION},
        "paths": {one.path: {one.method: _operation(one, names)} for one in OPERATIONS},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _schemas() -> tuple[dict[str, Schema], dict[Any, Schema]]:
    """Every record's schema by its name, and a reference to it by its type."""
    fields = {one.record: one for operation in OPERATIONS for one in operation.bodies} | {MESSAGE.record: MESSAGE}
    answers = {one.answer for one in OPERATIONS} | {one.choice for one in OPERATIONS}
    types = [*fields, *filter(None, answers), ErrorBody, MessagesErrorBody, Compression]
    found, schemas = msgspec.json.schema_components(types, ref_template=REFERENCE)
    names: dict[Any, Schema] = dict(zip(types, found, strict=True))
    for record, one in fields.items():
        _name_refused(schemas[_name(names[record])], one)
    for schema in schemas.values():
        for property in schema.get("properties", {}).values():
            _portable(property)
    share = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}
    schemas["Compression"]["properties"] |= {"keep_visual": share, "kv_budget": share}
    schemas["Compression"]["additionalProperties"] = {"type": "null"}
    schemas["InputMessage"]["required"].remove("type")  # what has a role is a message
    return schemas, names


def _name_refused(schema: Schema, fields: Fields[Any]) -> None:
    """Add the fields that no record has: those that change nothing, and those with the values that ask for nothing."""
    properties = schema["properties"]
    properties |= {name: {"description": "Changes no answer."} for name in sorted(fields.ignored)}
    properties |= {
        name: {"enum": [None, *neutral], "description": f"Not served: {hint}."}
        for name, (neutral, hint) in fields.refused.items()
    }
    if "triptych" in properties:
        properties["triptych"] = {"anyOf": [{"$ref": REFERENCE.format(name="Compression")}, {"type": "null"}]}
    if "logit_bias" in properties:
        properties["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": "^[0-9]+$"}
    schema["additionalProperties"] = {"type": "null"}


def _portable(schema: object) -> None:
    """Patterns as all dialects of regular expressions have them."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = schema["pattern"].replace(r"\Z", "$")
        for value in schema.values():
            _portable(value)
    elif isinstance(schema, list):
        for value in schema:
            _portable(value)


def _name(reference: Mapping[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def _operation(one: Operation, names: Mapping[type, Schema]) -> Schema:
    operation: Schema = {"summary": one.summary, "responses": dict(_responses(one, names))}
    if "{name}" in one.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if one.bodies:
        bodies = [names[fields.record] for fields in one.bodies]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _responses(one: Operation, names: Mapping[type, Schema]) -> Iterator[tuple[str, Schema]]:
    content: Schema = {"text/plain": {"schema": {"type": "string"}}}
    if one.answer is not None:
        schema = names[one.answer]
        if one.choice is not None:
            choices = {"choices": {"type": "array", "items": names[one.choice]}}
            schema = {"allOf": [schema, {"type": "object", "properties": choices}]}
        content = {"application/json": {"schema": schema}}
    if one.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    yield "200", {"description": "The answer.", "content": content}
    error = names[MessagesErrorBody if one.path.startswith(MESSAGES_PATH) else ErrorBody]
    for status, description in REFUSALS.items():
        is_health = one.path == "/health" and status == 503
        body = names[Health] if is_health else error
        yield str(status), {"description": description, "content": {"application/json": {"schema": body}}}
