"""Operations of a graph: what its products multiply, for one tile."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.plan.graphs import flops_of


def graph(
    folder: Path, kind: str, inputs: tuple[tuple[int, ...], ...], output: tuple[int, ...], data: str = ""
) -> Path:
    def ports(sizes: tuple[tuple[int, ...], ...]) -> str:
        return "".join("<port>" + "".join(f"<dim>{dim}</dim>" for dim in one) + "</port>" for one in sizes)

    layer = (
        f'<layer type="{kind}"><data {data}/><input>{ports(inputs)}</input><output>{ports((output,))}</output></layer>'
    )
    path = folder / "vision.xml"
    path.write_text(f'<net><layers><layer type="Relu"/>{layer}</layers></net>')
    return path


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "data", "products"),
    [
        ("MatMul", ((-1, 49, 64), (32, 64)), (-1, 49, 32), 'transpose_b="true"', 49 * 64 * 32),
        ("MatMul", ((-1, 64, 49), (64, 32)), (-1, 49, 32), 'transpose_a="true"', 49 * 64 * 32),
        ("Convolution", ((-1, 3, 224, 224), (16, 3, 3, 3)), (-1, 16, 112, 112), "", 16 * 112 * 112 * 27),
        ("GroupConvolution", ((-1, 16, 8, 8), (16, 1, 1, 5, 5)), (-1, 16, 8, 8), "", 16 * 64 * 25),
    ],
)
def test_a_product_takes_two_operations_for_each_weight_and_place(tmp_path, kind, inputs, output, data, products):
    assert flops_of(graph(tmp_path, kind, inputs, output, data)) == 2 * products
