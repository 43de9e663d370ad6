"""Which fields of a body are known, and what is said of those that cannot be served.

A field either does what the API says, or is listed here as bookkeeping that changes no answer, or is refused by
name unless it asks for what happens anyway. An unknown field is refused too: a misspelt `max_token` that is
ignored costs its caller more than a 400.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from triptych.core.policy import Compression
from triptych.errors import RequestError

SHOWN = 100  # characters of a caller's own words that an answer repeats

BodyType = TypeVar("BodyType", bound=msgspec.Struct)

# Change no answer: kept in no log, checked for nothing.
BOOKKEEPING = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
)

# Known, not served: (values that ask for nothing, what to say). None always asks for nothing.
Refused = Mapping[str, tuple[tuple[Any, ...], str]]

_NO_TOOLS = "tool calling is not served; describe the tools in a message and read the answer's text"
_NO_GUIDE = "constrained output is not served; ask for the format in a message and check the answer"

BOTH_REFUSED: Refused = {
    "best_of": ((1,), "one answer is made for each choice; use `n` and choose yourself"),
    "use_beam_search": ((False,), "beam search is not served; use `n`"),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which is not served"),
    "service_tier": (("auto", "default"), "there is one tier; `priority` orders requests within it"),
    "store": ((False,), "answers are never stored"),
    "skip_special_tokens": ((True,), "special tokens never reach the text; read `logprobs` to see each token"),
    "spaces_between_special_tokens": ((True,), "special tokens never reach the text"),
    "prompt_logprobs": ((), "probabilities of the prompt's own tokens are not computed"),
    "truncate_prompt_tokens": ((), "a prompt is never cut in silence; shorten it yourself"),
    "logits_processors": ((), "no code from a request is run; `logit_bias` moves single tokens"),
    "allowed_token_ids": ((), _NO_GUIDE),
    "bad_words": (([],), "use `logit_bias` with -100 for each token"),
    "structured_outputs": ((), _NO_GUIDE),
    "guided_json": ((), _NO_GUIDE),
    "guided_regex": ((), _NO_GUIDE),
    "guided_choice": ((), _NO_GUIDE),
    "guided_grammar": ((), _NO_GUIDE),
    "request_id": ((), "send it as the X-Request-Id header; it comes back in the reply's"),
    "return_token_ids": ((False,), "token ids are not returned"),
    "return_tokens_as_token_ids": ((False,), "tokens are returned as text and bytes"),
}

CHAT_REFUSED: Refused = {
    **BOTH_REFUSED,
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), _NO_GUIDE),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "predicted outputs are not served; the answer would be the same without it"),
    "reasoning_effort": (("none",), "this model does not reason before it answers"),
    "verbosity": (("medium",), "ask for a short or a long answer in a message"),
    "web_search_options": ((), "nothing is looked up on the web"),
    "chat_template": ((), "the model's own template is used; render another yourself and call /v1/completions"),
    "continue_final_message": ((False,), "render the prompt yourself and call /v1/completions to continue a text"),
    "echo": ((False,), "a chat is not echoed; /v1/completions can"),
    "documents": ((), "put documents into a message"),
    "mm_processor_kwargs": (({},), "set them for the server: `triptych serve --mm-processor-kwargs`"),
    "media_io_kwargs": (({},), "pictures are decoded in one way, which docs/guides/serve.md describes"),
}

COMPLETION_REFUSED: Refused = {
    **BOTH_REFUSED,
    "suffix": (("",), "filling in the middle is not served"),
    "response_format": (({"type": "text"},), _NO_GUIDE),
    "add_special_tokens": ((True,), "send token ids as the prompt to choose each token yourself"),
}

MESSAGE_REFUSED: Refused = {
    "name": ((), "the model's template has no place for it; write the name into the content"),
    "tool_calls": (([],), _NO_TOOLS),
    "tool_call_id": ((), _NO_TOOLS),
    "function_call": ((), _NO_TOOLS),
    "refusal": ((), "send the refusal's text as the content"),
    "audio": ((), "send the answer's text as the content"),
    "annotations": (([],), "annotations are not shown to the model"),
    "reasoning_content": ((), "a former answer's reasoning is not shown to the model"),
    "reasoning": ((), "a former answer's reasoning is not shown to the model"),
}


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body holds. Raises RequestError."""
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the body ({len(raw):,} bytes) is not valid JSON: {str(error)[:200]}",
            hint='send one JSON object, encoded as UTF-8, such as {"model": …, "messages": […]}',
        ) from None
    if not isinstance(content, dict):
        raise RequestError(f"the body is a JSON {_json_name(content)}, not an object", hint='send {"model": …, …}')
    return content


def convert(content: dict[str, Any], body: type[BodyType], refused: Refused) -> BodyType:
    """The record that an object's fields make. Raises RequestError that names the field."""
    check(content, frozenset(body.__struct_fields__), refused)
    known = {name: value for name, value in content.items() if name in body.__struct_fields__}
    try:
        return msgspec.convert(known, body, str_keys=True)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None


def compression(asked: Mapping[str, Any] | None) -> Compression:
    """What a body's `triptych` asks to leave out. Raises RequestError."""
    check(asked or {}, frozenset(Compression.__struct_fields__), {}, where="triptych.")
    return Compression(**asked or {})


def check(content: Mapping[str, Any], served: frozenset[str], refused: Refused, *, where: str = "") -> None:
    """Refuse what is unknown, and what is known but asks for something that is not served."""
    for name, value in content.items():
        if name in served or value is None or (name in BOOKKEEPING and not where):
            continue
        param = f"{where}{name}"
        if name not in refused:
            raise _unknown(param, name, served | BOOKKEEPING)
        neutral, hint = refused[name]
        if not any(value == one and type(value) is type(one) for one in neutral):
            raise RequestError(f"`{param}` is not served", hint=hint, param=param)


def _unknown(param: str, name: str, known: frozenset[str]) -> RequestError:
    near = difflib.get_close_matches(name[:SHOWN], sorted(known), n=1, cutoff=0.6)
    hint = f"did you mean `{near[0]}`?" if near else "leave it out; docs/guides/serve.md lists the fields"
    return RequestError(f"unknown field `{param[:SHOWN]}`", hint=hint, param=param[:SHOWN])


def _wrong_type(message: str) -> RequestError:
    text, _, path = message.partition(" - at `")
    param = re.sub(r"^(key` in `)?\$\.?", "", path[-SHOWN:]).rstrip("`")[:SHOWN] or None
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"`{param}` is required", param=param, hint="docs/guides/serve.md shows a whole body")
    unknown = re.match(r"Object contains unknown field `(.*)`", text)
    if unknown:
        name = unknown[1][:SHOWN]
        param = f"{param}.{name}" if param else name
        return RequestError(f"unknown field `{param}`", param=param, hint="leave it out")
    text = text[:1].lower() + text[1 : 2 * SHOWN].replace(" | null`", "`")
    return RequestError(f"`{param}`: {text}" if param else text, param=param)


def _json_name(content: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(content), "null")
