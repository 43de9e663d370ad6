"""A decoder that is open, and what answers with it: encoders, table of embeddings, what forgets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from triptych.backends.base import Placement
from triptych.core.bundle import Bundle
from triptych.core.policy import KVPolicy
from triptych.core.queries import Queries
from triptych.core.spec import Modality
from triptych.core.table import open_table
from triptych.engine.config import EngineConfig, EnginePlan
from triptych.engine.encoder import Parts, Tower
from triptych.engine.evict.evictor import Evictor
from triptych.engine.features import Features
from triptych.engine.runner import Runner
from triptych.session.opening import OpenDecoder

log = logging.getLogger("triptych.session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    bundle: Bundle
    runner: Runner
    plan: EnginePlan
    decoder_place: str


def compose(opened: OpenDecoder, config: EngineConfig) -> Opened:
    """Open the table; the encoders open on first need."""
    bundle, decoder, plan, evictor = opened.bundle, opened.decoder, opened.plan, None
    if opened.layered is not None:
        policy = bundle.manifest.kv_policy or KVPolicy()
        evictor = Evictor(opened.layered, bundle.manifest.spec.decoder, policy, _queries(bundle, policy))
    towers = _towers(bundle, config, plan.vision_batch)
    table, features = open_table(bundle.file("embedding.npy")), Features(plan.encoder_cache_bytes)
    runner = Runner(decoder, table, towers, features, evictor)
    return Opened(bundle=bundle, runner=runner, plan=plan, decoder_place=decoder.place())


def _towers(bundle: Bundle, config: EngineConfig, max_tiles: int) -> dict[Modality, Tower]:
    """The encoders, to be opened on first need."""
    from triptych.backends import ov
    from triptych.backends.aside import num_copies, open_aside

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
        side_by_side=num_copies(bundle.file("vision.xml"), beside) if is_shared else 1,
    )
    return {Modality.IMAGE: tower}


def _queries(bundle: Bundle, policy: KVPolicy) -> Queries | None:
    if policy.method != "expected":
        return None
    decoder = bundle.manifest.spec.decoder
    shape = (decoder.num_layers, decoder.num_heads, decoder.head_dim)
    return Queries.read(bundle.file(policy.statistics), shape)
