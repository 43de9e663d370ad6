"""What verification feeds: drawn pictures and texts, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]  # (height, width, 3) RGB

ODD_LENGTHS = (1, 31, 32, 33, 65)  # tokens: alone, and on each side of a 32-token block's edge

PROSE = (
    "The lighthouse keeper climbed the ninety-one steps every evening, whether or not a ship was expected. In October "
    "the storms came early, and for three days nobody on the mainland could see the light; on the fourth morning a "
    "fishing boat brought him bread, two letters and a newspaper that was already a week old. “You might have lowered "
    "the flag,” said the fisherman. He answered that a lamp which burns only when it is watched is not a lamp at all."
)
CODE = (
    "def moving_average(values: list[float], width: int) -> list[float]:\n"
    '    """Mean of each window of `width` neighbours."""\n'
    '    if width < 1:\n        raise ValueError(f"width must be positive, got {width}")\n'
    "    total = sum(values[:width])\n    means = [total / width]\n"
    "    for index in range(width, len(values)):\n        total += values[index] - values[index - width]\n"
    "        means.append(total / width)\n    return means\n"
)
FACTS = (
    '{"city": "Zürich", "population": 443037, "lakes": ["Zürichsee"], "founded": -15, "elevation_m": 408.5}\n'
    "| month | rain (mm) | sun (h) |\n|---|---:|---:|\n| May | 122 | 181 |\n| June | 128.4 | 188 |\n"
    "Water boils at 100 °C at sea level; at 2,000 m it boils at about 93 °C. 17 × 23 = 391, and 391 / 17 = 23."
)
TALK = (
    "Wie spät ist es? — Il est midi et quart. ¿Y mañana? 明日は雨が降るでしょう。 Привет! "
    "OK, so first you take the red one (not the blue one!!) and then... wait, what's that noise? lol 🙂"
)
TEXTS = {"prose": PROSE, "code": CODE, "facts": FACTS, "talk": TALK}


def pictures() -> dict[str, Picture]:
    """Drawn scenes, a noise and a strip, with odd sides; then the package's own samples, where it has some."""
    random = np.random.default_rng(20261130)
    drawn = {
        "shapes": _scene(random, height=211, width=317),
        "noise": random.integers(0, 256, (97, 133, 3), np.uint8),
        "strip": _scene(random, height=45, width=403),
    }
    return drawn | dict(_samples())


def _scene(random: np.random.Generator, *, height: int, width: int) -> Picture:
    """A gradient with discs and bars of strong colours over it, and a little grain."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    corner, far = random.uniform(0, 255, (2, 3))
    slope = (x / width + y / height)[..., None] / 2
    picture = corner + (far - corner) * slope
    for _ in range(6):
        colour = random.uniform(0, 255, 3)
        cx, cy, radius = random.uniform(0, width), random.uniform(0, height), random.uniform(0.05, 0.3) * height
        picture[(x - cx) ** 2 + (y - cy) ** 2 < radius**2] = colour
        left, top = random.uniform(0, width), random.uniform(0, height)
        picture[(abs(x - left) < 0.03 * width) & (abs(y - top) < 0.2 * height)] = 255 - colour
    picture += random.normal(0, 4, picture.shape)
    return np.asarray(picture.clip(0, 255), np.uint8)


def _samples() -> Iterator[tuple[str, Picture]]:
    from PIL import Image

    folder = resources.files("triptych") / "data" / "demo"
    if not folder.is_dir():
        return
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith((".png", ".jpg")):
            with entry.open("rb") as file:
                yield entry.name, np.asarray(Image.open(file).convert("RGB"))
