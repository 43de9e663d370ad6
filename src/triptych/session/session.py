"""Compose media and engine: messages in, text deltas out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from triptych.core.bundle import Manifest
from triptych.core.chat import Chat, ImagePart, Message, TextPart
from triptych.core.policy import Compression
from triptych.core.request import Sampling
from triptych.core.spec import Modality
from triptych.engine.config import EngineConfig, EnginePlan
from triptych.engine.loop import Engine, EngineStats
from triptych.errors import RequestError
from triptych.media.fetch import Decoders, MediaPolicy
from triptych.media.text import Text
from triptych.session.answer import Answer, Ending, Stream
from triptych.session.opening import Source, find_bundle, open_parts
from triptych.session.prompt import NOTHING, Inspection, Prompt, Prompter

Picture = str | Path | bytes  # a path, the bytes of a file, or a `data:` or `http(s):` URL


class Session:
    """One model, open and answering. Use it from any thread; close it, or use `with`."""

    def __init__(
        self, manifest: Manifest, text: Text, engine: Engine, policy: MediaPolicy, places: Mapping[str, str]
    ) -> None:
        """Compose parts that are open already; `Session.open` opens them."""
        self.name = manifest.name
        self.manifest = manifest
        self.text = text
        self._engine = engine
        self._decoders = Decoders()
        self._prompter = Prompter(manifest, text, engine.plan, self._decoders, policy)
        self._places = dict(places)
        self._ids = itertools.count(1)
        engine.start()

    @classmethod
    def open(
        cls,
        model: str | Path | Source,
        *,
        config: EngineConfig | None = None,
        policy: MediaPolicy | None = None,
    ) -> Self:
        """Open a bundle's folder, a checkpoint's folder (compiled once, into the cache), or `demo`.

        Raises ConfigError, CheckpointError, BundleError, GateError, AssetError or BackendError.
        """
        source = model if isinstance(model, Source) else Source(model=model)
        opened = open_parts(find_bundle(source), config or EngineConfig())
        manifest = opened.bundle.manifest
        image = manifest.spec.image
        placeholder = None if image is None else image.placeholder
        text = Text.open(opened.bundle.path, eos_ids=manifest.spec.eos_ids, placeholder=placeholder)
        engine = Engine(opened.runner, opened.plan, eos_ids=frozenset(manifest.spec.eos_ids))
        session = cls(manifest, text, engine, policy or MediaPolicy(), {"decoder": opened.decoder_place})
        if image is not None:
            session._decoders.start()
        return session

    # ── plain use ──────────────────────────────────────────────────────────────────────────────────────────────

    def ask(
        self,
        question: str,
        *,
        images: Sequence[Picture] = (),
        system: str | None = None,
        compression: Compression = NOTHING,
        **sampling: Any,
    ) -> Answer:
        """The whole answer to one question; greedy unless told. `sampling` takes the fields of `Sampling`."""
        return self.begin(question, images=images, system=system, compression=compression, **sampling).answer()

    def stream(
        self, question: str, *, images: Sequence[Picture] = (), system: str | None = None, **sampling: Any
    ) -> Iterator[str]:
        """The answer piece by piece. Dropping the iterator, read or not, gives the request up."""
        pieces = _pieces(self.begin(question, images=images, system=system, **sampling))
        next(pieces)  # only a generator that has begun is told that it was dropped
        return pieces

    def begin(
        self,
        question: str,
        *,
        images: Sequence[Picture] = (),
        system: str | None = None,
        compression: Compression = NOTHING,
        **sampling: Any,
    ) -> Stream:
        """The answer as deltas, with its tokens, usage and timing. To the end of the context unless told."""
        pictures = tuple(ImagePart(source=_source(image)) for image in images)
        messages = [Message(role="user", parts=(*pictures, TextPart(text=question)))]
        if system is not None:
            messages.insert(0, Message(role="system", parts=(TextPart(text=system),)))
        prompt = self.prepare_chat(Chat(messages=tuple(messages)), compression=compression)
        room = self.context_of(prompt) - prompt.num_tokens
        settings = Sampling(**({"max_tokens": room, "temperature": 0.0} | sampling))
        return self.start(prompt, settings, request_id=f"ask-{next(self._ids)}")

    # ── what a server uses ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def plan(self) -> EnginePlan:
        return self._engine.plan

    def prepare_chat(self, chat: Chat, *, tenant: str = "", compression: Compression = NOTHING) -> Prompt:
        """Fetch, count, decode and tokenise. Blocks: call it in a thread. Raises RequestError."""
        return self._prompter.chat(chat, tenant=tenant, compression=compression)

    def prepare_text(
        self, text: str | Sequence[int], *, tenant: str = "", compression: Compression = NOTHING
    ) -> Prompt:
        """Tokenise a raw prompt. Raises RequestError."""
        return self._prompter.text(text, tenant=tenant, compression=compression)

    def inspect(self, chat: Chat, *, tenant: str = "", compression: Compression = NOTHING) -> Inspection:
        """What would become of a chat's pictures, without an answer. Blocks as `prepare_chat`. Raises RequestError."""
        return self._prompter.inspect(chat, tenant=tenant, compression=compression)

    def is_encoded(self, digest: str) -> bool:
        """Whether the encoder's rows of an item are cached; its digest tells a tenant nothing of another's."""
        return digest in self._engine.runner.features

    def context_of(self, prompt: Prompt) -> int:
        """Tokens that the prompt and its answer may have: a reduced prompt's answer begins at a later position."""
        left_out = prompt.num_positions - prompt.num_tokens
        return min(self.plan.max_model_len, self.manifest.spec.decoder.max_positions - left_out)

    def start(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        request_id: str,
        ending: Ending | None = None,
        priority: int = 0,
    ) -> Stream:
        """Queue one answer. Raises RequestError, OverloadError or BackendError at once, never blocks."""
        self._check_ids("logit_bias", sampling.logit_bias)
        self._check_ids("stop_token_ids", sampling.stop_ids)
        stream = Stream(request_id, self.text, ending or Ending(), self._engine.abort)
        self._engine.submit(prompt.request(request_id, sampling, priority=priority), stream.push)
        return stream

    def _check_ids(self, param: str, token_ids: Iterable[int]) -> None:
        vocab = self.manifest.spec.decoder.vocab_size
        strange = next((token for token in token_ids if not 0 <= token < vocab), None)
        if strange is not None:
            raise RequestError(f"`{param}` names token {strange}, ids go from 0 to {vocab - 1:,}", param=param)

    def placements(self, *, open_all: bool = False) -> dict[str, str]:
        """Where each open part really runs; `open_all` opens the encoders for it."""
        places = dict(self._places)
        runner = self._engine.runner
        for modality in {Modality.IMAGE} if open_all and self.manifest.spec.vision else runner.open_towers:
            places["vision"], places["projector"] = runner.place(modality)
        return places

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """Abort what is unfinished, end the engine's thread and the decoder processes."""
        self._engine.close()
        self._decoders.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _pieces(stream: Stream) -> Iterator[str]:
    """An empty text at once, then the answer's."""
    try:
        yield ""
        yield from (delta.text for delta in stream if delta.text)
    finally:
        stream.leave()


def _source(picture: Picture) -> bytes | str:
    """A path that the caller of the Python API names is read here: it is theirs, not a request's."""
    if isinstance(picture, bytes):
        return picture
    text = str(picture)
    if isinstance(picture, str) and text.startswith(("data:", "http:", "https:")):
        return text
    return Path(picture).read_bytes()
