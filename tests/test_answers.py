"""The whole way from messages and pictures to an answer's tokens, held against transformers' own in fp32.

Our side: the family reads the checkpoint, its parts are compiled in fp32 and run by OpenVINO behind the engine, with
our template, tokenizer and tiles. Their side: the processor and `generate`, torch, eager attention. Sixteen questions
of every sort are asked at once, so that chunks, pages, shared beginnings and batches all take part.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from checkpoints import KINDS, assistant, make, picture, reference_inputs, reference_tokens, user
from parts import compile_parts, open_ov
from triptych.backends.reference import Reference
from triptych.core.chat import Chat, ImagePart, Message, TextPart
from triptych.core.policy import METHODS, Reduction
from triptych.core.request import Delta, Patches, Request, Sampling
from triptych.core.spec import Modality
from triptych.core.table import open_table
from triptych.engine.config import EngineConfig, resolve
from triptych.engine.encoder import Tower
from triptych.engine.features import Features
from triptych.engine.loop import Engine
from triptych.engine.runner import Runner
from triptych.media.image import prepare, prompt_text, runs
from triptych.media.reduce import reduce
from triptych.media.registry import place
from triptych.media.text import Text

pytestmark = pytest.mark.reference

NUM_TOKENS = 64
NUM_REDUCED = 12  # each is a whole prompt to the plain decoder
WHOLE = Reduction()
QUESTION_IDS = np.array([5, 6, 7], np.int32)

QUESTIONS: dict[str, tuple[Sequence, Sequence[tuple[int, int]]]] = {
    "text only": ([user("How many animals are there? 🐈")], []),
    "one odd picture": ([user("What is in this picture?", num_images=1)], [(61, 37)]),
    "a sliver, and a picture of one pixel": ([user("Compare them.", num_images=2)], [(7, 150), (1, 1)]),
    "a picture before a turn, another after": (
        [user("Look at this.", num_images=1), assistant("A dog."), user("And this? 这张图片", num_images=1)],
        [(100, 100), (33, 32)],
    ),
}


class Answerer:
    """One checkpoint behind the engine."""

    def __init__(self, source: Path, target: Path, **asked: int) -> None:
        self.spec = compile_parts(source, target)
        parts = open_ov(self.spec, target)
        config = EngineConfig(dtype="float", max_model_len=1024, max_num_seqs=16, **asked)
        plan = resolve(config, self.spec, block_bytes=parts.decoder.block_bytes, free_bytes=1 << 28)
        parts.decoder.allocate(plan.num_blocks)
        tower = Tower(open_parts=lambda: (parts.vision, parts.projector), max_tiles=4)
        table = open_table(target / "embedding.npy")
        runner = Runner(parts.decoder, table, {Modality.IMAGE: tower}, Features(plan.encoder_cache_bytes))
        self.engine = Engine(runner, plan, eos_ids=frozenset(self.spec.eos_ids))
        assert self.spec.image is not None
        self.text = Text.open(source, eos_ids=self.spec.eos_ids, placeholder=self.spec.image.placeholder)
        self._answers: queue.Queue[Delta] = queue.Queue()
        self.engine.start()

    def ids(self, messages: Sequence, images: Sequence[Image.Image]) -> list[int]:
        texts = [prompt_text(image.size, self.spec.image) for image in images]
        return self.text.encode_chat(chat_of(messages), texts)

    def items(self, images: Sequence[Image.Image], reduction: Reduction) -> list[Patches]:
        found = []
        for image in images:
            tiles, take = prepare(image, self.spec.image)
            found.append(
                Patches(
                    digest=f"{image.size} {reduction}", modality=Modality.IMAGE, tiles=tiles, take=take,
                    reduction=reduction, runs=runs(image.size, self.spec.image), question=QUESTION_IDS,
                )
            )  # fmt: skip
        return found

    def request(
        self, name: str, messages: Sequence, images: Sequence[Image.Image], reduction: Reduction = WHOLE
    ) -> Request:
        items = self.items(images, reduction)
        placed = place(self.ids(messages, images), self.spec.image_token_id, items)
        sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        patches = {item.digest: item for item in items}
        return Request(
            id=name,
            token_ids=placed.token_ids,
            positions=placed.positions,
            spans=placed.spans,
            patches=patches,
            sampling=sampling,
        )

    def answers(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        for request in requests:
            self.engine.submit(request, self._answers.put)
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        unfinished = len(requests)
        while unfinished:
            delta = self._answers.get(timeout=60)
            assert delta.error is None, delta.error
            tokens[delta.request_id] += delta.token_ids
            unfinished -= delta.finish is not None
        return tokens


REDUCTIONS = [Reduction(method=method, keep=0.5 if method != "cenprune" else 0.2) for method in METHODS]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_after_a_reduction_are_those_of_the_plain_decoder(kind: str, tmp_path_factory):
    source = make(kind, tmp_path_factory.getbasetemp(), 0)
    answerer = Answerer(source, tmp_path_factory.mktemp("reduced") / "parts", max_num_batched_tokens=45)
    torch.set_num_threads(1)
    reference = Reference.open(source)
    requests, expected = [], {}
    for name, (messages, sizes) in QUESTIONS.items():
        images = [picture(*size) for size in sizes]
        for reduction in REDUCTIONS if sizes else []:
            asked = answerer.request(f"{name} {reduction}", messages, images, reduction)
            requests.append(asked)
            ids, items = answerer.ids(messages, images), answerer.items(images, reduction)
            expected[asked.id] = plain_tokens(reference, ids, items, answerer.spec.image_token_id)
            assert len(asked.token_ids) < len(ids)
    answers = answerer.answers(requests)
    for name, tokens in answers.items():
        assert tokens[:NUM_REDUCED] == expected[name], name
    answerer.engine.close()


def plain_tokens(reference: Reference, ids: Sequence[int], items: Sequence[Patches], placeholder_id: int) -> list[int]:
    """Greedy, torch, fp32, no cache: the whole prompt token by token, without what the reduction drops."""
    table = reference.model.get_input_embeddings().weight.detach().numpy()
    shown = iter([row for item in items for row in plain_rows(reference, item, table)])
    embeddings, positions = [], []
    for position, token in enumerate(ids):
        row = next(shown) if token == placeholder_id else table[token]
        if row is not None:
            embeddings.append(row)
            positions.append(position)
    answer: list[int] = []
    with torch.inference_mode():
        for step in range(NUM_REDUCED):
            rows, places = torch.from_numpy(np.stack(embeddings))[None], torch.tensor(positions)[None]
            seen = torch.ones_like(places)  # or transformers takes each gap for the start of another sequence
            logits = reference.model(
                inputs_embeds=rows, position_ids=places, attention_mask=seen, use_cache=False
            ).logits
            answer.append(int(logits[0, -1].argmax()))
            embeddings.append(table[answer[-1]])
            positions.append(len(ids) + step)
    return answer


def plain_rows(reference: Reference, item: Patches, table: np.ndarray) -> list[np.ndarray | None]:
    """For each row of the whole item what stands in its place, None where nothing does."""
    made = reference.part("projector")(reference.part("vision")({"pixels": item.tiles}))
    rows = made["embeddings"].reshape(-1, table.shape[1])
    rows = np.concatenate([rows, made.get("extra", rows[:0])])[item.take]
    reduced = reduce(item, rows, table[item.question])
    stands = dict(zip(reduced.kept.tolist(), reduced.rows, strict=True))
    return [stands.get(row) for row in range(len(item.take))]


def chat_of(messages: Sequence) -> Chat:
    """The same conversation in our words."""

    def parts(message: dict) -> tuple:
        return tuple(
            TextPart(text=part["text"]) if part["type"] == "text" else ImagePart(source=b"")
            for part in message["content"]
        )

    return Chat(messages=tuple(Message(role=message["role"], parts=parts(message)) for message in messages))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_64_greedy_tokens_are_those_of_transformers_alone_and_sixteen_at_once(kind: str, seed: int, tmp_path_factory):
    source = make(kind, tmp_path_factory.getbasetemp(), seed)
    answerer = Answerer(source, tmp_path_factory.mktemp("answers") / "parts", max_num_batched_tokens=45)
    requests, expected = [], {}
    for name, (messages, sizes) in QUESTIONS.items():
        images = [picture(*size) for size in sizes]
        theirs = reference_inputs(source, messages, images)
        ours = answerer.request(name, messages, images)
        seen = np.where(ours.token_ids < (1 << 24), ours.token_ids, answerer.spec.image_token_id)
        assert seen.tolist() == theirs.input_ids.tolist(), name
        requests.append(ours)
        expected[name] = reference_tokens(source, theirs, num_tokens=NUM_TOKENS)
    for request in requests:
        assert answerer.answers([request])[request.id] == expected[request.id], request.id
    crowd = [renamed(request, f"{request.id} #{index}") for index in range(4) for request in reversed(requests)]
    for name, tokens in answerer.answers(crowd).items():
        assert tokens == expected[name.split(" #")[0]], name
    answerer.engine.close()


def renamed(request: Request, name: str) -> Request:
    return Request(
        id=name,
        token_ids=request.token_ids,
        positions=request.positions,
        spans=request.spans,
        patches=request.patches,
        sampling=request.sampling,
    )
