"""AWQ and MBQ: the plain search, equality at weight 1, and modalities that drop out."""

import numpy as np
import pytest
import torch

from triptych.compress.awq import EXPONENTS, Channels, balanced, search
from triptych.compress.rounding import Grid, fake_quantized
from triptych.core.spec import Modality
from triptych.errors import CheckpointError

GRID = Grid(bits=3, group_size=32)
TEXT, IMAGE, AUDIO = Modality.TEXT, Modality.IMAGE, Modality.AUDIO


def tokens(seed: int, count: int = 200, width: int = 64) -> torch.Tensor:
    """A few channels are loud, others in each modality."""
    rng = np.random.default_rng(seed)
    loud = np.exp(1.5 * rng.standard_normal(width))
    return torch.from_numpy((rng.standard_normal((count, width)) * loud).astype(np.float32))


def linears(seed: int = 9, rows: int = 16, width: int = 64) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal((rows, width)).astype(np.float32)) for _ in range(2)]


def output_error(weights: list[torch.Tensor], x: torch.Tensor, scales: torch.Tensor) -> float:
    """Literally: the products' difference, token by token."""
    total = 0.0
    for weight in weights:
        rounded = fake_quantized(weight * scales, GRID, clip=False)
        total += float(((x / scales) @ rounded.T - x @ weight.T).square().sum())
    return total


def test_the_search_finds_the_exponent_of_least_output_error():
    x, weights = tokens(0), linears()
    seen = Channels.of(x)

    found = search(weights, seen, GRID)

    errors = {}
    for exponent in EXPONENTS:
        scales = x.abs().mean(0).pow(exponent)
        scales = scales / (scales.max() * scales.min()).sqrt()
        errors[exponent] = output_error(weights, x, scales)
    assert found.exponent == min(errors, key=errors.__getitem__)
    assert found.error == pytest.approx(min(errors.values()), rel=1e-3)  # gram against tokens, both f32
    assert found.plain == pytest.approx(errors[0.0], rel=1e-3)
    assert found.error < 0.95 * found.plain


def test_weight_one_everywhere_is_awq_bit_for_bit():
    seen = {TEXT: Channels.of(tokens(0)), IMAGE: Channels.of(tokens(1)), AUDIO: Channels.of(tokens(2))}

    plain, weighed = balanced(seen), balanced(seen, {TEXT: 1.0, IMAGE: 1.0, AUDIO: 1.0})

    assert torch.equal(plain.gram, weighed.gram)
    assert torch.equal(plain.mean, weighed.mean)
    one, two = search(linears(), plain, GRID), search(linears(), weighed, GRID)
    assert torch.equal(one.scales, two.scales)
    assert one.error == two.error


@pytest.mark.parametrize("quiet", [TEXT, IMAGE, AUDIO])
def test_weight_zero_is_calibration_without_that_modality(quiet):
    seen = {TEXT: Channels.of(tokens(0)), IMAGE: Channels.of(tokens(1)), AUDIO: Channels.of(tokens(2))}
    others = {modality: channels for modality, channels in seen.items() if modality is not quiet}

    found = search(linears(), balanced(seen, {quiet: 0.0}), GRID)

    assert torch.equal(found.scales, search(linears(), balanced(others), GRID).scales)


def test_a_vanishing_weight_comes_to_the_same():
    seen = {TEXT: Channels.of(tokens(0)), AUDIO: Channels.of(tokens(2))}

    found = search(linears(), balanced(seen, {AUDIO: 1e-6}), GRID)

    without = search(linears(), balanced({TEXT: seen[TEXT]}), GRID)
    torch.testing.assert_close(found.scales, without.scales, rtol=1e-4, atol=0)


def test_a_heavier_modality_loses_less():
    speech, text, weights = tokens(2), tokens(0), linears()
    seen = {TEXT: Channels.of(text), AUDIO: Channels.of(speech)}

    lost = []
    for weight in (0.01, 100.0):
        mix = balanced(seen, {AUDIO: weight})
        lost.append(output_error(weights, speech, search(weights, mix, GRID).scales))

    assert lost[1] < lost[0]


def test_no_weight_at_all_is_refused():
    with pytest.raises(CheckpointError, match="no token has any weight"):
        balanced({TEXT: Channels.of(tokens(0))}, {TEXT: 0.0})
