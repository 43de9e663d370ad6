"""`--mm-processor` and `--mm-processor-kwargs`: what may be said of how pictures are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triptych.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from triptych.core.bundle import Manifest

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

        from triptych.media.image import adapted

        spec = manifest.spec
        self._check_name(manifest)
        if not self.changes:
            return manifest
        if spec.image is None:
            raise ConfigError(f"--mm-processor-kwargs: {manifest.name} takes text only")
        try:
            image = adapted(spec.image, self.changes)
        except RequestError as error:
            raise ConfigError(f"--mm-processor-kwargs: {error.message}", hint=error.hint) from None
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
