"""Flags and `serving.yaml`, settled: flag beats file beats default, and each choice is told."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.engine.config import EngineConfig

ENGINE = "triptych"


# Which engine setting a key of the file's `runtime:` section decides, and the flag that beats it.
SETTINGS = {
    "vision_encoder": ("vision_device", "--vision-device"),
    "text_decoder": ("decoder_device", "--decoder-device"),
    "prefill_batch_size": ("vision_batch", "--vision-batch"),
    "decode_batch_size": ("max_num_seqs", "--max-num-seqs"),
    "max_multimodal_tokens": ("max_multimodal_tokens", "--max-multimodal-tokens"),
    "reduce": ("reduce", "--reduce"),
    "kv_budget": ("kv_budget", "--kv-budget"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What the engine is asked, and a sentence for each choice that somebody made."""

    engine: EngineConfig
    reasons: tuple[str, ...]


def read_runtime(path: Path) -> Mapping[str, Any]:
    """`serving.yaml`'s `runtime:`. Raises ConfigError that names the key, and for an unknown one the closest known."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    section = _mapping(content, ("runtime",), f"{path}").get("runtime")
    runtime = _mapping({} if section is None else section, ("engine", *SETTINGS), f"{path}: runtime")
    for name, value in runtime.items():
        _check(path, name, value)
    return runtime


def settle(flags: Mapping[str, Any], runtime: Mapping[str, Any]) -> Settled:
    """flags: by `EngineConfig`'s names, None where nobody gave one."""
    from triptych.engine.config import EngineConfig

    asked = {name: value for name, value in flags.items() if value is not None}
    reasons = [f"{name.replace('_', '-')} = {_shown(value)} (flag)" for name, value in asked.items()]
    for key, (setting, flag) in SETTINGS.items():
        value = runtime.get(key)
        if value is None:
            continue
        if setting in asked:
            reasons.append(f"serving.yaml's {key} = {value} gives way to {flag} {_shown(asked[setting])}")
        else:
            asked[setting] = value
            reasons.append(f"{setting.replace('_', '-')} = {_shown(value)} (serving.yaml: {key})")
    if "reduce" in asked:
        asked |= read_reduction(asked.pop("reduce"))
    return Settled(engine=EngineConfig(**asked), reasons=tuple(reasons))


def read_reduction(text: str) -> dict[str, Any]:
    """METHOD:KEEP[:MIN], as the engine's settings `reduction` and `min_keep`. Raises ConfigError."""
    from triptych.core.policy import METHODS, Reduction

    method, *shares = str(text).split(":")
    try:
        keep, least = [float(share) for share in [*shares, "0"][: max(len(shares), 2)]]
    except ValueError:
        raise ConfigError(
            f"--reduce {text!r} is not METHOD:KEEP or METHOD:KEEP:MIN, such as cenprune:0.5 or cenprune:0.5:0.25",
            hint=f"METHOD is one of {', '.join(METHODS)}; KEEP and MIN are shares of 1",
        ) from None
    reduction: Any = {"method": method, "keep": keep}
    return {"reduction": Reduction(**reduction), "min_keep": least}


def _mapping(content: Any, known: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{where} is not a mapping", hint=f"it may hold {', '.join(known)}")
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"the known ones are {', '.join(known)}"
            raise ConfigError(f"{where} has an unknown key `{key}`", hint=hint)
    return content


def _check(path: Path, name: str, value: Any) -> None:
    where = f"{path}: runtime.{name}"
    if value is None:
        return
    if name == "engine":
        if value != ENGINE:
            raise ConfigError(f"{where} is {value!r}", hint=f"this server's engine is `{ENGINE}`; leave the key out")
    elif name in ("vision_encoder", "text_decoder"):
        check_device(value, where)
    elif name == "reduce":
        if not isinstance(value, str):
            raise ConfigError(f"{where} is {value!r}", hint='write METHOD:KEEP, such as "cenprune:0.5"')
        read_reduction(value)
    elif name == "kv_budget":
        if type(value) not in (int, float) or not 0.0 < value <= 1.0:
            raise ConfigError(f"{where} is {value!r}, not a share above 0 and at most 1")
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where} is {value!r}, not a whole number of at least 1")


def check_device(value: Any, where: str) -> None:
    """Raises ConfigError on what is no device's name."""
    kind, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in ("cpu", "gpu", "npu") or not number.isdecimal():
        raise ConfigError(
            f"{where} is {value!r}, which names no device", hint="devices are cpu:N, gpu:N and npu:N, such as cpu:0"
        )


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
