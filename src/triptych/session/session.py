"""Compose media and engine: messages in, text deltas out."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from triptych.core.bundle import Manifest
from triptych.core.chat import Chat, Form, ImagePart, Message, TextPart
from triptych.core.policy import Compression
from triptych.core.request import Guide, Sampling
from triptych.core.spec import Modality
from triptych.engine.config import EngineConfig, EnginePlan
from triptych.engine.loop import Engine
from triptych.engine.stats import EngineStats
from triptych.errors import RequestError
from triptych.media.fetch import Decoders, MediaPolicy
from triptych.media.registry import IMAGE_BASE
from triptych.media.text import Guides, Text
from triptych.session.answer import Answer, Ending, Stream
from triptych.session.opening import Opening, Source, begin
from triptych.session.parts import compose
from triptych.session.prompt import NOTHING, PLAIN, Inspection, Prediction, Prompt, Prompter, Terms

AT_HOME = MediaPolicy(max_tiles_bytes=sys.maxsize)  # nobody else is served
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
        self._guides = Guides(text, manifest.spec.decoder.vocab_size)
        self._prompter = Prompter(manifest, text, engine.plan, self._decoders, policy)
        self._places = dict(places)
        self._ids = itertools.count(1)
        engine.start()

    @classmethod
    def open(
        cls, model: str | Path | Source, *, config: EngineConfig | None = None, policy: MediaPolicy | None = None
    ) -> Self:
        """Open a bundle's folder, a checkpoint's folder (compiled once, into the cache), or `demo`.

        policy: None opens no URL, and lets prompts have tiles without limit. Raises ConfigError, CheckpointError,
        BundleError, GateError, AssetError or BackendError.
        """
        source = model if isinstance(model, Source) else Source(model=model)
        return cls.of(begin(source, config or EngineConfig()), policy)

    @classmethod
    def of(cls, opening: Opening, policy: MediaPolicy | None = None) -> Self:
        """Compose what `session.opening.begin` opens; raises as `open`."""
        spec, path = opening.bundle.manifest.spec, opening.bundle.path
        placeholder = None if spec.image is None else spec.image.placeholder
        text = Text.open(path, eos_ids=spec.eos_ids, placeholder=placeholder)
        opened = compose(opening.decoder.result(), opening.config)
        manifest = opened.bundle.manifest
        engine = Engine(opened.runner, opened.plan, eos_ids=frozenset(spec.eos_ids))
        settings = f"{opened.decoder_place}, {opened.plan.cache_type} cache"  # as `session/planning` keeps them
        for cost in manifest.step_costs:
            if (cost.weights_digest, cost.settings) == (manifest.weights_digest, settings):
                engine.pace.assume(cost)
        session = cls(manifest, text, engine, policy or AT_HOME, {"decoder": opened.decoder_place})
        if spec.image is not None:
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
        """The whole answer to one question; greedy unless told.

        `sampling` takes the fields of `Sampling`, and a `form` that the answer must have (`core/chat.Form`).
        """
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
        form: Form | None = sampling.pop("form", None)
        pictures = tuple(ImagePart(source=_source(image)) for image in images)
        messages = [Message(role="user", parts=(*pictures, TextPart(text=question)))]
        if system is not None:
            messages.insert(0, Message(role="system", parts=(TextPart(text=system),)))
        prompt = self.prepare_chat(Chat(messages=tuple(messages)), compression=compression, form=form)
        room = self.context_of(prompt) - prompt.num_tokens
        settings = Sampling(**({"max_tokens": room, "temperature": 0.0} | sampling))
        return self.start(prompt, settings, request_id=f"ask-{next(self._ids)}")

    # ── what a server uses ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def plan(self) -> EnginePlan:
        return self._engine.plan

    def prepare_chat(
        self, chat: Chat, *, tenant: str = "", compression: Compression = NOTHING, form: Form | None = None
    ) -> Prompt:
        """Fetch, count, decode and tokenise. Blocks: call it in a thread. Raises RequestError.

        form: what its answers must look like; of kind `tools`, calls are read out of them.
        """
        guide = None if form is None else self._guides.compile(form, chat.tools)
        prompt = self._prompter.chat(chat, tenant=tenant, compression=compression)
        calls = self.text.call_syntax if form is not None and form.kind == "tools" else None
        return replace(prompt, guide=guide, calls=calls)

    def guide(self, form: Form) -> Guide:
        """What holds answers to a form; those of one guide share what it may cost. Blocks. Raises RequestError."""
        return self._guides.compile(form)

    def prepare_text(
        self,
        text: str | Sequence[int],
        *,
        tenant: str = "",
        compression: Compression = NOTHING,
        guide: Guide | None = None,
    ) -> Prompt:
        """Tokenise a raw prompt, whose answers a guide may hold to a form. Raises RequestError."""
        return replace(self._prompter.text(text, tenant=tenant, compression=compression), guide=guide)

    def inspect(
        self, chat: Chat, *, tenant: str = "", compression: Compression = NOTHING, form: Form | None = None
    ) -> Inspection:
        """What would become of a chat's pictures, without an answer. Blocks as `prepare_chat`. Raises RequestError."""
        if form is not None:
            self._guides.compile(form, chat.tools)
        return self._prompter.inspect(chat, tenant=tenant, compression=compression)

    def predict(self, found: Inspection) -> Prediction:
        """At this engine's own pace, pictures that are encoded already left out; tokens may be cached besides."""
        pace = self._engine.pace
        items = {sight.item.digest: len(sight.item.tiles) for sight in found.sights if sight.item is not None}
        num_tiles = sum(tiles for digest, tiles in items.items() if not self.is_encoded(digest))
        return Prediction(
            encode_s=num_tiles * pace.tile_s if pace.tile_s or not num_tiles else None,
            prefill_s=(found.num_tokens or 0) * pace.prompt_token_s or None,
        )

    def is_encoded(self, digest: str) -> bool:
        """Whether the encoder's rows of an item are cached; its digest tells a tenant nothing of another's."""
        return digest in self._engine.runner.features

    def token_ids(
        self, source: Chat | str | Sequence[int], *, tenant: str = "", compression: Compression = NOTHING
    ) -> list[int]:
        """A prompt's ids, each row of a picture as the one that stands for pictures. Blocks. Raises RequestError."""
        if isinstance(source, str):
            return self.text.encode(source)  # it may be longer than the context
        if not isinstance(source, Chat):
            return list(source)
        ids = self.prepare_chat(source, tenant=tenant, compression=compression).token_ids
        picture = self.manifest.spec.image_token_id or 0  # of a model that takes none there is no row
        return [picture if one >= IMAGE_BASE else one for one in ids.tolist()]

    def context_of(self, prompt: Prompt) -> int:
        """Tokens that the prompt and its answer may have: a reduced prompt's answer begins at a later position."""
        left_out = prompt.num_positions - prompt.num_tokens
        return min(self.plan.max_model_len, self.manifest.spec.decoder.max_positions - left_out)

    def start(
        self, prompt: Prompt, sampling: Sampling, *, request_id: str, ending: Ending | None = None, terms: Terms = PLAIN
    ) -> Stream:
        """Queue one answer. Raises RequestError, OverloadError or BackendError at once, never blocks."""
        self.check_ids("logit_bias", sampling.logit_bias)
        self.check_ids("stop_token_ids", sampling.stop_ids)
        if prompt.guide is not None:
            _check_form(prompt.guide, sampling)
        stream = Stream(request_id, self.text, ending or Ending(), self._engine.abort, prompt.calls)
        self._engine.submit(prompt.request(request_id, sampling, terms), stream.push)
        return stream

    def check_ids(self, param: str, token_ids: Iterable[int]) -> None:
        """Raises RequestError for an id that is none of the vocabulary's."""
        vocab = self.manifest.spec.decoder.vocab_size
        strange = next((token for token in token_ids if not 0 <= token < vocab), None)
        if strange is not None:
            raise RequestError(f"`{param}` names token {strange}, ids go from 0 to {vocab - 1:,}", param=param)

    def placements(self, *, open_all: bool = False) -> dict[str, str]:
        """Where each open part really runs; `open_all` opens the encoders for it."""
        places = dict(self._places)
        encoder = self._engine.runner.encoder
        for modality in {Modality.IMAGE} if open_all and self.manifest.spec.vision else encoder.open_towers:
            places["vision"], places["projector"] = encoder.place(modality)
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


def _check_form(guide: Guide, sampling: Sampling) -> None:
    """Raises RequestError for what would keep an answer from its form."""
    if sampling.ignore_eos:
        raise RequestError("`ignore_eos` goes on where the form ends", hint="leave one of them out", param="ignore_eos")
    if guide.num_least is not None and guide.num_least > sampling.max_tokens:
        raise RequestError(
            f"a short answer in the form asked for takes {guide.num_least:,} tokens, "
            f"at most {sampling.max_tokens:,} may be answered",
            hint="raise `max_tokens`, or shorten the prompt",
            param="max_tokens",
        )


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
