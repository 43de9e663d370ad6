"""Forms to guides: which tokens may come next, by llguidance's masks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from triptych.core.chat import Form, Tool
from triptych.core.request import Guide, Matcher
from triptych.errors import RequestError
from triptych.media.text.grammar import grammar_of
from triptych.media.text.landing import Landing
from triptych.media.text.rehearsal import LIMITS, rehearse
from triptych.media.text.tokens import Text

log = logging.getLogger("triptych.media")

MAX_FORM_BYTES = 128 << 10
HARMLESS_BYTES = 2 << 10  # of a schema without references, or an expression: it can do no harm
MAX_LEAST = 2_048  # tokens of a form's shortest answer, beyond which it is not looked for
LEAST_S = 0.5  # for that, beside everything else
MAX_SPELLED = 256  # texts to choose from, the shortest, of which the one of fewest tokens is looked for
SPARE_S = 0.2  # of the engine, for one request's answers together; a hundred times what a form takes that people write
MASK_S = 0.005  # more for each mask, which all answers of a step wait for
LANDING_S = 0.05  # at a time, since they wait for that too
WATCHED = 256  # tokens before the last that may be answered, within which every answer's end is kept in reach
SHOWN = 300  # characters of llguidance's reason that an answer repeats


class Guides:
    """Compiles forms for one tokenizer. May be called from any thread, and takes a while."""

    def __init__(self, text: Text, vocab_size: int) -> None:
        self._text = text
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def compile(self, form: Form, tools: Sequence[Tool] = ()) -> Guide:
        """Raises RequestError for a form that cannot be read or held, and for one that costs too much.

        tools: those that a form of kind `tools` may name.
        """
        param = "tools" if form.kind == "tools" else "response_format"
        try:
            asked = [form.value, form.otherwise and form.otherwise.value, [tool.parameters for tool in tools]]
            _check_size(msgspec.json.encode(asked), param)
            grammar = grammar_of(form, tools, self._text)
            _check_size(grammar.encode(), param)
            if form.kind != "grammar" and ("$ref" in grammar or len(grammar) > HARMLESS_BYTES):
                rehearse(grammar)
        except (ValueError, RecursionError) as error:
            raise _refusal(error, param) from None
        with self._lock:
            tokenizer, landing = self._tokenizer, self._landing
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what nothing satisfies, or costs too much, shows here
        if matcher.is_error():
            raise _refusal(matcher.get_error(), param)
        texts = sorted(form.value, key=len)[:MAX_SPELLED] if form.kind == "choice" else []
        ways = sorted((tokenizer.tokenize_str(self._text.lead + text) for text in texts), key=len)
        return _Guide(matcher, landing, ways, is_json=form.kind not in ("regex", "grammar"))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        vocabulary = TokenizerWrapper(_Vocabulary(self._text, self._vocabulary))
        return LLTokenizer(vocabulary, eos_token=sorted(self._text.eos_ids))

    @cached_property
    def _landing(self) -> Landing:
        return Landing(self._vocabulary, ends=self._text.eos_ids)

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        return [self._text.token_bytes(token_id) for token_id in range(self._vocab_size)]


class _Vocabulary:
    """What LLTokenizer wants to know of a tokenizer: each token's bytes, and a way to spell a text."""

    bos_token_id = None

    def __init__(self, text: Text, tokens: Sequence[bytes]) -> None:
        self.eos_token_id = min(text.eos_ids)
        self.tokens = tokens
        self.special_token_ids = sorted(token for token in text.silent_ids | text.eos_ids if token < len(tokens))
        self._text = text
        self._longest = max(map(len, tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model would write a text; where the tokenizer adds to it, the longest tokens that fit."""
        raw = text.encode() if isinstance(text, str) else text
        ids = self._text.spell(raw.decode("utf-8", "replace"))
        if all(token < len(self.tokens) for token in ids) and b"".join(self.tokens[token] for token in ids) == raw:
            return ids
        return list(self._greedy(raw))

    def _greedy(self, raw: bytes) -> Iterator[int]:
        while raw:
            size = next((size for size in range(self._longest, 1, -1) if raw[:size] in self._by_bytes), 1)
            if raw[:size] in self._by_bytes:  # or no token has this byte
                yield self._by_bytes[raw[:size]]
            raw = raw[size:]

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: token_id for token_id, token in enumerate(self.tokens) if token_id not in special}


class _Guide:
    """ending: tokens that complete an answer from its beginning, few of them; None where none were found."""

    def __init__(self, matcher: LLMatcher, landing: Landing, ways: Iterable[list[int]], *, is_json: bool) -> None:
        """ways: all that may be answered, the shortest first, without their ends; none where that cannot be told."""
        self.matcher = matcher
        self.landing = landing
        self.left_s = SPARE_S
        self.exits = dict[bytes, int]()
        known = next(filter(None, map(self._ended, ways)), None)
        self.ending = known or landing.find(matcher, room=MAX_LEAST, seconds=LEAST_S, exits={})
        self.num_least = None
        if self.ending and (known or landing.is_shortest(matcher, self.ending, is_json=is_json)):
            self.num_least = len(self.ending) - 1

    def start(self) -> Matcher:
        return _Matcher(self)

    def _ended(self, way: list[int]) -> list[int] | None:
        """The same with its end; None where the form does not take it."""
        ahead = self.matcher.deep_copy()
        ahead.consume_tokens(way)
        end = self.landing.find(ahead, room=1, seconds=LEAST_S, exits={})
        return end and [*way, *end]


class _Matcher:
    """Raises RequestError where the form turns out to be too complex in mid-answer."""

    def __init__(self, guide: _Guide) -> None:
        self._guide = guide
        self._matcher = guide.matcher.deep_copy()
        self._landing = guide.landing
        self._ending = guide.ending  # tokens that complete the answer as it is

    def allowed(self) -> NDArray[np.bool_]:
        began_s = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        self._guide.left_s = min(SPARE_S, self._guide.left_s + MASK_S + began_s - time.thread_time())
        if self._guide.left_s < 0:
            raise _refusal(f"its tokens take more than {MASK_S * 1e3:g} ms each to choose from", None)
        return np.unpackbits(bits, count=self._landing.vocab_size, bitorder="little").view(np.bool_)

    def take(self, token_id: int, *, room: int) -> int:
        if room < WATCHED and not self._landing.is_end(token_id):
            token_id = self._landed(token_id, room)
        else:
            self._ending = None
        self._matcher.consume_token(token_id)
        self._check()
        return token_id

    def _landed(self, token_id: int, room: int) -> int:
        """The token, unless what follows it takes more than there is room for, and there is another way.

        An answer that may end as it is, and after the token too, is none that a cut would break; nor is one that has
        room for all but its end.
        """
        ending = self._ending
        if ending is None or len(ending) > room + 2:
            ending = self._find(self._matcher, room + 2)
        if ending and ending[0] == token_id:
            self._ending = ending[1:]
            return token_id
        further = self._matcher.deep_copy()
        further.consume_token(token_id)
        may_cut = ending is not None and len(ending) in (1, room + 2)
        self._ending = self._find(further, room + may_cut)
        if self._ending is None and ending:
            token_id, self._ending = ending[0], ending[1:]
        return token_id

    def _find(self, matcher: LLMatcher, room: int) -> list[int] | None:
        """None also where half of the time is spent: masks need the rest."""
        began_s, guide = time.thread_time(), self._guide
        seconds = min(LANDING_S, guide.left_s - SPARE_S / 2)
        found = guide.landing.find(matcher, room=room, seconds=seconds, exits=guide.exits)
        guide.left_s += began_s - time.thread_time()
        return found

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error(), None)


def _check_size(asked: bytes, param: str) -> None:
    if len(asked) > MAX_FORM_BYTES:
        raise RequestError(
            f"the form of the answer takes {len(asked):,} bytes, the limit is {MAX_FORM_BYTES:,}",
            hint="send a smaller schema, or fewer tools",
            param=param,
        )


def _refusal(reason: object, param: str | None) -> RequestError:
    text = str(reason).split("\n<state>")[0].replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        text = "nothing satisfies it"
    if text.startswith("panic"):
        log.error("llguidance panicked over a form")  # its reason may hold what the caller wrote
        text = "it brings the grammar's reader down"
    return RequestError(
        f"answers cannot be held to this form: {text[:SHOWN]}",
        hint="docs/guides/serve.md says what schemas and grammars may hold",
        param=param,
    )
