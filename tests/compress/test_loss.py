"""The loss is measured against fp32, and a part that is changed is seen to be the one that costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.compress.tiny import model, sample

from triptych.compress.loss import Judge, measure, unmet
from triptych.compress.rounding import Grid, round_weight
from triptych.core.spec import Modality
from triptych.errors import GateError

SAMPLES = [sample(0), sample(1)]
DOWN = "layers.0.mlp.down_proj"


def rounded(made, name: str, bits: int):
    return {f"{name}.weight": round_weight(made.parts["decoder"].weights[name], Grid(bits=bits))}


def test_nothing_changed_costs_nothing():
    found = Judge(model(), SAMPLES).judge({})

    assert not found.divergence.any()
    assert found.same_top.all()
    assert not found.surprise.any()
    assert len(found.divergence) == 8


def test_the_divergence_is_that_of_the_two_distributions():
    made = model()
    changed = {"decoder": rounded(made, DOWN, 3)}
    exact = torch.softmax(made.logits(SAMPLES[0]).double(), -1)
    judge = Judge(made, SAMPLES)

    found = judge.judge(changed)

    tested = torch.softmax(made.logits(SAMPLES[0]).double(), -1)
    plain = (exact * (exact / tested).log()).sum(-1)
    np.testing.assert_allclose(found.divergence[:4], plain.detach().numpy(), atol=1e-6)
    own = SAMPLES[0].token_ids[SAMPLES[0].judged + 1]
    ratio = (exact / tested)[range(4), own].log()
    np.testing.assert_allclose(found.surprise[:4], ratio.detach().numpy(), atol=1e-5)


def test_fewer_bits_cost_more():
    made = model()
    changes = {bits: {"decoder": rounded(made, DOWN, bits)} for bits in (8, 4, 2)}
    judge = Judge(made, SAMPLES)

    costs = [judge.judge(changes[bits]).divergence.mean() for bits in (8, 4, 2)]

    assert 0 < costs[0] < costs[1] < costs[2]


def test_a_missed_gate_names_the_part_that_costs_most():
    made = model()
    changed = {"decoder": rounded(made, DOWN, 8), "embedding": rounded(made, "lm_head", 2)}

    with pytest.raises(GateError, match="the gate 0.0001; the embedding alone costs"):
        measure(Judge(made, SAMPLES), changed, fed="held out", max_kld=1e-4)


def test_evidence_tells_what_was_fed_and_each_part_alone():
    made = model()
    changed = {"decoder": rounded(made, DOWN, 4), "embedding": rounded(made, "lm_head", 8)}

    whole, *parts = measure(Judge(made, SAMPLES), changed, fed="held out from mine", max_kld=10.0)

    assert [one.subject for one in parts] == ["decoder", "embedding"]
    assert whole.inputs == "8 answer tokens of 2 samples, 0 with pictures, held out from mine"
    assert whole.measures[0].at_most == 10.0
    assert whole.measures[0].is_met


def test_a_tower_that_no_judged_sample_meets_has_no_evidence():
    blind = measure(Judge(model(), SAMPLES), {"vision": {"x.weight": np.zeros(1)}, "decoder": {}}, fed="held out")
    silent = replace(SAMPLES[0], modality=np.full(12, Modality.IMAGE, np.uint8), is_answer=np.zeros(12, bool))
    shown = replace(silent, is_answer=SAMPLES[0].is_answer)

    assert [one.subject for one in blind] == ["whole"]
    assert unmet([*SAMPLES, silent], ["vision", "projector", "decoder"]) == ["vision", "projector"]
    assert unmet([*SAMPLES, shown], ["vision", "projector", "decoder"]) == []
