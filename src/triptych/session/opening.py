"""Find or make the bundle, open its parts, size the cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil

from triptych.backends.base import PagedDecoder, Placement
from triptych.backends.steady import Steady
from triptych.core.bundle import MANIFEST, Bundle, Manifest, open_bundle
from triptych.core.policy import Eviction, KVPolicy
from triptych.core.progress import Progress, silent
from triptych.core.queries import Queries
from triptych.core.spec import Modality
from triptych.core.table import open_table
from triptych.engine.config import EngineConfig, EnginePlan, cache_type, resolve
from triptych.engine.encoder import Parts, Tower
from triptych.engine.evict.evictor import Evictor, queries_wanted
from triptych.engine.features import Features
from triptych.engine.runner import Runner
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
    """A bundle whose parts a thread opens. Raises from `parts`: BundleError, ConfigError, BackendError."""

    bundle: Bundle
    parts: Future[Opened]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    bundle: Bundle
    runner: Runner
    plan: EnginePlan
    decoder_place: str


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
    """Find the bundle, and start to open its parts; raises as `find_bundle`.

    The thread runs in OpenVINO for a second: whoever calls can import and read meanwhile what else a session needs.
    """
    from triptych.backends import ov  # noqa: F401 (the caller would wait for the thread to import it)

    bundle = find_bundle(source)
    aside = ThreadPoolExecutor(1, "triptych-opening")
    try:
        return Opening(bundle=bundle, parts=aside.submit(open_parts, bundle, config))
    finally:
        aside.shutdown(wait=False)


def open_parts(bundle: Bundle, config: EngineConfig) -> Opened:
    """Open the decoder now and the encoders on first need."""
    from triptych.backends import ov

    spec = bundle.manifest.spec
    placement = Placement(device=config.decoder_device, compute=config.dtype, num_threads=config.num_threads)
    path, cache = bundle.file("decoder.xml"), cache_type(config)
    decoder: PagedDecoder
    evictor: Evictor | None = None
    free = psutil.virtual_memory().available
    if config.kv_budget is None or config.kv_budget == 1.0:
        decoder = ov.open_decoder(path, placement, cache)
        if config.batch_invariant and config.decoder_device.startswith("cpu"):
            decoder = Steady(decoder)
        plan = resolve(config, spec, block_bytes=decoder.block_bytes, free_bytes=free)
        decoder.allocate(plan.num_blocks)
    else:
        policy, why = forgetting(bundle)
        bundle = Bundle(path=bundle.path, manifest=msgspec.structs.replace(bundle.manifest, kv_policy=policy))
        layered = ov.open_layered_decoder(path, placement, cache, with_queries=queries_wanted(policy) > 0)
        decoder, plan = layered, resolve(config, spec, block_bytes=layered.block_bytes, free_bytes=free)
        plan = replace(plan, choices=(*plan.choices, why))
        layered.allocate(plan.num_blocks, policy.devices)
        evictor = Evictor(layered, spec.decoder, policy, _queries(bundle, policy))
    towers = _towers(bundle, config, plan.vision_batch)
    table, features = open_table(bundle.file("embedding.npy")), Features(plan.encoder_cache_bytes)
    runner = Runner(decoder, table, towers, features, evictor)
    return Opened(bundle=bundle, runner=runner, plan=plan, decoder_place=decoder.place())


def _towers(bundle: Bundle, config: EngineConfig, max_tiles: int) -> dict[Modality, Tower]:
    """The encoders, to be opened on first need."""
    from triptych.backends import ov
    from triptych.backends.aside import open_aside

    if bundle.manifest.spec.vision is None:
        return {}
    beside = Placement(device=config.vision_device, compute=config.dtype, num_threads=config.num_threads)
    ov.check_device(beside.device)  # or it would be found out by the first picture
    is_shared = all(device.startswith("cpu") for device in (config.vision_device, config.decoder_device))
    open_part = open_aside if is_shared else ov.open_part

    def opener(placement: Placement) -> Callable[[], Parts]:
        def open_now() -> Parts:
            encoder, projector = (open_part(bundle.file(f"{name}.xml"), placement) for name in ("vision", "projector"))
            log.info("vision runs on %s, projector on %s", encoder.place(), projector.place())
            return encoder, projector

        return open_now

    tower = Tower(
        open_parts=opener(beside),
        open_exact=None if config.dtype == "float" else opener(replace(beside, compute="float")),
        max_tiles=max_tiles,
    )
    return {Modality.IMAGE: tower}


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


def _queries(bundle: Bundle, policy: KVPolicy) -> Queries | None:
    if policy.method != "expected":
        return None
    decoder = bundle.manifest.spec.decoder
    shape = (decoder.num_layers, decoder.num_heads, decoder.head_dim)
    return Queries.read(bundle.file(policy.statistics), shape)
