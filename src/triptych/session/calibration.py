"""Make calibration samples of conversations: the fp32 model reads them and answers them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.backends import ov
from triptych.backends.base import Placement
from triptych.compress.samples import Conversation, Sample, load, save
from triptych.core.bundle import Bundle
from triptych.core.chat import Chat, Message, TextPart
from triptych.core.progress import Progress
from triptych.core.request import Patches, Sampling
from triptych.core.spec import Modality, ModelSpec
from triptych.core.table import open_table
from triptych.engine.config import EngineConfig
from triptych.errors import ConfigError, RequestError
from triptych.media.registry import BASE, modality_of
from triptych.session.answer import Stream
from triptych.session.opening import CACHE
from triptych.session.prompt import Prompt
from triptych.session.session import Session

ANSWER_TOKENS = 64  # of an answer that the model gives itself, greedily
OWN_WORDS, OWN_TOKENS = 24, 512  # talks of the model's own, and how long each is
AT_ONCE = 8  # answers given together
TILES_AT_ONCE = 4
EXACT = Placement(compute="float")
ALONE = EngineConfig(dtype="float", enable_prefix_caching=False, max_queue_s=math.inf)  # nobody is told to come later


def prepare(
    bundle: Bundle, conversations: Sequence[Conversation], progress: Progress, *, cache: Path = CACHE
) -> list[Sample]:
    """A sample of each conversation; those prepared before are read from `cache`, so that work goes on where it ended.

    `bundle` is the model in fp32. Raises ConfigError with the name of the sample that the model cannot take.
    """
    paths = [cache / "samples" / f"{_digest(bundle, one)}.safetensors" for one in conversations]
    missing = [(one, path) for one, path in zip(conversations, paths, strict=True) if not path.is_file()]
    if missing:
        config = replace(ALONE, max_num_seqs=AT_ONCE)
        with Session.open(bundle.path, config=config) as session:
            maker = _Maker(session, bundle)
            for start in range(0, len(missing), AT_ONCE):
                progress("samples", start / len(missing))
                begun = [(maker.begin(one), path) for one, path in missing[start : start + AT_ONCE]]
                for said, path in begun:
                    save(maker.finish(said), path)
    progress("samples", 1.0)
    return [load(path) for path in paths]


def own_words(bundle: Bundle, progress: Progress, *, cache: Path = CACHE, num_tokens: int = OWN_TOKENS) -> list[Sample]:
    """What the model says when it is let run, each time from one drawn token on: text of all kinds that is nobody's
    (arXiv:2305.17888). Seeded, and kept in `cache`."""
    vocab = bundle.manifest.spec.decoder.vocab_size
    starts = np.random.default_rng(0).integers(0, vocab, OWN_WORDS)
    facts = (reader_digest(bundle), "own words", f"{num_tokens}", f"{starts.tolist()}")
    folder = cache / "samples" / hashlib.sha256("\n".join(facts).encode()).hexdigest()
    paths = [folder / f"{place}.safetensors" for place in range(OWN_WORDS)]
    if not all(path.is_file() for path in paths):
        config = replace(ALONE, max_num_seqs=OWN_WORDS)
        with Session.open(bundle.path, config=config) as session:
            maker = _Maker(session, bundle)
            begun = [maker.talk(int(start), place, num_tokens) for place, start in enumerate(starts)]
            for place, (said, path) in enumerate(zip(begun, paths, strict=True)):
                progress("the model's own words", place / len(begun))
                save(maker.finish(said), path)
    progress("the model's own words", 1.0)
    return [load(path) for path in paths]


def reader_digest(bundle: Bundle) -> str:
    """Of what makes tokens of a conversation and answers it: every file of the bundle, its spec, and this release."""
    files = [(file.path, file.sha256) for file in bundle.manifest.files]
    facts = (version("triptych"), files, bundle.manifest.spec)
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _digest(bundle: Bundle, conversation: Conversation) -> str:
    facts = (reader_digest(bundle), conversation.digest, str(ANSWER_TOKENS))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A prompt and its answer: the one that is arriving, or the one that the prompt ends with, from `start` on."""

    name: str
    prompt: Prompt
    start: int
    stream: Stream | None = None


class _Maker:
    """Holds the fp32 model open."""

    def __init__(self, session: Session, bundle: Bundle) -> None:
        self._session = session
        self._spec = bundle.manifest.spec
        self._table = open_table(bundle.file("embedding.npy"))
        parts = ("vision", "projector") if self._spec.vision is not None else ()
        self._towers = [ov.open_part(bundle.file(f"{part}.xml"), EXACT) for part in parts]

    def begin(self, one: Conversation) -> _Said:
        """Read the prompt; where no answer is given the model begins its own. Raises ConfigError."""
        try:
            asked = self._session.prepare_chat(one.chat)
            if one.answer is not None:
                return self._given(one, one.answer, asked)
            sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0)
            stream = self._session.start(asked, sampling, request_id=one.name)
            return _Said(name=one.name, prompt=asked, start=asked.num_tokens, stream=stream)
        except RequestError as error:
            raise ConfigError(f"sample {one.name}: {error.message}", hint=error.hint) from error

    def talk(self, start: int, seed: int, num_tokens: int) -> _Said:
        """Begin a talk of the model's own, as it would go: drawn from its whole distribution, to where it ends."""
        prompt = self._session.prepare_text([start])
        room = min(num_tokens, self._session.context_of(prompt)) - 1
        sampling = Sampling(max_tokens=room, temperature=1.0, seed=seed)
        stream = self._session.start(prompt, sampling, request_id=f"talk-{seed}")
        return _Said(name=f"talk {seed}", prompt=prompt, start=1, stream=stream)

    def finish(self, said: _Said) -> Sample:
        ids = said.prompt.token_ids
        if said.stream is not None:  # its end token included, where it comes to one
            ids = np.concatenate([ids, np.array(said.stream.answer().token_ids, np.int32)])
        else:
            ends = np.flatnonzero(np.isin(ids[said.start :], self._spec.eos_ids))
            ids = ids[: said.start + int(ends[0]) + 1] if len(ends) else ids
        modality = modality_of(ids)
        tiles, rows = _media(said.prompt, self._spec)
        embeddings = self._table(np.where(modality == Modality.TEXT, ids, 0))
        if len(tiles):
            embeddings[modality != Modality.TEXT] = self._projected(tiles)[rows]
        return Sample(
            name=said.name,
            token_ids=ids,
            embeddings=embeddings,
            modality=modality,
            is_answer=np.arange(len(ids)) >= said.start,
            tiles=tiles,
            rows=rows,
        )

    def _given(self, one: Conversation, answer: str, asked: Prompt) -> _Said:
        """The sample's own answer, as the chat template writes it."""
        reply = Message(role="assistant", parts=(TextPart(text=answer),))
        chat = Chat(messages=(*one.chat.messages, reply), add_generation_prompt=False)
        prompt = self._session.prepare_chat(chat)
        length = min(asked.num_tokens, prompt.num_tokens)
        differs = np.flatnonzero(asked.token_ids[:length] != prompt.token_ids[:length])
        return _Said(name=one.name, prompt=prompt, start=int(differs[0]) if len(differs) else length)

    def _projected(self, tiles: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Rows of all tiles, then the projector's own constants, (num_rows, hidden)."""
        encoder, projector = self._towers
        found, extra = [], None
        for start in range(0, len(tiles), TILES_AT_ONCE):
            out = projector({"features": encoder({"pixels": tiles[start : start + TILES_AT_ONCE]})["features"]})
            found.append(out["embeddings"].reshape(-1, self._spec.decoder.hidden))
            extra = out.get("extra")
        return np.concatenate(found if extra is None else [*found, extra])


def _media(prompt: Prompt, spec: ModelSpec) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """All tiles of a prompt, and `Sample.rows`."""
    if spec.vision is None or spec.projector is None or not prompt.spans:
        size = 0 if spec.vision is None else spec.vision.image_size
        return np.empty((0, size, size, 3), np.uint8), np.empty(0, np.int32)
    items: dict[str, Patches] = {span.digest: prompt.patches[span.digest] for span in prompt.spans}
    per_tile = spec.projector.num_tokens
    total = sum(len(item.tiles) for item in items.values()) * per_tile
    first, rows = 0, {}
    for digest, item in items.items():
        own = len(item.tiles) * per_tile
        rows[digest] = np.where(item.take < own, item.take + first, item.take - own + total).astype(np.int32)
        first += own
    shown = [rows[span.digest][prompt.token_ids[span.start : span.end] - BASE[span.modality]] for span in prompt.spans]
    return np.concatenate([item.tiles for item in items.values()]), np.concatenate(shown)
