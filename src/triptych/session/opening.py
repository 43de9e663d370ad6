"""Find or make the bundle, open its decoder, size the cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil

from triptych.backends.base import LayeredDecoder, PagedDecoder, Placement
from triptych.backends.steady import Steady
from triptych.core.bundle import MANIFEST, Bundle, Manifest, open_bundle
from triptych.core.policy import Eviction, KVPolicy
from triptych.core.progress import Progress, silent
from triptych.engine.config import EngineConfig, EnginePlan, cache_type, resolve
from triptych.errors import BundleError, CheckpointError, ConfigError

log = logging.getLogger("triptych.session")

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"
UNMEASURED: Eviction = "snapkv"  # of the methods that need no statistics: the best in bench/results/kv.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What to open: `demo`, a bundle's folder, or a checkpoint's, which is compiled into `cache` first."""

    model: str | Path
    cache: Path = CACHE
    progress: Progress = silent
    adapt: Callable[[Manifest], Manifest] = field(default=lambda manifest: manifest)  # the operator's own settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A bundle whose decoder a thread opens; `decoder` raises as `open_decoder`."""

    bundle: Bundle
    config: EngineConfig
    decoder: Future[OpenDecoder]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDecoder:
    """bundle: with the policy by which its sequences forget, if they do; layered: the same decoder, then alone."""

    bundle: Bundle
    decoder: PagedDecoder
    layered: LayeredDecoder | None = None
    plan: EnginePlan


def find_bundle(source: Source) -> Bundle:
    """Open the bundle, compiling what is not one yet. Raises ConfigError, CheckpointError, BundleError, GateError."""
    try:
        bundle = _find_bundle(source)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or source.model}: {error.strerror or error}",
            hint=f"compiled copies go into {source.cache}; XDG_CACHE_HOME names another place",
        ) from error
    return Bundle(path=bundle.path, manifest=source.adapt(bundle.manifest))


def _find_bundle(source: Source) -> Bundle:
    if source.model == "demo":
        from triptych.compile.mini import assemble

        return _compiled(assemble(source.cache), source)
    folder = Path(source.model)
    if (folder / MANIFEST).is_file():
        return open_bundle(folder)
    if (folder / "config.json").is_file():
        return _compiled(folder, source)
    if folder.is_dir():
        raise CheckpointError(f"{folder} holds neither {MANIFEST} nor config.json")
    raise ConfigError(
        f"{source.model!r} is not a folder here",
        hint="give a bundle, a Hugging Face checkpoint's folder, or `demo`; nothing is downloaded by name",
    )


def _compiled(checkpoint: Path, source: Source) -> Bundle:
    from triptych.compile.config import CompileConfig, fingerprint

    target = source.cache / "bundles" / f"{checkpoint.name}-{fingerprint(checkpoint, CompileConfig())[:16]}"
    if (target / MANIFEST).is_file():
        try:
            return open_bundle(target)
        except BundleError as error:  # cut short by a full disk, or another version's
            log.warning("compiled anew: %s", error.message)
    from triptych.compile.assemble import compile_checkpoint

    return compile_checkpoint(checkpoint, target, CompileConfig(), source.progress)


def begin(source: Source, config: EngineConfig) -> Opening:
    """Find the bundle, and start to open its decoder; raises as `find_bundle`.

    The thread runs in OpenVINO for a second: whoever calls can import and read meanwhile what else a session needs.
    """
    from triptych.backends import ov  # noqa: F401 (the caller would wait for the thread to import it)

    bundle = find_bundle(source)
    aside = ThreadPoolExecutor(1, "triptych-opening")
    try:
        return Opening(bundle=bundle, config=config, decoder=aside.submit(open_decoder, bundle, config))
    finally:
        aside.shutdown(wait=False)


def open_decoder(bundle: Bundle, config: EngineConfig) -> OpenDecoder:
    """Raises BundleError, ConfigError or BackendError."""
    from triptych.backends import ov

    spec = bundle.manifest.spec
    placement = Placement(device=config.decoder_device, compute=config.dtype, num_threads=config.num_threads)
    path, cache = bundle.file("decoder.xml"), cache_type(config)
    decoder: PagedDecoder
    free = psutil.virtual_memory().available
    if config.kv_budget is None or config.kv_budget == 1.0:
        decoder = ov.open_decoder(path, placement, cache)
        if config.keeps_bits:
            decoder = Steady(decoder)
        plan = resolve(config, spec, block_bytes=decoder.block_bytes, free_bytes=free)
        decoder.allocate(plan.num_blocks)
        return OpenDecoder(bundle=bundle, decoder=decoder, plan=plan)
    from triptych.engine.evict.evictor import queries_wanted

    policy, why = forgetting(bundle)
    bundle = Bundle(path=bundle.path, manifest=msgspec.structs.replace(bundle.manifest, kv_policy=policy))
    layered = ov.open_layered_decoder(path, placement, cache, with_queries=queries_wanted(policy) > 0)
    plan = resolve(config, spec, block_bytes=layered.block_bytes, free_bytes=free)
    layered.allocate(plan.num_blocks, policy.devices)
    plan = replace(plan, choices=(*plan.choices, why))
    return OpenDecoder(bundle=bundle, decoder=layered, layered=layered, plan=plan)


def forgetting(bundle: Bundle) -> tuple[KVPolicy, str]:
    """How a sequence forgets, once a budget is asked, and why so, in words. Raises ConfigError where it cannot."""
    manifest = bundle.manifest
    if manifest.spec.decoder.sliding_window is not None:
        raise ConfigError(
            f"{manifest.name} sees the last {manifest.spec.decoder.sliding_window:,} tokens alone: it forgets already",
            hint="leave --kv-budget out",
        )
    policy = manifest.kv_policy or KVPolicy()
    for name, values in (("layer_density", policy.layer_density), ("devices", policy.devices)):
        if values and len(values) != manifest.spec.decoder.num_layers:
            has = f"the model has {manifest.spec.decoder.num_layers}"
            raise BundleError(f"the KV policy's {name} speaks of {len(values)} layers, {has}")
    if policy.method == "expected" and not policy.statistics:
        why = "no statistics of its queries in the bundle, which `expected` needs; `triptych compress` measures them"
        return msgspec.structs.replace(policy, method=UNMEASURED), f"kv-eviction = {UNMEASURED} ({why})"
    return policy, f"kv-eviction = {policy.method} (the bundle's policy)"
