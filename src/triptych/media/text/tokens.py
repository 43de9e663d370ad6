"""A checkpoint's tokenizer and chat template: messages to token ids, token ids to text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer

from triptych.core.chat import Chat, ImagePart, Message, TextPart
from triptych.errors import CheckpointError, RequestError
from triptych.media.text import tools
from triptych.media.text.control import Control, Marked
from triptych.media.text.detokenize import Detokenizer, read_decoding
from triptych.media.text.template import ChatTemplate, Content
from triptych.media.text.tools import CallSyntax

ROLES = ("system", "user", "assistant", "tool", "developer")


class Text:
    """One model's way with text. Its methods may be called from any thread.

    Nothing a user says becomes a control token (any added token of the tokenizer but those of mere whitespace, and
    the picture's placeholder), in messages, in a raw prompt or in template arguments: it is encoded as plain text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        placeholder: str | None = None,
    ) -> None:
        """special_tokens: names such as `bos_token` and their texts; placeholder: what stands for a picture."""
        self.eos_ids = frozenset(eos_ids)
        self.placeholder = placeholder
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._special_tokens = dict(special_tokens or {})
        self._template = None if template is None else ChatTemplate(template, self._special_tokens)
        added = tokenizer.get_added_tokens_decoder()
        self.silent_ids = frozenset(index for index, token in added.items() if token.special)
        self._control_ids = {token.content: index for index, token in added.items() if token.content.strip()}
        if placeholder is not None and placeholder not in self._control_ids:
            raise CheckpointError(f"the tokenizer has no added token {placeholder!r} to stand for a picture")
        self._control = Control(list(self._control_ids))
        self._decoding = read_decoding(tokenizer)
        self._prefix, self._suffix = _surroundings(tokenizer)

    @classmethod
    def open(cls, folder: Path, *, eos_ids: Iterable[int] = (), placeholder: str | None = None) -> Self:
        """Read tokenizer.json and, where they are, tokenizer_config.json and chat_template.jinja.

        Raises CheckpointError.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} holds no tokenizer.json", hint="save it with transformers' fast tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path}: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        text = cls(
            tokenizer,
            read_template(folder),
            special_tokens=_special_tokens(folder, config),
            eos_ids=eos_ids,
            placeholder=placeholder,
        )
        text._obey(config)
        return text

    # ── text to ids ─────────────────────────────────────────────────────────────────────────────────────────────

    def encode_chat(self, chat: Chat, image_texts: Sequence[str] = ()) -> list[int]:
        """Token ids of a conversation. image_texts: what stands in the prompt for each picture, in order.

        Raises RequestError, also where the template drops or repeats a picture.
        """
        prompt = self.render(chat, image_texts)
        bos = self._special_tokens.get("bos_token")
        return self._encode(prompt, is_whole=bos is not None and prompt.text.startswith(bos))

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with what the tokenizer puts around every text (BOS).

        All of it is the user's: a control token spelled out in it stays plain text, which is where this differs
        from other servers. Raises RequestError.
        """
        broken, stand_ins = self._control.disarm(text)
        return self._encode(Marked(broken, stand_ins), is_whole=False)

    def render(self, chat: Chat, image_texts: Sequence[str] = ()) -> Marked:
        """The prompt as text; `.plain` is what the model reads. Raises RequestError."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template", hint="use /v1/completions, or add chat_template.jinja to its folder"
            )
        if self._template.syntax is None:
            chat = tools.spelled_out(chat, has_system=self._template.has_system)
        said = [[part.text for part in message.parts if isinstance(part, TextPart)] for message in chat.messages]
        named = [self._names(message) for message in chat.messages]
        offered = tools.for_template(chat.tools) or None
        (said, named, offered, arguments), stand_ins = self._control.disarm(
            [said, named, offered, dict(chat.template_args)]
        )
        messages = [
            self._message(message, texts) | names
            for message, texts, names in zip(chat.messages, said, named, strict=True)
        ]
        rendered = self._template.render(
            messages, add_generation_prompt=chat.add_generation_prompt, tools=offered, arguments=arguments
        )
        return Marked(self._place_images(rendered, image_texts), stand_ins)

    def spell(self, text: str) -> list[int]:
        """Token ids of a piece of an answer, as the model would write it; none of them is silent."""
        ids = _ids(self._tokenizer, text)
        if self.silent_ids.isdisjoint(ids):
            return ids
        broken, stand_ins = self._control.disarm(text)
        return self._encode(Marked(broken, stand_ins), is_whole=True)

    def _message(self, message: Message, texts: Sequence[str]) -> dict[str, Any]:
        """As the template wants it: a list of parts, or one string with its parts on lines of their own."""
        if message.role not in ROLES:
            raise RequestError(
                f"unknown role {message.role[:40]!r}", hint=f"known: {', '.join(ROLES)}", param="messages"
            )
        assert self._template is not None
        left = iter(texts)
        content: Content
        is_result = message.role == "tool" and len(texts) == len(message.parts)  # every template reads it as a string
        if self._template.wants_lists and not is_result:
            content = [
                {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": next(left)}
                for part in message.parts
            ] or [{"type": "text", "text": ""}]
        else:
            pieces = [self.placeholder or "" if isinstance(part, ImagePart) else next(left) for part in message.parts]
            content = "\n".join(pieces)
        return {"role": message.role, "content": content}

    def _names(self, message: Message) -> dict[str, Any]:
        """What a message says of tools, as templates know it."""
        syntax = self.call_syntax
        named: dict[str, Any] = {}
        if message.tool_calls:
            named["tool_calls"] = tools.calls_for_template(message.tool_calls, syntax)
        if message.tool_call_id is not None and message.role == "tool":
            named["tool_call_id"] = syntax.fitting(message.tool_call_id)
        if message.name is not None:
            named["name"] = message.name
        return named

    def _place_images(self, rendered: str, image_texts: Sequence[str]) -> str:
        if self.placeholder is None:
            if image_texts:
                raise RequestError(f"{len(image_texts)} images for a model that takes text only", param="messages")
            return rendered
        pieces = rendered.split(self.placeholder)
        if len(pieces) - 1 != len(image_texts):
            raise RequestError(
                f"the model's chat template shows {len(pieces) - 1} of the {len(image_texts)} images",
                hint="put images into user messages: templates drop them elsewhere",
                param="messages",
            )
        return pieces[0] + "".join(image + piece for image, piece in zip(image_texts, pieces[1:], strict=True))

    def _encode(self, prompt: Marked, *, is_whole: bool) -> list[int]:
        expected = [self._control_ids[match[0]] for match in self._control.find(prompt)]
        ids: list[int] | None = None
        if not prompt.stand_ins:
            ids = _ids(self._tokenizer, prompt.text)
        if ids is None or not self._is_genuine(ids, expected):
            ids = self._guarded.encode(prompt)
        if not self._is_genuine(ids, expected):
            raise RequestError("the text cannot be told from the model's control tokens", param="messages")
        return ids if is_whole else [*self._prefix, *ids, *self._suffix]

    def _is_genuine(self, ids: Sequence[int], expected: Sequence[int]) -> bool:
        """Whether every control token is one that the template wrote: a normalizer may make one of other text."""
        controls = set(self._control_ids.values())
        left = iter(expected)
        return all(token in left for token in ids if token in controls)

    @cached_property
    def _guarded(self) -> _Guarded:
        return _Guarded(self._tokenizer, self._control)

    # ── ids to text ─────────────────────────────────────────────────────────────────────────────────────────────

    def detokenizer(self, *, shown: str = "") -> Detokenizer:
        """For one answer. shown: a text whose special tokens are wanted all the same."""
        wanted = {piece for piece in self.pieces(shown) if isinstance(piece, int)}
        return Detokenizer(self._tokenizer.id_to_token, self._decoding, self.silent_ids - wanted)

    def pieces(self, text: str) -> list[str | int]:
        """A text of ours, cut where special tokens stand in it, which are given by their ids."""
        found: list[str | int] = []
        start = 0
        for match in self._control.find(Marked(text)):
            if (token_id := self._control_ids[match[0]]) in self.silent_ids:
                found += [text[start : match.start()], token_id]
                start = match.end()
        return [piece for piece in (*found, text[start:]) if piece != ""]

    @property
    def call_syntax(self) -> CallSyntax:
        """How the model writes calls of tools: as its template shows it, else as we tell it to."""
        return (self._template.syntax if self._template is not None else None) or tools.HERMES

    @property
    def lead(self) -> str:
        """What stands before every answer and its decoder takes away: a blank of SentencePiece's, or nothing."""
        return " " * max(self._decoding.num_strip, bool(self._decoding.drop_first))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; may be part of a character. Empty for an id without a token."""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._decoding.piece(token)

    def token_text(self, token_id: int) -> str:
        """The same to be read: what is no whole character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _obey(self, config: Mapping[str, Any]) -> None:
        """`add_bos_token` and `add_eos_token` outrank tokenizer.json, as in transformers."""
        if "add_bos_token" not in config and "add_eos_token" not in config:
            return
        ends = []
        for name in ("bos", "eos"):
            token = self._special_tokens.get(f"{name}_token")
            index = self._tokenizer.token_to_id(token) if token and config.get(f"add_{name}_token") else None
            ends.append([] if index is None else [index])
        self._prefix, self._suffix = ends


class _Guarded:
    """The tokenizer's twin that knows its control tokens under secret names only.

    Every text in it is plain, while the template's own control tokens are written by their secret names, so the
    text around them is cut, normalized and merged as the tokenizer would.
    """

    def __init__(self, tokenizer: Tokenizer, control: Control) -> None:
        content = json.loads(tokenizer.to_str())
        added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        content["added_tokens"] = []
        self._twin = Tokenizer.from_str(json.dumps(content))
        self._control = control
        secret = "".join(chr(0xF_0000 + secrets.randbelow(0xFFFE)) for _ in range(6))
        self._secret = secret
        self._names = {token.content: f"{secret}{index}{secret}" for index, token in added.items()}
        self._ids: dict[int, int] = {}
        for index, token in added.items():
            name = self._names[token.content] if token.content in control.tokens else token.content
            self._twin.add_tokens(
                [AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized)]
            )
            own = self._twin.token_to_id(name)
            assert own is not None
            self._ids[own] = index

    def encode(self, prompt: Marked) -> list[int]:
        plain, start = [], 0
        for match in self._control.find(prompt):
            plain += [Marked(prompt.text[start : match.start()], prompt.stand_ins).plain, self._names[match[0]]]
            start = match.end()
        plain.append(Marked(prompt.text[start:], prompt.stand_ins).plain)
        if any(self._secret in piece for piece in plain[::2]):
            raise RequestError("the text holds this server's secret", param="messages")
        return [self._ids.get(token, token) for token in _ids(self._twin, "".join(plain))]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's ids and nothing around them. A batch of one, for it leaves Python's lock to others meanwhile."""
    (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = found.ids
    return ids


def _surroundings(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and after every text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return full[:start], full[start + len(bare) :]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def read_template(folder: Path) -> str | None:
    """chat_template.jinja, else chat_template.json, else the tokenizer's own; of several, the one named `default`."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_json(folder / name).get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if isinstance(template, str):
            return template
    return None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which are strings or objects with `content`."""
    found = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found
