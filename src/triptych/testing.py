"""Doubles we ship: a model that answers by arithmetic, its plain twin, a hand-wound clock.

The model's «embedding» of a text token is (id, 0) and of a picture's row (mean brightness of its tile + row, 1). Its
decoder keeps what it is given in pages and answers with a checksum over everything its block table shows, so a wrong
page, position, row or order gives another answer than `plain_answer`, which has no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import BLOCK_TOKENS, Array
from triptych.core.bundle import SCHEMA_VERSION, Manifest
from triptych.core.policy import KVPolicy, Reduction
from triptych.core.request import Delta, Patches, Request, Sampling
from triptych.core.spec import DecoderSpec, ImageSpec, Modality, ModelSpec, RopeSpec
from triptych.engine.config import EnginePlan
from triptych.engine.encoder import Tower
from triptych.engine.evict.evictor import Evictor
from triptych.engine.features import Features
from triptych.engine.loop import Engine
from triptych.engine.runner import Runner
from triptych.media.fetch import MediaPolicy
from triptych.media.reduce import Reduced, reduce
from triptych.media.registry import IMAGE_BASE, place
from triptych.media.text import Text
from triptych.session import Session

VOCAB = 997
ROWS_PER_TILE = 4
END_ID = VOCAB - 1  # never answered, unless a test asks for it by bias


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class ArithmeticDecoder:
    """A `PagedDecoder` whose next token is a checksum of the whole context, read through the block table."""

    block_bytes = 1

    def __init__(self) -> None:
        self.calls = 0
        self.fail_when: Callable[[Mapping[str, Array]], bool] = lambda arrays: False
        self._pages: NDArray[np.float64] = np.empty((0, BLOCK_TOKENS, 3))

    def allocate(self, num_blocks: int) -> None:
        self._pages = np.full((num_blocks, BLOCK_TOKENS, 3), np.nan)

    def place(self) -> str:
        return "arithmetic"

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        self.calls += 1
        if self.fail_when(arrays):
            raise RuntimeError("told to fail")
        begins, table = arrays["subsequence_begins"], arrays["block_indices_begins"]
        rows: list[NDArray[np.float32]] = []
        for index, past in enumerate(arrays["past_lens"]):
            own = slice(begins[index], begins[index + 1])
            blocks = arrays["block_indices"][table[index] : table[index + 1]]
            positions = arrays["position_ids"][own]
            slots = np.arange(past, past + len(positions))
            tokens = np.column_stack([arrays["embeddings"][own], positions])
            self._pages[blocks[slots // BLOCK_TOKENS], slots % BLOCK_TOKENS] = tokens
            context = self._pages[blocks].reshape(-1, 3)[: past + len(positions)]
            rows += [_logits(_checksum(context[: slot + 1])) for slot in slots]
        assert arrays["max_context_len"] == max(arrays["past_lens"] + np.diff(begins))
        return {"logits": np.stack(rows)[arrays["sampled"]]} if rows else {}


class LayeredArithmetic(ArithmeticDecoder):
    """A `LayeredDecoder`: its next token is a checksum of what each layer has not forgotten, in the layer's own order.

    Each device has pages of its own. A layer's keys, values and queries are its tokens' embeddings, in one head.
    """

    num_layers = 3

    def __init__(self) -> None:
        super().__init__()
        self._pools: list[NDArray[np.float64]] = []  # one a layer; layers of one device have the same

    def allocate(self, num_blocks: int, devices: Sequence[str] = ()) -> None:
        places = devices or ("",) * self.num_layers
        pools = {
            place: np.full((num_blocks * places.count(place), BLOCK_TOKENS, 3), np.nan)
            for place in dict.fromkeys(places)
        }
        self._pools = [pools[place] for place in places]

    def read(self, layer: int, pages: NDArray[np.int64], num_rows: int) -> tuple[Array, Array]:
        rows = self._pools[layer][pages].reshape(1, -1, 3)[:, :num_rows, :2].astype(np.float32)
        return rows, rows

    def move(self, sources: Sequence[NDArray[np.int64]], targets: Sequence[NDArray[np.int64]]) -> None:
        rows = [pool.reshape(-1, 3)[slots] for pool, slots in zip(self._pools, sources, strict=True)]
        for pool, slots, own in zip(self._pools, targets, rows, strict=True):
            pool.reshape(-1, 3)[slots] = own

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        self.calls += 1
        if self.fail_when(arrays):
            raise RuntimeError("told to fail")
        begins, table = arrays["subsequence_begins"], arrays["block_indices_begins"]
        tokens = np.column_stack([arrays["embeddings"], arrays["position_ids"]])
        sums = np.zeros(len(tokens), np.int64)
        for layer, pool in enumerate(self._pools):
            for index, past in enumerate(arrays["past_lens"][layer]):
                own = np.arange(begins[index], begins[index + 1])
                pages = arrays["block_indices"][layer, table[index] : table[index + 1]]
                slots = past + np.arange(len(own))
                pool[pages[slots // BLOCK_TOKENS], slots % BLOCK_TOKENS] = tokens[own]
                context = pool[pages].reshape(-1, 3)
                sums[own] += [(layer + 1) * _checksum(context[: slot + 1]) for slot in slots]
        assert arrays["max_context_len"] == (arrays["past_lens"] + np.diff(begins)).max()
        out = {"logits": np.stack([_logits(int(total)) for total in sums])[arrays["sampled"]]}
        if "watched" in arrays:
            out["queries"] = np.stack([arrays["embeddings"][arrays["watched"], None]] * self.num_layers)
        return out


def layered_logits(contexts: Sequence[NDArray[np.float64]]) -> NDArray[np.float32]:
    """What `LayeredArithmetic` answers over what each layer still has, (num_rows, 3) each."""
    return _logits(sum((layer + 1) * _checksum(context) for layer, context in enumerate(contexts)))


def _checksum(context: NDArray[np.float64]) -> int:
    """context: (num_tokens, 3), each token's embedding and position."""
    weights = (context[:, 2].astype(np.int64) + 1) % 89 + 1
    return int((context[:, 0].astype(np.int64) * weights + context[:, 1].astype(np.int64) * 31).sum())


def _logits(checksum: int) -> NDArray[np.float32]:
    logits = np.zeros(VOCAB, np.float32)
    logits[checksum % END_ID] = 8.0
    logits[(checksum + 1) % END_ID] = 6.0
    return logits


class BrightnessEncoder:
    """A vision part: a tile's rows are its mean brightness plus the row's number."""

    def __init__(self) -> None:
        self.num_tiles = 0
        self.fail_when: Callable[[NDArray[np.uint8]], bool] = lambda pixels: False

    def place(self) -> str:
        return "brightness"

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        pixels = arrays["pixels"]
        if self.fail_when(pixels):
            raise RuntimeError("told to fail")
        self.num_tiles += len(pixels)
        mean = np.floor(pixels.reshape(len(pixels), -1).mean(axis=1))
        return {"features": (mean[:, None] + np.arange(ROWS_PER_TILE)).astype(np.float32)[..., None]}


class PassProjector:
    """A projector part: the row, and a 1 that marks it as a picture's."""

    def place(self) -> str:
        return "pass"

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        features = arrays["features"]
        return {"embeddings": np.concatenate([features, np.ones_like(features)], axis=-1)}


def text_table(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Embeddings of text ids: (n,) → (n, 2)."""
    return np.stack([ids, np.zeros_like(ids)], axis=-1).astype(np.float32)


def picture(brightness: int, *, num_tiles: int = 1, reduction: Reduction | None = None) -> Patches:
    """A gray picture of as many tiles; its digest is its content's, and its reduction's."""
    how = reduction or Reduction()
    return Patches(
        digest=f"{brightness}x{num_tiles}" if how.is_whole else f"{brightness}x{num_tiles} {how.method} {how.keep}",
        modality=Modality.IMAGE,
        tiles=np.full((num_tiles, 2, 2, 3), brightness, np.uint8),
        take=np.arange(num_tiles * ROWS_PER_TILE, dtype=np.int32),
        reduction=how,
        runs=(ROWS_PER_TILE,) * num_tiles,
    )


def request(
    request_id: str, prompt: Sequence[int | Patches], *, tenant: str = "", sampling: Sampling | None = None
) -> Request:
    """A request whose prompt is written as text ids and pictures in order; 8 greedy tokens unless told."""
    placeholder = VOCAB
    items = [part for part in prompt if isinstance(part, Patches)]
    ids: list[int] = []
    for part in prompt:
        ids += [placeholder] * len(part.take) if isinstance(part, Patches) else [part]
    placed = place(ids, placeholder, items)
    return Request(
        id=request_id,
        token_ids=placed.token_ids,
        positions=placed.positions,
        spans=placed.spans,
        patches={item.digest: item for item in items},
        sampling=sampling or Sampling(max_tokens=8, temperature=0.0),
        tenant=tenant,
    )


def plain_answer(asked: Request, num_tokens: int) -> list[int]:
    """What the arithmetic model must answer: the slow twin, without pages, chunks or caches."""
    context = plain_context(asked)
    answer: list[int] = []
    for at in range(num_tokens):
        answer.append(int(_logits(_checksum(context)).argmax()))
        context = np.concatenate([context, [[answer[-1], 0, asked.num_positions + at]]])
    return answer


def plain_context(asked: Request) -> NDArray[np.float64]:
    """A prompt's tokens as the arithmetic decoder keeps them: (num_tokens, 3)."""
    positions = np.arange(len(asked.token_ids)) if asked.positions is None else asked.positions
    text = text_table(np.where(asked.token_ids < IMAGE_BASE, asked.token_ids, 0))
    context: NDArray[np.float64] = np.column_stack([text.astype(np.float64), positions])
    for span in asked.spans:
        shown = plain_rows(asked.patches[span.digest])
        own = asked.token_ids[span.start : span.end] - IMAGE_BASE
        context[span.start : span.end, :2] = shown.rows[own]
        if asked.positions is not None:
            context[span.start : span.end, 2] += shown.kept[own]
    return context


def plain_rows(item: Patches) -> Reduced:
    """What the brightness encoder and the item's reduction make of it, at once and without a cache."""
    mean = np.floor(item.tiles.reshape(len(item.tiles), -1).mean(axis=1))
    rows = np.column_stack([mean[item.take // ROWS_PER_TILE] + item.take % ROWS_PER_TILE, np.ones(len(item.take))])
    return reduce(item, rows.astype(np.float32), text_table(item.question))


def plan(**changes: float) -> EnginePlan:
    """A small engine's plan; name what should differ."""
    facts: dict[str, object] = dict(
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, cache_type="f32", num_blocks=64,
        share_prefixes=True, encoder_cache_bytes=1 << 20, max_images=16, max_multimodal_tokens=512,
        vision_batch=4, max_num_queued=10_000, max_queue_s=1e9, choices=(),
    )  # fmt: skip
    return EnginePlan(**(facts | changes))  # type: ignore[arg-type]


class TinyEngine:
    """An engine over the arithmetic model, turned by hand: `submit`, then `run` until nothing is left to do."""

    def __init__(self, engine_plan: EnginePlan | None = None, forgetting: KVPolicy | None = None) -> None:
        """`forgetting`: the decoder's layers may forget apart, and by this policy's method."""
        self.plan = engine_plan or plan()
        self.decoder = ArithmeticDecoder()
        self.encoder = BrightnessEncoder()
        self.features = Features(self.plan.encoder_cache_bytes)
        self.clock = Clock()
        self.deltas: dict[str, list[Delta]] = {}
        evictor: Evictor | None = None
        if forgetting is None:
            self.decoder.allocate(self.plan.num_blocks)
        else:
            self.decoder = layered = LayeredArithmetic()
            layered.allocate(self.plan.num_blocks, forgetting.devices)
            spec = msgspec.structs.replace(tiny_manifest().spec.decoder, num_layers=layered.num_layers)
            evictor = Evictor(layered, spec, forgetting)
        tower = Tower(open_parts=lambda: (self.encoder, PassProjector()), max_tiles=self.plan.vision_batch)
        self.runner = Runner(self.decoder, text_table, {Modality.IMAGE: tower}, self.features, evictor)
        self.engine = Engine(self.runner, self.plan, eos_ids=frozenset({END_ID}), clock=self.clock)

    def submit(self, asked: Request) -> None:
        self.deltas[asked.id] = []
        self.engine.submit(asked, self.deltas[asked.id].append)

    def run(self, max_steps: int = 10_000) -> int:
        """Turn until idle; returns the number of steps. An engine that never gets idle is an error."""
        for steps in range(max_steps):
            if not self.engine.step():
                return steps
            self.clock.advance(0.01)
        raise AssertionError(f"still busy after {max_steps} steps")

    def answer(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]

    def last(self, request_id: str) -> Delta:
        return self.deltas[request_id][-1]

    def is_clean(self) -> bool:
        """Every block and every feature is back."""
        stats = self.engine.stats()
        return stats.free_blocks == stats.num_blocks and stats.held_features == 0


# ── with text around it ────────────────────────────────────────────────────────────────────────────────────────

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_text() -> Text:
    """A byte tokenizer: ids 0 to 255 are bytes, the rest of the vocabulary are made-up words it only speaks."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    words = [f"\u0120word{index}" for index in range(len(letters), END_ID - 1)]
    vocab = {token: index for index, token in enumerate([*letters, *words])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = Decoder()
    controls = ["<|im_start|>", "<|im_end|>", "<image>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    return Text(tokenizer, TEMPLATE, eos_ids=(END_ID,), placeholder="<image>")


def tiny_manifest(max_positions: int = 512) -> Manifest:
    """The manifest of a bundle that holds the arithmetic model."""
    decoder = DecoderSpec(
        num_layers=1, hidden=2, num_heads=1, num_kv_heads=1, head_dim=2, intermediate=2, vocab_size=VOCAB,
        max_positions=max_positions, norm_eps=1e-5, rope=RopeSpec(theta=1e4),
    )  # fmt: skip
    image = ImageSpec(
        tiling="one", tile_size=2, tokens_per_tile=ROWS_PER_TILE, resample="bilinear", placeholder="<image>"
    )
    spec = ModelSpec(family="tiny", decoder=decoder, image=image, eos_ids=(END_ID,), image_token_id=VOCAB)
    return Manifest(schema_version=SCHEMA_VERSION, name="tiny", spec=spec, parts=(), files=(), weights_digest="tiny")


def tiny_session(engine_plan: EnginePlan | None = None, policy: MediaPolicy | None = None) -> Session:
    """A session over the arithmetic model, on its own thread, ready in milliseconds; close it."""
    return tiny_session_over(TinyEngine(engine_plan), policy)


def tiny_session_over(engine: TinyEngine, policy: MediaPolicy | None = None) -> Session:
    """The same over an engine whose parts a test holds, to slow them down or make them fail."""
    places = {"decoder": engine.decoder.place()}
    manifest = tiny_manifest(max(512, engine.plan.max_model_len))
    return Session(manifest, tiny_text(), engine.engine, policy or MediaPolicy(), places)
