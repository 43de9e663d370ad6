"""The prompts that verification feeds: styles, odd lengths, and pictures where it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.compile.verify import inputs
from triptych.core.chat import Chat, ImagePart, Message, Part, TextPart
from triptych.core.request import Patches
from triptych.core.spec import ImageSpec, Modality, ModelSpec, VisionSpec
from triptych.errors import RequestError
from triptych.media import image as pictures
from triptych.media.registry import modality_of, place
from triptych.media.text import Text

TEXT_TOKENS = 96  # of each style
MAX_VISION_FLOPS = 1e12  # about six seconds of fp32 on two cores, for all pictures together
MAX_IMAGE_TOKENS = 2048  # of all prompts with pictures
QUESTION = "Describe what is in the picture, from left to right."


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, teacher-forced. token_ids: (num_tokens,) int32 global ids; items: its pictures, in order."""

    name: str
    token_ids: NDArray[np.int32]
    items: tuple[Patches, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def judged(self) -> NDArray[np.int64]:
        """The positions whose next token the model chooses: not those before a picture's own rows."""
        is_text = modality_of(self.token_ids) == Modality.TEXT
        return np.flatnonzero(np.append(is_text[1:], True))


def prompts_for(spec: ModelSpec, text: Text) -> tuple[Prompt, ...]:
    """The same for the same model on every machine. At least one shows a picture if the model sees."""
    longest = spec.decoder.max_positions
    styles = {name: text.encode(sample) for name, sample in inputs.TEXTS.items()}
    found = [Prompt(name=name, token_ids=_cut(ids, min(TEXT_TOKENS, longest))) for name, ids in styles.items()]
    running = [token for ids in styles.values() for token in ids]
    found += [Prompt(name=f"{n} tokens", token_ids=_cut(running, n)) for n in inputs.ODD_LENGTHS if n <= longest]
    return tuple(found) + tuple(_with_pictures(spec, text))


def describe(found: Sequence[Prompt]) -> str:
    """What was fed, in words."""
    plain = [prompt for prompt in found if not prompt.items]
    seeing = [prompt for prompt in found if prompt.items]
    words = f"{len(plain)} texts of {min(map(len, plain))} to {max(map(len, plain))} tokens"
    if seeing:
        num_tiles = sum(len(item.tiles) for prompt in seeing for item in prompt.items)
        words += f", {len(seeing)} prompts with pictures ({num_tiles} tiles) of {min(map(len, seeing))}"
        words += f" to {max(map(len, seeing))} tokens"
    return words


def _cut(ids: Sequence[int], num_tokens: int) -> NDArray[np.int32]:
    return np.asarray(ids[:num_tokens], np.int32)


def _with_pictures(spec: ModelSpec, text: Text) -> Iterator[Prompt]:
    """Two pictures of one tile each, then each as the family shows it, as far as the budget goes."""
    if spec.image is None or spec.vision is None:
        return
    drawn = {name: Image.fromarray(picture) for name, picture in inputs.pictures().items()}
    low = pictures.at_detail(spec.image, "low")
    first, second, *_ = drawn.values()
    wanted = [("two pictures, small", [first, second], low)]
    wanted += [(name, [picture], spec.image) for name, picture in drawn.items()]
    left_tiles = max(1, int(MAX_VISION_FLOPS / _tile_flops(spec.vision)))
    left_tokens = min(MAX_IMAGE_TOKENS, spec.decoder.max_positions)
    is_first = True
    for name, shown, how in wanted:
        prompt = _prompt(name, shown, how, (spec, text))
        num_tiles = sum(len(item.tiles) for item in prompt.items)
        if is_first or (num_tiles <= left_tiles and len(prompt) <= left_tokens):
            left_tiles, left_tokens, is_first = left_tiles - num_tiles, left_tokens - len(prompt), False
            yield prompt


def _prompt(name: str, shown: Sequence[Image.Image], how: ImageSpec, model: tuple[ModelSpec, Text]) -> Prompt:
    spec, text = model
    texts = [pictures.prompt_text(picture.size, how) for picture in shown]
    items = []
    for index, picture in enumerate(shown):
        tiles, take = pictures.prepare(picture, how)
        items.append(Patches(digest=f"{name} {index}", modality=Modality.IMAGE, tiles=tiles, take=take))
    assert spec.image_token_id is not None
    ids = prompt_ids(texts, text) or _bare_ids(items, spec.image_token_id, text)
    return Prompt(name=name, token_ids=place(ids, spec.image_token_id, items).token_ids, items=tuple(items))


def prompt_ids(image_texts: Sequence[str], text: Text) -> Sequence[int] | None:
    """The pictures and the question by the chat template; None where the model has no template for them."""
    shown: tuple[Part, ...] = tuple(ImagePart(source=b"") for _ in image_texts)
    message = Message(role="user", parts=(*shown, TextPart(text=QUESTION)))
    try:
        return text.encode_chat(Chat(messages=(message,)), image_texts)
    except RequestError:
        return None


def _bare_ids(items: Sequence[Patches], placeholder_id: int, text: Text) -> Sequence[int]:
    return [*([placeholder_id] * sum(item.num_tokens for item in items)), *text.encode(QUESTION)]


def _tile_flops(vision: VisionSpec) -> float:
    """Arithmetic of one tile: a ViT's layers; a convolutional tower is small beside any of them."""
    weights = vision.num_layers * (4 * vision.hidden**2 + 2 * vision.hidden * vision.intermediate)
    return max(1e9, 2.0 * weights * vision.num_tokens)
