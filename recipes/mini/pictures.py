"""Draw the pictures that ship: two for the demo, three for the tests (`python -m recipes.mini.pictures`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from PIL import Image

from recipes.mini.artwork import raster
from recipes.mini.assets import NPM
from recipes.mini.export import ROOT, TESTS
from recipes.mini.photos import path_of
from recipes.mini.prepare import concepts
from recipes.mini.scenes import COLOURS

DEMO = ROOT / "src" / "triptych" / "data" / "demo"
PHOTO_WIDTH = 451


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """An OpenMoji scene. places: of each name, centre and side as shares of the picture's width and height."""

    file: str
    size: tuple[int, int]
    colour: str
    places: dict[str, tuple[float, float, float]]


APPLE = Drawn(file="apple.png", size=(480, 360), colour="blue", places={"red apple": (0.5, 0.5, 0.62)})
TESTED = [  # things that are told apart in this style; how many are, `evaluate` measures
    Drawn(file="umbrella.png", size=(224, 224), colour="purple", places={"umbrella": (0.5, 0.52, 0.7)}),
    Drawn(
        file="guitar-and-frog.png",
        size=(320, 240),
        colour="yellow",
        places={"guitar": (0.28, 0.5, 0.6), "frog": (0.72, 0.5, 0.55)},
    ),
    Drawn(
        file="three.png",
        size=(300, 400),
        colour="green",
        places={"pizza": (0.3, 0.24, 0.5), "key": (0.7, 0.5, 0.5), "strawberry": (0.3, 0.77, 0.5)},
    ),
]


def draw(scene: Drawn) -> Image.Image:
    """The scene from the vector drawings, sharp at any size."""
    emoji = {row["name"]: row["emoji"] for row in concepts()}
    picture = Image.new("RGB", scene.size, COLOURS[scene.colour])
    for name, (x, y, share) in scene.places.items():
        side = round(share * min(scene.size))
        code = "-".join(f"{ord(c):04X}" for c in emoji[name] if ord(c) != 0xFE0F)
        art = Image.fromarray(raster((NPM["openmoji"].folder / f"package/color/svg/{code}.svg").read_text(), side))
        picture.paste(art, (round(x * scene.size[0] - side / 2), round(y * scene.size[1] - side / 2)), art)
    return picture


def main() -> None:
    """Write the pictures and what is to be seen on them."""
    DEMO.mkdir(parents=True, exist_ok=True)
    TESTS.mkdir(parents=True, exist_ok=True)
    draw(APPLE).save(DEMO / APPLE.file, optimize=True)
    photo = Image.open(path_of("skimage/chelsea.png")).convert("RGB")
    height = round(photo.height * PHOTO_WIDTH / photo.width)
    photo.resize((PHOTO_WIDTH, height)).save(DEMO / "cat.jpg", quality=88)
    for scene in TESTED:
        draw(scene).save(TESTS / scene.file, optimize=True)
    truth = [asdict(scene) | {"count": len(scene.places)} for scene in TESTED]
    (TESTS / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")
    for path in [*DEMO.iterdir(), *TESTS.iterdir()]:
        print(path.name, f"{path.stat().st_size:,} B")


if __name__ == "__main__":
    main()
