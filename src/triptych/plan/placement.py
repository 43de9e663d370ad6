"""Which part goes on which device, and why: every placement tried, copies between them counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from triptych.core.device import DeviceSpec, Link
from triptych.core.plan import Choice, Plan
from triptych.core.spec import ModelSpec
from triptych.errors import ConfigError
from triptych.plan.choose import LEAST_ASKS, Shown, asks_of
from triptych.plan.roofline import Roofline
from triptych.plan.sheets import load
from triptych.plan.timeline import Ask
from triptych.plan.topology import copy_seconds
from triptych.plan.work import BITS, Chunk, Held, Step, token_bytes

HOST = "epyc"  # the data sheet of a card's host, where no processor is named beside it
VALUE_BYTES = 2  # of an activation, on its way between devices
MOST_PLACEMENTS = 100_000
WORTH_A_SPLIT = 0.05  # of a request's time, that parts must save to be held apart
PREPARED = "pictures"  # by the host, before any part sees them


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoad:
    """One part of a request, in the order of its work. seconds: by device it may go to; without copies."""

    name: str
    seconds: Mapping[str, float]
    memory_bytes: float
    out_bytes: float  # that the next part gets, in `copies`
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where each part goes, and what a request takes then. copy_s: of `seconds`, spent between devices."""

    placement: dict[str, str]
    seconds: float
    copy_s: float


def place(parts: Sequence[PartLoad], memory: Mapping[str, float], links: Sequence[Link]) -> list[Placed]:
    """Every placement that fits into `memory` (bytes by device), fastest first. A link is a way there and back.

    The first part's input and the last one's output are counted with the parts. Raises ConfigError when nothing fits.
    """
    count = math.prod(len(part.seconds) for part in parts)
    if count > MOST_PLACEMENTS:
        raise ConfigError(f"{count:,} placements, {MOST_PLACEMENTS:,} are the most", hint="offer fewer devices")
    ways = {(link.target, link.source): link for link in links} | {(link.source, link.target): link for link in links}
    found = []
    for devices in itertools.product(*(part.seconds for part in parts)):
        held = {device: sum(p.memory_bytes for p, own in zip(parts, devices, strict=True) if own == device)
                for device in devices}  # fmt: skip
        hops = [(part, hop) for part, hop in zip(parts, itertools.pairwise(devices), strict=False) if hop[0] != hop[1]]
        if any(hop not in ways for _, hop in hops) or any(held[one] > memory.get(one, 0) for one in held):
            continue
        copy_s = sum(copy_seconds(part.out_bytes, ways[hop], part.copies) for part, hop in hops)
        own_s = sum(part.seconds[device] for part, device in zip(parts, devices, strict=True))
        names = dict(zip((part.name for part in parts), devices, strict=True))
        found.append(Placed(placement=names, seconds=own_s + copy_s, copy_s=copy_s))
    if not found:
        need = sum(part.memory_bytes for part in parts)
        have = ", ".join(f"{device} {num_bytes:,.0f} B" for device, num_bytes in memory.items())
        raise ConfigError(
            f"{need:,.0f} B of parts fit nowhere: {have}", hint="use fewer bits, or name links between devices"
        )
    return sorted(found, key=lambda placed: placed.seconds)


# ── of a plan's choices ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is to be placed. resident: bytes of weights by part."""

    spec: ModelSpec
    held: Held
    resident: Mapping[str, float]
    shown: Shown


def with_placements(plan: Plan, model: Model) -> Plan:
    """Every choice with its parts' devices and why; a card's host is the processor that was named beside it."""
    named = next((device for device in plan.devices if device.kind == "cpu"), None)
    host = load(HOST) if named is None else named
    cards = {device.name: device for device in plan.devices}
    asks = asks_of(plan.workload, model.shown, LEAST_ASKS)
    choices = tuple(_placed(choice, (cards[choice.device], host), model, asks) for choice in plan.choices)
    told = plan.assumptions
    if any(_links(device, host) for device in plan.devices):
        whose = "named beside it" if named else "assumed; name a processor beside it to have another"
        told = (*told, f"a card's host is {host.name}, {whose}; parts are placed by a request's time alone")
    return replace(plan, choices=choices, assumptions=told)


def _placed(choice: Choice, where: tuple[DeviceSpec, DeviceSpec], model: Model, asks: Sequence[Ask]) -> Choice:
    device, host = where
    links = _links(device, host)
    kind, degree = device.kind, choice.tensor_parallel
    card = f"{kind}:0" if degree == 1 else f"{kind}:0-{degree - 1}"
    sites = {card: Roofline(spec=model.spec, held=model.held, device=device, degree=degree)}
    memory = {card: float(degree * device.memory_bytes)}
    if links:
        sites["cpu:0"] = Roofline(spec=model.spec, held=model.held, device=host)
        memory["cpu:0"] = float(host.memory_bytes)
    parts = _parts(model, sites, asks, choice.batch)
    try:
        found = place(parts, memory, [replace(link, target=card) for link in links])
    except ConfigError as error:
        return replace(choice, placed=str(error))
    best = _best(found, card)
    placement = {part: site for part, site in best.placement.items() if part != PREPARED}
    why = _why(best, found, card) if links else "one device: every part is on it"
    return replace(choice, placement=placement, placed=why)


def _links(device: DeviceSpec, host: DeviceSpec) -> list[Link]:
    """From the host to a card: as the host measured it, or as the card's data sheet has it. None of a processor."""
    if device.kind == "cpu":
        return []
    measured = [link for link in host.links if link.kind == "pcie" and link.target.startswith(device.kind)]
    return (measured or [link for link in device.links if link.source == "cpu:0"])[:1]


def _parts(model: Model, sites: Mapping[str, Roofline], asks: Sequence[Ask], batch: int) -> list[PartLoad]:
    """Of the mean request that shows pictures, or of the mean one where none does."""
    spec, own = model.spec, [ask for ask in asks if ask.tiles] or asks
    prompt, answer, tiles = (round(sum(getattr(ask, name) for ask in own) / len(own))
                             for name in ("prompt_tokens", "answer_tokens", "tiles"))  # fmt: skip
    wide, longest = spec.decoder.hidden, max(ask.prompt_tokens + ask.answer_tokens for ask in asks)
    prefill = Step(chunks=(Chunk(num_tokens=prompt),))
    answers = Step(answers=batch, cached=batch * (prompt + answer // 2))

    def load(name: str, seconds: Mapping[str, float], out_bytes: float, copies: int = 1, cache: float = 0) -> PartLoad:
        held = model.resident.get(name, 0) + cache
        return PartLoad(name=name, seconds=seconds, memory_bytes=held, out_bytes=out_bytes, copies=copies)

    parts = []
    if tiles and spec.vision is not None and spec.projector is not None:
        towers = {site: line.tower_s(tiles) for site, line in sites.items()}
        pixels, rows = tiles * 3 * spec.vision.image_size**2, tiles * spec.vision.num_tokens * spec.vision.hidden
        prepared = {"cpu:0": 0.0} if "cpu:0" in sites else dict.fromkeys(sites, 0.0)
        parts = [
            load(PREPARED, prepared, pixels),
            load("vision", {site: one["vision"] for site, one in towers.items()}, VALUE_BYTES * rows),
            load("projector", {site: one["projector"] for site, one in towers.items()},
                 VALUE_BYTES * tiles * spec.projector.num_tokens * wide),
        ]  # fmt: skip
    table = (prompt + answer) * wide * BITS[model.held.embedding] / 8
    looked_up = {site: table / line.device.tiers[-1].bytes_per_s.value for site, line in sites.items()}
    decoded = {site: line.by_figures_s(prefill) + answer * line.by_figures_s(answers) for site, line in sites.items()}
    degree = max(line.degree for line in sites.values())  # some of them hold the same heads, where those are fewer
    cache = batch * longest * degree * token_bytes(spec.decoder, model.held, degree)
    return [
        *parts,
        load("embedding", looked_up, VALUE_BYTES * (prompt + answer) * wide, copies=1 + answer),
        load("decoder", decoded, 0, cache=cache),
    ]


def _best(found: Sequence[Placed], card: str) -> Placed:
    """The fastest with answers on the card, for the host alone is another choice; undivided where little is won."""
    found = [one for one in found if one.placement["decoder"] == card] or found
    together = next((one for one in found if not _apart(one, card)), None)
    if together is not None and together.seconds < (1 + WORTH_A_SPLIT) * found[0].seconds:
        return together
    return found[0]


def _apart(one: Placed, card: str) -> str:
    """Parts that are not on the card."""
    return ", ".join(part for part, site in one.placement.items() if site != card and part != PREPARED)


def _why(best: Placed, found: Sequence[Placed], card: str) -> str:
    """In words: what the next best way would change, or what keeps parts apart."""
    copies = f", of it {1e3 * best.copy_s:,.3f} ms copies" if best.copy_s else ""
    request = f"a request of {1e3 * best.seconds:,.1f} ms{copies}"
    together = next((one for one in found if not _apart(one, card)), None)
    if together is None:
        return f"{_apart(best, card)} on cpu:0, for {card} does not hold every part: {request}; predicted as if it did"
    if together is not best:
        saved = f"{1e3 * (together.seconds - best.seconds):,.1f} ms less"
        return f"{_apart(best, card)} on cpu:0: {saved} for {request}; predicted with every part on {card}"
    other = next((one for one in found if one is not best and one.placement["decoder"] == card), None)
    if other is None:
        return f"every part on {card}: {request}"
    more = 1e3 * (other.seconds - best.seconds)
    said = f"would add {more:,.3f} ms" if more >= 0 else f"would save {-more:,.3f} ms, too little to part them"
    return f"every part on {card}: {request}; {_apart(other, card)} on cpu:0 {said}"
