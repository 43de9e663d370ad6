"""What each figure must reach, by precision; docs/decisions/0003-what-a-gate-is.md says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.core.bundle import Evidence, Measure, Precision
from triptych.errors import GateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The least or the most that a figure may be. A figure that is no number passes neither."""

    at_least: float | None = None
    at_most: float | None = None


Gates = Mapping[str, Gate]


def at_least(value: float) -> Gate:
    return Gate(at_least=value)


def at_most(value: float) -> Gate:
    return Gate(at_most=value)


def _weights(sqnr_db: float, group_sqnr_db: float, gain: float) -> Gates:
    return {
        "worst weight sqnr_db": at_least(sqnr_db),
        "worst group sqnr_db": at_least(group_sqnr_db),
        "worst group gain": at_most(gain),
    }


def _arrays(cosine: float, worst_cosine: float, sqnr_db: float) -> Gates:
    return {"cosine": at_least(cosine), "worst row cosine": at_least(worst_cosine), "sqnr_db": at_least(sqnr_db)}


def _logits(kl_mean: float, kl_p99: float, kl_share: float, same_top: float) -> Gates:
    return {
        "kl_mean_nats": at_most(kl_mean),
        "kl_p99_nats": at_most(kl_p99),
        "kl_share": at_most(kl_share),
        "same_top_share": at_least(same_top),
    }


# A part's weights against the checkpoint's (`weights.WeightFigures`).
WEIGHTS: Mapping[Precision, Gates] = {
    "fp32": _weights(190.0, 190.0, 1.000001),
    "fp16": _weights(60.0, 40.0, 1.01),
    "bf16": _weights(50.0, 48.0, 1.01),
    "int8": _weights(25.0, 13.0, 1.10),
    "int4": _weights(12.0, 6.0, 1.35),
}
# What vision and projector give, against the same graph in fp32 on the same inputs.
ARRAYS: Mapping[Precision, Gates] = {
    "fp32": _arrays(0.99999, 0.9999, 80.0),
    "fp16": _arrays(0.9999, 0.999, 40.0),
    "bf16": _arrays(0.999, 0.99, 28.0),
    "int8": _arrays(0.985, 0.93, 15.0),
    "int4": _arrays(0.92, 0.60, 7.0),
}
# Next-token distributions of all positions.
LOGITS: Mapping[Precision, Gates] = {
    "fp32": {**_logits(1e-5, 1e-4, 1e-5, 0.99), **_arrays(0.99999, 0.9999, 80.0)},
    "fp16": _logits(0.001, 0.01, 0.0005, 0.97),
    "bf16": _logits(0.005, 0.05, 0.002, 0.95),
    "int8": _logits(0.12, 2.0, 0.03, 0.80),
    "int4": _logits(1.2, 10.0, 0.30, 0.40),
}
# The decoder in pages, with a u8 cache and the device's own arithmetic, against itself unpaged and in float.
SERVED: Gates = _logits(0.1, 1.5, 0.03, 0.75)
# The fp32 twin against transformers on torch: two programs that round in another order, nothing else.
REFERENCE_ARRAYS: Gates = _arrays(0.999999, 0.99999, 90.0)
REFERENCE_LOGITS: Gates = {**_logits(1e-6, 1e-5, 1e-6, 0.995), **REFERENCE_ARRAYS}
# One level of 255 is what two resamplers may round apart (none was seen: `tests/contracts/test_prepare.py`).
PREPROCESSING: Gates = {"differing prompts": at_most(0.0), "furthest pixel of 255": at_most(1.01)}
# What `--weights auto` asks besides, whatever the precision: that a reader could not tell the difference.
AUTO_ARRAYS: Gates = _arrays(0.99, 0.85, 18.0)
AUTO_LOGITS: Gates = _logits(0.05, 0.5, 0.03, 0.85)

COARSER: tuple[Precision, ...] = ("int4", "int8", "bf16", "fp16", "fp32")


def coarsest(precisions: list[Precision]) -> Precision:
    """The whole can be no nearer to its twin than its roughest part."""
    return min(precisions, key=COARSER.index)


def strictest(first: Gates, second: Gates) -> Gates:
    """Of each figure the narrower gate."""
    open_gate = Gate()
    names = dict.fromkeys([*first, *second])
    return {name: _narrower(first.get(name, open_gate), second.get(name, open_gate)) for name in names}


def _narrower(a: Gate, b: Gate) -> Gate:
    lows = [gate.at_least for gate in (a, b) if gate.at_least is not None]
    highs = [gate.at_most for gate in (a, b) if gate.at_most is not None]
    return Gate(at_least=max(lows, default=None), at_most=min(highs, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What was compared with what. `hint` says what to do when it misses; `where` names the worst place."""

    name: str
    precision: Precision
    twin: str
    inputs: str
    hint: str
    where: str = ""


def judge(subject: Subject, figures: Mapping[str, float], gates: Gates) -> Evidence:
    """The evidence, if every gated figure is met; a figure without a gate only informs.

    Raises GateError that names the part, each figure that missed and its gate.
    """
    assert gates.keys() <= figures.keys(), f"no figure for {sorted(gates.keys() - figures.keys())}"
    measures = []
    for name, value in figures.items():
        gate = gates.get(name, Gate())
        measures.append(Measure(name=name, value=value, at_least=gate.at_least, at_most=gate.at_most))
    missed = [measure for measure in measures if not measure.is_met]
    if missed:
        told = "; ".join(_tell(measure) for measure in missed)
        place = f" (worst in {subject.where})" if subject.where else ""
        raise GateError(
            f"{subject.name} in {subject.precision}, held against {subject.twin}: {told}{place}", hint=subject.hint
        )
    return Evidence(subject=subject.name, twin=subject.twin, inputs=subject.inputs, measures=tuple(measures))


def _tell(measure: Measure) -> str:
    asked = f"at least {measure.at_least:g}" if measure.at_least is not None else f"at most {measure.at_most:g}"
    return f"{measure.name} is {measure.value:.6g}, the gate is {asked}"
