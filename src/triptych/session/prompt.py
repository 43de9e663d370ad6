"""Messages to a prompt: fetch, count, refuse what cannot be served, then decode and place."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.core.bundle import Manifest
from triptych.core.chat import Chat, ImagePart, TextPart
from triptych.core.policy import QUERY_AWARE, Compression, KVPolicy, Reduction
from triptych.core.request import Guide, Patches, Request, Sampling, Span
from triptych.core.spec import ImageSpec, Modality
from triptych.core.stages import Ledger, Spent
from triptych.engine.config import EnginePlan
from triptych.errors import ContextError, MediaError, OverloadError, RequestError, unwound
from triptych.media import image as pictures
from triptych.media.fetch import Decoders, MediaPolicy, resolve
from triptych.media.registry import DigestFacts, digest, place
from triptych.media.text import CallSyntax, Text
from triptych.session import allowed
from triptych.session.room import Room, Take

NOTHING, WHOLE = Compression(), Reduction()
Before = TypeVar("Before")
After = TypeVar("After")
CHARACTERS_A_TOKEN = 16  # more than any text of people has; only runs of blanks have more
MOST_CHARACTERS_A_TOKEN = 32  # of the context: a longer text is refused unread, whatever it consists of


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which a request is served; as `Request` has them."""

    caller: str = ""
    priority: int = 0
    deadline_s: float | None = None


PLAIN = Terms()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that is ready for the engine; any number of requests may be made of it."""

    token_ids: NDArray[np.int32]  # global ids
    num_positions: int  # length before any reduction
    positions: NDArray[np.int32] | None = None  # as `Request` has them
    spans: tuple[Span, ...] = ()
    patches: Mapping[str, Patches] = field(default_factory=dict)
    tenant: str = ""
    kv: KVPolicy | None = None
    num_protected: int = 0
    guide: Guide | None = None  # what its answers are held to
    calls: CallSyntax | None = None  # how its answers write calls of tools, where they may have any
    spent: tuple[Spent, ...] = ()  # what its preparation took, stage by stage

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def request(self, request_id: str, sampling: Sampling, terms: Terms = PLAIN) -> Request:
        return Request(
            id=request_id,
            token_ids=self.token_ids,
            positions=self.positions,
            spans=self.spans,
            patches=self.patches,
            sampling=sampling if self.guide is None else replace(sampling, guide=self.guide),
            tenant=self.tenant,
            caller=terms.caller,
            priority=terms.priority,
            deadline_s=terms.deadline_s,
            kv=self.kv,
            num_protected=self.num_protected,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of a prompt before it is decoded: what its header says."""

    data: bytes
    spec: ImageSpec
    header: pictures.ImageHeader

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), upright."""
        return self.header.width, self.header.height

    @property
    def runs(self) -> tuple[int, ...]:
        return pictures.runs(self.size, self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is known of one picture. item: only of a prompt that is not refused for its length."""

    picture: Picture | None = None
    item: Patches | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What would become of a chat. num_tokens: of its prompt, reduced; None where a picture cannot be read."""

    sights: tuple[Sight, ...]
    reduction: Reduction
    num_tokens: int | None
    refusal: RequestError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds that a prompt would take, waiting apart; None before this engine has done such a thing."""

    encode_s: float | None
    prefill_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Showing:
    """How every picture of a prompt is shown: all that its features depend on besides its pixels."""

    tenant: str
    spec: ImageSpec | None  # None: the model takes text only
    reduction: Reduction
    question: NDArray[np.int32]  # of a reduction that looks at it, else empty


class Prompter:
    """Turns what a user says into a `Prompt`. Its methods block: they fetch, and wait for a decoder process."""

    def __init__(
        self, manifest: Manifest, text: Text, plan: EnginePlan, decoders: Decoders, policy: MediaPolicy
    ) -> None:
        self._manifest = manifest
        self._text = text
        self._plan = plan
        self._decoders = decoders
        self._policy = policy
        self._room = Room("tiles", policy.max_tiles_bytes)

    def chat(self, chat: Chat, *, tenant: str = "", compression: Compression = NOTHING) -> Prompt:
        """Raises RequestError, MediaError or ContextError, all before any picture is decoded where that can be."""
        kv = allowed.kv_policy(compression, self._plan, self._manifest)
        showing, parts = self._begin(chat, tenant, compression)
        ledger = Ledger()
        with self._room.making() as take:
            seen = _each(partial(self._look, ledger, showing, take), parts)
            with ledger.time("tokenize", Modality.TEXT):
                ids = self._ids(chat, seen, showing.reduction)
            take(_num_bytes(seen))
            items = _each(partial(self._prepare, ledger, showing), seen)
            self._room.keep(items)
        placed = place(ids, self._manifest.spec.image_token_id, items)
        return Prompt(
            token_ids=placed.token_ids,
            num_positions=len(ids),
            positions=placed.positions,
            spans=placed.spans,
            patches={item.digest: item for item in items},
            tenant=tenant,
            kv=kv,
            num_protected=0 if kv is None else self._num_protected(chat, ids),
            spent=tuple(ledger.spent),
        )

    def inspect(self, chat: Chat, *, tenant: str = "", compression: Compression = NOTHING) -> Inspection:
        """What `chat` would make of it, picture by picture. Raises RequestError for what is no picture's fault."""
        showing, parts = self._begin(chat, tenant, compression)
        with self._room.making() as take:
            sights = [self._sight(part, showing, take) for part in parts]
            seen = [sight.picture for sight in sights if sight.picture is not None]
            num_tokens, refusal = None, _first_error(sights)
            if refusal is None:
                try:
                    num_tokens, _ = _lengths(len(self._ids(chat, seen, showing.reduction)), seen, showing.reduction)
                    take(_num_bytes(seen))
                    sights = [self._unpacked(picture, showing) for picture in seen]
                    self._room.keep(sight.item for sight in sights if sight.item is not None)
                    refusal = _first_error(sights)
                except OverloadError:
                    raise  # of others, not of this chat
                except RequestError as error:
                    refusal = unwound(error)
        return Inspection(sights=tuple(sights), reduction=showing.reduction, num_tokens=num_tokens, refusal=refusal)

    def text(self, text: str | Sequence[int], *, tenant: str = "", compression: Compression = NOTHING) -> Prompt:
        """A raw prompt, as /v1/completions has it: a string, or the tokenizer's ids."""
        vocab = self._manifest.spec.decoder.vocab_size
        self._refuse_long([text] if isinstance(text, str) else [])
        ledger = Ledger()
        with ledger.time("tokenize", Modality.TEXT):
            ids = self._text.encode(text) if isinstance(text, str) else list(text)
        strange = next((token for token in ids if not 0 <= token < vocab), None)
        if strange is not None:
            raise RequestError(f"token id {strange} is not in 0 to {vocab - 1}", param="prompt")
        self._check_length(len(ids), [], WHOLE)
        kv = allowed.kv_policy(compression, self._plan, self._manifest)
        token_ids = np.array(ids, np.int32)
        return Prompt(token_ids=token_ids, num_positions=len(ids), tenant=tenant, kv=kv, spent=tuple(ledger.spent))

    def _begin(self, chat: Chat, tenant: str, compression: Compression) -> tuple[Showing, list[ImagePart]]:
        """Everything that can be refused before a picture is fetched."""
        parts = [part for message in chat.messages for part in message.parts if isinstance(part, ImagePart)]
        reduction = allowed.reduction(compression, self._plan)
        self._check_images(parts)
        self._refuse_long(_texts(chat))
        spec = self._manifest.spec.image
        if chat.shown and spec is None:
            raise RequestError(f"{self._manifest.name} shows no pictures", param="mm_processor_kwargs")
        spec = None if spec is None else pictures.adapted(spec, chat.shown)
        return Showing(tenant=tenant, spec=spec, reduction=reduction, question=self._question(chat, reduction)), parts

    def _ids(self, chat: Chat, seen: list[Picture], reduction: Reduction) -> list[int]:
        """The prompt's ids, before its pictures are reduced."""
        texts = [pictures.prompt_text(picture.size, picture.spec) for picture in seen]
        ids = self._text.encode_chat(chat, texts)
        self._check_length(len(ids), seen, reduction)
        return ids

    def _sight(self, part: ImagePart, showing: Showing, take: Take) -> Sight:
        try:
            return Sight(picture=self._look(Ledger(), showing, take, part))
        except MediaError as error:
            return Sight(error=unwound(error))

    def _unpacked(self, picture: Picture, showing: Showing) -> Sight:
        try:
            return Sight(picture=picture, item=self._prepare(Ledger(), showing, picture))
        except MediaError as error:
            return Sight(picture=picture, error=unwound(error))

    def _question(self, chat: Chat, reduction: Reduction) -> NDArray[np.int32]:
        """The last user message's text, for a reduction that looks at it."""
        if reduction.is_whole or reduction.method not in QUERY_AWARE:
            return np.empty(0, np.int32)
        asking = next((message for message in reversed(chat.messages) if message.role == "user"), None)
        texts = [] if asking is None else [part.text for part in asking.parts if isinstance(part, TextPart)]
        return np.array(self._text.encode("\n".join(texts)), np.int32)

    def _num_protected(self, chat: Chat, ids: Sequence[int]) -> int:
        """Tokens at the start that the system messages at the start and the tools alone would have written too."""
        system = tuple(itertools.takewhile(lambda message: message.role == "system", chat.messages))
        if any(isinstance(part, ImagePart) for message in system for part in message.parts):
            return 0
        if not system and not chat.tools:
            return 0
        try:
            alone = self._text.encode_chat(replace(chat, messages=system, add_generation_prompt=False))
        except RequestError:  # a template may ask for more than a system message
            return 0
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(alone, ids, strict=False)))

    def _check_images(self, parts: list[ImagePart]) -> None:
        if parts and self._manifest.spec.image is None:
            raise MediaError(f"{self._manifest.name} takes text only", param="messages")
        if len(parts) > self._plan.max_images:
            raise MediaError(
                f"the request has {len(parts)} images, the limit is {self._plan.max_images}",
                hint="--limit-mm-per-prompt sets it",
                param="messages",
            )

    def _refuse_long(self, texts: Iterable[str]) -> None:
        """Refuse by its beginning what is far beyond the context: all of it would take the tokenizer seconds."""
        text, context = "".join(texts), self._plan.max_model_len
        size, most = CHARACTERS_A_TOKEN * context, MOST_CHARACTERS_A_TOKEN * context
        reason = f"at most {most:,} are read"
        if size < len(text) <= most:
            num_tokens = len(self._text.encode(text[:size]))
            if num_tokens <= 2 * context:  # too few for the cut to make no difference
                return
            reason = f"the first {size:,} alone are {num_tokens:,} tokens"
        if size < len(text):
            raise ContextError(
                f"the text has {len(text):,} characters, {reason}; the context holds {context:,} with the answer",
                hint="shorten the prompt, or serve with a larger --max-model-len",
                param="messages",
            )

    def _look(self, ledger: Ledger, showing: Showing, take: Take, part: ImagePart) -> Picture:
        assert showing.spec is not None
        with ledger.time("fetch", Modality.IMAGE):
            data = resolve(part.source, self._policy)
        take(len(data))  # it has come already: each thread that fetches may have one file more
        header = pictures.probe(data, self._policy.image)
        picture = Picture(data=data, spec=pictures.at_detail(showing.spec, part.detail), header=header)
        pictures.count(picture.size, picture.spec)  # or the family cannot show it
        return picture

    def _check_length(self, num_positions: int, seen: list[Picture], reduction: Reduction) -> None:
        """num_positions: the prompt's length before its pictures are reduced."""
        num_tokens, num_media = _lengths(num_positions, seen, reduction)
        if num_media > self._plan.max_multimodal_tokens:
            raise ContextError(
                f"the images need {num_media:,} tokens, the limit is {self._plan.max_multimodal_tokens:,}",
                hint="send fewer or smaller images, detail: low, or a smaller triptych.keep_visual",
                param="messages",
            )
        if num_tokens >= self._plan.max_model_len:
            raise ContextError(
                f"the prompt has {num_tokens:,} tokens ({num_media:,} of them for images), "
                f"the context holds {self._plan.max_model_len:,} with the answer",
                hint="shorten the prompt, or serve with a larger --max-model-len",
                param="messages",
            )
        if num_positions >= self._manifest.spec.decoder.max_positions:
            raise ContextError(
                f"the prompt has {num_positions:,} tokens before its images are reduced to {num_media:,}, "
                f"the model has {self._manifest.spec.decoder.max_positions:,} positions with the answer",
                hint="shorten the prompt, or send fewer or smaller images",
                param="messages",
            )

    def _prepare(self, ledger: Ledger, showing: Showing, picture: Picture) -> Patches:
        began_s = time.perf_counter()
        prepared = self._decoders.prepare(picture.data, self._policy.image, picture.spec)
        for stage, seconds in (("unpack", prepared.unpack_s), ("preprocess", prepared.preprocess_s)):
            ledger.add(stage, Modality.IMAGE, began_s=began_s, seconds=seconds)
            began_s += seconds
        return Patches(
            digest=self._digest(prepared, picture.spec, showing),
            modality=Modality.IMAGE,
            tiles=prepared.tiles,
            take=prepared.take,
            reduction=showing.reduction,
            runs=picture.runs,
            question=showing.question,
        )

    def _digest(self, prepared: pictures.PreparedImage, spec: ImageSpec, showing: Showing) -> str:
        """A picture that is shown whole has one digest, whatever method was named."""
        reduction = showing.reduction
        settings = spec if reduction.is_whole else [spec, reduction, showing.question.tolist()]
        return digest(
            DigestFacts(
                modality=Modality.IMAGE,
                content_sha256=prepared.content_sha256,
                geometry=prepared.size,
                settings=msgspec.json.encode(settings).decode(),
                weights_digest=self._manifest.weights_digest,
                tenant=showing.tenant,
            )
        )


def _texts(chat: Chat) -> Iterator[str]:
    """All that a chat's template is given to write, in pieces."""
    for message in chat.messages:
        yield from (part.text for part in message.parts if isinstance(part, TextPart))
        yield from filter(None, (message.tool_call_id, message.name))
        yield from (word for call in message.tool_calls for word in (call.id, call.name, call.arguments))
    try:
        yield from (msgspec.json.encode(one).decode() for one in (chat.tools, chat.template_args) if one)
    except RecursionError:
        raise RequestError("tools or template arguments are nested too deeply", param="messages") from None


def _lengths(num_positions: int, seen: list[Picture], reduction: Reduction) -> tuple[int, int]:
    """Tokens of the reduced prompt, and those of them that are media. num_positions: before the reduction."""
    runs = [run for picture in seen for run in picture.runs]
    num_media = sum(reduction.count(run) for run in runs)
    return num_positions - sum(runs) + num_media, num_media


def _num_bytes(seen: list[Picture]) -> int:
    """Of the tiles that these pictures will be."""
    return sum(pictures.num_bytes(picture.size, picture.spec) for picture in seen)


def _first_error(sights: list[Sight]) -> RequestError | None:
    return next((sight.error for sight in sights if sight.error is not None), None)


def _each(do: Callable[[Before], After], pictures_of: Sequence[Before]) -> list[After]:
    """Do it to each; what goes wrong says with which of several."""
    done: list[After] = []
    for at, one in enumerate(pictures_of):
        try:
            done.append(do(one))
        except MediaError as error:
            where = f"picture {at + 1} of {len(pictures_of)}: " if len(pictures_of) > 1 else ""
            raise MediaError(where + error.message, hint=error.hint, param=error.param) from None
    return done
