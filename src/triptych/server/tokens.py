"""Texts and conversations as token ids, ids as text, and how many there are; nothing is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from triptych.errors import RequestError
from triptych.server.answer import JsonAnswer
from triptych.server.anthropic.answers import TokenCount
from triptych.server.anthropic.messages import read_count
from triptych.server.ask import Ask
from triptych.server.body import Fields, convert
from triptych.server.openai.bodies import Body, Ids
from triptych.server.openai.chat import ChatDialect
from triptych.server.serving import Serving
from triptych.server.visit import receive_body

MAX_CHARACTERS = 1 << 20  # a second's work for a tokenizer

Value = TypeVar("Value")


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A raw text; vLLM's shape. A conversation is `messages` in its place, with the fields of a chat."""

    model: str | None = None
    prompt: Annotated[str, Meta(max_length=MAX_CHARACTERS)]
    add_special_tokens: Literal[True] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: Ids


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Each token of a picture is the id that stands for pictures."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


TOKENIZE: Fields[TokenizeBody] = Fields(record=TokenizeBody)
DETOKENIZE: Fields[DetokenizeBody] = Fields(record=DetokenizeBody)


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`."""
    serving: Serving = request.app.state.serving
    ask, wants_strings = await _read(request, _tokenize)
    serving.check(ask)
    ids = await serving.token_ids(ask, request.scope["triptych.visit"])
    spell = serving.session.text.token_text
    return JsonAnswer(
        TokenizeAnswer(
            count=len(ids),
            max_model_len=serving.session.plan.max_model_len,
            tokens=ids,
            token_strs=await serving.texts.run(lambda: list(map(spell, ids))) if wants_strings else None,
        )
    )


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: the ids' text, control tokens included."""
    serving: Serving = request.app.state.serving
    body = await _read(request, lambda content: convert(content, DETOKENIZE))
    if body.model:
        serving.check_name(body.model)
    serving.session.check_ids("tokens", body.tokens)
    spell = serving.session.text.token_bytes
    spelled = await serving.texts.run(lambda: b"".join(map(spell, body.tokens)))
    return JsonAnswer(DetokenizeAnswer(prompt=spelled.decode("utf-8", "replace")))


async def count_tokens(request: Request) -> Response:
    """`POST /v1/messages/count_tokens`: pictures are fetched and read, for their size decides."""
    serving: Serving = request.app.state.serving
    ask = await _read(request, read_count)
    serving.check(ask)
    found = await serving.inspect(ask, request.scope["triptych.visit"])
    if found.refusal is not None:
        raise found.refusal
    assert found.num_tokens is not None
    return JsonAnswer(TokenCount(input_tokens=found.num_tokens))


async def embeddings(request: Request) -> Response:
    """`POST /v1/embeddings`: refused, for what this model could give would mislead (docs/guides/serve.md)."""
    raise RequestError(
        "this model answers in text and makes no embeddings",
        hint="serve a model that was trained to embed: what this one remembers of a text compares badly",
        param="model",
    )


def _tokenize(content: dict[str, Any]) -> tuple[Ask, bool]:
    """What is to be counted, and whether each token's text is wanted."""
    if "messages" in content:
        wants_strings = content.pop("return_token_strs", None)
        if not isinstance(wants_strings, bool | None):
            raise RequestError("`return_token_strs`: expected `bool`", param="return_token_strs")
        return ChatDialect().read(content), bool(wants_strings)
    body = convert(content, TOKENIZE)
    ask = Ask(body=Body(model=body.model), prompts=(body.prompt,), max_tokens=None, num_logprobs=None)
    return ask, bool(body.return_token_strs)


async def _read(request: Request, read: Callable[[dict[str, Any]], Value]) -> Value:
    serving: Serving = request.app.state.serving
    raw = await receive_body(request.scope, request.receive, serving.config)
    return await serving.parse(raw, read)
