"""A workload from YAML: `mixed`, `chat` and `pictures` come with Triptych, others are files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from triptych.core.workload import Workload
from triptych.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "data" / "plan" / "workloads"


def shipped() -> tuple[str, ...]:
    """Names that `read_workload` takes besides paths."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def read_workload(name: str) -> Workload:
    """Raises ConfigError that names the key, what it holds, and what it may hold.

    Sizes may be written `64-512` or `64`, a picture's side `448x448` or `448`.
    """
    import yaml

    path = SHIPPED / f"{name}.yaml" if name in shipped() else Path(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {said}", hint=f"a YAML file, or one of {', '.join(shipped())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a mapping", hint=f"see {SHIPPED / 'mixed.yaml'}")
    try:
        workload = msgspec.convert({"name": path.stem, **content, "kinds": _kinds(content, path)}, Workload)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", hint=f"see {SHIPPED / 'mixed.yaml'}") from None
    wrong = next(workload.faults(), None)
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong}")
    return workload


def _kinds(content: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """By name in the file, a list in the record."""
    kinds = content.get("kinds")
    if not isinstance(kinds, dict) or not kinds:
        raise ConfigError(
            f"{path}: `kinds` is {kinds!r}", hint="kinds: {chat: {share: 1, prompt: 64-512, answer: 128}}"
        )
    found = []
    for name, kind in kinds.items():
        where = f"{path}: kinds.{name}"
        if not isinstance(kind, dict):
            raise ConfigError(f"{where} is {kind!r}, not a mapping")
        entry = {"name": str(name), "share": 1.0, **kind}
        for key in ("prompt", "answer"):
            if key in entry:
                least, most = _pair(entry[key], "-", f"{where}.{key}")
                entry[key] = {"least": least, "most": most}
        if "image_side" in entry:
            entry["image_side"] = _pair(entry["image_side"], "x", f"{where}.image_side")
        found.append(entry)
    return found


def _pair(value: Any, sign: str, where: str) -> tuple[int, int]:
    """`64-512` is (64, 512), and 64 is (64, 64)."""
    match = re.fullmatch(rf"\s*(\d+)\s*(?:{sign}\s*(\d+)\s*)?", str(value))
    if match is None:
        raise ConfigError(f"{where} is {value!r}", hint=f"a number such as 64, or two such as 64{sign}512")
    return int(match[1]), int(match[2] or match[1])
