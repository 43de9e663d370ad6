"""Damaged files, read as a decoder process reads them; and some of them sent through the pool of those processes."""

from __future__ import annotations

import resource
import signal
import warnings
from random import Random

import numpy as np

from fuzz.files import corpus
from fuzz.mutate import damaged
from triptych.core.spec import ImageSpec
from triptych.errors import MediaError, OverloadError
from triptych.media.fetch import DecoderConfig, Decoders
from triptych.media.image import ImageLimits, PreparedImage, count, probe, read

LIMITS = ImageLimits(max_pixels=4_000_000)
SPLIT = ImageSpec(
    tiling="split", tile_size=16, tokens_per_tile=4, resample="lanczos", longest_edge=64, placeholder="<image>",
    open_mark="<f>", grid_mark="<{row},{col}>", whole_mark="<g>",
)  # fmt: skip
ONE = ImageSpec(tiling="one", tile_size=16, tokens_per_tile=4, resample="bicubic", placeholder="<image>")
CROP = ImageSpec(
    tiling="one", tile_size=16, tokens_per_tile=4, resample="bicubic", placeholder="<image>", fit="shortest_crop"
)
GRIDS = ImageSpec(
    tiling="anyres", tile_size=16, tokens_per_tile=4, resample="bicubic", placeholder="<image>",
    grids=((16, 32), (32, 16), (32, 32)), has_newline=True,
)  # fmt: skip
SPECS = (SPLIT, ONE, CROP, GRIDS)


class Media:
    """A case is a damaged file and a family; the outcome is its format, and «seen» or why it was refused."""

    max_memory_bytes = 1536 * 2**20

    def __init__(self) -> None:
        warnings.simplefilter("ignore")
        self._corpus = corpus()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    def run(self, number: int) -> str:
        data, spec = self.case(number)
        signal.setitimer(signal.ITIMER_PROF, 10.0)  # the worker's own limit: SIGPROF ends the process
        try:
            outcome = judged(read(data, LIMITS, spec), data, spec)
        except MediaError as error:
            outcome = refusal(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return outcome

    def case(self, number: int) -> tuple[bytes, ImageSpec]:
        rng = Random(f"media {number}")
        return damaged(rng.choice(self._corpus), rng, self._corpus), rng.choice(SPECS)

    def close(self) -> None:
        pass


class Pool(Media):
    """The same cases, sent to decoder processes as a server sends them."""

    def __init__(self) -> None:
        super().__init__()
        self._decoders = Decoders(DecoderConfig(num_workers=1))

    def run(self, number: int) -> str:
        data, spec = self.case(number)
        try:
            return judged(self._decoders.prepare(data, LIMITS, spec), data, spec)
        except MediaError as error:
            ended = "ended its decoder" in error.message
            return "FAULT: a decoder process ended" if ended else refusal(error)
        except OverloadError:
            return "FAULT: no decoder process came free"

    def close(self) -> None:
        self._decoders.close()


def judged(image: PreparedImage, data: bytes, spec: ImageSpec) -> str:
    """What is prepared must be what its header promised, or a server would place its tokens wrongly."""
    header = probe(data, LIMITS)
    side = spec.tile_size
    if image.size != (header.width, header.height):
        return f"FAULT: {image.size} is not the header's {header.width}×{header.height}"
    if len(image.take) != count(image.size, spec) or image.tiles.shape[1:] != (side, side, 3):
        return f"FAULT: {len(image.take)} rows of tiles {image.tiles.shape}"
    if image.tiles.dtype != np.uint8 or image.take.max(initial=0) >= (len(image.tiles) + 1) * spec.tokens_per_tile:
        return "FAULT: rows that no tile has"
    return f"{header.format}: seen"


def refusal(error: MediaError) -> str:
    """Its kind, without the numbers."""
    if len(error.message) > 600:
        return f"FAULT: a message of {len(error.message)} characters"
    words = ("cannot be decoded", "ends within", "pixels", "picture format", "instead", "computing", "memory", "known")
    return "refused: " + next((word for word in words if word in error.message), "otherwise")
