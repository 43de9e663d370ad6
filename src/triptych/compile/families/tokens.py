"""The ids that end an answer and the text of a placeholder, as a checkpoint's own files tell them."""

from __future__ import annotations

from typing import Any

from triptych.compile.checkpoint import Checkpoint, json_object
from triptych.compile.families.section import Section
from triptych.errors import CheckpointError


def json_file(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    """A JSON object of the folder, None when it has no such file. Raises CheckpointError when it is broken."""
    path = checkpoint.folder / name
    return json_object(path) if path.is_file() else None


def eos_ids(checkpoint: Checkpoint, text: Section) -> tuple[int, ...]:
    """Where an answer ends: generation_config.json, else config.json, else the text config. At least one."""
    places = [json_file(checkpoint, "generation_config.json") or {}, checkpoint.config, text.values]
    found = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
    ids = [found] if isinstance(found, int) else found
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise CheckpointError(
            f"{checkpoint.folder} names no end token: eos_token_id is {found!r}",
            hint="set eos_token_id in generation_config.json",
        )
    return tuple(dict.fromkeys(ids))


def added_token(checkpoint: Checkpoint, token_id: int) -> str:
    """The text of an added token of tokenizer.json, such as a placeholder. Raises CheckpointError."""
    content = json_file(checkpoint, "tokenizer.json")
    if content is None:
        raise CheckpointError(
            f"{checkpoint.folder} has no tokenizer.json",
            hint="save the tokenizer once with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
        )
    for token in content.get("added_tokens", ()):
        if token.get("id") == token_id:
            return str(token["content"])
    raise CheckpointError(
        f"config.json says a picture's token is {token_id}; {checkpoint.folder}/tokenizer.json adds no such token"
    )
