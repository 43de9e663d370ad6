"""Plan for a model, measure a bundle's steps for it, and hold plans against what is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import msgspec

from triptych.core.bundle import MANIFEST, Bundle, Manifest, Step, open_bundle, replace_manifest
from triptych.core.device import DeviceSpec, StepCost
from triptych.core.plan import Plan, Target
from triptych.core.progress import Progress, silent
from triptych.core.spec import ImageSpec, ModelSpec
from triptych.core.traffic import Traffic
from triptych.core.workload import RequestKind, Workload
from triptych.engine.config import EngineConfig, cache_type
from triptych.errors import BundleError, ConfigError, MeasurementError
from triptych.media.image.tile import count
from triptych.plan.choose import ASSUMPTIONS, Candidate, Shown, choices
from triptych.plan.costs import Fitted, fit_costs
from triptych.plan.points import complete, saturation, spread
from triptych.plan.roofline import Roofline
from triptych.plan.system import read_system
from triptych.plan.timeline import Costs, Rules, from_costs, remembered
from triptych.plan.work import Held, part_bytes, token_bytes
from triptych.session.session import Session
from triptych.session.steps import see
from triptych.session.traffic import serve

STEP_TOKENS = {"cpu": 512, "gpu": 4096, "npu": 512}  # a step's, where nobody says otherwise
DATA_SHEET_ERROR = 0.75  # of a roofline that nothing was fitted to: what a device does of what it promises
HALF = 0.5  # of a device that encoder and decoder share as equals
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned. held: how weights and cache lie in memory."""

    name: str
    spec: ModelSpec
    held: Held
    devices: tuple[DeviceSpec, ...]
    workload: Workload
    target: Target
    bundle: Bundle | None = None

    @property
    def resident(self) -> dict[str, float]:
        """Bytes of weights by part, as they lie in the bundle or will."""
        if self.bundle is None:
            return part_bytes(self.spec, self.held)
        manifest = self.bundle.manifest
        return {part.name: float(manifest.num_bytes(part)) for part in manifest.parts}


def read_model(model: Path, weights: str) -> tuple[ModelSpec, Held, Bundle | None]:
    """A bundle as it is, or a checkpoint as it would be in `weights`; no weight is read of either."""
    if (model / MANIFEST).is_file():
        bundle = open_bundle(model)
        precisions = {part.name: part.precision for part in bundle.manifest.parts}
        return bundle.manifest.spec, msgspec.convert(precisions | {"cache": "u8"}, Held), bundle
    from triptych.compile.checkpoint import Checkpoint
    from triptych.compile.families import family_of

    checkpoint = Checkpoint.open(model)
    spec = family_of(checkpoint).read_spec(checkpoint)
    return spec, msgspec.convert({"decoder": weights, "vision": "int8", "projector": "int8"}, Held), None


def make_plan(asked: Question) -> Plan:
    """Every device with every batch, best first. Raises ConfigError where nothing can be predicted."""
    ways, told = [], list(ASSUMPTIONS)
    for device in asked.devices:
        found, said = candidates(asked, device)
        ways += found
        told.append(said)
    return Plan(
        model=asked.name,
        weights_digest=None if asked.bundle is None else asked.bundle.manifest.weights_digest,
        devices=asked.devices,
        workload=asked.workload,
        target=asked.target,
        choices=choices(ways, asked.workload, shown_by(asked.spec), asked.target),
        assumptions=tuple(told),
    )


def shown_by(spec: ModelSpec) -> Shown:
    """Visual tokens and tiles of a kind of request. Raises ConfigError for pictures that the model cannot be shown."""

    def shown(kind: RequestKind) -> tuple[int, int]:
        if not kind.images:
            return 0, 0
        image: ImageSpec | None = spec.image
        if image is None:
            raise ConfigError(f"kinds.{kind.name} shows pictures, this model sees none", hint="images: 0")
        tokens = kind.images * count(kind.image_side, image)
        return tokens, -(-tokens // image.tokens_per_tile)

    return shown


def candidates(asked: Question, device: DeviceSpec) -> tuple[list[Candidate], str]:
    """Ways to hold the model on devices of a kind, and what the times stand on."""
    rules = Rules(max_step_tokens=STEP_TOKENS[device.kind], max_sequences=1)
    if device.kind != "cpu":  # a tower gives way to a decoder on the same cores, nowhere else
        rules = replace(rules, encoder_share=HALF)
    line = Roofline(spec=asked.spec, held=asked.held, device=device)
    kept = () if asked.bundle is None else asked.bundle.manifest.step_costs
    fitted = next((cost for cost in kept if cost.device == device.name), None)
    known = Costs(step_s=line.step_s, tiles_s=line.tile_s) if fitted is None else from_costs(fitted)
    one = Candidate(
        device=device,
        costs=replace(known, step_s=remembered(known.step_s)),
        resident_bytes=sum(asked.resident.values()),
        token_bytes=token_bytes(asked.spec.decoder, asked.held),
        error=DATA_SHEET_ERROR,
        rules=rules,
    )
    if fitted is not None:
        ways, told = [replace(one, error=max(fitted.error, 0.05))], f"the bundle's own steps, {fitted.settings}"
    elif device.efficiency is not None:
        ways, told = [replace(one, error=device.efficiency.error)], "fitted to other models' steps there"
    else:
        ways = [_together(one, asked, degree) for degree in DEGREES if degree <= device.num_devices]
        told = f"by its figures alone ({device.source})"
    return ways, f"{device.name}: {told}"


def _together(one: Candidate, asked: Question, degree: int) -> Candidate:
    """Products shared by `degree` devices; each layer's two sums go round the slowest link between them."""
    if degree == 1:
        return one
    line = Roofline(spec=asked.spec, held=asked.held, device=one.device, degree=degree)
    return replace(
        one,
        costs=Costs(step_s=remembered(line.step_s), tiles_s=line.tile_s),
        resident_bytes=one.resident_bytes / degree,
        token_bytes=token_bytes(asked.spec.decoder, asked.held, degree),
        degree=degree,
    )


# ── measured ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def fit_bundle(bundle: Bundle, device: str, config: EngineConfig, progress: Progress = silent) -> StepCost:
    """Measure real steps and keep what they cost in the bundle's manifest. Raises MeasurementError, BundleError."""
    began = time.monotonic()
    with Session.open(bundle.path, config=config) as session:
        seen = see(session, progress)
        settings = f"{session.placements()['decoder']}, {cache_type(config)} cache"
    of = Fitted(device=device, weights_digest=bundle.manifest.weights_digest, settings=settings)
    cost = fit_costs(seen.steps, seen.tiles, of)
    keep(bundle, cost, time.monotonic() - began)
    return cost


def keep(bundle: Bundle, cost: StepCost, seconds: float) -> Manifest:
    """Write the manifest anew, in place of costs of the same device; its history tells of it."""
    manifest = open_bundle(bundle.path).manifest
    digest = manifest.weights_digest
    if digest != cost.weights_digest:
        raise BundleError(f"{bundle.path} changed while its steps were measured", hint="measure again")
    step = Step(
        stage="plan",
        version=version("triptych"),
        inputs_digest=digest,
        outputs_digest=digest,
        metrics={"seconds": seconds, "error": cost.error},
    )
    others = tuple(one for one in manifest.step_costs if one.device != cost.device)
    changed = msgspec.structs.replace(manifest, step_costs=(*others, cost), history=(*manifest.history, step))
    replace_manifest(bundle.path, changed)
    return changed


def check(plan: Plan, model: Path, config: EngineConfig, progress: Progress = silent) -> Plan:
    """Run the first choice's batch on this machine, and fill in what was measured.

    Raises ConfigError for a plan of another machine or other weights, BundleError, and MeasurementError where requests
    failed or came faster than they were answered: those figures are of no traffic that could go on.
    """
    if not plan.choices:
        raise ConfigError("the plan has no choice to be checked")
    best = plan.choices[0]
    digest = open_bundle(model).manifest.weights_digest
    if plan.weights_digest not in (None, digest):
        raise ConfigError(f"{model} holds other weights than the plan was made for", hint="plan again for this bundle")
    _check_here(plan)
    closed = msgspec.structs.replace(
        plan.workload, arrivals="closed", concurrency=best.batch, num_requests=max(24, 3 * best.batch)
    )
    wanted = plan.target.rate(plan.workload)
    alone = closed  # or a replica's share of the traffic
    if wanted is not None:
        alone = msgspec.structs.replace(plan.workload, arrivals="poisson", rate_per_s=wanted / best.replicas)
    with Session.open(model, config=replace(config, max_num_seqs=best.batch)) as session:
        most = complete(serve(session, closed, progress=progress))
        usual = most if alone is closed else complete(serve(session, alone, progress=progress))
    behind = None if usual is most else saturation(usual.served)
    if behind is not None:
        raise MeasurementError(
            f"{alone.rate_per_s:.3g} requests/s are more than was kept up with: {behind}",
            hint="plan for a lower rate or for more devices, from steps measured here (--fit)",
        )
    measured = _measured(most, usual, best.replicas)
    filled = tuple(msgspec.structs.replace(one, measured=measured.get(one.name)) for one in best.predictions)
    where = f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {best.batch} at once"
    first = msgspec.structs.replace(best, predictions=filled)
    return msgspec.structs.replace(plan, choices=(first, *plan.choices[1:]), checked=where)


def _check_here(plan: Plan) -> None:
    """Raises ConfigError where the first choice's processors and last cache are not those that the kernel tells of."""
    device = next(one for one in plan.devices if one.name == plan.choices[0].device)
    system = read_system()
    told, here = (device.num_cores, device.tiers[-2].num_bytes), (len(system.cpus), system.caches[-1].num_bytes)
    if device.kind != "cpu" or told != here:
        raise ConfigError(
            f"the plan's first choice is for {device.name}, {told[0]} cores and {told[1]:,} B of last cache; this is "
            f"{system.cpu}, {here[0]} cores and {here[1]:,} B",
            hint="`triptych measure` this one and plan for it, or check the plan there",
        )


def _measured(most: Traffic, usual: Traffic, replicas: int) -> dict[str, float]:
    """By the prediction's name."""
    ttft = spread([one.ttft_s for one in usual.answered])
    tpot = spread([one.tpot_s for one in usual.answered])
    return {
        "ttft_p50": ttft.p50,
        "ttft_p95": ttft.p95,
        "tpot_p50": tpot.p50,
        "tpot_p95": tpot.p95,
        "requests_per_s": replicas * most.requests_per_s,
        "tokens_per_s": replicas * most.tokens_per_s,
        "memory_bytes": float(most.peak_bytes),
    }
