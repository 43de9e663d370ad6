"""What preprocessor_config.json says of pictures; what is not built is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families.section import Section
from triptych.compile.families.tokens import json_file
from triptych.errors import CheckpointError

Resample = Literal["bilinear", "bicubic", "lanczos"]
RESAMPLE: dict[Any, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]
COMMON = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}


def read_preprocessor(checkpoint: Checkpoint, defaults: Mapping[str, Mapping[str, Any]]) -> Section:
    """The facts over the defaults of their processor, which `defaults` has by name without `Fast`."""
    section = Section("preprocessor_config.json", _content(checkpoint))
    kind = section.value("image_processor_type") or section.value("feature_extractor_type")
    name = str(kind).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    known = Section(section.where, {"image_processor_type": name}).one_of("image_processor_type", defaults)
    section = Section(section.where, section.values, COMMON | dict(known) | {"image_processor_type": name})
    for key in ("do_resize", "do_rescale", "do_normalize"):
        section.must_be(key, True)
    if abs(section.number("rescale_factor") * 255 - 1) > 1e-6:
        raise CheckpointError(f"{section.where}: rescale_factor is {section.value('rescale_factor')}, not 1/255")
    return section


def _content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Its own file, or where transformers 5 puts it, inside processor_config.json."""
    found = json_file(checkpoint, "preprocessor_config.json")
    if found is None:
        found = (json_file(checkpoint, "processor_config.json") or {}).get("image_processor")
    if found is None:
        raise CheckpointError(f"{checkpoint.folder} has no preprocessor_config.json")
    return found


def square(section: Section, key: str) -> int | None:
    """The side that {height, width}, or a bare number, asks for; None when the key says something else."""
    found = section.value(key)
    if isinstance(found, int):
        return found
    if isinstance(found, Mapping) and found.get("height") is not None:
        size = section.section(key)
        if size.integer("height") != size.integer("width"):
            raise CheckpointError(f"{section.where}: {key} is {found}; only squares are built")
        return size.integer("height")
    return None


def edge(section: Section, key: str, which: Literal["shortest_edge", "longest_edge"]) -> int | None:
    """The length of one edge, None when the key says something else; a bare number is the shortest edge."""
    found = section.value(key)
    if isinstance(found, int):
        return found if which == "shortest_edge" else None
    return section.section(key).integer(which) if isinstance(found, Mapping) and found.get(which) is not None else None


def grids(section: Section, key: str) -> tuple[tuple[int, int], ...]:
    """(height, width) pairs, in pixels."""
    found = section.value(key)
    if not isinstance(found, Sequence) or not found:
        raise section.wrong(key, "a list of (height, width)")
    pairs = tuple(tuple(pair) for pair in found)
    if not all(len(pair) == 2 and all(isinstance(side, int) for side in pair) for pair in pairs):
        raise section.wrong(key, "a list of (height, width)")
    return tuple((pair[0], pair[1]) for pair in pairs)
