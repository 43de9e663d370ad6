"""Where a plan puts each part of its model, and where its steps lie on the roofline."""

from __future__ import annotations

from triptych.core.plan import Plan
from triptych.plan.placement import Model, with_placements
from triptych.plan.plots import Mark
from triptych.plan.roofline import Roofline
from triptych.plan.work import Step, decoder_work
from triptych.session.planning import Question, shown_by

CACHED = 256  # tokens of each answer, in the step that is drawn


def placed(asked: Question, plan: Plan) -> Plan:
    """Every choice with its parts' devices and the reason."""
    model = Model(spec=asked.spec, held=asked.held, resident=asked.resident, shown=shown_by(asked.spec))
    return with_placements(plan, model)


def step_marks(asked: Question, plan: Plan) -> tuple[Mark, ...]:
    """Where the parts of the first choice's step of answers lie on its device's roofline, by the device's figures."""
    best = plan.choices[0]
    device = next(device for device in plan.devices if device.name == best.device)
    step = Step(answers=best.batch, cached=best.batch * CACHED)
    seconds = Roofline(spec=asked.spec, held=asked.held, device=device).parts(step)
    works = decoder_work(asked.spec.decoder, asked.held, step)
    return tuple(
        Mark(name=name, x=work.flops / (work.weight_bytes + work.other_bytes), y=work.flops / seconds[name].total_s)
        for name, work in works.items()
        if name != "last"  # it lies where `head` does
    )
