"""A session that answers from a script: for tests of the HTTP side, without a model.

The answer to a prompt is its last text's words in capitals, word by word, over and over until a limit ends it.
Words steer it: `slow` waits a moment before each token, `breaks` fails after three, `refused` before the first,
`calls` makes the answer two calls of the tool `look` and `ends` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from triptych.core.chat import Chat, Form, ImagePart, TextPart
from triptych.core.policy import Compression
from triptych.core.request import FinishReason, Sampling, Timing, Usage
from triptych.core.stages import Spent
from triptych.errors import BackendError, ContextError, MediaError, OverloadError, RequestError
from triptych.server.app import create_app
from triptych.server.config import ServerConfig
from triptych.server.run import background
from triptych.session import CallDelta, Ending, Terms, TextDelta, TextLogprob
from triptych.testing import plan, tiny_manifest

IMAGE_TOKENS = 64
SLOW_S = 0.02


@dataclass(frozen=True, kw_only=True)
class ScriptedPrompt:
    words: tuple[str, ...]
    num_images: int
    num_words: int
    tenant: str
    spent: tuple[Spent, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_words + self.num_images * IMAGE_TOKENS


class ScriptedStream:
    def __init__(self, session: ScriptedSession, prompt: ScriptedPrompt, sampling: Sampling, ending: Ending) -> None:
        self._session, self._prompt, self._sampling, self._ending = session, prompt, sampling, ending
        self._random = random.Random(sampling.seed)
        self.is_aborted = False
        self.is_over = False
        self.num_tokens = 0

    def abort(self) -> None:
        self.is_aborted = True

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        words = self._prompt.words
        if "refused" in words:
            raise BackendError("the encoder needs 9 GB, the device has 8 GB", hint="send a smaller picture")
        text = ""
        while True:
            await asyncio.sleep(SLOW_S if "slow" in words else 0)
            while self._session.is_held:
                await asyncio.sleep(SLOW_S)
            if self._session.is_stuck:
                await asyncio.sleep(3600)
            if "breaks" in words and self.num_tokens == 3:
                raise BackendError("the device is gone")
            if "calls" in words and self.num_tokens:
                for delta in self._calls():
                    yield delta
                return
            if "ends" in words and self.num_tokens == len(words):
                yield self._last("", FinishReason.STOP, None)
                return
            piece = self._word() + " "
            self.num_tokens += 1
            stop = next((one for one in self._ending.stop if one in text + piece), None)
            if stop is not None:
                shown = (text + piece).partition(stop)[0][len(text) :] + (stop if self._ending.include_stop else "")
                yield self._last(shown, FinishReason.STOP, stop)
                return
            text += piece
            if self.is_aborted:
                yield self._last("", FinishReason.ABORT, None)
                return
            if self.num_tokens == self._sampling.max_tokens:
                yield self._last(piece, FinishReason.LENGTH, None)
                return
            yield TextDelta(text=piece, token_ids=(self.num_tokens,), logprobs=self._logprobs(piece))

    def _calls(self) -> Iterator[TextDelta]:
        """Two calls in pieces, the second begun in the delta that ends the first."""
        yield TextDelta(text="", calls=(CallDelta(index=0, id="call_1", name="look"),))
        yield TextDelta(text="", calls=(CallDelta(index=0, arguments='{"at": '),))
        ending = (CallDelta(index=0, arguments='"sea"}'), CallDelta(index=1, id="call_2", name="look", arguments="{}"))
        yield TextDelta(text="", calls=ending)
        yield self._last("", FinishReason.STOP, None)

    def _word(self) -> str:
        if self._sampling.temperature > 0:
            return self._random.choice(self._prompt.words).upper()
        return self._prompt.words[self.num_tokens % len(self._prompt.words)].upper()

    def _logprobs(self, piece: str) -> tuple[TextLogprob, ...]:
        if self._sampling.num_logprobs is None:
            return ()
        first = TextLogprob(token_id=7, token=piece, token_bytes=piece.encode(), logprob=-0.25)
        others = (first, first.but(token_id=8, token="other", token_bytes=b"other", logprob=-1.5))
        return (first.but(top=others[: self._sampling.num_logprobs]),)

    def _last(self, text: str, finish: FinishReason, stop_reason: str | None) -> TextDelta:
        self.is_over = True
        usage = Usage(
            prompt_tokens=self._prompt.num_tokens,
            cached_tokens=0,
            image_tokens=self._prompt.num_images * IMAGE_TOKENS,
            completion_tokens=self.num_tokens,
            encoder_misses=self._prompt.num_images,
        )
        return TextDelta(
            text=text,
            token_ids=(self.num_tokens,),
            logprobs=self._logprobs(text) if text else (),
            finish=finish,
            stop_reason=stop_reason,
            usage=usage,
            timing=Timing(queue_s=0.001, encode_s=0.0, prefill_s=0.01, decode_s=0.1),
        )


@dataclass
class ScriptedSession:
    """Has the methods of `Session` that the server calls."""

    name: str = "scripted"
    context: int = 1000
    max_queued: int = 1000
    generation: dict[str, float] = field(default_factory=lambda: {"temperature": 0.0})
    is_stuck: bool = False
    is_held: bool = False  # no stream moves
    is_dead: bool = False
    stuck_s: float = 0.0
    streams: dict[str, ScriptedStream] = field(default_factory=dict)
    chats: list[Chat] = field(default_factory=list)
    compressions: list[Compression] = field(default_factory=list)
    prompts: list[ScriptedPrompt] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    terms: list[Terms] = field(default_factory=list)
    while_preparing: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.manifest = SimpleNamespace(
            weights_digest="0123456789abcdef", generation=self.generation, spec=tiny_manifest().spec
        )
        self.plan = plan(max_model_len=self.context)
        spell = SimpleNamespace(push=lambda ids: " ".join(f"w{one}" for one in ids), flush=lambda: "")
        self.text = SimpleNamespace(detokenizer=lambda: spell)

    def prepare_chat(
        self, chat: Chat, *, tenant: str = "", compression: Compression, form: Form | None = None
    ) -> ScriptedPrompt:
        self.while_preparing()
        self.compressions.append(compression)
        self.chats.append(chat)
        parts = [part for message in chat.messages for part in message.parts]
        images = [part for part in parts if isinstance(part, ImagePart)]
        if any(image.source == "data:image/png;base64,broken" for image in images):
            raise MediaError("the picture is not a PNG", hint="send another", param="messages")
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        return self._prompt(" ".join(texts), texts[-1], len(images), tenant)

    def guide(self, form: Form) -> None:
        return None

    def prepare_text(
        self, text: str | Sequence[int], *, tenant: str = "", compression: Compression, guide: None = None
    ) -> ScriptedPrompt:
        self.compressions.append(compression)
        words = text if isinstance(text, str) else " ".join(f"w{one}" for one in text)
        return self._prompt(words, words, 0, tenant)

    def _prompt(self, text: str, last: str, num_images: int, tenant: str) -> ScriptedPrompt:
        num_words = len(text.split())
        if not num_words:
            raise RequestError("the prompt has no tokens")
        if num_words >= self.context:
            raise ContextError(f"the prompt has {num_words} tokens, the context holds {self.context}", param="messages")
        prompt = ScriptedPrompt(words=tuple(last.split()), num_images=num_images, num_words=num_words, tenant=tenant)
        self.prompts.append(prompt)
        return prompt

    def context_of(self, prompt: ScriptedPrompt) -> int:
        return self.context

    def start(
        self,
        prompt: ScriptedPrompt,
        sampling: Sampling,
        *,
        request_id: str,
        ending: Ending | None = None,
        terms: Terms | None = None,
    ) -> ScriptedStream:
        running = sum(not stream.is_over and not stream.is_aborted for stream in self.streams.values())
        if running >= self.max_queued:
            raise OverloadError(f"{running} requests are unfinished", retry_after_s=1.5, hint="try again")
        assert request_id not in self.streams
        self.samplings.append(sampling)
        self.endings.append(ending or Ending())
        self.terms.append(terms or Terms())
        stream = ScriptedStream(self, prompt, sampling, ending or Ending())
        self.streams[request_id] = stream
        return stream

    def stats(self) -> Any:
        return SimpleNamespace(
            num_running=sum(not stream.is_over for stream in self.streams.values()),
            num_waiting=0, kv_usage=0.25, encoder_bytes=1024, since_progress_s=self.stuck_s,
            is_alive=not self.is_dead, preemptions=2, prefix_queries=100, prefix_hits=40, encoder_queries=7,
            encoder_hits=3, prompt_tokens=500, generation_tokens=90, corrupted=0, evicted_tokens=70,
            compactions=2, steps=12, drafts=3, drafted_tokens=9, accepted_tokens=6,
            stage_seconds={("decode", "text"): 1.5},
            stage_buckets={("decode", "text"): (0,) * 8 + (12,) + (0,) * 9}, recomputed=0, late=0, restarts=0,
            held_features=0, backlog_s=0.0,
        )  # fmt: skip

    def placements(self) -> dict[str, str]:
        return {"decoder": "CPU (test), f32"}


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    """Whether the condition came true in time."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def serving(session: Any, config: ServerConfig | None = None) -> Iterator[str]:
    """A real server on a free port, in a thread; yields its URL."""
    with background(create_app(session, config)) as url:
        yield url
