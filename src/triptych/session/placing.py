"""A plan's choices with the device of each part, and why it lies there."""

from __future__ import annotations

from triptych.core.plan import Plan
from triptych.plan.placement import Model, with_placements
from triptych.plan.work import part_bytes
from triptych.session.planning import Question, shown_by


def placed(asked: Question, plan: Plan) -> Plan:
    manifest = None if asked.bundle is None else asked.bundle.manifest
    resident = (
        part_bytes(asked.spec, asked.held)
        if manifest is None
        else {part.name: float(manifest.num_bytes(part)) for part in manifest.parts}
    )
    model = Model(spec=asked.spec, held=asked.held, resident=resident, shown=shown_by(asked.spec))
    return with_placements(plan, model)
