"""Data sheets: each becomes a device that agrees with itself, at the roof and no higher."""

from __future__ import annotations

import pytest

from triptych.errors import ConfigError
from triptych.plan import sheets
from triptych.plan.measure import check


@pytest.mark.parametrize("name", sheets.names())
def test_every_sheet_agrees_with_itself(name):
    device = check(sheets.load(name))

    assert device.source == "data sheet"
    assert device.notes
    memory = device.tiers[-1].bytes_per_s.value
    assert all(rate.weight_bytes_per_s.value <= memory * 1.0001 for rate in device.rates)


def test_one_row_is_bound_by_memory_and_many_by_arithmetic():
    rates = {rate.rows: rate for rate in sheets.load("H200").rates if rate.precision == "bf16"}

    assert rates[1].weight_bytes_per_s.value == 4.8e12
    assert rates[1].flops.value == 4.8e12
    assert rates[4096].flops.value == 989e12


def test_four_bits_are_read_as_four_bits_and_computed_as_what_they_are_widened_to():
    def peak(name, precision):
        return max(rate.flops.value for rate in sheets.load(name).rates if rate.precision == precision)

    assert peak("h100", "int4") == peak("h100", "bf16")
    assert peak("epyc", "int4") == peak("epyc", "int8")


def test_devices_of_one_machine_have_a_way_between_them():
    def ways(name):
        return {(link.source, link.target): link.kind for link in sheets.load(name).links}

    assert ways("h200") == {("cpu:0", "gpu:0"): "pcie", ("gpu:0", "gpu:1"): "nvlink"}
    assert ways("l40s") == {("cpu:0", "gpu:0"): "pcie", ("gpu:0", "gpu:1"): "pcie"}
    assert ways("l4") == {("cpu:0", "gpu:0"): "pcie"}
    assert ways("orin") == {}


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="no data sheet of 'tpu'") as refused:
        sheets.load("tpu")

    assert "h200, h100" in str(refused.value)
