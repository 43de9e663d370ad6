"""`--mm-processor` and `--mm-processor-kwargs`: what may be said of how pictures are prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.core.bundle import Manifest
    from triptych.core.spec import ImageSpec

PROCESSORS = {
    "idefics3": ("Idefics3Processor", "SmolVLMProcessor"),
    "llava": ("LlavaProcessor", "LlavaNextProcessor"),
    "mini": ("TriptychMiniProcessor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorChoice:
    """A processor's name, to be checked, and changes to its settings, to be applied."""

    name: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, manifest: Manifest) -> Manifest:
        """The manifest with pictures prepared as asked. Raises ConfigError on what cannot be."""
        import msgspec

        spec = manifest.spec
        self._check_name(manifest)
        if not self.changes:
            return manifest
        if spec.image is None:
            raise ConfigError(f"--mm-processor-kwargs: {manifest.name} takes text only")
        image = spec.image
        for name, value in self.changes.items():
            change = CHANGES.get(name)
            if change is None:
                known = ", ".join(CHANGES)
                raise ConfigError(f"--mm-processor-kwargs: unknown setting `{name}`", hint=f"known are {known}")
            image = change(image, value)
        return msgspec.structs.replace(manifest, spec=msgspec.structs.replace(spec, image=image))

    def _check_name(self, manifest: Manifest) -> None:
        family = manifest.spec.family
        names = (family, *PROCESSORS.get(family, ()))
        if self.name is not None and (manifest.spec.image is None or self.name not in names):
            has = "none" if manifest.spec.image is None else " or ".join(f"`{one}`" for one in names)
            raise ConfigError(
                f"--mm-processor {self.name} is not the processor of {manifest.name}, which is {has}",
                hint="leave --mm-processor out: the bundle knows its own",
            )


def _do_image_splitting(image: ImageSpec, value: Any) -> ImageSpec:
    from triptych.media.image import at_detail

    if not isinstance(value, bool):
        raise ConfigError(f"do_image_splitting is {value!r}, not true or false")
    if value and image.tiling == "one":
        raise ConfigError("do_image_splitting: this model shows each picture as one tile")
    return image if value else at_detail(image, "low")


def _size(image: ImageSpec, value: Any) -> ImageSpec:
    import msgspec

    edge = value.get("longest_edge") if isinstance(value, dict) and len(value) == 1 else None
    if image.longest_edge is None:
        raise ConfigError("size: this model's pictures have one size, which its tower was trained on")
    if not isinstance(edge, int) or isinstance(edge, bool) or not image.tile_size <= edge <= image.longest_edge:
        raise ConfigError(
            f"size is {value!r}",
            hint=f'give {{"longest_edge": N}}, N from {image.tile_size} (one tile) to {image.longest_edge} pixels',
        )
    return msgspec.structs.replace(image, longest_edge=edge)


def _image_grid_pinpoints(image: ImageSpec, value: Any) -> ImageSpec:
    import msgspec

    asked = tuple(tuple(one) if isinstance(one, list) else one for one in value) if isinstance(value, list) else ()
    grids = tuple(grid for grid in image.grids if grid in asked)
    if not grids or len(grids) != len(asked):
        known = [list(grid) for grid in image.grids]
        raise ConfigError(f"image_grid_pinpoints is {value!r}", hint=f"choose among the model's own: {known}")
    return msgspec.structs.replace(image, grids=grids)


CHANGES: Mapping[str, Callable[[ImageSpec, Any], ImageSpec]] = {
    "do_image_splitting": _do_image_splitting,
    "size": _size,
    "image_grid_pinpoints": _image_grid_pinpoints,
}
