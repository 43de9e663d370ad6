"""Over HTTP, 64 greedy tokens are transformers' own in fp32: alone, and sixteen at once in mixed order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from asking import uri
from checkpoints import make, picture, reference_inputs, reference_tokens, user
from scripted import serving
from triptych.compile.assemble import compile_checkpoint
from triptych.compile.config import CompileConfig
from triptych.engine.config import EngineConfig
from triptych.session import Session

pytestmark = pytest.mark.reference

NUM_TOKENS = 64
ASKED: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("How many animals are there? 🐈", ()),
    ("What is in this picture?", ((61, 37),)),
    ("Compare them.", ((7, 150), (1, 1))),
    ("Describe it.", ((200, 100),)),
)


def messages(text: str, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": uri(picture(*size))}} for size in sizes]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


async def crowd(url: str, order: Sequence[int]) -> list[list[bytes]]:
    """The tokens of each answer, as bytes; every other request is a stream."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(place: int, index: int) -> list[bytes]:
            asked: dict[str, Any] = {
                "model": (await client.models.list()).data[0].id, "messages": messages(*ASKED[index]),
                "temperature": 0, "max_tokens": NUM_TOKENS, "logprobs": True, "extra_body": {"ignore_eos": True},
            }  # fmt: skip
            if place % 2:
                choice = (await client.chat.completions.create(**asked)).choices[0]
                return [bytes(one.bytes) for one in choice.logprobs.content]
            stream = await client.chat.completions.create(stream=True, **asked)
            choices = [chunk.choices[0] async for chunk in stream]
            return [bytes(one.bytes) for choice in choices if choice.logprobs for one in choice.logprobs.content]

        return await asyncio.gather(*(one(place, index) for place, index in enumerate(order)))


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3", "llava", "llava-next"])
def test_the_tokens_are_those_of_transformers_alone_and_sixteen_at_once(kind: str, tmp_path_factory: Any) -> None:
    source = make(kind, tmp_path_factory.getbasetemp(), 0)
    target: Path = tmp_path_factory.mktemp("http") / kind
    compile_checkpoint(source, target, CompileConfig(weights="fp32"))
    config = EngineConfig(dtype="float", max_model_len=1024, max_num_batched_tokens=77)
    with Session.open(target, config=config) as session, serving(session) as url:
        expected = []
        for text, sizes in ASKED:
            inputs = reference_inputs(source, [user(text, num_images=len(sizes))], [picture(*size) for size in sizes])
            tokens = reference_tokens(source, inputs, num_tokens=NUM_TOKENS)
            expected.append([session.text.token_bytes(token) for token in tokens])
        for index in range(len(ASKED)):
            assert asyncio.run(crowd(url, [index])) == [expected[index]]
        order = [3, 1, 0, 2] * 4
        assert asyncio.run(crowd(url, order)) == [expected[index] for index in order]
