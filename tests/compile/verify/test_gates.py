"""A gate refuses by name and number; the narrower of two holds."""

import math

import pytest

from triptych.compile.verify import gates
from triptych.compile.verify.gates import Subject, at_least, at_most, coarsest, judge, strictest
from triptych.errors import GateError

SUBJECT = Subject(name="vision", precision="int4", twin="fp32", inputs="drawn", hint="take int8", where="layers.3")


def test_figures_that_are_met_become_evidence_with_their_gates():
    evidence = judge(SUBJECT, {"cosine": 0.99, "tokens": 7.0}, {"cosine": at_least(0.95)})

    assert [(one.name, one.value, one.at_least) for one in evidence.measures] == [
        ("cosine", 0.99, 0.95),
        ("tokens", 7, None),
    ]
    assert (evidence.subject, evidence.twin, evidence.inputs) == ("vision", "fp32", "drawn")


def test_a_miss_names_the_part_the_figure_the_gate_and_the_way_out():
    with pytest.raises(GateError) as refused:
        judge(SUBJECT, {"cosine": 0.5, "kl": 2.0}, {"cosine": at_least(0.95), "kl": at_most(1.0)})

    told = str(refused.value)
    for word in (
        "vision in int4",
        "cosine is 0.5, the gate is at least 0.95",
        "kl is 2, the gate is at most 1",
        "layers.3",
    ):
        assert word in told
    assert "take int8" in told


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("gate", [at_least(0.0), gates.Gate(at_least=0.0, at_most=1.0)])
def test_a_figure_that_is_no_number_passes_no_gate(value, gate):
    with pytest.raises(GateError):
        judge(SUBJECT, {"cosine": value}, {"cosine": gate})


def test_a_gate_without_its_figure_is_our_own_mistake():
    with pytest.raises(AssertionError, match="no figure for"):
        judge(SUBJECT, {}, {"cosine": at_least(0.5)})


def test_the_narrower_gate_of_each_figure_holds():
    both = strictest(
        {"a": at_least(0.9), "b": at_most(2.0)}, {"a": at_least(0.5), "b": at_most(1.0), "c": at_most(3.0)}
    )

    assert both == {"a": at_least(0.9), "b": at_most(1.0), "c": at_most(3.0)}


def test_finer_precisions_have_narrower_gates_and_every_figure_has_one():
    for table in (gates.WEIGHTS, gates.ARRAYS, gates.LOGITS):
        assert set(table) == set(gates.COARSER)
        for coarse, fine in zip(gates.COARSER, gates.COARSER[1:], strict=False):
            assert table[coarse].keys() <= table[fine].keys()
            for name, gate in table[coarse].items():
                finer = table[fine][name]
                is_low = gate.at_least is not None and finer.at_least is not None and finer.at_least >= gate.at_least
                is_high = gate.at_most is not None and finer.at_most is not None and finer.at_most <= gate.at_most
                assert is_low or is_high or (coarse, fine) == ("bf16", "fp16"), (name, coarse, fine)


def test_the_whole_is_judged_by_its_coarsest_part():
    assert coarsest(["fp32", "int4", "int8"]) == "int4"
